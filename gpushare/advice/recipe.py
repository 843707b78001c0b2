"""The commands for a way on this host, with the numbers worked out, their undo, and what to measure. Pure.

A recipe is a list of changes of the host, each of which knows its undo, and of jobs (`gpushare.job_command.JobCommand`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpushare.advice.case import Isolation, Pattern, Role
from gpushare.advice.conditions import MOST_REPLICAS, wakes_late
from gpushare.advice.facts import HOPPER
from gpushare.advice.limits import (
    client_job_memory,
    client_limits,
    job_memory,
    limit_inside_instance,
    memory_limits,
    threads_of_each,
)
from gpushare.advice.rules import cannot_leave, verdicts
from gpushare.advice.situation import may_be_destroyed_unasked
from gpushare.advice.steps import (
    OWN_SLICE,
    AdviceStep,
    Recipe,
    Steps,
    Verb,
    clean_name,
    label_of,
    limits_to_set,
    lines_restoring_mig,
    program_text,
    undo_of,
)
from gpushare.advice.ways import ALL_MIG, ALL_MPS, LEAVING
from gpushare.base.model import Priority, TimeSlice, Way
from gpushare.base.units import counted
from gpushare.mig.planner import can_add
from gpushare.mig.wish import Request, merge_equal, wish_of
from gpushare.mps.limits import Limits

if TYPE_CHECKING:
    from gpushare.advice.case import Case, Workload
    from gpushare.advice.situation import Situation
    from gpushare.mig.profile import Profile


# -- MIG ---------------------------------------------------------------------------------------------


def _needs_yes(s: Situation) -> bool:
    """Return whether the line that destroys the idle instances needs ``-y``: one has a name or a grant, or is not ours."""
    layout = s.gpu.layout
    idle = () if layout is None else [instance for instance in layout.instances if instance not in s.kept_instances]
    return not all(map(may_be_destroyed_unasked, idle))


@dataclass(frozen=True, kw_only=True)
class _Tenant:
    """The processes that have one instance. ``selector`` is what their command names: its name or UUID, or a profile."""

    name: str
    work: Workload
    processes: int
    profile: Profile
    selector: str


def _add_mig(steps: Steps, way: Way) -> None:
    """Add the lines of MIG: the instances, who may use them, and the jobs in them."""
    s = steps.s
    free = s.free_instances(way)
    instances = s.new_instances(way)
    steps.measure += [
        "the rate of each program in its instance and on the whole GPU: an instance has part of the SMs and bandwidth",
        "peak memory: a program cannot use more than its instance has",
    ]
    if free is None and (instances is None or not instances.profiles):
        if not s.gpu.mig_enabled:
            steps.add_change("turn MIG on", s, Verb.MIG_ENABLE)
        words = ("mig", "profiles", "-g", str(s.gpu.index))
        steps.lines.append(steps.command_line("list the profiles that the driver offers, and choose", *words))
        steps.add_line("then, in each instance: gpushare run --mig PROFILE -- CMD")
        return

    # New instances get names where a command or a grant has to tell them apart.
    users = {work.user for work in s.case.workloads if work.user is not None}
    named = free is None and (way is not Way.MIG or not s.trusted or len(users) > 1)
    steps.several_shells = named
    if free is None:
        for on_gpu in steps.each_gpu():
            _add_instances(steps, on_gpu, way, _tenants(on_gpu, way, named=True) if named else [])
        if s.case.same_user is not True and not all(work.user for work in s.case.workloads):
            steps.add_line(_WHO_MAY)
    if named or way is not Way.MIG:
        for on_gpu in steps.each_gpu():
            for tenant in _tenants(on_gpu, way, named=named):
                _add_jobs_inside(steps, on_gpu, way, tenant)
    else:
        _add_jobs_by_profile(steps)


def _add_jobs_by_profile(steps: Steps) -> None:
    """Add one line for all jobs that run in instances of a profile, each in any idle one."""
    s = steps.s
    if s.one_process and s.case.any("code"):
        steps.add_line("in the program: independent work on separate streams overlaps inside its instance, too")
    # They name GPUs only if the host has others.
    gpus = steps.gpu if len(s.host.gpus) > len(s.used_gpus) else None
    lines = Counter((tenant.profile.name, tenant.work) for tenant in _tenants(s, Way.MIG, named=False))
    for (profile, work), count in lines.items():
        # A single line is for the jobs on all GPUs.
        total = s.counts_of_all[0] if len(lines) == 1 and len(s.case.workloads) == 1 else count
        steps.add_job(program_text(total, label_of(work)), work, gpu=gpus, mig=profile)


_WHO_MAY: Final = (
    "every local user may use every instance, until root grants it: gpushare mig grant NAME USER (one without a name gets "
    "it by gpushare mig name), then gpushare run --mig NAME"
)


def _add_instances(steps: Steps, s: Situation, way: Way, tenants: Sequence[_Tenant]) -> None:
    """Add the lines that create the instances of one GPU, with names and grants if tenants are given."""
    instances = s.new_instances(way)
    layout = s.gpu.layout
    wish = () if instances is None else instances.wish
    if not s.gpu.mig_enabled or layout is None or not layout.instances:
        what = "create the instances" if s.gpu.mig_enabled else "turn MIG on and create the instances"
        # In the order of the wish, which `NewInstances.wish` sorts by profile.
        by_profile = sorted(tenants, key=lambda tenant: tenant.profile.name, reverse=True)
        steps.add_change(what, s, Verb.MIG_APPLY, wish=wish, names=tuple(tenant.name for tenant in by_profile))
    elif not tenants and can_add(layout, wish):
        steps.add_change("create the instances next to the existing ones", s, Verb.MIG_CREATE, wish=wish)
    elif not tenants:
        # Those that stay are in the list too: what is not in it is destroyed.
        what = "create the instances; idle ones that are not in the list are destroyed"
        wish = merge_equal((*wish_of(s.kept_instances), *wish))
        steps.add_change(what, s, Verb.MIG_APPLY, wish=wish, yes=_needs_yes(s))
    else:
        if not can_add(layout, wish):
            idle = [f"{s.gpu.index}/{instance.id}" for instance in layout.instances if instance not in s.kept_instances]
            words = ["mig", "destroy", *idle, *(["-y"] if _needs_yes(s) else [])]
            steps.lines.append(steps.command_line("make room: destroy the idle instances", *words, root=True))
            steps.undo_first(lines_restoring_mig(steps, s))
        for tenant in tenants:
            wish = (Request(profile=tenant.profile.name),)
            what = f"create the instance of {tenant.name}"
            steps.add_change(what, s, Verb.MIG_CREATE, wish=wish, names=(tenant.name,))
    for tenant in tenants:
        if tenant.work.user is not None:
            words = ["mig", "grant", tenant.name, tenant.work.user]
            steps.lines.append(steps.command_line(f"only {tenant.work.user} and root may use it", *words, root=True))


def _tenants(s: Situation, way: Way, *, named: bool) -> list[_Tenant]:
    """Return who has which instance of a GPU: one tenant per share of the way.

    ``named``: the commands name the instances by their tenants; else by UUID, or by profile if they are new.
    """
    works = s.case.workloads
    free = s.free_instances(way)
    profiles = s.profiles(way)
    selectors = [profile.name for profile in profiles]
    if free is not None:
        selectors = [str(instance.compute[0].uuid) for instance in free]
    instances = zip(profiles, selectors, strict=True)
    # A name is of the whole host.
    prefix = "" if s.gpu.index == s.host.gpus[0].index else f"gpu{s.gpu.index}-"
    tenants: list[_Tenant] = []
    for work in works:
        if len(works) == 1:
            count = len(s.shares(way))
            label = "group"
        else:
            count = (work.processes if way is Way.MIG else work.groups) or 1
            label = clean_name(label_of(work) or work.user, len(tenants) + 1)
        # An instance that is shared has two if the number is unknown.
        processes = work.processes or (count if way is Way.MIG else 2 * count)
        for number in range(count):
            name = f"{prefix}{label}-{number + 1}" if count > 1 else f"{prefix}{label}"
            # The first ones have one more if the processes do not divide evenly.
            inside = max(1, processes // count + (number < processes % count))
            profile, selector = next(instances)
            if named:
                selector = name
            tenants.append(_Tenant(name=name, work=work, processes=inside, profile=profile, selector=selector))
    return tenants


def _add_jobs_inside(steps: Steps, s: Situation, way: Way, tenant: _Tenant) -> None:
    """Add the lines for the programs of one instance: the start of MPS in it, if that is the way, and the jobs."""
    work = tenant.work
    selector = tenant.selector
    title = tenant.name if steps.several_shells else label_of(work) or tenant.name
    what = program_text(tenant.processes, title)
    limit = limit_inside_instance(way, work, tenant.profile, tenant.processes)
    if way is Way.MIG:
        steps.add_job(what, work, gpu=None, mig=selector)
    elif way is Way.MIG_TIMESLICE:
        steps.add_job(what, work, gpu=selector, slice=OWN_SLICE, memory=limit)
    else:
        limits = client_limits(threads_of_each(s, tenant.processes), limit)
        start = steps.change_line(
            f"start MPS in the instance of {title}", s, Verb.MPS_START, instance=selector, limits=limits
        )
        steps.lines.append(start)
        # The undo of a new instance, which has a name, stops its daemon, too.
        if start.change is not None and not steps.several_shells:
            steps.undo_first(undo_of(steps, s, start.change))
        steps.add_job(what, work, gpu=selector, memory=client_job_memory(limit, tenant.profile))


# -- MPS ---------------------------------------------------------------------------------------------

# Measured on an H200: the highest cap under which production kept its rate and its p99, with low priority.
OPPORTUNISTIC_CAP: Final = 60


def _add_daemons(steps: Steps, what: str, limits: Limits) -> None:
    """Add the lines that start MPS on each GPU with these limits, or set them where a daemon runs already."""
    for s in steps.each_gpu():
        if s.mps_serves:
            steps.add_change("set the limits of the running MPS daemon", s, Verb.MPS_SET, limits=limits_to_set(limits))
        else:
            steps.add_change(what, s, Verb.MPS_START, limits=limits)


def _add_mps(steps: Steps, way: Way) -> None:
    """Add the lines of MPS: the daemons with their limits, and the jobs."""
    s = steps.s
    works = s.case.workloads
    at_once = s.at_a_time(Way.MPS) or s.case.processes
    # Before Volta, MPS limits no threads.
    cap = None if at_once is None or s.before_volta else threads_of_each(s, at_once)
    if way is Way.MPS_STREAMS:
        steps.add_line("inside each program: put independent work on separate CUDA streams")
    if s.case.any("weights") and at_once is not None and at_once > 1 and cap is not None:
        _add_daemons(steps, "start MPS", Limits())
        _add_shares(steps, way)
    elif len(works) > 1:
        _add_daemons(steps, "start MPS", Limits())
        threads = client_limits(cap, None).threads_percent
        for work in works:
            what = program_text(work.processes or 1, label_of(work))
            steps.add_job(what, work, threads_percent=threads, memory=job_memory(s, way, work))
    else:
        limits = client_limits(cap, memory_limits(s)[0])
        _add_daemons(steps, "start MPS with limits for each process" if limits != Limits() else "start MPS", limits)
        _add_mps_jobs(steps, works[0], at_once=at_once, memory=job_memory(s, way, works[0]))
    steps.measure.append("total steps per second of all programs, with and without MPS")
    if not s.before_volta:
        steps.measure.append(
            "the same with --threads 100 and with half the cap: the best cap depends on the program: "
            f"gpushare bench --copies 1,{min(at_once or 4, 8)} -- CMD"
        )


def _add_mps_jobs(steps: Steps, work: Workload, *, at_once: int | None, memory: int | None) -> None:
    """Add the line of equal MPS clients: a farm where they end by themselves and belong to one user."""
    s = steps.s
    total = s.counts_of_all[0]
    can_be_farm = s.case.same_user and not s.together and not s.endless and s.gpu.instance is None
    if total is not None and total > 1 and can_be_farm:
        parallel = None if at_once is None else min(at_once * len(s.used_gpus), total)
        some_wait = f", {parallel} at a time" if parallel is not None and parallel < total else ""
        what = f"{program_text(total)}{some_wait}; {{}} in CMD is the number of the copy"
        steps.add_job(what, work, copies=total, parallel=parallel, memory=memory)
    elif s.together and total is not None:
        # The ranks of one job are started together, not as jobs of their own.
        what = f"one of its {counted(total, 'process')}; for MPI ranks: mpirun -np {total} gpushare run ..."
        steps.add_job(what, work, memory=memory)
    else:
        wait = len(s.used_gpus) > 1 or s.at_a_time(Way.MPS) is not None
        _add_equal_jobs(steps, work, total, memory=memory, wait=wait)


def _add_equal_jobs(steps: Steps, work: Workload, count: int | None, **options: Any) -> None:
    """Add the line of equal jobs. Those that do not end by themselves get names, by which the undo ends them."""
    if steps.s.endless and steps.s.gpu.instance is None:
        steps.add_copies(work, count, **options)
    else:
        steps.add_job(program_text(count, label_of(work)), work, **options)


def _add_mps_static(steps: Steps, _: Way) -> None:
    """Add the lines of static partitions, which only NVIDIA's own commands make."""
    s = steps.s
    # A chunk has 8 SMs since Hopper, 4 before (NVIDIA MPS guide).
    since_hopper = s.gpu.compute_capability is not None and s.gpu.compute_capability >= HOPPER
    sms_of_chunk = 8 if since_hopper else 4
    processes = s.case.processes or 2
    chunks = max((s.gpu.multiprocessors or 0) // sms_of_chunk // processes, 1)
    add = f"echo 'sm_partition add {s.gpu.uuid or s.gpu.index} {chunks}' | nvidia-cuda-mps-control"
    steps.add_line("gpushare cannot start static partitions yet: use NVIDIA's commands")
    steps.add_line("start the daemon in static mode", "nvidia-cuda-mps-control -d -S")
    steps.add_line(program_text(processes, f"add a partition of {chunks} chunks on GPU {s.gpu.index}"), add)
    steps.add_line("list the partitions with their ids", "echo lspart | nvidia-cuda-mps-control")
    steps.add_line("start each program in its partition", "CUDA_MPS_SM_PARTITION=ID CMD")
    steps.undo.append(AdviceStep("stop the daemon", "echo quit | nvidia-cuda-mps-control"))
    steps.measure.append(
        "the rate of each program alone in its partition and with the others: only memory bandwidth is shared"
    )


# -- production and the jobs that yield to it ---------------------------------------------------------

# Measured on an H200: production's slice has to be longer than its request, which a shorter one cuts up.
_PRODUCTION_SLICE: Final = "16ms"
# Shorter ones starve the others where production has little rest.
_OTHER_SLICE: Final = "500us"
_WHICH_WAY: Final = "gpushare tune --ways slices,caps --production 'CMD' --opportunistic 'CMD'"
_LISTED: Final = "which jobs are out, and how long that took: gpushare swap list; which wait: gpushare jobs"


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """How a way starts production and the others: notes on their lines, and the options of `gpushare run`.

    The others yield to production by ``yields`` if they can (see `_can_yield`); else they have the options ``without_yield``.
    """

    yields: str | None = None
    note: str | None = None
    without_yield: Mapping[str, Any]
    note_without_yield: str | None = None
    # Of production, which has a name.
    name: str = "production"
    wait: bool = False
    measure: tuple[str, ...]


_PAIRS: Final = {
    Way.WHOLE: _Pair(
        yields="pause",
        note="paused while {name} works",
        without_yield={},
        measure=(
            "production's rate and p99, alone and with the other job",
            "how much of the time the other job runs",
        ),
    ),
    Way.SLICES: _Pair(
        yields="slices",
        without_yield={"slice": _OTHER_SLICE},
        note_without_yield="with a short slice",
        measure=(
            "production's p99 and rate, alone and with the others",
            f"which slices, or which cap under MPS: {_WHICH_WAY}",
        ),
    ),
    Way.SWAP: _Pair(
        yields="swap",
        note="out while production has the GPU",
        without_yield={"swap": "turns=60s"},
        note_without_yield="out while production has the GPU",
        wait=True,
        measure=(_LISTED, "how long production waits when it starts, and how much of the time the other job runs"),
    ),
    # Production has no cap: the other job gets what production does not need.
    Way.MPS_PRIORITY: _Pair(
        without_yield={"priority": Priority.LOW},
        name="name",
        measure=(
            "production's rate and p99, alone and with the other job, three alternating runs each",
            f"if production loses more than 3 %: restart the other job with a cap of 50 instead of {OPPORTUNISTIC_CAP}",
            "a cap is fixed when a program starts, so each try needs a restart",
            f"which cap, or which slices: {_WHICH_WAY}",
        ),
    ),
}


def _add_production(steps: Steps, way: Way) -> None:
    """Add the lines of production and of the jobs that yield to it."""
    s = steps.s
    pair = _PAIRS[way]
    first = next((work for work in s.case.workloads if work.role is Role.PRODUCTION), None)
    already_running = first is not None and bool(first.running)
    can_yield = _can_yield(s, way, already_running=already_running)
    # Under MPS, production has no role.
    running_names = [] if pair.name == "name" else [name for name, job in s.jobs.items() if job.production]
    first_name = None if first is None else steps.free_name(_production_name(first, 1, running_names))
    owner = "by its own user" if s.case.same_user is False else None
    cost = s.leaving_cost(way) if way is Way.SWAP else None
    seconds = "" if cost is None else f" (about {cost.out_seconds:.0f} s)"
    if way is Way.MPS_PRIORITY:
        _add_daemons(steps, "start MPS without a cap for production", Limits())
    if can_yield:
        note = pair.note and pair.note.format(name=first_name)
        # Swap notices production by its growth, so it needs no name.
        target = None if way is Way.SWAP else first_name
        options_of_others: dict[str, Any] = {"opportunistic": True, "yields": pair.yields, "target": target}
    else:
        note = pair.note_without_yield
        options_of_others = _options_without_yield(s, way)
    production_count = 0
    others_count = 0
    for work, count in zip(s.case.workloads, s.counts_of_all, strict=True):
        is_production = work.role is Role.PRODUCTION
        production_count += is_production
        memory = job_memory(s, way, work)
        if work.running and way is Way.SLICES:
            _add_slice_of_running(steps, work, count, owner)
        elif work.running:
            steps.add_line(program_text(count, label_of(work), "runs already, and stays as it is"))
        elif is_production:
            how = f"starts when the other job has left{seconds}" if pair.wait else None
            options = {pair.name: _production_name(work, production_count, running_names), "wait": pair.wait}
            steps.add_job(program_text(count or 1, label_of(work), how, owner), work, memory=memory, **options)
        else:
            others_count += 1
            name = "other" if others_count == 1 else f"other{others_count}"
            steps.add_copies(work, count, note, owner, default=name, memory=memory, **options_of_others)
    if way is Way.SWAP and can_yield:
        early = (
            "" if already_running else "if production runs all the time: start it first, without --wait and --memory. "
        )
        steps.add_line(
            f"{early}If the memory of production grows steadily, the other job leaves early enough; if production allocates "
            f"a lot at once before the other job has left{seconds}, it runs out of memory"
        )
    steps.measure += pair.measure


def _can_yield(s: Situation, way: Way, *, already_running: bool) -> bool:
    """Return whether the other jobs can yield by ``--opportunistic``, which has to find production by its role.

    ``already_running``: production was started without that role.
    """
    if _PAIRS[way].yields is None:
        return False
    if s.case.same_user is False:
        # Only root finds the jobs of other users by name. Swap needs no name where production runs: it sees it grow.
        return already_running and way is Way.SWAP
    return not (already_running and way is Way.SLICES)


def _options_without_yield(s: Situation, way: Way) -> dict[str, Any]:
    """Return the options of `gpushare run` that make a job spare production where it cannot yield to it."""
    options = dict(_PAIRS[way].without_yield)
    if way is Way.MPS_PRIORITY:
        counts = zip(s.case.workloads, s.counts_of_all, strict=True)
        # All of them share one cap.
        clients = sum(count or 1 for work, count in counts if work.role is not Role.PRODUCTION)
        options["threads_percent"] = client_limits(OPPORTUNISTIC_CAP / clients, None).threads_percent
    return options


def _add_slice_of_running(steps: Steps, work: Workload, count: int | None, owner: str | None) -> None:
    """Add the line that sets the slice of jobs that run already; ``owner`` is a note that only their user can."""
    slice_of_job = _PRODUCTION_SLICE if work.role is Role.PRODUCTION else _OTHER_SLICE
    what = f"the slice of {program_text(count or 1, label_of(work))}, which runs; gpushare jobs -a lists its PID"
    steps.add_line(f"{what}; {owner}" if owner else what, f"gpushare timeslice set {slice_of_job} PID")
    steps.undo.append(AdviceStep("restore the slice", "gpushare timeslice reset PID"))


def _production_name(work: Workload, number: int, running_names: Sequence[str]) -> str:
    """Return the name of production job ``number``; if the case gives it none, that of the one that runs already."""
    if work.name is None and number <= len(running_names):
        return running_names[number - 1]
    return clean_name(work.name, number, "serve")


# -- the whole GPU, one after the other ----------------------------------------------------------------


def _add_whole(steps: Steps, way: Way) -> None:
    """Add the lines of jobs that have a GPU, or GPUs, to themselves."""
    s = steps.s
    # Processes that wait for each other are one job with a GPU for each.
    one_job = s.together and s.case.any("nccl") is not False and s.placed_processes > 1
    if s.case.any("vms"):
        # A lock or an environment variable of the host has no effect in a virtual machine.
        machine = "one virtual machine at a time" if s.several else "the virtual machine"
        steps.add_line(f"on the hypervisor: pass the whole GPU to {machine} (PCI passthrough)")
    elif s.case.any("kubernetes"):
        steps.add_line(
            "for pods: request nvidia.com/gpu: 1; without sharing, the device plugin gives each pod a whole GPU"
        )
    elif one_job:
        _add_one_job(steps)
    elif may_pause(s):
        # In a queue, a service that stays would keep the other job out.
        _add_production(steps, way)
    else:
        for work, count in zip(s.case.workloads, s.counts_of_all, strict=True):
            if work.running:
                steps.add_line(program_text(count, label_of(work), "runs already, and stays as it is"))
            else:
                _add_jobs_alone(steps, work, count)
        if s.placed_processes > s.gpu_sets:
            if not s.memory_decides:
                steps.add_line("a program that gpushare did not start is not held back")
            steps.measure.append("the total time of all, one after the other: sharing has to beat that")


def _add_jobs_alone(steps: Steps, work: Workload, count: int | None) -> None:
    """Add the line of jobs that have a whole GPU each, one after the other where there are more of them.

    In line and without a size, a job claims the whole GPU only as long as gpushare does not know what its command uses.
    """
    s = steps.s
    options: dict[str, Any] = {"slice": steps.own_slice}
    if s.gpus_each > 1:
        # Jobs on several GPUs run outside MPS by themselves.
        options = {}
    elif s.memory_decides and not cannot_leave(s):
        options = {"swap": "request"}
    # One process alone claims only what it needs, too.
    claims_its_size = s.memory_decides or (s.placed_processes == 1 and work.memory is not None)
    memory: int | str | None = job_memory(s, Way.WHOLE, work) if claims_its_size else None
    if memory is None and s.gpu.memory_total_bytes is not None and (s.placed_processes != 1 or s.gpus_each > 1):
        # So much that no second one fits; a job that needs more is not ended for it.
        memory, options["over"] = "90%", "warn"
    steps.add_job(program_text(count, label_of(work)), work, wait=True, memory=memory, **options)


def _add_one_job(steps: Steps) -> None:
    """Add the line of one job whose processes depend on each other: in a queue, the first would wait forever."""
    s = steps.s
    processes = s.placed_processes
    gpus = len(s.used_gpus)
    count = min(processes, gpus)
    if gpus == 1:
        what = "the processes depend on each other and cannot run in turn: start it with one process"
    elif gpus < processes:
        what = f"one process per GPU: {processes} are requested, and {gpus} GPUs are free here"
    else:
        what = f"start it once: each of its {processes} processes gets a GPU"
    for work in s.case.workloads:
        options: dict[str, Any] = {"gpus": count} if count > 1 else {"gpus": None, "slice": steps.own_slice}
        steps.add_job(what, work, wait=True, **options)
    if gpus > 1:
        steps.measure.append("the rate with one process, and with one process per GPU")


def may_pause(s: Situation) -> bool:
    """Return whether `gpushare run` can pause one job of a pair on the GPU while the other works.

    On one GPU they do that as clients of MPS.
    """
    if not s.pair or s.case.same_user is False or s.before_volta or s.short_of_memory or s.gpu_sets > 1:
        return False
    mps = next(verdict for verdict in verdicts(s) if verdict.way is Way.MPS)
    return s.gpus_each > 1 or not mps.refused


# -- time-slicing, and jobs that leave the GPU ---------------------------------------------------------

_INTERACTIVE_SLICE: Final = "1ms"


def _add_timeslice(steps: Steps, way: Way) -> None:
    """Add the lines of jobs that share the time of a GPU."""
    s = steps.s
    for on_gpu in steps.each_gpu():
        if on_gpu.exclusive_mode and on_gpu.may_be_root is not False and on_gpu.gpu.time_slice_settable is not False:
            # To set a level ends the exclusive mode, in which a GPU is never time-sliced.
            steps.add_change("admit several programs", on_gpu, Verb.TIMESLICE_SET, level=TimeSlice.DEFAULT)
    if s.case.any("running"):
        see = ("status", "-g", s.gpu.selector)
        steps.lines.append(steps.command_line("running programs share the GPU as they do now; see", *see))
    in_line = len(s.used_gpus) > 1 or s.at_a_time(way) is not None
    for work, count in zip(s.case.workloads, s.counts_of_all, strict=True):
        if work.running:
            continue
        memory = job_memory(s, way, work)
        if steps.own_slice is None:
            # A job that can be swapped runs outside MPS, as one with a slice does.
            steps.add_job(program_text(count, label_of(work)), work, swap="request", memory=memory, wait=in_line)
        else:
            slice_of_job = _INTERACTIVE_SLICE if s.case.pattern is Pattern.INTERACTIVE else OWN_SLICE
            # In line and without a limit of memory, a job would claim the whole GPU.
            wait = in_line and memory is not None
            _add_equal_jobs(steps, work, count, slice=slice_of_job, memory=memory, wait=wait)
    if s.case.workloads[0].memory is None and job_memory(s, way, s.case.workloads[0]) is not None:
        steps.add_line(
            "the memory is divided equally, because what each needs is not known; with --memory SIZE each gets that much"
        )
    steps.measure.append("p99 and rate of each program, alone and with the others")


class _WeightedJobs(NamedTuple):
    """Processes of a workload of which each has this share."""

    work: Workload
    processes: int
    share: float


def _weighted_jobs(case: Case, processes: int) -> list[_WeightedJobs]:
    """Return the jobs of a GPU with their shares; where none are given, the first has twice the share of each other.

    ``processes`` is how many the GPU has of a single workload without shares.
    """
    works = case.workloads
    if case.shares is not None:
        shares = iter(case.shares)
        counts: Counter[tuple[Workload, float]] = Counter()
        for work in works:
            own_shares = work.shares or ()
            for _ in own_shares:
                # Several shares are those of its processes; a single one is that of each.
                counts[work, next(shares)] += 1 if len(own_shares) > 1 else work.processes or 1
        return [_WeightedJobs(work, count, share) for (work, share), count in counts.items()]
    if len(works) == 1:
        others = [_WeightedJobs(works[0], processes - 1, 1.0)] if processes > 1 else []
        return [_WeightedJobs(works[0], 1, 2.0), *others]
    return [_WeightedJobs(work, work.processes or 1, 1.0 if number else 2.0) for number, work in enumerate(works)]


def _add_shares(steps: Steps, way: Way) -> None:
    """Add the lines of unequal shares: of the SMs under MPS, else of the time, of programs that always have work."""
    s = steps.s
    for number, on_gpu in enumerate(steps.each_gpu()):
        # Spread evenly: the first GPUs may have one process more than the others.
        weighted = _weighted_jobs(on_gpu.case, -(-(s.placed_processes - number) // len(s.used_gpus)))
        smallest = min(jobs.share for jobs in weighted)
        total = sum(jobs.share * jobs.processes for jobs in weighted)
        for work, processes, share in weighted:
            options: dict[str, Any] = {"weight": share / smallest}
            if way in ALL_MPS:
                options = {"threads_percent": client_limits(100 * share / total, None).threads_percent}
            what = program_text(processes, f"the program with {share:g} of {total:g}")
            steps.add_job(what, work, gpu=on_gpu.gpu.selector, memory=job_memory(s, way, work), **options)
    if way is Way.SLICES:
        steps.measure.append("the share that each gets next to the others: the switch between them moves it a little")


def _add_leaving_jobs(steps: Steps, way: Way) -> None:
    """Add the lines for jobs in turns, or for jobs that leave while they are idle."""
    s = steps.s
    if way is Way.TURNS:
        how = "in turns"
        swap = "turns"
        measure = (
            "the total time of all, and of one after another (--wait instead of --swap turns): turns lose about a tenth"
        )
    else:
        how = "out after 10 min without work"
        swap = "idle=10m"
        measure = (
            "how long the first work after a pause takes: the job comes back first, and waits while the others work"
        )
    owner = "each by its own user" if s.case.same_user is False else None
    for work, count in zip(s.case.workloads, s.counts_of_all, strict=True):
        memory = job_memory(s, way, work)
        steps.add_copies(work, count, how, owner, memory=memory, wait=way is Way.SWAP, swap=swap)
    steps.measure += [_LISTED, measure]


# -- answers without a share of a GPU ------------------------------------------------------------------


def _add_streams(steps: Steps, _: Way) -> None:
    """Add the lines of streams, which only the program itself can make."""
    steps.add_line(
        "in the program: put independent work on separate streams (cudaStream_t, torch.cuda.Stream); copy from pinned memory"
    )
    _add_jobs_alone(steps, steps.s.case.workloads[0], count=1)
    steps.measure.append("whether kernels overlap: nsys profile CMD")


def _add_vgpu(steps: Steps, _: Way) -> None:
    """Add the lines of vGPU, which only the hypervisor sets up."""
    s = steps.s
    backed = s.gpu.mig_capable and (s.case.any("bandwidth_qos") or Isolation.FULL in s.isolation)
    kind = "a MIG-backed vGPU type" if backed else "a vGPU type with enough frame buffer for the work"
    steps.add_line("gpushare does not set up vGPU: install NVIDIA's vGPU host driver and a licence on the hypervisor")
    steps.add_line(f"give each virtual machine {kind}")
    steps.add_line("list the vGPU types that the GPU offers", f"nvidia-smi vgpu -s -i {s.gpu.index}")
    steps.measure.append("the rate of the program in one virtual machine, alone and with the others")


def _add_bench(steps: Steps, _: Way) -> None:
    """Add the line that measures the ways against each other."""
    s = steps.s
    fitting = [count for count in map(s.at_a_time, (Way.TIMESLICE, Way.MPS)) if count is not None]
    # One copy alone is what the others are compared with: as many as run at the same time.
    processes = min(fitting, default=s.case.processes)
    copies = f"1,{processes}" if processes is not None and processes > 1 else "1,2,4"
    bench = f"gpushare bench -g {s.gpu.selector} --copies {copies} -- {s.case.workloads[0].command or 'CMD'}"
    steps.add_line("run it under each way in turn; the host is restored afterwards", bench)
    steps.measure.append("total runs per second, and p99; overlapping intervals mean no difference")


def _add_remedy(steps: Steps, _: Way) -> None:
    """Add the lines for a problem that no way of sharing solves: too many engines, too little memory or input."""
    s = steps.s
    if s.batched:
        steps.add_line(
            "run one engine with continuous batching instead of the copies: it batches the requests of all of them "
            "(vLLM, TensorRT-LLM, SGLang)"
        )
        steps.add_job(
            "one engine, with the memory of all copies", s.case.workloads[0], slice=steps.own_slice, wait=True
        )
        measure = "requests per second and p99 at the load of all copies, with one engine and with the copies"
    elif s.short_of_memory and (s.in_phases or s.case.any("server")):
        measure = "requests per second and p99 of each server with less memory, next to the other"
        if not wakes_late(s, Way.FIX):
            steps.add_line(
                "vLLM: start each with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, on a trusted network, and put the idle"
                " one to sleep (POST /sleep, /wake_up)"
            )
            measure = "how long the first answer after a sleep takes"
        steps.add_line("less memory for each: a shorter context, a quantized model, a smaller --gpu-memory-utilization")
    else:
        steps.add_line(
            "use more loader workers, pinned memory, prefetching, larger batches, and a local disk for the data"
        )
        steps.lines.append(steps.command_line("see whether the GPU waits", "status", "-g", s.gpu.selector))
        measure = "the rate with synthetic input: if it is much higher, the input is the bottleneck"
    steps.measure.append(measure)


def _add_kubernetes(steps: Steps, way: Way) -> None:
    """Add `export k8s` for a way: it writes the configuration of the device plugin, and changes nothing on the host."""
    s = steps.s
    # Where only some fit at a time, the other pods wait in the cluster.
    pods = max(2, min(s.at_a_time(way) or s.case.processes or 4, MOST_REPLICAS))
    # What `export` reads of the GPUs of the host; empty where they stay as they are.
    layout = ""
    shares_text = f"{pods} pods share each GPU"
    options = ["--replicas", str(pods)]
    if way.outer is Way.MPS:
        layout = "mps: {}"
        shares_text = "MPS, equal shares"
    elif way.outer is Way.MIG:
        instances = s.new_instances(way)
        shares_text = "a resource for each MIG profile"
        # Rounded up: no pod is left without a place.
        pods_in_each = -(-pods // max(len(s.shares(way)), 1)) if way is Way.MIG_TIMESLICE else 1
        options = ["--mig-replicas", str(pods_in_each)] if pods_in_each > 1 else []
        if s.free_instances(way) is None and instances is not None and instances.profiles:
            layout = f"mig: [{', '.join(map(str, instances.wish))}]"
    stdin = ["-f", "-"] if layout else []
    what = f"write the configuration of the device plugin: {shares_text}"
    line = steps.command_line(what, "export", "k8s", *stdin, *options, "--to", "k8s")
    if layout:
        line = replace(line, text=f"echo '{{version: 1, gpus: [{{match: all, {layout}}}]}}' | {line.text}")
    steps.lines.append(line)
    steps.add_line("it prints the kubectl commands that apply it; files are in ./k8s")
    steps.measure.append("p99 and rate of a pod, alone and with the others")


# -- all ways ----------------------------------------------------------------------------------------

_FOR_PODS: Final = (Way.TIMESLICE, Way.MPS, Way.MIG)
_WITHOUT_MIG: Final = (Way.WHOLE, *LEAVING, Way.STREAMS, Way.TIMESLICE, Way.SLICES, Way.MEASURE, *ALL_MPS)


def recipe(s: Situation, way: Way) -> Recipe:
    """Return the recipe of a way for a case on the GPUs that the situation is spread over."""
    steps = Steps(s)
    if s.case.any("kubernetes") and way.outer in _FOR_PODS:
        # The device plugin of the cluster applies the way, not gpushare on the host.
        _add_kubernetes(steps, way)
        return steps.finished_recipe()
    _turn_off_obstacles(steps, way)
    add_lines = _RECIPES[way]
    if s.pair and way in {Way.SLICES, Way.SWAP}:
        # Without a pair, these ways are for equal jobs.
        add_lines = _add_production
    add_lines(steps, way)
    if s.case.any("containers") and way.outer in _FOR_PODS:
        steps.add_line(
            "for containers: gpushare run --container podman (or docker) ... -- IMAGE CMD, with the same options; or "
            "export the share as flags: gpushare export docker, or gpushare export compose"
        )
    if way in LEAVING:
        steps.undo.append(AdviceStep("nothing of the host is changed; a job that is out comes back by itself"))
    if way is not Way.FIX and s.several and not s.apart and any(map(s.case.any, ("replicas", "cuda_graphs"))):
        steps.measure.append("several copies of one model, against one server with continuous or dynamic batching")
    return steps.finished_recipe()


def _turn_off_obstacles(steps: Steps, way: Way) -> None:
    """Add the lines that turn off MIG and MPS where the way cannot be used with them, with their undo."""
    for s in steps.each_gpu():
        if s.gpu.mig_enabled and way in _WITHOUT_MIG:
            may_have_instances = s.gpu.layout is None or bool(s.gpu.layout.instances)
            if s.gpu.mps_daemons:
                # Before the change, so that it is undone after it.
                text = "and MPS in the instances: gpushare mps start -g UUID, with the new UUID of each"
                steps.undo_first([AdviceStep(text)])
            steps.add_change("turn MIG off", s, Verb.MIG_DISABLE, destroy=may_have_instances, yes=_needs_yes(s))
        if s.mps_in_the_way(way):
            if s.gpu.mps is None:
                steps.add_line("stop the MPS daemon of the GPU the way it was started: see gpushare mps status")
                steps.undo_first([AdviceStep("start the MPS daemon again the same way")])
            else:
                steps.add_change("stop the running MPS daemon; waits for its programs", s, Verb.MPS_STOP)


_RECIPES: Final[dict[Way, Callable[[Steps, Way], None]]] = {
    Way.WHOLE: _add_whole,
    Way.STREAMS: _add_streams,
    Way.TIMESLICE: _add_timeslice,
    Way.SLICES: _add_shares,
    Way.MPS: _add_mps,
    Way.MPS_PRIORITY: _add_production,
    Way.MPS_STATIC: _add_mps_static,
    Way.VGPU: _add_vgpu,
    Way.MPS_STREAMS: _add_mps,
    Way.MEASURE: _add_bench,
    Way.FIX: _add_remedy,
    **dict.fromkeys(ALL_MIG, _add_mig),
    **dict.fromkeys(LEAVING, _add_leaving_jobs),
}
