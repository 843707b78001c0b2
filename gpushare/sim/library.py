"""A stand-in for libnvidia-ml.so.1 beneath the real pynvml bindings: ``pynvml.nvmlLib = SimulatedLibrary(file)``."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, TypeVar

from gpushare.base.errors import NoPermission
from gpushare.base.model import ComputeMode
from gpushare.gpu_models import model_of
from gpushare.sim import activity, current
from gpushare.sim import nvml_abi as abi
from gpushare.sim.activity import GpmSample, Resident
from gpushare.sim.mps_servers import binary_version
from gpushare.sim.nvml_abi import (
    ENTRY_POINTS,
    ERROR_TEXTS,
    NO_INSTANCE,
    Code,
    EntryPoint,
    Form,
    Handle,
    HandleKind,
    Kinds,
    On,
    Refused,
    Target,
    profile_of,
    unversioned,
)
from gpushare.sim.state import (
    SimulatedGpuInstance,
    SimulatedHostState,
    StateFile,
    initial_state,
    now,
    settle_is_due,
)

_FULL_LOAD_POWER = 0.9
_RESETLESS_MIG, _MIG_QUERY_WITHOUT_MIG = 184, 199


@abi.entry_point("nvmlInitWithFlags", "nvmlInit_v2", needs_init=False)
def _init(library: SimulatedLibrary, *_flags: Any) -> None:
    state = library.state
    failures = (
        (not state.nvml_installed, Code.LIBRARY_NOT_FOUND),
        (not state.driver_loaded, Code.DRIVER_NOT_LOADED),
        (state.library_mismatch, Code.LIB_RM_VERSION_MISMATCH),
        # nvml.h documents it for nvmlInit: the device nodes may not be opened.
        (state.permission_denied, Code.NO_PERMISSION),
    )
    for failed, code in failures:
        if failed:
            raise Refused(code)
    library.references += 1


@abi.entry_point("nvmlShutdown")
def _shutdown(library: SimulatedLibrary) -> None:
    library.references -= 1


@abi.entry_point("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
def _handle_by_index(library: SimulatedLibrary, index: Any, device: Any) -> None:
    # A lost GPU is refused here already: nvidia-smi's "Unable to determine the device handle for
    # GPU ...: GPU is lost" is this call. Handles taken before it was lost answer GPU_IS_LOST too.
    abi.put_handle(device, library.gpu(abi.number(index)).handle)


@abi.entry_point("nvmlDeviceGetHandleByUUID")
def _handle_by_uuid(library: SimulatedLibrary, uuid: Any, device: Any) -> None:
    wanted = bytes(getattr(uuid, "value", uuid) or b"").decode(errors="replace")
    handles: dict[str, Handle] = {}
    for index, gpu in enumerate(library.state.gpus):
        handles[gpu.uuid] = Handle(HandleKind.GPU, index)
        for mig in gpu.mig:
            handles[mig.uuid] = Handle(HandleKind.MIG_DEVICE, index, *mig.instance_ids)
    if wanted not in handles:
        raise Refused(Code.NOT_FOUND)
    # Refused here already if the GPU is lost.
    library.gpu(handles[wanted].index)
    abi.put_handle(device, handles[wanted])


@abi.entry_point("nvmlDeviceSetComputeMode", on=On.GPU)
def _set_compute_mode(library: SimulatedLibrary, target: Target, mode: Any) -> None:
    wanted = abi.number(mode)
    if wanted not in list(ComputeMode):
        raise Refused(Code.INVALID_ARGUMENT)
    with library.changed_host() as state:
        # EXCLUSIVE_THREAD is gone since CUDA 8; with MIG on there is only DEFAULT.
        if wanted == ComputeMode.EXCLUSIVE_THREAD or target.mig_enabled:
            raise Refused(Code.NOT_SUPPORTED)
        state.gpus[target.handle.index].compute_mode = wanted


def _mig_mode(_library: SimulatedLibrary, target: Target) -> tuple[int, int | None] | None:
    """Return the mode now, and the one after the next reset; None: no MIG."""
    return None if target.gpu.mig_mode is None else (target.gpu.mig_mode, target.gpu.mig_pending)


def _compute_capability(_library: SimulatedLibrary, target: Target) -> list[int] | None:
    capability = target.model.compute_capability
    return None if capability is None else [int(part) for part in capability.split(".")]


@abi.entry_point("nvmlDeviceGetFieldValues", on=On.DEVICE)
def _field_values(_library: SimulatedLibrary, target: Target, count: Any, values: Any) -> None:
    array = abi.target_of(values)
    for index in range(abi.number(count)):
        value = _field_value(target, array[index].fieldId)
        array[index].nvmlReturn = Code.NOT_SUPPORTED if value is None else Code.SUCCESS
        if value is not None:
            array[index].timestamp = int(now() * 1e6)
            # NVML_VALUE_TYPE_UNSIGNED_INT
            array[index].valueType = 1
            array[index].value.uiVal = value


def _field_value(target: Target, field: int) -> int | None:
    """Return the value of a field of nvmlDeviceGetFieldValues; None: the GPU does not have it."""
    if target.gpu.mig_mode is None:
        return None
    needs_reset = target.model.reset_for_mode_change
    if field == _RESETLESS_MIG:
        return None if needs_reset is None else int(not needs_reset)
    # R580 lists GPU instance profiles with MIG off.
    return 1 if field == _MIG_QUERY_WITHOUT_MIG else None


def _name(_library: SimulatedLibrary, target: Target) -> str:
    if target.instance is None:
        return target.model.name
    from gpushare.sim.mig import device_name

    return f"{target.model.name} MIG {device_name(profile_of(target.model, target.instance), target.instance)}"


def _pci_info(_library: SimulatedLibrary, target: Target) -> dict[str, Any]:
    """Return the fields of nvmlPciInfo_t."""
    domain, bus, rest = target.gpu.pci_bus_id.split(":")
    # The vendor 10DE is NVIDIA; 0: the catalogue does not have the device.
    device = int(target.model.pci_device_ids[0], 16) << 16 | 0x10DE if target.model.pci_device_ids else 0
    return {
        "busIdLegacy": f"{domain[-4:]}:{bus}:{rest}".encode(),
        "busId": target.gpu.pci_bus_id.encode(),
        "domain": int(domain, 16),
        "bus": int(bus, 16),
        "device": int(rest.split(".")[0], 16),
        "pciDeviceId": device,
    }


def _memory(library: SimulatedLibrary, target: Target) -> dict[str, int]:
    memory = activity.memory_of(library.state, target)
    # Version 1 counts reserved memory as used.
    return {"total": memory.total, "used": memory.used + memory.reserved, "free": memory.free}


def _memory_v2(library: SimulatedLibrary, target: Target) -> dict[str, int]:
    memory = activity.memory_of(library.state, target)
    return {"total": memory.total, "reserved": memory.reserved, "used": memory.used, "free": memory.free}


def _core_count(_library: SimulatedLibrary, target: Target) -> int | None:
    # 64 FP32 lanes per SM up to GA100, 128 from GA10x on.
    narrow = target.model.arch in {"pascal", "volta", "turing"} or target.model.compute_capability == "8.0"
    sms = target.model.multiprocessors
    return None if sms is None else sms * (64 if narrow else 128)


def _utilization(library: SimulatedLibrary, target: Target) -> dict[str, int] | None:
    # nvidia-smi shows N/A with MIG on, on the GPU and on its MIG devices.
    if target.mig_enabled:
        return None
    busy = activity.utilization(library.state, target)
    return {"gpu": round(busy), "memory": activity.memory_bandwidth(busy)}


def _energy(library: SimulatedLibrary, target: Target) -> int | None:
    """Return millijoules at idle power: load in the past is not recorded, and a counter may never go back."""
    watts = target.model.power_limit_watts
    if target.model.arch == "pascal" or watts is None:
        return None
    return round(watts * 1000 * activity.IDLE_POWER * max(now() - library.state.created_at, 0.0))


def _power(library: SimulatedLibrary, target: Target) -> int | None:
    """Return milliwatts: idle power without load, and 90 % of the limit under full load (a guess)."""
    watts = target.model.power_limit_watts
    if watts is None:
        return None
    busy = activity.utilization(library.state, target) / 100
    wanted = watts * (activity.IDLE_POWER + (_FULL_LOAD_POWER - activity.IDLE_POWER) * busy)
    return round(1000 * min(wanted, target.gpu.power_cap_watts or watts))


def _power_limit(_library: SimulatedLibrary, target: Target) -> int | None:
    watts = target.gpu.power_cap_watts or target.model.power_limit_watts
    return None if watts is None else 1000 * watts


def _usual_power_limit(_library: SimulatedLibrary, target: Target) -> int | None:
    return None if target.model.power_limit_watts is None else 1000 * target.model.power_limit_watts


def _clock(library: SimulatedLibrary, target: Target, kind: int) -> int | None:
    """Return a clock in MHz: that of the SMs (kind 1) is the highest under load, and a sixth of it when idle."""
    highest = _max_clock(library, target, kind)
    return highest if highest is None or activity.utilization(library.state, target) else highest // 6


def _max_clock(_library: SimulatedLibrary, target: Target, kind: int) -> int | None:
    """Return the highest clock in MHz of the SMs (kind 1); None: those of memory and video are not in the catalogue."""
    return target.model.max_sm_clock_mhz if kind == 1 else None


def _traffic(library: SimulatedLibrary, target: Target, _way: int) -> int:
    """Return KB/s over PCIe, more under load; a guess."""
    return round(20_000 * activity.utilization(library.state, target))


def _cuda_version(library: SimulatedLibrary) -> int:
    """Return the same number as the "Binary version" of the MPS programs; R525 brought CUDA 12."""
    return binary_version(library.state) if library.state.branch >= 525 else 11080


# Entry points that return one value: names, what they are called on, how they hand the value over, what returns it.
_GETTERS: Final[tuple[tuple[str, Kinds, Form, Callable[..., Any]], ...]] = (
    ("nvmlSystemGetDriverVersion", On.NOTHING, Form.TEXT, lambda library: library.state.driver),
    ("nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2", On.NOTHING, Form.NUMBER, _cuda_version),
    ("nvmlDeviceGetCount_v2", On.NOTHING, Form.NUMBER, lambda library: len(library.state.gpus)),
    ("nvmlDeviceGetMigMode", On.GPU, Form.NUMBERS, _mig_mode),
    ("nvmlDeviceGetCudaComputeCapability", On.DEVICE, Form.NUMBERS, _compute_capability),
    # Percent, and the time that they were taken over, in microseconds.
    ("nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization", On.GPU, Form.NUMBERS, lambda *_: (0, 167_000)),
    ("nvmlDeviceGetName", On.DEVICE, Form.TEXT, _name),
    ("nvmlDeviceGetUUID", On.DEVICE, Form.TEXT, lambda _, target: (target.instance or target.gpu).uuid),
    ("nvmlDeviceGetPciInfo_v3", On.DEVICE, Form.FIELDS, _pci_info),
    ("nvmlDeviceGetMinorNumber", On.GPU, Form.NUMBER, lambda _, target: target.handle.index),
    ("nvmlDeviceGetMemoryInfo", On.DEVICE, Form.FIELDS, _memory),
    ("nvmlDeviceGetMemoryInfo_v2", On.DEVICE, Form.VERSIONED_FIELDS, _memory_v2),
    ("nvmlDeviceGetNumGpuCores", On.GPU, Form.NUMBER, _core_count),
    ("nvmlDeviceGetUtilizationRates", On.DEVICE, Form.FIELDS, _utilization),
    ("nvmlDeviceGetTotalEnergyConsumption", On.GPU, Form.NUMBER, _energy),
    ("nvmlDeviceGetPowerUsage", On.GPU, Form.NUMBER, _power),
    ("nvmlDeviceGetEnforcedPowerLimit", On.GPU, Form.NUMBER, _power_limit),
    ("nvmlDeviceGetPowerManagementDefaultLimit", On.GPU, Form.NUMBER, _usual_power_limit),
    (
        "nvmlDeviceGetTemperature",
        On.GPU,
        Form.NUMBER,
        lambda library, target, _: 31 + round(0.4 * activity.utilization(library.state, target)),
    ),
    ("nvmlDeviceGetClockInfo", On.GPU, Form.NUMBER, _clock),
    ("nvmlDeviceGetMaxClockInfo", On.GPU, Form.NUMBER, _max_clock),
    # GPUs of servers have no fan of their own.
    ("nvmlDeviceGetFanSpeed", On.GPU, Form.NUMBER, lambda *_: None),
    ("nvmlDeviceGetPcieThroughput", On.GPU, Form.NUMBER, _traffic),
    (
        "nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons",
        On.GPU,
        Form.NUMBER,
        lambda _, target: target.gpu.slowed,
    ),
    ("nvmlDeviceGetComputeMode", On.DEVICE, Form.NUMBER, lambda _, target: target.gpu.compute_mode),
    ("nvmlDeviceGetPersistenceMode", On.DEVICE, Form.NUMBER, lambda _, target: int(target.gpu.persistence)),
)
for _getter in _GETTERS:
    abi.register_getter(*_getter)


def _register_process_list(kind: str, belongs: Callable[[Resident], bool]) -> None:
    """Register the three versions of an entry point that lists the processes of a kind."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"

    @abi.entry_point(f"{name}_v3", f"{name}_v2", name, on=On.DEVICE)
    def running(library: SimulatedLibrary, target: Target, count: Any, infos: Any) -> None:
        # NVML's PIDs are the host's: in another PID namespace the list is empty.
        residents = activity.residents(library.state, target) if library.state.pid_namespace_is_host else []
        _put_all(count, infos, [_process_info(resident) for resident in residents if belongs(resident)])


# An MPS client is in two lists, its server in the first alone (H200, driver 580.159.04).
_register_process_list("Compute", lambda resident: not resident.graphics)
_register_process_list("MPSCompute", lambda resident: resident.mps_client)
_register_process_list("Graphics", lambda resident: resident.graphics)


def _process_info(resident: Resident) -> dict[str, int]:
    """Return the fields of nvmlProcessInfo_t."""
    gpu_instance, compute_instance = resident.instance_ids or (NO_INSTANCE, NO_INSTANCE)
    return {
        "pid": resident.pid,
        "usedGpuMemory": resident.memory_bytes,
        "gpuInstanceId": gpu_instance,
        "computeInstanceId": NO_INSTANCE if compute_instance is None else compute_instance,
    }


def _put_all(count: Any, array: Any, entries: list[dict[str, int]]) -> None:
    """Write the fields of each entry to a caller's array, and to ``count`` how many entries there are."""
    abi.put_count(count, array, len(entries))
    structs = abi.target_of(array)
    for index, entry in enumerate(entries):
        abi.put_fields(structs[index], entry)


@abi.entry_point("nvmlDeviceGetProcessUtilization", on=On.GPU)
def _process_utilization(library: SimulatedLibrary, target: Target, infos: Any, count: Any, seen_until: Any) -> None:
    """Write a sample of now for each busy process; NOT_FOUND: the GPU is idle, or now is not later than ``seen_until``."""
    if target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    microseconds = int(now() * 1e6)
    percents = activity.sm_percent_by_pid(library.state, target) if library.state.pid_namespace_is_host else {}
    if not percents or microseconds <= abi.number(seen_until):
        raise Refused(Code.NOT_FOUND)
    samples = [
        {"pid": pid, "timeStamp": microseconds, "smUtil": round(busy), "memUtil": activity.memory_bandwidth(busy)}
        for pid, busy in sorted(percents.items())
    ]
    _put_all(count, infos, samples)


# How long a look at real processes holds, in seconds: they end without anybody writing the state.
_SETTLED_FOR: Final = 0.05
_Instance = TypeVar("_Instance", bound=SimulatedGpuInstance)


class SimulatedLibrary:
    """The entry points of NVML on a simulated host.

    ``getattr`` gives a callable for each entry point, as ctypes does; a name that the library does not have raises
    AttributeError, which pynvml turns into FunctionNotFound. ``calls`` counts the calls by entry point.
    """

    # Tells this library from the real one.
    is_simulated: Final = True

    def __init__(self, file: StateFile) -> None:
        self.file: Final = file
        self.calls: Final[Counter[str]] = Counter()
        # By the pointers of nvmlGpmSampleAlloc; None: nothing was sampled yet.
        self.samples: Final[dict[int, GpmSample | None]] = {}
        # How many calls of nvmlInit no nvmlShutdown has answered.
        self.references = 0
        self._state: SimulatedHostState | None = None
        # What `_file_stamp` was when the state was read.
        self._stamp: tuple[int, int, int] | None = None
        self._settled_at = 0.0
        # Whether this call of an entry point has looked at the file: one look is enough.
        self._looked = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "nvmlErrorString":
            # The only entry point that returns no code; ctypes lets its restype be set.
            return lambda code: ERROR_TEXTS.get(abi.number(code), "Unknown Error").encode()
        if name not in ENTRY_POINTS:
            # Few hosts need these: they are loaded at the first name that this file does not have.
            import_module("gpushare.sim.library_mig")
            import_module("gpushare.sim.library_rare")
        if name not in ENTRY_POINTS:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            return self._call(ENTRY_POINTS[name], arguments)

        return call

    @property
    def state(self) -> SimulatedHostState:
        """Return the state of the host as it is now (`clients.settle`): the file is read again only if it has changed."""
        if self._looked and self._state is not None:
            return self._state
        self._looked = True
        stamp = self._file_stamp()
        if self._state is None or stamp != self._stamp:
            self._state, self._stamp = self.file.read() or initial_state(self.file.spec), stamp
            self._settled_at = 0.0
        if time.monotonic() - self._settled_at >= _SETTLED_FOR:
            self._settled_at = time.monotonic()
            if settle_is_due(self._state):
                self._state = self._settled(self._state)
        return self._state

    def _settled(self, state: SimulatedHostState) -> SimulatedHostState:
        """Return the state after `clients.settle`, which is written to the file too."""
        try:
            settled = current.current(self.file)
        except NoPermission:
            # Only its owner may write another user's host: here the state is settled in memory alone.
            from gpushare.sim import clients

            clients.settle(state)
            return state
        self._stamp = self._file_stamp()
        return settled

    @contextmanager
    def changed_host(self) -> Iterator[SimulatedHostState]:
        """Yield the host to change, under the lock of its file; a block that refuses must have changed nothing yet.

        The process dies after the block if the fault ``crash-step`` is due.

        Raises:
            Refused: NO_PERMISSION, every setter needs root; UNKNOWN by the fault ``fail-step``; what the block raises.
        """
        if not self.state.root:
            raise Refused(Code.NO_PERMISSION)
        refused: Refused | None = None
        crashes = False
        with current.changing(self.file) as (state, _):
            # A refusal is raised after the state is written: a refused call counts for the faults too.
            if _count_down(state, "fail_step"):
                refused = Refused(Code.UNKNOWN)
            else:
                try:
                    yield state
                except Refused as raised:
                    refused = raised
                else:
                    crashes = _count_down(state, "crash_step")
        self._state = None
        if refused is not None:
            raise refused
        if crashes:
            # As SIGKILL would end the process: no cleanup, no flush.
            os._exit(137)

    def gpu(self, index: int) -> Target:
        """Return a GPU by its index; Refused: INVALID_ARGUMENT, there is none; GPU_IS_LOST."""
        gpus = self.state.gpus
        if not 0 <= index < len(gpus):
            raise Refused(Code.INVALID_ARGUMENT)
        gpu = gpus[index]
        if gpu.lost:
            raise Refused(Code.GPU_IS_LOST)
        return Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model))

    def _call(self, entry: EntryPoint, arguments: tuple[Any, ...]) -> int:
        """Carry out one call of an entry point; return its nvmlReturn_t."""
        self._looked = False
        try:
            if entry.needs_init and not self.references:
                raise Refused(Code.UNINITIALIZED)
            if entry.on:
                entry.function(self, self._target(entry, arguments[0]), *arguments[1:])
            else:
                entry.function(self, *arguments)
        except Refused as refused:
            return int(refused.code)
        return int(Code.SUCCESS)

    def _target(self, entry: EntryPoint, pointer: Any) -> Target:
        """Return what a handle names; Refused: the entry point does not take it, a fault is set, or the instance is gone."""
        handle = Handle.unpack(abi.pointer_value(pointer))
        if handle.kind not in entry.on:
            # A MIG device where only a whole GPU will do.
            raise Refused(Code.NOT_SUPPORTED if handle.kind is HandleKind.MIG_DEVICE else Code.INVALID_ARGUMENT)
        whole = self.gpu(handle.index)
        # The faults ``not-supported`` and ``refused`` name entry points, in any version.
        for names, code in ((whole.gpu.not_supported, Code.NOT_SUPPORTED), (whole.gpu.refused, Code.NO_PERMISSION)):
            if names and unversioned(entry.name) in map(unversioned, names):
                raise Refused(code)
        if handle.kind is HandleKind.GPU:
            return whole
        if handle.kind is HandleKind.GPU_INSTANCE:
            owners: list[SimulatedGpuInstance] = [*whole.gpu.mig, *whole.gpu.bare]
            owner = first_matching(owners, lambda each: each.gpu_instance_id == handle.gpu_instance)
            return Target(handle, whole.gpu, whole.model, gpu_instance=owner)
        wanted = (handle.gpu_instance, handle.compute_instance)
        instance = first_matching(whole.gpu.mig, lambda each: each.instance_ids == wanted)
        return Target(handle, whole.gpu, whole.model, instance, instance)

    def _file_stamp(self) -> tuple[int, int, int] | None:
        """Return modification time, size and inode of the state file: each write changes one of them; None: there is no file."""
        try:
            status = os.stat(self.file.path)
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _count_down(state: SimulatedHostState, field: str) -> bool:
    """Count down the calls until a fault (``fail_step``, ``crash_step``) hits; return whether it hits this call."""
    calls: int = getattr(state, field)
    setattr(state, field, max(0, calls - 1))
    return calls == 1


def first_matching(instances: Iterable[_Instance], matches: Callable[[_Instance], bool]) -> _Instance:
    """Return the first instance that matches; Refused: INVALID_ARGUMENT, it was destroyed after the handle was taken."""
    for instance in instances:
        if matches(instance):
            return instance
    raise Refused(Code.INVALID_ARGUMENT)
