"""A benchmark as plain data: what ``-o json`` prints, ``--to`` keeps, and ``--compare`` reads again."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpushare.errors import BadUsage, NoPermission, NotFound, OperationFailed
from gpushare.host.written_file import create_file
from gpushare.measure.bench import Measurement, RunResult
from gpushare.measure.metric import LATENCY, Metric
from gpushare.measure.statistics import Ratio, Summary
from gpushare.measure.verdict import CellVerdict, Pick, alone_verdict, judge, overall, picks

if TYPE_CHECKING:
    from gpushare.selection import Device

KIND = "gpushare bench"
# A result of a few hundred cells has some hundred kilobytes.
_MOST = 1e300
_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Header:
    """Where and when a benchmark was made. ``workload`` says what the built-in one is, None for a command."""

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
    found = picks(measurement, verdicts)
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
        "alone": _cell(alone_verdict(measurement), None),
        "cells": [_cell(one, _pick_of(found, one)) for one in verdicts],
        "picks": [_pick(one) for one in found],
        "best": _pick(overall(measurement, found)),
        "left_out": [{"way": one.way, "copies": one.copies, "reason": one.reason} for one in measurement.left_out],
        "others": sorted({pid for run in measurement.runs for pid in run.usage.others}),
        "other_names": {str(pid): name for run in measurement.runs for pid, name in run.usage.other_names.items()},
        "notes": list(header.notes),
        "runs": [_run(one) for one in measurement.runs],
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


def _pick_of(found: Sequence[Pick], verdict: CellVerdict) -> Pick | None:
    return next((one for one in found if one.copies == verdict.copies), None)


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
    }


def _pick(pick: Pick | None) -> dict[str, Any] | None:
    if pick is None:
        return None
    return {
        "copies": pick.copies,
        "way": pick.chosen.name,
        "threads_percent": pick.chosen.cap(pick.copies),
        "fastest": pick.best.name,
        "no_difference": [one.name for one in pick.same],
        "certain": pick.certain,
        "ways": pick.ways,
        "open_ways": pick.open_ways,
        "gain": _ratio(pick.gain),
        "over": pick.over,
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
                "copy": one.copy,
                "pid": one.pid,
                "seconds": _rounded(one.seconds),
                "exit_code": one.exit_code,
                "value": _rounded(one.value),
                "latency_p50": _rounded(one.p50),
                "latency_p99": _rounded(one.p99),
                "failure": one.failure,
            }
            for one in run.result.copies
        ],
    }


def _rounded(value: float | None) -> float | None:
    # Six digits: no measurement here has more.
    return None if value is None else float(f"{value:.6g}")


def check_new(option: str, text: str) -> Path:
    """Return the path of a file that is to be written at the end, checked before anything is measured.

    Raises:
        BadUsage: it is there already.
        NotFound, NoPermission: its directory is not there, or may not be written.
    """
    path = Path(text)
    if os.path.lexists(path):
        raise BadUsage(f"{path} is there already", f"give another name: {option} FILE", code="file_exists")
    if not path.parent.is_dir():
        raise NotFound(
            f"there is no directory {path.parent}",
            f"make it: mkdir -p {shlex.quote(str(path.parent))}",
            code="no_directory",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise NoPermission(f"may not write into {path.parent}", "give a file in a directory of your own")
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
            f"cannot write {path}: {error.strerror}", "the result above is all there is; keep it: -o json > FILE"
        ) from None


def read_bench(text: str) -> dict[str, Any]:
    """Return an earlier benchmark from its file, also from what ``-o json`` printed.

    Raises:
        NotFound, NoPermission: it cannot be read.
        BadUsage: it is no benchmark.
    """
    wrong = BadUsage(
        f"{text} is no result of gpushare bench", "make one: gpushare bench --to FILE -- CMD", code="not_a_bench"
    )
    try:
        with open(text, "rb") as file:
            said = file.read(_MOST_BYTES + 1)
        if len(said) > _MOST_BYTES:
            raise wrong
        raw = json.loads(said.decode())
    except FileNotFoundError:
        raise NotFound(f"there is no file {text}", "check the spelling", code="no_file") from None
    except OSError as error:
        raise NoPermission(f"cannot read {text}: {error.strerror}", "check its mode and kind: ls -l") from None
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
