"""Statistics of repeated measurements."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpushare.base.benchmark import Summary
from gpushare.measure.statistics import paired_ratio, percentile, ratio, summarize, t_quantile

VALUES = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=40)
SEVERAL = st.lists(st.floats(0.001, 1e6), min_size=2, max_size=20)


def summary(values: list[float]) -> Summary:
    found = summarize(values)
    assert found is not None
    return found


@given(VALUES)
def test_the_mean_lies_between_least_and_most(values: list[float]) -> None:
    found = summary(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.mean <= max(values) + slack
    assert found.runs == len(values)


@given(SEVERAL)
def test_the_interval_holds_the_mean_and_is_students(values: list[float]) -> None:
    found = summary(values)
    assert found.low <= found.mean <= found.high
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    assert found.high - found.mean == pytest.approx(half, rel=1e-6, abs=1e-9 * found.mean)


def test_a_known_interval() -> None:
    """By hand: mean 10, standard deviation 1, t(2) = 4.303, so 4.303 / sqrt(3) = 2.484 on each side."""
    found = summary([9.0, 10.0, 11.0])
    assert (found.low, found.high) == (pytest.approx(7.5157, abs=1e-3), pytest.approx(12.4843, abs=1e-3))
    assert found.spread == pytest.approx(0.2)
    assert summary([-1.0, 1.0]).spread is None


def test_one_measurement_has_no_interval_and_none_no_summary() -> None:
    found = summary([5.0])
    assert (found.mean, found.low, found.high, found.spread) == (5.0, None, None, None)
    assert summarize([]) is None


@given(SEVERAL, SEVERAL)
def test_differ_does_not_care_about_the_order(one: list[float], other: list[float]) -> None:
    assert summary(one).differs_from(summary(other)) == summary(other).differs_from(summary(one))


@given(SEVERAL, SEVERAL)
def test_a_ratio_turned_round_is_its_reciprocal(one: list[float], other: list[float]) -> None:
    forth, back = ratio(one, other), ratio(other, one)
    assert forth.value * back.value == pytest.approx(1)
    assert back.high is not None
    assume(1e-100 < forth.low < 1e100)
    assert forth.low * back.high == pytest.approx(1)


def test_no_ratio_of_nothing_or_of_zero() -> None:
    assert ratio([], [1.0]) is None
    assert ratio([0.0, 1.0], [1.0]) is None
    single = ratio([2.0], [1.0, 1.0])
    assert (single.value, single.low) == (2.0, None)
    same = ratio([2.0, 2.0], [1.0, 1.0])
    assert (same.low, same.high) == (2.0, 2.0)


def test_known_percentiles() -> None:
    values = [float(number) for number in range(1, 102)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 51.0, 100.0, 101.0]
    assert percentile([1.0, 2.0, 4.0], 60) == pytest.approx(2.4)


def test_a_known_ratio_and_its_interval() -> None:
    """By hand, with Welch's degrees of freedom.

    Means 10 and 5, deviations 1 and 0.1155 of 3 and 4 measurements: the squares of the relative errors of the means
    are 1/300 and 1/7500. Their sum, squared, over (1/300)^2 / 2 + (1/7500)^2 / 3 is 2.2 degrees of freedom: t(2) =
    4.303. exp(4.303 sqrt(1/300 + 1/7500)) = 1.2883.
    """
    found = ratio([9.0, 10.0, 11.0], [4.9, 5.1, 4.9, 5.1])
    assert found.value == pytest.approx(2.0)
    assert (found.high / 2.0, 2.0 / found.low) == (pytest.approx(1.2883, abs=1e-4), pytest.approx(1.2883, abs=1e-4))


@pytest.mark.parametrize(
    ("above", "below", "freedom"),
    [
        # As many degrees as both have together where both spread alike ...
        ([9.0, 10.0, 11.0], [9.0, 10.0, 11.0], 4),
        ([9.0, 11.0, 9.0, 11.0, 9.0, 11.0], [9.0, 11.0, 9.0, 11.0, 9.0, 11.0], 10),
        # ... and those of the one that spreads where the other one does not.
        ([9.0, 10.0, 11.0, 10.0], [5.0] * 30, 3),
        ([5.0] * 30, [9.0, 11.0], 1),
    ],
)
def test_the_degrees_of_freedom_of_a_ratio_are_welchs(above: list[float], below: list[float], freedom: int) -> None:
    found = ratio(above, below)
    parts = [statistics.variance(one) / statistics.mean(one) ** 2 / len(one) for one in (above, below)]
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(freedom) * math.sqrt(sum(parts)))


def test_a_ratio_of_pairs_and_its_error() -> None:
    """By hand: 30 over 15 is 2; the pairs are 1, -1 and 0 from it: the root of (2 / 2 / 3) is 0.5774, over a mean of 5."""
    assert paired_ratio([(9.0, 4.0), (9.0, 5.0), (12.0, 6.0)]) == (
        pytest.approx(2.0),
        pytest.approx(math.sqrt(1 / 3) / 5),
    )


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=12), st.floats(0.1, 3.0), st.integers(0, 1000))
def test_what_drifts_alike_in_both_of_each_pair_is_no_spread(drift: list[float], factor: float, seed: int) -> None:
    paired = paired_ratio([(factor * one, one) for one in drift])
    assert paired == (pytest.approx(factor), pytest.approx(0.0, abs=1e-9))
    apart = ratio([factor * one for one in random.Random(seed).sample(drift, len(drift))], drift)  # noqa: S311
    assert apart.value == pytest.approx(factor)


def test_pairs_of_which_there_are_none_or_whose_second_is_always_0_have_no_ratio() -> None:
    assert paired_ratio([]) is None
    assert paired_ratio([(1.0, 0.0), (1.0, 0.0)]) is None
    assert paired_ratio([(1.0, 1.0), (0.0, 0.0)]) == (1.0, 0.0)
    assert paired_ratio([(1.0, 2.0)]) == (0.5, None)
    # It stood still: that is a rate, too.
    assert paired_ratio([(0.0, 2.0), (0.0, 2.0)]) == (0.0, 0.0)


def test_one_measurement_alone_never_differs_whichever_it_is() -> None:
    several, alone = summary([1.0, 2.0]), summary([100.0])
    assert alone.differs_from(several) is None
    assert several.differs_from(alone) is None
    single = ratio([1.0, 2.0], [100.0])
    assert (single.low, single.high) == (None, None)


def test_intervals_that_touch_do_not_differ() -> None:
    one = summary([9.0, 11.0])
    assert one.low is not None
    assert one.differs_from(summary([one.high + 0.5, one.high + 0.5])) is True
    assert one.differs_from(summary([one.high, one.high])) is False
    assert summary([one.low, one.low]).differs_from(one) is False


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        # Student's t, two-sided 95 %, of the printed tables.
        *((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306)),
        *((9, 2.262), (10, 2.228), (12, 2.179), (15, 2.131), (20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980)),
        # Between two entries the larger quantile: an interval is never too narrow.
        *((11, 2.228), (14, 2.179), (19, 2.131), (29, 2.086), (59, 2.042), (119, 2.000), (10_000, 1.980)),
    ],
)
def test_known_quantiles(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == quantile
