"""Lines for a GPU that nobody shares: one program alone, a queue, or one process on each GPU. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.advice.recipe_line import Line, Recipe, again, program, visible_to, who
from gpushare.advice.recipe_mig import off_first
from gpushare.advice.requirements import REQUIREMENTS, Requirement
from gpushare.advice.rule import Kind, Rule
from gpushare.advice.vetoes import VETOES
from gpushare.advice.ways import Way
from gpushare.advice.workload import Role

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Workload


def whole_lines(situation: Situation) -> Recipe:
    """Return the lines of programs that have a GPU to themselves."""
    if situation.several and situation.case.any("vms"):
        # A lock or an environment variable of the host says nothing to a virtual machine.
        return Recipe(
            lines=(
                Line("on the hypervisor: give the GPU whole to one virtual machine at a time (PCI passthrough)", None),
            )
        )
    if situation.together:
        return _one_each(situation)
    if situation.several:
        return _queue(situation)
    run = Line("nothing to set up: run it", f"{visible_to(situation)} {program(situation.case.workloads[0])}")
    return Recipe(lines=(*off_first(situation), run))


def _queue(situation: Situation) -> Recipe:
    case, lines, index = situation.case, off_first(situation), situation.gpu.index
    lock = f"flock /tmp/gpu-{index}.lock env {visible_to(situation)}"
    if case.same_user is not True:
        # Not a file: in /tmp that of another user cannot be opened for it (fs.protected_regular).
        lines.append(Line("a lock that every user can take", f"mkdir -p /tmp/gpu-{index}.queue"))
        lock = f"flock /tmp/gpu-{index}.queue env {visible_to(situation)}"
    lines += [
        Line(_turn(situation, one, count), f"{lock} {program(one)}")
        for one, count in zip(case.workloads, case.counts, strict=True)
    ]
    if _may_pause(situation):
        lines.append(
            Line(
                "or both at once, the other paused while production works: gpushare run --production NAME, "
                "and gpushare run --opportunistic --pause",
                None,
            )
        )
    return Recipe(lines=tuple(lines), measure=("how long all take one after the other: what any sharing has to beat",))


def _turn(situation: Situation, one: Workload, count: int | None) -> str:
    if not situation.pair:
        return again(count, who(one), "one after the other")
    first = one.role is Role.PRODUCTION
    return again(count, who(one), "first: it waits for what has begun" if first else "when production has ended")


def _may_pause(situation: Situation) -> bool:
    """Return whether `gpushare run` can have both on the GPU, one of them standing still."""
    if not situation.pair or situation.case.same_user is False or situation.before_volta:
        return False
    rules: tuple[Rule | Requirement, ...] = (*VETOES, *REQUIREMENTS)
    return not any(one.kind is Kind.VETO for rule in rules for one in rule.reasons(situation, Way.MPS))


def _one_each(situation: Situation) -> Recipe:
    """Return the lines of processes that wait for each other: in a queue the first would wait for ever."""
    processes, usable = situation.case.processes or 2, situation.gpus_to_have
    gpus = usable[:processes]
    devices = ",".join(str(one.uuid or one.index) for one in gpus)
    if len(gpus) == 1:
        what = "they work together, so none can wait for another: start it with one process"
    elif len(gpus) < processes:
        what = f"one process on each GPU: {processes} are wanted, and {len(gpus)} GPUs are free here"
    else:
        what = f"start it once: its {processes} processes have a GPU each"
    lines = [Line(what, f"CUDA_VISIBLE_DEVICES={devices} {program(one)}") for one in situation.case.workloads]
    return Recipe(
        lines=(*off_first(situation), *lines),
        measure=("the rate with one process, and with one on each GPU",) if len(gpus) > 1 else (),
    )
