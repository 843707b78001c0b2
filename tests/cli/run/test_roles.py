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
from gpushare.run.jobs import PRODUCTION, JobRecord, PrintedRate, find_record, is_running, write_record
from gpushare.run.results import Tuned, keep_tuned
from gpushare.run.roles import limits_beside
from gpushare.sim import admin
from tests.cli.drive import Cli, Patch, Real, Refused, Started, Words, World, alive, missing, refusals, sure, until

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
    record = sure(find_record(world.host, "web"))
    assert record.devices == (world.uuid(),)
    assert record.memory_peak_bytes is not None
    assert not is_running(world.host, record)


def test_the_callers_own_limits_do_not_cap_it(cli: Cli, monkeypatch: Patch) -> None:
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
    assert 8_000 < int(planned.out.partition("MEM_LIMIT=0=")[2].partition("M")[0]) < 11_000
    assert missing(planned.out, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=70.0", "CUDA_MPS_CLIENT_PRIORITY=0") == []


def test_its_memory_counts_once_though_its_peak_has_just_grown(world: World, running: int, monkeypatch: Patch) -> None:
    recorded(world, running, 60 * GIB)
    record = sure(find_record(world.host, "web"))
    grown = replace(record, memory_peak_bytes=61 * GIB)
    monkeypatch.setattr("gpushare.run.roles.spared_record", lambda *_: record)
    monkeypatch.setattr("gpushare.run.roles.living_productions", lambda *_: [grown])
    device = select("0", world.host.nvml.sweep())[0]
    assert sure(limits_beside(world.host, device, Limits(), "web").limits.memory_limit_bytes) > 70 * GIB


def test_without_tuning_the_safe_default_holds_and_what_it_does_not_protect_is_said(cli: Cli) -> None:
    text = "test $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE = 60.0 && test $CUDA_MPS_CLIENT_PRIORITY = 1"
    answer = cli("run", "--opportunistic", "--", "sh", "-c", text).ok()
    assert "no tuning result found" in answer.err
    assert missing(answer.err, "not protected: under MPS, a GPU fault of either job ends both", "no memory limit") == []


def test_the_gpu_is_that_of_the_job_to_yield_to(cli: Cli, running: int) -> None:
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
    world = World("sim:3xh200")
    recorded(world, running, index=1)
    foreign = str(admin.add_process(world.spec, gpu="2"))
    for gpus in ("any", "0-2"):
        for beside, index in (("web", 1), (foreign, 2)):
            words = ("run", "-n", "--opportunistic", "--memory", "4G", "-g", gpus, "--for", beside)
            assert world.uuid(index) in cli(*words, "--", "true", host=world.spec).ok().out
    answer = cli("run", "--opportunistic", "--for", "web", "-g", "0,2", "--", "true", host=world.spec)
    assert "a different device" in answer.err


def test_it_is_said_whether_production_runs(cli: Cli, world: World, running: int) -> None:
    words = ("run", "-n", "--opportunistic", "--yield", "slices", "--", "true")
    unspared = "opportunistic; there is not exactly one production job to yield to now: "
    assert unspared in cli(*words).ok().err
    recorded(world, running)
    assert "opportunistic next to 'web': " in cli(*words).ok().err
    world.record("api", os.getpid(), PRODUCTION)
    assert unspared in cli(*words).ok().err
    recorded(world, running)
    world.record("api", 4_000_000, PRODUCTION)
    words = ("run", "-n", "--opportunistic", "--for", "api", "--yield", "slices", "-g", "0", "--", "true")
    assert "opportunistic; there is not exactly one production job to yield to now: " in cli(*words).ok().err


def test_what_was_tuned_gives_way_to_given_limits_and_other_machines(cli: Cli, world: World) -> None:
    keep_tuned(world.host, TUNED)
    answer = cli(
        *("run", "--opportunistic", "--for", "web", "--threads", "20", "--memory", "3G", "--priority", "low"),
        *("-n", "--", "true"),
    ).ok()
    for word in ("PERCENTAGE=20.0", "MEM_LIMIT=0=2560M", "PRIORITY=1"):
        assert word in answer.out
    keep_tuned(world.host, replace(TUNED, gpu_name="NVIDIA T4"))
    note = "tuned on another GPU or driver: tune it again here"
    assert note in cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").err
    keep_tuned(world.host, replace(TUNED, driver="1.0"))
    assert note in cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").err


def test_without_slices_a_job_outside_mps_is_paused(cli: Cli, world: World, running: int, monkeypatch: Patch) -> None:
    assert world.host.nvml.count() == 1
    refusal = NotSupported("a sandbox forbids pidfd_getfd", "run it on the host", code="seccomp")
    monkeypatch.setattr("gpushare.run.start.why_not_settable", lambda *_: refusal)
    text = "test -z $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    words = ("run", "--opportunistic", "--for", str(running))
    answer = cli(*words, "--", "sh", "-c", text).ok()
    assert f"next to process {running}: paused" in answer.err
    assert "time-slices are not supported here: a sandbox forbids pidfd_getfd; this job is paused" in answer.err
    assert cli("-o", "json", *words, "--yield", "slices", "--", "true").error["code"] == "seccomp"
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


@refusals(
    "no_production 6: --opportunistic --for nobody -- true | --opportunistic --yield pause -- true",
    "no_production 6: --opportunistic --yield requeue -- true",
    "no_process 6: --opportunistic --for 999999 -- true",
    "bad_name 2: --production 1web -- true | --production '' -- true",
)
def test_bad_roles_are_refused(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    assert "pause" not in words or "--for PID" in refused("run", *words, code=code, exit_code=exit_code)


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
    assert (stopped in answer.err, world.run("pause", "list").data["jobs"]) == (way == "stop", [])


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


def test_under_mps_it_is_said_what_is_not_seen(cli: Cli, world: World, running: int, monkeypatch: Patch) -> None:
    recorded(world, running)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    words = ("run", "--opportunistic", "--for", "web", "--yield", "pause", "-n", "--", "true")
    assert "under MPS production counts as working only while it uses the CPU" in cli(*words).err


def test_a_paused_program_ends_with_its_gpushare(real: Real, world: World, busy: int, way: str) -> None:
    started, pid = paused(real, world, busy)
    assert started.end().code == 128 + signal.SIGINT
    assert not alive(pid)
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


def test_a_production_job_without_a_record_is_not_started(
    cli: Cli, world: World, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Nobody would spare it, and its exit code would not tell."""
    real, done = store.replace_file, tmp_path / "done"

    def full(path: Path, text: str, **named: Any) -> None:
        if path.parent.name == "jobs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, text, **named)

    monkeypatch.setattr(store, "replace_file", full)
    (line,) = cli("run", "--production", "web", "--", "touch", str(done)).ends(1).lines("error")
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
    assert f"ended, because process {production.pid} works" in started.end().ends(130).err


@pytest.fixture
def two(world: World) -> Iterator[list[str]]:
    """Start two processes that stand for production jobs, with 40 and 60 GiB, and return their names."""
    with subprocess.Popen(["sleep", "600"]) as first, subprocess.Popen(["sleep", "600"]) as other:
        try:
            for name, process, peak in (("web", first, 40), ("llm", other, 60)):
                world.record(name, process.pid, PRODUCTION, memory_peak_bytes=peak * GIB)
            yield ["llm", "web"]
        finally:
            first.kill()
            other.kill()


@pytest.mark.usefixtures("two")
def test_several_production_jobs(refused: Refused, cli: Cli, two: list[str], world: World) -> None:
    text = refused("run", "--opportunistic", "--yield", "pause", "--", "true", code="several_production", exit_code=2)
    assert missing(text, "2 production jobs run on GPU 0: llm, web", "--for llm") == []
    planned = cli("run", "--opportunistic", "-n", "--", "true").ok()
    limit = int(planned.out.partition("MEM_LIMIT=0=")[2].partition("M")[0])
    total = 143771
    assert total - 102 * 1024 < limit < total - 100 * 1024
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0" in planned.out
    # Except of those whose memory is unknown.
    write_record(world.host, replace(sure(find_record(world.host, two[0])), memory_peak_bytes=None))
    planned = cli("run", "--opportunistic", "-n", "--", "true").ok()
    assert "_MEM_LIMIT=0=" in planned.out
    assert "the memory limit leaves nothing to 'llm', whose memory is unknown; set one with --memory" in planned.err


@pytest.mark.parametrize(("words", "told"), [((), True), (("--threads", "90"), False)])
def test_the_default_cap_is_told_where_it_is_taken(cli: Cli, words: tuple[str, ...], told: bool) -> None:
    planned = cli("run", "--opportunistic", "-n", *words, "--", "true").ok()
    assert ("using the default: cap 60 %" in planned.err) is told


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("nope", "no_production", "no job 'nope' is running, and tune has kept no result for it"),
        ("4194300", "no_process", "there is no process 4194300"),
        ("tuned", "gpu_not_named", "this host has 4 GPUs; 'tuned' is not running: say where this job is to run"),
    ],
)
def test_the_job_to_spare_is_looked_for_before_its_gpu(target: str, code: str, text: str) -> None:
    world = World.new("sim:4xh100")
    keep_tuned(
        world.host,
        Tuned(
            name="tuned", gpu_name=None, driver=None, threads_percent=60.0, low_priority=True, way=Way.CAPS, path=Path()
        ),
    )
    answer = world.run("run", "--opportunistic", "--for", target, "--", "true")
    assert (answer.error["code"], answer.error["message"]) == (code, text)


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
        assert missing(answer.err, "share a time-slice of 200us (MPS server ", "is attached to MPS server") == []
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


def test_beside_mps_a_tuning_for_slices_gives_way_to_a_cap(
    cli: Cli, world: World, running: int, monkeypatch: Patch
) -> None:
    keep_tuned(world.host, replace(TUNED, threads_percent=100.0, way=Way.SLICES))
    recorded(world, running)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    planned = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0" in planned.out


def test_caps_next_to_production_outside_mps_are_refused(refused: Refused, running: int) -> None:
    words = ("run", "--opportunistic", "--for", str(running), "--yield", "caps", "--", "true")
    assert "--yield slices" in refused(*words, code="production_outside_mps", exit_code=19)


@pytest.mark.parametrize("more", [("--yield", "slices"), ("--keep", "97%")])
def test_slices_beside_mps_are_refused(
    refused: Refused, world: World, running: int, monkeypatch: Patch, more: Words
) -> None:
    recorded(world, running)
    monkeypatch.setattr("gpushare.run.roles.is_under_mps", lambda *_: True)
    words = ("run", "--opportunistic", "--for", "web", *more, "--", "true")
    assert "gpushare run --production web -- CMD" in refused(*words, code="production_under_mps", exit_code=19)


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
def test_bad_combinations_are_refused(refused: Refused, words: Words, code: str, exit_code: int, hint: str) -> None:
    assert hint in refused("run", *words, "--", "true", code=code, exit_code=exit_code)


def test_adapt_needs_productions_progress(refused: Refused, world: World, running: int, cli: Cli) -> None:
    recorded(world, running)
    for target in ("web", str(running)):
        words = ("run", "--opportunistic", "--for", target, "--keep", "97%", "--", "true")
        assert "--metric 'rate=([0-9.]+)' -- CMD" in refused(*words, code="no_progress", exit_code=6)
    write_record(world.host, replace(sure(find_record(world.host, "web")), rate=PrintedRate("/tmp/x", "a(b)")))
    planned = cli("run", "--opportunistic", "--for", "web", "--keep", "95%", "-n", "--", "true").ok()
    assert "whose server has a time-slice by which 'web' keeps 95 %" in planned.out
