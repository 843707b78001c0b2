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
    caps: str | None = None
    compared: bool = False

    @property
    def name(self) -> str:
        """Return it as in the table: ``infer + big``."""
        return f"{self.production} + {self.opportunistic}"


PAIRS: Final = (
    Pair("infer", "big", 99.5, 1.10, 0.995, 0.75, compared=True),
    Pair("mid", "big", 97, None, 0.97, 0.68, compared=True),
    Pair("membw", "big", 90, None, 0.90, 0.25, caps="50,60,40"),
    Pair("infer", "membw", 99.5, 1.35, 0.995, 0.85),
    Pair("mid", "tiny", 88, None, 0.88, 0.95),
)
# Job, copies, and so many times the throughput of time-slicing.
FARMS: Final = (("tiny", 8, 4.5), ("mid", 16, 2.7))
