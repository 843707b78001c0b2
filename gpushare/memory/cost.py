"""What it costs to move a job out of the GPU and back, and what is left of the time in turns. Pure.

Times are in seconds, sizes in bytes as the GPU counts them (CUDA contexts included).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gpushare.base.units import GIB

# Without one given, a turn is this many times as long as the measured switch: nine tenths of the time are work.
TURN_FACTOR: Final = 9.0
# Left free in host memory besides the copies.
HOST_MARGIN_BYTES: Final = GIB
_HOST_MARGIN_SHARE: Final = 0.05


class SwapTimes(NamedTuple):
    """One measured job: what it held on the GPU, and how long it took out and back."""

    memory_bytes: float
    out_seconds: float
    in_seconds: float


SOURCE: Final = "measured on an H200 (driver 580.159.04, 2026-11-22; docs/measurements.md, Memory)"
# The smallest first; the middle of what was measured. A smaller job takes hardly less: 0.25 GiB took 2.6 s in all.
MEASURED: Final = (
    SwapTimes(2.7 * GIB, 1.6, 0.75),
    SwapTimes(40.5 * GIB, 21.2, 8.6),
)

_LEAVING_SECONDS: Final = 1.0
_OUT_BYTES_PER_SECOND: Final = 1.5 * GIB


def swap_times(memory_bytes: float) -> SwapTimes:
    """Return how long a job of this size takes out and back, on the line through the two measured jobs.

    A job that is smaller than both takes as long as the smaller one.
    """
    small, large = MEASURED
    part = max(0.0, (memory_bytes - small.memory_bytes) / (large.memory_bytes - small.memory_bytes))
    return SwapTimes(
        memory_bytes,
        small.out_seconds + part * (large.out_seconds - small.out_seconds),
        small.in_seconds + part * (large.in_seconds - small.in_seconds),
    )


def most_out_seconds(memory_bytes: float) -> float:
    """Return how long a job takes to leave at most: more than measured, so that it has left in time."""
    return _LEAVING_SECONDS + memory_bytes / _OUT_BYTES_PER_SECOND


def beyond_measured(memory_bytes: float) -> bool:
    """Return whether a job is larger than any that was measured."""
    return memory_bytes > MEASURED[-1].memory_bytes


def kept_share(turn_seconds: float, switch_seconds: float) -> float:
    """Return the share of the time that turns keep: 1 - S / (T + S) for turns of T seconds with switches of S."""
    return 1 - switch_seconds / (turn_seconds + switch_seconds)


def host_bytes(images_bytes: int) -> int:
    """Return the host memory that must be free for copies of this size."""
    return images_bytes + max(HOST_MARGIN_BYTES, int(images_bytes * _HOST_MARGIN_SHARE))
