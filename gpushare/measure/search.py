"""The search for the setting of opportunistic jobs next to a production job: what to measure next, and the answer. Pure.

Settings lie on lines. Along a line the opportunistic jobs get more, and production keeps less: time-slices of the others
next to one slice of production, thread caps with low priority, and caps with normal priority. On each line the search
closes in on the last setting that meets the goal, by the figures on both sides of it.

What was measured on an H200 (driver 580.159.04, 2026-11-22) gives the order. A request waits for one slice of the other
job and a switch of some 0.25 ms before each of its own slices: production's slice must be longer than its request, and the
other's short. Below 100 us little is gained. Where production has no gaps, each job gets about its slice's part, and caps
do better: 60 percent with low priority ends the harm for most pairs, the knee depends on the pair, and no property of a GPU
predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from gpushare.base.model import Way
from gpushare.base.units import format_slice

# Microseconds. For production, next to the default slice; longer ones would freeze the neighbours.
PRODUCTION_US: Final = (4000, 16000, 30000)
OTHER_US: Final = (50, 100, 200, 500, 1000, 2048)
DEFAULT_US: Final = 2048
CAPS_PERCENT: Final = tuple(float(threads) for threads in range(10, 101, 5))
_FIRST_US: Final = 100
_FIRST_CAP: Final = 60.0
# Production's slice is this much longer than its request, which takes longer on some days.
_LEAST_SLICE_PER_REQUEST: Final = 1.2
# Below this part of the goal, a shorter slice of the other meets it neither.
_WITHIN_REACH: Final = 0.75
# A gain below this is within the scatter.
FASTER: Final = 1.03
# Slices whose p99 differs by less than this are equally good for production.
_P99_ALIKE: Final = 1.04
# A sure setting that gives less than this part of what a likely one gives is not worth the certainty.
_LEAST_OF_LIKELY: Final = 0.2
# From here on the jobs compete for memory bandwidth, nearly all of which half of the SMs can draw (H200).
DRAM_FULL_PERCENT: Final = 85.0
# How long a setting is watched next to production while the figures do not decide: at first, and at most (seconds).
FIRST_SECONDS: Final = 5.0
MOST_SECONDS: Final = 15.0
# Figures as certain as this need no more windows: relative standard errors of a rate, and of a p99.
_RATE_ERROR: Final = 0.005
_P99_ERROR: Final = 0.015
# A setting with this margin fails by more than chance.
_CLEAR_FAILURE: Final = 0.985
# A p99 this far within its goal meets it, however few the requests; and the error of one that is of too few.
_CLEAR_P99_MARGIN: Final = 1.12
_UNKNOWN_P99_ERROR: Final = 0.08
# The answer is watched for at least this time, and until its rate is as certain as this.
_ANSWER_SECONDS: Final = 6.0
_ANSWER_RATE_ERROR: Final = 0.01
# A p99 whose error would still be so many times too large after the longest time is not watched that long.
_HOPELESS_ERROR: Final = 2.0
_SCATTERED_SECONDS: Final = 9.0
# Slices that leave the others less than this are not searched further where caps can be.
_STARVED_SHARE: Final = 0.2
# A setting with at least this margin may meet the goal after more windows.
_NEAR_GOAL: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What production must keep: a share of its rate alone, and its p99 within a factor (None: no goal)."""

    keep: float = 0.97
    p99_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the opportunistic jobs run: the thread cap of each in percent (100 is none) and priority.

    With ``other_slice_us`` and ``production_slice_us``, production runs outside MPS, and the opportunistic jobs share one
    time-slice (`slice_setting`).
    """

    threads: float
    low: bool = True
    production_slice_us: int | None = None
    other_slice_us: int | None = None

    @property
    def way(self) -> Way:
        """Return `Way.SLICES` or `Way.CAPS`."""
        return Way.CAPS if self.other_slice_us is None else Way.SLICES

    @property
    def title(self) -> str:
        if self.other_slice_us is not None:
            production = format_slice(self.production_slice_us)
            return f"slice {format_slice(self.other_slice_us)}, production slice {production}"
        cap = "no cap" if self.threads >= 100 else f"cap {self.threads:g} %"
        return f"{cap}, low priority" if self.low else cap

    @property
    def given_others(self) -> float:
        """Return what grows along a line: the slice of the opportunistic jobs in microseconds, or their cap in percent."""
        return self.other_slice_us or self.threads


def slice_setting(production_us: int, other_us: int) -> Setting:
    """Return the setting with these time-slices: production's, and that of all opportunistic jobs together."""
    return Setting(threads=100.0, low=False, production_slice_us=production_us, other_slice_us=other_us)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one setting, relative to the jobs alone in the same minutes.

    ``error`` is the standard error of ``kept``; the interval of the p99 is at 95 percent (None: too few latencies). ``share``
    is the mean of the opportunistic jobs'. ``waits``: production waits for requests, so that its rate is the demand and
    says little. ``seconds`` is how long all were watched together; ``earlier``: by an earlier search, at that date.
    """

    setting: Setting
    kept: float
    error: float = 0.0
    p99: float | None = None
    p99_low: float | None = None
    p99_high: float | None = None
    share: float | None = None
    share_error: float | None = None
    waits: bool = False
    seconds: float = 0.0
    windows: int = 0
    earlier: str | None = None

    @property
    def p99_error(self) -> float | None:
        """Return the standard error of the p99; None: unknown."""
        return None if self.p99_low is None or self.p99_high is None else (self.p99_high - self.p99_low) / 4

    def margin(self, goal: Goal) -> float:
        """Return how far the goal is met: 1 at the goal, more if there is room, less if the setting fails."""
        # A rate that is the demand says little: it fails only if it does so by more than chance.
        kept = self._kept_plus(2.0) if self.waits else self.kept
        return min(kept / goal.keep, self._p99_margin(goal, self.p99))

    def meets(self, goal: Goal) -> bool:
        """Return whether the goal is met, perhaps by chance."""
        return self.margin(goal) >= 1

    def meets_safely(self, goal: Goal) -> bool:
        """Return whether the goal is met by more than one standard error, of the rate and of the p99."""
        p99_is_safe = goal.p99_factor is None
        if self.p99 is not None:
            error = _UNKNOWN_P99_ERROR * self.p99 if self.p99_error is None else self.p99_error
            p99_is_safe = self._p99_margin(goal, self.p99 + error) >= 1
        rate_is_safe = self.waits or self._has_precise_rate(goal) or self._kept_plus(-1.0) >= goal.keep
        return self.meets(goal) and rate_is_safe and p99_is_safe

    def meets_so_far(self, goal: Goal) -> bool:
        """Return whether the goal is met: at first perhaps by chance, after the longest time by more than that."""
        return self.meets(goal) and (self.seconds < self.most_seconds(goal) or self.meets_safely(goal))

    def verdict(self, goal: Goal) -> bool | None:
        """Return whether the goal is met, by two standard errors; None: more windows might still change the answer."""
        if self._kept_plus(2.0) < goal.keep or self._p99_margin(goal, self.p99_low or 0.0) < 1:
            return False
        precise = self._has_precise_rate(goal)
        if precise and self.kept < goal.keep and not self.waits:
            return False
        rate_is_met = self.waits or precise or self._kept_plus(-2.0) >= goal.keep
        return True if rate_is_met and self._p99_margin(goal, self.p99_high) >= 1 else None

    def has_reserve(self, goal: Goal) -> bool:
        """Return whether production loses at most half of what it may lose: then the search takes a larger step."""
        rate_is_ample = self.waits or self.kept >= (1 + goal.keep) / 2
        p99_is_ample = goal.p99_factor is None or self.p99 is None or self.p99 <= (1 + goal.p99_factor) / 2
        return rate_is_ample and p99_is_ample

    def meets_clearly(self, goal: Goal) -> bool:
        """Return whether the goal is met so clearly that the search can go on; the answer needs a `verdict`."""
        rate_is_clear = self.waits or self._kept_plus(-2.0) >= goal.keep
        return self.meets(goal) and rate_is_clear and self._p99_margin(goal, self.p99) >= _CLEAR_P99_MARGIN

    def is_certain(self, goal: Goal) -> bool:
        """Return whether the figures are as certain as an answer should be, whether or not the goal is met."""
        # `_has_precise_rate`, which the search needs to go on, asks for more.
        rate_is_sure = self.waits or self.error <= _ANSWER_RATE_ERROR
        error = self.p99_error
        p99_is_sure = goal.p99_factor is None or (error is not None and error <= _P99_ERROR * (self.p99 or 1.0))
        return rate_is_sure and p99_is_sure and self.seconds >= _ANSWER_SECONDS

    def most_seconds(self, goal: Goal) -> float:
        """Return how long the setting is worth watching: less if the host's own stalls keep its p99 from becoming certain."""
        error = self.p99_error
        if goal.p99_factor is None or error is None or self.p99 is None or self.seconds < _ANSWER_SECONDS:
            return MOST_SECONDS
        # An error falls with the square root of the time.
        error_in_the_end = error * math.sqrt(self.seconds / MOST_SECONDS)
        hopeless = error_in_the_end > _HOPELESS_ERROR * _P99_ERROR * self.p99
        return _SCATTERED_SECONDS if hopeless else MOST_SECONDS

    def _has_precise_rate(self, goal: Goal) -> bool:
        """Return whether the error of the rate is at most a sixth of what production may lose, within 0.1 to 0.5 %."""
        return self.error <= max(0.001, min(_RATE_ERROR, (1 - goal.keep) / 6))

    def _kept_plus(self, errors: float) -> float:
        """Return the part of its rate that production kept, plus so many standard errors (minus, if negative)."""
        return self.kept + errors * self.error

    @staticmethod
    def _p99_margin(goal: Goal, p99: float | None) -> float:
        """Return how far a p99 meets the goal: 1 and more if so; 0 if it is unknown, infinite without a goal for the p99."""
        if goal.p99_factor is None:
            return math.inf
        if p99 is None:
            return 0.0
        return goal.p99_factor / p99 if p99 > 0 else math.inf


class Wanted(NamedTuple):
    """The setting to measure next; ``why_again``: the reason, if it was measured before."""

    setting: Setting
    why_again: str | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search. ``caps`` are the thread percentages to choose from.

    ``default_us`` is the slice of a job that has none of its own, as the driver says; ``request_us`` is how long a request of
    production takes alone (None: unknown).
    """

    goal: Goal
    ways: Sequence[Way] = (Way.SLICES, Way.CAPS)
    caps: Sequence[float] = CAPS_PERCENT
    default_us: int = DEFAULT_US
    request_us: float | None = None

    @property
    def production_us(self) -> list[int]:
        """Return production's slices in the order in which they are tried: one into which a request fits, and a longer one.

        The first is the shortest that is long enough, or the longest of all.
        """
        if self.request_us is None:
            # Not the shortest: a slice has to be longer than a request, of unknown length here.
            return list(PRODUCTION_US[1:])
        least_us = _LEAST_SLICE_PER_REQUEST * self.request_us
        first = next((each for each in (self.default_us, *PRODUCTION_US) if each >= least_us), PRODUCTION_US[-1])
        longer = [each for each in PRODUCTION_US[1:] if each > first]
        return [first, *longer[:1]]

    def least_share(self, way: Way) -> float:
        """Return the share of the others below which no setting of a way is worth measuring."""
        return _STARVED_SHARE if way is Way.SLICES and Way.CAPS in self.ways else 0.0

    def lines(self, way: Way) -> list[list[Setting]]:
        """Return the settings of a way in rows, in the order of the search; within a row the other jobs get more and more.

        Slices: a row for each slice of production. Caps: a row with low client priority of the others, and one without.
        """
        if way is Way.SLICES:
            return [[slice_setting(own, other) for other in OTHER_US] for own in self.production_us]
        caps = sorted(self.caps)
        return [[Setting(threads=threads, low=low) for threads in caps] for low in (True, False)]


def next_setting(search: Search, way: Way, known: Mapping[Setting, Figures], *, late: bool = False) -> Wanted | None:
    """Return the next setting of a way to measure; None: there is an answer.

    ``late``: little time is left, which is best used to make the best setting so far certain.
    """
    of_way = [figures for figures in known.values() if figures.setting.way == way]
    if late and (wanted := _uncertain_best(search.goal, of_way)):
        return wanted
    lines = search.lines(way)
    for number, line in enumerate(lines):
        setting = _next_on_line(search, line, lines[:number], known)
        if setting is not None:
            return Wanted(setting)
    least = search.least_share(way)
    return _setting_to_watch_longer(search.goal, [each for each in of_way if each.share is None or each.share >= least])


def reason_to_skip(way: Way, known: Mapping[Setting, Figures], goal: Goal) -> str | None:
    """Return why no setting of a way can be better than the best one, which is of another way; None: one may be."""
    best = best_of(goal, known.values())
    if best is None or best.setting.way == way or not best.meets_safely(goal) or best.share is None:
        return None
    # Even a share of 1 would be more only by the scatter.
    if best.share * FASTER >= 1:
        return f"with {best.setting.way.value} the other job keeps {best.share:.2f} of its rate alone"
    return None


def _next_on_line(
    search: Search, line: Sequence[Setting], lines_before: Sequence[Sequence[Setting]], known: Mapping[Setting, Figures]
) -> Setting | None:
    """Return the setting of a line to measure next: one between the last that meets the goal and the first that fails.

    Each setting of a line gives the other jobs more, and production less, than the one before. ``lines_before`` are those of
    the same way that were searched already. None: there is no setting in between, or none can be better than the best known.
    """
    goal = search.goal
    best = best_of(goal, known.values())
    measured = {index: known[setting] for index, setting in enumerate(line) if setting in known}
    if not measured:
        return _first_on_line(search, line, lines_before, known, best)
    way = line[0].way
    meeting = max((index for index, figures in measured.items() if figures.meets_so_far(goal)), default=-1)
    failing = min((index for index in measured if index > meeting), default=len(line))
    if way is Way.CAPS and lines_before:
        # Normal priority spares production less: what clearly fails with low priority fails.
        for index in range(meeting + 1, failing):
            with_low = known.get(replace(line[index], low=True))
            if with_low is not None and with_low.margin(goal) < _CLEAR_FAILURE:
                failing = index
                break
    between = range(meeting + 1, failing)
    # What fails gives the others more than all below it.
    most = measured[failing].share if failing in measured else _most_share(lines_before, known)
    if not between or not _may_be_best(most, best, search.least_share(way)):
        return None
    if way is Way.SLICES:
        # Production fails so clearly next to the shortest slice that was measured that a shorter one fails, too.
        out_of_reach = meeting < 0 and measured[min(measured)].margin(goal) < _WITHIN_REACH
        if out_of_reach or _is_no_better(line, lines_before, known, goal):
            return None
    if failing not in measured:
        # Where production hardly notices the others, the last setting is likely to meet the goal, too.
        has_reserve = meeting >= 0 and measured[meeting].has_reserve(goal)
        return line[between[-1] if has_reserve else between[len(between) // 2]]
    # A straight line between both ends alone creeps up on a sharp knee: every other time, the middle is measured.
    if meeting >= 0 and len(measured) % 2 == 0:
        return line[(meeting + failing) // 2]
    return line[_crossing(meeting, failing, measured, goal)]


def _is_no_better(
    line: Sequence[Setting], lines_before: Sequence[Sequence[Setting]], known: Mapping[Setting, Figures], goal: Goal
) -> bool:
    """Return whether the longer slice of production on this line spares it no more than that of the line before."""
    if not lines_before:
        return False
    pairs = [(known.get(setting), known.get(other)) for setting, other in zip(line, lines_before[-1], strict=True)]
    both = [(longer, shorter) for longer, shorter in pairs if longer is not None and shorter is not None]
    return bool(both) and all(
        longer.margin(goal) < shorter.margin(goal) + max(0.01, 2 * longer.error) for longer, shorter in both
    )


def _most_share(lines_before: Sequence[Sequence[Setting]], known: Mapping[Setting, Figures]) -> float:
    """Return the largest share that the others can have on the next line, judged by the lines before it.

    Next to a longer slice of production they get no more than on those; nothing bounds them on caps or a first line: 1.
    """
    if not lines_before or lines_before[-1][0].way is Way.CAPS:
        return 1.0
    return max((known[each].share or 0.0 for line in lines_before for each in line if each in known), default=1.0)


def _crossing(low: int, high: int, measured: Mapping[int, Figures], goal: Goal) -> int:
    """Return the index between two on a line at which the margin, on a straight line between theirs, falls below 1."""
    # At -1, before the first setting, the others get nothing and production loses nothing.
    margin_low = measured[low].margin(goal) if low >= 0 else min(1 / goal.keep, goal.p99_factor or math.inf)
    margin_high = measured[high].margin(goal)
    if not math.isfinite(margin_low) or margin_low <= margin_high:
        return (low + high) // 2
    index = low + (margin_low - 1) / (margin_low - margin_high) * (high - low)
    return min(high - 1, max(low + 1, round(index)))


def _first_on_line(
    search: Search,
    line: Sequence[Setting],
    lines_before: Sequence[Sequence[Setting]],
    known: Mapping[Setting, Figures],
    best: Figures | None,
) -> Setting | None:
    """Return the first setting to measure on a line: close to the last that met the goal on the line before.

    None: no setting of the line can be the best one.
    """
    way = line[0].way
    if not _may_be_best(_most_share(lines_before, known), best, search.least_share(way)):
        return None
    given = _FIRST_US if way is Way.SLICES else _FIRST_CAP
    if lines_before:
        measured = [known[setting] for setting in lines_before[-1] if setting in known]
        meeting = [figures.setting.given_others for figures in measured if figures.meets_so_far(search.goal)]
        if way is Way.CAPS and not meeting:
            # Normal priority spares production less than low priority, with which no cap meets the goal.
            return None
        given = max(meeting, default=given)
    return min(line, key=lambda setting: abs(setting.given_others - given))


def _may_be_best(share: float | None, best: Figures | None, least: float = 0.0) -> bool:
    """Return whether a setting under which the others have this share (None: unknown) could be better than the best one.

    The share must be at least ``least``, and clearly larger than that of the best setting, if there is one.
    """
    if share is None:
        return True
    return share >= least and (best is None or best.share is None or share > FASTER * best.share)


def _setting_to_watch_longer(goal: Goal, measured: Sequence[Figures]) -> Wanted | None:
    """Return a setting to be watched for longer before the answer stands, and why; None: the answer stands.

    First the best one, if it is known from an earlier search only; then one that would be better, and meets or misses the
    goal by chance; then the best one, until its figures are certain.
    """
    best = best_of(goal, measured)
    if best is not None and best.earlier is not None:
        return Wanted(best.setting, f"measured on {best.earlier}: does it still hold?")
    for figures in sorted(measured, key=lambda each: -(each.share or 0.0)):
        watchable = figures.earlier is None and figures.seconds < figures.most_seconds(goal)
        is_open = watchable and figures.verdict(goal) is None and figures.margin(goal) > _NEAR_GOAL
        if is_open and figures != best and _may_be_best(figures.share, best):
            how = "met" if figures.meets(goal) else "missed"
            return Wanted(figures.setting, f"it {how} the goal by less than the scatter")
    return _uncertain_best(goal, measured)


def _uncertain_best(goal: Goal, measured: Sequence[Figures]) -> Wanted | None:
    """Return the best setting, to be watched for longer, if its figures are not certain yet."""
    best = best_of(goal, measured)
    if best is None or best.earlier is not None or best.seconds >= best.most_seconds(goal):
        return None
    if best.verdict(goal) and best.is_certain(goal):
        return None
    return Wanted(best.setting, "the best so far, and its figures are not certain yet")


def best_of(goal: Goal, measured: Iterable[Figures]) -> Figures | None:
    """Return the setting that meets the goal and lets the opportunistic jobs do the most; None: none meets it.

    A setting that may meet the goal only by chance is returned if there is no other, or if the sure ones give the others next
    to nothing: on an H200 slices of 50 us surely kept a production job bound by the CPU, and starved the other, which reached
    half of its rate with a cap that kept production as well.
    """
    meeting = [figures for figures in measured if figures.meets(goal)]
    safe = [figures for figures in meeting if figures.meets_safely(goal)]
    # A setting under which production waits less than under a safe one is as sure, though it was measured less.
    sure = [each for each in meeting if each in safe or any(_waits_less(each.setting, other.setting) for other in safe)]
    best_sure = _best_for_others(sure)
    best_likely = _best_for_others(meeting)
    if best_sure is None or best_likely is None:
        return best_sure or best_likely
    starved = (best_sure.share or 0.0) < _LEAST_OF_LIKELY * (best_likely.share or 0.0)
    return best_likely if starved else best_sure


def _waits_less(setting: Setting, other: Setting) -> bool:
    """Return whether two settings differ only in the slice for which production waits, which is shorter in the first."""
    same = setting.way is other.way is Way.SLICES and setting.production_slice_us == other.production_slice_us
    return same and setting.given_others < other.given_others


def _surely_gives_less(figures: Figures, most: Figures) -> bool:
    """Return whether the others get less than under another setting, by more than the scatter of both shares.

    An unknown share counts as less than a known one.
    """
    if most.share is None or figures.share is None:
        return most.share is not None
    scatter = math.hypot(figures.share_error or 0.0, most.share_error or 0.0)
    return most.share - scatter > FASTER * figures.share


def _best_for_others(meeting: Sequence[Figures]) -> Figures | None:
    """Return the setting, of those that meet the goal, under which the opportunistic jobs do the most.

    Time-slices are better than a cap with the same share, because production keeps its own address space. The best of each
    way is found first: a share of caps must not decide between two slices.
    """
    # Of slices the shortest of those that production notices least; of caps the largest, with low priority if equal.
    slices = _as_good_for_others(meeting, Way.SLICES)
    calmest = min((each.p99 for each in slices if each.p99 is not None), default=0.0)
    calm = [each for each in slices if (each.p99 or 0.0) - (each.p99_error or 0.0) <= _P99_ALIKE * calmest]
    shortest = min(
        calm, key=lambda each: (each.setting.production_slice_us or 0, each.setting.given_others), default=None
    )
    caps = _as_good_for_others(meeting, Way.CAPS)
    largest = max(caps, key=lambda each: (each.setting.threads, each.setting.low), default=None)
    if shortest is None or largest is None:
        return shortest or largest
    return largest if _surely_gives_less(shortest, largest) else shortest


def _as_good_for_others(meeting: Sequence[Figures], way: Way) -> list[Figures]:
    """Return the settings of a way under which the others get as much as under its best one, but for the scatter."""
    of_way = [each for each in meeting if each.setting.way is way]
    most = max(of_way, key=lambda each: -1.0 if each.share is None else each.share, default=None)
    return [] if most is None else [each for each in of_way if not _surely_gives_less(each, most)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search says: the best setting, or None and the nearest one, and all that were measured, in order.

    ``frontier`` are the settings to which no other one is better for both sides. ``stable``: nothing was left to try.
    """

    best: Figures | None
    nearest: Figures | None
    curve: tuple[Figures, ...]
    frontier: frozenset[Setting]
    stable: bool
    low_priority_helps: bool | None


def outcome(goal: Goal, measured: Sequence[Figures], *, stable: bool) -> Outcome:
    """Return what a search says in the end; figures of an earlier one are in the curve, but cannot be the answer."""
    fresh = [figures for figures in measured if figures.earlier is None]
    best = best_of(goal, fresh)
    nearest = None if best is not None or not fresh else max(fresh, key=lambda each: each.margin(goal))

    def place_of(each: Figures) -> tuple[object, ...]:
        """Return the sort key: by lines, as they are searched; on each from the most for the others down."""
        setting = each.setting
        return setting.way is Way.CAPS, setting.production_slice_us or 0, not setting.low, -setting.given_others

    return Outcome(
        best=best,
        nearest=nearest,
        curve=tuple(sorted(measured, key=place_of)),
        frontier=frozenset(
            each.setting for each in measured if not any(_beats(other, each, goal) for other in measured)
        ),
        stable=stable,
        low_priority_helps=_low_priority_helps(measured),
    )


def _beats(figures: Figures, other: Figures, goal: Goal) -> bool:
    """Return whether a setting is as good for both sides as another one, and better for one of them."""
    if figures.share is None or other.share is None:
        return False
    # For production by the p99 if that is a goal, else by the rate.
    for_production, for_production_other = (
        each.kept if goal.p99_factor is None or each.p99 is None else -each.p99 for each in (figures, other)
    )
    gains = (figures.share - other.share, for_production - for_production_other)
    return min(gains) >= 0 and max(gains) > 0


def _low_priority_helps(measured: Sequence[Figures]) -> bool | None:
    """Return whether low priority spares production by more than the scatter; None: no cap was measured with and without."""
    of_setting = {figures.setting: figures for figures in measured}
    for low in measured:
        normal = of_setting.get(replace(low.setting, low=False)) if low.setting.low else None
        if normal is not None:
            better = low.kept > normal.kept + max(0.01, 2 * math.hypot(low.error, normal.error))
            calmer = low.p99 is not None and normal.p99 is not None and low.p99 < 0.95 * normal.p99
            return better or calmer
    return None


def memory_warning(dram_others: float | None, dram_production: float | None) -> str | None:
    """Return the warning if the jobs compete for memory bandwidth (percent, by GPM), each alone."""
    for job, dram, effect in (
        ("opportunistic", dram_others, "a thread cap hardly protects another job that needs it"),
        ("production", dram_production, "all that the other job reads is taken from it"),
    ):
        if dram is not None and dram >= DRAM_FULL_PERCENT:
            draw = f"the {job} job alone draws {dram:.0f} % of the memory bandwidth: {effect}"
            return f"{draw}; pause the other while production works (run --opportunistic --yield pause), or use MIG"
    return None
