"""``gpushare move``: a running job to another GPU of the host; done by `gpushare/run/moving.py` and `gpushare/memory/`."""

from __future__ import annotations

from typing import Any, Final

from gpushare.base.errors import BadUsage
from gpushare.base.selection import select, select_one
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    WAIT_TIMEOUT,
    AskingCommand,
    Refused,
    argument,
    ask_and_carry_out,
    flag,
    longest_wait,
    note,
    option,
    refuse,
    settings,
    verb,
)
from gpushare.memory.swap import repair_first
from gpushare.run.moving import MovedJob, Mover
from gpushare.show.plan import PlanAnswer, with_answer


@dataclass(frozen=True, kw_only=True)
class MoveAnswer(PlanAnswer):
    """The answer of ``move``: the plan, and the jobs that move."""

    jobs: tuple[MovedJob, ...]


_REFUSED: Final = (
    Refused("--off", "JOB", "it names all jobs of a GPU", "--off 0"),
    Refused("--wait", "--off", "jobs wait one by one", "JOB --wait"),
)


@verb(AskingCommand)
def move(
    job: str | None = argument("[JOB]", "A job by name or PID."),
    gpu: str | None = option("-g --gpu", "GPU", "Where it goes: the first of these GPUs with room. [default: any]"),
    off: str | None = option("--off", "GPU", "Move all jobs that are on this GPU, instead of one JOB."),
    wait: bool = flag("--wait", "Wait until a GPU has room, first come first served."),
    timeout: str | None = WAIT_TIMEOUT,
) -> Any:
    """Move a running job to another GPU: it continues there, and does not notice.

    A move needs driver 580 or later, and whole GPUs of one model; your own jobs need no root. gpushare reserves the
    room there first; the job stands still while its memory is copied to the host and on to the GPU: 3 s for 2 GiB and
    14 to 17 s for 20 GiB between two H100 GPUs (driver 580.159.04, November 2026). If the driver refuses, the job goes
    back. gpushare cannot move MPS clients, jobs on MIG instances, or jobs of several GPUs or ranks (NCCL).
    """
    refuse(_REFUSED)
    if job is None and off is None:
        raise BadUsage("missing JOB", "name one, or empty a GPU: gpushare move --off 0", code="usage")
    seconds = longest_wait(timeout, wait=wait)
    host = settings.connect()
    repair_first(host, note, dry_run=settings.dry_run)
    mover = Mover(host, seconds, note, quiet=settings.quiet)
    targets = None if gpu in {None, "any"} else select(gpu, host.nvml.sweep())
    if job is not None:
        moves = mover.plan_job(job, targets)
    else:
        moves = mover.plan_all_off(select_one(off, host.nvml.sweep()), targets)
    return with_answer(ask_and_carry_out(moves.plan), MoveAnswer, jobs=moves.jobs)
