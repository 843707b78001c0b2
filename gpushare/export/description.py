"""What an export needs to know about a host: a description of the live host, or of what a file wants. Frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpushare.base.errors import NoPermission, NotFound, NotSupported, OperationFailed, no_gpu_error
from gpushare.base.model import ComputeMode, Gpu, MigInstance, MpsDaemon, Priority, TimeSlice, Way, way_in_force
from gpushare.base.selection import refuse_silent_gpus
from gpushare.base.units import format_percent
from gpushare.host.host import Host
from gpushare.host.nvml import NVLINK
from gpushare.hostfile.file import Entry, InstanceWish, MpsWish
from gpushare.hostfile.live import PlacedDevice, WantedDevice, assign, wanted_devices
from gpushare.hostfile.look import daemon_users, with_units
from gpushare.mig.profile import GpuInstance, Profile
from gpushare.mps.daemons import is_multiuser
from gpushare.mps.limits import Limits
from gpushare.snapshot import HostState


@dataclass(frozen=True, kw_only=True)
class MigDescription:
    """One MIG device (a compute instance in its GPU instance). ``replicas`` and ``mps`` are sharing inside it."""

    # As the driver names it: 1g.10gb, 1g.10gb+me, 1c.3g.40gb.
    profile: str
    uuid: str
    # NVML's index of the MIG device on its GPU, the 1 of `--gpus device=0:1`; None: unknown.
    index: int | None = None
    start: int | None = None
    memory_total_bytes: int | None = None
    # Minor numbers of /dev/nvidia-caps/nvidia-capN: of the GPU instance and of the compute instance.
    capabilities: tuple[int, int] | None = None
    name: str | None = None
    # Only some users may use it.
    granted: bool = False
    replicas: int | None = None
    mps: MpsWish | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether its compute instance fills its GPU instance: the driver then prints no ``1c.``."""
        return "c." not in self.profile

    def check_whole(self, engine: str, gpu_index: int) -> None:
        """Raise NotSupported, for an engine that offers only those, unless it is whole."""
        if not self.is_whole:
            raise NotSupported(
                f"{engine} does not offer a MIG device that is part of a GPU instance; GPU {gpu_index} has {self.profile}",
                "gpushare export slurm can, and gpushare export docker, compose and cdi",
                code="partial_compute_instance",
            )


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """One GPU and how it is shared. ``replicas`` is the number of programs that share it; None: not given."""

    index: int
    uuid: str
    sharing: Way
    # The product name, as NVML has it: Tesla T4.
    name: str | None = None
    # Device above vendor, 0x1EB810DE.
    pci_device_id: int | None = None
    # The N of /dev/nvidiaN.
    minor: int | None = None
    memory_total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    compute_mode: ComputeMode | None = None
    mig_capable: bool | None = None
    replicas: int | None = None
    time_slice: TimeSlice | None = None
    mps: MpsWish | None = None
    mig: tuple[MigDescription, ...] = ()
    # It has a GPU instance without a compute instance; its MIG mode changes at the next reset.
    bare: bool = False
    pending_mode: bool = False
    # Of each GPU of the host by its index: 1 where NVLink connects the two, -1 for this one.
    links: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostDescription:
    """One host. ``node`` is its name in a cluster; ``whole`` is False if ``-g`` left GPUs out.

    ``sections`` are those of its gpushare.yaml that are not about GPUs, and not empty: memory, slices, reserve.
    """

    gpus: tuple[GpuDescription, ...]
    driver: str | None = None
    node: str | None = None
    whole: bool = True
    sections: frozenset[str] = frozenset()

    def instances(self) -> Iterator[tuple[GpuDescription, MigDescription]]:
        """Yield each MIG device with its GPU."""
        for gpu in self.gpus:
            for mig in gpu.mig:
                yield gpu, mig

    @property
    def traits(self) -> set[str]:
        """Return the words that select notes on this host (`document.notes`): its ways of sharing, and the conditions it meets."""
        instances = [mig for _, mig in self.instances()]
        served = [*(gpu.mps for gpu in self.gpus), *(mig.mps for mig in instances)]
        daemons = [mps for mps in served if mps is not None]
        timesliced = [gpu for gpu in self.gpus if gpu.sharing is Way.TIMESLICE]
        conditions = {
            "shared": any(gpu.sharing in {Way.TIMESLICE, Way.MPS} for gpu in self.gpus),
            "several": len(self.gpus) > 1,
            "slice-length": any(gpu.time_slice not in {None, TimeSlice.DEFAULT} for gpu in self.gpus),
            "unknown-replicas": any(gpu.replicas is None for gpu in timesliced),
            "claimed-by-many": bool(timesliced) or any(gpu.replicas for gpu in self.gpus),
            "devices": bool(instances),
            "names": any(mig.name for mig in instances),
            "granted": any(mig.granted for mig in instances),
            "shared-instances": any(mig.replicas for mig in instances),
            "served-instances": any(mig.mps for mig in instances),
            "shared-inside-instances": any(mig.mps is not None or (mig.replicas or 1) > 1 for mig in instances),
            "bare": any(gpu.bare for gpu in self.gpus),
            "pending-mode": any(gpu.pending_mode for gpu in self.gpus),
            "daemons": bool(daemons),
            "low-priority": any(daemon.limits.priority is Priority.LOW for daemon in daemons),
            "restricted": any(daemon.users for daemon in daemons),
            "multiuser": any(daemon.multiuser for daemon in daemons),
            "own-sections": bool(self.sections),
        }
        traits = {trait for trait, is_true in conditions.items() if is_true}
        return {gpu.sharing.value for gpu in self.gpus} | traits


def short_model(name: str | None) -> str | None:
    """Return the model in one word, lower case: ``t4`` of Tesla T4, ``a100`` of NVIDIA A100-SXM4-40GB."""
    words = [word for word in re.split(r"[\s-]+", (name or "").lower()) if word not in {"", "nvidia", "tesla"}]
    return words[0] if words else None


def whole_percent(percent: float, engine: str, where: str) -> int:
    """Return a share of the threads for an engine that takes no fractions. Raises NotSupported (``fractional_threads``)."""
    if percent != int(percent):
        raise NotSupported(
            f"{engine} takes a whole percentage; {where} has {format_percent(percent)}",
            f"round it: gpushare mps set --threads {max(1, round(percent))}; or use gpushare export systemd, which keeps it",
            code="fractional_threads",
        )
    return int(percent)


def describe_host(state: HostState, gpus: Sequence[Gpu], *, node: str | None = None) -> HostDescription:
    """Return these GPUs of a host as they are now. ``node`` is the host's name in a cluster.

    A host does not know how many programs share a time-sliced GPU: ``replicas`` stays None.
    """
    if not gpus:
        raise no_gpu_error()
    refuse_silent_gpus(*gpus)
    items = with_units(state.host, state.daemons, state.gpus)
    # A transient one is not of the host's setup: it ends with its `gpushare run`.
    daemons = tuple(item.daemon for item in items if item.daemon.pid is not None and not item.daemon.transient)
    for daemon in daemons:
        _check_daemon_answers(daemon)
    return HostDescription(
        driver=state.driver_version,
        node=node,
        gpus=tuple(_describe_gpu(state, gpu, daemons) for gpu in gpus),
        whole=len(gpus) == len(state.gpus),
    )


def _check_daemon_answers(daemon: MpsDaemon) -> None:
    """Raise for a daemon that does not answer: without it the description would be wrong."""
    if daemon.error is None:
        return
    if daemon.pipe_directory is None:
        raise NoPermission(
            f"cannot tell which GPU the MPS daemon {daemon.pid} serves: {daemon.error}",
            "run it as root: sudo gpushare export ...",
            code="daemon_unknown",
        )
    raise OperationFailed(
        f"the MPS daemon {daemon.pid} ({daemon.pipe_directory}) does not answer: {daemon.error}",
        "see: gpushare mps status; gpushare doctor",
        code="daemon_silent",
    )


def _describe_gpu(state: HostState, gpu: Gpu, daemons: tuple[MpsDaemon, ...]) -> GpuDescription:
    """Return one GPU as it is now, with the daemon that serves it. Raises NotSupported if no program can use it."""
    host = state.host
    # Without the daemons of its MIG instances.
    own = tuple(daemon for daemon in daemons if daemon.device_uuid in {None, gpu.uuid})
    way = way_in_force(gpu, own)
    if way is None or way is Way.PROHIBITED:
        problem = "its compute mode is prohibited" if way is Way.PROHIBITED else "its compute mode is unknown"
        raise NotSupported(
            f"no program can use GPU {gpu.index}: {problem}",
            f"set one first: gpushare timeslice set default -g {gpu.index}",
            gpu=gpu.index,
            code="no_sharing",
        )
    serving = (daemon for daemon in own if gpu.index in {daemon.gpu_index, *daemon.gpu_indexes})
    daemon = next(serving, None) if way is Way.MPS else None
    return GpuDescription(
        index=gpu.index,
        uuid=gpu.uuid or "",
        sharing=way,
        name=gpu.name,
        pci_device_id=host.nvml.pci_ids(gpu.index)[0],
        minor=host.nvml.minor_number(gpu.index),
        memory_total_bytes=gpu.memory_total_bytes,
        compute_capability=host.nvml.compute_capability(gpu.index),
        compute_mode=gpu.compute_mode,
        mig_capable=gpu.mig_capable,
        time_slice=None if gpu.mig_enabled else state.levels.get(gpu.index),
        mps=None if daemon is None else _describe_daemon(host, daemon),
        mig=_describe_instances(state, gpu, daemons) if gpu.mig_enabled else (),
        bare=bool(gpu.mig_enabled) and not all(instance.compute for instance in state.layout(gpu).instances),
        pending_mode=gpu.mig_pending not in {None, gpu.mig_enabled},
        # As Slurm's Links (gres.conf(5)).
        links=tuple(
            -1
            if gpu.index == other.index
            else int(other.error is None and host.nvml.closeness(gpu.index, other.index) == NVLINK)
            for other in state.gpus
        ),
    )


def _describe_daemon(host: Host, daemon: MpsDaemon) -> MpsWish:
    return MpsWish(
        limits=Limits.of(daemon),
        # A daemon that does not run as root serves only its own user.
        users=(daemon.user,) if daemon.user not in {None, "root"} else daemon_users(host, daemon),
        multiuser=is_multiuser(host, daemon.pid),
        pipe_directory=daemon.pipe_directory,
    )


def _describe_instances(state: HostState, gpu: Gpu, daemons: Sequence[MpsDaemon]) -> tuple[MigDescription, ...]:
    """Return the MIG devices of a GPU in the driver's order, each with its name and its daemon."""
    host = state.host
    instances: dict[int | None, GpuInstance] = {instance.id: instance for instance in state.layout(gpu).instances}
    names = {(named.profile, named.start): named for named in state.names.values() if named.gpu_uuid == gpu.uuid}
    devices = []
    for index, mig in enumerate(gpu.mig_instances):
        instance = instances.get(mig.gpu_instance_id)
        named = None if instance is None else names.get(instance.place)
        daemon = next((daemon for daemon in daemons if daemon.device_uuid == mig.uuid), None)
        devices.append(
            MigDescription(
                profile=_full_profile(mig, instance),
                uuid=mig.uuid,
                index=index,
                start=None if instance is None else instance.start,
                memory_total_bytes=mig.memory_total_bytes,
                capabilities=_capability_minors(host, gpu.index, mig),
                name=None if named is None else named.name,
                granted=named is not None and bool(named.users),
                mps=None if daemon is None else _describe_daemon(host, daemon),
            )
        )
    return tuple(devices)


def _full_profile(mig: MigInstance, instance: GpuInstance | None) -> str:
    """Return the full name of a MIG device: 1c.2g.20gb, 1g.10gb+me; the driver's name of the device can lack the +me."""
    if instance is None:
        return mig.profile or ""
    slices, is_part, _ = (mig.profile or "").partition("c.")
    return f"{slices}c.{instance.profile.name}" if is_part else instance.profile.name


def _capability_minors(host: Host, index: int, mig: MigInstance) -> tuple[int, int] | None:
    """Return the minor numbers of the capability nodes of a MIG device: GPU instance, compute instance; None: unknown."""
    minor = host.nvml.minor_number(index)
    if minor is None or mig.gpu_instance_id is None or mig.compute_instance_id is None:
        return None
    outer = host.capabilities.read(minor, mig.gpu_instance_id)
    inner = host.capabilities.read(minor, mig.gpu_instance_id, mig.compute_instance_id)
    return None if outer is None or inner is None else (outer.minor, inner.minor)


def as_wished(
    host: HostDescription, entries: Mapping[int, Entry], profiles: Mapping[int, Sequence[Profile]]
) -> HostDescription:
    """Return the host with each GPU as its entry wants it; a GPU without an entry stays as it is.

    ``profiles`` are the driver's, for each GPU that is to have MIG. MIG devices that do not exist yet have no UUID, no
    ids and no capability nodes.
    """
    gpus = (
        _wished_gpu(gpu, entries[gpu.index], profiles.get(gpu.index, ())) if gpu.index in entries else gpu
        for gpu in host.gpus
    )
    return replace(host, gpus=tuple(gpus))


def _wished_gpu(gpu: GpuDescription, entry: Entry, profiles: Sequence[Profile]) -> GpuDescription:
    """Return a GPU as its entry wants it; what it is, such as its UUID, stays."""
    alone = entry.sharing is Way.EXCLUSIVE or (entry.mps is not None and entry.mps.exclusive)
    return replace(
        gpu,
        sharing=entry.sharing,
        time_slice=entry.time_slice if entry.sharing is Way.TIMESLICE else None,
        compute_mode=ComputeMode.EXCLUSIVE_PROCESS if alone else ComputeMode.DEFAULT,
        mps=_plain_mps(entry.mps or MpsWish()) if entry.sharing is Way.MPS else None,
        mig=_wished_devices(entry, profiles) if entry.sharing is Way.MIG else (),
        bare=False,
        pending_mode=False,
    )


def _plain_mps(wish: MpsWish) -> MpsWish:
    """Return a daemon without its defaults (100 %, normal priority) and compute mode, of which exports say nothing."""
    return MpsWish(limits=Limits.of(wish.limits), users=wish.users, multiuser=wish.multiuser)


def _wished_devices(entry: Entry, profiles: Sequence[Profile]) -> tuple[MigDescription, ...]:
    """Return the MIG devices that an entry wants, without what only an existing one has."""
    profile_of = {profile.name: profile for profile in profiles}
    return tuple(
        MigDescription(
            # A compute instance that fills its GPU instance has no size in its name.
            profile=name if want.slices == profile_of[name].slices else f"{want.slices}c.{name}",
            uuid="",
            index=index,
            start=want.start,
            memory_total_bytes=profile_of[name].memory_bytes,
            name=want.wish.name,
            granted=bool(want.wish.users),
            mps=None if want.wish.mps is None else _plain_mps(want.wish.mps),
        )
        for index, want in enumerate(wanted_devices(entry, profiles))
        for name in [want.profile]
    )


def with_live_devices(
    wanted: HostDescription, live: HostDescription, pipe_of: Callable[[str], str], *, apply: str, daemons_only: bool
) -> HostDescription:
    """Return a wanted host for engines that name devices by UUID and daemons by their pipes.

    Both hosts have the same GPUs. Each wanted MIG device is matched to a live one, because only those have UUIDs.
    ``pipe_of`` returns the pipe directory of a daemon that does not run yet; ``apply`` is the command that applies the
    wanted host. ``daemons_only``: the engine names only devices that have a daemon. Raises NotFound: a MIG device does
    not exist yet (code ``not_applied``).
    """
    gpus = []
    for gpu, now in zip(wanted.gpus, live.gpus, strict=True):
        devices = []
        for mig, device in zip(gpu.mig, _live_devices(gpu.mig, now.mig), strict=True):
            if device is None:
                if daemons_only and mig.mps is None:
                    continue
                raise NotFound(
                    f"GPU {gpu.index} has no {mig.profile} yet, which the file wants; only existing devices have a UUID",
                    f"create it first: {apply}",
                    gpu=gpu.index,
                    code="not_applied",
                )
            mps = _with_pipe(mig.mps, device, pipe_of)
            devices.append(replace(device, name=mig.name, granted=mig.granted, mps=mps))
        gpus.append(replace(gpu, mps=_with_pipe(gpu.mps, now, pipe_of), mig=tuple(devices)))
    return replace(wanted, gpus=tuple(gpus))


def _live_devices(wanted: Sequence[MigDescription], present: Sequence[MigDescription]) -> list[MigDescription | None]:
    """Return for each wanted device the live one that `gpushare apply` would use; None: it does not exist yet."""
    # Slices are 0 on both sides: here the profiles have them in their names (1c.3g.40gb).
    missing = (
        WantedDevice(InstanceWish(wish="", name=wish.name, mps=wish.mps), wish.profile, wish.start, slices=0)
        for wish in wanted
    )
    devices = (
        # -1: unknown, at which no device is wanted.
        PlacedDevice(
            mig.profile, -1 if mig.start is None else mig.start, 0, mig.is_whole, number, name=mig.name, mps=mig.mps
        )
        for number, mig in enumerate(present)
    )
    assigned = assign(missing, devices).devices
    return [None if want.device is None else present[want.device.number] for want in assigned]


def _with_pipe(
    wish: MpsWish | None, now: GpuDescription | MigDescription, pipe_of: Callable[[str], str]
) -> MpsWish | None:
    """Return a wanted daemon with the pipe directory of the daemon that its device has ``now``, else that of ``pipe_of``."""
    if wish is None:
        return None
    pipe = None if now.mps is None else now.mps.pipe_directory
    return replace(wish, pipe_directory=pipe or pipe_of(now.uuid))
