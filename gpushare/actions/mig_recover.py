"""After a crash in the middle of a MIG change: undone from the journal, or finished where undoing would hurt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.actions.mig_after import recover_daemons
from gpushare.actions.mig_change import look, restore
from gpushare.errors import GpushareError, OperationFailed
from gpushare.host.mig_changes import MigChanges
from gpushare.mig.shape import differences

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mig_journal import Journal, JournalEntry
    from gpushare.mig.shape import GpuShape


def recover(host: Host, journal: Journal) -> tuple[str, ...]:
    """Finish or undo the change that an earlier gpushare died in, under the lock; return what was done, in words.

    What was reached already is kept when it is all of it; else every GPU of the change goes back to what it was. The
    journal is cleared in any case: what could not come back is named once, and not undone behind anybody's back later.

    Raises:
        OperationFailed: something could not come back; all of it is named (code ``not_restored``).
    """
    entry = journal.begun()
    if entry is None:
        return ()
    if _is_done(host, entry):
        said = [f"'{entry.title}', which was interrupted, was complete; nothing had to be undone"]
    else:
        said = [f"'{entry.title}', which was interrupted at '{entry.step or 'its start'}', was undone"]
        _undo(host, journal, entry)
    journal.end()
    for shape in entry.before:
        gpu = host.nvml.gpu(shape.index)
        if gpu.error is None:
            said += recover_daemons(host, gpu)
    return tuple(said)


def _is_done(host: Host, entry: JournalEntry) -> bool:
    return not any(differences(look(host, shape.index), shape) for shape in entry.after)


def _undo(host: Host, journal: Journal, entry: JournalEntry) -> None:
    trouble: list[GpushareError] = []
    for before, after in zip(entry.before, entry.after, strict=True):
        try:
            _undo_gpu(host, before, after)
        except GpushareError as error:
            trouble.append(error)
    if trouble:
        journal.end()
        raise OperationFailed(
            f"'{entry.title}' was interrupted; " + "; ".join(error.message for error in trouble),
            "; ".join(dict.fromkeys(error.hint for error in trouble)),
            gpu=trouble[0].gpu,
            code="not_restored",
        )


def _undo_gpu(host: Host, before: GpuShape, after: GpuShape) -> None:
    changes = MigChanges(host.nvml)
    mode = changes.mode(before.index)
    if before.mig_enabled and mode != (True, True):
        changes.set_mode(before.index, enabled=True)
    restore(host, before, after)
    if before.mig_enabled is False and mode != (False, False):
        host.nvml.restart()
        changes.set_mode(before.index, enabled=False)
