"""The advice: the winner with its recipe, the confidence, and what would change it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.case import Isolation, Pattern, Role, any_of, flags_like
from gpushare.advice.recipe import Line, Recipe, limits_sum, recipe
from gpushare.advice.rules import Kind, Outcome, Verdict, verdicts, winner
from gpushare.advice.situation import Situation, instances_sentence
from gpushare.advice.table import Mechanism
from gpushare.advice.ways import CONCURRENT, LEAVING, Way
from gpushare.base.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpushare.advice.case import Case, Workload
    from gpushare.advice.situation import Budget


class Confidence(str, Enum):
    """How certain the advice is."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another answer to one question: ``field`` and ``value`` of the workloads, and a text for people."""

    field: str
    value: Any
    text: str
    # Only for a production and an opportunistic job, or only for others; None: for both.
    pair: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """The way that another answer would lead to. ``open``: the question is unanswered."""

    field: str
    text: str
    way: Way | None
    open: bool


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice for one case on one GPU. ``best`` is None if nothing fits."""

    situation: Situation
    best: Verdict | None
    verdicts: tuple[Verdict, ...]
    recipe: Recipe | None
    budget: Budget
    # The sum of the memory limits of the recipe.
    limits_bytes: int | None
    confidence: Confidence
    confidence_why: str
    changes: tuple[Change, ...]
    # What the winner leaves unprotected.
    gaps: tuple[str, ...]
    notes: tuple[str, ...]
    # If the processes are placed on several GPUs: what is on each. ``situation`` is then the first of them.
    placed: tuple[Situation, ...] = ()
    # The case as it was asked, if ``situation`` has only a part of it.
    asked: Case | None = None

    def of(self, way: Way) -> Verdict:
        return next(one for one in self.verdicts if one.way is way)


# The other answers to each question, the most decisive first.
ALTERNATIVES: Final = (
    Alternative(field="same_user", value=True, text="all belong to the same user"),
    Alternative(field="same_user", value=False, text="they belong to different users"),
    Alternative(field="isolation", value=frozenset(), text="no isolation is needed"),
    Alternative(field="isolation", value=frozenset({Isolation.QUOTA}), text="a memory quota is needed"),
    Alternative(
        field="isolation", value=frozenset({Isolation.FAULT}), text="a fault in one process must not end the others"
    ),
    Alternative(field="latency", value=True, text="there is a latency target"),
    Alternative(field="saturating", value=True, text="one process fills the GPU", pair=False),
    Alternative(field="saturating", value=False, text="no single process fills the GPU", pair=False),
    Alternative(field="saturating", value=True, text="the opportunistic job fills the GPU", pair=True),
    Alternative(field="production_saturating", value=True, text="production alone fills the GPU", pair=True),
    Alternative(field="production_saturating", value=False, text="production does not fill the GPU", pair=True),
    Alternative(field="gaps", value=True, text="production waits between requests (--needs gaps)", pair=True),
    Alternative(field="gaps", value=False, text="production never waits (--needs no-gaps)", pair=True),
    Alternative(field="pattern", value=Pattern.INTERACTIVE, text="it is interactive work"),
    Alternative(field="pattern", value=Pattern.STEADY, text="it is steady work"),
    Alternative(field="progress", value=True, text="each of them has to advance (--needs progress)", pair=False),
    Alternative(field="progress", value=False, text="only the total time counts (--needs no-progress)", pair=False),
    Alternative(field="trusted", value=False, text="they do not trust each other"),
    Alternative(field="bandwidth_qos", value=True, text="memory bandwidth must be guaranteed"),
    Alternative(field="code", value=True, text="the code can be changed"),
    Alternative(field="cuda_graphs", value=True, text="they launch CUDA graphs"),
    Alternative(field="running", value=True, text="they are already running"),
    Alternative(field="running", value=False, text="they can be restarted"),
    Alternative(field="vms", value=True, text="they are virtual machines"),
    Alternative(field="io_bound", value=True, text="the GPU waits for input"),
    Alternative(
        field="bandwidth_bound", value=True, text="the opportunistic job saturates the memory bandwidth", pair=True
    ),
    Alternative(field="bandwidth_bound", value=True, text="they saturate the memory bandwidth", pair=False),
    Alternative(field="occupied", value=False, text="the programs on the GPU can be ended (--needs no-occupied)"),
    Alternative(field="destroy", value=True, text="idle MIG instances may be destroyed (--destroy)"),
    Alternative(field="root", value=True, text="you can become root"),
    Alternative(field="root", value=False, text="you cannot become root"),
)
# Questions that lower the confidence while unanswered; the others count as "no" until answered.
DECIDING: Final = ("same_user", "isolation", "saturating", "production_saturating", "latency", "pattern")

# The ones that decide most often.
_FIRST: Final = frozenset({"same_user", "saturating"})


def advise(situation: Situation) -> Advice:
    parts = _placed(situation)
    if not parts:
        return _advise(situation)
    found = _advise(parts[0])
    if found.best is None:
        return found
    recipes = [recipe(part, found.best.way) for part in parts]
    first = replace(
        recipes[0],
        lines=tuple(_at(part, line) for part, one in zip(parts, recipes, strict=True) for line in one.lines),
        undo=tuple(_at(part, line) for part, one in zip(parts, recipes, strict=True) for line in one.undo),
    )
    return replace(found, recipe=first, placed=parts, asked=situation.case, notes=_notes(situation))


def _at(part: Situation, line: Line) -> Line:
    return replace(line, what=f"GPU {part.gpu.index}: {line.what}")


def _placed(situation: Situation) -> tuple[Situation, ...]:
    """Return the parts of a case on the fewest idle GPUs of this model that hold it, the largest part first.

    Empty if one GPU is enough, or if the processes do not fit on all of them either.
    """
    case, alike = situation.case, [gpu for gpu in situation.gpus_to_have if gpu.name == situation.gpu.name]
    if len(alike) < _SEVERAL or case.processes is None or not situation.several or situation.together:
        return ()
    best = winner(verdicts(situation))
    if best is not None and best is _wanted(situation) and situation.in_turns(best.way) is None:
        return ()
    for count in range(_SEVERAL, len(alike) + 1):
        cases = _parts(case, count)
        parts = tuple(replace(situation, case=part, gpu=gpu) for part, gpu in zip(cases, alike, strict=False))
        way = _way_of_all(parts)
        if way is not None and (best is None or way is not best.way or situation.in_turns(way) is not None):
            return parts
    return ()


_SEVERAL: Final = 2
# The vetoes that say that one GPU is too small.
_TOO_SMALL: Final = frozenset({"mig-too-small", "memory-sum", "mps-clients"})


def _wanted(situation: Situation) -> Verdict:
    """Return the best verdict if the GPU were large enough."""
    usable = (one for one in verdicts(situation) if {veto.rule for veto in one.of(Kind.VETO)} <= _TOO_SMALL)
    return max(usable, key=lambda one: one.score)


def _way_of_all(parts: Sequence[Situation]) -> Way | None:
    """Return the way of the largest part, if it shares a GPU and every other part can use it too."""
    best = winner(verdicts(parts[0])) if len(parts) >= _SEVERAL else None
    if best is None or best.way not in CONCURRENT or best.way in {Way.VGPU, Way.STREAMS}:
        return None
    if parts[0].in_turns(best.way) is not None:
        return None
    rest = (one for part in parts[1:] for one in verdicts(part) if one.way is best.way)
    return None if any(one.refused for one in rest) else best.way


def _parts(case: Case, count: int) -> list[Case]:
    """Split a case into at most N parts. Groups and the workloads of a list stay together."""
    ones = case.workloads
    if len(ones) > 1:
        bins: list[list[Workload]] = [[] for _ in range(min(count, len(ones)))]
        for one in sorted(ones, key=_size, reverse=True):
            min(bins, key=lambda held: sum(map(_size, held))).append(one)
        return [replace(case, workloads=tuple(held)) for held in bins if held]
    (one,) = ones
    units = one.groups or one.processes or 1
    found = []
    for number in range(min(count, units)):
        own = units // count + (number < units % count)
        processes = own if one.groups is None else -(-(one.processes or 1) * own // units)
        groups = None if one.groups is None else own
        found.append(replace(case, workloads=(replace(one, processes=processes, groups=groups),)))
    return found


def _size(workload: Workload) -> int:
    return (workload.memory or 1) * (workload.processes or 1)


def _advise(situation: Situation) -> Advice:
    found = verdicts(situation)
    best = winner(found)
    changes = tuple(_changes(situation, None if best is None else best.way))
    confidence, why = _confidence(situation, best, changes)
    return Advice(
        situation=situation,
        best=best,
        verdicts=found,
        recipe=None if best is None else recipe(situation, best.way),
        budget=situation.plain if best is None else situation.budget_of(best.way),
        limits_bytes=None if best is None else limits_sum(situation, best.way),
        confidence=confidence,
        confidence_why=why,
        changes=changes,
        gaps=() if best is None else _gaps(situation, best.way),
        notes=_notes(situation),
    )


def with_answer(situation: Situation, field: str, value: Any) -> Situation:
    case = situation.case
    if field in {"root", "destroy"}:
        return situation.variant(case=replace(case, **{field: value}))
    if field == "same_user":
        # User names that were given would contradict it.
        ones = tuple(replace(one, same_user=value, user=None) for one in case.workloads)
        return situation.variant(case=replace(case, workloads=ones))
    # Of a pair, each job has an answer of its own.
    role = _ROLES.get(field) if situation.pair else None
    name = "saturating" if field == "production_saturating" else field
    ones = tuple(replace(one, **{name: value}) if role in {None, one.role} else one for one in case.workloads)
    return situation.variant(case=replace(case, workloads=ones))


_ROLES: Final = {
    "production_saturating": Role.PRODUCTION,
    "saturating": Role.OPPORTUNISTIC,
    "bandwidth_bound": Role.OPPORTUNISTIC,
    "gaps": Role.PRODUCTION,
}


def answer_of(situation: Situation, field: str) -> Any:
    case = situation.case
    if field == "root":
        return situation.may_be_root
    if field == "destroy":
        return case.destroy
    if field == "same_user":
        return case.same_user
    if field == "isolation":
        return case.wanted_isolation
    if field == "pattern":
        return case.pattern
    if field == "production_saturating":
        return situation.saturating
    if field == "gaps":
        return situation.gaps
    if field == "saturating" and situation.pair:
        return any_of(one.saturating for one in case.workloads if one.role is Role.OPPORTUNISTIC)
    return case.any(field)


def other_answers(situation: Situation) -> Iterator[tuple[Alternative, bool, tuple[Verdict, ...]]]:
    """Yield every other possible answer, whether the question is unanswered, and the verdicts with that answer."""
    for other in ALTERNATIVES:
        now = answer_of(situation, other.field)
        if now == other.value or (now is None and other.value is False and other.field == "running"):
            continue
        if not _applies(situation, other.field) or other.pair not in {None, situation.pair}:
            continue
        if situation.case.processes == 1 and other.field in {"same_user", "trusted"}:
            continue
        yield other, now is None, verdicts(with_answer(situation, other.field, other.value))


def _applies(situation: Situation, field: str) -> bool:
    """Return whether a question can matter on this GPU."""
    if field == "destroy":
        return any(not one.busy for one in situation.kept)
    return field != "occupied" or bool(situation.gpu.processes)


def _changes(situation: Situation, way: Way | None) -> list[Change]:
    found = []
    for other, is_open, then in other_answers(situation):
        best = winner(then)
        to = None if best is None else best.way
        if to is not way:
            found.append(Change(field=other.field, text=other.text, way=to, open=is_open))
    return found


def with_way(advice: Advice, way: Way, *, cap: float | None, changes: tuple[Change, ...]) -> Advice:
    """Return the advice with another winner and, if measured, the thread cap of its MPS clients in percent."""
    situation = advice.situation.variant(cap=cap)
    return replace(
        advice,
        situation=situation,
        best=advice.of(way),
        recipe=recipe(situation, way),
        budget=situation.budget_of(way),
        limits_bytes=limits_sum(situation, way),
        changes=changes,
        gaps=_gaps(situation, way),
    )


def _confidence(situation: Situation, best: Verdict | None, changes: tuple[Change, ...]) -> tuple[Confidence, str]:
    if best is None:
        return Confidence.HIGH, "arithmetic and hard limits"
    open_fields = list(dict.fromkeys(one.field for one in changes if one.open and one.field in DECIDING))
    first = [field for field in open_fields if field in _FIRST]
    if best.way is Way.MEASURE:
        return Confidence.LOW, "published results contradict each other here: measure your own program"
    missing = _not_given(situation) if best.way in {*CONCURRENT, *LEAVING} else []
    numbers = f"not given: {', '.join(missing)}"
    if open_fields:
        level = Confidence.LOW if first and len(open_fields) > 1 else Confidence.MEDIUM
        return level, open_text(open_fields) + (f"; {numbers}" if missing else "")
    elsewhere = _measured_elsewhere(situation, best.way)
    if elsewhere is not None:
        return Confidence.MEDIUM, elsewhere
    if any(one.contradiction for one in best.reasons):
        return Confidence.MEDIUM, "its sources disagree on a requirement of yours"
    if not best.of(Kind.FOR):
        return Confidence.MEDIUM, "it is the remaining option, without a particular advantage"
    if any(one.open for one in best.of(Kind.CONDITION)):
        return Confidence.MEDIUM, "its conditions are unconfirmed"
    if missing:
        return Confidence.MEDIUM, numbers
    return Confidence.HIGH, "all deciding questions are answered"


def _measured_elsewhere(situation: Situation, way: Way) -> str | None:
    """Return why what was measured may not be true here."""
    name = situation.gpu.name or ""
    if way is Way.SLICES and not any(one in name for one in ("H200", "H100")):
        return "slices were measured on an H200 and an H100; this GPU may differ"
    if way is Way.MPS_PRIORITY and "H200" not in name:
        return "its cap was measured on an H200; this GPU may need a different one"
    cost = situation.leaving_cost(way) if way in LEAVING else None
    if cost is not None and cost.estimated:
        return "its cost is estimated from smaller jobs on an H200"
    if cost is not None and "H200" not in name:
        return "its cost was measured on an H200; another machine may copy at another speed"
    return None


def _not_given(situation: Situation) -> list[str]:
    """Return which numbers are missing to say whether all fit."""
    found = [] if situation.case.processes is not None else ["the number of processes"]
    return found if all(one.memory for one in situation.case.workloads) else [*found, "the memory of a process"]


QUESTION_TITLES: Final = {
    "same_user": "same user",
    "isolation": "isolation",
    "saturating": "saturating",
    "production_saturating": "production saturating",
    "latency": "latency target",
    "pattern": "pattern",
}


def open_text(fields: list[str]) -> str:
    return f"unanswered questions could change it: {', '.join(QUESTION_TITLES.get(field, field) for field in fields)}"


_GAPS: Final = {
    "error_isolation": ("full", "faults"),
    "memory_bandwidth_qos": ("partition", "memory bandwidth"),
    "memory_protection": ("quota", "memory use"),
    "sm_isolation": ("percentage", "SM time"),
}


def _gaps(situation: Situation, way: Way) -> tuple[str, ...]:
    """Return what the winner leaves unprotected, from the table."""
    if way.outer in {None, Mechanism.STREAMS} or not situation.several:
        return ()
    table, driver = situation.table, situation.host.driver
    found = []
    for row, (wanted, name) in _GAPS.items():
        level = table.level(way.outer, row, driver, option=way.table_option if way is Way.MPS_STATIC else None)
        if not table.at_least(row, level, wanted):
            found.append(name)
    return tuple(found)


def _kinds(situation: Situation) -> list[str]:
    return list(dict.fromkeys(one.like for one in situation.case.workloads if one.like is not None))


def _notes(situation: Situation) -> tuple[str, ...]:
    notes = [f"like {kind}: {flags_like(kind)}, unless said otherwise" for kind in _kinds(situation)]
    idle = [gpu for gpu in situation.host.gpus if gpu.processes == 0 and gpu.error is None and not gpu.mig_enabled]
    processes = situation.case.processes
    if processes is not None and 1 < processes <= len(idle) and not situation.gpu.instance:
        notes.append(f"{len(idle)} GPUs of this host are idle: each of the {processes} processes can have its own")
    if situation.gpu.mps_daemons:
        notes.append(f"an MPS daemon already serves GPU {situation.gpu.index}; see: gpushare mps status")
    used = situation.gpu.memory_used_bytes
    if used is not None and situation.gpu.processes and used > GIB:
        notes.append(f"{format_bytes(used)} of GPU memory are in use now; the calculation assumes an empty GPU")
    return tuple(notes)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question; ``answers`` are the words that users may type, with their values."""

    field: str
    text: str
    answers: tuple[tuple[str, Any], ...]
    # As of an alternative.
    pair: bool | None = None


_YES_NO: Final = (("yes", True), ("no", False))
# The most decisive first.
QUESTIONS: Final = (
    Question(field="same_user", text="Do all processes belong to the same user?", answers=_YES_NO),
    Question(
        field="isolation",
        text="What isolation do they need: none, a memory quota, fault isolation, or full isolation?",
        answers=(
            ("none", frozenset()),
            ("quota", frozenset({Isolation.QUOTA})),
            ("fault", frozenset({Isolation.FAULT})),
            ("full", frozenset({Isolation.FULL})),
        ),
    ),
    Question(field="latency", text="Is there a latency target per request?", answers=_YES_NO),
    Question(
        field="saturating",
        text="Does one process fill the GPU (measured throughput, not utilization)?",
        answers=_YES_NO,
        pair=False,
    ),
    Question(
        field="production_saturating",
        text="Does the production job alone fill the GPU (measured throughput, not utilization)?",
        answers=_YES_NO,
        pair=True,
    ),
    Question(
        field="gaps",
        text="Does the production job wait between requests, so that the GPU is idle in between?",
        answers=_YES_NO,
        pair=True,
    ),
    Question(
        field="saturating",
        text="Does the opportunistic job alone fill the GPU?",
        answers=_YES_NO,
        pair=True,
    ),
    Question(
        field="bandwidth_bound",
        text="Does the opportunistic job saturate the memory bandwidth?",
        answers=_YES_NO,
        pair=True,
    ),
    Question(
        field="pattern",
        text="What is the load pattern?",
        answers=tuple((one.value, one) for one in Pattern),
    ),
    Question(
        field="progress",
        text="Does each of them have to advance, instead of one after another?",
        answers=_YES_NO,
        pair=False,
    ),
    Question(
        field="bandwidth_bound",
        text="Does each of them saturate the memory bandwidth?",
        answers=_YES_NO,
        pair=False,
    ),
    Question(field="cuda_graphs", text="Do they launch CUDA graphs (LLM engines do)?", answers=_YES_NO),
    Question(field="code", text="Can the program be changed?", answers=_YES_NO),
    Question(field="root", text="Can you become root?", answers=_YES_NO),
)


def next_question(situation: Situation, skip: frozenset[str] = frozenset()) -> Question | None:
    """Return the first open question whose answers lead to different ways, or None.

    The answers may differ only together with an answer to one other open question: whether all belong to one user
    decides once it is known that they are small.
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
    asks = question.pair in {None, situation.pair}
    return asks and not alone and answer_of(situation, question.field) is None


def ways_of(situation: Situation, question: Question) -> set[Way | None]:
    found = (winner(verdicts(with_answer(situation, question.field, value))) for _, value in question.answers)
    return {None if one is None else one.way for one in found}


# -- the JSON document -------------------------------------------------------------------------------


def advice_data(advice: Advice) -> dict[str, Any]:
    """Return the JSON document: winner, verdicts with reasons and sources, commands, undo, what would change it."""
    gpu, best, recipe = advice.situation.gpu, advice.best, advice.recipe
    inside = None if best is None else instances_sentence(advice.situation, best.way)
    gpus, case = [part.gpu.index for part in advice.placed] or [gpu.index], advice.asked or advice.situation.case
    why = [] if best is None else [one.text for one in best.of(Kind.FOR)]
    conditions = [] if best is None else [one.text for one in best.of(Kind.CONDITION)]
    return {
        "winner": None if best is None else best.way.value,
        "answer": "nothing fits" if best is None else best.way.label,
        "gpu": gpu.index,
        "instance": gpu.instance,
        "gpus": gpus,
        "gpu_title": (gpu.title if len(gpus) == 1 else f"GPUs {', '.join(map(str, gpus))}")
        + ("" if gpu.name is None else f", {gpu.name}"),
        "why": _why_nothing(advice)
        if best is None
        else [
            *_where(advice),
            *(why or [_why_left(advice, best)]),
            *(f"condition: {text}" for text in conditions),
        ],
        "confidence": advice.confidence.value,
        "confidence_why": advice.confidence_why,
        "conditions": conditions,
        "risks": [] if best is None else _risks(advice.situation, best.way),
        "not_protected": list(advice.gaps),
        "cost": None if best is None else _cost_data(advice.situation, best.way),
        "memory": {
            **_memory_data(advice.budget, advice.limits_bytes),
            **({} if inside is None else {"sentence": inside}),
        },
        "commands": [] if recipe is None else [_line_data(line) for line in recipe.lines],
        "undo": [] if recipe is None else [_line_data(line) for line in recipe.undo],
        "measure": [] if recipe is None else list(recipe.measure),
        "changes": [
            {
                "question": one.field,
                "if": one.text,
                "then": None if one.way is None else one.way.value,
                "then_title": "nothing fits" if one.way is None else one.way.label,
                "open": one.open,
            }
            for one in advice.changes
        ],
        "verdicts": [verdict_data(one) for one in advice.verdicts],
        "case": {
            "root": case.root,
            "workloads": [_workload_data(one) for one in case.workloads],
        },
        "notes": list(advice.notes),
    }


def _risks(situation: Situation, way: Way) -> list[str]:
    """Return what every answer of this kind has to say."""
    if way is Way.MPS_PRIORITY:
        return ["priority is a hint: the GPU may not follow it, and it reserves nothing for production"]
    if way in LEAVING:
        return ["a job that is out exists only in host memory: a restart of the machine ends it"]
    if situation.several and Mechanism.TIMESLICE in {way.outer, way.inner}:
        return ["nothing limits memory: one program can use up what the others need, and they run out of memory"]
    return []


def _cost_data(situation: Situation, way: Way) -> dict[str, Any] | None:
    """Return what it costs that jobs leave the GPU, with its source; None for another way, or if nothing is known."""
    cost = situation.leaving_cost(way) if way in LEAVING else None
    if cost is None:
        return None
    known = {**vars(cost), "switch_seconds": cost.switch_seconds}
    return {
        **{name: round(value, 1) if name.endswith("_seconds") and value else value for name, value in known.items()},
        "host_free_bytes": situation.host.host_memory_bytes,
        "sentence": cost.sentence(),
    }


def _where(advice: Advice) -> list[str]:
    """Return how many processes are on each GPU, if not all fit on one."""
    if not advice.placed:
        return []
    each = ", ".join(f"{part.case.processes} on GPU {part.gpu.index}" for part in advice.placed)
    return [f"not all of them fit on one GPU at the same time: {each}"]


def _why_left(advice: Advice, best: Verdict) -> str:
    """Return why a way wins that no rule prefers."""
    ways = [one for one in CONCURRENT if one is not Way.VGPU]
    if all(one is best.way or advice.of(one).outcome is Outcome.REFUSED for one in ways):
        what = "every other way of sharing is" if best.way in CONCURRENT else "every way of sharing is"
        if best.way not in CONCURRENT and not all(advice.of(one).refused for one in LEAVING):
            what = "every way of sharing at the same time is"
        return "; ".join([f"{what} ruled out", *_nearest(advice, best.way)])
    return "no answer favours another way, and this one needs the least"


def _nearest(advice: Advice, but: Way, known: Sequence[str] = ()) -> list[str]:
    """Return why the most wanted of the refused ways of sharing is refused; ``known`` are reasons that were given."""
    ways = [advice.of(way) for way in CONCURRENT if way not in {but, Way.VGPU, Way.STREAMS}]
    wanted = max((one for one in ways if one.refused), key=lambda one: one.score, default=None)
    return (
        []
        if wanted is None
        else [f"{wanted.way.label}: {one.text}" for one in wanted.of(Kind.VETO) if one.text not in known]
    )


def _why_nothing(advice: Advice) -> list[str]:
    whole = [one.text for one in advice.of(Way.WHOLE).of(Kind.VETO)]
    several = advice.situation.several or advice.situation.kept
    return [*whole, *(_nearest(advice, Way.WHOLE, whole) if several else [])]


def _workload_data(workload: Any) -> dict[str, Any]:
    """Return the properties of a workload; null where unknown."""
    return {
        name: sorted(one.value for one in value) if isinstance(value, frozenset) else value
        for name, value in vars(workload).items()
    }


def _line_data(line: Line) -> dict[str, Any]:
    return {"what": line.what, "command": line.command}


def _memory_data(found: Budget, limits: int | None) -> dict[str, Any]:
    """Return the memory budget, and the sum of the limits."""
    sentence = found.sentence()
    if limits is not None:
        said = f"the limits add up to {format_bytes(limits)}"
        sentence = said if sentence is None else f"{sentence}; {said}"
    return {
        "total_bytes": found.total_bytes,
        "headroom_bytes": found.headroom_bytes,
        "server_bytes": found.server_bytes,
        "context_bytes": found.context_bytes,
        "wanted_bytes": found.wanted_bytes,
        "needed_bytes": found.needed_bytes,
        "left_bytes": found.left_bytes,
        "fits": found.fits,
        "most": found.most,
        "limits_bytes": limits,
        "sentence": sentence,
    }


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    return {
        "way": verdict.way.value,
        "title": verdict.way.label,
        "outcome": verdict.outcome.value,
        "reasons": [
            {
                "rule": one.rule,
                "kind": one.kind.value,
                "text": one.text,
                "source": one.source,
                "open": one.open,
                "row": one.row,
                "contradiction": one.contradiction,
            }
            for one in verdict.reasons
        ],
    }
