"""``gpushare mps``: the verbs that change daemons. Looking at them is in `mps_views`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli import mps_views
from gpushare.cli.common import GPU_HELP, ChangingCommand, Command, Group, confirm, gpus_of, settings
from gpushare.cli.limits import Limits
from gpushare.cli.mps_stopping import sentence, stop_one, stopping
from gpushare.errors import BadUsage, GpushareError

if TYPE_CHECKING:
    from gpushare.actions.plan import Plan

group = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="MPS: programs of one user run on the GPU at the same time, with thread and memory limits.",
)

Gpu = Annotated[str | None, typer.Option("-g", "--gpu", metavar="GPU", help=GPU_HELP)]
Threads = Annotated[
    str | None,
    typer.Option(
        "--threads", metavar="PCT", help="Active thread percentage per client, above 0 up to 100; per GPU: 0=25,1=50."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Pinned memory limit per client process: 4G, 1500M; per GPU: 0=4G,1=8G."
    ),
]
NewMemory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Pinned memory limit per client process: 4G, 1500M; per GPU: 0=4G,1=8G; none removes it.",
    ),
]
Level = Annotated[str | None, typer.Option("--priority", metavar="LEVEL", help="Client priority: normal or low.")]
Pipe = Annotated[
    str | None,
    typer.Option(
        "--pipe-directory", metavar="DIR", help="A daemon that gpushare did not start, by its CUDA_MPS_PIPE_DIRECTORY."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(group, name="mps", cls=Group, short_help="Start, limit, watch and stop MPS daemons.")
    group.command("start", cls=ChangingCommand, short_help="Start a daemon per GPU, with limits.")(start)
    group.command("stop", cls=ChangingCommand, short_help="Stop a daemon, and prove that it is gone.")(stop)
    group.command("status", cls=Command, short_help="Show daemons, servers and clients.")(mps_views.status)
    group.command("set", cls=ChangingCommand, short_help="Change the limits of future clients.")(set_limits)
    group.command("kill", cls=ChangingCommand, short_help="End one client, its neighbours unharmed.")(kill)
    group.command("logs", cls=Command, short_help="Show the logs of a daemon.")(mps_views.logs)
    group.command("env", cls=Command, short_help="Print what a shell needs to join.")(mps_views.env)


def start(
    gpu: Gpu = None,
    threads: Threads = None,
    memory: Memory = None,
    priority: Level = None,
    exclusive: Annotated[
        bool,
        typer.Option(
            "--exclusive",
            help="Compute mode exclusive-process, so that nothing runs beside MPS (root; restored by stop).",
        ),
    ] = False,
) -> Any:
    """Start a private MPS daemon per GPU or MIG instance, set its limits, and read each one back.

    The limits hold for each client process, not for a job: two processes under 4G can use 8G. A thread
    percentage caps the SMs that a client may use; it reserves nothing.
    """
    from gpushare.actions.mps_start import plan_start
    from gpushare.cli.changes import carried_out, one_plan
    from gpushare.host.mps_home import home_of
    from gpushare.selection import select_for_change

    wanted = Limits(threads, memory, priority)
    host = settings.connect()
    gpus = gpus_of(host)
    devices = select_for_change(gpu, gpus)
    limits = wanted.for_devices(devices)

    def plan() -> Plan:
        return one_plan([plan_start(host, device, limits[device.uuid], exclusive=exclusive) for device in devices])

    # Once before the locks, which need directories: a start that is refused leaves nothing behind.
    homes = [home_of(host.run_directory, one.uuid) for one in devices]
    return carried_out("mps start", plan(), homes=homes, again=plan)


def set_limits(gpu: Gpu = None, threads: Threads = None, memory: NewMemory = None, priority: Level = None) -> Any:
    """Change the limits of a running daemon, for clients that start from now on, and read each one back.

    A running client keeps what it started with: the driver accepts a new percentage for its server
    and changes nothing for it.
    """
    from gpushare.actions.mps_device import own_daemon
    from gpushare.actions.mps_limits import plan_set
    from gpushare.cli.changes import carried_out, one_plan
    from gpushare.selection import select_for_change

    if threads is None and memory is None and priority is None:
        raise BadUsage("nothing to set", "give --threads, --memory or --priority", code="nothing_to_set")
    wanted = Limits(threads, memory, priority, removable=True)
    host = settings.connect()
    devices = select_for_change(gpu, gpus_of(host))
    limits = wanted.for_devices(devices)

    def plan() -> Plan:
        return one_plan([plan_set(host, device, limits[device.uuid]) for device in devices])

    homes = [own_daemon(host, device, to_change=True)[0] for device in devices]
    return carried_out("mps set", plan(), homes=homes, again=plan)


def stop(
    gpu: Gpu = None,
    pipe_directory: Pipe = None,
    drain: Annotated[
        str | None,
        typer.Option(
            "--drain",
            metavar="SECS",
            help="Wait this long for the clients, then force. [default: wait 10 s, then refuse]",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Do not wait, and end also a daemon that does not answer.")
    ] = False,
) -> Any:
    """Stop the MPS daemon: wait for its clients, then force (with --drain or --force), then prove that it is gone.

    Forcing takes the clients' GPU contexts away: they fail. A daemon that gpushare did not start is
    stopped only by its pipe directory and --yes.
    """
    from gpushare.host.leftovers import sweep
    from gpushare.show.result import Result
    from gpushare.units import parse_seconds

    seconds = 0.0 if force and drain is None else parse_seconds(drain) if drain is not None else 10.0
    host = settings.connect()
    if not settings.dry_run:
        sweep(host)
    rows, errors = [], []
    for found, device in stopping(host, gpu, pipe_directory):
        try:
            rows.append(stop_one(host, found, device, seconds=seconds, force=force or drain is not None))
        except GpushareError as error:
            # One that is in use must not keep the others from being stopped, nor hide that they were.
            errors.append(error)
    if errors and not rows and len(errors) == 1:
        raise errors[0]
    return Result(
        command="mps stop",
        data={"dry_run": settings.dry_run, "stopped": rows},
        text="\n".join(map(sentence, rows)),
        errors=tuple(errors),
        exit_code=errors[0].exit_code if errors else 0,
    )


def kill(
    pid: Annotated[
        int, typer.Argument(metavar="PID", help="The client's process id, as `gpushare mps status` shows it.")
    ],
    drain: Annotated[
        str | None,
        typer.Option("--drain", metavar="SECS", help="The longest wait for the GPU to drain its queue. [default: 5]"),
    ] = None,
    terminate: Annotated[
        bool,
        typer.Option(
            "--terminate", help="Only take an idle client's GPU work away (terminate_client); its process lives on."
        ),
    ] = False,
) -> Any:
    """End one MPS client without breaking its neighbours: SIGSTOP, wait until the GPU has drained, SIGKILL.

    The documented order (terminate_client, then kill) broke a busy neighbour in 13 of 17 tries on our
    H200, a plain SIGKILL in 6 of 9; this order in none.
    """
    from gpushare.actions import mps_kill
    from gpushare.actions.safe_end import DRAIN_BOUND_SECONDS
    from gpushare.show.plan import plan_result
    from gpushare.show.result import Result
    from gpushare.units import parse_seconds

    bound = DRAIN_BOUND_SECONDS if drain is None else parse_seconds(drain)
    host = settings.connect()
    gpus = gpus_of(host)
    client = mps_kill.find_client(host, gpus, pid)
    if settings.dry_run:
        planned = mps_kill.plan_terminate(client) if terminate else mps_kill.plan_kill(client)
        return plan_result("mps kill", planned.steps, dry_run=True)
    confirm_other_user(host.uid, client.client.user, pid)
    done = (
        mps_kill.terminate(host, client, gpus) if terminate else mps_kill.kill(host, client, gpus, bound_seconds=bound)
    )
    return Result(command="mps kill", data=done, text=killed_sentence(done))


def confirm_other_user(uid: int, user: str | None, pid: int) -> None:
    """Ask before another user's client is ended: root may, and may not have meant to."""
    import pwd

    try:
        own = pwd.getpwuid(uid).pw_name
    except KeyError:
        own = str(uid)
    if user is not None and user != own:
        confirm(f"Process {pid} belongs to {user}. End it?")


def killed_sentence(done: Any) -> str:
    """Return what became of a client, in one line."""
    if done.drain is None:
        return f"client {done.pid} is terminated on the GPU; its process lives on and should be ended soon"
    how = {
        "idle": "the GPU was seen idle",
        "fall": "the GPU's activity was seen to fall",
        "bound": "its neighbours hide the end of its queue, so the whole bound was waited",
    }[done.drain.by]
    server = f"; MPS server {done.server_pid} is {done.server_status}" if done.server_status else ""
    return f"client {done.pid} is gone: stopped, drained for {done.drain.seconds:.2f} s ({how}), killed{server}"
