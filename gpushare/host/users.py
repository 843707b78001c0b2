"""The run directories of other users, as root sees them: what they have paused and swapped, and their jobs by name.

Root only reads there, and believes nothing but what a user could do to itself: the directory of a UID belongs to that UID,
has no link on the way and nothing mounted on it, and its files are small, regular and that user's own. A directory that a
user has put elsewhere (``GPUSHARE_RUN_DIR``) is not found.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.host.host import RUNTIME, TEMPORARY, UserDirectory
from gpushare.host.process import read_proc
from gpushare.host.records import json_of, read_own

if TYPE_CHECKING:
    from gpushare.host.host import Host

_NAME: Final = "gpushare-"
_MOST_USERS: Final = 1000
_MOST_RECORDS: Final = 256
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOUNTS: Final = "/proc/self/mountinfo"


def records_of(user: UserDirectory, room: str) -> list[tuple[Path, Any]]:
    """Return the JSON of the records in a room of a user's run directory, with their paths."""
    found = []
    with contextlib.suppress(OSError), _opened(user.path, user.owner) as top, _below(top, room, user.owner) as inside:
        names = sorted(name for name in os.listdir(inside) if name.endswith(".json") and not name.startswith("."))
        for name in names[:_MOST_RECORDS]:
            with contextlib.suppress(OSError, ValueError):
                raw = json_of(read_own(name, directory=inside, owner=user.owner))
                found.append((user.path / room / name, raw))
    return found


def has_records(host: Host, room: str) -> bool:
    """Return whether there may be a record of this kind: of this user or root, or to root of any user.

    The directory of a room stays when its last record is gone.
    """
    for directory in host.run_directories:
        with contextlib.suppress(OSError):
            if _any_record(os.listdir(directory / room)):
                return True
    return users_have(host.user_directories(), room)


def users_have(users: Sequence[UserDirectory], room: str, *, records: bool = True) -> bool:
    """Return whether there may be a record of this kind in the run directories of users; or only its directory."""
    for user in users:
        with (
            contextlib.suppress(OSError),
            _opened(user.path, user.owner) as top,
            _below(top, room, user.owner) as inside,
        ):
            if not records or _any_record(os.listdir(inside)):
                return True
    return False


def _any_record(names: Sequence[str]) -> bool:
    return any(name.endswith(".json") for name in names)


def as_user(user: str, directory: Path, words: str) -> str:
    """Return a gpushare command line that root types to run it as a user, with that user's run directory."""
    return f"sudo -u {shlex.quote(user)} env GPUSHARE_RUN_DIR={shlex.quote(str(directory))} gpushare {words}"


def user_directories(runtime: str = RUNTIME, temporary: str = TEMPORARY) -> Sequence[UserDirectory]:
    """Return the run directories of the users of this machine."""
    mounts = _mounts()
    found = []
    for uid, top, path in _candidates(runtime, temporary):
        # A file system of the user's own, as FUSE has, could hold up whoever reads it.
        if any(point == path or point.startswith(f"{path}/") for point in mounts):
            continue
        if mounts.get(top, "tmpfs") != "tmpfs" and top != temporary:
            continue
        try:
            with _opened(Path(path), uid):
                found.append(UserDirectory(uid, Path(path), uid))
        except OSError:
            continue
    return found[:_MOST_USERS]


def _candidates(runtime: str, temporary: str) -> Iterator[tuple[int, str, str]]:
    """Yield UID, the directory that systemd or everybody may write, and the run directory, without looking into them."""
    for name in _names(runtime):
        if (uid := _uid(name)) is not None:
            yield uid, f"{runtime}/{name}", f"{runtime}/{name}/gpushare"
    for name in _names(temporary):
        if name.startswith(_NAME) and (uid := _uid(name.removeprefix(_NAME))) is not None:
            yield uid, temporary, f"{temporary}/{name}"


def _uid(text: str) -> int | None:
    """Return the UID of a user who is not root, as a directory is named after it."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 and text.lstrip("0") == text else None


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _mounts() -> dict[str, str]:
    """Return what is mounted where: mount point and type, the last one of each point."""
    found = {}
    for line in (read_proc(_MOUNTS) or b"").decode(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) > 4 and after:
            found[words[4]] = after.split(" ")[0]
    return found


@contextlib.contextmanager
def _opened(path: Path, owner: int) -> Iterator[int]:
    """Open a directory of a user. The one above it belongs to the same user or root.

    Raises:
        OSError: it is not there, a link, somebody else's, or open to others.
    """
    above = os.open(path.parent, _DIRECTORY)
    try:
        if os.fstat(above).st_uid not in {0, owner}:
            raise PermissionError(str(path.parent))
        with _below(above, path.name, owner) as descriptor:
            yield descriptor
    finally:
        os.close(above)


@contextlib.contextmanager
def _below(directory: int, name: str, owner: int) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != owner or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(name)
        yield descriptor
    finally:
        os.close(descriptor)
