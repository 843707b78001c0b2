"""A GPU or MIG instance without MPS as what programs run in: the driver gives each its time slice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpushare.actions.attachment import spacing
from gpushare.actions.share import INSTANCE, claimed, held
from gpushare.errors import GpushareError
from gpushare.host.host import make_private_directory
from gpushare.host.mig_processes import processes_in
from gpushare.model import device_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpushare.host.claims import HeldClaim
    from gpushare.host.host import Host
    from gpushare.model import GpuProcess
    from gpushare.selection import Device

_MPS: Final = "CUDA_MPS_"


@dataclass
class PlainShare:
    """A device outside MPS: `Share` without a daemon. With a claim it is an instance for one program; else for any number."""

    host: Host
    device: Device
    claim: HeldClaim | None = None

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return what the guard is told."""
        return (INSTANCE, *held(None), *claimed(self.claim))

    @property
    def meter(self) -> None:
        """Return None: contexts outside MPS end without harm to others."""
        return

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the program; see `plain_environment`.

        Raises:
            NoPermission: the directory without a daemon cannot be made.
        """
        make_private_directory(pipe_directory(self.host, self.device))
        return plain_environment(base, self.host, self.device)

    def watch(self, pid: int) -> PlainWatch:
        """Return the watch over a program."""
        return PlainWatch(self.host, self.device, pid)

    def close(self, *, program_lives: bool = False) -> bool:
        """Give an instance that was taken back; return False: there is no daemon that somebody else could still use."""
        claim, self.claim = self.claim, None
        if claim is not None and not program_lives:
            # Else it is the guard's now, as long as the program lives.
            claim.release()
        return False


def pipe_directory(host: Host, device: Device) -> Path:
    """Return a private directory in which no MPS daemon listens."""
    return host.run_directory / "mig" / device_key(device.uuid)


def plain_environment(base: Mapping[str, str], host: Host, device: Device) -> dict[str, str]:
    """Return the environment of a program that runs on a device without MPS.

    CUDA joins the MPS daemon at CUDA_MPS_PIPE_DIRECTORY, and without the variable one at /tmp/nvidia-mps: that would
    be another device's. So it names a directory of ours without a daemon, where CUDA goes to the device itself. The
    caller's other CUDA_MPS_... variables mean nothing without a daemon, and go.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(_MPS)}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": device.uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory(host, device)),
    }


def dropped_variables(base: Mapping[str, str]) -> list[str]:
    """Return the caller's variables that ask for MPS, or for limits that only MPS has."""
    return sorted(name for name, value in base.items() if name.startswith(_MPS) and value)


@dataclass
class PlainWatch:
    """The proof that a program runs on its device: NVML lists its processes there."""

    host: Host
    device: Device
    program_pid: int
    started: float = field(default_factory=time.monotonic)
    attached: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    # There is no daemon that could keep it waiting, or die.
    pending: set[int] = field(default_factory=set)
    daemon_gone: bool = False
    _suspects: set[int] = field(default_factory=set)

    def wait(self) -> float:
        """Return how many seconds may pass until the next look."""
        return 5.0 if self.attached else spacing(time.monotonic() - self.started)

    def look(self) -> None:
        """Look for the program's processes on the device, and anywhere else."""
        if self.host.processes.namespace_is_host() is False:
            # NVML's PIDs are not those that we know.
            return
        tree = set(self.host.processes.descendants(self.program_pid))
        try:
            self._look(tree)
        except GpushareError:
            # A GPU that does not answer proves nothing, and the program goes on.
            return

    def _look(self, tree: set[int]) -> None:
        mig, index = self.device.mig, self.device.gpu.index
        inside = set() if mig is None else {one.pid for one in processes_in(self.host.nvml, mig, index) or ()}
        now = set()
        for gpu, process in self._everywhere():
            if process.pid not in tree or not (process.compute or process.mps):
                continue
            if self._is_here(gpu, process):
                inside.add(process.pid)
            elif gpu != index or None not in (process.gpu_instance_id, process.compute_instance_id):
                now.add(process.pid)
        self.attached |= inside & tree
        # Two looks must agree, as for MPS: the lists are not of one moment.
        self.outside |= now & self._suspects
        self._suspects = now

    def _is_here(self, gpu: int, process: GpuProcess) -> bool:
        mig = self.device.mig
        if gpu != self.device.gpu.index:
            return False
        place = (process.gpu_instance_id, process.compute_instance_id)
        return mig is None or place == (mig.gpu_instance_id, mig.compute_instance_id)

    def _everywhere(self) -> Iterator[tuple[int, GpuProcess]]:
        for gpu in range(self.host.nvml.count()):
            try:
                found = self.host.nvml.processes(gpu) or ()
            except GpushareError:
                continue
            yield from ((gpu, process) for process in found)

    def settle(self) -> None:
        """Do nothing: NVML remembers no process that has ended."""

    def clients(self) -> set[int]:
        """Return nobody: outside MPS the end of one breaks no other."""
        return set()
