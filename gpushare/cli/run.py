"""``gpushare run``: one job in a share of a GPU. Parses only; done by `gpushare/run/start.py`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, Final, cast, get_args

from gpushare.base.errors import BadUsage
from gpushare.base.units import format_slice, parse_seconds, parse_slice, quoted
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    CLIENT_THREADS,
    LOWER_IS_BETTER,
    OVER_ACTION,
    PRIORITY_OPTION,
    ChangingCommand,
    Refused,
    argument,
    flag,
    gpus_of,
    note,
    option,
    parse_percentage,
    positive_time,
    refuse,
    settings,
    verb,
)
from gpushare.host.host import Host
from gpushare.memory.limit import parse_budget
from gpushare.mps.limits import Limits
from gpushare.run.container import check_engine, check_not_foreign, is_foreign
from gpushare.run.detach import could_not_start, detach, not_started_error, printed_document
from gpushare.run.jobs import PrintedRate, check_job_name, output_path
from gpushare.run.numbers import check_pattern
from gpushare.run.program import QueueOptions, RunOptions
from gpushare.run.start import DETACHED, JobStart, Role, Yield
from gpushare.run.swapping import SwapWish
from gpushare.show.result import OutputFormat, Result
from gpushare.show.text import put
from gpushare.timeslice.rules import slice_of_weight_text
from gpushare.timeslice.slices import MOST_US, check_slice


@verb(ChangingCommand, takes_program=True)
def run(
    command: list[str] = argument("CMD...", "The program and its arguments.", default=...),
    gpu: str | None = option("-g --gpu", "SET", "Run on one GPU or instance of SET: 0-3, NAME, any."),
    gpus: int = option("--gpus", "N", "Run on N of them at the same time.", default=1, min=1),
    bind: bool = flag("--bind", "Run it on the CPUs next to its GPUs."),
    mig: str | None = option("--mig", "PROFILE|NAME", "Run in a free MIG instance of PROFILE, or in NAME."),
    create: bool = flag("--create", "Make the instance if none is free, and remove it afterwards (root)."),
    threads: str | None = CLIENT_THREADS,
    memory: str | None = option("--memory", "SIZE", "Device memory of the job, on each GPU: 20G, 80%."),
    over: str | None = OVER_ACTION,
    priority: str | None = PRIORITY_OPTION,
    slice_text: str | None = option("--slice", "TIME", "Run outside MPS with this time-slice: 16ms."),
    weight: str | None = option("--weight", "N", "Run outside MPS with N times the usual slice."),
    strict: bool = flag("--strict", "End the program if it runs on the GPU outside MPS."),
    container: str | None = option("--container", "ENGINE", "podman or docker; CMD is [OPTIONS] IMAGE [CMD]."),
    wait: bool = flag("--wait", "Wait in line until a GPU, or an instance, has room."),
    timeout: str | None = option("--timeout", "TIME", "Wait for at most this long: 30m, 2h."),
    run_time: str | None = option(
        "--time", "TIME", "End it after this time (8h); it may pass waiting jobs that this should not delay."
    ),
    restart_on: str | None = option("--restart-on", "WHAT", "mps-fault: start it again if its MPS server dies."),
    requeue: bool = flag("--requeue", "If it runs out of memory, wait again for a fifth more."),
    swap: str | None = option("--swap", "WHEN", "When it leaves the GPU: request, idle=10m, turns[=60s]."),
    movable: bool = flag("--movable", "Move it to another GPU to make room for others."),
    production: str | None = option("--production", "NAME", "Run as job NAME, to which opportunistic jobs yield."),
    metric: str | None = option("--metric", "REGEX", "Regex of the speed that production prints: 'rate=([0-9.]+)'."),
    lower: bool = LOWER_IS_BETTER,
    opportunistic: bool = flag("--opportunistic", "Run beside a production job and yield to it."),
    target: str | None = option("--for", "JOB", "The production job to yield to, by name or PID."),
    how: str | None = option(
        "--yield",
        "HOW",
        "How it yields: slices[=200us], caps[=60], swap; pause and requeue need a production job that runs. [default: slices if production runs outside MPS, else caps]",
    ),
    keep: str | None = option("--keep", "PCT", "Adapt the slice so that production keeps PCT of its speed: 97%."),
    name: str | None = option("--name", "NAME", "Name the job, for commands that take a JOB."),
    detach: bool = flag("-d --detach", "Run it in the background; print its name."),
    grace: str | None = option("--grace", "TIME", "Time that it gets to end after a signal. [default: 10s]"),
) -> Any:
    """Run a program inside a share of a GPU, and check that it runs there.

    The program runs under MPS, unless an option takes it outside; gpushare starts an MPS daemon if the GPU has none.
    Ctrl-C ends the program without harm to its neighbours. The exit code is the program's own, or 128 + N if signal N
    ended it. If gpushare ends the program or cannot start it, the exit code is gpushare's own (man gpushare).
    """
    if restart_on not in {None, "mps-fault"}:
        raise BadUsage(f"--restart-on {quoted(restart_on or '')} is not an event", "give mps-fault", code="bad_restart")
    # What does not go together.
    yields, yield_value = parse_yield(how)
    # A movable job is swapped on request, too.
    swaps = replace(parse_swap(swap or "request"), movable=movable) if swap or movable else None
    # --gpus 1 is as without it.
    given = settings.given - {"--gpus"} if gpus == 1 else settings.given
    refuse(REFUSED, {*given, f"--over:{over}", f"--priority:{priority}", *_words_of_values(yields, yield_value, swaps)})

    # The share of the GPU, and the name.
    limits = Limits.parse(threads, None, priority)
    if yields == "caps" and yield_value is not None:
        percent = parse_percentage("--yield caps", yield_value, example="--yield caps=60", code="bad_yield")
        limits = replace(limits, threads_percent=percent)
    given_slice = yield_value if yields == "slices" else slice_text
    slice_us = None if given_slice is None else slice_of(given_slice)
    if weight is not None:
        slice_us = slice_of_weight_text(weight)
    # In the gpushare of a detached job, which has this name. The program must not inherit the variable.
    detached_name = os.environ.pop(DETACHED, None)
    job_name = (detached_name or name) if production is None else production
    options = RunOptions(limits=limits, strict=strict, name=None if job_name is None else check_job_name(job_name))
    if grace is not None:
        options = replace(options, grace_seconds=parse_seconds(grace))

    # The role, and the line.
    host = settings.connect()
    if metric is not None:
        check_pattern("--metric", metric)
        # Opportunistic jobs find the speed of production in the output that is kept of it.
        options = replace(options, rate=PrintedRate(str(output_path(host, production or "")), metric, not lower))
    role = Role(
        production=production,
        opportunistic=opportunistic,
        target=target,
        yields=yields,
        slice_us=slice_us,
        keep=None if keep is None else _share_to_keep(keep),
    )
    budget = parse_budget(memory, over)
    leaves_for_production = yields == "swap"
    queue = QueueOptions(
        # Taking turns, and leaving for production, are ways of waiting.
        wait=wait or leaves_for_production or (swaps is not None and swaps.turns),
        seconds=None if timeout is None else parse_seconds(timeout),
        requeue=requeue,
        run_seconds=None if run_time is None else positive_time("--time", run_time, "2h"),
        swap=swaps,
        for_production=leaves_for_production,
    )

    if detach and detached_name is None and not settings.dry_run:
        return _start_detached(host, command[0], options.name)
    if container is not None:
        options = replace(options, container=_checked_engine(host, container, role))
    job_start = JobStart(
        host=host,
        gpus=gpus_of(host),
        command=command,
        role=role,
        budget=budget,
        queue=queue,
        dry_run=settings.dry_run,
        quiet=settings.quiet,
        say=note,
        count=gpus,
        bind=bind,
        creates=create,
        restart=restart_on is not None,
    )
    return job_start.run(gpu, mig, options)


@dataclass(frozen=True, kw_only=True)
class DetachedAnswer:
    """The answer of `run --detach`."""

    job: str
    pid: int
    # running, waiting or ended; null: none of these was seen in time.
    state: str | None
    exit_code: int | None
    # The path of the file with its output.
    output: str


def _start_detached(host: Host, program: str, name: str | None) -> Any:
    """Start the job in the background and return its name; if it cannot start, print its error, as without -d."""
    job = detach(host, settings.words, program, name)
    if could_not_start(host, job):
        is_cut = settings.output is OutputFormat.JSON and not printed_document(job).endswith("\n}\n")
        if is_cut or not job.printed:
            # Its output could not be kept, or not all of it: the disk is full.
            raise not_started_error(job)
        if settings.output in {OutputFormat.JSON, OutputFormat.YAML, OutputFormat.CSV}:
            put(sys.stdout, printed_document(job))
        else:
            put(sys.stderr, job.printed)
        return job.exit_code
    state_words = {
        "running": "is running",
        "waiting": "waits in line",
        "ended": f"has ended, exit code {job.exit_code}",
    }
    state = state_words.get(job.state or "", "has not started yet")
    end = "" if job.state == "ended" else f"; end it: gpushare stop {job.name}"
    return Result(
        data=DetachedAnswer(
            job=job.name, pid=job.supervisor.pid, state=job.state, exit_code=job.exit_code, output=str(job.output)
        ),
        text=f"{job.name}\n",
        notes=(*job.notes, f"{job.name} {state}; see its output: gpushare logs {job.name}{end}"),
    )


def _share_to_keep(text: str) -> float:
    """Return which part of its speed production keeps."""
    percent = parse_percentage("--keep", text, example="--keep 97%", code="bad_keep")
    if not 50 <= percent <= 99.5:
        raise BadUsage(f"--keep {text} is outside 50 to 99.5 %", "give one: --keep 97%", code="bad_keep")
    return percent / 100


def _checked_engine(host: Host, name: str, role: Any) -> str:
    """Return the engine of a container. Raises NotSupported if the role needs root with it; a note says what else does."""
    engine = check_engine(name)
    if role.yields == "pause":
        check_not_foreign(engine, host.uid, "a pause")
    if role.slice_us is not None:
        check_not_foreign(engine, host.uid, "the time-slice")
    if is_foreign(engine, host.uid):
        note("without root, a container of docker is ended by its client's signal, not by stop, drain and kill")
    return engine


REFUSED: Final = (
    Refused("--over", "--memory", "it says what happens above the limit", "--memory 20G --over warn -- CMD", needs=True),
    Refused("--timeout", "--wait --swap:turns --yield:swap", "only a job that waits gives up", "--wait --timeout 2h -- CMD", True),
    Refused("--requeue", "--wait", "it waits again for more memory", "--wait --requeue --memory 20G -- CMD", True),
    Refused("--for --yield --keep", "--opportunistic", "only an opportunistic job yields to another", "--opportunistic --for NAME -- CMD", True),
    Refused("--metric", "--production", "it finds the speed of production in its output", "--production NAME --metric 'rate=([0-9.]+)' -- CMD", True),
    Refused("--lower-is-better", "--metric", "it is about that number", "--production NAME --metric 'ms=([0-9.]+)' --lower-is-better -- CMD", True),
    Refused("--name", "--production", "--production already names the job", "--production NAME -- CMD"),
    Refused("--production", "--opportunistic", "a job has one role", "--production NAME -- CMD"),
    Refused("--priority:low", "--production", "opportunistic jobs yield to production", "--production NAME --priority normal -- CMD"),
    Refused("--mig", "--production --opportunistic", "a job with an instance of its own shares with nobody", "--mig 1g -- CMD"),
    Refused("--mig", "--slice --weight", "the job has that instance alone, with none to take turns with", "-g NAME --slice 2ms -- CMD"),
    Refused("--mig", "--swap --movable", "a checkpoint needs a GPU without MIG", "--swap request -- CMD"),
    Refused("--mig", "--requeue", "an instance does not grow", "--mig PROFILE --wait -- CMD"),
    Refused("--create", "--mig", "it makes the instance of that profile", "--mig 1g --create -- CMD", True),
    Refused("--gpus", "--mig", "a program uses one MIG instance", "--gpus 2 -g 0-3 -- CMD"),
    Refused("--gpus", "--threads --priority --strict", "an MPS daemon has one GPU", "--gpus 2 --memory 20G -- CMD"),
    Refused("--gpus", "--yield:slices --yield:caps --yield:swap --keep", "slices and caps are of one GPU", "--gpus 2 --opportunistic --yield pause -- CMD"),
    Refused("--gpus", "--swap --movable", "a job that is swapped or moved has one GPU", "--gpus 2 --wait --memory 20G -- CMD"),
    Refused("--gpus --bind", "--container", "a container gets one GPU, and its engine chooses the CPUs", "--container podman -- IMAGE CMD"),
    Refused("--time", "--swap --yield:swap --yield:requeue", "a job that leaves the GPU has no fixed end", "--wait --time 2h -- CMD"),
    Refused("--restart-on", "--gpus --swap --movable --slice --weight --yield:swap --yield:requeue", "it is for clients of MPS", "--restart-on mps-fault --threads 50 -- CMD"),
    Refused("--weight", "--slice", "a weight is a time-slice", "--weight 3 -- CMD"),
    Refused("--weight", "--production --opportunistic", "roles have time-slices of their own", "--weight 3 --name NAME -- CMD"),
    Refused("--slice --weight", "--threads --priority --strict", "time-slices are set outside MPS", "--slice 500us --memory 20G -- CMD"),
    Refused("--slice", "--opportunistic", "all opportunistic jobs of a GPU share one time-slice", "--opportunistic --yield slices=500us -- CMD"),
    Refused("--swap --movable", "--production --opportunistic", "production stays, and an opportunistic job leaves by --yield swap", "--opportunistic --yield swap -- CMD"),
    Refused("--swap --movable --yield:swap", "--threads --priority --strict", "a job that is swapped or moved runs outside MPS", "--swap request --memory 20G -- CMD"),
    Refused("--swap --movable", "--slice --weight", "a job that is swapped or moved gets a time-slice by gpushare timeslice set", "--swap request --name NAME -- CMD"),
    Refused("--swap:idle --swap:turns --yield:swap", "--over:pause", "a job that is stopped for its memory cannot leave the GPU", "--swap turns --memory 60G -- CMD"),
    Refused("--swap --movable --yield:swap", "--container", "a container cannot be swapped or moved", "--container podman -- IMAGE CMD"),
    Refused("--yield:caps=N", "--threads", "both cap the threads of the job", "--opportunistic --yield caps=60 -- CMD"),
    Refused("--keep", "--yield:caps --yield:pause --yield:swap --yield:requeue", "it adapts a time-slice", "--opportunistic --keep 97% -- CMD"),
)  # fmt: skip


def parse_yield(text: str | None) -> tuple[Yield | None, str | None]:
    """Return how a job yields, and the value of that, if any: ``slices=200us``, ``caps=60``, ``pause``."""
    if text is None:
        return None, None
    way, equals, value = text.strip().partition("=")
    has_good_value = way in {"slices", "caps"} and bool(value)
    if way not in get_args(Yield) or (equals and not has_good_value):
        raise BadUsage(
            f"--yield {quoted(text)} is not a way to yield",
            "give slices, slices=200us, caps, caps=60, pause, swap or requeue",
            code="bad_yield",
        )
    return cast("Yield", way), value or None


def parse_swap(text: str) -> SwapWish:
    """Return when a job is swapped: ``request``, ``idle=10m``, ``turns``, ``turns=60s``, or two with a comma."""
    wish = SwapWish()
    seen = set[str]()
    for word in text.split(","):
        when, equals, value = word.strip().partition("=")
        valid_forms = {"request": not equals, "idle": bool(value), "turns": bool(value) or not equals}
        if not valid_forms.get(when, False) or when in seen:
            raise BadUsage(
                f"--swap {quoted(text)} does not say when the job leaves the GPU",
                "give request, idle=10m, turns, turns=60s, or two of them: idle=10m,turns",
                code="bad_swap",
            )
        seen.add(when)
        seconds = parse_seconds(value) if value else None
        if seconds == 0:
            raise BadUsage(f"--swap {quoted(word)}: 0 is not a duration", f"give {when}=10m", code="bad_duration")
        if when == "idle":
            wish = replace(wish, idle_seconds=seconds)
        elif when == "turns":
            wish = replace(wish, turns=True, turn_seconds=seconds)
    return wish


def _words_of_values(yields: str | None, yield_value: str | None, swap: SwapWish | None) -> set[str]:
    """Return the values of --yield and --swap as `REFUSED` names them."""
    words = {f"--yield:{yields}"}
    if yields == "caps" and yield_value is not None:
        words.add("--yield:caps=N")
    if swap is not None and swap.idle_seconds is not None:
        words.add("--swap:idle")
    if swap is not None and swap.turns:
        words.add("--swap:turns")
    return words


def slice_of(text: str) -> int:
    """Return the time-slice of ``--slice`` in microseconds. Raises BadUsage."""
    slice_us = check_slice(parse_slice(text))
    if slice_us > MOST_US:
        raise BadUsage(
            f"a slice of {text.strip()} is above {format_slice(MOST_US)}: other programs would stall for up to that "
            "long per turn",
            "give 16ms; or set a longer one as root while it runs: gpushare timeslice set 50ms JOB",
            code="slice_too_long",
        )
    return slice_us
