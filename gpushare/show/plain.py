"""Results off a terminal: one record per line, whole values, no colour, no wrapping."""

from __future__ import annotations

from gpushare.show.result import Column, Result, Table
from gpushare.show.text import paragraphs, visible


def plain_text(result: Result) -> str:
    """Return the text and the tables of a result, a blank line between them.

    A title is a comment, ``# GPUs``, and so is what an empty table says; the header line stays even
    without rows. ``grep -v '^#'`` leaves headers and records.
    """
    blocks = [paragraphs(result.text).rstrip("\n")] if result.text else []
    blocks += [_block(table) for table in result.tables]
    return "".join(f"{block}\n" for block in "\n\n".join(blocks).split("\n")) if blocks else ""


def _block(table: Table) -> str:
    from tabulate import tabulate

    lines = [f"# {table.title}"] if table.title else []
    if not table.rows and table.empty:
        lines.append(f"# {table.empty}")
    rows = [[cell(column, row.get(column.key)) for column in table.columns] for row in table.rows]
    titles = [column.title for column in table.columns]
    if not rows:
        return "\n".join([*lines, "  ".join(titles)])
    align = ["right" if column.right else "left" for column in table.columns]
    # As a row of its own the header is aligned like its column; tabulate would widen it.
    text = tabulate([titles, *rows], tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join([*lines, *(line.rstrip() for line in text.split("\n"))])


def cell(column: Column, value: object) -> str:
    """Return one value as the one line that a person reads."""
    return visible(column.format(value))
