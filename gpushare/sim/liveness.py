"""Who lives on a simulated host, and whether time has changed anything: cheap, for readers.

Real processes are looked up in ``/proc``, without psutil.
"""

from __future__ import annotations

import os

from gpushare.host.process import SAME_START_SECONDS
from gpushare.sim.state import SimulatedHostState, SimulatedProcess, now


def on_gpu(process: SimulatedProcess) -> bool:
    """Return whether the process has a context: not refused, not pending, not still starting."""
    waiting = process.mps_daemon is not None and process.mps_server is None
    return process.refused is None and process.attach_at is None and not waiting


def due(state: SimulatedHostState) -> bool:
    """Return whether `clients.settle` would change anything: a process died, or makes its first context now."""
    at = now()
    return any(
        (process.attach_at is not None and process.attach_at <= at) or (process.real and not lives(process))
        for process in state.processes
    )


def lives(process: SimulatedProcess) -> bool:
    """Return whether a real process lives: its PID, state and start time in ``/proc/PID/stat``."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    if fields[0] in {"Z", "X", "x"}:
        return False
    return abs(_boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK") - process.started_at) < SAME_START_SECONDS


def started_at(pid: int) -> float | None:
    """Return when a real process started (seconds since the epoch), or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None
    return _boot_time() + ticks / os.sysconf("SC_CLK_TCK")


def _boot_time() -> float:
    with open("/proc/stat", encoding="utf-8") as file:
        for line in file:
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0
