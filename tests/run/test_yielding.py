"""A job that leaves while production works, and starts again when it rests; with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from gpushare.mps.limits import Limits
from gpushare.part import Part
from gpushare.run.production import ProductionJob
from gpushare.run.program import RunOptions
from gpushare.run.start import Yielding, YieldToProduction
from tests.clock import Clock


class Production:
    """A production job that works at these times."""

    title = "'web'"

    def __init__(self, clock: Clock, *busy: tuple[float, float]) -> None:
        self._clock, self._busy = clock, busy

    def works(self) -> bool:
        return any(begin <= self._clock() < end for begin, end in self._busy)


def yielding(
    clock: Clock, production: Production, seconds: float, messages: list[str], runs: list[tuple[float, float]]
) -> Yielding:
    """Return a job that needs so many seconds, and notes when it ran."""

    def start(options: RunOptions) -> int:
        parts, began = options.parts, clock()
        while clock() - began < seconds:
            if any(part.poll() for part in parts):
                runs.append((round(began, 1), round(clock(), 1)))
                return 143
            clock.sleep(max(0.01, *(part.seconds_to_poll for part in parts)))
        runs.append((round(began, 1), round(clock(), 1)))
        return 0

    return Yielding(
        production=cast("ProductionJob", production),
        options=RunOptions(limits=Limits()),
        start=cast("Callable[[RunOptions], Any]", start),
        say=messages.append,
    )


class Memory(Part):
    """A limit of memory, and how often it was polled."""

    seconds_to_poll = 0.0

    def __init__(self, *, over: bool = False) -> None:
        self.over, self.polls = over, 0

    def poll(self) -> bool:
        self.polls += 1
        return self.over


@pytest.mark.parametrize("over", [False, True])
def test_the_memory_of_the_job_is_watched_too(clock: Clock, over: bool) -> None:
    messages, runs = [], []
    job, memory = yielding(clock, Production(clock, (20, 25)), 30, messages, runs), Memory(over=over)
    job.options = replace(job.options, parts=(memory,))
    assert job.run() == (143 if over else 0)
    assert len(runs) == (1 if over else 2)
    assert memory.polls >= 1


def test_it_is_ended_when_production_works_and_started_again_when_it_rests(clock: Clock) -> None:
    messages, runs = [], []
    job = yielding(clock, Production(clock, (20, 25)), 30, messages, runs)
    assert job.run() == 0
    assert runs == [(2.0, 20.0), (27.0, 57.0)]
    (text,) = messages
    assert text == "ended, because 'web' works; it starts again when 'web' has rested for 2 s"


def test_it_does_not_start_before_production_rests(clock: Clock) -> None:
    messages, runs = [], []
    assert yielding(clock, Production(clock, (0, 7)), 1, messages, runs).run() == 0
    assert runs == [(9.0, 10.0)]
    assert messages == ["waits until 'web' rests"]


def test_one_that_is_ended_early_again_and_again_waits_longer(clock: Clock) -> None:
    """A start costs time on the GPU too."""
    messages, runs = [], []
    beats = [(4.0 * number, 4.0 * number + 0.1) for number in range(1, 6)]
    assert yielding(clock, Production(clock, *beats), 5, messages, runs).run() == 0
    assert [begin for begin, _ in runs] == [2.0, 24.1]
    assert messages[0].endswith("rested for 4 s")


def test_without_production_it_simply_runs(clock: Clock) -> None:
    messages, runs = [], []
    assert yielding(clock, Production(clock), 30, messages, runs).run() == 0
    assert (runs, messages) == ([(2.0, 32.0)], [])


def test_it_ends_the_program_once_and_for_all(clock: Clock) -> None:
    part = YieldToProduction(cast("ProductionJob", Production(clock, (1, 2))))
    assert part.poll() is False
    clock.now = 1.0
    assert part.poll() is True
    clock.now = 3.0
    assert part.poll() is True, "what was told to end does not go on"
