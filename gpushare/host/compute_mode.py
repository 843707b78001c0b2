"""The compute mode of a GPU: set it and read it back."""

from __future__ import annotations

from gpushare.base.errors import needs_root_error
from gpushare.base.model import ComputeMode
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.host.smi import compute_mode_command
from gpushare.plan import Step, setting_step


def compute_mode_step(
    host: Host, device: Device, mode: ComputeMode, *, before: ComputeMode | None, why: str = ""
) -> Step:
    """Return the step that sets a compute mode; ``before`` is the mode when planning, ``why`` is added to its text."""
    index, nvml = device.gpu.index, host.nvml
    setting = f"the compute mode of {device.title}"
    return setting_step(
        what=f"set {setting} to {mode.title}{why}",
        command=compute_mode_command(device.uuid, mode.name),
        undo=None if before is None else compute_mode_command(device.uuid, before.name),
        setting=setting,
        read=lambda: nvml.compute_mode(index),
        write=lambda value: nvml.set_compute_mode(index, value),
        wanted=mode,
        in_words=lambda value: value.title,
        see=f"nvidia-smi -i {index} -q -d COMPUTE",
        gpu=str(index),
        allowed=lambda: need_root(host, f"setting {setting}"),
    )


def need_root(host: Host, change: str) -> None:
    """Raise NoPermission unless this user may do what only root may; ``change`` names it in the message."""
    if not host.root:
        raise needs_root_error(change)
