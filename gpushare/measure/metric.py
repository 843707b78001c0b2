"""What a measured program tells of its own speed: a number or latencies in its output, or only that it finished. Pure."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpushare.errors import BadUsage, TimedOut
from gpushare.measure.statistics import percentile
from gpushare.units import quoted

_LONGEST_PATTERN: Final = 1000
_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# "1,234.5": thousands in groups of three.
_GROUPED: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# A progress bar ends what it draws with a return, and draws over it.
_LINE_END: Final = re.compile(r"[\r\n]")
# "latency_ms=0.41", "latency: 3.2 ms" are one request each; "p50=0.4 p99 = 1.2" sums up many.
LATENCY: Final = r"(?i)\blatency(?:[_ ]?(?:ms|s|us))?\s*[=:]?\s*([\d.]+(?:[eE][-+]?\d+)?)"
_PERCENTILE: Final = re.compile(
    r"\bp(50|99)(?:[_ ]?(?:ms|s|us|latency))*\s*[=:]?\s*([\d.]+(?:[eE][-+]?\d+)?)", re.IGNORECASE
)
_TAIL_LINES: Final = 5
# No rate and no time; its square can still be added up.
_MOST: Final = 1e100
# So many times, for so long, and never a number: the pattern marks something else.
_REFUSALS: Final = 3
_REFUSED_SECONDS: Final = 30.0
# A line without an end must not fill the memory.
_LONGEST_LINE: Final = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How the speed of a program is told. Without a pattern it is finished runs per second.

    ``higher_is_better`` False: the number is a time (or another cost) per unit of work.
    """

    pattern: str | None = None
    higher_is_better: bool = True
    latency: str = LATENCY

    @property
    def printed(self) -> bool:
        """Return whether the program prints a number."""
        return self.pattern is not None

    def together(self, values: Sequence[float]) -> float | None:
        """Return the number of several copies that run at the same time, as if they were one program.

        Rates add up; of times per unit the rates do. None when there is nothing to add.
        """
        if not values:
            return None
        if self.higher_is_better:
            return math.fsum(values)
        return None if min(values) <= 0 else 1 / math.fsum(1 / value for value in values)

    def speed(self, value: float) -> float:
        """Return a number that is larger when the program is faster, so that speeds can be divided."""
        return value if self.higher_is_better else 1 / value


def parse_metric(pattern: str | None, *, higher_is_better: bool = True, latency: str | None = None) -> Metric:
    """Return the metric that a user asks for.

    Raises:
        BadUsage: not a regular expression, or it marks no number.
    """
    for option, text in (("--metric", pattern), ("--latency", latency)):
        if text is not None:
            _checked(option, text)
    return Metric(pattern=pattern, higher_is_better=higher_is_better, latency=latency or LATENCY)


def _checked(option: str, text: str) -> None:
    hint = f"mark the number with one pair of brackets: {option} 'rate=([0-9.]+)'"
    if len(text) > _LONGEST_PATTERN:
        raise BadUsage(f"{option} {quoted(text)} is longer than {_LONGEST_PATTERN} characters", hint, code="bad_metric")
    try:
        with warnings.catch_warnings():
            # What Python may read in another way one day.
            warnings.simplefilter("ignore")
            groups = re.compile(text).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise BadUsage(
            f"{option} {quoted(text)} is not a regular expression: {error}", hint, code="bad_metric"
        ) from None
    if groups != 1:
        raise BadUsage(f"{option} {quoted(text)} has {groups} pairs of brackets, not one", hint, code="bad_metric")


def number(text: str | None) -> float | None:
    """Return the number that a text is, or None; never an infinite one."""
    text = (text or "").strip()
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    match = _NUMBER.fullmatch(text)
    value = float(match.group()) if match else math.nan
    return value if math.isfinite(value) else None


def amount(text: str | None) -> float | None:
    """Return the rate or time that a text is, or None: it is no number, below 0, or beyond what can be added up."""
    value = number(text)
    return None if value is None or not 0 <= value <= _MOST else value


def hopeless(refusals: int, seconds: float) -> bool:
    """Return whether what a pattern marked so often, in so long a time and never a number, will become one."""
    return refusals >= _REFUSALS and seconds >= _REFUSED_SECONDS


@dataclass
class Printed:
    """What one copy has printed so far: numbers with the time at which they were seen, latencies, the last lines."""

    metric: Metric
    values: list[tuple[float, float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    percentiles: dict[int, float] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)
    # What --metric marked last that is no rate.
    refused: str | None = None
    refusals: int = 0
    _rest: str = ""

    def feed(self, text: str, at: float) -> None:
        """Take in what was printed up to a time (seconds of any clock)."""
        *parts, self._rest = _LINE_END.split(self._rest + text)
        for part in parts:
            self._part(part, at)
        if len(self._rest) > _LONGEST_LINE:
            self.end(at)

    def end(self, at: float) -> None:
        """Take in a last line without an end."""
        rest, self._rest = self._rest, ""
        self._part(rest, at)

    def _part(self, part: str, at: float) -> None:
        if not part:
            return
        if self.metric.pattern is not None:
            for match in re.finditer(self.metric.pattern, part):
                value = amount(match.group(1))
                if value is None:
                    self.refused = (match.group(1) or "")[:40]
                    self.refusals += 1
                else:
                    self.values.append((at, value))
        for match in re.finditer(self.metric.latency, part):
            value = number(match.group(1))
            if value is not None:
                self.latencies.append(value)
        for match in _PERCENTILE.finditer(part):
            value = number(match.group(2))
            if value is not None:
                self.percentiles[int(match.group(1))] = value
        if part.strip():
            self.tail = [*self.tail[1 - _TAIL_LINES :], part.strip()[:200]]

    def forget_latencies(self) -> None:
        """Drop the latencies so far: the measurement begins now."""
        self.latencies.clear()

    def between(self, start: float, end: float) -> float | None:
        """Return the mean of the numbers that were seen in a time, or None when there was none."""
        seen = [value for at, value in self.values if start < at <= end]
        return math.fsum(seen) / len(seen) if seen else None

    @property
    def last(self) -> float | None:
        """Return the last number."""
        return self.values[-1][1] if self.values else None

    def latency(self, percent: int) -> float | None:
        """Return the 50th or 99th percentile of the latencies, in the unit in which they are printed."""
        return percentile(self.latencies, percent) if self.latencies else self.percentiles.get(percent)


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
