"""The journal of a MIG change: what was there, what is to be, and the step that was begun. It outlives a crash.

``<run>/mig/journal.json``, beside the lock that every change holds from its plan to its end. A journal whose lock
nobody holds is that of a change that died in the middle.

Root and a user to whom mig/config is open have different run directories. So the device node of that capability, which
both can open and nobody else can, is locked too. A journal is undone by the user whose it is.

What could not be undone stays beside it, as ``not-restored-N.json``, until it is back or is accepted; a journal that
cannot be read stays where it is, and in the way of every change, until it is set aside as ``set-aside-N.json``.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import GpushareError, OperationFailed
from gpushare.host.host import make_private_directory
from gpushare.host.kept_file import open_lock, read_understood, replace_file, sync_directory, writing

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.shape import GpuShape

SCHEMA: Final = 1
_READ: Final = os.O_RDONLY | os.O_CLOEXEC
_WHAT: Final = "of the MIG journal"
_UNWRITABLE: Final = "journal_unwritable"
UNREADABLE: Final = "journal_unreadable"
CONFIG_NODE: Final = Path("/dev/nvidia-caps/nvidia-cap1")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One change: shapes by GPU, before and as planned, and the step that was begun last."""

    title: str
    pid: int
    # Instances do not survive a reboot: what a journal of before it tells is over.
    boot_id: str | None
    before: tuple[GpuShape, ...]
    after: tuple[GpuShape, ...]
    # The names that it gives.
    names: tuple[str, ...] = ()
    step: str | None = None
    schema: int = SCHEMA


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
            OperationFailed: another gpushare holds it for longer than ``seconds``, or it cannot be made.
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
                        # No such node before R450, or MIG was never used: then nobody else can change it either.
                        continue
                held.callback(os.close, descriptor)
                _wait_for(descriptor, path, seconds, deadline)
            yield

    def running(self) -> bool:
        """Return whether a change is going on at this moment."""
        try:
            descriptor = os.open(self._directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            # Shared, so that two who ask do not take each other for a change.
            return not _lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def left(self) -> JournalEntry | None:
        """Return the entry of a change that died in the middle; None: there is none, or one is going on.

        Raises:
            OperationFailed: as `begun`.
        """
        return None if not os.path.lexists(self._path) or self.running() else self.begun()

    def begun(self) -> JournalEntry | None:
        """Return the entry that stands there; for who holds the lock.

        Raises:
            OperationFailed: there is one, and it cannot be read (code ``journal_unreadable``).
        """
        try:
            return _read(self._path)
        except ValueError as error:
            raise OperationFailed(
                f"a MIG change was interrupted, and its journal {self._path} cannot be read: {error}; what was being "
                "changed cannot be known, so nothing is changed",
                "look whether all is as it should be: gpushare mig status; then set the journal aside: "
                "gpushare mig recover --forget",
                code=UNREADABLE,
            ) from None

    def not_restored(self) -> list[tuple[Path, JournalEntry | None]]:
        """Return the entries whose changes could not be undone, each with its file; None: it cannot be read."""
        found: list[tuple[Path, JournalEntry | None]] = []
        for path in sorted(self._directory.glob("not-restored-*.json")):
            try:
                entry = _read(path)
            except ValueError:
                found.append((path, None))
            else:
                found += [] if entry is None else [(path, entry)]
        return found

    def begin(
        self, title: str, before: Sequence[GpuShape], after: Sequence[GpuShape], *, names: Sequence[str] = ()
    ) -> None:
        """Write down what is there and what is to be, before the first step.

        Raises:
            OperationFailed: it cannot be written.
        """
        self._entry = JournalEntry(
            title=title,
            pid=os.getpid(),
            boot_id=boot_id(),
            before=tuple(before),
            after=tuple(after),
            names=tuple(names),
        )
        self._write(self._entry)

    def note(self, step: str) -> None:
        """Write down the step that is begun now, on the disk before it acts.

        Raises:
            OperationFailed: it cannot be written.
        """
        if self._entry is not None:
            self._entry = replace(self._entry, step=step)
            self._write(self._entry)

    def end(self) -> None:
        """The change is done, or undone."""
        self._entry = None
        self.drop(self._path)

    def give_up(self) -> None:
        """The change is over, and not all of it could be undone: it is kept for `not_restored`.

        Where it cannot be kept apart, it stands as one that was interrupted.
        """
        self._entry = None
        with contextlib.suppress(GpushareError):
            self._rename("not-restored")

    def set_aside(self) -> Path:
        """Put a journal that cannot be read out of the way, and return where; for who holds the lock.

        Raises:
            NoPermission, OperationFailed: it cannot be moved.
        """
        return self._rename("set-aside")

    def drop(self, path: Path) -> None:
        """Remove an entry that is over; for who holds the lock.

        Raises:
            NoPermission, OperationFailed: it cannot be removed.
        """
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
        with writing(self._path, _WHAT, code=_UNWRITABLE):
            replace_file(self._path, json.dumps(asdict(entry)), durable=True)


def boot_id() -> str | None:
    """Return what this boot of the machine is called (``/proc/sys/kernel/random/boot_id``)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _read(path: Path) -> JournalEntry | None:
    """Return the entry of a file; None: there is none, or it is of another boot, and over.

    Raises:
        ValueError: it cannot be understood; the message says why.
    """
    try:
        raw = read_understood(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if isinstance(raw, dict) and isinstance(raw.get("boot_id"), str) and raw["boot_id"] != boot_id():
        return None
    if isinstance(raw, dict) and isinstance(raw.get("schema"), int) and raw["schema"] > SCHEMA:
        raise ValueError(f"it is a newer gpushare's (schema {raw['schema']})")
    try:
        return _entry_of(raw)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it is not what gpushare writes") from None


def _entry_of(raw: Any) -> JournalEntry:
    # Not at the top: there is hardly ever a journal, and shapes bring the planner's types with them.
    from gpushare.mig.shape import from_json

    before, after = ([from_json(one) for one in raw[key]] for key in ("before", "after"))
    known = {key: raw[key] for key in ("title", "pid", "boot_id", "step")}
    names = tuple(str(name) for name in raw["names"])
    return JournalEntry(**known, names=names, before=tuple(before), after=tuple(after))


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
