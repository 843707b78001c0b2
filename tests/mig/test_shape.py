"""Shapes of GPUs: kept and read back, compared, and the way back to one, carried out on a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpushare.base.typed import parse_typed, plain_form
from gpushare.mig.plan import Action, GpuPlan
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Placement, Profile
from gpushare.mig.shape import (
    NOTHING,
    ComputeShape,
    Creation,
    GpuShape,
    InstanceShape,
    Proof,
    Restoration,
    differences,
    shape_of,
)
from tests.mig.boards import SHAPES, SOMEBODY

BOARDS = [model.profiles for model in SHAPES]
# GPU instances by (profile, start); in each the compute instances as (slices, start).
Model = dict[tuple[str, int], list[tuple[int, int | None]]]


@st.composite
def gpu_instances(draw: st.DrawFn, profiles: tuple[Profile, ...]) -> tuple[GpuInstance, ...]:
    """Draw GPU instances that do not overlap, each with none, some or all of its compute slices taken."""
    taken, found = 0, []
    for profile in draw(st.lists(st.sampled_from(profiles), max_size=6)):
        place = draw(st.sampled_from(profile.placements or ()))
        if taken & place.mask:
            continue
        taken |= place.mask
        compute: list[ComputeInstance] = []
        at = 0
        for part in draw(st.lists(st.sampled_from(profile.compute or (profile.filling_compute,)), max_size=3)):
            if at + part.slices <= profile.slices:
                where = Placement(at, part.slices)
                compute.append(ComputeInstance(id=len(compute), profile=part, placement=where))
                at += part.slices
        identity = 100 * place.size + place.start
        found.append(GpuInstance(id=identity, profile=profile, placement=place, compute=tuple(compute)))
    return tuple(found)


@st.composite
def gpus(draw: st.DrawFn, count: int) -> tuple[Layout, ...]:
    """Draw several states of one GPU."""
    profiles = draw(st.sampled_from(BOARDS))
    states = [draw(gpu_instances(profiles)) for _ in range(count)]
    return tuple(Layout(gpu=2, uuid="GPU-2", profiles=profiles, instances=one) for one in states)


def mixed(*groups: tuple[GpuInstance, ...]) -> tuple[GpuInstance, ...]:
    """Return the instances of all groups that have room beside those before them."""
    taken, found = 0, []
    for one in (one for group in groups for one in group):
        if not taken & one.placement.mask:
            taken |= one.placement.mask
            found.append(one)
    return tuple(found)


def restoration(*arguments: Any) -> tuple[GpuPlan, list[str]]:
    way = Restoration(*arguments)
    return way.plan, way.lost


def shape(layout: Layout) -> GpuShape:
    return shape_of(layout, mig_enabled=True)


def model_of(instances: Iterable[GpuInstance]) -> Model:
    return {
        instance.place: sorted(
            (part.profile.slices, part.placement.start if part.placement else None) for part in instance.compute
        )
        for instance in instances
    }


def shaped(profile: str, start: int, size: int, parts: list[tuple[int, int | None]], name: str | None) -> InstanceShape:
    return InstanceShape(profile, start, size, tuple(ComputeShape(*part) for part in parts), name)


def model_of_shape(instances: Iterable[InstanceShape]) -> Model:
    return {instance.place: sorted(map(tuple, instance.compute)) for instance in instances}  # type: ignore[misc]


def all_of(*layouts: Layout) -> Proof:
    """Return the proof that a change made all instances of these, whatever number the driver gave them."""
    return Proof(
        made=tuple(
            Creation(
                gpu="GPU-2", profile=instance.profile.name, start=instance.start, instance=instance.id, compute=part
            )
            for layout in layouts
            for instance in layout.instances
            for part in (None, *(part.id for part in instance.compute))
        ),
        begun=None,
    )


def carried_out(layout: Layout, plan: GpuPlan) -> Model:
    """Return what the calls of a plan leave, refusing what a driver refuses."""
    there = model_of(layout.instances)
    sizes = {instance.place: instance.placement.mask for instance in layout.instances}
    for call in plan.calls():
        one, part = call.instance, call.compute
        slot = None if part is None else (part.profile.slices, part.placement.start if part.placement else None)
        if call.action is Action.DESTROY_COMPUTE and part is not None and slot is not None:
            assert not part.busy
            there[one.place].remove(slot)
        elif call.action is Action.DESTROY_GPU_INSTANCE:
            assert there.pop(one.place) == []
            del sizes[one.place]
        elif call.action is Action.CREATE_GPU_INSTANCE:
            assert not any(mask & one.placement.mask for mask in sizes.values())
            there[one.place], sizes[one.place] = [], one.placement.mask
        elif slot is not None:
            there[one.place].append(slot)
            assert sum(slices for slices, _ in there[one.place]) <= one.profile.slices
    return {place: sorted(parts) for place, parts in there.items()}


# -- keeping and comparing -------------------------------------------------------------------------


@given(gpus(1), st.sampled_from([None, True, False]), st.text(max_size=5))
def test_a_shape_is_read_back_as_it_was_kept(found: tuple[Layout, ...], mode: bool | None, name: str) -> None:
    named = replace(found[0], instances=tuple(replace(each, name=name or None) for each in found[0].instances))
    one = shape_of(named, mig_enabled=mode)
    assert parse_typed(GpuShape, json.loads(json.dumps(plain_form(one)))) == one
    assert model_of_shape(one.instances) == model_of(found[0].instances)
    assert differences(one, one) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"uuid": 1}, {"index": None}, {"index": 4096}, {"mig_enabled": 1}, {"instances": None}, {"instances": [1]},
        {"instances": [["x", 0, 1, [], None]]}, {"instances": [["1g", -1, 1, [], None]]},
        {"instances": [["1g", 0, 1, [[1]], None]]}, {"instances": [["1g", 0, 1, [], 7]]}, {"more": 1},
        {"instances": [[7, 0, 1, [], None]]}, {"instances": [["1g", 10**12, 1, [], None]]},
        {"instances": [["1g", 0, -1, [], None]]}, {"instances": [["1g", "0", 1, [], None]]},
    ],
)  # fmt: skip
def test_what_is_no_shape_is_refused(change: dict[str, object]) -> None:
    whole = {"uuid": "u", "index": 0, "mig_enabled": True, "instances": [["1g.10gb", 0, 1, [[1, None]], None]]}
    assert parse_typed(GpuShape, whole)
    with pytest.raises(ValueError):
        parse_typed(GpuShape, {**whole, **change})


def test_a_shape_has_no_more_in_the_journal_than_does_not_change_by_itself() -> None:
    one = shaped("3g.71gb", 4, 4, [(2, 0), (1, None)], "train")
    shape = GpuShape(uuid="GPU-1", index=1, mig_enabled=True, instances=(one,))
    kept = {
        "uuid": "GPU-1",
        "index": 1,
        "mig_enabled": True,
        "instances": [["3g.71gb", 4, 4, [[2, 0], [1, None]], "train"]],
    }
    assert json.loads(json.dumps(plain_form(shape))) == json.loads(json.dumps(kept))
    assert parse_typed(GpuShape, kept) == shape


def test_a_proof_is_read_back_as_it_was_kept() -> None:
    made = Creation(gpu="u", profile="1g.10gb", start=4, instance=7)
    part = replace(made, compute=0, uuid="MIG-1")
    begun = Creation(gpu="u", profile="1g.10gb", start=5, instance=8, slices=1, there=(0, 1))
    for proof in (NOTHING, Proof(made=(made, part), begun=begun)):
        assert parse_typed(Proof, json.loads(json.dumps(plain_form(proof)))) == proof
    for wrong in ({"made": [plain_form(begun) | {"more": 1}], "begun": None}, {"made": [[0]], "begun": None}, {}):
        with pytest.raises(ValueError):
            parse_typed(Proof, wrong)


@given(gpus(2))
def test_two_shapes_differ_in_words_only_when_they_differ(found: tuple[Layout, ...]) -> None:
    first, second = map(shape, found)
    assert not differences(first, first)
    models = model_of_shape(first.instances), model_of_shape(second.instances)
    assert bool(differences(first, second)) is (models[0] != models[1])
    for instance in first.instances:
        if instance.place not in models[1]:
            assert any(f"{instance} is there" in word for word in differences(first, second))
            assert any(f"{instance} is missing" in word for word in differences(second, first))


@pytest.mark.parametrize(
    ("now", "wanted", "same"),
    [
        ([(1, 0), (2, 1)], [(2, 1), (1, 0)], True),
        ([(1, 0)], [(1, None)], True),
        ([(1, 2), (1, 0)], [(1, None), (1, 2)], True),
        ([(1, 0), (1, 1)], [(1, None), (1, 2)], False),
        ([(1, 0)], [(1, 1)], False),
        ([(1, 0)], [(2, None)], False),
        ([(1, 0), (1, 1)], [(1, None)], False),
        ([], [(1, None)], False),
        ([], [], True),
    ],
)
def test_an_unknown_start_fits_any(
    now: list[tuple[int, int]], wanted: list[tuple[int, int | None]], same: bool
) -> None:
    def gpu(parts: list[tuple[int, int | None]]) -> GpuShape:
        return GpuShape(uuid="u", index=0, mig_enabled=True, instances=(shaped("3g.40gb", 0, 4, parts, None),))

    assert (differences(gpu(list(now)), gpu(wanted)) == ()) is same


def test_the_mode_is_compared_where_it_is_known() -> None:
    off, on, unknown = (GpuShape(uuid="u", index=3, mig_enabled=mode, instances=()) for mode in (False, True, None))
    assert differences(off, on) == ("GPU 3: MIG is off",)
    assert differences(on, off) == ("GPU 3: MIG is on",)
    assert differences(unknown, off) != ()
    assert differences(off, unknown) == ()


@given(gpus(2))
def test_the_shape_after_a_plan_is_what_its_calls_leave(found: tuple[Layout, ...]) -> None:
    now, wanted = found
    plan, lost = restoration(now, shape(wanted), all_of(now))
    assert not lost
    assert model_of(plan.after) == carried_out(now, plan)


# -- the way back ----------------------------------------------------------------------------------


@given(gpus(2), st.data())
def test_half_a_change_is_undone_exactly(found: tuple[Layout, ...], data: st.DataObject) -> None:
    before, after = found
    kept = data.draw(st.lists(st.sampled_from(before.instances or (None,)), unique=True))
    made = data.draw(st.lists(st.sampled_from(after.instances or (None,)), unique=True))
    middle = mixed(*([one for one in group if one is not None] for group in (kept, made)))  # type: ignore[arg-type]
    # Half made, too: without some of its compute instances.
    middle = tuple(replace(one, compute=one.compute[: data.draw(st.integers(0, 3))]) for one in middle)
    now = replace(before, instances=middle)
    plan, lost = restoration(now, shape(before), all_of(after))
    assert lost == []
    assert carried_out(now, plan) == model_of(before.instances)


@given(gpus(3))
def test_what_somebody_else_made_stays(found: tuple[Layout, ...]) -> None:
    before, after, other = found
    ours = {(instance.profile.name, instance.start) for instance in (*before.instances, *after.instances)}
    foreign = tuple(instance for instance in other.instances if (instance.profile.name, instance.start) not in ours)
    assume(foreign)
    now = replace(before, instances=mixed(foreign, before.instances, after.instances))
    plan, lost = restoration(now, shape(before), all_of(after))
    left = carried_out(now, plan)
    for one in foreign:
        place = (one.profile.name, one.start)
        assert left[place] == sorted(
            (part.profile.slices, part.placement.start) for part in one.compute if part.placement
        )
    # What is not as before is named.
    for instance in before.instances:
        if (instance.profile.name, instance.start) not in left:
            assert f"GPU 2: {instance.profile.name}:{instance.start} has no room" in lost


@given(gpus(2), st.data())
def test_what_is_in_use_stays_and_is_named(found: tuple[Layout, ...], data: st.DataObject) -> None:
    before, after = found
    assume(after.instances)
    busy = data.draw(st.sampled_from(after.instances))
    holders = data.draw(st.sampled_from([None, SOMEBODY]))
    if busy.compute and data.draw(st.booleans()):
        held = replace(busy, compute=(replace(busy.compute[0], holders=holders), *busy.compute[1:]))
    else:
        held = replace(busy, holders=holders)
    now = replace(before, instances=mixed((held,), after.instances))
    plan, lost = restoration(now, shape(before), all_of(after))
    left = carried_out(now, plan)
    place = (busy.profile.name, busy.start)
    assert place in left
    if place not in model_of(before.instances):
        assert f"GPU 2: {place[0]}:{place[1]} is in use and stays" in lost
    # And whatever is not as before has a word.
    if left != model_of(before.instances):
        assert lost


@given(gpus(1))
def test_a_compute_instance_that_somebody_else_made_stays(found: tuple[Layout, ...]) -> None:
    (now,) = found
    assume(any(instance.compute for instance in now.instances))
    one = next(instance for instance in now.instances if instance.compute)
    less = replace(
        now, instances=tuple(replace(one, compute=one.compute[1:]) if one is each else each for each in now.instances)
    )
    # Neither before nor after had it: it is not ours.
    plan, lost = restoration(now, shape(less), all_of(less))
    assert (plan.changes, lost) == (False, [])
    # The change was to make it: undone, it goes.
    plan, lost = restoration(now, shape(less), all_of(now))
    assert lost == []
    assert carried_out(now, plan) == model_of(less.instances)


def test_a_profile_that_is_offered_no_more_is_named() -> None:
    profiles = BOARDS[0]
    instance = shaped("9g.1gb", 0, 1, [(9, 0)], "x")
    before = GpuShape(uuid="u", index=0, mig_enabled=True, instances=(instance,))
    empty = Layout(gpu=0, uuid="u", profiles=profiles)
    plan, lost = restoration(empty, before, NOTHING)
    assert not plan.changes
    assert lost == ["GPU 0: 9g.1gb:0 'x' has no room"]
