"""On which GPU a job and those that run there slow each other down least. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

_FULL: Final = 100.0
# More candidates than any host of one kernel has: then the first ones, without a look at how they are connected.
_MOST_SETS: Final = 20_000


def harm_percent(mine: float | None, others: float | None) -> float:
    """Return the work that has to wait if a job comes: what it and those there use of a GPU, above 100 percent.

    Where a use is not known, it is taken to fill the GPU.
    """
    mine, others = (_FULL if use is None else use for use in (mine, others))
    return max(0.0, mine + others - _FULL) - max(0.0, others - _FULL)


def harm_in_words(mine: float | None, others: float | None) -> str:
    """Return what is known of that: ``it uses 50 %, those there 90 %, and 40 % has to wait``."""
    if others is None:
        return "how busy it is is not known"
    if not others:
        return "it is idle"
    if mine is None:
        return f"it is {others:.0f} % busy"
    lost = harm_percent(mine, others)
    return f"it uses {mine:.0f} %, those there {others:.0f} %" + (
        f", and {lost:.0f} % has to wait" if lost >= 1 else ""
    )


def best_together(
    ranked: Sequence[tuple[int, ...]], count: int, closeness: Callable[[int, int], int]
) -> tuple[int, ...]:
    """Return the numbers of the ``count`` candidates that a job gets, best first; ``ranked`` has the harm of each.

    Harm is compared component by component, summed over the set. ``closeness`` of two candidates is higher where they are
    connected better (`host.nvml.NvmlReader.closeness`). Among equals the first ones win.
    """
    numbers = range(len(ranked))
    sets = itertools.islice(itertools.combinations(numbers, count), _MOST_SETS)

    def rank(some: tuple[int, ...]) -> tuple[object, ...]:
        harm = tuple(sum(column) for column in zip(*(ranked[number] for number in some), strict=True))
        links = [closeness(*pair) for pair in itertools.combinations(some, 2)]
        # A collective is as slow as its slowest connection.
        return harm, -min(links, default=0), -sum(links), some

    return min(sets, key=rank, default=())
