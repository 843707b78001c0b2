"""One look at a host: what could not be seen is a warning, not an error."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.model import Gpu, GpuProcess, Snapshot, TimeSlice
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.host.program import Completed, Pending, Programs
from gpushare.host.smi import ComputePolicy
from gpushare.mig.ledger import NAMES
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.plan import carry_out
from gpushare.sim import admin
from gpushare.sim.processes import user_name
from gpushare.snapshot import HostState, LastWork, Observer
from tests.sim import mps


def look(spec: str) -> Snapshot:
    return Observer(connect(spec)).read()


def test_a_quiet_host() -> None:
    before = time.time()
    shot = look("sim:h200,t4")
    assert (shot.host, shot.driver_version, shot.warnings, shot.daemons) == ("sim:h200,t4", "580.159.04", (), ())
    assert before <= shot.taken_at <= time.time()
    assert [gpu.time_slice for gpu in shot.gpus] == [TimeSlice.DEFAULT, TimeSlice.DEFAULT]


def test_processes_have_owner_command_line_and_start() -> None:
    pid = admin.add_process("sim:t4", name="train", container="0123456789ab")
    (process,) = look("sim:t4").gpus[0].processes or ()
    assert (process.pid, process.name, process.user, process.command_line) == (
        pid,
        "train",
        user_name(os.geteuid()),
        ("train",),
    )
    assert process.started_at is not None
    assert process.container == "0123456789ab"


def test_the_file_of_names_is_looked_for_where_it_is_written() -> None:
    """The look knows its path without loading what writes it."""
    host = connect("sim:h200")
    assert not HostState(host)._has_names()
    path = NAMES.path(host, "mig")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert HostState(host)._has_names()


def test_a_process_that_is_gone_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = admin.add_process("sim:t4")
    host = connect("sim:t4")
    monkeypatch.setattr(type(host.processes), "describe", lambda *_: None)
    (process,) = Observer(host).read().gpus[0].processes or ()
    assert (process.pid, process.user, process.name) == (pid, None, None)


def test_the_level_of_each_gpu_is_its_own() -> None:
    host = connect("sim:2xh200")
    host.policy.set(host.nvml.sweep()[1].uuid or "", TimeSlice.SHORT)
    assert [gpu.time_slice for gpu in look(host.spec).gpus] == [TimeSlice.DEFAULT, TimeSlice.SHORT]


def short_policy(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ComputePolicy.start
    monkeypatch.setattr(ComputePolicy, "start", lambda self: real(self, 0.05))


@pytest.mark.parametrize(
    ("fault", "why"), [("missing", "nvidia-smi is not installed"), ("hang", "did not answer within 0.05 s")]
)
def test_without_nvidia_smi_the_time_slice_is_unknown(fault: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = connect("sim:2xt4")
    short_policy(host, monkeypatch)
    admin.set_fault(host.spec, fault, value="nvidia-smi")
    shot = Observer(host).read()
    assert [gpu.time_slice for gpu in shot.gpus] == [None, None]
    assert [gpu.error for gpu in shot.gpus] == [None, None]
    (warning,) = shot.warnings
    assert warning.startswith("the time-slice is unknown: ")
    assert why in warning


def test_an_nvidia_smi_that_fails_or_prints_something_else_is_a_warning(
    sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpushare.host.program import Programs

    program = sim_dir / "smi"
    monkeypatch.setenv("GPUSHARE_NVIDIA_SMI", str(program))
    host = connect("sim:t4")
    monkeypatch.setattr(type(host.programs), "start", lambda _self, *given, **named: Programs().start(*given, **named))
    for text in ("echo banana", "exit 255", "echo Unable to determine the device handle >&2; exit 15"):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        shot = Observer(host).read()
        assert (shot.gpus[0].time_slice, shot.gpus[0].error) == (None, None)
        assert [warning.startswith("the time-slice is unknown: ") for warning in shot.warnings] == [True]


@pytest.mark.parametrize("told", [True, None])
def test_a_namespace_that_is_the_hosts_or_cannot_be_told_is_no_warning(
    told: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = connect("sim:t4")
    monkeypatch.setattr(type(host.processes), "namespace_is_host", lambda _: told)
    assert Observer(host).read().warnings == ()


def test_daemons_have_version_and_room(sim_dir: Path) -> None:
    host = mps.new(sim_dir)
    host.start()
    client = host.client()
    observer = Observer(connect(host.host.spec))
    for _ in range(2):
        (daemon,) = observer.read().daemons
        assert (daemon.version, daemon.max_clients, daemon.gpu_index) == ("13000", 48, 0)
        assert [client.pid for client in daemon.clients] == [client.pid]


def test_a_daemon_that_starts_during_a_watch_is_seen(sim_dir: Path) -> None:
    host = mps.new(sim_dir)
    observer = Observer(connect(host.host.spec))
    assert observer.read().daemons == ()
    host.start()
    assert len(observer.read().daemons) == 1


@pytest.mark.parametrize(
    ("spec", "profile", "room"),
    [("sim:h200", "3g.71gb", 20), ("sim:h200", "1g.18gb", 6), ("sim:h200", "7g.141gb", 48), ("sim:a30", "1g.6gb", 12)],
)
def test_a_mig_instance_takes_its_share_of_the_clients(spec: str, profile: str, room: int, sim_dir: Path) -> None:
    host = mps.new(sim_dir, spec)
    admin.set_mig(spec, "0", [profile])
    mig = connect(spec).nvml.sweep()[0].mig_instances[0]
    observer = Observer(connect(spec))
    daemon = mps_daemon(observer, host, mig.uuid)
    assert daemon == (room, "13000")


def mps_daemon(observer: Observer, host: mps.Mps, uuid: str) -> tuple[int | None, str | None]:
    """Start a daemon of ours on a device and return what a look says of its room and version."""
    from gpushare.mps.home import DaemonRecord, home_of

    home = home_of(connect(host.host.spec).run_directory, uuid)
    home.create()
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(home.pipe), "CUDA_MPS_LOG_DIRECTORY": str(home.log)}
    pid = host.start(CUDA_VISIBLE_DEVICES=uuid, **env)
    home.write(DaemonRecord(device_uuid=uuid, pid=pid, started=None, uid=0))
    (daemon,) = observer.read().daemons
    return daemon.max_clients, daemon.version


def test_a_profile_that_does_not_tell_its_share_leaves_the_version(
    sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mps.new(sim_dir)
    admin.set_mig(host.host.spec, "0", ["1g.18gb"])
    mig = connect(host.host.spec).nvml.sweep()[0].mig_instances[0]
    observer = Observer(connect(host.host.spec))
    monkeypatch.setattr("gpushare.mps.limits.share_of_slices", lambda *_: None)
    assert mps_daemon(observer, host, mig.uuid) == (None, "13000")


def test_a_gpu_that_is_lost_between_two_questions_does_not_end_the_look(
    sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpushare.base.errors import GpuLost
    from gpushare.host.nvml import NvmlReader

    host = mps.new(sim_dir)
    host.start()

    def lost(*_: object) -> None:
        raise GpuLost("GPU 0: the GPU is lost", "hint")

    monkeypatch.setattr(NvmlReader, "compute_capability", lost)
    (daemon,) = look(host.host.spec).daemons
    assert (daemon.max_clients, daemon.version) == (None, "13000")


def test_looking_again_asks_neither_nvidia_smi_nor_an_mps_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    # However long the first look takes, the second comes soon after it.
    monkeypatch.setattr("gpushare.snapshot._SLOW_SECONDS", 3600.0)
    host = connect("sim:h200")
    device = select_one("0", host.nvml.sweep())
    carry_out(plan_start(host, device, Limits(threads_percent=30.0)))
    counted = CountedPrograms(host.programs)
    observer = Observer(replace(host, programs=counted))
    first = observer.read()
    asked = len(counted.started)
    assert asked > 0
    again = observer.read()
    assert len(counted.started) == asked
    assert (again.daemons, again.gpus[0].time_slice) == (first.daemons, first.gpus[0].time_slice)
    # A new process is a reason to ask the daemon, not nvidia-smi.
    admin.add_process("sim:h200", "0")
    observer.read()
    assert counted.started.count("nvidia-smi") == 1
    assert len(counted.started) > asked


class CountedPrograms:
    """Programs that note their starts."""

    def __init__(self, programs: Programs) -> None:
        self.programs, self.started = programs, list[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.programs, name)

    def start(self, argv: Sequence[str], **named: Any) -> Pending:
        self.started.append(argv[0])
        return self.programs.start(argv, **named)

    def run(self, argv: Sequence[str], **named: Any) -> Completed:
        return self.start(argv, **named).result()


def gpu_with(percent: int | None, *, pid: int = 7, started: int = 10000) -> Gpu:
    one = GpuProcess(
        pid=pid, compute=True, memory_used_bytes=1 << 30, sm_percent=percent, started=started, started_at=started / 100
    )
    return Gpu(index=0, memory_used_bytes=1 << 30, processes=(one,))


def test_the_last_work_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host = connect("sim:h200")
    answers: dict[int, float] | None = {}
    asked: list[float] = []

    def last_work(_: object, index: int, since: float) -> dict[int, float] | None:
        asked.append(since)
        return answers

    monkeypatch.setattr("gpushare.host.nvml.NvmlReader.last_work", last_work)
    work = LastWork(host)

    def seen(at: float, gpu: Gpu) -> tuple[float | None, float | None]:
        (one,) = work.added_to(Snapshot(host="", gpus=(gpu,), taken_at=at)).gpus[0].processes or ()
        return one.last_work_at, work.idle_seconds(one, at)

    # Nothing is known of the time before the first look.
    assert seen(1000.0, gpu_with(0)) == (None, 0.0)
    assert seen(1600.0, gpu_with(0)) == (None, 600.0)
    answers = {7: 1650.0, 8: 1651.0}
    assert seen(1700.0, gpu_with(0)) == (1650.0, 50.0)
    assert asked == [0.0, 1000.0, 1600.0]
    # What works now need not be asked about.
    assert seen(1800.0, gpu_with(50)) == (1800.0, 0.0)
    assert len(asked) == 3
    # A sample of another process with the same PID.
    assert seen(1900.0, gpu_with(0, started=189000)) == (None, 0.0)
    # Under MIG, and of clients of MPS, nothing is known.
    answers = None
    assert seen(2000.0, gpu_with(None, started=199000)) == (None, None)


def test_memory_of_no_process() -> None:
    gpu = gpu_with(0)
    assert gpu.unlisted_bytes == 0
    assert replace(gpu, memory_used_bytes=3 << 30).unlisted_bytes == 2 << 30
    assert replace(gpu, processes=None).unlisted_bytes is None
    hidden = replace((gpu.processes or ())[0], memory_used_bytes=None)
    assert replace(gpu, processes=(hidden,)).unlisted_bytes is None
