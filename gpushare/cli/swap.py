"""``gpushare swap``: a whole job out of the GPU into host memory, and back; done by `gpushare/memory/`, planned in `gpushare/run/swap_job.py`."""

from __future__ import annotations

from typing import Any, Final

import typer

from gpushare.base.errors import or_none
from gpushare.base.units import format_bytes
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    GROUP,
    WAIT_TIMEOUT,
    AskingCommand,
    Command,
    argument,
    ask_and_carry_out,
    flag,
    longest_wait,
    note,
    settings,
)
from gpushare.host.capabilities import user_name
from gpushare.host.identity import wall_time
from gpushare.memory.swapped import BACK, Swap, swaps
from gpushare.run.swap_job import plan_swap_in, plan_swap_out
from gpushare.show.plan import PlanAnswer, with_answer
from gpushare.show.result import Column, Result, Table, format_date

app = typer.Typer(
    **GROUP,
    help="Move a whole job out of the GPU into host memory, and back.",
)
JOB_ARGUMENT: Final = argument("JOB", "A job by name or PID.", default=...)


def out(job: str = JOB_ARGUMENT) -> Any:
    """Move a job out of the GPU into host memory: it holds no device memory until it comes back.

    The driver waits until the job's GPU work is done, copies the job's memory (about 2 GB per second on an H200) and
    frees the GPU. The CPU side of the job goes on until it next uses the GPU. All its processes go together. A swap
    needs driver 570 or later. It is refused for MPS clients, jobs on MIG instances or on several GPUs, containers,
    jobs with a process of another user, and jobs that use NCCL, CUDA IPC or managed memory.
    """
    work = plan_swap_out(settings.connect(), job, note, dry_run=settings.dry_run)
    return _with_swapped_job(ask_and_carry_out(work.plan), work.swap)


def back_in(
    job: str = JOB_ARGUMENT,
    wait: bool = flag("--wait", "Wait until the GPU has room, first come first served."),
    timeout: str | None = WAIT_TIMEOUT,
) -> Any:
    """Bring a job back to its GPU and let it continue.

    gpushare reserves its room first: if a restore fails, the driver never tries again, and the job is lost. Without
    room nothing happens (exit code 19); with --wait it waits. Only root can bring back a job that root swapped out.
    """
    seconds = longest_wait(timeout, wait=wait)
    host = settings.connect()
    work = plan_swap_in(host, job, seconds, note, quiet=settings.quiet, dry_run=settings.dry_run)
    return _with_swapped_job(ask_and_carry_out(work.plan), work.swap)


def list_swapped() -> Any:
    """List the jobs that you or root have swapped out; as root, those of all users."""
    host = settings.connect()
    swapped_out = [swap for swap in swaps(host) if swap.state != BACK]
    indexes: dict[str | None, int] = {}
    if swapped_out:
        # Without the driver, the list lacks only the indexes.
        indexes = {gpu.uuid: gpu.index for gpu in or_none(host.nvml.identities) or ()}
    rows = tuple(_swap_row(swap, indexes.get(swap.gpu_uuid)) for swap in swapped_out)
    columns = (
        Column("gpu", "GPU", right=True),
        Column("pid", "pid", right=True),
        Column("name", "name", optional=True),
        Column("user", "user", rank=2),
        Column("state", "state"),
        Column("memory_bytes", "memory", right=True, format=format_bytes),
        Column("gpu_uuid", "GPU UUID", rank=2),
        Column("since", "since", format=format_date),
    )
    return Result(
        data=SwapListAnswer(jobs=rows),
        tables=(Table(name="jobs", columns=columns, rows=tuple(map(vars, rows)), empty="no job is swapped out"),),
    )


@dataclass(frozen=True, kw_only=True)
class SwapRow:
    """A job that is swapped out of the GPU, or being swapped."""

    # Null: its GPU is unknown, or the answer is about this job alone.
    gpu: int | None
    pid: int
    name: str | None
    uid: int | None
    user: str | None
    # Who swapped it out; null: this user.
    by: str | None
    state: str
    memory_bytes: int
    gpu_uuid: str
    # Seconds since 1970.
    since: float
    # How long it took to swap it out.
    out_seconds: float | None
    # The PIDs of its processes.
    processes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SwapAnswer(PlanAnswer):
    """The answer of `swap out` and `swap in`."""

    job: SwapRow


@dataclass(frozen=True, kw_only=True)
class SwapListAnswer:
    """The answer of `swap list`."""

    jobs: tuple[SwapRow, ...]


def _swap_row(swap: Swap, gpu: int | None = None) -> SwapRow:
    """Return a swapped-out job as data; ``gpu`` is the index of its GPU."""
    return SwapRow(
        gpu=gpu,
        pid=swap.pid,
        name=swap.name,
        uid=swap.uid,
        user=None if swap.uid is None else user_name(swap.uid),
        by=None if swap.keeper_uid is None else user_name(swap.keeper_uid),
        state=swap.state,
        memory_bytes=swap.memory_bytes,
        gpu_uuid=swap.gpu_uuid,
        since=wall_time(swap.since),
        out_seconds=swap.out_seconds,
        processes=tuple(pid for pid, _, _ in swap.images),
    )


def _with_swapped_job(result: Any, swap: Swap) -> Any:
    return with_answer(result, SwapAnswer, job=_swap_row(swap))


app.command(cls=AskingCommand, short_help="Move a job into host memory.")(out)
app.command("in", cls=AskingCommand, short_help="Bring a job back when the GPU has room.")(back_in)
app.command("list", cls=Command, short_help="List the jobs that are out.")(list_swapped)
