"""Entry points of the simulated NVML: who is on a GPU, and what each of them uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpushare.sim import activity
from gpushare.sim.activity import Resident
from gpushare.sim.nvml_abi import (
    NO_INSTANCE,
    Code,
    On,
    Refused,
    Target,
    check_version,
    entry_point,
    number,
    put,
    put_fields,
    target_of,
)
from gpushare.sim.state import now

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

# MPS clients are in the compute list and in the MPS list, their server in the compute list
# (H200, driver 580.159.04).
_LISTS: Final[dict[str, Callable[[Resident], bool]]] = {
    "Compute": lambda one: not one.graphics,
    "Graphics": lambda one: one.graphics,
    "MPSCompute": lambda one: one.mps_client,
}


def _register(kind: str, wanted: Callable[[Resident], bool]) -> None:
    name = f"nvmlDeviceGet{kind}RunningProcesses"

    @entry_point(f"{name}_v3", f"{name}_v2", name, on=On.DEVICE)
    def running(library: SimulatedLibrary, target: Target, count: Any, infos: Any) -> None:
        _fill(count, infos, [_info(one) for one in _seen(library, target) if wanted(one)])


for _kind, _wanted in _LISTS.items():
    _register(_kind, _wanted)


def _seen(library: SimulatedLibrary, target: Target) -> list[Resident]:
    # NVML's PIDs are the host's: in another PID namespace the list is empty.
    if not library.state.pid_namespace_is_host:
        return []
    return activity.residents(library.state, target)


def _info(one: Resident) -> dict[str, int]:
    return {
        "pid": one.pid,
        "usedGpuMemory": one.memory_bytes,
        "gpuInstanceId": NO_INSTANCE if one.gpu_instance_id is None else one.gpu_instance_id,
        "computeInstanceId": NO_INSTANCE if one.compute_instance_id is None else one.compute_instance_id,
    }


def _fill(count: Any, infos: Any, entries: list[dict[str, int]]) -> None:
    """Fill a caller's array; tell the size needed when it is too small (INSUFFICIENT_SIZE)."""
    if count is None:
        raise Refused(Code.INVALID_ARGUMENT)
    room = number(target_of(count)) if infos is not None else 0
    put(count, len(entries))
    if room < len(entries):
        raise Refused(Code.INSUFFICIENT_SIZE)
    if entries:
        array = infos._obj if hasattr(infos, "_obj") else infos
        for index, entry in enumerate(entries):
            put_fields(array[index], entry)


@entry_point("nvmlDeviceGetProcessUtilization", on=On.GPU)
def _utilization(library: SimulatedLibrary, target: Target, infos: Any, count: Any, seen_until: Any) -> None:
    _fill(count, infos, _samples(library, target, number(seen_until)))


@entry_point("nvmlDeviceGetProcessesUtilizationInfo", on=On.GPU)
def _utilization_info(library: SimulatedLibrary, target: Target, argument: Any) -> None:
    struct = target_of(argument)
    check_version(struct)
    entries = _samples(library, target, struct.lastSeenTimeStamp)
    room = struct.processSamplesCount if struct.procUtilArray else 0
    struct.processSamplesCount = len(entries)
    if room < len(entries):
        raise Refused(Code.INSUFFICIENT_SIZE)
    struct.lastSeenTimeStamp = max(entry["timeStamp"] for entry in entries)
    for index, entry in enumerate(entries):
        put_fields(struct.procUtilArray[index], entry)


def _samples(library: SimulatedLibrary, target: Target, seen_until: int) -> list[dict[str, int]]:
    """Return the samples newer than a time in microseconds.

    Raises:
        Refused: NOT_SUPPORTED with MIG on; NOT_FOUND when there is none, the GPU is idle.
    """
    if target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    stamp = int(now() * 1e6)
    found = activity.samples(library.state, target) if library.state.pid_namespace_is_host else {}
    if not found or stamp <= seen_until:
        raise Refused(Code.NOT_FOUND)
    return [
        {"pid": pid, "timeStamp": stamp, "smUtil": round(busy), "memUtil": activity.memory_bandwidth(busy)}
        for pid, busy in sorted(found.items())
    ]
