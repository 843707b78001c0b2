"""``gpushare explain``: explanations as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from gpushare.show.text import visible, wrapped

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
    paragraphs = ["\n".join(_match_lines(match)) for match in matches]
    return "\n\n".join([*(["\n".join(wrapped(verdict, _WIDTH, "verdict: ", " " * 9))] if verdict else []), *paragraphs])


def _match_lines(match: Explained) -> Iterator[str]:
    """Yield the lines about one match: title, the line of the log, meaning, cause, next commands, source."""
    explanation = match.explanation
    names = ", ".join(explanation.names)
    yield from wrapped(f"{explanation.title}  {names}" if names else explanation.title, _WIDTH, "", "  ")
    if explanation.pattern is not None or match.lines > 1:
        more = f" (and {match.lines - 1} more like it)" if match.lines > 1 else ""
        yield from _labelled_lines("line", visible(match.line) + more)
    if explanation.text is not None:
        yield from _labelled_lines("says", explanation.text)
    yield from _labelled_lines("means", explanation.meaning)
    yield from _labelled_lines("sharing" if explanation.kind == "concept" else "cause", explanation.cause)
    for number, command in enumerate(explanation.next):
        yield from _labelled_lines("" if number else "next", command)
    yield from _labelled_lines("source", explanation.source)


def _labelled_lines(label: str, text: str) -> list[str]:
    return wrapped(text, _WIDTH, f"  {label:<{_LABEL - 2}}", " " * _LABEL)
