"""Choose the GPU where a job and the jobs already on it slow each other down least. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

_FULL: Final = 100.0
# More sets than any real host has: beyond this many only the first ones are compared.
_MOST_SETS: Final = 20_000


def harm_percent(mine: float | None, others: float | None) -> float:
    """Return by how much a new job and the other jobs together use more than 100 percent of a GPU; that work waits.

    An unknown use counts as 100 percent. What the others alone use above 100 percent is not counted.
    """
    mine, others = (_FULL if use is None else use for use in (mine, others))
    return max(0.0, mine + others - _FULL) - max(0.0, others - _FULL)


def harm_in_words(mine: float | None, others: float | None) -> str:
    """Return the harm in words: ``it uses 50 %, those there 90 %, and 40 % has to wait``."""
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
    """Return which ``count`` candidates (their numbers) together harm others least; ``ranked`` has the harm of each.

    The harm of a set is the sum of its candidates' harm, compared component by component. Among equal sets the one with
    the best connections wins (``closeness`` is higher for a better one: `host.nvml.NvmlReader.closeness`), then the first.
    """
    numbers = range(len(ranked))
    sets = itertools.islice(itertools.combinations(numbers, count), _MOST_SETS)

    def rank(chosen: tuple[int, ...]) -> tuple[object, ...]:
        harm = tuple(sum(column) for column in zip(*(ranked[number] for number in chosen), strict=True))
        links = [closeness(*pair) for pair in itertools.combinations(chosen, 2)]
        # A collective is as slow as its slowest connection.
        return harm, -min(links, default=0), -sum(links), chosen

    return min(sets, key=rank, default=())
