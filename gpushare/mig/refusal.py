"""Why there is no plan, in words: never, or what is in the way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpushare.errors import GpushareError
from gpushare.mig.board import Kind, board_of
from gpushare.mig.plan import Destroyed, NoPlan, Plan, Why
from gpushare.mig.profile import Layout
from gpushare.mig.wish import Request, Wish, resolve
from gpushare.model import GpuProcess, Holder

# More is not read; all of them are in `NoPlan.would_go`.
_LISTED: Final = 4


def never(layouts: Sequence[Layout], wish: Wish) -> NoPlan:
    """Return that these GPUs cannot hold the wish even when they are empty, and how many of one kind they can."""
    where = f"GPU {layouts[0].gpu}" if len(layouts) == 1 else f"these {len(layouts)} GPUs"
    words = " ".join(str(request) for request in wish)
    most = {request: most_of(layouts, request) for request in wish}
    for request, number in most.items():
        if number < request.count:
            most_there = f"at most {number} of {request.one}" if number else f"not even one {request.one}"
            return NoPlan(
                why=Why.NEVER,
                message=f"{words} never fits on {where}: {most_there}, also when nothing else is there",
                hint="ask for fewer, or for a smaller profile: gpushare mig profiles",
                most=number if len(wish) == 1 else None,
            )
    reason = _reason(layouts[0], wish) if len(layouts) == 1 else ""
    return NoPlan(
        why=Why.NEVER,
        message=f"{words} never fits together on {where}, also when nothing else is there{reason}",
        hint="ask for fewer or smaller instances; see what fits together: gpushare mig profiles",
    )


def _reason(layout: Layout, wish: Wish) -> str:
    """Return which rule of the driver forbids a wish on an empty GPU, where one can be named."""
    asked = [profile for one in wish for profile in [resolve(one, layout.profiles)] * one.count]
    memory, compute = sum(one.size or 0 for one in asked), sum(one.slices for one in asked)
    if sum(one.media for one in asked) > 1:
        return ": one with +me per GPU is the limit"
    if any(one.all_media for one in asked) and not all(one.all_media or one.no_media for one in asked):
        return ": beside +me.all there may only be -me"
    if memory > layout.axis:
        return f": they take {memory} memory slices of {layout.axis}"
    if compute > layout.compute_slices:
        return f": they take {compute} compute slices of {layout.compute_slices}"
    return ""


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
    if busy and only_adds:
        hint = f"end what runs there, then make room: gpushare mig destroy {_words(gone)}"
    elif busy:
        hint = f"end what runs there, or let its programs be ended: {_words(_busy_only(busy), '--evict ')}"
    elif only_adds:
        idle = "it is idle" if len(gone) == 1 else "they are idle"
        hint = f"{idle}: gpushare mig destroy {_words(gone)} makes room; the whole way: gpushare mig plan --may-destroy, with the same words"
    else:
        hint = "see who is where: gpushare mig status"
    return NoPlan(why=Why.BLOCKED, message=f"{what}: this would have to go: {listing}", hint=hint, instead=instead)


def eviction(found: NoPlan) -> tuple[str, str] | None:
    """Return what names all that would have to go, and the ``--evict`` of what is busy of it; None: nothing is."""
    busy = [(gpu, one) for gpu, one in found.would_go if one.busy]
    return (_words(found.would_go), _words(_busy_only(busy), "--evict ")) if busy else None


def _busy_only(gone: Sequence[tuple[int, Destroyed]]) -> list[tuple[int, Destroyed]]:
    """Return what has to be named to be evicted: of the parts of a GPU instance those that somebody is in."""
    found = []
    for gpu, one in gone:
        held = one.instance.holders is None or bool(one.instance.holders)
        parts = one.compute if held else tuple(part for part in one.compute if part.busy)
        found.append((gpu, replace(one, compute=parts)))
    return found


def _words(gone: Sequence[tuple[int, Destroyed]], option: str = "") -> str:
    """Return what names these on a command line; so many that nobody types them are ``INSTANCE...``."""
    words = [option + word for gpu, one in gone for word in _ids(gpu, one)]
    return " ".join(words) if len(words) <= _LISTED else f"{option}INSTANCE..."


def _ids(gpu: int, gone: Destroyed) -> list[str]:
    whole = f"{gpu}/{gone.instance.id}"
    return [whole] if gone.whole else [f"{whole}/{part.id}" for part in gone.compute]


def _named(gpu: int, gone: Destroyed) -> str:
    one = gone.instance
    name = "" if one.name is None else f" '{one.name}'"
    ids = ", ".join(str(compute.id) for compute in gone.compute)
    part = "" if gone.whole else f", compute instance{'s' if len(gone.compute) > 1 else ''} {ids}"
    return f"{one.profile.name}:{one.start}{name} (GPU {gpu}, GPU instance {one.id}{part}; {who_is_in(gone)})"


def who_is_in(gone: Destroyed) -> str:
    """Return who is in what would have to go."""
    parts = [gone.instance.holders, *(one.holders for one in gone.compute)]
    if any(part is None for part in parts):
        return "busy, by whom is unknown"
    there = [one for part in parts for one in part or ()]
    return f"busy: {who(there)}" if there else "idle"


def who(holders: Sequence[GpuProcess | Holder] | None) -> str:
    """Return who is in an instance: ``4194306 python3 (alice)``; who is not in CUDA with what it holds."""
    if holders is None:
        return "unknown"
    found: dict[str, list[str]] = {}
    for one in holders:
        name = " ".join(filter(None, [str(one.pid), one.name, one.user and f"({one.user})"]))
        held = found.setdefault(name, [])
        if isinstance(one, Holder) and one.what not in held:
            held.append(one.what)
    return ", ".join(f"{name} by {' and '.join(held)}" if held else name for name, held in found.items()) or "idle"
