"""Read and change the state of a simulated host, after `clients.settle`: what has happened since, such as a process that died."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpushare.sim.state import SimulatedHostState, StateFile, settle_is_due

if TYPE_CHECKING:
    from gpushare.sim.mps_servers import LogLine

# How long a second lasts for a simulated program that blocks: with 0.1, ten of its seconds pass in one.
PATIENCE: Final = "GPUSHARE_SIM_PATIENCE"


def clock() -> float:
    """Return the seconds of a monotonic clock by which simulated programs wait; `PATIENCE` lets it run faster."""
    return time.monotonic() / float(os.environ.get(PATIENCE) or 1)


def current(state_file: StateFile) -> SimulatedHostState:
    """Return the state as it is now, with what has happened since it was written; a host that was never used is created."""
    state = state_file.read()
    # Most looks change nothing, and take no lock.
    if state is not None and not settle_is_due(state):
        return state
    with changing(state_file) as (state, _):
        return state


@contextlib.contextmanager
def changing(state_file: StateFile) -> Iterator[tuple[SimulatedHostState, list[LogLine]]]:
    """Yield the state as it is now, to change it under the lock, and a list for log lines; both are written at the end.

    A host that was never used is created.
    """
    from gpushare.sim import clients, mps_servers

    lines: list[LogLine] = []
    with state_file.changed() as state:
        lines += clients.settle(state)
        yield state, lines
        # Under the lock, so that two processes do not mix their lines.
        mps_servers.append_to_logs(lines)
