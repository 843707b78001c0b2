"""One look at a host for the cockpit: GPUs with their sensors, MPS daemons, and jobs with their use of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError, or_none
from gpushare.base.model import Gpu, GpuSensors, ListedJob, MigInstance, MpsDaemon, Snapshot, sharing_now
from gpushare.base.values import dataclass
from gpushare.host.activity import ActivityRecorder
from gpushare.run.listing import listed_jobs
from gpushare.snapshot import Observer

if TYPE_CHECKING:
    from gpushare.base.model import WayInForce
    from gpushare.host.host import Host
    from gpushare.host.identity import Identity
    from gpushare.host.machine import Load, Xid
    from gpushare.host.process import ProcessUsage

# The kernel's log is read so often.
_XID_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """What a process, or a job with all its processes, uses of the host: percent of one core, and resident bytes."""

    cpu_percent: float | None
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a job, in the tree of its processes; ``depth`` 1 is a child of its first one."""

    pid: int
    depth: int
    name: str | None
    use: HostUse | None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A host at one moment. ``error``: nothing could be read."""

    at: float
    snapshot: Snapshot
    jobs: tuple[ListedJob, ...] = ()
    # By GPU index.
    sensors: Mapping[int, GpuSensors] = field(default_factory=dict)
    # Percent of the SMs that worked since the look before (GPM), by GPU index and GPU instance (None: the whole GPU).
    sm: Mapping[tuple[int, int | None], float] = field(default_factory=dict)
    # By the PID of a job's first process.
    uses: Mapping[int, HostUse] = field(default_factory=dict)
    trees: Mapping[int, tuple[Member, ...]] = field(default_factory=dict)
    # Percent of the time of all cores; bytes in use and in all.
    cpu_percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    # As (number, PCI address), all since the boot; None: this user may not read them.
    xids: tuple[Xid, ...] | None = None
    # By GPU index, as it was recorded; None: it follows from the snapshot.
    ways: Mapping[int, WayInForce | None] | None = None
    error: str | None = None

    def way(self, gpu: Gpu) -> WayInForce | None:
        """Return how a GPU is shared; None: unknown."""
        return sharing_now(gpu, self.snapshot.daemons) if self.ways is None else self.ways.get(gpu.index)

    def daemons_of(self, gpu: Gpu) -> list[MpsDaemon]:
        """Return the MPS daemons that serve a GPU or its instances."""
        return [daemon for daemon in self.snapshot.daemons if gpu.index in (daemon.gpu_index, *daemon.gpu_indexes)]

    def name_of(self, pid: int, program: str | None) -> str | None:
        """Return the name of the job that a process belongs to, or of one without a name its program."""
        names = (job.name for job in self.jobs if job.name is not None and pid in (job.pid, *job.processes))
        return next(names, program)

    def activity(self, gpu: Gpu, instance: MigInstance | None = None) -> float | None:
        """Return the SM activity of a GPU or of an instance in percent; None: no GPM (before Hopper)."""
        return self.sm.get((gpu.index, None if instance is None else instance.gpu_instance_id))


class Reader:
    """Reads a host again and again. ``with_memory`` adds the ledger of memory, and who has reserved GPUs, to a snapshot.

    ``watched`` is the GPU that is open on the screen: its traffic is measured at each look, that of the others in turn,
    because that takes 40 ms. ``trees``: read the processes of jobs too.
    """

    # These are no frames of the past: what is on the screen can be acted on.
    recorded: Final = False

    def __init__(self, host: Host, with_memory: Callable[[Host, Snapshot], Snapshot]) -> None:
        self._host, self._with_memory = host, with_memory
        self._observer = Observer(host, hurry=True)
        self.watched: int | None = None
        self.trees = False
        # The number of looks. The first one does not wait for what takes long: programs, and the traffic.
        self._looks = 0
        self._recorders: dict[tuple[int, int | None], ActivityRecorder] = {}
        self._traffic: dict[int, tuple[int | None, int | None]] = {}
        # By PID: when each process was last read, and what it had used of the host.
        self._readings: dict[int, tuple[float, ProcessUsage]] = {}
        self._load: Load | None = None
        self._xids: tuple[Xid, ...] | None = None
        self._xids_until = 0.0

    def read(self) -> Frame:
        """Return the host as it is now; what cannot be read is an error in the frame, and read again next time."""
        try:
            return self._read()
        except GpushareError as error:
            return Frame(
                at=time.time(), snapshot=Snapshot(host=self._host.spec), error=f"{error.message}\n{error.hint}"
            )

    def identity(self, pid: int | None) -> Identity | None:
        """Return the process that has a PID now; None: none has."""
        return None if pid is None else self._host.processes.identity(pid)

    def _read(self) -> Frame:
        """Return the host as it is now, with what has changed since the last reading."""
        host = self._host
        snapshot = self._with_memory(host, self._observer.read())
        jobs = tuple(listed_jobs(host, snapshot, everything=True))
        answering = [gpu for gpu in snapshot.gpus if gpu.error is None]
        now = time.monotonic()
        earlier_load = self._load
        load = self._load = host.machine.load()
        uses, trees = self._host_use(jobs, now)
        # Not at the first look: the kernel's log is read by a program.
        if self._looks and now >= self._xids_until:
            self._xids = host.machine.xids()
            self._xids_until = now + _XID_SECONDS
        return Frame(
            at=snapshot.taken_at or time.time(),
            snapshot=snapshot,
            jobs=jobs,
            sensors=self._sensors(answering),
            sm=self._activity(answering),
            uses=uses,
            trees=trees,
            cpu_percent=_cpu_percent(earlier_load, load),
            memory_used=None if load is None else load.memory_total - load.memory_free,
            memory_total=None if load is None else load.memory_total,
            xids=self._xids,
        )

    def _sensors(self, gpus: Sequence[Gpu]) -> dict[int, GpuSensors]:
        """Return the sensors by GPU index; traffic is read only for one GPU in turn and the watched one."""
        self._looks += 1
        in_turn = gpus[self._looks % len(gpus)].index if gpus else None
        by_gpu: dict[int, GpuSensors] = {}
        for gpu in gpus:
            # Not at the first look, which would wait for it.
            if self._looks > 1 and gpu.index in {in_turn, self.watched}:
                self._traffic[gpu.index] = or_none(lambda: self._host.nvml.pcie_traffic(gpu.index)) or (None, None)  # noqa: B023 - called here
            sensors = or_none(lambda: self._host.nvml.sensors(gpu.index))  # noqa: B023
            if sensors is not None:
                received, sent = self._traffic.get(gpu.index, (None, None))
                by_gpu[gpu.index] = replace(sensors, pcie_received=received, pcie_sent=sent)
        return by_gpu

    def _activity(self, gpus: Sequence[Gpu]) -> dict[tuple[int, int | None], float]:
        """Return the SM activity since the last look in percent, by GPU index and GPU instance (None: the whole GPU)."""
        devices = [
            (gpu.index, instance_id)
            for gpu in gpus
            for instance_id in dict.fromkeys([None, *(mig.gpu_instance_id for mig in gpu.mig_instances)])
        ]
        for removed in self._recorders.keys() - set(devices):
            self._recorders.pop(removed).close()
        percents = {}
        for device in devices:
            if device not in self._recorders:
                self._recorders[device] = ActivityRecorder(self._host.nvml, *device)
            percent = self._recorders[device].percent_since_last()
            if percent is not None:
                percents[device] = percent
        return percents

    def _host_use(
        self, jobs: Sequence[ListedJob], now: float
    ) -> tuple[dict[int, HostUse], dict[int, tuple[Member, ...]]]:
        """Return what each job uses of the host and, if ``trees``, its processes; both by the PID of its first process."""
        roots = [job.pid for job in jobs if job.pid is not None]
        families = self._host.processes.families(roots) if self.trees else {}
        # `_process_use` adds the readings of now.
        earlier = self._readings
        self._readings = {}
        uses = {}
        trees = {}
        for job in jobs:
            if job.pid is None:
                continue
            # Where the family of a job is not read, its first process and those on GPUs count.
            pids = dict.fromkeys(families.get(job.pid) or [job.pid, *job.processes])
            use_by_pid = {pid: self._process_use(pid, now, earlier.get(pid)) for pid in pids}
            readable = [use for use in use_by_pid.values() if use is not None]
            percents = [use.cpu_percent for use in readable if use.cpu_percent is not None]
            if readable:
                uses[job.pid] = HostUse(
                    cpu_percent=sum(percents) if percents else None,
                    memory_bytes=sum(use.memory_bytes for use in readable),
                )
            if job.pid in families:
                trees[job.pid] = self._tree(families[job.pid], use_by_pid)
        return uses, trees

    def _process_use(self, pid: int, now: float, earlier: tuple[float, ProcessUsage] | None) -> HostUse | None:
        """Return what a process uses of the host, and keep the reading: CPU percent are since the earlier one."""
        usage = self._host.processes.usage(pid)
        if usage is None:
            return None
        self._readings[pid] = now, usage
        read_at, usage_then = earlier or (now, usage)
        percent = None
        # With another start, another process has the PID now.
        if usage_then.started == usage.started and now > read_at:
            percent = 100 * max(0.0, usage.cpu_seconds - usage_then.cpu_seconds) / (now - read_at)
        return HostUse(cpu_percent=percent, memory_bytes=usage.memory_bytes)

    def _tree(self, family: Sequence[int], uses: Mapping[int, HostUse | None]) -> tuple[Member, ...]:
        """Return the descendants of the first PID of a family, each after its parent, with its own descendants next."""
        root, *others = family
        children: dict[int, list[int]] = {}
        for pid in others:
            children.setdefault(self._host.processes.parent(pid) or root, []).append(pid)
        members: list[Member] = []
        # PIDs with their depths, the next one last.
        pending = [(child, 1) for child in reversed(children.pop(root, []))]
        while pending:
            pid, depth = pending.pop()
            info = self._host.processes.describe(pid)
            members.append(Member(pid=pid, depth=depth, name=None if info is None else info.name, use=uses.get(pid)))
            pending += [(child, depth + 1) for child in reversed(children.pop(pid, []))]
        return tuple(members)


def _cpu_percent(earlier: Load | None, load: Load | None) -> float | None:
    """Return the use of all cores between two readings in percent; None: there are no two."""
    if earlier is None or load is None or load.all_seconds <= earlier.all_seconds:
        return None
    busy = (load.busy_seconds - earlier.busy_seconds) / (load.all_seconds - earlier.all_seconds)
    # The time of waiting for disks may run backwards (iowait, proc_stat(5)).
    return 100 * min(1.0, max(0.0, busy))
