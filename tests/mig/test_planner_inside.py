"""The planner inside GPU instances: idle compute instances may go there, and the GPU instance itself stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from gpushare.mig.plan import Action, MigPlan, NoPlan
from gpushare.mig.planner import Target, plan_add, plan_exact
from gpushare.mig.profile import GpuInstance, Layout
from gpushare.mig.wish import parse_wish
from tests.mig.boards import SOMEBODY, calls_of, instance, layout

PARTS = [(), (1,), (1, 1), (2, 1), (3,), (1, 1, 1)]
THREE = next(profile for profile in layout("h100").profiles if profile.name == "3g.40gb")


def test_compute_instances_take_the_place_of_idle_ones_and_the_gpu_instance_stays() -> None:
    plan = plan_add([layout("h100", "3g.40gb:0!", "3g.40gb:4")], parse_wish("1c.3g.40gb*2"), may_destroy=True)
    assert [step.action for step in calls_of(plan)] == [Action.DESTROY_COMPUTE, *[Action.CREATE_COMPUTE] * 2]
    assert (plan.cost.idle_destroyed, plan.cost.created, plan.cost.slices_destroyed) == (1, 2, 0)
    assert [gpu.start for gpu in plan.gpus[0].kept] == [0, 4]


def test_only_as_many_compute_instances_go_as_must() -> None:
    plan = plan_add([layout("h100", "3g.40gb:0!", "3g.40gb:4/1,1,1")], parse_wish("2c.3g.40gb"), may_destroy=True)
    assert [len(gpu.compute) for gpu in plan.gpus[0].destroyed] == [2]
    assert plan.cost.created == 1


def test_the_hint_names_the_compute_instances_that_would_go() -> None:
    refused = plan_add([layout("h100", "3g.40gb:0!", "3g.40gb:4/1,1,1")], parse_wish("1c.3g.40gb"))
    assert "gpushare mig destroy 0/404/0;" in refused.hint


def test_a_busy_part_goes_only_when_it_may() -> None:
    """Its idle neighbours make room for a wish that names the place."""
    one = instance(THREE, 0, compute=(1, 1, 1), busy_parts=(1,), identity=7)
    gpu = Layout(gpu=0, profiles=layout("h100").profiles, instances=(one, instance(THREE, 4, busy=True)))
    beside = plan_add([gpu], parse_wish("1c.3g.40gb:0*2"), may_destroy=True)
    assert [part.id for gone in beside.gpus[0].destroyed for part in gone.compute] == [0, 2]
    refused = plan_add([gpu], parse_wish("1c.3g.40gb"), may_destroy=True)
    ((_, in_the_way),) = refused.would_go
    assert in_the_way.busy
    assert len(in_the_way.compute) == 1
    held = replace(gpu, instances=(replace(one, holders=SOMEBODY), gpu.instances[1]))
    assert isinstance(plan_add([held], parse_wish("1c.3g.40gb:0*2"), may_destroy=True), NoPlan)


def least(there: list[GpuInstance], wish: str, *, with_others: bool) -> tuple[int, int, int, int] | None:
    """Return the least (busy, named, idle, created) on a GPU that two 3g fill, by trying every way."""
    (request,) = parse_wish(wish)
    asked = request.compute
    costs = []
    for one in there:
        if request.start not in {None, one.start}:
            continue
        if not one.busy:
            lost = max(1, len(one.compute))
            costs.append((0, lost * (one.name is not None), lost * (one.name is None), 1 + len(asked)))
        for size in range(len(one.compute) + 1):
            for gone in combinations(one.compute, size):
                kept = [part for part in one.compute if part not in gone]
                sizes = [*asked, *(part.profile.slices for part in kept)]
                if one.name is not None or sum(sizes) > 3 or sizes.count(2) > 1 or (kept and not with_others):
                    continue
                stays = any(part.busy for part in kept)
                if not any(part.busy for part in gone) and (not stays or request.start is not None):
                    costs.append((0, 0, size, len(asked)))
    return min(costs, default=None)


@pytest.mark.parametrize("wish", ["1c.3g.40gb", "2c.3g.40gb", "1c.3g.40gb*2", "1c.3g.40gb:4", "2c.3g.40gb:4"])
@pytest.mark.parametrize("with_others", [True, False])
def test_the_least_goes_inside_and_outside(wish: str, *, with_others: bool) -> None:
    """Against every way there is, over what two 3g can hold."""
    for first, second, mark in product(PARTS, PARTS, ["", "busy", "named"]):
        busy = (0,) if mark == "busy" and second else ()
        other = instance(THREE, 4, compute=second, busy_parts=busy, name="train" if mark == "named" else None)
        there = [instance(THREE, 0, compute=first), other]
        gpu = Layout(gpu=0, profiles=layout("h100").profiles, instances=tuple(there))
        plan = plan_add([gpu], parse_wish(wish), may_destroy=True, with_others=with_others)
        expected = least(there, wish, with_others=with_others)
        assert (None if isinstance(plan, NoPlan) else tuple(plan.cost[:4])) == expected, (first, second, mark)


def test_the_hint_evicts_only_parts_that_somebody_is_in() -> None:
    one = instance(THREE, 0, compute=(1, 1, 1), busy_parts=(1,), identity=7)
    gpu = Layout(gpu=0, profiles=layout("h100").profiles, instances=(one,))
    refused = plan_exact([gpu], {0: parse_wish("3g:0")})
    assert "(GPU 0, GPU instance 7, compute instances 0, 1, 2; busy: 4711 python3)" in refused.message
    assert refused.hint.endswith(" --evict 0/7/1")
    assert isinstance(plan_exact([gpu], {0: parse_wish("3g:0")}, evict=[Target(0, 7, 1)]), MigPlan)
