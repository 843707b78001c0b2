"""What can fail on a simulated host. Pure on the state."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from gpushare.base.errors import BadUsage, NotFound
from gpushare.base.typed import is_shown
from gpushare.base.units import parse_memory_limit, quoted
from gpushare.host.capabilities import SIMULATED_USERS, user_id
from gpushare.host.program import MPS_CONTROL
from gpushare.sim.programs import SMI, TOOLKIT
from gpushare.sim.state import SimulatedGpu, SimulatedHostState

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
# Faults without a value: the field that each sets, and to what.
_FLAGS: Final = {
    "lost": ("lost", True),
    "persistence-off": ("persistence", False),
    "reset-required": ("reset_required", True),
    "no-driver": ("driver_loaded", False),
    "no-nvml": ("nvml_installed", False),
    "no-permission": ("permission_denied", True),
    "blind": ("pid_namespace_is_host", False),
    "mismatch": ("library_mismatch", True),
}


class _Amount(NamedTuple):
    """A fault that takes a number, or a size."""

    field: str
    meaning: str
    # A text for a size.
    example: int | str


_XID: Final = _Amount("xids", "its number", 79)
_AMOUNTS: Final = {
    "slowed": _Amount("slowed", "the sum of nvmlClocksEventReasons", 4),
    "power-cap": _Amount("power_cap_watts", "the watts that it may draw", 300),
    "unlisted-memory": _Amount("unlisted_bytes", "how much memory no process has", "3G"),
    "collide": _Amount("collisions", "how many conversations", 3),
    "fail-step": _Amount("fail_step", "which changing NVML call from now on", 3),
    "crash-step": _Amount("crash_step", "which changing NVML call from now on", 3),
    "descriptors": _Amount("descriptor_limit", "how many files a process may have open", 1024),
    "mps-version": _Amount("mps_binary", "the binary version of the MPS programs", 13020),
    "shm": _Amount("shared_memory_bytes", "how large /dev/shm is", "64M"),
    "host-memory": _Amount("host_memory_bytes", "how much host memory is available", "8G"),
}
# Faults that take an NVML entry point, or a program: the field with the list to which it is added.
_ENTRY_LISTS: Final = {"not-supported": "not_supported", "refused": "refused"}
_PROGRAM_LISTS: Final = {"hang": "hanging_programs", "missing": "missing_programs"}
_GPU_KINDS: Final = (
    *("lost", "persistence-off", "reset-required"),
    *_ENTRY_LISTS,
    *("xid", "slowed", "power-cap", "unlisted-memory"),
)
_HOST_FLAGS, _HOST_AMOUNTS = ([kind for kind in table if kind not in _GPU_KINDS] for table in (_FLAGS, _AMOUNTS))
KINDS: Final = (*_GPU_KINDS, *_HOST_FLAGS, *_PROGRAM_LISTS, "user", "driver", *_HOST_AMOUNTS, "busy")
# What `clear` leaves as it is: GPUs with all that runs on them, users, time, the driver and what is installed.
_KEPT: Final = frozenset(
    {"spec", "gpus", "processes", "daemons", "users", "next_pid", "created_at", "driver", "toolkit_installed"}
)
# What `clear` puts back on each GPU.
_GPU_FIELDS: Final = (
    *("lost", "persistence", "reset_required", "not_supported", "refused"),
    *("xids", "slowed", "power_cap_watts", "unlisted_bytes"),
)


def apply(state: SimulatedHostState, gpus: Sequence[SimulatedGpu], kind: str, value: str | None) -> None:
    """Set a fault (see ``gpushare sim fault --help``): of the host, or of these GPUs.

    Raises:
        BadUsage: no such fault, or its value is wrong.
    """
    if kind == "user":
        if value is None:
            raise _bad_fault_error("user needs a user", "give a user id or name")
        state.fault_uid = uid_of(state, value)
    elif kind == "driver":
        if value is None or not value.split(".")[0].isdigit():
            raise _bad_fault_error("driver needs a version", "give for example 535.261.03 or 580.159.04")
        state.driver = value
    elif kind in KINDS:
        for owner in gpus if kind in _GPU_KINDS else [state]:
            _set_field(owner, kind, value)
    else:
        raise BadUsage(f"there is no fault '{kind}'", f"faults: {', '.join(KINDS)}", code="bad_fault")


def _set_field(owner: SimulatedGpu | SimulatedHostState, kind: str, value: str | None) -> None:
    """Set the field in which a GPU or the host keeps a fault."""
    if kind in _FLAGS:
        setattr(owner, *_FLAGS[kind])
    elif kind in _AMOUNTS:
        setattr(owner, _AMOUNTS[kind].field, _parse_amount(kind, value, _AMOUNTS[kind]))
    elif kind in _ENTRY_LISTS:
        _add_new(getattr(owner, _ENTRY_LISTS[kind]), _parse_entry_points(kind, value))
    elif kind in _PROGRAM_LISTS:
        if value not in {SMI, MPS_CONTROL, TOOLKIT}:
            raise _bad_fault_error(f"{kind} needs a program", f"give {SMI}, {MPS_CONTROL} or {TOOLKIT}")
        _add_new(getattr(owner, _PROGRAM_LISTS[kind]), [value])
    elif isinstance(owner, SimulatedGpu):
        owner.xids.append(_parse_amount(kind, value, _XID))


def clear(state: SimulatedHostState) -> None:
    """Take every fault back."""
    vars(state).update({name: value for name, value in vars(SimulatedHostState(spec="")).items() if name not in _KEPT})
    for gpu in state.gpus:
        faultless = SimulatedGpu(model=gpu.model, uuid=gpu.uuid, pci_bus_id=gpu.pci_bus_id)
        vars(gpu).update({name: getattr(faultless, name) for name in _GPU_FIELDS})


def _add_new(names: list[str], added: Iterable[str]) -> None:
    names += [name for name in added if name not in names]


def _bad_fault_error(problem: str, hint: str) -> BadUsage:
    return BadUsage(f"the fault {problem}", hint, code="bad_fault")


def _parse_amount(kind: str, value: str | None, amount: _Amount) -> int:
    is_number = isinstance(amount.example, int)
    if value is None or (is_number and not (value.isascii() and value.isdigit())):
        wanted = "a number" if is_number else "a size"
        raise _bad_fault_error(f"{kind} needs {wanted}", f"give {amount.meaning}: {kind} {amount.example}")
    return int(value) if is_number else parse_memory_limit(value, kind)


def _parse_entry_points(kind: str, value: str | None) -> Sequence[str]:
    """Return the NVML entry points of a short name in `ENTRY_POINTS`, or the entry point that ``value`` itself names."""
    if value is None or not (value in ENTRY_POINTS or value.startswith("nvml")):
        names = ", ".join(ENTRY_POINTS)
        raise _bad_fault_error(f"{kind} needs an NVML entry point", f"give nvml..., or one of: {names}")
    return ENTRY_POINTS.get(value, (value,))


# Above what useradd, systemd and containers take.
_FIRST_MADE_UP: Final = 4_000_000_000
_MOST_MADE_UP: Final = 1 << 28


def uid_of(state: SimulatedHostState, text: str) -> int:
    """Return the id of a user given by id or name, made up for a name that this machine lacks; BadUsage: no valid name."""
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
