"""How busy a GPU is now, to see that its queue has drained (GPM on Hopper and later, else utilization)."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Final

from gpushare.base.errors import GpushareError, or_none
from gpushare.base.values import dataclass
from gpushare.host.nvml import NvmlReader

# GPM averages between two samples: shorter windows are noise.
_WINDOW_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Activity:
    """One reading: percentage of busy SMs, and its source (``gpm`` or ``utilization``)."""

    percent: float
    source: str


class ActivityRecorder:
    """Reads the SM activity of a GPU, or of one GPU instance on it, since the last reading.

    Only GPM counts between two samples, so that nothing in between is missed.
    """

    _metric = "NVML_GPM_METRIC_SM_UTIL"
    _last: Any = None

    def __init__(self, nvml: NvmlReader, index: int, gpu_instance_id: int | None = None) -> None:
        self._nvml, self._index, self._instance = nvml, index, gpu_instance_id
        self._gpm: bool | None = None

    @property
    def has_gpm(self) -> bool:
        """Return whether the driver supports GPM here (nvmlGpmQueryDeviceSupport: Hopper and later)."""
        if self._gpm is None:
            support = or_none(
                lambda: self._nvml.ask(lambda nvml: nvml.nvmlGpmQueryDeviceSupport(self._nvml.handle(self._index)))
            )
            self._gpm = support is not None and bool(support.isSupportedDevice)
        return self._gpm

    def percent_since_last(self) -> float | None:
        """Return the percentage of SMs that were busy since the last call (GPM, NVML_GPM_METRIC_SM_UTIL), or None.

        None at the first call, without GPM (before Hopper), and for a lost GPU. Never waits.
        """
        if not self.has_gpm:
            return None
        try:
            return self._nvml.ask(self._compare_with_last)
        except GpushareError:
            self.close()
            return None

    def close(self) -> None:
        """Free the last sample (nvmlGpmSampleFree)."""
        last, self._last = self._last, None
        if last is not None:
            with contextlib.suppress(GpushareError):
                self._nvml.ask(lambda nvml: nvml.nvmlGpmSampleFree(last))

    def _compare_with_last(self, nvml: Any) -> float | None:
        """Return the activity since the last sample, and keep a new one; None: there was none."""
        now = self._new_sample(nvml)
        last, self._last = self._last, now
        if last is None:
            return None
        try:
            return _metric_percent(nvml, last, now, self._metric)
        finally:
            nvml.nvmlGpmSampleFree(last)

    def _new_sample(self, nvml: Any) -> Any:
        """Return a sample of the counters of the GPU, or of the GPU instance, which the caller frees."""
        handle = self._nvml.handle(self._index)
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            if self._instance is None:
                nvml.nvmlGpmSampleGet(handle, sample)
            else:
                nvml.nvmlGpmMigSampleGet(handle, self._instance, sample)
        except BaseException:
            nvml.nvmlGpmSampleFree(sample)
            raise
        return sample


class BandwidthRecorder(ActivityRecorder):
    """Reads the share of the memory bandwidth used since the last reading (GPM, DRAM_BW_UTIL)."""

    _metric = "NVML_GPM_METRIC_DRAM_BW_UTIL"


class ActivityMeter(ActivityRecorder):
    """Reads the activity in windows of 0.1 s, without GPM too."""

    def read(self) -> Activity | None:
        """Return the activity over the next 0.1 s, or None when unknown, as on a lost GPU.

        GPM: nvmlGpmMetricsGet, NVML_GPM_METRIC_SM_UTIL. Otherwise nvmlDeviceGetUtilizationRates, which averages over
        the driver's own period (up to 1 s) and does not cover MIG.
        """
        try:
            self.percent_since_last()
            # Even if the answer will be None: callers read in a loop until a queue has drained.
            time.sleep(_WINDOW_SECONDS)
            if self.has_gpm:
                percent = self.percent_since_last()
                return None if percent is None else Activity(percent, "gpm")
        finally:
            self.close()
        percent = None if self._instance is not None else utilization(self._nvml, self._index)
        return None if percent is None else Activity(percent, "utilization")


def utilization(nvml: NvmlReader, index: int) -> float | None:
    """Return the percentage of time in which a kernel ran on a GPU, over the driver's last period of up to 1 s.

    nvmlDeviceGetUtilizationRates. None: unknown, as in MIG mode and on a lost GPU.
    """
    rates = or_none(lambda: nvml.ask(lambda api: api.nvmlDeviceGetUtilizationRates(nvml.handle(index))))
    return None if rates is None else float(rates.gpu)


def samples_since(nvml: NvmlReader, index: int, since: float) -> list[tuple[int, int]] | None:
    """Return PID and SM % of each of `NvmlReader.work_samples`; None also for a lost GPU."""
    samples = or_none(lambda: nvml.work_samples(index, since))
    return None if samples is None else [(sample.pid, sample.sm_percent) for sample in samples]


def _metric_percent(nvml: Any, first: Any, second: Any, metric_name: str) -> float | None:
    """Return a metric between two samples in percent; None: the driver has no number."""
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = 1
    request.sample1, request.sample2 = first, second
    request.metrics[0].metricId = getattr(nvml, metric_name)
    nvml.nvmlGpmMetricsGet(request)
    metric = request.metrics[0]
    # Two samples of the same moment give no number.
    return float(metric.value) if metric.nvmlReturn == 0 and math.isfinite(metric.value) else None
