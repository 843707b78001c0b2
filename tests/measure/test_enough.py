"""How long a trial of tune is watched."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpushare.host.connect import connect
from gpushare.measure.controller import Search
from gpushare.measure.enough import sure
from gpushare.measure.metric import Metric
from gpushare.measure.pair import WINDOW_SECONDS, Pair, TuneOptions
from gpushare.measure.statistics import Ratio
from gpushare.measure.trials import Goal, Setting, Trial
from gpushare.measure.tune import tune
from gpushare.measure.tune_report import TrialReport, TuneReporter, TuneResult
from gpushare.selection import select_one
from tests.measure.told_jobs import SeldomPrints, SlowAtTimes, ToldSeveral, tell

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
        (0.975, 0.02, 0.01, 0.97, False),
        (0.971, 0.01, 0.005, 0.97, True),  # as precise as anybody needs
        (0.971, 0.05, 0.004, 0.97, True),  # what a cap on production costs is uncertain, and more windows do not help
        (0.996, 0.004, 0.002, 0.995, False),  # of the half percent that may be lost it is too much
        (0.996, 0.004, 0.0008, 0.995, True),
        (1.0, 0.01, 0.004, 1.0, False),
        (0.971, 0.01, None, 0.97, False),
    ],
)
def test_the_error_says_when_a_rate_is_sure(
    kept: float, half: float, error: float | None, keep: float, enough: bool
) -> None:
    assert sure(report(kept, half, error), Goal(keep=keep)) is enough


@pytest.mark.parametrize(
    ("p99", "between", "enough"),
    [
        (1.05, (1.0, 1.09), True),
        (1.05, (1.0, 1.2), False),
        (1.3, (1.2, 1.4), True),
        (1.05, None, False),
        (1.3, None, True),
        (None, None, True),
    ],
)
def test_a_p99_has_to_be_sure_too(p99: float | None, between: tuple[float, float] | None, enough: bool) -> None:
    goal = replace(GOAL, p99_factor=1.1)
    assert sure(report(0.99, 0.01, 0.001, p99, between), goal) is enough
    # What is asked for is not certain for the rate.
    assert not sure(report(0.97, 0.02, 0.01, p99, between), goal)


@pytest.mark.parametrize(
    ("window", "rounds", "most", "p99", "expected"),
    [
        (WINDOW_SECONDS, None, None, None, (8, 24)),
        (WINDOW_SECONDS, None, None, 1.1, (8, 32)),
        (0.1, None, None, None, (8, 24)),
        (1.2, None, None, None, (4, 12)),
        (5.0, None, None, None, (3, 9)),  # a job that prints once a second
        (5.0, 8, None, None, (8, 24)),
        (WINDOW_SECONDS, 20, 20, 1.1, (20, 20)),
    ],
)
def test_long_windows_need_fewer_rounds(
    window: float, rounds: int | None, most: int | None, p99: float | None, expected: tuple[int, int]
) -> None:
    host = connect("sim:h200")
    options = TuneOptions(
        production=["true"],
        opportunistic=["true"],
        search=Search(goal=Goal(keep=0.97, p99_factor=p99)),
        rounds=rounds,
        most_rounds=most,
    )
    pair = Pair(host, select_one(None, host.nvml.sweep()), options, SimpleNamespace())  # type: ignore[arg-type]
    pair._window_seconds = window
    assert (pair.rounds, pair.most_rounds) == expected


def tuned(monkeypatch: pytest.MonkeyPatch, several: type[ToldSeveral], need: int) -> TuneResult:
    """Return what tune finds for two told jobs, of which production needs so much, with windows as they are by default."""
    tell(monkeypatch)
    monkeypatch.setattr("gpushare.measure.tune.Several", several)
    host = connect("sim:h200")
    words = [sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", "--need"]
    options = TuneOptions(
        production=[*words, str(need)],
        opportunistic=[*words, "95"],
        search=Search(goal=GOAL, grid=(60.0,), confirmed=1),
        metric=Metric(pattern=r"rate=([0-9.]+)"),
        opportunistic_metric=Metric(pattern=r"rate=([0-9.]+)"),
    )
    return tune(host, select_one(None, host.nvml.sweep()), options, TuneReporter())


@pytest.mark.parametrize(("several", "most"), [(ToldSeveral, 8), (SlowAtTimes, 24)])
def test_a_production_job_that_moves_is_watched_for_longer(
    monkeypatch: pytest.MonkeyPatch, several: type[ToldSeveral], most: int
) -> None:
    assert max(one.rounds for one in tuned(monkeypatch, several, 40).trials) == most


def test_another_job_that_seldom_prints_is_not_slowed_by_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tuned(monkeypatch, SeldomPrints, 80)
    assert result.opportunistic_alone == pytest.approx(100, rel=0.005)
    # 60 of the 95 that it needs, and both want 140 percent of the GPU.
    share = 60 / 95 / 1.4
    assert [one.opportunistic_share for one in result.trials] == pytest.approx([share] * len(result.trials), rel=0.01)
    assert {one.rounds for one in result.trials} == {3}
