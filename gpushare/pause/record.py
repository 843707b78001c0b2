"""Records of paused jobs, ``<run>/pause/PID.json``: all that is needed to put a job back on the GPU.

Channels that are off stay off until somebody enables them, so a record is on the disk before the first one goes off, and
is removed after the last one is on again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import NotSupported
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.identity import Identity
from gpushare.host.records import directory_locked, is_shown, is_time, read_trusted, record_from, replace_file, writing
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.channels import Channels
    from gpushare.host.host import Host, UserDirectory


SCHEMA: Final = 1
# States of a record. `running`: a job of `gpushare run --pause` between two pauses.
PAUSING: Final = "pausing"
PAUSED: Final = "paused"
RESUMING: Final = "resuming"
RUNNING: Final = "running"
_STATES: Final = frozenset({PAUSING, PAUSED, RESUMING, RUNNING})
WHAT: Final = "the record of a pause"
_NAME: Final = "pause"
# Less than what `read_trusted` reads.
_MOST_BYTES: Final = 3 << 20


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A job that is paused, or is about to be.

    ``pid`` and ``started`` (clock ticks since boot) are its first process. ``since`` and ``until`` are seconds since 1970;
    ``until`` None: until somebody resumes it. ``keeper_pid`` is the guard of the pause, or with ``by_run`` the `gpushare
    run` that pauses the job for production. ``channels`` are those of all its processes.
    """

    pid: int
    started: int
    name: str | None
    uid: int | None
    by_uid: int
    state: str
    since: float
    until: float | None
    keeper_pid: int | None
    keeper_started: int | None
    by_run: bool = False
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class PausedJob:
    """A record, the file it is in, and the channels to be enabled.

    ``keeper_uid`` is who paused it, if that is not this user: root, or for root another user.
    """

    pause: Pause
    channels: tuple[Channels, ...] = field(repr=False)
    path: Path
    keeper_uid: int | None = None

    @property
    def ours(self) -> bool:
        """Return whether this user has paused it."""
        return self.keeper_uid is None

    @property
    def title(self) -> str:
        """Return the job for people: ``'train' (process 123)``."""
        process = f"process {self.pause.pid}"
        return f"'{self.pause.name}' ({process})" if self.pause.name else process

    @property
    def selector(self) -> str:
        """Return what `resume` takes."""
        return self.pause.name or str(self.pause.pid)

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Return the processes whose channels are, or will be, off."""
        return tuple(Identity(one.pid, one.started) for one in self.channels)

    def living(self, host: Host) -> tuple[Channels, ...]:
        """Return the channels of the processes that still run."""
        return tuple(one for one in self.channels if host.processes.identity(one.pid) == (one.pid, one.started))

    def lives(self, host: Host) -> bool:
        """Return whether any of it still runs."""
        first = (self.pause.pid, self.pause.started)
        return host.processes.identity(self.pause.pid) == first or bool(self.living(host))

    def kept(self, host: Host) -> bool:
        """Return whether the guard, or the `gpushare run`, that is to end the pause is alive."""
        pid = self.pause.keeper_pid
        return pid is not None and host.processes.identity(pid) == (pid, self.pause.keeper_started)


def directory_of(host: Host) -> Path:
    """Return the directory of this user's records."""
    return host.run_directory / _NAME


def make(directory: Path) -> None:
    """Create a directory of records."""
    # One by one: the mode applies to the last directory of a path only.
    make_private_directory(directory.parent)
    make_private_directory(directory)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of records, which is created.

    Raises:
        NoPermission, OperationFailed: it cannot be created.
    """
    with directory_locked(directory, "the lock of the pauses"):
        yield


def write(job: PausedJob) -> None:
    """Write a record to the disk. The caller holds the lock, or is the living `gpushare run` that the record names.

    Raises:
        NoPermission, OperationFailed, NotSupported: it cannot be written; an earlier one stays.
    """
    channels = [{key: value for key, value in one.record().items() if key != "seconds"} for one in job.channels]
    text = json.dumps({**vars(job.pause), "channels": channels})
    if len(text) > _MOST_BYTES:
        # It could not be read again.
        raise NotSupported(
            f"{job.title} has too many channels to be paused",
            "pause its processes one by one",
            code="too_many_channels",
        )
    with writing(job.path, WHAT):
        replace_file(job.path, text, durable=True)


def forget(job: PausedJob) -> None:
    """Remove a record. The caller holds the lock.

    Raises:
        NoPermission, OperationFailed: it cannot be removed.
    """
    with writing(job.path, WHAT):
        job.path.unlink(missing_ok=True)


def read(path: Path, *, keeper_uid: int | None = None) -> PausedJob | None:
    """Return the record in a file, or None."""
    return _parsed(read_trusted(path), path, keeper_uid)


def _parsed(raw: Any, path: Path, keeper_uid: int | None) -> PausedJob | None:
    from gpushare.host.channels import from_record

    pause = record_from(Pause, raw)
    listed = raw.get("channels") if pause is not None else None
    channels = [from_record(one) for one in listed] if isinstance(listed, list) else [None]
    if pause is None or pause.pid <= 0 or None in channels:
        return None
    return PausedJob(pause=pause, channels=tuple(one for one in channels if one), path=path, keeper_uid=keeper_uid)


def paused_jobs(host: Host, *, shared: bool = True) -> list[PausedJob]:
    """Return the jobs with a record that still run, this user's first; with ``shared`` also root's, and for root others'."""
    found = [read(path) for directory in host.own_run_directories for path in _files(directory)]
    for run_directory in host.shared_run_directories if shared else ():
        found += [read(path, keeper_uid=0) for path in _files(run_directory)]
    for user in host.user_directories() if shared else ():
        theirs = [_parsed(raw, path, user.uid) for path, raw in _of_user(user)]
        found += [one for one in theirs if one is not None and is_of_user(host, one, user.uid)]
    return [one for one in found if one is not None and one.lives(host)]


def _of_user(user: UserDirectory) -> Sequence[tuple[Path, Any]]:
    # Only root has such users.
    from gpushare.host.users import records_of

    return records_of(user, _NAME)


def is_of_user(host: Host, job: PausedJob, uid: int) -> bool:
    """Return whether a user's record speaks of nothing but that user's own processes, in words that can be shown."""
    pause = job.pause
    if pause.uid != uid or pause.by_uid != uid or not is_shown(pause.name) or pause.state not in _STATES:
        return False
    if not all(one is None or is_time(one) for one in (pause.since, pause.until)):
        return False
    pids = {pause.pid, *(one.pid for one in job.channels)}
    infos = [host.processes.describe(pid) for pid in pids]
    return all(one is None or one.uid == uid for one in infos)


def by_root(host: Host) -> set[Identity]:
    """Return the processes that root has paused, if this user is another."""
    return {
        identity
        for job in paused_jobs(host)
        if job.keeper_uid == 0 and job.pause.state in {PAUSING, PAUSED}
        for identity in job.identities
    }


def paused_since(host: Host) -> dict[int, float]:
    """Return the processes that are paused now, or were when their gpushare died, with the time of the pause."""
    return {
        one.pid: job.pause.since
        for job in reversed(paused_jobs(host))
        if job.pause.state != RUNNING or not job.kept(host)
        for one in job.living(host)
    }


def _files(run_directory: Path) -> list[Path]:
    if not is_trusted_directory(run_directory, _NAME):
        return []
    try:
        names = sorted(os.listdir(run_directory / _NAME))
    except OSError:
        return []
    return [run_directory / _NAME / name for name in names if name.endswith(".json") and not name.startswith(".")]


def sweep(host: Host) -> None:
    """Remove this user's records of jobs that have ended. The caller holds the lock."""
    for path in (path for directory in host.own_run_directories for path in _files(directory)):
        job = read(path)
        if job is not None and not job.lives(host):
            with contextlib.suppress(OSError):
                path.unlink()
