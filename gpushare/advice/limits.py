"""How much memory and how many SM threads each job of an answer may have. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpushare.advice.case import Isolation, Pattern
from gpushare.advice.situation import CONTEXT_BYTES, equal_limit, limit_for, whole_mib
from gpushare.advice.ways import ALL_MPS
from gpushare.base.model import Way
from gpushare.base.units import MIB
from gpushare.mps.limits import CONTEXT_BYTES as CLIENT_BYTES
from gpushare.mps.limits import Limits

if TYPE_CHECKING:
    from gpushare.advice.case import Workload
    from gpushare.advice.situation import Situation
    from gpushare.mig.profile import Profile


def job_memory(s: Situation, way: Way, work: Workload) -> int | None:
    """Return what a job gets as ``--memory``: the limit of one process with its CUDA context, in bytes; None: no limit."""
    usable = s.budget_of(way).usable_bytes
    count = s.case.processes
    if work.memory is None:
        # People who share a GPU get equal parts.
        people_share = s.case.pattern is Pattern.INTERACTIVE or Isolation.QUOTA in s.isolation
        return equal_limit(usable, count) if people_share and usable and count else None
    if way not in ALL_MPS:
        return whole_mib(work.memory + CONTEXT_BYTES)
    # MPS has no limits before Volta.
    if s.before_volta or usable is None:
        return None
    # The limit of a client is what its job has, less one context: its size with CUDA's own memory, or else without.
    for client_limit in (limit_for, whole_mib):
        total = 0
        for each, at_once in zip(s.case.workloads, s.counts_at_once(way), strict=True):
            if each.memory is not None:
                total += (client_limit(each.memory) + CLIENT_BYTES) * (at_once or 1)
        if total <= usable:
            return client_limit(work.memory) + CLIENT_BYTES
    return None


def memory_limits(s: Situation) -> list[int | None]:
    """Return the memory limit of an MPS client of each workload, in bytes; None is no limit. All together fit the GPU."""
    works = s.case.workloads
    usable = s.under_mps.usable_bytes
    if s.before_volta:
        return [None] * len(works)
    limits = [None if work.memory is None else limit_for(work.memory) for work in works]
    counts = [count for count in s.counts_at_once(Way.MPS) if count is not None]
    if usable is None or len(counts) < len(works):
        return limits
    limited_bytes = sum((limit or 0) * count for limit, count in zip(limits, counts, strict=True))
    if limited_bytes > usable:
        # There is no room for CUDA's own memory: only a quota is worth a limit without it.
        if Isolation.QUOTA not in s.isolation:
            return [None] * len(works)
        return [None if work.memory is None else work.memory // MIB * MIB for work in works]
    # Clients of unknown size share the rest.
    unlimited_count = sum(count for limit, count in zip(limits, counts, strict=True) if limit is None)
    part_of_rest = equal_limit(usable - limited_bytes, unlimited_count) if unlimited_count else None
    return [part_of_rest if limit is None else limit for limit in limits]


def limits_sum(s: Situation, way: Way) -> int | None:
    """Return the sum of the memory limits of the MPS clients; None if a client has none in the commands."""
    if way not in ALL_MPS or way is Way.MPS_STATIC:
        return None
    total = 0
    for work, limit, count in zip(s.case.workloads, memory_limits(s), s.counts_at_once(way), strict=True):
        # What runs already keeps the limit that it has, which is unknown.
        if work.running or not limit or not count or job_memory(s, way, work) is None:
            return None
        total += limit * count
    return total


# So much of an instance can be given to jobs; the driver has the rest.
_USABLE_PERCENT: Final = 98


def limit_inside_instance(way: Way, work: Workload, profile: Profile, processes: int) -> int | None:
    """Return the memory limit of each process in an instance of this profile, in bytes; None is no limit.

    It is the limit of a job under time-slicing; else of an MPS client, at most an equal part of the instance.
    """
    total = profile.memory_bytes
    equal = None if total is None else equal_limit(total * _USABLE_PERCENT // 100, processes)
    if work.memory is None:
        return equal
    if way is Way.MIG_TIMESLICE:
        return whole_mib(work.memory + CONTEXT_BYTES)
    limit = limit_for(work.memory)
    return limit if equal is None else min(limit, equal)


def client_job_memory(limit: int | None, profile: Profile) -> int | None:
    """Return the memory limit of a job that is an MPS client with this limit: with a context, at most its instance's."""
    if limit is None:
        return None
    with_context = limit + CLIENT_BYTES
    usable = (profile.memory_bytes or 0) * _USABLE_PERCENT // 100 // MIB * MIB
    return min(with_context, usable) if usable else with_context


def client_limits(share: float | None, memory: int | None) -> Limits:
    """Return the limits of an MPS client: a share of the threads in percent, rounded down, and memory in bytes."""
    # MPS keeps one decimal; 28.6 is a little less in binary.
    threads = None if share is None or share >= 100 else int(share * 10 + 1e-6) / 10
    return Limits(threads_percent=threads, memory_limit_bytes=memory)


def threads_of_each(s: Situation, processes: int) -> float:
    """Return the cap of each of N clients, in percent: the measured one, else an equal part of `threads_together`.

    Where the SMs that each process needs are given and there are enough, the cap leaves them to all others.
    """
    if s.cap is not None:
        return s.cap
    needed_sms = s.case.workloads[0].sms if len(s.case.workloads) == 1 else None
    total = s.gpu.multiprocessors
    if needed_sms is not None and total and needed_sms * processes <= total:
        return 100.0 * (total - needed_sms * (processes - 1)) / total
    return min(100.0, threads_together(s) / processes)


def threads_together(s: Situation) -> int:
    """Return what the thread caps of all clients add up to, in percent: 100 keeps each within its share, else 200.

    NVIDIA calls 100/(0.5n) "more optimal" than 100/n; on an H200 it was as good or better for every n tested.
    """
    within_shares = s.case.any("containment") or s.case.any("latency") or Isolation.QUOTA in s.isolation
    return 100 if within_shares else 200
