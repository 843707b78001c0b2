"""Why there is no plan, in words: never, or what is in the way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpushare.errors import GpushareError
from gpushare.mig.board import Kind, board_of
from gpushare.mig.plan import Destroyed, NoPlan, Plan, Why
from gpushare.mig.profile import Layout
from gpushare.mig.wish import Request, Wish, resolve

# More is not read; all of them are in `NoPlan.would_go`.
_LISTED: Final = 4


def never(layouts: Sequence[Layout], wish: Wish) -> NoPlan:
    """Return that these GPUs cannot hold the wish even when they are empty, and how many of one kind they can."""
    where = f"GPU {layouts[0].gpu}" if len(layouts) == 1 else f"these {len(layouts)} GPUs"
    words = " ".join(str(request) for request in wish)
    most = {request: most_of(layouts, request) for request in wish}
    for request, number in most.items():
        if number < request.count:
            one = str(number or "no")
            return NoPlan(
                why=Why.NEVER,
                message=f"{words} never fits on {where}: {one} {request.one} at most, also when nothing else is there",
                hint="ask for fewer, or for a smaller profile: gpushare mig profiles",
                most=number if len(wish) == 1 else None,
            )
    return NoPlan(
        why=Why.NEVER,
        message=f"{words} never fits together on {where}, also when nothing else is there",
        hint="ask for fewer or smaller instances; see what fits together: gpushare mig profiles",
    )


def most_of(layouts: Sequence[Layout], request: Request) -> int:
    """Return how many of one request these GPUs hold when they are empty."""
    total = 0
    for layout in layouts:
        board = board_of(layout)
        try:
            kind = Kind(board.number[resolve(request, layout.profiles).name], request.start)
        except GpushareError:
            continue
        total += max(one.counts[0] for one in board.arrangements((kind,), (request.count,)))
    return total


def blocked(wish: Wish, instead: Plan, *, only_adds: bool = False) -> NoPlan:
    """Return that something is in the way that may not go; ``instead`` is the cheapest plan if it might."""
    gone = [(gpu.gpu, one) for gpu in instead.gpus for one in gpu.destroyed]
    busy = [(gpu, one) for gpu, one in gone if one.busy]
    named = [_named(gpu, one) for gpu, one in (busy or gone)]
    listing = ", ".join(named[:_LISTED]) + (f" and {len(named) - _LISTED} more" if len(named) > _LISTED else "")
    words = " ".join(str(request) for request in wish)
    what = f"{words} does not fit" if wish else "busy instances are in the way"
    if busy:
        hint = "end what runs there, or name it with --evict"
    elif only_adds:
        hint = "it is idle: gpushare mig plan shows the change, gpushare mig destroy makes room"
    else:
        hint = "see who is where: gpushare mig status"
    return NoPlan(why=Why.BLOCKED, message=f"{what}: this would have to go: {listing}", hint=hint, instead=instead)


def _named(gpu: int, gone: Destroyed) -> str:
    one = gone.instance
    name = "" if one.name is None else f" '{one.name}'"
    part = "" if gone.whole else "".join(f", compute instance {compute.id}" for compute in gone.compute)
    who = ", busy" if gone.busy else ", idle"
    return f"{one.profile.name}:{one.start}{name} (GPU {gpu}, GPU instance {one.id}{part}{who})"
