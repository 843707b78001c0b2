"""How a measurement changes the rules' answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from gpushare.advice.advise import (
    Advice,
    AdviceAnswer,
    Confidence,
    Effect,
    MeasuredAnswer,
    advice_answer,
    open_text,
    open_titles,
    with_way,
)
from gpushare.advice.limits import threads_together
from gpushare.advice.questions import OtherAnswer, other_answers
from gpushare.advice.rules import Kind, Reason, WayVerdict, verdicts
from gpushare.base.benchmark import NEAR, BenchAnswer, BenchCell, Metric
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
# Rules about the fastest way, which a measurement replaces. It does not overrule the other rules: throughput says
# nothing about latency, bursts, isolation or priority.
ANSWERED: Final = frozenset(
    {
        *("small-same-user", "small-maybe-same-user", "small-batch", "cooperating", "saturating", "half-a-gpu"),
        *("bandwidth-bound", "bandwidth-bound-mps", "bandwidth-in-turn", "older-or-many", "cuda-graphs"),
        *("maybe-small", "maybe-small-maybe-same-user", "waits-for-input-shared"),
    }
)
# The name of a way of `bench`: the thread percentages of all processes add up to this.
_CAP_OF_ALL: Final = re.compile(r"mps:(\d+)/n", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class MeasuredAdvice:
    """The rules' answer, the final answer, and the effect of the measurement."""

    rules: Advice
    final: Advice
    measured: MeasuredAnswer


def bench_ways(advice: Advice) -> tuple[str, ...]:
    """Return the ways to measure, those without a veto, by their names in `gpushare bench`."""
    return tuple(name for way, names in BENCH_WAYS.items() if not advice.verdict_on(way).refused for name in names)


class _Finding(NamedTuple):
    """What the figures say: the effect on the rules' answer, as a sentence too, and the two cells that are compared."""

    effect: Effect
    sentence: str
    chosen: BenchCell | None = None
    against: BenchCell | None = None


def _open_finding(why: str) -> _Finding:
    """Return the finding that the measurement says nothing, with the reason: then the rules' answer stands."""
    return _Finding("open", f"{why}; the rules' answer stands")


def unmeasured_advice(advice: Advice, why: str, copies: int) -> MeasuredAdvice:
    """Return the rules' answer as the final one, with the reason why nothing was measured."""
    return _advice_with_finding(advice, advice, _open_finding(why), copies, None)


def _advice_with_finding(
    rules: Advice, final: Advice, finding: _Finding, copies: int, metric: Metric | None
) -> MeasuredAdvice:
    """Return the answer of the rules, the final one and what was found; ``metric`` None: nothing was measured."""
    chosen, against = finding.chosen, finding.against
    ratio = None
    if chosen is not None and against is not None and metric is not None:
        ratio = float(f"{chosen.speed(metric) / against.speed(metric):.6g}")
    answer = MeasuredAnswer(
        effect=finding.effect,
        sentence=finding.sentence,
        copies=copies,
        way=None if chosen is None else chosen.way,
        threads_percent=None if chosen is None else chosen.threads_percent,
        against=None if against is None else against.way,
        ratio=ratio,
    )
    return MeasuredAdvice(rules=rules, final=final, measured=answer)


def measured_advice(advice: Advice, bench: BenchAnswer, copies: int) -> MeasuredAdvice:
    """Return the answer after a measurement with a number of copies: the fastest of what fits, or the rules' answer.

    The rules' answer, which has a way, stays if nothing is faster, if it could not be measured, or if it was chosen for a
    reason that throughput does not show.
    """
    finding = _finding_of(advice, bench, copies)
    final = advice
    if finding.effect == "changed" and finding.chosen is not None:
        cap = _cap_of_each(advice.situation, finding.chosen.way)
        final = with_way(advice, _WAY_OF[finding.chosen.way], cap=cap)
    if finding.effect in {"changed", "confirmed"}:
        # What the recipe suggests to measure has been measured.
        recipe = None if final.recipe is None else replace(final.recipe, measure=())
        final = replace(final, recipe=recipe, changes=_changes_after(final))
    if finding.effect != "open":
        level, why = _confidence(advice, final, finding, bench.metric)
        final = replace(final, confidence=level, confidence_why=why)
    return _advice_with_finding(advice, final, finding, copies, bench.metric)


def _finding_of(advice: Advice, bench: BenchAnswer, copies: int) -> _Finding:
    """Return what the figures say about the rules' answer.

    It stays open if nothing was measured, or the rules' way was not. If the copies of the rules' way failed, the answer
    changes to the preferred one of the others.
    """
    metric = bench.metric
    of_copies = [cell for cell in bench.cells if cell.copies == copies and cell.way in _WAY_OF]
    cells = [
        cell
        for cell in of_copies
        if not cell.failures and cell.speed(metric) > 0 and not advice.verdict_on(_WAY_OF[cell.way]).refused
    ]
    if not cells:
        return _open_finding(f"nothing was measured{_left_out_text(bench, copies)}")
    fastest = max(cells, key=lambda cell: cell.speed(metric))
    choice = _preferred_cell(advice, cells, fastest, metric)
    way = None if advice.best is None else advice.best.way
    if way is None or way is Way.MEASURE:
        return _finding_against_next_best(
            cells, choice, metric, "changed", "the rules left it to a measurement: ", so=_title(choice)
        )
    of_way = [cell for cell in cells if _WAY_OF[cell.way] is way]
    # Of MPS with several caps, the rules' cap counts, or the fastest if that was not measured.
    with_rules_cap = [cell for cell in of_way if cell.way == _name_of_rules_cap(advice.situation)]
    of_rules = max(with_rules_cap or of_way, key=lambda cell: cell.speed(metric), default=None)
    if of_rules is not None and _alike(of_rules, fastest, metric):
        return _finding_against_next_best(cells, of_rules, metric, "confirmed", "", so="the rules' answer stands")
    if of_rules is not None:
        # Another way or cap is faster.
        comparison = _ratio_text(choice, of_rules, metric)
        faster = advice.verdict_on(_WAY_OF[choice.way])
        reasons = [] if faster.way is way else _reasons_not_measured(advice.verdict_on(way), faster)
        if reasons:
            why = f"for a reason that throughput does not show: {reasons[0].text}"
            return _Finding("kept", f"{comparison}, but the rules' answer stands, {why}", of_rules, choice)
        return _Finding("changed", f"the rules said {_title(of_rules)}; measured: {comparison}", choice, of_rules)
    failures = [text for cell in of_copies if _WAY_OF[cell.way] is way for text in cell.failures]
    if failures:
        why = f"the rules said {_way_title(way)}, and its copies failed ({failures[0]})"
        return _Finding("changed", f"{why}, so {_title(choice)}", choice)
    # Only mentioned: nothing is known of the rules' way to compare it with.
    reason = _left_out_text(bench, copies, way)
    return _open_finding(f"{_way_title(way)} was not measured{reason}; {_title(fastest)} was the fastest of the others")


def _finding_against_next_best(
    cells: Sequence[BenchCell],
    cell: BenchCell,
    metric: Metric,
    effect: Literal["confirmed", "changed"],
    start: str,
    *,
    so: str,
) -> _Finding:
    """Return the finding for a cell compared with the fastest of the other ways; it is open if none was measured."""
    others = [other for other in cells if _WAY_OF[other.way] is not _WAY_OF[cell.way]]
    if not others:
        return _open_finding(f"only {_title(cell)} was measured")
    next_best = max(others, key=lambda other: other.speed(metric))
    difference = ", no difference" if _alike(cell, next_best, metric) else ""
    sentence = f"{start}{_ratio_text(cell, next_best, metric)}, the next best{difference}: {so}"
    return _Finding(effect, sentence, cell, next_best)


def _alike(cell: BenchCell, other: BenchCell, metric: Metric) -> bool:
    """Return whether two cells do not differ; of single runs, which cannot tell, whether they are close."""
    different = cell.differs_from(other, metric)
    if different is not None:
        return not different
    slower, faster = sorted((cell.speed(metric), other.speed(metric)))
    return slower >= (1 - NEAR) * faster


def _left_out_text(bench: BenchAnswer, copies: int, way: Way | None = None) -> str:
    """Return why a way, or any way, was not measured, as the end of a sentence; empty if unknown."""
    for cell in bench.left_out:
        if (way is None or _WAY_OF.get(cell.way) is way) and cell.copies in {None, copies}:
            return f" ({cell.reason})"
    if way is not None and way not in BENCH_WAYS:
        return " (gpushare bench does not measure it)"
    return " (it ended too early)" if bench.reason != "finished" else ""


def _way_title(way: Way) -> str:
    return "a queue" if way is Way.WHOLE else way.label


def _title(cell: BenchCell) -> str:
    """Return a cell in a sentence: ``MPS with 25 % each``."""
    cap = "" if cell.threads_percent is None else f" with {cell.threads_percent:g} % each"
    return _way_title(_WAY_OF[cell.way]) + cap


def _ratio_text(cell: BenchCell, other: BenchCell, metric: Metric) -> str:
    """Return how many times as fast one cell is as another: ``MPS is 1.25 x time-slicing``."""
    return f"{_title(cell)} is {cell.speed(metric) / other.speed(metric):.2f} x {_title(other)}"


def _preferred_cell(advice: Advice, cells: Sequence[BenchCell], fastest: BenchCell, metric: Metric) -> BenchCell:
    """Return the cell to use: of those as good as the fastest and close to it, the rules' first choice."""
    least_speed = (1 - NEAR) * fastest.speed(metric)
    near = [cell for cell in cells if _alike(cell, fastest, metric) and cell.speed(metric) >= least_speed]
    order = [verdict.way for verdict in advice.verdicts]
    rules_cap = _name_of_rules_cap(advice.situation)

    def rank(cell: BenchCell) -> tuple[int, bool, bool, float]:
        """Return the sort key: the rules' order of the ways; of MPS the rules' cap, else no cap."""
        has_cap = cell.threads_percent is not None
        return order.index(_WAY_OF[cell.way]), cell.way != rules_cap, has_cap, -cell.speed(metric)

    return min(near, key=rank)


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
    return 100.0 if together is None else min(100.0, int(together[1]) / (situation.case.processes or 1))


def _reasons_not_measured(best: WayVerdict, other: WayVerdict) -> list[Reason]:
    """Return the reasons for preferring one way to another that throughput does not show."""
    rules_for_other = {reason.rule for reason in other.reasons_of(Kind.FOR)}
    rules_against_best = {reason.rule for reason in best.reasons_of(Kind.AGAINST)}
    reasons = [reason for reason in best.reasons_of(Kind.FOR) if reason.rule not in rules_for_other]
    reasons += [reason for reason in other.reasons_of(Kind.AGAINST) if reason.rule not in rules_against_best]
    return sorted((reason for reason in reasons if reason.rule not in ANSWERED), key=lambda reason: -reason.weight)


def _changes_after(final: Advice) -> tuple[OtherAnswer, ...]:
    """Return the answers to questions that would change an answer which was measured.

    With them, the way is refused, or another is better for a reason that throughput does not show.
    """
    changes = []
    for other, part in other_answers(final.situation):
        if final.best is None or other.then is final.best.way:
            continue
        judged = next(verdict for verdict in verdicts(part.situation) if verdict.way is final.best.way)
        if part.best is None or judged.refused or _reasons_not_measured(part.best, judged):
            changes.append(other)
    return tuple(changes)


def _confidence(advice: Advice, final: Advice, finding: _Finding, metric: Metric) -> tuple[Confidence, str]:
    """Return the confidence in the final answer: high only where what was measured differs by more than its scatter."""
    chosen, against = finding.chosen, finding.against
    if finding.effect == "kept":
        level = Confidence.LOW if advice.confidence is Confidence.LOW else Confidence.MEDIUM
        single = chosen is not None and against is not None and chosen.differs_from(against, metric) is None
        return level, "another way has the higher throughput" + (_SINGLE_RUNS if single else "")
    level, why = Confidence.HIGH, "measured here"
    if against is None:
        # The copies of the rules' way failed: nothing was compared.
        level = Confidence.MEDIUM
    elif chosen is not None:
        differs = chosen.differs_from(against, metric)
        if differs is None:
            level = advice.confidence if finding.effect == "confirmed" else Confidence.LOW
            why += _SINGLE_RUNS
        elif not differs:
            level, why = Confidence.MEDIUM, f"{why}: none of the others is faster"
    titles = open_titles(final.changes)
    if titles:
        level = Confidence.MEDIUM if level is Confidence.HIGH else level
        why = f"{why}; {open_text(titles)}"
    return level, why


_SINGLE_RUNS: Final = ", but from single runs: a difference may be noise"


def measured_answer(result: MeasuredAdvice, bench: BenchAnswer | None) -> AdviceAnswer:
    """Return the answer after the measurement, with the rules' answer, the effect and the measurement."""
    answer = advice_answer(result.final)
    rules = advice_answer(result.rules)
    best = result.final.best
    why = answer.why
    if best is not None and best.way.value != rules.winner:
        # It won by the measurement; the rules have their own reasons for it, or none.
        why = [reason.text for reason in best.reasons_of(Kind.FOR)]
        why += [f"condition: {text}" for text in answer.conditions]
    return replace(
        answer, why=why, rules=replace(rules, verdicts=(), notes=[]), measured=result.measured, measurement=bench
    )
