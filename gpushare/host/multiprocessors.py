"""How many streaming multiprocessors a whole GPU has: NVML tells CUDA cores, not SMs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare.host.nvml import NvmlReader


def multiprocessors(nvml: NvmlReader, index: int, compute_capability: tuple[int, int] | None) -> int | None:
    """Return the SMs of a GPU (nvmlDeviceGetNumGpuCores by the cores of one SM), or None when unknown.

    Not the largest MIG profile's: on an A100 that has 98 of the 108.

    Raises:
        GpushareError: the GPU does not answer.
    """
    per_sm = None if compute_capability is None else cores_per_multiprocessor(compute_capability)
    if per_sm is None:
        return None
    handle = nvml.handle(index)
    cores = nvml.ask(lambda bindings: bindings.nvmlDeviceGetNumGpuCores(handle), str(index))
    return None if cores is None else int(cores) // per_sm


def cores_per_multiprocessor(compute_capability: tuple[int, int]) -> int | None:
    """Return the FP32 cores of one SM (CUDA Programming Guide, arithmetic throughput), or None before Pascal."""
    if compute_capability < (6, 0):
        return None
    narrow = compute_capability in {(6, 0), (8, 0)} or compute_capability[0] == 7
    return 64 if narrow else 128
