"""The cheapest way from what exists on one GPU to exactly the layout that is wished. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gpushare.mig.board import Arrangement, Kind, board_of
from gpushare.mig.compute import change_compute
from gpushare.mig.outcome import creation, gpu_plan, lost_after, whole
from gpushare.mig.plan import Cost, Created, Destroyed, GpuPlan
from gpushare.mig.profile import GpuInstance, Layout
from gpushare.mig.site import cost_of, weigh
from gpushare.mig.wish import Wish, resolve


@dataclass(frozen=True)
class Change:
    """One way to the layout: what stays, what goes, what comes."""

    kept: list[GpuInstance]
    destroyed: list[Destroyed]
    created: list[Created]

    @property
    def weight(self) -> int:
        """Return what it costs, without the room that is left."""
        made = sum((one.into is None) + len(one.compute) for one in self.created)
        return weigh(Cost(created=made)) + sum(weigh(cost_of(one)) for one in self.destroyed)


def exact_change(layout: Layout, wish: Wish, *, evict: frozenset[int]) -> GpuPlan | None:
    """Return the cheapest plan after which the GPU has exactly the wish, or None.

    Busy instances go only when ``evict`` holds the id of their GPU instance.

    Raises:
        BadUsage, NotSupported: as `resolve`.
    """
    board = board_of(layout)
    counted: Counter[tuple[Kind, tuple[int, ...]]] = Counter()
    for request in wish:
        kind = Kind(board.number[resolve(request, layout.profiles).name], request.start)
        counted[kind, request.compute] += request.count
    wanted = sorted(counted, key=lambda one: (-board.sizes[one[0].profile], one[0].profile, one[0].start or 0, one[1]))
    kinds = tuple(kind for kind, _ in wanted)
    compute = [parts or (board.slices[kind.profile],) for kind, parts in wanted]
    best: list[tuple[Change, Arrangement]] = []
    least = 0
    for arrangement in board.complete(kinds, tuple(counted[one] for one in wanted)):
        change = _change(layout, arrangement, compute, evict)
        if change is None:
            continue
        weight = change.weight
        if not best or weight < least:
            best, least = [(change, arrangement)], weight
        elif weight == least:
            best.append((change, arrangement))
    plans = [
        (gpu_plan(layout, change.kept, change.destroyed, change.created), arrangement) for change, arrangement in best
    ]
    # Of equals the one with the most room, then with instances at the high end.
    ranked = min(
        plans, key=lambda pair: (lost_after(layout, pair[0]), [-start for _, _, start in pair[1].places]), default=None
    )
    return None if ranked is None else ranked[0]


def _change(
    layout: Layout, arrangement: Arrangement, compute: list[tuple[int, ...]], evict: frozenset[int]
) -> Change | None:
    profiles = board_of(layout).profiles
    missing = {(profiles[profile].name, start): kind for kind, profile, start in arrangement.places}
    change = Change([], [], [])
    for one in layout.instances:
        kind = missing.pop((one.profile.name, one.start), None)
        if kind is not None and _keep(change, one, compute[kind], may_evict=one.id in evict):
            continue
        if kind is not None or (one.busy and one.id not in evict):
            return None
        change.destroyed.append(whole(one))
    for (name, start), kind in missing.items():
        profile = next(profile for profile in profiles if profile.name == name)
        change.created.append(creation(profile, start, compute[kind]))
    return change


def _keep(change: Change, one: GpuInstance, wanted: tuple[int, ...], *, may_evict: bool) -> bool:
    """Keep a GPU instance in its place with these compute instances inside; False when that may not be done."""
    inside = change_compute(one, wanted, may_destroy=True, may_evict=may_evict)
    if inside is None:
        return False
    change.kept.append(one)
    if inside.destroyed:
        change.destroyed.append(Destroyed(instance=one, compute=inside.destroyed, whole=False))
    if inside.created:
        change.created.append(Created(profile=one.profile, placement=one.placement, compute=inside.created, into=one))
    return True
