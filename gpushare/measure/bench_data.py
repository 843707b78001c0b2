"""A benchmark judged: the figures of each way, the answer, and how they compare with a benchmark kept in a file."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from gpushare.base.benchmark import (
    NEAR,
    AloneCell,
    BenchAnswer,
    BenchCell,
    BenchGpu,
    Benchmark,
    BenchSizesAnswer,
    CellName,
    Compared,
    Metric,
    Pick,
    RunResult,
    Summary,
)
from gpushare.base.errors import BadUsage, NoPermission, NotFound, OperationFailed
from gpushare.base.selection import Device
from gpushare.base.typed import parse_typed
from gpushare.host.written_file import create_file
from gpushare.measure.bench import Measurement, Settings, measuring_cell
from gpushare.measure.statistics import mean, mean_known, percentile, ratio, rounded, summarize
from gpushare.measure.ways import IN_ONE_OPTIONS, Cell
from gpushare.memory.peaks import Profile
from gpushare.run.results import BenchedCap
from gpushare.show.result import jsonable

# A result with a few hundred cells has a few hundred kilobytes.
_MOST_BYTES: Final = 64 * 1024 * 1024


def measured_cells(measurement: Measurement) -> list[BenchCell]:
    """Return the figures of every cell that is not left out, in the requested order."""
    return [_cell_figures(measurement, cell) for cell in measurement.settings.cells]


def alone_cell(measurement: Measurement) -> AloneCell:
    """Return the figures of one copy alone, and how busy the GPU was in the runs in which no other program was there."""
    runs = measurement.runs_of(measurement.settings.alone_cell)
    cell = _cell_figures(measurement, measurement.settings.alone_cell)
    undisturbed = [run.usage for run in runs if run.throughput is not None and not run.usage.others]
    return AloneCell(
        **vars(cell),
        sm_percent=_percentage(usage.sm_percent for usage in undisturbed),
        memory_bandwidth_percent=_percentage(usage.dram_percent for usage in undisturbed),
        utilization_percent=_percentage(usage.busy_percent for usage in undisturbed),
    )


def _percentage(values: Iterable[float | None]) -> float | None:
    """Return the mean of percentages, within 0 and 100; None: all are unknown."""
    value = mean_known(values)
    return None if value is None else round(min(100.0, max(0.0, value)), 1)


def _cell_figures(measurement: Measurement, cell: Cell) -> BenchCell:
    """Return the figures of a cell from its runs and those of one copy alone."""
    way, copies = cell
    settings = measurement.settings
    metric = settings.metric
    equivalent = measuring_cell(cell, settings)
    runs = measurement.runs_of(cell)
    alone = measurement.runs_of(settings.alone_cell)
    good = [run for run in runs if run.throughput is not None]
    return BenchCell(
        way=way.name,
        copies=copies,
        threads_percent=way.cap(copies),
        same_as=None if equivalent == cell else CellName(equivalent[0].name, equivalent[1]),
        runs=len(good),
        throughput=summarize([run.throughput for run in good if run.throughput is not None]),
        gain=ratio(speeds(good, metric), speeds(alone, metric)),
        slowdown=mean_known(_slowdowns(good, alone, settings)),
        memory_peak_bytes=max(filter(None, (run.usage.memory_peak_bytes for run in good)), default=None),
        power_watts=mean_known(run.usage.power_watts for run in good),
        joules=mean_known(_joules_per_unit(run, metric) for run in good),
        latency_p50=_pooled_latency(good, 50),
        latency_p99=_pooled_latency(good, 99),
        failures=tuple(f"round {run.round}: {text}" for run in runs for text in run.failures),
        others=tuple(sorted({pid for run in runs for pid in run.usage.others})),
        slice_us=way.slice_us,
        time_slice=None if way.level is None else way.level.title,
    )


def speeds(runs: Iterable[RunResult], metric: Metric) -> list[float]:
    """Return the throughput of runs as numbers where larger is faster."""
    return [metric.speed(run.throughput) for run in runs if run.throughput is not None]


def _slowdowns(runs: Sequence[RunResult], alone: Sequence[RunResult], settings: Settings) -> list[float]:
    """Return by what factor each copy was slower than one alone, over all runs.

    Empty if one made no progress, which no factor expresses.
    """
    # Times per unit of work, so that the slowdown of one copy alone has a mean of 1.
    times_alone = [
        1 / speed for run in alone if run.throughput is not None for speed in _copy_speeds(run, settings) if speed > 0
    ]
    speeds_now = [speed for run in runs for speed in _copy_speeds(run, settings)]
    if not times_alone or (settings.metric.higher_is_better and not all(speeds_now)):
        return []
    return [1 / speed / mean(times_alone) for speed in speeds_now if speed > 0]


def _copy_speeds(run: RunResult, settings: Settings) -> list[float]:
    """Return the speed of each copy of a run: as printed, else by its run time if copies end by themselves."""
    metric = settings.metric
    if metric.printed:
        # One process prints the sum of its streams.
        parts = run.copies if run.way in IN_ONE_OPTIONS else 1
        values = [metric.speed(copy.value) if copy.value else copy.value for copy in run.result.copies]
        return [speed / parts for speed in values if speed is not None]
    return [1 / copy.seconds for copy in run.result.copies if copy.seconds > 0] if settings.window is None else []


def _joules_per_unit(run: RunResult, metric: Metric) -> float | None:
    """Return the energy of one unit of work in joules; None: unknown."""
    if run.usage.energy_joules is None:
        return None
    if not metric.printed:
        return run.usage.energy_joules / len(run.result.copies)
    power = run.usage.power_watts
    # The unit of a printed time is unknown.
    if power is None or not run.throughput or not metric.higher_is_better:
        return None
    # Power over rate: joules per unit of work.
    return power / run.throughput


def _pooled_latency(runs: Sequence[RunResult], percent: int) -> float | None:
    """Return the 50th or 99th percentile over all copies of all runs; None: they printed no latencies."""
    copies = [copy for run in runs for copy in run.result.copies]
    pooled = [value for copy in copies for value in copy.latencies]
    if pooled:
        return percentile(pooled, percent)
    # The copies printed percentiles only: take the median of the p50, the worst p99.
    if percent == 50:
        medians = [copy.latency_p50 for copy in copies if copy.latency_p50 is not None]
        return percentile(medians, 50) if medians else None
    return max((copy.latency_p99 for copy in copies if copy.latency_p99 is not None), default=None)


def picks(measurement: Measurement, cells: Sequence[BenchCell]) -> list[Pick]:
    """Return the answer for every number of copies measured under at least two different ways."""
    answers = []
    for copies in sorted({cell.copies for cell in cells}):
        rivals = [cell for cell in cells if cell.copies == copies and not cell.failures]
        measured = [cell for cell in rivals if cell.throughput is not None]
        if len({cell.measured_as for cell in measured}) > 1:
            answers.append(_pick(measurement, measured, len(rivals) - len(measured)))
    return answers


def _pick(measurement: Measurement, cells: Sequence[BenchCell], open_ways: int) -> Pick:
    """Return the answer for one number of copies: of the fastest way and those as good as it, the simplest to set up.

    ``open_ways`` of its ways were not measured.
    """
    metric = measurement.settings.metric
    simplicity = {way.name: way.order for way, _ in measurement.settings.cells}
    fastest, *others = sorted(cells, key=lambda cell: (-cell.speed(metric), simplicity[cell.way]))
    differences = [fastest.differs_from(other, metric) for other in others]
    same = [other for other, different in zip(others, differences, strict=True) if different is False]
    as_good = [cell for cell in same if cell.speed(metric) >= (1 - NEAR) * fastest.speed(metric)]
    chosen = min([fastest, *as_good], key=lambda cell: simplicity[cell.way])
    # What the gain is over.
    base = next((cell for name in ("timeslice", "queue") for cell in cells if cell.way == name), None)
    return Pick(
        copies=fastest.copies,
        way=chosen.way,
        threads_percent=chosen.threads_percent,
        fastest=fastest.way,
        no_difference=tuple(cell.way for cell in sorted(same, key=lambda cell: simplicity[cell.way])),
        certain=None not in differences and not open_ways,
        ways=len(cells),
        open_ways=open_ways,
        gain=None if base is None else ratio(_speeds_of_cell(measurement, chosen), _speeds_of_cell(measurement, base)),
        over=None if base is None else base.way,
    )


def _speeds_of_cell(measurement: Measurement, cell: BenchCell) -> list[float]:
    runs = [run for run in measurement.runs if CellName(run.way, run.copies) == cell.measured_as]
    return speeds(runs, measurement.settings.metric)


def best_pick(metric: Metric, cells: Sequence[BenchCell], answers: Sequence[Pick]) -> Pick | None:
    """Return the pick with the highest total speed, over all numbers of copies."""
    speed = {(cell.way, cell.copies): cell.speed(metric) for cell in cells}
    return max(answers, key=lambda pick: speed[pick.way, pick.copies], default=None)


def bench_answer(
    measurement: Measurement,
    device: Device,
    *,
    host: str,
    driver: str | None,
    started_at: float,
    notes: Sequence[str] = (),
) -> BenchAnswer:
    """Return a measurement, judged and with the picks, as the answer of `bench`; figures are rounded."""
    settings = measurement.settings
    reason: Literal["finished", "interrupted", "failed"] = "interrupted" if measurement.interrupted else "finished"
    if measurement.error is not None:
        reason = "failed"
    cells = measured_cells(measurement)
    answers = picks(measurement, cells)
    chosen = {(pick.way, pick.copies) for pick in answers}
    return BenchAnswer(
        host=host,
        driver=driver,
        gpu=BenchGpu(
            index=device.gpu.index,
            uuid=device.gpu.uuid,
            name=device.gpu.name,
            mig=None if device.mig is None else device.mig.profile,
        ),
        command=tuple(settings.argv),
        workload=settings.workload,
        started_at=started_at,
        seconds=round(measurement.seconds, 3),
        reason=reason,
        metric=settings.metric,
        window_seconds=settings.window,
        repeat=settings.repeat,
        rounds=measurement.rounds_done,
        alone=rounded(alone_cell(measurement)),
        cells=rounded(tuple(replace(cell, chosen=(cell.way, cell.copies) in chosen) for cell in cells)),
        picks=rounded(tuple(answers)),
        best=rounded(best_pick(settings.metric, cells, answers)),
        left_out=tuple(measurement.left_out),
        others=tuple(sorted({pid for run in measurement.runs for pid in run.usage.others})),
        other_names={pid: name for run in measurement.runs for pid, name in run.usage.other_names.items()},
        notes=tuple(notes),
        runs=rounded(tuple(measurement.runs)),
    )


def check_new_file(option: str, text: str) -> Path:
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


def write_bench(path: Path, answer: BenchAnswer | BenchSizesAnswer) -> None:
    """Write a benchmark to a new file.

    Raises:
        OperationFailed: it cannot be written.
    """
    text = json.dumps(jsonable(answer), indent=1, ensure_ascii=False)
    try:
        create_file(path, f"{text}\n".encode(errors="replace"))
    except OSError as error:
        raise OperationFailed(
            f"cannot write {path}: {error.strerror}", "the result was not saved; next time, redirect it: -o json > FILE"
        ) from None


def read_bench(text: str) -> Benchmark:
    """Return an earlier benchmark from its file, or from the output of ``-o json``."""
    try:
        with open(text, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        raw = json.loads(data.decode())
        benchmark: Benchmark = parse_typed(
            Benchmark, raw.get("data", raw) if isinstance(raw, dict) else raw, more_keys=True
        )
    except FileNotFoundError:
        raise NotFound(f"file {text} does not exist", "check the spelling", code="no_file") from None
    except OSError as error:
        raise NoPermission(f"cannot read {text}: {error.strerror}", "check its type and mode: ls -l") from None
    except (ValueError, RecursionError):
        raise BadUsage(
            f"{text} is not a result of gpushare bench", "make one: gpushare bench --to FILE -- CMD", code="not_a_bench"
        ) from None
    return benchmark


def check_comparable(metric: Metric, before: Benchmark) -> None:
    """Raise unless an earlier benchmark counts the same; called before anything is measured."""
    if before.metric != metric:
        raise BadUsage(
            "the two benchmarks count different things", "measure both with the same --metric", code="other_metric"
        )


def what_else_differs(now: Benchmark, before: Benchmark) -> list[str]:
    """Return a sentence for each condition in which the earlier benchmark differed."""
    conditions = (
        ("on another device", now.gpu.model, before.gpu.model),
        ("under another driver", now.driver, before.driver),
        ("with another command", now.program, before.program),
        ("for another time", now.window_seconds, before.window_seconds),
    )
    return [
        f"the earlier benchmark ran {difference}: {earlier or 'unknown'}"
        for difference, present, earlier in conditions
        if present != earlier
    ]


def compare_cells(now: Benchmark, before: Benchmark) -> tuple[Compared, ...]:
    """Return every cell of two benchmarks side by side."""
    # They may be from different GPUs and times, so alone is not compared.
    earlier = {(cell.way, cell.copies): cell.throughput for cell in before.cells}
    rows = []
    for cell in now.cells:
        present = cell.throughput
        past = earlier.get((cell.way, cell.copies))
        if present is None or past is None:
            continue
        rows.append(
            Compared(
                way=cell.way,
                copies=cell.copies,
                before=past.mean,
                now=present.mean,
                ratio=round(present.mean / past.mean, 6) if past.mean else None,
                verdict=_change_verdict(present, past, higher=now.metric.higher_is_better),
            )
        )
    return tuple(rows)


def _change_verdict(
    present: Summary, past: Summary, *, higher: bool
) -> Literal["faster", "slower", "no difference", "unknown"]:
    """Return in words how a mean has changed; ``higher``: a larger one is faster."""
    different = present.differs_from(past)
    if different is None:
        return "unknown"
    if not different:
        return "no difference"
    return "faster" if (present.mean > past.mean) is higher else "slower"


def profile_of(measurement: Measurement) -> Profile:
    """Return the memory and GPU use of one copy alone, which later runs of the command read."""
    alone = alone_cell(measurement)
    percent = alone.utilization_percent if alone.sm_percent is None else alone.sm_percent
    return Profile(memory_bytes=alone.memory_peak_bytes, use_percent=percent)


def best_caps(benchmark: Benchmark) -> list[BenchedCap]:
    """Return the best cap under MPS for each number of copies measured without failure, for later runs to use.

    It is the pick of the benchmark if that is under MPS (the simplest of the ways that do not differ), else the fastest.
    """
    picks = {pick.copies: pick.way for pick in benchmark.picks}
    capped: dict[int, list[BenchCell]] = {}
    for cell in benchmark.cells:
        has_speed = cell.throughput is not None and cell.throughput.mean > 0
        if has_speed and cell.way.startswith("mps") and not cell.failures:
            capped.setdefault(cell.copies, []).append(cell)
    caps = []
    for copies, cells in capped.items():
        best = max(cells, key=lambda cell: (cell.way == picks.get(cell.copies), cell.speed(benchmark.metric)))
        caps.append(
            BenchedCap(
                copies=copies,
                threads_percent=best.threads_percent,
                best=picks.get(copies, best.way) == best.way,
                date=time.strftime("%Y-%m-%d", time.localtime(benchmark.started_at)),
                driver=benchmark.driver,
            )
        )
    return caps
