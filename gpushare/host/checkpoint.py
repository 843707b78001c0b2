"""The driver's lock on another process's GPU work, and its way out to host memory: cuCheckpointProcess*, driver 570.

Works from any process of the same user, without cuInit and without preparing the target. A lock blocks new CUDA calls
and waits for submitted work; it outlives the process that locked. Seen on an H200 (driver 580): 1 to 10 ms, 801 for an
MPS client, 600 on timeout (the job continues), 401 for a second lock or unlock. With a stopped (SIGSTOP) target the lock
hangs forever, so every call here has its own time limit.

A checkpoint copies the memory of a locked process to its host memory and frees the GPU; 16.7 GiB took 9 s, and 4 s back
(H200). A restore without room on the GPU fails for good: all later ones answer 304 (NVIDIA/cuda-checkpoint issue 44). The
end of a process that was restored has hung a host (issue 53): lock and checkpoint it first.

From driver 580 a restore takes pairs of GPU UUIDs (old, new), and the process continues on another GPU of the same model.
The pairs must name every GPU of the host, whatever CUDA_VISIBLE_DEVICES shows to the process: one pair of two GPUs answers
1 (CUDA_ERROR_INVALID_VALUE), and a restore without pairs still succeeds after that (two H100, driver 580.159.04,
2026-11-25, as root and as a plain user).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Final

from gpushare.base.errors import NotSupported, OperationFailed, TimedOut
from gpushare.host.channels import not_answered_error

LIBRARY: Final = "libcuda.so.1"
# CUresult
SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
ILLEGAL_STATE: Final = 401
NOT_READY: Final = 600
NOT_SUPPORTED: Final = 801
# CUprocessState
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
CALL_SECONDS: Final = 5.0
# Slower than any copy that was seen, so only a driver that hangs takes longer.
_LEAST_BYTES_PER_SECOND: Final = 100 << 20


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (("timeoutMs", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class _ReservedArguments(ctypes.Structure):
    """CUcheckpointUnlockArgs and CUcheckpointCheckpointArgs, which say nothing yet."""

    _fields_ = (("reserved", ctypes.c_uint64 * 8),)


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair: two UUIDs of 16 bytes."""

    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class RestoreArguments(ctypes.Structure):
    """CUcheckpointRestoreArgs."""

    _fields_ = (
        ("gpuPairs", ctypes.POINTER(GpuPair)),
        ("gpuPairsCount", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 6),
    )


class Checkpoint:
    """The calls; ``library`` is libcuda, loaded at the first call when None."""

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
                "a kernel of it runs for longer; try again later",
                code="lock_timeout",
            )
        _check_code(code, "lock", pid)

    def unlock(self, pid: int) -> None:
        """Let a locked process continue; does nothing if it is not locked.

        Raises:
            NotSupported, OperationFailed, TimedOut: the driver refused, or did not answer.
        """
        arguments = _ReservedArguments()
        code = self._call("cuCheckpointProcessUnlock", pid, ctypes.byref(arguments), seconds=CALL_SECONDS)
        if code != ILLEGAL_STATE:
            _check_code(code, "unlock", pid)

    def checkpoint(self, pid: int, size: int) -> None:
        """Copy the GPU memory of a locked process, ``size`` bytes, to host memory and free it. Raises as `lock`."""
        arguments = _ReservedArguments()
        seconds = CALL_SECONDS + size / _LEAST_BYTES_PER_SECOND
        _check_code(
            self._call("cuCheckpointProcessCheckpoint", pid, ctypes.byref(arguments), seconds=seconds), "swap out", pid
        )

    def restore(self, pid: int, size: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Copy the memory of a process back to the GPU. The caller has made sure that there is room.

        ``pairs`` are (old, new) UUIDs of all GPUs of the host, for a process that continues on another GPU.

        Raises:
            OperationFailed: it failed, and the process can no longer be restored (code ``job_lost``); or the driver
                refused, and the process is as before (code ``restore_refused``).
            NotSupported, TimedOut: as `lock`.
        """
        # Without persistence mode the driver restores only for a caller that has initialized CUDA.
        self._driver_function("cuInit")(0)
        # The structure keeps the array alive as long as the call, which may exceed its time limit.
        array = (GpuPair * len(pairs))(*(GpuPair(_uuid_bytes(old), _uuid_bytes(new)) for old, new in pairs))
        arguments = RestoreArguments(gpuPairs=array if pairs else None, gpuPairsCount=len(pairs))
        seconds = CALL_SECONDS + size / _LEAST_BYTES_PER_SECOND
        code = self._call("cuCheckpointProcessRestore", pid, ctypes.byref(arguments), seconds=seconds)
        state = self.state(pid)
        # Illegal state: it was on the GPU already.
        is_back = code in {SUCCESS, ILLEGAL_STATE} and state in {LOCKED, RUNNING}
        # Without a state it is probably back: the caller asks again.
        if is_back or (code == SUCCESS and state is None):
            return
        if code != _OUT_OF_MEMORY and state == CHECKPOINTED:
            raise OperationFailed(
                f"the driver did not put process {pid} back on the GPU (CUDA error {code}); it is still in host memory",
                f"try again: gpushare swap in {pid}; if that always fails, end it: gpushare stop {pid}",
                code="restore_refused",
            )
        reason = "the GPU has no room" if code == _OUT_OF_MEMORY else f"CUDA error {code}"
        raise OperationFailed(
            f"process {pid} could not be put back on the GPU ({reason}), and the driver does not try again: it is lost",
            f"end it: gpushare stop {pid}",
            code="job_lost",
        )

    def check_available(self) -> None:
        """Raise NotSupported if the driver's library, or a call of it, is missing."""
        for name in ("GetState", "Lock", "Checkpoint", "Restore", "Unlock"):
            self._driver_function(f"cuCheckpointProcess{name}")

    def state(self, pid: int) -> int | None:
        """Return RUNNING, LOCKED, CHECKPOINTED or FAILED; None: the driver does not tell, or does not know the process."""
        state = ctypes.c_int(-1)
        try:
            code = self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state), seconds=CALL_SECONDS)
        except (NotSupported, TimedOut):
            return None
        return state.value if code == SUCCESS else None

    def hangs(self, pid: int) -> bool:
        """Return whether a call for a process has not returned: it may take effect at any time."""
        before = self._hanging.get(pid)
        return before is not None and before.is_alive()

    def _call(self, name: str, pid: int, argument: Any, *, seconds: float) -> int:
        """Return the CUDA error code of a call for a process. In a thread: a hanging driver must not hang gpushare."""
        function = self._driver_function(name)
        if self.hangs(pid):
            # A hanging lock takes effect once its process continues: an unlock before that would be in vain.
            raise not_answered_error(pid, seconds)
        answers: list[int] = []
        # The thread's reference keeps the argument alive.
        thread = threading.Thread(target=lambda: answers.append(int(function(pid, argument))), daemon=True)
        thread.start()
        thread.join(seconds)
        if not answers:
            self._hanging[pid] = thread
            raise not_answered_error(pid, seconds)
        self._hanging.pop(pid, None)
        return answers[0]

    def _driver_function(self, name: str) -> Any:
        """Return a function of libcuda. Raises NotSupported: there is no libcuda, or no such function in it."""
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


def _uuid_bytes(uuid: str) -> Any:
    """Return the 16 bytes of ``GPU-ee331e42-...`` as CUuuid has them."""
    return (ctypes.c_ubyte * 16)(*bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")))


def _check_code(code: int, verb: str, pid: int) -> None:
    """Raise unless a call's answer is CUDA_SUCCESS; ``verb`` is the verb for people."""
    if code == SUCCESS:
        return
    if code == NOT_SUPPORTED:
        raise NotSupported(
            f"the driver cannot {verb} process {pid}: it is a client of MPS, or uses NCCL, CUDA IPC or managed memory",
            f"outside MPS it can be paused: gpushare pause {pid}",
            code="not_supported",
        )
    reason = "it is locked already" if code == ILLEGAL_STATE else f"CUDA error {code}"
    raise OperationFailed(
        f"the driver did not {verb} process {pid}: {reason}", "see: gpushare status", code="lock_refused"
    )
