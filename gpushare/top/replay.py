"""A recording of `gpushare observe` as frames of the cockpit: what was on the screen yesterday."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from gpushare.base.model import (
    MPS_SERVER,
    Gpu,
    GpuProcess,
    GpuSensors,
    ListedJob,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Snapshot,
    Way,
)
from gpushare.top.frame import Frame
from gpushare.top.history import SECONDS

if TYPE_CHECKING:
    from gpushare.base.model import JobWay, WayInForce
    from gpushare.measure.recording import PartSample, RecordedInstance, RecordedProcess, Sample, Samples

# Frames of the past that are drawn at once, after the time was moved.
_MOST_PAST: Final = 600


class Replay:
    """Stands in for `Reader`: each look is the next sample of a recording."""

    recorded: Final = True

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._next = 0
        self._last: Frame | None = None
        # The screen sets both, as it does for `Reader`; for a recording they change nothing.
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

    @property
    def seconds_per_sample(self) -> float:
        return self._samples.header.interval_seconds

    def seek(self, seconds: float) -> list[Frame]:
        """Move the time, and return the frames of the five minutes up to it."""
        samples = self._samples
        last = samples.index_at(samples.time(max(0, self._next - 1)) + seconds)
        first = max(samples.index_at(samples.time(last) - SECONDS), last - _MOST_PAST)
        self._next = last + 1
        frames = [self._frame(sample) for sample in samples.read(first, last + 1)]
        self._last = frames[-1] if frames else self._last
        return frames

    @property
    def progress_text(self) -> str:
        """Return how far it is, in percent of the time."""
        samples = self._samples
        whole = samples.time(len(samples) - 1)
        return f"{100 * samples.time(max(0, self._next - 1)) / whole:.0f} %" if whole else "100 %"

    def _frame(self, sample: Sample) -> Frame:
        """Return a sample as the frame that `Reader` would have made of the host then."""
        recorded = self._samples
        header = recorded.header
        measured = {gpu.index: gpu for gpu in sample.gpus}
        # What was recorded of each process and each MIG device once, with what this sample says of it.
        processes = [(recorded.processes[use.id], use) for use in sample.processes if use.id in recorded.processes]
        instances = {
            gpu.index: [(recorded.instances[use.id], use) for use in gpu.instances if use.id in recorded.instances]
            for gpu in sample.gpus
        }
        instance_by_uuid = {instance.uuid: instance for on_gpu in instances.values() for instance, _ in on_gpu}
        ways = {index: _WAYS.get(gpu.way or "") for index, gpu in measured.items()}
        gpus: list[Gpu] = []
        sm: dict[tuple[int, int | None], float | None] = {}
        sensors: dict[int, GpuSensors] = {}
        for facts in header.gpus:
            if facts.index not in measured:
                continue
            gpu = measured[facts.index]
            on_gpu = instances[facts.index]
            own_processes = [(process, use) for process, use in processes if process.gpu == facts.index]
            gpus.append(
                Gpu(
                    index=facts.index,
                    uuid=facts.uuid,
                    name=facts.name,
                    memory_total_bytes=facts.memory_total_bytes,
                    memory_used_bytes=gpu.memory_used_bytes,
                    utilization_percent=None if gpu.utilization_percent is None else round(gpu.utilization_percent),
                    mig_enabled=None if ways[facts.index] is None else ways[facts.index] is Way.MIG,
                    mig_instances=tuple(replace(mig, memory_used_bytes=use.memory_used_bytes) for mig, use in on_gpu),
                    processes=tuple(_gpu_process(process, use, instance_by_uuid) for process, use in own_processes),
                    error=gpu.error,
                )
            )
            sm |= {(facts.index, instance.gpu_instance_id): use.sm_percent for instance, use in on_gpu}
            sm[facts.index, None] = gpu.sm_percent
            if gpu.error is None:
                sensors[facts.index] = GpuSensors(
                    power_watts=gpu.power_watts,
                    power_limit_watts=facts.power_limit_watts,
                    temperature_celsius=gpu.temperature_celsius,
                    sm_clock_mhz=gpu.sm_clock_mhz,
                )
        at = header.started_at + sample.at
        daemons = tuple(
            _mps_daemon(index, processes) for index, way in ways.items() if way in {Way.MPS, Way.MPS_TIMESLICE}
        )
        return Frame(
            at=at,
            snapshot=Snapshot(
                host=header.host, driver_version=header.driver, gpus=tuple(gpus), daemons=daemons, taken_at=at
            ),
            ways=ways,
            jobs=tuple(_listed_job(process, use, instance_by_uuid) for process, use in processes),
            sensors=sensors,
            sm={device: percent for device, percent in sm.items() if percent is not None},
        )


_WAYS: Final = {way.value: cast("WayInForce", way) for way in Way}


def _gpu_process(process: RecordedProcess, use: PartSample, instances: dict[str, RecordedInstance]) -> GpuProcess:
    """Return a recorded process as NVML lists it; ``instances`` are the MIG devices by UUID."""
    instance = instances.get(process.mig or "")
    return GpuProcess(
        pid=process.pid,
        compute=not process.graphics,
        graphics=process.graphics,
        mps=process.mps,
        user=process.user,
        name=process.name,
        gpu_instance_id=None if instance is None else instance.gpu_instance_id,
        compute_instance_id=None if instance is None else instance.compute_instance_id,
        memory_used_bytes=use.memory_used_bytes,
    )


def _mps_daemon(gpu: int, processes: list[tuple[RecordedProcess, PartSample]]) -> MpsDaemon:
    """Return the MPS daemon of a GPU: of itself and its servers, only the clients were recorded."""
    clients = tuple(
        MpsClient(
            pid=process.pid,
            name=process.name,
            user=process.user,
            threads_percent=process.threads_percent,
            memory_limit_bytes=process.client_limit_bytes,
        )
        for process, _ in processes
        if process.mps and process.gpu == gpu
    )
    return MpsDaemon(
        pid=None,
        ours=False,
        pipe_directory=None,
        gpu_index=gpu,
        gpu_indexes=(gpu,),
        servers=(MpsServer(pid=0, clients=clients),),
    )


def _listed_job(process: RecordedProcess, sample: PartSample, instances: dict[str, RecordedInstance]) -> ListedJob:
    """Return a recorded process as a job; ``instances`` are the MIG devices by UUID."""
    instance = instances.get(process.mig or "")
    way: JobWay
    if process.mps or process.name == MPS_SERVER:
        way = Way.MPS if process.mig is None else Way.MIG_MPS
    else:
        way = Way.TIMESLICE if process.mig is None else Way.MIG
    # The driver tells nothing of the work of a client of MPS: its server has it.
    percent = None if process.mps else sample.utilization_percent
    return ListedJob(
        name=process.job,
        pid=process.pid,
        # A recording does not say which processes were paused.
        state="-",
        user=process.user,
        role=process.role,
        device=f"GPU {process.gpu}",
        gpu_indexes=(process.gpu,),
        way=way,
        mig_profile=None if instance is None else instance.profile,
        mig_name=None if instance is None else instance.name,
        threads_percent=process.threads_percent,
        slice_us=process.slice_us,
        memory_used_bytes=sample.memory_used_bytes,
        memory_limit_bytes=process.memory_limit_bytes,
        sm_percent=None if percent is None else round(percent),
        command=process.name,
        container=process.container,
        processes=(process.pid,),
    )
