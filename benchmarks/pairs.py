"""The pairs of jobs and the farms that `benchmarks.sharing` measures, with the figures to beat on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Pair:
    """A production job, an opportunistic one beside it, what tune is asked for, and the figures to beat."""

    production: str
    opportunistic: str
    keep: float
    p99: float | None
    goal_rate: float
    goal_share: float
    compared: bool = False
    # What was found is measured again: in this many windows with both jobs, with this many starts of the other.
    windows: int = 24
    starts: int = 3

    @property
    def name(self) -> str:
        """Return it as in the table: ``infer + big``."""
        return f"{self.production} + {self.opportunistic}"


PAIRS: Final = (
    Pair("infer", "big", 99.5, 1.10, 0.995, 0.75, compared=True),
    # mid is bound by kernel launches, and moves with the CPU of a virtual machine.
    Pair("mid", "big", 97, None, 0.97, 0.68, compared=True, windows=64, starts=4),
    Pair("membw", "big", 90, None, 0.90, 0.25),
    Pair("infer", "membw", 99.5, 1.35, 0.995, 0.85),
    # Both move with the CPU, and processes of one program differ by the core that each is on.
    Pair("mid", "tiny", 88, None, 0.88, 0.95, windows=40, starts=4),
)
# Job, copies, throughput as a multiple of that of time-slicing, and the ways to choose from.
FARMS: Final = (
    ("tiny", 8, 4.5, "timeslice,mps,mps:100/n,mps:200/n"),
    ("mid", 16, 2.7, "timeslice,mps,mps:100/n,mps:200/n,mps:300/n"),
)
