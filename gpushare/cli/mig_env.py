"""``gpushare mig env``: the variable that leads a shell's programs to a named instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import Command, settings
from gpushare.errors import BadUsage

if TYPE_CHECKING:
    from gpushare.actions.mig_places import Place


def add(group: typer.Typer) -> None:
    """Add the command."""
    group.command("env", cls=Command, short_help="Print the variable for a named instance.")(env)


def env(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of an instance.", show_default=False)],
) -> Any:
    """Print the export line that leads a shell's programs to an instance: eval "$(gpushare mig env train)".

    The instance is looked at first: a MIG UUID may have come back with another size, and is then not printed.
    A program that runs so holds no lease: `gpushare run --mig` also keeps others out.
    """
    import shlex

    from gpushare.show.result import Result

    places = _places(name)
    place = places[0]
    environment = {"CUDA_VISIBLE_DEVICES": place.mig.uuid}
    notes: tuple[str, ...] = ()
    if len(places) > 1:
        notes = (f"{name} has {len(places)} compute instances; this is the first, a CUDA program uses one",)
    return Result(
        command="mig env",
        data={
            "name": name,
            "uuid": place.mig.uuid,
            "gpu": place.gpu.index,
            "profile": place.instance.profile.name,
            "start": place.instance.start,
            "environment": environment,
        },
        text="\n".join(f"export {key}={shlex.quote(value)}" for key, value in environment.items()),
        notes=notes,
    )


def _places(name: str) -> list[Place]:
    from gpushare.actions.mig_places import named_places
    from gpushare.mig.target import is_profile, need_name

    if is_profile(name):
        raise BadUsage(
            f"'{name[:60]}' is a profile: which instance of it is meant, only a name says",
            f"give the name of an instance; or let one be chosen: gpushare run --mig {name[:60]} -- CMD",
            code="not_a_name",
        )
    return named_places(settings.connect(), need_name(name, 'eval "$(gpushare mig env NAME)"'))
