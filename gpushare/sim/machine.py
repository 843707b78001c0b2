"""The machine of a simulated host: ``/dev/shm``, limits, environments and the kernel's log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from gpushare.base.errors import NoPermission, NotFound
from gpushare.host.capabilities import Capabilities, Capability, InstanceIds, NodeAccess
from gpushare.host.machine import Load, Machine, Space, Xid
from gpushare.sim.activity import is_busy
from gpushare.sim.current import changing, current
from gpushare.sim.devices import capability_minor, place_key, places_of
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedNode, StateFile, now


class SimulatedMachine(Machine):
    """Stands in for `Machine` on a simulated host."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file
        # Seconds of work of all cores up to the last look, and when that was: the number of processes changes.
        self._busy_seconds, self._looked_at = 0.0, 0.0

    def shared_memory(self) -> Space | None:
        size = current(self._state_file).shared_memory_bytes
        return Space(size, size)

    def free_memory(self, pid: int) -> int | None:
        """Return what the machine has less the images of what is swapped out."""
        state = current(self._state_file)
        return state.host_memory_bytes - sum(process.image_bytes for process in state.processes) if pid else None

    def descriptor_limit(self, pid: int) -> int | None:
        return current(self._state_file).descriptor_limit if pid else None

    def environments(self, names: Collection[str]) -> Mapping[int, Mapping[str, str]]:
        """Return these variables by PID, of the processes that this user may look at."""
        state = current(self._state_file)
        mine = (process for process in state.processes if state.may(process.uid))
        chosen = {
            process.pid: {name: process.environment[name] for name in names if name in process.environment}
            for process in mine
        }
        return {pid: variables for pid, variables in chosen.items() if variables}

    def xids(self) -> tuple[Xid, ...] | None:
        """Return the Xids that `gpushare sim fault xid` set; only root reads the log."""
        state = current(self._state_file)
        if not state.root:
            return None
        return tuple(Xid(number, gpu.pci_bus_id[4:-2]) for gpu in state.gpus for number in gpu.xids)

    def resident_bytes(self, pid: int) -> int | None:
        """Return what a process has in host memory: its GPU memory, while it is out."""
        process = current(self._state_file).process(pid)
        return None if process is None else process.image_bytes

    def load(self) -> Load | None:
        """Return a machine of 64 cores on which each process that works keeps one busy."""
        state = current(self._state_file)
        working = sum(1 for process in state.processes if process.sm_percent and is_busy(process, now()))
        passed, total = max(0.0, now() - state.created_at), 2 * state.host_memory_bytes
        self._busy_seconds += working * max(0.0, passed - self._looked_at)
        self._looked_at = passed
        free = self.free_memory(1) or 0
        return Load(self._busy_seconds, _CORES * passed, total, free, float(working), _CORES)


_CORES: Final = 64
_DIRECTORY: Final = "/proc/driver/nvidia/capabilities"


class SimulatedCapabilities(Capabilities):
    """Stands in for `Capabilities`."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def of_gpu(self, minor: int) -> Mapping[InstanceIds, Capability]:
        state = current(self._state_file)
        if not 0 <= minor < len(state.gpus) or not state.driver_loaded:
            return {}
        return {place: _capability(state, minor, place) for place in places_of(state.gpus[minor])}

    def read(self, minor: int, gpu_instance: int, compute_instance: int | None = None) -> Capability | None:
        return self.of_gpu(minor).get((gpu_instance, compute_instance))

    def access(self, capability: Capability) -> NodeAccess | None:
        """Return who may open the node of a capability; None: its instance is gone."""
        state = current(self._state_file)
        place = _find_node(state, capability)
        if place is None:
            return None
        node = place[0].nodes.get(place[1]) or SimulatedNode()
        return NodeAccess(owner=node.owner, mode=node.mode, users=tuple(node.users))

    def set_modify(self, capability: Capability, *, modify: bool) -> None:
        with changing(self._state_file) as (state, _):
            _node_to_change(state, capability, capability.path).modify = modify

    def set_access(self, capability: Capability, access: NodeAccess) -> None:
        with changing(self._state_file) as (state, _):
            node = _node_to_change(state, capability, capability.node)
            node.owner, node.mode, node.users = access.owner, access.mode, list(access.users)


def _capability(state: SimulatedHostState, gpu: int, place: InstanceIds) -> Capability:
    """Return the capability of an instance as the driver shows it in ``/proc``."""
    node = state.gpus[gpu].nodes.get(place_key(place))
    inner = "" if place[1] is None else f"/ci{place[1]}"
    return Capability(
        path=f"{_DIRECTORY}/gpu{gpu}/mig/gi{place[0]}{inner}/access",
        minor=capability_minor(gpu, place),
        modify=node is None or node.modify,
    )


def _find_node(state: SimulatedHostState, capability: Capability) -> tuple[SimulatedGpu, str] | None:
    """Return the GPU whose instance has this capability, and the instance's key in its ``nodes``."""
    for index, gpu in enumerate(state.gpus):
        for place in places_of(gpu):
            if capability_minor(index, place) == capability.minor:
                return gpu, place_key(place)
    return None


def _node_to_change(state: SimulatedHostState, capability: Capability, path: str) -> SimulatedNode:
    """Return what is set at the node of a capability; ``path`` is named in errors."""
    if not state.root:
        raise NoPermission(f"may not change {path}: Permission denied", "run it as root: sudo gpushare ...")
    place = _find_node(state, capability)
    if place is None:
        raise NotFound(
            f"there is no {path}", "see which instances are there: gpushare mig status", code="no_capability"
        )
    return place[0].nodes.setdefault(place[1], SimulatedNode())
