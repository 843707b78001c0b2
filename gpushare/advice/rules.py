"""The rules of the advisor: vetoes, requirements, conditions, preferences, and the verdicts they lead to. Pure.

Each row names its source: a document or a measurement. Users see the reasons, but not the weights, which order the ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from functools import partial
from typing import Final

from gpushare.advice.case import Isolation, Pattern, Role, all_of, any_of, negated
from gpushare.advice.compare import no_static_partitions
from gpushare.advice.situation import Situation, instance_title, limit_for
from gpushare.advice.table import Cell, Mechanism
from gpushare.advice.ways import ALL_MIG, ALL_MPS, CONCURRENT, LEAVING, SHARING, Way
from gpushare.base.model import ComputeMode
from gpushare.base.units import format_bytes
from gpushare.base.values import dataclass

When = Callable[[Situation], "bool | None"]


def said(*properties: str) -> When:
    return lambda situation: any_of(situation.case.any(one) for one in properties)


def denied(name: str) -> When:
    return lambda situation: negated(situation.case.any(name))


class Kind(str, Enum):
    """The effect of a rule on a way."""

    VETO = "veto"
    CONDITION = "condition"
    FOR = "for"
    AGAINST = "against"


@dataclass(frozen=True)
class Rule:
    """One rule. For preferences, ``ways`` has a weight for each way.

    ``when`` tells whether the rule applies, ``when_way`` where that differs between ways. If they return None
    (unknown), ``unknown`` becomes a condition, or the rule does not apply. ``words`` fills the braces of ``text``.
    """

    id: str
    ways: tuple[Way, ...] | Mapping[Way, int]
    text: str
    source: str
    when: When | None = None
    when_way: Callable[[Situation, Way], bool | None] | None = None
    unknown: str | None = None
    words: Callable[[Situation, Way], dict[str, object]] | None = None
    kind: Kind = field(kw_only=True)

    def reasons(self, situation: Situation) -> Iterator[tuple[Way, Reason]]:
        common = None if self.when is None else self.when(situation)
        if self.when_way is None and not common and (common is False or self.unknown is None):
            return
        for way in self.ways:
            applies = common if self.when_way is None else self.when_way(situation, way)
            if applies:
                text = self.text if self.words is None else self.text.format(**self.words(situation, way))
                weight = self.ways[way] if isinstance(self.ways, Mapping) else 0
                yield way, Reason(rule=self.id, kind=self.kind, text=text, source=self.source, weight=weight)
            elif applies is None and self.unknown is not None:
                text = self.unknown
                yield way, Reason(rule=self.id, kind=Kind.CONDITION, text=text, source=self.source, open=True)


@dataclass(frozen=True, kw_only=True)
class Reason:
    """What one rule says about one way.

    ``open`` marks an unanswered question. ``row`` is the row of the table that the reason comes from, ``contradiction``
    the disagreement of its sources.
    """

    rule: str
    kind: Kind
    text: str
    source: str
    weight: int = 0
    open: bool = False
    row: str | None = None
    contradiction: str | None = None


@dataclass(frozen=True)
class Requirement:
    """The level of a row that a way needs: ``wanted`` to fit, ``floor`` to fit with a condition.

    ``unknown`` is the condition of the ways below the floor while it is not known whether the level is needed.
    """

    id: str
    row: str
    wanted: str
    floor: str
    # As part of a sentence: "a fault in one process must not end the others".
    text: str
    when: Callable[[Situation], bool | None]
    unknown: str | None = None
    ways: tuple[Way, ...] = tuple(Way)
    # It also applies between processes of one instance, where a weak inner mechanism is a condition.
    inside: bool = True

    def reasons(self, situation: Situation) -> Iterator[tuple[Way, Reason]]:
        applies = self.when(situation)
        if applies is False or (applies is None and self.unknown is None):
            return
        for way in self.ways:
            yield from ((way, reason) for reason in self._about(situation, way, asked=applies is None))

    def _about(self, situation: Situation, way: Way, *, asked: bool) -> Iterable[Reason]:
        if way.outer is None:
            return
        cell = situation.table.cell(way.outer, self.row, situation.host.driver)
        best = situation.table.level(way.outer, self.row, situation.host.driver, option=way.table_option)
        plainly = best if way in {Way.MPS_STATIC, Way.SLICES} else cell.level
        enough = situation.table.at_least(self.row, plainly, self.wanted)
        if asked:
            if not enough and not situation.table.at_least(self.row, best, self.floor):
                yield self._reason(cell, Kind.CONDITION, self.unknown or "", asked=True)
        elif not enough:
            yield self._short(situation, way, cell, best)
        elif way.inner is not None and way.outer is Mechanism.MIG and self.inside:
            yield from self._between(situation, way)

    def _short(self, situation: Situation, way: Way, cell: Cell, best: str) -> Reason:
        """Return the reason for a cell below the wanted level: a condition if an option or the floor helps."""
        table = situation.table
        if way is Way.VGPU and table.at_least(self.row, best, self.wanted):
            if situation.gpu.mig_capable is not False:
                return self._reason(cell, Kind.CONDITION, f"{self.text}: only with MIG-backed vGPU")
            hard = self.id == "bandwidth-qos" and situation.case.any("bandwidth_qos")
            if not hard:
                # A virtual machine is isolated by more than its SMs.
                text = f"{self.text}: a vGPU without MIG has memory of its own, but shares the SMs in time"
                return self._reason(cell, Kind.CONDITION, text)
            return self._reason(cell, Kind.VETO, f"{self.text}: that needs MIG-backed vGPU, and this GPU has no MIG")
        says = f"{self.text} ({table.titles[cell.mechanism]}: {cell.today})"
        if table.at_least(self.row, best, self.floor):
            return self._reason(cell, Kind.CONDITION, says)
        return self._reason(cell, Kind.VETO, says if best == cell.level else f"{says}, at best {best}")

    def _between(self, situation: Situation, way: Way) -> Iterable[Reason]:
        """Yield a condition if this is true only between instances."""
        if way.inner is None or situation.grouped:
            return
        level = situation.table.level(way.inner, self.row, situation.host.driver)
        if not situation.table.at_least(self.row, level, self.wanted):
            cell = situation.table.cell(way.inner, self.row, situation.host.driver)
            yield self._reason(cell, Kind.CONDITION, f"{self.text}: true between instances, not within one")

    def _reason(self, cell: Cell, kind: Kind, text: str, *, asked: bool = False) -> Reason:
        source = "; ".join(source.title for source in cell.sources[:2])
        return Reason(
            rule=self.id,
            kind=kind,
            text=text,
            source=source,
            open=asked,
            row=self.row,
            contradiction=cell.contradiction if kind is Kind.CONDITION and not asked else None,
        )


# -- vetoes: the host, the GPU, the numbers ----------------------------------------------------------

_MIG_GUIDE: Final = "NVIDIA MIG User Guide"
_MPS_GUIDE: Final = "NVIDIA MPS guide"
_veto = partial(Rule, kind=Kind.VETO)
_for = partial(Rule, kind=Kind.FOR)
_against = partial(Rule, kind=Kind.AGAINST)
_condition = partial(Rule, kind=Kind.CONDITION)


def _no_static(s: Situation) -> bool | None:
    if no_static_partitions(s.host, s.gpu):
        return True
    return None if None in {s.gpu.compute_capability, s.host.driver_major} else False


def _not_root(s: Situation) -> bool | None:
    return negated(s.may_be_root)


def _needs_change(s: Situation, way: Way) -> bool:
    """Return whether instances have to be created: MIG is off, or the idle ones do not fit."""
    return not s.gpu.mig_enabled or s.free_instances(way) is None


def _mig_stays(s: Situation, way: Way) -> bool:
    """Return whether MIG is on and cannot be turned off: without root, or with instances that must stay."""
    # Instances are never destroyed only in order to measure.
    instances = s.gpu.layout is not None and bool(s.gpu.layout.instances)
    return bool(s.gpu.mig_enabled) and (s.may_be_root is False or bool(s.kept) or (way is Way.MEASURE and instances))


def _why_mig_stays(s: Situation) -> str:
    if s.kept:
        may = s.may_be_root is not False and not all(one.busy for one in s.kept)
        idle = " (--destroy: idle ones may go)" if may else ""
        return f"its instances stay: {', '.join(map(instance_title, s.kept))}{idle}"
    return "only root can turn it off" if s.may_be_root is False else "its instances stay"


def _exclusive(s: Situation) -> bool:
    """Return whether only one process can use the GPU, and nobody here can change that."""
    shut = s.gpu.compute_mode not in {None, ComputeMode.DEFAULT}
    return s.several and shut and (s.may_be_root is False or s.gpu.instance is not None)


def _too_many(s: Situation) -> bool | None:
    if s.mps_clients is None or s.case.processes is None:
        return None
    return s.case.processes > s.mps_clients and s.in_turns(Way.MPS) is None


# The driver's calls for slices are the same from this branch on.
_FIRST_SLICES: Final = 515


def _needs_limits_before_volta(s: Situation, way: Way) -> bool:
    limits = Isolation.QUOTA in s.isolation or bool(s.case.any("containment")) or bool(s.case.any("weights"))
    return bool(s.before_volta) and (limits or way in {Way.MPS_PRIORITY, Way.MPS_STATIC})


def _memory_words(s: Situation, way: Way) -> dict[str, object]:
    found = s.budget_of(way)
    largest = found.largest_bytes or 0
    return {
        "total": format_bytes(found.total_bytes),
        "needed": format_bytes(found.needed_bytes),
        "short": format_bytes(-(found.left_bytes or 0)),
        "most": found.most or 0,
        "largest": format_bytes(largest),
        "over": format_bytes(max(largest - (found.usable_bytes or 0), 0)),
    }


def _why_no_slices(s: Situation, way: Way) -> str | None:
    found = None if s.free_instances(way) is not None else s.slices(way)
    return None if found is None else found.why_not


def _no_graphics(s: Situation) -> bool | None:
    wanted = s.case.any("graphics")
    offers = s.gpu.layout is not None and any(profile.graphics for profile in s.gpu.layout.profiles)
    return False if offers else wanted


def _nearest_sizes(s: Situation, way: Way) -> str:
    """Return the shares that the chosen profiles come to, if they were chosen by the shares."""
    found, shares = s.slices(way), s.shares(way)
    if found is None or not found.profiles or not all(share.percent for share in shares):
        return "choose the profiles nearest to the shares (gpushare mig profiles)"
    total = sum(one.slices for one in found.profiles)
    real = ":".join(f"{100 * one.slices / total:.0f}" for one in found.profiles)
    asked = ":".join(f"{share.percent:g}" for share in shares)
    return f"{', '.join(one.name for one in found.profiles)} are {real}, asked for are {asked}"


def _in_the_way(s: Situation) -> bool | None:
    """Return whether running programs prevent partitioning."""
    if s.gpu.mig_enabled:
        return False
    return None if s.gpu.processes is None else s.gpu.processes > 0


def _occupied(s: Situation) -> bool:
    """Return whether programs stay on a GPU without MIG. Those that are there stay unless the user says otherwise."""
    said = s.case.any("occupied")
    stays = said if said is not None else bool(s.gpu.processes)
    return bool(stays) and bool(s.gpu.mig_capable) and not s.gpu.mig_enabled


def _free_now(s: Situation) -> int:
    return max((s.plain.usable_bytes or 0) - (s.gpu.memory_used_bytes or 0), 0)


def short_now(s: Situation, way: Way) -> bool:
    """Return whether the programs that are on the GPU leave too little memory."""
    found = s.budget_of(way)
    needed = found.largest_bytes if way in {Way.WHOLE, *LEAVING} else found.needed_bytes
    # With occupied: no, they are the ones that the answer is for, or can be ended.
    others = bool(s.gpu.processes) and not s.case.any("running") and s.case.any("occupied") is not False
    return others and s.gpu.memory_used_bytes is not None and needed is not None and needed > _free_now(s)


# -- jobs that leave the GPU ---------------------------------------------------------------------------


def _waits_for_answers(s: Situation, way: Way) -> bool | None:
    """Return whether a job that would leave has a latency target: of a pair it is production's, which stays."""
    return False if way is Way.SWAP and s.pair else any_of(one.latency for one, _ in s.leavers(way))


def _host_too_small(s: Situation, way: Way) -> bool | None:
    cost = s.leaving_cost(way) if s.fit_together is False else None
    if cost is None:
        return False
    free = s.host.host_memory_bytes
    return None if free is None else cost.host_bytes > free


def _host_words(s: Situation, way: Way) -> dict[str, object]:
    cost = s.leaving_cost(way)
    needed = "-" if cost is None else format_bytes(cost.host_bytes)
    return {"needed": needed, "free": format_bytes(s.host.host_memory_bytes)}


def _alone_too_large(s: Situation) -> bool:
    """Return whether the production jobs of a pair do not fit even without the other."""
    ones = [one for one in s.case.workloads if one.role is Role.PRODUCTION and one.memory is not None]
    needed = sum(((one.memory or 0) + s.plain.least_context_bytes) * (one.processes or 1) for one in ones)
    return s.pair and s.plain.usable_bytes is not None and needed > s.plain.usable_bytes


def _short_of_memory(s: Situation) -> bool:
    """Return whether not all fit at the same time, so that jobs have to leave or to wait."""
    return s.several and s.fit_together is False


def _own_time(s: Situation) -> bool:
    """Return whether several people have long work, and nobody said that its order does not matter."""
    long = s.case.pattern is Pattern.STEADY and s.case.same_user is False
    return _short_of_memory(s) and not s.pair and long and s.case.any("progress") is not False


def _total_counts(s: Situation) -> bool:
    """Return whether nobody waits for a part of the work: then only the total time counts."""
    one_user = s.case.same_user is not False and s.case.any("progress") is None
    waits = s.case.any("progress") or s.case.pattern is Pattern.INTERACTIVE or s.pair
    in_waves = s.in_turns(Way.MPS) is not None
    return (
        _short_of_memory(s) and not (waits or s.together or in_waves) and (one_user or s.case.any("progress") is False)
    )


def _leaving_words(s: Situation, way: Way) -> dict[str, object]:
    cost = s.leaving_cost(way)
    return {"cost": "" if cost is None else cost.sentence()}


def _cost_known(s: Situation, way: Way) -> bool:
    return _short_of_memory(s) and s.leaving_cost(way) is not None


def _count_here(s: Situation) -> str:
    if not s.gpu.processes:
        return "programs are"
    return "1 process is" if s.gpu.processes == 1 else f"{s.gpu.processes} processes are"


_SWAP_DOCS: Final = "cuCheckpointProcess (CUDA driver API); NVIDIA/cuda-checkpoint; docs/memory.md"
_SWAP_MEASURED: Final = "measured on an H200 (driver 580.159.04, 2026-11-22; docs/measurements.md, Memory)"
_FIRST_CHECKPOINT: Final = 570
# Why a job cannot leave the GPU at all: id, text, source, when, and the condition where that is unknown.
# fmt: off
_STAYS: Final[tuple[tuple[str, str, str, When, str | None], ...]] = (
    ("leaving-driver", "only driver 570 or later can copy a job out of the GPU and back", "cuCheckpointProcess (CUDA 12.8)",
        lambda s: None if s.host.driver_major is None else s.host.driver_major < _FIRST_CHECKPOINT,
        "only with driver 570 or later; the version of this one is unknown"),
    ("leaving-instance", "the driver does not copy jobs on a MIG instance", "NVIDIA/cuda-checkpoint; gpushare swap",
        lambda s: s.gpu.instance is not None, None),
    ("leaving-peers", "jobs with NCCL or on several GPUs cannot leave", "NVIDIA/cuda-checkpoint; gpunap",
        said("nccl", "p2p"), None),
    ("leaving-ipc", "jobs that share GPU memory through CUDA IPC cannot leave", "NVIDIA/cuda-checkpoint",
        said("ipc"), None),
    ("leaving-managed", "jobs with managed memory (UVM) cannot leave", "NVIDIA/cuda-checkpoint",
        said("managed_memory"), None),
    ("leaving-together", "the processes depend on each other: one that is out holds up all of them",
        "MPI and NCCL: a collective operation waits for every rank", lambda s: s.together, None),
    ("leaving-vms", "a virtual machine has a driver of its own: its programs cannot be moved from here",
        "NVIDIA table 2022", said("vms"), None),
    ("leaving-containers", "gpushare does not move jobs in containers", "gpushare run --container",
        said("containers", "kubernetes"), None),
)
# fmt: on

# fmt: off
VETOES: Final = (
    # -- MIG ---------------------------------------------------------------------------------------
    _veto("mig-not-there", ALL_MIG,
        "{name} has no MIG", "NVIDIA MIG User Guide, supported GPUs; AWS EKS",
        lambda s: negated(s.gpu.mig_capable), unknown="only if the GPU has MIG; the driver does not say",
        words=lambda s, _: {"name": s.gpu.name or "this GPU"}),
    _veto("mig-stays-on", (Way.WHOLE, *LEAVING, Way.STREAMS, Way.TIMESLICE, Way.SLICES, *ALL_MPS, Way.MEASURE),
        "MIG is on, and {why}", f"{_MIG_GUIDE}; the host", when_way=_mig_stays,
        words=lambda s, _: {"why": _why_mig_stays(s)}),
    _veto("mig-occupied", ALL_MIG,
        "MIG can only be turned on while the GPU is idle, and {count} on it now (--needs no-occupied: they can be ended)",
        "NVIDIA table 2022 (when idle); MIG User Guide",
        _occupied,
        words=lambda s, _: {"count": _count_here(s)}),
    _veto("peers-inside", (Way.WHOLE, *CONCURRENT),
        "NCCL and peer-to-peer do not work in a MIG instance", f'{_MIG_GUIDE}: "NCCL is currently not supported with MIG"',
        lambda s: s.gpu.instance is not None and said("nccl", "p2p")(s)),
    _veto("exclusive", (Way.TIMESLICE, Way.SLICES, Way.MIG_TIMESLICE),
        "compute mode {mode} admits one process at a time, and only root can change it",
        "NVIDIA DRA driver (time-slicing needs compute mode DEFAULT)", _exclusive,
        words=lambda s, _: {"mode": "-" if s.gpu.compute_mode is None else s.gpu.compute_mode.title}),
    _veto("mig-needs-root", ALL_MIG,
        "only root can create MIG instances, and you cannot become root", f"{_MIG_GUIDE} (CAP_SYS_ADMIN)",
        when_way=lambda s, way: all_of([_needs_change(s, way), _not_root(s)]),
        unknown="root has to create the instances (the lines with sudo)"),
    _veto("nccl", ALL_MIG,
        "NCCL and peer-to-peer across GPUs do not work on MIG instances",
        f'{_MIG_GUIDE}: "NCCL is currently not supported with MIG"', said("nccl", "p2p")),
    _veto("graphics", ALL_MIG,
        "graphics APIs do not run on MIG instances of this GPU",
        f"{_MIG_GUIDE} (only RTX PRO 6000 Blackwell has +gfx profiles)", _no_graphics),
    _veto("profiler", (*ALL_MIG, *ALL_MPS),
        "profilers and debuggers do not work here", "NVIDIA MIG and MPS guides", said("profiler")),
    _veto("mig-too-small", ALL_MIG,
        "{why}", f"{_MIG_GUIDE}, profiles; CIP203", when_way=lambda s, way: _why_no_slices(s, way) is not None,
        words=lambda s, way: {"why": _why_no_slices(s, way)}),
    # -- MPS ---------------------------------------------------------------------------------------
    _veto("mps-other-users", ALL_MPS,
        "an MPS server serves one user at a time: other users wait until its last program ends (multi-user mode drops isolation)",
        _MPS_GUIDE, lambda s: negated(s.case.same_user), unknown="only if all processes belong to one user"),
    _veto("mps-other-users-inside", (Way.MIG_MPS,),
        "the processes of one party belong to different users, and an MPS server serves one user at a time", _MPS_GUIDE,
        lambda s: negated(s.case.same_user_inside), unknown="only if the processes in one instance belong to one user"),
    _veto("mps-clients", ALL_MPS,
        "{processes} processes are too many: MPS accepts {most} clients on this GPU",
        "NVIDIA MPS guide (48; 60 from release 590; 16 before Volta)",
        _too_many, words=lambda s, _: {"processes": s.case.processes, "most": s.mps_clients}),
    _veto("mps-not-installed", (*ALL_MPS, Way.MIG_MPS),
        "nvidia-cuda-mps-control is not installed on this host", f"{_MPS_GUIDE} (Linux, part of the driver)",
        lambda s: not s.host.mps_program),
    _veto("mps-dynamic-parallelism", (*ALL_MPS, Way.MIG_MPS),
        "MPS does not support dynamic parallelism", "NVIDIA MPS guide (error 811)",
        said("dynamic_parallelism")),
    _veto("mps-limits-before-volta", ALL_MPS,
        "MPS has no limits on GPUs before Volta", _MPS_GUIDE, when_way=_needs_limits_before_volta),
    _veto("mps-static-old", (Way.MPS_STATIC,),
        "static partitions need Ampere and driver 590 (CUDA 13.1); this host has {here}",
        "NVIDIA CUDA 13.1; nvidia-cuda-mps-control 595",
        _no_static, unknown="only from Ampere and driver 590 (CUDA 13.1) on",
        words=lambda s, _: {"here": " with ".join(no_static_partitions(s.host, s.gpu))}),
    # -- slices ------------------------------------------------------------------------------------
    _veto("slices-old-driver", (Way.SLICES,),
        "the driver's calls for the slice of a process were seen from driver 515 on; this host has {driver}",
        "NVIDIA open-gpu-kernel-modules 515 to 595",
        lambda s: None if s.host.driver_major is None else s.host.driver_major < _FIRST_SLICES,
        words=lambda s, _: {"driver": s.host.driver}),
    _veto("slices-no-vms", (Way.SLICES,),
        "a virtual machine has a driver of its own: the slice of its programs cannot be set from here",
        "NVIDIA table 2022", said("vms")),
    # -- streams -----------------------------------------------------------------------------------
    _veto("streams-need-code", (Way.STREAMS, Way.MPS_STREAMS),
        "the program would need changes, and it cannot be changed", "NVIDIA table 2022; CIP203",
        denied("code"), unknown="only if the program can be changed to use streams"),
    _veto("streams-running", (Way.STREAMS,),
        "the program is already running; it would have to be changed and restarted", "NVIDIA table 2022",
        said("running")),
    # -- vGPU --------------------------------------------------------------------------------------
    _veto("vgpu-no-vms", (Way.VGPU,),
        "there are no virtual machines", "NVIDIA table 2022",
        denied("vms"), unknown="only for virtual machines, with NVIDIA's licence"),
    _veto("vgpu-not-there", (Way.VGPU,),
        "this GPU or driver has no vGPU", "NVML vGPU capability", lambda s: negated(s.gpu.vgpu_capable),
        unknown="only with NVIDIA's vGPU host driver; this driver does not report that it is one"),
    # -- memory and the GPU itself -----------------------------------------------------------------
    _veto("memory-sum", CONCURRENT,
        "together the processes need {needed} of memory, and the GPU has {total}: {short} too much; {most} fit at the same time",
        "arithmetic; nvshare (paging instead made two jobs 8 times slower)",
        when_way=lambda s, way: s.several and s.budget_of(way).may_fit is False and s.in_turns(way) is None,
        words=_memory_words),
    _veto("memory-one", (Way.WHOLE, *LEAVING, *CONCURRENT),
        "one process needs {largest} of {total}: {over} too much", "arithmetic",
        lambda s: negated(s.plain.one_fits) if s.plain.one_fits is not None else False,
        words=lambda s, _: _memory_words(s, Way.WHOLE)),
    _veto("prohibited", (Way.WHOLE, *LEAVING, *CONCURRENT),
        "compute mode is prohibited: no program can use the GPU", "NVML compute mode",
        lambda s: s.gpu.compute_mode is ComputeMode.PROHIBITED and not s.may_be_root),
    # -- jobs that leave the GPU -------------------------------------------------------------------
    _veto("leaving-one", LEAVING,
        "there is only one job: jobs of others leave the GPU only if they were started that way", _SWAP_DOCS,
        lambda s: s.case.processes == 1),
    _veto("leaving-fits", LEAVING,
        "all of them fit at the same time: none has to leave",
        "arithmetic; nvshare (two jobs that fit took 0.8 of the time of one after another)",
        lambda s: s.fit_together, unknown="only if they do not fit at the same time (give --processes and --memory)"),
    *(_veto(name, LEAVING, text, source, when, unknown=unknown) for name, text, source, when, unknown in _STAYS),
    _veto("leaving-host-memory", LEAVING,
        "the copies need {needed} of host memory, and {free} are available", f"arithmetic; {_SWAP_DOCS}",
        when_way=_host_too_small, unknown="only if there is enough free host memory for the copies; how much is free is unknown",
        words=_host_words),
    _veto("leaving-running", LEAVING,
        "they already run: gpushare moves by itself only what it started (by hand: gpushare swap out JOB)",
        "gpushare swap", when_way=lambda s, way: any_of(one.running for one, _ in s.leavers(way))),
    _veto("leaving-latency", LEAVING,
        "there is a latency target, and a job that is out answers only after seconds", _SWAP_MEASURED,
        when_way=_waits_for_answers),
    _veto("leaving-apart", LEAVING,
        "the parties must be kept apart, and nothing forces a job to leave when it should",
        _SWAP_DOCS, lambda s: not s.trusted or bool(s.isolation & {Isolation.FAULT, Isolation.FULL})),
    _veto("turns-production", (Way.TURNS,),
        "production would have to leave for the turn of the other job", "TGS (NSDI 2023)", lambda s: s.pair),
    _veto("swap-production-too-large", (Way.SWAP,),
        "the production jobs alone need more memory than the GPU has", "arithmetic", _alone_too_large),
)
# fmt: on


def cannot_leave(s: Situation) -> bool:
    """Return whether the driver cannot copy these jobs out of this GPU, or gpushare does not try."""
    return any(when(s) for _, _, _, when, _ in _STAYS)


# -- requirements: what the table must say -----------------------------------------------------------


def _wants(*kinds: Isolation) -> Callable[[Situation], bool | None]:
    def when(situation: Situation) -> bool | None:
        if situation.case.wanted_isolation is None:
            return None
        return bool(situation.isolation & set(kinds))

    return when


_SHARED: Final = tuple(way for way in Way if way.outer is not None)
_FULL: Final = _wants(Isolation.FULL)

# fmt: off
REQUIREMENTS: Final = (
    Requirement("several-processes", "partition_type", "temporal", "temporal",
        "there is more than one process",
        lambda s: s.several if s.case.processes is not None else (s.case.any("one_application") is False) or None,
        ways=(Way.STREAMS,), unknown="only inside one process"),
    Requirement("fault-isolation", "error_isolation", "full", "partial",
        "a fault in one process must not affect the others",
        _wants(Isolation.FAULT), unknown="only if a fault in one process may end the others"),
    Requirement("memory-quota", "memory_protection", "quota", "quota",
        "a hard memory quota is required", _wants(Isolation.QUOTA)),
    Requirement("full-isolation-memory", "memory_protection", "hardware", "hardware",
        "full isolation needs separate memory", _FULL),
    Requirement("full-isolation-faults", "error_isolation", "full", "full",
        "full isolation needs contained faults", _FULL),
    Requirement("full-isolation-sm", "sm_isolation", "partition", "partition",
        "full isolation needs separate SMs", _FULL),
    Requirement("bandwidth-qos", "memory_bandwidth_qos", "partition", "partition",
        "a guaranteed share of the memory bandwidth is required",
        lambda s: True if Isolation.FULL in s.isolation else s.case.any("bandwidth_qos")),
    Requirement("untrusted", "target_use", "qos", "tolerant",
        "the parties do not trust each other", lambda s: not s.trusted),
    Requirement("weights", "sm_isolation", "percentage", "percentage",
        "unequal shares are required", said("weights"), ways=(Way.TIMESLICE,)),
    Requirement("vms", "target_use", "tenants", "qos",
        "the parties are virtual machines", said("vms"), inside=False),
    Requirement("ipc", "interop", "ipc", "ipc",
        "the processes share GPU memory through CUDA IPC",
        said("ipc"), ways=tuple(way for way in _SHARED if way not in {Way.MIG_MPS, Way.MIG_TIMESLICE})),
    Requirement("running", "reconfigure", "live", "live",
        "the programs are already running", said("running"), inside=False),
    Requirement("latency", "target_use", "qos", "cooperative",
        "there is a latency target, and no p99 is guaranteed", said("latency"),
        ways=(Way.TIMESLICE, *ALL_MPS, Way.MIG_MPS, Way.MIG_TIMESLICE)),
    Requirement("containment", "sm_isolation", "partition", "percentage",
        "each process must stay within its share",
        said("containment"), ways=tuple(way for way in _SHARED if way is not Way.STREAMS)),
)
# fmt: on


# -- conditions --------------------------------------------------------------------------------------


def _untried(s: Situation) -> str:
    mode = s.gpu.compute_mode
    found = ["graphics"] if s.case.any("graphics") else []
    found += ["profilers and debuggers"] if s.case.any("profiler") else []
    found += [f"compute mode {mode.title}"] if mode is not None and mode is not ComputeMode.DEFAULT else []
    return ", ".join(found)


def _tight(s: Situation) -> bool:
    """Return whether all fit, but not with limits that include CUDA's own memory."""
    usable = s.under_mps.usable_bytes
    if usable is None or not (s.under_mps.fits or s.in_turns(Way.MPS)):
        return False
    each = zip(s.case.workloads, s.counts_at_once(Way.MPS), strict=True)
    return sum(limit_for(one.memory) * (count or 1) for one, count in each if one.memory is not None) > usable


# fmt: off
CONDITIONS: Final = (
    _condition("mig-busy", ALL_MIG,
        "the GPU must be idle before it can be partitioned; {count} running on it now",
        "NVIDIA table 2022 (when idle); MIG User Guide",
        _in_the_way, unknown="the GPU must be idle before it can be partitioned",
        words=lambda s, _: {"count": _count_here(s)}),
    _condition("mps-serves", (*LEAVING, Way.TIMESLICE, Way.SLICES, *ALL_MIG),
        "an MPS daemon serves the GPU: stop it first, after its programs have ended",
        "NVIDIA MPS guide; MIG User Guide (when idle)", when_way=Situation.mps_in_the_way),
    _condition("mig-profiles-unknown", ALL_MIG,
        "the driver lists no profiles while MIG is off: enable MIG to see whether it fits",
        "NVML before driver 580",
        lambda s: bool(s.gpu.mig_capable) and (s.gpu.layout is None or not s.gpu.layout.profiles)),
    _condition("mig-is-on", (Way.WHOLE, *LEAVING, Way.TIMESLICE, Way.SLICES, *ALL_MPS, Way.STREAMS),
        "MIG is on: turn it off first (needs root and an idle GPU)", _MIG_GUIDE,
        lambda s: bool(s.gpu.mig_enabled)),
    _condition("in-turns", CONCURRENT,
        "not all of them fit at the same time: {most} at a time, the others wait", "arithmetic; NVIDIA MPS guide",
        when_way=lambda s, way: s.in_turns(way) is not None,
        words=lambda s, way: {"most": s.in_turns(way)}),
    _condition("in-use-now", (Way.WHOLE, *LEAVING, Way.STREAMS, Way.TIMESLICE, Way.SLICES, *ALL_MPS),
        "programs that run now use {used} of GPU memory, and the {free} that are free are not enough: they have to end first",
        "arithmetic; the host", when_way=short_now, words=lambda s, _: {
            "used": format_bytes(s.gpu.memory_used_bytes), "free": format_bytes(_free_now(s))}),
    _condition("whole-together", (Way.WHOLE,),
        "the processes depend on each other, so they cannot run in turn: one process per GPU",
        "MPI and NCCL: a collective operation waits for every rank", lambda s: s.together),
    _condition("timeslice-compute-mode", (Way.TIMESLICE, Way.SLICES, Way.MIG_TIMESLICE),
        "compute mode {mode} admits one process; it has to be set to default (needs root)",
        "NVIDIA DRA driver (time-slicing needs compute mode DEFAULT)",
        lambda s: s.gpu.compute_mode not in {None, ComputeMode.DEFAULT},
        words=lambda s, _: {"mode": "-" if s.gpu.compute_mode is None else s.gpu.compute_mode.title}),
    _condition("memory-tight", (Way.TIMESLICE, Way.SLICES, Way.STREAMS, Way.VGPU),
        "memory is tight: it fits only if a CUDA context takes less than 500 MiB (300 to 500 MB are reported)",
        "arithmetic", lambda s: s.several and s.plain.fits is False and s.plain.may_fit),
    _condition("mps-memory-tight", (Way.MPS, Way.MPS_PRIORITY, Way.MPS_STATIC, Way.MPS_STREAMS),
        "memory is tight: there is no room for CUDA's own memory in every limit, {so}",
        "arithmetic; measured on an H200 (a limit of 8G leaves 7.4 GiB)", _tight,
        words=lambda s, _: {"so": "so a program may run out of memory at its limit" if Isolation.QUOTA in s.isolation
            else "so no limit is set, and nothing keeps a program from using more than it said"}),
    _condition("slices-need-pair", (Way.SLICES,),
        "only if one job is production and the others can yield to it, or if they are to have unequal shares",
        "measured on an H200", lambda s: not s.pair and not s.case.any("weights")),
    _condition("slices-whose", (Way.SLICES,),
        "a slice is set by the user of the job, or by root: each user gives it when starting the job",
        "Linux (ptrace access); measured on an H200", lambda s: s.case.same_user is False and not s.may_be_root),
    _condition("slices-latency", (Way.SLICES,),
        "there is a latency target, and no p99 is guaranteed: next to trainings it was 1.1 to 1.5 times that of running alone",
        "measured on an H200", said("latency")),
    _condition("slices-unofficial", (Way.SLICES,),
        "NVIDIA does not document these calls for users: gpushare tries them on each GPU first, and refuses where they differ",
        "NVIDIA open-gpu-kernel-modules; measured on an H200 and an H100",
        lambda s: s.pair or bool(s.case.any("weights"))),
    _condition("slices-in-instance", (Way.SLICES,),
        "slices in a MIG instance were not measured", "measured on an H200 and an H100", lambda s: s.gpu.instance is not None),
    _condition("mig-ipc", (Way.MIG_MPS, Way.MIG_TIMESLICE),
        "processes that share GPU memory through CUDA IPC must be in the same instance",
        f"{_MIG_GUIDE} (no CUDA IPC across GPU instances)", said("ipc")),
    _condition("mig-fixed-sizes", ALL_MIG,
        "instances come in fixed sizes: {how}",
        f"{_MIG_GUIDE}, profiles", lambda s: s.several and s.case.any("weights"),
        words=lambda s, way: {"how": _nearest_sizes(s, way)}),
    _condition("mig-sms-short", ALL_MIG,
        "{short}: try whether that is enough", f"{_MIG_GUIDE}, profiles",
        when_way=lambda s, way: bool(s.short_of_sms(way)), words=lambda s, way: {"short": s.short_of_sms(way)}),
    _condition("mps-without-limits", (Way.MPS, Way.MPS_STREAMS),
        "before Volta, MPS has no thread or memory limits, and a single address space", "NVIDIA MPS guide",
        lambda s: s.before_volta),
    _condition("mps-containers", (*ALL_MPS, Way.MIG_MPS),
        "containers need the pipe directory, /dev/shm or --ipc=host, and the same user",
        "NVIDIA MPS guide; k8s-device-plugin", said("containers", "kubernetes")),
    _condition("kubernetes-mps-mig", (Way.MIG_MPS,),
        "MPS on MIG works with CUDA, GKE and CIP203, but not through the Kubernetes device plugin or on Red Hat",
        "k8s-device-plugin README; NVIDIA MIG User Guide", said("kubernetes")),
    _condition("priority-needs-pair", (Way.MPS_PRIORITY,),
        "only if one job is production and another can yield to it",
        "man nvidia-cuda-mps-control (priority 1 is below normal)", lambda s: not s.pair),
    _condition("mps-bandwidth", (Way.MPS, Way.MPS_STREAMS, Way.MPS_STATIC),
        "they share the memory bandwidth, which no MPS limit divides: compare the total rate with one after the other",
        "measured on an H200", lambda s: s.several and not s.pair and s.case.any("bandwidth_bound")),
    _condition("priority-bandwidth", (Way.MPS_PRIORITY,),
        "a cap does not help if one job saturates the memory bandwidth: half of the SMs can use all of it",
        "measured on an H200", said("bandwidth_bound")),
    _condition("nccl-sharing", (Way.TIMESLICE, Way.SLICES, *ALL_MPS, Way.VGPU),
        "NCCL needs one GPU per rank", "NVIDIA MIG guide; NCCL", said("nccl")),
    _condition("inside-needs-groups", (Way.MIG_MPS, Way.MIG_TIMESLICE),
        "only if several processes may share an instance", "NVIDIA blog 2022; GKE; CIP203",
        lambda s: s.grouped is False or (s.case.groups is None and s.several)),
    _condition("leaving-refused", LEAVING,
        "only if they use no NCCL, CUDA IPC or managed memory: the driver refuses to copy such a job", "NVIDIA/cuda-checkpoint",
        lambda s: None in map(s.case.any, ("nccl", "ipc", "managed_memory"))),
    _condition("leaving-untried", LEAVING,
        "that was not tried with {what}", _SWAP_MEASURED, lambda s: bool(_untried(s)),
        words=lambda s, _: {"what": _untried(s)}),
    _condition("leaving-quota", LEAVING,
        "the memory limit of a job is looked at five times a second: nothing refuses the allocation itself",
        "gpushare run --memory", lambda s: Isolation.QUOTA in s.isolation),
    _condition("swap-who", (Way.SWAP,),
        "only if one job is production and the other can wait, or if each of them is idle for long (notebooks)",
        "TGS (NSDI 2023); gpushare run --swap idle=10m", lambda s: not s.pair and s.case.pattern is not Pattern.INTERACTIVE),
    _condition("swap-foreign-production", (Way.SWAP,),
        "the jobs belong to different users, and no other user's word on what is production counts: the other job takes "
        "turns of a minute instead, and when production starts it waits that long, too",
        "gpushare run --swap turns",
        lambda s: negated(s.case.same_user) if s.pair and not s.case.any("running") else False,
        unknown="only if both belong to the same user, or production to root (otherwise: --users different)"),
    _condition("measure-needs-program", (Way.MEASURE,),
        "only if the program can be run several times on this GPU",
        "H200 study (2026): the order of MPS and time-slicing flips with the workload",
        lambda s: not s.case.any("cuda_graphs")),
    _condition("fix-only-io", (Way.FIX,),
        "only if the GPU waits for input, the CPU or the disk", "CIP203",
        lambda s: False if batched(s) else denied("io_bound")(s), unknown="only if the GPU waits for input, the CPU or the disk"),
)
# fmt: on


# -- preferences among the ways that are not refused -------------------------------------------------


def _one_process(s: Situation) -> bool:
    processes = s.case.processes
    return (processes == 1 and not s.with_others) or (processes is None and bool(s.case.any("one_application")))


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
    """Return whether an instance for one process leaves half of the GPU to others; True where no profiles are listed."""
    found, total = s.slices(Way.MIG), s.plain.total_bytes or 0
    return found is None or all((one.memory_bytes or 0) * 2 <= total for one in found.profiles)


def _free_to_measure(s: Situation) -> bool:
    hard = s.isolation & {Isolation.FAULT, Isolation.FULL}
    # NCCL ranks need one GPU each, so nothing can be measured on one GPU.
    one_gpu = not s.case.any("vms") and not s.case.any("nccl") and not s.case.any("p2p")
    return s.several and not s.pair and not hard and s.trusted and one_gpu


def batched(s: Situation) -> bool:
    """Return whether one engine with continuous batching can replace the copies of one LLM."""
    llm = bool(s.case.any("replicas")) and s.case.any("cuda_graphs") is not False
    return llm and s.several and not s.apart and not s.pair and bool(s.case.any("cuda_graphs") or s.saturating)


def _production(s: Situation) -> bool:
    return Role.PRODUCTION in s.case.roles or (s.case.pattern in {None, Pattern.STEADY})


# fmt: off
PREFERENCES: Final = (
    _for("one-process", {Way.WHOLE: 40},
        "there is only one process", "NVIDIA table 2022", _one_process),
    _for("one-process-own-code", {Way.STREAMS: 75},
        "one process whose code can be changed: streams overlap its work",
        'NVIDIA table 2022; CIP203 ("limited to a single process")', _own_code),
    _for("small-same-user", {Way.MPS: 40, Way.MPS_STREAMS: 20},
        "several small programs of one user: MPS runs their kernels concurrently",
        "NVIDIA MPS guide; GKE; CIP203; measured on an H200 (3 to 6 times time-slicing)", _farm),
    _for("mps-there-already", {Way.MPS: 5},
        "an MPS daemon already serves the GPU", "the host",
        lambda s: s.several and s.mps_serves and s.case.same_user is True),
    _for("small-maybe-same-user", {Way.MPS: 15},
        "several small programs: MPS runs their kernels concurrently, if all belong to one user",
        "NVIDIA MPS guide; GKE; CIP203; measured on an H200 (3 to 6 times time-slicing)",
        lambda s: _small(s) and s.case.same_user is None and not s.idle_often and not s.pair),
    _for("cooperating", {Way.MPS: 30},
        "MPS was designed for cooperating processes (MPI ranks)", "NVIDIA MPS guide; CSC; PIConGPU",
        _cooperating),
    _for("small-batch", {Way.MPS: 15},
        "small batch jobs: throughput matters", "GKE",
        lambda s: _small(s) and s.case.pattern is Pattern.STEADY and s.case.same_user is not False),
    _for("latency-own-part", {Way.MIG: 45},
        "latency or QoS of several services: each gets its own SMs and memory",
        "NVIDIA table 2022; GKE; Rafay; CERN", lambda s: s.several and s.case.any("latency") and not s.pair),
    _for("latency-alone", {Way.WHOLE: 5},
        "a latency target: a program that has the GPU to itself does not wait for others",
        "NVIDIA table 2022; measured on an H200", lambda s: s.several and s.case.any("latency") and not s.pair),
    _against("latency-jitter", {Way.TIMESLICE: 20, Way.MIG_TIMESLICE: 20},
        "time-slicing adds jitter: p99 is 2 to 3 times, at worst 5 times, that of a job alone",
        "NVIDIA table 2022; Tally-bench; measured on an H200", said("latency")),
    _for("bandwidth", {Way.MIG: 45},
        "only MIG partitions the memory bandwidth", "NVIDIA table 2022",
        lambda s: s.several and s.case.any("bandwidth_qos")),
    _for("other-users-production", {Way.MIG: 40},
        "different users in production: each gets an instance", "CIP203; EKS; Red Hat",
        lambda s: s.several and s.case.same_user is False and _production(s) and s.saturating is not True),
    _for("bursty", {Way.TIMESLICE: 40},
        "bursty work (people, notebooks, CI): whoever is active gets the whole GPU",
        "GKE; NVIDIA; CIP203; CERN; EKS (Red Hat does not recommend it in general)",
        lambda s: s.several and s.idle_often),
    _for("older-or-many", {Way.TIMESLICE: 25},
        "{why}: time-slicing takes any number of users on any GPU", "NVIDIA GPU Operator", _older,
        words=lambda s, _: {"why": "this GPU has no MIG" if s.gpu.mig_capable is False
            else f"there are more users than the {s.instances} MIG instances of this GPU"}),
    _for("groups-together", {Way.MIG_MPS: 125},
        "separate groups with small work in each: one instance per group, MPS inside",
        "NVIDIA blog 2022; GKE; CIP203", lambda s: _groups(s) and not s.idle_often and s.saturating is not True),
    _for("groups-interactive", {Way.MIG_TIMESLICE: 140},
        "separate groups with interactive work in each: one instance per group, time-sliced inside",
        "NVIDIA blog 2022; GKE; CIP203; nos", lambda s: _groups(s) and s.idle_often),
    _for("half-a-gpu", {Way.MIG: 15},
        "each needs less than half of the GPU and of its memory: an instance is enough (test it)", "CIP203",
        lambda s: s.several and _half(s)),
    _for("half-a-gpu-alone", {Way.MIG: 80},
        "one job needs less than half of the GPU and of its memory: an instance (test it) leaves the rest to others",
        "CIP203", lambda s: _one_process(s) and _half(s) and _leaves_half(s) and not s.case.any("code")),
    _for("saturating", {Way.WHOLE: 60},
        "one process fills the GPU: sharing gains nothing (0.97 to 1.05 of one after the other), and MIG mode costs SMs",
        "CERN; CIP203; ParvaGPU", lambda s: s.saturating is True and not s.pair),
    _for("production-pair", {Way.MPS_PRIORITY: 92},
        "production with an opportunistic job: on an H200, a 60 % cap and low priority for the latter kept production's p99 (0.98)",
        "measured on an H200; man nvidia-cuda-mps-control", lambda s: s.pair and s.case.same_user is not False),
    _against("production-plain-mps", {Way.MPS: 60, Way.MPS_STREAMS: 60},
        "plain MPS is the worst choice for production: on an H200 it kept 0.11 of its rate, with p99 10.5 times as high",
        "measured on an H200", lambda s: s.pair),
    _for("production-apart", {Way.MIG: 30},
        "an instance for production keeps its throughput and its p99", "NVIDIA table 2022", lambda s: s.pair),
    _for("production-first", {Way.WHOLE: 20},
        "the other job can wait, or be paused, while production works",
        "measured on an H200 (only a full pause protects the tail outside MPS)",
        lambda s: s.pair and s.case.same_user is not False),
    _for("production-gaps", {Way.SLICES: 112},
        "production has gaps: with a long slice for it and a short one for the others, its p99 was 1.1 to 1.4 times that of "
        "running alone on an H200, and they kept 94 % of their rate",
        "measured on an H200 and an H100", lambda s: bool(s.gaps)),
    _for("production-slices", {Way.SLICES: 85},
        "a longer slice for production than for the others: that needs no MPS, so it is possible across users and keeps "
        "address spaces apart",
        "measured on an H200 and an H100", lambda s: s.pair and s.gaps is None),
    _against("production-no-gaps", {Way.SLICES: 40},
        "production has no gaps: slices give the others only what it loses (on an H200, caps under MPS were better)",
        "measured on an H200", lambda s: s.gaps is False),
    _for("weights-slices", {Way.SLICES: 45},
        "unequal shares across users: of programs that always have work, each gets about the part of its slice",
        "measured on an H200 (slices of 6 and 2 ms gave 82 and 18 %)",
        lambda s: s.several and s.case.any("weights") and s.case.same_user is False),
    _for("production-other-users", {Way.TIMESLICE: 25},
        "the other job belongs to another user and is not to wait until production ends: it is time-sliced with it",
        "NVIDIA table 2022; measured on an H200",
        lambda s: s.pair and s.case.same_user is False and s.trusted and s.saturating is not True),
    _for("joins-others", {Way.TIMESLICE: 45},
        "programs of other users are on the GPU: a new one is time-sliced with them, and they stay as they are",
        "NVIDIA MPS guide; NVIDIA table 2022", lambda s: s.with_others and s.trusted and bool(s.gpu.processes)),
    _for("production-fills", {Way.WHOLE: 80},
        "production alone fills the GPU: any share for another job is taken from it; let the other wait",
        "CERN; CIP203; measured on an H200 (two jobs that fill the memory bandwidth always sum to 1.0)",
        lambda s: s.pair and s.saturating is True),
    _against("production-time", {Way.TIMESLICE: 15},
        "time-slicing gives both jobs equal time: on an H200, production kept 0.51 of its rate",
        "measured on an H200; NVIDIA GPU Operator", lambda s: s.pair),
    _for("production-bandwidth", {Way.MIG: 60, Way.WHOLE: 70},
        "one job saturates the memory bandwidth: {what}",
        "measured on an H200", lambda s: s.pair and s.case.any("bandwidth_bound"), words=lambda _, way: {
            "what": "an instance gives production a part of it that is its own" if way is Way.MIG
            else "production has it to itself while the other waits or is paused"}),
    _against("production-bandwidth-cap", {Way.MPS_PRIORITY: 60},
        "a cap does not help: half of the SMs can use all of the memory bandwidth", "measured on an H200",
        lambda s: s.pair and s.case.any("bandwidth_bound")),
    _for("bandwidth-bound", {Way.MIG: 45},
        "each saturates the memory bandwidth, and only MIG divides it",
        "NVIDIA table 2022; measured on an H200 (half of the SMs can use all of the memory bandwidth)",
        lambda s: s.several and not s.pair and s.case.any("bandwidth_bound")),
    _for("bandwidth-in-turn", {Way.WHOLE: 8},
        "programs that saturate the memory bandwidth gain nothing from running at the same time",
        "measured on an H200 (two jobs that fill the memory bandwidth always sum to 1.0)",
        lambda s: s.several and not s.pair and s.case.any("bandwidth_bound")),
    _against("bandwidth-bound-mps", {Way.MPS: 30, Way.MPS_STREAMS: 20, Way.MPS_STATIC: 20},
        "MPS does not divide the memory bandwidth: such programs slow each other down, and sharing gains little",
        "measured on an H200 (two jobs that fill the memory bandwidth always sum to 1.0)",
        lambda s: s.several and not s.pair and s.case.any("bandwidth_bound")),
    _for("kept-in-share", {Way.MPS_STATIC: 90, Way.MIG: 35, Way.MPS: 15},
        "needs are known, and each process must stay within its share", "NVIDIA CUDA 13.1",
        lambda s: s.several and s.case.any("containment")),
    _for("cuda-graphs", {Way.MEASURE: 100},
        "CUDA graphs reverse the usual order (H200: time-slicing 99.7 %, MPS 94.4 %, MIG 20 % of running alone)",
        "H200 co-location study (2026)", lambda s: _free_to_measure(s) and s.case.any("cuda_graphs")),
    _for("waits-for-input", {Way.FIX: 200},
        "the GPU waits for input: sharing hides that, more loader workers or larger batches fix it", "CIP203",
        said("io_bound")),
    _for("one-engine", {Way.FIX: 250},
        "several copies of one model: one engine with continuous batching serves the requests of all of them",
        "vLLM; NVIDIA Triton (dynamic batching)", batched),
    _for("multi-model", {Way.WHOLE: 40},
        "one server process runs its models next to each other by itself: it needs no other way of sharing",
        "NVIDIA Triton (concurrent model execution)", lambda s: _one_process(s) and s.case.any("multi_model")),
    _for("multi-model-streams", {Way.STREAMS: 45},
        "one process with several models whose code can be changed: a stream for each model overlaps their work",
        "NVIDIA table 2022; NVIDIA blog 2022", lambda s: _own_code(s) and s.case.any("multi_model")),
    _for("resizing", {Way.MPS: 25, Way.TIMESLICE: 10},
        "shares change often: {how}", "NVIDIA MPS guide; NVIDIA GPU Operator",
        lambda s: s.several and s.case.any("resizing"), words=lambda _, way: {
            "how": "a new limit needs only a restart of the program" if way is Way.MPS
            else "under time-slicing there is nothing to change when they do"}),
    _against("resizing-idle", {Way.MIG: 60, Way.MIG_MPS: 60, Way.MIG_TIMESLICE: 60, Way.MPS_STATIC: 30},
        "shares change often, and an instance is changed only while it is idle", "NVIDIA table 2022 (when idle)",
        lambda s: s.several and s.case.any("resizing")),
    _for("virtual-machines", {Way.VGPU: 400},
        "the parties are virtual machines", "NVIDIA table 2022", said("vms")),
    _for("not-trusted", {Way.MIG: 70, Way.WHOLE: 45},
        "the parties do not trust each other: each gets {what}",
        "NVIDIA table 2022; EKS", lambda s: s.several and not s.trusted, words=lambda _, way: {
            "what": "its own part of the GPU" if way is Way.MIG else "the whole GPU for its own time"}),
    _against("not-trusted-time", {Way.TIMESLICE: 40, Way.SLICES: 40},
        "any process can use up the shared memory, and a reset affects all of them", "NVIDIA GPU Operator",
        lambda s: s.several and not s.trusted),
    _for("isolated", {Way.MIG: 60},
        "hardware isolation", "NVIDIA table 2022",
        lambda s: s.several and bool(s.isolation & {Isolation.FAULT, Isolation.FULL}) and s.saturating is not True),
    _for("quota", {Way.MPS: 10, Way.MIG: 5},
        "an enforced limit per process", "NVIDIA MPS guide",
        lambda s: s.several and Isolation.QUOTA in s.isolation),
    _for("needs-peers", {Way.WHOLE: 60},
        "NCCL and peer-to-peer need a whole GPU for each process", "NVIDIA MIG User Guide; NCCL", said("nccl", "p2p")),
    _for("profiled-alone", {Way.WHOLE: 10},
        "a profiler measures a program that has the GPU to itself", "NVIDIA MIG and MPS guides", said("profiler")),
    _for("runs-already", {Way.TIMESLICE: 40},
        "a running program is time-sliced as it is, and can be paused; nothing else can take it over",
        "NVIDIA MPS guide", said("running")),
    _against("leaving-cost", dict.fromkeys(LEAVING, 0), "{cost}", _SWAP_MEASURED, when_way=_cost_known, words=_leaving_words),
    _for("turns-progress", {Way.TURNS: 110},
        "all of them are to advance: in its turn, each has the GPU and all of its memory",
        "nvshare (a quantum of 60 s lost 2 %, paging made it 8 times slower); " + _SWAP_MEASURED,
        lambda s: _short_of_memory(s) and s.case.any("progress")),
    _for("turns-people", {Way.TURNS: 90},
        "several people have long work that does not fit at the same time: in turns, nobody waits until another's work has ended",
        "nvshare (a quantum of 60 s lost 2 %, paging made it 8 times slower); " + _SWAP_MEASURED, _own_time),
    _for("turns-interactive", {Way.TURNS: 60},
        "people wait for each of them: in turns, each advances within minutes", _SWAP_MEASURED,
        lambda s: _short_of_memory(s) and s.case.pattern is Pattern.INTERACTIVE),
    _against("turns-short", {Way.TURNS: 60},
        "short jobs end before a turn is worth its switch", _SWAP_MEASURED,
        lambda s: _short_of_memory(s) and s.case.pattern is Pattern.BURSTY),
    _for("queue-shortest", {Way.WHOLE: 5},
        "they do not fit at the same time, and nobody waits for a part of the work: one after another is the shortest in "
        "total (turns lose a tenth)",
        "measured on an H200 (24 mixed jobs took 0.22 to 0.48 of one after another with run --wait); arithmetic", _total_counts),
    _for("swap-production", {Way.SWAP: 200},
        "production has the first right to the memory, and the other job uses the GPU while production does not need it",
        "TGS (NSDI 2023: swaps underneath, production's memory first)",
        lambda s: _short_of_memory(s) and s.pair),
    _for("swap-idle", {Way.SWAP: 110},
        "people do not use the GPU all the time: what is idle gives its memory back, and comes in at its first work",
        "gpushare run --swap idle=10m; " + _SWAP_MEASURED,
        lambda s: _short_of_memory(s) and not s.pair and s.case.pattern is Pattern.INTERACTIVE),
    _against("queue-of-people", {Way.WHOLE: 15},
        "users would wait for each other", "CIP203",
        lambda s: s.several and s.case.pattern is Pattern.INTERACTIVE),
    _against("one-process-shares", dict.fromkeys(tuple(way for way in CONCURRENT if way not in {Way.STREAMS, Way.VGPU}), 30),
        "there is no other process to share with", "NVIDIA table 2022", _one_process),
)
# fmt: on


# -- verdicts ----------------------------------------------------------------------------------------


class Outcome(str, Enum):
    """The outcome of a way for a case."""

    FITS = "fits"
    CONDITION = "fits with a condition"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one way, with all reasons: vetoes first, then conditions, then preferences."""

    way: Way
    outcome: Outcome
    reasons: tuple[Reason, ...]
    score: int

    def of(self, *kinds: Kind) -> tuple[Reason, ...]:
        return tuple(one for one in self.reasons if one.kind in kinds)

    @property
    def refused(self) -> bool:
        return self.outcome is Outcome.REFUSED


# The score of a way before any reason counts: the simplest setup comes first.
BASE: Final = {
    Way.WHOLE: 5,
    Way.TURNS: -10,
    Way.SWAP: -15,
    Way.STREAMS: 2,
    Way.TIMESLICE: 10,
    Way.SLICES: -20,
    Way.MPS: 8,
    Way.MPS_PRIORITY: -20,
    Way.MPS_STATIC: -10,
    Way.MIG: 6,
    Way.VGPU: -100,
    Way.MIG_MPS: 3,
    Way.MIG_TIMESLICE: 2,
    Way.MPS_STREAMS: 1,
    Way.MEASURE: -1,
    Way.FIX: -50,
}
_ORDER: Final = {Kind.VETO: 0, Kind.CONDITION: 1, Kind.FOR: 2, Kind.AGAINST: 3}
_TO_COMPARE: Final = 2
_NOTHING_TO_COMPARE: Final = Reason(
    rule="nothing-to-compare",
    kind=Kind.VETO,
    text="fewer than two ways are left to compare",
    source="the other verdicts",
)
_NOTHING_KNOWN: Final = Reason(
    rule="nothing-decides",
    kind=Kind.FOR,
    text="it depends on whether one process fills the GPU (--saturating, --no-saturating): if it does, sharing gains nothing; "
    "if not, MPS was 3 to 6 times as fast on an H200",
    source="measured on an H200; CERN; sharing studies 2021 to 2026 contradict each other by workload",
    weight=25,
)


def verdicts(situation: Situation) -> tuple[Verdict, ...]:
    """Return the verdict on every way: the best first, the refused ones last."""
    return situation.once(("verdicts", situation.case), lambda: _verdicts(situation))


def _verdicts(situation: Situation) -> tuple[Verdict, ...]:
    reasons: dict[Way, list[Reason]] = {way: [] for way in Way}
    rules: tuple[Rule | Requirement, ...] = (*VETOES, *REQUIREMENTS, *CONDITIONS, *PREFERENCES)
    for rule in rules:
        for way, reason in rule.reasons(situation):
            reasons[way].append(reason)
    found = [_verdict(way, reasons[way]) for way in Way]
    left = [one for one in found if not one.refused and one.way in SHARING and one.way is not Way.VGPU]
    if len(left) < _TO_COMPARE:
        found = [_with(one, _NOTHING_TO_COMPARE) if one.way is Way.MEASURE else one for one in found]
    elif situation.several and len([one for one in left if one.way in CONCURRENT]) > 1 and _undecided(situation):
        found = [_with(one, _NOTHING_KNOWN) if one.way is Way.MEASURE else one for one in found]
    return tuple(sorted(found, key=lambda one: (one.refused, -one.score)))


def winner(found: Iterable[Verdict]) -> Verdict | None:
    """Return the best verdict; None if every way of sharing or queueing is refused."""
    usable = [one for one in found if not one.refused]
    # These are answers only if something speaks for them.
    unasked = {Way.MEASURE, Way.FIX, Way.VGPU}
    if not any(one.way not in unasked or (one.way is not Way.MEASURE and one.of(Kind.FOR)) for one in usable):
        return None
    return usable[0]


def _undecided(situation: Situation) -> bool:
    """Return whether nothing decides: no requirement, no load pattern, and unknown whether a process fills the GPU."""
    case = situation.case
    wanted = (
        "cooperating",
        "latency",
        "bandwidth_qos",
        "weights",
        "containment",
        "vms",
        "running",
        "bandwidth_bound",
        "nccl",
        "p2p",
        "io_bound",
        "graphics",
        "profiler",
        "ipc",
    )
    said = any(case.any(field) for field in wanted) or case.roles or situation.isolation or situation.idle_often
    other_users = case.same_user is False or not situation.trusted
    return not said and not other_users and case.any("saturating") is None and (case.groups or 0) < _TO_COMPARE


def _verdict(way: Way, reasons: list[Reason]) -> Verdict:
    reasons.sort(key=lambda one: _ORDER[one.kind])
    if any(one.kind is Kind.VETO for one in reasons):
        outcome = Outcome.REFUSED
    elif any(one.kind is Kind.CONDITION for one in reasons):
        outcome = Outcome.CONDITION
    else:
        outcome = Outcome.FITS
    signs = {Kind.FOR: 1, Kind.AGAINST: -1}
    score = BASE[way] + sum(signs.get(one.kind, 0) * one.weight for one in reasons)
    return Verdict(way=way, outcome=outcome, reasons=tuple(reasons), score=score)


def _with(verdict: Verdict, reason: Reason) -> Verdict:
    outcome = Outcome.REFUSED if reason.kind is Kind.VETO else verdict.outcome
    reasons = tuple(sorted((*verdict.reasons, reason), key=lambda one: _ORDER[one.kind]))
    return replace(verdict, outcome=outcome, reasons=reasons, score=verdict.score + reason.weight)
