"""Whether the real processes on a simulated host live: from ``/proc``, without psutil (readers settle often)."""

from __future__ import annotations

import os

from gpushare.sim.state import SimulatedProcess


def lives(process: SimulatedProcess) -> bool:
    """Return whether a real process lives: its PID, state and start time in ``/proc/PID/stat``."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    if fields[0] in {"Z", "X", "x"}:
        return False
    return abs(_boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK") - process.started_at) < 2.0


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
