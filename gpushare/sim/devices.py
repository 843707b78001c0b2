"""Which devices CUDA_VISIBLE_DEVICES shows on a simulated host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpushare.base.values import dataclass
from gpushare.host.capabilities import InstanceIds
from gpushare.sim.state import SimulatedDaemon, SimulatedGpu, SimulatedHostState, SimulatedMigInstance


@dataclass(frozen=True)
class Device:
    """One CUDA device: a GPU, or a compute instance of it."""

    gpu: SimulatedGpu
    mig: SimulatedMigInstance | None = None

    @property
    def uuid(self) -> str:
        """Return ``GPU-...`` or ``MIG-...``."""
        return self.mig.uuid if self.mig else self.gpu.uuid


def host_devices(state: SimulatedHostState) -> list[Device]:
    """Return every device that a process can name: GPUs without MIG, and the MIG devices of the others."""
    devices = []
    for gpu in state.gpus:
        if not gpu.lost:
            devices += [Device(gpu, mig) for mig in gpu.mig] if gpu.mig_mode else [Device(gpu)]
    return devices


def visible_devices(devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """Return the devices that CUDA shows for the entries of CUDA_VISIBLE_DEVICES (none: all that CUDA enumerates).

    An entry is an ordinal in what CUDA enumerates: the GPUs, of one in MIG mode its first MIG device. Or it is the
    beginning of a UUID, also of another MIG device. The first entry that names no device ends the list.
    """
    first_of_gpu: dict[str, Device] = {}
    for device in devices:
        first_of_gpu.setdefault(device.gpu.uuid, device)
    enumerated = list(first_of_gpu.values())
    if not names:
        return enumerated
    shown: list[Device] = []
    for name in names:
        named: list[Device] = []
        if name.isdigit():
            named = enumerated[int(name) :]
        elif len(name) > len("GPU-"):
            named = [each for each in devices if each.uuid.startswith(name) or each.gpu.uuid.startswith(name)]
        if not named:
            break
        shown += [device for device in named[:1] if device not in shown]
    return shown


def split_names(value: str | None) -> list[str]:
    """Return the entries of a list of devices (CUDA_VISIBLE_DEVICES): indexes or UUIDs; none when it is not set."""
    return [entry.strip() for entry in (value or "").split(",") if entry.strip()]


def daemon_devices(state: SimulatedHostState, daemon: SimulatedDaemon) -> list[Device]:
    """Return the devices that an MPS daemon offers to its clients, in the order of their ordinals there."""
    return visible_devices(host_devices(state), daemon.visible)


# Minors of open-gpu-kernel-modules: 1 and 2 are mig/config and mig/monitor.
_FIRST, _PER_GPU, _PER_GPU_INSTANCE = 3, 135, 9


def capability_minor(gpu: int, ids: InstanceIds) -> int:
    """Return the N of ``/dev/nvidia-caps/nvidia-capN`` (``/proc/driver/nvidia-caps/mig-minors``)."""
    gpu_instance, compute_instance = ids
    minor = _FIRST + _PER_GPU * gpu + _PER_GPU_INSTANCE * gpu_instance
    return minor if compute_instance is None else minor + 1 + compute_instance


def node_of(gpu: int, ids: InstanceIds) -> str:
    return f"/dev/nvidia-caps/nvidia-cap{capability_minor(gpu, ids)}"


def nodes_of(gpu: int, ids: InstanceIds | None) -> list[str]:
    """Return the device nodes that a process needs for a compute instance, a GPU instance, or (None) a whole GPU."""
    nodes = [f"/dev/nvidia{gpu}"]
    if ids is not None:
        gpu_instance, compute_instance = ids
        nodes.append(node_of(gpu, (gpu_instance, None)))
        if compute_instance is not None:
            nodes.append(node_of(gpu, ids))
    return nodes


def open_nodes(device: Device, uid: int) -> bool:
    """Open the capability nodes of a MIG device as CUDA does; return whether the user may.

    CUDA first runs nvidia-modprobe, which puts a node back that has DeviceFileModify set: then everybody may.
    """
    if device.mig is None:
        return True
    nodes = device.gpu.nodes
    allowed = True
    for ids in ((device.mig.gpu_instance_id, None), device.mig.instance_ids):
        node = nodes.get(node_key(ids))
        if node is not None and node.modify:
            del nodes[node_key(ids)]
        elif node is not None:
            allowed = allowed and node.may_read(uid)
    return allowed


def drop_stale_nodes(gpu: SimulatedGpu) -> None:
    """Drop the changed nodes of instances that are gone: a new instance with the same ids starts with default nodes."""
    if gpu.nodes:
        present = {node_key(ids) for ids in ids_of_instances(gpu)}
        gpu.nodes = {key: node for key, node in gpu.nodes.items() if key in present}


def ids_of_instances(gpu: SimulatedGpu) -> Iterator[InstanceIds]:
    """Yield the ids of each GPU instance of a GPU, and then those of its compute instances."""
    for gpu_instance in sorted({instance.gpu_instance_id for instance in (*gpu.mig, *gpu.bare)}):
        yield gpu_instance, None
        yield from (mig.instance_ids for mig in gpu.mig if mig.gpu_instance_id == gpu_instance)


def node_key(ids: InstanceIds) -> str:
    """Return the key of an instance in `SimulatedGpu.nodes`: ``3``, or ``3/0`` for a compute instance in it."""
    gpu_instance, compute_instance = ids
    return str(gpu_instance) if compute_instance is None else f"{gpu_instance}/{compute_instance}"
