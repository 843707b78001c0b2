"""Which question still decides: only those whose answers lead to different advice are asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.advise import answer_of, with_answer
from gpushare.advice.engine import verdicts, winner
from gpushare.advice.workload import Isolation, Pattern

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.ways import Way


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question; ``answers`` are the words that a user may type, and what each means."""

    field: str
    text: str
    answers: tuple[tuple[str, Any], ...]


_YES_NO: Final = (("yes", True), ("no", False))
# In the order of how often they decide.
QUESTIONS: Final = (
    Question(field="same_user", text="Do all processes belong to the same user?", answers=_YES_NO),
    Question(
        field="isolation",
        text="What must hold between them: nothing, a memory quota, a fault of one spares the others, or full isolation?",
        answers=(
            ("none", frozenset()),
            ("quota", frozenset({Isolation.QUOTA})),
            ("fault", frozenset({Isolation.FAULT})),
            ("full", frozenset({Isolation.FULL})),
        ),
    ),
    Question(field="latency", text="Is there a latency target for single requests?", answers=_YES_NO),
    Question(
        field="saturating", text="Does one process alone fill the GPU (measured, not utilization)?", answers=_YES_NO
    ),
    Question(
        field="pattern",
        text="How does the work come?",
        answers=tuple((one.value, one) for one in Pattern),
    ),
    Question(field="cuda_graphs", text="Do they launch CUDA graphs (LLM engines do)?", answers=_YES_NO),
    Question(field="code", text="Can the program be changed?", answers=_YES_NO),
    Question(field="root", text="Can you become root?", answers=_YES_NO),
)


def next_question(situation: Situation, skip: frozenset[str] = frozenset()) -> Question | None:
    """Return the first open question whose answers still lead to different ways; None when none does.

    Either by itself, or together with the answer to one other open question: that all belong to one user decides
    once it is known that they are small.
    """
    open_ones = [one for one in QUESTIONS if one.field not in skip and _is_open(situation, one)]
    for question in open_ones:
        others = (other for other in open_ones if other is not question)
        worlds = [
            situation,
            *(with_answer(situation, other.field, value) for other in others for _, value in other.answers),
        ]
        if any(len(ways_of(world, question)) > 1 for world in worlds):
            return question
    return None


def _is_open(situation: Situation, question: Question) -> bool:
    alone = question.field == "same_user" and situation.case.processes == 1
    return not alone and answer_of(situation, question.field) is None


def ways_of(situation: Situation, question: Question) -> set[Way | None]:
    """Return the winners of all answers to a question."""
    found = (winner(verdicts(with_answer(situation, question.field, value))) for _, value in question.answers)
    return {None if one is None else one.way for one in found}
