"""A benchmark as plain data: what ``-o json`` prints, ``--to`` keeps, and ``--compare`` reads again."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpushare.base.errors import BadUsage, NoPermission, NotFound, OperationFailed
from gpushare.base.selection import Device
from gpushare.host.written_file import create_file
from gpushare.measure.bench import Cell, Measurement, RunResult, cells_of, measured_as
from gpushare.measure.metric import LATENCY, Metric
from gpushare.measure.statistics import Ratio, Summary, differ, mean_known, percentile, ratio, summarize
from gpushare.measure.ways import IN_ONE_OPTIONS, BenchWay
from gpushare.memory.peaks import Profile
from gpushare.run.results import BenchedCap

# Within this of the best, and with overlapping intervals, the simpler way is as good.
_NEAR: Final = 0.03
# Less than this is no difference, however narrow the intervals: processes of one program differ by more.
_NOTHING: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class CellVerdict:
    """One way with one number of copies. ``slowdown`` is of one copy relative to alone; below 1 it is faster.

    ``gain`` is the throughput over that of one copy alone. ``joules`` is per run, or per unit of a printed rate.
    """

    way: BenchWay
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

    ``chosen`` is the one to use: the simplest that does not differ and is within 3 percent. ``certain`` is False where
    single runs cannot tell, or some ways were not measured because of an interruption (``open_ways``). ``gain`` is over
    time-slicing (or the queue), None when neither was measured.
    """

    copies: int
    best: BenchWay
    chosen: BenchWay
    same: tuple[BenchWay, ...]
    certain: bool
    # The number of ways compared.
    ways: int
    open_ways: int
    gain: Ratio | None
    over: str | None


def judge(measurement: Measurement) -> list[CellVerdict]:
    """Return the verdict on every cell, in the requested order."""
    alone = _alone(measurement)
    return [_verdict(measurement, cell, runs, alone) for cell, runs in cells_of(measurement)]


def _alone(measurement: Measurement) -> list[RunResult]:
    way = measurement.settings.alone
    return [run for run in measurement.runs if (run.way, run.copies) == (way.name, 1)]


def alone_verdict(measurement: Measurement) -> CellVerdict:
    """Return the verdict on one copy alone."""
    runs = _alone(measurement)
    return _verdict(measurement, (measurement.settings.alone, 1), runs, runs)


def _verdict(
    measurement: Measurement, cell: Cell, runs: Sequence[RunResult], alone: Sequence[RunResult]
) -> CellVerdict:
    settings = measurement.settings
    metric, measured = settings.metric, measured_as(cell, settings)
    good = [run for run in runs if run.throughput is not None]
    values = speeds(good, metric)
    # Unless they run in turn, copies have speeds of their own.
    slowdowns = _slowdowns(good, alone, metric, finite=settings.window is None)
    same = None if measured == cell else (measured[0].name, measured[1])
    return CellVerdict(
        way=cell[0],
        copies=cell[1],
        same_as=same,
        runs=len(good),
        throughput=summarize([run.throughput for run in good if run.throughput is not None]),
        gain=ratio(values, speeds(alone, metric)),
        slowdown=mean_known(slowdowns),
        slowdown_worst=max(slowdowns, default=None),
        fairness=_fairness(good, metric),
        memory_peak_bytes=max(
            (run.usage.memory_peak_bytes for run in good if run.usage.memory_peak_bytes), default=None
        ),
        power_watts=mean_known(run.usage.power_watts for run in good),
        joules=mean_known(_joules(run, metric) for run in good),
        p50=_latency(good, 50),
        p99=_latency(good, 99),
        failures=tuple(f"round {run.round}: {text}" for run in runs for text in run.failures),
        others=tuple(sorted({pid for run in runs for pid in run.usage.others})),
    )


def speeds(runs: Iterable[RunResult], metric: Metric) -> list[float]:
    """Return the throughput of runs as numbers where larger is faster."""
    return [metric.speed(run.throughput) for run in runs if run.throughput is not None]


def _slowdowns(runs: Sequence[RunResult], alone: Sequence[RunResult], metric: Metric, *, finite: bool) -> list[float]:
    """Return by what factor each copy was slower than one alone, over all runs.

    Empty if a copy made no progress: no factor expresses that, and the fairness is 0.
    """

    def speed(run: RunResult) -> list[float]:
        if metric.printed:
            # One process prints the sum of its streams.
            parts = run.copies if run.way in IN_ONE_OPTIONS else 1
            speeds = [metric.speed(copy.value) if copy.value else copy.value for copy in run.result.copies]
            return [speed / parts for speed in speeds if speed is not None]
        return [1 / copy.seconds for copy in run.result.copies if copy.seconds > 0] if finite else []

    # In time per unit of work, so that the slowdown of one copy alone has a mean of 1.
    base = mean_known([1 / value for run in alone if run.throughput is not None for value in speed(run) if value > 0])
    speeds_of_copies = [value for run in runs for value in speed(run)]
    if base is None or (metric.higher_is_better and not all(speeds_of_copies)):
        return []
    return [1 / value / base for value in speeds_of_copies if value > 0]


def _fairness(runs: Sequence[RunResult], metric: Metric) -> float | None:
    """Return the speed of the slowest copy over that of the fastest, as the mean over the runs; None for one copy."""
    fairness = []
    # A copy that printed a rate of 0 was starved; a time of 0 is invalid.
    zero_counts = metric.printed and metric.higher_is_better
    for run in runs:
        values = [copy.value if metric.printed else copy.seconds for copy in run.result.copies]
        numbers = [value for value in values if value or (zero_counts and value == 0)]
        if len(numbers) > 1 and any(numbers):
            fairness.append(min(numbers) / max(numbers))
    return mean_known(fairness)


def _joules(run: RunResult, metric: Metric) -> float | None:
    energy = run.usage.energy_joules
    if energy is None:
        return None
    if not metric.printed:
        return energy / len(run.result.copies)
    power = run.usage.power_watts
    if not metric.higher_is_better:
        # The unit of the time is unknown.
        return None
    # Power over rate: joules per unit of work.
    return power / metric.speed(run.throughput) if power is not None and run.throughput else None


def _latency(runs: Sequence[RunResult], percent: int) -> float | None:
    copies = [copy for run in runs for copy in run.result.copies]
    pooled = [value for copy in copies for value in copy.latencies]
    if pooled:
        return percentile(pooled, percent)
    # The copies printed percentiles only: take the median of the p50, the worst p99.
    printed = [copy.p50 if percent == 50 else copy.p99 for copy in copies]
    values = [value for value in printed if value is not None]
    return (percentile(values, 50) if percent == 50 else max(values)) if values else None


def picks(measurement: Measurement, verdicts: Sequence[CellVerdict]) -> list[Pick]:
    """Return the answer for every number of copies measured under at least two different ways."""
    chosen = []
    for copies in sorted({verdict.copies for verdict in verdicts}):
        candidates = [verdict for verdict in verdicts if verdict.copies == copies and not verdict.failures]
        measured = [verdict for verdict in candidates if verdict.throughput is not None]
        if len({_measured(measurement, verdict) for verdict in measured}) > 1:
            chosen.append(_chosen(measurement, measured, len(candidates) - len(measured)))
    return chosen


def _measured(measurement: Measurement, verdict: CellVerdict) -> tuple[str, int]:
    way, copies = measured_as((verdict.way, verdict.copies), measurement.settings)
    return way.name, copies


def _chosen(measurement: Measurement, verdicts: Sequence[CellVerdict], open_ways: int) -> Pick:
    metric = measurement.settings.metric
    by_speed = sorted(verdicts, key=lambda verdict: (-_speed(verdict, metric), verdict.way.order))
    best = by_speed[0]
    same, certain = [], True
    for other in by_speed[1:]:
        different = _differ(measurement, best, other)
        certain = certain and different is not None
        if different is False:
            same.append(other)
    near = [verdict for verdict in same if _speed(verdict, metric) >= (1 - _NEAR) * _speed(best, metric)]
    chosen = min([best, *near], key=lambda verdict: verdict.way.order)
    bases = [verdict for name in ("timeslice", "queue") for verdict in verdicts if verdict.way.name == name]
    base = bases[0] if bases else None
    gain = None
    if base is not None:
        gain = ratio(_speeds(measurement, chosen), _speeds(measurement, base))
    return Pick(
        copies=best.copies,
        best=best.way,
        chosen=chosen.way,
        same=tuple(sorted((verdict.way for verdict in same), key=lambda way: way.order)),
        certain=certain and not open_ways,
        ways=len(verdicts),
        open_ways=open_ways,
        gain=gain,
        over=None if base is None else base.way.name,
    )


def _speed(verdict: CellVerdict, metric: Metric) -> float:
    return 0.0 if verdict.throughput is None else metric.speed(verdict.throughput.mean)


def _differ(measurement: Measurement, verdict: CellVerdict, other: CellVerdict) -> bool | None:
    if _measured(measurement, verdict) == _measured(measurement, other):
        return False
    if verdict.throughput is None or other.throughput is None:
        return None
    metric = measurement.settings.metric
    # A way that made no progress has a speed of 0.
    if abs(_speed(verdict, metric) - _speed(other, metric)) < _NOTHING * _speed(other, metric):
        return False
    return differ(verdict.throughput, other.throughput)


def _speeds(measurement: Measurement, verdict: CellVerdict) -> list[float]:
    return speeds(measurement.of((verdict.way, verdict.copies)), measurement.settings.metric)


def overall(measurement: Measurement, picks_of_all: Sequence[Pick]) -> Pick | None:
    """Return the pick with the highest throughput of all."""
    metric = measurement.settings.metric

    def speed(pick: Pick) -> float:
        return mean_known(speeds(measurement.of((pick.chosen, pick.copies)), metric)) or 0.0

    return max(picks_of_all, key=speed, default=None)


KIND = "gpushare bench"
# A result with a few hundred cells has a few hundred kilobytes.
_MOST = 1e300
_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Header:
    """Where and when a benchmark was made. ``workload`` describes the built-in one, None for a command."""

    host: str
    driver: str | None
    device: Device
    started_at: float
    workload: Mapping[str, Any] | None = None
    notes: Sequence[str] = field(default=())


def bench_data(header: Header, measurement: Measurement) -> dict[str, Any]:
    """Return all of a benchmark as JSON types: figures per cell, the answer, and every single run."""
    settings, device = measurement.settings, header.device
    verdicts = judge(measurement)
    picks_of_all = picks(measurement, verdicts)
    return {
        "kind": KIND,
        "host": header.host,
        "driver": header.driver,
        "gpu": {
            "index": device.gpu.index,
            "uuid": device.gpu.uuid,
            "name": device.gpu.name,
            "mig": None if device.mig is None else device.mig.profile,
        },
        "command": list(settings.argv),
        "workload": None if header.workload is None else dict(header.workload),
        "started_at": header.started_at,
        "seconds": round(measurement.seconds, 3),
        "reason": _reason(measurement),
        "metric": metric_data(settings.metric),
        "window_seconds": settings.window,
        "repeat": settings.repeat,
        "rounds": measurement.rounds_done,
        "alone": {**_cell(alone_verdict(measurement), None), **_use_alone(measurement)},
        "cells": [_cell(verdict, _pick_of(picks_of_all, verdict)) for verdict in verdicts],
        "picks": [_pick(pick) for pick in picks_of_all],
        "best": _pick(overall(measurement, picks_of_all)),
        "left_out": [{"way": cell.way, "copies": cell.copies, "reason": cell.reason} for cell in measurement.left_out],
        "others": sorted({pid for run in measurement.runs for pid in run.usage.others}),
        "other_names": {str(pid): name for run in measurement.runs for pid, name in run.usage.other_names.items()},
        "notes": list(header.notes),
        "runs": [_run(run) for run in measurement.runs],
    }


def metric_data(metric: Metric) -> dict[str, Any]:
    """Return what is counted, as JSON types."""
    return {
        "pattern": metric.pattern,
        "higher_is_better": metric.higher_is_better,
        "latency": None if metric.latency == LATENCY else metric.latency,
        "unit": "printed" if metric.printed else "runs_per_second",
    }


def _reason(measurement: Measurement) -> str:
    if measurement.error is not None:
        return "failed"
    return "interrupted" if measurement.interrupted else "finished"


def _pick_of(picks_of_all: Sequence[Pick], verdict: CellVerdict) -> Pick | None:
    return next((pick for pick in picks_of_all if pick.copies == verdict.copies), None)


def _cell(verdict: CellVerdict, pick: Pick | None) -> dict[str, Any]:
    return {
        "way": verdict.way.name,
        "copies": verdict.copies,
        "threads_percent": verdict.way.cap(verdict.copies),
        "same_as": None if verdict.same_as is None else {"way": verdict.same_as[0], "copies": verdict.same_as[1]},
        "runs": verdict.runs,
        "throughput": _summary(verdict.throughput),
        "gain": _ratio(verdict.gain),
        "slowdown": _rounded(verdict.slowdown),
        "slowdown_worst": _rounded(verdict.slowdown_worst),
        "fairness": _rounded(verdict.fairness),
        "memory_peak_bytes": verdict.memory_peak_bytes,
        "power_watts": _rounded(verdict.power_watts),
        "joules": _rounded(verdict.joules),
        "latency_p50": _rounded(verdict.p50),
        "latency_p99": _rounded(verdict.p99),
        "best": pick is not None and pick.best == verdict.way,
        "chosen": pick is not None and pick.chosen == verdict.way,
        "differs_from_best": None
        if pick is None or not pick.certain or verdict.throughput is None
        else verdict.way != pick.best and verdict.way not in pick.same,
        "failures": list(verdict.failures),
        "others": list(verdict.others),
        "slice_us": verdict.way.slice_us,
        "time_slice": None if verdict.way.level is None else verdict.way.level.title,
    }


def _pick(pick: Pick | None) -> dict[str, Any] | None:
    if pick is None:
        return None
    return {
        "copies": pick.copies,
        "way": pick.chosen.name,
        "threads_percent": pick.chosen.cap(pick.copies),
        "fastest": pick.best.name,
        "no_difference": [way.name for way in pick.same],
        "certain": pick.certain,
        "ways": pick.ways,
        "open_ways": pick.open_ways,
        "gain": _ratio(pick.gain),
        "over": pick.over,
        # None: its interval overlaps with that of another way, or is not known.
        "winner": pick.chosen.name if pick.certain and not pick.same else None,
    }


def _summary(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {
        "mean": _rounded(summary.mean),
        "median": _rounded(summary.median),
        "min": _rounded(summary.least),
        "max": _rounded(summary.most),
        "low": _rounded(summary.low),
        "high": _rounded(summary.high),
        "spread": _rounded(summary.spread),
        "runs": summary.count,
    }


def _ratio(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    return {"value": _rounded(ratio.value), "low": _rounded(ratio.low), "high": _rounded(ratio.high)}


def _run(run: RunResult) -> dict[str, Any]:
    return {
        "round": run.round,
        "way": run.way,
        "copies": run.copies,
        "seconds": _rounded(run.result.seconds),
        "throughput": _rounded(run.throughput),
        "energy_joules": _rounded(run.usage.energy_joules),
        "memory_peak_bytes": run.usage.memory_peak_bytes,
        "others": list(run.usage.others),
        "invalid": run.invalid,
        "results": [
            {
                "copy": copy.copy,
                "pid": copy.pid,
                "seconds": _rounded(copy.seconds),
                "exit_code": copy.exit_code,
                "value": _rounded(copy.value),
                "latency_p50": _rounded(copy.p50),
                "latency_p99": _rounded(copy.p99),
                "failure": copy.failure,
            }
            for copy in run.result.copies
        ],
    }


def _rounded(value: float | None) -> float | None:
    # Six digits: no measurement here is more precise.
    return None if value is None else float(f"{value:.6g}")


def check_new(option: str, text: str) -> Path:
    """Check that a new file can be written, before anything is measured; return its path."""
    path = Path(text)
    if os.path.lexists(path):
        raise BadUsage(f"{path} already exists", f"give another name: {option} FILE", code="file_exists")
    if not path.parent.is_dir():
        raise NotFound(
            f"directory {path.parent} does not exist",
            f"make it: mkdir -p {shlex.quote(str(path.parent))}",
            code="no_directory",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise NoPermission(f"no permission to write into {path.parent}", "give a file in a directory of your own")
    return path


def write_bench(path: Path, data: Mapping[str, Any]) -> None:
    """Write a benchmark to a new file.

    Raises:
        OperationFailed: it cannot be written.
    """
    try:
        create_file(path, f"{json.dumps(data, indent=1, ensure_ascii=False)}\n".encode(errors="replace"))
    except OSError as error:
        raise OperationFailed(
            f"cannot write {path}: {error.strerror}", "the result was not saved; next time, redirect it: -o json > FILE"
        ) from None


def read_bench(text: str) -> dict[str, Any]:
    """Return an earlier benchmark from its file, or from the output of ``-o json``."""
    wrong = BadUsage(
        f"{text} is not a result of gpushare bench", "make one: gpushare bench --to FILE -- CMD", code="not_a_bench"
    )
    try:
        with open(text, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise wrong
        raw = json.loads(content.decode())
    except FileNotFoundError:
        raise NotFound(f"file {text} does not exist", "check the spelling", code="no_file") from None
    except OSError as error:
        raise NoPermission(f"cannot read {text}: {error.strerror}", "check its type and mode: ls -l") from None
    except (ValueError, RecursionError):
        raise wrong from None
    data = raw.get("data", raw) if isinstance(raw, dict) else None
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("cells"), list):
        raise wrong
    if not all(_is_cell(cell) for cell in data["cells"]):
        raise wrong
    return data


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict) or not isinstance(cell.get("way"), str) or type(cell.get("copies")) is not int:
        return False
    figures = cell.get("throughput")
    if figures is None:
        return True
    return isinstance(figures, dict) and all(
        figures.get(key) is None or (isinstance(figures.get(key), (int, float)) and abs(figures[key]) < _MOST)
        for key in ("mean", "low", "high")
    )


def check_comparable(metric: Metric, before: Mapping[str, Any]) -> None:
    """Raise unless an earlier benchmark counts the same; called before anything is measured."""
    if before.get("metric") != metric_data(metric):
        raise BadUsage(
            "the two benchmarks count different things", "measure both with the same --metric", code="other_metric"
        )


def what_else_differs(data: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each condition in which the earlier benchmark differed."""
    pairs = (
        ("on another device", _device(data), _device(before)),
        ("under another driver", data.get("driver"), before.get("driver")),
        ("with another command", _command(data), _command(before)),
        ("for another time", data.get("window_seconds"), before.get("window_seconds")),
    )
    return [f"the earlier benchmark ran {what}: {then or 'unknown'}" for what, now, then in pairs if now != then]


def _device(data: Mapping[str, Any]) -> str | None:
    gpu = data.get("gpu")
    if not isinstance(gpu, dict):
        return None
    return " ".join(str(gpu[key]) for key in ("name", "mig") if gpu.get(key)) or None


def _command(data: Mapping[str, Any]) -> str | None:
    workload, words = data.get("workload"), data.get("command")
    if isinstance(workload, dict):
        return str(workload.get("title"))
    return shlex.join(map(str, words)) if isinstance(words, list) else None


def compared(data: Mapping[str, Any], before: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every cell of two benchmarks side by side; ``verdict`` is faster, slower, no difference, or unknown."""
    # They may be from different GPUs and times, so alone is not compared.
    was = {(cell["way"], cell["copies"]): cell for cell in before["cells"]}
    rows = []
    for cell in data["cells"]:
        old = was.get((cell["way"], cell["copies"]))
        if old is None or not old.get("throughput") or not cell["throughput"]:
            continue
        now, then = cell["throughput"], old["throughput"]
        change = now["mean"] / then["mean"] if then.get("mean") else None
        rows.append(
            {
                "way": cell["way"],
                "copies": cell["copies"],
                "before": then.get("mean"),
                "now": now["mean"],
                "ratio": None if change is None else round(change, 6),
                "verdict": _change(now, then, higher=data["metric"]["higher_is_better"]),
            }
        )
    return rows


def _change(now: Mapping[str, Any], then: Mapping[str, Any], *, higher: bool) -> str:
    low, high, was_low, was_high = now.get("low"), now.get("high"), then.get("low"), then.get("high")
    if low is None or high is None or was_low is None or was_high is None:
        return "unknown"
    if low > was_high:
        return "faster" if higher else "slower"
    if high < was_low:
        return "slower" if higher else "faster"
    return "no difference"


def _use_alone(measurement: Measurement) -> dict[str, float | None]:
    """Return how much of the GPU one copy alone used, in percent; None: unknown, or other programs were there."""
    usages = [run.usage for run in _alone(measurement) if run.throughput is not None and not run.usage.others]
    return {
        "sm_percent": _percentage(usage.sm_percent for usage in usages),
        "memory_bandwidth_percent": _percentage(usage.dram_percent for usage in usages),
        "utilization_percent": _percentage(usage.busy_percent for usage in usages),
    }


def profile_of(measurement: Measurement) -> Profile:
    """Return what the runs of one copy alone say about the command."""
    use = _use_alone(measurement)
    percent = use["utilization_percent"] if use["sm_percent"] is None else use["sm_percent"]
    return Profile(memory_bytes=alone_verdict(measurement).memory_peak_bytes, use_percent=percent)


def _percentage(values: Iterable[float | None]) -> float | None:
    value = mean_known(values)
    return None if value is None else round(min(100.0, max(0.0, value)), 1)


def best_caps(data: Mapping[str, Any]) -> list[BenchedCap]:
    """Return the best cap under MPS for each number of copies that was measured under MPS without failure.

    If the pick of the benchmark is under MPS, it is used: the simplest of the ways that do not differ.
    """
    date = time.strftime("%Y-%m-%d", time.localtime(data.get("started_at") or 0))
    picks = {pick["copies"]: str(pick.get("way")) for pick in data.get("picks") or () if pick}
    best: dict[int, Mapping[str, Any]] = {}
    for cell in data["cells"]:
        if not str(cell["way"]).startswith("mps") or cell.get("failures") or _mean_throughput(cell) <= 0:
            continue
        copies = cell["copies"]
        present = best.get(copies)
        picked = picks.get(copies) == cell["way"]
        if (
            present is None
            or picked
            or (_mean_throughput(cell) > _mean_throughput(present) and picks.get(copies) != present["way"])
        ):
            best[copies] = cell
    return [
        BenchedCap(
            copies=copies,
            threads_percent=_percent(cell),
            best=picks.get(copies, cell["way"]) == cell["way"],
            date=date,
            driver=data.get("driver"),
        )
        for copies, cell in best.items()
    ]


def _mean_throughput(cell: Mapping[str, Any]) -> float:
    return float((cell.get("throughput") or {}).get("mean") or 0.0)


def _percent(cell: Mapping[str, Any]) -> float | None:
    value = cell.get("threads_percent")
    return float(value) if isinstance(value, (int, float)) and 0 < value < 100 else None
