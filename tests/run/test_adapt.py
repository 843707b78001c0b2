"""The slice of an opportunistic job follows production's speed: a model of both, with phases and noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.run.adapt import LEAST_US, MOST_US, SILENT_SECONDS, WINDOW_SECONDS, Controller, Setting
from gpushare.sim.job import _pace_in_turns
from tests.measure.told_jobs import ToldJob, _process

TICK = 0.05


@dataclass(frozen=True)
class Phase:
    """What production does for some seconds: its speed alone, and which part it loses next to a slice of many times ``half``."""

    seconds: float
    speed: float
    harm: float
    half: float = 500.0

    def kept(self, setting: Setting) -> float:
        slice_us = 0 if setting.held else setting.slice_us
        return 1 - self.harm * slice_us / (slice_us + self.half)


@dataclass(frozen=True)
class OnGpu(Phase):
    """A job of a simulated GPU with a slice of 8 ms: requests of 1 ms, which take ``busy`` percent of the time."""

    harm: float = 0.0
    busy: float = 100.0

    def kept(self, setting: Setting) -> float:
        if setting.held:
            return 1.0
        request = None if self.busy >= 100 else 1.0
        web = ToldJob("web", 90, 100, 0, print, busy=self.busy, latency=request, slice_us=8000)
        other = ToldJob("other", 90, 100, 0, print, slice_us=setting.slice_us)
        state: Any = SimpleNamespace(servers=[])
        return _pace_in_turns(state, _process(1, web), 1.0, [[_process(2, other)]]).rate


@dataclass(frozen=True)
class Outcome:
    """The least part that production kept within any minute, and the settings of each second."""

    worst: float
    # By how much the controller's own figure for the last minute was ever too high.
    boast: float
    # The least that it ever claimed.
    least: float
    settings: list[Setting]
    controller: Controller

    @property
    def used(self) -> float:
        """Return the mean slice in microseconds."""
        return sum(0 if setting.held else setting.slice_us for setting in self.settings) / len(self.settings)


def simulate(
    phases: list[Phase],
    *,
    keep: float = 0.97,
    noise: float = 0.01,
    every: float = 0.05,
    seconds: float = 240.0,
    seed: int = 1,
    speaks: tuple[float, float] = (0.0, 1e9),
) -> Outcome:
    scatter, controller = random.Random(seed), Controller(keep)  # noqa: S311
    setting = Setting(slice_us=LEAST_US, held=True)
    alone, real, since, seen, chosen = [], [], [], [], []
    boast, least = 0.0, 1.0
    minute = round(min(WINDOW_SECONDS, seconds) / TICK)
    prints = every
    whole = sum(each.seconds for each in phases)
    for tick in range(round(seconds / TICK)):
        at = tick * TICK
        place = at % whole
        phase = next(each for number, each in enumerate(phases) if place < sum(p.seconds for p in phases[: number + 1]))
        alone.append(phase.speed)
        real.append(phase.speed * phase.kept(setting))
        since.append(real[-1])
        if at + TICK >= prints - 1e-9:
            prints += every
            if speaks[0] <= at < speaks[1]:
                seen.append((at + TICK, sum(since) / len(since) * (1 + scatter.gauss(0, noise))))
            since = []
        if (tick + 1) % round(1 / TICK) == 0:
            setting, seen = controller.step(at + TICK, seen), []
            chosen.append(setting)
            if tick >= minute and controller.kept is not None:
                least = min(least, controller.kept)
                boast = max(boast, controller.kept - sum(real[-minute:]) / sum(alone[-minute:]))
    starts = range(0, len(real) - minute + 1, round(1 / TICK))
    worst = min(sum(real[at : at + minute]) / sum(alone[at : at + minute]) for at in starts)
    return Outcome(worst, boast, least, chosen, controller)


def test_it_holds_the_other_back_until_the_baseline_is_known() -> None:
    controller = Controller(0.97)
    assert controller.step(0.0, []).held
    assert controller.step(1.0, [(0.1 * n, 50.0) for n in range(1, 11)]).held
    assert not controller.step(2.0, [(1 + 0.1 * n, 50.0) for n in range(1, 11)]).held
    assert controller.baseline == pytest.approx(50.0)


def test_a_job_that_costs_nothing_gets_the_longest_slice() -> None:
    outcome = simulate([Phase(1000, 50, 0.0)])
    assert max(setting.slice_us for setting in outcome.settings) == MOST_US
    assert outcome.used > 0.85 * MOST_US
    assert outcome.worst == 1.0


@pytest.mark.parametrize("seed", [1, 5])
@pytest.mark.parametrize("noise", [0.002, 0.01])
@pytest.mark.parametrize("every", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("harm", [0.05, 0.2, 0.6])
def test_steady_production_keeps_its_part_in_every_minute(noise: float, every: float, harm: float, seed: int) -> None:
    outcome = simulate([Phase(1000, 100, harm)], noise=noise, every=every, seed=seed)
    assert outcome.worst >= 0.97
    assert outcome.used > 0.3 * LEAST_US


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("every", [0.05, 0.5])
@pytest.mark.parametrize(
    "phases",
    [
        [Phase(40, 100, 0.02), Phase(40, 60, 0.6, 300)],
        [Phase(40, 100, 0.6, 300), Phase(40, 300, 0.02)],
        # The speed alone stays the same.
        [Phase(30, 100, 0.0), Phase(30, 100, 0.7, 200)],
        [Phase(25, 100, 0.02), Phase(25, 40, 0.3), Phase(25, 160, 0.6)],
    ],
)
def test_production_that_changes_phase_keeps_its_part_in_every_minute(
    phases: list[Phase], every: float, seed: int
) -> None:
    assert simulate(phases, every=every, seed=seed).worst >= 0.97


@pytest.mark.parametrize(("every", "seed"), [(0.05, 1), (0.5, 4)])
def test_a_phase_without_harm_is_used(every: float, seed: int) -> None:
    light, heavy = Phase(60, 100, 0.01), Phase(60, 60, 0.6, 300)
    outcome = simulate([light, heavy], every=every, seed=seed)
    assert outcome.worst >= 0.97
    of_light = [setting.slice_us for at, setting in enumerate(outcome.settings) if at % 120 < 60]
    of_heavy = [setting.slice_us for at, setting in enumerate(outcome.settings) if at % 120 >= 70]
    assert max(of_light) > 10 * max(of_heavy)


def test_requests_with_gaps_and_then_work_without_them() -> None:
    """Next to requests with gaps the longest slice costs nothing; the work without gaps has another speed."""
    outcome = simulate([OnGpu(60, 40, busy=4), OnGpu(60, 500)], keep=0.9)
    assert outcome.worst >= 0.9
    of_light = [setting.slice_us for at, setting in enumerate(outcome.settings) if at % 120 < 60]
    of_heavy = [setting.slice_us for at, setting in enumerate(outcome.settings) if at % 120 >= 60]
    assert max(of_light) >= 1500
    # 8000 / (8000 + slice + 2 switches of 250) is .9 with 389.
    assert sorted(of_heavy)[len(of_heavy) // 2] <= 400


def test_what_even_the_least_slice_costs_too_much_stays_held_back() -> None:
    outcome = simulate([Phase(1000, 100, 0.9, 20)])
    assert outcome.worst >= 0.97
    assert sum(setting.held for setting in outcome.settings[60:]) > 0.8 * len(outcome.settings[60:])
    assert outcome.controller.out_of_reach


@pytest.mark.parametrize("every", [0.25, 1.0])
@pytest.mark.parametrize("seconds", [7, 12, 30])
@pytest.mark.parametrize("harm", [(0.0, 0.15), (0.15, 0.02), (0.3, 0.6)])
def test_it_claims_no_more_than_production_keeps_where_phases_change(
    harm: tuple[float, float], seconds: float, every: float
) -> None:
    outcome = simulate([Phase(seconds, 89, harm[0]), Phase(seconds, 169, harm[1])], every=every)
    assert outcome.worst >= 0.97
    assert outcome.boast <= 0.015


@pytest.mark.parametrize("every", [3.0, 12.0])
def test_a_number_that_comes_seldom_counts_for_all_of_its_time(every: float) -> None:
    outcome = simulate([Phase(1000, 100, 0.6, 20)], every=every)
    # The time until the first number next to the other is seen with that number only.
    assert outcome.least <= outcome.worst + 0.02


class Printing:
    """A controller in virtual time, and what production prints four times a second."""

    def __init__(self) -> None:
        self.controller, self.at, self.seen = Controller(0.97), 0.0, list[tuple[float, float]]()
        self.setting = Setting(slice_us=LEAST_US, held=True)
        self.settings: list[Setting] = []

    def run(self, seconds: float, speed: Callable[[Setting], float | None]) -> None:
        for _ in range(round(seconds * 4)):
            self.at += 0.25
            now = speed(self.setting)
            if now is not None:
                self.seen.append((self.at, now))
            if self.at.is_integer():
                self.setting, self.seen = self.controller.step(self.at, self.seen), []
                self.settings.append(self.setting)


def test_production_that_prints_only_while_the_other_is_stopped_is_starved() -> None:
    printing = Printing()
    printing.run(10, lambda _: 90.0)
    printing.run(4, lambda setting: 90.0 if setting.held else None)
    assert printing.setting.held
    printing.run(26, lambda setting: 90.0 if setting.held else None)
    kept = printing.controller.kept
    assert kept < 0.97
    # Not more than two silences in a minute.
    assert sum(not setting.held for setting in printing.settings[11:]) <= 6


def test_production_that_prints_a_ninth_next_to_the_other_is_not_said_to_keep_its_speed() -> None:
    printing = Printing()
    printing.run(10, lambda _: 90.0)
    printing.run(20, lambda setting: 90.0 if setting.held else 10.0)
    kept = printing.controller.kept
    assert printing.controller.baseline == pytest.approx(90)
    assert kept < 0.975
    assert sum(not setting.held for setting in printing.settings[10:]) <= 3


def test_a_faster_phase_that_the_other_slows_to_the_speed_before_is_charged_when_it_is_found() -> None:
    printing = Printing()
    printing.run(20, lambda _: 170.0)
    # A slower phase is measured again sooner than after 30 s.
    printing.run(8, lambda _: 90.0)
    assert not printing.setting.held
    printing.run(16, lambda setting: 170.0 if setting.held else 90.0)
    kept = printing.controller.kept
    assert printing.controller.baseline == pytest.approx(170)
    assert printing.setting.held
    assert kept < 0.9


def test_production_that_rests_has_lost_nothing() -> None:
    printing = Printing()
    printing.run(20, lambda _: 90.0)
    before = printing.setting
    printing.run(9, lambda _: None)
    assert printing.setting == before
    # The first number is about the rest, too.
    printing.seen.append((printing.at + 0.1, 0.1))
    printing.run(3, lambda _: 90.0)
    assert printing.controller.kept == pytest.approx(1.0)
    assert not printing.setting.held
    assert printing.setting.slice_us == MOST_US


def test_a_far_lower_speed_alone_is_believed_later() -> None:
    printing = Printing()
    printing.run(10, lambda _: 90.0)
    start = printing.at
    # What was submitted before still runs for two seconds.
    printing.run(4, lambda setting: 90.0 if setting.held and printing.at > start + 3 else 10.0)
    printing.run(4, lambda _: 90.0)
    assert printing.controller.baseline == pytest.approx(90)
    printing.run(12, lambda _: 10.0)
    assert printing.controller.baseline == pytest.approx(10)
    assert printing.controller.best == pytest.approx(90)


def test_a_lower_part_gives_more() -> None:
    used = [simulate([Phase(1000, 100, 0.5)], keep=keep).used for keep in (0.99, 0.97, 0.9)]
    assert used == sorted(used)


def test_without_numbers_the_slice_is_the_least() -> None:
    outcome = simulate([Phase(1000, 100, 0.0)], seconds=100, speaks=(0.0, 60.0))
    assert outcome.settings[58].slice_us == MOST_US
    assert {setting.slice_us for setting in outcome.settings[round(62 + SILENT_SECONDS) :]} == {LEAST_US}


def test_production_that_never_prints_leaves_the_least() -> None:
    outcome = simulate([Phase(1000, 100, 0.5)], seconds=60, speaks=(1e9, 1e9))
    assert outcome.controller.baseline is None
    assert outcome.settings[-1] == Setting(slice_us=LEAST_US, held=False)


def test_numbers_begin_late() -> None:
    outcome = simulate([Phase(1000, 100, 0.0)], seconds=120, speaks=(50.0, 1e9))
    assert outcome.controller.baseline == pytest.approx(100, rel=0.02)
    assert outcome.settings[-1].slice_us == MOST_US


@given(
    phases=st.lists(
        st.builds(
            Phase,
            seconds=st.floats(20, 90),
            speed=st.floats(1e-3, 1e6),
            harm=st.floats(0, 0.9),
            half=st.floats(20, 5000),
        ),
        min_size=1,
        max_size=4,
    ),
    noise=st.floats(0, 0.1),
    every=st.sampled_from([0.05, 0.25, 1.0, 3.0, 12.0]),
    keep=st.floats(0.5, 0.999),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_whatever_production_does_the_slice_stays_within_its_bounds(
    phases: list[Phase], noise: float, every: float, keep: float, seed: int
) -> None:
    outcome = simulate(phases, noise=noise, every=every, keep=keep, seed=seed, seconds=120)
    assert all(LEAST_US <= setting.slice_us <= MOST_US for setting in outcome.settings)
    kept = outcome.controller.kept
    assert kept is None or kept <= 1.2 + 10 * noise or len(phases) > 1


@given(
    harm=st.floats(0, 0.8),
    half=st.floats(100, 2000),
    noise=st.floats(0, 0.01),
    keep=st.floats(0.8, 0.98),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_steady_production_keeps_its_part(harm: float, half: float, noise: float, keep: float, seed: int) -> None:
    outcome = simulate([Phase(1000, 100, harm, half)], noise=noise, keep=keep, seed=seed)
    assert outcome.worst >= keep


@given(times=st.lists(st.floats(0, 100), max_size=30), values=st.lists(st.floats(0, 1e100), min_size=30, max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_numbers_are_taken(times: list[float], values: list[float]) -> None:
    controller = Controller(0.97)
    for second in range(101):
        seen = [(at, value) for at, value in zip(sorted(times), values, strict=False) if second - 1 < at <= second]
        setting = controller.step(float(second), seen)
        assert LEAST_US <= setting.slice_us <= MOST_US
