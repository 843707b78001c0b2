"""What to type for a way: gpushare lines for this host with the numbers worked out, their undo, and what to measure. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpushare.advice.memory import equal_limit, limit_for
from gpushare.advice.recipe_line import Line, Recipe, again, program, sudo
from gpushare.advice.recipe_mig import mig_as_it_was, mig_lines, mig_shared_lines
from gpushare.advice.ways import ALL_MPS, Way
from gpushare.advice.workload import Isolation, Pattern, Role
from gpushare.model import ComputeMode
from gpushare.units import GIB, MIB

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Workload

# Measured on an H200: the highest cap under which production kept its rate and its p99, with low priority.
OPPORTUNISTIC_CAP: Final = 60


def recipe(situation: Situation, way: Way) -> Recipe:
    """Return what to type for a way."""
    found = _RECIPES[way](situation)
    if any(line in found.lines for line in _off_first(situation)):
        return replace(found, undo=(*found.undo, mig_as_it_was(situation)))
    return found


def size(number: int) -> str:
    """Return a size as ``--memory`` takes it: ``8G``, ``1500M``."""
    return f"{number // GIB}G" if number % GIB == 0 else f"{number // MIB}M"


def percent(share: float) -> str:
    """Return a percentage as ``--threads`` takes it, rounded down to one decimal."""
    return f"{int(share * 10) / 10:g}"


# -- MPS -------------------------------------------------------------------------------------------


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
    """Return the cap of each of so many clients: 100/n where each is to be kept in its share, else 200/n.

    NVIDIA calls 100/(0.5n) "more optimal" than 100/n; on an H200 it was as good or better at every n that was tried.
    """
    case = situation.case
    apart = case.any("containment") or case.any("latency") or Isolation.QUOTA in situation.isolation
    return min(100.0, (100.0 if apart else 200.0) / processes)


def limits_sum(situation: Situation, way: Way) -> int | None:
    """Return what the memory limits of all processes come to; None: there is a process without one."""
    if way not in ALL_MPS or way is Way.MPS_STATIC:
        return None
    ones = situation.case.workloads
    counts = [one.processes or (1 if len(ones) > 1 else 0) for one in ones]
    limited = [
        (limit or 0) * count
        for one, limit, count in zip(ones, memory_limits(situation), counts, strict=True)
        if not (way is Way.MPS_PRIORITY and one.role is Role.PRODUCTION)
    ]
    return sum(limited) if limited and all(limited) else None


def memory_limits(situation: Situation) -> list[int | None]:
    """Return a limit per workload; they add up to at most what the GPU has, or there are none."""
    if situation.before_volta:
        return [None] * len(situation.case.workloads)
    ones, usable = situation.case.workloads, situation.under_mps.usable_bytes
    several = len(ones) > 1
    counts = [one.processes or (1 if several else 0) for one in ones]
    if usable is None or not all(counts):
        return [None if one.memory is None else limit_for(one.memory) for one in ones]
    limits = [None if one.memory is None else limit_for(one.memory) for one in ones]
    taken = sum((limit or 0) * count for limit, count in zip(limits, counts, strict=True))
    if taken > usable:
        return [None if one.memory is None else one.memory // MIB * MIB for one in ones]
    open_count = sum(count for limit, count in zip(limits, counts, strict=True) if limit is None)
    rest = equal_limit(usable - taken, open_count) if open_count else None
    return [rest if limit is None else limit for limit in limits]


def _mps(situation: Situation) -> Recipe:
    case, gpu = situation.case, f"-g {situation.gpu.index}"
    ones, limits = case.workloads, memory_limits(situation)
    processes = case.processes
    share = None if processes is None or situation.before_volta else threads_for(situation, processes)
    lines = _off_first(situation)
    if len(ones) == 1:
        words = shlex.join(Limits(share, limits[0]).words)
        lines.append(Line("start MPS with limits for each process", f"gpushare mps start {gpu} {words}".strip()))
        lines.append(Line(again(processes), f"gpushare run {gpu} -- {program(ones[0])}"))
    else:
        lines.append(Line("start MPS", f"gpushare mps start {gpu}"))
        for one, limit in zip(ones, limits, strict=True):
            words = shlex.join(Limits(share, limit).words)
            command = " ".join(filter(None, [f"gpushare run {gpu}", words, f"-- {program(one)}"]))
            lines.append(Line(again(one.processes or 1, one.name), command))
    return Recipe(
        lines=tuple(lines),
        undo=(Line("stop MPS, which waits for its programs", f"gpushare mps stop {gpu}"),),
        measure=(
            "steps per second of all programs together, against the same number without MPS",
            "the same with --threads 100 and half of it: the best cap depends on the program",
        ),
    )


def _mps_streams(situation: Situation) -> Recipe:
    found = _mps(situation)
    inside = Line("inside each program: put independent work on CUDA streams of its own", None)
    return Recipe(lines=(inside, *found.lines), undo=found.undo, measure=found.measure)


def _mps_priority(situation: Situation) -> Recipe:
    ones, gpu = situation.case.workloads, f"-g {situation.gpu.index}"
    giving = [one for one in ones if one.role is Role.OPPORTUNISTIC] or [ones[-1]]
    count = sum(one.processes or 1 for one in giving)
    lines = [*_off_first(situation), Line("start MPS; production has no cap", f"gpushare mps start {gpu}")]
    limits = dict(zip(map(id, ones), memory_limits(situation), strict=True))
    for one in ones:
        memory = None if limits[id(one)] is None else ["--memory", size(limits[id(one)] or 0)]
        if one in giving:
            words = ["--threads", percent(OPPORTUNISTIC_CAP / count), *(memory or []), "--priority", "low"]
            title = again(one.processes or 1, one.name or "opportunistic")
        else:
            # Production has no limit: what is left to the other is what production does not need.
            words = []
            title = again(one.processes or 1, one.name or "production")
        lines.append(Line(title, " ".join([f"gpushare run {gpu}", *words, "--", program(one)])))
    return Recipe(
        lines=tuple(lines),
        undo=(Line("stop MPS, which waits for its programs", f"gpushare mps stop {gpu}"),),
        measure=(
            "production's rate and p99, alone and beside the other, three times each in turn",
            f"when production loses more than 3 %: restart the other with a cap of 50 instead of {OPPORTUNISTIC_CAP}",
            "a cap is fixed at the start of a program: each try is a restart",
        ),
    )


def _mps_static(situation: Situation) -> Recipe:
    index = situation.gpu.index
    return Recipe(
        lines=(
            Line("gpushare does not start static partitions yet: NVIDIA's own lines", None),
            Line("start the daemon in static mode", "nvidia-cuda-mps-control -d -S"),
            Line(
                f"add a partition on GPU {index}, of 7 chunks",
                f"echo 'sm_partition add {situation.gpu.uuid or index} 7' | nvidia-cuda-mps-control",
            ),
            Line("list the partitions with their ids", "echo lspart | nvidia-cuda-mps-control"),
            Line("start each program in its partition", "CUDA_MPS_SM_PARTITION=ID CMD"),
        ),
        undo=(Line("stop the daemon", "echo quit | nvidia-cuda-mps-control"),),
        measure=("each program alone in its partition, and beside the others: only memory bandwidth is shared",),
    )


# -- the others ------------------------------------------------------------------------------------


def _device(situation: Situation) -> str:
    return f"CUDA_VISIBLE_DEVICES={situation.gpu.uuid or situation.gpu.index}"


def _off_first(situation: Situation) -> list[Line]:
    """Return the line that turns MIG off, where it is on."""
    if not situation.gpu.mig_enabled:
        return []
    return [Line("turn MIG off", f"{sudo(situation)}gpushare mig disable -g {situation.gpu.index} --destroy")]


def _whole(situation: Situation) -> Recipe:
    ones, lines = situation.case.workloads, _off_first(situation)
    if situation.several:
        lock = f"flock /tmp/gpu-{situation.gpu.index}.lock env {_device(situation)}"
        lines += [
            Line(
                again(one.processes if len(ones) == 1 else one.processes or 1, one.name, "one after the other"),
                f"{lock} {program(one)}",
            )
            for one in ones
        ]
    else:
        lines.append(Line("nothing to set up: run it", f"{_device(situation)} {program(ones[0])}"))
    return Recipe(
        lines=tuple(lines),
        undo=(),
        measure=("how long all take one after the other: what any sharing has to beat",) if situation.several else (),
    )


def _timeslice(situation: Situation) -> Recipe:
    case, index = situation.case, situation.gpu.index
    level = {Pattern.INTERACTIVE: "short", Pattern.STEADY: "long"}.get(case.pattern) if case.pattern else None
    blocked = situation.gpu.compute_mode not in {None, ComputeMode.DEFAULT}
    lines = _off_first(situation)
    undo: tuple[Line, ...] = ()
    if situation.gpu.time_slice_settable is not False and (level or blocked) and situation.may_be_root is not False:
        command = f"{sudo(situation)}gpushare timeslice set {level or 'default'} -g {index}"
        lines.append(Line(_LEVELS.get(level or "", "let several programs in"), command))
        undo = (Line("go back", f"{sudo(situation)}gpushare timeslice reset -g {index}"),)
    if case.any("running"):
        lines.append(Line("the programs run: they are time-sliced as they are; look", f"gpushare status -g {index}"))
    else:
        several = len(case.workloads) > 1
        lines += [
            Line(again(one.processes or (1 if several else None), one.name), f"{_device(situation)} {program(one)}")
            for one in case.workloads
        ]
    return Recipe(
        lines=tuple(lines),
        undo=undo,
        measure=(
            "p99 and rate of each program beside the others, against alone",
            "the levels short and long: NVIDIA publishes no milliseconds for them",
        ),
    )


_LEVELS: Final = {"short": "short slices: people wait less", "long": "long slices: fewer switches"}


def _streams(situation: Situation) -> Recipe:
    one = situation.case.workloads[0]
    return Recipe(
        lines=(
            *_off_first(situation),
            Line(
                "in the program: independent work on its own cudaStream_t (torch.cuda.Stream), copies from pinned memory",
                None,
            ),
            Line("run it", f"{_device(situation)} {program(one)}"),
        ),
        undo=(),
        measure=("whether kernels overlap: nsys profile CMD",),
    )


def _vgpu(situation: Situation) -> Recipe:
    backed = situation.gpu.mig_capable and (
        situation.case.any("bandwidth_qos") or Isolation.FULL in situation.isolation
    )
    kind = "a MIG-backed vGPU type" if backed else "a vGPU type whose frame buffer holds the work"
    return Recipe(
        lines=(
            Line(
                "gpushare does not set up vGPU: install NVIDIA's vGPU host driver and licence on the hypervisor", None
            ),
            Line(f"give each virtual machine {kind}", None),
            Line("what the GPU offers", f"nvidia-smi vgpu -s -i {situation.gpu.index}"),
        ),
        undo=(),
        measure=("the program in one virtual machine, alone and beside the others",),
    )


def _measure(situation: Situation) -> Recipe:
    one, processes = situation.case.workloads[0], situation.case.processes
    ways = "" if situation.case.same_user is not False else " --ways queue,timeslice,mig"
    copies = f"1,{processes}" if processes is not None and processes > 1 else "1,2,4"
    return Recipe(
        lines=(
            *_off_first(situation),
            Line(
                "run it under each way in turn; nothing of the host stays changed",
                f"gpushare bench -g {situation.gpu.index} --copies {copies}{ways} -- {program(one)}",
            ),
        ),
        measure=("runs per second of all together, and p99; where the intervals overlap there is no difference",),
    )


def _fix(situation: Situation) -> Recipe:
    return Recipe(
        lines=(
            Line("more loader workers, pinned memory, prefetch, larger batches; data on a local disk", None),
            Line("look whether the GPU waits", f"gpushare status -g {situation.gpu.index} --watch"),
        ),
        undo=(),
        measure=("the rate with synthetic input: if it is much higher, the input is the bottleneck",),
    )


def _mig(situation: Situation) -> Recipe:
    return mig_lines(situation, Way.MIG)


def _mig_mps(situation: Situation) -> Recipe:
    def limits(one: Workload, inside: int, memory: int | None) -> list[str]:
        wanted = None if one.memory is None else limit_for(one.memory)
        room = None if memory is None else equal_limit(memory * 98 // 100, inside)
        fitting = wanted if wanted is not None and (room is None or wanted <= room) else room
        return Limits(threads_for(situation, inside), fitting).words

    return mig_shared_lines(situation, Way.MIG_MPS, limits)


def _mig_timeslice(situation: Situation) -> Recipe:
    return mig_shared_lines(situation, Way.MIG_TIMESLICE, None)


_RECIPES: Final[dict[Way, Callable[[Situation], Recipe]]] = {
    Way.WHOLE: _whole,
    Way.STREAMS: _streams,
    Way.TIMESLICE: _timeslice,
    Way.MPS: _mps,
    Way.MPS_PRIORITY: _mps_priority,
    Way.MPS_STATIC: _mps_static,
    Way.MIG: _mig,
    Way.VGPU: _vgpu,
    Way.MIG_MPS: _mig_mps,
    Way.MIG_TIMESLICE: _mig_timeslice,
    Way.MPS_STREAMS: _mps_streams,
    Way.MEASURE: _measure,
    Way.FIX: _fix,
}
