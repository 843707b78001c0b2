"""The ledger: which jobs have reserved memory on which device, which wait for it, and what is held.

One claim per job (`host/claims.py`): a file that only its owner writes, in a directory that all users share. There is no
daemon and no lock: every waiting job reads all claims and NVML, and works out by itself who is next (`admission.py`).
To take a place a job writes that it holds it, reads all claims again, and writes that it is sure. Of two jobs that do so at
the same time for the same memory, the one that came later steps back. It may have read the claims before the other one
wrote: so the earlier one waits until the later one has written that it is sure, or that it has stepped back.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from gpushare.base.model import MUCH_UNLISTED, ComputeMode, GpuProcess
from gpushare.base.values import dataclass
from gpushare.host.claims import Claim, HeldClaim, all_claims, make_claim
from gpushare.host.identity import is_stopped
from gpushare.host.records import has_records
from gpushare.host.store import Named
from gpushare.memory.admission import Room, Running, UserLimits, Waiting, admitted, could_ever_fit

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host
    from gpushare.host.process import ProcessInfo

PREFIX: Final = "gpushare-memory-"
# The reservation of a job that has nothing on the device for this long lapses.
LAPSE_SECONDS: Final = 60.0
# A waiting job that could take its place for this long and does not is passed: it hangs, or only looks like a job.
PATIENCE_SECONDS: Final = 10.0
# How often a job may step back for others in one claim, which has at most 64 lines.
_MOST_STEPS_BACK: Final = 24
# How often a job of several devices chooses those that it waits for: again if one of them is lost.
_MOST_TIMES_CHOSEN: Final = 4
# A program that is started more often in one place: later ones hold it only together with gpushare.
_MOST_ADDED: Final = 6
# How long a job that has just come waits for those that are entering the ledger, as one of them may be before it; and one
# that takes a place for another one that takes it.
_CHOOSING_SECONDS: Final = 0.5
_CHOOSING_POLL_SECONDS: Final = 0.002
# How long a job with a time takes besides, to start and to end.
TIME_MARGIN_SECONDS: Final = 15.0
# Further waiting jobs of one user are not in the line yet.
MOST_WAITING_OF_ONE_USER: Final = 64
_MOST_BYTES: Final = 1 << 50
_NO_LIMITS: Final = UserLimits()
# What happens to a job above its limit.
ABOVE: Final = ("end", "warn", "pause")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job that asks for a place: its bytes (None: unknown) on each of ``count`` of these devices, best first."""

    memory_bytes: int | None = None
    keys: tuple[str, ...] = ()
    client: bool
    count: int = 1
    name: str | None = None
    production: bool = False
    # It leaves the GPU when production needs room; at the end of its turn.
    leaves: bool = False
    turns: bool = False
    opportunistic: bool = False
    # How long it runs at most, by its user: then it passes those that cannot start before its end.
    run_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reservation(Request, Named):
    """A job in the ledger. ``held`` are the devices on which it holds a place; none: it waits."""

    claim: Claim
    held: tuple[str, ...]
    # Others have seen that it holds its place.
    sure: bool
    # It has said that it cannot leave the GPU for production.
    stays: bool = False
    # The limit of all its processes together, and what happens above it: end, warn or pause.
    limit_bytes: int | None = None
    above: str | None = None
    # Until when it runs, from when it has its place (CLOCK_BOOTTIME): its user's word.
    until_ns: int | None = None

    @property
    def id(self) -> str:
        return self.claim.path.name

    @property
    def pid(self) -> int:  # type: ignore[override]
        """Return the PID of its program; of the gpushare that waits or starts it, until there is one."""
        return self.claim.processes[-1].pid

    @property
    def program_pids(self) -> set[int]:
        """Return the PIDs of its program: all processes of the claim but the first, which is its gpushare."""
        return {process.pid for process in self.claim.processes[1:]}

    @property
    def waits(self) -> bool:
        """Return whether it holds no place yet."""
        return not self.held

    @property
    def stopped(self) -> bool:
        """Return whether it waits and is stopped: it takes no place until it continues, so it holds up no other job."""
        return self.waits and is_stopped(self.claim.pid)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One device in the ledger: what jobs can have, what runs there, and which reservations count, in order."""

    device: Device
    room: Room
    # What takes memory there: first one for each of the `holders`, in their order, then other programs.
    running: tuple[Running, ...]
    holders: tuple[Reservation, ...]
    # Bytes that no reservation accounts for: other programs, and what jobs hold beyond their reservations.
    others_bytes: int
    # The processes there of no job that do work.
    others: tuple[GpuProcess, ...] = ()
    # What the jobs there have reserved, as far as it counts; by user, and what those of each user may.
    reserved_bytes: int = 0
    granted: Mapping[int, int] = field(default_factory=dict)
    limits: UserLimits = _NO_LIMITS
    # Reservations beyond the limit of their user.
    beyond: frozenset[str] = frozenset()

    @property
    def free_bytes(self) -> int:
        """Return what is neither reserved nor held."""
        return max(0, self.room.memory_bytes - sum(holder.memory_bytes for holder in self.running))

    @property
    def fits(self) -> bool:
        """Return whether there is memory for all that is reserved and held."""
        return sum(holder.memory_bytes for holder in self.running) <= self.room.memory_bytes

    @property
    def held_by(self) -> list[tuple[Reservation, int]]:
        """Return the jobs there, each with the bytes that count for it."""
        # Not strict: other programs come after the jobs.
        return [(job, running.memory_bytes) for job, running in zip(self.holders, self.running, strict=False)]

    def exceeds_limit(self, uid: int, memory_bytes: int | None) -> bool:
        """Return whether the jobs of a user here and a new one of this size would together reserve more than they may."""
        limit = self.limits.get(uid)
        return limit is not None and self.granted.get(uid, 0) + self.room.bytes_of(memory_bytes) > limit

    @property
    def free_clients(self) -> int | None:
        """Return how many more clients an MPS server takes; None: it is not known, or does not matter."""
        if self.room.clients is None:
            return None
        return max(0, self.room.clients - sum(holder.client for holder in self.running))


def reservations(host: Host, claims: Sequence[Claim] | None = None) -> list[Reservation] | None:
    """Return the living jobs in the ledger, in the order of the line (`line_order`); None: the ledger cannot be read.

    ``claims`` are those that were read just now. Of the jobs that a user lets wait only the first count, and of jobs that are
    swapped out or lost none: a swapped-out job has released its reservation, and a lost one never comes back.
    """
    claims = all_claims(host, PREFIX) if claims is None else claims
    if claims is None:
        return None
    parsed = map(_parse_reservation, sorted(claims, key=lambda claim: claim.rank))
    jobs = [job for job in parsed if job is not None]
    off_gpu = _pids_off_gpu(host, jobs)
    waiting_of_user: Counter[int] = Counter()

    def counts(job: Reservation) -> bool:
        """Return whether a job counts: it is on the GPU, or one of the first that its user lets wait. Called once for each."""
        waiting_of_user[job.claim.uid] += job.waits
        if job.waits:
            return waiting_of_user[job.claim.uid] <= MOST_WAITING_OF_ONE_USER
        return (off_gpu[None] | off_gpu[job.claim.uid]).isdisjoint(process.pid for process in job.claim.processes)

    return line_order([job for job in jobs if counts(job)])


def _pids_off_gpu(host: Host, jobs: Sequence[Reservation]) -> defaultdict[int | None, set[int]]:
    """Return PIDs that the claims of swapped-out and lost jobs name, by the user whose claims they count for (None: all users).

    A record of this user or root counts for all claims; one of another user, which only root reads, for that user's only.
    """
    off_gpu: defaultdict[int | None, set[int]] = defaultdict(set)
    if not has_records(host, "swap"):
        return off_gpu
    from gpushare.memory.swapped import LOST, OUT, swaps

    # Not the gpushare of a job: it alone is named by the new place of a job that comes back.
    program_pids = {pid for job in jobs for pid in job.program_pids}
    for swap in swaps(host):
        if swap.state in {OUT, LOST}:
            pids = off_gpu[swap.keeper_uid or None]
            pids.add(swap.pid)
            for image in swap.images:
                # A claim names a program that is above the process. The nearest one: a job may have started another.
                above = host.processes.ancestry(image.pid)
                pids.add(next((pid for pid in above if pid in program_pids), image.pid))
    return off_gpu


def without_enclosing_jobs(host: Host, jobs: Sequence[Reservation]) -> list[Reservation]:
    """Return reservations without those of jobs that this process is a part of: what they have reserved is for it, too."""
    above = set(host.processes.ancestry(os.getpid())) if any(job.held for job in jobs) else set()
    return [job for job in jobs if above.isdisjoint(job.program_pids)]


def line_order(jobs: Sequence[Reservation]) -> list[Reservation]:
    """Return jobs in order of arrival, but opportunistic jobs behind the production jobs that wait for their devices.

    Only production jobs of its own user and of root set an opportunistic job back: what other users call production changes
    nothing for it. All other jobs keep their order.
    """
    # The position of the last production job that waits, by user and device.
    last_production: dict[tuple[int, str], int] = {}
    for position, job in enumerate(jobs):
        if job.waits and job.production:
            last_production.update({(job.claim.uid, key): position for key in job.keys})
    ranks: dict[str, tuple[int, int]] = {}
    for position, job in enumerate(jobs):
        ranks[job.id] = (position, -1)
        if job.waits and job.opportunistic:
            behind = max(last_production.get((uid, key), -1) for uid in (0, job.claim.uid) for key in job.keys)
            # Right behind that job; of several there, in order of arrival.
            if behind > position:
                ranks[job.id] = (behind, position)
    return sorted(jobs, key=lambda job: ranks[job.id])


def _waits_behind(job: Request, uid: int, other: Request, other_uid: int) -> bool:
    """Return whether an opportunistic job of user ``uid`` lets ``other`` pass: production of root or that user on a device of both."""
    if set(other.keys).isdisjoint(job.keys):
        return False
    return job.opportunistic and other.production and other_uid in {0, uid}


def waiting_before(jobs: Sequence[Reservation], request: Request, uid: int) -> list[Reservation]:
    """Return the waiting jobs that would be before a job of user ``uid`` that came now with this request."""
    waiting = [job for job in jobs if job.waits and not job.stopped]
    return [job for job in waiting if not _waits_behind(job, job.claim.uid, request, uid)]


def _parse_reservation(claim: Claim) -> Reservation | None:
    """Return what a claim says; None: it has no ticket yet, or gpushare would not have written that.

    Its facts are lines of a word and a text. Of a word that comes again the last counts, of ``want`` the first::

        want BYTES|- CLIENT DEVICES  the memory (-: unknown), 1 for a client of MPS, and the devices, the best first
        gpus N, fix DEVICES          how many of them, and which it waits for by now
        hold DEVICES, sure DEVICES   it takes a place, has it for certain; back: it has stepped back
        time S, until NS             how long it runs at most, and until when (since boot)
        limit BYTES ABOVE            the limit of its memory, and what happens above it
        name, role, leaves, stays, turns
    """
    facts: dict[str, str] = {}
    if claim.ticket is None:
        return None
    for line in claim.facts:
        word, _, text = line.partition(" ")
        if word in {"hold", "sure", "back"}:
            facts["place"], facts["state"] = text, word
        # What it asks for never changes: a later want is not ours.
        elif word != "want" or word not in facts:
            facts[word] = text
    want = facts.get("want", "").split(" ")
    count = facts.get("gpus", "1")
    if len(want) != 3 or want[1] not in {"0", "1"} or not count.isdecimal() or len(count) > 3:
        return None
    size = _parse_number(want[0])
    if want[0] != "-" and (size is None or size > _MOST_BYTES):
        return None
    keys = tuple(want[2].split(","))
    held = tuple(facts["place"].split(",")) if facts.get("state", "back") != "back" else ()
    fixed = tuple(facts["fix"].split(",")) if "fix" in facts else ()
    if not {*held, *fixed}.issubset(keys):
        return None
    if not 1 <= int(count) <= len(set(keys)) or len(set(fixed)) not in {0, int(count)}:
        return None
    limit, _, above = facts.get("limit", "").partition(" ")
    limit_bytes = _parse_number(limit) if above in ABOVE else None
    role = facts.get("role")
    return Reservation(
        claim=claim,
        name=facts["name"][:64] if "name" in facts else None,
        memory_bytes=size,
        keys=fixed or keys,
        client=want[1] == "1",
        held=held,
        sure=facts.get("state") == "sure",
        count=int(count),
        production=role == "production",
        opportunistic=role == "opportunistic",
        limit_bytes=limit_bytes,
        above=None if limit_bytes is None else above,
        leaves="leaves" in facts,
        stays="stays" in facts,
        turns="turns" in facts,
        run_seconds=_parse_number(facts.get("time", "")),
        until_ns=_parse_number(facts.get("until", "")),
    )


def _parse_number(text: str) -> int | None:
    """Return a number in a claim; None: it is none, or has more digits than 64 bits hold."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def line_of(
    host: Host,
    device: Device,
    jobs: Sequence[Reservation],
    *,
    clients: int | None = None,
    limits: UserLimits = _NO_LIMITS,
) -> Line | None:
    """Return what is on one device and reserved there as of now, to decide who has room; None: its memory is unknown.

    ``device`` was read just before, with its processes. ``clients`` is how many clients its MPS server takes. ``limits``
    are what each user's jobs may reserve there together: a reservation beyond that counts as 0 bytes.
    """
    used = device.gpu.memory_used_bytes if device.mig is None else device.mig.memory_used_bytes
    if device.job_memory_bytes is None or used is None:
        return None
    # In this mode a context outside MPS takes the whole GPU, however small it is.
    alone = device.gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    processes = [process for process in device.gpu.processes or () if device.has(process)]
    jobs_on_device = [job for job in jobs if device.uuid in job.held]
    owners = owners_of(host, jobs_on_device, (process.pid for process in processes))
    strangers = [(process, host.processes.describe(process.pid)) for process in processes if process.pid not in owners]
    # Memory that NVML counts for no process: contexts being created, other PID namespaces, processes that have just died.
    unlisted = max(0, used - _used_bytes(processes))
    # What is there without any job. Much unlisted memory is not: it is of processes that have ended or cannot be seen.
    others = tuple(process for process, info in strangers if _does_work(process, info))
    own_bytes = _used_bytes(process for process, _ in strangers) - _used_bytes(others)
    if unlisted <= MUCH_UNLISTED:
        own_bytes += unlisted
    room = Room(memory_bytes=max(0, device.job_memory_bytes), clients=clients, alone=alone, own_bytes=own_bytes)
    # The jobs there, with what counts for each.
    holders: list[Reservation] = []
    running: list[Running] = []
    more_clients: list[Running] = []
    beyond: set[str] = set()
    granted: dict[int, int] = defaultdict(int)
    for job in jobs_on_device:
        own_processes = [process for process in processes if owners.get(process.pid) == job.id]
        if not own_processes and time.time() - job.claim.touched_at > LAPSE_SECONDS:
            # Its reservation has expired: it had nothing on the device for too long.
            continue
        size = room.bytes_of(job.memory_bytes)
        limit = limits.get(job.claim.uid)
        if limit is not None and granted[job.claim.uid] + size > limit:
            size = 0
            beyond.add(job.id)
        granted[job.claim.uid] += size
        holders.append(job)
        # What it holds beyond its reservation counts too.
        takes = room.whole_bytes if alone and not job.client else max(size, _used_bytes(own_processes))
        ends = _seconds_left(job)
        running.append(Running(memory_bytes=takes, client=job.client, uid=job.claim.uid, ends_seconds=ends))
        # Each of its processes is a client of its own.
        more = sum(process.mps for process in own_processes) - 1
        more_clients += [Running(memory_bytes=0, client=True, uid=job.claim.uid, ends_seconds=ends)] * more

    # Those of the holders come first (`Line.running`).
    running += more_clients
    for process, info in strangers:
        uid = None if info is None else info.uid
        running.append(Running(memory_bytes=process.memory_used_bytes or 0, client=process.mps, uid=uid))
    if unlisted:
        running.append(Running(memory_bytes=unlisted))
    return Line(
        device=device,
        room=room,
        running=tuple(running),
        holders=tuple(holders),
        others_bytes=unlisted + _used_bytes(process for process, _ in strangers),
        others=others,
        reserved_bytes=sum(granted.values()),
        granted=dict(granted),
        limits=limits,
        beyond=frozenset(beyond),
    )


def lines_of(
    host: Host,
    devices: Iterable[Device],
    jobs: Sequence[Reservation],
    *,
    clients: Mapping[str, int | None] | None = None,
    limits: UserLimits = _NO_LIMITS,
) -> dict[str, Line]:
    """Return the ledger of devices by UUID, as `line_of`, without those whose memory is unknown."""
    clients = clients or {}
    lines = (line_of(host, device, jobs, clients=clients.get(device.uuid), limits=limits) for device in devices)
    return {line.device.uuid: line for line in lines if line is not None}


def _used_bytes(processes: Iterable[GpuProcess]) -> int:
    """Return the sum of what processes hold; one of which that is unknown counts as 0."""
    return sum(process.memory_used_bytes or 0 for process in processes)


def _seconds_left(job: Reservation) -> float | None:
    """Return in how many seconds a job ends by the time that its user gave; None: without a time, or if it is over."""
    if job.until_ns is None:
        return None
    left_ns = job.until_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return left_ns / 1e9 if left_ns > 0 else None


def _does_work(process: GpuProcess, info: ProcessInfo | None) -> bool:
    """Return whether a process is work of its own, and not a display or an MPS server that waits for clients."""
    # Anybody can take the name of a server.
    if (process.memory_used_bytes or 0) > MUCH_UNLISTED:
        return True
    if not process.compute and not process.mps:
        return False
    from gpushare.mps.control import is_server

    return info is None or not is_server(info.name)


def _as_waiting(name: str, uid: int, job: Request, lines: Mapping[str, Line]) -> Waiting:
    """Return a job as the admission needs it: only with the devices on which its user's limit leaves room for it.

    So a job that waits because of its user's limit delays no other job.
    """
    keys = tuple(key for key in job.keys if key not in lines or not lines[key].exceeds_limit(uid, job.memory_bytes))
    return Waiting(
        name=name,
        memory_bytes=job.memory_bytes,
        keys=keys,
        count=job.count,
        client=job.client,
        uid=uid,
        run_seconds=None if job.run_seconds is None else job.run_seconds + TIME_MARGIN_SECONDS,
    )


def _admitted(lines: Mapping[str, Line], waiting: Sequence[Waiting]) -> dict[str, tuple[str, ...]]:
    """Return the devices on which each waiting job may start now, by its name, best first."""
    rooms = {key: line.room for key, line in lines.items()}
    return admitted(rooms, {key: line.running for key, line in lines.items()}, waiting)


def would_take(jobs: Sequence[Reservation], lines: Sequence[Line], request: Request, uid: int) -> tuple[str, ...]:
    """Return the devices on which a job could start if it came now, best first; none: it would wait."""
    by_key = {line.device.uuid: line for line in lines}
    jobs_ahead = [_as_waiting(job.id, job.claim.uid, job, by_key) for job in waiting_before(jobs, request, uid)]
    # It has no claim yet, whose name could be its own.
    newcomer = _as_waiting("", uid, request, by_key)
    return _admitted(by_key, [*jobs_ahead, newcomer]).get(newcomer.name, ())


def owners_of(host: Host, jobs: Iterable[Reservation], pids: Iterable[int]) -> dict[int, str]:
    """Return the id of the job that each process belongs to, by ancestry; without processes that belong to none."""
    job_of = {process.pid: job for job in jobs for process in job.claim.processes}
    owners: dict[int, str] = {}
    for pid in pids:
        job = next((job_of[above] for above in host.processes.ancestry(pid) if above in job_of), None)
        info = None if job is None else host.processes.describe(pid)
        # A claim that names another user's process must not hide its memory; root may start jobs as any user.
        if job is not None and info is not None and job.claim.uid in {0, info.uid}:
            owners[pid] = job.id
    return owners


# Returns the ledger of some devices, by UUID, with these jobs in it.
ReadLines = Callable[[Sequence[Reservation]], Mapping[str, Line]]


class Patience:
    """Which waiting jobs are passed: all of a user whose jobs could take a place for `PATIENCE_SECONDS`, and none did."""

    def __init__(self) -> None:
        # The jobs that could take a place when the claims were read last.
        self._could_start: set[str] = set()
        # By user: since when jobs of that user could take a place, and none has.
        self._could_start_since: dict[int, float] = {}
        self._passed: set[str] = set()

    def note_who_can_start(self, jobs: Sequence[Reservation], can_start: Collection[str]) -> None:
        """Skip in the line the waiting jobs of a user who could start a job for PATIENCE_SECONDS and started none.

        ``can_start`` are the ids of the jobs that could start now. A job that was skipped once stays skipped.
        """
        now = time.monotonic()
        users_who_started = {job.claim.uid for job in jobs if job.held and job.id in self._could_start}
        users_who_can_start = {job.claim.uid for job in jobs if job.id in can_start}
        self._could_start = {job.id for job in jobs if job.id in can_start}
        self._could_start_since = {
            uid: now if uid in users_who_started else self._could_start_since.get(uid, now)
            for uid in users_who_can_start
        }
        late_users = {uid for uid, since in self._could_start_since.items() if now - since >= PATIENCE_SECONDS}
        self._passed |= {job.id for job in jobs if job.waits and job.claim.uid in late_users}

    def must_follow(self, job: Reservation) -> bool:
        """Return whether this job may not start before a waiting one: not if that is stopped, or was skipped for its user."""
        return not job.stopped and job.id not in self._passed


class Place:
    """A job's own entry in the ledger. Released by `leave`, or by the end of all its processes.

    A claim is its owner's word, who may write an earlier ticket later: so only those jobs are before this one whose earlier
    tickets it saw when it came.
    """

    def __init__(self, host: Host, request: Request, patience: Patience | None = None) -> None:
        """Enter the ledger. ``patience`` is that of a job that enters it again and again.

        Raises NoPermission, OperationFailed: it cannot be written.
        """
        self._host, self.request, self._patience = host, request, patience or Patience()
        # The devices on which it has a place.
        self.held: tuple[str, ...] = ()
        # Those that a job of several devices waits for, once it is the first in the line.
        self._chosen: tuple[str, ...] = ()
        self._write_claim()

    @property
    def id(self) -> str:
        """Return the id of its job, as in `Reservation`."""
        return self.claim.path.name

    def _write_claim(self) -> None:
        """Make a new claim, write what the job asks for, and draw its ticket: its place in the line."""
        request = self.request
        self.claim: HeldClaim = make_claim(self._host, "memory", PREFIX)
        try:
            size = "-" if request.memory_bytes is None else str(request.memory_bytes)
            self.claim.add_fact(f"want {size} {int(request.client)} {','.join(request.keys)}")
            if request.count > 1:
                self.claim.add_fact(f"gpus {request.count}")
            if request.run_seconds is not None:
                self.claim.add_fact(f"time {math.ceil(request.run_seconds)}")
            if request.name is not None:
                self.claim.add_fact(f"name {request.name}")
            if request.production or request.opportunistic:
                self.claim.add_fact(f"role {'production' if request.production else 'opportunistic'}")
            if request.leaves:
                self.claim.add_fact("leaves for production")
            if request.turns:
                self.claim.add_fact("turns with others")
            self.claim.draw_ticket()
        except BaseException:
            self.claim.release()
            raise
        self._steps_back = self._added = self._times_chosen = 0
        self._told_limit: str | None = None
        self._entered = time.monotonic()
        # The ids of the jobs that came before this one; None: not read yet.
        self._before: frozenset[str] | None = None

    def take(self, *keys: str) -> None:
        """Hold devices for certain, whether or not there is room. The time of a job that was given one counts from now on."""
        self.claim.add_fact(f"sure {','.join(keys)}")
        self.held = keys
        if self.request.run_seconds is not None:
            seconds = self.request.run_seconds + TIME_MARGIN_SECONDS
            self.claim.add_fact(f"until {time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)}")

    def try_to_take(
        self,
        devices: Sequence[Device],
        clients: Mapping[str, int | None],
        limits: UserLimits,
        best: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> bool:
        """Take as many devices as the job needs if it is its turn on them; return whether it did. Raises like `Place`.

        ``best`` returns some devices in the order in which they are best now; it is only asked if the job may take them.
        """
        read_lines = partial(lines_of, self._host, devices, clients=clients, limits=limits)
        keys = self._devices_free_to_take(read_lines, best)
        if not keys:
            return False
        self.claim.add_fact(f"hold {','.join(keys)}")
        wanted = [device for device in devices if device.uuid in keys]
        if self._still_fit(keys, partial(lines_of, self._host, wanted, clients=clients, limits=limits)):
            self.take(*keys)
            return True
        self.claim.add_fact("back")
        self._steps_back += 1
        if self._steps_back >= _MOST_STEPS_BACK:
            # A claim only grows, and a longer one would no longer be read.
            self.claim.release()
            self._write_claim()
        return False

    def _devices_free_to_take(
        self, read_lines: ReadLines, best: Callable[[Sequence[str]], Sequence[str]] | None
    ) -> tuple[str, ...]:
        """Return the devices that this job may take now, by the line and free memory, best first; none: it waits.

        For the next call this one notes who else can start, and which of several devices the job waits for.
        """
        claims = self._claims_with_tickets()
        jobs = self._jobs_to_count(claims)
        own_claim = next((claim for claim in claims or () if claim.path.name == self.id), None)
        if claims is None or jobs is None or own_claim is None:
            return ()
        if self._before is None:
            # Of all claims: `jobs` has only some of the waiting jobs of a user.
            self._before = frozenset(
                claim.path.name for claim in claims if claim.ticket is not None and claim.rank < own_claim.rank
            )
        lines = read_lines(jobs)
        waiting = [
            _as_waiting(job.id, job.claim.uid, job, lines)
            for job in jobs
            if job.id == self.id
            or (
                job.waits
                and (job.id in self._before or _waits_behind(self.request, os.geteuid(), job, job.claim.uid))
                and self._patience.must_follow(job)
            )
        ]
        devices_by_job = _admitted(lines, waiting)
        self._patience.note_who_can_start(jobs, devices_by_job.keys() - {self.id})
        free = devices_by_job.get(self.id, ())
        if not free:
            self._choose_devices_to_wait_for(lines, waiting)
        elif best is not None:
            # Others reckon with the order that it came with. If they take the same one now, one of them steps back.
            free = tuple(best(free))
        return free[: self.request.count]

    def _claims_with_tickets(self) -> list[Claim] | None:
        """Return all claims. Until this job knows who came before it, wait a moment for those that have no ticket yet.

        To draw a ticket, a place in the line, takes microseconds: a claim without one after the wait comes after this job.
        """
        claims = all_claims(self._host, PREFIX)
        while (
            self._before is None
            and any(claim.ticket is None for claim in claims or ())
            and time.monotonic() - self._entered < _CHOOSING_SECONDS
        ):
            time.sleep(_CHOOSING_POLL_SECONDS)
            claims = all_claims(self._host, PREFIX)
        return claims

    def _choose_devices_to_wait_for(self, lines: Mapping[str, Line], waiting: Sequence[Waiting]) -> None:
        """Choose the devices that a job of several waits for, once it is first for them: the others are free for later jobs.

        It waits for the devices with the most free memory, because the least must be released there.
        """
        count, keys = self.request.count, self.request.keys
        has_chosen = bool(self._chosen) and lines.keys() >= set(self._chosen)
        if count == 1 or has_chosen or self._times_chosen >= _MOST_TIMES_CHOSEN:
            return
        first = next((job for job in waiting if not set(job.keys).isdisjoint(keys)), None)
        of_one_device = replace(self.request, count=1)
        large_enough = [key for key in keys if key in lines and not never_fits([lines[key]], of_one_device)]
        if first is None or first.name != self.id or len(large_enough) < count:
            return
        most_free_first = sorted(large_enough, key=lambda key: (-lines[key].free_bytes, keys.index(key)))
        self._chosen = tuple(most_free_first[:count])
        self._times_chosen += 1
        self.claim.add_fact(f"fix {','.join(self._chosen)}")

    def _jobs_to_count(self, claims: Sequence[Claim] | None = None) -> list[Reservation] | None:
        """Return the ledger's jobs, this one too, without those that it is a part of; None: it cannot be read."""
        jobs = reservations(self._host, claims)
        return None if jobs is None else without_enclosing_jobs(self._host, jobs)

    def _still_fit(self, keys: Sequence[str], read_lines: ReadLines) -> bool:
        """Return whether devices have room for this job next to all that hold them now.

        A job that came later and is not sure yet has to step back for this one. But it may have read the ledger before this
        job wrote that it holds the devices, and be about to write that it is sure. So where there is no room for both, this
        job waits for what the other one writes.
        """
        until = time.monotonic() + _CHOOSING_SECONDS
        while True:
            jobs = self._jobs_to_count()
            own_job = next((job for job in jobs or () if job.id == self.id), None)
            if jobs is None or own_job is None:
                return False
            not_to_step_back = [job for job in jobs if job.sure or job.claim.rank <= own_job.claim.rank]
            if not _have_room(own_job, not_to_step_back, keys, read_lines):
                return False
            if _have_room(own_job, jobs, keys, read_lines):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(_CHOOSING_POLL_SECONDS)

    def tell_limit(self, limit_bytes: int, above: str) -> None:
        """Write the limit of the job and what happens above it (`ABOVE`) for others to read; the last one written counts."""
        fact = f"limit {limit_bytes} {above}"
        if fact != self._told_limit:
            self.claim.add_fact(fact)
            self._told_limit = fact

    def add(self, pid: int) -> None:
        """Let the program's process hold the place too: it counts until both have ended."""
        if self._added < _MOST_ADDED:
            self._added += 1
            self.claim.add(pid)

    def tell_that_it_stays(self) -> None:
        """Say that this job cannot leave the GPU for production, so that others do not count on its memory."""
        self.claim.add_fact("stays there")

    def touch(self) -> None:
        """Say that the job uses its device, every 20 s or so: its reservation then outlasts its last process there by 60 s."""
        self.claim.touch()

    def leave(self) -> None:
        """Leave the ledger: other jobs may take what this one held, or its place in the line."""
        self.claim.release()


def _have_room(own: Reservation, jobs: Sequence[Reservation], keys: Sequence[str], read_lines: ReadLines) -> bool:
    """Return whether devices have room for all ``jobs`` that hold them, one of which is ``own``, and what else runs there."""
    # Jobs that are sure of their room count first towards their user's limit, even if they came later: production passes
    # others in the line.
    lines = read_lines(sorted(jobs, key=lambda job: not job.sure))
    if not lines.keys() >= set(keys):
        return False

    def fits(line: Line) -> bool:
        """Return whether memory and clients of MPS suffice, and this job is within its user's limit."""
        clients = sum(holder.client for holder in line.running)
        return line.fits and (line.room.clients is None or clients <= line.room.clients) and own.id not in line.beyond

    return all(fits(lines[key]) for key in keys)


def jobs_before(jobs: Sequence[Reservation], place: Place) -> list[Reservation]:
    """Return the jobs that wait before this one for one of its devices, without those that are stopped."""
    keys = set(place.request.keys)
    earlier = itertools.takewhile(lambda job: job.id != place.id, jobs)
    return [job for job in earlier if job.waits and not keys.isdisjoint(job.keys) and not job.stopped]


def never_fits(lines: Iterable[Line], request: Request) -> bool:
    """Return whether a request fits on too few of its devices, even if nothing else is there."""
    job = _as_waiting("", os.geteuid(), request, {})
    return not could_ever_fit({line.device.uuid: line.room for line in lines}, job)
