"""How much CPU time processes have used: the fastest sign of whether a job works (``/proc/PID/stat``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Iterable[int]) -> float | None:
    """Return the CPU time of processes, all their threads, in seconds (utime and stime; steps of 10 ms).

    None when none of them could be read.
    """
    found = [seconds for pid in pids if (seconds := _of(pid)) is not None]
    return sum(found) if found else None


def _of(pid: int) -> float | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, ValueError, IndexError):
        return None
