"""The words of the rules: what each condition means for a case on a GPU, and what the texts of the rules are filled with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gpushare.advice.case import Isolation, Pattern, Role, any_of
from gpushare.advice.facts import has_static_partitions, too_old_for_static_partitions
from gpushare.advice.situation import Situation, instance_title, limit_for
from gpushare.advice.steps import FIRST_SLICES
from gpushare.advice.ways import LEAVING
from gpushare.base.model import ComputeMode, Way
from gpushare.base.units import counted, format_bytes

Condition = Callable[[Situation, Way], "bool | None"]
# The first driver branch that copies a job out of a GPU.
_FIRST_CHECKPOINT: Final = 570
# Up to this target, in seconds, no priority under MPS keeps the p99 (Tally-bench: a server that answers in 4 ms).
_MILLISECONDS: Final = 0.005
# Replicas of one GPU with MPS under the Kubernetes device plugin, which takes 7.0 for older than Volta.
MOST_REPLICAS: Final = 48
_REPLICAS_BEFORE_7_5: Final = 16


def _wants(kind: Isolation) -> Condition:
    """Return the condition that this kind of isolation is wanted; unknown where the user said nothing of isolation."""
    return lambda s, _: None if s.case.wanted_isolation is None else kind in s.isolation


def _gpus_here(s: Situation) -> int:
    """Return how many GPUs, idle or not, a job may have at the same time: those that hold its largest process.

    0 if this GPU does not. Others count only if MIG is on or off there as on this one.
    """
    largest = s.plain.largest_bytes or 0
    if largest > (s.gpu.memory_total_bytes or 0):
        return 0
    same_mode = [gpu for gpu in s.other_gpus if bool(gpu.mig_enabled) is bool(s.gpu.mig_enabled)]
    return 1 + sum((gpu.memory_total_bytes or 0) >= largest for gpu in same_mode)


def _idle_gpus_text(s: Situation, _: Way) -> str:
    count = sum(not gpu.processes for gpu in s.used_gpus)
    return f"{count} {'is' if count == 1 else 'are'} idle"


def _most_replicas(s: Situation) -> int:
    """Return how many replicas the Kubernetes device plugin accepts with MPS on this GPU."""
    return _REPLICAS_BEFORE_7_5 if (s.gpu.compute_capability or (7, 5)) < (7, 5) else MOST_REPLICAS


def _pods_idle(s: Situation, way: Way) -> bool:
    """Return whether pods that are mostly idle share the time, and fit without the contexts of those that are idle."""
    without_contexts = sum((work.memory or 0) * (work.processes or 1) for work in s.case.workloads)
    fits = s.plain.usable_bytes is not None and without_contexts <= s.plain.usable_bytes
    return way is Way.TIMESLICE and bool(s.case.any("kubernetes")) and s.idle_often and fits


# -- MIG ---------------------------------------------------------------------------------------------


def _instances_may_go(s: Situation, _: Way) -> bool:
    """Return whether instances stand in the way of a job that needs the whole GPU, and may go: idle and nobody's."""
    needs_whole_gpu = s.saturating is True or bool(s.case.any("nccl") or s.case.any("p2p"))
    if not s.gpu.mig_enabled or not s.kept_instances or s.may_be_root is False:
        return False
    return needs_whole_gpu and not any(
        instance.busy or instance.name or instance.granted for instance in s.kept_instances
    )


def _mig_sms_text(s: Situation, _: Way) -> str:
    """Return how many SMs the largest instance has, of those of the GPU."""
    profiles = s.gpu.layout.profiles if s.gpu.layout else ()
    largest = max((profile.multiprocessors or 0 for profile in profiles), default=0)
    return f"{largest or '-'} of {s.gpu.multiprocessors or '-'}"


def _mig_stays(s: Situation, way: Way) -> bool:
    """Return whether MIG is on and cannot be turned off: without root, or with instances that must stay."""
    if way is Way.WHOLE and _instances_may_go(s, way):
        # The rule `idle-instances-first` makes that a condition.
        return False
    # Instances are never destroyed only in order to measure.
    has_instances = s.gpu.layout is not None and bool(s.gpu.layout.instances)
    must_stay = s.may_be_root is False or bool(s.kept_instances) or (way is Way.MEASURE and has_instances)
    return bool(s.gpu.mig_enabled) and must_stay


def _why_mig_stays(s: Situation, _: Way) -> str:
    """Return why MIG cannot be turned off, for the text of a rule."""
    if s.kept_instances:
        some_are_idle = any(not instance.busy for instance in s.kept_instances)
        option = " (--destroy: idle ones may go)" if some_are_idle and s.may_be_root is not False else ""
        return f"its instances stay: {', '.join(map(instance_title, s.kept_instances))}{option}"
    return "only root can turn it off" if s.may_be_root is False else "its instances stay"


def _mig_occupied(s: Situation, _: Way) -> bool:
    """Return whether programs keep MIG from being turned on: those that run now stay, unless the user says otherwise."""
    occupied = s.case.any("occupied")
    if occupied is None:
        occupied = bool(s.gpu.processes)
    return occupied and bool(s.gpu.mig_capable) and not s.gpu.mig_enabled


def _why_no_instances(s: Situation, way: Way) -> str | None:
    """Return why the instances for a way do not fit; None: they do, or are there already."""
    if s.free_instances(way) is not None:
        return None
    instances = s.new_instances(way)
    return s.documented_why_not(way) if instances is None else instances.why_not


def _real_and_wanted_shares(s: Situation, way: Way) -> tuple[str, str] | None:
    """Return the shares that the chosen profiles come to, and those that are wanted, as ``43:57``; None if either is unknown."""
    instances = s.new_instances(way)
    shares = s.shares(way)
    if instances is None or not instances.profiles or not all(share.percent for share in shares):
        return None
    total = sum(profile.slices for profile in instances.profiles)
    real = ":".join(f"{100 * profile.slices / total:.0f}" for profile in instances.profiles)
    return real, ":".join(f"{share.percent:.0f}" for share in shares)


def _sizes_are_shares(s: Situation, way: Way) -> bool:
    """Return whether the chosen MIG profiles have exactly the wanted shares."""
    real, wanted = _real_and_wanted_shares(s, way) or (None, None)
    return real is not None and real == wanted


def _nearest_sizes_text(s: Situation, way: Way) -> str:
    """Return which profiles come nearest to the wanted shares, for the text of a rule."""
    instances = s.new_instances(way)
    real, wanted = _real_and_wanted_shares(s, way) or (None, None)
    if instances is None or real is None:
        return "choose the profiles nearest to the shares (gpushare mig profiles)"
    return f"{', '.join(profile.name for profile in instances.profiles)} are {real}, asked for are {wanted}"


# -- MPS, slices, memory -------------------------------------------------------------------------------


def _too_many_clients(s: Situation, way: Way) -> bool | None:
    """Return whether one MPS server would have more clients than it accepts; None: unknown."""
    accepted = s.clients_accepted(way)
    clients = s.clients_per_server(way)
    if accepted is None or clients is None:
        return None
    # Where some wait, never more run than the server accepts.
    return clients > accepted and s.at_a_time(way) is None


def _driver_before(branch: int) -> Condition:
    """Return the condition that the driver is older than a branch."""
    return lambda s, _: None if s.host.driver_major is None else s.host.driver_major < branch


def _limits_tight(s: Situation, _: Way) -> bool:
    """Return whether the clients that run at once fit under MPS, but not with limits that include CUDA's own memory."""
    usable = s.under_mps.usable_bytes
    fit_at_once = s.under_mps.fits or s.at_a_time(Way.MPS) is not None
    if usable is None or not fit_at_once:
        return False
    works = zip(s.case.workloads, s.counts_at_once(Way.MPS), strict=True)
    limits = (limit_for(work.memory) * (count or 1) for work, count in works if work.memory is not None)
    return sum(limits) > usable


def _free_now(s: Situation) -> int:
    """Return the memory in bytes that the programs on the GPU leave."""
    return max((s.plain.usable_bytes or 0) - (s.gpu.memory_used_bytes or 0), 0)


def short_now(s: Situation, way: Way) -> bool:
    """Return whether the programs that are on the GPU leave too little memory; False where it is unknown."""
    budget = s.budget_of(way)
    # These ways have one process at a time on the GPU, the others all of them.
    needed = budget.largest_bytes if way in {Way.WHOLE, *LEAVING} else budget.needed_bytes
    return s.in_use and s.gpu.memory_used_bytes is not None and needed is not None and needed > _free_now(s)


def _host_too_small(s: Situation, way: Way) -> bool | None:
    """Return whether the host has too little memory for the copies of all jobs that leave the GPU; None: unknown."""
    # Where all fit on the GPU, no job has to leave.
    cost = s.leaving_cost(way) if s.fit_together is False else None
    if cost is None:
        return False
    free = s.host.host_memory_bytes
    return None if free is None else cost.host_bytes > free


def _production_too_large(s: Situation, _: Way) -> bool:
    """Return whether the production jobs of a pair do not fit even without the other."""
    works = [work for work in s.case.workloads if work.role is Role.PRODUCTION and work.memory is not None]
    needed = sum(((work.memory or 0) + s.plain.least_context_bytes) * (work.processes or 1) for work in works)
    return s.pair and s.plain.usable_bytes is not None and needed > s.plain.usable_bytes


def _leavers_answer(s: Situation, way: Way) -> bool | None:
    """Return whether a job that would leave has to answer sooner than it can come back; None: unknown."""
    if way is Way.SWAP and s.pair:
        # Production stays, and nobody waits for an answer of the other.
        return False
    leavers = s.leavers(way)
    has_target = any(work.latency_seconds is not None for work in leavers)
    cost = s.leaving_cost(way) if has_target else None
    switch_seconds = 0.0 if cost is None else cost.switch_seconds
    return any_of(
        work.latency if work.latency_seconds is None else work.latency_seconds < switch_seconds for work in leavers
    )


def wakes_late(s: Situation, _: Way) -> bool:
    """Return whether a latency target is shorter than the time that a sleeping engine takes to copy its memory back."""
    cost = s.leaving_cost(Way.TURNS)
    wake_seconds = 0.0 if cost is None else cost.in_seconds
    return any(work.latency_seconds is not None and work.latency_seconds < wake_seconds for work in s.case.workloads)


def _long_work_of_several(s: Situation, _: Way) -> bool:
    """Return whether several people have long work that does not fit together, and may not want to wait for others."""
    if not s.short_of_memory or s.pair:
        return False
    return s.case.pattern is Pattern.STEADY and s.case.same_user is False and s.case.any("progress") is not False


def _only_total_time(s: Situation, _: Way) -> bool:
    """Return whether, of jobs that do not all fit, only the total time counts: nobody waits for a part of the work.

    Several users are taken to wait for their parts, unless the user says that not all must advance.
    """
    progress = s.case.any("progress")
    somebody_waits = bool(progress) or s.pair or s.endless or (progress is None and s.case.same_user is False)
    # Where several run at a time under MPS and the others wait, a queue is not the shortest.
    some_wait = s.at_a_time(Way.MPS) is not None
    return s.short_of_memory and not somebody_waits and not s.together and not some_wait


# -- the case --------------------------------------------------------------------------------------------


def _small_ranks(s: Situation, _: Way) -> bool:
    """Return whether the processes work together, as MPI ranks of one user do, and none is known to fill the GPU."""
    if s.case.same_user is False or s.saturating is True:
        return False
    one_application = s.several and s.case.processes is not None and s.case.any("one_application")
    return bool(s.case.any("cooperating") or one_application)


def _half_is_enough(s: Situation, _: Way) -> bool:
    """Return whether each process is known to need at most half of the GPU and of its memory."""
    memory, total = s.plain.largest_bytes, s.plain.total_bytes
    return s.saturating is False and memory is not None and total is not None and 2 * memory <= total


def _leaves_half(s: Situation, _: Way) -> bool:
    """Return whether an instance for one process leaves half of the GPU to others; True where no profiles are listed."""
    instances = s.new_instances(Way.MIG)
    total = s.plain.total_bytes or 0
    return instances is None or all((profile.memory_bytes or 0) * 2 <= total for profile in instances.profiles)


def _free_to_measure(s: Situation, _: Way) -> bool:
    """Return whether `gpushare bench` can measure the ways against each other, with copies of one program on one GPU."""
    if not s.several or s.pair or not s.trusted or s.isolation & {Isolation.FAULT, Isolation.FULL}:
        return False
    # NCCL ranks need one GPU each, so nothing can be measured on one GPU.
    if s.case.any("vms") or s.case.any("nccl") or s.case.any("p2p"):
        return False
    # Several LLM engines are measured one after the other, each with copies of itself.
    return len(s.case.workloads) == 1 or all(work.cuda_graphs for work in s.case.workloads)


CONDITIONS: Final[Mapping[str, Condition]] = {
    # the host and the GPU
    "spans_gpus": lambda s, _: s.gpus_each > 1,
    "a_gpu_for_each": lambda s, _: (
        s.case.processes is not None and s.placed_processes <= s.gpu_sets and not s.among_others
    ),
    "too_few_gpus": lambda s, _: s.gpus_each > max(1, _gpus_here(s)),
    "gpus_differ": lambda s, _: s.gpus_each > 1 and len({gpu.name for gpu in s.used_gpus}) > 1,
    "gpus_in_use": lambda s, _: any(gpu.processes for gpu in s.used_gpus) and s.gpus_each > 1,
    "in_instance": lambda s, _: s.gpu.instance is not None,
    "mig_capable": lambda s, _: s.gpu.mig_capable,
    "mig_enabled": lambda s, _: s.gpu.mig_enabled,
    "vgpu_capable": lambda s, _: s.gpu.vgpu_capable,
    "mps_program": lambda s, _: s.host.mps_program,
    "profiles_listed": lambda s, _: s.gpu.layout is not None and bool(s.gpu.layout.profiles),
    "graphics_profiles": lambda s, _: any(
        profile.graphics for profile in (s.gpu.layout.profiles if s.gpu.layout else s.gpu.documented)
    ),
    "mode_prohibited": lambda s, _: s.gpu.compute_mode is ComputeMode.PROHIBITED,
    "one_process_at_a_time": lambda s, _: (
        s.several and s.exclusive_mode and (s.may_be_root is False or s.gpu.instance is not None)
    ),
    "driver_before_slices": _driver_before(FIRST_SLICES),
    "driver_before_checkpoint": _driver_before(_FIRST_CHECKPOINT),
    "static_partitions": lambda s, _: has_static_partitions(s.host, s.gpu),
    # MIG
    "mig_stays": _mig_stays,
    "instances_may_go": _instances_may_go,
    "mig_occupied": _mig_occupied,
    # Only turning MIG on needs an idle GPU.
    "programs_in_the_way": lambda s, _: (
        False if s.gpu.mig_enabled else None if s.gpu.processes is None else s.gpu.processes > 0
    ),
    "instances_to_create": lambda s, way: not s.gpu.mig_enabled or s.free_instances(way) is None,
    "mig_too_small": lambda s, way: _why_no_instances(s, way) is not None,
    "sms_short": lambda s, way: bool(s.short_of_sms(way)),
    "sizes_are_shares": _sizes_are_shares,
    "more_than_instances": lambda s, _: (
        s.most_instances is not None and (s.case.groups or s.case.processes or 0) > s.most_instances
    ),
    "one_each_group": lambda s, _: s.grouped is False or (s.case.groups is None and s.several),
    "groups": lambda s, _: (s.case.groups or 0) > 1 and bool(s.grouped) and s.apart,
    # MPS
    "mps_in_the_way": lambda s, way: s.mps_in_the_way(way),
    "too_many_clients": _too_many_clients,
    "too_many_replicas": lambda s, _: (
        bool(s.case.any("kubernetes")) and s.case.processes is not None and s.case.processes > _most_replicas(s)
    ),
    "latency_of_milliseconds": lambda s, _: any(
        work.latency_seconds is not None and work.latency_seconds <= _MILLISECONDS for work in s.case.workloads
    ),
    # Stated, not only concluded from a full GPU.
    "without_gaps": lambda s, _: any(work.gaps is False for work in s.case.workloads),
    "pods_idle": _pods_idle,
    "limits_tight": _limits_tight,
    # memory
    "too_much_memory": lambda s, way: s.budget_of(way).may_fit is False,
    "some_wait": lambda s, way: s.at_a_time(way) is not None,
    "one_too_large": lambda s, _: s.plain.one_fits is False,
    "memory_tight": lambda s, _: s.plain.fits is False and s.plain.may_fit,
    "short_now": short_now,
    # jobs that leave the GPU
    "host_too_small": _host_too_small,
    "leavers_run": lambda s, way: any_of(work.running for work in s.leavers(way)),
    "leavers_answer": _leavers_answer,
    "production_too_large": _production_too_large,
    "wakes_late": wakes_late,
    "movable_unknown": lambda s, _: None in map(s.case.any, ("nccl", "ipc", "managed_memory")),
    "cost_known": lambda s, way: s.leaving_cost(way) is not None,
    "long_work_of_several": _long_work_of_several,
    "only_total_time": _only_total_time,
    # the case
    "single": lambda s, _: s.case.processes == 1,
    "several_known": lambda s, _: (
        s.several if s.case.processes is not None else (s.case.any("one_application") is False) or None
    ),
    "same_user": lambda s, _: s.case.same_user,
    "same_user_inside": lambda s, _: s.case.same_user_inside,
    "small": lambda s, _: s.several and s.saturating is False,
    "farm": lambda s, _: (
        s.several and s.saturating is False and s.case.same_user is True and not s.idle_often and not s.pair
    ),
    "small_ranks": _small_ranks,
    "half_is_enough": _half_is_enough,
    "leaves_half": _leaves_half,
    "free_to_measure": _free_to_measure,
    "production_work": lambda s, _: Role.PRODUCTION in s.case.roles or (s.case.pattern in {None, Pattern.STEADY}),
    "interactive": lambda s, _: s.case.pattern is Pattern.INTERACTIVE,
    "bursty": lambda s, _: s.case.pattern is Pattern.BURSTY,
    "steady": lambda s, _: s.case.pattern is Pattern.STEADY,
    "wants_quota": _wants(Isolation.QUOTA),
    "wants_fault": _wants(Isolation.FAULT),
    "wants_full": _wants(Isolation.FULL),
}


WORDS: Final[Mapping[str, Callable[[Situation, Way], object]]] = {
    "name": lambda s, _: s.gpu.name or "this GPU",
    "driver": lambda s, _: s.host.driver,
    "gpus_each": lambda s, _: s.gpus_each,
    "gpus_here": lambda s, _: _gpus_here(s),
    "gpus_idle": _idle_gpus_text,
    "mode": lambda s, _: "-" if s.gpu.compute_mode is None else s.gpu.compute_mode.title,
    "processes": lambda s, way: s.clients_per_server(way),
    "mps_clients": lambda s, way: s.clients_accepted(way),
    "replicas": lambda s, _: _most_replicas(s),
    "where": lambda _, way: "in an instance of this size" if way is Way.MIG_MPS else "on this GPU",
    "host_versions": lambda s, _: " with ".join(too_old_for_static_partitions(s.host, s.gpu)),
    "why_mig_stays": _why_mig_stays,
    "kept": lambda s, _: ", ".join(map(instance_title, s.kept_instances)),
    "mig_sms": _mig_sms_text,
    "why_no_instances": _why_no_instances,
    "nearest_sizes": _nearest_sizes_text,
    "sms_short": lambda s, way: s.short_of_sms(way),
    "processes_here": lambda s, _: counted(s.gpu.processes, "process") if s.gpu.processes else "programs",
    "total": lambda s, way: format_bytes(s.budget_of(way).total_bytes),
    "needed": lambda s, way: format_bytes(s.budget_of(way).needed_bytes),
    "short": lambda s, way: format_bytes(-(s.budget_of(way).left_bytes or 0)),
    "most": lambda s, way: s.budget_of(way).most or 0,
    "largest": lambda s, _: format_bytes(s.plain.largest_bytes or 0),
    "over": lambda s, _: format_bytes(max((s.plain.largest_bytes or 0) - (s.plain.usable_bytes or 0), 0)),
    "memory_used": lambda s, _: format_bytes(s.gpu.memory_used_bytes),
    "memory_free": lambda s, _: format_bytes(_free_now(s)),
    "at_a_time": lambda s, way: s.at_a_time(way),
    "host_needed": lambda s, way: "-" if (cost := s.leaving_cost(way)) is None else format_bytes(cost.host_bytes),
    "host_free": lambda s, _: format_bytes(s.host.host_memory_bytes),
    "cost": lambda s, way: "" if (cost := s.leaving_cost(way)) is None else cost.sentence,
}


def condition_named(name: str) -> Condition:
    """Return what a word of a rule means: a condition of this file, of the situation, or a property of a workload."""
    if name in CONDITIONS:
        return CONDITIONS[name]
    if hasattr(Situation, name):
        return lambda s, _: getattr(s, name)
    return lambda s, _: s.case.any(name)
