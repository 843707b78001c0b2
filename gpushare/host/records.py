"""Small state files: owner check, typed JSON, atomic replace, lock, and what a crash left of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpushare.errors import GpushareError, NoPermission, OperationFailed

if TYPE_CHECKING:
    from gpushare.host.host import Host

T = TypeVar("T")

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# No link is followed, no FIFO waited for.
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# The largest of them, a journal of 16 GPUs, has some hundred thousand bytes.
_MOST_BYTES: Final = 4 << 20
_USUAL_BYTES: Final = 16 << 10
# `cgroups.PREFIX`; that file is loaded only where there is one.
_JOB_CGROUP: Final = "gpushare-job-"
_LOCK_POLL_SECONDS: Final = 0.05
# Where old files are removed.
_AGED: Final = ("/tmp/", "/var/tmp/")  # noqa: S108 - opened as a stranger's directory


def read_trusted(path: Path) -> Any:
    """Return the JSON of a file that this user or root wrote; None: it does not exist or is broken."""
    try:
        return read_understood(path)
    except (OSError, ValueError):
        return None


def read_understood(path: Path) -> Any:
    """Like `read_trusted`, but raises for a broken file.

    Files of other users do not count: these files decide which process gets a signal, and where a program runs. A link,
    FIFO or device in place of the file is never followed or waited for.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, too large, or not JSON; the message says which.
    """
    return json_of(read_bounded(path))


def json_of(text: bytes) -> Any:
    """Return the JSON of a record; raises ValueError if it is none."""
    try:
        return json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError):
        # UnicodeDecodeError is a ValueError, too.
        raise ValueError("it is not JSON" if text else "it is empty") from None


# Checks by type of field. JSON may write a float without a decimal point.
_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
}


def record_from(kind: type[T], raw: Any) -> T | None:
    """Return the dataclass from parsed JSON; None: a field is missing or has another type.

    Fields have the types in `_FITS`, or unions of them. Unknown keys, of a newer gpushare, are left out.
    """
    if not isinstance(raw, dict):
        return None
    found: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in raw:
            if field.default is MISSING and field.default_factory is MISSING:
                return None
            continue
        value = raw[field.name]
        if not any(_FITS[one](value) for one in field.type.split(" | ")):
            return None
        found[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**found)


def is_shown(text: str | None) -> bool:
    """Return whether a name or UUID of a record that others may have written can be shown: short, plain, or none."""
    return text is None or (len(text) <= 64 and re.fullmatch(r"\w[\w.-]*", text, re.ASCII) is not None)


def is_time(seconds: float) -> bool:
    """Return whether a number of a record can be a time in seconds since 1970."""
    return 0 <= seconds < 1 << 36


def _whole(text: str) -> int:
    """Return a whole number of at most 64 bits; we never write a longer one."""
    if len(text) > 20:
        raise ValueError(text[:20])
    return int(text)


def read_bounded(path: Path) -> bytes:
    """Return the bytes of a small regular file that this user or root wrote.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, writable for others, or longer than 4 MiB; the message says which.
    """
    return _checked_bytes(_opened(path))


def _checked_bytes(descriptor: int, owner: int | None = None) -> bytes:
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        why = _distrusted(found, owner) or _open_to_others(found, 0o022)
        if why is not None:
            raise ValueError(why)
        # Room for the largest record takes longer to get than a usual one to read.
        text = file.read(_USUAL_BYTES)
        if len(text) == _USUAL_BYTES:
            text += file.read(_MOST_BYTES + 1 - _USUAL_BYTES)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES} bytes")
        return text


def read_own(path: str, *, directory: int, owner: int | None = None) -> bytes:
    """Return the bytes of a file in an open directory that root or this user wrote, or with ``owner`` that user alone.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, writable for others, or too long; the message says which.
    """
    try:
        descriptor = os.open(os.path.basename(path), os.O_RDONLY | _SAFE, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link") from None
        raise
    return _checked_bytes(descriptor, owner)


def read_tail(path: Path, most: int) -> str:
    """Return the end of a log that only this user or root can have written; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return understood_tail(path, most)
    return ""


def understood_tail(path: Path, most: int) -> str:
    """Like `read_tail`, but raises. A link, FIFO or device in its place is never followed or waited for.

    Raises:
        OSError: it does not exist (FileNotFoundError), or cannot be read.
        ValueError: not a regular file, another user's, or writable for others; the message says which.
    """
    with open(_opened(path), "rb") as file:
        found = os.fstat(file.fileno())
        # A daemon creates its logs with its user's umask, which may be 002 if each user has a private group.
        forbidden = 0o002 if found.st_gid == found.st_uid else 0o022
        why = _distrusted(found) or _open_to_others(found, forbidden)
        if why is not None:
            raise ValueError(why)
        file.seek(max(0, found.st_size - most))
        return file.read(most).decode(errors="replace")


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | _SAFE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link") from None
        raise


def _open_to_others(found: os.stat_result, forbidden: int) -> str | None:
    return f"others may write it (mode {stat.S_IMODE(found.st_mode):o})" if found.st_mode & forbidden else None


def _distrusted(found: os.stat_result, owner: int | None = None) -> str | None:
    """Return why an open file cannot be one of ours, or with ``owner`` of that user, or None."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    owners = {os.geteuid(), 0} if owner is None else {owner}
    return None if found.st_uid in owners else f"it belongs to user {found.st_uid}"


@contextlib.contextmanager
def writing(path: Path, what: str, *, code: str = "file_unwritable") -> Iterator[None]:
    """Turn an OSError into an error about our file; ``what`` is its purpose.

    Raises:
        NoPermission: this user may not write there.
        OperationFailed: something is in the way, or the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, what, error, code=code) from error


def unwritable(path: Path, what: str, error: OSError, *, code: str = "file_unwritable") -> GpushareError:
    """Return the error for a file of ours that cannot be written."""
    message = f"{path}, {what}, cannot be written: {error.strerror or error}"
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
def directory_locked(directory: Path, what: str, *, waits: Callable[[float], None] | None = None) -> Iterator[None]:
    """Hold the lock of a directory of records, which is created, one gpushare of this user after the other.

    ``waits`` is called with the seconds so far while another one has it, and may raise.

    Raises:
        NoPermission, OperationFailed: as `make_private_directory` and `writing`.
    """
    # One by one: the mode applies to the last directory of a path only.
    from gpushare.host.host import make_private_directory

    make_private_directory(directory.parent)
    make_private_directory(directory)
    path = directory / "lock"
    descriptor = open_lock(path, what)
    try:
        began = time.monotonic()
        while waits is not None and not _flocked(descriptor):
            waits(time.monotonic() - began)
            time.sleep(_LOCK_POLL_SECONDS)
        with writing(path, what):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _flocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_lock(path: Path, what: str, *, code: str = "file_unwritable") -> int:
    """Return the descriptor of a lock file, created if it does not exist; it is not locked yet.

    Only its owner and root can open it, because anybody who can read a file can lock it. One that an older gpushare
    created for everybody is closed to others.

    Raises:
        NoPermission, OperationFailed: as `writing`.
    """
    with writing(path, what, code=code):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
        try:
            found = os.fstat(descriptor)
            why = _distrusted(found)
            if why is not None:
                raise OperationFailed(
                    f"{path}, {what}, cannot be used: {why}",
                    f"remove what is in the way: ls -l {shlex.quote(str(path))}",
                    code=code,
                )
            mode = kept_mode(path, 0o600)
            if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
                os.fchmod(descriptor, mode)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def kept_mode(path: Path, mode: int) -> int:
    """Return the mode of a file of ours; in /tmp with the sticky bit, so that systemd-tmpfiles never takes it for old.

    It removes what nobody has touched for 10 or 30 days, and leaves files with that bit alone (XDG Base Directory
    Specification, XDG_RUNTIME_DIR). On Linux the bit has no other meaning for a file.
    """
    return mode | stat.S_ISVTX if str(path).startswith(_AGED) else mode


def replace_file(path: Path, text: str, *, durable: bool = False, mode: int = 0o644) -> None:
    """Replace a file atomically: a reader sees the old or the new one. Everybody may read it, unless ``mode`` differs.

    ``durable``: it is on the disk when this returns and survives a crash of the machine. Also removes what an earlier
    crash left of such a step.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    clear_leftovers(path.parent, path.stem)
    descriptor, temporary = _temporary(path)
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


def _temporary(path: Path) -> tuple[int, str]:
    """Return a new file next to ``path``, locked so that nobody takes it for a leftover."""
    # Imported here: commands that only read do not need it.
    import tempfile

    while True:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.lstat(temporary)):
                return descriptor, temporary
        except (BlockingIOError, FileNotFoundError):
            # `clear_leftovers` of another process removed it in between.
            pass
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            os.close(descriptor)
            raise
        os.close(descriptor)


def clear_leftovers(directory: Path, stem: str = "[^/]+") -> None:
    """Remove the temporary files that a crash during `replace_file` left; ``stem`` is a pattern.

    Only unlocked files of this user.
    """
    pattern = re.compile(rf"\.{stem if stem == '[^/]+' else re.escape(stem)}-[a-z0-9_]{{8}}", re.ASCII)
    try:
        names = [name for name in os.listdir(directory) if name.startswith(".") and pattern.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            descriptor = os.open(directory / name, os.O_RDONLY | _SAFE)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(directory / name)
            finally:
                os.close(descriptor)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_leftovers(host: Host) -> None:
    """Remove leftovers of journals, names and records; every changing command does, even if it has nothing to change.

    Needs no lock: files being written are locked. Only in directories that nobody else can plant or redirect. As root, it
    removes the empty cgroups of gpushares that were killed, too.
    """
    sweep_cgroups(host)
    # Only our own: the user may have named this directory, and it may have files of others.
    if _is_private(host.state_directory):
        for stem in ("mig-names", "applied"):
            clear_leftovers(host.state_directory, stem)
        if _is_private(host.state_directory / "peaks"):
            clear_leftovers(host.state_directory / "peaks")
    homes = host.run_directory / "mps"
    if not _is_private(host.run_directory):
        return
    rooms = (host.run_directory / name for name in ("mig", "timeslice", "jobs", "pause", "group", "slices", "swap"))
    for directory in (*rooms, *_below(homes)):
        if _is_private(directory):
            clear_leftovers(directory)


def sweep_cgroups(host: Host) -> None:
    """Remove the empty cgroups of jobs whose gpushare is gone; the names tell whether there are any of ours."""
    try:
        names = os.listdir(host.cgroup_root) if host.uid == 0 else []
    except OSError:
        return
    if any(name.startswith(_JOB_CGROUP) for name in names):
        from gpushare.host.cgroups import sweep

        sweep(host.open_cgroups(), host.nvml)


def _below(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir()) if _is_private(directory) else []
    except OSError:
        return []


def _is_private(directory: Path) -> bool:
    """Return whether this is a directory, not a link, that only this user or root may write."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in {0, os.geteuid()} and not found.st_mode & 0o022
