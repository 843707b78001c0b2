"""``gpushare mig`` create, destroy, enable, disable, apply, recover, name: every change is one transaction."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gpushare.base.errors import BadUsage, GpushareError, InUse, NotFound, NotSupported, OperationFailed
from gpushare.base.model import Gpu
from gpushare.base.selection import Device, no_mig_error, refuse_silent_gpus, select_for_change, titles
from gpushare.base.units import first_few, quoted, ranges
from gpushare.base.values import dataclass
from gpushare.cli.mig_files import OF_FILE, demands_of, read_config, typed_wish
from gpushare.cli.options import (
    NEEDED_MEMORY,
    NEEDED_SMS,
    PARTED_CONFIG,
    PARTED_EXACT,
    PARTED_FILE,
    WHOLE_GPU_OPTION,
    WISHES,
    Refused,
    argument,
    ask_and_carry_out,
    consented,
    flag,
    gpus_named,
    gpus_of,
    is_agreed,
    note,
    option,
    refuse,
    say_step,
    settings,
)
from gpushare.host.host import Host
from gpushare.mig.cdi import cdi_notes, refresh_steps
from gpushare.mig.change import GpuChange, MigChange, gpu_change, plan_change, transact
from gpushare.mig.driver import MigReader, may_change, need_rights
from gpushare.mig.grant import (
    Naming,
    binding_step,
    name_taken_error,
    name_upkeep_steps,
    need_root_to_grant,
    plan_grant,
    plan_names,
    plan_revoke,
    sudo_prefix,
)
from gpushare.mig.holders import no_plan_error
from gpushare.mig.layouts import layouts_of
from gpushare.mig.ledger import ChangeRecord, MigLedger, NamedInstance, Spot, check_name, names_of, refuse_name_of_root
from gpushare.mig.on_demand import orphan_instances, remove_orphans
from gpushare.mig.parted import Config, Demand
from gpushare.mig.plan import Cost, MigPlan, NoPlan
from gpushare.mig.planner import Target, plan_add, plan_destroy, plan_exact
from gpushare.mig.profile import Layout
from gpushare.mig.recover import (
    accept_losses,
    as_commands,
    at_current_indexes,
    is_complete,
    lost_layouts,
    naming_commands,
    shell_wish,
)
from gpushare.mig.recover import recover as recover_changes
from gpushare.mig.target import difference, find_targets
from gpushare.mig.wish import in_order, parse_wish
from gpushare.mps.home import start_command
from gpushare.plan import Loss, Plan, one_shell_line
from gpushare.show.mig import plan_text
from gpushare.show.plan import PlanAnswer, plan_result, with_answer, with_undo
from gpushare.show.result import Result


def current_layouts(host: Host, gpu: str | None, *, named: bool = False) -> tuple[Sequence[Gpu], Sequence[Layout]]:
    """Return the GPUs that a change is for, as they are now, with their layouts.

    On a host with several GPUs -g is required, unless the instances that change are ``named``: their names tell which GPU.
    """
    all_gpus = gpus_of(host)
    if named and gpu is None:
        capable_devices = [Device(gpu=each) for each in all_gpus if each.error is None and each.mig_capable]
        # Without one, the error is that of all GPUs.
        devices: Sequence[Device] = capable_devices or select_for_change("all", all_gpus)
    else:
        devices = select_for_change(gpu, all_gpus)
    for device in devices:
        if device.mig is not None:
            # Otherwise "-g MIG-... apply" would destroy its neighbors.
            raise BadUsage(
                f"{device.mig.uuid} is an instance; this changes the whole GPU {device.gpu.index}",
                f"name the GPU: -g {device.gpu.index}; to destroy one instance: gpushare mig destroy {device.mig.uuid}",
                gpu=device.gpu.index,
                code="whole_gpu",
            )
    gpus = list({device.gpu.index: device.gpu for device in devices}.values())
    incapable = [each for each in gpus if not each.mig_capable]
    if incapable:
        raise no_mig_error(incapable[:1])
    return gpus, layouts_of(host, gpus)


def eviction_targets(words: Iterable[str] | None, layouts: Sequence[Layout]) -> list[Target]:
    """Return the instances that ``--evict`` names."""
    return [target for word in words or () for target in find_targets(word, layouts)]


def planned_or_refused(plan: MigPlan | NoPlan) -> MigPlan:
    """Return the plan; raises if there is none."""
    if isinstance(plan, MigPlan):
        return plan
    raise no_plan_error(plan)


def carry_out_change(make: Callable[[Host, MigLedger], MigChange], *, refresh_cdi: bool = False) -> Result:
    """Carry a change out, or with --dry-run only show it; ``make`` reads the host and plans.

    It plans again under the lock, after the question and after an interrupted change is undone. If the new plan takes more
    than the user has agreed to, the lock is released and the user is asked again.
    """
    host = settings.connect()
    ledger = MigLedger(host)
    if settings.dry_run:
        change = _with_cdi(host, make(host, ledger), refresh=refresh_cdi)
        interrupted = ledger.interrupted_change()
        notes: tuple[str, ...] = ()
        # A complete change is not undone.
        if interrupted is not None and not is_complete(host, interrupted):
            notes = (f"first '{interrupted.title}', which was interrupted, would be undone",)
        notes += tuple(_orphan_previews(host))
        return _change_result(host, change, notes, dry_run=True)
    # Planned before the lock, too: a change that is refused then needs neither root nor lock. But an interrupted change
    # is undone first: it may be the only obstacle.
    try:
        first = make(host, ledger).plan if ledger.interrupted_change() is None else None
    except InUse:
        # Without rights, to end what is in the way would not help.
        need_rights(host)
        raise
    need_rights(host)
    agreed = () if first is None else consented(first)
    done: list[str] = []
    while True:
        with recovered(host, ledger) as notes:
            done += notes
            change = _with_cdi(host, make(host, ledger), refresh=refresh_cdi)
            if is_agreed(change.plan, agreed):
                transact(host, ledger, change, say_step if settings.verbose else None)
                return _change_result(host, change, done, dry_run=False)
        agreed = consented(change.plan, agreed)


@contextlib.contextmanager
def recovered(host: Host, ledger: MigLedger) -> Iterator[tuple[str, ...]]:
    """Hold the lock of all MIG changes and undo an interrupted one; yield what was done, in words.

    It is printed even if the change that follows is refused. Raises NoPermission if this user may not undo it.
    """
    with ledger.locked():
        if ledger.current_change() is not None:
            # Without rights the undo would fail, and the change would count as one that cannot be undone.
            need_rights(host)
        notes = recover_changes(host, ledger)
        # Where no job has had an instance of its own, nothing of it is loaded.
        if (host.run_directory / "on-demand").is_dir():
            notes = (*notes, *remove_orphans(host, ledger))
        try:
            yield notes
        except GpushareError:
            for text in notes:
                note(text)
            raise


def recover_first(host: Host, ledger: MigLedger) -> None:
    """Undo an interrupted change before something else is planned, and print what was done: it may be the only obstacle."""
    if ledger.interrupted_change() is not None and may_change(host):
        with recovered(host, ledger) as undone:
            for text in undone:
                note(text)


def _with_cdi(host: Host, change: MigChange, *, refresh: bool) -> MigChange:
    """Return the change with the steps that write the CDI specification of containers again, if ``refresh``."""
    if not refresh:
        return change
    plan = replace(change.plan, steps=(*change.plan.steps, *refresh_steps(host)))
    return replace(change, plan=plan, notes=(*change.notes, "the CDI specification of containers is written again"))


def _change_result(host: Host, change: MigChange, notes: Sequence[str], *, dry_run: bool) -> Result:
    """Return the result of a MIG change: in a dry run its plan with a picture, else what is in force now, with the undo."""
    all_notes = [*notes, *change.notes, *change.plan.notes]
    made: list[MadeInstance] = []
    if change.plan.steps and not dry_run:
        made = _made_instances(host, change)
        all_notes += cdi_notes(host, [host.nvml.gpu(part.gpu.index) for part in change.gpus])
    undo = _undo_line(change) if change.plan.steps else None
    planned = replace(change.plan, undo=undo, notes=tuple(_merge_notes(all_notes)))
    result = plan_result(planned, dry_run=dry_run)
    if dry_run:
        plan = MigPlan(gpus=tuple(part.plan for part in change.gpus), cost=Cost())
        picture = plan_text(plan, {part.gpu.index: part.layout for part in change.gpus}) if plan.changes else None
        return replace(with_answer(result, MigChangeAnswer, created=()), text=picture)
    lines = list(_in_force_lines(host, change, made))
    answer = with_answer(result, MigChangeAnswer, created=tuple(made))
    return replace(answer, done=with_undo(lines, undo) if lines else result.done)


@dataclass(frozen=True, kw_only=True)
class MadeInstance:
    """A GPU instance that was created, or in which compute instances were created."""

    gpu: int
    gpu_instance_id: int
    profile: str
    # The memory slice at which it begins.
    start: int
    # The UUIDs of the new MIG devices.
    uuids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MigChangeAnswer(PlanAnswer):
    """The answer of a change of MIG."""

    created: tuple[MadeInstance, ...]


def _in_force_lines(host: Host, change: MigChange, made: Sequence[MadeInstance]) -> Iterator[str]:
    """Yield what a MIG change has put in force: modes, instances that are gone, and the new ones with their UUIDs."""
    named_by_spot = {named.spot: named for named in names_of(host).values()}
    yield from (text for text, _ in _stopped_daemons(change))
    # MPS daemons of other users.
    yield from (f"{loss.what} is gone" for loss in change.plan.consent if loss.action == "stops")
    for part in change.gpus:
        if part.enable is not None and part.enable is not part.before.mig_enabled:
            yield f"GPU {part.gpu.index}: MIG is {'on' if part.enable else 'off'}"
        if part.plan.destroyed:
            yield _destroyed_line(part)
        for row in made:
            if row.gpu == part.gpu.index:
                named = named_by_spot.get(Spot(part.gpu.uuid or "", row.profile, row.start))
                name = "" if named is None else f" '{named.name}'"
                yield f"{row.profile}:{row.start}{name} on GPU {row.gpu}: {', '.join(row.uuids)}"
        yield from _naming_lines(part, named_by_spot)


def _destroyed_line(part: GpuChange) -> str:
    """Return which instances, and compute instances of others, are gone from a GPU."""
    destroyed = part.plan.destroyed
    several = len(destroyed) > 1 or (not destroyed[0].whole and len(destroyed[0].compute) > 1)
    return f"{', '.join(map(str, destroyed))} on GPU {part.gpu.index} {'are' if several else 'is'} gone"


def _naming_lines(part: GpuChange, named_by_spot: Mapping[Spot, NamedInstance]) -> Iterator[str]:
    """Yield the instances that stay on a GPU and have another name or other users than before the change."""
    for instance in part.plan.kept:
        named = named_by_spot.get(Spot(part.gpu.uuid or "", *instance.place))
        if named is None and instance.name:
            yield f"{instance} on GPU {part.gpu.index} has no name"
        elif named is not None and (named.name, named.users) != (instance.name, instance.granted):
            users = f", for {', '.join(named.users)} only" if named.users else ""
            yield f"{instance} on GPU {part.gpu.index} is now '{named.name}'{users}"


def _made_instances(host: Host, change: MigChange) -> list[MadeInstance]:
    """Return the GPU instances that were created or got new compute instances, each with the new UUIDs."""
    rows = []
    for on_gpu in change.gpus:
        plan = on_gpu.plan
        places = {new.instance.place for new in plan.created}
        gpu = host.nvml.gpu(on_gpu.gpu.index) if places else None
        if gpu is None or gpu.error is not None:
            continue
        # A GPU instance that stays may lose compute instances, and get others in their place with the same UUIDs.
        destroyed = {part.uuid for removal in plan.destroyed for part in removal.compute}
        old_uuids = {part.uuid for instance in plan.kept for part in instance.compute} - destroyed
        rows += [
            MadeInstance(
                gpu=gpu.index,
                gpu_instance_id=instance.id,
                profile=instance.profile.name,
                start=instance.start,
                uuids=tuple(part.uuid for part in instance.compute if part.uuid and part.uuid not in old_uuids),
            )
            for instance in MigReader(host.nvml).layout(gpu).instances
            if instance.place in places
        ]
    return rows


def _merge_notes(notes: Sequence[str]) -> Iterator[str]:
    """Yield each note once: equal ones about ``GPU 0: `` and ``GPU 1: `` become one about ``each of GPU 0-1: ``."""
    gpus: dict[str, set[int]] = {}
    for text in notes:
        of_gpu = re.match(r"GPU (\d+): ", text)
        indexes = gpus.setdefault(text if of_gpu is None else text[of_gpu.end() :], set())
        if of_gpu is not None:
            indexes.add(int(of_gpu.group(1)))
    for text, indexes in gpus.items():
        each = "each of " if len(indexes) > 1 else ""
        yield f"{each}GPU {ranges(indexes)}: {text}" if indexes else text


def _undo_line(change: MigChange) -> str | None:
    """Return the commands that undo a change, as one line; None: nothing undoes it.

    Where only whole GPU instances have changed, they destroy what was created and create what was destroyed: what was
    made since stays. Where the MIG mode or the compute instances of a GPU instance have changed, they restore the
    earlier layout of the GPU; this asks before it takes what is named, granted or in use. Only what the change itself
    has named goes without a question.
    """
    parts = [part for part in change.gpus if part.changes]
    only_switched_off = [
        part for part in parts if part.before.mig_enabled and part.enable is False and not part.before.instances
    ]
    by_instance = [
        part
        for part in parts
        if part.enable is None and all(each.whole for each in (*part.plan.destroyed, *part.plan.created))
    ]
    commands = _commands_that_destroy(change, by_instance)
    if only_switched_off:
        numbers = ranges(part.gpu.index for part in only_switched_off).replace(" ", "")
        commands.append(f"gpushare mig enable -g {numbers}")
    commands += as_commands(part.before for part in parts if part not in only_switched_off and part not in by_instance)
    for part in by_instance:
        staying = [new.instance for new in part.plan.created] + list(part.plan.kept)
        wish = shell_wish(part.before.without(staying))
        if wish:
            commands.append(f"gpushare mig create {wish} -g {part.gpu.index}")
    for part in parts:
        users = {instance.name: instance.granted for instance in part.layout.instances if instance.name}
        commands += naming_commands(part.before, part.after, users)
    # By then the instances of the daemons have their names again.
    commands += [start for _, start in _stopped_daemons(change) if start is not None]
    return one_shell_line(commands)


def _commands_that_destroy(change: MigChange, by_instance: Sequence[GpuChange]) -> list[str]:
    """Return the commands that destroy the instances that a change created, and undo its naming.

    Instances with names go on all GPUs; those without only on the GPUs that are undone ``by_instance``.
    """
    created_spots = {
        Spot(part.gpu.uuid or "", *new.instance.place) for part in change.gpus for new in part.plan.created if new.whole
    }
    names = [named.name for named in change.names if named.spot in created_spots]
    commands = [f"gpushare mig destroy {' '.join(names)} -y"] if names else []
    # A name that has moved must be free again before its earlier instance gets it.
    commands += filter(None, [change.plan.undo])
    named_spots = {named.spot for named in change.names}
    for part in by_instance:
        created = [new.instance for new in part.plan.created]
        unnamed = [str(each) for each in created if (part.gpu.uuid, *each.place) not in named_spots]
        if unnamed:
            commands.append(f"gpushare mig destroy {' '.join(unnamed)} -g {part.gpu.index}")
    return commands


def _stopped_daemons(change: MigChange) -> Iterator[tuple[str, str | None]]:
    """Yield the MPS daemons that a change stops, in words, each with the command that starts it again after the undo.

    No command: its instance has no name by which to find it again, and may get another UUID.
    """
    for part in change.gpus:
        # The title and the selector of each device, by UUID.
        devices: dict[str | None, tuple[str, str | None]]
        devices = {part.gpu.uuid: (f"GPU {part.gpu.index}", str(part.gpu.index))}
        for instance in part.layout.instances:
            title = f"'{instance.name}'" if instance.name else f"{instance} on GPU {part.gpu.index}"
            selector = instance.name if len(instance.compute) == 1 else None
            devices |= {each.uuid: (title, selector) for each in instance.compute}
        for record in change.daemons:
            if record.device_uuid not in devices:
                continue
            title, selector = devices[record.device_uuid]
            exclusive = record.profile is None and record.previous_compute_mode is not None
            start = selector and start_command(selector, record.limits, exclusive=exclusive, users=record.users)
            yield f"the MPS daemon of {title} is gone", start


@dataclass(frozen=True, kw_only=True)
class MigRecoverAnswer:
    """The answer of `mig recover`."""

    dry_run: bool
    # What was restored or accepted, in words.
    done: tuple[str, ...]
    undo: str | None


def recover(
    forget: bool = flag("--forget", "Accept what could not be restored; set an unreadable record aside."),
) -> Any:
    """Undo a change that was interrupted. Every other MIG change does this first.

    An instance whose place is in use cannot be restored. `mig recover`, `mig status` and `doctor` report it, and each
    `mig recover` tries again, until it is restored or you accept that it is lost (--forget). An unreadable record of a
    change blocks every change. Needs root, or the driver's capability mig/config.
    """
    host = settings.connect()
    ledger = MigLedger(host)
    undo: str | None = None
    notes: tuple[str, ...] = ()
    if forget:
        done = _forget(host, ledger)
    else:
        done, undo, notes = _recover_or_preview(host, ledger)
    text = "\n".join(done) or "nothing to do: no change was interrupted, or another one is running"
    data = MigRecoverAnswer(dry_run=settings.dry_run, done=() if settings.dry_run else tuple(done), undo=undo)
    shown: dict[str, Any] = {"text": text} if settings.dry_run else {"done": ((text, undo),)}
    return Result(data=data, notes=notes, **shown)


def _recover_or_preview(host: Host, ledger: MigLedger) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Undo an interrupted change and try again what earlier ones could not restore; in a dry run only say so.

    Returns what was done, the command that takes it back, and what is still not restored.
    """
    interrupted = ledger.interrupted_change()
    nothing_left = interrupted is None and not orphan_instances(host) and not ledger.failed_changes()
    if ledger.is_running() or nothing_left:
        return (), None, ()
    undo = None
    if interrupted is not None and not is_complete(host, interrupted):
        undo = one_shell_line(as_commands(at_current_indexes(host, interrupted.after)))
    if settings.dry_run:
        done = tuple(_recovery_preview(host, ledger, interrupted))
    else:
        need_rights(host)
        with ledger.locked():
            done = (*recover_changes(host, ledger, retry=True), *remove_orphans(host, ledger))
    lost = lost_layouts(host, ledger)
    if lost and not done:
        hints = dict.fromkeys(leftover.remedy for leftover in lost)
        raise OperationFailed("; ".join(leftover.seen for leftover in lost), "; ".join(hints), code="not_restored")
    return done, None if lost else undo, tuple(map(str, lost))


def _recovery_preview(host: Host, ledger: MigLedger, interrupted: ChangeRecord | None) -> Iterator[str]:
    """Yield in words what recovery would do."""
    if interrupted is not None and is_complete(host, interrupted):
        yield f"'{interrupted.title}' was interrupted but is complete; nothing would be undone"
    elif interrupted is not None:
        yield f"'{interrupted.title}' was interrupted at '{interrupted.step or 'its start'}'; it would be undone"
    yield from (f"{leftover.seen}; it would be tried again" for leftover in lost_layouts(host, ledger))
    yield from _orphan_previews(host)


def _orphan_previews(host: Host) -> Iterator[str]:
    """Yield in words which instances every change would destroy first, unless they are used."""
    return (f"{each} was made for a job that has ended; it would be destroyed" for each in orphan_instances(host))


def _forget(host: Host, ledger: MigLedger) -> tuple[str, ...]:
    """Accept what could not be restored, and return it in words; in a dry run only return it."""
    if settings.dry_run:
        return () if ledger.is_running() else accept_losses(host, ledger, dry_run=True)
    with ledger.locked():
        return accept_losses(host, ledger, dry_run=False)


EVICT: Final = option("--evict", "INSTANCE", "This busy instance may be destroyed: its programs are ended.")
REFRESH: Final = flag("--refresh-cdi", "Rewrite the CDI specification of containers.")


def create(
    wish: list[str] | None = WISHES,
    gpu: str | None = WHOLE_GPU_OPTION,
    name: str | None = option("--name", "NAME", "The name of the instance; several become NAME-1, NAME-2."),
    memory: str | None = NEEDED_MEMORY,
    sm: int | None = NEEDED_SMS,
    refresh_cdi: bool = REFRESH,
) -> Any:
    """Add GPU instances, each with its compute instances. Nothing is destroyed.

    Each instance is created at the placement given, or at the one that leaves the most room, and read back. A name
    stands for a profile at a placement on a GPU: `run --mig NAME` and `mig env NAME` find the instance even after a
    reboot. A compute instance (1c.3g.40gb) without a name goes into an idle GPU instance with room for it, and into
    a busy one only with a placement (1c.3g.40gb:4). Needs root, or the driver's capability mig/config.
    """
    wanted = typed_wish(wish, memory, sm)
    if name is not None:
        check_name(name)

    def planned_change(host: Host, ledger: MigLedger) -> MigChange:
        """Plan the new instances on the GPUs with MIG on, with their names."""
        all_gpus, all_layouts = current_layouts(host, gpu)
        _need_mig(all_gpus)
        # Only a GPU with MIG on has places to add to.
        gpus = [each for each in all_gpus if each.mig_enabled]
        layouts = [layout for each, layout in zip(all_gpus, all_layouts, strict=True) if each.mig_enabled]
        plan = planned_or_refused(plan_add(layouts, wanted, with_others=name is None))
        created = [(part, new.instance) for part in plan.gpus for new in part.created]
        naming = None
        if name is not None:
            naming = plan_names(host, [name], grants={}, instances=created, plans=plan.gpus)
        return change_of(host, ledger, gpus, layouts, plan, f"create {' '.join(map(str, wanted))}", naming=naming)

    return carry_out_change(planned_change, refresh_cdi=refresh_cdi)


def destroy(
    instance: list[str] = argument("INSTANCE...", "Name, MIG UUID, GPU/GI[/CI], PROFILE:START, or all.", default=...),
    gpu: str | None = WHOLE_GPU_OPTION,
    evict: list[str] | None = EVICT,
    refresh_cdi: bool = REFRESH,
) -> Any:
    """Destroy instances and nothing else. A busy one stays, unless --evict names it too.

    A MIG UUID stands for its whole GPU instance if that has no other compute instance, else for the compute instance
    alone. Needs root, or the driver's capability mig/config.
    """

    def planned_change(host: Host, ledger: MigLedger) -> MigChange:
        """Plan that these instances go, and those that --evict names."""
        # Names and UUIDs tell the GPU; bare ids do not.
        gpus, layouts = current_layouts(host, gpu, named=all(_tells_gpu(word) for word in instance))
        targets = [target for word in instance for target in find_targets(word, layouts)]
        may_go = eviction_targets(evict, layouts)
        plan = planned_or_refused(plan_destroy(layouts, targets, evict=may_go))
        return change_of(host, ledger, gpus, layouts, plan, f"destroy {' '.join(instance)}", evict=may_go)

    return carry_out_change(planned_change, refresh_cdi=refresh_cdi)


_OF_NAMES: Final = (
    Refused("--name", "--file", "names belong to a layout in words", "-g 0 '2g*2' --name a,b"),
    Refused("--grant", "--name", "it is for the users of a name", "-g 0 '2g*2' --name a,b --grant a=alice+carl", needs=True),
)  # fmt: skip


def apply(
    wish: list[str] | None = WISHES,
    gpu: str | None = WHOLE_GPU_OPTION,
    file: str | None = PARTED_FILE,
    config: str | None = PARTED_CONFIG,
    exact: bool = PARTED_EXACT,
    name: list[str] | None = option("--name", "NAME,...", "The names of the instances in the order of WISH; or one."),
    grant: list[str] | None = option("--grant", "NAME=USER+...", "Let only these users use the instance of this name."),
    evict: list[str] | None = EVICT,
    refresh_cdi: bool = REFRESH,
) -> Any:
    """Give each GPU exactly this layout at the lowest cost: existing instances of the layout stay.

    Other instances are destroyed if they are idle, busy ones only with --evict. MIG is switched on where it is off.
    With -f, the file names the GPUs; where it turns MIG off, idle instances are destroyed first. A GPU without an entry
    is left alone, and an entry without a GPU is reported in a note; with --exact both are errors. Needs root; where MIG
    is on already, the driver's capability mig/config is enough.

    With --name each instance gets a name, and with --grant also its users; one name becomes NAME-1, NAME-2. A name
    that means another instance is refused.
    """
    if bool(wish) == (file is not None):
        raise BadUsage(
            "give a layout or a file with one, not both" if wish else "give a layout, or a file with one",
            "for example: gpushare mig apply -g 0 2g '1g*2'",
            code="no_wish",
        )

    refuse((*OF_FILE, *_OF_NAMES))
    names = [word for text in name or () for word in text.split(",")]
    grants = _parse_grants(grant or ())
    # Read once: stdin cannot be read again, and a file may change before the lock is held.
    parted_config = None if file is None else read_config(file, config)
    title = "apply " + (" ".join(wish) if wish else f"{file} {config or ''}".strip())

    def planned_change(host: Host, ledger: MigLedger) -> MigChange:
        """Plan the layout on the GPUs of the wish, or of the file."""
        gpus, layouts, demands, notes = _demands_on_gpus(host, gpu, wish or (), parted_config, exact=exact)
        may_go = eviction_targets(evict, layouts)
        # A file counts MIG devices: a GPU that has them stays, however they are spread over GPU instances.
        wishes = {
            layout.gpu: demands[layout.gpu].wish
            for layout in layouts
            if parted_config is None or difference(layout, demands[layout.gpu].wish)
        }
        plan = planned_or_refused(plan_exact(layouts, wishes, evict=may_go))
        modes = {index: demand.mig_enabled for index, demand in demands.items()}
        naming = None
        if names:
            in_order_of_wish = [
                (part, instance)
                for part, layout in zip(plan.gpus, layouts, strict=True)
                for instance in in_order(demands[part.gpu].wish, layout.profiles, part.after)
            ]
            naming = plan_names(host, names, grants, in_order_of_wish)
        change = change_of(host, ledger, gpus, layouts, plan, title, evict=may_go, modes=modes, naming=naming)
        return replace(change, notes=(*notes, *change.notes))

    return carry_out_change(planned_change, refresh_cdi=refresh_cdi)


def _parse_grants(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the users of each instance name that --grant gives, as NAME=USER+USER."""
    users_of: dict[str, list[str]] = {}
    for word in words:
        name, _, users = word.partition("=")
        if not name or not all(users.split("+")):
            raise BadUsage(f"--grant {quoted(word)} is not NAME=USER", "give --grant a=alice+carl", code="bad_grant")
        users_of.setdefault(name, []).extend(users.split("+"))
    return users_of


def enable(gpu: str | None = WHOLE_GPU_OPTION, refresh_cdi: bool = REFRESH) -> Any:
    """Switch MIG mode on. The GPU must be idle. Needs root.

    On Hopper and later the driver switches MIG on even for a busy GPU, but then refuses every instance. If the mode
    stays pending, gpushare undoes it and reports an error. With MIG on and no instance, no CUDA program can use the
    GPU.
    """
    return _switch_mode(gpu, enable=True, destroy=False, refresh_cdi=refresh_cdi)


def disable(
    gpu: str | None = WHOLE_GPU_OPTION,
    destroy: bool = flag("--destroy", "Destroy idle instances first."),
    evict: list[str] | None = EVICT,
    refresh_cdi: bool = REFRESH,
) -> Any:
    """Switch MIG mode off. Existing instances prevent it, unless --destroy is given. Needs root."""
    return _switch_mode(gpu, enable=False, destroy=destroy, evict=evict, refresh_cdi=refresh_cdi)


# -- what the commands share -----------------------------------------------------------------------


def _switch_mode(
    gpu: str | None, *, enable: bool, destroy: bool, refresh_cdi: bool, evict: Sequence[str] | None = None
) -> Any:
    """Switch the MIG mode of GPUs on or off; off only without instances, unless they may be destroyed."""

    def planned_change(host: Host, ledger: MigLedger) -> MigChange:
        """Plan to switch MIG on or off on the GPUs that ``gpu`` names; off also destroys their instances."""
        gpus, layouts = current_layouts(host, gpu)
        may_go = eviction_targets(evict, layouts)
        instances = [
            f"{instance.name or instance} on GPU {layout.gpu}" for layout in layouts for instance in layout.instances
        ]
        if not enable and instances and not destroy:
            which = ",".join(str(each.index) for each in gpus)
            raise InUse(
                f"MIG cannot be switched off while there are instances: {first_few(instances)}",
                f"destroy them too: gpushare mig disable -g {which} --destroy; see them: gpushare mig status",
                code="instances_exist",
            )
        # An empty wish leaves no instance; a GPU without one stays as it is.
        wishes = {} if enable else {layout.gpu: () for layout in layouts}
        plan = planned_or_refused(plan_exact(layouts, wishes, evict=may_go))
        modes = {each.index: enable for each in gpus}
        title = "enable" if enable else "disable"
        return change_of(host, ledger, gpus, layouts, plan, title, evict=may_go, modes=modes)

    return carry_out_change(planned_change, refresh_cdi=refresh_cdi)


def change_of(
    host: Host,
    ledger: MigLedger,
    gpus: Sequence[Gpu],
    layouts: Sequence[Layout],
    plan: MigPlan,
    title: str,
    *,
    evict: Sequence[Target] = (),
    modes: Mapping[int, bool] | None = None,
    naming: Naming | None = None,
) -> MigChange:
    """Return the transaction that carries out a plan for GPUs with these layouts, and names and grants their instances.

    ``evict`` are the busy instances that may go, ``modes`` the MIG modes to set, by index of the GPU.
    """
    modes = modes or {}
    naming = naming or Naming()
    changes = [
        gpu_change(gpu, layout, part, modes.get(gpu.index))
        for gpu, layout, part in zip(gpus, layouts, plan.gpus, strict=True)
    ]
    change = plan_change(
        host,
        changes,
        ledger,
        title=title,
        evict={(target.gpu, target.instance) for target in evict},
        first=naming.first,
        naming=naming.commands,
        after=[*name_upkeep_steps(host, plan.gpus, {named.name for named in naming.bound}), *naming.after],
    )
    return replace(change, plan=replace(change.plan, undo=one_shell_line(naming.undo)), names=naming.bound)


def _demands_on_gpus(
    host: Host, gpu: str | None, wish: Sequence[str], config: Config | None, *, exact: bool
) -> tuple[Sequence[Gpu], Sequence[Layout], Mapping[int, Demand], tuple[str, ...]]:
    """Return the GPUs that a change is for, their layouts, what each should have (by index), and notes.

    They are those that -g names, and should have the ``wish``; or with a ``config`` of a file, those that it has entries for.
    ``exact``: an entry without a GPU, or a GPU without an entry, is an error.
    """
    if config is None:
        gpus, layouts = current_layouts(host, gpu)
        demand = Demand(mig_enabled=True, wish=parse_wish(" ".join(wish)))
        return gpus, layouts, {each.index: demand for each in gpus}, ()
    all_gpus = gpus_named(host, gpu)
    demands, notes = demands_of(config, all_gpus, host, named=gpu is not None, exact=exact)
    gpus = [each for each in all_gpus if each.index in demands]
    refuse_silent_gpus(*gpus)
    return gpus, layouts_of(host, gpus), demands, notes


def _need_mig(gpus: Sequence[Gpu]) -> None:
    """Raise NotSupported if MIG is off on all of these GPUs."""
    if any(each.mig_enabled for each in gpus):
        return
    which = ",".join(str(each.index) for each in gpus)
    raise NotSupported(
        f"MIG is off on {titles([Device(gpu=each) for each in gpus])}",
        f"switch it on first: gpushare mig enable -g {which}; or do both: gpushare mig apply -g {which} WISH",
        gpu=gpus[0].index,
        code="mig_off",
    )


def _tells_gpu(word: str) -> bool:
    """Return whether a word for an instance also says on which GPU it is: a name, a UUID, or GPU/GI[/CI]."""
    is_of_any_gpu = word.isdigit() or ":" in word or word.lower() == "all"
    return "/" in word or not is_of_any_gpu


def name(
    name: str | None = argument("NAME", "The new name."),
    instance: str | None = argument("INSTANCE", "MIG UUID, GPU/GI[/CI], or PROFILE:START."),
    gpu: str | None = WHOLE_GPU_OPTION,
    forget: str | None = option("--forget", "NAME", "Forget this name."),
) -> Any:
    """Give an instance a name, or forget a name. The instance itself does not change.

    The name stands for a profile at a placement on a GPU, not for the UUID, which another instance at this place may
    have later. An instance has one name, which survives a reboot. `run --mig PROFILE` takes no instance
    that has a name.
    """
    if forget is not None and name is None:
        return ask_and_carry_out(_plan_forget(forget), replan=lambda: _plan_forget(forget))
    if forget is None and name is not None and instance is not None:
        return ask_and_carry_out(_plan_name(name, instance, gpu))
    raise BadUsage(
        "give a name and an instance, or a name to forget",
        "for example: gpushare mig name train 0/2; gpushare mig name --forget train",
        code="no_name",
    )


def _plan_name(name: str, instance: str, gpu: str | None) -> Plan:
    """Return the plan that names a GPU instance. Raises BadUsage if it has another name, or another one has this name."""
    check_name(name)
    host = settings.connect()
    _, layouts = current_layouts(host, gpu, named=True)
    targets = find_targets(instance, layouts)
    if len(targets) != 1:
        raise BadUsage(
            f"{quoted(instance)} means {len(targets)} instances; a name means one", "give GPU/GI", code="one_instance"
        )
    # Of a compute instance, the GPU instance that it is in.
    layout = next(each for each in layouts if each.gpu == targets[0].gpu)
    gpu_instance = next(each for each in layout.instances if each.id == targets[0].instance)
    named = NamedInstance(
        name=name, gpu_uuid=layout.uuid or "", profile=gpu_instance.profile.name, start=gpu_instance.start
    )
    bound = names_of(host)
    if name in bound and (bound[name].gpu_uuid, bound[name].place) != (named.gpu_uuid, named.place):
        raise name_taken_error(host, bound[name])
    if gpu_instance.name not in {None, name}:
        raise BadUsage(
            f"{gpu_instance} on GPU {layout.gpu} is already named '{gpu_instance.name}'",
            f"an instance has one name; forget that one first: gpushare mig name --forget {gpu_instance.name}",
            code="name_taken",
        )
    step = binding_step(host, [named], (), {named.gpu_uuid: layout.gpu})
    return Plan(
        title=f"{gpu_instance} on GPU {layout.gpu} is named '{name}'",
        steps=() if gpu_instance.name == name else (step,),
        undo=f"gpushare mig name --forget {name}",
    )


def _plan_forget(name: str) -> Plan:
    """Return the plan that forgets a name, and asks if users have a grant by it."""
    host = settings.connect()
    named = names_of(host).get(name)
    if named is None:
        raise NotFound(f"there is no name '{name[:60]}'", "see the names: gpushare mig status", code="no_name")
    if not settings.dry_run:
        # Before the question: with that answered, it would be refused all the same.
        refuse_name_of_root(host, named.name)
    lost = Loss(action="forgets", what=f"the grant of '{name}'", why=(f"granted to {', '.join(named.users)}",))
    place = f"{named.profile}:{named.start}"
    undo = [f"gpushare mig name {name} {place} -g {named.gpu_uuid}"]
    undo += [f"{sudo_prefix(host)}gpushare mig grant {name} {shlex.quote(user)}" for user in named.users]
    return Plan(
        title=f"{place} has no name",
        steps=(binding_step(host, (), [named]),),
        undo=one_shell_line(undo),
        consent=(lost,) if named.users else (),
    )


NAME: Final = argument("NAME", "The name of the instance.", default=...)


def grant(
    name: str = NAME,
    user: str = argument("USER", "User name or id; no group.", default=...),
) -> Any:
    """Let only this user, and root, use a MIG instance. Needs root.

    Without a grant, every local user can use every instance: MIG isolates memory and SMs, not users. Another grant
    adds a user. Grants are kept with the name, and gpushare applies them again when it recreates the instance.
    """
    return _carry_out_grant(lambda host: plan_grant(host, name, user))


def revoke(
    name: str = NAME,
    user: str | None = argument("[USER]", "Only this user. [default: all]"),
) -> Any:
    """Revoke a user's grant, or all; without grants every local user can use the instance. Needs root."""
    return _carry_out_grant(lambda host: plan_revoke(host, name, user))


def _carry_out_grant(make: Callable[[Host], Plan]) -> Any:
    """Carry out a change of grants under the lock of all MIG changes; there ``make`` plans it, in case another came first."""
    host = settings.connect()
    ledger = MigLedger(host)
    if settings.dry_run or not host.root:
        # Under no lock: without root only the record of an instance that is gone can be changed, which is one step.
        plan = make(host)
        if not settings.dry_run and len(plan.steps) > 1:
            need_root_to_grant(host)
        return ask_and_carry_out(plan)
    # Planned before the lock, too: a refused change must not wait for it. But the undo of an interrupted change comes
    # first: until then an empty plan stands for the one that is made under the lock.
    plan_before_lock = Plan(title="the users of the instance", steps=())
    if ledger.interrupted_change() is None:
        plan_before_lock = make(host)
    return ask_and_carry_out(plan_before_lock, replan=lambda: make(host), locked=lambda: recovered(host, ledger))
