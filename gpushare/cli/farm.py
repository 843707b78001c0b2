"""``gpushare farm``: many copies of one program, as many at a time as fit; done by `gpushare/run/farm.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.options import (
    CONTEXT,
    ChangingCommand,
    ClientThreads,
    JobMemory,
    OneGpuOption,
    OverAction,
    PriorityOption,
    gpus_of,
    note,
    settings,
)
from gpushare.cli.run import action_of, connected
from gpushare.errors import BadUsage, GpushareError, NotFound, OperationFailed
from gpushare.selection import select_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpushare.host.host import Host
    from gpushare.run.farm import Copy, FarmOptions, FarmResult
    from gpushare.run.program import RunOptions
    from gpushare.selection import Device


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "farm",
        cls=ChangingCommand,
        short_help="Run many copies of a program, as many at a time as fit.",
        context_settings={**CONTEXT, "allow_interspersed_args": False},
    )(farm)


def farm(
    command: Annotated[
        list[str],
        typer.Argument(metavar="CMD...", help="The program; {} is the number of the copy.", show_default=False),
    ],
    copies: Annotated[int | None, typer.Option("--copies", metavar="N", help="Run N copies, numbered from 0.")] = None,
    gpu: OneGpuOption = None,
    threads: ClientThreads = None,
    memory: JobMemory = None,
    over: OverAction = None,
    priority: PriorityOption = None,
    logs: Annotated[
        str | None, typer.Option("--logs", metavar="DIR", help="Write the output of each copy to DIR/copy-N.log.")
    ] = None,
    restart: Annotated[int, typer.Option("--restart", metavar="K", help="Restart a failed copy, at most K times.")] = 0,
    stall: Annotated[
        str | None, typer.Option("--stall", metavar="TIME", help="End a copy that prints nothing for this long: 60s.")
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="FILE", help="Take the cap of each from a file of bench --to.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the farm, for commands that take a JOB.")
    ] = None,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="TIME", help="Time to end after the signal. [default: 10s]")
    ] = None,
) -> Any:
    """Run many copies of a program under MPS, as many at a time as fit into the free memory.

    {} in CMD, and GPUSHARE_COPY, are the number of each copy. A copy reserves its memory while it runs; one that fails, or
    goes over its --memory, does not affect the others. Ctrl-C ends all of them the safe way.
    """
    from gpushare.mps.limits import Limits
    from gpushare.run.job import parse_job_memory
    from gpushare.run.jobs import check_job_name
    from gpushare.run.program import RunOptions
    from gpushare.units import parse_seconds

    if not command:
        raise BadUsage(
            "there is no program to run", "give one: gpushare farm --copies 8 -- python train.py {}", code="no_command"
        )
    if copies is None:
        raise BadUsage("the number of copies is missing", "give it: --copies 8", code="bad_copies")
    if not 1 <= copies <= MOST_COPIES:
        raise BadUsage(f"--copies {copies} is outside 1 to {MOST_COPIES}", "give --copies 8", code="bad_copies")
    if restart < 0:
        raise BadUsage(f"--restart {restart} is below 0", "give --restart 1", code="bad_restart")
    if over is not None and memory is None:
        raise BadUsage(
            "--over needs --memory: it says what happens above the limit",
            "for example: gpushare farm --copies 4 --memory 20G --over warn -- CMD",
            code="bad_combination",
        )
    run = RunOptions(limits=Limits.typed(threads, None, priority), name=None if name is None else check_job_name(name))
    if grace is not None:
        run = replace(run, grace_seconds=parse_seconds(grace))
    wish = None if memory is None else parse_job_memory(memory)
    action, stall_seconds = action_of(over), None if stall is None else parse_seconds(stall)
    if stall_seconds == 0:
        raise BadUsage("--stall 0 would end every copy at once", "give --stall 60s", code="bad_duration")
    host = connected()
    device = select_one(gpu, gpus_of(host))
    job_bytes = None if wish is None else wish.of(device.memory_total_bytes)
    options = _options(host, device, command, run, copies, job_bytes, like)
    options = replace(
        options,
        action=action,
        restarts=restart,
        logs=None if logs is None else Path(logs),
        grace_seconds=run.grace_seconds,
        stall_seconds=stall_seconds,
        name=run.name,
    )
    return _farmed(host, device, command, options)


MOST_COPIES = 10_000


def _options(
    host: Host,
    device: Device,
    command: Sequence[str],
    run: RunOptions,
    copies: int,
    job_bytes: int | None,
    like: str | None,
) -> FarmOptions:
    """Return the limits of each copy: of memory as given, else its share of what is free; threads as measured."""
    from gpushare.hostfile.load import kept_limits
    from gpushare.mps.limits import check_memory, client_memory
    from gpushare.run.farm import FarmOptions, share_of_memory

    at_once = _most_at_once(host, device, copies)
    # Shares are for the copies that run at the same time.
    together = copies if at_once is None else min(copies, at_once)
    threads = run.limits.threads_percent
    if threads is None:
        threads = _threads(host, device, command, copies, like, together)
    check_memory(device, job_bytes, job=True)
    user_limits = kept_limits(host)
    memory = share_of_memory(host, device, together, user_limits) if job_bytes is None else client_memory(job_bytes)
    return FarmOptions(
        copies=copies,
        limits=replace(run.limits, threads_percent=threads, memory_limit_bytes=memory),
        at_once=at_once,
        job_bytes=job_bytes,
        user_limits=user_limits,
    )


def _farmed(host: Host, device: Device, command: Sequence[str], options: FarmOptions) -> Any:
    """Run a farm and return its result; exit code 1 when a copy failed, 128 + N when signal N ended it."""
    from gpushare.run.farm import farm, plan_farm
    from gpushare.run.jobs import named_job
    from gpushare.show.run import CopyLines

    report = CopyLines(options.copies, output=settings.output, quiet=settings.quiet, note=note)
    if settings.dry_run:
        from gpushare.show.plan import plan_result

        return plan_result("farm", plan_farm(host, device, command, options, report), dry_run=True)
    _say_first(host, device, options)
    try:
        with named_job(host, device, options.name):
            result = farm(host, device, command, options, report)
    finally:
        report.clear()
    return _finished(result, options)


def _threads(
    host: Host, device: Device, command: Sequence[str], copies: int, like: str | None, together: int
) -> float | None:
    """Return the cap of each copy: the one that bench found for this command here, else its share; None: no cap."""
    from gpushare.measure.bench_data import best_caps, read_bench
    from gpushare.run.farm import share_of_threads
    from gpushare.run.results import find_benched
    from gpushare.units import format_copies

    if like is None:
        found = find_benched(host, device, command, copies)
        if found is None:
            return share_of_threads(together)
        by = f"gpushare bench found the cap on {found.date}"
        driver = host.nvml.driver_version()
        note(by if found.driver == driver else f"{by} under driver {found.driver or 'unknown'}; measure again here")
    else:
        found = next((cap for cap in best_caps(read_bench(like)) if cap.copies == copies), None)
        if found is None:
            raise NotFound(
                f"{like} has no measurement of {format_copies(copies)} under MPS",
                f"measure it: gpushare bench --copies {copies} --ways mps,mps:200/n -- CMD",
                code="not_measured",
            )
    if not found.best:
        note(
            f"another way than MPS was faster for {format_copies(copies)} (gpushare bench); this is the best cap under MPS"
        )
    return found.threads_percent


def _most_at_once(host: Host, device: Device, copies: int) -> int | None:
    from gpushare.mps.control import max_clients, probe_version

    if copies <= 16:
        return None
    return max_clients(probe_version(host.programs), host.nvml.compute_capability(device.gpu.index))


def _say_first(host: Host, device: Device, options: FarmOptions) -> None:
    from gpushare.run.farm import check_room
    from gpushare.units import format_bytes, format_copies, format_percent

    threads = (
        "no thread cap"
        if options.limits.threads_percent is None
        else f"cap {format_percent(options.limits.threads_percent)}"
    )
    memory = options.limits.memory_limit_bytes
    limit = "no memory limit" if memory is None else f"memory limit {format_bytes(memory)}"
    if options.job_bytes is not None:
        together = f"{format_bytes(options.job_bytes)} for all of its processes"
        limit = f"memory limit {together}" if memory is None else f"{limit} per process, {together}"
    fitting = check_room(host, device, options)
    note(f"{format_copies(options.copies)} on {device.title}, each with {threads} and {limit}")
    bounds = [bound for bound in (fitting, options.at_once) if bound is not None and bound < options.copies]
    if fitting == 0:
        note(
            "the memory is reserved by jobs that do not use the GPU yet: the copies wait; what is not used within 60 s does not count"
        )
    elif bounds:
        note(f"{min(bounds)} run at the same time; the others start as these end")


def _finished(result: FarmResult, options: FarmOptions) -> Any:
    from gpushare.show.run import farm_result

    errors = _failures(result)
    unproved = [str(copy.number) for copy in result.copies if copy.attached is False]
    notes = []
    if unproved:
        notes.append(f"not seen as MPS clients, so their limits are not proved: copy {', '.join(unproved)}")
    data = {
        "seconds": round(result.seconds, 2),
        "threads_percent": options.limits.threads_percent,
        "memory_limit_bytes": options.limits.memory_limit_bytes,
        "job_memory_bytes": options.job_bytes,
        "copies": [
            {
                "copy": copy.number,
                "state": copy.state,
                "exit_code": _as_of_run(copy.exit_code),
                "seconds": round(copy.seconds, 2),
                "tries": copy.tries,
                "attached": copy.attached,
                "failure": copy.failure,
                "reason": copy.reason,
                "left_behind": list(copy.left_behind),
                "log": copy.log,
            }
            for copy in result.copies
        ],
    }
    code = 1 if result.failed else 0
    return farm_result(data, errors, notes, code if result.ended_by is None else 128 + result.ended_by)


def _failures(result: FarmResult) -> list[GpushareError]:
    """Return one error for all copies that failed in the same way."""
    from gpushare.units import ranges

    alike: dict[tuple[str, str | None], list[Copy]] = {}
    for copy in result.failed:
        # Each that was ended for its memory held another sum.
        alike.setdefault((copy.reason or str(copy.failure), copy.hint), []).append(copy)
    found: list[GpushareError] = []
    for (_, hint), copies in alike.items():
        logs = [copy.log for copy in copies if copy.log]
        seen = f"see {'its' if len(copies) == 1 else 'their'} output: {', '.join(logs[:3])}" if logs else None
        first, one = copies[0], len(copies) == 1
        failure = str(first.failure)
        if first.reason is not None and not one:
            failure = f"{failure} (copy {first.number}; the others likewise)"
        found.append(
            OperationFailed(
                f"{'copy' if one else 'copies'} {ranges(copy.number for copy in copies)}: {failure}",
                hint or seen or "keep its output: --logs DIR; or restart it: --restart 1",
                code=first.reason or "copy_failed",
            )
        )
    return found


def _as_of_run(status: int | None) -> int | None:
    """Return the exit code of a copy as shells give it: 128 + N if signal N ended it."""
    return 128 - status if status is not None and status < 0 else status
