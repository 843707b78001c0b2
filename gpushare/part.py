"""A part of a job: what it has besides its program and its share of a GPU.

A limit of memory, a time-slice, a record, a pause for production, a container: each is one `Part`. A running job is a
share and a list of parts (`run.program.Session`).
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import Final

from gpushare.base.selection import Device
from gpushare.base.values import dataclass
from gpushare.host.host import Host

# The daemon logs every conversation, so ask often only while a program is likely to create its context.
_FIRST_SECONDS: Final = 0.1
# Up to this age of the program, the number of seconds between two polls.
_INTERVALS: Final = ((5.0, 0.25), (30.0, 1.0), (math.inf, 5.0))


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
    # The slice that the job wants now (microseconds); None: the one of its record.
    slice_us: int | None = None
    # Called with a process and its start before it is stopped; without a guard nobody is told.
    tell: Callable[[int, int | None], None] = lambda *_: None
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
    def seconds_to_poll(self) -> float:
        return max(self._due, self.started + _FIRST_SECONDS) - time.monotonic()

    def poll(self) -> None:
        """Note where the program's processes are now, and set the time of the next poll."""
        self.find_processes()
        self._due = time.monotonic() + self.poll_interval()

    def poll_interval(self) -> float:
        """Return the seconds to the next poll: few while the program is young and not yet seen in its share."""
        age = time.monotonic() - self.started
        return 5.0 if self.attached else next(seconds for most_age, seconds in _INTERVALS if age < most_age)

    @abc.abstractmethod
    def find_processes(self) -> None:
        """Note which processes of the program are inside its share and which outside."""

    def mps_fault(self) -> bool:
        """Return whether its MPS server or daemon has died, or had a fatal GPU error, since the program was started."""
        return False

    def settle(self) -> None:  # noqa: B027 - outside MPS there is no log
        """Note what no poll saw of a program that has ended, such as that it was a client: the report needs that."""

    @abc.abstractmethod
    def clients(self) -> set[int] | None:
        """Return the processes whose sudden death breaks others; None when it cannot be told."""


class Part:
    """A part of a job.

    Its methods are called in this order: check, open, enter, started, poll until the program ends, settle, close,
    raise_end. When gpushare ends the program, it calls note_user_ends (if the user wants it), release, and from time to time grows.
    """

    # When to poll next (monotonic seconds).
    due: float = math.inf

    @property
    def where(self) -> str:
        """Return what the part adds to the place of the program, for people: ``, paused while 'web' works``."""
        return ""

    @property
    def seconds_to_poll(self) -> float:
        return self.due - time.monotonic()

    @property
    def variables(self) -> Mapping[str, str]:
        """Return what the part adds to the environment of the program."""
        return {}

    def check(self) -> None:
        """Raise unless the job can run with this part; nothing is changed."""

    def open(self) -> None:
        """Set the part up before the program starts."""

    def enter(self, pid: int) -> None:
        """Act in the new process before it runs the program; may not raise."""

    def started(self, watch: Watch) -> None:
        """Begin to work on the program, whose process (in a container: the first one) has started; may not raise."""

    def poll(self) -> bool:
        """Do what is due, and return whether gpushare should end the program now."""
        return False

    def note_user_ends(self) -> None:
        """Note that the user ends the program, so its end is not counted as a failure such as for want of memory."""

    def grows(self) -> bool:
        """Return whether the program still allocates memory although this part ended it: then its grace period is over."""
        return False

    def release(self) -> Mapping[int, int]:
        """Let a paused program continue, so that it can end. Return its strays, which left its tree: start times by PID."""
        return {}

    def moved(self, device: Device) -> None:
        """Note that the program was moved to another device, on which the part goes on."""

    def settle(self) -> None:
        """Finish the work on the program, which has ended; not called if it never started."""

    def close(self, *, program_lives: bool = False) -> None:
        """Undo `open`. ``program_lives``: something failed, and the guard ends the program."""

    def raise_end(self) -> None:
        """Raise the reason if this part has ended the program."""
