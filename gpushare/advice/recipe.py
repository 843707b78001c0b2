"""The commands for a way on this host, with the numbers worked out, their undo, and what to measure. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpushare.advice.case import Isolation, Pattern, Role
from gpushare.advice.conditions import short_now
from gpushare.advice.rules import cannot_leave, verdicts
from gpushare.advice.situation import HOPPER, addable, equal_limit, limit_for
from gpushare.advice.table import Mechanism
from gpushare.advice.ways import ALL_MPS, Way
from gpushare.base.model import ComputeMode, Priority, TimeSlice
from gpushare.base.units import MIB
from gpushare.mig.wish import merged, wish_of
from gpushare.mps.limits import Limits

if TYPE_CHECKING:
    from gpushare.advice.case import Workload
    from gpushare.advice.situation import Situation
    from gpushare.mig.profile import GpuInstance, Profile
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
    command: str | None
    change: Change | None = None


def command(what: str, *words: str, root: str = "") -> Line:
    return Line(what, f"{root}gpushare {shlex.join(words)}")


def change(what: str, made: Change, root: str = "") -> Line:
    return replace(command(what, *made.words, root=root), change=made)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Lines in order, those that undo them, and what to measure afterwards."""

    lines: tuple[Line, ...]
    undo: tuple[Line, ...] = ()
    measure: tuple[str, ...] = ()
    # The lines need several shells: one command cannot carry them out.
    several_shells: bool = False


def _sudo(situation: Situation) -> str:
    return "" if situation.host.root else "sudo "


def _visible_to(situation: Situation) -> str:
    return f"CUDA_VISIBLE_DEVICES={situation.gpu.uuid or situation.gpu.index}"


def _program(workload: Workload) -> str:
    return workload.command or "CMD"


def _label(workload: Workload) -> str | None:
    """Return the name of a workload, else its role; None if it has neither."""
    return workload.name or (None if workload.role is None else workload.role.value)


def _which(processes: int | None, name: str | None = None, how: str | None = None) -> str:
    """Return which program a line starts, and how often."""
    label = "each program" if name is None and processes is None else name or "the program"
    times = "" if processes in {None, 1} else f", {processes} times"
    return f"{label}{times}" + (f", {how}" if how else "")


_MEASURE = (
    "the rate of each program in its instance and on the whole GPU: an instance has part of the SMs and bandwidth",
    "peak memory: a program cannot use more than its instance has",
)


def _mig_lines(situation: Situation, way: Way) -> Recipe:
    free = situation.free_instances(way)
    if free is not None:
        lines: list[Line] = []
        undo: tuple[Line, ...] = ()
        names = [one.profile.name for one in free]
    else:
        lines, undo, names = _layout(situation, way)
    gpu = f" -g {situation.gpu.index}" if len(situation.host.gpus) > 1 else ""
    lines += _grants(situation)
    for name, one, count in _runs(situation, way, names):
        run = f"gpushare run --mig {name or 'PROFILE'}{gpu} -- {_program(one)}"
        lines.append(Line(_which(count, _label(one)), run))
    return Recipe(lines=tuple(lines), undo=undo, measure=_MEASURE)


def _grants(situation: Situation) -> list[Line]:
    """Return the line on who may use an instance, where the parties are different users."""
    if situation.case.same_user is not False and situation.trusted:
        return []
    users = list(dict.fromkeys(one.user for one in situation.case.workloads if one.user is not None))
    grants = ", then ".join(f"gpushare mig grant NAME {shlex.quote(user)}" for user in users or ["USER"])
    what = (
        f"every local user may use every instance; to keep others out: gpushare mig name NAME INSTANCE, then {grants}"
    )
    return [Line(what, None)]


def _mig_as_it_was(situation: Situation, *lost: GpuInstance) -> list[Line]:
    """Return the lines that restore the current state of MIG: on, its instances at their placements, names and grants."""
    gpu, root, layout = str(situation.gpu.index), _sudo(situation), situation.gpu.layout
    if layout is None or not layout.instances:
        return [command("turn MIG on again", "mig", "enable", "-g", gpu, root=root)]
    before = map(str, wish_of(layout.instances))
    lines = [command("restore the current instances", "mig", "apply", "-g", gpu, *before, root=root)]
    for one in lost or layout.instances:
        if one.name:
            lines.append(command("restore the name", "mig", "name", one.name, str(one), "-g", gpu, root=root))
            lines += [command("restore the grant", "mig", "grant", one.name, user, root=root) for user in one.granted]
    return lines


def _off_first(situation: Situation) -> list[Line]:
    if not situation.gpu.mig_enabled:
        return []
    return [_mig_off(situation, "turn MIG off")]


def _mig_off(situation: Situation, what: str) -> Line:
    layout = situation.gpu.layout
    destroy = not situation.gpu.mig_enabled or layout is None or bool(layout.instances)
    made = Change(verb=Verb.MIG_DISABLE, gpu=situation.gpu.index, destroy=destroy)
    return change(what, made, _sudo(situation))


def _layout(situation: Situation, way: Way) -> tuple[list[Line], tuple[Line, ...], list[str]]:
    """Return the lines that create the instances, those that undo it, and the profile of each share."""
    gpu, root = ("-g", str(situation.gpu.index)), _sudo(situation)
    slices = situation.slices(way)
    on, layout = situation.gpu.mig_enabled, situation.gpu.layout
    off = _mig_off(situation, "turn MIG off again")
    if slices is None or not slices.profiles:
        # Not for --apply: the profiles are known only afterwards.
        lines = [] if on else [Line("turn MIG on", f"{root}gpushare mig enable {' '.join(gpu)}")]
        lines.append(
            Line("list the profiles that the driver offers, and choose", f"gpushare mig profiles {' '.join(gpu)}")
        )
        return lines, () if on else (off,), []
    names = [one.name for one in slices.profiles]
    apply = Change(verb=Verb.MIG_APPLY, gpu=situation.gpu.index, wish=slices.wish)
    if not on:
        return [change("turn MIG on and create the instances", apply, root)], (off,), names
    if layout is None or not layout.instances:
        undo = command("destroy the instances again", "mig", "destroy", *gpu, "all", root=root)
        return [change("create the instances", apply, root)], (undo,), names
    if addable(layout, slices.wish):
        line = change("create the instances next to the existing ones", replace(apply, verb=Verb.MIG_CREATE), root)
    else:
        # Those that stay are in the list too: what is not in it is destroyed.
        wish = merged((*wish_of(situation.kept), *slices.wish))
        line = change(
            "create the instances; idle ones that are not in the list are destroyed", replace(apply, wish=wish), root
        )
    return [line], tuple(_mig_as_it_was(situation)), names


def _runs(situation: Situation, way: Way, names: list[str]) -> list[tuple[str | None, Workload, int | None]]:
    ones = situation.case.workloads
    if len(ones) == 1 and len(set(names)) > 1:
        # Unequal shares: an instance of its own size for each process.
        return [(name, ones[0], names.count(name)) for name in dict.fromkeys(names)]
    if len(ones) == 1:
        return [(names[0] if names else None, ones[0], ones[0].processes)]
    found: list[tuple[str | None, Workload, int | None]] = []
    position = 0
    for one in ones:
        count = (one.processes or 1) if way is Way.MIG else (one.groups or 1)
        found.append((names[position] if names else None, one, count))
        position += count
    return found


def _mig_shared_lines(situation: Situation, way: Way) -> Recipe:
    """Return the lines for several processes per instance: each instance has a name and a shell."""
    free = situation.free_instances(way)
    if free is not None:
        return _in_existing(situation, way, free)
    gpu, root = f"-g {situation.gpu.index}", _sudo(situation)
    slices = situation.slices(way)
    on = [] if situation.gpu.mig_enabled else [Line("turn MIG on", f"{root}gpushare mig enable {gpu}")]
    if slices is None or not slices.profiles:
        return _mig_lines(situation, way)
    parties = _parties(situation, way)
    names = [name for name, _, _ in parties]
    layout = situation.gpu.layout
    room: list[Line] = []
    if layout is not None and layout.instances and not addable(layout, slices.wish):
        idle = [f"{situation.gpu.index}/{one.id}" for one in layout.instances if one not in situation.kept]
        room = [command("make room: destroy the idle instances", "mig", "destroy", *idle, root=root)]
    lines = [*on, *room, *_grants(situation), *_made(situation, parties, [one.name for one in slices.profiles])]
    for (name, one, inside), profile in zip(parties, slices.profiles, strict=True):
        lines.append(Line(f"in a shell for {name}", f'eval "$(gpushare mig env {name})"'))
        run = _program(one)
        if way is Way.MIG_MPS:
            words = [
                'gpushare mps start -g "$CUDA_VISIBLE_DEVICES"',
                *_limits_inside(situation, one, inside, profile).options(),
            ]
            lines.append(Line("start MPS in the instance", " ".join(words)))
            run = f'gpushare run -g "$CUDA_VISIBLE_DEVICES" -- {run}'
        lines.append(Line(_which(inside, _label(one)), run))
    if on:
        off = Change(verb=Verb.MIG_DISABLE, gpu=situation.gpu.index, destroy=True, yes=True)
        undo = change("undo all of it, after the programs have ended", off, root)
    else:
        undo = command("destroy the instances and stop their MPS daemons", "mig", "destroy", *names, "-y", root=root)
    return Recipe(
        lines=tuple(lines),
        undo=(undo, *_mig_as_it_was(situation)) if room else (undo,),
        measure=_MEASURE,
        several_shells=True,
    )


def _in_existing(situation: Situation, way: Way, free: list[GpuInstance]) -> Recipe:
    """Return the lines for several processes in each of the instances that exist: nothing needs root."""
    lines: list[Line] = []
    undo: list[Line] = []
    for (name, one, inside), instance in zip(_parties(situation, way), free, strict=True):
        uuid = str(instance.compute[0].uuid)
        run = f"CUDA_VISIBLE_DEVICES={uuid} {_program(one)}"
        if way is Way.MIG_MPS:
            limits = _limits_inside(situation, one, inside, instance.profile)
            index = situation.gpu.index
            start = Change(verb=Verb.MPS_START, gpu=index, instance=uuid, limits=limits)
            lines.append(change(f"start MPS in the idle instance {instance}", start))
            stop = Change(verb=Verb.MPS_STOP, gpu=index, instance=uuid)
            undo.append(change("stop MPS; waits for its programs", stop))
            run = f"gpushare run -g {uuid} -- {_program(one)}"
        lines.append(Line(f"{_which(inside, _label(one) or name)}, in {instance}", run))
    return Recipe(lines=tuple(lines), undo=tuple(undo), measure=_MEASURE)


def _limits_inside(situation: Situation, one: Workload, processes: int, profile: Profile) -> Limits:
    wanted = None if one.memory is None else limit_for(one.memory)
    room = None if profile.memory_bytes is None else equal_limit(profile.memory_bytes * 98 // 100, processes)
    fitting = wanted if wanted is not None and (room is None or wanted <= room) else room
    return _limits(_threads_for(situation, processes), fitting)


def _made(situation: Situation, parties: list[tuple[str, Workload, int]], profiles: list[str]) -> list[Line]:
    """Return the lines that create a named instance for each party; equal ones are created at once and numbered."""
    create, root = ("mig", "create", "-g", str(situation.gpu.index)), _sudo(situation)
    if len(situation.case.workloads) == 1 and len(parties) > 1:
        words = (f"{profiles[0]}*{len(parties)}", "--name", "group")
        return [command("create an instance for each group", *create, *words, root=root)]
    return [
        command(f"create the instance of {name}", *create, profile, "--name", name, root=root)
        for (name, _, _), profile in zip(parties, profiles, strict=True)
    ]


def _parties(situation: Situation, way: Way) -> list[tuple[str, Workload, int]]:
    ones = situation.case.workloads
    if len(ones) == 1:
        count = len(situation.shares(way))
        processes = ones[0].processes or 2 * count
        each = [processes // count + (number < processes % count) for number in range(count)]
        return [(f"group-{number}" if count > 1 else "group", ones[0], inside) for number, inside in enumerate(each, 1)]
    found: list[tuple[str, Workload, int]] = []
    for one in ones:
        parts = one.groups or 1
        processes = one.processes or 1
        for part in range(parts):
            name = _name(one.name, len(found) + 1) + (f"-{part + 1}" if parts > 1 else "")
            found.append((name, one, max(1, processes // parts + (part < processes % parts))))
    return found


def _name(text: str | None, number: int) -> str:
    """Return a name that needs no quoting."""
    clean = "".join(letter for letter in text or "" if letter.isascii() and (letter.isalnum() or letter in "-_"))
    return clean if clean[:1].isalpha() else f"group{number}"


# Measured on an H200: the highest cap under which production kept its rate and its p99, with low priority.
OPPORTUNISTIC_CAP: Final = 60


def _one_decimal(share: float) -> float:
    """Return a percentage rounded down to the one decimal that MPS keeps."""
    # 28.6 is a little less in binary.
    return int(share * 10 + 1e-6) / 10


def _limits(share: float | None, memory: int | None) -> Limits:
    threads = None if share is None or share >= 100 else _one_decimal(share)
    return Limits(threads_percent=threads, memory_limit_bytes=memory)


def _threads_for(situation: Situation, processes: int) -> float:
    """Return the cap of each of N clients: the measured one, else 100/n to keep each within its share, or 200/n.

    NVIDIA calls 100/(0.5n) "more optimal" than 100/n; on an H200 it was as good or better for every n tested.
    """
    if situation.cap is not None:
        return situation.cap
    (one, *more), total = situation.case.workloads, situation.gpu.multiprocessors
    if one.sms is not None and not more and total and one.sms * processes <= total:
        # As much as the others leave, which is at least what it needs.
        return 100.0 * (total - one.sms * (processes - 1)) / total
    return min(100.0, threads_together(situation) / processes)


def threads_together(situation: Situation) -> int:
    case = situation.case
    apart = case.any("containment") or case.any("latency") or Isolation.QUOTA in situation.isolation
    return 100 if apart else 200


def limits_sum(situation: Situation, way: Way) -> int | None:
    """Return the sum of the memory limits of all processes; None if one has no limit."""
    if way not in ALL_MPS or way is Way.MPS_STATIC:
        return None
    case = situation.case
    limited = [
        (limit or 0) * (count or 0)
        for one, limit, count in zip(
            case.workloads, memory_limits(situation), situation.counts_at_once(way), strict=True
        )
        if not (way is Way.MPS_PRIORITY and one.role is Role.PRODUCTION)
    ]
    return sum(limited) if limited and all(limited) else None


def memory_limits(situation: Situation) -> list[int | None]:
    """Return a limit per workload; None is no limit. All together fit the GPU, except that a quota is always a limit."""
    if situation.before_volta:
        return [None] * len(situation.case.workloads)
    ones, usable = situation.case.workloads, situation.under_mps.usable_bytes
    limits = [None if one.memory is None else limit_for(one.memory) for one in ones]
    counts = [count for count in situation.counts_at_once(Way.MPS) if count is not None]
    if usable is None or len(counts) < len(ones):
        return limits
    taken = sum((limit or 0) * count for limit, count in zip(limits, counts, strict=True))
    if taken > usable:
        quota = Isolation.QUOTA in situation.isolation
        return [one.memory // MIB * MIB if quota and one.memory is not None else None for one in ones]
    open_count = sum(count for limit, count in zip(limits, counts, strict=True) if limit is None)
    rest = equal_limit(usable - taken, open_count) if open_count else None
    return [rest if limit is None else limit for limit in limits]


def _daemon(situation: Situation, what: str, limits: Limits | None = None) -> Line:
    limits = limits or Limits()
    if not situation.mps_serves:
        gpu = situation.gpu
        return change(what, Change(verb=Verb.MPS_START, gpu=gpu.index, instance=gpu.instance, limits=limits))
    return _set_limits(situation, "set the limits of the running MPS daemon", limits)


def _set_limits(situation: Situation, what: str, limits: Limits) -> Line:
    """Return the line that sets exactly these limits of the GPU's daemon, except its priority."""
    exactly = replace(limits.explicit, priority=None)
    gpu = situation.gpu
    return change(what, Change(verb=Verb.MPS_SET, gpu=gpu.index, instance=gpu.instance, limits=exactly))


def _limits_back(situation: Situation) -> Line:
    now = situation.gpu.mps
    if now is None:
        return Line("restore the limits with the line that `gpushare mps set` printed", None)
    return _set_limits(situation, "restore the limits", now)


def _run(situation: Situation, what: str, one: Workload, limits: Limits | None = None) -> Line:
    words = ["gpushare run -g", situation.gpu.selector, *(limits or Limits()).options(), "--", _program(one)]
    return Line(what, " ".join(words))


def _in_turns(line: Line, processes: int | None, turns: int | None) -> Line:
    """Return the line that runs N programs at a time, and starts the next when one ends."""
    if turns is None:
        return line
    # {} because xargs needs a word to replace; a program may use it as the number of its run.
    started = f"seq {processes} | xargs -P {turns} -I {{}} {line.command}"
    return Line(f"{line.what}, {turns} at a time; {{}} is the number of the run", started)


def _back(situation: Situation) -> tuple[Line, ...]:
    if situation.mps_serves:
        return (_limits_back(situation),)
    gpu = situation.gpu
    stop = Change(verb=Verb.MPS_STOP, gpu=gpu.index, instance=gpu.instance)
    return (change("stop MPS; waits for its programs", stop),)


def _mps_lines(situation: Situation) -> Recipe:
    case = situation.case
    turns = situation.in_turns(Way.MPS)
    ones, limits, processes = case.workloads, memory_limits(situation), turns or case.processes
    share = None if processes is None or situation.before_volta else _threads_for(situation, processes)
    lines = _off_first(situation)
    if len(ones) == 1 and case.any("weights") and processes is not None and processes > 1 and share is not None:
        lines += _weighted(situation, processes, limits[0])
    elif len(ones) == 1:
        given = _limits(share, limits[0])
        what = "start MPS with limits for each process" if given != Limits() else "start MPS"
        lines.append(_daemon(situation, what, given))
        lines.append(_in_turns(_run(situation, _which(case.processes), ones[0]), case.processes, turns))
    else:
        lines.append(_daemon(situation, "start MPS"))
        for one, limit in zip(ones, limits, strict=True):
            lines.append(_run(situation, _which(one.processes or 1, _label(one)), one, _limits(share, limit)))
    return Recipe(
        lines=tuple(lines),
        undo=_back(situation),
        measure=(
            "total steps per second of all programs, with and without MPS",
            *(() if situation.before_volta else (_OTHER_CAPS,)),
        ),
    )


_OTHER_CAPS: Final = "the same with --threads 100 and with half the cap: the best cap depends on the program"


def _weighted(situation: Situation, processes: int, limit: int | None) -> list[Line]:
    """Return the lines for unequal shares: those that were given, else one gets twice the share of each other one."""
    given = situation.case.workloads[0].shares
    if given is not None and len(given) == processes:
        runs = [
            _run(situation, f"the program with {share:g} %", situation.case.workloads[0], _limits(share, limit))
            for share in given
        ]
        return [_daemon(situation, "start MPS"), *runs]
    one, small = situation.case.workloads[0], 100.0 / (processes + 1)
    larger = "the program with the larger share (any shares that add up to 100)"
    return [
        _daemon(situation, "start MPS"),
        _run(situation, larger, one, _limits(2 * small, limit)),
        _run(situation, _which(processes - 1, "with a smaller share"), one, _limits(small, limit)),
    ]


def _mps_streams_lines(situation: Situation) -> Recipe:
    found = _mps_lines(situation)
    inside = Line("inside each program: put independent work on separate CUDA streams", None)
    return Recipe(lines=(inside, *found.lines), undo=found.undo, measure=found.measure)


def _mps_priority_lines(situation: Situation) -> Recipe:
    ones = situation.case.workloads
    giving = [one for one in ones if one.role is Role.OPPORTUNISTIC] or [ones[-1]]
    count = sum(one.processes or 1 for one in giving)
    lines = [*_off_first(situation), _daemon(situation, "start MPS without a cap for production")]
    limits = dict(zip(map(id, ones), memory_limits(situation), strict=True))
    for one in ones:
        # Production has no limit: the other job gets what production does not need.
        given = replace(_limits(OPPORTUNISTIC_CAP / count, limits[id(one)]), priority=Priority.LOW)
        lines.append(
            _run(situation, _which(one.processes or 1, _label(one)), one, given if one in giving else Limits())
        )
    return Recipe(
        lines=tuple(lines),
        undo=_back(situation),
        measure=(
            "production's rate and p99, alone and with the other job, three alternating runs each",
            f"if production loses more than 3 %: restart the other job with a cap of 50 instead of {OPPORTUNISTIC_CAP}",
            "a cap is fixed when a program starts, so each try needs a restart",
        ),
    )


def _static_chunks(situation: Situation) -> int:
    """Return the chunks per process. A chunk has 8 SMs since Hopper, 4 before (NVIDIA MPS guide)."""
    newer = situation.gpu.compute_capability is not None and situation.gpu.compute_capability >= HOPPER
    chunks = (situation.gpu.multiprocessors or 0) // (8 if newer else 4)
    return max(chunks // (situation.case.processes or 2), 1)


def _mps_static_lines(situation: Situation) -> Recipe:
    index, chunks = situation.gpu.index, _static_chunks(situation)
    processes = situation.case.processes or 2
    return Recipe(
        lines=(
            Line("gpushare cannot start static partitions yet: use NVIDIA's commands", None),
            Line("start the daemon in static mode", "nvidia-cuda-mps-control -d -S"),
            Line(
                _which(processes, f"add a partition of {chunks} chunks on GPU {index}"),
                f"echo 'sm_partition add {situation.gpu.uuid or index} {chunks}' | nvidia-cuda-mps-control",
            ),
            Line("list the partitions with their ids", "echo lspart | nvidia-cuda-mps-control"),
            Line("start each program in its partition", "CUDA_MPS_SM_PARTITION=ID CMD"),
        ),
        undo=(Line("stop the daemon", "echo quit | nvidia-cuda-mps-control"),),
        measure=(
            "the rate of each program alone in its partition and with the others: only memory bandwidth is shared",
        ),
    )


def _without_mps(situation: Situation, way: Way, found: Recipe) -> Recipe:
    """Return the recipe with the MPS daemon of the GPU stopped first, where it is in the way; the undo starts it again."""
    if not situation.mps_in_the_way(way):
        return found
    gpu, now = ("-g", situation.gpu.selector), situation.gpu.mps
    if now is None:
        stop = Line("stop the MPS daemon of the GPU the way it was started: see gpushare mps status", None)
        start = Line("start the MPS daemon again the same way", None)
    else:
        made = Change(verb=Verb.MPS_STOP, gpu=situation.gpu.index, instance=situation.gpu.instance)
        stop = change("stop the running MPS daemon; waits for its programs", made)
        start = command("start MPS again with its current limits", "mps", "start", *gpu, *now.options())
    return replace(found, lines=(stop, *found.lines), undo=(*found.undo, start))


def _whole_lines(situation: Situation) -> Recipe:
    if situation.several and situation.case.any("vms"):
        # A lock or an environment variable of the host has no effect in a virtual machine.
        return Recipe(
            lines=(
                Line("on the hypervisor: pass the whole GPU to one virtual machine at a time (PCI passthrough)", None),
            )
        )
    if situation.together:
        return _one_each(situation)
    if situation.several:
        return _queue(situation)
    if short_now(situation, Way.WHOLE) and situation.gpu.mig_enabled is not True:
        return Recipe(
            lines=(_run_in(situation, "waits until there is room for it", situation.case.workloads[0], "--wait"),)
        )
    run = Line("no setup needed: run it", f"{_visible_to(situation)} {_program(situation.case.workloads[0])}")
    return Recipe(lines=(*_off_first(situation), run))


def _queue(situation: Situation) -> Recipe:
    gpus, processes = len(situation.gpus_to_have), situation.case.processes
    if gpus > 1 and processes is not None and (processes <= gpus or not _lacks_only_memory(situation)):
        return _queues(situation)
    case, lines = situation.case, _off_first(situation)
    if _may_pause(situation):
        return _paused(situation)
    if _lacks_only_memory(situation):
        return _by_room(situation)
    first, lock = _lock(situation)
    lines += [
        *first,
        *(
            Line(_turn(situation, one, count), f"{lock} {_program(one)}")
            for one, count in zip(case.workloads, case.counts, strict=True)
        ),
    ]
    return Recipe(lines=tuple(lines), measure=("the total time of all, one after the other: sharing has to beat that",))


def _lacks_only_memory(situation: Situation) -> bool:
    """Return whether each program fits, all together do not, and nothing else is known to keep them apart."""
    plain = situation.plain
    known = all(one.memory is not None for one in situation.case.workloads)
    alone = plain.largest_bytes is not None and plain.usable_bytes is not None
    alone = alone and (plain.largest_bytes or 0) <= (plain.usable_bytes or 0)
    return known and alone and plain.may_fit is False and situation.trusted and situation.gpu.mig_enabled is not True


def _by_room(situation: Situation) -> Recipe:
    """Return the lines that start each program when the GPU has room for it."""
    # What can be swapped is not limited by the driver itself.
    stays = cannot_leave(situation) or Isolation.QUOTA in situation.isolation
    how = ["--wait"] if stays else ["--wait", "--swap request"]
    lines = _off_first(situation)
    for one, count in zip(situation.case.workloads, situation.case.counts, strict=True):
        if one.running:
            lines.append(_as_it_is(one, count))
        else:
            lines.append(_run_in(situation, _which(count, _label(one), "as many at a time as fit"), one, *how))
    return Recipe(lines=tuple(lines), measure=("the total time of all",))


def _as_it_is(one: Workload, count: int | None) -> Line:
    return Line(_which(count, _label(one), "runs already, and stays as it is"), None)


def _run_in(situation: Situation, what: str, one: Workload, *how: str) -> Line:
    """Return the line that runs a program with a place in the ledger of memory."""
    # Others take the GPU where they harm least: one without production.
    anywhere = len(situation.gpus_to_have) > 1 and one.role is not Role.PRODUCTION
    gpu = "any" if anywhere else situation.gpu.selector
    # The limit counts the CUDA context, too.
    size = [] if one.memory is None else [f"--memory {-(-(one.memory + situation.plain.context_bytes) // MIB)}M"]
    return Line(what, " ".join(["gpushare run -g", gpu, *how, *size, "--", _program(one)]))


_LISTED: Final = "which jobs are out, and how long that took: gpushare swap list; which wait: gpushare status"
_BROUGHT_BACK: Final = Line(
    "nothing of the host is changed; a job that is out comes back by itself, or if its gpushare was killed, by",
    "gpushare swap in JOB",
)


def _each_user(situation: Situation) -> str:
    return ", each by its own user" if situation.case.same_user is False else ""


def _turns_lines(situation: Situation) -> Recipe:
    """Return the lines for jobs that take turns with the whole GPU."""
    lines = _off_first(situation)
    for one, count in zip(situation.case.workloads, situation.case.counts, strict=True):
        lines.append(
            _run_in(situation, _which(count, _label(one), f"in turns{_each_user(situation)}"), one, "--swap turns")
        )
    total = "the total time of all, and of one after another (--wait instead of --swap turns): turns lose about a tenth"
    return Recipe(lines=tuple(lines), undo=(_BROUGHT_BACK,), measure=(_LISTED, total))


def _swap_lines(situation: Situation) -> Recipe:
    """Return the lines for a job that leaves for production, or for jobs that leave while they are idle."""
    lines = _off_first(situation)
    ones = list(zip(situation.case.workloads, situation.case.counts, strict=True))
    if not situation.pair:
        for one, count in ones:
            lines.append(
                _run_in(
                    situation,
                    _which(count, _label(one), f"out after 10 min without work{_each_user(situation)}"),
                    one,
                    *_IDLE,
                )
            )
        wakes = "how long the first work after a pause takes: the job comes back first, and waits while the others work"
        return Recipe(lines=tuple(lines), undo=(_BROUGHT_BACK,), measure=(_LISTED, wakes))
    cost = situation.leaving_cost(Way.SWAP)
    leaving = "" if cost is None else f" (about {cost.out_seconds:.0f} s)"
    # No other user's word on what is production counts, but anybody who waits ends a turn.
    foreign = situation.case.same_user is False
    whose = ", by its own user" if foreign else ""
    number = 0
    running = any(one.running for one, _ in ones)
    for one, count in ones:
        if one.running:
            lines.append(_as_it_is(one, count))
        elif one.role is Role.PRODUCTION:
            number += 1
            role = f"--production {_service(one, number)}"
            how = f"starts when the other job has left{leaving}{whose}"
            lines.append(_run_in(situation, _which(count, _label(one), how), one, role, "--wait"))
        else:
            how = f"out while production has the GPU{whose}"
            # Production that runs already waits for nobody: only its growth tells.
            out = "--swap turns=60s" if foreign and not running else "--opportunistic --yield swap"
            lines.append(_run_in(situation, _which(count, _label(one), how), one, out))
    first = "" if running else "if production stays: start it first, without --wait and --memory. "
    grows = (
        f"{first}The other job leaves in time for steady growth of production; a large allocation at once, before it has "
        f"left{leaving}, is refused"
    )
    return Recipe(
        lines=(*lines, *(() if foreign and not running else (Line(grows, None),))),
        undo=(_BROUGHT_BACK,),
        measure=(_LISTED, "how long production waits when it starts, and how much of the time the other job runs"),
    )


_IDLE: Final = ("--wait", "--swap idle=10m")


def _paused(situation: Situation) -> Recipe:
    """Return the lines that pause the other job while production works: in a queue, a service that stays would keep it out."""
    ones = situation.case.workloads
    production = [one for one in ones if one.role is Role.PRODUCTION]
    names = {id(one): _service(one, number) for number, one in enumerate(production, 1)}
    spared, gpu = next(iter(names.values())), f"-g {situation.gpu.selector}"
    lines = _off_first(situation)
    for one in ones:
        role = f"--production {names[id(one)]}" if id(one) in names else f"--opportunistic --for {spared} --yield pause"
        how = None if id(one) in names else f"paused while {spared} works"
        lines.append(
            Line(_which(one.processes or 1, _label(one), how), f"gpushare run {gpu} {role} -- {_program(one)}")
        )
    return Recipe(
        lines=tuple(lines),
        measure=("production's rate and p99, alone and with the other job", "how much of the time the other job runs"),
    )


def _lock(situation: Situation) -> tuple[list[Line], str]:
    """Return the lines that create the lock of a GPU's queue, if needed, and the words that take it."""
    name = f"/tmp/gpu-{situation.gpu.selector}"  # noqa: S108 - users must share it
    if situation.case.same_user is True:
        return [], f"flock {name}.lock env {_visible_to(situation)}"
    # A directory, because another user's file in /tmp cannot be opened for writing (fs.protected_regular).
    warning = "" if situation.trusted else "; whoever holds it keeps the others waiting"
    made = Line(f"create a lock that every user can take{warning}", f"mkdir -p {name}.queue")
    return [made], f"flock {name}.queue env {_visible_to(situation)}"


def _queues(situation: Situation) -> Recipe:
    """Return the lines for a GPU of its own for each process, or a queue per GPU if there are more processes."""
    gpus, case = situation.gpus_to_have, situation.case
    units = [one for one, count in zip(case.workloads, case.counts, strict=True) for _ in range(count or 1)]
    lines: list[Line] = []
    for number, gpu in enumerate(gpus[: len(units)]):
        here = replace(situation, gpu=gpu)
        mine = units[number :: len(gpus)]
        first, lock = _lock(here) if len(mine) > 1 else ([], _visible_to(here))
        lines += first
        for one in dict.fromkeys(mine):
            turn = "one after the other" if len(mine) > 1 else None
            what = f"{_which(mine.count(one), _label(one), turn)}, on GPU {gpu.index}"
            lines.append(Line(what, f"{lock} {_program(one)}"))
    return Recipe(lines=tuple(lines), measure=("the rate of each program on its own GPU: sharing has to beat that",))


def _turn(situation: Situation, one: Workload, count: int | None) -> str:
    if not situation.pair:
        return _which(count, _label(one), "one after the other")
    first = one.role is Role.PRODUCTION
    return _which(count, _label(one), "first: waits for running programs" if first else "when production has ended")


def _may_pause(situation: Situation) -> bool:
    """Return whether `gpushare run` can keep both on the GPU, one of them paused."""
    if not situation.pair or situation.case.same_user is False or situation.before_volta:
        return False
    return not next(one for one in verdicts(situation) if one.way is Way.MPS).refused


def _one_each(situation: Situation) -> Recipe:
    """Return the lines for processes that depend on each other: in a queue, the first would wait forever."""
    processes, usable = situation.case.processes or 2, situation.gpus_to_have
    gpus = usable[:processes]
    devices = ",".join(str(one.uuid or one.index) for one in gpus)
    if len(gpus) == 1:
        what = "the processes depend on each other and cannot run in turn: start it with one process"
    elif len(gpus) < processes:
        what = f"one process per GPU: {processes} are requested, and {len(gpus)} GPUs are free here"
    else:
        what = f"start it once: each of its {processes} processes gets a GPU"
    lines = [Line(what, f"CUDA_VISIBLE_DEVICES={devices} {_program(one)}") for one in situation.case.workloads]
    return Recipe(
        lines=(*_off_first(situation), *lines),
        measure=("the rate with one process, and with one process per GPU",) if len(gpus) > 1 else (),
    )


def recipe(situation: Situation, way: Way) -> Recipe:
    found = _RECIPES[way](situation)
    found = _without_mps(situation, way, replace(found, lines=(*found.lines, *_elsewhere(situation, way))))
    served = any(map(situation.case.any, ("replicas", "multi_model", "cuda_graphs")))
    if served and way is not Way.FIX:
        found = replace(found, measure=(*found.measure, *_one_server(situation)))
    if any(line in found.lines for line in _off_first(situation)):
        inside = (
            [Line("and MPS in the instances: gpushare mps start -g UUID, with the new UUID of each", None)]
            if situation.gpu.mps_daemons
            else []
        )
        return replace(found, undo=(*found.undo, *_mig_as_it_was(situation), *inside))
    return found


def _one_server(situation: Situation) -> list[str]:
    """Return what to compare with where an inference server may do the sharing itself."""
    if situation.case.any("multi_model"):
        return ["instances of each model and dynamic batching in the server itself"]
    if not situation.several or situation.apart:
        return []
    kind = "one engine with continuous batching (vLLM, TensorRT-LLM, SGLang)"
    if situation.case.any("replicas") and not situation.case.any("cuda_graphs"):
        kind = "one server with several instances of the model and dynamic batching; for an LLM, " + kind
    return [f"several copies of one model, against {kind}"]


def _elsewhere(situation: Situation, way: Way) -> list[Line]:
    """Return what starts the programs where they run in containers."""
    if way.outer not in {Mechanism.TIMESLICE, Mechanism.MPS, Mechanism.MIG}:
        return []
    if situation.case.any("kubernetes"):
        return [Line("for pods, export the share as configuration: gpushare export k8s, or gpushare export dra", None)]
    if situation.case.any("containers"):
        return [
            Line(
                "for containers: gpushare run --container podman (or docker) -- IMAGE CMD; or export the share as flags: "
                "gpushare export docker, or gpushare export compose",
                None,
            )
        ]
    return []


def _timeslice(situation: Situation) -> Recipe:
    case, index = situation.case, situation.gpu.index
    level = _LEVELS.get(case.pattern) if case.pattern else None
    blocked = situation.gpu.compute_mode not in {None, ComputeMode.DEFAULT}
    lines = _off_first(situation)
    undo: tuple[Line, ...] = ()
    if situation.gpu.time_slice_settable is not False and (level or blocked) and situation.may_be_root is not False:
        what, wanted = level or ("admit several programs", TimeSlice.DEFAULT)
        lines.append(change(what, Change(verb=Verb.TIMESLICE_SET, gpu=index, level=wanted), _sudo(situation)))
        undo = _level_back(situation, blocked=blocked)
    if case.any("running"):
        see = f"gpushare status -g {situation.gpu.selector}"
        lines.append(Line("running programs share the GPU as they do now; see", see))
    turns = situation.in_turns(Way.TIMESLICE)
    visible = _visible_to(situation) if turns is None else f"env {_visible_to(situation)}"
    lines += [
        _in_turns(Line(_which(count, _label(one)), f"{visible} {_program(one)}"), case.processes, turns)
        for one, count in zip(case.workloads, case.counts, strict=True)
        if not one.running
    ]
    return Recipe(
        lines=tuple(lines),
        undo=undo,
        measure=(
            "p99 and rate of each program, alone and with the others",
            "the levels short and long: NVIDIA publishes no milliseconds for them",
        ),
    )


# Measured on an H200: production's slice has to be longer than its request, which a shorter one cuts up.
_PRODUCTION_SLICE: Final = "16ms"
# Shorter ones starve the others where production has little rest.
_OTHER_SLICE: Final = "500us"


def _slices(situation: Situation) -> Recipe:
    """Return the lines for a production job with a long slice and others with short ones, or for unequal shares."""
    ones, gpu = situation.case.workloads, f"-g {situation.gpu.selector}"
    if not situation.pair:
        # Of programs that always have work, each gets about the share of its slice.
        shares = ones[0].shares or (2.0, 1.0)
        runs = [
            Line(
                f"the program with {share:g} of {sum(shares):g}",
                f"gpushare run {gpu} --weight {share / min(shares):.3g} -- {_program(ones[0])}",
            )
            for share in shares
        ]
        measure = ("the share that each gets next to the others: the switch between them moves it a little",)
        return Recipe(lines=(*_off_first(situation), *runs), measure=measure)
    foreign, lines = situation.case.same_user is False, _off_first(situation)
    whose = ", by its own user" if foreign else ""
    production = next(one for one in ones if one.role is Role.PRODUCTION)
    # Only root finds the jobs of other users by their names.
    by_pid = foreign or bool(production.running)
    undo: tuple[Line, ...] = ()
    number = 0
    for one in ones:
        what = _which(one.processes or 1, _label(one))
        number += one.role is Role.PRODUCTION
        if one.running:
            time = _PRODUCTION_SLICE if one.role is Role.PRODUCTION else _OTHER_SLICE
            lines.append(Line(f"the slice of {what}, which runs{whose}", f"gpushare timeslice set {time} PID"))
            undo = (Line("restore the slice of each", "gpushare timeslice reset PID"),)
            continue
        if one.role is Role.PRODUCTION:
            role, said = f"--production {_service(one, number)}", whose
        else:
            role = f"--opportunistic --for {'PID' if by_pid else _service(production, 1)} --yield slices"
            said = f"{whose}; PID is that of {_label(production)}" if by_pid else whose
        lines.append(Line(f"{what}{said}", f"gpushare run {gpu} {role} -- {_program(one)}"))
    return Recipe(
        lines=tuple(lines),
        undo=undo,
        measure=(
            "production's p99 and rate, alone and with the others",
            "which slices, or which cap under MPS: gpushare tune --ways slices,caps --production 'CMD' --opportunistic 'CMD'",
        ),
    )


def _service(one: Workload, number: int) -> str:
    """Return the name of a production job."""
    return _name(one.name, number) if one.name else f"serve{number if number > 1 else ''}"


def _level_back(situation: Situation, *, blocked: bool) -> tuple[Line, ...]:
    """Return the lines that restore the level, and the compute mode where that was in the way."""
    index, root = str(situation.gpu.index), _sudo(situation)
    level = situation.gpu.time_slice
    level = None if level is TimeSlice.DEFAULT else level
    if level is not None and not blocked:
        made = Change(verb=Verb.TIMESLICE_SET, gpu=situation.gpu.index, level=level)
        return (change("restore the level", made, root),)
    back = [command("restore the default", "timeslice", "reset", "-g", index, root=root)]
    if level is not None:
        what = "then the level, which gpushare sets only in a compute mode that admits several programs"
        back.append(Line(what, f"{root}nvidia-smi compute-policy -i {index} --set-timeslice {int(level)}"))
    return tuple(back)


_LEVELS: Final = {
    Pattern.INTERACTIVE: ("short slices: lower latency", TimeSlice.SHORT),
    Pattern.STEADY: ("long slices: fewer context switches", TimeSlice.LONG),
}


def _streams(situation: Situation) -> Recipe:
    one = situation.case.workloads[0]
    return Recipe(
        lines=(
            *_off_first(situation),
            Line(
                "in the program: put independent work on separate streams (cudaStream_t, torch.cuda.Stream); copy from pinned memory",
                None,
            ),
            Line("run it", f"{_visible_to(situation)} {_program(one)}"),
        ),
        undo=(),
        measure=("whether kernels overlap: nsys profile CMD",),
    )


def _vgpu(situation: Situation) -> Recipe:
    backed = situation.gpu.mig_capable and (
        situation.case.any("bandwidth_qos") or Isolation.FULL in situation.isolation
    )
    kind = "a MIG-backed vGPU type" if backed else "a vGPU type with enough frame buffer for the work"
    return Recipe(
        lines=(
            Line(
                "gpushare does not set up vGPU: install NVIDIA's vGPU host driver and a licence on the hypervisor", None
            ),
            Line(f"give each virtual machine {kind}", None),
            Line("list the vGPU types that the GPU offers", f"nvidia-smi vgpu -s -i {situation.gpu.index}"),
        ),
        undo=(),
        measure=("the rate of the program in one virtual machine, alone and with the others",),
    )


def _measure(situation: Situation) -> Recipe:
    one, processes = situation.case.workloads[0], situation.case.processes
    shut = situation.gpu.compute_mode not in {None, ComputeMode.DEFAULT} and situation.may_be_root is False
    ways = (
        " --ways queue,mps" if shut else "" if situation.case.same_user is not False else " --ways queue,timeslice,mig"
    )
    turns = [one for one in map(situation.in_turns, (Way.TIMESLICE, Way.MPS)) if one is not None]
    processes = min(turns, default=processes)
    copies = f"1,{processes}" if processes is not None and processes > 1 else "1,2,4"
    return Recipe(
        lines=(
            *_off_first(situation),
            Line(
                "run it under each way in turn; the host is restored afterwards",
                f"gpushare bench -g {situation.gpu.selector} --copies {copies}{ways} -- {_program(one)}",
            ),
        ),
        measure=("total runs per second, and p99; overlapping intervals mean no difference",),
    )


def _fix(situation: Situation) -> Recipe:
    if situation.batched:
        one = situation.case.workloads[0]
        engine = "run one engine with continuous batching instead of the copies: it batches the requests of all of them"
        return Recipe(
            lines=(
                Line(f"{engine} (vLLM, TensorRT-LLM, SGLang)", None),
                Line("one engine, with the memory of all copies", f"{_visible_to(situation)} {_program(one)}"),
            ),
            measure=("requests per second and p99 at the load of all copies, with one engine and with the copies",),
        )
    return Recipe(
        lines=(
            Line(
                "use more loader workers, pinned memory, prefetching, larger batches, and a local disk for the data",
                None,
            ),
            Line("see whether the GPU waits", f"gpushare status -g {situation.gpu.selector} --watch 1"),
        ),
        undo=(),
        measure=("the rate with synthetic input: if it is much higher, the input is the bottleneck",),
    )


_RECIPES: Final[dict[Way, Callable[[Situation], Recipe]]] = {
    Way.WHOLE: _whole_lines,
    Way.TURNS: _turns_lines,
    Way.SWAP: _swap_lines,
    Way.STREAMS: _streams,
    Way.TIMESLICE: _timeslice,
    Way.SLICES: _slices,
    Way.MPS: _mps_lines,
    Way.MPS_PRIORITY: _mps_priority_lines,
    Way.MPS_STATIC: _mps_static_lines,
    Way.MIG: lambda situation: _mig_lines(situation, Way.MIG),
    Way.VGPU: _vgpu,
    Way.MIG_MPS: lambda situation: _mig_shared_lines(situation, Way.MIG_MPS),
    Way.MIG_TIMESLICE: lambda situation: _mig_shared_lines(situation, Way.MIG_TIMESLICE),
    Way.MPS_STREAMS: _mps_streams_lines,
    Way.MEASURE: _measure,
    Way.FIX: _fix,
}
