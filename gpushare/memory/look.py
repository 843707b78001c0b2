"""What `status`, `doctor` and `metrics` show of memory: reservations, waiting jobs, swapped jobs, and memory that no process holds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpushare.base.model import Gpu, LimitedJob, Snapshot, SwappedJob, WaitingJob
from gpushare.base.selection import Device
from gpushare.host.capabilities import user_name
from gpushare.host.store import wall_time
from gpushare.memory.ledger import Reservation, line_of, reservations
from gpushare.memory.swap import BACK, Swap, swaps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpushare.host.host import Host

_BILLION: Final = 1_000_000_000


def with_ledger(host: Host, snapshot: Snapshot, limits: Mapping[int, int] | None = None) -> Snapshot:
    """Return a snapshot with what jobs have reserved, who waits for room, and who is swapped out."""
    found = reservations(host)
    gpus = snapshot.gpus if found is None else tuple(_with_reserved(host, gpu, found, limits) for gpu in snapshot.gpus)
    waiting = tuple(waiting_jobs(host, snapshot.gpus, found or ()))
    here = _indexes(snapshot.gpus)
    out = tuple(_swapped(here, swap) for swap in swaps(host) if swap.state != BACK and swap.gpu_uuid in here)
    limited = tuple(_limited(here, found or ()))
    return replace(snapshot, gpus=gpus, waiting_jobs=waiting, swapped_jobs=out, limited_jobs=limited)


def _with_reserved(host: Host, gpu: Gpu, found: Sequence[Reservation], limits: Mapping[int, int] | None) -> Gpu:
    if gpu.error is not None:
        return gpu
    instances = tuple(
        replace(mig, jobs_reserved_bytes=_reserved(host, Device(gpu=gpu, mig=mig), found, limits))
        for mig in gpu.mig_instances
    )
    return replace(gpu, mig_instances=instances, jobs_reserved_bytes=_reserved(host, Device(gpu=gpu), found, limits))


def _reserved(host: Host, device: Device, found: Sequence[Reservation], limits: Mapping[int, int] | None) -> int | None:
    if not any(device.uuid in one.held for one in found):
        return 0
    line = line_of(host, device, found, limits=limits)
    return None if line is None else line.reserved_bytes


def waiting_jobs(host: Host, gpus: Sequence[Gpu], found: Sequence[Reservation]) -> list[WaitingJob]:
    """Return the jobs that wait for room on some of these GPUs, in their order."""
    indexes = _indexes(gpus)
    now, clock = time.time(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    waiting = [one for one in found if one.waits]
    jobs = []
    for number, one in enumerate(waiting):
        if indexes.keys().isdisjoint(one.keys):
            continue
        info = host.processes.describe(one.claim.pid)
        before = sum(not set(one.keys).isdisjoint(other.keys) for other in waiting[:number])
        ticket = one.waiting_since_ns
        jobs.append(
            WaitingJob(
                pid=one.claim.pid,
                user=None if info is None else info.user,
                name=one.name,
                place=before + 1,
                memory_bytes=one.memory_bytes,
                count=one.count,
                gpu_indexes=tuple(sorted({indexes[key] for key in one.keys if key in indexes})),
                device_uuids=one.keys,
                production=one.production,
                stopped=one.stopped,
                waiting_since=None if ticket is None else now - max(0, clock - ticket) / _BILLION,
            )
        )
    return jobs


def _indexes(gpus: Sequence[Gpu]) -> dict[str, int]:
    return {uuid: gpu.index for gpu in gpus for uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig_instances)) if uuid}


def _limited(indexes: Mapping[str, int], found: Sequence[Reservation]) -> Iterator[LimitedJob]:
    for one in found:
        if one.limit_bytes is None or one.above is None:
            continue
        for key in one.held:
            if key in indexes:
                yield LimitedJob(
                    pid=one.pid,
                    name=one.name,
                    gpu_index=indexes[key],
                    device_uuid=key,
                    limit_bytes=one.limit_bytes,
                    above=one.above,
                )


def _swapped(indexes: Mapping[str, int], swap: Swap) -> SwappedJob:
    return SwappedJob(
        pid=swap.pid,
        name=swap.name,
        state=swap.state,
        memory_bytes=swap.memory_bytes,
        gpu_index=indexes.get(swap.gpu_uuid),
        gpu_uuid=swap.gpu_uuid,
        since=wall_time(swap.since),
        user=None if swap.uid is None else user_name(swap.uid),
    )
