"""A change of MIG as a transaction: journal before each step, read back after it, the old placements on an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpushare.actions.mig_after import daemon_steps_after, daemon_steps_before
from gpushare.actions.mig_bind import regrant
from gpushare.actions.mig_evict import evict_step, holders_of, refuse_claimed
from gpushare.actions.mig_layouts import layouts_of
from gpushare.actions.mig_mode import check_mode_change, mode_step
from gpushare.actions.plan import Plan, Step
from gpushare.errors import GpushareError, OperationFailed
from gpushare.host.mig import MigReader
from gpushare.host.mig_changes import MigChanges
from gpushare.mig.plan import Action, Destroyed, GpuPlan
from gpushare.mig.plan import Step as MigStep
from gpushare.mig.shape import GpuShape, InstanceShape, differences, restoration, shape_after, shape_of
from gpushare.mig.words import Row, rows_of
from gpushare.selection import Device

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mig_journal import Journal
    from gpushare.mig.profile import GpuInstance, Layout
    from gpushare.model import Gpu


@dataclass(frozen=True, kw_only=True)
class GpuChange:
    """What happens to one GPU: its instances, and its mode (None: stays)."""

    gpu: Gpu
    layout: Layout
    plan: GpuPlan
    enable: bool | None = None

    @property
    def changes(self) -> bool:
        """Return whether anything is to be done."""
        return self.plan.changes or self.enable is not None

    @property
    def before(self) -> GpuShape:
        """Return what is there."""
        return shape_of(self.layout, mig_enabled=self.gpu.mig_enabled)

    @property
    def after(self) -> GpuShape:
        """Return what is to be."""
        return shape_after(self.plan, mig_enabled=self.gpu.mig_enabled if self.enable is None else self.enable)


@dataclass(frozen=True, kw_only=True)
class MigChange:
    """A change of several GPUs, with the plan that carries it out."""

    gpus: tuple[GpuChange, ...]
    plan: Plan
    notes: tuple[str, ...] = field(default=())
    # The names that it gives.
    names: tuple[str, ...] = field(default=())


def plan_change(
    host: Host,
    changes: Sequence[GpuChange],
    journal: Journal,
    *,
    title: str,
    evict: Collection[tuple[int, int]] = (),
    first: Sequence[Step] = (),
    after: Sequence[Step] = (),
) -> MigChange:
    """Return the transaction for what the planner found; ``evict`` holds (GPU index, GPU instance id).

    ``first`` are steps before everything: a name is bound early, so that a crash does not lose it. ``after`` are steps
    that follow when the instances are there.

    Raises:
        InUse: somebody is on a GPU whose mode is to change, or in an MPS daemon on an instance that goes.
        NotSupported: the GPU has no MIG.
    """
    steps: list[Step] = []
    daemons: list[Step] = []
    notes: list[str] = []
    for change in changes:
        if not change.changes:
            continue
        if change.enable is not None:
            ending = [pid for gone in _evicted(change, evict) for pid in holders_of(gone)]
            bare = not change.plan.created
            notes += check_mode_change(host, change.gpu, enable=change.enable, bare=bare, ending=ending)
        work, then = _steps(host, change, journal, evict)
        steps += work
        daemons += then
    # Daemons last, for all GPUs: what was stopped is forgotten only when nothing can be undone any more.
    everything = (*first, *steps, *daemons, *after)
    return MigChange(gpus=tuple(changes), plan=Plan(title=title, steps=everything), notes=tuple(notes))


def _evicted(change: GpuChange, evict: Collection[tuple[int, int]]) -> list[Destroyed]:
    return [gone for gone in change.plan.destroyed if (change.gpu.index, gone.instance.id) in evict]


def _steps(
    host: Host, change: GpuChange, journal: Journal, evict: Collection[tuple[int, int]]
) -> tuple[list[Step], list[Step]]:
    """Return the steps of one GPU, and those for its daemons when the instances of all GPUs are there."""
    gpu = change.gpu
    going = {part.uuid for gone in change.plan.destroyed for part in gone.compute if part.uuid}
    if change.enable and gpu.uuid:
        # MIG takes the whole GPU away from a daemon that serves it.
        going.add(gpu.uuid)
    evicted = _evicted(change, evict)
    forced = {part.uuid for gone in evicted for part in gone.compute if part.uuid}
    steps = list(daemon_steps_before(host, gpu, going, evicted=forced))
    for gone in evicted:
        refuse_claimed(host, gpu, gone)
    steps += [evict_step(host, gpu, gone) for gone in evicted if holders_of(gone)]
    if change.enable:
        steps.append(mode_step(host, gpu, journal, enable=True))
    steps += _instance_steps(host, change, journal)
    if change.enable is False:
        steps.append(mode_step(host, gpu, journal, enable=False))
    devices = {mig.uuid: Device(gpu=gpu, mig=mig) for mig in gpu.mig_instances}
    back = set(_coming_back(change.plan))
    then = daemon_steps_after(
        host,
        {uuid: device for uuid, device in devices.items() if uuid in back},
        gone=going - back,
        stayed=[device for uuid, device in devices.items() if uuid not in going],
    )
    return steps, list(then)


def _coming_back(plan: GpuPlan) -> Iterator[str]:
    """Yield the UUIDs of the MIG devices that go and are made again: of the same size, in the same place."""
    made = [(new.profile.name, new.placement.start, part) for new in plan.created for part in new.compute]
    for gone in plan.destroyed:
        place = gone.instance.profile.name, gone.instance.start
        for part in gone.compute:
            # Without a placement the driver chooses, and may choose the same.
            again = next(
                (
                    one
                    for one in made
                    if one[:2] == place
                    and one[2].profile.slices == part.profile.slices
                    and one[2].placement in {None, part.placement}
                ),
                None,
            )
            if part.uuid and again is not None:
                made.remove(again)
                yield part.uuid


def _instance_steps(host: Host, change: GpuChange, journal: Journal) -> list[Step]:
    work = _Instances(host, change, journal)
    lines = list(rows_of(change.plan))

    def step(number: int, row: Row) -> Step:
        return Step(
            what=row.what,
            command=row.command,
            undo=row.undo,
            do=lambda: work.do(row, last=number == len(lines) - 1),
            # Undoing one is undoing all of this GPU: read from the host, not from what was meant.
            revert=work.restore if number == 0 else None,
        )

    return [step(number, row) for number, row in enumerate(lines)]


class _Instances:
    """The instances of one GPU while they change."""

    def __init__(self, host: Host, change: GpuChange, journal: Journal) -> None:
        self._host, self._change, self._journal = host, change, journal
        self._made: dict[int, int] = {}
        self._begun = False

    def do(self, row: Row, *, last: bool) -> None:
        if not self._begun:
            # Our own handles on MIG devices would keep them in use.
            self._host.nvml.restart()
            self._begun = True
        for step in row.steps:
            self._journal.note(f"{row.what}: {step.action.value}")
            perform(MigChanges(self._host.nvml), step, self._made)
        if last:
            self._verify()

    def _verify(self) -> None:
        now = look(self._host, self._change.gpu.index)
        wrong = differences(now, shape_after(self._change.plan, mig_enabled=True))
        if wrong:
            raise OperationFailed(
                f"the driver accepted all, and the layout is another: {'; '.join(wrong)}",
                "see: gpushare mig status",
                gpu=str(self._change.gpu.index),
                code="not_held",
            )

    def restore(self) -> None:
        if self._begun:
            restore(self._host, self._change.before, self._change.after)


def perform(changes: MigChanges, step: MigStep, made: dict[int, int]) -> None:
    """Do one NVML call of a plan; ``made`` holds the ids of new GPU instances by their first slice.

    Raises:
        GpushareError: as the call of `MigChanges`.
    """
    gpu, existing = step.gpu, step.instance
    if step.action is Action.CREATE_GPU_INSTANCE:
        # Offline profiles have no id, and no host either.
        made[step.placement.start] = changes.create_gpu_instance(gpu, step.profile.id or 0, step.placement)
        return
    owner = made[step.placement.start] if existing is None else existing.id
    if step.action is Action.CREATE_COMPUTE and step.new_compute is not None:
        new = step.new_compute
        changes.create_compute_instance(gpu, owner, new.profile.slices, new.placement)
    elif step.action is Action.DESTROY_COMPUTE and step.compute is not None:
        changes.destroy_compute_instance(gpu, owner, step.compute.id)
    else:
        changes.destroy_gpu_instance(gpu, owner)


def look(host: Host, index: int) -> GpuShape:
    """Return what a GPU looks like now, asked anew.

    Raises:
        GpushareError: NVML does not answer.
    """
    host.nvml.restart()
    gpu = host.nvml.gpu(index)
    if gpu.error is not None:
        raise OperationFailed(gpu.error, "see: gpushare status", gpu=str(index))
    return shape_of(MigReader(host.nvml).layout(gpu), mig_enabled=gpu.mig_enabled)


def restore(host: Host, before: GpuShape, after: GpuShape) -> None:
    """Bring a GPU back to ``before``: what ``after`` meant to make goes, what is missing is made again in its place.

    Goes on after an error, and reads back.

    Raises:
        OperationFailed: something could not come back; all of it is named.
    """
    host.nvml.restart()
    layout = layouts_of(host, [host.nvml.gpu(before.index)])[0]
    plan, lost = restoration(layout, before, after)
    trouble: list[str] = list(lost)
    made: dict[int, int] = {}
    changes = MigChanges(host.nvml)
    # Letting go of the handles that the look has opened.
    host.nvml.restart()
    for row in rows_of(plan):
        try:
            for step in row.steps:
                perform(changes, step, made)
        except (GpushareError, KeyError) as error:
            trouble.append(f"{row.what}: {error}")
    # What was made again is open to everybody, until its grants are back.
    trouble += regrant(host, before.uuid)
    left = differences(look(host, before.index), _instances_only(before))
    if left:
        raise OperationFailed(
            f"could not come back: {'; '.join(left)} ({'; '.join(dict.fromkeys(trouble)) or 'no reason given'})",
            f"see: gpushare mig status -g {before.index}; then: {as_command(before)}",
            gpu=str(before.index),
            code="not_restored",
        )


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


def created_in(change: MigChange, layouts: Mapping[int, Layout]) -> list[tuple[int, GpuInstance]]:
    """Return the GPU instances that a change has made, as they are now, each with its GPU's index."""
    places = {(one.gpu.index, new.profile.name, new.placement.start) for one in change.gpus for new in one.plan.created}
    return [
        (index, instance)
        for index, layout in layouts.items()
        for instance in layout.instances
        if (index, instance.profile.name, instance.start) in places
    ]
