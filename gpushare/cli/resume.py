"""``gpushare resume``: put paused jobs back on the GPU; done by `gpushare/pause/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpushare.base.errors import BadUsage, GpushareError
from gpushare.base.values import dataclass
from gpushare.cli.options import ChangingCommand, Refused, argument, flag, refuse, settings, verb
from gpushare.cli.pause import PausedRow, paused_row
from gpushare.host.host import Host
from gpushare.pause.change import pauses_locked, resume_step
from gpushare.pause.record import PausedJob, paused_jobs, processes_paused_by_root
from gpushare.plan import Plan, Step, one_plan
from gpushare.run.jobs import find_paused_job
from gpushare.show.plan import PlanAnswer, plan_result


@verb(ChangingCommand)
def resume(
    job: str | None = argument("[JOB]", "A paused job by name or PID."),
    everything: bool = flag("--all", "All paused jobs of this user."),
) -> Any:
    """Put a paused job back on the GPU: its kernels continue where they stopped.

    It works even if the guard process or gpushare was killed. `--all` leaves out jobs that root paused, and those that
    a `gpushare run --yield pause` pauses and resumes by itself.
    """
    refuse((Refused("--all", "JOB", "it names all jobs", "--all"),))
    if not everything and job is None:
        raise BadUsage("missing JOB", "name one, or give --all; see: gpushare pause list", code="usage")
    host = settings.connect()
    if settings.dry_run:
        with host.open_channels() as control:
            plan = one_plan(
                [_resume_plan(paused, resume_step(host, control, paused)) for paused in _jobs_to_resume(host, job)]
            )
            return plan_result(plan, dry_run=True)
    resumed: list[tuple[PausedJob, Step]] = []
    errors: list[GpushareError] = []
    with host.open_channels() as control:
        # The process that calls the driver loads while the records are read.
        control.start()
        if _jobs_to_resume(host, job):
            with pauses_locked(host):
                # Under the lock: the guard may have resumed one.
                for paused in _jobs_to_resume(host, job):
                    step = resume_step(host, control, paused)
                    try:
                        step.do()
                        resumed.append((paused, step))
                    except GpushareError as error:
                        errors.append(error)
    plan = one_plan([_resume_plan(job, step) for job, step in resumed])
    result = plan_result(plan, dry_run=False, empty="no job is paused")
    all_failed = bool(errors) and not resumed
    return replace(
        result,
        data=ResumeAnswer(**vars(result.data), jobs=tuple(paused_row(job, host) for job, _ in resumed)),
        # Without a job, the result would say that none is paused.
        done=() if all_failed else result.done,
        errors=tuple(errors),
        all_failed=all_failed,
    )


@dataclass(frozen=True, kw_only=True)
class ResumeAnswer(PlanAnswer):
    """The answer of `resume`."""

    jobs: tuple[PausedRow, ...]


def _jobs_to_resume(host: Host, job: str | None) -> list[PausedJob]:
    """Return the named job, or all paused ones of this user but those that root, or their own run, has paused."""
    if job is not None:
        return [find_paused_job(host, job)]
    paused_by_root = processes_paused_by_root(host)
    return [
        paused
        for paused in paused_jobs(host, shared=False)
        if not paused.resumed_by_run(host)
        and paused_by_root.isdisjoint((each.pid, each.started) for each in paused.channels)
    ]


def _resume_plan(job: PausedJob, step: Step) -> Plan:
    return Plan(title=f"{job.title} is back on the GPU", steps=(step,), undo=step.undo)
