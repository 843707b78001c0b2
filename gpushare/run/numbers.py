"""The numbers that a program prints: a pattern finds them; the time of matching is bounded."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Final

from gpushare.base.errors import BadUsage, TimedOut
from gpushare.base.units import quoted

_LONGEST_PATTERN: Final = 1000
# No digit can match in two places: the time for a long row of digits would grow with its square.
_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
# "1,234.5": thousands in groups of three.
_GROUPED: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# Larger numbers are no rate or time. The square of this one can still be summed.
_MOST: Final = 1e100


def check_pattern(option: str, text: str) -> None:
    """Raise BadUsage unless a text is a regular expression with one pair of brackets."""
    hint = f"mark the number with one pair of brackets: {option} 'rate=([0-9.]+)'"
    if len(text) > _LONGEST_PATTERN:
        raise BadUsage(f"{option} {quoted(text)} is longer than {_LONGEST_PATTERN} characters", hint, code="bad_metric")
    try:
        with warnings.catch_warnings():
            # A FutureWarning about syntax whose meaning may change.
            warnings.simplefilter("ignore")
            groups = re.compile(text).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise BadUsage(
            f"{option} {quoted(text)} is not a regular expression: {error}", hint, code="bad_metric"
        ) from None
    if groups != 1:
        raise BadUsage(f"{option} {quoted(text)} has {groups} pairs of brackets, not one", hint, code="bad_metric")


def number(text: str | None) -> float | None:
    """Parse a finite number; None if the text is not one."""
    text = (text or "").strip()
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    match = _NUMBER.fullmatch(text)
    value = float(match.group()) if match else math.nan
    return value if math.isfinite(value) else None


def amount(text: str | None) -> float | None:
    """Parse a rate or time; None if it is not a number, negative, or too large to be summed."""
    value = number(text)
    return None if value is None or not 0 <= value <= _MOST else value


SECONDS: Final = 5.0


@contextlib.contextmanager
def bounded(pattern: str | None, seconds: float = SECONDS) -> Iterator[None]:
    """Bound the time of matching by a signal, the only thing that interrupts Python's `re`.

    Only the main thread gets signals: in another one there is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimedOut(
            f"--metric or --latency took longer than {seconds:g} s for what the program prints: {pattern or ''}".rstrip(
                ": "
            ),
            "give a simpler pattern, without nested repeats: --metric 'rate=([0-9.]+)'",
            code="slow_metric",
        )

    before = signal.signal(signal.SIGVTALRM, late)
    # Of the CPU: on a busy host a good pattern takes longer, too.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
