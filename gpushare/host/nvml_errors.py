"""NVML's return codes as errors of ours."""

from __future__ import annotations

from typing import Final

from gpushare.errors import (
    DriverNotLoaded,
    GpuLost,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    NvmlMissing,
    OperationFailed,
    TimedOut,
)

# nvmlReturn_t (nvml.h). Literals, because they are needed before pynvml is imported.
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
FUNCTION_NOT_FOUND: Final = 13
NO_DATA: Final = 21
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26
# What the driver cannot tell is None, not an error.
CANNOT_TELL: Final = frozenset(
    {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)


def nvml_error(code: int, text: str, gpu: str | None = None) -> GpushareError:
    """Return the error for an nvmlReturn_t; ``text`` is nvmlErrorString's."""
    where = f"GPU {gpu}: " if gpu is not None else ""
    doctor = "see what is wrong: gpushare doctor"
    if code == NOT_SUPPORTED:
        return NotSupported(f"{where}the driver does not support it ({text})", doctor, gpu=gpu)
    if code == NO_PERMISSION:
        return NoPermission(f"{where}the driver refuses: {text}", "run it as root: sudo gpushare ...", gpu=gpu)
    if code in {NOT_FOUND, 28}:
        return NotFound(f"{where}{text}", "see which GPUs are there: gpushare status", gpu=gpu)
    if code == 9:
        return DriverNotLoaded(
            "the NVIDIA driver is not loaded", "load it: sudo modprobe nvidia; then: gpushare doctor"
        )
    if code == 10:
        return TimedOut(f"{where}the driver did not answer ({text})", doctor, gpu=gpu)
    if code == 12:
        return NvmlMissing(
            "libnvidia-ml.so.1 is not on this machine",
            "install the NVIDIA driver, or try a simulated host: gpushare --host sim:h200 status",
        )
    if code == 15:
        return GpuLost(
            f"{where}the GPU is lost: it fell off the bus",
            "see: sudo dmesg | grep -i xid; a reboot may bring it back",
            gpu=gpu,
        )
    if code == 18:
        return OperationFailed(
            "the NVIDIA library and the kernel driver have different versions",
            "the driver was updated while it was loaded: reboot, or unload and load it again",
            code="driver_mismatch",
        )
    if code == 19:
        return InUse(f"{where}in use by another client", "see who: gpushare status", gpu=gpu)
    return OperationFailed(f"{where}NVML answers {code}: {text}", doctor, gpu=gpu, code="nvml")
