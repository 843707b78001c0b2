"""Set the limits of a daemon and its servers; each is read back, and all are undone together."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpushare.base.errors import GpushareError, NoPermission
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.host.identity import start_of
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import changed_by_hand, is_same_process, own_daemon
from gpushare.mps.home import AttachedClient, DaemonHome, DaemonRecord
from gpushare.mps.limits import Limits, check_memory, in_force_title
from gpushare.plan import Plan, Step


def plan_limits(host: Host, device: Device, limits: Limits) -> Plan:
    """Return the plan that changes the limits of a running daemon of gpushare, for clients that start from now on.

    Without steps if the daemon and its servers hold them already.

    Raises:
        NotFound: there is none on this device.
        NoPermission: it belongs to another user.
        BadUsage: the memory limit is above the device's memory.
    """
    check_memory(device, limits.memory_limit_bytes)
    home, record = own_daemon(host, device, to_change=True)
    new = record.limits.changed_by(limits)
    title = in_force_title(device, new)
    if limits == Limits():
        # Limits per GPU may leave one out.
        return Plan(title=title, steps=())
    control = MpsControl(host.programs, str(home.pipe))
    servers = {server: control.threads(server) for server in control.servers()}
    if new.explicit == record.limits.explicit and control.holds(limits, list(servers)):
        return Plan(title=title, steps=())
    steps = control.limit_steps(limits)
    for server in servers:
        steps += control.limit_steps(limits, server)
    steps = _with_joint_undo(control, record.limits.explicit, servers, steps)
    clients = _AttachedClients(host, control, home, record)
    write = f"write {shlex.quote(str(home.directory / 'daemon.json'))}"
    if servers:
        # First: whoever attaches later gets the new limits.
        steps.insert(
            0,
            Step(
                what="record the limits that running clients keep",
                command=write,
                do=lambda: home.write(replace(record, attached=clients.before_change(servers))),
                revert=lambda: home.write(record),
            ),
        )
    steps.append(
        Step(
            what="record the new limits",
            command=write,
            do=lambda: home.write(replace(record, limits=new, attached=clients.after_change())),
            revert=lambda: home.write(record),
        )
    )
    back = record.limits.undo_of(limits)
    notes = []
    if servers:
        notes.append("running clients keep the limits that they started with; restart them to apply the new ones")
    return Plan(
        title=title,
        steps=tuple(steps),
        undo=shlex.join(["gpushare", "mps", "set", "-g", device.selector, *back.options()]),
        notes=tuple(notes),
    )


class _AttachedClients:
    """The clients that are attached while the limits change, each with the limits of its server when it attached."""

    def __init__(self, host: Host, control: MpsControl, home: DaemonHome, record: DaemonRecord) -> None:
        self._host, self._control, self._record = host, control, record
        # Else it was found without a record (`home.ADOPTED`), and its limits are unknown.
        self._recorded = home.read() is not None
        self._seen: dict[int, AttachedClient] = {}

    def before_change(self, servers: Mapping[int, float | None]) -> tuple[AttachedClient, ...]:
        """Return the clients that are attached; ``servers`` are the percentages of their servers now.

        One that attached before an earlier change has the limits that were recorded then.
        """
        earlier = {client.pid: client for client in self._record.attached}
        for client in self._control.clients():
            attached = earlier.get(client.pid)
            if attached is None or not is_same_process(self._host, attached):
                threads = servers.get(client.server_pid or 0)
                has_recorded = self._recorded and threads is not None and not changed_by_hand(self._record, threads)
                attached = self._as_attached(client.pid, self._record.limits.explicit if has_recorded else None)
            self._seen[client.pid] = attached
        return tuple(self._seen.values())

    def after_change(self) -> tuple[AttachedClient, ...]:
        """Return these and those that attached during the change: they may have the old or the new limits."""
        with contextlib.suppress(GpushareError):
            # Only a server has clients.
            if self._seen or self._control.servers():
                for client in self._control.clients():
                    self._seen.setdefault(client.pid, self._as_attached(client.pid, None))
        return tuple(self._seen.values())

    def _as_attached(self, pid: int, limits: Limits | None) -> AttachedClient:
        """Return a client with the limits of its server when it attached; None: unknown."""
        return AttachedClient(pid=pid, started=start_of(self._host.processes.identity(pid)), limits=limits)


def _with_joint_undo(
    control: MpsControl, before: Limits, servers: Mapping[int, float | None], steps: Sequence[Step]
) -> list[Step]:
    """Return the steps; undone, the first of them restores all of the old limits (``before``, with every default spelled out).

    ``servers`` are the percentages of the servers, which each gets back; its memory limit goes back to the daemon's, which it
    started with.
    """

    def restore_limits() -> None:
        """Set the old limits of the daemon and of the servers that still run."""
        # A daemon of another user, which refuses this, has not taken the new limits either.
        with contextlib.suppress(NoPermission):
            for step in control.limit_steps(before):
                step.do()
            for server in set(control.servers()) & servers.keys():
                for step in control.limit_steps(replace(before, threads_percent=servers[server] or 100.0), server):
                    step.do()

    return [replace(steps[0], revert=restore_limits), *steps[1:]]
