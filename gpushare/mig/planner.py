"""The exact planner: from the existing layout to the wish at the least `Cost`. Pure.

All ways to place the wish on a board are enumerated once per kind of board, GPUs with the same instances are searched
once, and the parts of a wish are spread over the GPUs by dynamic programming. There are no heuristics: the plan is the
cheapest one, and always the same.

Instances are never moved. A busy instance is destroyed only if ``evict`` names it; unknown holders count as busy.

During the search a cost is a single integer: the fields of `Cost`, the heaviest in the highest digits, so that comparing and
adding integers compares and adds field by field. A part of a wish is a code in the same way: one integer with a field per kind
of instance, and one for the size of the part, each with a guard bit, so that one subtraction tells for all fields whether
any goes below zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, combinations
from operator import mul, or_
from typing import Final, NamedTuple

from gpushare.base.errors import GpushareError, NotFound, NotSupported
from gpushare.base.model import GpuProcess, Holder
from gpushare.base.units import first_few
from gpushare.mig.board import (
    Arrangement,
    Board,
    InstanceKind,
    board_of,
    change_compute,
    make_room,
    members_of,
    new_compute,
    occupied,
)
from gpushare.mig.plan import Cost, GpuPlan, InstanceChange, MigPlan, NoPlan, Why, whole
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Profile
from gpushare.mig.wish import Request, Wish, merged, resolve

# -- one GPU: the cost of each way to serve a part of the wish on it ---------------------------------

# Larger than any sum of one field over a host.
_BASE: Final = 1 << 20


def weigh(cost: Cost) -> int:
    """Return a cost as one integer."""
    total = 0
    for field in cost:
        total = total * _BASE + field
    return total


CREATED: Final = weigh(Cost(created=1))


def cost_of(destroyed: InstanceChange) -> Cost:
    """Return the cost of destroying this."""
    instance = destroyed.instance
    if destroyed.whole:
        devices = instance.devices
        busy = sum(part.busy for part in destroyed.compute)
        if instance.held and not busy:
            # Held as a whole: any of its compute instances may be meant.
            busy = devices
    else:
        devices = len(destroyed.compute)
        busy = devices if instance.held else sum(part.busy for part in destroyed.compute)
    named = instance.name is not None
    return Cost(
        busy_destroyed=busy,
        named_destroyed=devices - busy if named else 0,
        idle_destroyed=0 if named else devices - busy,
        slices_destroyed=instance.placement.size if destroyed.whole else 0,
    )


@dataclass(frozen=True)
class Existing:
    """One existing GPU instance, in numbers; equal ones are interchangeable for the search."""

    # Its number on the board; -1: the driver no longer lists its profile.
    profile: int
    start: int
    mask: int
    # Compute instances: slices, placement, busy.
    compute: tuple[tuple[int, tuple[int, int] | None, bool], ...]
    weight: int
    # It may not be destroyed.
    pinned: bool
    nameless: bool
    # A process holds it as a whole.
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
    creation_weight: int
    arrangement: Arrangement


def _destroyed_to_fill(
    instance: GpuInstance,
    compute: tuple[int, ...],
    *,
    placed: bool,
    with_others: bool,
    may_destroy: bool,
    may_evict: bool,
) -> tuple[ComputeInstance, ...] | None:
    """Return what is destroyed in a GPU instance to add these compute instances; None: they cannot be added.

    Only in an instance without a name; next to busy ones only if the wish names the place. A wish for a whole GPU
    instance (``compute`` is empty) fills one that has room, and destroys nothing inside.
    """
    if instance.name is not None:
        return None
    return make_room(
        instance,
        compute or (instance.profile.slices,),
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
        may_evict: bool,
        with_others: bool,
        requests: Sequence[tuple[tuple[int, ...], bool]],
    ) -> None:
        """Look at one GPU; ``requests`` are for each wished kind its compute instances, and whether its place is named."""
        self.layout = layout
        self.board: Board = board_of(layout)
        self.instances = tuple(sorted(layout.instances, key=lambda old: old.start))
        self.existing = tuple(
            self._in_numbers(instance, may_go=may_destroy and (may_evict or not instance.busy))
            for instance in self.instances
        )
        self.lost_now = self.board.lost(occupied(layout), self._members_without(0))
        # By (number of an existing GPU instance, kind): it can serve as the new instance of this kind at its place. It
        # stays, loses these compute instances, and is filled with those that the wish asks for.
        self.fills: dict[tuple[int, int], tuple[ComputeInstance, ...]] = {}
        for number, old in enumerate(self.instances):
            for kind, (compute, placed) in enumerate(requests):
                destroyed = _destroyed_to_fill(
                    old,
                    compute,
                    placed=placed,
                    with_others=with_others,
                    may_destroy=may_destroy,
                    may_evict=may_evict,
                )
                if destroyed is not None:
                    self.fills[number, kind] = destroyed
        # The slices that no arrangement may use: of pinned instances, except those that can be filled.
        fillable = {number for number, _ in self.fills}
        fixed = (old.mask for number, old in enumerate(self.existing) if old.pinned and number not in fillable)
        self._fixed_mask: int = reduce(or_, fixed, 0)
        # By the existing ones removed (as bits), the slices and the members of those that stay.
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._removals: dict[tuple[int, tuple[int, ...]], tuple[Removal, ...]] = {}

    def _in_numbers(self, instance: GpuInstance, *, may_go: bool) -> Existing:
        """Return an existing instance in numbers, as the search compares it."""
        return Existing(
            profile=self.board.number.get(instance.profile.name, -1),
            start=instance.start,
            mask=instance.placement.mask,
            compute=tuple((c.profile.slices, c.placement, c.busy) for c in instance.compute),
            weight=weigh(cost_of(whole(instance))),
            pinned=not may_go,
            nameless=instance.name is None,
            held=instance.held,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for GPUs that are the same for the search."""
        return (id(self.board), self.existing)

    def _members_without(self, without: int) -> tuple[int, ...]:
        """Return the profile numbers of the existing ones, sorted, without those whose bit is set."""
        kept = (old.profile for n, old in enumerate(self.existing) if old.profile >= 0 and not without >> n & 1)
        return tuple(sorted(kept))

    # -- adding ------------------------------------------------------------------------------------

    def options(self, ways: Iterable[Candidate]) -> dict[int, Placing]:
        """Return the cheapest way to place every part of the wish on this GPU, by the code of the part.

        Weights are differences to leaving the GPU as it is.
        """
        cheapest: dict[int, int] = {}
        # All ways with the cheapest weight: `_least_lost` chooses among them, as what they lose takes longer to count.
        tied: dict[int, list[tuple[Arrangement, Removal]]] = {}
        for code, creation_weight, arrangement in ways:
            if arrangement.mask & self._fixed_mask:
                continue
            removals = self._removals_for(arrangement)
            if not removals:
                continue
            # All removals weigh the same.
            weight = creation_weight + removals[0].weight
            best = cheapest.get(code)
            if best is None or weight < best:
                cheapest[code] = weight
                tied[code] = [(arrangement, removal) for removal in removals]
            elif weight == best:
                tied[code] += [(arrangement, removal) for removal in removals]
        return {code: self._least_lost(cheapest[code], ways) for code, ways in tied.items()}

    def _least_lost(self, weight: int, ways: Sequence[tuple[Arrangement, Removal]]) -> Placing:
        """Return the way that leaves the most room; of equal ones the one with small instances at the high end."""

        def rank(way: tuple[Arrangement, Removal]) -> tuple[int, list[int], int]:
            return self.lost_after(*way), [-start for _, _, start in way[0].places], way[1].destroyed

        arrangement, removal = min(ways, key=rank) if len(ways) > 1 else ways[0]
        return Placing(weight + self.lost_after(arrangement, removal) - self.lost_now, arrangement, removal)

    def lost_after(self, arrangement: Arrangement, removal: Removal) -> int:
        """Return `capacity_lost` of the GPU afterwards."""
        removed = removal.destroyed | removal.filled
        if removed not in self._kept:
            masks = [old.mask for number, old in enumerate(self.existing) if not removed >> number & 1]
            self._kept[removed] = (reduce(or_, masks, 0), self._members_without(removed))
        kept_mask, kept_members = self._kept[removed]
        members = tuple(sorted(kept_members + arrangement.members))
        return self.board.lost(kept_mask | arrangement.mask, members)

    def _removals_for(self, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return `_find_removals` for an arrangement, from the cache if nothing can be filled."""
        if self.fills:
            return self._find_removals(arrangement)
        key = (arrangement.mask, arrangement.members)
        cached = self._removals.get(key)
        if cached is None:
            cached = self._removals[key] = self._find_removals(arrangement)
        return cached

    def _find_removals(self, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return the cheapest removals that make room for an arrangement, all of the same weight.

        Usually that is one: the removal of what is in the way. If the GPU would still have too many compute slices in use,
        or too many instances of a profile, it is each cheapest way to remove more. Empty: an instance in the way is pinned,
        or no removal is enough.
        """
        if not arrangement.places:
            return (Removal(weight=0, destroyed=0, filled=0),)
        filled_bits, filled_weight = self._filled_by(arrangement)
        in_the_way = [
            number
            for number, old in enumerate(self.existing)
            if not filled_bits >> number & 1 and self._conflicts(old, arrangement)
        ]
        if any(self.existing[number].pinned for number in in_the_way):
            return ()
        least = Removal(
            weight=filled_weight + sum(self.existing[number].weight for number in in_the_way),
            destroyed=sum(1 << number for number in in_the_way),
            filled=filled_bits,
        )
        return (least,) if self._within_limits(least, arrangement) else self._removing_more(least, arrangement)

    def _filled_by(self, arrangement: Arrangement) -> tuple[int, int]:
        """Return the existing ones that are filled for an arrangement, as bits, and what filling them adds to its weight.

        Filling is always cheaper than a new GPU instance, so all that can be filled are.
        """
        filled = weight = 0
        if not self.fills:
            return filled, weight
        kind_at = {(profile, start): kind for kind, profile, start in arrangement.places}
        for number, old in enumerate(self.existing):
            kind = kind_at.get((old.profile, old.start))
            if kind is not None and (number, kind) in self.fills:
                filled |= 1 << number
                destroyed = inside(self.instances[number], self.fills[number, kind])
                # The arrangement counts a GPU instance as created that is there already.
                weight += weigh(cost_of(destroyed)) - CREATED
        return filled, weight

    def _conflicts(self, existing: Existing, arrangement: Arrangement) -> bool:
        """Return whether an existing one cannot stay: it overlaps, or its media engines exclude a new one."""
        if existing.mask & arrangement.mask:
            return True
        return existing.profile >= 0 and not self.board.exclusive[existing.profile].isdisjoint(arrangement.members)

    def _within_limits(self, removal: Removal, arrangement: Arrangement) -> bool:
        """Return whether the GPU allows what remains after a removal together with an arrangement: compute slices, and counts."""
        board = self.board
        members = (*self._members_without(removal.destroyed | removal.filled), *arrangement.members)
        if sum(board.slices[number] for number in members) > board.compute_slices:
            return False
        return all(members.count(number) <= board.limits[number] for number in set(arrangement.members))

    def _removing_more(self, least: Removal, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return the cheapest removals that also keep counts and compute slices within their limits."""
        already_used = least.destroyed | least.filled
        others = [
            number for number, old in enumerate(self.existing) if not old.pinned and not already_used >> number & 1
        ]
        removals = [
            Removal(
                least.weight + sum(self.existing[number].weight for number in more),
                least.destroyed | sum(1 << number for number in more),
                least.filled,
            )
            for size in range(1, len(others) + 1)
            for more in combinations(others, size)
        ]
        removals = [removal for removal in removals if self._within_limits(removal, arrangement)]
        best = min((removal.weight for removal in removals), default=0)
        return tuple(removal for removal in removals if removal.weight == best)


# -- the plan of one GPU ---------------------------------------------------------------------------


def untouched(layout: Layout) -> GpuPlan:
    """Return the plan that leaves a GPU as it is."""
    return GpuPlan(gpu=layout.gpu, uuid=layout.uuid, kept=layout.instances)


def gpu_plan(
    layout: Layout, kept: Sequence[GpuInstance], destroyed: Sequence[InstanceChange], created: Sequence[InstanceChange]
) -> GpuPlan:
    """Return the plan of one GPU in the order of its steps: destroy by place, create the largest first."""
    return GpuPlan(
        gpu=layout.gpu,
        uuid=layout.uuid,
        kept=tuple(kept),
        destroyed=tuple(sorted(destroyed, key=lambda gone: gone.instance.start)),
        created=tuple(sorted(created, key=lambda new: (-new.instance.placement.size, new.instance.start))),
    )


def creation(profile: Profile, start: int, compute: Sequence[int]) -> InstanceChange:
    """Return a GPU instance to create, with compute instances of these slices; none: one that fills it."""
    placement = next(place for place in profile.placements or () if place.start == start)
    parts = new_compute(profile, compute or (profile.slices,)) or ()
    return whole(GpuInstance(profile=profile, placement=placement, compute=parts))


def inside(instance: GpuInstance, parts: Sequence[ComputeInstance]) -> InstanceChange:
    """Return compute instances that are destroyed or created in a GPU instance that stays."""
    return InstanceChange(instance=instance, compute=tuple(parts), whole=False)


def plan_for_option(site: Site, option: Placing, compute: Sequence[tuple[int, ...]]) -> GpuPlan:
    """Return the plan for an option of the search; ``compute`` are the compute instances in each kind.

    Each place of the option becomes a new instance, or is one that stays and is filled. Sets of existing instances are
    bits of a number.
    """
    destroyed_numbers = {number for number in range(len(site.instances)) if option.removal.destroyed >> number & 1}
    filled_at = {old.start: number for number, old in enumerate(site.instances) if option.removal.filled >> number & 1}
    destroyed = [whole(old) for number, old in enumerate(site.instances) if number in destroyed_numbers]
    created = []
    for kind, profile, start in option.arrangement.places:
        number = filled_at.get(start)
        if number is None:
            created.append(creation(site.board.profiles[profile], start, compute[kind]))
            continue
        owner = site.instances[number]
        removed = site.fills[number, kind]
        kept = [part for part in owner.compute if part not in removed]
        # Where nothing is said of compute instances, one has the whole size.
        wanted = compute[kind] or (owner.profile.slices,)
        # None, that there is no room, cannot be: the search took only what fits.
        added = new_compute(owner.profile, wanted, kept) or ()
        created.append(inside(owner, added))
        if removed:
            destroyed.append(inside(owner, removed))
    return gpu_plan(
        site.layout,
        [old for number, old in enumerate(site.instances) if number not in destroyed_numbers],
        destroyed,
        created,
    )


class Target(NamedTuple):
    """An existing instance: GPU index, GPU instance id, and compute instance id or None for all."""

    gpu: int
    instance: int
    compute: int | None = None


def plan_removal(layout: Layout, targets: Collection[Target], evict: Collection[Target]) -> tuple[GpuPlan, bool]:
    """Return the plan that destroys these instances of a GPU, and whether a busy one that is not in ``evict`` blocks it.

    A GPU instance goes with the last of its compute instances.
    """
    destroyed: list[InstanceChange] = []
    kept: list[GpuInstance] = []
    for instance in layout.instances:
        parts = tuple(part for part in instance.compute if Target(layout.gpu, instance.id, part.id) in targets)
        all_parts = bool(parts) and len(parts) == len(instance.compute)
        if all_parts or Target(layout.gpu, instance.id) in targets:
            destroyed.append(whole(instance))
            continue
        kept.append(instance)
        if parts:
            destroyed.append(inside(instance, parts))
    blocked = any(change.busy and not ends_only_allowed(layout.gpu, change, evict) for change in destroyed)
    return gpu_plan(layout, kept, destroyed, []), blocked


def ends_only_allowed(gpu: int, change: InstanceChange, targets: Collection[Target]) -> bool:
    """Return whether a change ends only busy instances among ``targets``, those that the caller allows to end.

    That is the GPU instance, or each of its busy compute instances, unless something holds the GPU instance itself.
    """
    owner = change.instance
    if Target(gpu, owner.id) in targets:
        return True
    return not owner.held and all(Target(gpu, owner.id, part.id) in targets for part in change.compute if part.busy)


def plan_of(layouts: Sequence[Layout], plans: Sequence[GpuPlan]) -> MigPlan:
    """Return the plan of several GPUs, with its cost."""
    costs = [cost_of(removed) for plan in plans for removed in plan.destroyed]
    for layout, plan in zip(layouts, plans, strict=True):
        created = sum(new.created for new in plan.created)
        costs.append(Cost(created=created, capacity_lost=capacity_lost(replace(layout, instances=plan.after))))
    # Field by field.
    total = Cost(*map(sum, zip(*costs, strict=True)))
    return MigPlan(gpus=tuple(plans), cost=total)


def exact_change(layout: Layout, wish: Wish, *, evict: frozenset[int]) -> GpuPlan | None:
    """Return the cheapest plan after which the GPU has exactly the wish, or None.

    Busy instances are destroyed only if ``evict`` has the id of their GPU instance.
    """
    board = board_of(layout)
    counts: Counter[tuple[InstanceKind, tuple[int, ...]]] = Counter()
    for request in wish:
        kind = InstanceKind(board.number[resolve(request, layout.profiles).name], request.start)
        counts[kind, request.compute] += request.count
    # Each kind with its compute instances, the largest first.
    rows = sorted(counts, key=lambda row: (-board.sizes[row[0].profile], row[0].profile, row[0].start or 0, row[1]))
    kinds = tuple(kind for kind, _ in rows)
    compute = [parts or (board.slices[kind.profile],) for kind, parts in rows]
    ranked_plans = []
    for arrangement in board.complete(kinds, tuple(counts[row] for row in rows)):
        plan = _plan_to(layout, arrangement, compute, evict)
        if plan is not None:
            # Of equals the one with instances at the high end.
            rank = (plan_of([layout], [plan]).cost, [-start for _, _, start in arrangement.places])
            ranked_plans.append((rank, plan))
    return min(ranked_plans, key=lambda ranked: ranked[0])[1] if ranked_plans else None


def _plan_to(
    layout: Layout, arrangement: Arrangement, compute: list[tuple[int, ...]], evict: frozenset[int]
) -> GpuPlan | None:
    """Return the plan to exactly this arrangement; None: something busy that may not be evicted is in the way.

    ``compute`` are the compute instances (slices of each) in each kind of the arrangement.
    """
    profiles = board_of(layout).profiles
    # Those that exist are taken out below: what remains is created.
    missing = {(profiles[profile].name, start): kind for kind, profile, start in arrangement.places}
    kept: list[GpuInstance] = []
    destroyed: list[InstanceChange] = []
    created: list[InstanceChange] = []
    for instance in layout.instances:
        kind = missing.pop(instance.place, None)
        may_evict = instance.id in evict
        if kind is None:
            if instance.busy and not may_evict:
                return None
            destroyed.append(whole(instance))
            continue
        parts = change_compute(instance, compute[kind], may_evict=may_evict)
        if parts is None:
            return None
        kept.append(instance)
        if parts.destroyed:
            destroyed.append(inside(instance, parts.destroyed))
        if parts.created:
            created.append(inside(instance, parts.created))
    for (name, start), kind in missing.items():
        profile = next(profile for profile in profiles if profile.name == name)
        created.append(creation(profile, start, compute[kind]))
    return gpu_plan(layout, kept, destroyed, created)


# Listed in a message; all of them are in `NoPlan.would_go`.
_LISTED: Final = 4


def no_plan_ever(layouts: Sequence[Layout], wish: Wish) -> NoPlan:
    """Return that the wish does not fit on these GPUs even if they are empty, and how many of one kind do."""
    where = f"GPU {layouts[0].gpu}" if len(layouts) == 1 else f"these {len(layouts)} GPUs"
    words = " ".join(str(request) for request in wish)
    for request in wish:
        number = most_of(layouts, request)
        if number < request.count:
            most_there = f"at most {number} of {request.one}" if number else f"not even one {request.one}"
            return NoPlan(
                why=Why.NEVER,
                message=f"{words} does not fit on {where}, even empty: {most_there}",
                hint="ask for fewer, or for a smaller profile: gpushare mig profiles",
            )
    reason = _reason_text(layouts[0], wish) if len(layouts) == 1 else ""
    return NoPlan(
        why=Why.NEVER,
        message=f"{words} do not fit on {where}, even empty{reason}",
        hint="ask for fewer or smaller instances; see what fits together: gpushare mig profiles",
    )


def _reason_text(layout: Layout, wish: Wish) -> str:
    """Return the rule that forbids a wish on an empty GPU, as the end of a sentence, if there is a single one."""
    asked: list[Profile] = []
    for request in wish:
        asked += [resolve(request, layout.profiles)] * request.count
    memory = sum(profile.size or 0 for profile in asked)
    compute = sum(profile.slices for profile in asked)
    if sum(profile.media for profile in asked) > 1:
        return ": a GPU has at most one with +me"
    may_be_next_to_all_media = all(profile.all_media or profile.no_media for profile in asked)
    if any(profile.all_media for profile in asked) and not may_be_next_to_all_media:
        return ": with +me.all only -me profiles are possible"
    if memory > layout.axis:
        return f": they need {memory} memory slices, it has {layout.axis}"
    if compute > layout.compute_slices:
        return f": they need {compute} compute slices, it has {layout.compute_slices}"
    return ""


def most_of(layouts: Sequence[Layout], request: Request) -> int:
    """Return how many of one request fit on these GPUs if they are empty."""
    total = 0
    for layout in layouts:
        board = board_of(layout)
        try:
            kind = InstanceKind(board.number[resolve(request, layout.profiles).name], request.start)
        except GpushareError:
            continue
        total += max(arrangement.counts[0] for arrangement in board.arrangements((kind,), (request.count,)))
    return total


def no_plan_now(wish: Wish, instead: MigPlan, *, only_adds: bool = False) -> NoPlan:
    """Return the refusal of a wish that existing instances block; ``instead`` is the cheapest plan that destroys them.

    The wish is empty for a removal. ``only_adds``: it was not to destroy anything, not even idle instances.
    """
    destroyed = [(gpu.gpu, change) for gpu in instead.gpus for change in gpu.destroyed]
    busy = [(gpu, change) for gpu, change in destroyed if change.busy]
    named = [_title_of(gpu, change) for gpu, change in (busy or destroyed)]
    listing = first_few(named, _LISTED)
    words = " ".join(str(request) for request in wish)
    problem = f"{words} does not fit" if wish else "busy instances are in the way"
    if busy and only_adds:
        hint = f"end the programs there, then make room: gpushare mig destroy {_words_for(destroyed)}"
    elif busy:
        hint = f"end the programs there, or let gpushare end them: {_words_for(_busy_only(busy), option='--evict ')}"
    elif only_adds:
        idle = "it is idle" if len(destroyed) == 1 else "they are idle"
        hint = f"{idle}: gpushare mig destroy {_words_for(destroyed)} makes room; for the whole plan: gpushare mig plan --may-destroy, with the same arguments"
    else:
        hint = "see who is where: gpushare mig status"
    return NoPlan(
        why=Why.BLOCKED, message=f"{problem}: this would have to be destroyed: {listing}", hint=hint, instead=instead
    )


def eviction_words(no_plan: NoPlan) -> tuple[str, str] | None:
    """Return the words for all that would be destroyed, and the ``--evict`` options for what is busy; None: nothing is."""
    busy = [(gpu, change) for gpu, change in no_plan.would_go if change.busy]
    return (_words_for(no_plan.would_go), _words_for(_busy_only(busy), option="--evict ")) if busy else None


def _busy_only(changes_by_gpu: Sequence[tuple[int, InstanceChange]]) -> list[tuple[int, InstanceChange]]:
    """Return what must be named by ``--evict``: of a GPU instance only the busy compute instances."""
    changes = []
    for gpu, change in changes_by_gpu:
        parts = change.compute if change.instance.held else tuple(part for part in change.compute if part.busy)
        changes.append((gpu, replace(change, compute=parts)))
    return changes


def _words_for(changes: Sequence[tuple[int, InstanceChange]], *, option: str = "") -> str:
    """Return the words for these on a command line, each after ``option``; ``INSTANCE...`` if there are too many."""
    words = []
    for gpu, change in changes:
        # As `mig destroy` takes them: 0/3, or 0/3/1 for a part.
        instance = f"{option}{gpu}/{change.instance.id}"
        words += [instance] if change.whole else [f"{instance}/{part.id}" for part in change.compute]
    return " ".join(words) if len(words) <= _LISTED else f"{option}INSTANCE..."


def _title_of(gpu: int, change: InstanceChange) -> str:
    """Return an instance in the way for a message: where it is, its name and ids, and who is in it."""
    owner = change.instance
    name = "" if owner.name is None else f" '{owner.name}'"
    ids = ", ".join(str(compute.id) for compute in change.compute)
    part = "" if change.whole else f", compute instance{'s' if len(change.compute) > 1 else ''} {ids}"
    occupants = f"busy: {holders_text(change.known_holders)}" if change.known_holders else "idle"
    if None in (owner.holders, *(compute.holders for compute in change.compute)):
        occupants = "busy, by whom is unknown"
    return f"{owner}{name} (GPU {gpu}, GPU instance {owner.id}{part}; {occupants})"


def holders_text(holders: Sequence[GpuProcess | Holder] | None) -> str:
    """Return holders in words: ``4194306 python3 (alice)``, and for one without CUDA what it holds."""
    if holders is None:
        return "unknown"
    held_by: dict[str, list[str]] = {}
    for holder in holders:
        name = " ".join(filter(None, [str(holder.pid), holder.name, holder.user and f"({holder.user})"]))
        held = held_by.setdefault(name, [])
        if isinstance(holder, Holder) and holder.what not in held:
            held.append(holder.what)
    return ", ".join(f"{name} by {' and '.join(held)}" if held else name for name, held in held_by.items()) or "idle"


def plan_add(
    layouts: Sequence[Layout],
    wish: Wish,
    *,
    may_destroy: bool = False,
    with_others: bool = True,
) -> MigPlan | NoPlan:
    """Return the cheapest plan that adds these instances, each on whichever GPU is best.

    Without ``may_destroy`` it only adds: GPU instances on free places, and compute instances in GPU instances that have
    room, are idle and have no name. Compute instances are put next to busy ones only if the wish names the place
    (``1c.3g.40gb:4``), and next to no others if ``with_others`` is False: a name belongs to a whole GPU instance.
    With ``may_destroy`` idle instances may be destroyed.
    """
    wish = merged(wish)
    offers = _offers(layouts, wish)
    plan = _add(layouts, wish, offers, may_destroy=may_destroy, may_evict=False, with_others=with_others)
    if plan is not None:
        return plan
    instead = _add(layouts, wish, offers, may_destroy=True, may_evict=True, with_others=with_others)
    return no_plan_ever(layouts, wish) if instead is None else no_plan_now(wish, instead, only_adds=not may_destroy)


def addable(layout: Layout, wish: Wish) -> bool:
    """Return whether a wish fits next to what is there: `plan_add` finds a plan that destroys nothing."""
    wish = merged(wish)
    return _place([layout], wish, _offers([layout], wish)) is not None


def plan_exact(
    layouts: Sequence[Layout], wishes: Mapping[int, Wish], *, evict: Iterable[Target] = ()
) -> MigPlan | NoPlan:
    """Return the cheapest plan after which each GPU (by index) has exactly its wish; other GPUs stay as they are.

    An empty wish clears a GPU. Existing instances that are wished stay, even if their place is not the best.
    """
    _check_gpus(layouts, wishes)
    evictable = frozenset(evict)
    plans: list[GpuPlan] = []
    blocked = False
    for layout in layouts:
        if layout.gpu not in wishes:
            plans.append(untouched(layout))
            continue
        wish = wishes[layout.gpu]
        evictable_ids = frozenset(
            instance.id for instance in layout.instances if ends_only_allowed(layout.gpu, whole(instance), evictable)
        )
        plan = exact_change(layout, wish, evict=evictable_ids)
        if plan is None:
            # What it would take if every busy instance could be evicted.
            blocked = True
            plan = exact_change(layout, wish, evict=frozenset(instance.id for instance in layout.instances))
        if plan is None:
            return no_plan_ever([layout], wish)
        plans.append(plan)
    result = plan_of(layouts, plans)
    return no_plan_now((), result) if blocked else result


def plan_destroy(
    layouts: Sequence[Layout], targets: Iterable[Target], *, evict: Iterable[Target] = ()
) -> MigPlan | NoPlan:
    """Return the plan that destroys these; a GPU instance goes with the last of its compute instances."""
    target_set = frozenset(targets)
    evictable = frozenset(evict)
    _check_gpus(layouts, [target.gpu for target in target_set])
    _check_targets(layouts, target_set)
    removals = [plan_removal(layout, target_set, evictable) for layout in layouts]
    result = plan_of(layouts, [plan for plan, _ in removals])
    return no_plan_now((), result) if any(blocked for _, blocked in removals) else result


# -- adding, over several GPUs ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Offer:
    """The requests of a wish that a kind of board can serve, by their numbers in the wish, and as which kinds."""

    requests: tuple[int, ...]
    kinds: tuple[InstanceKind, ...]
    # How many GPU and compute instances one of each kind is.
    parts: tuple[int, ...]


def _offers(layouts: Sequence[Layout], wish: Wish) -> dict[Board, _Offer]:
    """Return what each kind of board can serve of a wish.

    Raises:
        GpushareError: no board can serve one of the requests; the error of the first board says why.
    """
    offers: dict[Board, _Offer] = {}
    errors: dict[int, GpushareError] = {}
    for layout in layouts:
        board = board_of(layout)
        if board in offers:
            continue
        served: dict[int, InstanceKind] = {}
        for number, request in enumerate(wish):
            try:
                served[number] = InstanceKind(board.number[resolve(request, layout.profiles).name], request.start)
            except GpushareError as error:
                errors.setdefault(number, error)
        order = sorted(served, key=lambda n: (-board.sizes[served[n].profile], served[n].profile, n))
        parts = tuple(1 + max(1, len(wish[number].compute)) for number in order)
        offers[board] = _Offer(tuple(order), tuple(served[number] for number in order), parts)
    if not layouts:
        raise NotSupported("no GPU here has MIG", "see what each GPU can: gpushare compare", code="no_mig")
    anywhere = {number for offer in offers.values() for number in offer.requests}
    for number, refused in errors.items():
        if number not in anywhere:
            raise refused
    return offers


def _codes_of_wish(wish: Wish, offers: Mapping[Board, _Offer]) -> Codes:
    """Return how parts of a wish are written as numbers; the size of a request is its smallest on any board."""
    sizes: dict[int, int] = {}
    for board, offer in offers.items():
        for number, kind in zip(offer.requests, offer.kinds, strict=True):
            size = board.sizes[kind.profile]
            sizes[number] = min(size, sizes.get(number, size))
    return codes_for([request.count for request in wish], [sizes[number] for number in range(len(wish))])


def _add(
    layouts: Sequence[Layout],
    wish: Wish,
    offers: Mapping[Board, _Offer],
    *,
    may_destroy: bool,
    may_evict: bool,
    with_others: bool,
) -> MigPlan | None:
    """Return the cheapest plan that adds a wish, over all GPUs; None: it does not fit. The rest is as for `plan_add`."""
    placings = _place(layouts, wish, offers, may_destroy=may_destroy, may_evict=may_evict, with_others=with_others)
    if placings is None:
        return None
    plans = [untouched(layout) for layout in layouts]
    for number, site, placing in placings:
        contents = [wish[request].compute for request in offers[site.board].requests]
        plans[number] = plan_for_option(site, placing, contents)
    return plan_of(layouts, plans)


def _place(
    layouts: Sequence[Layout],
    wish: Wish,
    offers: Mapping[Board, _Offer],
    *,
    may_destroy: bool = False,
    may_evict: bool = False,
    with_others: bool = True,
) -> list[tuple[int, Site, Placing]] | None:
    """Return where a wish goes at the least cost, by the number of the layout; None: it does not fit."""
    codes = _codes_of_wish(wish, offers)
    # Of GPUs that are the same for the search only the first is searched.
    sites_by_key: dict[tuple[object, ...], list[tuple[int, Site]]] = {}
    for number, layout in enumerate(layouts):
        asked = [wish[request] for request in offers[board_of(layout)].requests]
        requests = [(request.compute, request.start is not None) for request in asked]
        site = Site(layout, may_destroy=may_destroy, may_evict=may_evict, with_others=with_others, requests=requests)
        sites_by_key.setdefault(site.key, []).append((number, site))
    candidates = {board: _candidates_on(board, wish, offer, codes) for board, offer in offers.items()}
    options = []
    groups = []
    for sites in sites_by_key.values():
        _, first_site = sites[0]
        placings = first_site.options(candidates[first_site.board])
        options.append(placings)
        groups.append(Group(len(sites), {code: placing.weight for code, placing in placings.items()}))
    parts = assign(groups, codes, sum(request.count for request in wish))
    if parts is None:
        return None
    return [
        (number, site, placings[code])
        for sites, placings, taken in zip(sites_by_key.values(), options, parts, strict=True)
        # The last GPUs of a group may get no part.
        for (number, site), code in zip(sites, sorted(taken, reverse=True), strict=False)
    ]


def _candidates_on(board: Board, wish: Wish, offer: _Offer, codes: Codes) -> list[Candidate]:
    """Return all ways to place a part of the wish on one kind of board, the empty way first."""
    limits = tuple(wish[number].count for number in offer.requests)
    code_of_one = [codes.of_one[number] for number in offer.requests]
    return [
        Candidate(
            code=sum(map(mul, arrangement.counts, code_of_one)),
            creation_weight=sum(map(mul, arrangement.counts, offer.parts)) * CREATED,
            arrangement=arrangement,
        )
        for arrangement in board.arrangements(offer.kinds, limits)
    ]


# -- what is named exists --------------------------------------------------------------------------


def _check_gpus(layouts: Sequence[Layout], indexes: Iterable[int]) -> None:
    """Raise NotFound if one of these GPUs has no MIG here."""
    gpus = [layout.gpu for layout in layouts]
    for gpu in indexes:
        if gpu not in gpus:
            listing = ", ".join(str(index) for index in gpus) or "none"
            raise NotFound(f"GPU {gpu} has no MIG here", f"GPUs with MIG: {listing}", gpu=gpu, code="gpu_not_found")


def _check_targets(layouts: Sequence[Layout], targets: Collection[Target]) -> None:
    """Raise NotFound if one of these instances does not exist."""
    existing: set[Target] = set()
    for layout in layouts:
        for instance in layout.instances:
            existing.add(Target(layout.gpu, instance.id))
            existing.update(Target(layout.gpu, instance.id, part.id) for part in instance.compute)
    for target in sorted(targets, key=str):
        if target not in existing:
            part = "" if target.compute is None else f", compute instance {target.compute}"
            raise NotFound(
                f"GPU {target.gpu} has no GPU instance {target.instance}{part}",
                "see what exists: gpushare mig status",
                gpu=target.gpu,
                code="instance_not_found",
            )


@dataclass(frozen=True, kw_only=True)
class FreeProfile:
    """How many more of one profile fit by themselves, and where one may start now."""

    profile: Profile
    count: int
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LostSlices:
    """Free slices that no set of further instances can use."""

    compute: int
    memory: int


def free_profiles(layout: Layout) -> tuple[FreeProfile, ...]:
    """Return what fits for each profile: the Free column of ``nvidia-smi mig -lgip``, and the free placements.

    Each profile is counted by itself: two that fit need not fit together.
    """
    board = board_of(layout)
    mask = occupied(layout)
    counts = board.free(mask, members_of(layout))
    return tuple(
        FreeProfile(
            profile=profile,
            count=counts[number],
            starts=tuple(sorted(start for start, place in board.places[number] if counts[number] and not mask & place)),
        )
        for number, profile in enumerate(board.profiles)
    )


def lost_slices(layout: Layout) -> LostSlices:
    """Return the free slices that nothing can use: two 3g on a GPU of seven slices lose one compute slice."""
    board = board_of(layout)
    mask = occupied(layout)
    members = members_of(layout)
    compute, memory = board.reachable(mask, members)
    used = sum(instance.profile.slices for instance in layout.instances)
    return LostSlices(
        compute=max(0, board.compute_slices - used - compute), memory=board.axis - mask.bit_count() - memory
    )


def capacity_lost(layout: Layout) -> int:
    """Return the capacity that the instances take, in memory slices.

    The sum over all profiles: the number that fits on an empty GPU less the number that still fits, times the memory
    slices of one. It is additive over GPUs, so plans for several GPUs compare by the sum.
    """
    return board_of(layout).lost(occupied(layout), members_of(layout))


def fragmentation(layout: Layout) -> int:
    """Return how much of `capacity_lost` is due to the places: the difference to the best packing, in memory slices."""
    board = board_of(layout)
    members = members_of(layout)
    kinds = tuple(InstanceKind(number) for number in sorted(set(members)))
    counts = tuple(members.count(kind.profile) for kind in kinds)
    lost_now = capacity_lost(layout)
    lost_if_packed = (board.lost(way.mask, members) for way in board.complete(kinds, counts))
    return lost_now - min(lost_if_packed, default=lost_now)


@dataclass(frozen=True)
class Codes:
    """How parts of a wish are written as numbers, so that they can be added and compared at once.

    A field of bits counts the instances of each kind, the last field their size; a guard bit above each field shows an
    overflow. ``of_one`` is the code of one instance of each kind, ``whole`` that of the whole wish.
    """

    of_one: tuple[int, ...]
    whole: int
    guard: int
    # (shift, bits) of each field, the size last.
    fields: tuple[tuple[int, int], ...]

    def field_wise_max(self, codes: Sequence[int]) -> int:
        """Return the code with the largest value of each field."""
        largest = 0
        for shift, bits in self.fields:
            largest |= max((code >> shift & ((1 << bits) - 1) for code in codes), default=0) << shift
        return largest

    def capped_sum(self, first: int, second: int) -> int:
        """Return the sum field by field, each at most that of the whole wish: more than it asks for counts no more."""
        total_code = 0
        for shift, bits in self.fields:
            mask = (1 << bits) - 1
            total = (first >> shift & mask) + (second >> shift & mask)
            total_code |= min(total, self.whole >> shift & mask) << shift
        return total_code


def codes_for(counts: Sequence[int], sizes: Sequence[int]) -> Codes:
    """Return the codes of a wish with these counts of each kind, an instance of which has this size.

    The sizes only make the search short: their sum bounds what the GPUs that are left can take.
    """
    total = sum(count * size for count, size in zip(counts, sizes, strict=True))
    fields: list[tuple[int, int]] = []
    shift = guard = whole = 0
    for count in (*counts, total):
        bits = count.bit_length()
        fields.append((shift, bits))
        whole |= count << shift
        guard |= 1 << shift + bits
        shift += bits + 1
    size_shift, _ = fields[-1]
    of_one = tuple((1 << fields[kind][0]) + (size << size_shift) for kind, size in enumerate(sizes))
    return Codes(of_one, whole, guard, tuple(fields))


@dataclass(frozen=True)
class Group:
    """GPUs that are the same for the search: how many, and what each part of the wish costs on one of them."""

    count: int
    weights: Mapping[int, int]


def assign(groups: Sequence[Group], codes: Codes, instances: int) -> list[list[int]] | None:
    """Return for each group the parts that its GPUs take (at most one each), at the least total; None: no way.

    ``instances`` is how many instances the wish has: no more GPUs of a group than that are needed. A group's
    ``weights`` are differences to leaving a GPU as it is, and hold the empty part (0) with weight 0.

    GPUs of one group are interchangeable, so of the many orders of the same parts only one is searched: by the first
    kind of instance that a part holds. In the last group, which has to take all that is left, that is the first kind
    that is left.
    """
    # The largest last, where the order says most.
    by_count = sorted(range(len(groups)), key=lambda number: groups[number].count)
    group_of_gpu = [number for number in by_count for _ in range(min(groups[number].count, instances))]
    most_from = _most_from_gpu(groups, group_of_gpu, codes)
    guard = codes.guard
    # A guard bit that the subtraction clears: all GPUs together cannot take the wish.
    if ((most_from[0] | guard) - codes.whole) & guard != guard:
        return None
    cheapest: dict[_State, int] = {(codes.whole, 0): 0}
    steps: list[dict[_State, tuple[int, _State]]] = []
    choices: _PartChoices | None = None
    for gpu, group in enumerate(group_of_gpu):
        if choices is None or group_of_gpu[gpu - 1] != group:
            choices = _PartChoices(groups[group], codes, last=group == group_of_gpu[-1])
            cheapest = _without_order(cheapest, steps)
        cheapest, taken = _next_states(cheapest, choices, most_from[gpu + 1] | guard, guard)
        steps.append(taken)
    ends = [state for state in cheapest if state[0] == 0]
    if not ends:
        return None
    return _parts_taken(groups, group_of_gpu, steps, min(ends, key=lambda state: (cheapest[state], state)))


# What is left of the wish, and which kind of instance the next part may begin with.
_State = tuple[int, int]


class _PartChoices:
    """The parts of the wish that a GPU of a group may take, by the first kind of instance in each.

    Kinds are numbered from the one that the fewest parts hold: so few parts begin with a low kind, and the search stays
    small. The part without an instance comes last.
    """

    def __init__(self, group: Group, codes: Codes, *, last: bool) -> None:
        """Sort the parts of a group. ``last``: it is the last group, whose GPUs have to take all that is left."""
        # The last field of a code is the sum of sizes, and no kind.
        kind_masks = [((1 << bits) - 1) << shift for shift, bits in codes.fields[:-1]]
        self._masks = sorted(kind_masks, key=lambda mask: sum(bool(code & mask) for code in group.weights))
        # Code, weight, and the kind from which on the next part may begin: in the last group what is left says that.
        self._parts_by_first_kind: list[list[tuple[int, int, int]]] = [[] for _ in range(len(kind_masks) + 1)]
        for code, weight in group.weights.items():
            kind = self._first_kind(code)
            self._parts_by_first_kind[kind].append((code, weight, 0 if last else kind))
        # For each kind the parts that begin with it or a later one; None in the last group, which does not use them.
        self._parts_from_kind = None
        if not last:
            kinds = range(len(self._parts_by_first_kind))
            self._parts_from_kind = [list(chain(*self._parts_by_first_kind[kind:])) for kind in kinds]

    def _first_kind(self, code: int) -> int:
        """Return the first kind of instance in a code; the number of kinds if it holds none."""
        return next((kind for kind, mask in enumerate(self._masks) if code & mask), len(self._masks))

    def parts(self, remaining: int, begin: int) -> Sequence[tuple[int, int, int]]:
        """Return the parts to try for the next GPU: code, weight, and the kind from which on the part after may begin.

        ``remaining`` is the code of what is left of the wish: some parts may hold more than that.
        """
        if self._parts_from_kind is None:
            return self._parts_by_first_kind[self._first_kind(remaining)]
        return self._parts_from_kind[begin]


def _next_states(
    cheapest: Mapping[_State, int], choices: _PartChoices, most_later: int, guard: int
) -> tuple[dict[_State, int], dict[_State, tuple[int, _State]]]:
    """Return the least weight of each state after one more GPU, and from which state, by which part, it is reached.

    ``most_later`` is the most that all later GPUs can take, with the guard bits set.
    """
    best: dict[_State, int] = {}
    taken: dict[_State, tuple[int, _State]] = {}
    for state, weight in cheapest.items():
        rest_of_wish, begin = state
        guarded = rest_of_wish | guard
        for code, more, kind in choices.parts(rest_of_wish, begin):
            rest = guarded - code
            # The part holds more than is left of the wish.
            if rest & guard != guard:
                continue
            rest ^= guard
            # The later GPUs cannot take the rest.
            if (most_later - rest) & guard != guard:
                continue
            next_state = (rest, kind)
            cheaper = best.get(next_state)
            if cheaper is None or weight + more < cheaper:
                best[next_state] = weight + more
                taken[next_state] = (code, state)
    return best, taken


def _without_order(cheapest: Mapping[_State, int], steps: list[dict[_State, tuple[int, _State]]]) -> dict[_State, int]:
    """Return the states at the beginning of a new group, where the order within the group before says nothing.

    Of states that differ only in that order the cheapest stays; the last of ``steps`` gets its link.
    """
    states: dict[_State, int] = {}
    links: dict[_State, tuple[int, _State]] = {}
    for state, weight in cheapest.items():
        rest_of_wish, _ = state
        fresh = (rest_of_wish, 0)
        if fresh not in states or weight < states[fresh]:
            states[fresh] = weight
            if steps:
                links[fresh] = steps[-1][state]
    if steps:
        steps[-1].update(links)
    return states


def _most_from_gpu(groups: Sequence[Group], group_of_gpu: Sequence[int], codes: Codes) -> list[int]:
    """Return for each GPU the most of the wish that it and all later ones can take together, field by field of a code."""
    most_on_one = [codes.field_wise_max(list(group.weights)) for group in groups]
    most_from = [0]
    for group in reversed(group_of_gpu):
        most_from.append(codes.capped_sum(most_from[-1], most_on_one[group]))
    return most_from[::-1]


def _parts_taken(
    groups: Sequence[Group],
    group_of_gpu: Sequence[int],
    steps: Sequence[Mapping[_State, tuple[int, _State]]],
    end: _State,
) -> list[list[int]]:
    """Return the parts that the GPUs of each group took, read back from the end: ``steps`` say how each state was reached."""
    parts: list[list[int]] = [[] for _ in groups]
    state = end
    for group, taken in zip(reversed(group_of_gpu), reversed(steps), strict=True):
        part, state = taken[state]
        if part:
            parts[group].append(part)
    return parts
