"""The placement rules of one kind of board, compiled to bit masks; all results are cached. Pure.

The driver's rules: two instances never share a memory slice; a profile exists at most as often as -lgip's Total says;
``+me`` once per GPU; ``+me.all`` only with ``-me`` (nvml.h); and the compute slices of all instances together are no more
than the GPU has, which matters only on boards with a 1g behind slice 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import combinations
from typing import Final, NamedTuple

from gpushare.mig.profile import ComputeInstance, ComputeProfile, GpuInstance, Layout, Profile, mask_of

# The number of instances of a profile whose limit is unknown: more than any GPU has.
_UNLIMITED: Final = 1 << 20


class InstanceKind(NamedTuple):
    """One kind of wished instance: the number of its profile on the board, and its start or None for any."""

    profile: int
    start: int | None = None


class Arrangement(NamedTuple):
    """One way to place instances on an empty board."""

    # (kind, profile number, start) of each, kinds ascending.
    places: tuple[tuple[int, int, int], ...]
    mask: int
    # The profile numbers, sorted.
    members: tuple[int, ...]
    # How many of each kind.
    counts: tuple[int, ...]


class Board:
    """One kind of board: its profiles and the rules among them. Get it from `board_of`."""

    def __init__(self, profiles: tuple[Profile, ...], axis: int, compute_slices: int) -> None:
        self.profiles = profiles
        self.axis = axis
        self.compute_slices = compute_slices
        self.number = {profile.name: number for number, profile in enumerate(profiles)}
        self.slices = tuple(profile.slices for profile in profiles)
        self.sizes = tuple(profile.size or 0 for profile in profiles)
        self.limits = tuple(_UNLIMITED if p.instances is None else p.instances for p in profiles)
        # For each profile those that cannot be on the same GPU (itself: one per GPU).
        self.exclusive = tuple(
            frozenset(n for n, other in enumerate(profiles) if _media_exclude(profile, other)) for profile in profiles
        )
        self.places = tuple(_places_by_end(profile) for profile in profiles)
        # What a plan asks again and again.
        self.rooms = cache(self._rooms)
        self.free = cache(self._free)
        self.lost = cache(self._lost)
        self.reachable = cache(self._reachable)
        self.complete = cache(self._complete)
        self._most_placed = cache(self._count_most_placed)
        self._all_arrangements = cache(lambda kinds, limits: list(self._enumerate(kinds, limits)))

    # -- what is free ------------------------------------------------------------------------------

    def _rooms(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many more of each profile the rules allow with these members (sorted), whatever their places."""
        return tuple(self._room_for(number, members) for number in range(len(self.profiles)))

    def _room_for(self, profile: int, members: tuple[int, ...]) -> int:
        """Return how many more of one profile the rules allow with these members."""
        if not self.exclusive[profile].isdisjoint(members):
            return 0
        limit = self.limits[profile] - members.count(profile)
        if profile in self.exclusive[profile]:
            limit = min(limit, 1)
        spare = self.compute_slices - sum(self.slices[other] for other in members)
        return max(0, min(limit, spare // self.slices[profile]))

    def _free(self, mask: int, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many more of each profile fit: the Free column of ``nvidia-smi mig -lgip``."""
        return tuple(min(self._most_placed(n, mask), room) for n, room in enumerate(self.rooms(members)))

    def _lost(self, mask: int, members: tuple[int, ...]) -> int:
        """Return the capacity that these instances take, as `planner.capacity_lost`."""
        rows = zip(self.sizes, self.free(0, ()), self.free(mask, members), strict=True)
        return sum(size * (fit_when_empty - fit_now) for size, fit_when_empty, fit_now in rows)

    def _reachable(self, mask: int, members: tuple[int, ...]) -> tuple[int, int]:
        """Return the most compute slices, and the most memory slices, that further instances can take.

        Two sets of instances may take them: the search visits every set that the rules allow, or ends with all slices.
        """
        visited: set[tuple[int, tuple[int, ...]]] = set()
        used = sum(self.slices[n] for n in members)
        all_free_slices = (self.compute_slices - used, self.axis - mask.bit_count())
        compute = memory = 0
        to_visit = [(mask, members)]
        while to_visit and (compute, memory) != all_free_slices:
            state = to_visit.pop()
            if state in visited:
                continue
            visited.add(state)
            occupied_mask, present = state
            compute = max(compute, sum(self.slices[n] for n in present) - used)
            memory = max(memory, (occupied_mask & ~mask).bit_count())
            for number, room in enumerate(self.rooms(present)):
                if room:
                    grown = tuple(sorted((*present, number)))
                    to_visit += [
                        (occupied_mask | place, grown) for _, place in self.places[number] if not occupied_mask & place
                    ]
        return compute, memory

    def _count_most_placed(self, profile: int, mask: int) -> int:
        """Return how many instances of a profile have a place at the same time, besides the occupied slices."""
        occupied_mask = mask
        number = 0
        for _, place in self.places[profile]:
            if not occupied_mask & place:
                occupied_mask |= place
                number += 1
        return number

    # -- arrangements ------------------------------------------------------------------------------

    def arrangements(self, kinds: tuple[InstanceKind, ...], limits: tuple[int, ...]) -> list[Arrangement]:
        """Return every way to place up to ``limits`` of each kind on an empty board, the empty way first."""
        limits = tuple(
            min(limit, self._most_placed(kind.profile, 0), self.limits[kind.profile])
            for kind, limit in zip(kinds, limits, strict=True)
        )
        return self._all_arrangements(kinds, limits)

    def _complete(self, kinds: tuple[InstanceKind, ...], counts: tuple[int, ...]) -> list[Arrangement]:
        """Return every way to place exactly ``counts`` of each kind on an empty board."""
        return [way for way in self.arrangements(kinds, counts) if way.counts == counts]

    def _enumerate(self, kinds: tuple[InstanceKind, ...], limits: tuple[int, ...]) -> Iterator[Arrangement]:
        """Yield the arrangements that `arrangements` lists, each set of places once."""
        choices = [[place for place in self.places[kind.profile] if kind.start in {None, place[0]}] for kind in kinds]

        def grown(arrangement: Arrangement, kind: int, first: int) -> Iterator[Arrangement]:
            """Yield an arrangement, and all that add to it: this kind from its place ``first`` on, and later kinds."""
            yield arrangement
            rooms = self.rooms(arrangement.members)
            # Each set comes once, because kinds and places only ascend.
            for later in range(kind, len(kinds)):
                profile = kinds[later].profile
                if arrangement.counts[later] >= limits[later] or not rooms[profile]:
                    continue
                for number in range(first if later == kind else 0, len(choices[later])):
                    start, mask = choices[later][number]
                    if arrangement.mask & mask:
                        continue
                    counts = list(arrangement.counts)
                    counts[later] += 1
                    larger = Arrangement(
                        places=(*arrangement.places, (later, profile, start)),
                        mask=arrangement.mask | mask,
                        members=tuple(sorted((*arrangement.members, profile))),
                        counts=tuple(counts),
                    )
                    yield from grown(larger, later, number + 1)

        empty = Arrangement(places=(), mask=0, members=(), counts=(0,) * len(kinds))
        yield from grown(empty, 0, 0)


def _places_by_end(profile: Profile) -> tuple[tuple[int, int], ...]:
    """Return the start and the mask of each place of a profile, by end: taking the first free ones then packs the most."""
    places = [(place.start, place.mask) for place in profile.placements or ()]
    return tuple(sorted(places, key=lambda place: place[1].bit_length()))


def _media_exclude(profile: Profile, other: Profile) -> bool:
    """Return whether the media engines of two profiles exclude each other on one GPU."""
    if profile.media and other.media:
        return True
    return (profile.all_media and not other.no_media) or (other.all_media and not profile.no_media)


@lru_cache(maxsize=64)
def _board_of_profiles(profiles: tuple[Profile, ...], axis: int, compute_slices: int) -> Board:
    """Return the board of these profiles, the same one for equal profiles."""
    return Board(profiles, axis, compute_slices)


# By the id of a tuple of profiles, that tuple and its board: to compare all profiles takes longer than most plans. The
# tuple is kept, so that no other one gets its id.
_board_by_id: Final[dict[int, tuple[tuple[Profile, ...], Board]]] = {}
_MOST_BOARDS: Final = 64


def board_of(layout: Layout) -> Board:
    """Return the board of a GPU; GPUs with equal profiles share it and its cache."""
    profiles = layout.profiles
    entry = _board_by_id.get(id(profiles))
    if entry is None:
        if len(_board_by_id) >= _MOST_BOARDS:
            _board_by_id.clear()
        entry = (profiles, _board_of_profiles(profiles, layout.axis, layout.compute_slices))
        _board_by_id[id(profiles)] = entry
    return entry[1]


def occupied(layout: Layout) -> int:
    """Return the memory slices that the instances of a GPU take, as bits."""
    return mask_of(instance.placement for instance in layout.instances)


def members_of(layout: Layout) -> tuple[int, ...]:
    """Return the profile numbers of the instances of a GPU, sorted; profiles no longer offered are left out."""
    number = board_of(layout).number
    return tuple(
        sorted(number[instance.profile.name] for instance in layout.instances if instance.profile.name in number)
    )


class ComputeChange(NamedTuple):
    """What changes inside a GPU instance that stays."""

    destroyed: tuple[ComputeInstance, ...]
    created: tuple[ComputeInstance, ...]


def new_compute(
    profile: Profile, slices_of_each: Sequence[int], others: Sequence[ComputeInstance] = ()
) -> tuple[ComputeInstance, ...] | None:
    """Return the compute instances to create next to the others, largest first; None: they do not fit.

    Placements are explicit if the driver lists them (-lcipp). Otherwise only slices are counted and the driver chooses
    the placements; it finds room if the largest are created first.
    """
    parts = []
    for slices in sorted(slices_of_each, reverse=True):
        part = profile.compute_to_create(slices)
        if part is None:
            return None
        parts.append(part)
    if sum(other.profile.slices for other in others) + sum(part.slices for part in parts) > profile.slices:
        return None
    totals = Counter(part.slices for part in parts) + Counter(other.profile.slices for other in others)
    for part in parts:
        if part.instances is not None and totals[part.slices] > part.instances:
            return None
    if any(part.placements is None for part in parts) or any(other.placement is None for other in others):
        return tuple(ComputeInstance(profile=part) for part in parts)
    return _place_compute(parts, mask_of(other.placement for other in others))


def _place_compute(parts: Sequence[ComputeProfile], taken: int) -> tuple[ComputeInstance, ...] | None:
    """Return compute instances of these profiles at free places (``taken`` are bits); None: there is no way."""
    if not parts:
        return ()
    for place in parts[0].placements or ():
        if not taken & place.mask:
            rest = _place_compute(parts[1:], taken | place.mask)
            if rest is not None:
                return (ComputeInstance(profile=parts[0], placement=place), *rest)
    return None


def make_room(
    instance: GpuInstance,
    slices_of_each: Sequence[int],
    *,
    may_destroy: bool,
    may_evict: bool,
    with_others: bool = True,
    with_busy: bool = False,
) -> tuple[ComputeInstance, ...] | None:
    """Return the compute instances to destroy so that these (slices of each) fit; None: there is no way.

    Of all ways the one that destroys the fewest busy ones (none without ``may_evict``), then the fewest. Others may stay
    only if ``with_others``, and busy others only if ``with_busy``. In a GPU instance that is held as a whole, nothing is
    destroyed.
    """
    if instance.held and not with_busy:
        return None
    best: tuple[tuple[int, int], tuple[ComputeInstance, ...]] | None = None
    most_destroyed = len(instance.compute) if may_destroy and not instance.held else 0
    for number in range(most_destroyed + 1):
        for destroyed in combinations(instance.compute, number):
            kept = [part for part in instance.compute if part not in destroyed]
            busy = sum(part.busy for part in destroyed)
            if busy and not may_evict:
                continue
            if kept and not with_others:
                continue
            if any(part.busy for part in kept) and not with_busy:
                continue
            cheaper = best is None or (busy, number) < best[0]
            if cheaper and new_compute(instance.profile, slices_of_each, kept) is not None:
                best = ((busy, number), destroyed)
    return None if best is None else best[1]


def change_compute(instance: GpuInstance, slices_of_each: Sequence[int], *, may_evict: bool) -> ComputeChange | None:
    """Return the cheapest change to exactly these compute instances (slices of each); None: there is none.

    It destroys the fewest busy ones (none without ``may_evict``), then the fewest. If a process holds the GPU instance
    itself, all count as busy.
    """
    best: tuple[tuple[int, int], ComputeChange] | None = None
    existing = instance.compute
    for number_kept in range(len(existing), -1, -1):
        for kept in combinations(existing, number_kept):
            missing = Counter(slices_of_each)
            missing.subtract(part.profile.slices for part in kept)
            if any(count < 0 for count in missing.values()):
                continue
            destroyed = tuple(part for part in existing if part not in kept)
            busy = sum(part.busy or instance.held for part in destroyed)
            if busy and not may_evict:
                continue
            created = new_compute(instance.profile, list(missing.elements()), kept)
            if created is not None and (best is None or (busy, len(destroyed)) < best[0]):
                best = ((busy, len(destroyed)), ComputeChange(destroyed, created))
    return None if best is None else best[1]
