"""Who may start next: jobs that wait for memory on a GPU, in the order in which they came. Pure.

First come, first served. A job passes an earlier one only if it does not delay it. Either the earlier job fits at least as
soon as without it, whichever of the running jobs end first (their run times need not be known). Or it ends before the
earlier job can start, by the times that it and the running jobs were given (backfill, as EASY does for the first job of the
line; here for every earlier job). A job that waits for jobs of its own user holds up that user's jobs only. A job of several
devices gets all of them at once, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpushare.base.values import dataclass

# With more different sums of the jobs on one GPU than this, a bound replaces the largest that fits.
_MOST_SUMS: Final = 4096
# More than any GPU has.
_UNLIMITED_BYTES: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Room:
    """What all jobs together can have on one device: bytes, and clients of an MPS server (None: no bound).

    ``alone``: a job outside MPS has it alone (compute mode exclusive-process). ``own_bytes`` are there without any job: the
    driver's, of a display, of an MPS server without clients.
    """

    memory_bytes: int
    clients: int | None = None
    alone: bool = False
    own_bytes: int = 0

    @property
    def whole_bytes(self) -> int:
        """Return what a job gets that has the device without other jobs."""
        return max(0, self.memory_bytes - self.own_bytes)

    def bytes_of(self, memory_bytes: int | None) -> int:
        """Return what a job reserves here that asks for this much: all of it if its need is unknown (None)."""
        return self.whole_bytes if memory_bytes is None else memory_bytes


@dataclass(frozen=True, kw_only=True)
class Running:
    """A job, or a process that gpushare did not start, that has memory on a device."""

    memory_bytes: int
    client: bool = False
    # Its owner, if known.
    uid: int | None = None
    # In how many seconds it ends at the latest; None: it has no time.
    ends_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A job that waits: its bytes (None: unknown, so it needs a device without others), and its devices, best first.

    It needs ``count`` of them, with so many bytes on each.
    """

    name: str
    memory_bytes: int | None
    keys: tuple[str, ...]
    count: int = 1
    client: bool = False
    uid: int | None = None
    # How long it runs at most; None: it has no time.
    run_seconds: float | None = None


# Of a user, unless root has set another in gpushare.yaml.
MOST_LEASE_SECONDS: Final = 12 * 3600.0


class UserLimits:
    """What the jobs of each user may reserve together on one GPU, and how long a lease of a user is at most.

    ``named`` are the limits of users by uid (bytes), ``others`` is that of all other users but root; None: no limit.
    """

    def __init__(
        self,
        named: Mapping[int, int] | None = None,
        others: int | None = None,
        longest_lease_seconds: float = MOST_LEASE_SECONDS,
    ) -> None:
        self.named, self.others = named or {}, others
        self.longest_lease_seconds = longest_lease_seconds

    def get(self, uid: int) -> int | None:
        """Return the bytes that a user's jobs may reserve together on one GPU; None: no limit."""
        return self.named.get(uid, None if uid == 0 else self.others)

    def at_least(self, uid: int, memory_bytes: int | None) -> UserLimits:
        """Return these limits, but for one user a limit of at least ``memory_bytes`` (None: no limit).

        So a job that has left the GPU may come back although root has lowered the limit meanwhile. Its user's other jobs
        still count: all together must not exceed the limit.
        """
        limit = self.get(uid)
        if limit is None:
            return self
        least = _UNLIMITED_BYTES if memory_bytes is None else memory_bytes
        return UserLimits({**self.named, uid: max(limit, least)}, self.others, self.longest_lease_seconds)


def admitted(
    rooms: Mapping[str, Room], running: Mapping[str, Sequence[Running]], waiting: Sequence[Waiting]
) -> dict[str, tuple[str, ...]]:
    """Return the devices on which waiting jobs may start now, by name, best first. ``waiting`` is in order of arrival.

    Each job is taken to start at once, on the first of its devices, before the next one is looked at. A job with too few
    devices is left out: it stays in the line, and later jobs may pass it.
    """
    running_then = {key: list(running.get(key, ())) for key in rooms}
    devices: dict[str, tuple[str, ...]] = {}
    # Those that cannot start now, and in how many seconds they can at the latest (None: no time bounds it).
    still_waiting: list[tuple[Waiting, float | None]] = []
    for job in waiting:
        free = tuple(
            key
            for key in job.keys
            if key in rooms
            and fits(rooms[key], running_then[key], job)
            and not _delays_any(rooms[key], key, running_then[key], job, still_waiting)
        )
        if len(free) < job.count:
            still_waiting.append((job, _starts_within(rooms, running_then, job)))
            continue
        devices[job.name] = free
        for key in free[: job.count]:
            size = _needed_bytes(rooms[key], job)
            running_then[key].append(
                Running(memory_bytes=size, client=job.client, uid=job.uid, ends_seconds=job.run_seconds)
            )
    return devices


def _delays_any(
    room: Room, key: str, running: Sequence[Running], job: Waiting, earlier_jobs: Sequence[tuple[Waiting, float | None]]
) -> bool:
    """Return whether ``job``, if it starts now on the device ``key``, might delay an earlier job that waits for this device.

    It delays none that can start only after ``job`` has ended.
    """
    # The jobs before the earlier job at hand: they may have started before it does.
    ahead: list[Running] = []
    for earlier, starts_within in earlier_jobs:
        if key not in earlier.keys:
            continue
        ends_before = job.run_seconds is not None and starts_within is not None and job.run_seconds <= starts_within
        if not ends_before and _delays(room, running, ahead, job, earlier):
            return True
        ahead.append(Running(memory_bytes=_needed_bytes(room, earlier), client=earlier.client, uid=earlier.uid))
    return False


def _starts_within(rooms: Mapping[str, Room], running: Mapping[str, Sequence[Running]], job: Waiting) -> float | None:
    """Return in how many seconds as many of a job's devices as it needs have room for it at the latest; None: unknown."""
    soonest = sorted(
        seconds
        for key in job.keys
        if key in rooms and (seconds := _fits_within(rooms[key], running[key], job)) is not None
    )
    return soonest[job.count - 1] if len(soonest) >= job.count else None


def _fits_within(room: Room, running: Sequence[Running], job: Waiting) -> float | None:
    """Return in how many seconds a device has room for a job at the latest, by the times of the jobs there; None: unknown."""
    ends = {holder.ends_seconds for holder in running if holder.ends_seconds is not None}
    for seconds in sorted({0.0, *ends}):
        still_running = [holder for holder in running if holder.ends_seconds is None or holder.ends_seconds > seconds]
        if fits(room, still_running, job):
            return seconds
    return None


def fits(room: Room, running: Sequence[Running], job: Waiting) -> bool:
    """Return whether a job has room next to those that run."""
    if sum(holder.memory_bytes for holder in running) + _needed_bytes(room, job) > room.memory_bytes:
        return False
    return not job.client or room.clients is None or sum(holder.client for holder in running) < room.clients


def could_ever_fit(rooms: Mapping[str, Room], job: Waiting) -> bool:
    """Return whether a job fits on as many of its devices as it needs when nothing else is there."""
    return sum(fits(rooms[key], (), job) for key in job.keys if key in rooms) >= job.count


def _needed_bytes(room: Room, job: Waiting) -> int:
    """Return what a job takes on a device: all of it if its need is unknown, or if no other job can be there (`Room`)."""
    size = room.bytes_of(job.memory_bytes)
    return max(room.whole_bytes, size) if room.alone and not job.client else size


def _delays(room: Room, running: Sequence[Running], ahead: Sequence[Running], job: Waiting, earlier: Waiting) -> bool:
    """Return whether ``earlier`` might start later on this device if ``job`` starts now.

    ``running`` may end in any order. ``ahead`` are the jobs before ``earlier``, which may have started before it.
    """
    need = _needed_bytes(room, earlier)
    if need > room.memory_bytes:
        # It never starts here.
        return False
    if earlier.uid is not None and earlier.uid != job.uid:
        held_by_its_user = sum(holder.memory_bytes for holder in running if holder.uid == earlier.uid)
        if held_by_its_user + need > room.memory_bytes:
            # It waits for jobs of its own user: a user must not block others with a small job and a large one.
            return False
    # Without ``job``, the earlier job starts as soon as the others hold little enough. How much may that be at most? If
    # ``job`` does not fit besides, it delays the earlier job.
    holders = [*running, *ahead]
    most = _largest_sum([holder.memory_bytes for holder in holders if holder.memory_bytes], room.memory_bytes - need)
    if most + need + _needed_bytes(room, job) > room.memory_bytes:
        return True
    if not (earlier.client and job.client) or room.clients is None:
        return False
    # The same with clients, of which the two jobs are one each.
    most_clients = min(sum(holder.client for holder in holders), room.clients - 1)
    return most_clients + 2 > room.clients


def _largest_sum(sizes: Sequence[int], limit: int) -> int:
    """Return the largest sum of some of the sizes that is at most ``limit``; for many sizes, an upper bound of it."""
    if sum(sizes) <= limit:
        return sum(sizes)
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums if total + size <= limit}
        if len(sums) > _MOST_SUMS:
            return limit
    return max(sums)
