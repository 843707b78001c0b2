"""The cells of a benchmark, as far as advice needs them: speeds with intervals, and why one is missing. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpushare.advice.ways import Way

# What `gpushare bench` calls each way that it can measure.
BENCH_WAYS: Final[Mapping[Way, tuple[str, ...]]] = {
    Way.WHOLE: ("queue",),
    Way.TIMESLICE: ("timeslice",),
    Way.MPS: ("mps", "mps:200/n", "mps:100/n"),
    Way.MIG: ("mig",),
    Way.STREAMS: ("streams",),
}
_WAY_OF: Final = {name: way for way, names in BENCH_WAYS.items() for name in names}
# So near to the fastest, with intervals that overlap, a way is as good: the rules' order decides.
NEAR: Final = 0.03
# Less is no difference, however narrow the intervals: other processes of the same program differ by more.
_NOTHING: Final = 0.01


@dataclass(frozen=True)
class Cell:
    """One way as it was measured; a larger speed is faster, and ``low`` and ``high`` are its interval, if there is one."""

    name: str
    way: Way
    # Percent of the threads of each copy; None: no cap.
    cap: float | None
    speed: float
    low: float | None
    high: float | None

    @property
    def title(self) -> str:
        """Return the name for a sentence: ``MPS with 25 % each``."""
        return title_of(self.way) + ("" if self.cap is None else f" with {self.cap:g} % each")


def measured_cells(bench: Mapping[str, Any], copies: int) -> list[Cell]:
    """Return what was measured without a failure."""
    higher = bench["metric"]["higher_is_better"]
    found = []
    for cell in bench["cells"]:
        figures = cell["throughput"]
        if cell["copies"] != copies or figures is None or cell["failures"] or cell["way"] not in _WAY_OF:
            continue
        mean, low, high = figures["mean"], figures["low"], figures["high"]
        if not higher:
            # A time per unit: the upper bound of the time is the lower one of the speed.
            mean, low, high = _speed(mean), _speed(high), _speed(low)
        if mean > 0 and math.isfinite(mean):
            found.append(Cell(cell["way"], _WAY_OF[cell["way"]], cell["threads_percent"], mean, low, high))
    return found


def _speed(seconds: float | None) -> Any:
    if seconds is None:
        return None
    return 1 / seconds if seconds > 0 else math.inf


def differ(one: Cell, other: Cell) -> bool | None:
    """Return whether two ways differ: their intervals do not overlap. None: single runs cannot tell."""
    if abs(one.speed / other.speed - 1) < _NOTHING:
        return False
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return None
    return one.low > other.high or other.low > one.high


def alike(one: Cell, other: Cell) -> bool:
    """Return whether nothing shows that two ways differ; single runs must be near each other."""
    different = differ(one, other)
    slower, faster = sorted((one.speed, other.speed))
    return slower >= (1 - NEAR) * faster if different is None else not different


def certain_of(cells: Sequence[Cell]) -> bool:
    """Return whether the runs tell of every way if it differs from the fastest."""
    fastest = max(cells, key=lambda cell: cell.speed)
    return all(differ(cell, fastest) is not None for cell in cells)


def failure_of(bench: Mapping[str, Any], way: Way, copies: int) -> str | None:
    """Return how the copies of a way failed, or None."""
    cells = [cell for cell in bench["cells"] if cell["copies"] == copies and _WAY_OF.get(cell["way"]) is way]
    return next((str(text) for cell in cells for text in cell["failures"]), None)


def because(bench: Mapping[str, Any], copies: int, way: Way | None = None) -> str:
    """Return why a way, or all of them, was not measured, as the end of a sentence; nothing when nobody knows."""
    for one in bench["left_out"]:
        if (way is None or _WAY_OF.get(one["way"]) is way) and one["copies"] in {None, copies}:
            return f" ({one['reason']})"
    if way is not None and way not in BENCH_WAYS:
        return " (gpushare bench does not measure it)"
    return " (it ended too early)" if bench["reason"] != "finished" else ""


def title_of(way: Way) -> str:
    """Return the name of a way for a sentence."""
    return "a queue" if way is Way.WHOLE else way.label


def times(one: Cell, other: Cell) -> str:
    """Return by what factor one is faster than the other: ``1.30 x``."""
    return f"{one.speed / other.speed:.2f} x"
