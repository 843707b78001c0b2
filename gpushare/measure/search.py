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
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What production must keep: a share of its rate alone, and its p99 within a factor (None: no goal)."""

    keep: float = 0.97
    p99_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the opportunistic jobs run: the thread cap of each in percent (100 is none) and priority.

    With ``other_slice_us`` and ``production_slice_us``, production runs outside MPS, and the opportunistic jobs share one
    time-slice (`sliced`).
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
        """Return the setting in words."""
        if self.other_slice_us is not None:
            production = format_slice(self.production_slice_us)
            return f"slice {format_slice(self.other_slice_us)}, production slice {production}"
        cap = "no cap" if self.threads >= 100 else f"cap {self.threads:g} %"
        return f"{cap}, low priority" if self.low else cap


def sliced(production_us: int, other_us: int) -> Setting:
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
        rate = self._rate(2.0) if self.waits else self.kept
        return min(rate / goal.keep, self._tail(goal, self.p99))

    def meets(self, goal: Goal) -> bool:
        """Return whether the goal is met, perhaps by chance."""
        return self.margin(goal) >= 1

    def safe(self, goal: Goal) -> bool:
        """Return whether the goal is met by more than the standard errors."""
        error = _UNKNOWN_P99_ERROR * (self.p99 or 0.0) if self.p99_error is None else self.p99_error
        late = None if self.p99 is None else self.p99 + error
        rate = self.waits or self._precise_rate(goal) or self._rate(-1.0) >= goal.keep
        return self.meets(goal) and rate and self._tail(goal, late) >= 1

    def holds(self, goal: Goal) -> bool:
        """Return whether the goal is met, as far as that was measured: after the longest time it must be by more than chance."""
        return self.meets(goal) and (self.seconds < self.most_seconds(goal) or self.safe(goal))

    def verdict(self, goal: Goal) -> bool | None:
        """Return whether the goal is met; None: more windows might still change the answer."""
        if self._rate(2.0) < goal.keep or self._tail(goal, self.p99_low or 0.0) < 1:
            return False
        precise = self._precise_rate(goal)
        if precise and self.kept < goal.keep and not self.waits:
            return False
        rate = self.waits or precise or self._rate(-2.0) >= goal.keep
        return True if rate and self._tail(goal, self.p99_high) >= 1 else None

    def ample(self, goal: Goal) -> bool:
        """Return whether production loses at most half of what it may lose."""
        rate = self.waits or self.kept >= (1 + goal.keep) / 2
        return rate and (goal.p99_factor is None or self.p99 is None or self.p99 <= (1 + goal.p99_factor) / 2)

    def clear(self, goal: Goal) -> bool:
        """Return whether the goal is met so clearly that the search can go on; the answer needs a `verdict`."""
        rate = self.waits or self._rate(-2.0) >= goal.keep
        return self.margin(goal) >= 1 and rate and self._tail(goal, self.p99) >= _CLEAR_P99_MARGIN

    def precise(self, goal: Goal) -> bool:
        """Return whether the figures are as certain as an answer should be."""
        # What the search needs to go on, `_precise_rate`, is more than what an answer needs.
        rate_is_sure = self.waits or self.error <= _ANSWER_RATE_ERROR
        error = self.p99_error
        p99_is_sure = goal.p99_factor is None or (error is not None and error <= _P99_ERROR * (self.p99 or 1.0))
        return rate_is_sure and p99_is_sure and self.seconds >= _ANSWER_SECONDS

    def most_seconds(self, goal: Goal) -> float:
        """Return how long it is worth watching: a p99 that scatters by the host's own stalls does not become certain."""
        error = self.p99_error
        if goal.p99_factor is None or error is None or self.p99 is None or self.seconds < _ANSWER_SECONDS:
            return MOST_SECONDS
        hopeless = error * math.sqrt(self.seconds / MOST_SECONDS) > _HOPELESS_ERROR * _P99_ERROR * self.p99
        return _SCATTERED_SECONDS if hopeless else MOST_SECONDS

    def _precise_rate(self, goal: Goal) -> bool:
        """Return whether the error of the rate is small beside what production may lose."""
        return self.error <= max(0.001, min(_RATE_ERROR, (1 - goal.keep) / 6))

    def _rate(self, errors: float) -> float:
        """Return the part of its rate that production kept, moved by so many standard errors."""
        return self.kept + errors * self.error

    @staticmethod
    def _tail(goal: Goal, p99: float | None) -> float:
        """Return the margin of this p99: at least 1 meets the goal; infinite if there is no such goal."""
        if goal.p99_factor is None:
            return math.inf
        if p99 is None:
            return 0.0
        return goal.p99_factor / p99 if p99 > 0 else math.inf


class Wanted(NamedTuple):
    """The setting to measure next; ``again``: why, if it was measured before."""

    setting: Setting
    again: str | None = None


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
        """Return production's slices in the order in which they are tried.

        First the shortest that is longer than a request; then a longer one, into which more of its work fits.
        """
        if self.request_us is None:
            return [16000, 30000]
        longer = [
            each for each in (self.default_us, *PRODUCTION_US) if each >= _LEAST_SLICE_PER_REQUEST * self.request_us
        ]
        first = longer[0] if longer else PRODUCTION_US[-1]
        return [first, *[each for each in PRODUCTION_US[1:] if each > first][:1]]

    def least_share(self, way: Way) -> float:
        """Return the share of the others below which no setting of a way is worth measuring."""
        return _STARVED_SHARE if way is Way.SLICES and Way.CAPS in self.ways else 0.0

    def lines(self, way: Way) -> list[list[Setting]]:
        """Return the lines of a way in the order in which they are searched, each from the least for the others up."""
        if way is Way.SLICES:
            return [[sliced(own, other) for other in OTHER_US] for own in self.production_us]
        caps = sorted(self.caps)
        return [[Setting(threads=threads, low=low) for threads in caps] for low in (True, False)]


def next_setting(search: Search, way: Way, known: Mapping[Setting, Figures], *, late: bool = False) -> Wanted | None:
    """Return the next setting of a way to measure; None: there is an answer.

    ``late``: little time is left, and what it is best used for is to make the best setting so far certain.
    """
    lines = search.lines(way)
    if late and (wanted := _unsure_best(search.goal, [each for each in known.values() if each.setting.way == way])):
        return wanted
    for number, line in enumerate(lines):
        setting = _next_on(search, line, lines[:number], known)
        if setting is not None:
            return Wanted(setting)
    least = search.least_share(way)
    return _unsure(
        search.goal,
        [each for each in known.values() if each.setting.way == way and (each.share is None or each.share >= least)],
    )


def left_out(way: Way, known: Mapping[Setting, Figures], goal: Goal) -> str | None:
    """Return why no setting of a way can be better than the best one; None: one may be."""
    best = best_of(goal, known.values())
    if best is None or best.setting.way == way or not best.safe(goal) or best.share is None:
        return None
    # Even a share of 1 would be more only by the scatter.
    if best.share * FASTER >= 1:
        return f"{best.setting.way.value} leave the other {best.share:.2f} of its rate alone"
    return None


def _next_on(
    search: Search, line: Sequence[Setting], before: Sequence[Sequence[Setting]], known: Mapping[Setting, Figures]
) -> Setting | None:
    """Return the next setting to try on a line, by bisection between the last that meets the goal and the first that fails.

    A line is ordered: each setting gives the other jobs more, and production less, than the one before. ``before`` are the
    lines of the same way that were searched before. None: the last setting that meets the goal is known, or the line
    cannot hold a better one than `best_of` what is known.
    """
    goal = search.goal
    best = best_of(goal, known.values())
    on_line = {place: known[setting] for place, setting in enumerate(line) if setting in known}
    if not on_line:
        return _first_on(search, line, before, known, best)
    meeting = max((place for place, figures in on_line.items() if figures.holds(goal)), default=-1)
    failing = min((place for place in on_line if place > meeting), default=len(line))
    if line[0].way is Way.CAPS and before:
        # Normal priority spares production less: what clearly fails with low priority fails.
        with_low = [known.get(replace(setting, low=True)) for setting in line]
        for place, figures in enumerate(with_low[:failing]):
            if place > meeting and figures is not None and figures.margin(goal) < _CLEAR_FAILURE:
                failing = place
                break
    between = range(meeting + 1, failing)
    # What fails gives the others more than all below it.
    most = on_line[failing].share if failing in on_line else _most_before(before, known)
    if not between or not _is_more(most, best, search.least_share(line[0].way)):
        return None
    if line[0].way is Way.SLICES and (
        _is_no_better(line, before, known, goal) or _is_out_of_reach(meeting, on_line, goal)
    ):
        return None
    if failing not in on_line:
        # Where production hardly notices the others, the last setting is likely to meet the goal, too.
        ample = meeting >= 0 and on_line[meeting].ample(goal)
        return line[between[-1] if ample else between[len(between) // 2]]
    return line[_crossing(meeting, failing, on_line, goal, halve=meeting >= 0 and len(on_line) % 2 == 0)]


def _is_out_of_reach(meeting: int, on_line: Mapping[int, Figures], goal: Goal) -> bool:
    """Return whether production fails so clearly next to the shortest slice that no other can meet the goal."""
    return meeting < 0 and on_line[min(on_line)].margin(goal) < _WITHIN_REACH


def _is_no_better(
    line: Sequence[Setting], before: Sequence[Sequence[Setting]], known: Mapping[Setting, Figures], goal: Goal
) -> bool:
    """Return whether a longer slice of production spares it no more than the one before."""
    if not before:
        return False
    pairs = [(known.get(setting), known.get(other)) for setting, other in zip(line, before[-1], strict=True)]
    both = [(longer, shorter) for longer, shorter in pairs if longer is not None and shorter is not None]
    return bool(both) and all(
        longer.margin(goal) < shorter.margin(goal) + max(0.01, 2 * longer.error) for longer, shorter in both
    )


def _most_before(before: Sequence[Sequence[Setting]], known: Mapping[Setting, Figures]) -> float | None:
    """Return the most that the others got on the slices before: next to a longer slice of production they get no more."""
    if not before or before[-1][0].way is Way.CAPS:
        return 1.0
    shares = [known[setting].share or 0.0 for line in before for setting in line if setting in known]
    return max(shares, default=1.0)


def _crossing(low: int, high: int, on_line: Mapping[int, Figures], goal: Goal, *, halve: bool) -> int:
    """Return the place between two at which the margin should fall below 1, or every other time the middle.

    A straight line between both ends alone creeps up on a sharp knee. Below the first place the others get nothing, and
    production loses nothing.
    """
    if halve:
        return (low + high) // 2
    nothing = min(1 / goal.keep, goal.p99_factor or math.inf)
    margin_low = on_line[low].margin(goal) if low >= 0 else nothing
    margin_high = on_line[high].margin(goal)
    if not math.isfinite(margin_low) or margin_low <= margin_high:
        return (low + high) // 2
    place = low + (margin_low - 1) / (margin_low - margin_high) * (high - low)
    return min(high - 1, max(low + 1, round(place)))


def _first_on(
    search: Search,
    line: Sequence[Setting],
    before: Sequence[Sequence[Setting]],
    known: Mapping[Setting, Figures],
    best: Figures | None,
) -> Setting | None:
    """Return the first setting of a line; None: no setting of it can be the best one."""
    if not _is_more(_most_before(before, known), best, search.least_share(line[0].way)):
        return None
    slices = line[0].way is Way.SLICES
    if not before:
        first = _FIRST_US if slices else _FIRST_CAP
        return min(line, key=lambda setting: abs((setting.other_slice_us if slices else setting.threads) - first))  # type: ignore[operator]
    earlier = [known[setting] for setting in before[-1] if setting in known]
    meeting = [figures.setting for figures in earlier if figures.holds(search.goal)]
    if slices:
        other_us = max((setting.other_slice_us or 0 for setting in meeting), default=_FIRST_US)
        return min(line, key=lambda setting: abs((setting.other_slice_us or 0) - other_us))
    if not meeting:
        # Normal priority spares production less.
        return None
    cap = max(setting.threads for setting in meeting)
    return min(line, key=lambda setting: abs(setting.threads - cap))


def _is_more(share: float | None, best: Figures | None, least: float = 0.0) -> bool:
    """Return whether this share of the others is at least ``least``, and clearly more than that of the best setting.

    True where it is unknown, or there is no best setting to compare with.
    """
    if share is None:
        return True
    return share >= least and (best is None or best.share is None or share > FASTER * best.share)


def _unsure(goal: Goal, measured: Sequence[Figures]) -> Wanted | None:
    """Return a setting to be watched for longer before the answer stands, and why; None: none."""
    best = best_of(goal, measured)
    if best is not None and best.earlier is not None:
        return Wanted(best.setting, f"measured on {best.earlier}: does it still hold?")
    for figures in sorted(measured, key=lambda each: -(each.share or 0.0)):
        is_open = (
            figures.verdict(goal) is None and figures.earlier is None and figures.seconds < figures.most_seconds(goal)
        )
        if is_open and figures != best and _is_more(figures.share, best) and figures.margin(goal) > 0.9:
            how = "met" if figures.meets(goal) else "missed"
            return Wanted(figures.setting, f"it {how} the goal by less than the scatter")
    return _unsure_best(goal, measured)


def _unsure_best(goal: Goal, measured: Sequence[Figures]) -> Wanted | None:
    """Return the best setting, to be watched for longer, if its figures are not certain yet."""
    best = best_of(goal, measured)
    if best is None or best.earlier is not None or best.seconds >= best.most_seconds(goal):
        return None
    if best.verdict(goal) and best.precise(goal):
        return None
    return Wanted(best.setting, "the best so far: its figures become more certain")


def best_of(goal: Goal, measured: Iterable[Figures]) -> Figures | None:
    """Return the setting that meets the goal and lets the opportunistic jobs do the most; None when none meets it.

    Their share decides if the difference is clear, else the cap; among equals the one with low priority, which spares
    production more. Time-slices are better than a cap with the same share, because production keeps its own address space;
    among slices, those that production notices least, and the shorter where the scatter decides. A setting that may meet the
    goal only by chance is returned if there is no other, or if the sure ones give the others next to nothing: on an H200
    slices of 50 us surely kept a production job bound by the CPU, and starved the other, which reached half of its rate with
    a cap that kept production as well.
    """
    figures = list(measured)
    safe = [each for each in figures if each.safe(goal)]
    likely_safe = [
        each
        for each in figures
        if each.meets(goal) and any(_spares_more(each.setting, other.setting) for other in safe)
    ]
    sure = _most_of([*safe, *(each for each in likely_safe if each not in safe)], goal)
    likely = _most_of([each for each in figures if each.meets(goal)], goal)
    if sure is None or likely is None:
        return sure or likely
    return sure if (sure.share or 0.0) >= _LEAST_OF_LIKELY * (likely.share or 0.0) else likely


def _spares_more(setting: Setting, other: Setting) -> bool:
    """Return whether production waits for a shorter slice under a setting, and all else is the same."""
    if setting.other_slice_us is None or other.other_slice_us is None:
        return False
    return setting.production_slice_us == other.production_slice_us and setting.other_slice_us < other.other_slice_us


def _is_surely_less(figures: Figures, most: Figures) -> bool:
    """Return whether the others get less than under another setting, by more than the scatter of both shares."""
    if figures.share is None or most.share is None:
        return figures.share is None and most.share is not None
    scatter = math.hypot(figures.share_error or 0.0, most.share_error or 0.0)
    return most.share - scatter > FASTER * figures.share


def _most_of(meeting: Sequence[Figures], goal: Goal) -> Figures | None:
    """Return the one that lets the opportunistic jobs do the most, as in `best_of`.

    Each way has a best one first: a share of caps must not decide between two slices.
    """
    sliced_best, capped_best = (
        _most_of_way([each for each in meeting if each.setting.way is way], goal) for way in (Way.SLICES, Way.CAPS)
    )
    if sliced_best is None or capped_best is None:
        return sliced_best or capped_best
    return capped_best if _is_surely_less(sliced_best, capped_best) else sliced_best


def _most_of_way(meeting: Sequence[Figures], goal: Goal) -> Figures | None:
    """Return the one of a way that lets the opportunistic jobs do the most, as in `best_of`."""
    most = max(meeting, key=lambda each: -1.0 if each.share is None else each.share, default=None)
    if most is None:
        return None
    meeting = [each for each in meeting if not _is_surely_less(each, most)]
    calmest = min(
        (each.p99 for each in meeting if each.setting.way is Way.SLICES and each.p99 is not None), default=0.0
    )
    meeting = [
        each
        for each in meeting
        if each.setting.way is Way.CAPS or (each.p99 or 0.0) - (each.p99_error or 0.0) <= _P99_ALIKE * calmest
    ]
    return max(
        meeting,
        key=lambda each: (
            each.setting.threads,
            each.setting.low,
            -(each.setting.production_slice_us or 0),
            -(each.setting.other_slice_us or 0),
            each.margin(goal),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search says: the best setting, or None and the nearest one, and all that were measured, in order.

    ``frontier`` are the settings to which no other one is better for both sides. ``stable``: nothing was left to try.
    """

    best: Figures | None = None
    nearest: Figures | None = None
    curve: tuple[Figures, ...] = ()
    frontier: frozenset[Setting] = field(default=frozenset())
    stable: bool = False
    low_priority_helps: bool | None = None


def outcome(goal: Goal, measured: Sequence[Figures], *, stable: bool) -> Outcome:
    """Return what the figures say; those of an earlier search are shown, and are no answer."""
    fresh = [figures for figures in measured if figures.earlier is None]
    best = best_of(goal, fresh)
    nearest = None if best is not None or not fresh else max(fresh, key=lambda each: each.margin(goal))
    order = sorted(
        measured,
        key=lambda each: (
            each.setting.way is not Way.SLICES,
            each.setting.production_slice_us or 0,
            not each.setting.low,
            -(each.setting.other_slice_us or each.setting.threads),
        ),
    )
    return Outcome(
        best=best,
        nearest=nearest,
        curve=tuple(order),
        frontier=frozenset(
            each.setting for each in measured if not any(_beats(other, each, goal) for other in measured)
        ),
        stable=stable,
        low_priority_helps=_low_helps(measured),
    )


def _beats(figures: Figures, other: Figures, goal: Goal) -> bool:
    """Return whether a setting is as good for both sides as another one, and better for one of them."""
    if figures.share is None or other.share is None:
        return False

    def for_production(each: Figures) -> float:
        """Return how good a setting is for production: by its p99 if that is a goal, else by its rate."""
        return each.kept if goal.p99_factor is None or each.p99 is None else -each.p99

    own = (figures.share, for_production(figures))
    others = (other.share, for_production(other))
    return own != others and own[0] >= others[0] and own[1] >= others[1]


def _low_helps(measured: Sequence[Figures]) -> bool | None:
    """Return whether low priority spares production by more than the scatter; None: not compared."""
    caps = {(each.setting.threads, each.setting.low): each for each in measured if each.setting.way is Way.CAPS}
    for (threads, low), figures in caps.items():
        other = caps.get((threads, False))
        if low and other is not None:
            better = figures.kept > other.kept + max(0.01, 2 * math.hypot(figures.error, other.error))
            calmer = figures.p99 is not None and other.p99 is not None and figures.p99 < 0.95 * other.p99
            return better or calmer
    return None


def memory_warning(dram_others: float | None, dram_production: float | None) -> str | None:
    """Return the warning if the jobs compete for memory bandwidth (percent, by GPM), each alone."""
    if dram_others is not None and dram_others >= DRAM_FULL_PERCENT:
        draw = f"the opportunistic job alone draws {dram_others:.0f} % of the memory bandwidth"
        effect = "a thread cap hardly protects another job that needs it"
    elif dram_production is not None and dram_production >= DRAM_FULL_PERCENT:
        draw = f"the production job alone draws {dram_production:.0f} % of the memory bandwidth"
        effect = "all that the other job reads is taken from it"
    else:
        return None
    return f"{draw}: {effect}; pause the other while production works (run --opportunistic --yield pause), or use MIG"
