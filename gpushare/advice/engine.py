"""The engine: every way gets a verdict, the best of them wins. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpushare.advice.conditions import CONDITIONS
from gpushare.advice.preferences import BASE, PREFERENCES
from gpushare.advice.requirements import REQUIREMENTS, Requirement
from gpushare.advice.rule import Kind, Reason, Rule
from gpushare.advice.vetoes import VETOES
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


_ORDER: Final = {Kind.VETO: 0, Kind.CONDITION: 1, Kind.FOR: 2, Kind.AGAINST: 3}
_TO_COMPARE: Final = 2
_NOTHING_TO_COMPARE: Final = Reason(
    rule="nothing-to-compare",
    kind=Kind.VETO,
    text="there are no two ways left to compare",
    source="the other verdicts",
)
_NOTHING_KNOWN: Final = Reason(
    rule="nothing-decides",
    kind=Kind.FOR,
    text="nothing that was said decides: the same programs gain 2 times or lose, by how they use the GPU",
    source="sharing studies 2021 to 2026 contradict each other by workload",
    weight=25,
)


def verdicts(situation: Situation) -> tuple[Verdict, ...]:
    """Return the verdict of every way, the best first, the refused last."""
    found = [_verdict(situation, way) for way in Way]
    left = [one for one in found if not one.refused and one.way in SHARING and one.way is not Way.VGPU]
    if len(left) < _TO_COMPARE:
        found = [_with(one, _NOTHING_TO_COMPARE) if one.way is Way.MEASURE else one for one in found]
    elif situation.several and len([one for one in left if one.way in CONCURRENT]) > 1 and _nothing_said(situation):
        found = [_with(one, _NOTHING_KNOWN) if one.way is Way.MEASURE else one for one in found]
    return tuple(sorted(found, key=lambda one: (one.refused, -one.score)))


def winner(found: Iterable[Verdict]) -> Verdict | None:
    """Return the best verdict; None when all that shares or queues is refused."""
    usable = [one for one in found if not one.refused]
    if not any(one.way not in {Way.MEASURE, Way.FIX} for one in usable):
        return None
    return usable[0]


def _nothing_said(situation: Situation) -> bool:
    """Return whether none of what decides was said."""
    case = situation.case
    said = (case.same_user, case.any("saturating"), case.pattern, case.wanted_isolation, case.any("latency"))
    wanted = (
        "cooperating",
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
    others = any(case.any(field) for field in wanted) or case.roles or not situation.trusted
    return all(one is None for one in said) and not others and (case.groups or 0) < _TO_COMPARE


def _verdict(situation: Situation, way: Way) -> Verdict:
    rules: tuple[Rule | Requirement, ...] = (*VETOES, *REQUIREMENTS, *CONDITIONS, *PREFERENCES)
    reasons = [reason for rule in rules for reason in rule.reasons(situation, way)]
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
