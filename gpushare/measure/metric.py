"""How the speed of a program is measured: a number or latencies in its output, or finished runs. Pure."""

from __future__ import annotations

import bisect
import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpushare.base.benchmark import Metric
from gpushare.measure.statistics import deviation, mean, mean_known, percentile, ratio
from gpushare.run.numbers import amount, bounded, check_pattern, number

# "latency_ms=0.41" and "latency: 3.2 ms" are one request each; "p50=0.4 p99 = 1.2" summarizes many.
_LATENCY: Final = r"(?i)\blatency(?:[_ ]?(?:ms|s|us))?\s*(?:[=:]\s*)?([\d.]+(?:[eE][-+]?\d+)?)"
_PERCENTILE: Final = re.compile(
    r"\bp(50|99)(?:[_ ]?(?:ms|s|us|latency))*\s*(?:[=:]\s*)?([\d.]+(?:[eE][-+]?\d+)?)", re.IGNORECASE
)
# The unit of a latency, in its name or behind the number: "latency_ms=0.41", "latency: 3.2 ms".
_UNIT: Final = re.compile(r"(?<![a-z])(ms|us|s)(?![a-z])", re.IGNORECASE)
_MICROSECONDS: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}


def parse_metric(pattern: str | None, *, higher_is_better: bool = True, latency: str | None = None) -> Metric:
    for option, text in (("--metric", pattern), ("--latency", latency)):
        if text is not None:
            check_pattern(option, text)
    return Metric(pattern=pattern, higher_is_better=higher_is_better, latency=latency)


@dataclass
class Printed:
    """The numbers that a program has printed, with the time at which they were seen (monotonic seconds)."""

    metric: Metric
    values: list[tuple[float, float]] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    # The 50th and 99th percentile of many requests, as the program prints them.
    percentiles: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: {50: [], 99: []})
    # Microseconds in a unit of the latencies; None: the program does not say it.
    latency_us: float | None = None
    # When each line was seen, if lines are counted.
    lines: list[float] = field(default_factory=list)

    def listen(self, line: str, at: float) -> None:
        """Take in a line that was seen at a time; a pattern of the user gets a few seconds to match it."""
        if not self.metric.printed:
            self.lines.append(at)
        patterns_are_ours = self.metric.pattern is None and self.metric.latency is None
        with contextlib.nullcontext() if patterns_are_ours else bounded(self.metric.pattern):
            self._match_line(line, at)

    def _match_line(self, line: str, at: float) -> None:
        """Keep the rates, latencies and percentiles of a line."""
        if self.metric.pattern is not None:
            for match in re.finditer(self.metric.pattern, line):
                value = amount(match.group(1))
                if value is not None:
                    self.values.append((at, value))
        for match in re.finditer(self.metric.latency or _LATENCY, line):
            value = number(match.group(1))
            if value is not None:
                # The first latency tells the unit of all.
                if not self.latencies:
                    unit = _UNIT.search(line, match.start(), match.end() + len(" ms"))
                    self.latency_us = None if unit is None else _MICROSECONDS[unit[1].lower()]
                self.latencies.append((at, value))
        for match in _PERCENTILE.finditer(line):
            value = number(match.group(2))
            if value is not None:
                self.percentiles[int(match.group(1))].append((at, value))

    def mean_between(self, start: float, end: float) -> float | None:
        """Return the mean of the numbers seen after ``start`` up to ``end``, or None."""
        return mean_known(within(self.values, start, end))

    @property
    def last(self) -> float | None:
        return self.values[-1][1] if self.values else None

    def latency(self, percent: int, since: float) -> float | None:
        """Return the 50th or 99th percentile of the latencies, else the last one that the program printed; in its unit."""
        latencies = within(self.latencies, since, math.inf)
        if latencies:
            return percentile(latencies, percent)
        printed = self.percentiles[percent]
        return printed[-1][1] if printed else None

    def moments(self, start: float, end: float) -> list[float]:
        """Return when rates, or lines, were seen in a window; those seen together, as from a buffer, are one moment."""
        times = [at for at, _ in self.values] if self.metric.printed else self.lines
        return sorted(set(times[bisect.bisect_right(times, start) : bisect.bisect_right(times, end)]))

    def window(self, start: float, end: float, *, skip: int = 0) -> Window:
        """Return what was seen in a window: the mean of the printed rates, or lines per second.

        The first ``skip`` rates are left out: the first one after a pause may include the pause.
        """
        if self.metric.printed:
            # A rate of 0 counts: the program was held up. A time of 0 per step is invalid.
            is_rate = self.metric.higher_is_better
            printed = within(self.values, start, end)[skip:]
            values = [value for value in printed if value > 0 or (is_rate and value == 0)]
            rate = math.fsum(map(self.metric.speed, values)) / len(values) if values else None
        else:
            done = self._lines_done(end) - self._lines_done(start)
            rate = done / (end - start) if done > 0 and end > start else None
        p99s = within(self.percentiles[99], start, end)
        return Window(
            rate=rate,
            latencies=tuple(within(self.latencies, start, end)),
            printed_p99=percentile(p99s, 50) if p99s else None,
        )

    def _lines_done(self, at: float) -> float:
        """Return how many lines were done at a time, with a part of the one in work: progress is even between two lines."""
        done = bisect.bisect_right(self.lines, at)
        if done == 0 or len(self.lines) == 1:
            return float(done)
        last = self.lines[done - 1]
        # The next line, if it has not come yet, is expected after the last gap.
        gap = self.lines[done] - last if done < len(self.lines) else last - self.lines[done - 2]
        return done + (min(1.0, (at - last) / gap) if gap > 0 else 0.0)


# Of this many latencies the largest is above the 99th percentile, by 95 %.
_BOUNDED_BY_MAXIMUM: Final = 300
# Below this number, the 99th percentile is the largest of a handful.
LEAST_LATENCIES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Window:
    """A period in which a program was watched: its rate, latencies, and a p99 that it printed itself."""

    rate: float | None
    latencies: tuple[float, ...] = ()
    printed_p99: float | None = None


def p99(windows: Sequence[Window]) -> float | None:
    """Return the 99th percentile over all windows; without latencies, the one that the program printed."""
    latencies = latencies_of(windows)
    if len(latencies) >= LEAST_LATENCIES:
        return percentile(latencies, 99)
    printed = [window.printed_p99 for window in windows if window.printed_p99 is not None]
    return percentile(printed, 50) if printed else None


def latencies_of(windows: Sequence[Window]) -> list[float]:
    return [latency for window in windows for latency in window.latencies]


class Interval(NamedTuple):
    """The 95 % confidence interval of a p99; ``high`` None: too few latencies to bound it from above."""

    low: float
    high: float | None


def p99_interval(windows: Sequence[Window]) -> Interval | None:
    """Return the interval of the 99th percentile over all windows; None: too few latencies.

    By the ranks of the latencies: how many of n lie above their 99th percentile is binomial.
    """
    latencies = sorted(latencies_of(windows))
    count = len(latencies)
    if count < LEAST_LATENCIES:
        return None
    rank = 0.99 * count
    half_width = 1.96 * math.sqrt(count * 0.99 * 0.01)
    low_rank = max(1, math.floor(rank - half_width))
    high_rank = math.ceil(rank + half_width)
    # That all of n lie below their 99th percentile has a chance of .99^n.
    is_bounded = high_rank <= count or count >= _BOUNDED_BY_MAXIMUM
    return Interval(latencies[low_rank - 1], latencies[min(high_rank, count) - 1] if is_bounded else None)


def p99_factor_interval(alone: Sequence[Window], together: Sequence[Window]) -> Interval | None:
    """Return the interval of the factor by which the p99 together is that alone; None: too few latencies.

    If the program printed its p99 itself, the interval comes from the spread between windows.
    """
    interval_alone = p99_interval(alone)
    interval_together = p99_interval(together)
    if interval_alone is not None and interval_together is not None:
        # Alone the largest latency hardly differs from the p99, so that it bounds the p99 where there are few latencies.
        high_alone = interval_alone.high or max(latencies_of(alone))
        high = None if interval_together.high is None else interval_together.high / interval_alone.low
        return Interval(interval_together.low / high_alone, high)
    if max(len(latencies_of(alone)), len(latencies_of(together))) >= LEAST_LATENCIES:
        return None
    printed_together = [window.printed_p99 for window in together if window.printed_p99 is not None]
    printed_alone = [window.printed_p99 for window in alone if window.printed_p99 is not None]
    of_means = ratio(printed_together, printed_alone)
    if of_means is None or of_means.low is None or of_means.high is None:
        return None
    # The factor is of medians; they scatter around it as around the mean.
    factor = (p99(together) or 0.0) / (p99(alone) or math.inf)
    return Interval(factor * of_means.low / of_means.value, factor * of_means.high / of_means.value)


def dispersion(times: Sequence[float], spans: Sequence[tuple[float, float]]) -> float | None:
    """Return the variance of the counts of events over their mean: 1 for random arrivals, 0 for a steady beat.

    Counted in pieces of the spans with some ten events each. None: too few events.
    """
    whole = math.fsum(end - start for start, end in spans)
    inside = [at for at in times if any(start < at <= end for start, end in spans)]
    if len(inside) < 2 * LEAST_LATENCIES:
        return None
    piece = 10 * whole / len(inside)
    counts: list[float] = []
    for start, end in spans:
        for step in range(int((end - start) / piece)):
            low = start + step * piece
            counts.append(bisect.bisect_right(inside, low + piece) - bisect.bisect_right(inside, low))
    return deviation(counts) ** 2 / mean(counts) if len(counts) >= 3 and any(counts) else None


def within(pairs: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    """Return the values that were seen after ``start`` up to ``end``."""
    first = bisect.bisect_right(pairs, start, key=lambda pair: pair[0])
    return [value for at, value in pairs[first:] if at <= end]
