"""What brings MIG back: the undo of a failed change, the recovery of an interrupted one, and what neither could restore.

Only what a change itself created, by its journal, is destroyed again; what others made meanwhile stays.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, OperationFailed
from gpushare.base.selection import refuse_silent_gpus
from gpushare.base.units import ranges
from gpushare.host.host import Host
from gpushare.host.nvml import NvmlReader
from gpushare.mig.daemons import recover_daemons
from gpushare.mig.driver import MigChanges, MigReader
from gpushare.mig.grant import grant_commands, reapply_grants
from gpushare.mig.layouts import layouts_of
from gpushare.mig.ledger import ChangeRecord, MigLedger, changing_names, names_of
from gpushare.mig.plan import Action, Call, steps_of
from gpushare.mig.profile import NOT_THERE
from gpushare.mig.shape import Creation, GpuShape, Proof, Restoration, differences, shape_of
from gpushare.mig.wish import placed_request

RECOVER: Final = "gpushare mig recover"
ACCEPT: Final = f"or accept it as it is: {RECOVER} --forget"


# -- the calls of a change, and the undo of one GPU ------------------------------------------------


class Calls:
    """Does the calls of the plan of one GPU, and knows the ids of the GPU instances that it has created."""

    def __init__(self, nvml: NvmlReader) -> None:
        self._changes = MigChanges(nvml)
        # By first memory slice.
        self._new_ids: dict[int, int] = {}

    def do(self, call: Call) -> int | None:
        """Do one call; return the id of what it created."""
        instance, part = call.instance, call.compute
        if call.action is Action.CREATE_GPU_INSTANCE:
            # Only a profile of the catalogue, without a host, has no id.
            number = self._changes.create_gpu_instance(call.gpu, instance.profile.id or 0, instance.placement)
            self._new_ids[instance.start] = number
            return number
        if part is None:
            self._changes.destroy_gpu_instance(call.gpu, instance.id)
        elif call.action is Action.CREATE_COMPUTE:
            return self._changes.create_compute_instance(
                call.gpu, self._owner_id(call), part.profile.slices, part.placement
            )
        else:
            self._changes.destroy_compute_instance(call.gpu, instance.id, part.id)
        return None

    def creation(self, gpu_uuid: str, call: Call) -> Creation | None:
        """Return what a call is about to create, with the ids that exist before it; None: it creates nothing."""
        instance, part = call.instance, call.compute
        creation = Creation(gpu=gpu_uuid, profile=instance.profile.name, start=instance.start)
        if call.action is Action.CREATE_GPU_INSTANCE:
            return replace(creation, there=self._changes.gpu_instance_ids(call.gpu, instance.profile.id or 0))
        if call.action is not Action.CREATE_COMPUTE or part is None:
            return None
        owner, slices = self._owner_id(call), part.profile.slices
        existing_ids = self._changes.compute_instance_ids(call.gpu, owner, slices)
        return replace(creation, instance=owner, slices=slices, there=existing_ids)

    def _owner_id(self, call: Call) -> int:
        """Return the id of the GPU instance of a call. Raises KeyError: the plan creates it, and that has failed."""
        instance = call.instance
        return self._new_ids[instance.start] if instance.id == NOT_THERE else instance.id


def creation_made(host: Host, begun: Creation, index: int, number: int) -> Creation:
    """Return what was created, with the id that it got; a compute instance with its MIG UUID if the driver reports it."""
    made = Creation(gpu=begun.gpu, profile=begun.profile, start=begun.start, instance=number)
    if begun.slices is None:
        return made
    # Handles on MIG devices keep them in use.
    host.nvml.restart()
    devices = host.nvml.gpu(index).mig_instances
    host.nvml.restart()
    ids = begun.instance, number
    uuid = next((mig.uuid for mig in devices if (mig.gpu_instance_id, mig.compute_instance_id) == ids), None)
    return replace(made, instance=begun.instance, compute=number, uuid=uuid)


def shape_now(host: Host, index: int) -> GpuShape:
    """Return the shape of a GPU as a fresh reading of the driver has it: a change is checked against it."""
    host.nvml.restart()
    gpu = host.nvml.gpu(index)
    refuse_silent_gpus(gpu)
    return shape_of(MigReader(host.nvml).layout(gpu), mig_enabled=gpu.mig_enabled)


def restore(host: Host, before: GpuShape, proof: Proof) -> tuple[str, ...]:
    """Bring a GPU back to ``before``: destroy what the change created, and create again what is missing.

    An error does not end it: the layout that is read back decides. Returns in words the instances that stay because
    ``proof`` does not show that the change created them.

    Raises:
        OperationFailed: something could not be restored; the message names all of it.
    """
    host.nvml.restart()
    restoration = Restoration(layouts_of(host, [host.nvml.gpu(before.index)])[0], before, proof)
    trouble = list(restoration.lost)
    # Reading has opened handles.
    host.nvml.restart()
    calls = Calls(host.nvml)
    for step in steps_of(restoration.plan, lambda _, call: calls.do(call)):
        try:
            step.do()
        except (GpushareError, KeyError) as error:
            trouble.append(f"{step.what}: {error}")
    # An instance is open to all users until its grants are restored.
    trouble += reapply_grants(host, before.uuid)
    present = shape_now(host, before.index).without(restoration.others)
    # The mode is restored after the instances.
    wrong = differences(present, replace(before, mig_enabled=None))
    if wrong:
        raise OperationFailed(
            f"could not be restored: {'; '.join(wrong)} ({'; '.join(dict.fromkeys(trouble)) or 'no reason given'})",
            f"see: gpushare mig status -g {before.index}; then: {'; '.join(as_commands([before]))}",
            gpu=str(before.index),
            code="not_restored",
        )
    return tuple(f"{instance} on GPU {before.index}" for instance in restoration.others)


def as_commands(shapes: Iterable[GpuShape]) -> list[str]:
    """Return the gpushare commands that give GPUs these shapes: one for all GPUs of one shape."""
    gpus: dict[tuple[str, str], list[int]] = {}
    for shape in shapes:
        gpus.setdefault(_verb_and_rest(shape), []).append(shape.index)
    return [
        f"gpushare mig {verb} -g {ranges(indexes).replace(' ', '')}{rest}" for (verb, rest), indexes in gpus.items()
    ]


def _verb_and_rest(shape: GpuShape) -> tuple[str, str]:
    """Return the words before and after ``-g GPU`` in the command that gives it a shape: ``apply``, ``3g.40gb:4``."""
    if shape.mig_enabled is False:
        return "disable", " --destroy"
    if not shape.instances:
        return "destroy all", ""
    return "apply", f" {shell_wish(shape)}"


def shell_wish(shape: GpuShape) -> str:
    """Return the instances of a shape as `mig apply` takes them, quoted for the shell: ``3g.40gb:4 1g.10gb:0``."""
    wish = (
        placed_request(instance.profile, instance.start, [part.slices for part in instance.compute])
        for instance in shape.instances
    )
    return shlex.join(word for request in wish for word in str(request).split())


# -- what changes left -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """One thing that a change left; ``id`` is the check of `gpushare doctor`, ``at`` the step at which the change died."""

    id: str
    seen: str
    remedy: str
    at: str | None = None
    # The UUIDs of the GPUs of the change; empty: unknown.
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.seen}: {self.remedy}"


def visible_leftovers(host: Host) -> list[Leftover]:
    """Return what changes of this user and of root left, as far as it can be read; root's is recovered with sudo."""
    visible: list[Leftover] = []
    for directory in host.run_directories:
        sudo = "" if directory == host.run_directory else "sudo "
        with contextlib.suppress(GpushareError):
            visible += (
                replace(leftover, remedy=leftover.remedy.replace(RECOVER, f"{sudo}{RECOVER}"))
                for leftover in leftovers(host, MigLedger(replace(host, run_directory=directory)))
            )
    return visible


def leftovers(host: Host, ledger: MigLedger) -> list[Leftover]:
    """Return what changes left, an interrupted one first, even if its journal cannot be read.

    While a change is running, nothing counts as left.
    """
    lost = [] if ledger.is_running() else lost_layouts(host, ledger)
    try:
        change = ledger.interrupted_change()
    except OperationFailed as error:
        return [Leftover(id="mig.interrupted", seen=error.message, remedy=error.hint), *lost]
    if change is None:
        return lost
    seen = f"'{change.title}' was interrupted"
    return [Leftover(id="mig.interrupted", seen=seen, remedy=RECOVER, at=change.step, gpus=_uuids(change)), *lost]


def _uuids(change: ChangeRecord) -> tuple[str, ...]:
    return tuple(shape.uuid for shape in change.before)


def lost_layouts(host: Host, ledger: MigLedger) -> list[Leftover]:
    """Return what each change could not restore and is still missing."""
    lost = []
    for path, change in ledger.failed_changes():
        if change is None:
            seen = f"{path}, the record of what could not be restored, cannot be read"
            lost.append(Leftover(id="mig.not_restored", seen=seen, remedy=f"see: gpushare mig status; {ACCEPT}"))
        elif wrong := unrestored_differences(host, change):
            seen = f"'{change.title}' failed, and this could not be restored: {'; '.join(wrong)}"
            back = as_commands(at_current_indexes(host, change.before))
            remedy = f"restore it: {'; '.join(back)}" if back else "see: gpushare mig status"
            lost.append(Leftover(id="mig.not_restored", seen=seen, remedy=f"{remedy}; {ACCEPT}", gpus=_uuids(change)))
    return lost


def unrestored_differences(host: Host, change: ChangeRecord) -> tuple[str, ...]:
    """Return in words what a failed change has left different; nothing if all is as before it, or all as after it.

    Instances of others do not count.
    """
    wrong = _differences_now(host, change, change.before)
    return wrong if wrong and _differences_now(host, change, change.after) else ()


def _index_by_uuid(host: Host) -> dict[str, int]:
    return {gpu.uuid: gpu.index for gpu in host.nvml.identities() if gpu.uuid}


def at_current_indexes(host: Host, shapes: Iterable[GpuShape]) -> tuple[GpuShape, ...]:
    """Return shapes with the current indexes of their GPUs; those whose GPU is missing are left out."""
    index = _index_by_uuid(host)
    return tuple(replace(shape, index=index[shape.uuid]) for shape in shapes if shape.uuid in index)


def _differences_now(host: Host, change: ChangeRecord, shapes: tuple[GpuShape, ...]) -> tuple[str, ...]:
    """Return in words how the GPUs of a change differ now from these shapes, one for each GPU; empty: they do not.

    Instances at places that the change had neither before nor after are others' and do not count.
    """
    index_of = _index_by_uuid(host)
    words: list[str] = []
    for shape, before, after in zip(shapes, change.before, change.after, strict=True):
        if shape.uuid not in index_of:
            words.append(f"GPU {shape.index} ({shape.uuid}) is missing")
            continue
        gpu = host.nvml.gpu(index_of[shape.uuid])
        if gpu.error is not None:
            words.append(gpu.error)
            continue
        try:
            present = shape_of(MigReader(host.nvml).layout(gpu), mig_enabled=gpu.mig_enabled)
        except GpushareError as error:
            words.append(f"GPU {gpu.index}: {error.message}")
            continue
        ours = {instance.place for instance in (*before.instances, *after.instances)}
        others = [instance for instance in present.instances if instance.place not in ours]
        words += differences(present.without(others), replace(shape, index=gpu.index))
    return tuple(words)


# -- recovery --------------------------------------------------------------------------------------


def recover(host: Host, ledger: MigLedger, *, retry: bool = False) -> tuple[str, ...]:
    """Finish or undo an interrupted change, under the lock; return what was done, in words.

    A complete change is kept; otherwise every GPU of the change is restored. What cannot be restored is reported, also
    later (`lost_layouts`), and is tried again only with ``retry``, so that nothing changes behind the user's back.

    Raises:
        OperationFailed: something could not be restored (code ``not_restored``), or the journal cannot be read.
    """
    change = ledger.current_change()
    done = [] if change is None else _finish_or_undo(host, ledger, change)
    for path, failed in ledger.failed_changes():
        if failed is None:
            continue
        is_restored = not unrestored_differences(host, failed)
        if not is_restored and not retry:
            continue
        try:
            change = _with_current_indexes(host, failed)
            if not is_restored:
                staying = _undo_change(host, change)
                done += [f"'{change.title}', which had failed, is now undone", *staying]
            _forget_lost_names(host, change)
        except GpushareError:
            # `lost_layouts` still reports it.
            continue
        done += _restore_access(host, change)
        # Else what a later change does to these GPUs would be reported as lost by this one.
        ledger.drop(path)
    return tuple(done)


def is_complete(host: Host, change: ChangeRecord) -> bool:
    """Return whether an interrupted change was complete, so that nothing would be undone."""
    try:
        return _is_as_planned(host, _with_current_indexes(host, change))
    except GpushareError:
        return False


def naming_commands(before: GpuShape, after: GpuShape, users: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the commands that give instances which a change removes their names and grants (``users`` by name) again."""
    staying = {instance.place for instance in after.instances}
    commands: list[str] = []
    for instance in before.instances:
        if instance.name and instance.place not in staying:
            commands.append(f"gpushare mig name {instance.name} {instance} -g {before.index}")
            commands += grant_commands(instance.name, users.get(instance.name, ()))
    return commands


def accept_losses(host: Host, ledger: MigLedger, *, dry_run: bool) -> tuple[str, ...]:
    """Forget what could not be restored, and set aside a journal that cannot be read; return what was done, in words.

    Raises:
        BadUsage: an interrupted change is not undone yet (``not_recovered``).
    """
    done = []
    try:
        change = ledger.current_change()
    except OperationFailed:
        set_aside = "would be set aside" if dry_run else f"was set aside as {ledger.set_aside()}"
        done.append(f"the journal of a MIG change, which cannot be read, {set_aside}")
    else:
        if change is not None:
            raise BadUsage(
                f"'{change.title}' was interrupted and is not undone yet",
                f"undo it first: {RECOVER}; only what cannot be restored is forgotten",
                code="not_recovered",
            )
    forgotten = "would be forgotten" if dry_run else "is forgotten"
    done += [f"{lost.seen}; this {forgotten}" for lost in lost_layouts(host, ledger)]
    if not dry_run:
        for path, _ in ledger.failed_changes():
            ledger.drop(path)
    return tuple(done)


def _finish_or_undo(host: Host, ledger: MigLedger, change: ChangeRecord) -> list[str]:
    """Keep an interrupted change that was complete, else undo it; return what was done, in words."""
    try:
        change = _with_current_indexes(host, change)
        complete = _is_as_planned(host, change)
        staying = [] if complete else _undo_change(host, change)
    except OperationFailed as error:
        if error.code == "not_restored":
            ledger.give_up()
            raise error.restated(hint=f"try again: {RECOVER}; or {error.hint}; {ACCEPT}") from error
        raise
    _forget_lost_names(host, change)
    if complete:
        ledger.complete(change)
        changed = [words for pair in zip(change.after, change.before, strict=True) for words in differences(*pair)]
        words = "; ".join(changed) or "names and grants may have changed, see: gpushare mig status"
        done = [f"'{change.title}', which was interrupted, was complete and stays: {words}"]
    else:
        ledger.end()
        done = [f"'{change.title}', which was interrupted at '{change.step or 'its start'}', was undone"]
    return [*done, *staying, *_restore_access(host, change)]


def _restore_access(host: Host, change: ChangeRecord) -> list[str]:
    """Restore the grants and daemons of existing instances; return what was done, or failed, in words."""
    done: list[str] = []
    for shape in change.before:
        done += reapply_grants(host, shape.uuid)
        gpu = host.nvml.gpu(shape.index)
        if gpu.error is None:
            done += recover_daemons(host, gpu, change.daemons)
    return done


def _with_current_indexes(host: Host, change: ChangeRecord) -> ChangeRecord:
    """Return the change with the current indexes of its GPUs: a GPU that fell off the bus renumbers the others."""
    before = at_current_indexes(host, change.before)
    after = at_current_indexes(host, change.after)
    present = {shape.uuid for shape in before}
    lost = [shape for shape in change.before if shape.uuid not in present]
    if lost:
        names = ", ".join(f"GPU {shape.index} ({shape.uuid})" for shape in lost)
        raise OperationFailed(
            f"'{change.title}' was interrupted, and {names} is missing; nothing was undone",
            "; ".join(["see: gpushare mig status", *(f"then: {command}" for command in as_commands(change.before))]),
            gpu=lost[0].index,
            code="not_restored",
        )
    return replace(change, before=before, after=after)


def _forget_lost_names(host: Host, change: ChangeRecord) -> None:
    """Forget the names that the change gave, or that were there before, if their instance does not exist."""
    shapes = {shape.uuid: shape_now(host, shape.index) for shape in change.before}
    existing = {(uuid, *instance.place) for uuid, shape in shapes.items() for instance in shape.instances}
    existed = {(shape.uuid, *instance.place) for shape in change.before for instance in shape.instances}
    lost = []
    for named in names_of(host).values():
        of_change = named.spot in existed or (named.name in change.names and named.gpu_uuid in shapes)
        if of_change and named.spot not in existing:
            lost.append(named.name)
    if lost:
        with changing_names(host) as names:
            for name in lost:
                names.pop(name, None)


def _is_as_planned(host: Host, change: ChangeRecord) -> bool:
    """Return whether every GPU of a change has the shape that the change was to give it."""
    return not any(differences(shape_now(host, shape.index), shape) for shape in change.after)


def _undo_change(host: Host, change: ChangeRecord) -> list[str]:
    """Restore all GPUs of a change; return in words which instances stay there, because they are not the change's own.

    Raises:
        OperationFailed: one could not be restored (code ``not_restored``).
    """
    trouble: list[GpushareError] = []
    staying: list[str] = []
    for before in change.before:
        try:
            for instance in _undo_gpu(host, before, change.proof):
                staying.append(f"{instance} is there and stays: nothing proves that this change created it")
        except GpushareError as error:
            trouble.append(error)
    if trouble:
        raise OperationFailed(
            f"'{change.title}' was interrupted; " + "; ".join(error.message for error in trouble),
            "; ".join(dict.fromkeys(error.hint for error in trouble)),
            gpu=trouble[0].gpu,
            code="not_restored",
        )
    return staying


def _undo_gpu(host: Host, before: GpuShape, proof: Proof) -> Sequence[str]:
    """Restore the MIG mode and the instances of one GPU; returns and raises as `restore`."""
    changes = MigChanges(host.nvml)
    # Current and pending: setting a mode cancels a pending one, too.
    mode = changes.mode(before.index)
    if before.mig_enabled and mode != (True, True):
        changes.set_mode(before.index, enabled=True)
    # Instances can change only while MIG is on.
    others = restore(host, before, proof)
    if before.mig_enabled is False and mode != (False, False):
        host.nvml.restart()
        changes.set_mode(before.index, enabled=False)
    return others
