"""Find the processes that have files open, mainly device nodes.

A path proves nothing, since any user can create any path in a mount namespace: a node is compared by device number.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gpushare.base.values import dataclass
from gpushare.host.identity import every_pid

# A process may have half a million open; do not let it make root read them all.
_MOST_DESCRIPTORS: Final = 16 << 10
# linux/stat.h and linux/fcntl.h. The kernel answers from its cache, without asking a FUSE server.
_DONT_SYNC: Final = 0x4000
_AT_FDCWD: Final = -100
_TYPE_AND_MODE: Final = 0x3
# Of struct statx.
_SIZE: Final = 256
_MODE_AT: Final = 28
_DEVICE_AT: Final = 128


@dataclass(frozen=True, kw_only=True)
class OpenFiles:
    """Open files by PID. ``complete`` is False when there were processes that could not be looked into."""

    by_pid: Mapping[int, tuple[str, ...]]
    complete: bool

    def holders_of(self, path: str) -> tuple[int, ...]:
        return tuple(pid for pid, paths in self.by_pid.items() if path in paths)


def open_files(prefix: str, proc: str = "/proc") -> OpenFiles:
    """Return the open files whose path starts with ``prefix``, by PID (like ``fuser``, ``lsof``).

    Only root sees the files of other users' processes. A removed file counts under its old name; a path below ``/dev``
    only if the open file is that device. Only the first 16 Ki descriptors of a process are read.
    """
    paths_of: dict[int, tuple[str, ...]] = {}
    complete = True
    try:
        pids = sorted(every_pid(proc))
    except OSError:
        return OpenFiles(by_pid={}, complete=False)
    for pid in pids:
        try:
            paths, all_read = _open_paths(f"{proc}/{pid}/fd", prefix)
        except PermissionError:
            complete = False
        except OSError:
            # It ended meanwhile.
            continue
        else:
            complete = complete and all_read
            if paths:
                paths_of[pid] = tuple(sorted(paths))
    return OpenFiles(by_pid=paths_of, complete=complete)


def _open_paths(directory: str, prefix: str) -> tuple[set[str], bool]:
    """Return the paths with a prefix that a process has open, and whether all its descriptors were read."""
    paths: set[str] = set()
    for number, (opened, path) in enumerate(_files_of(directory)):
        if number >= _MOST_DESCRIPTORS:
            return paths, False
        if not path.startswith(prefix) or path in paths:
            continue
        # It was closed meanwhile, or its file system refuses: go on with the others.
        with contextlib.suppress(OSError):
            if not prefix.startswith("/dev/") or is_device(opened, path):
                paths.add(path)
    return paths, True


def _files_of(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each descriptor of a process (``/proc/PID/fd/7``) and the path that it has open."""
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                path = os.readlink(entry.path)
            except PermissionError:
                raise
            except OSError:
                # Closed meanwhile.
                path = ""
            yield entry.path, path.removesuffix(" (deleted)")


def is_device(opened: str, path: str) -> bool:
    """Return whether ``opened``, a link below ``/proc/PID/fd``, is the character device that ``path`` is here.

    A node that exists only in another container counts if its major number is that of NVIDIA's driver.

    Raises:
        OSError: it was closed meanwhile, or its process ended.
    """
    device = _device(opened)
    if device is None:
        return False
    major, minor = device
    try:
        node = os.stat(path)
    except OSError:
        # There is no such node in this mount namespace: compare with the number in its name.
        number = re.search(r"\d+$", path, re.ASCII)
        if number is not None and number[0] != str(minor):
            return False
        # Minor 5 of nvidia-caps is not the same device as minor 5 of nvidia.
        driver = "nvidia-caps" if path.startswith("/dev/nvidia-caps/") else "nvidia"
        return drivers().get(major, "").startswith(driver)
    return stat.S_ISCHR(node.st_mode) and device == (os.major(node.st_rdev), os.minor(node.st_rdev))


def _device(opened: str) -> tuple[int, int] | None:
    """Return the major and minor number of an open character device; None: something else."""
    statx = _statx()
    if statx is None:
        stated = os.stat(opened)
        mode, major, minor = stated.st_mode, os.major(stated.st_rdev), os.minor(stated.st_rdev)
    else:
        buffer = bytearray(_SIZE)
        statx(opened, buffer)
        (mode,) = struct.unpack_from("<H", buffer, _MODE_AT)
        major, minor = struct.unpack_from("<II", buffer, _DEVICE_AT)
    return (major, minor) if stat.S_ISCHR(mode) else None


@functools.cache
def _statx() -> Callable[[str, bytearray], None] | None:
    """Return a function that writes statx(2) of a path to a buffer, or raises OSError; None before glibc 2.28."""
    import ctypes

    call: Any = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if call is None:
        return None

    def statx(path: str, buffer: bytearray) -> None:
        into = (ctypes.c_char * _SIZE).from_buffer(buffer)
        if call(_AT_FDCWD, os.fsencode(path), _DONT_SYNC, _TYPE_AND_MODE, into) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)

    return statx


def drivers() -> Mapping[int, str]:
    """Return the names of character device drivers by major number (``/proc/devices``)."""
    names: dict[int, str] = {}
    with contextlib.suppress(OSError), open("/proc/devices", encoding="ascii", errors="replace") as file:
        for line in file.read(1 << 16).partition("Block devices:")[0].splitlines():
            major, _, name = line.strip().partition(" ")
            if major.isdigit():
                names[int(major)] = name
    return names
