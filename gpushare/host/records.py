"""gpushare's own small files: opened without following links, replaced atomically, locked, and cleared after a crash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from gpushare.base.errors import GpushareError, InUse, NoPermission, OperationFailed
from gpushare.host.host import Host, UserDirectory

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# No link is followed, no FIFO waited for.
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NONBLOCK
# Where claims are, if root made it for all: the first that is so. Opened as a stranger's directory.
SHARED_DIRECTORIES: Final = (Path("/run/lock"), Path("/tmp"))  # noqa: S108
# The largest of them, a journal of 16 GPUs, has some hundred thousand bytes.
_MOST_BYTES: Final = 4 << 20
_USUAL_BYTES: Final = 16 << 10
_LOCK_POLL_SECONDS: Final = 0.05
# Of a lock that is held for a moment only.
_SHORT_POLL_SECONDS: Final = 0.02
# The directories of records (`store.RecordStore`), but for those in "mps".
_RUN: Final = ("jobs", "keep", "lent", "made", "mig", "mode", "on-demand", "pause", "slices", "swap")
_STATE: Final = ("benched", "names", "past", "peaks", "tried", "tuned")
# Where old files are removed.
_AGED: Final = ("/tmp/", "/var/tmp/")  # noqa: S108 - opened as a stranger's directory


def read_own(
    path: Path | str, *, directory: int | None = None, owners: frozenset[int] | None = None, most: int = _MOST_BYTES
) -> bytes:
    """Return the bytes of a small file that root or this user wrote, or of a record that one of ``owners`` wrote.

    ``directory`` is the open directory of the file. A record may have one name only: anybody may make a second one, a link.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, writable for others, longer than ``most`` bytes, or a record with
            several names (hard links); the message says which.
    """
    descriptor = _open_refusing_links(path if directory is None else os.path.basename(path), directory)
    with open(descriptor, "rb") as file:
        stated = os.fstat(descriptor)
        _check_trusted(stated, owners)
        if owners is not None and stated.st_nlink > 1:
            raise ValueError("it has several names (hard links)")
        # Room for the largest file takes longer to get than a usual one to read.
        text = file.read(_USUAL_BYTES)
        if len(text) == _USUAL_BYTES:
            text += file.read(most + 1 - _USUAL_BYTES)
        if len(text) > most:
            raise ValueError(f"it is longer than {most} bytes")
        return text


@contextlib.contextmanager
def opened_below(directory: int, below: str, owners: frozenset[int]) -> Iterator[int]:
    """Open a directory below an open one, name by name, and yield its descriptor.

    Raises:
        OSError: a directory on the way is missing, a link, not of one of the owners, or open to others.
    """
    with contextlib.ExitStack() as opened:
        for name in filter(None, below.split("/")):
            directory = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            opened.callback(os.close, directory)
            stated = os.fstat(directory)
            if stated.st_uid not in owners or stated.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "it belongs to another user, or others may write it", name)
        yield directory


@contextlib.contextmanager
def opened_user_directory(user: UserDirectory, below: str) -> Iterator[int]:
    """Open a directory below the run directory of a user; its parents must belong to the same user or root.

    Raises:
        OSError: it does not exist, is a link, belongs to another user, or is open to others.
    """
    above = os.open(user.path.parent, DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(above).st_uid not in {0, user.owner}:
            raise PermissionError(str(user.path.parent))
        with opened_below(above, f"{user.path.name}/{below}", frozenset({user.owner})) as descriptor:
            yield descriptor
    finally:
        os.close(above)


def has_records(host: Host, directory: str) -> bool:
    """Return whether there may be a record in this ``directory`` of a run directory: this user's, root's, or to root anyone's.

    Only names are read, so that what reads the records need not be loaded.
    """
    if any(_has_name(run_directory / directory, ending=".json") for run_directory in host.run_directories):
        return True
    for user in host.user_directories():
        with contextlib.suppress(OSError), opened_user_directory(user, directory) as inside:
            if _has_name(inside, ending=".json"):
                return True
    return False


def has_claims(host: Host, prefix: str) -> bool:
    """Return whether there are claims with a prefix in a directory that `claims.claim_directory` may choose.

    Only names are read, so that what reads the claims need not be loaded.
    """
    shared = () if host.is_simulated else SHARED_DIRECTORIES
    return any(_has_name(directory, prefix) for directory in (host.run_directory / "claims", *shared))


def _has_name(directory: Path | int, prefix: str = "", *, ending: str = "") -> bool:
    """Return whether a directory, by path or descriptor, has a name like this; one that cannot be read has none."""
    try:
        return any(name.startswith(prefix) and name.endswith(ending) for name in os.listdir(directory))
    except OSError:
        return False


def read_tail(path: Path, most: int) -> str:
    """Return the end of a log that only this user or root can have written; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_tail_or_raise(path, most)
    return ""


def read_tail_or_raise(path: Path, most: int) -> str:
    """Return the end of a log as `read_tail` does, but raise if it cannot be read. No link is followed, no FIFO waited for.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, or writable for others; the message says which.
    """
    with open(_open_refusing_links(path), "rb") as file:
        stated = os.fstat(file.fileno())
        # A daemon creates its logs with its user's umask, which may be 002 if each user has a private group.
        _check_trusted(stated, forbidden=0o002 if stated.st_gid == stated.st_uid else 0o022)
        file.seek(max(0, stated.st_size - most))
        return file.read(most).decode(errors="replace")


def open_own(path: Path) -> int:
    """Open a file in a directory of this user for reading; neither may be a link, another user's, or writable for others.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, or writable for others; the message says which.
    """
    owners = frozenset({os.geteuid()})
    above = os.open(path.parent.parent, DIRECTORY)
    try:
        with opened_below(above, path.parent.name, owners) as directory:
            descriptor = _open_refusing_links(path.name, directory)
    finally:
        os.close(above)
    try:
        _check_trusted(os.fstat(descriptor), owners)
    except ValueError:
        os.close(descriptor)
        raise
    return descriptor


def _open_refusing_links(path: Path | str, directory: int | None = None) -> int:
    """Open a file that is no link for reading. Raises OSError; ValueError: it is a symbolic link."""
    try:
        return os.open(path, os.O_RDONLY | _SAFE, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link") from None
        raise


def _check_trusted(status: os.stat_result, owners: frozenset[int] | None = None, forbidden: int = 0o022) -> None:
    """Raise ValueError unless an open file is a regular one of its owners (None: root, this user); the message says why.

    ``forbidden`` are the bits of its mode by which others may write it.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_uid not in (owners or {os.geteuid(), 0}):
        raise ValueError(f"it belongs to user {status.st_uid}")
    if status.st_mode & forbidden:
        raise ValueError(f"others may write it (mode {stat.S_IMODE(status.st_mode):o})")


@contextlib.contextmanager
def writing(path: Path, purpose: str, *, code: str = "file_unwritable") -> Iterator[None]:
    """Turn an OSError into an error about our file; ``purpose`` says what it is for.

    Raises:
        NoPermission: this user may not write there.
        OperationFailed: something is in the way, or the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise unwritable_error(path, purpose, error, code=code) from error


def unwritable_error(path: Path, purpose: str, error: OSError, *, code: str = "file_unwritable") -> GpushareError:
    message = f"{path}, {purpose}, cannot be written: {error.strerror or error}"
    words = ["ls", "-ld", str(path.parent), str(path)]
    if error.errno in _FORBIDDEN:
        hint = f"run as its owner, or as root: sudo gpushare ...; see whose it is: {shlex.join(words)}"
        return NoPermission(message, hint, code=code)
    parent = shlex.quote(str(path.parent))
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        hint = "too many files are open; raise the limit: ulimit -n 4096"
        return OperationFailed(message, hint, code=code)
    hint = f"make room, or remove what is in the way: df -h {parent}; ls -l {parent}"
    return OperationFailed(message, hint, code=code)


@contextlib.contextmanager
def directory_locked(
    directory: Path, purpose: str, *, on_wait: Callable[[float], None] | None = None
) -> Iterator[None]:
    """Hold the lock of a directory of records, which is created, one gpushare of this user after the other.

    ``purpose`` says in messages what the lock is for. ``on_wait`` is called again and again, with the seconds so far, while
    another gpushare has the lock; it may raise.

    Raises:
        NoPermission, OperationFailed: as `make_private_directory` and `writing`.
    """
    from gpushare.host.host import make_private_directory

    # One by one, because only the last directory of a path is checked.
    make_private_directory(directory.parent)
    make_private_directory(directory)
    path = directory / "lock"
    descriptor = open_lock(path, purpose)
    try:
        if on_wait is None:
            with writing(path, purpose):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            began = time.monotonic()
            while not try_lock(descriptor):
                on_wait(time.monotonic() - began)
                time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, unless another holds it; return whether it is locked now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, path: Path, seconds: float, holds: str) -> None:
    """Lock an open file, within some seconds.

    ``holds`` says in the message what another gpushare has been doing all the time: ``been changing MIG``.

    Raises:
        InUse: another one holds it for longer (code ``locked``).
    """
    deadline = time.monotonic() + seconds
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise InUse(
                f"another gpushare has {holds} for {seconds:g} s",
                f"see which: fuser -v {shlex.quote(str(path))}",
                code="locked",
            )
        time.sleep(_SHORT_POLL_SECONDS)


def open_lock(path: Path, purpose: str, *, code: str = "file_unwritable") -> int:
    """Return the descriptor of a lock file, created if it does not exist; it is not locked yet.

    Only its owner and root can open it, because anybody who can read a file can lock it.

    Raises:
        NoPermission, OperationFailed: as `writing`.
    """
    with writing(path, purpose, code=code):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
        try:
            stated = os.fstat(descriptor)
            _check_trusted(stated, forbidden=0)
            mode = kept_mode(path, 0o600)
            if stat.S_IMODE(stated.st_mode) != mode and stated.st_uid == os.geteuid():
                os.fchmod(descriptor, mode)
        except ValueError as error:
            os.close(descriptor)
            raise OperationFailed(
                f"{path}, {purpose}, cannot be used: {error}",
                f"remove what is in the way: ls -l {shlex.quote(str(path))}",
                code=code,
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def kept_mode(path: Path, mode: int) -> int:
    """Return the mode for a file of gpushare; in /tmp with the sticky bit, so that systemd-tmpfiles does not remove it.

    systemd-tmpfiles removes files that were not touched for 10 or 30 days, except files with that bit (XDG Base Directory
    Specification, XDG_RUNTIME_DIR). On Linux the bit has no other meaning for a file.
    """
    return mode | stat.S_ISVTX if str(path).startswith(_AGED) else mode


def replace_file(path: Path, text: str, *, durable: bool = False, mode: int = 0o644) -> None:
    """Replace a file atomically: a reader sees the old or the new one. All users may read it, unless ``mode`` differs.

    ``durable``: it is on the disk when this returns and survives a crash of the machine. Also removes the temporary files
    that an earlier crash left.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    clear_leftovers(path.parent, path.stem)
    descriptor, temporary = _new_temporary(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.fchmod(descriptor, kept_mode(path, mode))
            # While it is open and therefore locked.
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def _new_temporary(path: Path) -> tuple[int, str]:
    """Return the descriptor and the path of a new file next to ``path``, locked so that it is not removed as a leftover."""
    # Imported here: commands that only read do not need it.
    import tempfile

    while True:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Until it was locked, `clear_leftovers` of another process could lock and remove it: then try again.
            if os.path.samestat(os.fstat(descriptor), os.lstat(temporary)):
                return descriptor, temporary
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            os.close(descriptor)
            raise
        os.close(descriptor)


def clear_leftovers(directory: Path, stem: str | None = None) -> None:
    """Remove the temporary files that a crash during `replace_file` left: of the file with this stem, or of all.

    Only unlocked files of this user.
    """
    pattern = re.compile(rf"\.{'[^/]+' if stem is None else re.escape(stem)}-[a-z0-9_]{{8}}", re.ASCII)
    try:
        names = [name for name in os.listdir(directory) if name.startswith(".") and pattern.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            descriptor = os.open(directory / name, os.O_RDONLY | _SAFE)
            try:
                stated = os.fstat(descriptor)
                if stat.S_ISREG(stated.st_mode) and stated.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(directory / name)
            finally:
                os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Write a directory to the disk: otherwise a file created or replaced in it can be lost in a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_leftovers(host: Host) -> None:
    """Remove leftovers of journals, names and records; every changing command does, even if it has nothing to change.

    Needs no lock: files being written are locked. Only directories that no other user can create or redirect are swept.
    """
    # Not all of the state and run directories: the user may have named them, and they may have files of others.
    if _is_private(host.state_directory):
        clear_leftovers(host.state_directory, "applied")
    directories = [host.state_directory / name for name in _STATE] + [host.run_directory / name for name in _RUN]
    daemons = host.run_directory / "mps"
    with contextlib.suppress(OSError):
        directories += daemons.iterdir() if _is_private(host.run_directory) and _is_private(daemons) else ()
    for directory in directories:
        if _is_private(directory.parent) and _is_private(directory):
            clear_leftovers(directory)


def _is_private(directory: Path) -> bool:
    """Return whether this is a directory, not a link, that only this user or root may write."""
    try:
        stated = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(stated.st_mode) and stated.st_uid in {0, os.geteuid()} and not stated.st_mode & 0o022
