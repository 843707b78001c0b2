"""``gpushare mig recover``: a change that died in the middle is undone, and what could not come back is not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import settings
from gpushare.cli.mig_transaction import need_root
from gpushare.errors import OperationFailed

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mig_entry import JournalEntry
    from gpushare.host.mig_journal import Journal


def recover(
    forget: Annotated[
        bool, typer.Option("--forget", help="Accept what could not come back; set a broken journal aside.")
    ] = False,
) -> Any:
    """Undo what a change left that died in the middle. Every other change does it first, too.

    What could not come back, because somebody uses what is in its place, stays named here, by `mig status` and by
    `doctor` until it is there again or accepted, and is tried again each time this is called. A journal that cannot be read is in the way of every change.
    """
    from gpushare.host.leftovers import sweep
    from gpushare.host.mig_journal import Journal
    from gpushare.show.result import Result

    host = settings.connect()
    journal = Journal(host)
    if not settings.dry_run:
        sweep(host)
    done, notes = (_forgotten(host, journal), ()) if forget else _recovered(host, journal)
    if done:
        text = "\n".join(done)
    elif journal.running():
        text = "another change is going on"
    else:
        text = "nothing to forget" if forget else "no change was interrupted; nothing to do"
    data = {"dry_run": settings.dry_run, "done": [] if settings.dry_run else list(done)}
    return Result(command="mig recover", data=data, text=text, notes=notes)


def _recovered(host: Host, journal: Journal) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what was done, and what of earlier changes is not back yet.

    Raises:
        OperationFailed: something is not back; all of it is named.
    """
    from gpushare.actions.mig_left import not_restored
    from gpushare.actions.mig_recover import recover

    left = journal.left()
    if journal.running() or (left is None and not journal.not_restored()):
        return (), ()
    done: tuple[str, ...] = ()
    if settings.dry_run:
        done = () if left is None else (_foreseen(host, left),)
    else:
        need_root(host)
        with journal.locked():
            done = recover(host, journal, retry=True)
    lost = not_restored(host, journal)
    if lost and not done:
        hints = dict.fromkeys(one.remedy for one in lost)
        raise OperationFailed("; ".join(one.seen for one in lost), "; ".join(hints), code="not_restored")
    return done, tuple(map(str, lost))


def _foreseen(host: Host, left: JournalEntry) -> str:
    from gpushare.actions.mig_recover import is_complete

    if is_complete(host, left):
        return f"'{left.title}' was interrupted, and is complete; nothing would be undone"
    return f"'{left.title}' was interrupted at '{left.step or 'its start'}'; it would be undone"


def _forgotten(host: Host, journal: Journal) -> tuple[str, ...]:
    from gpushare.actions.mig_recover import accept

    if settings.dry_run:
        return () if journal.running() else accept(host, journal, dry_run=True)
    with journal.locked():
        return accept(host, journal, dry_run=False)
