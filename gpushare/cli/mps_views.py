"""``gpushare mps status``, ``logs`` and ``env``: looking at daemons, and joining them from a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import GPU_HELP, gpus_of, settings
from gpushare.errors import NotFound, OperationFailed

if TYPE_CHECKING:
    from pathlib import Path

Gpu = Annotated[str | None, typer.Option("-g", "--gpu", metavar="GPU", help=GPU_HELP)]


def status(gpu: Gpu = None) -> Any:
    """Show every MPS daemon of the host, ours or not, with limits, servers and clients."""
    from dataclasses import replace

    from gpushare.cli.status import of_gpus
    from gpushare.host.snapshot import Observer
    from gpushare.show.result import jsonable
    from gpushare.show.status import status_result

    snapshot = Observer(settings.connect(), strangers=settings.verbose).look()
    # A daemon whose GPUs cannot be told is shown for any of them.
    chosen = of_gpus(snapshot, gpu)
    hidden = tuple(daemon for daemon in snapshot.daemons if not daemon.gpu_indexes and daemon not in chosen.daemons)
    result = status_result(replace(chosen, daemons=chosen.daemons + hidden))
    tables = tuple(table for table in result.tables if table.name.startswith("mps"))
    # A change names its GPU where there are several.
    name = " -g 0" if len(snapshot.gpus) > 1 else ""
    return replace(
        result,
        command="mps status",
        data=jsonable({"mps_daemons": chosen.daemons + hidden}),
        tables=tables,
        text=None if tables else f"no MPS daemon runs on this host; start one: gpushare mps start{name}",
        csv=None,
    )


def logs(
    gpu: Gpu = None,
    lines: Annotated[int, typer.Option("--lines", metavar="N", help="The last N lines of each log.", min=1)] = 40,
    server: Annotated[bool, typer.Option("--server", help="Only the server's log.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Only the control daemon's log.")] = False,
) -> Any:
    """Show the last lines of a daemon's control.log and server.log."""
    from gpushare.host.mps_home import home_of
    from gpushare.selection import select_one
    from gpushare.show.result import Result

    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    homes = [home_of(directory, device.uuid) for directory in (host.run_directory, *host.shared_run_directories)]
    home = next((home for home in homes if (home.log / "control.log").exists()), None)
    if home is None:
        raise NotFound(
            f"no MPS daemon of gpushare has written a log for {device.title}",
            f"start one: gpushare mps start -g {device.selector}",
            gpu=str(device.gpu.index),
            code="no_log",
        )
    names = [name for name, only in (("control.log", server), ("server.log", control)) if not only or server == control]
    found = {name: tail(home.log / name, lines) for name in names}
    text = "\n\n".join(f"==> {home.log / name} <==\n" + "\n".join(found[name]) for name in names)
    return Result(command="mps logs", data={"log_directory": str(home.log), "lines": found}, text=text)


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file; none when it does not exist.

    Raises:
        OperationFailed: it may not be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 300 * lines - 4096))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OperationFailed(
            f"cannot read {path}: {error.strerror}", f"look as its owner: sudo tail {shlex.quote(str(path))}"
        ) from None


def env(
    gpu: Gpu = None,
    threads: Annotated[
        str | None, typer.Option("--threads", metavar="PCT", help="A thread percentage for the programs of this shell.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="A memory limit for each program of this shell.")
    ] = None,
    priority: Annotated[str | None, typer.Option("--priority", metavar="LEVEL", help="normal or low.")] = None,
) -> Any:
    """Print the export lines that make a shell's programs clients of the daemon: eval "$(gpushare mps env)".

    A program that runs so is not watched: `gpushare run` also proves that it is attached.
    """
    from gpushare.actions.mps_device import own_daemon
    from gpushare.actions.mps_limits import MpsLimits, check_memory
    from gpushare.actions.run_environment import client_environment
    from gpushare.cli.limits import priority_of
    from gpushare.selection import select_one
    from gpushare.show.result import Result
    from gpushare.units import parse_memory_limit, parse_thread_percentage

    limits = MpsLimits(
        threads_percent=None if threads is None else parse_thread_percentage(threads),
        memory_limit_bytes=None if memory is None else parse_memory_limit(memory),
        priority=priority_of(priority),
    )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    check_memory(device, limits.memory_limit_bytes)
    home, _ = own_daemon(host, device)
    environment = client_environment({}, device, home, limits)
    text = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    return Result(command="mps env", data={"environment": environment}, text=text)
