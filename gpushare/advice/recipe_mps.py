"""Lines for MPS: the daemon, and the limits of each client, worked out. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.advice.memory import equal_limit, limit_for
from gpushare.advice.recipe_line import Line, Recipe, again, program, who
from gpushare.advice.recipe_mig import off_first
from gpushare.advice.situation import HOPPER
from gpushare.advice.ways import ALL_MPS, Way
from gpushare.advice.workload import Isolation, Role
from gpushare.units import GIB, MIB

if TYPE_CHECKING:
    from gpushare.advice.facts import MpsFacts
    from gpushare.advice.situation import Situation

# Measured on an H200: the highest cap under which production kept its rate and its p99, with low priority.
OPPORTUNISTIC_CAP: Final = 60


def size(number: int) -> str:
    """Return a size as ``--memory`` takes it: ``8G``, ``1500M``."""
    return f"{number // GIB}G" if number % GIB == 0 else f"{number // MIB}M"


def percent(share: float) -> str:
    """Return a percentage as ``--threads`` takes it, rounded down to one decimal."""
    # 28.6 is a little less in binary.
    return f"{int(share * 10 + 1e-6) / 10:g}"


@dataclass(frozen=True)
class Limits:
    """Limits of one kind of client, as words of a command line."""

    threads: float | None = None
    memory: int | None = None

    @property
    def words(self) -> list[str]:
        """Return the options."""
        threads = [] if self.threads is None or self.threads >= 100 else ["--threads", percent(self.threads)]
        return threads + ([] if self.memory is None else ["--memory", size(self.memory)])


def threads_for(situation: Situation, processes: int) -> float:
    """Return the cap of each of so many clients: as measured, else 100/n where each is to be kept in its share, or 200/n.

    NVIDIA calls 100/(0.5n) "more optimal" than 100/n; on an H200 it was as good or better at every n that was tried.
    """
    return situation.cap if situation.cap is not None else min(100.0, threads_together(situation) / processes)


def threads_together(situation: Situation) -> int:
    """Return what the caps of all clients come to, in percent: 100 or 200."""
    case = situation.case
    apart = case.any("containment") or case.any("latency") or Isolation.QUOTA in situation.isolation
    return 100 if apart else 200


def limits_sum(situation: Situation, way: Way) -> int | None:
    """Return what the memory limits of all processes come to; None: there is a process without one."""
    if way not in ALL_MPS or way is Way.MPS_STATIC:
        return None
    case = situation.case
    limited = [
        (limit or 0) * (count or 0)
        for one, limit, count in zip(case.workloads, memory_limits(situation), case.counts, strict=True)
        if not (way is Way.MPS_PRIORITY and one.role is Role.PRODUCTION)
    ]
    return sum(limited) if limited and all(limited) else None


def memory_limits(situation: Situation) -> list[int | None]:
    """Return a limit per workload; they add up to at most what the GPU has, or there are none."""
    if situation.before_volta:
        return [None] * len(situation.case.workloads)
    ones, usable = situation.case.workloads, situation.under_mps.usable_bytes
    limits = [None if one.memory is None else limit_for(one.memory) for one in ones]
    counts = [count for count in situation.case.counts if count is not None]
    if usable is None or len(counts) < len(ones):
        return limits
    taken = sum((limit or 0) * count for limit, count in zip(limits, counts, strict=True))
    if taken > usable:
        return [None if one.memory is None else one.memory // MIB * MIB for one in ones]
    open_count = sum(count for limit, count in zip(limits, counts, strict=True) if limit is None)
    rest = equal_limit(usable - taken, open_count) if open_count else None
    return [rest if limit is None else limit for limit in limits]


def start_words(now: MpsFacts) -> list[str]:
    """Return the options with which a daemon has the limits of another."""
    return [
        *Limits(now.threads_percent, now.memory_limit_bytes).words,
        *(["--priority low"] if now.low_priority else []),
    ]


def set_limits(situation: Situation, threads: float | None, memory: int | None) -> str:
    """Return the line that gives the daemon of the GPU these limits; None is none."""
    limit = "none" if memory is None else size(memory)
    share = percent(min(threads or 100.0, 100.0))
    return f"gpushare mps set -g {situation.gpu.index} --threads {share} --memory {limit}"


def _daemon(situation: Situation, what: str, limits: Limits | None = None) -> Line:
    """Return the line that starts the daemon, or that sets the limits of the one that is there."""
    gpu, limits = f"-g {situation.gpu.index}", limits or Limits()
    if not situation.mps_serves:
        return Line(what, " ".join([f"gpushare mps start {gpu}", *limits.words]))
    return Line(
        "set the limits of the MPS daemon that is there already", set_limits(situation, limits.threads, limits.memory)
    )


def limits_back(situation: Situation) -> Line:
    """Return the line that gives the daemon of now its limits again."""
    now = situation.gpu.mps
    if now is None:
        return Line("set the limits back: `gpushare mps set` has printed the line", None)
    return Line("set the limits back", set_limits(situation, now.threads_percent, now.memory_limit_bytes))


def _back(situation: Situation) -> tuple[Line, ...]:
    if situation.mps_serves:
        return (limits_back(situation),)
    return (Line("stop MPS, which waits for its programs", f"gpushare mps stop -g {situation.gpu.index}"),)


def mps_lines(situation: Situation) -> Recipe:
    """Return the lines of MPS: equal limits for one workload, or one line of limits for each."""
    case, gpu = situation.case, f"-g {situation.gpu.index}"
    ones, limits = case.workloads, memory_limits(situation)
    processes = case.processes
    share = None if processes is None or situation.before_volta else threads_for(situation, processes)
    lines = off_first(situation)
    if len(ones) == 1 and case.any("weights") and processes is not None and processes > 1 and share is not None:
        lines += _weighted(situation, processes, limits[0])
    elif len(ones) == 1:
        lines.append(_daemon(situation, "start MPS with limits for each process", Limits(share, limits[0])))
        lines.append(Line(again(processes), f"gpushare run {gpu} -- {program(ones[0])}"))
    else:
        lines.append(_daemon(situation, "start MPS"))
        for one, limit in zip(ones, limits, strict=True):
            words = shlex.join(Limits(share, limit).words)
            command = " ".join(filter(None, [f"gpushare run {gpu}", words, f"-- {program(one)}"]))
            lines.append(Line(again(one.processes or 1, who(one)), command))
    return Recipe(
        lines=tuple(lines),
        undo=_back(situation),
        measure=(
            "steps per second of all programs together, against the same number without MPS",
            *(() if situation.before_volta else (_OTHER_CAPS,)),
        ),
    )


_OTHER_CAPS: Final = "the same with --threads 100 and half of it: the best cap depends on the program"


def _weighted(situation: Situation, processes: int, limit: int | None) -> list[Line]:
    """Return the lines of unequal shares: one process with twice the share of each other, together 100 %."""
    gpu, one = f"-g {situation.gpu.index}", situation.case.workloads[0]
    small = 100.0 / (processes + 1)
    larger, other = (shlex.join(Limits(share, limit).words) for share in (2 * small, small))
    return [
        _daemon(situation, "start MPS"),
        Line(
            "the program with the larger share: choose the shares, to 100 together",
            f"gpushare run {gpu} {larger} -- {program(one)}",
        ),
        Line(again(processes - 1, "with a smaller share"), f"gpushare run {gpu} {other} -- {program(one)}"),
    ]


def mps_streams_lines(situation: Situation) -> Recipe:
    """Return those of MPS, with streams inside each program."""
    found = mps_lines(situation)
    inside = Line("inside each program: put independent work on CUDA streams of its own", None)
    return Recipe(lines=(inside, *found.lines), undo=found.undo, measure=found.measure)


def mps_priority_lines(situation: Situation) -> Recipe:
    """Return the lines of production without a cap, and of the others below it."""
    ones, gpu = situation.case.workloads, f"-g {situation.gpu.index}"
    giving = [one for one in ones if one.role is Role.OPPORTUNISTIC] or [ones[-1]]
    count = sum(one.processes or 1 for one in giving)
    lines = [*off_first(situation), _daemon(situation, "start MPS; production has no cap")]
    limits = dict(zip(map(id, ones), memory_limits(situation), strict=True))
    for one in ones:
        memory = None if limits[id(one)] is None else ["--memory", size(limits[id(one)] or 0)]
        if one in giving:
            words = ["--threads", percent(OPPORTUNISTIC_CAP / count), *(memory or []), "--priority", "low"]
            title = again(one.processes or 1, who(one))
        else:
            # Production has no limit: what is left to the other is what production does not need.
            words = []
            title = again(one.processes or 1, who(one))
        lines.append(Line(title, " ".join([f"gpushare run {gpu}", *words, "--", program(one)])))
    return Recipe(
        lines=tuple(lines),
        undo=_back(situation),
        measure=(
            "production's rate and p99, alone and beside the other, three times each in turn",
            f"when production loses more than 3 %: restart the other with a cap of 50 instead of {OPPORTUNISTIC_CAP}",
            "a cap is fixed at the start of a program: each try is a restart",
        ),
    )


def static_chunks(situation: Situation) -> int:
    """Return how many chunks each process gets: 8 SMs are a chunk from Hopper on, 4 before (NVIDIA MPS guide)."""
    newer = situation.gpu.compute_capability is not None and situation.gpu.compute_capability >= HOPPER
    chunks = (situation.gpu.multiprocessors or 0) // (8 if newer else 4)
    return max(chunks // (situation.case.processes or 2), 1)


def mps_static_lines(situation: Situation) -> Recipe:
    """Return NVIDIA's own lines for static partitions, equally large."""
    index, chunks = situation.gpu.index, static_chunks(situation)
    processes = situation.case.processes or 2
    return Recipe(
        lines=(
            Line("gpushare does not start static partitions yet: NVIDIA's own lines", None),
            Line("start the daemon in static mode", "nvidia-cuda-mps-control -d -S"),
            Line(
                again(processes, f"add a partition of {chunks} chunks on GPU {index}"),
                f"echo 'sm_partition add {situation.gpu.uuid or index} {chunks}' | nvidia-cuda-mps-control",
            ),
            Line("list the partitions with their ids", "echo lspart | nvidia-cuda-mps-control"),
            Line("start each program in its partition", "CUDA_MPS_SM_PARTITION=ID CMD"),
        ),
        undo=(Line("stop the daemon", "echo quit | nvidia-cuda-mps-control"),),
        measure=("each program alone in its partition, and beside the others: only memory bandwidth is shared",),
    )
