"""``gpushare advise --measure`` on a simulated host, with jobs whose need is known, and so the right answer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.model import ComputeMode, Way
from gpushare.connect import connect
from gpushare.measure.bench import Bench
from tests.cli.advise.asking import commands
from tests.cli.bench.conftest import WINDOW, job
from tests.cli.drive import Cli, Real, World, same, until, until_one_run_is_over

pytestmark = pytest.mark.usefixtures("printed_windows")
FARM = ("--processes", "2", "--memory", "1G", "--users", "same", "--no-saturating")
SURE = (*FARM, "--isolation", "none", "--latency", "none", "--pattern", "steady")


def measured(cli: Cli, *words: str) -> Any:
    return cli("-o", "json", "advise", "--measure", *words).ok().data


def test_the_rules_are_confirmed_for_a_small_job(cli: Cli, world: World) -> None:
    data = measured(cli, *SURE, "--repeat", "2", *WINDOW, *job(40))
    assert (data["rules"]["winner"], data["winner"]) == ("mps", "mps")
    assert data["measured"]["effect"] == "confirmed"
    assert data["measured"]["ratio"] == pytest.approx(2, rel=0.1)
    assert (data["measured"]["copies"], data["confidence"]) == (2, "high")
    assert data["measurement"]["kind"] == "gpushare bench"
    assert {cell["way"] for cell in data["measurement"]["cells"]} == {
        *("queue", "timeslice", "mps", "mps:200/n", "mps:100/n")
    }
    assert commands(data)[-1].endswith(shlex.join(job(40)[1:])), "the lines name the program"
    assert (world.state.daemons, world.pids()) == ([], [])


def test_the_ways_that_are_not_told_apart_are_marked_and_the_slower_ones_are_not(cli: Cli) -> None:
    answer = cli("advise", "--measure", *SURE, "--repeat", "2", *WINDOW, *job(40)).ok()
    marked = {line.split()[0] for line in answer.out.splitlines() if " ~ " in line or " * " in line}
    assert {"mps", "mps:100/n"} <= marked
    assert not marked & {"queue", "timeslice"}


def slower_under_mps() -> list[str]:
    """Return a job that fills the GPU and makes 60 of 100 units under MPS (engines with CUDA graphs lose there)."""
    words = shlex.join(job(100)[1:])
    script = f'case "$CUDA_MPS_PIPE_DIRECTORY" in */pipe) rate=60;; *) rate=100;; esac; exec {words} --rate "$rate"'
    return ["--", "sh", "-c", script]


def test_the_rules_are_wrong_about_a_job_that_mps_slows_down(cli: Cli) -> None:
    answer = cli("advise", "--measure", *SURE, "--repeat", "2", *WINDOW, *slower_under_mps())
    lines = dict(line.split(None, 1) for line in answer.ok().out.splitlines()[1:5])
    assert lines["answer"] in {"time-slicing", "one at a time, each with the whole GPU"}
    assert lines["rules"].startswith("MPS (medium confidence")
    assert lines["measured"].startswith("the rules said MPS; measured: ")
    assert " is 1.6" in lines["measured"]
    assert "measured here" in answer.out
    assert "mps start" not in answer.out


def test_the_measured_cap_is_in_the_commands(cli: Cli) -> None:
    """Two that want 80 percent each and disturb each other: with 50 percent each they do not."""
    data = measured(cli, *SURE, "--repeat", "2", *WINDOW, *job(80, "--contention", "20"))
    assert data["measured"]["effect"] == "changed"
    assert data["measured"]["way"] == "mps:100/n"
    assert data["rules"]["commands"][0]["command"].startswith("gpushare mps start -g 0 --memory ")
    assert commands(data)[0].startswith("gpushare mps start -g 0 --threads 50 ")


def test_a_way_that_a_veto_refuses_is_never_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ways = Bench._launches, set()

    def launches(self: Bench, way: Any, *more: Any) -> Any:
        ways.add(way.kind)
        return real(self, way, *more)

    monkeypatch.setattr(Bench, "_launches", launches)
    words = ("--processes", "2", "--memory", "1G", "--users", "different", "--saturating", "--repeat", "1")
    data = measured(cli, *words, *WINDOW, *job(40))
    assert ways == {Way.WHOLE, Way.TIMESLICE}
    assert {cell["way"] for cell in data["measurement"]["cells"]} == {"queue", "timeslice"}
    assert data["winner"] != "mps"


def test_a_vetoed_mps_is_not_even_the_baseline(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an exclusive compute mode that an MPS daemon holds, one copy alone could only run under MPS."""
    cli("mps", "start").ok()
    connect(world.spec).nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    monkeypatch.setattr(Bench, "_launches", lambda *_: pytest.fail("it was measured"))
    words = ("--processes", "2", "--users", "different", "--saturating")
    answer = cli("-o", "json", "advise", "--measure", *words, *WINDOW, *job(40))
    assert (answer.code, answer.json["status"]) == (3, "partial")


def test_two_processes_are_assumed_where_their_number_is_unknown(cli: Cli) -> None:
    words = ("--users", "same", "--no-saturating", "--needs", "graphics", "--repeat", "1")
    data = measured(cli, *words, *WINDOW, *job(20))
    assert data["case"]["workloads"][0]["processes"] == 2
    assert {cell["copies"] for cell in data["measurement"]["cells"]} == {2}


def test_what_does_not_share_is_not_measured(cli: Cli) -> None:
    answer = cli(
        "-o", "json", "advise", "--measure", "--processes", "2", "--memory", "100G", "--", "gs-no-such-program"
    )
    assert (answer.ok().data["winner"], answer.data["measurement"]) == ("whole-gpu", None)
    assert "nothing to compare" in answer.data["measured"]["sentence"]
    assert "assuming 2 processes" not in answer.err, "their number was given"
    data = measured(cli, "--processes", "1", "--", "gs-no-such-program")
    assert data["measured"]["effect"] == "open"
    assert "does not share" in data["measured"]["sentence"]


def test_dry_run_says_what_would_be_measured(cli: Cli, world: World) -> None:
    before = same(world.spec)
    data = cli("-o", "json", "advise", "--measure", "-n", *FARM, *WINDOW, *job(40)).ok().data
    assert any("under timeslice, 3 times" in step["what"] for step in data["steps"])
    assert same(world.spec)[1] == before[1]


def test_apply_sets_the_final_answer_up(cli: Cli, world: World) -> None:
    answer = cli("advise", "--measure", *SURE, "--repeat", "2", "--apply", *WINDOW, *job(80, "--contention", "20")).ok()
    (daemon,) = world.state.daemons
    assert daemon.threads == 50
    assert "note: measured: the rules said MPS; measured: MPS with 50 % each is 1.2" in answer.err
    cli("mps", "stop").ok()


def test_the_screen_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--repeat", "1", *WINDOW, *job(40, "--seconds", "6000"))
    text = cli("-o", "table", "advise", "--measure", *FARM, *words).ok().out
    lines = text.splitlines()
    assert lines[0].startswith("MPS  on GPU 0")
    assert lines[1].startswith("  rules: MPS")
    assert any(line.startswith("  measured: MPS is ") for line in lines)
    # A command is never wrapped: it is there to be copied.
    assert max(len(line) for line in lines if "gpushare.sim.job" not in line) <= 80


def test_ctrl_c_answers_from_what_was_measured(real: Real, world: World) -> None:
    first = ("-o", "json", "advise", "--measure", *FARM, "--repeat", "50")
    started = real(*first, *job(40, "--work", "30"))
    until_one_run_is_over(world)
    answer = started.end()
    assert answer.code == 130
    document = answer.json
    assert (document["status"], document["errors"][0]["code"]) == ("partial", "interrupted")
    assert document["data"]["measurement"]["runs"]
    assert document["data"]["rules"]["winner"] == "mps"
    assert document["data"]["winner"]
    assert (world.state.daemons, world.pids()) == ([], [])


def test_ctrl_c_before_anything_was_measured_leaves_the_rules_answer(real: Real, world: World) -> None:
    started = real("-o", "json", "advise", "--measure", *FARM, "--", "sleep", "600")
    until(lambda: world.begun and world.pids(), "the first copy runs")
    answer = started.end()
    assert answer.code == 130
    data = answer.json["data"]
    assert (data["winner"], data["measured"]["effect"]) == ("mps", "open")
    assert "nothing was measured" in answer.json["errors"][0]["message"]


def test_a_command_that_fails_already_alone(cli: Cli, world: World) -> None:
    answer = cli("-o", "json", "advise", "--measure", *FARM, "--", "false")
    assert (answer.code, answer.json["errors"][0]["code"]) == (1, "command_failed")
    assert (world.state.daemons, world.pids()) == ([], [])


def test_the_command_may_be_named_by_its_option(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "ran"
    command = f"touch {shlex.quote(str(out))}"
    data = measured(cli, *FARM, "--repeat", "1", "--command", command)
    assert out.exists()
    assert data["measurement"]["command"] == shlex.split(command)
