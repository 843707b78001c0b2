"""A part of a job: what it has besides its program and its share of a GPU.

A limit of memory, a time-slice, a record, a pause for production, a container: each is one `Part`. A running job is a
share and a list of parts (`run.program.Session`).
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from typing import Final

from gpushare.base.model import GpuProcess
from gpushare.base.selection import Device
from gpushare.base.values import dataclass
from gpushare.host.host import Host

# The daemon logs every conversation, so ask often only while a program is likely to create its context.
_FIRST_SECONDS: Final = 0.1
_SPACING: Final = ((5.0, 0.25), (30.0, 1.0), (float("inf"), 5.0))


def spacing(age: float) -> float:
    """Return the seconds between two looks at a program of this age that has not been seen inside."""
    return next(seconds for until, seconds in _SPACING if age < until)


def memory_held(processes: Iterable[GpuProcess]) -> int | None:
    """Return the bytes that processes hold together on their GPU; None: there are none, or that of one is unknown."""
    sizes = [process.memory_used_bytes for process in processes]
    return None if not sizes or None in sizes else sum(size or 0 for size in sizes)


def _nobody(_pid: int, _started: int | None) -> None:
    """Tell nobody: there is no guard."""


@dataclass
class Watch(abc.ABC):
    """Where a program's processes are, as far as known; `poll` updates it."""

    host: Host
    device: Device
    program_pid: int
    started: float = field(default_factory=time.monotonic)
    # Processes that were seen inside the share, and outside it.
    attached: Collection[int] = ()
    outside: set[int] = field(default_factory=set)
    # Kept waiting by the daemon, because another user's clients hold the server.
    pending: set[int] = field(default_factory=set)
    daemon_gone: bool = False
    # What is to be reported, once.
    news: list[str] = field(default_factory=list)
    # The same, of what is not as it was asked for.
    troubles: list[str] = field(default_factory=list)
    # The most memory that its processes held together at a look (bytes), and how many looks saw some.
    peak_bytes: int | None = None
    peak_looks: int = 0
    # Called with a process and its start before it is stopped.
    tell: Callable[[int, int | None], None] = _nobody
    # What is signalled instead of the program, and passes signals on: the client of a container engine.
    client_pid: int | None = None
    # Seen outside by the last look. Two must agree: the lists of the daemon and NVML are not of the same moment.
    _suspects: set[int] = field(default_factory=set)
    _due: float = 0.0

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return the indexes of the GPUs that the program has."""
        return (self.device.gpu.index,)

    @property
    def signalled_pid(self) -> int:
        """Return the process that is ended, with its descendants."""
        return self.client_pid or self.program_pid

    @property
    def seconds(self) -> float:
        """Return how long until the next poll."""
        return max(self._due, self.started + _FIRST_SECONDS) - time.monotonic()

    def poll(self) -> None:
        """Look for the program's processes, and say when to do so again."""
        self.find_processes()
        self._due = time.monotonic() + self.wait()

    def wait(self) -> float:
        """Return the seconds until the next look."""
        return 5.0 if self.attached else spacing(time.monotonic() - self.started)

    @abc.abstractmethod
    def find_processes(self) -> None:
        """Look for the program's processes."""

    def note_memory(self, processes: Iterable[GpuProcess]) -> None:
        """Note the memory of the program's processes on its device."""
        held = memory_held(processes)
        if held is not None:
            self.peak_bytes = max(self.peak_bytes or 0, held)
            self.peak_looks += 1

    def mps_fault(self) -> bool:
        """Return whether its MPS server or daemon has died, or had a fatal GPU error, since the program was started."""
        return False

    def settle(self) -> None:  # noqa: B027 - outside MPS there is no log
        """Find out what can still be found out about a program that has ended."""

    @abc.abstractmethod
    def clients(self) -> set[int] | None:
        """Return the processes whose sudden death breaks others; None when it cannot be told."""


class Part:
    """Called in this order: check, open, enter, started, poll until the program ends, settle, close, raise_end.

    Before gpushare ends the program: asked (if the user wants it), release, and grows from time to time.
    """

    # When to poll next (monotonic seconds).
    due: float = math.inf

    @property
    def where(self) -> str:
        """Return what it adds to the place of the program, for people: ``, paused while 'web' works``."""
        return ""

    @property
    def seconds(self) -> float:
        """Return how long until the next poll."""
        return self.due - time.monotonic()

    @property
    def variables(self) -> Mapping[str, str]:
        """Return what it adds to the environment of the program."""
        return {}

    def check(self) -> None:
        """Raise unless the job can run with it; nothing is changed."""

    def open(self) -> None:
        """Set it up: the program is about to start."""

    def enter(self, pid: int) -> None:
        """Act in the new process before it runs the program; may not raise."""

    def started(self, watch: Watch) -> None:
        """Begin: the program runs. In a container, that is its first process. May not raise."""

    def poll(self) -> bool:
        """Act; return whether the program is to be ended now."""
        return False

    def asked(self) -> None:
        """Note that the user has asked for the end of the program."""

    def grows(self) -> bool:
        """Return whether a program that it has ended takes more meanwhile: it gets no more time."""
        return False

    def release(self) -> Mapping[int, int]:
        """Let the program continue: it is about to end. Return what is to end with it and is not below it (start times)."""
        return {}

    def moved(self, device: Device) -> None:
        """Note that the program is on another device now."""

    def settle(self) -> None:
        """Finish: the program, which had started, has ended."""

    def close(self, *, program_lives: bool = False) -> None:
        """Give back what `open` took, if anything. ``program_lives``: something failed, and the guard ends the program."""

    def raise_end(self) -> None:
        """Raise if it has ended the program."""
