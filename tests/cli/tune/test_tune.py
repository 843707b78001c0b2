"""`gpushare tune` on the command line, with jobs whose need is known; tests/measure/test_tune.py measures processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.memory.peaks import digest_of, find_profile
from gpushare.run.results import find_tuned
from tests.cli.drive import Answer, World
from tests.measure.told_jobs import tell

Cli = Callable[..., Answer]
JOB = f"{sys.executable} -m gpushare.sim.job --every 0.02"
QUICK = ("--ways", "caps", "--metric", "rate=([0-9.]+)", "--window", "0.1s", "--rounds", "2")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure jobs that are no processes: what they print, and when, is known."""
    tell(monkeypatch)


@pytest.mark.usefixtures("told")
def test_the_curve_is_shown_and_the_result_kept_and_applied(cli: Cli, world: World) -> None:
    answer = cli(
        *("tune", "--production", f"{JOB} --need 30", "--opportunistic", f"{JOB} --need 95", "--caps", "60"),
        *(*QUICK, "--name", "web"),
        output="json",
    ).ok()
    data = answer.data
    assert data["best"]["threads_percent"] == 60
    assert data["best"]["low_priority"] is True
    assert data["best"]["opportunistic_share"] == pytest.approx(60 / 95, abs=0.005)
    assert {row["setting"] for row in data["curve"]} == {"cap 60 %, low priority", "cap 60 %"}
    assert (data["gpu_name"], data["driver"]) == ("NVIDIA H200", world.state.driver)
    assert f"then the other: gpushare run -g 0 --opportunistic --for web -- {JOB} --need 95" in answer.err
    kept = json.loads(Path(data["file"]).read_text())
    assert (kept["name"], kept["threads_percent"], kept["driver"]) == ("web", 60.0, world.state.driver)
    tuned = find_tuned(world.host, "web")
    assert tuned is not None
    assert tuned.production_memory_bytes is not None

    applied = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0" in applied.out
    assert "CUDA_MPS_CLIENT_PRIORITY=1" in applied.out
    # The production job's peak is left to it.
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" in applied.out


@pytest.mark.usefixtures("told")
def test_the_peaks_and_the_use_of_both_commands_are_kept(cli: Cli, world: World) -> None:
    web, train = f"{JOB} --need 30", f"{JOB} --need 95"
    cli("tune", "--production", web, "--opportunistic", train, "--caps", "60", *QUICK).ok()
    (device,) = select("0", world.host.nvml.sweep())
    both = [find_profile(world.host, device, one.split()) for one in (web, train)]
    assert [one and one.memory_bytes for one in both] == [2 * GIB, 2 * GIB]
    digests = [digest_of(device, one.split()) for one in (web, train)]
    assert [one and list(one.kept) for one in both] == [[digests[1]], [digests[0]]]


@pytest.mark.usefixtures("told")
def test_no_setting_that_meets_the_goal_is_an_answer_of_its_own(cli: Cli, world: World) -> None:
    answer = cli(
        *("tune", "--production", f"{JOB} --need 95", "--opportunistic", f"{JOB} --need 95", "--caps", "60"), *QUICK
    )
    assert answer.code == 7
    assert "no setting meets the goal; nearest: cap 60 %" in answer.out
    assert "--yield pause" in answer.err
    assert find_tuned(world.host, "production") is None


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--keep", "150%"), "bad_keep"),
        (("--keep", "0.97"), "bad_keep"),
        (("--keep", "1"), "bad_keep"),
        (("--keep", "most"), "bad_keep"),
        (("--p99", "0.5x"), "bad_factor"),
        (("--p99", "slow"), "bad_factor"),
        (("--metric", "rate"), "bad_metric"),
        (("--metric", "rate=("), "bad_metric"),
        (("--window", "1ms"), "bad_duration"),
        (("--caps", "0"), "bad_percentage"),
        (("--name", "../x"), "bad_name"),
    ],
)
def test_bad_words_are_refused(refused: Callable[..., str], words: tuple[str, str], code: str) -> None:
    refused("tune", "--production", "true", "--opportunistic", "true", *words, code=code, exit_code=2)


def test_bad_commands_are_refused(refused: Callable[..., str]) -> None:
    refused("tune", "--production", "'a", "--opportunistic", "true", code="bad_command", exit_code=2)
    refused("tune", "--production", " ", "--opportunistic", "true", code="no_command", exit_code=2)
    refused("tune", "--production", "no-such", "--opportunistic", "true", code="command_not_found", exit_code=127)
    refused("tune", "--production", "true", "--opportunistic", "no-such", code="command_not_found", exit_code=127)


def test_a_job_that_ends_is_named(cli: Cli) -> None:
    answer = cli("tune", "--production", "true", "--opportunistic", "sh -c 'echo no memory; exit 3'", *QUICK)
    assert answer.code == 1
    (error,) = answer.lines("error")
    assert "the opportunistic job ended before it was measured: exit code 3: no memory" in error
