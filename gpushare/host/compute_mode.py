"""The compute mode of a GPU: set it and read it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.errors import NoPermission, OperationFailed
from gpushare.model import ComputeMode

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


def set_compute_mode(host: Host, device: Device, mode: ComputeMode) -> None:
    """Set a compute mode and read it back.

    Raises:
        NoPermission: not root.
        OperationFailed: the GPU holds another mode.
    """
    index = device.gpu.index
    if host.nvml.compute_mode(index) is mode:
        return
    need_root(host, f"setting the compute mode of {device.title}")
    host.nvml.set_compute_mode(index, mode)
    held = host.nvml.compute_mode(index)
    if held is not mode:
        raise OperationFailed(
            f"{device.title} holds compute mode {'unknown' if held is None else held.title} instead of {mode.title}",
            f"see: nvidia-smi -i {index} -q -d COMPUTE",
            gpu=str(index),
            code="not_held",
        )


def need_root(host: Host, what: str) -> None:
    """Refuse a change to any user but root.

    Raises:
        NoPermission: this user is not root.
    """
    if host.uid != 0:
        raise NoPermission(f"{what} needs root", "run it as root: sudo gpushare ...; or look first: --dry-run")
