"""How much a job and those that run on a GPU would slow each other down, by what is known of their commands. Pure.

Where a pair was measured (`tune`, `bench` of two copies), that counts. Else the busy shares of the jobs alone are added up, of
the SMs and of the memory bandwidth: what is above 100 % is work that has to wait. Unknown is None, never 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.base.values import dataclass

if TYPE_CHECKING:
    from gpushare.memory.peaks import Profile

_FULL: Final = 100.0
# A smaller difference is noise: then the GPU with more room is better.
_STEP_PERCENT: Final = 10
# More candidates than any host of one kernel has: then the first ones, without a look at how they are connected.
_MOST_SETS: Final = 20_000


class Command(NamedTuple):
    """A command by its digest, and what is known of it."""

    digest: str
    profile: Profile


@dataclass(frozen=True, kw_only=True)
class Residents:
    """The jobs on one device: those whose commands are known, and whether others work there."""

    known: tuple[Command, ...] = ()
    # Programs of which only the utilization of the GPU tells how much they work.
    others: int = 0
    # Jobs that have a place there and have not begun: nothing tells how much they will work.
    coming: int = 0
    # The time in which a kernel ran, in percent (NVML); None: unknown, as on a MIG instance.
    busy_percent: float | None = None

    @property
    def empty(self) -> bool:
        return not (self.known or self.others or self.coming)

    @property
    def measured(self) -> bool:
        """Return whether it is known of all of them how much they use."""
        return not self.others and not self.coming and all(one.profile.use_percent is not None for one in self.known)

    @property
    def use_percent(self) -> float | None:
        """Return how much of the GPU they use together; None: unknown."""
        if self.coming:
            return None
        sum_known = sum(one.profile.use_percent or 0.0 for one in self.known)
        if self.measured:
            return sum_known
        return None if self.busy_percent is None else max(sum_known, self.busy_percent)


@dataclass(frozen=True, kw_only=True)
class Harm:
    """``percent`` of a GPU that both sides lose together; None: it is not known. ``pair``: this was measured."""

    percent: float | None
    pair: bool = False


def loss_if_joined(job: Command | None, there: Residents) -> Harm:
    """Return how much a job and those that run on a device would lose if it came."""
    if there.empty:
        return Harm(percent=0.0)
    mine = None if job is None else job.profile.use_percent
    measured = _measured(job, there)
    if measured is not None:
        return Harm(percent=measured, pair=True)
    others = there.use_percent
    if job is None or mine is None or others is None:
        return Harm(percent=None)
    lost = _too_much(mine, others)
    bandwidths = [one.profile.dram_percent for one in there.known]
    known = [one for one in bandwidths if one is not None]
    if job.profile.dram_percent is not None and known:
        # Of those that are not known it may be more.
        lost = max(lost, _too_much(job.profile.dram_percent, sum(known)))
    return Harm(percent=lost)


def order(job: Command | None, there: Residents) -> int:
    """Return a number by which devices are ordered, the best first: the harm in steps.

    Where the harm is not known, the job is taken to fill the GPU; and so are those there, if nothing is known of them.
    """
    found = loss_if_joined(job, there).percent
    if found is None:
        mine = None if job is None else job.profile.use_percent
        others = there.use_percent
        found = _too_much(_FULL if mine is None else mine, _FULL if others is None else others)
    return int(found // _STEP_PERCENT)


def _too_much(mine: float, others: float) -> float:
    """Return what a job adds to the work above 100 %."""
    return max(0.0, mine + others - _FULL) - max(0.0, others - _FULL)


def _measured(job: Command | None, there: Residents) -> float | None:
    """Return the loss next to the only job there, if the two were measured together."""
    if job is None or len(there.known) != 1 or there.others or there.coming:
        return None
    (other,) = there.known
    kept = (job.profile.kept.get(other.digest), other.profile.kept.get(job.digest))
    if None in kept:
        return None
    return sum(
        (1 - (share or 0.0)) * (_FULL if one.profile.use_percent is None else one.profile.use_percent)
        for one, share in zip((job, other), kept, strict=True)
    )


def in_words(job: Command | None, there: Residents) -> str:
    """Return the harm in a few words, and whether it is known by profile."""
    if there.empty:
        return "nothing runs there"
    found = loss_if_joined(job, there)
    if found.pair:
        return f"by profile: the two were measured together, and lose {found.percent:.0f} % of a GPU"
    if found.percent is not None and job is not None:
        text = f"by profile: it uses {job.profile.use_percent:.0f} %, what runs there "
        text += f"{there.use_percent:.0f} %" + ("" if there.measured else " (not measured: utilization)")
        return text + (f", and {found.percent:.0f} % has to wait" if found.percent >= 1 else "")
    if there.coming and not there.known and not there.others:
        return "not measured: a job that has just begun"
    if there.busy_percent is None:
        return "not measured: how busy it is is not known"
    return f"not measured: {there.busy_percent:.0f} % busy"


def best_together(
    ranked: Sequence[tuple[int, ...]], count: int, closeness: Callable[[int, int], int]
) -> tuple[int, ...]:
    """Return the numbers of the ``count`` candidates that a job gets, best first; ``ranked`` has the harm of each.

    Harm is compared component by component, summed over the set. ``closeness`` of two candidates is higher where they are
    connected better (`host.nvml.NvmlReader.closeness`). Among equals the first ones win.
    """
    numbers = range(len(ranked))
    sets = itertools.islice(itertools.combinations(numbers, count), _MOST_SETS)

    def rank(some: tuple[int, ...]) -> tuple[object, ...]:
        harm = tuple(sum(column) for column in zip(*(ranked[number] for number in some), strict=True))
        links = [closeness(*pair) for pair in itertools.combinations(some, 2)]
        # A collective is as slow as its slowest connection.
        return harm, -min(links, default=0), -sum(links), some

    return min(sets, key=rank, default=())
