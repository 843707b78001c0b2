"""The memory of a job: the sum over all processes of a program, held against a limit, and its peak.

The driver limits no job, and the pinned memory limit of MPS is per process. So the sum is taken from NVML
(nvmlDeviceGetComputeRunningProcesses: context included) every 0.2 s. A process that has left the program's tree, by a
double fork, counts too: it was seen in the tree before, or has the job's mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, cast, get_args

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, OperationFailed
from gpushare.base.model import GpuProcess
from gpushare.base.selection import Device
from gpushare.base.units import MIB, format_bytes, format_distinct, parse_memory_limit, parse_thread_percentage, quoted
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.process import signal_all, signal_if_same, starts_of
from gpushare.memory.ledger import Place
from gpushare.part import Part, Watch

MemoryAction = Literal["end", "warn", "pause"]
LOOK_SECONDS: Final = 0.2
# Close to its limit, a job is looked at more often.
_CLOSE_SECONDS: Final = 0.05
_CLOSE_SHARE: Final = 0.7
# Without a limit, only the peak is of interest.
_PEAK_SECONDS: Final = 2.0
_TOUCH_SECONDS: Final = 20.0
# A driver that does not answer may answer again: only then it is said that the limit is not enforced.
_UNKNOWN_SECONDS: Final = 2.0
# What a job that is about to end may allocate to do so.
_ENDING_BYTES: Final = 256 * MIB
# In the environment of the program and of all that it starts.
MARK: Final = "GPUSHARE_JOB"


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory of a job on each of its devices, and what happens above it; by default none is given.

    It counts all processes of the job, contexts included: in bytes, or in percent of all memory of the device.
    """

    bytes: int | None = None
    percent: float | None = None
    action: MemoryAction = "end"

    @property
    def is_given(self) -> bool:
        return self.bytes is not None or self.percent is not None

    def on(self, devices: Sequence[Device]) -> int | None:
        """Return the limit in bytes on each of some devices; None: none is given.

        Raises BadUsage: it is a part of GPUs of several sizes, or of one of unknown size (code ``bad_size``).
        """
        if self.percent is None:
            return self.bytes
        totals = {device.memory_total_bytes for device in devices}
        total = next(iter(totals))
        if len(totals) == 1 and total is not None:
            return int(total * self.percent / 100) // MIB * MIB
        message = f"--memory {self.percent:g}% differs between {', '.join(device.title for device in devices)}"
        if None in totals:
            message = f"the driver does not report the memory size of {devices[0].title}"
        raise BadUsage(message, "give a size: --memory 20G; or name one GPU: -g 0", code="bad_size")


def parse_budget(memory: str | None, over: str | None) -> MemoryBudget:
    """Return the values of ``--memory`` (``20G``, ``80%``) and ``--over``; None: an option is not given.

    Raises BadUsage: one is wrong (codes ``bad_size``, ``bad_over``).
    """
    if over is not None and over not in get_args(MemoryAction):
        raise BadUsage(f"{quoted(over)} is not an action", "give --over end, warn or pause", code="bad_over")
    action = cast("MemoryAction", over or "end")
    if memory is None:
        return MemoryBudget()
    if not memory.strip().endswith("%"):
        return MemoryBudget(bytes=parse_memory_limit(memory), action=action)
    try:
        return MemoryBudget(percent=parse_thread_percentage(memory), action=action)
    except BadUsage:
        raise BadUsage(
            f"--memory {quoted(memory)} is not a percentage of the GPU's memory", "give --memory 80%", code="bad_size"
        ) from None


class JobMemory(Part):
    """The memory of one job while it runs. ``say`` prints a sentence; ``place`` is its entry in the ledger.

    ``listed`` reads the processes on the GPU, if one look is for several jobs. ``mark`` is that of the same job on another
    GPU.
    """

    def __init__(
        self,
        host: Host,
        device: Device,
        *,
        limit_bytes: int | None = None,
        action: MemoryAction = "end",
        place: Place | None = None,
        say: Callable[[str], None] = lambda _: None,
        listed: Callable[[], Sequence[GpuProcess] | None] | None = None,
        mark: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._device, self._clock = host, device, clock
        self.limit_bytes, self._action, self.place, self._say = limit_bytes, action, place, say
        self._listed = listed or (lambda: host.nvml.processes(self._device.gpu.index))
        self.peak_bytes: int | None = None
        # Why the job was ended, for the error after its end.
        self.over: str | None = None
        self._over_bytes = 0
        # Whether the user has asked for the end.
        self.asked_to_end = False
        self._watch: Watch | None = None
        # The program's first process; 0: it has not started.
        self._program_pid, self._began = 0, self._clock()
        self.mark = mark or os.urandom(8).hex()
        # The PIDs of the job that were on the GPU, with their starts; other PIDs there; those that this part has stopped.
        self._family: dict[int, int] = {}
        self._strangers: set[int] = set()
        self._stopped: dict[int, int] = {}
        # Whether it was said that the job is above its limit.
        self._told = False
        # Why the sum is not known (None: it is known), when it was known last, and whether that was said.
        self._unknown: str | None = None
        self._known_at, self._told_unknown = 0.0, False
        self.due = self._touch_due = 0.0
        # Whether the job is swapped out: then only processes that it starts meanwhile count.
        self.away: Callable[[], bool] = lambda: False

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the mark: the job's processes inherit it, and are recognized by it outside the program's tree."""
        return {MARK: self.mark}

    def started(self, watch: Watch) -> None:
        """Begin to watch a program."""
        self._watch = watch
        self.begin(watch.program_pid)

    def begin(self, pid: int) -> None:
        """Begin to watch the program with this PID."""
        self._program_pid, self._began = pid, self._clock()
        self._hold_place()

    def _hold_place(self) -> None:
        """Let the program hold its place in the ledger, with its limit: until it ends, even if gpushare dies first."""
        if self.place is not None and self.limit_bytes is not None:
            with contextlib.suppress(GpushareError):
                self.place.tell_limit(self.limit_bytes, self._action)
        if self.place is not None:
            with contextlib.suppress(GpushareError):
                self.place.add(self._program_pid)

    def moved(self, device: Device) -> None:
        """Count on another device from now on: the job has moved there."""
        self._device = device

    def reserve(self, place: Place) -> None:
        """Hold this place in the ledger from now on, which was taken for this job, and leave the one before."""
        earlier, self.place = self.place, place
        self._hold_place()
        if earlier is not None:
            earlier.leave()

    def poll(self) -> bool:
        """Add up the job's memory; return whether the program is to be ended now."""
        now = self._clock()
        processes = self._processes()
        self.due = now + LOOK_SECONDS
        if self.away() and not processes:
            return False
        if self.limit_bytes is None:
            # Only the peak is of interest, and in a long job a look for it may be later.
            self.due = now + min(_PEAK_SECONDS, max(LOOK_SECONDS, (now - self._began) / 10))
        self._tell_unknown(processes, now)
        if processes is None:
            return False
        if processes and self.place is not None and now >= self._touch_due:
            # A reservation without use lapses.
            self._touch_due = now + _TOUCH_SECONDS
            self.place.touch()
        held = sum(process.memory_used_bytes or 0 for process in processes)
        if processes and all(process.memory_used_bytes is not None for process in processes):
            self.peak_bytes = max(held, self.peak_bytes or 0)
        if self.limit_bytes is not None and held > self.limit_bytes:
            return self._act_above_limit(processes, held, self.limit_bytes)
        self._told = False
        if self._stopped and processes and self._unknown is None:
            self._continue()
            self._say(f"the job holds {format_bytes(held)}, within its limit again: continued (SIGCONT)")
        if self.limit_bytes is not None and held > _CLOSE_SHARE * self.limit_bytes:
            self.due = now + _CLOSE_SECONDS
        return False

    def _tell_unknown(self, processes: list[GpuProcess] | None, now: float) -> None:
        """Say once that the limit cannot be checked because what the job holds is not known.

        ``processes`` None: `_processes` has noted why (``_unknown``).
        """
        if self.limit_bytes is None:
            return
        without = [process.pid for process in processes or () if process.memory_used_bytes is None]
        if without:
            self._unknown = f"the driver does not tell how much memory process {without[0]} has on {self._device.title}"
        elif processes is not None:
            self._unknown, self._told_unknown = None, False
        if self._unknown is None:
            self._known_at = now
        elif not self._told_unknown and now - self._known_at >= _UNKNOWN_SECONDS:
            self._told_unknown = True
            self._say(f"its limit of {format_bytes(self.limit_bytes)} cannot be checked: {self._unknown}")

    def _act_above_limit(self, processes: list[GpuProcess], held: int, limit: int) -> bool:
        """Stop a job above its limit, or warn of it, as ``--over`` says; return whether it is to be ended."""
        text = _over_text(processes, held, limit)
        if self._action == "end":
            self.over, self._over_bytes = text, held
            if self._watch is not None:
                # It is on the GPU now: prove that before it is gone, and before it is stopped: a stopped process of a simulated
                # host may hold the lock of the state, for which this look would wait without end.
                self._watch.poll()
            # It must not grow while it is ended; `release` lets those continue that handle the signal.
            self._stop()
            return True
        if not self._told:
            self._told = True
            if self._action == "pause":
                text += "; stopped (SIGSTOP): it cannot grow, and keeps what it has"
            self._say(text)
        if self._action == "pause":
            # Again each time: somebody may have continued it.
            self._stop()
        return False

    def _stop(self) -> None:
        """Stop all processes of the job with SIGSTOP, and note which they are."""
        below = starts_of(self._host.processes, self._host.processes.descendants(self._program_pid))
        for pid, started in {**self._strays(), **below}.items():
            with contextlib.suppress(NoPermission):
                if signal_if_same(self._host.processes, pid, started, signal.SIGSTOP):
                    self._stopped[pid] = started

    def _strays(self) -> dict[int, int]:
        """Return the processes that were on the device and have left the job's tree, with their starts."""
        alive = {pid: at for pid, at in self._family.items() if self._host.processes.alive(pid, at)}
        below = set(self._host.processes.descendants(self._program_pid)) if alive else set()
        return {pid: at for pid, at in alive.items() if pid not in below}

    def note_user_ends(self) -> None:
        """Note that the user has asked for the end of the program."""
        self.asked_to_end = True

    def grows(self) -> bool:
        """Return whether the job has grown since it was found above its limit and ended: then it gets no more time to end."""
        if self.over is None:
            return False
        held = sum(process.memory_used_bytes or 0 for process in self._processes() or ())
        return held > self._over_bytes + _ENDING_BYTES

    def release(self) -> Mapping[int, int]:
        """Let the program continue, which is about to end: a stopped process handles no signal.

        Return the processes to end with it that have left its tree, if the job ends because it is over its limit.
        """
        self._continue()
        return {} if self.over is None else self._strays()

    def _continue(self) -> None:
        """Let the processes that this part has stopped continue."""
        stopped, self._stopped = self._stopped, {}
        signal_all(self._host.processes, stopped, signal.SIGCONT)

    def leave(self) -> None:
        """Leave the ledger."""
        if self.place is not None:
            self.place.leave()

    def raise_end(self) -> None:
        """Raise OperationFailed if this part has ended the job, for its memory (code ``memory_limit``)."""
        if self.over is not None:
            raise OperationFailed(
                f"{self.over}: ended", "give it more with --memory; or only warn: --over warn", code="memory_limit"
            )

    def _processes(self) -> list[GpuProcess] | None:
        """Return the job's processes on the device; None: unknown, for the reason in ``_unknown``."""
        if self._host.processes.namespace_is_host() is False:
            self._unknown = "this PID namespace is not the host's"
            return None
        try:
            processes = self._listed()
        except GpushareError as error:
            self._unknown = error.message
            return None
        if processes is None:
            self._unknown = f"the driver does not list the processes of {self._device.title}"
            return None
        mig = self._device.mig
        # A process listed without an instance may be the job's: the job can only be in the instance that it was given.
        on_device = [
            process for process in processes if mig is None or process.gpu_instance_id in {None, mig.gpu_instance_id}
        ]
        # A PID that is no longer listed may come again as the job's.
        self._strangers &= {process.pid for process in on_device}
        return [process for process in on_device if self._belongs_to_job(process.pid)]

    def _belongs_to_job(self, pid: int) -> bool:
        """Return whether a process is the job's: below its program, seen there before, or with its mark."""
        if pid in self._family and self._host.processes.alive(pid, self._family[pid]):
            return True
        if pid in self._strangers:
            return False
        ancestry = self._host.processes.ancestry(pid)
        below = any(above == self._program_pid or above in self._family for above in ancestry)
        if below or (self._host.processes.environment(pid) or {}).get(MARK) == self.mark:
            self._family.update(starts_of(self._host.processes, [pid]))
            return True
        self._strangers.add(pid)
        return False


def _over_text(processes: Sequence[GpuProcess], held: int, limit: int) -> str:
    """Return in words by how much a job is above its limit, and which of its processes holds most."""
    largest = max(processes, key=lambda process: process.memory_used_bytes or 0)
    has, allowed = format_distinct(held, limit)
    text = f"the job holds {has}, over its limit of {allowed}"
    if len(processes) == 1:
        return f"{text} (process {largest.pid})"
    size = format_bytes(largest.memory_used_bytes or 0)
    return f"{text} ({len(processes)} processes; process {largest.pid} has {size})"
