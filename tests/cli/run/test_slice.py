"""`gpushare run --slice` and `run --production --slice`: outside MPS, with a time-slice that is set and read back."""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.model import Way
from gpushare.run.jobs import find_record, output_path
from gpushare.run.results import keep_tuned
from tests.cli.drive import Cli, Real, Refused, World, missing, sure, until
from tests.cli.run.test_roles import TUNED

JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", "--noise", "0.2", "--need")
OUTSIDE = ("--production", "web", "--slice", "16ms")


@pytest.fixture(autouse=True)
def used(world: World) -> None:
    """Make the simulated host: the tests look at its state before a job does."""
    world.run("status")


def slices(world: World) -> list[int]:
    return [process.slices.get("compute", 2048) for process in world.state.processes]


def test_production_runs_outside_mps_with_its_slice(real: Real, world: World) -> None:
    job = real("run", *OUTSIDE, "--grace", "1s", "--", *JOB, "50")
    until(lambda: slices(world) == [16000], "it has its slice")
    assert world.state.daemons == []
    record = sure(find_record(world.host, "web"))
    assert record.role == "production"
    until(lambda: (find_record(world.host, "web") or record).memory_peak_bytes, "its memory is noted")
    answer = job.end(signal.SIGTERM)
    assert re.search(r"process \d+ has a time-slice of 16ms \(read back\)", answer.err)
    assert re.search(r"process \d+ runs on GPU 0", answer.err)


@pytest.mark.parametrize(("weight", "text"), [("3", "6.144ms"), ("1", "2.048ms"), ("0.5", "1.024ms")])
def test_a_weight_is_a_slice(cli: Cli, weight: str, text: str) -> None:
    planned = cli("run", "--weight", weight, "-n", "--", "true").ok()
    assert "nvidia-cuda-mps-control" not in planned.out
    assert f"outside MPS, with a time-slice of {text}" in planned.out


def test_two_programs_share_by_their_weights(real: Real, world: World) -> None:
    jobs = [real("run", "--weight", text, "--", *JOB, "100") for text in ("3", "1")]
    until(lambda: sorted(slices(world)) == [2048, 6144], "both have their slices")
    for job in jobs:
        job.signal(signal.SIGTERM)
    assert "has a time-slice of 6.144ms (read back)" in jobs[0].result().err
    jobs[1].result()


def test_a_plain_user_of_a_simulated_host_owns_the_programs_that_it_starts(real: Real, world: World) -> None:
    world.fault("user", "4242")
    job = real("run", "--slice", "300us", "--name", "batch", "--", *JOB, "50")
    until(lambda: slices(world) == [300], "it has its slice")
    world.asked("timeslice", "set", "700us", "batch").ok()
    assert slices(world) == [700]
    world.asked("timeslice", "reset", "batch").ok()
    job.end(signal.SIGTERM)


def test_a_slice_that_was_set_meanwhile_is_left(real: Real, world: World) -> None:
    job = real("run", "--slice", "300us", "--name", "batch", "--", *JOB, "50")
    until(lambda: slices(world) == [300], "it has its slice")
    world.run("timeslice", "set", "700us", "batch")
    time.sleep(1.5)
    assert slices(world) == [700]
    world.run("timeslice", "reset", "batch")
    time.sleep(1.5)
    assert slices(world) == [2048]
    (listed,) = world.asked("jobs", "-o", "json").data["jobs"]
    assert listed["slice_us"] is None
    assert job.end(signal.SIGTERM).err.count("read back") == 1


@pytest.mark.parametrize("code", ["no_pidfd_getfd", "gvisor", "seccomp", "wsl"])
@pytest.mark.parametrize("words", [("--slice", "500us"), ("--weight", "3"), ("--production", "web", "--slice", "16ms")])
def test_without_slices_no_program_starts(
    refused: Refused, world: World, tmp_path: Path, code: str, words: tuple[str, ...]
) -> None:
    world.set(channel_fault=code)
    for more in ((), ("-n",)):
        text = refused("run", *words, *more, "--", "touch", str(tmp_path / "ran"), code=code, exit_code=3)
        assert "time-slices cannot be set here: " in text
    assert not (tmp_path / "ran").exists()


def test_production_whose_slice_was_only_tuned_starts_without_it(real: Real, world: World) -> None:
    keep_tuned(world.host, replace(TUNED, threads_percent=100.0, way=Way.SLICES, production_slice_us=8000))
    world.set(channel_fault="seccomp")
    answer = real("run", "--production", "web", "--", *JOB, "50", "--seconds", "2").result().ok()
    assert "the time-slice cannot be set" in answer.err


def test_it_is_planned(cli: Cli, world: World) -> None:
    planned = cli("run", *OUTSIDE, "-n", "--", "true").ok()
    assert "run true on GPU 0, outside MPS, with a time-slice of 16ms" in planned.out
    assert "nvidia-cuda-mps-control" not in planned.out
    assert "with a time-slice of 16ms" in cli("run", "--production", "web", "-n", "--", "true").ok().out
    keep_tuned(world.host, replace(TUNED, threads_percent=100.0, way=Way.SLICES, production_slice_us=8000))
    tuned = ("run", "--production", "web")
    assert "with a time-slice of 8ms" in cli(*tuned, "-n", "--", "true").ok().out
    assert "with a time-slice of 4ms" in cli(*tuned, "--slice", "4ms", "-n", "--", "true").ok().out
    for more in (("--priority", "normal"), ("--threads", "50")):
        assert "as a client of the MPS daemon" in cli(*tuned, *more, "-n", "--", "true").ok().out


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("--slice", "10us"), "bad_slice", "20us"),
        (("--slice", "500"), "bad_slice", "500us"),
        (("--slice", "31ms"), "slice_too_long", "16ms"),
        (("--slice", "1s"), "slice_too_long", "a slice of 1s is above 30ms"),
        (("--weight", "0.4"), "bad_weight", "give 3"),
        (("--weight", "15"), "bad_weight", "give 3"),
        (("--weight", "nan"), "bad_weight", "give 3"),
        (("--weight", "three"), "bad_weight", "give 3"),
    ],
)
def test_what_does_not_go_together_is_refused(refused: Refused, words: tuple[str, ...], code: str, hint: str) -> None:
    assert hint in refused("run", *words, "--", "true", code=code, exit_code=2)


def test_in_an_exclusive_mode_it_is_refused(refused: Refused, world: World) -> None:
    with world.file.changed() as state:
        state.gpus[0].compute_mode = 3
    assert "DEFAULT" in refused("run", *OUTSIDE, "--", "true", code="exclusive_process", exit_code=19)


def test_production_under_mps_next_to_the_group_is_refused(real: Real, refused: Refused, world: World) -> None:
    job = real("run", "--opportunistic", "--yield", "slices=400us", "--", *JOB, "50")
    until(lambda: [s.slices.get("compute") for d in world.state.daemons for s in d.servers] == [400], "its slice")
    words = ("run", "--production", "web", "--priority", "normal", "--", "true")
    assert "--production web" in refused(*words, code="production_under_mps", exit_code=19)
    job.end(signal.SIGTERM)


def test_the_slice_follows_production_by_its_output(real: Real, world: World) -> None:
    log = output_path(world.host, "web")
    web = real("run", *OUTSIDE, "--metric", "rate=([0-9.]+)", "--", *JOB, "90")
    until(lambda: slices(world) == [16000], "production has its slice")
    words = ("run", "--opportunistic", "--for", "web", "--keep", "90%", "--", *JOB, "90")
    other = real(*words)
    until(lambda: any(1 for d in world.state.daemons for s in d.servers if s.slices.get("compute")), "it begins")
    seen: set[int] = set()

    def moved() -> bool:
        seen.update(s.slices.get("compute", 0) for d in world.state.daemons for s in d.servers)
        return len(seen) >= 4

    until(moved, "the slice moves")
    # With a trial of the first scan.
    assert all(20 <= each <= 2049 for each in seen)
    before = log.stat().st_size
    time.sleep(4)
    with log.open() as file:
        file.seek(before)
        rates = [float(each) for each in re.findall(r"rate=([0-9.]+)\n", file.read())]
    assert sum(rates) / len(rates) > 85
    # Production ends: nobody is there to be spared.
    web.end(signal.SIGTERM)
    until(
        lambda: all(s.slices.get("compute", 2048) == 2048 for d in world.state.daemons for s in d.servers),
        "it is let go",
    )
    answer = other.end(signal.SIGTERM)
    assert missing(answer.err, "share a time-slice of ", "'web' keeps 90 % of its speed") == []


def test_with_quiet_only_what_is_wrong_is_told(real: Real, world: World) -> None:
    words = ("-q", "run", *OUTSIDE, "--", *JOB, "50", "--seconds", "1")
    assert real(*words).result().err == ""
    world.set(channel_fault="no_ptrace")
    assert "the time-slice cannot be set" in real(*words).result().err


def test_a_driver_that_hangs_is_not_asked_for_ever(real: Real, world: World) -> None:
    world.set(channel_fault="hang")
    answer = real("run", *OUTSIDE, "--", *JOB, "50", "--seconds", "3").result().ok()
    assert answer.err.count("the driver does not answer") == 1
