"""What the planner must and must not do: busy, named, unknown, filling, media, destroying, refusing, order."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.units import GIB
from gpushare.gpu_models import GpuModel
from gpushare.mig.board import InstanceKind, board_of
from gpushare.mig.plan import Action, MigPlan, NoPlan, Why
from gpushare.mig.planner import Target, plan_add, plan_destroy, plan_exact
from gpushare.mig.profile import GpuInstance, Layout
from gpushare.mig.wish import Need, Request, parse_wish
from tests.mig.boards import SHAPES, SOMEBODY, calls_of, layout

RTX = "rtx-pro-6000-blackwell-96gb"


def made(plan: MigPlan | NoPlan) -> list[str]:
    """Return what a plan creates, ``GPU/profile:start``."""
    return [f"{gpu.gpu}/{change.instance}" for gpu in plan.gpus for change in gpu.created]


def gone(plan: MigPlan | NoPlan) -> list[str]:
    """Return what a plan destroys."""
    return [f"{gpu.gpu}/{change.instance}" for gpu in plan.gpus for change in gpu.destroyed]


def with_instance(gpu: Layout, number: int, **changes: object) -> Layout:
    """Return a layout with one instance changed."""
    instances = list(gpu.instances)
    instances[number] = replace(instances[number], **changes)  # type: ignore[arg-type]
    return replace(gpu, instances=tuple(instances))


def test_a_wish_goes_to_the_gpu_that_loses_least_inside_before_empty() -> None:
    gpus = [layout("h100", gpu=0), layout("h100", "3g.40gb:4!", "2g.20gb:0!", gpu=1)]
    assert made(plan_add(gpus, parse_wish("2g"))) == ["1/2g.20gb:2"]
    assert made(plan_add(gpus, parse_wish("4g"))) == ["0/4g.40gb:0"]
    gpus = [layout("h100", gpu=0), layout("h100", "3g.40gb:0/1", "3g.40gb:4!", gpu=1)]
    assert made(plan_add(gpus, parse_wish("2c.3g.40gb"))) == ["1/3g.40gb:0"]
    assert made(plan_add(gpus, parse_wish("2c.3g.40gb"), with_others=False)) == ["0/3g.40gb:4"]


def test_only_adding_destroys_nothing_and_says_what_would_go() -> None:
    gpu = layout("h100", "3g.40gb:0", "3g.40gb:4!")
    refused = plan_add([gpu], parse_wish("1g"))
    assert refused.why is Why.BLOCKED
    assert [(index, one.instance.start) for index, one in refused.would_go] == [(0, 0)]
    assert "3g.40gb:0 (GPU 0, GPU instance 400; idle)" in refused.message
    assert gone(plan_add([gpu], parse_wish("1g"), may_destroy=True)) == ["0/3g.40gb:0"]


def test_a_busy_instance_goes_only_when_it_is_named() -> None:
    gpu = layout("h100", "7g.80gb:0!")
    refused = plan_add([gpu], parse_wish("1g"), may_destroy=True)
    assert "busy" in refused.message
    assert "--evict" in refused.hint
    assert refused.instead is not None
    assert gone(refused.instead) == ["0/7g.80gb:0"]
    assert isinstance(plan_exact([gpu], {0: ()}), NoPlan)
    assert gone(plan_exact([gpu], {0: ()}, evict=[Target(0, 800)])) == ["0/7g.80gb:0"]


def test_evict_permits_and_does_not_demand() -> None:
    gpu = layout("h100", "3g.40gb:4!")
    assert gone(plan_exact([gpu], {0: parse_wish("3g")}, evict=[Target(0, 404)])) == []


@pytest.mark.parametrize("place", ["gpu instance", "compute instance"])
def test_unknown_holders_count_as_busy(place: str) -> None:
    gpu = layout("h100", "7g.80gb:0")
    one = gpu.instances[0]
    compute = tuple(replace(part, holders=None) for part in one.compute)
    gpu = with_instance(gpu, 0, **({"holders": None} if place == "gpu instance" else {"compute": compute}))
    assert isinstance(plan_add([gpu], parse_wish("1g"), may_destroy=True), NoPlan)
    assert isinstance(plan_destroy([gpu], [Target(0, one.id)]), NoPlan)


def test_an_empty_gpu_instance_is_filled_and_a_named_one_is_not() -> None:
    gpu = layout("h100", "3g.40gb:0/")
    plan = plan_add([gpu], parse_wish("3g"))
    assert plan.gpus[0].created[0].instance is gpu.instances[0]
    assert [step.action for step in calls_of(plan)] == [Action.CREATE_COMPUTE]
    named = with_instance(gpu, 0, name="train")
    assert made(plan_add([named], parse_wish("3g"))) == ["0/3g.40gb:4"]


PARTS = [(), (1,), (1, 1), (2,), (2, 1), (3,)]


@pytest.mark.parametrize("wish", ["1c.3g.40gb", "2c.3g.40gb", "1c.3g.40gb*2", "3g.40gb", "1c.3g.40gb:4"])
@pytest.mark.parametrize("with_others", [True, False])
def test_compute_instances_come_into_what_has_room(wish: str, *, with_others: bool) -> None:
    """Against the rules written down once more, over all that two 3g and a 1g can hold."""
    (request,) = parse_wish(wish)
    asked = request.compute or (3,)
    for first, second, mark in product([None, *PARTS], [None, *PARTS], ["", "!", "=train"]):
        there = {4: first, 0: second}
        texts = [
            f"3g.40gb:{start}{mark if start else ''}/{','.join(map(str, parts))}"
            for start, parts in there.items()
            if parts is not None
        ]
        plan = plan_add([layout("h100", *texts)], parse_wish(wish), with_others=with_others)

        def takes(start: int, parts: tuple[int, ...] | None, mark: str = mark) -> bool:
            strangers = mark if start else ""
            if (
                parts is None
                or sum(parts) + sum(asked) > 3
                or (2 in asked and 2 in parts)
                or (parts and not with_others)
            ):
                return False
            return strangers != "=train" and (strangers != "!" or (request.start == 4 and bool(request.compute)))

        starts = [start for start in (0, 4) if request.start in {None, start}]
        if any(takes(start, there[start]) for start in starts):
            assert isinstance(plan, MigPlan), texts
            assert (plan.cost.created, gone(plan)) == (len(asked), []), texts
            (new,) = plan.gpus[0].created
            assert not new.whole
            assert [step.action for step in calls_of(plan)] == [Action.CREATE_COMPUTE] * len(asked)
        elif any(there[start] is None for start in starts):
            assert isinstance(plan, MigPlan), texts
            assert (plan.cost.created, gone(plan)) == (1 + len(asked), []), texts
        else:
            assert isinstance(plan, NoPlan), texts


def test_the_hint_names_what_would_go() -> None:
    gpu = layout("h100", "3g.40gb:0", "3g.40gb:4!")
    refused = plan_add([gpu], parse_wish("1g"))
    assert "gpushare mig destroy 0/400;" in refused.hint
    assert "--may-destroy" in refused.hint
    busy = plan_exact([gpu], {0: ()})
    assert busy.hint.endswith(" --evict 0/404")
    many = plan_exact([layout("h100", *(f"1g.10gb:{start}!" for start in range(7)))], {0: ()})
    assert many.hint.endswith(" --evict INSTANCE...")


def test_media_once_per_gpu() -> None:
    assert isinstance(plan_add([layout("h100", "1g.10gb+me:0!")], parse_wish("1g+me")), NoPlan)
    gpus = [layout("h100", gpu=0), layout("h100", gpu=1)]
    homes = {text[0] for text in made(plan_add(gpus, parse_wish("1g+me*2")))}
    assert homes == {"0", "1"}
    never = plan_add(gpus, parse_wish("1g+me*3"))
    assert never.why is Why.NEVER
    assert never.message == "1g+me*3 does not fit on these 2 GPUs, even empty"


def test_the_drivers_count_is_a_limit() -> None:
    gpu = layout("h100", "1g.10gb:0", "1g.10gb:1!")
    few = tuple(replace(p, instances=2) if p.name == "1g.10gb" else p for p in gpu.profiles)
    # Seven compute slices still: the full instance tells.
    gpu = replace(gpu, profiles=few)
    assert isinstance(plan_add([gpu], parse_wish("1g")), NoPlan)
    for wish in ("1g", "1g,2g"):
        plan = plan_add([gpu], parse_wish(wish), may_destroy=True)
        assert gone(plan) == ["0/1g.10gb:0"]


def test_explicit_places_are_kept_to() -> None:
    assert made(plan_add([layout("h100")], parse_wish("3g.40gb:0 1g:4"))) == ["0/3g.40gb:0", "0/1g.10gb:4"]
    gpu = layout("h100", "3g.40gb:4!")
    assert isinstance(plan_add([gpu], parse_wish("3g:4")), NoPlan)
    assert gone(plan_exact([layout("h100", "3g.40gb:4")], {0: parse_wish("3g:0")})) == ["0/3g.40gb:4"]


def test_a_bad_order_for_the_driver_is_no_trouble() -> None:
    """``-cgi 19,19,14,9`` fails with the driver's own placement."""
    plan = plan_exact([layout("h100")], {0: parse_wish("19,19,14,9")})
    assert [text.split(":")[0] for text in made(plan)] == ["0/3g.40gb", "0/2g.20gb", "0/1g.10gb", "0/1g.10gb"]


def test_one_slice_changes_and_every_busy_instance_stays() -> None:
    gpus = [layout("a100-80gb", "3g.40gb:4!", "2g.20gb:2", "1g.10gb:0!", "1g.10gb:1!", gpu=n) for n in range(8)]
    plan = plan_exact(gpus, {5: parse_wish("3g 1g*4")})
    assert gone(plan) == ["5/2g.20gb:2"]
    assert made(plan) == ["5/1g.10gb:2", "5/1g.10gb:3"]
    assert [gpu.changes for gpu in plan.gpus] == [n == 5 for n in range(8)]


def test_steps_free_before_they_take() -> None:
    gpu = layout("h100", "3g.40gb:0/1,1", "1g.10gb:4!")
    plan = plan_exact([gpu], {0: parse_wish("1g*2 2c.3g.40gb:0 1c.3g.40gb:0")})
    steps = [(step.action.name, step.instance.profile.name) for step in calls_of(plan)]
    assert steps == [
        ("DESTROY_COMPUTE", "3g.40gb"),
        ("CREATE_COMPUTE", "3g.40gb"),
        ("CREATE_GPU_INSTANCE", "1g.10gb"),
        ("CREATE_COMPUTE", "1g.10gb"),
    ]


def test_all_goes_out_before_a_gpu_instance_does() -> None:
    plan = plan_destroy([layout("h100", "3g.40gb:0/1,1,1")], [Target(0, 400)])
    actions = [step.action for step in calls_of(plan)]
    assert actions == [Action.DESTROY_COMPUTE] * 3 + [Action.DESTROY_GPU_INSTANCE]
    assert plan.cost.idle_destroyed == 3


def test_destroying_the_last_compute_instance_takes_the_gpu_instance_along() -> None:
    gpu = layout("h100", "3g.40gb:0/1,1")
    one = plan_destroy([gpu], [Target(0, 400, 1)])
    assert [step.action for step in calls_of(one)] == [Action.DESTROY_COMPUTE]
    both = plan_destroy([gpu], [Target(0, 400, 0), Target(0, 400, 1)])
    assert calls_of(both)[-1].action is Action.DESTROY_GPU_INSTANCE


def test_a_busy_one_is_destroyed_when_it_is_named_to_be_evicted() -> None:
    gpu = layout("h100", "3g.40gb:0!")
    assert isinstance(plan_destroy([gpu], [Target(0, 400)], evict=[Target(1, 400)]), NoPlan)
    assert gone(plan_destroy([gpu], [Target(0, 400)], evict=[Target(0, 400)])) == ["0/3g.40gb:0"]


def test_a_busy_neighbour_inside_the_gpu_instance_stays() -> None:
    gpu = layout("h100", "3g.40gb:0/1,1")
    busy = replace(gpu.instances[0].compute[0], holders=SOMEBODY)
    gpu = with_instance(gpu, 0, compute=(busy, gpu.instances[0].compute[1]))
    plan = plan_exact([gpu], {0: parse_wish("2c.3g.40gb 1c.3g.40gb")})
    assert [part.id for part in plan.gpus[0].destroyed[0].compute] == [1]
    assert [part.profile.name for part in plan.gpus[0].created[0].compute] == ["2c"]
    assert isinstance(plan_exact([gpu], {0: parse_wish("3g")}), NoPlan)
    assert isinstance(plan_destroy([gpu], [Target(0, 400)]), NoPlan)
    assert isinstance(plan_destroy([gpu], [Target(0, 400, 1)]), MigPlan)


def test_a_need_finds_its_profile_on_each_kind_of_gpu() -> None:
    wish = (Request(profile=Need(memory_bytes=20 * GIB), count=2),)
    plan = plan_add([layout("a30", "4g.24gb:0!", gpu=0), layout("h100", gpu=1)], wish)
    assert {text.split(":")[0] for text in made(plan)} == {"1/3g.40gb"}
    assert {text.split(":")[0] for text in made(plan_add([layout("a30"), layout("h100", gpu=1)], wish))} == {
        "0/4g.24gb",
        "1/3g.40gb",
    }


def test_what_no_gpu_ever_has() -> None:
    with pytest.raises(NotSupported):
        plan_add([layout("h100"), layout("a30", gpu=1)], parse_wish("3g.71gb"))
    with pytest.raises(NotSupported):
        plan_add([], parse_wish("3g"))
    with pytest.raises(BadUsage):
        plan_add([layout("h100")], parse_wish("3g:1"))


@pytest.mark.parametrize(
    ("model", "wish"),
    [
        ("h100", "7g 1g"),
        ("rtx-pro-6000", "1g+me 2g+me.all"),
        ("rtx-pro-6000", "1g 2g+me.all"),
        ("h100-pcie", "4g 1g*4"),
    ],
)
def test_never_together(model: str, wish: str) -> None:
    never = plan_exact([layout(model)], {0: parse_wish(wish)})
    assert never.why is Why.NEVER
    assert "do not fit together on GPU 0, even empty" in never.message
    assert never.instead is None


def test_an_instance_of_a_profile_that_is_gone_is_left_or_destroyed_whole() -> None:
    """After a driver update a name may differ from those offered; its place is taken all the same."""
    gpu = layout("h100", "3g.40gb:0")
    old: GpuInstance = replace(gpu.instances[0], profile=replace(gpu.instances[0].profile, name="3g.39gb"))
    gpu = replace(gpu, instances=(old,))
    assert made(plan_add([gpu], parse_wish("3g"))) == ["0/3g.40gb:4"]
    assert gone(plan_exact([gpu], {0: parse_wish("3g:0")})) == ["0/3g.39gb:0"]


def test_the_same_question_has_the_same_answer() -> None:
    gpus = [layout("h100", "1g.10gb:0!", "2g.20gb:4", gpu=n) for n in range(4)]
    plans = {str(plan_add(gpus, parse_wish("2g*3 1g*5"), may_destroy=True)) for _ in range(3)}
    assert len(plans) == 1
    backwards = plan_add(gpus, parse_wish("1g*5 2g*3"), may_destroy=True)
    assert isinstance(backwards, MigPlan)
    assert str(backwards) in plans


@pytest.mark.parametrize("model", SHAPES, ids=lambda model: model.key)
def test_no_arrangement_has_more_of_a_profile_than_was_asked_or_fit(model: GpuModel) -> None:
    board = board_of(Layout(gpu=0, uuid="GPU-0", profiles=model.profiles, instances=()))
    for limit in (1, 2):
        # Of the smallest profiles most fit.
        kinds = (
            InstanceKind(board.number[board.profiles[0].name]),
            InstanceKind(board.number[board.profiles[-1].name]),
        )
        counts = [arrangement.counts for arrangement in board.arrangements(kinds, (limit, limit))]
        most = [min(limit, board.limits[kind.profile]) for kind in kinds]
        assert all(count <= bound for one in counts for count, bound in zip(one, most, strict=True))
        assert {one[0] for one in counts} >= {0, 1}
