"""The program nvidia-cuda-mps-control itself: its version, what that allows, and how a daemon is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpushare.errors import NotSupported
from gpushare.host.mps_control import PROGRAM

if TYPE_CHECKING:
    from gpushare.host.program import Programs


def probe_version(programs: Programs, timeout: float = 5.0) -> int | None:
    """Return the "Binary version" (13000 is CUDA 13.0, driver 580), or None for older programs.

    Before 580 ``-v`` is no option: the program silently takes commands from stdin. So it gets a pipe
    directory where nobody answers, and no stdin. ``timeout`` is in seconds.

    Raises:
        TimedOut: the program hangs.
        NoPermission, OperationFailed: it cannot be executed.
    """
    try:
        done = programs.run([PROGRAM, "-v"], env={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/gpushare"}, timeout=timeout)
    except NotSupported:
        return None
    match = re.search(r"Binary version:\s*(\d+)", done.stdout)
    return int(match.group(1)) if match else None


def max_clients(version: int | None, compute_capability: tuple[int, int] | None, fraction: float = 1.0) -> int | None:
    """Return how many client contexts one server takes on a device, or None when unknown.

    16 before Volta, 48 since, 60 from CUDA 13.1 (binary 13010) on; on a MIG instance its fraction of
    that (NVIDIA's MPS guide; the real cap is connections, with CUDA_DEVICE_MAX_CONNECTIONS=2).
    """
    if compute_capability is None:
        return None
    whole = 16 if compute_capability < (7, 0) else 60 if version is not None and version >= 13010 else 48
    return max(1, int(whole * fraction))


def start_environment(uuid: str, pipe_directory: str, log_directory: str) -> Mapping[str, str | None]:
    """Return the daemon's environment: one device by UUID, private directories, no limits by accident.

    The daemon would take a caller's own MPS variables as its defaults, so they are removed.
    """
    return {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
        "CUDA_MPS_LOG_DIRECTORY": log_directory,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": None,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": None,
        "CUDA_MPS_CLIENT_PRIORITY": None,
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": None,
    }
