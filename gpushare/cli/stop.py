"""``gpushare stop``: end a job in the way that is safe for its neighbours; done by `gpushare/run/stop.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpushare.base.errors import BadUsage, GpushareError, NotFound
from gpushare.base.units import parse_seconds
from gpushare.base.values import dataclass
from gpushare.cli.options import AskingCommand, argument, consented, gpus_of, option, say_step, settings, verb
from gpushare.host.store import MOST_SECONDS
from gpushare.plan import one_plan
from gpushare.run.jobs import no_job_error
from gpushare.run.stop import Stop, Stopped, Target, find_target, forget_what_ended, in_order_of_ends
from gpushare.show.plan import plan_result
from gpushare.show.result import Result


@verb(AskingCommand)
def stop(
    job: list[str] = argument("JOB...", "Jobs by name or PID, as `gpushare jobs -a` lists them.", default=...),
    grace: str | None = option("--grace", "TIME", "Time to end before it is killed: 30s. [default: see above]"),
) -> Any:
    """End jobs in the way that is safe for their neighbours, and check that they are gone.

    The gpushare that runs a job ends it within the grace period given to `gpushare run`; `stop --grace` shortens that.
    A program that handles SIGINT and not SIGTERM, as Python does, gets SIGINT (KeyboardInterrupt); others get SIGTERM,
    also each bash or sh: to clean up, a script uses `trap ... TERM`. An MPS client that handles neither is drained and
    killed. A waiting job leaves the line. Where no gpushare runs it, an MPS client is stopped, drained (at most 5 s, or
    --grace) and killed, so that its neighbours survive; a container is stopped by its engine; others have 10 s or
    --grace to end before they are killed. gpushare asks before it ends what it did not start. Other users' jobs need
    root. If one of several JOBs does not exist, the others are ended, and the exit code says so.
    """
    seconds = None if grace is None else _grace_seconds(grace)
    host = settings.connect()
    if not settings.dry_run:
        # An earlier `gpushare stop` may have been killed before it forgot the jobs that it had ended.
        forget_what_ended(host)
    # All are looked up before the first one ends; one that has ended by itself keeps no other.
    targets: dict[tuple[int, int], Target] = {}
    missing: list[str] = []
    for text in job:
        try:
            target = find_target(host, text)
        except NotFound:
            missing.append(text)
        else:
            targets[target.job.pid, target.job.started] = target
    if not targets:
        raise no_job_error(host, missing[0])
    # The gpushare of a job knows its GPUs.
    gpus = () if all(target.supervisor is not None for target in targets.values()) else gpus_of(host)
    stops = [Stop(host, target, gpus, seconds) for target in in_order_of_ends(host, targets.values())]
    plan = one_plan([each.plan for each in stops])
    if settings.dry_run:
        return replace(plan_result(plan, dry_run=True), errors=tuple(no_job_error(host, text) for text in missing))
    consented(plan)
    stopped: list[Stopped] = []
    failures: list[GpushareError] = []
    for each in stops:
        shown_steps = each.plan.steps if settings.verbose else ()
        for step in shown_steps:
            say_step(step)
        try:
            stopped.append(each.run())
        except GpushareError as error:
            failures.append(error)
    # Only now: the hint names the jobs that still run.
    errors = (*(no_job_error(host, text) for text in missing), *failures)
    return Result(
        data=StopAnswer(jobs=tuple(stopped)),
        done=tuple((ended_sentence(job), None) for job in stopped),
        errors=errors,
        all_failed=bool(errors) and not stopped,
    )


@dataclass(frozen=True, kw_only=True)
class StopAnswer:
    """The answer of `stop`."""

    dry_run: bool = False
    jobs: tuple[Stopped, ...]


def _grace_seconds(text: str) -> float:
    """Return the grace period of --grace in seconds, at most 30 days."""
    seconds = parse_seconds(text)
    if seconds > MOST_SECONDS:
        raise BadUsage(f"--grace {text} is longer than 30 days", "give a time: --grace 30s", code="bad_duration")
    return seconds


def ended_sentence(done: Stopped) -> str:
    """Return in a sentence how a job was ended."""
    if done.ended_by == "line":
        return f"{done.title} has left the line"
    if done.drain is None:
        how = {
            "gpushare": "the gpushare that ran it has ended it",
            "container": f"its engine has stopped container {done.container}",
        }.get(done.ended_by, "ended by a signal")
        return f"{done.title} is gone after {done.seconds:.1f} s: {how}"
    busy = " (neighbours kept the GPU busy for the whole time limit)" if done.drain.by == "bound" else ""
    state = f"; its MPS server is {done.server_status}" if done.server_status else ""
    return f"{done.title} is gone: stopped, drained for {done.drain.seconds:.2f} s{busy}, killed{state}"
