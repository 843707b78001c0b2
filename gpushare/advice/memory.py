"""Memory is arithmetic: what the processes want, what sharing itself costs, and what the GPU has. Pure.

Measured on an H200 (driver 580, 2026-11-21): the MPS server holds 66 MiB, a PyTorch client without data 248 MiB.
Without MPS 300 to 500 MB per process are reported: the larger is planned with, and refused is only what does not
even fit with the smaller. Two per cent stay free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.units import MIB, format_bytes

if TYPE_CHECKING:
    from gpushare.advice.facts import GpuFacts
    from gpushare.advice.workload import Case

CONTEXT_BYTES: Final = 500 * MIB
LEAST_CONTEXT_BYTES: Final = 286 * MIB
MPS_CONTEXT_BYTES: Final = 248 * MIB
MPS_SERVER_BYTES: Final = 66 * MIB
# What of a pinned limit a PyTorch program does not get for its data: under 8G it saw 7.40 GiB.
MPS_LIMIT_EXTRA_BYTES: Final = 614 * MIB
HEADROOM_PERCENT: Final = 2
# Limits and splits are rounded to this, so that people can read them.
_STEP: Final = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The sum for one GPU, with or without MPS. None: not known."""

    total_bytes: int | None
    headroom_bytes: int | None
    # Of the way of sharing itself: the MPS server.
    server_bytes: int
    context_bytes: int
    # The smallest that is reported; where it was measured the same.
    least_context_bytes: int
    processes: int | None
    # Without contexts, all processes together.
    wanted_bytes: int | None
    # The largest process, with its context.
    largest_bytes: int | None

    @property
    def usable_bytes(self) -> int | None:
        """Return what processes and their contexts may take together."""
        if self.total_bytes is None or self.headroom_bytes is None:
            return None
        return self.total_bytes - self.headroom_bytes - self.server_bytes

    @property
    def needed_bytes(self) -> int | None:
        """Return what processes and their contexts take together."""
        if self.wanted_bytes is None or self.processes is None:
            return None
        return self.wanted_bytes + self.processes * self.context_bytes

    @property
    def left_bytes(self) -> int | None:
        """Return what is left then; below zero is what is missing."""
        usable, needed = self.usable_bytes, self.needed_bytes
        return None if usable is None or needed is None else usable - needed

    @property
    def fits(self) -> bool | None:
        """Return whether all fit at the same time."""
        left = self.left_bytes
        return None if left is None else left >= 0

    @property
    def may_fit(self) -> bool | None:
        """Return whether all fit at the same time with the smallest contexts that are reported."""
        left = self.left_bytes
        if left is None or self.processes is None:
            return None
        return left + self.processes * (self.context_bytes - self.least_context_bytes) >= 0

    @property
    def one_fits(self) -> bool | None:
        """Return whether the largest process fits alone."""
        usable = self.usable_bytes
        return None if usable is None or self.largest_bytes is None else self.largest_bytes <= usable

    @property
    def most(self) -> int | None:
        """Return how many processes of the largest kind fit at the same time."""
        usable = self.usable_bytes
        return None if usable is None or not self.largest_bytes else max(usable, 0) // self.largest_bytes

    def sentence(self) -> str | None:
        """Return the sum in words; None when too little is known."""
        left, needed = self.left_bytes, self.needed_bytes
        if left is None or needed is None:
            return None
        contexts = f"{self.processes} x {format_bytes(self.context_bytes)} CUDA context"
        rest = f"{HEADROOM_PERCENT} % kept free"
        server = f", {format_bytes(self.server_bytes)} MPS server" if self.server_bytes else ""
        verdict = (
            f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much, {self.most} would fit"
        )
        return (
            f"{format_bytes(self.wanted_bytes)} + {contexts} = {format_bytes(needed)} of "
            f"{format_bytes(self.total_bytes)} ({rest}{server}): {verdict}"
        )


def budget(case: Case, gpu: GpuFacts, *, mps: bool) -> Budget:
    """Return the budget of a case on a GPU."""
    context = MPS_CONTEXT_BYTES if mps else CONTEXT_BYTES
    total = gpu.memory_total_bytes
    counts = case.counts
    sizes = [one.memory for one in case.workloads]
    known = [size * count for size, count in zip(sizes, counts, strict=True) if size is not None and count is not None]
    # What nobody said is not nothing: then the sum is known only from below, and is a sum when it is too large already.
    complete = len(known) == len(sizes)
    largest = max((size for size in sizes if size is not None), default=None)
    wanted = sum(known) if complete and known else None
    if wanted is None and known and total is not None and sum(known) > total:
        wanted = sum(known)
    return Budget(
        total_bytes=total,
        headroom_bytes=None if total is None else -(-total * HEADROOM_PERCENT // 100),
        server_bytes=MPS_SERVER_BYTES if mps else 0,
        context_bytes=context,
        least_context_bytes=MPS_CONTEXT_BYTES if mps else LEAST_CONTEXT_BYTES,
        processes=case.processes,
        wanted_bytes=wanted,
        largest_bytes=None if largest is None else largest + context,
    )


def limit_for(memory: int) -> int:
    """Return the pinned limit under which a process of this size works: with what CUDA itself takes of it, rounded up."""
    return -(-(memory + MPS_LIMIT_EXTRA_BYTES) // _STEP) * _STEP


def equal_limit(usable: int, processes: int) -> int | None:
    """Return the limit for each of so many equal processes, or None when that is next to nothing.

    The limits, and what each client takes beside its limit, add up to at most the usable memory.
    """
    share = usable // processes // _STEP * _STEP
    return share if share > MPS_LIMIT_EXTRA_BYTES else None
