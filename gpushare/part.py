"""A part of a job: what it has besides its program and its share of a GPU.

A limit of memory, a time-slice, a record, a pause for production, a container: each is one `Part`. A running job is a
share and a list of parts (`run.program.Session`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host


class Watched(Protocol):
    """The program of a job that runs, as its parts see it (`run.share.Watch`)."""

    host: Host
    device: Device
    program_pid: int
    # The processes that were seen outside the share.
    outside: set[int]
    # What is to be said, once; and what is not as it was asked for.
    news: list[str]
    troubles: list[str]

    @property
    def gpus(self) -> Collection[int]:
        """Return the indexes of the GPUs that the program has."""

    @property
    def attached(self) -> Collection[int]:
        """Return the processes that were seen inside the share."""

    @property
    def tell(self) -> Callable[[int, int | None], None]:
        """Return what to call with a process and its start before a part stops it: the guard ends it if gpushare dies."""

    def wait(self) -> float:
        """Return the seconds between two looks at the program's processes."""

    def poll(self) -> None:
        """Look for the program's processes now."""


class Part:
    """Called in this order: check, open, enter, started, poll until the program ends, settle, close, raise_end.

    Before gpushare ends the program: asked (if the user wants it), release, and grows from time to time.
    """

    @property
    def where(self) -> str:
        """Return what it adds to the place of the program, for people: ``, paused while 'web' works``."""
        return ""

    @property
    def seconds(self) -> float:
        """Return how long until the next poll."""
        return math.inf

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

    def started(self, watch: Watched) -> None:
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
