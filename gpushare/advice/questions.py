"""The questions that decide, each once: how it is asked, and what each answer means. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpushare.advice.case import Isolation, Pattern, Role, any_of
from gpushare.advice.place import place
from gpushare.base.model import Way
from gpushare.base.values import dataclass

if TYPE_CHECKING:
    from gpushare.advice.place import Part
    from gpushare.advice.situation import Situation


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: the word that users type, the value of the property, and the answer as part of a sentence."""

    word: str
    value: Any
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """One property of the case, with its answers. ``text`` is how it is asked; None: it never is.

    ``pair``: only of a production and an opportunistic job, or only of others; None: of both. ``deciding``: an open
    question lowers the confidence; the others count as "no" until answered.
    """

    field: str
    text: str | None
    answers: tuple[Answer, ...]
    pair: bool | None = None
    deciding: bool = False

    @property
    def title(self) -> str:
        return "same user" if self.field == "same_user" else self.field.replace("_", " ")


def _yes_no_answers(yes: str, no: str = "") -> tuple[Answer, ...]:
    """Return the answers yes and no with these texts."""
    return (Answer(word="yes", value=True, text=yes), Answer(word="no", value=False, text=no))


def _isolation_answer(word: str, text: str, *kinds: Isolation) -> Answer:
    return Answer(word=word, value=frozenset(kinds), text=text)


# The most decisive first. An answer with an empty text can be given, but is never among what would change the advice.
QUESTIONS: Final = (
    Question(
        field="same_user",
        text="Do all processes belong to the same user?",
        answers=_yes_no_answers("all belong to the same user", "they belong to different users"),
        deciding=True,
    ),
    Question(
        field="isolation",
        text="What isolation do they need: none, a memory quota, fault isolation, or full isolation?",
        answers=(
            _isolation_answer("none", "no isolation is needed"),
            _isolation_answer("quota", "a memory quota is needed", Isolation.QUOTA),
            _isolation_answer("fault", "a fault in one process must not end the others", Isolation.FAULT),
            _isolation_answer("full", "", Isolation.FULL),
        ),
        deciding=True,
    ),
    Question(
        field="latency",
        text="Is there a latency target per request?",
        answers=_yes_no_answers("there is a latency target"),
        deciding=True,
    ),
    Question(
        field="saturating",
        text="Does one process fill the GPU (measured throughput, not utilization)?",
        answers=_yes_no_answers("one process fills the GPU", "no single process fills the GPU"),
        pair=False,
        deciding=True,
    ),
    Question(
        field="production_saturating",
        text="Does the production job alone fill the GPU (measured throughput, not utilization)?",
        answers=_yes_no_answers("production alone fills the GPU", "production does not fill the GPU"),
        pair=True,
        deciding=True,
    ),
    Question(
        field="gaps",
        text="Does the production job wait between requests, so that the GPU is idle in between?",
        answers=_yes_no_answers(
            "production waits between requests (--needs gaps)", "production never waits (--needs no-gaps)"
        ),
        pair=True,
    ),
    Question(
        field="saturating",
        text="Does the opportunistic job alone fill the GPU?",
        answers=_yes_no_answers("the opportunistic job fills the GPU"),
        pair=True,
        deciding=True,
    ),
    Question(
        field="bandwidth_bound",
        text="Does the opportunistic job saturate the memory bandwidth?",
        answers=_yes_no_answers("the opportunistic job saturates the memory bandwidth"),
        pair=True,
    ),
    Question(
        field="pattern",
        text="What is the load pattern?",
        answers=(
            Answer(word="interactive", value=Pattern.INTERACTIVE, text="it is interactive work"),
            Answer(word="bursty", value=Pattern.BURSTY, text=""),
            Answer(word="steady", value=Pattern.STEADY, text="it is steady work"),
        ),
        deciding=True,
    ),
    Question(
        field="progress",
        text="Must each of them keep advancing, instead of waiting until the one before it has ended?",
        answers=_yes_no_answers(
            "each of them has to advance (--needs progress)", "only the total time counts (--needs no-progress)"
        ),
        pair=False,
    ),
    Question(
        field="trusted", text=None, answers=(Answer(word="no", value=False, text="they do not trust each other"),)
    ),
    Question(
        field="bandwidth_bound",
        text="Does each of them saturate the memory bandwidth?",
        answers=_yes_no_answers("they saturate the memory bandwidth"),
        pair=False,
    ),
    Question(field="bandwidth_qos", text=None, answers=_yes_no_answers("memory bandwidth must be guaranteed")[:1]),
    Question(
        field="cuda_graphs",
        text="Do they launch CUDA graphs (LLM engines do)?",
        answers=_yes_no_answers("they launch CUDA graphs"),
    ),
    Question(field="code", text="Can the program be changed?", answers=_yes_no_answers("the code can be changed")),
    Question(
        field="destroy",
        text="May idle MIG instances be destroyed for it?",
        answers=_yes_no_answers("idle MIG instances may be destroyed (--destroy)"),
    ),
    Question(
        field="root",
        text="Can you become root?",
        answers=_yes_no_answers("you can become root", "you cannot become root"),
    ),
    Question(field="running", text=None, answers=_yes_no_answers("they are already running", "they can be restarted")),
    Question(field="vms", text=None, answers=_yes_no_answers("they are virtual machines")[:1]),
    Question(field="io_bound", text=None, answers=_yes_no_answers("the GPU waits for input")[:1]),
    Question(
        field="occupied",
        text=None,
        answers=(Answer(word="no", value=False, text="the programs on the GPU can be ended (--needs no-occupied)"),),
    ),
)
# Of a pair, each job has an answer of its own.
_ROLES: Final = {
    "production_saturating": Role.PRODUCTION,
    "saturating": Role.OPPORTUNISTIC,
    "bandwidth_bound": Role.OPPORTUNISTIC,
    "gaps": Role.PRODUCTION,
}


def with_answer(situation: Situation, field: str, value: Any) -> Situation:
    """Return the situation with this answer to one question; of a pair, some are about one of the two jobs."""
    case = situation.case
    if field in {"root", "destroy"}:
        # About the host, not about its workloads.
        return situation.variant(case=replace(case, **{field: value}))
    changes: dict[str, Any] = {"saturating" if field == "production_saturating" else field: value}
    if field == "same_user":
        # Given user names would contradict it.
        changes["user"] = None
    # The role that the question is about; None: all workloads.
    role = _ROLES.get(field) if situation.pair else None
    works = tuple(replace(work, **changes) if role in {None, work.role} else work for work in case.workloads)
    return situation.variant(case=replace(case, workloads=works))


def answer_of(situation: Situation, field: str) -> Any:
    """Return the answer to a question; None if it is open."""
    case = situation.case
    answers: dict[str, Any] = {
        "root": situation.may_be_root,
        "destroy": case.destroy or None,
        "same_user": case.same_user,
        "isolation": case.wanted_isolation,
        "pattern": case.pattern,
        "production_saturating": situation.saturating,
        "gaps": situation.gaps,
    }
    if field in answers:
        return answers[field]
    if field == "saturating" and situation.pair:
        return any_of(work.saturating for work in case.workloads if work.role is Role.OPPORTUNISTIC)
    return case.any(field)


def _applies(situation: Situation, question: Question) -> bool:
    """Return whether a question can matter here."""
    if question.pair not in {None, situation.pair}:
        return False
    if question.field == "destroy":
        return any(not instance.busy for instance in situation.kept_instances)
    if question.field == "occupied":
        return bool(situation.gpu.processes)
    # One process has nobody to trust.
    return situation.case.processes != 1 or question.field not in {"same_user", "trusted"}


@dataclass(frozen=True, kw_only=True)
class OtherAnswer:
    """The way that another answer to a question would lead to. ``open``: the question is unanswered."""

    question: str
    text: str
    then: Way | None
    open: bool
    json_properties: ClassVar = ("then_title",)

    @property
    def then_title(self) -> str:
        return "nothing fits" if self.then is None else self.then.label


def other_answers(situation: Situation) -> Iterator[tuple[OtherAnswer, Part]]:
    """Yield every other possible answer to every question that can matter, with the first part of its placement."""
    for question in QUESTIONS:
        if not _applies(situation, question):
            continue
        current = answer_of(situation, question.field)
        for answer in question.answers:
            # Unless the user says otherwise, jobs are taken not to run already.
            is_default = current is None and answer.value is False and question.field == "running"
            if answer.text and not is_default and answer.value != current:
                part = _first_part_with(situation, question, answer)
                is_open = current is None
                yield OtherAnswer(question=question.field, text=answer.text, then=part.way, open=is_open), part


def _first_part_with(situation: Situation, question: Question, answer: Answer) -> Part:
    """Return the first part of the placement with this answer to a question."""
    return place(with_answer(situation, question.field, answer.value), separate=False)[0]


def next_question(situation: Situation, skip: frozenset[str] = frozenset()) -> Question | None:
    """Return the first open question whose answers lead to different ways, or None.

    It is enough if they do so after an answer to one other open question: whether all belong to one user decides only
    once it is known that none fills the GPU.
    """
    open_questions = [
        question
        for question in QUESTIONS
        if question.text is not None
        and question.field not in skip
        and _applies(situation, question)
        and answer_of(situation, question.field) is None
    ]
    for question in open_questions:
        others = (other for other in open_questions if other is not question)
        situations = [
            situation,
            *(with_answer(situation, other.field, answer.value) for other in others for answer in other.answers),
        ]
        for variant in situations:
            ways = {_first_part_with(variant, question, answer).way for answer in question.answers}
            if len(ways) > 1:
                return question
    return None
