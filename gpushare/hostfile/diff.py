"""How a GPU differs from its entry in ``gpushare.yaml``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpushare.base.errors import NotSupported
from gpushare.base.model import ComputeMode, Gpu, MigInstance, Priority, Way
from gpushare.base.selection import Device, no_mig_error
from gpushare.base.units import size_option
from gpushare.hostfile.file import MEMORY_KEY, Entry, MpsWish
from gpushare.hostfile.live import (
    Assignment,
    LiveGpu,
    LiveMps,
    WantedDevice,
    assignment_of,
    devices_of_layout,
    wanted_devices,
)
from gpushare.mig.plan import NoPlan
from gpushare.mig.planner import plan_exact
from gpushare.mig.profile import Layout, Profile
from gpushare.mig.target import difference
from gpushare.mps.limits import check_memory


@dataclass(frozen=True, kw_only=True)
class Point:
    """One difference between host and file. ``found`` is what the host has, ``wanted`` what the file says; None: nothing."""

    what: str
    found: str | None
    wanted: str | None

    def __str__(self) -> str:
        return f"{self.what}: {self.found or 'none'}; the file: {self.wanted or 'none'}"


def diff_points(live: LiveGpu, entry: Entry, entries: Mapping[int, Entry] | None = None) -> tuple[Point, ...]:
    """Return how a GPU differs from its entry; empty: it does not.

    ``entries`` are those of all GPUs by index: they show on which GPU the file wants a name instead.
    """
    elsewhere = {f"name {mig.name}": f"on GPU {index}" for index, other in (entries or {}).items() for mig in other.mig}
    return tuple(
        point if point.wanted else replace(point, wanted=elsewhere.get(point.what))
        for point in _yield_points(live, entry)
    )


def _yield_points(live: LiveGpu, entry: Entry) -> Iterator[Point]:
    wanted_mps = "a daemon of gpushare" if entry.sharing is Way.MPS else None
    for daemon in live.foreign:
        yield Point(what="MPS", found=daemon, wanted=wanted_mps)
    wants_mig = entry.sharing is Way.MIG
    yield from _mig_mode_points(live, wants_mig=wants_mig)
    if wants_mig:
        yield from _layout_points(live, entry)
    elif live.gpu.mig_enabled and live.instances:
        surplus = ", ".join(f"{instance.profile.name}:{instance.start}" for instance in live.instances)
        yield Point(what="MIG devices", found=surplus, wanted=None)
    # With MIG, a GPU has only the default compute mode.
    if not live.gpu.mig_enabled and not wants_mig:
        yield from _compute_mode_points(live, entry)
    level = entry.time_slice
    if level is not None and live.lacks_level(level):
        now = "unknown" if live.time_slice is None else live.time_slice.title
        yield Point(what="time-slice", found=now, wanted=level.title)
    yield from mps_points("MPS", live.mps, entry.mps)


def _mig_mode_points(live: LiveGpu, *, wants_mig: bool) -> Iterator[Point]:
    """Yield that MIG is on or off against the file, or will be after a reset or reboot (pending)."""
    word = {True: "on", False: "off", None: "not there"}
    enabled, pending = live.gpu.mig_enabled, live.gpu.mig_pending
    if bool(enabled) is not wants_mig:
        yield Point(what="MIG", found=word[enabled], wanted=word[wants_mig])
    elif pending is not None and pending is not wants_mig:
        yield Point(what="MIG", found=f"{word[pending]} is pending", wanted=word[wants_mig])


def _compute_mode_points(live: LiveGpu, entry: Entry) -> Iterator[Point]:
    """Yield that the compute mode is not the one that an entry without MIG needs."""
    now = live.gpu.compute_mode
    wanted = ComputeMode.DEFAULT
    if entry.sharing is Way.EXCLUSIVE or (entry.mps is not None and entry.mps.exclusive):
        wanted = ComputeMode.EXCLUSIVE_PROCESS
    # A GPU without a compute mode (some virtual GPUs) counts as default.
    if (now or ComputeMode.DEFAULT) is not wanted:
        yield Point(what="compute mode", found="unknown" if now is None else now.title, wanted=wanted.title)


def mps_points(what: str, live: LiveMps | None, wanted: MpsWish | None) -> Iterator[Point]:
    """Yield how the daemon of a device differs from the wanted one; None: no daemon. ``what`` names it in the points."""
    if live is None and wanted is None:
        return
    if live is None or live.wish is None or wanted is None:
        found = None
        if live is not None:
            found = _mps_text(live.wish) if live.wish else live.error or "it does not answer"
        yield Point(what=what, found=found, wanted=None if wanted is None else _mps_text(wanted))
        return
    wanted_texts = _texts_by_key(wanted)
    for key, text_now in _texts_by_key(live.wish).items():
        if text_now != wanted_texts[key]:
            yield Point(what=f"{what} {key}", found=text_now, wanted=wanted_texts[key])


def _texts_by_key(wish: MpsWish) -> dict[str, str | None]:
    """Return what a daemon holds, as text by the key of the file, with every default spelled out."""
    limits = wish.limits.explicit
    return {
        "threads": f"{limits.threads_percent or 100.0:g} %",
        "memory": None if limits.memory_limit_bytes is None else size_option(limits.memory_limit_bytes),
        "priority": (limits.priority or Priority.NORMAL).title,
        "users": _users_text(wish.users),
        "exclusive": str(wish.exclusive).lower(),
        "multiuser": str(wish.multiuser).lower(),
    }


def _layout_points(live: LiveGpu, entry: Entry) -> Iterator[Point]:
    """Yield missing and surplus MIG devices, and how their names, grants and daemons differ."""
    if live.layout is None or not live.layout.profiles:
        # Some drivers list no profiles while MIG is off: the mode is difference enough.
        return
    differs = difference(live.layout, entry.wish)
    for devices in differs.missing:
        yield Point(what="MIG devices", found=None, wanted=str(devices))
    for devices in differs.extra:
        yield Point(what="MIG devices", found=str(devices), wanted=None)
    present = devices_of_layout(live)
    assignment = assignment_of(live, entry, live.layout, present)
    yield from _name_points(live, assignment)
    for want in assignment.devices:
        if want.device is not None:
            yield from mps_points(f"MPS of {want.device}", live.daemon(want.device.uuid), want.wish.mps)
    assigned = {want.device for want in assignment.devices}
    for device in present:
        if device not in assigned:
            yield from mps_points(f"MPS of {device}", live.daemon(device.uuid), None)


def _name_points(live: LiveGpu, assignment: Assignment) -> Iterator[Point]:
    """Yield missing, wrong and surplus names and grants."""
    wanted = {named.name: named for named in assignment.names}
    # Names in the file whose devices do not exist yet.
    waiting = {
        device.wish.name: _place_text(device)
        for device in assignment.devices
        if device.wish.name and device.wish.name not in wanted
    }
    present = {named.name: named for named in live.names}
    for name in sorted(wanted.keys() | present.keys() | waiting.keys()):
        found = str(present[name]) if name in present else None
        if name not in wanted:
            # At the right instance only the device, its compute instance, is missing: that is a point of its own.
            if found != waiting.get(name):
                yield Point(what=f"name {name}", found=found, wanted=waiting.get(name))
            continue
        if found != str(wanted[name]):
            yield Point(what=f"name {name}", found=found, wanted=str(wanted[name]))
        users_now = _users_text(present[name].users if name in present else ())
        users_wanted = _users_text(wanted[name].users)
        if users_now != users_wanted:
            yield Point(what=f"users of {name}", found=users_now, wanted=users_wanted)
        elif name in live.open:
            yield Point(what=f"users of {name}", found="not in force", wanted=users_wanted)


def _place_text(want: WantedDevice) -> str:
    return want.profile if want.start is None else f"{want.profile}:{want.start}"


def _users_text(users: tuple[str, ...]) -> str:
    return ", ".join(sorted(users)) or "all users"


def _mps_text(wish: MpsWish) -> str:
    """Return a daemon for a message: ``a daemon, 25 % of the threads``."""
    return ", ".join(["a daemon", *wish.words])


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
        check_memory(Device(gpu=gpu), entry.mps.limits.memory_limit_bytes, key=MEMORY_KEY)
    if entry.sharing is not Way.MIG:
        return
    empty = Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=tuple(profiles), instances=())
    planned = plan_exact([empty], {gpu.index: entry.wish})
    if isinstance(planned, NoPlan):
        raise NotSupported(planned.message, planned.hint, gpu=gpu.index, code="never_fits")
    memory_of = {profile.name: profile.memory_bytes for profile in profiles}
    for want in wanted_devices(entry, profiles):
        if want.wish.mps is not None:
            mig = MigInstance(uuid="", profile=want.profile, memory_total_bytes=memory_of[want.profile])
            check_memory(Device(gpu=gpu, mig=mig), want.wish.mps.limits.memory_limit_bytes, key=MEMORY_KEY)
