"""The search for the largest cap that does not harm a production job: the next setting to try, and the answer. Pure.

The order comes from measurements on an H200: a cap of 60 percent with low priority ends the harm for most pairs, the
knee is steep and depends on the pair, low priority alone hardly helps, and no property of a GPU predicts the knee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.base.units import format_slice
from gpushare.measure.statistics import deviation, mean, mean_known
from gpushare.run.results import CAPS, SLICES


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the opportunistic job runs: its thread cap in percent (100 is none) and priority.

    With ``other_slice_us`` and ``production_slice_us``, production runs outside MPS, and the opportunistic jobs share one
    time-slice (`sliced`).
    """

    threads: float
    low: bool = True
    production_slice_us: int | None = None
    other_slice_us: int | None = None

    @property
    def way(self) -> str:
        """Return `SLICES` or `CAPS`."""
        return CAPS if self.other_slice_us is None else SLICES

    @property
    def title(self) -> str:
        """Return the setting in words."""
        if self.other_slice_us is not None:
            own = format_slice(self.production_slice_us or 0)
            return f"slice {format_slice(self.other_slice_us)}, production slice {own}"
        words = ["no cap" if self.threads >= 100 else f"cap {self.threads:g} %"]
        words += ["low priority"] if self.low else []
        return ", ".join(words)


def sliced(production_us: int, other_us: int) -> Setting:
    """Return the setting with these time-slices: production's, and that of all opportunistic jobs together."""
    return Setting(threads=100.0, low=False, production_slice_us=production_us, other_slice_us=other_us)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What production must keep: a share of its rate alone, and its p99 within a factor (None: no goal)."""

    keep: float = 0.97
    p99_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a setting: shares and factors relative to production alone; ``opportunistic`` is the other's rate.

    ``error`` is the standard error of ``kept``, from the spread of its windows; ``p99_error`` is that of ``p99``, from the
    number of latencies (None: too few).
    """

    setting: Setting
    kept: float
    error: float = 0.0
    p99: float | None = None
    p99_error: float | None = None
    opportunistic: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """All runs of one setting. ``margin`` is 1 at the goal, larger if there is room, smaller if the setting fails.

    ``error`` is the standard error of ``kept``; ``safe_margin`` is the margin if ``kept`` and ``p99`` are worse than measured
    by their errors.
    """

    setting: Setting
    trials: int
    kept: float
    error: float
    p99: float | None
    opportunistic: float | None
    margin: float
    safe_margin: float

    @property
    def meets(self) -> bool:
        """Return whether the goal is met."""
        return self.margin >= 1

    @property
    def safe(self) -> bool:
        """Return whether the goal is met, and not just by chance."""
        return self.meets and self.safe_margin >= 1


def judge(goal: Goal, trials: Sequence[Trial]) -> list[Judged]:
    """Return the runs by setting, in the order in which the settings were first tried."""
    found = []
    for setting in dict.fromkeys(trial.setting for trial in trials):
        runs = [trial for trial in trials if trial.setting == setting]
        kept = mean([run.kept for run in runs])
        tails = [(run.p99, run.p99_error) for run in runs if run.p99 is not None]
        p99 = mean_known([run.p99 for run in runs])
        error = _scattered([run.kept for run in runs], _pooled([run.error for run in runs]))
        tail = safe_tail = math.inf
        if goal.p99_factor is not None and p99 is not None and p99 > 0:
            tail = goal.p99_factor / p99
            late = _late(tails)
            # A single run of unknown error is never safe.
            safe_tail = 0.0 if late is None else goal.p99_factor / (p99 + late)
        found.append(
            Judged(
                setting=setting,
                trials=len(runs),
                kept=kept,
                error=error,
                p99=p99,
                opportunistic=mean_known([run.opportunistic for run in runs]),
                margin=min(kept / goal.keep, tail),
                safe_margin=min((kept - error) / goal.keep, safe_tail),
            )
        )
    return found


def _pooled(errors: Sequence[float]) -> float:
    """Return the standard error of the mean of several."""
    return math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)


def _scattered(values: Sequence[float], error: float) -> float:
    """Return the standard error of the mean of runs, from their own errors or from their scatter if that is larger."""
    if len(values) < 2:
        return error
    return max(error, deviation(values) / math.sqrt(len(values)))


def _late(tails: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the standard error of the mean of p99s; None for a single one of unknown error."""
    known = [error for _, error in tails if error is not None]
    if len(known) < len(tails) < 2:
        return None
    return _scattered([one for one, _ in tails], _pooled(known) if len(known) == len(tails) else 0.0)


GRID: Final = tuple(float(threads) for threads in range(100, 5, -5))
# Tried between two caps of the grid, if the larger one gives the other job much more. An MPS client of an H200 gets its
# 132 SMs in pairs, 1.5 percent each: finer steps make no difference.
FINE: Final = tuple(1.25 * step for step in range(80, 7, -1))
# Runs of one setting that are enough, and the most.
CONFIRMED: Final = 2
MOST_TRIALS: Final = 3
_STEP: Final = 10.0
# This close to the goal, one run may be wrong.
_NARROW: Final = 0.015
# A gain below this is within the scatter.
FASTER: Final = 1.03
# Slices whose p99 differs by less than this are equally good for production.
_CALM: Final = 1.04
# A sure setting that gives less than this part of what a likely one gives is not worth the certainty.
_WORTH: Final = 0.2
# From here on the jobs compete for memory bandwidth, all of which half of the SMs can draw (H200).
DRAM_FULL_PERCENT: Final = 85.0


START: Final = Setting(threads=60.0)


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search. ``fine`` are caps that may be tried between those of ``grid``."""

    goal: Goal
    grid: Sequence[float] = GRID
    fine: Sequence[float] = ()
    start: Setting = START
    confirmed: int = CONFIRMED
    most: int = 24


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search found: the best setting that meets the goal, or None and the nearest one; the curve by cap."""

    best: Judged | None
    nearest: Judged | None
    curve: tuple[Judged, ...]
    stable: bool
    low_priority_helps: bool | None


def next_setting(search: Search, trials: Sequence[Trial]) -> Setting | None:
    """Return the setting to run next, or None when there is an answer (or the most runs were made)."""
    return None if len(trials) >= search.most else _wanted(search, trials)


def _wanted(search: Search, trials: Sequence[Trial]) -> Setting | None:
    """Return the next setting to run, regardless of the number of runs; None when there is an answer."""
    if not trials:
        return search.start
    judged = judge(search.goal, trials)
    wanted = _on_the_grid(search, judged) or _other_priority(search, judged)
    return wanted or unconfirmed(judged, search.confirmed)


def unconfirmed(judged: Sequence[Judged], confirmed: int) -> Setting | None:
    """Return the setting that is run again before it is the answer; None: it has enough runs."""
    # A better setting that has met the goal only by chance so far may turn out to be safe.
    for one in (_most_of([one for one in judged if one.meets]), best_of(judged)):
        if one is not None and one.trials < (min(confirmed, MOST_TRIALS) if one.safe else MOST_TRIALS):
            return one.setting
    return None


def outcome(search: Search, trials: Sequence[Trial]) -> Outcome:
    """Return what the runs so far say."""
    return summed_up(judge(search.goal, trials), stable=_wanted(search, trials) is None)


def summed_up(judged: Sequence[Judged], *, stable: bool) -> Outcome:
    """Return what settings that were tried say; ``stable``: there was nothing left to try."""
    best = best_of(judged)
    nearest = None if best is not None or not judged else max(judged, key=lambda one: one.margin)
    order = sorted(
        judged,
        key=lambda one: (
            one.setting.way,
            one.setting.production_slice_us or 0,
            -(one.setting.other_slice_us or 0),
            -one.setting.threads,
            not one.setting.low,
        ),
    )
    return Outcome(
        best=best,
        nearest=nearest,
        curve=tuple(order),
        stable=stable,
        low_priority_helps=_low_helps(judged),
    )


def best_of(judged: Sequence[Judged]) -> Judged | None:
    """Return the setting that meets the goal and lets the opportunistic job do the most; None when none meets it.

    The job's rate decides if the difference is clear, else the cap; among equals the one with low priority, which spares
    production more. Time-slices are better than a cap with the same rate, because production keeps its own address space;
    among slices, those that production notices least. A setting with a known rate is better than one in which the job
    printed nothing. A setting that may meet the goal only by chance is returned if there is no other, or if the sure ones give
    the job next to nothing: on an H200 slices of 50 us surely kept a production job bound by the CPU, and starved the other,
    which reached half of its rate with a cap that kept production as well, within the scatter.
    """
    sure, likely = _most_of([one for one in judged if one.safe]), _most_of([one for one in judged if one.meets])
    if sure is None or likely is None:
        return sure or likely
    worth = (sure.opportunistic or 0.0) >= _WORTH * (likely.opportunistic or 0.0)
    return sure if worth else likely


def _most_of(meeting: Sequence[Judged]) -> Judged | None:
    """Return the one that lets the opportunistic job do the most, as in `best_of`."""
    most = max((one.opportunistic for one in meeting if one.opportunistic is not None), default=None)
    if most is not None:
        meeting = [one for one in meeting if one.opportunistic is not None and most <= FASTER * one.opportunistic]
    calmest = min((one.p99 for one in meeting if one.setting.way == SLICES and one.p99 is not None), default=0.0)
    meeting = [one for one in meeting if one.setting.way == CAPS or (one.p99 or 0.0) <= _CALM * calmest]
    return max(
        meeting,
        key=lambda one: (
            one.setting.way == SLICES,
            one.setting.threads,
            one.setting.low,
            -(one.setting.production_slice_us or 0),
            one.margin,
        ),
        default=None,
    )


def memory_warning(dram_alone: float | None, dram_production: float | None) -> str | None:
    """Return the warning if both jobs compete for memory bandwidth (percent, by GPM).

    ``dram_alone`` is the opportunistic job's alone, ``dram_production`` the production job's.
    """
    if dram_alone is not None and dram_alone >= DRAM_FULL_PERCENT:
        what = f"the opportunistic job alone draws {dram_alone:.0f} % of the memory bandwidth"
        why = "no thread cap protects another job that needs it"
    elif dram_production is not None and dram_production >= DRAM_FULL_PERCENT:
        what = f"the production job alone draws {dram_production:.0f} % of the memory bandwidth"
        why = "all that the other job reads is taken from it"
    else:
        return None
    return f"{what}: {why}; pause the other while production works (run --opportunistic --yield pause), or use MIG"


def _on_the_grid(search: Search, judged: Sequence[Judged]) -> Setting | None:
    """Return the next cap with the start's priority; None: the knee is found."""
    line = _grid(search, judged, low=search.start.low)
    return (
        _on_a_line(search, line, judged, confirm=True)
        or _between(search, line, judged)
        or _better_if_safe(search, judged)
    )


def _better_if_safe(search: Search, judged: Sequence[Judged]) -> Setting | None:
    """Return the cap of a line that would be its best, but has met the goal only by chance so far.

    Later trials depend on the best cap, and would be repeated for another one.
    """
    line = _line_of_caps(search, judged)
    best, most = best_of(line), _most_of([one for one in line if one.meets])
    return most.setting if most is not None and most is not best and most.trials < MOST_TRIALS else None


def _between(search: Search, line: Mapping[float, Setting], judged: Sequence[Judged]) -> Setting | None:
    """Return a cap between the best of a line and the next known one, if that gives the other job much more."""
    best = _best_on_the_grid(search, judged)
    if best is None:
        return None
    known = {one.setting.threads: one.opportunistic for one in judged if one.setting == line.get(one.setting.threads)}
    above = min((threads for threads in known if threads > best.setting.threads), default=math.inf)
    gives = known.get(above)
    # Each half of the step must be a clear gain.
    if gives is None or gives <= FASTER**2 * (best.opportunistic or 0.0):
        return None
    open_ = sorted(threads for threads in search.fine if best.setting.threads < threads < above)
    return replace(best.setting, threads=open_[(len(open_) - 1) // 2]) if open_ else None


def _other_priority(search: Search, judged: Sequence[Judged]) -> Setting | None:
    """Return the next cap with the other priority: the best so far, and lower ones while they may give more.

    At the same cap, normal priority takes more and costs more, so a lower cap with normal priority may be better (for
    jobs that compete for memory bandwidth).
    """
    best = _best_on_the_grid(search, judged)
    if best is None:
        return None
    line = _grid(search, judged, low=not search.start.low)
    known = {one.setting.threads: one for one in judged if one.setting == line.get(one.setting.threads)}
    compared = best.setting.threads in known
    wanted = _on_a_line(search, line, judged, confirm=False) if compared else line[best.setting.threads]
    if wanted is None:
        return None
    above = min((one for one in known if one >= wanted.threads), default=None)
    if above is None:
        return None if compared else wanted
    # A lower cap gives less than those above it.
    rate, beaten = known[above].opportunistic, best_of(judged)
    gains = rate is not None and beaten is not None and rate > FASTER * (beaten.opportunistic or 0.0)
    return wanted if gains else None


def _grid(search: Search, judged: Sequence[Judged], *, low: bool) -> dict[float, Setting]:
    """Return the settings by cap: those of the grid, and those tried in between."""
    tried = {one.setting.threads for one in judged}
    return {one: Setting(threads=one, low=low) for one in sorted({*search.grid, search.start.threads, *tried})}


def _best_on_the_grid(search: Search, judged: Sequence[Judged]) -> Judged | None:
    return best_of(_line_of_caps(search, judged))


def _line_of_caps(search: Search, judged: Sequence[Judged]) -> list[Judged]:
    line = _grid(search, judged, low=search.start.low)
    return [one for one in judged if one.setting == line.get(one.setting.threads)]


def _on_a_line(
    search: Search, line: Mapping[float, Setting], judged: Sequence[Judged], *, confirm: bool
) -> Setting | None:
    """Return the next setting of a line, which is ordered from the smallest share to the largest; one is known."""
    by_setting = {one.setting: one for one in judged}
    known = {share: by_setting[setting] for share, setting in line.items() if setting in by_setting}
    meeting = [threads for threads in known if known[threads].meets]
    if meeting:
        low = max(meeting)
        if open_ := _above(low, line, known):
            return line[open_[(len(open_) - 1) // 2]]
        if confirm and known[low].trials < min(search.confirmed, MOST_TRIALS):
            return line[low]
        # The one above failed so narrowly that it is tried again.
        above = known.get(min((threads for threads in known if threads > low), default=math.inf))
        if above is not None and _narrow(above, search):
            return above.setting
        # It meets the goal only by chance, and a smaller one is safe: the largest safe one is between them.
        safe = max((threads for threads in known if known[threads].safe), default=low)
        open_ = _above(safe, line, known) if safe < low else []
        return line[open_[(len(open_) - 1) // 2]] if open_ else None
    open_ = [threads for threads in line if threads < min(known)]
    if not open_:
        best = max(known.values(), key=lambda one: one.margin)
        return best.setting if _narrow(best, search) else None
    if len(known) == 1:
        # The first step down is small; after that, the rest is halved.
        return line[max((threads for threads in open_ if threads <= min(known) - _STEP), default=open_[0])]
    return line[open_[(len(open_) - 1) // 2]]


def _above(low: float, line: Mapping[float, Setting], known: Mapping[float, Judged]) -> list[float]:
    """Return the caps above a known one, up to the next known one."""
    high = min((threads for threads in known if threads > low), default=math.inf)
    return [threads for threads in line if low < threads < high]


def _narrow(one: Judged, search: Search) -> bool:
    return not one.meets and one.margin >= 1 - _NARROW and one.trials < min(search.confirmed, MOST_TRIALS)


def _low_helps(judged: Sequence[Judged]) -> bool | None:
    """Return whether low priority spares production by more than the scatter; None: not compared."""
    found = {(one.setting.threads, one.setting.low): one for one in judged}
    for (threads, low), one in found.items():
        other = found.get((threads, False))
        if low and other is not None:
            better = one.kept > other.kept + max(0.01, 2 * math.hypot(one.error, other.error))
            calmer = one.p99 is not None and other.p99 is not None and one.p99 < 0.95 * other.p99
            return better or calmer
    return None
