"""``gpushare run``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import CONTEXT, ChangingCommand, gpus_of, settings
from gpushare.errors import BadUsage

if TYPE_CHECKING:
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.selection import Device


def register(app: typer.Typer) -> None:
    """Add the command."""
    # Options end at the program's name: its own are its own, also without "--".
    app.command(
        "run",
        cls=ChangingCommand,
        short_help="Run a program inside a share of a GPU.",
        context_settings={**CONTEXT, "allow_interspersed_args": False},
    )(run)


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD...", help="The program and its arguments.", show_default=False)
    ],
    gpu: Annotated[
        str | None, typer.Option("-g", "--gpu", metavar="GPU", help="One GPU or MIG instance: index, UUID, PCI bus id.")
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads", metavar="PCT", help="The share of the SM threads that it may use, above 0 up to 100."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The device memory that it may allocate: 4G, 1500M.")
    ] = None,
    priority: Annotated[str | None, typer.Option("--priority", metavar="LEVEL", help="normal or low.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End the program if it runs on the GPU outside MPS.")
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option("--grace", metavar="SECS", help="How long it may take to end after its signal. [default: 10]"),
    ] = None,
) -> Any:
    """Run a program inside a share of a GPU, and prove that it is attached.

    Starts an MPS daemon if the GPU has none, and stops it with the last program. The program has its
    own exit code; 128 + N when signal N ended it. Ctrl-C, SIGTERM, and even the death of gpushare end
    it the safe way: its own signal first and time to end, then stop, drain, kill.
    """
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.cli.limits import priority_of
    from gpushare.selection import select_one
    from gpushare.units import parse_memory_limit, parse_seconds, parse_thread_percentage

    limits = MpsLimits(
        threads_percent=None if threads is None else parse_thread_percentage(threads),
        memory_limit_bytes=None if memory is None else parse_memory_limit(memory),
        priority=priority_of(priority),
    )
    from gpushare.actions.run import RunOptions
    from gpushare.actions.run import run as run_program
    from gpushare.actions.run_report import RunReport

    seconds = {} if grace is None else {"grace_seconds": parse_seconds(grace)}
    options = RunOptions(limits=limits, strict=strict, **seconds)
    if not command:
        raise BadUsage(
            "there is no program to run", "give one: gpushare run --threads 25 -- python train.py", code="no_command"
        )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    if settings.dry_run:
        return planned(host, device, command, limits)
    return run_program(
        host, device, command, options, RunReport(device, sys.stderr, quiet=settings.quiet, limits=limits)
    )


def planned(host: Any, device: Device, command: list[str], limits: MpsLimits) -> Any:
    """Return what a run would do, as a plan."""
    import shlex

    from gpushare.actions.mps_device import check_device, own_daemon
    from gpushare.actions.mps_limits import MpsLimits, check_memory
    from gpushare.actions.mps_start import plan_start
    from gpushare.actions.plan import Step
    from gpushare.actions.run_environment import check_command, client_environment
    from gpushare.errors import NotFound
    from gpushare.host.mps_home import home_of
    from gpushare.show.plan import plan_result

    check_device(host, device)
    check_memory(device, limits.memory_limit_bytes)
    check_command(device, command[0], limits)
    steps: list[Step] = []
    try:
        home, _ = own_daemon(host, device)
    except NotFound:
        steps += plan_start(host, device, MpsLimits(), transient=True).steps
        home = home_of(host.run_directory, device.uuid)
    environment = client_environment({}, device, home, limits)
    line = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])
    steps.append(
        Step(what=f"run {command[0]} as a client of the MPS daemon of {device.title}", command=line, do=lambda: None)
    )
    return plan_result("run", steps, dry_run=True)
