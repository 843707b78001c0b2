"""libcuda's cuCheckpointProcess* on a simulated host: the state of each process, its memory, and what the driver refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from gpushare.host.checkpoint import (
    CHECKPOINTED,
    FAILED,
    ILLEGAL_STATE,
    LOCKED,
    NOT_SUPPORTED,
    RUNNING,
    SUCCESS,
    Checkpoint,
    RestoreArguments,
)
from gpushare.sim import activity
from gpushare.sim.current import changing, current
from gpushare.sim.job import target_of
from gpushare.sim.state import DEFAULT_SLICE_US, SimulatedHostState, SimulatedProcess, StateFile

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
OPERATING_SYSTEM: Final = 304
NOT_PERMITTED: Final = 800


class SimulatedCheckpoint:
    """Stands in for libcuda."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def cuInit(self, _flags: int) -> int:
        return SUCCESS

    def cuCheckpointProcessGetState(self, pid: int, answer: Any) -> int:
        process = current(self._state_file).process(pid)
        if process is None:
            return NOT_INITIALIZED
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int)).contents.value = process.checkpoint
        return SUCCESS

    def cuCheckpointProcessLock(self, pid: int, _arguments: Any) -> int:
        return self._change(pid, "lock", RUNNING, lambda _, process: _set_state(process, LOCKED))

    def cuCheckpointProcessUnlock(self, pid: int, _arguments: Any) -> int:
        return self._change(pid, "unlock", LOCKED, lambda _, process: _set_state(process, RUNNING))

    def cuCheckpointProcessCheckpoint(self, pid: int, _arguments: Any) -> int:
        return self._change(pid, "checkpoint", LOCKED, _move_to_host)

    def cuCheckpointProcessRestore(self, pid: int, arguments: Any) -> int:
        restore = ctypes.cast(arguments, ctypes.POINTER(RestoreArguments)).contents
        # A NULL pointer has no slice.
        pairs = restore.gpuPairs[: restore.gpuPairsCount] if restore.gpuPairsCount else []
        new_uuids = {bytes(pair.old).hex(): bytes(pair.new).hex() for pair in pairs}
        return self._change(pid, "restore", CHECKPOINTED, lambda state, process: _restore(state, process, new_uuids))

    def _change(self, pid: int, call: str, required_state: int, change: Callable[..., int]) -> int:
        """Let ``change`` carry out a call, if the process is in the state that the call requires; return the CUresult."""
        with changing(self._state_file) as (state, _):
            process = state.process(pid)
            if process is None:
                return NOT_INITIALIZED
            if not state.may_touch(process.uid):
                return NOT_PERMITTED
            if process.mps_daemon is not None or process.gpu_instance_id is not None:
                return NOT_SUPPORTED
            if call in state.checkpoint_faults:
                return state.checkpoint_faults[call]
            if process.checkpoint == FAILED:
                return OPERATING_SYSTEM
            if process.checkpoint != required_state:
                return ILLEGAL_STATE
            return change(state, process)


def open_checkpoint(state_file: StateFile) -> Checkpoint:
    return Checkpoint(SimulatedCheckpoint(state_file))


def _set_state(process: SimulatedProcess, value: int) -> int:
    """Set the checkpoint state of a process; return the CUresult of success."""
    process.checkpoint = value
    return SUCCESS


def _move_to_host(_state: SimulatedHostState, process: SimulatedProcess) -> int:
    """Move the memory of a process from its GPU to the host; return the CUresult."""
    process.image_bytes, process.memory_bytes = process.memory_bytes, 0
    return _set_state(process, CHECKPOINTED)


def _restore(state: SimulatedHostState, process: SimulatedProcess, new_uuids: dict[str, str]) -> int:
    """Move the memory of a process back to its GPU, or to the one that ``new_uuids`` (old: new) has in its place.

    Return the CUresult. Without room on the GPU the process fails for good.
    """
    gpus = {gpu.uuid.removeprefix("GPU-").replace("-", ""): gpu for gpu in state.gpus}
    old = next((gpu for gpu in state.gpus if gpu.uuid == process.gpu_uuid), None)
    target = old
    if new_uuids:
        # As H100s answer (driver 580): every GPU of the host is named, on both sides.
        if set(new_uuids) != set(gpus) or set(new_uuids.values()) != set(gpus):
            return INVALID_VALUE
        target = next((gpus[new] for uuid, new in new_uuids.items() if gpus[uuid] is old), None)
    if old is None or target is None or target.model != old.model:
        return INVALID_VALUE
    process.gpu_uuid = target.uuid
    if process.image_bytes > activity.memory_of(state, target_of(state, process)).free:
        process.gpu_uuid = old.uuid
        process.checkpoint = FAILED
        return OUT_OF_MEMORY
    process.memory_bytes, process.image_bytes = process.image_bytes, 0
    # A restore sets half of the default, whatever the slice was before: seen on an H200 (driver 580.159.04).
    process.slices = {"compute": DEFAULT_SLICE_US // 2}
    return _set_state(process, LOCKED)
