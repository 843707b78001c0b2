"""How the GPUs of a host are shared, and by which jobs, as metrics for prometheus_client. Pure.

Base units; one info metric for identity; an unknown value is absent, never zero. Labels have the names of dcgm-exporter
(``UUID``, ``gpu``, ``GPU_I_ID``, ``GPU_I_PROFILE``), so that both join: ``* on (UUID) group_left ()``. A job has the labels
``name`` and ``pid``: ``job`` is what Prometheus calls the target of a scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

from gpushare.base.model import Gpu, ListedJob, MpsDaemon, Snapshot, Way, outside_mps, way_in_force
from gpushare.mig.planner import free_profiles, lost_slices

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

    from gpushare.mig.profile import GpuInstance, Layout

Labels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a host; ``snapshot`` is None when it does not answer."""

    version: str
    snapshot: Snapshot | None
    # By GPU index.
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    # By GPU UUID, profile and first memory slice.
    names: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    # MIG UUIDs that `gpushare run --mig` holds; None: unknown.
    leases: tuple[str, ...] | None = ()
    # By pipe directory: how many `gpushare run` use the daemon.
    mps_leases: Mapping[str, int] = field(default_factory=dict)
    mig_interrupted: bool | None = None
    # UUIDs of the GPUs that the last applied gpushare.yaml gives to one program.
    exclusive_wanted: frozenset[str] = frozenset()
    # By GPU index: memory of processes that have done nothing for `IDLE_SECONDS`, as far as it was seen.
    idle_bytes: Mapping[int, int] = field(default_factory=dict)
    # As `gpushare jobs` lists them, without those that have ended.
    jobs: tuple[ListedJob, ...] = ()


# A process that has done nothing for so long holds its memory idle.
IDLE_SECONDS: Final = 600.0


# Every user can start jobs: so many have metrics of their own, the first that `gpushare jobs` lists.
MOST_JOBS: Final = 512

_HELP = {
    "gpushare_build_info": "Version of gpushare; constant 1.",
    "gpushare_host_up": "Whether NVML answers on this host.",
    "gpushare_last_run_timestamp_seconds": "Unix time at which the host was read.",
    "gpushare_gpu_info": "Identity of a GPU; constant 1. Joins with dcgm-exporter on UUID.",
    "gpushare_gpu_up": "Whether the GPU answers.",
    "gpushare_gpu_sharing": "The way of sharing in force; 1 for that one only.",
    "gpushare_gpu_exclusive_wanted": "1 if the last applied gpushare.yaml gives the GPU to one program, else absent.",
    "gpushare_gpu_time_slice_level": "Time-slice level: 0 default, 1 short, 2 medium, 3 long.",
    "gpushare_gpu_power_watts": "Power that the GPU draws.",
    "gpushare_gpu_power_limit_watts": "Power limit in force.",
    "gpushare_gpu_memory_unlisted_bytes": "Memory in use that no process in the driver's lists has.",
    "gpushare_gpu_memory_idle_bytes": "Memory of processes that have done nothing for ten minutes or more, as far as is known; in a text file, as far as the driver remembers.",
    "gpushare_gpu_memory_jobs_reserved_bytes": "Memory that jobs have reserved.",
    "gpushare_gpu_jobs_waiting": "Jobs of gpushare run --wait that wait for room on this GPU.",
    "gpushare_jobs": "Jobs of gpushare run, by state; the metrics of single jobs below are for the first 512.",
    "gpushare_job_info": "A job: its role, its way of sharing, its user and its MIG instance; constant 1.",
    "gpushare_job_on_gpu": "The GPUs of a job; constant 1.",
    "gpushare_job_state": "The state of a job; 1 for that one only.",
    "gpushare_job_slice_seconds": "Time-slice of the processes of a job.",
    "gpushare_job_threads_limit_ratio": "Share of the SMs that a job may use, 0 to 1.",
    "gpushare_job_memory_used_bytes": "Device memory that the processes of a job hold.",
    "gpushare_job_memory_limit_bytes": "Limit of the device memory of a job on each of its GPUs.",
    "gpushare_job_memory_swapped_bytes": "Host memory that a job holds while it is swapped out.",
    "gpushare_swapped_out_timestamp_seconds": "Unix time at which the job that has been in this state longest entered it.",
    "gpushare_mps_daemon_up": "Whether the MPS control daemon answers; 0 if it died or hangs.",
    "gpushare_mps_clients": "Clients of the MPS daemon.",
    "gpushare_mps_clients_limit": "Maximum number of client contexts per server of the daemon.",
    "gpushare_mps_servers": "MPS servers by status (ACTIVE, INITIALIZING, FAULT).",
    "gpushare_mps_threads_limit_ratio": "Share of the SMs that a future client gets, 0 to 1.",
    "gpushare_mps_memory_limit_bytes": "Pinned memory limit of each future client process.",
    "gpushare_mps_leases": "Number of gpushare run commands that use the daemon.",
    "gpushare_mps_outside_processes": "CUDA processes on a GPU with MPS that are not its clients.",
    "gpushare_mig_enabled": "Whether MIG is on, for a GPU that has it.",
    "gpushare_mig_mode_pending": "Whether a change of the MIG mode is pending a reset.",
    "gpushare_mig_change_interrupted": "Whether a MIG change of gpushare was interrupted.",
    "gpushare_mig_instance_info": "A GPU instance: place, name and size; constant 1.",
    "gpushare_mig_instance_leases": "MIG devices of the GPU instance that gpushare run --mig holds.",
    "gpushare_mig_free_instances": "How many more instances of a profile fit, each profile counted alone.",
    "gpushare_mig_free_compute_slices": "Compute slices without an instance.",
    "gpushare_mig_free_memory_slices": "Memory slices without an instance.",
    "gpushare_mig_lost_compute_slices": "Free compute slices that no further instance can use.",
    "gpushare_mig_lost_memory_slices": "Free memory slices that no further instance can use.",
}


def families(reading: Reading) -> list[Metric]:
    """Return the metrics that are known; of several values with the same labels the first counts.

    The text format allows a sample only once, and two jobs may have the same name.
    """
    from prometheus_client.metrics_core import Metric

    metrics = {name: Metric(name, text, "gauge") for name, text in _HELP.items()}
    present: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for name, labels, value in _values(reading):
        # Names that other users choose may hold bytes that are no text.
        shown = {label: text.encode(errors="replace").decode() for label, text in labels.items()}
        key = name, frozenset(shown.items())
        if value is not None and key not in present:
            present.add(key)
            metrics[name].add_sample(name, shown, float(value))
    return [metric for metric in metrics.values() if metric.samples]


def exposition(metrics: Iterable[Metric]) -> str:
    """Return metrics in the text format (version 0.0.4), without timestamps, as the textfile collector needs it."""
    from prometheus_client import generate_latest

    # Nothing else of a registry is used.
    return generate_latest(cast("Collector", SimpleNamespace(collect=lambda: metrics))).decode()


Value = tuple[str, Labels, "float | None"]


def _values(reading: Reading) -> Iterator[Value]:
    """Yield the value of each metric: name, labels, and the number or None if it is unknown."""
    snapshot = reading.snapshot
    yield "gpushare_build_info", {"version": reading.version}, 1
    yield "gpushare_host_up", {}, snapshot is not None
    if snapshot is None:
        return
    yield "gpushare_last_run_timestamp_seconds", {}, snapshot.taken_at
    yield "gpushare_mig_change_interrupted", {}, reading.mig_interrupted
    for gpu in snapshot.gpus:
        yield from _gpu_values(gpu, snapshot)
        yield "gpushare_gpu_memory_idle_bytes", _gpu_labels(gpu), reading.idle_bytes.get(gpu.index)
        if gpu.uuid in reading.exclusive_wanted:
            yield "gpushare_gpu_exclusive_wanted", _gpu_labels(gpu), 1
        if gpu.index in reading.layouts:
            yield from _mig_values(gpu, reading.layouts[gpu.index], reading)
    for state in sorted({job.state for job in snapshot.swapped_jobs}):
        seconds = max(job.since_seconds or 0.0 for job in snapshot.swapped_jobs if job.state == state)
        yield "gpushare_swapped_out_timestamp_seconds", {"state": state}, (snapshot.taken_at or 0.0) - seconds
    yield from _job_values(snapshot, reading.jobs)
    for daemon in snapshot.daemons:
        yield from _daemon_values(daemon, snapshot, reading)


def _job_values(snapshot: Snapshot, jobs: Sequence[ListedJob]) -> Iterator[Value]:
    """Yield the values about the jobs: their number by state, and those of the first `MOST_JOBS`."""
    for state, count in sorted(Counter(job.state for job in jobs).items()):
        yield "gpushare_jobs", {"state": state}, count
    gpus = {gpu.index: gpu for gpu in snapshot.gpus}
    for job in jobs[:MOST_JOBS]:
        labels = _labels(name=job.name, pid=str(job.pid or ""))
        way = None if job.way is None else job.way.value
        about = _labels(
            role=job.role, way=way, user=job.user, GPU_I_PROFILE=job.mig_profile, instance_name=job.mig_name
        )
        yield "gpushare_job_info", {**labels, **about}, 1
        yield "gpushare_job_state", {**labels, "state": job.state}, 1
        for index in job.gpu_indexes:
            # The GPUs of a job that waits are those on which it may run: it is on none.
            if index in gpus and job.line is None:
                yield "gpushare_job_on_gpu", {**labels, **_gpu_labels(gpus[index])}, 1
        yield "gpushare_job_slice_seconds", labels, None if job.slice_us is None else job.slice_us / 1e6
        threads = job.threads_percent
        yield "gpushare_job_threads_limit_ratio", labels, None if threads is None else threads / 100
        yield "gpushare_job_memory_used_bytes", labels, job.memory_used_bytes
        yield "gpushare_job_memory_limit_bytes", labels, job.memory_limit_bytes
        yield "gpushare_job_memory_swapped_bytes", labels, job.swapped_bytes


def _gpu_labels(gpu: Gpu) -> dict[str, str]:
    # A lost GPU without a UUID has only its index.
    return _labels(gpu=str(gpu.index), UUID=gpu.uuid)


def _labels(**labels: str | None) -> dict[str, str]:
    """Return the labels that have a value: Prometheus treats an empty one as absent."""
    return {name: text for name, text in labels.items() if text}


def _gpu_values(gpu: Gpu, snapshot: Snapshot) -> Iterator[Value]:
    """Yield the values about one GPU: identity, way of sharing, modes, power, processes, and who waits for its memory."""
    labels = _gpu_labels(gpu)
    yield "gpushare_gpu_info", {**labels, **_labels(model=gpu.name, pci_bus_id=gpu.pci_bus_id)}, 1
    yield "gpushare_gpu_up", labels, gpu.error is None
    if gpu.error is not None:
        return
    way = way_in_force(gpu, snapshot.daemons)
    if way is not None:
        yield "gpushare_gpu_sharing", {**labels, "way": way.value}, 1
    yield "gpushare_gpu_time_slice_level", labels, gpu.time_slice
    yield "gpushare_gpu_power_watts", labels, gpu.power_watts
    yield "gpushare_gpu_power_limit_watts", labels, gpu.power_limit_watts
    yield "gpushare_gpu_memory_jobs_reserved_bytes", labels, gpu.jobs_reserved_bytes
    yield "gpushare_gpu_jobs_waiting", labels, sum(gpu.index in job.gpu_indexes for job in snapshot.waiting_jobs)
    if gpu.processes is not None:
        yield "gpushare_gpu_memory_unlisted_bytes", labels, gpu.unlisted_bytes
        if way is Way.MPS:
            yield "gpushare_mps_outside_processes", labels, len(outside_mps(gpu, snapshot.daemons))
    if gpu.mig_capable:
        yield "gpushare_mig_enabled", labels, gpu.mig_enabled
        modes_known = gpu.mig_pending is not None and gpu.mig_enabled is not None
        yield "gpushare_mig_mode_pending", labels, gpu.mig_pending != gpu.mig_enabled if modes_known else None


def _daemon_values(daemon: MpsDaemon, snapshot: Snapshot, reading: Reading) -> Iterator[Value]:
    """Yield the values about one MPS daemon; none if it was not asked, because then all of them are unknown."""
    if daemon.unasked:
        return
    gpu = next((gpu for gpu in snapshot.gpus if gpu.index == daemon.gpu_index), None)
    labels = {} if gpu is None else _gpu_labels(gpu)
    labels |= _labels(device=daemon.device_uuid, user=daemon.user, pipe_directory=daemon.pipe_directory)
    labels["ours"] = "true" if daemon.ours else "false"
    up = daemon.pid is not None and daemon.error is None
    yield "gpushare_mps_daemon_up", labels, up
    if not up:
        return
    yield "gpushare_mps_clients", labels, len(daemon.clients)
    yield "gpushare_mps_clients_limit", labels, daemon.max_clients
    threads = daemon.threads_percent
    yield "gpushare_mps_threads_limit_ratio", labels, None if threads is None else threads / 100
    yield "gpushare_mps_memory_limit_bytes", labels, daemon.memory_limit_bytes
    yield "gpushare_mps_leases", labels, reading.mps_leases.get(daemon.pipe_directory or "")
    for status, count in sorted(Counter(server.status for server in daemon.servers if server.status).items()):
        yield "gpushare_mps_servers", {**labels, "status": status}, count


def _mig_values(gpu: Gpu, layout: Layout, reading: Reading) -> Iterator[Value]:
    """Yield the values about the MIG layout of a GPU: its instances, what is free, and what is lost."""
    labels = _gpu_labels(gpu)
    if not gpu.mig_enabled:
        return
    for instance in layout.instances:
        yield from _instance_values(gpu, instance, reading)
    if not layout.profiles:
        return
    for free in free_profiles(layout):
        yield "gpushare_mig_free_instances", {**labels, "profile": free.profile.name}, free.count
    lost = lost_slices(layout)
    memory_slices = sum(instance.placement.size for instance in layout.instances)
    compute_slices = sum(instance.profile.slices for instance in layout.instances)
    yield "gpushare_mig_free_compute_slices", labels, max(0, layout.compute_slices - compute_slices)
    yield "gpushare_mig_free_memory_slices", labels, layout.memory_slices - memory_slices
    yield "gpushare_mig_lost_compute_slices", labels, lost.compute
    yield "gpushare_mig_lost_memory_slices", labels, lost.memory


def _instance_values(gpu: Gpu, instance: GpuInstance, reading: Reading) -> Iterator[Value]:
    """Yield the values about one GPU instance: place, name, whether it is busy, and its leases."""
    labels = {**_gpu_labels(gpu), "GPU_I_ID": str(instance.id), "GPU_I_PROFILE": instance.profile.name}
    name = reading.names.get((gpu.uuid or "", instance.profile.name, instance.start))
    yield "gpushare_mig_instance_info", {**labels, **_labels(start=str(instance.start), name=name)}, 1
    if reading.leases is not None:
        yield "gpushare_mig_instance_leases", labels, sum(part.uuid in reading.leases for part in instance.compute)
