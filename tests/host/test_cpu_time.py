"""How much CPU time processes have used, of real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gpushare.host.process import cpu_time

_LOOKS = 3000


@pytest.fixture
def busy() -> Iterator[int]:
    """Return a process that computes all the time."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child.pid
    child.kill()
    child.wait()


def used_at_least(pid: int, seconds: float) -> bool:
    """Return whether a process comes to use so much more CPU time."""
    first = cpu_time(pid)
    assert first is not None
    for _ in range(_LOOKS):
        now = cpu_time(pid)
        assert now >= first
        if now - first >= seconds:
            return True
        time.sleep(0.01)
    return False


def test_another_process_is_read(busy: int) -> None:
    assert used_at_least(busy, 0.05)


def test_all_threads_count() -> None:
    before = cpu_time(os.getpid())
    thread = threading.Thread(target=lambda: sum(range(2_000_000)))
    thread.start()
    thread.join()
    after = cpu_time(os.getpid())
    assert after - before > 0.005


def test_the_gone_and_numbers_that_are_no_pid_tell_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    for pid in (gone.pid, 1 << 28, 1 << 31, 1 << 70):
        assert cpu_time(pid) is None
