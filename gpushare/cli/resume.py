"""``gpushare resume``: put paused jobs back on the GPU; done by `gpushare/pause/`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpushare.cli.options import ChangingCommand, settings
from gpushare.errors import BadCombination, BadUsage, GpushareError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resume", cls=ChangingCommand, short_help="Put paused jobs back on the GPU.")(resume)


def resume(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="A paused job by name or PID.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All paused jobs of this user.")] = False,
) -> Any:
    """Put a job that `gpushare pause` took off the GPU back, where its kernels stopped.

    It needs nothing but the record of the pause, even if the guard or gpushare was killed. `--all` leaves jobs that root
    paused, and those that a `gpushare run --pause` pauses and resumes by itself.
    """
    if everything and job is not None:
        raise BadCombination("--all cannot be combined with JOB", "gpushare resume --all")
    if not everything and job is None:
        raise BadUsage("missing JOB", "name one, or give --all; see: gpushare pause list", code="usage")
    from gpushare.cli.pause import row
    from gpushare.pause.change import changing, find_paused, resume_steps
    from gpushare.pause.record import paused_jobs
    from gpushare.show.plan import plan_result

    host = settings.connect()

    def wanted() -> list[Any]:
        if job is not None:
            return [find_paused(host, job)]
        return [one for one in paused_jobs(host, shared=False) if not (one.pause.by_run and one.kept(host))]

    found = wanted()
    if settings.dry_run:
        with host.open_channels() as control:
            return plan_result(
                "resume", [step for one in found for step in resume_steps(host, control, one)], dry_run=True
            )
    from dataclasses import replace

    errors: list[GpushareError] = []
    done, steps = [], []
    if found:
        with changing(host), host.open_channels() as control:
            # Under the lock: the guard may have resumed one.
            for one in wanted():
                try:
                    for step in resume_steps(host, control, one):
                        step.do()
                        steps.append(step)
                    done.append(one)
                except GpushareError as error:
                    errors.append(error)
    result = plan_result("resume", steps, dry_run=False)
    return replace(
        result,
        data={**result.data, "jobs": [row(one) for one in done]},
        text=None if steps or errors else "no job is paused",
        tables=result.tables if steps else (),
        errors=tuple(errors),
        exit_code=errors[0].exit_code if errors else 0,
        all_failed=bool(errors) and not done,
    )
