"""How a GPU differs from what was asked: MIG devices that are missing, and those that are too many. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from gpushare.mig.profile import Layout
from gpushare.mig.wish import Wish, resolve


class MigDevice(NamedTuple):
    """One kind of MIG device: ``3g.40gb``, ``1c.3g.40gb``; with the first memory slice, or None for any place.

    A GPU instance without a compute instance is no MIG device, and is never what was asked; its slices are 0.
    """

    profile: str
    slices: int
    whole: bool
    start: int | None = None

    @property
    def name(self) -> str:
        """Return its name as the driver has it."""
        return self.profile if self.whole or not self.slices else f"{self.slices}c.{self.profile}"

    def __str__(self) -> str:
        place = "" if self.start is None else f":{self.start}"
        return f"{self.name}{place}" + ("" if self.slices else " (no compute instance)")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What is missing and what is too much, each kind with its number; both empty: exactly as asked."""

    missing: tuple[tuple[MigDevice, int], ...] = ()
    extra: tuple[tuple[MigDevice, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)


def difference(layout: Layout, wish: Wish) -> Difference:
    """Return how a GPU differs from exactly this wish: kinds and numbers, and places where the wish has them.

    MIG devices are counted, as mig-parted does: how many GPU instances hold them does not matter.

    Raises:
        BadUsage: a size fits several profiles, or a start is none of its placements.
        NotSupported: a profile that the GPU never has.
    """
    wanted: Counter[MigDevice] = Counter()
    for request in wish:
        profile = resolve(request, layout.profiles)
        for slices in request.compute or (profile.slices,):
            wanted[MigDevice(profile.name, slices, slices == profile.slices, request.start)] += request.count
    there = present(layout)
    # Those with a place first: what is left may serve those without.
    exact = wanted & there
    wanted, there = wanted - exact, there - exact
    missing: Counter[MigDevice] = Counter()
    for kind, number in wanted.items():
        serving = [one for one in there if kind.start is None and one._replace(start=None) == kind]
        for one in sorted(serving):
            taken = min(number, there[one])
            number, there[one] = number - taken, there[one] - taken
        if number:
            missing[kind] = number
    return Difference(missing=_ordered(missing), extra=_ordered(+there))


def present(layout: Layout) -> Counter[MigDevice]:
    """Return the MIG devices that exist, with their places."""
    found: Counter[MigDevice] = Counter()
    for one in layout.instances:
        for slices in [part.profile.slices for part in one.compute] or [0]:
            found[MigDevice(one.profile.name, slices, slices == one.profile.slices, one.start)] += 1
    return found


def _ordered(found: Counter[MigDevice]) -> tuple[tuple[MigDevice, int], ...]:
    return tuple(sorted(found.items(), key=lambda row: (row[0].start is None, row[0].start or 0, row[0].name)))
