"""The machine of a simulated host: ``/dev/shm``, limits, environments and the kernel's log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from gpushare.base.errors import NoPermission, NotFound
from gpushare.host.capabilities import Capabilities, Capability, InstanceIds, NodeAccess
from gpushare.host.machine import Load, Machine, Space, Xid
from gpushare.sim.current import changing, current
from gpushare.sim.devices import capability_minor, ids_of_instances, node_key
from gpushare.sim.state import SimulatedHostState, SimulatedNode, StateFile


class SimulatedMachine(Machine):
    """Stands in for `Machine` on a simulated host."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def shared_memory(self) -> Space | None:
        size = current(self._state_file).shared_memory_bytes
        return Space(size, size)

    def free_memory(self, pid: int) -> int:  # noqa: ARG002 - a simulated host has no cgroups
        """Return the host's memory less the images of checkpointed processes."""
        state = current(self._state_file)
        return state.host_memory_bytes - sum(process.image_bytes for process in state.processes)

    def descriptor_limit(self, pid: int) -> int | None:
        """Return the limit of a process; None for PID 0, which stands for a process whose PID is not known."""
        return current(self._state_file).descriptor_limit if pid else None

    def environments(self, names: Collection[str]) -> Mapping[int, Mapping[str, str]]:
        """Return these variables by PID, of the processes that this user may look at."""
        state = current(self._state_file)
        environments = {}
        for process in state.processes:
            chosen = {name: process.environment[name] for name in names if name in process.environment}
            if chosen and state.may_touch(process.uid):
                environments[process.pid] = chosen
        return environments

    def xids(self) -> tuple[Xid, ...] | None:
        """Return the Xids that `gpushare sim fault xid` set; None: only root reads the kernel's log."""
        state = current(self._state_file)
        if not state.root:
            return None
        # The kernel writes "0000:01:00" where NVML has "00000000:01:00.0".
        return tuple(Xid(number, gpu.pci_bus_id[4:-2]) for gpu in state.gpus for number in gpu.xids)

    def resident_bytes(self, pid: int) -> int | None:
        """Return what a process has in host memory: the image of its GPU memory, while it is checkpointed."""
        process = current(self._state_file).process(pid)
        return None if process is None else process.image_bytes

    def load(self) -> Load | None:
        """Return None: a simulated host has no cores of its own."""
        return None


_DIRECTORY: Final = "/proc/driver/nvidia/capabilities"


class SimulatedCapabilities(Capabilities):
    """Stands in for `Capabilities`."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def of_gpu(self, minor: int) -> Mapping[InstanceIds, Capability]:
        """Return the capabilities of a GPU's instances by their ids; none: the driver or the GPU is not there."""
        state = current(self._state_file)
        if not 0 <= minor < len(state.gpus) or not state.driver_loaded:
            return {}
        return {ids: _capability(state, minor, ids) for ids in ids_of_instances(state.gpus[minor])}

    def read(self, minor: int, gpu_instance: int, compute_instance: int | None = None) -> Capability | None:
        return self.of_gpu(minor).get((gpu_instance, compute_instance))

    def access(self, capability: Capability) -> NodeAccess | None:
        """Return who may open the node of a capability; None: its instance is gone."""
        node = _stored_node(current(self._state_file), capability)
        return None if node is None else NodeAccess(owner=node.owner, mode=node.mode, users=tuple(node.users))

    def set_modify(self, capability: Capability, *, modify: bool) -> None:
        """Set whether nvidia-modprobe may put the node back, which opens it to everybody (DeviceFileModify)."""
        with changing(self._state_file) as (state, _):
            _node_to_change(state, capability, capability.path).modify = modify

    def set_access(self, capability: Capability, access: NodeAccess) -> None:
        with changing(self._state_file) as (state, _):
            node = _node_to_change(state, capability, capability.node)
            node.owner, node.mode, node.users = access.owner, access.mode, list(access.users)


def _capability(state: SimulatedHostState, gpu: int, ids: InstanceIds) -> Capability:
    """Return the capability of an instance as the driver shows it in ``/proc``."""
    gpu_instance, compute_instance = ids
    node = state.gpus[gpu].nodes.get(node_key(ids))
    inner = "" if compute_instance is None else f"/ci{compute_instance}"
    return Capability(
        path=f"{_DIRECTORY}/gpu{gpu}/mig/gi{gpu_instance}{inner}/access",
        minor=capability_minor(gpu, ids),
        modify=node is None or node.modify,
    )


def _stored_node(state: SimulatedHostState, capability: Capability) -> SimulatedNode | None:
    """Return the node of a capability in the state, added with its defaults if it is not there; None: its instance is gone."""
    for index, gpu in enumerate(state.gpus):
        for ids in ids_of_instances(gpu):
            if capability_minor(index, ids) == capability.minor:
                return gpu.nodes.setdefault(node_key(ids), SimulatedNode())
    return None


def _node_to_change(state: SimulatedHostState, capability: Capability, path: str) -> SimulatedNode:
    """Return the node of a capability; ``path`` is named in errors: NoPermission for a user, NotFound if it is gone."""
    if not state.root:
        raise NoPermission(f"may not change {path}: Permission denied", "run it as root: sudo gpushare ...")
    node = _stored_node(state, capability)
    if node is None:
        raise NotFound(
            f"there is no {path}", "see which instances are there: gpushare mig status", code="no_capability"
        )
    return node
