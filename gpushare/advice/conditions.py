"""Conditions under which a way fits, beside those that come of open questions. Pure."""

from __future__ import annotations

from typing import Any, Final

from gpushare.advice.memory import limit_for
from gpushare.advice.recipe_first import in_the_way_of
from gpushare.advice.rule import Kind, Rule, When
from gpushare.advice.situation import Situation
from gpushare.advice.three import any_of, negated
from gpushare.advice.ways import ALL_MIG, ALL_MPS, Way
from gpushare.model import ComputeMode

_MIG_GUIDE: Final = "NVIDIA MIG User Guide"


def _condition(name: str, ways: tuple[Way, ...], text: str, source: str, when: When, **more: Any) -> Rule:
    return Rule(id=name, kind=Kind.CONDITION, ways=ways, text=text, source=source, when=when, **more)


def _in_the_way(s: Situation) -> bool | None:
    """Return whether programs on the GPU keep it from being divided."""
    if s.gpu.mig_enabled:
        return False
    return None if s.gpu.processes is None else s.gpu.processes > 0


def _held(way: Way) -> When:
    return lambda s: s.held(way)


def _served(way: Way) -> When:
    return lambda s: in_the_way_of(s, way)


def _tight(s: Situation) -> bool:
    """Return whether all fit, but not with limits that have room for what CUDA takes of them."""
    usable = s.under_mps.usable_bytes
    if not s.under_mps.fits or usable is None:
        return False
    each = zip(s.case.workloads, s.case.counts, strict=True)
    return sum(limit_for(one.memory) * (count or 1) for one, count in each if one.memory is not None) > usable


CONDITIONS: Final = (
    _condition(
        "mig-busy",
        ALL_MIG,
        "the GPU must be idle to be divided; {count} on it now",
        "NVIDIA table 2022 (when idle); MIG User Guide",
        _in_the_way,
        unknown="the GPU must be idle to be divided",
        words=lambda s: {"count": "1 process is" if s.gpu.processes == 1 else f"{s.gpu.processes} processes are"},
    ),
    *(
        _condition(
            "mig-instances-busy",
            (way,),
            "programs are in its instances, and what is left is too small: they have to end first",
            _MIG_GUIDE,
            _held(way),
        )
        for way in ALL_MIG
    ),
    *(
        _condition(
            "mps-serves",
            (way,),
            "an MPS daemon serves the GPU: it has to be stopped first, when its programs have ended",
            "NVIDIA MPS guide; MIG User Guide (when idle)",
            _served(way),
        )
        for way in (Way.TIMESLICE, *ALL_MIG)
    ),
    _condition(
        "mig-profiles-unknown",
        ALL_MIG,
        "the driver lists no profiles while MIG is off: whether it fits shows when it is on",
        "NVML before driver 580",
        lambda s: bool(s.gpu.mig_capable) and (s.gpu.layout is None or not s.gpu.layout.profiles),
    ),
    _condition(
        "mig-is-on",
        (Way.WHOLE, Way.TIMESLICE, *ALL_MPS, Way.STREAMS),
        "MIG is on: it has to be turned off first (root, GPU idle)",
        _MIG_GUIDE,
        lambda s: bool(s.gpu.mig_enabled),
    ),
    _condition(
        "whole-together",
        (Way.WHOLE,),
        "they work together, so none can wait for another: one process on each GPU",
        "MPI and NCCL: a collective operation waits for every rank",
        lambda s: s.together,
    ),
    _condition(
        "timeslice-compute-mode",
        (Way.TIMESLICE, Way.MIG_TIMESLICE),
        "compute mode {mode} lets one process in; it becomes default (root)",
        "NVIDIA DRA driver (time-slicing needs compute mode DEFAULT)",
        lambda s: s.gpu.compute_mode not in {None, ComputeMode.DEFAULT},
        words=lambda s: {"mode": "-" if s.gpu.compute_mode is None else s.gpu.compute_mode.title},
    ),
    _condition(
        "memory-tight",
        (Way.TIMESLICE, Way.STREAMS, Way.VGPU),
        "the memory is tight: it fits only if a CUDA context takes less than 500 MiB (300 to 500 MB are reported)",
        "arithmetic",
        lambda s: s.several and s.plain.fits is False and s.plain.may_fit,
    ),
    _condition(
        "mps-memory-tight",
        (Way.MPS, Way.MPS_PRIORITY, Way.MPS_STATIC, Way.MPS_STREAMS),
        "the memory is tight: limits with room for CUDA itself do not add up, so a program may end at its own",
        "arithmetic; measured on an H200 (a limit of 8G leaves 7.4 GiB)",
        _tight,
    ),
    _condition(
        "mig-ipc",
        (Way.MIG_MPS, Way.MIG_TIMESLICE),
        "those that share GPU memory by CUDA IPC must be in the same instance",
        f"{_MIG_GUIDE} (no CUDA IPC across GPU instances)",
        lambda s: s.case.any("ipc"),
    ),
    _condition(
        "mps-without-limits",
        (Way.MPS, Way.MPS_STREAMS),
        "before Volta MPS has neither thread nor memory limits, and one address space",
        "NVIDIA MPS guide",
        lambda s: s.before_volta,
    ),
    _condition(
        "mps-containers",
        (*ALL_MPS, Way.MIG_MPS),
        "containers need the pipe directory, /dev/shm or --ipc=host, and the same user",
        "NVIDIA MPS guide; k8s-device-plugin",
        lambda s: any_of([s.case.any("containers"), s.case.any("kubernetes")]),
    ),
    _condition(
        "kubernetes-mps-mig",
        (Way.MIG_MPS,),
        "the Kubernetes device plugin and Red Hat refuse MPS on MIG; CUDA, GKE and CIP203 do it: not through the plugin",
        "k8s-device-plugin README; NVIDIA MIG User Guide",
        lambda s: s.case.any("kubernetes"),
    ),
    _condition(
        "priority-needs-pair",
        (Way.MPS_PRIORITY,),
        "only if one job is production and another may give way",
        "man nvidia-cuda-mps-control (priority 1 is below normal)",
        lambda s: not s.pair,
    ),
    _condition(
        "priority-bandwidth",
        (Way.MPS_PRIORITY,),
        "no cap protects where one of the two fills the memory bandwidth: half of the SMs draw all of it",
        "measured on an H200",
        lambda s: s.case.any("bandwidth_bound"),
    ),
    _condition(
        "nccl-sharing",
        (Way.TIMESLICE, *ALL_MPS, Way.VGPU),
        "NCCL wants a GPU of its own for each rank",
        "NVIDIA MIG guide; NCCL",
        lambda s: s.case.any("nccl"),
    ),
    _condition(
        "inside-needs-groups",
        (Way.MIG_MPS, Way.MIG_TIMESLICE),
        "only if several processes may share an instance",
        "NVIDIA blog 2022; GKE; CIP203",
        lambda s: s.grouped is False or (s.case.groups is None and s.several),
    ),
    _condition(
        "measure-needs-program",
        (Way.MEASURE,),
        "only if the program can be run several times on this GPU",
        "H200 study (2026): the order of MPS and time-slicing flips with the workload",
        lambda s: not s.case.any("cuda_graphs"),
    ),
    _condition(
        "fix-only-io",
        (Way.FIX,),
        "only if the GPU waits: for input, for the CPU, for the disk",
        "CIP203",
        lambda s: negated(s.case.any("io_bound")),
        unknown="only if the GPU waits: for input, for the CPU, for the disk",
    ),
)
