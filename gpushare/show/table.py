"""Results on a terminal: quiet tables that fit the window.

A column is dropped rather than cut: half an id or half a number is worse than none. Colour is used
only where it means something.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.show.plain import cell
from gpushare.show.result import Column, Result, Table
from gpushare.show.text import paragraphs, visible

if TYPE_CHECKING:
    from rich.text import Text

GAP: Final = 2
# Text that has to give way when nothing is left to drop keeps this much.
LAST_RESORT: Final = 4


@dataclass(frozen=True)
class Layout:
    """Which columns of a table are shown, how wide (character cells), and which were dropped for width."""

    columns: tuple[Column, ...]
    widths: tuple[int, ...]
    hidden: tuple[Column, ...]

    @property
    def total(self) -> int:
        """Return the width of a line."""
        return sum(self.widths) + GAP * max(len(self.widths) - 1, 0)


def layout(table: Table, width: int) -> Layout:
    """Return the layout of a table in a width.

    Columns go by rank, the highest first and of equals the rightmost; one always stays. Ids (``whole``) and numbers
    are never cut: when the columns of rank 0 do not fit, text is cut to LAST_RESORT, and then the
    lines are longer than the width.
    """
    shown = [column for column in table.columns if not (column.optional and _nothing_in(table, column))]
    natural = {column.key: _natural(table, column) for column in shown}
    least = {column.key: _least(column, natural[column.key]) for column in shown}
    hidden: list[Column] = []
    while _line(shown, least) > width:
        rank = max((column.rank for column in shown), default=0)
        if rank == 0 or len(shown) == 1:
            break
        last = max(place for place, column in enumerate(shown) if column.rank == rank)
        hidden.append(shown.pop(last))
    if _line(shown, least) > width:
        for column in shown:
            if not (column.whole or column.right):
                least[column.key] = min(natural[column.key], LAST_RESORT)
    widths = _grow(shown, least, natural, width - _line(shown, least))
    order = {column.key: place for place, column in enumerate(table.columns)}
    hidden.sort(key=lambda column: order[column.key])
    return Layout(tuple(shown), tuple(widths), tuple(hidden))


def _nothing_in(table: Table, column: Column) -> bool:
    return all(row.get(column.key) is None for row in table.rows)


def _natural(table: Table, column: Column) -> int:
    from rich.cells import cell_len

    return max([cell_len(column.title), *(cell_len(cell(column, row.get(column.key))) for row in table.rows)])


def _least(column: Column, natural: int) -> int:
    if column.whole or column.right or column.least is None:
        return natural
    return min(natural, max(column.least, len(column.title)))


def _line(columns: list[Column], widths: dict[str, int]) -> int:
    return sum(widths[column.key] for column in columns) + GAP * max(len(columns) - 1, 0)


def _grow(columns: list[Column], least: dict[str, int], natural: dict[str, int], spare: int) -> list[int]:
    """Share the spare cells evenly among the columns that were cut."""
    widths = [least[column.key] for column in columns]
    while spare > 0:
        cut = [place for place, column in enumerate(columns) if widths[place] < natural[column.key]]
        if not cut:
            break
        for place in cut[:spare]:
            widths[place] += 1
        spare -= min(len(cut), spare)
    return widths


def table_lines(table: Table, width: int) -> tuple[list[Text], tuple[Column, ...]]:
    """Return the lines of one table, and the columns that were dropped for width."""
    from rich.text import Text

    title = [Text(table.title, style="bold")] if table.title else []
    if table.draw is not None:
        return title + table.draw(width), ()
    if table.lines is not None:
        return title + [Text(visible(text), style=style or "") for text, style in table.lines], ()
    if not table.rows:
        return ([Text(table.empty, style="dim")] if table.empty else []), ()
    plan = layout(table, width)
    head = _row([Text(column.title, style="dim") for column in plan.columns], plan)
    lines = [*title, head, Text("─" * plan.total, style="dim")]
    above: dict[str, str] = {}
    for row in table.rows:
        cells = []
        for column in plan.columns:
            value = row.get(column.key)
            text = cell(column, value)
            style = column.style(value) if column.style else None
            repeats = column.group and above.get(column.key) == text
            above[column.key] = text
            cells.append(Text("" if repeats else text, style=style or ("dim" if text == "-" else "")))
        lines.append(_row(cells, plan))
    return lines, plan.hidden


def _row(cells: list[Text], plan: Layout) -> Text:
    from rich.text import Text

    for text, column, width in zip(cells, plan.columns, plan.widths, strict=True):
        text.truncate(width, overflow="ellipsis")
        text.align("right" if column.right else "left", width)
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line


def result_lines(result: Result, width: int) -> list[Text]:
    """Return all lines of a result: its text, its tables, and in one line what the width hides."""
    from rich.text import Text

    blocks: list[list[Text]] = []
    if result.text:
        blocks.append([Text(line) for line in paragraphs(result.text).rstrip("\n").split("\n")])
    dropped: list[str] = []
    for table in result.tables:
        lines, hidden = table_lines(table, width)
        if lines:
            blocks.append(lines)
        if hidden:
            names = ", ".join(column.title for column in hidden)
            dropped.append(f"{names} ({table.title})" if table.title and len(result.tables) > 1 else names)
    if dropped:
        blocks.append(_wrapped(f"not shown at this width: {'; '.join(dropped)}", width))
    return [line for place, block in enumerate(blocks) for line in ([Text("")] if place else []) + block]


def _wrapped(text: str, width: int) -> list[Text]:
    import textwrap

    from rich.text import Text

    return [Text(line, style="dim") for line in textwrap.wrap(text, max(width, 20))]


def table_text(result: Result, *, width: int, is_terminal: bool) -> str:
    """Return a result as the characters for a terminal of this width; colour only ``is_terminal``.

    Rich honours ``NO_COLOR`` and ``TERM=dumb``.
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, highlight=False, legacy_windows=False
    )
    with console.capture() as captured:
        for line in result_lines(result, width):
            # Lines are laid out; the console must neither wrap nor crop what a whole id made longer.
            console.print(line, soft_wrap=True)
    return captured.get()
