"""What a program tells of its own speed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.benchmark import Metric
from gpushare.base.errors import BadUsage
from gpushare.measure.metric import Printed, amount, number, parse_metric
from tests.errors import fails
from tests.tables import each

RATE = parse_metric(r"rate=(\S+)")


def printed(text: str, metric: Metric = RATE) -> Printed:
    found = Printed(metric)
    for line in re.split(r"[\r\n]", text):
        found.listen(line, 1.0)
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1", 1.0), ("-2.5", -2.5), ("1e3", 1000.0), (".5", 0.5), ("1_000", 1000.0)),
        *(("1,234.5", 1234.5), ("1,234,567", 1234567.0), ("-1,234", -1234.0)),
        *each((["1,23", "12,34,567", "1.2.3", "nan", "inf", "1e999", "", None, "12ms"], None)),
    ],
)
def test_numbers(text: str | None, value: float | None) -> None:
    assert number(text) == value


def test_a_long_row_of_digits_is_looked_at_once() -> None:
    """Looked at again from each of its digits, it would take hours."""
    assert number("9" * 2_000_000 + "x") is None


@pytest.mark.parametrize("pattern", ["rate=", "(rate)=(.+)", "(", "a(?:b)"])
def test_a_pattern_needs_exactly_one_pair_of_brackets(pattern: str) -> None:
    with fails(BadUsage, "bad_metric", hint="--metric 'rate="):
        parse_metric(pattern)
    with pytest.raises(BadUsage):
        parse_metric(None, latency=pattern)


def test_what_is_no_number_is_passed_over() -> None:
    assert printed("rate=warming-up\nrate=nan\nrate=7\n").values == [(1.0, 7.0)]


@pytest.mark.parametrize(
    ("text", "value"), [("1e99", 1e99), ("1e308", None), ("-0.1", None), ("nan", None), ("0", 0.0), ("-0.0", 0.0)]
)
def test_a_rate_can_be_added_up(text: str, value: float | None) -> None:
    assert amount(text) == value


def test_only_the_numbers_of_the_window_count() -> None:
    found = Printed(RATE)
    for at in range(1, 6):
        found.listen(f"rate={at}0", float(at))
    assert found.mean_between(2.0, 4.0) == 35.0
    assert found.mean_between(5.0, 9.0) is None


def test_latencies_of_single_requests() -> None:
    found = printed("".join(f"latency_ms={value}\n" for value in range(1, 102)), Metric())
    assert (found.latency(50, 0.0), found.latency(99, 0.0)) == (51.0, 100.0)
    assert found.latency(50, since=1.0) is None


@pytest.mark.parametrize("text", ["latency: 3.5 ms", "request 4 latency=3.5", "latency 3.5", "Latency_ms: 3.5"])
def test_usual_spellings_of_a_latency(text: str) -> None:
    assert printed(f"{text}\n", Metric()).latencies == [(1.0, 3.5)]


@pytest.mark.parametrize("word", ["latency", "p99"])
def test_a_long_row_of_blanks_is_looked_at_once(word: str) -> None:
    """With a pattern that gives blanks to two places, the time grows with their square."""
    printed = Printed(Metric())
    printed.listen(f"{word}{' ' * 64_000}-", 1.0)
    printed.listen(f"{word}{' ' * 64_000}= 3.2", 2.0)
    assert printed.latencies + printed.percentiles[99] == [(2.0, 3.2)]


def test_percentiles_that_the_program_sums_up_itself() -> None:
    found = printed("done: p50=0.37 ms, p99 = 1.25 ms\n", Metric())
    assert (found.latency(50, 0.0), found.latency(99, 0.0)) == (0.37, 1.25)


def test_a_latency_pattern_of_ones_own() -> None:
    found = printed("took 5 us\ntook 7 us\n", parse_metric(None, latency=r"took (\d+) us"))
    assert found.latencies == [(1.0, 5.0), (1.0, 7.0)]


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=10))
def test_rates_add_up_and_times_do_as_rates(values: list[float]) -> None:
    assert Metric().together(values) == pytest.approx(sum(values))
    times = Metric(higher_is_better=False).together(values)
    assert 1 / times == pytest.approx(sum(1 / value for value in values))


def test_four_copies_of_a_fifth_of_a_second() -> None:
    assert Metric(higher_is_better=False).together([0.2] * 4) == pytest.approx(0.05)
    assert Metric(higher_is_better=False).together([0.2, 0.0]) is None
    assert Metric().together([]) is None
