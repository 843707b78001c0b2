"""How a percentage was spread over time: mean, 95th percentile and maximum in bounded memory. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Mean, 95th percentile (nearest rank, to 0.1) and maximum of so many samples, in percent."""

    samples: int
    mean: float
    p95: float
    max: float


class Histogram:
    """Counts of a percentage in steps of 0.1: days of samples in at most 1001 numbers."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sum = 0.0
        self._max = 0.0
        self.samples = 0

    def add(self, percent: float | None) -> None:
        """Count one sample; None is unknown and not counted."""
        if percent is None:
            return
        percent = min(max(percent, 0.0), 100.0)
        bin_ = round(percent * 10)
        self._counts[bin_] = self._counts.get(bin_, 0) + 1
        self._sum += percent
        self._max = max(self._max, percent)
        self.samples += 1

    def distribution(self) -> Distribution | None:
        """Return what was counted, or None when nothing was."""
        if not self.samples:
            return None
        rank, seen, p95 = math.ceil(0.95 * self.samples), 0, 0
        for bin_ in sorted(self._counts):
            seen += self._counts[bin_]
            if seen >= rank:
                p95 = bin_
                break
        # A step may lie above the largest sample in it.
        return Distribution(
            samples=self.samples,
            mean=round(self._sum / self.samples, 2),
            p95=min(p95 / 10, round(self._max, 2)),
            max=round(self._max, 2),
        )
