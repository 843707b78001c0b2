"""``gpushare mig`` create, destroy, enable, disable, apply, recover, name: every change is one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import GPU_HELP, ChangingCommand
from gpushare.cli.mig_recover import recover
from gpushare.cli.mig_transaction import carried, current, evicted, planned_or_refused
from gpushare.errors import BadUsage, GpuLost, InUse, NotFound, NotSupported

if TYPE_CHECKING:
    from gpushare.actions.mig_change import GpuChange, MigChange
    from gpushare.host.host import Host
    from gpushare.host.mig_journal import Journal
    from gpushare.mig.parted import Config, Demand
    from gpushare.mig.plan import Plan
    from gpushare.mig.profile import Layout
    from gpushare.mig.wish import Wish
    from gpushare.model import Gpu

GpuOption = Annotated[str | None, typer.Option("-g", "--gpu", metavar="GPU", help=GPU_HELP)]
Wishes = Annotated[
    list[str] | None,
    typer.Argument(metavar="WISH...", help="3g.40gb 1g.10gb*2, 3g:4, 1c.3g.40gb*3.", show_default=False),
]
Evict = Annotated[
    list[str] | None,
    typer.Option("--evict", metavar="INSTANCE", help="This busy instance may go: its programs are ended."),
]
Refresh = Annotated[bool, typer.Option("--refresh-cdi", help="Write the CDI specification of containers anew.")]


def add(group: typer.Typer) -> None:
    """Add the commands to ``gpushare mig``."""
    for function, help_text in (
        (create, "Add instances; nothing is destroyed."),
        (destroy, "Destroy instances."),
        (apply, "Give GPUs exactly this layout."),
        (enable, "Switch MIG mode on."),
        (disable, "Switch MIG mode off."),
        (recover, "Undo a change that was interrupted."),
    ):
        group.command(function.__name__, cls=ChangingCommand, short_help=help_text)(function)


def create(
    wish: Wishes = None,
    gpu: GpuOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What to call it; several become NAME-1, NAME-2.")
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="By need: so much memory.")] = None,
    sm: Annotated[int | None, typer.Option("--sm", metavar="N", help="By need: so many SMs.", min=1)] = None,
    refresh_cdi: Refresh = False,
) -> Any:
    """Add GPU instances with their compute instances, where they leave the most room. Nothing is destroyed.

    Each is made at an explicit placement and read back. A name means GPU, profile and placement: `run --mig
    NAME` and `mig env NAME` find it again, also after a reboot. A compute instance (1c.3g.40gb) without a name goes
    into an idle GPU instance that has room for it; beside somebody only where its place is said (1c.3g.40gb:4).
    """
    from gpushare.cli.mig import wished
    from gpushare.host.mig_names import check_name
    from gpushare.mig.plan import NoPlan
    from gpushare.mig.planner import plan_add

    asked = wished(wish, memory, sm)
    if name is not None:
        check_name(name)

    def make(host: Host, journal: Journal) -> MigChange:
        gpus, layouts = current(host, gpu)
        _need_mig(gpus)
        # It only adds: a GPU whose mode is off has no place to add to.
        off = ",".join(str(one.index) for one in gpus if not one.mig_enabled)
        on = [n for n, one in enumerate(gpus) if one.mig_enabled]
        gpus, layouts = [gpus[n] for n in on], [layouts[n] for n in on]
        found = plan_add(layouts, asked, beside=name is None)
        if off and isinstance(found, NoPlan):
            found = replace(found, hint=f"MIG is off on GPU {off}, so it is left out: gpushare mig enable -g {off}")
        plan = planned_or_refused(found)
        return _change(host, journal, gpus, layouts, plan, f"create {' '.join(map(str, asked))}", name=name)

    return carried("mig create", make, refresh_cdi=refresh_cdi)


def destroy(
    instance: Annotated[
        list[str],
        typer.Argument(metavar="INSTANCE...", help="Name, MIG UUID, GPU/GI[/CI], PROFILE:START, or all."),
    ],
    gpu: GpuOption = None,
    evict: Evict = None,
    refresh_cdi: Refresh = False,
) -> Any:
    """Destroy instances and nothing else. One that somebody is in stays, unless --evict names it too.

    A UUID means the GPU instance when it is its only compute instance, else that compute instance.
    """
    from gpushare.mig.planner import plan_destroy
    from gpushare.mig.target import find_targets

    def make(host: Host, journal: Journal) -> MigChange:
        # Names and UUIDs tell the GPU themselves; bare ids do not.
        gpus, layouts = current(host, gpu, named=all(_tells_gpu(word) for word in instance))
        targets = [target for word in instance for target in find_targets(word, layouts)]
        may_go = evicted(evict, layouts)
        plan = planned_or_refused(plan_destroy(layouts, targets, evict=may_go))
        return _change(host, journal, gpus, layouts, plan, f"destroy {' '.join(instance)}", evict=may_go)

    return carried("mig destroy", make, refresh_cdi=refresh_cdi)


def apply(
    wish: Wishes = None,
    gpu: GpuOption = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="A mig-parted v1 file; - is stdin.")
    ] = None,
    config: Annotated[str | None, typer.Option("-c", "--config", metavar="NAME", help="Which config of it.")] = None,
    evict: Evict = None,
    refresh_cdi: Refresh = False,
) -> Any:
    """Give each GPU exactly this layout, at the least cost: what is there and is wished stays in its place.

    Idle instances that are not wished go, busy ones only with --evict. MIG is switched on where it is off. With
    -f the file says which GPUs; one that it turns off loses its idle instances and its mode.
    """
    from gpushare.mig.planner import plan_exact

    if bool(wish) == (file is not None):
        raise BadUsage(
            "give a layout or a file with one, not both" if wish else "give a layout, or a file with one",
            "for example: gpushare mig apply -g 0 3g.40gb 1g.10gb*2",
            code="no_wish",
        )

    if config is not None and file is None:
        raise BadUsage(
            f"'-c {config[:60]}' names a config, and there is no file",
            f"give its file: -f FILE -c {config[:60]}",
            code="no_file",
        )
    from gpushare.cli.parted_file import absent_gpus, config_of

    # Read once: stdin has no second time, and a file may change between the look and the lock.
    named = None if file is None else config_of(file, config)

    def make(host: Host, journal: Journal) -> MigChange:
        notes = () if named is None else absent_gpus(named, host)
        gpus, layouts, demands = _demanded(host, gpu, wish or [], named)
        _need_profiles(gpus, layouts, demands)
        may_go = evicted(evict, layouts)
        plan = planned_or_refused(plan_exact(layouts, _wishes(layouts, demands, from_file=bool(file)), evict=may_go))
        modes = {n: one.mig_enabled for n, one in demands.items()}
        title = "apply " + (" ".join(wish) if wish else f"{file} {config or ''}".strip())
        change = _change(host, journal, gpus, layouts, plan, title, evict=may_go, modes=modes)
        return replace(change, notes=(*notes, *change.notes))

    return carried("mig apply", make, refresh_cdi=refresh_cdi)


def enable(gpu: GpuOption = None, refresh_cdi: Refresh = False) -> Any:
    """Switch MIG mode on. Nobody may be on the GPU: from Hopper on only the first instance would fail.

    A mode that is only pending is an error, and is taken back. With MIG on and no instance no CUDA program can
    use the GPU.
    """
    return _switched("mig enable", gpu, enable=True, destroy=False, refresh_cdi=refresh_cdi)


def disable(
    gpu: GpuOption = None,
    destroy: Annotated[bool, typer.Option("--destroy", help="Idle instances go first.")] = False,
    evict: Evict = None,
    refresh_cdi: Refresh = False,
) -> Any:
    """Switch MIG mode off. Instances that exist stay in the way, unless --destroy says that they go."""
    return _switched("mig disable", gpu, enable=False, destroy=destroy, evict=evict, refresh_cdi=refresh_cdi)


# -- what the commands share -----------------------------------------------------------------------


def _switched(
    command: str, gpu: str | None, *, enable: bool, destroy: bool, refresh_cdi: bool, evict: Sequence[str] | None = None
) -> Any:
    from gpushare.mig.planner import plan_exact

    def make(host: Host, journal: Journal) -> MigChange:
        gpus, layouts = current(host, gpu)
        may_go = evicted(evict, layouts)
        there = [one for layout in layouts for one in layout.instances]
        if not enable and there and not destroy:
            names = ", ".join(f"{one.profile.name}:{one.start}" for one in there[:7])
            which = ",".join(str(one.index) for one in gpus)
            raise InUse(
                f"MIG cannot be switched off beside instances: {names}",
                f"destroy them too: gpushare mig disable -g {which} --destroy; see them: gpushare mig status",
                code="instances_exist",
            )
        wishes = {} if enable else {layout.gpu: () for layout in layouts}
        plan = planned_or_refused(plan_exact(layouts, wishes, evict=may_go))
        modes = {one.index: enable for one in gpus}
        return _change(host, journal, gpus, layouts, plan, command.removeprefix("mig "), evict=may_go, modes=modes)

    return carried(command, make, refresh_cdi=refresh_cdi)


def _change(
    host: Host,
    journal: Journal,
    gpus: Sequence[Gpu],
    layouts: Sequence[Layout],
    plan: Plan,
    title: str,
    *,
    evict: Sequence[tuple[int, int, int | None]] = (),
    modes: dict[int, bool] | None = None,
    name: str | None = None,
) -> MigChange:
    from gpushare.actions.mig_bind import bind_step, name_steps, named
    from gpushare.actions.mig_change import plan_change

    changes = [
        _gpu_change(gpu, layout, one, (modes or {}).get(gpu.index))
        for gpu, layout, one in zip(gpus, layouts, plan.gpus, strict=True)
    ]
    names = [] if name is None else named(host, name, plan.gpus)
    index = {one.uuid or "": one.gpu for one in plan.gpus}
    first = [bind_step(host, one, index[one.gpu_uuid]) for one in names]
    after = name_steps(host, plan.gpus)
    may_go = {(target[0], target[1]) for target in evict}
    change = plan_change(host, changes, journal, title=title, evict=may_go, first=first, after=after)
    return replace(change, names=tuple(one.name for one in names))


def _gpu_change(gpu: Gpu, layout: Layout, plan: Any, mode: bool | None) -> GpuChange:
    from gpushare.actions.mig_change import GpuChange

    # A pending mode is not the mode: it is set again, and read back.
    settled = gpu.mig_enabled == mode and gpu.mig_pending in {None, mode}
    return GpuChange(gpu=gpu, layout=layout, plan=plan, enable=None if mode is None or settled else mode)


def _demanded(
    host: Host, gpu: str | None, wish: Sequence[str], named: Config | None
) -> tuple[Sequence[Gpu], Sequence[Layout], dict[int, Demand]]:
    from gpushare.mig.parted import Demand
    from gpushare.mig.wish import parse_wish

    if named is None:
        gpus, layouts = current(host, gpu)
        asked = parse_wish(" ".join(wish))
        return gpus, layouts, {one.index: Demand(mig_enabled=True, wish=asked) for one in gpus}
    from gpushare.actions.mig_layouts import layouts_of
    from gpushare.cli.common import gpus_of
    from gpushare.cli.parted_file import demands_of
    from gpushare.selection import select

    everybody = [device.gpu for device in select(gpu, gpus_of(host))]
    demands = demands_of(named, everybody, host)
    touched = [one for one in everybody if one.index in demands]
    for one in touched:
        if one.error is not None:
            raise GpuLost(one.error, "see: gpushare status", gpu=str(one.index))
    if not touched:
        raise NotFound(
            f"the config '{named.name}' is for no GPU of this host",
            "compare its devices and device-filter with: gpushare status",
            code="no_gpu_of_config",
        )
    return touched, layouts_of(host, touched), demands


def _wishes(layouts: Sequence[Layout], demands: Mapping[int, Demand], *, from_file: bool) -> dict[int, Wish]:
    """Return the wishes that a GPU does not fulfil yet; a file counts MIG devices, and not how they lie in GPU instances."""
    from gpushare.mig.difference import difference

    return {
        layout.gpu: demands[layout.gpu].wish
        for layout in layouts
        if not from_file or difference(layout, demands[layout.gpu].wish)
    }


def _need_mig(gpus: Sequence[Gpu]) -> None:
    off = [one for one in gpus if not one.mig_enabled]
    if off and len(off) == len(gpus):
        which = ",".join(str(one.index) for one in off)
        raise NotSupported(
            f"MIG is off on GPU {which}",
            f"switch it on first: gpushare mig enable -g {which}; or both at once: gpushare mig apply -g {which} WISH",
            gpu=str(off[0].index),
            code="mig_off",
        )


def _need_profiles(gpus: Sequence[Gpu], layouts: Sequence[Layout], demands: Mapping[int, Demand]) -> None:
    for one, layout in zip(gpus, layouts, strict=True):
        if demands[one.index].wish and not layout.profiles and not one.mig_enabled:
            raise NotSupported(
                f"GPU {one.index}: this driver tells the MIG profiles only while MIG is on, and it is off",
                f"switch it on, then run this again: gpushare mig enable -g {one.index}",
                gpu=str(one.index),
                code="mig_off",
            )


def _tells_gpu(word: str) -> bool:
    return "/" in word or not (word.isdigit() or ":" in word or word.lower() == "all")
