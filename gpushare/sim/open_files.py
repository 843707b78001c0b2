"""Which device nodes the processes of a simulated host have open, and what they hold by that. Pure on the state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpushare.host.open_files import OpenFiles
from gpushare.sim.activity import Resident
from gpushare.sim.capabilities import node_of
from gpushare.sim.devices import Device, daemon_devices
from gpushare.sim.liveness import on_gpu
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedProcess

_CONTROL: Final = "/dev/nvidiactl"
_UNIFIED_MEMORY: Final = "/dev/nvidia-uvm"


def open_files(state: SimulatedHostState, prefix: str) -> OpenFiles:
    """Return the open files that start with ``prefix``, as the state's user may see them."""
    found: dict[int, tuple[str, ...]] = {}
    complete = state.pid_namespace_is_host
    for pid, uid, paths in _everybody(state):
        if state.uid not in {0, uid}:
            complete = False
            continue
        mine = tuple(sorted(path for path in paths if path.startswith(prefix)))
        # The simulated processes are the host's: another namespace does not have them.
        if mine and state.pid_namespace_is_host:
            found[pid] = mine
    return OpenFiles(by_pid=dict(sorted(found.items())), complete=complete)


def holder_files(gpu: int, instance: tuple[int, int | None] | None = None) -> list[str]:
    """Return what a program without a CUDA context has open that looks at a GPU, or at an instance (NVML)."""
    return [_CONTROL, f"/dev/nvidia{gpu}", *_instance_nodes(gpu, *(instance or (None, None)))]


def holding(state: SimulatedHostState, gpu: int) -> list[Resident]:
    """Return who has the node of a GPU open without a context on it; also instances whose capability nodes are open.

    One entry per instance; its ids are None for the GPU's own node.
    """
    found = []
    for process in state.processes:
        if process.open_files and f"/dev/nvidia{gpu}" in process.open_files:
            found.append(Resident(process.pid, process.memory_bytes, 0, holder=True))
        for place in _held(state.gpus[gpu], gpu, process):
            found.append(Resident(process.pid, process.memory_bytes, 0, False, False, *place, holder=True))
    return found


def _held(gpu: SimulatedGpu, index: int, process: SimulatedProcess) -> Iterator[tuple[int, int | None]]:
    if not process.open_files:
        return
    places: set[tuple[int, int | None]] = {(one.gpu_instance_id, None) for one in (*gpu.mig, *gpu.bare)}
    places |= {(one.gpu_instance_id, one.compute_instance_id) for one in gpu.mig}
    for place in places:
        if node_of(index, place) in process.open_files:
            yield place


def _everybody(state: SimulatedHostState) -> Iterator[tuple[int, int, set[str]]]:
    indexes = {gpu.uuid: index for index, gpu in enumerate(state.gpus)}
    for process in state.processes:
        paths = set(process.open_files)
        if process.gpu_uuid in indexes and on_gpu(process):
            index = indexes[process.gpu_uuid]
            paths |= _context_files(
                index, process.gpu_instance_id, process.compute_instance_id, graphics=process.graphics
            )
        yield process.pid, process.uid, paths
    for daemon in state.daemons:
        devices = daemon_devices(state, daemon)
        for server in daemon.servers:
            paths = set().union(*(_device_files(indexes, device) for device in devices))
            yield server.pid, server.uid, paths


def _device_files(indexes: dict[str, int], device: Device) -> set[str]:
    mig = device.mig
    index = indexes[device.gpu.uuid]
    return _context_files(index, *(mig.gpu_instance_id, mig.compute_instance_id) if mig else (None, None))


def _context_files(
    gpu: int, gpu_instance: int | None, compute_instance: int | None, *, graphics: bool = False
) -> set[str]:
    paths = {_CONTROL, f"/dev/nvidia{gpu}", *_instance_nodes(gpu, gpu_instance, compute_instance)}
    return paths if graphics else paths | {_UNIFIED_MEMORY}


def _instance_nodes(gpu: int, gpu_instance: int | None, compute_instance: int | None) -> list[str]:
    if gpu_instance is None:
        return []
    nodes = [node_of(gpu, (gpu_instance, None))]
    return nodes if compute_instance is None else [*nodes, node_of(gpu, (gpu_instance, compute_instance))]
