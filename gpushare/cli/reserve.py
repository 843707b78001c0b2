"""``gpushare reserve``: a GPU for some hours; done by `gpushare/memory/leases.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from gpushare.base.errors import BadUsage, InUse, NoPermission, NotFound
from gpushare.base.model import GpuLease
from gpushare.base.selection import Device, select_for_change, titles
from gpushare.base.units import counted, duration_option, format_duration
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    WHOLE_GPU_OPTION,
    AskingCommand,
    Refused,
    ask_and_carry_out,
    flag,
    gpus_of,
    option,
    positive_time,
    refuse,
    settings,
    verb,
)
from gpushare.host.host import Host
from gpushare.hostfile.kept import kept_limits
from gpushare.memory.leases import end_lease, leases, reserved_words, take_lease
from gpushare.plan import Loss, Plan, Step
from gpushare.show.result import Result
from gpushare.show.status import lease_table


@dataclass(frozen=True, kw_only=True)
class LeasesAnswer:
    """The answer of `reserve` without --for or --end: the leases in force."""

    leases: tuple[GpuLease, ...]


_REFUSED: Final = (
    Refused("--gpu", "--for --end", "without them all leases are listed", "-g 0 --for 4h", needs=True),
    Refused("--for", "--end", "a lease begins or ends", "-g 0 --for 4h"),
)


@verb(AskingCommand)
def reserve(
    gpu: str | None = WHOLE_GPU_OPTION,
    time: str | None = option("--for", "TIME", "Reserve the GPU for this long: 4h, 90m."),
    end: bool = flag("--end", "End your leases on these GPUs; root ends any."),
) -> Any:
    """Reserve a GPU for some hours, end a lease, or list the leases.

    Jobs of other users (`gpushare run`) do not start on a GPU that you have reserved; with --wait they wait for the end
    of the lease. Programs that already run there stay, and programs that are started without gpushare are not kept
    away. A lease is at most 12 hours long, renewals included; root may set a lower limit in gpushare.yaml (reserve:
    {longest: 4h}). Only root may take a longer lease. All leases end with a reboot.
    """
    refuse(_REFUSED)
    host = settings.connect()
    if time is None and not end:
        in_force = tuple(leases(host, kept_limits(host)).values())
        return Result(data=LeasesAnswer(leases=in_force), tables=(lease_table(in_force, gpus_of(host)),))
    devices = select_for_change(gpu, gpus_of(host))
    for device in devices:
        if device.mig is not None:
            raise BadUsage(
                f"{device.title} is an instance, and a whole GPU is reserved",
                f"name the GPU: -g {device.gpu.index}; an instance is granted: gpushare mig grant NAME USER",
                code="whole_gpu",
            )
    if time is None:
        return ask_and_carry_out(_plan_end(host, devices), replan=lambda: _plan_end(host, devices))
    seconds = positive_time("--for", time, "4h")
    return ask_and_carry_out(_plan_lease(host, devices, seconds), replan=lambda: _plan_lease(host, devices, seconds))


def _check_length(device: Device, seconds: float, held: float, most: float) -> None:
    """Raise NoPermission if a lease is longer than root allows.

    ``held`` are the seconds since its start, ``most`` those that root allows from start to end (0: no leases).
    """
    # The undo of a shorter lease is in whole minutes, rounded up.
    if held + seconds > most + 60:
        raise NoPermission(
            f"the lease of {device.title} would be {format_duration(held + seconds)} long, and the longest here is {format_duration(most)}",
            "give less with --for, or ask root: reserve in gpushare.yaml",
            code="lease_too_long",
        )


def _plan_lease(host: Host, devices: Sequence[Device], seconds: float) -> Plan:
    """Return the plan that reserves devices for some seconds, or extends this user's leases."""
    limits = kept_limits(host)
    lease_by_gpu = leases(host, limits)
    steps: list[Step] = []
    notes: list[str] = []
    for device in devices:
        lease = lease_by_gpu.get(device.uuid)
        if lease is not None and lease.uid != host.uid:
            raise InUse(
                f"{device.title} {reserved_words(lease)}",
                "see all leases: gpushare reserve",
                gpu=str(device.gpu.index),
                code="reserved",
            )
        # On a simulated host, too, only the leases of the real root may be longer.
        if host.uid:
            _check_length(device, seconds, lease.held_seconds if lease else 0.0, limits.longest_lease_seconds)
        programs = [process for process in device.gpu.processes or () if process.compute]
        if programs:
            notes.append(f"{device.title} already has {counted(len(programs), 'program')}; see whose: gpushare status")
        revert = partial(end_lease, host, device.uuid, limits)
        if lease is not None:
            revert = partial(take_lease, host, device.uuid, lease.seconds_left, limits)
        steps.append(
            Step(
                what=f"reserve {device.title} for {format_duration(seconds)}",
                command=f"gpushare reserve -g {device.selector} --for {duration_option(seconds)}",
                undo=_undo_command([device], lease_by_gpu),
                do=partial(take_lease, host, device.uuid, seconds, limits),
                revert=revert,
            )
        )
    names = ", ".join(device.title for device in devices)
    return Plan(
        title=f"{names} {'is' if len(devices) == 1 else 'are'} reserved for {format_duration(seconds)}",
        steps=tuple(steps),
        undo=_undo_command(devices, lease_by_gpu),
        notes=tuple(notes),
    )


def _undo_command(devices: Sequence[Device], held: Mapping[str, GpuLease]) -> str:
    """Return the commands that give these GPUs their present leases again (``held``, by UUID), or end them."""
    free = [device.selector for device in devices if device.uuid not in held]
    commands = [f"gpushare reserve -g {','.join(free)} --end"] if free else []
    for device in devices:
        if device.uuid in held:
            # Whole minutes are easier to type, and a lease that is a little longer does no harm.
            minutes = math.ceil(held[device.uuid].seconds_left / 60)
            commands.append(f"gpushare reserve -g {device.selector} --for {duration_option(60 * minutes)}")
    return "; ".join(commands)


def _plan_end(host: Host, devices: Sequence[Device]) -> Plan:
    """Return the plan that ends the leases that devices have; root is asked before it ends those of others."""
    limits = kept_limits(host)
    lease_by_gpu = leases(host, limits)
    reserved = [device for device in devices if device.uuid in lease_by_gpu]
    if not reserved:
        raise NotFound(f"not reserved: {titles(devices)}", "see all leases: gpushare reserve", code="no_lease")
    steps: list[Step] = []
    losses: list[Loss] = []
    undo: list[str] = []
    for device in reserved:
        lease = lease_by_gpu[device.uuid]
        # Root could not give another user the lease back.
        undo_command = _undo_command([device], lease_by_gpu) if lease.uid == host.uid else None
        if undo_command is None:
            if not host.root:
                raise NoPermission(f"{device.title} {reserved_words(lease)}", "ask its user, or root", code="reserved")
            remaining = f"{format_duration(lease.seconds_left)} left"
            losses.append(Loss(action="ends", what=f"the lease of {lease.user} on {device.title}", why=(remaining,)))
        else:
            undo.append(undo_command)
        steps.append(
            Step(
                what=f"end the lease of {lease.user} on {device.title}",
                command=f"gpushare reserve -g {device.selector} --end",
                undo=undo_command,
                do=partial(end_lease, host, device.uuid, limits),
            )
        )
    return Plan(
        title=f"{', '.join(device.title for device in reserved)}: not reserved",
        steps=tuple(steps),
        undo="; ".join(undo) or None,
        consent=tuple(losses),
    )
