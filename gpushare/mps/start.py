"""Start a private MPS daemon for one device with limits. Every step is read back, and a failure undoes all of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.errors import InUse, NotSupported, OperationFailed, TimedOut
from gpushare.host.compute_mode import compute_mode_step
from gpushare.model import ComputeMode
from gpushare.mps.control import PROGRAM, MpsControl, control_command, start_environment
from gpushare.mps.daemons import check_device, daemon_pid, find_daemons, foreign_daemon, live_pid
from gpushare.mps.home import RUNNING, STARTING, DaemonHome, DaemonRecord, anybody_changes, home_of
from gpushare.mps.limits import Limits, check_memory
from gpushare.mps.set import limit_steps
from gpushare.plan import Plan, Step

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.program import Completed
    from gpushare.selection import Device


# Processes of other users that claim to be daemons: any user can start thousands.
_MOST_NAMED: Final = 3


def _start_error(done: Completed, device: Device, home: DaemonHome) -> OperationFailed:
    """Return the error for a daemon that did not start. Most of its failures print nothing."""
    known = {
        244: ("it does not find libcuda.so.1", "install the driver's CUDA library (libcuda1); then: gpushare doctor"),
        100: ("CUDA sees no device (error 100)", "see: gpushare doctor"),
    }
    why, hint = known.get(done.exit_code, (done.text, f"see its log: {shlex.quote(f'{home.log}/control.log')}"))
    if "already running" in done.text:
        why, hint = (
            "another daemon holds this pipe directory",
            f"see: gpushare mps status; fuser -v {shlex.quote(f'{home.pipe}/control_lock')}",
        )
    return OperationFailed(
        f"the MPS daemon of {device.title} did not start: {why or f'exit code {done.exit_code}, no text'}",
        hint,
        gpu=str(device.gpu.index),
        code="daemon_not_started",
    )


def _exists(device: Device, pid: int | None) -> InUse:
    return InUse(
        f"an MPS daemon of gpushare already serves {device.title} (process {pid})",
        f"change its limits: gpushare mps set -g {device.selector} ...; or stop it: gpushare mps stop -g {device.selector}",
        gpu=str(device.gpu.index),
        code="daemon_exists",
    )


def _refuse_second(host: Host, device: Device) -> None:
    """Raise InUse if a daemon already serves the device."""
    for found in find_daemons(host, [device.gpu], deep=False):
        daemon = found.daemon
        if daemon.ours and daemon.device_uuid == device.uuid:
            if daemon.error is not None or (found.record is not None and found.record.interrupted):
                # A dead daemon, or the rest of an interrupted start: its record is replaced. Whether another gpushare
                # is starting it right now shows under the lock.
                continue
            raise _exists(device, daemon.pid)
        if not daemon.ours and found.serves(host, device.gpu.index):
            pipe = shlex.quote(daemon.pipe_directory or "")
            raise foreign_daemon(found, device.title, device.gpu, f"use it: export CUDA_MPS_PIPE_DIRECTORY={pipe}; or ")


def _notes(host: Host, device: Device, home: DaemonHome) -> list[str]:
    notes = [
        f"a process that claims to be an MPS daemon names {device.title} but is not on it, and is ignored: {found.title}"
        for found in find_daemons(host, [device.gpu], deep=False)
        if device.gpu.index in found.daemon.gpu_indexes and not found.serves(host, device.gpu.index)
    ][:_MOST_NAMED]
    outside = [one for one in host.nvml.processes(device.gpu.index) or () if one.compute and not one.mps]
    if device.mig is not None:
        place = (device.mig.gpu_instance_id, device.mig.compute_instance_id)
        outside = [one for one in outside if (one.gpu_instance_id, one.compute_instance_id) == place]
    if outside:
        pids = ", ".join(str(process.pid) for process in outside[:5])
        notes.append(f"{len(outside)} processes on {device.title} run outside MPS ({pids}); restart them to use it")
    driver = host.nvml.driver_version()
    if host.uid == 0 and anybody_changes(home.pipe, driver):
        notes.append(
            f"under driver {driver} every user may change this daemon's limits (from 550 on only its owner); "
            "list the users who may connect: 'users' of mps in the file of gpushare apply; "
            f"or allow only root: chmod 700 {shlex.quote(str(home.pipe))}"
        )
    return notes


_ANSWER_SECONDS: Final = 20.0


def plan_start(host: Host, device: Device, limits: Limits, *, exclusive: bool = False, transient: bool = False) -> Plan:
    """Return the plan that starts a daemon for one device.

    Raises:
        NotSupported: nvidia-cuda-mps-control is missing, or the device cannot have MPS.
        InUse: a daemon serves the device already.
        BadUsage: the memory limit is above the device's memory.
    """
    check_device(host, device)
    check_memory(device, limits.memory_limit_bytes)
    home = home_of(host.run_directory, device.uuid)
    # The daemon itself would die silently.
    home.check_path()
    notes = _notes(host, device, home)
    before = _Before(host, home, home.read())
    # After the record was read: a record that another start writes from now on is not taken for an interrupted start.
    _refuse_second(host, device)
    previous = before.compute_mode
    if previous is not None and not exclusive:
        notes.append(
            f"a dead daemon had changed the compute mode of {device.title}; mps stop restores {previous.title}"
        )
    steps: list[Step] = []
    if exclusive:
        now = _exclusive_allowed(host, device)
        if now is not ComputeMode.EXCLUSIVE_PROCESS:
            steps.append(_exclusive_step(host, device, now))
            previous = previous or now
    facts = _Record(previous, transient, limits)
    # Before the first change: a start that is killed leaves a record of what to restore, and whose daemon it is.
    steps[:0] = [_directories_step(before), _note_step(device, before, facts)]
    if before.record is not None and before.record.interrupted and live_pid(host, home, before.record) is not None:
        steps.insert(2, _interrupted_step(host, device, home, before.record))
    steps.append(_daemon_step(host, device, home))
    steps += limit_steps(MpsControl(host.programs, str(home.pipe)), limits)
    steps.append(_record_step(device, before, facts))
    return Plan(
        title=f"MPS on {device.title}",
        steps=tuple(steps),
        undo=f"gpushare mps stop -g {device.selector}",
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Before:
    """The home before a start. The record of a dead daemon may name a compute mode that is still to be restored."""

    host: Host
    home: DaemonHome
    record: DaemonRecord | None

    @property
    def compute_mode(self) -> ComputeMode | None:
        name = None if self.record is None else self.record.previous_compute_mode
        return None if name is None else ComputeMode[name]

    def put_back(self) -> None:
        """Restore the home as it was found."""
        if self.record is not None:
            # Replaced, not removed and written: a kill in between would lose what is to be restored.
            self.home.write(self.record)
            return
        noted = self.home.read()
        if noted is not None and live_pid(self.host, self.home, noted) is not None:
            # It could not be ended: its record says what is still to be undone.
            return
        # The sockets of a live daemon of another are not ours to remove.
        self.home.clear(sockets=daemon_pid(self.host, str(self.home.pipe)) is None)


def _directories_step(before: _Before) -> Step:
    home = before.home
    return Step(
        what=f"create the private directory {home.directory}",
        command=f"mkdir -p -m 755 {shlex.quote(str(home.pipe))} {shlex.quote(str(home.log))}",
        undo=f"rm -r {shlex.quote(str(home.directory))}",
        do=home.create,
        revert=before.put_back,
    )


def _note_step(device: Device, before: _Before, facts: _Record) -> Step:
    path = shlex.quote(str(before.home.directory / "daemon.json"))
    return Step(
        what="record what to restore",
        command=f"write {path}",
        undo=f"rm {path}",
        do=lambda: before.home.write(facts.record(device, state=STARTING)),
        revert=before.put_back,
    )


def _interrupted_step(host: Host, device: Device, home: DaemonHome, record: DaemonRecord) -> Step:
    control = MpsControl(host.programs, str(home.pipe))

    def act() -> None:
        from gpushare.mps.stop import clients_of, end_daemon

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
        command=control_command(home.pipe, "quit"),
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
    why = ", so that no program runs beside MPS"
    return compute_mode_step(host, device, ComputeMode.EXCLUSIVE_PROCESS, before=previous, why=why)


def _daemon_step(host: Host, device: Device, home: DaemonHome) -> Step:
    started: list[DaemonHome] = []
    pipe, log = shlex.quote(str(home.pipe)), shlex.quote(str(home.log))
    return Step(
        what=f"start the MPS control daemon of {device.title}",
        command=(
            f"CUDA_VISIBLE_DEVICES={device.uuid} CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log} "
            f"{PROGRAM} -d"
        ),
        undo=control_command(home.pipe, "quit"),
        do=lambda: _start_daemon(host, device, home, started),
        # Only a daemon that this step started.
        revert=lambda: _end_started(host, home) if started else None,
    )


def _start_daemon(host: Host, device: Device, home: DaemonHome, started: list[DaemonHome]) -> None:
    control = MpsControl(host.programs, str(home.pipe))
    if control.answers():
        raise _exists(device, daemon_pid(host, str(home.pipe)))
    if daemon_pid(host, str(home.pipe)) is None:
        # The files of a dead daemon are open to all users: another user may hold its lock, and the new one would wait for it.
        for path in home.leftovers():
            with contextlib.suppress(OSError):
                path.unlink()
    environment = start_environment(device.uuid, str(home.pipe), str(home.log))
    started.append(home)
    done = host.programs.run([PROGRAM, "-d"], env=environment, timeout=_ANSWER_SECONDS)
    if "already running" in done.text:
        started.clear()
    if done.exit_code != 0:
        raise _start_error(done, device, home)
    # Exit code 0 proves nothing (an unknown option exits 0 too): the daemon must answer.
    deadline = time.monotonic() + _ANSWER_SECONDS
    looks = 0
    while not control.answers():
        # One look may miss it between its fork and exec; its process is there when the program has returned.
        looks = 0 if daemon_pid(host, str(home.pipe)) is not None else looks + 1
        if looks > 1:
            raise _silent(device, home, f"ended right after its start: {done.text or 'it printed nothing'}")
        if time.monotonic() > deadline:
            raise _silent(device, home, f"was started but does not answer: {done.text or 'it printed nothing'}")
        time.sleep(0.05)


def _silent(device: Device, home: DaemonHome, what: str) -> OperationFailed:
    return OperationFailed(
        f"the MPS daemon of {device.title} {what}",
        f"see its log: {shlex.quote(f'{home.log}/control.log')}",
        gpu=str(device.gpu.index),
        code="daemon_silent",
    )


def _end_started(host: Host, home: DaemonHome) -> None:
    from gpushare.mps.stop import end_daemon

    pid = daemon_pid(host, str(home.pipe))
    if pid is not None:
        end_daemon(host, MpsControl(host.programs, str(home.pipe)), pid, seconds=1.0, force=True)


@dataclass(frozen=True)
class _Record:
    previous: ComputeMode | None
    transient: bool
    limits: Limits

    def record(
        self, device: Device, *, state: str, pid: int | None = None, started_at: float | None = None
    ) -> DaemonRecord:
        return DaemonRecord(
            device_uuid=device.uuid,
            pid=pid,
            started_at=started_at,
            uid=os.geteuid(),
            limits=self.limits,
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
    # Undone by the first record step, after everything that it names.
    return Step(what="record that it runs", command=f"write {path}", do=write)
