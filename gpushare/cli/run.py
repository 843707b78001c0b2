"""``gpushare run``: one job in a share of a GPU. Parses only; done by `gpushare/run/start.py`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperOption

from gpushare.base.errors import BadCombination, BadUsage
from gpushare.base.units import quoted
from gpushare.cli.options import (
    CONTEXT,
    ChangingCommand,
    ClientThreads,
    JobMemory,
    LowerIsBetter,
    OverAction,
    PriorityOption,
    gpus_of,
    note,
    percentage,
    settings,
)

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.memory.limit import MemoryAction
    from gpushare.run.job import MemoryWish, SwapWish
    from gpushare.run.jobs import PrintedRate
    from gpushare.run.queued import MemoryOptions


def _help_all(ctx: Any, _parameter: Any, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import sys

        from gpushare.cli.help import ALL
        from gpushare.show.text import put

        ctx.meta[ALL] = True
        put(sys.stdout, ctx.get_help() + "\n")
        ctx.exit()


class _RunCommand(ChangingCommand):
    """The command with the most options: --help is one screen, --help-all has all of them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        more = TyperOption(
            param_decls=["--help-all", "shared_help_all"],
            is_flag=True,
            default=False,
            expose_value=False,
            is_eager=True,
            callback=_help_all,
            help="Show all options and examples.",
        )
        super().__init__(*arguments, **{**named, "params": [*(named.get("params") or []), more]})


def register(app: typer.Typer) -> None:
    """Add the command."""
    # Options end at the program's name, even without "--".
    app.command(
        "run",
        cls=_RunCommand,
        short_help="Run a program inside a share of a GPU.",
        context_settings={**CONTEXT, "allow_interspersed_args": False},
    )(run)


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD...", help="The program and its arguments.", show_default=False)
    ],
    gpu: Annotated[
        str | None,
        typer.Option("-g", "--gpu", metavar="SET", help="GPU or instance, or candidates: 0-3, NAME, any."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="On how many of them at the same time. [default: 1]")
    ] = None,
    bind: Annotated[bool, typer.Option("--bind", help="Run it on the CPUs next to its GPUs.")] = False,
    mig: Annotated[
        str | None,
        typer.Option("--mig", metavar="PROFILE|NAME", help="Run in a free MIG instance, or in that one."),
    ] = None,
    threads: ClientThreads = None,
    memory: JobMemory = None,
    over: OverAction = None,
    priority: PriorityOption = None,
    slice_text: Annotated[
        str | None, typer.Option("--slice", metavar="TIME", help="Run outside MPS with this time-slice: 16ms.")
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option("--weight", metavar="N", help="Run outside MPS with N times the usual slice."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End the program if it runs on the GPU outside MPS.")
    ] = False,
    container: Annotated[
        str | None,
        typer.Option("--container", metavar="ENGINE", help="podman or docker; CMD is [OPTIONS] IMAGE [CMD]."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait in line until a GPU, or an instance, has room.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="Wait for at most this long: 30m, 2h."),
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="If it runs out of memory, wait again for a fifth more.")
    ] = False,
    swap: Annotated[
        str | None,
        typer.Option(
            "--swap",
            metavar="WHEN",
            help="Leave the GPU at: request, idle=10m, turns[=60s].",
        ),
    ] = None,
    production: Annotated[
        str | None,
        typer.Option("--production", metavar="NAME", help="Run as a job that opportunistic jobs spare."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="REGEX", help="The speed that production prints, in brackets: 'rate=([0-9.]+)'."
        ),
    ] = None,
    lower: LowerIsBetter = False,
    opportunistic: Annotated[
        bool, typer.Option("--opportunistic", help="Run beside a production job and yield to it.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--for", metavar="JOB", help="The production job to spare, by name or PID.")
    ] = None,
    how: Annotated[
        str | None,
        typer.Option("--yield", metavar="HOW", help="slices[=200us], caps[=60], pause, swap or requeue."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="PCT", help="Adapt the slice: production keeps 97% of its speed."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the job, for commands that take a JOB.")
    ] = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Run it in the background; print its name.")] = False,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="TIME", help="Time to end after its signal. [default: 10s]")
    ] = None,
) -> Any:
    """Run a program inside a share of a GPU, and prove that it is attached.

    Starts an MPS daemon if the GPU has none. Ctrl-C ends the program the safe way. The exit code is the program's own,
    or 128 + N if signal N ended it.
    """
    from gpushare.base.units import parse_seconds
    from gpushare.mps.limits import Limits
    from gpushare.run.job import (
        DETACHED,
        Role,
        check_combination,
        given_options,
        parse_job_memory,
        parse_swap,
        slice_of,
        weight_of,
    )
    from gpushare.run.program import RunOptions
    from gpushare.run.start import JobStart

    if not command:
        raise BadUsage(
            "there is no program to run", "give one: gpushare run --threads 25 -- python train.py", code="no_command"
        )
    if gpus is not None and gpus < 1:
        raise BadUsage(f"--gpus {gpus} is no number of GPUs", "give at least 1: --gpus 2", code="bad_count")
    yields, share = _yields(how)
    swaps = None if swap is None else parse_swap(swap)
    values = {
        "--gpus": None if gpus == 1 else gpus, "--bind": bind, "--mig": mig, "--threads": threads, "--memory": memory, "--over": over, "--priority": priority,
        "--slice": slice_text, "--weight": weight, "--strict": strict, "--container": container, "--wait": wait,
        "--timeout": timeout, "--requeue": requeue, "--swap": swap, "--production": production, "--metric": metric,
        "--lower-is-better": lower, "--opportunistic": opportunistic, "--for": target, "--yield": how, "--keep": keep,
        "--name": name,
    }  # fmt: skip
    check_combination(given_options(values, yields, swaps, over))
    limits = Limits.typed(threads, None, priority)
    if yields == "caps" and share is not None:
        if threads is not None:
            raise BadCombination(
                "--yield caps=N cannot be combined with --threads", "give one of them: --yield caps=60"
            )
        limits = replace(limits, threads_percent=percentage_of_cap(share))
    slice_us = None if slice_text is None else slice_of(slice_text)
    if weight is not None:
        slice_us = weight_of(weight)
    if yields == "slices" and share is not None:
        slice_us = slice_of(share)
    # The program is not to know.
    own = os.environ.pop(DETACHED, None)
    options = RunOptions(limits=limits, strict=strict, name=_name(name if own is None or production else own))
    if grace is not None:
        options = replace(options, grace_seconds=parse_seconds(grace))
    host = connected()
    role = Role(
        production=production,
        opportunistic=opportunistic,
        target=target,
        yields=yields,
        slice_us=slice_us,
        keep=None if keep is None else _kept(keep),
        rate=_rate(host, production, metric, higher_is_better=not lower),
    )
    if container is not None:
        options = replace(options, container=_engine(host, container, role))
    wish = None if memory is None else parse_job_memory(memory)
    if detach and own is None and not settings.dry_run:
        return _detached(host, command[0], _name(production) or options.name)
    queue = _queue(wish, over, timeout, swaps, wait=wait, requeue=requeue, leaves=yields == "swap")
    started = JobStart(
        host=host,
        gpus=gpus_of(host),
        command=command,
        role=role,
        memory=queue,
        wish=wish,
        dry_run=settings.dry_run,
        quiet=settings.quiet,
        say=note,
        count=gpus or 1,
        bind=bind,
    )
    return started.run(gpu, mig, options)


def _detached(host: Host, program: str, name: str | None) -> Any:
    """Start the job in the background, and return its name; what keeps it from starting is shown as without -d."""
    import sys

    from gpushare.run.detach import detach, said, was_started
    from gpushare.show.result import OutputFormat, Result
    from gpushare.show.text import put

    job = detach(host, settings.words, program, name)
    if job.state == "ended" and job.exit_code and not was_started(host, job):
        document = settings.output in {OutputFormat.JSON, OutputFormat.YAML, OutputFormat.CSV}
        put(sys.stdout if document else sys.stderr, said(job, document=document))
        return job.exit_code
    how = {"runs": "it runs", "waits": "it waits in line", "ended": f"it has ended, exit code {job.exit_code}"}
    state = how.get(job.state or "", "it has not started yet")
    return Result(
        command="run",
        data={
            "job": job.name,
            "pid": job.pid,
            "state": job.state,
            "exit_code": job.exit_code,
            "output": str(job.output),
        },
        text=f"{job.name}\n",
        notes=(f"{state}; its output: gpushare logs {job.name}; to end it: gpushare stop {job.name}",),
    )


def _name(name: str | None) -> str | None:
    if name is None:
        return None
    from gpushare.run.jobs import check_job_name

    return check_job_name(name)


def _yields(how: str | None) -> tuple[Any, str | None]:
    from gpushare.run.job import parse_yield

    return (None, None) if how is None else parse_yield(how)


def percentage_of_cap(text: str) -> float:
    """Return the cap of ``--yield caps=60`` in percent. Raises BadUsage."""
    return percentage(
        "--yield caps", text, example="--yield caps=60", hint="give one: --yield caps=60", code="bad_yield"
    )


def _kept(text: str) -> float:
    """Return which part of its speed production keeps."""
    percent = percentage("--keep", text, example="--keep 97%", hint="give one: --keep 97%", code="bad_keep")
    if not 50 <= percent <= 99.5:
        raise BadUsage(f"--keep {text} is outside 50 to 99.5 %", "give one: --keep 97%", code="bad_keep")
    return percent / 100


def _rate(host: Host, production: str | None, metric: str | None, *, higher_is_better: bool) -> PrintedRate | None:
    """Return where production prints its speed, or None: in the output that is kept of it."""
    if metric is None or production is None:
        return None
    from gpushare.run.jobs import PrintedRate, check_job_name, output_path
    from gpushare.run.numbers import check_pattern

    check_pattern("--metric", metric)
    return PrintedRate(str(output_path(host, check_job_name(production))), metric, higher_is_better)


def _engine(host: Host, name: str, role: Any) -> str:
    """Return the engine of a container.

    Raises:
        NotSupported: only root may do with it what is asked for.
    """
    from gpushare.run.container import check_engine, demand_own, is_foreign

    engine = check_engine(name)
    if role.yields == "pause":
        demand_own(engine, host.uid, "a pause")
    if role.slice_us is not None:
        demand_own(engine, host.uid, "the time-slice")
    if is_foreign(engine, host.uid):
        note("without root, a container of docker is ended by its client's signal, not by stop, drain and kill")
    return engine


def connected() -> Host:
    """Return the host, without what a gpushare that was killed while it wrote has left."""
    from gpushare.host.records import sweep_leftovers

    host = settings.connect()
    if not settings.dry_run:
        sweep_leftovers(host)
    return host


ACTIONS = ("end", "warn", "pause")


def action_of(over: str | None) -> MemoryAction:
    """Return what happens to a job above its memory. Raises BadUsage (code ``bad_over``)."""
    if over is not None and over not in ACTIONS:
        raise BadUsage(f"{quoted(over)} is not an action", "give --over end, warn or pause", code="bad_over")
    return cast("MemoryAction", over or "end")


def _queue(
    wish: MemoryWish | None,
    over: str | None,
    timeout: str | None,
    swap: SwapWish | None,
    *,
    wait: bool,
    requeue: bool,
    leaves: bool,
) -> MemoryOptions | None:
    """Return how the job has its place in the ledger of memory; None: it needs none."""
    action = action_of(over)
    if wish is None and swap is None and not (wait or leaves):
        return None
    from gpushare.base.units import parse_seconds
    from gpushare.run.queued import MemoryOptions

    return MemoryOptions(
        action=action,
        # Taking turns, and leaving for production, are ways of waiting.
        wait=wait or leaves or (swap is not None and swap.turns),
        wait_seconds=None if timeout is None else parse_seconds(timeout),
        requeue=requeue,
        swappable=swap is not None or leaves,
        idle_seconds=None if swap is None else swap.idle_seconds,
        turns=swap is not None and swap.turns,
        turn_seconds=None if swap is None else swap.turn_seconds,
        for_production=leaves,
    )
