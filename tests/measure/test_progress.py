"""Rates and latencies of a window of time, from a program's lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.measure.metric import Metric
from gpushare.measure.progress import Progress, Window, p99, p99_interval


def test_a_printed_rate_is_the_mean_of_the_window() -> None:
    seen = Progress(Metric(pattern=r"rate=([0-9.]+)"))
    for at, rate in ((1.0, 10), (2.0, 20), (3.0, 30), (4.0, 99)):
        seen.listen(f"rate={rate}", at)
    assert seen.window(1.0, 3.0).rate == 25.0
    assert seen.count(1.0, 3.0) == 2
    assert seen.window(5.0, 6.0).rate is None


def test_a_time_per_step_is_turned_into_a_speed() -> None:
    seen = Progress(Metric(pattern=r"step ([0-9.]+) s", higher_is_better=False))
    seen.listen("step 0.5 s", 1.0)
    assert seen.window(0.0, 2.0).rate == 2.0


@given(st.floats(0.02, 0.5), st.floats(0.0, 0.4), st.floats(2.0, 5.0))
def test_lines_per_second_do_not_depend_on_where_the_window_begins(gap: float, offset: float, length: float) -> None:
    seen = Progress(Metric())
    for number in range(int(12 / gap)):
        seen.listen("a step is done", number * gap)
    rate = seen.window(2.0 + offset, 2.0 + offset + length).rate
    assert rate == pytest.approx(1 / gap, rel=0.01)


def test_a_program_that_stands_still_has_no_rate() -> None:
    seen = Progress(Metric())
    for at in (1.0, 1.1, 1.2):
        seen.listen("line", at)
    assert seen.window(3.0, 4.0).rate is None


def test_p99_is_of_all_windows_together_or_what_was_printed() -> None:
    seen = Progress(Metric())
    for number in range(100):
        seen.listen(f"latency_ms={1 + number / 100}", number / 10)
    whole = [seen.window(0.0, 5.0), seen.window(5.0, 10.0)]
    assert p99(whole) == pytest.approx(1.98, abs=0.01)
    printed = Progress(Metric())
    printed.listen("p50=0.4 p99=1.5", 1.0)
    assert p99([printed.window(0.0, 2.0)]) == 1.5
    assert p99([Window(rate=1.0, latencies=(1.0, 2.0))]) is None


@given(st.lists(st.floats(0.1, 100.0), min_size=400, max_size=900))
def test_the_interval_of_a_p99_holds_it(latencies: list[float]) -> None:
    window = Window(rate=1.0, latencies=tuple(latencies))
    found = p99_interval([window])
    assert found is not None
    low, high = found
    assert min(latencies) <= low <= (p99([window]) or 0.0) <= high <= max(latencies)


def test_a_p99_of_few_requests_has_no_interval() -> None:
    assert p99_interval([Window(rate=1.0, latencies=tuple(float(n) for n in range(300)))]) is None
    assert p99_interval([]) is None


def test_the_interval_narrows_with_the_number_of_requests() -> None:
    few, many = ([Window(rate=1.0, latencies=tuple(n / count for n in range(count)))] for count in (500, 5000))
    (low, high), (lower, higher) = p99_interval(few) or (0, 9), p99_interval(many) or (0, 9)
    assert higher - lower < high - low
