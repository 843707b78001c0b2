"""What ``gpushare advise`` answers on a host: the way, its headline and numbers, the lines to type, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from gpushare.advice.questions import QUESTIONS, answer_of, with_answer
from gpushare.advice.rules import verdicts, winner
from gpushare.base.model import ComputeMode
from gpushare.connect import connect
from gpushare.sim.admin import add_process
from tests.advice.conftest import situation_of
from tests.cli.advise.asking import advised, commands, on_a_terminal, told
from tests.cli.drive import Cli, Refused, World, Write

MIB = 1024**2
SURE = "--users same --no-saturating --isolation none --latency none --pattern steady"
PAIR = "--production 1 --opportunistic 1 --users same"
APART = "--processes 2 --memory 3G --users different --pattern interactive --isolation full"
UNEQUAL = "--processes 2 --memory 12G --users different --isolation full --root --needs weights="
GAPS = "--production 1 --opportunistic 1 --users different --needs gaps --no-root"
DECIDED = f"{PAIR} --memory 4G --no-root"
LINE = "gpushare run -g 0"
SPARED = f"{LINE} --opportunistic --for serve --yield"


@dataclass(frozen=True)
class Texts:
    """Texts of which each stands in a field, or none."""

    texts: tuple[str, ...]
    there: bool = True

    def hold(self, value: Any) -> bool:
        text = value if isinstance(value, str) else "\n".join(value or ())
        return all((one in text) is self.there for one in self.texts)


def has(*texts: str) -> Texts:
    return Texts(texts)


def lacks(*texts: str) -> Texts:
    return Texts(texts, there=False)


# What is tested, the host, the words, and fields of the answer: "told" is what the lines are for. A field of which
# texts are both there and not has "no FIELD" for the latter.
ANSWERS: list[tuple[str, str, str, dict[str, Any]]] = [
    # Memory: of each process, of all, and of the limits.
    ("unequal memory and shares", "l40s", "--memory 20G,10G --needs weights=2:1 --users different --saturating",
     {"winner": "slices",
      "commands": [f"{LINE} --weight 2 --memory 20980M -- CMD", f"{LINE} --weight 1 --memory 10740M -- CMD"]}),
    # Nobody said that one does not fill the GPU: as many at a time as fit, and not several by MPS.
    ("as many at a time as fit", "a100-80gb", "--processes 4 --memory 30G --users same",
     {"winner": "whole-gpu", "commands": [f"{LINE} --wait --swap request --memory 31220M -- CMD"]}),
    # 4 x 30 GiB and 4 contexts of 500 MiB, on 80 GiB of which 2 % stay free.
    ("by how much it does not fit", "a100-80gb", "--processes 4 --memory 30G --users same --saturating",
     {"winner": "whole-gpu", "memory.needed_bytes": (4 * 30 * 1024 + 4 * 500) * MIB, "memory.most": 2}),
    ("nothing fits", "t4", "--processes 2 --memory 24G",
     {"winner": None, "commands": [], "why": has("9.8 GiB too much")}),
    # A job of 11520 MiB is an MPS client of 512 MiB less.
    ("limits add up", "h100",
     "--production 1 --opportunistic 2 --memory 10G --users same --latency 50ms --way mps-priority",
     {"commands": ["gpushare mps start -g 0", f"{LINE} --memory 11520M --name serve -- CMD",
                   f"{LINE} --threads 30 --memory 11520M --priority low --name other-1 -- CMD"],
      "memory.limits_bytes": 3 * (11520 - 512) * MIB}),
    ("limits that no command sets have no sum", "h100", "--production 1 --opportunistic 1 --latency 50ms --no-input",
     {"commands": lacks("--memory"), "memory.limits_bytes": None, "memory.sentence": None}),
    ("the memory of instances is summed in each", "a100-80gb",
     "--processes 3 --memory 12G --users different --pattern steady",
     {"memory.sentence": "in each of 3 2g.20gb 12.5 GiB of 19.5 GiB, CUDA contexts counted: 7.0 GiB left"}),
    ("a farm has no more at a time than it has", "4xh100", f"--processes 5 --memory 10G -g 0-3 {SURE}",
     {"commands": has("--copies 5 --parallel 5 ")}),
    ("no more pods than fit", "a100-40gb", "--processes 20 --memory 3G --users same --no-saturating --needs kubernetes",
     {"commands": has("--replicas 11 ")}),
    # What was not said lowers the confidence.
    ("neither count nor memory", "a100-80gb", SURE, {"winner": "mps", "confidence": "medium",
     "confidence_why": "not given: the number of processes, the memory of a process"}),
    ("no memory", "a100-80gb", f"{SURE} --processes 4",
     {"winner": "mps", "confidence": "medium", "confidence_why": "not given: the memory of a process"}),
    ("all is given", "a100-80gb", f"{SURE} --processes 4 --memory 2G",
     {"confidence": "medium", "confidence_why": lacks("not given")}),
    # The headline.
    ("by room", "t4", "--processes 4 --memory 4G --users same", {"answer": "as many at a time as fit",
     "commands": [f"{LINE} --wait --swap request --memory 4596M -- CMD"]}),
    # In line and without a limit, a job claims the whole GPU.
    ("each alone", "t4", "--processes 4 --memory 4G --users same --saturating",
     {"answer": "one at a time, each with the whole GPU", "commands": [f"{LINE} --slice 2ms --wait --memory 90% --over warn -- CMD"]}),
    ("by room on two", "2xt4", "--processes 8 --memory 4G --users same", {"answer": "as many at a time as fit"}),
    ("a paused job is no queue", "l4", f"{PAIR} --memory 5G --bandwidth-bound --no-root",
     {"answer": "the whole GPU for production, the other job paused meanwhile", "commands": has("--yield pause")}),
    # People's sessions do not end: each needs an instance or a GPU.
    ("sessions on one", "l40s", APART, {"winner": None}),
    ("sessions on two", "2xl40s", APART, {"answer": "a GPU for each"}),
    ("sessions in instances", "a100-40gb", APART, {"winner": "mig"}),
    ("an engine asleep", "rtx-4090", "--like serving --processes 2 --memory 14G --users same",
     {"winner": "fix-app", "told": has("less memory for each", "sleep")}),
    ("an engine that wakes up too late", "rtx-4090",
     "--like serving --processes 2 --memory 14G --users same --latency 20ms",
     {"winner": "fix-app", "told": has("less memory for each"), "no told": lacks("sleep")}),
    ("equal changes are one command", "8xh100", "--processes 16 --memory 4G --users same --no-saturating",
     {"commands": has("gpushare mps start -g 0-7 "), "undo": ["gpushare mps stop -g 0-7"]}),
    # Ranks that wait for each other get a GPU each, and no queue.
    ("ranks", "4xa100-80gb", "--processes 3 --needs nccl --users same",
     {"commands": ["gpushare run -g 0-2 --gpus 3 --wait -- CMD"],
      "told": ["start it once: each of its 3 processes gets a GPU"]}),
    ("ranks on too few", "2xa100-80gb", "--processes 3 --cooperating --saturating --users same",
     {"winner": "whole-gpu", "told": ["one process per GPU: 3 are requested, and 2 GPUs are free here"]}),
    ("ranks on one", "a100-80gb", "--processes 3 --cooperating --saturating --users same", {"winner": "whole-gpu",
     "told": ["the processes depend on each other and cannot run in turn: start it with one process"]}),
    ("virtual machines get no lock of the host", "t4", "--processes 2 --needs vms --needs bandwidth-qos",
     {"winner": "whole-gpu", "commands": [], "told": has("PCI passthrough")}),
    ("production first", "t4", PAIR, {"winner": "mps-priority"}),
    # Before Volta nobody measured a pause, and there are no limits.
    ("production before Volta", "p100", PAIR, {"told": lacks("--yield pause")}),
    ("before Volta", "p100", "--processes 8 --users same --no-saturating",
     {"winner": "mps", "commands": lacks("--threads"), "measure": lacks("--threads")}),
    # Shares.
    ("rounded once", "l40s", "--memory 1G --saturating --users same --needs weights=8:407:4:9:760",
     {"told": has("the program with 64 of 100.1")}),
    ("bandwidth", "l40s", "--processes 2 --memory 5G --users same --saturating --bandwidth-bound --needs weights=2:1",
     {"winner": "slices"}),
    ("no bandwidth", "l40s", "--processes 2 --memory 5G --users same --saturating --needs weights=2:1",
     {"winner": lacks("mig")}),
    ("across users", "t4", "--users different --needs weights=30:70",
     {"winner": "slices", "commands": [f"{LINE} --weight 1 -- CMD", f"{LINE} --weight 2.33 -- CMD"]}),
    # 4g and 2g are 67 and 33 of 100; an instance of each size has its own line.
    ("instances of unequal size", "h100", f"{UNEQUAL}33:67", {"conditions": lacks("fixed sizes"), "commands": [
        "gpushare mig apply -g 0 4g.40gb 2g.20gb",
        "gpushare run --mig 2g.20gb -- CMD", "gpushare run --mig 4g.40gb -- CMD"]}),
    ("instances of nearly these sizes", "h100", f"{UNEQUAL}30:70",
     {"conditions": has("2g.20gb, 4g.40gb are 33:67, asked for are 30:70")}),
    # Across users each sets the slice of the own job, and a request fits into that of production.
    ("gaps across users", "t4", GAPS, {"winner": "slices", "conditions": has("does not document these calls"),
     "commands": [f"{LINE} --production serve -- CMD", f"{LINE} --slice 500us --name other -- CMD"]}),
    ("gaps for sure", "t4", f"{GAPS} --isolation none --no-production-saturating", {"confidence": "medium"}),
    # Gaps of production decide between slices and caps.
    ("gaps", "h200", f"{DECIDED} --needs gaps",
     {"winner": "slices", "commands": has(f"{SPARED} slices --memory 4596M --name other -- CMD")}),
    ("no gaps", "h200", f"{DECIDED} --needs no-gaps", {"winner": "mps-priority"}),
    ("gaps unknown", "h200", DECIDED, {"winner": "mps-priority"}),
    ("gaps and isolation", "h200", f"{DECIDED} --isolation fault",
     {"winner": "slices", "commands": has(f"{SPARED} slices --memory 4596M --name other -- CMD")}),
    ("production runs", "h200", f"{DECIDED} --running", {"winner": "slices"}),
    ("production fills it", "h200", f"{DECIDED} --latency 10ms --production-saturating", {"winner": "whole-gpu"}),
    # A kind of work has its usual properties.
    ("jupyter", "t4", "--like jupyter --processes 5 --users different --trusted",
     {"winner": "timeslice", "notes": has("like jupyter: ", "--pattern interactive")}),
    ("spark", "t4", "--like spark --processes 12 --memory 700M --users same",
     {"winner": "mps", "notes": has("like spark: ", "--users same")}),
    ("ci", "t4", "--like ci --processes 5 --memory 2G --users same",
     {"winner": "timeslice", "notes": has("like ci: ", "--pattern bursty")}),
    ("rendering", "t4", "--like rendering --processes 2 --memory 4G --users same",
     {"winner": "timeslice", "notes": has("like rendering: ", "--needs graphics")}),
    ("hpc", "t4", "--like hpc --processes 8 --memory 1G --users same",
     {"winner": "mps", "notes": has("like hpc: ", "--cooperating")}),
    ("training", "t4", "--like training --processes 2 --memory 4G --users same",
     {"winner": "whole-gpu", "notes": has("like training: ", "--saturating")}),
    ("training, but", "t4", "--like training --no-saturating --processes 2 --memory 4G --users same",
     {"winner": "mps", "notes": has("like training: ", "--saturating")}),
    # A board without vGPU is passed through whole.
    ("vgpu", "t4", "--processes 2 --needs vms", {"winner": "vgpu", "vgpu": "fits with a condition"}),
    ("no vgpu", "rtx4090", "--processes 2 --needs vms", {"winner": "whole-gpu", "vgpu": "refused"}),
    # What is too old for static partitions is named.
    ("static partitions", "t4", "--processes 2 --needs containment",
     {"mps-static why": has("this host has an older GPU (Tesla T4) with driver 580")}),
    ("refused as asked for", "t4", "--processes 2 --memory 5G --users different --isolation fault --way mig",
     {"explained.outcome": "refused"}),
    ("a list of needs", "t4", "--processes 2 --needs nccl,no-p2p,cuda-graphs",
     {"case.nccl": True, "case.p2p": False, "case.cuda_graphs": True, "case.ipc": None}),
    ("several lists of needs", "t4", "--processes 2 --needs nccl --needs NO-P2P,cuda_graphs",
     {"case.nccl": True, "case.p2p": False, "case.cuda_graphs": True, "case.ipc": None}),
    # Also where it is unknown whether one of them fills the GPU: that is a condition, and no reason for a veto.
    ("more programs than clients", "a100-80gb", "--processes 100 --memory 500M --users same", {"winner": "mps",
     "commands": has("--copies 100 --parallel 48 "), "conditions": has("only if one process does not fill the GPU")}),
    ("more programs than memory", "a100-80gb", "--processes 100 --memory 2G --users same", {"winner": "mps",
     "commands": has("--copies 100 --parallel 31 "), "conditions": has("only if one process does not fill the GPU")}),
    # What is on each GPU; "at a time, each" would be of all GPUs together.
    ("how many on each", "8xh100", "--processes 20 --memory 2G --users same",
     {"why": has("spread over", "at most 3 on each of GPUs 0-7"), "no why": lacks("at a time, each")}),
    ("one on each", "3xl4,h100", "--processes 12 --users different --untrusted --isolation full --memory 6G",
     {"why": has("spread over", "one at a time, each with the whole GPU")}),
]  # fmt: skip


def field(data: Any, name: str) -> Any:
    """Return a field of an answer."""
    first, _, second = name.removeprefix("no ").partition(".")
    verdicts = {verdict["way"]: verdict for verdict in data["verdicts"]}
    if first.endswith(" why"):
        return [reason["text"] for reason in verdicts[first.removesuffix(" why")]["reasons"]]
    if first in verdicts:
        return verdicts[first]["outcome"]
    if first == "case":
        return data["case"]["workloads"][0][second]
    if first in {"commands", "undo"}:
        return commands(data, first)
    value = told(data) if first == "told" else data[first]
    return value[second] if second else value


def faults(data: Any, expected: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of an answer that are not as expected."""
    found = {name: field(data, name) for name in expected}
    holds = {name: value.hold if isinstance(value, Texts) else value.__eq__ for name, value in expected.items()}
    return [(name, value) for name, value in found.items() if holds[name](value) is not True]


@pytest.mark.parametrize(("host", "words", "expected"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_the_answer(cli: Cli, host: str, words: str, expected: dict[str, Any]) -> None:
    assert faults(advised(cli, host, words), expected) == []


NAMED = "name: NAME, command: ./NAME, weights: yes, memory: 2G"


def named(more: str) -> str:
    return "[" + ", ".join(f"{{{NAMED.replace('NAME', name)}, {more}}}" for name in "abc") + "]"


# As above, of a file.
FILES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("production and training", "h200",
     ("[{name: api, role: production, users: same, memory: 20G, command: python serve.py},"
      " {name: train, role: opportunistic, users: same, memory: 40G, saturating: yes}]"),
     {"winner": "mps-priority",
      "commands": ["gpushare mps start -g 0", f"{LINE} --memory 21760M --name api -- python serve.py",
                   f"{LINE} --threads 60 --memory 42240M --priority low --name train -- CMD"]}),
    ("the other job could be paused", "h200",
     "workloads: [{role: production, users: same, saturating: yes}, {role: opportunistic, users: same}]",
     {"commands": [f"{LINE} --production serve -- CMD", f"{SPARED} pause --name other -- CMD"]}),
    ("a kind of work with needs of its own", "t4",
     "workloads: [{like: rendering, processes: 2, needs: [no-graphics, ipc]}]",
     {"case.like": "rendering", "case.graphics": False, "case.ipc": True, "case.pattern": "bursty"}),
    ("each is placed", "2xa30", "\n".join(f"- {{name: {n}, user: {n}, memory: 10G, isolation: fault}}" for n in "abc"),
     {"winner": "mig", "why": has("2 on GPU 0 (MIG), 1 on GPU 1 (the whole GPU)")}),
    ("each program with its share of threads", "l40s", named("users: same, saturating: no"),
     {"commands": has(" --threads ", "./a\n", "./b\n", "./c")}),
    ("each program with its share of time", "l40s", named("users: different, saturating: yes"),
     {"commands": has(" --weight ", "./a\n", "./b\n", "./c")}),
]  # fmt: skip


@pytest.mark.parametrize(("host", "text", "expected"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_the_answer_for_a_file(cli: Cli, write: Write, host: str, text: str, expected: dict[str, Any]) -> None:
    assert faults(advised(cli, host, "--root -f", write(text)), expected) == []


def test_a_file_lists_needs_too(cli: Cli, write: Write) -> None:
    file = write("workloads: [{processes: 2, needs: [nccl, no-p2p]}, {processes: 1, needs: 'ipc'}]\n")
    first, second = advised(cli, "h200", "--needs vms -f", file)["case"]["workloads"]
    assert (first["nccl"], first["p2p"], first["vms"]) == (True, False, True)
    assert (second["nccl"], second["ipc"], second["vms"]) == (None, True, True)


def test_a_list_may_have_a_workload_with_several_shares(cli: Cli, write: Write) -> None:
    file = write("[{memory: 5G, weights: [30, 70], users: same}, {memory: 5G, weights: [50], users: same}]")
    for host, threads in (
        ("l40s", [["20"], ["46.7"], ["33.3"]]),
        # On two GPUs, each process is started once, with the share that it has of its GPU.
        ("2xl40s", [["37.5"], ["62.5"], []]),
    ):
        lines = [line for line in commands(advised(cli, host, "-f", file)) if " run " in line]
        assert [line.partition("--threads ")[2].split()[:1] for line in lines] == threads


def test_a_file_says_the_same_as_flags(cli: Cli, refused: Refused, write: Write) -> None:
    for text, host, flags in (
        ("{processes: 4, memory: 2G, users: same, saturating: no}", "t4", "--processes 4 --memory 2G"),
        ("{memory: [20G, 10G], users: same, saturating: no}", "l40s", "--memory 20G,10G"),
        ("{memory: '20G,10G', users: same, saturating: no}", "l40s", "--memory 20G,10G"),
    ):
        # One workload needs no list.
        by_file = advised(cli, host, "-f", write(text if "[" in text else f"workloads:\n- {text}\n"))
        assert by_file == advised(cli, host, f"{flags} --users same --no-saturating")
    for text, words, code in (
        ("{memory: [20G, 10G], processes: 3}", (), "bad_count"),
        ("{memory: [20G, [10G]]}", (), "bad_size"),
        ("[{processes: 1}, {processes: 2}]", ("--processes", "3"), "bad_combination"),
        ("{memory: 2G}", ("--processes", "3"), "bad_combination"),
        # Shares of which one is nothing next to the others.
        ("[{weights: []}]", (), "bad_value"),
        ("[{weights: '1:999:999:999'}]", (), "bad_value"),
        ("[{weights: '1:999'}, {weights: 999}]", (), "bad_value"),
    ):
        refused("advise", "-f", write(text), *words, code=code, exit_code=2)
    file = write("workloads: [{user: a, users: same}, {user: b, users: same}]")
    said = refused("advise", "-f", file, code="bad_combination", exit_code=2)
    assert "users: same contradicts the user names a, b" in said


@pytest.mark.parametrize("memory", ["381M", "1G", "3G", "6G", "2900M"])
@pytest.mark.parametrize("host", ["a30", "a100-40gb"])
def test_one_number_runs_at_a_time(cli: Cli, host: str, memory: str) -> None:
    data = advised(cli, host, f"--processes 60 --memory {memory} --users same --no-saturating")
    (parallel,) = re.findall(r"--parallel (\d+)", " ".join(commands(data)))
    assert f"not all of them fit at the same time: {parallel} at a time, the others wait" in data["conditions"]
    sentence = data["memory"]["sentence"]
    assert "too much" not in sentence or f"too much, {parallel} at a time" in sentence


def test_groups_are_split_into_as_many_copies_as_were_asked_for(cli: Cli) -> None:
    lines = " ".join(commands(advised(cli, "2xt4", "--processes 4 --groups 3 --memory 2G --users same")))
    copies = re.findall(r"--copies (\d+)", lines)
    assert copies
    assert sum(map(int, copies)) == 4


# -- what is on the host ----------------------------------------------------------------------------


def test_a_desktop_is_no_program_to_share_with(cli: Cli) -> None:
    host = "sim:rtx-4090"
    cli("sim", "add", "--graphics", "--name", "Xorg", "--memory", "600M", "--user", "root", host=host).ok()
    assert advised(cli, host, "--processes 1 --code")["winner"] == "streams"
    assert advised(cli, host, "--processes 1 --no-code")["answer"] == "the whole GPU"
    large = advised(cli, host, "--processes 1 --no-code --memory 23G")
    assert any("programs that run now use 600 MiB" in text for text in large["conditions"])
    cli("sim", "add", "--memory", "2G", "--user", "1001", host=host).ok()
    assert advised(cli, host, "--processes 1 --code")["winner"] == "timeslice"


def test_one_program_in_an_instance_is_told_of_streams(cli: Cli) -> None:
    World("sim:a100-80gb").mig("3g.40gb", "2g.20gb")
    data = advised(cli, "a100-80gb", "--processes 1 --memory 9G --code")
    assert commands(data) == ["gpushare run --mig 2g.20gb -- CMD"]
    assert any("separate streams" in what for what in told(data))


def test_a_gpu_that_somebody_uses_is_not_given_to_a_rank(cli: Cli) -> None:
    add_process("sim:3xa100-80gb", "1", memory_bytes=1024**3)
    data = advised(cli, "3xa100-80gb", "--processes 3 --needs nccl --users same")
    assert told(data)[0] == "one process per GPU: 3 are requested, and 2 GPUs are free here"


def test_one_process_beside_programs_of_other_users(cli: Cli) -> None:
    cli("sim", "add", "--memory", "20G", "--user", "nobody", host="sim:h200").ok()
    data = advised(cli, "h200", "--processes 1 --memory 15G --users different")
    assert data["winner"] == "timeslice"
    assert "stay as they are" in data["why"][0]


def test_where_only_mps_shares_it_is_measured(cli: Cli) -> None:
    connect("sim:h200").nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    words = "--processes 2 --memory 5G --users same --needs cuda-graphs --no-root"
    assert advised(cli, "h200", words)["winner"] == "measure"


# -- questions --------------------------------------------------------------------------------------


def test_count_and_memory_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = on_a_terminal(monkeypatch, "many\n4\n2\n2G\nperhaps\nyes\nnone\nno\nno\nsteady\n")
    assert asked.startswith("How many processes are to share the GPU?")
    assert asked.count("How many processes") == asked.count("same user?") == 2
    assert asked.index("How much GPU memory") < asked.index("same user?")
    for said in ("'many' is not a valid number", "has no unit", "choose one of: yes, no"):
        assert said in asked
    assert out.startswith(("MPS", "\x1b"))
    assert "--threads 50 --memory 2816M" in out
    assert "confidence: medium" in out


def test_processes_of_unequal_memory_may_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = on_a_terminal(monkeypatch, "2\n4G,3G,1G\n4G,three\n4G,3G\n", *SURE.split())
    assert asked.count("How much GPU memory") == 3
    assert "3 sizes of memory do not match the number of processes or shares" in asked
    assert "'three' is not a memory size" in asked
    given, _ = on_a_terminal(monkeypatch, "", "--memory", "4G,3G", *SURE.split())
    assert out == given


@pytest.mark.parametrize("words", ["--no-input", "-o json", "--way mps"])
def test_nothing_is_asked_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, cli: Cli, words: str) -> None:
    assert "?" not in cli("advise", "--processes", "4").ok().err, "not a terminal"
    assert "?" not in on_a_terminal(monkeypatch, "", "--processes", "4", *words.split())[1]


def test_what_is_known_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = on_a_terminal(monkeypatch, "", "--processes", "1", "--no-code", "--saturating")
    assert "belong to the same user" not in asked
    # An empty answer leaves a question open.
    _, asked = on_a_terminal(monkeypatch, "\n" * 9, "--processes", "4", "--memory", "2G")
    assert asked.count("same user?") == 1
    # The end of the input ends the line of the question.
    _, asked = on_a_terminal(monkeypatch, "", "--processes", "4")
    assert asked.rstrip(" ").endswith("unknown] \n")


@pytest.mark.parametrize("fills", [True, False])
def test_each_job_of_a_pair_is_asked_and_said_for_itself(cli: Cli, fills: bool) -> None:
    """The same answer as an option and to the question leads to the same way."""
    pair = ({"role": "production", "users": "same"}, {"role": "opportunistic", "users": "same"})
    fields = [question.field for question in QUESTIONS if question.pair]
    assert fields[:3] == ["production_saturating", "gaps", "saturating"]
    for name in (fields := [fields[0], fields[2]]):
        asked = with_answer(situation_of(*pair, host="h200"), name, fills)
        assert [answer_of(asked, other) for other in fields] == [fills if name == other else None for other in fields]
        best = winner(verdicts(asked))
        assert best is not None
        option = f"--{'' if fills else 'no-'}{name.replace('_', '-')}"
        assert advised(cli, "h200", f"{PAIR} {option}")["winner"] == best.way.value
        assert (best.way.value == "whole-gpu") is (fills and name == "production_saturating")
