"""The search for the cap, against simulated pairs of jobs whose right answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.measure.controller import (
    GRID,
    Goal,
    Outcome,
    Search,
    Setting,
    Trial,
    best_of,
    judge,
    memory_warning,
    next_setting,
    outcome,
)

Pair = Callable[[Setting], Trial]


def knee(at: float, depth: float = 0.3, *, noise: float = 0.0, seed: int = 0) -> Pair:
    """Return a pair whose production job loses nothing up to a cap, and ``depth`` at once above it."""
    source = random.Random(seed)  # noqa: S311 - not a secret

    def run(setting: Setting) -> Trial:
        kept = 1.0 if setting.threads <= at else 1.0 - depth
        return Trial(
            setting=setting,
            kept=kept * (1 + source.uniform(-noise, noise)),
            p99=1.0 if kept == 1.0 else 3.0,
            opportunistic=setting.threads,
        )

    return run


def searched(search: Search, pair: Pair) -> tuple[Outcome, list[Trial]]:
    """Run a search to its end."""
    trials: list[Trial] = []
    while (setting := next_setting(search, trials)) is not None:
        trials.append(pair(setting))
        assert len(trials) <= search.most
    return outcome(search, trials), trials


SEARCH = Search(goal=Goal(keep=0.97))


@given(st.sampled_from(GRID), st.floats(0.05, 0.9), st.integers(0, 1000))
def test_the_largest_cap_below_the_knee_is_found_with_few_runs(at: float, depth: float, seed: int) -> None:
    found, trials = searched(SEARCH, knee(at, depth, noise=0.01, seed=seed))
    assert found.best is not None
    assert found.best.setting.threads == at
    assert found.stable
    assert found.best.trials >= 2
    assert len(trials) <= 10


def test_the_start_is_cap_60_with_low_priority() -> None:
    assert next_setting(SEARCH, []) == Setting(threads=60.0, low=True)


def test_after_a_failing_start_50_is_next() -> None:
    assert next_setting(SEARCH, [Trial(setting=Setting(threads=60.0), kept=0.8)]) == Setting(threads=50.0)


def test_no_setting_that_meets_the_goal_is_said_with_what_comes_nearest() -> None:
    def pair(setting: Setting) -> Trial:
        return Trial(setting=setting, kept=0.9 - setting.threads / 1000)

    found, trials = searched(SEARCH, pair)
    assert found.best is None
    assert found.nearest is not None
    assert found.nearest.setting.threads == 10.0
    assert found.stable
    assert len(trials) <= 6


def test_the_p99_counts_beside_the_rate() -> None:
    goal = Goal(keep=0.97, p99_factor=1.1)
    slow = judge(goal, [Trial(setting=Setting(threads=60.0), kept=1.0, p99=1.5)])
    assert not slow[0].meets
    assert slow[0].margin == pytest.approx(1.1 / 1.5)
    assert judge(goal, [Trial(setting=Setting(threads=60.0), kept=1.0, p99=1.05)])[0].meets


def test_a_first_lucky_run_is_taken_back_by_the_next() -> None:
    luck = iter([0.98])

    def pair(setting: Setting) -> Trial:
        kept = 1.0 if setting.threads <= 50 else next(luck, 0.90) if setting.threads == 60 else 0.5
        return Trial(setting=setting, kept=kept, opportunistic=setting.threads)

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    assert found.best.setting.threads == 50.0


def test_a_narrow_failure_gets_a_second_run() -> None:
    unlucky = iter([0.965])

    def pair(setting: Setting) -> Trial:
        kept = 1.0 if setting.threads <= 60 else next(unlucky, 0.985) if setting.threads == 70 else 0.5
        return Trial(setting=setting, kept=kept, opportunistic=setting.threads)

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    assert found.best.setting.threads == 70.0


def test_the_answer_says_whether_low_priority_helps() -> None:
    def pair(setting: Setting) -> Trial:
        kept = 1.0 if setting.threads <= 60 and setting.low else 0.95 if setting.threads <= 60 else 0.5
        return Trial(setting=setting, kept=kept, opportunistic=setting.threads)

    found, _ = searched(SEARCH, pair)
    assert found.low_priority_helps is True
    assert found.best is not None
    assert found.best.setting.low
    even, _ = searched(SEARCH, knee(60.0))
    assert even.low_priority_helps is False


def test_normal_priority_is_taken_where_it_meets_the_goal_and_the_other_gets_more() -> None:
    def pair(setting: Setting) -> Trial:
        return Trial(
            setting=setting,
            kept=1.0 if setting.threads <= 60 else 0.5,
            opportunistic=setting.threads * (0.5 if setting.low else 1.0),
        )

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    assert found.best.setting == Setting(threads=60.0, low=False)
    assert found.best.trials >= 2


def test_caps_on_production_are_tried_where_asked_and_win_by_the_other_jobs_rate() -> None:
    def pair(setting: Setting) -> Trial:
        if setting.production_threads is not None:
            return Trial(setting=setting, kept=0.95, opportunistic=45.0)
        return Trial(setting=setting, kept=0.93 if setting.threads <= 60 else 0.7, opportunistic=20.0)

    search = Search(goal=Goal(keep=0.9), production_caps=(50.0,))
    found, _ = searched(search, pair)
    assert found.best is not None
    assert found.best.setting == Setting(threads=50.0, production_threads=50.0)
    assert searched(Search(goal=Goal(keep=0.9)), pair)[0].best is not None
    assert all(one.setting.production_threads is None for one in searched(Search(goal=Goal(keep=0.9)), pair)[0].curve)


def test_without_rates_of_the_other_job_the_larger_cap_is_better() -> None:
    goal = Goal()
    trials = [Trial(setting=Setting(threads=threads), kept=1.0) for threads in (60.0, 80.0, 70.0)]
    best = best_of(judge(goal, trials))
    assert best is not None
    assert best.setting.threads == 80.0


@given(st.integers(0, 10_000), st.floats(0.0, 0.1))
def test_a_search_ends_whatever_is_measured(seed: int, noise: float) -> None:
    source = random.Random(seed)  # noqa: S311 - not a secret

    def pair(setting: Setting) -> Trial:
        return Trial(setting=setting, kept=source.uniform(0.9 - noise, 1.05), opportunistic=source.uniform(1, 2))

    found, trials = searched(Search(goal=Goal(), production_caps=(60.0, 50.0)), pair)
    assert len(trials) <= 16
    assert (found.best is None) == (found.nearest is not None)
    assert [one.setting for one in found.curve if one.setting.production_threads is None] == sorted(
        (one.setting for one in found.curve if one.setting.production_threads is None),
        key=lambda setting: (-setting.threads, not setting.low),
    )


def test_a_memory_bound_job_is_warned_of() -> None:
    assert memory_warning(20.0, 5.0) is None
    assert memory_warning(None, None) is None
    assert "opportunistic job alone draws 90 %" in (memory_warning(90.0, 5.0) or "")
    assert "production job alone draws 91 %" in (memory_warning(20.0, 91.0) or "")
