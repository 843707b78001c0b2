"""Start a private MPS daemon for one device with limits. Every step is read back, and a failure undoes all of them."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from typing import Final

from gpushare.base.errors import InUse, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import ComputeMode
from gpushare.base.selection import Device
from gpushare.base.units import counted, first_few
from gpushare.host.compute_mode import compute_mode_step, need_root
from gpushare.host.host import Host
from gpushare.host.identity import start_of
from gpushare.host.program import Completed
from gpushare.mps.control import MpsControl, control_command, probe_version, start_argv, start_environment
from gpushare.mps.daemons import FoundDaemon, check_device, daemon_pid, find_daemons, foreign_daemon_error, live_pid
from gpushare.mps.home import (
    RUNNING,
    STARTING,
    UNIT_PIPES,
    DaemonHome,
    DaemonRecord,
    own_home,
    pipe_users,
    set_pipe_users,
    unit_at,
)
from gpushare.mps.limits import VOLTA, Limits, check_memory, in_force_title
from gpushare.mps.stop import clients_of, end_daemon
from gpushare.plan import Plan, Step

_ANSWER_SECONDS: Final = 20.0


def plan_start(
    host: Host,
    device: Device,
    limits: Limits,
    *,
    exclusive: bool = False,
    transient: bool = False,
    users: Sequence[str] | None = None,
) -> Plan:
    """Return the plan that starts a daemon for one device.

    With ``users`` one server, which runs as root, serves these users at the same time, or all (empty).

    Raises:
        NotSupported: nvidia-cuda-mps-control is missing, the device cannot have MPS, or the driver has no such server.
        NoPermission: only root may start a server for several users.
        InUse: a daemon serves the device already.
        BadUsage: the memory limit is above the device's memory.
    """
    check_device(host, device)
    check_memory(device, limits.memory_limit_bytes)
    home = own_home(host, device.uuid)
    home.check_path()
    if users is not None:
        need_root(host, "a daemon for several users at the same time")
        check_several_users(host)
    start = _Start(host, device, home, limits, transient=transient, users=users)
    # After the record was read: a record that another start writes from now on is not taken for an interrupted start.
    _refuse_second_daemon(host, device, find_daemons(host, [device.gpu], deep=False))
    notes = [*limits_ignored(host, device, limits), *_outside_notes(host, device)]
    if users is not None:
        notes.append(
            "the programs of all users share one server, which runs as root: the fault of one ends the work of all, and its "
            "limits hold for each process"
        )
    title = in_force_title(device, limits) + _users_text(users)
    if exclusive:
        title += ", no programs outside it"
    return Plan(
        title=title,
        steps=tuple(start.steps(exclusive=exclusive)),
        undo=f"gpushare mps stop -g {device.selector}",
        notes=tuple(notes),
    )


class _Start:
    """The steps of a start. ``previous`` is the compute mode that a stop restores: the record of a dead daemon has it."""

    def __init__(
        self,
        host: Host,
        device: Device,
        home: DaemonHome,
        limits: Limits,
        *,
        transient: bool,
        users: Sequence[str] | None,
    ) -> None:
        self._host, self._device, self._home, self._limits, self._transient = host, device, home, limits, transient
        self._users = None if users is None else tuple(users)
        self._users_before: tuple[str, ...] | None = None
        self._argv = start_argv(multiuser=users is not None)
        self._control = MpsControl(host.programs, str(home.pipe))
        self._before = home.read()
        self._started = False
        mode = None if self._before is None else self._before.previous_compute_mode
        self.previous = None if mode is None else ComputeMode[mode]

    def steps(self, *, exclusive: bool) -> list[Step]:
        home = self._home
        before = self._before
        pipe = shlex.quote(str(home.pipe))
        log = shlex.quote(str(home.log))
        record = shlex.quote(str(home.directory / "daemon.json"))
        mode_steps = self._exclusive_steps() if exclusive else []
        # The record before the first change: a start that is killed leaves what to restore, and whose daemon it is.
        steps = [
            Step(
                what=f"create the private directory {home.directory}",
                command=f"mkdir -p -m 755 {pipe} {log}",
                undo=f"rm -r {shlex.quote(str(home.directory))}",
                do=home.create,
                revert=self._restore_home,
            ),
            Step(
                what="record the current state, which a stop restores",
                command=f"write {record}",
                undo=f"rm {record}",
                do=lambda: self._write_record(STARTING),
                revert=self._restore_home,
            ),
        ]
        if before is not None and before.interrupted and live_pid(self._host, home, before) is not None:
            steps.append(
                Step(
                    what=f"end the MPS daemon that an interrupted start left on {self._device.title}",
                    command=control_command(home.pipe, "quit"),
                    do=lambda: self._end_interrupted(before),
                )
            )
        # Who may connect, before a client can.
        users = _users_text(self._users)
        if self._users is not None:
            steps.append(
                Step(
                    what=f"open the pipe directory of {self._device.title}{users}",
                    command=access_command(pipe, self._users),
                    do=self._open_pipe,
                    revert=self._restore_pipe_users,
                )
            )
        start = f"CUDA_VISIBLE_DEVICES={self._device.uuid} CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log}"
        return [
            *steps,
            *mode_steps,
            Step(
                what=f"start the MPS control daemon of {self._device.title}{users}",
                command=" ".join([start, *self._argv]),
                undo=control_command(home.pipe, "quit"),
                do=self._start_daemon,
                revert=self._end_started_daemon,
            ),
            *self._control.limit_steps(self._limits),
            # Undone by the first record step, after everything that it names.
            Step(what="record that the daemon is running", command=f"write {record}", do=self._write_running),
        ]

    def _open_pipe(self) -> None:
        """Let the users enter the pipe directory, and note who could before."""
        self._users_before = pipe_users(self._home.pipe)
        set_pipe_users(self._home.pipe, self._users or ())

    def _restore_pipe_users(self) -> None:
        if self._users_before is not None:
            set_pipe_users(self._home.pipe, self._users_before)

    def _exclusive_steps(self) -> list[Step]:
        """Return the step that keeps programs outside MPS off the GPU, unless it is set. Raises NotSupported with MIG."""
        host, device = self._host, self._device
        if device.gpu.mig_enabled:
            raise NotSupported(
                f"{device.title}: compute mode exclusive-process is not supported while MIG is enabled",
                "start without --exclusive",
                gpu=device.gpu.index,
                code="exclusive_on_mig",
            )
        now = host.nvml.compute_mode(device.gpu.index)
        if now is ComputeMode.EXCLUSIVE_PROCESS:
            return []
        self.previous = self.previous or now
        purpose = ", so that no program runs outside MPS"
        return [compute_mode_step(host, device, ComputeMode.EXCLUSIVE_PROCESS, before=now, why=purpose)]

    def _write_record(self, state: str, pid: int | None = None, started: int | None = None) -> None:
        """Write what a stop needs; ``pid`` and ``started`` are those of the daemon, once it runs."""
        self._home.write(
            DaemonRecord(
                device_uuid=self._device.uuid,
                pid=pid,
                started=started,
                uid=self._host.uid,
                limits=self._limits,
                previous_compute_mode=None if self.previous is None else self.previous.name,
                transient=self._transient,
                users=self._users,
                state=state,
            )
        )

    def _write_running(self) -> None:
        """Record the process of the new daemon. Raises OperationFailed if it is not found."""
        pid = self._daemon_pid()
        if pid is None:
            raise OperationFailed(
                f"the MPS daemon of {self._device.title} answers, but its process is not found",
                "it may run in another PID namespace; see: gpushare doctor",
                gpu=self._device.gpu.index,
                code="daemon_pid",
            )
        self._write_record(RUNNING, pid, start_of(self._host.processes.identity(pid)))

    def _restore_home(self) -> None:
        """Restore the directory of the daemon as it was before the start: with the record of then, or without one.

        If the new daemon could not be ended, all stays: its record says what is still to be undone.
        """
        daemon_lives = self._daemon_pid() is not None
        if daemon_lives and self._started:
            return
        if self._before is None:
            # The sockets of a live daemon of another are not ours to remove.
            self._home.clear(sockets=not daemon_lives)
        else:
            # Replaced, not removed and written: a kill in between would lose what is to be restored.
            self._home.write(self._before)

    def _daemon_pid(self) -> int | None:
        """Return the PID of the daemon that listens in the home, or None."""
        return daemon_pid(self._host, str(self._home.pipe))

    def _end_interrupted(self, record: DaemonRecord) -> None:
        """End the daemon that an interrupted start left. Raises InUse if it has clients."""
        pid = live_pid(self._host, self._home, record)
        if pid is None:
            return
        with contextlib.suppress(TimedOut):
            clients = clients_of(self._control)
            if clients:
                ending = f"gpushare mps stop -g {self._device.selector}"
                raise InUse(
                    f"an interrupted start left the MPS daemon {pid} on {self._device.title}, and it has clients: "
                    + first_few(clients),
                    f"wait up to a minute for them, then end them: {ending} --drain 60s; or end them now: {ending} --force",
                    gpu=self._device.gpu.index,
                    code="daemon_exists",
                )
        end_daemon(self._host, self._control, pid, force=True)

    def _start_daemon(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            InUse: one answers there already.
            OperationFailed: it does not start, or does not answer (codes ``daemon_not_started``, ``daemon_silent``).
        """
        device, home = self._device, self._home
        self._check_pipe_free()
        environment = start_environment(device.uuid, str(home.pipe), str(home.log))
        # Before the program runs: an interruption ends what it started.
        self._started = True
        done = self._host.programs.run(self._argv, env=environment, timeout=_ANSWER_SECONDS)
        if "already running" in done.text:
            self._started = False
        if done.exit_code != 0:
            raise _start_error(done, device, home)
        # Exit code 0 proves nothing (an unknown option exits 0 too): the daemon must answer.
        self._wait_for_answer(done.text or "it printed nothing")

    def _check_pipe_free(self) -> None:
        """Raise if a daemon answers in the home or hangs there; remove the files of a dead one."""
        try:
            answers = self._control.answers()
        except TimedOut:
            # If the program itself hangs, this raises its error: there is no daemon to end.
            probe_version(self._host.programs)
            raise
        if answers:
            raise _daemon_exists_error(self._device, self._daemon_pid())
        if self._daemon_pid() is None:
            # The files of a dead daemon are open to all users: another may hold its lock, and the new one would wait.
            for path in self._home.files_of_dead_daemon():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _wait_for_answer(self, printed: str) -> None:
        """Wait until the new daemon answers. Raises OperationFailed (``daemon_silent``), which quotes what it ``printed``."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        misses = 0
        while True:
            try:
                if self._control.answers():
                    return
            except TimedOut:
                # Until the deadline it may only be slow.
                if time.monotonic() > deadline:
                    raise
            # A single miss may fall between the daemon's fork and exec; two in a row mean that its process has ended.
            misses = misses + 1 if self._daemon_pid() is None else 0
            has_ended = misses > 1
            if has_ended or time.monotonic() > deadline:
                failure = "ended right after its start" if has_ended else "was started but does not answer"
                raise OperationFailed(
                    f"the MPS daemon of {self._device.title} {failure}: {printed}",
                    f"see its log: {shlex.quote(f'{self._home.log}/control.log')}",
                    gpu=self._device.gpu.index,
                    code="daemon_silent",
                )
            time.sleep(0.05)

    def _end_started_daemon(self) -> None:
        pid = self._daemon_pid() if self._started else None
        if pid is not None:
            end_daemon(self._host, self._control, pid, force=True)


def _users_text(users: Sequence[str] | None) -> str:
    """Return for whom a daemon is, to follow its title: ``, for alice at the same time``."""
    return "" if users is None else f", for {', '.join(users) or 'all users'} at the same time"


def access_command(pipe: str, users: Sequence[str]) -> str:
    """Return the command that lets only these users, or all, enter a pipe directory."""
    if not users:
        return f"setfacl -b {pipe}; chmod 755 {pipe}"
    return f"chmod 700 {pipe}; setfacl {' '.join(f'-m u:{shlex.quote(user)}:rx' for user in users)} {pipe}"


# The first binary with -M/--multiuser-server: CUDA 13.0, driver 580 (`strings` of 550.163 and 580.178).
_MULTIUSER_VERSION: Final = 13000


def check_several_users(host: Host) -> None:
    """Raise NotSupported: the driver has no server for several users."""
    version = probe_version(host.programs)
    if version is None or version < _MULTIUSER_VERSION:
        raise NotSupported(
            "this driver has no MPS server for several users: nvidia-cuda-mps-control -M came with driver 580",
            "without one the programs of one user at a time run, and those of others wait; side by side, users need "
            "MIG instances: gpushare mig create 1g --name USER",
            code="no_multiuser",
        )


def _refuse_second_daemon(host: Host, device: Device, daemons: Sequence[FoundDaemon]) -> None:
    """Raise InUse if one of these daemons serves the device already."""
    for item in daemons:
        daemon = item.daemon
        if daemon.ours and daemon.device_uuid == device.uuid:
            if daemon.error is not None or (item.record is not None and item.record.interrupted):
                # It is dead, or left by an interrupted start: the lock tells whether another gpushare starts it just now.
                continue
            raise _daemon_exists_error(device, daemon.pid)
        error = _foreign_error(host, device, item)
        if error is not None:
            raise error


def _foreign_error(host: Host, device: Device, item: FoundDaemon) -> InUse | None:
    """Return the error about a daemon of others that serves a device; None: it is gpushare's, or does not serve it."""
    if item.daemon.ours or not item.serves(host, device.gpu.index):
        return None
    error = foreign_daemon_error(item, device.title, device.gpu)
    pipe = item.daemon.pipe_directory
    if not item.trusted or pipe is None:
        return error
    join = f"start the program without gpushare: CUDA_MPS_PIPE_DIRECTORY={shlex.quote(pipe)} CMD"
    # systemd would start that of a unit again.
    is_unit = pipe.startswith(f"{UNIT_PIPES}/")
    stop = f"stop it: sudo systemctl disable --now {unit_at(pipe)}" if is_unit else item.stop_hint
    hint = f"{join}; or outside MPS: gpushare run -g {device.selector} --slice 2ms -- CMD; or {stop}"
    return InUse(error.message, hint, gpu=error.gpu, code=error.code)


def foreign_errors(host: Host, devices: Sequence[Device]) -> list[InUse | None]:
    """Return for each device why no client of gpushare can run there: a daemon of others serves it, and none of gpushare."""
    daemons = find_daemons(host, list({device.gpu.index: device.gpu for device in devices}.values()), deep=False)
    own = {item.daemon.device_uuid for item in daemons if item.daemon.ours and item.daemon.pid is not None}
    return [
        None
        if device.uuid in own
        else next(filter(None, (_foreign_error(host, device, item) for item in daemons)), None)
        for device in devices
    ]


def limits_ignored(host: Host, device: Device, limits: Limits) -> list[str]:
    """Return what to say of limits that MPS does not have on this GPU: it has them from Volta on (NVIDIA's MPS guide)."""
    capability = host.nvml.compute_capability(device.gpu.index)
    limited = limits.threads_percent is not None or limits.memory_limit_bytes is not None
    if not limited or capability is None or capability >= VOLTA:
        return []
    return [
        f"{device.title} is older than Volta: MPS ignores limits of threads and memory there, and its clients share one address space"
    ]


def _outside_notes(host: Host, device: Device) -> list[str]:
    """Return a note about the programs on a device that are outside MPS, if there are some."""
    processes = [process for process in host.nvml.processes(device.gpu.index) or () if device.has(process)]
    outside = [process.pid for process in processes if process.compute and not process.mps]
    count = counted(len(outside), "process")
    return [f"{count} on {device.title} outside MPS until restarted: {first_few(outside, 5)}"] if outside else []


def _start_error(done: Completed, device: Device, home: DaemonHome) -> OperationFailed:
    """Return the error for a daemon that did not start. Most of its failures print nothing."""
    # By exit code.
    reasons = {
        244: ("it does not find libcuda.so.1", "install the driver's CUDA library (libcuda1); then: gpushare doctor"),
        100: ("CUDA sees no device (error 100)", "see: gpushare doctor"),
    }
    reason, hint = reasons.get(done.exit_code, (done.text, f"see its log: {shlex.quote(f'{home.log}/control.log')}"))
    return OperationFailed(
        f"the MPS daemon of {device.title} did not start: {reason or f'exit code {done.exit_code}, no text'}",
        hint,
        gpu=device.gpu.index,
        code="daemon_not_started",
    )


def _daemon_exists_error(device: Device, pid: int | None) -> InUse:
    selector = device.selector
    return InUse(
        f"an MPS daemon of gpushare already serves {device.title} (process {pid})",
        f"run in it: gpushare run -g {selector} -- CMD; its owner and root can change its limits: gpushare mps set "
        f"-g {selector} ...; or stop it: gpushare mps stop -g {selector}",
        gpu=device.gpu.index,
        code="daemon_exists",
    )
