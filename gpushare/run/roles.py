"""The two roles of `gpushare run`: a production job, known by name, and an opportunistic one that takes what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, InUse, NotFound, no_process_error
from gpushare.base.model import Gpu, Priority, Way
from gpushare.base.selection import Device
from gpushare.base.units import MIB, format_bytes, pid_of, quoted
from gpushare.base.values import dataclass
from gpushare.host.host import Host, processes_on
from gpushare.host.identity import Identity
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import own_daemon
from gpushare.mps.limits import Limits
from gpushare.part import Part, Watch
from gpushare.run.end import CONVERSATION_SECONDS, client_pids
from gpushare.run.jobs import JobRecord, check_job_name, find_record, is_running, living_productions, records
from gpushare.run.pause import PROGRAMS, ChannelPauser, Pacer, Pauser, Pauses, note_pauses
from gpushare.run.production import ProductionJob
from gpushare.run.results import Tuned, find_tuned

# Next to four different production jobs on an H200, this cap ended the harm wherever any cap did.
SAFE_THREADS_PERCENT: Final = 60.0
# The memory of a context itself, and what the driver keeps.
_MARGIN_BYTES: Final = 1024 * MIB


def daemon_cap(host: Host, device: Device) -> float | None:
    """Return the thread cap that the daemon of a device itself puts on every client, or None."""
    try:
        record = own_daemon(host, device)[0].read()
    except NotFound:
        return None
    cap = None if record is None else record.limits.threads_percent
    return cap if cap is not None and cap < 100 else None


def spared_process(host: Host, device: Device, target: str | None, say: Callable[[str], None]) -> ProductionJob | None:
    """Return the running production job of this name or PID, or the only one on the device; None: none runs.

    ``say`` is told of a PID that uses no GPU now: it may be mistyped, or begin later.

    Raises:
        NotFound: no job has this name (code ``no_production``), no process this PID (``no_process``).
        BadUsage: it runs on another device (code ``other_device``).
    """
    number = None if target is None else pid_of(target)
    if target is not None and number is not None:
        process = host.processes.identity(number) if number else None
        if process is None:
            raise no_process_error(target, code="no_process")
        pid, started, name = *process, None
        indexes = _gpus_in_use_by(host, pid)
        if indexes and device.gpu.index not in indexes:
            raise _other_device_error(f"process {pid}", str(indexes[0]), device)
        if indexes == []:
            say(f"process {pid} uses no GPU now: this job yields to it once it does")
    else:
        production = find_spared(host, device, target)
        if production is None or not is_running(host, production):
            return None
        if device.uuid not in production.devices:
            raise _other_device_error(f"'{production.name}'", next(iter(production.devices), "-"), device)
        name = production.name
        pid, started = production.pid, production.started
    return ProductionJob(host, device, pid, started, name, under_mps=is_under_mps(host, device, pid))


def _gpus_in_use_by(host: Host, pid: int) -> list[int] | None:
    """Return the indexes of the GPUs that a program or its descendants use; None: a GPU's processes are unknown."""
    family = set(host.processes.descendants(pid))
    processes = [processes_on(host, index) for index in range(host.nvml.count())]
    if None in processes:
        return None
    return [index for index, on_gpu in enumerate(processes) if any(each.pid in family for each in on_gpu or ())]


def _other_device_error(title: str, selector: str, device: Device) -> BadUsage:
    """Return the error of a production job that runs on another device than this job would."""
    return BadUsage(
        f"{title} runs on another device than {device.title}",
        f"run this job there: -g {selector}; or drop --for",
        code="other_device",
    )


def is_under_mps(host: Host, device: Device, pid: int) -> bool:
    """Return whether a program is a client of our daemon on the device, or may still become one."""
    try:
        home, _ = own_daemon(host, device)
    except GpushareError:
        return False
    family = set(host.processes.descendants(pid))
    clients = client_pids(MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS))
    environment = host.processes.environment(pid) or {}
    if clients is None:
        # It does not answer: where production's variables lead tells, if this user may read them.
        return environment.get("CUDA_MPS_PIPE_DIRECTORY", str(home.pipe)) == str(home.pipe)
    if clients & family:
        return True
    on_gpu = {process.pid for process in processes_on(host, device.gpu.index) or ()}
    # It has no context yet: where its variables lead, it will go.
    return not on_gpu & family and environment.get("CUDA_MPS_PIPE_DIRECTORY") == str(home.pipe)


@dataclass(frozen=True, kw_only=True)
class Spared:
    """How to run an opportunistic job: its limits, the production job next to it, and notes to print."""

    limits: Limits
    production: JobRecord | None
    tuned: Tuned | None
    notes: Sequence[str] = field(default=())


def device_of_job(host: Host, gpus: Sequence[Gpu], target: str) -> str | None:
    """Return the UUID of the first device of the job of this name or PID; None: no such job runs on these GPUs alone."""
    uuids = {gpu.uuid for gpu in gpus} | {each.uuid for gpu in gpus for each in gpu.mig_instances}
    jobs = (
        record
        for record in records(host)
        if target in {record.name, str(record.pid)} and record.devices and uuids.issuperset(record.devices)
    )
    return next((record.devices[0] for record in jobs if is_running(host, record)), None)


def find_spared(host: Host, device: Device, target: str | None) -> JobRecord | None:
    """Return the production job to spare: of this name or PID, or the only one that runs on the device."""
    if target is None:
        living = living_productions(host, device)
        return living[0] if len(living) == 1 else None
    pid = pid_of(target)
    if pid is not None:
        # A PID may also be a process that gpushare has not started: then there is no record.
        matching = (record for record in records(host) if record.pid == pid and device.uuid in record.devices)
        return next((record for record in matching if is_running(host, record)), None)
    named = find_record(host, check_job_name(target))
    if named is None and find_tuned(host, target) is None:
        raise NotFound(
            f"no job {quoted(target)} is known, running or tuned",
            f"start it: gpushare run --production {target} -- CMD; or tune it: gpushare tune --name {target} ...",
            code="no_production",
        )
    return named


def tuned_next_to(host: Host, device: Device, target: str | None) -> Tuned | None:
    """Return the tuning for the production job of this name or PID, or for the only one that runs on the device."""
    return _tuned_for(host, find_spared(host, device, target), target)


def _tuned_for(host: Host, production: JobRecord | None, target: str | None) -> Tuned | None:
    """Return the tuning for a production job, or for the name of one that does not run."""
    name = target if production is None else production.name
    return None if name is None or name.isdecimal() else find_tuned(host, name)


def limits_beside(host: Host, device: Device, given: Limits, target: str | None, *, way: Way = Way.CAPS) -> Spared:
    """Return the limits of an opportunistic job: those given, else the tuned ones, else cap 60 with low priority.

    With slices, which limit all jobs of the device together, there is neither a cap nor a priority unless it is given.
    """
    production = find_spared(host, device, target)
    for_it = _tuned_for(host, production, target)
    tuned = for_it if for_it is not None and for_it.way == way else None
    living = living_productions(host, device)
    # Limits that the user gave, and slices, need no tuning.
    needs_tuning = tuned is not None or (given.threads_percent is None and way is not Way.SLICES)
    notes = _tuning_notes(host, device, tuned) if needs_tuning else []
    if target is None and len(living) > 1:
        notes.append(
            f"production jobs here: {', '.join(job.name for job in living)}; to use the tuning for one of them: --for NAME"
        )
    memory = _memory_limit(device, given, production, living, for_it, notes)
    if way is Way.SLICES:
        limits = replace(given, memory_limit_bytes=memory)
        return Spared(limits=limits, production=production, tuned=tuned, notes=tuple(notes))
    threads, priority = given.threads_percent, given.priority
    if threads is None:
        threads = SAFE_THREADS_PERCENT if tuned is None else tuned.threads_percent
    if priority is None:
        priority = Priority.LOW if tuned is None or tuned.low_priority else Priority.NORMAL
    limits = Limits(threads_percent=None if threads >= 100 else threads, memory_limit_bytes=memory, priority=priority)
    return Spared(limits=limits, production=production, tuned=tuned, notes=tuple(notes))


def _memory_limit(
    device: Device,
    given: Limits,
    production: JobRecord | None,
    living: Sequence[JobRecord],
    tuned: Tuned | None,
    notes: list[str],
) -> int | None:
    """Return the memory limit: the given one, else what production leaves."""
    memory = given.memory_limit_bytes
    # Another production job on the device needs its memory too. Told by its program: its peak may just have grown.
    program = None if production is None else (production.pid, production.started)
    neighbours = [production, *(job for job in living if (job.pid, job.started) != program)]
    try:
        rest = _memory_beside(device, neighbours, tuned)
    except InUse:
        if memory is None:
            raise
        rest = 0
    if memory is None:
        memory = rest
        if memory is None:
            notes.append("no memory limit: the memory that production needs is unknown; set one with --memory")
    elif rest is not None and memory > rest:
        notes.append(f"--memory {format_bytes(memory)} is more than production's peak leaves: {format_bytes(rest)}")
    return memory


def _tuning_notes(host: Host, device: Device, tuned: Tuned | None) -> list[str]:
    """Return what to say of the tuning: that there is none, or that it was measured elsewhere."""
    if tuned is None:
        return [
            f"no tuning result found; using the default: cap {SAFE_THREADS_PERCENT:g} % with low priority; see: gpushare tune"
        ]
    notes = []
    if tuned.gpu_name != device.gpu.name:
        notes.append(f"tuned on another GPU ({tuned.gpu_name or 'unknown'}); tune it again here")
    elif tuned.driver != host.nvml.driver_version():
        notes.append(f"tuned under driver {tuned.driver or 'unknown'}; tune it again under this one")
    return notes


def _memory_beside(device: Device, production_jobs: Sequence[JobRecord | None], tuned: Tuned | None) -> int | None:
    """Return the bytes that the production jobs leave for another job (None: unknown).

    What they take is the larger of two estimates: their known peaks together, and what `tune` saw.

    Raises:
        InUse: they leave less than 1 MiB.
    """
    total = device.memory_total_bytes
    peaks = [job.memory_peak_bytes for job in production_jobs if job is not None and job.memory_peak_bytes is not None]
    estimates = [sum(peaks)] if peaks else []
    if tuned is not None and tuned.production_memory_bytes is not None:
        estimates.append(tuned.production_memory_bytes)
    if total is None or not estimates:
        return None
    rest = total - (device.gpu.memory_reserved_bytes or 0) - max(estimates) - _MARGIN_BYTES
    if rest < MIB:
        raise InUse(
            f"production takes {format_bytes(max(estimates))} of the {format_bytes(total)} of {device.title}:"
            " nothing is left for another job",
            "run it on another GPU: -g",
            gpu=device.gpu.index,
            code="memory_does_not_fit",
        )
    return rest // MIB * MIB


NOT_PROTECTED: Final = "not protected: under MPS, a GPU fault of either job ends both; memory bandwidth is shared at any cap; a cap reserves nothing"


TICK_SECONDS: Final = 0.01
_ALIVE_SECONDS: Final = 1.0
_FIRST_SECONDS: Final = 0.1


@dataclass
class PauseForProduction(Part):
    """Pauses the program while a production job works."""

    host: Host
    production: ProductionJob
    # Outside MPS: try its channels first; ``say`` is called with the reason when another way has to be taken.
    by_channels: bool = False
    say: Callable[[str], None] = lambda _text: None
    pacer: Pacer = field(default_factory=Pacer)
    pauses: int = 0
    pauser: Pauser | None = None
    _watch: Watch | None = None
    _noted: Pauses | None = None
    due: float = 0.0
    _find_due: float = 0.0
    _released: bool = False
    _alive: bool = True
    _alive_due: float = 0.0

    @property
    def where(self) -> str:
        """Return what it adds to the place of the program."""
        return f", paused while {self.production.title} works"

    def started(self, watch: Watch) -> None:
        """Begin: find out how the program can be paused."""
        self._watch, pid = watch, watch.program_pid
        # It needs no GPU to begin.
        self.due = time.monotonic() + _FIRST_SECONDS
        if self.pauser is None:
            channels = ChannelPauser(self.host, pid) if self.by_channels else None
            self.pauser = Pauser(self.host, watch.gpus, pid, channels)
        self.pauser.say, self.pauser.tell = self.say, watch.tell

    def poll(self) -> bool:
        """Pause or resume the program, and from time to time look for its processes."""
        at = time.monotonic()
        self.due = at + TICK_SECONDS
        watch, pauser = self._watch, self.pauser
        if watch is None or pauser is None:
            return False
        if not self._released:
            self._pause_or_resume(pauser, at)
        if at >= self._find_due:
            pauser.find_processes()
            self._find_due = time.monotonic() + watch.wait()
        self._note_pauses(watch, pauser)
        return False

    def _pause_or_resume(self, pauser: Pauser, at: float) -> None:
        """Pause the program if production works, and let it continue once production rests or has ended."""
        if at >= self._alive_due:
            # Its PID may have been reused by a busy process, or the job may have been started again.
            self._alive, self._alive_due = self.production.lives(), at + _ALIVE_SECONDS
        active = self._alive and self.production.active()
        if not active and pauser.paused and not self.production.lives():
            pauser.resume()
            return
        if self.pacer.may_run(at, active=active):
            pauser.resume()
            return
        before = pauser.paused
        pauser.pause()
        self.pauses += pauser.paused and not before

    def _note_pauses(self, watch: Watch, pauser: Pauser) -> None:
        """Write the pauses down, for the metrics, on each change."""
        if self._noted is None:
            process = self.host.processes.identity(watch.program_pid) or Identity(watch.program_pid, 0)
            state = Pauses(**process._asdict(), gpu_uuid=watch.device.gpu.uuid or "")
        else:
            state = self._noted
        state = replace(state, pauses=self.pauses, paused=pauser.paused)
        if state != self._noted:
            self._noted = state
            note_pauses(self.host, state)

    def release(self) -> Mapping[int, int]:
        """Let the program continue for good: it is about to end, and must be able to."""
        self._released = True
        if self.pauser is not None:
            self.pauser.resume()
        return {}

    def settle(self) -> None:
        """Continue what the program left behind."""
        # Such as a worker in its own session: it must not stay paused when gpushare ends.
        self.release()
        if self.pauser is not None:
            self.pauser.close()
        if self._noted is not None:
            PROGRAMS.drop(self.host, self._noted.pid)
