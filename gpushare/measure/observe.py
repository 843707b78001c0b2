"""Sample the GPUs of a host at intervals, and record how they and the processes on them are used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpushare.base.errors import GpushareError, OperationFailed, no_gpu_error, or_none
from gpushare.base.model import (
    MPS_SERVER,
    Gpu,
    GpuProcess,
    GpuSensors,
    ListedJob,
    MigInstance,
    MpsDaemon,
    Snapshot,
    sharing_now,
)
from gpushare.base.selection import Device
from gpushare.host.activity import ActivityRecorder, samples_since
from gpushare.host.host import Host
from gpushare.host.process import ProcessInfo
from gpushare.measure.recording import (
    IDLE_SAMPLES,
    GpuSample,
    Header,
    PartSample,
    RecordedGpu,
    RecordedInstance,
    RecordedProcess,
    Recording,
    RecordingFile,
    Sample,
    Tally,
)
from gpushare.memory.peaks import Profile, keep_profile
from gpushare.run.listing import listed_jobs
from gpushare.snapshot import BLIND, HostState

# How often MPS daemons are asked: without a reason, and for a client that came.
_DAEMON_SECONDS: Final = 30.0
_CLIENT_SECONDS: Final = 5.0
# How many processes that are gone are remembered, in case they come back.
_REMEMBERED: Final = 1000
# A process was alone if it was alone in this part of its samples: the first and the last may show another one.
_ALONE_SHARE: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clocks of an observation; tests replace them."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def header_for(
    host: Host, indexes: Sequence[int] | None, interval_seconds: float, clock: Clock | None = None
) -> Header:
    """Return the header of a recording of some GPUs of a host, or of all of them."""
    gpus = [gpu for gpu in host.nvml.sweep() if indexes is None or gpu.index in indexes]
    if not gpus:
        raise no_gpu_error()
    if all(gpu.error is not None for gpu in gpus):
        raise OperationFailed(
            f"no GPU answers: {gpus[0].error}", "see what is wrong: gpushare doctor", code="no_gpu_answers"
        )
    return Header(
        host=host.spec,
        driver=host.nvml.driver_version(),
        started_at=(clock or Clock()).wall(),
        interval_seconds=interval_seconds,
        gpus=tuple(_recorded_gpu(host, gpu) for gpu in gpus),
        warnings=(BLIND,) if host.processes.namespace_is_host() is False else (),
    )


def _recorded_gpu(host: Host, gpu: Gpu) -> RecordedGpu:
    """Return a GPU as the header of a recording has it."""
    sensors = or_none(lambda: host.nvml.sensors(gpu.index)) or GpuSensors()
    return RecordedGpu(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_total_bytes=gpu.memory_total_bytes,
        mig_enabled=gpu.mig_enabled,
        power_limit_watts=sensors.power_limit_watts,
    )


# Identifies a process: GPU, PID, GPU instance and compute instance.
_ProcessKey = tuple[int, int, "int | None", "int | None"]


@dataclass
class Sampler:
    """Takes samples of some GPUs of a host, and reports new processes."""

    host: Host
    indexes: frozenset[int]
    interval_seconds: float
    clock: Clock = field(default_factory=Clock)
    # The command lines of this user's own processes outside containers and MIG, by the id of their record. They are not
    # in the recording: they may hold a secret.
    commands: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _meters: dict[tuple[int, int | None], ActivityRecorder] = field(default_factory=dict)
    # The processes that were seen, the last ones at the end, and those of them in the present sample.
    _known: dict[_ProcessKey, RecordedProcess] = field(default_factory=dict)
    _present: set[_ProcessKey] = field(default_factory=set)
    # MIG devices without their use, by which one that has another name is another one.
    _instances: dict[MigInstance, RecordedInstance] = field(default_factory=dict)
    _next_id: int = 0
    _looked_at: float | None = None
    # The MPS daemons, which write each question into their log, and when they were last asked.
    _daemons: tuple[MpsDaemon, ...] = ()
    _asked_at: float = -math.inf
    # The jobs of the present sample by the PIDs of their processes; None: not needed yet.
    _jobs: dict[int, ListedJob] | None = None
    _gpus: tuple[Gpu, ...] = ()
    # The processes and MIG devices that the present sample has for the first time.
    first_seen: list[RecordedProcess | RecordedInstance] = field(default_factory=list)

    def take(self, at: float) -> Sample:
        """Return the sample at this second; ``first_seen`` then has the processes and MIG devices that are new in it."""
        wall = self.clock.wall()
        since = self._looked_at if self._looked_at is not None else wall - self.interval_seconds
        # If the clock was set back, do not ask for samples of the future.
        since = min(since, wall)
        self._looked_at = wall
        try:
            gpus: Iterable[Gpu] = [gpu for gpu in HostState(self.host).gpus if gpu.index in self.indexes]
        except GpushareError as error:
            # For example, the driver was unloaded; it may answer again later.
            gpus = [Gpu(index=index, error=error.message) for index in sorted(self.indexes)]
        self._gpus = tuple(gpus)
        self._jobs = None
        self._ask_daemons()
        self.first_seen = []
        self._present = set()
        gpu_samples = []
        process_samples: list[PartSample] = []
        for gpu in gpus:
            if gpu.error is not None:
                gpu_samples.append(GpuSample(index=gpu.index, error=gpu.error))
                continue
            sm_percents = self._sm_percents(gpu)
            gpu_samples.append(self._sample_gpu(gpu, sm_percents))
            process_samples += self._sample_processes(gpu, sm_percents, since)
        self._forget_ended()
        return Sample(at=round(at, 3), gpus=tuple(gpu_samples), processes=tuple(process_samples))

    def _ask_daemons(self) -> None:
        """Read the MPS daemons again: from time to time, and when there is a new client."""
        clients = {client.pid for daemon in self._daemons for client in daemon.clients}
        processes = [process for gpu in self._gpus for process in gpu.processes or ()]
        new_client = any(process.mps and process.pid not in clients for process in processes)
        now = self.clock.monotonic()
        if now - self._asked_at >= (_CLIENT_SECONDS if new_client else _DAEMON_SECONDS):
            self._asked_at = now
            state = HostState(self.host, self._gpus)
            self._daemons = tuple(candidate.daemon for candidate in or_none(lambda: state.daemons) or ())

    def _job_of(self, pid: int) -> ListedJob | None:
        """Return the job of a process; of a client of MPS without a job, the entry that `gpushare jobs` has for it."""
        if self._jobs is None:
            snapshot = Snapshot(host=self.host.spec, gpus=self._gpus, daemons=self._daemons)
            jobs = or_none(lambda: listed_jobs(self.host, snapshot, everything=True, most_ended=0)) or []
            self._jobs = {pid: job for job in jobs for pid in job.processes}
        return self._jobs.get(pid)

    def close(self) -> None:
        """Free what NVML keeps for us."""
        for meter in self._meters.values():
            meter.close()
        self._meters.clear()

    def _sm_percents(self, gpu: Gpu) -> dict[int | None, float | None]:
        """Return the SM activity of a GPU (under None) and of each of its GPU instances since the last sample."""
        percents: dict[int | None, float | None] = {}
        for instance in (None, *(mig.gpu_instance_id for mig in gpu.mig_instances)):
            if (gpu.index, instance) not in self._meters:
                self._meters[gpu.index, instance] = ActivityRecorder(self.host.nvml, gpu.index, instance)
            if instance not in percents:
                percents[instance] = _rounded(self._meters[gpu.index, instance].percent_since_last())
        return percents

    def _sample_gpu(self, gpu: Gpu, sm_percents: Mapping[int | None, float | None]) -> GpuSample:
        """Return the sample of a GPU and its MIG devices."""
        sensors = or_none(lambda: self.host.nvml.sensors(gpu.index)) or GpuSensors()
        way = sharing_now(gpu, self._daemons)
        return GpuSample(
            index=gpu.index,
            utilization_percent=gpu.utilization_percent,
            sm_percent=sm_percents[None],
            memory_used_bytes=gpu.memory_used_bytes,
            power_watts=_rounded(sensors.power_watts),
            temperature_celsius=sensors.temperature_celsius,
            sm_clock_mhz=sensors.sm_clock_mhz,
            way=None if way is None else way.value,
            instances=tuple(
                PartSample(
                    id=self._record_of_instance(mig).id,
                    sm_percent=None if mig.gpu_instance_id is None else sm_percents[mig.gpu_instance_id],
                    memory_used_bytes=mig.memory_used_bytes,
                )
                for mig in gpu.mig_instances
            ),
        )

    def _sample_processes(
        self, gpu: Gpu, sm_percents: Mapping[int | None, float | None], since: float
    ) -> list[PartSample]:
        """Return the samples of the processes on a GPU, also of those that worked on it and are gone."""
        utilization_of = self._utilization_by_pid(gpu.index, since)
        processes = list(gpu.processes or ())
        listed = {process.pid for process in processes}
        # Gone before this sample: only its work shows that it was there. Under MPS, work is booked on the server.
        processes += [GpuProcess(pid=pid, compute=True) for pid in sorted((utilization_of or {}).keys() - listed)]
        records = [self._record_of(gpu, process) for process in processes]
        # The activity of a GPU or GPU instance is that of a process that is alone on it, MPS servers aside.
        pids_on: dict[int | None, set[int]] = {}
        for process, record in zip(processes, records, strict=True):
            if record.name != MPS_SERVER:
                pids_on.setdefault(process.gpu_instance_id, set()).add(process.pid)
        samples = []
        for process, record in zip(processes, records, strict=True):
            instance = process.gpu_instance_id
            # Without a sample it was idle; the work of an MPS client is booked on its server.
            utilization = None if utilization_of is None or process.mps else utilization_of.get(process.pid, 0.0)
            is_alone = pids_on.get(instance) == {process.pid}
            if is_alone and instance is None and utilization is None:
                # Alone under MPS: all work of the server is its work.
                utilization = gpu.utilization_percent
            samples.append(
                PartSample(
                    id=record.id,
                    utilization_percent=utilization,
                    sm_percent=sm_percents.get(instance) if is_alone else None,
                    memory_used_bytes=process.memory_used_bytes,
                )
            )
        return samples

    def _record_of_instance(self, mig: MigInstance) -> RecordedInstance:
        """Return the record of a MIG device, a new one if it is seen for the first time."""
        device = replace(mig, memory_used_bytes=None, jobs_reserved_bytes=None)
        if device not in self._instances:
            record = RecordedInstance(id=self._next_id, **vars(device))
            self._instances[device] = record
            self._next_id += 1
            self.first_seen.append(record)
        return self._instances[device]

    def _utilization_by_pid(self, index: int, since: float) -> dict[int, float] | None:
        """Return the mean SM % by PID since then; None is unknown (MIG, old GPUs)."""
        rows = samples_since(self.host.nvml, index, since)
        if rows is None:
            return None
        of_pid: dict[int, list[int]] = {}
        for pid, percent in rows:
            of_pid.setdefault(pid, []).append(percent)
        return {pid: round(sum(values) / len(values), 2) for pid, values in of_pid.items()}

    def _record_of(self, gpu: Gpu, process: GpuProcess) -> RecordedProcess:
        """Return the record of a process, a new one if it is seen for the first time."""
        key = (gpu.index, process.pid, process.gpu_instance_id, process.compute_instance_id)
        self._present.add(key)
        info = self.host.processes.describe(process.pid)
        last_record = self._known.get(key)
        # Nothing can be read of a process that has just ended; another start means that the PID was given again.
        if last_record is not None and (info is None or last_record.started in {None, info.started}):
            return last_record
        record = self._new_record(gpu, process, info)
        self.first_seen.append(record)
        own = info is not None and info.uid == self.host.uid and record.container is None and record.mig is None
        if own and info is not None and info.command_line and len(self.commands) < _REMEMBERED:
            self.commands[record.id] = info.command_line
        # Moved to the end, so that the oldest are forgotten first.
        self._known.pop(key, None)
        self._known[key] = record
        return record

    def _new_record(self, gpu: Gpu, process: GpuProcess, info: ProcessInfo | None) -> RecordedProcess:
        """Return a record of a process with its job and limits; ``info`` None: it has ended already."""
        job = self._job_of(process.pid)
        clients = (client for daemon in self._daemons for client in daemon.clients)
        client_limits = {client.pid: client.memory_limit_bytes for client in clients}
        self._next_id += 1
        return RecordedProcess(
            id=self._next_id - 1,
            gpu=gpu.index,
            pid=process.pid,
            started=None if info is None else info.started,
            name=None if info is None else info.name,
            user=None if info is None else info.user,
            container=None if info is None else info.container,
            mps=process.mps,
            graphics=process.graphics and not process.compute,
            mig=next((mig.uuid for mig in gpu.mig_instances if mig.has(process)), None),
            job=None if job is None else job.name,
            role=None if job is None else job.role,
            threads_percent=None if job is None else job.threads_percent,
            memory_limit_bytes=None if job is None else job.memory_limit_bytes,
            client_limit_bytes=client_limits.get(process.pid),
            slice_us=None if job is None else job.slice_us,
        )

    def _forget_ended(self) -> None:
        """Forget the oldest of the processes that are gone, if there are many."""
        ended = [key for key in self._known if key not in self._present]
        for key in ended[: max(0, len(ended) - _REMEMBERED)]:
            del self._known[key]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def observe(
    host: Host,
    header: Header,
    file: RecordingFile,
    *,
    seconds: float,
    clock: Clock | None = None,
    progress: Callable[[float], Any] = lambda _seconds: None,
) -> Recording:
    """Record for some seconds, and return the summary of the recording.

    One sample per interval of the header, counted from the start: a slow sample does not delay later ones, and samples not
    taken in time are counted as missed. Ctrl-C, SIGTERM and SIGHUP (KeyboardInterrupt) end it and keep what was recorded.
    A lost GPU, and processes that come and go, do not end it. ``progress`` gets the seconds that are over.

    Raises:
        KeyboardInterrupt: before the first sample.
        NoPermission, OperationFailed: the file can no longer be written; what is in it stays.
    """
    clock = clock or Clock()
    tally = Tally(header)
    interval = header.interval_seconds
    missed = 0
    reason = "finished"
    sampler = Sampler(host, frozenset(gpu.index for gpu in header.gpus), interval, clock)

    def take(at: float) -> Sample:
        """Return a sample; what is seen for the first time comes before it in the file."""
        sample = sampler.take(at)
        for record in sampler.first_seen:
            file.write_record(record)
            if isinstance(record, RecordedProcess):
                tally.add_process(record)
        return sample

    try:
        start = clock.monotonic()
        # GPM counts from here: the first sample is at the end of the first interval.
        take(0.0)
        number = 1
        last = max(1, round(seconds / interval))
        while number <= last:
            due = start + number * interval
            clock.sleep(max(0.0, due - clock.monotonic()))
            sample = take(clock.monotonic() - start)
            file.write_sample(sample)
            tally.add(sample)
            progress(min(number * interval, seconds))
            intervals_over = int((clock.monotonic() - start) / interval)
            upcoming = max(number, intervals_over) + 1
            # Those between this one and the upcoming one; none is due after the last.
            missed += min(upcoming, last + 1) - number - 1
            number = upcoming
    except KeyboardInterrupt:
        if not tally.samples:
            raise
        reason = "interrupted"
    finally:
        sampler.close()
    file.write_end(tally.seconds, reason, missed)
    recording = tally.recording(missed=missed, reason=reason)
    # In another PID namespace, NVML's PIDs are not those of this user's commands.
    if host.processes.namespace_is_host() is not False:
        _keep_profiles(host, recording, sampler.commands)
    return recording


def _keep_profiles(host: Host, recording: Recording, commands: Mapping[int, Sequence[str]]) -> None:
    """Keep, for later runs, the peak and the use of this user's commands that were alone on their GPU; ignore failures."""
    gpus = {gpu.index: gpu for gpu in recording.header.gpus}
    for use in recording.processes:
        command = commands.get(use.process.id)
        if command is None or use.sm is None or use.samples < IDLE_SAMPLES:
            continue
        # SM activity is only known while it was alone.
        if use.contended_share or use.sm.samples < _ALONE_SHARE * use.samples:
            continue
        gpu = gpus[use.process.gpu]
        device = Device(gpu=Gpu(index=gpu.index, uuid=gpu.uuid, name=gpu.name))
        profile = Profile(memory_bytes=use.memory_peak_bytes or None, use_percent=round(min(100.0, use.sm.mean), 1))
        keep_profile(host, device, command, profile)
