"""The rules of the advisor, read from ``gpushare/data/rules.yaml``, and the verdicts that they lead to. Pure.

Each rule names its source: a document or a measurement. Users see the reasons, but not the weights, which order the ways.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from enum import Enum
from string import Formatter
from typing import Any, ClassVar, Final

from gpushare.advice.case import Workload, any_of, negated
from gpushare.advice.conditions import CONDITIONS, WORDS, Condition, condition_named
from gpushare.advice.situation import Situation
from gpushare.advice.table import Cell
from gpushare.advice.ways import ADVISED, ALL_MIG, ALL_MPS, CONCURRENT, LEAVING, SHARING
from gpushare.base.model import Way
from gpushare.base.package import package_rows
from gpushare.base.values import NOT_STORED, dataclass


class Kind(str, Enum):
    """The effect of a rule on a way."""

    VETO = "veto"
    CONDITION = "condition"
    FOR = "for"
    AGAINST = "against"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """What one rule says about one way.

    ``open`` marks an unanswered question. ``row`` is the row of the table that the reason comes from, ``contradiction``
    the disagreement of its sources.
    """

    rule: str
    kind: Kind
    text: str
    source: str
    weight: int = field(default=0, metadata=NOT_STORED)
    open: bool = False
    row: str | None = None
    contradiction: str | None = None


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The level of a row that a way needs: ``wanted`` to fit, ``floor`` to fit with a condition.

    ``inside``: it applies between processes of one instance too, where a weak inner way is a condition.
    """

    row: str
    wanted: str
    floor: str
    inside: bool


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: the ways that it speaks of, with weights for preferences. ``words`` are what ``text`` is filled with.

    ``unknown`` is the text of a condition, for where it is unknown whether the rule applies; None: it then says nothing.
    """

    id: str
    # None: it requires a level of the table.
    kind: Kind | None
    ways: Mapping[Way, int]
    when: Condition
    text: str
    words: tuple[str, ...]
    source: str
    unknown: str | None
    needs: Requirement | None

    def reasons(self, situation: Situation) -> Iterator[tuple[Way, Reason]]:
        """Yield what the rule says about each of its ways in a situation; nothing where its condition does not hold."""
        for way, weight in self.ways.items():
            applies = self.when(situation, way)
            if applies is False or (applies is None and self.unknown is None):
                continue
            if self.needs is not None:
                for reason in self._requirement_reasons(situation, way, self.needs, unanswered=applies is None):
                    yield way, reason
            elif applies is None:
                text = self.unknown or ""
                yield way, Reason(rule=self.id, kind=Kind.CONDITION, text=text, source=self.source, open=True)
            elif self.kind is not None:
                text = self.text.format(**{word: WORDS[word](situation, way) for word in self.words})
                yield way, Reason(rule=self.id, kind=self.kind, text=text, source=self.source, weight=weight)

    def _requirement_reasons(
        self, situation: Situation, way: Way, needs: Requirement, *, unanswered: bool
    ) -> Iterable[Reason]:
        """Yield why a way does not meet a requirement; ``unanswered``: the user has not said whether it applies."""
        if way.outer is None:
            return
        table = situation.table
        driver = situation.host.driver
        cell = table.cell(way.outer, needs.row, driver)
        best_level = table.level(way.outer, needs.row, driver, option=way.table_option)
        # These two are themselves the option of their cell; other ways have its level only with a special setup.
        usual_level = best_level if way in {Way.MPS_STATIC, Way.SLICES} else cell.level
        enough = table.at_least(needs.row, usual_level, needs.wanted)
        # Instances meet the requirement, but each process shares its instance.
        shares_instance = way.outer is Way.MIG and way.inner is not None and not situation.grouped
        if unanswered:
            if not enough and not table.at_least(needs.row, best_level, needs.floor):
                yield self._reason(cell, Kind.CONDITION, self.unknown or "", unanswered=True)
        elif not enough:
            yield self._below_level_reason(situation, way, cell, best_level, needs)
        elif way.inner is not None and shares_instance and needs.inside:
            inner = table.cell(way.inner, needs.row, driver)
            if not table.at_least(needs.row, inner.level, needs.wanted):
                kind = Kind.CONDITION if table.at_least(needs.row, inner.level, needs.floor) else Kind.VETO
                yield self._reason(inner, kind, f"{self.text}: that is so between instances, not within one")

    def _below_level_reason(
        self, situation: Situation, way: Way, cell: Cell, best_level: str, needs: Requirement
    ) -> Reason:
        """Return the reason for a cell below the wanted level; ``best_level`` is what an option of the cell gives.

        It is a condition if that is at least the floor, else a veto.
        """
        table = situation.table
        if way is Way.VGPU and table.at_least(needs.row, best_level, needs.wanted):
            if situation.gpu.mig_capable is not False:
                return self._reason(cell, Kind.CONDITION, f"{self.text}: only with MIG-backed vGPU")
            is_asked = self.id == "bandwidth-qos" and situation.case.any("bandwidth_qos")
            text = f"{self.text}: that needs MIG-backed vGPU, and this GPU has no MIG"
            return self._reason(cell, Kind.VETO if is_asked else Kind.CONDITION, text)
        text = f"{self.text} ({table.titles[cell.way]}, {table.row(cell.row).title}: {cell.today})"
        if table.at_least(needs.row, best_level, needs.floor):
            return self._reason(cell, Kind.CONDITION, text)
        return self._reason(cell, Kind.VETO, text if best_level == cell.level else f"{text}, at best {best_level}")

    def _reason(self, cell: Cell, kind: Kind, text: str, *, unanswered: bool = False) -> Reason:
        """Return a reason that comes from a cell of the table; ``unanswered``: the user has not said whether it applies.

        Where sources contradict each other, that is told with a condition that applies.
        """
        return Reason(
            rule=self.id,
            kind=kind,
            text=text,
            source="; ".join(source.title for source in cell.sources[:2]),
            open=unanswered,
            row=cell.row,
            contradiction=cell.contradiction if kind is Kind.CONDITION and not unanswered else None,
        )


# -- from the file -----------------------------------------------------------------------------------

_GROUPS: Final = {"mig*": ALL_MIG, "mps*": ALL_MPS, "leaving*": LEAVING, "concurrent*": CONCURRENT}
_PREFERENCES: Final = (Kind.FOR, Kind.AGAINST)
# In a condition: unknown(same_user) holds where that is unknown.
_EXACTLY: Final = {"yes": True, "no": False, "unknown": None}


def parse_condition(text: str) -> Condition:
    """Return the condition that a rule's ``when`` says.

    Raises:
        ValueError: it is not made of words with and, or, not; or there is no such word.
    """
    return _compile_condition(ast.parse(text, mode="eval").body)


def _compile_condition(node: ast.expr) -> Condition:
    """Return the condition of a parsed expression; unknown values stay unknown (None)."""
    if isinstance(node, ast.BoolOp):
        parts = [_compile_condition(part) for part in node.values]
        if isinstance(node.op, ast.Or):
            return lambda s, way: any_of(part(s, way) for part in parts)
        return lambda s, way: negated(any_of(negated(part(s, way)) for part in parts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        part = _compile_condition(node.operand)
        return lambda s, way: negated(part(s, way))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _EXACTLY:
        part = _compile_condition(node.args[0])
        wanted = _EXACTLY[node.func.id]
        return lambda s, way: part(s, way) is wanted
    if isinstance(node, ast.Name):
        if node.id in CONDITIONS or hasattr(Situation, node.id) or node.id in Workload.__dataclass_fields__:
            return condition_named(node.id)
        raise ValueError(f"no condition is named {node.id}")
    raise ValueError(f"not a condition: {ast.unparse(node)}")


def _parse_rule(row: Mapping[str, Any]) -> Rule:
    """Return the rule of one row of the file."""
    # The name of the kind is the key of the ways; preferences have a weight for each.
    kind = next((kind for kind in Kind if kind.value in row), None)
    ways_of_row: Any = row.get("ways") if kind is None else row[kind.value]
    if kind in _PREFERENCES:
        ways = {Way(name): weight for name, weight in ways_of_row.items()}
    else:
        # A name with a star is a group; none means all ways of sharing at the same time.
        named = [_GROUPS.get(name) or (Way(name),) for name in ways_of_row or ["concurrent*"]]
        ways = dict.fromkeys((way for group in named for way in group), 0)
    needs = row.get("needs")
    if needs is not None:
        needs = Requirement(**{"floor": needs["wanted"], "inside": row.get("inside", True), **needs})
    return Rule(
        id=row["id"],
        kind=kind,
        ways=ways,
        when=parse_condition(row["when"]),
        text=row["text"],
        words=tuple(name for _, name, _, _ in Formatter().parse(row["text"]) if name),
        source=row.get("source", ""),
        unknown=row.get("unknown"),
        needs=needs,
    )


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return the rules of the package. tests/advice/test_rules.py checks the file."""
    return tuple(map(_parse_rule, package_rows("rules.yaml")))


def cannot_leave(situation: Situation) -> bool:
    """Return whether these jobs cannot be swapped out of this GPU: the driver cannot, or gpushare does not try."""
    return any(rule.when(situation, Way.SWAP) for rule in rules() if rule.id in _RULES_AGAINST_LEAVING)


_RULES_AGAINST_LEAVING: Final = frozenset(
    f"leaving-{why}" for why in ("driver", "instance", "peers", "ipc", "managed", "together", "vms", "containers")
)


# -- verdicts ----------------------------------------------------------------------------------------


class Outcome(str, Enum):
    """The outcome of a way for a case."""

    FITS = "fits"
    CONDITION = "fits with a condition"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class WayVerdict:
    """The verdict on one way, with all reasons: vetoes first, then conditions, then preferences."""

    way: Way
    outcome: Outcome
    reasons: tuple[Reason, ...]
    score: int = field(metadata=NOT_STORED)
    json_properties: ClassVar = ("title",)

    @property
    def title(self) -> str:
        return self.way.label

    def reasons_of(self, *kinds: Kind) -> tuple[Reason, ...]:
        return tuple(reason for reason in self.reasons if reason.kind in kinds)

    @property
    def refused(self) -> bool:
        return self.outcome is Outcome.REFUSED


# The score of a way before any reason counts: the simplest setup comes first.
BASE: Final = {
    Way.WHOLE: 5,
    Way.TURNS: -10,
    Way.SWAP: -15,
    Way.STREAMS: 2,
    Way.TIMESLICE: 10,
    Way.SLICES: -20,
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
_SIGNS: Final = {Kind.FOR: 1, Kind.AGAINST: -1}
_LEAST_TO_COMPARE: Final = 2
_NOTHING_TO_COMPARE: Final = Reason(
    rule="nothing-to-compare",
    kind=Kind.VETO,
    text="fewer than two ways are left to compare",
    source="the other verdicts",
)


def verdicts(situation: Situation) -> tuple[WayVerdict, ...]:
    """Return the verdict on every way: the best first, the refused ones last."""
    return situation.once(("verdicts", situation.case), lambda: _judge_all(situation))


def _judge_all(situation: Situation) -> tuple[WayVerdict, ...]:
    """Return the verdict on every way, from the reasons of all rules."""
    reasons: dict[Way, list[Reason]] = {way: [] for way in ADVISED}
    for rule in rules():
        for way, reason in rule.reasons(situation):
            reasons[way].append(reason)
    judged = {way: _judge_way(way, reasons[way]) for way in ADVISED}
    # `gpushare bench` cannot measure vGPUs.
    comparable = [way for way in SHARING if way is not Way.VGPU and not judged[way].refused]
    if len(comparable) < _LEAST_TO_COMPARE:
        judged[Way.MEASURE] = _judge_way(Way.MEASURE, [*reasons[Way.MEASURE], _NOTHING_TO_COMPARE])
    return tuple(sorted(judged.values(), key=lambda verdict: (verdict.refused, -verdict.score)))


def winner(judged: Iterable[WayVerdict]) -> WayVerdict | None:
    """Return the first usable of sorted verdicts; None: every way of sharing is refused, or only measuring is left."""
    usable = [verdict for verdict in judged if not verdict.refused]
    # Measuring alone is no answer, and a change of the program or a vGPU only if a rule speaks for it.
    answers = (each for each in usable if each.way not in {Way.MEASURE, Way.FIX, Way.VGPU})
    spoken_for = (each for each in usable if each.way in {Way.FIX, Way.VGPU} and each.reasons_of(Kind.FOR))
    return usable[0] if any(answers) or any(spoken_for) else None


def _judge_way(way: Way, reasons: list[Reason]) -> WayVerdict:
    """Return the verdict on one way: a veto refuses it, weights make its score."""
    reasons = sorted(reasons, key=lambda reason: _ORDER[reason.kind])
    outcome = Outcome.FITS
    if any(reason.kind is Kind.VETO for reason in reasons):
        outcome = Outcome.REFUSED
    elif any(reason.kind is Kind.CONDITION for reason in reasons):
        outcome = Outcome.CONDITION
    score = BASE[way] + sum(_SIGNS.get(reason.kind, 0) * reason.weight for reason in reasons)
    return WayVerdict(way=way, outcome=outcome, reasons=tuple(reasons), score=score)
