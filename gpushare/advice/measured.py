"""How a measurement changes the rules' answer. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.advice.advise import (
    Advice,
    AdviceAnswer,
    Confidence,
    MeasuredAnswer,
    OtherAnswer,
    advice_answer,
    open_text,
    open_titles,
    with_way,
)
from gpushare.advice.limits import threads_together
from gpushare.advice.questions import other_answers
from gpushare.advice.rules import Kind, Reason, WayVerdict, verdicts
from gpushare.base.benchmark import LEAST_DIFFERENCE, NEAR, BenchAnswer, Summary
from gpushare.base.model import Way

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation


# The names of `gpushare bench` for the ways that it can measure.
BENCH_WAYS: Final[Mapping[Way, tuple[str, ...]]] = {
    Way.WHOLE: ("queue",),
    Way.TIMESLICE: ("timeslice",),
    Way.MPS: ("mps", "mps:200/n", "mps:100/n"),
    Way.MIG: ("mig",),
    Way.STREAMS: ("streams",),
}
_WAY_OF: Final = {name: way for way, names in BENCH_WAYS.items() for name in names}


@dataclass(frozen=True)
class Cell:
    """The measurement of one way. A larger speed is faster; ``figures`` are of what was printed or counted."""

    name: str
    way: Way
    # Active thread percentage of each copy; None means no cap.
    cap: float | None
    speed: float
    figures: Summary

    @property
    def title(self) -> str:
        """Return its name in a sentence: ``MPS with 25 % each``."""
        return _way_title(self.way) + ("" if self.cap is None else f" with {self.cap:g} % each")


def _measured_cells(bench: BenchAnswer, copies: int) -> list[Cell]:
    """Return the ways that were measured with a number of copies without a failure, as speeds."""
    cells = []
    for cell in bench.cells:
        figures = cell.throughput
        if cell.copies != copies or figures is None or cell.failures or cell.way not in _WAY_OF:
            continue
        if figures.mean > 0 and math.isfinite(figures.mean):
            speed = bench.metric.speed(figures.mean)
            cells.append(Cell(cell.way, _WAY_OF[cell.way], cell.threads_percent, speed, figures))
    return cells


def differ(cell: Cell, other: Cell) -> bool | None:
    """Return whether two ways differ: their intervals do not overlap. None if single runs cannot tell."""
    if abs(cell.speed / other.speed - 1) < LEAST_DIFFERENCE:
        return False
    return cell.figures.differs_from(other.figures)


def alike(cell: Cell, other: Cell) -> bool:
    """Return whether two ways do not differ; of single runs, which cannot tell, whether they are close."""
    different = differ(cell, other)
    if different is not None:
        return not different
    slower, faster = sorted((cell.speed, other.speed))
    return slower >= (1 - NEAR) * faster


def _certain_of(cells: Sequence[Cell]) -> bool:
    """Return whether the runs can tell for every way if it differs from the fastest."""
    fastest = max(cells, key=lambda cell: cell.speed)
    return all(differ(cell, fastest) is not None for cell in cells)


def _failure_of(bench: BenchAnswer, way: Way, copies: int) -> str | None:
    """Return why the copies of a way failed; None: they did not."""
    cells = [cell for cell in bench.cells if cell.copies == copies and _WAY_OF.get(cell.way) is way]
    return next((text for cell in cells for text in cell.failures), None)


def left_out_text(bench: BenchAnswer, copies: int, way: Way | None = None) -> str:
    """Return why a way, or any way, was not measured, as the end of a sentence; empty if unknown."""
    for cell in bench.left_out:
        if (way is None or _WAY_OF.get(cell.way) is way) and cell.copies in {None, copies}:
            return f" ({cell.reason})"
    if way is not None and way not in BENCH_WAYS:
        return " (gpushare bench does not measure it)"
    return " (it ended too early)" if bench.reason != "finished" else ""


def _way_title(way: Way) -> str:
    return "a queue" if way is Way.WHOLE else way.label


def ratio_text(cell: Cell, other: Cell) -> str:
    """Return how many times as fast one way is as another: ``1.25 x``."""
    return f"{cell.speed / other.speed:.2f} x"


# Rules about the fastest way, which a measurement replaces. It does not overrule the other rules: throughput says
# nothing about latency, bursts, isolation or priority.
ANSWERED: Final = frozenset(
    {
        "small-same-user",
        "small-maybe-same-user",
        "small-batch",
        "cooperating",
        "saturating",
        "half-a-gpu",
        "bandwidth-bound",
        "bandwidth-bound-mps",
        "bandwidth-in-turn",
        "older-or-many",
        "cuda-graphs",
        "maybe-small",
        "maybe-small-maybe-same-user",
        "waits-for-input-shared",
    }
)
# The name of a way of `bench`: the thread percentages of all processes add up to this.
_CAP_OF_ALL: Final = re.compile(r"mps:(\d+)/n", re.ASCII)


class Effect(str, Enum):
    """The effect of the measurement on the rules' answer."""

    CONFIRMED = "confirmed"
    NO_DIFFERENCE = "no-difference"
    OTHER_CAP = "other-cap"
    CHANGED = "changed"
    SETTLED = "settled"
    KEPT = "kept"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class MeasuredAdvice:
    """The rules' answer, the final answer, and the effect of the measurement.

    ``ratio`` is the speed of ``chosen`` over that of ``against``. ``certain`` is False if single runs cannot tell the
    difference from noise.
    """

    rules: Advice
    final: Advice
    effect: Effect
    sentence: str
    copies: int
    chosen: Cell | None = None
    against: Cell | None = None
    certain: bool = True

    @property
    def ratio(self) -> float | None:
        return None if self.chosen is None or self.against is None else self.chosen.speed / self.against.speed


def bench_ways(advice: Advice) -> tuple[str, ...]:
    """Return the ways to measure, those without a veto, by their names in `gpushare bench`."""
    return tuple(name for way, names in BENCH_WAYS.items() if not advice.of(way).refused for name in names)


class _Finding(NamedTuple):
    """What the figures say: the effect on the rules' answer, as a sentence too, and the two ways that are compared."""

    effect: Effect
    sentence: str
    chosen: Cell | None = None
    against: Cell | None = None


def _open_finding(why: str) -> _Finding:
    """Return the finding that the measurement says nothing, with the reason: then the rules' answer stands."""
    return _Finding(Effect.OPEN, f"{why}; the rules' answer stands")


def unmeasured(advice: Advice, why: str, copies: int) -> MeasuredAdvice:
    """Return the rules' answer as the final one, with the reason why nothing was measured."""
    return MeasuredAdvice(rules=advice, final=advice, copies=copies, **_open_finding(why)._asdict())


def measured(advice: Advice, bench: BenchAnswer, copies: int) -> MeasuredAdvice:
    """Return the answer after a measurement with a number of copies: the fastest of what fits, or the rules' answer.

    The rules' answer stays if nothing differs from it, if it could not be measured, or if it was chosen for a reason
    that throughput does not show.
    """
    cells = [cell for cell in _measured_cells(bench, copies) if not advice.of(cell.way).refused]
    finding = _finding_of(advice, bench, cells, copies)
    if finding.effect is Effect.OPEN:
        return MeasuredAdvice(rules=advice, final=advice, copies=copies, **finding._asdict())
    final = advice
    certain = _certain_of(cells)
    # With the other effects, the way and the cap of the rules stay.
    if finding.chosen is not None and finding.effect in {Effect.OTHER_CAP, Effect.CHANGED, Effect.SETTLED}:
        final = with_way(advice, finding.chosen.way, cap=_cap_of_each(advice.situation, finding.chosen.name))
    if finding.effect is not Effect.KEPT:
        # What the recipe suggests to measure has been measured.
        recipe = None if final.recipe is None else replace(final.recipe, measure=())
        final = replace(final, recipe=recipe, changes=_changes_after(final))
    level, why = _confidence(advice, final, finding.effect, certain=certain)
    final = replace(final, confidence=level, confidence_why=why)
    return MeasuredAdvice(rules=advice, final=final, copies=copies, certain=certain, **finding._asdict())


def _finding_of(advice: Advice, bench: BenchAnswer, cells: Sequence[Cell], copies: int) -> _Finding:
    """Return what ``cells``, the ways that were measured and fit, say about the rules' answer.

    It stays open if nothing fits, nothing was measured, or the rules' way was not. If the copies of the rules' way failed,
    the answer changes to the preferred one of the others.
    """
    if advice.best is None:
        return _open_finding("nothing fits")
    way = advice.best.way
    if not cells:
        return _open_finding(f"nothing was measured{left_out_text(bench, copies)}")
    if way is Way.MEASURE:
        return _finding_without_rules(advice, cells)
    rules_cells = [cell for cell in cells if cell.way is way]
    if rules_cells:
        return _finding_against_rules(advice, cells, _rules_cell(advice.situation, rules_cells))
    failure = _failure_of(bench, way, copies)
    if failure is not None:
        choice = _preferred_cell(advice, cells)
        sentence = f"the rules said {_way_title(way)}, and its copies failed ({failure}), so {choice.title}"
        return _Finding(Effect.CHANGED, sentence, choice)
    # Only mentioned: nothing is known of the rules' way to compare it with.
    fastest = max(cells, key=lambda cell: cell.speed)
    return _open_finding(
        f"{_way_title(way)} was not measured{left_out_text(bench, copies, way)}; {fastest.title} was the fastest of the others"
    )


def _finding_without_rules(advice: Advice, cells: Sequence[Cell]) -> _Finding:
    """Return the finding if the rules left the choice to the measurement."""
    choice = _preferred_cell(advice, cells)
    others = [cell for cell in cells if cell.way is not choice.way]
    if not others:
        return _open_finding(f"only {choice.title} was measured")
    next_best = max(others, key=lambda cell: cell.speed)
    start = "the rules left it to a measurement: "
    if differ(choice, next_best) is False:
        sentence = f"{start}no difference from {next_best.title}, and the rules prefer {choice.title}"
    else:
        sentence = f"{start}{choice.title} is {ratio_text(choice, next_best)} {next_best.title}, so {choice.title}"
    return _Finding(Effect.SETTLED, sentence, choice, next_best)


def _finding_against_rules(advice: Advice, cells: Sequence[Cell], rules_cell: Cell) -> _Finding:
    """Return the finding if the rules' way was measured, as ``rules_cell``: it stands, or another is faster."""
    fastest = max(cells, key=lambda cell: cell.speed)
    if alike(rules_cell, fastest):
        return _finding_for_rules(cells, rules_cell)
    choice = _preferred_cell(advice, cells)
    ratio = ratio_text(choice, rules_cell)
    if choice.way is rules_cell.way:
        than = "without a cap" if choice.cap is None else f"{choice.cap:g} % each"
        sentence = f"the rules said {rules_cell.title}; measured: {than} is {ratio} it, so {than}"
        return _Finding(Effect.OTHER_CAP, sentence, choice, rules_cell)
    reasons = _reasons_not_measured(advice.of(rules_cell.way), advice.of(choice.way))
    if reasons:
        sentence = (
            f"{choice.title} is {ratio} {rules_cell.title}, but the rules' answer stands, for a reason that "
            f"throughput does not show: {reasons[0].text}"
        )
        return _Finding(Effect.KEPT, sentence, rules_cell, choice)
    sentence = f"the rules said {rules_cell.title}; measured: {choice.title} is {ratio} it, so {choice.title}"
    return _Finding(Effect.CHANGED, sentence, choice, rules_cell)


def _finding_for_rules(cells: Sequence[Cell], rules_cell: Cell) -> _Finding:
    """Return the finding that nothing measured is faster than the rules' answer."""
    others = sorted((cell for cell in cells if cell.way is not rules_cell.way), key=lambda cell: -cell.speed)
    if not others:
        return _open_finding(f"only {_way_title(rules_cell.way)} was measured")
    next_best = others[0]
    if alike(next_best, rules_cell):
        names = ", ".join(dict.fromkeys(_way_title(cell.way) for cell in others if alike(cell, rules_cell)))
        return _Finding(
            Effect.NO_DIFFERENCE, f"no difference from {names}: the rules' answer stands", rules_cell, next_best
        )
    sentence = (
        f"{rules_cell.title} is {ratio_text(rules_cell, next_best)} {next_best.title}, the next best: as the rules said"
    )
    return _Finding(Effect.CONFIRMED, sentence, rules_cell, next_best)


def _preferred_cell(advice: Advice, cells: Sequence[Cell]) -> Cell:
    """Return the cell to use: of those as good as the fastest and close to it, the rules' first choice."""
    fastest = max(cells, key=lambda cell: cell.speed)
    near = [cell for cell in cells if alike(cell, fastest) and cell.speed >= (1 - NEAR) * fastest.speed]
    order = [verdict.way for verdict in advice.verdicts]
    rules_cap = _name_of_rules_cap(advice.situation)

    def rank(cell: Cell) -> tuple[int, bool, bool, float]:
        """Return the sort key: the rules' order of the ways; of MPS the rules' cap, else no cap."""
        return order.index(cell.way), cell.name != rules_cap, cell.cap is not None, -cell.speed

    return min(near, key=rank)


def _rules_cell(situation: Situation, cells: Sequence[Cell]) -> Cell:
    """Return the cell of the way that the rules recommend; ``cells`` are all of that way: MPS with several caps.

    The cell with the rules' cap counts, or the fastest if that cap was not measured.
    """
    with_cap = [cell for cell in cells if cell.name == _name_of_rules_cap(situation)]
    return max(with_cap or cells, key=lambda cell: cell.speed)


def _name_of_rules_cap(situation: Situation) -> str:
    """Return the name that a cell of MPS with the rules' cap has: ``mps:50/n``."""
    return "mps" if situation.before_volta else f"mps:{threads_together(situation)}/n"


def _cap_of_each(situation: Situation, measured_way: str) -> float | None:
    """Return the thread percentage of each process in a measured way: 50 in ``mps:200/n`` with 4 processes.

    100: MPS without a cap; None: it is not MPS.
    """
    if measured_way not in BENCH_WAYS[Way.MPS]:
        return None
    together = _CAP_OF_ALL.fullmatch(measured_way)
    if together is None:
        return 100.0
    return min(100.0, int(together[1]) / (situation.case.processes or 1))


def _reasons_not_measured(best: WayVerdict, other: WayVerdict) -> list[Reason]:
    """Return the reasons for preferring one way to another that throughput does not show."""
    rules_for_other = {reason.rule for reason in other.of(Kind.FOR)}
    rules_against_best = {reason.rule for reason in best.of(Kind.AGAINST)}
    reasons = [reason for reason in best.of(Kind.FOR) if reason.rule not in rules_for_other]
    reasons += [reason for reason in other.of(Kind.AGAINST) if reason.rule not in rules_against_best]
    return sorted((reason for reason in reasons if reason.rule not in ANSWERED), key=lambda reason: -reason.weight)


def _changes_after(final: Advice) -> tuple[OtherAnswer, ...]:
    """Return the answers to questions that would change an answer which was measured.

    With them, the way is refused, or another is better for a reason that throughput does not show.
    """
    if final.best is None:
        return ()
    way = final.best.way
    changes = []
    for question, answer, is_open, part in other_answers(final.situation):
        if part.way is way:
            continue
        judged = next(verdict for verdict in verdicts(part.situation) if verdict.way is way)
        if part.best is None or judged.refused or _reasons_not_measured(part.best, judged):
            changes.append(OtherAnswer(question=question.field, text=answer.text, then=part.way, open=is_open))
    return tuple(changes)


def _confidence(advice: Advice, final: Advice, effect: Effect, *, certain: bool) -> tuple[Confidence, str]:
    """Return the confidence in the final answer: higher if the rules and the measurement agree, lower if they do not."""
    level, why = _LEVELS[effect]
    # Where the rules' answer stands, their confidence counts; that nothing is faster makes a low one medium.
    if effect is Effect.NO_DIFFERENCE:
        level = Confidence.MEDIUM if advice.confidence is Confidence.LOW else advice.confidence
    if effect is Effect.KEPT and advice.confidence is Confidence.LOW:
        level = Confidence.LOW
    if not certain:
        agrees_with_rules = effect in {Effect.CONFIRMED, Effect.NO_DIFFERENCE}
        level = advice.confidence if agrees_with_rules else Confidence.LOW
        why = f"{why}, but from single runs: a difference may be noise"
    titles = open_titles(final.changes)
    if titles and effect is not Effect.KEPT:
        level = Confidence.MEDIUM if level is Confidence.HIGH else level
        why = f"{why}; {open_text(titles)}"
    return level, why


_LEVELS: Final = {
    Effect.CONFIRMED: (Confidence.HIGH, "measured here, and the rules agree"),
    Effect.NO_DIFFERENCE: (Confidence.MEDIUM, "measured here: none of the others is faster"),
    Effect.OTHER_CAP: (Confidence.HIGH, "measured here; the rules differ only in the cap"),
    Effect.CHANGED: (Confidence.MEDIUM, "measured here, but the rules expected something else"),
    Effect.SETTLED: (Confidence.HIGH, "measured here"),
    Effect.KEPT: (Confidence.MEDIUM, "another way has the higher throughput"),
}


def measured_answer(result: MeasuredAdvice, bench: BenchAnswer | None) -> AdviceAnswer:
    """Return the answer after the measurement, with the rules' answer, the effect and the measurement."""
    answer = advice_answer(result.final)
    rules = advice_answer(result.rules)
    best = result.final.best
    why = answer.why
    if best is not None and best.way.value != rules.winner:
        # It won by the measurement; the rules have their own reasons for it, or none.
        why = [*(reason.text for reason in best.of(Kind.FOR)), *(f"condition: {text}" for text in answer.conditions)]
    chosen, against = result.chosen, result.against
    return replace(
        answer,
        why=why,
        rules=replace(rules, verdicts=(), notes=[]),
        measured=MeasuredAnswer(
            effect=result.effect.value,
            sentence=result.sentence,
            copies=result.copies,
            way=None if chosen is None else chosen.name,
            threads_percent=None if chosen is None else chosen.cap,
            against=None if against is None else against.name,
            ratio=None if result.ratio is None else float(f"{result.ratio:.6g}"),
            certain=result.certain,
        ),
        measurement=bench,
    )
