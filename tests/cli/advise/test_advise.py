"""``gpushare advise`` on simulated hosts: what it prints works there, and what it is told wrongly changes nothing."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.advice.case import KEYS, NEEDS
from gpushare.advice.facts import host_facts
from gpushare.base.errors import OperationFailed
from gpushare.sim import admin
from tests.cli.advise.asking import (
    FARM,
    GROUPS,
    GROUPS_OF_PEOPLE,
    PAIR,
    PEOPLE,
    USERS,
    advised,
    captured,
    commands,
    pasted,
    shown,
)
from tests.cli.drive import H200, Cli, Refused, World, Write

A100 = "sim:a100-80gb"

# -- the answer ------------------------------------------------------------------------------------


def test_the_first_screen_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("advise", *FARM, host=A100, output="table").ok().out
    assert text.splitlines()[0] == "MPS  on GPU 0, NVIDIA A100-SXM4-80GB"
    assert max(len(line) for line in text.splitlines()) <= 80
    for words in ("do\n", "undo\n", "measure\n", "what would change it\n", "all ways, chosen: mps\n"):
        assert f"\n{words}" in text
    assert "    gpushare mps start -g 0 --threads 50 --memory 2816M\n" in text
    assert "    gpushare mps stop -g 0\n" in text
    assert "more with -v" in text


def test_verbose_prints_every_rule_with_its_source(cli: Cli) -> None:
    squeezed = " ".join(cli("advise", *FARM, "-v", host="sim:t4", output="table").ok().out.split())
    for reason in (reason for verdict in advised(cli, "t4", FARM)["verdicts"] for reason in verdict["reasons"]):
        assert f"[{reason['rule']}]" in squeezed
        assert " ".join(reason["text"].split()) in squeezed


def test_json_has_all_of_it(cli: Cli) -> None:
    data = advised(cli, A100, FARM)
    assert (data["winner"], len(data["verdicts"]), data["memory"]["fits"]) == ("mps", 16, True)
    assert {verdict["outcome"] for verdict in data["verdicts"]} == {"fits", "fits with a condition", "refused"}
    assert all(reason["source"] for verdict in data["verdicts"] for reason in verdict["reasons"])
    assert data["case"]["workloads"][0]["same_user"] is True
    assert data["confidence"] in {"high", "medium", "low"}
    assert {"question", "text", "then", "then_title", "open"} == set(data["changes"][0])


def test_plain_output_is_one_item_a_line_and_csv_the_table_of_verdicts(cli: Cli) -> None:
    lines = cli("advise", *FARM, host="sim:t4").ok().out.splitlines()
    items = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert items[:2] == ["answer", "why"]
    assert {"confidence", "memory", "do", "undo", "measure", "change"} <= set(items)
    # It says how often a line is run.
    run = next(number for number, line in enumerate(lines) if line.startswith("do ") and "gpushare farm" in line)
    assert lines[run - 1].split(maxsplit=1)[0] == "step"
    assert "the program, 4 times" in lines[run - 1]
    lines = cli("advise", *FARM, host="sim:t4", output="csv").ok().out.splitlines()
    assert (lines[0], len(lines)) == ("way,verdict,why", 17)


@pytest.mark.parametrize("output", ["plain", "table"])
def test_the_chosen_way_and_the_verdicts_are_words(cli: Cli, output: str) -> None:
    out = cli("advise", *FARM, host="sim:t4", output=output).ok().out
    title, *rows = out[out.index("all ways") :].splitlines()
    assert title == "all ways, chosen: mps"
    verdicts = {row.split()[0]: row for row in rows if row.strip()}
    for way, verdict in (("mps", "fits"), ("fix-app", "fits with a condition"), ("mig", "refused")):
        assert f" {verdict} " in verdicts[way]


def test_what_stands_on_the_screen(cli: Cli) -> None:
    for words, host, texts in (
        (
            ("--isolation", "fault", "--way", "timeslice"),
            "sim:t4",
            ("sources disagree", "if one workload crashes, they all do"),
        ),
        # The risk of a way is in the short form.
        (PEOPLE, "sim:h200", ("time-slicing", "risk: memory use is shared")),
        (PAIR, "sim:h200", ("MPS with priority and a cap", "risk: priority is a hint")),
        (GROUPS_OF_PEOPLE, "sim:h200", ("MIG with time-slicing inside", "risk: memory use is shared")),
    ):
        out = " ".join(cli("advise", *words, host=host, output="table").ok().out.split())
        assert [text for text in texts if text not in out] == []
        assert "risk" not in texts[1] or out.startswith(texts[0])


# -- what is printed works -------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "words", "winner"), [
    (A100, USERS, "mig"), (A100, GROUPS, "mig+mps"), ("sim:t4", FARM, "mps"), (H200, PAIR, "mps-priority"),
    (H200, GROUPS_OF_PEOPLE, "mig+timeslice"), ("sim:2xh100-80gb", FARM, "mps"),
])  # fmt: skip
def test_what_is_printed_works_pasted_and_is_undone(cli: Cli, spec: str, words: tuple[str, ...], winner: str) -> None:
    before = shown(cli, spec)
    data = advised(cli, spec, words, "--command", "true")
    assert data["winner"] == winner
    pasted(commands(data), spec, shell=spec == "sim:t4")
    assert shown(cli, spec) != before
    pasted(commands(data, "undo"), spec, shell=spec == "sim:t4")
    assert shown(cli, spec) == before


@pytest.mark.parametrize("instances", [("1g.10gb", "1g.10gb", "3g.40gb"), ("3g.40gb", "3g.40gb")], ids=["room", "none"])
def test_instances_that_exist_come_back(cli: Cli, instances: tuple[str, ...]) -> None:
    cli("mig", "apply", "-g", "0", *instances, host=A100).ok()
    for words in (USERS, FARM):
        data = advised(cli, A100, words, "--command", "true")
        pasted([*commands(data), *commands(data, "undo")], A100)
        found = cli("mig", "status", host=A100, output="json").ok().data["gpus"][0]["instances"]
        assert sorted(instance["profile"]["name"] for instance in found) == list(instances)


@pytest.mark.parametrize("users", ["same", "different"])
def test_the_line_that_measures_is_one(cli: Cli, users: str) -> None:
    data = advised(cli, H200, f"--processes 2 --needs cuda-graphs --users {users} --command true")
    assert data["winner"] == "measure"
    (line,) = commands(data)
    program, verb, *rest = line.split()
    assert (program, verb) == ("gpushare", "bench")
    cli(verb, "--dry-run", *rest).ok()


# -- --apply ---------------------------------------------------------------------------------------


def test_apply_sets_up_and_names_what_comes_then(cli: Cli) -> None:
    answer = cli("advise", *FARM, "--apply", host="sim:t4").ok()
    (line,) = answer.out.splitlines()
    assert line.startswith("MPS on GPU 0: threads 50 %")
    assert line.endswith("; undo: gpushare mps stop -g 0")
    assert '"threads_percent": 50.0' in cli("mps", "status", host="sim:t4", output="json").ok().out
    again = cli("advise", *FARM, "--apply", host="sim:t4").ok()
    assert again.out == "nothing to do: the host is as requested\n"
    assert "undo" not in again.err
    for said in (answer.err, again.err):
        assert "gpushare farm -g 0 --copies 4 --parallel 4 --memory 3328M -- CMD" in said


@pytest.mark.parametrize(("words", "answer", "then", "never"), [
    ("cuda-graphs", "", "gpushare bench -g 0 --copies 1,2", "then, run"),
    (None, "whole GPU, or a queue", "gpushare run -g 0 --slice 2ms --wait --memory 90% --over warn -- CMD", "bench"),
])  # fmt: skip
def test_apply_of_what_needs_no_setup(cli: Cli, words: str | None, answer: str, then: str, never: str) -> None:
    more = ("--needs", words) if words else ("--saturating",)
    done = cli("advise", "--processes", "2", "--users", "same", *more, "--apply").ok()
    assert f"nothing to set up; the answer is: {answer}" in done.out
    assert then in done.err
    assert never not in done.err


def test_apply_starts_mps_in_each_instance_that_exists(cli: Cli) -> None:
    World("sim:h100").mig("2g.20gb", "2g.20gb")
    words = "--processes 6 --memory 1G --groups 2 --users same --isolation fault --no-saturating --no-root --apply"
    answer = cli("advise", *words.split(), host="sim:h100").ok()
    daemons = cli("mps", "status", host="sim:h100", output="json").ok().data["mps_daemons"]
    assert len({daemon["device_uuid"] for daemon in daemons}) == 2
    assert {daemon["threads_percent"] for daemon in daemons} == {66.6}
    *lines, undo = answer.out.splitlines()
    assert len(lines) == 2
    assert undo.startswith("undo: ")
    assert undo.count("gpushare mps stop -g MIG-") == 2


def test_apply_of_several_shells_is_refused(refused: Refused) -> None:
    hint = refused("advise", *GROUPS, "--apply", code="several_shells", exit_code=3, host=A100)
    assert "gpushare mig apply -g 0 " in hint
    assert "; gpushare mps start -g group-1 " in hint


def test_mig_is_switched_on_where_the_driver_lists_profiles_only_then(cli: Cli) -> None:
    """Driver 535 and older."""
    World(A100).fault("not-supported", "nvmlDeviceGetGpuInstanceProfileInfo")
    words = ("advise", "--processes", "2", "--memory", "10G", "--isolation", "full", "--apply")
    assert "switch MIG on for GPU 0" in cli(*words, "-n", host=A100).ok().out
    answer = cli(*words, "-y", host=A100).ok()
    assert "GPU 0: MIG is on" in answer.out
    assert "gpushare mig profiles -g 0" in answer.err


@pytest.mark.parametrize(("there", "words", "spec", "steps"), [
    ("", FARM, "sim:t4", ["limit each client process to 50 % of the SM threads"]),
    ("", USERS, A100, ["switch MIG on for GPU 0"]),
    ("mig apply -g 0 3g.40gb", (*FARM, "--destroy"), A100, ["switch MIG off", "serve GPU 0 with an MPS daemon"]),
    ("mps start -g 0", PEOPLE, "sim:t4", ["stop the idle MPS daemon"]),
    ("mps start -g 0", USERS, A100, ["stop the idle MPS daemon", "switch MIG on"]),
    ("mps start -g 0 --threads 30", FARM, "sim:t4", []),
])  # fmt: skip
def test_apply_does_what_the_lines_do_as_one_plan(
    cli: Cli, there: str, words: Any, spec: str, steps: list[str]
) -> None:
    cli(*(there or "status").split(), host=spec).ok()
    before = shown(cli, spec), captured(cli, spec)
    planned = advised(cli, spec, words, "--apply", "-n")
    assert planned["dry_run"] is True
    assert (shown(cli, spec), captured(cli, spec)) == before
    texts = [step["what"] for step in planned["steps"]]
    positions = [next(n for n, text in enumerate(texts) if step in text) for step in steps]
    assert positions == sorted(positions)
    undo = commands(advised(cli, spec, words), "undo")
    assert [step["what"] for step in advised(cli, spec, words, "--apply")["steps"]] == texts
    assert captured(cli, spec) != before[1]
    for command in undo:
        cli(*shlex.split(command)[1:], host=spec).ok()
    # A daemon that was stopped in between has another PID.
    assert captured(cli, spec) == before[1]
    assert "mps" in there or shown(cli, spec) == before[0]


def test_apply_beside_a_daemon_says_how_back(cli: Cli) -> None:
    cli("mps", "start", "--threads", "30", host="sim:t4").ok()
    answer = cli("advise", *FARM, "--apply", host="sim:t4").ok()
    assert answer.out.partition("; undo: ")[2].strip() == "gpushare mps set -g 0 --threads 30 --memory none"


@pytest.mark.parametrize(
    "command", ["echo it's", 'echo "$CUDA_VISIBLE_DEVICES"', "eval true", "gpushare mps stop -g 0"]
)
def test_apply_does_not_read_the_command_of_the_user(cli: Cli, command: str) -> None:
    words = (*USERS, "--command", command, "--apply")
    assert advised(cli, A100, words, "-n") == advised(cli, A100, USERS, "--apply", "-n")
    assert cli("advise", *words, "-y", host=A100).ok().err.count(f"-- {command}") == 1


def test_apply_that_fails_half_way_takes_all_of_it_back(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("mig", "apply", "-g", "0", "3g.40gb", host=A100).ok()
    before = captured(cli, A100)

    def failing(*_: Any, **__: Any) -> Any:
        raise OperationFailed("the last step failed", "look", code="no_daemon")

    with monkeypatch.context() as patched:
        patched.setattr("gpushare.hostfile.steps.plan_start", failing)
        answer = cli("advise", *FARM, "--destroy", "--apply", host=A100)
    assert answer.code == 1
    assert "the last step failed" in answer.err
    assert captured(cli, A100) == before
    World("sim:h100").fault("fail-step", "1")
    first = cli("advise", *USERS, "--apply", host="sim:h100")
    assert first.code != 0
    for one in (answer, first):
        assert one.err.count("error:") == one.err.count("hint:") == 1


# -- what runs now ---------------------------------------------------------------------------------


def test_a_lost_gpu_is_an_error_and_another_one_is_taken(cli: Cli) -> None:
    World("sim:t4").fault("lost", gpu="0")
    for words in ("--processes 2", "--processes 2 -g 0", "--processes 2 -g any", "-g any --live"):
        answer = cli("advise", *words.split(), host="sim:t4")
        assert (answer.code, len(answer.lines("hint"))) == (6, 1)
    World("sim:2xt4").fault("lost", gpu="0")
    assert advised(cli, "2xt4", "--processes 2")["gpu"] == 1


def test_live_takes_what_runs(cli: Cli) -> None:
    for _ in range(3):
        admin.add_process(H200, "0", memory_bytes=4 * 1024**3)
    (workload,) = advised(cli, H200, "--live --no-saturating")["case"]["workloads"]
    assert (workload["processes"], workload["saturating"]) == (3, False)
    assert 0 < workload["memory"] < 4 * 1024**3
    assert workload["user"]


def test_live_does_not_take_who_cannot_be_seen_for_nobody(refused: Refused) -> None:
    refused("advise", "--live", code="nobody", exit_code=6)
    admin.add_process("sim:t4", "0", memory_bytes=1024**3)
    World("sim:t4").fault("blind")
    said = refused("advise", "--live", host="sim:t4", code="not_seen", exit_code=6)
    assert "the processes on GPU 0 cannot be seen" in said


def test_a_recording_is_read(cli: Cli, tmp_path: Path) -> None:
    for _ in range(2):
        admin.add_process(H200, "0", memory_bytes=3 * 1024**3)
    file = str(tmp_path / "r.jsonl")
    cli("observe", "--for", "0.3s", "--interval", "0.1s", "--to", file).ok()
    workloads = advised(cli, H200, "--from", file)["case"]["workloads"]
    assert sum(workload["processes"] for workload in workloads) == 2


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "code", "exit_code"), [
    ("--way mgi", "bad_way", 2), ("--processes 0", "bad_count", 2), ("--processes many", "bad_count", 2),
    (f"--processes {'9' * 5000}", "bad_count", 2), ("--users some", "bad_value", 2),
    ("--isolation quota,bad", "bad_value", 2), ("--needs nccl,gpu", "bad_value", 2), ("--needs ''", "bad_value", 2),
    ("--needs nccl,no-nccl", "bad_combination", 2), ("--latency 20", "bad_duration", 2),
    ("--latency 0", "bad_value", 2), ("--memory 6", "bad_size", 2), ("--memory 34G,17G --processes 3", "bad_count", 2),
    ("--sms 500", "bad_count", 2), ("-g 0-9", "unknown_gpu", 6),
    ("--memory 34G,17G --needs weights=1:2:3", "bad_count", 2), ("--processes 2 --dry-run", "bad_combination", 2),
    ("--pattern often", "bad_value", 2), ("--production x", "bad_count", 2),
    ("--production 1 --memory 60G,40G", "bad_count", 2), ("--production 1 --memory 60G,xyz", "bad_count", 2),
    ("--production 1 --opportunistic 1 --memory 60G,xyz", "bad_size", 2),
    ("--production 1 --processes 2", "two_counts", 2), ("--live --file x", "bad_combination", 2),
    ("--way mps --apply", "bad_combination", 2), ("--live --production 1", "bad_combination", 2),
    ("--file /nowhere/w.yaml", "no_file", 6), ("--from /nowhere/r.jsonl", "no_recording", 6),
    ("-g 7", "unknown_gpu", 6), ("--memory 900G --apply", "nothing_fits", 3),
    # What belongs to the measured command is no need.
    ("--processes 2 true --needs nccl", "bad_combination", 2), ('--measure --command "echo it\'s"', "bad_command", 2),
    ("--measure", "no_command", 2), ("--measure --repeat 0 -- true", "usage", 2),
    ("--measure --for 1s -- true", "bad_combination", 2), ("--measure --for 0 --metric (x) -- true", "bad_duration", 2),
    ("--measure --metric x -- true", "bad_metric", 2), ("--measure --way mps -- true", "bad_combination", 2),
    ("--repeat 3", "bad_combination", 2), ("--processes 2 -- true", "bad_combination", 2),
    ("--measure --production 1 --opportunistic 1 -- true", "pair_not_measured", 3),
    ("--measure -- gs-no-such-program", "command_not_found", 127),
])  # fmt: skip
def test_bad_words_are_refused(refused: Refused, words: str, code: str, exit_code: int) -> None:
    refused("advise", *shlex.split(words), code=code, exit_code=exit_code)


def test_each_option_that_a_pair_makes_superfluous_is_named(refused: Refused) -> None:
    for more, hint in (
        ("--processes 2", "drop --processes"),
        ("--role production", "drop --role"),
        ("--processes 2 --role production", "drop --processes and --role"),
    ):
        words = ("advise", *more.split(), "--production", "1", "--opportunistic", "1")
        assert refused(*words, code="two_counts", exit_code=2).rstrip().endswith(hint)


@pytest.mark.parametrize(("text", "said"), [
    ("", "is empty"), ("workloads: []\n", "is empty"), ("root: yes\n", "no workloads"),
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
    ("workloads: [{memory: 6442450944}]", "give a size with its unit: 6G or 1500M"), (b"\xff\xfe\x00", "is not UTF-8"),
])  # fmt: skip
def test_a_bad_file_names_its_line(cli: Cli, write: Write, text: str | bytes, said: str) -> None:
    file = write(text)
    answer = cli("advise", "-f", file)
    assert (answer.code, len(answer.lines("hint"))) == (2, 1)
    assert said in answer.err
    assert file in answer.err


def test_a_user_without_root_gets_sudo(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.cli.advise.host_facts", lambda state: replace(host_facts(state), root=False))
    lines = commands(advised(cli, A100, USERS))
    assert [line for line in lines if line.startswith("sudo ")] == ["sudo gpushare mig apply -g 0 '2g.20gb*3'"]
    data = advised(cli, A100, USERS, "--no-root")
    assert data["winner"] != "mig"
    assert not [line for line in commands(data) if "sudo" in line]


def test_help_names_every_property(cli: Cli) -> None:
    assert cli("advise", "--help", host=None).out.count("\n") <= 45
    out = re.sub(r"-\s+", "-", cli("advise", "--help-all", host=None).out)
    names = {key: key.replace("_", "-") for key in KEYS if key not in {"name", "user"}}
    assert [key for key, name in names.items() if (name if key in NEEDS else f"--{name}") not in out] == []


def test_a_way_or_kind_that_is_not_to_be_had_names_those_that_are(cli: Cli) -> None:
    words = "--processes 2 --memory 5G --users different --isolation fault --way mig"
    answer = cli("advise", *words.split(), host="sim:t4").ok()
    assert all(text in answer.out for text in ("Tesla T4 has no MIG", "mig-not-there"))
    assert "the advice for this case is: time-slicing" in answer.out + answer.err
    answer = cli("advise", "--like", "games", host="sim:t4")
    assert answer.code == 2
    assert "jupyter, spark, ci, rendering, hpc, serving, training" in answer.err
