"""`gpushare tune`: a production job runs all the time, next to an opportunistic one under one setting after another.

A cap is fixed when a context is created, so the opportunistic job restarts for every trial, and production for every
trial with a cap on it. Within a trial, the opportunistic job is paused (SIGSTOP) and continued, so that windows alone and
together alternate for the same production process: processes of one program differ by up to 15 percent, windows of one
process do not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, NotSupported, OperationFailed
from gpushare.measure.pair import Pair, TuneOptions, Window, neighbours, p99, p99_factor_interval, p99_interval, rates
from gpushare.measure.search import (
    DRAM_FULL_PERCENT,
    SPARED,
    Goal,
    Outcome,
    Search,
    Setting,
    Trial,
    memory_warning,
    next_setting,
    outcome,
)
from gpushare.measure.statistics import Ratio, deviation, mean, paired_ratio, product, ratio, widened
from gpushare.model import Priority
from gpushare.mps.limits import Limits
from gpushare.run.several import Several
from gpushare.run.share import check_program, open_mps_share

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.run.share import Share
    from gpushare.selection import Device


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
    # What a cap on production alone leaves of its rate; included in ``kept``.
    cap_factor: float = 1.0
    # The standard error of ``kept`` that more windows reduce: without that of the cap factor.
    windows_error: float | None = None
    window_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What was found, every trial, and both jobs alone. Rates are per second."""

    outcome: Outcome
    trials: tuple[TrialReport, ...]
    production_alone: float | None
    # The standard deviation of its windows alone, relative to their mean.
    production_spread: float | None
    production_p99: float | None
    opportunistic_alone: float | None
    production_memory_bytes: int | None
    opportunistic_memory_bytes: int | None
    warning: str | None
    seconds: float
    # What ended it before there was an answer: Ctrl-C, or a job that ended. Earlier trials are kept.
    stopped: KeyboardInterrupt | GpushareError | None = None
    # Why not all caps on production, which the user had not requested, were tried.
    given_up: GpushareError | None = None
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
# Production may print nothing for this long, while it saves its state or validates; longer cannot be measured.
_SILENT_SECONDS: Final = 10.0
# Neighbouring pairs share a window alone, so they understate the random scatter by this factor (simulated).
_SHARED: Final = 1.2


def tune(host: Host, device: Device, options: TuneOptions, reporter: TuneReporter) -> TuneResult:
    """Search for the setting of the opportunistic job, and return what was found.

    If something ends it after the first trial, the result says what, and has what was measured until then.
    """
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
    share = open_mps_share(host, device, options.production[0], Limits())
    with Several(host, share, grace_seconds=_GRACE_SECONDS) as several:
        return Tuning(host, device, options, reporter, several).run()


def compare(
    host: Host, share: Share, options: TuneOptions, settings: Sequence[Setting], reporter: TuneReporter
) -> list[TrialReport]:
    """Measure given settings in turn next to one production process. Errors as `tune`.

    Outside MPS settings have no effect: the jobs are time-sliced.
    """
    with Several(host, share, grace_seconds=_GRACE_SECONDS) as several:
        tuning = Tuning(host, share.device, options, reporter, several)
        tuning.begin()
        return [tuning.trial(setting) for setting in settings]


class Tuning:
    """A production job and the trials next to it: all with one process of it, except those with a cap on it."""

    def __init__(
        self, host: Host, device: Device, options: TuneOptions, reporter: TuneReporter, several: Several
    ) -> None:
        self._options, self._reporter, self._several = options, reporter, several
        self._pair = Pair(host, device, options, several)
        self._alone: list[Window] = []
        self._other_alone: float | None = None
        # The DRAM bandwidth that it draws alone, in percent.
        self._other_dram: float | None = None
        # The other job's last measured rate under each setting.
        self._rates: dict[Setting, float] = {}
        # Production's rate alone after each start with a cap, and why there are no more such starts.
        self._starts: list[float] = []
        self._given_up: GpushareError | None = None

    def run(self) -> TuneResult:
        """Search, and return what was found; errors as `tune`."""
        started = time.monotonic()
        self._reporter.doing("measuring the opportunistic job alone")
        self._other_alone, self._other_dram, other_memory = self._pair.opportunistic_alone()
        self.begin()
        reports: list[TrialReport] = []
        stopped: KeyboardInterrupt | GpushareError | None = None
        begun = time.monotonic()
        try:
            while (setting := next_setting(self._search(), self._counted(reports))) is not None:
                done, most = len(reports), self._search().most
                what = f"trial {done + 1}: {setting.title}"
                self._reporter.doing(what)
                each = (time.monotonic() - begun) / done if done else None
                self._reporter.expected(what, done, most, None if each is None else each * (most - done))
                reports += self._tried(setting)
        except (KeyboardInterrupt, GpushareError) as error:
            if not reports:
                raise
            stopped = error
        alone = rates(self._alone)
        found = outcome(self._search(), self._counted(reports))
        duty = None if found.best is None else found.best.setting.duty_percent
        return TuneResult(
            outcome=found,
            trials=tuple(reports),
            production_alone=mean(alone) if alone else None,
            production_spread=deviation(alone) / mean(alone) if len(alone) > 1 else None,
            production_p99=p99(self._alone),
            opportunistic_alone=self._other_alone,
            production_memory_bytes=self._pair.memory,
            opportunistic_memory_bytes=other_memory,
            warning=memory_warning(self._other_dram, self._dram(), duty),
            seconds=time.monotonic() - started,
            stopped=stopped,
            given_up=self._given_up,
            others=self._pair.others,
        )

    def _tried(self, setting: Setting) -> list[TrialReport]:
        """Return a trial; none if it fails with a cap on production that the user had not requested."""
        try:
            return [self.trial(setting)]
        except GpushareError as error:
            if setting.production_threads is None or self._options.search.production_caps is not None:
                raise
            self._given_up = error
        left = [program for program in self._several.programs if program.runs]
        for program in left:
            self._several.resume(program)
        self._several.end(left)
        return []

    def _counted(self, reports: Sequence[TrialReport]) -> list[Trial]:
        """Return the trials to search by; without those with a cap on production once such caps were given up."""
        trials = [one.trial for one in reports]
        return [one for one in trials if self._given_up is None or one.setting.production_threads is None]

    def _dram(self) -> float | None:
        """Return the DRAM bandwidth that production alone draws, in percent; None: unknown."""
        return mean(self._pair.dram) if self._pair.dram else None

    def _search(self) -> Search:
        """Return how to search: with caps on production if it is memory-bound, with duty cycles if either job is."""
        given, dram = self._options.search, self._dram() or 0.0
        # Even the first slice of the time ruins a tail.
        full = max(dram, self._other_dram or 0.0) >= DRAM_FULL_PERCENT
        given = replace(given, duty=full and not self._asks_for_p99)
        if dram < DRAM_FULL_PERCENT or given.production_caps is not None or self._given_up is not None:
            return given
        return replace(given, spared=SPARED, most=given.most + len(SPARED))

    # -- a trial -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the production job and wait until it prints; errors as `tune`."""
        self._reporter.doing("starting the production job")
        self._pair.start_production(None)

    def trial(self, setting: Setting) -> TrialReport:
        """Run the opportunistic job under a setting, with windows together and alone in turn; errors as `tune`."""
        factor = self._with_production_cap(setting.production_threads)
        self._pair.begin_trial()
        alone = [self._pair.alone_window()]
        limits = Limits(
            threads_percent=None if setting.threads >= 100 else setting.threads,
            priority=Priority.LOW if setting.low else Priority.NORMAL,
        )
        program, seen = self._pair.start_opportunistic(limits)
        together: list[Window] = []
        other: list[tuple[float | None, float | None]] = []
        full = self._rates.get(replace(setting, duty_percent=None))
        while True:
            production, clean, known = self._pair.together_window(program, seen, setting.duty_percent, full)
            together.append(production)
            other.append((clean, known))
            self._several.pause(program, bound_seconds=self._options.drain_seconds)
            alone.append(self._pair.alone_window())
            stands_still = together[-1].rate is None and alone[-1].rate is None
            if self._pair.silent_seconds > max(_SILENT_SECONDS, 2 * self._pair.window_seconds):
                raise _stands_still()
            report = self._judged(setting, alone, together, other, factor)
            if report is not None and not stands_still and self._enough(report):
                break
            tail = any(window.latencies or window.printed_p99 for window in (*alone, *together))
            no_tail = self._asks_for_p99 and not tail and len(together) >= self._pair.rounds
            if no_tail or len(together) >= 2 * self._pair.most_rounds:
                raise _stands_still() if stands_still else self._nothing_printed(report)
            self._pair.resume(program)
        # It is stopped and its queue has drained, so it can be killed.
        self._several.kill(program, bound_seconds=_DRAINED_SECONDS)
        if setting.production_threads is None:
            self._alone += alone
        if report.trial.opportunistic is not None:
            self._rates[setting] = report.trial.opportunistic
        self._reporter.measured(report)
        return report

    def _with_production_cap(self, cap: float | None) -> Ratio:
        """Run production under a cap; return its rate alone under the cap, relative to that without."""
        same = Ratio(value=1.0, low=1.0, high=1.0, error=0.0)
        # Restarted for each trial under a cap: processes of one program differ, which a single one does not show.
        if cap is not None or self._pair.production_cap is not None:
            self._pair.start_production(cap)
        if cap is None:
            return same
        before, capped = rates(self._alone), rates([self._pair.alone_window() for _ in range(self._pair.rounds)])
        factor = ratio(capped, before)
        if factor is None:
            raise _stands_still()
        self._starts.append(mean(capped))
        starts = [mean(before), *self._starts]
        apart = deviation(starts) / mean(starts)
        # No cap makes a job faster: above 1 is chance.
        factor = replace(factor, value=min(1.0, factor.value))
        return product(factor, Ratio(value=1.0, low=1 - 2 * apart, high=1 + 2 * apart, error=apart))

    def _judged(
        self,
        setting: Setting,
        alone: Sequence[Window],
        together: Sequence[Window],
        other: Sequence[tuple[float | None, float | None]],
        factor: Ratio,
    ) -> TrialReport | None:
        pairs = neighbours(alone, together)
        kept = paired_ratio([rate for rate, _ in pairs], [base for _, base in pairs])
        if kept is None:
            return None
        own = widened(kept, _SHARED)
        kept = product(own, factor)
        quiet = self._quiet(setting, alone)
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
            opportunistic_share=None if speed is None or not self._other_alone else speed / self._other_alone,
            p99_interval=between,
            alone_rates=tuple(window.rate for window in alone),
            together_rates=tuple(window.rate for window in together),
            cap_factor=factor.value,
            # A quarter of the 95 % interval; with few windows, more than their scatter.
            windows_error=None if own.low is None or own.high is None else (own.high - own.low) / 4,
            window_seconds=self._pair.window_seconds,
        )

    def _quiet(self, setting: Setting, alone: Sequence[Window]) -> Sequence[Window]:
        """Return the windows alone to compare a p99 with: those of this trial, if they have enough requests.

        Hosts drift from minute to minute: the same setting had 0.67 and 1.27 times the p99 of all earlier windows.
        """
        if setting.production_threads is not None:
            # Alone means without a cap on production.
            return self._alone or alone
        enough = p99_interval(alone) is not None or not any(window.latencies for window in alone)
        return alone if enough and p99(alone) is not None else [*self._alone, *alone]

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
