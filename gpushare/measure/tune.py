"""`gpushare tune`: a production job runs all the time, next to opportunistic ones under one setting after another.

There are two ways, as `run` applies them: production outside MPS, and the others in one MPS daemon whose server has one
time-slice; or all under MPS, with thread caps on the others. Each has its own production process, as processes of one program
differ by up to 15 percent. A slice is set while all run. A cap is fixed when a context is created, so the others are started
again for each, and caps come last.

Windows together alternate with windows of production alone (the others are stopped), and now and then the others alone
(production is stopped): what each setting is compared with is of the same seconds. A setting is watched until its figures
decide, and the best one until they are certain.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, NamedTuple, cast

from gpushare.base import values
from gpushare.base.benchmark import Metric
from gpushare.base.errors import GpushareError, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import Priority, TunedWay, Way
from gpushare.base.selection import Device
from gpushare.base.units import counted
from gpushare.host.activity import ActivityRecorder, BandwidthRecorder, utilization
from gpushare.host.host import Host
from gpushare.host.store import Kept, RecordStore, digest_of_words
from gpushare.job_command import JobCommand
from gpushare.measure.experiment import Experiment, Grounds, Running
from gpushare.measure.metric import Window, dispersion, latencies_of, p99, p99_factor_interval
from gpushare.measure.search import DEFAULT_US as DEFAULT_SERVER_US
from gpushare.measure.search import (
    FIRST_SECONDS,
    Figures,
    Goal,
    Outcome,
    Search,
    Setting,
    memory_warning,
    next_setting,
    outcome,
    reason_to_skip,
)
from gpushare.measure.statistics import (
    Estimate,
    deviation,
    mean,
    mean_known,
    paired_ratio,
    percentile,
    relative_deviation,
    t_quantile,
)
from gpushare.measure.usage import UsageMeter
from gpushare.memory.peaks import Profile
from gpushare.mps.limits import Limits
from gpushare.run.group import DEFAULT_US as FIRST_SERVER_US
from gpushare.run.group import check_slice_free
from gpushare.run.results import Tuned
from gpushare.run.several import memory_now
from gpushare.run.share import check_program
from gpushare.show.tune import Row, TuneAnswer, WayAnswer

# How long a search takes at most, unless the user says: of both ways, and of slices alone, which need no starts.
BUDGET_SECONDS: Final = 150.0
SLICES_BUDGET_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 5.0
# The queue of a paused program has drained already; this is a margin.
_DRAINED_SECONDS: Final = 0.25
_SHORTEST_SECONDS: Final = 0.6
_LONGEST_SECONDS: Final = 30.0
# A window of production alone has at least this many outputs, and is this many times as long as their longest gap.
_LEAST_MOMENTS: Final = 5
_GAPS_PER_WINDOW: Final = 2
_LEAST_OF_OTHERS: Final = 3
_LONGEST_FOR_OTHERS_SECONDS: Final = 6.0
# Production may print nothing for this long, while it saves its state or validates; longer cannot be measured.
_SILENT_SECONDS: Final = 10.0
# After this time without output, the user is told for whom tune waits.
_WAITS_SECONDS: Final = 15.0
# Of the budget, for slices, before caps are searched.
_SLICES_PART: Final = 0.4
# And at its end, for the best setting so far.
_ANSWER_PART: Final = 0.3
# After this many rounds without a number, production prints nothing that can be measured.
_MOST_SILENT_ROUNDS: Final = 3
# The others alone are measured again after this time.
_OTHERS_ALONE_SECONDS: Final = 12.0
# So long all may serve the requests that came while all started, and production those that came while it was stopped.
_BACKLOG_SECONDS: Final = 15.0
# While a backlog is served, each median is below this part of the one before; then latencies are within this factor.
_STILL_FALLING: Final = 0.98
_AS_FAST_AS_ALONE: Final = 1.05
# Windows in which the answer becomes certain are longer: a round pauses and resumes the others, which takes a second.
_STRETCH: Final = 1.5
# A setting that needed a start is watched for this many times as long as the start and the pauses took.
_STARTS_WORTH: Final = 1.5
_PAUSES_SECONDS: Final = 1.2
# Production has caught up after this many requests as fast as alone; longer than this time is not waited for that.
_CAUGHT_UP_REQUESTS: Final = 5
_CAUGHT_UP_SECONDS: Final = 5.0
# The p99 alone is of at least this many requests, if the same way has them.
_REQUESTS_ALONE: Final = 600
# Neighbouring pairs share a window alone, so they understate the random scatter by this factor (simulated).
_SHARED_WINDOW_FACTOR: Final = 1.2
# The variance of a ratio of windows, as that of one window alone, for each pair. If windows scattered only at random it would
# be 1.5 (one together, the mean of two alone) to 2 (many pairs, which share those alone). Windows alone also drift, which
# cancels out in a pair: this is chosen for a fifth to two fifths of their variance, and is not measured.
_PAIRED_VARIANCE: Final = 1.2
# Windows of a second and less scatter at least this much.
_LEAST_SCATTER: Final = 0.003
# Windows alone before the first setting: they tell how far the rates of this job scatter.
_FIRST_ALONE: Final = 2
# Longer windows scatter less, and would use up the budget.
_BRIEF_SECONDS: Final = 3.0
# From here on, requests come at random; and with less than this load, a server waits for them.
_RANDOM_SCATTER: Final = 0.4
_WAITING_LOAD: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to run, and how to measure it (times in seconds).

    Of each opportunistic command ``copies`` run. ``budget_seconds`` count from when all have printed; None: by the ways.
    ``window_seconds`` None: by what production prints.
    """

    production: Sequence[str]
    opportunistic: Sequence[Sequence[str]]
    search: Search
    metric: Metric = field(default_factory=Metric)
    opportunistic_metric: Metric = field(default_factory=Metric)
    copies: int = 1
    budget_seconds: float | None = None
    window_seconds: float | None = None
    settle_seconds: float = 0.4
    warm_seconds: float = 1.0
    start_seconds: float = 600.0
    # How long a pause waits for a queue to drain; the deepest one on an H200 took 0.1 s.
    drain_seconds: float = 0.3

    @property
    def most_seconds(self) -> float:
        """Return the budget in seconds, by the ways if the user gives none."""
        if self.budget_seconds is not None:
            return self.budget_seconds
        return BUDGET_SECONDS if Way.CAPS in self.search.ways else SLICES_BUDGET_SECONDS


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A job alone: its rate per second (of several, the sum), its memory in bytes, and what it uses of the GPU in percent.

    ``spread`` is the standard deviation of its windows, relative to their mean; ``peak`` the memory of the largest copy.
    """

    rate: float | None = None
    spread: float | None = None
    p99: float | None = None
    memory: int | None = None
    peak: int | None = None
    sm: float | None = None
    dram: float | None = None
    busy: float | None = None

    def profile(self, *, is_single: bool) -> Profile:
        """Return the profile that later runs of the job read; its use only if it is one job, alone on the GPU."""
        memory = self.peak or None
        percent = self.busy if self.sm is None else self.sm
        if percent is None or not is_single:
            return Profile(memory_bytes=memory)
        return Profile(memory_bytes=memory, use_percent=round(min(100.0, max(0.0, percent)), 1))


class _Use(NamedTuple):
    """How busy the GPU is, in percent: its SMs and its memory (by GPM), and the time with a kernel; None: unknown."""

    sm: float | None
    dram: float | None
    busy: float | None


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What was found: the answer that is printed, and what it is made of.

    ``outcome`` is that of all ways together. ``stopped`` is what interrupted the search.
    """

    answer: TuneAnswer
    outcome: Outcome
    production: Alone
    others: Alone
    stopped: KeyboardInterrupt | GpushareError | None
    # Other processes on the GPU: PID and name.
    strangers: Mapping[int, str]


class TuneReporter:
    """What tune reports while it runs; the command line prints it."""

    def doing(self, what: str) -> None:
        """Tell what begins."""

    def measured(self, figures: Figures) -> None:
        """A setting was measured, for the first time or longer."""

    def progress(self, what: str, seconds: float, most: float) -> None:
        """A setting is about to be measured; how much of the budget is used."""


class _Over(Exception):
    """The budget is spent."""


class _LeftOut(Exception):
    """A way that cannot be searched here, and why."""

    def __init__(self, error: GpushareError) -> None:
        super().__init__(error.message)
        self.error = error


def tune(
    host: Host,
    device: Device,
    options: TuneOptions,
    reporter: TuneReporter | None = None,
    earlier: Sequence[Figures] = (),
) -> TuneResult:
    """Search for the setting of the opportunistic jobs, and return what was found.

    ``earlier`` are figures of an earlier search of the same jobs, from which it goes on. If something ends it after the first
    setting, the result says what, and has what was measured until then.
    """
    for command in (options.production, *options.opportunistic):
        check_program(command[0])
    if device.mig is not None or device.gpu.mig_enabled:
        raise NotSupported(
            f"{device.title} is in MIG mode, and tune measures on a whole GPU",
            "MIG already keeps jobs apart: gpushare run --mig PROFILE -- CMD; or disable it:"
            f" gpushare mig disable -g {device.gpu.index}",
            code="mig_mode",
        )
    return Tuner(host, device, options, reporter or TuneReporter(), earlier).run()


@dataclass(frozen=True)
class _WatchedWindow:
    """A window of production: alone, or together with the others under a ``setting``, with the rate of each of them.

    Or a window of the others alone, in which production is stopped: ``window`` then has no rate. In ``rates``, None: that job
    printed nothing.
    """

    start: float
    end: float
    window: Window
    setting: Setting | None = None
    rates: tuple[float | None, ...] = ()

    @property
    def rate(self) -> float:
        """Return production's rate: one that makes no progress has a rate of 0, not an unknown one."""
        return self.window.rate or 0.0


class Tuner:
    """The search of all ways, one after the other."""

    # Entered by `run`.
    _experiment: Experiment

    def __init__(
        self, host: Host, device: Device, options: TuneOptions, reporter: TuneReporter, earlier: Sequence[Figures] = ()
    ) -> None:
        self.host = host
        self.device = device
        self.options = options
        self.reporter = reporter
        self._known = {figures.setting: figures for figures in earlier}
        self._search = options.search
        # Of each way, in the order of the search, what was found, or why it was not searched.
        self._ways: dict[Way, Outcome | str] = {}
        # When all jobs had printed, and the budget began.
        self._began: float | None = None
        self._measuring_seconds = 0.0
        self.others_alone: list[_WatchedWindow] = []
        self._stages: list[Stage] = []
        # Why ways could not be used.
        self._refused: list[GpushareError] = []

    def run(self) -> TuneResult:
        """Search, and return what was found; errors as `tune`."""
        program = self.options.opportunistic[0][0]
        grounds = Grounds(self.host, self.device, program).open(mps=True)
        stopped: KeyboardInterrupt | GpushareError | None = None
        over = False
        with Experiment(self.host, grounds, grace_seconds=_GRACE_SECONDS) as self._experiment:
            started = self._experiment.now()
            try:
                for way in (Way.SLICES, Way.CAPS):
                    if way in self._search.ways:
                        self._search_or_leave_out(way)
            except _Over:
                over = True
            except (KeyboardInterrupt, GpushareError) as error:
                if not self._fresh_figures():
                    raise
                stopped = error
            began = self._began or started
            ended = self._experiment.now()
        if not self._fresh_figures():
            if not over and self._refused:
                raise self._refused[0]
            raise TimedOut(
                f"nothing was measured in {self.options.most_seconds:g} s",
                "give it more time: --budget 10m",
                code="no_numbers",
            )
        return self._result(ended - began, began - started, stopped, over=over)

    def _search_or_leave_out(self, way: Way) -> None:
        """Search a way, unless it cannot be used here or cannot be better; keep its result, or why it was left out."""
        reason = reason_to_skip(way, self._fresh_figures(), self._search.goal)
        if reason is None and next_setting(self._search, way, self._known) is None:
            reason = "an earlier search found nothing better in it"
        try:
            if reason is None:
                self._run_stage(way)
        except _LeftOut as without:
            self._refused.append(without.error)
            reason = f"{without.error.message}; {without.error.hint}"
            self.reporter.doing(f"{way.value} are left out: {without.error.message}")
        if reason is not None:
            self._ways[way] = reason

    def _fresh_figures(self) -> dict[Setting, Figures]:
        """Return the figures that this search measured itself, without those of an earlier one."""
        return {setting: figures for setting, figures in self._known.items() if figures.earlier is None}

    def _run_stage(self, way: Way) -> None:
        """Start the jobs of a way, search it, and keep its result also if the search ends early."""
        self._check_usable(way)
        if self._stages:
            # The jobs of this way will need about as long to start as those of the way before.
            self.check_budget(self._stages[-1].start_took + FIRST_SECONDS)
        stage = Stage(self, self._experiment, way)
        self._stages.append(stage)
        try:
            self._begin_stage(stage)
            self._search_way(stage, way)
        finally:
            if stage.settings:
                of_way = [figures for figures in self._known.values() if figures.setting.way == way]
                self._ways[way] = outcome(self._search.goal, of_way, stable=stage.finished)
        stage.end()

    def _begin_stage(self, stage: Stage) -> None:
        """Start the jobs of a way, and let the search use what they show: the default slice, and how long a request takes."""
        try:
            stage.begin()
        except GpushareError as error:
            # What a job itself did wrong ends the search.
            if error.code != "not_attached":
                raise
            # Its jobs run: they must not run next to those of the next way.
            stage.end()
            raise self.left_out_error(error) from None
        if stage.default_us:
            self._search = replace(self._search, default_us=stage.default_us)
        if stage.request_us is not None:
            self._search = replace(self._search, request_us=stage.request_us)

    def _check_usable(self, way: Way) -> None:
        """Raise _LeftOut if a way cannot be used here."""
        if way is Way.CAPS:
            return
        try:
            check_slice_free(self.host, self.device)
        except GpushareError as error:
            raise self.left_out_error(error) from None

    def left_out_error(self, error: GpushareError) -> Exception:
        """Return what to raise where a way cannot be used: the search goes on if there is another one."""
        return error if len(self._search.ways) == 1 else _LeftOut(error)

    def _search_way(self, stage: Stage, way: Way) -> None:
        """Measure the settings of a way until there is an answer; `_Over` ends it, and what was measured is kept."""
        is_last = way is Way.CAPS or Way.CAPS not in self._search.ways
        while True:
            # The end of the budget is for making the best setting certain, in the last way.
            is_ending = self.seconds_left() < _ANSWER_PART * self.options.most_seconds
            wanted = next_setting(self._search, way, self._known, late=is_ending and is_last)
            if wanted is None:
                stage.finished = True
                return
            setting, why_again = wanted
            slices_had_their_part = not is_last and self._seconds_spent() > _SLICES_PART * self.options.most_seconds
            caps_may_be_better = reason_to_skip(Way.CAPS, self._fresh_figures(), self._search.goal) is None
            if why_again and slices_had_their_part and caps_may_be_better:
                return
            figures_before = self._known.get(setting)
            text = setting.title if why_again is None else f"{setting.title} again: {why_again}"
            self.check_budget(stage.least_seconds(setting))
            self.reporter.doing(text)
            self.reporter.progress(text, self._seconds_spent(), self.options.most_seconds)
            try:
                stage.measure(setting, longer=figures_before is not None and figures_before.earlier is None)
            finally:
                # What was measured counts, also if this setting was not finished.
                for each in stage.settings:
                    if (figures := stage.figures(each)) is not None:
                        self._known[each] = figures
            figures_now = self._known[setting]
            self.reporter.measured(figures_now)
            if figures_before is not None and figures_before.earlier is not None:
                self._forget_if_changed(way, figures_before, figures_now)

    def _forget_if_changed(self, way: Way, earlier: Figures, present: Figures) -> None:
        """Forget earlier figures of a way if one of them no longer holds."""
        goal = self._search.goal
        if earlier.meets(goal) != present.meets(goal):
            self.reporter.doing(
                f"{present.setting.title} is not as it was on {earlier.earlier}: {way.value} are searched again"
            )
            self._known = {
                setting: figures
                for setting, figures in self._known.items()
                if figures.earlier is None or setting.way != way
            }

    def check_budget(self, seconds: float) -> None:
        """Raise _Over unless this much of the budget is left."""
        if seconds > self.seconds_left():
            raise _Over

    def seconds_left(self) -> float:
        """Return how much of the budget is left; infinite until all jobs have printed, because it does not count yet."""
        return math.inf if self._began is None else self.options.most_seconds - self._seconds_spent()

    def begin_budget(self) -> None:
        """Begin to count the budget, as all jobs have printed; later calls change nothing."""
        if self._began is None:
            self._began = self._experiment.now()

    def _seconds_spent(self) -> float:
        """Return the seconds of the budget that are used; 0 until all jobs have printed."""
        return 0.0 if self._began is None else self._experiment.now() - self._began

    def add_measuring_seconds(self, seconds: float) -> None:
        """Add a window to the time that was measured, if the budget counts already."""
        if self._began is not None:
            self._measuring_seconds += seconds

    def first_cap_limits(self) -> Limits:
        """Return the limits of the others at their start under MPS: the first cap; none if their rate alone is not known yet."""
        wanted = next_setting(self._search, Way.CAPS, self._known) if self.others_alone else None
        return Limits() if wanted is None else _mps_limits(wanted.setting)

    def _result(
        self, seconds: float, starting: float, stopped: KeyboardInterrupt | GpushareError | None, *, over: bool
    ) -> TuneResult:
        """Return the answer of the whole search from what is known now; all times in seconds."""
        goal = self._search.goal
        searched = [found for found in self._ways.values() if not isinstance(found, str)]
        stable = stopped is None and not over and all(each.stable for each in searched)
        production = next(stage for stage in self._stages if stage.settings).production_alone()
        others = self._figures_of_others()
        strangers = {pid: name for stage in self._stages for pid, name in stage.usage.usage().other_names.items()}
        whole = outcome(goal, list(self._known.values()), stable=stable)
        best_is_slice = whole.best is not None and whole.best.setting.way is Way.SLICES

        def row(figures: Figures | None) -> Row | None:
            return None if figures is None else _setting_row(figures, goal, whole)

        ended = "budget" if over else "answer"
        answer = TuneAnswer(
            gpu_name=self.device.gpu.name,
            driver=self.host.nvml.driver_version(),
            date=time.strftime("%Y-%m-%d %H:%M"),
            name=None,
            keep=goal.keep,
            p99_factor=goal.p99_factor,
            best=row(whole.best),
            nearest=row(whole.nearest),
            ways=tuple(
                WayAnswer(
                    way=cast("TunedWay", way),
                    best=None if isinstance(found, str) else row(found.best),
                    nearest=None if isinstance(found, str) else row(found.nearest),
                    left_out=found if isinstance(found, str) else None,
                )
                for way, found in self._ways.items()
            ),
            stable=whole.stable,
            ended=ended if stopped is None else "interrupted",
            low_priority_helps=whole.low_priority_helps,
            production_alone=production.rate,
            production_spread=_rounded(production.spread),
            production_p99=production.p99,
            production_busy_percent=production.busy,
            production_waits=any(figures.waits for figures in self._fresh_figures().values()),
            production_memory_bytes=production.memory,
            opportunistic_alone=others.rate,
            opportunistic_spread=_rounded(others.spread),
            opportunistic_memory_bytes=others.memory,
            copies=self.options.copies,
            seconds=round(seconds, 1),
            measuring_seconds=round(self._measuring_seconds, 1),
            starting_seconds=round(starting, 1),
            warning=None if best_is_slice else memory_warning(others.dram, production.dram),
            curve=tuple(_setting_row(figures, goal, whole) for figures in whole.curve),
        )
        return TuneResult(
            answer=answer, outcome=whole, production=production, others=others, stopped=stopped, strangers=strangers
        )

    def _others_rates(self) -> list[float]:
        """Return the rate of all others together in each window alone in which all of them printed."""
        return [math.fsum(rate or 0.0 for rate in seen.rates) for seen in self.others_alone if None not in seen.rates]

    def others_spread(self) -> float | None:
        """Return the standard deviation of the others' windows alone, relative to their mean; None: there is one at most."""
        return relative_deviation(self._others_rates())

    def _figures_of_others(self) -> Alone:
        """Return the figures of the opportunistic jobs while production is stopped, over all stages."""
        # Of each stage, the memory of each job.
        sizes_by_stage = [stage.others_memory for stage in self._stages if stage.others_memory]
        return Alone(
            rate=mean_known(self._others_rates()),
            spread=self.others_spread(),
            memory=max(map(sum, sizes_by_stage), default=None),
            peak=max(map(max, sizes_by_stage), default=None),
            **_mean_use([use for stage in self._stages for use in stage.others_use]),
        )


def _setting_row(figures: Figures, goal: Goal, whole: Outcome) -> Row:
    """Return a setting as it is printed; ``whole`` is the outcome of all ways together."""
    setting = figures.setting
    return Row(
        setting=setting.title,
        way=cast("TunedWay", setting.way),
        production_slice_us=setting.production_slice_us,
        other_slice_us=setting.other_slice_us,
        threads_percent=setting.threads,
        low_priority=setting.low,
        kept=round(figures.kept, 4),
        kept_error=round(figures.error, 4),
        p99=_rounded(figures.p99),
        p99_low=_rounded(figures.p99_low),
        p99_high=_rounded(figures.p99_high),
        opportunistic_share=_rounded(figures.share),
        opportunistic_share_error=_rounded(figures.share_error),
        windows=figures.windows,
        seconds=round(figures.seconds, 1),
        meets=figures.meets(goal),
        safe=figures.meets_safely(goal),
        frontier=setting in whole.frontier,
        chosen=whole.best is not None and setting == whole.best.setting,
        earlier=figures.earlier,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _mean_use(uses: Sequence[_Use]) -> dict[str, float | None]:
    """Return the fields of `Alone` for the use of several windows."""
    return {name: mean_known(getattr(use, name) for use in uses) for name in _Use._fields}


class Stage:
    """One way: a production job, and the opportunistic ones next to it."""

    # Started by `begin`.
    _production: Running

    def __init__(self, tuner: Tuner, experiment: Experiment, way: Way) -> None:
        self._tuner = tuner
        self.experiment = experiment
        self._way = way
        self._options = tuner.options
        self._others: list[Running] = []
        # What is in force: the limits of the others, the setting, and the slice of the others' server.
        self._limits = Limits()
        self._setting: Setting | None = None
        self._server_us = DEFAULT_SERVER_US
        # Whether the others are paused, and when they last went on.
        self._paused = False
        self._resumed: float | None = None
        # The latency that nearly all requests of production alone stay below, as it prints them.
        self._usual_latency: float | None = None
        self._window = self._options.window_seconds or _SHORTEST_SECONDS
        self._together_seconds = 2 * self._window
        self._others_seconds = 2 * self._window
        # By how much the windows are longer now.
        self._stretch = 1.0
        self._log: list[_WatchedWindow] = []
        self.start_took = 0.0
        self.default_us: int | None = None
        self.request_us: float | None = None
        self.finished = False
        host, device = tuner.host, tuner.device
        self.usage = UsageMeter(host, device)
        self._recorders = [kind(host.nvml, device.gpu.index) for kind in (ActivityRecorder, BandwidthRecorder)]
        # By window alone.
        self._production_use: list[_Use] = []
        self.others_use: list[_Use] = []
        # The most memory of production, and that of each of the others in the last window alone.
        self._memory: int | None = None
        self.others_memory: list[int] = []

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start all jobs, wait until they print, and find out how long a window must be. Errors as `tune`."""
        outside_mps = self._way is Way.SLICES
        self._tuner.reporter.doing("starting the jobs" if outside_mps else "starting the jobs, all under MPS")
        first_limits = Limits() if outside_mps else self._tuner.first_cap_limits()
        began = self.experiment.now()
        environment = self.experiment.grounds.environment(None if outside_mps else Limits())
        self._production = self.experiment.run(
            "production", self._options.production, environment, self._options.metric, outside=outside_mps
        )
        self._start_others(first_limits)
        self._wait_until_warm(self._production, *self._others)
        self.start_took = self.experiment.now() - began
        self._tuner.begin_budget()
        if outside_mps:
            # Where slices cannot be read and set, all jobs end, and the search goes on in the other way.
            try:
                self.default_us = self.experiment.slice_of(self._production.program) or None
                self._set_server_slice(FIRST_SERVER_US)
            except GpushareError as error:
                self.end()
                if error.code == "job_ended":
                    raise
                raise self._tuner.left_out_error(error) from None
        self._pause_others()
        self._fit_windows()
        if self._window <= _BRIEF_SECONDS:
            for _ in range(_FIRST_ALONE):
                self._watch_alone()
        if not self._tuner.others_alone:
            # Not at once: a job that has just begun is slow (H100: .86 of its rate a few seconds later).
            self._measure_others(first=True)

    def _start_others(self, limits: Limits) -> None:
        """Start all copies of the opportunistic commands with these limits."""
        environment = self.experiment.grounds.environment(limits)
        self._limits = limits
        self._paused = False
        self._resumed = None
        self._others = [
            self.experiment.run("opportunistic", command, environment, self._options.opportunistic_metric)
            for command in self._options.opportunistic
            for _ in range(self._options.copies)
        ]

    def _wait_until_warm(self, *jobs: Running) -> None:
        """Wait until jobs print what is measured, and a while longer; raise if one is not the MPS client it should be."""
        self._wait_until_printed(jobs)
        self.experiment.wait(self._options.warm_seconds)
        self._check_alive(*jobs)
        for job in jobs:
            if self.experiment.is_client(job) is False:
                raise OperationFailed(
                    f"the {job.program.title} job is not an MPS client: caps have no effect on it",
                    "check that it uses the GPU and does not change CUDA_MPS_PIPE_DIRECTORY or CUDA_VISIBLE_DEVICES",
                    code="not_attached",
                )

    def _wait_until_printed(self, jobs: Sequence[Running]) -> None:
        """Wait until jobs print what is measured, and tell the user once of each that is silent for long.

        Raises:
            OperationFailed, TimedOut: one has ended, never prints a number, or has printed nothing in time.
        """
        most_seconds = self._options.start_seconds
        started = self.experiment.now()
        silent = list(jobs)
        reported: set[str] = set()

        def all_have_printed() -> bool:
            self._check_alive(*jobs)
            silent[:] = [job for job in jobs if not (job.printed.values or job.printed.lines)]
            waited = self.experiment.now() - started
            for job in silent:
                title = job.program.title
                if waited >= _WAITS_SECONDS and title not in reported:
                    reported.add(title)
                    more = f"{max(0.0, most_seconds - waited):.0f} s more (--timeout)"
                    self._tuner.reporter.doing(
                        f"the {title} job has not printed {_awaited_output(job)} yet; tune waits for it for {more}"
                    )
            return not silent

        if not self.experiment.wait(most_seconds, all_have_printed):
            job = silent[0]
            last = f"; its last line: {job.program.last_line}" if job.program.last_line else ""
            raise TimedOut(
                f"the {job.program.title} job did not print {_awaited_output(job)} in {most_seconds:g} s{last}",
                "make it print its rate repeatedly, and give --metric 'rate=([0-9.]+)'; or more time: --timeout 20m",
                code="no_numbers",
            )

    def _check_alive(self, *jobs: Running) -> None:
        """Raise OperationFailed if a job, or production, has ended."""
        for job in (*jobs, self._production):
            if not job.runs:
                raise OperationFailed(
                    f"the {job.program.title} job ended before it was measured: {job.program.failure or 'exit code 0'}",
                    "give a command that runs until it is ended, at least for some minutes",
                    code="job_ended",
                )

    def _pause_others(self) -> None:
        """Stop the others, and wait until their queue has drained, for which they get a long slice."""
        if self._paused:
            return
        for job in self._others:
            self.experiment.stop(job.program)
        self._paused = True
        if self._server_us < DEFAULT_SERVER_US:
            self._set_server_slice(DEFAULT_SERVER_US)
        self.experiment.wait(self._options.drain_seconds)

    def _resume_others(self) -> None:
        """Let the others go on with the slice of the setting, and wait until they work as before."""
        if not self._paused:
            return
        if self._server_us < DEFAULT_SERVER_US:
            # While they were paused, they had a longer one.
            self._set_server_slice(self._server_us)
        self._paused = False
        self._resumed = self.experiment.now()
        for job in self._others:
            self.experiment.resume(job.program)
        self.experiment.wait(self._options.settle_seconds)

    def _kill_others(self) -> None:
        """Kill the opportunistic jobs, stopped and with their queues drained, so that the MPS server survives."""
        self._pause_others()
        for job in self._others:
            self.experiment.kill(job.program, bound_seconds=_DRAINED_SECONDS)
        self._others = []

    def end(self) -> None:
        if self._others:
            self._kill_others()
        self.experiment.end([self._production.program])
        self.experiment.forget_ended()

    def _set_server_slice(self, microseconds: int) -> None:
        """Set the slice of the MPS server, which all opportunistic jobs share."""
        self.experiment.set_server_slice([job.program for job in self._others], microseconds)

    def _apply(self, setting: Setting) -> bool:
        """Put a setting in force, and return whether the others were started again for it."""
        if setting == self._setting:
            return False
        self._setting = setting
        if setting.production_slice_us is not None and setting.other_slice_us is not None:
            self._set_slices(setting.production_slice_us, setting.other_slice_us)
            return False
        limits = _mps_limits(setting)
        if limits == self._limits:
            return False
        began = self.experiment.now()
        self._kill_others()
        self.experiment.forget_ended()
        self._start_others(limits)
        self._wait_until_warm(*self._others)
        self.start_took = self.experiment.now() - began
        return True

    def _set_slices(self, production_us: int, server_us: int) -> None:
        """Set the slices of production and of the others; paused others get theirs when they go on."""
        self.experiment.set_slice(self._production.program, production_us)
        self._server_us = server_us
        if not self._paused:
            self._set_server_slice(server_us)
            # Until the requests that began before are over.
            self.experiment.wait(self._options.settle_seconds / 2)

    def least_seconds(self, setting: Setting) -> float:
        """Return the least time that measuring a setting takes: with less of the budget left, it is not begun."""
        needs_start = self._way is Way.CAPS and _mps_limits(setting) != self._limits
        # The last second is for the pause and the resumption of the others.
        return (self.start_took if needs_start else 0.0) + self._window + self._together_seconds + 1.0

    # -- windows -------------------------------------------------------------------------------------------------------

    def _begin_window(self) -> float:
        """Read outputs and counters, so that only what comes later is of the window, and return the time."""
        for recorder in self._recorders:
            recorder.percent_since_last()
        self.experiment.read_outputs()
        self.usage.sample([program.pid for program in self.experiment.programs if program.runs])
        return self.experiment.now()

    def _end_window(self, start: float) -> float:
        """Return the end of a window that began at ``start``, and count it as measured. Raises OperationFailed: a job has ended."""
        self._check_alive(*self._others)
        end = self.experiment.now()
        self._tuner.add_measuring_seconds(end - start)
        return end

    def _watch(self, seconds: float, setting: Setting | None = None) -> _WatchedWindow:
        """Let the jobs run for this time, and return the window; ``setting`` None: production is alone."""
        self._tuner.check_budget(seconds)
        start = self._begin_window()
        self.experiment.wait(seconds)
        end = self._end_window(start)
        rates = () if setting is None else self._rates_of_others(start, end)
        return _WatchedWindow(start, end, self._production.printed.window(start, end), setting, rates)

    def _use_since_last(self) -> _Use:
        """Return how busy the GPU was in a window that ends now."""
        sm, dram = (recorder.percent_since_last() for recorder in self._recorders)
        return _Use(sm, dram, utilization(self._tuner.host.nvml, self._tuner.device.gpu.index))

    def _fit_windows(self) -> None:
        """Watch production alone until it has printed several times, and make the windows long enough for that."""
        printed = self._production.printed
        self._wait_for_backlog()
        start = self._begin_window()
        while True:
            self.experiment.wait(max(1.0, self._window))
            self._check_alive()
            now = self.experiment.now()
            moments = printed.moments(start, now)
            if len(moments) >= _LEAST_MOMENTS:
                break
            if now - start > 3 * _LONGEST_SECONDS:
                raise TimedOut(
                    f"the production job printed only {counted(len(moments), 'number')} in {now - start:.0f} s",
                    "make it print its rate at least once a second",
                    code="no_numbers",
                )
        end = self._end_window(start)
        if self._options.window_seconds is None:
            gap = max(after - before for before, after in pairwise([start, *moments, end]))
            seconds = max(_SHORTEST_SECONDS, _LEAST_MOMENTS * (end - start) / len(moments), _GAPS_PER_WINDOW * gap)
            self._window = min(_LONGEST_SECONDS, seconds)
        self._together_seconds = 2 * self._window
        window = printed.window(start, end)
        self._log.append(_WatchedWindow(start, end, window))
        if window.latencies:
            self._usual_latency = percentile(window.latencies, 95)
            if printed.latency_us is not None:
                self.request_us = printed.latency_us * percentile(window.latencies, 50)

    def _measure_alone(self) -> None:
        """Watch production alone; before that, if it is time, the others alone, with whose rates their shares are compared."""
        # The rate of capped others is no base for a share.
        uncapped = self._limits == Limits()
        last = self._tuner.others_alone[-1].end if self._tuner.others_alone else -math.inf
        if uncapped and self.experiment.now() - last > _OTHERS_ALONE_SECONDS:
            self._measure_others()
        self._pause_others()
        self._wait_until_caught_up()
        self._watch_alone()

    def _watch_alone(self) -> None:
        """Watch production alone for one window, and lengthen the windows if it prints more seldom."""
        seen = self._watch(self._stretch * self._window)
        moments = self._production.printed.moments(seen.end - 3 * _LONGEST_SECONDS, seen.end)
        gap = seen.end - moments[-1] if moments else 3 * _LONGEST_SECONDS
        if gap > max(_SILENT_SECONDS, 2 * self._window):
            raise OperationFailed(
                "the production job no longer prints anything, even without the other job",
                "find out why it makes no progress; give a command that runs until it is ended",
                code="job_silent",
            )
        if self._options.window_seconds is None and gap > self._window:
            self._window = min(_SILENT_SECONDS, _GAPS_PER_WINDOW * gap)
            self._together_seconds = max(2 * self._window, self._together_seconds)
        self._log.append(seen)
        self._production_use.append(self._use_since_last())
        memory = memory_now(self._tuner.host, self._tuner.device, self._production.program)
        self._memory = memory if self._memory is None else max(self._memory, memory or 0)

    def _measure_others(self, *, first: bool = False) -> None:
        """Watch the others while production is stopped; it then catches up with what has come meanwhile.

        The ``first`` window lasts until each of them has printed a few times, and decides how long the later ones are.
        """
        self._tuner.check_budget(self._others_seconds)
        self._resume_others()
        self.experiment.stop(self._production.program)
        self.experiment.wait(self._options.drain_seconds)
        try:
            start = self._begin_window()
            self.experiment.wait(self._others_seconds)
            if first:
                self.experiment.wait(_SILENT_SECONDS, lambda: self._fewest_outputs(start) >= _LEAST_OF_OTHERS)
            end = self._end_window(start)
            rates = self._rates_of_others(start, end)
            use = self._use_since_last()
        finally:
            self.experiment.resume(self._production.program)
        if first:
            self._fit_windows_of_others(start, end, rates)
        self.others_use.append(use)
        sizes = [memory_now(self._tuner.host, self._tuner.device, job.program) for job in self._others]
        if None not in sizes:
            self.others_memory = [size or 0 for size in sizes]
        self._tuner.others_alone.append(_WatchedWindow(start, end, Window(rate=None), rates=rates))

    def _fit_windows_of_others(self, start: float, end: float, rates: Sequence[float | None]) -> None:
        """Make windows with the others long enough for each to print several times, by their first window alone."""
        if all(rate == 0 for rate in rates):
            raise OperationFailed(
                "the opportunistic job alone printed only rates of 0: it does no measurable work",
                "make it print its rate of work: rate=12.5; or match another number: --opportunistic-metric REGEX",
                code="no_numbers",
            )
        gap = (end - start) / max(1, self._fewest_outputs(start))
        self._others_seconds = max(2 * self._window, min(_LEAST_OF_OTHERS * gap, _LONGEST_FOR_OTHERS_SECONDS))
        self._together_seconds = max(self._together_seconds, self._others_seconds)

    def _fewest_outputs(self, start: float) -> int:
        """Return how many outputs the opportunistic job that printed the least has printed since then."""
        return min(len(job.printed.moments(start, self.experiment.now())) for job in self._others)

    def _wait_for_backlog(self) -> None:
        """Wait until production alone has served the requests that came while all started: its latencies fall no more."""
        printed = self._production.printed
        last_median = math.inf
        deadline = self.experiment.now() + _BACKLOG_SECONDS
        while printed.latencies and self.experiment.now() < deadline:
            start = self.experiment.now()
            self.experiment.wait(_SHORTEST_SECONDS)
            recent = [value for at, value in printed.latencies if at > start]
            if not recent or percentile(recent, 50) > _STILL_FALLING * last_median:
                return
            last_median = percentile(recent, 50)

    def _wait_until_caught_up(self) -> None:
        """Wait until production has served the requests that came while it was stopped or too slow for them.

        A window alone would count them as its own, with latencies that are not those of production alone.
        """
        if self._usual_latency is None:
            return
        began = self.experiment.now()
        # Where a CUDA graph runs, latencies differ less from each other than the clock of the GPU changes them.
        bound = _AS_FAST_AS_ALONE * self._usual_latency

        def has_caught_up() -> bool:
            """Return whether production has served some requests in a row as fast as when it was alone."""
            recent = [value for at, value in self._production.printed.latencies[-_CAUGHT_UP_REQUESTS:] if at > began]
            return len(recent) == _CAUGHT_UP_REQUESTS and max(recent) <= bound

        self.experiment.wait(max(0.0, min(_CAUGHT_UP_SECONDS, self._tuner.seconds_left())), has_caught_up)

    def _rates_of_others(self, start: float, end: float) -> tuple[float | None, ...]:
        """Return the rate of each of the others in a window; None: it printed nothing.

        A first number after a pause may include the pause: it counts only if it is the only one in the window.
        """
        rates = []
        for job in self._others:
            rate = None
            if self._resumed is not None and not job.printed.moments(self._resumed, start):
                rate = job.printed.window(start, end, skip=1).rate
            rates.append(job.printed.window(start, end).rate if rate is None else rate)
        return tuple(rates)

    def measure(self, setting: Setting, *, longer: bool) -> None:
        """Watch production under a setting, and alone in turn, until the figures decide.

        ``longer``: until they are certain, or will not become so.
        """
        rounds = 0
        started_again = self._apply(setting)
        self._stretch = 1.0
        if longer:
            self._stretch = _STRETCH
        elif started_again:
            # So that the start pays.
            round_seconds = self._window + self._together_seconds
            wanted = _STARTS_WORTH * (self.start_took + _PAUSES_SECONDS) / round_seconds
            self._stretch = max(1.0, min(wanted, FIRST_SECONDS / self._together_seconds))
        while True:
            self._measure_alone()
            self._resume_others()
            self._log.append(self._watch(self._stretch * self._together_seconds, setting))
            rounds += 1
            figures = self.figures(setting)
            if figures is not None and self._is_decided(figures, longer=longer):
                return
            if figures is None and rounds > _MOST_SILENT_ROUNDS:
                raise OperationFailed(
                    "the production job printed nothing that can be measured",
                    "give --metric a number that it prints at least once a second",
                    code="no_numbers",
                )

    def _is_decided(self, figures: Figures, *, longer: bool) -> bool:
        """Return whether a setting need not be watched any more: for the search, or if ``longer`` for an answer."""
        goal = self._options.search.goal
        if goal.p99_factor is not None and figures.p99 is None and figures.seconds >= FIRST_SECONDS:
            raise OperationFailed(
                "the production job prints too few latencies for a p99",
                "make it print latency_ms=NUMBER of each request, or p99=NUMBER; or give --latency, or longer windows: --window 5s",
                code="no_latencies",
            )
        verdict = figures.verdict(goal)
        if figures.seconds >= figures.most_seconds(goal) or verdict is False:
            return True
        if longer:
            return verdict is True and figures.is_certain(goal)
        return verdict is True or figures.seconds >= FIRST_SECONDS or figures.meets_clearly(goal)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> list[Setting]:
        """Return the settings measured so far."""
        return list(dict.fromkeys(seen.setting for seen in self._log if seen.setting is not None))

    def figures(self, setting: Setting) -> Figures | None:
        """Return production's rate and p99 against alone, and the share of the others; None: too little was printed."""
        together: list[_WatchedWindow] = []
        pairs: list[tuple[float, float]] = []
        for index, seen in enumerate(self._log):
            if seen.setting != setting:
                continue
            together.append(seen)
            # The windows alone right before and after it.
            neighbours = [*self._log[index - 1 : index], *self._log[index + 1 : index + 2]]
            rate_alone = mean_known(other.rate for other in neighbours if other.setting is None) or 0.0
            # Where production printed nothing in both, it stood still by itself.
            if seen.rate or rate_alone:
                pairs.append((seen.rate, rate_alone))
        kept = paired_ratio(pairs)
        if kept is None:
            return None
        windows_alone = self._windows_alone_near(together)
        windows_together = [seen.window for seen in together]
        p99_alone = p99(windows_alone)
        p99_together = p99(windows_together)
        interval = p99_factor_interval(windows_alone, windows_together)
        share = self._share_of_others(together)
        return Figures(
            setting=setting,
            kept=kept.value,
            error=self._error_of_kept(kept.error, len(pairs)),
            p99=p99_together / p99_alone if p99_alone and p99_together is not None else None,
            p99_low=None if interval is None else interval.low,
            p99_high=None if interval is None else interval.high,
            share=None if share is None else share.value,
            share_error=None if share is None else share.error,
            waits=self._waits_for_requests(),
            seconds=math.fsum(seen.end - seen.start for seen in together),
            windows=len(together),
        )

    @property
    def _log_alone(self) -> list[_WatchedWindow]:
        """Return the windows of production alone."""
        return [seen for seen in self._log if seen.setting is None]

    def _error_of_kept(self, own_error: float | None, count: int) -> float:
        """Return the standard error of the part of its rate that production keeps, from ``count`` pairs of windows.

        It is the pairs' own, or that of production's windows alone if they scatter more.
        """
        alone = self._rates_alone()
        scatter = max(_LEAST_SCATTER, relative_deviation(alone) or 0.0) * math.sqrt(_PAIRED_VARIANCE / count)
        # A scatter of few windows is itself uncertain: Student's quantile is that much above the 2 of many windows.
        uncertainty = t_quantile(max(1, len(alone) - 1)) / 2
        return max(scatter * uncertainty, _SHARED_WINDOW_FACTOR * (own_error or 0.0))

    def _rates_alone(self) -> list[float]:
        """Return the rate of each window of production alone in which it worked."""
        return [seen.rate for seen in self._log_alone if seen.rate > 0]

    def _windows_alone_near(self, together: Sequence[_WatchedWindow]) -> list[Window]:
        """Return the windows of production alone for a p99: the nearest in time, more than those together, enough requests.

        Hosts drift from minute to minute: the same setting had 0.67 and 1.27 times the p99 of all earlier windows.
        """
        nearest = sorted(self._log_alone, key=lambda seen: min(abs(seen.start - other.start) for other in together))
        chosen: list[Window] = []
        for seen in nearest:
            if len(chosen) > len(together) and len(latencies_of(chosen)) >= _REQUESTS_ALONE:
                break
            chosen.append(seen.window)
        return chosen

    def _share_of_others(self, together: Sequence[_WatchedWindow]) -> Estimate | None:
        """Return which share of its rate alone each of the others has, as a mean of them and of these windows."""
        shares = [share for seen in together if (share := self._share_in(seen)) is not None]
        if not shares:
            return None
        if len(shares) > 1:
            return Estimate(mean(shares), deviation(shares) / math.sqrt(len(shares)))
        # One window scatters as those of the others alone do.
        spread = self._tuner.others_spread()
        return Estimate(shares[0], None if spread is None else spread * shares[0])

    def _share_in(self, seen: _WatchedWindow) -> float | None:
        """Return the share of its rate alone that each of the others has in a window, on average; None: one is unknown."""
        nearest = sorted(self._tuner.others_alone, key=lambda alone: abs(alone.start - seen.start))[:2]
        shares = []
        for job, rate in enumerate(seen.rates):
            rate_alone = mean_known(alone.rates[job] for alone in nearest)
            if rate is None or not rate_alone:
                return None
            shares.append(rate / rate_alone)
        return mean(shares)

    def _waits_for_requests(self) -> bool:
        """Return whether production waits for requests that come at random: its rate is then the demand."""
        printed = self._production.printed
        latencies = latencies_of([seen.window for seen in self._log_alone])
        if not latencies or not printed.latency_us:
            return False
        spans = [(seen.start, seen.end) for seen in self._log_alone]
        scatter = dispersion([at for at, _ in printed.latencies], spans)
        if scatter is None:
            return False
        # Requests per second, times the seconds that each takes.
        per_second = len(latencies) / math.fsum(end - start for start, end in spans)
        load = per_second * mean(latencies) * printed.latency_us / 1e6
        return scatter >= _RANDOM_SCATTER and load < _WAITING_LOAD

    def production_alone(self) -> Alone:
        rates = self._rates_alone()
        return Alone(
            rate=mean_known(rates),
            spread=relative_deviation(rates),
            p99=p99([seen.window for seen in self._log_alone]),
            memory=self._memory,
            peak=self._memory,
            **_mean_use(self._production_use),
        )


def _awaited_output(job: Running) -> str:
    """Return what a job must print before it can be measured."""
    return "a number that --metric matches" if job.printed.metric.printed else "a line"


def _mps_limits(setting: Setting) -> Limits:
    """Return the limits of the opportunistic MPS clients under a setting; at 100 % there is no cap."""
    return Limits(
        threads_percent=None if setting.threads >= 100 else setting.threads,
        priority=Priority.LOW if setting.low else Priority.NORMAL,
    )


# -- what is kept ------------------------------------------------------------------------------------------------------


def tuned_record(options: TuneOptions, result: TuneResult, name: str) -> Tuned | None:
    """Return what `run` reads of the best setting; None: there is none that may be kept.

    Of a search that was interrupted, only a setting that surely meets the goal is.
    """
    best = result.outcome.best
    if best is None or (result.stopped is not None and not best.meets_safely(options.search.goal)):
        return None
    return Tuned(
        name=name,
        gpu_name=result.answer.gpu_name,
        driver=result.answer.driver,
        threads_percent=best.setting.threads,
        low_priority=best.setting.low,
        way=best.setting.way,
        production_slice_us=best.setting.production_slice_us,
        other_slice_us=best.setting.other_slice_us,
        production_memory_bytes=result.production.memory,
    )


def commands(tuned: Tuned, device: Device, options: TuneOptions) -> list[str]:
    """Return the commands that start all jobs with the tuned setting, which ``gpushare run`` reads from its record.

    In the background, so that they can be typed one after the other.
    """
    production = JobCommand(gpu=device.selector, production=tuned.name, detach=True, program=options.production)
    others = [
        JobCommand(gpu=device.selector, opportunistic=True, target=tuned.name, detach=True, program=command)
        for command in options.opportunistic
        for _ in range(options.copies)
    ]
    return [str(command) for command in (production, *others)]


@values.dataclass(frozen=True, kw_only=True)
class _Tried(Kept):
    """All that was measured of some jobs on a kind of GPU."""

    driver: str | None
    at: float
    figures: tuple[Figures, ...] = field(default=())


# Figures of another month say little about the programs of today.
_MOST_DAYS: Final = 30
# Command lines may hold a secret: the file is named by their digest.
_TRIED: Final = RecordStore(_Tried, "tried", "the figures of an earlier tune", survives_reboot=True, mode=0o600)


def find_tried(host: Host, device: Device, options: TuneOptions) -> tuple[Figures, ...]:
    """Return the figures of an earlier search of the same jobs, with its date; none of another driver, or too old ones."""
    record = _TRIED.read(_TRIED.path(host, _record_key(device, options)))
    now = time.time()
    if record is None or record.driver != host.nvml.driver_version() or not 0 <= now - record.at < _MOST_DAYS * 86400:
        return ()
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at))
    return tuple(replace(figures, earlier=date) for figures in record.figures)


def keep_tried(host: Host, device: Device, options: TuneOptions, measured: Sequence[Figures]) -> None:
    """Keep what was measured, for a later search; a failure to do so changes nothing."""
    with contextlib.suppress(GpushareError):
        figures = tuple(replace(each, earlier=None) for each in measured)
        path = _TRIED.path(host, _record_key(device, options))
        _TRIED.write(_Tried(driver=host.nvml.driver_version(), at=time.time(), figures=figures, path=path))


def _record_key(device: Device, options: TuneOptions) -> str:
    """Return the name of the record of a search: by GPU model, commands and metrics."""
    metrics = (options.metric.pattern, options.metric.latency, options.opportunistic_metric.pattern)
    parts = (device.gpu.name, options.production, *options.opportunistic, options.copies, *metrics)
    words = [" ".join(map(repr, part)) if isinstance(part, (list, tuple)) else repr(part) for part in parts]
    return digest_of_words(words)
