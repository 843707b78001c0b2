"""A share under MPS: joining or starting a daemon, the variables of a client, the proof that it is attached; and the guard."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from gpushare.base.errors import GpushareError, NotFound, OperationFailed, or_none
from gpushare.base.model import GpuProcess
from gpushare.base.selection import Device
from gpushare.base.values import dataclass
from gpushare.host.activity import ActivityMeter
from gpushare.host.claims import HeldClaim
from gpushare.host.guard import DONE, Guard
from gpushare.host.host import Host, processes_on
from gpushare.host.process import info_of, not_startable_error
from gpushare.host.records import read_tail
from gpushare.mps.control import MpsControl, is_server
from gpushare.mps.daemons import check_device, live_pid, own_daemon
from gpushare.mps.home import DaemonHome, Lease, client_environment, own_home, without_own_limits
from gpushare.mps.kill import Meter, fault_hint
from gpushare.mps.limits import Limits, check_memory
from gpushare.mps.start import plan_start
from gpushare.mps.stop import clients_of, end_daemon, restore_mode
from gpushare.part import Watch
from gpushare.plan import Plan, Step, carry_out
from gpushare.run.end import CONVERSATION_SECONDS, client_pids

_PENDING: Final = re.compile(
    r"NEW CLIENT (\d{1,10}) from user (\d{1,10}): Server is not ready, push client to pending list"
)
_ACCEPTED: Final = re.compile(r"NEW CLIENT (\d{1,10}) from user (\d{1,10}): Server (?:already exists|is not ready)")
_REFUSED: Final = re.compile(r"Refusing to accept new client \{PID: (\d{1,10}),")
_PENDING_SECONDS: Final = 3.0
_LOG_TAIL_BYTES: Final = 64 * 1024


@dataclass
class Attachment(Watch):
    """The watch over a client of an MPS daemon: the daemon lists it."""

    home: DaemonHome = field(kw_only=True)
    seen: set[int] = field(default_factory=set)
    # With the PIDs of their servers.
    attached: dict[int, int | None] = field(default_factory=dict)
    # Fatal GPU errors in the log of the servers when the program was started.
    faults: int = 0
    _waiting_since: dict[int, float] = field(default_factory=dict)

    @property
    def control(self) -> MpsControl:
        """Return what talks to the daemon, and waits at most a second for an answer."""
        return MpsControl(self.host.programs, str(self.home.pipe), seconds=CONVERSATION_SECONDS)

    def clients(self) -> set[int] | None:
        """Return the daemon's clients and those of the program that were clients; None when the daemon cannot be asked."""
        return client_pids(self.control, self.attached)

    def servers(self) -> set[int]:
        """Return the PIDs of the MPS servers that served the program at the last poll; a server that has ended is left out."""
        pids = {pid for pid in self.attached.values() if pid is not None}
        return {pid for pid in pids if is_server(info_of(self.host.processes, pid).name)}

    def find_processes(self) -> None:
        """Note which processes of the program are clients of the daemon, on the GPU outside MPS, or kept waiting."""
        tree = set(self.host.processes.descendants(self.program_pid))
        self.seen |= tree
        try:
            clients = {client.pid: client.server_pid for client in self.control.clients()}
        except NotFound:
            self.daemon_gone = True
            return
        except GpushareError:
            # Nothing can be told from a daemon that does not answer.
            return
        self.attached.update({pid: clients[pid] for pid in tree & clients.keys()})
        running = processes_on(self.host, self.device.gpu.index)
        if running is not None:
            self._note_outside([process for process in running if process.pid in tree], clients.keys())
        if not self.attached:
            self._note_pending(tree)

    def _note_outside(self, ours: Sequence[GpuProcess], clients: Collection[int]) -> None:
        """Note those of the program's processes that compute on the GPU outside MPS.

        Two looks in a row must have seen them there: the daemon may not list a new client yet.
        """
        outside_now = {
            process.pid for process in ours if process.compute and not process.mps and process.pid not in clients
        }
        self.outside |= outside_now & self._suspects
        self._suspects = outside_now

    def _note_pending(self, tree: set[int]) -> None:
        """Note clients that wait because the daemon serves another user.

        The daemon logs "pending" for a client while a server starts, too: so it counts after `_PENDING_SECONDS`.
        """
        pending_in_log = self._clients_in_log(_PENDING) & tree
        now = time.monotonic()
        for pid in pending_in_log:
            self._waiting_since.setdefault(pid, now)
        wait_for_long = {pid for pid in pending_in_log if now - self._waiting_since[pid] > _PENDING_SECONDS}
        if wait_for_long - self.pending and self._another_user_is_served():
            self.pending |= wait_for_long

    def _another_user_is_served(self) -> bool:
        """Return whether a server of the daemon belongs to another user."""
        servers = map(self.host.processes.describe, or_none(self.control.servers) or ())
        return any(info is not None and info.uid not in {None, self.host.uid} for info in servers)

    def mps_fault(self) -> bool:
        """Return whether its daemon or a server of it has died, or the servers' log tells of a new fatal error."""
        if fatal_errors(self.home) > self.faults:
            return True
        record = self.home.read()
        if record is None:
            # The daemon was stopped.
            return False
        servers = {pid for pid in self.attached.values() if pid is not None}
        # A daemon may die between two looks.
        return (
            self.daemon_gone
            or any(not self.host.processes.alive(pid) for pid in servers)
            or live_pid(self.host, self.home, record) is None
        )

    def settle(self) -> None:
        """Note the clients of a program that ended between two looks, by the daemon's log."""
        if not self.attached:
            # Their servers are unknown.
            self.attached.update(dict.fromkeys(self.accepted_clients(self.seen - self.pending - self.outside), None))

    def accepted_clients(self, pids: Collection[int]) -> set[int]:
        """Return which of these processes, which may have ended, the daemon has accepted as clients, by its log."""
        in_log = self._clients_in_log(_ACCEPTED).intersection(pids)
        # The daemon hands a client on to a server, which refuses it in FAULT.
        in_log -= set(map(int, _REFUSED.findall(read_tail(self.home.log / "server.log", _LOG_TAIL_BYTES))))
        # Any user may write into the log, but a daemon that has accepted a client has a server.
        has_server = bool(in_log) and bool(or_none(self.control.servers))
        return in_log if has_server else set()

    def _clients_in_log(self, pattern: re.Pattern[str]) -> set[int]:
        """Return the clients of this user named in the log, into which any user who may connect can write."""
        text = read_tail(self.home.log / "control.log", _LOG_TAIL_BYTES)
        return {int(pid) for pid, uid in pattern.findall(text) if int(uid) == self.host.uid}


def fatal_errors(home: DaemonHome) -> int:
    """Return how many fatal GPU errors the servers' log tells of (in its words of driver 570 and later)."""
    return read_tail(home.log / "server.log", _LOG_TAIL_BYTES).count("encountered a fatal GPU error")


def stop_if_last(host: Host, home: DaemonHome) -> bool:
    """Stop a daemon that `gpushare run` started, if it is unused; return whether clients without a lease use it, or may use it.

    Another gpushare with a lease stops it itself; for clients without one the guard has to wait.
    Raises GpushareError: it is unused and does not stop.
    """
    with home.locked():
        record = home.read()
        if record is None or not record.transient:
            return False
        pid = live_pid(host, home, record)
        # None: it died before its last program, and nothing else would clean up after it.
        if pid is not None:
            leases = home.live_leases()
            if leases != []:
                # None: unknown.
                return leases is None
            control = MpsControl(host.programs, str(home.pipe))
            if clients_of(control):
                return True
            end_daemon(host, control, pid, force=False)
        # Also what it has inherited of a daemon before it.
        restore_mode(host, record)
        home.clear()
    return False


# What the program runs in, as the guard is told.
MPS: Final = "mps"
INSTANCE: Final = "instance"


class Held(Protocol):
    """What programs run in on a device, and what is given back at the end."""

    @property
    def device(self) -> Device:
        """Return the GPU or MIG instance."""

    @property
    def words_for_guard(self) -> tuple[str, ...]:
        """Return the words that tell the guard what to give back after a death (`guard_words`)."""

    @property
    def meter(self) -> Meter | None:
        """Return what measures whether the GPU is idle, for the safe end of a program; None: its end breaks no other."""

    def close(self, *, program_lives: bool = False) -> bool:
        """Give the place back; return whether others still use its MPS daemon, in which case the guard waits for them.

        ``program_lives``: something failed and the guard will end the program, which keeps its claim until then.
        """


class Share(Held, Protocol):
    """A place for programs: planned first, then opened, and given back by `close`."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return all its devices: of a job of several GPUs more than one."""

    @property
    def where(self) -> str:
        """Return where a program runs in it: ``as a client of the MPS daemon of GPU 0``."""

    def check(self, program: str) -> None:
        """Raise unless a program can run in it; nothing is changed."""

    def steps(self) -> tuple[Step, ...]:
        """Return what `open` would carry out on the host as it is now: the start of an MPS daemon, or nothing."""

    def open(self) -> None:
        """Make the share ready for programs, such as by the start of an MPS daemon."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the program."""

    def watch(self, pid: int) -> Watch:
        """Return the watch over a program that has just been started."""


@dataclass
class MpsShare:
    """A share under an MPS daemon of this user, or of another user who has granted access.

    Another user's daemon gets no lease, because gpushare does not stop it. ``claim`` is held when the device is a MIG
    instance that was taken. ``own_limits``: limits in the caller's environment hold too.
    """

    host: Host
    device: Device
    limits: Limits
    claim: HeldClaim | None = None
    lease: Lease | None = None
    own_limits: bool = True
    _joined: DaemonHome | None = None

    @property
    def home(self) -> DaemonHome:
        """Return the home of the daemon that was joined; before `open`, of the one that would be."""
        if self._joined is not None:
            return self._joined
        try:
            return own_daemon(self.host, self.device)[0]
        except NotFound:
            return own_home(self.host, self.device.uuid)

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self.device,)

    @property
    def where(self) -> str:
        return f"as a client of the MPS daemon of {self.device.title}"

    def check(self, program: str) -> None:
        check_device(self.host, self.device)
        check_memory(self.device, self.limits.memory_limit_bytes)
        check_program(program)

    def check_no_fault(self) -> None:
        """Raise OperationFailed if the server that would serve the program is in FAULT: CUDA refuses new clients (807).

        Not part of `check`: a fault passes once the affected clients have ended, so a job that waits or is started again may go on.
        """
        try:
            home, record = own_daemon(self.host, self.device)
        except NotFound:
            return
        control = MpsControl(self.host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS)
        for server in or_none(control.servers) or ():
            # While a server of another user has clients, a program of this user waits.
            serves_user = info_of(self.host.processes, server).uid in {self.host.uid, 0}
            if serves_user and or_none(partial(control.server_status, server)) == "FAULT":
                raise OperationFailed(
                    f"MPS server {server} of {self.device.title} is in state FAULT: CUDA refuses new clients (error 807)",
                    fault_hint(f"gpushare mps stop -g {self.device.selector}", record, self.device),
                    gpu=self.device.gpu.index,
                    code="server_fault",
                )

    def steps(self) -> tuple[Step, ...]:
        """Return the start of a daemon, where the device has none to join."""
        try:
            own_daemon(self.host, self.device)
        except NotFound:
            return plan_start(self.host, self.device, Limits(), transient=True).steps
        return ()

    def open(self) -> None:
        """Join the daemon of the device; start one where there is none."""
        users_home = own_home(self.host, self.device.uuid)
        home = self.home
        if home.directory != users_home.directory:
            # Another user's, which has granted access: without a lease.
            self._joined = home
            return
        users_home.create()
        with users_home.locked():
            # Planned under the lock: another run may have started one, or stopped it.
            carry_out(Plan(title=f"MPS on {self.device.title}", steps=self.steps()))
            self._joined = users_home
            self.lease = users_home.take_lease()

    @property
    def words_for_guard(self) -> tuple[str, ...]:
        return guard_words(MPS, self.lease, self.claim)

    @property
    def meter(self) -> ActivityMeter:
        mig = self.device.mig
        return ActivityMeter(self.host.nvml, self.device.gpu.index, None if mig is None else mig.gpu_instance_id)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a client of the daemon, with its limits."""
        variables = base if self.own_limits else without_own_limits(base)
        return client_environment(variables, self.device, self.home, self.limits)

    def watch(self, pid: int) -> Attachment:
        home = self.home
        return Attachment(self.host, self.device, pid, home=home, seen={pid}, faults=fatal_errors(home))

    def close(self, *, program_lives: bool = False) -> bool:
        """Release the lease and stop the daemon if this was its last program; return whether others still use it."""
        lingers = False
        if self.lease is not None:
            self.lease.release()
            self.lease = None
            try:
                lingers = stop_if_last(self.host, self.home)
            except GpushareError:
                # It does not stop now. The guard tries again.
                lingers = True
        # If the share is opened again, it may have to start another daemon.
        self._joined = None
        # After the daemon, so that the next holder finds the instance empty. While the program lives, the guard holds it.
        if self.claim is not None and not program_lives:
            self.claim.release()
        self.claim = None
        return lingers


_NOT_EXECUTABLE: Final = 126
NO_PROGRAM: Final = 127


def check_program(program: str) -> None:
    """Raise NotFound or NoPermission unless there is such a program that may be executed."""
    if shutil.which(program) is not None:
        return
    # A file of this directory that could be executed is only not on PATH.
    forbidden = os.path.isfile(program) and not os.access(program, os.X_OK)
    error = not_startable_error(program, forbidden=forbidden)
    # The exit codes of a shell, env and nohup.
    error.exit_code = _NOT_EXECUTABLE if forbidden else NO_PROGRAM  # type: ignore[assignment]
    raise error


def guard_words(kind: str, lease: Lease | None, *claims: HeldClaim | None) -> tuple[str, ...]:
    """Return what `orphans.after_death` reads: the kind, path and descriptor of the daemon's lease, the path of each claim.

    Without a lease its path is empty and its descriptor -1.
    """
    lease_words = ("", "-1")
    if lease is not None:
        lease_words = (os.fspath(lease.path), str(lease.descriptor))
    return (kind, *lease_words, *(os.fspath(claim.path) for claim in claims if claim is not None))


# The program has ended, and others still use the daemon: the guard stops it when the last one goes.
LINGER: Final = "linger"


def guard_of(host: Host, share: Held) -> Guard:
    """Start the guard of a share, which ends its programs the safe way if gpushare dies (`orphans.after_death`).

    Raises:
        OperationFailed: it does not start (code ``guard_failed``), or cannot hold an instance (``claim_unusable``).
    """
    device = share.device
    kind, lease_path, descriptor, *claim_paths = share.words_for_guard
    guard = Guard(
        host.spec,
        "ends the program if gpushare dies",
        "gpushare.run.orphans:after_death",
        *(device.uuid, str(device.gpu.index), kind, lease_path, descriptor, *claim_paths),
        # -1: there is no lease.
        descriptors=[int(descriptor)] if int(descriptor) >= 0 else [],
    )
    try:
        for path in claim_paths:
            # From here on, the guard holds the instance if gpushare is killed.
            HeldClaim(Path(path)).add(guard.pid)
    except BaseException:
        guard.leave()
        guard.wait()
        raise
    return guard


def dismiss(guard: Guard, *, lingers: bool) -> None:
    """Let the guard end, as its share was given back; with ``lingers`` it first waits for the last user of the daemon."""
    guard.leave(LINGER if lingers else DONE)
    if not lingers:
        guard.wait()
