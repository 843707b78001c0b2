"""Another user of this machine, in a process of his own, and what he may hold of a daemon."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

STRANGER: Final = 61008
# What the process holds until its end.
HELD: Final[list[object]] = []


@contextlib.contextmanager
def acting(user: int, act: Callable[[], bool]) -> Iterator[bool]:
    """Let another user act in a process of his own and hold what he got; yield whether he got it."""
    told, tell = os.pipe()
    go_on, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            try:
                got = act()
            except OSError:
                got = False
            os.write(tell, b"1" if got else b"0")
            os.read(go_on, 1)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(go_on)
    try:
        yield os.read(told, 1) == b"1"
    finally:
        os.close(end)
        os.close(told)
        os.waitpid(pid, 0)


def connects(pipe: Path) -> bool:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    HELD.append(one)
    one.connect(str(pipe / "control"))
    return True


def opens_lock(pipe: Path) -> bool:
    HELD.append(os.open(pipe / "control_lock", os.O_RDWR))
    return True


def locks(pipe: Path) -> bool:
    descriptor = os.open(pipe / "control_lock", os.O_RDWR)
    HELD.append(descriptor)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True
