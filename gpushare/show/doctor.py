"""``gpushare doctor`` on a terminal: one line per check; what warns or fails also says why, and its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpushare.show.text import visible, wrapped

if TYPE_CHECKING:
    from rich.text import Text

COLOURS: Final = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def check_lines(rows: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    """Return the checks as lines that fit a width (columns); a remedy is never broken."""
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
            lines += [Text(f"{margin}remedy: {visible(row['remedy'])}")] if row["remedy"] else []
    return lines
