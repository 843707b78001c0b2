"""`gpushare farm`: many copies of one program under MPS, each with its share, its number and its log.

Each copy is a job in the ledger of memory: its limit is reserved while it runs, and what other jobs have reserved is not free.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from gpushare.errors import BadUsage, GpushareError, InUse, OperationFailed
from gpushare.memory.ledger import Lapses, Line, Place, Request, line_of, not_around, reservations
from gpushare.memory.limit import JobMemory, MemoryAction
from gpushare.memory.room import check_limit
from gpushare.mps.limits import CONTEXT_BYTES, Limits
from gpushare.plan import Step
from gpushare.run.end import GRACE_SECONDS
from gpushare.run.program import command_line, step_of_run
from gpushare.run.several import Log, Program, Several, directory_of_logs, peak_memory
from gpushare.run.share import MpsShare, open_mps_share
from gpushare.signals import Wakeups
from gpushare.units import MIB, format_bytes
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.model import GpuProcess
    from gpushare.selection import Device


# Left free as a margin, against fragmentation for example.
_MARGIN: Final = 0.02


def share_of_threads(copies: int) -> float | None:
    """Return the thread cap of each of N copies, 200/N percent; None (no cap) for one or two."""
    return None if copies <= 2 else max(0.1, round(200.0 / copies, 1))


@dataclass(frozen=True, kw_only=True)
class Free:
    """What copies can have on a device: bytes that nobody holds, and that no other job has reserved.

    ``line`` is the ledger without the copies. ``allowed_bytes``: what this user may still reserve (None: no limit).
    ``inside``: gpushare itself runs in a job that has reserved memory here, which is the copies' memory. ``pending``: some is
    reserved by jobs that have nothing here yet, and may lapse.
    """

    memory_bytes: int
    line: Line
    # Of what nobody holds.
    reserved_bytes: int = 0
    allowed_bytes: int | None = None
    inside: bool = False
    pending: bool = False

    def allows(self, copies: int, options: FarmOptions) -> bool:
        """Return whether this user may reserve another copy next to some."""
        return self.allowed_bytes is None or (copies + 1) * (options.reserved_bytes or 0) <= self.allowed_bytes


def free_memory(
    host: Host,
    device: Device,
    user_limits: Mapping[int, int] | None = None,
    own: Collection[str] = (),
    lapses: Lapses | None = None,
) -> Free | None:
    """Return what copies can have on a device now (nvmlDeviceGetMemoryInfo_v2, the ledger); None when it is not known.

    ``own`` are the reservations of copies that run: what they hold is not free, what they may still allocate is. ``lapses``
    is what earlier looks have seen of the others.
    """
    gpu = host.nvml.gpu(device.gpu.index)
    mig = None if device.mig is None else next((one for one in gpu.mig_instances if one.uuid == device.uuid), None)
    if device.mig is not None and mig is None:
        return None
    total, used = (
        (gpu.memory_total_bytes, gpu.memory_used_bytes)
        if mig is None
        else (mig.memory_total_bytes, mig.memory_used_bytes)
    )
    if total is None or used is None:
        return None
    free = total - used - ((gpu.memory_reserved_bytes or 0) if mig is None else 0)
    found = [one for one in reservations(host) or () if one.key == device.uuid and one.id not in own]
    others = not_around(host, found)
    inside = len(others) < len(found)
    now, lapses = replace(device, gpu=gpu, mig=mig), lapses or Lapses()
    lapsed = lapses.look(host, others, [now])
    line = line_of(host, now, others, limits=user_limits, lapsed=lapsed)
    if line is None:
        return None
    limit = None if inside else (user_limits or {}).get(os.geteuid())
    return Free(
        memory_bytes=min(free, line.free_bytes) if others else free,
        line=line,
        reserved_bytes=max(0, free - line.free_bytes) if others else 0,
        allowed_bytes=None if limit is None else max(0, limit - line.granted.get(os.geteuid(), 0)),
        inside=inside,
        pending=lapses.pending(line),
    )


def share_of_memory(
    host: Host, device: Device, copies: int, user_limits: Mapping[int, int] | None = None
) -> int | None:
    """Return the memory limit of each of N copies: its share of what is free now; None when that is not known."""
    free = free_memory(host, device, user_limits)
    if free is None:
        return None
    share = int(free.memory_bytes * (1 - _MARGIN) / copies) - CONTEXT_BYTES
    if free.allowed_bytes is not None:
        share = min(share, free.allowed_bytes // copies)
    if share < MIB:
        raise no_room(device, free, copies, None)
    return share // MIB * MIB


def check_room(host: Host, device: Device, options: FarmOptions) -> int | None:
    """Return how many copies fit into the memory that is free now; None when that is not known.

    0: some is reserved by jobs that have nothing there yet; what they do not use lapses.

    Raises:
        InUse: none fits (code ``memory_does_not_fit``).
        NoPermission: a copy is more than this user may reserve (code ``over_user_limit``).
    """
    if options.reserved_bytes is None:
        return None
    free = free_memory(host, device, options.user_limits)
    if free is None:
        return None
    fitting = max(0, free.memory_bytes) // options.needed_bytes
    if free.allowed_bytes is not None and options.user_limits is not None:
        request = Request(memory_bytes=options.reserved_bytes, keys=(device.uuid,), client=True)
        check_limit([free.line], request, options.user_limits.get(os.geteuid()))
        fitting = min(fitting, free.allowed_bytes // options.reserved_bytes)
    if fitting < 1 and not free.pending:
        raise no_room(device, free, 1, options)
    return min(options.copies, fitting)


def no_room(device: Device, free: Free, copies: int, options: FarmOptions | None) -> GpushareError:
    """Return the error for copies that do not fit into the free memory; ``options`` None: they have no limit yet."""
    if options is None or options.reserved_bytes is None:
        wanted = f"{copies} copies and their CUDA contexts do" if copies > 1 else "a copy and its CUDA context do"
    elif options.job_bytes is not None:
        wanted = f"a copy with {format_bytes(options.job_bytes)} does"
    else:
        wanted = f"a copy with a limit of {format_bytes(options.reserved_bytes)} and its CUDA context do"
    there = f"{format_bytes(max(0, free.memory_bytes))} free on {device.title}"
    allowed = free.allowed_bytes
    if allowed is not None and (allowed < free.memory_bytes if options is None else not free.allows(0, options)):
        there = f"{format_bytes(allowed)} that you may still reserve on {device.title}"
    elif free.reserved_bytes:
        there += f" ({format_bytes(free.reserved_bytes)} more are reserved by other jobs)"
    return InUse(
        f"{wanted} not fit into the {there}",
        "see what holds it: gpushare status; or give fewer --copies, or a smaller --memory",
        gpu=str(device.gpu.index),
        code="memory_does_not_fit",
    )


_OF_A_RESTART: Final = re.compile(r"copy-(\d+)\.\d+\.log", re.ASCII)


def log_of(directory: Path, number: int, restarts: int) -> Path:
    """Return the path of a copy's log after N restarts."""
    return directory / f"copy-{number}{f'.{restarts}' if restarts else ''}.log"


def remove_earlier_logs(directory: int, copies: int) -> None:
    """Remove the logs of restarts left by an earlier farm; a copy's first log is overwritten anyway."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            match = _OF_A_RESTART.fullmatch(name)
            if match is not None and int(match[1]) < copies:
                # A log that cannot be removed, or a directory of that name, does no harm.
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=directory)


def hint_on_space(directory: Path | None) -> str:
    """Return what to do when no space was left for what a copy prints; None: the output was not kept."""
    where = tempfile.gettempdir() if directory is None else directory.absolute()
    return f"free space in {where}, or keep what copies print elsewhere: --logs DIR"


_STEP_SECONDS: Final = 0.02
_LOOKS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# An MPS server frees a client's memory a while after the client has ended.
_ROOM_SECONDS: Final = 10.0
# How often to look for room while copies wait for it.
_ROOM_LOOK_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class FarmOptions:
    """How many copies, the limits of each, how often a failed one is started again, and where logs are kept.

    ``stall_seconds`` is how long a copy may print nothing before it counts as hung; None: for ever.
    ``at_once`` bounds how many run at the same time (None: all). ``job_bytes`` is the limit of all processes of a copy
    together, and ``action`` what happens to a copy above it. ``user_limits`` are what users may reserve, by uid.
    """

    copies: int
    limits: Limits = field(default_factory=Limits)
    restarts: int = 0
    logs: Path | None = None
    grace_seconds: float = GRACE_SECONDS
    stall_seconds: float | None = None
    at_once: int | None = None
    job_bytes: int | None = None
    action: MemoryAction = "end"
    user_limits: Mapping[int, int] | None = None
    name: str | None = None

    @property
    def reserved_bytes(self) -> int | None:
        """Return what each copy reserves; None: no size is known."""
        return self.limits.memory_limit_bytes if self.job_bytes is None else self.job_bytes

    @property
    def needed_bytes(self) -> int:
        """Return what each copy may have on the device, with its CUDA context."""
        return self.job_bytes or (self.limits.memory_limit_bytes or 0) + CONTEXT_BYTES


@dataclass(kw_only=True)
class Copy:
    """One copy so far. ``failure`` is of its last try; ``tries`` counts the starts."""

    number: int
    state: str = "waiting"
    tries: int = 0
    pid: int | None = None
    exit_code: int | None = None
    failure: str | None = None
    seconds: float = 0.0
    log: str | None = None
    # What to do about the failure, where its output does not say.
    hint: str | None = None
    # Why gpushare has ended it: ``memory_limit``, or None.
    reason: str | None = None
    # Processes left running by any of its tries; they were ended.
    left_behind: tuple[int, ...] = ()
    # Seen among the daemon's clients; None: never checked.
    attached: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FarmResult:
    """How all copies did, and the signal by which the user ended them."""

    copies: tuple[Copy, ...]
    seconds: float
    ended_by: int | None = None

    @property
    def failed(self) -> tuple[Copy, ...]:
        """Return the copies that failed."""
        return tuple(copy for copy in self.copies if copy.failure is not None)


class FarmReporter(Protocol):
    """What a farm reports while it runs; the command line prints it."""

    def line(self, copy: int, text: str) -> None:
        """A copy has printed a line."""

    def started(self, copy: Copy) -> None:
        """A copy was started."""

    def ended(self, copy: Copy, *, again: bool) -> None:
        """A copy has ended; ``again``: it will be started once more."""

    def left_behind(self, copy: Copy, pids: Sequence[int]) -> None:
        """A copy's program has ended and left processes running, which were ended."""

    def news(self, copy: Copy, text: str) -> None:
        """Something else to report of a copy."""

    def progress(self, copies: Sequence[Copy], seconds: float) -> None:
        """How far it is; called often."""


def numbered(command: Sequence[str], number: int) -> list[str]:
    """Return a command with its copy's number in place of every ``{}``."""
    return [word.replace("{}", str(number)) for word in command]


def farm(
    host: Host, device: Device, command: Sequence[str], options: FarmOptions, reporter: FarmReporter
) -> FarmResult:
    """Run copies of a command until all have ended; a failed copy leaves the others alone."""
    if options.copies < 1:
        raise BadUsage("there are no copies to run", "give --copies 1 or more", code="bad_copies")
    check_room(host, device, options)
    with contextlib.ExitStack() as before, contextlib.ExitStack() as held:
        logs = None if options.logs is None else held.enter_context(directory_of_logs(options.logs))
        program = numbered(command, 0)[0]
        share = open_mps_share(host, device, program, options.limits)
        several = held.enter_context(Several(host, share, grace_seconds=options.grace_seconds))
        if logs is not None:
            remove_earlier_logs(logs, options.copies)
        copies = _Farm(host, device, command, options, reporter, several, logs)
        # Before the share is given back, but after the copies have ended: else their memory would look free.
        before.callback(copies.close)
        return copies.run()


def plan_farm(
    host: Host, device: Device, command: Sequence[str], options: FarmOptions, reporter: FarmReporter
) -> tuple[Step, ...]:
    """Return the steps of a farm on the host as it is now: an MPS daemon where there is none, then the copies."""
    check_room(host, device, options)
    share = MpsShare(host, device, options.limits)
    share.check(numbered(command, 0)[0])
    planned = _Farm(host, device, command, options, reporter, Several(host, share), None)
    environment = share.environment({})
    return (*planned.before(), *share.steps(), *planned.steps(share.where, environment), *planned.meanwhile())


class _Farm:
    def __init__(
        self,
        host: Host,
        device: Device,
        command: Sequence[str],
        options: FarmOptions,
        reporter: FarmReporter,
        several: Several,
        logs: int | None,
    ) -> None:
        self._logs = logs
        self._host, self._device, self._command = host, device, command
        self._options, self._reporter, self._several = options, reporter, several
        self._copies = [Copy(number=number) for number in range(options.copies)]
        self._running: dict[int, Program] = {}
        # What watches the memory of each copy that runs, and has its place in the ledger.
        self._memories: dict[int, JobMemory] = {}
        self._places: dict[int, Place] = {}
        self._full_since: float | None = None
        # Whether gpushare itself runs in a job that has reserved memory on the device.
        self._inside = False
        self._lapses = Lapses()
        self._next_look, self._ran = 0.0, 0
        self._listed: tuple[GpuProcess, ...] | None = None
        self._listed_at = -1.0
        # Copies above their limit that cannot be ended.
        self._stuck: set[int] = set()
        self._started = time.monotonic()
        self._looks: list[float] = []
        self._signals = Wakeups()

    def run(self) -> FarmResult:
        with self._signals:
            while True:
                if self._may_fit():
                    self._start_what_fits()
                self._watch_memory()
                self._collect()
                self._prove()
                self._reporter.progress(self._copies, time.monotonic() - self._started)
                if self._signals.first is None:
                    if not self._running and not any(copy.state == "waiting" for copy in self._copies):
                        break
                    self._signals.came(_STEP_SECONDS)
                if self._signals.first is not None:
                    self._interrupt()
                    break
        seconds = time.monotonic() - self._started
        return FarmResult(copies=tuple(self._copies), seconds=seconds, ended_by=self._signals.first)

    def close(self) -> None:
        """Leave the ledger with all copies."""
        for number in list(self._memories):
            self._leave(number)

    # -- starting ------------------------------------------------------------------------------------

    def _may_fit(self) -> bool:
        """Return whether to look for room: now and then, and whenever the number of copies that run has changed."""
        now, running = time.monotonic(), len(self._running)
        if now < self._next_look and running == self._ran:
            return False
        self._next_look, self._ran = now + _ROOM_LOOK_SECONDS, running
        return True

    def _start_what_fits(self) -> None:
        for copy in self._copies:
            if copy.state != "waiting":
                continue
            if not self._fits():
                return
            try:
                self._reserve(copy)
                # Another job may have reserved the same memory meanwhile. Both have written before they read again.
                if copy.number in self._places and not self._fits():
                    self._leave(copy.number)
                    return
                self._full_since = None
                self._start(copy)
            except GpushareError as error:
                self._leave(copy.number)
                self._cannot_start(copy, error)

    def _reserve(self, copy: Copy) -> None:
        """Reserve the memory of a copy that is about to start.

        Raises:
            GpushareError: the ledger cannot be written, and MPS alone does not hold the limit.
        """
        options, size = self._options, self._options.reserved_bytes
        if size is None:
            return
        place = None
        if not self._inside:
            request = Request(memory_bytes=size, keys=(self._device.uuid,), client=True, name=options.name)
            try:
                place = Place(self._host, request)
                place.take(self._device.uuid)
            except GpushareError:
                if place is not None:
                    place.leave()
                if options.job_bytes is not None:
                    raise
                place = None
        if place is not None:
            self._places[copy.number] = place
        self._memories[copy.number] = JobMemory(
            self._host,
            self._device,
            limit_bytes=options.job_bytes,
            action=options.action,
            place=place,
            say=functools.partial(self._reporter.news, copy),
            listed=self._processes,
        )

    def _leave(self, number: int) -> None:
        self._places.pop(number, None)
        memory = self._memories.pop(number, None)
        if memory is not None:
            memory.close()

    def _cannot_start(self, copy: Copy, error: GpushareError) -> None:
        copy.state, copy.failure, copy.hint, copy.log = "failed", error.message, error.hint, None
        self._reporter.ended(copy, again=False)

    def _fits(self) -> bool:
        options = self._options
        if options.at_once is not None and len(self._running) >= options.at_once:
            return False
        own = {place.claim.path.name for place in self._places.values()}
        free = None
        if options.reserved_bytes is not None:
            free = free_memory(self._host, self._device, options.user_limits, own, self._lapses)
        if free is None:
            return True
        self._inside = free.inside
        # Memory that a running copy may still allocate is not free.
        left = free.memory_bytes
        for program in self._running.values():
            left -= max(0, options.needed_bytes - (peak_memory(self._host, self._device, program) or 0))
        if left >= options.needed_bytes and free.allows(len(self._running), options):
            return True
        if free.pending:
            self._full_since = None
        elif not self._running:
            self._wait_for_room(no_room(self._device, free, 1, options))
        return False

    def _wait_for_room(self, error: GpushareError) -> None:
        """Give up the waiting copies when none of ours will make room; those that ended keep their results."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        if now - self._full_since >= _ROOM_SECONDS:
            for copy in self._copies:
                if copy.state == "waiting":
                    self._cannot_start(copy, error)

    def before(self) -> list[Step]:
        """Return what is reserved for the copies."""
        size = self._options.reserved_bytes
        free = None if size is None else free_memory(self._host, self._device, self._options.user_limits)
        if size is None or (free is not None and free.inside):
            return []
        return [step_of_run(f"reserve {format_bytes(size)} on {self._device.title} for each copy while it runs")]

    def meanwhile(self) -> list[Step]:
        """Return what is done while the copies run."""
        limit = self._options.job_bytes
        if limit is None:
            return []
        action = {"end": "end", "warn": "warn of", "pause": "stop (SIGSTOP)"}[self._options.action]
        return [
            step_of_run(
                f"{action} each copy whose processes together hold more than {format_bytes(limit)} (added up five times a second)"
            )
        ]

    def steps(self, where: str, environment: Mapping[str, str]) -> list[Step]:
        """Return the start of each copy."""
        return [
            Step(
                what=f"run copy {copy.number} {where}",
                command=command_line({**environment, **self._variables(copy)}, numbered(self._command, copy.number)),
                do=functools.partial(self._start, copy),
            )
            for copy in self._copies
        ]

    def _variables(self, copy: Copy) -> dict[str, str]:
        return {"GPUSHARE_COPY": str(copy.number), "GPUSHARE_COPIES": str(self._options.copies)}

    def _start(self, copy: Copy) -> None:
        number = copy.number
        memory = self._memories.get(number)
        if not self._looks:
            self._looks = [time.monotonic() + seconds for seconds in _LOOKS]

        def listen(line: str, _at: float) -> None:
            self._reporter.line(number, line)

        log = None if self._options.logs is None else log_of(self._options.logs, number, copy.tries)
        copy.tries += 1
        copy.failure, copy.hint, copy.reason, copy.exit_code, copy.attached = None, None, None, None, None
        copy.log = None if log is None else str(log)
        program = self._several.start(
            f"copy {number}",
            numbered(self._command, number),
            self._options.limits,
            variables={**self._variables(copy), **(memory.variables if memory is not None else {})},
            listen=listen,
            log=None if log is None or self._logs is None else Log(log, self._logs),
        )
        copy.pid, copy.state = program.pid, "running"
        self._running[number] = program
        if memory is not None:
            memory.started(program.pid)
        self._reporter.started(copy)

    # -- memory --------------------------------------------------------------------------------------

    def _watch_memory(self) -> None:
        """Hold each copy to its limit: end those that are above it together, the safe way."""
        over = self._over_limit()
        if not over:
            return
        strays = [pid for number in over for pid in self._memories[number].release()]
        try:
            self._several.end([self._running[number] for number in over], hurry=self._hurried, strays=strays)
        except GpushareError as error:
            for number in over:
                if self._running[number].runs:
                    self._stuck.add(number)
                    self._reporter.news(self._copies[number], f"it cannot be ended: {error.message}; {error.hint}")

    def _hurried(self) -> bool:
        """Look at the memory of the other copies while some end; return whether the user is in a hurry."""
        self._over_limit()
        grow = any(one.grows() for number, one in self._memories.items() if number in self._running)
        return self._signals.came() or grow

    def _over_limit(self) -> list[int]:
        """Add up the memory of all copies that run, in one look; return those that are to be ended."""
        if self._options.job_bytes is None:
            return []
        here = {number: self._memories[number] for number, one in self._running.items() if one.runs}
        watched = [one for one in here.values() if one.over is None]
        if any(one.seconds <= 0 for one in watched):
            for one in watched:
                one.look()
        return [number for number, one in here.items() if one.over is not None and number not in self._stuck]

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes on the GPU, read once for all copies."""
        now = time.monotonic()
        if now - self._listed_at >= _STEP_SECONDS:
            self._listed, self._listed_at = self._host.nvml.processes(self._device.gpu.index), now
        return self._listed

    # -- ending --------------------------------------------------------------------------------------

    def _collect(self) -> None:
        self._several.look()
        over: dict[int, str | None] = {}
        for number, program in self._running.items():
            if not program.runs:
                over[number] = program.failure
            elif self._stalled(program):
                self._several.kill(program)
                over[number] = f"printed nothing for {self._options.stall_seconds:g} s, and was ended"
        stuck = self._end_left_behind(list(over))
        for number, failure in over.items():
            self._close(number, failure, stuck.get(number))

    def _end_left_behind(self, numbers: Sequence[int]) -> dict[int, GpushareError]:
        """End what programs that have ended left running; return what could not be ended, by copy, and why."""
        left = self._several.left_behind([self._running[number] for number in numbers])
        failed: GpushareError | None = None
        if left:
            try:
                self._several.end_left_behind(left, hurry=self._signals.came)
            except GpushareError as error:
                failed = error
        stuck = {}
        for number in numbers:
            copy, pids = self._copies[number], left.get(self._running[number].pid, ())
            copy.left_behind += pids
            if failed is not None and any(self._host.processes.alive(pid) for pid in pids):
                stuck[number] = failed
            elif pids:
                self._reporter.left_behind(copy, pids)
        return stuck

    def _stalled(self, program: Program) -> bool:
        seconds = self._options.stall_seconds
        return seconds is not None and time.monotonic() - program.heard > seconds

    def _close(self, number: int, failure: str | None, stuck: GpushareError | None = None) -> None:
        copy, program = self._copies[number], self._running.pop(number)
        copy.seconds = (program.ended or time.monotonic()) - program.started
        copy.exit_code, copy.failure = program.status, failure
        if program.no_space:
            copy.hint = hint_on_space(self._options.logs)
        self._note_limit(copy)
        if stuck is not None:
            copy.failure = f"left process {', '.join(map(str, copy.left_behind))} behind: {stuck.message}"
            copy.hint = stuck.hint
        # Nothing new starts next to a process that could not be ended.
        self._stuck.discard(number)
        more = stuck is None and self._signals.first is None and copy.tries <= self._options.restarts
        again = copy.failure is not None and more
        copy.state = "waiting" if again else "failed" if copy.failure is not None else "done"
        self._reporter.ended(copy, again=again)

    def _note_limit(self, copy: Copy) -> None:
        """Say of a copy that was ended for its memory why, whatever its exit code; and leave the ledger."""
        memory = self._memories.get(copy.number)
        if memory is None:
            return
        try:
            memory.check()
        except OperationFailed as error:
            copy.failure, copy.hint, copy.reason = error.message, error.hint, error.code
        self._leave(copy.number)

    def _interrupt(self) -> None:
        # A copy that ended by itself in the meantime keeps its result.
        self._collect()
        for memory in self._memories.values():
            memory.release()
        self._several.end(list(self._running.values()), hurry=self._signals.came)
        for number in list(self._running):
            self._close(number, None)
            if self._copies[number].reason is None:
                self._copies[number].state = "ended"
        for one in self._copies:
            if one.state == "waiting":
                one.state = "never started" if one.tries == 0 else "failed"

    def _prove(self) -> None:
        """Check from time to time whether the copies are clients of the daemon."""
        if not self._looks or time.monotonic() < self._looks[0]:
            return
        self._looks.pop(0)
        clients = self._several.clients()
        if clients is None:
            return
        for number, program in self._running.items():
            copy = self._copies[number]
            if not copy.attached:
                copy.attached = self._several.attached(program, clients)
