"""Starting an MPS daemon for one device: private, limited, read back, and rolled back when a limit does not hold."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.actions.mps_device import check_device
from gpushare.actions.mps_limits import MpsLimits, check_memory, control_command, limit_steps
from gpushare.actions.mps_start_checks import check_path, exists, notes_of, refuse_second, start_error
from gpushare.actions.mps_stop import clients_of, end_daemon
from gpushare.actions.plan import Plan, Step
from gpushare.actions.timeslice import set_compute_mode
from gpushare.errors import InUse, NotSupported, OperationFailed, TimedOut
from gpushare.host import mps_control, mps_program
from gpushare.host.mps import daemon_pid, live_pid
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_home import RUNNING, STARTING, DaemonHome, DaemonRecord, home_of
from gpushare.host.smi import compute_mode_command
from gpushare.model import ComputeMode

if TYPE_CHECKING:
    from gpushare.host.host import Host
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
    check_path(home)
    notes = notes_of(host, device)
    before = _Before(host, home, home.read())
    # After the record was read: what another start notes from now on is not taken for an interrupted one.
    refuse_second(host, device)
    previous = before.compute_mode
    if previous is not None and not exclusive:
        notes.append(
            f"a daemon that died had changed the compute mode of {device.title}; stop restores {previous.title}"
        )
    steps: list[Step] = []
    if exclusive:
        now = _exclusive_allowed(host, device)
        if now is not ComputeMode.EXCLUSIVE_PROCESS:
            steps.append(_exclusive_step(host, device, now))
            previous = previous or now
    facts = _Record(previous, transient, limits)
    # Before the first change: what is killed on its way leaves what to restore, and whose the daemon is.
    steps[:0] = [_directories_step(before), _note_step(device, before, facts)]
    if before.record is not None and before.record.interrupted and live_pid(host, home, before.record) is not None:
        steps.insert(2, _interrupted_step(host, device, home, before.record))
    steps.append(_daemon_step(host, device, home))
    steps += limit_steps(host, home, limits)
    steps.append(_record_step(device, before, facts))
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
        if self.record is not None:
            # Not removed and written again: killed in between, what is to be restored would be lost.
            self.home.write(self.record)
            return
        noted = self.home.read()
        if noted is not None and live_pid(self.host, self.home, noted) is not None:
            # It could not be ended: what is noted says what is still to be undone.
            return
        # Of somebody's live daemon the sockets are not ours to remove.
        self.home.clear(sockets=daemon_pid(self.host, str(self.home.pipe)) is None)


def _directories_step(before: _Before) -> Step:
    home = before.home
    return Step(
        what=f"make the private directory {home.directory}",
        command=f"mkdir -p -m 755 {shlex.quote(str(home.pipe))} {shlex.quote(str(home.log))}",
        undo=f"rm -r {shlex.quote(str(home.directory))}",
        do=home.create,
        revert=before.put_back,
    )


def _note_step(device: Device, before: _Before, facts: _Record) -> Step:
    path = shlex.quote(str(before.home.directory / "daemon.json"))
    return Step(
        what="note what to restore",
        command=f"write {path}",
        undo=f"rm {path}",
        do=lambda: before.home.write(facts.record(device, state=STARTING)),
        revert=before.put_back,
    )


def _interrupted_step(host: Host, device: Device, home: DaemonHome, record: DaemonRecord) -> Step:
    control = MpsControl(host.programs, str(home.pipe))

    def act() -> None:
        pid = live_pid(host, home, record)
        if pid is None:
            return
        with contextlib.suppress(TimedOut):
            clients = clients_of(control)
            if clients:
                raise InUse(
                    f"an interrupted start left the MPS daemon {pid} on {device.title}, and it has clients: "
                    + ", ".join(map(str, clients[:8])),
                    f"wait for them, and stop it: gpushare mps stop -g {device.selector} --drain 60",
                    gpu=str(device.gpu.index),
                    code="daemon_exists",
                )
        end_daemon(host, control, pid, seconds=1.0, force=True)

    return Step(
        what=f"end the MPS daemon that an interrupted start left on {device.title}",
        command=control_command(home, "quit"),
        do=act,
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
        raise exists(device, daemon_pid(host, str(home.pipe)))
    if daemon_pid(host, str(home.pipe)) is None:
        # What a dead one left is open to everybody: a stranger may hold its lock, which the new one then waits for.
        for path in home.leftovers():
            with contextlib.suppress(OSError):
                path.unlink()
    environment = mps_program.start_environment(device.uuid, str(home.pipe), str(home.log))
    started.append(home)
    done = host.programs.run([mps_control.PROGRAM, "-d"], env=environment, timeout=_ANSWER_SECONDS)
    if "already running" in done.text:
        started.clear()
    if done.exit_code != 0:
        raise start_error(done, device, home)
    # Exit 0 proves nothing: an unknown option prints the usage and exits 0 too. The daemon must answer.
    deadline = time.monotonic() + _ANSWER_SECONDS
    looks = 0
    while not control.answers():
        # One look may fall between two moments; its process is there when the program has returned.
        looks = 0 if daemon_pid(host, str(home.pipe)) is not None else looks + 1
        if looks > 1:
            raise OperationFailed(
                f"the MPS daemon of {device.title} ended right after its start: {done.text or 'it said nothing'}",
                f"see its log: {shlex.quote(f'{home.log}/control.log')}",
                gpu=str(device.gpu.index),
                code="daemon_silent",
            )
        if time.monotonic() > deadline:
            raise OperationFailed(
                f"the MPS daemon of {device.title} was started but does not answer: {done.text or 'it said nothing'}",
                f"see its log: {shlex.quote(f'{home.log}/control.log')}",
                gpu=str(device.gpu.index),
                code="daemon_silent",
            )
        time.sleep(0.05)


def _end_started(host: Host, home: DaemonHome) -> None:
    pid = daemon_pid(host, str(home.pipe))
    if pid is not None:
        end_daemon(host, MpsControl(host.programs, str(home.pipe)), pid, seconds=1.0, force=True)


@dataclass(frozen=True)
class _Record:
    previous: ComputeMode | None
    transient: bool
    limits: MpsLimits

    def record(
        self, device: Device, *, state: str, pid: int | None = None, started_at: float | None = None
    ) -> DaemonRecord:
        return DaemonRecord(
            device_uuid=device.uuid,
            pid=pid,
            started_at=started_at,
            uid=os.geteuid(),
            threads_percent=self.limits.threads_percent,
            memory_limit_bytes=self.limits.memory_limit_bytes,
            priority=None if self.limits.priority is None else int(self.limits.priority),
            previous_compute_mode=None if self.previous is None else self.previous.name,
            transient=self.transient,
            state=state,
        )


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
        started_at = None if info is None else info.started_at
        home.write(facts.record(device, state=RUNNING, pid=pid, started_at=started_at))

    path = shlex.quote(str(home.directory / "daemon.json"))
    # Undone with the first note, when all that it names is.
    return Step(what="note that it runs", command=f"write {path}", do=write)
