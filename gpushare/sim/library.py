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
from gpushare.gpu_models import model_of
from gpushare.sim import activity, current
from gpushare.sim import nvml_abi as abi
from gpushare.sim import state as liveness
from gpushare.sim.activity import Resident
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
    unversioned,
)
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedHostState, StateFile, initial_state, now

_EXCLUSIVE_THREAD, _COMPUTE_MODES = 1, 4
_RESETLESS_MIG, _MIG_QUERY_WITHOUT_MIG = 184, 199


@abi.entry_point("nvmlInitWithFlags", "nvmlInit_v2", needs_init=False)
def _init(library: SimulatedLibrary, *_flags: Any) -> None:
    library.forget()
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
    for index, gpu in enumerate(library.state.gpus):
        for instance in gpu.mig if gpu.mig_mode == 1 else []:
            if wanted == instance.uuid:
                library.gpu(index)
                return abi.put_handle(device, Handle(HandleKind.MIG_DEVICE, index, *instance.place))
        if wanted == gpu.uuid:
            return abi.put_handle(device, library.gpu(index).handle)
    raise Refused(Code.NOT_FOUND)


@abi.entry_point("nvmlDeviceSetComputeMode", on=On.GPU)
def _set_compute_mode(library: SimulatedLibrary, target: Target, mode: Any) -> None:
    wanted = abi.number(mode)
    if not 0 <= wanted < _COMPUTE_MODES:
        raise Refused(Code.INVALID_ARGUMENT)
    with library.changed_host() as state:
        # EXCLUSIVE_THREAD is gone since CUDA 8; with MIG on there is only DEFAULT.
        if wanted == _EXCLUSIVE_THREAD or target.mig_enabled:
            raise Refused(Code.NOT_SUPPORTED)
        state.gpus[target.handle.index].compute_mode = wanted


def _mig_mode(_library: SimulatedLibrary, target: Target) -> tuple[int, int] | None:
    """Return the mode now, and the one after the next reset; None: no MIG."""
    mode, next_mode = target.gpu.mig_mode, target.gpu.mig_pending
    return None if mode is None else (mode, mode if next_mode is None else next_mode)


def _compute_capability(_library: SimulatedLibrary, target: Target) -> list[int] | None:
    capability = target.model.compute_capability
    return None if capability is None else [int(part) for part in capability.split(".")]


@abi.entry_point("nvmlDeviceGetFieldValues", on=On.DEVICE)
def _field_values(_library: SimulatedLibrary, target: Target, count: Any, values: Any) -> None:
    array = abi.target_of(values)
    for index in range(abi.number(count)):
        value = _field_value(target.gpu, array[index].fieldId, needs_reset=target.model.reset_for_mode_change)
        array[index].nvmlReturn = Code.NOT_SUPPORTED if value is None else Code.SUCCESS
        if value is not None:
            array[index].timestamp = int(now() * 1e6)
            # NVML_VALUE_TYPE_UNSIGNED_INT
            array[index].valueType = 1
            array[index].value.uiVal = value


def _field_value(gpu: SimulatedGpu, field: int, *, needs_reset: bool | None) -> int | None:
    """Return the value of a field of nvmlDeviceGetFieldValues; None: the GPU does not have it."""
    if gpu.mig_mode is None:
        return None
    if field == _RESETLESS_MIG:
        return None if needs_reset is None else int(not needs_reset)
    # R580 lists GPU instance profiles with MIG off.
    return 1 if field == _MIG_QUERY_WITHOUT_MIG else None


def _name(_library: SimulatedLibrary, target: Target) -> str:
    profile = None if target.instance is None else target.model.profile(target.instance.profile)
    if target.instance is None or profile is None:
        return target.model.name
    from gpushare.sim.mig import device_name

    return f"{target.model.name} MIG {device_name(profile, target.instance)}"


def _pci_info(_library: SimulatedLibrary, target: Target) -> dict[str, Any]:
    """Return the fields of nvmlPciInfo_t."""
    domain, bus, rest = target.gpu.pci_bus_id.split(":")
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
    total, reserved, used = activity.memory_of(library.state, target)
    # Version 1 counts reserved memory as used.
    return {"total": total, "used": used + reserved, "free": total - used - reserved}


def _memory_v2(library: SimulatedLibrary, target: Target) -> dict[str, int]:
    total, reserved, used = activity.memory_of(library.state, target)
    return {"total": total, "reserved": reserved, "used": used, "free": total - used - reserved}


def _cores(_library: SimulatedLibrary, target: Target) -> int | None:
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
    """Return milliwatts: idle power, and the rest of the limit by load."""
    watts = target.model.power_limit_watts
    if watts is None:
        return None
    busy = activity.utilization(library.state, target) / 100
    wanted = watts * (activity.IDLE_POWER + (0.9 - activity.IDLE_POWER) * busy)
    return round(1000 * min(wanted, target.gpu.power_cap_watts or watts))


def _power_limit(_library: SimulatedLibrary, target: Target) -> int | None:
    watts = target.gpu.power_cap_watts or target.model.power_limit_watts
    return None if watts is None else 1000 * watts


def _usual_power_limit(_library: SimulatedLibrary, target: Target) -> int | None:
    return None if target.model.power_limit_watts is None else 1000 * target.model.power_limit_watts


def _clock(library: SimulatedLibrary, target: Target, kind: int) -> int | None:
    """Return MHz of the SMs (1): the highest under load, a sixth of it idle. Others are not published."""
    most = target.model.max_sm_clock_mhz
    if kind != 1 or most is None:
        return None
    return most if activity.utilization(library.state, target) else most // 6


def _traffic(library: SimulatedLibrary, target: Target, _way: int) -> int:
    """Return KB/s over PCIe, more under load; a guess."""
    return round(20_000 * activity.utilization(library.state, target))


def _cuda_version(library: SimulatedLibrary) -> int:
    """Return the same number as the "Binary version" of the MPS programs; R525 brought CUDA 12."""
    return binary_version(library.state) if library.state.branch >= 525 else 11080


# Entry points that hand one value over: names, what they are called on, how the value goes, where it is from.
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
    ("nvmlDeviceGetNumGpuCores", On.GPU, Form.NUMBER, _cores),
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
    (
        "nvmlDeviceGetMaxClockInfo",
        On.GPU,
        Form.NUMBER,
        lambda _, target, kind: target.model.max_sm_clock_mhz if kind == 1 else None,
    ),
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


# MPS clients are in the compute list and in the MPS list, their server in the compute list
# (H200, driver 580.159.04).
_LISTS: Final[dict[str, Callable[[Resident], bool]]] = {
    "Compute": lambda entry: not entry.graphics,
    "Graphics": lambda entry: entry.graphics,
    "MPSCompute": lambda entry: entry.mps_client,
}


def _register_process_list(kind: str, belongs: Callable[[Resident], bool]) -> None:
    """Register the three versions of an entry point that lists the processes of a kind."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"

    @abi.entry_point(f"{name}_v3", f"{name}_v2", name, on=On.DEVICE)
    def running(library: SimulatedLibrary, target: Target, count: Any, infos: Any) -> None:
        # NVML's PIDs are the host's: in another PID namespace the list is empty.
        seen = activity.residents(library.state, target) if library.state.pid_namespace_is_host else []
        _fill(count, infos, [_process_info(entry) for entry in seen if belongs(entry)])


for _kind, _wanted in _LISTS.items():
    _register_process_list(_kind, _wanted)


def _process_info(resident: Resident) -> dict[str, int]:
    """Return the fields of nvmlProcessInfo_t."""
    return {
        "pid": resident.pid,
        "usedGpuMemory": resident.memory_bytes,
        "gpuInstanceId": NO_INSTANCE if resident.gpu_instance_id is None else resident.gpu_instance_id,
        "computeInstanceId": NO_INSTANCE if resident.compute_instance_id is None else resident.compute_instance_id,
    }


def _fill(count: Any, infos: Any, entries: list[dict[str, int]]) -> None:
    """Fill a caller's array; tell the size needed when it is too small (INSUFFICIENT_SIZE)."""
    if count is None:
        raise Refused(Code.INVALID_ARGUMENT)
    room = abi.number(abi.target_of(count)) if infos is not None else 0
    abi.put(count, len(entries))
    if room < len(entries):
        raise Refused(Code.INSUFFICIENT_SIZE)
    if entries:
        for index, entry in enumerate(entries):
            abi.put_fields(abi.target_of(infos)[index], entry)


@abi.entry_point("nvmlDeviceGetProcessUtilization", on=On.GPU)
def _process_utilization(library: SimulatedLibrary, target: Target, infos: Any, count: Any, seen_until: Any) -> None:
    _fill(count, infos, _utilization_samples(library, target, abi.number(seen_until)))


def _utilization_samples(library: SimulatedLibrary, target: Target, seen_until: int) -> list[dict[str, int]]:
    """Return the samples newer than a time in microseconds.

    Raises:
        Refused: NOT_SUPPORTED with MIG on; NOT_FOUND when there is none, the GPU is idle.
    """
    if target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    stamp = int(now() * 1e6)
    percents = activity.samples(library.state, target) if library.state.pid_namespace_is_host else {}
    if not percents or stamp <= seen_until:
        raise Refused(Code.NOT_FOUND)
    return [
        {"pid": pid, "timeStamp": stamp, "smUtil": round(busy), "memUtil": activity.memory_bandwidth(busy)}
        for pid, busy in sorted(percents.items())
    ]


# Entry points that few hosts need: loaded at the first name that the others do not have.
RARE_ROOMS: Final = ("library_mig", "library_rare")
# How long a look at real processes holds, in seconds: they end without anybody writing the state.
_SETTLED_FOR: Final = 0.05
_SUCCESS: Final = int(Code.SUCCESS)
_Instance = TypeVar("_Instance", bound=SimulatedGpuInstance)


class SimulatedLibrary:
    """The entry points of NVML on a simulated host.

    ``getattr`` gives a callable for each entry point, as ctypes does; a name that the library does
    not have raises AttributeError, which pynvml turns into FunctionNotFound. ``calls`` counts the
    calls by entry point.
    """

    # Tells this library from the real one.
    is_simulated: Final = True

    def __init__(self, file: StateFile) -> None:
        self.file: Final = file
        self.calls: Final[Counter[str]] = Counter()
        # Samples of nvmlGpmSampleAlloc by pointer value: utilization and bandwidth in percent that they saw.
        self.samples: Final[dict[int, tuple[float, float] | None]] = {}
        self.references = 0
        self._state: SimulatedHostState | None = None
        # Whole GPUs by index, as the last state has them.
        self._whole: dict[int, Target] = {}
        self._path: Final = os.fspath(file.path)
        self._stamp: tuple[int, int, int] | None = None
        self._settled_at = 0.0
        # One call looks at the file once.
        self._in_call = self._looked = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "nvmlErrorString":
            # The only entry point that returns no code; ctypes lets its restype be set.
            return lambda code: ERROR_TEXTS.get(abi.number(code), "Unknown Error").encode()
        entry = ENTRY_POINTS.get(name) or _rare_entry_point(name)
        if entry is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            return self._call(entry, arguments)

        return call

    @property
    def state(self) -> SimulatedHostState:
        """Return the host's state: read again when the file changed, and what time did to it settled."""
        if self._looked and self._state is not None:
            return self._state
        self._looked = self._in_call
        stamp = self._file_stamp()
        at = time.monotonic()
        if self._state is None or stamp != self._stamp:
            self._state, self._stamp = self.file.read() or initial_state(self.file.spec), stamp
        elif at - self._settled_at < _SETTLED_FOR:
            return self._state
        self._settled_at = at
        if liveness.due(self._state):
            self._settle()
        return self._state

    def _settle(self) -> None:
        """Let what is due on the host happen: processes that ended, and contexts that are made now."""
        try:
            self._state = current.current(self.file)
            self._stamp = self._file_stamp()
        except NoPermission:
            # Another user's host: what happened is seen here, and written by its owner.
            if self._state is not None:
                from gpushare.sim import clients

                clients.settle(self._state)

    def forget(self) -> None:
        """Read the state again at the next call."""
        self._state = None

    @contextmanager
    def changed_host(self) -> Iterator[SimulatedHostState]:
        """Yield the host to change, under the lock of its file; a block that refuses must have changed nothing yet.

        Raises:
            Refused: NO_PERMISSION, every setter needs root; UNKNOWN by the fault ``fail-step``; what the block raises.
        """
        if not self.state.root:
            raise Refused(Code.NO_PERMISSION)
        refused: Refused | None = None
        crashes = False
        with current.changing(self.file) as (state, _):
            # A refused call counts for the faults too, so what they count is written in either case.
            if step_due(state, "fail_step"):
                refused = Refused(Code.UNKNOWN)
            else:
                try:
                    yield state
                except Refused as raised:
                    refused = raised
                else:
                    crashes = step_due(state, "crash_step")
        self.forget()
        if refused is not None:
            raise refused
        if crashes:
            # As SIGKILL would end the process: no cleanup, no flush.
            os._exit(137)

    def gpu(self, index: int) -> Target:
        """Return a GPU by its index.

        Raises:
            Refused: INVALID_ARGUMENT, there is none; GPU_IS_LOST.
        """
        gpus = self.state.gpus
        if not 0 <= index < len(gpus):
            raise Refused(Code.INVALID_ARGUMENT)
        gpu, whole = gpus[index], self._whole.get(index)
        if gpu.lost:
            raise Refused(Code.GPU_IS_LOST)
        if whole is None or whole.gpu is not gpu:
            whole = self._whole[index] = Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model))
        return whole

    def _call(self, entry: EntryPoint, arguments: tuple[Any, ...]) -> int:
        """Carry out one call of an entry point; return its nvmlReturn_t."""
        self._in_call, self._looked = True, False
        try:
            if entry.needs_init and not self.references:
                raise Refused(Code.UNINITIALIZED)
            if entry.on:
                entry.function(self, self._target(entry, arguments[0]), *arguments[1:])
            else:
                entry.function(self, *arguments)
        except Refused as refused:
            return int(refused.code)
        finally:
            self._in_call = self._looked = False
        return _SUCCESS

    def _target(self, entry: EntryPoint, pointer: Any) -> Target:
        """Return what a handle names; Refused: the entry point does not take it, or a fault is set."""
        handle = Handle.unpack(abi.pointer_value(pointer))
        if handle.kind not in entry.on:
            # A MIG device where only a whole GPU will do.
            raise Refused(Code.NOT_SUPPORTED if handle.kind is HandleKind.MIG_DEVICE else Code.INVALID_ARGUMENT)
        whole = self.gpu(handle.index)
        for refused, code in ((whole.gpu.not_supported, Code.NOT_SUPPORTED), (whole.gpu.refused, Code.NO_PERMISSION)):
            if refused and unversioned(entry.name) in map(unversioned, refused):
                raise Refused(code)
        if handle.kind is HandleKind.GPU:
            return whole
        devices = whole.gpu.mig if whole.mig_enabled else []
        if handle.kind is HandleKind.GPU_INSTANCE:
            owners: list[SimulatedGpuInstance] = [*devices, *(whole.gpu.bare if whole.mig_enabled else [])]
            owner = first_matching(owners, lambda each: each.gpu_instance_id == handle.gpu_instance)
            return Target(handle, whole.gpu, whole.model, gpu_instance=owner)
        place = (handle.gpu_instance, handle.compute_instance)
        instance = first_matching(devices, lambda each: each.place == place)
        return Target(handle, whole.gpu, whole.model, instance, instance)

    def _file_stamp(self) -> tuple[int, int, int] | None:
        """Return what changes when the state file is written; None: there is none."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def step_due(state: SimulatedHostState, counter: str) -> bool:
    """Count one call down for a fault (``fail_step``, ``crash_step``); return whether it is this one that it hits."""
    calls = getattr(state, counter)
    if calls > 0:
        setattr(state, counter, calls - 1)
    return bool(calls == 1)


def _rare_entry_point(name: str) -> EntryPoint | None:
    for room in RARE_ROOMS:
        import_module(f"gpushare.sim.{room}")
    return ENTRY_POINTS.get(name)


def first_matching(instances: Iterable[_Instance], matches: Callable[[_Instance], bool]) -> _Instance:
    """Return the first instance that matches; INVALID_ARGUMENT: it was destroyed after the caller took the handle."""
    for instance in instances:
        if matches(instance):
            return instance
    raise Refused(Code.INVALID_ARGUMENT)
