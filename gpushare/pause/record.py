"""Records of paused jobs, ``<run>/pause/PID.json``: all that is needed to put a job back on the GPU.

Disabled channels stay off until they are enabled again, so a record is on the disk before the first channel is disabled,
and is removed after the last one is enabled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, Final

from gpushare.base.errors import NotSupported
from gpushare.base.typed import Count, JobName, Most, Pid
from gpushare.base.values import dataclass
from gpushare.host.channels import Channels
from gpushare.host.host import Host
from gpushare.host.identity import Identity, uptime
from gpushare.host.store import Ahead, Job, Kept, Named, Past, RecordStore, with_living_pid

# A record of so many can be read again.
_MOST_GROUPS: Final = 8192
# States of a record. `running`: a job of `gpushare run --yield pause` between two pauses.
PAUSING: Final = "pausing"
PAUSED: Final = "paused"
RESUMING: Final = "resuming"
RUNNING: Final = "running"


@dataclass(frozen=True, kw_only=True)
class PausedJob(Kept, Named):
    """A job that is paused, or about to be, with the channels of all its processes that a resume must enable.

    ``pid`` and ``started`` are its first process. ``since`` and ``until`` are in seconds since boot; ``until`` None: until
    it is resumed by hand. ``keeper`` is the guard of the pause, or with ``by_run`` the `gpushare run` that pauses the job
    for production.
    """

    pid: Pid
    started: Count
    name: JobName | None
    uid: int | None
    state: Annotated[str, {PAUSING, PAUSED, RESUMING, RUNNING}.__contains__]
    since: Past
    until: Ahead | None
    keeper: Identity | None = None
    by_run: bool = False
    channels: Annotated[tuple[Channels, ...], Most(1024)] = field(default=(), repr=False)

    @property
    def ours(self) -> bool:
        """Return whether this user has paused it."""
        return self.keeper_uid is None

    @property
    def pids(self) -> set[int]:
        """Return its first process, and those whose channels are, or will be, off."""
        return {self.pid, *(channels.pid for channels in self.channels)}

    def living(self, host: Host) -> tuple[Channels, ...]:
        """Return the channels of the processes that still run."""
        return tuple(each for each in self.channels if host.processes.alive(each.pid, each.started))

    def lives(self, host: Host) -> bool:
        """Return whether any of it still runs."""
        return host.processes.alive(self.pid, self.started) or bool(self.living(host))

    def has_live_keeper(self, host: Host) -> bool:
        """Return whether its keeper lives; else nobody ends the pause in time, and it is to be completed or resumed."""
        return self.keeper is not None and host.processes.alive(*self.keeper)

    def resumed_by_run(self, host: Host) -> bool:
        """Return whether a living `gpushare run` pauses and resumes the job: nobody else may."""
        return self.by_run and self.has_live_keeper(host)

    def is_paused(self, host: Host) -> bool:
        """Return whether the job counts as paused: not between two pauses of a `gpushare run` that lives."""
        return self.state != RUNNING or not self.has_live_keeper(host)


PAUSES: Final = RecordStore(PausedJob, "pause", "the record of a pause", durable=True)


def paused_job(
    host: Host, job: Job, state: str, *, until: float | None = None, channels: Iterable[Channels] = (), **more: Any
) -> PausedJob:
    """Return the record of a job that enters this state now; nothing is written. ``more``: further fields."""
    return PausedJob(
        pid=job.pid,
        started=job.started,
        name=job.name,
        uid=job.uid,
        state=state,
        since=uptime(),
        until=until,
        channels=tuple(channels),
        path=PAUSES.path(host, job.pid),
        **more,
    )


def write(job: PausedJob) -> None:
    """Write a record to the disk. The caller holds the lock, or is the living `gpushare run` that the record names.

    Raises NoPermission, OperationFailed, NotSupported: it cannot be written; an earlier one stays.
    """
    if sum(len(each.groups) for each in job.channels) > _MOST_GROUPS:
        # It could not be read again.
        raise NotSupported(
            f"{job.title} has too many channels to be paused",
            "pause its processes one by one",
            code="too_many_channels",
        )
    PAUSES.write(job)


def paused_jobs(host: Host, *, shared: bool = True) -> list[PausedJob]:
    """Return the jobs with a record that still run, this user's first; with ``shared`` also root's, and for root others'."""
    jobs = [job for job in PAUSES.all(host, shared=shared) if job.lives(host)]
    return [with_living_pid(host, job, job.living(host)) for job in jobs]


def processes_paused_by_root(host: Host) -> set[Identity]:
    """Return the processes that root has paused. To root itself there are none: root's own records have no keeper."""
    return {
        Identity(channels.pid, channels.started)
        for job in paused_jobs(host)
        if job.keeper_uid == 0 and job.state in {PAUSING, PAUSED}
        for channels in job.channels
    }


def paused_processes(host: Host) -> dict[int, PausedJob]:
    """Return the PIDs of paused processes, each with its job."""
    processes: dict[int, PausedJob] = {}
    for job in paused_jobs(host):
        if job.is_paused(host):
            for channels in job.living(host):
                # The first record counts, this user's own.
                processes.setdefault(channels.pid, job)
    return processes
