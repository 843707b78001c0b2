"""How long a trial of tune is watched."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.measure.metric import Metric
from gpushare.measure.pair import TuneOptions
from gpushare.measure.search import Goal, Search, Setting, Trial
from gpushare.measure.statistics import Ratio
from gpushare.measure.tune import TrialReport, TuneReporter, TuneResult, sure, tune
from tests.measure.told_jobs import (
    Bursts,
    EndsEarly,
    Hangs,
    PrintsP99,
    SavesItsState,
    SeldomPrints,
    SlowAtTimes,
    ToldSeveral,
    tell,
)

GOAL = Goal(keep=0.97)


def report(
    kept: float, half: float, error: float | None, p99: float | None = None, between: tuple[float, float] | None = None
) -> TrialReport:
    """Return a trial that kept so much, by so much more or less."""
    return TrialReport(
        trial=Trial(setting=Setting(threads=60.0), kept=kept, p99=p99),
        kept=Ratio(value=kept, low=kept - half, high=kept + half, error=half / 2),
        rounds=8,
        alone_rate=100.0,
        together_rate=100.0 * kept,
        alone_p99=None,
        together_p99=None,
        p99_interval=between,
        windows_error=error,
    )


@pytest.mark.parametrize(
    ("kept", "half", "error", "keep", "enough"),
    [
        (0.99, 0.01, 0.006, 0.97, True),  # above the goal, by all that it may be wrong
        (0.95, 0.01, 0.006, 0.97, True),  # below it
        (0.982, 0.01, 0.006, 0.97, False),  # who looks often sees an interval on one side now and then
        (0.958, 0.01, 0.006, 0.97, False),
        (0.975, 0.02, 0.01, 0.97, False),
        (0.971, 0.01, 0.005, 0.97, True),  # as precise as anybody needs
        (0.971, 0.05, 0.004, 0.97, True),  # what a cap on production costs is uncertain, and more windows do not help
        (0.996, 0.004, 0.002, 0.995, False),  # of the half percent that may be lost it is too much
        (0.996, 0.004, 0.0008, 0.995, True),
        (1.0, 0.01, 0.004, 1.0, False),
        (1.0, 0.01, 0.001, 1.0, True),  # nobody needs it finer
        (0.971, 0.01, None, 0.97, False),
    ],
)
def test_the_error_says_when_a_rate_is_sure(
    kept: float, half: float, error: float | None, keep: float, enough: bool
) -> None:
    assert sure(report(kept, half, error), Goal(keep=keep)) is enough


@pytest.mark.parametrize(
    ("p99", "between", "enough", "whatever_the_rate"),
    [
        (1.05, (1.0, 1.09), True, False),
        (1.05, (1.0, 1.2), False, False),
        (1.3, (1.2, 1.4), True, True),  # that fails for sure
        (1.05, None, False, False),
        (1.3, None, True, False),
        (None, None, True, False),
    ],
)
def test_a_p99_has_to_be_sure_too(
    p99: float | None, between: tuple[float, float] | None, enough: bool, whatever_the_rate: bool
) -> None:
    goal = replace(GOAL, p99_factor=1.1)
    assert sure(report(0.99, 0.01, 0.001, p99, between), goal) is enough
    assert sure(report(0.97, 0.02, 0.01, p99, between), goal) is whatever_the_rate
    # A rate that fails for sure is a verdict.
    assert sure(report(0.9, 0.02, 0.01, p99, between), goal)
    assert not sure(report(0.9, 0.08, 0.04, 1.05, (1.0, 1.2)), goal)


def tuned(
    monkeypatch: pytest.MonkeyPatch, several: type[ToldSeveral], need: int, keep: float = 0.97, p99: float | None = None
) -> TuneResult:
    """Return what tune finds for two told jobs, of which production needs so much, with windows as they are by default."""
    tell(monkeypatch)
    monkeypatch.setattr(ToldSeveral, "now", 100.0)
    monkeypatch.setattr("gpushare.measure.tune.Several", several)
    host = connect("sim:h200")
    words = [sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", "--need"]
    options = TuneOptions(
        production=[*words, str(need)],
        opportunistic=[*words, "95"],
        search=Search(goal=Goal(keep=keep, p99_factor=p99), grid=(60.0,)),
        metric=Metric(pattern=r"rate=([0-9.]+)"),
        opportunistic_metric=Metric(pattern=r"rate=([0-9.]+)"),
        ways=("caps",),
    )
    return tune(host, select_one(None, host.nvml.sweep()), options, TuneReporter())


@pytest.mark.parametrize(
    ("several", "need", "rounds"),
    [
        (ToldSeveral, 40, {8}),
        (SlowAtTimes, 40, {24}),
    ],
)
def test_a_production_job_that_moves_is_watched_for_longer(
    monkeypatch: pytest.MonkeyPatch, several: type[ToldSeveral], need: int, rounds: set[int]
) -> None:
    result = tuned(monkeypatch, several, need)
    assert {one.window_seconds for one in result.trials} == {0.6}
    assert {one.rounds for one in result.trials} >= rounds
    assert max(one.rounds for one in result.trials) == max(rounds)


def test_figures_that_are_precise_need_no_more_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept lies on the goal, so that no interval is on one side of it."""
    result = tuned(monkeypatch, ToldSeveral, 40, keep=2 / 2.35 / 0.85106)
    (one, *_) = result.trials
    assert one.kept.low is not None
    assert one.kept.high is not None
    assert one.windows_error is not None
    assert 0 < one.windows_error <= 0.001
    assert one.windows_error == pytest.approx((one.kept.high - one.kept.low) / 4)
    assert one.rounds == 8


def test_another_job_that_seldom_prints_is_not_slowed_by_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tuned(monkeypatch, SeldomPrints, 80)
    assert result.opportunistic_alone == pytest.approx(100, rel=0.01)
    # 60 of the 95 that it needs, and both want 140 percent of the GPU.
    share = 60 / 95 / 1.4
    assert [one.opportunistic_share for one in result.trials] == pytest.approx([share] * len(result.trials), rel=0.02)
    assert {one.rounds for one in result.trials} == {3}
    # Three numbers of the other.
    assert all(one.window_seconds == pytest.approx(3.0, rel=0.02) for one in result.trials)


@pytest.mark.parametrize("seconds", [0.7, 1.1, 1.7])
def test_a_job_that_prints_in_bursts_is_watched_in_long_windows(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """What a buffer holds back comes at once: many numbers, and one moment."""
    monkeypatch.setattr(Bursts, "seconds", seconds)
    result = tuned(monkeypatch, Bursts, 40)
    assert result.stopped is None
    assert all((one.window_seconds or 0.0) >= 4 * seconds for one in result.trials)
    assert [one.kept.value for one in result.trials] == pytest.approx([1.0] * len(result.trials), abs=0.01)


@pytest.mark.parametrize(("every", "gap"), [(6.0, 1.0), (10.0, 2.0), (20.0, 4.0)])
def test_a_job_that_is_silent_for_a_while_is_measured(
    monkeypatch: pytest.MonkeyPatch, every: float, gap: float
) -> None:
    """It saves its state, whatever the other does: a rate of nothing, together as alone; then windows come to outlast it."""
    monkeypatch.setattr(SavesItsState, "every", every)
    monkeypatch.setattr(SavesItsState, "gap", gap)
    result = tuned(monkeypatch, SavesItsState, 40, keep=0.85)
    assert result.stopped is None
    assert result.outcome.best is not None
    assert result.outcome.best.setting.threads == 60.0
    lengths = [one.window_seconds for one in result.trials]
    assert lengths[0] == 0.6
    assert (lengths[-1] or 0.0) >= 1.5 * gap


@pytest.mark.parametrize("p99", [None, 1.2])
def test_production_that_hangs_in_the_first_trial_is_given_up(
    monkeypatch: pytest.MonkeyPatch, p99: float | None
) -> None:
    with pytest.raises(OperationFailed) as raised:
        tuned(monkeypatch, Hangs, 40, p99=p99)
    assert raised.value.code == "job_silent"
    assert ToldSeveral.now - 100.0 < 40.0


def test_another_job_that_ends_while_it_is_watched_alone_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperationFailed) as raised:
        tuned(monkeypatch, EndsEarly, 40)
    assert raised.value.code == "job_ended"
    assert ToldSeveral.now - 100.0 < 8.0


def test_a_p99_that_is_seldom_printed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tuned(monkeypatch, PrintsP99, 40, p99=1.2)
    assert result.stopped is None
    assert {one.trial.p99 for one in result.trials} == {1.0}
    assert {one.window_seconds for one in result.trials} == {1.5}
