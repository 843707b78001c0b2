"""``gpushare explain``: explanations as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from gpushare.show.text import visible

_LABEL: Final = 10
_WIDTH: Final = 80


class Explained(Protocol):
    """An explanation as it is shown."""

    @property
    def explanation(self) -> Any:
        """Return the explanation: title, names, text, meaning, cause, next, source."""

    @property
    def line(self) -> str:
        """Return the line that it explains."""

    @property
    def lines(self) -> int:
        """Return how many lines it explains."""


def explained_text(matches: Sequence[Explained], verdict: str | None = None) -> str:
    """Return a verdict and explanations as paragraphs of at most 80 columns."""
    paragraphs = ["\n".join(_one(match)) for match in matches]
    return "\n\n".join([*(["\n".join(_wrapped(verdict, "verdict: "))] if verdict else []), *paragraphs])


def _one(match: Explained) -> Iterator[str]:
    explanation = match.explanation
    names = ", ".join(explanation.names)
    yield from _wrapped(f"{explanation.title}  {names}" if names else explanation.title, "")
    if explanation.pattern is not None or match.lines > 1:
        more = f" (and {match.lines - 1} more like it)" if match.lines > 1 else ""
        yield from _labelled("line", visible(match.line) + more)
    if explanation.text is not None:
        yield from _labelled("says", explanation.text)
    yield from _labelled("means", explanation.meaning)
    yield from _labelled("sharing" if explanation.kind == "concept" else "cause", explanation.cause)
    for number, command in enumerate(explanation.next):
        yield from _labelled("" if number else "next", command)
    yield from _labelled("source", explanation.source)


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(text, f"  {label:<{_LABEL - 2}}")


def _wrapped(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * (len(first) or 2),
        break_on_hyphens=False,
        break_long_words=False,
    )
