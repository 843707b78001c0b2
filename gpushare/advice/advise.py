"""The advice: the winner with its recipe, the confidence, and what would change it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal

from gpushare.advice.case import flags_like
from gpushare.advice.limits import limits_sum
from gpushare.advice.place import Part, place
from gpushare.advice.questions import QUESTIONS, OtherAnswer, other_answers
from gpushare.advice.recipe import may_pause, recipe
from gpushare.advice.rules import Kind, WayVerdict, verdicts
from gpushare.advice.situation import Budget, LeavingCost, Situation, instances_sentence
from gpushare.advice.steps import AdviceStep, Recipe, join_recipes
from gpushare.advice.ways import ALL_MIG, CONCURRENT, LEAVING
from gpushare.base.model import Way
from gpushare.base.units import GIB, format_bytes, ranges

if TYPE_CHECKING:
    from gpushare.advice.case import Case
    from gpushare.base.benchmark import BenchAnswer


class Confidence(str, Enum):
    """How certain the advice is."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice for one case on a host. ``best`` is None if nothing fits."""

    # The largest part of the case, on its GPUs.
    situation: Situation
    best: WayVerdict | None
    verdicts: tuple[WayVerdict, ...]
    recipe: Recipe | None
    confidence: Confidence
    confidence_why: str
    changes: tuple[OtherAnswer, ...]
    notes: tuple[str, ...]
    # What is on which GPU, the largest part first.
    parts: tuple[Part, ...]
    # The case as it was asked.
    asked: Case

    def verdict_on(self, way: Way) -> WayVerdict:
        return next(verdict for verdict in self.verdicts if verdict.way is way)

    @property
    def gpus(self) -> list[int]:
        """Return the indexes of the GPUs that it uses."""
        return sorted(gpu.index for part in self.parts for gpu in part.situation.used_gpus)


def advise(situation: Situation) -> Advice:
    """Return the advice: which jobs on which GPU of the host, and in which way."""
    parts = place(situation)
    first = parts[0].situation
    judged = verdicts(first)
    everywhere = all(part.best is not None for part in parts)
    best = parts[0].best if everywhere else None
    # Other answers are placed without `separate`, which takes long: they are compared with the present case placed so, too.
    present_ways = {None if best is None else best.way, place(situation, separate=False)[0].way}
    changes = tuple(other for other, _ in other_answers(situation) if other.then not in present_ways)
    confidence, why = _confidence(parts, best, judged, changes)
    made = None
    if best is not None:
        made = join_recipes([recipe(part.situation, part.way) for part in parts if part.way is not None])
    return Advice(
        situation=first,
        best=best,
        verdicts=judged,
        recipe=made,
        confidence=confidence,
        confidence_why=why,
        changes=changes,
        notes=_notes(situation),
        parts=parts,
        asked=situation.case,
    )


def with_way(advice: Advice, way: Way, *, cap: float | None) -> Advice:
    """Return the advice with a measured winner; ``cap`` is the thread percentage of its MPS clients, None: no MPS."""
    part = Part(situation=advice.situation.variant(cap=cap), best=advice.verdict_on(way))
    return replace(
        advice,
        situation=part.situation,
        best=part.best,
        parts=(part,),
        recipe=recipe(part.situation, way),
        changes=(),
    )


# -- how certain it is -------------------------------------------------------------------------------

# The titles of the questions that decide most often.
_DECIDE_MOST: Final = frozenset({"same user", "saturating"})


def _confidence(
    parts: Sequence[Part], best: WayVerdict | None, judged: Sequence[WayVerdict], changes: tuple[OtherAnswer, ...]
) -> tuple[Confidence, str]:
    """Return the confidence: high only where a hard limit decides, or a measurement of the program (see measured.py)."""
    situation = parts[0].situation
    if best is None:
        for change in changes:
            if change.question in {"destroy", "root", "occupied"} and change.then is not None:
                return Confidence.MEDIUM, f"it would be possible if {change.text}"
        return Confidence.HIGH, "arithmetic and hard limits"
    if all(part.situation.own_gpu and part.way is Way.WHOLE for part in parts):
        return Confidence.HIGH, "each has a GPU to itself"
    if best.way is Way.MEASURE:
        return Confidence.LOW, "published results contradict each other here: measure your own program"
    titles = open_titles(changes)
    # Without these nobody can say whether all fit.
    missing = {
        "the number of processes": situation.case.processes is None,
        "the memory of a process": not all(work.memory for work in situation.case.workloads),
    }
    shares = best.way in {*CONCURRENT, *LEAVING}
    names = ", ".join(name for name, is_missing in missing.items() if is_missing and shares)
    missing_text = f"not given: {names}" if names else None
    if titles:
        level = Confidence.LOW if _DECIDE_MOST & set(titles) and len(titles) > 1 else Confidence.MEDIUM
        return level, "; ".join(filter(None, [open_text(titles), missing_text]))
    if missing_text is not None:
        return Confidence.MEDIUM, missing_text
    # Their figures are from other hosts.
    measured_elsewhere = best.way in {Way.SLICES, Way.MPS_PRIORITY, *LEAVING}
    is_open = any(reason.open for reason in best.reasons_of(Kind.CONDITION))
    doubtful = measured_elsewhere or is_open or any(reason.contradiction for reason in best.reasons)
    possible = [verdict.way for verdict in judged if not verdict.refused and verdict.way not in {Way.MEASURE, Way.FIX}]
    if possible == [best.way] and not doubtful:
        return Confidence.HIGH, "hard limits rule out every other way"
    grounds = "rules and figures that were measured elsewhere" if measured_elsewhere else "rules"
    return Confidence.MEDIUM, f"by {grounds}: measure it to be sure"


def open_titles(changes: Sequence[OtherAnswer]) -> list[str]:
    """Return the titles of the unanswered questions that would change the answer and lower the confidence."""
    deciding = {question.field: question.title for question in QUESTIONS if question.deciding}
    return list(
        dict.fromkeys(deciding[change.question] for change in changes if change.open and change.question in deciding)
    )


def open_text(titles: Sequence[str]) -> str:
    """Return the questions whose answers are open, for the reason of a confidence."""
    return f"unanswered questions could change it: {', '.join(titles)}"


# For each row of the table that is about protection: the level that protects, and what it protects.
_PROTECTED_AT: Final = {
    "error_isolation": ("full", "faults"),
    "memory_bandwidth_qos": ("partition", "memory bandwidth"),
    "memory_protection": ("quota", "memory use"),
    "sm_isolation": ("percentage", "SM time"),
}


def _unprotected_names(situation: Situation, way: Way) -> list[str]:
    """Return what the winner leaves unprotected, as the table says: faults, memory bandwidth, memory use, SM time."""
    if way.outer in {None, Way.STREAMS} or not situation.several:
        return []
    table = situation.table
    # Other options of a cell hold only where the recipe sets them up.
    option = way.table_option if way is Way.MPS_STATIC else None
    unprotected = []
    for row, (protecting_level, name) in _PROTECTED_AT.items():
        level = table.level(way.outer, row, situation.host.driver, option=option)
        if not table.at_least(row, level, protecting_level):
            unprotected.append(name)
    return unprotected


def _notes(situation: Situation) -> tuple[str, ...]:
    """Return what was assumed, and what on the GPU the reader should know of."""
    case, gpu = situation.case, situation.gpu
    kinds = dict.fromkeys(work.like for work in case.workloads if work.like is not None)
    notes = [f"like {kind}: {flags_like(kind)}, unless said otherwise" for kind in kinds]
    if case.processes == 1 and case.same_user is False:
        notes.append("one process belongs to one user: taken as one next to programs of others")
    used = gpu.memory_used_bytes
    if used is not None and gpu.processes and used > GIB:
        notes.append(f"{format_bytes(used)} of GPU memory are in use now; the calculation assumes an empty GPU")
    return tuple(notes)


# -- the JSON document -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlacedProcesses:
    """GPUs that are used in the same way. ``processes`` counts those on all of these GPUs together."""

    gpus: list[int]
    way: str | None
    way_title: str
    processes: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryAnswer(Budget):
    """The memory budget of the first GPU of the answer, and the sum of the limits."""

    limits_bytes: int | None
    sentence: str | None


Effect = Literal["confirmed", "changed", "kept", "open"]


@dataclass(frozen=True, kw_only=True)
class MeasuredAnswer:
    """How the measurement changed the answer of the rules."""

    effect: Effect
    sentence: str
    copies: int
    way: str | None
    threads_percent: float | None
    against: str | None
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class AdviceAnswer:
    """The answer of `advise`: the winner, the verdicts on all ways, the commands, their undo, and what would change it."""

    winner: str | None
    answer: str
    gpu: int
    instance: str | None
    gpus: list[int]
    gpu_title: str
    placement: list[PlacedProcesses]
    why: list[str]
    confidence: str
    confidence_why: str
    conditions: list[str]
    risks: list[str]
    not_protected: list[str]
    cost: LeavingCost | None
    memory: MemoryAnswer
    commands: tuple[AdviceStep, ...]
    undo: tuple[AdviceStep, ...]
    measure: list[str]
    changes: tuple[OtherAnswer, ...]
    verdicts: tuple[WayVerdict, ...]
    case: Case
    notes: list[str]
    # With --way: the way that was asked for.
    explained: WayVerdict | None = None
    # With --measure: the answer by the rules alone.
    rules: AdviceAnswer | None = None
    # With --measure: how the measurement changed that answer.
    measured: MeasuredAnswer | None = None
    # With --measure: the benchmark.
    measurement: BenchAnswer | None = None


def advice_answer(advice: Advice) -> AdviceAnswer:
    """Return the JSON document of an advice."""
    situation = advice.situation
    best = advice.best
    made = advice.recipe
    gpus = advice.gpus
    names = list(dict.fromkeys(gpu.name for part in advice.parts for gpu in part.situation.used_gpus if gpu.name))
    title = situation.gpu.title if len(gpus) == 1 else f"GPUs {ranges(gpus)}"
    conditions = [] if best is None else [reason.text for reason in best.reasons_of(Kind.CONDITION)]
    return AdviceAnswer(
        winner=None if best is None else best.way.value,
        answer=_title_of(advice),
        gpu=situation.gpu.index,
        instance=situation.gpu.instance,
        gpus=gpus,
        gpu_title=", ".join([title, *names]),
        placement=[_place_answer(part) for part in advice.parts],
        why=_why(advice, conditions),
        confidence=advice.confidence.value,
        confidence_why=advice.confidence_why,
        conditions=conditions,
        risks=[] if best is None else _risks(situation, best.way, made),
        not_protected=[] if best is None else _unprotected_names(situation, best.way),
        cost=None if best is None or best.way not in LEAVING else situation.leaving_cost(best.way),
        memory=_memory_answer(advice),
        commands=() if made is None else made.lines,
        undo=() if made is None else made.undo,
        measure=[] if made is None else list(made.measure),
        changes=advice.changes,
        verdicts=advice.verdicts,
        case=advice.asked,
        notes=list(advice.notes),
    )


def _title_of(advice: Advice) -> str:
    """Return the way in words, by GPU where the ways differ."""
    if advice.best is None:
        return "nothing fits"
    if len({(part.way, part.situation.gpus_each) for part in advice.parts}) > 1:
        answers = map(_place_answer, advice.parts)
        return "; ".join(
            f"GPU{'' if len(answer.gpus) == 1 else 's'} {ranges(answer.gpus)}: {answer.way_title}" for answer in answers
        )
    return _way_text(advice.parts)


def _way_text(parts: Sequence[Part]) -> str:
    """Return the way of parts that have the same one, in words; if it is the whole GPU, how many jobs run at a time."""
    situation, way = parts[0].situation, parts[0].way
    if way is not Way.WHOLE:
        return "nothing fits" if way is None else way.label
    if situation.together:
        return "one process per GPU"
    processes = sum(part.situation.placed_processes for part in parts)
    at_once = sum(part.situation.gpu_sets for part in parts)
    gpus = situation.gpus_each
    if processes == 1:
        return "the whole GPU" if gpus == 1 else f"{gpus} whole GPUs"
    if processes <= at_once:
        return "a GPU for each" if gpus == 1 else f"{gpus} GPUs for each"
    if situation.memory_decides and situation.plain.most != 1:
        return "as many at a time as fit"
    if may_pause(situation):
        return "the whole GPU for production, the other job paused meanwhile"
    count = "one" if at_once == 1 else str(at_once)
    return f"{count} at a time, each with {'the whole GPU' if gpus == 1 else f'{gpus} whole GPUs'}"


def _place_answer(part: Part) -> PlacedProcesses:
    """Return what is on the GPUs of a part, and in which way, for people."""
    case = part.situation.whole or part.situation.case
    gpus = sorted(gpu.index for gpu in part.situation.used_gpus)
    way = None if part.way is None else part.way.value
    return PlacedProcesses(gpus=gpus, way=way, way_title=_way_text([part]), processes=case.processes)


# Conditions that say that something which was asked for is not kept.
_UNKEPT: Final = frozenset({"queue-no-shares", "slices-shares-idle", "mig-fixed-sizes"})


def _why(advice: Advice, conditions: Sequence[str]) -> list[str]:
    """Return why the answer is this: what cannot be kept, where the jobs are, what speaks for the way, its conditions."""
    best = advice.best
    if best is None:
        return _why_nothing(advice)
    unkept = [reason.text for reason in best.reasons_of(Kind.CONDITION) if reason.rule in _UNKEPT]
    return [
        *(f"not possible here: {text}; nearest: {_title_of(advice)}" for text in unkept),
        *_placement_sentences(advice),
        *_why_this_way(advice, best),
        *(f"condition: {text}" for text in conditions if text not in unkept),
    ]


def _why_this_way(advice: Advice, best: WayVerdict) -> list[str]:
    """Return what speaks for a way, and what rules the others out where none of them can share the GPU."""
    reasons = [reason.text for reason in best.reasons_of(Kind.FOR)]
    # A vGPU needs another host.
    ruled_out = all(advice.verdict_on(way).refused for way in CONCURRENT if way not in {best.way, Way.VGPU})
    why_not = "; ".join(_vetoes_of_nearest(advice)[: 1 if reasons else None]) if ruled_out else ""
    some_wait = advice.situation.placed_processes > advice.situation.gpu_sets
    if why_not and ((best.way is Way.WHOLE and some_wait) or (best.way not in CONCURRENT and not reasons)):
        reasons.append(f"not possible here: several at the same time ({why_not})")
    elif why_not and not reasons:
        reasons.append(f"every other way of sharing is ruled out; {why_not}")
    return reasons or ["no answer favours another way, and this one needs the least"]


def _placement_sentences(advice: Advice) -> list[str]:
    """Return how many processes are on each GPU, and in which way where that differs."""
    if len(advice.gpus) == 1 or advice.situation.together:
        return []
    if len(advice.parts) == 1 and advice.situation.gpus_each > 1:
        return []
    one_way = len({part.way for part in advice.parts}) == 1
    texts = [_part_text(part, names_way=not one_way) for part in advice.parts]
    return [f"spread over {len(advice.gpus)} idle GPUs: {', '.join(texts)}"]


# Up to this many GPUs are listed one by one.
_MOST_LISTED: Final = 4


def _part_text(part: Part, *, names_way: bool) -> str:
    """Return how many processes of one part are on each of its GPUs, and in which way."""
    situation = part.situation
    gpus = sorted(gpu.index for gpu in situation.used_gpus)
    # As it is on the GPU with the most processes.
    way_text = f" ({_way_text([replace(part, situation=situation.on(situation.gpu))])})" if names_way else ""
    if situation.gpus_each > 1:
        return f"{situation.placed_processes} with {situation.gpus_each} of GPUs {ranges(gpus)} each"
    total = (situation.whole or situation.case).processes
    if total is None:
        return f"all on GPU {ranges(gpus)}{way_text}"
    # A part is judged on the GPU with the most processes.
    most = situation.case.processes or total
    if len(gpus) > _MOST_LISTED or most != -(-total // len(gpus)):
        at_most = "" if most * len(gpus) == total else "at most "
        return f"{at_most}{most} on each of GPUs {ranges(gpus)}{way_text}"
    # An uneven rest is on the first GPUs.
    counts = [total // len(gpus) + (number < total % len(gpus)) for number in range(len(gpus))]
    return ", ".join(f"{count} on GPU {gpu}{way_text}" for gpu, count in zip(gpus, counts, strict=True))


def _vetoes_of_nearest(advice: Advice, already_named: Sequence[str] = ()) -> list[str]:
    """Return why the refused way of sharing with the highest score is refused, without the reasons already named."""
    # These two need another host, or another program.
    others = [advice.verdict_on(way) for way in CONCURRENT if way not in {Way.VGPU, Way.STREAMS}]
    nearest = max((verdict for verdict in others if verdict.refused), key=lambda verdict: verdict.score, default=None)
    if nearest is None:
        return []
    vetoes = nearest.reasons_of(Kind.VETO)
    return [f"{nearest.way.label}: {reason.text}" for reason in vetoes if reason.text not in already_named]


def _why_nothing(advice: Advice) -> list[str]:
    """Return why nothing is possible: why the whole GPU and the nearest way of sharing are refused, and what would help."""
    reasons = [reason.text for reason in advice.verdict_on(Way.WHOLE).reasons_of(Kind.VETO)]
    # A job that would be alone, or has several GPUs, does not ask for a way of sharing; next to instances that stay it does.
    asks_to_share = advice.situation.several or bool(advice.situation.kept_instances)
    if asks_to_share and advice.situation.gpus_each == 1:
        reasons += _vetoes_of_nearest(advice, reasons)
    first, *others = reasons or ["no GPU of this host can do it"]
    nearest = next((change for change in advice.changes if change.then not in {None, Way.FIX}), None)
    if nearest is not None:
        first += f"; nearest: {nearest.then_title}, if {nearest.text}"
    return [f"not possible here: {text}" for text in (first, *others)]


def _risks(situation: Situation, way: Way, made: Recipe | None) -> list[str]:
    """Return the risks of the winner, which hold for all its answers: what it does not limit, reserve or keep."""
    if way is Way.MPS_PRIORITY:
        return ["priority is a hint: the GPU may not follow it, and it reserves nothing for production"]
    if way in LEAVING:
        return ["a job that is out exists only in host memory: a restart of the machine ends it"]
    if situation.several and Way.TIMESLICE in {way.outer, way.inner}:
        commands = [line.command for line in made.lines if line.command] if made is not None else []
        jobs = [command for command in commands if " run " in command]
        # A job in line waits until there is room for its limit, or for the whole GPU.
        all_limited = all("--memory" in job or "--wait" in job for job in jobs)
        if commands and all_limited:
            return [
                "memory use is shared: a program that gpushare did not start has no limit, and a job may pass its limit for 0.2 s"
            ]
        return ["nothing limits memory: one program can use up what the others need, and they run out of memory"]
    return []


def _memory_answer(advice: Advice) -> MemoryAnswer:
    """Return the memory budget as it is printed, with the sentence that fits the way."""
    situation = advice.situation
    best = advice.best
    budget = situation.plain if best is None else situation.budget_of(best.way)
    limits = None if best is None else limits_sum(situation, best.way)
    at_a_time = None if best is None else situation.at_a_time(best.way)

    # The sum of all jobs says nothing where only one is on a GPU at a time, unless it is the reason for that.
    rank_per_gpu = situation.together and len(situation.used_gpus) >= (situation.case.processes or 2)
    enough = budget.fits or rank_per_gpu or not situation.short_of_memory
    one_per_gpu = best is not None and best.way is Way.WHOLE and (situation.several or situation.own_gpu)
    sentence = None if one_per_gpu and enough else budget.calculation(at_a_time)
    if best is not None and best.way in ALL_MIG:
        sentence = instances_sentence(situation, best.way) or sentence
    elif limits is not None:
        text = f"the limits add up to {format_bytes(limits)}"
        sentence = text if sentence is None else f"{sentence}; {text}"
    if sentence is not None and len(advice.gpus) > 1:
        sentence = f"on each GPU, {sentence}"
    return MemoryAnswer(**vars(budget), limits_bytes=limits, sentence=sentence)
