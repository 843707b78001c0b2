"""MIG layouts with everything that a change must know: names, grants, and the holders of each instance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.base.errors import GpushareError, NoPermission
from gpushare.mig.daemons import idle_daemon_pids
from gpushare.mig.driver import HIDDEN, MigReader
from gpushare.mig.holders import claimed_instances, instance_holders, look
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
    """Return the layouts of GPUs (with their processes): from NVML, names, open files and leases.

    Our own MPS daemons without clients do not count as holders: a change stops them first.

    ``hidden`` gets the GPUs whose instances the driver hides, with the error; their layouts are empty.
    """
    reader, names = MigReader(host.nvml), names_of(host) if names is None else names
    # A change holds leases on instances that go; during a rollback its own leases are not in the way.
    claims = claimed_instances(host)
    leases = None if claims is None else {uuid: claim for uuid, claim in claims.items() if claim.pid != os.getpid()}
    # NVML answers a foreign PID namespace with an empty list: whether anybody is there is unknown.
    blind = host.processes.namespace_is_host() is False
    layouts, files, made = [], None, None
    for gpu in gpus:
        try:
            layout = reader.layout(replace(gpu, processes=None) if blind and not gpu.processes else gpu)
        except NoPermission as error:
            if hidden is None or error.code != HIDDEN:
                raise
            hidden[gpu.index] = error
            layout = Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=())
        if layout.instances:
            files = files or look(host)
            made = made_by_gpushare(host) if made is None else made
            seen = _Seen(host, gpu, names, leases, files, made)
            layout = replace(layout, instances=tuple(seen.instance(instance) for instance in layout.instances))
        layouts.append(layout)
    return layouts


class _Seen:
    """What is known about one GPU from other sources than NVML."""

    def __init__(
        self,
        host: Host,
        gpu: Gpu,
        names: Mapping[str, NamedInstance],
        leases: Mapping[str, Holder] | None,
        files: OpenFiles,
        made: frozenset[Spot],
    ) -> None:
        self._host, self._gpu, self._leases, self._made = host, gpu, leases, made
        self._names = {named.place: named for named in names.values() if named.gpu_uuid == gpu.uuid}
        self._held, self._idle = instance_holders(host, gpu, files), idle_daemon_pids(host, gpu)

    def instance(self, one: GpuInstance) -> GpuInstance:
        named = self._names.get(one.place)
        return replace(
            one,
            name=None if named is None else named.name,
            granted=() if named is None else named.users,
            made=(self._gpu.uuid, *one.place) in self._made,
            holders=self._joined(one.holders, self._held.get((one.id, None), ())),
            compute=tuple(self._compute(one.id, part) for part in one.compute),
        )

    def _compute(self, instance: int, one: ComputeInstance) -> ComputeInstance:
        lease = None if self._leases is None else self._leases.get(one.uuid or "")
        more = (*self._held.get((instance, one.id), ()), *([] if lease is None else [lease]))
        return replace(one, holders=self._joined(one.holders, more))

    def _joined(
        self, told: tuple[GpuProcess | Holder, ...] | None, more: Sequence[Holder]
    ) -> tuple[GpuProcess | Holder, ...] | None:
        # Then its claims are unknown, too.
        if told is None or self._leases is None:
            return None
        return tuple(self._named(holder) for holder in (*told, *more) if holder.pid not in self._idle)

    def _named(self, one: GpuProcess | Holder) -> GpuProcess | Holder:
        """Add name and user; NVML has only PIDs."""
        if one.name is not None:
            return one
        info = self._host.processes.describe(one.pid)
        return one if info is None else replace(one, name=info.name, user=info.user)
