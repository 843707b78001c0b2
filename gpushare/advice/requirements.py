"""Requirements that name a row of the table: a way whose cell is too weak is refused. Pure.

Editing a cell of ``data/mechanisms.yaml`` therefore changes the advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.advice.rule import Kind, Reason
from gpushare.advice.situation import Situation
from gpushare.advice.table import Cell, Mechanism
from gpushare.advice.ways import Way
from gpushare.advice.workload import Isolation


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

    def reasons(self, situation: Situation, way: Way) -> Iterable[Reason]:
        """Yield what the requirement says of a way."""
        if way not in self.ways or way.outer is None:
            return
        applies = self.when(situation)
        if applies is False or (applies is None and self.unknown is None):
            return
        cell = situation.table.cell(way.outer, self.row, situation.host.driver)
        best = situation.table.level(way.outer, self.row, situation.host.driver, option=way.table_option)
        plainly = best if way is Way.MPS_STATIC else cell.level
        enough = situation.table.at_least(self.row, plainly, self.wanted)
        if applies is None:
            if not enough and not situation.table.at_least(self.row, best, self.floor):
                yield self._reason(cell, Kind.CONDITION, self.unknown or "", asked=True)
            return
        if not enough:
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
        when=lambda s: s.case.any("weights"),
        ways=(Way.TIMESLICE,),
    ),
    Requirement(
        id="vms",
        row="target_use",
        wanted="tenants",
        floor="qos",
        text="the parties are virtual machines",
        when=lambda s: s.case.any("vms"),
        inside=False,
    ),
    Requirement(
        id="ipc",
        row="interop",
        wanted="ipc",
        floor="ipc",
        text="the parties share GPU memory by CUDA IPC",
        when=lambda s: s.case.any("ipc"),
        ways=tuple(way for way in _SHARED if way not in {Way.MIG_MPS, Way.MIG_TIMESLICE}),
    ),
    Requirement(
        id="running",
        row="reconfigure",
        wanted="live",
        floor="live",
        text="the programs run already",
        when=lambda s: s.case.any("running"),
        inside=False,
    ),
    Requirement(
        id="latency",
        row="target_use",
        wanted="qos",
        floor="cooperative",
        text="there is a latency target, and no p99 is promised",
        when=lambda s: s.case.any("latency"),
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
        when=lambda s: s.case.any("containment"),
        ways=tuple(way for way in _SHARED if way is not Way.STREAMS),
    ),
)
