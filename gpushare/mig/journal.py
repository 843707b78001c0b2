"""The journal of a MIG change, which outlives a crash: the layout before and after, and the step that was begun.

``<run>/mig/journal.json`` is next to the lock that every change holds from its plan to its end. A journal whose lock
nobody holds belongs to an interrupted change.

Root and a user with access to mig/config have different run directories. So the device node of that capability, which
only these two can open, is locked too. Each user undoes his own journal.

What could not be undone is kept as ``not-restored-N.json`` until it is restored or accepted. A journal that cannot be
read blocks every change until it is set aside as ``set-aside-N.json``.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, OperationFailed
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.identity import Identity, identity_of, lives
from gpushare.host.records import clear_leftovers, open_lock, sync_directory, writing
from gpushare.host.store import Elsewhere, Kept, RecordStore
from gpushare.mig.shape import NOTHING, KeptShape, Proof, kept_shape, shape_from
from gpushare.typed import Count, Pid
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.shape import Creation, GpuShape


@dataclass(frozen=True, kw_only=True)
class JournalEntry(Kept):
    """One change: the shape of each GPU as it ``was`` and as ``planned``, and the last step that was begun."""

    title: str
    pid: Pid
    started: Count
    was: tuple[KeptShape, ...]
    planned: tuple[KeptShape, ...]
    # The names that the change gives.
    names: tuple[str, ...]
    step: str | None
    # What the change has created.
    proof: Proof
    # An undo was tried and the driver refused it: after a second failure the entry is kept apart.
    tried: bool

    @property
    def before(self) -> tuple[GpuShape, ...]:
        return tuple(map(shape_from, self.was))

    @property
    def after(self) -> tuple[GpuShape, ...]:
        return tuple(map(shape_from, self.planned))


JOURNALS: Final = RecordStore(JournalEntry, "mig", "the journal of MIG changes", durable=True)


def read_entry(path: Path) -> JournalEntry | None:
    """Return the entry of a file; None: there is none, or it is from another boot.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    try:
        entry = JOURNALS.demanded(path)
    except Elsewhere as error:
        # Instances are those of the host in every PID namespace.
        entry = error.value
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    # Both have the same GPUs.
    if entry is not None and [shape.uuid for shape in entry.was] != [shape.uuid for shape in entry.planned]:
        raise ValueError("it is not what gpushare writes")
    return entry


_READ: Final = os.O_RDONLY | os.O_CLOEXEC
_WHAT: Final = "of the MIG journal"
_UNWRITABLE: Final = "journal_unwritable"
UNREADABLE: Final = "journal_unreadable"
CONFIG_NODE: Final = Path("/dev/nvidia-caps/nvidia-cap1")


class Journal:
    """The journal of one host."""

    def __init__(self, host: Host) -> None:
        self._directory = host.run_directory / "mig"
        self._path = self._directory / "journal.json"
        self._entry: JournalEntry | None = None
        self._locks = [self._directory / "lock", *([] if host.is_simulated else [CONFIG_NODE])]

    @contextlib.contextmanager
    def locked(self, *, seconds: float = 120.0) -> Iterator[None]:
        """Hold the lock of all MIG changes of this host; creating an instance may take ten seconds.

        Raises:
            OperationFailed: another gpushare holds it for longer than ``seconds``, or it cannot be created.
            NoPermission: the directory or the lock is not this user's.
        """
        make_private_directory(self._directory.parent)
        make_private_directory(self._directory)
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as held:
            for path in self._locks:
                if path.parent == self._directory:
                    descriptor = open_lock(path, _WHAT, code=_UNWRITABLE)
                else:
                    try:
                        descriptor = os.open(path, _READ)
                    except OSError:
                        # No such node: before R450, or MIG was never used. Then nobody else can change MIG either.
                        continue
                held.callback(os.close, descriptor)
                _wait_for(descriptor, path, seconds, deadline)
            # What a crash in the middle of a write left.
            clear_leftovers(self._directory)
            yield

    def running(self) -> bool:
        """Return whether a change is running at this moment.

        The lock can be opened only by its owner; other users find the changing process in the journal.
        """
        if not self._is_trusted():
            return False
        try:
            descriptor = os.open(self._directory / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            return self._is_told()
        except OSError:
            return False
        try:
            # Shared, so that two readers do not take each other for a change.
            return not _lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def _is_trusted(self) -> bool:
        return is_trusted_directory(self._directory.parent, self._directory.name)

    def _is_told(self) -> bool:
        """Return whether the process that wrote the journal is alive and belongs to the owner of the file."""
        try:
            entry, owner = JOURNALS.read(self._path), os.lstat(self._path).st_uid
        except OSError:
            return False
        return entry is not None and lives(Identity(entry.pid, entry.started), owner)

    def left(self) -> JournalEntry | None:
        """Return the entry of an interrupted change; None: there is none, or a change is running.

        Raises:
            OperationFailed: as `begun`.
        """
        there = os.path.lexists(self._path) and self._is_trusted()
        return None if not there or self.running() else self.begun()

    def begun(self) -> JournalEntry | None:
        """Return the current entry. The caller holds the lock.

        Raises:
            OperationFailed: there is one, and it cannot be read (code ``journal_unreadable``).
        """
        try:
            return read_entry(self._path)
        except ValueError as error:
            raise OperationFailed(
                f"a MIG change was interrupted, and its journal {self._path} cannot be read: {error}. What was being "
                "changed is unknown, so nothing is changed",
                "check the layout: gpushare mig status; then set the journal aside: gpushare mig recover --forget",
                code=UNREADABLE,
            ) from None

    def not_restored(self) -> list[tuple[Path, JournalEntry | None]]:
        """Return the entries of changes that could not be undone, each with its file; None: it cannot be read."""
        found: list[tuple[Path, JournalEntry | None]] = []
        if not self._is_trusted():
            return found
        for path in sorted(self._directory.glob("not-restored-*.json")):
            try:
                entry = read_entry(path)
            except ValueError:
                found.append((path, None))
            else:
                found += [] if entry is None else [(path, entry)]
        return found

    def begin(
        self, title: str, before: Sequence[GpuShape], after: Sequence[GpuShape], *, names: Sequence[str] = ()
    ) -> None:
        """Write the layout before and after, before the first step."""
        self._outdate(before)
        me = identity_of(os.getpid()) or Identity(os.getpid(), 0)
        self._entry = JournalEntry(
            title=title,
            **me._asdict(),
            was=tuple(map(kept_shape, before)),
            planned=tuple(map(kept_shape, after)),
            names=tuple(names),
            step=None,
            proof=NOTHING,
            tried=False,
            path=self._path,
        )
        self._write(self._entry)

    def _outdate(self, changing: Sequence[GpuShape]) -> None:
        """Drop the proof of kept entries for GPUs that change now: the driver reuses ids."""
        gpus = {shape.uuid for shape in changing}
        for _, entry in self.not_restored():
            if entry is not None and entry.proof != NOTHING and gpus & {shape.uuid for shape in entry.was}:
                self._write(replace(entry, proof=NOTHING))

    @property
    def proof(self) -> Proof:
        """Return what the change has created so far."""
        return NOTHING if self._entry is None else self._entry.proof

    def note(self, step: str, begun: Creation | None = None) -> None:
        """Write the step that is begun now to disk, before it acts; ``begun`` is what it is about to create."""
        if self._entry is not None:
            self._entry = replace(self._entry, step=step, proof=self._entry.proof.with_begun(begun))
            self._write(self._entry)

    def made(self, one: Creation) -> None:
        """Write what the driver has created, before anything else is done."""
        if self._entry is not None:
            # Kept in memory even if it cannot be written: a rollback asks for it.
            self._entry = replace(self._entry, proof=self._entry.proof.with_made(one))
            self._write(self._entry)

    def refused(self) -> None:
        """Write that nothing was created: an instance that appears there belongs to somebody else."""
        if self._entry is not None:
            self._entry = replace(self._entry, proof=self._entry.proof.with_begun(None))
            # The rollback that follows knows it from memory.
            with contextlib.suppress(GpushareError):
                self._write(self._entry)

    def end(self) -> None:
        """The change is done, or undone."""
        self._entry = None
        self.drop(self._path)

    def give_up(self) -> None:
        """The change is over but not all of it could be undone: keep the entry for `not_restored`.

        If it cannot be renamed, it remains the entry of an interrupted change.
        """
        self._entry = None
        with contextlib.suppress(GpushareError):
            self._rename("not-restored")

    def try_again(self, entry: JournalEntry) -> None:
        """Keep the entry of a change whose undo the driver refused: the next gpushare tries once more."""
        with contextlib.suppress(GpushareError):
            self._write(replace(entry, tried=True))

    def set_aside(self) -> Path:
        """Rename a journal that cannot be read, and return its new path. The caller holds the lock."""
        return self._rename("set-aside")

    def drop(self, path: Path) -> None:
        """Remove a finished entry. The caller holds the lock."""
        if os.path.lexists(path):
            with writing(path, _WHAT, code=_UNWRITABLE):
                path.unlink(missing_ok=True)
                sync_directory(self._directory)

    def _rename(self, name: str) -> Path:
        target = next(path for n in itertools.count(1) if not os.path.lexists(path := self._named(name, n)))
        with writing(self._path, _WHAT, code=_UNWRITABLE):
            self._path.rename(target)
            sync_directory(self._directory)
        return target

    def _named(self, name: str, number: int) -> Path:
        return self._directory / f"{name}-{number}.json"

    def _write(self, entry: JournalEntry) -> None:
        JOURNALS.write(entry, code=_UNWRITABLE)


def _wait_for(descriptor: int, path: Path, seconds: float, deadline: float) -> None:
    while not _lock(descriptor):
        if time.monotonic() > deadline:
            raise OperationFailed(
                f"another gpushare has been changing MIG for {seconds:g} s",
                f"see which: fuser -v {shlex.quote(str(path))}",
                code="locked",
            )
        time.sleep(0.02)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
