"""Recovery from a crash during a MIG change: undone by the journal, unless the change was complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage, GpushareError, OperationFailed
from gpushare.mig.daemons import forget_gone, recover_daemons
from gpushare.mig.driver import MigChanges, MigReader
from gpushare.mig.grant import forget, regrant
from gpushare.mig.made import Made, note_made
from gpushare.mig.names import names_of
from gpushare.mig.shape import GpuShape, differences, shape_of
from gpushare.mig.undo import CallFailed, as_command, look, restore

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.journal import Journal, JournalEntry
    from gpushare.mig.shape import Proof


RECOVER: Final = "gpushare mig recover"
ACCEPT: Final = f"or accept it as it is: {RECOVER} --forget"


@dataclass(frozen=True, kw_only=True)
class Left:
    """One thing that a change left; ``id`` is the check of `gpushare doctor`, ``at`` the step at which the change died."""

    id: str
    seen: str
    remedy: str
    at: str | None = None

    def __str__(self) -> str:
        return f"{self.seen}: {self.remedy}"


def left_behind(host: Host, journal: Journal) -> list[Left]:
    """Return what changes left; while one is running, nothing counts as left."""
    found = [one for one in [interrupted(journal)] if one is not None]
    lost = [] if journal.running() else not_restored(host, journal)
    return [*found, *lost]


def interrupted(journal: Journal) -> Left | None:
    """Return the change that was interrupted, even if its journal cannot be read."""
    try:
        entry = journal.left()
    except OperationFailed as error:
        return Left(id="mig.interrupted", seen=error.message, remedy=error.hint)
    if entry is None:
        return None
    seen = f"'{entry.title}' was interrupted"
    return Left(id="mig.interrupted", seen=seen, remedy=RECOVER, at=entry.step)


def not_restored(host: Host, journal: Journal) -> list[Left]:
    """Return what each change could not restore and is still missing."""
    found = []
    for path, entry in journal.not_restored():
        if entry is None:
            seen = f"{path}, the record of what could not be restored, cannot be read"
            found.append(Left(id="mig.not_restored", seen=seen, remedy=f"see: gpushare mig status; {ACCEPT}"))
        elif wrong := missing(host, entry):
            seen = f"'{entry.title}' failed, and this could not be restored: {'; '.join(wrong)}"
            found.append(Left(id="mig.not_restored", seen=seen, remedy=f"{_way_back(host, entry)}; {ACCEPT}"))
    return found


def _way_back(host: Host, entry: JournalEntry) -> str:
    # Imported here because it is rarely needed and loads all modules of a change.
    from gpushare.mig.undo import as_command

    index = {gpu.uuid: gpu.index for gpu in host.nvml.identities() if gpu.uuid}
    back = [as_command(replace(one, index=index[one.uuid])) for one in entry.before if one.uuid in index]
    return f"restore it: {'; '.join(back)}" if back else "see: gpushare mig status"


def missing(host: Host, entry: JournalEntry) -> tuple[str, ...]:
    """Return in words what differs both from before and from after the change; instances of others do not count."""
    wrong = _differences(host, entry, entry.before)
    return wrong if wrong and _differences(host, entry, entry.after) else ()


def _differences(host: Host, entry: JournalEntry, wanted: tuple[GpuShape, ...]) -> tuple[str, ...]:
    index = {gpu.uuid: gpu.index for gpu in host.nvml.identities() if gpu.uuid}
    said: list[str] = []
    for shape, before, after in zip(wanted, entry.before, entry.after, strict=True):
        if shape.uuid not in index:
            said.append(f"GPU {shape.index} ({shape.uuid}) is missing")
            continue
        gpu = host.nvml.gpu(index[shape.uuid])
        if gpu.error is not None:
            said.append(gpu.error)
            continue
        try:
            now = shape_of(MigReader(host.nvml).layout(gpu), mig_enabled=gpu.mig_enabled)
        except GpushareError as error:
            said.append(f"GPU {gpu.index}: {error.message}")
            continue
        ours = {one.place for one in (*before.instances, *after.instances)}
        now = replace(now, instances=tuple(one for one in now.instances if one.place in ours))
        said += differences(now, replace(shape, index=gpu.index))
    return tuple(said)


def recover(host: Host, journal: Journal, *, retry: bool = False) -> tuple[str, ...]:
    """Finish or undo an interrupted change, under the lock; return what was done, in words.

    A complete change is kept; otherwise every GPU of the change is restored. What cannot be restored is reported, also
    later (`not_restored`), and is tried again only with ``retry``, so that nothing changes behind the user's back.
    If only a driver call failed, the next gpushare tries once more.

    Raises:
        OperationFailed: something could not be restored (code ``not_restored``), or the journal cannot be read.
    """
    entry = journal.begun()
    said = () if entry is None else _recovered(host, journal, entry)
    said = (*said, *_earlier(host, journal, retry=retry))
    if not journal.not_restored():
        forget_gone(host)
    return said


def _earlier(host: Host, journal: Journal, *, retry: bool) -> list[str]:
    """Drop entries of earlier changes that are restored by now; with ``retry`` try to restore the others."""
    said = []
    for path, kept in journal.not_restored():
        if kept is None or (missing(host, kept) and not retry):
            continue
        try:
            entry = _found_again(host, kept)
            if missing(host, kept):
                others = _undo(host, entry)
                said.append(f"'{entry.title}', which had failed, is now undone")
                said += map(_stays, others)
        except GpushareError:
            # `not_restored` still reports it.
            continue
        said += _finished(host, entry)
        # Otherwise it would be reported again after a later change.
        journal.drop(path)
    return said


def is_complete(host: Host, entry: JournalEntry) -> bool:
    """Return whether an interrupted change was complete, so that nothing would be undone."""
    try:
        return _is_done(host, _found_again(host, entry))
    except GpushareError:
        return False


def accept(host: Host, journal: Journal, *, dry_run: bool) -> tuple[str, ...]:
    """Forget what could not be restored, and set aside a journal that cannot be read; return what was done, in words."""
    said, would = [], "would be " if dry_run else ""
    try:
        entry = journal.begun()
    except OperationFailed:
        where = "" if dry_run else f" as {journal.set_aside()}"
        said.append(f"the journal of a MIG change, which cannot be read, {would or 'was '}set aside{where}")
    else:
        if entry is not None and not entry.tried:
            raise BadUsage(
                f"'{entry.title}' was interrupted and is not undone yet",
                f"undo it first: {RECOVER}; only what cannot be restored is forgotten",
                code="not_recovered",
            )
        if entry is not None and not dry_run:
            journal.give_up()
        elif entry is not None:
            said.append(f"'{entry.title}', which was interrupted and could not be undone, would be forgotten")
    said += [f"{one.seen}; this {would or 'is '}forgotten" for one in not_restored(host, journal)]
    for path, _ in () if dry_run else journal.not_restored():
        journal.drop(path)
    return tuple(said)


def _recovered(host: Host, journal: Journal, entry: JournalEntry) -> tuple[str, ...]:
    try:
        entry = _found_again(host, entry)
        if _is_done(host, entry):
            _note_made(host, entry)
            said = [f"'{entry.title}', which was interrupted, was complete; nothing had to be undone"]
        else:
            said = [f"'{entry.title}', which was interrupted at '{entry.step or 'its start'}', was undone"]
            said += map(_stays, _undo(host, entry))
    except OperationFailed as error:
        if isinstance(error, CallFailed) and not entry.tried:
            journal.try_again(entry)
            raise error.restated(hint=f"try again: {RECOVER}; else {error.hint}; {ACCEPT}") from error
        if error.code == "not_restored":
            journal.give_up()
            raise error.restated(hint=f"{error.hint}; {ACCEPT}") from error
        raise
    _forget_lost(host, entry)
    journal.end()
    return (*said, *_given_back(host, entry))


def _stays(one: str) -> str:
    return f"{one} is there and stays: nothing proves that this change created it"


def _finished(host: Host, entry: JournalEntry) -> list[str]:
    _forget_lost(host, entry)
    return _given_back(host, entry)


def _given_back(host: Host, entry: JournalEntry) -> list[str]:
    """Restore the grants and daemons of existing instances; return what was done, or failed, in words."""
    said = []
    for shape in entry.before:
        said += regrant(host, shape.uuid)
        gpu = host.nvml.gpu(shape.index)
        if gpu.error is None:
            said += recover_daemons(host, gpu)
    return said


def _found_again(host: Host, entry: JournalEntry) -> JournalEntry:
    """Return the entry with the current indexes of its GPUs: a GPU that fell off the bus renumbers the others."""
    now = {gpu.uuid: gpu.index for gpu in host.nvml.identities() if gpu.uuid}
    gone = [shape for shape in entry.before if shape.uuid not in now]
    if gone:
        names = ", ".join(f"GPU {shape.index} ({shape.uuid})" for shape in gone)
        raise OperationFailed(
            f"'{entry.title}' was interrupted, and {names} is missing; nothing was undone",
            "; ".join(["see: gpushare mig status", *(f"then: {as_command(shape)}" for shape in entry.before)]),
            gpu=str(gone[0].index),
            code="not_restored",
        )
    was, planned = (tuple(replace(one, index=now[one.uuid]) for one in kept) for kept in (entry.was, entry.planned))
    return replace(entry, was=was, planned=planned)


def _forget_lost(host: Host, entry: JournalEntry) -> None:
    """Forget names that the change gave to instances it did not create, or whose instance it destroyed."""
    now = {shape.uuid: look(host, shape.index) for shape in entry.before}
    there = {(uuid, *one.place) for uuid, shape in now.items() for one in shape.instances}
    gone = {(shape.uuid, *one.place) for shape in entry.before for one in shape.instances} - there
    places = {one.name: (one.gpu_uuid, *one.place) for one in names_of(host).values()}
    forget(
        host,
        [
            name
            for name, place in places.items()
            if place in gone or (name in entry.names and place[0] in now and place not in there)
        ],
    )


def _note_made(host: Host, entry: JournalEntry) -> None:
    made = [one for one in entry.proof.made if one.compute is None]
    note_made(host, entry.before, entry.after, [Made(one.gpu, one.profile, one.start) for one in made])


def _is_done(host: Host, entry: JournalEntry) -> bool:
    return not any(differences(look(host, shape.index), shape) for shape in entry.after)


def _undo(host: Host, entry: JournalEntry) -> list[str]:
    trouble: list[GpushareError] = []
    others: list[str] = []
    for before in entry.before:
        try:
            others += _undo_gpu(host, before, entry.proof)
        except GpushareError as error:
            trouble.append(error)
    if trouble:
        kind = CallFailed if all(isinstance(error, CallFailed) for error in trouble) else OperationFailed
        raise kind(
            f"'{entry.title}' was interrupted; " + "; ".join(error.message for error in trouble),
            "; ".join(dict.fromkeys(error.hint for error in trouble)),
            gpu=trouble[0].gpu,
            code="not_restored",
        )
    return others


def _undo_gpu(host: Host, before: GpuShape, proof: Proof) -> tuple[str, ...]:
    changes = MigChanges(host.nvml)
    mode = changes.mode(before.index)
    if before.mig_enabled and mode != (True, True):
        changes.set_mode(before.index, enabled=True)
    others = restore(host, before, proof)
    if before.mig_enabled is False and mode != (False, False):
        host.nvml.restart()
        changes.set_mode(before.index, enabled=False)
    return others
