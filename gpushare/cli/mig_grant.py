"""``gpushare mig grant`` and ``mig revoke``: which users may use a named MIG instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import ChangingCommand, settings

if TYPE_CHECKING:
    from typer import Typer

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the instance.", show_default=False)]


def add(group: Typer) -> None:
    """Add both commands to ``gpushare mig``."""
    group.command("grant", cls=ChangingCommand, short_help="Let only named users use an instance.")(grant)
    group.command("revoke", cls=ChangingCommand, short_help="Take a grant back.")(revoke)


def grant(
    name: Name,
    user: Annotated[str, typer.Argument(metavar="USER", help="Who may use it: a name or an id.", show_default=False)],
) -> Any:
    """Let a user, and nobody else but root, use a MIG instance. Needs root.

    Without a grant every local user may use every instance: MIG isolates memory and SMs, not users. A second grant
    adds a user. The grant is kept with the name, and gpushare applies it again when it makes the instance anew.
    """
    from gpushare.actions.mig_grant import plan_grant
    from gpushare.cli.changes import carried_out

    host = settings.connect()
    return carried_out("mig grant", plan_grant(host, name, user))


def revoke(
    name: Name,
    user: Annotated[
        str | None, typer.Argument(metavar="[USER]", help="Only this one; else all.", show_default=False)
    ] = None,
) -> Any:
    """Take a user's grant back, or all of them; then every local user may use the instance again. Needs root."""
    from gpushare.actions.mig_grant import plan_revoke
    from gpushare.cli.changes import carried_out

    host = settings.connect()
    return carried_out("mig revoke", plan_revoke(host, name, user))
