"""``gpushare doctor`` on a terminal: one line per check; what warns or fails also says why, and its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpushare.show.text import wrapped

if TYPE_CHECKING:
    from rich.text import Text

# As wide as a verdict.
_INDENT: Final = 6
COLOURS: Final = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def check_lines(rows: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    """Return the checks as lines that fit a width (columns); a command can be copied."""
    from rich.text import Text

    names = max((len(row["id"]) for row in rows), default=0)
    lines: list[Text] = []
    for row in rows:
        colour = COLOURS[row["verdict"]]
        first = f"{row['verdict']:<4}  {row['id']:<{names}}  "
        margin = " " * len(first)
        lines += [Text(line, style=colour) for line in wrapped(row["seen"], width, first, margin)]
        if row["verdict"] in {"warn", "fail"}:
            lines += [Text(line) for line in wrapped(row["why"] or "", width, margin, margin)]
            lines += [Text(line) for line in _remedy_lines(row["remedy"] or "", width, margin)]
    return lines


def _remedy_lines(remedy: str, width: int, margin: str) -> list[str]:
    """Return a remedy below the text of its check, or further to the left where it fits one line only there."""
    lead = f"{margin}remedy: "
    if len(lead) + len(remedy) > width:
        lead = " " * _INDENT + "remedy: "
    return wrapped(remedy, width, lead, " " * len(lead))
