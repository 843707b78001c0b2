"""Which GPU takes which part of a wish: against trying everything, and how many states are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare.mig import planner as module
from gpushare.mig.planner import Codes, Group, assign, codes_for, plan_add
from gpushare.mig.wish import parse_wish
from tests.mig.boards import layout


def code_of(counts: tuple[int, ...], codes: Codes) -> int:
    return sum(count * one for count, one in zip(counts, codes.of_one, strict=True))


def fields_of(code: int, codes: Codes) -> tuple[int, ...]:
    return tuple(code >> shift & ((1 << bits) - 1) for shift, bits in codes.fields)


def cheapest(groups: list[Group], codes: Codes) -> int | None:
    """Return the least total of all ways, each tried."""
    gpus = [group.weights for group in groups for _ in range(group.count)]
    # Field by field: five of one kind add up to the code of one of it and one of the next.
    apart = {code: fields_of(code, codes) for weights in gpus for code in weights}
    whole = fields_of(codes.whole, codes)
    totals = [
        sum(weights[part] for weights, part in zip(gpus, parts, strict=True))
        for parts in product(*gpus)
        if tuple(map(sum, zip(*(apart[part] for part in parts), strict=True))) == whole
    ]
    return min(totals, default=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Group], Codes, int]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    codes = codes_for(counts, [draw(st.integers(1, 4)) for _ in counts])
    some = st.tuples(*(st.integers(0, min(2, count)) for count in counts))
    groups = []
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda numbers: sum(numbers) <= 6)
    for count in draw(sizes):
        parts = draw(st.dictionaries(some, st.integers(-3, 9), max_size=5))
        groups.append(Group(count, {**{code_of(part, codes): cost for part, cost in parts.items()}, 0: 0}))
    return groups, codes, sum(counts)


@settings(max_examples=80, deadline=None)
@given(cases())
@example(
    (
        [Group(3, {272: 0, 68: 0, 65: 0, 0: 0}), Group(3, {68: -1, 0: 0})],
        Codes((65, 68, 272), 405, 554, ((0, 1), (2, 1), (4, 1), (6, 3))),
        3,
    )
)
def test_it_is_the_least_of_all_ways(case: tuple[list[Group], Codes, int]) -> None:
    groups, codes, instances = case
    found = assign(groups, codes, instances)
    best = cheapest(groups, codes)
    if found is None:
        assert best is None
        return
    assert sum(sum(parts) for parts in found) == codes.whole
    assert all(len(parts) <= group.count for parts, group in zip(found, groups, strict=True))
    total = sum(group.weights[part] for parts, group in zip(found, groups, strict=True) for part in parts)
    assert total == best


def test_equal_gpus_are_not_tried_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish of seven kinds on 16 equal GPUs: without it these are some 400,000 states for each of them."""
    real, seen = module._next_rests, 0

    def turn(cheapest: Mapping[int, int], *more: object) -> object:
        nonlocal seen
        seen += len(cheapest)
        return real(cheapest, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_next_rests", turn)
    wish = parse_wish("3g.40gb*4 2g.20gb*10 1g.10gb*20 1g.10gb+me*6 1g.20gb*4 4g.40gb*4 7g.80gb")
    plan = plan_add([layout("h100-80gb", gpu=number) for number in range(16)], wish)
    assert sum(len(gpu.created) for gpu in plan.gpus) == 49
    assert seen < 60_000
