"""``gpushare jobs``: jobs as data, as tables for people, and as one rectangle for CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpushare.base.model import ListedJob, Snapshot
from gpushare.base.units import format_bytes, format_percent, ranges
from gpushare.base.values import dataclass
from gpushare.show.result import Column, Result, Table, record_table
from gpushare.show.status import (
    COMMAND,
    JOB,
    OWNER,
    PID,
    ROLE,
    SINCE,
    age,
    container_name,
    gpu_errors,
    used_of_total,
    waiting_table,
    way_text,
)

_STATES: Final = {"paused": "yellow", "out": "yellow", "leaving": "yellow", "returning": "yellow", "lost": "red"}
CSV: Final = (
    # The completions of shells read the first two.
    "pid", "name", "state", "user", "role", "gpu_indexes", "device_uuids", "way", "mig_profile", "mig_name",
    "threads_percent", "slice_us", "memory_used_bytes", "memory_limit_bytes", "swapped_bytes", "sm_percent",
    "since_seconds", "place", "behind", "exit_code", "ran_seconds", "memory_peak_bytes", "container", "command", "held_by",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobsAnswer:
    """The answer of `jobs`."""

    host: str
    # Seconds since 1970.
    taken_at: float | None
    jobs: tuple[ListedJob, ...]


def jobs_result(snapshot: Snapshot, jobs: Sequence[ListedJob], *, everything: bool = False) -> Result:
    """Return the result of ``gpushare jobs``; a GPU that does not answer is an error, and the jobs are shown.

    ``everything``: ``jobs`` are those of all users, and the processes that are no jobs of gpushare.
    """
    present = [job for job in jobs if job.line is None and job.pid is not None]
    waiting = [job for job in jobs if job.line is not None]
    ended = [job for job in jobs if job.pid is None]
    tables = [_table_of_present(present, everything=everything)]
    if waiting:
        tables.append(waiting_table(waiting))
    if ended:
        tables.append(_ended_table(ended))
    errors = gpu_errors(snapshot.gpus)
    return Result(
        data=JobsAnswer(host=snapshot.host, taken_at=snapshot.taken_at, jobs=tuple(jobs)),
        tables=tuple(tables),
        csv=record_table("jobs", CSV, jobs, _CSV_ONLY),
        notes=snapshot.warnings,
        errors=errors,
    )


def _memory_text(value: tuple[int | None, int | None]) -> str:
    """Return the memory that a job holds, of its limit if it has one; both in bytes."""
    held, limit = value
    return format_bytes(held) if limit is None else used_of_total((held, limit))


def _table_of_present(jobs: Sequence[ListedJob], *, everything: bool) -> Table:
    """Return the table of the jobs that have a process: running, paused or swapped out."""
    columns = (
        JOB,
        PID,
        Column("state", "state", style=_STATES.get),
        OWNER,
        ROLE,
        Column("gpu", "GPU", right=True, of=lambda job: ranges(job.gpu_indexes) if job.gpu_indexes else None),
        Column("way", "way", rank=2, of=lambda job: way_text(job.way, job.threads_percent, job.slice_us, job.mig_profile, job.mig_name)),
        Column("memory", "memory", right=True, of=lambda job: (job.memory_used_bytes, job.whole_limit_bytes), format=_memory_text),
        Column("swapped_bytes", "swapped", right=True, rank=5, optional=True, format=format_bytes),
        Column("sm_percent", "SM", right=True, rank=3, format=format_percent),
        SINCE,
        Column("container", "container", rank=8, whole=True, optional=True, format=container_name),
        COMMAND,
    )  # fmt: skip
    empty = (
        "no process is on the GPUs"
        if everything
        else "no job is running; processes that gpushare did not start: gpushare jobs -a"
    )
    return Table(name="jobs", title="jobs", columns=columns, rows=tuple(jobs), empty=empty)


def _exit_text(job: ListedJob) -> int | str:
    """Return the exit code of a job that has ended, or why it has none: `past_jobs` finds none if its gpushare died."""
    if not job.started:
        return "not started"
    return "gpushare killed" if job.exit_code is None else job.exit_code


def _ended_table(jobs: Sequence[ListedJob]) -> Table:
    columns = (
        JOB,
        Column("exit_code", "exit code", right=True, of=_exit_text, style=lambda code: "red" if code else None),
        ROLE,
        Column("device", "device", rank=1),
        Column("ran_seconds", "ran", right=True, rank=2, format=age),
        Column(
            "since_seconds",
            "ended",
            right=True,
            format=lambda seconds: f"{age(seconds)} ago",
        ),
        Column("memory_peak_bytes", "peak memory", right=True, rank=2, optional=True, format=format_bytes),
        COMMAND,
    )
    return Table(name="ended_jobs", title="ended recently", columns=columns, rows=tuple(jobs))


_CSV_ONLY: Final[Mapping[str, Callable[[ListedJob], Any]]] = {
    "gpu_indexes": lambda job: " ".join(map(str, job.gpu_indexes)) or None,
    "device_uuids": lambda job: " ".join(job.device_uuids) or None,
    "place": lambda job: None if job.line is None else job.line.place,
    "behind": lambda job: None if job.line is None else " ".join(job.line.behind) or None,
    "held_by": lambda job: None if job.line is None else " ".join(job.line.held_by) or None,
}
