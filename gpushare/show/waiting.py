"""What a job waits for: one moving line on a terminal; elsewhere a line when something changes."""

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
    stream = sys.stderr
    last_shown = ""
    if quiet or not stream.isatty() or os.environ.get("TERM") == "dumb":

        def print_change(text: str, _seconds: float, _most: float | None) -> None:
            """Say what a job waits for, if more than a size has changed."""
            nonlocal last_shown
            without_sizes = re.sub(_SIZE, "", text)
            if without_sizes != last_shown and not quiet:
                say(text)
            last_shown = without_sizes

        yield print_change
        return

    def draw(text: str, seconds: float, most: float | None) -> None:
        """Show what a job waits for, and for how long, in place of the line before."""
        # The terminal may have been resized. A terminal may wrap after the last column, so that stays empty.
        with contextlib.suppress(OSError, ValueError):
            width = os.get_terminal_size(stream.fileno()).columns or 80
            limit = "" if most is None else f" of {format_duration(most)}"
            line = one_line(f"{format_duration(int(seconds))}{limit}: {text}")
            if len(line) >= width:
                line = line[: max(0, width - 2)] + ("…" if (stream.encoding or "").lower().startswith("utf") else "~")
            stream.write(f"\r\x1b[K{line}")
            stream.flush()

    try:
        yield draw
    finally:
        with contextlib.suppress(OSError, ValueError):
            stream.write("\r\x1b[K")
            stream.flush()
