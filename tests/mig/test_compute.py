"""Compute instances inside a GPU instance: which stay, and whether the new ones fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.base.model import GpuProcess
from gpushare.gpu_models import find_model
from gpushare.mig.board import compute_change, destroyed_for_room, new_compute
from gpushare.mig.profile import ComputeInstance, GpuInstance, Placement, standard_compute_profiles
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


def gone(one: GpuInstance, *wanted: int, destroy: bool = True, evict: bool = False, **more: bool) -> list[int] | None:
    found = destroyed_for_room(one, wanted, may_destroy=destroy, may_evict=evict, **more)
    return None if found is None else [part.id for part in found]


def test_what_fits_beside_the_others_takes_nobody_away() -> None:
    assert gone(instance(FOUR, 0, compute=(1, 1)), 2) == []
    assert gone(instance(FOUR, 0, compute=()), 4) == []


def test_only_as_many_go_as_have_to() -> None:
    one = instance(FOUR, 0, compute=(1, 1, 1, 1))
    assert gone(one, 1) == [0]
    assert gone(one, 2) == [0, 1]
    assert gone(one, 1, destroy=False) is None
    assert gone(instance(FOUR, 0, compute=(1, 1)), 4) == [0, 1]
    assert gone(one, 3) is None, "a 4g has no compute instance of three slices"


def test_nobody_busy_goes_unless_he_may_be_evicted() -> None:
    one = instance(FOUR, 0, compute=(2, 2), busy_parts=(0, 1))
    assert gone(one, 2, with_busy=True) is None
    assert gone(one, 2, with_busy=True, evict=True) == [0]
    assert gone(one, 4, evict=True) == [0, 1]
    assert gone(one, 4) is None
    # Two idle ones rather than one busy one.
    one = instance(FOUR, 0, compute=(2, 1, 1), busy_parts=(0,))
    assert gone(one, 2, with_busy=True, evict=True) == [1, 2]


def test_nothing_comes_beside_somebody_unless_it_may() -> None:
    one = instance(FOUR, 0, compute=(1, 1), busy_parts=(0,))
    assert gone(one, 1) is None
    assert gone(one, 1, with_busy=True) == []
    assert gone(one, 1, evict=True) == [0]


def test_nothing_stays_where_it_is_to_be_alone() -> None:
    one = instance(FOUR, 0, compute=(1, 1))
    assert gone(one, 1, with_others=False) == [0, 1]
    assert gone(one, 1, with_others=False, destroy=False) is None
    assert gone(instance(FOUR, 0, compute=()), 1, with_others=False) == []


@pytest.mark.parametrize("holders", [None, SOMEBODY])
def test_inside_an_instance_that_is_held_as_a_whole_nothing_goes(holders: tuple[GpuProcess, ...] | None) -> None:
    one = replace(instance(FOUR, 0, compute=(1, 1)), holders=holders)
    assert gone(one, 1) is None
    assert gone(one, 1, evict=True) is None
    assert gone(one, 1, with_busy=True) == []
    assert gone(one, 4, with_busy=True, evict=True) is None


def test_the_whole_is_the_profile_without_a_size_of_its_own() -> None:
    """A driver that lists no compute instance profiles still gives the whole of a GPU instance."""
    bare = replace(FOUR, compute=())
    made = new_compute(bare, (4,))
    assert [part.profile for part in made] == [bare.filling_compute]
    assert new_compute(bare, (2, 2)) is None
