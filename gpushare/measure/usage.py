"""What a run uses of its GPU: energy, peak memory and activity; and which other processes were there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from gpushare.base.benchmark import Usage
from gpushare.base.errors import or_none
from gpushare.base.model import GpuProcess, memory_held
from gpushare.base.selection import Device
from gpushare.host.activity import ActivityRecorder, BandwidthRecorder, utilization
from gpushare.host.host import Host
from gpushare.measure.statistics import mean_known
from gpushare.mps.control import is_server

# Each sample is a few NVML calls: frequent enough to see a peak, too rare to disturb. Short runs need early samples.
_INTERVAL_SECONDS: Final = 0.5
_FIRST_INTERVAL_SECONDS: Final = 0.1
_FIRST_SAMPLES: Final = 10
# A CUDA program that starts on another GPU is listed here for a moment (seen on two H200).
_STAYS_SECONDS: Final = 0.4


class UsageMeter:
    """Looks at one device at intervals while copies run on it.

    NVML: nvmlDeviceGetTotalEnergyConsumption (since Volta), and the process lists. In another PID namespace (a container)
    memory is the increase of the whole device, and other processes are unknown.
    """

    def __init__(
        self,
        host: Host,
        device: Device,
        *,
        clients: Callable[[], set[int] | None] | None = None,
        gpu_instances: Collection[int] | None = None,
        seen: dict[int, float] | None = None,
        activity: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clients`` asks the MPS daemon, if the copies must be its clients; ``gpu_instances`` are those of the run.

        ``seen`` is kept between runs: when other processes were first seen. ``activity``: also see how busy the GPU is.
        """
        self._host = host
        self._device = device
        self._clock = clock
        self._clients = clients
        self._gpu_instances = gpu_instances
        # The PIDs of the run; of these, copies that are no clients of the daemon, and those that seemed so in the last sample.
        self._mine: set[int] = set()
        self._outside: set[int] = set()
        self._suspects: set[int] = set()
        # Names of programs of others by PID.
        self._others: dict[int, str] = {}
        self._first_seen = {} if seen is None else seen
        self._peak: int | None = None
        # Where it is unknown whether NVML's PIDs are those of this namespace, they are taken as such.
        self._pids_are_ours = host.processes.namespace_is_host() is not False
        self._used_before = None if self._pids_are_ours else self._used_bytes()
        self._due = 0.0
        self._samples = 0
        # GPM counts between two samples: one at the start, one at the end.
        kinds = (ActivityRecorder, BandwidthRecorder) if activity else ()
        self._recorders = [kind(host.nvml, device.gpu.index) for kind in kinds]
        self._shares: list[float | None] = [None, None]
        self._busy: list[float] = []
        self._stopped: tuple[float | None, float] | None = None
        self.restart()

    def restart(self) -> None:
        """Count energy and activity from now."""
        self._started = self._clock()
        self._energy = self._energy_counter()
        self._busy = []
        for recorder in self._recorders:
            recorder.percent_since_last()

    def stop(self) -> None:
        """Count energy and activity up to now; of copies in turn, which all stop it, the last stop counts."""
        self._stopped = self._energy_counter(), self._clock()
        if self._recorders:
            self._shares = [recorder.percent_since_last() for recorder in self._recorders]
        for recorder in self._recorders:
            recorder.close()

    def sample(self, programs: Collection[int]) -> None:
        """If it is time, see how busy the device is, and what the programs with these PIDs and other processes do on it."""
        at = self._clock()
        if at < self._due:
            return
        self._samples += 1
        self._due = at + (_FIRST_INTERVAL_SECONDS if self._samples < _FIRST_SAMPLES else _INTERVAL_SECONDS)
        busy = utilization(self._host.nvml, self._device.gpu.index) if self._recorders else None
        if busy is not None:
            self._busy.append(busy)
        if self._pids_are_ours:
            self._sample_processes(programs)
            return
        used = self._used_bytes()
        if used is not None and self._used_before is not None:
            self._peak = max(self._peak or 0, used - self._used_before)

    def _sample_processes(self, programs: Collection[int]) -> None:
        """Note which processes on the GPU are the run's, which of these are outside MPS, and how much memory the run holds."""
        processes = or_none(lambda: self._host.nvml.processes(self._device.gpu.index) or ())
        if processes is None:
            return
        self._mine |= set(programs)
        on_gpu = [process for process in processes if process.compute or process.mps]
        self._sort_processes(on_gpu, programs)
        self._note_copies_outside_mps(on_gpu)
        held = memory_held(process for process in on_gpu if process.pid in self._mine)
        if held is not None:
            self._peak = max(self._peak or 0, held)

    @property
    def run_pids(self) -> frozenset[int]:
        """Return the PIDs of the run: its programs and all of their processes that were seen, even in other sessions."""
        return frozenset(self._mine)

    def usage(self) -> Usage:
        """Return the usage from the last restart to the last stop, or to now."""
        joules, until = self._stopped or (self._energy_counter(), self._clock())
        seconds = until - self._started
        energy = None if joules is None or self._energy is None else max(0.0, joules - self._energy)
        return Usage(
            seconds=seconds,
            energy_joules=energy,
            memory_peak_bytes=self._peak,
            others=tuple(sorted(self._others)),
            other_names=dict(self._others),
            outside=tuple(sorted(self._outside)),
            sm_percent=self._shares[0],
            dram_percent=self._shares[1],
            busy_percent=mean_known(self._busy),
        )

    def _note_copies_outside_mps(self, processes: Collection[GpuProcess]) -> None:
        """Note copies that run outside MPS: CUDA does that silently when no daemon answers, and MPS is not measured then.

        Two samples must agree, and the daemon must not know the process: NVML lists a client a moment before the daemon.
        """
        if self._clients is None:
            return
        suspects = {process.pid for process in processes if process.pid in self._mine and not process.mps}
        seen_twice = (suspects & self._suspects) - self._outside
        self._suspects = suspects
        clients = self._clients() if seen_twice else None
        if clients is not None:
            self._outside |= seen_twice - clients

    def _sort_processes(self, processes: Collection[GpuProcess], programs: Collection[int]) -> None:
        """Sort processes into the run's and others; descendants are looked up only when a new PID is seen."""
        listed = {process.pid for process in processes if self._is_on_run_device(process)}
        for ended in set(self._first_seen) - listed:
            del self._first_seen[ended]
        new = listed - self._mine - set(self._others)
        if not new:
            return
        for program in programs:
            self._mine |= set(self._host.processes.descendants(program))
        at = self._clock()
        for pid in new - self._mine:
            # One that soon goes only starts here, on its way to another GPU.
            if at - self._first_seen.setdefault(pid, at) < _STAYS_SECONDS:
                continue
            info = self._host.processes.describe(pid)
            # It may have ended since; and an MPS server is no other program: it serves the run.
            if info is not None and info.name is not None and not is_server(info.name):
                self._others[pid] = info.name

    def _is_on_run_device(self, process: GpuProcess) -> bool:
        """Return whether a process is where the run is: in one of its MIG instances, else on its device."""
        if self._gpu_instances is not None:
            return process.gpu_instance_id in self._gpu_instances
        mig = self._device.mig
        return mig is None or process.gpu_instance_id in {None, mig.gpu_instance_id}

    def _energy_counter(self) -> float | None:
        """Return the joules that the GPU has used since the driver was loaded; None: unknown."""
        return or_none(lambda: self._host.nvml.energy_joules(self._device.gpu.index))

    def _used_bytes(self) -> int | None:
        return or_none(lambda: self._host.nvml.gpu(self._device.gpu.index).memory_used_bytes)
