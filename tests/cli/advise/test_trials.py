"""``gpushare advise`` tried as somebody would who knows the documents: what was wrong once, and is right now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpushare.advice.questions import QUESTIONS, answer_of, with_answer
from gpushare.advice.rules import verdicts, winner
from gpushare.base.model import ComputeMode
from gpushare.connect import connect
from gpushare.sim.admin import add_process, set_fault
from tests.advice.conftest import situation_of
from tests.cli.advise.test_advise import commands, on_a_terminal


def advice(cli: Any, *words: str, host: str) -> Any:
    return cli("advise", *words, host=host, output="json").ok().data


def test_ranks_that_wait_for_each_other_get_a_gpu_each_and_no_queue(cli: Any) -> None:
    data = advice(cli, "--processes", "3", "--needs", "nccl", "--users", "same", host="sim:4xa100-80gb")
    (line,) = commands(data)
    assert line == "gpushare run -g 0-2 --gpus 3 --wait -- CMD"
    assert data["commands"][0]["what"] == "start it once: each of its 3 processes gets a GPU"


@pytest.mark.parametrize(
    ("host", "what"),
    [
        ("sim:2xa100-80gb", "one process per GPU: 3 are requested, and 2 GPUs are free here"),
        ("sim:a100-80gb", "the processes depend on each other and cannot run in turn: start it with one process"),
    ],
)
def test_ranks_on_too_few_gpus_are_told_so(cli: Any, host: str, what: str) -> None:
    words = ("--processes", "3", "--cooperating", "--saturating", "--users", "same")
    data = advice(cli, *words, host=host)
    assert data["winner"] == "whole-gpu"
    assert [line["what"] for line in data["commands"]] == [what]


def test_a_gpu_that_somebody_uses_is_not_given_to_a_rank(cli: Any) -> None:
    add_process("sim:3xa100-80gb", "1", memory_bytes=1024**3)
    data = advice(cli, "--processes", "3", "--needs", "nccl", "--users", "same", host="sim:3xa100-80gb")
    assert data["commands"][0]["what"] == "one process per GPU: 3 are requested, and 2 GPUs are free here"


def test_virtual_machines_get_no_lock_of_the_host(cli: Any) -> None:
    data = advice(cli, "--processes", "2", "--needs", "vms", "--needs", "bandwidth-qos", host="sim:t4")
    assert data["winner"] == "whole-gpu"
    assert commands(data) == []
    assert "PCI passthrough" in data["commands"][0]["what"]


def test_production_first_says_that_the_other_could_be_paused(cli: Any) -> None:
    words = ("--production", "1", "--opportunistic", "1", "--users", "same")
    file = "workloads: [{role: production, users: same, saturating: yes}, {role: opportunistic, users: same}]"
    assert advice(cli, *words, host="sim:t4")["winner"] == "mps-priority"
    Path("w.yaml").write_text(file)
    assert commands(advice(cli, "-f", "w.yaml", host="sim:h200")) == [
        "gpushare run -g 0 --production serve -- CMD",
        "gpushare run -g 0 --opportunistic --for serve --yield pause --name other -- CMD",
    ]
    # Before Volta nobody measured it.
    said = [line["what"] for line in advice(cli, *words, host="sim:p100")["commands"]]
    assert not any("--yield pause" in what for what in said)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_memory_of_instances_is_summed_in_each(cli: Any) -> None:
    words = ("--processes", "3", "--memory", "12G", "--users", "different", "--pattern", "steady")
    data = advice(cli, *words, host="sim:a100-80gb")
    assert data["memory"]["sentence"] == (
        "in each of 3 2g.20gb 12.5 GiB of 19.5 GiB, CUDA contexts counted: 7.0 GiB left"
    )


def test_before_volta_no_limit_is_to_be_tried(cli: Any) -> None:
    data = advice(cli, "--processes", "8", "--users", "same", "--no-saturating", host="sim:p100")
    assert data["winner"] == "mps"
    assert not any("--threads" in text for text in (*commands(data), *data["measure"]))


def test_what_is_too_old_for_static_partitions_is_named(cli: Any) -> None:
    data = advice(cli, "--processes", "2", "--needs", "containment", host="sim:t4")
    (verdict,) = (verdict for verdict in data["verdicts"] if verdict["way"] == "mps-static")
    assert "this host has an older GPU (Tesla T4) with driver 580" in verdict["reasons"][0]["text"]


def test_user_names_that_contradict_the_users_are_refused(refused: Any) -> None:
    Path("w.yaml").write_text("workloads: [{user: a, users: same}, {user: b, users: same}]")
    said = refused("advise", "-f", "w.yaml", code="bad_combination", exit_code=2)
    assert "users: same contradicts the user names a, b" in said


def test_the_end_of_the_input_ends_the_line_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = on_a_terminal(monkeypatch, "", "--processes", "4")
    assert asked.rstrip(" ").endswith("unknown] \n")


def test_live_does_not_take_who_cannot_be_seen_for_nobody(refused: Any) -> None:
    add_process("sim:t4", "0", memory_bytes=1024**3)
    set_fault("sim:t4", "blind")
    said = refused("advise", "--live", host="sim:t4", code="not_seen", exit_code=6)
    assert "the processes on GPU 0 cannot be seen" in said


@pytest.mark.parametrize("fills", [True, False])
def test_each_job_of_a_pair_is_asked_and_said_for_itself(cli: Any, fills: bool) -> None:
    """The same answer as an option and to the question leads to the same way."""
    pair = ({"role": "production", "users": "same"}, {"role": "opportunistic", "users": "same"})
    fields = [question.field for question in QUESTIONS if question.pair]
    assert fields[:3] == ["production_saturating", "gaps", "saturating"]
    fields = [fields[0], fields[2]]
    for field in fields:
        asked = with_answer(situation_of(*pair, host="h200"), field, fills)
        assert [answer_of(asked, other) for other in fields] == [fills if one == field else None for one in fields]
        best = winner(verdicts(asked))
        assert best is not None
        option = f"--{'' if fills else 'no-'}{field.replace('_', '-')}"
        words = ("--production", "1", "--opportunistic", "1", "--users", "same", option)
        assert advice(cli, *words, host="sim:h200")["winner"] == best.way.value
        assert (best.way.value == "whole-gpu") is (fills and field == "production_saturating")


def test_one_process_beside_programs_of_other_users(cli: Any) -> None:
    cli("sim", "add", "--memory", "20G", "--user", "nobody", host="sim:h200").ok()
    data = advice(cli, "--processes", "1", "--memory", "15G", "--users", "different", host="sim:h200")
    assert data["winner"] == "timeslice"
    assert "stay as they are" in data["why"][0]


def test_unequal_shares_are_instances_of_unequal_size(cli: Any) -> None:
    """4g and 2g are 67 and 33 of 100; an instance of each size has its own line."""
    words = ("--processes", "2", "--memory", "12G", "--users", "different", "--isolation", "full", "--root")
    data = advice(cli, *words, "--needs", "weights=33:67", host="sim:h100")
    assert commands(data) == [
        "gpushare mig apply -g 0 4g.40gb 2g.20gb",
        "gpushare run --mig 2g.20gb -- CMD",
        "gpushare run --mig 4g.40gb -- CMD",
    ]
    assert not any("fixed sizes" in condition for condition in data["conditions"])
    data = advice(cli, *words, "--needs", "weights=30:70", host="sim:h100")
    assert any("2g.20gb, 4g.40gb are 33:67, asked for are 30:70" in condition for condition in data["conditions"])


def test_where_only_mps_shares_it_is_measured(cli: Any) -> None:
    connect("sim:h200").nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    words = ("--processes", "2", "--memory", "5G", "--users", "same", "--needs", "cuda-graphs", "--no-root")
    data = advice(cli, *words, host="sim:h200")
    assert data["winner"] == "measure"


def test_apply_of_a_measurement_says_that_nothing_was_set_up(cli: Any) -> None:
    words = ("--processes", "2", "--users", "same", "--needs", "cuda-graphs")
    answer = cli("advise", *words, "--apply", host="sim:h200").ok()
    assert "nothing to set up; the answer is: " in answer.out
    assert "gpushare bench -g 0 --copies 1,2" in answer.err
    assert "then, run" not in answer.err


def test_apply_of_what_needs_no_setup(cli: Any) -> None:
    words = ("--processes", "2", "--users", "same", "--saturating")
    answer = cli("advise", *words, "--apply", host="sim:h200").ok()
    assert "nothing to set up; the answer is: whole GPU, or a queue" in answer.out
    assert "gpushare run -g 0 --slice 2ms --wait -- CMD" in answer.err


def test_apply_starts_mps_in_each_instance_that_exists(cli: Any) -> None:
    cli("sim", "mig", "2g.20gb", "2g.20gb", host="sim:h100").ok()
    words = ("--processes", "6", "--memory", "1G", "--groups", "2", "--users", "same", "--isolation", "fault")
    answer = cli("advise", *words, "--no-saturating", "--no-root", "--apply", host="sim:h100").ok()
    daemons = cli("mps", "status", host="sim:h100", output="json").ok().data["mps_daemons"]
    assert len({daemon["device_uuid"] for daemon in daemons}) == 2
    assert {daemon["threads_percent"] for daemon in daemons} == {66.6}
    *lines, undo = answer.out.splitlines()
    assert len(lines) == 2
    assert undo.startswith("undo: ")
    assert undo.count("gpushare mps stop -g MIG-") == 2


@pytest.mark.parametrize(
    ("words", "way", "flags"),
    [
        (
            ("--like", "jupyter", "--processes", "5", "--users", "different", "--trusted"),
            "timeslice",
            "--pattern interactive",
        ),
        (("--like", "spark", "--processes", "12", "--memory", "700M"), "mps", "--users same"),
        (("--like", "ci", "--processes", "5", "--memory", "2G"), "timeslice", "--pattern bursty"),
        (("--like", "rendering", "--processes", "2", "--memory", "4G"), "timeslice", "--needs graphics"),
        (("--like", "hpc", "--processes", "8", "--memory", "1G"), "mps", "--cooperating"),
        (("--like", "training", "--processes", "2", "--memory", "4G"), "whole-gpu", "--saturating"),
        (("--like", "training", "--no-saturating", "--processes", "2", "--memory", "4G"), "mps", "--saturating"),
    ],
)
def test_kinds_of_work_have_their_usual_properties(cli: Any, words: tuple[str, ...], way: str, flags: str) -> None:
    data = advice(cli, *words, *(() if "--users" in words else ("--users", "same")), host="sim:t4")
    assert data["winner"] == way
    (said,) = (note for note in data["notes"] if note.startswith(f"like {words[1]}: "))
    assert flags in said


def test_a_kind_of_work_in_a_file_and_with_needs_of_its_own(cli: Any) -> None:
    Path("w.yaml").write_text("workloads: [{like: rendering, processes: 2, needs: [no-graphics, ipc]}]")
    case = advice(cli, "-f", "w.yaml", host="sim:t4")["case"]["workloads"][0]
    assert (case["like"], case["graphics"], case["ipc"], case["pattern"]) == ("rendering", False, True, "bursty")
    answer = cli("advise", "--like", "games", host="sim:t4")
    assert answer.code == 2
    assert "jupyter, spark, ci, rendering, hpc, serving, training" in answer.err


def test_a_slice_per_process_for_production_with_gaps(cli: Any) -> None:
    """Across users: each sets the slice of the own job, and a request fits into that of production."""
    words = ("--production", "1", "--opportunistic", "1", "--users", "different", "--needs", "gaps", "--no-root")
    data = advice(cli, *words, host="sim:t4")
    assert data["winner"] == "slices"
    assert commands(data) == [
        "gpushare run -g 0 --production serve -- CMD",
        "gpushare run -g 0 --slice 500us --name other -- CMD",
    ]
    assert any("does not document these calls" in condition for condition in data["conditions"])
    sure = advice(cli, *words, "--isolation", "none", "--no-production-saturating", host="sim:t4")
    assert sure["confidence"] == "medium"


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("--needs", "gaps"), "slices"),
        (("--needs", "no-gaps"), "mps-priority"),
        ((), "mps-priority"),
        (("--isolation", "fault"), "slices"),
        (("--running",), "slices"),
        (("--latency", "10ms", "--production-saturating"), "whole-gpu"),
    ],
)
def test_gaps_of_production_decide_between_slices_and_caps(cli: Any, words: tuple[str, ...], way: str) -> None:
    pair = ("--production", "1", "--opportunistic", "1", "--users", "same", "--memory", "4G", "--no-root")
    data = advice(cli, *pair, *words, host="sim:h200")
    assert data["winner"] == way
    if way == "slices" and "--running" not in words:
        other = "gpushare run -g 0 --opportunistic --for serve --yield slices --memory 4596M --name other -- CMD"
        assert commands(data)[1] == other


def test_unequal_shares_across_users_are_slices(cli: Any) -> None:
    data = advice(cli, "--users", "different", "--needs", "weights=30:70", host="sim:t4")
    assert data["winner"] == "slices"
    assert commands(data) == [f"gpushare run -g 0 --weight {weight} -- CMD" for weight in ("1", "2.33")]
