"""One case on one GPU: what the rules look at. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from gpushare.advice.here import mps_clients
from gpushare.advice.memory import CONTEXT_BYTES, MPS_CONTEXT_BYTES, Budget, budget
from gpushare.advice.slices import Share, Slices, addable, free_instances, slices_for
from gpushare.advice.table import Mechanism
from gpushare.advice.ways import Way
from gpushare.advice.workload import Isolation, Pattern, Role

if TYPE_CHECKING:
    from gpushare.advice.facts import GpuFacts, HostFacts
    from gpushare.advice.table import Table
    from gpushare.advice.workload import Case, Workload

VOLTA: Final = (7, 0)
HOPPER: Final = (9, 0)


@dataclass(frozen=True)
class Situation:
    """A case, the host and the GPU that it shall run on, and the table.

    ``cap`` is the thread percentage of an MPS client that was measured to be best (100: no cap), None where none was.
    """

    case: Case
    host: HostFacts
    gpu: GpuFacts
    table: Table
    cap: float | None = None

    # -- the case ----------------------------------------------------------------------------------

    @cached_property
    def several(self) -> bool:
        """Return whether more than one process is meant; who does not say how many, asks how to share."""
        return (self.case.processes or 2) > 1

    @cached_property
    def pair(self) -> bool:
        """Return whether a production job and an opportunistic one stand beside each other."""
        return self.case.roles == {Role.PRODUCTION, Role.OPPORTUNISTIC}

    @cached_property
    def idle_often(self) -> bool:
        """Return whether the work comes in bursts, or from people."""
        return self.case.pattern in {Pattern.INTERACTIVE, Pattern.BURSTY}

    @cached_property
    def saturating(self) -> bool | None:
        """Return whether a process fills the GPU; beside production the opportunistic job may."""
        ones = self.case.workloads
        if self.pair:
            ones = tuple(one for one in ones if one.role is Role.PRODUCTION)
        found = [one.saturating for one in ones]
        return True if True in found else None if None in found else False

    @cached_property
    def isolation(self) -> frozenset[Isolation]:
        """Return the isolation that was asked for."""
        return self.case.wanted_isolation or frozenset()

    @cached_property
    def apart(self) -> bool:
        """Return whether parties are to be kept from each other."""
        explicit = len(self.case.workloads) == 1 and (self.case.groups or 0) > 1
        return bool(
            explicit
            or self.isolation
            or self.case.any("bandwidth_qos")
            or not self.trusted
            or self.case.same_user is False
        )

    @cached_property
    def together(self) -> bool:
        """Return whether several processes need each other alive, so that none can wait for another to end."""
        needs = ("cooperating", "nccl", "ipc", "one_application")
        return self.several and not self.pair and any(self.case.any(need) for need in needs)

    @cached_property
    def gpus_to_have(self) -> tuple[GpuFacts, ...]:
        """Return this GPU, and the idle ones beside it that are not divided."""
        others = (one for one in self.host.gpus if one.index != self.gpu.index)
        return (self.gpu, *(one for one in others if one.error is None and one.processes == 0 and not one.mig_enabled))

    @cached_property
    def trusted(self) -> bool:
        """Return False when one of the parties is not trusted."""
        return not any(one.trusted is False for one in self.case.workloads)

    @cached_property
    def grouped(self) -> bool | None:
        """Return whether several processes belong to one party, so that they may share its part."""
        groups, processes = self.case.groups, self.case.processes
        return None if groups is None or processes is None else groups < processes

    # -- memory ------------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> Budget:
        """Return the memory without MPS."""
        return budget(self.case, self.gpu, mps=False)

    @cached_property
    def under_mps(self) -> Budget:
        """Return the memory under MPS."""
        return budget(self.case, self.gpu, mps=True)

    def budget_of(self, way: Way) -> Budget:
        """Return the memory for a way."""
        return self.under_mps if Mechanism.MPS in {way.outer, way.inner} else self.plain

    # -- MPS and MIG -------------------------------------------------------------------------------

    @property
    def before_volta(self) -> bool | None:
        """Return whether the GPU is older than Volta: MPS has no limits there, and takes fewer clients."""
        return None if self.gpu.compute_capability is None else self.gpu.compute_capability < VOLTA

    @cached_property
    def mps_clients(self) -> int | None:
        """Return how many clients MPS takes here, as `gpushare compare` says it; None when unknown."""
        return mps_clients(self.table, self.host, self.gpu)

    @property
    def mps_serves(self) -> bool:
        """Return whether an MPS daemon of the whole GPU is there already; those of instances go with MIG."""
        return self.gpu.mps_daemons > 0 and not self.gpu.mig_enabled

    @cached_property
    def instances(self) -> int | None:
        """Return how many MIG instances there can be: the table's number, or the driver's where that is less."""
        limit = self.table.cell(Mechanism.MIG, "max_partitions", self.host.driver).limit
        known = [one for one in (limit, self.gpu.largest_instance_count) if one is not None]
        return min(known, default=None)

    @cached_property
    def may_be_root(self) -> bool | None:
        """Return whether root's commands can be run: as the user said, else as root now; None: nobody knows."""
        return self.case.root if self.case.root is not None else self.host.root or None

    def shares(self, way: Way) -> tuple[Share, ...]:
        """Return what each instance must hold: a process with MIG alone, a party where it is shared inside."""
        ones = self.case.workloads
        if way is Way.MIG:
            count = self.case.processes or 2
            if len(ones) == 1:
                return (_share(ones[0], 1, CONTEXT_BYTES),) * count
            return tuple(_share(one, 1, CONTEXT_BYTES) for one in ones for _ in range(one.processes or 1))
        context = MPS_CONTEXT_BYTES if way is Way.MIG_MPS else CONTEXT_BYTES
        if len(ones) > 1:
            return tuple(
                _share(one, -(-(one.processes or 1) // (one.groups or 1)), context)
                for one in ones
                for _ in range(one.groups or 1)
            )
        processes = ones[0].processes or 2
        parties = self.case.groups or self._parties_for(processes)
        return (_share(ones[0], -(-processes // parties), context),) * parties

    def _parties_for(self, processes: int) -> int:
        """Return into how many instances processes without groups go: two to each at the least, evenly if that works."""
        most = max(1, min((self.instances or 7), processes // 2))
        return next((n for n in range(most, 1, -1) if processes % n == 0), most)

    def slices(self, way: Way) -> Slices | None:
        """Return the instances for a way; None: the driver lists no profiles, or there are too many to ask."""
        layout = self.gpu.layout
        if layout is None or not layout.profiles:
            return None
        shares = self.shares(way)
        most = self.instances
        if most is not None and len(shares) > most:
            return Slices(why_not=f"{len(shares)} instances are wanted, and this GPU has at most {most}", most=most)
        if len(shares) == 1:
            # One process leaves the other half to others, where half is enough for it.
            half = slices_for(layout, shares * 2)
            if half.why_not is None:
                return replace(half, profiles=half.profiles[:1])
        return slices_for(layout, shares)

    def held(self, way: Way) -> bool:
        """Return whether instances in which somebody works leave too little room for those of a way."""
        layout, slices = self.gpu.layout, self.slices(way)
        if layout is None or not self.gpu.mig_enabled or slices is None or not slices.profiles:
            return False
        if way is Way.MIG and self.free_now(way) is not None:
            return False
        busy = tuple(one for one in layout.instances if one.busy)
        return bool(busy) and not addable(replace(layout, instances=busy), slices.wish)

    def free_now(self, way: Way) -> list[str] | None:
        """Return idle instances that are there and hold the shares."""
        layout = self.gpu.layout
        return None if layout is None or not self.gpu.mig_enabled else free_instances(layout, self.shares(way))


def _share(workload: Workload, processes: int, context: int) -> Share:
    memory = 0 if workload.memory is None else processes * (workload.memory + context)
    return Share(memory, workload.sms or 0, bool(workload.graphics))
