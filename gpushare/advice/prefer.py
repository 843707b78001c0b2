"""What speaks for a way, and against it, among those that are not refused. Pure.

A weight says how much; the reasons are shown, the numbers are not.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gpushare.advice.case import Isolation, Pattern, Role
from gpushare.advice.recipe import in_the_way_of
from gpushare.advice.rule import Kind, Rule, denied, said
from gpushare.advice.situation import Situation, limit_for
from gpushare.advice.ways import ALL_MIG, ALL_MPS, CONCURRENT, Way
from gpushare.model import ComputeMode

_MIG_GUIDE: Final = "NVIDIA MIG User Guide"
_for = partial(Rule, kind=Kind.FOR)
_against = partial(Rule, kind=Kind.AGAINST)
_condition = partial(Rule, kind=Kind.CONDITION)


def _one_process(s: Situation) -> bool:
    processes = s.case.processes
    return processes == 1 or (processes is None and bool(s.case.any("one_application")))


def _own_code(s: Situation) -> bool:
    return _one_process(s) and bool(s.case.any("code"))


def _small(s: Situation) -> bool:
    return s.several and s.saturating is False


def _farm(s: Situation) -> bool:
    return _small(s) and s.case.same_user is True and not s.idle_often and not s.pair


def _cooperating(s: Situation) -> bool:
    together = s.case.any("cooperating") or (s.several and s.case.any("one_application") and s.case.processes)
    return bool(together) and s.case.same_user is not False and s.saturating is not True


def _groups(s: Situation) -> bool:
    return (s.case.groups or 0) > 1 and bool(s.grouped) and s.apart


def _older(s: Situation) -> bool:
    more = s.case.parties is not None and s.instances is not None and s.case.parties > s.instances
    return s.several and s.trusted and (s.gpu.mig_capable is False or more) and s.case.same_user is False


def _half(s: Situation) -> bool:
    memory, total = s.plain.largest_bytes, s.plain.total_bytes
    return s.saturating is False and memory is not None and total is not None and 2 * memory <= total


def _leaves_half(s: Situation) -> bool:
    """Return whether an instance for one process leaves half of the GPU; not known before MIG is on on old drivers."""
    found, total = s.slices(Way.MIG), s.plain.total_bytes or 0
    return found is None or all((one.memory_bytes or 0) * 2 <= total for one in found.profiles)


def _free_to_measure(s: Situation) -> bool:
    hard = s.isolation & {Isolation.FAULT, Isolation.FULL}
    # Ranks of NCCL are no copies of one program: nothing could be measured on one GPU.
    one_gpu = not s.case.any("vms") and not s.case.any("nccl") and not s.case.any("p2p")
    return s.several and not s.pair and not hard and s.trusted and one_gpu


def _production(s: Situation) -> bool:
    return Role.PRODUCTION in s.case.roles or (s.case.pattern in {None, Pattern.STEADY})


PREFERENCES: Final = (
    _for(
        "one-process",
        {Way.WHOLE: 40},
        "there is one process: nobody to share with",
        "NVIDIA table 2022",
        _one_process,
    ),
    _for(
        "one-process-own-code",
        {Way.STREAMS: 75},
        "one process, and its code can be changed: streams overlap its work",
        'NVIDIA table 2022; CIP203 ("limited to a single process")',
        _own_code,
    ),
    _for(
        "small-same-user",
        {Way.MPS: 40, Way.MPS_STREAMS: 20},
        "several small programs of one user: MPS runs their kernels at the same time",
        "NVIDIA MPS guide; GKE; CIP203; measured on an H200 (3 to 6 times time-slicing)",
        _farm,
    ),
    _for(
        "mps-there-already",
        {Way.MPS: 5},
        "an MPS daemon serves the GPU already",
        "the host",
        lambda s: s.several and s.mps_serves and s.case.same_user is True,
    ),
    _for(
        "small-maybe-same-user",
        {Way.MPS: 15},
        "several small programs: MPS runs their kernels at the same time, if all belong to one user",
        "NVIDIA MPS guide; GKE; CIP203; measured on an H200 (3 to 6 times time-slicing)",
        lambda s: _small(s) and s.case.same_user is None and not s.idle_often and not s.pair,
    ),
    _for(
        "cooperating",
        {Way.MPS: 30},
        "cooperating processes (MPI ranks) are what MPS was made for",
        "NVIDIA MPS guide; CSC; PIConGPU",
        _cooperating,
    ),
    _for(
        "small-batch",
        {Way.MPS: 15},
        "small batch jobs: throughput counts",
        "GKE",
        lambda s: _small(s) and s.case.pattern is Pattern.STEADY and s.case.same_user is not False,
    ),
    _for(
        "latency-own-part",
        {Way.MIG: 45, Way.WHOLE: 5},
        "latency or QoS of several services: each has its own SMs and memory",
        "NVIDIA table 2022; GKE; Rafay; CERN",
        lambda s: s.several and s.case.any("latency") and not s.pair,
    ),
    _against(
        "latency-jitter",
        {Way.TIMESLICE: 20, Way.MIG_TIMESLICE: 20},
        "time-slicing adds jitter: p99 2 to 3 times, also 5 times, that of a job alone",
        "NVIDIA table 2022; Tally-bench; measured on an H200",
        said("latency"),
    ),
    _for(
        "bandwidth",
        {Way.MIG: 45},
        "only MIG divides the memory bandwidth",
        "NVIDIA table 2022",
        lambda s: s.several and s.case.any("bandwidth_qos"),
    ),
    _for(
        "other-users-production",
        {Way.MIG: 40},
        "different users in production: each has an instance",
        "CIP203; EKS; Red Hat",
        lambda s: s.several and s.case.same_user is False and _production(s) and s.saturating is not True,
    ),
    _for(
        "bursty",
        {Way.TIMESLICE: 40},
        "bursts and idle times (people, notebooks, CI): who works has the whole GPU meanwhile",
        "GKE; NVIDIA; CIP203; CERN; EKS (Red Hat does not recommend it in general)",
        lambda s: s.several and s.idle_often,
    ),
    _for(
        "older-or-many",
        {Way.TIMESLICE: 25},
        "no MIG here for so many users",
        "NVIDIA GPU Operator",
        _older,
    ),
    _for(
        "groups-together",
        {Way.MIG_MPS: 125},
        "groups kept apart, small work inside each: an instance per group, MPS inside",
        "NVIDIA blog 2022; GKE; CIP203",
        lambda s: _groups(s) and not s.idle_often and s.saturating is not True,
    ),
    _for(
        "groups-interactive",
        {Way.MIG_TIMESLICE: 140},
        "groups kept apart, interactive inside each: an instance per group, time-sliced inside",
        "NVIDIA blog 2022; GKE; CIP203; nos",
        lambda s: _groups(s) and s.idle_often,
    ),
    _for(
        "half-a-gpu",
        {Way.MIG: 15},
        "each needs less than half of the GPU and of its memory: an instance, tested, does",
        "CIP203",
        lambda s: s.several and _half(s),
    ),
    _for(
        "half-a-gpu-alone",
        {Way.MIG: 80},
        "one job that needs less than half of the GPU and of its memory: an instance, tested, leaves the rest to others",
        "CIP203",
        lambda s: _one_process(s) and _half(s) and _leaves_half(s) and not s.case.any("code"),
    ),
    _for(
        "saturating",
        {Way.WHOLE: 60},
        "one process fills the GPU: sharing gains nothing (0.97 to 1.05 of one after the other), and MIG mode costs SMs",
        "CERN; CIP203; ParvaGPU",
        lambda s: s.saturating is True and not s.pair,
    ),
    _for(
        "production-pair",
        {Way.MPS_PRIORITY: 92},
        "production beside an opportunistic job: on an H200 a cap of 60 % and low priority for the latter kept production's p99 (0.98)",
        "measured on an H200; man nvidia-cuda-mps-control",
        lambda s: s.pair and s.case.same_user is not False,
    ),
    _against(
        "production-plain-mps",
        {Way.MPS: 60, Way.MPS_STREAMS: 60},
        "MPS alone is the worst neighbour: on an H200 production kept 0.11 of its rate, p99 10.5 times",
        "measured on an H200",
        lambda s: s.pair,
    ),
    _for(
        "production-apart",
        {Way.MIG: 30},
        "an instance for production keeps its throughput and its p99",
        "NVIDIA table 2022",
        lambda s: s.pair,
    ),
    _for(
        "production-first",
        {Way.WHOLE: 20},
        "the other can wait, or be paused, while production works",
        "measured on an H200 (only a full pause protects the tail outside MPS)",
        lambda s: s.pair,
    ),
    _for(
        "production-fills",
        {Way.WHOLE: 80},
        "production fills the GPU itself: what another job gets, production loses; let it wait",
        "CERN; CIP203; measured on an H200 (two jobs that fill the memory bandwidth always sum to 1.0)",
        lambda s: s.pair and s.saturating is True,
    ),
    _against(
        "production-time",
        {Way.TIMESLICE: 15},
        "time-slicing gives both the same time: on an H200 production kept 0.51 of its rate",
        "measured on an H200; NVIDIA GPU Operator",
        lambda s: s.pair,
    ),
    _for(
        "production-bandwidth",
        {Way.MIG: 60, Way.WHOLE: 70},
        "one of the two fills the memory bandwidth: give production an instance, or pause the other",
        "measured on an H200",
        lambda s: s.pair and s.case.any("bandwidth_bound"),
    ),
    _against(
        "production-bandwidth-cap",
        {Way.MPS_PRIORITY: 60},
        "half of the SMs draw all of the memory bandwidth: a cap does not help",
        "measured on an H200",
        lambda s: s.pair and s.case.any("bandwidth_bound"),
    ),
    _for(
        "kept-in-share",
        {Way.MPS_STATIC: 90, Way.MIG: 35, Way.MPS: 15},
        "known needs, and each is to stay in its share",
        "NVIDIA CUDA 13.1",
        lambda s: s.several and s.case.any("containment"),
    ),
    _for(
        "cuda-graphs",
        {Way.MEASURE: 100},
        "engines with CUDA graphs turn the order round (H200: time-slicing 99.7 %, MPS 94.4 %, MIG 20 % of alone)",
        "H200 co-location study (2026)",
        lambda s: _free_to_measure(s) and s.case.any("cuda_graphs"),
    ),
    _for(
        "waits-for-input",
        {Way.FIX: 200},
        "the GPU waits for input: sharing hides that, more workers or larger batches cure it",
        "CIP203",
        said("io_bound"),
    ),
    _for(
        "virtual-machines",
        {Way.VGPU: 400},
        "the parties are virtual machines",
        "NVIDIA table 2022",
        said("vms"),
    ),
    _for(
        "not-trusted",
        {Way.MIG: 70, Way.WHOLE: 45},
        "the parties do not trust each other: each has its own part, or its own time",
        "NVIDIA table 2022; EKS",
        lambda s: s.several and not s.trusted,
    ),
    _against(
        "not-trusted-time",
        {Way.TIMESLICE: 40},
        "who shares the memory of a GPU can use it up, and a reset hits all",
        "NVIDIA GPU Operator",
        lambda s: s.several and not s.trusted,
    ),
    _for(
        "isolated",
        {Way.MIG: 60},
        "isolation in hardware",
        "NVIDIA table 2022",
        lambda s: s.several and bool(s.isolation & {Isolation.FAULT, Isolation.FULL}) and s.saturating is not True,
    ),
    _for(
        "quota",
        {Way.MPS: 10, Way.MIG: 5},
        "a limit that holds for each process",
        "NVIDIA MPS guide",
        lambda s: s.several and Isolation.QUOTA in s.isolation,
    ),
    _for(
        "needs-peers",
        {Way.WHOLE: 60},
        "work across GPUs wants them whole",
        "NVIDIA MIG User Guide",
        said("nccl", "p2p"),
    ),
    _for(
        "runs-already",
        {Way.TIMESLICE: 40},
        "a program that runs is time-sliced as it is, and can be paused; nothing else can take it in",
        "NVIDIA MPS guide",
        said("running"),
    ),
    _against(
        "queue-of-people",
        {Way.WHOLE: 15},
        "people would wait for each other",
        "CIP203",
        lambda s: s.several and s.case.pattern is Pattern.INTERACTIVE,
    ),
    _against(
        "one-process-shares",
        dict.fromkeys(tuple(way for way in CONCURRENT if way not in {Way.STREAMS, Way.VGPU}), 30),
        "there is nobody to share with",
        "NVIDIA table 2022",
        _one_process,
    ),
)


def _in_the_way(s: Situation) -> bool | None:
    """Return whether programs on the GPU keep it from being divided."""
    if s.gpu.mig_enabled:
        return False
    return None if s.gpu.processes is None else s.gpu.processes > 0


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
        words=lambda s, _: {"count": "1 process is" if s.gpu.processes == 1 else f"{s.gpu.processes} processes are"},
    ),
    _condition(
        "mig-instances-busy",
        ALL_MIG,
        "programs are in its instances, and what is left is too small: they have to end first",
        _MIG_GUIDE,
        when_way=Situation.held,
    ),
    _condition(
        "mps-serves",
        (Way.TIMESLICE, *ALL_MIG),
        "an MPS daemon serves the GPU: it has to be stopped first, when its programs have ended",
        "NVIDIA MPS guide; MIG User Guide (when idle)",
        when_way=in_the_way_of,
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
        words=lambda s, _: {"mode": "-" if s.gpu.compute_mode is None else s.gpu.compute_mode.title},
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
        said("ipc"),
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
        said("containers", "kubernetes"),
    ),
    _condition(
        "kubernetes-mps-mig",
        (Way.MIG_MPS,),
        "the Kubernetes device plugin and Red Hat refuse MPS on MIG; CUDA, GKE and CIP203 do it: not through the plugin",
        "k8s-device-plugin README; NVIDIA MIG User Guide",
        said("kubernetes"),
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
        said("bandwidth_bound"),
    ),
    _condition(
        "nccl-sharing",
        (Way.TIMESLICE, *ALL_MPS, Way.VGPU),
        "NCCL wants a GPU of its own for each rank",
        "NVIDIA MIG guide; NCCL",
        said("nccl"),
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
        denied("io_bound"),
        unknown="only if the GPU waits: for input, for the CPU, for the disk",
    ),
)
