"""What each job does alone: its rate, and what it draws of the GPU; jobs compare only where these do."""

from __future__ import annotations

import time
from typing import Any, Final

from benchmarks.jobs import JOBS
from benchmarks.sharing_bench import Bench, Keep, alone, now, rates
from gpushare.host.activity import ActivityRecorder
from gpushare.measure.pair import p99
from gpushare.measure.statistics import deviation, percentile

WINDOWS: Final = 4
METRICS: Final = {
    "sm_percent": "NVML_GPM_METRIC_SM_UTIL",
    "occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class Recorder(ActivityRecorder):
    """Reads one metric of GPM since the last reading."""

    def __init__(self, bench: Bench, metric: str) -> None:
        super().__init__(bench.host.nvml, bench.device.gpu.index)
        self._metric = metric


def jobs(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure every job alone: windows of its rate, with GPM and energy over all of them."""
    for name in JOBS:
        recorders = {key: Recorder(bench, metric) for key, metric in METRICS.items()}
        with alone(bench, name) as window:
            for recorder in recorders.values():
                recorder.since_last()
            joules, began = _joules(bench), time.monotonic()
            windows = [window() for _ in range(WINDOWS)]
            used, seconds = _joules(bench), time.monotonic() - began
            drawn = {key: recorder.since_last() for key, recorder in recorders.items()}
        for recorder in recorders.values():
            recorder.close()
        told = rates(name, windows)
        mean = sum(told) / len(told)
        latencies = [latency for window in windows for latency in window.latencies]
        found[name] = {
            "rate": mean,
            "spread": deviation(told) / mean if len(told) > 1 else None,
            "p50": percentile(latencies, 50) if latencies else None,
            "p99": p99(windows),
            **drawn,
            "watts": None if joules is None or used is None else (used - joules) / seconds,
            "measured": now(),
        }
        keep()


def _joules(bench: Bench) -> float | None:
    return bench.host.nvml.energy_joules(bench.device.gpu.index)
