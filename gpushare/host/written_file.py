"""Files that gpushare writes where a user wants them: not through links, and not over files, of somebody else.

Root writes into directories of others, and into /tmp: a new file, or one of this user, and never what a link there names.
What the user himself redirects (``> FILE``) is the shell's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def directory_of(path: Path) -> Iterator[int]:
    """Yield the descriptor of a directory, so that all files go into the same one; it is made if there is none.

    Raises:
        OSError: it cannot be made or opened, or another user chose by a link where it is.
    """
    check_links(path)
    path.mkdir(parents=True, exist_ok=True)
    check_links(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def create_file(path: str | Path, data: bytes, *, directory: int | None = None, mode: int = 0o666) -> None:
    """Write a new file, in an open directory if one is given; what cannot be written whole is removed again.

    Raises:
        FileExistsError: something of this name is there, also a link that leads nowhere.
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, mode, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path, dir_fd=directory)
        raise


def open_over(path: Path) -> int:
    """Return the descriptor of an empty file, to be read and written: a new one, or this user's own, cut to nothing.

    Raises:
        OSError: it cannot be opened, or is no file of this user alone: a link, a FIFO, another user's.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)
    except FileExistsError:
        pass
    try:
        descriptor = os.open(path, os.O_RDWR | _SAFE)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise _in_the_way(path, "a symbolic link" if error.errno == errno.ELOOP else "not a regular file") from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _in_the_way(path, "not a regular file")
        if found.st_uid != os.geteuid():
            raise _in_the_way(path, f"a file of user {found.st_uid}")
        if found.st_nlink > 1:
            raise _in_the_way(path, "a file with further names")
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_public(path: Path) -> bool:
    """Return whether everybody may put files beside it, as in /tmp; root also counts what another user owns."""
    try:
        parent = os.stat(path.parent)
    except OSError:
        return False
    others = parent.st_mode & stat.S_IWOTH != 0
    return others or (os.geteuid() == 0 and parent.st_uid != 0)


def check_links(path: Path) -> None:
    """Raise where a link that a stranger made in a directory for everybody decides where a path leads."""
    for part in (path, *path.parents):
        try:
            found = os.lstat(part)
        except OSError:
            continue
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in {os.geteuid(), 0} and _is_public(part):
            raise _in_the_way(part, f"a symbolic link of user {found.st_uid}")


def _in_the_way(path: Path, what: str) -> OSError:
    return FileExistsError(errno.EEXIST, f"it is {what}", str(path))
