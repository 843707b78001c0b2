"""`gpushare run --production` and `--opportunistic` on the command line."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import NotSupported
from gpushare.base.model import Way
from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.host import store
from gpushare.mps.limits import Limits
from gpushare.run.jobs import PRODUCTION, JobRecord, find_record, is_running, write_record
from gpushare.run.results import Tuned, keep_tuned
from gpushare.run.roles import limits_beside
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Refused, Started, World, alive, until

TUNED = Tuned(
    name="web",
    gpu_name="NVIDIA H200",
    driver="580.159.04",
    threads_percent=70.0,
    low_priority=False,
    way=Way.CAPS,
    production_memory_bytes=40 * GIB,
)


@pytest.fixture
def running(world: World) -> Iterator[int]:
    """Start a process that stands for a production job, and return its PID."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def recorded(world: World, pid: int, peak: int | None = 20 * GIB, index: int = 0) -> None:
    """Write the record of a production job."""
    world.record("web", pid, PRODUCTION, gpu=index, memory_peak_bytes=peak)


def peak(world: World) -> int | None:
    """Return the memory that is noted of the production job, once there is a note."""
    record = find_record(world.host, "web") if world.begun else None
    return None if record is None else record.memory_peak_bytes


def test_a_production_job_is_not_capped_and_is_known(real: Real, world: World) -> None:
    text = "echo cap=$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. $CUDA_MPS_CLIENT_PRIORITY.; cat"
    started = real("run", "--production", "web", "--", "sh", "-c", text, stdin=subprocess.PIPE)
    until(lambda: peak(world) is not None, "its memory is noted")
    answer = started.result()
    assert (answer.code, answer.out) == (0, "cap=. .\n")
    record = find_record(world.host, "web")
    assert record is not None
    assert record.devices == (world.uuid(),)
    assert record.memory_peak_bytes is not None
    assert not is_running(world.host, record)


def test_the_callers_own_limits_do_not_cap_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "20")
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "1")
    text = 'test -z "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE$CUDA_MPS_CLIENT_PRIORITY"'
    assert cli("run", "--production", "web", "--", "sh", "-c", text).code == 0


def test_its_memory_is_left_to_it(cli: Cli, world: World, running: int) -> None:
    recorded(world, running, 100 * GIB)
    # It has no context and no variables of ours: as a process outside MPS it is spared by a time-slice.
    answer = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert "share a time-slice of 200us; no cap, memory limit" in answer.err
    keep_tuned(world.host, replace(TUNED, production_memory_bytes=130 * GIB))
    ended = JobRecord(name="web", pid=2**21, started=1, devices=(world.uuid(),), memory_peak_bytes=100 * GIB)
    write_record(world.host, ended)
    planned = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    limit = int(planned.out.partition("MEM_LIMIT=0=")[2].partition("M")[0])
    assert 8_000 < limit < 11_000
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=70.0" in planned.out
    assert "CUDA_MPS_CLIENT_PRIORITY=0" in planned.out


def test_its_memory_counts_once_though_its_peak_has_just_grown(
    world: World, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(world, running, 60 * GIB)
    record = find_record(world.host, "web")
    assert record is not None
    grown = replace(record, memory_peak_bytes=61 * GIB)
    monkeypatch.setattr("gpushare.run.roles.spared_record", lambda *_: record)
    monkeypatch.setattr("gpushare.run.roles.living_productions", lambda *_: [grown])
    device = select("0", world.host.nvml.sweep())[0]
    left = limits_beside(world.host, device, Limits(), "web").limits.memory_limit_bytes
    assert left is not None
    assert left > 70 * GIB


def test_without_tuning_the_safe_default_holds_and_what_it_does_not_protect_is_said(cli: Cli) -> None:
    text = "test $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE = 60.0 && test $CUDA_MPS_CLIENT_PRIORITY = 1"
    answer = cli("run", "--opportunistic", "--", "sh", "-c", text)
    assert answer.code == 0
    assert "no tuning result found" in answer.err
    assert "not protected: under MPS, a GPU fault of either job ends both" in answer.err
    assert "no memory limit" in answer.err


def test_beside_a_job_that_runs_the_gpu_is_the_one_that_it_is_on(cli: Cli, running: int) -> None:
    world = World("sim:2xh200")
    keep_tuned(world.host, TUNED)
    words = ("run", "--opportunistic", "-n", "--for")
    assert "this host has 2 GPUs" in cli(*words, "web", "--", "true", host=world.spec).err
    recorded(world, running, index=1)
    # Outside MPS, where a pause protects it.
    for beside in ("web", str(running)):
        planned = cli(*words, beside, "--", "true", host=world.spec).ok()
        assert world.uuid(1) in planned.out
        assert world.uuid(0) not in planned.out


def test_of_any_gpu_a_job_takes_that_of_the_job_that_it_yields_to(cli: Cli, running: int) -> None:
    world = World("sim:3xh200")
    recorded(world, running, index=1)
    foreign = str(admin.add_process(world.spec, gpu="2"))
    for gpus in ("any", "0-2"):
        for beside, index in (("web", 1), (foreign, 2)):
            words = ("run", "-n", "--opportunistic", "--memory", "4G", "-g", gpus, "--for", beside)
            assert world.uuid(index) in cli(*words, "--", "true", host=world.spec).ok().out
    assert (
        "another device"
        in cli("run", "--opportunistic", "--for", "web", "-g", "0,2", "--", "true", host=world.spec).err
    )


def test_it_is_said_that_the_named_job_does_not_run(cli: Cli, world: World, running: int) -> None:
    recorded(world, running)
    world.record("api", 4_000_000, PRODUCTION)
    words = ("run", "-n", "--opportunistic", "--for", "api", "--yield", "slices", "-g", "0", "--", "true")
    assert "opportunistic; there is not exactly one production job to yield to now: " in cli(*words).ok().err


def test_it_is_said_whether_production_runs(cli: Cli, world: World, running: int) -> None:
    words = ("run", "-n", "--opportunistic", "--yield", "slices", "--", "true")
    unspared = "opportunistic; there is not exactly one production job to yield to now: "
    assert unspared in cli(*words).ok().err
    recorded(world, running)
    assert "opportunistic next to 'web': " in cli(*words).ok().err
    world.record("api", os.getpid(), PRODUCTION)
    assert unspared in cli(*words).ok().err


def test_given_limits_win(cli: Cli, world: World) -> None:
    keep_tuned(world.host, TUNED)
    answer = cli(
        *("run", "--opportunistic", "--for", "web", "--threads", "20", "--memory", "3G", "--priority", "low"),
        *("-n", "--", "true"),
    ).ok()
    for word in ("PERCENTAGE=20.0", "MEM_LIMIT=0=2560M", "PRIORITY=1"):
        assert word in answer.out


def test_settings_of_another_machine_are_told_of(cli: Cli, world: World) -> None:
    keep_tuned(world.host, replace(TUNED, gpu_name="NVIDIA T4"))
    note = "tuned on another GPU or driver: tune it again here"
    assert note in cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").err
    keep_tuned(world.host, replace(TUNED, driver="1.0"))
    assert note in cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").err


def test_where_slices_are_not_supported_a_job_outside_mps_is_spared_by_a_pause(
    cli: Cli, world: World, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.host.nvml.count() == 1
    refusal = NotSupported("a sandbox forbids pidfd_getfd", "run it on the host", code="seccomp")
    monkeypatch.setattr("gpushare.run.start.why_not_settable", lambda *_: refusal)
    text = "test -z $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    words = ("run", "--opportunistic", "--for", str(running))
    answer = cli(*words, "--", "sh", "-c", text)
    assert answer.code == 0
    assert f"next to process {running}: paused" in answer.err
    assert "time-slices are not supported here: a sandbox forbids pidfd_getfd; this job is paused" in answer.err
    asked = cli("-o", "json", *words, "--yield", "slices", "--", "true")
    assert asked.error["code"] == "seccomp"
    assert cli(*words, "--yield", "pause", "-n", "--", "true").ok().err.count("not supported") == 0


def test_a_damaged_or_foreign_record_is_no_record(world: World, running: int) -> None:
    recorded(world, running)
    path = world.host.run_directory / "jobs" / "web.json"
    true = json.loads(path.read_text())
    assert find_record(world.host, "web") is not None
    wrong = (json.dumps({**true, **part}) for part in ({"pid": -1}, {"started": None}, {"device_uuid": None}))
    for text in ("", "[]", "{}", *wrong, "[" * 5000):
        path.write_text(text)
        assert find_record(world.host, "web") is None


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--opportunistic", "--for", "nobody", "--", "true"), "no_production", 6),
        (("--opportunistic", "--for", "999999", "--", "true"), "no_process", 6),
        (("--opportunistic", "--yield", "pause", "--", "true"), "no_production", 6),
        (("--opportunistic", "--yield", "requeue", "--", "true"), "no_production", 6),
        (("--production", "1web", "--", "true"), "bad_name", 2),
        (("--production", "", "--", "true"), "bad_name", 2),
    ],
)
def test_bad_roles_are_refused(refused: Refused, words: tuple[str, ...], code: str, exit_code: int) -> None:
    text = refused("run", *words, code=code, exit_code=exit_code)
    assert "pause" not in words or "--for PID" in text


def test_a_name_is_taken_while_its_job_lives(refused: Refused, world: World, running: int) -> None:
    recorded(world, running)
    refused("run", "--production", "web", "--", "true", code="name_in_use", exit_code=19)


def test_a_production_job_that_takes_it_all_leaves_no_room(refused: Refused, world: World) -> None:
    keep_tuned(world.host, replace(TUNED, production_memory_bytes=140 * GIB))
    refused("run", "--opportunistic", "--for", "web", "--", "true", code="memory_does_not_fit", exit_code=19)
    assert os.path.exists(world.host.state_directory / "tuned" / "web.json")


@pytest.fixture
def busy() -> Iterator[int]:
    """Start a process that works, and return its PID."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


def program_of(world: World) -> int | None:
    """Return the program of the only run on the host, once it is stopped, or its channels are off."""
    for process in world.state.processes if world.begun else ():
        info = world.host.processes.describe(process.pid)
        if process.real and info is not None and (info.stopped or process.channels_off):
            return process.pid
    return None


LOOP = "import time\nwhile True: time.sleep(0.01)"


@pytest.fixture(params=["channels", "stop"])
def way(request: pytest.FixtureRequest, world: World) -> str:
    """Let programs be paused by their channels, and by SIGSTOP where a sandbox forbids that."""
    if request.param == "stop":
        world.set(channel_fault="seccomp")
    return str(request.param)


def paused(real: Real, world: World, production: int, program: str = LOOP) -> tuple[Started, int]:
    """Start an opportunistic program beside a process that works; return both once it stands still."""
    words = ("run", "--opportunistic", "--yield", "pause", "--for", str(production), "--name", "batch", "--grace", "1s")
    started = real(*words, "--", sys.executable, "-c", program)
    return started, until(lambda: program_of(world), "the opportunistic program stands still")


def test_a_paused_program_goes_on_when_production_has_ended(real: Real, world: World, busy: int, way: str) -> None:
    started, pid = paused(real, world, busy)
    until(lambda: bool(world.process(pid).channels_off) == (way == "channels"), "it is paused in this way")
    os.kill(busy, signal.SIGKILL)
    until(lambda: program_of(world) is None, "it goes on")
    answer = started.end(signal.SIGTERM)
    assert answer.code == 128 + signal.SIGTERM
    assert not alive(pid)
    assert "paused by its GPU channels while it works" in answer.err
    stopped = "forbids pidfd_getfd (Docker's seccomp profile does): paused by SIGSTOP from now on"
    assert (stopped in answer.err) == (way == "stop")
    assert world.run("pause", "list").data["jobs"] == []


def test_under_mps_work_that_uses_no_cpu_pauses_too(real: Real, world: World) -> None:
    """A production job that waits for its kernels without spinning: only the GPU shows that it works."""
    waiting = (sys.executable, "-c", LOOP)
    production = real("run", "--production", "web", "--grace", "1s", "--", *waiting)
    until(lambda: peak(world) is not None, "production is known")
    other = real("run", "--opportunistic", "--for", "web", "--yield", "pause", "--grace", "1s", "--", *waiting)
    pid = until(lambda: program_of(world), "the opportunistic program stands still")
    assert production.end(signal.SIGTERM).code == 128 + signal.SIGTERM
    until(lambda: program_of(world) is None, "it goes on")
    answer = other.end(signal.SIGTERM)
    assert answer.code == 128 + signal.SIGTERM
    assert not alive(pid)
    assert "only while it uses the CPU" not in answer.err


def test_under_mps_it_is_said_what_is_not_seen(
    cli: Cli, world: World, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(world, running)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    words = ("run", "--opportunistic", "--for", "web", "--yield", "pause", "-n", "--", "true")
    assert "under MPS production counts as working only while it uses the CPU" in cli(*words).err


def test_a_paused_program_can_be_ended(real: Real, world: World, busy: int, way: str) -> None:
    started, pid = paused(real, world, busy)
    assert started.end().code == 128 + signal.SIGINT
    assert not alive(pid)


def test_no_program_stays_paused_when_gpushare_dies(real: Real, world: World, busy: int, way: str) -> None:
    started, pid = paused(real, world, busy)
    started.signal(signal.SIGKILL)
    until(lambda: not alive(pid), "the guard ends it")


def test_nor_does_a_worker_in_a_session_of_its_own(real: Real, world: World, busy: int, tmp_path: Path) -> None:
    """The kernel ends the program (SIGHUP to an orphaned group that is stopped) before the guard can look for workers."""
    world.set(channel_fault="seccomp")
    written = tmp_path / "worker"
    start = "import subprocess\nworker = subprocess.Popen(['sleep', '600'], start_new_session=True).pid\n"
    started, pid = paused(real, world, busy, f"{start}open({str(written)!r}, 'w').write(f'{{worker}}.')\n{LOOP}")
    worker = int(until(lambda: written.exists() and written.read_text().partition(".")[0], "the worker"))
    until(lambda: (info := world.host.processes.describe(worker)) and info.stopped, "it is stopped")
    started.signal(signal.SIGKILL)
    until(lambda: not alive(pid) and not alive(worker), "the guard ends both")


def test_a_production_job_that_cannot_be_made_known_is_not_started(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody would spare it, and its exit code would not tell."""
    real, done = store.replace_file, tmp_path / "done"

    def full(path: Path, text: str, **named: Any) -> None:
        if path.parent.name == "jobs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, text, **named)

    monkeypatch.setattr(store, "replace_file", full)
    answer = cli("run", "--production", "web", "--", "touch", str(done))
    assert answer.code == 1
    (line,) = answer.lines("error")
    assert "the record of a job, cannot be written: No space left" in line
    assert not done.exists()
    # The daemon that was started for it is gone.
    assert world.state.daemons == []


def test_a_requeued_program_is_ended_while_production_works_and_started_again(real: Real, tmp_path: Path) -> None:
    runs, go = tmp_path / "runs", tmp_path / "go"
    work = (
        f"import os, time\nwhile True:\n"
        f"    time.sleep(0.05)\n"
        f"    end = time.time() + 0.5\n"
        f"    while os.path.exists({str(go)!r}) and time.time() < end: pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", work]) as production:
        try:
            program = f"import time; open({str(runs)!r}, 'a').write('x'); time.sleep(600)"
            words = ("run", "--opportunistic", "--yield", "requeue", "--for", str(production.pid), "--grace", "1s")
            started = real(*words, "--", sys.executable, "-c", program)
            until(lambda: runs.exists() and runs.read_text() == "x", "it runs")
            go.touch()
            time.sleep(1.5)
            assert runs.read_text() == "x"
            go.unlink()
            until(lambda: runs.read_text() == "xx", "it runs again")
        finally:
            production.kill()
    answer = started.end()
    assert answer.code == 130
    assert f"ended, because process {production.pid} works" in answer.err
