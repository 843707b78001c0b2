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

# What a job waits for, how long it has (seconds), and how long it may: None: without end.
Draw = Callable[[str, float, "float | None"], None]


# What jobs hold and what is free changes all the time, and is nothing new.
_SIZE: Final = r"[\d.]+ (?:[KMGT]i)?B"


@contextlib.contextmanager
def waiting_line(say: Callable[[str], None], *, quiet: bool = False) -> Iterator[Draw]:
    """Yield what shows the line, over the one before, to be called often. It is removed in the end, also after Ctrl-C.

    Where there is no terminal for it, ``say`` prints it when something has changed; with ``quiet`` nothing is shown.
    """
    stream, told = sys.stderr, ""
    if quiet or not stream.isatty() or os.environ.get("TERM") == "dumb":

        def tell(text: str, _seconds: float, _most: float | None) -> None:
            nonlocal told
            if told != (told := re.sub(_SIZE, "", text)) and not quiet:
                say(text)

        yield tell
        return

    def draw(text: str, seconds: float, most: float | None) -> None:
        # As wide as it is now. In the last column a terminal may wrap.
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
