"""libcuda's cuCheckpointProcess* on a simulated host: the state of each process, its memory, and what the driver refuses."""

from __future__ import annotations

import ctypes
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
        return self._move(pid, "lock", RUNNING, lambda _state, process: _set_state(process, LOCKED))

    def cuCheckpointProcessUnlock(self, pid: int, _arguments: Any) -> int:
        return self._move(pid, "unlock", LOCKED, lambda _state, process: _set_state(process, RUNNING))

    def cuCheckpointProcessCheckpoint(self, pid: int, _arguments: Any) -> int:
        return self._move(pid, "checkpoint", LOCKED, _move_out)

    def cuCheckpointProcessRestore(self, pid: int, arguments: Any) -> int:
        """Move it back, or to the GPU that the pairs name: without room it fails, then and ever after."""
        restore = ctypes.cast(arguments, ctypes.POINTER(RestoreArguments)).contents
        pairs = (
            {bytes(pair.old).hex(): bytes(pair.new).hex() for pair in restore.gpuPairs[: restore.gpuPairsCount]}
            if restore.gpuPairsCount
            else {}
        )
        return self._move(pid, "restore", CHECKPOINTED, lambda state, process: _restore(state, process, pairs))

    def _move(self, pid: int, name: str, required_state: int, move: Any) -> int:
        """Call ``move`` if the process may go on from ``required_state`` now; return the CUresult."""
        with changing(self._state_file) as (state, _):
            process = state.process(pid)
            if process is None:
                return NOT_INITIALIZED
            if not state.may(process.uid):
                return NOT_PERMITTED
            if process.mps_daemon is not None or process.gpu_instance_id is not None:
                return NOT_SUPPORTED
            if name in state.checkpoint_faults:
                return state.checkpoint_faults[name]
            if process.checkpoint == FAILED:
                return OPERATING_SYSTEM
            if process.checkpoint != required_state:
                return ILLEGAL_STATE
            code: int = move(state, process)
            return code


def open_checkpoint(state_file: StateFile) -> Checkpoint:
    return Checkpoint(SimulatedCheckpoint(state_file))


def _set_state(process: SimulatedProcess, value: int) -> int:
    process.checkpoint = value
    return SUCCESS


def _move_out(_state: SimulatedHostState, process: SimulatedProcess) -> int:
    process.image_bytes, process.memory_bytes = process.memory_bytes, 0
    return _set_state(process, CHECKPOINTED)


def _plain_uuid(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")


def _restore(state: SimulatedHostState, process: SimulatedProcess, pairs: dict[str, str]) -> int:
    """Bring a process back, to the GPU that ``pairs`` (old UUID: new UUID) name for its own; return the CUresult."""
    gpus = {_plain_uuid(gpu.uuid): gpu for gpu in state.gpus}
    if pairs:
        target = gpus.get(pairs.get(_plain_uuid(process.gpu_uuid), ""))
        # As H100s answer (driver 580): every GPU of the host is named, on both sides.
        if set(pairs) != set(gpus) or set(pairs.values()) != set(gpus) or target is None:
            return INVALID_VALUE
        if target.model != gpus[_plain_uuid(process.gpu_uuid)].model:
            return INVALID_VALUE
        old_uuid, process.gpu_uuid = process.gpu_uuid, target.uuid
        code = _restore_memory(state, process)
        if code != SUCCESS:
            process.gpu_uuid = old_uuid
        return code
    return _restore_memory(state, process)


def _restore_memory(state: SimulatedHostState, process: SimulatedProcess) -> int:
    """Give a process its memory on the GPU back; without room it fails for good. Return the CUresult."""
    total, reserved, used = activity.memory_of(state, target_of(state, process))
    if process.image_bytes > total - reserved - used:
        _set_state(process, FAILED)
        return OUT_OF_MEMORY
    process.memory_bytes, process.image_bytes = process.image_bytes, 0
    # As on an H200 (driver 580.159.04): whatever slice it had.
    process.slices = {"compute": DEFAULT_SLICE_US // 2}
    return _set_state(process, LOCKED)
