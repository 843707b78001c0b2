"""``gpushare advise`` on simulated hosts: what it prints works there, and what it is told wrongly changes nothing."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpushare.advice.case import KEYS, NEEDS
from gpushare.advice.facts import host_facts
from gpushare.base.errors import OperationFailed
from gpushare.cli import main
from gpushare.sim import admin
from tests.cli.drive import H200, World, Write, environment

FARM = ("--processes", "4", "--memory", "2G", "--users", "same", "--no-saturating")
USERS = ("--processes", "3", "--memory", "2G", "--users", "different", "--pattern", "steady")
PEOPLE = ("--processes", "5", "--memory", "2G", "--users", "different", "--pattern", "interactive")
PAIR = ("--production", "1", "--opportunistic", "2", "--users", "same", "--memory", "3G")
GROUPS = ("--processes", "6", "--memory", "700M", "--groups", "3", "--isolation", "fault", "--no-saturating")
GROUPS_OF_PEOPLE = (
    "--processes",
    "6",
    "--memory",
    "1G",
    "--groups",
    "2",
    "--isolation",
    "fault",
    "--pattern",
    "bursty",
)


def commands(data: Any, key: str = "commands") -> list[str]:
    return [line["command"] for line in data[key] if line["command"]]


# -- the answer ------------------------------------------------------------------------------------


def test_the_first_screen_fits_80_columns(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("advise", *FARM, host="sim:a100-80gb", output="table").ok().out
    assert text.splitlines()[0] == "MPS  on GPU 0, NVIDIA A100-SXM4-80GB"
    assert max(len(line) for line in text.splitlines()) <= 80
    for words in ("do\n", "undo\n", "measure\n", "what would change it\n", "all ways, chosen: mps\n"):
        assert f"\n{words}" in text
    assert "    gpushare mps start -g 0 --threads 50 --memory 2816M\n" in text
    assert "    gpushare mps stop -g 0\n" in text
    assert "more with -v" in text


def test_verbose_prints_every_rule_with_its_source(cli: Any) -> None:
    answer = cli("advise", *FARM, "-v", host="sim:t4", output="table").ok()
    data = cli("advise", *FARM, host="sim:t4", output="json").ok().data
    squeezed = " ".join(answer.out.split())
    for verdict in data["verdicts"]:
        for reason in verdict["reasons"]:
            assert f"[{reason['rule']}]" in squeezed
            assert " ".join(reason["text"].split()) in squeezed


def test_json_has_all_of_it(cli: Any) -> None:
    data = cli("advise", *FARM, host="sim:a100-80gb", output="json").ok().data
    assert data["winner"] == "mps"
    assert len(data["verdicts"]) == 16
    assert {verdict["outcome"] for verdict in data["verdicts"]} == {"fits", "fits with a condition", "refused"}
    assert all(reason["source"] for verdict in data["verdicts"] for reason in verdict["reasons"])
    assert data["memory"]["fits"] is True
    assert data["case"]["workloads"][0]["same_user"] is True
    assert data["confidence"] in {"high", "medium", "low"}
    assert {"question", "text", "then", "then_title", "open"} == set(data["changes"][0])


def test_plain_output_is_one_item_a_line(cli: Any) -> None:
    lines = cli("advise", *FARM, host="sim:t4").ok().out.splitlines()
    items = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert items[:2] == ["answer", "why"]
    assert {"confidence", "memory", "do", "undo", "measure", "change"} <= set(items)
    # It says how often a line is run.
    run = next(number for number, line in enumerate(lines) if line.startswith("do ") and "gpushare farm" in line)
    assert lines[run - 1].split(maxsplit=1)[0] == "step"
    assert "the program, 4 times" in lines[run - 1]


def test_csv_is_the_table_of_verdicts(cli: Any) -> None:
    lines = cli("advise", *FARM, host="sim:t4", output="csv").ok().out.splitlines()
    assert lines[0] == "way,verdict,why"
    assert len(lines) == 17


@pytest.mark.parametrize("output", ["plain", "table"])
def test_the_chosen_way_and_the_verdicts_are_words(cli: Any, output: str) -> None:
    words = ("--processes", "4", "--memory", "2G", "--no-saturating", "--users", "same")
    winner = cli("advise", *words, host="sim:t4", output="json").ok().data["winner"]
    out = cli("advise", *words, host="sim:t4", output=output).ok().out
    title, *rows = out[out.index("all ways") :].splitlines()
    assert title == f"all ways, chosen: {winner}"
    verdicts = {row.split()[0]: row for row in rows if row.strip()}
    assert " fits " in verdicts[winner]
    assert " fits with a condition " in verdicts["fix-app"]
    assert " refused " in verdicts["mig"]


def test_unequal_memory_and_shares_together(cli: Any) -> None:
    words = ("--memory", "20G,10G", "--needs", "weights=2:1", "--users", "different", "--saturating")
    data = cli("advise", *words, host="sim:l40s", output="json").ok().data
    assert data["winner"] == "slices"
    assert [line.split(" --weight ")[1] for line in commands(data)] == [
        "2 --memory 20980M -- CMD",
        "1 --memory 10740M -- CMD",
    ]


def test_a_file_of_several_workloads_has_their_numbers(refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    for text in ("[{processes: 1}, {processes: 2}]", "{memory: 2G}"):
        file.write_text(text)
        refused("advise", "-f", str(file), "--processes", "3", code="bad_combination", exit_code=2)


def test_a_file_may_list_sizes_of_memory(cli: Any, refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    words = ("--memory", "20G,10G", "--users", "same", "--no-saturating")
    by_flags = cli("advise", *words, host="sim:l40s", output="json").ok().data
    for sizes in ("[20G, 10G]", "'20G,10G'"):
        file.write_text(f"{{memory: {sizes}, users: same, saturating: no}}")
        assert cli("advise", "-f", str(file), host="sim:l40s", output="json").ok().data == by_flags
    file.write_text("{memory: [20G, 10G], processes: 3}")
    refused("advise", "-f", str(file), code="bad_count", exit_code=2)
    file.write_text("{memory: [20G, [10G]]}")
    refused("advise", "-f", str(file), code="bad_size", exit_code=2)


def test_a_file_says_the_same_as_flags(cli: Any, write: Write) -> None:
    file = write("workloads:\n- {processes: 4, memory: 2G, users: same, saturating: no}\n")
    by_file = cli("advise", "-f", file, host="sim:t4", output="json").ok().data
    assert by_file == cli("advise", *FARM, host="sim:t4", output="json").ok().data


def test_a_file_with_several_workloads(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "- {name: api, role: production, users: same, memory: 20G, command: python serve.py}\n"
        "- {name: train, role: opportunistic, users: same, memory: 40G, saturating: yes}\n"
    )
    data = cli("advise", "--file", str(file), output="json").ok().data
    assert data["winner"] == "mps-priority"
    assert commands(data) == [
        "gpushare mps start -g 0",
        "gpushare run -g 0 --memory 21760M --name api -- python serve.py",
        "gpushare run -g 0 --threads 60 --memory 42240M --priority low --name train -- CMD",
    ]


def test_contradicting_sources_are_shown(cli: Any) -> None:
    out = cli("advise", "--isolation", "fault", "--way", "timeslice", host="sim:t4", output="table").ok().out
    assert "sources disagree" in out
    assert "if one workload crashes, they all do" in " ".join(out.split())


def test_memory_that_cannot_fit_says_by_how_much(cli: Any) -> None:
    words = ("--processes", "4", "--memory", "30G")
    open_answer = cli("advise", *words, host="sim:a100-80gb", output="json").ok().data
    # Nobody said that one does not fill the GPU: as many at a time as fit, and not several by MPS.
    assert open_answer["winner"] == "whole-gpu"
    assert commands(open_answer) == ["gpushare run -g 0 --wait --swap request --memory 31220M -- CMD"]
    data = cli("advise", *words, "--saturating", host="sim:a100-80gb", output="json").ok().data
    assert data["winner"] == "whole-gpu"
    # 4 x 30 GiB and 4 contexts of 500 MiB, on 80 GiB of which 2 % stay free.
    assert data["memory"]["needed_bytes"] == (4 * 30 * 1024 + 4 * 500) * 1024**2
    assert data["memory"]["left_bytes"] < 0
    assert data["memory"]["most"] == 2


def test_nothing_fits(cli: Any) -> None:
    data = cli("advise", "--processes", "2", "--memory", "24G", host="sim:t4", output="json").ok().data
    assert data["winner"] is None
    assert data["commands"] == []
    assert "9.8 GiB too much" in data["why"][0]


def test_the_limits_of_production_and_the_other_jobs_add_up(cli: Any) -> None:
    words = ("--production", "1", "--opportunistic", "2", "--memory", "10G", "--users", "same", "--latency", "50ms")
    data = cli("advise", *words, "--way", "mps-priority", host="sim:h100", output="json").ok().data
    # A job of 11520 MiB is an MPS client of 512 MiB less.
    sizes = [command.split("--memory ")[1].split()[0] for command in commands(data) if " run " in command]
    assert sizes == ["11520M", "11520M"]
    assert data["memory"]["limits_bytes"] == 3 * (11520 - 512) * 1024**2


def test_limits_that_no_command_sets_have_no_sum(cli: Any) -> None:
    words = ("--production", "1", "--opportunistic", "1", "--latency", "50ms", "--no-input")
    data = cli("advise", *words, host="sim:h100", output="json").ok().data
    assert "--memory" not in " ".join(commands(data))
    assert (data["memory"]["limits_bytes"], data["memory"]["sentence"]) == (None, None)


# -- what is printed works -------------------------------------------------------------------------


def pasted(lines: list[str], spec: str, *, shell: bool = False) -> subprocess.CompletedProcess[str]:
    """Run lines as somebody who pastes them: in a shell, or in this process if every line is a simple command."""
    if not shell and all(SIMPLE.fullmatch(line) or "gpushare" not in line for line in lines):
        return pasted_here(lines, spec)
    script = ["set -e", f'gpushare() {{ "{sys.executable}" -m gpushare "$@"; }}', 'sudo() { "$@"; }', *lines]
    env = environment(GPUSHARE_HOST=spec)
    return subprocess.run(["bash", "-c", "\n".join(script)], env=env, capture_output=True, text=True, check=False)


COMMAND = r"(?:sudo )?gpushare ([\w\s.,:/*%=+@\"'$-]+)"
# A command, or one whose output the shell evaluates: export NAME=VALUE.
SIMPLE = re.compile(rf'{COMMAND}|eval "\$\({COMMAND}\)"')


def pasted_here(lines: list[str], spec: str) -> subprocess.CompletedProcess[str]:
    code, out, err = 0, io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, GPUSHARE_HOST=spec):
        for line in lines:
            said, found = io.StringIO(), SIMPLE.fullmatch(line)
            if found is None:
                subprocess.run(["bash", "-c", line], check=True)
                continue
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(err):
                code = main(shlex.split(os.path.expandvars(found[1] or found[2])))
            if code:
                break
            if found[2]:
                os.environ.update(re.findall(r"^export (\w+)=(\S+)$", said.getvalue(), re.MULTILINE))
            else:
                out.write(said.getvalue())
    return subprocess.CompletedProcess(lines, code, out.getvalue(), err.getvalue())


def shown(cli: Any, spec: str) -> list[Any]:
    looks = (("mig", "status"), ("mps", "status"), ("timeslice", "show"))
    return [cli(*words, host=spec, output="json").json["data"] for words in looks]


@pytest.mark.parametrize(
    ("spec", "words", "winner"),
    [
        ("sim:a100-80gb", USERS, "mig"),
        ("sim:a100-80gb", GROUPS, "mig+mps"),
        ("sim:t4", FARM, "mps"),
        ("sim:h200", PAIR, "mps-priority"),
        ("sim:h200", GROUPS_OF_PEOPLE, "mig+timeslice"),
        ("sim:2xh100-80gb", FARM, "mps"),
    ],
)
def test_what_is_printed_works_pasted_and_is_undone(cli: Any, spec: str, words: tuple[str, ...], winner: str) -> None:
    before = shown(cli, spec)
    data = cli("advise", *words, "--command", "true", host=spec, output="json").ok().data
    assert data["winner"] == winner
    shell = spec == "sim:t4"
    done = pasted(commands(data), spec, shell=shell)
    assert done.returncode == 0, done
    assert shown(cli, spec) != before
    undone = pasted(commands(data, "undo"), spec, shell=shell)
    assert undone.returncode == 0, undone
    assert shown(cli, spec) == before


@pytest.mark.parametrize("instances", [("1g.10gb*2", "3g.40gb"), ("3g.40gb*2",)], ids=["room", "no-room"])
def test_instances_that_exist_come_back(cli: Any, instances: tuple[str, ...]) -> None:
    spec = "sim:a100-80gb"
    cli("mig", "apply", "-g", "0", *instances, host=spec).ok()
    for words in (USERS, FARM):
        data = cli("advise", *words, "--command", "true", host=spec, output="json").ok().data
        lines = [*commands(data), *commands(data, "undo")]
        assert pasted(lines, spec).returncode == 0
        found = cli("mig", "status", host=spec, output="json").ok().data["gpus"][0]["instances"]
        names = sorted(one["profile"]["name"] for one in found)
        wanted = {"room": ["1g.10gb", "1g.10gb", "3g.40gb"], "no": ["3g.40gb", "3g.40gb"]}
        assert names == wanted["room" if len(instances) == 2 else "no"]


@pytest.mark.parametrize("users", ["same", "different"])
def test_the_line_that_measures_is_one(cli: Any, users: str) -> None:
    words = ("--processes", "2", "--needs", "cuda-graphs", "--users", users, "--command", "true")
    data = cli("advise", *words, output="json").ok().data
    assert data["winner"] == "measure"
    (line,) = commands(data)
    program, verb, *rest = line.split()
    assert (program, verb) == ("gpushare", "bench")
    cli(verb, "--dry-run", *rest).ok()


# -- --apply ---------------------------------------------------------------------------------------


def test_a_farm_does_not_run_more_at_a_time_than_it_has(cli: Any) -> None:
    words = ("--processes", "5", "--memory", "10G", "--users", "same", "--no-saturating", "-g", "0-3")
    (farm,) = [
        line for line in commands(cli("advise", *words, host="sim:4xh100", output="json").ok().data) if "farm" in line
    ]
    assert "--copies 5 --parallel 5 " in farm


def test_apply_sets_up_and_names_what_comes_then(cli: Any) -> None:
    answer = cli("advise", *FARM, "--apply", host="sim:t4").ok()
    assert "gpushare farm -g 0 --copies 4 --parallel 4 --memory 3328M -- CMD" in answer.err
    (line,) = answer.out.splitlines()
    assert line.startswith("MPS on GPU 0: threads 50 %")
    assert line.endswith("; undo: gpushare mps stop -g 0")
    assert '"threads_percent": 50.0' in cli("mps", "status", host="sim:t4", output="json").ok().out
    # Again, nothing changes.
    again = cli("advise", *FARM, "--apply", host="sim:t4").ok()
    assert again.out == "nothing to do: the host is as requested\n"
    assert "undo" not in again.err
    assert "gpushare farm -g 0 --copies 4 --parallel 4 --memory 3328M -- CMD" in again.err


def test_apply_of_several_shells_is_refused(refused: Any) -> None:
    hint = refused("advise", *GROUPS, "--apply", code="several_shells", exit_code=3, host="sim:a100-80gb")
    assert "gpushare mig apply -g 0 " in hint
    assert "; gpushare mps start -g group-1 " in hint


def test_apply_of_nothing_is_refused(refused: Any) -> None:
    refused("advise", "--memory", "900G", "--apply", code="nothing_fits", exit_code=3)


def test_mig_is_switched_on_where_the_driver_lists_profiles_only_then(cli: Any) -> None:
    """Driver 535 and older."""
    world = World("sim:a100-80gb")
    world.fault("not-supported", "nvmlDeviceGetGpuInstanceProfileInfo")
    words = ("advise", "--processes", "2", "--memory", "10G", "--isolation", "full", "--apply")
    assert "switch MIG on for GPU 0" in cli(*words, "-n", host="sim:a100-80gb").ok().out
    answer = cli(*words, "-y", host="sim:a100-80gb").ok()
    assert "GPU 0: MIG is on" in answer.out
    assert "gpushare mig profiles -g 0" in answer.err


def test_apply_says_what_a_line_itself_says(cli: Any) -> None:
    cli("sim", "fault", "fail-step", "1", host="sim:a100-80gb").ok()
    answer = cli("advise", *USERS, "--apply", "-y", host="sim:a100-80gb")
    assert answer.code != 0
    assert answer.err.count("error:") == answer.err.count("hint:") == 1


def test_apply_beside_a_daemon_sets_its_limits_and_says_how_back(cli: Any) -> None:
    cli("mps", "start", "--threads", "30", host="sim:t4").ok()
    answer = cli("advise", *FARM, "--apply", host="sim:t4").ok()
    undo = answer.out.partition("; undo: ")[2].strip()
    assert undo == "gpushare mps set -g 0 --threads 30 --memory none"
    cli(*undo.split()[1:], host="sim:t4").ok()


@pytest.mark.parametrize(
    ("words", "spec", "step"),
    [
        (FARM, "sim:t4", "limit each client process to 50 % of the SM threads"),
        (USERS, "sim:a100-80gb", "switch MIG on for GPU 0"),
    ],
)
def test_apply_does_what_the_lines_do(cli: Any, words: tuple[str, ...], spec: str, step: str) -> None:
    before = shown(cli, spec)
    planned = cli("advise", *words, "--apply", "--dry-run", host=spec, output="json").ok().data
    assert planned["dry_run"] is True
    assert step in [step["what"] for step in planned["steps"]]
    assert shown(cli, spec) == before
    data = cli("advise", *words, host=spec, output="json").ok().data
    cli("advise", *words, "--apply", "-y", host=spec).ok()
    applied = shown(cli, spec)
    assert applied != before
    for command in commands(data, "undo"):
        cli(*command.split()[1:], host=spec).ok()
    assert shown(cli, spec) == before


@pytest.mark.parametrize(
    "command", ["echo it's", 'echo "$CUDA_VISIBLE_DEVICES"', "eval true", "gpushare mps stop -g 0"]
)
def test_apply_does_not_read_the_command_of_the_user(cli: Any, command: str) -> None:
    words = ("advise", *USERS, "--command", command, "--apply")
    spec = "sim:a100-80gb"
    without = cli("advise", *USERS, "--apply", "-n", host=spec, output="json").data
    assert cli(*words, "-n", host=spec, output="json").ok().data == without
    answer = cli(*words, "-y", host=spec).ok()
    assert answer.err.count(f"-- {command}") == 1


def test_measure_refuses_a_command_with_an_open_quote(refused: Any) -> None:
    refused("advise", "--measure", "--command", "echo it's", code="bad_command", exit_code=2)


@pytest.mark.parametrize(
    ("there", "words", "spec", "steps"),
    [
        (
            "mig apply -g 0 3g.40gb",
            (*FARM, "--destroy"),
            "sim:a100-80gb",
            ["switch MIG off", "serve GPU 0 with an MPS daemon"],
        ),
        ("mps start -g 0", PEOPLE, "sim:t4", ["stop the idle MPS daemon"]),
        ("mps start -g 0", USERS, "sim:a100-80gb", ["stop the idle MPS daemon", "switch MIG on"]),
    ],
    ids=["mig-mps", "mps-timeslice", "mps-mig"],
)
def test_apply_of_several_lines_is_one_plan(cli: Any, there: str, words: Any, spec: str, steps: list[str]) -> None:
    cli(*there.split(), host=spec).ok()
    before = cli("capture", host=spec).ok().out
    planned = cli("advise", *words, "--apply", "-n", host=spec, output="json").ok().data["steps"]
    assert cli("capture", host=spec).ok().out == before
    texts = [one["what"] for one in planned]
    positions = [next(n for n, text in enumerate(texts) if step in text) for step in steps]
    assert positions == sorted(positions)
    undo = commands(cli("advise", *words, host=spec, output="json").ok().data, "undo")
    done = cli("advise", *words, "--apply", host=spec, output="json").ok()
    assert [step["what"] for step in done.data["steps"]] == texts
    assert cli("capture", host=spec).ok().out != before
    for command in undo:
        cli(*shlex.split(command)[1:], host=spec).ok()
    assert cli("capture", host=spec).ok().out == before


def test_apply_that_fails_half_way_takes_all_of_it_back(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "sim:a100-80gb"
    cli("mig", "apply", "-g", "0", "3g.40gb", host=spec).ok()
    before = cli("capture", host=spec).ok().out

    def failing(*_: Any, **__: Any) -> Any:
        raise OperationFailed("the last step failed", "look", code="no_daemon")

    with monkeypatch.context() as patched:
        patched.setattr("gpushare.hostfile.steps.plan_start", failing)
        answer = cli("advise", *FARM, "--destroy", "--apply", host=spec)
    assert answer.code == 1
    assert "the last step failed" in answer.err
    assert answer.err.count("error:") == answer.err.count("hint:") == 1
    assert cli("capture", host=spec).ok().out == before


def test_a_lost_gpu_is_an_error(cli: Any) -> None:
    World("sim:t4").fault("lost", gpu="0")
    two = ("--processes", "2")
    for words in (two, (*two, "-g", "0"), (*two, "-g", "any"), ("-g", "any", "--live")):
        answer = cli("advise", *words, host="sim:t4")
        assert answer.code == 6
        assert len(answer.lines("hint")) == 1


def test_a_gpu_that_answers_is_taken(cli: Any) -> None:
    World("sim:2xt4").fault("lost", gpu="0")
    data = cli("advise", "--processes", "2", host="sim:2xt4", output="json").ok().data
    assert data["gpu"] == 1


# -- what runs now, and questions ------------------------------------------------------------------


def test_live_takes_what_runs(cli: Any) -> None:
    for _ in range(3):
        admin.add_process(H200, "0", memory_bytes=4 * 1024**3)
    data = cli("advise", "--live", "--no-saturating", output="json").ok().data
    (workload,) = data["case"]["workloads"]
    assert workload["processes"] == 3
    assert workload["saturating"] is False
    assert 0 < workload["memory"] < 4 * 1024**3
    assert data["case"]["workloads"][0]["user"]


def test_live_with_nobody_there(refused: Any) -> None:
    refused("advise", "--live", code="nobody", exit_code=6)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> tuple[str, str]:
    streams = {name: Terminal(typed if name == "stdin" else "") for name in ("stdin", "stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    code = main(["--host", "sim:t4", "advise", *words])
    assert code == 0, streams["stderr"].getvalue()
    return streams["stdout"].getvalue(), streams["stderr"].getvalue()


def test_count_and_memory_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = on_a_terminal(monkeypatch, "many\n4\n2\n2G\nyes\nnone\nno\nno\nsteady\n")
    assert asked.startswith("How many processes are to share the GPU?")
    assert asked.count("How many processes") == 2
    assert "'many' is not a valid number" in asked
    assert asked.index("How much GPU memory") < asked.index("same user?")
    assert "has no unit" in asked
    assert out.startswith(("MPS", "\x1b"))
    assert "--threads 50 --memory 2816M" in out
    assert "confidence: medium" in out


def test_processes_of_unequal_memory_may_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--users", "same", "--no-saturating", "--isolation", "none", "--latency", "none", "--pattern", "steady")
    out, asked = on_a_terminal(monkeypatch, "2\n4G,3G,1G\n4G,three\n4G,3G\n", *words)
    assert asked.count("How much GPU memory") == 3
    assert "3 sizes of memory do not match the number of processes or shares" in asked
    assert "'three' is not a memory size" in asked
    given, _ = on_a_terminal(monkeypatch, "", "--memory", "4G,3G", *words)
    assert out == given


def test_each_option_that_a_pair_makes_superfluous_is_named(refused: Any) -> None:
    pair = ("--production", "1", "--opportunistic", "1")
    for more, hint in (
        (("--processes", "2"), "drop --processes"),
        (("--role", "production"), "drop --role"),
        (("--processes", "2", "--role", "production"), "drop --processes and --role"),
    ):
        message = refused("advise", *more, *pair, code="two_counts", exit_code=2)
        assert message.rstrip().endswith(hint), message


def test_what_was_not_said_lowers_the_confidence(cli: Any) -> None:
    words = ("--users", "same", "--no-saturating", "--isolation", "none", "--latency", "none", "--pattern", "steady")
    for more, missing in (
        ((), "the number of processes, the memory of a process"),
        (("--processes", "4"), "the memory of a process"),
    ):
        data = cli("advise", *words, *more, host="sim:a100-80gb", output="json").ok().data
        assert (data["winner"], data["confidence"]) == ("mps", "medium")
        assert data["confidence_why"] == f"not given: {missing}"
    data = cli("advise", *words, "--processes", "4", "--memory", "2G", host="sim:a100-80gb", output="json").ok().data
    assert (data["confidence"], "not given" in data["confidence_why"]) == ("medium", False)


def test_the_risk_of_a_way_is_in_the_short_form(cli: Any) -> None:
    for words, way, text in (
        (PEOPLE, "time-slicing", "memory use is shared"),
        (PAIR, "MPS with priority and a cap", "priority is a hint"),
        (GROUPS_OF_PEOPLE, "MIG with time-slicing inside", "memory use is shared"),
    ):
        out = cli("advise", *words, host="sim:h200", output="table").ok().out
        assert out.startswith(way)
        assert f"risk: {text}" in out


def test_an_answer_that_is_none_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = on_a_terminal(monkeypatch, "perhaps\n\n\n\n\n\n\n\n", "--processes", "4", "--memory", "2G")
    assert "choose one of: yes, no" in asked
    assert asked.count("Do all processes belong to the same user?") == 2


def test_what_is_known_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = on_a_terminal(monkeypatch, "", "--processes", "1", "--no-code", "--saturating")
    assert "belong to the same user" not in asked


@pytest.mark.parametrize("words", [("--no-input",), ("-o", "json"), ("--way", "mps")])
def test_nothing_is_asked_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    _, asked = on_a_terminal(monkeypatch, "", "--processes", "4", *words)
    assert "?" not in asked


def test_without_a_terminal_nothing_is_asked(cli: Any) -> None:
    assert "?" not in cli("advise", "--processes", "4").ok().err


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--way", "mgi"), "bad_way", 2),
        (("--processes", "0"), "bad_count", 2),
        (("--processes", "many"), "bad_count", 2),
        (("--processes", "9" * 5000), "bad_count", 2),
        (("--users", "some"), "bad_value", 2),
        (("--isolation", "quota,bad"), "bad_value", 2),
        (("--needs", "nccl,gpu"), "bad_value", 2),
        (("--needs", ""), "bad_value", 2),
        (("--needs", "nccl,no-nccl"), "bad_combination", 2),
        (("--latency", "20"), "bad_duration", 2),
        (("--latency", "0"), "bad_value", 2),
        (("--memory", "6"), "bad_size", 2),
        (("--memory", "34G,17G", "--processes", "3"), "bad_count", 2),
        (("--sms", "500"), "bad_count", 2),
        (("-g", "0-9"), "unknown_gpu", 6),
        (("--memory", "34G,17G", "--needs", "weights=1:2:3"), "bad_count", 2),
        (("--processes", "2", "--dry-run"), "bad_combination", 2),
        (("--pattern", "often"), "bad_value", 2),
        (("--production", "x"), "bad_count", 2),
        (("--production", "1", "--memory", "60G,40G"), "bad_count", 2),
        (("--production", "1", "--memory", "60G,xyz"), "bad_count", 2),
        (("--production", "1", "--opportunistic", "1", "--memory", "60G,xyz"), "bad_size", 2),
        (("--production", "1", "--processes", "2"), "two_counts", 2),
        (("--live", "--file", "x"), "bad_combination", 2),
        (("--way", "mps", "--apply"), "bad_combination", 2),
        (("--live", "--production", "1"), "bad_combination", 2),
        (("--file", "/nowhere/w.yaml"), "no_file", 6),
        (("--from", "/nowhere/r.jsonl"), "no_recording", 6),
        (("-g", "7"), "unknown_gpu", 6),
    ],
)
def test_bad_words_are_refused(refused: Any, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("advise", *words, code=code, exit_code=exit_code)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("workloads: []\n", "is empty"),
        ("root: yes\n", "no workloads"),
        ("- {processes: 4\n", "gpushare.yaml:2:1: this is not YAML"),
        ("workloads:\n- processes: 4\n  memroy: 6G\n", "gpushare.yaml:3:3: 'memroy' is not a property"),
        ("workloads:\n- processes: 4\n  memory: six\n", "gpushare.yaml:3:3: 'six' is not a memory size"),
        ("workloads:\n- processes: 4\n  processes: 5\n", "gpushare.yaml:3:3: the key 'processes' is given twice"),
        ("workloads: [{processes: 2}]\nhost: x\n", "gpushare.yaml:2:1: unknown key 'host'"),
        ("- just text\n", "gpushare.yaml:1:3: a workload is a mapping"),
        ("- {saturating: maybe}\n", "gpushare.yaml:1:4: 'maybe' is not a valid value for saturating"),
        ("root: perhaps\nworkloads: [{processes: 2}]", "'perhaps' is not a valid value for root"),
        ("workloads: [{user: [a, b]}]", "is not a valid value for user"),
        ("workloads: [{name: {a: b}}]", "is not a valid value for name"),
        ("workloads: [{processes: &a [*a]}]", "is not a valid number of processes"),
        ("workloads: [{memory: 6442450944}]", "give a size with its unit: 6G or 1500M"),
    ],
)
def test_a_bad_file_names_its_line(cli: Any, write: Write, text: str, said: str) -> None:
    file = write(text)
    answer = cli("advise", "-f", file)
    assert answer.code == 2
    assert said in answer.err
    assert file in answer.err
    assert len(answer.lines("hint")) == 1


def test_a_file_that_is_no_text(cli: Any, write: Write) -> None:
    answer = cli("advise", "-f", write(b"\xff\xfe\x00"))
    assert answer.code == 2
    assert "is not UTF-8" in answer.err


def test_a_user_without_root_gets_sudo(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.cli.advise.host_facts", lambda state: replace(host_facts(state), root=False))
    data = cli("advise", *USERS, host="sim:a100-80gb", output="json").ok().data
    assert [line for line in commands(data) if line.startswith("sudo ")] == ["sudo gpushare mig apply -g 0 '2g.20gb*3'"]
    data = cli("advise", *USERS, "--no-root", host="sim:a100-80gb", output="json").ok().data
    assert data["winner"] != "mig"
    assert not [line for line in commands(data) if "sudo" in line]


def test_help_names_every_property(cli: Any) -> None:
    assert cli("advise", "--help", host=None).out.count("\n") <= 45
    out = cli("advise", "--help-all", host=None).out
    names = {key: key.replace("_", "-") for key in KEYS if key not in {"name", "user"}}
    said = {key: name if key in NEEDS else f"--{name}" for key, name in names.items()}
    assert [key for key, name in said.items() if name not in re.sub(r"-\s+", "-", out)] == []


@pytest.mark.parametrize(
    "words", [("--needs", "nccl,no-p2p,cuda-graphs"), ("--needs", "nccl", "--needs", "NO-P2P, cuda_graphs")]
)
def test_needs_are_a_list(cli: Any, words: tuple[str, ...]) -> None:
    data = cli("advise", "--processes", "2", *words, host="sim:t4", output="json").ok().data
    (one,) = data["case"]["workloads"]
    assert (one["nccl"], one["p2p"], one["cuda_graphs"], one["ipc"]) == (True, False, True, None)


def test_a_file_lists_needs_too(cli: Any, write: Write) -> None:
    file = write("workloads: [{processes: 2, needs: [nccl, no-p2p]}, {processes: 1, needs: 'ipc'}]\n")
    first, second = cli("advise", "-f", file, "--needs", "vms", output="json").ok().data["case"]["workloads"]
    assert (first["nccl"], first["p2p"], first["vms"]) == (True, False, True)
    assert (second["nccl"], second["ipc"], second["vms"]) == (None, True, True)


def test_what_belongs_to_the_measured_command_is_no_need(refused: Any) -> None:
    refused("advise", "--processes", "2", "true", "--needs", "nccl", code="bad_combination", exit_code=2)


def test_a_recording_is_read(cli: Any, tmp_path: Path) -> None:
    for _ in range(2):
        admin.add_process(H200, "0", memory_bytes=3 * 1024**3)
    file = tmp_path / "r.jsonl"
    cli("observe", "--for", "0.3s", "--interval", "0.1s", "--to", str(file)).ok()
    data = cli("advise", "--from", str(file), output="json").ok().data
    assert sum(workload["processes"] for workload in data["case"]["workloads"]) == 2


def test_a_way_that_is_asked_for_and_refused_names_the_one_to_take(cli: Any) -> None:
    words = ("--processes", "2", "--memory", "5G", "--users", "different", "--isolation", "fault")
    data = cli("advise", *words, "--way", "mig", host="sim:t4", output="json").ok().data
    assert data["explained"]["outcome"] == "refused"
    answer = cli("advise", *words, "--way", "mig", host="sim:t4").ok()
    assert all(text in answer.out for text in ("Tesla T4 has no MIG", "mig-not-there"))
    assert "the advice for this case is: time-slicing" in answer.out + answer.err
