"""What a program's lines say of its speed in a window of time: a rate that it prints, or its lines per second. Pure."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from gpushare.measure.metric import Metric, amount, number
from gpushare.measure.statistics import percentile, ratio
from gpushare.measure.window_length import LONGEST_SECONDS

# A p99 that sums up many requests: "p99=0.5", "p99_ms: 1.2".
_P99: Final = r"(?i)\bp99(?:[_ ]?(?:ms|s|us|latency))*\s*[=:]?\s*([\d.]+(?:e[-+]?\d+)?)"
# Below it the 99th percentile is the largest of a handful.
LEAST_LATENCIES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Window:
    """A time in which a program was watched: its rate, latencies, a p99 that it printed itself."""

    rate: float | None
    latencies: tuple[float, ...] = ()
    printed_p99: float | None = None


@dataclass
class Progress:
    """Every line of a program with the time at which it was seen (seconds of any clock that only rises)."""

    metric: Metric
    lines: list[float] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    percentiles: list[tuple[float, float]] = field(default_factory=list)
    # What the pattern marked last that is no rate, and how often.
    refused: str | None = None
    refusals: int = 0

    def listen(self, line: str, at: float) -> None:
        """Take in a line."""
        if self.metric.pattern is None:
            self.lines.append(at)
        else:
            for match in re.finditer(self.metric.pattern, line):
                value = amount(match.group(1))
                if value is None:
                    self.refused, self.refusals = (match.group(1) or "")[:40], self.refusals + 1
                else:
                    self.values.append((at, value))
        latency = re.search(self.metric.latency, line)
        value = number(latency.group(1)) if latency else None
        if value is not None:
            self.latencies.append((at, value))
        summed = re.search(_P99, line)
        value = number(summed.group(1)) if summed else None
        if value is not None:
            self.percentiles.append((at, value))

    def count(self, start: float, end: float) -> int:
        """Return how many rates, or lines, were seen in a window."""
        return len(_within(self.values, start, end)) if self.metric.printed else _count(self.lines, start, end)

    def moments(self, start: float, end: float) -> list[float]:
        """Return when rates, or lines, were seen in a window; what came at once, as out of a buffer, is one moment."""
        if self.metric.printed:
            first = bisect.bisect_right(self.values, start, key=lambda value: value[0])
            times = [at for at, _ in self.values[first:]]
        else:
            times = self.lines[bisect.bisect_right(self.lines, start) :]
        return sorted({at for at in times if at <= end})

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest time in which nothing was printed that ended in a window, or still lasts at its end."""
        before = self.moments(start - LONGEST_SECONDS, start)[-1:] or [start]
        return max(after - one for one, after in pairwise([*before, *self.moments(start, end), end]))

    @property
    def last(self) -> float | None:
        """Return when the last rate, or line, was seen."""
        if self.metric.printed:
            return self.values[-1][0] if self.values else None
        return self.lines[-1] if self.lines else None

    def window(self, start: float, end: float, *, skip: int = 0) -> Window:
        """Return what was seen in a window: the mean of the printed rates, or lines per second.

        The first so many rates are left out: the first after a pause may count the pause.
        """
        if self.metric.printed:
            speeds = self._speeds(start, end, skip=skip)
            rate = sum(speeds) / len(speeds) if speeds else None
        else:
            done = self._done(end) - self._done(start)
            rate = done / (end - start) if done > 0 and end > start else None
        p99s = _within(self.percentiles, start, end)
        return Window(
            rate=rate,
            latencies=tuple(_within(self.latencies, start, end)),
            printed_p99=percentile(p99s, 50) if p99s else None,
        )

    def part_time(
        self, phases: Sequence[tuple[float, float]], start: float, end: float, full: float | None
    ) -> float | None:
        """Return the rate over a window of a program that ran only in these phases of it, and was stopped for the rest.

        Whether a rate that is printed after a stop counts the time of it, only the program knows: such a one is left out
        where there are others; else ``full``, its rate without stops, tells. Unknown, it is taken to count it.
        """
        ran = math.fsum(after - before for before, after in phases) / (end - start)
        if self.metric.printed:
            clean = [speed for phase in phases for speed in self._speeds(*phase, skip=1)]
            if clean:
                return ran * math.fsum(clean) / len(clean)
        rate = self.window(start, end).rate
        own_time = self.metric.printed and rate is not None and full is not None and rate > full * (1 + ran) / 2
        return rate * ran if rate is not None and own_time else rate

    def _speeds(self, start: float, end: float, *, skip: int = 0) -> list[float]:
        """Return the printed rates of a window, but for the first so many."""
        # A rate of 0 is a program that was held up, and counts; a time of 0 per step is no time.
        rated = self.metric.higher_is_better
        values = [value for value in _within(self.values, start, end)[skip:] if value > 0 or (rated and value == 0)]
        return [self.metric.speed(value) for value in values]

    def _done(self, at: float) -> float:
        """Return how many lines were done at a time; between two of them it counts as even progress."""
        place = bisect.bisect_right(self.lines, at)
        if place == 0 or (place < 2 and place == len(self.lines)):
            return float(place)
        before = self.lines[place - 1]
        # Of the line that is still to come, the last gap says when it is due.
        gap = self.lines[place] - before if place < len(self.lines) else before - self.lines[place - 2]
        return place + (min(1.0, (at - before) / gap) if gap > 0 else 0.0)


def p99(windows: Sequence[Window]) -> float | None:
    """Return the 99th percentile of all windows together; what the program printed itself where it prints no latencies."""
    latencies = _latencies(windows)
    if len(latencies) >= LEAST_LATENCIES:
        return percentile(latencies, 99)
    printed = [window.printed_p99 for window in windows if window.printed_p99 is not None]
    return percentile(printed, 50) if printed else None


def _latencies(windows: Sequence[Window]) -> list[float]:
    return [latency for window in windows for latency in window.latencies]


def _within(pairs: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    first = bisect.bisect_right(pairs, start, key=lambda pair: pair[0])
    return [value for at, value in pairs[first:] if at <= end]


def _count(times: Sequence[float], start: float, end: float) -> int:
    return bisect.bisect_right(times, end) - bisect.bisect_right(times, start)


def p99_interval(windows: Sequence[Window]) -> tuple[float, float] | None:
    """Return between what the 99th percentile lies, 95 times in 100; None: too few latencies to tell.

    By the ranks of the latencies: how many of n lie above their 99th percentile is binomial.
    """
    latencies = sorted(_latencies(windows))
    count = len(latencies)
    middle, width = 0.99 * count, 1.96 * math.sqrt(count * 0.99 * 0.01)
    low, high = math.floor(middle - width), math.ceil(middle + width)
    if low < 1 or high > count:
        return None
    return latencies[low - 1], latencies[high - 1]


def p99_factor_interval(alone: Sequence[Window], together: Sequence[Window]) -> tuple[float, float] | None:
    """Return between what the p99 of windows together is, in those of windows alone; None: too few latencies to tell.

    Where the program printed its p99 itself, by how far those of the windows lie apart.
    """
    before, now = p99_interval(alone), p99_interval(together)
    if before is not None and now is not None:
        return now[0] / before[1], now[1] / before[0]
    if max(len(_latencies(alone)), len(_latencies(together))) >= LEAST_LATENCIES:
        return None
    apart = ratio(*([one.printed_p99 for one in some if one.printed_p99 is not None] for some in (together, alone)))
    if apart is None or apart.low is None or apart.high is None:
        return None
    # The factor is one of medians, around which they lie as around the mean.
    factor = (p99(together) or 0.0) / (p99(alone) or math.inf)
    return factor * apart.low / apart.value, factor * apart.high / apart.value


def neighbours(alone: Sequence[Window], together: Sequence[Window]) -> list[tuple[float, float]]:
    """Return the rate in each window together, and the mean of those alone right before and after it.

    Between the first one alone and the first together the other job has started: that one counts where there is no other.
    """
    found = []
    for place, window in enumerate(together):
        # A production job that stands still has a rate of nothing, not none: beside the other as without it.
        near = [one.rate or 0.0 for one in alone[max(1, place) : place + 2] or alone[:1]]
        found.append((window.rate or 0.0, math.fsum(near) / len(near)))
    return found if any(base for _, base in found) else []


def rates(windows: Sequence[Window]) -> list[float]:
    """Return the rates of the windows in which there was one."""
    return [window.rate for window in windows if window.rate is not None and window.rate > 0]
