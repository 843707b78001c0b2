"""The comparison of ways: a grid of wrapped cells if it fits, else one below the other."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from gpushare.show.result import Column, Table, records
from gpushare.show.text import visible, wrapped

if TYPE_CHECKING:
    from rich.text import Text

NOT_HERE: Final = "not here"
GAP: Final = 2
# A narrower cell would be a column of single words.
NARROWEST: Final = 22
WIDEST: Final = 44
_INDENT: Final = 2
# On a narrower terminal, lines are longer than it is wide.
_LEAST_CELL: Final = 10
# The width to which the titles of rows are wrapped.
_TITLE: Final = 16
# Where ways are below each other: the width of a terminal from which the title is next to them, not above.
_BESIDE: Final = 72
_CUT: Final = "…"
_NO_BREAK: Final = "\xa0"


@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """One cell as shown; ``text`` is None if the way is not available."""

    text: str | None
    # Sources disagree on it.
    disputed: bool = False


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One row: a cell per way."""

    title: str
    cells: tuple[ComparedCell, ...]
    # Shown on a narrow screen, too.
    decides: bool = True


def _grid_widths(titles: Sequence[str], rows: Sequence[ComparedRow], width: int) -> tuple[int, int]:
    """Return the widths of a grid's columns in this many characters: that of the first column, and of each other.

    The first one has the titles of the rows, wrapped to `_TITLE`, but with no word broken.
    """
    longest_word = max((len(word) for row in rows for word in row.title.split()), default=0)
    longest_title = max((len(row.title) for row in rows), default=0)
    first = max(longest_word, min(_TITLE, longest_title))
    return first, min(WIDEST, (width - first) // max(len(titles), 1) - GAP)


def _grid_lines(titles: Sequence[str], rows: Sequence[ComparedRow], first: int, each: int) -> list[Text]:
    """Return a grid with a column of titles and one of each way, of these widths in characters."""
    from rich.text import Text

    widths = [first, *[each] * len(titles)]
    total = sum(widths) + GAP * len(titles)
    head = _joined_line([Text(""), *[Text(title, style="bold") for title in titles]], widths)
    lines = [head, Text("─" * total, style="dim")]
    for row in rows:
        if row is not rows[0]:
            lines.append(Text(""))
        columns = [_wrapped(row.title, first, "dim"), *[_cell_lines(cell, each) for cell in row.cells]]
        lines += [_joined_line([cell or Text("") for cell in cells], widths) for cells in zip_longest(*columns)]
    return lines


def _stacked_lines(
    titles: Sequence[str], rows: Sequence[ComparedRow], width: int, *, whole: bool, absent: frozenset[str]
) -> list[Text]:
    """Return the rows with their ways below each other, each row's title to the left, or above on a narrow screen.

    With the title to the left, a cell is cut to one line unless ``whole``. ``absent`` ways are only in the first row.
    """
    from rich.text import Text

    beside = width >= _BESIDE
    lead_width = _TITLE + GAP if beside else _INDENT
    way_width = max(len(title) for title in titles) + GAP
    cell_width = max(width - lead_width - way_width, _LEAST_CELL)
    lines: list[Text] = []
    for row in rows:
        leads = _wrapped(row.title, _TITLE, "bold") if beside else []
        if not beside:
            lines.append(Text(row.title, style="bold"))
        # The lines right of the title: the name of the way, on its first line only, and a part of its cell.
        right: list[Text] = []
        for title, cell in zip(titles, row.cells, strict=True):
            if title not in absent or row is rows[0]:
                parts = _cell_lines(cell, cell_width, short=beside and not whole)
                names = [title] + [""] * (len(parts) - 1)
                right += map(Text.assemble, ((name.ljust(way_width), "dim") for name in names), parts)
        for number, line in enumerate(right):
            lead = leads[number] if number < len(leads) else Text("")
            lead.pad_right(lead_width - lead.cell_len)
            lines.append(Text.assemble(lead, line))
    return lines


def _cell_lines(cell: ComparedCell, width: int, *, short: bool = False) -> list[Text]:
    """Return a cell wrapped to a width, with a star if sources disagree; ``short`` cuts it to one line."""
    if cell.text is None:
        return _wrapped(NOT_HERE, width, "dim")
    # The star stays with the last word.
    star = f"{_NO_BREAK}*" if cell.disputed else ""
    lines = _wrapped(cell.text + star, width, "")
    if short and len(lines) > 1:
        # The blank and the ellipsis take two characters.
        first = _wrapped(cell.text, width - len(star) - 2, "")[0].plain
        lines = _wrapped(f"{first.rstrip(',;:(')}{_NO_BREAK}{_CUT}{star}", width, "")
    if cell.disputed:
        lines[-1].stylize("yellow", len(lines[-1]) - 1)
    return lines


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    from rich.text import Text

    lines = textwrap.wrap(visible(text), width, break_on_hyphens=False)
    return [Text(line.replace(_NO_BREAK, " "), style=style) for line in lines] or [Text("")]


def _joined_line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    """Return one line of a grid: the cells, each padded to its width."""
    from rich.text import Text

    for cell, width in zip(cells, widths, strict=True):
        cell.pad_right(max(width - cell.cell_len, 0))
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line


def compare_table(
    title: str, titles: Sequence[str], rows: Sequence[ComparedRow], *, whole: bool, absent: frozenset[str]
) -> Table:
    """Return the table of a comparison: drawn on a terminal, shortened unless ``whole``; else one record per cell.

    ``absent`` ways, which this host does not have, get one line where there is no room for a grid.
    """
    cells = [
        {"row": row.title, "way": name, "says": NOT_HERE if cell.text is None else cell.text}
        for row in rows
        for name, cell in zip(titles, row.cells, strict=True)
    ]
    return records(
        "ways",
        ("row", "way", "says"),
        cells,
        title=title,
        draw=lambda width: _table_lines(titles, rows, width, whole=whole, absent=absent),
    )


def _table_lines(
    titles: Sequence[str], rows: Sequence[ComparedRow], width: int, *, whole: bool, absent: frozenset[str]
) -> list[Text]:
    """Return a comparison as lines: a grid if its cells are wide enough, else the ways below each other.

    Below each other, all rows are shown if the user asked for it (``whole``) or the terminal is narrow. Else only the rows
    that decide are, ``absent`` ways are in the first one only, and a line names the other rows.
    """
    from rich.text import Text

    def remark(text: str) -> list[Text]:
        return [Text(""), *(Text(line, style="dim") for line in wrapped(text, width))]

    first, each = _grid_widths(titles, rows, width)
    if each >= NARROWEST or len(titles) == 1:
        lines = _grid_lines(titles, rows, first, max(each, 1))
    elif whole or width < _BESIDE:
        lines = _stacked_lines(titles, rows, width, whole=whole, absent=frozenset())
    else:
        deciding = [row for row in rows if row.decides]
        lines = _stacked_lines(titles, deciding, width, whole=False, absent=absent)
        hidden = ", ".join(row.title for row in rows if not row.decides)
        lines += remark(f"not shown: {hidden}; all of it: gpushare compare -v; one way: gpushare compare mps")
    if any(cell.disputed and cell.text is not None for row in rows for cell in row.cells):
        lines += remark("* sources disagree: gpushare compare --why ROW WAY")
    return [Text(""), *lines]


def csv_table(cells: Sequence[Any]) -> Table:
    """Return one row per cell with all of its views; sources by their keys."""
    keys = ("row", "way", "published", "today", "host", "level", "limit", "since", "contradiction", "note")
    sources = {"sources": lambda cell: " ".join(source.key for source in cell.sources)}
    return records("ways", (*keys, *sources), cells, sources)


def why_table(title: str, entries: Sequence[tuple[str, str]]) -> Table:
    """Return the table of one cell: headings, each with its text."""
    columns = (Column("what", "what", group=True), Column("says", "says", wrap=True))
    return Table(
        name="cell", title=title, columns=columns, rows=tuple({"what": what, "says": says} for what, says in entries)
    )
