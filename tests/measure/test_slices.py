"""The search for time-slices, against pairs of jobs whose right answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.measure.search import MOST_TRIALS, Goal, Outcome, Setting, Trial, judge, sliced, summed_up
from gpushare.measure.slices import OTHER_US, SliceSearch, next_slices, wanted_slices

Pair = Callable[[Setting], Trial]
# Microseconds of a switch.
SWITCH = 250.0


def server(request_us: float, load: float) -> Pair:
    """Return a pair whose production job has requests: each waits for a slice of the other and a switch, again and again."""

    def run(setting: Setting) -> Trial:
        mine, its = setting.production_slice_us or 2048, setting.other_slice_us or 2048
        turns = math.ceil(request_us / mine)
        p99 = 1 + turns * (its + SWITCH) / request_us
        other = 1 - load * (1 + turns * SWITCH / request_us)
        return Trial(setting=setting, kept=min(1.0, 1 / load / p99), p99=p99, p99_error=0.001, opportunistic=other)

    return run


def training(setting: Setting) -> Trial:
    """Return a trial next to a job that always works: each gets its slice's part."""
    mine, its = setting.production_slice_us or 2048, setting.other_slice_us or 2048
    turn = mine + its + (2 * SWITCH if its < 1000 else 0)
    return Trial(setting=setting, kept=mine / turn, opportunistic=its / turn)


def searched(search: SliceSearch, pair: Pair) -> tuple[Outcome, list[Trial]]:
    """Run a search to its end."""
    trials: list[Trial] = []
    while (setting := next_slices(search, trials)) is not None:
        trials.append(pair(setting))
    judged = judge(search.goal, trials)
    return summed_up(judged, stable=wanted_slices(search, trials) is None), trials


def search(p99: float | None = None, keep: float = 0.97, **more: Any) -> SliceSearch:
    """Return how to search."""
    return SliceSearch(goal=Goal(keep=keep, p99_factor=p99), other_alone=1.0, **more)


@pytest.mark.parametrize(
    ("request_us", "slices"),
    [
        (400.0, [2048, 16000]),
        (1000.0, [2048, 16000]),
        (2000.0, [4000, 16000]),
        (5600.0, [16000, 30000]),
        (20000.0, [30000]),
        (99000.0, [30000]),
        (None, [16000, 4000]),
    ],
)
def test_productions_slice_is_longer_than_its_request(request_us: float | None, slices: list[int]) -> None:
    assert search(request_us=request_us).production == slices
    # What the driver says counts, not what it says elsewhere.
    assert search(request_us=1000.0, default_us=1100).production[0] == 4000


def test_a_short_request_is_met_by_a_short_slice_of_the_other_in_few_trials() -> None:
    found, trials = searched(search(1.4, request_us=1000.0), server(1000.0, 0.04))
    assert found.best is not None
    assert (found.best.setting, found.best.trials, found.stable) == (sliced(2048, 100), 2, True)
    assert len(trials) <= 5


def test_what_gives_the_other_all_ends_the_search() -> None:
    _, trials = searched(search(1.4, request_us=1000.0), server(1000.0, 0.01))
    assert [one.setting for one in trials] == [sliced(2048, 100)] * 2


def test_a_request_that_does_not_fit_into_the_default_slice_gets_a_longer_one() -> None:
    found, _ = searched(search(1.1, request_us=5600.0), server(5600.0, 0.5))
    assert found.best is not None
    assert (found.best.setting.production_slice_us, found.stable) == (16000, True)
    assert found.best.opportunistic == pytest.approx(0.48, abs=0.01)


def test_a_goal_that_is_just_missed_gets_the_shortest_slice() -> None:
    found, trials = searched(search(1.31, request_us=1000.0), server(1000.0, 0.04))
    assert found.best is not None
    assert found.best.setting == sliced(2048, 50)
    assert trials[0].setting == sliced(2048, 100)


def test_a_goal_out_of_reach_takes_few_trials() -> None:
    found, trials = searched(search(1.05, request_us=1000.0), server(1000.0, 0.04))
    assert (found.best, found.stable) == (None, True)
    assert found.nearest is not None
    assert len(trials) <= 2


@pytest.mark.parametrize("keep", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_of_two_that_always_work_the_other_gets_what_production_may_lose(keep: float) -> None:
    found, trials = searched(search(keep=keep), training)
    assert (len(trials) <= 9, found.stable) == (True, True)
    every = [training(sliced(mine, its)) for mine in (16000, 4000) for its in OTHER_US]
    most = max(one.opportunistic or 0.0 for one in every if one.kept >= keep)
    assert found.best is not None
    assert found.best.opportunistic == pytest.approx(most, rel=0.04)


def test_where_a_long_slice_does_not_spare_production_no_shorter_one_is_tried() -> None:
    found, trials = searched(search(keep=0.99), training)
    assert found.best is None
    assert {one.setting.production_slice_us for one in trials} == {16000}


@given(st.integers(0, 10_000), st.sampled_from([None, 300.0, 1000.0, 3000.0, 9000.0]), st.sampled_from([None, 1.2]))
def test_a_search_ends_whatever_is_measured(seed: int, request_us: float | None, p99: float | None) -> None:
    import random

    source = random.Random(seed)  # noqa: S311 - not a secret

    def pair(setting: Setting) -> Trial:
        late = None if p99 is None else source.uniform(1.0, 1.5)
        return Trial(setting=setting, kept=source.uniform(0.9, 1.02), p99=late, opportunistic=source.uniform(0, 1))

    found, trials = searched(replace(search(p99, request_us=request_us), most=500), pair)
    assert len(trials) <= 2 * len(OTHER_US) * MOST_TRIALS
    assert found.stable
    settings = [one.setting for one in trials]
    assert max(settings.count(one) for one in settings) <= MOST_TRIALS


def test_a_search_that_ran_out_of_trials_is_not_stable() -> None:
    found, trials = searched(replace(search(1.4, request_us=1000.0), most=1), server(1000.0, 0.04))
    assert (len(trials), found.stable) == (1, False)


def test_settings_say_what_they_are() -> None:
    assert sliced(2048, 100).title == "slice 100us, production slice 2.048ms"
    assert sliced(16000, 2048).title == "slice 2.048ms, production slice 16ms"
    assert (sliced(2048, 100).way, Setting(threads=60.0).way) == ("slices", "caps")


def test_with_the_same_rate_slices_are_better_than_a_cap_and_the_calmer_ones_better_still() -> None:
    goal = Goal(keep=0.97, p99_factor=2.0)
    tried = [
        Trial(setting=Setting(threads=100.0), kept=1.0, p99=1.2, p99_error=0.01, opportunistic=0.96),
        Trial(setting=sliced(2048, 500), kept=1.0, p99=1.7, p99_error=0.01, opportunistic=0.96),
        Trial(setting=sliced(2048, 50), kept=1.0, p99=1.3, p99_error=0.01, opportunistic=0.95),
    ]
    found = summed_up(judge(goal, tried), stable=True)
    assert found.best is not None
    assert found.best.setting == sliced(2048, 50)
