"""What each copy of a farm may take, threads and memory, and how many fit into what is free.

200/N percent for each of N copies beat 100/N and no cap at all on an H200 (up to half again as much as without one);
the caps overlap on purpose, because copies are rarely all busy at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, InUse
from gpushare.units import MIB, format_bytes

if TYPE_CHECKING:
    from gpushare.actions.farm import FarmOptions
    from gpushare.host.host import Host
    from gpushare.selection import Device

# What a CUDA context takes beside what a program allocates; a pinned memory limit does not count it.
CONTEXT_BYTES: Final = 512 * MIB
# Left free, against fragmentation and what was not foreseen.
_MARGIN: Final = 0.02


def share_of_threads(copies: int) -> float | None:
    """Return the thread cap of each of N copies, 200/N percent; None (no cap) for one or two."""
    return None if copies <= 2 else max(0.1, round(200.0 / copies, 1))


def share_of_memory(host: Host, device: Device, copies: int) -> int | None:
    """Return the memory limit of each of N copies: its share of what is free now; None when that is not known.

    Raises:
        InUse: the share would be nothing.
    """
    free = free_memory(host, device)
    if free is None:
        return None
    share = int(free * (1 - _MARGIN) / copies) - CONTEXT_BYTES
    if share < MIB:
        raise no_room(device, free, copies, None)
    return share // MIB * MIB


def free_memory(host: Host, device: Device) -> int | None:
    """Return the free memory of a device in bytes (nvmlDeviceGetMemoryInfo_v2), or None when it is not known."""
    gpu = host.nvml.gpu(device.gpu.index)
    if device.mig is not None:
        mig = next((one for one in gpu.mig_instances if one.uuid == device.uuid), None)
        if mig is None or mig.memory_total_bytes is None or mig.memory_used_bytes is None:
            return None
        return mig.memory_total_bytes - mig.memory_used_bytes
    if gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return None
    return gpu.memory_total_bytes - gpu.memory_used_bytes - (gpu.memory_reserved_bytes or 0)


def check_room(host: Host, device: Device, options: FarmOptions) -> int | None:
    """Return how many copies fit into the memory that is free now; None when that is not known.

    Raises:
        InUse: not even one.
    """
    limit = options.limits.memory_limit_bytes
    free = free_memory(host, device)
    if limit is None or free is None:
        return None
    fitting = free // (limit + CONTEXT_BYTES)
    if fitting < 1:
        raise no_room(device, free, 1, limit)
    return min(options.copies, fitting)


def no_room(device: Device, free: int, copies: int, limit: int | None) -> GpushareError:
    """Return the refusal: so many copies, each with a limit or without one, do not fit into what is free."""
    if limit is None:
        wanted = f"{copies} copies and their CUDA contexts do" if copies > 1 else "a copy and its CUDA context do"
    else:
        wanted = f"a copy with a limit of {format_bytes(limit)} and its CUDA context do"
    return InUse(
        f"{wanted} not fit into the {format_bytes(max(0, free))} that are free on {device.title}",
        "see who holds it: gpushare status; or give fewer --copies, or a smaller --memory",
        gpu=str(device.gpu.index),
        code="memory_does_not_fit",
    )
