"""A change of MIG as a transaction: journal before each step, read back after it, the old placements on an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpushare.actions.mig_after import daemon_steps_after, daemon_steps_before
from gpushare.actions.mig_evict import evict_step, holders_of, refuse_claimed
from gpushare.actions.mig_mode import check_mode_change, mode_step
from gpushare.actions.mig_undo import begun_by, look, made_by, perform, restore
from gpushare.actions.plan import Plan, Step
from gpushare.errors import GpushareError, OperationFailed
from gpushare.host.mig_changes import NOT_READ_BACK, MigChanges
from gpushare.mig.plan import Destroyed, GpuPlan
from gpushare.mig.plan import Step as MigStep
from gpushare.mig.shape import GpuShape, differences, shape_after, shape_of
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
    last: list[Step] = []
    notes: list[str] = []
    for change in changes:
        if not change.changes:
            continue
        if change.enable is not None:
            ending = [pid for gone in _evicted(change, evict) for pid in holders_of(gone)]
            bare = not change.plan.created
            notes += check_mode_change(host, change.gpu, enable=change.enable, bare=bare, ending=ending)
        work, then, forgetting = _steps(host, change, journal, evict)
        steps += work
        daemons += then
        last += forgetting
    # What was stopped is forgotten only when nothing can be undone any more.
    everything = (*first, *steps, *daemons, *after, *last)
    return MigChange(gpus=tuple(changes), plan=Plan(title=title, steps=everything), notes=tuple(notes))


def _evicted(change: GpuChange, evict: Collection[tuple[int, int]]) -> list[Destroyed]:
    return [gone for gone in change.plan.destroyed if (change.gpu.index, gone.instance.id) in evict]


def _steps(
    host: Host, change: GpuChange, journal: Journal, evict: Collection[tuple[int, int]]
) -> tuple[list[Step], Sequence[Step], Sequence[Step]]:
    """Return the steps of one GPU, those for its daemons when the instances of all GPUs are there, and the very last."""
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
    then, last = daemon_steps_after(
        host,
        {uuid: device for uuid, device in devices.items() if uuid in back},
        gone=going - back,
        stayed=[device for uuid, device in devices.items() if uuid not in going],
    )
    return steps, then, last


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


@dataclass(frozen=True, kw_only=True)
class InstanceStep(Step):
    """A step on the instances of a GPU; ``work`` knows what its rollback left alone."""

    work: _Instances = field(repr=False, compare=False)


def _instance_steps(host: Host, change: GpuChange, journal: Journal) -> list[Step]:
    work = _Instances(host, change, journal)
    lines = list(rows_of(change.plan))

    def step(number: int, row: Row) -> Step:
        return InstanceStep(
            work=work,
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
        # In words, what a rollback found and left, because others made it.
        self.left_alone: tuple[str, ...] = ()

    def do(self, row: Row, *, last: bool) -> None:
        if not self._begun:
            # Our own handles on MIG devices would keep them in use.
            self._host.nvml.restart()
            self._begun = True
        for step in row.steps:
            self._do(row, step)
        if last:
            self._verify()

    def _do(self, row: Row, step: MigStep) -> None:
        """Do one call of the driver, and note what it makes: before with what is there, after with its ids."""
        changes = MigChanges(self._host.nvml)
        begun = begun_by(changes, self._change.before.uuid, step, self._made)
        self._journal.note(f"{row.what}: {step.action.value}", begun)
        try:
            made = perform(changes, step, self._made)
        except GpushareError as error:
            if error.code != NOT_READ_BACK:
                self._journal.refused()
            raise
        if begun is not None and made is not None:
            self._journal.made(made_by(self._host, begun, step.gpu, made))

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
            self.left_alone = restore(self._host, self._change.before, self._change.after, self._journal.proof)


def created_in(change: MigChange, layouts: Mapping[int, Layout]) -> list[tuple[int, GpuInstance]]:
    """Return the GPU instances that a change has made, as they are now, each with its GPU's index."""
    places = {(one.gpu.index, new.profile.name, new.placement.start) for one in change.gpus for new in one.plan.created}
    return [
        (index, instance)
        for index, layout in layouts.items()
        for instance in layout.instances
        if (index, instance.profile.name, instance.start) in places
    ]
