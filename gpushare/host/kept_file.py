"""The small files that gpushare keeps: whose word counts in them, how they are replaced as a whole, and locked."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gpushare.errors import GpushareError, NoPermission, OperationFailed

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def read_trusted(path: Path) -> Any:
    """Return the JSON of a file that this user or root wrote; None: there is none, or it cannot be understood."""
    try:
        return read_understood(path)
    except (OSError, ValueError):
        return None


def read_understood(path: Path) -> Any:
    """Return the JSON of a file that this user or root wrote, for who must not take a broken one for none.

    Others' word is not taken: these files say which process gets a signal, and where a program runs.

    Raises:
        OSError: there is none (FileNotFoundError), or it cannot be read.
        ValueError: it is another user's, or no JSON; the message says which.
    """
    with open(path, encoding="utf-8") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in {os.geteuid(), 0}:
            raise ValueError(f"it belongs to user {owner}")
        try:
            text = file.read()
            return json.loads(text)
        except (ValueError, RecursionError):
            # UnicodeDecodeError is a ValueError, too.
            why = "it is no JSON" if os.fstat(file.fileno()).st_size else "it is empty"
            raise ValueError(why) from None


@contextlib.contextmanager
def writing(path: Path, what: str, *, code: str = "file_unwritable") -> Iterator[None]:
    """Say in words what the system says when a file of ours cannot be written; ``what`` tells what it is for.

    Raises:
        NoPermission: this user may not write there.
        OperationFailed: something is in the way, or there is no room.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, what, error, code=code) from error


def unwritable(path: Path, what: str, error: OSError, *, code: str = "file_unwritable") -> GpushareError:
    """Return the error for a file of ours that cannot be written."""
    message = f"{path}, {what}, cannot be written: {error.strerror or error}"
    if error.errno in _FORBIDDEN:
        hint = f"run as its owner, or as root: sudo gpushare ...; see whose it is: ls -ld {path.parent} {path}"
        return NoPermission(message, hint, code=code)
    hint = f"make room, or remove what is in the way: df -h {path.parent}; ls -l {path.parent}"
    return OperationFailed(message, hint, code=code)


def open_lock(path: Path, what: str, *, mode: int = 0o644, code: str = "file_unwritable") -> int:
    """Return the descriptor of a lock file, made if there is none; nothing is locked yet.

    Raises:
        NoPermission, OperationFailed: as `writing`.
    """
    with writing(path, what, code=code):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file that everybody may read, in one step: a reader sees the old one or the new one.

    ``durable``: it is on the disk when this returns, and outlives a crash of the machine.

    Raises:
        OSError: it cannot be written; the old one stands.
    """
    # Not at the top: whoever only looks does not pay for it.
    import tempfile

    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring a directory's names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
