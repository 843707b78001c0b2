"""Lines of a recipe, and the words that they share. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Workload


@dataclass(frozen=True)
class Line:
    """What to do, and the line to type; None: it is not done on this command line."""

    what: str
    command: str | None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Lines in order, those that take them back, and what to measure afterwards."""

    lines: tuple[Line, ...]
    undo: tuple[Line, ...] = ()
    measure: tuple[str, ...] = ()


def sudo(situation: Situation) -> str:
    """Return what stands before a line that only root may run."""
    return "" if situation.host.root else "sudo "


def visible_to(situation: Situation) -> str:
    """Return what lets a program see this GPU only."""
    return f"CUDA_VISIBLE_DEVICES={situation.gpu.uuid or situation.gpu.index}"


def program(workload: Workload) -> str:
    """Return the workload's own command, or the word that stands for it."""
    return workload.command or "CMD"


def who(workload: Workload) -> str | None:
    """Return what a workload is called: its name, else its role; None when it has neither."""
    return workload.name or (None if workload.role is None else workload.role.value)


def again(processes: int | None, name: str | None = None, how: str | None = None) -> str:
    """Return who runs a line, and how often."""
    who = "each program" if name is None and processes is None else name or "the program"
    times = "" if processes in {None, 1} else f", {processes} times"
    return f"{who}{times}" + (f", {how}" if how else "")
