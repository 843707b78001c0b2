"""``run --bind``: a job runs on the CPUs that are next to its GPUs, and takes its memory there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpushare.base.errors import NotSupported
from gpushare.base.selection import Device, titles
from gpushare.base.units import ranges
from gpushare.host.host import Host
from gpushare.part import Part, Watch


@dataclass
class CpuBinding(Part):
    """The CPUs of a job (sched_setaffinity): those next to any of its GPUs, as far as this process may use them.

    Its memory follows: Linux gives a process memory of the NUMA node on which it first uses it.
    """

    host: Host
    devices: Sequence[Device]
    _cpus: frozenset[int] = field(default=frozenset())

    def check(self) -> None:
        """Find the CPUs.

        Raises:
            NotSupported: the driver does not name them, or this process may use none of them (code ``cpus_unknown``).
        """
        near = [self.host.nvml.cpus(device.gpu.index) for device in self.devices]
        self._cpus = frozenset(cpu for cpus in near if cpus is not None for cpu in cpus) & os.sched_getaffinity(0)
        if None in near or not self._cpus:
            reason = (
                "the driver does not say which CPUs are"
                if None in near
                else "this process may not use the CPUs that are"
            )
            raise NotSupported(
                f"{reason} next to {titles(self.devices)}",
                "run it without --bind; see: nvidia-smi topo -m",
                code="cpus_unknown",
            )

    @property
    def where(self) -> str:
        """Return what it adds to the place of the program."""
        return f", on CPUs {ranges(self._cpus)}" if self._cpus else ""

    def enter(self, pid: int) -> None:
        """Bind the new process before it runs the program: all that it starts inherits it."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, self._cpus)

    def started(self, watch: Watch) -> None:
        """Read back where the program may run."""
        with contextlib.suppress(OSError):
            if not os.sched_getaffinity(watch.program_pid) <= self._cpus:
                watch.troubles.append(f"the program does not run on CPUs {ranges(self._cpus)}")
