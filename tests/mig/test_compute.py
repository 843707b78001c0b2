"""Compute instances inside a GPU instance: which stay, and whether the new ones fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.gpu_models import find_model
from gpushare.mig.board import change_compute, new_compute
from gpushare.mig.profile import standard_compute_profiles
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
    assert PROFILES["1g.20gb"].whole.id == 7
    assert PROFILES["3g.40gb"].whole.id == 2


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
    change = change_compute(one, wanted, may_evict=may_evict)
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
    assert change_compute(one, (1, 1), may_evict=False) is None
    assert change_compute(one, (1, 1), may_evict=True) is not None
    assert change_compute(one, (3,), may_evict=False) == ((), ())


def test_the_whole_is_the_profile_without_a_size_of_its_own() -> None:
    """A driver that lists no compute instance profiles still gives the whole of a GPU instance."""
    bare = replace(PROFILES["4g.40gb"], compute=())
    made = new_compute(bare, (4,))
    assert made is not None
    assert [part.profile for part in made] == [bare.whole]
    assert new_compute(bare, (2, 2)) is None
