"""The processes on a simulated GPU and its load: the source of process lists, memory and sensors."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gpushare.base.units import MIB
from gpushare.gpu_models import GpuModel
from gpushare.host.capabilities import InstanceIds
from gpushare.mig.profile import Profile
from gpushare.sim.devices import daemon_devices
from gpushare.sim.nvml_abi import MPS_SERVER_BYTES, Code, Refused, Target, profile_of
from gpushare.sim.state import SimulatedHostState, SimulatedMigInstance, SimulatedProcess, now, on_gpu

_RESERVED_MIB: Final = 512
# DRAM bandwidth per SM utilization of our large matmul on an H200.
_DRAWN_BY_SMS: Final = 20 / 96
# Of an idle H200: 96 W of 700 W.
IDLE_POWER: Final = 0.137
# NVML_GPU_INSTANCE_PROFILE_1_SLICE.
_SMALLEST: Final = 0


class Resident(NamedTuple):
    """One entry of a process list: a process, or an MPS server, on one GPU."""

    pid: int
    memory_bytes: int
    sm_percent: float
    graphics: bool = False
    mps_client: bool = False
    # None: it has a whole GPU.
    instance_ids: InstanceIds | None = None
    # It has no context, only files open (`processes.holders_of`).
    holder: bool = False

    @property
    def gpu_instance_id(self) -> int | None:
        """Return the id of the GPU instance that it is in; None: none."""
        return None if self.instance_ids is None else self.instance_ids[0]


class Memory(NamedTuple):
    """The memory of a GPU or MIG device in bytes (nvmlMemory_v2_t)."""

    total: int
    reserved: int
    used: int

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.used


class GpmSample(NamedTuple):
    """The load of a GPU or MIG device when GPM sampled it, in percent of its SMs and of its memory bandwidth."""

    utilization: float
    bandwidth: float


def is_busy(process: SimulatedProcess, at: float) -> bool:
    """Return whether a process keeps the GPU busy: it runs, or the work that it queued before SIGSTOP still drains."""
    # Without its context or its channels, a process has no work on the GPU.
    if process.broken or process.channels_off or process.checkpoint:
        return False
    return process.stopped_at is None or at - process.stopped_at < process.queue_seconds


def residents(state: SimulatedHostState, target: Target) -> list[Resident]:
    """Return the processes and MPS servers on a GPU, or on one MIG device, by PID.

    ``sm_percent`` is the load of each process itself, also of an MPS client; NVML counts it for the server
    (`sm_percent_by_pid`).
    """
    at = now()
    entries = [
        Resident(
            pid=process.pid,
            memory_bytes=process.memory_bytes,
            sm_percent=process.sm_percent * process.busy_percent / 100 if is_busy(process, at) else 0,
            graphics=process.graphics,
            mps_client=process.mps_daemon is not None,
            instance_ids=process.instance_ids,
        )
        for process in state.processes
        if process.gpu_uuid == target.gpu.uuid and on_gpu(process)
    ]
    for daemon in state.daemons:
        # A server has a context on every device that its daemon offers.
        for device in daemon_devices(state, daemon):
            ids = device.mig.instance_ids if device.mig else None
            if device.gpu.uuid == target.gpu.uuid:
                entries += [Resident(server.pid, MPS_SERVER_BYTES, 0, instance_ids=ids) for server in daemon.servers]
    if target.instance is not None:
        entries = [entry for entry in entries if entry.instance_ids == target.instance.instance_ids]
    return sorted(entries, key=lambda entry: entry.pid)


def sm_percent_by_pid(state: SimulatedHostState, target: Target) -> dict[int, float]:
    """Return the SM utilization of each busy process in percent, as nvmlDeviceGetProcessUtilization attributes it.

    The work of MPS clients counts for their server (H200, driver 580). All together have at most 100.
    """
    servers = {process.pid: process.mps_server for process in state.processes if process.mps_server is not None}
    percents: dict[int, float] = {}
    for resident in residents(state, target):
        if resident.sm_percent:
            pid = servers.get(resident.pid, resident.pid)
            percents[pid] = percents.get(pid, 0.0) + resident.sm_percent
    scale = 100.0 / max(100.0, sum(percents.values()))
    return {pid: percent * scale for pid, percent in percents.items()}


def utilization(state: SimulatedHostState, target: Target) -> float:
    """Return the utilization of a GPU or MIG device in percent: the sum of its busy processes, at most 100.

    A process in a MIG device loads the GPU by that device's share of the SMs.
    """
    if target.instance is not None or not target.mig_enabled:
        return min(100.0, sum(resident.sm_percent for resident in residents(state, target)))
    load = 0.0
    for instance in target.gpu.mig:
        in_device = residents(state, target._replace(instance=instance))
        load += share_of_sms(target, instance) * sum(resident.sm_percent for resident in in_device)
    return min(100.0, load)


def gpm_sample(state: SimulatedHostState, target: Target) -> GpmSample:
    """Return the load of a GPU or MIG device; processes that state no bandwidth draw as much as our large matmul."""
    busy = utilization(state, target)
    stated = [] if target.mig_enabled else with_stated_bandwidth(state, target.gpu.uuid)
    by_others = max(0.0, busy - sum(process.sm_percent for process in stated))
    bandwidth = sum(process.bandwidth_percent or 0 for process in stated) + by_others * _DRAWN_BY_SMS
    return GpmSample(busy, min(100.0, bandwidth))


def with_stated_bandwidth(state: SimulatedHostState, uuid: str) -> list[SimulatedProcess]:
    """Return the busy processes of a GPU that state how much of the memory bandwidth they use."""
    processes = [
        process for process in state.processes if process.gpu_uuid == uuid and process.bandwidth_percent is not None
    ]
    at = now()
    return [process for process in processes if on_gpu(process) and is_busy(process, at)]


def memory_bandwidth(busy: float) -> int:
    """Return memory utilization in percent for an SM utilization: 20 at 96, as our large matmul on an H200."""
    return round(busy * _DRAWN_BY_SMS)


def memory_of(state: SimulatedHostState, target: Target) -> Memory:
    """Return the memory of a GPU or MIG device; Refused: NOT_SUPPORTED, the GPU has none of its own (unified memory)."""
    gpu_bytes, reserved = target.model.memory_bytes, target.model.memory_reserved_bytes
    if gpu_bytes is None:
        raise Refused(Code.NOT_SUPPORTED)
    of_gpu = residents(state, target._replace(instance=None))
    if target.instance is not None:
        total = profile_memory_mib(target.model, profile_of(target.model, target.instance)) * MIB
        # Memory belongs to the GPU instance; its compute instances share it.
        owner = target.instance.gpu_instance_id
        used = sum(resident.memory_bytes for resident in of_gpu if resident.gpu_instance_id == owner)
        return Memory(total, 0, min(used, total))
    if reserved is None:
        reserved = _RESERVED_MIB * MIB
    used = target.gpu.unlisted_bytes + sum(resident.memory_bytes for resident in of_gpu)
    return Memory(gpu_bytes, reserved, min(used, gpu_bytes - reserved))


def _by_memory_slices(model: GpuModel, profile: Profile, total: int | None) -> int:
    """Return a profile's part of a GPU's ``total`` (of memory or SMs) by its memory slices; 0 is unknown, as in NVML."""
    if profile.size is None or model.axis is None or total is None:
        return 0
    return total * profile.size // model.axis


def profile_memory_mib(model: GpuModel, profile: Profile) -> int:
    """Return the memory of a GPU instance in MiB: as published, else by memory slices in steps of 64 MiB."""
    if profile.memory_bytes is not None:
        return profile.memory_bytes // MIB
    return _by_memory_slices(model, profile, model.memory_mib) // 64 * 64


def profile_sms(model: GpuModel, profile: Profile) -> int:
    """Return the SM count of a GPU instance: as published, else by memory slices."""
    if profile.multiprocessors is not None:
        return profile.multiprocessors
    return _by_memory_slices(model, profile, model.multiprocessors)


def compute_sms(model: GpuModel, profile: Profile, slices: int) -> int:
    """Return the SM count of a compute instance with this many slices of a GPU instance.

    A slice has no more SMs than the smallest GPU instance: a 1c of a 3g has 16 of its 60 (H100, driver 580).
    """
    whole = profile_sms(model, profile)
    if slices == profile.slices:
        return whole
    smallest = next((other.multiprocessors for other in model.profiles if other.nvml_profile == _SMALLEST), None)
    by_slice = whole // profile.slices
    return slices * (by_slice if smallest is None else min(by_slice, smallest))


def device_sms(model: GpuModel, instance: SimulatedMigInstance) -> int:
    """Return the SM count of a MIG device."""
    from gpushare.sim import mig

    profile = profile_of(model, instance)
    return compute_sms(model, profile, len(mig.span(profile, instance)))


def share_of_sms(target: Target, instance: SimulatedMigInstance) -> float:
    """Return the share of the GPU's SMs that a MIG device has; 0: the catalogue does not say how many the GPU has."""
    return device_sms(target.model, instance) / (target.model.multiprocessors or math.inf)
