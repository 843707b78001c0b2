"""The exact planner: from what exists to what is wished at the least `Cost`. Pure.

Every way to lay the wish on a board is enumerated once per kind of board; GPUs with the same instances are
searched once; the parts of a wish are spread over the GPUs by dynamic programming. Nothing is heuristic: the plan
returned is the cheapest there is, and the same each time.

What stays, stays in its place. A busy instance is never destroyed unless ``evict`` names it; one of which it is
not known who is in it counts as busy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpushare.errors import GpushareError, NotFound, NotSupported
from gpushare.mig.assign import Codes, Group, assign, codes_for
from gpushare.mig.board import Board, Kind, board_of
from gpushare.mig.exact import exact_change
from gpushare.mig.outcome import addition, may_end, plan_of, removal, untouched, whole
from gpushare.mig.plan import NoPlan, Plan
from gpushare.mig.profile import Layout
from gpushare.mig.refusal import blocked, never
from gpushare.mig.site import Site, Way, ways
from gpushare.mig.wish import Wish, merged, resolve


class Target(NamedTuple):
    """An instance that exists: the GPU's index, the GPU instance's id, a compute instance's id or None for all."""

    gpu: int
    instance: int
    compute: int | None = None


def plan_add(
    layouts: Sequence[Layout],
    wish: Wish,
    *,
    may_destroy: bool = False,
    evict: Iterable[Target] = (),
    beside: bool = True,
) -> Plan | NoPlan:
    """Return the cheapest plan that adds these instances, each on whichever GPU is best.

    Without ``may_destroy`` it only adds: on free places, and compute instances into GPU instances that have room, are
    idle and nobody's; beside somebody only where the wish names the place (``1c.3g.40gb:4``), and beside others not at
    all when ``beside`` is False: what gets a name, which is one of GPU instances, is not put among others.
    With ``may_destroy`` idle instances may go, and of the busy ones those that ``evict`` names.

    Raises:
        BadUsage: a size fits several profiles, or no GPU has the placement.
        NotSupported: a profile that none of these GPUs ever has, or none of them has MIG.
    """
    wish = merged(wish)
    offers = _offers(layouts, wish)
    plan = _add(layouts, wish, offers, may_destroy=may_destroy, evict=frozenset(evict), beside=beside)
    if plan is not None:
        return plan
    instead = _add(layouts, wish, offers, may_destroy=True, evict=_everybody(layouts), beside=beside)
    return never(layouts, wish) if instead is None else blocked(wish, instead, only_adds=not may_destroy)


def plan_exact(layouts: Sequence[Layout], wishes: Mapping[int, Wish], *, evict: Iterable[Target] = ()) -> Plan | NoPlan:
    """Return the cheapest plan after which each GPU (by index) has exactly its wish; other GPUs stay as they are.

    An empty wish clears a GPU. What is there and is wished stays, also where its place is not the best.

    Raises:
        BadUsage: a size fits several profiles, or the profile has no such placement.
        NotFound: a GPU that is not among the layouts.
        NotSupported: a profile that the GPU never has.
    """
    _check_gpus(layouts, wishes)
    chosen, everybody = frozenset(evict), _everybody(layouts)
    plans, in_the_way = [], False
    for layout in layouts:
        if layout.gpu not in wishes:
            plans.append(untouched(layout))
            continue
        wish = wishes[layout.gpu]
        plan = exact_change(layout, wish, evict=_on(layout, chosen))
        if plan is None:
            in_the_way = True
            plan = exact_change(layout, wish, evict=_on(layout, everybody))
        if plan is None:
            return never([layout], wish)
        plans.append(plan)
    result = plan_of(layouts, plans)
    return blocked((), result) if in_the_way else result


def plan_destroy(
    layouts: Sequence[Layout], targets: Iterable[Target], *, evict: Iterable[Target] = ()
) -> Plan | NoPlan:
    """Return the plan that destroys these; a GPU instance goes with the last of its compute instances.

    Raises:
        NotFound: one of them, or its GPU, does not exist.
    """
    wanted, chosen = frozenset(targets), frozenset(evict)
    _check_gpus(layouts, [target.gpu for target in wanted])
    _check_targets(layouts, wanted)
    plans, in_the_way = [], False
    for layout in layouts:
        plan, busy = removal(layout, _places(layout, wanted), _places(layout, chosen))
        plans.append(plan)
        in_the_way = in_the_way or busy
    result = plan_of(layouts, plans)
    return blocked((), result) if in_the_way else result


# -- adding, over several GPUs ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Offer:
    """What a kind of board has for a wish: the requests that it can serve, and as which kinds."""

    requests: tuple[int, ...]
    kinds: tuple[Kind, ...]
    # GPU instance and compute instances that one of each kind makes.
    parts: tuple[int, ...]


def _offers(layouts: Sequence[Layout], wish: Wish) -> dict[Board, _Offer]:
    offers: dict[Board, _Offer] = {}
    errors: dict[int, GpushareError] = {}
    for layout in layouts:
        board = board_of(layout)
        if board in offers:
            continue
        served: dict[int, Kind] = {}
        for number, request in enumerate(wish):
            try:
                served[number] = Kind(board.number[resolve(request, layout.profiles).name], request.start)
            except GpushareError as error:
                errors.setdefault(number, error)
        order = sorted(served, key=lambda n: (-board.sizes[served[n].profile], served[n].profile, n))
        parts = tuple(1 + max(1, len(wish[number].compute)) for number in order)
        offers[board] = _Offer(tuple(order), tuple(served[number] for number in order), parts)
    if not layouts:
        raise NotSupported("no GPU here has MIG", "see what each GPU can: gpushare compare", code="mig_unsupported")
    anywhere = {number for offer in offers.values() for number in offer.requests}
    for number, refused in errors.items():
        if number not in anywhere:
            raise refused
    return offers


def _codes(wish: Wish, offers: Mapping[Board, _Offer]) -> Codes:
    """Return the codes of a wish; the size of a request is the least that any board makes of it."""
    sizes = [
        min(
            board.sizes[kind.profile]
            for board, offer in offers.items()
            for request, kind in zip(offer.requests, offer.kinds, strict=True)
            if request == number
        )
        for number in range(len(wish))
    ]
    return codes_for([request.count for request in wish], sizes)


def _add(
    layouts: Sequence[Layout],
    wish: Wish,
    offers: Mapping[Board, _Offer],
    *,
    may_destroy: bool,
    evict: frozenset[Target],
    beside: bool,
) -> Plan | None:
    codes = _codes(wish, offers)
    alike: dict[tuple[object, ...], list[tuple[int, Site]]] = {}
    for number, layout in enumerate(layouts):
        asked = [wish[request] for request in offers[board_of(layout)].requests]
        requests = [(one.compute, one.start is not None) for one in asked]
        site = Site(layout, may_destroy=may_destroy, evict=_on(layout, evict), requests=requests, beside=beside)
        alike.setdefault(site.key, []).append((number, site))
    sites = list(alike.values())
    choices = {board: _ways(board, wish, offer, codes) for board, offer in offers.items()}
    options = [group[0][1].options(choices[group[0][1].board]) for group in sites]
    groups = [
        Group(len(group), {code: option.weight for code, option in here.items()})
        for group, here in zip(sites, options, strict=True)
    ]
    parts = assign(groups, codes, sum(request.count for request in wish))
    if parts is None:
        return None
    plans = [untouched(layout) for layout in layouts]
    for group, here, taken in zip(sites, options, parts, strict=True):
        for (number, site), code in zip(group, sorted(taken, reverse=True), strict=False):
            inside = [wish[request].compute for request in offers[site.board].requests]
            plans[number] = addition(site, here[code], inside)
    return plan_of(layouts, plans)


def _ways(board: Board, wish: Wish, offer: _Offer, codes: Codes) -> list[Way]:
    limits = tuple(wish[number].count for number in offer.requests)
    return ways(board.arrangements(offer.kinds, limits), offer.parts, [codes.one[number] for number in offer.requests])


# -- what is named exists --------------------------------------------------------------------------


def _on(layout: Layout, targets: Iterable[Target]) -> frozenset[int]:
    """Return the GPU instances that may be evicted: all who are in them are named, by the whole or by their part."""
    places = _places(layout, targets)
    ids = {instance for instance, _ in places}
    return frozenset(one.id for one in layout.instances if one.id in ids and may_end(whole(one), places))


def _places(layout: Layout, targets: Iterable[Target]) -> frozenset[tuple[int, int | None]]:
    return frozenset((target.instance, target.compute) for target in targets if target.gpu == layout.gpu)


def _everybody(layouts: Sequence[Layout]) -> frozenset[Target]:
    return frozenset(Target(layout.gpu, one.id) for layout in layouts for one in layout.instances)


def _check_gpus(layouts: Sequence[Layout], named: Iterable[int]) -> None:
    known = [layout.gpu for layout in layouts]
    for gpu in named:
        if gpu not in known:
            listing = ", ".join(str(one) for one in known) or "none"
            raise NotFound(
                f"GPU {gpu} has no MIG here", f"GPUs with MIG: {listing}", gpu=str(gpu), code="gpu_not_found"
            )


def _check_targets(layouts: Sequence[Layout], targets: Collection[Target]) -> None:
    known = {(layout.gpu, one.id, None) for layout in layouts for one in layout.instances} | {
        (layout.gpu, one.id, part.id) for layout in layouts for one in layout.instances for part in one.compute
    }
    for target in sorted(targets, key=str):
        if target not in known:
            part = "" if target.compute is None else f", compute instance {target.compute}"
            raise NotFound(
                f"GPU {target.gpu} has no GPU instance {target.instance}{part}",
                "see what exists: gpushare mig status",
                gpu=str(target.gpu),
                code="instance_not_found",
            )
