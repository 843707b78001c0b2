"""When an opportunistic job may run, against a simulated pair of jobs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.run.pause import DutyPacer, Pacer


def test_it_stands_still_from_the_first_sign_of_work_until_it_was_quiet_for_a_while() -> None:
    pacer = Pacer(quiet_seconds=0.3)
    assert pacer.may_run(0.0, active=False)
    assert not pacer.may_run(1.0, active=True)
    assert not pacer.may_run(1.29, active=False)
    assert pacer.may_run(1.31, active=False)
    assert not pacer.may_run(1.32, active=True)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_it_never_runs_while_production_is_seen_to_work(seen: list[bool]) -> None:
    pacer = Pacer(quiet_seconds=0.05)
    for number, active in enumerate(seen):
        ran = pacer.may_run(number * 0.02, active=active)
        assert not (active and ran)
        # 0.05 s are three looks.
        assert ran == (not any(seen[max(0, number - 2) : number + 1]))


def test_the_while_is_three_tenths_of_a_second_and_its_end_belongs_to_the_quiet() -> None:
    assert Pacer().quiet_seconds == 0.3
    pacer = Pacer(quiet_seconds=0.5)
    assert not pacer.may_run(1.0, active=True)
    assert pacer.may_run(1.5, active=False)


@given(st.floats(1, 100), st.integers(0, 10_000))
def test_a_duty_cycle_is_a_part_of_the_time_while_production_works(percent: float, start: int) -> None:
    pacer = DutyPacer(percent=percent)
    ran = [pacer.may_run(start + number * 0.001, active=True) for number in range(5000)]
    # Ten cycles of 500 looks each.
    assert sum(ran) == pytest.approx(50 * percent, abs=20)
    assert sum(one and not other for one, other in itertools.pairwise(ran)) <= 11


def test_a_duty_cycle_is_all_of_the_time_while_production_is_not_active() -> None:
    pacer = DutyPacer(percent=10.0)
    # It stands still first, and goes on at the end of each half second.
    seen = [(1.01, True, False), (1.2, True, False), (1.2, False, True), (1.44, True, False), (1.46, True, True)]
    assert [pacer.may_run(at, active=active) for at, active, _ in seen] == [runs for *_, runs in seen]
    assert all(pacer.may_run(number * 0.01, active=False) for number in range(100))
