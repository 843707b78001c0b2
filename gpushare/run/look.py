"""A snapshot with what gpushare knows about it: jobs, reservations, the ledger of memory. It is what `status` shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpushare.base.model import Gpu, GpuProcess, Snapshot
from gpushare.host.host import Host
from gpushare.host.records import has_claims, has_records
from gpushare.snapshot import LastWork, Observer


class StatusReader:
    """Reads a host again and again; ``gpu`` names the GPUs that count, None: all. For the rest see `snapshot.Observer`."""

    def __init__(self, host: Host, gpu: str | None = None, *, strangers: bool = False, power: bool = True) -> None:
        self._host, self._gpu = host, gpu
        self._observer, self._work = Observer(host, strangers=strangers, power=power), LastWork(host)

    def snapshot(self) -> Snapshot:
        """Return the GPUs now, with their daemons, processes, jobs and reservations. Raises NotFound, NoGpu, DriverNotLoaded, NvmlMissing, BadUsage (no such GPU)."""
        host = self._host
        snapshot = self._work.added_to(only_gpus(self._observer.read(), self._gpu))
        return with_mig_leftovers(host, with_jobs(host, with_memory(host, with_leases(host, snapshot))))


def with_mig_leftovers(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with a warning for what each interrupted or failed MIG change left."""
    # Most hosts have no file of a change, and need not load what reads it.
    if not any(name for directory in host.run_directories for name in (directory / "mig").glob("*.json")):
        return snapshot
    from gpushare.mig.recover import visible_leftovers

    return replace(snapshot, warnings=(*snapshot.warnings, *map(str, visible_leftovers(host))))


def with_jobs(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the jobs that processes belong to, as `gpushare jobs` lists them."""
    if not any(gpu.processes for gpu in snapshot.gpus) or not has_records(host, "jobs"):
        return snapshot
    from gpushare.run.listing import present_jobs

    jobs = {pid: job for job in present_jobs(host, snapshot) if job.role is not None for pid in job.processes}

    def with_job(process: GpuProcess) -> GpuProcess:
        """Return a process with its job's name, role, way and limits; unchanged if it belongs to no job."""
        job = jobs.get(process.pid)
        if job is None:
            return process
        slice_us = job.slice_us if process.slice_us is None else process.slice_us
        threads = job.threads_percent
        return replace(process, job=job.name, role=job.role, way=job.way, threads_percent=threads, slice_us=slice_us)

    # Unknown processes stay unknown.
    gpus = (
        gpu if gpu.processes is None else replace(gpu, processes=tuple(map(with_job, gpu.processes)))
        for gpu in snapshot.gpus
    )
    return replace(snapshot, gpus=tuple(gpus))


# As `memory.ledger.PREFIX` and `memory.leases.PREFIX`, which most hosts need not load.
LEDGER: Final = "gpushare-memory-"
LEASES: Final = "gpushare-lease-"


def with_leases(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the GPUs that users have reserved."""
    if not has_claims(host, LEASES):
        return snapshot
    from gpushare.hostfile.kept import kept_limits
    from gpushare.memory.leases import leases

    uuids = {gpu.uuid for gpu in snapshot.gpus}
    held = leases(host, kept_limits(host)).values()
    return replace(snapshot, leases=tuple(lease for lease in held if lease.gpu_uuid in uuids))


def with_memory(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with what jobs reserve on each GPU, and with the jobs that are swapped out."""
    if not has_claims(host, LEDGER) and not has_records(host, "swap"):
        return replace(snapshot, gpus=tuple(map(_with_nothing_reserved, snapshot.gpus)))
    from gpushare.memory.look import with_ledger

    return with_ledger(host, snapshot)


def _with_nothing_reserved(gpu: Gpu) -> Gpu:
    """Return a GPU on which jobs reserve 0 bytes: there is no ledger. Unknown stays unknown if the GPU does not answer."""
    if gpu.error is not None:
        return gpu
    return replace(
        gpu,
        jobs_reserved_bytes=0,
        mig_instances=tuple(replace(mig, jobs_reserved_bytes=0) for mig in gpu.mig_instances),
    )


def only_gpus(snapshot: Snapshot, gpu: str | None) -> Snapshot:
    """Return the snapshot with only the GPUs or MIG instances that ``-g`` names (None: all), and their daemons."""
    if gpu is None:
        return snapshot
    from gpushare.base.selection import select

    devices = select(gpu, snapshot.gpus)
    # Each GPU once, in the order in which they were named.
    gpus = list({device.gpu.index: device.gpu for device in devices}.values())
    indexes = {each.index for each in gpus}
    instance_uuids = {device.uuid for device in devices if device.mig is not None}
    daemons = [daemon for daemon in snapshot.daemons if not indexes.isdisjoint(daemon.gpu_indexes)]
    if instance_uuids:
        gpus = [_only_instances(each, instance_uuids) for each in gpus]
        # A daemon without a device UUID serves a whole GPU.
        daemons = [daemon for daemon in daemons if daemon.device_uuid in {None, *instance_uuids}]
    return replace(snapshot, gpus=tuple(gpus), daemons=tuple(daemons))


def _only_instances(gpu: Gpu, uuids: set[str]) -> Gpu:
    """Return a GPU with only these MIG instances and their processes."""
    instances = tuple(mig for mig in gpu.mig_instances if mig.uuid in uuids)
    if not instances:
        # The GPU was named as a whole, and the instances are those of others.
        return gpu
    processes = None
    if gpu.processes is not None:
        processes = tuple(process for process in gpu.processes if any(mig.has(process) for mig in instances))
    return replace(gpu, mig_instances=instances, processes=processes)
