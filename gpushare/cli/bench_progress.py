"""How far a benchmark is: one line on a terminal's stderr, with the time left."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpushare.measure.bench import Progress


@contextlib.contextmanager
def progress_line(*, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield what is told before each run: a bar on a terminal, nothing off one."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    # Without a thread of its own: programs are started meanwhile, and a fork beside a thread can lock up.
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=Console(file=sys.stderr),
        auto_refresh=False,
        transient=True,
    )

    def tell(now: Progress) -> None:
        left = "" if now.seconds_left is None else f"about {duration(now.seconds_left)} left"
        bar.update(task, completed=now.done, total=now.total, description=now.doing, left=left)
        bar.refresh()

    with bar:
        task = bar.add_task("", total=None, left="")
        yield tell


def duration(seconds: float) -> str:
    """Return a duration as a guess is told: ``40 s``, ``3 min``, ``1 h 10 min``."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
