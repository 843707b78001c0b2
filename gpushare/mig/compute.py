"""Compute instances inside one GPU instance: which stay, which go, where new ones lie. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from gpushare.mig.plan import NewCompute
from gpushare.mig.profile import ComputeInstance, ComputeProfile, GpuInstance, Placement, Profile


class ComputeChange(NamedTuple):
    """What changes inside a GPU instance that stays."""

    destroyed: tuple[ComputeInstance, ...]
    created: tuple[NewCompute, ...]
    # How many of those destroyed are busy; all, when the GPU instance itself is held.
    busy: int


def new_compute(
    profile: Profile, wanted: Sequence[int], beside: Sequence[ComputeInstance] = ()
) -> tuple[NewCompute, ...] | None:
    """Return the compute instances to create, largest first; None when they do not fit beside the others.

    Placements are explicit where the driver has told them (-lcipp); else their slices are counted, and the
    driver places: in the order largest first it finds room.
    """
    parts = [profile.compute_of(slices) or _whole(profile, slices) for slices in sorted(wanted, reverse=True)]
    if any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    if sum(one.profile.slices for one in beside) + sum(part.slices for part in found) > profile.slices:
        return None
    totals = Counter(part.slices for part in found) + Counter(one.profile.slices for one in beside)
    for part in found:
        if part.instances is not None and totals[part.slices] > part.instances:
            return None
    if any(part.placements is None for part in found) or any(one.placement is None for one in beside):
        return tuple(NewCompute(profile=part) for part in found)
    taken = 0
    for one in beside:
        taken |= one.placement.mask if one.placement is not None else 0
    return _placed(found, taken)


def _whole(profile: Profile, slices: int) -> ComputeProfile | None:
    return profile.whole if slices == profile.slices else None


def _placed(parts: Sequence[ComputeProfile], taken: int) -> tuple[NewCompute, ...] | None:
    if not parts:
        return ()
    for place in parts[0].placements or ():
        if not taken & place.mask:
            rest = _placed(parts[1:], taken | place.mask)
            if rest is not None:
                return (NewCompute(profile=parts[0], placement=Placement(*place)), *rest)
    return None


def make_room(
    instance: GpuInstance,
    wanted: Sequence[int],
    *,
    may_destroy: bool,
    may_evict: bool,
    beside: bool = True,
    beside_busy: bool = False,
) -> tuple[ComputeInstance, ...] | None:
    """Return what has to go inside so that these (slices of each) fit beside the rest; None when there is no way.

    Fewest busy ones go, then fewest. What stays may be nothing unless ``beside``, and nobody is in it unless
    ``beside_busy``. A GPU instance that is held as a whole is left as it is.
    """
    held = instance.holders is None or bool(instance.holders)
    if held and not beside_busy:
        return None
    best: tuple[tuple[int, int], tuple[ComputeInstance, ...]] | None = None
    for size in range(len(instance.compute) + 1 if may_destroy and not held else 1):
        for gone in combinations(instance.compute, size):
            kept = [one for one in instance.compute if one not in gone]
            busy = sum(one.busy for one in gone)
            if (kept and not beside) or (busy and not may_evict) or (any(one.busy for one in kept) and not beside_busy):
                continue
            if (best is None or (busy, size) < best[0]) and new_compute(instance.profile, wanted, kept) is not None:
                best = ((busy, size), gone)
    return None if best is None else best[1]


def change_compute(
    instance: GpuInstance, wanted: Sequence[int], *, may_destroy: bool, may_evict: bool
) -> ComputeChange | None:
    """Return the cheapest change to exactly these compute instances (slices of each); None when there is none.

    Busy ones stay unless ``may_evict``; fewest busy ones go, then fewest.
    """
    best: tuple[tuple[int, int], ComputeChange] | None = None
    existing = instance.compute
    held = instance.holders is None or bool(instance.holders)
    for size in range(len(existing), -1, -1):
        for kept in combinations(existing, size):
            missing = Counter(wanted)
            missing.subtract(one.profile.slices for one in kept)
            if any(count < 0 for count in missing.values()):
                continue
            gone = tuple(one for one in existing if one not in kept)
            busy = sum(one.busy or held for one in gone)
            if (gone and not may_destroy) or (busy and not may_evict):
                continue
            created = new_compute(instance.profile, list(missing.elements()), kept)
            if created is None:
                continue
            change = ComputeChange(gone, created, busy)
            if best is None or (busy, len(gone)) < best[0]:
                best = ((busy, len(gone)), change)
    return None if best is None else best[1]
