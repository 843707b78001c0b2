"""What can fail on a simulated host. Pure on the state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from gpushare.errors import BadUsage, NotFound
from gpushare.host.capabilities import MADE_UP, user_id
from gpushare.sim.programs import SMI, TOOLKIT
from gpushare.sim.state import MPS_CONTROL, SimulatedGpu, SimulatedHostState
from gpushare.typed import is_shown
from gpushare.units import quoted

# Short names of the faults `not-supported` and `refused`, and the NVML entry points that then refuse.
ENTRY_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "utilization": (
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetProcessUtilization",
    ),
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
    "memory-limits": ("nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"),
    "compute-mode": ("nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"),
    # nvidia-smi compute-policy: NVML has no entry point for it.
    "time-slice": ("compute-policy",),
}
_GPU_FAULTS: Final = ("lost", "persistence-off", "not-supported", "refused", "reset-required", "xid", "unlisted-memory")
_FLAGS: Final = {
    "no-driver": ("driver_loaded", False),
    "no-nvml": ("nvml_installed", False),
    "no-permission": ("permission_denied", True),
    "blind": ("pid_namespace_is_host", False),
    "mismatch": ("library_mismatch", True),
}
# Faults that count, with the field of the state that does, and what the number is.
_COUNTED: Final = {
    "collide": ("collisions", "how many conversations"),
    "fail-step": ("fail_step", "which changing NVML call from now on"),
    "crash-step": ("crash_step", "which changing NVML call from now on"),
    "shm": ("shared_memory_bytes", "how many bytes /dev/shm has"),
    "descriptors": ("descriptor_limit", "how many files a process may have open"),
    "host-memory": ("host_memory_bytes", "how many bytes of host memory are available"),
    "mps-version": ("mps_binary", "the binary version of the MPS programs"),
}
_HEALTHY: Final = SimulatedHostState(spec="")
KINDS: Final = (*_GPU_FAULTS, *_FLAGS, "hang", "missing", "user", "driver", "memory-limits", *_COUNTED, "busy")


def apply(state: SimulatedHostState, gpus: Sequence[SimulatedGpu], kind: str, value: str | None) -> None:
    """Set one fault; those of GPUs hit the given ones.

    ``lost``, ``persistence-off``, ``reset-required`` (a MIG mode change stays pending) and ``not-supported``
    and ``refused`` (NO_PERMISSION; value of both: an NVML entry point, or one of `ENTRY_POINTS`) are faults of a GPU; ``no-driver``, ``no-nvml``, ``no-permission``, ``blind`` (another PID
    namespace), ``hang`` and ``missing`` (value: a program), ``user`` (value: uid or name) and ``driver``
    (value: version), ``collide`` (value: how many of the next conversations with an MPS daemon are dropped),
    ``fail-step`` (value N: the Nth modifying NVML call from now on returns UNKNOWN) and ``crash-step`` (value N: the
    process dies right after its Nth modifying NVML call took effect), ``mismatch`` (library and kernel module differ),
    ``memory-limits`` (the driver's limits by cgroup; value: one of `cgroups.FAULTS`),
    ``shm`` (value: bytes), ``descriptors`` (value: ulimit -n) and ``mps-version`` (value: 13020) are faults of the host;
    ``xid`` (value: its number) and ``unlisted-memory`` (value: bytes that no process has) are faults of a GPU.
    """
    if kind in _GPU_FAULTS:
        for gpu in gpus:
            _set_gpu_fault(gpu, kind, value)
    elif kind in _FLAGS:
        name, on = _FLAGS[kind]
        setattr(state, name, on)
    else:
        _set_host_fault(state, kind, value)


def clear(state: SimulatedHostState) -> None:
    """Take every fault back."""
    state.driver_loaded = state.nvml_installed = state.pid_namespace_is_host = True
    state.permission_denied = state.library_mismatch = False
    state.mps_binary = None
    state.shared_memory_bytes, state.descriptor_limit = _HEALTHY.shared_memory_bytes, _HEALTHY.descriptor_limit
    state.fault_uid = None
    state.hanging_programs, state.missing_programs = [], []
    state.collisions = state.fail_step = state.crash_step = 0
    state.channel_fault, state.channel_statuses = None, {}
    state.memory_limits_fault = None
    state.host_memory_bytes, state.checkpoint_faults = _HEALTHY.host_memory_bytes, {}
    for gpu in state.gpus:
        gpu.lost, gpu.persistence, gpu.not_supported, gpu.reset_required = False, True, [], False
        gpu.refused, gpu.xids, gpu.unlisted_bytes = [], [], 0
    for daemon in state.daemons:
        daemon.hangs = False


def _set_gpu_fault(gpu: SimulatedGpu, kind: str, value: str | None) -> None:
    if kind == "lost":
        gpu.lost = True
    elif kind == "persistence-off":
        gpu.persistence = False
    elif kind == "reset-required":
        gpu.reset_required = True
    elif kind == "xid":
        gpu.xids.append(_number("xid", value, "its number"))
    elif kind == "unlisted-memory":
        gpu.unlisted_bytes = _number(kind, value, "how many bytes no process has")
    else:
        if value is None or not (value in ENTRY_POINTS or value.startswith("nvml")):
            known = ", ".join(ENTRY_POINTS)
            raise BadUsage(
                f"the fault {kind} needs an NVML entry point",
                f"give nvml..., or one of: {known}",
                code="bad_fault",
            )
        for name in ENTRY_POINTS.get(value, (value,)):
            names = gpu.refused if kind == "refused" else gpu.not_supported
            if name not in names:
                names.append(name)


def _set_host_fault(state: SimulatedHostState, kind: str, value: str | None) -> None:
    if kind in {"hang", "missing"}:
        if value not in {SMI, MPS_CONTROL, TOOLKIT}:
            known = f"give {SMI}, {MPS_CONTROL} or {TOOLKIT}"
            raise BadUsage(f"the fault {kind} needs a program", known, code="bad_fault")
        programs = state.hanging_programs if kind == "hang" else state.missing_programs
        if value not in programs:
            programs.append(value)
    elif kind in _COUNTED:
        name, what = _COUNTED[kind]
        setattr(state, name, _number(kind, value, what))
    elif kind == "memory-limits":
        state.memory_limits_fault = _limits_fault(value)
    elif kind == "user":
        if value is None:
            raise BadUsage("the fault user needs a user", "give a user id or name", code="bad_fault")
        state.fault_uid = uid_of(state, value)
    elif kind == "driver":
        if value is None or not value.split(".")[0].isdigit():
            raise BadUsage(
                "the fault driver needs a version", "give for example 535.261.03 or 580.159.04", code="bad_fault"
            )
        state.driver = value
    else:
        raise BadUsage(f"there is no fault '{kind}'", f"faults: {', '.join(KINDS)}", code="bad_fault")


def _limits_fault(value: str | None) -> str:
    from gpushare.sim.cgroups import FAULTS

    if value not in FAULTS:
        known = f"give {', '.join(FAULTS)}"
        raise BadUsage("the fault memory-limits needs to know what goes wrong", known, code="bad_fault")
    return value


def _number(kind: str, value: str | None, what: str) -> int:
    if value is None or not value.isascii() or not value.isdigit():
        raise BadUsage(f"the fault {kind} needs a number", f"give {what}: {kind} 3", code="bad_fault")
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
            raise BadUsage(f"{quoted(text)} is no user", "give a name, or an id like 1000", code="bad_user") from None
        # The same on every simulated host.
        uid = _FIRST_MADE_UP + zlib.crc32(text.encode()) % _MOST_MADE_UP
        state.users[text], MADE_UP[uid] = uid, text
        return uid
