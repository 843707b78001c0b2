"""What `gpushare tune` measured and found, and what it says while it goes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpushare.measure.controller import Outcome
from gpushare.measure.statistics import Ratio
from gpushare.measure.trials import Trial

if TYPE_CHECKING:
    from gpushare.errors import GpushareError


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One trial as it was measured: rates in the jobs' own units, shares of production alone with their interval."""

    trial: Trial
    kept: Ratio
    rounds: int
    alone_rate: float
    together_rate: float
    alone_p99: float | None
    together_p99: float | None
    # Of its rate alone; None: that is not known.
    opportunistic_share: float | None = None
    # Between what the factor of the p99 lies, 95 times in 100 for each of the two; None: too few latencies.
    p99_interval: tuple[float, float] | None = None
    # Production's rate in each window, in the order of time: alone (the first before the other started), and together.
    alone_rates: tuple[float | None, ...] = ()
    together_rates: tuple[float | None, ...] = ()
    # What a cap on production alone leaves of its rate; it is in what is kept.
    cap_factor: float = 1.0
    # The standard error of what is kept, as far as more windows lessen it: without that of the factor.
    windows_error: float | None = None
    window_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What was found, every trial, and what both jobs are alone. Rates per second; percent of the DRAM's bandwidth."""

    outcome: Outcome
    trials: tuple[TrialReport, ...]
    production_alone: float | None
    # The standard deviation of its windows alone, as a share of their mean.
    production_spread: float | None
    production_p99: float | None
    opportunistic_alone: float | None
    production_memory_bytes: int | None
    opportunistic_memory_bytes: int | None
    warning: str | None
    seconds: float
    # What ended it before the answer stood: Ctrl-C, or a job that ended. The trials before it are kept.
    stopped: KeyboardInterrupt | GpushareError | None = None
    # Why caps on production, for which nobody had asked, were not tried to the end.
    given_up: GpushareError | None = None
    # Who else was on the GPU: PID and name.
    others: Mapping[int, str] = field(default_factory=dict)


class TuneReporter:
    """What tune says while it goes on; the command line prints it."""

    def doing(self, what: str) -> None:
        """Something begins."""

    def measured(self, report: TrialReport) -> None:
        """A trial was measured."""
