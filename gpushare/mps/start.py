"""Starting an MPS daemon for one device: private, limited, read back, and rolled back when a limit does not hold."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage, InUse, NotSupported, OperationFailed, TimedOut
from gpushare.host.compute_mode import compute_mode_step
from gpushare.model import ComputeMode
from gpushare.mps import control
from gpushare.mps import control as mps_control
from gpushare.mps import control as mps_program
from gpushare.mps.control import MpsControl, control_command, is_server
from gpushare.mps.daemons import check_device, daemon_pid, find_daemons, live_pid
from gpushare.mps.home import RUNNING, STARTING, DaemonHome, DaemonRecord, anybody_changes, home_of
from gpushare.mps.limits import Limits, check_memory
from gpushare.mps.set import limit_steps
from gpushare.mps.stop import clients_of, end_daemon
from gpushare.plan import Plan, Step

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.program import Completed
    from gpushare.mps.daemons import FoundDaemon
    from gpushare.selection import Device


# Of processes that look like daemons: any user can start thousands.
_MOST_NAMED: Final = 3


def check_path(home: DaemonHome) -> None:
    """Raise before anything is made: the daemon itself dies without a word."""
    length = len(os.fsencode(str(home.pipe)))
    if length > control.MAX_PIPE_DIRECTORY_BYTES:
        raise BadUsage(
            f"the MPS pipe directory {home.pipe} has {length} bytes; {control.MAX_PIPE_DIRECTORY_BYTES} is the limit",
            "set GPUSHARE_RUN_DIR to a shorter directory, for example /run/gpushare",
            code="path_too_long",
        )


def start_error(done: Completed, device: Device, home: DaemonHome) -> OperationFailed:
    """Return the error of a daemon that did not start; most of its failures print nothing."""
    known = {
        244: ("it finds no libcuda.so.1", "install the driver's CUDA library (libcuda1); then: gpushare doctor"),
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


def exists(device: Device, pid: int | None) -> InUse:
    """Return the error where a daemon of ours serves the device already."""
    return InUse(
        f"an MPS daemon of gpushare serves {device.title} already (process {pid})",
        f"change its limits: gpushare mps set -g {device.selector} ...; or stop it: gpushare mps stop -g {device.selector}",
        gpu=str(device.gpu.index),
        code="daemon_exists",
    )


def refuse_second(host: Host, device: Device) -> None:
    """Raise InUse where a daemon serves the device already."""
    for found in find_daemons(host, [device.gpu], deep=False):
        daemon = found.daemon
        if daemon.ours and daemon.device_uuid == device.uuid:
            if daemon.error is not None or (found.record is not None and found.record.interrupted):
                # A dead daemon, or what an interrupted start left: its record is replaced. Whether another gpushare
                # is starting it at this moment shows under the lock.
                continue
            raise exists(device, daemon.pid)
        if not daemon.ours and device.gpu.index in daemon.gpu_indexes and is_there(host, found, device.gpu.index):
            pipe = shlex.quote(daemon.pipe_directory or "")
            raise InUse(
                f"an MPS daemon that gpushare did not start serves {device.title} ({naming(found)})",
                f"use it: export CUDA_MPS_PIPE_DIRECTORY={pipe}; or stop it: "
                f"gpushare mps stop --pipe-directory {pipe} --yes",
                gpu=str(device.gpu.index),
                code="foreign_daemon",
            )


def naming(found: FoundDaemon) -> str:
    """Return who a daemon is, for a message: it may be anybody's."""
    daemon = found.daemon
    return f"process {daemon.pid} of user {daemon.user or 'unknown'}, {daemon.pipe_directory}"


def is_there(host: Host, found: FoundDaemon, gpu: int) -> bool:
    """Return whether a daemon that names a GPU counts: root's and our own do, another user's where the driver proves it.

    Anybody can start a process of that name. The driver shows its user's MPS clients, or its server, on the GPU.
    """
    if found.trusted:
        return True
    if found.uid is None:
        return False
    for process in host.nvml.processes(gpu) or ():
        info = host.processes.describe(process.pid)
        if info is not None and info.uid == found.uid and (process.mps or is_server(info.name)):
            return True
    return False


def notes_of(host: Host, device: Device) -> list[str]:
    """Return what is worth knowing before a start: who stays outside."""
    notes = [
        f"a process called as an MPS daemon names {device.title} and is not seen on it: {naming(found)}; it does not count"
        for found in find_daemons(host, [device.gpu], deep=False)
        if not found.trusted
        and device.gpu.index in found.daemon.gpu_indexes
        and not is_there(host, found, device.gpu.index)
    ][:_MOST_NAMED]
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


def _open_to_changes(host: Host, home: DaemonHome) -> list[str]:
    driver = host.nvml.driver_version()
    if host.uid != 0 or not anybody_changes(home.pipe, driver):
        return []
    note = (
        f"under driver {driver} every user may change this daemon's limits (from 550 on only its owner); "
        "let in only whom you name: 'users' of mps in the file of gpushare apply; "
        f"or nobody but root: chmod 700 {shlex.quote(str(home.pipe))}"
    )
    return [note]


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
    check_path(home)
    notes = notes_of(host, device) + _open_to_changes(host, home)
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
            f"{mps_control.PROGRAM} -d"
        ),
        undo=control_command(home.pipe, "quit"),
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
    # Undone with the first note, when all that it names is.
    return Step(what="note that it runs", command=f"write {path}", do=write)
