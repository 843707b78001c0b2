"""A share outside MPS: the variables that keep a program away from every daemon, and the proof that it runs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Final

from gpushare.base.errors import GpushareError, InUse, NotSupported
from gpushare.base.model import ComputeMode, device_key
from gpushare.base.selection import Device, titles
from gpushare.base.values import dataclass
from gpushare.host.claims import HeldClaim
from gpushare.host.host import Host, make_private_directory, processes_on
from gpushare.host.smi import compute_mode_command
from gpushare.part import Watch
from gpushare.plan import Step
from gpushare.run.share import INSTANCE, check_program, guard_words

_MPS: Final = "CUDA_MPS_"


def check_outside_mps(device: Device) -> None:
    """Raise unless programs can share a device outside MPS, by its time-slices.

    Raises:
        InUse: its compute mode is not the default one (``exclusive_process``).
        NotSupported: the GPU is in MIG mode.
    """
    gpu = device.gpu
    if device.mig is None and gpu.mig_enabled:
        raise NotSupported(
            f"{device.title} is in MIG mode: a program runs in an instance",
            "run it in one: gpushare run --mig 1g -- CMD",
            gpu=str(gpu.index),
            code="mig_enabled",
        )
    mode = gpu.compute_mode
    if mode not in {None, ComputeMode.DEFAULT}:
        raise InUse(
            f"{device.title} is in compute mode {mode.title if mode else ''}: programs cannot share it by time-slices",
            f"allow it: sudo {compute_mode_command(gpu.uuid or '', 'DEFAULT')}",
            gpu=str(gpu.index),
            code="exclusive_process",
        )


@dataclass
class PlainShare:
    """A device outside MPS: `Share` without a daemon. With a claim it is a MIG instance for one program.

    ``more`` are the other GPUs of a job of several.
    """

    host: Host
    device: Device
    claim: HeldClaim | None = None
    # What to call a MIG instance.
    title: str | None = None
    more: tuple[Device, ...] = ()

    @property
    def words_for_guard(self) -> tuple[str, ...]:
        return guard_words(INSTANCE, None, self.claim)

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self.device, *self.more)

    @property
    def where(self) -> str:
        """Return where the program runs, for people: ``on GPU 0``, ``in instance 'train'``."""
        # The title is that of an instance.
        if self.title is None:
            return f"on {titles(self.devices)}"
        in_dry_run = self.claim is None
        return f"in {self.title}, if it is still free then" if in_dry_run else f"in {self.title}"

    def check(self, program: str) -> None:
        check_program(program)

    def steps(self) -> tuple[Step, ...]:
        """Return no steps: outside MPS no daemon has to be started."""
        return ()

    def open(self) -> None:
        """Make the directory in which no daemon listens."""
        make_private_directory(pipe_directory(self.host, self.device))

    @property
    def meter(self) -> None:
        """Return None: contexts outside MPS end without harm to others."""
        return

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        uuids = ",".join(device.uuid for device in self.devices)
        return {**plain_environment(base, self.host, self.device), "CUDA_VISIBLE_DEVICES": uuids}

    def watch(self, pid: int) -> PlainWatch:
        return PlainWatch(self.host, self.device, pid, more=frozenset(device.gpu.index for device in self.more))

    def close(self, *, program_lives: bool = False) -> bool:
        """Release the claim, if there is one; return False, because there is no daemon that others could still use."""
        # While the program lives, the guard holds the claim.
        if self.claim is not None and not program_lives:
            self.claim.release()
        self.claim = None
        return False


def pipe_directory(host: Host, device: Device) -> Path:
    """Return the private directory of programs that run on a device without MPS: no MPS daemon listens there."""
    return host.run_directory / "mig" / device_key(device.uuid)


def plain_environment(base: Mapping[str, str], host: Host, device: Device) -> dict[str, str]:
    """Return the environment of a program that runs on a device without MPS.

    CUDA joins the MPS daemon at CUDA_MPS_PIPE_DIRECTORY, by default at /tmp/nvidia-mps, which would be another device's.
    So the variable is set to a directory of gpushare without a daemon, and CUDA uses the device directly. The caller's
    other CUDA_MPS_... variables have no meaning without a daemon and are dropped.
    """
    return {
        **{name: value for name, value in base.items() if not name.startswith(_MPS)},
        "CUDA_VISIBLE_DEVICES": device.uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory(host, device)),
    }


def dropped_variables(base: Mapping[str, str]) -> list[str]:
    """Return the caller's variables that only MPS understands, such as limits: outside MPS the program does not get them."""
    return sorted(name for name, value in base.items() if name.startswith(_MPS) and value)


@dataclass
class PlainWatch(Watch):
    """The proof that a program runs on its device: NVML lists its processes there."""

    attached: set[int] = field(default_factory=set)
    # The indexes of the other GPUs of a job of several.
    more: frozenset[int] = frozenset()

    @property
    def gpus(self) -> tuple[int, ...]:
        return (self.device.gpu.index, *sorted(self.more))

    def find_processes(self) -> None:
        """Note which processes of the program are on its devices, and which on other GPUs; nothing if that is unknown."""
        if self.host.processes.namespace_is_host() is False:
            # NVML's PIDs are of another namespace.
            return
        tree = set(self.host.processes.descendants(self.program_pid))
        try:
            self._note_processes(tree)
        except GpushareError:
            # A GPU that does not answer proves nothing, and the program goes on.
            return

    def _note_processes(self, tree: set[int]) -> None:
        """Note which processes of the program are on its devices, and which are elsewhere."""
        mig = self.device.mig
        index = self.device.gpu.index
        elsewhere: set[int] = set()
        if mig is not None:
            self.attached |= tree & {each.pid for each in self.host.nvml.processes_in(mig, index) or ()}
        of_all_gpus = (
            (gpu, each) for gpu in range(self.host.nvml.count()) for each in processes_on(self.host, gpu) or ()
        )
        for gpu, process in of_all_gpus:
            if process.pid not in tree or not (process.compute or process.mps):
                continue
            # Without the ids of its instance, a process on the same GPU may be in ours.
            is_in_other_instance = None not in (process.gpu_instance_id, process.compute_instance_id)
            if gpu in self.more or (gpu == index and self.device.has(process)):
                self.attached.add(process.pid)
            elif gpu != index or is_in_other_instance:
                elsewhere.add(process.pid)
        # Two looks must agree, as for MPS: the lists are not of one moment.
        self.outside |= elsewhere & self._suspects
        self._suspects = elsewhere

    def clients(self) -> set[int]:
        """Return none: outside MPS the end of one breaks no other."""
        return set()
