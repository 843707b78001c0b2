"""Who runs in which MIG instance by `gpushare run --mig`: one lock file per MIG UUID.

Where: an instance is everybody's (its capability nodes are 0444 by default), so root and all users must meet at the
same file. `/run/lock`, or `/tmp` where only root may write the former (Fedora, RHEL): which of them is seen from its
owner and mode alone, so that everybody chooses the same. Both are sticky: nobody removes another's file. A service with
PrivateTmp= or a container with a /tmp of its own does not see the others' leases; there only NVML's processes tell.
A simulated host has its own directory.

How: an open file description lock (F_OFD_SETLK). Like flock(2) it is inherited, so the guard holds it on when gpushare
is killed, and unlike flock(2) it can be looked at without being taken: a look at the wrong moment would make a run
believe that the instance is held. The lock is the truth; the text in the file only names the holder. Files are never
removed: so no two can hold one instance by two files of the same name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.errors import NoPermission, OperationFailed
from gpushare.host.host import make_private_directory
from gpushare.host.kept_file import unwritable
from gpushare.model import Holder

if TYPE_CHECKING:
    from gpushare.host.host import Host

SHARED_DIRECTORIES: Final = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 - opened as a stranger's directory
_FILE: Final = re.compile(r"gpushare-(MIG-[\w.-]+)\.lease", re.ASCII)
# struct flock of a 64-bit Linux, the only one that has the driver: type, whence, start, length, PID.
_LOCK: Final = "@hhqqi4x"
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# A cleaner of /tmp may remove the file while it is being locked; not for ever.
_TRIES: Final = 20


@dataclass(frozen=True)
class MigLease:
    """One instance that is taken; its descriptor may be inherited."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Give the instance back, whoever else holds the descriptor."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            _lock(self.descriptor, fcntl.F_UNLCK)
        self.leave()

    def leave(self) -> None:
        """Close the descriptor: a process that inherited it holds the instance on."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    def held(self) -> bool:
        """Return whether it is held by this descriptor; one that was given back is taken again if it is free."""
        return _lock(self.descriptor, fcntl.F_WRLCK)

    def sign(self) -> None:
        """Write this process down as the holder."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{os.getpid()}\n".encode(), 0)


def lease_directory(host: Host) -> Path:
    """Return where the leases of a host lie: the same for all its users."""
    own = host.run_directory / "mig" / "leases"
    if host.is_simulated:
        return own
    return next((path for path in SHARED_DIRECTORIES if _is_shared(path)), own)


def take_lease(host: Host, mig_uuid: str) -> MigLease | None:
    """Take an instance for this process and those that inherit the descriptor; None: somebody has it. Never waits.

    Raises:
        NoPermission: the lock file cannot be opened.
        OperationFailed: something else lies in its place.
    """
    directory = lease_directory(host)
    if directory.is_relative_to(host.run_directory):
        make_private_directory(directory)
    path = directory / f"gpushare-{mig_uuid.replace('/', '_')}.lease"
    for _ in range(_TRIES):
        descriptor = _open(path)
        if not _lock(descriptor, fcntl.F_WRLCK):
            os.close(descriptor)
            return None
        if _is_at(descriptor, path):
            lease = MigLease(path, descriptor)
            lease.sign()
            return lease
        os.close(descriptor)
    raise OperationFailed(
        f"{path} is removed again and again", f"see who does: ls -l {shlex.quote(str(path))}", code="lease_unusable"
    )


def live_leases(host: Host) -> dict[str, Holder]:
    """Return who holds which instance now, by MIG UUID. PID 0: it was taken this very moment, by nobody knows whom."""
    found: dict[str, Holder] = {}
    try:
        names = sorted(os.listdir(directory := lease_directory(host)))
    except OSError:
        return found
    for name in names:
        match = _FILE.fullmatch(name)
        pid = None if match is None else _holder(directory / name)
        if match is not None and pid is not None:
            info = host.processes.describe(pid) if pid else None
            user, called = (None, None) if info is None else (info.user, info.name)
            found[match[1]] = Holder(pid=pid, what="lease", user=user, name=called)
    return found


def _is_shared(path: Path) -> bool:
    """Return whether everybody may put files there, and only root and their owners may remove them."""
    try:
        seen = os.lstat(path)
    except OSError:
        return False
    mode = stat.S_ISVTX | stat.S_IWOTH | stat.S_IXOTH
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == 0 and seen.st_mode & mode == mode


def _open(path: Path) -> int:
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                # Without O_CREAT: on another's file in a sticky directory that is refused (fs.protected_regular).
                return _checked(os.open(path, os.O_RDWR | _SAFE), path)
            with contextlib.suppress(FileExistsError):
                _create(path)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise _in_the_way(path) from None
        if error.errno not in {errno.EACCES, errno.EPERM}:
            raise unwritable(path, "the lease of an instance", error, code="lease_unusable") from error
        raise NoPermission(
            f"cannot open the lock file {path}: {error.strerror}",
            f"let its owner or root remove it while nobody runs: sudo rm {shlex.quote(str(path))}",
            code="lease_unusable",
        ) from None
    raise OperationFailed(
        f"{path} comes and goes", f"see who does: ls -l {shlex.quote(str(path))}", code="lease_unusable"
    )


def _create(path: Path) -> None:
    """Make a lock file that all users may open, whatever the umask; it is there only when it is so."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".gpushare-")
    try:
        os.fchmod(descriptor, 0o666)
        os.link(temporary, path)
    finally:
        os.close(descriptor)
        os.unlink(temporary)


def _checked(descriptor: int, path: Path) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _in_the_way(path)


def _in_the_way(path: Path) -> OperationFailed:
    return OperationFailed(
        f"{path} should be a lock file, and is something else",
        f"remove it: sudo rm -r {shlex.quote(str(path))}",
        code="lease_unusable",
    )


def _holder(path: Path) -> int | None:
    """Return the PID of who holds a lock file, 0 when that is not written, None when nobody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_RDLCK))
        if struct.unpack(_LOCK, answer)[0] == fcntl.F_UNLCK:
            return None
        # Anybody may write into the file.
        match = re.match(rb"(\d{1,10})\n", os.pread(descriptor, 32, 0))
        return int(match[1]) if match else 0
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(kind))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _request(kind: int) -> bytes:
    return struct.pack(_LOCK, kind, 0, 0, 0, 0)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
