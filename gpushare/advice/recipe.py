"""The commands for a way on this host, with the numbers worked out, their undo, and what to measure. Pure.

A recipe is a list of changes of the host and of jobs. `Change` writes the former, `gpushare.job_command.JobCommand` the latter.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.case import Isolation, Pattern, Role
from gpushare.advice.rules import cannot_leave, verdicts
from gpushare.advice.situation import CONTEXT_BYTES, HOPPER, addable, equal_limit, limit_for
from gpushare.advice.ways import ALL_MPS, LEAVING
from gpushare.base.model import Priority, TimeSlice, Way
from gpushare.base.units import MIB, counted, ranges
from gpushare.job_command import JobCommand
from gpushare.mig.wish import merged, wish_of
from gpushare.mps.limits import CONTEXT_BYTES as CLIENT_BYTES
from gpushare.mps.limits import Limits

if TYPE_CHECKING:
    from gpushare.advice.case import Workload
    from gpushare.advice.situation import Situation
    from gpushare.mig.profile import Profile
    from gpushare.mig.wish import Wish


class Verb(str, Enum):
    """The commands that `advise --apply` carries out."""

    TIMESLICE_SET = "timeslice set"
    MPS_START = "mps start"
    MPS_SET = "mps set"
    MPS_STOP = "mps stop"
    MIG_APPLY = "mig apply"
    MIG_CREATE = "mig create"
    MIG_DISABLE = "mig disable"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a GPU: `advise` prints it as a command, `advise --apply` plans and carries it out."""

    verb: Verb
    gpu: int
    # The UUID of a MIG instance of this GPU, if the change is in that instance.
    instance: str | None = None
    limits: Limits | None = None
    level: TimeSlice | None = None
    wish: Wish = ()
    # For `mig disable`: idle instances go first.
    destroy: bool = False
    # Without a question, because the lines before it made what is named.
    yes: bool = False

    @property
    def selector(self) -> str:
        return self.instance or str(self.gpu)

    @property
    def words(self) -> tuple[str, ...]:
        return (
            *self.verb.value.split(),
            *(() if self.level is None else (self.level.title,)),
            *("-g", self.selector),
            *(() if self.limits is None else self.limits.options()),
            *map(str, self.wish),
            *(("--destroy",) if self.destroy else ()),
            *(("-y",) if self.yes else ()),
        )


@dataclass(frozen=True)
class Line:
    """One step: what to do, and the command to type; None if there is no command for it.

    ``change`` is the same as data, for the lines that `advise --apply` carries out.
    """

    what: str
    command: str | None = None
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Lines in order, those that undo them, and what to measure afterwards."""

    lines: tuple[Line, ...]
    undo: tuple[Line, ...] = ()
    measure: tuple[str, ...] = ()
    # The lines name what earlier ones made: one change cannot carry them out.
    several_shells: bool = False


@dataclass
class _Steps:
    """What a recipe is made of while it is written, for the GPUs that a situation is spread over."""

    s: Situation
    lines: list[Line] = field(default_factory=list)
    undo: list[Line] = field(default_factory=list)
    measure: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = "" if self.s.host.root else "sudo "

    @property
    def outside_mps(self) -> bool:
        """Return whether a job can have a slice, which takes it out of MPS."""
        return (self.s.host.driver_major or _FIRST_SLICES) >= _FIRST_SLICES

    def say(self, what: str) -> None:
        self.lines.append(Line(what))

    def command(self, what: str, *words: str, root: bool = False) -> Line:
        return Line(what, f"{self.root if root else ''}gpushare {shlex.join(words)}")

    def change(self, what: str, made: Change, *, root: bool = False) -> Line:
        return replace(self.command(what, *made.words, root=root), change=made)

    def run(self, what: str, work: Workload, **options: Any) -> None:
        """Add the line of a job, by default on one of the GPUs of the situation."""
        gpus = None if self.s.gpus_each == 1 else work.gpus
        job = JobCommand(**{"gpu": self.gpu, "gpus": gpus, "program": work.command or "CMD", **options})
        self.lines.append(Line(what, str(job)))

    @property
    def gpu(self) -> str:
        """Return the ``-g`` value for all GPUs of the situation."""
        if self.s.gpu.instance is not None:
            return self.s.gpu.instance
        return ranges(gpu.index for gpu in self.s.spread).replace(" ", "")

    def each_gpu(self) -> list[Situation]:
        """Return the situation on each of its GPUs."""
        return [self.s.on(gpu) for gpu in self.s.spread]

    def made(self, **changes: Any) -> Recipe:
        return replace(Recipe(lines=tuple(self.lines), undo=tuple(self.undo), measure=tuple(self.measure)), **changes)


def _label(work: Workload) -> str | None:
    """Return the name of a workload, else its role; None if it has neither."""
    return work.name or (None if work.role is None else work.role.value)


def _which(processes: int | None, name: str | None = None, how: str | None = None) -> str:
    """Return which program a line starts, and how often."""
    label = "each program" if name is None and processes is None else name or "the program"
    times = "" if processes in {None, 1} else f", {processes} times"
    return f"{label}{times}" + (f", {how}" if how else "")


def _name(text: str | None, number: int, default: str = "group") -> str:
    """Return a name that needs no quoting."""
    clean = "".join(letter for letter in text or "" if letter.isascii() and (letter.isalnum() or letter in "-_"))
    return clean if clean[:1].isalpha() else f"{default}{number if number > 1 else ''}"


# -- memory ------------------------------------------------------------------------------------------

# A job that reserves so much of a GPU has it alone; what is left is for CUDA contexts of others.
_WHOLE_PERCENT: Final = 90


def _whole_memory(s: Situation, work: Workload) -> int | str | None:
    """Return the memory that a job on a GPU of its own reserves: nearly all of it, or its need if that is more.

    None: the whole GPU. Managed memory larger than the GPU takes all of it.
    """
    total = s.gpu.memory_total_bytes
    if s.case.any("managed_memory") and s.plain.one_fits is False:
        return None
    needed = None if work.memory is None else -(-(work.memory + CONTEXT_BYTES) // MIB) * MIB
    if needed is not None and total is not None and needed * 100 > total * _WHOLE_PERCENT:
        return needed
    return f"{_WHOLE_PERCENT}%"


def _job_memory(s: Situation, way: Way, work: Workload) -> int | None:
    """Return the limit of one process with its CUDA context, in bytes.

    Where the size is unknown, people who share a GPU get equal parts, and others no limit (None).
    """
    usable, count = s.budget_of(way).usable_bytes, s.case.processes
    if work.memory is None:
        equal = s.case.pattern is Pattern.INTERACTIVE or Isolation.QUOTA in s.isolation
        return equal_limit(usable, count) if equal and usable and count else None
    plain = -(-(work.memory + CONTEXT_BYTES) // MIB) * MIB
    if way not in ALL_MPS:
        return plain
    # A client of MPS may allocate what its job has, less one context. Where that does not fit, the limit is left out.
    for limit in (limit_for, lambda memory: -(-memory // MIB) * MIB):
        sizes = [0 if each.memory is None else limit(each.memory) + CLIENT_BYTES for each in s.case.workloads]
        total = sum(size * (number or 1) for size, number in zip(sizes, s.counts_at_once(way), strict=True))
        if usable is not None and total <= usable:
            return limit(work.memory) + CLIENT_BYTES
    return None


def limits_sum(s: Situation, way: Way) -> int | None:
    """Return the sum of the memory limits of the MPS clients; None if one has no limit."""
    if way not in ALL_MPS or way is Way.MPS_STATIC:
        return None
    limits = zip(s.case.workloads, memory_limits(s), s.counts_at_once(way), strict=True)
    limited = [
        (limit or 0) * (count or 0)
        for work, limit, count in limits
        if not (way is Way.MPS_PRIORITY and work.role is Role.PRODUCTION)
    ]
    return sum(limited) if limited and all(limited) else None


def memory_limits(s: Situation) -> list[int | None]:
    """Return a limit of MPS per workload; None is no limit. All together fit the GPU, except that a quota is always a limit."""
    works, usable = s.case.workloads, s.under_mps.usable_bytes
    if s.before_volta:
        return [None] * len(works)
    limits = [None if work.memory is None else limit_for(work.memory) for work in works]
    counts = [count for count in s.counts_at_once(Way.MPS) if count is not None]
    if usable is None or len(counts) < len(works):
        return limits
    taken = sum((limit or 0) * count for limit, count in zip(limits, counts, strict=True))
    if taken > usable:
        quota = Isolation.QUOTA in s.isolation
        return [work.memory // MIB * MIB if quota and work.memory is not None else None for work in works]
    open_count = sum(count for limit, count in zip(limits, counts, strict=True) if limit is None)
    rest = equal_limit(usable - taken, open_count) if open_count else None
    return [rest if limit is None else limit for limit in limits]


# -- MIG ---------------------------------------------------------------------------------------------

_MEASURE_MIG: Final = (
    "the rate of each program in its instance and on the whole GPU: an instance has part of the SMs and bandwidth",
    "peak memory: a program cannot use more than its instance has",
)


def _mig_as_it_was(steps: _Steps, s: Situation) -> list[Line]:
    """Return the lines that restore the current state of MIG: on, its instances at their placements, names and grants."""
    gpu, layout = str(s.gpu.index), s.gpu.layout
    if layout is None or not layout.instances:
        return [steps.command("turn MIG on again", "mig", "enable", "-g", gpu, root=True)]
    before = map(str, wish_of(layout.instances))
    lines = [steps.command("restore the current instances", "mig", "apply", "-g", gpu, *before, root=True)]
    for instance in layout.instances:
        if instance.name:
            words = ("mig", "name", instance.name, str(instance), "-g", gpu)
            lines.append(steps.command("restore the name", *words, root=True))
            lines += [
                steps.command("restore the grant", "mig", "grant", instance.name, user, root=True)
                for user in instance.granted
            ]
    return lines


def _mig_off(steps: _Steps, s: Situation, what: str, *, yes: bool = False) -> Line:
    layout = s.gpu.layout
    destroy = not s.gpu.mig_enabled or layout is None or bool(layout.instances)
    made = Change(verb=Verb.MIG_DISABLE, gpu=s.gpu.index, destroy=destroy, yes=yes)
    return steps.change(what, made, root=True)


def _mig(s: Situation, way: Way) -> Recipe:
    steps, free = _Steps(s), s.free_instances(way)
    users = list(dict.fromkeys(work.user for work in s.case.workloads if work.user is not None))
    parties = _parties(s, way)
    named = free is None and (way is not Way.MIG or not s.trusted or len(users) > 1)
    if free is not None:
        names = [instance.profile.name for instance in free]
        targets = [str(instance.compute[0].uuid) for instance in free] if way is not Way.MIG else names
        if way is Way.MIG:
            _run_in_profiles(steps, way, names)
        else:
            for (name, work, inside), instance, uuid in zip(parties, free, targets, strict=True):
                title = _label(work) or name
                _run_inside(steps, way, work, inside, instance.profile, uuid, title, change_of=uuid)
        return steps.made(measure=_MEASURE_MIG)
    slices = s.slices(way)
    if slices is None or not slices.profiles:
        if not s.gpu.mig_enabled:
            steps.lines.append(steps.command("turn MIG on", "mig", "enable", "-g", str(s.gpu.index), root=True))
            steps.undo.append(_mig_off(steps, s, "turn MIG off again"))
        words = ("mig", "profiles", "-g", str(s.gpu.index))
        steps.lines.append(steps.command("list the profiles that the driver offers, and choose", *words))
        steps.say("then, in each instance: gpushare run --mig PROFILE -- CMD")
        return steps.made(measure=_MEASURE_MIG)
    if not named:
        for here in steps.each_gpu():
            _layout(steps, here, way)
        if s.case.same_user is False:
            steps.say(
                "every local user may use every instance; to keep others out, name and grant them: gpushare mig name, "
                "gpushare mig grant, then gpushare run --mig NAME"
            )
        _run_in_profiles(steps, way, [profile.name for profile in slices.profiles])
        return steps.made(measure=_MEASURE_MIG)
    for number, here in enumerate(steps.each_gpu(), 1):
        _named_instances(steps, here, way, prefix="" if number == 1 else f"gpu{here.gpu.index}-")
    return steps.made(measure=_MEASURE_MIG, several_shells=True)


def _layout(steps: _Steps, s: Situation, way: Way) -> None:
    """Add the lines that create the instances of one GPU, and those that undo it."""
    slices, layout = s.slices(way), s.gpu.layout
    gpu = ("-g", str(s.gpu.index))
    apply = Change(verb=Verb.MIG_APPLY, gpu=s.gpu.index, wish=() if slices is None else slices.wish)
    if not s.gpu.mig_enabled:
        steps.lines.append(steps.change("turn MIG on and create the instances", apply, root=True))
        steps.undo.append(_mig_off(steps, s, "turn MIG off again"))
    elif layout is None or not layout.instances:
        steps.lines.append(steps.change("create the instances", apply, root=True))
        steps.undo.append(steps.command("destroy the instances again", "mig", "destroy", *gpu, "all", root=True))
    else:
        if addable(layout, apply.wish):
            what, made = "create the instances next to the existing ones", replace(apply, verb=Verb.MIG_CREATE)
        else:
            # Those that stay are in the list too: what is not in it is destroyed.
            what = "create the instances; idle ones that are not in the list are destroyed"
            made = replace(apply, wish=merged((*wish_of(s.kept), *apply.wish)))
        steps.lines.append(steps.change(what, made, root=True))
        steps.undo += _mig_as_it_was(steps, s)


def _run_in_profiles(steps: _Steps, way: Way, names: Sequence[str]) -> None:
    works = steps.s.case.workloads
    only = steps.gpu if len(steps.s.host.gpus) > len(steps.s.spread) else None
    counts = steps.s.counts_of_all
    if len(works) == 1:
        # Unequal shares: an instance of its own size for each process.
        runs = [
            (name, works[0], names.count(name) if len(set(names)) > 1 else counts[0]) for name in dict.fromkeys(names)
        ]
    else:
        each = [(work.processes or 1) if way is Way.MIG else (work.groups or 1) for work in works]
        starts = [sum(each[:number]) for number in range(len(each))]
        runs = [(names[start], work, count) for start, work, count in zip(starts, works, each, strict=True)]
    for name, work, count in runs:
        steps.run(_which(count, _label(work)), work, gpu=only, mig=name)


def _parties(s: Situation, way: Way) -> list[tuple[str, Workload, int]]:
    """Return the name, the workload and the number of processes of each instance."""
    works = s.case.workloads
    if len(works) == 1:
        count = len(s.shares(way))
        processes = works[0].processes or (count if way is Way.MIG else 2 * count)
        each = [processes // count + (number < processes % count) for number in range(count)]
        return [
            (f"group-{number}" if count > 1 else "group", works[0], inside) for number, inside in enumerate(each, 1)
        ]
    parties: list[tuple[str, Workload, int]] = []
    for work in works:
        parts = (work.processes or 1) if way is Way.MIG else work.groups or 1
        processes = work.processes or 1
        for part in range(parts):
            name = _name(_label(work) or work.user, len(parties) + 1) + (f"-{part + 1}" if parts > 1 else "")
            parties.append((name, work, max(1, processes // parts + (part < processes % parts))))
    return parties


def _named_instances(steps: _Steps, s: Situation, way: Way, prefix: str) -> None:
    """Add the lines that create an instance with a name for each party of one GPU, and run its programs there."""
    gpu, layout, slices = str(s.gpu.index), s.gpu.layout, s.slices(way)
    assert slices is not None  # noqa: S101 - the caller has profiles
    parties = [(prefix + name, work, inside) for name, work, inside in _parties(s, way)]
    if not s.gpu.mig_enabled:
        steps.lines.append(steps.command("turn MIG on", "mig", "enable", "-g", gpu, root=True))
    room = layout is not None and bool(layout.instances) and not addable(layout, slices.wish)
    if layout is not None and room:
        idle = [f"{gpu}/{instance.id}" for instance in layout.instances if instance not in s.kept]
        steps.lines.append(steps.command("make room: destroy the idle instances", "mig", "destroy", *idle, root=True))
    create = ("mig", "create", "-g", gpu)
    words: tuple[str, ...]
    if len(s.case.workloads) == 1 and len(parties) > 1 and len({profile.name for profile in slices.profiles}) == 1:
        words = (*create, f"{slices.profiles[0].name}*{len(parties)}", "--name", f"{prefix}group")
        steps.lines.append(steps.command("create an instance for each party", *words, root=True))
    else:
        for (name, _, _), profile in zip(parties, slices.profiles, strict=True):
            words = (*create, profile.name, "--name", name)
            steps.lines.append(steps.command(f"create the instance of {name}", *words, root=True))
    for name, work, _ in parties:
        if work.user is not None:
            words = ("mig", "grant", name, work.user)
            steps.lines.append(steps.command(f"only {work.user} and root may use it", *words, root=True))
    if s.case.same_user is not True and any(work.user is None for _, work, _ in parties):
        steps.say(
            "who may use an instance: root grants it (gpushare mig grant NAME USER); until then every local user may"
        )
    for (name, work, inside), profile in zip(parties, slices.profiles, strict=True):
        _run_inside(steps, way, work, inside, profile, name, name)
    if not s.gpu.mig_enabled:
        steps.undo.append(_mig_off(steps, s, "undo all of it, after the programs have ended", yes=True))
        return
    names = [name for name, _, _ in parties]
    words = ("mig", "destroy", *names, "-y")
    steps.undo.append(steps.command("destroy the instances and stop their MPS daemons", *words, root=True))
    steps.undo += _mig_as_it_was(steps, s) if room else []


def _run_inside(
    steps: _Steps,
    way: Way,
    work: Workload,
    inside: int,
    profile: Profile,
    where: str,
    title: str,
    change_of: str | None = None,
) -> None:
    """Add the lines for the programs of one instance: by its name, or by its UUID if it is there already."""
    s, what = steps.s, _which(inside, title)
    if way is Way.MIG:
        steps.run(what, work, gpu=None, mig=where)
        return
    wanted = None if work.memory is None else limit_for(work.memory)
    room = None if profile.memory_bytes is None else equal_limit(profile.memory_bytes * 98 // 100, inside)
    limit = wanted if wanted is not None and (room is None or wanted <= room) else room
    if way is Way.MIG_TIMESLICE:
        memory = None if work.memory is None else -(-(work.memory + CONTEXT_BYTES) // MIB) * MIB
        steps.run(what, work, gpu=where, slice=_SLICE, memory=memory or room)
        return
    limits = _limits(_threads_for(s, inside), limit)
    if change_of is not None:
        start = Change(verb=Verb.MPS_START, gpu=s.gpu.index, instance=change_of, limits=limits)
        steps.lines.append(steps.change(f"start MPS in the idle instance of {title}", start))
        stop = Change(verb=Verb.MPS_STOP, gpu=s.gpu.index, instance=change_of)
        steps.undo.append(steps.change("stop MPS; waits for its programs", stop))
    else:
        words = ("mps", "start", "-g", where, *limits.options())
        steps.lines.append(steps.command(f"start MPS in the instance {where}", *words))
    most = (profile.memory_bytes or 0) * 98 // 100 // MIB * MIB
    memory = None if limit is None else min(limit + CLIENT_BYTES, most or limit + CLIENT_BYTES)
    steps.run(what, work, gpu=where, memory=memory)


# -- MPS ---------------------------------------------------------------------------------------------

# Measured on an H200: the highest cap under which production kept its rate and its p99, with low priority.
OPPORTUNISTIC_CAP: Final = 60


def _limits(share: float | None, memory: int | None) -> Limits:
    # MPS keeps one decimal; 28.6 is a little less in binary.
    threads = None if share is None or share >= 100 else int(share * 10 + 1e-6) / 10
    return Limits(threads_percent=threads, memory_limit_bytes=memory)


def _threads_for(s: Situation, processes: int) -> float:
    """Return the cap of each of N clients: the measured one, else 100/n to keep each within its share, or 200/n.

    NVIDIA calls 100/(0.5n) "more optimal" than 100/n; on an H200 it was as good or better for every n tested.
    """
    if s.cap is not None:
        return s.cap
    (work, *more), total = s.case.workloads, s.gpu.multiprocessors
    if work.sms is not None and not more and total and work.sms * processes <= total:
        # As much as the others leave, which is at least what it needs.
        return 100.0 * (total - work.sms * (processes - 1)) / total
    return min(100.0, threads_together(s) / processes)


def threads_together(s: Situation) -> int:
    case = s.case
    apart = case.any("containment") or case.any("latency") or Isolation.QUOTA in s.isolation
    return 100 if apart else 200


def _daemons(steps: _Steps, what: str, limits: Limits) -> None:
    """Add the lines that start MPS on each GPU with these limits, or set those of the daemon that serves it."""
    for s in steps.each_gpu():
        gpu = s.gpu
        if not s.mps_serves:
            start = Change(verb=Verb.MPS_START, gpu=gpu.index, instance=gpu.instance, limits=limits)
            steps.lines.append(steps.change(what, start))
            stop = Change(verb=Verb.MPS_STOP, gpu=gpu.index, instance=gpu.instance)
            steps.undo.append(steps.change("stop MPS; waits for its programs", stop))
            continue
        steps.lines.append(_set_limits(steps, s, "set the limits of the running MPS daemon", limits))
        if gpu.mps is None:
            steps.undo.append(Line("restore the limits with the line that `gpushare mps set` printed"))
        else:
            steps.undo.append(_set_limits(steps, s, "restore the limits", gpu.mps))


def _set_limits(steps: _Steps, s: Situation, what: str, limits: Limits) -> Line:
    """Return the line that sets exactly these limits of the GPU's daemon, except its priority."""
    exactly = replace(limits.explicit, priority=None)
    return steps.change(what, Change(verb=Verb.MPS_SET, gpu=s.gpu.index, instance=s.gpu.instance, limits=exactly))


def _mps(s: Situation) -> Recipe:
    case, steps, turns = s.case, _Steps(s), s.in_turns(Way.MPS)
    works, limits, processes = case.workloads, memory_limits(s), turns or case.processes
    share = None if processes is None or s.before_volta else _threads_for(s, processes)
    unequal = bool(case.any("weights")) and processes is not None and processes > 1 and share is not None
    if len(works) == 1 and not unequal:
        given = _limits(share, limits[0])
        _daemons(steps, "start MPS with limits for each process" if given != Limits() else "start MPS", given)
        memory, total = _mps_memory(s, works[0]), s.counts_of_all[0]
        if memory is None and turns is not None and works[0].memory is not None and not s.before_volta:
            # One less at a time, and each has a limit: not if that costs more than a tenth.
            least = -(-works[0].memory // MIB) * MIB + CLIENT_BYTES
            fewer = (s.under_mps.usable_bytes or 0) // least
            if fewer >= turns * 0.9:
                memory, processes = least, min(fewer, turns)
        farm = total is not None and total > 1 and case.same_user and not s.together and not s.servers
        if farm and s.gpu.instance is None:
            parallel = None if processes is None else processes * len(s.spread)
            at_once = (
                f", {parallel} at a time" if parallel is not None and total is not None and parallel < total else ""
            )
            what = f"{_which(total)}{at_once}; {{}} in CMD is the number of the copy"
            steps.run(what, works[0], copies=total, parallel=parallel, memory=memory)
        elif s.together and total is not None:
            what = f"one of its {counted(total, 'process')}; of MPI ranks: mpirun -np {total} gpushare run ..."
            steps.run(what, works[0], memory=memory)
        else:
            _copies(steps, works[0], total, memory=memory, wait=len(s.spread) > 1 or turns is not None)
    else:
        _daemons(steps, "start MPS", Limits())
        if unequal and processes is not None:
            for number, (size, what, count) in enumerate(_unequal(s, processes)):
                threads, work = _limits(size, None).threads_percent, works[number if len(works) > 1 else 0]
                steps.run(_which(count, what), work, threads_percent=threads, memory=_mps_memory(s, work))
        else:
            threads = _limits(share, None).threads_percent
            for work in works:
                what = _which(work.processes or 1, _label(work))
                steps.run(what, work, threads_percent=threads, memory=_mps_memory(s, work))
    steps.measure.append("total steps per second of all programs, with and without MPS")
    if not s.before_volta:
        steps.measure.append(
            "the same with --threads 100 and with half the cap: the best cap depends on the program; in two minutes: "
            f"gpushare bench --copies 1,{min(processes or 4, 8)} -- CMD"
        )
    return steps.made()


def _mps_memory(s: Situation, work: Workload) -> int | None:
    return None if s.before_volta else _job_memory(s, Way.MPS, work)


def _unequal(s: Situation, processes: int) -> list[tuple[float, str, int]]:
    """Return the unequal shares in percent: those that were given, else one gets twice the share of each other one."""
    if s.case.shares is not None and len(s.case.shares) == processes:
        return [(share, f"the program with {share:g} %", 1) for share in s.case.shares]
    if len(s.case.workloads) > 1:
        return [(100.0 / processes, _label(work) or "the program", work.processes or 1) for work in s.case.workloads]
    small = 100.0 / (processes + 1)
    larger = "the program with the larger share (any shares that add up to 100)"
    return [(2 * small, larger, 1), (small, "with a smaller share", processes - 1)]


def _mps_streams(s: Situation) -> Recipe:
    recipe = _mps(s)
    inside = Line("inside each program: put independent work on separate CUDA streams")
    return replace(recipe, lines=(inside, *recipe.lines))


def _mps_priority(s: Situation) -> Recipe:
    steps, works = _Steps(s), s.case.workloads
    yielding = [work for work in works if work.role is Role.OPPORTUNISTIC] or [works[-1]]
    count = sum(work.processes or 1 for work in yielding)
    _daemons(steps, "start MPS without a cap for production", Limits())
    for number, work in enumerate(works, 1):
        what, memory = _which(work.processes or 1, _label(work)), _job_memory(s, Way.MPS_PRIORITY, work)
        if work not in yielding:
            # Production has no cap: the other job gets what production does not need.
            steps.run(what, work, memory=memory, name=_service(work, number))
        else:
            threads = _limits(OPPORTUNISTIC_CAP / count, None).threads_percent
            steps.run(what, work, threads_percent=threads, memory=memory, priority=Priority.LOW)
    steps.measure += [
        "production's rate and p99, alone and with the other job, three alternating runs each",
        f"if production loses more than 3 %: restart the other job with a cap of 50 instead of {OPPORTUNISTIC_CAP}",
        "a cap is fixed when a program starts, so each try needs a restart",
        "which cap, or which slices: gpushare tune --ways slices,caps --production 'CMD' --opportunistic 'CMD'",
    ]
    return steps.made()


def _mps_static(s: Situation) -> Recipe:
    # A chunk has 8 SMs since Hopper, 4 before (NVIDIA MPS guide).
    newer = s.gpu.compute_capability is not None and s.gpu.compute_capability >= HOPPER
    processes = s.case.processes or 2
    chunks = max((s.gpu.multiprocessors or 0) // (8 if newer else 4) // processes, 1)
    add = f"echo 'sm_partition add {s.gpu.uuid or s.gpu.index} {chunks}' | nvidia-cuda-mps-control"
    return Recipe(
        lines=(
            Line("gpushare cannot start static partitions yet: use NVIDIA's commands"),
            Line("start the daemon in static mode", "nvidia-cuda-mps-control -d -S"),
            Line(_which(processes, f"add a partition of {chunks} chunks on GPU {s.gpu.index}"), add),
            Line("list the partitions with their ids", "echo lspart | nvidia-cuda-mps-control"),
            Line("start each program in its partition", "CUDA_MPS_SM_PARTITION=ID CMD"),
        ),
        undo=(Line("stop the daemon", "echo quit | nvidia-cuda-mps-control"),),
        measure=(
            "the rate of each program alone in its partition and with the others: only memory bandwidth is shared",
        ),
    )


# -- the whole GPU -----------------------------------------------------------------------------------


def _whole(s: Situation) -> Recipe:
    steps, works = _Steps(s), s.case.workloads
    if s.several and s.case.any("vms"):
        # A lock or an environment variable of the host has no effect in a virtual machine.
        steps.say("on the hypervisor: pass the whole GPU to one virtual machine at a time (PCI passthrough)")
    elif s.case.any("kubernetes"):
        steps.say("for pods: request nvidia.com/gpu: 1; without sharing, the device plugin gives each pod a whole GPU")
    elif s.together and s.case.any("nccl") is not False and s.placed_processes > 1:
        _one_job(steps)
    elif _may_pause(s):
        _paused(steps)
    else:
        for work, count in zip(works, s.counts_of_all, strict=True):
            if work.running:
                steps.say(_which(count, _label(work), "runs already, and stays as it is"))
            else:
                _alone(steps, work, count)
        if s.placed_processes > s.places:
            if not _by_room(s):
                steps.say("a program that gpushare did not start is not held back")
            steps.measure.append("the total time of all, one after the other: sharing has to beat that")
    return steps.made()


def _by_room(s: Situation) -> bool:
    """Return whether only memory keeps the programs from running together: then as many run at a time as fit."""
    asked = ("latency", "profiler", "bandwidth_qos", "bandwidth_bound", "containment", "vms", "nccl", "weights")
    known = all(work.memory is not None for work in s.case.workloads)
    apart = s.isolation - {Isolation.QUOTA} or not s.trusted or s.saturating is True
    return (
        known
        # What fits on a GPU of such a set is no reason for two jobs on it: each has its set for itself.
        and s.gpus_each == 1
        and s.plain.may_fit is False
        and not apart
        and not any(map(s.case.any, asked))
        and s.plain.one_fits is True
    )


def _alone(steps: _Steps, work: Workload, count: int | None) -> None:
    """Add the line of jobs that have a whole GPU each, one after the other where there are more of them."""
    s = steps.s
    by_room = s.several and _by_room(s)
    # One process alone needs no more than it needs.
    by_need = by_room or (s.placed_processes == 1 and work.memory is not None)
    memory = _job_memory(s, Way.WHOLE, work) if by_need else _whole_memory(s, work)
    more = s.placed_processes > s.places
    if not more:
        own = "a GPU of its own" if s.gpus_each == 1 else f"{s.gpus_each} GPUs of its own"
        how = f"each gets {own}" if s.placed_processes > 1 else None
    elif by_room:
        how = "as many at a time as fit"
    else:
        how = (
            "one at a time"
            if s.places == 1
            else f"{s.places} at a time"
            if s.gpus_each > 1
            else "one at a time on each GPU"
        )
        if s.pair:
            how = "first" if work.role is Role.PRODUCTION else "when production has ended"
    # What can be swapped is not limited by the driver itself.
    swap = by_room and not cannot_leave(s) and Isolation.QUOTA not in s.isolation
    way: dict[str, Any] = {"swap": "request"} if swap else {"slice": _SLICE if steps.outside_mps else None}
    if s.gpus_each > 1:
        # Jobs on several GPUs run outside MPS by themselves.
        way = {}
    steps.run(_which(count, _label(work), how), work, wait=True, memory=memory, **way)


def _one_job(steps: _Steps) -> None:
    """Add the line of processes that depend on each other: in a queue, the first would wait forever."""
    s, processes, gpus = steps.s, steps.s.placed_processes, len(steps.s.spread)
    count = min(processes, gpus)
    if gpus == 1:
        what = "the processes depend on each other and cannot run in turn: start it with one process"
    elif gpus < processes:
        what = f"one process per GPU: {processes} are requested, and {gpus} GPUs are free here"
    else:
        what = f"start it once: each of its {processes} processes gets a GPU"
    for work in s.case.workloads:
        own: dict[str, Any] = {} if count > 1 else {"slice": _SLICE if steps.outside_mps else None}
        steps.run(what, work, gpus=None if count == 1 else count, wait=True, memory=_whole_memory(s, work), **own)
    if gpus > 1:
        steps.measure.append("the rate with one process, and with one process per GPU")


def _may_pause(s: Situation) -> bool:
    """Return whether `gpushare run` can keep both on the GPU, one of them paused."""
    if not s.pair or s.case.same_user is False or s.before_volta or s.short_of_memory or s.places > 1:
        return False
    return s.gpus_each > 1 or not next(verdict for verdict in verdicts(s) if verdict.way is Way.MPS).refused


def _service(work: Workload, number: int) -> str:
    """Return the name of a production job."""
    return _name(work.name, number, "serve")


def _paused(steps: _Steps) -> None:
    """Add the lines that pause the other job while production works: in a queue, a service that stays would keep it out."""
    works = steps.s.case.workloads
    production = [work for work in works if work.role is Role.PRODUCTION]
    names = {id(work): _service(work, number) for number, work in enumerate(production, 1)}
    spared = next(iter(names.values()))
    for work in works:
        memory = _job_memory(steps.s, Way.WHOLE, work)
        if id(work) in names:
            steps.run(_which(work.processes or 1, _label(work)), work, production=names[id(work)], memory=memory)
        else:
            what = _which(work.processes or 1, _label(work), f"paused while {spared} works")
            steps.run(what, work, opportunistic=True, target=spared, yields="pause", memory=memory)
    steps.measure += [
        "production's rate and p99, alone and with the other job",
        "how much of the time the other job runs",
    ]


# -- time-slicing ------------------------------------------------------------------------------------

# The driver's own slice: given to a job, it says that the job runs outside MPS.
_SLICE: Final = "2ms"
_INTERACTIVE_SLICE: Final = "1ms"
# The first driver whose calls for slices are known.
_FIRST_SLICES: Final = 515


def _copies(steps: _Steps, work: Workload, count: int | None, **options: Any) -> None:
    """Add the lines of equal jobs: with names of their own where they do not end by themselves."""
    what, named = _which(count, _label(work)), steps.s.servers and steps.s.gpu.instance is None
    if not named:
        steps.run(what, work, **options)
        return
    name = _name(work.name, 1, "job")
    if count is not None and 1 < count <= _FEW:
        for number in range(1, count + 1):
            steps.run(f"{_label(work) or 'the program'}, number {number}", work, name=f"{name}-{number}", **options)
        return
    more = "" if count in {None, 1} else f"; the others are {name}-2 to {name}-{count}"
    steps.run(what + more, work, name=name if count == 1 else f"{name}-1", **options)


_FEW: Final = 4


def _timeslice(s: Situation) -> Recipe:
    steps = _Steps(s)
    for here in steps.each_gpu():
        if here.shut and here.may_be_root is not False and here.gpu.time_slice_settable is not False:
            made = Change(verb=Verb.TIMESLICE_SET, gpu=here.gpu.index, level=TimeSlice.DEFAULT)
            steps.lines.append(steps.change("admit several programs", made, root=True))
            steps.undo += _level_back(steps, here)
    if s.case.any("running"):
        see = ("status", "-g", s.gpu.selector)
        steps.lines.append(steps.command("running programs share the GPU as they do now; see", *see))
    for work, count in zip(s.case.workloads, s.counts_of_all, strict=True):
        if work.running:
            continue
        waits = len(s.spread) > 1 or s.in_turns(Way.TIMESLICE) is not None
        memory = _job_memory(s, Way.TIMESLICE, work)
        if not steps.outside_mps:
            steps.run(_which(count, _label(work)), work, swap="request", memory=memory, wait=waits)
            continue
        own = _INTERACTIVE_SLICE if s.case.pattern is Pattern.INTERACTIVE else _SLICE
        _copies(steps, work, count, slice=own, memory=memory, wait=waits and memory is not None)
    if s.case.workloads[0].memory is None and _job_memory(s, Way.TIMESLICE, s.case.workloads[0]) is not None:
        steps.say("the memory is divided equally, because what each needs is not known; with --memory SIZE it is that")
    steps.measure.append("p99 and rate of each program, alone and with the others")
    return steps.made()


def _level_back(steps: _Steps, s: Situation) -> list[Line]:
    """Return the lines that restore the compute mode that was in the way, and the level of the GPU."""
    index, level = str(s.gpu.index), s.gpu.time_slice
    back = [steps.command("restore the default", "timeslice", "reset", "-g", index, root=True)]
    if level is not None and level is not TimeSlice.DEFAULT:
        what = "then the level, which gpushare sets only in a compute mode that admits several programs"
        back.append(Line(what, f"{steps.root}nvidia-smi compute-policy -i {index} --set-timeslice {int(level)}"))
    return back


# Measured on an H200: production's slice has to be longer than its request, which a shorter one cuts up.
_PRODUCTION_SLICE: Final = "16ms"
# Shorter ones starve the others where production has little rest.
_OTHER_SLICE: Final = "500us"


def _slices(s: Situation) -> Recipe:
    """Return the lines for a production job with a long slice and others with short ones, or for unequal shares."""
    works, steps = s.case.workloads, _Steps(s)
    if not s.pair:
        # Of programs that always have work, each gets about the share of its slice.
        shares = s.case.shares or (2.0, 1.0)
        for number, share in enumerate(shares):
            work = works[number] if len(works) == len(shares) else works[0]
            what, memory = f"the program with {share:g} of {sum(shares):g}", _job_memory(s, Way.SLICES, work)
            steps.run(what, work, weight=share / min(shares), memory=memory)
        steps.measure.append("the share that each gets next to the others: the switch between them moves it a little")
        return steps.made()
    foreign = s.case.same_user is False
    whose = ", by its own user" if foreign else ""
    production = next(work for work in works if work.role is Role.PRODUCTION)
    number = 0
    for work in works:
        what, memory = _which(work.processes or 1, _label(work)), _job_memory(s, Way.SLICES, work)
        number += work.role is Role.PRODUCTION
        if work.running:
            time = _PRODUCTION_SLICE if work.role is Role.PRODUCTION else _OTHER_SLICE
            steps.say(
                f"the slice of {what}, which runs{whose}: gpushare timeslice set {time} PID (undo: timeslice reset PID)"
            )
        elif work.role is Role.PRODUCTION:
            steps.run(what + whose, work, production=_service(work, number), memory=memory)
        elif foreign or production.running:
            # Only root finds the jobs of other users by their names.
            steps.run(f"{what}{whose}, with a short slice", work, slice=_OTHER_SLICE, memory=memory)
        else:
            target = _service(production, 1)
            steps.run(what, work, opportunistic=True, target=target, yields="slices", memory=memory)
    steps.measure += [
        "production's p99 and rate, alone and with the others",
        "which slices, or which cap under MPS: gpushare tune --ways slices,caps --production 'CMD' --opportunistic 'CMD'",
    ]
    return steps.made()


# -- jobs that leave the GPU -------------------------------------------------------------------------

_LISTED: Final = "which jobs are out, and how long that took: gpushare swap list; which wait: gpushare jobs"
_NOTHING_CHANGED: Final = Line("nothing of the host is changed; a job that is out comes back by itself")


def _leaving(s: Situation, way: Way) -> Recipe:
    """Return the lines for jobs in turns, for a job that leaves for production, or for jobs that leave while they are idle."""
    steps, foreign = _Steps(s), s.case.same_user is False
    each = list(zip(s.case.workloads, s.counts_of_all, strict=True))
    own = ", each by its own user" if foreign else ""
    if way is Way.TURNS or not s.pair:
        how, swap = ("in turns", "turns") if way is Way.TURNS else ("out after 10 min without work", "idle=10m")
        for work, count in each:
            memory, names = _job_memory(s, way, work), range(1, (count or 1) + 1)
            name = _name(work.name, 1, "job")
            for number in list(names)[:_FEW]:
                titled = name if count in {None, 1} else f"{name}-{number}"
                more = (
                    f"; the others are {name}-{number + 1} to {name}-{count}" if number == _FEW < (count or 1) else ""
                )
                what = f"{_label(work) or 'the program'}{'' if count in {None, 1} else f', number {number}'}, {how}{own}{more}"
                steps.run(what, work, memory=memory, wait=way is Way.SWAP, swap=swap, name=titled)
        if way is Way.TURNS:
            steps.measure.append(
                "the total time of all, and of one after another (--wait instead of --swap turns): turns lose about a tenth"
            )
        else:
            steps.measure.append(
                "how long the first work after a pause takes: the job comes back first, and waits while the others work"
            )
        steps.measure.insert(0, _LISTED)
    else:
        _swapped_for_production(steps, each)
    return steps.made(undo=(_NOTHING_CHANGED,))


def _swapped_for_production(steps: _Steps, each: Sequence[tuple[Workload, int | None]]) -> None:
    """Add the lines of a job that leaves for production, which has the first right to the memory."""
    s, way = steps.s, Way.SWAP
    foreign = s.case.same_user is False
    cost = s.leaving_cost(way)
    seconds = "" if cost is None else f" (about {cost.out_seconds:.0f} s)"
    running, number = any(work.running for work, _ in each), 0
    whose = ", by its own user" if foreign else ""
    for work, count in each:
        memory = _job_memory(s, way, work)
        if work.running:
            steps.say(_which(count, _label(work), "runs already, and stays as it is"))
        elif work.role is Role.PRODUCTION:
            number += 1
            what = _which(count, _label(work), f"starts when the other job has left{seconds}{whose}")
            steps.run(what, work, production=_service(work, number), memory=memory, wait=True)
        else:
            what = _which(count, _label(work), f"out while production has the GPU{whose}")
            # --production is honoured only between jobs of one user, but anybody who waits ends a turn.
            # Production that runs already waits for nobody: only its growth tells.
            turns = foreign and not running
            how: dict[str, Any] = {"swap": "turns=60s"} if turns else {"opportunistic": True, "yields": "swap"}
            steps.run(what, work, memory=memory, name=None if not turns else _name(work.name, 1, "other"), **how)
    if not foreign or running:
        first = "" if running else "if production stays: start it first, without --wait and --memory. "
        steps.say(
            f"{first}The other job leaves in time for steady growth of production; a large allocation at once, before it "
            f"has left{seconds}, is refused"
        )
    steps.measure += [_LISTED, "how long production waits when it starts, and how much of the time the other job runs"]


# -- answers without a share of a GPU ----------------------------------------------------------------


def _streams(s: Situation) -> Recipe:
    steps = _Steps(s)
    steps.say(
        "in the program: put independent work on separate streams (cudaStream_t, torch.cuda.Stream); copy from pinned memory"
    )
    _alone(steps, s.case.workloads[0], 1)
    return steps.made(measure=("whether kernels overlap: nsys profile CMD",))


def _vgpu(s: Situation) -> Recipe:
    backed = s.gpu.mig_capable and (s.case.any("bandwidth_qos") or Isolation.FULL in s.isolation)
    kind = "a MIG-backed vGPU type" if backed else "a vGPU type with enough frame buffer for the work"
    return Recipe(
        lines=(
            Line("gpushare does not set up vGPU: install NVIDIA's vGPU host driver and a licence on the hypervisor"),
            Line(f"give each virtual machine {kind}"),
            Line("list the vGPU types that the GPU offers", f"nvidia-smi vgpu -s -i {s.gpu.index}"),
        ),
        measure=("the rate of the program in one virtual machine, alone and with the others",),
    )


def _measure(s: Situation) -> Recipe:
    steps, work, processes = _Steps(s), s.case.workloads[0], s.case.processes
    shut = s.shut and s.may_be_root is False
    ways = " --ways queue,mps" if shut else "" if s.case.same_user is not False else " --ways queue,timeslice,mig"
    turns = [number for number in map(s.in_turns, (Way.TIMESLICE, Way.MPS)) if number is not None]
    processes = min(turns, default=processes)
    copies = f"1,{processes}" if processes is not None and processes > 1 else "1,2,4"
    bench = f"gpushare bench -g {s.gpu.selector} --copies {copies}{ways} -- {work.command or 'CMD'}"
    steps.lines.append(Line("run it under each way in turn; the host is restored afterwards", bench))
    return steps.made(measure=("total runs per second, and p99; overlapping intervals mean no difference",))


def _fix(s: Situation) -> Recipe:
    steps, work = _Steps(s), s.case.workloads[0]
    if s.batched:
        steps.say(
            "run one engine with continuous batching instead of the copies: it batches the requests of all of them "
            "(vLLM, TensorRT-LLM, SGLang)"
        )
        memory = _whole_memory(s, work)
        steps.run(
            "one engine, with the memory of all copies",
            work,
            slice=_SLICE if steps.outside_mps else None,
            memory=memory,
        )
        measure = "requests per second and p99 at the load of all copies, with one engine and with the copies"
    elif s.short_of_memory and (s.in_phases or s.case.any("server")):
        steps.say(
            "vLLM: start each with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, on a trusted network, and put the idle one to"
            " sleep (POST /sleep, /wake_up)"
        )
        steps.say("or less memory for each: a shorter context, a quantized model, a smaller --gpu-memory-utilization")
        measure = "how long the first answer after a sleep takes"
    else:
        steps.say("use more loader workers, pinned memory, prefetching, larger batches, and a local disk for the data")
        steps.lines.append(steps.command("see whether the GPU waits", "status", "-g", s.gpu.selector))
        measure = "the rate with synthetic input: if it is much higher, the input is the bottleneck"
    return steps.made(measure=(measure,))


def _kubernetes(s: Situation, way: Way) -> Recipe:
    """Return the lines that write the share as configuration of the cluster: nothing is changed on the host."""
    steps, count = _Steps(s), max(2, min(s.case.processes or 4, 48))
    words, layout, what = ["--replicas", str(count)], "", f"{count} pods share each GPU"
    if way.outer is Way.MPS:
        layout, what = "mps: {}", "MPS, equal shares"
    elif way.outer is Way.MIG:
        slices, what = s.slices(way), "a resource for each MIG profile"
        inside = -(-count // max(len(s.shares(way)), 1)) if way is Way.MIG_TIMESLICE else 1
        words = ["--mig-replicas", str(inside)] if inside > 1 else []
        if s.free_instances(way) is None and slices is not None and slices.profiles:
            layout = f"mig: [{', '.join(map(str, slices.wish))}]"
    file = ["-f", "-"] if layout else []
    made = steps.command(
        f"write the configuration of the device plugin: {what}", "export", "k8s", *file, *words, "--to", "k8s"
    )
    if layout:
        made = replace(made, command=f"echo '{{version: 1, gpus: [{{match: all, {layout}}}]}}' | {made.command}")
    steps.lines.append(made)
    steps.say("it prints the kubectl commands that apply it; files are in ./k8s")
    return steps.made(measure=("p99 and rate of a pod, alone and with the others",))


# -- all ways ----------------------------------------------------------------------------------------


def recipe(situation: Situation, way: Way) -> Recipe:
    """Return the recipe of a way for a case on the GPUs that the situation is spread over."""
    if situation.case.any("kubernetes") and way.outer in _FOR_PODS:
        return _kubernetes(situation, way)
    made = _RECIPES[way](situation)
    if situation.case.any("containers") and way.outer in _FOR_PODS:
        say = Line(
            "for containers: gpushare run --container podman (or docker) ... -- IMAGE CMD, with the same options; or "
            "export the share as flags: gpushare export docker, or gpushare export compose"
        )
        made = replace(made, lines=(*made.lines, say))
    made = _around(situation, way, made)
    served = any(map(situation.case.any, ("replicas", "multi_model", "cuda_graphs")))
    if served and way is not Way.FIX:
        made = replace(made, measure=(*made.measure, *_one_server(situation)))
    return made


_FOR_PODS: Final = (Way.TIMESLICE, Way.MPS, Way.MIG)
_WITHOUT_MIG: Final = (Way.WHOLE, Way.TURNS, Way.SWAP, Way.STREAMS, Way.TIMESLICE, Way.SLICES, Way.MEASURE, *ALL_MPS)


def _around(situation: Situation, way: Way, made: Recipe) -> Recipe:
    """Return the recipe with what is in its way turned off first, MIG or MPS, and on again by the undo."""
    steps, before, after = _Steps(situation), list[Line](), list[Line]()
    for s in steps.each_gpu():
        if s.gpu.mig_enabled and way in _WITHOUT_MIG:
            before.append(_mig_off(steps, s, "turn MIG off"))
            after += _mig_as_it_was(steps, s)
            if s.gpu.mps_daemons:
                after.append(Line("and MPS in the instances: gpushare mps start -g UUID, with the new UUID of each"))
        if s.mps_in_the_way(way):
            gpu, now = s.gpu, s.gpu.mps
            if now is None:
                before.append(Line("stop the MPS daemon of the GPU the way it was started: see gpushare mps status"))
                after.append(Line("start the MPS daemon again the same way"))
            else:
                stop = Change(verb=Verb.MPS_STOP, gpu=gpu.index, instance=gpu.instance)
                before.append(steps.change("stop the running MPS daemon; waits for its programs", stop))
                words = ("mps", "start", "-g", gpu.selector, *now.options())
                after.append(steps.command("start MPS again with its current limits", *words))
    return replace(made, lines=(*before, *made.lines), undo=(*made.undo, *after))


def _one_server(s: Situation) -> list[str]:
    """Return what to compare with where an inference server may do the sharing itself."""
    if s.case.any("multi_model"):
        return ["instances of each model and dynamic batching in the server itself"]
    if not s.several or s.apart:
        return []
    kind = "one engine with continuous batching (vLLM, TensorRT-LLM, SGLang)"
    if s.case.any("replicas") and not s.case.any("cuda_graphs"):
        kind = "one server with several instances of the model and dynamic batching; for an LLM, " + kind
    return [f"several copies of one model, against {kind}"]


_RECIPES: Final[dict[Way, Callable[[Situation], Recipe]]] = {
    Way.WHOLE: _whole,
    Way.STREAMS: _streams,
    Way.TIMESLICE: _timeslice,
    Way.SLICES: _slices,
    Way.MPS: _mps,
    Way.MPS_PRIORITY: _mps_priority,
    Way.MPS_STATIC: _mps_static,
    Way.VGPU: _vgpu,
    Way.MPS_STREAMS: _mps_streams,
    Way.MEASURE: _measure,
    Way.FIX: _fix,
    **{way: lambda s, way=way: _mig(s, way) for way in (Way.MIG, Way.MIG_MPS, Way.MIG_TIMESLICE)},  # type: ignore[misc]
    **{way: lambda s, way=way: _leaving(s, way) for way in LEAVING},  # type: ignore[misc]
}
