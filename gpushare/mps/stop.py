"""Stop an MPS daemon: wait for its clients, end it (by force if asked), and see that its process is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.errors import (
    BadUsage,
    ExitCode,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    OperationFailed,
    TimedOut,
    error_of,
    or_none,
)
from gpushare.base.model import ComputeMode, Gpu
from gpushare.base.selection import Device, select_for_change
from gpushare.base.units import counted, first_few
from gpushare.host.capabilities import user_name
from gpushare.host.compute_mode import compute_mode_step
from gpushare.host.host import Host, ending_hint
from gpushare.host.identity import start_of
from gpushare.host.process import ProcessInfo, processes_text, signal_if_same, wait_gone
from gpushare.host.smi import compute_mode_command
from gpushare.mps.control import MpsControl, NoDaemon, control_command, is_server, not_your_daemon_error
from gpushare.mps.daemons import FoundDaemon, find_daemons, live_pid, with_answers
from gpushare.mps.home import ADOPTED, DaemonRecord, restart_command
from gpushare.mps.limits import Limits
from gpushare.plan import Loss, Plan, Step, carry_out

# How long a daemon and its servers may take to end (measured on an H200: 59 to 82 ms).
_GONE_SECONDS: Final = 10.0
# How long to wait after each quit: a quit may be lost, and the last one has the full time.
_WAITS_AFTER_QUIT: Final = (1.0, 2.0, _GONE_SECONDS)
# How long a daemon may take to end by a signal, and then its servers by themselves.
_SIGNAL_SECONDS: Final = 3.0
_SERVER_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.5
# A daemon that does not answer for this long hangs (2 ms is usual on an H200).
_PROBE_SECONDS: Final = 2.0


def daemons_to_stop(
    host: Host, gpus: Sequence[Gpu], gpu: str | None, pipe_directory: str | None
) -> list[tuple[FoundDaemon, Device | None]]:
    """Return the daemons on a GPU, or of a pipe directory, each with the whole GPU that it serves; None: an instance, or unknown.

    Raises:
        NotFound: there is none.
        InUse: several processes name the directory.
        NoPermission: the daemon is another user's.
        BadUsage: both a GPU and a directory are given.
    """
    if pipe_directory is not None and gpu is not None:
        raise BadUsage("both a GPU and a pipe directory name the daemon", "give one of them", code="two_names")
    daemons = find_daemons(host, gpus, deep=False)
    if pipe_directory is None:
        chosen = _daemons_on(daemons, gpu, gpus)
    else:
        chosen = [_daemon_at_pipe(host, daemons, pipe_directory)]
    whole_gpus = {each.uuid: Device(gpu=each) for each in gpus if each.uuid is not None}
    return [(item, whole_gpus.get(item.daemon.device_uuid or "")) for item in chosen]


def _daemons_on(daemons: Sequence[FoundDaemon], gpu: str | None, gpus: Sequence[Gpu]) -> list[FoundDaemon]:
    """Return the daemons of gpushare on these GPUs (None: the only one). Raises NotFound: there is none."""
    ours = [item for item in daemons if item.daemon.ours]
    see_all = (
        "see the daemons: gpushare mps status; name one by its GPU or instance (-g), "
        "or one that gpushare did not start by --pipe-directory"
    )
    if gpu is None and not ours:
        raise NoDaemon("no MPS daemon of gpushare serves this host", see_all)
    if gpu is None and len(ours) == 1 and len(gpus) == 1:
        # The only one, even if it serves a MIG instance.
        return ours
    devices = select_for_change(gpu, gpus)
    chosen = [
        item
        for device in devices
        for item in ours
        if item.daemon.device_uuid == device.uuid
        # With "all" a GPU includes its MIG instances.
        or (gpu == "all" and device.mig is None and item.daemon.gpu_index == device.gpu.index)
    ]
    if not chosen:
        raise NoDaemon(f"no MPS daemon of gpushare serves {', '.join(device.title for device in devices)}", see_all)
    return chosen


def _daemon_at_pipe(host: Host, daemons: Sequence[FoundDaemon], pipe_directory: str) -> FoundDaemon:
    """Return the daemon of a pipe directory. Raises NoDaemon, or NoPermission if it is another user's."""
    wanted = os.path.abspath(pipe_directory)
    item = _listening_daemon(host, [item for item in daemons if item.daemon.pipe_directory == wanted], wanted)
    if item is None:
        raise NoDaemon(f"no MPS daemon uses the pipe directory {wanted}", "see the daemons: gpushare mps status")
    if not item.trusted:
        raise NoPermission(
            f"the MPS daemon {item.daemon.pid} belongs to user {item.daemon.user or 'unknown'}",
            f"gpushare stops only daemons of yours and of root; {item.stop_hint}",
            code="not_your_daemon",
        )
    return item


def _listening_daemon(host: Host, daemons: Sequence[FoundDaemon], directory: str) -> FoundDaemon | None:
    """Return the daemon of a pipe directory, of all those that name it; None: none does.

    Any user's process can name it. Of several, root's or our own is taken if it is the one that listens there.
    """
    ours = next((item for item in daemons if item.daemon.ours), None)
    if ours is not None:
        return ours
    if len(daemons) < 2:
        return daemons[0] if daemons else None
    listener = host.programs.listener(directory)
    chosen = next((item for item in daemons if listener == (item.daemon.pid, item.uid)), None)
    if chosen is None or not chosen.trusted:
        names = first_few(f"{item.daemon.pid} (user {item.daemon.user or 'unknown'})" for item in daemons)
        who = "its listener could not be identified" if listener is None else f"process {listener.pid} listens there"
        raise InUse(
            f"{len(daemons)} processes name the pipe directory {directory}: {names}; {who}",
            f"look at them, and end the right one: ps -fp {','.join(str(item.daemon.pid) for item in daemons[:8])}",
            code="several_daemons",
        )
    return chosen


class Stop:
    """The stop of one daemon: ``steps`` are what ``--dry-run`` prints and `run` carries out.

    It waits up to ``drain_seconds`` for the clients. If some are left, ``force`` shuts the servers down and the clients
    lose their contexts; without it nothing is changed. ``forced``: clients were
    ended, or the daemon by signals.
    """

    def __init__(
        self,
        host: Host,
        found: FoundDaemon,
        device: Device | None,
        *,
        drain_seconds: float,
        force: bool,
        on_wait: Callable[[list[int], float], None] | None = None,
    ) -> None:
        self._host, self.found, self._device = host, found, device
        self.drain_seconds, self._force, self._on_wait = drain_seconds, force, on_wait
        self._pid, self.forced = found.daemon.pid, False
        # The clients that the user agreed to lose; None: all.
        self._agreed: frozenset[int] | None = None

    def losses(self, job_names: Callable[[Sequence[int]], Mapping[int, str]]) -> tuple[Loss, ...]:
        """Return what to ask before the stop: about a daemon that is not ours, and with ``force`` about the programs on it.

        The clients are noted: if another one comes until then, the stop fails. ``job_names`` returns the names of the jobs
        that processes belong to.
        """
        item = self.found
        daemon = item.daemon
        # What may not be stopped is refused without a question.
        if daemon.pid is None or error_of(lambda: _check_permission(self._host, item)) is not None:
            return ()
        user = daemon.user or "unknown user"
        owner = item.uid if item.record is None else item.record.uid
        reasons = []
        if not daemon.ours:
            reasons.append(f"not started by gpushare, of {user}")
        elif owner not in {None, self._host.uid}:
            reasons.append(f"started by {user}")
        if self._force:
            clients = self._clients_now()
            self._agreed = None if clients is None else frozenset(clients)
            if clients is None:
                reasons.append("it does not tell whether it has clients")
            if clients:
                described = processes_text(self._host.processes, clients, jobs=job_names(clients))
                reasons.append(f"{counted(len(clients), 'program')} on it: {described}")
            # A program without a client has no CUDA context yet.
            elif item.home is not None and (leases := or_none(item.home.live_leases)) != []:
                may_be_used = "may be used by gpushare run: its leases cannot be read"
                reasons.append(f"used by gpushare run: {first_few(leases)}" if leases else may_be_used)
        title = f"the MPS daemon {daemon.pid}{self._place_text()}"
        return (Loss(action="stops", what=title, why=tuple(reasons)),) if reasons else ()

    def _clients_now(self) -> list[int] | None:
        """Return the clients at this moment; None: unknown."""
        try:
            _check_listener(self._host, self.found)
            control = self.found.control(self._host)
            control.answers(timeout=_PROBE_SECONDS)
            return clients_of(control)
        except GpushareError:
            return None

    @property
    def command(self) -> str | None:
        """Return the equivalent plain command, or None where a dead daemon left only files."""
        daemon = self.found.daemon
        return None if daemon.pid is None else control_command(daemon.pipe_directory or "", "quit")

    @functools.cached_property
    def undo(self) -> str | None:
        """Return the command that starts the same daemon again; its clients do not come back."""
        record = self.found.record
        if record is None or record.transient or record.interrupted or self.found.daemon.pid is None:
            return None
        # Its limits now, which others may have changed since the start, unless it does not answer (None).
        (now,) = with_answers(self._host, [self.found], strangers=False)
        limits = record.limits if now.daemon.threads_percent is None else Limits.of(now.daemon)
        return restart_command(replace(record, limits=limits), self._device)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self._waiting_steps(), *self._ending_steps())

    def _place_text(self) -> str:
        """Return where the daemon is, to follow its title: `` of GPU 0``."""
        daemon = self.found.daemon
        return f" of GPU {daemon.gpu_index}" if daemon.gpu_index is not None else f" at {daemon.pipe_directory}"

    def _waiting_steps(self) -> list[Step]:
        """Return the step that waits for the clients; none for a dead daemon."""
        daemon = self.found.daemon
        if daemon.pid is None:
            return []
        what = f"wait up to {self.drain_seconds:g} s for the clients of the MPS daemon{self._place_text()}"
        if not self._force:
            what += f"; if any is left, change nothing (exit code {ExitCode.IN_USE.value})"
        return [
            Step(
                what=what,
                command=control_command(daemon.pipe_directory or "", "ps"),
                do=lambda: self._wait_for_clients(self.drain_seconds),
            )
        ]

    def _ending_steps(self) -> list[Step]:
        """Return the steps that end the daemon, restore the compute mode, and remove its files."""
        daemon = self.found.daemon
        record = self.found.record
        home = self.found.home
        dead = daemon.pid is None
        where = self._place_text()
        what = f"end the MPS daemon{where} (process {daemon.pid}) and wait until its process is gone"
        if dead:
            what = f"end what an interrupted start of the MPS daemon{where} may have left"
        quit_command = control_command(daemon.pipe_directory or "", "quit")
        steps = [Step(what=what, command=quit_command, undo=self.undo, do=self._end)]
        if record is not None and record.previous_compute_mode is not None:
            steps.append(
                Step(
                    what=f"restore the compute mode{where}",
                    command=compute_mode_command(record.device_uuid, record.previous_compute_mode),
                    do=lambda: restore_mode(self._host, record),
                )
            )
        if home is not None:
            # Last: until then the record tells the next command what is still to be done.
            steps.append(
                Step(
                    what=f"clean up the files of {'a dead' if dead else 'the'} MPS daemon{where}",
                    command=f"rm -f {shlex.quote(str(home.directory / 'daemon.json'))}",
                    do=home.clear,
                )
            )
        return steps

    def run(self) -> None:
        """Stop the daemon and check that its process is gone.

        Raises:
            InUse: clients are left and ``force`` is False.
            TimedOut: the daemon does not answer and ``force`` is False.
            NoPermission: it belongs to another user.
            OperationFailed: its process does not end.
        """
        host = self._host
        item = self.found
        title = f"stop the MPS daemon{self._place_text()}"
        # Before the lock: another user's home cannot be locked.
        _check_permission(host, item, force=self._force)
        _check_listener(host, item)
        # Also before the lock: a `gpushare run` needs the lock to end, and its program is a client that we wait for.
        carry_out(Plan(title=title, steps=tuple(self._waiting_steps())))
        with item.home.locked() if item.home is not None else contextlib.nullcontext():
            if not _has_ended_meanwhile(host, item):
                carry_out(Plan(title=title, steps=tuple(self._ending_steps())))

    def _wait_for_clients(self, seconds: float) -> list[int]:
        """Wait for the clients to end; return those left. Raises InUse: some are left and ``force`` is False."""
        started = time.monotonic()
        daemon = self.found.daemon
        control = self.found.control(self._host)
        if self._force and _hangs(control):
            # It names no clients, and is ended by signals.
            return []
        while True:
            clients = clients_of(control)
            waited = time.monotonic() - started
            if not clients or waited >= seconds:
                break
            if self._on_wait is not None:
                self._on_wait(clients, seconds - waited)
            time.sleep(min(_POLL_SECONDS, max(0.02, seconds - waited)))
        if clients and not self._force:
            raise InUse(
                f"the MPS daemon {daemon.pid} still has {counted(len(clients), 'client')} after {waited:.1f} s: "
                + first_few(clients),
                f"wait longer and then force: {self.found.stop_command} --drain 60s; or force now: --force",
                gpu=daemon.gpu_index,
                code="clients_left",
            )
        return clients

    def _end(self) -> None:
        """End the daemon. Raises InUse: clients have come while we waited for the lock."""
        host = self._host
        item = self.found
        started = item.started
        if self._pid is None and item.home is not None and item.record is not None:
            # A start that was killed meanwhile may have left a daemon, whose start time is not known.
            self._pid = live_pid(host, item.home, item.record)
            started = None
        if self._pid is None:
            return
        # Another process may listen there now.
        _check_listener(host, item)
        clients = self._wait_for_clients(0.0)
        self._refuse_new_clients(clients)
        signaled = end_daemon(host, item.control(host), self._pid, started=started, force=self._force)
        self.forced = bool(clients) or signaled

    def _refuse_new_clients(self, clients: Sequence[int]) -> None:
        """Raise InUse if one of these clients came after the user agreed to lose those of then."""
        new = [] if self._agreed is None else [pid for pid in clients if pid not in self._agreed]
        if new:
            item = self.found
            raise InUse(
                f"the MPS daemon {self._pid} has {counted(len(new), 'new client')}: "
                f"{processes_text(self._host.processes, new)}; it was not stopped",
                f"run it again, and it asks for these too: {item.stop_command} --force",
                gpu=item.daemon.gpu_index,
                code="clients_left",
            )


def _has_ended_meanwhile(host: Host, item: FoundDaemon) -> bool:
    """Return whether the daemon ended while we waited for the lock: a last `gpushare run` ends the one that it started.

    Raises NoDaemon: another gpushare stopped or replaced it.
    """
    record = item.record
    # An adopted daemon has no record of its own.
    record_then = None if record is None or record.state == ADOPTED else record
    record_now = None if item.home is None else item.home.read()
    if record_now == record_then:
        return False
    pid = item.daemon.pid
    if (
        record is not None
        and record.transient
        and pid
        and not record_now
        and not host.processes.alive(pid, record.started)
    ):
        return True
    raise NoDaemon(
        f"another gpushare stopped or replaced the MPS daemon {pid}", "see the current daemons: gpushare mps status"
    )


def end_daemon(host: Host, control: MpsControl, pid: int, *, force: bool, started: int | None = None) -> bool:
    """Tell a daemon to quit and wait until its process is gone; return whether signals were needed.

    With ``force`` a daemon that does not end gets SIGTERM and then SIGKILL (its files do not disturb a later start).
    ``started`` is its start, if known: a later process with its PID gets no command and no signal.

    Raises:
        TimedOut: it does not answer and ``force`` is False.
        OperationFailed: it does not end.
    """
    started = start_of(host.processes.identity(pid)) if started is None else started
    if started is None or not host.processes.alive(pid, started):
        # It has ended; what listens at its directory now is another daemon.
        return False
    if not (force and _hangs(control)) and _quit(host, control, pid, started, force=force):
        return False
    if force and _end_by_signals(host, pid, started):
        return True
    raise OperationFailed(
        f"the MPS daemon {pid} was told to quit and still runs",
        "see its log: gpushare mps logs; end it: "
        f"gpushare mps stop --pipe-directory {shlex.quote(control.pipe_directory)} --force",
        code="daemon_stays",
    )


def _hangs(control: MpsControl) -> bool:
    try:
        control.answers(timeout=_PROBE_SECONDS)
    except TimedOut:
        return True
    return False


def _quit(host: Host, control: MpsControl, pid: int, started: int, *, force: bool) -> bool:
    """Tell a daemon to quit, again if it has not: a quit that meets another conversation is dropped. Return whether it is gone.

    Raises TimedOut: it does not answer and ``force`` is False.
    """
    for seconds in _WAITS_AFTER_QUIT:
        try:
            control.quit(force=force)
        except NotFound:
            # It ended just before the command.
            pass
        except TimedOut:
            if not force:
                raise
            return False
        if not wait_gone(host.processes, {pid: started}, seconds):
            return True
    return False


def _end_by_signals(host: Host, pid: int, started: int) -> bool:
    """End a daemon by SIGTERM, then SIGKILL, and the servers it leaves behind; return whether it is gone."""
    daemon = host.processes.describe(pid)
    if daemon is None or not host.processes.alive(pid, started):
        return True
    servers = _servers_below(host, daemon)
    for number in (signal.SIGTERM, signal.SIGKILL):
        now = host.processes.describe(pid)
        if now is not None and now.uid != daemon.uid:
            # The PID is now a program of another user.
            return False
        signal_if_same(host.processes, pid, started, number)
        if not wait_gone(host.processes, {pid: started}, _SIGNAL_SECONDS):
            # No daemon is left to end them.
            for server in wait_gone(host.processes, servers, _SERVER_SECONDS):
                signal_if_same(host.processes, server, servers[server], signal.SIGKILL)
            return True
    return False


def _servers_below(host: Host, daemon: ProcessInfo) -> dict[int, int]:
    """Return the MPS servers that a daemon has started, with their start times.

    They are descendants with the name of a server, or at first of the daemon, and of its user: root's daemon starts servers
    for other users too.
    """
    servers = {}
    for pid in host.processes.descendants(daemon.pid):
        info = host.processes.describe(pid)
        if info is None or pid == daemon.pid or info.started is None:
            continue
        has_name = is_server(info.name) or info.name == daemon.name
        if has_name and daemon.uid in {0, info.uid}:
            servers[pid] = info.started
    return servers


def _check_listener(host: Host, item: FoundDaemon) -> None:
    """Raise InUse unless a daemon is the one that listens at its directory: any user's process can name it."""
    if item.daemon.ours or item.daemon.pid is None:
        return
    directory = item.daemon.pipe_directory or ""
    listener = host.programs.listener(directory)
    if listener == (item.daemon.pid, item.uid):
        return
    problem, hint = "its listener could not be identified", ending_hint(host, item.daemon.pid)
    if listener is not None:
        problem = f"process {listener.pid} (user {user_name(listener.uid)}) listens there"
        hint = f"look at both: ps -fp {item.daemon.pid},{listener.pid}; nothing was stopped"
    claim = f"process {item.daemon.pid} (user {item.daemon.user or 'unknown'}) claims the pipe directory {directory}"
    raise InUse(f"{claim}, but {problem}", hint, code="other_daemon")


def _check_permission(host: Host, item: FoundDaemon, *, force: bool = False) -> None:
    """Raise NoPermission if another user started the daemon, and this user is not root."""
    record = item.record
    if record is not None and not host.root and record.uid != host.uid:
        raise not_your_daemon_error(
            f"the MPS daemon {item.daemon.pid}",
            f"user {user_name(record.uid)}",
            command=f"{item.stop_command}{' --force' if force else ''}",
        )


def clients_of(control: MpsControl) -> list[int]:
    """Return the PIDs of all clients of a daemon, none if it is gone."""
    try:
        return [client.pid for client in control.clients()]
    except NotFound:
        return []


def restore_mode(host: Host, record: DaemonRecord) -> None:
    """Restore the compute mode in a record, if it has one.

    Raises OperationFailed: it could not be restored (code ``not_restored``).
    """
    if record.previous_compute_mode is None:
        return
    mode = ComputeMode[record.previous_compute_mode]
    device = None
    try:
        device = next((Device(gpu=gpu) for gpu in host.nvml.identities() if gpu.uuid == record.device_uuid), None)
        if device is None:
            raise NotFound(f"{record.device_uuid} does not answer", "see: gpushare status")
        compute_mode_step(host, device, mode, before=None).do()
    except GpushareError as error:
        raise OperationFailed(
            f"the MPS daemon is gone, but the compute mode could not be restored: {error.message}",
            f"restore it: sudo nvidia-smi -i {record.device_uuid} -c {mode.name}",
            gpu=None if device is None else device.gpu.index,
            code="not_restored",
        ) from error
