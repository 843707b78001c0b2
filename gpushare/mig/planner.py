"""The exact planner: from the existing layout to the wish at the least `Cost`. Pure.

All ways to place the wish on a board are enumerated once per kind of board, GPUs with the same instances are searched
once, and the parts of a wish are spread over the GPUs by dynamic programming. There are no heuristics: the plan is the
cheapest one, and always the same.

Instances are never moved. A busy instance is destroyed only if ``evict`` names it; unknown holders count as busy.

During the search a cost is a single integer: the fields of `Cost`, the heaviest in the highest digits, so that comparing and
adding integers compares and adds field by field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from operator import add, le, mul, or_, sub
from typing import Final, NamedTuple

from gpushare.base.errors import GpushareError, NotSupported
from gpushare.base.model import GpuProcess, Holder
from gpushare.base.units import first_few
from gpushare.mig.board import (
    Arrangement,
    Board,
    InstanceKind,
    board_of,
    compute_change,
    destroyed_for_room,
    members_of,
    new_compute,
    occupied,
)
from gpushare.mig.plan import Cost, GpuPlan, InstanceChange, MigPlan, NoPlan, Why, whole_change
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Profile
from gpushare.mig.wish import Request, Wish, merge_equal, no_profiles_error, resolve

# -- one GPU: the cost of each way to serve a part of the wish on it ---------------------------------

# Larger than any sum of one field over a host.
_BASE: Final = 1 << 20


def weigh(cost: Cost) -> int:
    """Return a cost as one integer; these compare and add as the costs do."""
    total = 0
    for field in cost:
        total = total * _BASE + field
    return total


CREATED: Final = weigh(Cost(created=1))


def cost_of(destroyed: InstanceChange) -> Cost:
    """Return what it costs to destroy an instance: its MIG devices count as busy, named or idle."""
    instance, parts = destroyed.instance, destroyed.compute
    devices = instance.devices if destroyed.whole else len(parts)
    busy = sum(part.busy for part in parts)
    # What holds a GPU instance itself may use any of its compute instances, unless a busy one tells which.
    if instance.held and not (destroyed.whole and busy):
        busy = devices
    named = instance.name is not None
    return Cost(
        busy_destroyed=busy,
        named_destroyed=devices - busy if named else 0,
        idle_destroyed=0 if named else devices - busy,
        slices_destroyed=instance.placement.size if destroyed.whole else 0,
    )


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


# A part of the wish: how many instances it has of each request, and last the memory slices of all these.
WishPart = tuple[int, ...]


class Candidate(NamedTuple):
    """One way to place a part of the wish: the weight of what is created, the places."""

    part: WishPart
    creation_weight: int
    arrangement: Arrangement


def _destroyed_if_filled(
    instance: GpuInstance, request: Request, *, may_destroy: bool, may_evict: bool, with_others: bool
) -> tuple[ComputeInstance, ...] | None:
    """Return the compute instances to destroy so that a request is served inside an existing GPU instance; None: it cannot be.

    Never in a GPU instance with a name. The new ones get next to busy ones only if the request names the place. If it asks
    for a whole GPU instance (``compute`` is empty), nothing inside is destroyed.
    """
    if instance.name is not None:
        return None
    return destroyed_for_room(
        instance,
        request.compute or (instance.profile.slices,),
        may_destroy=may_destroy and bool(request.compute),
        may_evict=may_evict,
        with_others=with_others,
        with_busy=request.start is not None and bool(request.compute),
    )


class Site:
    """One GPU, and which of its instances may go.

    To fill an existing GPU instance: it stays, loses some compute instances, and gets those that the wish asks for.
    """

    def __init__(
        self, layout: Layout, requests: Sequence[Request], *, may_destroy: bool, may_evict: bool, with_others: bool
    ) -> None:
        """Look at one GPU; ``requests`` are those that its board can serve, in the order of the kinds."""
        self.layout = layout
        self.board: Board = board_of(layout)
        # The existing ones by place. By their number in this order: the number of each profile on the board (None: the driver no
        # longer lists it), the slices, the weight of destroying each, and whether it may not be destroyed.
        self.instances = tuple(sorted(layout.instances, key=lambda old: old.start))
        self.profiles = [self.board.number.get(old.profile.name) for old in self.instances]
        self.masks = [old.placement.mask for old in self.instances]
        self.weights = [weigh(cost_of(whole_change(old))) for old in self.instances]
        self.pinned = [not may_destroy or (old.busy and not may_evict) for old in self.instances]
        self.lost_now = self.board.capacity_lost(occupied(layout), self._members_without(0))
        # By (number of an existing GPU instance, kind): the compute instances that it loses if it is filled for this kind.
        self.fills: dict[tuple[int, int], tuple[ComputeInstance, ...]] = {}
        for number, old in enumerate(self.instances):
            for kind, request in enumerate(requests):
                destroyed = _destroyed_if_filled(
                    old, request, may_destroy=may_destroy, may_evict=may_evict, with_others=with_others
                )
                if destroyed is not None:
                    self.fills[number, kind] = destroyed
        # The slices that no arrangement may use: of pinned instances, except those that can be filled.
        fillable = {number for number, _ in self.fills}
        fixed = (mask for number, mask in enumerate(self.masks) if self.pinned[number] and number not in fillable)
        self._fixed_mask: int = reduce(or_, fixed, 0)
        # By the existing ones removed (as bits), the slices and the members of those that stay.
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._removals: dict[tuple[int, tuple[int, ...]], tuple[Removal, ...]] = {}

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for GPUs that are the same for the search."""
        numbers = zip(self.profiles, self.masks, self.weights, self.pinned, strict=True)
        compute = [
            tuple((part.profile.slices, part.placement, part.busy) for part in old.compute) for old in self.instances
        ]
        states = ((old.name is None, old.held) for old in self.instances)
        return (id(self.board), *zip(numbers, compute, states, strict=True))

    def _members_without(self, without: int) -> tuple[int, ...]:
        """Return the profile numbers of the existing instances, sorted, less those whose bit in ``without`` is set."""
        kept = (profile for n, profile in enumerate(self.profiles) if profile is not None and not without >> n & 1)
        return tuple(sorted(kept))

    def options(self, candidates: Iterable[Candidate]) -> dict[WishPart, Placing]:
        """Return the cheapest way to place every part of the wish on this GPU.

        Weights are differences to leaving the GPU as it is.
        """
        cheapest: dict[WishPart, int] = {}
        # All ways with the cheapest weight: `_least_lost` chooses among them, as what they lose takes longer to count.
        tied: dict[WishPart, list[tuple[Arrangement, Removal]]] = {}
        for part, creation_weight, arrangement in candidates:
            if arrangement.mask & self._fixed_mask:
                continue
            removals = self._removals_for(arrangement)
            if not removals:
                continue
            # All removals weigh the same.
            weight = creation_weight + removals[0].weight
            if part not in cheapest or weight < cheapest[part]:
                cheapest[part] = weight
                tied[part] = []
            if weight == cheapest[part]:
                tied[part] += [(arrangement, removal) for removal in removals]
        return {part: self._least_lost(cheapest[part], ways) for part, ways in tied.items()}

    def _least_lost(self, weight: int, ways: Sequence[tuple[Arrangement, Removal]]) -> Placing:
        """Return the way that leaves the most room, by `Arrangement.rank` among equal ones; all ways have this weight."""
        rows = [(self._lost_after(*way), *way) for way in ways]
        # One way is the usual case.
        if len(rows) > 1:
            rows.sort(key=lambda row: (row[0], row[1].rank, row[2].destroyed))
        lost, arrangement, removal = rows[0]
        return Placing(weight + lost - self.lost_now, arrangement, removal)

    def _lost_after(self, arrangement: Arrangement, removal: Removal) -> int:
        """Return `capacity_lost` of the GPU once a removal and an arrangement are carried out."""
        removed = removal.destroyed | removal.filled
        if removed not in self._kept:
            masks = [mask for number, mask in enumerate(self.masks) if not removed >> number & 1]
            self._kept[removed] = (reduce(or_, masks, 0), self._members_without(removed))
        kept_mask, kept_members = self._kept[removed]
        members = tuple(sorted(kept_members + arrangement.members))
        return self.board.capacity_lost(kept_mask | arrangement.mask, members)

    def _removals_for(self, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return `_find_removals`, cached where it depends on mask and members alone: if there is nothing to fill."""
        if self.fills:
            return self._find_removals(arrangement)
        key = (arrangement.mask, arrangement.members)
        if key not in self._removals:
            self._removals[key] = self._find_removals(arrangement)
        return self._removals[key]

    def _find_removals(self, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return the cheapest removals that make room for an arrangement, all of the same weight; none: there is no way.

        What is in the way goes, and usually that is enough. If the GPU would still have too many compute slices in use, or too
        many instances of a profile, others go with it, in every cheapest way.
        """
        if not arrangement.places:
            return (Removal(weight=0, destroyed=0, filled=0),)
        filled_bits, filled_weight = self._filled_by(arrangement)
        in_the_way = [
            number
            for number in range(len(self.instances))
            if not filled_bits >> number & 1 and self._conflicts(number, arrangement)
        ]
        if any(self.pinned[number] for number in in_the_way):
            return ()
        least = Removal(
            weight=filled_weight + sum(self.weights[number] for number in in_the_way),
            destroyed=sum(1 << number for number in in_the_way),
            filled=filled_bits,
        )
        return (least,) if self._within_limits(least, arrangement) else self._larger_removals(least, arrangement)

    def _filled_by(self, arrangement: Arrangement) -> tuple[int, int]:
        """Return which existing GPU instances an arrangement fills (as bits) in place of new ones, and what that adds to its weight.

        Filling is always cheaper than a new GPU instance, so all that can be filled are.
        """
        filled = weight = 0
        if not self.fills:
            return filled, weight
        kind_at = {(place.profile, place.start): place.kind for place in arrangement.places}
        for number, old in enumerate(self.instances):
            profile = self.profiles[number]
            kind = None if profile is None else kind_at.get((profile, old.start))
            if kind is not None and (number, kind) in self.fills:
                filled |= 1 << number
                destroyed = change_inside(old, self.fills[number, kind])
                # The weight of the arrangement has a new GPU instance for each place, and this one exists.
                weight += weigh(cost_of(destroyed)) - CREATED
        return filled, weight

    def _conflicts(self, number: int, arrangement: Arrangement) -> bool:
        """Return whether an existing one cannot stay: it overlaps, or its media engines exclude a new one."""
        if self.masks[number] & arrangement.mask:
            return True
        profile = self.profiles[number]
        return profile is not None and not self.board.exclusive[profile].isdisjoint(arrangement.members)

    def _within_limits(self, removal: Removal, arrangement: Arrangement) -> bool:
        """Return whether what a removal leaves and an arrangement together have allowed numbers of slices and instances."""
        board = self.board
        members = (*self._members_without(removal.destroyed | removal.filled), *arrangement.members)
        if sum(board.slices[number] for number in members) > board.compute_slices:
            return False
        return all(members.count(number) <= board.limits[number] for number in set(arrangement.members))

    def _larger_removals(self, least: Removal, arrangement: Arrangement) -> tuple[Removal, ...]:
        """Return the cheapest removals that contain ``least`` and leave room within the limits."""
        already_used = least.destroyed | least.filled
        others = [number for number, pinned in enumerate(self.pinned) if not pinned and not already_used >> number & 1]
        removals = [
            Removal(
                least.weight + sum(self.weights[number] for number in more),
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


def unchanged_plan(layout: Layout) -> GpuPlan:
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
    return whole_change(GpuInstance(profile=profile, placement=placement, compute=parts))


def change_inside(instance: GpuInstance, parts: Sequence[ComputeInstance]) -> InstanceChange:
    """Return compute instances that are destroyed or created in a GPU instance that stays."""
    return InstanceChange(instance=instance, compute=tuple(parts), whole=False)


def plan_for_option(site: Site, option: Placing, requests: Sequence[Request]) -> GpuPlan:
    """Return the plan of a GPU for the way that the search chose for it; ``requests`` as for `Site`.

    Each place of the option becomes a new instance, or is one that stays and is filled.
    """
    removal = option.removal
    instances = list(enumerate(site.instances))
    destroyed = [whole_change(old) for number, old in instances if removal.destroyed >> number & 1]
    filled_at = {old.start: number for number, old in instances if removal.filled >> number & 1}
    created = []
    for kind, profile, start in option.arrangement.places:
        compute = requests[kind].compute
        number = filled_at.get(start)
        if number is None:
            created.append(creation(site.board.profiles[profile], start, compute))
            continue
        owner = site.instances[number]
        removed = site.fills[number, kind]
        kept = [part for part in owner.compute if part not in removed]
        # There is room: the search took only what fits.
        added = new_compute(owner.profile, compute or (owner.profile.slices,), kept) or ()
        created.append(change_inside(owner, added))
        if removed:
            destroyed.append(change_inside(owner, removed))
    staying = [old for number, old in instances if not removal.destroyed >> number & 1]
    return gpu_plan(site.layout, staying, destroyed, created)


class Target(NamedTuple):
    """An existing instance: GPU index, GPU instance id, and compute instance id or None for all."""

    gpu: int
    instance: int
    compute: int | None = None


def _plan_removal(layout: Layout, targets: Collection[Target]) -> GpuPlan:
    """Return the plan that destroys these instances of a GPU; a GPU instance goes with the last of its compute instances."""
    destroyed: list[InstanceChange] = []
    kept: list[GpuInstance] = []
    for instance in layout.instances:
        parts = tuple(part for part in instance.compute if Target(layout.gpu, instance.id, part.id) in targets)
        all_parts = bool(parts) and len(parts) == len(instance.compute)
        if all_parts or Target(layout.gpu, instance.id) in targets:
            destroyed.append(whole_change(instance))
            continue
        kept.append(instance)
        if parts:
            destroyed.append(change_inside(instance, parts))
    return gpu_plan(layout, kept, destroyed, [])


def _may_end(gpu: int, change: InstanceChange, evict: Collection[Target]) -> bool:
    """Return whether ``evict`` allows to end all programs in what a change destroys.

    It must name each busy compute instance, or the GPU instance; if a process holds the GPU instance itself, the latter.
    """
    owner = change.instance
    if Target(gpu, owner.id) in evict:
        return True
    return not owner.held and all(Target(gpu, owner.id, part.id) in evict for part in change.compute if part.busy)


def plan_of(layouts: Sequence[Layout], plans: Sequence[GpuPlan]) -> MigPlan:
    """Return the plans of single GPUs, one for each layout, as one plan with its total cost."""
    costs = [cost_of(removed) for plan in plans for removed in plan.destroyed]
    for layout, plan in zip(layouts, plans, strict=True):
        created = sum(new.created for new in plan.created)
        costs.append(Cost(created=created, capacity_lost=capacity_lost(replace(layout, instances=plan.after))))
    # Field by field.
    total = Cost(*map(sum, zip(*costs, strict=True)))
    return MigPlan(gpus=tuple(plans), cost=total)


def _exact_change(layout: Layout, wish: Wish, *, evict: frozenset[int]) -> GpuPlan | None:
    """Return the cheapest plan after which the GPU has exactly the wish; None: busy instances are in the way.

    Busy instances are destroyed only if ``evict`` has the id of their GPU instance.
    """
    board = board_of(layout)
    counts: Counter[tuple[InstanceKind, tuple[int, ...]]] = Counter()
    for request in wish:
        counts[_kind_of(request, layout), request.compute] += request.count
    # Each kind with its compute instances, the largest first.
    rows = sorted(counts, key=lambda row: (-board.sizes[row[0].profile], row[0].profile, row[0].start or 0, row[1]))
    kinds = tuple(kind for kind, _ in rows)
    compute = [parts or (board.slices[kind.profile],) for kind, parts in rows]
    plans = []
    for arrangement in board.exact_arrangements(kinds, tuple(counts[row] for row in rows)):
        plan = _plan_to(layout, arrangement, compute, evict)
        if plan is not None:
            plans.append((plan_of([layout], [plan]).cost, arrangement.rank, plan))
    return min(plans, key=lambda row: row[:2])[-1] if plans else None


def _plan_to(
    layout: Layout, arrangement: Arrangement, compute: list[tuple[int, ...]], evict: frozenset[int]
) -> GpuPlan | None:
    """Return the plan to exactly this arrangement; None: something busy that may not be evicted is in the way.

    ``compute`` are the compute instances (slices of each) in each kind of the arrangement.
    """
    profiles = board_of(layout).profiles
    # Those that exist are taken out below: what remains is created.
    missing = {(profiles[place.profile].name, place.start): place for place in arrangement.places}
    kept: list[GpuInstance] = []
    destroyed: list[InstanceChange] = []
    created: list[InstanceChange] = []
    for instance in layout.instances:
        place = missing.pop(instance.place, None)
        may_evict = instance.id in evict
        if place is None:
            if instance.busy and not may_evict:
                return None
            destroyed.append(whole_change(instance))
            continue
        parts = compute_change(instance, compute[place.kind], may_evict=may_evict)
        if parts is None:
            return None
        kept.append(instance)
        if parts.destroyed:
            destroyed.append(change_inside(instance, parts.destroyed))
        if parts.created:
            created.append(change_inside(instance, parts.created))
    created += (creation(profiles[place.profile], place.start, compute[place.kind]) for place in missing.values())
    return gpu_plan(layout, kept, destroyed, created)


# Listed in a message; all of them are in `NoPlan.would_go`.
_LISTED: Final = 4


def no_plan_ever(layouts: Sequence[Layout], wish: Wish) -> NoPlan:
    """Return the refusal of a wish that does not fit on these GPUs even if they are empty."""
    where = f"GPU {layouts[0].gpu}" if len(layouts) == 1 else f"these {len(layouts)} GPUs"
    fits = "does not fit" if len(wish) == 1 else "do not fit together"
    return NoPlan(
        why=Why.NEVER,
        message=f"{' '.join(map(str, wish))} {fits} on {where}, even empty",
        hint="ask for fewer or smaller instances; see how many of each fit: gpushare mig profiles",
    )


def no_plan_now(wish: Wish, instead: MigPlan, *, only_adds: bool = False) -> NoPlan:
    """Return the refusal of a wish that existing instances block; ``instead`` is the cheapest plan that destroys them.

    The wish is empty for a removal. ``only_adds``: it was not to destroy anything, not even idle instances.
    """
    destroyed = instead.destroyed
    busy = [(gpu, change) for gpu, change in destroyed if change.busy]
    listing = first_few([_title_of(gpu, change) for gpu, change in (busy or destroyed)], _LISTED)
    problem = f"{' '.join(map(str, wish))} does not fit" if wish else "busy instances are in the way"
    if busy and only_adds:
        hint = f"end the programs there, then make room: gpushare mig destroy {_instance_arguments(destroyed)}"
    elif busy:
        hint = f"end the programs there, or let mig apply or mig destroy end them: {_instance_arguments(_without_idle_parts(busy), option='--evict ')}"
    elif only_adds:
        hint = f"make room: gpushare mig destroy {_instance_arguments(destroyed)}; for the whole plan: gpushare mig plan --may-destroy, with the same arguments"
    else:
        hint = "see who is where: gpushare mig status"
    return NoPlan(
        why=Why.BLOCKED, message=f"{problem}: this would have to be destroyed: {listing}", hint=hint, instead=instead
    )


def _without_idle_parts(changes_by_gpu: Sequence[tuple[int, InstanceChange]]) -> list[tuple[int, InstanceChange]]:
    """Return changes without their idle compute instances, which ``--evict`` need not name.

    If a process holds the GPU instance itself, none counts as idle.
    """
    changes = []
    for gpu, change in changes_by_gpu:
        parts = change.compute if change.instance.held else tuple(part for part in change.compute if part.busy)
        changes.append((gpu, replace(change, compute=parts)))
    return changes


def _instance_arguments(changes: Sequence[tuple[int, InstanceChange]], *, option: str = "") -> str:
    """Return instances as arguments of `mig destroy`, each after ``option``; ``INSTANCE...`` if there are too many."""
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
        if isinstance(holder, Holder):
            # A claim is that of a job.
            what = "gpushare run" if holder.what == "lease" else holder.what
            held += [] if what in held else [what]
    return ", ".join(f"{name} by {' and '.join(held)}" if held else name for name, held in held_by.items()) or "idle"


def plan_add(
    layouts: Sequence[Layout],
    wish: Wish,
    *,
    may_destroy: bool = False,
    with_others: bool = True,
) -> MigPlan | NoPlan:
    """Return the cheapest plan that adds these instances, each on whichever GPU is best.

    Without ``may_destroy`` nothing is destroyed, with it idle instances may be. Besides free places the plan uses GPU
    instances that have room and no name (see `_destroyed_if_filled`), busy ones only where the wish names the place. With
    ``with_others`` False no wished compute instance shares a GPU instance with others: a name belongs to a whole one.
    """
    wish = merge_equal(wish)
    offers = _offers(layouts, wish)
    plan = _plan_addition(layouts, wish, offers, may_destroy=may_destroy, may_evict=False, with_others=with_others)
    if plan is not None:
        return plan
    # What it would take if every instance could be destroyed.
    instead = _plan_addition(layouts, wish, offers, may_destroy=True, may_evict=True, with_others=with_others)
    return no_plan_ever(layouts, wish) if instead is None else no_plan_now(wish, instead, only_adds=not may_destroy)


def can_add(layout: Layout, wish: Wish) -> bool:
    """Return whether a wish fits next to what is there: `plan_add` finds a plan that destroys nothing."""
    wish = merge_equal(wish)
    return _place_wish([layout], wish, _offers([layout], wish)) is not None


def plan_exact(
    layouts: Sequence[Layout], wishes: Mapping[int, Wish], *, evict: Iterable[Target] = ()
) -> MigPlan | NoPlan:
    """Return the cheapest plan after which each GPU (by index) has exactly its wish; other GPUs stay as they are.

    An empty wish clears a GPU. Existing instances that are wished stay, even if their place is not the best.
    """
    evictable = frozenset(evict)
    plans: list[GpuPlan] = []
    blocked = False
    for layout in layouts:
        if layout.gpu not in wishes:
            plans.append(unchanged_plan(layout))
            continue
        wish = wishes[layout.gpu]
        evictable_ids = frozenset(
            instance.id for instance in layout.instances if _may_end(layout.gpu, whole_change(instance), evictable)
        )
        plan = _exact_change(layout, wish, evict=evictable_ids)
        if plan is None:
            # What it would take if every busy instance could be evicted.
            blocked = True
            plan = _exact_change(layout, wish, evict=frozenset(instance.id for instance in layout.instances))
        if plan is None:
            return no_plan_ever([layout], wish)
        plans.append(plan)
    result = plan_of(layouts, plans)
    return no_plan_now((), result) if blocked else result


def plan_destroy(
    layouts: Sequence[Layout], targets: Iterable[Target], *, evict: Iterable[Target] = ()
) -> MigPlan | NoPlan:
    """Return the plan that destroys these; NoPlan if that needs a busy one that is not in ``evict``."""
    target_set, evictable = frozenset(targets), frozenset(evict)
    plan = plan_of(layouts, [_plan_removal(layout, target_set) for layout in layouts])
    blocked = any(change.busy and not _may_end(gpu, change, evictable) for gpu, change in plan.destroyed)
    return no_plan_now((), plan) if blocked else plan


# -- adding, over several GPUs ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Offer:
    """The requests of a wish that a kind of board can serve, by their numbers in the wish, and as which kinds."""

    numbers: tuple[int, ...]
    requests: tuple[Request, ...]
    kinds: tuple[InstanceKind, ...]


def _kind_of(request: Request, layout: Layout) -> InstanceKind:
    """Return the kind of instance (number of a profile, start) by which a GPU serves a request. Raises as `resolve`."""
    if not layout.profiles:
        raise no_profiles_error(layout.gpu)
    return InstanceKind(board_of(layout).number[resolve(request, layout.profiles).name], request.start)


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
        kinds: dict[int, InstanceKind] = {}
        for number, request in enumerate(wish):
            try:
                kinds[number] = _kind_of(request, layout)
            except GpushareError as error:
                errors.setdefault(number, error)
        # The largest first.
        numbers = tuple(sorted(kinds, key=lambda n: (-board.sizes[kinds[n].profile], kinds[n].profile, n)))
        offers[board] = _Offer(numbers, tuple(wish[n] for n in numbers), tuple(kinds[n] for n in numbers))
    if not layouts:
        raise NotSupported("no GPU here has MIG", "see what each GPU can: gpushare compare", code="no_mig")
    served_anywhere = {number for offer in offers.values() for number in offer.numbers}
    for number, refused in errors.items():
        if number not in served_anywhere:
            raise refused
    return offers


def _plan_addition(
    layouts: Sequence[Layout],
    wish: Wish,
    offers: Mapping[Board, _Offer],
    *,
    may_destroy: bool,
    may_evict: bool,
    with_others: bool,
) -> MigPlan | None:
    """Return the cheapest plan that adds a wish, over all GPUs; None: it does not fit. The options are as for `plan_add`."""
    placings = _place_wish(layouts, wish, offers, may_destroy=may_destroy, may_evict=may_evict, with_others=with_others)
    if placings is None:
        return None
    plans = [unchanged_plan(layout) for layout in layouts]
    for number, (site, placing) in placings.items():
        plans[number] = plan_for_option(site, placing, offers[site.board].requests)
    return plan_of(layouts, plans)


def _place_wish(
    layouts: Sequence[Layout],
    wish: Wish,
    offers: Mapping[Board, _Offer],
    *,
    may_destroy: bool = False,
    may_evict: bool = False,
    with_others: bool = True,
) -> dict[int, tuple[Site, Placing]] | None:
    """Return by the number of a layout which part of a wish goes there, at the least cost; None: it does not fit."""
    # Of GPUs that are the same for the search only the first is searched.
    sites_by_key: dict[tuple[object, ...], list[tuple[int, Site]]] = {}
    for number, layout in enumerate(layouts):
        requests = offers[board_of(layout)].requests
        site = Site(layout, requests, may_destroy=may_destroy, may_evict=may_evict, with_others=with_others)
        sites_by_key.setdefault(site.key, []).append((number, site))
    sizes = _least_sizes(offers)
    candidates = {board: _candidates_on(board, offer, sizes) for board, offer in offers.items()}
    equal_sites = list(sites_by_key.values())
    options = [first_site.options(candidates[first_site.board]) for (_, first_site), *_ in equal_sites]
    groups = [
        Group(len(sites), {part: placing.weight for part, placing in placings.items()})
        for sites, placings in zip(equal_sites, options, strict=True)
    ]
    parts_of_groups = assign_parts(groups, wish_part([request.count for request in wish], sizes))
    if parts_of_groups is None:
        return None
    placed = {}
    for sites, placings, parts in zip(equal_sites, options, parts_of_groups, strict=True):
        # The largest part goes to the first GPU; the last GPUs of a group may get none.
        largest_first = sorted(parts, key=lambda part: part[::-1], reverse=True)
        for (number, site), part in zip(sites, largest_first, strict=False):
            placed[number] = site, placings[part]
    return placed


def _least_sizes(offers: Mapping[Board, _Offer]) -> list[int]:
    """Return the memory slices of one instance of each request on the board where it takes the fewest: they bound the search."""
    sizes: dict[int, int] = {}
    for board, offer in offers.items():
        for number, kind in zip(offer.numbers, offer.kinds, strict=True):
            size = board.sizes[kind.profile]
            sizes[number] = min(size, sizes.get(number, size))
    return [sizes[number] for number in sorted(sizes)]


def wish_part(counts: Sequence[int], sizes: Sequence[int]) -> WishPart:
    """Return the part of a wish with so many instances of each request, which have these sizes."""
    return (*counts, sum(map(mul, counts, sizes)))


def _candidates_on(board: Board, offer: _Offer, sizes: Sequence[int]) -> list[Candidate]:
    """Return all ways to place a part of the wish on one kind of board, the empty way first; ``sizes`` are of each request."""
    # For each request its place among those of the board; a request that it cannot serve gets the 0 at the end.
    order = [offer.numbers.index(number) if number in offer.numbers else -1 for number in range(len(sizes))]
    # A GPU instance, and its compute instances.
    created_by_one = [1 + max(1, len(request.compute)) for request in offer.requests]
    return [
        Candidate(
            part=wish_part([(*arrangement.counts, 0)[kind] for kind in order], sizes),
            creation_weight=sum(map(mul, arrangement.counts, created_by_one)) * CREATED,
            arrangement=arrangement,
        )
        for arrangement in board.arrangements(offer.kinds, tuple(request.count for request in offer.requests))
    ]


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
    counts = board.count_free(mask, members_of(layout))
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
    compute, memory = board.most_usable(mask, members)
    used = sum(instance.profile.slices for instance in layout.instances)
    return LostSlices(
        compute=max(0, board.compute_slices - used - compute), memory=board.memory_slices - mask.bit_count() - memory
    )


def capacity_lost(layout: Layout) -> int:
    """Return the capacity that the instances take, in memory slices.

    The sum over all profiles: the number that fits on an empty GPU less the number that still fits, times the memory
    slices of one. It is additive over GPUs, so plans for several GPUs compare by the sum.
    """
    return board_of(layout).capacity_lost(occupied(layout), members_of(layout))


@dataclass(frozen=True)
class Group:
    """GPUs that are the same for the search: how many, and what each part of the wish costs on one of them."""

    count: int
    weights: Mapping[WishPart, int]


def assign_parts(groups: Sequence[Group], wish: WishPart) -> list[list[WishPart]] | None:
    """Return for each group the parts that its GPUs take (at most one each), at the least total; None: no way.

    A group's ``weights`` are differences to leaving a GPU as it is, and hold the empty part with weight 0.

    GPU by GPU, the search keeps the cheapest way to each rest of the wish.
    """
    # The largest group last, where `_PartsForRest` saves the most. It needs no more GPUs than the wish has instances.
    instances = sum(wish[:-1])
    by_count = sorted(range(len(groups)), key=lambda number: groups[number].count)
    group_of_gpu = [number for number in by_count for _ in range(min(groups[number].count, instances))]
    most_from = _most_from_gpu(groups, group_of_gpu, wish)
    cheapest = {wish: 0}
    steps: list[Mapping[WishPart, tuple[WishPart, WishPart]]] = []
    for gpu, number in enumerate(group_of_gpu):
        group = groups[number]
        in_order = _PartsForRest(group) if number == group_of_gpu[-1] else None
        cheapest, taken = _next_rests(cheapest, group, in_order, most_from[gpu + 1])
        steps.append(taken)
    rest: WishPart = (0,) * len(wish)
    if rest not in cheapest:
        return None
    parts: list[list[WishPart]] = [[] for _ in groups]
    for number, step in zip(reversed(group_of_gpu), reversed(steps), strict=True):
        part, rest = step[rest]
        if any(part):
            parts[number].append(part)
    return parts


class _PartsForRest:
    """The parts of the wish that the next GPU of the last group may take, by what is left of the wish.

    The last group has to take all that is left, and its GPUs are interchangeable. So of the many orders of the same parts
    only one is searched: each GPU takes a part with the first request that is left. First is the request that the fewest
    parts hold, so that there are few parts to try.
    """

    def __init__(self, group: Group) -> None:
        # The last number of a part is no request.
        requests = range(len(next(iter(group.weights))) - 1)
        self._order = sorted(requests, key=lambda request: sum(part[request] > 0 for part in group.weights))
        self._by_first: dict[int | None, dict[WishPart, int]] = {request: {} for request in (*requests, None)}
        for part, weight in group.weights.items():
            self._by_first[self._first_request(part)][part] = weight

    def _first_request(self, part: WishPart) -> int | None:
        """Return the first request, in the order of this search, of which a part or a rest has any; None: it is empty."""
        return next((request for request in self._order if part[request]), None)

    def to_try(self, rest: WishPart) -> Mapping[WishPart, int]:
        """Return the parts to try on the next GPU, with their weights; some hold more than the rest of the wish."""
        return self._by_first[self._first_request(rest)]


def _next_rests(
    cheapest: Mapping[WishPart, int], group: Group, in_order: _PartsForRest | None, most_later: WishPart
) -> tuple[dict[WishPart, int], dict[WishPart, tuple[WishPart, WishPart]]]:
    """Return the least weight of each rest of the wish after one more GPU; and by rest, the part it took and the rest before.

    ``in_order`` is for the last group. A rest above ``most_later``, what all later GPUs can take, is given up.
    """
    best: dict[WishPart, int] = {}
    taken: dict[WishPart, tuple[WishPart, WishPart]] = {}
    for rest_before, weight in cheapest.items():
        weights = group.weights if in_order is None else in_order.to_try(rest_before)
        for part, more in weights.items():
            rest = tuple(map(sub, rest_before, part))
            if min(rest) < 0 or not all(map(le, rest, most_later)):
                continue
            cheaper = best.get(rest)
            if cheaper is None or weight + more < cheaper:
                best[rest] = weight + more
                taken[rest] = (part, rest_before)
    return best, taken


def _most_from_gpu(groups: Sequence[Group], group_of_gpu: Sequence[int], wish: WishPart) -> list[WishPart]:
    """Return for each GPU how many instances of each request it and all later ones can take at most; at the end zeros."""
    most_on_one = [tuple(map(max, zip(*group.weights, strict=True))) for group in groups]
    most_from: list[WishPart] = [(0,) * len(wish)]
    for group in reversed(group_of_gpu):
        most_from.append(tuple(map(add, most_from[-1], most_on_one[group])))
    return most_from[::-1]
