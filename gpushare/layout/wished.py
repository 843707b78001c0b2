"""The host as ``gpushare.yaml`` wants it, described for other engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpushare.layout.description import GpuDescription, HostDescription, MigDescription, MpsDescription, Sharing
from gpushare.layout.hostfile import Entry, MpsWish
from gpushare.mig.profile import Profile
from gpushare.mig.wish import parse_wish, resolve
from gpushare.model import ComputeMode


def wished(
    host: HostDescription, entries: Mapping[int, Entry], profiles: Mapping[int, Sequence[Profile]]
) -> HostDescription:
    """Return the host with each GPU as its entry says, by index; one that no entry is for stays as it is.

    ``profiles`` are the driver's, of each GPU that shall have MIG. MIG devices that are only wished for have no UUID,
    no ids and no capability nodes yet.

    Raises:
        BadUsage: a profile that fits several, or a place that it never has.
        NotSupported: a profile that the GPU never has.
    """
    gpus = (
        _gpu(gpu, entries[gpu.index], profiles.get(gpu.index, ())) if gpu.index in entries else gpu for gpu in host.gpus
    )
    return replace(host, gpus=tuple(gpus))


def _gpu(gpu: GpuDescription, entry: Entry, profiles: Sequence[Profile]) -> GpuDescription:
    alone = entry.sharing is Sharing.EXCLUSIVE or (entry.mps is not None and entry.mps.exclusive)
    replicas = entry.mps.replicas if entry.mps is not None else entry.replicas
    return replace(
        gpu,
        sharing=entry.sharing,
        replicas=replicas,
        time_slice=entry.time_slice if entry.sharing is Sharing.TIMESLICE else None,
        compute_mode=ComputeMode.EXCLUSIVE_PROCESS if alone else ComputeMode.DEFAULT,
        mps=_mps(entry.mps or MpsWish()) if entry.sharing is Sharing.MPS else None,
        mig=_devices(entry, profiles) if entry.sharing is Sharing.MIG else (),
    )


def _mps(wish: MpsWish) -> MpsDescription:
    return MpsDescription(
        threads_percent=None if wish.threads_percent == 100 else wish.threads_percent,
        memory_limit_bytes=wish.memory_limit_bytes,
        priority=wish.priority,
        users=wish.users,
    )


def _devices(entry: Entry, profiles: Sequence[Profile]) -> tuple[MigDescription, ...]:
    found: list[MigDescription] = []
    for one in entry.mig:
        for request in parse_wish(one.wish):
            found_profile = resolve(request, profiles)
            name = found_profile.name
            # A compute instance that fills its GPU instance has no size in its name.
            devices = [f"{slices}c.{name}" for slices in request.compute] or [name]
            for profile in devices * request.count:
                device = MigDescription(
                    profile=profile,
                    uuid="",
                    index=len(found),
                    start=request.start,
                    memory_total_bytes=found_profile.memory_bytes,
                    name=one.name,
                    replicas=one.replicas,
                    mps=None if one.mps is None else _mps(one.mps),
                )
                found.append(device)
    return tuple(found)
