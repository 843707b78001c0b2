"""The journal of a MIG change: what was there, what is to be, and the step that was begun. It outlives a crash.

``<run>/mig/journal.json``, beside the lock that every change holds from its plan to its end. A journal whose lock
nobody holds is that of a change that died in the middle.

Root and a user to whom mig/config is open have different run directories. So the device node of that capability, which
both can open and nobody else can, is locked too. A journal is undone by the user whose it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import OperationFailed
from gpushare.host.host import make_private_directory
from gpushare.host.kept_file import read_trusted, replace_file, sync_directory

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.shape import GpuShape

SCHEMA: Final = 1
_READ: Final = os.O_RDONLY | os.O_CLOEXEC
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
            NoPermission: the directory is not this user's.
        """
        make_private_directory(self._directory.parent)
        make_private_directory(self._directory)
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as held:
            for path in self._locks:
                own = path.parent == self._directory
                try:
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC if own else _READ, 0o644)
                except OSError as error:
                    if own:
                        raise self._unwritable(path, error) from error
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
        """Return the entry of a change that died in the middle; None: there is none, or one is going on."""
        entry = self._read()
        if entry is None or self.running():
            return None
        return entry if entry.boot_id == boot_id() else None

    def begun(self) -> JournalEntry | None:
        """Return the entry that stands there; for who holds the lock."""
        entry = self._read()
        return entry if entry is not None and entry.boot_id == boot_id() else None

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
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
            sync_directory(self._directory)

    def _read(self) -> JournalEntry | None:
        try:
            return _entry_of(read_trusted(self._path))
        except (ValueError, KeyError, TypeError):
            return None

    def _write(self, entry: JournalEntry) -> None:
        try:
            replace_file(self._path, json.dumps(asdict(entry)), durable=True)
        except OSError as error:
            raise self._unwritable(self._path, error) from error

    def _unwritable(self, path: Path, error: OSError) -> OperationFailed:
        return OperationFailed(
            f"{path}, of the MIG journal, cannot be written: {error.strerror}",
            f"make room, or remove what is in the way: df -h {self._directory}; ls -l {self._directory}",
            code="journal_unwritable",
        )


def boot_id() -> str | None:
    """Return what this boot of the machine is called (``/proc/sys/kernel/random/boot_id``)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


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
                f"see which: fuser -v {path}",
                code="locked",
            )
        time.sleep(0.02)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
