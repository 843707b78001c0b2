"""Tuning jobs whose needs say the right answer: told ones on a clock of their own, and real ones on a simulated GPU."""

from __future__ import annotations

import contextlib
import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.benchmark import Metric
from gpushare.base.errors import InUse, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import Way
from gpushare.base.selection import Device
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.measure.experiment import Grounds
from gpushare.measure.metric import p99
from gpushare.measure.search import FIRST_SECONDS, Figures, Goal, Search, Setting, slice_setting
from gpushare.measure.tune import Stage, TuneOptions, Tuner, TuneReporter, TuneResult, _Over, tune
from gpushare.sim import admin
from gpushare.sim.current import changing
from gpushare.sim.state import DEFAULT_SLICE_US, StateFile
from tests.errors import fails
from tests.measure.told_jobs import ToldExperiment, ToldJob, tell

RATE = Metric(pattern=r"rate=([0-9.]+)")
# A request of 1 ms every 25 ms; and requests of 5.6 ms at half load.
SHORT, LONG = ("95", "--busy", "4", "--latency", "1"), ("95", "--busy", "50", "--latency", "5.6")
REFUSAL = NotSupported("process 7: a sandbox forbids pidfd_getfd", "run it on the host", code="seccomp")


def job(*need: object) -> list[str]:
    """Return a job that needs so much of the GPU."""
    return [sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", "--need", *map(str, need)]


def options(production: list[str], *others: list[str], **more: Any) -> TuneOptions:
    """Return options for these jobs; the goal and the ways are of the search."""
    search = {"goal": Goal(keep=0.97), "ways": ("caps",), "caps": (20.0, 40.0, 60.0, 80.0)}
    search |= {name: more.pop(name) for name in ("goal", "ways", "caps") if name in more}
    return TuneOptions(
        **{
            "production": production,
            "opportunistic": others or (job(95),),
            "search": Search(**search),  # type: ignore[arg-type]
            "metric": RATE,
            "opportunistic_metric": RATE,
            **more,
        }
    )


Tuned = Callable[..., TuneResult]


@pytest.fixture
def tuned(host: Host, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Return what tunes told jobs."""

    def run(*words: Any, kind: type[ToldExperiment] = ToldExperiment, **more: Any) -> TuneResult:
        tell(monkeypatch, kind)
        reporter, earlier = more.pop("reporter", None), more.pop("earlier", ())
        # As it is now: a test may have changed it.
        device = Device(gpu=host.nvml.gpu(0))
        return tune(host, device, options(*words, **more), reporter, earlier)

    return run


def shares(result: TuneResult) -> dict[Setting, float]:
    """Return what production kept under each setting."""
    return {figures.setting: figures.kept for figures in result.outcome.curve}


def test_the_largest_cap_with_which_production_keeps_its_rate_is_found(tuned: Tuned, host: Host) -> None:
    # 30 beside 60 fits, beside 80 does not: 100/110 is left.
    result = tuned(job(30))
    best = result.outcome.best
    assert best.setting == Setting(threads=60.0)
    assert shares(result)[Setting(threads=80.0)] == pytest.approx(100 / 110, abs=0.005)
    assert best.kept == pytest.approx(1.0, abs=0.005)
    assert best.share == pytest.approx(60 / 95, rel=0.01)
    assert result.outcome.stable
    assert result.production.rate == pytest.approx(100, rel=0.005)
    assert result.others.rate == pytest.approx(100, rel=0.005)
    assert result.production.memory is not None
    # Nothing is left: no daemon, no client.
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")


def test_slices_are_found_fast_and_most_of_the_time_is_measured(tuned: Tuned) -> None:
    result = tuned(job(*SHORT), goal=Goal(keep=0.97, p99_factor=1.5), ways=("slices",))
    best = result.outcome.best
    # A request waits for one slice and a switch: 1 + .25 + .1. Longer ones give the other no more.
    assert best.setting == slice_setting(2048, 100)
    assert (best.p99, best.kept) == (pytest.approx(1.35, abs=0.02), pytest.approx(1.0, abs=0.005))
    assert best.meets_safely(Goal(keep=0.97, p99_factor=1.5))
    assert result.answer.seconds < 60
    assert result.answer.measuring_seconds > 0.6 * result.answer.seconds


def test_what_needed_a_start_is_watched_longer_than_what_did_not(tuned: Tuned) -> None:
    result = tuned(job(30), goal=Goal(keep=0.9))
    seconds = {figures.setting: figures.seconds for figures in result.outcome.curve if figures.windows == 1}
    # All were started without the first cap; a start and the pauses take over two seconds.
    started = [each for setting, each in seconds.items() if setting.threads not in {60.0, 100.0}]
    assert started
    assert min(started) > 1.5 * 1.2
    assert max(started) <= FIRST_SECONDS + 0.1


@pytest.mark.parametrize(("ways", "seconds"), [(("slices",), 60), (("caps",), 150), (("slices", "caps"), 150)])
def test_slices_alone_have_a_shorter_budget(ways: tuple[str, ...], seconds: float) -> None:
    assert options(job(30), ways=ways).most_seconds == seconds
    assert options(job(30), ways=ways, budget_seconds=7.0).most_seconds == 7


def test_both_ways_are_searched_within_the_budget(tuned: Tuned) -> None:
    result = tuned(job(*LONG), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices", "caps"))
    assert result.outcome.best.setting.way == "slices"
    assert [way.way for way in result.answer.ways] == ["slices", "caps"]
    assert result.answer.ended == "answer"
    assert result.answer.seconds < 150


def test_what_leaves_the_others_all_makes_caps_needless(tuned: Tuned) -> None:
    result = tuned(
        job("95", "--busy", "1", "--latency", "1"), goal=Goal(keep=0.97, p99_factor=1.6), ways=("slices", "caps")
    )
    (caps,) = (way for way in result.answer.ways if way.way == "caps")
    assert (caps.best, caps.nearest) == (None, None)
    assert (caps.left_out or "").startswith("with slices the other job keeps 0.9")
    assert {figures.setting.way for figures in result.outcome.curve} == {"slices"}


def test_the_jobs_alone_are_measured_again_and_again(tuned: Tuned) -> None:
    """The other becomes faster after a while: a share of more than all of it would be wrong."""

    class WarmsUp(ToldExperiment):
        def scatter(self, job: ToldJob) -> float:
            early = job.title == "opportunistic" and job.lines < 400
            return super().scatter(job) * (0.8 if early else 1.0)

    result = tuned(job(*SHORT), kind=WarmsUp, goal=Goal(keep=0.97, p99_factor=1.5), ways=("slices",))
    # Measured once, at the start, it would be 1.25.
    assert (result.outcome.best.share or 9) <= 1.1


class Seldom(ToldExperiment):
    """Both print every eight seconds."""

    printed = 0.0

    def _print(self) -> None:
        if ToldExperiment.clock - Seldom.printed >= 8.0:
            Seldom.printed = ToldExperiment.clock
            super()._print()


def test_jobs_that_print_seldom_have_an_answer_within_the_budget(tuned: Tuned) -> None:
    Seldom.printed = 0.0
    result = tuned(job(30), kind=Seldom)
    assert result.outcome.best.setting == Setting(threads=60.0)


class CountsPauses(ToldExperiment):
    """Both print once a second, and the first number after a pause counts the pause too."""

    printed = 0.0

    def resume(self, program: ToldJob) -> None:
        super().resume(program)
        program.lines = -1

    def _print(self) -> None:
        if ToldExperiment.clock - CountsPauses.printed >= 1.0:
            CountsPauses.printed = ToldExperiment.clock
            super()._print()

    def scatter(self, job: ToldJob) -> float:
        return 0.3 if job.lines == 0 else super().scatter(job)


def test_the_first_number_after_a_pause_does_not_count(tuned: Tuned) -> None:
    CountsPauses.printed = 0.0
    result = tuned(job(30), kind=CountsPauses)
    assert result.others.rate == pytest.approx(100, rel=0.01)
    assert result.outcome.best.share == pytest.approx(60 / 95, rel=0.02)


def opportunistic_caps(start: int) -> list[list[float]]:
    """Return the caps of the opportunistic jobs that were started from the n-th job on, after each production job."""
    caps: list[list[float]] = []
    for each in ToldExperiment.started[start:]:
        if each.title == "production":
            caps.append([])
        else:
            caps[-1].append(each.cap)
    return caps


def test_the_others_start_with_the_first_cap_once_their_rate_alone_is_known(tuned: Tuned) -> None:
    start = len(ToldExperiment.started)
    tuned(job(30))
    ((first, *_),) = opportunistic_caps(start)
    # With a cap, they would not show their rate alone.
    assert first == 100
    start = len(ToldExperiment.started)
    tuned(job(*LONG), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices", "caps"))
    assert [first for first, *_ in opportunistic_caps(start)] == [100, 60]


class ToldStage:
    """Stands in for `Stage`: each setting takes 30 s, and its figures never become certain."""

    finished = False

    def __init__(self, tuner: Tuner) -> None:
        self.seconds: dict[Setting, float] = {}
        self.order: list[tuple[Setting, float]] = []
        self.now = 0.0
        tuner._experiment = SimpleNamespace(now=lambda: self.now)  # type: ignore[assignment]
        tuner.begin_budget()

    @property
    def settings(self) -> list[Setting]:
        return list(self.seconds)

    def least_seconds(self, _: Setting) -> float:
        return 1.0

    def measure(self, setting: Setting, **_: Any) -> None:
        self.order.append((setting, self.now))
        self.now += 30.0
        self.seconds[setting] = self.seconds.get(setting, 0.0) + 1.0

    def figures(self, setting: Setting) -> Figures:
        # The others get more with a longer slice, and production keeps enough only of the shorter ones.
        given = setting.given_others
        kept = 0.98 if given <= 200 else 0.8
        share = 0.3 + given / 10_000
        return Figures(setting=setting, kept=kept, error=0.02, share=share, seconds=self.seconds[setting], windows=1)


@pytest.mark.parametrize("ways", [("slices",), ("slices", "caps")])
def test_slices_are_not_made_certain_in_the_part_of_the_budget_for_caps(
    ways: tuple[Way, ...], host: Host, device: Device
) -> None:
    tuner = Tuner(host, device, options(job(30), ways=tuple(map(Way, ways)), budget_seconds=200.0), TuneReporter())
    stage = ToldStage(tuner)
    with contextlib.suppress(_Over):
        tuner._search_way(stage, Way.SLICES)  # type: ignore[arg-type]
    seen: set[Setting] = set()
    again = [at for setting, at in stage.order if setting in seen or seen.add(setting)]  # type: ignore[func-returns-value]
    late = [setting for setting, at in stage.order if at > 0.4 * 200]
    # A setting that was not measured yet is, also after that part.
    assert late
    assert bool(again) is (len(ways) == 1)
    assert not stage.finished


class Uneven(ToldExperiment):
    """Production's rate drifts by 3 percent from second to second, as on a busy host."""

    source = random.Random()  # noqa: S311 - not a secret
    drift = 0.0

    def scatter(self, job: ToldJob) -> float:
        if job.title == "production":
            Uneven.drift += 0.006 * self.source.gauss(0, 1) - 0.02 * Uneven.drift
            return math.exp(Uneven.drift + 0.02 * self.source.gauss(0, 1))
        return super().scatter(job)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_uneven_host_does_not_decide(seed: int, tuned: Tuned) -> None:
    """One window says little: its scatter is known from the windows alone before it."""
    Uneven.source, Uneven.drift = random.Random(seed), 0.0  # noqa: S311
    caps = tuple(map(float, range(10, 101, 10)))
    for ways, goal, kept, cap in ((("caps",), 0.97, 1.0, 70.0), (("slices", "caps"), 0.85, 0.87, 20.0)):
        result = tuned(job(30 if len(ways) == 1 else 95), kind=Uneven, goal=Goal(keep=goal), ways=ways, caps=caps)
        best = result.outcome.best
        assert best.setting.threads == cap
        assert best.kept == pytest.approx(kept, abs=0.03)
        assert result.answer.seconds <= 150


class Queue(ToldExperiment):
    """Production is a server: requests come at random whether it runs or not, and wait for each other."""

    source = random.Random(7)  # noqa: S311 - not a secret

    def _print(self) -> None:
        now = ToldExperiment.clock
        servers = [job for job in self.programs if job.title == "production" and job.runs]
        for job in servers:
            state = job.__dict__.setdefault("queue", {"due": now, "free": now, "waiting": []})
            while state["due"] <= now:
                state["waiting"].append(state["due"])
                state["due"] += self.source.expovariate(100 * job.busy / 100 / (job.latency or 1.0) * 10)
            if job.paused:
                state["free"] = now
                continue
            factor = self._pace(job, [each for each in self.programs if each.runs and not each.paused]).latency
            while state["waiting"]:
                ends = max(state["free"], state["waiting"][0]) + (job.latency or 0.0) / 1000 * factor
                if ends > now:
                    break
                state["free"] = ends
                job.listen(f"latency_ms={1000 * (ends - state['waiting'].pop(0)):.3f}", now)
        needs = [job.need for job in servers]
        for job in servers:
            job.need = None
        super()._print()
        for job, need in zip(servers, needs, strict=True):
            job.need = need


def test_requests_at_random_are_the_demand_and_the_latency_decides(tuned: Tuned, host: Host, device: Device) -> None:
    """What came while production was stopped, or too slow, is served before it is watched alone."""
    server = job("95", "--busy", "45", "--latency", "4")
    goal = Goal(keep=0.97, p99_factor=1.35)
    result = tuned(server, kind=Queue, goal=goal, ways=("slices",), metric=Metric())
    best = result.outcome.best
    assert result.answer.production_waits
    assert best.waits
    assert result.production.rate == pytest.approx(112.5, rel=0.08)
    # Watched for long, without a stop.
    with Queue(host, Grounds(host, device, sys.executable)) as queue:
        programs = [
            queue.run(title, argv, {}, Metric(), outside=title == "production")
            for title, argv in (("production", server), ("opportunistic", job(95)))
        ]
        programs[0].program.slice_us = best.setting.production_slice_us  # type: ignore[attr-defined]
        programs[1].program.slice_us = best.setting.other_slice_us  # type: ignore[attr-defined]
        spans = []
        for paused in (True, False):
            programs[1].program.paused = paused  # type: ignore[attr-defined]
            queue.wait(3.0)
            start = queue.now()
            queue.wait(120.0)
            spans.append(programs[0].printed.window(start, queue.now()))
    alone, together = (p99([window]) or 0.0 for window in spans)
    assert best.p99_high is not None
    assert best.p99_low <= together / alone <= best.p99_high
    assert result.answer.seconds < 100


def test_copies_and_jobs_of_two_kinds_run_together(tuned: Tuned) -> None:
    one = tuned(job(*LONG), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices",))
    three = tuned(job(*LONG), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices",), copies=3)
    two = tuned(job(*LONG), job(95), job(30, "--rate", "7"), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices",))
    assert one.outcome.best is not None
    for result, jobs in ((three, 3), (two, 2)):
        # They share one slice.
        assert result.outcome.best.setting == one.outcome.best.setting
        assert result.outcome.best.p99 == pytest.approx(one.outcome.best.p99, abs=0.01)
        assert result.outcome.best.share == pytest.approx(one.outcome.best.share, abs=0.02)
        assert sum(each.title == "opportunistic" for each in ToldExperiment.started[-jobs - 1 :]) == jobs


# -- any time ----------------------------------------------------------------------------------------------------------


class Stopping(TuneReporter):
    """Ends the search at the n-th setting."""

    def __init__(self, count: int, error: BaseException) -> None:
        self.count, self.error, self.said = count, error, list[str]()

    def doing(self, what: str) -> None:
        self.said.append(what)
        if what.startswith(("cap", "slice")):
            self.count -= 1
            if not self.count:
                raise self.error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OperationFailed("the production job ended", "let it run", code="job_ended")]
)
def test_what_was_measured_until_then_is_the_answer(tuned: Tuned, error: Any) -> None:
    result = tuned(job(30), reporter=Stopping(3, error))
    assert result.stopped is error
    assert len(result.outcome.curve) == 2
    assert result.outcome.best is not None
    assert not result.outcome.stable
    with pytest.raises(type(error)):
        tuned(job(30), reporter=Stopping(1, error))


def test_the_end_of_the_budget_is_an_answer(tuned: Tuned) -> None:
    result = tuned(job(*LONG), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices", "caps"), budget_seconds=12.0)
    assert result.answer.ended == "budget"
    assert result.stopped is None
    # What has begun is finished.
    assert result.answer.seconds <= 13.0
    assert result.outcome.best is not None
    with pytest.raises(TimedOut, match="nothing was measured in 1 s"):
        tuned(job(30), budget_seconds=1.0)


def test_a_second_search_goes_on_and_doubts_what_does_not_hold(tuned: Tuned) -> None:
    first = tuned(job(30))
    earlier = [replace(figures, earlier="2026-11-25 10:00") for figures in first.outcome.curve]
    heard = Stopping(99, KeyboardInterrupt())
    second = tuned(job(30), earlier=earlier, reporter=heard)
    assert second.outcome.best.setting == Setting(threads=60.0)
    assert sum(figures.earlier is None for figures in second.outcome.curve) < len(first.outcome.curve)
    assert any("does it still hold?" in text for text in heard.said)
    # Production needs more than it did.
    third = tuned(job(60), earlier=earlier, reporter=heard)
    assert any("are searched again" in text for text in heard.said)
    assert third.outcome.best.setting.threads == 40.0


def test_no_setting_is_measured_twice_without_a_reason(tuned: Tuned) -> None:
    heard = Stopping(999, KeyboardInterrupt())
    tuned(job(*LONG), goal=Goal(keep=0.9, p99_factor=1.2), ways=("slices", "caps"), reporter=heard)
    settings = [text for text in heard.said if text.startswith(("cap", "slice "))]
    assert len(settings) == len(set(settings))


# -- what cannot be measured -------------------------------------------------------------------------------------------


def test_where_slices_cannot_be_set_caps_are_searched(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToldExperiment, "refusal", REFUSAL)
    result = tuned(job(30), ways=("slices", "caps"))
    assert {figures.setting.way for figures in result.outcome.curve} == {"caps"}
    (slices,) = (way for way in result.answer.ways if way.left_out)
    assert slices.left_out == "process 7: a sandbox forbids pidfd_getfd; run it on the host"
    with pytest.raises(NotSupported, match="pidfd_getfd"):
        tuned(job(30), ways=("slices",))


def test_jobs_that_share_the_slice_already_leave_slices_out(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.run.group.slices_of_group", lambda *_: {7: 200})
    assert {figures.setting.way for figures in tuned(job(30), ways=("slices", "caps")).outcome.curve} == {"caps"}
    with pytest.raises(InUse, match="other opportunistic jobs"):
        tuned(job(30), ways=("slices",))


def test_a_gpu_for_one_process_at_a_time_has_no_slices(tuned: Tuned, host: Host) -> None:
    with changing(StateFile(host.spec)) as (state, _):
        state.gpus[0].compute_mode = 3
    assert {figures.setting.way for figures in tuned(job(30), ways=("slices", "caps")).outcome.curve} == {"caps"}
    with pytest.raises(InUse, match="compute mode"):
        tuned(job(30), ways=("slices",))


def test_where_mps_cannot_be_had_nothing_is_searched(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise NotSupported("no MPS in this container", "run it on the host", code="no_mps")

    monkeypatch.setattr("gpushare.measure.experiment.MpsShare.open", refused)
    with pytest.raises(NotSupported, match="no MPS"):
        tuned(job(30))


class FallsSilent(ToldExperiment):
    """Production prints for a while, and then nothing any more."""

    def _print(self) -> None:
        for each in self.programs:
            if each.title == "production" and each.lines > 600:
                each.need = None
        super()._print()


class PrintsNonsense(ToldExperiment):
    """The other job prints what is no number."""

    def _print(self) -> None:
        self.programs[-1].listen("rate=1.2.3", ToldExperiment.clock)


@pytest.mark.parametrize(
    ("kind", "production", "other", "code"),
    [
        (FallsSilent, job(30), job(95), "job_silent"),
        (PrintsNonsense, job(30), job(95), "no_numbers"),
        (ToldExperiment, job(30), job(95, "--rate", "0"), "no_numbers"),
        (ToldExperiment, ["sleep", "600"], job(95), "no_numbers"),
        (ToldExperiment, job(30), ["sleep", "600"], "no_numbers"),
    ],
)
def test_jobs_that_tell_nothing_are_given_up(
    tuned: Tuned, kind: type[ToldExperiment], production: list[str], other: list[str], code: str
) -> None:
    began = ToldExperiment.clock
    try:
        result = tuned(production, other, kind=kind, start_seconds=60.0)
        assert isinstance(result.stopped, OperationFailed)
        assert result.stopped.code == code
    except (OperationFailed, TimedOut) as error:
        assert error.code == code
    assert ToldExperiment.clock - began <= 120


@pytest.mark.parametrize(
    ("production", "other", "silent"),
    [
        (["sleep", "900"], ["sleep", "900"], ["production", "opportunistic"]),
        (job(30), ["sleep", "900"], ["opportunistic"]),
        (job(30), job(95), []),
    ],
)
def test_for_whom_it_waits_is_said_once(
    tuned: Tuned, production: list[str], other: list[str], silent: list[str]
) -> None:
    heard = Stopping(1, KeyboardInterrupt())
    with pytest.raises((TimedOut, KeyboardInterrupt)):
        tuned(production, other, reporter=heard, start_seconds=60.0, copies=2)
    waits = [text for text in heard.said if "tune waits" in text]
    assert [text.split()[1] for text in waits] == silent
    for text in waits:
        assert re.search(
            r"has not printed a number that .* yet; tune waits for it for 4[45] s more \(--timeout\)$", text
        ), text


def test_a_p99_goal_needs_latencies(tuned: Tuned) -> None:
    result = tuned(job(30), goal=Goal(keep=0.97, p99_factor=1.1))
    assert isinstance(result.stopped, OperationFailed)
    assert result.stopped.code == "no_latencies"
    assert result.outcome.best is None


def test_who_else_is_on_the_gpu_is_told(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.measure.usage._STAYS_SECONDS", 0.0)
    monkeypatch.setattr("gpushare.measure.usage._FIRST_INTERVAL_SECONDS", 0.0)
    pid = admin.add_process("sim:h200", "0", name="jupyter")
    assert dict(tuned(job(30)).strangers) == {pid: "jupyter"}


def test_a_mig_instance_is_refused(host: Host) -> None:
    admin.set_mig("sim:h200", "0", ["3g.71gb"])
    host = connect("sim:h200")
    (gpu,) = host.nvml.sweep()
    with pytest.raises(NotSupported):
        tune(host, Device(gpu=gpu, mig=gpu.mig_instances[0]), options(job(1)))


# -- real processes on a simulated GPU ---------------------------------------------------------------------------------

# Any setting meets this goal: how fast the jobs are here is the machine's affair.
EASY = {
    "goal": Goal(keep=1e-6),
    "settle_seconds": 0.1,
    "warm_seconds": 0.1,
    "drain_seconds": 0.05,
    "window_seconds": 0.2,
}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be certain after half a second."""
    for module, name in (("search", "MOST_SECONDS"), ("tune", "FIRST_SECONDS")):
        monkeypatch.setattr(f"gpushare.measure.{module}.{name}", 0.5)


@pytest.mark.usefixtures("hasty")
def test_real_processes_are_measured_and_ended(host: Host, device: Device) -> None:
    result = tune(host, device, options(job(30), caps=(60.0,), **EASY))
    assert result.outcome.best.setting.threads == 60.0
    assert result.production.memory is not None
    assert result.others.memory is not None
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")
    assert not host.nvml.processes(0)


@pytest.mark.usefixtures("hasty")
def test_the_slice_of_real_processes_is_that_of_their_server(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run` does it: production outside MPS, the others in the daemon, whose server has the slice."""
    seen: list[tuple[int | None, ...]] = []
    watch = Stage._watch

    def watched(self: Stage, seconds: float, setting: Setting | None = None) -> Any:
        window = watch(self, seconds, setting)
        if setting is None:
            return window
        state = StateFile(host.spec).read()
        (server,) = (server for daemon in state.daemons for server in daemon.servers)
        (production,) = (each for each in state.processes if each.real and each.mps_server is None and each.request_ms)
        others = [each for each in state.processes if each.real and each.mps_server is not None]
        assert len(others) == 2
        assert not any("compute" in each.slices for each in others)
        # The driver's own slice needs no entry.
        slices = [each.slices.get("compute", DEFAULT_SLICE_US) for each in (production, server)]
        seen.append((setting.production_slice_us, setting.other_slice_us, *slices))
        return window

    monkeypatch.setattr(Stage, "_watch", watched)
    result = tune(host, device, options(job(*SHORT), ways=("slices",), copies=2, **EASY))
    assert result.outcome.best is not None
    assert seen
    assert all(each[:2] == each[2:] for each in seen)
    assert not host.nvml.processes(0)
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")


@pytest.mark.usefixtures("hasty")
def test_jobs_that_compete_for_the_memory_are_told_to_pause(host: Host, device: Device) -> None:
    production, other = job(60, "--bandwidth", "90"), job(20, "--bandwidth", "60")
    result = tune(host, device, options(production, other, caps=(60.0,), **EASY))
    assert "draws 90 % of the memory bandwidth" in (result.answer.warning or "")
    assert "run --opportunistic --yield pause" in (result.answer.warning or "")


def test_slices_that_cannot_be_read_are_refused_and_the_jobs_ended(host: Host, device: Device) -> None:
    with changing(StateFile(host.spec)) as (state, _):
        state.channel_fault = "seccomp"
    with fails(NotSupported, "seccomp"):
        tune(host, device, options(job(*SHORT), ways=("slices",), **EASY))
    assert not host.nvml.processes(0)


@pytest.mark.parametrize(
    ("production", "other", "expected", "code"),
    [
        (job(30), [sys.executable, "-c", "raise SystemExit('no luck')"], OperationFailed, "job_ended"),
        ([sys.executable, "-c", "raise SystemExit(4)"], job(50), OperationFailed, "job_ended"),
        (job(30), ["no-such-program"], NotFound, "command_not_found"),
    ],
)
def test_a_job_that_cannot_be_measured_is_named(
    host: Host, device: Device, production: list[str], other: list[str], expected: type[Exception], code: str
) -> None:
    with pytest.raises(expected) as caught:
        tune(host, device, options(production, other))
    assert getattr(caught.value, "code", None) == code
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")


def test_a_job_outside_mps_is_refused(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_OUTSIDE", "1")
    running_then = []
    begin = Stage.begin

    def noted(stage: Stage) -> None:
        running_then.append(len(stage.experiment.programs))
        begin(stage)

    monkeypatch.setattr(Stage, "begin", noted)
    with fails(OperationFailed, "not_attached"):
        tune(host, device, options(job(30), ways=(Way.SLICES, Way.CAPS)))
    # The jobs of a way that was left out do not run next to those of the next.
    assert running_then == [0, 0]
