"""Copies of a command, run at the same time or in turn: what each printed, how it ended, and why it failed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.base.errors import GpushareError
from gpushare.base.units import quoted
from gpushare.measure.experiment import PASSING, Experiment
from gpushare.measure.metric import Metric, Printed, hopeless, within
from gpushare.measure.usage import UsageMeter
from gpushare.run.several import Group, Program
from gpushare.signals import Wakeups

_POLL_SECONDS: Final = 0.05
# Shorter intervals at first: start-up and short programs are timed more exactly.
_FIRST_SECONDS: Final = 2.0
_FIRST_POLL_SECONDS: Final = 0.01
# A look for new contexts asks NVML.
_SLICE_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One copy that is to run: its command and environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """``window`` is how long to measure before the copies are ended; None: every copy ends by itself.

    ``limit`` is when a copy that still runs (or, with a window, has not printed yet) counts as hung.
    """

    window: float | None = None
    limit: float = 600.0


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """How one copy did. ``failure`` says what went wrong; ``exit_code`` is negative for a signal."""

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
    """How all copies did; ``seconds`` is from the first start to the last end, or the window. ``hung``: a limit was reached."""

    copies: tuple[CopyResult, ...]
    seconds: float
    hung: bool = False
    interrupted: bool = False


@dataclass
class Slices:
    """The time-slice that each copy gets as soon as it has a context; None: only whether it could get one is found out.

    ``refused`` is why not.
    """

    experiment: Experiment
    microseconds: int | None
    refused: GpushareError | None = None
    _due: float = -math.inf

    def look(self, copies: Sequence[_Copy], at: float) -> None:
        """Set the slices of the copies that have none yet, from time to time."""
        if at < self._due:
            return
        for copy in copies:
            if not copy.program.runs or copy.sliced or copy.unsliced is not None:
                continue
            try:
                if self.microseconds is None:
                    self.experiment.slice_of(copy.program)
                else:
                    self.experiment.set_slice(copy.program, self.microseconds)
                copy.sliced = True
            except GpushareError as error:
                if error.code not in PASSING:
                    copy.unsliced, self.refused = error.message, error
        self._due = at + _SLICE_SECONDS


@dataclass
class _Copy:
    number: int
    program: Program
    printed: Printed
    by_us: bool = False
    left_behind: tuple[int, ...] = ()
    # Whether its slice was set, or why it could not be.
    sliced: bool = False
    unsliced: str | None = None

    def hopeless(self, at: float) -> bool:
        """Return whether it only prints what is not a number, and will not stop doing so."""
        return not self.printed.values and hopeless(self.printed.refusals, at - self.program.started)


@dataclass
class Copies:
    """Runs copies of a command in a group of programs."""

    group: Group
    metric: Metric
    durations: Durations
    signals: Wakeups | None = None
    clock: Callable[[], float] = time.monotonic
    # None: each has the driver's default.
    slices: Slices | None = None

    def together(self, launches: Sequence[Launch], usage: UsageMeter | None = None) -> CopiesResult:
        """Run copies at the same time.

        Raises:
            GpushareError: a copy could not be started, or not be ended; those that run are ended.
        """
        copies: list[_Copy] = []
        try:
            for number, launch in enumerate(launches):
                copies.append(self._start(number, launch))
            return self._follow(copies, usage)
        finally:
            # Even if something failed here, no program is left behind.
            self._end([copy for copy in copies if copy.program.runs])
            self.group.forget_ended()

    def in_turn(self, launches: Sequence[Launch], usage: UsageMeter | None = None) -> CopiesResult:
        """Run copies in turn; stop after one that hung or was interrupted."""
        results: list[CopyResult] = []
        # From the start to the end of each: our work between two copies is not part of the queue.
        seconds = 0.0
        last = CopiesResult(copies=(), seconds=0.0)
        for number, launch in enumerate(launches):
            last = self.together([launch], usage)
            seconds += last.seconds
            results += [replace(result, copy=number) for result in last.copies]
            if last.hung or last.interrupted:
                break
        return CopiesResult(copies=tuple(results), seconds=seconds, hung=last.hung, interrupted=last.interrupted)

    def _start(self, number: int, launch: Launch) -> _Copy:
        printed = Printed(self.metric)

        def listen(line: str, _at: float) -> None:
            printed.listen(line, self.clock())

        program = self.group.launch(f"copy {number}", launch.argv, launch.environment, listen=listen, redrawn=True)
        return _Copy(number, program, printed)

    def _follow(self, copies: list[_Copy], usage: UsageMeter | None) -> CopiesResult:
        first = min((copy.program.started for copy in copies), default=self.clock())
        opened: float | None = None
        hung = interrupted = False
        while True:
            at = self._look(copies, usage)
            running = [copy for copy in copies if copy.program.runs]
            if not running:
                break
            if self.durations.window is not None and opened is None and all(self._begun(copy) for copy in running):
                opened = at
                if usage is not None:
                    usage.restart()
            measured = opened is not None and self.durations.window is not None and at - opened >= self.durations.window
            # With a window, only the wait for it can hang.
            hung = (opened is None or self.durations.window is None) and at - first >= self.durations.limit
            hung = hung or (opened is None and any(copy.hopeless(at) for copy in running))
            if measured or hung or interrupted:
                break
            interrupted = self._asked(_FIRST_POLL_SECONDS if at - first < _FIRST_SECONDS else _POLL_SECONDS)
        closed = self.clock()
        if usage is not None:
            usage.stop()
        for copy in copies:
            copy.by_us = copy.program.runs
        self._end([copy for copy in copies if copy.by_us])
        self._end_left_behind(copies, frozenset() if usage is None else usage.members)
        results = tuple(self._judged(copy, opened, closed, hung=hung, interrupted=interrupted) for copy in copies)
        seconds = closed - (first if opened is None else opened)
        return CopiesResult(copies=results, seconds=seconds, hung=hung, interrupted=interrupted)

    def _begun(self, copy: _Copy) -> bool:
        """Return whether a copy has printed a number, and has its slice or never will."""
        wanted = self.slices is not None and self.slices.microseconds is not None
        return bool(copy.printed.values) and (not wanted or copy.sliced or copy.unsliced is not None)

    def _asked(self, seconds: float) -> bool:
        """Wait at most ``seconds``, and return whether the user has asked for the end."""
        if self.signals is not None:
            return self.signals.asked(seconds)
        time.sleep(seconds)
        return False

    def _hurried(self) -> bool:
        return self.signals is not None and self.signals.came()

    def _look(self, copies: Sequence[_Copy], usage: UsageMeter | None) -> float:
        """Read what was printed, see which copies ended, and return the time."""
        self.group.look()
        if usage is not None:
            usage.look([copy.program.pid for copy in copies if copy.program.runs])
        at = self.clock()
        if self.slices is not None:
            self.slices.look(copies, at)
        return at

    def _end(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            # Output while it ends is not measured.
            copy.program.listen = lambda _line, _at: None
        self.group.end([copy.program for copy in copies], hurry=self._hurried)

    def _end_left_behind(self, copies: Sequence[_Copy], seen: frozenset[int]) -> None:
        """End what copies that ended by themselves left running: the next run would be measured next to it.

        ``seen`` are the run's processes that were on the GPU: the only trace of one in a session of its own.
        """
        programs = {copy.program.pid for copy in copies}
        elsewhere = [pid for pid in seen - programs if self.group.host.processes.alive(pid)]
        ended = [copy for copy in copies if not copy.by_us]
        left_behind = self.group.left_behind([copy.program for copy in ended], elsewhere)
        for copy in ended:
            copy.left_behind = left_behind.get(copy.program.pid, ())
        if left_behind:
            self.group.end_left_behind(left_behind, hurry=self._hurried)

    def _judged(self, copy: _Copy, opened: float | None, closed: float, *, hung: bool, interrupted: bool) -> CopyResult:
        value = copy.printed.last if opened is None else copy.printed.between(opened, closed)
        program, since = copy.program, -math.inf if opened is None else opened
        ended = closed if copy.by_us or program.ended is None else program.ended
        return CopyResult(
            copy=copy.number,
            pid=program.pid,
            seconds=ended - program.started,
            exit_code=None if copy.by_us else program.status,
            value=value if self.metric.printed else None,
            latencies=tuple(within(copy.printed.latencies, since, math.inf)),
            p50=copy.printed.latency(50, since),
            p99=copy.printed.latency(99, since),
            failure="interrupted" if interrupted and copy.by_us else self._failure(copy, value, opened, hung=hung),
            last_line=program.last_line or None,
        )

    def _failure(self, copy: _Copy, value: float | None, opened: float | None, *, hung: bool) -> str | None:
        window = self.durations.window
        if not copy.by_us and copy.program.failure is not None:
            return copy.program.failure
        if copy.left_behind:
            pids = ", ".join(map(str, copy.left_behind))
            return f"ended, but left process {pids} behind, which was not measured and was ended; the program must stay in the foreground"
        if self.slices is not None and self.slices.microseconds is not None and not copy.sliced:
            return f"its time-slice was not set: {copy.unsliced or 'it had no CUDA context'}"
        if copy.by_us and hung:
            if window is not None and not copy.printed.values:
                return _no_number(copy.printed) + ("" if copy.printed.refused else f" in {self.durations.limit:g} s")
            return f"did not end within {self.durations.limit:g} s"
        if window is not None and not copy.by_us:
            return f"ended before it was measured for {window:g} s"
        if self.metric.printed and value is None:
            when = "" if opened is None else f" in the measured {window:g} s"
            return f"{_no_number(copy.printed)}{when}"
        return None


def _no_number(printed: Printed) -> str:
    if printed.refused is not None and not printed.values:
        return f"printed {quoted(printed.refused)} where --metric matches, which is not a rate or time"
    return "printed no number that --metric matches"


def failures(result: CopiesResult) -> list[str]:
    """Return what went wrong, one line per copy."""
    return [f"copy {one.copy} (process {one.pid}): {one.failure}" for one in result.copies if one.failure is not None]
