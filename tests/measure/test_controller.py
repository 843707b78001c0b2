"""The search for the cap, against simulated pairs of jobs whose right answer is known."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.measure.search import (
    FINE,
    GRID,
    MOST_TRIALS,
    START,
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
CAPS_ON_PRODUCTION = (50.0, 60.0, 70.0, 75.0, 80.0)


@given(st.sampled_from(GRID), st.floats(0.05, 0.9), st.integers(0, 1000))
def test_the_largest_cap_below_the_knee_is_found_with_few_runs(at: float, depth: float, seed: int) -> None:
    found, trials = searched(SEARCH, knee(at, depth, noise=0.01, seed=seed))
    assert found.best is not None
    assert found.best.setting.threads == at
    assert found.stable
    assert found.best.trials >= 2
    assert len(trials) <= 10


@given(st.sampled_from([one for one in FINE if 10 < one < 99]), st.floats(0.05, 0.9), st.integers(0, 1000))
def test_between_two_caps_of_the_grid_the_largest_is_found_where_it_gives_much_more(
    at: float, depth: float, seed: int
) -> None:
    """Steps of the grid of which half is worth more than the spread are halved again, with few runs more."""
    grid, trials = searched(SEARCH, knee(at, depth, noise=0.01, seed=seed))
    found, more = searched(replace(SEARCH, fine=FINE), knee(at, depth, noise=0.01, seed=seed))
    assert grid.best is not None
    assert found.best is not None
    assert found.stable
    assert len(more) <= len(trials) + 6
    assert grid.best.setting.threads <= found.best.setting.threads <= at
    assert at <= max(found.best.setting.threads * 1.03**2, found.best.setting.threads + 1.25)


def test_no_cap_between_two_is_tried_where_the_larger_gives_hardly_more() -> None:
    search = replace(SEARCH, fine=FINE)
    flat = [ran(60, 0.99, opportunistic=60.0), ran(65, 0.9, opportunistic=63.0)]
    steep = [flat[0], ran(65, 0.9, opportunistic=64.0)]
    told = [ran(60, 0.99, low=False, opportunistic=60.0), ran(60, 0.99, opportunistic=60.0)]
    assert next_setting(search, [*flat, *told]) is None
    assert next_setting(search, [*steep, *told]) == Setting(threads=62.5)
    assert next_setting(SEARCH, [*steep, *told]) is None
    # A job of which nothing is heard gives nothing that could be compared.
    silent = replace(steep[1], opportunistic=None)
    assert next_setting(search, [steep[0], silent, *told]) is None


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
        kept = 1.0 if setting.threads <= 65 else next(unlucky, 0.985) if setting.threads == 70 else 0.5
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


def test_lower_caps_with_normal_priority_are_tried_where_they_may_give_more() -> None:
    """Jobs that compete for the memory's bandwidth: low priority takes too little, and normal priority too much."""

    def pair(setting: Setting) -> Trial:
        if setting.low:
            kept, rate = (0.92, 0.22) if setting.threads <= 80 else (0.87, 0.23)
        else:
            kept, rate = 1.15 - 0.0042 * setting.threads, 0.0045 * setting.threads
        return Trial(setting=setting, kept=kept, opportunistic=rate)

    search = Search(goal=Goal(keep=0.9))
    found, trials = searched(search, pair)
    assert found.best is not None
    # 0.919 is left of production at 55, and 0.898 at 60.
    assert (found.best.setting, found.best.trials) == (Setting(threads=55.0, low=False), 2)
    assert found.stable
    assert len(trials) <= 16


def test_lower_caps_with_normal_priority_are_left_out_where_they_cannot_give_more() -> None:
    """Under the same cap it took as much as with low priority, and cost more: under a lower one it takes less."""

    def pair(setting: Setting) -> Trial:
        kept = 1.0 if setting.threads <= (60 if setting.low else 40) else 0.5
        return Trial(setting=setting, kept=kept, opportunistic=setting.threads)

    found, trials = searched(SEARCH, pair)
    assert found.best is not None
    assert found.best.setting == Setting(threads=60.0)
    assert [one.setting.threads for one in trials if not one.setting.low] == [60.0]


@pytest.mark.parametrize("nothing", [0.0, None])
def test_where_low_priority_starves_the_other_job_lower_caps_with_normal_priority_are_tried(
    nothing: float | None,
) -> None:
    def pair(setting: Setting) -> Trial:
        kept = 1.0 if setting.threads <= (60 if setting.low else 40) else 0.5
        return Trial(setting=setting, kept=kept, opportunistic=nothing if setting.low else setting.threads)

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    assert (found.best.setting, found.best.trials) == (Setting(threads=40.0, low=False), 2)


def test_the_other_priority_is_not_compared_again_where_it_cannot_give_more() -> None:
    """70 fell back to 65 after its comparison: what 70 gave with normal priority is no more than 65 gives with low."""
    grid = [ran(60.0, 1.0, opportunistic=60.0), ran(80.0, 0.5), ran(70.0, 0.98, opportunistic=70.0), ran(75.0, 0.5)]
    compared = [*grid, ran(70.0, 0.98, opportunistic=70.0), ran(70.0, 0.5, low=False, opportunistic=60.0)]
    # Another run of 70 fails, and so 65 is the knee.
    compared += [ran(70.0, 0.5), ran(65.0, 1.0, opportunistic=65.0), ran(65.0, 1.0, opportunistic=65.0)]
    assert next_after(*compared) is None


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

    # Far more than it may take are never made, nor one of them again and again.
    search = Search(goal=Goal(), fine=FINE, most=500)
    found, trials = searched(search, pair)
    assert len(trials) < 150
    assert max(collections.Counter(trial.setting for trial in trials).values()) <= MOST_TRIALS
    assert found.stable
    assert (found.best is None) == (found.nearest is not None)
    settings = [one.setting for one in found.curve]
    assert settings == sorted(settings, key=lambda setting: (-setting.threads, not setting.low))


def test_a_memory_bound_job_is_warned_of() -> None:
    assert memory_warning(20.0, 5.0) is None
    assert memory_warning(None, None) is None
    assert "opportunistic job alone draws 90 %" in (memory_warning(90.0, 5.0) or "")
    assert "production job alone draws 91 %" in (memory_warning(20.0, 91.0) or "")


# -- step by step ----------------------------------------------------------------------------------


def ran(threads: float, kept: float, **more: Any) -> Trial:
    """Return a run of a cap with low priority, unless said otherwise."""
    setting = Setting(threads=threads, **{key: more.pop(key) for key in ("low",) if key in more})
    return Trial(setting=setting, kept=kept, **more)


def next_after(*trials: Trial, search: Search = SEARCH) -> Setting | None:
    """Return what is tried after these runs."""
    return next_setting(search, trials)


def test_the_way_up_halves_what_is_open_and_each_answer_is_confirmed_once() -> None:
    found, trials = searched(SEARCH, knee(80.0))
    assert [(one.setting.threads, one.setting.low) for one in trials] == [
        (60.0, True),
        # Of 65 to 100.
        (80.0, True),
        # Of 85 to 100, and what is left then.
        (90.0, True),
        (85.0, True),
        (80.0, True),
        (80.0, False),
    ]
    assert found.best is not None
    assert (found.best.setting, found.best.trials, found.stable) == (Setting(threads=80.0), 2, True)


def test_the_way_down_begins_with_a_small_step() -> None:
    failing = [ran(60.0, 0.5)]
    assert next_after(*failing) == Setting(threads=50.0)
    failing.append(ran(50.0, 0.5))
    # Of 10 to 45.
    assert next_after(*failing) == Setting(threads=25.0)
    failing.append(ran(25.0, 0.5))
    assert next_after(*failing) == Setting(threads=15.0)
    failing.append(ran(15.0, 0.5))
    assert next_after(*failing) == Setting(threads=10.0)
    failing.append(ran(10.0, 0.5))
    assert next_after(*failing) is None


def test_the_caps_that_are_tried_are_possible_ones_from_none_downwards() -> None:
    assert (GRID[0], START.threads in GRID) == (100.0, True)
    assert list(GRID) == sorted(set(GRID), reverse=True)
    assert all(0 < threads <= 100 for threads in GRID)


@pytest.mark.parametrize(("kept", "again"), [(0.96, True), (0.94, False)])
def test_only_a_narrow_failure_gets_a_second_run(kept: float, again: bool) -> None:
    # The goal is 0.97: a hundredth below it is narrow, three are not.
    above = next_after(ran(60.0, 1.0), ran(60.0, 1.0), ran(65.0, kept))
    assert above == (Setting(threads=65.0) if again else Setting(threads=60.0, low=False))
    least = next_after(ran(60.0, 0.5), ran(10.0, kept))
    assert least == (Setting(threads=10.0) if again else None)
    # And no third one.
    assert next_after(ran(60.0, 0.5), ran(10.0, kept), ran(10.0, kept)) is None


def test_no_more_runs_are_made_than_allowed() -> None:
    search = Search(goal=Goal(keep=0.97), most=3)
    found, trials = searched(search, knee(80.0))
    assert len(trials) == 3
    assert Search(goal=Goal()).most == 24
    # What was seen holds, and is called what it is.
    assert found.best is not None
    assert found.best.trials == 1
    assert not found.stable


def test_a_search_that_ran_out_of_runs_has_no_answer_that_stands() -> None:
    """Whether something met the goal until then or not: caps below and above were open."""
    fails, _ = searched(Search(goal=Goal(keep=0.97), most=2), knee(20.0))
    assert (fails.best, fails.stable) == (None, False)
    meets, trials = searched(Search(goal=Goal(keep=0.97), most=5), knee(80.0))
    assert meets.best is not None
    assert (meets.best.trials, len(trials), meets.stable) == (2, 5, False)


def test_an_answer_stands_only_when_there_is_nothing_left_to_run() -> None:
    assert not outcome(SEARCH, []).stable
    assert not outcome(SEARCH, [ran(60.0, 1.0)]).stable
    # It is confirmed, and larger caps were not tried yet.
    assert not outcome(SEARCH, [ran(60.0, 1.0), ran(60.0, 1.0)]).stable
    assert outcome(SEARCH, []).nearest is None


def test_a_cap_that_meets_the_goal_by_luck_only_gives_way_to_a_safe_one() -> None:
    """Windows of a noisy job: 0.98 that may as well be 0.96 is no promise of 0.97, where 0.99 is to be had."""

    def pair(setting: Setting) -> Trial:
        kept = 0.3 if setting.threads > 90 else 0.98 if setting.threads > 80 else 1.0
        return Trial(setting=setting, kept=kept, error=0.03, opportunistic=setting.threads)

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    assert (found.best.setting.threads, found.best.trials) == (80.0, 2)
    assert found.best.meets
    by_cap = {one.setting.threads: one for one in found.curve if one.setting.low}
    assert (by_cap[90.0].meets, by_cap[90.0].safe) == (True, False)


def test_where_no_cap_is_safe_the_one_that_meets_the_goal_is_taken() -> None:
    def pair(setting: Setting) -> Trial:
        return Trial(setting=setting, kept=0.975 if setting.threads <= 60 else 0.5, error=0.05)

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    assert found.best.setting.threads == 60.0


def test_between_a_safe_cap_and_one_that_meets_the_goal_by_luck_the_largest_safe_one_is_searched() -> None:
    """60 is safe and 80 met the goal by luck twice: the answer is not 60 before anybody has looked between them."""

    def pair(setting: Setting) -> Trial:
        kept = 0.3 if setting.threads > 80 else 0.98 if setting.threads > 75 else 1.0
        return Trial(setting=setting, kept=kept, error=0.02, opportunistic=setting.threads)

    found, trials = searched(SEARCH, pair)
    assert found.best is not None
    assert (found.best.setting.threads, found.best.trials, found.stable) == (75.0, 2, True)
    assert len(trials) <= 10


def test_one_that_meets_the_goal_by_luck_and_gives_far_more_gets_a_second_run() -> None:
    """Normal priority lets the other do three times as much: one wide run of it is no reason to leave it."""

    def pair(setting: Setting) -> Trial:
        kept = 0.985 if setting.threads <= 60 else 0.5
        error = 0.001 if setting.low else 0.02
        return Trial(setting=setting, kept=kept, error=error, opportunistic=setting.threads * (1 if setting.low else 3))

    found, _ = searched(SEARCH, pair)
    assert found.best is not None
    # Two runs of 0.02 are one of 0.014.
    assert (found.best.setting, found.best.trials) == (Setting(threads=60.0, low=False), 2)


def test_what_meets_the_goal_only_by_luck_gets_a_third_run_before_it_is_the_answer() -> None:
    narrow = Search(goal=Goal(keep=0.97), grid=(60.0,))
    other = ran(60, 0.9, low=False, error=0.01, opportunistic=60.0)
    twice = [ran(60, 0.976, error=0.012, opportunistic=60.0)] * 2
    assert not judge(narrow.goal, twice)[0].safe
    assert next_setting(narrow, [*twice, other]) == Setting(threads=60.0)
    assert next_setting(narrow, [*twice, twice[0], other]) is None
    safe = [ran(60, 0.99, error=0.012, opportunistic=60.0)] * 2
    assert next_setting(narrow, [*safe, other]) is None


def test_what_would_be_the_best_cap_gets_its_third_run_before_anything_is_tried_beside_the_best() -> None:
    """As on an H200, `membw` + `big`: six trials beside 80 were made again beside 81.25, which was safe after its third."""
    runs = {
        (60.0, True): [(0.9132, 31.5)],
        (80.0, True): [(0.918, 33.2)],
        (90.0, True): [(0.8426, 40.0)],
        (85.0, True): [(0.8757, 38.6)],
        (82.5, True): [(0.8803, 42.4)],
        (81.25, True): [(0.8985, 39.5), (0.9075, 35.0), (0.9095, 37.8)],
        (80.0, False): [(0.8177, 53.2)],
        (81.25, False): [(0.7905, 58.5)],
        (70.0, False): [(0.8569, 43.7)],
        (35.0, False): [(0.8464, 24.9)],
    }

    def pair(setting: Setting) -> Trial:
        left = runs[setting.threads, setting.low]
        kept, rate = left.pop(0) if len(left) > 1 else left[0]
        return Trial(setting=setting, kept=kept, error=0.005, opportunistic=rate)

    search = Search(goal=Goal(keep=0.9), fine=FINE, most=32)
    found, trials = searched(search, pair)
    assert found.best is not None
    assert (found.best.setting, found.best.trials, found.best.safe) == (Setting(threads=81.25), 3, True)
    assert found.stable
    assert len(trials) == 12
    beside_80 = [one for one in trials if one.setting.threads == 80.0 and one.setting != Setting(threads=80.0)]
    assert beside_80 == []


def test_errors_of_several_runs_count_together() -> None:
    (one,) = judge(Goal(keep=0.5), [ran(60.0, 0.54, error=0.03), ran(60.0, 0.56, error=0.04)])
    assert one.margin == pytest.approx(1.1)
    # The mean of two has half of the error that the root of the sum of the squares is.
    assert one.safe_margin == pytest.approx((0.55 - 0.025) / 0.5)
    # Two starts of one program that differ by more than their windows tell are no surer than they agree.
    (one,) = judge(Goal(keep=0.5), [ran(60.0, 0.5, error=0.03), ran(60.0, 0.6, error=0.04)])
    assert one.error == pytest.approx(0.05)
    # So with their p99.
    apart = [ran(60.0, 0.9, p99=p99, p99_error=0.02) for p99 in (0.65, 1.95)]
    (one,) = judge(Goal(keep=0.5, p99_factor=1.35), apart)
    assert (one.meets, one.safe) == (True, False)
    (late,) = judge(Goal(keep=0.5, p99_factor=1.2), [ran(60.0, 0.9, error=0.01, p99=1.0, p99_error=0.0)])
    assert late.safe_margin == pytest.approx(1.2)
    (slow,) = judge(Goal(keep=0.5, p99_factor=1.2), [ran(60.0, 0.9, error=0.01, p99=2.0)])
    assert (slow.meets, slow.safe) == (False, False)


def test_a_p99_that_may_as_well_be_too_long_is_not_safe() -> None:
    goal = Goal(keep=0.5, p99_factor=1.2)
    (one,) = judge(
        goal, [ran(60.0, 1.0, p99=1.1, p99_error=0.3), ran(60.0, 1.0, p99=1.1, p99_error=0.4), ran(60.0, 1.0)]
    )
    # 0.25 is the error of the mean of the two that have one.
    assert (one.meets, one.safe) == (True, False)
    assert one.safe_margin == pytest.approx(1.2 / 1.35)
    (sure,) = judge(goal, [ran(60.0, 1.0, p99=1.1, p99_error=0.05)])
    assert sure.safe


def test_a_p99_of_which_nobody_knows_how_exact_it_is_is_safe_once_several_runs_agree() -> None:
    goal = Goal(keep=0.5, p99_factor=1.35)
    (one,) = judge(goal, [ran(60.0, 1.0, p99=1.33)])
    assert (one.meets, one.safe) == (True, False)
    (two,) = judge(goal, [ran(60.0, 1.0, p99=1.33), ran(60.0, 1.0, p99=1.32, p99_error=0.5)])
    assert two.safe
    (apart,) = judge(goal, [ran(60.0, 1.0, p99=1.33), ran(60.0, 1.0, p99=1.2)])
    assert apart.p99 == pytest.approx(1.265)
    assert apart.safe
    (wide,) = judge(goal, [ran(60.0, 1.0, p99=1.5), ran(60.0, 1.0, p99=1.1)])
    assert (wide.meets, wide.safe) == (True, False)


def test_of_equals_the_one_with_low_priority_is_better() -> None:
    trials = [ran(60.0, 1.0, low=False), ran(60.0, 1.0)]
    best = best_of(judge(Goal(), trials))
    assert best is not None
    assert best.setting == Setting(threads=60.0)


@pytest.mark.parametrize(("rate", "wins"), [(1.02, False), (1.05, True)])
def test_another_way_wins_only_by_a_rate_that_stands_out(rate: float, wins: bool) -> None:
    trials = [ran(60.0, 1.0, opportunistic=1.0), ran(50.0, 1.0, opportunistic=rate)]
    best = best_of(judge(Goal(), trials))
    assert best is not None
    assert best.setting.threads == (50.0 if wins else 60.0)


@pytest.mark.parametrize("nothing", [0.0, None])
def test_a_setting_in_which_the_other_job_gets_nothing_is_no_match_for_one_in_which_it_works(
    nothing: float | None,
) -> None:
    """None: not a word of it was heard. Low priority may starve a job beside one that fills the GPU."""
    trials = [ran(60.0, 1.0, opportunistic=nothing), ran(60.0, 1.0, low=False, opportunistic=5.0)]
    best = best_of(judge(Goal(), trials))
    assert best is not None
    assert best.setting == Setting(threads=60.0, low=False)


@pytest.mark.parametrize(("rate", "wins"), [(0.4, True), (0.09, False), (None, False)])
def test_a_sure_setting_that_starves_the_other_job_does_not_beat_a_likely_one(rate: float | None, wins: bool) -> None:
    sure = ran(35.0, 1.1, opportunistic=rate, error=0.01)
    likely = ran(65.0, 0.99, opportunistic=0.5, error=0.1)
    judged = judge(Goal(keep=0.97), [sure, likely])
    assert [one.safe for one in judged] == [True, False]
    best = best_of(judged)
    assert best is not None
    assert best.setting.threads == (35.0 if wins else 65.0)


@given(st.permutations([(100.0, 1.0), (60.0, 1.035), (80.0, 1.06)]))
def test_which_is_best_does_not_depend_on_what_was_tried_first(runs: list[tuple[float, float]]) -> None:
    best = best_of(judge(Goal(), [ran(threads, 1.0, opportunistic=rate) for threads, rate in runs]))
    assert best is not None
    # The larger cap of the two that stand out, and it gives more, too.
    assert best.setting.threads == 80.0


@pytest.mark.parametrize(
    ("low", "normal", "helps"),
    [
        ({"kept": 0.98}, {"kept": 0.96}, True),
        ({"kept": 0.98}, {"kept": 0.975}, False),
        ({"kept": 0.98, "p99": 1.0}, {"kept": 0.98, "p99": 1.2}, True),
        ({"kept": 0.98, "p99": 1.2}, {"kept": 0.98, "p99": 1.0}, False),
        ({"kept": 0.98, "p99": 1.0}, {"kept": 0.98, "p99": 1.02}, False),
        ({"kept": 0.98, "p99": 1.0}, {"kept": 0.98}, False),
        ({"kept": 0.98}, {"kept": 0.98, "p99": 1.0}, False),
        ({"kept": 0.98}, None, None),
    ],
)
def test_low_priority_helps_by_the_rate_or_by_the_tail(
    low: dict[str, float], normal: dict[str, float] | None, helps: bool | None
) -> None:
    trials = [ran(60.0, **low)] + ([] if normal is None else [ran(60.0, low=False, **normal)])
    # Another cap's run tells nothing of it.
    assert outcome(SEARCH, [*trials, ran(50.0, 0.1, low=False)]).low_priority_helps is helps


def test_low_priority_does_not_help_by_less_than_the_figures_scatter() -> None:
    noisy = [ran(60.0, 0.99, error=0.015), ran(60.0, 0.97, low=False, error=0.02)]
    assert outcome(SEARCH, noisy).low_priority_helps is False
    likely = [ran(60.0, 0.99, error=0.008), ran(60.0, 0.97, low=False, error=0.008)]
    assert outcome(SEARCH, likely).low_priority_helps is False
    clear = [ran(60.0, 0.99, error=0.005), ran(60.0, 0.97, low=False, error=0.005)]
    assert outcome(SEARCH, clear).low_priority_helps is True


def test_runs_of_one_setting_count_together_and_unknown_ones_do_not() -> None:
    (one,) = judge(
        Goal(keep=0.5, p99_factor=2.0),
        [ran(60.0, 0.8, p99=1.0, opportunistic=3.0), ran(60.0, 0.4), ran(60.0, 0.6, p99=4.0, opportunistic=5.0)],
    )
    assert (one.trials, one.kept) == (3, pytest.approx(0.6))
    assert (one.p99, one.opportunistic) == (2.5, 4.0)
    assert one.margin == pytest.approx(2.0 / 2.5)


def test_settings_are_named_for_people() -> None:
    assert Setting(threads=100.0, low=False).title == "no cap"
    assert Setting(threads=60.0).title == "cap 60 %, low priority"


@pytest.mark.parametrize(("percent", "warned"), [(84.9, False), (85.0, True)])
def test_a_memory_that_is_nearly_full_is_warned_of(percent: float, warned: bool) -> None:
    assert (memory_warning(percent, None) is not None) is warned
    assert (memory_warning(None, percent) is not None) is warned
