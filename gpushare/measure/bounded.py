"""A bound on how long a regular expression of the user may take: some need years for a line that does not match."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Final

from gpushare.errors import TimedOut

SECONDS: Final = 5.0


@contextlib.contextmanager
def bounded(pattern: str | None, seconds: float = SECONDS) -> Iterator[None]:
    """Let matching take so long at most; Python's `re` looks at signals while it works, and at nothing else.

    Only the main thread has signals: in another one there is no bound.

    Raises:
        TimedOut: it took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimedOut(
            f"--metric or --latency took longer than {seconds:g} s for what the program prints: {pattern or ''}".rstrip(
                ": "
            ),
            "give a simpler one, without a repeat inside a repeat: --metric 'rate=([0-9.]+)'",
            code="slow_metric",
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
