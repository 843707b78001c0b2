"""The planner against brute force, over the whole state space of every kind of board."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.gpu_models import GpuModel
from gpushare.mig.plan import Action, MigPlan, NoPlan, Why
from gpushare.mig.planner import can_add, plan_add, plan_exact
from gpushare.mig.profile import Layout
from gpushare.mig.wish import Request, Wish
from tests.mig.boards import SHAPES, calls_of, instance
from tests.mig.brute import Place, State, brute_of

STATUS = ("busy", "named", "idle", "idle")
KEYS = [model.key for model in SHAPES]
BY_KEY = {model.key: model for model in SHAPES}


def layout_of(model: GpuModel, have: dict[Place, str], gpu: int = 0) -> Layout:
    """Return the layout that brute force calls ``have``."""
    profiles = model.profiles
    by_name = {profile.name: profile for profile in profiles}
    instances = tuple(
        instance(by_name[name], start, busy=status == "busy", name=f"n{start}" if status == "named" else None)
        for (name, start), status in sorted(have.items())
    )
    return Layout(gpu=gpu, profiles=profiles, instances=instances)


def wish_for(names: list[str]) -> Wish:
    """Return one request for each name."""
    return tuple(Request(profile=name) for name in names)


def check_consistent(plan: MigPlan, before: Layout, model: GpuModel) -> None:
    """What is kept and created is a layout that the driver allows, and the steps lead there in an order that works."""
    brute = brute_of(model.key)
    present = {(instance.profile.name, instance.start) for instance in before.instances}
    for call in calls_of(plan):
        place = call.instance.place
        if call.action is Action.DESTROY_GPU_INSTANCE:
            present.remove(place)
        elif call.action is Action.CREATE_GPU_INSTANCE:
            assert place not in present
            present.add(place)
            assert brute.allowed(present)
    after = {gpu.place for gpu in plan.gpus[0].kept} | {new.instance.place for new in plan.gpus[0].created}
    assert present == after == {gpu.place for gpu in plan.gpus[0].after}
    assert brute.lost(frozenset(after)) == plan.cost.capacity_lost


def random_case(rng: random.Random, key: str, state: State | None = None) -> tuple[dict[Place, str], list[str]]:
    """Return a layout of the state space with somebody in it, and a wish of one to four instances."""
    brute = brute_of(key)
    state = rng.choice(brute.states) if state is None else state
    have = {place: rng.choice(STATUS) for place in sorted(state)}
    names = [rng.choice(sorted(brute.profiles)) for _ in range(rng.randint(1, 4))]
    return have, names


def check_case(key: str, have: dict[Place, str], names: list[str]) -> None:
    model, brute = BY_KEY[key], brute_of(key)
    layout, wish = layout_of(model, have), wish_for(names)
    answers = {
        "add": (plan_add([layout], wish), brute.change(have, names, exact=False, add_only=True)),
        "change": (plan_add([layout], wish, may_destroy=True), brute.change(have, names, exact=False)),
        "exact": (plan_exact([layout], {0: wish}), brute.change(have, names, exact=True)),
    }
    assert can_add(layout, wish) == (answers["add"][1] is not None)
    possible = any(sorted(names) == list(content) for content in brute.by_content)
    for mode, (plan, expected) in answers.items():
        if isinstance(plan, NoPlan):
            assert expected is None, mode
            assert (plan.why is Why.NEVER) == (not possible), mode
        else:
            assert tuple(plan.cost) == expected, mode
            check_consistent(plan, layout, model)


@pytest.mark.parametrize("key", KEYS)
def test_cost_is_the_least_from_any_layout(key: str) -> None:
    """Every layout there is (on the odd board every fifth), each with a wish and with busy, named and idle ones."""
    rng = random.Random(key)  # noqa: S311 - not for secrets
    for state in brute_of(key).states[:: 5 if key == "h100-pcie-80gb" else 1]:
        check_case(key, *random_case(rng, key, state))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_several_gpus_share_a_wish_at_the_least_total(seed: int) -> None:
    """Each instance of the wish on each GPU in turn, by brute force; two kinds of board, equal GPUs among them."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    keys = [rng.choice(["a30-24gb", "a30-24gb", "a100-40gb"]) for _ in range(rng.randint(2, 3))]
    states = [rng.choice(brute_of(key).states) for key in keys]
    haves = [{place: rng.choice(STATUS) for place in sorted(state)} for state in states]
    if rng.random() < 0.4 and keys[0] == keys[1]:
        haves[1] = haves[0]
    names = [rng.choice(["1g.6gb", "2g.12gb", "1g.6gb+me", "4g.24gb", "1g.5gb", "2g.10gb"]) for _ in range(3)]
    offered = {name for key in keys for name in brute_of(key).profiles}
    names = [name for name in names if name in offered] or [min(brute_of(keys[0]).profiles)]
    expected = None
    for homes in product(range(len(keys)), repeat=len(names)):
        costs = []
        for gpu, key in enumerate(keys):
            mine = [name for name, home in zip(names, homes, strict=True) if home == gpu]
            costs.append(brute_of(key).change(haves[gpu], mine, exact=False) if _has(key, mine) else None)
        if None not in costs:
            total = tuple(sum(fields) for fields in zip(*costs, strict=True))
            expected = total if expected is None or total < expected else expected
    layouts = [layout_of(BY_KEY[key], have, gpu) for gpu, (key, have) in enumerate(zip(keys, haves, strict=True))]
    plan = plan_add(layouts, wish_for(names), may_destroy=True)
    assert (None if isinstance(plan, NoPlan) else tuple(plan.cost)) == expected


def _has(key: str, names: list[str]) -> bool:
    return set(names) <= set(brute_of(key).profiles)


@pytest.mark.parametrize("key", KEYS)
def test_every_content_of_a_mig_parted_file_is_reached_from_empty(key: str) -> None:
    """mig-parted tries orderings until one works; whatever any ordering reaches, the planner reaches at once."""
    brute, model = brute_of(key), BY_KEY[key]
    for content, states in brute.by_content.items():
        plan = plan_exact([layout_of(model, {})], {0: wish_for(list(content))})
        assert sorted(new.instance.profile.name for new in plan.gpus[0].created) == list(content)
        assert plan.cost.capacity_lost == min(brute.lost(state) for state in states)


@pytest.mark.parametrize("key", KEYS)
def test_equal_counts_are_equal_configurations(key: str) -> None:
    """As mig-parted asserts: the same devices in other places need no change."""
    brute, model = brute_of(key), BY_KEY[key]
    for state in brute.states[::7]:
        names = [name for name, _ in state]
        plan = plan_exact([layout_of(model, dict.fromkeys(state, "busy"))], {0: wish_for(names)})
        assert not plan.changes


def test_state_spaces_are_as_large_as_published() -> None:
    sizes = {key: len(brute_of(key).states) for key in KEYS}
    assert sizes["a100-40gb"] == 2319
    assert sizes["rtx-pro-6000-blackwell-96gb"] == 717
    assert sizes["a30-24gb"] == 76
