"""The comparison of ways: a grid where it fits, else a line for each way below a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpushare.show.result import Column, Table, record_table
from gpushare.show.text import visible, wrapped

if TYPE_CHECKING:
    from rich.text import Text

NOT_HERE: Final = "not here"
# A narrower cell of a grid would be a column of single words; a wider one is hard to read.
NARROWEST: Final = 22
_WIDEST: Final = 44
# The width to which the titles of rows are wrapped in a grid.
_TITLE: Final = 16


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
    # Shown where there is no room for a grid, too.
    decides: bool = True


def compare_table(
    title: str, titles: Sequence[str], rows: Sequence[ComparedRow], *, whole: bool, absent: frozenset[str]
) -> Table:
    """Return the table of a comparison: drawn on a terminal, shortened unless ``whole``; else one record per cell.

    ``absent`` ways, which this host does not have, get one line where there is no room for a grid.
    """
    return record_table(
        "ways",
        ("row", "way", "says"),
        _cell_rows(titles, rows),
        title=title,
        draw=lambda width: _table_lines(titles, rows, width, whole=whole, absent=absent),
    )


def _cell_rows(
    titles: Sequence[str], rows: Sequence[ComparedRow], *, star: str = "", absent: frozenset[str] = frozenset()
) -> tuple[dict[str, str], ...]:
    """Return a row of a table for each cell; ``star`` marks those of which sources disagree. ``absent`` ways have one cell."""
    return tuple(
        {
            "row": row.title,
            "way": name + (star if cell.disputed and cell.text is not None else ""),
            "says": NOT_HERE if cell.text is None else cell.text,
        }
        for row in rows
        for name, cell in zip(titles, row.cells, strict=True)
        if name not in absent or row is rows[0]
    )


def _table_lines(
    titles: Sequence[str], rows: Sequence[ComparedRow], width: int, *, whole: bool, absent: frozenset[str]
) -> list[Text]:
    """Return a comparison as lines: a grid if its cells are wide enough, else a line for each way.

    A line each, all rows are shown in full if the user asked for it (``whole``). Else only the rows that decide are, cut to
    the width, with ``absent`` ways in the first one only, and a line names the other rows.
    """
    from rich.text import Text

    from gpushare.show.render import GAP, table_lines

    def remark(text: str) -> list[Text]:
        return [Text(""), *(Text(line, style="dim") for line in wrapped(text, width))]

    if len(titles) > 1 and (width - _TITLE) // len(titles) - GAP >= NARROWEST:
        lines = _grid_lines(titles, rows, width)
    else:
        deciding = [row for row in rows if whole or row.decides]
        cells = _cell_rows(titles, deciding, star=" *", absent=frozenset() if whole else absent)
        columns = (Column("row", "row", group=True), Column("way", "way"), Column("says", "says", wrap=whole, least=20))
        lines, _ = table_lines(Table(name="ways", columns=columns, rows=cells), width)
        if not whole:
            hidden = ", ".join(row.title for row in rows if not row.decides)
            lines += remark(f"not shown: {hidden}; all of it: gpushare compare -v; one way: gpushare compare mps")
    if any(cell.disputed and cell.text is not None for row in rows for cell in row.cells):
        lines += remark("* sources disagree: gpushare compare --why ROW WAY")
    return [Text(""), *lines]


def _grid_lines(titles: Sequence[str], rows: Sequence[ComparedRow], width: int) -> list[Text]:
    """Return a grid with a column of titles and one of each way."""
    import io

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1)
    grid.add_column("", style="dim", max_width=_TITLE)
    for title in titles:
        grid.add_column(title, max_width=_WIDEST)
    for row in rows:
        texts = (NOT_HERE if cell.text is None else f"{cell.text}{' *' if cell.disputed else ''}" for cell in row.cells)
        grid.add_row(row.title, *(Text(visible(text)) for text in texts))
    lines = []
    for parts in Console(file=io.StringIO(), width=width).render_lines(grid, pad=False):
        line = Text.assemble(*((part.text, part.style or "") for part in parts))
        line.rstrip()
        lines.append(line)
    return lines


def csv_table(cells: Sequence[Any]) -> Table:
    """Return one row per cell with all of its views; sources by their keys."""
    keys = ("row", "way", "published", "today", "host", "level", "limit", "since", "contradiction", "note")
    sources = {"sources": lambda cell: " ".join(source.key for source in cell.sources)}
    return record_table("ways", (*keys, *sources), cells, sources)


def why_table(title: str, entries: Sequence[tuple[str, str]]) -> Table:
    """Return the table that explains one cell of the comparison: headings, each with its text."""
    columns = (Column("what", "what", group=True), Column("says", "says", wrap=True))
    return Table(
        name="cell", title=title, columns=columns, rows=tuple({"what": what, "says": says} for what, says in entries)
    )
