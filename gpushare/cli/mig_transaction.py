"""How every MIG change goes: look, plan, and under the lock recover, plan anew, carry out, look again."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpushare.cli.common import gpus_of, note, settings
from gpushare.errors import BadUsage, GpushareError, InUse, NotSupported

if TYPE_CHECKING:
    from gpushare.actions.mig_change import GpuChange, MigChange
    from gpushare.host.host import Host
    from gpushare.host.mig_journal import Journal
    from gpushare.mig.plan import NoPlan, Plan
    from gpushare.mig.planner import Target
    from gpushare.mig.profile import GpuInstance, Layout
    from gpushare.model import Gpu
    from gpushare.show.result import Result


def current(host: Host, gpu: str | None, *, named: bool = False) -> tuple[Sequence[Gpu], Sequence[Layout]]:
    """Return the GPUs that a change is for, as they are at this moment, with their layouts.

    On a host with several GPUs a change names its GPU; with ``named`` the instances that it is about do.

    Raises:
        NotSupported: one of them has no MIG.
        BadUsage, NotFound, GpuLost: as `select_for_change`; BadUsage also for an instance (-g MIG-...).
    """
    from gpushare.actions.mig_layouts import layouts_of
    from gpushare.selection import Device, select_for_change

    found = gpus_of(host)
    if named and gpu is None:
        devices: Sequence[Device] = [Device(gpu=one) for one in found if one.error is None and one.mig_capable]
        devices = devices or select_for_change("all", found)
    else:
        devices = select_for_change(gpu, found)
    part = next((device for device in devices if device.mig is not None), None)
    if part is not None and part.mig is not None:
        # Else "-g MIG-... apply" would clear its neighbours away.
        raise BadUsage(
            f"{part.mig.uuid} is an instance; this changes the whole GPU {part.gpu.index}",
            f"name the GPU: -g {part.gpu.index}; one instance goes with: gpushare mig destroy {part.mig.uuid}",
            gpu=str(part.gpu.index),
            code="whole_gpu",
        )
    gpus = list({device.gpu.index: device.gpu for device in devices}.values())
    able = ",".join(str(one.index) for one in gpus if one.mig_capable)
    for one in gpus:
        if not one.mig_capable:
            raise NotSupported(
                f"GPU {one.index} ({one.name or 'unknown model'}) has no MIG",
                f"name those that have it: -g {able}" if able else "see what it has: gpushare compare",
                gpu=str(one.index),
                code="no_mig",
            )
    return gpus, layouts_of(host, gpus)


def evicted(words: Iterable[str] | None, layouts: Sequence[Layout]) -> list[Target]:
    """Return the instances that ``--evict`` names.

    Raises:
        NotFound, BadUsage: as `find_targets`.
    """
    from gpushare.mig.target import find_targets

    return [target for word in words or () for target in find_targets(word, layouts)]


def planned_or_refused(found: Plan | NoPlan) -> Plan:
    """Return the plan.

    Raises:
        NotSupported: there is none, and never will be here.
        InUse: something that may not go is in the way.
    """
    from gpushare.mig.plan import Plan, Why

    if isinstance(found, Plan):
        return found
    if found.why is Why.NEVER:
        raise NotSupported(found.message, found.hint, code="never_fits")
    from gpushare.host.holders import remedy
    from gpushare.model import Holder

    held = [part for _, gone in found.would_go for part in (gone.instance.holders, *(c.holders for c in gone.compute))]
    holders = [one for part in held for one in part or () if isinstance(one, Holder)]
    raise InUse(found.message, remedy(holders) or found.hint, code="no_room")


def carried(command: str, make: Callable[[Host, Journal], MigChange], *, refresh_cdi: bool = False) -> Result:
    """Carry a change out, or with --dry-run only show it; ``make`` looks and plans.

    Raises:
        GpushareError: of the look, of the plan, or of the step that failed and was rolled back.
    """
    from gpushare.actions.mig_recover import is_complete
    from gpushare.actions.mig_transact import transact
    from gpushare.host.mig_journal import Journal

    host = settings.connect()
    journal = Journal(host)
    if settings.dry_run:
        change = _with_cdi(host, make(host, journal), refresh=refresh_cdi)
        left = journal.left()
        notes: tuple[str, ...] = ()
        # One that is complete would not be touched.
        if left is not None and not is_complete(host, left):
            notes = (f"first '{left.title}', which was interrupted, would be undone",)
        return _shown(host, command, change, notes, dry_run=True)
    if journal.left() is None:
        # Once before the lock: what is refused anyway changes nothing.
        make(host, journal)
    # Else what was interrupted comes first: it may be all that is in the way.
    need_root(host)
    with recovered(host, journal) as notes:
        change = _with_cdi(host, make(host, journal), refresh=refresh_cdi)
        transact(host, journal, change, _say if settings.verbose else None)
        return _shown(host, command, change, notes, dry_run=False)


@contextlib.contextmanager
def recovered(host: Host, journal: Journal) -> Iterator[tuple[str, ...]]:
    """Hold the lock of all MIG changes, and undo what was interrupted first; yield what was done, in words.

    It is said too where the change that follows is refused.

    Raises:
        OperationFailed: as `recover`, and `Journal.locked`.
    """
    from gpushare.actions.mig_recover import recover
    from gpushare.host.leftovers import sweep

    with journal.locked():
        sweep(host)
        notes = recover(host, journal)
        try:
            yield notes
        except GpushareError:
            for one in notes:
                note(one)
            raise


def need_root(host: Host) -> None:
    """Refuse who may not change MIG.

    Raises:
        NoPermission: this user may not.
    """
    from gpushare.host.mig_changes import may_change

    if not may_change(host):
        from gpushare.errors import NoPermission

        raise NoPermission("changing MIG needs root", "run it as root: sudo gpushare ...; or look first: --dry-run")


def _with_cdi(host: Host, change: MigChange, *, refresh: bool) -> MigChange:
    if not refresh:
        return change
    from gpushare.actions.mig_after import refresh_steps

    plan = replace(change.plan, steps=(*change.plan.steps, *refresh_steps(host)))
    return replace(change, plan=plan)


def _shown(host: Host, command: str, change: MigChange, notes: Sequence[str], *, dry_run: bool) -> Result:
    from gpushare.mig.plan import Cost
    from gpushare.mig.plan import Plan as MigPlan
    from gpushare.show.mig import plan_text
    from gpushare.show.plan import plan_result

    said = [*notes, *change.notes, *change.plan.notes]
    made: list[dict[str, Any]] = []
    undo = None
    if change.plan.steps and not dry_run:
        made = _made(host, change)
        said += _after(host, change)
        undo = _undo(change)
        said.append(f"undo: {undo}")
    result = plan_result(command, change.plan.steps, dry_run=dry_run, notes=list(dict.fromkeys(said)))
    plan = MigPlan(gpus=tuple(one.plan for one in change.gpus), cost=Cost())
    picture = plan_text(plan, {one.gpu.index: one.layout for one in change.gpus}) if plan.changes else None
    lines = [f"{one['profile']}:{one['start']} on GPU {one['gpu']}: {', '.join(one['uuids'])}" for one in made]
    text = "\n".join(filter(None, [picture, *lines])) or None
    return replace(result, data={**result.data, "created": made, "undo": undo}, text=text)


def _made(host: Host, change: MigChange) -> list[dict[str, Any]]:
    from gpushare.actions.mig_change import created_in
    from gpushare.host.mig import MigReader

    gpus = [host.nvml.gpu(one.gpu.index) for one in change.gpus if one.plan.created]
    layouts = {gpu.index: MigReader(host.nvml).layout(gpu) for gpu in gpus if gpu.error is None}
    stayed = _stayed(change)
    return [_row(index, instance, stayed) for index, instance in created_in(change, layouts)]


def _stayed(change: MigChange) -> set[str | None]:
    """Return the UUIDs of compute instances beside which others were made in their GPU instance."""
    plans = [one.plan for one in change.gpus]
    inside = {c.uuid for plan in plans for new in plan.created if new.into is not None for c in new.into.compute}
    return inside - {c.uuid for plan in plans for gone in plan.destroyed for c in gone.compute}


def _row(index: int, instance: GpuInstance, stayed: set[str | None]) -> dict[str, Any]:
    return {
        "gpu": index,
        "gpu_instance_id": instance.id,
        "profile": instance.profile.name,
        "start": instance.start,
        "uuids": [one.uuid for one in instance.compute if one.uuid and one.uuid not in stayed],
    }


def _after(host: Host, change: MigChange) -> list[str]:
    from gpushare.actions.mig_after import cdi_notes

    gpus = [host.nvml.gpu(one.gpu.index) for one in change.gpus]
    notes = list(cdi_notes(host, gpus))
    notes += [
        f"GPU {gpu.index}: with MIG on and no instance, no CUDA program can use it"
        for gpu in gpus
        if gpu.mig_enabled and not gpu.mig_instances
    ]
    return notes


def _undo(change: MigChange) -> str:
    return "; ".join(command for one in change.gpus if one.changes for command in _undo_of(one))


def _undo_of(change: GpuChange) -> list[str]:
    from gpushare.actions.mig_undo import as_command

    before, gpu = change.before, change.gpu.index
    if before.mig_enabled and change.enable is False and not before.instances:
        return [f"gpushare mig enable -g {gpu}"]
    here = {one.place for one in change.after.instances}
    lost = [one for one in before.instances if one.name and one.place not in here]
    granted = {one.name: one.granted for one in change.layout.instances}
    words = [as_command(before)]
    for one in lost:
        words.append(f"gpushare mig name {one.name} {one.profile}:{one.start} -g {gpu}")
        words += [f"gpushare mig grant {one.name} {shlex.quote(user)}" for user in granted.get(one.name, ())]
    return words


def _say(step: Any) -> None:
    sys.stderr.write(f"{step.what}\n  {step.command}\n")
    sys.stderr.flush()
