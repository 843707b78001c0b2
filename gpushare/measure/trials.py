"""Runs of one setting of an opportunistic job beside production, and what they say together. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpushare.measure.statistics import deviation


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the opportunistic job runs: its thread cap in percent (100 is none) and priority; and a cap on production.

    ``duty_percent``: it runs only so much of the time while production works, and is stopped for the rest of it.
    """

    threads: float
    low: bool = True
    production_threads: float | None = None
    duty_percent: float | None = None

    @property
    def title(self) -> str:
        """Return it for people."""
        words = ["no cap" if self.threads >= 100 else f"cap {self.threads:g} %"]
        words += ["low priority"] if self.low else []
        words += [] if self.production_threads is None else [f"production cap {self.production_threads:g} %"]
        words += [] if self.duty_percent is None else [f"duty cycle {self.duty_percent:g} %"]
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What production must keep: a share of its rate alone, and its p99 within a factor (None: not asked for)."""

    keep: float = 0.97
    p99_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a setting: shares and factors relative to production alone; ``opportunistic`` is the other's rate.

    ``error`` is the standard error of ``kept``, from the spread of the windows in which it was measured; ``p99_error``
    that of ``p99``, from how many latencies it was read off (None: too few to tell).
    """

    setting: Setting
    kept: float
    error: float = 0.0
    p99: float | None = None
    p99_error: float | None = None
    opportunistic: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """All runs of one setting together. ``margin`` is 1 at the goal, above it when there is room, below when it fails.

    ``error`` is the standard error of ``kept``; ``safe_margin`` is the margin when ``kept`` and ``p99`` are by their errors
    worse than measured.
    """

    setting: Setting
    trials: int
    kept: float
    error: float
    p99: float | None
    opportunistic: float | None
    margin: float
    safe_margin: float

    @property
    def meets(self) -> bool:
        """Return whether the goal is met."""
        return self.margin >= 1

    @property
    def safe(self) -> bool:
        """Return whether the goal is met, and not only because the windows happened to fall so."""
        return self.meets and self.safe_margin >= 1


def judge(goal: Goal, trials: Sequence[Trial]) -> list[Judged]:
    """Return the runs by setting, in the order in which the settings were first tried."""
    found = []
    for setting in dict.fromkeys(trial.setting for trial in trials):
        runs = [trial for trial in trials if trial.setting == setting]
        kept = _mean([run.kept for run in runs])
        tails = [(run.p99, run.p99_error) for run in runs if run.p99 is not None]
        p99 = _mean_known([run.p99 for run in runs])
        error = _scattered([run.kept for run in runs], _pooled([run.error for run in runs]))
        tail = safe_tail = math.inf
        if goal.p99_factor is not None and p99 is not None and p99 > 0:
            tail = goal.p99_factor / p99
            late = _late(tails)
            # Of one run of which nobody knows how exact it is, nothing is safe.
            safe_tail = 0.0 if late is None else goal.p99_factor / (p99 + late)
        found.append(
            Judged(
                setting=setting,
                trials=len(runs),
                kept=kept,
                error=error,
                p99=p99,
                opportunistic=_mean_known([run.opportunistic for run in runs]),
                margin=min(kept / goal.keep, tail),
                safe_margin=min((kept - error) / goal.keep, safe_tail),
            )
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _pooled(errors: Sequence[float]) -> float:
    """Return the standard error of the mean of several."""
    return math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)


def _scattered(values: Sequence[float], error: float) -> float:
    """Return the standard error of the mean of runs: larger than their own errors say, where the runs lie further apart."""
    if len(values) < 2:
        return error
    return max(error, deviation(values) / math.sqrt(len(values)))


def _late(tails: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the standard error of the mean of p99s with their own errors; None for one whose error is unknown."""
    known = [error for _, error in tails if error is not None]
    if len(known) < len(tails) < 2:
        return None
    return _scattered([one for one, _ in tails], _pooled(known) if len(known) == len(tails) else 0.0)


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None
