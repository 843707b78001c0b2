"""Set the limits of a daemon and its servers; each is read back, and all are undone together."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import NoPermission
from gpushare.model import Priority
from gpushare.mps.control import (
    MpsControl,
    control_command,
    set_memory_command,
    set_priority_command,
    set_threads_command,
)
from gpushare.mps.daemons import own_daemon
from gpushare.mps.limits import Limits, check_memory
from gpushare.plan import Plan, Step
from gpushare.units import format_bytes

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


def limit_steps(control: MpsControl, limits: Limits, server: int | None = None) -> list[Step]:
    """Return the steps that set the daemon's defaults, or the limits of one server for its future clients.

    None has an undo of its own: undoing a start ends the daemon, and `plan_limits` undoes all of them together.
    """
    whom = "each client process" if server is None else f"each future client of server {server}"
    threads, memory, priority = limits.threads_percent, limits.memory_limit_bytes, limits.priority
    found = []
    if threads is not None:
        what = f"limit {whom} to {threads:g} % of the SM threads"
        found.append((what, set_threads_command(threads, server), lambda: control.set_threads(threads, server)))
    if memory is not None or limits.no_memory_limit:
        what = (
            f"remove the pinned memory limit of {whom}"
            if memory is None
            else f"limit {whom} to {format_bytes(memory)} of pinned device memory"
        )
        found.append((what, set_memory_command(memory, server), lambda: control.set_memory(memory, server)))
    if priority is not None and server is None:
        what = f"give {whom} {priority.title} priority"
        found.append((what, set_priority_command(priority), lambda: control.set_priority(priority)))
    return [
        Step(what=what, command=control_command(control.pipe_directory, command), do=do) for what, command, do in found
    ]


def plan_limits(host: Host, device: Device, limits: Limits) -> Plan:
    """Return the plan that changes the limits of a running daemon of ours, for clients that start from now on.

    Raises:
        NotFound: there is none on this device.
        NoPermission: it belongs to another user.
        BadUsage: the memory limit is above the device's memory.
    """
    check_memory(device, limits.memory_limit_bytes)
    home, record = own_daemon(host, device, to_change=True)
    title = f"limits of MPS on {device.title}"
    if limits == Limits():
        # Limits per GPU may leave one out.
        return Plan(title=title, steps=())
    control = MpsControl(host.programs, str(home.pipe))
    servers = {server: control.threads(server) for server in control.servers()}
    steps = limit_steps(control, limits)
    for server in servers:
        steps += limit_steps(control, limits, server)
    changed = replace(record, limits=record.limits.changed_by(limits))
    steps.append(
        Step(
            what="record the new limits",
            command=f"write {shlex.quote(str(home.directory / 'daemon.json'))}",
            do=lambda: home.write(changed),
            revert=lambda: home.write(record),
        )
    )
    back = record.limits.back_from(limits)
    return Plan(
        title=title,
        steps=tuple(_with_way_back(control, record.limits.explicit, servers, steps)),
        undo=shlex.join(["gpushare", "mps", "set", "-g", device.selector, *back.options()]),
        notes=("running clients keep the limits that they started with; restart them to apply the new ones",),
    )


def _with_way_back(
    control: MpsControl, before: Limits, servers: Mapping[int, float | None], steps: Sequence[Step]
) -> list[Step]:
    """Let the first step restore all of the old limits when a later one fails.

    A server keeps its own percentage; its memory limit goes back to the daemon's, which it started with.
    """
    refused: list[NoPermission] = []

    def begin() -> None:
        try:
            steps[0].do()
        except NoPermission as error:
            refused.append(error)
            raise

    def back() -> None:
        if refused:
            # Another user's daemon took nothing, and would refuse to take anything back.
            return
        control.set_threads(before.threads_percent or 100.0)
        control.set_memory(before.memory_limit_bytes)
        control.set_priority(before.priority or Priority.NORMAL)
        for server in set(control.servers()) & servers.keys():
            control.set_threads(servers[server] or 100.0, server)
            control.set_memory(before.memory_limit_bytes, server)

    return [replace(steps[0], do=begin, revert=back), *steps[1:]]
