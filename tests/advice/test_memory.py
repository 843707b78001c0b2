"""Memory is arithmetic: sums, headroom, limits that add up, and by how much it does not fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpushare.advice.facts import GpuFacts
from gpushare.advice.memory import (
    CONTEXT_BYTES,
    LEAST_CONTEXT_BYTES,
    MPS_CONTEXT_BYTES,
    MPS_SERVER_BYTES,
    budget,
    equal_limit,
    limit_for,
)
from gpushare.advice.recipe_mps import memory_limits, size
from gpushare.advice.workload import Case, Workload
from gpushare.units import GIB, MIB, parse_memory_limit
from tests.advice.conftest import situation_of


def case(*sizes: tuple[int | None, int | None]) -> Case:
    return Case(workloads=tuple(Workload(memory=memory, processes=count) for memory, count in sizes))


def gpu(total: int | None) -> GpuFacts:
    return GpuFacts(index=0, memory_total_bytes=total)


def test_the_sum_by_hand() -> None:
    found = budget(case((6 * GIB, 4)), gpu(100 * GIB), mps=False)
    assert found.wanted_bytes == 24 * GIB
    assert found.needed_bytes == 24 * GIB + 4 * CONTEXT_BYTES
    assert found.headroom_bytes == 2 * GIB
    assert found.left_bytes == 98 * GIB - 24 * GIB - 4 * CONTEXT_BYTES
    assert found.most == 98 * GIB // (6 * GIB + CONTEXT_BYTES)


def test_under_mps_the_server_counts() -> None:
    found = budget(case((6 * GIB, 4)), gpu(100 * GIB), mps=True)
    assert found.left_bytes == 98 * GIB - MPS_SERVER_BYTES - 24 * GIB - 4 * MPS_CONTEXT_BYTES


def test_what_is_unknown_stays_unknown() -> None:
    for one, total in ((case((None, 4)), 80 * GIB), (case((GIB, None)), 80 * GIB), (case((GIB, 2)), None)):
        found = budget(one, gpu(total), mps=False)
        assert (found.fits, found.may_fit, found.sentence()) == (None, None, None)


def test_a_known_part_that_is_too_large_is_enough() -> None:
    found = budget(case((50 * GIB, 2), (None, 1)), gpu(80 * GIB), mps=False)
    assert found.fits is False


def test_a_workload_of_a_list_is_one_process() -> None:
    assert budget(case((GIB, None), (2 * GIB, 3)), gpu(80 * GIB), mps=False).wanted_bytes == 7 * GIB


def test_between_the_smallest_and_the_planned_context_it_may_fit() -> None:
    total = 100 * GIB
    room = 98 * GIB
    each = room // 4 - (CONTEXT_BYTES + LEAST_CONTEXT_BYTES) // 2
    found = budget(case((each, 4)), gpu(total), mps=False)
    assert (found.fits, found.may_fit) == (False, True)


@given(st.integers(MIB, 200 * GIB))
def test_a_limit_leaves_room_for_what_it_is_for(memory: int) -> None:
    assert limit_for(memory) - 614 * MIB >= memory
    assert parse_memory_limit(size(limit_for(memory))) == limit_for(memory)


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
    bare = sum((one.memory or 0) * (one.processes or 1) for one in situation.case.workloads)
    assert total <= max(usable, bare)
