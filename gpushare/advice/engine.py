"""The engine: every way gets a verdict, the best of them wins. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpushare.advice.rules import CONDITIONS, PREFERENCES, REQUIREMENTS, VETOES, Kind, Reason, Requirement, Rule
from gpushare.advice.ways import CONCURRENT, SHARING, Way

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation


class Outcome(str, Enum):
    """What a way is for a case."""

    FITS = "fits"
    CONDITION = "fits with a condition"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One way, what was found, and all reasons: vetoes first, then conditions, then preferences."""

    way: Way
    outcome: Outcome
    reasons: tuple[Reason, ...]
    score: int

    def of(self, *kinds: Kind) -> tuple[Reason, ...]:
        """Return the reasons of these kinds."""
        return tuple(one for one in self.reasons if one.kind in kinds)

    @property
    def refused(self) -> bool:
        """Return whether it is refused."""
        return self.outcome is Outcome.REFUSED


# What speaks for a way when nothing else does: what needs least comes first.
BASE: Final = {
    Way.WHOLE: 5,
    Way.STREAMS: 2,
    Way.TIMESLICE: 10,
    Way.MPS: 8,
    Way.MPS_PRIORITY: -20,
    Way.MPS_STATIC: -10,
    Way.MIG: 6,
    Way.VGPU: -100,
    Way.MIG_MPS: 3,
    Way.MIG_TIMESLICE: 2,
    Way.MPS_STREAMS: 1,
    Way.MEASURE: -1,
    Way.FIX: -50,
}
_ORDER: Final = {Kind.VETO: 0, Kind.CONDITION: 1, Kind.FOR: 2, Kind.AGAINST: 3}
_TO_COMPARE: Final = 2
_NOTHING_TO_COMPARE: Final = Reason(
    rule="nothing-to-compare",
    kind=Kind.VETO,
    text="fewer than two ways are left to compare",
    source="the other verdicts",
)
_NOTHING_KNOWN: Final = Reason(
    rule="nothing-decides",
    kind=Kind.FOR,
    text="it depends on whether one process fills the GPU (--saturating, --no-saturating): if it does, sharing gains nothing; "
    "if not, MPS was 3 to 6 times as fast on an H200",
    source="measured on an H200; CERN; sharing studies 2021 to 2026 contradict each other by workload",
    weight=25,
)


def verdicts(situation: Situation) -> tuple[Verdict, ...]:
    """Return the verdict of every way, the best first, the refused last."""
    return situation.once(("verdicts", situation.case), lambda: _verdicts(situation))


def _verdicts(situation: Situation) -> tuple[Verdict, ...]:
    reasons: dict[Way, list[Reason]] = {way: [] for way in Way}
    rules: tuple[Rule | Requirement, ...] = (*VETOES, *REQUIREMENTS, *CONDITIONS, *PREFERENCES)
    for rule in rules:
        for way, reason in rule.reasons(situation):
            reasons[way].append(reason)
    found = [_verdict(way, reasons[way]) for way in Way]
    left = [one for one in found if not one.refused and one.way in SHARING and one.way is not Way.VGPU]
    if len(left) < _TO_COMPARE:
        found = [_with(one, _NOTHING_TO_COMPARE) if one.way is Way.MEASURE else one for one in found]
    elif situation.several and len([one for one in left if one.way in CONCURRENT]) > 1 and _undecided(situation):
        found = [_with(one, _NOTHING_KNOWN) if one.way is Way.MEASURE else one for one in found]
    return tuple(sorted(found, key=lambda one: (one.refused, -one.score)))


def winner(found: Iterable[Verdict]) -> Verdict | None:
    """Return the best verdict; None when all that shares or queues is refused."""
    usable = [one for one in found if not one.refused]
    if not any(one.way not in {Way.MEASURE, Way.FIX} for one in usable):
        return None
    return usable[0]


def _undecided(situation: Situation) -> bool:
    """Return whether nothing decides: neither a wish, nor how the work comes, nor whether a process fills the GPU."""
    case = situation.case
    wanted = (
        "cooperating",
        "latency",
        "bandwidth_qos",
        "weights",
        "containment",
        "vms",
        "running",
        "nccl",
        "p2p",
        "io_bound",
        "graphics",
        "profiler",
        "ipc",
    )
    said = any(case.any(field) for field in wanted) or case.roles or situation.isolation or situation.idle_often
    other_users = case.same_user is False or not situation.trusted
    return not said and not other_users and case.any("saturating") is None and (case.groups or 0) < _TO_COMPARE


def _verdict(way: Way, reasons: list[Reason]) -> Verdict:
    reasons.sort(key=lambda one: _ORDER[one.kind])
    if any(one.kind is Kind.VETO for one in reasons):
        outcome = Outcome.REFUSED
    elif any(one.kind is Kind.CONDITION for one in reasons):
        outcome = Outcome.CONDITION
    else:
        outcome = Outcome.FITS
    signs = {Kind.FOR: 1, Kind.AGAINST: -1}
    score = BASE[way] + sum(signs.get(one.kind, 0) * one.weight for one in reasons)
    return Verdict(way=way, outcome=outcome, reasons=tuple(reasons), score=score)


def _with(verdict: Verdict, reason: Reason) -> Verdict:
    outcome = Outcome.REFUSED if reason.kind is Kind.VETO else verdict.outcome
    reasons = tuple(sorted((*verdict.reasons, reason), key=lambda one: _ORDER[one.kind]))
    return replace(verdict, outcome=outcome, reasons=reasons, score=verdict.score + reason.weight)
