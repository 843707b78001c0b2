"""The two roles of `gpushare run`: a production job, known by name, and an opportunistic one that takes what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, InUse, NotFound, gpu_not_named_error, no_process_error
from gpushare.base.model import Gpu, Priority, Way
from gpushare.base.selection import Device
from gpushare.base.units import MIB, format_bytes, pid_of, quoted
from gpushare.base.values import dataclass
from gpushare.host.host import Host, processes_on
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import own_daemon
from gpushare.mps.limits import Limits
from gpushare.part import Part, Watch
from gpushare.run.end import CONVERSATION_SECONDS, client_pids
from gpushare.run.jobs import (
    JobRecord,
    check_job_name,
    check_not_in_line,
    find_record,
    is_running,
    living_productions,
    records,
)
from gpushare.run.pause import ChannelPauser, Pauser
from gpushare.run.production import ProductionJob
from gpushare.run.results import Tuned, find_tuned

# Next to four different production jobs on an H200, this cap ended the harm wherever any cap did.
SAFE_THREADS_PERCENT: Final = 60.0
# The memory of a context itself, and what the driver keeps.
_MARGIN_BYTES: Final = 1024 * MIB


def spared_process(host: Host, device: Device, target: str | None) -> ProductionJob | None:
    """Return the running job of this name or PID that is to be spared, or the only production job on the device, or None.

    A PID may be of any process, also of one that gpushare did not start.

    Raises:
        NotFound: as `spared_record`, or no process has this PID (code ``no_process``).
        BadUsage: it runs on another device (code ``other_device``).
    """
    pid = None if target is None else pid_of(target)
    if target is not None and pid is not None:
        process = host.processes.identity(pid) if pid else None
        if process is None:
            raise no_process_error(target, code="no_process")
        indexes = _gpus_in_use_by(host, pid)
        if indexes and device.gpu.index not in indexes:
            raise _other_device_error(f"process {pid}", str(indexes[0]), device)
        return ProductionJob(host, device, *process, under_mps=is_under_mps(host, device, pid))
    record = spared_record(host, device, target)
    if record is None or not is_running(host, record):
        return None
    if device.uuid not in record.devices:
        raise _other_device_error(f"'{record.name}'", next(iter(record.devices), "-"), device)
    under_mps = is_under_mps(host, device, record.pid)
    return ProductionJob(host, device, record.pid, record.started, record.name, under_mps=under_mps)


def _gpus_in_use_by(host: Host, pid: int) -> list[int] | None:
    """Return the indexes of the GPUs that a program or its descendants use; None: a GPU's processes are unknown."""
    family = set(host.processes.descendants(pid))
    processes = [processes_on(host, index) for index in range(host.nvml.count())]
    if None in processes:
        return None
    return [index for index, on_gpu in enumerate(processes) if any(each.pid in family for each in on_gpu or ())]


def _other_device_error(title: str, selector: str, device: Device) -> BadUsage:
    """Return the error of a production job that does not run on the device of this job."""
    return BadUsage(
        f"{title} runs on a different device from {device.title}",
        f"run this job there: -g {selector}; or drop --for",
        code="other_device",
    )


def is_under_mps(host: Host, device: Device, pid: int) -> bool:
    """Return whether a program is a client of our daemon on the device, or may still become one.

    Its variable CUDA_MPS_PIPE_DIRECTORY decides where the daemon does not list it: if the program has no context yet, or if
    the daemon does not answer (then an unknown variable may lead to it, too).
    """
    try:
        home, _ = own_daemon(host, device)
    except GpushareError:
        return False
    family = set(host.processes.descendants(pid))
    clients = client_pids(MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS))
    pipe = (host.processes.environment(pid) or {}).get("CUDA_MPS_PIPE_DIRECTORY")
    leads_to_daemon = pipe == str(home.pipe)
    if clients is None:
        return leads_to_daemon or pipe is None
    if clients & family:
        return True
    on_gpu = {process.pid for process in processes_on(host, device.gpu.index) or ()}
    has_context = not on_gpu.isdisjoint(family)
    return leads_to_daemon and not has_context


@dataclass(frozen=True, kw_only=True)
class Spared:
    """How to run an opportunistic job: its limits, what was tuned for it (None: nothing), and notes to print."""

    limits: Limits
    tuned: Tuned | None
    notes: Sequence[str]


def device_of_job(host: Host, gpus: Sequence[Gpu], target: str) -> str | None:
    """Return the UUID of the first device of the job that ``--for`` names: a job without ``-g`` runs there.

    ``target`` is its name or PID. None: it runs in no job of gpushare now, or not all its devices are on ``gpus``.

    Raises:
        NotFound: as `spared_record`, or no process has this PID (code ``no_process``).
        BadUsage: it was tuned and does not run, and there are several GPUs (code ``gpu_not_named``).
    """
    uuids = {gpu.uuid for gpu in gpus} | {mig.uuid for gpu in gpus for mig in gpu.mig_instances}
    in_use = _uuids_of_job(host, target)
    if in_use and uuids.issuperset(in_use):
        return in_use[0]
    pid = pid_of(target)
    if pid is not None:
        if not host.processes.identity(pid):
            raise no_process_error(target, code="no_process")
    # On a single GPU it is looked for later: there a job that leaves the GPU for it has a hint of its own.
    elif len(gpus) > 1 and _named_production(host, target) is None:
        raise gpu_not_named_error(len(gpus), f"'{target}' is not running: say where this job is to run")
    return None


def _uuids_of_job(host: Host, target: str) -> Sequence[str]:
    """Return the UUIDs of the devices of the running job of this name or PID; none: gpushare runs no such job now."""
    jobs = (record for record in records(host) if target in {record.name, str(record.pid)} and record.devices)
    return next((record.devices for record in jobs if is_running(host, record)), ())


def devices_beside(host: Host, devices: Sequence[Device], target: str) -> Sequence[Device]:
    """Return those of some devices that the job or process of ``--for`` (name or PID) uses; all of them if it uses none."""
    uuids = _uuids_of_job(host, target)
    pid = pid_of(target)
    if pid and not uuids:
        indexes = _gpus_in_use_by(host, pid) or ()
        return [each for each in devices if each.gpu.index in indexes] or devices
    return [each for each in devices if each.uuid in uuids] or devices


def spared_record(host: Host, device: Device, target: str | None) -> JobRecord | None:
    """Return the record of the production job that is to keep its speed.

    ``target`` None: the only production job on the device; None if there is not exactly one. A PID: the job that runs with it
    on the device; None if gpushare did not start this process. A name: the job of this name, running or not; None if it
    was tuned and has not run yet.

    Raises:
        NotFound: no job of this name is recorded or was tuned (``no_production``), or it waits (``waits_in_line``).
    """
    if target is None:
        living = living_productions(host, device)
        return living[0] if len(living) == 1 else None
    pid = pid_of(target)
    if pid is not None:
        matching = (record for record in records(host) if record.pid == pid and device.uuid in record.devices)
        return next((record for record in matching if is_running(host, record)), None)
    return _named_production(host, target)


def _named_production(host: Host, name: str) -> JobRecord | None:
    """Return the production job of this name, running or not; None: it was only tuned. Raises as `spared_record`."""
    record = find_record(host, check_job_name(name))
    if record is None and find_tuned(host, name) is None:
        check_not_in_line(host, name)
        raise NotFound(
            f"no job {quoted(name)} is running, and tune has kept no result for it",
            f"start it: gpushare run --production {name} -- CMD; or tune it: gpushare tune --name {name} ...",
            code="no_production",
        )
    return record


def tuned_next_to(host: Host, device: Device, target: str | None) -> Tuned | None:
    """Return the tuning for the production job of this name or PID, or for the only one that runs on the device."""
    return _tuned_for(host, spared_record(host, device, target), target)


def _tuned_for(host: Host, production: JobRecord | None, target: str | None) -> Tuned | None:
    """Return the tuning for what `spared_record` found; if that is None, for the name ``target`` of a job that never ran."""
    name = target if production is None else production.name
    # What is decimal is a PID, and tunings are kept by name.
    return None if name is None or name.isdecimal() else find_tuned(host, name)


def limits_beside(host: Host, device: Device, given: Limits, target: str | None, *, way: Way = Way.CAPS) -> Spared:
    """Return the limits of an opportunistic job: those given, else the tuned ones, else cap 60 with low priority.

    With slices, which limit all jobs of the device together, there is neither a cap nor a priority unless it is given.
    """
    production = spared_record(host, device, target)
    # What production needs in memory holds for every way; the other limits are of the way that was tuned.
    tuned_any_way = _tuned_for(host, production, target)
    tuned = tuned_any_way if tuned_any_way is not None and tuned_any_way.way == way else None
    living = living_productions(host, device)
    # A cap that the user gave, and slices, need no tuning.
    takes_default_cap = tuned is None and given.threads_percent is None and way is not Way.SLICES
    notes = _tuning_notes(host, device, tuned) if tuned is not None or takes_default_cap else []
    memory = given.memory_limit_bytes
    if memory is None:
        # Other production jobs on the device need their memory too. By process: the peak in a record may just have grown.
        neighbours = {(job.pid, job.started): job for job in (*living, *([] if production is None else [production]))}
        memory = _memory_beside(device, neighbours.values(), tuned_any_way)
        unknown = [job for job in neighbours.values() if job.memory_peak_bytes is None]
        if tuned_any_way is not None and tuned_any_way.production_memory_bytes is not None:
            unknown = [job for job in unknown if job != production]
        if memory is None:
            notes.append("no memory limit: the memory that production needs is unknown; set one with --memory")
        elif unknown:
            names = " and ".join(f"'{job.name}'" for job in unknown)
            notes.append(f"the memory limit leaves nothing to {names}, whose memory is unknown; set one with --memory")
    if way is Way.SLICES:
        return Spared(limits=replace(given, memory_limit_bytes=memory), tuned=tuned, notes=notes)
    threads = given.threads_percent
    if threads is None:
        threads = SAFE_THREADS_PERCENT if tuned is None else tuned.threads_percent
    priority = given.priority
    if priority is None:
        priority = Priority.LOW if tuned is None or tuned.low_priority else Priority.NORMAL
    limits = Limits(threads_percent=None if threads >= 100 else threads, memory_limit_bytes=memory, priority=priority)
    return Spared(limits=limits, tuned=tuned, notes=notes)


def _tuning_notes(host: Host, device: Device, tuned: Tuned | None) -> list[str]:
    """Return what to tell the user of the tuning: that there is none, or that it was measured elsewhere; empty: it holds here."""
    if tuned is None:
        return [
            f"no tuning result found; using the default: cap {SAFE_THREADS_PERCENT:g} % with low priority; see: gpushare tune"
        ]
    here = (device.gpu.name, host.nvml.driver_version())
    return [] if (tuned.gpu_name, tuned.driver) == here else ["tuned on another GPU or driver: tune it again here"]


def _memory_beside(device: Device, production_jobs: Iterable[JobRecord], tuned: Tuned | None) -> int | None:
    """Return the bytes that the production jobs leave for another job (None: unknown).

    What they take is the larger of two estimates: their known peaks together, and what `tune` saw.
    Raises InUse: they leave less than 1 MiB.
    """
    total = device.memory_total_bytes
    peaks = [job.memory_peak_bytes for job in production_jobs if job.memory_peak_bytes is not None]
    estimates = [sum(peaks)] if peaks else []
    if tuned is not None and tuned.production_memory_bytes is not None:
        estimates.append(tuned.production_memory_bytes)
    if total is None or not estimates:
        return None
    taken = max(estimates)
    available = total - (device.gpu.memory_reserved_bytes or 0) - taken - _MARGIN_BYTES
    if available < MIB:
        raise InUse(
            f"production takes {format_bytes(taken)} of the {format_bytes(total)} of {device.title}:"
            " nothing is left for another job",
            "run it on another GPU: -g",
            gpu=device.gpu.index,
            code="memory_does_not_fit",
        )
    return available // MIB * MIB


NOT_PROTECTED: Final = "not protected: under MPS, a GPU fault of either job ends both; memory bandwidth is shared at any cap; a cap reserves nothing"
TICK_SECONDS: Final = 0.01
_FIRST_SECONDS: Final = 0.1
# Shorter gaps between two requests of production are not idleness. A share of the time, or one controlled by production's loss,
# did worse than this full pause: running 20 ms of 100 left production .85 of its rate with 5.6x p99, the pause .97 with 1.1x (H200).
_QUIET_SECONDS: Final = 0.3


@dataclass
class PauseForProduction(Part):
    """Pauses the program from production's first sign of work until `_QUIET_SECONDS` after the last."""

    host: Host
    production: ProductionJob
    # Outside MPS: try its channels first; ``say`` is called with the reason when another way has to be taken.
    by_channels: bool = False
    say: Callable[[str], None] = lambda _text: None
    pauser: Pauser | None = None
    _watch: Watch | None = None
    due: float = 0.0
    _find_due: float = 0.0
    _released: bool = False
    _active_at: float = -math.inf

    @property
    def where(self) -> str:
        return f", paused while {self.production.title} works"

    def started(self, watch: Watch) -> None:
        """Note the program, and make what pauses it while production works (`Pauser`)."""
        self._watch = watch
        # A program that has just started is not on the GPU yet.
        self.due = time.monotonic() + _FIRST_SECONDS
        if self.pauser is None:
            channels = ChannelPauser(self.host, watch.program_pid) if self.by_channels else None
            self.pauser = Pauser(self.host, watch.gpus, watch.program_pid, channels)
        self.pauser.say = self.say
        self.pauser.tell = watch.tell

    def poll(self) -> bool:
        """Pause or resume the program, and from time to time look for its processes."""
        at = time.monotonic()
        self.due = at + TICK_SECONDS
        watch = self._watch
        pauser = self.pauser
        if watch is None or pauser is None:
            return False
        if not self._released:
            self._pause_or_resume(pauser, at)
        if at >= self._find_due:
            pauser.find_processes()
            self._find_due = time.monotonic() + watch.poll_interval()
        return False

    def _pause_or_resume(self, pauser: Pauser, at: float) -> None:
        """Pause the program if production works, and let it continue once production rests or has ended."""
        if self.production.works():
            self._active_at = at
        if at - self._active_at < _QUIET_SECONDS:
            pauser.pause()
        else:
            pauser.resume()

    def release(self) -> Mapping[int, int]:
        """Let the program continue for good, so that it can end; it has no strays."""
        self._released = True
        if self.pauser is not None:
            self.pauser.resume()
        return {}

    def settle(self) -> None:
        """Let what the program left behind continue, such as a worker in its own session."""
        self._released = True
        if self.pauser is not None:
            self.pauser.close()
