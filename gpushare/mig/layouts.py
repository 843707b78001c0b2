"""MIG layouts with everything that a change must know: names, grants, and the holders of each instance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from gpushare.base.errors import GpushareError, NoPermission
from gpushare.mig.daemons import idle_daemon_pids
from gpushare.mig.driver import HIDDEN, MigReader
from gpushare.mig.holders import claimed_instances, instance_holders, open_device_files, with_name
from gpushare.mig.ledger import NamedInstance, Spot, made_by_gpushare, names_of
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout

if TYPE_CHECKING:
    from gpushare.base.model import Gpu, GpuProcess, Holder
    from gpushare.host.host import Host
    from gpushare.host.open_files import OpenFiles


def layouts_of(
    host: Host,
    gpus: Sequence[Gpu],
    hidden: dict[int, GpushareError] | None = None,
    *,
    names: Mapping[str, NamedInstance] | None = None,
) -> list[Layout]:
    """Return the layouts of GPUs (with their processes): from NVML, names, open files and claims.

    ``hidden`` gets the error of each GPU whose instances the driver hides, and the layout is empty; without it the error is
    raised.
    """
    reader = MigReader(host.nvml)
    names = names_of(host) if names is None else names
    claims = claimed_instances(host)
    if claims is not None:
        # A change claims the instances that it destroys: its own claims must not block its rollback.
        claims = {uuid: claim for uuid, claim in claims.items() if claim.pid != os.getpid()}
    # In another PID namespace NVML lists no processes, so an empty list means unknown.
    blind = host.processes.namespace_is_host() is False
    # Read once, and only if a GPU has instances.
    files = cache(partial(open_device_files, host))
    made = cache(partial(made_by_gpushare, host))
    layouts = []
    for gpu in gpus:
        try:
            layout = reader.layout(replace(gpu, processes=None) if blind and not gpu.processes else gpu)
        except NoPermission as error:
            if hidden is None or error.code != HIDDEN:
                raise
            hidden[gpu.index] = error
            layout = Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=())
        if layout.instances:
            facts = _HostFacts(host, gpu, names, claims, files(), made())
            layout = replace(layout, instances=tuple(facts.with_facts(instance) for instance in layout.instances))
        layouts.append(layout)
    return layouts


class _HostFacts:
    """What sources other than NVML know of a GPU's instances: names, grants, claims, open files."""

    def __init__(
        self,
        host: Host,
        gpu: Gpu,
        names: Mapping[str, NamedInstance],
        claims: Mapping[str, Holder] | None,
        files: OpenFiles,
        made: frozenset[Spot],
    ) -> None:
        self._host, self._gpu, self._claims, self._made = host, gpu, claims, made
        self._names = {named.place: named for named in names.values() if named.gpu_uuid == gpu.uuid}
        self._node_holders = instance_holders(host, gpu, files)
        # Our MPS daemons without clients do not count as holders: a change stops them first.
        self._idle_daemons = idle_daemon_pids(host, gpu)

    def with_facts(self, instance: GpuInstance) -> GpuInstance:
        """Return an instance as NVML reports it with its name and grants, its holders, and whether gpushare made it."""
        named = self._names.get(instance.place)
        return replace(
            instance,
            name=None if named is None else named.name,
            granted=() if named is None else named.users,
            made=(self._gpu.uuid, *instance.place) in self._made,
            holders=self._all_holders(instance.holders, self._node_holders.get((instance.id, None), ())),
            compute=tuple(self._compute_with_facts(instance.id, compute) for compute in instance.compute),
        )

    def _compute_with_facts(self, instance_id: int, compute: ComputeInstance) -> ComputeInstance:
        others = [*self._node_holders.get((instance_id, compute.id), ())]
        claim = (self._claims or {}).get(compute.uuid or "")
        if claim is not None:
            others.append(claim)
        return replace(compute, holders=self._all_holders(compute.holders, others))

    def _all_holders(
        self, listed: tuple[GpuProcess | Holder, ...] | None, others: Sequence[Holder]
    ) -> tuple[GpuProcess | Holder, ...] | None:
        """Return the processes that NVML lists and other holders, without idle daemons; None: some are unknown."""
        if listed is None or self._claims is None:
            return None
        return tuple(with_name(self._host, each) for each in (*listed, *others) if each.pid not in self._idle_daemons)
