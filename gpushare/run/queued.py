"""A program with a place in the ledger of memory: waits for room, is held to its limit, and waits again with more."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpushare.base.errors import OperationFailed
from gpushare.base.selection import Device, titles
from gpushare.base.units import MIB, format_bytes, format_duration
from gpushare.base.values import dataclass
from gpushare.host.claims import claims_are_shared
from gpushare.host.host import Host
from gpushare.host.records import SHARED_DIRECTORIES
from gpushare.memory.admission import UserLimits
from gpushare.memory.ledger import Line, Place, Request
from gpushare.memory.limit import JobMemory, MemoryBudget
from gpushare.memory.peaks import Profile, keep_profile, known_peak
from gpushare.memory.room import RoomAnswer, best_first, check_fits, check_limit_now, outlook, read_lines, wait_for_room
from gpushare.mps.limits import Limits, client_memory
from gpushare.run.jobs import living_productions
from gpushare.run.program import ENDED_BY_USER, QueueOptions, RunOptions, step_of_run
from gpushare.run.swapping import ForProduction, Idle, IdleInTurns, Policy, Swapping, Turns
from gpushare.show.waiting import waiting_line

# A program that ran out of memory gets a fifth more.
MORE: Final = 1.2
# What CUDA, its libraries, PyTorch, JAX and TensorFlow say; not what Java and Node.js say of their heaps.
_NO_MEMORY: Final = re.compile(
    rb"(?<!heap )out[ _]of[ _]memory|(?<!java\.lang\.)OutOfMemoryError|cudaErrorMemoryAllocation"
    rb"|OOM when allocating|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_TRACEBACK: Final = b"Traceback (most recent call last):"
_EXCEPTION: Final = re.compile(rb"^[\w.]{1,200}(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)
# After these, a traceback belongs to the exception before it, or to another thread or process.
_OF_ANOTHER: Final = re.compile(
    rb"During handling of the above|direct cause of the following|Exception ignored in|Exception in thread|ChildFailedError"
)
# The host's memory is short, not the GPU's.
_KILLED: Final = 128 + signal.SIGKILL
_TAIL_BYTES: Final = 64 << 10
# One that its user ended before may not have reached its peak.
_LONG_SECONDS: Final = 60.0


def _size_with_more(size: int) -> int:
    """Return what a program asks for next if it ran out of memory with this size."""
    return max(size + MIB, int(size * MORE) // MIB * MIB)


def lacked_memory(text: bytes) -> bool:
    """Return whether a program failed for want of GPU memory, by the end of its stderr or log (``text``).

    A message about memory does not count if the program went on after it, and failed later by another Python exception.
    """
    ends = [match.end() for match in _NO_MEMORY.finditer(text)]
    if not ends:
        return False
    after = text[ends[-1] :]
    # What called the program, or gpushare itself in a log, may have printed lines after the exception.
    exception = _EXCEPTION.search(after.rpartition(_TRACEBACK)[2])
    failed_later = _TRACEBACK in after and exception is not None and not _OF_ANOTHER.search(after)
    return not failed_later


def _size_of(log: Path | None) -> int:
    """Return the size of a log; 0: there is none yet, or it cannot be read."""
    with contextlib.suppress(OSError):
        return 0 if log is None else log.stat().st_size
    return 0


def _end_of_log(log: Path, since: int) -> bytes:
    """Return the end of what was appended to a log after it had the size ``since``; empty if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(since, _size_of(log) - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)
    return b""


class ErrorTail:
    """Passes a program's stderr on to ours, and keeps its end, which tells one that ran out of memory."""

    def __init__(self) -> None:
        self._read, self.descriptor = os.pipe()
        os.set_inheritable(self.descriptor, True)
        self._tail = b""
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        """Copy what the program writes to our stderr until it closes its own, in a thread; keep the end of it."""
        with contextlib.suppress(OSError):
            while text := os.read(self._read, 1 << 16):
                self._tail = (self._tail + text)[-_TAIL_BYTES:]
                # A closed stderr must not end the program.
                with contextlib.suppress(OSError):
                    while text:
                        # Another program may have made it non-blocking.
                        select.select([], [2], [])
                        with contextlib.suppress(BlockingIOError):
                            text = text[os.write(2, text) :]
        os.close(self._read)

    def ran_out_of_memory(self) -> bool:
        """Return whether the program failed for want of GPU memory, by the end of its stderr. It has ended: closes the pipe."""
        os.close(self.descriptor)
        # A process that was left behind may keep it open.
        self._thread.join(1.0)
        return lacked_memory(self._tail)


class _Run(NamedTuple):
    """How one run of the program has ended: by an exit code, or for its memory; and whether it is to be started again."""

    code: int | None
    error: OperationFailed | None
    again: bool


@dataclass
class Queued:
    """One program that needs memory on some of these devices.

    ``request`` is what it asks the ledger for, without the size and the devices. ``start`` runs it on the devices that it has
    got, with the given options, and returns its exit code; in a dry run, its plan.
    """

    host: Host
    devices: Sequence[Device]
    command: Sequence[str]
    options: RunOptions
    queue: QueueOptions
    budget: MemoryBudget
    request: Request
    start: Callable[[Sequence[Device], RunOptions], Any]
    say: Callable[[str], None]
    # What users may reserve together on a GPU, by uid.
    limits: UserLimits
    quiet: bool

    @property
    def job_bytes(self) -> int | None:
        """Return the memory of the job on each device; None: no limit was given. Raises BadUsage, as `MemoryBudget.on`."""
        return self.budget.on(self.devices)

    def run(self) -> int | None:
        """Run the program; if it ran out of memory, with ``--requeue`` again with more. Return its exit code.

        Raises:
            BadUsage: it fits on none of the devices (code ``never_fits``).
            NoPermission: it is more than this user may reserve (code ``over_user_limit``).
            InUse: no room in time (code ``no_room``).
            OperationFailed: it was ended for its memory (code ``memory_limit``).
        """
        size = self._size_to_reserve()
        while True:
            last = self._run_once(size)
            if last.again and size is not None:
                more = self._more_that_fits(size)
                if more is not None:
                    size = more
                    self.say(f"it ran out of memory, and waits again for {format_bytes(size)}")
                    continue
                self.say(f"it ran out of memory at its maximum ({format_bytes(size)}): not started again")
            if last.error is not None:
                raise last.error
            return last.code

    def _mps_limits(self, limit_bytes: int | None) -> Limits:
        """Return the limits of the program; as a client of MPS it also gets a memory limit from that of its job.

        A job that is only to be warned of, or paused, gets none: CUDA refuses a client memory above it.
        """
        if limit_bytes is None or not self.request.client or self.budget.action != "end":
            return self.options.limits
        return replace(self.options.limits, memory_limit_bytes=client_memory(limit_bytes))

    def _more_that_fits(self, size: int) -> int | None:
        """Return what the job asks for next if it ran out of memory with a size; None: it had all that it may have."""
        largest = self._largest_possible()
        if largest is None:
            return _size_with_more(size)
        return None if size >= largest else min(_size_with_more(size), largest)

    def _largest_possible(self) -> int | None:
        """Return all that this job may have on one of its devices; None: unknown."""
        lines = read_lines(self.host, self.devices, self.limits)
        # More would never start, for as long as what is there without a job is there.
        largest = max((line.room.whole_bytes for line in lines), default=None)
        bounds = [bound for bound in (largest, self.limits.get(os.geteuid())) if bound is not None]
        return min(bounds) // MIB * MIB if bounds else None

    def plan(self) -> tuple[Any, RoomAnswer | None]:
        """Return the plan of a dry run, and whether the job would start now (None: it does not wait). Nothing is changed.

        Raises:
            BadUsage, NoPermission: as `run`.
        """
        size = self._size_to_reserve()
        ranked = self._ranked_devices(size)
        candidates = [device for device, _ in ranked] or list(self.devices)
        request = self._request(size, candidates)
        lines = read_lines(self.host, candidates, self.limits)
        check_fits(lines, request)
        room = None
        if self.queue.wait:
            reasons = {device.uuid: text for device, text in ranked}
            room = outlook(self.host, candidates, request, self.limits, reasons)
        uuids = () if room is None else room.device_uuids
        by_uuid = {device.uuid: device for device in candidates}
        # Those that a job that waits would take now.
        devices = [by_uuid[uuid] for uuid in uuids if uuid in by_uuid] or candidates[: self.request.count]
        if room is None:
            planned = [line for line in lines if line.device in devices]
            check_limit_now(planned, request)
            self._say_short_of_room(planned, size)
        options = replace(
            self.options,
            limits=self._mps_limits(self.job_bytes),
            before=(*self.options.before, *map(step_of_run, self._texts_before(request, candidates))),
            meanwhile=tuple(map(step_of_run, self._texts_meanwhile(size))),
        )
        return self.start(devices, options), room

    def _request(self, size: int | None, devices: Sequence[Device]) -> Request:
        """Return what the job asks the ledger for, on some of these devices."""
        return replace(self.request, memory_bytes=size, keys=tuple(device.uuid for device in devices))

    def _texts_before(self, request: Request, devices: Sequence[Device]) -> Iterator[str]:
        """Yield what a dry run says happens before the program starts."""
        count = self.request.count
        size = format_bytes(request.memory_bytes)
        if self.queue.wait:
            where = titles(devices)
            if len(devices) > count:
                where = f"{'one' if count == 1 else count} of {where}"
            has = "has"
            if count > 1:
                has = "have"
                size += " each"
            room = "no other jobs" if request.memory_bytes is None else f"room for {size}"
            most = "" if self.queue.seconds is None else f", for {format_duration(self.queue.seconds)} at most"
            yield f"wait until {where} {has} {room}, first come first served{most}; reserve it"
        elif request.memory_bytes:
            yield f"reserve {size} on {titles(devices[:count])}"

    def _texts_meanwhile(self, size: int | None) -> Iterator[str]:
        """Yield what a dry run says may happen while the program runs."""
        job_bytes = self.job_bytes
        queue = self.queue
        if job_bytes is not None:
            action = {"end": "end it", "warn": "warn", "pause": "stop it (SIGSTOP)"}[self.budget.action]
            limit = format_bytes(job_bytes)
            where = "" if self.request.count == 1 else " on one of its GPUs"
            yield f"{action} if its processes together hold more than {limit}{where} (added up five times a second)"
        swap = queue.swap
        if swap is not None and swap.idle_seconds is not None:
            yield f"swap it out after {format_duration(swap.idle_seconds)} without work, and back in at its first work"
        if swap is not None and swap.movable:
            yield "move it to another GPU where that makes room for a job that waits"
        if swap is not None and swap.turns:
            turn = "nine times the measured switch" if swap.turn_seconds is None else format_duration(swap.turn_seconds)
            yield f"swap it out after its turn ({turn}) if others wait, and back in when it is its turn again"
        if queue.for_production:
            yield "swap it out when a production job needs room, and back in when there is room again"
        if queue.run_seconds is not None:
            yield f"end it after {format_duration(queue.run_seconds)}"
        next_size = self._more_that_fits(size) if queue.requeue and size is not None else None
        if next_size is not None:
            yield f"if it runs out of memory, wait again for {format_bytes(next_size)}"

    def _size_to_reserve(self) -> int | None:
        """Return the bytes that the job reserves: those given, else the peak of earlier runs here; say which of them.

        None: neither is known, so the job needs a GPU without other jobs. 0: it does not wait, so it reserves nothing.
        """
        given_bytes = self.job_bytes
        if given_bytes is not None or not self.queue.wait:
            return given_bytes or 0
        peak = known_peak(self.host, self.devices, [self.command])
        if peak is None:
            self.say(
                "its memory is not known: it waits for a GPU without other jobs; to share one, say with --memory how much it needs"
            )
            return None
        size = peak.memory_bytes
        reason = "the most that this command has used here"
        if peak.short:
            reason = "a fifth more than it had when it ran out of memory"
            limit = self._largest_possible()
            size = _size_with_more(size) if limit is None else min(_size_with_more(size), limit)
        self.say(f"it reserves {format_bytes(size)}, {reason}")
        return size

    def _run_once(self, size: int | None) -> _Run:
        """Run the program once, with ``size`` bytes reserved on each device (None: all of it), and keep its peak."""
        devices, place = self._take_devices(size)
        # Started again with a larger size, its limit grows with that.
        limit = None if self.job_bytes is None else max(self.job_bytes, size or 0)
        memory = JobMemory(
            self.host, devices[0], limit_bytes=limit, action=self.budget.action, place=place, say=self.say
        )
        others = [
            JobMemory(self.host, other, limit_bytes=limit, action=self.budget.action, say=self.say, mark=memory.mark)
            for other in devices[1:]
        ]
        swapping = self._swapping_part(devices[0], memory, place)
        parts = (*self.options.parts, memory, *(() if swapping is None else (swapping,)), *others)
        log = self.options.log
        log_size = _size_of(log)
        tail: ErrorTail | None = None
        code: int | None = None
        over_limit: OperationFailed | None = None
        began = time.monotonic()
        try:
            options = replace(self.options, limits=self._mps_limits(limit), parts=parts)
            if self.queue.requeue and log is None:
                tail = ErrorTail()
                options = replace(options, stderr=tail.descriptor)
            code = self.start(devices, options)
        except OperationFailed as error:
            if error.code != "memory_limit":
                raise
            over_limit = error
        finally:
            if swapping is not None:
                swapping.leave()
            memory.leave()
            if log is None:
                said_so = tail is not None and tail.ran_out_of_memory()
            else:
                said_so = self.queue.requeue and lacked_memory(_end_of_log(log, log_size))

        # What its user ends has not run out of memory, whatever it has said before.
        is_own_failure = code not in {0, _KILLED} and not memory.asked_to_end
        memories = (memory, *others)
        ran_out = any(each.over is not None for each in memories) or (said_so and is_own_failure)
        has_finished = code == 0 or (code in ENDED_BY_USER and time.monotonic() - began >= _LONG_SECONDS)
        # With all of the GPU (None) it was not short of what it reserved: there is no more.
        is_short = ran_out and size is not None
        if has_finished or is_short:
            self._keep_peak(devices[0], memories, short=is_short)
        return _Run(code, over_limit, again=ran_out and self.queue.requeue and not memory.asked_to_end)

    def _keep_peak(self, device: Device, memories: Sequence[JobMemory], *, short: bool) -> None:
        """Keep the most that the job has held on one of its devices, for the next run of this command."""
        peak = max((memory.peak_bytes for memory in memories if memory.peak_bytes is not None), default=None)
        if peak is not None:
            keep_profile(self.host, device, self.command, Profile(memory_bytes=peak, short=short))

    def _swapping_part(self, device: Device, memory: JobMemory, place: Place) -> Swapping | None:
        """Return the part that swaps the job; None: it never leaves the GPU by itself."""
        policy = self._policy()
        if policy is None:
            return None
        movable = self.queue.swap is not None and self.queue.swap.movable
        return Swapping(self.host, device, memory, place, policy, self.say, limits=self.limits, movable=movable)

    def _policy(self) -> Policy | None:
        """Return when the job leaves the GPU by itself; None: never."""
        swap = self.queue.swap
        if swap is None:
            return ForProduction() if self.queue.for_production else None
        turns = Turns(swap.turn_seconds, self.say) if swap.turns else None
        idle = None if swap.idle_seconds is None else Idle(swap.idle_seconds, self.say)
        if turns is not None and idle is not None:
            return IdleInTurns(idle, turns)
        return turns or idle or Policy()

    def _take_devices(self, size: int | None) -> tuple[Sequence[Device], Place]:
        """Enter the ledger, wait for room if that was asked for, and return the devices and the place there."""
        ranked = self._ranked_devices(size)
        devices = [device for device, _ in ranked] or list(self.devices)
        first_devices = devices[: self.request.count]
        place = Place(self.host, self._request(size, devices))
        if not self.queue.wait:
            self._take_now(place, first_devices, size)
            return first_devices, place
        devices_taken = self._wait_for_room(place, devices, size)
        if ranked:
            # As it is now: the job may have waited for long.
            size_of = "all of it" if size is None else format_bytes(size)
            for device, text in self._best_first(devices_taken, size, place):
                self.say(f"{device.title}: {text}; {size_of} reserved")
        return devices_taken, place

    def _wait_for_room(self, place: Place, devices: Sequence[Device], size: int | None) -> Sequence[Device]:
        """Wait in the line until some of the devices have room, and return those that were taken."""
        if not claims_are_shared(self.host):
            self.say(
                "other users' jobs are not visible in this line: neither "
                f"{' nor '.join(map(str, SHARED_DIRECTORIES))} is root-owned with mode 1777"
            )
        with waiting_line(self.say, quiet=self.quiet) as draw:
            return wait_for_room(
                self.host,
                place,
                devices,
                self.queue.seconds,
                self.limits,
                draw,
                best=lambda some: [device for device, _ in self._best_first(some, size, place)],
            )

    def _take_now(self, place: Place, devices: Sequence[Device], size: int | None) -> None:
        """Take devices whether or not they have room; say where they have not.

        Raises:
            InUse: with the user's other jobs it is more than this user may reserve (code ``no_room``).
        """
        # Held before the look: of two jobs that start at once, at least one sees the other.
        place.take(*(device.uuid for device in devices))
        try:
            lines = read_lines(self.host, devices, self.limits, place)
            check_fits(lines, place.request, when_empty=self.request.count > 1)
            check_limit_now(lines, place.request)
        except BaseException:
            place.leave()
            raise
        self._say_short_of_room(lines, size)

    def _say_short_of_room(self, lines: Sequence[Line], size: int | None) -> None:
        """Say which devices have less free memory than the job reserves."""
        for line in lines:
            if size and line.free_bytes < size:
                self.say(
                    f"{line.device.title} has {format_bytes(line.free_bytes)} free to reserve, and this job reserves "
                    f"{format_bytes(size)}: it may run out of memory; to start when there is room: --wait"
                )

    def _ranked_devices(self, size: int | None) -> list[tuple[Device, str]]:
        """Return the devices, best first, with the reasons; empty if there is only one."""
        return self._best_first(self.devices, size) if len(self.devices) > 1 else []

    def _best_first(
        self, devices: Sequence[Device], size: int | None, place: Place | None = None
    ) -> list[tuple[Device, str]]:
        """Return those of these devices that the job would take, best first, with the reasons."""

        def productions(device: Device) -> list[str]:
            return [job.name for job in living_productions(self.host, device)]

        return best_first(self.host, devices, productions, self.limits, self.command, place, self.request.count, size)
