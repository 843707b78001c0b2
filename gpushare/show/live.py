"""The live view of ``status -w``: a screen that is redrawn in place, or one document per look."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from gpushare.base.errors import GpushareError
from gpushare.show.render import (
    document_text,
    form_of,
    json_text,
    result_lines,
    speaks_unicode,
    terminal_text,
    width_of,
    write_error,
    write_notes,
)
from gpushare.show.result import OutputFormat, Result, failed_result
from gpushare.show.text import one_line, put

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def watch(
    read: Callable[[], Result],
    *,
    seconds: float,
    stream: IO[str],
    output: OutputFormat,
    command: str = "status",
    quiet: bool = False,
) -> None:
    """Look every ``seconds`` (start to start) and show each result, until Ctrl-C; then return.

    On a terminal the table is redrawn on the alternate screen. Elsewhere, or in another format, each look is one
    document: JSON Lines, YAML documents, CSV with one header, plain with a blank line between. An error of one look
    replaces its result, and the next look follows. Raises BrokenPipeError: the reader is gone.
    """
    terminal = stream.isatty()
    form = form_of(output, terminal=terminal)
    live = form is OutputFormat.TABLE and terminal and os.environ.get("TERM", "") not in {"", "dumb"}

    def read_or_fail() -> Result:
        """Return what one look gives, or its error as a result; without notes if ``quiet``."""
        try:
            result = replace(read(), command=command)
            return replace(result, notes=()) if quiet else result
        except GpushareError as error:
            return failed_result(command, error)

    try:
        if live:
            _redraw_screen(read_or_fail, seconds, stream, command)
        else:
            _write_documents(read_or_fail, seconds, stream, form)
    except KeyboardInterrupt:
        return


def _sleep_until_due(started: float, seconds: float) -> None:
    """Sleep until the next look is due; late looks do not pile up."""
    time.sleep(max(started + seconds - time.monotonic(), 0.0))


def _write_documents(read: Callable[[], Result], seconds: float, stream: IO[str], form: OutputFormat) -> None:
    """Write a document each time that the host is read, every ``seconds``, without end."""
    first = True
    while True:
        started = time.monotonic()
        result = read()
        text = document_of_look(result, form, stream, header=first)
        if text and form in {OutputFormat.PLAIN, OutputFormat.TABLE} and not first:
            text = "\n" + text
        if text:
            put(stream, text)
            first = False
        write_notes(result.notes, sys.stderr)
        for error in result.errors:
            write_error(error, sys.stderr)
        _sleep_until_due(started, seconds)


def document_of_look(result: Result, form: OutputFormat, stream: IO[str], *, header: bool) -> str:
    """Return the text of one look in a stream of them: one line of JSON, a YAML document, CSV rows, plain text."""
    if form is OutputFormat.JSON:
        return json_text(result, compact=True, ascii_only=not speaks_unicode(stream))
    if form is OutputFormat.YAML:
        return "---\n" + document_text(result, form, stream)
    if form is OutputFormat.TABLE:
        terminal = stream.isatty()
        return terminal_text(result, width=width_of(stream, terminal=terminal), is_terminal=terminal)
    return document_text(result, form, stream, header=header)


def _redraw_screen(read: Callable[[], Result], seconds: float, stream: IO[str], command: str) -> None:
    """Redraw the screen each time that the host is read, every ``seconds``, without end."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(file=stream, force_terminal=True, highlight=False)
    head = f"gpushare {command}   every {seconds:g} s   Ctrl-C ends"
    # Redrawn from the top without clearing, and only after a look: no flicker.
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as view:
        while True:
            started = time.monotonic()
            view.update(Group(*screen_lines(read(), head, console)), refresh=True)
            _sleep_until_due(started, seconds)


def screen_lines(result: Result, head: str, console: Console) -> list[Text]:
    """Return the lines of one screen, no longer and no more than it has.

    Errors and notes come before the tables, because what does not fit is cut at the bottom.
    """
    from rich.text import Text

    width, height = console.size
    messages = []
    for error in result.errors:
        messages.append(("error:", "bold red", error.message))
        if error.hint:
            messages.append(("hint:", "yellow", error.hint))
    messages += [("note:", "dim", note) for note in result.notes]
    above = [Text(head, style="dim")]
    for word, style, text in messages:
        # The screen cannot be scrolled sideways to the end of a hint.
        above += Text.assemble((word, style), f" {one_line(text)}").wrap(console, width)
    lines = above
    # On a short screen idle rows share a line, so that the processes at the bottom stay in sight.
    for short in (False, True):
        body = result_lines(result, width, short=short)
        lines = [*above, *([Text("")] if body else []), *body]
        if len(lines) <= height:
            break
    if len(lines) > height:
        more = len(lines) - height + 1
        lines = [*lines[: height - 1], Text(f"... {more} more line{'s' if more > 1 else ''}", style="dim")]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines
