"""The start of a job: its time, and how often it is started again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.run.program import TimeLimit
from gpushare.run.start import JobStart
from tests.clock import Clock


def test_the_time_of_a_job_is_over_at_its_end_and_stays_over(clock: Clock) -> None:
    limit = TimeLimit(5.0)
    # Before the program runs no time passes for it.
    clock.now = 100.0
    assert not limit.poll()
    limit.raise_end()
    limit.started(None)  # type: ignore[arg-type]
    clock.now = 104.9
    assert not limit.poll()
    clock.now = 105.0
    assert limit.poll()
    clock.now = 101.0
    assert limit.poll()
    with pytest.raises(OperationFailed, match="longer than its --time of 5 s"):
        limit.raise_end()


@pytest.mark.parametrize(
    ("restart", "faults", "started"), [(True, 0, 1), (True, 1, 2), (True, 3, 4), (True, 9, 4), (False, 9, 1)]
)
def test_a_job_is_started_again_after_a_fault_of_mps_only(restart: bool, faults: int, started: int) -> None:
    codes: list[int] = []
    run: Any = SimpleNamespace(mps_fault=True, options=SimpleNamespace(stays=True, parts=()), parts=())

    def carry_out() -> int:
        codes.append(len(codes))
        run.mps_fault = len(codes) <= faults
        return codes[-1]

    run.carry_out = carry_out
    start: Any = SimpleNamespace(restart=restart, say=lambda _: None, command=("true",))
    job: Any = SimpleNamespace(record=SimpleNamespace(name=None), keep_peak=lambda _: None)
    assert JobStart._run_and_record(start, run, job) == started - 1
    assert len(codes) == started
