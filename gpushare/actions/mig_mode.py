"""MIG mode on and off: who is in the way, what the change loses, and the step with its way back."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from gpushare.actions.mig_daemons import idle_daemon_pids
from gpushare.actions.plan import Step
from gpushare.errors import InUse, NoPermission, NotSupported
from gpushare.host.holders import blocking, gpu_holders, remedy
from gpushare.host.mig_changes import MigChanges
from gpushare.model import ComputeMode

# The name in full, and as the kernel cuts it.
_AGREEING = {"nvidia-persistenced", "nvidia-persiste"}

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mig_journal import Journal
    from gpushare.model import Gpu, GpuProcess


def check_mode_change(host: Host, gpu: Gpu, *, enable: bool, bare: bool, ending: Collection[int] = ()) -> list[str]:
    """Return what a mode change brings with it, or raise because it would fail, at once or at the first instance.

    From Hopper on the mode changes on a busy GPU, and only the first instance fails: so everybody must be off before.
    ``bare``: the change makes no instance. ``ending``: PIDs that it ends before.

    Raises:
        NotSupported: no MIG here.
        InUse: somebody is on the GPU.
    """
    if not gpu.mig_capable:
        raise NotSupported(
            f"GPU {gpu.index} ({gpu.name or 'unknown model'}) has no MIG",
            "see the ways of sharing that it has: gpushare compare",
            gpu=str(gpu.index),
            code="no_mig",
        )
    if enable == bool(gpu.mig_enabled):
        # Only a mode that is pending is taken back: nothing is reset for it.
        return []
    resetless = MigChanges(host.nvml).resetless(gpu.index)
    _check_nobody(host, gpu, ending, needs_reset=not resetless)
    notes = []
    if enable and gpu.compute_mode not in {None, ComputeMode.DEFAULT}:
        notes.append(f"GPU {gpu.index}: its compute mode becomes default; with MIG there is no other")
    if enable and bare:
        notes.append(f"GPU {gpu.index}: with MIG on and no instance, no CUDA program can use it")
    if enable:
        notes.append(
            f"GPU {gpu.index}: a reboot or a reload of the driver turns MIG off again, and loses the instances"
            if resetless
            else f"GPU {gpu.index}: MIG stays on over a reboot, its instances do not"
        )
    if not resetless:
        notes.append(f"GPU {gpu.index}: the driver resets the GPU for it")
    if host.nvml.persistence(gpu.index) is False:
        notes.append(
            f"GPU {gpu.index}: persistence mode is off; without a program the driver may let go of the GPU: "
            f"sudo nvidia-smi -i {gpu.index} -pm 1"
        )
    return notes


def _check_nobody(host: Host, gpu: Gpu, ending: Collection[int], *, needs_reset: bool) -> None:
    blind = host.processes.namespace_is_host() is False and not gpu.processes
    if gpu.processes is None or blind:
        raise InUse(
            f"GPU {gpu.index}: the driver does not tell who is on it, so its MIG mode is left alone",
            "run it as root, outside a container",
            gpu=str(gpu.index),
            code="unknown_holders",
        )
    idle = idle_daemon_pids(host, gpu).union(ending)
    there = [process for process in gpu.processes if process.pid not in idle]
    if there:
        names = ", ".join(_who(host, one) for one in there[:4])
        more = f" and {len(there) - 4} more" if len(there) > 4 else ""
        raise InUse(
            f"GPU {gpu.index}: {names}{more} must end before its MIG mode can change",
            f"see all: gpushare status -g {gpu.index}; a program of yours: kill {there[0].pid}",
            gpu=str(gpu.index),
        )
    # nvidia-persistenced and the driver agree about a reset among themselves.
    held = [one for one in gpu_holders(host, gpu) if one.pid not in idle and one.name not in _AGREEING]
    if held and needs_reset:
        raise InUse(
            f"GPU {gpu.index}: {blocking(held)} {'holds' if len(held) == 1 else 'hold'} it, and it must be reset",
            remedy(held) or f"end it, then run this again: sudo kill {held[0].pid}",
            gpu=str(gpu.index),
        )


def _who(host: Host, process: GpuProcess) -> str:
    # NVML tells only the PID.
    info = host.processes.describe(process.pid)
    name, user = (None, None) if info is None else (info.name, info.user)
    return f"{process.name or name or 'process'} ({process.pid}, {process.user or user or 'unknown user'})"


def mode_step(host: Host, gpu: Gpu, journal: Journal, *, enable: bool) -> Step:
    """Return the step that switches the mode, read back; undone, also a mode that is only pending is taken back."""
    word, changes = ("on", "off"), MigChanges(host.nvml)
    now = bool(gpu.mig_enabled)

    def act() -> None:
        if host.uid != 0:
            raise NoPermission(
                f"GPU {gpu.index}: switching MIG needs root", "run it as root: sudo gpushare ...", gpu=str(gpu.index)
            )
        journal.note(f"MIG {word[not enable]} on GPU {gpu.index}: nvmlDeviceSetMigMode")
        host.nvml.restart()
        changes.set_mode(gpu.index, enabled=enable)

    def back() -> None:
        if changes.mode(gpu.index) != (now, now):
            host.nvml.restart()
            changes.set_mode(gpu.index, enabled=now)

    return Step(
        what=f"switch MIG {word[not enable]} on GPU {gpu.index}",
        command=f"nvidia-smi -i {gpu.index} -mig {int(enable)}",
        undo=f"nvidia-smi -i {gpu.index} -mig {int(not enable)}",
        do=act,
        revert=back,
    )
