"""``gpushare mig grant`` and ``mig revoke``: which users may use a named MIG instance."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import ChangingCommand, settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer import Typer

    from gpushare.actions.plan import Plan
    from gpushare.host.host import Host

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

    return _carried("mig grant", lambda host: plan_grant(host, name, user))


def revoke(
    name: Name,
    user: Annotated[
        str | None, typer.Argument(metavar="[USER]", help="Only this one; else all.", show_default=False)
    ] = None,
) -> Any:
    """Take a user's grant back, or all of them; then every local user may use the instance again. Needs root."""
    from gpushare.actions.mig_grant import plan_revoke

    return _carried("mig revoke", lambda host: plan_revoke(host, name, user))


def _carried(command: str, make: Callable[[Host], Plan]) -> Any:
    """Carry it out under the lock of all MIG changes, planned anew: another may just have granted the same instance."""
    from gpushare.cli.changes import carried_out
    from gpushare.cli.mig_transaction import recovered
    from gpushare.host.mig_journal import Journal

    host = settings.connect()
    journal = Journal(host)
    if settings.dry_run or host.uid != 0:
        # Who is not root is refused, but for what is only noted of an instance that is gone.
        return carried_out(command, make(host))
    if journal.left() is None:
        # What is refused anyway changes nothing.
        make(host)
    with recovered(host, journal) as notes:
        plan = make(host)
        return carried_out(command, replace(plan, notes=(*notes, *plan.notes)))
