"""The driver's lock on another process's GPU work: cuCheckpointProcessLock and Unlock of libcuda, driver 570 and later.

Works from any process of the same user, without cuInit and without preparing the target. A lock blocks new CUDA calls
and waits for submitted work; it outlives the process that locked. Seen on an H200 (driver 580): 1 to 10 ms, 801 for an
MPS client, 600 on timeout (the job continues), 401 for a second lock or unlock. With a stopped (SIGSTOP) target the lock
hangs forever, so every call here has its own time limit.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

from gpushare.errors import NotSupported, OperationFailed, TimedOut

LIBRARY: Final = "libcuda.so.1"
SUCCESS: Final = 0
ILLEGAL_STATE: Final = 401
NOT_READY: Final = 600
CALL_SECONDS: Final = 5.0
LOCKED: Final = 1


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (("timeoutMs", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class _UnlockArguments(ctypes.Structure):
    """CUcheckpointUnlockArgs."""

    _fields_ = (("reserved", ctypes.c_uint64 * 8),)


class Checkpoint:
    """The three calls; ``library`` is libcuda, loaded at the first call when None."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        # By process: the call that has not returned.
        self._hanging: dict[int, threading.Thread] = {}

    def lock(self, pid: int, seconds: float) -> None:
        """Block the CUDA calls of a process and wait until its work has drained, ``seconds`` at most.

        Raises:
            TimedOut: its queue is longer, and it continues; or the driver did not answer.
            NotSupported: an MPS client, or a driver before 570.
            OperationFailed: it is locked already, has no CUDA context, or the driver refused.
        """
        arguments = _LockArguments(timeoutMs=max(1, int(seconds * 1000)))
        code = self._call("cuCheckpointProcessLock", pid, ctypes.byref(arguments), seconds=seconds + CALL_SECONDS)
        if code == NOT_READY:
            raise TimedOut(
                f"the GPU work of process {pid} did not drain within {seconds:g} s; it continues",
                "wait, or allow more time",
                code="lock_timeout",
            )
        _demand(code, "lock", pid)

    def unlock(self, pid: int) -> None:
        """Let a locked process continue; does nothing if it is not locked.

        Raises:
            NotSupported, OperationFailed, TimedOut: the driver refused, or did not answer.
        """
        arguments = _UnlockArguments()
        code = self._call("cuCheckpointProcessUnlock", pid, ctypes.byref(arguments), seconds=CALL_SECONDS)
        if code != ILLEGAL_STATE:
            _demand(code, "unlock", pid)

    def is_locked(self, pid: int) -> bool:
        """Return whether a process is locked; False if the driver has no locks or does not know the process."""
        state = ctypes.c_int(-1)
        try:
            code = self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state), seconds=CALL_SECONDS)
        except (NotSupported, TimedOut):
            return False
        return code == SUCCESS and state.value == LOCKED

    def _call(self, name: str, pid: int, argument: Any, *, seconds: float) -> int:
        """Call in a thread: a hanging driver must not hang gpushare."""
        function = self._function(name)
        before = self._hanging.get(pid)
        if before is not None and before.is_alive():
            # A hanging lock takes effect once its process continues: an unlock before that would be in vain.
            raise _hangs(name, pid)
        answers: list[int] = []
        # The thread's reference keeps the argument alive.
        thread = threading.Thread(target=lambda: answers.append(int(function(pid, argument))), daemon=True)
        thread.start()
        thread.join(seconds)
        if not answers:
            self._hanging[pid] = thread
            raise _hangs(name, pid)
        self._hanging.pop(pid, None)
        return answers[0]

    def _function(self, name: str) -> Any:
        if self._library is None:
            try:
                self._library = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise NotSupported(
                    f"{LIBRARY} cannot be loaded: {error}", "install the NVIDIA driver", code="no_libcuda"
                ) from None
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise NotSupported(
                f"this driver has no {name}", "driver 570 or later is needed", code="driver_too_old"
            ) from None


def _hangs(name: str, pid: int) -> TimedOut:
    return TimedOut(
        f"the driver does not answer for process {pid} ({name})",
        "see: sudo dmesg | tail",
        code="driver_hangs",
    )


def _demand(code: int, what: str, pid: int) -> None:
    if code == SUCCESS:
        return
    if code == 801:
        raise NotSupported(
            f"the driver cannot {what} process {pid}: it is a client of MPS",
            "use SIGSTOP to pause a client of MPS",
            code="not_supported",
        )
    reason = "it is locked already" if code == ILLEGAL_STATE else f"CUDA error {code}"
    raise OperationFailed(
        f"the driver did not {what} process {pid}: {reason}", "see: gpushare status", code="lock_refused"
    )
