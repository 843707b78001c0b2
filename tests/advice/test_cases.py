"""The worked cases: each situation of the references, with the answer and its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare.advice.advise import advise
from gpushare.advice.rules import Kind, Outcome
from gpushare.base.errors import BadUsage
from gpushare.base.model import Way
from tests.advice.conftest import situation_of

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
VALID = [case for case in CASES if "invalid" not in case]


def advised(case: dict[str, Any]) -> Any:
    return advise(situation_of(*case["workloads"], host=case["host"], facts=case.get("facts"), root=case.get("root")))


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 30
    assert all(case["source"] for case in CASES)


@pytest.mark.parametrize("case", VALID, ids=[case["situation"] for case in VALID])
def test_case(case: dict[str, Any]) -> None:
    advice = advised(case)
    if "wins" in case:
        assert (None if advice.best is None else advice.best.way.value) == case["wins"]
    for way, rule in case.get("refused", {}).items():
        verdict = advice.verdict_on(Way(way))
        assert verdict.outcome is Outcome.REFUSED, way
        assert rule in {one.rule for one in verdict.reasons_of(Kind.VETO)}, way
    for way in case.get("fits", ()):
        assert advice.verdict_on(Way(way)).outcome is not Outcome.REFUSED, way
    for way, rule in case.get("conditions", {}).items():
        verdict = advice.verdict_on(Way(way))
        assert verdict.outcome is Outcome.CONDITION, way
        assert rule in {one.rule for one in verdict.reasons_of(Kind.CONDITION)}, way
    lines = "\n".join(line.command or line.what for line in advice.recipe.lines) if advice.recipe else ""
    for words in case.get("types", ()):
        assert words in lines.replace("'", "") or words in lines
    for words in case.get("without", ()):
        assert words not in lines


def test_an_unknown_word_is_refused() -> None:
    (case,) = [case for case in CASES if "invalid" in case]
    with pytest.raises(BadUsage, match="'production' is not a property"):
        advised(case)
