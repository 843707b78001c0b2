"""The driver's lock on another process, against a stand-in for libcuda with the answers of an H200."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NotSupported, OperationFailed, TimedOut
from gpushare.host import checkpoint as module
from gpushare.host.checkpoint import LOCKED, Checkpoint
from tests.errors import fails


class Driver:
    """Answers as the driver does: one lock per process, 401 for a second, 801 for MPS clients, 600 for long queues."""

    def __init__(self, *, mps: bool = False, queue_seconds: float = 0.0) -> None:
        self.locked: set[int] = set()
        self.mps, self.queue_seconds = mps, queue_seconds
        self.asked_ms: list[int] = []
        self.unlocked: list[int] = []

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
        self.unlocked.append(pid)
        if pid not in self.locked:
            return 401
        self.locked.remove(pid)
        return 0

    def cuCheckpointProcessGetState(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
        ctypes.cast(argument, ctypes.POINTER(ctypes.c_int)).contents.value = int(pid in self.locked)
        return 0


def test_an_older_driver_tells_no_state() -> None:
    assert Checkpoint(object()).state(42) is None


def test_the_structures_have_the_size_of_the_drivers() -> None:
    # cuda.h: 64 bytes each (an unsigned int and a reserved one, then eight or seven 64-bit words).
    assert ctypes.sizeof(module._LockArguments) == 64
    assert ctypes.sizeof(module._ReservedArguments) == 64


def test_a_process_is_locked_and_unlocked() -> None:
    driver = Driver()
    lock = Checkpoint(driver)
    lock.lock(42, 0.5)
    assert (driver.asked_ms, lock.state(42)) == ([500], LOCKED)
    with pytest.raises(OperationFailed, match="locked already"):
        lock.lock(42, 0.5)
    lock.unlock(42)
    assert lock.state(42) != LOCKED


def test_to_unlock_one_that_is_not_locked_does_no_harm() -> None:
    driver = Driver()
    driver.locked.add(7)
    Checkpoint(driver).unlock(42)
    assert (driver.unlocked, driver.locked) == ([42], {7})


@pytest.mark.parametrize(
    ("driver", "kind", "code"),
    [
        # A long queue: the process runs on.
        (Driver(queue_seconds=1.0), TimedOut, "lock_timeout"),
        (Driver(mps=True), NotSupported, "not_supported"),
        # An older driver has no locks.
        (object(), NotSupported, "driver_too_old"),
    ],
)
def test_what_cannot_be_locked(driver: Any, kind: type[GpushareError], code: str) -> None:
    with fails(kind, code):
        Checkpoint(driver).lock(42, 0.5)
    assert not getattr(driver, "locked", None)
    assert Checkpoint(driver).state(42) != LOCKED


@pytest.mark.parametrize("call", ["lock", "unlock"])
def test_what_the_driver_refuses_is_said(call: str) -> None:
    """Taken for unlocked, the program would stand still forever."""
    seconds = (1.0,) if call == "lock" else ()
    with fails(OperationFailed, "lock_refused", match=f"did not {call} process 42: CUDA error 999"):
        getattr(Checkpoint(Answering(999)), call)(42, *seconds)
    with pytest.raises(NotSupported):
        getattr(Checkpoint(Answering(801)), call)(42, *seconds)


def test_no_libcuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with fails(NotSupported, "no_libcuda"):
        Checkpoint().lock(42, 0.5)


def test_an_unlock_does_not_overtake_a_lock_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that somebody has stopped hangs its lock, which takes effect when it goes on: after the unlock, forever."""
    monkeypatch.setattr(module, "CALL_SECONDS", 0.05)
    goes_on, done = threading.Event(), threading.Event()

    class Hanging(Driver):
        def cuCheckpointProcessLock(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
            goes_on.wait(120)
            code = super().cuCheckpointProcessLock(pid, argument)
            done.set()
            return code

    driver = Hanging()
    lock = Checkpoint(driver)
    with pytest.raises(TimedOut):
        lock.lock(42, 0.01)
    for _ in range(3):
        with fails(TimedOut, "driver_hangs"):
            lock.unlock(42)
    # Others are not held up by it.
    lock.unlock(43)
    goes_on.set()
    assert done.wait(120)
    for _ in range(3000):
        with contextlib.suppress(TimedOut):
            lock.unlock(42)
            break
        time.sleep(0.01)
    assert not driver.locked


def test_a_driver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each look would leave another thread behind, and keep Ctrl-C waiting for five seconds."""
    monkeypatch.setattr(module, "CALL_SECONDS", 0.01)
    goes_on = threading.Event()
    asked: list[int] = []

    class Hanging(Driver):
        def cuCheckpointProcessUnlock(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
            asked.append(pid)
            goes_on.wait(120)
            return 0

    lock = Checkpoint(Hanging())
    for _ in range(5):
        with fails(TimedOut, "driver_hangs"):
            lock.unlock(42)
    assert lock.state(42) != LOCKED
    goes_on.set()
    assert asked == [42]


# -- what a wrong answer would do ------------------------------------------------------------------


class Answering:
    """A driver that gives each call the same answer, and notes the bytes that it was given."""

    def __init__(self, code: int, state: int = 1) -> None:
        self.code, self.state = code, state
        self.given: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuCheckpoint"):
            raise AttributeError(name)

        def call(pid: int, argument: Any) -> int:
            if name.endswith("GetState"):
                ctypes.cast(argument, ctypes.POINTER(ctypes.c_int)).contents.value = self.state
            else:
                timeout = ctypes.cast(argument, ctypes.POINTER(ctypes.c_uint)).contents.value
                self.given.append((name, pid, timeout))
            return self.code

        return call


@pytest.mark.parametrize(("seconds", "milliseconds"), [(0.5, 500), (2.0, 2000), (0.0001, 1), (0.0015, 1), (0.0, 1)])
def test_the_driver_is_told_milliseconds_and_never_none(seconds: float, milliseconds: int) -> None:
    """0 would be forever."""
    driver = Answering(0)
    Checkpoint(driver).lock(42, seconds)
    assert driver.given == [("cuCheckpointProcessLock", 42, milliseconds)]


@pytest.mark.parametrize(
    ("code", "state", "locked"), [(0, 1, True), (0, 0, False), (0, 2, False), (0, 3, False), (400, 1, False)]
)
def test_only_a_process_that_is_locked_is_said_to_be(code: int, state: int, locked: bool) -> None:
    # cuda.h, CUprocessState: 0 running, 1 locked, 2 checkpointed, 3 failed.
    assert (Checkpoint(Answering(code, state)).state(42) == LOCKED) is locked


def test_a_driver_that_hangs_keeps_no_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread must not be waited for at the end."""
    release, threads = threading.Event(), []
    monkeypatch.setattr(module, "CALL_SECONDS", 0.0)

    class Hanging:
        def cuCheckpointProcessGetState(self, pid: int, argument: Any) -> int:  # noqa: N802 - the driver's name
            threads.append(threading.current_thread())
            release.wait(120)
            return 0

    assert Checkpoint(Hanging()).state(42) is None
    release.set()
    for thread in threads:
        assert thread.daemon
        thread.join()
