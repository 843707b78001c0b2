"""Write a result: the one place that knows which format goes where."""

from __future__ import annotations

import os
from typing import IO, Final

from gpushare.errors import GpushareError
from gpushare.show.result import OutputFormat, Result
from gpushare.show.text import one_line, paragraphs, put

# A table that nobody's window cuts (``-o table | less -S``) keeps every column.
UNLIMITED: Final = 10_000
_ESCAPES: Final = {"red": "\x1b[1;31m", "yellow": "\x1b[33m", "dim": "\x1b[2m"}


def write(
    result: Result,
    output: OutputFormat,
    *,
    stdout: IO[str],
    stderr: IO[str],
    quiet: bool = False,
    is_terminal: bool | None = None,
    width: int | None = None,
) -> None:
    """Write a result to stdout, its notes and errors to stderr.

    ``is_terminal`` and ``width`` (columns) are found out from stdout when None. ``quiet`` drops notes.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    terminal = stdout.isatty() if is_terminal is None else is_terminal
    form = resolve(output, terminal=terminal)
    if form is OutputFormat.TABLE:
        from gpushare.show.table import table_text

        text = table_text(result, width=width or width_of(stdout, terminal=terminal), is_terminal=terminal)
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


def resolve(output: OutputFormat, *, terminal: bool) -> OutputFormat:
    """Return the format that ``auto`` stands for."""
    if output is not OutputFormat.AUTO:
        return output
    return OutputFormat.TABLE if terminal else OutputFormat.PLAIN


def document_text(result: Result, form: OutputFormat, stream: IO[str], *, header: bool = True) -> str:
    """Return a result as one document of plain, JSON, YAML or CSV for a stream's encoding."""
    if form is OutputFormat.PLAIN:
        # Prose alone must not pay for tabulate.
        if not result.tables:
            return paragraphs(result.text).rstrip("\n") + "\n" if result.text else ""
        from gpushare.show.plain import plain_text

        return plain_text(result)
    from gpushare.show import machine

    ascii_only = not speaks_unicode(stream)
    if form is OutputFormat.JSON:
        return machine.json_text(result, ascii_only=ascii_only)
    if form is OutputFormat.YAML:
        return machine.yaml_text(result, ascii_only=ascii_only)
    table = machine.csv_table(result)
    return "" if table is None or result.status == "error" else machine.csv_text(table, header=header)


def speaks_unicode(stream: IO[str]) -> bool:
    """Return whether a stream can carry any character."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def width_of(stream: IO[str], *, terminal: bool) -> int:
    """Return the columns of a stream: ``COLUMNS``, the terminal's, 80, and off a terminal no limit."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if not terminal:
        return UNLIMITED
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def write_notes(notes: list[str] | tuple[str, ...], stream: IO[str]) -> None:
    """Write ``note:`` lines, one each."""
    for note in notes:
        put(stream, f"{_paint('note:', 'dim', stream)} {one_line(note)}\n")


def write_error(error: GpushareError, stream: IO[str]) -> None:
    """Write an error as ``error: ...`` and ``hint: ...``, one line each, never wrapped or cut."""
    put(stream, f"{_paint('error:', 'red', stream)} {one_line(error.message)}\n")
    if error.hint:
        put(stream, f"{_paint('hint:', 'yellow', stream)} {one_line(error.hint)}\n")


def _paint(word: str, colour: str, stream: IO[str]) -> str:
    """Colour one word by hand: an error must not wait for Rich to be imported."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in {"", "dumb"} or not stream.isatty()
    return word if plain else f"{_ESCAPES[colour]}{word}\x1b[0m"
