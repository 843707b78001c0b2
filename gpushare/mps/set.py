"""Set the limits of a running daemon and its servers; each is read back, and all are undone together."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import NoPermission
from gpushare.model import Priority
from gpushare.mps import control as mps_control
from gpushare.mps.control import MpsControl, control_command
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import DaemonHome, DaemonRecord
from gpushare.mps.limits import Limits, check_memory
from gpushare.plan import Plan, Step
from gpushare.units import format_bytes, mps_memory, mps_percentage

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


def limit_steps(host: Host, home: DaemonHome, limits: Limits) -> list[Step]:
    """Return the steps that set the daemon's defaults; each reads back what the daemon holds."""
    control = MpsControl(host.programs, str(home.pipe))
    steps = []
    if limits.threads_percent is not None:
        threads = limits.threads_percent
        steps.append(
            _control_step(
                home,
                f"limit clients to {threads:g} % of the SM threads",
                f"set_default_active_thread_percentage {mps_percentage(threads)}",
                lambda: control.set_default_threads(threads),
            )
        )
    if limits.memory_limit_bytes is not None:
        memory = limits.memory_limit_bytes
        steps.append(
            _control_step(
                home,
                f"limit each client process to {format_bytes(memory)} of pinned device memory",
                f"set_default_device_pinned_mem_limit {mps_control.DEVICE} {mps_memory(memory)}",
                lambda: control.set_default_memory(memory),
            )
        )
    if limits.no_memory_limit:
        steps.append(
            _control_step(
                home,
                "remove the limit of pinned device memory",
                f"set_default_device_pinned_mem_limit {mps_control.DEVICE} 0G",
                control.clear_default_memory,
            )
        )
    if limits.priority is not None:
        priority = limits.priority
        steps.append(
            _control_step(
                home,
                f"give clients {priority.title} priority",
                f"set_default_client_priority {int(priority)}",
                lambda: control.set_default_priority(priority),
            )
        )
    return steps


def _control_step(home: DaemonHome, what: str, command: str, do: Callable[[], None]) -> Step:
    # No undo of its own: undoing the start takes the daemon and all that it holds away.
    return Step(what=what, command=control_command(home.pipe, command), do=do)


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
    steps = limit_steps(host, home, limits)
    servers = {server: control.server_threads(server) for server in control.servers()}
    for server in servers:
        steps += _server_steps(control, home, server, limits)
    merged = replace(record, limits=record.limits.changed_by(limits))
    path = shlex.quote(str(home.directory / "daemon.json"))
    steps.append(
        Step(
            what="note the new limits",
            command=f"write {path}",
            do=lambda: home.write(merged),
            revert=lambda: home.write(record),
        )
    )
    back = record.limits.back_from(limits)
    return Plan(
        title=title,
        steps=tuple(_with_way_back(control, record, servers, steps)),
        undo=shlex.join(["gpushare", "mps", "set", "-g", device.selector, *back.options()]),
        notes=("running clients keep the limits that they started with; start them again to apply the new ones",),
    )


def _with_way_back(
    control: MpsControl, record: DaemonRecord, servers: Mapping[int, float | None], steps: Sequence[Step]
) -> list[Step]:
    """Let the first step restore all of the old defaults when a later one fails.

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
        before = record.limits.explicit
        control.set_default_threads(before.threads_percent or 100.0)
        if before.memory_limit_bytes is None:
            control.clear_default_memory()
        else:
            control.set_default_memory(before.memory_limit_bytes)
        control.set_default_priority(before.priority or Priority.NORMAL)
        for server in set(control.servers()) & servers.keys():
            control.set_server_threads(server, servers[server] or 100.0)
            if before.memory_limit_bytes is None:
                control.clear_server_memory(server)
            else:
                control.set_server_memory(server, before.memory_limit_bytes)

    return [replace(steps[0], do=begin, revert=back), *steps[1:]]


def _server_steps(control: MpsControl, home: DaemonHome, server: int, limits: Limits) -> list[Step]:
    steps = []
    if limits.threads_percent is not None:
        threads = limits.threads_percent
        steps.append(
            _control_step(
                home,
                f"limit future clients of server {server} to {threads:g} % of the SM threads",
                f"set_active_thread_percentage {server} {mps_percentage(threads)}",
                lambda: control.set_server_threads(server, threads),
            )
        )
    if limits.memory_limit_bytes is not None:
        memory = limits.memory_limit_bytes
        steps.append(
            _control_step(
                home,
                f"limit future clients of server {server} to {format_bytes(memory)}",
                f"set_device_pinned_mem_limit {server} {mps_control.DEVICE} {mps_memory(memory)}",
                lambda: control.set_server_memory(server, memory),
            )
        )
    if limits.no_memory_limit:
        steps.append(
            _control_step(
                home,
                f"remove the memory limit of future clients of server {server}",
                f"set_device_pinned_mem_limit {server} {mps_control.DEVICE} 0G",
                lambda: control.clear_server_memory(server),
            )
        )
    return steps
