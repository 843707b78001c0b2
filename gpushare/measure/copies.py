"""Copies of a command that run at the same time, or one after the other: started, read, ended safely, judged."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpushare.host.process import Streams
from gpushare.host.program import group_members
from gpushare.measure.metric import Metric, Printed, bounded, hopeless
from gpushare.run.end import GRACE_SECONDS, end_left_behind, end_programs, still_there
from gpushare.units import quoted

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.process import Spawned
    from gpushare.measure.usage import UsageMeter
    from gpushare.mps.kill import Meter

_POLL_SECONDS: Final = 0.05
# While copies start, and of programs that take no longer, a look more often tells times more exactly.
_FIRST_SECONDS: Final = 2.0
_FIRST_POLL_SECONDS: Final = 0.01
_REAP_SECONDS: Final = 5.0
# What a copy prints is read and thrown away: more than this is not kept on the disk.
_MOST_OUTPUT_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One copy that is to run: its command and environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """How long: ``window`` None lets every copy end by itself, else it is measured so long, and ended.

    ``limit`` is when a copy that still runs (or, with a window, has not printed yet) counts as hung.
    """

    window: float | None = None
    limit: float = 600.0
    grace: float = GRACE_SECONDS


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """How one copy did. ``failure`` says what went wrong, or is None; ``exit_code`` is negative for a signal."""

    copy: int
    pid: int
    seconds: float
    exit_code: int | None
    value: float | None
    latencies: tuple[float, ...]
    p50: float | None
    p99: float | None
    failure: str | None
    last_line: str | None = None


@dataclass(frozen=True, kw_only=True)
class CopiesResult:
    """How all did; ``seconds`` from the first start to the last end, or the window's. ``hung``: a limit was reached."""

    copies: tuple[CopyResult, ...]
    seconds: float
    hung: bool = False
    interrupted: bool = False


class Watcher:
    """What a caller does beside the copies; each method is called by the loop that waits for them."""

    def announce(self, pid: int, started: float | None) -> None:
        """A copy is about to run; called in its own process."""

    def ended(self, pid: int) -> None:
        """A copy has ended."""

    def wait(self, seconds: float) -> bool:
        """Wait so long, less when something happens; return whether the user wants it all to end."""
        time.sleep(seconds)
        return False

    def hurry(self) -> bool:
        """Return whether the user asked again."""
        return False


@dataclass
class _Copy:
    number: int
    child: Spawned
    descriptor: int
    printed: Printed
    started: float
    offset: int = 0
    ended: float | None = None
    status: int | None = None
    by_us: bool = False
    left_behind: tuple[int, ...] = ()

    def read(self, at: float) -> None:
        while chunk := os.pread(self.descriptor, 1 << 16, self.offset):
            self.offset += len(chunk)
            with bounded(self.printed.metric.pattern):
                self.printed.feed(chunk.decode(errors="replace"), at)
        if self.offset > _MOST_OUTPUT_BYTES:
            # It appends, so it goes on at the new end.
            os.ftruncate(self.descriptor, 0)
            self.offset = 0

    def hopeless(self, at: float) -> bool:
        """Return whether it prints what is no number, and will go on so."""
        return not self.printed.values and hopeless(self.printed.refusals, at - self.started)


@dataclass
class Copies:
    """Runs copies of a command. ``clients`` and ``meter`` as `end_programs` takes them: how their end harms nobody."""

    host: Host
    metric: Metric
    durations: Durations
    clients: Callable[[], set[int] | None] = set
    meter: Meter | None = None
    watcher: Watcher = field(default_factory=Watcher)
    clock: Callable[[], float] = time.monotonic

    def together(self, launches: Sequence[Launch], usage: UsageMeter | None = None) -> CopiesResult:
        """Run copies at the same time.

        Raises:
            GpushareError: a copy could not be started, or not be ended; those that run are ended.
        """
        with contextlib.ExitStack() as stack:
            copies: list[_Copy] = []
            try:
                for number, launch in enumerate(launches):
                    copies.append(self._start(number, launch, stack))
                return self._follow(copies, usage)
            finally:
                # Also when something failed here: nobody is left behind.
                self._end([copy for copy in copies if copy.ended is None])

    def in_turn(self, launches: Sequence[Launch], usage: UsageMeter | None = None) -> CopiesResult:
        """Run copies one after the other; after one that hung, or an interruption, no other starts.

        Raises:
            GpushareError: as `together`.
        """
        found: list[CopyResult] = []
        # Of each from its start to its end: what we do between two of them is no part of a queue.
        seconds = 0.0
        last = CopiesResult(copies=(), seconds=0.0)
        for number, launch in enumerate(launches):
            last = self.together([launch], usage)
            seconds += last.seconds
            found += [replace(one, copy=number) for one in last.copies]
            if last.hung or last.interrupted:
                break
        return CopiesResult(copies=tuple(found), seconds=seconds, hung=last.hung, interrupted=last.interrupted)

    def _start(self, number: int, launch: Launch, stack: contextlib.ExitStack) -> _Copy:
        # A file, not a pipe: a copy that prints much never waits for us.
        file = stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 - the stack closes it
        appending = os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Python keeps back what it prints to a file; a number must be seen when it is printed.
            environment = {**launch.environment, "PYTHONUNBUFFERED": "1"}
            started = self.clock()
            child = self.host.processes.spawn(
                launch.argv, environment, Streams(nothing, appending, appending), self.watcher.announce
            )
        finally:
            os.close(appending)
            os.close(nothing)
        return _Copy(number, child, file.fileno(), Printed(self.metric), started)

    def _follow(self, copies: list[_Copy], usage: UsageMeter | None) -> CopiesResult:
        first = min((copy.started for copy in copies), default=self.clock())
        opened: float | None = None
        hung = interrupted = False
        while True:
            at = self._look(copies, usage)
            running = [copy for copy in copies if copy.ended is None]
            if not running:
                break
            if self.durations.window is not None and opened is None and all(copy.printed.values for copy in running):
                opened = at
                for copy in copies:
                    copy.printed.forget_latencies()
                if usage is not None:
                    usage.restart()
            measured = opened is not None and self.durations.window is not None and at - opened >= self.durations.window
            # With a window only the wait for it can hang.
            hung = (opened is None or self.durations.window is None) and at - first >= self.durations.limit
            hung = hung or (opened is None and any(copy.hopeless(at) for copy in running))
            if measured or hung or interrupted:
                break
            interrupted = self.watcher.wait(_FIRST_POLL_SECONDS if at - first < _FIRST_SECONDS else _POLL_SECONDS)
        closed = self.clock()
        if usage is not None:
            usage.stop()
        for copy in copies:
            copy.by_us = copy.ended is None
        self._end([copy for copy in copies if copy.by_us])
        self._end_left_behind(copies, frozenset() if usage is None else usage.members)
        results = tuple(self._judged(copy, opened, closed, hung=hung, interrupted=interrupted) for copy in copies)
        seconds = closed - (first if opened is None else opened)
        return CopiesResult(copies=results, seconds=seconds, hung=hung, interrupted=interrupted)

    def _look(self, copies: Sequence[_Copy], usage: UsageMeter | None) -> float:
        """Read what was printed, see who ended, and return the time."""
        for copy in copies:
            if copy.ended is not None:
                continue
            status = copy.child.poll()
            at = self.clock()
            copy.read(at)
            if status is not None:
                copy.status, copy.ended = status, at
                copy.printed.end(at)
                self.watcher.ended(copy.child.pid)
        if usage is not None:
            usage.look([copy.child.pid for copy in copies if copy.ended is None])
        return self.clock()

    def _end(self, copies: Sequence[_Copy]) -> None:
        """End copies that still run, together and so that no other client of the daemon is broken."""
        if not copies:
            return
        end_programs(
            self.host,
            [copy.child.pid for copy in copies],
            self.clients,
            self.meter,
            number=signal.SIGINT,
            grace_seconds=self.durations.grace,
            hurry=self.watcher.hurry,
        )
        self._reap(copies)
        for copy in copies:
            copy.status = copy.child.poll()
            copy.ended = self.clock()
            self.watcher.ended(copy.child.pid)

    def _end_left_behind(self, copies: Sequence[_Copy], seen: frozenset[int]) -> None:
        """End what copies that ended by themselves have left running: the next run would be measured beside it.

        ``seen`` are those that were of the run when somebody new came to the GPU: one in a session of its own is only there.
        """
        elsewhere = {pid for pid in seen - {copy.child.pid for copy in copies} if self.host.processes.alive(pid)}
        found = {copy.child.pid: set(group_members(copy.child.pid)) for copy in copies if not copy.by_us}
        if found:
            # Nobody knows whose these are: they count as the first one's.
            next(iter(found.values())).update(elsewhere.difference(*found.values()))
        left = still_there(self.host, found)
        for copy in copies:
            copy.left_behind = left.get(copy.child.pid, ())
        pids = [pid for each in left.values() for pid in each]
        if pids:
            end_left_behind(
                self.host, pids, self.clients, self.meter, grace_seconds=self.durations.grace, hurry=self.watcher.hurry
            )

    def _reap(self, copies: Sequence[_Copy]) -> None:
        """Wait until nothing is left of them on the GPU.

        A process whose first thread has ended looks dead while CUDA's own threads still take its context down (seen on
        an H200): only what can be reaped is gone, and the next run would be measured beside it.
        """
        for _ in range(int(_REAP_SECONDS / _FIRST_POLL_SECONDS)):
            if all(copy.child.poll() is not None for copy in copies):
                return
            time.sleep(_FIRST_POLL_SECONDS)

    def _judged(self, copy: _Copy, opened: float | None, closed: float, *, hung: bool, interrupted: bool) -> CopyResult:
        value = copy.printed.last if opened is None else copy.printed.between(opened, closed)
        ended = copy.ended if copy.ended is not None and not copy.by_us else closed
        return CopyResult(
            copy=copy.number,
            pid=copy.child.pid,
            seconds=ended - copy.started,
            exit_code=None if copy.by_us else copy.status,
            value=value if self.metric.printed else None,
            latencies=tuple(copy.printed.latencies),
            p50=copy.printed.latency(50),
            p99=copy.printed.latency(99),
            failure="interrupted" if interrupted and copy.by_us else self._failure(copy, value, opened, hung=hung),
            last_line=copy.printed.tail[-1] if copy.printed.tail else None,
        )

    def _failure(self, copy: _Copy, value: float | None, opened: float | None, *, hung: bool) -> str | None:
        said = f": {copy.printed.tail[-1]}" if copy.printed.tail else ""
        window = self.durations.window
        if not copy.by_us and copy.status:
            return f"{_exit(copy.status)}{said}"
        if copy.left_behind:
            pids = ", ".join(map(str, copy.left_behind))
            return f"ended, but left process {pids} behind, which was not measured and was ended; it must stay in the foreground"
        if copy.by_us and hung:
            if window is not None and not copy.printed.values:
                return _no_number(copy.printed) + ("" if copy.printed.refused else f" in {self.durations.limit:g} s")
            return f"did not end within {self.durations.limit:g} s"
        if window is not None and not copy.by_us:
            return f"ended before it was measured for {window:g} s"
        if self.metric.printed and value is None:
            when = "" if opened is None else f" in the {window:g} s that were measured"
            return f"{_no_number(copy.printed)}{when}"
        return None


def _no_number(printed: Printed) -> str:
    if printed.refused is not None and not printed.values:
        return f"printed {quoted(printed.refused)} where --metric matches, which is no rate or time"
    return "printed no number that --metric matches"


def _exit(status: int) -> str:
    if status > 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def failures(result: CopiesResult) -> list[str]:
    """Return what went wrong, a line a copy."""
    return [f"copy {one.copy} (process {one.pid}): {one.failure}" for one in result.copies if one.failure is not None]
