"""What tests of running and pausing programs share."""

from __future__ import annotations

import time

import pytest

from tests.clock import Clock
from tests.run.told_program import Told


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what a program leaves behind a moment only."""
    monkeypatch.setattr("gpushare.run.end.HELPER_SECONDS", 0.2)


@pytest.fixture
def told() -> Told:
    """Return a program with a child; only the program itself is on the GPU."""
    return Told()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Put a clock that only the test moves in the place of monotonic time and of sleep."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock
