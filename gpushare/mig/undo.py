"""The calls of a MIG change one by one, and the way back from them: only what it has made itself is taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import GpushareError, OperationFailed
from gpushare.mig.driver import MigChanges, MigReader
from gpushare.mig.grant import regrant
from gpushare.mig.layouts import layouts_of
from gpushare.mig.plan import Action, rows_of
from gpushare.mig.plan import Step as MigStep
from gpushare.mig.shape import (
    Begun,
    GpuShape,
    InstanceShape,
    Made,
    Proof,
    differences,
    left_alone,
    restoration,
    shape_of,
)

if TYPE_CHECKING:
    from gpushare.host.host import Host


class CallFailed(OperationFailed):
    """Something could not come back because the driver refused a call, and nobody is in the way: worth another try."""


def perform(changes: MigChanges, step: MigStep, made: dict[int, int]) -> int | None:
    """Do one NVML call of a plan, and return the id of what it made; ``made`` holds new GPU instances by first slice.

    Raises:
        GpushareError: as the call of `MigChanges`.
    """
    gpu, existing = step.gpu, step.instance
    if step.action is Action.CREATE_GPU_INSTANCE:
        # Offline profiles have no id, and no host either.
        made[step.placement.start] = changes.create_gpu_instance(gpu, step.profile.id or 0, step.placement)
        return made[step.placement.start]
    owner = made[step.placement.start] if existing is None else existing.id
    if step.action is Action.CREATE_COMPUTE and step.new_compute is not None:
        new = step.new_compute
        return changes.create_compute_instance(gpu, owner, new.profile.slices, new.placement)
    if step.action is Action.DESTROY_COMPUTE and step.compute is not None:
        changes.destroy_compute_instance(gpu, owner, step.compute.id)
    else:
        changes.destroy_gpu_instance(gpu, owner)
    return None


def begun_by(changes: MigChanges, gpu: str, step: MigStep, made: Mapping[int, int]) -> Begun | None:
    """Return what a call is about to make, with what is there already; None: it makes nothing."""
    if step.action not in {Action.CREATE_GPU_INSTANCE, Action.CREATE_COMPUTE}:
        return None
    begun = Begun(gpu=gpu, profile=step.profile.name, start=step.placement.start)
    if step.action is Action.CREATE_GPU_INSTANCE:
        return replace(begun, there=changes.gpu_instance_ids(step.gpu, step.profile.id or 0))
    slices = None if step.new_compute is None else step.new_compute.profile.slices
    instance = made[step.placement.start] if step.instance is None else step.instance.id
    there = None if slices is None else changes.compute_instance_ids(step.gpu, instance, slices)
    return replace(begun, instance=instance, slices=slices, there=there)


def made_by(host: Host, begun: Begun, index: int, number: int) -> Made:
    """Return what was made, with its MIG UUID where the driver tells it."""
    if begun.slices is None or begun.instance is None:
        return Made(gpu=begun.gpu, profile=begun.profile, start=begun.start, instance=number)
    # Handles on MIG devices would keep them in use.
    host.nvml.restart()
    devices = host.nvml.gpu(index).mig_instances
    host.nvml.restart()
    place = begun.instance, number
    uuid = next((one.uuid for one in devices if (one.gpu_instance_id, one.compute_instance_id) == place), None)
    return Made(
        gpu=begun.gpu, profile=begun.profile, start=begun.start, instance=begun.instance, compute=number, uuid=uuid
    )


def look(host: Host, index: int) -> GpuShape:
    """Return what a GPU looks like now.

    Raises:
        GpushareError: NVML does not answer.
    """
    host.nvml.restart()
    gpu = host.nvml.gpu(index)
    if gpu.error is not None:
        raise OperationFailed(gpu.error, "see: gpushare status", gpu=str(index))
    return shape_of(MigReader(host.nvml).layout(gpu), mig_enabled=gpu.mig_enabled)


def restore(host: Host, before: GpuShape, after: GpuShape, proof: Proof | None) -> tuple[str, ...]:
    """Bring a GPU back to ``before``: what the change has made goes, what is missing is made again in its place.

    Goes on after an error, and reads back. Returns in words what is there and is left, because nothing proves that this
    change made it.

    Raises:
        OperationFailed: something could not come back; all of it is named.
    """
    host.nvml.restart()
    layout = layouts_of(host, [host.nvml.gpu(before.index)])[0]
    plan, lost = restoration(layout, before, after, proof)
    others = left_alone(layout, before, after, proof)
    trouble: list[str] = list(lost)
    made: dict[int, int] = {}
    refused = False
    changes = MigChanges(host.nvml)
    # Letting go of the handles that the look has opened.
    host.nvml.restart()
    for row in rows_of(plan):
        try:
            for step in row.steps:
                perform(changes, step, made)
        except (GpushareError, KeyError) as error:
            refused = True
            trouble.append(f"{row.what}: {error}")
    # What was made again is open to everybody, until its grants are back.
    trouble += regrant(host, before.uuid)
    now = look(host, before.index)
    now = replace(now, instances=tuple(one for one in now.instances if one.place not in others))
    left = differences(now, _instances_only(before))
    if left:
        raise (CallFailed if refused and not lost else OperationFailed)(
            f"could not come back: {'; '.join(left)} ({'; '.join(dict.fromkeys(trouble)) or 'no reason given'})",
            f"see: gpushare mig status -g {before.index}; then: {as_command(before)}",
            gpu=str(before.index),
            code="not_restored",
        )
    return tuple(f"{profile}:{start} on GPU {before.index}" for profile, start in others)


def _instances_only(shape: GpuShape) -> GpuShape:
    return GpuShape(uuid=shape.uuid, index=shape.index, mig_enabled=None, instances=shape.instances)


def as_command(shape: GpuShape) -> str:
    """Return the gpushare command that makes a GPU look like this."""
    if shape.mig_enabled is False:
        return f"gpushare mig disable -g {shape.index} --destroy"
    if not shape.instances:
        return f"gpushare mig destroy all -g {shape.index}"
    return f"gpushare mig apply -g {shape.index} {' '.join(map(_words, shape.instances))}"


def _words(one: InstanceShape) -> str:
    slices = int(one.profile.partition("g")[0])
    parts = sorted((part.slices for part in one.compute), reverse=True)
    if parts in ([], [slices]):
        return f"{one.profile}:{one.start}"
    return " ".join(
        f"{part}c.{one.profile}:{one.start}" + (f"*{number}" if number > 1 else "")
        for part, number in Counter(parts).items()
    )
