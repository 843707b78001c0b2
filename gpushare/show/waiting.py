"""What a user sees while something takes long: a moving line on a terminal for a wait, a bar for a measurement."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Final

from gpushare.base.units import format_duration
from gpushare.show.text import one_line

# Sizes in the line change all the time: a line that differs only in them is not printed again.
_SIZE: Final = r"[\d.]+ (?:[KMGT]i)?B"


@contextlib.contextmanager
def waiting_line(
    say: Callable[[str], None], *, quiet: bool = False
) -> Iterator[Callable[[str, float, float | None], None]]:
    """Yield a function that shows a line in place of the previous one. The line is removed at the end, also by Ctrl-C.

    It is called with what a job waits for, the seconds it has waited, and the most it may wait (None: no limit).

    Where stderr is no terminal, the function calls ``say`` when more than a size has changed; with ``quiet`` it does
    nothing.
    """
    if quiet:
        yield lambda _text, _seconds, _most: None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _changes_printer(say)
        return
    try:
        yield _draw
    finally:
        _redraw("")


def _changes_printer(say: Callable[[str], None]) -> Callable[[str, float, float | None], None]:
    """Return a function that says what a job waits for when more than a size has changed since its last call."""
    last_shown = ""

    def print_change(text: str, _seconds: float, _most: float | None) -> None:
        nonlocal last_shown
        without_sizes = re.sub(_SIZE, "", text)
        if without_sizes != last_shown:
            say(text)
        last_shown = without_sizes

    return print_change


def _draw(text: str, seconds: float, most: float | None) -> None:
    """Show what a job waits for, and for how long, in place of the line before."""
    limit = "" if most is None else f" of {format_duration(most)}"
    _redraw(one_line(f"{format_duration(int(seconds))}{limit}: {text}"))


def _redraw(line: str) -> None:
    """Write a line over the one before on stderr, cut to the terminal, which may have been resized."""
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(stream.fileno()).columns or 80
        # A terminal may wrap after the last column, so that stays empty.
        if len(line) >= width:
            line = line[: max(0, width - 2)] + ("…" if (stream.encoding or "").lower().startswith("utf") else "~")
        stream.write(f"\r\x1b[K{line}")
        stream.flush()


# Called with what is being done, how much of how much is done, and the seconds left: an estimate, None at first.
DrawProgress = Callable[[str, int, int, "float | None"], None]


@contextlib.contextmanager
def progress_line(*, quiet: bool, about: str = "about") -> Iterator[DrawProgress]:
    """Yield a function that draws a bar with the time left on a terminal, else nothing; ``about`` is the word before it."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    # Without a refresh thread: programs are started meanwhile, and a fork in a threaded process can deadlock.
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=Console(file=sys.stderr),
        auto_refresh=False,
        transient=True,
    )

    def draw(doing: str, done: int, total: int, seconds_left: float | None) -> None:
        remaining = ""
        if seconds_left is not None:
            # An estimate: from 100 s on in whole minutes.
            rounded = max(1, round(seconds_left)) if seconds_left < 100 else 60 * round(seconds_left / 60)
            remaining = f"{about} {format_duration(rounded)} left"
        bar.update(task, completed=done, total=total, description=doing, left=remaining)
        bar.refresh()

    with bar:
        task = bar.add_task("", total=None, left="")
        yield draw
