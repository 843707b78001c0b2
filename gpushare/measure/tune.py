"""`gpushare tune`: a production job runs all the time, next to opportunistic ones under one setting after another.

There are two ways, as `run` applies them: production outside MPS, and the others in one MPS daemon whose server has one
time-slice; or all under MPS, with thread caps on the others. Each has its own production process. A slice is set while both
run. A cap is fixed when a context is created, so the opportunistic job restarts for every trial. Within a trial it is paused
(SIGSTOP) and continued, so that windows alone and together alternate for the same production process: processes of one
program differ by up to 15 percent, windows of one process do not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError, InUse, NotSupported, OperationFailed
from gpushare.base.model import Priority
from gpushare.measure.pair import (
    OtherAlone,
    Others,
    Pair,
    TuneOptions,
    Window,
    neighbours,
    p99,
    p99_factor_interval,
    p99_interval,
    rates,
)
from gpushare.measure.search import (
    FASTER,
    Goal,
    Outcome,
    Setting,
    Trial,
    judge,
    memory_warning,
    next_setting,
    outcome,
    summed_up,
)
from gpushare.measure.slicer import Slicer
from gpushare.measure.slices import SliceSearch, next_slices, wanted_slices
from gpushare.measure.statistics import Ratio, deviation, mean, paired_ratio, widened
from gpushare.memory.peaks import Profile
from gpushare.mps.limits import Limits
from gpushare.run.group import DEFAULT_US, GroupSlice, members, why_not
from gpushare.run.plain import PlainShare
from gpushare.run.results import CAPS, SLICES
from gpushare.run.several import Several
from gpushare.run.share import MpsShare, check_program, open_mps_share
from gpushare.run.sliced import check_outside_mps

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host
    from gpushare.measure.search import Judged
    from gpushare.run.share import Share


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One trial: rates in the jobs' own units, shares of production alone with their intervals."""

    trial: Trial
    kept: Ratio
    rounds: int
    alone_rate: float
    together_rate: float
    alone_p99: float | None
    together_p99: float | None
    # Relative to its rate alone; None: unknown.
    opportunistic_share: float | None = None
    # The interval of the p99 factor, from 95 % intervals of both p99s; None: too few latencies.
    p99_interval: tuple[float, float] | None = None
    # Production's rate in each window, in order: alone (first before the other started), and together.
    alone_rates: tuple[float | None, ...] = ()
    together_rates: tuple[float | None, ...] = ()
    # The standard error of ``kept`` by the interval of its windows.
    windows_error: float | None = None
    window_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """What was found in one way; ``left_out`` says why it was not searched."""

    way: str
    outcome: Outcome | None = None
    left_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What was found, every trial, and both jobs alone. Rates are per second.

    ``ways`` are in the order in which they were searched; ``outcome`` is that of all of them together.
    """

    outcome: Outcome
    ways: tuple[WayResult, ...]
    trials: tuple[TrialReport, ...]
    production_alone: float | None
    # The standard deviation of its windows alone, relative to their mean.
    production_spread: float | None
    production_p99: float | None
    opportunistic_alone: float | None
    production_memory_bytes: int | None
    opportunistic_memory_bytes: int | None
    # What is kept of each command.
    production_profile: Profile = field(default_factory=Profile)
    opportunistic_profile: Profile = field(default_factory=Profile)
    warning: str | None
    seconds: float
    # Percent of the time in which production alone keeps the GPU busy; None: unknown.
    production_busy: float | None = None
    # What ended it before there was an answer: Ctrl-C, or a job that ended. Earlier trials are kept.
    stopped: KeyboardInterrupt | GpushareError | None = None
    # Other processes on the GPU: PID and name.
    others: Mapping[int, str] = field(default_factory=dict)


class TuneReporter:
    """What tune reports while it runs; the command line prints it."""

    def doing(self, what: str) -> None:
        """Something begins."""

    def measured(self, report: TrialReport) -> None:
        """A trial was measured."""

    def expected(self, what: str, done: int, most: int, seconds_left: float | None) -> None:
        """A trial begins; how many were done, and how many and how long it will be at most."""


# Two p99s of a few hundred requests differ by this much by chance.
_P99_SURE: Final = 0.08
# An error this small, or this small relative to what production may lose, needs no more windows.
_PRECISE: Final = 0.005
_PRECISE_SHARE: Final = 1 / 6
_FINEST: Final = 0.001
# An interval that is checked after every window must be wider to be as reliable as it claims (simulated).
_LOOKED_AT_OFTEN: Final = 1.4


def sure(report: TrialReport, goal: Goal) -> bool:
    """Stopping rule of a trial: return whether more windows would hardly change the verdict.

    It fails if either the rate or the p99 surely fails; it passes only if both do.
    """
    return _fails(report, goal) or (_rate_is_known(report, goal) and _tail_is_known(report, goal))


def _fails(report: TrialReport, goal: Goal) -> bool:
    high = widened(report.kept, _LOOKED_AT_OFTEN).high
    slow = high is not None and high < goal.keep
    late = goal.p99_factor is not None and report.p99_interval is not None and report.p99_interval[0] > goal.p99_factor
    return slow or late


def _rate_is_known(report: TrialReport, goal: Goal) -> bool:
    precise = max(_FINEST, min(_PRECISE, _PRECISE_SHARE * (1 - goal.keep)))
    if report.windows_error is not None and report.windows_error <= precise:
        return True
    low = widened(report.kept, _LOOKED_AT_OFTEN).low
    return low is not None and low >= goal.keep


def _tail_is_known(report: TrialReport, goal: Goal) -> bool:
    if goal.p99_factor is None or report.trial.p99 is None:
        return True
    if report.p99_interval is not None:
        return report.p99_interval[1] <= goal.p99_factor
    return abs(report.trial.p99 / goal.p99_factor - 1) > _P99_SURE


_GRACE_SECONDS: Final = 5.0
# The queue of a paused program has drained already; this is a margin.
_DRAINED_SECONDS: Final = 0.25
# From here on production has no gaps: its kernels follow each other.
_ALWAYS_BUSY_PERCENT: Final = 90.0
# For the time that is left: the other way has hardly ever needed more.
_OTHER_WAY_TRIALS: Final = 12
# Production may print nothing for this long, while it saves its state or validates; longer cannot be measured.
_SILENT_SECONDS: Final = 10.0
# Neighbouring pairs share a window alone, so they understate the random scatter by this factor (simulated).
_SHARED: Final = 1.2


def tune(host: Host, device: Device, options: TuneOptions, reporter: TuneReporter) -> TuneResult:
    """Search for the setting of the opportunistic job, and return what was found.

    If something ends it after the first trial, the result says what, and has what was measured until then.
    """
    check_program(options.production[0])
    check_program(options.opportunistic[0])
    if device.mig is not None:
        raise NotSupported(
            "tune measures on a whole GPU, not in a MIG instance",
            "MIG already keeps jobs apart; see: gpushare advise",
            code="mig_instance",
        )
    if device.gpu.mig_enabled:
        raise NotSupported(
            f"{device.title} is in MIG mode, and tune measures on a whole GPU",
            "MIG already keeps jobs apart: gpushare run --mig PROFILE -- CMD; or disable it:"
            f" gpushare mig disable -g {device.gpu.index}",
            code="mig_mode",
        )
    return Tuner(host, device, options, reporter).run()


def compare(
    host: Host, share: Share, options: TuneOptions, settings: Sequence[Setting], reporter: TuneReporter
) -> list[TrialReport]:
    """Measure given settings in turn next to one production process. Errors as `tune`.

    Outside MPS caps have no effect: the jobs are time-sliced. For slices, the share is under MPS, and production outside.
    """
    sliced = any(one.way == SLICES for one in settings)
    device = share.device
    with (
        Several(host, share, grace_seconds=_GRACE_SECONDS) as several,
        Tuning(host, device, options, reporter, several, _outside(host, device, options) if sliced else None) as tuning,
    ):
        tuning.begin()
        return [tuning.trial(setting) for setting in settings]


def _outside(host: Host, device: Device, options: TuneOptions) -> PlainShare:
    share = PlainShare(host, device)
    share.check(options.production[0])
    share.open()
    return share


class _LeftOut(Exception):
    """A way that cannot be searched here, and why."""

    def __init__(self, error: GpushareError) -> None:
        super().__init__(error.message)
        self.error = error


class Tuner:
    """The search of both ways, one after the other."""

    def __init__(self, host: Host, device: Device, options: TuneOptions, reporter: TuneReporter) -> None:
        self._host, self._device, self._options, self._reporter = host, device, options, reporter
        self._reports: list[TrialReport] = []
        self._found: dict[str, WayResult] = {}
        self._other: OtherAlone | None = None
        # The first one that was searched tells about production alone.
        self._first: Tuning | None = None
        # Whether the order of the ways is decided, which takes a running production job.
        self._ordered = False
        self._strangers: dict[int, str] = {}

    def run(self) -> TuneResult:
        """Search, and return what was found; errors as `tune`."""
        started = time.monotonic()
        stopped: KeyboardInterrupt | GpushareError | None = None
        left = list(dict.fromkeys(self._options.ways))
        if len(left) > 1:
            left.sort(key=lambda way: way != (SLICES if self._asks_for_p99 else CAPS))
        refused: list[GpushareError] = []
        while left:
            try:
                if not self._stage(left):
                    left.reverse()
                    continue
            except _LeftOut as reason:
                refused.append(reason.error)
                self._found[left[0]] = WayResult(way=left[0], left_out=f"{reason.error.message}; {reason.error.hint}")
                if len(left) > 1:
                    self._reporter.doing(f"{left[0]} are left out: {reason.error.message}")
            except (KeyboardInterrupt, GpushareError) as error:
                if not self._reports:
                    raise
                stopped = error
                break
            del left[0]
            enough = self._enough()
            if left and enough is not None:
                self._found.update({way: WayResult(way=way, left_out=enough) for way in left})
                break
        if not self._reports:
            raise refused[0]
        return self._result(time.monotonic() - started, stopped)

    def _stage(self, left: Sequence[str]) -> bool:
        """Search the first of the ways that are left; return False if the other one should be the first."""
        way = left[0]
        share, outside = self._shares(way)
        with (
            Several(self._host, share, grace_seconds=_GRACE_SECONDS) as several,
            Tuning(self._host, self._device, self._options, self._reporter, several, outside) as tuning,
        ):
            with self._perhaps_left_out():
                if self._other is None:
                    self._reporter.doing("measuring the opportunistic job alone")
                    self._other = tuning.measure_other(probe=SLICES in left)
                tuning.other = self._other
                if way == SLICES and self._other.unsliced is not None:
                    raise _LeftOut(self._other.unsliced)
                tuning.begin()
            if len(left) > 1 and not self._ordered:
                self._ordered = True
                if way != (SLICES if self._asks_for_p99 and not tuning.always_busy else CAPS):
                    return False
            self._first = self._first or tuning
            try:
                self._search(tuning, way, len(left))
            finally:
                self._strangers |= tuning.strangers
                self._found[way] = WayResult(way=way, outcome=tuning.outcome(way, self._of(way)))
        return True

    @contextlib.contextmanager
    def _perhaps_left_out(self) -> Iterator[None]:
        """Let another way do where this one cannot be set up; what a job itself did wrong ends the search."""
        try:
            yield
        except GpushareError as error:
            if error.code != "not_attached" or len(self._options.ways) == 1:
                raise
            raise _LeftOut(error) from None

    def _shares(self, way: str) -> tuple[MpsShare, PlainShare | None]:
        """Return the open share of the opportunistic job, and where production runs if not there."""
        host, device, program = self._host, self._device, self._options.opportunistic[0]
        try:
            if way == CAPS:
                return open_mps_share(host, device, program, Limits()), None
            check_outside_mps(device)
            refused = why_not(host, device, None)
            if refused is not None:
                raise refused
            MpsShare(host, device, Limits()).check(program)
            GroupSlice(host, device).check()
            if members(host, device):
                raise InUse(
                    f"other opportunistic jobs share the time-slice of the MPS server of {device.title}",
                    "wait until they have ended: gpushare status",
                    gpu=device.gpu.index,
                )
            outside = _outside(host, device, self._options)
            return open_mps_share(host, device, program, Limits()), outside
        except GpushareError as error:
            if len(self._options.ways) == 1:
                raise
            raise _LeftOut(error) from None

    def _search(self, tuning: Tuning, way: str, ways_left: int) -> None:
        begun, before = time.monotonic(), len(self._reports)
        while (setting := tuning.next(way, self._of(way))) is not None:
            done, most = len(self._reports), before + tuning.most(way) + (ways_left - 1) * _OTHER_WAY_TRIALS
            what = f"trial {done + 1}: {setting.title}"
            self._reporter.doing(what)
            each = (time.monotonic() - begun) / (done - before) if done > before else None
            self._reporter.expected(what, done, most, None if each is None else each * (most - done))
            self._reports.append(tuning.trial(setting))

    def _of(self, way: str) -> list[TrialReport]:
        return [one for one in self._reports if one.trial.setting.way == way]

    @property
    def _asks_for_p99(self) -> bool:
        return self._options.search.goal.p99_factor is not None

    def _enough(self) -> str | None:
        """Return why no other way can be better than what was found; None: it can."""
        best = summed_up(self._judged(), stable=True).best
        alone = None if self._other is None else self._other.rate
        if best is None or not best.safe or best.opportunistic is None or not alone:
            return None
        share = best.opportunistic / alone
        return None if share * FASTER < 1 else f"{best.setting.way} leave the other {share:.2f} of its rate alone"

    def _judged(self) -> list[Judged]:
        return judge(self._options.search.goal, [one.trial for one in self._reports])

    def _result(self, seconds: float, stopped: KeyboardInterrupt | GpushareError | None) -> TuneResult:
        searched = [one.outcome for one in self._found.values() if one.outcome is not None]
        found = summed_up(self._judged(), stable=stopped is None and all(one.stable for one in searched))
        helps = next((one.low_priority_helps for one in searched if one.low_priority_helps is not None), None)
        first, other = self._first, self._other
        if first is None or other is None:
            raise AssertionError("a trial has both")
        by_slices = found.best is not None and found.best.setting.way == SLICES
        alone = rates(first.alone)
        return TuneResult(
            outcome=replace(found, low_priority_helps=helps),
            ways=tuple(self._found.values()),
            trials=tuple(self._reports),
            production_alone=mean(alone) if alone else None,
            production_spread=deviation(alone) / mean(alone) if len(alone) > 1 else None,
            production_p99=p99(first.alone),
            production_busy=first.busy,
            opportunistic_alone=other.rate,
            production_memory_bytes=first.memory,
            opportunistic_memory_bytes=other.memory,
            production_profile=_profile(first.memory, first.sm(), first.dram(), first.busy, self._strangers),
            opportunistic_profile=_profile(
                other.peak,
                *((other.sm, other.dram, other.busy) if self._options.copies == 1 else (None,) * 3),
                self._strangers,
            ),
            warning=None if by_slices else memory_warning(other.dram, first.dram()),
            seconds=seconds,
            stopped=stopped,
            others=self._strangers,
        )


def _profile(
    memory: int | None, sm: float | None, dram: float | None, busy: float | None, strangers: Mapping[int, str]
) -> Profile:
    """Return what is known of a job; next to other programs, only its memory is its own."""
    if strangers:
        return Profile(memory_bytes=memory or None)
    sm, dram, busy = (None if one is None else round(min(100.0, max(0.0, one)), 1) for one in (sm, dram, busy))
    return Profile(memory_bytes=memory or None, sm_percent=sm, dram_percent=dram, busy_percent=busy)


class Tuning:
    """A production job and the trials next to it in one share, or with ``outside`` next to that: with one process of it.

    A context manager, which restores the time-slices.
    """

    def __init__(
        self,
        host: Host,
        device: Device,
        options: TuneOptions,
        reporter: TuneReporter,
        several: Several,
        outside: PlainShare | None = None,
    ) -> None:
        self._options, self._reporter, self._several = options, reporter, several
        self._sliced = outside is not None
        self._pair = Pair(host, device, options, several, outside)
        self._slicer = Slicer(host)
        self.other = OtherAlone()
        # The opportunistic job, paused, which goes on in the next trial of slices.
        self._kept: Others | None = None
        self._default_us: int | None = None
        self._request_us: float | None = None
        self.alone: list[Window] = []

    def __enter__(self) -> Tuning:
        return self

    def __exit__(self, *error: object) -> None:
        self._slicer.__exit__(*error)

    def measure_other(self, *, probe: bool) -> OtherAlone:
        """Measure the opportunistic job alone; with ``probe`` find out whether the slice of its server can be set."""
        others = self._pair.start_others(Limits())
        found = self._pair.alone(others)
        unsliced: GpushareError | None = None
        if probe:
            try:
                self._set_group(others, DEFAULT_US)
            except GpushareError as error:
                unsliced = error
            self._slicer.restore()
        if self._sliced and unsliced is None:
            self._pair.pause(others)
            self._kept = others
        else:
            self._kill(others)
        return replace(found, unsliced=unsliced)

    def _set_group(self, others: Others, microseconds: int) -> None:
        share = self._several.share
        if isinstance(share, MpsShare):
            self._slicer.set_group(share, [program.pid for program in others.programs], microseconds)

    def _kill(self, others: Others) -> None:
        self._pair.pause(others)
        for program in others.programs:
            # It is stopped and its queue has drained, so it can be killed.
            self._several.kill(program, bound_seconds=_DRAINED_SECONDS)

    def next(self, way: str, reports: Sequence[TrialReport]) -> Setting | None:
        """Return the next setting of a way to try; None: there is an answer."""
        trials = [one.trial for one in reports]
        return next_slices(self._slices(), trials) if way == SLICES else next_setting(self._options.search, trials)

    def most(self, way: str) -> int:
        """Return the most trials of a way."""
        return self._slices().most if way == SLICES else self._options.search.most

    def outcome(self, way: str, reports: Sequence[TrialReport]) -> Outcome:
        """Return what the trials of a way say."""
        trials = [one.trial for one in reports]
        if way == CAPS:
            return outcome(self._options.search, trials)
        return summed_up(judge(self._options.search.goal, trials), stable=wanted_slices(self._slices(), trials) is None)

    @property
    def busy(self) -> float | None:
        """Return the percentage of time in which production alone keeps the GPU busy; None: unknown."""
        return self._pair.busy

    @property
    def always_busy(self) -> bool:
        """Return whether production has no gaps for another job."""
        return self.busy is not None and self.busy >= _ALWAYS_BUSY_PERCENT

    @property
    def memory(self) -> int | None:
        """Return production's memory in bytes."""
        return self._pair.memory

    @property
    def strangers(self) -> Mapping[int, str]:
        """Return the other processes on the GPU, by PID."""
        return self._pair.strangers

    def dram(self) -> float | None:
        """Return the DRAM bandwidth that production alone draws, in percent; None: unknown."""
        return mean(self._pair.dram) if self._pair.dram else None

    def sm(self) -> float | None:
        """Return the SMs that production alone keeps busy, in percent; None: unknown."""
        return mean(self._pair.sm) if self._pair.sm else None

    def _slices(self) -> SliceSearch:
        given = self._options.search
        found = SliceSearch(
            goal=given.goal, confirmed=given.confirmed, request_us=self._request_us, other_alone=self.other.rate
        )
        return found if self._default_us is None else replace(found, default_us=self._default_us)

    # -- a trial -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the production job and wait until it prints; its slice must be settable where it has one. Errors as `tune`."""
        self._reporter.doing("starting the production job")
        self._pair.start_production()
        # While it is alone.
        self._request_us = self._pair.request_us
        if self._sliced and self._pair.production is not None:
            try:
                self._default_us = self._slicer.probe(self._pair.production.pid) or None
            except GpushareError as error:
                raise _LeftOut(error) from None

    def trial(self, setting: Setting) -> TrialReport:
        """Run the opportunistic job under a setting, with windows together and alone in turn; errors as `tune`."""
        self._pair.begin_trial()
        alone = [self._pair.alone_window()]
        others = self._started(setting)
        together: list[Window] = []
        other: list[tuple[float | None, float | None]] = []
        while True:
            production, clean, known = self._pair.together_window(others)
            together.append(production)
            other.append((clean, known))
            self._pair.pause(others)
            alone.append(self._pair.alone_window())
            stands_still = together[-1].rate is None and alone[-1].rate is None
            if self._pair.silent_seconds > max(_SILENT_SECONDS, 2 * self._pair.window_seconds):
                raise _stands_still()
            report = self._judged(setting, alone, together, other)
            if report is not None and not stands_still and self._enough(report):
                break
            tail = any(window.latencies or window.printed_p99 for window in (*alone, *together))
            no_tail = self._asks_for_p99 and not tail and len(together) >= self._pair.rounds
            if no_tail or len(together) >= 2 * self._pair.most_rounds:
                raise _stands_still() if stands_still else self._nothing_printed(report)
            self._pair.resume(others)
        if setting.way == CAPS:
            self._kill(others)
        self.alone += alone
        self._reporter.measured(report)
        return report

    def _started(self, setting: Setting) -> Others:
        """Start the opportunistic job under a setting; with slices, only if it does not run yet, and set those of both."""
        if setting.way == CAPS:
            limits = Limits(
                threads_percent=None if setting.threads >= 100 else setting.threads,
                priority=Priority.LOW if setting.low else Priority.NORMAL,
            )
            return self._pair.start_others(limits)
        pair, before = self._pair, self._kept
        others = self._kept = before or pair.start_others(Limits())
        pair.demand_alive(*others.programs)
        if pair.production is not None and setting.production_slice_us is not None:
            self._slicer.set(pair.production.pid, setting.production_slice_us)
        if setting.other_slice_us is not None:
            self._set_group(others, setting.other_slice_us)
        if before is None:
            # Requests that began before are over.
            self._several.wait(self._options.settle_seconds)
        else:
            pair.resume(others)
        return others

    def _judged(
        self,
        setting: Setting,
        alone: Sequence[Window],
        together: Sequence[Window],
        other: Sequence[tuple[float | None, float | None]],
    ) -> TrialReport | None:
        pairs = neighbours(alone, together)
        kept = paired_ratio([rate for rate, _ in pairs], [base for _, base in pairs])
        if kept is None:
            return None
        kept = widened(kept, _SHARED)
        quiet = self._quiet(alone)
        before, now = p99(quiet), p99(together)
        slower = now / before if before and now is not None else None
        speed = _speed(other)
        between = p99_factor_interval(quiet, together)
        trial = Trial(
            setting=setting,
            kept=kept.value,
            error=kept.error or 0.0,
            p99=slower,
            # A 95 % interval is four standard errors wide.
            p99_error=None if between is None else (between[1] - between[0]) / 4,
            opportunistic=speed,
        )
        return TrialReport(
            trial=trial,
            kept=kept,
            rounds=len(together),
            alone_rate=mean(rates(alone)),
            together_rate=mean([rate for rate, _ in pairs]),
            alone_p99=before,
            together_p99=now,
            opportunistic_share=None if speed is None or not self.other.rate else speed / self.other.rate,
            p99_interval=between,
            alone_rates=tuple(window.rate for window in alone),
            together_rates=tuple(window.rate for window in together),
            # A quarter of the 95 % interval; with few windows, more than their scatter.
            windows_error=None if kept.low is None or kept.high is None else (kept.high - kept.low) / 4,
            window_seconds=self._pair.window_seconds,
        )

    def _quiet(self, alone: Sequence[Window]) -> Sequence[Window]:
        """Return the windows alone to compare a p99 with: those of this trial, if they have enough requests.

        Hosts drift from minute to minute: the same setting had 0.67 and 1.27 times the p99 of all earlier windows.
        """
        enough = p99_interval(alone) is not None or not any(window.latencies for window in alone)
        return alone if enough and p99(alone) is not None else [*self.alone, *alone]

    @property
    def _asks_for_p99(self) -> bool:
        return self._options.search.goal.p99_factor is not None

    def _enough(self, report: TrialReport) -> bool:
        if self._asks_for_p99 and report.trial.p99 is None:
            return False
        if report.rounds < self._pair.rounds:
            return False
        return report.rounds >= self._pair.most_rounds or sure(report, self._options.search.goal)

    @staticmethod
    def _nothing_printed(report: TrialReport | None) -> OperationFailed:
        if report is None:
            return OperationFailed(
                "the production job printed nothing that can be measured",
                "give --metric a number that it prints at least once a second",
                code="no_numbers",
            )
        return OperationFailed(
            "the production job prints too few latencies for a p99",
            "let it print latency_ms=NUMBER of each request, or p99=NUMBER; or give --latency, or longer windows: --window 5s",
            code="no_latencies",
        )


def _stands_still() -> OperationFailed:
    return OperationFailed(
        "the production job no longer prints anything, even without the other job",
        "find out why it makes no progress; give a command that runs until it is ended",
        code="job_silent",
    )


def _speed(other: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return the other's rate; one that may include pauses only if there is no other."""
    clean = [rate for rate, _ in other if rate is not None]
    known = clean or [rate for _, rate in other if rate is not None]
    return mean(known) if known else None
