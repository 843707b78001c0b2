"""``gpushare timeslice``: the time-slice level; done by `gpushare/timeslice/`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpushare.cli.options import ChangingCommand, Command, GpuOption, Group, gpus_of, settings
from gpushare.cli.timeslice_keep import keep
from gpushare.errors import GpushareError

group = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Time-slice level: how long a program runs before the GPU switches to the next one.",
)


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(group, name="timeslice", cls=Group, short_help="Show and set the time-slice level.")
    group.command("show", cls=Command, short_help="Show the level of each GPU.")(show)
    group.command("set", cls=ChangingCommand, short_help="Set the level.")(set_level)
    group.command("reset", cls=ChangingCommand, short_help="Restore the default level.")(reset)
    group.command("keep", cls=ChangingCommand, short_help="Follow the rules of gpushare.yaml for single processes.")(
        keep
    )


def show(gpu: GpuOption = None) -> Any:
    """Show the time-slice level and the compute mode of each GPU.

    NVIDIA does not publish the levels in milliseconds, so none are shown. Others measured waits of about 1 ms
    (RTX 3070) and up to 2.3 ms (RTX 4090) at level default. On an H200 at level default, a small training loop next
    to a saturating job kept 0.51 of its rate, and the other job 0.79.
    """
    from gpushare.selection import select
    from gpushare.show.result import Column, Result, Table
    from gpushare.show.status import gpu_errors, silent_word

    host = settings.connect()
    try:
        pending = host.policy.start()
    except GpushareError:
        # Without a driver there is no nvidia-smi either, and NVML says the reason.
        gpus_of(host)
        raise
    gpus = gpus_of(host)
    devices = select(gpu, gpus)
    from gpushare.host.smi import policies_of

    levels = policies_of(pending.result())
    rows = [
        {
            "gpu": device.gpu.index,
            "name": device.gpu.name,
            "time_slice": levels.get(device.gpu.index),
            "compute_mode": device.gpu.compute_mode,
            "supported": None if device.gpu.error else device.gpu.index in levels,
            "uuid": device.gpu.uuid,
        }
        for device in devices
    ]
    columns = (
        Column(key="gpu", title="GPU", right=True),
        Column(key="name", title="name", rank=2),
        Column(key="time_slice", title="time-slice"),
        Column(key="compute_mode", title="compute mode", rank=1),
        Column(key="uuid", title="UUID", whole=True, rank=3),
    )
    shown = [
        {**row, "time_slice": silent_word(device.gpu.error)} if device.gpu.error is not None else row
        for row, device in zip(rows, devices, strict=True)
    ]
    errors = gpu_errors(device.gpu for device in devices)
    return Result(
        command="timeslice show",
        data={"gpus": rows},
        tables=(Table(name="gpus", columns=columns, rows=tuple(shown), empty="this host has no GPU"),),
        csv=Table(name="gpus", columns=columns, rows=tuple(rows)),
        notes=_notes(rows),
        errors=errors,
        exit_code=1 if errors else 0,
    )


def _notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    from gpushare.model import ComputeMode

    notes = []
    without = [str(row["gpu"]) for row in rows if row["supported"] is False]
    if without:
        notes.append(f"the driver lists no time-slice for GPU {', '.join(without)}")
    alone = [str(row["gpu"]) for row in rows if row["compute_mode"] not in {None, ComputeMode.DEFAULT}]
    if alone:
        notes.append(
            f"GPU {', '.join(alone)} is not time-sliced in its compute mode; `gpushare timeslice set` sets mode default first"
        )
    return tuple(notes)


def set_level(
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="default, short, medium or long (or 0 to 3).")],
    gpu: GpuOption = None,
    beside_mps: Annotated[
        bool, typer.Option("--beside-mps", help="Set it even if an MPS daemon of gpushare serves the GPU.")
    ] = False,
) -> Any:
    """Set the time-slice level, and compute mode default if another mode is in the way. Needs root.

    The level and the mode are read back. Both are lost at a reboot. Running programs may keep the old level, and
    NVIDIA does not publish the levels in milliseconds: measure your own program.
    """
    from gpushare.cli.options import carried_out
    from gpushare.selection import select_for_change
    from gpushare.timeslice.policy import level_of, plan_level

    wanted = level_of(level)
    host = settings.connect()
    devices = select_for_change(gpu, gpus_of(host))
    return carried_out("timeslice set", plan_level(host, devices, wanted, beside_mps=beside_mps))


def reset(gpu: GpuOption = None) -> Any:
    """Restore level default, and the compute mode from before `timeslice set`. Needs root."""
    from gpushare.cli.options import carried_out
    from gpushare.selection import select_for_change
    from gpushare.timeslice.policy import plan_reset

    host = settings.connect()
    devices = select_for_change(gpu, gpus_of(host))
    return carried_out("timeslice reset", plan_reset(host, devices))
