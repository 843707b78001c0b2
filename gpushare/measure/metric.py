"""How the speed of a program is measured: a number or latencies in its output, or finished runs. Pure."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpushare.measure.statistics import percentile
from gpushare.run.numbers import amount, bounded, check_pattern, number

# "latency_ms=0.41" and "latency: 3.2 ms" are one request each; "p50=0.4 p99 = 1.2" summarizes many.
LATENCY: Final = r"(?i)\blatency(?:[_ ]?(?:ms|s|us))?\s*[=:]?\s*([\d.]+(?:[eE][-+]?\d+)?)"
_PERCENTILE: Final = re.compile(
    r"\bp(50|99)(?:[_ ]?(?:ms|s|us|latency))*\s*[=:]?\s*([\d.]+(?:[eE][-+]?\d+)?)", re.IGNORECASE
)
# The unit of a latency, in its name or behind the number: "latency_ms=0.41", "latency: 3.2 ms".
_UNIT: Final = re.compile(r"(?<![a-z])(ms|us|s)(?![a-z])", re.IGNORECASE)
_MICROSECONDS: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}
# After this many matches, over this time, that are never a number, the pattern matches something else.
_REFUSALS: Final = 3
_REFUSED_SECONDS: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How the speed of a program is measured. Without a pattern it is finished runs per second.

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
        """Return the metric of several concurrent copies, as if they were one program.

        Rates add up; times per unit are added as rates. None when there is nothing to add.
        """
        if not values:
            return None
        if self.higher_is_better:
            return math.fsum(values)
        return None if min(values) <= 0 else 1 / math.fsum(1 / value for value in values)

    def speed(self, value: float) -> float:
        """Return a number that is larger when the program is faster."""
        return value if self.higher_is_better else 1 / value


def parse_metric(pattern: str | None, *, higher_is_better: bool = True, latency: str | None = None) -> Metric:
    """Return the metric that a user asks for."""
    for option, text in (("--metric", pattern), ("--latency", latency)):
        if text is not None:
            check_pattern(option, text)
    return Metric(pattern=pattern, higher_is_better=higher_is_better, latency=latency or LATENCY)


def hopeless(refusals: int, seconds: float) -> bool:
    """Return whether matches that were never a number are to be given up."""
    return refusals >= _REFUSALS and seconds >= _REFUSED_SECONDS


@dataclass
class Printed:
    """The numbers that a program has printed, with the time at which they were seen (monotonic seconds)."""

    metric: Metric
    values: list[tuple[float, float]] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    # The 50th and 99th percentile of many requests, as the program prints them.
    percentiles: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: {50: [], 99: []})
    # The last match of the pattern that is not a rate, and how many there were.
    refused: str | None = None
    refusals: int = 0
    # Microseconds in a unit of the latencies; None: the program does not say it.
    latency_us: float | None = None

    def listen(self, line: str, at: float) -> None:
        """Take in a line; matching takes 5 seconds at most."""
        with bounded(self.metric.pattern):
            self._listen(line, at)

    def _listen(self, line: str, at: float) -> None:
        if self.metric.pattern is not None:
            for match in re.finditer(self.metric.pattern, line):
                value = amount(match.group(1))
                if value is None:
                    self.refused, self.refusals = (match.group(1) or "")[:40], self.refusals + 1
                else:
                    self.values.append((at, value))
        for match in re.finditer(self.metric.latency, line):
            value = number(match.group(1))
            if value is not None:
                self.latencies.append((at, value))
                unit = _UNIT.search(line, match.start(), match.end() + len(" ms")) if len(self.latencies) == 1 else None
                self.latency_us = _MICROSECONDS[unit[1].lower()] if unit is not None else self.latency_us
        for match in _PERCENTILE.finditer(line):
            value = number(match.group(2))
            if value is not None:
                self.percentiles[int(match.group(1))].append((at, value))

    def between(self, start: float, end: float) -> float | None:
        """Return the mean of the numbers seen after ``start`` up to ``end``, or None."""
        seen = within(self.values, start, end)
        return math.fsum(seen) / len(seen) if seen else None

    @property
    def last(self) -> float | None:
        """Return the last number."""
        return self.values[-1][1] if self.values else None

    def latency(self, percent: int, since: float = -math.inf) -> float | None:
        """Return the 50th or 99th percentile of the latencies, in the unit in which they are printed."""
        latencies = within(self.latencies, since, math.inf)
        own = self.percentiles[percent]
        return percentile(latencies, percent) if latencies else own[-1][1] if own else None


def within(pairs: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    """Return the values that were seen after ``start`` up to ``end``."""
    first = bisect.bisect_right(pairs, start, key=lambda pair: pair[0])
    return [value for at, value in pairs[first:] if at <= end]
