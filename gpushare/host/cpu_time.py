"""How much CPU time processes have used: the fastest sign of whether a job works.

Linux has a clock for each process (clock_getcpuclockid): exact, of all its threads, for any user. Where the kernel has
none of other processes (gVisor), ``/proc/PID/stat`` tells it in steps of a tick.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
# CPUCLOCK_SCHED of a process (linux/posix-timers.h): what clock_getcpuclockid of libc makes of a PID.
_SCHED: Final = 2


@dataclass(frozen=True)
class CpuTime:
    """CPU time in seconds; ``exact`` or in steps of a tick (10 ms on most hosts)."""

    seconds: float
    exact: bool


def cpu_time(pid: int) -> CpuTime | None:
    """Return the CPU time of a process, all its threads together; None when it is gone, or cannot be read."""
    try:
        return CpuTime(time.clock_gettime(~pid << 3 | _SCHED), exact=True)
    except (OSError, OverflowError):
        return _ticks(pid)


def _ticks(pid: int) -> CpuTime | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return CpuTime((int(fields[11]) + int(fields[12])) / _TICKS, exact=False)
    except (OSError, ValueError, IndexError):
        return None
