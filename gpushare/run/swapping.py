"""A program that leaves the GPU and comes back by itself: while it is idle, in turns, or when production needs room."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Final, NamedTuple

from gpushare.base.errors import GpushareError, InUse
from gpushare.base.model import Gpu
from gpushare.base.selection import Device, select
from gpushare.base.units import GIB, format_bytes
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.process import cpu_time, main_thread_time
from gpushare.memory.admission import UserLimits
from gpushare.memory.cost import TURN_FACTOR, host_bytes, kept_share, most_out_seconds, swap_times
from gpushare.memory.leases import lease_of_others
from gpushare.memory.ledger import (
    Line,
    Patience,
    Place,
    Request,
    Reservation,
    line_of,
    lines_of,
    owners_of,
    reservations,
)
from gpushare.memory.limit import JobMemory
from gpushare.memory.move import check_single_rank, move, possible_targets
from gpushare.memory.room import bytes_to_come_in, client_limit
from gpushare.memory.swap import come_in, go_out, guarded, leaving_record, refuse_stopped_swap
from gpushare.memory.swapped import (
    BACK,
    GPU_MARGIN_BYTES,
    LOST,
    OUT,
    RETURNING,
    Swap,
    find_swap,
    forget_ended,
    has_room,
    locked,
    own_record,
    swaps,
)
from gpushare.part import Part, Watch
from gpushare.run.jobs import find_job, processes_to_swap
from gpushare.timeslice.slices import renew_slices

_LOOK_SECONDS: Final = 0.5
# How often the place in the line is checked while the job waits; it does no work meanwhile.
_WAITING_SECONDS: Final = 0.1
# A driver that refuses now is asked again after this time.
_AGAIN_SECONDS: Final = 30.0
# Jobs that take turns for days fill no log.
_SAID_TIMES: Final = 3
_MOST_AGAIN_SECONDS: Final = 600.0
# A job that came earlier waits so long for those that leave before it, and for as long as their copies take.
_PATIENCE_SECONDS: Final = 10.0
# What ends the job waits so long for another swap.
_RELEASE_SECONDS: Final = 10.0
# No reason to wait or to speak: another job of this user is on its way, which takes as long as its copy; or the job has
# nothing on the GPU yet.
_PASSING: Final = frozenset({"swap_busy", "no_context"})
# The first turn, before a switch is measured.
_FIRST_TURN_SECONDS: Final = 30.0
# Less of a CPU than this is idle, over some seconds: a notebook server that is asked for lists every 2 s, as browsers do,
# takes up to 16 ms at a time, 1 to 2 ms per second (jupyter_server 2.21).
_IDLE_CPU_SHARE: Final = 0.02
_IDLE_WINDOW_SECONDS: Final = 5.0
# Longer between two samples, a job was stopped, or could not leave: nothing is known of that time.
_MOST_BETWEEN_SECONDS: Final = 5.0
# CPU time of a process on the GPU that counts as work, in one sample, beyond what it uses while idle. The smallest cell of a
# notebook takes 3 to 4 ms in its kernel (ipykernel 7), one that does nothing .3 ms at most in .5 s.
_WAKING_SECONDS: Final = 0.002
_SMALL_TIMES: Final = 10
# In fewer samples, what it uses while idle is not known.
_LEAST_LEVELS: Final = 10
_SETTLING_SECONDS: Final = 2.0
# A job that comes back and does nothing on the GPU stays longer each time, at most so many times its idle time.
_MOST_IDLE_TIMES: Final = 16
# Growth is seen over this time, and in at least this number of samples.
_GROWTH_SECONDS: Final = 6.0
_GROWTH_LOOKS: Final = 3
# A job that leaves for production keeps so much of the GPU free, and comes back so long after production needed its room.
_MARGIN_BYTES: Final = GIB
_QUIET_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class SwapWish:
    """When a job leaves the GPU: at ``swap out`` alone, after this time without work, or in turns (None: by the switch)."""

    idle_seconds: float | None = None
    turns: bool = False
    turn_seconds: float | None = None
    # It goes to another GPU where that makes room for a job that waits.
    movable: bool = False


class Sample(NamedTuple):
    """What a policy decides on. Seconds are of a clock that only rises; unknown is None."""

    now: float
    # Since it left, or came.
    since: float
    # The job's GPU processes worked in the last window (percent of the SMs), and the CPU time of all its processes so far.
    busy_percent: int | None
    cpu: Mapping[int, float]
    # Free on the device now.
    free_bytes: int
    production_waits: bool
    # What the job itself has, on the GPU or out of it.
    held_bytes: int = 0
    # A production job waits, and has room only if this job leaves too.
    production_needs: bool = False
    # Somebody is on the device who does not leave for production, and so may be production.
    others_stay: bool = False
    # What jobs there have that came later, and so leave before this one.
    later_bytes: int = 0
    # The job's processes on the GPU or out of it, with the CPU time of their main threads so far.
    main_cpu: Mapping[int, float | None] = {}
    # The first waiting job that has room once all that take turns have left; and the first one if only this job leaves.
    next_in_turn: Reservation | None = None
    makes_room_for: Reservation | None = None


@dataclass
class Policy:
    """Decides when a job leaves, and when it wants to come back: by itself only with `gpushare swap`.

    ``waiting`` is what to say when it has to wait for room to come back; None: nothing.
    """

    waiting: str | None = field(default=None, kw_only=True)

    def leaves(self, _sample: Sample) -> bool:
        """Return whether a job that is on the GPU should leave."""
        return False

    def returns(self, _sample: Sample) -> bool:
        """Return whether a swapped-out job should come back when there is room."""
        return False

    def note_switch(self, seconds: float) -> None:
        """Note how many seconds it took to leave or to come back: turns are made long enough for that."""


@dataclass
class Idle(Policy):
    """Leaves after some time without work on the GPU and on the CPU, and comes back at its first work."""

    seconds: float
    say: Callable[[str], None] = lambda _: None
    waiting: str | None = field(
        default="it works again, and waits for room on the GPU; its next CUDA call waits until it is back", kw_only=True
    )
    _still_since: float | None = None
    # The last sample; and the window in which CPU time is added up: its start, and the sum so far.
    _before: Sample | None = None
    _window: tuple[float, float] | None = None
    # What its processes on the GPU use of a CPU while it is idle, sample by sample.
    _levels: deque[float] = field(default_factory=lambda: deque(maxlen=120))
    _out_since: float | None = None
    # CPU seconds of small requests since it left.
    _small_work: float = 0.0
    # How many times its idle time it stays: it may have come back for nothing.
    _stay_factor: int = 1
    _told: bool = False

    def leaves(self, sample: Sample) -> bool:
        """Return whether the job has been idle for long enough; to be asked of each sample while it is on the GPU."""
        earlier = self._before
        self._before = sample
        if self._out_since is not None:
            # It has just come back. If it does nothing now, it came back for nothing, and stays longer.
            earlier = self._out_since = self._still_since = None
            self._stay_factor = min(2 * self._stay_factor, _MOST_IDLE_TIMES)
        if sample.busy_percent:
            self._stay_factor = 1
        if sample.busy_percent is None and not self._told:
            self._told = True
            self.say("the driver does not say whether it works, so it stays on the GPU")
        if earlier is None or sample.busy_percent is None:
            self._still_since = self._window = None
            return False

        elapsed = max(1e-6, sample.now - earlier.now)
        is_observed = elapsed <= _MOST_BETWEEN_SECONDS
        if sample.busy_percent > 0 or self._has_used_cpu(earlier, sample, elapsed):
            self._window = self._still_since = None
            self._levels.clear()
            return False
        if not is_observed:
            # The time that was not observed does not count as idle.
            self._still_since = sample.now if self._still_since is None else self._still_since + elapsed
        elif self._would_wake(earlier, sample, elapsed):
            self._still_since = None
            return False
        elif self._still_since is None:
            self._still_since = earlier.now
        return sample.now - self._still_since >= self._stay_factor * self.seconds

    def _would_wake(self, earlier: Sample, sample: Sample, elapsed: float) -> bool:
        """Return whether the job uses so much of the CPU that it would come back if it was out: it would leave for nothing."""
        most_used = _most_used(earlier.cpu, sample.cpu, sample.main_cpu)
        is_level_known = len(self._levels) >= _LEAST_LEVELS
        would_wake = most_used >= _WAKING_SECONDS + self._idle_level() * elapsed
        self._levels.append(most_used / elapsed)
        return is_level_known and would_wake

    def _has_used_cpu(self, earlier: Sample, sample: Sample, elapsed: float) -> bool:
        """Return whether the job works on the CPU: its processes together use more than an idle job's, in a window of seconds."""
        used = sum(max(0.0, seconds - earlier.cpu.get(pid, 0.0)) for pid, seconds in sample.cpu.items())
        if elapsed > _MOST_BETWEEN_SECONDS:
            self._window = None
            return used > _IDLE_CPU_SHARE * elapsed
        # What is used adds up from sample to sample until the window is over; then the next sample begins a new one.
        window = min(_IDLE_WINDOW_SECONDS, max(elapsed, self.seconds))
        start, used_before = self._window or (earlier.now, 0.0)
        used += used_before
        self._window = None if earlier.now + elapsed - start >= window else (start, used)
        return used > _IDLE_CPU_SHARE * window

    def returns(self, sample: Sample) -> bool:
        """Return whether the job has worked since it began to leave: its next call of CUDA waits until it is back.

        To be asked of each sample while the job is out.
        """
        earlier = self._before
        self._before = sample
        is_first_look = self._out_since is None
        if self._out_since is None:
            self._out_since = sample.now
        if earlier is None:
            return False
        # While it left, and for a moment after, the driver's own threads work: only the main threads tell whether it did.
        if is_first_look or sample.now - self._out_since < _SETTLING_SECONDS:
            most_used = _most_used(earlier.main_cpu, sample.main_cpu, sample.main_cpu)
        else:
            most_used = _most_used(earlier.cpu, sample.cpu, sample.main_cpu)
        elapsed = sample.now - earlier.now
        idle_level = self._idle_level()
        # Many requests that are too small to be seen one by one: what is above twice the mean of idle time adds up.
        mean_level = sum(self._levels) / max(1, len(self._levels))
        ignored = max(idle_level, 2 * mean_level) * elapsed
        self._small_work = 0.0 if is_first_look else max(0.0, self._small_work + most_used - ignored)
        return most_used >= _WAKING_SECONDS + idle_level * elapsed or self._small_work >= _SMALL_TIMES * _WAKING_SECONDS

    def _idle_level(self) -> float:
        """Return the share of a CPU that a process on the GPU uses while it is idle: the 90th percentile, and a quarter more.

        Not the highest level: work as small as a rare peak of it would never bring the job back.
        """
        levels = sorted(self._levels)
        return 1.25 * levels[int(0.9 * (len(levels) - 1))] if levels else 0.0


def _most_used(before: Mapping[int, float | None], after: Mapping[int, float | None], pids: Iterable[int]) -> float:
    """Return the CPU time that the busiest of these processes has used from ``before`` to ``after``; 0.0: none is known."""
    used = (
        later - earlier
        for pid in pids
        if (later := after.get(pid)) is not None and (earlier := before.get(pid)) is not None
    )
    return max(0.0, max(used, default=0.0))


@dataclass
class Turns(Policy):
    """Leaves at the end of its turn if others wait for the device. ``seconds`` None: nine times the measured switch."""

    seconds: float | None
    say: Callable[[str], None] = lambda _: None
    # The last two: a way out and a way back.
    _switches: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    _warned: bool = False

    @property
    def switch_seconds(self) -> float | None:
        """Return how many seconds leaving and coming back take together; None: not measured yet."""
        return None if len(self._switches) < 2 else sum(self._switches)

    @property
    def turn_seconds(self) -> float:
        """Return how many seconds a turn lasts: as given, else nine times the measured switch, at first 30 s."""
        if self.seconds is not None:
            return self.seconds
        if self.switch_seconds is not None:
            return TURN_FACTOR * self.switch_seconds
        return _FIRST_TURN_SECONDS

    def leaves(self, sample: Sample) -> bool:
        """Return whether the job's turn is over and another job waits for the next one."""
        return sample.next_in_turn is not None and sample.now - sample.since >= self.turn_seconds

    def returns(self, _sample: Sample) -> bool:
        """Return True: it is back as soon as the line and the GPU have room for it."""
        return True

    def note_switch(self, seconds: float) -> None:
        """Note a switch, and warn once of turns that are too short for it."""
        self._switches.append(seconds)
        switch = self.switch_seconds
        if self._warned or self.seconds is None or switch is None or self.seconds >= TURN_FACTOR * switch:
            return
        self._warned = True
        loss = 100 * (1 - kept_share(self.seconds, switch))
        self.say(
            f"turns of {self.seconds:g} s lose about {loss:.0f} % of the time to switches of {switch:.1f} s; "
            f"give --swap turns={math.ceil(TURN_FACTOR * switch)}s or more"
        )


@dataclass
class IdleInTurns(Policy):
    """Leaves after some time without work, and at the end of its turn; the policy by which it left brings it back."""

    idle: Idle
    turns: Turns
    _brings_back: Policy | None = None

    def leaves(self, sample: Sample) -> bool:
        """Return whether the job is idle or its turn is over, and note which of them: that policy brings it back."""
        # Both are asked each time: each keeps what it has seen.
        is_idle = self.idle.leaves(sample)
        is_over = self.turns.leaves(sample)
        policy = self._brings_back = self.idle if is_idle else self.turns
        self.waiting = policy.waiting
        return is_idle or is_over

    def returns(self, sample: Sample) -> bool:
        return (self._brings_back or self.turns).returns(sample)

    def note_switch(self, seconds: float) -> None:
        self.turns.note_switch(seconds)


@dataclass
class ForProduction(Policy):
    """Leave when a production job waits for room, or the GPU would be full up to a margin before the job has left.

    Come back when production has not needed the room for a while, and more than the margin would stay free with the job
    back, even if production keeps growing until the job could be swapped out again.
    """

    # Since when the job could come back.
    _free_since: float | None = None
    # Seconds, and the memory that others have left free: with what this job has on the GPU.
    _seen: list[tuple[float, int]] = field(default_factory=list)

    def leaves(self, sample: Sample) -> bool:
        """Return whether production waits for what this job has, or would run out of memory before this job has left."""
        self._free_since = None
        # What this job takes or releases itself is no growth of production.
        self._note_free(sample, sample.free_bytes + sample.held_bytes)
        if sample.production_needs:
            return True
        if not sample.others_stay:
            # Jobs that all leave for production do not leave for each other.
            return False
        # Jobs that came later leave first (``later_bytes``), and production may go on growing meanwhile.
        lost_bytes = self._bytes_lost_per_second() * most_out_seconds(sample.held_bytes)
        return sample.free_bytes + sample.later_bytes - lost_bytes < _MARGIN_BYTES

    def _note_free(self, sample: Sample, bytes_left_by_others: int) -> None:
        """Note how much memory others leave free now, by which `_bytes_lost_per_second` sees production grow."""
        self._seen = [(at, free_bytes) for at, free_bytes in self._seen if sample.now - at <= _GROWTH_SECONDS]
        self._seen.append((sample.now, bytes_left_by_others))

    def _bytes_lost_per_second(self) -> float:
        """Return how fast the memory that others leave free shrinks now, in bytes per second.

        The largest step is left out: a program that starts takes much at once, and that is no growth.
        """
        steps = [
            (free_before - free_after, end - begin)
            for (begin, free_before), (end, free_after) in itertools.pairwise(self._seen)
            if end > begin
        ]
        if sum(lost > 0 for lost, _ in steps) < _GROWTH_LOOKS:
            return 0.0
        steps.remove(max(steps, key=lambda step: step[0]))
        return max(0.0, sum(lost for lost, _ in steps) / sum(seconds for _, seconds in steps))

    def returns(self, sample: Sample) -> bool:
        """Return whether production has not needed its room for a while; the ledger checks what is reserved."""
        self._note_free(sample, sample.free_bytes)
        # If no other job stays on the GPU, this job may need all of it: no margin.
        margin = 0.0
        if sample.others_stay:
            seconds_in, seconds_out = swap_times(sample.held_bytes).in_seconds, most_out_seconds(sample.held_bytes)
            # Twice: with less than one margin left, it would leave again at once.
            margin = 2 * _MARGIN_BYTES + self._bytes_lost_per_second() * (seconds_in + _QUIET_SECONDS + seconds_out)
        if sample.production_waits or sample.free_bytes < sample.held_bytes + margin:
            self._free_since = None
            return False
        if self._free_since is None:
            self._free_since = sample.now
        return sample.now - self._free_since >= _QUIET_SECONDS


class Swapping(Part):
    """Swaps a job by a policy. ``memory`` has its limit and its reservation; neither counts while it is swapped out."""

    def __init__(
        self,
        host: Host,
        device: Device,
        memory: JobMemory,
        place: Place,
        policy: Policy,
        say: Callable[[str], None],
        *,
        limits: UserLimits,
        movable: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._device, self._memory, self._policy, self._say = host, device, memory, policy, say
        self._limits, self._movable, self._clock = limits, movable, clock
        memory.away = lambda: self.out
        # What the job had asked for at its start, and its place now; None: it has given it up, or waits for none.
        self._asked = place.request
        self._place: Place | None = place
        # Waiting jobs that were passed once send this job out no more.
        self._patience = Patience()
        # Its program: the watch, and the first process.
        self._watch: Watch | None = None
        self._pid = 0
        # The record of the job while it is out or lost. ``_by_hand``: others took it out, so the policy does not bring it back.
        self._swap: Swap | None = None
        self._by_hand = False
        # When it left or came back the last time, and how often it left.
        self._since = clock()
        self.times_out = 0
        self.due = 0.0
        # After a failure: not before this time, and how long to wait after the next one.
        self._retry_at = 0.0
        self._retry_seconds = _AGAIN_SECONDS
        # What was said last; whether waiting production was told that the job stays.
        self._said: str | None = None
        self._told_stays = False
        # Since when production needs what this job has.
        self._needed_since: float | None = None

    @property
    def out(self) -> bool:
        """Return whether the job is in host memory."""
        return self._swap is not None

    def started(self, watch: Watch) -> None:
        """Note the program that is to be swapped from now on."""
        self._watch = watch
        self._pid = watch.program_pid
        self._since = self._clock()

    def poll(self) -> bool:
        """Note what others did with the job, and let the policy act; return False, as the program never has to end."""
        now = self._clock()
        if now < self.due:
            return False
        waits_in_line = self.out and self._place is not None
        self.due = now + (_WAITING_SECONDS if waits_in_line else _LOOK_SECONDS)
        # `Policy` itself decides nothing: such a job leaves and comes back by hand.
        acts_by_itself = self._movable or type(self._policy) is not Policy
        try:
            self._follow_others()
            if acts_by_itself and not self._by_hand and now >= self._retry_at:
                sample = self._read_sample(now)
                if sample is not None:
                    self._act(sample)
        except GpushareError as error:
            self._try_later(error)
        return False

    def _try_later(self, error: GpushareError) -> None:
        """After a failed swap let the policy try again later, each time after a longer pause; say each reason once."""
        if error.code in _PASSING:
            return
        self._retry_at = self._clock() + self._retry_seconds
        # Production does not wait for longer and longer.
        if not isinstance(self._policy, ForProduction):
            self._retry_seconds = min(2 * self._retry_seconds, _MOST_AGAIN_SECONDS)
        if error.message != self._said:
            self._said = error.message
            self._say(f"{error.message}; tried again from time to time")

    def _follow_others(self) -> None:
        """Take over what was done to the job by hand, by its user or by root: swapped out, brought in, or moved."""
        swap = find_swap(self._host, self._pid)
        if swap is None:
            if self.out and self._host.processes.identity(self._pid) is None:
                # The program itself has ended: that is said elsewhere.
                self._swap = None
            elif self.out:
                # Only the processes that were out have ended.
                self._note_return("what was out has ended")
        elif swap.state == BACK:
            if swap.gpu_uuid != self._device.uuid:
                self._continue_on(swap.gpu_uuid, "moved by hand")
            elif self.out:
                self._note_return("back on the GPU, brought in by hand")
        elif swap.state == LOST:
            if not self._by_hand:
                self._by_hand = True
                self._swap = swap
                self._say(
                    f"{swap.title} is lost: the driver could not put it back; end it: gpushare stop {swap.selector}"
                )
        elif not self.out:
            self._by_hand = True
            self._swap = swap
            sudo = "sudo " if swap.keeper_uid == 0 else ""
            self._say(
                f"out of the GPU, swapped out by hand; it comes back with: {sudo}gpushare swap in {swap.selector}"
            )

    def _note_return(self, reason: str) -> None:
        """Note that others have brought the job back, and reserve its memory again."""
        self._say(reason)
        self._since = self._clock()
        place = self._place
        if place is None:
            place = self._place_on(self._device.uuid)
        if not place.held:
            place.take(self._device.uuid)
            place.add(self._pid)
        self._note_on_gpu(place)

    def _note_on_gpu(self, place: Place) -> None:
        """Note that the job is on the GPU, with this place in the ledger."""
        self._place = place
        self._swap = None
        self._by_hand = False

    def _place_on(self, uuid: str) -> Place:
        """Return a new place in the ledger for what the job had reserved, on a GPU."""
        return Place(self._host, replace(self._asked, keys=(uuid,), client=False), self._patience)

    def _continue_on(self, uuid: str, reason: str, place: Place | None = None) -> None:
        """Note that the job is on another GPU: its limit, its place and its watch are there from now on.

        ``place`` was taken there before the move; None: nobody has taken one.
        """
        gpu = next((gpu for gpu in self._host.nvml.sweep() if gpu.uuid == uuid), None)
        if gpu is None:
            return
        self._device = Device(gpu=gpu)
        if place is None:
            place = self._place_on(uuid)
            place.take(uuid)
        self._memory.moved(self._device)
        self._memory.reserve(place)
        # Only now, when the program holds the new place.
        if self._place is not None:
            self._place.leave()
        self._note_on_gpu(place)
        if self._watch is not None:
            self._watch.device = self._device
        self._since = self._clock()
        self._say(f"on {self._device.title} now, {reason}")

    def _move_to_make_room(self, sample: Sample) -> bool:
        """Move the job to another GPU if that makes room for a job that waits; return whether it was moved."""
        if not self._movable or sample.makes_room_for is None or not sample.held_bytes:
            return False
        target = self._gpu_to_move_to(sample)
        if target is None:
            return False
        job = find_job(self._host, str(self._pid))
        processes = processes_to_swap(self._host, job)
        check_single_rank(self._host, job.title, processes)
        swap = leaving_record(self._host, job, self._device.uuid, processes, self._asked.memory_bytes)
        place = Place(self._host, replace(self._request_of_return(swap), keys=(target.uuid,)), self._patience)
        try:
            # Past the line of that GPU, because the job gives up as much room here to a job that waits.
            place.take(target.uuid)
            with self._guarded_lock():
                moved = move(self._host, swap, target.gpu, lambda: processes_to_swap(self._host, job))
        except BaseException:
            place.leave()
            raise
        self._continue_on(target.uuid, f"to make room for {sample.makes_room_for.title}", place)
        renew_slices(self._host, moved.identities(self._host), self._say)
        return True

    def _gpu_to_move_to(self, sample: Sample) -> Device | None:
        """Return the GPU with the most room for all that this job has reserved; None: none has it."""
        gpus = self._host.nvml.sweep()
        present_gpu = next((gpu for gpu in gpus if gpu.uuid == self._device.uuid), None)
        if present_gpu is None:
            return None
        ledger = reservations(self._host) or []
        usable = [
            Device(gpu=gpu)
            for gpu in possible_targets(present_gpu, gpus)
            if lease_of_others(self._host, gpu.uuid, self._limits) is None
        ]
        lines = lines_of(self._host, usable, ledger, limits=self._limits)
        best = max(lines.values(), key=lambda line: line.free_bytes, default=None)
        if best is None:
            return None
        if self._asked.memory_bytes is None:
            # A job without a size has all of its GPU.
            need = best.room.whole_bytes
        else:
            need = max(sample.held_bytes, self._asked.memory_bytes) + GPU_MARGIN_BYTES
        return best.device if best.free_bytes >= need else None

    def _act(self, sample: Sample) -> None:
        """Move the job, swap it out or bring it back, as the policy decides."""
        if self.out:
            # With a place in the line it has decided to come back already.
            if self._place is not None or self._policy.returns(sample):
                self._swap_in()
        elif not self._move_to_make_room(sample) and self._policy.leaves(sample):
            try:
                self._check_room_for_both(sample)
                self._swap_out()
            except GpushareError as error:
                if (
                    error.code not in _PASSING
                    and sample.production_waits
                    and self._place is not None
                    and not self._told_stays
                ):
                    # Waiting production is told once that it need not wait for this job.
                    self._told_stays = True
                    self._place.tell_that_it_stays()
                raise

    def _check_room_for_both(self, sample: Sample) -> None:
        """Raise unless host memory has room for the copies of this job and of the next one, if jobs take turns.

        Otherwise the next one could not leave, and this one never come back.

        Raises InUse: it has not (code ``host_memory``).
        """
        next_bytes = None
        if isinstance(self._policy, (Turns, IdleInTurns)) and sample.next_in_turn is not None:
            next_bytes = self._bytes_to_copy(sample.next_in_turn)
        if next_bytes is None:
            return
        need = host_bytes(sample.held_bytes + next_bytes)
        free = self._host.machine.free_memory(self._pid)
        if free is not None and free < need:
            raise InUse(
                f"the copies of this job ({format_bytes(sample.held_bytes)}) and of the next ({format_bytes(next_bytes)}) "
                f"do not both fit into host memory ({format_bytes(free)} available), so it stays on the GPU",
                "free host memory, or run them one after another: --wait instead of --swap turns",
                code="host_memory",
            )

    def _read_sample(self, now: float) -> Sample | None:
        """Return what the policy decides on, as of now; None: the GPU does not answer, or its memory is unknown."""
        # Read the ledger before the GPU: if a job leaves in between, its reservation still counts and its memory is free.
        ledger = reservations(self._host) or []
        gpu = self._host.nvml.gpu(self._device.gpu.index)
        total = gpu.memory_total_bytes
        line = line_of(self._host, Device(gpu=gpu), ledger, limits=self._limits)
        if line is None or total is None:
            # A job that left could not come back: nothing is admitted there.
            return None

        # The job itself.
        family = set(self._host.processes.descendants(self._pid))
        own_processes = [process for process in gpu.processes or () if process.pid in family]
        sm_percents = [process.sm_percent for process in own_processes]
        if self._swap is None:
            pids = [process.pid for process in own_processes]
            held_bytes = sum(process.memory_used_bytes or 0 for process in own_processes)
        else:
            pids = [pid for pid, _, _ in self._swap.images]
            held_bytes = self._swap.memory_bytes

        # The jobs that wait for its GPU; no room is made for one that can never fit.
        others = [
            job
            for job in ledger
            if job.waits
            and job.id != self._own_id
            and self._device.uuid in job.keys
            and (job.memory_bytes or 0) <= total
            and self._patience.must_follow(job)
        ]
        # Other users' production jobs do not count, except root's.
        production = [job for job in others if job.production and job.claim.uid in {0, self._host.uid}]
        later_bytes = self._later_bytes(line)

        def first_with_room_without(
            leaving: Callable[[Reservation], bool], jobs: Iterable[Reservation]
        ) -> Reservation | None:
            """Return the first of these waiting jobs that gets room if the jobs there that are ``leaving`` leave, and only then."""
            released = sum(size for job, size in line.held_by if leaving(job))
            free = line.room.memory_bytes - sum(running.memory_bytes for running in line.running)
            return next((job for job in jobs if free < line.room.bytes_of(job.memory_bytes) <= free + released), None)

        used = (gpu.memory_used_bytes or 0) + (gpu.memory_reserved_bytes or 0)
        return Sample(
            now=now,
            since=self._since,
            busy_percent=None if None in sm_percents else sum(percent or 0 for percent in sm_percents),
            cpu={pid: spent for pid in family if (spent := cpu_time(pid)) is not None},
            free_bytes=max(0, total - used),
            production_waits=bool(production),
            held_bytes=held_bytes,
            production_needs=self._is_needed(production, line, later_bytes),
            others_stay=_others_stay(self._host, gpu, line, family),
            later_bytes=later_bytes,
            main_cpu={pid: main_thread_time(pid) for pid in pids},
            next_in_turn=first_with_room_without(lambda job: job.turns, others),
            makes_room_for=first_with_room_without(
                lambda job: job.id == self._own_id, [job for job in others if job.count == 1]
            ),
        )

    @property
    def _own_id(self) -> str | None:
        """Return the id of the job's place in the ledger; None: it has none."""
        return None if self._place is None else self._place.id

    def _bytes_to_copy(self, job: Reservation) -> int | None:
        """Return how much host memory a waiting job will need; None: it is in host memory already, or that is unknown."""
        # Of other users' jobs it is not known whether they are in host memory already.
        if job.claim.uid != self._host.uid:
            return None
        pids_out = [pid for swap in swaps(self._host) if swap.state == OUT for pid, _, _ in swap.images]
        is_out = any(job.claim.pid in self._host.processes.ancestry(pid) for pid in pids_out)
        return None if is_out else job.memory_bytes

    def _later_bytes(self, line: Line) -> int:
        """Return how many bytes the jobs hold that leave before this one: jobs that leave for production and came later."""
        ids = [job.id for job in line.holders]
        if self._own_id not in ids:
            return 0
        later = line.held_by[ids.index(self._own_id) + 1 :]
        return sum(size for job, size in later if self._leaves_for_production(job))

    def _leaves_for_production(self, job: Reservation) -> bool:
        """Return whether a job will leave for this user's production: it may, has not told that it stays, and is this user's."""
        return job.leaves and not job.stays and job.claim.uid == self._host.uid

    def _is_needed(self, production: Sequence[Reservation], line: Line, later_bytes: int) -> bool:
        """Return whether this job has to leave so that the waiting ``production`` jobs have room.

        Jobs that came later leave first, and release ``later_bytes``. If that would be enough but they do not leave, this job
        leaves too, after a while.
        """
        released = sum(
            size
            for job, size in line.held_by
            if job.id == self._own_id or job.turns or self._leaves_for_production(job)
        )
        # A production job that needs more than that waits for jobs that stay: this job does not leave for it.
        sizes = [line.room.bytes_of(job.memory_bytes) for job in production]
        need = sum(size for size in sizes if size <= line.free_bytes + released)
        if need <= line.free_bytes:
            self._needed_since = None
            return False
        if self._needed_since is None:
            # Seen once: a place may just be changing hands.
            self._needed_since = self._clock()
            return False
        if need > line.free_bytes + later_bytes:
            return True
        waited = self._clock() - self._needed_since
        return waited >= _PATIENCE_SECONDS + most_out_seconds(later_bytes)

    def _swap_out(self) -> None:
        """Swap the job out, and give up its place in the ledger."""
        job = find_job(self._host, str(self._pid))
        processes = processes_to_swap(self._host, job)
        swap = leaving_record(self._host, job, self._device.uuid, processes, self._asked.memory_bytes)
        began = self._clock()
        with self._guarded_lock():
            self._swap = go_out(self._host, swap, lambda: processes_to_swap(self._host, job))
        self.times_out += 1
        self._note_switch(began, f"out of the GPU: {format_bytes(self._swap.memory_bytes)} to host memory")
        if self._place is not None:
            self._place.leave()
            self._place = None
            self._told_stays = False

    @contextlib.contextmanager
    def _guarded_lock(self, seconds: float = 0.0) -> Iterator[None]:
        """Hold the lock of swaps, with a guard that completes a swap if gpushare is killed. Raises InUse: no lock in time."""
        # Tried first, so that no guard is started in vain.
        with locked(self._host, seconds=seconds):
            pass
        with guarded(self._host), locked(self._host, seconds=seconds):
            yield

    def _swap_in(self, seconds: float = 0.0) -> None:
        """Bring the job back if its reservation and the GPU have room for it; else it waits in the line for the next try."""
        swap = None if self._swap is None else find_swap(self._host, self._swap.pid)
        if swap is None or swap.state not in {OUT, RETURNING}:
            return
        swap = own_record(self._host, swap)
        # Before it takes a place: while it is stopped, others can have the room.
        refuse_stopped_swap(self._host, swap)
        if self._place is None:
            self._place = Place(self._host, self._request_of_return(swap), self._patience)
        has_place = bool(self._place.held) or self._try_to_take(self._place)
        # Others may have taken what is reserved, if gpushare did not start them.
        if not has_place or has_room(self._host, swap, swap.memory_bytes) is False:
            if self._policy.waiting is not None and self._policy.waiting != self._said:
                self._said = self._policy.waiting
                self._say(self._said)
            return
        began = self._clock()
        with self._guarded_lock(seconds):
            back = come_in(self._host, swap)
        # Only now: the reservation of a swapped-out job does not count.
        self._place.add(self._pid)
        self._note_on_gpu(self._place)
        self._note_switch(began, f"back on the GPU: {format_bytes(swap.memory_bytes)}")
        renew_slices(self._host, back.identities(self._host), self._say)

    def _request_of_return(self, swap: Swap) -> Request:
        """Return what the job asks for to come back: as much as it had reserved, and enough for what it holds."""
        gpu = self._host.nvml.gpu(self._device.gpu.index)
        size = bytes_to_come_in(self._host, Device(gpu=gpu), swap.memory_bytes, self._asked.memory_bytes)
        return replace(self._asked, memory_bytes=size, keys=(self._device.uuid,), client=False)

    def _try_to_take(self, place: Place) -> bool:
        """Take a place on the device if it is the job's turn; return whether it has it."""
        devices = select(self._device.selector, self._host.nvml.sweep())
        clients = {device.uuid: client_limit(self._host, device) for device in devices}
        # A limit that was lowered meanwhile must not keep it out.
        limits = self._limits.at_least(os.geteuid(), place.request.memory_bytes)
        return place.try_to_take(devices, clients, limits)

    def _note_switch(self, began: float, text: str) -> None:
        """Note that the job has left or come back since ``began`` (by the clock), and say so the first times."""
        self._since = self._clock()
        self._said = None
        self._retry_seconds = _AGAIN_SECONDS
        seconds = self._since - began
        self._policy.note_switch(seconds)
        if self.times_out <= _SAID_TIMES:
            text += f" in {seconds:.1f} s"
            if self.times_out == _SAID_TIMES and not self.out:
                text += "; further ones are not reported"
            self._say(text)

    def release(self) -> Mapping[int, int]:
        """Bring the job back if there is room: out of the GPU it cannot handle the signal that ends it. It has no strays."""
        with contextlib.suppress(GpushareError):
            self._follow_others()
            if self.out:
                self._swap_in(_RELEASE_SECONDS)
        return {}

    def leave(self) -> None:
        """Give back what the job has reserved, and forget the records of swapped jobs that have ended."""
        if self._place is not None:
            self._place.leave()
        forget_ended(self._host)


def _others_stay(host: Host, gpu: Gpu, line: Line, family: set[int]) -> bool:
    """Return whether a process on the GPU does not leave for production: production itself, or an unknown program."""
    leaving = [job for job in line.holders if job.leaves]
    processes_leaving = owners_of(host, leaving, (process.pid for process in gpu.processes or ()))
    return any(process.pid not in family and process.pid not in processes_leaving for process in gpu.processes or ())
