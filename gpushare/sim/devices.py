"""Which devices CUDA_VISIBLE_DEVICES shows on a simulated host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    devices: list[Device] = []
    for gpu in state.gpus:
        if gpu.lost:
            continue
        if gpu.mig_mode:
            devices.extend(Device(gpu, mig) for mig in gpu.mig)
        else:
            devices.append(Device(gpu))
    return devices


def visible(devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """Return the devices that CUDA shows for the entries of CUDA_VISIBLE_DEVICES.

    Empty: all of them, but of each MIG GPU only the first instance, as CUDA enumerates. Ordinals count
    that list; UUIDs may be cut short. The first entry that names nothing ends the list.
    """
    enumerated: list[Device] = []
    for device in devices:
        if device.mig is None or all(other.gpu.uuid != device.gpu.uuid for other in enumerated):
            enumerated.append(device)
    if not names:
        return enumerated
    found: list[Device] = []
    for name in names:
        chosen = _named(devices, enumerated, name)
        if chosen is None:
            break
        if chosen not in found:
            found.append(chosen)
    return found


def _named(devices: Sequence[Device], enumerated: Sequence[Device], name: str) -> Device | None:
    if name.isdigit():
        return enumerated[int(name)] if int(name) < len(enumerated) else None
    if len(name) < len("GPU-x"):
        return None
    matching = [device for device in devices if device.uuid.startswith(name) or device.gpu.uuid.startswith(name)]
    return matching[0] if matching else None


def split(value: str | None) -> list[str]:
    """Return the entries of a CUDA_VISIBLE_DEVICES; none when it is not set."""
    return [entry.strip() for entry in (value or "").split(",") if entry.strip()]


def daemon_devices(state: SimulatedHostState, daemon: SimulatedDaemon) -> list[Device]:
    """Return what an MPS daemon offers to its clients, in its own numbering."""
    return visible(host_devices(state), daemon.visible)
