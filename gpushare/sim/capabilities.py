"""The capability nodes of a simulated host's MIG instances: who may open them, and what nvidia-modprobe makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from gpushare.errors import NoPermission, NotFound
from gpushare.host.capabilities import Capability, NodeAccess, Place
from gpushare.sim.settled import changing, current
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedNode, StateFile

if TYPE_CHECKING:
    from gpushare.sim.devices import Device

# Minors of open-gpu-kernel-modules: 1 and 2 are mig/config and mig/monitor.
_FIRST, _PER_GPU, _PER_GPU_INSTANCE = 3, 135, 9
_DIRECTORY: Final = "/proc/driver/nvidia/capabilities"


class SimulatedCapabilities:
    """Stands in for `LocalCapabilities`."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def of_gpu(self, minor: int) -> Mapping[Place, Capability]:
        """Return the capabilities of a GPU's instances."""
        state = current(self._state_file)
        if not 0 <= minor < len(state.gpus) or not state.driver_loaded:
            return {}
        return {place: _capability(state, minor, place) for place in _places(state.gpus[minor])}

    def read(self, minor: int, gpu_instance: int, compute_instance: int | None = None) -> Capability | None:
        """Return one of them, or None when there is no such instance."""
        return self.of_gpu(minor).get((gpu_instance, compute_instance))

    def access(self, capability: Capability) -> NodeAccess | None:
        """Return who may open its node, or None when its instance is gone."""
        state = current(self._state_file)
        found = _find(state, capability)
        if found is None:
            return None
        node = found[0].nodes.get(found[1]) or SimulatedNode()
        return NodeAccess(owner=node.owner, mode=node.mode, users=tuple(node.users))

    def set_modify(self, capability: Capability, *, modify: bool) -> None:
        """Let nvidia-modprobe change its node, or not.

        Raises:
            NoPermission: not root.
            NotFound: its instance is gone.
        """
        with changing(self._state_file) as (state, _):
            _changed(state, capability, capability.path).modify = modify

    def set_access(self, capability: Capability, access: NodeAccess) -> None:
        """Decide who may open its node.

        Raises:
            NoPermission, NotFound: as `set_modify`.
        """
        with changing(self._state_file) as (state, _):
            node = _changed(state, capability, capability.node)
            node.owner, node.mode, node.users = access.owner, access.mode, list(access.users)


def capability_minor(gpu: int, place: Place) -> int:
    """Return the N of ``/dev/nvidia-caps/nvidia-capN`` (``/proc/driver/nvidia-caps/mig-minors``)."""
    first = _FIRST + _PER_GPU * gpu + _PER_GPU_INSTANCE * place[0]
    return first if place[1] is None else first + 1 + place[1]


def node_of(gpu: int, place: Place) -> str:
    """Return the device node of an instance."""
    return f"/dev/nvidia-caps/nvidia-cap{capability_minor(gpu, place)}"


def use(device: Device, uid: int) -> bool:
    """Let nvidia-modprobe see to the nodes of a device, as CUDA does first; return whether a user may open them."""
    if device.mig is None:
        return True
    instance = device.mig
    allowed = True
    for key in (_key((instance.gpu_instance_id, None)), _key((instance.gpu_instance_id, instance.compute_instance_id))):
        node = device.gpu.nodes.get(key)
        if node is not None and node.modify:
            del device.gpu.nodes[key]
        elif node is not None:
            allowed = allowed and _may_read(node, uid)
    return allowed


def forget_gone(gpu: SimulatedGpu) -> None:
    """Drop what was set at the nodes of instances that are gone: a new one at their place starts anew."""
    if gpu.nodes:
        there = {_key(place) for place in _places(gpu)}
        gpu.nodes = {key: node for key, node in gpu.nodes.items() if key in there}


def _may_read(node: SimulatedNode, uid: int) -> bool:
    if uid in {0, *node.users}:
        return True
    return bool(node.mode & (0o400 if uid == node.owner else 0o004))


def _places(gpu: SimulatedGpu) -> Iterator[Place]:
    from gpushare.sim.mig_layout import gpu_instances

    for instance in gpu_instances(gpu) if gpu.mig_mode else ():
        yield instance.gpu_instance_id, None
        for one in gpu.mig:
            if one.gpu_instance_id == instance.gpu_instance_id:
                yield one.gpu_instance_id, one.compute_instance_id


def _key(place: Place) -> str:
    return str(place[0]) if place[1] is None else f"{place[0]}/{place[1]}"


def _capability(state: SimulatedHostState, gpu: int, place: Place) -> Capability:
    node = state.gpus[gpu].nodes.get(_key(place))
    inner = "" if place[1] is None else f"/ci{place[1]}"
    return Capability(
        path=f"{_DIRECTORY}/gpu{gpu}/mig/gi{place[0]}{inner}/access",
        minor=capability_minor(gpu, place),
        modify=node is None or node.modify,
    )


def _find(state: SimulatedHostState, capability: Capability) -> tuple[SimulatedGpu, str] | None:
    for index, gpu in enumerate(state.gpus):
        for place in _places(gpu):
            if capability_minor(index, place) == capability.minor:
                return gpu, _key(place)
    return None


def _changed(state: SimulatedHostState, capability: Capability, path: str) -> SimulatedNode:
    if state.uid != 0:
        raise NoPermission(f"may not change {path}: Permission denied", "run it as root: sudo gpushare ...")
    found = _find(state, capability)
    if found is None:
        raise NotFound(
            f"there is no {path}", "see which instances are there: gpushare mig status", code="no_capability"
        )
    return found[0].nodes.setdefault(found[1], SimulatedNode())
