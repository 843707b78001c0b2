"""Compute instances inside a GPU instance: which stay, and whether the new ones fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.gpu_models import find_model
from gpushare.mig.board import compute_change, destroyed_for_room, new_compute
from gpushare.mig.profile import ComputeInstance, Placement, standard_compute_profiles
from tests.mig.boards import SOMEBODY, instance

PROFILES = {profile.name: profile for profile in find_model("h100").profiles}
SEVEN = PROFILES["7g.80gb"]


@pytest.mark.parametrize(
    ("name", "wanted", "fits"),
    [
        ("3g.40gb", (1, 1, 1), True),
        ("3g.40gb", (2, 1), True),
        ("3g.40gb", (2, 2), False),
        ("3g.40gb", (3, 1), False),
        ("4g.40gb", (2, 2), True),
        ("4g.40gb", (3, 1), False),
        ("7g.80gb", (4, 3), True),
        ("7g.80gb", (2, 2, 2, 1), True),
        ("1g.10gb", (2,), False),
    ],
)
def test_what_a_gpu_instance_holds(name: str, wanted: tuple[int, ...], fits: bool) -> None:
    found = new_compute(PROFILES[name], wanted)
    assert (found is not None) == fits
    if found is not None:
        assert [one.profile.slices for one in found] == sorted(wanted, reverse=True)


def test_the_double_memory_profile_has_its_own_compute_instance() -> None:
    assert standard_compute_profiles(1, 9)[0].id == 7
    assert standard_compute_profiles(1, 0)[0].id == 0
    assert PROFILES["1g.20gb"].filling_compute.id == 7
    assert PROFILES["3g.40gb"].filling_compute.id == 2


@settings(max_examples=80, deadline=None)
@given(
    have=st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), st.booleans()), max_size=4),
    wanted=st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=4),
    may_evict=st.booleans(),
)
def test_the_fewest_go(have: list[tuple[int, bool]], wanted: list[int], may_evict: bool) -> None:
    """Against every subset to keep: fewest busy ones destroyed, then fewest."""
    sizes = [size for size, _ in have]
    if new_compute(SEVEN, sizes) is None:
        return
    one = instance(SEVEN, 0, compute=tuple(sizes), busy_parts=tuple(n for n, (_, busy) in enumerate(have) if busy))
    change = compute_change(one, wanted, may_evict=may_evict)
    costs = []
    for count in range(len(have) + 1):
        for kept in combinations(range(len(have)), count):
            lost = [n for n in range(len(have)) if n not in kept]
            busy = sum(have[n][1] for n in lost)
            if not Counter(sizes[n] for n in kept) - Counter(wanted) and (may_evict or not busy):
                costs.append((busy, len(lost)))
    if change is None:
        assert new_compute(SEVEN, wanted) is None or not costs
        return
    assert (sum(part.busy for part in change.destroyed), len(change.destroyed)) == min(costs)
    left = [part.profile.slices for part in one.compute if part not in change.destroyed]
    assert sorted([*left, *(new.profile.slices for new in change.created)]) == sorted(wanted)


def test_a_held_gpu_instance_is_not_changed_inside() -> None:
    one = replace(instance(PROFILES["3g.40gb"], 0), holders=SOMEBODY)
    assert compute_change(one, (1, 1), may_evict=False) is None
    assert compute_change(one, (1, 1), may_evict=True) is not None
    assert compute_change(one, (3,), may_evict=False) == ((), ())


def test_one_busy_weighs_more_than_two_idle() -> None:
    """1c at 0 is busy, 1c at 2 and 3 are idle; a 2c fits at 0 or at 2."""
    four = PROFILES["4g.40gb"]
    compute = tuple(
        ComputeInstance(
            id=n, profile=four.compute[0], placement=Placement(start, 1), holders=SOMEBODY if start == 0 else ()
        )
        for n, start in enumerate((0, 2, 3))
    )
    one = replace(instance(four, 0), compute=compute)
    change = compute_change(one, (2, 1, 1), may_evict=True)
    assert [part.id for part in change.destroyed] == [1, 2]
    assert [new.profile.slices for new in change.created] == [2, 1]


# -- room inside an instance that stays ------------------------------------------------------------

FOUR = PROFILES["4g.40gb"]


BESIDE, EVICTED, ALONE, KEPT = {"with_busy": True}, {"may_evict": True}, {"with_others": False}, {"may_destroy": False}


@pytest.mark.parametrize(
    ("there", "busy", "wanted", "rules", "gone"),
    [
        # What fits beside the others takes nobody away.
        ((1, 1), (), 2, {}, []),
        ((), (), 4, {}, []),
        # Only as many go as have to.
        ((1, 1, 1, 1), (), 1, {}, [0]),
        ((1, 1, 1, 1), (), 2, {}, [0, 1]),
        ((1, 1, 1, 1), (), 1, KEPT, None),
        ((1, 1), (), 4, {}, [0, 1]),
        # A 4g has no compute instance of three slices.
        ((1, 1, 1, 1), (), 3, {}, None),
        # Nobody busy goes unless he may be evicted.
        ((2, 2), (0, 1), 2, BESIDE, None),
        ((2, 2), (0, 1), 2, BESIDE | EVICTED, [0]),
        ((2, 2), (0, 1), 4, EVICTED, [0, 1]),
        ((2, 2), (0, 1), 4, {}, None),
        # Two idle ones rather than one busy one.
        ((2, 1, 1), (0,), 2, BESIDE | EVICTED, [1, 2]),
        # Nothing comes beside somebody unless it may.
        ((1, 1), (0,), 1, {}, None),
        ((1, 1), (0,), 1, BESIDE, []),
        ((1, 1), (0,), 1, EVICTED, [0]),
        # Nothing stays where it is to be alone.
        ((1, 1), (), 1, ALONE, [0, 1]),
        ((1, 1), (), 1, ALONE | KEPT, None),
        ((), (), 1, ALONE, []),
        # Inside an instance that is held as a whole, or of which that is unknown, nothing goes.
        *(
            ((1, 1), held, wanted, rules, gone)
            for held in (None, SOMEBODY)
            for wanted, rules, gone in ((1, {}, None), (1, EVICTED, None), (1, BESIDE, []), (4, BESIDE | EVICTED, None))
        ),
    ],
)
def test_what_goes_for_room(
    there: tuple[int, ...], busy: Any, wanted: int, rules: dict[str, bool], gone: list[int] | None
) -> None:
    parts = busy if busy not in (None, SOMEBODY) else ()
    one = instance(FOUR, 0, compute=there, busy_parts=parts)
    if parts is not busy:
        one = replace(one, holders=busy)
    found = destroyed_for_room(one, (wanted,), **{"may_destroy": True, "may_evict": False, **rules})
    assert (None if found is None else [part.id for part in found]) == gone


def test_the_whole_is_the_profile_without_a_size_of_its_own() -> None:
    """A driver that lists no compute instance profiles still gives the whole of a GPU instance."""
    bare = replace(FOUR, compute=())
    made = new_compute(bare, (4,))
    assert [part.profile for part in made] == [bare.filling_compute]
    assert new_compute(bare, (2, 2)) is None
