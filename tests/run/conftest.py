"""What tests of running and pausing programs share."""

from __future__ import annotations

import pytest

from tests.run.told_program import Told


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what a program leaves behind a moment only."""
    monkeypatch.setattr("gpushare.run.end.HELPER_SECONDS", 0.2)


@pytest.fixture
def told() -> Told:
    """Return a program with a child; only the program itself is on the GPU."""
    return Told()
