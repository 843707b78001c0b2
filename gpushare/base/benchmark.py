"""A benchmark as it is printed, kept in a file and compared: the fields of its value classes are the keys of its JSON. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal

from gpushare.base.typed import Within
from gpushare.base.values import NOT_STORED

# The ratio of two of them is a number, too.
_Mean = Annotated[float, lambda mean: mean == 0 or 1e-100 <= abs(mean) <= 1e100]
# All of the threads is no cap, which is None.
_Cap = Annotated[float, lambda percent: 0 < percent < 100]
# Of ways this close to the fastest, with overlapping intervals, the simpler one is as good.
NEAR: Final = 0.03
# Less than this is no difference, however narrow the intervals: processes of one program differ by more.
LEAST_DIFFERENCE: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How the speed of a program is measured. Without a pattern it is finished runs per second.

    ``higher_is_better`` False: the number is a time (or another cost) per unit of work.
    """

    pattern: str | None = None
    higher_is_better: bool = True
    # The pattern of a latency; None: latency=, p50= and p99=.
    latency: str | None = None
    json_properties: ClassVar = ("unit",)

    @property
    def printed(self) -> bool:
        return self.pattern is not None

    @property
    def unit(self) -> Literal["printed", "runs_per_second"]:
        return "printed" if self.printed else "runs_per_second"

    def together(self, values: Sequence[float]) -> float | None:
        """Return the metric of several concurrent copies, as if they were one program.

        Rates add up; times per unit are added as rates. None when there is nothing to add.
        """
        if not values:
            return None
        if self.higher_is_better:
            return math.fsum(values)
        return None if min(values) <= 0 else 1 / math.fsum(1 / value for value in values)

    def speed(self, value: float) -> float:
        """Return a number that is larger when the program is faster."""
        return value if self.higher_is_better else 1 / value


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Several measurements of one thing. ``low`` to ``high`` is the 95 % interval of the mean; None for a single one.

    ``spread`` is the range of the measurements relative to their mean; None for a single one.
    """

    mean: _Mean
    low: float | None
    high: float | None
    spread: float | None
    runs: int

    def differs_from(self, other: Summary) -> bool | None:
        """Return whether two means differ: their intervals do not overlap. None: one of them has no interval."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of two means. ``low`` to ``high`` is its 95 % interval, None if a mean comes from one measurement."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """How one copy did. ``failure`` says what went wrong; ``exit_code`` is negative for a signal."""

    copy: int
    pid: int
    seconds: float
    exit_code: int | None
    value: float | None
    latencies: tuple[float, ...] = field(metadata=NOT_STORED)
    # The median latency, in the unit that the program prints; None: none was printed.
    latency_p50: float | None
    # The 99th percentile of the latency, in the unit that the program prints; None: none was printed.
    latency_p99: float | None
    failure: str | None
    last_line: str | None = field(default=None, metadata=NOT_STORED)


@dataclass(frozen=True, kw_only=True)
class CopiesResult:
    """How all copies did; ``seconds`` is from the first start to the last end, or the window."""

    copies: tuple[CopyResult, ...]
    seconds: float
    # A time limit was reached.
    hung: bool = False
    # The user interrupted it.
    interrupted: bool = False

    @property
    def failures(self) -> list[str]:
        return [
            f"copy {copy.copy} (process {copy.pid}): {copy.failure}" for copy in self.copies if copy.failure is not None
        ]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used. ``energy_joules`` is of the whole GPU; ``others`` are processes that do not belong to the run."""

    seconds: float
    energy_joules: float | None
    memory_peak_bytes: int | None
    others: tuple[int, ...]
    other_names: Mapping[int, str] = field(default_factory=dict)
    # Processes of the run that were outside MPS, where they do not belong.
    outside: tuple[int, ...] = ()
    # Busy SMs of the whole GPU (GPM); null, also of the next two: unknown, or not asked for.
    sm_percent: float | None = None
    # The memory bandwidth of the whole GPU (GPM).
    dram_percent: float | None = None
    # The time in which a kernel ran on the GPU.
    busy_percent: float | None = None

    @property
    def power_watts(self) -> float | None:
        return None if self.energy_joules is None or self.seconds <= 0 else self.energy_joules / self.seconds


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run of a way with a number of copies. ``throughput`` is None if a copy failed: the others then had more of the GPU."""

    round: int
    way: str
    copies: int
    # How its copies did.
    result: CopiesResult
    throughput: float | None
    # What it used.
    usage: Usage
    # Why the whole run does not count.
    invalid: str | None = None

    @property
    def failures(self) -> list[str]:
        return [*self.result.failures, *([] if self.invalid is None else [self.invalid])]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A way that is not measured, and why. ``copies`` None: for no number of copies."""

    way: str
    copies: int | None
    reason: str


@dataclass(frozen=True)
class CellName:
    """A way, and a number of copies."""

    way: str
    copies: int


@dataclass(frozen=True, kw_only=True)
class BenchCell:
    """One way with one number of copies. ``slowdown`` is the time of one copy relative to a copy alone: below 1 it is faster.

    ``gain`` is the throughput over that of one copy alone. ``joules`` is per run, or per unit of a printed rate.
    """

    way: str
    copies: Annotated[int, Within(1, 1_000_000)]
    # The active thread percentage of each copy, under MPS.
    threads_percent: _Cap | None = None
    # The cell whose runs measure this one too.
    same_as: CellName | None = None
    runs: int = 0
    throughput: Summary | None = None
    gain: Ratio | None = None
    slowdown: float | None = None
    memory_peak_bytes: int | None = None
    power_watts: float | None = None
    joules: float | None = None
    latency_p50: float | None = None
    latency_p99: float | None = None
    # This is the cell to use.
    chosen: bool = False
    failures: tuple[str, ...] = ()
    # Processes on the GPU that do not belong to the runs.
    others: tuple[int, ...] = ()
    slice_us: int | None = None
    # The time-slice level of the GPU, which was set for the runs.
    time_slice: str | None = None

    @property
    def measured_as(self) -> CellName:
        """Return the cell whose runs measure this one: itself, unless `same_as` names another."""
        return self.same_as or CellName(self.way, self.copies)

    def speed(self, metric: Metric) -> float:
        """Return a number that is larger when all copies together are faster; 0: they made no progress."""
        return metric.speed(self.throughput.mean) if self.throughput is not None and self.throughput.mean else 0.0

    def differs_from(self, other: BenchCell, metric: Metric) -> bool | None:
        """Return whether the figures of two cells differ; None: one of them has too few runs to tell."""
        if self.measured_as == other.measured_as:
            # The same runs stand for both.
            return False
        if self.throughput is None or other.throughput is None:
            return None
        # A product, not a quotient: the speed of a way that made no progress is 0.
        if abs(self.speed(metric) - other.speed(metric)) < LEAST_DIFFERENCE * other.speed(metric):
            return False
        return self.throughput.differs_from(other.throughput)

    @property
    def is_shown(self) -> bool:
        """Return whether it was measured, or failed; an interrupted benchmark has cells that it did not reach."""
        return self.throughput is not None or bool(self.failures)


@dataclass(frozen=True, kw_only=True)
class AloneCell(BenchCell):
    """One copy alone, and how much of the GPU it used; the fields for that are None if other programs ran beside it."""

    sm_percent: float | None
    memory_bandwidth_percent: float | None
    utilization_percent: float | None


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The answer for one number of copies.

    ``way`` is the way to use: the simplest of those that do not differ from the fastest and are within 3 % of it.
    ``certain`` is False if there was one run of each way only, or if the benchmark was interrupted before some ways
    (``open_ways``). ``gain`` is relative to the way that ``over`` names: time-slicing or the queue; None if neither was measured.
    """

    copies: int
    way: str
    threads_percent: _Cap | None
    # The way with the highest mean.
    fastest: str
    # The ways that do not differ from it.
    no_difference: tuple[str, ...]
    certain: bool
    # The number of ways compared.
    ways: int
    open_ways: int
    gain: Ratio | None
    over: str | None
    json_properties: ClassVar = ("winner",)

    @property
    def winner(self) -> str | None:
        """Return the way that differs from all others; None: its interval overlaps with that of another, or is not known."""
        return self.way if self.certain and not self.no_difference else None


@dataclass(frozen=True, kw_only=True)
class BenchGpu:
    """The GPU of a benchmark; ``mig`` is the profile of the instance that was measured."""

    index: int
    uuid: str | None
    name: str | None
    mig: str | None

    @property
    def model(self) -> str | None:
        return " ".join(filter(None, (self.name, self.mig))) or None


@dataclass(frozen=True, kw_only=True)
class BuiltInWorkload:
    """The built-in workload."""

    title: str
    unit: str
    # The side of its matrices; None if several sizes were measured.
    size: int | None
    cpu: bool
    copy: str | None
    footprint: str | None
    # The library that multiplies.
    backend: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The mean of a cell in two benchmarks. ``verdict`` is unknown if one of the means has no interval."""

    way: str
    copies: int
    before: float
    now: float
    ratio: float | None
    verdict: Literal["faster", "slower", "no difference", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What a later benchmark is compared with: the conditions, and the figures of each way."""

    kind: Literal["gpushare bench"] = "gpushare bench"
    driver: str | None
    gpu: BenchGpu
    command: tuple[str, ...]
    # The built-in one; None: a command.
    workload: BuiltInWorkload | None
    started_at: Annotated[float, Within(0, 1e11)]
    metric: Metric
    window_seconds: float | None
    cells: tuple[BenchCell, ...]
    # One for each number of copies that was measured under at least two ways.
    picks: tuple[Pick, ...]

    @property
    def program(self) -> str:
        """Return what was measured: a command line, or the title of the built-in workload."""
        return shlex.join(self.command) if self.workload is None else self.workload.title


@dataclass(frozen=True, kw_only=True)
class BenchAnswer(Benchmark):
    """The answer of ``gpushare bench``: figures of each way and number of copies, the answer, and every single run."""

    host: str
    seconds: float
    # Why it ended.
    reason: Literal["finished", "interrupted", "failed"]
    repeat: int
    # The number of finished rounds.
    rounds: int
    alone: AloneCell
    # The pick with the highest throughput of all.
    best: Pick | None
    left_out: tuple[LeftOut, ...]
    # Processes on the GPU that do not belong to the runs.
    others: tuple[int, ...]
    other_names: Mapping[int, str]
    notes: tuple[str, ...]
    runs: tuple[RunResult, ...]
    # The comparison with an earlier benchmark (``--compare``).
    comparison: tuple[Compared, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SizeCell:
    """N copies at one size: the time until each has multiplied once, and its 95 % interval."""

    size: int
    way: str
    copies: int
    seconds: float | None
    low: float | None
    high: float | None
    # The time of one copy alone.
    alone_seconds: float | None
    gain: float | None
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """Up to which matrix size the copies run at the same time under a way, for the most copies that were measured."""

    way: str
    copies: int
    concurrent_until: int | None
    ends_at: int | None
    gain_until: float | None
    gain_at_end: float | None


@dataclass(frozen=True, kw_only=True)
class BenchSizesAnswer:
    """The answer of ``gpushare bench`` for several sizes of the built-in workload."""

    kind: Literal["gpushare bench sizes"] = "gpushare bench sizes"
    host: str
    driver: str | None
    gpu: BenchGpu
    started_at: float
    window_seconds: float | None
    repeat: int
    workload: BuiltInWorkload
    seconds: float
    reason: Literal["finished", "interrupted", "failed"]
    sizes: tuple[int, ...]
    cells: tuple[SizeCell, ...]
    concurrency: tuple[Concurrency, ...]
    left_out: tuple[LeftOut, ...]
    # One for each size.
    benchmarks: tuple[BenchAnswer, ...]
