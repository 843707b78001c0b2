"""How far a measurement is: a bar on a terminal with the time left. For ``bench`` and ``tune``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from gpushare.base.units import format_duration

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
