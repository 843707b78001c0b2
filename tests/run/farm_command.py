"""What tests of farms run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.host.host import Host
from gpushare.memory.limit import MemoryBudget
from gpushare.plan import Step
from gpushare.run.farm import Copy, Farm, FarmOptions
from gpushare.show.result import OutputFormat
from gpushare.show.run import CopyLines, FarmAnswer
from tests.cli.drive import until


def shell(text: str) -> list[str]:
    """Return a command that runs a line of shell."""
    return ["sh", "-c", text]


def sized(device: Device, *, size: int = 4 * GIB, **options: Any) -> FarmOptions:
    """Return the options of a farm whose copies get so much memory each."""
    return FarmOptions(budget=MemoryBudget(bytes=size), **options)


def farm(
    host: Host, devices: Sequence[Device], command: Sequence[str], options: FarmOptions, reporter: CopyLines
) -> FarmAnswer:
    """Check and run a farm, as the command does."""
    copies = Farm(host, devices, command, options, reporter)
    copies.check()
    return copies.run()


def plan_farm(
    host: Host, devices: Sequence[Device], command: Sequence[str], options: FarmOptions, reporter: CopyLines
) -> tuple[Step, ...]:
    """Check a farm, and return its plan, as the command does."""
    copies = Farm(host, devices, command, options, reporter)
    copies.check()
    return copies.plan()


class Silent(CopyLines):
    """Prints nothing of a farm."""

    def __init__(self) -> None:
        super().__init__(1, output=OutputFormat.JSON, quiet=True, note=lambda _: None)

    def line(self, copy: int, text: str) -> None:
        """Print nothing."""


class Heard(Silent):
    """Remembers what a farm says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.lines: list[tuple[int, str]] = []
        self.most = 0
        self.endings: list[tuple[int, str, bool]] = []
        self.left: list[tuple[int, tuple[int, ...]]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def line(self, copy: int, text: str) -> None:
        self.lines.append((copy, text))

    def progress(self, copies: Sequence[Copy], seconds: float) -> None:
        self.most = max(self.most, sum(copy.state == "running" for copy in copies))

    def ended(self, copy: Copy, *, again: bool) -> None:
        self.endings.append((copy.copy, copy.state, again))

    def left_behind(self, copy: Copy, pids: Sequence[int]) -> None:
        self.left.append((copy.copy, tuple(pids)))


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], object]) -> Iterator[None]:
    """Send this process SIGTERM as soon as a condition holds."""

    def interrupt() -> None:
        until(condition, "the copies have begun")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()
