"""Statistics of repeated measurements: mean, spread, and intervals that tell a difference from noise. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeVar

from gpushare.base.benchmark import Ratio, Summary

T = TypeVar("T")

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T: Final = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


def summarize(values: Sequence[float]) -> Summary | None:
    """Summarize measurements, with Student's t interval at 95 %; None when there are none."""
    if not values:
        return None
    middle = mean(values)
    half = None
    if len(values) > 1:
        half = t_quantile(len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return Summary(
        mean=middle,
        low=None if half is None else middle - half,
        high=None if half is None else middle + half,
        spread=(max(values) - min(values)) / abs(middle) if half is not None and middle else None,
        runs=len(values),
    )


def rounded(value: T) -> T:
    """Return a figure, or the figures in value classes, with six digits: no measurement here is more precise."""
    plain: Any = value
    if isinstance(value, float):
        plain = float(f"{value:.6g}")
    elif isinstance(value, tuple):
        plain = tuple(map(rounded, value))
    elif is_dataclass(value) and not isinstance(value, type):
        plain = replace(value, **{field.name: rounded(getattr(value, field.name)) for field in fields(value)})
    return plain  # type: ignore[no-any-return]


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio | None:
    """Return the ratio of two means of positive measurements; None when it does not exist.

    The interval is that of the logarithm of the ratio (delta method), with Welch's degrees of freedom.
    """
    if not above or not below or min(*above, *below) <= 0:
        return None
    value = mean(above) / mean(below)
    if len(above) < 2 or len(below) < 2:
        return Ratio(value=value, low=None, high=None)
    parts = [(deviation(values) / mean(values)) ** 2 / len(values) for values in (above, below)]
    total = math.fsum(parts)
    if total == 0:
        return Ratio(value=value, low=value, high=value)
    freedom = total**2 / math.fsum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (above, below), strict=True)
    )
    factor = math.exp(t_quantile(max(1, math.floor(freedom))) * math.sqrt(total))
    return Ratio(value=value, low=value / factor, high=value * factor)


class Estimate(NamedTuple):
    """A figure with its standard error; None: it was measured only once."""

    value: float
    error: float | None


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the mean of the first over that of the second, of pairs of measurements of about the same time.

    None: there is no ratio, as all of the second are 0. Slow drift cancels out, because it is the same in both of a pair:
    the error comes from how far each pair is from the common ratio (the ratio estimator of survey sampling).
    """
    if not any(below for _, below in pairs):
        return None
    mean_below = mean([below for _, below in pairs])
    value = mean([above for above, _ in pairs]) / mean_below
    count = len(pairs)
    if count < 2:
        return Estimate(value, None)
    residuals = math.fsum((above - value * below) ** 2 for above, below in pairs)
    return Estimate(value, math.sqrt(residuals / (count - 1) / count) / mean_below)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None when none is."""
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample (n - 1)."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def relative_deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample over its mean; None: fewer than two values, or a mean of 0."""
    return deviation(values) / mean(values) if len(values) > 1 and mean(values) else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation, so that 50 is the median."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = math.floor(place), math.ceil(place)
    share = place - below
    return ordered[below] * (1 - share) + ordered[above] * share


def t_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t; between two entries of the table the larger one."""
    return _T[max(known for known in _T if known <= freedom)]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Mean, 95th percentile (nearest rank, to 0.1) and maximum of some samples, in percent."""

    samples: int
    mean: float
    p95: float
    max: float


class Histogram:
    """Counts of a percentage in steps of 0.1: days of samples in at most 1001 numbers."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum = 0.0
        self._max = 0.0
        self.samples = 0

    def add(self, percent: float | None) -> None:
        """Count one sample; None is unknown and not counted."""
        if percent is None:
            return
        percent = min(max(percent, 0.0), 100.0)
        self._counts[round(percent * 10)] += 1
        self._sum += percent
        self._max = max(self._max, percent)
        self.samples += 1

    def distribution(self) -> Distribution | None:
        """Return the distribution, or None when nothing was counted."""
        if not self.samples:
            return None
        rank = math.ceil(0.95 * self.samples)
        steps = sorted(self._counts)
        counted = accumulate(self._counts[step] for step in steps)
        p95 = next(step for step, count in zip(steps, counted, strict=True) if count >= rank)
        # A step may lie above the largest sample in it.
        return Distribution(
            samples=self.samples,
            mean=round(self._sum / self.samples, 2),
            p95=min(p95 / 10, round(self._max, 2)),
            max=round(self._max, 2),
        )
