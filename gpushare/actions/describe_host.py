"""A live host as a description: what each GPU is, and the way it is shared at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.actions.host_units import users_of, with_units
from gpushare.errors import GpuLost, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.layout.description import (
    GpuDescription,
    HostDescription,
    MigDescription,
    MpsDescription,
    Sharing,
)
from gpushare.model import Mechanism, MpsDaemon, mechanism

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpushare.host.host import Host
    from gpushare.mig.profile import GpuInstance
    from gpushare.model import Gpu, MigInstance, TimeSlice

_SHARING = {
    Mechanism.TIME_SLICING: Sharing.TIMESLICE,
    Mechanism.MPS: Sharing.MPS,
    Mechanism.MIG: Sharing.MIG,
    Mechanism.EXCLUSIVE: Sharing.EXCLUSIVE,
}


def describe_host(host: Host, gpus: Sequence[Gpu], *, node: str | None = None) -> HostDescription:
    """Return these GPUs of a host as they are now. ``node`` is the host's name in a cluster.

    How many programs share a GPU by time-slicing is nowhere on a host: ``replicas`` stays None.

    Raises:
        NotFound: no GPU.
        GpuLost: a GPU does not answer.
        NotSupported: a GPU is in compute mode prohibited, or its mode is unknown.
        NoPermission, OperationFailed: an MPS daemon cannot be asked.
    """
    from gpushare.host.mps import find_daemons

    if not gpus:
        raise NotFound("this host has no GPU", "see: gpushare doctor", code="no_gpu")
    for gpu in gpus:
        if gpu.error is not None:
            raise GpuLost(gpu.error, "see: gpushare status", gpu=str(gpu.index))
    daemons = tuple(found.daemon for found in with_units(host, find_daemons(host, gpus), gpus) if _stays(found.daemon))
    for daemon in daemons:
        _check_answers(daemon)
    levels = host.policy.read() if any(not gpu.mig_enabled for gpu in gpus) else {}
    return HostDescription(
        driver=host.nvml.driver_version(),
        node=node,
        gpus=tuple(_gpu(host, gpu, daemons, levels) for gpu in gpus),
        whole=len(gpus) == host.nvml.count(),
    )


def _stays(daemon: MpsDaemon) -> bool:
    """Return whether a daemon is part of what the host is set to: it lives, and not only for a `gpushare run`."""
    return daemon.pid is not None and not daemon.transient


def _check_answers(daemon: MpsDaemon) -> None:
    """Raise for a daemon that cannot be asked: without it the host would be described wrongly."""
    if daemon.error is None:
        return
    if daemon.pipe_directory is None:
        raise NoPermission(
            f"which GPU the MPS daemon {daemon.pid} serves is unknown: {daemon.error}",
            "look as root: sudo gpushare export ...",
            code="daemon_unknown",
        )
    raise OperationFailed(
        f"the MPS daemon {daemon.pid} ({daemon.pipe_directory}) cannot be asked: {daemon.error}",
        "see: gpushare mps status; gpushare doctor",
        code="daemon_silent",
    )


def _gpu(
    host: Host, gpu: Gpu, daemons: tuple[MpsDaemon, ...], levels: Mapping[int, TimeSlice | None]
) -> GpuDescription:
    # Daemons of its MIG instances are the instances' own.
    own = tuple(one for one in daemons if one.device_uuid in {None, gpu.uuid})
    way = mechanism(gpu, own)
    sharing = None if way is None else _SHARING.get(way)
    if sharing is None:
        what = "its compute mode is prohibited" if way is Mechanism.PROHIBITED else "its compute mode is unknown"
        raise NotSupported(
            f"GPU {gpu.index} is for no program: {what}",
            f"set one first: gpushare timeslice set default -g {gpu.index}",
            gpu=str(gpu.index),
            code="no_sharing",
        )
    return GpuDescription(
        index=gpu.index,
        uuid=gpu.uuid or "",
        sharing=sharing,
        name=gpu.name,
        pci_bus_id=gpu.pci_bus_id,
        pci_device_id=host.nvml.pci_ids(gpu.index)[0],
        minor=host.nvml.minor_number(gpu.index),
        memory_total_bytes=gpu.memory_total_bytes,
        compute_capability=host.nvml.compute_capability(gpu.index),
        compute_mode=gpu.compute_mode,
        mig_capable=gpu.mig_capable,
        time_slice=None if gpu.mig_enabled else levels.get(gpu.index),
        mps=_mps_of(host, own, gpu.index) if sharing is Sharing.MPS else None,
        mig=_instances(host, gpu, daemons) if gpu.mig_enabled else (),
    )


def _mps_of(host: Host, daemons: Sequence[MpsDaemon], index: int) -> MpsDescription | None:
    for daemon in daemons:
        if index in {daemon.gpu_index, *daemon.gpu_indexes}:
            return _mps(host, daemon)
    return None


def _mps(host: Host, daemon: MpsDaemon) -> MpsDescription:
    return MpsDescription(
        # A daemon without a limit says 100.
        threads_percent=None if daemon.threads_percent == 100 else daemon.threads_percent,
        memory_limit_bytes=daemon.memory_limit_bytes,
        priority=daemon.priority,
        # A daemon of a user who is not root serves that user alone.
        users=(daemon.user,) if daemon.user not in {None, "root"} else users_of(host, daemon),
        pipe_directory=daemon.pipe_directory,
    )


def _instances(host: Host, gpu: Gpu, daemons: Sequence[MpsDaemon]) -> tuple[MigDescription, ...]:
    from gpushare.host.mig import MigReader
    from gpushare.host.mig_names import find_name

    layout = MigReader(host.nvml).layout(gpu)
    places = {one.id: one for one in layout.instances}
    found = []
    for index, mig in enumerate(gpu.mig_instances):
        instance = None if mig.gpu_instance_id is None else places.get(mig.gpu_instance_id)
        named = None if instance is None else find_name(host, gpu.uuid, instance.profile.name, instance.start)
        daemon = next((one for one in daemons if one.device_uuid == mig.uuid), None)
        found.append(
            MigDescription(
                profile=_profile(mig, instance),
                uuid=mig.uuid,
                index=index,
                start=None if instance is None else instance.start,
                gpu_instance_id=mig.gpu_instance_id,
                compute_instance_id=mig.compute_instance_id,
                memory_total_bytes=mig.memory_total_bytes,
                capabilities=_capabilities(host, gpu.index, mig),
                name=None if named is None else named.name,
                mps=None if daemon is None else _mps(host, daemon),
            )
        )
    return tuple(found)


def _profile(mig: MigInstance, instance: GpuInstance | None) -> str:
    """Return the whole name of a MIG device: 1c.2g.20gb, 1g.10gb+me; a device's own name can lack the +me."""
    if instance is None:
        return mig.profile or ""
    part, dot, _ = (mig.profile or "").partition("c.")
    return (f"{part}c." if dot else "") + instance.profile.name


def _capabilities(host: Host, index: int, mig: MigInstance) -> tuple[int, int] | None:
    """Return the minors of both capability nodes (/proc/driver/nvidia/capabilities), or None where they are not told."""
    minor = host.nvml.minor_number(index)
    if minor is None or mig.gpu_instance_id is None or mig.compute_instance_id is None:
        return None
    outer = host.capabilities.read(minor, mig.gpu_instance_id)
    inner = host.capabilities.read(minor, mig.gpu_instance_id, mig.compute_instance_id)
    return None if outer is None or inner is None else (outer.minor, inner.minor)
