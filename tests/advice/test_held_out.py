"""How good the advice is on the held-out cases."""

from __future__ import annotations

import pytest

from benchmarks.advice_cases import GOALS, Judged, figures, judge, load, met, table

WAYS = {
    "error", "fix-app", "measure", "mig", "mig+mps", "mig+timeslice", "mps", "mps+streams", "mps-priority",
    "mps-static", "none", "streams", "timeslice", "vgpu", "whole-gpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return [judge(case) for case in load()]


def test_cases_are_whole() -> None:
    cases = load()
    assert len(cases) == len({case["name"] for case in cases}) == 60
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
