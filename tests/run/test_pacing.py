"""When an opportunistic job may run, against a simulated pair of jobs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpushare.run.pause import Pacer


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
