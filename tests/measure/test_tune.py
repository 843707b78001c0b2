"""Tuning a pair of jobs whose needs say the right answer: told ones, and real processes on a simulated GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from gpushare.connect import connect
from gpushare.errors import NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.host.host import Host
from gpushare.measure.metric import Metric
from gpushare.measure.pair import Pair, TuneOptions, Window, neighbours
from gpushare.measure.search import SPARED, Goal, Search, Setting
from gpushare.measure.statistics import Ratio, widened
from gpushare.measure.tune import OtherAlone, TrialReport, TuneReporter, Tuning, compare, tune
from gpushare.run.plain import PlainShare
from gpushare.run.several import Several
from gpushare.selection import Device, select_one
from gpushare.sim import admin
from tests.measure.told_jobs import MemoryBound, ToldSeveral, tell, tell_memory_bound

RATE = Metric(pattern=r"rate=([0-9.]+)")


def job(need: int, *words: str) -> list[str]:
    """Return a job that needs so much of the GPU."""
    return [sys.executable, "-m", "gpushare.sim.job", "--need", str(need), "--every", "0.02", *words]


def options(production: list[str], opportunistic: list[str], **search: object) -> TuneOptions:
    """Return options that are quick."""
    given = {"goal": Goal(keep=0.97), "grid": (80.0, 60.0), "confirmed": 1, **search}
    return TuneOptions(
        production=production,
        opportunistic=opportunistic,
        search=Search(**given),  # type: ignore[arg-type]
        metric=RATE,
        opportunistic_metric=RATE,
        ways=("caps",),
        window_seconds=0.15,
        rounds=2,
        most_rounds=2,
        settle_seconds=0.1,
        warm_seconds=0.1,
        start_seconds=600.0,
        drain_seconds=0.3,
    )


@pytest.fixture
def host() -> Host:
    """Return a simulated H200."""
    return connect("sim:h200")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure jobs that are no processes: what they print, and when, is known."""
    tell(monkeypatch)


def device_of(host: Host) -> Device:
    """Return its GPU."""
    return select_one(None, host.nvml.sweep())


@pytest.mark.usefixtures("told")
def test_the_largest_cap_with_which_production_keeps_its_rate_is_found(host: Host) -> None:
    # 30 beside 60 fits, beside 80 does not: 100/110 is left.
    result = tune(host, device_of(host), options(job(30), job(95)), TuneReporter())
    found = result.outcome
    assert found.best is not None
    assert found.best.setting.threads == 60.0
    kept = {one.setting: one.kept for one in found.curve}
    assert kept[Setting(threads=80.0)] == pytest.approx(100 / 110, abs=0.005)
    assert kept[Setting(threads=60.0)] == pytest.approx(1.0, abs=0.005)
    assert result.opportunistic_alone == pytest.approx(100, rel=0.005)
    assert found.best.opportunistic == pytest.approx(100 * 60 / 95, rel=0.005)
    assert result.production_alone == pytest.approx(100, rel=0.005)
    assert result.production_memory_bytes is not None
    # Nothing is left: no daemon, no client.
    assert not host.processes.named("nvidia-cuda-mps-control")


@pytest.mark.usefixtures("told")
def test_a_trial_tells_the_share_of_both(host: Host) -> None:
    heard: list[TrialReport] = []

    class Hearing(TuneReporter):
        def measured(self, report: TrialReport) -> None:
            heard.append(report)

    tune(host, device_of(host), options(job(30), job(95), grid=(60.0,)), Hearing())
    assert [one.opportunistic_share for one in heard] == [pytest.approx(60 / 95, rel=0.005)] * len(heard)
    assert all(one.kept.error is not None for one in heard)
    beside = PlainShare(host, device_of(host))
    (report,) = compare(host, beside, options(job(30), job(95)), [Setting(threads=100.0, low=False)], TuneReporter())
    # Nobody has measured it alone.
    assert report.opportunistic_share is None


def windows(*rates: float | None) -> list[Window]:
    """Return windows with these rates."""
    return [Window(rate=rate) for rate in rates]


def test_each_window_together_is_compared_with_those_alone_beside_it() -> None:
    alone, together = windows(80.0, 100.0, 120.0, 100.0), windows(99.0, 110.0, 55.0)
    # The first one alone lies before the start of the other job.
    assert neighbours(alone, together) == [(99.0, 100.0), (110.0, 110.0), (55.0, 110.0)]


def test_windows_in_which_nothing_was_printed() -> None:
    # It stood still: beside the other as without it.
    assert neighbours(windows(100.0, 100.0, 100.0), windows(None, 50.0)) == [(0.0, 100.0), (50.0, 100.0)]
    assert neighbours(windows(100.0, None, 120.0), windows(90.0, 60.0)) == [(90.0, 0.0), (60.0, 60.0)]
    assert neighbours(windows(100.0, None, None, None), windows(90.0, 60.0, 60.0)) == []
    assert neighbours(windows(None, None), windows(90.0)) == []


@pytest.mark.usefixtures("told")
def test_a_cap_on_production_counts_as_a_loss_of_its_rate(host: Host) -> None:
    given = options(job(80), job(95), goal=Goal(keep=0.7), grid=(60.0,), production_caps=(60.0,))
    result = tune(host, device_of(host), given, TuneReporter())
    (capped,) = (one for one in result.trials if one.trial.setting.production_threads is not None)
    # 60 of the 80 that it needs; beside the 40 of the other nothing more is lost.
    assert capped.kept.value == pytest.approx(0.75, abs=0.005)


@pytest.mark.parametrize(
    ("dram", "other", "caps", "spared", "duty"),
    [
        ([90.0, 84.0], None, None, True, True),
        ([90.0, 70.0], 80.0, None, False, False),
        ([20.0], 90.0, None, False, True),
        ([], 85.0, None, False, True),
        ([], None, None, False, False),
        ([90.0], None, (), False, True),
        ([90.0], None, (60.0,), False, True),
    ],
)
def test_where_memory_bounds_production_caps_on_it_are_tried_and_a_part_of_the_time(
    host: Host,
    dram: list[float],
    other: float | None,
    caps: tuple[float, ...] | None,
    spared: bool,
    duty: bool,
) -> None:
    several = Several(host, PlainShare(host, device_of(host)))
    for goal in (Goal(keep=0.97), Goal(keep=0.97, p99_factor=1.1)):
        given = options(job(30), job(95), production_caps=caps, goal=goal)
        tuning = Tuning(host, device_of(host), given, TuneReporter(), several)
        tuning._pair.dram, tuning.other = dram, OtherAlone(dram=other)
        # With a part of the time production's tail would be lost in each of them.
        wanted = replace(given.search, duty=duty and goal.p99_factor is None)
        assert tuning._search() == (
            replace(wanted, spared=SPARED, most=wanted.most + len(SPARED)) if spared else wanted
        )


def test_under_a_cap_on_production_the_p99_is_compared_with_that_without_a_cap(host: Host) -> None:
    tuning = Tuning(
        host,
        device_of(host),
        options(job(30), job(95)),
        TuneReporter(),
        Several(host, PlainShare(host, device_of(host))),
    )
    tuning.alone = [Window(rate=100.0, latencies=(1.0,) * 50)]
    slow = [Window(rate=80.0, latencies=(1.5,) * 50)] * 3
    capped = Setting(threads=50.0, production_threads=50.0)
    report = tuning._judged(capped, slow, slow[:2], [], Ratio(value=0.8, low=0.7, high=0.9, error=0.05))
    assert report is not None
    assert report.trial.p99 == pytest.approx(1.5)
    # The windows do not scatter, but what the cap costs is uncertain.
    assert (report.trial.kept, report.trial.error) == (pytest.approx(0.8), pytest.approx(0.05))
    # Where nothing was measured without a cap, there is only the p99 under it.
    tuning.alone = []
    report = tuning._judged(capped, slow, slow[:2], [], Ratio(value=1.0, low=1.0, high=1.0, error=0.0))
    assert report is not None
    assert report.trial.p99 == pytest.approx(1.0)


def test_a_p99_is_compared_with_that_of_the_same_minutes(host: Host) -> None:
    several = Several(host, PlainShare(host, device_of(host)))
    tuning = Tuning(host, device_of(host), options(job(30), job(95)), TuneReporter(), several)
    tuning.alone = [Window(rate=100.0, latencies=(1.0,) * 5000)]
    same = Ratio(value=1.0, low=1.0, high=1.0, error=0.0)
    for requests, factor in ((150, 1.0), (10, 2.0)):
        slow = [Window(rate=100.0, latencies=(2.0,) * requests)] * 4
        report = tuning._judged(Setting(threads=60.0), slow, slow[:3], [], same)
        assert report is not None
        # Too few of them tell no p99: then all windows until now count.
        assert report.trial.p99 == pytest.approx(factor)


def test_a_p99_that_the_job_prints_is_compared_with_that_of_the_same_minutes(host: Host) -> None:
    several = Several(host, PlainShare(host, device_of(host)))
    tuning = Tuning(host, device_of(host), options(job(30), job(95)), TuneReporter(), several)
    tuning.alone = [Window(rate=100.0, printed_p99=1.0)] * 8
    slow = [Window(rate=100.0, printed_p99=1.3)] * 4
    report = tuning._judged(Setting(threads=60.0), slow, slow[:3], [], Ratio(value=1.0, low=1.0, high=1.0, error=0.0))
    assert report is not None
    assert report.trial.p99 == pytest.approx(1.0)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory bound production, in told jobs."""
    tell_memory_bound(monkeypatch)


BOUND = {"goal": Goal(keep=0.9), "grid": (90.0, 80.0)}


@pytest.mark.usefixtures("bound")
def test_where_memory_bounds_production_the_other_gets_what_it_does_not_need(host: Host) -> None:
    result = tune(host, device_of(host), options(job(90), job(95), **BOUND), TuneReporter())
    best = result.outcome.best
    assert best is not None
    # 0.92 is left at cap 80, and 0.004 less for each percent that production leaves.
    assert best.setting == Setting(threads=80.0, production_threads=96.0)
    assert (best.safe, result.outcome.stable, result.given_up) == (True, True, None)
    assert all(one.cap_factor == pytest.approx(1.0, abs=0.001) for one in result.trials)
    never = tune(host, device_of(host), options(job(90), job(95), production_caps=(), **BOUND), TuneReporter())
    assert {one.trial.setting.production_threads for one in never.trials} == {None}
    assert never.outcome.best is not None
    assert never.outcome.best.setting == Setting(threads=80.0)


@pytest.mark.usefixtures("bound")
def test_where_memory_bounds_production_the_other_gets_a_part_of_the_time(host: Host) -> None:
    """What a cap of 80 % costs, 8 % of the rate, is too much; half of the time of it is not."""
    given = options(job(90), job(95), goal=Goal(keep=0.96), grid=(90.0, 80.0), production_caps=())
    result = tune(host, device_of(host), given, TuneReporter())
    best = result.outcome.best
    assert best is not None
    assert best.setting.duty_percent is not None
    # The loss without it is 0.08 at cap 60, where tune starts, and at 80.
    assert 48.0 <= best.setting.duty_percent <= 50.0
    assert best.kept == pytest.approx(1 - 0.08 * best.setting.duty_percent / 100, abs=0.001)
    assert (best.safe, result.outcome.stable) == (True, True)
    whole = next(one.opportunistic for one in result.outcome.curve if one.setting == Setting(threads=60.0))
    assert whole is not None
    assert best.opportunistic == pytest.approx(whole * best.setting.duty_percent / 100, rel=0.02)


@pytest.mark.usefixtures("bound")
def test_processes_that_differ_make_a_cap_on_production_uncertain(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run under a cap has a process of its own, which may be faster than the one before by luck."""
    monkeypatch.setattr(MemoryBound, "starts", (100.0, 104.0, 99.0, 103.0, 98.0, 105.0, 97.0, 106.0, 96.0))
    result = tune(host, device_of(host), options(job(90), job(95), **BOUND), TuneReporter())
    capped = [one for one in result.trials if one.trial.setting.production_threads is not None]
    assert all(one.trial.error > 0.015 for one in capped)
    assert len({round(one.alone_rate) for one in capped}) == len(capped)
    best = result.outcome.best
    assert best is not None
    assert best.setting == Setting(threads=80.0)


def start_under_caps(monkeypatch: pytest.MonkeyPatch, starts: int) -> None:
    """Let production start under a cap only so many times; it is tried once more, and no more than that."""
    start = Pair.start_production
    capped: list[float] = []

    def refused(self: Pair, cap: float | None) -> None:
        assert cap is None or len(capped) <= starts, "it was given up, and is tried again"
        start(self, cap)
        capped.extend([] if cap is None else [cap])
        if cap is not None and len(capped) > starts:
            raise TimedOut("the port is in use", "wait", code="no_numbers")

    monkeypatch.setattr(Pair, "start_production", refused)


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("starts", [0, 1, 2, 3])
def test_production_that_does_not_start_under_a_cap_any_more_costs_no_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    """What was measured under a cap cannot be repeated, nor taken for a part of the time: neither is tried for ever."""
    start_under_caps(monkeypatch, starts)
    result = tune(host, device_of(host), options(job(90), job(95), **BOUND), TuneReporter())
    assert result.given_up is not None
    assert (result.stopped, result.outcome.stable) == (None, True)
    assert result.outcome.best is not None
    assert result.outcome.best.setting == Setting(threads=80.0)
    # What was measured is kept.
    assert sum(one.trial.setting.production_threads is not None for one in result.trials) == starts


@pytest.mark.usefixtures("bound")
def test_a_cap_that_was_asked_for_and_does_not_start_ends_the_search(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_under_caps(monkeypatch, 0)
    asked = tune(host, device_of(host), options(job(90), job(95), production_caps=(20.0,), **BOUND), TuneReporter())
    assert isinstance(asked.stopped, TimedOut)


@pytest.mark.usefixtures("told")
def test_a_production_job_that_stops_printing_is_no_measurement(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ToldSeveral._print

    def silent(self: ToldSeveral) -> None:
        # From the second trial on.
        if len(self.programs) > 3 and self.programs[1].runs:
            self.programs[1].need = None
        told(self)

    monkeypatch.setattr(ToldSeveral, "_print", silent)
    result = tune(host, device_of(host), options(job(30), job(95)), TuneReporter())
    assert isinstance(result.stopped, OperationFailed)
    assert result.stopped.code == "job_silent"
    assert len(result.trials) == 1
    assert result.trials[0].trial.kept == pytest.approx(1.0, abs=0.005)


@pytest.mark.usefixtures("told")
def test_each_trial_tells_how_many_and_how_long_it_will_be_at_most(host: Host) -> None:
    heard: list[tuple[str, int, int, float | None]] = []

    class Hearing(TuneReporter):
        def expected(self, what: str, done: int, most: int, seconds_left: float | None) -> None:
            heard.append((what, done, most, seconds_left))

    result = tune(host, device_of(host), options(job(30), job(95)), Hearing())
    assert [done for _, done, _, _ in heard] == list(range(len(result.trials)))
    assert all(done < most for _, done, most, _ in heard)
    assert [left is None for *_, left in heard] == [True] + [False] * (len(heard) - 1)
    assert heard[0][0].startswith("trial 1: cap 60 %")


@pytest.mark.usefixtures("told")
def test_an_opportunistic_job_whose_rate_is_nothing_is_no_measurement(host: Host) -> None:
    idle = job(95, "--rate", "0")
    with pytest.raises(OperationFailed, match="only rates of 0"):
        tune(host, device_of(host), options(job(30), idle), TuneReporter())


@pytest.mark.usefixtures("told")
def test_what_is_never_a_number_is_told_and_not_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(self: ToldSeveral) -> None:
        self.programs[-1].listen("rate=1.2.3", ToldSeveral.now)

    monkeypatch.setattr(ToldSeveral, "_print", nonsense)
    began = ToldSeveral.now
    with pytest.raises(OperationFailed, match=r"printed .1\.2\.3. where --metric matches"):
        tune(host, device_of(host), options(job(30), job(95)), TuneReporter())
    assert ToldSeveral.now - began < 100


@pytest.mark.usefixtures("told")
def test_who_else_is_on_the_gpu_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.measure.usage._STAYS_SECONDS", 0.0)
    pid = admin.add_process("sim:h200", "0", name="jupyter")
    monkeypatch.setattr("gpushare.measure.usage._FIRST_INTERVAL_SECONDS", 0.0)
    result = tune(host, device_of(host), options(job(30), job(95), grid=(60.0,)), TuneReporter())
    assert dict(result.others) == {pid: "jupyter"}


def test_an_interval_is_widened_around_its_value() -> None:
    assert widened(Ratio(value=1.0, low=0.9, high=1.1, error=0.05), 2.0) == Ratio(
        value=1.0, low=pytest.approx(0.8), high=pytest.approx(1.2), error=0.1
    )
    assert widened(Ratio(value=0.1, low=0.0, high=0.4), 2.0) == Ratio(value=0.1, low=0.0, high=pytest.approx(0.7))
    assert widened(Ratio(value=1.0, low=None, high=None), 2.0) == Ratio(value=1.0, low=None, high=None)


def test_real_processes_are_measured_and_ended(host: Host) -> None:
    # Any setting meets this goal: how fast the jobs are here is the machine's affair.
    given = replace(options(job(30), job(95), goal=Goal(keep=1e-6), grid=(60.0,)), window_seconds=0.2)
    heard: list[TrialReport] = []

    class Hearing(TuneReporter):
        def measured(self, report: TrialReport) -> None:
            heard.append(report)

    result = tune(host, device_of(host), given, Hearing())
    assert result.outcome.best is not None
    assert result.outcome.best.setting.threads == 60.0
    assert list(result.trials) == heard
    assert all(report.rounds >= 2 and report.alone_rate > 0 for report in heard)
    assert result.production_memory_bytes is not None
    assert result.opportunistic_memory_bytes is not None
    # Nothing is left: no daemon, no client.
    assert not host.processes.named("nvidia-cuda-mps-control")
    assert not host.nvml.processes(0)


def test_real_processes_that_compete_for_the_memory_get_a_part_of_the_time(host: Host) -> None:
    production, other = job(60, "--bandwidth", "90"), job(20, "--bandwidth", "60")
    given = options(production, other, goal=Goal(keep=0.8), grid=(60.0,), production_caps=())
    result = tune(host, device_of(host), given, TuneReporter())
    assert result.warning is not None
    assert "draws 90 % of the memory bandwidth" in result.warning
    parts = [one.trial for one in result.trials if one.trial.setting.duty_percent is not None]
    whole = [one.trial for one in result.trials if one.trial.setting.duty_percent is None]
    assert parts
    assert whole
    # Together they want 150 percent of what there is.
    assert all(one.kept == pytest.approx(2 / 3, abs=0.05) for one in whole)
    for one in parts:
        assert one.kept > 0.7
        assert one.opportunistic is not None
        part = (one.setting.duty_percent or 0.0) / 100
        assert one.opportunistic == pytest.approx((whole[0].opportunistic or 0.0) * part, rel=0.25)
    assert not host.processes.named("nvidia-cuda-mps-control")


@pytest.mark.usefixtures("told")
def test_time_slicing_is_measured_by_the_same_windows(host: Host) -> None:
    device = device_of(host)
    (report,) = compare(
        host, PlainShare(host, device), options(job(30), job(95)), [Setting(threads=100.0, low=False)], TuneReporter()
    )
    assert report.trial.kept == pytest.approx(0.5, abs=0.005)
    assert report.rounds == 2


@pytest.mark.parametrize(
    ("which", "command", "expected", "code"),
    [
        (
            "opportunistic",
            [sys.executable, "-c", "import sys; print('no luck'); sys.exit(3)"],
            OperationFailed,
            "job_ended",
        ),
        ("production", [sys.executable, "-c", "raise SystemExit(4)"], OperationFailed, "job_ended"),
        ("opportunistic", ["no-such-program"], NotFound, "command_not_found"),
    ],
)
def test_a_job_that_cannot_be_measured_is_named(
    host: Host, which: str, command: list[str], expected: type[Exception], code: str
) -> None:
    given = options(job(30), job(50))
    given = replace(given, production=command) if which == "production" else replace(given, opportunistic=command)
    with pytest.raises(expected) as caught:
        tune(host, device_of(host), given, TuneReporter())
    assert getattr(caught.value, "code", None) == code
    assert not host.processes.named("nvidia-cuda-mps-control")
    if code != "command_not_found":
        assert which in str(caught.value)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("which", ["production", "opportunistic"])
def test_a_job_that_never_prints_is_given_up(host: Host, which: str) -> None:
    jobs = {"production": job(30), "opportunistic": job(50), which: ["sleep", "600"]}
    with pytest.raises(TimedOut, match=f"the {which} job did not print a number .* in 600 s") as caught:
        tune(host, device_of(host), options(**jobs), TuneReporter())
    assert caught.value.code == "no_numbers"
    assert not host.processes.named("nvidia-cuda-mps-control")


def test_a_job_outside_mps_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_OUTSIDE", "1")
    with pytest.raises(OperationFailed) as caught:
        tune(host, device_of(host), options(job(30), job(50)), TuneReporter())
    assert caught.value.code == "not_attached"


@pytest.mark.usefixtures("told")
def test_a_p99_goal_needs_latencies(host: Host) -> None:
    given = options(job(30), job(50), goal=Goal(keep=0.97, p99_factor=1.1))
    with pytest.raises(OperationFailed) as caught:
        tune(host, device_of(host), given, TuneReporter())
    assert caught.value.code == "no_latencies"


def test_a_mig_instance_is_refused(host: Host) -> None:
    admin.set_mig("sim:h200", "0", ["3g.71gb"])
    host = connect("sim:h200")
    (gpu,) = host.nvml.sweep()
    with pytest.raises(NotSupported):
        tune(host, Device(gpu=gpu, mig=gpu.mig_instances[0]), options(job(1), job(1)), TuneReporter())
