"""What tests of farms run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.host.host import Host
from gpushare.memory.limit import MemoryBudget
from gpushare.plan import Step
from gpushare.run.farm import Farm, FarmOptions, FarmResult
from gpushare.show.result import OutputFormat
from gpushare.show.run import CopyLines


def shell(text: str) -> list[str]:
    """Return a command that runs a line of shell."""
    return ["sh", "-c", text]


def sized(device: Device, *, size: int = 4 * GIB, **options: Any) -> FarmOptions:
    """Return the options of a farm whose copies get so much memory each."""
    return FarmOptions(budget=MemoryBudget(bytes=size), **options)


def farm(
    host: Host, devices: Sequence[Device], command: Sequence[str], options: FarmOptions, reporter: CopyLines
) -> FarmResult:
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
