"""The search for the time-slices of a production job and another one, both outside MPS: which to try next. Pure.

What was measured on an H200 (driver 580.159.04, 2026-11-22) gives the order. A request waits for one slice of the other job
and a switch of some 0.25 ms before each of its own slices: so production's slice must be longer than its request, and the
other's be short. Below 100 us little is gained. Where production has gaps, the other hardly loses by a short slice; where
it has none, each gets about its slice's part of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.measure.search import CONFIRMED, FASTER, Goal, Judged, Setting, Trial, best_of, judge, sliced, unconfirmed

# Microseconds. For production, next to the default slice; longer ones would freeze the neighbours.
PRODUCTION_US: Final = (4000, 16000, 30000)
OTHER_US: Final = (50, 100, 200, 500, 1000, 2048)
_DEFAULT_US: Final = 2048
_START_US: Final = 100
# Production's slice is this much longer than its request, which takes longer on some days.
_LONGER: Final = 1.2
# With this part of the goal a shorter slice of the other may still meet it.
_WITHIN_REACH: Final = 0.85


@dataclass(frozen=True, kw_only=True)
class SliceSearch:
    """How to search. ``default_us`` is the slice of a job that has none of its own, as the driver says.

    ``request_us`` is how long a request of production takes alone, ``other_alone`` the other job's rate alone; None: unknown.
    """

    goal: Goal
    default_us: int = _DEFAULT_US
    request_us: float | None = None
    other_alone: float | None = None
    others: Sequence[int] = OTHER_US
    confirmed: int = CONFIRMED
    most: int = 12

    @property
    def production(self) -> list[int]:
        """Return production's slices in the order in which they are tried.

        First the shortest that is longer than a request; then a longer one, which more of its work fits into.
        """
        if self.request_us is None:
            return [16000, 4000]
        longer = [one for one in (self.default_us, *PRODUCTION_US) if one >= _LONGER * self.request_us]
        first = longer[0] if longer else PRODUCTION_US[-1]
        then = [one for one in PRODUCTION_US[1:] if one > first][:1]
        return [first, *then]


def next_slices(search: SliceSearch, trials: Sequence[Trial]) -> Setting | None:
    """Return the slices to try next, or None when there is an answer (or the most runs were made)."""
    return None if len(trials) >= search.most else wanted_slices(search, trials)


def wanted_slices(search: SliceSearch, trials: Sequence[Trial]) -> Setting | None:
    """Return the slices to try next, regardless of the number of runs; None when there is an answer."""
    judged = judge(search.goal, trials)
    longest = 0
    for production in search.production:
        best = best_of(judged)
        if best is None and production < longest:
            # A shorter slice spares production less.
            break
        longest = max(longest, production)
        if best is not None and not _is_more(_most(search, best, judged), best):
            break
        wanted = _next_to(search, production, judged)
        if wanted is not None:
            return sliced(production, wanted)
    return unconfirmed(judged, search.confirmed)


def _most(search: SliceSearch, best: Judged, judged: Sequence[Judged]) -> float | None:
    """Return the most that the other job could do: what a longer slice next to the same one gave, or its rate alone."""
    its, mine = best.setting.other_slice_us or 0, best.setting.production_slice_us
    same = [one for one in judged if one.setting.production_slice_us == mine]
    longer = [one.opportunistic for one in same if (one.setting.other_slice_us or 0) > its]
    known = [one for one in longer if one is not None]
    return max(known) if known else search.other_alone


def _next_to(search: SliceSearch, production: int, judged: Sequence[Judged]) -> int | None:
    """Return the other's next slice next to one of production's; None: the largest that is worth it is known."""
    known = {one.setting.other_slice_us or 0: one for one in judged if one.setting.production_slice_us == production}
    best = best_of(judged)
    if not known:
        return _START_US if best is None else _start(search, production, best)
    meeting = [one for one in known if known[one].meets]
    if not meeting:
        shortest = min(known)
        below = [one for one in search.others if one < shortest]
        near = known[shortest].margin >= _WITHIN_REACH
        # A shorter one gives the other less than this.
        gains = best is None or _is_more(known[shortest].opportunistic, best)
        return max(below) if below and near and gains else None
    longest = max(meeting)
    fails = min((one for one in known if one > longest), default=None)
    most = search.other_alone if fails is None else known[fails].opportunistic
    between = [one for one in search.others if one > longest and (fails is None or one < fails)]
    if not between or not _is_more(most, known[longest]):
        return None
    return between[(len(between) - 1) // 2]


def _start(search: SliceSearch, production: int, best: Judged) -> int:
    """Return the other's first slice next to one of production's: the best one, in proportion next to a shorter one."""
    before = best.setting.production_slice_us or production
    most = (best.setting.other_slice_us or 0) * min(1.0, production / before)
    return max((one for one in search.others if one <= most), default=min(search.others))


def _is_more(rate: float | None, than: Judged) -> bool:
    """Return whether a rate of the other job is clearly more than that under a setting, or may be."""
    return rate is None or than.opportunistic is None or rate > FASTER * than.opportunistic
