"""How long a window of measuring is, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.measure.pair import WindowLength


def evenly(every: float, seconds: float) -> list[float]:
    """Return the moments of a job that prints so often."""
    return [every * place for place in range(1, int(seconds / every) + 1)]


@pytest.mark.parametrize(
    ("least", "moments", "seconds", "expected"),
    [
        (5, evenly(0.02, 1.5), 1.5, 0.6),
        (5, evenly(0.1, 1.5), 1.5, 0.6),
        (5, evenly(0.2, 1.5), 1.5, 1.2),
        (5, [*evenly(0.05, 0.5), *(one + 0.8 for one in evenly(0.05, 0.7))], 1.5, 1.5),  # once it did not for 0.35 s
        (5, [0.5, 1.0, 1.5, 2.0, 2.5], 3.0, 3.0),
        (3, [1.0, 2.0, 3.0], 3.0, 3.0),
        (5, [20.0, 40.0, 60.0, 80.0, 99.0], 100.0, 30.0),  # no longer than that
        (3, [], 15.0, 15.0),
    ],
)
def test_a_window_holds_several_numbers(least: int, moments: Sequence[float], seconds: float, expected: float) -> None:
    length = WindowLength(None, tails=False)
    length.hold(least, moments, 0.0, seconds)
    length.shorten()
    assert length.seconds == pytest.approx(expected, abs=0.01)


def test_the_slower_of_both_decides() -> None:
    length = WindowLength(None, tails=False)
    length.hold(3, evenly(0.2, 3.0), 0.0, 3.0, longest=5.0)
    length.hold(5, evenly(0.02, 1.5), 0.0, 1.5)
    length.shorten()
    assert length.seconds == pytest.approx(1.2)
    # Once; after that windows only become longer.
    length.hold(5, evenly(0.02, 1.5), 0.0, 1.5)
    length.shorten()
    assert length.seconds == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("window", "silence", "expected"),
    [(None, 0.5, 0.6), (None, 1.0, 2.0), (None, 4.0, 8.0), (None, 9.0, 10.0), (0.6, 4.0, 0.6), (12.0, 9.0, 12.0)],
)
def test_between_trials_a_window_comes_to_outlast_silences(
    window: float | None, silence: float, expected: float
) -> None:
    length = WindowLength(window, tails=False)
    length.hold(5, evenly(0.02, 1.5), 0.0, 1.5)
    length.shorten()
    before = length.seconds
    length.silent(silence)
    length.silent(0.1)
    assert length.seconds == before
    length.outlast()
    assert length.seconds == pytest.approx(expected)


@pytest.mark.parametrize(("window", "tails"), [(1.5, False), (0.1, False), (None, True)])
def test_what_is_given_or_holds_a_p99_is_not_shortened(window: float | None, tails: bool) -> None:
    length = WindowLength(window, tails=tails)
    length.hold(5, evenly(0.01, 1.5), 0.0, 1.5)
    length.shorten()
    assert length.seconds == (window or 1.5)


@given(st.lists(st.floats(min_value=0.01, max_value=99.9), unique=True), st.sampled_from([3, 5]))
def test_it_holds_as_many_as_the_mean_says(moments: list[float], least: int) -> None:
    length = WindowLength(None, tails=False)
    length.hold(least, sorted(moments), 0.0, 100.0)
    length.shorten()
    assert 0.6 <= length.seconds <= 30.0
    assert length.seconds >= min(30.0, least * 100.0 / max(1, len(moments)))


@pytest.mark.parametrize(
    ("window", "rounds", "most", "tails", "expected"),
    [
        (0.6, None, None, False, (8, 24)),
        (0.6, None, None, True, (8, 32)),
        (0.1, None, None, False, (8, 24)),
        (1.5, None, None, False, (3, 9)),
        (1.5, None, None, True, (3, 12)),
        (5.0, None, None, False, (3, 9)),
        (5.0, 8, None, False, (8, 24)),
        (0.6, 20, 20, True, (20, 20)),
    ],
)
def test_long_windows_need_fewer_rounds(
    window: float, rounds: int | None, most: int | None, tails: bool, expected: tuple[int, int]
) -> None:
    length = WindowLength(window, tails=tails)
    least = length.rounds(rounds)
    assert (least, length.most_rounds(most, least)) == expected
