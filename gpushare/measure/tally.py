"""Samples summed up as they come: how each GPU and each process was used. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gpushare.measure.distribution import Distribution, Histogram
from gpushare.measure.samples import GpuSample, Header, ProcessSample, RecordedGpu, RecordedProcess, Sample

# A sample counts as busy from here on: some kernel ran (utilisation is whole percent; GPM is finer).
BUSY_UTILIZATION_PERCENT: Final = 1.0
BUSY_SM_PERCENT: Final = 0.1
# Beside processes that took so much of a GPU, no work seen of another one is no proof that it had none: the driver
# books each of its periods on one process (H200, driver 580: two busy ones show 0 and 99 in turn).
CROWDED_PERCENT: Final = 80.0
# A process that works is seen sooner or later: so many looks without any work tell that it has none.
IDLE_SAMPLES: Final = 30
# Of days of recording, so many ended processes are summed up; the least used ones are dropped and counted.
MOST_PROCESSES: Final = 5000


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """How one GPU was used. ``activity`` is SM activity (GPM) where there is one, else utilisation.

    ``samples`` are those in which it answered, ``unanswered`` the others. ``busy_share`` is of the samples that
    tell: some kernel ran in them.
    """

    gpu: RecordedGpu
    samples: int
    unanswered: int
    utilization: Distribution | None
    sm: Distribution | None
    busy_share: float | None
    memory_peak_bytes: int | None
    memory_mean_bytes: int | None
    error: str | None = None

    @property
    def activity(self) -> Distribution | None:
        """Return SM activity, else utilisation, which says only that a kernel ran."""
        return self.sm or self.utilization

    @property
    def source(self) -> str | None:
        """Return where `activity` is from: ``gpm`` or ``utilization``."""
        return "gpm" if self.sm else "utilization" if self.utilization else None


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """How one process used one GPU; ``seen_from`` and ``seen_to`` are seconds after the start.

    ``contended_share`` is of the samples in which another process worked on the same GPU: then utilisation is the
    share that it got, and it may want more.
    """

    process: RecordedProcess
    samples: int
    seen_from: float
    seen_to: float
    utilization: Distribution | None
    sm: Distribution | None
    busy_share: float | None
    memory_peak_bytes: int | None
    contended_share: float = 0.0

    @property
    def activity(self) -> Distribution | None:
        """Return SM activity, else utilisation. SM activity is known of a process that was alone on its device."""
        return self.sm or self.utilization

    @property
    def source(self) -> str | None:
        """Return where `activity` is from: ``gpm`` or ``utilization``."""
        return "gpm" if self.sm else "utilization" if self.utilization else None


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording, summed up. ``reason`` is finished, interrupted, failed, or None where the file has no end."""

    header: Header
    seconds: float
    samples: int
    gpus: tuple[GpuUse, ...]
    processes: tuple[ProcessUse, ...]
    missed: int = 0
    reason: str | None = None
    damaged_lines: int = 0
    dropped_processes: int = 0


@dataclass
class _Use:
    utilization: Histogram = field(default_factory=Histogram)
    sm: Histogram = field(default_factory=Histogram)
    samples: int = 0
    busy: int = 0
    known: int = 0
    telling: int = 0
    contended: int = 0
    peak: int | None = None
    memory_sum: int = 0
    memory_samples: int = 0
    seen_from: float = 0.0
    seen_to: float = 0.0
    unanswered: int = 0
    error: str | None = None

    def add(self, at: float, sample: GpuSample | ProcessSample, others: float = 0.0) -> None:
        if not self.samples:
            self.seen_from = at
        self.samples += 1
        self.seen_to = at
        utilization, sm, memory = sample.utilization_percent, sample.sm_percent, sample.memory_used_bytes
        self.utilization.add(utilization)
        self.sm.add(sm)
        self.contended += others >= BUSY_UTILIZATION_PERCENT
        if utilization is not None or sm is not None:
            busy = (utilization or 0.0) >= BUSY_UTILIZATION_PERCENT or (sm or 0.0) >= BUSY_SM_PERCENT
            self.known += 1
            self.telling += busy or others < CROWDED_PERCENT
            self.busy += busy
        if memory is not None:
            self.peak = max(self.peak or 0, memory)
            self.memory_sum += memory
            self.memory_samples += 1

    @property
    def busy_share(self) -> float | None:
        if self.known and 2 * self.telling >= self.known:
            return round(self.busy / self.telling, 4)
        return 0.0 if self.known >= IDLE_SAMPLES and not self.busy else None

    @property
    def memory_mean(self) -> int | None:
        return self.memory_sum // self.memory_samples if self.memory_samples else None


class Tally:
    """Sums samples up as they come, in memory that does not grow with time."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.samples = 0
        self.seconds = 0.0
        self.dropped = 0
        self._gpus = {gpu.index: _Use() for gpu in header.gpus}
        self._processes: dict[int, tuple[RecordedProcess, _Use]] = {}

    def meet(self, process: RecordedProcess) -> None:
        """Take note of a process, before its first sample."""
        self._processes.setdefault(process.id, (process, _Use()))

    def add(self, sample: Sample) -> None:
        """Add one sample."""
        self.samples += 1
        self.seconds = max(self.seconds, sample.at)
        for gpu in sample.gpus:
            use = self._gpus.get(gpu.index)
            if use is None:
                continue
            if gpu.error is not None:
                use.unanswered, use.error = use.unanswered + 1, gpu.error
            else:
                use.add(sample.at, gpu)
        rows = [(one, *self._processes[one.id]) for one in sample.processes if one.id in self._processes]
        worked: dict[int, float] = {}
        for one, process, _ in rows:
            worked[process.gpu] = worked.get(process.gpu, 0.0) + (one.utilization_percent or 0.0)
        for one, process, used in rows:
            used.add(sample.at, one, worked[process.gpu] - (one.utilization_percent or 0.0))
        if len(self._processes) > MOST_PROCESSES + MOST_PROCESSES // 10:
            self._drop({one.id for one in sample.processes})

    def _drop(self, present: set[int]) -> None:
        ended = [(use.samples, key) for key, (_, use) in self._processes.items() if key not in present]
        for _, key in sorted(ended)[: len(self._processes) - MOST_PROCESSES]:
            del self._processes[key]
            self.dropped += 1

    def recording(self, *, missed: int = 0, reason: str | None = None, damaged_lines: int = 0) -> Recording:
        """Return what was added so far."""
        return Recording(
            header=self.header,
            seconds=self.seconds,
            samples=self.samples,
            gpus=tuple(_gpu_use(gpu, self._gpus[gpu.index]) for gpu in self.header.gpus),
            processes=tuple(_process_use(process, use) for process, use in self._processes.values() if use.samples),
            missed=missed,
            reason=reason,
            damaged_lines=damaged_lines,
            dropped_processes=self.dropped,
        )


def _gpu_use(gpu: RecordedGpu, use: _Use) -> GpuUse:
    return GpuUse(
        gpu=gpu,
        samples=use.samples,
        unanswered=use.unanswered,
        utilization=use.utilization.distribution(),
        sm=use.sm.distribution(),
        busy_share=use.busy_share,
        memory_peak_bytes=use.peak,
        memory_mean_bytes=use.memory_mean,
        error=use.error,
    )


def _process_use(process: RecordedProcess, use: _Use) -> ProcessUse:
    return ProcessUse(
        process=process,
        samples=use.samples,
        seen_from=use.seen_from,
        seen_to=use.seen_to,
        utilization=use.utilization.distribution(),
        sm=use.sm.distribution(),
        busy_share=use.busy_share,
        memory_peak_bytes=use.peak,
        contended_share=round(use.contended / use.samples, 4) if use.samples else 0.0,
    )
