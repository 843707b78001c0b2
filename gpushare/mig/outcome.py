"""From what the search found to a plan that says it: instances instead of numbers, and the cost. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpushare.mig.board import board_of
from gpushare.mig.compute import new_compute
from gpushare.mig.plan import Cost, Created, Destroyed, GpuPlan, Plan
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Placement, Profile
from gpushare.mig.site import Option, Site, cost_of


def untouched(layout: Layout) -> GpuPlan:
    """Return the plan that leaves a GPU as it is."""
    return GpuPlan(gpu=layout.gpu, uuid=layout.uuid, kept=layout.instances)


def gpu_plan(
    layout: Layout, kept: Sequence[GpuInstance], destroyed: Sequence[Destroyed], created: Sequence[Created]
) -> GpuPlan:
    """Return what happens on one GPU, in the order of the steps: by place what goes, the largest first what comes."""
    return GpuPlan(
        gpu=layout.gpu,
        uuid=layout.uuid,
        kept=tuple(kept),
        destroyed=tuple(sorted(destroyed, key=lambda one: one.instance.start)),
        created=tuple(sorted(created, key=lambda one: (-one.placement.size, one.placement.start))),
    )


def whole(instance: GpuInstance) -> Destroyed:
    """Return a GPU instance that goes with all in it."""
    return Destroyed(instance=instance, compute=instance.compute, whole=True)


def creation(
    profile: Profile,
    start: int,
    compute: Sequence[int],
    into: GpuInstance | None = None,
    beside: Sequence[ComputeInstance] = (),
) -> Created:
    """Return a GPU instance to create, with compute instances of these slices; none stands for one that fills it.

    ``into``: it exists, and they come beside those that stay inside.
    """
    placement = next(one for one in profile.placements or () if one.start == start)
    parts = new_compute(profile, compute or (profile.slices,), beside) or ()
    return Created(profile=profile, placement=Placement(*placement), compute=parts, into=into)


def addition(site: Site, option: Option, compute: Sequence[tuple[int, ...]]) -> GpuPlan:
    """Return what an option of the search means on its GPU; ``compute`` is what each kind has inside."""
    gone = {number for number in range(len(site.instances)) if option.removal.destroyed >> number & 1}
    filled = {one.start: number for number, one in enumerate(site.instances) if option.removal.filled >> number & 1}
    destroyed = [whole(one) for number, one in enumerate(site.instances) if number in gone]
    created = []
    for kind, profile, start in option.arrangement.places:
        number = filled.get(start)
        if number is None:
            created.append(creation(site.board.profiles[profile], start, compute[kind]))
            continue
        into, parts = site.instances[number], site.fills[number, kind]
        kept = [one for one in into.compute if one not in parts]
        created.append(creation(into.profile, start, compute[kind], into, kept))
        if parts:
            destroyed.append(Destroyed(instance=into, compute=parts, whole=False))
    return gpu_plan(
        site.layout, [one for number, one in enumerate(site.instances) if number not in gone], destroyed, created
    )


def removal(
    layout: Layout, targets: Collection[tuple[int, int | None]], evict: Collection[tuple[int, int | None]]
) -> tuple[GpuPlan, bool]:
    """Return the plan that destroys these (GPU instance id, compute instance id or None for all), and if it is blocked.

    It is blocked when somebody is in one of them that ``evict`` (the same pairs) does not name.
    """
    destroyed, kept, blocked = [], [], False
    for one in layout.instances:
        parts = tuple(c for c in one.compute if (one.id, c.id) in targets)
        all_of_it = (one.id, None) in targets or (bool(parts) and len(parts) == len(one.compute))
        if not all_of_it:
            kept.append(one)
        if all_of_it or parts:
            gone = whole(one) if all_of_it else Destroyed(instance=one, compute=parts, whole=False)
            destroyed.append(gone)
            blocked = blocked or (gone.busy and not may_end(gone, evict))
    return gpu_plan(layout, kept, destroyed, []), blocked


def may_end(gone: Destroyed, named: Collection[tuple[int, int | None]]) -> bool:
    """Return whether all who are in what goes are named (GPU instance id, compute instance id or None for all)."""
    one = gone.instance
    if (one.id, None) in named:
        return True
    held = one.holders is None or bool(one.holders)
    return not held and all((one.id, part.id) in named for part in gone.compute if part.busy)


def lost_after(layout: Layout, plan: GpuPlan) -> int:
    """Return `fragmentation.capacity_lost` of a GPU when its plan is done."""
    board, mask, members = board_of(layout), 0, []
    there = [(one.profile, one.placement) for one in plan.kept]
    there += [(one.profile, one.placement) for one in plan.created if one.into is None]
    for profile, placement in there:
        mask |= placement.mask
        if profile.name in board.number:
            members.append(board.number[profile.name])
    return board.lost(mask, tuple(sorted(members)))


def plan_of(layouts: Sequence[Layout], plans: Sequence[GpuPlan]) -> Plan:
    """Return the plan of a host, with its cost."""
    costs = [cost_of(gone) for plan in plans for gone in plan.destroyed]
    for layout, plan in zip(layouts, plans, strict=True):
        created = sum((one.into is None) + len(one.compute) for one in plan.created)
        costs.append(Cost(created=created, capacity_lost=lost_after(layout, plan)))
    return Plan(gpus=tuple(plans), cost=Cost(*(sum(field) for field in zip(*costs, strict=True))) if costs else Cost())
