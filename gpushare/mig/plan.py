"""A plan for MIG: what is kept, destroyed and created, its cost, and the steps in order. Frozen, pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from gpushare.base.model import GpuProcess, Holder
from gpushare.base.units import counted
from gpushare.mig.profile import ComputeInstance, GpuInstance, on_or_off
from gpushare.plan import Step


class Cost(NamedTuple):
    """The cost of a plan, the heaviest field first; smaller is better.

    Destroyed instances are counted as MIG devices: a GPU instance with three compute instances is three, an empty one
    is one. ``created`` counts GPU instances and compute instances. ``slices_destroyed`` weighs more than
    ``capacity_lost``, because a GPU with fewer instances always has more room.
    """

    busy_destroyed: int = 0
    named_destroyed: int = 0
    idle_destroyed: int = 0
    created: int = 0
    # Memory slices of the destroyed GPU instances.
    slices_destroyed: int = 0
    # The capacity that the instances of all GPUs of the plan take afterwards, in memory slices.
    capacity_lost: int = 0


class Action(str, Enum):
    """One kind of change, by its NVML call."""

    DESTROY_COMPUTE = "nvmlComputeInstanceDestroy"
    DESTROY_GPU_INSTANCE = "nvmlGpuInstanceDestroy"
    CREATE_GPU_INSTANCE = "nvmlDeviceCreateGpuInstanceWithPlacement"
    CREATE_COMPUTE = "nvmlGpuInstanceCreateComputeInstance"


@dataclass(frozen=True, kw_only=True)
class InstanceChange:
    """A GPU instance that is destroyed or created with all in it, or (``whole`` False) compute instances in one that stays.

    ``compute`` are those destroyed or created; what is to be created has no id.
    """

    instance: GpuInstance
    compute: tuple[ComputeInstance, ...]
    whole: bool

    def __str__(self) -> str:
        return (
            str(self.instance) if self.whole else f"{counted(len(self.compute), 'compute instance')} of {self.instance}"
        )

    @property
    def known_holders(self) -> list[GpuProcess | Holder]:
        """Return the processes that are seen in it, or that hold it; there may be others (`busy`)."""
        parts = (self.instance.holders, *(part.holders for part in self.compute))
        return [holder for part in parts for holder in part or ()]

    @property
    def busy(self) -> bool:
        """Return whether a process is, or may be, in what is destroyed."""
        return self.instance.held or any(part.busy for part in self.compute)

    @property
    def created(self) -> int:
        """Return how many instances a creation makes: the GPU instance, if it is new, and compute instances."""
        return self.whole + len(self.compute)


def whole_change(instance: GpuInstance) -> InstanceChange:
    """Return a GPU instance that is destroyed or created with all in it."""
    return InstanceChange(instance=instance, compute=instance.compute, whole=True)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One NVML call; without ``compute`` it is about the GPU instance itself."""

    action: Action
    gpu: int
    instance: GpuInstance
    compute: ComputeInstance | None = None


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """What happens on one GPU. A GPU instance whose compute instances change is in ``kept`` as it is now."""

    gpu: int
    uuid: str | None = None
    kept: tuple[GpuInstance, ...]
    destroyed: tuple[InstanceChange, ...] = ()
    created: tuple[InstanceChange, ...] = ()

    @property
    def changes(self) -> bool:
        return bool(self.destroyed or self.created)

    @property
    def destroyed_uuids(self) -> set[str]:
        return {part.uuid for change in self.destroyed for part in change.compute if part.uuid}

    @property
    def after(self) -> tuple[GpuInstance, ...]:
        """Return the GPU instances that it leaves, by place."""
        destroyed_parts = {change.instance.place: change.compute for change in self.destroyed if not change.whole}
        created_parts = {change.instance.place: change.compute for change in self.created if not change.whole}
        instances = [change.instance for change in self.created if change.whole]
        for instance in self.kept:
            kept = [part for part in instance.compute if part not in destroyed_parts.get(instance.place, ())]
            compute = (*kept, *created_parts.get(instance.place, ()))
            instances.append(replace(instance, compute=compute))
        return tuple(sorted(instances, key=lambda instance: instance.start))

    def calls(self) -> Iterator[Call]:
        """Yield the calls in an order that works: destroy before create, compute before GPU instance, big first."""
        for removed in self.destroyed:
            for part in removed.compute:
                yield Call(action=Action.DESTROY_COMPUTE, gpu=self.gpu, instance=removed.instance, compute=part)
            if removed.whole:
                yield Call(action=Action.DESTROY_GPU_INSTANCE, gpu=self.gpu, instance=removed.instance)
        for new in self.created:
            yield from self.creation_calls(new)

    def creation_calls(self, new: InstanceChange) -> Iterator[Call]:
        """Yield the calls that create one of ``created``: a new GPU instance first, then what is inside."""
        if new.whole:
            yield Call(action=Action.CREATE_GPU_INSTANCE, gpu=self.gpu, instance=new.instance)
        for part in new.compute:
            yield Call(action=Action.CREATE_COMPUTE, gpu=self.gpu, instance=new.instance, compute=part)


@dataclass(frozen=True, kw_only=True)
class MigPlan:
    """The cheapest way to the wish: one entry per GPU, changed or not."""

    gpus: tuple[GpuPlan, ...]
    cost: Cost

    @property
    def changes(self) -> bool:
        return any(gpu.changes for gpu in self.gpus)

    @property
    def destroyed(self) -> tuple[tuple[int, InstanceChange], ...]:
        """Return what it destroys, each with its GPU's index."""
        return tuple((gpu.gpu, change) for gpu in self.gpus for change in gpu.destroyed)


class Why(str, Enum):
    """Why there is no plan."""

    # Not even on these GPUs if they were empty.
    NEVER = "never"
    # Existing instances that may not be destroyed are in the way.
    BLOCKED = "blocked"


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """Why there is no plan, and what would help.

    ``instead`` is the cheapest plan if all existing instances may be destroyed (None: there is none).
    """

    why: Why
    message: str
    hint: str
    instead: MigPlan | None = None

    @property
    def would_go(self) -> tuple[tuple[int, InstanceChange], ...]:
        """Return the instances that the plan ``instead`` destroys, each with its GPU's index."""
        return () if self.instead is None else self.instead.destroyed


# Does one call; the text is the step that the call is part of.
Perform = Callable[[str, Call], object]


def steps_of(gpu: GpuPlan, perform: Perform) -> list[Step]:
    """Return the steps of one GPU, each one line of nvidia-smi; a step is one call, or two (``-cgi ... -C``)."""
    smi = f"nvidia-smi mig -i {gpu.gpu}"
    steps = [
        _destroy_step(call, smi, perform)
        for call in gpu.calls()
        if call.action in {Action.DESTROY_COMPUTE, Action.DESTROY_GPU_INSTANCE}
    ]
    for new in gpu.created:
        steps += _creation_steps(gpu, new, smi, perform)
    return steps


def shown_steps(plan: MigPlan, off: Sequence[int] = ()) -> Iterator[Step]:
    """Yield the steps of a plan that is only shown: they do nothing.

    ``off`` are the indexes of the GPUs whose MIG mode is off: before changes of such a GPU a step switches it on.
    """
    for gpu in plan.gpus:
        if gpu.changes and gpu.gpu in off:
            yield mode_step(gpu.gpu, lambda: None, enable=True)
        yield from steps_of(gpu, lambda *_: None)


def mode_step(gpu: int, act: Callable[[], None], back: Callable[[], None] | None = None, *, enable: bool) -> Step:
    """Return the step that switches MIG mode by ``act``, and is undone by ``back``."""
    return Step(
        what=f"switch MIG {on_or_off(enable)} for GPU {gpu}",
        command=f"nvidia-smi -i {gpu} -mig {int(enable)}",
        undo=f"nvidia-smi -i {gpu} -mig {int(not enable)}",
        do=act,
        revert=back,
    )


def _calls_step(what: str, command: str, calls: Sequence[Call], perform: Perform, undo: str | None = None) -> Step:
    """Return the step that does these calls by ``perform``."""

    def act() -> None:
        for call in calls:
            perform(what, call)

    return Step(what=what, command=command, undo=undo, do=act)


def _destroy_step(call: Call, smi: str, perform: Perform) -> Step:
    """Return the step that destroys one instance; its command begins with ``smi``."""
    owner = call.instance
    part = call.compute
    if part is not None:
        title = f"destroy compute instance {part.id} of GPU instance {owner.id} on GPU {call.gpu}"
        command = f"{smi} -dci -gi {owner.id} -ci {part.id}"
        undo = f"{smi} -cci {part.profile.id} -gi {owner.id}"
    else:
        title = f"destroy GPU instance {owner.id} ({owner.profile.name}) on GPU {call.gpu}"
        command = f"{smi} -dgi -gi {owner.id}"
        undo = f"{smi} -cgi {owner.profile.id}:{owner.start}"
    return _calls_step(title, command, [call], perform, undo)


def _creation_steps(gpu: GpuPlan, new: InstanceChange, smi: str, perform: Perform) -> Iterator[Step]:
    """Yield the steps that create one GPU instance or compute instances in it; their commands begin with ``smi``."""
    instance = new.instance
    calls = list(gpu.creation_calls(new))
    # GI and CI stand for the ids that the driver will give.
    owner, owner_id = f"GPU instance {instance.id} on GPU {gpu.gpu}", str(instance.id)
    if new.whole:
        owner, owner_id = "it", "GI"
        title = f"create {instance} on GPU {gpu.gpu}"
        command = f"{smi} -cgi {instance.profile.id}:{instance.start}"
        # By its place: its id is known only when it exists.
        undo = f"gpushare mig destroy {instance} -g {gpu.gpu}"
        if [part.profile.slices for part in new.compute] == [instance.profile.slices]:
            yield _calls_step(f"{title} with its compute instance", f"{command} -C", calls, perform, undo)
            return
        yield _calls_step(title, command, [calls.pop(0)], perform, undo)
    for part, call in zip(new.compute, calls, strict=True):
        start = "" if part.placement is None else f":{part.placement.start}"
        yield _calls_step(
            f"create {part.profile.name}.{instance.profile.name} in {owner}",
            f"{smi} -cci {part.profile.id}{start} -gi {owner_id}",
            [call],
            perform,
            f"{smi} -dci -gi {owner_id} -ci CI",
        )
