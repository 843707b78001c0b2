"""What a host is now: `HostState` reads each part once, when it is first needed; `Observer` reads again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpushare.base.errors import GpushareError, or_none
from gpushare.base.model import Gpu, GpuProcess, Holder, MpsDaemon, Snapshot, TimeSlice, VgpuSession
from gpushare.host.host import Host, is_trusted_directory
from gpushare.host.program import MPS_CONTROL
from gpushare.host.records import has_records
from gpushare.host.smi import policies_of

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.mig.ledger import NamedInstance
    from gpushare.mig.profile import Layout
    from gpushare.mps.daemons import FoundDaemon

T = TypeVar("T")
# How long an answer of nvidia-smi or of an MPS daemon is shown again.
_SLOW_SECONDS = 5.0
BLIND = (
    "the process list is incomplete: this PID namespace is not the host's, so processes of other containers are "
    "missing or wrong; look from the host, or start the container with --pid=host"
)


class HostState:
    """A host at one moment. A part that cannot be read raises its GpushareError each time, but is read once.

    ``gpus`` are GPUs that were read already; without them all are swept. ``strangers``: ask the MPS daemons of other
    users, too.
    """

    def __init__(self, host: Host, gpus: Sequence[Gpu] | None = None, *, strangers: bool = False) -> None:
        self.host = host
        self._given, self._strangers = gpus, strangers
        self._known: dict[object, Any] = {}

    def _once(self, part: object, read: Callable[[], T]) -> T:
        """Return a part of the host, read at the first call; an error is raised again each time."""
        if part not in self._known:
            try:
                self._known[part] = read()
            except GpushareError as error:
                self._known[part] = error
        value: T | GpushareError = self._known[part]
        if isinstance(value, GpushareError):
            raise value
        return value

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs; their processes are None where they cannot be known."""
        return self._once("gpus", self._gpus)

    def _gpus(self) -> tuple[Gpu, ...]:
        """Read the GPUs, with the names of their MIG instances."""
        gpus = self.host.nvml.sweep() if self._given is None else self._given
        if any(gpu.mig_instances for gpu in gpus) and self._has_names():
            from gpushare.mig.places import with_names

            gpus = with_names(self.host, gpus)
        # NVML answers a foreign PID namespace with an empty list: whether anybody is there is unknown.
        return tuple(
            replace(gpu, processes=None) if self.in_foreign_namespace and not gpu.processes else gpu for gpu in gpus
        )

    def _has_names(self) -> bool:
        """Return whether MIG instances have names: without any, the code that reads them, which loads slowly, is not loaded."""
        roots = (self.host.state_directory, *self.host.shared_state_directories)
        return any(os.path.exists(root / "names" / "mig.json") for root in roots)

    @property
    def in_foreign_namespace(self) -> bool:
        """Return whether this PID namespace is not the host's."""
        return self._once("namespace", lambda: self.host.processes.namespace_is_host() is False)

    @property
    def driver_version(self) -> str | None:
        return self._once("driver", self.host.nvml.driver_version)

    def start_reading_levels(self) -> bool:
        """Start nvidia-smi, which takes longer than all of NVML, before the sweep; return whether it could be started."""
        return or_none(lambda: self._once("policy", self.host.policy.start)) is not None

    @property
    def levels(self) -> Mapping[int, TimeSlice | None]:
        """Return the time-slice levels by GPU index; after `start_reading_levels`, from the program that runs already."""
        if "policy" not in self._known:
            return self._once("levels", self.host.policy.read)
        return self._once("levels", lambda: policies_of(self._once("policy", self.host.policy.start).result()))

    @property
    def daemon_signs(self) -> tuple[object, ...]:
        """Return cheap evidence of MPS daemons, their records and processes: none means no daemon, and the same the same daemons."""

        def read() -> tuple[object, ...]:
            records = [each for directory in self.host.run_directories for each in _daemon_records(directory / "mps")]
            return tuple(records), tuple(self.host.processes.pids_of_program(MPS_CONTROL))

        return self._once("signs", read)

    @property
    def daemons(self) -> Sequence[FoundDaemon]:
        """Return the MPS daemons, ours first, with what they answer."""
        return self._once("daemons", self._daemons)

    def _daemons(self) -> list[FoundDaemon]:
        """Return the MPS daemons; without a sign of one, nothing of MPS is loaded."""
        if not any(self.daemon_signs):
            return []
        from gpushare.mps.daemons import find_daemons

        return find_daemons(self.host, self.gpus, strangers=self._strangers)

    @property
    def mps_installed(self) -> bool:
        return self._once("MPS program", lambda: self.host.programs.find(MPS_CONTROL) is not None)

    @property
    def mps_version(self) -> int | None:
        """Return the "Binary version" of nvidia-cuda-mps-control; None before R580, and where it does not answer."""
        from gpushare.mps.control import probe_version

        return or_none(lambda: self._once("MPS version", lambda: probe_version(self.host.programs)))

    @property
    def names(self) -> Mapping[str, NamedInstance]:
        """Return the named MIG instances by their names."""
        from gpushare.mig.ledger import names_of

        return self._once("names", lambda: names_of(self.host))

    @property
    def claims(self) -> Mapping[str, Holder] | None:
        """Return who has claimed MIG devices, by UUID; None: that cannot be read."""
        from gpushare.mig.holders import claimed_instances

        return self._once("claims", lambda: claimed_instances(self.host))

    def layout(self, gpu: Gpu) -> Layout:
        """Return the MIG layout of a GPU as NVML tells it. Raises NoPermission if the driver hides the instances."""
        from gpushare.mig.driver import MigReader

        return self._once(("layout", gpu.index), lambda: MigReader(self.host.nvml).layout(gpu))

    def held_layouts(self, gpus: Sequence[Gpu]) -> dict[int, Layout]:
        """Return the MIG layouts by GPU index with names, grants and the holders of each instance."""
        from gpushare.mig.layouts import layouts_of

        return {layout.gpu: layout for layout in layouts_of(self.host, gpus, names=self.names)}


class Observer:
    """Looks at a host again and again. ``state`` is what the last look has read."""

    def __init__(self, host: Host, *, strangers: bool = False, power: bool = False, hurry: bool = False) -> None:
        """Observe a host; ``strangers``: also ask the MPS daemons of other users; ``power``: also read the power of the GPUs.

        ``hurry``: the first look does not wait for nvidia-smi, so the time-slice levels are unknown until the next one.
        """
        self._host, self._strangers, self._power = host, strangers, power
        self.state = HostState(host, strangers=strangers)
        self._hurry = hurry
        # Kept from look to look: the driver, the version of MPS, and, each until its time (monotonic), levels and daemons.
        self._driver: str | None = None
        self._mps_version: int | None = None
        self._mps_asked = False
        self._levels: Mapping[int, TimeSlice | None] = {}
        self._levels_until = 0.0
        self._daemons: tuple[MpsDaemon, ...] = ()
        self._daemons_until = 0.0
        # What `HostState.daemon_signs` was when they were read.
        self._daemon_signs: object = None

    def read(self) -> Snapshot:
        """Return the host as it is now.

        Reading again within 5 seconds asks NVML alone: nvidia-smi costs more than all of it, and an MPS daemon writes
        each conversation into a log that is never rotated. What has visibly changed is asked at once.
        """
        self.state = state = HostState(self._host, strangers=self._strangers)
        reads_levels = not self._hurry and time.monotonic() >= self._levels_until
        self._hurry = False
        if reads_levels:
            state.start_reading_levels()
        paused = _paused_since(self._host)
        slices = _recorded_slices(self._host)
        gpus = tuple(self._with_process_details(gpu, paused, slices) for gpu in state.gpus)
        if self._driver is None:
            self._driver = state.driver_version
        daemons, warnings = self._daemons_now(state), []
        if reads_levels:
            try:
                self._levels, self._levels_until = state.levels, time.monotonic() + _SLOW_SECONDS
            except GpushareError as error:
                self._levels = {}
                warnings.append(f"the time-slice is unknown: {error.message}")
        if state.in_foreign_namespace:
            warnings.append(BLIND)
        return Snapshot(
            host=self._host.spec,
            driver_version=self._driver,
            gpus=tuple(replace(gpu, time_slice=self._levels.get(gpu.index)) for gpu in gpus),
            daemons=daemons,
            warnings=tuple(warnings),
            taken_at=time.time(),
            vgpu_sessions=_vgpu_sessions(self._host, gpus),
        )

    def _with_process_details(self, gpu: Gpu, paused: Mapping[int, float], slices: Mapping[int, int]) -> Gpu:
        """Return a GPU with the owners, pauses and time-slices of its processes, and its power if that was asked for."""
        if self._power and gpu.error is None:
            gpu = self._host.nvml.with_power(gpu)
        if gpu.processes is None:
            return gpu
        processes = (
            replace(self._with_owner(process), paused_since=paused.get(process.pid), slice_us=slices.get(process.pid))
            for process in gpu.processes
        )
        return replace(gpu, processes=tuple(processes))

    def _with_owner(self, process: GpuProcess) -> GpuProcess:
        """Return a process with what /proc says about it."""
        info = self._host.processes.describe(process.pid)
        if info is None:
            return process
        return replace(
            process,
            user=info.user,
            name=info.name,
            command_line=info.command_line,
            started=info.started,
            started_at=info.started_at,
            container=info.container,
        )

    def _daemons_now(self, state: HostState) -> tuple[MpsDaemon, ...]:
        """Return the MPS daemons, read again after some seconds, or as soon as a process on a GPU or a daemon's sign changes."""
        on_gpus = tuple((gpu.index, process.pid) for gpu in state.gpus for process in gpu.processes or ())
        signs = (on_gpus, state.daemon_signs)
        if time.monotonic() >= self._daemons_until or signs != self._daemon_signs:
            daemons = [entry.daemon for entry in state.daemons]
            # An MPS program that hangs costs the version only; gpushare doctor reports it.
            if daemons and not self._mps_asked:
                self._mps_asked, self._mps_version = True, state.mps_version
            self._daemons = tuple(self._with_capacity(daemon, state.gpus) for daemon in daemons)
            self._daemon_signs, self._daemons_until = signs, time.monotonic() + _SLOW_SECONDS
        return self._daemons

    def _with_capacity(self, daemon: MpsDaemon, gpus: tuple[Gpu, ...]) -> MpsDaemon:
        """Return a daemon with its version, and how many clients a server of it takes."""
        if daemon.gpu_index is None:
            return daemon
        gpu = next(gpu for gpu in gpus if gpu.index == daemon.gpu_index)
        version = None if self._mps_version is None else str(self._mps_version)
        # The GPU may be lost since the sweep.
        return replace(daemon, version=version, max_clients=or_none(lambda: self._most_clients(daemon, gpu)))

    def _most_clients(self, daemon: MpsDaemon, gpu: Gpu) -> int | None:
        """Return how many clients a server of this daemon takes on the GPU, or None when that is unknown."""
        from gpushare.mps.limits import max_clients, share_of_slices

        capability = None if gpu.error else self._host.nvml.compute_capability(gpu.index)
        mig = next((mig for mig in gpu.mig_instances if mig.uuid == daemon.device_uuid), None)
        share: float | None = 1.0
        if mig is not None:
            # NVIDIA's MIG guide: 48 times the instance's share of the compute slices.
            share = share_of_slices(mig.profile, self._host.nvml.max_mig_devices(gpu.index))
        return None if share is None else max_clients(self._mps_version, capability, share)


def _vgpu_sessions(host: Host, gpus: Sequence[Gpu]) -> tuple[VgpuSession, ...]:
    """Return the vGPUs that virtual machines use; only a host with NVIDIA's vGPU driver has some."""
    if not host.makes_vgpus():
        return ()
    from gpushare.host.vgpu import vgpu_sessions

    return vgpu_sessions(host.nvml, gpus)


class LastWork:
    """Knows when the processes on the GPUs last worked: from the driver's samples, and from earlier looks.

    ``once``: there are no earlier looks, so what the driver does not remember to have worked has done nothing since its
    start.
    """

    def __init__(self, host: Host, *, once: bool = False) -> None:
        self._host, self._once = host, once
        self._looked = 0.0
        # By PID and start: the last work, and the first look at which it was there.
        self._work: dict[tuple[int, int | None], float] = {}
        self._first: dict[tuple[int, int | None], float] = {}

    def added_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the time of the last work of each process, where it is known."""
        at = snapshot.taken_at or time.time()
        gpus = tuple(self._with_work(gpu, at) for gpu in snapshot.gpus)
        self._looked = at
        started_at = {_identity(process): process.started_at for gpu in gpus for process in gpu.processes or ()}
        # Processes that have ended are forgotten; a new one has done nothing since now, or with ``once`` since its start.
        self._work = {key: value for key, value in self._work.items() if key in started_at}
        idle_since = {key: (start or at) if self._once else at for key, start in started_at.items()}
        self._first = {key: self._first.get(key, since) for key, since in idle_since.items()}
        return replace(snapshot, gpus=gpus)

    def _with_work(self, gpu: Gpu, at: float) -> Gpu:
        """Return a GPU whose processes have the time of their last work, where it is known."""
        if gpu.processes is None:
            return gpu
        # What works now needs no question to the driver; of MPS clients and under MIG nothing is known.
        idle = any(process.sm_percent == 0 and (process.memory_used_bytes or 0) > 0 for process in gpu.processes)
        samples = (or_none(lambda: self._host.nvml.last_work(gpu.index, self._looked)) if idle else None) or {}
        for process in gpu.processes:
            sampled_at = samples.get(process.pid)
            if process.sm_percent:
                self._note_work(process, at)
            # A sample from before its start is of another process with the same PID.
            elif sampled_at and (process.started_at is None or sampled_at >= process.started_at):
                self._note_work(process, min(sampled_at, at))
        processes = (replace(process, last_work_at=self._work.get(_identity(process))) for process in gpu.processes)
        return replace(gpu, processes=tuple(processes))

    def _note_work(self, process: GpuProcess, at: float) -> None:
        key = _identity(process)
        self._work[key] = max(at, self._work.get(key, 0.0))

    def idle_seconds(self, process: GpuProcess, at: float) -> float | None:
        """Return for how long, at least, a process has done no work on the GPU; None: unknown."""
        if process.sm_percent is None:
            return None
        key = _identity(process)
        since = self._work.get(key, self._first.get(key))
        return None if since is None else max(0.0, at - since)


def _identity(process: GpuProcess) -> tuple[int, int | None]:
    """Return PID and start, which no other process has."""
    return process.pid, process.started


def _paused_since(host: Host) -> dict[int, float]:
    """Return since when processes are paused (seconds since 1970), by PID, from the records: the driver is not asked."""
    if not has_records(host, "pause"):
        return {}
    from gpushare.host.identity import wall_time
    from gpushare.pause.record import paused_processes

    return {pid: wall_time(job.since) for pid, job in paused_processes(host).items()}


def _recorded_slices(host: Host) -> dict[int, int]:
    """Return the time-slices that gpushare has set, in microseconds by PID, from the records: the driver is not asked."""
    if not has_records(host, "slices"):
        return {}
    from gpushare.timeslice.slices import slice_records

    return {pid: record.slice_us for pid, record in slice_records(host).items()}


def _daemon_records(directory: Path) -> list[tuple[str, int]]:
    """Return path and time of change of the records of MPS daemons below a directory."""
    if not is_trusted_directory(directory.parent, directory.name):
        return []
    try:
        return [(str(path), path.stat().st_mtime_ns) for path in sorted(directory.glob("*/daemon.json"))]
    except OSError:
        return []
