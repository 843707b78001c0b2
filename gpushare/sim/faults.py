"""What can fail on a simulated host. Pure on the state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

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


class _Fault(NamedTuple):
    """A fault: the field of the host or of a GPU in which it is kept, and what reads the value that the user gives.

    The reader gets the name of the fault and the value. Of a field that is a list, it returns a list to add, or for xid a number.
    """

    field: str
    read: Callable[[str, str | None], Any]
    of_gpu: bool = False


def _flag(field: str, value: bool, *, of_gpu: bool = False) -> _Fault:  # noqa: FBT001 - the value of the field
    """Return a fault that takes no value."""
    return _Fault(field, lambda *_: value, of_gpu)


def _amount(field: str, meaning: str, example: int | str, *, of_gpu: bool = False) -> _Fault:
    """Return a fault that takes a number, or where the example is a text, a size."""

    def read(kind: str, text: str | None) -> int:
        is_number = isinstance(example, int)
        if text is None or (is_number and not (text.isascii() and text.isdigit())):
            wanted = "a number" if is_number else "a size"
            raise _bad_fault_error(f"{kind} needs {wanted}", f"give {meaning}: {kind} {example}")
        return int(text) if is_number else parse_memory_limit(text, kind)

    return _Fault(field, read, of_gpu)


def _parse_entry_points(kind: str, text: str | None) -> Sequence[str]:
    """Return the NVML entry points of a short name in `ENTRY_POINTS`, or the entry point that ``text`` itself names."""
    if text is None or not (text in ENTRY_POINTS or text.startswith("nvml")):
        names = ", ".join(ENTRY_POINTS)
        raise _bad_fault_error(f"{kind} needs an NVML entry point", f"give nvml..., or one of: {names}")
    return ENTRY_POINTS.get(text, (text,))


def _parse_program(kind: str, text: str | None) -> Sequence[str]:
    if text not in {SMI, MPS_CONTROL, TOOLKIT}:
        raise _bad_fault_error(f"{kind} needs a program", f"give {SMI}, {MPS_CONTROL} or {TOOLKIT}")
    return (text,)


def _parse_version(_kind: str, text: str | None) -> str:
    if text is None or not text.split(".")[0].isdigit():
        raise _bad_fault_error("driver needs a version", "give for example 535.261.03 or 580.159.04")
    return text


_FAULTS: Final = {
    "lost": _flag("lost", True, of_gpu=True),
    "persistence-off": _flag("persistence", False, of_gpu=True),
    "reset-required": _flag("reset_required", True, of_gpu=True),
    "not-supported": _Fault("not_supported", _parse_entry_points, of_gpu=True),
    "refused": _Fault("refused", _parse_entry_points, of_gpu=True),
    "xid": _amount("xids", "its number", 79, of_gpu=True),
    "slowed": _amount("slowed", "the sum of nvmlClocksEventReasons", 4, of_gpu=True),
    "power-cap": _amount("power_cap_watts", "the watts that it may draw", 300, of_gpu=True),
    "unlisted-memory": _amount("unlisted_bytes", "how much memory no process has", "3G", of_gpu=True),
    "no-driver": _flag("driver_loaded", False),
    "no-nvml": _flag("nvml_installed", False),
    "no-permission": _flag("permission_denied", True),
    "blind": _flag("pid_namespace_is_host", False),
    "mismatch": _flag("library_mismatch", True),
    "hang": _Fault("hanging_programs", _parse_program),
    "missing": _Fault("missing_programs", _parse_program),
    "driver": _Fault("driver", _parse_version),
    "collide": _amount("collisions", "how many conversations", 3),
    "fail-step": _amount("fail_step", "which changing NVML call from now on", 3),
    "crash-step": _amount("crash_step", "which changing NVML call from now on", 3),
    "descriptors": _amount("descriptor_limit", "how many files a process may have open", 1024),
    "mps-version": _amount("mps_binary", "the binary version of the MPS programs", 13020),
    "shm": _amount("shared_memory_bytes", "how large /dev/shm is", "64M"),
    "host-memory": _amount("host_memory_bytes", "how much host memory is available", "8G"),
}
KINDS: Final = (*_FAULTS, "user", "busy")
# What `clear` leaves as it is: GPUs with all that runs on them, users, time, the driver and what is installed.
_KEPT: Final = frozenset(
    {"spec", "gpus", "processes", "daemons", "users", "next_pid", "created_at", "driver", "toolkit_installed"}
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
        return
    fault = _FAULTS.get(kind)
    if fault is None:
        raise BadUsage(f"there is no fault '{kind}'", f"faults: {', '.join(KINDS)}", code="bad_fault")
    for owner in gpus if fault.of_gpu else [state]:
        read, before = fault.read(kind, value), getattr(owner, fault.field)
        if kind == "xid":
            before.append(read)
        elif isinstance(before, list):
            before += [name for name in read if name not in before]
        else:
            setattr(owner, fault.field, read)


def clear(state: SimulatedHostState) -> None:
    """Take every fault back; what is no fault (`_KEPT`) stays: processes, MIG, the driver version."""
    vars(state).update({name: value for name, value in vars(SimulatedHostState(spec="")).items() if name not in _KEPT})
    for gpu in state.gpus:
        faultless = SimulatedGpu(model=gpu.model, uuid=gpu.uuid, pci_bus_id=gpu.pci_bus_id)
        for field in (fault.field for fault in _FAULTS.values() if fault.of_gpu):
            setattr(gpu, field, getattr(faultless, field))


def _bad_fault_error(problem: str, hint: str) -> BadUsage:
    return BadUsage(f"the fault {problem}", hint, code="bad_fault")


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
