"""``gpushare run``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import CONTEXT, ChangingCommand, gpus_of, note, settings
from gpushare.cli.run_words import Farming, Roles, check_combination
from gpushare.errors import BadUsage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpushare.actions.mig_places import Place
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.actions.run import RunOptions
    from gpushare.host.host import Host
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
    mig: Annotated[
        str | None,
        typer.Option(
            "--mig",
            metavar="PROFILE|NAME",
            help="In a free MIG instance of this profile (1g.10gb, 1g, an id), or in the one of this name.",
        ),
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
    production: Annotated[
        str | None,
        typer.Option(
            "--production",
            metavar="NAME",
            help="As the production job of this name: never capped but by --threads, and known to others.",
        ),
    ] = None,
    opportunistic: Annotated[
        bool,
        typer.Option("--opportunistic", help="Beside a production job: tuned limits, or cap 60 % with low priority."),
    ] = False,
    beside: Annotated[
        str | None, typer.Option("--for", metavar="NAME|PID", help="With --opportunistic: the production job to spare.")
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause", help="With --opportunistic: stands still while the production job works.")
    ] = False,
    duty_cycle: Annotated[
        str | None,
        typer.Option(
            "--duty-cycle",
            metavar="PCT",
            help="With --opportunistic: the percentage of the time that it runs while production does; 100: all. [default: as tuned]",
        ),
    ] = None,
    copies: Annotated[
        int | None, typer.Option("--copies", metavar="N", help="N copies; {} in CMD and GPUSHARE_COPY are its number.")
    ] = None,
    logs: Annotated[
        str | None,
        typer.Option("--logs", metavar="DIR", help="With --copies: keep what each prints in DIR/copy-N.log."),
    ] = None,
    restart: Annotated[
        int, typer.Option("--restart", metavar="K", help="With --copies: start a failed copy again, K times at most.")
    ] = 0,
    stall: Annotated[
        str | None,
        typer.Option("--stall", metavar="SECS", help="With --copies: end a copy that prints nothing for so long."),
    ] = None,
    bench: Annotated[
        str | None,
        typer.Option("--bench", metavar="FILE", help="With --copies: take the cap from a file of bench --to."),
    ] = None,
) -> Any:
    """Run a program inside a share of a GPU, and prove that it is attached.

    Starts an MPS daemon if the GPU has none, and stops it with the last program. The program has its
    own exit code; 128 + N when signal N ended it. Ctrl-C, SIGTERM, and even the death of gpushare end
    it the safe way: its own signal first and time to end, then stop, drain, kill.

    With --mig the program has an instance for itself as long as it runs, and needs no daemon; limits or
    --strict run it under MPS inside the instance. Instances with a name are kept for --mig NAME.

    With --copies each copy has a cap of 200/N percent and a share of the free memory, unless limits are
    given; a copy whose memory would not fit waits. A failed copy leaves the others alone.
    """
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.cli.limits import percentage, priority_of
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
    hint = "give --duty-cycle 50; for none of the time while production works: --pause"
    duty = None
    if duty_cycle is not None:
        duty = percentage("--duty-cycle", duty_cycle, example="--duty-cycle 50%", hint=hint, code="bad_duty_cycle")
    roles = Roles(production=production, opportunistic=opportunistic, beside=beside, pause=pause, duty=duty)
    farming = Farming(copies=copies, logs=logs, restart=restart, stall=stall, bench=bench)
    check_combination(roles, farming, mig=mig, strict=strict)
    host = settings.connect()
    if mig is not None:
        return in_instance(host, mig, gpu, command, options)
    gpus = gpus_of(host)
    if gpu is None and roles.beside is not None:
        from gpushare.actions.roles import place_of_production

        gpu = place_of_production(host, gpus, roles.beside)
    device = select_one(gpu, gpus)
    if farming.copies is not None:
        return run_copies(host, device, command, options, farming)
    if roles.any:
        return run_role(host, device, command, options, roles)
    if settings.dry_run:
        return planned(host, device, command, limits)
    return run_program(
        host, device, command, options, RunReport(device, sys.stderr, quiet=settings.quiet, limits=limits)
    )


def run_copies(host: Host, device: Device, command: list[str], options: RunOptions, farming: Farming) -> Any:
    """Run a farm."""
    from gpushare.cli.run_farm import run_copies as run_farm

    return run_farm(host, device, command, options, farming)


def run_role(host: Host, device: Device, command: list[str], options: RunOptions, roles: Roles) -> Any:
    """Run a production job, or an opportunistic one."""
    from gpushare.cli.run_roles import run_role as run_in_role

    return run_in_role(host, device, command, options, roles)


def in_instance(host: Host, text: str, gpu: str | None, command: list[str], options: RunOptions) -> Any:
    """Run a program in a MIG instance that is free, or the one that a name means."""
    from gpushare.actions.mig_report import InstanceReport
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.actions.plain_share import dropped_variables
    from gpushare.actions.run_environment import check_program
    from gpushare.actions.run_mig import free_place, run_mig, take_place
    from gpushare.actions.run_report import RunReport
    from gpushare.actions.share import check_mps_share

    check_program(command[0])
    mps = options.strict or options.limits != MpsLimits()
    dropped = [] if mps else dropped_variables(os.environ)
    if dropped:
        note(
            f"without MPS these mean nothing and are left out: {', '.join(dropped)}; for limits give --threads, --memory"
        )
    if settings.dry_run:
        place = free_place(host, text, gpu)
        return planned(host, place.device, command, options.limits) if mps else planned_in(host, place, command)
    if mps:
        taken = take_place(host, text, gpu, lambda device: check_mps_share(host, device, command[0], options.limits))
        report = RunReport(taken[0].device, sys.stderr, quiet=settings.quiet, limits=options.limits)
    else:
        taken = take_place(host, text, gpu)
        report = InstanceReport(taken[0].device, sys.stderr, quiet=settings.quiet)
    return run_mig(host, taken, command, options, report, mps=mps)


def planned_in(host: Host, place: Place, command: list[str]) -> Any:
    """Return what a run in an instance without MPS would do, as a plan."""
    from gpushare.actions.plain_share import plain_environment
    from gpushare.actions.plan import Step
    from gpushare.show.plan import plan_result

    environment = plain_environment({}, host, place.device)
    what = f"run {command[0]} in {place.title}, if it is still free then"
    step = Step(what=what, command=command_line(environment, command), do=lambda: None)
    return plan_result("run", [step], dry_run=True)


def command_line(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """Return a program with its variables as a shell takes it."""
    import shlex

    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def planned(host: Any, device: Device, command: list[str], limits: MpsLimits, when: str = "") -> Any:
    """Return what a run would do, as a plan; ``when`` says when the program is paused."""
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
    line = command_line(client_environment({}, device, home, limits), command)
    what = f"run {command[0]} as a client of the MPS daemon of {device.title}{when}"
    steps.append(Step(what=what, command=line, do=lambda: None))
    return plan_result("run", steps, dry_run=True)
