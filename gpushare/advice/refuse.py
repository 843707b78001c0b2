"""Hard limits that are not a row of the table: the host, the GPU, the numbers. Pure.

Each comes from a document or a measurement, named beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpushare.advice.case import Isolation, all_of, negated
from gpushare.advice.compare import no_static_partitions
from gpushare.advice.rule import Kind, Reason, Rule, denied, said
from gpushare.advice.situation import Situation
from gpushare.advice.table import Cell, Mechanism
from gpushare.advice.ways import ALL_MIG, ALL_MPS, CONCURRENT, Way
from gpushare.model import ComputeMode
from gpushare.units import format_bytes

_MIG_GUIDE: Final = "NVIDIA MIG User Guide"
_MPS_GUIDE: Final = "NVIDIA MPS guide"
_veto = partial(Rule, kind=Kind.VETO)


def _no_static(s: Situation) -> bool | None:
    if no_static_partitions(s.host, s.gpu):
        return True
    return None if None in {s.gpu.compute_capability, s.host.driver_major} else False


def _not_root(s: Situation) -> bool | None:
    return negated(s.may_be_root)


def _needs_change(s: Situation) -> bool:
    """Return whether instances have to be made: MIG is off, or those that idle do not serve."""
    return not s.gpu.mig_enabled or s.free_now(Way.MIG) is None


def _too_many(s: Situation) -> bool | None:
    if s.mps_clients is None or s.case.processes is None:
        return None
    return s.case.processes > s.mps_clients


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
    found = s.slices(way)
    return None if found is None else found.why_not


def _no_graphics(s: Situation) -> bool | None:
    wanted = s.case.any("graphics")
    offers = s.gpu.layout is not None and any(profile.graphics for profile in s.gpu.layout.profiles)
    return False if offers else wanted


VETOES: Final = (
    # -- MIG ---------------------------------------------------------------------------------------
    _veto(
        "mig-not-there",
        ALL_MIG,
        "{name} has no MIG",
        "NVIDIA MIG User Guide, supported GPUs; AWS EKS",
        lambda s: negated(s.gpu.mig_capable),
        unknown="only if the GPU has MIG; the driver does not say",
        words=lambda s, _: {"name": s.gpu.name or "this GPU"},
    ),
    _veto(
        "mig-needs-root",
        ALL_MIG,
        "MIG instances are made by root, and that is not to be had",
        f"{_MIG_GUIDE} (CAP_SYS_ADMIN)",
        lambda s: all_of([_needs_change(s), _not_root(s)]),
        unknown="root has to make the instances (the lines with sudo)",
    ),
    _veto(
        "nccl",
        ALL_MIG,
        "NCCL and peer-to-peer across GPUs do not work on MIG instances",
        f'{_MIG_GUIDE}: "NCCL is currently not supported with MIG"',
        said("nccl", "p2p"),
    ),
    _veto(
        "graphics",
        ALL_MIG,
        "graphics APIs do not run on MIG instances of this GPU",
        f"{_MIG_GUIDE} (only RTX PRO 6000 Blackwell has +gfx profiles)",
        _no_graphics,
    ),
    _veto(
        "profiler",
        (*ALL_MIG, *ALL_MPS),
        "a profiler or debugger needs what is shared here",
        "NVIDIA MIG and MPS guides",
        said("profiler"),
    ),
    _veto(
        "mig-too-small",
        ALL_MIG,
        "{why}",
        f"{_MIG_GUIDE}, profiles; CIP203",
        when_way=lambda s, way: _why_no_slices(s, way) is not None,
        words=lambda s, way: {"why": _why_no_slices(s, way)},
    ),
    # -- MPS ---------------------------------------------------------------------------------------
    _veto(
        "mps-other-users",
        ALL_MPS,
        "an MPS server takes one user's programs, others wait until the last has ended (its multi-user mode drops isolation)",
        _MPS_GUIDE,
        lambda s: negated(s.case.same_user),
        unknown="only if all belong to the same user",
    ),
    _veto(
        "mps-other-users-inside",
        (Way.MIG_MPS,),
        "the processes of one party belong to different users, and an MPS server takes one user's",
        _MPS_GUIDE,
        lambda s: negated(s.case.same_user_inside),
        unknown="only if those in one instance belong to the same user",
    ),
    _veto(
        "mps-clients",
        ALL_MPS,
        "{processes} processes, and MPS takes {most} clients on this GPU",
        "NVIDIA MPS guide (48; 60 from release 590; 16 before Volta)",
        _too_many,
        words=lambda s, _: {"processes": s.case.processes, "most": s.mps_clients},
    ),
    _veto(
        "mps-not-installed",
        (*ALL_MPS, Way.MIG_MPS),
        "nvidia-cuda-mps-control is not installed on this host",
        f"{_MPS_GUIDE} (Linux, part of the driver)",
        lambda s: not s.host.mps_program,
    ),
    _veto(
        "mps-dynamic-parallelism",
        (*ALL_MPS, Way.MIG_MPS),
        "MPS does not take programs that launch kernels from kernels",
        "NVIDIA MPS guide (error 811)",
        said("dynamic_parallelism"),
    ),
    _veto(
        "mps-limits-before-volta",
        (Way.MPS_PRIORITY, Way.MPS_STATIC),
        "MPS has no limits before Volta",
        _MPS_GUIDE,
        lambda s: s.before_volta,
    ),
    _veto(
        "mps-static-old",
        (Way.MPS_STATIC,),
        "static partitions need Ampere and driver 590 (CUDA 13.1); here is {here}",
        "NVIDIA CUDA 13.1; nvidia-cuda-mps-control 595",
        _no_static,
        unknown="only from Ampere and driver 590 (CUDA 13.1) on",
        words=lambda s, _: {"here": " with ".join(no_static_partitions(s.host, s.gpu))},
    ),
    # -- streams -----------------------------------------------------------------------------------
    _veto(
        "streams-need-code",
        (Way.STREAMS, Way.MPS_STREAMS),
        "the program would have to be changed, and cannot be",
        "NVIDIA table 2022; CIP203",
        denied("code"),
        unknown="only if the program can be changed to use streams",
    ),
    _veto(
        "streams-running",
        (Way.STREAMS,),
        "the program runs already; it would have to be changed and started anew",
        "NVIDIA table 2022",
        said("running"),
    ),
    # -- vGPU --------------------------------------------------------------------------------------
    _veto(
        "vgpu-no-vms",
        (Way.VGPU,),
        "there are no virtual machines",
        "NVIDIA table 2022",
        denied("vms"),
        unknown="only for virtual machines, with NVIDIA's licence",
    ),
    _veto(
        "vgpu-not-there",
        (Way.VGPU,),
        "this GPU or driver has no vGPU",
        "NVML vGPU capability",
        lambda s: negated(s.gpu.vgpu_capable),
        unknown="only with NVIDIA's vGPU host driver, and this one does not say that it is",
    ),
    # -- memory and the GPU itself -----------------------------------------------------------------
    _veto(
        "memory-sum",
        CONCURRENT,
        "together {needed} of {total}: {short} too much; {most} fit at the same time",
        "arithmetic; nvshare (paging instead made two jobs 8 times slower)",
        when_way=lambda s, way: s.several and s.budget_of(way).may_fit is False,
        words=_memory_words,
    ),
    _veto(
        "memory-one",
        (Way.WHOLE, *CONCURRENT),
        "one process alone needs {largest} of {total}: {over} too much",
        "arithmetic",
        lambda s: negated(s.plain.one_fits) if s.plain.one_fits is not None else False,
        words=lambda s, _: _memory_words(s, Way.WHOLE),
    ),
    _veto(
        "prohibited",
        CONCURRENT,
        "the GPU is in compute mode prohibited: no program may use it",
        "NVML compute mode",
        lambda s: s.gpu.compute_mode is ComputeMode.PROHIBITED and not s.may_be_root,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What is wanted of a row: ``wanted`` to fit, at least ``floor`` to fit with a condition.

    ``unknown`` is the condition when nobody said whether it is wanted, for ways that would be refused or bound.
    """

    id: str
    row: str
    wanted: str
    floor: str
    # What it is about, as the end of a sentence: "a fault of one must not end the others".
    text: str
    when: Callable[[Situation], bool | None]
    unknown: str | None = None
    ways: tuple[Way, ...] = tuple(Way)
    # What holds between processes of one instance too: then a weak inner mechanism is a condition.
    inside: bool = True

    def reasons(self, situation: Situation) -> Iterator[tuple[Way, Reason]]:
        """Yield what the requirement says, for each way about which it says something."""
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
        plainly = best if way is Way.MPS_STATIC else cell.level
        enough = situation.table.at_least(self.row, plainly, self.wanted)
        if asked:
            if not enough and not situation.table.at_least(self.row, best, self.floor):
                yield self._reason(cell, Kind.CONDITION, self.unknown or "", asked=True)
        elif not enough:
            yield self._short(situation, way, cell, best)
        elif way.inner is not None and way.outer is Mechanism.MIG and self.inside:
            yield from self._between(situation, way)

    def _short(self, situation: Situation, way: Way, cell: Cell, best: str) -> Reason:
        """Return the reason of a cell that is too weak: a condition where an option or the floor helps."""
        table = situation.table
        if way is Way.VGPU and table.at_least(self.row, best, self.wanted):
            if situation.gpu.mig_capable is not False:
                return self._reason(cell, Kind.CONDITION, f"{self.text}: only with MIG-backed vGPU")
            return self._reason(cell, Kind.VETO, f"{self.text}: only MIG-backed vGPU would do, and this GPU has no MIG")
        says = f"{self.text} ({table.titles[cell.mechanism]}: {cell.today})"
        if table.at_least(self.row, best, self.floor):
            return self._reason(cell, Kind.CONDITION, says)
        return self._reason(cell, Kind.VETO, says if best == cell.level else f"{says}, at best {best}")

    def _between(self, situation: Situation, way: Way) -> Iterable[Reason]:
        """Yield the condition that it holds between instances only."""
        if way.inner is None or situation.grouped:
            return
        level = situation.table.level(way.inner, self.row, situation.host.driver)
        if not situation.table.at_least(self.row, level, self.wanted):
            cell = situation.table.cell(way.inner, self.row, situation.host.driver)
            yield self._reason(cell, Kind.CONDITION, f"{self.text}: it holds between instances, not inside one")

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


def _wants(*kinds: Isolation) -> Callable[[Situation], bool | None]:
    def when(situation: Situation) -> bool | None:
        if situation.case.wanted_isolation is None:
            return None
        return bool(situation.isolation & set(kinds))

    return when


_SHARED: Final = tuple(way for way in Way if way.outer is not None)
_FULL: Final = _wants(Isolation.FULL)

REQUIREMENTS: Final = (
    Requirement(
        id="several-processes",
        row="partition_type",
        wanted="temporal",
        floor="temporal",
        text="there is more than one process",
        when=lambda s: s.several if s.case.processes is not None else (s.case.any("one_application") is False) or None,
        ways=(Way.STREAMS,),
        unknown="only inside one process",
    ),
    Requirement(
        id="fault-isolation",
        row="error_isolation",
        wanted="full",
        floor="partial",
        text="a fault of one must leave the others alone",
        when=_wants(Isolation.FAULT),
        unknown="only if a fault of one may end the others",
    ),
    Requirement(
        id="memory-quota",
        row="memory_protection",
        wanted="quota",
        floor="quota",
        text="a hard memory quota is wanted",
        when=_wants(Isolation.QUOTA),
    ),
    Requirement(
        id="full-isolation-memory",
        row="memory_protection",
        wanted="hardware",
        floor="hardware",
        text="full isolation needs memory of one's own",
        when=_FULL,
    ),
    Requirement(
        id="full-isolation-faults",
        row="error_isolation",
        wanted="full",
        floor="full",
        text="full isolation needs faults that stay with their cause",
        when=_FULL,
    ),
    Requirement(
        id="full-isolation-sm",
        row="sm_isolation",
        wanted="partition",
        floor="partition",
        text="full isolation needs SMs of one's own",
        when=_FULL,
    ),
    Requirement(
        id="bandwidth-qos",
        row="memory_bandwidth_qos",
        wanted="partition",
        floor="partition",
        text="a guaranteed share of the memory bandwidth is wanted",
        when=lambda s: True if Isolation.FULL in s.isolation else s.case.any("bandwidth_qos"),
    ),
    Requirement(
        id="untrusted",
        row="target_use",
        wanted="qos",
        floor="tolerant",
        text="the parties do not trust each other",
        when=lambda s: not s.trusted,
    ),
    Requirement(
        id="weights",
        row="sm_isolation",
        wanted="percentage",
        floor="percentage",
        text="unequal shares are wanted",
        when=said("weights"),
        ways=(Way.TIMESLICE,),
    ),
    Requirement(
        id="vms",
        row="target_use",
        wanted="tenants",
        floor="qos",
        text="the parties are virtual machines",
        when=said("vms"),
        inside=False,
    ),
    Requirement(
        id="ipc",
        row="interop",
        wanted="ipc",
        floor="ipc",
        text="the parties share GPU memory by CUDA IPC",
        when=said("ipc"),
        ways=tuple(way for way in _SHARED if way not in {Way.MIG_MPS, Way.MIG_TIMESLICE}),
    ),
    Requirement(
        id="running",
        row="reconfigure",
        wanted="live",
        floor="live",
        text="the programs run already",
        when=said("running"),
        inside=False,
    ),
    Requirement(
        id="latency",
        row="target_use",
        wanted="qos",
        floor="cooperative",
        text="there is a latency target, and no p99 is promised",
        when=said("latency"),
        ways=(
            Way.TIMESLICE,
            Way.MPS,
            Way.MPS_PRIORITY,
            Way.MPS_STATIC,
            Way.MPS_STREAMS,
            Way.MIG_MPS,
            Way.MIG_TIMESLICE,
        ),
    ),
    Requirement(
        id="containment",
        row="sm_isolation",
        wanted="partition",
        floor="percentage",
        text="each is to be kept in its share",
        when=said("containment"),
        ways=tuple(way for way in _SHARED if way is not Way.STREAMS),
    ),
)
