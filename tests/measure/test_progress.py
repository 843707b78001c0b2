"""Rates and latencies of a window of time, from a program's lines."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.benchmark import Metric
from gpushare.measure.metric import Printed, Window, dispersion, p99, p99_factor_interval, p99_interval


def test_a_printed_rate_is_the_mean_of_the_window() -> None:
    seen = Printed(Metric(pattern=r"rate=([0-9.]+)"))
    for at, rate in ((1.0, 10), (2.0, 20), (3.0, 30), (4.0, 99)):
        seen.listen(f"rate={rate}", at)
    assert seen.window(1.0, 3.0).rate == 25.0
    assert seen.moments(1.0, 3.0) == [2.0, 3.0]
    assert seen.window(5.0, 6.0).rate is None


def test_a_time_per_step_is_turned_into_a_speed() -> None:
    seen = Printed(Metric(pattern=r"step ([0-9.]+) s", higher_is_better=False))
    seen.listen("step 0.5 s", 1.0)
    assert seen.window(0.0, 2.0).rate == 2.0


@given(st.floats(0.02, 0.5), st.floats(0.0, 0.4), st.floats(2.0, 5.0))
def test_lines_per_second_do_not_depend_on_where_the_window_begins(gap: float, offset: float, length: float) -> None:
    seen = Printed(Metric())
    for number in range(int(12 / gap)):
        seen.listen("a step is done", number * gap)
    rate = seen.window(2.0 + offset, 2.0 + offset + length).rate
    assert rate == pytest.approx(1 / gap, rel=0.01)


def test_p99_is_of_all_windows_together_or_what_was_printed() -> None:
    seen = Printed(Metric())
    for number in range(100):
        seen.listen(f"latency_ms={1 + number / 100}", number / 10)
    whole = [seen.window(0.0, 5.0), seen.window(5.0, 10.0)]
    assert p99(whole) == pytest.approx(1.98, abs=0.01)
    printed = Printed(Metric())
    printed.listen("p50=0.4 p99=1.5", 1.0)
    assert p99([printed.window(0.0, 2.0)]) == 1.5
    assert p99([Window(rate=1.0, latencies=(1.0, 2.0))]) is None


@given(st.lists(st.floats(0.1, 100.0), min_size=400, max_size=900))
def test_the_interval_of_a_p99_holds_it(latencies: list[float]) -> None:
    window = Window(rate=1.0, latencies=tuple(latencies))
    found = p99_interval([window])
    assert found is not None
    low, high = found
    value, slack = p99([window]) or 0.0, 1 + 1e-12
    assert min(latencies) <= low <= value * slack
    assert value <= high * slack <= max(latencies) * slack


# -- what is easily told wrong ---------------------------------------------------------------------


def printed(*rates: str, higher_is_better: bool = True) -> float | None:
    """Return the rate of a window in which these were printed."""
    seen = Printed(Metric(pattern=r"rate=(\S+)", higher_is_better=higher_is_better))
    for number, rate in enumerate(rates):
        seen.listen(f"rate={rate}", 1.0 + number)
    return seen.window(0.0, 100.0).rate


def test_a_program_that_was_held_up_is_slower_by_it() -> None:
    """It prints a rate of 0: left out, the one that harmed it would look harmless."""
    assert printed("10", "0", "0", "10") == 5.0
    assert printed("0", "0.0") == 0.0
    assert printed("0.5") == 0.5


def test_what_cannot_be_a_rate_or_a_time_is_left_out() -> None:
    assert printed("10", "-4") == 10.0
    assert printed("-4") is None
    assert printed("0.5", "0", "-1", higher_is_better=False) == 2.0
    assert printed("0", higher_is_better=False) is None


def lines_at(*times: float) -> Printed:
    """Return a program that printed a line at each of these times."""
    seen = Printed(Metric())
    for at in times:
        seen.listen("line", at)
    return seen


def test_lines_are_counted_after_the_start_and_up_to_the_end() -> None:
    seen = lines_at(1.0, 2.0, 3.0, 4.0)
    assert [len(seen.moments(*window)) for window in ((1.0, 3.0), (0.0, 4.0), (4.0, 9.0), (0.5, 0.9))] == [2, 4, 0, 0]
    rates = Printed(Metric(pattern=r"rate=([0-9.]+)"))
    for at in (1.0, 2.0, 3.0):
        rates.listen("rate=1", at)
        # One that prints a number is not counted by its lines.
        rates.listen("another line", at)
    assert [len(rates.moments(*window)) for window in ((1.0, 3.0), (0.0, 9.0), (3.0, 9.0))] == [2, 3, 0]


@pytest.mark.parametrize(
    ("times", "window", "rate"),
    [
        # Half of the gap before a line, and half of the one behind it.
        ((1.0, 2.0, 3.0, 4.0), (1.5, 3.5), 1.0),
        # Behind the last line one more is due after the last gap, and no more than one.
        ((1.0, 2.0), (1.0, 2.5), 1.0),
        ((1.0, 2.0), (1.0, 4.0), 2 / 3),
        # The first line begins the count; of one alone nothing is known that comes behind it.
        ((1.0, 2.0), (0.0, 1.0), 1.0),
        ((5.0,), (0.0, 10.0), 0.1),
        ((5.0,), (5.0, 10.0), None),
        # A gap that becomes longer.
        ((0.0, 1.0, 5.0), (1.0, 3.0), 0.25),
        # Two at the same moment.
        ((1.0, 1.0, 3.0), (0.5, 2.0), 2.5 / 1.5),
        ((1.0, 1.0), (0.5, 2.0), 2 / 1.5),
        ((), (0.0, 1.0), None),
        # It stands still.
        ((1.0, 1.1, 1.2), (3.0, 4.0), None),
        # An empty window, and one that ends before it begins.
        ((1.0, 2.0, 3.0), (2.0, 2.0), None),
        ((1.0, 2.0, 3.0), (3.0, 2.0), None),
    ],
)
def test_lines_per_second_by_hand(times: tuple[float, ...], window: tuple[float, float], rate: float | None) -> None:
    found = lines_at(*times).window(*window).rate
    assert found == (None if rate is None else pytest.approx(rate))


def test_a_p99_needs_twenty_latencies_and_else_is_the_printed_one() -> None:
    few, enough = (tuple(float(one) for one in range(count)) for count in (19, 20))
    assert p99([Window(rate=1.0, latencies=few, printed_p99=7.0)]) == 7.0
    assert p99([Window(rate=1.0, latencies=enough, printed_p99=7.0)]) == pytest.approx(18.81)
    # Of all windows together.
    halves = [Window(rate=1.0, latencies=enough[:10]), Window(rate=1.0, latencies=enough[10:])]
    assert p99(halves) == pytest.approx(18.81)


def test_of_several_printed_p99s_the_middle_one_counts() -> None:
    seen = Printed(Metric())
    for at, text in ((1.0, "p99=1"), (2.0, "p99_ms: 100"), (3.0, "P99 latency 3")):
        seen.listen(text, at)
    window = seen.window(0.0, 9.0)
    assert window.printed_p99 == 3.0
    assert p99([window, Window(rate=1.0, printed_p99=5.0), Window(rate=1.0), Window(rate=1.0, printed_p99=90.0)]) == 5.0


def test_the_interval_of_a_p99_by_hand() -> None:
    """Of 1000 the 99th percentile is the 990th, give or take 1.96 sqrt(9.9) = 6.17: ranks 983 and 997."""
    assert p99_interval([Window(rate=1.0, latencies=tuple(float(n) for n in range(19)))]) is None
    window = Window(rate=1.0, latencies=tuple(float(one) for one in range(1, 1001)))
    assert p99_interval([window]) == (983.0, 997.0)


@pytest.mark.parametrize(("count", "bounded"), [(20, False), (299, False), (300, True), (381, True)])
def test_the_interval_has_an_upper_end_where_the_largest_is_above_the_p99(count: int, bounded: bool) -> None:
    """Of n, all lie below it with a chance of .99 ** n, which is less than 5 % from 300 on."""
    window = Window(rate=1.0, latencies=tuple(float(number) for number in range(count)))
    low, high = p99_interval([window]) or (None, None)
    assert low is not None
    assert (high is not None) is bounded


@pytest.mark.parametrize(("random_arrivals", "low", "high"), [(False, 0.0, 0.3), (True, 0.6, 1.6)])
def test_arrivals_at_random_scatter_and_a_beat_does_not(random_arrivals: bool, low: float, high: float) -> None:
    source, at, times = random.Random(3), 0.0, list[float]()  # noqa: S311 - not a secret
    while at < 60:
        at += source.expovariate(40.0) if random_arrivals else 0.025
        times.append(at)
    spans = [(float(start), start + 0.6) for start in range(0, 60, 2)]
    assert low <= (dispersion(times, spans) or 0.0) <= high
    assert dispersion(times[:10], spans) is None


def told_p99(*values: float | None) -> list[Window]:
    return [Window(rate=1.0, printed_p99=value) for value in values]


def test_what_a_program_prints_as_its_p99_is_as_exact_as_its_windows_agree() -> None:
    assert p99_factor_interval(told_p99(1.0, 1.0, None), told_p99(1.2, 1.2)) == (pytest.approx(1.2), pytest.approx(1.2))
    low, high = p99_factor_interval(told_p99(1.0, 1.1, 0.9), told_p99(1.2, 1.3, 1.1)) or (0.0, 0.0)
    assert 0.8 < low < 1.2 < high < 1.7
    # Around the factor that is reported, which is one of medians.
    low, high = p99_factor_interval(told_p99(1.0, 1.0, 1.0), told_p99(1.0, 1.0, 4.0)) or (0.0, 0.0)
    assert low < 1.0 < high


def test_one_number_tells_nothing_of_how_exact_a_p99_is() -> None:
    assert p99_factor_interval(told_p99(1.0), told_p99(1.2, 1.2)) is None
    assert p99_factor_interval(told_p99(1.0, 1.0), told_p99(None)) is None
    assert p99_factor_interval(told_p99(0.0, 0.0), told_p99(1.0, 1.0)) is None
    # Latencies count before what is printed, and these are too few for an upper end.
    few = [Window(rate=1.0, latencies=(1.0,) * 20, printed_p99=1.0)] * 2
    assert p99_factor_interval(few, few) == (1.0, None)
