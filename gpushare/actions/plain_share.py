"""A GPU without MPS as what programs run in: the driver gives each its time slice. For jobs that are paused, and measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpushare.actions.attachment import spacing
from gpushare.actions.mig_share import instance_environment, pipe_directory
from gpushare.actions.share import INSTANCE, held
from gpushare.errors import GpushareError
from gpushare.host.host import make_private_directory

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


@dataclass
class PlainShare:
    """A device outside MPS: `Share` without a daemon and without a lease, for any number of programs."""

    host: Host
    device: Device

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return what the guard is told: nothing but the programs is to be given back."""
        return (INSTANCE, *held(None), *held(None))

    @property
    def meter(self) -> None:
        """Return None: contexts outside MPS end without harm to others."""
        return

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program that joins no MPS daemon; see `instance_environment`.

        Raises:
            NoPermission: the directory without a daemon cannot be made.
        """
        make_private_directory(pipe_directory(self.host, self.device))
        return instance_environment(base, self.host, self.device)

    def watch(self, pid: int) -> PlainWatch:
        """Return the watch over a program."""
        return PlainWatch(self.host, self.device, pid)

    def close(self, *, program_lives: bool = False) -> bool:  # noqa: ARG002 - as `Share` has it
        """Return that nobody else uses it: there is nothing to give back."""
        return False


@dataclass
class PlainWatch:
    """The proof that a program runs on its GPU: NVML lists its processes there."""

    host: Host
    device: Device
    program_pid: int
    started: float = field(default_factory=time.monotonic)
    attached: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    daemon_gone: bool = False

    def wait(self) -> float:
        """Return how many seconds may pass until the next look."""
        return 5.0 if self.attached else spacing(time.monotonic() - self.started)

    def look(self) -> None:
        """Look for the program's processes on the GPU."""
        if self.host.processes.namespace_is_host() is False:
            # NVML's PIDs are not those that we know.
            return
        try:
            found = self.host.nvml.processes(self.device.gpu.index) or ()
        except GpushareError:
            return
        tree = set(self.host.processes.descendants(self.program_pid))
        self.attached |= {one.pid for one in found if one.compute and one.pid in tree}

    def settle(self) -> None:
        """Do nothing: NVML remembers no process that has ended."""

    def clients(self) -> set[int]:
        """Return nobody: outside MPS the end of one breaks no other."""
        return set()
