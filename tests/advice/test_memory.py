"""Memory is arithmetic: sums, headroom, limits that add up, and by how much it does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.advice.case import Case, Workload, workload_of
from gpushare.advice.facts import GpuFacts
from gpushare.advice.recipe import memory_limits
from gpushare.advice.situation import (
    CONTEXT_BYTES,
    LEAST_CONTEXT_BYTES,
    MPS_CONTEXT_BYTES,
    MPS_SERVER_BYTES,
    Budget,
    budget,
    equal_limit,
    limit_for,
)
from gpushare.base.units import GIB, MIB, parse_memory_limit, size_option
from tests.advice.conftest import situation_of


def case(*sizes: tuple[int | None, int | None]) -> Case:
    return Case(workloads=tuple(Workload(memory=memory, processes=count) for memory, count in sizes))


def gpu(total: int | None) -> GpuFacts:
    return GpuFacts(index=0, memory_total_bytes=total)


def test_the_sum_by_hand() -> None:
    found = budget(case((6 * GIB, 4)), gpu(100 * GIB), mps=False)
    assert (found.wanted_bytes, found.needed_bytes) == (24 * GIB, 24 * GIB + 4 * CONTEXT_BYTES)
    assert (found.headroom_bytes, found.left_bytes) == (2 * GIB, 98 * GIB - 24 * GIB - 4 * CONTEXT_BYTES)
    assert found.most == 98 * GIB // (6 * GIB + CONTEXT_BYTES)
    # Under MPS the server counts.
    found = budget(case((6 * GIB, 4)), gpu(100 * GIB), mps=True)
    assert found.left_bytes == 98 * GIB - MPS_SERVER_BYTES - 24 * GIB - 4 * MPS_CONTEXT_BYTES


def test_what_is_unknown_stays_unknown() -> None:
    for one, total in ((case((None, 4)), 80 * GIB), (case((GIB, None)), 80 * GIB), (case((GIB, 2)), None)):
        found = budget(one, gpu(total), mps=False)
        assert (found.fits, found.may_fit, found.calculation()) == (None, None, None)


def test_a_known_part_that_is_too_large_is_enough() -> None:
    found = budget(case((50 * GIB, 2), (None, 1)), gpu(80 * GIB), mps=False)
    assert found.fits is False


def test_a_workload_of_a_list_is_one_process() -> None:
    assert budget(case((GIB, None), (2 * GIB, 3)), gpu(80 * GIB), mps=False).wanted_bytes == 7 * GIB


@given(st.integers(MIB, 200 * GIB))
def test_a_limit_leaves_room_for_what_it_is_for(memory: int) -> None:
    assert limit_for(memory) - 614 * MIB >= memory
    assert parse_memory_limit(size_option(limit_for(memory))) == limit_for(memory)


@given(st.integers(0, 200 * GIB), st.integers(1, 60))
def test_equal_limits_add_up(usable: int, processes: int) -> None:
    limit = equal_limit(usable, processes)
    assert limit is None or limit * processes <= usable


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([None, "1G", "5G", "20G", "30G"])), min_size=2, max_size=4)
)
def test_the_limits_of_a_list_add_up_or_are_the_bare_needs(parts: list[tuple[int, str | None]]) -> None:
    words = [{"processes": count, "memory": memory, "users": "same"} for count, memory in parts]
    situation = situation_of(*words)
    limits, usable = memory_limits(situation), situation.under_mps.usable_bytes or 0
    total = sum((limit or 0) * count for limit, (count, _) in zip(limits, parts, strict=True))
    bare = sum((workload.memory or 0) * (workload.processes or 1) for workload in situation.case.workloads)
    assert total <= max(usable, bare)


# -- at the edges ----------------------------------------------------------------------------------


def filled(left: int, *, mps: bool = False, count: int = 4) -> Budget:
    """Return the budget of processes that leave so much free, or so much too little."""
    context, server = (MPS_CONTEXT_BYTES, MPS_SERVER_BYTES) if mps else (CONTEXT_BYTES, 0)
    each = (98 * GIB - server - left) // count - context
    assert (98 * GIB - server - left) % count == 0
    return budget(case((each, count)), gpu(100 * GIB), mps=mps)


@pytest.mark.parametrize("mps", [False, True])
def test_what_fills_it_to_the_last_byte_fits_and_one_more_does_not(mps: bool) -> None:
    exact, over = filled(0, mps=mps), filled(-4, mps=mps)
    assert (exact.left_bytes, exact.fits, exact.may_fit) == (0, True, True)
    assert (over.left_bytes, over.fits) == (-4, False)
    # Under MPS a context was measured: there is no smaller one.
    assert over.may_fit is not mps
    saved = 4 * (CONTEXT_BYTES - LEAST_CONTEXT_BYTES)
    assert [filled(-left).may_fit for left in (saved, saved + 4)] == [True, False]


def test_the_largest_alone_fits_to_the_last_byte() -> None:
    for largest, fits in ((98 * GIB - CONTEXT_BYTES, True), (98 * GIB - CONTEXT_BYTES + 1, False)):
        found = budget(case((largest, 3), (GIB, 1)), gpu(100 * GIB), mps=False)
        assert found.one_fits is fits
        assert found.most == int(fits)
    assert budget(case((None, 3)), gpu(100 * GIB), mps=False).one_fits is None
    assert budget(case((GIB, 3)), gpu(None), mps=False).one_fits is None


def test_how_many_fit_is_of_the_largest_and_unknown_where_no_size_is() -> None:
    assert budget(case((None, 3)), gpu(100 * GIB), mps=False).most is None
    assert budget(case((GIB, 3)), gpu(None), mps=False).most is None
    # A GPU that the server alone fills has room for nobody, not for less than nobody.
    assert budget(case((GIB, 3)), gpu(MPS_SERVER_BYTES // 2), mps=True).most == 0


def test_headroom_is_rounded_up() -> None:
    assert budget(case((GIB, 1)), gpu(101), mps=False).headroom_bytes == 3
    assert budget(case((GIB, 1)), gpu(100), mps=False).headroom_bytes == 2


@pytest.mark.parametrize(("text", "size"), [("6G", 6 * GIB), ("80 gb", 80 * GIB), ("1500M", 1500 * MIB)])
def test_sizes_are_binary(text: str, size: int) -> None:
    assert workload_of({"memory": text}).memory == size


def test_the_sum_in_words() -> None:
    left = budget(case((6 * GIB, 4)), gpu(100 * GIB), mps=True).calculation()
    assert left == (
        "24.0 GiB + 4 x 248 MiB CUDA context = 25.0 GiB of 100.0 GiB (2 % kept free, 66 MiB MPS server): 73.0 GiB left"
    )
    over = budget(case((60 * GIB, 4)), gpu(100 * GIB), mps=False).calculation()
    assert over == (
        "240.0 GiB + 4 x 500 MiB CUDA context = 242.0 GiB of 100.0 GiB (2 % kept free): 144.0 GiB too much, 1 would fit"
    )


def test_what_was_measured_is_planned_with() -> None:
    found = [CONTEXT_BYTES, LEAST_CONTEXT_BYTES, MPS_CONTEXT_BYTES, MPS_SERVER_BYTES]
    assert [one // MIB for one in found] == [500, 286, 248, 66]
    assert [one % MIB for one in found] == [0, 0, 0, 0]


def test_equal_limits_are_readable_and_none_where_nothing_is_left() -> None:
    assert equal_limit(98 * GIB, 4) == 24 * GIB + 512 * MIB
    assert equal_limit(10 * GIB - 1, 10) == 768 * MIB
    # A limit of which the program itself would see nothing.
    assert equal_limit(5 * GIB, 10) is None
    assert equal_limit(7 * 512 * MIB, 7) is None
    assert limit_for(GIB) == GIB + 768 * MIB
