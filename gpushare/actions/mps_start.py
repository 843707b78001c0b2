"""Starting an MPS daemon for one device: private, limited, read back, and rolled back when a limit does not hold."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.actions.mps_device import check_device
from gpushare.actions.mps_limits import MpsLimits, check_memory, control_command, limit_steps
from gpushare.actions.mps_stop import end_daemon
from gpushare.actions.plan import Plan, Step
from gpushare.actions.timeslice import set_compute_mode
from gpushare.errors import BadUsage, InUse, NotSupported, OperationFailed
from gpushare.host import mps_control, mps_program
from gpushare.host.mps import daemon_pid, find_daemons
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_home import DaemonHome, DaemonRecord, home_of
from gpushare.host.smi import compute_mode_command
from gpushare.model import ComputeMode

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.program import Completed
    from gpushare.selection import Device

_ANSWER_SECONDS: Final = 20.0


def plan_start(
    host: Host, device: Device, limits: MpsLimits, *, exclusive: bool = False, transient: bool = False
) -> Plan:
    """Return the plan that starts a daemon for one device.

    Raises:
        NotSupported: nvidia-cuda-mps-control is missing, or the device cannot have MPS.
        InUse: a daemon serves the device already.
        BadUsage: the memory limit is above the device's memory.
    """
    check_device(host, device)
    check_memory(device, limits.memory_limit_bytes)
    home = home_of(host.run_directory, device.uuid)
    _check_path(home)
    _refuse_second(host, device)
    notes = _notes(host, device)
    before = _Before(host, home, home.read())
    previous = before.compute_mode
    if previous is not None and not exclusive:
        notes.append(
            f"a daemon that died had changed the compute mode of {device.title}; stop restores {previous.title}"
        )
    steps = [_directories_step(before)]
    if exclusive:
        now = _exclusive_allowed(host, device)
        if now is not ComputeMode.EXCLUSIVE_PROCESS:
            steps.append(_exclusive_step(host, device, now))
            previous = previous or now
    steps.append(_daemon_step(host, device, home))
    steps += limit_steps(host, home, limits)
    steps.append(_record_step(device, before, _Record(previous, transient, limits)))
    return Plan(
        title=f"MPS on {device.title}",
        steps=tuple(steps),
        undo=f"gpushare mps stop -g {device.selector}",
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Before:
    """What was there before a start: a dead daemon's record holds a compute mode that is still to be restored."""

    host: Host
    home: DaemonHome
    record: DaemonRecord | None

    @property
    def compute_mode(self) -> ComputeMode | None:
        """Return the compute mode that is still to be restored."""
        name = None if self.record is None else self.record.previous_compute_mode
        return None if name is None else ComputeMode[name]

    def put_back(self) -> None:
        """Leave the home as it was found."""
        if daemon_pid(self.host, str(self.home.pipe)) is not None:
            # Somebody's live daemon: its sockets are not ours to remove.
            return
        self.home.clear()
        if self.record is not None:
            self.home.write(self.record)


def _check_path(home: DaemonHome) -> None:
    """Raise before anything is made: the daemon itself dies without a word."""
    length = len(os.fsencode(str(home.pipe)))
    if length > mps_control.MAX_PIPE_DIRECTORY_BYTES:
        raise BadUsage(
            f"the MPS pipe directory {home.pipe} has {length} bytes; {mps_control.MAX_PIPE_DIRECTORY_BYTES} is the limit",
            "set GPUSHARE_RUN_DIR to a shorter directory, for example /run/gpushare",
            code="path_too_long",
        )


def _directories_step(before: _Before) -> Step:
    home = before.home
    return Step(
        what=f"make the private directory {home.directory}",
        command=f"mkdir -p -m 755 {shlex.quote(str(home.pipe))} {shlex.quote(str(home.log))}",
        undo=f"rm -r {shlex.quote(str(home.directory))}",
        do=home.create,
        revert=before.put_back,
    )


def _exclusive_allowed(host: Host, device: Device) -> ComputeMode | None:
    if device.gpu.mig_enabled:
        raise NotSupported(
            f"{device.title}: compute mode exclusive-process is not supported while MIG is enabled",
            "start without --exclusive",
            gpu=str(device.gpu.index),
            code="exclusive_on_mig",
        )
    return host.nvml.compute_mode(device.gpu.index)


def _exclusive_step(host: Host, device: Device, previous: ComputeMode | None) -> Step:
    changed: list[ComputeMode | None] = []

    def act() -> None:
        now = host.nvml.compute_mode(device.gpu.index)
        if now is not ComputeMode.EXCLUSIVE_PROCESS:
            changed.append(now)
        set_compute_mode(host, device, ComputeMode.EXCLUSIVE_PROCESS)

    def back() -> None:
        # Only what this step changed: another start may have set the mode for its own daemon.
        for mode in changed:
            if mode is not None:
                set_compute_mode(host, device, mode)

    return Step(
        what=f"set the compute mode of {device.title} to exclusive-process, so that no program runs beside MPS",
        command=compute_mode_command(device.uuid, "EXCLUSIVE_PROCESS"),
        undo=None if previous is None else compute_mode_command(device.uuid, previous.name),
        do=act,
        revert=back,
    )


def _daemon_step(host: Host, device: Device, home: DaemonHome) -> Step:
    started: list[DaemonHome] = []
    pipe, log = shlex.quote(str(home.pipe)), shlex.quote(str(home.log))
    return Step(
        what=f"start the MPS control daemon of {device.title}",
        command=(
            f"CUDA_VISIBLE_DEVICES={device.uuid} CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log} "
            f"{mps_control.PROGRAM} -d"
        ),
        undo=control_command(home, "quit"),
        do=lambda: _start_daemon(host, device, home, started),
        # Only one that this step started: never a daemon that was there before.
        revert=lambda: _end_started(host, home) if started else None,
    )


def _start_daemon(host: Host, device: Device, home: DaemonHome, started: list[DaemonHome]) -> None:
    control = MpsControl(host.programs, str(home.pipe))
    if control.answers():
        raise _exists(device, daemon_pid(host, str(home.pipe)))
    environment = mps_program.start_environment(device.uuid, str(home.pipe), str(home.log))
    started.append(home)
    done = host.programs.run([mps_control.PROGRAM, "-d"], env=environment, timeout=_ANSWER_SECONDS)
    if "already running" in done.text:
        started.clear()
    if done.exit_code != 0:
        raise start_error(done, device, home)
    # Exit 0 proves nothing: an unknown option prints the usage and exits 0 too. The daemon must answer.
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not control.answers():
        if time.monotonic() > deadline:
            raise OperationFailed(
                f"the MPS daemon of {device.title} was started but does not answer: {done.text or 'it said nothing'}",
                f"see its log: {home.log}/control.log",
                gpu=str(device.gpu.index),
                code="daemon_silent",
            )
        time.sleep(0.05)


def start_error(done: Completed, device: Device, home: DaemonHome) -> OperationFailed:
    """Return the error of a daemon that did not start; most of its failures print nothing."""
    known = {
        244: ("it finds no libcuda.so.1", "install the driver's CUDA library (libcuda1); then: gpushare doctor"),
        100: ("CUDA sees no device (error 100)", "see: gpushare doctor"),
    }
    why, hint = known.get(done.exit_code, (done.text, f"see its log: {home.log}/control.log"))
    if "already running" in done.text:
        why, hint = (
            "another daemon holds this pipe directory",
            f"see: gpushare mps status; fuser -v {home.pipe}/control_lock",
        )
    return OperationFailed(
        f"the MPS daemon of {device.title} did not start: {why or f'exit code {done.exit_code}, no text'}",
        hint,
        gpu=str(device.gpu.index),
        code="daemon_not_started",
    )


def _end_started(host: Host, home: DaemonHome) -> None:
    pid = daemon_pid(host, str(home.pipe))
    if pid is not None:
        end_daemon(host, MpsControl(host.programs, str(home.pipe)), pid, seconds=1.0, force=True)


@dataclass(frozen=True)
class _Record:
    previous: ComputeMode | None
    transient: bool
    limits: MpsLimits


def _record_step(device: Device, before: _Before, facts: _Record) -> Step:
    host, home = before.host, before.home

    def write() -> None:
        pid = daemon_pid(host, str(home.pipe))
        if pid is None:
            raise OperationFailed(
                f"the MPS daemon of {device.title} answers, but its process is not found",
                "it may run in another PID namespace; see: gpushare doctor",
                gpu=str(device.gpu.index),
                code="daemon_pid",
            )
        info = host.processes.describe(pid)
        home.write(
            DaemonRecord(
                device_uuid=device.uuid,
                pid=pid,
                started_at=None if info is None else info.started_at,
                uid=os.geteuid(),
                threads_percent=facts.limits.threads_percent,
                memory_limit_bytes=facts.limits.memory_limit_bytes,
                priority=None if facts.limits.priority is None else int(facts.limits.priority),
                previous_compute_mode=None if facts.previous is None else facts.previous.name,
                transient=facts.transient,
            )
        )

    path = shlex.quote(str(home.directory / "daemon.json"))
    return Step(
        what="note what to restore", command=f"write {path}", undo=f"rm {path}", do=write, revert=before.put_back
    )


def _exists(device: Device, pid: int | None) -> InUse:
    return InUse(
        f"an MPS daemon of gpushare serves {device.title} already (process {pid})",
        f"change its limits: gpushare mps set -g {device.selector} ...; or stop it: gpushare mps stop -g {device.selector}",
        gpu=str(device.gpu.index),
        code="daemon_exists",
    )


def _refuse_second(host: Host, device: Device) -> None:
    for found in find_daemons(host, [device.gpu], deep=False):
        daemon = found.daemon
        if daemon.ours and daemon.device_uuid == device.uuid:
            if daemon.error is not None:
                # A dead daemon: starting in its directory works, and its record is replaced.
                continue
            raise _exists(device, daemon.pid)
        if not daemon.ours and device.gpu.index in daemon.gpu_indexes:
            raise InUse(
                f"an MPS daemon that gpushare did not start serves {device.title} (process {daemon.pid}, {daemon.pipe_directory})",
                f"use it: export CUDA_MPS_PIPE_DIRECTORY={daemon.pipe_directory}; or stop it: "
                f"gpushare mps stop --pipe-directory {daemon.pipe_directory} --yes",
                gpu=str(device.gpu.index),
                code="foreign_daemon",
            )


def _notes(host: Host, device: Device) -> list[str]:
    notes = []
    outside = [
        process for process in host.nvml.processes(device.gpu.index) or () if process.compute and not process.mps
    ]
    if device.mig is not None:
        outside = [
            process
            for process in outside
            if (process.gpu_instance_id, process.compute_instance_id)
            == (device.mig.gpu_instance_id, device.mig.compute_instance_id)
        ]
    if outside:
        pids = ", ".join(str(process.pid) for process in outside[:5])
        notes.append(
            f"{len(outside)} processes already run on {device.title} outside MPS ({pids}); they stay outside until they start again"
        )
    return notes
