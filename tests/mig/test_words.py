"""The lines of a plan: every call once and in order, each with the nvidia-smi command that does the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.mig.plan import Action, Call, MigPlan, NoPlan, shown_steps, steps_of
from gpushare.mig.planner import Target, plan_add, plan_destroy, plan_exact
from gpushare.mig.profile import Layout
from gpushare.mig.wish import parse_wish
from tests.mig.boards import MODELS, calls_of, layout


def planned(found: MigPlan | NoPlan) -> MigPlan:
    assert isinstance(found, MigPlan)
    return found


def test_a_change_in_words() -> None:
    board = layout("a100-80gb", "3g.40gb:4/2,1", "1g.10gb:0", gpu=3)
    plan = planned(plan_exact([board], {3: parse_wish("3g.40gb:0 1c.2g.20gb:4 1g.10gb:6")}))
    rows = [(row.what, row.command, row.undo) for row in shown_steps(plan)]
    where = "nvidia-smi mig -i 3"
    assert rows == [
        (
            "destroy compute instance 0 of GPU instance 100 on GPU 3",
            f"{where} -dci -gi 100 -ci 0",
            f"{where} -cci 0 -gi 100",
        ),
        ("destroy GPU instance 100 (1g.10gb) on GPU 3", f"{where} -dgi -gi 100", f"{where} -cgi 19:0"),
        (
            "destroy compute instance 0 of GPU instance 404 on GPU 3",
            f"{where} -dci -gi 404 -ci 0",
            f"{where} -cci 1 -gi 404",
        ),
        (
            "destroy compute instance 1 of GPU instance 404 on GPU 3",
            f"{where} -dci -gi 404 -ci 1",
            f"{where} -cci 0 -gi 404",
        ),
        ("destroy GPU instance 404 (3g.40gb) on GPU 3", f"{where} -dgi -gi 404", f"{where} -cgi 9:4"),
        (
            "create 3g.40gb:0 on GPU 3 with its compute instance",
            f"{where} -cgi 9:0 -C",
            "gpushare mig destroy 3g.40gb:0 -g 3",
        ),
        ("create 2g.20gb:4 on GPU 3", f"{where} -cgi 14:4", "gpushare mig destroy 2g.20gb:4 -g 3"),
        ("create 1c.2g.20gb in it", f"{where} -cci 0 -gi GI", f"{where} -dci -gi GI -ci CI"),
        (
            "create 1g.10gb:6 on GPU 3 with its compute instance",
            f"{where} -cgi 19:6 -C",
            "gpushare mig destroy 1g.10gb:6 -g 3",
        ),
    ]


def test_compute_instances_in_what_is_there() -> None:
    board = layout("a100-80gb", "3g.40gb:4/1")
    plan = planned(plan_exact([board], {0: parse_wish("1c.3g.40gb:4*3")}))
    assert [(row.what, row.command) for row in shown_steps(plan)] == [
        ("create 1c.3g.40gb in GPU instance 404 on GPU 0", "nvidia-smi mig -i 0 -cci 0 -gi 404"),
        ("create 1c.3g.40gb in GPU instance 404 on GPU 0", "nvidia-smi mig -i 0 -cci 0 -gi 404"),
    ]


def check(plan: MigPlan, board: Layout) -> None:
    called: list[tuple[str, Call]] = []
    for gpu in plan.gpus:
        for step in steps_of(gpu, lambda what, call: called.append((what, call))):
            before = len(called)
            step.do()
            done = [call for _, call in called[before:]]
            assert done
            assert {what for what, _ in called[before:]} == {step.what}
            assert re.match(rf"nvidia-smi mig -i {board.gpu} -(cgi|dgi|cci|dci) ", step.command), step.command
            goes = done[0].action in {Action.DESTROY_COMPUTE, Action.DESTROY_GPU_INSTANCE}
            assert step.undo is not None
            assert re.search(" -c[cg]i " if goes else " -dci | mig destroy ", step.undo), step.undo
            assert "None" not in f"{step.what}{step.command}{step.undo or ''}"
    # Each call is in one line, and in the order of the plan.
    assert [call for _, call in called] == calls_of(plan)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.short)
def test_every_profile_of_every_model(model: object) -> None:
    short = model.short  # type: ignore[attr-defined]
    for profile in layout(short).profiles:
        start = profile.placements[0].start if profile.placements else 0
        for part in profile.compute:
            board = layout(short, gpu=5)
            words = f"{part.name}.{profile.name}" if part.slices < profile.slices else profile.name
            check(planned(plan_add([board], parse_wish(words))), board)
            there = layout(short, f"{profile.name}:{start}/{part.slices}", gpu=5)
            check(planned(plan_destroy([there], [Target(5, there.instances[0].id)])), there)


@given(st.data())
def test_any_exact_change(data: st.DataObject) -> None:
    board = layout("h100-80gb", "3g.40gb:0/1,1", "1g.10gb:4", "1g.10gb:6")
    sizes = ["3g.40gb", "1g.10gb", "1c.3g.40gb", "2c.3g.40gb", "2g.20gb", "1g.20gb", "1c.2g.20gb"]
    wish = data.draw(st.lists(st.sampled_from(sizes), max_size=3))
    plan = plan_exact([board], {0: parse_wish(" ".join(wish)) if wish else ()})
    if isinstance(plan, MigPlan):
        check(plan, board)
