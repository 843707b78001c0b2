"""``gpushare mps``: MPS daemons, limits and clients; done by `gpushare/mps/`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, NotFound, OperationFailed
from gpushare.base.model import ComputeMode, MpsDaemon
from gpushare.base.selection import Device, select_for_change, select_one
from gpushare.base.units import counted, first_few, parse_seconds, quoted
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    CLIENT_THREADS,
    GPU_OPTION,
    GROUP,
    PRIORITY_OPTION,
    AskingCommand,
    ChangingCommand,
    Command,
    Refused,
    ask_and_carry_out,
    consented,
    flag,
    gpus_of,
    note,
    option,
    refuse,
    settings,
)
from gpushare.host.capabilities import user_id, user_name
from gpushare.host.host import Host
from gpushare.host.records import read_tail_or_raise
from gpushare.mps.control import without_own_questions
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import DaemonHome, client_environment, home_of, own_home
from gpushare.mps.limits import LimitOptions, Limits, check_memory
from gpushare.mps.set import plan_limits
from gpushare.mps.start import plan_start
from gpushare.mps.stop import Stop, daemons_to_stop
from gpushare.plan import Plan, one_plan
from gpushare.run.jobs import forget_ended, job_names
from gpushare.run.look import only_gpus
from gpushare.show.plan import PlanAnswer, plan_result, with_answer
from gpushare.show.result import Result
from gpushare.show.status import daemon_table, status_result
from gpushare.show.text import complete_commands
from gpushare.snapshot import Observer


@dataclass(frozen=True, kw_only=True)
class MpsStatusAnswer:
    """The answer of `mps status`."""

    mps_daemons: tuple[MpsDaemon, ...]


def status(gpu: str | None = GPU_OPTION) -> Any:
    """Show all MPS daemons of the host, those of others included, with limits, servers and clients."""
    snapshot = Observer(settings.connect(), strangers=settings.verbose).read()
    chosen = only_gpus(snapshot, gpu)
    # A daemon with unknown GPUs may serve each of them.
    others = [each for each in snapshot.daemons if not each.gpu_indexes and each not in chosen.daemons]
    shown = replace(chosen, daemons=(*chosen.daemons, *others))
    result = status_result(shown)
    tables = tuple(table for table in result.tables if table.name.startswith("mps"))
    where = "this host" if gpu is None else "these GPUs"
    gpu_option = f" -g {chosen.gpus[0].index}" if chosen.gpus else ""
    none = f"no MPS daemon runs on {where}; start one: gpushare mps start{gpu_option}"
    return replace(
        result,
        command="mps status",
        data=MpsStatusAnswer(mps_daemons=shown.daemons),
        tables=tables,
        text=None if tables else complete_commands(none),
        csv=daemon_table(shown),
    )


@dataclass(frozen=True, kw_only=True)
class MpsLogsAnswer:
    """The answer of `mps logs`."""

    log_directory: str
    # The lines of each log, by the name of the log.
    lines: Mapping[str, Sequence[str]]


def logs(
    gpu: str | None = GPU_OPTION,
    lines: int = option("--lines", "N", "The last N lines of each log.", default=40, min=1),
) -> Any:
    """Show the last lines of a daemon's control.log and server.log.

    Each query of gpushare, such as those of `gpushare status -w`, adds lines to the daemon's log. They are left out,
    unless -v is given.
    """
    host = settings.connect()
    home = _home_with_logs(host, select_one(gpu, gpus_of(host)))
    texts = {name: last_lines(home.log / name, lines) for name in ("control.log", "server.log")}
    if not settings.verbose:
        # Most of the log may be queries of gpushare: the last lines without them are further up.
        texts["control.log"] = without_own_questions(last_lines(home.log / "control.log", _MOST_LINES))[-lines:]
    text = "\n\n".join(f"==> {home.log / name} <==\n" + "\n".join(texts[name]) for name in texts)
    return Result(data=MpsLogsAnswer(log_directory=str(home.log), lines=texts), text=text)


def _home_with_logs(host: Host, device: Device) -> DaemonHome:
    """Return the home of a device's MPS daemon that has logs, and that nobody else may have written."""
    homes = [home_of(directory, device.uuid) for directory in host.run_directories]
    # Directories that others may write come last.
    written = [home for home in homes if (home.log / "control.log").exists()]
    home = min(written, key=lambda each: not each.is_trusted(), default=None)
    if home is None:
        raise NotFound(
            f"no MPS daemon of gpushare has written a log for {device.title}",
            f"start one: gpushare mps start -g {device.selector}",
            gpu=device.gpu.index,
            code="no_log",
        )
    if not home.is_trusted():
        raise NoPermission(
            f"other users may have written the logs in {home.directory}: they can write there or in a directory above",
            f"see the permissions: ls -ld {shlex.join(str(path) for path in (home.directory, *home.directory.parents[:2]))}",
            gpu=device.gpu.index,
            code="directory_open",
        )
    return home


# What is read of a log at most, in bytes and in lines of usual length; and what a long line takes.
_MOST_OF_A_LOG: Final = 16 << 20
_MOST_LINES: Final = _MOST_OF_A_LOG // 100
_LONG_LINE_BYTES: Final = 300


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a log; none if there is no such file. Raises OperationFailed: it cannot be read."""
    try:
        # A page more: a few lines may be longer than that.
        size = min(_LONG_LINE_BYTES * lines + 4096, _MOST_OF_A_LOG)
        return read_tail_or_raise(path, size).splitlines()[-lines:]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        name = shlex.quote(str(path))
        problem = f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        raise OperationFailed(problem, f"look at it: ls -l {name}; sudo tail {name}") from None


@dataclass(frozen=True, kw_only=True)
class MpsEnvAnswer:
    """The answer of `mps env`."""

    environment: Mapping[str, str]


def env(
    gpu: str | None = GPU_OPTION,
    threads: str | None = CLIENT_THREADS,
    memory: str | None = option("--memory", "SIZE", "Device memory that each process may allocate: 4G, 1500M."),
    priority: str | None = PRIORITY_OPTION,
) -> Any:
    """Print the export lines that make a shell's programs clients of the daemon: eval "$(gpushare mps env)".

    gpushare does not watch these programs; `gpushare run` also checks that its program is attached.
    """
    limits = Limits.parse(threads, memory, priority)
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    check_memory(device, limits.memory_limit_bytes)
    home, _ = own_daemon(host, device)
    environment = client_environment({}, device, home, limits)
    text = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    return Result(data=MpsEnvAnswer(environment=environment), text=text)


@dataclass(frozen=True, kw_only=True)
class StoppedDaemon:
    """One MPS daemon that is stopped, or would be."""

    pid: int | None
    gpu: int | None
    pipe_directory: str | None
    # The plain command that stops it.
    command: str | None
    # Whether its clients were ended; null in a dry run.
    forced: bool | None = None
    # The compute mode that is restored.
    compute_mode: str | None


@dataclass(frozen=True, kw_only=True)
class MpsStopAnswer(PlanAnswer):
    """The answer of `mps stop`."""

    stopped: tuple[StoppedDaemon, ...]


def stopped_row(stop: Stop, *, dry_run: bool) -> StoppedDaemon:
    daemon, record = stop.found.daemon, stop.found.record
    mode = None if record is None else record.previous_compute_mode
    return StoppedDaemon(
        pid=daemon.pid,
        gpu=daemon.gpu_index,
        pipe_directory=daemon.pipe_directory,
        command=stop.command,
        forced=None if dry_run else stop.forced,
        compute_mode=None if mode is None else ComputeMode[mode].title,
    )


def _wait_reporter() -> Callable[[list[int], float], None]:
    """Return a function that reports the clients a stop waits for, each set of them once."""
    reported: set[tuple[int, ...]] = set()

    def report(pids: list[int], seconds: float) -> None:
        if tuple(pids) not in reported:
            reported.add(tuple(pids))
            note(f"waiting up to {seconds:.0f} s for {counted(len(pids), 'client')}: {first_few(pids)}")

    return report


def stopped_sentence(row: StoppedDaemon) -> str:
    """Return what has become of a daemon, in a sentence."""
    where = f" of GPU {row.gpu}" if row.gpu is not None else f" at {row.pipe_directory}"
    if row.pid is None:
        text = f"removed the files of a dead MPS daemon{where}"
    else:
        text = f"MPS daemon{where} is gone (process {row.pid}{', forced' if row.forced else ''})"
    return text + (f"; compute mode {row.compute_mode} restored" if row.compute_mode else "")


app = typer.Typer(
    **GROUP, help="MPS: programs of one user run on the GPU at the same time, with thread and memory limits."
)

THREADS: Final = option("--threads", "PCT", "Active thread percentage per client, 0.1 to 100; per GPU: 0=25,1=50.")


def start(
    gpu: str | None = GPU_OPTION,
    threads: str | None = THREADS,
    memory: str | None = option(
        "--memory", "SIZE", "Device memory limit per client process: 4G, 1500M; per GPU: 0=4G,1=8G."
    ),
    priority: str | None = PRIORITY_OPTION,
    exclusive: bool = flag(
        "--exclusive", "Set compute mode exclusive-process: no program runs outside MPS (root; restored by stop)."
    ),
    users: str | None = option(
        "--users",
        "all|USER,...",
        "Let these users run on it at the same time, in one server that runs as root (needs root and driver 580 or later).",
    ),
) -> Any:
    """Start a private MPS daemon per GPU or MIG instance, set its limits, and read each one back.

    Limits apply to each client process, not to a job: two processes with 4G can use 8G. A thread percentage
    caps the SMs that a client may use; it reserves none.
    """
    wanted = LimitOptions(threads, memory, priority)
    allowed = None if users is None else _parse_users(users)
    host = settings.connect()
    devices = select_for_change(gpu, gpus_of(host))
    limits = wanted.for_devices(devices)

    def plan() -> Plan:
        return one_plan(
            [plan_start(host, device, limits[device.uuid], exclusive=exclusive, users=allowed) for device in devices]
        )

    # Once before the locks, which need directories: a refused start must leave nothing behind.
    homes = [own_home(host, device.uuid) for device in devices]
    return ask_and_carry_out(plan(), homes=homes, replan=plan)


def _parse_users(text: str) -> tuple[str, ...]:
    """Return the users of --users by name; none for all. Raises NotFound: there is no such user."""
    if text.strip().lower() == "all":
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise BadUsage(
            f"--users {quoted(text)} is not a list of users", "give all, or names: --users alice,bob", code="bad_user"
        )
    return tuple(dict.fromkeys(user_name(user_id(word)) for word in words))


def set_limits(
    gpu: str | None = GPU_OPTION,
    threads: str | None = THREADS,
    memory: str | None = option(
        "--memory", "SIZE", "Device memory limit per client process: 4G, 1500M; per GPU: 0=4G,1=8G; none removes it."
    ),
    priority: str | None = PRIORITY_OPTION,
) -> Any:
    """Change the limits of a running daemon, for clients that start from now on, and read each one back.

    A running client keeps the limits that it started with, even where the driver accepts new ones for its server.
    """
    if threads is None and memory is None and priority is None:
        raise BadUsage("nothing to set", "give --threads, --memory or --priority", code="nothing_to_set")
    wanted = LimitOptions(threads, memory, priority, removable=True)
    host = settings.connect()
    devices = select_for_change(gpu, gpus_of(host))
    limits = wanted.for_devices(devices)

    def plan() -> Plan:
        return one_plan([plan_limits(host, device, limits[device.uuid]) for device in devices])

    homes = [own_daemon(host, device, to_change=True)[0] for device in devices]
    return ask_and_carry_out(plan(), homes=homes, replan=plan)


# How long the clients may take before a stop without --drain and --force is refused.
_USUAL_DRAIN_SECONDS: Final = 10.0


def stop(
    gpu: str | None = GPU_OPTION,
    pipe_directory: str | None = option(
        "--pipe-directory", "DIR", "A daemon that gpushare did not start, by its CUDA_MPS_PIPE_DIRECTORY."
    ),
    drain: str | None = option(
        "--drain", "TIME", "Wait this long for the clients, then force. [default: wait 10 s, then refuse]"
    ),
    force: bool = flag("--force", "Do not wait, and end even a daemon that does not answer."),
) -> Any:
    """Stop the MPS daemon: wait for its clients, force it if asked (--drain, --force), and check that it is gone.

    When forced, clients lose their GPU contexts and fail. Use --pipe-directory to name a daemon that
    gpushare did not start. gpushare asks before it takes the GPU from clients, or stops a daemon that it did not start.
    """
    refuse((Refused("--drain", "--force", "it does not wait", "-g 0 --drain 60s"),))
    drain_seconds = _USUAL_DRAIN_SECONDS if drain is None else parse_seconds(drain)
    if force:
        drain_seconds = 0.0
    host = settings.connect()
    if not settings.dry_run:
        # The question names jobs by their PIDs: that of one that has ended may be another program's.
        forget_ended(host)
    forces = force or drain is not None
    stops = [
        Stop(host, entry, device, drain_seconds=drain_seconds, force=forces, on_wait=_wait_reporter())
        for entry, device in daemons_to_stop(host, gpus_of(host), gpu, pipe_directory)
    ]
    # To find them takes time, and with -y nobody is asked.
    losses = [] if settings.yes else [loss for each in stops for loss in each.losses(partial(job_names, host))]
    plan = Plan(
        title="MPS daemons are stopped",
        steps=tuple(step for each in stops for step in each.steps),
        undo="; ".join(each.undo for each in stops if each.undo is not None) or None,
        consent=tuple(losses),
    )
    if settings.dry_run:
        stopped = tuple(stopped_row(each, dry_run=True) for each in stops)
        return with_answer(plan_result(plan, dry_run=True), MpsStopAnswer, stopped=stopped)
    consented(plan)
    rows: list[StoppedDaemon] = []
    errors: list[GpushareError] = []
    done: list[tuple[str, str | None]] = []
    # One deadline for all daemons: their clients end at the same time.
    deadline = time.monotonic() + drain_seconds
    for each in stops:
        each.drain_seconds = max(0.0, deadline - time.monotonic())
        try:
            each.run()
            row = stopped_row(each, dry_run=False)
            rows.append(row)
            done.append((stopped_sentence(row), each.undo))
        except GpushareError as error:
            # A daemon that is in use must not keep the others from being stopped.
            errors.append(error)
    if len(errors) == 1 and not rows:
        raise errors[0]
    return Result(
        data=MpsStopAnswer(
            dry_run=False,
            steps=(),
            consent=(),
            stopped=tuple(rows),
            undo="; ".join(undo for _, undo in done if undo) or None,
        ),
        done=tuple(done),
        errors=tuple(errors),
        all_failed=not rows,
    )


app.command(cls=ChangingCommand, short_help="Start a daemon per GPU, with limits.")(start)
app.command(cls=AskingCommand, short_help="Stop a daemon, and check that it is gone.")(stop)
app.command(cls=Command, short_help="Show daemons, servers and clients.")(status)
app.command("set", cls=ChangingCommand, short_help="Change the limits of future clients.")(set_limits)
app.command(cls=Command, short_help="Show the logs of a daemon.")(logs)
app.command(cls=Command, short_help="Print the environment of a client.")(env)
