"""How each GPU of a host is shared now, for ``capture``, ``diff`` and ``apply``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.actions.host_units import is_unit, live_unit, with_units
from gpushare.actions.mig_grant import plan_reapply
from gpushare.actions.mig_layouts import layouts_of
from gpushare.actions.mps_start_checks import is_there
from gpushare.errors import GpushareError, NotFound
from gpushare.host.capabilities import user_id, user_name
from gpushare.host.mig_names import names_of
from gpushare.host.mps import find_daemons
from gpushare.host.mps_access import pipe_users
from gpushare.layout.hostfile import Entry, InstanceWish, MpsWish
from gpushare.layout.live import LiveGpu, LiveMps, LiveName
from gpushare.mig.profile import Layout
from gpushare.model import Priority

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mig_names import NamedInstance
    from gpushare.host.mps import FoundDaemon
    from gpushare.model import Gpu, TimeSlice


def look(host: Host, gpus: Sequence[Gpu]) -> list[LiveGpu]:
    """Return how these GPUs are shared: modes, time-slice, daemons with their limits, MIG with names and grants.

    A GPU that does not answer is there with its error only; a host without nvidia-smi has no time-slice.

    Raises:
        GpushareError: NVML does not answer.
    """
    levels = _levels(host)
    found = with_units(host, find_daemons(host, gpus), gpus)
    answering = [gpu for gpu in gpus if gpu.error is None]
    layouts = {one.gpu: one for one in layouts_of(host, [gpu for gpu in answering if gpu.mig_capable])}
    named = names_of(host)
    return [_live(host, gpu, levels, found, layouts.get(gpu.index), named.values()) for gpu in gpus]


def _levels(host: Host) -> dict[int, TimeSlice | None]:
    try:
        return host.policy.read()
    except GpushareError:
        return {}


def _live(
    host: Host,
    gpu: Gpu,
    levels: dict[int, TimeSlice | None],
    found: Sequence[FoundDaemon],
    layout: Layout | None,
    named: Iterable[NamedInstance],
) -> LiveGpu:
    mine = {gpu.uuid, *(mig.uuid for mig in gpu.mig_instances)} - {None}
    ours = [one for one in found if one.daemon.ours and one.daemon.device_uuid in mine]
    units = [one.daemon for one in found if is_unit(one.daemon) and one.daemon.device_uuid in mine]
    others = [one for one in found if not one.daemon.ours and one.daemon.device_uuid is None]
    there = (one for one in others if gpu.index in one.daemon.gpu_indexes and is_there(host, one, gpu.index))
    foreign = [one.daemon for one in there]
    names = [one for one in named if one.gpu_uuid == gpu.uuid]
    return LiveGpu(
        gpu=gpu,
        time_slice=levels.get(gpu.index),
        has_time_slice=gpu.index in levels,
        daemons={
            **{one.daemon.device_uuid or "": _mps(one) for one in ours},
            **{one.device_uuid or "": live_unit(host, gpu, one) for one in units},
        },
        foreign=tuple(
            f"an MPS daemon that gpushare did not start (process {one.pid}, {one.pipe_directory})" for one in foreign
        ),
        layout=layout if gpu.error is None else None,
        names=tuple(_name(host, one) for one in names),
    )


def _mps(found: FoundDaemon) -> LiveMps:
    daemon, record, home = found.daemon, found.record, found.home
    transient = daemon.transient or (record is not None and record.transient)
    if daemon.error is not None or record is None or home is None or record.interrupted:
        # Whether all that an interrupted start wanted is set is not known.
        return LiveMps(pid=daemon.pid, wish=None, error=daemon.error or daemon.note, transient=transient)
    threads = daemon.threads_percent
    wish = MpsWish(
        threads_percent=None if threads == 100.0 else threads,
        memory_limit_bytes=daemon.memory_limit_bytes,
        priority=daemon.priority or Priority.NORMAL,
        users=pipe_users(home.pipe) or (),
        exclusive=record.previous_compute_mode is not None,
    )
    return LiveMps(pid=daemon.pid, wish=wish, transient=transient)


def _name(host: Host, one: NamedInstance) -> LiveName:
    users = tuple(sorted(_known(user) for user in one.users))
    try:
        held = not plan_reapply(host, [one])
    except GpushareError:
        held = False
    return LiveName(name=one.name, profile=one.profile, start=one.start, users=users, held=held)


def _known(user: str) -> str:
    try:
        return user_name(user_id(user))
    except NotFound:
        return user


def with_known_users(entry: Entry, shown: str) -> Entry:
    """Return an entry with its users by name, where the file may have ids.

    Raises:
        NotFound: the host has no such user.
    """

    def known(users: tuple[str, ...], at: object) -> tuple[str, ...]:
        try:
            return tuple(sorted({user_name(user_id(user)) for user in users}))
        except NotFound as error:
            raise NotFound(f"{shown}:{at}: {error.message}", error.hint, code=error.code) from None

    def mps(wish: MpsWish | None, at: object) -> MpsWish | None:
        return None if wish is None else replace(wish, users=known(wish.users, at))

    def instance(one: InstanceWish) -> InstanceWish:
        return replace(one, users=known(one.users, one.mark), mps=mps(one.mps, one.mark))

    return replace(entry, mps=mps(entry.mps, entry.mark), mig=tuple(map(instance, entry.mig)))
