"""A plan for MIG: what stays, what goes, what comes, what it costs, and the steps in order. Frozen, pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gpushare.mig.profile import ComputeInstance, ComputeProfile, GpuInstance, Placement, Profile


class Cost(NamedTuple):
    """What a plan costs, in the order of weight; smaller is better.

    Instances destroyed are counted as MIG devices: a GPU instance with three compute instances is three, an empty
    one is one. Created are GPU instances and compute instances.
    """

    busy_destroyed: int = 0
    named_destroyed: int = 0
    idle_destroyed: int = 0
    created: int = 0
    # Memory slices of the GPU instances destroyed: of two idle ones the smaller goes. Before fragmentation,
    # because a GPU with less on it always has more room.
    slices_destroyed: int = 0
    # `fragmentation.capacity_lost` of all GPUs of the plan, afterwards.
    capacity_lost: int = 0


class Action(str, Enum):
    """One kind of step, with the NVML call that it is."""

    DESTROY_COMPUTE = "nvmlComputeInstanceDestroy"
    DESTROY_GPU_INSTANCE = "nvmlGpuInstanceDestroy"
    CREATE_GPU_INSTANCE = "nvmlDeviceCreateGpuInstanceWithPlacement"
    CREATE_COMPUTE = "nvmlGpuInstanceCreateComputeInstance"


@dataclass(frozen=True, kw_only=True)
class Destroyed:
    """A GPU instance that goes with all in it, or (``whole`` False) some of its compute instances."""

    instance: GpuInstance
    compute: tuple[ComputeInstance, ...]
    whole: bool

    @property
    def busy(self) -> bool:
        """Return whether somebody is, or may be, in what goes."""
        held = self.instance.holders is None or bool(self.instance.holders)
        return held or any(one.busy for one in self.compute)


@dataclass(frozen=True, kw_only=True)
class NewCompute:
    """A compute instance to create; without a placement the driver chooses."""

    profile: ComputeProfile
    placement: Placement | None = None


@dataclass(frozen=True, kw_only=True)
class Created:
    """A GPU instance to create at an explicit placement, with its compute instances.

    ``into`` is the GPU instance that exists when only compute instances are created in it.
    """

    profile: Profile
    placement: Placement
    compute: tuple[NewCompute, ...]
    into: GpuInstance | None = None

    def __str__(self) -> str:
        return f"{self.profile.name}:{self.placement.start}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call. ``instance`` is the GPU instance that exists, or None for one that this plan creates."""

    action: Action
    gpu: int
    profile: Profile
    placement: Placement
    instance: GpuInstance | None = None
    # DESTROY_COMPUTE: what goes; CREATE_COMPUTE: what comes.
    compute: ComputeInstance | None = None
    new_compute: NewCompute | None = None


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """What happens on one GPU. A GPU instance whose compute instances change is in ``kept`` as it is now."""

    gpu: int
    uuid: str | None = None
    kept: tuple[GpuInstance, ...]
    destroyed: tuple[Destroyed, ...] = ()
    created: tuple[Created, ...] = ()

    @property
    def changes(self) -> bool:
        """Return whether anything is to be done."""
        return bool(self.destroyed or self.created)

    def steps(self) -> Iterator[Step]:
        """Yield the calls in an order that works: destroy before create, compute before GPU instance, big first."""
        for gone in self.destroyed:
            one = gone.instance
            place = {"gpu": self.gpu, "profile": one.profile, "placement": one.placement, "instance": one}
            for compute in gone.compute:
                yield Step(action=Action.DESTROY_COMPUTE, compute=compute, **place)  # type: ignore[arg-type]
            if gone.whole:
                yield Step(action=Action.DESTROY_GPU_INSTANCE, **place)  # type: ignore[arg-type]
        for new in self.created:
            place = {"gpu": self.gpu, "profile": new.profile, "placement": new.placement, "instance": new.into}
            if new.into is None:
                yield Step(action=Action.CREATE_GPU_INSTANCE, **place)  # type: ignore[arg-type]
            for part in new.compute:
                yield Step(action=Action.CREATE_COMPUTE, new_compute=part, **place)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class MigPlan:
    """The cheapest way to the wish: one entry per GPU given, in their order, changed or not."""

    gpus: tuple[GpuPlan, ...]
    cost: Cost

    @property
    def changes(self) -> bool:
        """Return whether anything is to be done."""
        return any(gpu.changes for gpu in self.gpus)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the calls in order: one GPU after the other, so that an error leaves the rest untouched."""
        return tuple(step for gpu in self.gpus for step in gpu.steps())


class Why(str, Enum):
    """Why there is no plan."""

    # Not even on these GPUs when they are empty.
    NEVER = "never"
    # Something that is there, and may not be destroyed, is in the way.
    BLOCKED = "blocked"


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """Why the wish cannot be had, and what would help.

    ``instead`` is the cheapest plan when everything may be destroyed: what would have to go. ``most`` is, for a wish
    of one kind, how many of it these GPUs hold when they are empty.
    """

    why: Why
    message: str
    hint: str
    instead: MigPlan | None = None
    most: int | None = None

    @property
    def would_go(self) -> tuple[tuple[int, Destroyed], ...]:
        """Return what would have to go, each with its GPU's index."""
        gpus = () if self.instead is None else self.instead.gpus
        return tuple((gpu.gpu, gone) for gpu in gpus for gone in gpu.destroyed)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a plan; ``steps`` are the NVML calls that it stands for."""

    what: str
    command: str
    undo: str | None
    steps: tuple[Step, ...]


def rows(plan: MigPlan) -> list[Row]:
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
