"""An opportunistic job for a part of the time: `run --duty-cycle`, and where an earlier tune has found one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gpushare.run.jobs import find_record, write_record
from gpushare.run.results import find_tuned, keep_tuned
from tests.cli.drive import Answer, Started, World, alive, until
from tests.cli.run.test_roles import LOOP, TUNED, peak, program_of, recorded

Cli = Callable[..., Answer]
FOUND = replace(TUNED, duty_percent=55.0, low_priority=True)


@pytest.fixture
def works() -> Iterator[int]:
    """Start a process that works, and return its PID."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def web(world: World, monkeypatch: pytest.MonkeyPatch, works: int) -> int:
    """Let a production job 'web' run under MPS, tuned with a duty cycle; return its PID."""
    recorded(world, works)
    keep_tuned(world.host, FOUND)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    return works


@contextlib.contextmanager
def process(program: str) -> Iterator[int]:
    """Run a Python program that stands for a production job."""
    with subprocess.Popen([sys.executable, "-c", program]) as started:
        try:
            yield started.pid
        finally:
            started.kill()


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(600)"])
def test_it_runs_and_stands_still_in_turn_as_long_as_production_does(
    real: Callable[..., Started], world: World, program: str
) -> None:
    """Also beside one that waits for its kernels without the CPU, which nobody can see in half a second."""
    assert world.host.nvml.count() == 1
    production = real("run", "--production", "web", "--grace", "1", "--", sys.executable, "-c", program)
    until(lambda: peak(world) is not None, "production is known")
    words = ("run", "--opportunistic", "--duty-cycle", "40", "--grace", "1", "--for", "web")
    started = real(*words, "--", sys.executable, "-c", LOOP)
    pid = until(lambda: program_of(world), "it stands still")
    for _ in range(3):
        until(lambda: program_of(world) is None, "it goes on")
        until(lambda: program_of(world) == pid, "it stands still again")
    production.signal(signal.SIGTERM)
    production.result()
    # It is seen within a second that nobody is there to be spared.
    runs: list[bool] = []

    def for_good() -> bool:
        runs[:] = [] if program_of(world) else [*runs, True]
        time.sleep(0.01)
        return len(runs) >= 100

    until(for_good, "it goes on for good")
    started.signal(signal.SIGTERM)
    answer = started.result()
    assert answer.code == 128 + signal.SIGTERM
    assert not alive(pid)
    assert "for 60 % of the time while it runs" in answer.err
    assert "a duty cycle raises production's p99" in answer.err


def test_what_was_tuned_is_taken_with_its_cap(cli: Cli, web: int) -> None:
    words = ("run", "--opportunistic", "--for", "web", "-n")
    planned = cli(*words, "--", "true").ok()
    assert "as a client of the MPS daemon of GPU 0, paused for 45 % of the time while 'web' runs" in planned.out
    # What would run: a client with the tuned limits.
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=70.0" in planned.out
    assert "CUDA_MPS_CLIENT_PRIORITY=1" in planned.out
    assert "paused by SIGSTOP for 45 % of the time while it runs" in planned.err
    assert "when it runs: cap 70 %, low priority, memory limit" in planned.err
    assert "not protected: under MPS, a GPU fault" in planned.err
    # Without a name too, where it is the only one; and by its PID.
    assert "for 45 % of the time" in cli("run", "--opportunistic", "-n", "--", "true").ok().out
    assert "for 45 % of the time" in cli("run", "--opportunistic", "--for", str(web), "-n", "--", "true").ok().out
    assert "for 20 % of the time" in cli(*words, "--duty-cycle", "80%", "--", "true").ok().out
    assert "paused while 'web' works" in cli(*words, "--pause", "--", "true").ok().out
    assert "for 45 % of the time" in cli(*words, "--threads", "70", "--priority", "low", "--", "true").ok().out
    # For all of the time it is not paused, and with limits of one's own neither.
    for more in (("--duty-cycle", "100"), ("--threads", "20"), ("--priority", "normal")):
        answer = cli(*words, *more, "--", "true").ok()
        assert "paused" not in answer.out
        told = "tuned for 55 % of the time with cap 70 %, low priority: with other limits" in answer.err
        assert told == ("--duty-cycle" not in more)


@pytest.mark.usefixtures("web")
def test_nothing_is_taken_from_the_tuning_of_another_job(cli: Cli) -> None:
    """Its PID was given, and it is none of the jobs that are known."""
    with process("import time; time.sleep(600)") as other:
        for more in ((), ("--duty-cycle", "100")):
            planned = cli("run", "--opportunistic", "--for", str(other), *more, "-n", "--", "true").ok()
            assert "paused" not in planned.out
            assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0" in planned.out
            assert "no tuning result found" in planned.err


@pytest.mark.parametrize("percent", ["50", "100"])
def test_outside_mps_it_is_refused_with_a_hint_to_slices(refused: Callable[..., str], percent: str) -> None:
    with process("import time; time.sleep(600)") as other:
        words = ("run", "--opportunistic", "--for", str(other), "--duty-cycle", percent, "--", "true")
        text = refused(*words, code="bad_combination", exit_code=2)
    assert "--way slices" in text
    assert "--pause" in text


def test_outside_mps_what_was_tuned_under_it_means_nothing(cli: Cli, world: World, works: int) -> None:
    recorded(world, works)
    keep_tuned(world.host, FOUND)
    planned = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert "paused" not in planned.out
    assert "whose server has a time-slice of 200us" in planned.out


@pytest.mark.parametrize(
    ("words", "code", "exit_code", "hint"),
    [
        (("--duty-cycle", "50"), "bad_combination", 2, "--opportunistic --for NAME"),
        (("--opportunistic", "--pause", "--duty-cycle", "50"), "bad_combination", 2, "--duty-cycle 50"),
        (("--opportunistic", "--duty-cycle", "0"), "bad_duty_cycle", 2, "--pause"),
        (("--opportunistic", "--duty-cycle", "101"), "bad_duty_cycle", 2, "--pause"),
        (("--opportunistic", "--duty-cycle", "0.001%"), "bad_duty_cycle", 2, "--pause"),
        (("--opportunistic", "--duty-cycle", "half"), "bad_duty_cycle", 2, "--duty-cycle 50"),
        (("--opportunistic", "--duty-cycle", "0.5"), "bad_duty_cycle", 2, "--duty-cycle 50%"),
        (("--opportunistic", "--duty-cycle", "50"), "no_production", 6, "--production NAME"),
    ],
)
def test_a_duty_cycle_that_means_nothing_is_refused(
    refused: Callable[..., str], words: tuple[str, ...], code: str, exit_code: int, hint: str
) -> None:
    assert hint in refused("run", *words, "--", "true", code=code, exit_code=exit_code)


def test_beside_a_job_that_does_not_run_yet_it_is_refused(refused: Callable[..., str], cli: Cli, world: World) -> None:
    """It could not be stopped for the job that is started next, and would take more than was tuned."""
    keep_tuned(world.host, FOUND)
    words = ("run", "--opportunistic", "--for", "web")
    text = refused(*words, "--", "true", code="no_production", exit_code=6)
    assert "tuned to run for 55 % of the time" in text
    assert "gpushare run --production web -g 0 -- CMD" in text
    assert "PERCENTAGE=70.0" in cli(*words, "--duty-cycle", "100", "-n", "--", "true").ok().out


@pytest.mark.parametrize("duty", [0, -5.0, 101, "55", True])
def test_a_record_with_another_duty_cycle_is_no_record(world: World, duty: object) -> None:
    keep_tuned(world.host, replace(FOUND, duty_percent=duty))  # type: ignore[arg-type]
    assert find_tuned(world.host, "web") is None


def test_what_is_stopped_from_time_to_time_is_proved_to_be_a_client(real: Callable[..., Started], world: World) -> None:
    """With the limits that the daemon has of it."""
    assert world.host.nvml.count() == 1
    production = real("run", "--production", "web", "--grace", "1", "--", sys.executable, "-c", LOOP)
    until(lambda: peak(world) is not None, "production is known")
    words = ("run", "--opportunistic", "--for", "web", "--duty-cycle", "50", "--threads", "70", "--grace", "1")
    other = real(*words, "--", sys.executable, "-c", LOOP)
    until(lambda: program_of(world), "it stands still")
    until(lambda: program_of(world) is None, "it goes on")
    until(lambda: len(world.state.processes) >= 2, "both are on the GPU")
    for started in (other, production):
        started.signal(signal.SIGTERM)
        assert started.result().code == 128 + signal.SIGTERM
    said = other.result().err
    assert "is attached to MPS server" in said
    assert "(threads 70 %" in said


def test_beside_a_job_on_another_gpu_it_is_refused(refused: Callable[..., str], world: World, works: int) -> None:
    """It would be stopped for a job that it does not touch."""
    recorded(world, works)
    info = find_record(world.host, "web")
    assert info is not None
    write_record(world.host, replace(info, device_uuid="GPU-other"))
    text = refused("run", "--opportunistic", "--for", "web", "-n", "--", "true", code="other_device", exit_code=2)
    assert "'web' runs on another device, GPU-other, not on GPU 0" in text
    assert "-g GPU-other" in text


def test_production_with_another_cap_than_the_tuned_one_is_told(cli: Cli, world: World) -> None:
    keep_tuned(world.host, replace(FOUND, production_threads_percent=96.0))
    for more, told in (((), True), (("--threads", "50"), True), (("--threads", "96"), False)):
        answer = cli("run", "--production", "web", *more, "-n", "--", "true").ok()
        assert ("tuned with production capped at 96 %" in answer.err) is told
