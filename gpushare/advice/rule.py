"""What a rule is, and what it says about a way. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gpushare.advice.case import any_of, negated

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.ways import Way

When = Callable[["Situation"], "bool | None"]


def said(*properties: str) -> When:
    """Return whether a workload has one of these properties."""
    return lambda situation: any_of(situation.case.any(one) for one in properties)


def denied(name: str) -> When:
    """Return whether no workload has a property."""
    return lambda situation: negated(situation.case.any(name))


class Kind(str, Enum):
    """What a rule does to a way."""

    VETO = "veto"
    CONDITION = "condition"
    FOR = "for"
    AGAINST = "against"


@dataclass(frozen=True)
class Rule:
    """One rule: for preferences ``ways`` has a weight for each way.

    ``when`` says whether it applies; ``when_way`` where that differs from way to way. None: unknown; then ``unknown``
    is a condition, and a rule without it does not apply. ``words`` fills the braces of ``text``.
    """

    id: str
    ways: tuple[Way, ...] | Mapping[Way, int]
    text: str
    source: str
    when: When | None = None
    when_way: Callable[[Situation, Way], bool | None] | None = None
    unknown: str | None = None
    words: Callable[[Situation, Way], dict[str, object]] | None = None
    kind: Kind = field(kw_only=True)

    def reasons(self, situation: Situation) -> Iterator[tuple[Way, Reason]]:
        """Yield what the rule says, for each way about which it says something."""
        common = None if self.when is None else self.when(situation)
        for way in self.ways:
            applies = common if self.when_way is None else self.when_way(situation, way)
            if applies:
                text = self.text if self.words is None else self.text.format(**self.words(situation, way))
                weight = self.ways[way] if isinstance(self.ways, Mapping) else 0
                yield way, Reason(rule=self.id, kind=self.kind, text=text, source=self.source, weight=weight)
            elif applies is None and self.unknown is not None:
                text = self.unknown
                yield way, Reason(rule=self.id, kind=Kind.CONDITION, text=text, source=self.source, open=True)


@dataclass(frozen=True, kw_only=True)
class Reason:
    """What one rule says of one way.

    ``open`` is a question that nobody answered. ``row`` is the row of the table that it comes from, ``contradiction``
    what its sources disagree about.
    """

    rule: str
    kind: Kind
    text: str
    source: str
    weight: int = 0
    open: bool = False
    row: str | None = None
    contradiction: str | None = None
