"""The search for a setting, on models of two jobs whose right answer is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.model import Way
from gpushare.measure.search import (
    FASTER,
    MOST_SECONDS,
    Figures,
    Goal,
    Search,
    Setting,
    best_of,
    memory_warning,
    next_setting,
    outcome,
    reason_to_skip,
    slice_setting,
)

Model = Callable[[Setting], Figures]
GOAL = Goal(keep=0.9)


def searched(search: Search, model: Model, known: dict[Setting, Figures] | None = None) -> list[Setting]:
    """Measure what the search asks for, in all ways, until it has an answer; return the settings in this order."""
    known, order = {} if known is None else known, []
    for way in search.ways:
        if reason_to_skip(way, known, search.goal) is not None:
            continue
        while (wanted := next_setting(search, way, known)) is not None:
            before = known.get(wanted.setting)
            # Nothing is measured twice without saying why.
            assert (before is None) == (wanted.why_again is None)
            now = model(wanted.setting)
            longer = now.seconds if before is None or before.earlier else MOST_SECONDS
            known[wanted.setting] = replace(now, seconds=longer)
            order.append(wanted.setting)
            assert len(order) < 60
    return order


def knee(threads: float, *, normal: float = 0.0, error: float = 0.001, steep: float = 0.01) -> Model:
    """Return a pair under MPS: production loses above a cap; with normal priority, that cap is lower by ``normal``."""

    def model(setting: Setting) -> Figures:
        over = max(0.0, setting.threads - threads + (0.0 if setting.low else normal))
        share = setting.threads / 110 * (1.0 if setting.low else 1.1)
        return Figures(setting=setting, kept=max(0.05, 1 - steep * over), error=error, share=share, seconds=6.0)

    return model


@given(st.integers(2, 20), st.floats(0.0, 30.0), st.sampled_from([0.004, 0.01, 0.05]))
def test_the_largest_cap_that_meets_the_goal_is_found_in_few_steps(step: int, normal: float, steep: float) -> None:
    search, model = Search(goal=GOAL, ways=(Way.CAPS,)), knee(5.0 * step, normal=normal, steep=steep)
    known: dict[Setting, Figures] = {}
    order = searched(search, model, known)
    grid = [model(setting) for line in search.lines(Way.CAPS) for setting in line]
    right = best_of(GOAL, grid)
    best = best_of(GOAL, known.values())
    assert (best is None) == (right is None)
    if best is not None and right is not None:
        assert (right.share or 0.0) <= FASTER * (best.share or 0.0)
    # Each is a restart.
    assert len(order) <= 13


@given(st.floats(0.3, 8.0), st.floats(0.0, 1.0), st.floats(1.05, 2.5))
def test_the_best_slices_are_found_for_production_with_gaps(request_ms: float, gain: float, goal: float) -> None:
    """A request waits for a slice of the other and a switch before each of its own."""

    def model(setting: Setting) -> Figures:
        own, other = setting.production_slice_us or 0, setting.other_slice_us or 0
        p99 = 1 + math.ceil(1000 * request_ms / own) * (other + 250) / (1000 * request_ms)
        share = 0.9 * (1 - gain) + 0.9 * gain * other / 2048
        return Figures(
            setting=setting, kept=1.0, p99=p99, p99_low=p99, p99_high=p99, share=share, windows=1, seconds=6.0
        )

    search = Search(goal=Goal(keep=0.97, p99_factor=goal), ways=(Way.SLICES,), request_us=1000 * request_ms)
    known: dict[Setting, Figures] = {}
    order = searched(search, model, known)
    right = best_of(search.goal, [model(setting) for line in search.lines(Way.SLICES) for setting in line])
    best = best_of(search.goal, known.values())
    if right is not None:
        assert (right.share or 0.0) <= FASTER * (best.share or 0.0)
    assert len(order) <= 8


@pytest.mark.parametrize("seed", range(8))
def test_figures_that_scatter_are_measured_longer_and_not_for_ever(seed: int) -> None:
    source = random.Random(seed)  # noqa: S311 - not a secret
    exact = knee(55.0, error=0.006)

    def model(setting: Setting) -> Figures:
        figures = exact(setting)
        return replace(figures, kept=figures.kept + source.gauss(0.0, figures.error))

    known: dict[Setting, Figures] = {}
    order = searched(Search(goal=GOAL, ways=(Way.CAPS,)), model, known)
    best = best_of(GOAL, known.values())
    assert abs(best.setting.threads - 65.0) <= 5.0
    assert len(order) <= 18


def test_slices_come_first_and_caps_only_where_they_can_give_more() -> None:
    search = Search(goal=GOAL)

    def model(setting: Setting) -> Figures:
        return Figures(
            setting=setting, kept=1.0, error=0.001, share=0.99 if setting.way is Way.SLICES else 0.5, seconds=6.0
        )

    known: dict[Setting, Figures] = {}
    assert {setting.way for setting in searched(search, model, known)} == {Way.SLICES}
    assert reason_to_skip(Way.CAPS, known, GOAL) == "with slices the other job keeps 0.99 of its rate alone"


def test_normal_priority_is_seen_where_low_priority_meets_the_goal() -> None:
    """Jobs that compete for bandwidth: on an H200 cap 20 with normal priority kept as much as cap 10 with low priority."""

    def model(setting: Setting) -> Figures:
        low = {10.0: 0.09, 15.0: 0.1}.get(setting.threads, 0.11)
        share = low if setting.low else setting.threads / 107
        kept = 0.902 if setting.threads <= (10.0 if setting.low else 20.0) else 0.88
        return Figures(setting=setting, kept=kept, error=0.0005, share=share, seconds=6.0)

    known: dict[Setting, Figures] = {}
    searched(Search(goal=GOAL, ways=(Way.CAPS,)), model, known)
    result = outcome(GOAL, list(known.values()), stable=True)
    assert not result.best.setting.low
    assert result.best.setting in result.frontier


def test_an_earlier_search_is_gone_on_from() -> None:
    search, model = Search(goal=GOAL, ways=(Way.CAPS,)), knee(55.0)
    known: dict[Setting, Figures] = {}
    first = searched(search, model, known)
    earlier = {setting: replace(figures, earlier="2026-11-25 10:00") for setting, figures in known.items()}
    wanted = next_setting(search, Way.CAPS, earlier)
    assert "measured on 2026-11-25 10:00" in (wanted.why_again or "")
    again = searched(search, model, earlier)
    assert set(again) < set(first)
    assert len(again) <= 2
    # With another goal, the same figures say where to look.
    assert len(searched(Search(goal=Goal(keep=0.95), ways=(Way.CAPS,)), model, earlier)) <= 6


@pytest.mark.parametrize(
    ("figures", "meets", "safe", "verdict"),
    [
        ({"kept": 0.95, "error": 0.001}, True, True, True),
        ({"kept": 0.902, "error": 0.02}, True, False, None),
        ({"kept": 0.80, "error": 0.02}, False, False, False),
        # It waits for requests: its rate says only whether it keeps pace.
        ({"kept": 0.85, "error": 0.04, "waits": True}, True, True, True),
        ({"kept": 0.60, "error": 0.04, "waits": True}, False, False, False),
    ],
)
def test_a_rate_is_judged_by_its_error(
    figures: dict[str, float], meets: bool, safe: bool, verdict: bool | None
) -> None:
    one = Figures(setting=Setting(threads=60.0), **figures)  # type: ignore[arg-type]
    assert (one.meets(GOAL), one.meets_safely(GOAL), one.verdict(GOAL)) == (meets, safe, verdict)


@pytest.mark.parametrize(
    ("p99", "low", "high", "safe", "verdict"),
    [
        (1.1, 1.05, 1.15, True, True),
        (1.19, 1.1, 1.3, False, None),
        (1.5, 1.3, 1.7, False, False),
        # Too few requests for an interval.
        (1.1, 1.0, None, True, None),
        (1.15, 1.0, None, False, None),
        (None, None, None, False, None),
    ],
)
def test_a_p99_is_judged_by_its_interval(
    p99: float | None, low: float | None, high: float | None, safe: bool, verdict: bool | None
) -> None:
    goal = Goal(keep=0.9, p99_factor=1.2)
    one = Figures(setting=Setting(threads=60.0), kept=1.0, p99=p99, p99_low=low, p99_high=high)
    assert (one.meets_safely(goal), one.verdict(goal)) == (safe, verdict)


def test_production_gets_a_slice_that_is_longer_than_its_request() -> None:
    assert Search(goal=GOAL, request_us=1000).production_us == [2048, 16000]
    assert Search(goal=GOAL, request_us=5600).production_us == [16000, 30000]
    assert Search(goal=GOAL, request_us=90000).production_us == [30000]
    assert Search(goal=GOAL).production_us == [16000, 30000]


def test_among_slices_with_the_same_share_the_calmest_is_the_best() -> None:
    goal = Goal(keep=0.9, p99_factor=1.5)
    calm, loud = (
        Figures(setting=slice_setting(16000, us), kept=1.0, error=0.001, p99=p99, p99_low=p99, p99_high=p99, share=0.5)
        for us, p99 in ((100, 1.1), (500, 1.3))
    )
    assert best_of(goal, [loud, calm]) == calm
    # One that surely meets the goal, and starves the other, is worth less than one that may meet it.
    starved, likely = replace(calm, share=0.02), replace(loud, p99=1.49, p99_high=1.6, p99_low=1.4)
    assert best_of(goal, [starved, likely]) == likely


def test_where_the_scatter_decides_the_shorter_slice_is_the_best() -> None:
    goal = Goal(keep=0.95, p99_factor=1.5)
    # Requests at random: a longer slice cannot spare production more, as it seems to.
    short, long = (
        Figures(
            setting=slice_setting(16000, us), kept=1.0, p99=p99, p99_low=0.96, p99_high=high, share=share, waits=True
        )
        for us, p99, high, share in ((100, 1.30, 2.0, 0.74), (2048, 1.27, 1.63, 0.73))
    )
    assert (short.meets_safely(goal), long.meets_safely(goal)) == (False, True)
    assert best_of(goal, [short, long]) == short
    assert best_of(goal, [replace(short, p99=1.52), long]) == long
    assert best_of(goal, [replace(short, share=0.6), long]) == long
    assert best_of(goal, [short, replace(long, setting=slice_setting(4000, 2048))]).setting.other_slice_us == 2048
    # The share of a training fed by the CPU scatters: 1.06 is not more than .94 if both are known within .1.
    calm, fast = (
        replace(each, p99=p99, p99_low=p99, p99_high=p99, share=share)
        for each, p99, share in ((short, 1.02, 0.94), (long, 1.16, 1.06))
    )
    assert best_of(goal, [calm, fast]) == fast
    assert best_of(goal, [replace(calm, share_error=0.07), replace(fast, share_error=0.07)]).p99 == 1.02


def test_a_share_of_caps_does_not_decide_between_slices() -> None:
    """As measured on an H200: a training fed by the CPU beside lookups, the longer slice watched for one window."""
    goal = Goal(keep=0.85)
    short, long, capped = (
        Figures(setting=setting, kept=kept, error=error, share=share, share_error=share_error)
        for setting, kept, error, share, share_error in (
            (slice_setting(16000, 100), 0.984, 0.039, 0.796, 0.007),
            (slice_setting(16000, 2048), 1.055, 0.086, 0.815, 0.009),
            (Setting(threads=100.0), 1.055, 0.058, 0.84, 0.006),
        )
    )
    assert best_of(goal, [short, long]) == short
    assert best_of(goal, [short, long, capped]) == capped
    assert best_of(goal, [short, long, replace(capped, share=0.82)]) == short


def test_where_production_loses_little_the_largest_is_tried_next() -> None:
    known: dict[Setting, Figures] = {}
    order = searched(Search(goal=GOAL, ways=(Way.CAPS,)), knee(100.0, steep=0.001), known)
    assert [(setting.threads, setting.low) for setting in order] == [(60.0, True), (100.0, True), (100.0, False)]


def test_what_no_other_setting_beats_is_on_the_frontier() -> None:
    rows = [
        Figures(setting=Setting(threads=threads), kept=kept, share=share)
        for threads, kept, share in ((10.0, 0.99, 0.1), (20.0, 0.95, 0.2), (30.0, 0.96, 0.15), (40.0, 0.9, 0.19))
    ]
    result = outcome(GOAL, rows, stable=True)
    assert {setting.threads for setting in result.frontier} == {10.0, 20.0, 30.0}


def test_the_nearest_setting_is_named_only_where_none_meets_the_goal() -> None:
    far, near, good = (
        Figures(setting=Setting(threads=threads), kept=kept, error=0.001, share=0.2)
        for threads, kept in ((60.0, 0.5), (30.0, 0.8), (10.0, 0.99))
    )
    result = outcome(GOAL, [far, near], stable=True)
    assert (result.best, result.nearest) == (None, near)
    result = outcome(GOAL, [far, near, good], stable=True)
    assert (result.best, result.nearest) == (good, None)
    # Those of an earlier search are no answer.
    result = outcome(GOAL, [replace(near, earlier="2026-11-25 10:00")], stable=True)
    assert (result.best, result.nearest) == (None, None)


def test_low_priority_is_said_to_help_where_both_were_measured() -> None:
    low, normal = (
        Figures(setting=Setting(threads=60.0, low=low), kept=kept) for low, kept in ((True, 0.97), (False, 0.9))
    )
    assert outcome(GOAL, [low, normal], stable=True).low_priority_helps
    assert outcome(GOAL, [replace(low, kept=0.9), normal], stable=True).low_priority_helps is False
    assert outcome(GOAL, [low], stable=True).low_priority_helps is None


def test_jobs_that_need_the_same_bandwidth_are_told_so() -> None:
    assert "opportunistic job alone draws 90 %" in (memory_warning(90.0, 10.0) or "")
    assert "production job alone draws 88 %" in (memory_warning(None, 88.0) or "")
    assert memory_warning(80.0, None) is None


def test_slices_that_starve_the_others_are_not_searched_where_caps_can_be() -> None:
    def starving(setting: Setting) -> Figures:
        if setting.way is Way.CAPS:
            return knee(40)(setting)
        return Figures(setting=setting, kept=0.8, error=0.001, share=0.06, seconds=6.0)

    both = searched(Search(goal=GOAL), starving)
    assert [setting.way for setting in both[:2]] == [Way.SLICES, Way.CAPS]
    # Alone they are all that there is.
    assert len(searched(Search(goal=GOAL, ways=(Way.SLICES,)), starving)) > 1


def test_a_p99_that_stays_uncertain_is_not_watched_for_the_longest_time() -> None:
    goal = Goal(keep=0.9, p99_factor=1.4)

    def stalled(setting: Setting) -> Figures:
        late = 1.6 if (setting.other_slice_us or 0) > 100 else 1.2
        return Figures(
            setting=setting, kept=0.99, error=0.001, p99=late, p99_low=0.5, p99_high=3.0, share=0.4, seconds=6.0
        )

    uncertain = stalled(slice_setting(16000, 100))
    assert uncertain.most_seconds(goal) < MOST_SECONDS
    assert replace(uncertain, p99_low=1.19, p99_high=1.21).most_seconds(goal) == MOST_SECONDS
    searched(Search(goal=goal, ways=(Way.SLICES,)), stalled)


def test_late_the_best_so_far_becomes_certain_before_more_is_tried() -> None:
    search, found = Search(goal=GOAL), Setting(threads=60.0)
    known = {found: replace(knee(80, error=0.03)(found), seconds=1.2)}
    late = next_setting(search, Way.CAPS, known, late=True)
    assert late.setting == found
    assert next_setting(search, Way.CAPS, known) != late
    # It is certain by now, and there is time left.
    known[found] = replace(known[found], seconds=MOST_SECONDS)
    assert next_setting(search, Way.CAPS, known, late=True) == next_setting(search, Way.CAPS, known)
