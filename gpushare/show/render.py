"""Write a result in an output format, to stdout and stderr."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Final

from gpushare.base.errors import GpushareError
from gpushare.base.values import dataclass
from gpushare.show.result import Column, OutputFormat, Result, Table, jsonable
from gpushare.show.text import complete_commands, one_line, paragraphs, put, safe_json, visible, wrapped

if TYPE_CHECKING:
    from rich.text import Text


# Without a terminal (``-o table | less -S``) a table keeps every column.
UNLIMITED: Final = 10_000
NOTE: Final = "note:"
_ESCAPES: Final = {"red": "\x1b[1;31m", "yellow": "\x1b[33m", "dim": "\x1b[2m"}


def write(result: Result, output: OutputFormat, *, stdout: IO[str], stderr: IO[str], quiet: bool = False) -> None:
    """Write a result to stdout, its notes and errors to stderr; ``quiet`` drops notes, and what was done.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    terminal = stdout.isatty()
    form = form_of(output, terminal=terminal)
    width = width_of(stdout, terminal=terminal)
    if result.done and not quiet:
        lines = [
            _done_line(what, undo, width if form is OutputFormat.TABLE else UNLIMITED) for what, undo in result.done
        ]
        result = replace(result, text="\n".join(filter(None, [result.text, *lines])))
    if form is OutputFormat.TABLE:
        text = terminal_text(result, width=width, is_terminal=terminal)
    else:
        text = document_text(result, form, stdout)
    if text:
        put(stdout, text)
    notes = list(result.notes)
    if form is OutputFormat.CSV and not text and not result.errors:
        notes.append("there is no table to write as CSV; -o json has the data")
    if form is OutputFormat.TABLE and text and stderr.isatty() and (result.errors or (notes and not quiet)):
        put(stderr, "\n")
    write_notes(() if quiet else notes, stderr)
    for error in result.errors:
        write_error(error, stderr)


def exit_code_of(result: Result) -> int:
    if result.exit_code is not None:
        return int(result.exit_code)
    return int(result.errors[0].exit_code) if result.errors else 0


def _done_line(what: str, undo: str | None, width: int) -> str:
    """Return what is in force (may be empty) and the command that undoes it, on one line if that fits the width.

    Otherwise the command begins a line of its own, so that it is broken as rarely as possible; lines end between words.
    """
    line = one_line("; ".join(filter(None, [what, undo and f"undo: {undo}"])))
    if len(line) <= width:
        return line
    lines = wrapped(one_line(what), width, "", "  ") if what else []
    if undo:
        lead = "  undo: " if what else "undo: "
        lines += wrapped(one_line(undo), width, lead, " " * len(lead), command=True)
    return "\n".join(lines)


def form_of(output: OutputFormat, *, terminal: bool) -> OutputFormat:
    """Return the format in which the output is written: for `auto` that of a terminal, or plain."""
    if output is not OutputFormat.AUTO:
        return output
    return OutputFormat.TABLE if terminal else OutputFormat.PLAIN


def document_text(result: Result, form: OutputFormat, stream: IO[str], *, header: bool = True) -> str:
    """Return a result as plain text, JSON, YAML or CSV in a stream's encoding."""
    if form is OutputFormat.PLAIN:
        return plain_text(result)
    ascii_only = not speaks_unicode(stream)
    if form is OutputFormat.JSON:
        return json_text(result, ascii_only=ascii_only)
    if form is OutputFormat.YAML:
        return yaml_text(result, ascii_only=ascii_only)
    table = result.csv or next(iter(result.tables), None)
    return "" if table is None or result.status == "error" else csv_text(table, header=header)


def speaks_unicode(stream: IO[str]) -> bool:
    """Return whether a stream takes all of Unicode."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def width_of(stream: IO[str], *, terminal: bool) -> int:
    """Return the width of a stream in columns: ``COLUMNS``, the terminal's, or 80; unlimited without a terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and len(columns) < 6 and int(columns) > 0:
        return int(columns)
    if not terminal:
        return UNLIMITED
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def write_notes(notes: list[str] | tuple[str, ...], stream: IO[str]) -> None:
    """Write notes as ``note: ...``, a line each, on a terminal wrapped between words."""
    for note in notes:
        put(stream, f"{_paint(NOTE, 'dim', stream)} {message_text(NOTE, note, stream)}\n")


def write_error(error: GpushareError, stream: IO[str]) -> None:
    """Write an error as ``error: ...`` and ``hint: ...``: one line each, on a terminal wrapped between words."""
    put(stream, f"{_paint('error:', 'red', stream)} {message_text('error:', error.message, stream)}\n")
    if error.hint:
        put(stream, f"{_paint('hint:', 'yellow', stream)} {message_text('hint:', error.hint, stream)}\n")


def message_text(word: str, text: str, stream: IO[str]) -> str:
    """Return a message as one line; on a terminal, wrapped between words and indented below its first word."""
    line = one_line(text)
    if not stream.isatty():
        return line
    width = width_of(stream, terminal=True)
    if len(word) + 1 + len(line) <= width:
        return line
    indent = " " * (len(word) + 1)
    return "\n".join(wrapped(line, width, indent, indent)).lstrip()


def _paint(word: str, colour: str, stream: IO[str]) -> str:
    """Color one word without Rich, which takes long to import."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in {"", "dumb"} or not stream.isatty()
    return word if plain else f"{_ESCAPES[colour]}{word}\x1b[0m"


def plain_text(result: Result) -> str:
    """Return the text and the tables of a result, a blank line between them.

    A title is a comment, ``# GPUs``, as is the text of an empty table; the header line stays even without rows.
    ``grep -v '^#'`` leaves headers and records.
    """
    blocks = [paragraphs(result.text).rstrip("\n")] if result.text else []
    blocks += [_plain_table(table) for table in result.tables]
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _plain_table(table: Table) -> str:
    """Return a table as plain text with its title, a header and a line per row."""
    from tabulate import tabulate

    lines = [f"# {table.title}"] if table.title else []
    if table.lines is not None:
        return "\n".join([*lines, *(visible(complete_commands(text)) for text, _ in table.lines)])
    if not table.rows and table.empty:
        lines.append(f"# {complete_commands(table.empty)}")
    rows = [[cell(column, column.value(row)) for column in table.columns] for row in table.rows]
    titles = [column.title for column in table.columns]
    if not rows:
        return "\n".join([*lines, "  ".join(titles)])
    align = ["right" if column.right else "left" for column in table.columns]
    # As a row, the header is aligned like its column; tabulate would widen it.
    text = tabulate([titles, *rows], tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join([*lines, *(line.rstrip() for line in text.split("\n"))])


def cell(column: Column, value: object) -> str:
    """Return one value as one line for people."""
    return visible(column.unknown if value is None else column.format(value))


# What a spreadsheet takes for the start of a formula, in both widths, and the blanks that it drops before one.
_FORMULA: Final = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
_NUMBER: Final = r"[-+]?\d{1,300}(?:\.\d{1,300})?|-"


def json_text(result: Result, *, compact: bool = False, ascii_only: bool = False) -> str:
    """Return the envelope as JSON, ``compact`` on one line."""
    layout = {"separators": (",", ":")} if compact else {"indent": 2}
    return safe_json(json.dumps(result.envelope(), ensure_ascii=ascii_only, **layout)) + "\n"


def yaml_text(result: Result, *, ascii_only: bool = False) -> str:
    """Return the same envelope as YAML, its keys in the same order."""
    import yaml

    text: str = yaml.safe_dump(result.envelope(), sort_keys=False, allow_unicode=not ascii_only, width=math.inf)
    return text


def csv_text(table: Table, *, header: bool = True) -> str:
    """Return a table as RFC 4180 CSV: a header of keys, plain values, nothing for unknown.

    No text can drive the terminal or be a formula: users choose the names of their processes.
    """
    import csv

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    if header:
        writer.writerow([column.key for column in table.columns])
    writer.writerows([_csv_field(column.value(row)) for column in table.columns] for row in table.rows)
    return buffer.getvalue()


def _csv_field(value: Any) -> str | int | float:
    """Return a value of a CSV file: numbers as they are, lists as JSON, text that no spreadsheet runs."""
    value = jsonable(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):
        return safe_json(json.dumps(value, ensure_ascii=False))
    formula = value.startswith(_FORMULA) and re.fullmatch(_NUMBER, value, re.ASCII) is None
    return f"'{visible(value)}" if formula else visible(value)


GAP: Final = 2
# Text is cut to this many characters when no column is left to drop.
LAST_RESORT: Final = 4
# The least and the most characters of a line of a column that is wrapped.
_SENTENCE: Final = range(20, 100)


@dataclass(frozen=True)
class Layout:
    """The shown columns of a table, their widths in character cells, and the dropped columns."""

    columns: tuple[Column, ...]
    widths: tuple[int, ...]
    hidden: tuple[Column, ...]

    @property
    def total_width(self) -> int:
        return sum(self.widths) + GAP * max(len(self.widths) - 1, 0)


def layout_of(table: Table, width: int) -> Layout:
    """Return the layout of a table in a width.

    Columns are dropped by rank, the highest first, of equal ones the rightmost; one always stays. Ids (``whole``) and
    numbers are never cut: if the columns of rank 0 do not fit, text is cut down to LAST_RESORT, the longest first, and then
    lines may be longer than the width.
    """
    # First the columns that fit with their least widths.
    shown = [
        column
        for column in table.columns
        if not column.optional or any(column.value(row) is not None for row in table.rows)
    ]
    natural = {column.key: _natural_width(table, column) for column in shown}
    least = {column.key: _least_width(column, natural[column.key]) for column in shown}
    hidden: list[Column] = []
    while _line_width(shown, least) > width:
        rank = max((column.rank for column in shown), default=0)
        if rank == 0 or len(shown) == 1:
            break
        rightmost = max(index for index, column in enumerate(shown) if column.rank == rank)
        hidden.append(shown.pop(rightmost))
    # Then their widths: if even these do not fit, text is cut further; else they share what is left.
    for column in sorted(shown, key=lambda column: natural[column.key], reverse=True):
        excess = _line_width(shown, least) - width
        if not (column.whole or column.right or column.wrap):
            least[column.key] -= max(0, min(excess, least[column.key] - LAST_RESORT))
    widths = _widen(shown, least, natural, width - _line_width(shown, least))
    hidden.sort(key=table.columns.index)
    return Layout(tuple(shown), tuple(widths), tuple(hidden))


def _natural_width(table: Table, column: Column) -> int:
    """Return the width that the title and all values of a column need, in character cells."""
    from rich.cells import cell_len

    widest = max([cell_len(column.title), *(cell_len(cell(column, column.value(row))) for row in table.rows)])
    return min(widest, _SENTENCE.stop) if column.wrap else widest


def _least_width(column: Column, natural: int) -> int:
    """Return the width that a column must have at least, in character cells."""
    least = _SENTENCE.start if column.wrap else column.least
    if column.whole or column.right or least is None:
        return natural
    return min(natural, max(least, len(column.title)))


def _line_width(columns: list[Column], widths: dict[str, int]) -> int:
    """Return the width of a line with these columns and the gaps between them."""
    return sum(widths[column.key] for column in columns) + GAP * max(len(columns) - 1, 0)


def _widen(columns: list[Column], least: dict[str, int], natural: dict[str, int], spare: int) -> list[int]:
    """Return the widths of columns, with the spare cells distributed evenly among those that are cut."""
    widths = [least[column.key] for column in columns]
    while spare > 0 and (cut := [i for i, column in enumerate(columns) if widths[i] < natural[column.key]]):
        for index in cut[:spare]:
            widths[index] += 1
        spare -= len(cut)
    return widths


def table_lines(table: Table, width: int, *, fold: bool = False) -> tuple[list[Text], tuple[Column, ...]]:
    """Return the lines of one table, and the columns that did not fit; with ``fold`` several idle rows become one line."""
    from rich.text import Text

    if fold and table.idle is not None and table.folded is not None:
        idle = [row for row in table.rows if table.idle(row)]
        if len(idle) > 1:
            busy = tuple(row for row in table.rows if not table.idle(row))
            lines, hidden = table_lines(replace(table, rows=busy, empty=None), width)
            return [*lines, Text(visible(table.folded(idle)), style="dim")], hidden
    title = [Text(table.title, style="bold")] if table.title else []
    if table.draw is not None:
        return title + table.draw(width), ()
    if table.lines is not None:
        return title + [
            Text(line, style=style or "")
            for text, style in table.lines
            # The lines with a style are commands.
            for line in _plan_lines(text, width, command=style is not None)
        ], ()
    if not table.rows:
        return [Text(line, style="dim") for line in wrapped(table.empty or "", width) if line], ()
    layout = layout_of(table, width)
    head = _row_line([Text(column.title, style="dim") for column in layout.columns], layout)
    rule = Text("─" * layout.total_width, style="dim")
    return [*title, head, rule, *_body_lines(table.rows, layout)], layout.hidden


def _body_lines(rows: Sequence[Any], layout: Layout) -> list[Text]:
    """Return the lines of each row, without the values that repeat those above them in grouped columns."""
    from rich.text import Text

    lines = []
    above: dict[str, str] = {}
    for row in rows:
        cells = []
        for column in layout.columns:
            value = column.value(row)
            text = cell(column, value)
            style = column.style(value) if column.style else None
            repeats = column.group and above.get(column.key) == text
            above[column.key] = text
            cells.append(Text("" if repeats else text, style=style or ("dim" if text == "-" else "")))
        last = cells[-1]
        sentence = wrapped(last.plain, layout.widths[-1]) if layout.columns[-1].wrap else [last.plain]
        for part in sentence or [""]:
            lines.append(_row_line([*cells[:-1], Text(part, style=last.style)], layout))
            cells = [Text("") for _ in cells]
    return lines


def _row_line(cells: list[Text], layout: Layout) -> Text:
    """Return the cells of a row as one line, each shortened and aligned to the width of its column."""
    from rich.text import Text

    for text, column, width in zip(cells, layout.columns, layout.widths, strict=True):
        if column.wrap:
            # It is the last one, and may have a word that is longer than its line.
            continue
        if text.cell_len > width:
            text.plain = _shorten(text.plain, width)
        text.truncate(width, overflow="ellipsis")
        text.align("right" if column.right else "left", width)
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line


def _shorten(text: str, width: int) -> str:
    """Return a text with less of what tells least: paths without directories, a long single word without its middle.

    The rest may still be too long, and is cut at its end.
    """
    from rich.cells import cell_len

    # The program at its start without its directory, and later paths as ``…/name``.
    text = re.sub(r"(?<= )/\S*/(?=\S)", "…/", re.sub(r"^/\S*/(?=\S)", "", text))
    if " " in text or cell_len(text) != len(text) or len(text) <= width or width < 2 * LAST_RESORT:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def result_lines(result: Result, width: int, *, short: bool = False) -> list[Text]:
    """Return all lines of a result; where the screen is ``short``, idle rows in one line, and no line on the dropped columns."""
    from rich.text import Text

    blocks: list[list[Text]] = []
    if result.text:
        blocks.append([Text(line) for line in paragraphs(result.text).rstrip("\n").split("\n")])
    dropped: list[str] = []
    for table in result.tables:
        lines, hidden = table_lines(table, width, fold=short)
        if lines:
            blocks.append(lines)
        if hidden:
            names = ", ".join(column.title for column in hidden)
            dropped.append(f"{names} ({table.title})" if table.title and len(result.tables) > 1 else names)
    if dropped and not short:
        text = f"not shown at this width: {'; '.join(dropped)}"
        blocks.append([Text(line, style="dim") for line in wrapped(text, width)])
    all_lines: list[Text] = []
    for block in blocks:
        if all_lines:
            all_lines.append(Text(""))
        all_lines += block
    return all_lines


def _plan_lines(text: str, width: int, *, command: bool) -> list[str]:
    """Return a line of a plan, wrapped to a width and indented below its first word."""
    line = visible(complete_commands(text))
    if len(line) <= width:
        return [line]
    lead = re.match(r" *(?:\d+\. |\$ |undo: )?", line)
    first = "" if lead is None else lead.group()
    return wrapped(line[len(first) :], width, first, " " * len(first), command=command)


def terminal_text(result: Result, *, width: int, is_terminal: bool) -> str:
    """Return a result as text for a terminal of this width, in color only if ``is_terminal``.

    Rich respects ``NO_COLOR`` and ``TERM=dumb``.
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, highlight=False, legacy_windows=False
    )
    with console.capture() as captured:
        for line in result_lines(result, width):
            # Lines are laid out already; the console must not wrap or crop a long id.
            console.print(line, soft_wrap=True)
    return captured.get()
