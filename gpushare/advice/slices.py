"""Which MIG instances a case needs: the profiles that hold each share, and whether they fit together. Pure.

Nothing here knows a board: what fits is the exact planner's answer on the layout that the driver reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gpushare.mig.plan import Plan
from gpushare.mig.planner import plan_add, plan_exact
from gpushare.mig.profile import Layout, Profile
from gpushare.mig.wish import Request, Wish
from gpushare.units import format_bytes


@dataclass(frozen=True, order=True)
class Share:
    """What one party needs of an instance, with contexts; zero: nobody said. ``graphics``: only +gfx profiles draw."""

    memory_bytes: int = 0
    sms: int = 0
    graphics: bool = False

    def __str__(self) -> str:
        parts = [format_bytes(self.memory_bytes)] if self.memory_bytes else []
        return " and ".join([*parts, *([f"{self.sms} SMs"] if self.sms else [])]) or "any size"


@dataclass(frozen=True, kw_only=True)
class Slices:
    """One profile per share, in their order; or why there are none, and how many of the largest share would fit."""

    profiles: tuple[Profile, ...] = ()
    why_not: str | None = None
    most: int | None = None

    @property
    def wish(self) -> Wish:
        """Return it as a wish, the largest first."""
        counts = Counter(sorted((one.name for one in self.profiles), reverse=True))
        return tuple(Request(profile=name, count=count) for name, count in counts.items())

    @property
    def words(self) -> list[str]:
        """Return the wish as ``gpushare mig`` takes it."""
        return [str(request) for request in self.wish]


@lru_cache(maxsize=512)
def slices_for(layout: Layout, shares: tuple[Share, ...]) -> Slices:
    """Return the largest instances that hold these shares on an otherwise empty GPU.

    Equal shares get equal instances. Larger than needed is better here: what is not given to anybody idles.
    """
    empty = replace(layout, instances=())
    kinds = {graphics: _of_kind(layout, graphics=graphics) for graphics in (False, True)}
    smallest = [_smallest(kinds[share.graphics], share) for share in shares]
    too_large = next((share for share, found in zip(shares, smallest, strict=True) if found is None), None)
    if too_large is not None:
        return Slices(
            why_not=f"no instance has {too_large}{_largest_has(kinds[too_large.graphics], too_large)}", most=0
        )
    chosen = [one for one in smallest if one is not None]
    if not _together(empty, chosen):
        worst = max(shares)
        needed = chosen[shares.index(worst)]
        most = _most(empty, needed)
        why = f"{len(shares)} instances with {worst} do not fit: {most or 'none'} of {needed.name} would"
        return Slices(why_not=why, most=most)
    if len(set(shares)) == 1:
        return Slices(profiles=tuple(_largest_equal(empty, kinds[shares[0].graphics], chosen[0], len(shares))))
    return Slices(profiles=tuple(_enlarged(empty, [kinds[share.graphics] for share in shares], chosen)))


def _of_kind(layout: Layout, *, graphics: bool) -> list[Profile]:
    """Return the ordinary profiles, or those that can draw, small ones first."""
    wanted = {"+gfx"} if graphics else set()
    found = [one for one in layout.profiles if one.attributes == wanted and one.placements and one.memory_bytes]
    return sorted(found, key=lambda one: (one.slices, one.size or 0, one.memory_bytes or 0))


def _largest_has(profiles: Sequence[Profile], share: Share) -> str:
    """Return what the largest profile has of what was asked for."""
    if not profiles:
        return ""
    largest = profiles[-1]
    return f"; the largest, {largest.name}, has {_of_both(largest, share)}"


def _of_both(profile: Profile, share: Share) -> Share:
    memory = profile.memory_bytes or 0 if share.memory_bytes or not share.sms else 0
    return Share(memory, profile.multiprocessors or 0 if share.sms else 0)


def _smallest(ordinary: Sequence[Profile], share: Share) -> Profile | None:
    return next((one for one in sorted(ordinary, key=lambda p: (p.size or 0, p.slices)) if _holds(one, share)), None)


def _holds(profile: Profile, share: Share) -> bool:
    enough = (profile.memory_bytes or 0) >= share.memory_bytes and (profile.graphics or not share.graphics)
    return enough and (not share.sms or (profile.multiprocessors or 0) >= share.sms)


def _together(empty: Layout, profiles: Sequence[Profile]) -> bool:
    counts = Counter(one.name for one in profiles)
    if any(profile.instances is not None and counts[profile.name] > profile.instances for profile in profiles):
        return False
    wish = tuple(Request(profile=name, count=count) for name, count in counts.items())
    return isinstance(plan_exact([empty], {empty.gpu: wish}), Plan)


def _most(empty: Layout, profile: Profile) -> int:
    return next((n for n in range(profile.instances or 8, 0, -1) if _together(empty, [profile] * n)), 0)


def _largest_equal(empty: Layout, ordinary: Sequence[Profile], least: Profile, count: int) -> list[Profile]:
    """Return the profile with the most SMs, and of equals the least memory, that fits so many times."""
    better = [
        one for one in ordinary if (one.memory_bytes or 0) >= (least.memory_bytes or 0) and one.slices >= least.slices
    ]
    better.sort(key=lambda one: (-(one.multiprocessors or one.slices), one.memory_bytes or 0))
    return [next((one for one in better if _together(empty, [one] * count)), least)] * count


def _enlarged(empty: Layout, kinds: Sequence[Sequence[Profile]], chosen: list[Profile]) -> list[Profile]:
    """Return the choice with each enlarged among the profiles of its kind, the smallest first, while all still fit."""
    moved = True
    while moved:
        moved = False
        for number in sorted(range(len(chosen)), key=lambda n: (chosen[n].slices, chosen[n].memory_bytes or 0)):
            for larger in kinds[number]:
                grows = larger.slices > chosen[number].slices
                tried = [*chosen[:number], larger, *chosen[number + 1 :]]
                if (
                    grows
                    and (larger.memory_bytes or 0) >= (chosen[number].memory_bytes or 0)
                    and _together(empty, tried)
                ):
                    chosen, moved = tried, True
                    break
            if moved:
                break
    return chosen


def free_instances(layout: Layout, shares: Sequence[Share]) -> list[str] | None:
    """Return the profiles of idle instances that are there and hold the shares, or None when they do not."""
    idle = sorted(
        (one.profile for one in layout.instances if one.compute and not one.busy),
        key=lambda profile: (profile.memory_bytes or 0, profile.slices),
    )
    names: list[str] = []
    for share in sorted(shares, reverse=True):
        found = next((profile for profile in idle if _holds(profile, share)), None)
        if found is None:
            return None
        idle.remove(found)
        names.append(found.name)
    return names


def addable(layout: Layout, wish: Wish) -> bool:
    """Return whether a wish fits beside the instances that exist."""
    return isinstance(plan_add([layout], wish), Plan)
