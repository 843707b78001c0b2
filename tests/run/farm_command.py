"""What tests of farms run."""

from __future__ import annotations

from typing import Any

from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.memory.limit import MemoryBudget
from gpushare.run.farm import FarmOptions


def shell(text: str) -> list[str]:
    """Return a command that runs a line of shell."""
    return ["sh", "-c", text]


def sized(device: Device, *, size: int = 4 * GIB, **options: Any) -> FarmOptions:
    """Return the options of a farm whose copies get so much memory each."""
    return FarmOptions(budget=MemoryBudget(bytes=size), **options)
