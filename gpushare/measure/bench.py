"""A benchmark: interleaved rounds of copies under each way of sharing; what each copy printed, and how it ended."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.base.benchmark import BuiltInWorkload, CopiesResult, CopyResult, LeftOut, Metric, RunResult
from gpushare.base.errors import GpushareError, NotSupported, OperationFailed
from gpushare.base.model import Way
from gpushare.base.selection import Device
from gpushare.base.units import counted, format_bytes, format_copies
from gpushare.host.host import Host
from gpushare.measure.experiment import Experiment, Grounds
from gpushare.measure.metric import Printed, within
from gpushare.measure.usage import UsageMeter
from gpushare.measure.ways import ALONE, IN_ONE, BenchWay, Cell, Obstacles, find_obstacles, one_at_a_time, sort_out
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import own_daemon
from gpushare.mps.limits import Limits
from gpushare.plan import Step
from gpushare.run.end import CONVERSATION_SECONDS
from gpushare.run.program import step_of_run
from gpushare.run.several import Program
from gpushare.run.share import MpsShare, check_program
from gpushare.signals import Wakeups
from gpushare.timeslice.policy import plan_level, temporary_level
from gpushare.timeslice.slices import PASSING

_POLL_SECONDS: Final = 0.05
# Shorter intervals at first: start-up and short programs are timed more exactly.
_SHORT_SECONDS: Final = 2.0
_FIRST_POLL_SECONDS: Final = 0.01
# Each search for new contexts asks NVML.
_SLICE_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One copy that is to run: its command and environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass
class _Copy:
    """A copy that runs: its program, what it has printed, and its slice."""

    number: int
    program: Program
    printed: Printed
    ended_by_us: bool = False
    left_behind: tuple[int, ...] = ()
    # Whether its slice was set, or why it could not be.
    sliced: bool = False
    unsliced: str | None = None


@dataclass
class Copies:
    """Runs copies of a command in an experiment.

    ``window`` is how long to measure before the copies are ended; None: every copy ends by itself. ``limit`` is when a copy
    that still runs (or, with a window, has not printed yet) counts as hung. ``slice_us`` is the time-slice that each gets as
    soon as it has a context; None: the driver's default.
    """

    experiment: Experiment
    metric: Metric
    signals: Wakeups
    window: float | None = None
    limit: float = 600.0
    slice_us: int | None = None
    _slices_due: float = -math.inf

    def run_together(self, launches: Sequence[Launch], usage: UsageMeter) -> CopiesResult:
        """Run copies at the same time.

        Raises:
            GpushareError: a copy could not be started, or not be ended; those that run are ended.
        """
        copies: list[_Copy] = []
        try:
            for number, launch in enumerate(launches):
                running = self.experiment.run(f"copy {number}", launch.argv, launch.environment, self.metric)
                copies.append(_Copy(number, running.program, running.printed))
            return self._watch(copies, usage)
        finally:
            # Even if something failed here, no program is left behind.
            self._end([copy for copy in copies if copy.program.runs])
            self.experiment.forget_ended()

    def run_in_turn(self, launches: Sequence[Launch], usage: UsageMeter) -> CopiesResult:
        """Run copies in turn; stop after one that hung or was interrupted."""
        results: list[CopyResult] = []
        # From the start to the end of each: our work between two copies is not part of the queue.
        seconds = 0.0
        last = CopiesResult(copies=(), seconds=0.0)
        for number, launch in enumerate(launches):
            last = self.run_together([launch], usage)
            seconds += last.seconds
            results += [replace(result, copy=number) for result in last.copies]
            if last.hung or last.interrupted:
                break
        return CopiesResult(copies=tuple(results), seconds=seconds, hung=last.hung, interrupted=last.interrupted)

    def _watch(self, copies: list[_Copy], usage: UsageMeter) -> CopiesResult:
        """Watch copies until all have ended, the window is over, one hangs or the user interrupts; then end them.

        The window opens when each has printed a number, and has its slice. After that, nothing can hang.
        """
        first = min(copy.program.started for copy in copies)
        opened: float | None = None
        hung = False
        interrupted = False
        while True:
            at = self._poll(copies, usage)
            running = [copy for copy in copies if copy.program.runs]
            if not running:
                break
            is_waiting = self.window is not None and opened is None
            if is_waiting and all(copy.printed.values for copy in running) and not self._copies_without_slice(running):
                opened = at
                usage.restart()
            if opened is None:
                hung = at - first >= self.limit
            measured = opened is not None and self.window is not None and at - opened >= self.window
            if measured or hung or interrupted:
                break
            poll_seconds = _FIRST_POLL_SECONDS if at - first < _SHORT_SECONDS else _POLL_SECONDS
            interrupted = self.signals.end_requested(poll_seconds)
        closed = self.experiment.now()
        usage.stop()
        for copy in copies:
            copy.ended_by_us = copy.program.runs
        self._end([copy for copy in copies if copy.ended_by_us])
        self._end_left_behind(copies, usage.run_pids)
        results = tuple(self._result_of(copy, opened, closed, hung=hung, interrupted=interrupted) for copy in copies)
        seconds = closed - (first if opened is None else opened)
        return CopiesResult(copies=results, seconds=seconds, hung=hung, interrupted=interrupted)

    def _copies_without_slice(self, copies: Sequence[_Copy]) -> list[_Copy]:
        """Return the copies that have no slice yet, and may still get one: they are not measured before."""
        if self.slice_us is None:
            return []
        return [copy for copy in copies if copy.program.runs and not copy.sliced and copy.unsliced is None]

    def _poll(self, copies: Sequence[_Copy], usage: UsageMeter) -> float:
        """Read what was printed, note which copies ended, set slices that are due, and return the time."""
        self.experiment.read_outputs()
        usage.sample([copy.program.pid for copy in copies if copy.program.runs])
        at = self.experiment.now()
        # Not at each poll, because that asks NVML.
        if self.slice_us is not None and at >= self._slices_due:
            for copy in self._copies_without_slice(copies):
                try:
                    self.experiment.set_slice(copy.program, self.slice_us)
                    copy.sliced = True
                except GpushareError as error:
                    # Else the copy has no context yet.
                    if error.code not in PASSING:
                        copy.unsliced = error.message
            self._slices_due = at + _SLICE_SECONDS
        return at

    def _end(self, copies: Sequence[_Copy]) -> None:
        """End copies, and take in no more of what they print."""
        for copy in copies:
            # Output while it ends is not measured.
            copy.program.listen = lambda _line, _at: None
        # Where the user asks again for the end, nothing is waited for.
        self.experiment.end([copy.program for copy in copies], hurry=self.signals.ending_came)

    def _end_left_behind(self, copies: Sequence[_Copy], seen: frozenset[int]) -> None:
        """End what copies that ended by themselves left running: the next run would be measured next to it.

        ``seen`` are the run's processes that were on the GPU: the only trace of one in a session of its own.
        """
        programs = {copy.program.pid for copy in copies}
        elsewhere = [pid for pid in seen - programs if self.experiment.host.processes.alive(pid)]
        ended = [copy for copy in copies if not copy.ended_by_us]
        left_behind = self.experiment.left_behind([copy.program for copy in ended], elsewhere)
        for copy in ended:
            copy.left_behind = left_behind.get(copy.program.pid, ())
        if left_behind:
            self.experiment.end_left_behind(left_behind, hurry=self.signals.ending_came)

    def _result_of(
        self, copy: _Copy, opened: float | None, closed: float, *, hung: bool, interrupted: bool
    ) -> CopyResult:
        """Return the result of a copy that was watched from ``opened`` (None: there was no window) to ``closed``."""
        # With a window, what was printed before it does not count.
        value = copy.printed.last if opened is None else copy.printed.mean_between(opened, closed)
        program = copy.program
        since = -math.inf if opened is None else opened
        was_interrupted = interrupted and copy.ended_by_us
        ended = closed if copy.ended_by_us or program.ended is None else program.ended
        return CopyResult(
            copy=copy.number,
            pid=program.pid,
            seconds=ended - program.started,
            exit_code=None if copy.ended_by_us else program.status,
            value=value if self.metric.printed else None,
            latencies=tuple(within(copy.printed.latencies, since, math.inf)),
            latency_p50=copy.printed.latency(50, since),
            latency_p99=copy.printed.latency(99, since),
            failure="interrupted" if was_interrupted else self._failure(copy, value, opened, hung=hung),
            last_line=program.last_line or None,
        )

    def _failure(self, copy: _Copy, value: float | None, opened: float | None, *, hung: bool) -> str | None:
        """Return why the figures of a copy do not count; None: they do."""
        window = self.window
        if not copy.ended_by_us and copy.program.failure is not None:
            return copy.program.failure
        if copy.left_behind:
            pids = ", ".join(map(str, copy.left_behind))
            return f"ended, but left process {pids} behind, which was not measured and was ended; the program must stay in the foreground"
        if self.slice_us is not None and not copy.sliced:
            return f"its time-slice was not set: {copy.unsliced or 'it had no CUDA context'}"
        if copy.ended_by_us and hung:
            if window is not None and not copy.printed.values:
                return f"{_NO_NUMBER} in {self.limit:g} s"
            return f"did not end within {self.limit:g} s"
        if window is not None and not copy.ended_by_us:
            return f"ended before it was measured for {window:g} s"
        if self.metric.printed and value is None:
            when = "" if opened is None else f" in the measured {window:g} s"
            return f"{_NO_NUMBER}{when}"
        return None


_NO_NUMBER: Final = "printed no rate or time that --metric matches"
# A cell that failed this often is not tried again.
_MOST_FAILURES: Final = 2
# A copy hangs when it takes this much longer than all of them in turn would.
_HANG_FACTOR: Final = 5.0
_HANG_SECONDS: Final = 60.0
# Limits for one copy alone, before anything is known: how long it may run, and when it must have printed its number.
_FIRST_SECONDS: Final = 86400.0
_FIRST_PRINT_SECONDS: Final = 600.0

_OUTSIDE: Final = BenchWay(name=ALONE, kind=Way.WHOLE)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and how. ``in_one``: the options that make one process do the work of N copies, by way."""

    argv: Sequence[str]
    metric: Metric
    cells: Sequence[Cell] = ()
    # The way under which one copy alone is measured.
    alone: BenchWay = _OUTSIDE
    repeat: int = 3
    window: float | None = None
    # None: derived from how long one copy takes.
    limit: float | None = None
    in_one: Mapping[str, Sequence[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    # The built-in one; None: a command.
    workload: BuiltInWorkload | None = None

    @property
    def alone_cell(self) -> Cell:
        return self.alone, 1


@dataclass
class Measurement:
    """All that was measured; kept even if it was interrupted."""

    settings: Settings
    runs: list[RunResult] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    rounds_done: int = 0
    interrupted: bool = False
    # The signal that has interrupted it.
    signal: int | None = None
    # What else ended it early.
    error: GpushareError | None = None
    seconds: float = 0.0

    def runs_of(self, cell: Cell) -> list[RunResult]:
        """Return the runs that measure a cell: its own, or those of an equivalent one."""
        way, copies = measuring_cell(cell, self.settings)
        return [run for run in self.runs if (run.way, run.copies) == (way.name, copies)]


def measuring_cell(cell: Cell, settings: Settings) -> Cell:
    """Return the cell whose runs measure this one: itself, or an equivalent one, so that nothing is measured twice."""
    way, copies = cell
    outside = way.kind in {Way.WHOLE, Way.TIMESLICE, Way.SLICES, *IN_ONE} and settings.alone.kind is Way.WHOLE
    # One copy shares with nobody; and in turn, the printed rate of several is that of one.
    if outside and (copies == 1 or (way.kind is Way.WHOLE and settings.window is not None)):
        return settings.alone_cell
    if way.kind is Way.MPS and way.percent is not None and way.cap(copies) is None:
        # A cap of 100 % and more is none.
        way = BenchWay(name=Way.MPS.value, kind=Way.MPS)
    if settings.alone.kind == way.kind and copies == 1 and way.cap(1) is None:
        return settings.alone_cell
    return way, copies


def schedule(settings: Settings) -> list[Cell]:
    """Return what is run in each round: one copy alone, and every cell once."""
    return list(dict.fromkeys([settings.alone_cell, *(measuring_cell(cell, settings) for cell in settings.cells)]))


def planned_steps(host: Host, device: Device, settings: Settings) -> tuple[Step, ...]:
    """Return what a round would run, to be shown: the start of an MPS daemon where one is needed, and each cell once."""
    cells = schedule(settings)
    steps = list(Grounds(host, device, settings.argv[0]).steps_to_restore_level())
    if any(way.kind is Way.MPS for way, _ in cells):
        steps += MpsShare(host, device, Limits()).steps()
    # Levels are set for each run, and set back after it.
    for level in dict.fromkeys(way.level for way, _ in cells if way.level is not None):
        steps += plan_level(host, [device], level, beside_mps=True).steps
    for way, copies in cells:
        title = f"run {format_copies(copies)} under {way.name}, {counted(settings.repeat, 'time')}"
        steps.append(step_of_run(title, shlex.join(settings.argv)))
    return tuple(steps)


class Bench:
    """Carries out a benchmark. ``progress`` gets, before each run, its title, its number, how many, and the seconds left."""

    def __init__(
        self,
        host: Host,
        device: Device,
        settings: Settings,
        experiment: Experiment,
        signals: Wakeups,
        progress: Callable[[str, int, int, float | None], None],
    ) -> None:
        self._host = host
        self._device = device
        self._settings = settings
        self._experiment = experiment
        self._signals = signals
        self._progress = progress
        # How long the last run of a cell took, in seconds.
        self._took: dict[Cell, float] = {}
        # When processes of others were first seen on the GPU, by PID.
        self._strangers: dict[int, float] = {}
        self.measurement = Measurement(settings=settings)

    def measure(self) -> Measurement:
        """Run one copy alone as a warm-up, then all rounds; an error after the first run is kept with the result."""
        measurement = self.measurement
        total = 1 + len(schedule(self._settings)) * self._settings.repeat
        until = "it ends" if self._settings.window is None else "it prints a number"
        self._progress(f"warm-up: one copy alone, until {until}", 0, total, None)
        warm = self._run_cell(0, self._settings.alone_cell)
        if warm.result.interrupted:
            measurement.interrupted = True
        elif warm.failures:
            last = next((copy.last_line for copy in warm.result.copies if copy.last_line), None)
            shown = "it printed nothing at all" if last is None else f"its last line: {last}"
            raise OperationFailed(
                f"one copy alone failed: {warm.failures[0]}",
                f"run it alone by hand ({shown}); one that does not end needs --metric and --for, a slow one --timeout",
                code="command_failed",
            )
        elif not warm.throughput:
            raise OperationFailed(
                "one copy alone printed a rate of 0, so nothing can be compared with it",
                "let --metric match the rate while it works; or measure longer: --for 10s",
                code="command_failed",
            )
        else:
            try:
                self._leave_out_too_large(warm)
                self._run_rounds(schedule(self._settings))
            except GpushareError as error:
                if not measurement.runs:
                    raise
                # Keep what was measured.
                measurement.error = error
        return measurement

    def _run_rounds(self, cells: list[Cell]) -> None:
        """Run all cells in each round, back and forth; one that fails twice is left out."""
        measurement = self.measurement
        repeat = self._settings.repeat
        # How often a cell has failed.
        failed: dict[Cell, int] = {}
        # With the warm-up.
        done = 1
        total = 1 + len(cells) * repeat
        for number in range(1, repeat + 1):
            # Back and forth: drift over time (clocks, temperature) then affects the first and the last cell alike.
            order = cells if number % 2 else cells[::-1]
            for place, cell in enumerate(order):
                if failed.get(cell, 0) >= _MOST_FAILURES:
                    done += 1
                    continue
                way, copies = cell
                what = ALONE if way.name == ALONE else f"{way.name}, {format_copies(copies)}"
                title = f"{what}, round {number} of {repeat}"
                rest = [*order[place:], *cells * (repeat - number)]
                self._progress(title, done, total, sum(map(self._expected_seconds, rest)))
                run = self._run_cell(number, cell)
                if run.result.interrupted:
                    measurement.interrupted = True
                    return
                measurement.runs.append(run)
                done += 1
                if run.failures:
                    # A hanging run costs too much to be tried again.
                    failed[cell] = _MOST_FAILURES if run.result.hung else failed.get(cell, 0) + 1
            measurement.rounds_done = number

    def _expected_seconds(self, cell: Cell) -> float:
        """Return the seconds that a cell should take, for the progress line: as before, else by one copy alone."""
        if cell in self._took:
            return self._took[cell]
        alone = self._took.get(self._settings.alone_cell, 1.0)
        way, copies = cell
        # With a window every run takes as long; else time-sliced copies take about as long as in turn.
        if self._settings.window is not None or way.kind is Way.MIG:
            return alone
        return alone * copies

    def _leave_out_too_large(self, warm: RunResult) -> None:
        """Leave out copies without room, by the memory of one copy alone."""
        settings = self._settings
        peak = warm.usage.memory_peak_bytes
        total = self._device.memory_total_bytes

        def why_too_large(way: BenchWay, number: int) -> str | None:
            way, copies = measuring_cell((way, number), settings)
            # In turn, or each in an instance of its own, copies do not share memory.
            at_once = 1 if way.kind in {Way.WHOLE, Way.MIG} else copies
            if peak is None or total is None or peak * at_once <= total:
                return None
            return f"{copies} copies need {format_bytes(peak * copies)}, {self._device.title} has {format_bytes(total)}"

        cells, left_out = sort_out(settings.cells, why_too_large)
        self._settings = self.measurement.settings = replace(settings, cells=cells)
        self.measurement.left_out += left_out

    def _run_cell(self, number: int, cell: Cell) -> RunResult:
        """Run the copies of a cell under its way, and return what was measured."""
        way, copies = cell
        before = time.monotonic()
        meter = self._new_meter(cell)
        settings = self._settings
        runner = Copies(
            self._experiment,
            settings.metric,
            self._signals,
            window=settings.window,
            limit=self._hang_seconds(copies),
            slice_us=way.slice_us,
        )
        level = contextlib.nullcontext() if way.level is None else temporary_level(self._host, self._device, way.level)
        with level:
            launches = self._launches(way, copies)
            result = (
                runner.run_in_turn(launches, meter) if way.kind is Way.WHOLE else runner.run_together(launches, meter)
            )
            self._experiment.restore_slices()
        self._took[cell] = time.monotonic() - before
        usage = meter.usage()
        invalid = self._experiment.grounds.why_mps_failed() if self._under_mps(way) else None
        if invalid is None and usage.outside:
            invalid = f"process {', '.join(map(str, usage.outside))} ran outside MPS"
        return RunResult(
            round=number,
            way=way.name,
            copies=copies,
            result=result,
            throughput=None if invalid is not None else throughput(way, result, settings.metric),
            usage=usage,
            invalid=invalid,
        )

    def _new_meter(self, cell: Cell) -> UsageMeter:
        """Return the meter of memory, energy and other processes for a run; of one copy alone, of GPU activity too."""
        way, _ = cell
        grounds = self._experiment.grounds
        return UsageMeter(
            self._host,
            self._device,
            clients=grounds.clients if self._under_mps(way) else None,
            gpu_instances=grounds.gpu_instances if way.kind is Way.MIG else None,
            seen=self._strangers,
            activity=cell == self._settings.alone_cell and self._device.mig is None,
        )

    def _under_mps(self, way: BenchWay) -> bool:
        """Return whether the copies are MPS clients: also those of other ways, if no program but clients gets in."""
        has_mps = self._experiment.grounds.has_mps
        return way.kind is Way.MPS or (has_mps and way.kind is not Way.MIG and one_at_a_time(self._device))

    def _launches(self, way: BenchWay, copies: int) -> list[Launch]:
        """Return how to start the copies under a way."""
        settings = self._settings
        grounds = self._experiment.grounds
        argv = settings.argv
        number = copies
        if way.kind in IN_ONE:
            argv = [*argv, *(word.replace("{}", str(copies)) for word in settings.in_one[way.name])]
            number = 1
        if way.kind is Way.MIG:
            environments = grounds.environments_of_instances(number, settings.environment)
        else:
            cap = way.cap(copies) if way.kind is Way.MPS else None
            limits = Limits(threads_percent=cap) if self._under_mps(way) else None
            environments = [grounds.environment(limits, settings.environment)] * number
        return [Launch(argv=argv, environment=environment) for environment in environments]

    def _hang_seconds(self, copies: int) -> float:
        """Return after how many seconds a run counts as hung: as given, else by how long one copy alone took."""
        if self._settings.limit is not None:
            return self._settings.limit
        alone = self._took.get(self._settings.alone_cell)
        if alone is None:
            return _FIRST_SECONDS if self._settings.window is None else _FIRST_PRINT_SECONDS
        return _HANG_SECONDS + _HANG_FACTOR * alone * copies


def throughput(way: BenchWay, result: CopiesResult, metric: Metric) -> float | None:
    """Return the throughput of all copies together, or None when one failed.

    Without a printed number it is runs per second, from the first start to the last end. Printed rates add up; in
    turn, they are weighted by the time that each copy ran.
    """
    if result.failures or result.interrupted or not result.copies or result.seconds <= 0:
        return None
    if not metric.printed:
        return len(result.copies) / result.seconds
    values = [(copy.value, copy.seconds) for copy in result.copies if copy.value is not None]
    if way.kind is not Way.WHOLE:
        return metric.together([value for value, _ in values])
    total = sum(seconds for _, seconds in values)
    speeds = [(metric.speed(value), seconds) for value, seconds in values if value > 0]
    if not speeds or total <= 0:
        return None
    return metric.speed(sum(speed * seconds for speed, seconds in speeds) / total)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What can be measured and what cannot; nothing is set up yet."""

    settings: Settings
    left_out: Sequence[LeftOut]
    notes: Sequence[str] = ()


def prepare(host: Host, device: Device, wished: Settings) -> Prepared:
    """Return what can be measured here of what the user wants, and why the rest cannot; nothing is changed.

    Raises:
        NotSupported: none of the ways can run here.
        NotFound, NoPermission: the program does not exist, or cannot be executed.
    """
    check_program(wished.argv[0])
    obstacles = find_obstacles(host, device, wished.argv[0], in_one=bool(wished.in_one))
    alone = _way_of_one_copy(obstacles, {way.kind for way, _ in wished.cells})
    profiles = Counter(instance.profile for instance in device.gpu.mig_instances)
    most = max(profiles.values(), default=0)
    cells, left_out = sort_out(
        wished.cells,
        lambda way, copies: obstacles.why_not_copies(way, copies) or _why_no_instances(way, copies, most),
        obstacles.why_not,
    )
    if alone is None or not cells:
        reason = "; ".join(dict.fromkeys(f"{cell.way}: {cell.reason}" for cell in left_out)) or "none was given"
        raise NotSupported(
            f"none of these ways can run on {device.title}: {reason}", "see: gpushare doctor", code="no_way"
        )
    settings = replace(wished, cells=cells, alone=alone)
    uncapped = any(way.kind is Way.MPS and way.cap(copies) is None for way, copies in schedule(settings))
    notes = default_limit_notes(host, device) if uncapped else ()
    return Prepared(settings=settings, left_out=left_out, notes=notes)


def default_limit_notes(host: Host, device: Device) -> tuple[str, ...]:
    """Return a note if the running MPS daemon caps each client: way mps is then capped too."""
    try:
        home, _ = own_daemon(host, device)
        percent = MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS).threads()
    except GpushareError:
        return ()
    if percent is None or percent >= 100:
        return ()
    undo = f"gpushare mps set -g {device.selector} --threads 100"
    return (
        f"the MPS daemon of {device.title} caps each client at {percent:g} %, so way mps is capped too; to lift the cap: {undo}",
    )


def _way_of_one_copy(obstacles: Obstacles, kinds: set[str]) -> BenchWay | None:
    """Return the way of one copy alone: outside MPS if possible, else under a requested way."""
    if obstacles.outside is None:
        return _OUTSIDE
    if obstacles.mps is None and Way.MPS in kinds:
        return BenchWay(name=Way.MPS.value, kind=Way.MPS)
    return BenchWay(name=Way.MIG.value, kind=Way.MIG) if obstacles.mig is None and Way.MIG in kinds else None


def _why_no_instances(way: BenchWay, copies: int, free: int) -> str | None:
    """Return why there are too few MIG instances for copies in one each; None: there are enough, or none is needed."""
    if way.kind is not Way.MIG or copies <= free:
        return None
    have = f"there {'is' if free == 1 else 'are'} {free}"
    return f"{format_copies(copies)} need {counted(copies, 'free MIG instance')} of one profile, and {have}"


def measure(
    host: Host,
    device: Device,
    prepared: Prepared,
    progress: Callable[[str, int, int, float | None], None] = lambda *_: None,
) -> Measurement:
    """Measure, and return what was measured, also if a signal ends it early."""
    settings = prepared.settings
    cells = (settings.alone_cell, *settings.cells)
    instances_needed = max((copies for way, copies in cells if way.kind is Way.MIG), default=0)
    started = time.monotonic()
    # Around set-up and clean-up: no signal interrupts either.
    with Wakeups() as signals:
        grounds = Grounds(host, device, settings.argv[0])
        grounds.open(mps=any(way.kind is Way.MPS for way, _ in schedule(settings)), instances=instances_needed)
        with Experiment(host, grounds) as experiment:
            free = len(grounds.instances)
            kept, left_out = sort_out(settings.cells, lambda way, copies: _why_no_instances(way, copies, free))
            if (settings.alone.kind is Way.MIG and not free) or not kept:
                raise NotSupported(
                    "no MIG instance without a name is free",
                    "see the instances: gpushare mig status",
                    code="no_free_instance",
                )
            bench = Bench(host, device, replace(settings, cells=kept), experiment, signals, progress)
            bench.measurement.left_out += [*prepared.left_out, *left_out]
            measurement = bench.measure()
    measurement.seconds = time.monotonic() - started
    measurement.signal = signals.first if measurement.interrupted else None
    return measurement
