"""What gpushare did with MIG on a host: the names and grants of instances, the instances it made, the change it is at.

- Names are bound to (GPU UUID, profile, first memory slice) and survive a reboot. A MIG UUID only means a place: another
  instance there, even of another size, may get the same UUID. Each user reads his own names and root's.
- The list of instances that gpushare made does not survive a reboot, like the instances. Others are destroyed only with
  consent.
- A change writes ``<run>/mig/journal.json`` before its first step: the layout before and after, and each step that is
  begun. Every change holds the lock next to it from its plan to its end: a journal whose lock is free belongs to an
  interrupted change. What could not be undone is kept as ``not-restored-N.json`` until it is restored or
  accepted. A journal that cannot be read blocks every change until it is set aside as ``set-aside-N.json``.

Root and a user with access to mig/config have different run directories. So the device node of that capability, which
only these two can open, is locked too. Each user undoes his own changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, OperationFailed
from gpushare.base.typed import Count, Pid
from gpushare.base.values import dataclass
from gpushare.host.host import Host, is_trusted_directory, make_private_directory
from gpushare.host.identity import Identity, identity_of, lives
from gpushare.host.records import clear_leftovers, lock_within, open_lock, sync_directory, try_lock, writing
from gpushare.host.store import Kept, OtherNamespace, RecordStore
from gpushare.mig.shape import NOTHING, Creation, GpuShape, Proof
from gpushare.mps.home import DaemonRecord


class Spot(NamedTuple):
    """What tells an instance, because the driver reuses ids: the UUID of its GPU, its profile, its first memory slice."""

    gpu: str
    profile: str
    start: int


# -- names and grants ------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII | re.IGNORECASE)
# Words with another meaning for -g and in a wish.
_PROFILE_LIKE: Final = re.compile(r"(\d+c\.)?\d+g.*|(mig|gpu)-.*|mig|all", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NamedInstance:
    """One name: the GPU instance that it means, and the users that it is granted to (empty: open to all users)."""

    name: str
    gpu_uuid: str
    # The driver's name: 3g.71gb.
    profile: str
    # Its first memory slice.
    start: int
    users: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.profile}:{self.start}"

    @property
    def place(self) -> tuple[str, int]:
        """Return profile and first memory slice, as `GpuInstance.place`."""
        return self.profile, self.start

    @property
    def spot(self) -> Spot:
        return Spot(self.gpu_uuid, self.profile, self.start)

    @property
    def binding(self) -> tuple[str, Spot]:
        """Return the name with its instance, without the users: equal if a name means the same as before."""
        return self.name, self.spot


def check_name(name: str) -> str:
    """Return a name. Raises BadUsage if it has another form, or could be taken for a profile or UUID."""
    if not _NAME.fullmatch(name) or _PROFILE_LIKE.fullmatch(name):
        raise BadUsage(
            f"'{name[:60]}' cannot be the name of an instance",
            "use a letter, then letters, digits, - _ or ., at most 32 characters, not like a profile: train, alice-1",
            code="bad_name",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class _Names(Kept):
    names: tuple[NamedInstance, ...] = ()


NAMES: Final = RecordStore(_Names, "names", "the names of instances", survives_reboot=True, durable=True)


def names_of(host: Host) -> dict[str, NamedInstance]:
    """Return the names that this user sees, by name: root's, overridden by the user's own."""
    # `find` has the user's own record first.
    return {named.name: named for record in reversed(NAMES.find(host, "mig")) for named in record.names}


def refuse_name_of_root(host: Host, name: str) -> None:
    """Raise NoPermission if root alone has given a name: a user changes only the names of its own."""
    keepers = {
        record.keeper_uid for record in NAMES.find(host, "mig") if any(each.name == name for each in record.names)
    }
    if keepers == {0}:
        raise NoPermission(f"the name '{name}' was given by root", "run it as root: sudo gpushare ...")


@contextlib.contextmanager
def changing_names(host: Host) -> Iterator[dict[str, NamedInstance]]:
    """Yield this user's names under a lock, and write them back."""
    path = NAMES.path(host, "mig")
    with NAMES.locked(host):
        record = NAMES.read(path) or _Names(path=path)
        names = {named.name: named for named in record.names}
        before = dict(names)
        yield names
        if names != before:
            NAMES.write(replace(record, names=tuple(names[name] for name in sorted(names))))


# -- what gpushare made ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Made(Kept):
    instances: tuple[Spot, ...] = ()


MADE: Final = RecordStore(_Made, "made", "the record of the instances that gpushare created")


def made_by_gpushare(host: Host) -> frozenset[Spot]:
    """Return the instances that this user's gpushare or root's has created since the boot; some may be gone."""
    return frozenset(made for record in MADE.find(host, "mig") for made in record.instances)


# -- the change that it is at ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChangeRecord(Kept):
    """One change: the shape of each GPU ``before`` and ``after``, and the last step that was begun."""

    title: str
    pid: Pid
    started: Count
    before: tuple[GpuShape, ...]
    after: tuple[GpuShape, ...]
    # The names that the change gives.
    names: tuple[str, ...]
    step: str | None
    # What the change has created.
    proof: Proof
    # This user's MPS daemons that it stops, each with the profile of its device.
    daemons: tuple[DaemonRecord, ...]


CHANGES: Final = RecordStore(ChangeRecord, "mig", "the journal of MIG changes", durable=True)
_WHAT: Final = "of the MIG journal"
_UNWRITABLE: Final = "journal_unwritable"
UNREADABLE: Final = "journal_unreadable"
_LOCK_SECONDS: Final = 120.0
CONFIG_NODE: Final = Path("/dev/nvidia-caps/nvidia-cap1")


def _read_change(path: Path) -> ChangeRecord | None:
    """Return the change in a file; None: there is none, or it is from another boot.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    try:
        record = CHANGES.read_or_raise(path)
    except OtherNamespace as error:
        # Instances are those of the host in every PID namespace.
        record = error.record
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    # Both have the same GPUs.
    if record is not None and [shape.uuid for shape in record.before] != [shape.uuid for shape in record.after]:
        raise ValueError("it is not what gpushare writes")
    return record


class MigLedger:
    """The change that this user's gpushare is at, and those it could not undo; `locked` keeps all others out."""

    def __init__(self, host: Host) -> None:
        self._host, self._directory = host, host.run_directory / "mig"
        self._path = self._directory / "journal.json"
        self._change: ChangeRecord | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks of all MIG changes of this host; creating an instance may take ten seconds.

        They are a file in this user's run directory, and the node of mig/config, which keeps other users out.

        Raises:
            InUse: another gpushare holds one for longer than two minutes.
            OperationFailed: the file cannot be created.
            NoPermission: the directory or the file is not this user's.
        """
        make_private_directory(self._directory.parent)
        make_private_directory(self._directory)
        lock = self._directory / "lock"
        with contextlib.ExitStack() as held:
            descriptors = {lock: open_lock(lock, _WHAT, code=_UNWRITABLE)}
            held.callback(os.close, descriptors[lock])
            # Without such a node (before R450, or MIG was never used) no other user can change MIG either.
            with contextlib.suppress(OSError):
                if not self._host.is_simulated:
                    descriptors[CONFIG_NODE] = os.open(CONFIG_NODE, os.O_RDONLY | os.O_CLOEXEC)
                    held.callback(os.close, descriptors[CONFIG_NODE])
            for path, descriptor in descriptors.items():
                lock_within(descriptor, path, _LOCK_SECONDS, "been changing MIG")
            # What a crash in the middle of a write left.
            clear_leftovers(self._directory)
            yield

    # -- reading

    def is_running(self) -> bool:
        """Return whether a change is running at this moment.

        The lock can be opened only by its owner; other users find the changing process in the journal.
        """
        if not self._is_trusted():
            return False
        try:
            descriptor = os.open(self._directory / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            try:
                record = CHANGES.read(self._path)
                owner = os.lstat(self._path).st_uid
            except OSError:
                return False
            return record is not None and lives(Identity(record.pid, record.started), owner)
        except OSError:
            return False
        try:
            # Shared, so that two readers do not take each other for a change.
            return not try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def _is_trusted(self) -> bool:
        """Return whether only this user or root can have written the journal."""
        return is_trusted_directory(self._directory.parent, self._directory.name)

    def interrupted_change(self) -> ChangeRecord | None:
        """Return a change that was interrupted; None: there is none, or a change is running.

        Raises:
            OperationFailed: as `current_change`.
        """
        if not os.path.lexists(self._path) or not self._is_trusted() or self.is_running():
            return None
        return self.current_change()

    def current_change(self) -> ChangeRecord | None:
        """Return the change of the journal: the one of this process, else one that was interrupted. The caller holds the lock.

        Raises:
            OperationFailed: there is one, and it cannot be read (code ``journal_unreadable``).
        """
        try:
            return _read_change(self._path)
        except ValueError as error:
            raise OperationFailed(
                f"a MIG change was interrupted, and its journal {self._path} cannot be read: {error}. What was being "
                "changed is unknown, so nothing is changed",
                "check the layout: gpushare mig status; then set the journal aside: gpushare mig recover --forget",
                code=UNREADABLE,
            ) from None

    def failed_changes(self) -> list[tuple[Path, ChangeRecord | None]]:
        """Return the changes that could not be undone, each with its file; None: it cannot be read."""
        if not self._is_trusted():
            return []
        failed: list[tuple[Path, ChangeRecord | None]] = []
        for path in sorted(self._directory.glob("not-restored-*.json")):
            try:
                record = _read_change(path)
            except ValueError:
                failed.append((path, None))
            else:
                # Instances do not survive a reboot: a change of an earlier boot is none.
                if record is not None:
                    failed.append((path, record))
        return failed

    # -- writing, under the lock

    def begin(
        self,
        title: str,
        before: Sequence[GpuShape],
        after: Sequence[GpuShape],
        *,
        names: Sequence[str] = (),
        daemons: Sequence[DaemonRecord] = (),
    ) -> None:
        """Write the layout before and after, before the first step."""
        # The driver reuses ids: what changes that were not restored had created on these GPUs proves nothing any more.
        gpus = {shape.uuid for shape in before}
        for _, record in self.failed_changes():
            if record is not None and record.proof != NOTHING and gpus & {shape.uuid for shape in record.before}:
                self._write(replace(record, proof=NOTHING))
        # Where /proc hides the time of its start, no process is taken for this one.
        me = identity_of(os.getpid()) or Identity(os.getpid(), 0)
        self._change = ChangeRecord(
            title=title,
            **me._asdict(),
            before=tuple(before),
            after=tuple(after),
            names=tuple(names),
            step=None,
            proof=NOTHING,
            daemons=tuple(daemons),
            path=self._path,
        )
        self._write(self._change)

    @property
    def proof(self) -> Proof:
        """Return what the change has created so far."""
        return NOTHING if self._change is None else self._change.proof

    def note(self, step: str, begun: Creation | None = None) -> None:
        """Write the step that is begun now to disk, before it acts; ``begun`` is what it is about to create."""
        self._update(step=step, proof=replace(self.proof, begun=begun))

    def note_created(self, creation: Creation) -> None:
        """Write what the driver has created, before anything else is done."""
        self._update(proof=Proof(made=(*self.proof.made, creation), begun=None))

    def note_refused(self) -> None:
        """Write that nothing was created, so that an undo destroys nothing there: what appears is another program's."""
        # The rollback that follows knows it from memory.
        with contextlib.suppress(GpushareError):
            self._update(proof=replace(self.proof, begun=None))

    def _update(self, **fields: Any) -> None:
        """Write the current change with other fields, if there is one; it has them even if it cannot be written."""
        if self._change is not None:
            self._change = replace(self._change, **fields)
            self._write(self._change)

    def complete(self, change: ChangeRecord | None = None) -> None:
        """Note what a change has made and destroyed, and end it. Without ``change`` it is the one that this ledger began.

        If the note cannot be written, the next gpushare finds the change complete and notes it.
        """
        change = change or self._change
        if change is not None:
            self._note_made(change)
        self.end()

    def _note_made(self, change: ChangeRecord) -> None:
        """Bring the record of what gpushare made up to date with a complete change."""
        path = MADE.path(self._host, "mig")
        record = MADE.read(path) or _Made(path=path)
        existing = {
            Spot(gpu.uuid, instance.profile, instance.start) for gpu in change.after for instance in gpu.instances
        }
        # The GPU instances: a compute instance alone is no entry.
        made = {Spot(new.gpu, new.profile, new.start) for new in change.proof.made if new.compute is None}
        changed_gpus = {gpu.uuid for gpu in change.before}
        kept = {spot for spot in record.instances if spot.gpu not in changed_gpus or spot in existing}
        instances = kept | (made & existing)
        if instances != set(record.instances):
            MADE.write(replace(record, instances=tuple(sorted(instances))))

    def end(self) -> None:
        """Remove the journal: the change is done, or undone."""
        self._change = None
        self.drop(self._path)

    def give_up(self) -> None:
        """Keep the journal of a change that could not be undone completely, for `failed_changes`.

        If it cannot be renamed, it remains an interrupted change.
        """
        self._change = None
        with contextlib.suppress(GpushareError):
            self._rename_journal("not-restored")

    def set_aside(self) -> Path:
        """Rename a journal that cannot be read, and so blocks every change; return its new path."""
        return self._rename_journal("set-aside")

    def drop(self, path: Path) -> None:
        """Remove the file of a change that is over."""
        if os.path.lexists(path):
            with writing(path, _WHAT, code=_UNWRITABLE):
                path.unlink(missing_ok=True)
                sync_directory(self._directory)

    def _rename_journal(self, name: str) -> Path:
        """Rename the journal to the first free number of this name, and return its new path."""
        numbered = (self._directory / f"{name}-{number}.json" for number in itertools.count(1))
        target = next(path for path in numbered if not os.path.lexists(path))
        with writing(self._path, _WHAT, code=_UNWRITABLE):
            self._path.rename(target)
            sync_directory(self._directory)
        return target

    def _write(self, change: ChangeRecord) -> None:
        CHANGES.write(change, code=_UNWRITABLE)
