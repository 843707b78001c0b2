"""Which GPU takes which part of a wish: against trying everything, and how many rests of it are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare.mig import planner as module
from gpushare.mig.planner import Group, WishPart, assign_parts, plan_add, wish_part
from gpushare.mig.wish import parse_wish
from tests.mig.boards import layout


def sum_of(parts: list[WishPart], wish: WishPart) -> WishPart:
    return tuple(map(sum, zip(*parts, strict=True))) if parts else (0,) * len(wish)


def cheapest(groups: list[Group], wish: WishPart) -> int | None:
    """Return the least total of all ways, each tried."""
    gpus = [group.weights for group in groups for _ in range(group.count)]
    totals = [
        sum(weights[part] for weights, part in zip(gpus, parts, strict=True))
        for parts in product(*gpus)
        if sum_of(list(parts), wish) == wish
    ]
    return min(totals, default=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Group], WishPart]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = [draw(st.integers(1, 4)) for _ in counts]
    some = st.tuples(*(st.integers(0, min(2, count)) for count in counts))
    groups = []
    numbers = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda numbers: sum(numbers) <= 6)
    for number in draw(numbers):
        parts = draw(st.dictionaries(some, st.integers(-3, 9), max_size=5))
        weights = {wish_part(part, sizes): cost for part, cost in parts.items()}
        groups.append(Group(number, {**weights, wish_part([0] * len(counts), sizes): 0}))
    return groups, wish_part(counts, sizes)


@settings(max_examples=80, deadline=None)
@given(cases())
@example(
    (
        [
            Group(3, {(0, 0, 1, 4): 0, (0, 1, 0, 1): 0, (1, 0, 0, 1): 0, (0, 0, 0, 0): 0}),
            Group(3, {(0, 1, 0, 1): -1, (0, 0, 0, 0): 0}),
        ],
        (1, 1, 1, 6),
    )
)
def test_it_is_the_least_of_all_ways(case: tuple[list[Group], WishPart]) -> None:
    groups, wish = case
    found = assign_parts(groups, wish)
    best = cheapest(groups, wish)
    if found is None:
        assert best is None
        return
    assert sum_of([part for parts in found for part in parts], wish) == wish
    assert all(len(parts) <= group.count for parts, group in zip(found, groups, strict=True))
    total = sum(group.weights[part] for parts, group in zip(found, groups, strict=True) for part in parts)
    assert total == best


def test_equal_gpus_are_not_tried_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish of seven kinds on 16 equal GPUs: without it these are some 400,000 rests for each of them."""
    real, seen = module._next_rests, 0

    def turn(cheapest: Mapping[WishPart, int], *more: object) -> object:
        nonlocal seen
        seen += len(cheapest)
        return real(cheapest, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_next_rests", turn)
    wish = parse_wish("3g.40gb*4 2g.20gb*10 1g.10gb*20 1g.10gb+me*6 1g.20gb*4 4g.40gb*4 7g.80gb")
    plan = plan_add([layout("h100-80gb", gpu=number) for number in range(16)], wish)
    assert sum(len(gpu.created) for gpu in plan.gpus) == 49
    assert seen < 60_000
