"""Real short programs as copies on a simulated host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.benchmark import CopiesResult, Metric
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.measure.bench import Copies, Launch
from gpushare.measure.experiment import Experiment
from gpushare.measure.usage import UsageMeter

# Prints a rate many times a second forever; Python's own SIGINT ends it.
ENDLESS = "import time\nwhile True:\n    print('rate=10', flush=True)\n    time.sleep(0.02)"


def experiment_with(host: Host, guard: object, *, grace_seconds: float) -> Experiment:
    """Return an experiment that has no place, and this guard."""
    nowhere = SimpleNamespace(meter=None, clients=set)
    experiment = Experiment(host, nowhere, grace_seconds=grace_seconds)  # type: ignore[arg-type]
    experiment.guard = guard  # type: ignore[assignment]
    return experiment


def meter_of(host: Host) -> UsageMeter:
    return UsageMeter(host, Device(gpu=host.nvml.gpu(0)))


class Told:
    """Signals and a guard. Its clock is put on by 1000 s at every wait while ``over`` is true of the copies."""

    def __init__(self, over: Callable[[Told], object]) -> None:
        self.over, self.ahead, self.ends = over, 0.0, 0
        self.copies: Sequence[Any] = ()
        self._before: list[int] | None = None

    def clock(self) -> float:
        return time.monotonic() + self.ahead

    def announce(self, pid: int, started: float | None) -> None:
        pass

    add_process = announce

    def remove_process(self, pid: int) -> None:
        self.ends += 1

    def ending_came(self) -> bool:
        return False

    def end_requested(self, seconds: float) -> bool:
        counts = [len(copy.printed.values) for copy in self.copies]
        if self._before is None and counts and all(counts):
            self._before = counts
        if self.over(self):
            self.ahead += 1000.0
        time.sleep(seconds)
        return False

    def printed(self, number: int) -> int:
        """Return how many numbers a copy has printed since all had printed one."""
        return 0 if self._before is None else len(self.copies[number].printed.values) - self._before[number]


class Watched(Copies):
    """Copies that the clock's owner can see."""

    def _poll(self, copies: Sequence[Any], usage: UsageMeter | None) -> float:
        assert isinstance(self.signals, Told)
        self.signals.copies = copies
        return super()._poll(copies, usage)


@pytest.fixture
def together(host: Host) -> Callable[..., CopiesResult]:
    """Return a function that runs shell scripts as copies at the same time, or in turn.

    ``over`` says when times are over, however long they took here: give a ``window`` or ``limit`` of 500 s with it.
    """

    def run(
        *scripts: str,
        metric: Metric | None = None,
        in_turn: bool = False,
        python: bool = False,
        over: Callable[[Told], object] = lambda _: False,
        usage: UsageMeter | None = None,
        **durations: float,
    ) -> CopiesResult:
        launches = [Launch(argv=words(script, python=python), environment=dict(os.environ)) for script in scripts]
        told = Told(over)
        experiment = experiment_with(host, told, grace_seconds=durations.pop("grace", 2.0))
        experiment.now = told.clock  # type: ignore[method-assign]
        copies = Watched(experiment, metric or Metric(), told, **durations)  # type: ignore[arg-type]
        meter = usage or meter_of(host)
        return copies.run_in_turn(launches, meter) if in_turn else copies.run_together(launches, meter)

    return run


def words(script: str, *, python: bool = False) -> Sequence[str]:
    return [sys.executable, "-c", script] if python or script == ENDLESS else ["sh", "-c", script]
