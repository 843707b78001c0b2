"""What a rule is, and what it says of a way. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.ways import Way

When = Callable[["Situation"], "bool | None"]
Words = Callable[["Situation"], "dict[str, object]"]


class Kind(str, Enum):
    """What a rule does to a way."""

    VETO = "veto"
    CONDITION = "condition"
    FOR = "for"
    AGAINST = "against"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule. ``when`` says whether it applies; None: it is not known.

    ``unknown`` is the condition that is said then; without it the rule is taken not to apply. ``weight`` counts for
    preferences only. ``words`` fills the braces of ``text``.
    """

    id: str
    kind: Kind
    ways: tuple[Way, ...]
    text: str
    source: str
    when: When
    unknown: str | None = None
    weight: int = 0
    words: Words = field(default=lambda _: {})

    def reasons(self, situation: Situation, way: Way) -> Iterable[Reason]:
        """Yield what the rule says of a way."""
        if way not in self.ways:
            return
        applies = self.when(situation)
        if applies:
            text = self.text.format(**self.words(situation)) if "{" in self.text else self.text
            yield Reason(rule=self.id, kind=self.kind, text=text, source=self.source, weight=self.weight)
        elif applies is None and self.unknown is not None:
            yield Reason(rule=self.id, kind=Kind.CONDITION, text=self.unknown, source=self.source, open=True)


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
