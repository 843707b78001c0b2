"""Where a process comes from: its user and groups, its cgroup, its command line, and which of it only root decides.

A user chooses the command line of its programs, and can create cgroups below one that was delegated to it. Facts:
proc_pid_status(5), cgroups(7).
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Callable
from typing import Final

from gpushare.base.values import dataclass
from gpushare.host.identity import identity_of
from gpushare.host.process import container_of, read_proc

_CGROUPS: Final = "/sys/fs/cgroup"
# Enough for any glob; reading stops here, however long the command line is.
MOST_OF_COMMAND: Final = 4096
_MOST_OF_CGROUPS: Final = 64 << 10
_USER: Final = re.compile(rb"^Uid:\s*(\d+)", re.MULTILINE)
_GROUP: Final = re.compile(rb"^Gid:\s*(\d+)", re.MULTILINE)
_GROUPS: Final = re.compile(rb"^Groups:[ \t]*([\d \t]*)$", re.MULTILINE)
_FORBIDDEN: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a process comes from; unknown is None.

    ``uid`` is its real user: it started the process. ``gids`` are its real group and its other groups. ``command`` is the
    command line, of which the first 4096 bytes are read. ``of_root``: its cgroup, and each one above it, belongs to root, so
    that only root has put the process there; that counts for ``container`` as well, which is read from the cgroup.
    ``started`` is the start of the process in clock ticks since boot.
    """

    uid: int | None
    gids: frozenset[int] = frozenset()
    container: str | None = None
    command: str | None = None
    cgroup: str | None = None
    of_root: bool = False
    started: int = 0


def origin_of(pid: int) -> Origin | None:
    """Return where a process comes from; None: there is no such process, or it has changed meanwhile."""
    before = identity_of(pid)
    text = read_proc(f"/proc/{pid}/cgroup", _MOST_OF_CGROUPS) or b""
    status = read_proc(f"/proc/{pid}/status") or b""
    command_line = _command(pid)
    # The PID may have been given to another process while this was read.
    if before is None or identity_of(pid) != before:
        return None
    user = _numbers_in(status, _USER)
    lines = os.fsdecode(text)
    hierarchy, path = _hierarchy_and_cgroup(lines, _CGROUPS)
    return Origin(
        uid=user[0] if user else None,
        gids=frozenset([*_numbers_in(status, _GROUP), *_numbers_in(status, _GROUPS)]),
        container=container_of(lines),
        command=command_line,
        cgroup=path,
        of_root=path is not None and only_root_adds_to(hierarchy, path),
        started=before.started,
    )


def _numbers_in(status: bytes, line: re.Pattern[bytes]) -> list[int]:
    """Return the numbers that a line of ``/proc/PID/status`` has; none if there is no such line."""
    match = line.search(status)
    return [] if match is None else [int(word) for word in match[1].split()]


def _command(pid: int) -> str | None:
    """Return the beginning of a command line; None: it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            text = file.read(MOST_OF_COMMAND)
    except (OSError, MemoryError):
        return None
    return os.fsdecode(text).rstrip("\0").replace("\0", " ") if text else None


def _hierarchy_and_cgroup(text: str, cgroups: str) -> tuple[str, str | None]:
    """Return the directory of systemd's cgroup hierarchy, and the path in it that ``/proc/PID/cgroup`` has (None: unknown).

    cgroup v2 has one hierarchy, with lines ``0::PATH``. In v1 systemd has one of its own: ``1:name=systemd:PATH``.
    """
    if os.path.exists(f"{cgroups}/cgroup.controllers"):
        hierarchy, prefix = cgroups, r"0::"
    else:
        hierarchy, prefix = f"{cgroups}/systemd", r"\d+:name=systemd:"
    match = re.search(rf"^{prefix}(/[^\n]*)$", text, re.MULTILINE)
    return hierarchy, None if match is None else match[1]


def only_root_adds_to(hierarchy: str, path: str) -> bool:
    """Return whether only root can have put a process into a cgroup, given by its path in a hierarchy.

    A user who may write the ``cgroup.procs`` of a cgroup can put own processes there, and one who owns a directory can create
    cgroups below it (delegation).
    """
    names = [name for name in path.split("/") if name]
    if ".." in names:
        # Outside the cgroup namespace of this process.
        return False
    directories = [*itertools.accumulate((hierarchy, *names), os.path.join)]
    if not all(_only_root_writes(directory, stat.S_ISDIR) for directory in directories):
        return False
    # Besides cgroup.procs a cgroup of version 2 or 1 may have a file to put threads into it.
    procs, *for_threads = (os.path.join(directories[-1], name) for name in ("cgroup.procs", "cgroup.threads", "tasks"))
    return all(_only_root_writes(file, stat.S_ISREG) for file in (procs, *filter(os.path.lexists, for_threads)))


def _only_root_writes(path: str, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path is of this kind (`stat.S_ISDIR`, `stat.S_ISREG`), and only root may write it."""
    try:
        stated = os.lstat(path)
    except OSError:
        return False
    return is_kind(stated.st_mode) and stated.st_uid == 0 and not stated.st_mode & _FORBIDDEN
