"""The two roles of `gpushare run`: a production job, known by name, and an opportunistic one that takes what is left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from gpushare.errors import BadUsage, GpushareError, InUse, NotFound
from gpushare.host.identity import Identity
from gpushare.model import Priority
from gpushare.mps.control import MpsControl, is_server
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import without_own_limits
from gpushare.mps.limits import Limits
from gpushare.run.end import CONVERSATION_SECONDS, client_pids
from gpushare.run.jobs import JobRecord, check_job_name, find_record, is_running, productions, records
from gpushare.run.pause import ChannelPauser, Pacer, Pauser, Pauses, forget_pauses, note_pauses
from gpushare.run.production import UnseenWork
from gpushare.run.results import CAPS, SLICES, Tuned, find_tuned
from gpushare.run.share import MpsShare
from gpushare.units import MIB, format_bytes, pid_of, quoted
from gpushare.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpushare.host.activity import ActivityRecorder
    from gpushare.host.checkpoint import Checkpoint
    from gpushare.host.host import Host
    from gpushare.model import Gpu
    from gpushare.run.production import ProductionJob
    from gpushare.run.share import Share, Watch
    from gpushare.selection import Device


# Next to four different production jobs on an H200, this cap ended the harm wherever any cap did.
SAFE_THREADS_PERCENT: Final = 60.0
# The memory of a context itself, and what the driver keeps.
_MARGIN_BYTES: Final = 1024 * MIB


@dataclass
class ProductionShare(MpsShare):
    """A share of a production job."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a client whose only limits are those that were given with it."""
        return super().environment(without_own_limits(base))

    def daemon_cap(self) -> float | None:
        """Return the thread cap that the daemon itself puts on every client, or None."""
        try:
            record = own_daemon(self.host, self.device)[0].read()
        except NotFound:
            return None
        cap = None if record is None else record.limits.threads_percent
        return cap if cap is not None and cap < 100 else None


@dataclass(frozen=True, kw_only=True)
class SparedProcess:
    """A production job that runs now: its program, and whether it is a client of the device's MPS daemon."""

    pid: int
    started: int
    title: str
    under_mps: bool
    # None: it was given by PID.
    name: str | None = None


def spared_process(host: Host, device: Device, target: str | None) -> SparedProcess | None:
    """Return the running production job of this name or PID, or the only one on the device; None: none runs."""
    number = None if target is None else pid_of(target)
    if target is not None and number is not None:
        process = host.processes.identity(number) if number else None
        if process is None:
            raise NotFound(
                f"there is no process {target[:20]}", "see what is running: gpushare status", code="no_process"
            )
        (pid, started), title, name = process, f"process {target}", None
    else:
        production = find_spared(host, device, target)
        if production is None or not is_running(host, production):
            return None
        if production.device_uuid != device.uuid:
            raise BadUsage(
                f"'{production.name}' runs on another device, {production.device_uuid}, not on {device.title}",
                f"run this job there: -g {production.device_uuid}; or drop --for",
                code="other_device",
            )
        name = production.name
        pid, started, title = production.pid, production.started, f"'{name}'"
    return SparedProcess(pid=pid, started=started, title=title, name=name, under_mps=is_under_mps(host, device, pid))


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
    try:
        on_gpu = {one.pid for one in host.nvml.processes(device.gpu.index) or ()}
    except GpushareError:
        on_gpu = set()
    # It has no context yet: where its variables lead, it will go.
    return not on_gpu & family and environment.get("CUDA_MPS_PIPE_DIRECTORY") == str(home.pipe)


@dataclass(frozen=True, kw_only=True)
class Spared:
    """How to run an opportunistic job: its limits, the production job next to it, and notes to print."""

    limits: Limits
    production: JobRecord | None
    tuned: Tuned | None
    notes: Sequence[str] = field(default=())


def living_productions(host: Host, device: Device) -> list[JobRecord]:
    """Return the production jobs that run on a device now."""
    return [one for one in productions(host) if one.device_uuid == device.uuid and is_running(host, one)]


def place_of_production(host: Host, gpus: Sequence[Gpu], target: str) -> str | None:
    """Return the UUID of the device on which the job of this name or PID runs; None: none is known to."""
    there = {gpu.uuid for gpu in gpus} | {one.uuid for gpu in gpus for one in gpu.mig_instances}
    known = (one for one in records(host) if target in {one.name, str(one.pid)} and one.device_uuid in there)
    return next((one.device_uuid for one in known if is_running(host, one)), None)


def find_spared(host: Host, device: Device, target: str | None) -> JobRecord | None:
    """Return the production job to spare: of this name or PID, or the only one that runs on the device."""
    if target is None:
        living = living_productions(host, device)
        return living[0] if len(living) == 1 else None
    pid = pid_of(target)
    if pid is not None:
        # Any other process: there is no record of it.
        here = (one for one in records(host) if one.pid == pid and one.device_uuid == device.uuid)
        return next((one for one in here if is_running(host, one)), None)
    found = find_record(host, check_job_name(target))
    if found is None and find_tuned(host, target) is None:
        raise NotFound(
            f"no job {quoted(target)} is known, running or tuned",
            f"start it: gpushare run --production {target} -- CMD; or tune it: gpushare tune --name {target} ...",
            code="no_production",
        )
    return found


def tuned_next_to(host: Host, device: Device, target: str | None) -> Tuned | None:
    """Return the tuning for the production job of this name or PID, or for the only one that runs on the device."""
    return _tuned_for(host, find_spared(host, device, target), target)


def _tuned_for(host: Host, production: JobRecord | None, target: str | None) -> Tuned | None:
    name = target if production is None else production.name
    return None if name is None or name.isdecimal() else find_tuned(host, name)


def spare(host: Host, device: Device, given: Limits, target: str | None, *, way: str = CAPS) -> Spared:
    """Return the limits of an opportunistic job: those given, else the tuned ones, else cap 60 with low priority.

    With slices, which limit all jobs of the device together, there is neither a cap nor a priority unless it is given.
    """
    production = find_spared(host, device, target)
    found = _tuned_for(host, production, target)
    tuned = found if found is not None and found.way == way else None
    living = living_productions(host, device)
    told = tuned is None and (given.threads_percent is not None or way == SLICES)
    notes = [] if told else _where_it_was_tuned(host, device, tuned)
    if target is None and len(living) > 1:
        notes.append(
            f"production jobs here: {', '.join(one.name for one in living)}; to use the tuning for one of them: --for NAME"
        )
    if way == SLICES:
        memory = _memory(device, given, production, living, found, notes)
        return Spared(
            limits=replace(given, memory_limit_bytes=memory), production=production, tuned=tuned, notes=tuple(notes)
        )
    threads, priority = given.threads_percent, given.priority
    if threads is None:
        threads = SAFE_THREADS_PERCENT if tuned is None else tuned.threads_percent
    if priority is None:
        priority = Priority.LOW if tuned is None or tuned.low_priority else Priority.NORMAL
    memory = _memory(device, given, production, living, found, notes)
    limits = Limits(threads_percent=None if threads >= 100 else threads, memory_limit_bytes=memory, priority=priority)
    return Spared(limits=limits, production=production, tuned=tuned, notes=tuple(notes))


def _memory(
    device: Device,
    given: Limits,
    production: JobRecord | None,
    living: Sequence[JobRecord],
    tuned: Tuned | None,
    notes: list[str],
) -> int | None:
    """Return the memory limit: the given one, else what production leaves."""
    memory = given.memory_limit_bytes
    # Another production job on the device needs its memory too.
    try:
        left = _memory_left(device, [production, *(one for one in living if one != production)], tuned)
    except InUse:
        if memory is None:
            raise
        left = 0
    if memory is None:
        memory = left
        if memory is None:
            notes.append("no memory limit: the memory that production needs is unknown; set one with --memory")
    elif left is not None and memory > left:
        notes.append(f"--memory {format_bytes(memory)} is more than production's peak leaves: {format_bytes(left)}")
    return memory


def _where_it_was_tuned(host: Host, device: Device, tuned: Tuned | None) -> list[str]:
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


def _memory_left(device: Device, neighbours: Sequence[JobRecord | None], tuned: Tuned | None) -> int | None:
    total = device.memory_total_bytes
    known = [one.memory_peak_bytes for one in neighbours if one is not None and one.memory_peak_bytes is not None]
    peaks = [sum(known)] if known else []
    if tuned is not None and tuned.production_memory_bytes is not None:
        peaks.append(tuned.production_memory_bytes)
    if total is None or not peaks:
        return None
    left = total - (device.gpu.memory_reserved_bytes or 0) - max(peaks) - _MARGIN_BYTES
    if left < MIB:
        raise InUse(
            f"production takes {format_bytes(max(peaks))} of the {format_bytes(total)} of {device.title}:"
            " nothing is left for another job",
            "run it on another GPU: -g",
            gpu=str(device.gpu.index),
            code="memory_does_not_fit",
        )
    return left // MIB * MIB


NOT_PROTECTED: Final = "not protected: under MPS, a GPU fault of either job ends both; memory bandwidth is shared at any cap; a cap reserves nothing"


TICK_SECONDS: Final = 0.01
_ALIVE_SECONDS: Final = 1.0


@dataclass
class PausingWatch:
    """The watch over an opportunistic program, as `Watch`: it also pauses it while production works."""

    inner: Watch
    pauser: Pauser
    production: ProductionJob
    pacer: Pacer = field(default_factory=Pacer)
    unseen: UnseenWork | None = None
    pauses: int = 0
    # Called with the number of pauses and whether it is paused now, on each change; None: it has ended.
    tell: Callable[[tuple[int, bool] | None], None] | None = None
    _told: tuple[int, bool] | None = None
    _due: float = 0.0
    _released: bool = False
    _alive: bool = True
    _alive_due: float = 0.0

    def __getattr__(self, name: str) -> Any:
        # All else is as in the inner watch.
        return getattr(self.inner, name)

    def wait(self) -> float:
        """Return how many seconds may pass until the next look."""
        return TICK_SECONDS

    def look(self) -> None:
        """Pause or resume the program, and from time to time look for its processes."""
        if not self._released:
            self._pace()
        if time.monotonic() >= self._due:
            self.inner.look()
            self.pauser.look()
            self._due = time.monotonic() + self.inner.wait()

        self._say((self.pauses, self.pauser.paused))

    def _say(self, state: tuple[int, bool] | None) -> None:
        if self.tell is not None and state != self._told:
            self._told = state
            self.tell(state)

    def _pace(self) -> None:
        at = time.monotonic()
        if at >= self._alive_due:
            # Its PID may have been reused by a busy process, or the job may have been started again.
            self._alive, self._alive_due = self.production.lives(), at + _ALIVE_SECONDS
        active = self._alive and self.production.active()
        if self._alive and self.unseen is not None:
            active = self.unseen.works(at, seen=active, still=self.pauser.paused or not self.inner.attached)
        if not active and self.pauser.paused and not self.production.lives():
            self.pauser.resume()
            return
        if self.pacer.may_run(at, active=active):
            self.pauser.resume()
            return
        before = self.pauser.paused
        self.pauser.pause()
        self.pauses += self.pauser.paused and not before

    def before_pause(self, tell: Callable[[int, int | None], None]) -> None:
        """Let ``tell`` know each process before it is stopped."""
        self.pauser.tell = tell

    def release(self) -> None:
        """Let the program continue for good: it is about to end, and must be able to."""
        self._released = True
        self.pauser.resume()

    def settle(self) -> None:
        """Continue what the program left behind, and let the inner watch settle."""
        # Such as a worker in its own session: it must not stay paused when gpushare ends.
        self.release()
        self.pauser.close()
        self.inner.settle()
        self._say(None)


@dataclass
class PausingShare:
    """A share whose program is paused while a production job works."""

    inner: Share
    host: Host
    production: ProductionJob
    checkpoint: Checkpoint | None
    # Under MPS, where the driver reports SM activity between two readings (GPM, Hopper and later).
    recorder: ActivityRecorder | None = None
    # The production job, for people.
    title: str = "production"
    # Outside MPS: try its channels first; ``say`` is called with the reason when another way has to be taken.
    by_channels: bool = False
    say: Callable[[str], None] = lambda _text: None

    @property
    def where(self) -> str:
        """Return where and when a program runs in it."""
        return f"{self.inner.where}, paused while {self.title} works"

    def __getattr__(self, name: str) -> Any:
        # All else is as in the inner share.
        return getattr(self.inner, name)

    def watch(self, pid: int) -> Watch:
        """Return the watch over the program."""
        channels = ChannelPauser(self.host, pid) if self.by_channels else None
        pauser = Pauser(self.host, self.device, pid, self.checkpoint, channels)
        pauser.say = self.say
        watch = PausingWatch(
            self.inner.watch(pid),
            pauser,
            self.production,
            Pacer(),
            unseen=self._unseen(pid),
            tell=self._teller(pid),
        )
        # The other attributes are the inner watch's.
        return cast("Watch", watch)

    def _unseen(self, pid: int) -> UnseenWork | None:
        """Return what detects work under MPS that the CPU does not show; None where nothing can."""
        if self.recorder is None:
            return None
        return UnseenWork(self.recorder.since_last, lambda: self._alone(pid))

    def _alone(self, pid: int) -> bool:
        """Return whether only production, the program with this PID and MPS servers are on the device."""
        processes = self.host.processes
        if processes.namespace_is_host() is False:
            return False
        try:
            found = self.host.nvml.processes(self.device.gpu.index)
        except GpushareError:
            return False
        known = {*processes.descendants(pid), *processes.descendants(self.production.pid)}
        mig = self.device.mig
        instances = {None, None if mig is None else mig.gpu_instance_id}
        others = [
            one.pid for one in found or () if one.pid not in known and (mig is None or one.gpu_instance_id in instances)
        ]
        infos = [processes.describe(other) for other in others]
        return found is not None and all(info is None or is_server(info.name) for info in infos)

    def _teller(self, pid: int) -> Callable[[tuple[int, bool] | None], None]:
        """Return what writes the pauses of a program down, for the metrics."""
        process = self.host.processes.identity(pid) or Identity(pid, 0)
        first = Pauses(**process._asdict(), gpu_uuid=self.device.gpu.uuid or "")

        def tell(state: tuple[int, bool] | None) -> None:
            if state is None:
                forget_pauses(self.host, pid)
            else:
                note_pauses(self.host, replace(first, pauses=state[0], paused=state[1]))

        return tell
