"""How good the advice is on the held-out cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.advice_cases import GOALS, Judged, figures, judge, load, met, table

HERE = Path(__file__).parent
WAYS = {
    "error", "fix-app", "measure", "mig", "mig+mps", "mig+timeslice", "mps", "mps+streams", "mps-priority",
    "mps-static", "none", "slices", "streams", "swap", "timeslice", "turns", "vgpu", "whole-gpu",
}  # fmt: skip


FILES = {
    "held_out.yaml": 60,
    "held_out_2.yaml": 30,
    "held_out_3.yaml": 60,
    "held_out_4.yaml": 24,
    "held_out_5.yaml": 68,
    "held_out_6.yaml": 26,
    "held_out_7.yaml": 24,
}


@pytest.fixture(scope="module", params=FILES)
def judged(request: pytest.FixtureRequest) -> list[Judged]:
    return [judge(case) for case in load(HERE / request.param)]


@pytest.mark.parametrize(("name", "number"), FILES.items())
def test_cases_are_whole(name: str, number: int) -> None:
    cases = load(HERE / name)
    assert len(cases) == len({case["name"] for case in cases}) == number
    for case in cases:
        assert {"name", "told", "host", "acceptable", "preferred", "source"} <= set(case), case["name"]
        assert set(case["preferred"]) <= set(case["acceptable"]) <= WAYS, case["name"]
        assert {rule[4:] for rule in case.get("harmful", ()) if rule.startswith("way ")} <= WAYS, case["name"]


def test_every_case_is_answered(judged: list[Judged]) -> None:
    """No case is refused, and no command line of a case is wrong."""
    assert [one.name for one in judged if one.way == "error"] == []


@pytest.mark.parametrize("goal", GOALS)
def test_goal_is_met(judged: list[Judged], goal: str) -> None:
    assert met(goal, figures(judged)[goal]), "\n" + table(judged)
