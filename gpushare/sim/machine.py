"""The machine of a simulated host: what stands in for ``/dev/shm``, limits, environments and the kernel's log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from gpushare.sim.settled import current
from gpushare.sim.state import StateFile

if TYPE_CHECKING:
    from gpushare.host.machine import Space, Xid


class SimulatedMachine:
    """Stands in for `LocalMachine`."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def shared_memory(self) -> Space | None:
        """Return its shared memory, of which nothing is used."""
        from gpushare.host.machine import Space

        size = current(self._state_file).shared_memory_bytes
        return Space(size, size)

    def descriptor_limit(self, pid: int) -> int | None:
        """Return the limit, the same for all of its processes."""
        return current(self._state_file).descriptor_limit if pid else None

    def environments(self, names: Collection[str]) -> Mapping[int, Mapping[str, str]]:
        """Return these variables of its processes, to root of all, to others of their own."""
        state = current(self._state_file)
        return {
            process.pid: chosen
            for process in state.processes
            if state.uid in {0, process.uid}
            and (chosen := {name: value for name, value in process.environment.items() if name in names})
        }

    def xids(self) -> tuple[Xid, ...] | None:
        """Return the Xids that `gpushare sim fault xid` set; only root reads the log."""
        from gpushare.host.machine import Xid

        state = current(self._state_file)
        if state.uid != 0:
            return None
        return tuple(Xid(number, gpu.pci_bus_id[4:-2]) for gpu in state.gpus for number in gpu.xids)
