"""The directory of one MPS daemon of gpushare: pipe and log directories, record, lock, leases, and who may enter.

``<run>/mps/<gpu-0d54321e-5f2c91aa>/`` contains ``pipe/``, ``log/``, ``daemon.json`` (what an undo needs), ``lock`` and
``leases/`` (one file per `gpushare run`, locked while it lives). The live daemon is the truth; the record only has its owner
and what to restore. It is written before a start changes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Final

from gpushare.base.errors import BadUsage, NoPermission, NotHeld
from gpushare.base.model import ComputeMode, device_key
from gpushare.base.selection import Device
from gpushare.base.typed import Count, Pid
from gpushare.base.values import dataclass
from gpushare.host.capabilities import change_refused_error, listed_users, set_listed_users, user_id, user_name
from gpushare.host.host import Host, is_trusted_directory, make_private_directory
from gpushare.host.records import clear_leftovers, lock_within, open_lock, try_lock, writing
from gpushare.host.store import Kept, RecordStore
from gpushare.mps.control import MAX_PIPE_DIRECTORY_BYTES, NoDaemon
from gpushare.mps.limits import VARIABLES, Limits

# States of a record. A start writes STARTING before its first change and RUNNING at its end; STARTING found under the
# lock is an interrupted start. ADOPTED is never written: it means a daemon in a home of gpushare that has no record.
RUNNING: Final = "running"
STARTING: Final = "starting"
ADOPTED: Final = "adopted"
_RECORD: Final = "daemon.json"
_LOCK_SECONDS: Final = 60.0
_LEASE: Final = re.compile(r"^\d{1,10}(\.\d+)?\.lease$", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class AttachedClient:
    """A client that attached before the last change of the limits, and the limits that its server had then.

    ``limits`` is None where they are unknown.
    """

    pid: Pid
    started: Count | None
    limits: Limits | None


@dataclass(frozen=True, kw_only=True)
class DaemonRecord(Kept):
    """What gpushare remembers of a daemon that it started."""

    device_uuid: str
    # None: the start that wrote this did not get so far.
    pid: Pid | None
    started: Count | None
    uid: Count
    limits: Limits = field(default_factory=Limits)
    # The compute mode to restore, by name, or None when it was not changed.
    previous_compute_mode: Annotated[str, ComputeMode.__members__.__contains__] | None = None
    transient: bool = False
    # Who may connect to its server for several users: these, or all (empty); None: its server has one user at a time.
    users: tuple[str, ...] | None = None
    state: Annotated[str, {RUNNING, STARTING}.__contains__] = RUNNING
    attached: tuple[AttachedClient, ...] = ()
    # That of its MIG device, in the journal of a change that stops the daemon for a while.
    profile: str | None = None

    @property
    def interrupted(self) -> bool:
        """Return whether the start that wrote it has not finished: it was killed, or is still running."""
        return self.state == STARTING


DAEMONS: Final = RecordStore(DaemonRecord, "mps/*", "the record of an MPS daemon")


@dataclass(frozen=True)
class DaemonHome:
    """The directory of the daemon of one device."""

    directory: Path

    @property
    def pipe(self) -> Path:
        """Return CUDA_MPS_PIPE_DIRECTORY."""
        return self.directory / "pipe"

    @property
    def log(self) -> Path:
        """Return CUDA_MPS_LOG_DIRECTORY."""
        return self.directory / "log"

    @property
    def leases(self) -> Path:
        return self.directory / "leases"

    def create(self) -> None:
        """Create the directories, closed to others. Raises NoPermission: one is not writable, or belongs to another user."""
        self._make_directory()
        for path in (self.pipe, self.log, self.leases):
            make_private_directory(path)
        # Other users could open a lease, and lock it.
        with contextlib.suppress(OSError):
            self.leases.chmod(0o700)

    def check_path(self) -> None:
        """Raise BadUsage if the pipe directory is too long for a daemon, which would die silently."""
        length = len(os.fsencode(str(self.pipe)))
        if length > MAX_PIPE_DIRECTORY_BYTES:
            raise BadUsage(
                f"the MPS pipe directory {self.pipe} has {length} bytes; {MAX_PIPE_DIRECTORY_BYTES} is the limit",
                "set GPUSHARE_RUN_DIR to a shorter directory, for example /run/gpushare",
                code="path_too_long",
            )

    def _make_directory(self) -> None:
        """Make the home and those above it, each closed to the writes of others."""
        for path in (self.directory.parent.parent, self.directory.parent, self.directory):
            make_private_directory(path)

    @classmethod
    def at_pipe(cls, pipe_directory: str | None, run_directories: Sequence[Path]) -> DaemonHome | None:
        """Return the home whose pipe directory this is; None: it is not in one of these run directories, or is unknown."""
        if pipe_directory is None:
            return None
        path = Path(pipe_directory)
        is_below = path.parent.parent in [directory / "mps" for directory in run_directories]
        return cls(path.parent) if is_below and path.name == "pipe" else None

    def read(self) -> DaemonRecord | None:
        """Return the record, or None if there is none, it is not valid, or another user may have written it.

        The PID in it gets signals, so only our own records and root's count.
        """
        record = DAEMONS.read(self.directory / _RECORD)
        if record is None or (record.pid is None and not record.interrupted):
            return None
        return record

    def is_trusted(self) -> bool:
        """Return whether only this user or root can have written here or redirected the path."""
        return is_trusted_directory(self.directory.parents[1], *self.directory.parts[-2:])

    def write(self, record: DaemonRecord) -> None:
        """Write the record. Others may read it: `gpushare status` shows root's daemons.

        Raises NoPermission, OperationFailed: it cannot be written; the old one stays.
        """
        DAEMONS.write(replace(record, path=self.directory / _RECORD))

    def clear(self, *, sockets: bool = True) -> None:
        """Remove the record and, with ``sockets``, what a dead daemon left in the pipe directory; keep the logs."""
        try:
            (self.directory / _RECORD).unlink(missing_ok=True)
        except OSError as error:
            raise NoPermission(
                f"cannot remove the record in {self.directory}: {error.strerror}",
                "run as its owner, or as root: sudo gpushare ...",
                code="directory_unwritable",
            ) from None
        # It removes the leases of programs that have ended.
        self.live_leases()
        for path in self.files_of_dead_daemon() if sockets else ():
            with contextlib.suppress(OSError):
                path.unlink()

    def files_of_dead_daemon(self) -> list[Path]:
        try:
            return sorted(path for path in self.pipe.iterdir() if not path.is_dir())
        except OSError:
            return []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this daemon: start, set and stop exclude each other.

        Raises:
            InUse: another gpushare holds it for longer than a minute.
            OperationFailed: it cannot be created.
            NoPermission: the directory or the lock is not this user's.
        """
        self._make_directory()
        descriptor = open_lock(self.directory / "lock", "of this MPS daemon")
        try:
            with writing(self.directory / "lock", "of this MPS daemon"):
                holds = f"held the lock of the daemon in {self.directory}"
                lock_within(descriptor, self.directory / "lock", _LOCK_SECONDS, holds)
            clear_leftovers(self.directory)
            yield
        finally:
            os.close(descriptor)

    def live_leases(self) -> list[int] | None:
        """Return the PIDs of every `gpushare run` that uses this daemon, and remove the leases of dead ones.

        None: unknown, because one cannot be opened (another user's). Raises OperationFailed: a lock cannot be checked.
        """
        live: list[int] = []
        try:
            names = sorted(os.listdir(self.leases))
        except FileNotFoundError:
            return live
        except OSError:
            return None
        for path in (self.leases / name for name in names if _LEASE.match(name)):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            try:
                with writing(path, "the lease of a program"):
                    dead = try_lock(descriptor)
                if dead:
                    # It does not count, even if it cannot be removed.
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                else:
                    live.append(int(path.name.partition(".")[0]))
            finally:
                os.close(descriptor)
        return live

    def take_lease(self) -> Lease:
        """Take a lease: the daemon is in use until it is released, or until every holder has ended."""
        # The name may be taken: by another lease of this process, or by the guard of a dead one with our PID.
        for number in itertools.count():
            suffix = f".{number}" if number else ""
            path = self.leases / f"{os.getpid()}{suffix}.lease"
            # Inherited by fork: the guard keeps it if gpushare itself is killed.
            descriptor = open_lock(path, "the lease of a program")
            # Closed if another holds it, or `live_leases` removed it between open and lock.
            with writing(path, "the lease of a program"), contextlib.ExitStack() as closing:
                closing.callback(os.close, descriptor)
                if try_lock(descriptor) and _is_at(descriptor, path):
                    closing.pop_all()
                    return Lease(path, descriptor)
        raise AssertionError


@dataclass(frozen=True)
class Lease:
    """One user of a daemon."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Give the lease back: the daemon is no longer in use by this holder."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        # The guard has the same descriptor: if the file stays, closing ours alone would leave it locked.
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def restart_command(record: DaemonRecord, device: Device | None) -> str:
    """Return the gpushare command that starts the daemon of a record again; ``device`` None: it is named by its UUID."""
    # A start records the compute mode from before only if it made the GPU exclusive, which no instance can be.
    exclusive = record.previous_compute_mode is not None and (device is None or device.mig is None)
    selector = record.device_uuid if device is None else device.selector
    return start_command(selector, record.limits, exclusive=exclusive, users=record.users)


def start_command(selector: str, limits: Limits, *, exclusive: bool, users: Sequence[str] | None) -> str:
    """Return the gpushare command that starts a daemon; ``users`` as in `DaemonRecord`."""
    options = limits.options()
    if exclusive:
        options.append("--exclusive")
    if users is not None:
        options += ["--users", ",".join(users) or "all"]
    return shlex.join(["gpushare", "mps", "start", "-g", selector, *options])


def home_of(run_directory: Path, uuid: str) -> DaemonHome:
    return DaemonHome(run_directory / "mps" / device_key(uuid))


def own_home(host: Host, uuid: str) -> DaemonHome:
    return home_of(host.run_directory, uuid)


def homes_in(run_directories: Sequence[Path]) -> list[DaemonHome]:
    """Return the homes that have a record, in these run directories."""
    return [DaemonHome(path.parent) for path in _paths_in_homes(run_directories, _RECORD)]


def has_unrecorded_daemon(run_directories: Sequence[Path]) -> bool:
    """Return whether a home there has a daemon's socket but no record."""
    return any(not (path.parent.parent / _RECORD).exists() for path in _paths_in_homes(run_directories, "pipe/control"))


def _paths_in_homes(run_directories: Sequence[Path], name: str) -> Iterator[Path]:
    """Yield the files of this name in all homes of these run directories that only their owner can write."""
    for directory in run_directories:
        if is_trusted_directory(directory, "mps"):
            yield from sorted((directory / "mps").glob(f"*/{name}"))


_ENTER: Final = 0o5
OPEN_MODE: Final = 0o755
_CLOSED_MODE: Final = 0o700


def pipe_users(directory: Path) -> tuple[str, ...] | None:
    """Return the users who may enter a pipe directory (the owner, if no other may); empty: all; None: it does not exist."""
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & stat.S_IXOTH:
            return ()
        users = tuple(sorted(map(user_name, listed_users(directory, 0o1))))
        # Without a list only the owner may.
        return users or (user_name(directory.stat().st_uid),)
    except OSError:
        return None


def set_pipe_users(directory: Path, users: Sequence[str]) -> None:
    """Let only these users, the owner and root enter a pipe directory; with no users, let all users enter.

    Raises:
        NotFound: no such user, or no such directory.
        NoPermission: the directory is not ours.
        NotSupported: its file system has no access control lists.
    """
    ids = sorted({user_id(user) for user in users})
    try:
        # Closed first, then without an old list, and only then with the new one: nobody else is let in meanwhile.
        mode = _CLOSED_MODE if ids else OPEN_MODE
        os.chmod(directory, mode)
        set_listed_users(directory, _CLOSED_MODE, (), _ENTER)
        # While there was a list, the group bits were its mask.
        os.chmod(directory, mode)
        set_listed_users(directory, _CLOSED_MODE, ids, _ENTER)
    except OSError as error:
        raise change_refused_error(
            str(directory),
            error,
            NoDaemon(f"there is no {directory}", "see the daemons: gpushare mps status"),
            "drop 'users', or set GPUSHARE_RUN_DIR to a file system that has them (tmpfs, ext4, xfs)",
        ) from None
    if pipe_users(directory) != tuple(sorted(map(user_name, ids))):
        raise NotHeld(
            f"{directory} was changed, but others still have access", f"see: getfacl {shlex.quote(str(directory))}"
        )


# RuntimeDirectory= of the units.
UNIT_RUNTIME: Final = "gpushare-mps"
UNIT_PIPES: Final = f"/run/{UNIT_RUNTIME}"
# Next to its pipe directory: the memory limit that the unit gave its daemon (3840M), or - for none.
LIMIT_FILE: Final = "memory-limit"


def pipe_directory(uuid: str) -> str:
    """Return the pipe directory of the daemon that systemd starts for a device (`export systemd`): it is known by this."""
    return f"{UNIT_PIPES}/{device_key(uuid)}/pipe"


def unit_name(uuid: str) -> str:
    return f"gpushare-mps-{device_key(uuid)}.service"


def unit_at(pipe_directory: str) -> str:
    """Return the name of the systemd unit whose daemon listens at this `pipe_directory`."""
    return f"gpushare-mps-{Path(pipe_directory).parent.name}.service"


def client_environment(base: Mapping[str, str], device: Device, home: DaemonHome, limits: Limits) -> dict[str, str]:
    """Return the environment of a client: the device by UUID, the private pipe directory, its limits."""
    return {
        **base,
        "CUDA_VISIBLE_DEVICES": device.uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(home.pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(home.log),
        **limits.environment(),
    }


def without_own_limits(base: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in base.items() if name not in VARIABLES}
