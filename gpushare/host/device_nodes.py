"""Which device an open file is: the path alone proves nothing, since every user may make any path in a mount name space."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Any, Final

# linux/stat.h and linux/fcntl.h. The kernel answers from what it has: no server of a file system (FUSE) is asked.
_DONT_SYNC: Final = 0x4000
_AT_FDCWD: Final = -100
_TYPE_AND_MODE: Final = 0x3
# Of struct statx.
_SIZE: Final = 256
_MODE_AT: Final = 28
_DEVICE_AT: Final = 128


def is_device(opened: str, path: str) -> bool:
    """Return whether ``opened``, a link below ``/proc/PID/fd``, is the character device that ``path`` is here.

    A node that is not here, but in another container, counts where a driver of NVIDIA has its major number.

    Raises:
        OSError: it was closed meanwhile, or its process ended.
    """
    device = _device(opened)
    if device is None:
        return False
    try:
        here = os.stat(path)
    except OSError:
        number = re.search(r"\d+$", path, re.ASCII)
        own = number is None or number[0] == str(device[1])
        # Minor 5 of nvidia-caps is another device than minor 5 of nvidia.
        driver = "nvidia-caps" if path.startswith("/dev/nvidia-caps/") else "nvidia"
        return own and drivers().get(device[0], "").startswith(driver)
    return stat.S_ISCHR(here.st_mode) and device == (os.major(here.st_rdev), os.minor(here.st_rdev))


def _device(opened: str) -> tuple[int, int] | None:
    """Return major and minor number of an open character device; None: it is something else."""
    statx = _statx()
    if statx is None:
        found = os.stat(opened)
        mode, device = found.st_mode, (os.major(found.st_rdev), os.minor(found.st_rdev))
    else:
        buffer = bytearray(_SIZE)
        statx(opened, buffer)
        mode = int.from_bytes(buffer[_MODE_AT : _MODE_AT + 2], "little")
        major, minor = (int.from_bytes(buffer[at : at + 4], "little") for at in (_DEVICE_AT, _DEVICE_AT + 4))
        device = (major, minor)
    return device if stat.S_ISCHR(mode) else None


@functools.cache
def _statx() -> Callable[[str, bytearray], None] | None:
    """Return statx(2) of libc; None where there is none (before glibc 2.28)."""
    import ctypes
    import sys

    call: Any = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if call is None or sys.byteorder != "little":
        return None

    def statx(path: str, buffer: bytearray) -> None:
        into = (ctypes.c_char * _SIZE).from_buffer(buffer)
        if call(_AT_FDCWD, os.fsencode(path), _DONT_SYNC, _TYPE_AND_MODE, into) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)

    return statx


def drivers() -> Mapping[int, str]:
    """Return the names of the drivers of character devices by major number (``/proc/devices``)."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError), open("/proc/devices", encoding="ascii", errors="replace") as file:
        for line in file.read(1 << 16).partition("Block devices:")[0].splitlines():
            major, _, name = line.strip().partition(" ")
            if major.isdigit():
                found[int(major)] = name
    return found
