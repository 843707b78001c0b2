"""Records: small JSON files by which one gpushare knows what another one does, and whose records count.

A kind of record is a `RecordStore`: a value class and a directory below the run directory, or for what outlives a reboot
the state directory. The types of the fields define what is valid. Every user sees his own records and root's; root sees
those of all users.

A user's record counts only for that user: the processes that it names must belong to the user and be alive with the same
start time, otherwise the whole record is ignored. Root's records may name any process. A record that cannot be read is
ignored, too, and `unread` tells `gpushare doctor` why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar

from gpushare.base.errors import GpushareError
from gpushare.base.typed import JOB_NAME, parse_typed, plain_form
from gpushare.base.values import NOT_STORED, dataclass
from gpushare.host.host import Host, is_trusted_directory, make_private_directory
from gpushare.host.identity import Identity, boot_id, namespace_owner, pid_space, uptime
from gpushare.host.records import (
    DIRECTORY,
    directory_locked,
    opened_below,
    opened_user_directory,
    read_own,
    replace_file,
    writing,
)

SCHEMA: Final = 1
# Bounds: what root reads of another user, of one kind; and what each user reads of his own and root's records.
USERS_FILES, USERS_FILE_BYTES, USERS_BYTES = 256, 64 << 10, 1 << 20
FILES, FILE_BYTES = 1000, 4 << 20
_MOST_NAMED: Final = 1024
# Times in the future, like the end of a pause, are at most this far ahead.
MOST_SECONDS: Final = 30 * 86400.0

# Seconds since boot (CLOCK_BOOTTIME), which no setting of the clock moves.
Past = Annotated[float, lambda seconds: 0 <= seconds <= uptime()]
Ahead = Annotated[float, lambda seconds: 0 <= seconds <= uptime() + MOST_SECONDS]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A value that is a record: its file, and who keeps it (None: this user; 0: root; to root, another user)."""

    path: Path = field(default=Path(), compare=False, repr=False, metadata=NOT_STORED)
    keeper_uid: int | None = field(default=None, compare=False, metadata=NOT_STORED)


class Named:
    """What people call a job: by its name, or else by its first process."""

    pid: int
    name: str | None

    @property
    def title(self) -> str:
        return f"process {self.pid}" if self.name is None else f"'{self.name}' (process {self.pid})"

    @property
    def selector(self) -> str:
        """Return what to type for it: its name, or its PID if another user has written a name that no job can have."""
        name = self.name
        return name if name is not None and JOB_NAME.fullmatch(name) else str(self.pid)


@dataclass(frozen=True, kw_only=True)
class Job(Named):
    """A job that runs: its first process, told from a later one with the same PID by its start."""

    pid: int
    started: int
    uid: int | None
    user: str | None
    # None: it was given by PID and has no name.
    name: str | None = None


class JobProcess(NamedTuple):
    """A process of a job that is on GPUs: their indexes (empty: not known in this PID namespace), and what it holds there.

    ``under_mps``: NVML lists it as a client. ``memory_bytes`` None: unknown, or not asked for.
    """

    pid: int
    started: int
    gpus: tuple[int, ...] = ()
    under_mps: bool = False
    memory_bytes: int | None = None


T = TypeVar("T", bound=Kept)


class Unread(NamedTuple):
    """A file without a record that counts, or a directory that cannot be read: whose it is, and the error."""

    path: Path
    uid: int
    error: OSError | ValueError

    @property
    def why(self) -> str:
        """Return the reason for people, without the path."""
        return getattr(self.error, "strerror", None) or str(self.error)

    def is_fault_for(self, uid: int, *, secret: bool) -> bool:
        """Return whether a user should know: not if it is gone, of an earlier boot, or kept from that user by root.

        Root keeps its ``secret`` records to itself, and may close a directory (whose path does not end in .json).
        """
        is_closed = self.uid == 0 and uid != 0 and getattr(self.error, "errno", None) == errno.EACCES
        kept_from_user = is_closed and (secret or self.path.suffix != ".json")
        return not kept_from_user and not isinstance(self.error, (FileNotFoundError, _EarlierBoot))


class OtherNamespace(ValueError):
    """A record of another PID namespace, where its PIDs mean other processes."""

    def __init__(self, record: Any) -> None:
        super().__init__("it was written in another PID namespace")
        self.record = record


class _EarlierBoot(ValueError):
    """A record of an earlier boot: nothing that it names exists."""


def named_processes(value: Any) -> set[Identity]:
    """Return the processes that a record names: by its own ``pid`` and ``started``, and in its tuples."""
    named: set[Identity] = set()
    parts: Sequence[Any] = ()
    if hasattr(value, "pid"):
        if None not in {value.pid, value.started}:
            named.add(Identity(value.pid, value.started))
        if is_dataclass(value):
            parts = [part for part in vars(value).values() if isinstance(part, tuple)]
    elif isinstance(value, tuple):
        parts = value
    return named.union(*map(named_processes, parts))


def any_lives(host: Host, value: Any) -> bool:
    """Return whether a process that a value names still runs."""
    return any(host.processes.identity(process.pid) == process for process in named_processes(value))


def with_living_pid(host: Host, value: T, living: Sequence[Any]) -> T:
    """Return a record under the PID of the first of its ``living`` processes if another process has its own PID by now."""
    record: Any = value
    process = host.processes.identity(record.pid)
    if process is None or process == (record.pid, record.started):
        return value
    return replace(record, pid=living[0].pid, started=living[0].started)  # type: ignore[no-any-return]


def digest_of_words(words: Iterable[str]) -> str:
    """Return a key for words that may hold a secret, such as a command line: a digest of them."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:24]


class _UserCheck:
    """The rule for the records of one kind of one user: they name living processes of that user, each in one record."""

    def __init__(self, host: Host, uid: int) -> None:
        self._host, self._uid = host, uid
        # By the records that were checked before.
        self._named: set[Identity] = set()

    def reason_against(self, value: Any) -> str | None:
        """Return why a record does not count, or None: it counts.

        Its processes are remembered, and a later record may not name them: so each process is looked up once, however many
        records a user writes about it.
        """
        if getattr(value, "uid", self._uid) != self._uid:
            return f"it says that it is of user {value.uid}"
        named = named_processes(value)
        named_again = named & self._named
        if named_again:
            return f"it names process {min(named_again).pid}, which another record names, too"
        if len(self._named) + len(named) > _MOST_NAMED:
            return f"with those before it names more than {_MOST_NAMED} processes"
        self._named |= named
        living = [process for process in named if self._host.processes.identity(process.pid) == process]
        for process in living:
            info = self._host.processes.describe(process.pid)
            if info is not None and self._uid not in {info.uid, namespace_owner(process.pid)}:
                return f"it names process {process.pid}, which belongs to another user"
        return None if living else "none of the processes that it names runs"


class RecordStore(Generic[T]):
    """One kind of record, a file each: ``kind`` is its value class, ``noun`` its name for people.

    ``directory`` is below the run directory; ``mps/*`` stands for all directories in ``mps``. With
    ``survives_reboot`` it is below the state directory, for what names no process. ``durable``: a record is on the disk
    before `write` returns, so that not even a power failure loses it. ``mode`` is that of its files.
    """

    def __init__(
        self,
        kind: type[T],
        directory: str,
        noun: str,
        *,
        survives_reboot: bool = False,
        durable: bool = False,
        mode: int = 0o644,
    ) -> None:
        self.kind, self.directory, self.noun = kind, directory, noun
        self._survives_reboot, self._durable, self._mode = survives_reboot, durable, mode

    def path(self, host: Host, key: int | str) -> Path:
        """Return the file of this user's record of a key: a PID, or a name."""
        return self._own_root(host) / self.directory / f"{key}.json"

    def _own_root(self, host: Host) -> Path:
        return host.state_directory if self._survives_reboot else host.run_directory

    def _roots(self, host: Host, *, shared: bool = True) -> list[tuple[Path, int | None]]:
        """Return this user's run or state directory, and with ``shared`` root's, each with its `Kept.keeper_uid`."""
        roots = host.shared_state_directories if self._survives_reboot else host.shared_run_directories
        return [(self._own_root(host), None), *((root, 0) for root in roots if shared)]

    def _directories_of(self, path: Path) -> Sequence[Path]:
        """Return the directories that a record is in, the nearest first, up to the run or state directory."""
        # One directory more than there are slashes, and the run or state directory.
        return path.parents[: self.directory.count("/") + 2]

    # -- reading

    def read(self, path: Path, *, keeper_uid: int | None = None) -> T | None:
        """Return this user's or root's record in a file; None: there is none, or it says nothing."""
        with contextlib.suppress(OSError, ValueError):
            return self.read_or_raise(path, keeper_uid=keeper_uid)
        return None

    def read_or_raise(self, path: Path, *, keeper_uid: int | None = None) -> T | None:
        """Return this user's or root's record in a file; None: there is none, or it is of an earlier boot.

        Raises:
            OSError: it cannot be read.
            ValueError: it says nothing; the message says why.
        """
        root = self._directories_of(path)[-1]
        try:
            with _opened_root(root) as top, opened_below(top, str(path.parent.relative_to(root)), _owners()) as inside:
                text = read_own(path.name, directory=inside, owners=_owners(), most=FILE_BYTES)
            return self._parse(text, path, keeper_uid)
        except (FileNotFoundError, _EarlierBoot):
            return None

    def find(self, host: Host, key: int | str) -> list[T]:
        """Return the records of a key: this user's, then root's."""
        values = [
            self.read(root / self.directory / f"{key}.json", keeper_uid=keeper_uid)
            for root, keeper_uid in self._roots(host)
        ]
        return [value for value in values if value is not None]

    def all(self, host: Host, *, shared: bool = True, users: bool = True) -> list[T]:
        """Return the readable records of this user; with ``shared`` also root's; for root, with ``users``, those of all."""
        return [each for each in self._scan(host, shared=shared, users=users) if not isinstance(each, Unread)]

    def unread(self, host: Host) -> list[Unread]:
        """Return the records that say nothing, and why; without those of an earlier boot, which `sweep` removes."""
        unread = [each for each in self._scan(host, shared=True) if isinstance(each, Unread)]
        return [each for each in unread if each.is_fault_for(host.uid, secret=self._mode == 0o600)]

    def _scan(self, host: Host, *, shared: bool, users: bool = True) -> Iterator[T | Unread]:
        """Yield what is in this user's directory; with ``shared`` also in root's, and to root in those of ``users``."""
        for root, keeper_uid in self._roots(host, shared=shared):
            yield from self._scan_root(host, root, keeper_uid)
        if shared and users and not self._survives_reboot:
            for user in host.user_directories():
                path = user.path / self.directory
                try:
                    with opened_user_directory(user, self.directory) as opened:
                        yield from self._scan_directory(host, opened, path, user.uid, frozenset({user.owner}))
                except OSError as error:
                    yield Unread(path, user.uid, error)

    def _scan_root(self, host: Host, root: Path, keeper_uid: int | None) -> Iterator[T | Unread]:
        """Yield what is in a run or state directory of this user or root; a bad directory does not hide the others."""
        uid = host.uid if keeper_uid is None else keeper_uid
        try:
            with _opened_root(root) as top:
                for below in self._directories(top):
                    try:
                        with opened_below(top, below, _owners()) as opened:
                            yield from self._scan_directory(host, opened, root / below, keeper_uid, _owners())
                    except OSError as error:
                        yield Unread(root / below, uid, error)
        except OSError as error:
            yield Unread(root, uid, error)

    def _directories(self, top: int) -> list[str]:
        """Return the directories of records below an open root; for ``mps/*`` those that are there."""
        above, star, _ = self.directory.partition("*")
        if not star:
            return [self.directory]
        with opened_below(top, above, _owners()) as inside:
            return [above + name for name in sorted(os.listdir(inside))]

    def _scan_directory(
        self, host: Host, opened: int, path: Path, keeper_uid: int | None, owners: frozenset[int]
    ) -> Iterator[T | Unread]:
        """Yield what is in an open directory. Root reads less of another user, and checks what that user says."""
        most_files, most_file_bytes, bytes_left = FILES, FILE_BYTES, FILES * FILE_BYTES
        user_check = None
        if keeper_uid is not None and keeper_uid != 0:
            most_files, most_file_bytes, bytes_left = USERS_FILES, USERS_FILE_BYTES, USERS_BYTES
            user_check = _UserCheck(host, keeper_uid)
        uid = host.uid if keeper_uid is None else keeper_uid
        names = sorted(name for name in os.listdir(opened) if name.endswith(".json") and not name.startswith("."))
        for number, name in enumerate(names):
            if number == most_files or bytes_left <= 0:
                yield Unread(
                    path, uid, ValueError(f"{len(names) - number} of its {len(names)} files are too many to be read")
                )
                return
            try:
                text = read_own(name, directory=opened, owners=owners, most=min(most_file_bytes, bytes_left))
                bytes_left -= len(text)
                yield self._parse(text, path / name, keeper_uid, user_check)
            except (OSError, ValueError) as error:
                yield Unread(path / name, uid, error)

    def _parse(self, text: bytes, path: Path, keeper_uid: int | None, user_check: _UserCheck | None = None) -> T:
        """Return the value of a record.

        Raises:
            _EarlierBoot: it is of an earlier boot.
            OtherNamespace: it names processes of another PID namespace.
            ValueError: it does not count for another reason, which the message says.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            # UnicodeDecodeError is a ValueError, too.
            raise ValueError("it is not JSON" if text else "it is empty") from None
        if not isinstance(raw, dict):
            raise ValueError("it is of another version")  # noqa: TRY004 - as for other texts
        boot, space = boot_id(), pid_space()
        if not self._survives_reboot:
            boot, space = raw.pop("boot", None), raw.pop("space", None)
        # Before the version: an old record is void in any version.
        if isinstance(boot, str) and boot != boot_id():
            raise _EarlierBoot("it is from before the last boot")
        if raw.pop("schema", None) != SCHEMA:
            raise ValueError("it is of another version")
        if boot != boot_id():
            raise ValueError("it does not say of which boot it is")
        value: T = replace(parse_typed(self.kind, raw), path=path, keeper_uid=keeper_uid)
        if space != pid_space() and named_processes(value):
            raise OtherNamespace(value)
        reason = None if user_check is None else user_check.reason_against(value)
        if reason is not None:
            raise ValueError(reason)
        return value

    # -- writing

    def write(self, value: T, *, code: str = "file_unwritable") -> None:
        """Write a record to its ``path``, atomically.

        Raises:
            NoPermission, OperationFailed: it cannot be written; an earlier one stays.
        """
        variable = "GPUSHARE_STATE_DIR" if self._survives_reboot else "GPUSHARE_RUN_DIR"
        # One by one, because only the last directory of a path is checked.
        for directory in reversed(self._directories_of(value.path)):
            make_private_directory(directory, variable=variable)
        document = {"schema": SCHEMA, **plain_form(value)}
        if not self._survives_reboot:
            document |= {"boot": boot_id(), "space": pid_space()}
        with writing(value.path, self.noun, code=code):
            replace_file(value.path, json.dumps(document), durable=self._durable, mode=self._mode)

    def forget(self, path: Path) -> None:
        """Remove a record, if it is there.

        Raises:
            NoPermission, OperationFailed: it cannot be removed.
        """
        with writing(path, self.noun):
            path.unlink(missing_ok=True)

    def drop(self, host: Host, key: int | str) -> None:
        """Remove this user's record of a key; a failure does not matter."""
        with contextlib.suppress(GpushareError):
            self.forget(self.path(host, key))

    def sweep(self, host: Host, ended: Callable[[T], bool] | None = None) -> None:
        """Remove this user's records of processes that have all ended, and those of an earlier boot.

        ``ended`` tells instead whether what a record names has ended. A failure does not matter.
        """
        for each in self._scan(host, shared=False):
            if isinstance(each, Unread):
                is_over = isinstance(each.error, _EarlierBoot)
            elif ended is None:
                is_over = not any_lives(host, each)
            else:
                is_over = ended(each)
            if is_over:
                with contextlib.suppress(OSError):
                    each.path.unlink(missing_ok=True)

    def locked(
        self, host: Host, *, on_wait: Callable[[float], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of this user's records of this kind; ``on_wait`` and errors as `directory_locked`."""
        return directory_locked(self._own_root(host) / self.directory, f"the lock of {self.noun}", on_wait=on_wait)


def _owners() -> frozenset[int]:
    """Return the users whose files may be records of this user: this user and root."""
    return frozenset({os.geteuid(), 0})


@contextlib.contextmanager
def _opened_root(root: Path) -> Iterator[int]:
    """Yield the descriptor of a run or state directory of this user or root, or of what their link there leads to.

    Raises:
        OSError: it does not exist, or another user may change it.
    """
    if not root.exists():
        raise FileNotFoundError(errno.ENOENT, "it does not exist", str(root))
    if not is_trusted_directory(root):
        raise PermissionError(errno.EPERM, "others may write it", str(root))
    descriptor = os.open(root, DIRECTORY)
    try:
        if os.fstat(descriptor).st_uid not in _owners():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(root))
        yield descriptor
    finally:
        os.close(descriptor)
