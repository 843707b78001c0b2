"""What `status`, `doctor` and `metrics` show of memory: reservations, waiting jobs, swapped jobs, and memory that no process holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpushare.base.model import WAITING, Gpu, LinePlace, ListedJob, Snapshot
from gpushare.base.selection import Device
from gpushare.base.typed import DEVICE_UUID, job_name
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.host.identity import wall_time
from gpushare.host.process import info_of
from gpushare.memory.ledger import Reservation, line_of, lines_of, reservations
from gpushare.memory.swapped import BACK, swaps


def with_ledger(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with what jobs have reserved, who waits for room, and who is swapped out."""
    jobs = reservations(host)
    gpus = snapshot.gpus if jobs is None else tuple(_with_reserved(host, gpu, jobs) for gpu in snapshot.gpus)
    waiting = tuple(waiting_jobs(host, snapshot.gpus, jobs or ()))
    indexes = _index_by_uuid(snapshot.gpus)
    absent = [swap for swap in swaps(host) if swap.state != BACK]
    shown = indexes.keys() | _lost_devices(host, snapshot.gpus, (swap.gpu_uuid for swap in absent))
    out = tuple(
        ListedJob(
            name=job_name(swap.name),
            pid=swap.pid,
            state=swap.state,
            user=None if swap.uid is None else user_name(swap.uid),
            role=None,
            device=None,
            gpu_indexes=(indexes[swap.gpu_uuid],) if swap.gpu_uuid in indexes else (),
            device_uuids=(swap.gpu_uuid,),
            swapped_bytes=swap.memory_bytes,
            since_seconds=max(0.0, time.time() - wall_time(swap.since)),
        )
        for swap in absent
        if swap.gpu_uuid in shown
    )
    return replace(snapshot, gpus=gpus, waiting_jobs=waiting, swapped_jobs=out)


def _with_reserved(host: Host, gpu: Gpu, jobs: Sequence[Reservation]) -> Gpu:
    """Return a GPU with what jobs have reserved on it and on its MIG instances."""
    if gpu.error is not None:
        return gpu
    instances = tuple(
        replace(mig, jobs_reserved_bytes=_reserved_bytes(host, Device(gpu=gpu, mig=mig), jobs))
        for mig in gpu.mig_instances
    )
    return replace(gpu, mig_instances=instances, jobs_reserved_bytes=_reserved_bytes(host, Device(gpu=gpu), jobs))


def _reserved_bytes(host: Host, device: Device, jobs: Sequence[Reservation]) -> int | None:
    """Return what jobs have reserved on a device; None: its memory is unknown."""
    if not any(device.uuid in job.held for job in jobs):
        return 0
    line = line_of(host, device, jobs)
    return None if line is None else line.reserved_bytes


def waiting_jobs(host: Host, gpus: Sequence[Gpu], ledger: Sequence[Reservation]) -> list[ListedJob]:
    """Return the jobs that wait for room on some of these GPUs, in their order, with what they wait for."""
    waiting = [job for job in ledger if job.waits]
    if not waiting:
        return []
    indexes = _index_by_uuid(gpus)
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    lost = _lost_devices(host, gpus, (key for job in waiting for key in job.keys))
    instances = (Device(gpu=gpu, mig=mig) for gpu in gpus for mig in gpu.mig_instances)
    lines = lines_of(host, [*(Device(gpu=gpu) for gpu in gpus if gpu.uuid), *instances], ledger)
    jobs = []
    for number, job in enumerate(waiting):
        wanted = set(job.keys)
        if (indexes.keys() | lost).isdisjoint(wanted):
            continue
        ahead = [other for other in waiting[:number] if not wanted.isdisjoint(other.keys)]
        holders = [other for other in ledger if not wanted.isdisjoint(other.held)]
        # When it came (CLOCK_BOOTTIME).
        since_ns = job.claim.ticket
        jobs.append(
            ListedJob(
                name=job_name(job.name),
                pid=job.claim.pid,
                state=WAITING,
                user=info_of(host.processes, job.claim.pid).user,
                role="production" if job.production else "opportunistic" if job.opportunistic else "plain",
                device=None,
                gpu_indexes=tuple(sorted({indexes[key] for key in job.keys if key in indexes})),
                memory_limit_bytes=job.limit_bytes,
                since_seconds=None if since_ns is None else max(0, now_ns - since_ns) / 1e9,
                line=LinePlace(
                    place=len(ahead) + 1,
                    memory_bytes=job.memory_bytes,
                    count=job.count,
                    behind=tuple(job_name(other.name) or str(other.claim.pid) for other in ahead),
                    held_by=tuple(job_name(other.name) or str(other.pid) for other in holders),
                    others_bytes=max((lines[key].others_bytes for key in wanted if key in lines), default=None),
                    stopped=job.stopped,
                    lost_uuids=tuple(key for key in job.keys if key in lost),
                ),
            )
        )
    return jobs


def _index_by_uuid(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return the index of each GPU by its UUID, and by those of its MIG instances."""
    return {uuid: gpu.index for gpu in gpus for uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig_instances)) if uuid}


def _lost_devices(host: Host, gpus: Sequence[Gpu], keys: Iterable[str]) -> set[str]:
    """Return which of these devices, by UUID, no GPU of the host has now, if one of ``gpus`` does not answer.

    A lost GPU does not tell its UUID, nor those of its MIG instances.
    """
    wanted = set(keys)
    if not wanted or all(gpu.error is None for gpu in gpus):
        return set()
    # What users have written into the ledger may be no UUID of a device at all.
    return {key for key in wanted if DEVICE_UUID.fullmatch(key)} - _index_by_uuid(host.nvml.sweep()).keys()
