"""What to type for a way: gpushare lines for this host with the numbers worked out, their undo, and what to measure. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpushare.advice.memory import equal_limit, limit_for
from gpushare.advice.recipe_first import without_mps
from gpushare.advice.recipe_line import Line, Recipe, again, program, sudo, visible_to, who
from gpushare.advice.recipe_mig import mig_as_it_was, mig_lines, mig_shared_lines, off_first
from gpushare.advice.recipe_mps import (
    Limits,
    mps_lines,
    mps_priority_lines,
    mps_static_lines,
    mps_streams_lines,
    threads_for,
)
from gpushare.advice.recipe_whole import whole_lines
from gpushare.advice.table import Mechanism
from gpushare.advice.ways import Way
from gpushare.advice.workload import Isolation, Pattern
from gpushare.model import ComputeMode, TimeSlice

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Workload


def recipe(situation: Situation, way: Way) -> Recipe:
    """Return what to type for a way."""
    found = _RECIPES[way](situation)
    found = without_mps(situation, way, replace(found, lines=(*found.lines, *_elsewhere(situation, way))))
    if any(line in found.lines for line in off_first(situation)):
        inside = (
            [Line("and MPS in them: gpushare mps start -g UUID, with the new UUID of each", None)]
            if situation.gpu.mps_daemons
            else []
        )
        return replace(found, undo=(*found.undo, mig_as_it_was(situation), *inside))
    return found


def _elsewhere(situation: Situation, way: Way) -> list[Line]:
    """Return where the share is written for what starts the programs in containers: `gpushare run` does not there."""
    if way.outer not in {Mechanism.TIMESLICE, Mechanism.MPS, Mechanism.MIG}:
        return []
    if situation.case.any("kubernetes"):
        return [Line("for pods, the share as configuration: gpushare export k8s, or gpushare export dra", None)]
    if situation.case.any("containers"):
        return [Line("for containers, the share as flags: gpushare export docker, or gpushare export compose", None)]
    return []


def _timeslice(situation: Situation) -> Recipe:
    case, index = situation.case, situation.gpu.index
    level = {Pattern.INTERACTIVE: "short", Pattern.STEADY: "long"}.get(case.pattern) if case.pattern else None
    blocked = situation.gpu.compute_mode not in {None, ComputeMode.DEFAULT}
    lines = off_first(situation)
    undo: tuple[Line, ...] = ()
    if situation.gpu.time_slice_settable is not False and (level or blocked) and situation.may_be_root is not False:
        command = f"{sudo(situation)}gpushare timeslice set {level or 'default'} -g {index}"
        lines.append(Line(_LEVELS.get(level or "", "let several programs in"), command))
        undo = _level_back(situation, blocked=blocked)
    if case.any("running"):
        lines.append(Line("what runs shares the GPU as it does now; look", f"gpushare status -g {index}"))
    lines += [
        Line(again(count, who(one)), f"{visible_to(situation)} {program(one)}")
        for one, count in zip(case.workloads, case.counts, strict=True)
        if not one.running
    ]
    return Recipe(
        lines=tuple(lines),
        undo=undo,
        measure=(
            "p99 and rate of each program beside the others, against alone",
            "the levels short and long: NVIDIA publishes no milliseconds for them",
        ),
    )


def _level_back(situation: Situation, *, blocked: bool) -> tuple[Line, ...]:
    """Return the way back to the level, and to the compute mode where that was in the way."""
    index, root = situation.gpu.index, sudo(situation)
    level = situation.gpu.time_slice
    level = None if level is TimeSlice.DEFAULT else level
    if level is not None and not blocked:
        return (Line("go back", f"{root}gpushare timeslice set {level.title} -g {index}"),)
    back = [Line("go back", f"{root}gpushare timeslice reset -g {index}")]
    if level is not None:
        what = "and to the level, which gpushare sets only where several programs may in"
        back.append(Line(what, f"{root}nvidia-smi compute-policy -i {index} --set-timeslice {int(level)}"))
    return tuple(back)


_LEVELS: Final = {"short": "short slices: people wait less", "long": "long slices: fewer switches"}


def _streams(situation: Situation) -> Recipe:
    one = situation.case.workloads[0]
    return Recipe(
        lines=(
            *off_first(situation),
            Line(
                "in the program: independent work on its own cudaStream_t (torch.cuda.Stream), copies from pinned memory",
                None,
            ),
            Line("run it", f"{visible_to(situation)} {program(one)}"),
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
            *off_first(situation),
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
            Line("look whether the GPU waits", f"gpushare status -g {situation.gpu.index} --watch 1"),
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
    Way.WHOLE: whole_lines,
    Way.STREAMS: _streams,
    Way.TIMESLICE: _timeslice,
    Way.MPS: mps_lines,
    Way.MPS_PRIORITY: mps_priority_lines,
    Way.MPS_STATIC: mps_static_lines,
    Way.MIG: _mig,
    Way.VGPU: _vgpu,
    Way.MIG_MPS: _mig_mps,
    Way.MIG_TIMESLICE: _mig_timeslice,
    Way.MPS_STREAMS: mps_streams_lines,
    Way.MEASURE: _measure,
    Way.FIX: _fix,
}
