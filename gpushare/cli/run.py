"""``gpushare run``: a program in a share of a GPU; done by `gpushare/run/`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpushare.cli.options import (
    CONTEXT,
    ChangingCommand,
    ClientMemory,
    ClientThreads,
    LowerIsBetter,
    OneGpuOption,
    PriorityOption,
    gpus_of,
    note,
    positive,
    settings,
)
from gpushare.errors import (
    BadCombination,
    BadUsage,
    GpushareError,
    InUse,
    NotFound,
    NotSupported,
    OperationFailed,
)
from gpushare.selection import select_one
from gpushare.units import format_slice, quoted
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.activity import ActivityRecorder
    from gpushare.host.claims import HeldClaim
    from gpushare.host.host import Host
    from gpushare.memory.limit import MemoryAction
    from gpushare.mig.places import Place
    from gpushare.model import Gpu
    from gpushare.mps.limits import Limits
    from gpushare.run.farm import Copy, FarmOptions, FarmResult
    from gpushare.run.jobs import PrintedRate
    from gpushare.run.mig import OutlookOnPlaces
    from gpushare.run.program import RunOptions
    from gpushare.run.queued import MemoryOptions, Queued
    from gpushare.run.roles import SparedProcess
    from gpushare.selection import Device


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The options of a production or an opportunistic job, as typed."""

    production: str | None
    opportunistic: bool
    target: str | None
    pause: bool
    # "slices" or "caps"; None: not given.
    way: str | None = None
    # Microseconds; None: not given.
    slice_us: int | None = None
    adapt: bool = False
    # Which part of its speed production keeps.
    keep: float = 0.97
    # End the job when production works, and start it again when it rests.
    requeue: bool = False
    # Where production prints its speed.
    rate: PrintedRate | None = None

    @property
    def any(self) -> bool:
        """Return whether a role was asked for."""
        return self.production is not None or self.opportunistic


@dataclass(frozen=True, kw_only=True)
class Farming:
    """The options of a farm, as typed."""

    copies: int | None
    logs: str | None
    restart: int
    stall: str | None
    bench: str | None


def check_combination(
    roles: Roles, farming: Farming, *, mig: str | None, strict: bool, name: str | None = None
) -> None:
    """Raise unless the options go together."""
    if farming.copies is None and (farming.logs or farming.restart or farming.stall or farming.bench):
        raise _wrong(
            "--logs, --restart, --stall and --bench belong to --copies", "gpushare run --copies 4 --logs DIR -- CMD"
        )
    _check_opportunistic(roles)
    if roles.rate is not None and roles.production is None:
        raise _wrong(
            "--metric and --log belong to --production",
            "gpushare run --production NAME --metric 'rate=([0-9.]+)' --log FILE -- CMD",
        )
    if roles.production is not None and name is not None:
        raise _wrong("--production gives the job its name: drop --name", "gpushare run --production NAME -- CMD")
    if roles.production is not None and roles.opportunistic:
        raise _wrong("--production cannot be combined with --opportunistic", "gpushare run --production NAME -- CMD")
    if mig is not None and (roles.any or farming.copies is not None):
        raise _wrong(
            "--mig gives one program an instance of its own: it cannot be combined with roles or --copies",
            "gpushare run --mig 1g -- CMD",
        )
    if farming.copies is not None and (roles.any or strict):
        raise _wrong(
            "--copies cannot be combined with --production, --opportunistic or --strict",
            "gpushare run --copies 4 -- CMD",
        )
    if farming.copies is not None and not 1 <= farming.copies <= 1000:
        raise BadUsage(f"--copies {farming.copies} is outside 1 to 1000", "give --copies 8", code="bad_copies")
    if farming.restart < 0:
        raise BadUsage(f"--restart {farming.restart} is below 0", "give --restart 1", code="bad_restart")


def _check_slice_alone(roles: Roles, limits: Limits, *, strict: bool, apart: bool) -> None:
    """Raise if a slice outside MPS is combined with what only MPS has, or an instance or copies."""
    outside = roles.slice_us is not None or (roles.production is not None and roles.way == "slices")
    if roles.slice_us is not None and roles.way == "caps":
        raise _wrong("--slice cannot be combined with --way caps", "gpushare run --production NAME --slice 16ms -- CMD")
    if roles.slice_us is not None and apart:
        raise _wrong(
            "--slice and --weight cannot be combined with --mig or --copies", "gpushare run --slice 500us -- CMD"
        )
    if roles.slice_us is not None and (roles.pause or roles.adapt):
        raise _wrong(
            "--slice cannot be combined with --pause or --adapt",
            "gpushare run --opportunistic --for NAME --slice 500us -- CMD",
        )
    if outside and not roles.opportunistic and (limits != type(limits)() or strict):
        raise _wrong(
            "a time-slice means outside MPS: it cannot be combined with --threads, --memory, --priority or --strict",
            "gpushare run --slice 500us -- CMD; to limit its memory: --job-memory 20G",
        )


def _check_opportunistic(roles: Roles) -> None:
    if roles.requeue and (roles.pause or roles.way is not None or roles.adapt):
        raise _wrong(
            "--requeue ends the job while production works: it cannot be combined with --pause, --way or --adapt",
            "gpushare run --opportunistic --for NAME --requeue -- CMD",
        )
    if not roles.opportunistic and (roles.target is not None or roles.pause):
        raise _wrong(
            "--for and --pause belong to --opportunistic",
            "gpushare run --opportunistic --for NAME -- CMD",
        )
    if not roles.any and roles.way is not None:
        raise _wrong(
            "--way belongs to --opportunistic or --production",
            "gpushare run --opportunistic --for NAME --way slices -- CMD",
        )
    if not roles.opportunistic and roles.adapt:
        raise _wrong("--adapt belongs to --opportunistic", "gpushare run --opportunistic --for NAME --adapt -- CMD")
    if roles.way is not None and roles.pause:
        raise _wrong(
            "--way cannot be combined with --pause",
            "gpushare run --opportunistic --for NAME --way slices -- CMD",
        )
    if roles.adapt and (roles.pause or roles.way == "caps"):
        raise _wrong(
            "--adapt moves a time-slice: it cannot be combined with --pause or --way caps",
            "gpushare run --opportunistic --for NAME --adapt --keep 97% -- CMD",
        )


def _wrong(what: str, example: str) -> BadUsage:
    return BadCombination(what, f"for example: {example}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    # Options end at the program's name, even without "--".
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
    gpu: OneGpuOption = None,
    mig: Annotated[
        str | None,
        typer.Option(
            "--mig",
            metavar="PROFILE|NAME",
            help="Run in a free MIG instance of this profile (1g.10gb, 1g, an id), or in the one with this name.",
        ),
    ] = None,
    threads: ClientThreads = None,
    memory: ClientMemory = None,
    priority: PriorityOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End the program if it runs on the GPU outside MPS.")
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option("--grace", metavar="SECS", help="Time to end after its signal. [default: 10]"),
    ] = None,
    production: Annotated[
        str | None,
        typer.Option(
            "--production",
            metavar="NAME",
            help="Run as the production job of this name, spared by opportunistic jobs: under MPS, or outside with --slice.",
        ),
    ] = None,
    opportunistic: Annotated[
        bool,
        typer.Option(
            "--opportunistic",
            help="Run next to a production job: as tuned; else with a time-slice if it runs outside MPS, or a cap of 60 %.",
        ),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="JOB",
            help="With --opportunistic: the production job whose GPU and speed count, by name or PID. Memory is left to "
            "all production jobs.",
        ),
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause", help="With --opportunistic: pause while the production job works.")
    ] = False,
    job_memory: Annotated[
        str | None,
        typer.Option(
            "--job-memory",
            metavar="SIZE",
            help="Device memory of all its processes together, contexts included: 20G. Over it, the job is ended. As root "
            "with driver 615, the driver refuses what is over it. With --copies: of each copy.",
        ),
    ] = None,
    memory_action: Annotated[
        str | None,
        typer.Option("--memory-action", metavar="ACTION", help="Over --job-memory: end, warn or pause. [default: end]"),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until a GPU has room, first come first served. With -g any: on the one where it harms least. With --mig: "
            "until an instance is free.",
        ),
    ] = False,
    wait_timeout: Annotated[
        str | None,
        typer.Option(
            "--wait-timeout", metavar="TIME", help="With --wait: give up after this time: 30m, 2h. [default: never]"
        ),
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="With --wait: if it runs out of memory, wait again for a fifth more. With --opportunistic: end it when "
            "production works, and start it again when it rests.",
        ),
    ] = False,
    slice_text: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="TIME",
            help="Run outside MPS with this time-slice: 16ms. With --opportunistic: the slice that all of them share.",
        ),
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            "--weight",
            metavar="N",
            help="Run outside MPS with a slice for this share: 3 is three times that of programs without a weight.",
        ),
    ] = None,
    way: Annotated[
        str | None,
        typer.Option(
            "--way",
            metavar="slices|caps",
            help="With a role: production outside MPS and one time-slice for the others; or all under MPS with caps.",
        ),
    ] = None,
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="With --opportunistic: move the time-slice so that production keeps its speed."),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="PCT", help="With --adapt: how much of its speed production keeps. [default: 97%]"
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="REGEX",
            help="With --production: its speed in its output, in brackets: 'rate=([0-9.]+)'; for --adapt.",
        ),
    ] = None,
    lower: LowerIsBetter = False,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="FILE", help="With --production: append its output to this file; for --adapt."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Give the job a name, for --for and other commands that take a JOB."
        ),
    ] = None,
    swappable: Annotated[
        bool, typer.Option("--swappable", help="Run it outside MPS, so that swap can move it out of the GPU and back.")
    ] = False,
    idle: Annotated[
        str | None,
        typer.Option(
            "--idle",
            metavar="TIME",
            help="Leave the GPU after this time without work: 10m. Come back at its first work.",
        ),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(
            "--turns",
            metavar="TIME|auto",
            help="Take turns of this time with jobs that do not fit at the same time, each with all of its memory. auto: nine "
            "times as long as a switch.",
        ),
    ] = None,
    swap: Annotated[
        bool,
        typer.Option("--swap", help="With --opportunistic: leave the GPU when any production job needs its memory."),
    ] = False,
    copies: Annotated[
        int | None,
        typer.Option("--copies", metavar="N", help="Run N copies; {} in CMD and GPUSHARE_COPY are the number of each."),
    ] = None,
    logs: Annotated[
        str | None,
        typer.Option("--logs", metavar="DIR", help="With --copies: write the output of each to DIR/copy-N.log."),
    ] = None,
    restart: Annotated[
        int, typer.Option("--restart", metavar="K", help="With --copies: restart a failed copy, at most K times.")
    ] = 0,
    stall: Annotated[
        str | None,
        typer.Option("--stall", metavar="SECS", help="With --copies: end a copy that prints nothing for this long."),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(
            "--container", metavar="ENGINE", help="Run a container by podman or docker: CMD is [OPTIONS] IMAGE [CMD]."
        ),
    ] = None,
    bench: Annotated[
        str | None,
        typer.Option("--bench", metavar="FILE", help="With --copies: take the cap from a file of bench --to."),
    ] = None,
) -> Any:
    """Run a program inside a share of a GPU, and prove that it is attached.

    Starts an MPS daemon if the GPU has none, and stops it after the last program. The exit code is the
    program's own, or 128 + N if signal N ended it. Ctrl-C, SIGTERM, and even the death of gpushare end
    the program the safe way: first its own signal and time to end, then stop, drain, kill.

    With --mig the program has an instance of its own while it runs, and needs no daemon; limits or
    --strict run it under MPS inside the instance. Instances with a name are reserved for --mig NAME. --wait
    waits until one is free, and --job-memory limits the processes of the program in it.

    With --slice or --weight the program runs outside MPS, with a time-slice of its own that is read back.
    Where the host cannot do that, it is refused before the program starts; if the driver refuses it later,
    the reason is printed and the program goes on with the driver's default.

    With --copies each copy gets a cap of 200/N percent and a share of the free memory, unless limits are
    given. It reserves its memory while it runs; a copy whose memory does not fit, or is reserved by other
    jobs, waits. A failed copy, or one over its --job-memory, does not affect the others.
    """
    from gpushare.mps.limits import Limits
    from gpushare.units import parse_seconds

    limits = Limits.typed(threads, memory, priority)
    from gpushare.run.program import RunOptions

    options = RunOptions(limits=limits, strict=strict)
    if grace is not None:
        options = replace(options, grace_seconds=parse_seconds(grace))
    if not command:
        raise BadUsage(
            "there is no program to run", "give one: gpushare run --threads 25 -- python train.py", code="no_command"
        )
    roles = Roles(
        production=production,
        opportunistic=opportunistic,
        target=target,
        pause=pause,
        way=_way(way),
        slice_us=_slice(slice_text)
        if weight is None
        else _weighed(weight, slice_text, roles=bool(production or opportunistic)),
        adapt=adapt,
        keep=_kept(keep, adapt=adapt),
        requeue=requeue and opportunistic and not wait,
        rate=_rate(metric, log, higher_is_better=not lower),
    )
    farming = Farming(copies=copies, logs=logs, restart=restart, stall=stall, bench=bench)
    check_combination(roles, farming, mig=mig, strict=strict, name=name)
    _check_slice_alone(roles, limits, strict=strict, apart=mig is not None or copies is not None)
    if name is not None:
        from gpushare.run.jobs import check_job_name

        options = replace(options, name=check_job_name(name))
    room = _memory_options(
        job_memory,
        memory_action,
        wait_timeout,
        # Taking turns, and leaving for production, are ways of waiting.
        wait=wait or turns is not None or swap,
        requeue=requeue and not roles.requeue,
        gpu=gpu,
        copies=copies,
        mig=mig,
        reserves=limits.memory_limit_bytes is not None,
    )
    alone = mig is None and copies is None
    room = _swap_options(room, roles, options, swappable=swappable, idle=idle, turns=turns, swap=swap, alone=alone)
    host = _connected()
    if container is not None:
        swapped = room is not None and room.swappable
        options = replace(options, container=_engine(host, container, roles, copies=copies, swapped=swapped))
    if mig is not None:
        return in_instance(host, mig, gpu, command, options, room)
    gpus = gpus_of(host)
    if gpu is None and roles.target is not None:
        from gpushare.run.roles import place_of_production

        gpu = place_of_production(host, gpus, roles.target)
    if farming.copies is not None:
        return farm_result(host, select_one(gpu, gpus), command, options, farming, room)
    if room is not None:
        return _queued(host, gpus, gpu, command, options, room, roles)
    device = select_one(gpu, gpus)
    return _started(host, device, command, options, roles)


def _engine(host: Host, name: str, roles: Roles, *, copies: int | None, swapped: bool) -> str:
    """Return the engine of a container.

    Raises:
        BadCombination: with what a container does not have.
        NotSupported: only root may do with it what is asked for.
    """
    from gpushare.run.container import check_engine, demand_own, is_foreign

    if copies is not None or swapped:
        raise _wrong(
            "--container runs one container: it cannot be combined with --copies or with swapping",
            "gpushare run --container podman -- IMAGE CMD",
        )
    engine = check_engine(name)
    if roles.pause:
        demand_own(engine, host.uid, "a pause")
    if roles.slice_us is not None:
        demand_own(engine, host.uid, "the time-slice")
    if is_foreign(engine, host.uid):
        note("without root, a container of docker is ended by its client's signal, not by stop, drain and kill")
    return engine


def _connected() -> Host:
    """Return the host, without what a gpushare that was killed while it wrote has left."""
    from gpushare.host.records import sweep_leftovers

    host = settings.connect()
    if not settings.dry_run:
        sweep_leftovers(host)
    return host


def _way(text: str | None) -> str | None:
    if text not in {None, "slices", "caps"}:
        raise BadUsage(f"{quoted(text or '')} is not a way", "give --way slices or --way caps", code="bad_way")
    return text


def _slice(text: str | None) -> int | None:
    if text is None:
        return None
    from gpushare.timeslice.slices import MOST_US, check_slice
    from gpushare.units import format_slice, parse_slice

    found = check_slice(parse_slice(text))
    if found > MOST_US:
        raise BadUsage(
            f"--slice {format_slice(found)} is above {format_slice(MOST_US)}: it freezes the other programs on the GPU that long",
            "give --slice 16ms; or set a longer one as root while it runs: gpushare timeslice set 50ms JOB",
            code="slice_too_long",
        )
    return found


def _weighed(text: str, slice_text: str | None, *, roles: bool) -> int:
    """Return the slice of a weight."""
    from gpushare.timeslice.rules import LEAST_WEIGHT, MOST_WEIGHT, slice_of_weight

    if slice_text is not None:
        raise _wrong("--weight cannot be combined with --slice, as it is one", "gpushare run --weight 3 -- CMD")
    if roles:
        raise _wrong(
            "--weight cannot be combined with --production or --opportunistic, which have slices of their own",
            "gpushare run --weight 3 --name NAME -- CMD",
        )
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise BadUsage(
            f"--weight {quoted(text)} is not a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
            "give --weight 3; programs without a weight count as 1",
            code="bad_weight",
        )
    return slice_of_weight(weight)


def _kept(text: str | None, *, adapt: bool) -> float:
    """Return which part of its speed production keeps."""
    from gpushare.cli.options import percentage

    if text is None:
        return 0.97
    if not adapt:
        raise _wrong("--keep belongs to --adapt", "gpushare run --opportunistic --for NAME --adapt --keep 97% -- CMD")
    percent = percentage("--keep", text, example="--keep 97%", hint="give one: --keep 97%", code="bad_keep")
    if not 50 <= percent <= 99.5:
        raise BadUsage(f"--keep {text} is outside 50 to 99.5 %", "give one: --keep 97%", code="bad_keep")
    return percent / 100


def _rate(metric: str | None, log: str | None, *, higher_is_better: bool) -> PrintedRate | None:
    """Return where production prints its speed, or None."""
    if metric is None and log is None:
        if not higher_is_better:
            raise _wrong(
                "--lower-is-better needs --metric",
                "gpushare run --production NAME --metric 'ms=([0-9.]+)' --lower-is-better --log FILE -- CMD",
            )
        return None
    if metric is None or log is None:
        raise _wrong(
            "--metric needs --log, and --log needs --metric",
            "gpushare run --production NAME --metric 'rate=([0-9.]+)' --log FILE -- CMD",
        )
    from gpushare.run.jobs import PrintedRate
    from gpushare.run.numbers import check_pattern

    check_pattern("--metric", metric)
    return PrintedRate(os.path.abspath(log), metric, higher_is_better)


def _started(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    if roles.any:
        return role_result(host, device, command, options, roles)
    if roles.slice_us is not None:
        return _sliced(host, device, command, options, roles.slice_us)
    from gpushare.run.share import MpsShare

    group: Sequence[Any] = ()
    # A dozen files are read only where such a job has run.
    from gpushare.host.users import has_records

    if has_records(host, "group"):
        from gpushare.run.group import members

        group = members(host, device)
    if group:
        note(
            f"opportunistic jobs with a time-slice run in the MPS daemon of {device.title}: this job shares their slice of"
            f" {format_slice(min(one.slice_us for one in group))}; to run outside it: --slice 2ms"
        )

    return _carried_out(host, MpsShare(host, device, options.limits), command, options)


_ACTIONS = ("end", "warn", "pause")


def _memory_options(
    size: str | None,
    action: str | None,
    timeout: str | None,
    *,
    wait: bool,
    requeue: bool,
    gpu: str | None,
    copies: int | None,
    mig: str | None,
    reserves: bool,
) -> MemoryOptions | None:
    """Return the options of the ledger of memory; None: none was given. ``reserves``: --memory was given."""
    from gpushare.units import parse_memory_limit, parse_seconds, quoted

    anywhere = gpu is not None and gpu.strip().lower() == "any"
    if not wait and (timeout is not None or requeue or anywhere):
        raise _wrong(
            "--wait-timeout and -g any belong to --wait, and --requeue to --wait or --opportunistic",
            "gpushare run --wait -g any -- CMD",
        )
    if action is not None and size is None:
        raise _wrong(
            "--memory-action belongs to --job-memory", "gpushare run --job-memory 20G --memory-action warn -- CMD"
        )
    if action is not None and action not in _ACTIONS:
        raise BadUsage(
            f"{quoted(action)} is not an action", "give --memory-action end, warn or pause", code="bad_memory_action"
        )
    if wait and copies is not None:
        raise _wrong(
            "copies do not wait in line for room: --wait cannot be combined with --copies",
            f"seq 0 {copies - 1} | xargs -P {copies} -I{{}} gpushare run --wait --job-memory 20G -- CMD {{}}",
        )
    if requeue and mig is not None:
        raise _wrong(
            "--requeue cannot be combined with --mig: the instance does not grow",
            "gpushare run --wait --mig PROFILE -- CMD",
        )
    if size is None and not wait and not (reserves and copies is None and mig is None):
        return None
    from gpushare.run.queued import MemoryOptions

    return MemoryOptions(
        job_bytes=None if size is None else parse_memory_limit(size, "--job-memory"),
        action=cast("MemoryAction", action or "end"),
        wait=wait,
        wait_seconds=None if timeout is None else parse_seconds(timeout),
        requeue=requeue,
    )


def _swap_options(
    room: MemoryOptions | None,
    roles: Roles,
    options: RunOptions,
    *,
    swappable: bool,
    idle: str | None,
    turns: str | None,
    swap: bool,
    alone: bool,
) -> MemoryOptions | None:
    """Return the options of the ledger with those of swapping."""
    from gpushare.mps.limits import Limits

    if not (swappable or idle is not None or turns is not None or swap):
        return room
    if (idle is not None) + (turns is not None) + swap > 1:
        raise _wrong("--idle, --turns and --swap exclude each other", "gpushare run --turns auto -- CMD")
    if not alone:
        raise _wrong(
            "a job that is swapped has a whole GPU: it cannot be combined with --mig or --copies",
            "gpushare run --swappable -- CMD",
        )
    if swap and not roles.opportunistic:
        raise _wrong("--swap belongs to --opportunistic", "gpushare run --opportunistic --for NAME --swap -- CMD")
    if roles.any and not swap:
        raise _wrong(
            "--swappable, --idle and --turns cannot be combined with roles",
            "gpushare run --opportunistic --for NAME --swap -- CMD",
        )
    if options.strict or options.limits != Limits():
        raise _wrong(
            "a job that is swapped runs outside MPS: --threads, --memory, --priority and --strict are for MPS",
            "gpushare run --swappable --job-memory 20G -- CMD",
        )
    if roles.slice_us is not None or roles.way is not None or roles.adapt:
        raise _wrong(
            "a job that is swapped has the driver's time-slice: it cannot be combined with --slice, --weight, --way or --adapt",
            "gpushare run --swappable --name NAME -- CMD",
        )
    if room is not None and room.action == "pause" and (idle is not None or turns is not None or swap):
        raise _wrong(
            "a job that --memory-action pause has stopped cannot leave the GPU: it cannot be combined with --idle, --turns or --swap",
            "gpushare run --turns auto --job-memory 60G -- CMD",
        )
    if roles.pause or roles.requeue:
        raise _wrong(
            "--swap is one way to yield to production: it cannot be combined with --pause or --requeue",
            "gpushare run --opportunistic --for NAME --swap -- CMD",
        )
    from gpushare.run.queued import MemoryOptions

    wait = turns is not None or swap
    found = MemoryOptions(wait=wait) if room is None else replace(room, wait=room.wait or wait)
    fixed = turns is not None and turns.strip().lower() != "auto"
    return replace(
        found,
        swappable=True,
        idle_seconds=None if idle is None else positive("--idle", idle, "10m"),
        turns=turns is not None,
        turn_seconds=positive("--turns", turns, "auto, or a time such as 60s") if turns is not None and fixed else None,
        for_production=swap,
    )


def _usable(devices: Sequence[Device], *, instances: bool) -> tuple[Device, ...]:
    """Return the devices that ``-g any`` chooses from: GPUs without MIG, and the instances of the others.

    ``devices`` may be instances, of a job that a batch system has given some.
    """
    from gpushare.selection import Device

    found: list[Device] = []
    for device in devices:
        if not device.gpu.mig_enabled or (device.mig is not None and instances):
            found.append(device)
        elif instances:
            found += [Device(gpu=device.gpu, mig=one) for one in device.gpu.mig_instances]
    if not found:
        raise NotSupported(
            "all GPUs are in MIG mode" + (" without an instance" if instances else ", where jobs cannot be swapped"),
            "see: gpushare mig status; to run in an instance: gpushare run --mig PROFILE -- CMD",
            code="mig_enabled",
        )
    return tuple(found)


def _check_not_mig(devices: Sequence[Device], memory: MemoryOptions) -> None:
    """Raise before waiting for a device that cannot be used: a GPU in MIG mode as a whole, or a swap on an instance."""
    for device in devices:
        if device.gpu.mig_enabled and (device.mig is None or memory.swappable):
            raise NotSupported(
                f"{device.title} is in MIG mode: "
                + ("jobs on it cannot be swapped" if memory.swappable else "programs run in its instances"),
                "name another GPU: -g GPU; or run in an instance: gpushare run --mig PROFILE -- CMD",
                gpu=str(device.gpu.index),
                code="mig_enabled",
            )


def _asked_for(gpus: Sequence[Gpu], gpu: str | None, *, anywhere: bool, wait: bool) -> tuple[Device, ...]:
    """Return the devices that a job may have."""
    from gpushare.selection import select_for_change

    if wait and gpu is None and len(gpus) > 1:
        raise BadUsage(
            f"this host has {len(gpus)} GPUs; say on which to run",
            "name one: -g 0; or take the one where it harms least: -g any",
            code="gpu_not_named",
        )
    if not wait:
        return (select_one(gpu, gpus),)
    if not anywhere:
        return select_for_change(gpu, gpus)
    # Any GPU is one that answers.
    answering = [one for one in gpus if one.error is None] or gpus
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return select_for_change("all", answering) if given is None else _given(given, answering)


def _given(text: str, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """Return the GPUs that a batch system, or the user, has left to this job: the others belong to other jobs."""
    from gpushare.selection import select

    # CUDA takes those before the first that there is not: "0,-1,1" is GPU 0.
    words: list[str] = []
    for word in text.split(","):
        try:
            select(word, gpus)
        except GpushareError:
            break
        words.append(word)
    if not words:
        raise BadUsage(
            f"-g any takes one of the GPUs in CUDA_VISIBLE_DEVICES, and {quoted(text)} names none of this host",
            "name one: -g 0; or for any of the host: env -u CUDA_VISIBLE_DEVICES gpushare run --wait -g any -- CMD",
            code="bad_gpu",
        )
    found = select(",".join(words), gpus)
    if len(found) < len(gpus):
        note(f"-g any: of the GPUs in CUDA_VISIBLE_DEVICES: {', '.join(one.title for one in found)}")
    return found


def _queued(
    host: Host,
    gpus: Sequence[Gpu],
    gpu: str | None,
    command: Sequence[str],
    options: RunOptions,
    memory: MemoryOptions,
    roles: Roles,
) -> Any:
    """Run a program that is held to its memory, or waits for it first."""
    from gpushare.hostfile.load import kept_limits
    from gpushare.model import ComputeMode
    from gpushare.mps.limits import check_memory
    from gpushare.run.queued import Queued
    from gpushare.run.share import check_program

    if roles.production is not None:
        from gpushare.run.jobs import check_job_name

        check_job_name(roles.production)
    anywhere = gpu is not None and gpu.strip().lower() == "any"
    devices = _asked_for(gpus, gpu, anywhere=anywhere, wait=memory.wait)
    if memory.swappable:
        from gpushare.memory.swap import check_host

        check_host(host)
    if anywhere:
        devices = _usable(devices, instances=not memory.swappable)
    _check_not_mig(devices, memory)
    check_program(options.container or command[0])
    memory = _with_spared(host, devices, memory, roles.target)
    if len(devices) == 1:
        check_memory(devices[0], memory.job_bytes, "--job-memory")
        check_memory(devices[0], options.limits.memory_limit_bytes)

    def start(device: Device, metered: RunOptions) -> Any:
        if not memory.swappable:
            return _started(host, device, command, metered, roles)
        from gpushare.run.plain import PlainShare

        return _carried_out(host, PlainShare(host, device), command, metered, mps=False)

    if all(one.gpu.compute_mode is ComputeMode.PROHIBITED for one in devices):
        from gpushare.mps.daemons import check_mode

        # To wait for that would take until somebody changes it.
        check_mode(devices[0])
    queued = Queued(
        host=host,
        devices=devices,
        command=command,
        options=replace(options, rate=roles.rate),
        memory=memory,
        client=not memory.swappable and roles.slice_us is None and roles.way != "slices",
        name=roles.production or options.name,
        production=roles.production is not None,
        opportunistic=roles.opportunistic,
        start=start,
        say=note,
        limits=kept_limits(host),
    )
    return _planned_or_run(queued)


def _planned_or_run(queued: Queued) -> Any:
    if not settings.dry_run:
        return queued.run()
    device, metered, found, reasons = queued.plan()
    planned = queued.start(device, metered)
    if found is None:
        return planned
    from gpushare.memory.room import outlook_data, outlook_text

    return replace(
        planned,
        data={**planned.data, "room": outlook_data(found, reasons)},
        notes=(*planned.notes, outlook_text(found, reasons)),
    )


def _with_spared(host: Host, devices: Sequence[Device], memory: MemoryOptions, target: str | None) -> MemoryOptions:
    """Return the options with the production job of ``--for``, which need not run yet, if it is swapped for production.

    Raises:
        NotFound: no such job is known.
        BadUsage: it runs on another device than the only one that was chosen.
    """
    if not memory.for_production or target is None:
        return memory
    from gpushare.run.roles import spared_process

    try:
        found = spared_process(host, devices[0], target)
    except BadUsage as error:
        if error.code != "other_device" or len(devices) == 1:
            raise
        found = None
    except NotFound as error:
        if error.code != "no_production":
            raise
        start = f"gpushare run --production {target} --wait --job-memory SIZE -- CMD"
        raise error.restated(
            hint=f"start it: {start}; or drop --for: the job leaves for every production job"
        ) from error
    spared = f"'{target}'" if found is None else found.title
    if not settings.dry_run:
        note(f"opportunistic: it leaves the GPU when {spared} or another production job needs room")
    return replace(memory, spared=spared)


def _carried_out(host: Host, share: Any, command: Sequence[str], options: RunOptions, *, mps: bool = True) -> Any:
    """Run a program in a share and return its exit code; in a dry run, return the steps as a plan."""
    from gpushare.run.program import Run
    from gpushare.show.run import InstanceReport, RunReport

    typed = None
    if options.name is not None:
        from gpushare.run.jobs import NamedShare

        share = NamedShare(share, host, options.name, options.role, options.rate)
    if options.container is not None:
        from gpushare.run.container import ContainerShare

        share = ContainerShare(share, host, options.container)
        typed, command = command, share.command(command)
    kind = RunReport if mps else InstanceReport
    report = kind(host, share.device, sys.stderr, quiet=settings.quiet, limits=options.limits if mps else None)
    run = Run(host, share, command, options, report, typed=typed)
    if settings.dry_run:
        from gpushare.show.plan import plan_result

        return plan_result("run", run.steps(), dry_run=True)
    return run.carry_out()


def in_instance(
    host: Host, text: str, gpu: str | None, command: list[str], options: RunOptions, memory: MemoryOptions | None = None
) -> Any:
    """Run a program in a free MIG instance, or in the one with a name."""
    from gpushare.mps.limits import Limits, check_memory
    from gpushare.run.mig import wait_words
    from gpushare.run.plain import PlainShare, dropped_variables
    from gpushare.run.program import step_of_run
    from gpushare.run.share import MpsShare, check_program

    check_program(options.container or command[0])
    mps = options.strict or options.limits != Limits()
    dropped = [] if mps else dropped_variables(os.environ)
    if dropped:
        note(f"ignored without MPS: {', '.join(dropped)}; to set limits, give --threads or --memory")
    job_bytes = None if memory is None else memory.job_bytes

    def check(device: Device) -> None:
        check_memory(device, job_bytes, "--job-memory")
        if mps:
            MpsShare(host, device, options.limits).check(command[0])

    place, claim, room = _place_for(host, text, gpu, check, options, memory)
    if room is not None and memory is not None:
        options = replace(options, before=(step_of_run(wait_words(text, memory.wait_seconds)),))
    share = (
        MpsShare(host, place.device, options.limits, claim)
        if mps
        else PlainShare(host, place.device, claim, place.title)
    )

    def start(metered: RunOptions) -> Any:
        return _carried_out(host, share, command, metered, mps=mps)

    try:
        # Another one of its places may be larger.
        check_memory(place.device, job_bytes, "--job-memory")
        if memory is None or job_bytes is None:
            done = start(options)
        else:
            done = _limited_in(host, place.device, command, options, memory, start, client=mps)
    except BaseException:
        share.close()
        raise
    if room is None:
        return done
    return replace(done, data={**done.data, "room": room.data}, notes=(*done.notes, room.text))


def _place_for(
    host: Host,
    text: str,
    gpu: str | None,
    check: Callable[[Device], None],
    options: RunOptions,
    memory: MemoryOptions | None,
) -> tuple[Place, HeldClaim | None, OutlookOnPlaces | None]:
    """Return the instance of a program and its claim; in a dry run, which one it may be, and whether it would wait for it."""
    from gpushare.run.mig import free_place, outlook_on_places, take_place, wait_for_place

    if memory is None or not memory.wait:
        if settings.dry_run:
            return free_place(host, text, gpu), None, None
        return (*take_place(host, text, gpu, check), None)
    from gpushare.run.queued import check_not_waiting

    check_not_waiting(host, options.name)
    # Any GPU is all of them, as without -g.
    gpu = None if gpu is not None and gpu.strip().lower() == "any" else gpu
    if settings.dry_run:
        found = outlook_on_places(host, text, gpu, check)
        return found.place, None, found
    taken = wait_for_place(host, text, gpu, check, seconds=memory.wait_seconds, name=options.name, say=note)
    return (*taken, None)


def _limited_in(
    host: Host,
    device: Device,
    command: Sequence[str],
    options: RunOptions,
    memory: MemoryOptions,
    start: Callable[[RunOptions], Any],
    *,
    client: bool,
) -> Any:
    """Run a program that is held to its memory in an instance which it has already."""
    from gpushare.hostfile.load import kept_limits
    from gpushare.run.queued import Queued

    return _planned_or_run(
        Queued(
            host=host,
            devices=(device,),
            command=command,
            options=options,
            memory=replace(memory, wait=False),
            client=client,
            name=options.name,
            production=False,
            opportunistic=False,
            start=lambda _, metered: start(metered),
            say=note,
            limits=kept_limits(host),
        )
    )


def role_result(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    """Run a production job or an opportunistic one, and return the program's exit code."""
    if roles.production is not None:
        return _production(host, device, command, replace(options, rate=roles.rate), roles, roles.production)
    return _opportunistic(host, device, command, options, roles)


def _production(
    host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles, name: str
) -> Any:
    from gpushare.run.group import PRODUCTION_US, members
    from gpushare.run.jobs import PRODUCTION, check_job_name
    from gpushare.run.results import CAPS, SLICES, find_tuned
    from gpushare.run.roles import ProductionShare

    check_job_name(name)
    options = replace(options, name=name, role=PRODUCTION)
    tuned = find_tuned(host, name)
    if (
        tuned is not None
        and tuned.way == SLICES
        and roles.slice_us is None
        and options.limits == type(options.limits)()
    ):
        tuned_us = tuned.production_slice_us or PRODUCTION_US
    else:
        tuned_us = None
    if roles.way != CAPS and (roles.slice_us is not None or roles.way == SLICES or tuned_us is not None):
        asked = roles.slice_us is not None or roles.way == SLICES
        return _sliced(host, device, command, options, roles.slice_us or tuned_us or PRODUCTION_US, asked=asked)
    group = members(host, device)
    if group:
        raise InUse(
            f"opportunistic jobs with a time-slice run in the MPS daemon of {device.title} (process {group[0].pid}),"
            " and production would share it",
            f"start it outside MPS: gpushare run --production {name} --slice 16ms -- CMD",
            gpu=str(device.gpu.index),
            code="production_under_mps",
        )
    share = ProductionShare(host, device, options.limits)
    cap = share.daemon_cap()
    if cap is not None:
        note(
            f"the MPS daemon of {device.title} caps every client at {cap:g} %, including this job; to lift it: gpushare mps stop, then run the job again"
        )
    return _carried_out(host, share, command, options)


def _sliced(
    host: Host, device: Device, command: Sequence[str], options: RunOptions, slice_us: int, *, asked: bool = True
) -> Any:
    """Run a program outside MPS with a time-slice; if that was only tuned, not ``asked``, even where none can be set."""
    from gpushare.run.plain import PlainShare, dropped_variables
    from gpushare.run.sliced import SlicedShare, check_outside_mps, check_settable

    check_outside_mps(device)
    if asked:
        check_settable(host)
    dropped = dropped_variables(os.environ)
    if dropped:
        note(f"ignored without MPS: {', '.join(dropped)}")
    share = SlicedShare(PlainShare(host, device), slice_us)
    return _carried_out(host, share, command, options, mps=False)


def _opportunistic(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    from gpushare.run.jobs import OPPORTUNISTIC
    from gpushare.run.roles import spared_process

    options = replace(options, role=OPPORTUNISTIC)
    process = spared_process(host, device, roles.target)
    outside = process is not None and not process.under_mps
    if roles.requeue:
        return _yielding(host, device, command, options, roles, process)
    if _by_slices(host, device, roles, process):
        return _grouped(host, device, command, options, roles, process)
    if process is not None and (roles.pause or outside):
        return _paused(host, device, command, options, roles, process)
    if roles.pause:
        _demand_one(host, device)
        raise _nobody(device)
    return _capped(host, device, command, options, roles)


def _by_slices(host: Host, device: Device, roles: Roles, process: SparedProcess | None) -> bool:
    """Return whether the job runs with a time-slice: as asked, as tuned, or because production runs outside MPS."""
    from gpushare.run.group import why_not
    from gpushare.run.results import CAPS, SLICES
    from gpushare.run.roles import tuned_next_to

    outside = process is not None and not process.under_mps
    if roles.way == CAPS:
        if outside:
            raise _outside_mps(process)
        return False
    if roles.pause:
        return False
    asked = roles.way == SLICES or roles.adapt or roles.slice_us is not None
    if asked and process is not None and process.under_mps:
        raise _under_mps(process)
    if roles.adapt and process is None:
        _demand_one(host, device)
        raise _nobody(device)
    tuned = tuned_next_to(host, device, roles.target)
    by_tune = tuned is not None and tuned.way == SLICES
    if not asked and by_tune and process is not None and process.under_mps:
        note(f"tuned for time-slices, with {process.title} outside MPS; it runs under MPS, so this job gets a cap")
        return False
    if not (asked or outside or by_tune):
        return False
    reason = why_not(host, device, None if process is None else process.pid)
    if reason is None:
        return True
    if asked:
        raise reason
    then = "this job is paused while it works" if outside else "this job gets a cap"
    note(f"time-slices are not supported here: {reason.message}; {then}")
    return False


def _outside_mps(process: SparedProcess | None) -> InUse:
    title = process.title if process is not None else "production"
    return InUse(
        f"{title} runs outside MPS, where a cap does not protect it",
        "use a time-slice: --way slices; or start production without --slice",
        code="production_outside_mps",
    )


def _under_mps(process: SparedProcess) -> InUse:
    return InUse(
        f"{process.title} runs under MPS, where all clients share one time-slice",
        f"use caps: --way caps; or start it outside MPS: gpushare run --production {process.name or 'NAME'} --slice 16ms -- CMD",
        code="production_under_mps",
    )


def _grouped(
    host: Host,
    device: Device,
    command: Sequence[str],
    options: RunOptions,
    roles: Roles,
    process: SparedProcess | None,
) -> Any:
    """Run an opportunistic job in the MPS daemon whose server has one time-slice."""
    from gpushare.run.group import DEFAULT_US, Adapting, GroupShare
    from gpushare.run.production import ProductionJob
    from gpushare.run.results import SLICES
    from gpushare.run.roles import spare
    from gpushare.units import format_slice

    spared = spare(host, device, options.limits, roles.target, way=SLICES)
    tuned = spared.tuned
    slice_us = roles.slice_us or (None if tuned is None else tuned.other_slice_us) or DEFAULT_US
    title = "production" if process is None else process.title
    production, adapting = None, None
    if process is not None:
        production = ProductionJob(host, device, process.pid, process.started, process.name)
    if roles.adapt and process is not None:
        adapting = Adapting(roles.keep, _source(host, process))
    for text in spared.notes:
        note(text)
    how = (
        f"a time-slice of {format_slice(slice_us)}"
        if adapting is None
        else f"a time-slice by which {title} keeps {100 * roles.keep:g} % of its speed"
    )
    note(
        f"opportunistic next to {title}: all opportunistic jobs of {device.title} share {how}; {_words(spared.limits)}"
    )
    note("a GPU fault of one of them ends all of them, but not production, which runs outside MPS")
    share = GroupShare(
        host, device, spared.limits, slice_us=slice_us, production=production, title=title, adapt=adapting
    )
    return _carried_out(host, share, command, replace(options, limits=spared.limits))


def _source(host: Host, process: SparedProcess) -> Callable[[], PrintedRate | None]:
    """Return what finds out where production prints its speed, also after it was started again.

    Raises:
        NotFound: it is not known.
    """
    from gpushare.run.jobs import find_record, records

    def found() -> PrintedRate | None:
        if process.name is not None:
            record = find_record(host, process.name)
        else:
            record = next((one for one in records(host) if one.pid == process.pid), None)
        return None if record is None else record.rate

    if found() is None:
        name = process.name or "NAME"
        raise NotFound(
            f"the speed of {process.title} is not known, which --adapt needs",
            f"start it so: gpushare run --production {name} --slice 16ms --metric 'rate=([0-9.]+)' --log FILE -- CMD",
            code="no_progress",
        )
    return found


def _nobody(device: Device) -> NotFound:
    """Return the error if the production job to pause for does not run."""
    return NotFound(
        f"no production job runs on {device.title}",
        f"start it: gpushare run --production NAME -g {device.selector} -- CMD; or name a process: --for PID",
        code="no_production",
    )


def _demand_one(host: Host, device: Device) -> None:
    """Raise if several production jobs run, because the one to spare was not named."""
    from gpushare.run.roles import living_productions

    names = [one.name for one in living_productions(host, device)]
    if len(names) > 1:
        raise BadUsage(
            f"{len(names)} production jobs run on {device.title}: {', '.join(names)}",
            f"name the one to spare: --for {names[0]}",
            code="several_production",
        )


def _paused(
    host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles, process: SparedProcess
) -> Any:
    from gpushare.run.pause import checkpoint_of
    from gpushare.run.plain import PlainShare
    from gpushare.run.production import ProductionJob
    from gpushare.run.roles import NOT_PROTECTED, PausingShare
    from gpushare.run.share import MpsShare

    limits, mps = options.limits, process.under_mps
    checkpoint = None if mps else checkpoint_of(host)
    how = "by SIGSTOP" if mps else "by its GPU channels"
    if not roles.pause:
        note(f"process {process.pid} runs outside MPS: a cap cannot protect it, so this job is paused while it works")
    note(f"opportunistic next to {process.title}: paused {how} while it works; its memory stays on the GPU")
    recorder = None
    if mps:
        from gpushare.run.roles import spare

        recorder = _recorder(host, device)
        spared = spare(host, device, limits, roles.target)
        limits = spared.limits
        for text in (*spared.notes, f"when it runs: {_words(limits)}"):
            note(text)
    elif limits != type(limits)():
        note("there are no limits outside MPS: --threads, --memory and --priority are ignored")
    if mps:
        note(NOT_PROTECTED)
    production = ProductionJob(host, device, process.pid, process.started, process.name)
    share = PausingShare(
        MpsShare(host, device, limits) if mps else PlainShare(host, device),
        host,
        production,
        checkpoint,
        recorder,
        process.title,
        by_channels=not mps,
        say=note,
    )
    return _carried_out(host, share, command, replace(options, limits=limits), mps=mps)


def _yielding(
    host: Host,
    device: Device,
    command: Sequence[str],
    options: RunOptions,
    roles: Roles,
    process: SparedProcess | None,
) -> Any:
    """Run a job that is ended while production works, and started again when it rests."""
    from gpushare.run.plain import PlainShare
    from gpushare.run.production import ProductionJob
    from gpushare.run.roles import NOT_PROTECTED, spare
    from gpushare.run.share import MpsShare, check_program
    from gpushare.run.yielding import Yielding

    if process is None:
        _demand_one(host, device)
        raise _nobody(device)
    check_program(options.container or command[0])
    note(f"opportunistic next to {process.title}: ended while it works, and started again when it rests")
    limits = options.limits
    if process.under_mps:
        spared = spare(host, device, limits, roles.target)
        limits = spared.limits
        for text in (*spared.notes, f"when it runs: {_words(limits)}", NOT_PROTECTED):
            note(text)
        note("under MPS only work of production that uses the CPU is seen")
    elif limits != type(limits)():
        note("there are no limits outside MPS: --threads, --memory and --priority are ignored")

    def start(given: RunOptions) -> Any:
        share = MpsShare(host, device, limits) if process.under_mps else PlainShare(host, device)
        return _carried_out(host, share, command, given, mps=process.under_mps)

    options = replace(options, limits=limits)
    if settings.dry_run:
        return start(options)
    production = ProductionJob(host, device, process.pid, process.started, process.name)
    return Yielding(production=production, title=process.title, options=options, start=start, say=note).run()


def _recorder(host: Host, device: Device) -> ActivityRecorder | None:
    """Return what shows production's work under MPS; None, with a note, where only its CPU does."""
    from gpushare.host.activity import ActivityRecorder

    recorder = ActivityRecorder(host.nvml, device.gpu.index, None if device.mig is None else device.mig.gpu_instance_id)
    if recorder.gpm:
        return recorder
    note("under MPS this GPU shows only work that uses the CPU: this job is not paused for GPU work that needs no CPU")
    return None


def _capped(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    from gpushare.run.roles import NOT_PROTECTED, spare
    from gpushare.run.share import MpsShare

    spared = spare(host, device, options.limits, roles.target)
    limits = spared.limits
    for text in spared.notes:
        note(text)
    if not settings.dry_run:
        where = "" if spared.production is None else f" next to '{spared.production.name}'"
        note(f"opportunistic{where}: {_words(limits)}")
        note(NOT_PROTECTED)
    return _carried_out(host, MpsShare(host, device, limits), command, replace(options, limits=limits))


def _words(limits: Limits) -> str:
    """Return limits for people: ``cap 60 %, low priority, memory limit 96.0 GiB``."""
    from gpushare.units import format_bytes, format_percent

    words = ["no cap" if limits.threads_percent is None else f"cap {format_percent(limits.threads_percent)}"]
    words += ["low priority"] if limits.priority else []
    words += [] if limits.memory_limit_bytes is None else [f"memory limit {format_bytes(limits.memory_limit_bytes)}"]
    return ", ".join(words)


def farm_result(
    host: Host,
    device: Device,
    command: Sequence[str],
    run: RunOptions,
    farming: Farming,
    room: MemoryOptions | None = None,
) -> Any:
    """Run a farm and return its result; exit code 1 when a copy failed, 128 + N when signal N ended it."""
    from gpushare.hostfile.load import kept_limits
    from gpushare.mps.limits import check_memory
    from gpushare.run.farm import FarmOptions, farm, plan_farm, share_of_memory
    from gpushare.run.jobs import named_job
    from gpushare.show.run import CopyLines
    from gpushare.units import parse_seconds

    copies, limits = farming.copies or 1, run.limits
    stall_seconds = None if farming.stall is None else parse_seconds(farming.stall)
    if stall_seconds == 0:
        raise BadUsage("--stall 0 would end every copy at once", "give --stall 60s", code="bad_duration")
    at_once = _most_at_once(host, device, copies)
    # Shares are for the copies that run at the same time.
    together = copies if at_once is None else min(copies, at_once)
    threads = limits.threads_percent
    if threads is None:
        threads = _threads(host, device, command, farming, together)
    job_bytes = None if room is None else room.job_bytes
    check_memory(device, job_bytes, "--job-memory")
    user_limits, memory = kept_limits(host), limits.memory_limit_bytes
    if memory is None and job_bytes is None:
        memory = share_of_memory(host, device, together, user_limits)
    options = FarmOptions(
        copies=copies,
        limits=replace(limits, threads_percent=threads, memory_limit_bytes=memory),
        restarts=farming.restart,
        logs=None if farming.logs is None else Path(farming.logs),
        grace_seconds=run.grace_seconds,
        stall_seconds=stall_seconds,
        at_once=at_once,
        job_bytes=job_bytes,
        action="end" if room is None else room.action,
        user_limits=user_limits,
        name=run.name,
    )
    report = CopyLines(copies, output=settings.output, quiet=settings.quiet, note=note)
    if settings.dry_run:
        from gpushare.show.plan import plan_result

        return plan_result("run", plan_farm(host, device, command, options, report), dry_run=True)
    _say_first(host, device, options)
    try:
        with named_job(host, device, run.name):
            result = farm(host, device, command, options, report)
    finally:
        report.clear()
    return _finished(result, options)


def _threads(host: Host, device: Device, command: Sequence[str], farming: Farming, together: int) -> float | None:
    """Return the cap of each copy: the one that bench found for this command here, else its share; None: no cap."""
    from gpushare.measure.bench_data import best_caps, read_bench
    from gpushare.run.farm import share_of_threads
    from gpushare.run.results import find_benched
    from gpushare.units import format_copies

    copies = farming.copies or 1
    if farming.bench is None:
        found = find_benched(host, device, command, copies)
        if found is None:
            return share_of_threads(together)
        by = f"gpushare bench found the cap on {found.date}"
        driver = host.nvml.driver_version()
        note(by if found.driver == driver else f"{by} under driver {found.driver or 'unknown'}; measure again here")
    else:
        found = next((cap for cap in best_caps(read_bench(farming.bench)) if cap.copies == copies), None)
        if found is None:
            raise NotFound(
                f"{farming.bench} has no measurement of {format_copies(copies)} under MPS",
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
