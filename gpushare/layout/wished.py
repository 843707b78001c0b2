"""The host as ``gpushare.yaml`` wants it, described for other engines: wished for, or in what is there already. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpushare.errors import NotFound
from gpushare.layout.description import GpuDescription, HostDescription, MigDescription, MpsDescription, Sharing
from gpushare.layout.hostfile import Entry, InstanceWish, MpsWish
from gpushare.layout.seats import Device, Seat, seated
from gpushare.mig.profile import Profile
from gpushare.mig.wish import parse_wish, resolve
from gpushare.model import ComputeMode, Priority


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


def in_place(
    wanted: HostDescription, live: HostDescription, pipe_of: Callable[[str], str], *, apply: str, daemons_only: bool
) -> HostDescription:
    """Return a wished host for engines that name devices by UUID and daemons by their pipes.

    Both hold the same GPUs. A MIG device has its UUID only once it is there: each that is wished for is found among
    the live ones. ``pipe_of`` says where the daemon of a device listens that is not up yet; ``apply`` is the command
    that makes the host so. ``daemons_only``: the engine names only those devices in which a daemon runs.

    Raises:
        NotFound: a MIG device is not there yet (code ``not_applied``).
    """
    gpus = []
    for gpu, now in zip(wanted.gpus, live.gpus, strict=True):
        devices = []
        for one, found in zip(gpu.mig, _live(gpu.mig, now.mig), strict=True):
            if found is None and daemons_only and one.mps is None:
                continue
            if found is None:
                raise NotFound(
                    f"GPU {gpu.index} has no {one.profile} yet as the file wants it; only what is there has a UUID",
                    f"make it first: {apply}",
                    gpu=str(gpu.index),
                    code="not_applied",
                )
            devices.append(
                replace(found, name=one.name, replicas=one.replicas, mps=_with_pipe(one.mps, found, pipe_of))
            )
        gpus.append(replace(gpu, mps=_with_pipe(gpu.mps, now, pipe_of), mig=tuple(devices)))
    return replace(wanted, gpus=tuple(gpus))


def _live(wanted: Sequence[MigDescription], there: Sequence[MigDescription]) -> list[MigDescription | None]:
    """Return the live device that each wish means, as `gpushare apply` finds it; None: it is not there yet."""
    # A profile is named here with the size of its part (1c.3g.40gb), so that no slices need be told apart.
    seats = (
        Seat(
            wish=InstanceWish(wish="", name=one.name, mps=_held(one.mps)),
            profile=one.profile,
            start=one.start,
            slices=0,
        )
        for one in wanted
    )
    devices = (
        Device(
            one.profile,
            -1 if one.start is None else one.start,
            slices=0,
            whole=one.is_whole,
            number=number,
            name=one.name,
            mps=_held(one.mps),
        )
        for number, one in enumerate(there)
    )
    found = seated(seats, devices).seats
    return [None if one.device is None else there[one.device.number] for one in found]


def _held(mps: MpsDescription | None) -> MpsWish | None:
    if mps is None:
        return None
    return MpsWish(
        threads_percent=mps.threads_percent,
        memory_limit_bytes=mps.memory_limit_bytes,
        priority=mps.priority or Priority.NORMAL,
        users=mps.users,
    )


def _with_pipe(
    wish: MpsDescription | None, now: GpuDescription | MigDescription, pipe_of: Callable[[str], str]
) -> MpsDescription | None:
    if wish is None:
        return None
    known = None if now.mps is None else now.mps.pipe_directory
    return replace(wish, pipe_directory=known or pipe_of(now.uuid))
