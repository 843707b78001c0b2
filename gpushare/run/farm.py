"""`gpushare run --copies N`: many copies of one program under MPS, each with its share, its number and its log."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from gpushare.errors import BadUsage, GpushareError, InUse
from gpushare.mps.limits import Limits
from gpushare.plan import Step
from gpushare.run.end import GRACE_SECONDS
from gpushare.run.program import EndSignals, command_line
from gpushare.run.several import Log, Program, Several, directory_of_logs, peak_memory
from gpushare.run.share import MpsShare, open_mps_share
from gpushare.units import MIB, format_bytes
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


# What a CUDA context takes in addition to a program's allocations; the pinned memory limit does not count it.
CONTEXT_BYTES: Final = 512 * MIB
# Left free as a margin, against fragmentation for example.
_MARGIN: Final = 0.02


def share_of_threads(copies: int) -> float | None:
    """Return the thread cap of each of N copies, 200/N percent; None (no cap) for one or two."""
    return None if copies <= 2 else max(0.1, round(200.0 / copies, 1))


def share_of_memory(host: Host, device: Device, copies: int) -> int | None:
    """Return the memory limit of each of N copies: its share of what is free now; None when that is not known."""
    free = free_memory(host, device)
    if free is None:
        return None
    share = int(free * (1 - _MARGIN) / copies) - CONTEXT_BYTES
    if share < MIB:
        raise no_room(device, free, copies, None)
    return share // MIB * MIB


def free_memory(host: Host, device: Device) -> int | None:
    """Return the free memory of a device in bytes (nvmlDeviceGetMemoryInfo_v2), or None when it is not known."""
    gpu = host.nvml.gpu(device.gpu.index)
    if device.mig is not None:
        mig = next((one for one in gpu.mig_instances if one.uuid == device.uuid), None)
        if mig is None or mig.memory_total_bytes is None or mig.memory_used_bytes is None:
            return None
        return mig.memory_total_bytes - mig.memory_used_bytes
    if gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return None
    return gpu.memory_total_bytes - gpu.memory_used_bytes - (gpu.memory_reserved_bytes or 0)


def check_room(host: Host, device: Device, options: FarmOptions) -> int | None:
    """Return how many copies fit into the memory that is free now; None when that is not known."""
    limit = options.limits.memory_limit_bytes
    free = free_memory(host, device)
    if limit is None or free is None:
        return None
    fitting = free // (limit + CONTEXT_BYTES)
    if fitting < 1:
        raise no_room(device, free, 1, limit)
    return min(options.copies, fitting)


def no_room(device: Device, free: int, copies: int, limit: int | None) -> GpushareError:
    """Return the error for copies, each with a limit or without one, that do not fit into the free memory."""
    if limit is None:
        wanted = f"{copies} copies and their CUDA contexts do" if copies > 1 else "a copy and its CUDA context do"
    else:
        wanted = f"a copy with a limit of {format_bytes(limit)} and its CUDA context do"
    return InUse(
        f"{wanted} not fit into the {format_bytes(max(0, free))} free on {device.title}",
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


@dataclass(frozen=True, kw_only=True)
class FarmOptions:
    """How many copies, the limits of each, how often a failed one is started again, and where logs are kept.

    ``stall_seconds`` is how long a copy may print nothing before it counts as hung; None: for ever.
    ``at_once`` bounds how many run at the same time (None: all).
    """

    copies: int
    limits: Limits = field(default_factory=Limits)
    restarts: int = 0
    logs: Path | None = None
    grace_seconds: float = GRACE_SECONDS
    stall_seconds: float | None = None
    at_once: int | None = None


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
    with contextlib.ExitStack() as held:
        logs = None if options.logs is None else held.enter_context(directory_of_logs(options.logs))
        program = numbered(command, 0)[0]
        share = open_mps_share(host, device, program, options.limits)
        several = held.enter_context(Several(host, share, grace_seconds=options.grace_seconds))
        if logs is not None:
            remove_earlier_logs(logs, options.copies)
        return _Farm(host, device, command, options, reporter, several, logs).run()


def plan_farm(
    host: Host, device: Device, command: Sequence[str], options: FarmOptions, reporter: FarmReporter
) -> tuple[Step, ...]:
    """Return the steps of a farm on the host as it is now: an MPS daemon where there is none, then the copies."""
    check_room(host, device, options)
    share = MpsShare(host, device, options.limits)
    share.check(numbered(command, 0)[0])
    planned = _Farm(host, device, command, options, reporter, Several(host, share), None)
    environment = share.environment({})
    return (*share.steps(), *planned.steps(share.where, environment))


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
        self._full_since: float | None = None
        self._started = time.monotonic()
        self._looks: list[float] = []
        self._signals = EndSignals()

    def run(self) -> FarmResult:
        with self._signals:
            while True:
                self._start_what_fits()
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

    # -- starting ------------------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        for copy in self._copies:
            if copy.state != "waiting":
                continue
            if not self._fits():
                return
            self._full_since = None
            try:
                self._start(copy)
            except GpushareError as error:
                self._cannot_start(copy, error)

    def _cannot_start(self, copy: Copy, error: GpushareError) -> None:
        copy.state, copy.failure, copy.hint, copy.log = "failed", error.message, error.hint, None
        self._reporter.ended(copy, again=False)

    def _fits(self) -> bool:
        if self._options.at_once is not None and len(self._running) >= self._options.at_once:
            return False
        limit = self._options.limits.memory_limit_bytes
        free = None if limit is None else free_memory(self._host, self._device)
        if limit is None or free is None:
            return True
        # Memory that a running copy may still allocate is not free.
        for program in self._running.values():
            holds = peak_memory(self._host, self._device, program) or 0
            free -= max(0, limit + CONTEXT_BYTES - holds)
        if free >= limit + CONTEXT_BYTES:
            return True
        if not self._running:
            self._wait_for_room(no_room(self._device, free, 1, limit))
        return False

    def _wait_for_room(self, error: GpushareError) -> None:
        """Give up the waiting copies when none of ours will make room; those that ended keep their results."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        if now - self._full_since >= _ROOM_SECONDS:
            for copy in self._copies:
                if copy.state == "waiting":
                    self._cannot_start(copy, error)

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
        if not self._looks:
            self._looks = [time.monotonic() + seconds for seconds in _LOOKS]

        def listen(line: str, _at: float) -> None:
            self._reporter.line(number, line)

        log = None if self._options.logs is None else log_of(self._options.logs, number, copy.tries)
        copy.tries += 1
        copy.failure, copy.hint, copy.exit_code, copy.attached = None, None, None, None
        copy.log = None if log is None else str(log)
        program = self._several.start(
            f"copy {number}",
            numbered(self._command, number),
            self._options.limits,
            variables=self._variables(copy),
            listen=listen,
            log=None if log is None or self._logs is None else Log(log, self._logs),
        )
        copy.pid, copy.state = program.pid, "running"
        self._running[number] = program
        self._reporter.started(copy)

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
        if stuck is not None:
            copy.failure = f"left process {', '.join(map(str, copy.left_behind))} behind: {stuck.message}"
            copy.hint = stuck.hint
        # Nothing new starts next to a process that could not be ended.
        more = stuck is None and self._signals.first is None and copy.tries <= self._options.restarts
        again = copy.failure is not None and more
        copy.state = "waiting" if again else "failed" if copy.failure is not None else "done"
        self._reporter.ended(copy, again=again)

    def _interrupt(self) -> None:
        # A copy that ended by itself in the meantime keeps its result.
        self._collect()
        self._several.end(list(self._running.values()), hurry=self._signals.came)
        for number in list(self._running):
            self._close(number, None)
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
