"""``gpushare pause``: take a job off the GPU at once, and list paused jobs; done by `gpushare/pause/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gpushare.base.errors import BadCombination
from gpushare.base.values import dataclass
from gpushare.cli.options import AskingCommand, argument, ask_and_carry_out, option, positive_time, settings, verb
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.host.identity import wall_time
from gpushare.host.store import MOST_SECONDS
from gpushare.pause.change import pauses_locked
from gpushare.pause.record import PausedJob, paused_jobs
from gpushare.run.jobs import pause_of
from gpushare.show.plan import PlanAnswer, with_answer
from gpushare.show.result import Column, Result, Table, format_date

LIST: Final = "list"


@verb(AskingCommand)
def pause(
    job: str = argument("JOB|list", "A job by name or PID; list shows the paused ones.", default=...),
    timeout: str | None = option("--timeout", "TIME", "Resume it after this time: 30s, 10m. [default: never]"),
) -> Any:
    """Take a job off the GPU at once, even in the middle of a kernel, or list the paused jobs.

    gpushare takes the channels of all processes of the job off all GPUs, in about a millisecond. Its memory stays on
    the GPU, and its CPU side runs on until it waits for the GPU. The job stays paused until `gpushare resume`, its end,
    or the timeout; a guard process also pauses the processes that the job starts meanwhile. A signal whose handler
    waits for the GPU does not end the job before it is resumed; SIGKILL does. A client of MPS cannot be paused: all
    clients share the channels of their server.
    """
    host = settings.connect()
    if job == LIST:
        if timeout is not None:
            raise BadCombination("--timeout cannot be combined with list", "gpushare pause JOB --timeout 10m")
        return list_paused(host)
    bounds = {"least": 0.1, "most": MOST_SECONDS}
    seconds = None if timeout is None else positive_time("--timeout", timeout, "10m, at most 30 days", **bounds)
    with pause_of(host, job, seconds) as work:
        result = ask_and_carry_out(
            work.plan(begin=not settings.dry_run),
            replan=lambda: work.plan(begin=True),
            locked=lambda: pauses_locked(host),
        )
        result = with_answer(
            result,
            PauseAnswer,
            already_paused=work.was_paused,
            driver_seconds=round(work.seconds, 6),
            job=paused_row(work.job, host),
        )
        if work.was_paused:
            # Nothing has changed, so there is nothing to undo.
            until = "" if work.job.until is None else f", until {format_date(wall_time(work.job.until))}"
            text = f"{work.job.title} is already paused, since {format_date(wall_time(work.job.since))}{until}"
            return replace(result, tables=(), done=((text, None),))
        if settings.dry_run:
            return result
        text = f"{work.job.title} is off the GPU: the driver call took {1000 * work.seconds:.1f} ms"
        return replace(result, done=((text, f"gpushare resume {work.job.selector}"),))


@dataclass(frozen=True, kw_only=True)
class PausedRow:
    """A paused job."""

    pid: int
    name: str | None
    user: str | None
    state: str
    # Seconds since 1970.
    since: float
    # Seconds since 1970; null: until it is resumed.
    until: float | None
    by: str | None
    # The `gpushare run` of the job pauses it while production works.
    by_run: bool
    # The process that resumes it if gpushare dies.
    guard: int | None
    # Whether that process is alive.
    guarded: bool
    # The PIDs of the processes that are off the GPU.
    processes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PauseAnswer(PlanAnswer):
    """The answer of `pause JOB`."""

    already_paused: bool
    # How long the driver call took.
    driver_seconds: float
    job: PausedRow


@dataclass(frozen=True, kw_only=True)
class PauseListAnswer:
    """The answer of `pause list`."""

    jobs: tuple[PausedRow, ...]


def paused_row(job: PausedJob, host: Host) -> PausedRow:
    return PausedRow(
        pid=job.pid,
        name=job.name,
        user=None if job.uid is None else user_name(job.uid),
        state=job.state,
        since=wall_time(job.since),
        until=None if job.until is None else wall_time(job.until),
        by=user_name(host.uid if job.keeper_uid is None else job.keeper_uid),
        by_run=job.by_run,
        guard=None if job.keeper is None else job.keeper.pid,
        guarded=job.has_live_keeper(host),
        processes=tuple(process.pid for process in job.channels),
    )


def list_paused(host: Host) -> Any:
    """Return the paused jobs: this user's and root's."""
    jobs = [job for job in paused_jobs(host) if job.is_paused(host)]
    rows = tuple(paused_row(job, host) for job in jobs)
    columns = (
        Column("pid", "pid", right=True),
        Column("name", "name", optional=True),
        Column("user", "user", rank=2),
        Column("state", "state", rank=1),
        Column("since", "since", format=format_date),
        Column("until", "until", format=format_date, unknown="resumed"),
        Column("by", "by", rank=1),
        Column("processes", "processes", rank=3, format=lambda pids: " ".join(map(str, pids))),
    )
    notes = []
    for job in jobs:
        if job.resumed_by_run(host):
            notes.append(f"{job.title}: its gpushare run pauses it while production works, and resumes it")
        elif not job.has_live_keeper(host):
            notes.append(f"{job.title}: the guard of its pause is gone; to resume it: gpushare resume {job.selector}")
    return Result(
        command="pause list",
        data=PauseListAnswer(jobs=rows),
        tables=(Table(name="jobs", columns=columns, rows=rows, empty="no job is paused"),),
        notes=tuple(notes),
    )
