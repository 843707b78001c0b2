"""Which GPUs a job of several gets: those where it harms least, and among equals those that are connected best. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

# More candidates than any host of one kernel has: then the first ones, without a look at how they are connected.
_MOST_SETS: Final = 20_000


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
