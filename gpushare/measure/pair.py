"""A production job and opportunistic ones next to it, as tune measures them: start, warm-up, windows."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError, OperationFailed, TimedOut
from gpushare.base.units import counted, quoted
from gpushare.host.activity import ActivityRecorder, BandwidthRecorder, utilization
from gpushare.measure.metric import Metric, Printed, hopeless, within
from gpushare.measure.search import Search
from gpushare.measure.statistics import percentile, ratio
from gpushare.measure.usage import UsageMeter
from gpushare.mps.limits import Limits
from gpushare.run.results import CAPS, SLICES
from gpushare.run.several import Program, Several, peak_memory

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host
    from gpushare.run.plain import PlainShare


WINDOW_SECONDS: Final = 1.5
# For jobs that print at least ten times a second.
SHORTEST_SECONDS: Final = 0.6
LONGEST_SECONDS: Final = 30.0
# A window is this many times as long as the longest gap between two outputs.
_GAPS: Final = 6
# A job that saves its state from time to time prints nothing meanwhile; a window of silence says little.
_SILENCES: Final = 2
_LONGEST_FOR_SILENCE_SECONDS: Final = 10.0
# Production is watched next to the other job for at least this time, in at least this many windows.
_WATCHED_SECONDS: Final = 4.8
_LEAST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 8
_TIMES: Final = 3
# A percentile needs far more requests than a rate needs windows.
_TIMES_FOR_P99: Final = 4


class WindowLength:
    """The length of a window in seconds: ``given``, or found. With a p99 goal it is not shortened."""

    def __init__(self, given: float | None, *, tails: bool) -> None:
        self.seconds = WINDOW_SECONDS if given is None else given
        self._tails = tails
        self._given = given is not None
        self._open = given is None and not tails
        self._gap = self._silence = 0.0

    def hold(
        self, least: int, moments: Sequence[float], start: float, end: float, longest: float = LONGEST_SECONDS
    ) -> None:
        """Make it long enough for ``least`` outputs of a job; ``moments`` are the outputs from ``start`` to ``end``."""
        wanted = least * (end - start) / len(moments) if moments else end - start
        self.seconds = max(self.seconds, min(wanted, longest))
        self._gap = max(self._gap, *(after - before for before, after in pairwise([start, *moments, end])))

    def shorten(self) -> None:
        """Make it as short as the jobs watched so far allow; once, and never if it was given."""
        if self._open and self.seconds <= WINDOW_SECONDS:
            self.seconds = min(self.seconds, max(SHORTEST_SECONDS, _GAPS * self._gap))
        self._open = False

    def silent(self, seconds: float) -> None:
        """Remember how long production, alone, printed nothing."""
        self._silence = max(self._silence, seconds)

    def outlast(self) -> None:
        """Make it longer than the silences so far; only between trials, so that all windows of a trial are equal."""
        if not self._given and self._silence > self.seconds:
            self.seconds = max(self.seconds, min(_SILENCES * self._silence, _LONGEST_FOR_SILENCE_SECONDS))

    def rounds(self, given: int | None) -> int:
        """Return the fewest windows together of a trial; fewer if they are long."""
        if given is not None:
            return given
        return min(_MOST_ROUNDS, max(_LEAST_ROUNDS, round(_WATCHED_SECONDS / self.seconds)))

    def most_rounds(self, given: int | None, rounds: int) -> int:
        """Return the most windows together of a trial."""
        return (_TIMES_FOR_P99 if self._tails else _TIMES) * rounds if given is None else given


# Below this number, the 99th percentile is the largest of a handful.
LEAST_LATENCIES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Window:
    """A period in which a program was watched: its rate, latencies, and a p99 that it printed itself."""

    rate: float | None
    latencies: tuple[float, ...] = ()
    printed_p99: float | None = None


@dataclass(frozen=True, kw_only=True)
class OtherAlone:
    """The opportunistic job alone: its rate, the DRAM bandwidth and SMs that it uses in percent, and its memory in bytes.

    ``peak`` is the memory of the largest copy. ``unsliced`` is why the time-slice of its MPS server cannot be set.
    """

    rate: float | None = None
    dram: float | None = None
    sm: float | None = None
    busy: float | None = None
    memory: int | None = None
    peak: int | None = None
    unsliced: GpushareError | None = None


@dataclass
class Timeline(Printed):
    """What a program prints, over time; with the lines, if lines are counted."""

    lines: list[float] = field(default_factory=list)

    def listen(self, line: str, at: float) -> None:
        """Take in a line; as `Printed.listen`."""
        if not self.metric.printed:
            self.lines.append(at)
        super().listen(line, at)

    def count(self, start: float, end: float) -> int:
        """Return the number of rates, or lines, in a window."""
        return len(within(self.values, start, end)) if self.metric.printed else _count(self.lines, start, end)

    def moments(self, start: float, end: float) -> list[float]:
        """Return when rates, or lines, were seen in a window; those seen together, as from a buffer, are one moment."""
        if self.metric.printed:
            first = bisect.bisect_right(self.values, start, key=lambda value: value[0])
            times = [at for at, _ in self.values[first:]]
        else:
            times = self.lines[bisect.bisect_right(self.lines, start) :]
        return sorted({at for at in times if at <= end})

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest gap in the output that ended in a window, or lasts beyond it."""
        before = self.moments(start - LONGEST_SECONDS, start)[-1:] or [start]
        return max(after - one for one, after in pairwise([*before, *self.moments(start, end), end]))

    @property
    def last_at(self) -> float | None:
        """Return when the last rate, or line, was seen."""
        if self.metric.printed:
            return self.values[-1][0] if self.values else None
        return self.lines[-1] if self.lines else None

    def window(self, start: float, end: float, *, skip: int = 0) -> Window:
        """Return what was seen in a window: the mean of the printed rates, or lines per second.

        The first ``skip`` rates are left out: the first one after a pause may include the pause.
        """
        if self.metric.printed:
            speeds = self._speeds(start, end, skip=skip)
            rate = sum(speeds) / len(speeds) if speeds else None
        else:
            done = self._done(end) - self._done(start)
            rate = done / (end - start) if done > 0 and end > start else None
        p99s = within(self.percentiles[99], start, end)
        return Window(
            rate=rate,
            latencies=tuple(within(self.latencies, start, end)),
            printed_p99=percentile(p99s, 50) if p99s else None,
        )

    def _speeds(self, start: float, end: float, *, skip: int = 0) -> list[float]:
        """Return the printed rates of a window, without the first ``skip``."""
        # A rate of 0 counts: the program was held up. A time of 0 per step is invalid.
        rated = self.metric.higher_is_better
        values = [value for value in within(self.values, start, end)[skip:] if value > 0 or (rated and value == 0)]
        return [self.metric.speed(value) for value in values]

    def _done(self, at: float) -> float:
        """Return how many lines were done at a time, with even progress between two of them."""
        place = bisect.bisect_right(self.lines, at)
        if place == 0 or (place < 2 and place == len(self.lines)):
            return float(place)
        before = self.lines[place - 1]
        # The next line is expected after the last gap.
        gap = self.lines[place] - before if place < len(self.lines) else before - self.lines[place - 2]
        return place + (min(1.0, (at - before) / gap) if gap > 0 else 0.0)


def p99(windows: Sequence[Window]) -> float | None:
    """Return the 99th percentile over all windows; without latencies, the one that the program printed."""
    latencies = _latencies(windows)
    if len(latencies) >= LEAST_LATENCIES:
        return percentile(latencies, 99)
    printed = [window.printed_p99 for window in windows if window.printed_p99 is not None]
    return percentile(printed, 50) if printed else None


def _latencies(windows: Sequence[Window]) -> list[float]:
    return [latency for window in windows for latency in window.latencies]


def _count(times: Sequence[float], start: float, end: float) -> int:
    return bisect.bisect_right(times, end) - bisect.bisect_right(times, start)


def p99_interval(windows: Sequence[Window]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the 99th percentile; None: too few latencies.

    By the ranks of the latencies: how many of n lie above their 99th percentile is binomial.
    """
    latencies = sorted(_latencies(windows))
    count = len(latencies)
    middle, width = 0.99 * count, 1.96 * math.sqrt(count * 0.99 * 0.01)
    low, high = math.floor(middle - width), math.ceil(middle + width)
    if low < 1 or high > count:
        return None
    return latencies[low - 1], latencies[high - 1]


def p99_factor_interval(alone: Sequence[Window], together: Sequence[Window]) -> tuple[float, float] | None:
    """Return the interval of the p99 together as a factor of the p99 alone; None: too few latencies.

    If the program printed its p99 itself, the interval comes from the spread between windows.
    """
    before, now = p99_interval(alone), p99_interval(together)
    if before is not None and now is not None:
        return now[0] / before[1], now[1] / before[0]
    if max(len(_latencies(alone)), len(_latencies(together))) >= LEAST_LATENCIES:
        return None
    apart = ratio(*([one.printed_p99 for one in some if one.printed_p99 is not None] for some in (together, alone)))
    if apart is None or apart.low is None or apart.high is None:
        return None
    # The factor is of medians; they scatter around it as around the mean.
    factor = (p99(together) or 0.0) / (p99(alone) or math.inf)
    return factor * apart.low / apart.value, factor * apart.high / apart.value


def neighbours(alone: Sequence[Window], together: Sequence[Window]) -> list[tuple[float, float]]:
    """Return the rate in each window together, and the mean of the windows alone right before and after it.

    The other job started after the first window alone, which therefore counts only if there is no other.
    """
    found = []
    for place, window in enumerate(together):
        # A production job that makes no progress has a rate of 0, not an unknown one, both together and alone.
        near = [one.rate or 0.0 for one in alone[max(1, place) : place + 2] or alone[:1]]
        found.append((window.rate or 0.0, math.fsum(near) / len(near)))
    return found if any(base for _, base in found) else []


def rates(windows: Sequence[Window]) -> list[float]:
    """Return the rates of the windows that have one."""
    return [window.rate for window in windows if window.rate is not None and window.rate > 0]


# A window needs this many outputs of production; fewer of the other job, whose rate matters less.
_LEAST_MOMENTS: Final = 5
_LEAST_MOMENTS_OF_OTHER: Final = 3
_LONGEST_FOR_OTHER_SECONDS: Final = 5.0
_LONGEST_ALONE_SECONDS: Final = 15.0


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to run and how long to watch (seconds), with ``rounds`` to ``most_rounds`` pairs of windows per trial.

    None: depending on the output of the jobs (`WindowLength`), with more windows where the figures scatter.
    """

    production: Sequence[str]
    opportunistic: Sequence[str]
    search: Search
    metric: Metric = field(default_factory=Metric)
    opportunistic_metric: Metric = field(default_factory=Metric)
    # Copies of the opportunistic job that run together.
    copies: int = 1
    ways: Sequence[str] = (SLICES, CAPS)
    window_seconds: float | None = None
    rounds: int | None = None
    most_rounds: int | None = None
    settle_seconds: float = 0.4
    warm_seconds: float = 1.0
    start_seconds: float = 600.0
    # How long a pause waits for a queue to drain; the deepest one on an H200 took 0.1 s.
    drain_seconds: float = 1.5


@dataclass
class Others:
    """Copies of the opportunistic job that run together: started, paused and ended as one, and their rates add up."""

    programs: list[Program] = field(default_factory=list)
    seen: list[Timeline] = field(default_factory=list)

    def rate(self, start: float, end: float, *, skip: int = 0) -> float | None:
        """Return their rate in a window, as `Timeline.window`; None if none printed, or with ``skip`` if one did not."""
        rates = [one.window(start, end, skip=skip).rate for one in self.seen]
        known = [rate for rate in rates if rate is not None]
        return math.fsum(known) if known and (not skip or len(known) == len(rates)) else None

    def moments(self, start: float, end: float) -> list[float]:
        """Return when the one that prints least printed in a window."""
        return min((one.moments(start, end) for one in self.seen), key=len)


class Pair:
    """Both jobs, watched in windows, which `tune` judges. With ``outside`` production runs there, else in the share."""

    def __init__(
        self, host: Host, device: Device, options: TuneOptions, several: Several, outside: PlainShare | None = None
    ) -> None:
        self._host, self._device, self._options, self.several = host, device, options, several
        self._outside = outside
        self._bandwidth = BandwidthRecorder(host.nvml, device.gpu.index)
        self._activity = ActivityRecorder(host.nvml, device.gpu.index)
        self._window = WindowLength(options.window_seconds, tails=options.search.goal.p99_factor is not None)
        self.production: Program | None = None
        self._seen = Timeline(options.metric)
        # Percent of the time in which production alone keeps the GPU busy; None: unknown.
        self.busy: float | None = None
        self.dram: list[float] = []
        # Percent of the SMs that production alone keeps busy, by window.
        self.sm: list[float] = []
        self.memory: int | None = None
        self._usage = UsageMeter(host, device)
        # When the opportunistic job was last continued after a pause; None: never paused.
        self._resumed: float | None = None

    def alone(self, others: Others) -> OtherAlone:
        """Measure the opportunistic job without production."""
        self._bandwidth.since_last()
        self._activity.since_last()
        started = self._now()
        self.several.wait(2 * self._window.seconds)
        # A job that prints seldom is watched until it has printed several times.
        more = _LONGEST_ALONE_SECONDS - 2 * self._window.seconds

        def told() -> bool:
            ended = not all(program.runs for program in others.programs)
            return ended or len(others.moments(started, time.monotonic())) >= _LEAST_MOMENTS_OF_OTHER

        self.several.wait(more, told)
        self.demand_alive(*others.programs)
        ended = time.monotonic()
        rate, moments = others.rate(started, ended), others.moments(started, ended)
        dram, sm = self._bandwidth.since_last(), self._activity.since_last()
        busy = utilization(self._host.nvml, self._device.gpu.index)
        self._window.hold(_LEAST_MOMENTS_OF_OTHER, moments, started, ended, _LONGEST_FOR_OTHER_SECONDS)
        sizes = [peak_memory(self._host, self._device, program) for program in others.programs]
        known = [size for size in sizes if size is not None]
        if rate == 0:
            raise OperationFailed(
                "the opportunistic job alone printed only rates of 0: it does no measurable work",
                "let it print its rate of work: rate=12.5; or match another number: --opportunistic-metric REGEX",
                code="no_numbers",
            )
        return OtherAlone(
            rate=rate,
            dram=dram,
            sm=sm,
            busy=busy,
            memory=sum(known) if known and len(known) == len(sizes) else None,
            peak=max(known, default=None),
        )

    def start_others(self, limits: Limits) -> Others:
        """Start the opportunistic job under these limits and wait until it prints; errors as `tune`."""
        others = Others()
        for _ in range(self._options.copies):
            seen = Timeline(self._options.opportunistic_metric)
            program = self.several.start(
                "opportunistic", self._options.opportunistic, limits, listen=seen.listen, redrawn=True
            )
            others.programs.append(program)
            others.seen.append(seen)
        for program, seen in zip(others.programs, others.seen, strict=True):
            self._until_warm(program, seen)
        return others

    def pause(self, others: Others) -> None:
        """Stop the opportunistic job, and wait until its work on the GPU is done."""
        self.several.pause(*others.programs, bound_seconds=self._options.drain_seconds)

    def resume(self, others: Others) -> None:
        """Let the opportunistic job continue after a pause, and wait until it works as before."""
        self._resumed = time.monotonic()
        for program in others.programs:
            self.several.resume(program)
        self.several.wait(self._options.settle_seconds)

    def start_production(self) -> None:
        """Start the production job, and wait until it prints."""
        self.production = self.several.start(
            "production",
            self._options.production,
            Limits(),
            listen=self._seen.listen,
            redrawn=True,
            outside=self._outside,
        )
        self._until_warm(self.production, self._seen)
        self._fit()

    def _until_warm(self, program: Program, seen: Timeline) -> None:
        """Wait until a job prints what is measured, and a while longer."""
        options, started = self._options, time.monotonic()

        def ready() -> bool:
            self.demand_alive(program)
            found = seen.count(0.0, float("inf")) > 0
            if not found and hopeless(seen.refusals, time.monotonic() - started):
                raise OperationFailed(
                    f"the {program.title} job printed {quoted(seen.refused or '')} where --metric matches, which is not a rate or time",
                    "put the brackets around the number: --metric 'rate=([0-9.]+)'",
                    code="no_numbers",
                )
            return found

        if not self.several.wait(options.start_seconds, ready):
            what = "a line" if not seen.metric.printed else "a number that --metric matches"
            raise TimedOut(
                f"the {program.title} job did not print {what} in {options.start_seconds:g} s"
                f"{f'; its last line: {program.last_line}' if program.last_line else ''}",
                "let it print its rate repeatedly, and give --metric 'rate=([0-9.]+)'; or more time: --timeout 20m",
                code="no_numbers",
            )
        self.several.wait(options.warm_seconds)
        self.demand_alive(program)
        if self.several.attached(program) is False:
            raise OperationFailed(
                f"the {program.title} job is not an MPS client: caps have no effect on it",
                "check that it uses the GPU and does not change CUDA_MPS_PIPE_DIRECTORY or CUDA_VISIBLE_DEVICES",
                code="not_attached",
            )

    def demand_alive(self, *programs: Program | None) -> None:
        """Raise OperationFailed if a program, or production, has ended."""
        for program in (*programs, self.production):
            if program is not None and not program.runs:
                raise OperationFailed(
                    f"the {program.title} job ended before it was measured: {program.failure or 'exit code 0'}",
                    "give a command that runs until it is ended, at least for some minutes",
                    code="job_ended",
                )

    def _fit(self) -> None:
        """Make the windows long enough for the production job to print several times in each, and no longer."""
        started = time.monotonic()
        while True:
            self.several.wait(self._window.seconds)
            self.demand_alive()
            ended = time.monotonic()
            moments = self._seen.moments(started, ended)
            if len(moments) >= _LEAST_MOMENTS:
                self._window.hold(_LEAST_MOMENTS, moments, started, ended)
                self._window.shorten()
                self.busy = utilization(self._host.nvml, self._device.gpu.index)
                return
            if ended - started > 3 * LONGEST_SECONDS:
                raise TimedOut(
                    f"the production job printed only {counted(len(moments), 'number')} in {ended - started:.0f} s",
                    "let it print its rate at least once a second",
                    code="no_numbers",
                )

    def begin_trial(self) -> None:
        """Make the windows longer than the silences of production so far."""
        self._window.outlast()

    @property
    def request_us(self) -> float | None:
        """Return how long a request of production took so far (median, microseconds); None: it does not say."""
        latencies = [value for _, value in self._seen.latencies]
        unit = self._seen.latency_us
        return None if unit is None or not latencies else unit * percentile(latencies, 50)

    @property
    def window_seconds(self) -> float:
        """Return the length of a window in seconds."""
        return self._window.seconds

    @property
    def rounds(self) -> int:
        """Return the fewest windows together of a trial."""
        return self._window.rounds(self._options.rounds)

    @property
    def most_rounds(self) -> int:
        """Return the most windows together of a trial."""
        return self._window.most_rounds(self._options.most_rounds, self.rounds)

    @property
    def silent_seconds(self) -> float:
        """Return how long production has printed no rate or line."""
        last = self._seen.last_at
        return math.inf if last is None else time.monotonic() - last

    def alone_window(self) -> Window:
        """Watch the production job while the other does not run or is paused."""
        self._bandwidth.since_last()
        self._activity.since_last()
        started = self._now()
        self.several.wait(self._window.seconds)
        self.demand_alive()
        ended = time.monotonic()
        window = self._seen.window(started, ended)
        self._window.silent(self._seen.longest_gap(started, ended))
        for recorder, values in ((self._bandwidth, self.dram), (self._activity, self.sm)):
            used = recorder.since_last()
            if used is not None:
                values.append(used)
        if self.production is not None:
            memory = peak_memory(self._host, self._device, self.production)
            self.memory = memory if self.memory is None else max(self.memory, memory or 0)
        return window

    def together_window(self, others: Others) -> tuple[Window, float | None, float | None]:
        """Watch both; return the production job's window, and two rates of the opportunistic job.

        The first rate is without the first number after a pause, which may include the pause, and None if that is the only
        one; the second rate is with it.
        """
        started = self._now()
        self.several.wait(self._window.seconds)
        self.demand_alive(*others.programs)
        ended = time.monotonic()
        production = self._seen.window(started, ended)
        spans = self._resumed is not None and not others.moments(self._resumed, started)
        return production, others.rate(started, ended, skip=int(spans)), others.rate(started, ended)

    @property
    def strangers(self) -> Mapping[int, str]:
        """Return the other processes on the GPU, by PID."""
        return self._usage.usage().other_names

    def _now(self) -> float:
        """Read everything printed so far, which belongs to the past, and return the time."""
        self.several.look()
        self._usage.look([program.pid for program in self.several.programs])
        return time.monotonic()
