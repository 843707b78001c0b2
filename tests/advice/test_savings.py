"""What consolidation would save: the published example to the cent, and arithmetic that never flatters."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.advice.savings import Price, Savings, Work, plain_number, savings
from gpushare.base.errors import BadUsage
from gpushare.base.units import GIB
from tests.errors import fails

G4DN = Price(per_hour=Decimal("0.752"), hours=Decimal(720))


def alike(gpus: int, load: str, memory: int | None = None) -> list[Work]:
    return [Work(name=f"work {number}", load=Decimal(load), memory_bytes=memory) for number in range(gpus)]


def test_the_published_example_comes_out_exactly() -> None:
    """4 x g4dn.2xlarge at 25 % for 30 days, as guides to GPU slicing print it, and what they leave out."""
    found = savings(alike(4, "25"), price=G4DN)
    assert found.cost == Decimal("2165.76")
    one, two = found.options
    assert (one.gpus, one.cost, one.saving, one.saving_percent) == (
        1,
        Decimal("541.44"),
        Decimal("1624.32"),
        Decimal(75),
    )
    assert (one.verdict, one.max_load_percent, one.recommended) == ("no_headroom", Decimal(100), False)
    assert any("4 x 25 % is 100 % load" in warning and "no headroom" in warning for warning in found.warnings)
    assert (two.gpus, two.cost, two.saving) == (2, Decimal("1082.88"), Decimal("1082.88"))
    assert (two.verdict, two.max_load_percent, two.recommended) == ("fits", Decimal(50), True)
    assert found.recommended == two
    month = Price(per_hour=Decimal("0.752"), hours=Decimal(730))
    assert savings(alike(4, "25"), price=month).options[0].saving == Decimal("1646.88")


@pytest.mark.parametrize(
    ("target", "verdicts"),
    [
        ("100", ["fits"]),
        ("99", ["no_headroom", "fits"]),
        ("50", ["no_headroom", "fits"]),
        ("49", ["no_headroom", "above_target"]),
    ],
)
def test_the_target_decides_what_fits(target: str, verdicts: list[str]) -> None:
    found = savings(alike(4, "25"), target_load=Decimal(target))
    assert [option.verdict for option in found.options] == verdicts
    assert (found.recommended is None) is ("fits" not in verdicts)


def test_load_that_needs_all_gpus_saves_nothing_and_says_so() -> None:
    found = savings(alike(3, "70"))
    assert (found.options, found.recommended) == ((), None)
    assert "no smaller number of GPUs keeps each load at or below the target of 80 %" in " ".join(found.warnings)
    assert any("140 % load" in warning for warning in found.warnings)


def test_memory_must_fit_and_the_gap_is_said() -> None:
    found = savings(alike(4, "10", 6 * GIB), price=G4DN, gpu_memory_bytes=15 * GIB)
    (option,) = found.options
    assert (option.gpus, option.max_memory_bytes) == (2, 12 * GIB)
    assert any("24.0 GiB is needed, 15.0 GiB is available: 9.0 GiB too little" in warning for warning in found.warnings)


def test_memory_that_is_enough_in_sum_but_not_in_pieces() -> None:
    found = savings(alike(3, "5", 6 * GIB), gpu_memory_bytes=11 * GIB)
    assert found.options == ()
    assert any("cannot be split that way" in warning for warning in found.warnings)


def test_memory_that_the_even_spread_cannot_place_is_placed_by_size() -> None:
    """By load the two large ones would part, and leave no room for the middle ones."""
    sizes = {"a": (40, 2), "b": (30, 2), "c": (20, 6), "d": (10, 6), "e": (1, 4), "f": (1, 4)}
    work = [Work(name=name, load=Decimal(load), memory_bytes=memory * GIB) for name, (load, memory) in sizes.items()]
    found = savings(work, gpu_memory_bytes=12 * GIB, target_load=Decimal(100))
    assert found.options[0].gpus == 2
    assert found.options[0].max_memory_bytes == 12 * GIB


def test_memory_that_nobody_told_is_not_checked_and_that_is_said() -> None:
    for work, capacity in ((alike(2, "10"), 15 * GIB), (alike(2, "10", GIB), None), (alike(2, "10"), None)):
        found = savings(work, gpu_memory_bytes=capacity)
        assert any("memory was not checked" in warning for warning in found.warnings)
    assert not any(
        "not checked" in warning for warning in savings(alike(2, "10", GIB), gpu_memory_bytes=15 * GIB).warnings
    )


def test_without_a_price_there_are_no_amounts() -> None:
    found = savings(alike(4, "20"))
    assert (found.cost, found.options[0].cost, found.options[0].saving) == (None, None, None)
    assert found.options[0].saving_percent == 75


def test_one_gpu_has_nothing_to_consolidate() -> None:
    found = savings(alike(1, "5"), price=G4DN)
    assert (found.options, found.warnings, found.cost) == ((), (), Decimal("541.44"))


def test_what_cannot_be_is_refused() -> None:
    with fails(BadUsage, "memory_too_large", message="1.0 GiB too little"):
        savings(alike(2, "5", 16 * GIB), gpu_memory_bytes=15 * GIB)


@pytest.mark.parametrize(("number", "text"), [("25", "25"), ("0.7520", "0.752"), ("100", "100"), ("2E+2", "200")])
def test_numbers_are_plain(number: str, text: str) -> None:
    assert plain_number(Decimal(number)) == text


LOADS = st.decimals(min_value=0, max_value=100, places=1)
WORK = st.lists(st.tuples(LOADS, st.integers(0, 16)), min_size=1, max_size=9).map(
    lambda rows: [
        Work(name=f"GPU {number}", load=load, memory_bytes=memory * GIB) for number, (load, memory) in enumerate(rows)
    ]
)
PRICES = st.decimals(min_value="0.001", max_value=1000, places=3)
TARGETS = st.decimals(min_value=1, max_value=100, places=0)


def found_for(work: list[Work], price: Decimal, target: Decimal) -> Savings:
    cost = Price(per_hour=price, hours=Decimal(720))
    return savings(work, price=cost, target_load=target, gpu_memory_bytes=16 * GIB)


@given(WORK, PRICES, TARGETS)
def test_savings_are_never_negative_and_add_up(work: list[Work], price: Decimal, target: Decimal) -> None:
    found = found_for(work, price, target)
    assert found.cost is not None
    for option in found.options:
        assert option.saving >= 0
        assert option.cost + option.saving == found.cost
        assert 0 < option.saving_percent < 100


@given(WORK, PRICES, TARGETS)
def test_every_option_places_all_the_work_and_its_memory(work: list[Work], price: Decimal, target: Decimal) -> None:
    by_name = {one.name: one for one in work}
    for option in found_for(work, price, target).options:
        assert len(option.places) == option.gpus < len(work)
        assert sorted(name for place in option.places for name in place) == sorted(by_name)
        sums = [sum((by_name[name].load for name in place), Decimal(0)) for place in option.places]
        assert max(sums) == option.max_load_percent <= 100
        memory = [sum(by_name[name].memory_bytes or 0 for name in place) for place in option.places]
        assert max(memory) == option.max_memory_bytes
        assert max(memory) <= 16 * GIB
        assert option.recommended is (option.max_load_percent <= target)


@given(WORK, PRICES, TARGETS)
def test_options_are_monotone(work: list[Work], price: Decimal, target: Decimal) -> None:
    """More GPUs cost more, save less and take load off the fullest one; only the last may be recommended."""
    options = found_for(work, price, target).options
    for fewer, more in itertools.pairwise(options):
        assert fewer.gpus < more.gpus
        assert fewer.max_load_percent > more.max_load_percent
        assert (fewer.cost or 0) <= (more.cost or 0)
        assert (fewer.saving or 0) >= (more.saving or 0)
        assert not fewer.recommended


@given(WORK, PRICES, TARGETS, TARGETS)
def test_a_higher_target_never_needs_more_gpus(work: list[Work], price: Decimal, one: Decimal, other: Decimal) -> None:
    low, high = sorted((one, other))
    strict, loose = found_for(work, price, low).recommended, found_for(work, price, high).recommended
    if strict is not None:
        assert loose.gpus <= strict.gpus


@given(WORK, PRICES, TARGETS, st.randoms())
def test_the_order_of_gpus_never_matters(work: list[Work], price: Decimal, target: Decimal, order: object) -> None:
    mixed = list(work)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = found_for(work, price, target), found_for(mixed, price, target)
    assert (one.options, one.cost, one.total_load_percent) == (other.options, other.cost, other.total_load_percent)
