"""The engine alone: what reasons make of a way, with rules that say what a test wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.advice import rules as engine
from gpushare.advice import situation
from gpushare.advice.advise import advise, with_way
from gpushare.advice.questions import QUESTIONS, next_question, other_answers
from gpushare.advice.rules import BASE, Kind, Outcome, Reason, WayVerdict, verdicts, winner
from gpushare.advice.ways import ADVISED
from gpushare.base.model import Way
from tests.advice.conftest import situation_of
from tests.tables import each


def reason(kind: Kind, weight: int = 0, rule: str = "rule") -> Reason:
    """Return a reason."""
    return Reason(rule=rule, kind=kind, text="text", source="source", weight=weight)


def verdict(way: Way, outcome: Outcome = Outcome.FITS, score: int = 0) -> WayVerdict:
    """Return a verdict without reasons."""
    return WayVerdict(way=way, outcome=outcome, reasons=(), score=score)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the only rules say these reasons of a way."""
    said: dict[Way, tuple[Reason, ...]] = {}
    rule = SimpleNamespace(reasons=lambda _: [(way, reason) for way in said for reason in said[way]])
    monkeypatch.setattr(engine, "rules", lambda: (rule,))

    def tell(way: Way, *reasons: Reason) -> WayVerdict:
        said[way] = reasons
        return next(verdict for verdict in verdicts(situation_of({"processes": 2})) if verdict.way is way)

    return tell


def test_what_speaks_for_and_against_is_added_to_where_a_way_begins(say: Any) -> None:
    found = say(Way.MPS, reason(Kind.FOR, 7), reason(Kind.AGAINST, 3), reason(Kind.CONDITION, 100))
    assert found.score == BASE[Way.MPS] + 7 - 3
    assert say(Way.TIMESLICE).score == BASE[Way.TIMESLICE]


def test_one_veto_refuses_whatever_speaks_for_it(say: Any) -> None:
    assert say(Way.MPS).outcome is Outcome.FITS
    assert say(Way.MPS, reason(Kind.FOR, 1000)).outcome is Outcome.FITS
    assert say(Way.MPS, reason(Kind.AGAINST, 1000)).outcome is Outcome.FITS
    assert say(Way.MPS, reason(Kind.CONDITION)).outcome is Outcome.CONDITION
    refused = say(Way.MPS, reason(Kind.FOR, 1000), reason(Kind.CONDITION), reason(Kind.VETO))
    assert refused.outcome is Outcome.REFUSED
    assert refused.refused


def test_reasons_come_by_their_weight_for_the_answer(say: Any) -> None:
    kinds = (Kind.AGAINST, Kind.FOR, Kind.CONDITION, Kind.VETO)
    found = say(Way.MPS, *(reason(kind) for kind in kinds))
    assert [reason.kind for reason in found.reasons] == [Kind.VETO, Kind.CONDITION, Kind.FOR, Kind.AGAINST]
    assert [one.kind for one in found.reasons_of(Kind.FOR, Kind.VETO)] == [Kind.VETO, Kind.FOR]
    assert found.reasons_of() == ()


def test_the_best_comes_first_and_what_is_refused_last(say: Any) -> None:
    say(Way.MIG, reason(Kind.VETO), reason(Kind.FOR, 1000))
    say(Way.MPS, reason(Kind.FOR, 500))
    found = verdicts(situation_of({"processes": 2}))
    assert len(found) == len(ADVISED)
    assert found[0].way is Way.MPS
    assert found[-1].way is Way.MIG
    fitting = [one.score for one in found if not one.refused]
    assert fitting == sorted(fitting, reverse=True)


def test_with_less_than_two_ways_there_is_nothing_to_measure(say: Any) -> None:
    assert say(Way.MEASURE).outcome is Outcome.FITS
    for way in ADVISED:
        if way not in {Way.MPS, Way.TIMESLICE, Way.MEASURE}:
            say(way, reason(Kind.VETO))
    assert say(Way.MEASURE).outcome is Outcome.FITS
    say(Way.MPS, reason(Kind.VETO))
    refused = say(Way.MEASURE)
    assert refused.outcome is Outcome.REFUSED
    assert [reason.rule for reason in refused.reasons] == ["nothing-to-compare"]


def test_what_only_measures_or_mends_is_no_answer() -> None:
    assert winner([]) is None
    assert winner([verdict(Way.MEASURE), verdict(Way.FIX)]) is None
    assert winner([verdict(Way.MEASURE), verdict(Way.MPS, Outcome.REFUSED)]) is None
    first, second = verdict(Way.MEASURE), verdict(Way.MPS)
    assert winner([first, second]) is first
    assert winner([verdict(Way.MIG, Outcome.REFUSED), second]) is second
    assert winner([verdict(Way.MPS, Outcome.CONDITION)]) is not None


def test_every_way_begins_somewhere() -> None:
    assert set(BASE) == set(ADVISED)
    # What needs least comes first where nothing else is said.
    assert max(BASE, key=lambda way: BASE[way]) is Way.TIMESLICE


@pytest.mark.parametrize(
    ("text", "expected"),
    each(
        (["several and not pair", "latency or several", "unknown(latency)", "not (pair or no(same_user))"], True),
        (["latency and pair", "yes(latency)", "no(latency)"], False),
        (["latency and several", "not latency"], None),
    ),
)
def test_a_condition_is_true_false_or_unknown(text: str, expected: bool | None) -> None:
    assert engine.parse_condition(text)(situation_of({"processes": 4, "users": "same"}), Way.MPS) is expected


@pytest.mark.parametrize("text", ["several + 1", "nonsense", "yes(several, pair)(pair)", "__import__('os')", "1"])
def test_a_condition_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        engine.parse_condition(text)


def test_every_case_and_every_division_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer asks what other answers would change, and a question what its answers would: much is asked twice."""
    judged: list[Any] = []
    divided: list[Any] = []
    (rule, *others), instances_for = engine.rules(), situation.instances_for
    counting = SimpleNamespace(reasons=lambda made: judged.append(made.case) or rule.reasons(made))
    monkeypatch.setattr(engine, "rules", lambda: (counting, *others))
    monkeypatch.setattr(
        situation, "instances_for", lambda layout, shares: divided.append(shares) or instances_for(layout, shares)
    )
    asked = situation_of({"processes": 3, "memory": "6G"})
    found = advise(asked)
    assert len(judged) <= 1 + sum(len(question.answers) for question in QUESTIONS)
    advise(asked)
    assert with_way(found, Way.TIMESLICE, cap=50.0).situation.new_instances(Way.MIG) is asked.new_instances(Way.MIG)
    list(other_answers(with_way(found, Way.TIMESLICE, cap=50.0).situation))
    next_question(asked)
    assert len(judged) == len(set(judged))
    assert len(divided) == len(set(divided)) <= 3
