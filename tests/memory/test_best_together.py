"""Which GPUs a job of several gets."""

from __future__ import annotations

from gpushare.memory.room import best_together

QUIET = (0, 0)
BUSY = (0, 3)


def pairs(*linked: tuple[int, int]):  # type: ignore[no-untyped-def]
    return lambda first, second: 6 if (first, second) in linked else 1


def test_among_equals_those_that_are_connected_best() -> None:
    assert best_together([QUIET] * 4, 2, pairs((1, 3))) == (1, 3)
    assert best_together([QUIET] * 4, 2, pairs()) == (0, 1)


def test_harm_comes_before_connections() -> None:
    assert best_together([QUIET, BUSY, QUIET, BUSY], 2, pairs((1, 3))) == (0, 2)


def test_the_slowest_connection_of_a_set_counts_first() -> None:
    # 0, 1, 2 have one fast connection and two slow ones; 1, 2, 3 are all in the middle.
    closeness = {(0, 1): 6, (0, 2): 0, (1, 2): 2, (0, 3): 0, (1, 3): 2, (2, 3): 2}
    assert best_together([QUIET] * 4, 3, lambda *pair: closeness[pair]) == (1, 2, 3)


def test_too_few_candidates() -> None:
    assert best_together([QUIET], 2, pairs()) == ()
