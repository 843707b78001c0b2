"""What it costs to move jobs: between what was measured, and beyond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.units import GIB
from gpushare.memory.cost import (
    HOST_MARGIN_BYTES,
    MEASURED,
    TURN_FACTOR,
    beyond_measured,
    host_bytes,
    kept_share,
    most_out_seconds,
    swap_times,
)


def test_what_was_measured_is_returned_as_it_was() -> None:
    assert sorted(MEASURED) == list(MEASURED)
    for each in MEASURED:
        assert swap_times(each.memory_bytes) == pytest.approx(each)
        assert not beyond_measured(each.memory_bytes)
        # Who must be out in time plans with more.
        assert most_out_seconds(each.memory_bytes) > each.out_seconds
    assert swap_times(GIB // 4)[1:] == MEASURED[0][1:]


def test_beyond_the_largest_the_last_two_go_on() -> None:
    before, last = MEASURED[-2:]
    size = 2 * last.memory_bytes - before.memory_bytes
    assert swap_times(size).out_seconds == pytest.approx(2 * last.out_seconds - before.out_seconds)
    assert beyond_measured(size)


@given(st.integers(0, 300 * GIB), st.integers(0, 100 * GIB))
def test_a_larger_job_never_takes_less(size: int, more: int) -> None:
    smaller, larger = swap_times(size), swap_times(size + more)
    assert 0 < smaller.out_seconds <= larger.out_seconds
    assert 0 < smaller.in_seconds <= larger.in_seconds
    assert most_out_seconds(size) < most_out_seconds(size + more) or not more


def test_turns_of_nine_switches_keep_nine_tenths() -> None:
    assert kept_share(TURN_FACTOR * 2.5, 2.5) == pytest.approx(0.9)
    assert kept_share(10.0, 2.5) == pytest.approx(0.8)


def test_host_memory_has_a_margin() -> None:
    assert host_bytes(GIB) == GIB + HOST_MARGIN_BYTES
    assert host_bytes(100 * GIB) == 105 * GIB
