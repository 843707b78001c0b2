"""The run directories of other users, as root sees them: what they have paused and swapped, and their jobs by name.

Root only reads there, and believes nothing but what a user could do to itself: the directory of a UID belongs to that UID,
has no link on the way and nothing mounted on it, and its files are small, regular and that user's own. A directory that a
user has put elsewhere (``GPUSHARE_RUN_DIR``) is not found.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpushare.host.host import RUNTIME, TEMPORARY, UserDirectory
from gpushare.host.identity import every_pid
from gpushare.host.process import read_proc
from gpushare.host.records import opened_user_directory

_NAME: Final = "gpushare-"
_MOST_USERS: Final = 1000
_MOUNTS: Final = "/proc/self/mountinfo"


def command_as_user(user: str, directory: Path, words: str) -> str:
    """Return a gpushare command line that root types to run it as a user, with that user's run directory."""
    return f"sudo -u {shlex.quote(user)} env GPUSHARE_RUN_DIR={shlex.quote(str(directory))} gpushare {words}"


def user_directories(runtime: str = RUNTIME, temporary: str = TEMPORARY) -> Sequence[UserDirectory]:
    """Return the run directories of the users who run a process: only those can have records that count.

    Directories in a file system that a user may have mounted are left out: with FUSE it could hang whoever reads there.
    """
    type_by_mount_point = _mount_types()
    directories = []
    for uid in _uids_with_processes()[:_MOST_USERS]:
        paths = [f"{temporary}/{_NAME}{uid}"]
        # systemd mounts a tmpfs for each user.
        if type_by_mount_point.get(f"{runtime}/{uid}", "tmpfs") == "tmpfs":
            paths.insert(0, f"{runtime}/{uid}/gpushare")
        for path in paths:
            if any(point == path or point.startswith(f"{path}/") for point in type_by_mount_point):
                continue
            user = UserDirectory(uid, Path(path), uid)
            with contextlib.suppress(OSError), opened_user_directory(user, ""):
                directories.append(user)
    return directories


def _uids_with_processes() -> list[int]:
    """Return the UIDs that have a process, without root: a user can fake directories in /tmp, but not these."""
    uids = set()
    for pid in every_pid():
        with contextlib.suppress(OSError):
            uids.add(os.stat(f"/proc/{pid}").st_uid)
    return sorted(uids - {0})


def _mount_types() -> dict[str, str]:
    """Return the type of the file system at each mount point, of several at one point the last (proc_pid_mountinfo(5))."""
    types = {}
    for line in (read_proc(_MOUNTS) or b"").decode(errors="surrogateescape").splitlines():
        # ID PARENT MAJOR:MINOR ROOT POINT OPTIONS... - TYPE SOURCE OPTIONS
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) > 4 and after:
            types[words[4]] = after.split(" ")[0]
    return types
