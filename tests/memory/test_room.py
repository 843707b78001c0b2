"""Which GPUs a job of several gets, and how much it and those on a GPU slow each other down."""

from __future__ import annotations

import pytest

from gpushare.memory.room import best_together, harm_in_words, harm_percent

QUIET = (0, 0)
BUSY = (0, 3)


@pytest.mark.parametrize(
    ("candidates", "count", "closeness", "chosen"),
    [
        ([QUIET] * 4, 2, {(1, 3): 6}, (1, 3)),
        ([QUIET] * 4, 2, {}, (0, 1)),
        # Harm comes before connections.
        ([QUIET, BUSY, QUIET, BUSY], 2, {(1, 3): 6}, (0, 2)),
        # 0, 1, 2 have one fast connection and two slow ones; 1, 2, 3 are all in the middle: the slowest counts first.
        ([QUIET] * 4, 3, {(0, 1): 6, (0, 2): 0, (1, 2): 2, (0, 3): 0, (1, 3): 2, (2, 3): 2}, (1, 2, 3)),
        ([QUIET], 2, {}, ()),
    ],
)
def test_among_equals_those_that_are_connected_best(
    candidates: list[tuple[int, int]], count: int, closeness: dict[tuple[int, int], int], chosen: tuple[int, ...]
) -> None:
    assert best_together(candidates, count, lambda *pair: closeness.get(pair, 1)) == chosen


@pytest.mark.parametrize(
    ("mine", "others", "percent", "words"),
    [
        (50, 0.0, 0, "it is idle"),
        (50, 20.0, 0, "it uses 50 %, those there 20 %"),
        (50, 51.0, 1, "it uses 50 %, those there 51 %, and 1 % has to wait"),
        (50, 90.0, 40, "it uses 50 %, those there 90 %, and 40 % has to wait"),
        # What waits there already is no harm of this job.
        (50, 130.0, 50, "it uses 50 %, those there 130 %, and 50 % has to wait"),
        (None, 40.0, 40, "it is 40 % busy"),
        # Unknown is never better than any answer could be.
        (50, None, 50, "its load is unknown"),
        (None, None, 100, "its load is unknown"),
    ],
)
def test_what_is_above_all_of_a_gpu_has_to_wait(
    mine: float | None, others: float | None, percent: float, words: str
) -> None:
    assert harm_percent(mine, others) == percent
    assert harm_in_words(mine, others) == words
