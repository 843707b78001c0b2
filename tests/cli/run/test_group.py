"""`gpushare run --opportunistic --yield slices`: jobs in one MPS daemon with one time-slice, next to production outside it."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace

import pytest

from gpushare.base.model import Way
from gpushare.run.jobs import PrintedRate, find_record, write_record
from gpushare.run.results import keep_tuned
from tests.cli.drive import Cli, Real, Refused, World, until
from tests.cli.run.test_roles import TUNED, recorded, running

__all__ = ["running"]
JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", "--need", "90")


def server_slices(world: World) -> list[int]:
    return [server.slices.get("compute", 2048) for daemon in world.state.daemons for server in daemon.servers]


def test_all_jobs_go_into_one_daemon_whose_server_has_the_slice(real: Real, world: World, running: int) -> None:
    assert world.host.nvml.count() == 1
    words = ("run", "--opportunistic", "--for", str(running), "--grace", "1s", "--", *JOB)
    jobs = [real(*words), real(*words)]
    until(lambda: [process.sm_percent for process in world.state.processes] == [90, 90], "both run")
    until(lambda: server_slices(world) == [200], "the server has the slice")
    # Each shows the slice of the server.
    (listed, other) = world.asked("jobs", "-o", "json").data["jobs"]
    assert (listed["slice_us"], other["slice_us"]) == (200, 200)
    # Each looks four times a second.
    time.sleep(1.0)
    for job in jobs:
        job.signal(signal.SIGTERM)
    answers = [job.result() for job in jobs]
    assert [answer.code for answer in answers] == [0, 0]
    for answer in answers:
        assert "share a time-slice of 200us (MPS server " in answer.err
        assert "is attached to MPS server" in answer.err
        assert f"next to process {running}: all opportunistic jobs of GPU 0 share a time-slice of 200us" in answer.err
    assert world.state.daemons == []


def test_what_was_tuned_is_taken(cli: Cli, world: World, running: int) -> None:
    keep_tuned(world.host, replace(TUNED, threads_percent=100.0, way=Way.SLICES, other_slice_us=200))
    # It counts before production runs, too.
    planned = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert "whose server has a time-slice of 200us" in planned.out
    recorded(world, running)
    planned = cli("run", "--opportunistic", "-n", "--", "true").ok()
    assert "whose server has a time-slice of 200us" in planned.out
    assert "THREAD_PERCENTAGE" not in planned.out
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" in planned.out


def test_next_to_production_under_mps_a_tuning_for_slices_gives_way_to_a_cap(
    cli: Cli, world: World, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_tuned(world.host, replace(TUNED, threads_percent=100.0, way=Way.SLICES))
    recorded(world, running)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    planned = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0" in planned.out


def test_caps_next_to_production_outside_mps_are_refused(refused: Refused, running: int) -> None:
    words = ("run", "--opportunistic", "--for", str(running), "--yield", "caps", "--", "true")
    text = refused(*words, code="production_outside_mps", exit_code=19)
    assert "--yield slices" in text


@pytest.mark.parametrize("more", [("--yield", "slices"), ("--keep", "97%")])
def test_slices_next_to_production_under_mps_are_refused(
    refused: Refused, world: World, running: int, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    recorded(world, running)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    text = refused(
        "run", "--opportunistic", "--for", "web", *more, "--", "true", code="production_under_mps", exit_code=19
    )
    assert "gpushare run --production web -- CMD" in text


@pytest.mark.parametrize(
    ("words", "code", "exit_code", "hint"),
    [
        (("--opportunistic", "--yield", "both"), "bad_yield", 2, "caps=60"),
        (("--opportunistic", "--yield", "pause=3"), "bad_yield", 2, "caps=60"),
        (("--opportunistic", "--yield", "slices="), "bad_yield", 2, "slices=200us"),
        (("--opportunistic", "--yield", "slices=x"), "bad_slice", 2, "500us"),
        (("--opportunistic", "--yield", "caps=0"), "bad_yield", 2, "--yield caps=60"),
        (("--opportunistic", "--yield", "caps=60", "--threads", "50"), "bad_combination", 2, "--yield caps=60"),
        (("--opportunistic", "--keep", "0.97"), "bad_keep", 2, "--keep 97%"),
        (("--opportunistic", "--keep", "100"), "bad_keep", 2, "--keep 97%"),
        (("--opportunistic", "--keep", "97%"), "no_production", 6, "--production NAME"),
        (("--production", "web", "--metric", "ab"), "bad_metric", 2, "--metric"),
    ],
)
def test_what_does_not_go_together_is_refused(
    refused: Refused, words: tuple[str, ...], code: str, exit_code: int, hint: str
) -> None:
    assert hint in refused("run", *words, "--", "true", code=code, exit_code=exit_code)


def test_adapt_needs_productions_progress(refused: Refused, world: World, running: int) -> None:
    recorded(world, running)
    for target in ("web", str(running)):
        words = ("run", "--opportunistic", "--for", target, "--keep", "97%", "--", "true")
        text = refused(*words, code="no_progress", exit_code=6)
        assert "--metric 'rate=([0-9.]+)' -- CMD" in text


def test_adapt_is_planned_with_what_production_keeps(cli: Cli, world: World, running: int) -> None:
    recorded(world, running)
    before = find_record(world.host, "web")
    assert before is not None
    write_record(world.host, replace(before, rate=PrintedRate("/tmp/x", "a(b)")))
    planned = cli("run", "--opportunistic", "--for", "web", "--keep", "95%", "-n", "--", "true").ok()
    assert "whose server has a time-slice by which 'web' keeps 95 %" in planned.out
