"""The steps of a plan in words, each with the plain ``nvidia-smi`` command and its undo. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpushare.mig.plan import Action, Created, GpuPlan, Plan, Step


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a plan; ``steps`` are the NVML calls that it stands for."""

    what: str
    command: str
    undo: str | None
    steps: tuple[Step, ...]


def rows(plan: Plan) -> list[Row]:
    """Return the lines of a plan, in the order of its steps."""
    return [row for gpu in plan.gpus for row in rows_of(gpu)]


def rows_of(gpu: GpuPlan) -> Iterator[Row]:
    """Yield the lines of one GPU, in the order of its steps."""
    steps = list(gpu.steps())
    gone = {Action.DESTROY_COMPUTE, Action.DESTROY_GPU_INSTANCE}
    yield from (_gone(step) for step in steps if step.action in gone)
    comes = iter([step for step in steps if step.action not in gone])
    for new in gpu.created:
        yield from _new(gpu.gpu, new, comes)


def _gone(step: Step) -> Row:
    instance = step.instance.id if step.instance is not None else None
    where = f"nvidia-smi mig -i {step.gpu}"
    if step.action is Action.DESTROY_COMPUTE and step.compute is not None:
        return Row(
            what=f"destroy compute instance {step.compute.id} of GPU instance {instance} on GPU {step.gpu}",
            command=f"{where} -dci -gi {instance} -ci {step.compute.id}",
            undo=f"{where} -cci {step.compute.profile.id} -gi {instance}",
            steps=(step,),
        )
    return Row(
        what=f"destroy GPU instance {instance} ({step.profile.name}) on GPU {step.gpu}",
        command=f"{where} -dgi -gi {instance}",
        undo=f"{where} -cgi {step.profile.id}:{step.placement.start}",
        steps=(step,),
    )


def _new(gpu: int, new: Created, steps: Iterator[Step]) -> Iterator[Row]:
    where = f"nvidia-smi mig -i {gpu}"
    whole = [part.profile.slices for part in new.compute] == [new.profile.slices]
    if new.into is None:
        taken = (next(steps), next(steps)) if whole else (next(steps),)
        yield Row(
            what=f"create {new} on GPU {gpu}" + (" with its compute instance" if whole else ""),
            command=f"{where} -cgi {new.profile.id}:{new.placement.start}" + (" -C" if whole else ""),
            undo=None,
            steps=taken,
        )
        if whole:
            return
    instance = str(new.into.id) if new.into is not None else "GI"
    for part in new.compute:
        place = "" if part.placement is None else f":{part.placement.start}"
        yield Row(
            what=f"create {part.profile.name}.{new.profile.name} in "
            + ("it" if new.into is None else f"GPU instance {instance} on GPU {gpu}"),
            command=f"{where} -cci {part.profile.id}{place} -gi {instance}",
            undo=None,
            steps=(next(steps),),
        )
