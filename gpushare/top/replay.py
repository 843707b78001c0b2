"""A recording of `gpushare observe` as frames of the cockpit: what was on the screen yesterday."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpushare.base.model import (
    ComputeMode,
    Gpu,
    GpuProcess,
    GpuSensors,
    ListedJob,
    MigInstance,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Snapshot,
    Way,
)
from gpushare.run.listing import RUNNING
from gpushare.top.frame import Frame
from gpushare.top.history import SECONDS

if TYPE_CHECKING:
    from gpushare.measure.recording import GpuSample, ProcessSample, RecordedGpu, RecordedProcess, Sample, Samples

# Frames of the past that are drawn at once, after the time was moved.
_MOST_PAST: Final = 600


class Replay:
    """Stands in for `Reader`: each look is the next sample of a recording."""

    recorded: Final = True

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._next = 0
        self._last: Frame | None = None
        self.watched: int | None = None
        self.trees = False

    def read(self) -> Frame:
        """Return the next sample; at the end the last one again."""
        if self._next < len(self._samples):
            samples = self._samples.read(self._next, self._next + 1)
            self._next += 1
            if samples:
                self._last = self._frame(samples[0])
        return self._last or Frame(
            at=self._samples.header.started_at, snapshot=Snapshot(host=self._samples.header.host)
        )

    def seek(self, seconds: float) -> list[Frame]:
        """Move the time, and return the frames of the five minutes up to it."""
        samples = self._samples
        at = samples.time(max(0, self._next - 1)) + seconds
        last = samples.index_at(at)
        first = max(samples.index_at(samples.time(last) - SECONDS), last - _MOST_PAST)
        self._next = last + 1
        frames = [self._frame(sample) for sample in samples.read(first, last + 1)]
        self._last = frames[-1] if frames else self._last
        return frames

    @property
    def place(self) -> str:
        """Return how far it is, in percent of the time."""
        samples = self._samples
        whole = samples.time(len(samples) - 1)
        return f"{100 * samples.time(max(0, self._next - 1)) / whole:.0f} %" if whole else "100 %"

    def _frame(self, sample: Sample) -> Frame:
        header = self._samples.header
        facts = {gpu.index: gpu for gpu in header.gpus}
        here = [(self._samples.processes[use.id], use) for use in sample.processes if use.id in self._samples.processes]
        gpus = tuple(
            _gpu(facts[gpu.index], gpu, [pair for pair in here if pair[0].gpu == gpu.index])
            for gpu in sample.gpus
            if gpu.index in facts
        )
        at = header.started_at + sample.at
        daemons = tuple(
            _daemon(gpu.index, here) for gpu in sample.gpus if gpu.way in {Way.MPS.value, Way.MPS_TIMESLICE.value}
        )
        snapshot = Snapshot(host=header.host, driver_version=header.driver, gpus=gpus, daemons=daemons, taken_at=at)
        return Frame(
            at=at,
            snapshot=snapshot,
            jobs=tuple(_job(process, use) for process, use in here),
            sensors={
                gpu.index: GpuSensors(
                    power_watts=gpu.power_watts,
                    temperature_celsius=gpu.temperature_celsius,
                    sm_clock_mhz=gpu.sm_clock_mhz,
                )
                for gpu in sample.gpus
                if gpu.error is None
            },
            sm={(gpu.index, None): gpu.sm_percent for gpu in sample.gpus if gpu.sm_percent is not None},
        )


_MODES: Final = {
    Way.EXCLUSIVE.value: ComputeMode.EXCLUSIVE_PROCESS,
    Way.PROHIBITED.value: ComputeMode.PROHIBITED,
}


def _gpu(facts: RecordedGpu, sample: GpuSample, here: list[tuple[RecordedProcess, ProcessSample]]) -> Gpu:
    instances = dict.fromkeys(process.mig for process, _ in here if process.mig is not None)
    percent = sample.utilization_percent
    return Gpu(
        index=facts.index,
        uuid=facts.uuid,
        name=facts.name,
        memory_total_bytes=facts.memory_total_bytes,
        memory_used_bytes=sample.memory_used_bytes,
        utilization_percent=None if percent is None else round(percent),
        compute_mode=None if sample.way is None else _MODES.get(sample.way, ComputeMode.DEFAULT),
        mig_enabled=sample.way == Way.MIG.value,
        mig_instances=tuple(MigInstance(uuid=uuid) for uuid in instances),
        processes=tuple(
            GpuProcess(
                pid=process.pid,
                compute=not process.graphics,
                graphics=process.graphics,
                mps=process.mps,
                user=process.user,
                name=process.name,
                memory_used_bytes=use.memory_used_bytes,
            )
            for process, use in here
        ),
        error=sample.error,
    )


def _daemon(gpu: int, here: list[tuple[RecordedProcess, ProcessSample]]) -> MpsDaemon:
    clients = tuple(
        MpsClient(
            pid=process.pid,
            name=process.name,
            user=process.user,
            threads_percent=process.threads_percent,
            memory_limit_bytes=process.memory_limit_bytes,
        )
        for process, _ in here
        if process.mps and process.gpu == gpu
    )
    # Of the daemon itself only its clients were recorded; some number stands for its PID.
    return MpsDaemon(
        pid=-1 - gpu,
        ours=False,
        pipe_directory="-",
        gpu_index=gpu,
        gpu_indexes=(gpu,),
        servers=(MpsServer(pid=-1 - gpu, clients=clients),),
    )


def _job(process: RecordedProcess, sample: ProcessSample) -> ListedJob:
    percent = sample.sm_percent if sample.utilization_percent is None else sample.utilization_percent
    return ListedJob(
        name=process.job,
        pid=process.pid,
        state=RUNNING,
        user=process.user,
        role=process.role,
        device=f"GPU {process.gpu}",
        gpu_indexes=(process.gpu,),
        way=(Way.MPS if process.mps else Way.TIMESLICE)
        if process.mig is None
        else (Way.MIG_MPS if process.mps else Way.MIG),
        threads_percent=process.threads_percent,
        slice_us=process.slice_us,
        memory_used_bytes=sample.memory_used_bytes,
        memory_limit_bytes=process.memory_limit_bytes,
        sm_percent=None if percent is None else round(percent),
        command=process.name,
        container=process.container,
        processes=(process.pid,),
    )
