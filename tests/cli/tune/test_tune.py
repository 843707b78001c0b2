"""`gpushare tune` on the command line, with jobs whose need is known; tests/measure/test_tune.py measures processes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import NotSupported, OperationFailed
from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.measure.tune import Stage
from gpushare.memory.peaks import find_profile
from gpushare.run.results import find_tuned
from gpushare.signals import Ended
from gpushare.sim import admin
from tests.cli.drive import H200, Cli, Patch, Refused, Words, World, missing, sure
from tests.measure.told_jobs import ToldExperiment, tell

JOB = f"{sys.executable} -m gpushare.sim.job --every 0.02"
PAIR = ("--production", f"{JOB} --need 30", "--opportunistic", f"{JOB} --need 95")
# Requests of 5.6 ms at half load, next to a job that always works.
SERVER = ("--production", f"{JOB} --need 95 --busy 50 --latency 5.6", *PAIR[2:])
CAPS = ("--ways", "caps", "--metric", "rate=([0-9.]+)", "--caps", "60,80")
BOTH = ("--metric", "rate=([0-9.]+)", "--p99", "1.2x", "--name", "web")


@pytest.fixture(autouse=True)
def told(monkeypatch: Patch) -> None:
    """Measure jobs that are no processes: what they print, and when, is known."""
    tell(monkeypatch)
    monkeypatch.setattr(ToldExperiment, "refusal", None)


def test_the_result_is_shown_kept_and_applied(cli: Cli, world: World) -> None:
    data = cli("tune", *PAIR, *CAPS, "--name", "web", output="json").ok().data
    assert data["best"]["setting"] == "cap 60 %, low priority"
    assert data["best"]["opportunistic_share"] == pytest.approx(60 / 95, abs=0.01)
    assert (data["ended"], data["stable"], data["name"]) == ("answer", True, "web")
    assert (data["gpu_name"], data["driver"]) == ("NVIDIA H200", world.state.driver)
    assert data["commands"] == [
        f"gpushare run -g 0 --production web -d -- {JOB} --need 30",
        f"gpushare run -g 0 --opportunistic --for web -d -- {JOB} --need 95",
    ]
    kept = json.loads(Path(data["file"]).read_text())
    assert (kept["name"], kept["threads_percent"], kept["driver"]) == ("web", 60.0, world.state.driver)
    assert sure(find_tuned(world.host, "web")).production_memory_bytes is not None
    applied = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert missing(applied.out, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0", "CUDA_MPS_CLIENT_PRIORITY=1") == []
    # The production job's peak is left to it.
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" in applied.out


def test_slices_are_kept_and_both_ways_are_told(cli: Cli, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = cli("-o", "table", "tune", *SERVER, *BOTH, "--caps", "60,20").ok()
    lines, err = " ".join(answer.out.split()), " ".join(answer.err.split())
    assert "found: slice 100us, production slice 16ms: production 1.00 of its rate alone, p99 1.06x" in lines
    # With a cap of 60 % the other does not even do as much: lower ones need not be tried.
    assert "caps: none meets the goal; nearest: cap 60 %, low priority" in lines
    assert max(map(len, answer.out.splitlines())) <= 80
    (chosen,) = (line for line in answer.out.splitlines() if line.startswith("slice 100us") and line.endswith("yes"))
    assert " 16ms " in chosen
    assert f"start production, outside MPS: gpushare run -g 0 --production web -d -- {SERVER[1]}" in err
    kept = sure(find_tuned(world.host, "web"))
    assert (kept.way, kept.production_slice_us, kept.other_slice_us) == ("slices", 16000, 100)


def test_the_commands_that_it_says_to_run(cli: Cli) -> None:
    more = ("--opportunistic", f"{JOB} --need 30 --rate 7", "--copies", "2", "--ways", "slices")
    data = cli("tune", *SERVER, *more, *BOTH, output="json").ok().data
    assert len([command for command in data["commands"] if "--opportunistic --for web" in command]) == 4
    err = cli("tune", *PAIR, *CAPS, "-g", "1", host="sim:2xh200").err
    assert f"run -g 1 --production production -d -- {JOB} --need 30" in err


def test_a_second_tune_goes_on_and_knows_the_jobs(cli: Cli, world: World) -> None:
    first = cli("tune", *PAIR, *CAPS, output="json").ok().data
    again = cli("tune", *PAIR, *CAPS, output="json").ok()
    assert again.data["best"]["setting"] == first["best"]["setting"]
    assert "does it still hold?" in again.err
    assert any(row["earlier"] for row in again.data["curve"])
    assert again.data["seconds"] < first["seconds"]
    (device,) = select("0", world.host.nvml.sweep())
    words = [PAIR[1].split(), PAIR[3].split()]
    both = [find_profile(world.host, device, each) for each in words]
    assert [each and each.memory_bytes for each in both] == [2 * GIB, 2 * GIB]
    assert [each and each.use_percent is not None for each in both] == [True, True]


def test_no_setting_that_meets_the_goal_is_an_answer_of_its_own(cli: Cli, world: World) -> None:
    answer = cli("tune", "--production", f"{JOB} --need 95", *PAIR[2:], *CAPS).ends(7)
    assert "no setting meets the goal; nearest: cap 60 %" in answer.out
    assert "--yield pause" in answer.err
    assert find_tuned(world.host, "production") is None


def test_the_frontier_is_drawn(cli: Cli, refused: Refused, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "frontier.svg"
    cli("tune", *PAIR, *CAPS, "--plot", str(file)).ok()
    assert "frontier" in file.read_text()
    refused("tune", *PAIR, *CAPS, "--plot", str(file), code="file_exists", exit_code=2)


def ending_at(monkeypatch: Patch, settings: int, error: BaseException) -> None:
    """Let an error end the search when so many settings were measured."""
    measure, done = Stage.measure, []

    def counted(self: Stage, *words: Any, **more: Any) -> None:
        if len(done) == settings:
            raise error
        done.append(words)
        measure(self, *words, **more)

    monkeypatch.setattr(Stage, "measure", counted)


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Ended(15), 143, "interrupted"),
        (OperationFailed("the production job ended", "let it run", code="job_ended"), 1, "job_ended"),
    ],
)
def test_the_best_setting_so_far_is_kept_whatever_ends_the_search(
    cli: Cli, world: World, monkeypatch: Patch, error: BaseException, exit_code: int, code: str
) -> None:
    ending_at(monkeypatch, 2, error)
    answer = cli("tune", *PAIR, *CAPS, output="json")
    assert (answer.code, answer.json["errors"][0]["code"]) == (exit_code, code)
    assert (answer.data["best"]["setting"], answer.data["ended"]) == ("cap 60 %, low priority", "interrupted")
    assert "then the other: gpushare run -g 0 --opportunistic --for production" in answer.err
    assert find_tuned(world.host, "production") is not None
    assert world.state.daemons == []


def test_an_unsure_setting_of_an_interrupted_search_is_not_kept(cli: Cli, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gpushare.measure.search.Figures.meets_safely", lambda *_: False)
    ending_at(monkeypatch, 2, KeyboardInterrupt())
    answer = cli("tune", *PAIR, *CAPS).ends(130)
    assert "no setting was kept: the best setting does not surely meet the goal yet" in answer.err
    assert find_tuned(world.host, "production") is None


def test_before_the_first_setting_there_is_nothing_to_show(cli: Cli, monkeypatch: Patch) -> None:
    ending_at(monkeypatch, 0, KeyboardInterrupt())
    answer = cli("tune", *PAIR, *CAPS)
    assert (answer.code, answer.out) == (130, "")


def test_the_end_of_the_budget_is_said(cli: Cli) -> None:
    answer = cli("tune", *SERVER, *BOTH, "--budget", "12s", output="json").ok()
    assert (answer.data["ended"], answer.data["stable"]) == ("budget", False)
    assert answer.data["file"] is not None
    assert "the budget of 12 s is spent; the same tune again goes on from there" in answer.err


def test_a_script_that_runs_it_in_the_background_ends_it_by_sigterm(cli: Cli, monkeypatch: Patch) -> None:
    """A shell lets what it runs there ignore SIGINT: that stays so, as with every other program."""
    came = []

    def measure(_self: Stage, *_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        came.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Stage, "measure", measure)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = cli("tune", *PAIR, *CAPS)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (came, answer.code) == ([signal.SIG_IGN], 143)
    assert "error: interrupted" in answer.err


def test_what_cannot_be_kept_is_shown_all_the_same(cli: Cli, world: World) -> None:
    world.host.state_directory.mkdir()
    (world.host.state_directory / "tuned").write_text("no directory")
    answer = cli("tune", *PAIR, *CAPS, output="json")
    assert answer.data["best"]["setting"] == "cap 60 %, low priority"
    assert (answer.data["file"], answer.json["errors"][0]["code"]) == (None, "directory_unwritable")
    assert answer.code == 4
    assert "start production" not in answer.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--keep", "150%"), "bad_keep"),
        (("--keep", "0.97"), "bad_keep"),
        (("--keep", "most"), "bad_keep"),
        (("--p99", "0.5x"), "bad_factor"),
        (("--p99", "slow"), "bad_factor"),
        # A percentage, as of --keep.
        (("--p99", "110"), "bad_factor"),
        (("--p99", "110%"), "bad_factor"),
        (("--metric", "rate"), "bad_metric"),
        (("--metric", "rate=("), "bad_metric"),
        (("--window", "1ms"), "bad_duration"),
        (("--budget", "0"), "bad_duration"),
        (("--timeout", "0"), "bad_duration"),
        (("--caps", "0"), "bad_percentage"),
        (("--caps", "60,"), "bad_percentage"),
        (("--name", "../x"), "bad_name"),
        (("--plot", "x.gif"), "bad_plot"),
        (("--ways", "mps"), "bad_way"),
        (("--ways", ""), "bad_way"),
        (("--ways", "slices", "--caps", "60"), "bad_combination"),
        (("--production", "'a"), "bad_command"),
        (("--production", " "), "no_command"),
    ],
)
def test_bad_words_are_refused(refused: Refused, words: Words, code: str) -> None:
    production = () if "--production" in words else ("--production", "true")
    refused("tune", *production, "--opportunistic", "true", *words, code=code, exit_code=2)


def test_missing_programs_and_mig_mode_are_refused(refused: Refused, world: World) -> None:
    for words in (("no-such", "true"), ("true", "no-such")):
        pair = ("--production", words[0], "--opportunistic", words[1])
        refused("tune", *pair, code="command_not_found", exit_code=127)
    admin.set_mig(world.spec, "0", ["1g.18gb"])
    assert "gpushare run --mig" in refused("tune", *PAIR, code="mig_mode", exit_code=3, host=H200)


def test_slices_that_cannot_be_set_are_told(cli: Cli, refused: Refused, monkeypatch: Patch) -> None:
    refusal = NotSupported("process 7: a sandbox forbids pidfd_getfd", "run it on the host", code="seccomp")
    monkeypatch.setattr(ToldExperiment, "refusal", refusal)
    answer = cli("tune", *SERVER, *BOTH, "--caps", "20").ok()
    assert "slices: not searched: process 7: a sandbox forbids pidfd_getfd; run it on the" in answer.out
    assert "slices are left out: process 7" in answer.err
    refused("tune", *SERVER, *BOTH[:-2], "--ways", "slices", "--name", "other", code="seccomp", exit_code=3)
