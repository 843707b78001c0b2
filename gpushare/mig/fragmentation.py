"""What still fits on a GPU, what no profile can reach any more, and how badly the instances lie. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare.mig.board import Board, Kind, board_of, members_of, occupied
from gpushare.mig.profile import Layout, Profile


@dataclass(frozen=True, kw_only=True)
class FreeProfile:
    """What is left for one profile: how many more fit by themselves, and where one may start now."""

    profile: Profile
    count: int
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LostSlices:
    """Slices that are free, but that no set of further instances can use."""

    compute: int
    memory: int


def free_profiles(layout: Layout) -> tuple[FreeProfile, ...]:
    """Return what is left for each profile: the Free column of ``nvidia-smi mig -lgip``, and the free placements.

    Each profile is counted alone: two that fit by themselves need not fit together.
    """
    board = board_of(layout)
    mask, counts = occupied(layout), board.free(occupied(layout), members_of(layout))
    return tuple(
        FreeProfile(
            profile=profile,
            count=counts[number],
            starts=tuple(sorted(start for start, place in board.places[number] if counts[number] and not mask & place)),
        )
        for number, profile in enumerate(board.profiles)
    )


def lost_slices(layout: Layout) -> LostSlices:
    """Return the free slices that nothing can use: two 3g on a GPU of seven slices lose one compute slice."""
    board = board_of(layout)
    mask, members = occupied(layout), members_of(layout)
    compute, memory = _reachable(board, mask, members)
    used = sum(one.profile.slices for one in layout.instances)
    return LostSlices(
        compute=max(0, board.compute_slices - used - compute), memory=board.axis - mask.bit_count() - memory
    )


def _reachable(board: Board, mask: int, members: tuple[int, ...]) -> tuple[int, int]:
    """Return the most compute slices, and the most memory slices, that further instances can take."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    used = sum(board.slices[n] for n in members)
    most = (board.compute_slices - used, board.axis - mask.bit_count())
    compute = memory = 0
    waiting = [(mask, members)]
    while waiting and (compute, memory) != most:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        taken, present = state
        compute = max(compute, sum(board.slices[n] for n in present) - used)
        memory = max(memory, (taken & ~mask).bit_count())
        for number, room in enumerate(board.rooms(present)):
            if room:
                grown = tuple(sorted((*present, number)))
                waiting += [(taken | place, grown) for _, place in board.places[number] if not taken & place]
    return compute, memory


def capacity_lost(layout: Layout) -> int:
    """Return what the instances cost: requests that an empty GPU serves and this one does not, in memory slices.

    Over all profiles, the number of instances that fit an empty GPU less those that still fit, times the memory
    slices of one. Additive over GPUs, so plans across a host compare by its sum.
    """
    return board_of(layout).lost(occupied(layout), members_of(layout))


def fragmentation(layout: Layout) -> int:
    """Return how much of `capacity_lost` is due to the places alone; 0 when no packing of the same instances is better.

    The difference to the best packing of the same instances on an empty GPU, in memory slices.
    """
    board, members = board_of(layout), members_of(layout)
    kinds = tuple(Kind(number) for number in sorted(set(members)))
    counts = tuple(members.count(kind.profile) for kind in kinds)
    here = capacity_lost(layout)
    return here - min((board.lost(one.mask, members) for one in board.complete(kinds, counts)), default=here)
