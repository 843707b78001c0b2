"""What `gpushare jobs` lists: jobs that run, wait, are paused or swapped out, and those that ended recently."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import cut
from gpushare.base.model import WAITING, GpuProcess, JobWay, ListedJob, MpsClient, Snapshot, Way
from gpushare.base.selection import Device, titles
from gpushare.base.typed import job_name
from gpushare.base.units import natural_key
from gpushare.base.values import dataclass
from gpushare.host.capabilities import user_name
from gpushare.host.identity import Identity, uptime
from gpushare.host.records import has_records
from gpushare.memory.ledger import Reservation, reservations
from gpushare.memory.look import waiting_jobs
from gpushare.mps.control import is_server
from gpushare.run.jobs import MOST_COMMAND, OPPORTUNISTIC, JobRecord, past_jobs, running_records

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from gpushare.host.host import Host
    from gpushare.host.process import ProcessInfo
    from gpushare.memory.swapped import Swap
    from gpushare.pause.record import PausedJob

RUNNING: Final = "running"
PAUSED: Final = "paused"
ENDED: Final = "ended"


def listed_jobs(host: Host, snapshot: Snapshot, *, everything: bool = False, most_ended: int = 10) -> list[ListedJob]:
    """Return the jobs of a host: those that run, are paused or swapped out, then those that wait, then those that ended.

    ``snapshot`` was taken just now. ``everything``: also each process on the GPUs that gpushare did not start. Root sees the
    jobs of all users, but only those of its own that have ended.
    """
    ledger = reservations(host) or []
    present = _Present(host, snapshot, ledger)
    ended = _ended_jobs(host, most_ended, {record.supervisor for record in present.records.values()})
    waiting = (
        replace(job, command=_program_text(host.processes.describe(job.pid or 0)))
        for job in waiting_jobs(host, snapshot.gpus, ledger)
    )
    return [*present.jobs(everything=everything), *waiting, *ended]


def present_jobs(host: Host, snapshot: Snapshot) -> list[ListedJob]:
    """Return the jobs of a host that run, are paused or swapped out; ``snapshot`` was taken just now."""
    return list(_Present(host, snapshot, reservations(host) or []).jobs(everything=False))


@dataclass(frozen=True)
class _OnGpu:
    """A process on a GPU."""

    gpu: int
    device: Device
    process: GpuProcess


class _Present:
    """The jobs that have a program now: each with its record, its processes, its pause and its swap."""

    def __init__(self, host: Host, snapshot: Snapshot, ledger: Sequence[Reservation]) -> None:
        self._host, self._ledger = host, ledger
        self._devices = _devices_by_uuid(snapshot)
        self.records = {record.pid: record for record in running_records(host)}
        self._on_gpu = list(_processes_on_gpus(snapshot))
        self._clients: dict[int, MpsClient] = {
            client.pid: client for daemon in snapshot.daemons for client in daemon.clients
        }
        # Each by the first process of its job. The reader of a kind of record is imported only if there are such records.
        self._paused = self._read_pauses() if has_records(host, "pause") else {}
        self._swaps = self._read_swaps() if has_records(host, "swap") else {}

    def _read_pauses(self) -> dict[int, PausedJob]:
        """Return the paused jobs, each by its first process."""
        from gpushare.pause.record import paused_jobs

        paused: dict[int, PausedJob] = {}
        for job in paused_jobs(self._host):
            if job.is_paused(self._host):
                paused.setdefault(self._root_of(job.pid) or job.pid, job)
        return paused

    def _read_swaps(self) -> dict[int, Swap]:
        """Return the jobs that are swapped out, or on their way, each by its first process."""
        from gpushare.memory.swapped import BACK, swaps

        absent: dict[int, Swap] = {}
        for swap in swaps(self._host):
            if swap.state != BACK:
                # The process that the record names may have ended.
                roots = (self._root_of(pid) for pid in (swap.pid, *(image.pid for image in swap.images)))
                absent.setdefault(next(filter(None, roots), swap.pid), swap)
        return absent

    def _root_of(self, pid: int) -> int | None:
        """Return the first process of the job that a process belongs to; None: to none of gpushare's."""
        above = self._host.processes.ancestry(pid) if self.records else ()
        return next((each for each in above if each in self.records), None)

    def jobs(self, *, everything: bool) -> Iterator[ListedJob]:
        """Yield the jobs by name; then those without a record that are paused or swapped out; then, if wanted, all else on GPUs."""
        # A process of no job is its own root. Each is taken out with its job.
        unlisted: dict[int, list[_OnGpu]] = {}
        if self.records or self._paused or everything:
            for entry in self._on_gpu:
                unlisted.setdefault(self._root_of(entry.process.pid) or entry.process.pid, []).append(entry)
        for root, record in sorted(self.records.items(), key=lambda entry: natural_key(entry[1].name)):
            yield self._recorded_job(root, record, unlisted.pop(root, []))
        for pid in {**self._paused, **self._swaps}.keys() - self.records.keys():
            members = {pid}
            if pid in self._paused:
                members |= self._paused[pid].pids
            if pid in self._swaps:
                members.update(image.pid for image in self._swaps[pid].images)
            yield self._unrecorded_job(pid, [entry for member in members for entry in unlisted.pop(member, [])])
        if everything:
            for pid, processes in unlisted.items():
                yield self._unrecorded_job(pid, processes)

    def _recorded_job(self, pid: int, record: JobRecord, processes: Sequence[_OnGpu]) -> ListedJob:
        """Return a running job as it is listed: what its record says, and what its processes on GPUs show now."""
        info = self._first_process_info(pid, processes)
        devices = [self._devices[uuid] for uuid in record.devices if uuid in self._devices]
        device_uuids = record.devices
        was_moved = processes and {entry.gpu for entry in processes}.isdisjoint(device.gpu.index for device in devices)
        if was_moved:
            present = {entry.device.uuid: entry.device for entry in processes}
            device_uuids = tuple(present)
            devices = list(present.values())
        job = self._job(pid, info, devices, processes, _age(info) if record.since is None else uptime() - record.since)
        names_gpushare = record.supervisor is not None and record.supervisor.pid == record.pid
        is_ended_for_production = record.role == OPPORTUNISTIC and names_gpushare
        waits = job.state == RUNNING and (record.waits or is_ended_for_production)
        mps = record.mps or any(entry.process.mps for entry in processes)
        # Without a process on its GPU it holds no memory there, unless the processes there are unknown.
        is_unknown = not processes and (not devices or devices[0].gpu.processes is None)
        containers = (entry.process.container for entry in processes)
        return replace(
            job,
            name=record.name,
            state=WAITING if waits else job.state,
            role=record.role,
            device_uuids=device_uuids,
            way=_way_of(mps=mps, mig=bool(devices) and devices[0].mig is not None),
            threads_percent=record.threads_percent or job.threads_percent,
            # Under MPS it has the slice of the server; a process on the GPU without a record of a slice has the driver's.
            slice_us=job.slice_us if processes and not record.mps else record.slice_us,
            memory_used_bytes=None if is_unknown else job.memory_used_bytes,
            memory_limit_bytes=self._memory_limit(record),
            command=record.command or _program_text(info),
            container=next(filter(None, containers), None),
        )

    def _unrecorded_job(self, pid: int, processes: Sequence[_OnGpu]) -> ListedJob:
        """Return a program without a record as a job: gpushare did not start it, or its record is gone."""
        info = self._first_process_info(pid, processes)
        swap = self._swaps.get(pid)
        device = None if swap is None else self._devices.get(swap.gpu_uuid)
        if processes:
            device = processes[0].device
        job = self._job(pid, info, [] if device is None else [device], processes, _age(info))
        mps = any(entry.process.mps for entry in processes) or (info is not None and is_server(info.name))
        names = [job_name(record.name) for record in (swap, self._paused.get(pid)) if record is not None]
        # Swapped out, it holds no memory; paused without a process on a GPU, that is unknown.
        is_unknown = swap is None and not processes
        return replace(
            job,
            name=next(filter(None, names), None),
            device_uuids=() if device is None else (device.uuid,),
            way=None if device is None else _way_of(mps=mps, mig=device.mig is not None),
            memory_used_bytes=None if is_unknown else job.memory_used_bytes,
            command=None if info is None else _command_text(info.command_line or ()) or info.name,
            container=None if info is None else info.container,
        )

    def _first_process_info(self, pid: int, processes: Sequence[_OnGpu]) -> ProcessInfo | GpuProcess | None:
        """Return what the snapshot knows of the first process of a job, or else the host; None: it has ended since."""
        seen = (entry.process for entry in processes if entry.process.pid == pid and entry.process.name)
        return next(seen, None) or self._host.processes.describe(pid)

    def _job(
        self,
        pid: int,
        info: ProcessInfo | GpuProcess | None,
        devices: Sequence[Device],
        processes: Sequence[_OnGpu],
        running_seconds: float | None,
    ) -> ListedJob:
        """Return the part of a listed job that its processes, its pause and its swap tell; the rest is in its record."""
        swap = self._swaps.get(pid)
        pause = self._paused.get(pid)
        mig = devices[0].mig if devices else None
        state, since_seconds = RUNNING, running_seconds
        if swap is not None:
            state, since_seconds = swap.state, max(0.0, uptime() - swap.since)
        elif pause is not None:
            state, since_seconds = PAUSED, max(0.0, uptime() - pause.since)
        sizes = [entry.process.memory_used_bytes for entry in processes]
        slices = [entry.process.slice_us for entry in processes if entry.process.slice_us is not None]
        return ListedJob(
            name=None,
            pid=pid,
            state=state,
            user=None if info is None else info.user,
            role=None,
            device=titles(devices) if devices else None,
            gpu_indexes=tuple(sorted({entry.gpu for entry in processes} | {each.gpu.index for each in devices})),
            mig_profile=None if mig is None else mig.profile,
            mig_name=None if mig is None else mig.name,
            threads_percent=self._common_threads(processes),
            slice_us=min(slices, default=None),
            # Without processes 0.
            memory_used_bytes=None if None in sizes else sum(size or 0 for size in sizes),
            swapped_bytes=None if swap is None else swap.memory_bytes,
            sm_percent=_sm_percent(processes),
            since_seconds=since_seconds,
            processes=tuple(sorted({entry.process.pid for entry in processes})),
        )

    def _memory_limit(self, record: JobRecord) -> int | None:
        """Return the memory limit of a job on each of its GPUs; of a farm those of its running copies together."""
        if record.memory_bytes is not None:
            return record.memory_bytes
        # Each copy of a farm has a place in the ledger, on GPUs that its record does not name.
        limits = [
            place.limit_bytes * len(place.held)
            for place in self._ledger
            if place.limit_bytes is not None and record.pid in (process.pid for process in place.claim.processes)
        ]
        return sum(limits) // max(1, len(record.devices)) if limits else None

    def _common_threads(self, processes: Iterable[_OnGpu]) -> float | None:
        """Return the thread percentage that all MPS clients of a job have; None: it has none, or they differ."""
        clients = [self._clients.get(entry.process.pid) for entry in processes]
        limits = {client.threads_percent for client in clients if client is not None}
        return limits.pop() if len(limits) == 1 else None


def _devices_by_uuid(snapshot: Snapshot) -> dict[str, Device]:
    """Return the GPUs of a host and their instances, by UUID."""
    return {
        device.uuid: device
        for gpu in snapshot.gpus
        if gpu.uuid is not None
        for device in (Device(gpu=gpu), *(Device(gpu=gpu, mig=mig) for mig in gpu.mig_instances))
    }


def _processes_on_gpus(snapshot: Snapshot) -> Iterator[_OnGpu]:
    """Yield the processes of all GPUs, each with the device that it is on."""
    for gpu in snapshot.gpus:
        for process in gpu.processes or ():
            mig = next((instance for instance in gpu.mig_instances if instance.has(process)), None)
            yield _OnGpu(gpu.index, Device(gpu=gpu, mig=mig), process)


def _age(info: ProcessInfo | GpuProcess | None) -> float | None:
    """Return for how many seconds a process has run; None: unknown."""
    started = None if info is None else info.started_at
    return None if started is None else max(0.0, time.time() - started)


def _way_of(*, mps: bool, mig: bool) -> JobWay:
    """Return how a job shares its device: under MPS, in a MIG instance, both, or by time-slices."""
    if mig:
        return Way.MIG_MPS if mps else Way.MIG
    return Way.MPS if mps else Way.TIMESLICE


def _sm_percent(processes: Sequence[_OnGpu]) -> int | None:
    """Return the SM percent of its processes together, on the GPU where it is most; None: that of one is unknown."""
    sums: dict[int, int] = {}
    for process in processes:
        if process.process.sm_percent is None:
            return None
        sums[process.gpu] = sums.get(process.gpu, 0) + process.process.sm_percent
    return min(100, max(sums.values())) if sums else None


def _program_text(info: ProcessInfo | GpuProcess | None) -> str | None:
    """Return what a job runs, by a process of it: after the ``--`` of `gpushare run`, or its whole command line."""
    words = () if info is None else info.command_line or ()
    return _command_text(words[words.index("--") + 1 :] if "--" in words else words)


def _command_text(words: Sequence[str]) -> str | None:
    """Return a command as typed, cut if it is long; None: there is none."""
    return cut(shlex.join(words), MOST_COMMAND) or None


def _ended_jobs(host: Host, most: int, present: Collection[Identity | None]) -> Iterator[ListedJob]:
    """Yield the newest jobs that have ended, ``most`` of them.

    Not those whose gpushare is ``present`` still: they are listed by their record, which is about to be removed.
    """
    if not most:
        return
    now = time.time()
    ended = [past for past in past_jobs(host) if past.supervisor not in present]
    for past in ended[:most]:
        yield ListedJob(
            name=past.name,
            pid=None,
            state=ENDED,
            user=user_name(host.uid),
            role=past.role,
            device=past.device,
            since_seconds=None if past.ended is None else max(0.0, now - past.ended),
            command=past.command or None,
            exit_code=past.exit_code,
            started=past.started,
            ran_seconds=None if past.ended is None or past.began is None else max(0.0, past.ended - past.began),
            memory_peak_bytes=past.memory_peak_bytes,
        )
