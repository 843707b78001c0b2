"""The driver's lock on another process, against a stand-in for libcuda with the answers of an H200."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from gpushare.errors import NotSupported, OperationFailed, TimedOut
from gpushare.host import checkpoint as module
from gpushare.host.checkpoint import Checkpoint


class Driver:
    """Answers as the driver does: one lock per process, 401 for a second, 801 for MPS clients, 600 for long queues."""

    def __init__(self, *, mps: bool = False, queue_seconds: float = 0.0) -> None:
        self.locked: set[int] = set()
        self.mps, self.queue_seconds = mps, queue_seconds
        self.asked_ms: list[int] = []

    def cuCheckpointProcessLock(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
        arguments = ctypes.cast(argument, ctypes.POINTER(module._LockArguments)).contents
        self.asked_ms.append(arguments.timeoutMs)
        if self.mps:
            return 801
        if pid in self.locked:
            return 401
        if self.queue_seconds * 1000 > arguments.timeoutMs:
            return 600
        self.locked.add(pid)
        return 0

    def cuCheckpointProcessUnlock(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's
        if pid not in self.locked:
            return 401
        self.locked.remove(pid)
        return 0

    def cuCheckpointProcessGetState(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
        ctypes.cast(argument, ctypes.POINTER(ctypes.c_int)).contents.value = int(pid in self.locked)
        return 0


def test_the_structures_have_the_size_of_the_drivers() -> None:
    # cuda.h: 64 bytes each (an unsigned int and a reserved one, then eight or seven 64-bit words).
    assert ctypes.sizeof(module._LockArguments) == 64
    assert ctypes.sizeof(module._UnlockArguments) == 64


def test_a_process_is_locked_and_unlocked() -> None:
    driver = Driver()
    lock = Checkpoint(driver)
    lock.lock(42, 0.5)
    assert driver.asked_ms == [500]
    assert lock.is_locked(42)
    lock.unlock(42)
    assert not lock.is_locked(42)


def test_to_unlock_one_that_is_not_locked_does_no_harm() -> None:
    Checkpoint(Driver()).unlock(42)


def test_a_second_lock_is_refused() -> None:
    lock = Checkpoint(Driver())
    lock.lock(42, 0.5)
    with pytest.raises(OperationFailed, match="locked already"):
        lock.lock(42, 0.5)


def test_a_long_queue_is_a_timeout_and_the_process_runs_on() -> None:
    driver = Driver(queue_seconds=1.0)
    with pytest.raises(TimedOut) as caught:
        Checkpoint(driver).lock(42, 0.02)
    assert caught.value.code == "lock_timeout"
    assert not driver.locked


def test_an_mps_client_cannot_be_locked() -> None:
    with pytest.raises(NotSupported) as caught:
        Checkpoint(Driver(mps=True)).lock(42, 0.5)
    assert caught.value.code == "not_supported"


def test_an_older_driver_has_no_locks() -> None:
    with pytest.raises(NotSupported) as caught:
        Checkpoint(object()).lock(42, 0.5)
    assert caught.value.code == "driver_too_old"
    assert not Checkpoint(object()).is_locked(42)


def test_no_libcuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(NotSupported) as caught:
        Checkpoint().lock(42, 0.5)
    assert caught.value.code == "no_libcuda"


def test_a_driver_that_hangs_does_not_hang_gpushare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_SECONDS", 0.05)
    release = threading.Event()

    class Hanging(Driver):
        def cuCheckpointProcessUnlock(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
            release.wait(10)
            return super().cuCheckpointProcessUnlock(pid, argument)

    with pytest.raises(TimedOut) as caught:
        Checkpoint(Hanging()).unlock(42)
    assert caught.value.code == "driver_hangs"
    release.set()
