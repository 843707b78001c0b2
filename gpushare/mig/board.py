"""The placement rules of one kind of board, compiled to bit masks; all results are cached. Pure.

The driver's rules: two instances never share a memory slice; a profile exists at most as often as -lgip's Total says;
``+me`` once per GPU; ``+me.all`` only with ``-me`` (nvml.h); and the compute slices of all instances together are no more
than the GPU has, which matters only on boards with a 1g behind slice 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import combinations
from typing import Final, NamedTuple

from gpushare.mig.profile import (
    ComputeInstance,
    GpuInstance,
    Layout,
    Placement,
    Profile,
    mask_of,
    usual_compute_starts,
)

# The number of instances of a profile whose limit is unknown: more than any GPU has.
_UNLIMITED: Final = 1 << 20


class InstanceKind(NamedTuple):
    """One kind of wished instance: the number of its profile on the board, and its start or None for any."""

    profile: int
    start: int | None = None


class Placed(NamedTuple):
    """One instance of an arrangement: the number of its kind among those wished, its profile's number, its start."""

    kind: int
    profile: int
    start: int


class Arrangement(NamedTuple):
    """One way to place instances on an empty board."""

    # Kinds ascending.
    places: tuple[Placed, ...]
    mask: int
    # The profile numbers, sorted.
    members: tuple[int, ...]
    # How many of each kind.
    counts: tuple[int, ...]

    @property
    def rank(self) -> list[int]:
        """Return a sort key for equally good ways: the smallest has the small instances (the last kinds) at the high end."""
        return [-place.start for place in self.places]


class Board:
    """One kind of board: its profiles and the rules among them. Get it from `board_of`."""

    def __init__(self, profiles: tuple[Profile, ...], memory_slices: int, compute_slices: int) -> None:
        self.profiles = profiles
        self.memory_slices = memory_slices
        self.compute_slices = compute_slices
        self.number = {profile.name: number for number, profile in enumerate(profiles)}
        # By the number of a profile: its compute slices, its memory slices, and how many a GPU may have.
        self.slices = tuple(profile.slices for profile in profiles)
        self.sizes = tuple(profile.size or 0 for profile in profiles)
        self.limits = tuple(_UNLIMITED if p.instances is None else p.instances for p in profiles)
        # The profiles that may not be on the same GPU (itself: one per GPU), and its places.
        self.exclusive = tuple(
            frozenset(n for n, other in enumerate(profiles) if _media_exclude(profile, other)) for profile in profiles
        )
        self.places = tuple(_places_by_end(profile) for profile in profiles)
        # A search asks these again and again for the same instances.
        self.room_by_profile = cache(self._room_by_profile)
        self.count_free = cache(self._count_free)
        self.capacity_lost = cache(self._capacity_lost)
        self.most_usable = cache(self._most_usable)
        self.exact_arrangements = cache(self._exact_arrangements)
        self._most_placed = cache(self._count_most_placed)
        self._all_arrangements = cache(lambda kinds, limits: list(self._enumerate(kinds, limits)))

    def _room_by_profile(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many more of each profile the rules allow next to instances of these profiles (sorted), wherever they are."""
        spare = self.compute_slices - sum(self.slices[other] for other in members)
        rooms = []
        for profile, exclusive in enumerate(self.exclusive):
            room = min(self.limits[profile] - members.count(profile), spare // self.slices[profile])
            if profile in exclusive:
                room = min(room, 1)
            rooms.append(max(0, room) if exclusive.isdisjoint(members) else 0)
        return tuple(rooms)

    def _count_free(self, mask: int, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many more of each profile fit: the Free column of ``nvidia-smi mig -lgip``."""
        return tuple(min(self._most_placed(n, mask), room) for n, room in enumerate(self.room_by_profile(members)))

    def _capacity_lost(self, mask: int, members: tuple[int, ...]) -> int:
        """Return how much less fits next to these instances than on an empty board: `planner.capacity_lost`."""
        rows = zip(self.sizes, self.count_free(0, ()), self.count_free(mask, members), strict=True)
        return sum(size * (fit_when_empty - fit_now) for size, fit_when_empty, fit_now in rows)

    def _most_usable(self, mask: int, members: tuple[int, ...]) -> tuple[int, int]:
        """Return the most compute slices and the most memory slices that further instances can take, each counted by itself.

        These may be two sets of instances. The search visits every set that the rules allow, unless it finds all slices.
        """
        visited: set[tuple[int, tuple[int, ...]]] = set()
        used = sum(self.slices[n] for n in members)
        all_free_slices = (self.compute_slices - used, self.memory_slices - mask.bit_count())
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
            for number, room in enumerate(self.room_by_profile(present)):
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

    def arrangements(self, kinds: tuple[InstanceKind, ...], limits: tuple[int, ...]) -> list[Arrangement]:
        """Return every way to place up to ``limits`` of each kind on an empty board, the empty way first."""
        limits = tuple(
            min(limit, self._most_placed(kind.profile, 0), self.limits[kind.profile])
            for kind, limit in zip(kinds, limits, strict=True)
        )
        return self._all_arrangements(kinds, limits)

    def _exact_arrangements(self, kinds: tuple[InstanceKind, ...], counts: tuple[int, ...]) -> list[Arrangement]:
        """Return every way to place exactly ``counts`` of each kind on an empty board."""
        return [way for way in self.arrangements(kinds, counts) if way.counts == counts]

    def _enumerate(self, kinds: tuple[InstanceKind, ...], limits: tuple[int, ...]) -> Iterator[Arrangement]:
        """Yield every way to place up to ``limits`` of each kind on an empty board, each set of places once."""
        choices = [[place for place in self.places[kind.profile] if kind.start in {None, place[0]}] for kind in kinds]

        def grown(arrangement: Arrangement, kind: int, first_choice: int) -> Iterator[Arrangement]:
            """Yield an arrangement, and all that add to it instances of this kind, from this choice on, and of later kinds.

            So each set comes once: its kinds and choices only ascend.
            """
            yield arrangement
            rooms = self.room_by_profile(arrangement.members)
            for later in range(kind, len(kinds)):
                profile = kinds[later].profile
                if arrangement.counts[later] >= limits[later] or not rooms[profile]:
                    continue
                for choice in range(first_choice if later == kind else 0, len(choices[later])):
                    start, mask = choices[later][choice]
                    if arrangement.mask & mask:
                        continue
                    counts = list(arrangement.counts)
                    counts[later] += 1
                    larger = Arrangement(
                        places=(*arrangement.places, Placed(later, profile, start)),
                        mask=arrangement.mask | mask,
                        members=tuple(sorted((*arrangement.members, profile))),
                        counts=tuple(counts),
                    )
                    yield from grown(larger, later, choice + 1)

        yield from grown(Arrangement(places=(), mask=0, members=(), counts=(0,) * len(kinds)), 0, 0)


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
def _board_of_profiles(profiles: tuple[Profile, ...], memory_slices: int, compute_slices: int) -> Board:
    """Return the board of these profiles, the same one for equal profiles."""
    return Board(profiles, memory_slices, compute_slices)


# By the id of a tuple of profiles, its board; and that tuple, so that no other one gets its id.
_board_by_id: Final[dict[int, tuple[tuple[Profile, ...], Board]]] = {}
_MOST_BOARDS: Final = 64


def board_of(layout: Layout) -> Board:
    """Return the board of a GPU; GPUs with equal profiles share it and its cache.

    It is looked up by the id of the tuple of profiles: to compare all profiles takes longer than most plans.
    """
    profiles = layout.profiles
    if id(profiles) not in _board_by_id:
        if len(_board_by_id) >= _MOST_BOARDS:
            _board_by_id.clear()
        board = _board_of_profiles(profiles, layout.memory_slices, layout.compute_slices)
        _board_by_id[id(profiles)] = (profiles, board)
    return _board_by_id[id(profiles)][1]


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

    Only slices are counted, and the driver chooses the placements: it finds room if the largest are created first.
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
    return tuple(ComputeInstance(profile=part) for part in parts)


def _finds_room(sizes: Sequence[int], taken: int, slices: int) -> bool:
    """Return whether compute instances of these sizes fit at the usual places of a GPU instance of so many slices.

    ``taken`` are bits. The driver may know more places, so this is a preference, not a rule.
    """
    if not sizes:
        return True
    masks = (Placement(start, sizes[0]).mask for start in usual_compute_starts(slices, sizes[0]))
    return any(_finds_room(sizes[1:], taken | mask, slices) for mask in masks if not taken & mask)


def _first_fitting_change(
    instance: GpuInstance,
    ways: Iterable[Sequence[ComputeInstance]],
    slices_to_create: Callable[..., Sequence[int] | None],
) -> ComputeChange | None:
    """Return the first change whose new compute instances find places, else the first in which their slices add up.

    ``ways`` are sets of compute instances to keep, the best first. ``slices_to_create`` returns what is created beside a
    set; None: that set cannot be kept.
    """
    by_count = None
    for kept in ways:
        slices = slices_to_create(kept)
        created = None if slices is None else new_compute(instance.profile, slices, kept)
        if created is None:
            continue
        change = ComputeChange(tuple(part for part in instance.compute if part not in kept), created)
        sizes = [part.profile.slices for part in created]
        if _finds_room(sizes, mask_of(part.placement for part in kept), instance.profile.slices):
            return change
        by_count = by_count or change
    return by_count


def destroyed_for_room(
    instance: GpuInstance,
    slices_of_each: Sequence[int],
    *,
    may_destroy: bool,
    may_evict: bool,
    with_others: bool = True,
    with_busy: bool = False,
) -> tuple[ComputeInstance, ...] | None:
    """Return the compute instances to destroy so that new ones of these slices fit; None: there is no way.

    As few busy ones as possible (none without ``may_evict``), then as few as possible. Without ``with_others`` none may stay
    next to the new ones, without ``with_busy`` no busy one. In a GPU instance that is held as a whole, nothing is destroyed.
    """
    if instance.held and not with_busy:
        return None
    most_destroyed = len(instance.compute) if may_destroy and not instance.held else 0
    ways = []
    for number in range(most_destroyed + 1):
        for destroyed in combinations(instance.compute, number):
            kept = [part for part in instance.compute if part not in destroyed]
            if any(part.busy for part in destroyed) and not may_evict:
                continue
            if (kept and not with_others) or (any(part.busy for part in kept) and not with_busy):
                continue
            ways.append(kept)
    # As many busy ones kept as possible, then as many as possible.
    ways.sort(key=lambda kept: (-sum(part.busy for part in kept), -len(kept)))
    change = _first_fitting_change(instance, ways, lambda _: slices_of_each)
    return None if change is None else change.destroyed


def compute_change(instance: GpuInstance, slices_of_each: Sequence[int], *, may_evict: bool) -> ComputeChange | None:
    """Return the cheapest change to exactly these compute instances (slices of each); None: there is none.

    It destroys as few busy ones as possible (none without ``may_evict``), then as few as possible. If a process holds the
    GPU instance itself, all count as busy.
    """
    existing = instance.compute
    ways = [kept for number in range(len(existing), -1, -1) for kept in combinations(existing, number)]

    def busy_destroyed(kept: Sequence[ComputeInstance]) -> int:
        return sum(part.busy or instance.held for part in existing if part not in kept)

    def slices_to_create(kept: Sequence[ComputeInstance]) -> list[int] | None:
        missing = Counter(slices_of_each)
        missing.subtract(part.profile.slices for part in kept)
        return None if any(count < 0 for count in missing.values()) else list(missing.elements())

    allowed = [kept for kept in ways if may_evict or not busy_destroyed(kept)]
    return _first_fitting_change(instance, sorted(allowed, key=busy_destroyed), slices_to_create)
