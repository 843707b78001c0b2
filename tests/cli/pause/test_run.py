"""Jobs of `gpushare run --yield pause`, whose channels are off when somebody dies."""

from __future__ import annotations

import os
import signal
import sys

import psutil

from gpushare.pause.record import paused_jobs
from tests.cli.drive import Real, World
from tests.cli.run.test_roles import LOOP, alive, busy, paused, until

__all__ = ["busy"]


def test_only_its_run_resumes_it(real: Real, world: World, busy: int) -> None:
    started, pid = paused(real, world, busy)
    # The state in the record follows the pause.
    (job,) = until(lambda: world.run("pause", "list").data["jobs"], "it is listed")
    assert (job["pid"], job["by_run"], job["guarded"], job["guard"]) == (pid, True, True, started.pid)
    assert job["name"] == "batch"
    assert world.run("pause", "list").lines("note") == [
        f"note: 'batch' (process {pid}): its gpushare run pauses it while production works, and resumes it"
    ]
    for words in (("pause", str(pid)), ("resume", str(pid)), ("resume", "batch"), ("swap", "out", "batch")):
        assert world.run(*words).ends(19, "paused_by_run").error["hint"].endswith("gpushare stop batch")
    assert "gpushare resume" not in world.run("status").err
    assert world.run("resume", "--all").data["jobs"] == []
    # On a slow machine production may seem idle for a moment.
    until(lambda: world.process(pid).channels_off, "it is still paused")
    # As the hint says.
    world.run("stop", str(pid)).ok()
    assert (started.result().code, paused_jobs(world.host)) == (128 + signal.SIGTERM, [])
    assert not list((world.directory / "run" / "pause").glob("*.json"))


def test_one_whose_run_and_guard_were_killed_is_freed_by_its_record(real: Real, world: World, busy: int) -> None:
    started, pid = paused(real, world, busy)
    guards = [each for each in psutil.Process(started.pid).children() if each.cmdline()[1:2][0].endswith("guard.py")]
    assert guards
    for process in (*guards, psutil.Process(started.pid)):
        process.kill()
    until(lambda: not alive(started.pid) or started.process.poll() is not None, "it is gone")
    assert alive(pid)
    answer = world.run("pause", "list").ok()
    assert [(job["pid"], job["guarded"]) for job in answer.data["jobs"]] == [(pid, False)]
    checks = world.run("doctor").data["checks"]
    assert [check["verdict"] for check in checks if check["id"] == "pause.guard"] == ["warn"]
    world.run("resume", str(pid)).ok()
    assert world.process(pid).channels_off == []
    os.kill(pid, signal.SIGKILL)


def test_a_job_with_a_name_is_paused_by_it(real: Real, world: World) -> None:
    assert world.host.nvml.count() == 1
    assert world.mig("1g.18gb")
    words = ("run", "--name", "train", "--grace", "1s", "--mig", "1g.18gb", "--")
    started = real(*words, sys.executable, "-c", LOOP)
    until(lambda: any(program.real and program.gpu_uuid for program in world.state.processes), "it is on the GPU")
    (process,) = (program for program in world.state.processes if program.real)
    assert world.run("pause", "train").ok().data["job"]["name"] == "train"
    assert world.process(process.pid).channels_off
    assert world.run("pause", "list").data["jobs"][0]["name"] == "train"
    # By its name in the record, even where no job has it any more.
    (job,) = world.run("resume", "train").ok().data["jobs"]
    # Until gpushare has seen its program, the job is gpushare with its children.
    assert (job["processes"], world.process(process.pid).channels_off) == ([process.pid], [])
    world.run("pause", "train").ok()
    # Its end resumes it first.
    assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM
