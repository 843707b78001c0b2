"""What can fail on a simulated host. Pure on the state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from gpushare.base.errors import BadUsage, NotFound
from gpushare.base.typed import is_shown
from gpushare.base.units import parse_memory_limit, quoted
from gpushare.host.capabilities import SIMULATED_USERS, user_id
from gpushare.sim.programs import SMI, TOOLKIT
from gpushare.sim.state import MPS_CONTROL, SimulatedGpu, SimulatedHostState

_Amount = tuple[str, str, "int | str"]
# Short names of the faults `not-supported` and `refused`, and the NVML entry points that then refuse.
ENTRY_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "utilization": ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetProcessUtilization"),
    "processes": (
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
    ),
    "memory": ("nvmlDeviceGetMemoryInfo",),
    "mig": ("nvmlDeviceGetMigMode", "nvmlDeviceSetMigMode"),
    # What a user or a container without mig/monitor does not see.
    "mig-instances": (
        "nvmlDeviceGetGpuInstances",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlDeviceGetMigDeviceHandleByIndex",
    ),
    "mig-placements": ("nvmlDeviceGetGpuInstancePossiblePlacements",),
    "compute-mode": ("nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"),
    # nvidia-smi compute-policy: NVML has no entry point for it.
    "time-slice": ("compute-policy",),
}
# Faults without a value, with the field that they set; of each GPU, and of the host.
_GPU_FLAGS: Final = {
    "lost": ("lost", True),
    "persistence-off": ("persistence", False),
    "reset-required": ("reset_required", True),
}
_HOST_FLAGS: Final = {
    "no-driver": ("driver_loaded", False),
    "no-nvml": ("nvml_installed", False),
    "no-permission": ("permission_denied", True),
    "blind": ("pid_namespace_is_host", False),
    "mismatch": ("library_mismatch", True),
}
# Those that take a number or a size: the field that has it, what it is, and an example, which is a text for a size.
_GPU_AMOUNTS: Final[Mapping[str, _Amount]] = {
    "slowed": ("slowed", "the sum of nvmlClocksEventReasons", 4),
    "power-cap": ("power_cap_watts", "the watts that it may draw", 300),
    "unlisted-memory": ("unlisted_bytes", "how much memory no process has", "3G"),
}
_HOST_AMOUNTS: Final[Mapping[str, _Amount]] = {
    "collide": ("collisions", "how many conversations", 3),
    "fail-step": ("fail_step", "which changing NVML call from now on", 3),
    "crash-step": ("crash_step", "which changing NVML call from now on", 3),
    "descriptors": ("descriptor_limit", "how many files a process may have open", 1024),
    "mps-version": ("mps_binary", "the binary version of the MPS programs", 13020),
    "shm": ("shared_memory_bytes", "how large /dev/shm is", "64M"),
    "host-memory": ("host_memory_bytes", "how much host memory is available", "8G"),
}
# Those that take an entry point, or a program: the field with their list.
_ENTRY_LISTS: Final = {"not-supported": "not_supported", "refused": "refused"}
_PROGRAM_LISTS: Final = {"hang": "hanging_programs", "missing": "missing_programs"}
_GPU_KINDS: Final = (*_GPU_FLAGS, *_ENTRY_LISTS, "xid", *_GPU_AMOUNTS)
KINDS: Final = (*_GPU_KINDS, *_HOST_FLAGS, *_PROGRAM_LISTS, "user", "driver", *_HOST_AMOUNTS, "busy")
# What `clear` leaves as it is: GPUs with all that runs on them, users, time, the driver and what is installed.
_KEPT: Final = frozenset(
    {"spec", "gpus", "processes", "daemons", "users", "next_pid", "created_at", "driver", "toolkit_installed"}
)


def apply(state: SimulatedHostState, gpus: Sequence[SimulatedGpu], kind: str, value: str | None) -> None:
    """Set one fault (see ``gpushare sim fault --help``); those of GPUs hit the given ones.

    Raises:
        BadUsage: no such fault, or its value is wrong.
    """
    if kind in _GPU_KINDS:
        for gpu in gpus:
            _set_gpu_fault(gpu, kind, value)
    elif kind in _HOST_FLAGS:
        setattr(state, *_HOST_FLAGS[kind])
    elif kind in _HOST_AMOUNTS:
        _set_amount(state, kind, value, _HOST_AMOUNTS[kind])
    elif kind in _PROGRAM_LISTS:
        if value not in {SMI, MPS_CONTROL, TOOLKIT}:
            raise _bad_fault_error(f"{kind} needs a program", f"give {SMI}, {MPS_CONTROL} or {TOOLKIT}")
        _add_once(getattr(state, _PROGRAM_LISTS[kind]), value)
    else:
        _set_host_fault(state, kind, value)


def _set_host_fault(state: SimulatedHostState, kind: str, value: str | None) -> None:
    """Set a fault of the host that is neither a flag, a number nor a list of programs."""
    if kind == "user":
        if value is None:
            raise _bad_fault_error("user needs a user", "give a user id or name")
        state.fault_uid = uid_of(state, value)
    elif kind == "driver":
        if value is None or not value.split(".")[0].isdigit():
            raise _bad_fault_error("driver needs a version", "give for example 535.261.03 or 580.159.04")
        state.driver = value
    else:
        raise BadUsage(f"there is no fault '{kind}'", f"faults: {', '.join(KINDS)}", code="bad_fault")


def clear(state: SimulatedHostState) -> None:
    """Take every fault back."""
    vars(state).update({name: value for name, value in vars(SimulatedHostState(spec="")).items() if name not in _KEPT})
    for gpu in state.gpus:
        gpu.lost, gpu.persistence, gpu.not_supported, gpu.reset_required = False, True, [], False
        gpu.refused, gpu.xids, gpu.slowed, gpu.power_cap_watts, gpu.unlisted_bytes = [], [], 0, None, 0


def _set_gpu_fault(gpu: SimulatedGpu, kind: str, value: str | None) -> None:
    """Set a fault of one GPU: a flag, an Xid, a limit, or entry points that refuse."""
    if kind in _GPU_FLAGS:
        setattr(gpu, *_GPU_FLAGS[kind])
    elif kind == "xid":
        gpu.xids.append(_parse_number("xid", value, "its number", 79))
    elif kind in _GPU_AMOUNTS:
        _set_amount(gpu, kind, value, _GPU_AMOUNTS[kind])
    elif value is None or not (value in ENTRY_POINTS or value.startswith("nvml")):
        raise _bad_fault_error(
            f"{kind} needs an NVML entry point", f"give nvml..., or one of: {', '.join(ENTRY_POINTS)}"
        )
    else:
        for name in ENTRY_POINTS.get(value, (value,)):
            _add_once(getattr(gpu, _ENTRY_LISTS[kind]), name)


def _add_once(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _bad_fault_error(problem: str, hint: str) -> BadUsage:
    return BadUsage(f"the fault {problem}", hint, code="bad_fault")


def _set_amount(owner: object, kind: str, value: str | None, fault: _Amount) -> None:
    """Set the number or size that a fault takes."""
    name, meaning, example = fault
    if isinstance(example, int):
        setattr(owner, name, _parse_number(kind, value, meaning, example))
    elif value is None:
        raise _bad_fault_error(f"{kind} needs a size", f"give {meaning}: {kind} {example}")
    else:
        setattr(owner, name, parse_memory_limit(value, kind))


def _parse_number(kind: str, value: str | None, meaning: str, example: int) -> int:
    if value is None or not value.isascii() or not value.isdigit():
        raise _bad_fault_error(f"{kind} needs a number", f"give {meaning}: {kind} {example}")
    return int(value)


# Above what useradd, systemd and containers take.
_FIRST_MADE_UP: Final = 4_000_000_000
_MOST_MADE_UP: Final = 1 << 28


def uid_of(state: SimulatedHostState, text: str) -> int:
    """Return the id of a user given by id or name. A name that neither this machine nor the host has is made up.

    Raises BadUsage.
    """
    try:
        return user_id(text)
    except NotFound:
        if not is_shown(text) or not text.strip() or text.isdigit():
            raise BadUsage(
                f"{quoted(text)} is not a user", "give a name, or an id like 1000", code="bad_user"
            ) from None
        # The same on every simulated host.
        uid = _FIRST_MADE_UP + zlib.crc32(text.encode()) % _MOST_MADE_UP
        state.users[text], SIMULATED_USERS[uid] = uid, text
        return uid
