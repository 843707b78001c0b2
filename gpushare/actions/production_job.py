"""The production job beside which a program is paused: a process, or whoever bears its name now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.actions.production_activity import Activity
from gpushare.host.production import find_production, lives

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


class ProductionJob:
    """A production job by PID and start time; with a name also those that follow it under this name.

    ``always``: it counts as active as long as it lives. In the short stops of a duty cycle nobody can see more than its CPU.
    """

    def __init__(
        self,
        host: Host,
        device: Device,
        pid: int,
        started_at: float | None,
        name: str | None = None,
        *,
        always: bool = False,
    ) -> None:
        self._host, self._device, self._name, self._always = host, device, name, always
        self._is(pid, started_at)

    def _is(self, pid: int, started_at: float | None) -> None:
        self.pid, self._started_at = pid, started_at
        self._activity = Activity(self._host, self._device, pid)

    def active(self) -> bool:
        """Return whether it works now; see `Activity`."""
        return self._always or self._activity.active()

    def lives(self) -> bool:
        """Return whether it runs. One that has ended may have been started again under its name: then it is that one."""
        here = self._host.processes.alive(self.pid, self._started_at)
        return here or (self._name is not None and self._follow(self._name))

    def _follow(self, name: str) -> bool:
        found = find_production(self._host, name)
        if found is None or found.device_uuid != self._device.uuid or not lives(self._host, found):
            return False
        self._is(found.pid, found.started_at)
        return True
