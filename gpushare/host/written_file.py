"""Write files where a user wants them, but not through links or over files of other users.

Root may write into directories of others and into /tmp: a new file, or one of this user, and never through a link there.
Redirection (``> FILE``) is up to the shell.
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
# Works for a directory with x but not r permission.
_STEP: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The kernel's limit.
_MOST_LINKS: Final = 40


@contextlib.contextmanager
def opened_directory(path: Path, *, make: bool = True, strangers: bool = False) -> Iterator[int]:
    """Yield the descriptor of a directory, so that all files go into the same one; ``make`` creates it if needed.

    ``strangers``: even root may use another user's directory, and that user may change what is written there; then no
    link of that user is followed.

    Raises:
        OSError: it cannot be created or opened, or another user controls what is in it, or where it is.
    """
    above = _open_step_by_step(path, make=make, strangers=strangers)
    try:
        _check_directory(path, above, last=True, strangers=strangers)
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_step_by_step(path: Path, *, make: bool, strangers: bool) -> int:
    """Return the descriptor of a directory: each directory on the way is checked (`_check_directory`), then the next opened.

    Options as of `opened_directory`. A link is followed by hand: what is on its way is checked, too.
    """
    # In reverse: `pop` takes the next one.
    parts = list(reversed(Path(os.path.join(os.getcwd(), path)).parts[1:]))
    links = 0
    directory = os.open("/", _STEP)
    reached = Path("/")
    try:
        while parts:
            part = parts.pop()
            _check_directory(path, directory, strangers=strangers)
            try:
                below = os.open(part, _STEP, dir_fd=directory)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=directory)
                below = os.open(part, _STEP, dir_fd=directory)
            except NotADirectoryError:
                # Perhaps a link.
                target = _link_target(reached / part, part, directory, strangers=strangers)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
                parts += reversed(Path(target).parts)
                continue
            os.close(directory)
            directory = below
            reached = Path("/") if part == "/" else reached / part
    except BaseException:
        os.close(directory)
        raise
    return directory


def _link_target(at: Path, name: str, directory: int, *, strangers: bool) -> str:
    """Return the target of a link. Raises OSError: it is no link, or another user's in a directory where anyone may make one.

    ``at`` is its path, ``name`` its name in an open directory. With ``strangers`` no link of another user is followed, and by
    root none in a directory of another user: also not of the user who called sudo, whose programs may have made it.
    """
    stated = os.stat(name, dir_fd=directory, follow_symlinks=False)
    above = os.fstat(directory)
    if not stat.S_ISLNK(stated.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(at))
    others_may_make_it = above.st_mode & stat.S_IWOTH or (os.geteuid() == 0 and above.st_uid != 0)
    if stated.st_uid not in {os.geteuid(), 0} and (strangers or others_may_make_it):
        raise _in_the_way_error(at, f"a symbolic link of user {stated.st_uid}")
    return os.readlink(name, dir_fd=directory)


def _trusted_uids() -> set[int]:
    """Return the users whose directories are trusted; for root also the user who called sudo."""
    trusted = {os.geteuid(), 0}
    called_by = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and called_by.isascii() and called_by.isdecimal() and len(called_by) <= 10:
        trusted.add(int(called_by))
    return trusted


def _check_directory(path: Path, descriptor: int, *, last: bool = False, strangers: bool = False) -> None:
    """Raise if another user may replace files in an open directory: ``path`` itself (``last``) or one above it.

    Group write permission is fine: the owner chose the group, as for /var/log on some systems.
    """
    stated = os.fstat(descriptor)
    where = "" if last else "below "
    if os.geteuid() == 0 and not strangers and stated.st_uid not in _trusted_uids():
        raise _in_the_way_error(path, f"{where}a directory of user {stated.st_uid}")
    if stated.st_mode & stat.S_IWOTH and not stated.st_mode & stat.S_ISVTX:
        raise _in_the_way_error(path, f"{where}a directory that anyone may change")


def create_file(path: str | Path, data: bytes, *, directory: int | None = None, mode: int = 0o666) -> None:
    """Write a new file, in an open directory if given. A partly written file is removed.

    Raises:
        FileExistsError: the name exists, even as a dangling link.
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


def open_over(path: Path, *, directory: int | None = None) -> int:
    """Return the descriptor of an empty file for reading and writing: a new one, or this user's own, truncated.

    ``directory``: open the file name in this directory.

    Raises:
        OSError: it cannot be opened, or is not only this user's file: a link, a FIFO, another user's.
    """
    target = path if directory is None else path.name
    try:
        return os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o666, dir_fd=directory)
    except FileExistsError:
        descriptor = _open_own(path, os.O_RDWR, directory)
    try:
        os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_new(path: Path) -> int:
    """Return the descriptor of a new file, to be written, in an existing directory.

    Raises:
        FileExistsError: the file exists, or something else is in the way, which the message names.
        OSError: it cannot be created.
    """
    with opened_directory(path.parent, make=False) as directory:
        return os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666, dir_fd=directory)


def open_to_append(path: Path, *, create: bool = True, directory: int | None = None) -> int:
    """Return the descriptor of a file of this user alone, to be read and appended to, in a directory that is there.

    ``directory``: the open directory of the file. Nobody else may write a new file, whatever the umask.

    Raises:
        OSError: it cannot be opened, or is not only this user's file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NOCTTY | (os.O_CREAT if create else 0)
    if directory is not None:
        return _open_own(path, flags, directory)
    with opened_directory(path.parent, make=False) as opened:
        return _open_own(path, flags, opened)


def _open_own(path: Path, flags: int, directory: int | None) -> int:
    """Return the descriptor of a regular file of this user alone. Raises OSError: it is not, or cannot be opened."""
    try:
        descriptor = os.open(path if directory is None else path.name, flags | _SAFE, 0o644, dir_fd=directory)
    except OSError as error:
        obstacle = {errno.ELOOP: "a symbolic link", errno.ENXIO: "not a regular file"}.get(error.errno or 0)
        if obstacle is None:
            raise
        raise _in_the_way_error(path, obstacle) from None
    stated = os.fstat(descriptor)
    if not stat.S_ISREG(stated.st_mode):
        obstacle = "not a regular file"
    elif stated.st_uid != os.geteuid():
        obstacle = f"a file of user {stated.st_uid}"
    elif stated.st_nlink > 1:
        obstacle = "a file with several hard links"
    else:
        return descriptor
    os.close(descriptor)
    raise _in_the_way_error(path, obstacle)


def _in_the_way_error(path: Path, obstacle: str) -> OSError:
    return FileExistsError(errno.EEXIST, f"it is {obstacle}", str(path))
