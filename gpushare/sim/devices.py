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
    """Return every device that a process can name: GPUs without MIG, and MIG devices."""
    there = (gpu for gpu in state.gpus if not gpu.lost)
    return [Device(gpu, mig) for gpu in there for mig in (gpu.mig if gpu.mig_mode else [None])]


def visible(devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """Return the devices that CUDA shows for the entries of CUDA_VISIBLE_DEVICES.

    Empty: all of them, but of each MIG GPU only the first instance, as CUDA enumerates. Ordinals count
    that list; UUIDs may be cut short. The first entry that names nothing ends the list.
    """
    # The first of each GPU.
    enumerated = list({device.gpu.uuid: device for device in reversed(devices)}.values())[::-1]
    if not names:
        return enumerated
    shown: list[Device] = []
    for name in names:
        chosen = _device_named(devices, enumerated, name)
        if chosen is None:
            break
        if chosen not in shown:
            shown.append(chosen)
    return shown


def _device_named(devices: Sequence[Device], enumerated: Sequence[Device], name: str) -> Device | None:
    """Return the device of one entry of CUDA_VISIBLE_DEVICES: an ordinal in ``enumerated``, or a UUID cut short."""
    if name.isdigit():
        return enumerated[int(name)] if int(name) < len(enumerated) else None
    if len(name) < len("GPU-x"):
        return None
    return next(
        (device for device in devices if device.uuid.startswith(name) or device.gpu.uuid.startswith(name)), None
    )


def split(value: str | None) -> list[str]:
    """Return the entries of a CUDA_VISIBLE_DEVICES; none when it is not set."""
    return [entry.strip() for entry in (value or "").split(",") if entry.strip()]


def daemon_devices(state: SimulatedHostState, daemon: SimulatedDaemon) -> list[Device]:
    """Return what an MPS daemon offers to its clients, in its own numbering."""
    return visible(host_devices(state), daemon.visible)


# Minors of open-gpu-kernel-modules: 1 and 2 are mig/config and mig/monitor.
_FIRST, _PER_GPU, _PER_GPU_INSTANCE = 3, 135, 9


def capability_minor(gpu: int, place: InstanceIds) -> int:
    """Return the N of ``/dev/nvidia-caps/nvidia-capN`` (``/proc/driver/nvidia-caps/mig-minors``)."""
    first = _FIRST + _PER_GPU * gpu + _PER_GPU_INSTANCE * place[0]
    return first if place[1] is None else first + 1 + place[1]


def node_of(gpu: int, place: InstanceIds) -> str:
    """Return the device node of an instance."""
    return f"/dev/nvidia-caps/nvidia-cap{capability_minor(gpu, place)}"


def may_open_nodes(device: Device, uid: int) -> bool:
    """Let nvidia-modprobe see to the nodes of a device, as CUDA does first; return whether a user may open them."""
    if device.mig is None:
        return True
    instance = device.mig
    allowed = True
    for key in (place_key((instance.gpu_instance_id, None)), place_key(instance.place)):
        node = device.gpu.nodes.get(key)
        if node is not None and node.modify:
            del device.gpu.nodes[key]
        elif node is not None:
            readable = node.mode & (0o400 if uid == node.owner else 0o004)
            allowed = allowed and (uid in {0, *node.users} or bool(readable))
    return allowed


def forget_gone(gpu: SimulatedGpu) -> None:
    """Drop what was set at the nodes of instances that are gone: a new one at their place starts fresh."""
    if gpu.nodes:
        there = {place_key(place) for place in places_of(gpu)}
        gpu.nodes = {key: node for key, node in gpu.nodes.items() if key in there}


def places_of(gpu: SimulatedGpu) -> Iterator[InstanceIds]:
    """Yield the GPU instances of a GPU and their compute instances."""
    from gpushare.sim.mig import gpu_instances

    for instance in gpu_instances(gpu) if gpu.mig_mode else ():
        yield instance.gpu_instance_id, None
        for mig in gpu.mig:
            if mig.gpu_instance_id == instance.gpu_instance_id:
                yield mig.place


def place_key(place: InstanceIds) -> str:
    """Return the key of an instance's device node in `SimulatedGpu.nodes`: ``3``, or ``3/0`` for a compute instance in it."""
    gpu_instance, compute_instance = place
    return str(gpu_instance) if compute_instance is None else f"{gpu_instance}/{compute_instance}"
