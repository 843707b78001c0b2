"""The NVML calls of a MIG change, and their undo: only what the change itself created is destroyed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import GpushareError, OperationFailed
from gpushare.mig.driver import MigChanges, MigReader
from gpushare.mig.grant import regrant
from gpushare.mig.layouts import layouts_of
from gpushare.mig.plan import Action, Call, steps_of
from gpushare.mig.profile import NOT_THERE, GpuInstance
from gpushare.mig.shape import Creation, GpuShape, Proof, differences, left_alone, restoration, shape_of

if TYPE_CHECKING:
    from gpushare.host.host import Host


class CallFailed(OperationFailed):
    """Something could not be restored because a driver call failed, not because of other users: worth another try."""


def perform(changes: MigChanges, call: Call, made: dict[int, int]) -> int | None:
    """Do one call and return the id of what it created; ``made`` has the ids of new GPU instances by first slice."""
    gpu, one, part = call.gpu, call.instance, call.compute
    if call.action is Action.CREATE_GPU_INSTANCE:
        # Only a profile of the catalogue, without a host, has no id.
        made[one.start] = changes.create_gpu_instance(gpu, one.profile.id or 0, one.placement)
        return made[one.start]
    owner = _id_of(one, made)
    if part is None:
        changes.destroy_gpu_instance(gpu, owner)
    elif call.action is Action.CREATE_COMPUTE:
        return changes.create_compute_instance(gpu, owner, part.profile.slices, part.placement)
    else:
        changes.destroy_compute_instance(gpu, owner, part.id)
    return None


def _id_of(one: GpuInstance, made: Mapping[int, int]) -> int:
    return made[one.start] if one.id == NOT_THERE else one.id


def begun_by(changes: MigChanges, gpu: str, call: Call, made: Mapping[int, int]) -> Creation | None:
    """Return what a call is about to create, with the ids that exist; None: it creates nothing."""
    one, part = call.instance, call.compute
    begun = Creation(gpu=gpu, profile=one.profile.name, start=one.start)
    if call.action is Action.CREATE_GPU_INSTANCE:
        return replace(begun, there=changes.gpu_instance_ids(call.gpu, one.profile.id or 0))
    if call.action is not Action.CREATE_COMPUTE or part is None:
        return None
    owner, slices = _id_of(one, made), part.profile.slices
    there = changes.compute_instance_ids(call.gpu, owner, slices)
    return replace(begun, instance=owner, slices=slices, there=there)


def made_by(host: Host, begun: Creation, index: int, number: int) -> Creation:
    """Return what was created, with its MIG UUID if the driver reports it."""
    made = Creation(gpu=begun.gpu, profile=begun.profile, start=begun.start, instance=number)
    if begun.instance is None:
        return made
    # Handles on MIG devices keep them in use.
    host.nvml.restart()
    devices = host.nvml.gpu(index).mig_instances
    host.nvml.restart()
    place = begun.instance, number
    uuid = next((one.uuid for one in devices if (one.gpu_instance_id, one.compute_instance_id) == place), None)
    return replace(made, instance=begun.instance, compute=number, uuid=uuid)


def look(host: Host, index: int) -> GpuShape:
    """Return the shape of a GPU now."""
    host.nvml.restart()
    gpu = host.nvml.gpu(index)
    if gpu.error is not None:
        raise OperationFailed(gpu.error, "see: gpushare status", gpu=str(index))
    return shape_of(MigReader(host.nvml).layout(gpu), mig_enabled=gpu.mig_enabled)


def restore(host: Host, before: GpuShape, proof: Proof) -> tuple[str, ...]:
    """Bring a GPU back to ``before``: destroy what the change created, and create again what is missing.

    Goes on after an error, and reads back. Returns in words what stays because nothing proves that this change
    created it.

    Raises:
        OperationFailed: something could not be restored; the message names all of it.
    """
    host.nvml.restart()
    layout = layouts_of(host, [host.nvml.gpu(before.index)])[0]
    plan, lost = restoration(layout, before, proof)
    others = left_alone(layout, before, proof)
    trouble: list[str] = list(lost)
    made: dict[int, int] = {}
    refused = False
    changes = MigChanges(host.nvml)
    # Reading has opened handles.
    host.nvml.restart()
    for step in steps_of(plan, lambda _, call: perform(changes, call, made)):
        try:
            step.do()
        except (GpushareError, KeyError) as error:
            refused = True
            trouble.append(f"{step.what}: {error}")
    # An instance is open to everybody until its grants are restored.
    trouble += regrant(host, before.uuid)
    now = look(host, before.index)
    foreign = {one.place for one in others}
    now = replace(now, instances=tuple(one for one in now.instances if one.place not in foreign))
    left = differences(now, replace(before, mig_enabled=None))
    if left:
        raise (CallFailed if refused and not lost else OperationFailed)(
            f"could not be restored: {'; '.join(left)} ({'; '.join(dict.fromkeys(trouble)) or 'no reason given'})",
            f"see: gpushare mig status -g {before.index}; then: {as_command(before)}",
            gpu=str(before.index),
            code="not_restored",
        )
    return tuple(f"{one} on GPU {before.index}" for one in others)


def as_command(shape: GpuShape) -> str:
    """Return the gpushare command that gives a GPU this shape."""
    if shape.mig_enabled is False:
        return f"gpushare mig disable -g {shape.index} --destroy"
    if not shape.instances:
        return f"gpushare mig destroy all -g {shape.index}"
    return f"gpushare mig apply -g {shape.index} {' '.join(map(_words, shape.instances))}"


def _words(one: GpuInstance) -> str:
    parts = Counter(sorted((part.profile.slices for part in one.compute), reverse=True))
    if parts in (Counter(), Counter([one.profile.slices])):
        return str(one)
    return " ".join(f"{part}c.{one}" + (f"*{number}" if number > 1 else "") for part, number in parts.items())
