"""The processes on a simulated GPU and its load: the source of process lists, memory and sensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from gpushare.base.units import MIB
from gpushare.mig.profile import Profile
from gpushare.sim.nvml_abi import MPS_SERVER_BYTES, Code, Refused, Target
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedMigInstance, SimulatedProcess, now, on_gpu

_RESERVED_MIB: Final = 512
# DRAM bandwidth per SM utilization of our large matmul on an H200.
_DRAWN_BY_SMS: Final = 20 / 96
# Of an idle H200: 96 W of 700 W.
IDLE_POWER: Final = 0.137


class Resident(NamedTuple):
    """One entry of a process list: a process, or an MPS server, on one GPU."""

    pid: int
    memory_bytes: int
    sm_percent: float
    graphics: bool = False
    mps_client: bool = False
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    # It has no context, only files open (`processes.holders_of`).
    holder: bool = False

    @property
    def place(self) -> tuple[int | None, int | None]:
        """Return the ids of its GPU and compute instance."""
        return self.gpu_instance_id, self.compute_instance_id


def is_busy(process: SimulatedProcess, at: float) -> bool:
    """Return whether a process keeps the GPU busy: it runs, or what it queued before SIGSTOP still drains."""
    # A client that lost its context has no work on the GPU any more.
    if process.broken or process.channels_off or process.checkpoint:
        return False
    return process.stopped_at is None or at - process.stopped_at < process.queue_seconds


def residents(state: SimulatedHostState, target: Target) -> list[Resident]:
    """Return the processes on a GPU, or on one MIG device, by PID: processes and MPS servers.

    ``sm_percent`` is what nvidia-smi pmon would show alone; 0 for one that is not busy. A client of
    an MPS server has its own here, see `samples` for what NVML attributes to whom.
    """
    at = now()
    entries = [
        Resident(
            pid=process.pid,
            memory_bytes=process.memory_bytes,
            sm_percent=process.sm_percent * process.busy_percent / 100 if is_busy(process, at) else 0,
            graphics=process.graphics,
            mps_client=process.mps_daemon is not None,
            gpu_instance_id=process.gpu_instance_id,
            compute_instance_id=process.compute_instance_id,
        )
        for process in state.processes
        if process.gpu_uuid == target.gpu.uuid and on_gpu(process)
    ]
    entries.extend(_resident_servers(state, target.gpu))
    instance = target.instance
    on_target = [entry for entry in entries if instance is None or entry.place == instance.place]
    return sorted(on_target, key=lambda entry: entry.pid)


def samples(state: SimulatedHostState, target: Target) -> dict[int, float]:
    """Return SM utilization in percent by PID, as nvmlDeviceGetProcessUtilization attributes it.

    Idle ones are missing. Work of MPS clients counts for their server (H200, driver 580), and
    together nobody has more than the GPU.
    """
    servers = {process.pid: process.mps_server for process in state.processes if process.mps_server is not None}
    percents: dict[int, float] = {}
    for resident in residents(state, target):
        if resident.sm_percent:
            pid = servers.get(resident.pid, resident.pid)
            percents[pid] = percents.get(pid, 0.0) + resident.sm_percent
    total = sum(percents.values())
    return {pid: percent * min(1.0, 100.0 / total) for pid, percent in percents.items()} if total else {}


def utilization(state: SimulatedHostState, target: Target) -> float:
    """Return the utilization of a GPU or MIG device in percent: the sum of its busy processes, at most 100.

    A process in a MIG device loads the GPU by that device's share of the SMs.
    """
    if target.instance is not None or not target.mig_enabled:
        return min(100.0, sum(resident.sm_percent for resident in residents(state, target)))
    total = target.model.multiprocessors or math.inf
    shares: dict[tuple[int | None, int | None], float] = {
        instance.place: device_multiprocessors(target, instance) / total for instance in target.gpu.mig
    }
    return min(
        100.0, sum(resident.sm_percent * shares.get(resident.place, 0.0) for resident in residents(state, target))
    )


def bandwidth(state: SimulatedHostState, target: Target) -> float:
    """Return the share of the memory's bandwidth that is drawn, in percent (GPM): what jobs say, and what SMs imply."""
    busy = utilization(state, target)
    stated = [] if target.mig_enabled else with_stated_bandwidth(state, target.gpu.uuid)
    rest = max(0.0, busy - sum(process.sm_percent for process in stated))
    return min(100.0, sum(process.bandwidth_percent or 0 for process in stated) + rest * _DRAWN_BY_SMS)


def with_stated_bandwidth(state: SimulatedHostState, uuid: str) -> list[SimulatedProcess]:
    """Return the busy processes of a GPU that state how much of the memory bandwidth they use."""
    processes = [
        process for process in state.processes if process.gpu_uuid == uuid and process.bandwidth_percent is not None
    ]
    time_now = now()
    return [process for process in processes if on_gpu(process) and is_busy(process, time_now)]


def memory_bandwidth(busy: float) -> int:
    """Return memory utilization in percent for an SM utilization: 20 at 96, as our large matmul on an H200."""
    return round(busy * _DRAWN_BY_SMS)


def memory_of(state: SimulatedHostState, target: Target) -> tuple[int, int, int]:
    """Return total, reserved and used bytes (nvmlMemory_v2_t) of a GPU or MIG device.

    Raises:
        Refused: NOT_SUPPORTED, the model's memory is not known (unified memory).
    """
    total, reserved = target.model.memory_bytes, target.model.memory_reserved_bytes
    if total is None:
        raise Refused(Code.NOT_SUPPORTED)
    if reserved is None:
        reserved = _RESERVED_MIB * MIB
    if target.instance is not None:
        total, reserved = profile_memory_mib(target, target.instance.profile) * MIB, 0
        # Memory belongs to the GPU instance; its compute instances share it.
        gpu_instance, target = target.instance.gpu_instance_id, target._replace(instance=None)
        used = sum(
            resident.memory_bytes for resident in residents(state, target) if resident.gpu_instance_id == gpu_instance
        )
        return total, reserved, min(used, total)
    used = target.gpu.unlisted_bytes + sum(resident.memory_bytes for resident in residents(state, target))
    return total, reserved, min(used, total - reserved)


def _part_of_axis(target: Target, profile: Profile | None, total: int | None) -> int:
    """Return a profile's part of what a GPU has, by memory slices; 0 where that is unknown: NVML has no word for it."""
    if profile is None or profile.size is None or target.model.axis is None or total is None:
        return 0
    return total * profile.size // target.model.axis


def profile_memory_mib(target: Target, name: str) -> int:
    """Return a GPU instance's memory in MiB; where it is not published, by its part of the axis."""
    profile = target.model.profile(name)
    if profile is not None and profile.memory_bytes is not None:
        return profile.memory_bytes // MIB
    return _part_of_axis(target, profile, target.model.memory_mib) // 64 * 64


def profile_multiprocessors(target: Target, name: str) -> int:
    """Return a GPU instance's SM count; where it is not published, by its part of the axis."""
    profile = target.model.profile(name)
    if profile is not None and profile.multiprocessors is not None:
        return profile.multiprocessors
    return _part_of_axis(target, profile, target.model.multiprocessors)


def compute_multiprocessors(target: Target, profile: Profile, slices: int) -> int:
    """Return the SM count of a compute instance with this many slices of a GPU instance."""
    whole = profile_multiprocessors(target, profile.name)
    if slices == profile.slices:
        return whole
    # As many as the smallest GPU instances have: a 1c of a 3g has 16 of its 60 (H100, driver 580).
    smallest = next((profile.multiprocessors for profile in target.model.profiles if profile.nvml_profile == 0), None)
    share = whole // profile.slices
    return slices * (share if smallest is None else min(share, smallest))


def device_multiprocessors(target: Target, instance: SimulatedMigInstance) -> int:
    """Return the SM count of a MIG device: of its compute instance, or of a GPU instance that has none."""
    profile = target.model.profile(instance.profile)
    # A state file may name a profile that the model does not have.
    if profile is None or instance.compute_profile is None:
        return profile_multiprocessors(target, instance.profile)
    from gpushare.sim import mig

    return compute_multiprocessors(target, profile, len(mig.span(profile, instance)))


def _resident_servers(state: SimulatedHostState, gpu: SimulatedGpu) -> Iterator[Resident]:
    """Yield the MPS servers that have a context on a GPU, once for each device of their daemon."""
    if not state.daemons:
        return
    from gpushare.sim.devices import daemon_devices

    for daemon in state.daemons:
        # A server has a context on every device that its daemon offers.
        for device in daemon_devices(state, daemon):
            if device.gpu.uuid != gpu.uuid:
                continue
            for server in daemon.servers:
                yield Resident(
                    pid=server.pid,
                    memory_bytes=MPS_SERVER_BYTES,
                    sm_percent=0,
                    gpu_instance_id=device.mig.gpu_instance_id if device.mig else None,
                    compute_instance_id=device.mig.compute_instance_id if device.mig else None,
                )
