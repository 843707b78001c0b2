"""How a GPU differs from its entry in ``gpushare.yaml``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpushare.base.errors import NotSupported
from gpushare.base.model import ComputeMode, Gpu, MigInstance, Priority, TimeSlice, Way
from gpushare.base.selection import Device, no_mig_error
from gpushare.base.units import size_option
from gpushare.hostfile.file import Entry, MpsWish
from gpushare.hostfile.live import Assignment, LiveGpu, LiveMps, WantedDevice, assignment_of, devices_of_layout
from gpushare.mig.plan import NoPlan
from gpushare.mig.planner import plan_exact
from gpushare.mig.profile import Layout, Profile
from gpushare.mig.target import difference
from gpushare.mig.wish import parse_wish, resolve
from gpushare.mps.limits import Limits, check_memory


@dataclass(frozen=True, kw_only=True)
class Point:
    """One difference between host and file. ``found`` is what the host has, ``wanted`` what the file says; None: nothing."""

    what: str
    found: str | None
    wanted: str | None

    def __str__(self) -> str:
        return f"{self.what}: {self.found or 'none'}; the file: {self.wanted or 'none'}"


def points(live: LiveGpu, entry: Entry, entries: Mapping[int, Entry] | None = None) -> tuple[Point, ...]:
    """Return how a GPU differs from its entry; empty: it does not.

    ``entries`` are those of all GPUs by index: they show on which GPU the file wants a name instead.
    """
    return tuple(_find_points(live, entry, _names_elsewhere(live, entries or {})))


def _find_points(live: LiveGpu, entry: Entry, elsewhere: Mapping[str, str]) -> Iterator[Point]:
    """Yield the differences of a GPU; ``elsewhere`` tells where the file has a name that this GPU is not to have."""
    for daemon in live.foreign:
        yield Point(what="MPS", found=daemon, wanted=None if entry.sharing is not Way.MPS else "a daemon of gpushare")
    wanted = entry.sharing is Way.MIG
    yield from _mode_points(live, wanted=wanted)
    if wanted:
        yield from _layout_points(live, entry, elsewhere)
    elif live.gpu.mig_enabled:
        gone = ", ".join(f"{instance.profile.name}:{instance.start}" for instance in live.instances)
        yield from [Point(what="MIG devices", found=gone, wanted=None)] if gone else []
    exclusive = entry.mps is not None and entry.mps.exclusive
    mode = ComputeMode.EXCLUSIVE_PROCESS if entry.sharing is Way.EXCLUSIVE or exclusive else ComputeMode.DEFAULT
    # A GPU without a compute mode (some virtual GPUs) counts as default.
    if not live.gpu.mig_enabled and not wanted and (live.gpu.compute_mode or ComputeMode.DEFAULT) is not mode:
        now = "unknown" if live.gpu.compute_mode is None else live.gpu.compute_mode.title
        yield Point(what="compute mode", found=now, wanted=mode.title)
    level = entry.time_slice
    if level is not None and live.time_slice is not level and (live.has_time_slice or level is not TimeSlice.DEFAULT):
        now = "unknown" if live.time_slice is None else live.time_slice.title
        yield Point(what="time-slice", found=now, wanted=level.title)
    yield from mps_points("MPS", live.mps, entry.mps)


def _mode_points(live: LiveGpu, *, wanted: bool) -> Iterator[Point]:
    """Yield that MIG is on or off against the file, or is about to be."""
    word = {True: "on", False: "off", None: "not there"}
    enabled, pending = live.gpu.mig_enabled, live.gpu.mig_pending
    if bool(enabled) is not wanted:
        yield Point(what="MIG", found=word[enabled], wanted=word[wanted])
    elif pending is not None and pending is not wanted:
        yield Point(what="MIG", found=f"{word[pending]} is pending", wanted=word[wanted])


def mps_points(what: str, live: LiveMps | None, wanted: MpsWish | None) -> Iterator[Point]:
    """Yield how a daemon differs from the wanted one; ``what`` names it. None: there is none, or none is wanted."""
    if live is None and wanted is None:
        return
    if live is None or live.wish is None or wanted is None:
        shown = None if live is None else _mps_text(live.wish) if live.wish else live.error or "it does not answer"
        yield Point(what=what, found=shown, wanted=None if wanted is None else _mps_text(wanted))
        return
    now, held, limits = live.wish, live.wish.limits.explicit, wanted.limits.explicit
    for name, held_text, want in (
        ("threads", _percent_text(held.threads_percent), _percent_text(limits.threads_percent)),
        ("memory", _size_text(held.memory_limit_bytes), _size_text(limits.memory_limit_bytes)),
        ("priority", _priority_text(held), _priority_text(limits)),
        ("users", _users_text(now.users), _users_text(wanted.users)),
        ("exclusive", str(now.exclusive).lower(), str(wanted.exclusive).lower()),
        ("multiuser", str(now.multiuser).lower(), str(wanted.multiuser).lower()),
    ):
        if held_text != want:
            yield Point(what=f"{what} {name}", found=held_text, wanted=want)


def _layout_points(live: LiveGpu, entry: Entry, elsewhere: Mapping[str, str]) -> Iterator[Point]:
    """Yield missing and surplus MIG devices, and how their names, grants and daemons differ."""
    if live.layout is None or not live.layout.profiles:
        # Some drivers list no profiles while MIG is off: the mode is difference enough.
        return
    differs = difference(live.layout, entry.wish)
    for devices in differs.missing:
        yield Point(what="MIG devices", found=None, wanted=str(devices))
    for devices in differs.extra:
        yield Point(what="MIG devices", found=str(devices), wanted=None)
    assignment = assignment_of(live, entry, live.layout, devices_of_layout(live))
    yield from name_points(live, assignment, elsewhere)
    for want in assignment.devices:
        if want.device is not None:
            yield from mps_points(f"MPS of {want.device}", live.daemon(want.device.uuid), want.wish.mps)
    taken = {want.device for want in assignment.devices}
    for device in devices_of_layout(live):
        if device not in taken:
            yield from mps_points(f"MPS of {device}", live.daemon(device.uuid), None)


def _names_elsewhere(live: LiveGpu, entries: Mapping[int, Entry]) -> dict[str, str]:
    """Return where the file has names that are not wanted on this GPU."""
    return {
        mig.name: f"on GPU {index}"
        for index, entry in entries.items()
        if index != live.gpu.index
        for mig in entry.mig
        if mig.name is not None
    }


def name_points(live: LiveGpu, assignment: Assignment, elsewhere: Mapping[str, str]) -> Iterator[Point]:
    """Yield missing, wrong and surplus names and grants."""
    wanted = {named.name: named for named in assignment.names}
    # Names in the file whose devices do not exist yet.
    waiting = {
        device.wish.name: device for device in assignment.devices if device.wish.name and device.wish.name not in wanted
    }
    present = {named.name: named for named in live.names}
    for name in sorted(wanted.keys() | present.keys() | waiting.keys()):
        now, want = present.get(name), wanted.get(name)
        if want is None:
            waiting_device = waiting.get(name)
            place = elsewhere.get(name) if waiting_device is None else _place_text(waiting_device)
            place_now = None if now is None else str(now)
            if now is not None and place_now == place:
                place_now = f"{place_now} without a compute instance"
            yield Point(what=f"name {name}", found=place_now, wanted=place)
            continue
        places = [None if named is None else str(named) for named in (now, want)]
        if places[0] != places[1]:
            yield Point(what=f"name {name}", found=places[0], wanted=places[1])
        users = [() if named is None else tuple(sorted(named.users)) for named in (now, want)]
        if users[0] != users[1]:
            yield Point(what=f"users of {name}", found=_users_text(users[0]), wanted=_users_text(users[1]))
        elif name in live.open:
            yield Point(what=f"users of {name}", found="not in force", wanted=_users_text(users[1]))


def _place_text(want: WantedDevice) -> str:
    return want.profile if want.start is None else f"{want.profile}:{want.start}"


def _percent_text(value: float | None) -> str:
    return f"{100.0 if value is None else value:g} %"


def _size_text(value: int | None) -> str | None:
    return None if value is None else size_option(value)


def _priority_text(limits: Limits) -> str:
    return (limits.priority or Priority.NORMAL).title


def _users_text(users: tuple[str, ...]) -> str:
    return ", ".join(sorted(users)) or "all users"


def _mps_text(wish: MpsWish) -> str:
    limits = wish.limits
    parts = [f"{_percent_text(limits.threads_percent)} of the threads"]
    if limits.memory_limit_bytes is not None:
        parts.append(size_option(limits.memory_limit_bytes))
    if limits.priority is not None:
        parts.append(f"priority {limits.priority.title}")
    if wish.users:
        parts.append(f"for {_users_text(wish.users)}")
    return "a daemon, " + ", ".join(parts + (["exclusive"] if wish.exclusive else []))


def check_has_mig(gpu: Gpu, entry: Entry) -> None:
    """Raise NotSupported if an entry wants MIG and the GPU has none."""
    if entry.sharing is Way.MIG and not gpu.mig_capable:
        raise no_mig_error([gpu])


def check_fits(gpu: Gpu, entry: Entry, profiles: Sequence[Profile]) -> None:
    """Raise unless the layout fits on the empty GPU, and each memory limit fits its device.

    ``profiles`` are the driver's, if the entry wants MIG.

    Raises:
        NotSupported: no MIG, no such profile, or it never fits (code ``never_fits``).
        BadUsage: an ambiguous profile, an impossible placement, a limit above the memory.
    """
    check_has_mig(gpu, entry)
    if entry.mps is not None:
        check_memory(Device(gpu=gpu), entry.mps.limits.memory_limit_bytes)
    if entry.sharing is not Way.MIG:
        return
    empty = Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=tuple(profiles), instances=())
    planned = plan_exact([empty], {gpu.index: entry.wish})
    if isinstance(planned, NoPlan):
        raise NotSupported(planned.message, planned.hint, gpu=gpu.index, code="never_fits")
    for instance in entry.mig:
        if instance.mps is None:
            continue
        for request in parse_wish(instance.wish):
            profile = resolve(request, profiles)
            mig = MigInstance(uuid="", profile=profile.name, memory_total_bytes=profile.memory_bytes)
            check_memory(Device(gpu=gpu, mig=mig), instance.mps.limits.memory_limit_bytes)
