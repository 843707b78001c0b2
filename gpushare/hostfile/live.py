"""How one GPU is shared now, and the same as an entry of ``gpushare.yaml``. Frozen, pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, NamedTuple

from gpushare.base.errors import BadUsage
from gpushare.base.model import ComputeMode, Gpu, TimeSlice, Way
from gpushare.hostfile.file import Entry, Exactness, HostFile, InstanceWish, Match, MpsWish
from gpushare.mig.ledger import NamedInstance
from gpushare.mig.profile import GpuInstance, Layout, Profile
from gpushare.mig.shape import GpuShape
from gpushare.mig.wish import parse_wish, resolve


@dataclass(frozen=True, kw_only=True)
class LiveMps:
    """A daemon of gpushare on a GPU or MIG device. ``wish`` has its limits; None: it does not answer, or is dead."""

    pid: int | None
    wish: MpsWish | None
    # Why ``wish`` is None.
    error: str | None = None
    # Started by `gpushare run` and stopped with its last program: not part of the host's setup.
    transient: bool = False
    # The systemd unit that runs it (gpushare export systemd); None: gpushare started it.
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class LiveGpu:
    """One GPU: its modes, its daemons by device UUID, its MIG layout and names."""

    gpu: Gpu
    time_slice: TimeSlice | None = None
    # Whether nvidia-smi lists a time-slice for it.
    has_time_slice: bool = True
    daemons: Mapping[str, LiveMps] = field(default_factory=dict)
    # Daemons that gpushare did not start: process and pipe directory.
    foreign: tuple[str, ...] = ()
    layout: Layout | None = None
    names: tuple[NamedInstance, ...] = ()
    # The names among them whose grants are not in force.
    open: frozenset[str] = frozenset()

    @property
    def mps(self) -> LiveMps | None:
        return self.daemon(self.gpu.uuid)

    def daemon(self, uuid: str | None) -> LiveMps | None:
        """Return the lasting daemon of gpushare on a device; None: there is none."""
        daemon = self.daemons.get(uuid or "")
        return None if daemon is None or daemon.transient else daemon

    def lacks_level(self, level: TimeSlice) -> bool:
        """Return whether its time-slice is not ``level``; a GPU without one counts as default."""
        if level is TimeSlice.DEFAULT and not self.has_time_slice:
            return False
        return self.time_slice is not level

    @property
    def instances(self) -> tuple[GpuInstance, ...]:
        instances = () if self.layout is None else self.layout.instances
        return tuple(sorted(instances, key=lambda instance: instance.start))


# The match of a captured entry, until it is known which GPUs share the entry.
_NO_GPU_YET: Final = Match(by=Exactness.ALL)


def captured_file(gpus: list[LiveGpu]) -> tuple[HostFile, list[str]]:
    """Return the file for these GPUs as they are, by index, and notes on what it cannot express. Equal GPUs share an entry."""
    values_by_entry: dict[Entry, list[str]] = {}
    notes: list[str] = []
    for live in gpus:
        entry = _captured_entry(live, notes)
        if entry is not None:
            values_by_entry.setdefault(entry, []).append(str(live.gpu.index))
    entries = (
        replace(entry, match=Match(by=Exactness.INDEX, values=tuple(values)))
        for entry, values in values_by_entry.items()
    )
    return HostFile(entries=tuple(entries)), notes


def _captured_entry(live: LiveGpu, notes: list[str]) -> Entry | None:
    """Return the entry that describes a GPU as it is, without the GPU; None: no entry can.

    ``notes`` gets why, and what is left out.
    """
    gpu, title = live.gpu, f"GPU {live.gpu.index}"
    if gpu.error is not None:
        # The command reports the GPU as an error.
        return None
    lasting = [daemon for daemon in live.daemons.values() if not daemon.transient]
    silent = [daemon for daemon in lasting if daemon.pid is not None and daemon.wish is None]
    if silent:
        # Without its daemon, the file would describe another way of sharing.
        notes.append(f"{title} is left out: its MPS daemon does not answer: {silent[0].error or 'no reason known'}")
        return None
    notes += [f"{title}: {daemon}: a file cannot express it" for daemon in live.foreign]
    if gpu.mig_pending is not None and gpu.mig_pending != gpu.mig_enabled:
        notes.append(f"{title}: a change of the MIG mode is pending; the file has the current mode")
    has_level = live.time_slice not in {None, TimeSlice.DEFAULT}
    if gpu.mig_enabled:
        if live.time_slice is not None and has_level:
            notes.append(
                f"{title}: its time-slice level {live.time_slice.title} is left out: a file cannot express one with MIG"
            )
        return Entry(match=_NO_GPU_YET, sharing=Way.MIG, mig=tuple(_captured_instances(live, notes)))
    if has_level and (live.mps or gpu.compute_mode is not ComputeMode.DEFAULT):
        notes.append(f"{title}: its time-slice level is left out: it has no effect with this way of sharing")
    if live.mps is not None:
        if live.mps.wish is not None:
            return Entry(match=_NO_GPU_YET, sharing=Way.MPS, mps=live.mps.wish)
        # It is dead.
        notes.append(f"{title}: its MPS daemon is left out: {live.mps.error or 'it does not answer'}")
    return _captured_entry_without_daemon(live, notes)


def _captured_entry_without_daemon(live: LiveGpu, notes: list[str]) -> Entry | None:
    """Return the entry of a GPU without MIG and MPS, by its compute mode and time-slice; None: as `_captured_entry`."""
    gpu, title = live.gpu, f"GPU {live.gpu.index}"
    if gpu.compute_mode in {ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_THREAD}:
        notes.append(f"{title} is left out: a file cannot express compute mode {gpu.compute_mode.title}")
        return None
    if gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS:
        return Entry(match=_NO_GPU_YET, sharing=Way.EXCLUSIVE)
    if live.time_slice is None:
        notes.append(f"{title}: its time-slice level is unknown; the file has default")
    return Entry(match=_NO_GPU_YET, sharing=Way.TIMESLICE, time_slice=live.time_slice or TimeSlice.DEFAULT)


def _captured_instances(live: LiveGpu, notes: list[str]) -> list[InstanceWish]:
    """Return the MIG devices of a GPU as items of a file, equal ones with a count; ``notes`` gets what is left out."""
    for instance in live.instances:
        if not instance.compute:
            notes.append(
                f"GPU {live.gpu.index}: GPU instance {instance.id} ({instance}) has no compute instance and is left out"
            )
    wishes: list[InstanceWish] = []
    named_at = {named.place: named for named in live.names}
    for device in sorted(devices_of_layout(live), key=lambda device: (device.start, -device.slices)):
        daemon = live.daemon(device.uuid)
        if daemon is not None and daemon.wish is None:
            notes.append(f"GPU {live.gpu.index}: the MPS daemon of {device.uuid} is left out: {daemon.error}")
        # The name of a GPU instance and its users go to the first device in it, the largest.
        named = named_at.pop(device.place, None)
        wishes.append(
            InstanceWish(
                wish=str(device),
                name=None if named is None else named.name,
                users=() if named is None else named.users,
                mps=device.mps,
            )
        )
    # Equal neighbours become one with a count; an item with a name stays alone.
    merged: list[InstanceWish] = []
    for wish, equal_wishes in groupby(wishes):
        count = len(list(equal_wishes))
        if count == 1 or wish.name is not None:
            merged += [wish] * count
        else:
            merged.append(replace(wish, wish=f"{wish.wish}*{count}"))
    return merged


class PlacedDevice(NamedTuple):
    """One MIG device, existing or to be created.

    ``profile`` and ``start`` are those of its GPU instance, ``slices`` are its own compute slices; ``whole``: it has all of
    the instance. ``number`` counts the devices of one size in one GPU instance: the existing ones, and apart those to come.
    """

    profile: str
    start: int
    slices: int
    whole: bool
    number: int = 0
    uuid: str | None = None
    name: str | None = None
    mps: MpsWish | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Return the profile and the first memory slice of its GPU instance."""
        return self.profile, self.start

    def __str__(self) -> str:
        return f"{'' if self.whole else f'{self.slices}c.'}{self.profile}:{self.start}"


@dataclass(frozen=True)
class WantedDevice:
    """One MIG device of the file, and the device assigned to it (None: there is none yet)."""

    wish: InstanceWish
    profile: str
    start: int | None
    slices: int
    device: PlacedDevice | None = None


@dataclass(frozen=True)
class Assignment:
    """All items of an entry with their devices."""

    devices: tuple[WantedDevice, ...]
    gpu_uuid: str = ""

    @property
    def names(self) -> tuple[NamedInstance, ...]:
        """Return the names whose instance is known. Raises BadUsage: two names are for one instance."""
        by_place: dict[tuple[str, int], NamedInstance] = {}
        for want in self.devices:
            if want.device is None or want.wish.name is None:
                continue
            other = by_place.get(want.device.place)
            if other is not None:
                raise BadUsage(
                    f"the names '{other.name}' and '{want.wish.name}' are for the same GPU instance, {want.device.profile}",
                    "keep one of them: a name is for the GPU instance with all its compute instances",
                    code="bad_file",
                )
            by_place[want.device.place] = NamedInstance(
                name=want.wish.name,
                gpu_uuid=self.gpu_uuid,
                profile=want.device.profile,
                start=want.device.start,
                users=want.wish.users,
            )
        return tuple(by_place.values())


def assignment_of(live: LiveGpu, entry: Entry, layout: Layout, devices: Iterable[PlacedDevice]) -> Assignment:
    """Return the items of an entry of a GPU, each with the device that fits best."""
    return assign(wanted_devices(entry, layout.profiles), devices, gpu_uuid=live.gpu.uuid or "")


def wanted_devices(entry: Entry, profiles: Sequence[Profile]) -> list[WantedDevice]:
    """Return the single MIG devices that an entry wants: one for each compute instance of each count."""
    return [
        WantedDevice(mig, profile.name, request.start, slices)
        for mig in entry.mig
        for request in parse_wish(mig.wish)
        for profile in [resolve(request, profiles)]
        for _ in range(request.count)
        for slices in request.compute or (profile.slices,)
    ]


def assign(wanted: Iterable[WantedDevice], devices: Iterable[PlacedDevice], *, gpu_uuid: str = "") -> Assignment:
    """Return the wanted devices in their order, each with the device that fits best; some may get none."""
    assigned = list(wanted)
    offered = list(devices)
    # As numbers in the two lists, the best pairs first.
    pairs = sorted(
        (_rank(want, device), want_number, device_number)
        for want_number, want in enumerate(assigned)
        for device_number, device in enumerate(offered)
        if (want.profile, want.slices) == (device.profile, device.slices) and want.start in {None, device.start}
    )
    taken: set[int] = set()
    for _, want_number, device_number in pairs:
        if assigned[want_number].device is None and device_number not in taken:
            taken.add(device_number)
            assigned[want_number] = replace(assigned[want_number], device=offered[device_number])
    return Assignment(tuple(assigned), gpu_uuid)


def devices_of_layout(live: LiveGpu) -> list[PlacedDevice]:
    """Return the MIG devices that a GPU has, each with its name and daemon."""
    devices: list[PlacedDevice] = []
    names = {named.place: named.name for named in live.names}
    for instance in live.instances:
        for part in sorted(instance.compute, key=lambda part: part.id):
            daemon = live.daemon(part.uuid)
            devices.append(
                PlacedDevice(
                    *instance.place,
                    slices=part.profile.slices,
                    whole=part.profile.slices == instance.profile.slices,
                    number=_count_alike(devices, instance.place, part.profile.slices),
                    uuid=part.uuid,
                    name=names.get(instance.place),
                    mps=None if daemon is None else daemon.wish,
                )
            )
    return devices


def devices_to_be(after: GpuShape, profiles: Sequence[Profile], kept: Sequence[PlacedDevice]) -> list[PlacedDevice]:
    """Return the MIG devices of a GPU in its layout ``after`` a change; those that are not in ``kept`` are new."""
    slices_of_profile = {profile.name: profile.slices for profile in profiles}
    unused = list(kept)
    devices: list[PlacedDevice] = []
    for instance in after.instances:
        for part in instance.compute:
            slices = part.slices
            device = next((each for each in unused if (each.place, each.slices) == (instance.place, slices)), None)
            if device is None:
                whole = slices == slices_of_profile.get(instance.profile)
                number = _count_alike([each for each in devices if each.uuid is None], instance.place, slices)
                device = PlacedDevice(*instance.place, slices, whole, number)
            else:
                unused.remove(device)
            devices.append(device)
    return devices


def _count_alike(devices: Sequence[PlacedDevice], place: tuple[str, int], slices: int) -> int:
    """Return how many of these devices have this place and this many compute slices."""
    return sum((device.place, device.slices) == (place, slices) for device in devices)


def _rank(want: WantedDevice, device: PlacedDevice) -> tuple[bool, int, bool]:
    """Return how well a fitting device suits what is wanted; smaller is better.

    A wish with a fixed placement chooses first, then the pair that is most alike, and of equal ones a wish with a name.
    """
    name = want.wish.name
    if name == device.name and limits_key(want.wish.mps) == limits_key(device.mps):
        unlikeness = 0
    elif name is not None and name == device.name:
        unlikeness = 1
    elif device.name is None:
        # Best if a daemon stays where it is.
        unlikeness = 2 if (want.wish.mps is None) == (device.mps is None) else 3
    else:
        # The device would lose its name.
        unlikeness = 4
    return want.start is None, unlikeness, name is None


def limits_key(wish: MpsWish | None) -> tuple[object, ...]:
    """Return a key that is equal for daemons with the same limits and users; without a daemon one of its own.

    The defaults count as written.
    """
    return () if wish is None else (wish.limits.explicit, tuple(sorted(wish.users)), wish.exclusive, wish.multiuser)
