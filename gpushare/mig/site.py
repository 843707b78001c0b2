"""One GPU for the planner: the cost of each way to serve a part of the wish on it. Pure.

A cost is a single integer here: the fields of `Cost`, the heaviest in the highest digits, so that comparing and adding
integers compares and adds field by field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import or_
from typing import Final, NamedTuple

from gpushare.mig.board import Arrangement, Board, board_of, make_room, occupied
from gpushare.mig.plan import Cost, InstanceChange
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout

# Larger than any sum of one field over a host.
_BASE: Final = 1 << 20


def weigh(cost: Cost) -> int:
    """Return a cost as one integer."""
    total = 0
    for field in cost:
        total = total * _BASE + field
    return total


CREATED: Final = weigh(Cost(created=1))


def cost_of_destroying(instance: GpuInstance) -> Cost:
    """Return the cost of destroying a GPU instance with all in it."""
    busy = sum(one.busy for one in instance.compute)
    if instance.busy and not busy:
        # Held as a whole: any of its compute instances may be meant.
        busy = instance.devices
    rest = instance.devices - busy
    size = instance.placement.size
    if instance.name is not None:
        return Cost(busy_destroyed=busy, named_destroyed=rest, slices_destroyed=size)
    return Cost(busy_destroyed=busy, idle_destroyed=rest, slices_destroyed=size)


def cost_of(gone: InstanceChange) -> Cost:
    """Return the cost of destroying this."""
    if gone.whole:
        return cost_of_destroying(gone.instance)
    busy = sum(one.busy or gone.instance.held for one in gone.compute)
    rest = len(gone.compute) - busy
    if gone.instance.name is not None:
        return Cost(busy_destroyed=busy, named_destroyed=rest)
    return Cost(busy_destroyed=busy, idle_destroyed=rest)


@dataclass(frozen=True)
class Existing:
    """One existing GPU instance, in numbers; equal ones are interchangeable for the search."""

    # -1: the driver no longer lists its profile.
    profile: int
    start: int
    mask: int
    # Compute instances: slices, placement, busy.
    compute: tuple[tuple[int, tuple[int, int] | None, bool], ...]
    weight: int
    # It may not be destroyed.
    pinned: bool
    # Without a name; without processes; held as a whole.
    nameless: bool
    idle: bool
    held: bool


class Removal(NamedTuple):
    """What is destroyed for an arrangement: its weight, and (as bits) the existing ones destroyed and those filled."""

    weight: int
    destroyed: int
    filled: int


class Placing(NamedTuple):
    """The cheapest way to place a part of the wish on a GPU."""

    weight: int
    arrangement: Arrangement
    removal: Removal


class Candidate(NamedTuple):
    """One way to place a part of the wish: its code, the weight of what is created, the places."""

    code: int
    made: int
    arrangement: Arrangement


def candidates(arrangements: Iterable[Arrangement], parts: Sequence[int], codes: Sequence[int]) -> list[Candidate]:
    """Return the ways for arrangements, for all GPUs of one kind of board.

    ``parts`` is how many instances (GPU and compute instances) one of each kind is, ``codes`` what it adds to the code.
    """
    return [
        Candidate(
            sum(count * code for count, code in zip(one.counts, codes, strict=True)),
            sum(count * part for count, part in zip(one.counts, parts, strict=True)) * CREATED,
            one,
        )
        for one in arrangements
    ]


def _gone_to_fill(
    one: GpuInstance, compute: tuple[int, ...], *, placed: bool, with_others: bool, may_destroy: bool, may_evict: bool
) -> tuple[ComputeInstance, ...] | None:
    """Return what is destroyed in a GPU instance to add these compute instances; None: they cannot be added.

    Only in an instance without a name; next to busy ones only if the wish names the place. A wish for a whole GPU
    instance (``compute`` is empty) fills one that has room, and destroys nothing inside.
    """
    if one.name is not None:
        return None
    return make_room(
        one,
        compute or (one.profile.slices,),
        may_destroy=may_destroy and bool(compute),
        may_evict=may_evict,
        with_others=with_others,
        with_busy=placed and bool(compute),
    )


class Site:
    """One GPU, and which of its instances may go."""

    def __init__(
        self,
        layout: Layout,
        *,
        may_destroy: bool,
        evict: frozenset[int],
        requests: Sequence[tuple[tuple[int, ...], bool]] = (),
        with_others: bool = True,
    ) -> None:
        self.layout = layout
        self.board: Board = board_of(layout)
        self.instances = tuple(sorted(layout.instances, key=lambda one: one.start))
        # `requests`: for each wished kind its compute instances, and whether its place is named.
        self.existing = tuple(self._number(one, may_destroy=may_destroy, evict=evict) for one in self.instances)
        self.lost_now = self.board.lost(occupied(layout), self._members(0))
        # (number of the existing one, kind): filling it serves a new instance of this kind in its place, after these
        # compute instances are destroyed.
        self.fills: dict[tuple[int, int], tuple[ComputeInstance, ...]] = {}
        for number, one in enumerate(self.instances):
            for kind, (compute, placed) in enumerate(requests):
                gone = _gone_to_fill(
                    one,
                    compute,
                    placed=placed,
                    with_others=with_others,
                    may_destroy=may_destroy,
                    may_evict=one.id in evict,
                )
                if gone is not None:
                    self.fills[number, kind] = gone
        # Nothing may overlap these; one that can be filled may be overlapped.
        fillable = {number for number, _ in self.fills}
        fixed = (one.mask for number, one in enumerate(self.existing) if one.pinned and number not in fillable)
        self._fixed: int = reduce(or_, fixed, 0)
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._removals: dict[tuple[int, tuple[int, ...]], tuple[Removal, ...]] = {}

    def _number(self, one: GpuInstance, *, may_destroy: bool, evict: frozenset[int]) -> Existing:
        return Existing(
            profile=self.board.number.get(one.profile.name, -1),
            start=one.start,
            mask=one.placement.mask,
            compute=tuple((c.profile.slices, c.placement, c.busy) for c in one.compute),
            weight=weigh(cost_of_destroying(one)),
            pinned=not may_destroy or (one.busy and one.id not in evict),
            nameless=one.name is None,
            idle=not one.busy,
            held=one.held,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for GPUs that are the same for the search."""
        return (id(self.board), self.existing)

    def _members(self, without: int) -> tuple[int, ...]:
        kept = (one.profile for n, one in enumerate(self.existing) if one.profile >= 0 and not without >> n & 1)
        return tuple(sorted(kept))

    # -- adding ------------------------------------------------------------------------------------

    def options(self, ways: Iterable[Candidate]) -> dict[int, Placing]:
        """Return the cheapest option for every part of the wish, by its code.

        Weights are differences to leaving the GPU as it is.
        """
        cheapest: dict[int, int] = {}
        tied: dict[int, list[tuple[Arrangement, Removal]]] = {}
        for code, made, arrangement in ways:
            if arrangement.mask & self._fixed:
                continue
            removals = self._removals_for(arrangement)
            if not removals:
                continue
            weight = made + removals[0].weight
            best = cheapest.get(code)
            if best is None or weight < best:
                cheapest[code] = weight
                tied[code] = [(arrangement, removal) for removal in removals]
            elif weight == best:
                tied[code] += [(arrangement, removal) for removal in removals]
        return {code: self._least_lost(cheapest[code], found) for code, found in tied.items()}

    def _least_lost(self, weight: int, ways: Sequence[tuple[Arrangement, Removal]]) -> Placing:
        """Return the way that leaves the most room; of equal ones the one with small instances at the high end."""

        def rank(way: tuple[Arrangement, Removal]) -> tuple[int, list[int], int]:
            return self.lost_after(*way), [-start for _, _, start in way[0].places], way[1].destroyed

        arrangement, removal = min(ways, key=rank) if len(ways) > 1 else ways[0]
        return Placing(weight + self.lost_after(arrangement, removal) - self.lost_now, arrangement, removal)

    def lost_after(self, arrangement: Arrangement, removal: Removal) -> int:
        """Return `capacity_lost` of the GPU afterwards."""
        gone = removal.destroyed | removal.filled
        known = self._kept.get(gone)
        if known is None:
            left = [one.mask for number, one in enumerate(self.existing) if not gone >> number & 1]
            known = self._kept[gone] = (reduce(or_, left, 0), self._members(gone))
        members = tuple(sorted(known[1] + arrangement.members))
        return self.board.lost(known[0] | arrangement.mask, members)

    def _removals_for(self, arrangement: Arrangement) -> tuple[Removal, ...]:
        if self.fills:
            return self._find_removals(arrangement)
        key = (arrangement.mask, arrangement.members)
        known = self._removals.get(key)
        if known is None:
            known = self._removals[key] = self._find_removals(arrangement)
        return known

    def _find_removals(self, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return the cheapest removals for an arrangement; none if one in the way may not be destroyed."""
        if not arrangement.places:
            return (Removal(0, 0, 0),)
        filled, weight = self._filled_by(arrangement)
        destroyed = 0
        for number, one in enumerate(self.existing):
            if not filled >> number & 1 and self._in_the_way(one, arrangement):
                if one.pinned:
                    return ()
                weight += one.weight
                destroyed |= 1 << number
        least = Removal(weight, destroyed, filled)
        return (least,) if self._within_limits(least, arrangement) else self._with_more(least, arrangement)

    def _filled_by(self, arrangement: Arrangement) -> tuple[int, int]:
        """Return the existing ones that are filled, as bits, and their weight: always less than that of new ones."""
        filled = weight = 0
        if self.fills:
            laid = {(profile, start): kind for kind, profile, start in arrangement.places}
            for number, one in enumerate(self.existing):
                gone = self.fills.get((number, laid.get((one.profile, one.start), -1)))
                if gone is not None:
                    filled |= 1 << number
                    parts = InstanceChange(instance=self.instances[number], compute=gone, whole=False)
                    weight += weigh(cost_of(parts)) - CREATED
        return filled, weight

    def _in_the_way(self, one: Existing, arrangement: Arrangement) -> bool:
        if one.mask & arrangement.mask:
            return True
        return one.profile >= 0 and not self.board.exclusive[one.profile].isdisjoint(arrangement.members)

    def _within_limits(self, removal: Removal, arrangement: Arrangement) -> bool:
        board = self.board
        members = (*self._members(removal.destroyed | removal.filled), *arrangement.members)
        if sum(board.slices[number] for number in members) > board.compute_slices:
            return False
        return all(members.count(number) <= board.limits[number] for number in set(arrangement.members))

    def _with_more(self, least: Removal, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return the cheapest removals that also keep counts and compute slices within their limits."""
        others = [
            number
            for number, one in enumerate(self.existing)
            if not one.pinned and not (least.destroyed | least.filled) >> number & 1
        ]
        found = [
            Removal(
                least.weight + sum(self.existing[number].weight for number in more),
                least.destroyed | sum(1 << number for number in more),
                least.filled,
            )
            for size in range(1, len(others) + 1)
            for more in combinations(others, size)
        ]
        found = [removal for removal in found if self._within_limits(removal, arrangement)]
        best = min((removal.weight for removal in found), default=0)
        return tuple(removal for removal in found if removal.weight == best)
