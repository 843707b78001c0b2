"""Real short programs as copies on a simulated host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpushare.host.connect import connect
from gpushare.host.host import Host
from gpushare.measure.copies import Copies, CopiesResult, Launch, Limits
from gpushare.measure.metric import Metric

# Prints a rate five times a second for ever; Python's own SIGINT ends it.
ENDLESS = "import time\nwhile True:\n    print('rate=10', flush=True)\n    time.sleep(0.02)"


@pytest.fixture
def host(sim_dir: Path) -> Host:
    return connect("sim:h200")


@pytest.fixture
def together(host: Host) -> Callable[..., CopiesResult]:
    """Return a function that runs shell scripts as copies at the same time, or in turn."""

    def run(
        *scripts: str, metric: Metric | None = None, in_turn: bool = False, python: bool = False, **limits: float
    ) -> CopiesResult:
        launches = [Launch(argv=words(script, python=python), environment=dict(os.environ)) for script in scripts]
        copies = Copies(host, metric or Metric(), Limits(**{"limit": 20.0, "grace": 2.0, **limits}))
        return copies.in_turn(launches) if in_turn else copies.together(launches)

    return run


def words(script: str, *, python: bool = False) -> Sequence[str]:
    return [sys.executable, "-c", script] if python or script == ENDLESS else ["sh", "-c", script]
