"""The MIG instances that hold shares: as large as they can be together, never smaller than needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.advice.situation import Share, instances_for
from gpushare.base.units import GIB
from gpushare.mig.plan import MigPlan
from gpushare.mig.planner import plan_exact
from gpushare.mig.profile import Layout
from tests.advice.conftest import facts_of


def layout(host: str) -> Layout:
    found = facts_of(host).gpus[0].layout
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("host", "count", "memory", "words"),
    [
        ("a100-80gb", 1, 5, ["7g.80gb"]),
        ("a100-80gb", 2, 5, ["3g.40gb*2"]),
        ("a100-80gb", 3, 5, ["2g.20gb*3"]),
        ("a100-80gb", 4, 5, ["1g.10gb*4"]),
        ("a100-80gb", 4, 12, ["1g.20gb*4"]),
        ("a100-80gb", 7, 5, ["1g.10gb*7"]),
        ("h200", 2, 60, ["3g.71gb*2"]),
        # 26 SMs against 16: the double-memory profile of an H200 has more of both.
        ("h200", 4, 5, ["1g.35gb*4"]),
        ("a30", 4, 5, ["1g.6gb*4"]),
        ("a30", 2, 5, ["2g.12gb*2"]),
    ],
)
def test_equal_shares_get_the_largest_equal_instances(host: str, count: int, memory: int, words: list[str]) -> None:
    assert list(map(str, instances_for(layout(host), (Share(memory * GIB),) * count).wish)) == words


def test_different_shares_get_what_they_need_and_more() -> None:
    found = instances_for(layout("a100-80gb"), (Share(30 * GIB), Share(5 * GIB), Share(5 * GIB)))
    assert [profile.name for profile in found.profiles] == ["3g.40gb", "2g.20gb", "2g.20gb"]


def test_sms_are_a_need_too() -> None:
    found = instances_for(layout("a100-80gb"), (Share(0, 50),))
    assert (found.profiles[0].multiprocessors or 0) >= 50
    assert instances_for(layout("a100-80gb"), (Share(0, 50), Share(0, 50))).why_not


def test_what_draws_gets_instances_that_can() -> None:
    board = layout("rtx-pro-6000-blackwell")
    drawing = Share(5 * GIB, graphics=True)
    assert list(map(str, instances_for(board, (drawing,) * 2).wish)) == ["2g.48gb+gfx*2"]
    mixed = instances_for(board, (drawing, Share(5 * GIB)))
    assert [profile.graphics for profile in mixed.profiles] == [True, False]
    assert isinstance(plan_exact([board], {0: mixed.wish}), MigPlan)


def test_what_no_instance_has_of_sms_says_sms() -> None:
    found = instances_for(layout("a100-80gb"), (Share(0, 500),))
    assert found.why_not == "no instance has 500 SMs; the largest, 7g.80gb, has 98 SMs"


def test_what_does_not_fit_says_how_many_would() -> None:
    found = instances_for(layout("h200"), (Share(40 * GIB),) * 3)
    assert found.profiles == ()
    assert "2 of 3g.71gb would" in (found.why_not or "")


def test_what_no_instance_has_says_the_largest() -> None:
    found = instances_for(layout("a100-80gb"), (Share(79 * GIB + 1),))
    assert "the largest, 7g.80gb, has 79.0 GiB" in (found.why_not or "")


@settings(max_examples=60)
@given(st.sampled_from(["a100-80gb", "h200", "a30"]), st.lists(st.integers(0, 40), min_size=1, max_size=7))
def test_the_instances_hold_their_shares_and_fit_together(host: str, sizes: list[int]) -> None:
    board = layout(host)
    shares = tuple(Share(number * GIB) for number in sizes)
    found = instances_for(board, shares)
    if found.why_not is not None:
        assert found.profiles == ()
        return
    assert len(found.profiles) == len(shares)
    for profile, share in zip(found.profiles, shares, strict=True):
        assert (profile.memory_bytes or 0) >= share.memory_bytes
    assert isinstance(plan_exact([board], {0: found.wish}), MigPlan)
