"""``gpushare mig name``: what an instance is for, as a word that finds it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.changes import carried_out
from gpushare.cli.common import GPU_HELP, ChangingCommand, settings
from gpushare.errors import BadUsage, NotFound
from gpushare.units import quoted

if TYPE_CHECKING:
    from gpushare.actions.plan import Plan
    from gpushare.host.mig_names import NamedInstance


def add(group: typer.Typer) -> None:
    """Add the command to ``gpushare mig``."""
    group.command("name", cls=ChangingCommand, short_help="Name an instance, or forget a name.")(name)


def name(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The new name.", show_default=False)] = None,
    instance: Annotated[
        str | None,
        typer.Argument(metavar="INSTANCE", help="MIG UUID, GPU/GI[/CI], or PROFILE:START.", show_default=False),
    ] = None,
    gpu: Annotated[str | None, typer.Option("-g", "--gpu", metavar="GPU", help=GPU_HELP)] = None,
    forget: Annotated[str | None, typer.Option("--forget", metavar="NAME", help="Forget this name.")] = None,
) -> Any:
    """Give an instance a name, or forget one. The instance itself does not change.

    The name means GPU, profile and placement, not the UUID: that comes back with whatever is created there. One
    instance has one name; it is kept over a reboot.
    """
    if (forget is None) == (name is None or instance is None):
        raise BadUsage(
            "give a name and an instance, or a name to forget",
            "for example: gpushare mig name train 0/2; gpushare mig name --forget train",
            code="no_name",
        )
    plan = _binding(name or "", instance or "", gpu) if forget is None else _forgetting(forget)
    return carried_out("mig name", plan)


def _binding(name: str, instance: str, gpu: str | None) -> Plan:
    from gpushare.actions.mig_bind import bind_step, name_taken
    from gpushare.actions.plan import Plan
    from gpushare.cli.mig_transaction import current
    from gpushare.host.mig_names import NamedInstance, check_name, names_of
    from gpushare.mig.target import find_targets

    check_name(name)
    host = settings.connect()
    _, layouts = current(host, gpu, named=True)
    targets = find_targets(instance, layouts)
    if len(targets) != 1:
        raise BadUsage(
            f"{quoted(instance)} is {len(targets)} instances; a name means one", "give GPU/GI", code="one_instance"
        )
    layout = next(one for one in layouts if one.gpu == targets[0].gpu)
    found = next(one for one in layout.instances if one.id == targets[0].instance)
    if targets[0].compute is not None and len(found.compute) > 1:
        raise BadUsage(
            f"'{instance[:60]}' is one of {len(found.compute)} compute instances of {found.profile.name}:{found.start}; "
            "a name means the GPU instance with all of them",
            f"name that: gpushare mig name {name} {layout.gpu}/{found.id}; one compute instance is taken with -g MIG-<uuid>",
            gpu=str(layout.gpu),
            code="part_of_instance",
        )
    one = NamedInstance(name=name, gpu_uuid=layout.uuid or "", profile=found.profile.name, start=found.start)
    given = names_of(host)
    if name in given and _place(given[name]) != _place(one):
        raise name_taken(given[name], {layout.uuid: layout.gpu for layout in layouts})
    steps = () if found.name == name else (bind_step(host, one, layout.gpu),)
    if steps and found.name is not None:
        raise BadUsage(
            f"{found.profile.name}:{found.start} on GPU {layout.gpu} is named '{found.name}' already",
            f"one instance has one name; forget that one first: gpushare mig name --forget {found.name}",
            code="name_taken",
        )
    return Plan(title=f"name {name}", steps=steps, undo=f"gpushare mig name --forget {name}")


def _forgetting(name: str) -> Plan:
    from gpushare.actions.mig_bind import forget_step
    from gpushare.actions.plan import Plan
    from gpushare.host.mig_names import names_of
    from gpushare.mig.target import need_name

    host = settings.connect()
    found = names_of(host).get(name)
    if found is None:
        # Else it would only be said that there is none.
        try:
            need_name(name, "")
        except BadUsage as error:
            raise error.restated(hint="see the names: gpushare mig status") from None
        raise NotFound(f"there is no name '{name[:60]}'", "see the names: gpushare mig status", code="no_name")
    return Plan(title=f"forget {name}", steps=(forget_step(host, found),))


def _place(one: NamedInstance) -> tuple[str, str, int]:
    return one.gpu_uuid, one.profile, one.start
