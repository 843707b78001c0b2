"""GPUs that a recording shows to be underused, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpushare.host.mps_control import SERVER_PROGRAM
from gpushare.measure.tally import GpuUse, ProcessUse, Recording
from gpushare.units import MIB, format_bytes

# Work in fewer samples than this is no work: a monitoring program opens a context now and then.
NO_WORK_SHARE: Final = 0.01
# A bare CUDA context holds up to about 500 MiB; less than this is nobody's data.
HELD_BYTES: Final = 256 * MIB
# Below this mean a GPU is a candidate to share; its 95th percentile tells whether it has peaks.
LOW_MEAN_PERCENT: Final = 30.0
LOW_P95_PERCENT: Final = 50.0


@dataclass(frozen=True, kw_only=True)
class Underuse:
    """One finding. ``kind`` is empty, held_idle, low, peaks or idle_process; ``why`` is for people."""

    gpu: int
    kind: str
    why: str
    pids: tuple[int, ...] = ()


def underused(recording: Recording) -> tuple[Underuse, ...]:
    """Return what is underused, by GPU.

    empty: nobody was on it. held_idle: memory is held, and no kernel ran in 99 % of the samples. low: the mean is
    below 30 % and the 95th percentile below 50 %. peaks: the mean is below 30 %, the 95th percentile is not.
    idle_process: a process that holds memory without work beside others that work.
    """
    found: list[Underuse] = []
    for use in recording.gpus:
        mine = [one for one in recording.processes if one.process.gpu == use.gpu.index]
        whole = _of_gpu(use, mine)
        found += [whole] if whole else []
        if whole is None or whole.kind in {"low", "peaks"}:
            found += _idle_processes(use.gpu.index, mine)
    return tuple(found)


def _of_gpu(use: GpuUse, processes: list[ProcessUse]) -> Underuse | None:
    activity, index = use.activity, use.gpu.index
    if activity is None or use.busy_share is None:
        return None
    holders = [one for one in processes if (one.memory_peak_bytes or 0) >= HELD_BYTES and _is_program(one)]
    if use.busy_share < NO_WORK_SHARE:
        if holders:
            # Their memory may have been held one after another: the GPU's own peak bounds the sum.
            memory = sum(one.memory_peak_bytes or 0 for one in holders)
            held = format_bytes(min(memory, use.memory_peak_bytes or memory))
            return Underuse(
                gpu=index,
                kind="held_idle",
                why=f"memory is held with no work: {_many(len(holders), 'process', 'processes')}, {held}",
                pids=tuple(one.process.pid for one in holders),
            )
        why = "idle: nobody was on it" if not processes else "idle: no kernel ran"
        return Underuse(gpu=index, kind="empty", why=why, pids=tuple(one.process.pid for one in processes))
    if activity.mean >= LOW_MEAN_PERCENT:
        return None
    pids = tuple(one.process.pid for one in processes if _is_program(one))
    what = "SM activity" if use.sm else "utilisation"
    figures = f"{what} mean {activity.mean:g} %, 95th percentile {activity.p95:g} %"
    if activity.p95 >= LOW_P95_PERCENT:
        return Underuse(
            gpu=index,
            kind="peaks",
            why=f"low mean with peaks: {figures}; a candidate to share where work can wait for the peaks",
            pids=pids,
        )
    hidden = ""
    if use.sm and use.utilization and use.utilization.mean >= LOW_MEAN_PERCENT:
        hidden = f"; utilisation ({use.utilization.mean:g} %) hides it: it says only that a kernel ran"
    return Underuse(gpu=index, kind="low", why=f"low all the time: {figures}; a candidate to share{hidden}", pids=pids)


def _idle_processes(index: int, processes: list[ProcessUse]) -> list[Underuse]:
    return [
        Underuse(
            gpu=index,
            kind="idle_process",
            why=f"PID {one.process.pid} ({one.process.name or 'unknown'}) held {format_bytes(one.memory_peak_bytes)} with no work",
            pids=(one.process.pid,),
        )
        for one in processes
        if (one.memory_peak_bytes or 0) >= HELD_BYTES
        and _is_program(one)
        and one.busy_share is not None
        and one.busy_share < NO_WORK_SHARE
    ]


def _is_program(one: ProcessUse) -> bool:
    return one.process.name != SERVER_PROGRAM


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
