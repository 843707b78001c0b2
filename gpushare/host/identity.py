"""Identify processes by PID and start time, because PIDs are reused."""

from __future__ import annotations

import fcntl
import os
import re
import time
from typing import Final, NamedTuple

# Without pathlib, whose loading would be a tenth of the start of a child that calls the driver.
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_UID: Final = re.compile(r"^Tgid:\s*(\d+)$.*?^Uid:\s*(\d+)", re.MULTILINE | re.DOTALL | re.ASCII)
_KERNEL_THREAD: Final = 0x00200000
# _IO(0xb7, 4) of linux/nsfs.h.
_GET_OWNER_UID: Final = 0xB704
# States of a process that has ended.
GONE: Final = frozenset({"Z", "X", "x"})
_STOPPED: Final = frozenset({"T", "t"})


class Identity(NamedTuple):
    """A process: its PID and start, in clock ticks since boot, which does not change when the clock is set."""

    pid: int
    started: int


class Stat(NamedTuple):
    """Some fields of ``/proc/PID/stat``; times are in clock ticks, and ``started`` is since boot."""

    state: str
    parent: int
    group: int
    flags: int
    user_ticks: int
    kernel_ticks: int
    started: int
    resident_pages: int


def start_of(process: Identity | None) -> int | None:
    return None if process is None else process.started


def identity_of(pid: int) -> Identity | None:
    """Return the process that has a PID now; None: no process, a zombie, or not visible."""
    stat = read_stat(pid)
    return None if stat is None or stat.state in GONE else Identity(pid, stat.started)


def identity_of_child(pid: int) -> Identity | None:
    """Return the child of this process that has a PID, also if it has ended and was not waited for; None: not visible."""
    stat = read_stat(pid)
    return None if stat is None else Identity(pid, stat.started)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped: by Ctrl-Z, SIGSTOP or a debugger."""
    stat = read_stat(pid)
    return stat is not None and stat.state in _STOPPED


def read_stat(pid: int | str) -> Stat | None:
    """Return what ``/proc/PID/stat`` says of a process, or of a thread with ``PID/task/TID``; None: not readable."""
    try:
        # Without a buffer: there may be thousands.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
        # The name can contain any bytes; it ends at the last parenthesis. Split no further than the last field that is used.
        fields = text[text.rindex(b")") + 1 :].split(None, 22)
        # The state is field 3 of proc_pid_stat(5).
        return Stat(
            state=fields[0].decode("ascii", "replace"),
            parent=int(fields[1]),
            group=int(fields[2]),
            flags=int(fields[6]),
            user_ticks=int(fields[11]),
            kernel_ticks=int(fields[12]),
            started=int(fields[19]),
            resident_pages=int(fields[21]),
        )
    except (OSError, ValueError, IndexError):
        return None


def every_pid(proc: str = "/proc") -> list[int]:
    """Return the PIDs of all processes; OSError: there is no such directory."""
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]


def real_uid(pid: int) -> int | None:
    """Return the real user id of a process; None: not visible, or the number is a thread's."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            match = _UID.search(file.read())
    except OSError:
        return None
    return int(match[2]) if match is not None and int(match[1]) == pid else None


def lives(process: Identity, uid: int) -> bool:
    """Return whether exactly this process is alive and belongs to this user.

    If /proc hides other users' processes (hidepid), a process that this user may not signal counts as alive.
    """
    if process.pid <= 0:
        return False
    if read_stat(process.pid) is not None:
        return identity_of(process.pid) == process and real_uid(process.pid) == uid
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    # It is gone; or it is this user's own, which is always visible, and ended after the check above.
    return False


def is_kernel_thread(pid: int) -> bool:
    """Return whether a PID is a kernel thread (PF_KTHREAD in ``/proc/PID/stat``)."""
    stat = read_stat(pid)
    return stat is not None and bool(stat.flags & _KERNEL_THREAD)


def parent_of(pid: int) -> int | None:
    """Return the PID of a process's parent; None: there is none, or it is not visible."""
    stat = read_stat(pid)
    return None if stat is None else stat.parent or None


def boot_id() -> str | None:
    """Return the id of this boot; None: unknown."""
    try:
        with open(_BOOT_ID, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def uptime() -> float:
    """Return the seconds since boot, with the time asleep (CLOCK_BOOTTIME): no setting of the clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_time(seconds: float) -> float:
    """Return seconds since boot as seconds since 1970, to be shown: it changes when the clock is set."""
    return time.time() - uptime() + seconds


def namespace_owner(pid: int) -> int | None:
    """Return the user who owns the user namespace of a process, and so a rootless container (ioctl_ns(2)); None: not visible."""
    import array

    owner = array.array("I", [0])
    try:
        descriptor = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _GET_OWNER_UID, owner)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return owner[0]


# PROC_PID_INIT_INO of the Linux kernel: the inode of the host's own PID namespace.
HOST_PID_SPACE: Final = 4026531836


def pid_space() -> int:
    """Return the inode of this PID namespace, 0 if unknown: PIDs are only valid in their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
