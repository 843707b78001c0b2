"""The environment of a program inside a share, and whether it can be run in it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage, NoPermission, NotFound
from gpushare.mps.control import DEVICE
from gpushare.units import mps_memory, mps_percentage, parse_pinned_limits, parse_thread_percentage, quoted

if TYPE_CHECKING:
    from gpushare.mps.home import DaemonHome
    from gpushare.mps.limits import Limits
    from gpushare.selection import Device

_LIMITS: Final = frozenset(
    {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_CLIENT_PRIORITY"}
)


def client_environment(base: Mapping[str, str], device: Device, home: DaemonHome, limits: Limits) -> dict[str, str]:
    """Return the environment of a client: the device by UUID, the private pipe, its limits.

    The limit names device 0, the only one that the client sees: an entry for any other would make
    CUDA drop all limits, also the server's.
    """
    environment = {
        **base,
        "CUDA_VISIBLE_DEVICES": device.uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(home.pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(home.log),
    }
    if limits.threads_percent is not None:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = mps_percentage(limits.threads_percent)
    if limits.memory_limit_bytes is not None:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{DEVICE}={mps_memory(limits.memory_limit_bytes)}"
    if limits.priority is not None:
        environment["CUDA_MPS_CLIENT_PRIORITY"] = str(int(limits.priority))
    return environment


def without_own_limits(base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the caller's own limits for MPS clients, where only those given are to hold."""
    return {name: value for name, value in base.items() if name not in _LIMITS}


def check_command(device: Device, program: str, limits: Limits) -> None:
    """Raise unless a program can be run with the caller's environment.

    Raises:
        NotFound, NoPermission: there is no such program, or it may not be executed.
        BadUsage: the caller's own CUDA_MPS_... variables would be ignored, or drop every limit, in silence.
    """
    check_program(program)
    _check_threads(limits)
    own = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    if own and limits.memory_limit_bytes is None and parse_pinned_limits(own, device.uuid) is None:
        raise BadUsage(
            f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={own} is no limit for {device.title} alone: CUDA would drop all limits",
            "take it away: unset CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; or give --memory",
            code="bad_environment",
        )


def check_program(program: str) -> None:
    """Raise unless there is such a program, before anything is set up for it.

    Raises:
        NotFound, NoPermission: there is none, or it may not be executed.
    """
    if shutil.which(program) is not None:
        return
    if os.path.isfile(program):
        raise NoPermission(
            f"may not execute {quoted(program, 200)}",
            f"check its mode: ls -l {shlex.quote(program)}",
            code="command_not_executable",
        )
    raise NotFound(
        f"there is no program {quoted(program, 200)}",
        f"check the spelling: command -v {shlex.quote(program)}",
        code="command_not_found",
    )


def _check_threads(limits: Limits) -> None:
    own = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if own and limits.threads_percent is None:
        try:
            parse_thread_percentage(own)
        except BadUsage as error:
            raise BadUsage(
                f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={own}: {error.message}; CUDA would ignore it in silence",
                "take it away: unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE; or give --threads",
                code="bad_environment",
            ) from None
