"""Tuning a pair of jobs whose needs say the right answer: told ones, and real processes on a simulated GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from gpushare.base.errors import NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.selection import Device, select_one
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.measure.metric import Metric
from gpushare.measure.pair import TuneOptions, Window, neighbours
from gpushare.measure.search import Goal, Search, Setting
from gpushare.measure.statistics import Ratio, widened
from gpushare.measure.tune import TrialReport, TuneReporter, Tuning, compare, tune
from gpushare.run.plain import PlainShare
from gpushare.run.several import Several
from gpushare.sim import admin
from tests.measure.told_jobs import ToldSeveral, tell

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


def test_a_p99_is_compared_with_that_of_the_same_minutes(host: Host) -> None:
    several = Several(host, PlainShare(host, device_of(host)))
    tuning = Tuning(host, device_of(host), options(job(30), job(95)), TuneReporter(), several)
    tuning.alone = [Window(rate=100.0, latencies=(1.0,) * 5000)]
    for requests, factor in ((150, 1.0), (10, 2.0)):
        slow = [Window(rate=100.0, latencies=(2.0,) * requests)] * 4
        report = tuning._judged(Setting(threads=60.0), slow, slow[:3], [])
        assert report is not None
        # Too few of them tell no p99: then all windows until now count.
        assert report.trial.p99 == pytest.approx(factor)


def test_a_p99_that_the_job_prints_is_compared_with_that_of_the_same_minutes(host: Host) -> None:
    several = Several(host, PlainShare(host, device_of(host)))
    tuning = Tuning(host, device_of(host), options(job(30), job(95)), TuneReporter(), several)
    tuning.alone = [Window(rate=100.0, printed_p99=1.0)] * 8
    slow = [Window(rate=100.0, printed_p99=1.3)] * 4
    report = tuning._judged(Setting(threads=60.0), slow, slow[:3], [])
    assert report is not None
    assert report.trial.p99 == pytest.approx(1.0)


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


def test_jobs_that_compete_for_the_memory_are_told_to_pause(host: Host) -> None:
    production, other = job(60, "--bandwidth", "90"), job(20, "--bandwidth", "60")
    result = tune(host, device_of(host), options(production, other, goal=Goal(keep=0.8), grid=(60.0,)), TuneReporter())
    assert result.warning is not None
    assert "draws 90 % of the memory bandwidth" in result.warning
    assert "run --opportunistic --yield pause" in result.warning
    # Together they want 150 percent of what there is.
    assert all(one.trial.kept == pytest.approx(2 / 3, abs=0.05) for one in result.trials)


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
