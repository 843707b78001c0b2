"""Where a process comes from: its user and groups, its cgroup, its command line, and which of it only root decides.

A user chooses the command line of its programs, and can create cgroups below one that was delegated to it. Facts:
proc_pid_status(5), cgroups(7).
"""

from __future__ import annotations

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


def origin_of(pid: int, *, command: bool = True) -> Origin | None:
    """Return where a process comes from; None: there is no such process, or it has changed meanwhile.

    Without ``command`` its command line is not read.
    """
    before = identity_of(pid)
    text = read_proc(f"/proc/{pid}/cgroup", _MOST_OF_CGROUPS) or b""
    status = read_proc(f"/proc/{pid}/status") or b""
    words = _command(pid) if command else None
    # The PID may have been given to another process while this was read.
    if before is None or identity_of(pid) != before:
        return None
    user, group, groups = (
        match and match[1] for match in (_USER.search(status), _GROUP.search(status), _GROUPS.search(status))
    )
    lines = os.fsdecode(text)
    root, path = _hierarchy_and_cgroup(lines, _CGROUPS)
    return Origin(
        uid=None if user is None else int(user),
        gids=frozenset(map(int, [*([group] if group else []), *(groups or b"").split()])),
        container=container_of(lines),
        command=words,
        cgroup=path,
        of_root=path is not None and is_of_root(root, path),
        started=before.started,
    )


def _command(pid: int) -> str | None:
    """Return the beginning of a command line; None: it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            text = file.read(MOST_OF_COMMAND)
    except (OSError, MemoryError):
        return None
    return os.fsdecode(text).rstrip("\0").replace("\0", " ") if text else None


def _hierarchy_and_cgroup(text: str, cgroups: str) -> tuple[str, str | None]:
    """Return the directory of a hierarchy, and the path of a process in it.

    In cgroup v2 there is one hierarchy, ``0::``. Before it, systemd had its own, ``1:name=systemd:``.
    """
    unified = os.path.exists(f"{cgroups}/cgroup.controllers")
    prefix = r"0::" if unified else r"\d+:name=systemd:"
    match = re.search(rf"^{prefix}(/[^\n]*)$", text, re.MULTILINE)
    return (cgroups if unified else f"{cgroups}/systemd"), None if match is None else match[1]


def is_of_root(root: str, path: str) -> bool:
    """Return whether only root can have put a process into a cgroup.

    A user who may write the ``cgroup.procs`` of a cgroup can put own processes there, and one who owns a directory can create
    cgroups below it (delegation).
    """
    names = [name for name in path.split("/") if name]
    if ".." in names:
        # Outside the cgroup namespace of this process.
        return False
    at = root
    for name in ("", *names):
        at = os.path.join(at, name) if name else at
        if not _only_root(at, stat.S_ISDIR):
            return False
    files = (os.path.join(at, name) for name in ("cgroup.procs", "cgroup.threads", "tasks"))
    return _only_root(os.path.join(at, "cgroup.procs"), stat.S_ISREG) and all(
        _only_root(file, stat.S_ISREG) for file in files if os.path.lexists(file)
    )


def _only_root(path: str, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path is of this kind, and only root may write it."""
    try:
        stated = os.lstat(path)
    except OSError:
        return False
    return is_kind(stated.st_mode) and stated.st_uid == 0 and not stated.st_mode & _FORBIDDEN
