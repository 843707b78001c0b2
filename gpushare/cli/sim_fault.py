"""``gpushare sim fault`` and ``sim cdi``: what a simulated host has wrong with it, and what is installed there."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpushare.cli.common import Command, settings
from gpushare.errors import BadUsage

Gpu = Annotated[str | None, typer.Option("-g", "--gpu", metavar="GPU", help="GPU index or UUID.")]


def add(group: typer.Typer) -> None:
    """Add the commands."""
    group.command("fault", cls=Command, short_help="Make something fail.")(fault)
    group.command("cdi", cls=Command, short_help="Install the container toolkit.")(cdi)


def spec_of(given: str | None) -> str:
    """Return the simulated host that is meant.

    Raises:
        BadUsage: none is named.
    """
    spec = given or settings.spec
    if not spec.startswith("sim:"):
        what = f"'{given[:60]}' is no simulated host" if given else "no simulated host is named"
        hint = "name one: --host sim:h200, or export GPUSHARE_HOST=sim:h200; used ones: gpushare sim list"
        raise BadUsage(what, hint, code="no_sim_host")
    return spec


def fault(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="What fails.", show_default=False)] = None,
    value: Annotated[str | None, typer.Argument(metavar="[VALUE]", show_default=False)] = None,
    gpu: Gpu = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take every fault back.")] = False,
) -> Any:
    """Make something fail on a simulated host.

    Of a GPU: lost, busy, persistence-off, not-supported FIELD, refused FIELD, reset-required (a MIG mode change stays pending), xid N. Of
    the host: no-driver, no-nvml, no-permission, blind (another PID namespace), hang PROGRAM, missing PROGRAM, user UID,
    driver VERSION, mps-version N, mismatch (library and kernel module differ), shm BYTES, descriptors N, collide N (the next N conversations with an MPS daemon are dropped), fail-step N (the N-th changing
    NVML call from now on fails), crash-step N (the program dies right after the N-th changing NVML call).
    """
    from gpushare.show.result import Result
    from gpushare.sim import admin
    from gpushare.sim.faults import KINDS

    spec = spec_of(None)
    if clear == (kind is not None):
        raise BadUsage("give one fault, or --clear", f"faults: {', '.join(KINDS)}", code="bad_fault")
    if kind is None:
        admin.clear_faults(spec)
        return Result(command="sim fault", data={"cleared": True}, text=f"{spec}: no faults")
    # So that the host is there before its first command.
    settings.connect()
    admin.set_fault(spec, kind, gpu, value)
    said = " ".join(filter(None, [kind, value]))
    text = f"{spec}: {said}" if gpu is None else f"{spec}, GPU {gpu}: {said}"
    return Result(command="sim fault", data={"fault": kind, "value": value, "gpu": gpu}, text=text)


def cdi() -> Any:
    """Install the NVIDIA Container Toolkit on a simulated host: nvidia-ctk, and a CDI specification of its GPUs."""
    from gpushare.show.result import Result
    from gpushare.sim import nvidia_ctk, open_simulated

    host = open_simulated(spec_of(None))
    path = nvidia_ctk.install(host.state_file)
    file = str(host.state_file.directory / path.lstrip("/"))
    return Result(command="sim cdi", data={"path": path, "file": file}, text=f"{path} is {file}")
