"""An instance for one job: made for it, and destroyed after it unless another program came in (`run --mig PROFILE --create`).

Its record is written before the instance is made. If gpushare dies, the guard of the job destroys the instance; if that
dies too, the next change of MIG, or `gpushare mig recover`, does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpushare.base.errors import BadUsage, GpushareError, InUse, OperationFailed
from gpushare.base.model import Gpu
from gpushare.base.typed import Count, Pid
from gpushare.base.values import dataclass
from gpushare.host.claims import live_claims
from gpushare.host.host import Host
from gpushare.host.identity import Identity, identity_of
from gpushare.host.store import Kept, RecordStore, any_lives
from gpushare.mig.change import gpu_change, plan_change, transact
from gpushare.mig.daemons import own_daemons
from gpushare.mig.driver import need_rights
from gpushare.mig.holders import no_plan_error
from gpushare.mig.layouts import layouts_of
from gpushare.mig.ledger import MigLedger
from gpushare.mig.places import single_request
from gpushare.mig.plan import MigPlan, NoPlan, whole_change
from gpushare.mig.planner import Target, plan_add, plan_destroy
from gpushare.mig.profile import GpuInstance, Layout
from gpushare.mig.recover import recover

# The driver takes a moment to notice that a program has ended.
_LEAVE_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class OnDemand(Kept):
    """An instance that is made for one job: its gpushare, and the place of the instance."""

    pid: Pid
    started: Count
    gpu_uuid: str
    profile: str
    start: Count

    def __str__(self) -> str:
        return f"{self.profile}:{self.start} of {self.gpu_uuid}"


ON_DEMAND: Final = RecordStore(OnDemand, "on-demand", "the record of an instance for one job", durable=True)


def plan_instance(host: Host, text: str, gpus: Sequence[Gpu]) -> MigPlan | NoPlan:
    """Return the plan that adds one instance of a profile to GPUs with MIG on, and destroys nothing.

    Raises:
        BadUsage: the text asks for a part of an instance.
        NoPermission: this user may not change MIG.
    """
    request = single_request(text)
    if request.compute:
        raise BadUsage(
            f"--create makes whole instances, and {request.single} is a part of one",
            f"give the profile of one: --mig {request.profile} --create",
            code="bad_mig",
        )
    need_rights(host)
    gpus_with_mig = [gpu for gpu in gpus if gpu.mig_enabled and gpu.error is None]
    return plan_add(layouts_of(host, gpus_with_mig), (request,))


def make_instance(host: Host, text: str, gpus: Sequence[Gpu]) -> OnDemand:
    """Make an instance for this process and return its record.

    Raises:
        InUse, NotSupported: there is no room for it, now or ever.
        GpushareError: as `plan_instance` and `transact`; then nothing is left of it.
    """
    ledger = MigLedger(host)
    with ledger.locked():
        recover(host, ledger)
        gpus = [host.nvml.gpu(gpu.index) for gpu in gpus]
        planned = plan_instance(host, text, gpus)
        if isinstance(planned, NoPlan):
            raise no_plan_error(planned)
        plan = next(gpu_plan for gpu_plan in planned.gpus if gpu_plan.changes)
        gpu = next(gpu for gpu in gpus if gpu.index == plan.gpu)
        (layout,) = layouts_of(host, [gpu])
        new = plan.created[0].instance

        # The record first: if gpushare dies, the instance is found by it and destroyed.
        me = identity_of(os.getpid()) or Identity(os.getpid(), 0)
        record = OnDemand(
            **me._asdict(),
            gpu_uuid=gpu.uuid or "",
            profile=new.profile.name,
            start=new.start,
            path=ON_DEMAND.path(host, f"{os.getpid()}-{plan.gpu}-{new.start}"),
        )
        ON_DEMAND.write(record)
        try:
            change = plan_change(host, [gpu_change(gpu, layout, plan)], ledger, title=f"create {new} for a job")
            transact(host, ledger, change)
        except GpushareError:
            # What could not be undone is removed by the next change of MIG.
            with contextlib.suppress(GpushareError):
                if _read_now(host, record).instance is None:
                    ON_DEMAND.forget(record.path)
            raise
    return record


def remove_instance(host: Host, record: OnDemand) -> str | None:
    """Destroy the instance of a job that has ended, and forget its record; return in words why it stays, if it does."""
    ledger = MigLedger(host)
    with ledger.locked():
        recover(host, ledger)
        return _destroy_unless_used(host, ledger, record)


def orphan_instances(host: Host) -> list[OnDemand]:
    """Return the records of instances whose gpushare has died."""
    return [record for record in ON_DEMAND.all(host, users=False) if not any_lives(host, record)]


def remove_orphans(host: Host, ledger: MigLedger) -> tuple[str, ...]:
    """Destroy the instances of jobs whose gpushare has died; the caller holds the lock. Return what was done, in words."""
    done = []
    for record in orphan_instances(host):
        try:
            obstacle = _destroy_unless_used(host, ledger, record)
        except GpushareError as error:
            done.append(f"{record} was made for a job that has ended, and could not be destroyed: {error.message}")
            continue
        outcome = f", and stays: {obstacle}" if obstacle else ": destroyed"
        done.append(f"{record} was made for a job that has ended{outcome}")
    # Those of an earlier boot, whose instances are gone.
    ON_DEMAND.sweep(host, lambda _: False)
    return tuple(done)


def sweep_orphans(host: Host) -> None:
    """Destroy the instances of jobs whose gpushare has died: what the guard of a job does. Raises as `remove_instance`."""
    if orphan_instances(host):
        ledger = MigLedger(host)
        with ledger.locked():
            recover(host, ledger)
            remove_orphans(host, ledger)


class _Now(NamedTuple):
    """The GPU of a record as it is now; ``instance`` is what is at the place of the record (None: nothing)."""

    gpu: Gpu
    layout: Layout
    instance: GpuInstance | None


def _destroy_unless_used(host: Host, ledger: MigLedger, record: OnDemand) -> str | None:
    """Destroy an instance that was made for a job, unless it is used; return what keeps it, or None.

    Its record stays if a job came in just now, or if it cannot be destroyed: the next change of MIG tries again.
    """
    gpu, layout, instance = _read_when_left(host, record)
    obstacle = None
    # One that gpushare has not made was put in its place.
    if instance is not None and instance.made:
        obstacle = _obstacle(host, gpu, instance)
        if obstacle is None:
            plan = plan_destroy([layout], [Target(layout.gpu, instance.id)])
            if isinstance(plan, NoPlan):
                raise no_plan_error(plan)
            change = plan_change(
                host, [gpu_change(gpu, layout, plan.gpus[0])], ledger, title=f"destroy {instance}, made for a job"
            )
            try:
                transact(host, ledger, change)
            except InUse as error:
                if any(claim.pid == os.getpid() for claim in (live_claims(host) or {}).values()):
                    # The claim of the job itself, which could not be removed, is in the way.
                    raise
                # A job came in just now, or the guard of one has not released the instance yet.
                return error.message
    ON_DEMAND.forget(record.path)
    return obstacle


def _read_when_left(host: Host, record: OnDemand) -> _Now:
    """Return the GPU of a record; wait up to five seconds while the driver still lists only ended processes in the instance."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while True:
        now = _read_now(host, record)
        instance = now.instance
        if instance is None or not instance.busy or _is_used(host, instance) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def _obstacle(host: Host, gpu: Gpu, instance: GpuInstance) -> str | None:
    """Return in words why an instance that was made for a job has to stay; None: it may be destroyed."""
    if instance.name:
        return "it has a name"
    uuids = {part.uuid for part in instance.compute}
    # Whoever has started a daemon there wants the instance; the daemon of the job is transient.
    if any(own.device.uuid in uuids and not own.record.transient for own in own_daemons(host, gpu)):
        return "an MPS daemon serves it"
    return "another program is in it" if instance.busy else None


def _read_now(host: Host, record: OnDemand) -> _Now:
    """Return the GPU of a record as it is now. Raises OperationFailed if it does not answer."""
    host.nvml.restart()
    index = next((gpu.index for gpu in host.nvml.identities() if gpu.uuid == record.gpu_uuid), None)
    if index is None:
        raise OperationFailed(f"{record.gpu_uuid} does not answer", "see: gpushare status", code="not_restored")
    gpu = host.nvml.gpu(index)
    (layout,) = layouts_of(host, [gpu])
    place = record.profile, record.start
    return _Now(gpu, layout, next((each for each in layout.instances if each.place == place), None))


def _is_used(host: Host, instance: GpuInstance) -> bool:
    """Return whether a process that lives is, or may be, in an instance."""
    if None in (instance.holders, *(part.holders for part in instance.compute)):
        return True
    return any(host.processes.describe(holder.pid) is not None for holder in whole_change(instance).known_holders)
