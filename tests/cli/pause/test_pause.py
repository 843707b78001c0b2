"""``gpushare pause`` and ``gpushare resume``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpushare
from gpushare.host.records import replace_file
from gpushare.sim import admin
from gpushare.sim.channels import CHANNELS
from tests.cli.drive import H200, Cli, Real, Refused, World, missing, refusals, until

OFF = sorted(CHANNELS)


def record(world: World, pid: int) -> Path:
    return world.directory / "run" / "pause" / f"{pid}.json"


def off(world: World, pid: int) -> list[int]:
    return world.process(pid).channels_off


@pytest.fixture
def pid(world: World) -> int:
    world.run("status")
    return admin.add_process(H200)


def kill_guard(world: World, pid: int) -> None:
    (job,) = world.run("pause", "list").ok().data["jobs"]
    assert job["pid"] == pid
    os.kill(job["guard"], signal.SIGKILL)
    until(lambda: not world.run("pause", "list").data["jobs"][0]["guarded"], "the guard is gone")


def test_a_job_goes_off_the_gpu_and_back(cli: Cli, world: World, pid: int) -> None:
    data = cli("pause", str(pid), output="json").ok().data
    assert (off(world, pid), data["already_paused"], data["undo"]) == (OFF, False, f"gpushare resume {pid}")
    assert data["job"]["processes"] == [pid]
    (job,) = cli("pause", "list", output="json").ok().data["jobs"]
    assert (job["pid"], job["state"], job["until"], job["guarded"]) == (pid, "paused", None, True)
    data = cli("resume", str(pid), output="json").ok().data
    assert ([each["pid"] for each in data["jobs"]], off(world, pid)) == ([pid], [])
    assert not record(world, pid).exists()
    assert "no job is paused" in cli("pause", "list", output="table").ok().out
    # A dry run changes nothing.
    data = cli("pause", str(pid), "--dry-run", output="json").ok().data
    assert [step["undo"] for step in data["steps"]] == [None, *[f"gpushare resume {pid}"] * 2]
    # No program does the same.
    assert [step["command"] for step in data["steps"]] == [None] * 3
    assert "$" not in cli("pause", str(pid), "--dry-run", output="table").ok().out
    assert off(world, pid) == []
    assert not record(world, pid).exists()
    cli("pause", str(pid)).ok()
    cli("resume", str(pid), "--dry-run").ok()
    assert off(world, pid) == OFF


def test_the_pid_that_run_prints_is_enough(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the gpushare that runs the job, not of a process on the GPU."""
    supervisor = str(cli("-o", "json", "run", "-d", "--slice", "2ms", "--", "sleep", "600").ok().data["pid"])
    (program,) = until(world.pids, "it is on the GPU")
    assert supervisor != str(program)
    cli("pause", supervisor).ok()
    assert off(world, program) == OFF
    cli("resume", supervisor, "-n").ok()
    assert off(world, program) == OFF
    cli("resume", supervisor).ok()
    assert off(world, program) == []
    cli("pause", supervisor).ok()
    monkeypatch.setenv("GPUSHARE_HOST", H200)
    gpushare.job(supervisor).resume()
    assert off(world, program) == []
    cli("stop", supervisor).ok()


def test_a_second_pause_says_so_and_all_jobs_are_resumed(cli: Cli, world: World, pid: int) -> None:
    cli("pause", str(pid), "--timeout", "10m").ok()
    before = record(world, pid).read_text()
    answer = cli("pause", str(pid)).ok()
    assert missing(answer.out, f"process {pid} is already paused, since ", ", until ") == []
    assert "undo" not in answer.out
    assert record(world, pid).read_text() == before
    data = cli("pause", str(pid), output="json").ok().data
    assert (data["already_paused"], data["undo"]) == (True, None)
    cli("resume", "--all").ok()
    other = admin.add_process(H200)
    for each in (pid, other):
        cli("pause", str(each)).ok()
    data = cli("resume", "--all", output="json").ok().data
    assert ([job["pid"] for job in data["jobs"]], off(world, pid), off(world, other)) == ([pid, other], [], [])
    assert "no job is paused" in cli("resume", "--all").ok().out


def test_the_guard_resumes_at_the_timeout(cli: Cli, world: World, pid: int) -> None:
    cli("pause", str(pid), "--timeout", "0.3s").ok()
    until(lambda: not record(world, pid).exists(), "it is resumed")
    assert off(world, pid) == []


def test_a_guard_that_is_gone(cli: Cli, world: World, pid: int) -> None:
    cli("pause", str(pid)).ok()
    kill_guard(world, pid)
    assert f"process {pid}: the guard of its pause is gone" in cli("pause", "list").ok().err
    checks = cli("doctor", output="json").data["checks"]
    assert [(check["verdict"], check["remedy"]) for check in checks if check["id"] == "pause.guard"] == [
        ("warn", f"gpushare resume {pid}")
    ]
    cli("resume", str(pid)).ok()
    assert off(world, pid) == []
    # A second pause gives it another.
    cli("pause", str(pid)).ok()
    kill_guard(world, pid)
    assert not cli("pause", str(pid), output="json").ok().data["already_paused"]
    assert world.run("pause", "list").data["jobs"][0]["guarded"]
    assert off(world, pid) == OFF
    cli("resume", str(pid)).ok()


def test_the_guard_pauses_what_the_job_creates_and_ends_with_it(cli: Cli, world: World, pid: int) -> None:
    cli("pause", str(pid)).ok()
    world.alter(pid, channels_off=[])
    # As if the recorded channels were others: what the guard finds on the GPU is new.
    text = record(world, pid).read_text()
    # In one go: a guard that finds half a record takes it for a pause that is over.
    replace_file(record(world, pid), text.replace(str(CHANNELS[0]), str(CHANNELS[0] + 0x1000)))
    until(lambda: off(world, pid) == OFF, "the channels are off")
    cli("resume", str(pid)).ok()
    assert off(world, pid) == []
    cli("pause", str(pid)).ok()
    admin.end_process(H200, pid)
    assert world.run("pause", "list").ok().data["jobs"] == []
    until(lambda: not record(world, pid).exists(), "the record is gone")


def test_status_marks_it(cli: Cli, pid: int) -> None:
    other = admin.add_process(H200)
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert [process["paused_since"] for process in gpu["processes"]] == [None, None]
    cli("pause", str(pid)).ok()
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    since = {process["pid"]: process["paused_since"] for process in gpu["processes"]}
    assert abs(since[pid] - time.time()) < 60
    assert since[other] is None
    assert f"note: paused: process {pid}; see by whom, and until when: gpushare pause list" in cli("status").err
    cli("resume", "--all").ok()


@refusals(
    "usage 2: pause | resume",
    "no_job 6: pause 999999999 | pause nobody",
    "bad_name 2: pause 'no body'",
    "no_context 6: pause 1",
    "bad_combination 2: pause list --timeout 3s | resume 1 --all",
    "not_paused 6: resume 1 | resume nobody",
)
def test_wrong_words(refused: Refused, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused(*words, code=code, exit_code=exit_code)


@pytest.mark.parametrize("timeout", ["0", "-1", "31d", "soon"])
def test_wrong_timeout(refused: Refused, pid: int, timeout: str) -> None:
    refused("pause", str(pid), f"--timeout={timeout}", code="bad_duration", exit_code=2)


def test_nothing_under_mps_is_paused(refused: Refused, cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    assert "a pause would stop all of them" in refused("pause", str(world.client()), code="under_mps", exit_code=3)
    daemon = world.state.daemons[0]
    for pid in (daemon.pid, daemon.servers[0].pid):
        refused("pause", str(pid), code="under_mps" if world.state.daemons else "not_on_gpu", exit_code=3)


@pytest.mark.parametrize("fault", ["seccomp", "ptrace_scope", "no_pidfd_getfd", "gvisor", "wsl", "forged"])
def test_a_probe_that_fails_is_named(refused: Refused, world: World, pid: int, fault: str) -> None:
    world.set(channel_fault=fault)
    refused("pause", str(pid), code="forged_descriptor" if fault == "forged" else fault, exit_code=3)


def test_a_driver_that_refuses_leaves_all_on(refused: Refused, world: World, pid: int) -> None:
    world.set(channel_statuses={hex(0x2080110B): 0x1B})
    refused("pause", str(pid), code="driver_refuses", exit_code=3)
    assert not record(world, pid).exists()


def test_a_failed_resume_keeps_the_record(cli: Cli, world: World, pid: int) -> None:
    cli("pause", str(pid)).ok()
    world.set(channel_statuses={hex(0x2080110B): 0x62})
    answer = cli("resume", str(pid), output="json").ends(1, "driver_failed")
    assert f"try again: gpushare resume {pid}" in answer.error["hint"]
    assert off(world, pid) == OFF
    world.set(channel_statuses={})
    # The guard completes what was begun, unless somebody is faster.
    until(lambda: off(world, pid) == [] or cli("resume", str(pid)), "it is resumed")
    until(lambda: off(world, pid) == [] and not record(world, pid).exists(), "the record is gone")


def test_other_users_need_root_and_consent(cli: Cli, refused: Refused, world: World) -> None:
    world.run("status")
    pid = admin.add_process(H200, user="daemon")
    text = refused("pause", str(pid), code="needs_consent", exit_code=19, asks=True)
    assert f"pauses process {pid} (of daemon)" in text
    cli("pause", str(pid), "-y", asks=True).ok()
    assert off(world, pid) == OFF
    planned = cli("resume", str(pid), "-n", output="json").ok().data["undo"]
    undo = cli("resume", str(pid), output="json").ok().data["undo"]
    assert undo == planned
    cli(*undo.split()[1:], "-y", asks=True).ok()
    assert off(world, pid) == OFF


def test_a_plain_user_cannot_pause_others(refused: Refused, world: World, pid: int) -> None:
    world.fault("user", 1234)
    refused("pause", str(pid), code="other_user", exit_code=4)


def test_ctrl_c_of_run_resumes_the_job_first(world: World, real: Real) -> None:
    # Its handler waits for the GPU, as the end of a training step does.
    program = (
        "import json, os, pathlib, signal, sys, time\n"
        "state = pathlib.Path(sys.argv[1])\n"
        "def end(*_):\n"
        "    while json.loads(state.read_text())['processes'][0]['channels_off']: time.sleep(0.02)\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    assert world.mig("1g.18gb")[0]
    state = world.directory / "state.json"
    started: Any = real("run", "--mig", "1g.18gb", "--", sys.executable, "-c", program, str(state))
    pid = int(started.process.stdout.readline())
    until(lambda: any(process.pid == pid and process.gpu_uuid for process in world.state.processes), "it is on the GPU")
    world.run("pause", str(pid)).ok()
    assert off(world, pid) == OFF
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(60) == 5
