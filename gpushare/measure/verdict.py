"""What a benchmark says: throughput with its interval, slowdown, what is best, and where nothing differs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.measure.bench import Cell, Measurement, RunResult, cells_of, measured_as
from gpushare.measure.metric import Metric
from gpushare.measure.statistics import Ratio, Summary, differ, percentile, ratio, summarize
from gpushare.measure.ways import QUEUE, STREAMS, TIMESLICE, Way

# So near to the best the simpler way is as good, if the intervals overlap.
_NEAR: Final = 0.03
# Less than this is no difference, however narrow the intervals: other processes of the same program differ by more.
_NOTHING: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class CellVerdict:
    """One way with one number of copies. ``slowdown`` is of one copy against alone; below 1 it is faster.

    ``gain`` is the throughput over that of one copy alone. ``joules`` is for a run, or for a unit of a printed rate.
    """

    way: Way
    copies: int
    same_as: tuple[str, int] | None
    runs: int
    throughput: Summary | None
    gain: Ratio | None
    slowdown: float | None
    slowdown_worst: float | None
    fairness: float | None
    memory_peak_bytes: int | None
    power_watts: float | None
    joules: float | None
    p50: float | None
    p99: float | None
    failures: tuple[str, ...]
    others: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The answer for one number of copies. ``best`` has the highest mean, ``same`` do not differ from it.

    ``chosen`` is what to use: the simplest that does not differ and is within 3 percent. ``certain`` is False where
    single runs leave open what differs, or a way was not measured (``open_ways``: it was interrupted before).
    ``gain`` is over time-slicing (or the queue), None when neither was measured.
    """

    copies: int
    best: Way
    chosen: Way
    same: tuple[Way, ...]
    certain: bool
    # Of so many ways.
    ways: int
    open_ways: int
    gain: Ratio | None
    over: str | None


def judge(measurement: Measurement) -> list[CellVerdict]:
    """Return what is known of every cell, in the order in which they were asked for."""
    alone = _alone(measurement)
    return [_verdict(measurement, cell, runs, alone) for cell, runs in cells_of(measurement)]


def _alone(measurement: Measurement) -> list[RunResult]:
    way = measurement.settings.alone
    return [run for run in measurement.runs if (run.way, run.copies) == (way.name, 1)]


def alone_verdict(measurement: Measurement) -> CellVerdict:
    """Return what is known of one copy alone."""
    runs = _alone(measurement)
    return _verdict(measurement, (measurement.settings.alone, 1), runs, runs)


def _verdict(
    measurement: Measurement, cell: Cell, runs: Sequence[RunResult], alone: Sequence[RunResult]
) -> CellVerdict:
    settings = measurement.settings
    metric, measured = settings.metric, measured_as(cell, settings)
    good = [run for run in runs if run.throughput is not None]
    values = speeds(good, metric)
    # In another way than in turn, copies have their own speeds.
    slowdowns = _slowdowns(good, alone, metric, finite=settings.window is None)
    same = None if measured == cell else (measured[0].name, measured[1])
    return CellVerdict(
        way=cell[0],
        copies=cell[1],
        same_as=same,
        runs=len(good),
        throughput=summarize([run.throughput for run in good if run.throughput is not None]),
        gain=ratio(values, speeds(alone, metric)),
        slowdown=_mean(slowdowns),
        slowdown_worst=max(slowdowns, default=None),
        fairness=_fairness(good, metric),
        memory_peak_bytes=max(
            (run.usage.memory_peak_bytes for run in good if run.usage.memory_peak_bytes), default=None
        ),
        power_watts=_mean([run.usage.power_watts for run in good if run.usage.power_watts is not None]),
        joules=_mean([value for value in (_joules(run, metric) for run in good) if value is not None]),
        p50=_latency(good, 50),
        p99=_latency(good, 99),
        failures=tuple(f"round {run.round}: {text}" for run in runs for text in run.failures),
        others=tuple(sorted({pid for run in runs for pid in run.usage.others})),
    )


def speeds(runs: Iterable[RunResult], metric: Metric) -> list[float]:
    """Return the throughput of runs as numbers of which the larger is the faster."""
    return [metric.speed(run.throughput) for run in runs if run.throughput is not None]


def _slowdowns(runs: Sequence[RunResult], alone: Sequence[RunResult], metric: Metric, *, finite: bool) -> list[float]:
    """Return by what factor each copy was slower than one alone, over all runs; none where one stood still.

    No factor says that; the fairness is 0 then.
    """

    def speed(run: RunResult) -> list[float]:
        if metric.printed:
            # Of streams one process prints the sum.
            parts = run.copies if run.way == STREAMS else 1
            speeds = [metric.speed(one.value) if one.value else one.value for one in run.result.copies]
            return [speed / parts for speed in speeds if speed is not None]
        return [1 / one.seconds for one in run.result.copies if one.seconds > 0] if finite else []

    # In time for each unit of work, so that one copy alone is 1 in the mean.
    base = _mean([1 / value for run in alone if run.throughput is not None for value in speed(run) if value > 0])
    found = [value for run in runs for value in speed(run)]
    if base is None or (metric.higher_is_better and not all(found)):
        return []
    return [1 / value / base for value in found if value > 0]


def _fairness(runs: Sequence[RunResult], metric: Metric) -> float | None:
    """Return the slowest copy's speed over the fastest one's, the mean over the runs; None for one copy."""
    found = []
    for run in runs:
        own = [one.value if metric.printed else one.seconds for one in run.result.copies]
        # A copy that printed a rate of 0 was starved; a time of 0 is no time.
        starved = metric.printed and metric.higher_is_better
        numbers = [value for value in own if value or (starved and value == 0)]
        if len(numbers) > 1 and any(numbers):
            found.append(min(numbers) / max(numbers))
    return _mean(found)


def _joules(run: RunResult, metric: Metric) -> float | None:
    energy = run.usage.energy_joules
    if energy is None:
        return None
    if not metric.printed:
        return energy / len(run.result.copies)
    power = run.usage.power_watts
    if not metric.higher_is_better:
        # Nobody said in what unit the time is.
        return None
    # Power over rate: joules for one unit of what is counted.
    return power / metric.speed(run.throughput) if power is not None and run.throughput else None


def _latency(runs: Sequence[RunResult], percent: int) -> float | None:
    pooled = [value for run in runs for one in run.result.copies for value in one.latencies]
    if pooled:
        return percentile(pooled, percent)
    own = [one.p50 if percent == 50 else one.p99 for run in runs for one in run.result.copies]
    # Each summed its own up: their middle, and of the tail the worst.
    known = [value for value in own if value is not None]
    return (percentile(known, 50) if percent == 50 else max(known)) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def picks(measurement: Measurement, verdicts: Sequence[CellVerdict]) -> list[Pick]:
    """Return the answer for every number of copies of which at least two different ways were measured."""
    found = []
    for copies in sorted({verdict.copies for verdict in verdicts}):
        all_of_it = [one for one in verdicts if one.copies == copies]
        here = [one for one in all_of_it if one.throughput is not None and not one.failures]
        left = sum(one.throughput is None and not one.failures for one in all_of_it)
        if len({_measured(measurement, one) for one in here}) > 1:
            found.append(_pick(measurement, here, left))
    return found


def _measured(measurement: Measurement, verdict: CellVerdict) -> tuple[str, int]:
    way, copies = measured_as((verdict.way, verdict.copies), measurement.settings)
    return way.name, copies


def _pick(measurement: Measurement, verdicts: Sequence[CellVerdict], left: int) -> Pick:
    metric = measurement.settings.metric
    by_speed = sorted(verdicts, key=lambda one: (-_speed(one, metric), one.way.order))
    best = by_speed[0]
    same, certain = [], True
    for other in by_speed[1:]:
        different = _differ(measurement, best, other)
        certain = certain and different is not None
        if different is False:
            same.append(other)
    near = [one for one in same if _speed(one, metric) >= (1 - _NEAR) * _speed(best, metric)]
    chosen = min([best, *near], key=lambda one: one.way.order)
    base = next((one for kind in (TIMESLICE, QUEUE) for one in verdicts if one.way.kind == kind), None)
    gain = None
    if base is not None:
        gain = ratio(_speeds(measurement, chosen), _speeds(measurement, base))
    return Pick(
        copies=best.copies,
        best=best.way,
        chosen=chosen.way,
        same=tuple(one.way for one in sorted(same, key=lambda one: one.way.order)),
        certain=certain and not left,
        ways=len(verdicts),
        open_ways=left,
        gain=gain,
        over=None if base is None else base.way.name,
    )


def _speed(verdict: CellVerdict, metric: Metric) -> float:
    return 0.0 if verdict.throughput is None else metric.speed(verdict.throughput.mean)


def _differ(measurement: Measurement, one: CellVerdict, other: CellVerdict) -> bool | None:
    if _measured(measurement, one) == _measured(measurement, other):
        return False
    if one.throughput is None or other.throughput is None:
        return None
    metric = measurement.settings.metric
    # A way in which nothing was done has a speed of 0.
    if abs(_speed(one, metric) - _speed(other, metric)) < _NOTHING * _speed(other, metric):
        return False
    return differ(one.throughput, other.throughput)


def _speeds(measurement: Measurement, verdict: CellVerdict) -> list[float]:
    return speeds(measurement.of((verdict.way, verdict.copies)), measurement.settings.metric)


def overall(measurement: Measurement, found: Sequence[Pick]) -> Pick | None:
    """Return the pick with the highest throughput of all."""
    metric = measurement.settings.metric

    def speed(pick: Pick) -> float:
        return _mean(speeds(measurement.of((pick.chosen, pick.copies)), metric)) or 0.0

    return max(found, key=speed, default=None)
