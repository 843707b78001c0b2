"""Find the instance that a user means: by name, MIG UUID, place or ids. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.base.errors import BadUsage, NotFound
from gpushare.base.units import first_few, quoted
from gpushare.mig.planner import Target
from gpushare.mig.profile import GpuInstance, Layout, Profile
from gpushare.mig.wish import Wish, resolve

_IDS: Final = re.compile(r"(?:(\d{1,4})/)?(\d{1,4})(?:/(\d{1,4}))?", re.ASCII)
_PLACE: Final = re.compile(r"(\d+g(?:\.\d+gb)?(?:[+-][a-z.]+)?):(\d{1,3})", re.ASCII)
_NO_NAME: Final = re.compile(r"\d.*|(mig|gpu)-.*", re.ASCII | re.IGNORECASE | re.DOTALL)
FORMS: Final = "its name, MIG UUID, GPU/GI, GPU/GI/CI, or PROFILE:START; with one GPU also GI alone"


def find_targets(text: str, layouts: Sequence[Layout]) -> tuple[Target, ...]:
    """Return the instances that a word means: a name, a MIG UUID or its prefix, ``GPU/GI[/CI]``, ``GI``, ``3g.40gb:4``, ``all``.

    The UUID of the only compute instance means the GPU instance.
    """
    word = text.strip()
    if word.lower() == "all":
        return tuple(Target(layout.gpu, instance.id) for layout in layouts for instance in layout.instances)
    lowered = word.lower()
    matches = (
        [Target(layout.gpu, instance.id) for layout, instance in _instances_of(layouts) if instance.name == word]
        or _by_uuid(lowered, layouts)
        or _by_place(lowered, layouts)
        or _by_ids(lowered, layouts)
    )
    if len(matches) > 1:
        places = first_few("/".join(str(part) for part in target if part is not None) for target in matches)
        raise BadUsage(
            f"{quoted(text)} matches several instances: {places}", f"give {FORMS}", code="ambiguous_instance"
        )
    if not matches:
        texts = [f"{layout.gpu}/{owner.id} ({owner.name or owner})" for layout, owner in _instances_of(layouts)]
        listing = first_few(texts)
        raise NotFound(
            f"there is no MIG instance {quoted(text)} here",
            f"instances: {listing}; see: gpushare mig status" if listing else "see: gpushare mig status",
            code="unknown_instance",
        )
    return tuple(matches)


def need_name(word: str, then: str) -> str:
    """Return a word if it may be a name: unlike an id or a UUID, that means the same instance later.

    ``then`` is the command with a name, for the hint.

    Raises:
        BadUsage: it is a UUID, an id, a place or a profile.
    """
    text = word.strip()
    if _NO_NAME.fullmatch(text) is None:
        return text
    # A profile alone means no certain instance.
    means_instance = text.lower().startswith("mig-") or _IDS.fullmatch(text) or _PLACE.fullmatch(text.lower())
    instance = text[:60] if means_instance else "INSTANCE"
    raise BadUsage(
        f"'{text[:60]}' is not a name, and another instance may have it later; give a name",
        f"name it first: gpushare mig name NAME {instance}; then: {then}",
        code="not_a_name",
    )


def _instances_of(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, GpuInstance]]:
    return ((layout, instance) for layout in layouts for instance in layout.instances)


def _by_uuid(word: str, layouts: Sequence[Layout]) -> list[Target]:
    """Return the instances whose MIG UUID is this word; if there is none, those whose UUID begins with it.

    A GPU instance with a single compute instance is meant as a whole.
    """
    if not word.startswith("mig-") or len(word) < len("mig-0000"):
        return []
    targets = {
        compute.uuid.lower(): Target(layout.gpu, instance.id, None if len(instance.compute) == 1 else compute.id)
        for layout, instance in _instances_of(layouts)
        for compute in instance.compute
        if compute.uuid is not None
    }
    if word in targets:
        return [targets[word]]
    return [target for uuid, target in targets.items() if uuid.startswith(word)]


def _by_place(word: str, layouts: Sequence[Layout]) -> list[Target]:
    """Return the instances that begin at a slice and have this profile, or a profile of this size: ``3g:4``."""
    match = _PLACE.fullmatch(word)
    if match is None:
        return []
    profile, start = match[1], int(match[2])
    return [
        Target(layout.gpu, instance.id)
        for layout, instance in _instances_of(layouts)
        if instance.start == start
        and (instance.profile.name == profile or instance.profile.name.startswith(f"{profile}."))
    ]


def _by_ids(word: str, layouts: Sequence[Layout]) -> list[Target]:
    """Return the instances with these ids: ``GI`` on any GPU, ``GPU/GI``, ``GPU/GI/CI``."""
    match = _IDS.fullmatch(word)
    if match is None:
        return []
    gpu, instance_id, compute_id = (None if text is None else int(text) for text in match.groups())
    instances = [
        (layout.gpu, instance)
        for layout, instance in _instances_of(layouts)
        if gpu in {None, layout.gpu} and instance.id == instance_id
    ]
    if compute_id is None:
        return [Target(index, instance.id) for index, instance in instances]
    return [
        Target(index, instance.id, compute.id)
        for index, instance in instances
        for compute in instance.compute
        if compute.id == compute_id
    ]


@dataclass(frozen=True, kw_only=True)
class DeviceCount:
    """MIG devices of one kind, by the driver's name: ``3g.40gb``, ``1c.3g.40gb``; ``start`` None: in any place.

    ``mig_device`` is false for a GPU instance without a compute instance, which never matches a wish.
    """

    profile: str
    start: int | None
    count: int
    mig_device: bool

    def __str__(self) -> str:
        """Return the devices for messages: ``1g.10gb:2*3 (no compute instance)``."""
        place = "" if self.start is None else f":{self.start}"
        count = f"*{self.count}" if self.count > 1 else ""
        note = "" if self.mig_device else " (no compute instance)"
        return f"{self.profile}{place}{count}{note}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What is missing and what is extra; both empty: exactly as asked."""

    missing: tuple[DeviceCount, ...] = ()
    extra: tuple[DeviceCount, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)


def difference(layout: Layout, wish: Wish) -> Difference:
    """Return how a GPU differs from exactly this wish: in kinds and counts, and in places where the wish names them.

    MIG devices are counted as mig-parted does, no matter how they are spread over GPU instances.
    """
    wanted: Counter[DeviceCount] = Counter()
    for request in wish:
        profile = resolve(request, layout.profiles)
        for slices in request.compute or (profile.slices,):
            wanted[_one_device(profile, slices, request.start)] += request.count
    present = Counter(
        _one_device(instance.profile, slices, instance.start)
        for instance in layout.instances
        for slices in [part.profile.slices for part in instance.compute] or [0]
    )
    at_wanted_place = wanted & present
    missing = wanted - at_wanted_place
    unused = present - at_wanted_place
    # Devices that no wish with a place has taken serve those without.
    for kind in [kind for kind in missing if kind.start is None]:
        alike = (device for device in unused if replace(device, start=None) == kind)
        for device in sorted(alike, key=lambda device: device.start or 0):
            taken = min(missing[kind], unused[device])
            missing[kind] -= taken
            unused[device] -= taken
    return Difference(missing=_device_counts(+missing), extra=_device_counts(+unused))


def _one_device(profile: Profile, slices: int, start: int | None) -> DeviceCount:
    """Return one MIG device of so many compute slices; 0: the GPU instance has no compute instance."""
    name = profile.name if slices in {0, profile.slices} else f"{slices}c.{profile.name}"
    return DeviceCount(profile=name, start=start, count=1, mig_device=bool(slices))


def _device_counts(devices: Counter[DeviceCount]) -> tuple[DeviceCount, ...]:
    """Return kinds of MIG devices with their numbers, by place and profile."""
    rows = (replace(device, count=number) for device, number in devices.items())
    return tuple(sorted(rows, key=lambda row: (row.start is None, row.start or 0, row.profile)))
