"""The checks of `gpushare doctor` on what MPS needs of the machine: shared memory, open files, directories, logs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.actions.check import Check, Examination, Verdict
from gpushare.host.cdi import root_of
from gpushare.host.kept_file import read_tail
from gpushare.host.machine import SHARED_MEMORY
from gpushare.host.mps_access import pipe_users
from gpushare.layout.systemd import UNIT_PIPES
from gpushare.units import MIB, format_bytes

if TYPE_CHECKING:
    from gpushare.host.mps import FoundDaemon
    from gpushare.model import MpsDaemon

# What a container gets for /dev/shm unless it asks for more; the CUDA programs in it want some of it too.
_LITTLE_SHARED_MEMORY: Final = 64 * MIB
# NVIDIA's advice for many clients is 16384; below the usual soft limit of Linux a few already do not fit.
_FEW_DESCRIPTORS: Final = 1024
_LARGE_LOG: Final = 100 * MIB
_TAIL_BYTES: Final = 64 << 10


def needs(seen: Examination) -> Iterator[Check]:
    """Check what MPS needs of the machine: shared memory, open files, directories, room for its log."""
    space = seen.host.machine.shared_memory()
    if space is None:
        yield Check(id="mps.shm", verdict=Verdict.SKIP, seen="the size of /dev/shm cannot be told")
    elif space.total <= _LITTLE_SHARED_MEMORY or space.free < _LITTLE_SHARED_MEMORY // 4:
        yield Check(
            id="mps.shm",
            verdict=Verdict.WARN,
            seen=f"{SHARED_MEMORY} has {format_bytes(space.total)}, {format_bytes(space.free)} free",
            why="an MPS server and its clients meet there: without room the server fails to open its SHM segment",
            remedy="sudo mount -o remount,size=8G /dev/shm; of a container: docker run --shm-size=8g, or --ipc=host",
        )
    else:
        yield Check(id="mps.shm", verdict=Verdict.PASS, seen=f"{SHARED_MEMORY} has {format_bytes(space.free)} free")
    for found in seen.believed:
        yield from _descriptors(seen, found.daemon)
        yield from _directories(seen, found)
        yield from _log(found.daemon)


def _descriptors(seen: Examination, daemon: MpsDaemon) -> Iterator[Check]:
    limit = seen.host.machine.descriptor_limit(daemon.pid or 0)
    failed = re.search(r"failed to (?:create|open)[^\n]* SHM segment", log_tail(daemon, "server.log"))
    if failed or (limit is not None and limit < _FEW_DESCRIPTORS):
        told = "unknown" if limit is None else str(limit)
        yield Check(
            id="mps.descriptors",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"MPS daemon {daemon.pid} may have {told} open files"
            + (", and its server could not open an SHM segment" if failed else ""),
            why="each client takes several: the next ones are refused; NVIDIA advises 16384",
            remedy="gpushare mps stop, then: ulimit -n 16384; gpushare mps start (in a unit: LimitNOFILE=16384)",
        )


def _directories(seen: Examination, found: FoundDaemon) -> Iterator[Check]:
    daemon = found.daemon
    pipe = Path(daemon.pipe_directory or "/nonexistent")
    seen_pipe = _own(pipe)
    if seen_pipe is None or not stat.S_ISDIR(seen_pipe.st_mode):
        return
    mode = seen_pipe.st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield Check(
            id="mps.directory",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"everybody may write into {pipe} (mode {stat.S_IMODE(mode):o})",
            why="any user can put a socket of his own in the daemon's place",
            remedy=f"sudo chmod 0755 {shlex.quote(str(pipe))}",
        )
    # What 'users' of a gpushare.yaml closed is closed on purpose; what lies above must be open all the same.
    chosen = bool(pipe_users(pipe)) and (daemon.ours or str(pipe).startswith(f"{UNIT_PIPES}/"))
    first = pipe.parent if chosen else pipe
    closed = _closed(first, root_of(seen.host)) if daemon.user == "root" else None
    if closed is not None:
        yield Check(
            id="mps.reach",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"only its owner may go through {closed}" + ("" if closed == pipe else f", on the way to {pipe}"),
            why="programs of other users, and of containers, cannot reach the daemon and run without MPS or fail",
            remedy=f"sudo chmod o+x {shlex.quote(str(closed))}",
        )


def _closed(directory: Path, root: Path) -> Path | None:
    # Of a simulated host what lies above its own directory is the machine's business.
    above = [path for path in (directory, *directory.parents) if path != root and path.is_relative_to(root)]
    for path in reversed(above):
        with contextlib.suppress(OSError):
            if not path.stat().st_mode & stat.S_IXOTH:
                return path
    return None


def _log(daemon: MpsDaemon) -> Iterator[Check]:
    path = Path(daemon.log_directory or "/nonexistent") / "control.log"
    found = _own(path)
    if found is not None and stat.S_ISREG(found.st_mode) and found.st_size > _LARGE_LOG:
        yield Check(
            id="mps.log",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"{path} has grown to {format_bytes(found.st_size)}",
            why="every question to the daemon adds lines, and nobody rotates it",
            remedy=f"sudo truncate -s 0 {shlex.quote(str(path))}",
        )


def _own(path: Path) -> os.stat_result | None:
    """Return what this user or root made at a path; a link is what it is itself."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found if found.st_uid in {os.geteuid(), 0} else None
    return None


def log_tail(daemon: MpsDaemon, name: str) -> str:
    """Return the end of a log of a daemon (``control.log``, ``server.log``); nothing where it may not be read."""
    return read_tail(Path(daemon.log_directory or "/nonexistent") / name, _TAIL_BYTES)
