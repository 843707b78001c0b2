"""What MIG changes left behind: one that was interrupted, a journal that cannot be read, what could not come back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, OperationFailed
from gpushare.host.mig import MigReader
from gpushare.mig.shape import GpuShape, differences, shape_of

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mig_entry import JournalEntry
    from gpushare.host.mig_journal import Journal

RECOVER: Final = "gpushare mig recover"
ACCEPT: Final = f"or accept it as it is: {RECOVER} --forget"


@dataclass(frozen=True, kw_only=True)
class Left:
    """One thing that is left; ``id`` as the check of `gpushare doctor`, ``at`` the step in which a change died."""

    id: str
    seen: str
    remedy: str
    at: str | None = None

    def __str__(self) -> str:
        return f"{self.seen}: {self.remedy}"


def left_behind(host: Host, journal: Journal) -> list[Left]:
    """Return all that is left, while no change is going on.

    Raises:
        GpushareError: NVML does not answer.
    """
    found = [one for one in [interrupted(journal)] if one is not None]
    lost = [] if journal.running() else not_restored(host, journal)
    return [*found, *lost]


def interrupted(journal: Journal) -> Left | None:
    """Return the change that died in the middle, also when its journal cannot be read."""
    try:
        entry = journal.left()
    except OperationFailed as error:
        return Left(id="mig.interrupted", seen=error.message, remedy=error.hint)
    if entry is None:
        return None
    seen = f"'{entry.title}' was interrupted in the middle"
    return Left(id="mig.interrupted", seen=seen, remedy=RECOVER, at=entry.step)


def not_restored(host: Host, journal: Journal) -> list[Left]:
    """Return what could not come back, and is not there yet, of each change.

    Raises:
        GpushareError: NVML does not answer.
    """
    found = []
    for path, entry in journal.not_restored():
        if entry is None:
            seen = f"{path} tells what could not come back, and cannot be read"
            found.append(Left(id="mig.not_restored", seen=seen, remedy=f"see: gpushare mig status; {ACCEPT}"))
        elif wrong := missing(host, entry):
            seen = f"of '{entry.title}', which did not end well, could not come back: {'; '.join(wrong)}"
            found.append(Left(id="mig.not_restored", seen=seen, remedy=f"{_way_back(host, entry)}; {ACCEPT}"))
    return found


def _way_back(host: Host, entry: JournalEntry) -> str:
    # Not at the top: hardly ever anything is left, and it brings all of a change with it.
    from gpushare.actions.mig_undo import as_command

    index = {gpu.uuid: gpu.index for gpu in host.nvml.identities() if gpu.uuid}
    back = [as_command(replace(one, index=index[one.uuid])) for one in entry.before if one.uuid in index]
    return f"make it as it was: {'; '.join(back)}" if back else "see: gpushare mig status"


def missing(host: Host, entry: JournalEntry) -> tuple[str, ...]:
    """Return in words what is neither as it was nor as it should have become; what others made meanwhile is theirs.

    Raises:
        GpushareError: NVML does not answer.
    """
    wrong = _differences(host, entry, entry.before)
    return wrong if wrong and _differences(host, entry, entry.after) else ()


def _differences(host: Host, entry: JournalEntry, wanted: tuple[GpuShape, ...]) -> tuple[str, ...]:
    index = {gpu.uuid: gpu.index for gpu in host.nvml.identities() if gpu.uuid}
    said: list[str] = []
    for shape, before, after in zip(wanted, entry.before, entry.after, strict=True):
        if shape.uuid not in index:
            said.append(f"GPU {shape.index} ({shape.uuid}) is not there")
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
