"""NVML. The only importer of pynvml.

Every call goes through `NvmlReader.ask`, which turns return codes into None (unknown) or one of our errors. NVML is
initialized at the first call, not at import.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint, c_ulonglong
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from gpushare.base.errors import (
    DriverNotLoaded,
    GpuLost,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    NvmlMissing,
    OperationFailed,
    TimedOut,
)
from gpushare.base.model import ComputeMode, Gpu, GpuProcess, GpuSensors, MigInstance

# nvmlReturn_t (nvml.h), as literals because pynvml is imported later.
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
LIB_RM_VERSION_MISMATCH: Final = 18
IN_USE: Final = 19
NO_DATA: Final = 21
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26
GPU_NOT_FOUND: Final = 28
# These mean unknown: None, not an error.
CANNOT_TELL: Final = frozenset(
    {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)


def nvml_error(code: int, text: str, gpu: str | None = None) -> GpushareError:
    """Return the error for an nvmlReturn_t; ``text`` is nvmlErrorString's."""
    where = f"GPU {gpu}: " if gpu is not None else ""
    doctor = "see what is wrong: gpushare doctor"
    if code == NOT_SUPPORTED:
        return NotSupported(f"{where}the driver does not support it ({text})", doctor, gpu=gpu)
    if code == NO_PERMISSION:
        return NoPermission(
            f"{where}the driver refuses: {text}",
            "run it as root: sudo gpushare ...; if you are root, see why: sudo dmesg | grep -i nvrm",
            gpu=gpu,
        )
    if code in {NOT_FOUND, GPU_NOT_FOUND}:
        return NotFound(f"{where}{text}", "see which GPUs are there: gpushare status", gpu=gpu)
    if code == DRIVER_NOT_LOADED:
        return DriverNotLoaded(
            "the NVIDIA driver is not loaded", "load it: sudo modprobe nvidia; then: gpushare doctor"
        )
    if code == TIMEOUT:
        return TimedOut(f"{where}the driver did not answer ({text})", doctor, gpu=gpu)
    if code == LIBRARY_NOT_FOUND:
        return NvmlMissing(
            "libnvidia-ml.so.1 is not on this machine",
            "install the NVIDIA driver, or try a simulated host: gpushare --host sim:h200 status",
        )
    if code == GPU_IS_LOST:
        return GpuLost(
            f"{where}the GPU is lost: it fell off the bus",
            "see: sudo dmesg | grep -i xid; a reboot may bring it back",
            gpu=gpu,
        )
    if code == LIB_RM_VERSION_MISMATCH:
        return OperationFailed(
            "the NVIDIA library and the kernel driver have different versions",
            "the driver was updated while it was loaded: reboot, or unload and load it again",
            code="driver_mismatch",
        )
    if code == IN_USE:
        return InUse(f"{where}in use by another client", "see who: gpushare status", gpu=gpu)
    return OperationFailed(f"{where}NVML answers {code}: {text}", doctor, gpu=gpu, code="nvml")


# How well two GPUs are connected at best, see `NvmlReader.closeness`.
NVLINK: Final = 6
# The nvmlClocksEventReasons that cost speed against the user's will; the others are settings, or an idle GPU.
POWER_LIMIT: Final = "power limit"
_SLOWED: Final = ((0x04, POWER_LIMIT), (0x08, "hardware"), (0x20, "heat"), (0x40, "heat"), (0x80, "power supply"))
# NVML_P2P_STATUS_OK; the bits of a word of nvmlDeviceGetCpuAffinity.
_P2P_OK: Final = 0
_WORD_BITS: Final = 64
_NO_INSTANCE: Final = 0xFFFFFFFF
_NO_VALUE: Final = 0xFFFFFFFFFFFFFFFF
# One C call instead of two: ask again only if a GPU has more processes than this.
_PROCESS_ROOM: Final = 64
_SAMPLE_ROOM: Final = 256
# Older samples are about finished work.
_SAMPLE_WINDOW_SECONDS: Final = 2.0
_MOST_ROOM: Final = 2**16


class WorkSample(NamedTuple):
    """How much of the SMs a process used until a moment (seconds since 1970)."""

    pid: int
    at: float
    sm_percent: int


def read_processes(nvml: Any, name: str, handle: Any) -> list[GpuProcess]:
    """Return the processes of one list, by its entry point's name: their PIDs, memory and instances.

    Raises:
        pynvml.NVMLError: as the driver answers.
    """
    function = nvml._nvmlGetFunctionPointer(name)
    rows = _query(nvml, nvml.c_nvmlProcessInfo_v2_t, _PROCESS_ROOM, lambda count, array: function(handle, count, array))
    return [
        GpuProcess(
            pid=row.pid,
            memory_used_bytes=None if row.usedGpuMemory == _NO_VALUE else row.usedGpuMemory,
            gpu_instance_id=None if row.gpuInstanceId == _NO_INSTANCE else row.gpuInstanceId,
            compute_instance_id=None if row.computeInstanceId == _NO_INSTANCE else row.computeInstanceId,
        )
        for row in rows
    ]


def _query(nvml: Any, kind: Any, room: int, call: Callable[[Any, Any], int]) -> list[Any]:
    """Return the C structures ``kind`` that a call writes; it is repeated with more room than ``room`` of them until all fit."""
    while True:
        count, rows = c_uint(room), (kind * room)()
        code = call(byref(count), rows)
        if code != INSUFFICIENT_SIZE or room >= _MOST_ROOM:
            nvml._nvmlCheckReturn(code)
            return list(rows[: count.value])
        room = max(2 * room, count.value + 16)


def read_utilization(nvml: Any, handle: Any, since_us: int) -> list[WorkSample]:
    """Return every sample since a time in microseconds, in no order (nvmlDeviceGetProcessUtilization).

    Processes that ended meanwhile are among them; idle ones are not.

    Raises:
        pynvml.NVMLError: as the driver answers; NotFound when there is no sample.
    """
    function = nvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization")
    since = c_ulonglong(since_us)
    rows = _query(
        nvml,
        nvml.c_nvmlProcessUtilizationSample_t,
        _SAMPLE_ROOM,
        lambda count, array: function(handle, array, count, since),
    )
    # Some drivers report values above 100 % for a process that just ended.
    return [WorkSample(row.pid, row.timeStamp / 1e6, row.smUtil) for row in rows if row.pid and row.smUtil <= 100]


T = TypeVar("T")


class NvmlReader:
    """Reads GPUs through NVML: static facts once, the rest at each sweep.

    ``library`` replaces libnvidia-ml.so.1 below the real bindings: an object whose methods have the names of the C entry
    points. None is the real library.
    """

    def __init__(self, library: object | None = None) -> None:
        self._library = library
        self._bindings: Any = None
        self._handles: dict[int, Any] = {}
        self._static: dict[int, dict[str, Any]] = {}
        # Of each GPU, as `mig.driver` has read them: they do not change until `restart`.
        self.mig_profiles: Final[dict[int, Any]] = {}

    # -- the choke point ---------------------------------------------------------------------------

    def ask(self, call: Callable[[Any], T], gpu: str | None = None) -> T | None:
        """Return NVML's answer, or None if the driver does not know (NotSupported and the like).

        Raises:
            GpushareError: as `nvml_error` says; a lost GPU is GpuLost.
        """
        bindings = self._api()
        try:
            return call(bindings)
        except bindings.NVMLError as error:
            if error.value in CANNOT_TELL:
                return None
            raise nvml_error(error.value, str(error), gpu) from None
        except UnicodeDecodeError:
            # A failing GPU answers with garbage instead of a name.
            return None

    def demand(self, call: Callable[[Any], T], gpu: str | None = None) -> T:
        """Return NVML's answer; here NotSupported and NoPermission are errors, too."""
        bindings = self._api()
        try:
            return call(bindings)
        except bindings.NVMLError as error:
            raise nvml_error(error.value, str(error), gpu) from None
        except UnicodeDecodeError:
            where = "" if gpu is None else f"GPU {gpu}: "
            raise OperationFailed(
                f"{where}NVML answers with garbage instead of text",
                "see what is wrong: gpushare doctor",
                gpu=gpu,
                code="nvml",
            ) from None

    def _api(self) -> Any:
        """Return the bindings, initialized, with this reader's library."""
        if self._bindings is None:
            import pynvml

            self._use_own_library(pynvml)
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise nvml_error(error.value, str(error)) from None
            self._bindings, self._library = pynvml, pynvml.nvmlLib
        elif self._bindings.nvmlLib is not self._library:
            # Another reader was used meanwhile.
            self._use_own_library(self._bindings)
        return self._bindings

    def _use_own_library(self, bindings: Any) -> None:
        """Make pynvml call this reader's library: it has one for all readers of the process.

        A reader without a library takes the one that pynvml has loaded, unless that is a simulated host's.
        """
        if self._library is not None or hasattr(bindings.nvmlLib, "is_simulated"):
            bindings.nvmlLib = self._library
            bindings._nvmlGetFunctionPointer_cache.clear()

    def restart(self) -> None:
        """Shut NVML down and drop every handle; the next call initializes it again.

        For MIG changes: handles on MIG devices keep their instances in use (go-nvml issue 146), the list of MIG devices
        is stale until then, and a mode change may reset the GPU (nvml.h, nvmlDeviceSetMigMode).
        """
        self._handles.clear()
        self._static.clear()
        self.mig_profiles.clear()
        if self._bindings is not None:
            bindings = self._api()
            with contextlib.suppress(bindings.NVMLError):
                bindings.nvmlShutdown()
            self._bindings = None

    # -- the host ----------------------------------------------------------------------------------

    def driver_version(self) -> str | None:
        version = self.ask(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        return None if version is None else str(version)

    def count(self) -> int:
        """Return the number of GPUs, lost ones included (nvmlDeviceGetCount_v2)."""
        return int(self.demand(lambda nvml: nvml.nvmlDeviceGetCount()))

    def identities(self) -> tuple[Gpu, ...]:
        """Return index, UUID, name, PCI bus id and MIG instances of every GPU."""

        def read(index: int) -> Gpu:
            return Gpu(index=index, **self._static_fields(index), **self._mig_fields(index))

        return tuple(self._gpu_or_error(index, read) for index in range(self.count()))

    def sweep(self) -> tuple[Gpu, ...]:
        """Return every GPU with memory, utilization, modes and processes.

        A GPU that does not answer has its error; the others are complete.
        """
        return tuple(self._gpu_or_error(index, self._read_gpu) for index in range(self.count()))

    def gpu(self, index: int) -> Gpu:
        """Return one GPU as `sweep` does."""
        return self._gpu_or_error(index, self._read_gpu)

    def _gpu_or_error(self, index: int, read: Callable[[int], Gpu]) -> Gpu:
        """Return a GPU as ``read`` returns it; one that does not answer has its error, and what does not change of it."""
        try:
            return read(index)
        except (DriverNotLoaded, NvmlMissing):
            raise
        except GpushareError as error:
            return Gpu(index=index, error=error.message, **self._static.get(index, {}))

    # -- one GPU -----------------------------------------------------------------------------------

    def handle(self, index: int) -> Any:
        """Return the cached NVML handle of a GPU (nvmlDeviceGetHandleByIndex_v2)."""
        if index not in self._handles:
            self._handles[index] = self.demand(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(index), str(index))
        return self._handles[index]

    def _value(self, index: int, name: str) -> Any:
        """Return the answer of a getter with only a handle, or None when unknown."""
        handle = self.handle(index)
        return self.ask(lambda nvml: getattr(nvml, name)(handle), str(index))

    def _static_fields(self, index: int) -> dict[str, Any]:
        """Return what does not change of a GPU (UUID, name, PCI bus id), read once."""
        if index not in self._static:
            handle = self.handle(index)
            self._static[index] = {
                "uuid": nvml_text(self._value(index, "nvmlDeviceGetUUID")),
                "name": nvml_text(self._value(index, "nvmlDeviceGetName")),
                "pci_bus_id": nvml_text(self.ask(lambda nvml: nvml.nvmlDeviceGetPciInfo(handle).busId, str(index))),
            }
        return self._static[index]

    def _mig_fields(self, index: int) -> dict[str, Any]:
        """Return the MIG mode of a GPU and its MIG instances."""
        handle = self.handle(index)

        def read_mode(nvml: Any) -> Sequence[int]:
            """Return the current and the pending mode; empty: NotSupported, which means that this GPU has no MIG."""
            try:
                return tuple(nvml.nvmlDeviceGetMigMode(handle))
            except nvml.NVMLError as error:
                if error.value != NOT_SUPPORTED:
                    raise
                return ()

        mode = self.ask(read_mode, str(index))
        enabled = bool(mode[0]) if mode else None
        return {
            "mig_capable": None if mode is None else bool(mode),
            "mig_enabled": enabled,
            "mig_pending": bool(mode[1]) if mode else None,
            **(self._mig_instances(index) if enabled else {}),
        }

    def _read_gpu(self, index: int) -> Gpu:
        """Return a GPU with all that `sweep` reads."""
        handle, gpu = self.handle(index), str(index)
        facts, modes = self._static_fields(index), self._mig_fields(index)
        memory = self._memory(handle, gpu)
        rates = self._value(index, "nvmlDeviceGetUtilizationRates")
        return Gpu(
            index=index,
            **facts,
            **modes,
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_reserved_bytes=getattr(memory, "reserved", None),
            utilization_percent=None if rates is None else int(rates.gpu),
            compute_mode=self.compute_mode(index),
            processes=self.processes(index),
        )

    def _memory(self, handle: Any, gpu: str) -> Any:
        """Return nvmlMemory_v2: in v1, "used" includes the reserved part, unlike in nvidia-smi."""
        memory = self.ask(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2), gpu)
        return memory if memory is not None else self.ask(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle), gpu)

    def compute_mode(self, index: int) -> ComputeMode | None:
        """Return the compute mode (nvmlDeviceGetComputeMode; ``nvidia-smi --query-gpu=compute_mode``)."""
        mode = self._value(index, "nvmlDeviceGetComputeMode")
        # A newer driver may have other modes.
        return ComputeMode(mode) if mode in set(ComputeMode) else None

    def set_compute_mode(self, index: int, mode: ComputeMode) -> None:
        """Set the compute mode (nvmlDeviceSetComputeMode; ``nvidia-smi -i N -c MODE``). Root only."""
        handle = self.handle(index)
        self.demand(lambda nvml: nvml.nvmlDeviceSetComputeMode(handle, int(mode)), str(index))

    def persistence(self, index: int) -> bool | None:
        """Return whether persistence mode is on (nvmlDeviceGetPersistenceMode)."""
        mode = self._value(index, "nvmlDeviceGetPersistenceMode")
        return None if mode is None else bool(mode)

    def pci_ids(self, index: int) -> tuple[int | None, int | None]:
        """Return the PCI ids of a GPU and of its subsystem, device above vendor: 0x233510DE (nvmlDeviceGetPciInfo).

        mig-parted's ``device-filter`` compares them. None is unknown (NVML answers 0 or nothing).
        """
        info = self._value(index, "nvmlDeviceGetPciInfo")
        if info is None:
            return None, None
        return int(info.pciDeviceId) or None, int(info.pciSubSystemId) or None

    def compute_capability(self, index: int) -> tuple[int, int] | None:
        """Return the CUDA compute capability (nvmlDeviceGetCudaComputeCapability)."""
        value = self._value(index, "nvmlDeviceGetCudaComputeCapability")
        return None if value is None else (int(value[0]), int(value[1]))

    def multiprocessors(self, index: int, compute_capability: tuple[int, int] | None) -> int | None:
        """Return the SMs of a GPU (nvmlDeviceGetNumGpuCores by the cores of one SM), or None when unknown.

        Not from the largest MIG profile, which has 98 of the 108 on an A100.
        """
        if compute_capability is None:
            return None
        cores_per_sm = cores_per_multiprocessor(compute_capability)
        if cores_per_sm is None:
            return None
        cores = self._value(index, "nvmlDeviceGetNumGpuCores")
        return None if cores is None else int(cores) // cores_per_sm

    def closeness(self, index: int, other: int) -> int:
        """Return how well two GPUs are connected, from 0 (by the link between two CPUs, or unknown) to 6 (NVLink).

        By nvmlDeviceGetP2PStatus (NVLINK) and nvmlDeviceGetTopologyCommonAncestor, as `nvidia-smi topo -m` shows them.
        """
        first, second = self.handle(index), self.handle(other)
        status = self.ask(
            lambda nvml: nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK), str(index)
        )
        if status == _P2P_OK:
            return NVLINK
        level = self.ask(lambda nvml: nvml.nvmlDeviceGetTopologyCommonAncestor(first, second), str(index))
        # From the same board (0) over bridges, a host bridge (30) and a NUMA node (40) to the whole system (50).
        return 0 if level is None else max(0, 5 - int(level) // 10)

    def cpus(self, index: int) -> frozenset[int] | None:
        """Return the CPUs next to a GPU (nvmlDeviceGetCpuAffinity), or None when unknown."""
        handle = self.handle(index)
        words = max(os.sched_getaffinity(0)) // _WORD_BITS + 1
        masks = self.ask(lambda nvml: list(nvml.nvmlDeviceGetCpuAffinity(handle, words)), str(index))
        if masks is None:
            return None
        return frozenset(
            word * _WORD_BITS + bit
            for word, mask in enumerate(masks)
            for bit in range(_WORD_BITS)
            if int(mask) >> bit & 1
        )

    def virtualization_mode(self, index: int) -> int | None:
        """Return NVML_GPU_VIRTUALIZATION_MODE_* (nvmlDeviceGetVirtualizationMode)."""
        mode = self._value(index, "nvmlDeviceGetVirtualizationMode")
        return None if mode is None else int(mode)

    def minor_number(self, index: int) -> int | None:
        """Return the N of ``/dev/nvidiaN`` (nvmlDeviceGetMinorNumber); it need not be the index."""
        minor: int | None = self._value(index, "nvmlDeviceGetMinorNumber")
        return minor

    def energy_joules(self, index: int) -> float | None:
        """Return the energy used since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption, since Volta)."""
        millijoules = self._value(index, "nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def with_power(self, gpu: Gpu) -> Gpu:
        """Return a GPU with its power and the limit in force; as it is if it does not answer."""
        try:
            power = self._watts(gpu.index, "nvmlDeviceGetPowerUsage")
            limit = self._watts(gpu.index, "nvmlDeviceGetEnforcedPowerLimit")
        except GpushareError:
            return gpu
        return replace(gpu, power_watts=power, power_limit_watts=limit)

    def usual_power_limit_watts(self, index: int) -> float | None:
        """Return the power limit that a GPU has without a cap (nvmlDeviceGetPowerManagementDefaultLimit)."""
        return self._watts(index, "nvmlDeviceGetPowerManagementDefaultLimit")

    def _watts(self, index: int, name: str) -> float | None:
        """Return the answer of a getter of milliwatts in watts; None: unknown."""
        milliwatts = self._value(index, name)
        return None if milliwatts is None else milliwatts / 1000

    def sensors(self, index: int) -> GpuSensors:
        """Return power, temperature, clocks, fan, video engines, and what slows a GPU down.

        nvmlDeviceGetPowerUsage, EnforcedPowerLimit, Temperature, ClockInfo, MaxClockInfo, FanSpeed, EncoderUtilization,
        DecoderUtilization; see `slowed_by`.

        Raises:
            GpushareError: the GPU does not answer.
        """
        handle, gpu = self.handle(index), str(index)

        def ask_kind(name: str, kind: str) -> int | None:
            """Return the answer of a getter with a handle and a kind, a constant of NVML: which sensor, or which clock."""
            return self.ask(lambda nvml: int(getattr(nvml, name)(handle, getattr(nvml, kind))), gpu)

        def engine_percent(name: str) -> int | None:
            """Return how busy a video engine is."""
            answer = self._value(index, name)
            return None if answer is None else int(answer[0])

        return GpuSensors(
            power_watts=self._watts(index, "nvmlDeviceGetPowerUsage"),
            power_limit_watts=self._watts(index, "nvmlDeviceGetEnforcedPowerLimit"),
            temperature_celsius=ask_kind("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            sm_clock_mhz=ask_kind("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            sm_clock_max_mhz=ask_kind("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
            memory_clock_mhz=ask_kind("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
            fan_percent=self._value(index, "nvmlDeviceGetFanSpeed"),
            encoder_percent=engine_percent("nvmlDeviceGetEncoderUtilization"),
            decoder_percent=engine_percent("nvmlDeviceGetDecoderUtilization"),
            slowed_by=self.slowed_by(index),
        )

    def slowed_by(self, index: int) -> tuple[str, ...] | None:
        """Return what slows a GPU down, in words; None: unknown.

        nvmlDeviceGetCurrentClocksEventReasons (before R535: CurrentClocksThrottleReasons).
        """
        reasons = self._value(index, "nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._value(index, "nvmlDeviceGetCurrentClocksThrottleReasons")
        if reasons is None:
            return None
        return tuple(dict.fromkeys(word for bit, word in _SLOWED if int(reasons) & bit))

    def pcie_traffic(self, index: int) -> tuple[int | None, int | None]:
        """Return what a GPU receives and sends over PCIe, in bytes per second (nvmlDeviceGetPcieThroughput).

        NVML measures for 20 ms each way, and the call lasts that long.
        """
        handle = self.handle(index)

        def bytes_per_second(counter: str) -> int | None:
            """Return the answer for a counter, a constant of NVML, which is in KB/s."""
            rate = self.ask(lambda nvml: nvml.nvmlDeviceGetPcieThroughput(handle, getattr(nvml, counter)), str(index))
            return None if rate is None else int(rate) * 1000

        return bytes_per_second("NVML_PCIE_UTIL_RX_BYTES"), bytes_per_second("NVML_PCIE_UTIL_TX_BYTES")

    # -- MIG ---------------------------------------------------------------------------------------

    def max_mig_devices(self, index: int) -> int | None:
        """Return the maximum number of MIG devices of the GPU (nvmlDeviceGetMaxMigDeviceCount)."""
        most: int | None = self._value(index, "nvmlDeviceGetMaxMigDeviceCount")
        return most

    def _mig_instances(self, index: int) -> dict[str, Any]:
        """Return the MIG instances of a GPU, and whether the driver hides some from this user."""
        handle, gpu = self.handle(index), str(index)
        most = self.max_mig_devices(index)
        # None, here and below: the driver does not tell this user.
        are_hidden = most is None
        instances = []
        for slot in range(most or 0):
            # Indexes may have gaps: NOT_FOUND is not the end.
            with contextlib.suppress(NotFound):
                mig = self.ask(lambda nvml, slot=slot: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot), gpu)  # type: ignore[misc]
                if mig is None:
                    are_hidden = True
                else:
                    instances.append(self._mig_instance(mig, gpu))
        return {"mig_instances": tuple(instances), "mig_hidden": are_hidden}

    def _mig_instance(self, mig: Any, gpu: str) -> MigInstance:
        name = nvml_text(self.ask(lambda nvml: nvml.nvmlDeviceGetName(mig), gpu))
        attributes = self.ask(lambda nvml: nvml.nvmlDeviceGetAttributes(mig), gpu)
        memory = self._memory(mig, gpu)
        return MigInstance(
            uuid=nvml_text(self.demand(lambda nvml: nvml.nvmlDeviceGetUUID(mig), gpu)) or "",
            gpu_instance_id=self.ask(lambda nvml: nvml.nvmlDeviceGetGpuInstanceId(mig), gpu),
            compute_instance_id=self.ask(lambda nvml: nvml.nvmlDeviceGetComputeInstanceId(mig), gpu),
            # "NVIDIA H200 MIG 1g.18gb"
            profile=name.rpartition("MIG ")[2] if name and "MIG " in name else None,
            multiprocessors=None if attributes is None else int(attributes.multiprocessorCount),
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_used_bytes=None if memory is None else int(memory.used),
        )

    # -- processes ---------------------------------------------------------------------------------

    def processes(self, index: int) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a GPU: compute, graphics and MPS lists merged, with SM % where told.

        None if the driver does not list them. NVML has no owners and command lines: the caller adds them.
        """
        processes = self._listed_processes(self.handle(index), str(index))
        # Without processes NVML need not be asked for their work.
        if not processes:
            return processes
        samples = self.work_samples(index, time.time() - _SAMPLE_WINDOW_SECONDS)
        if samples is None:
            return processes
        newest = {sample.pid: sample.sm_percent for sample in samples}
        # Under MPS all work counts for the server's PID: a client's share is unknown.
        return tuple(
            process if process.mps else replace(process, sm_percent=newest.get(process.pid, 0)) for process in processes
        )

    def processes_in(self, mig: MigInstance, index: int) -> tuple[GpuProcess, ...] | None:
        """Return the processes in an instance of a GPU, by PID, as its own handle lists them.

        None: the driver does not list them, or the instance is gone.
        """
        try:
            handle = self.ask(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(mig.uuid), str(index))
            return None if handle is None else self._listed_processes(handle, str(index), mig)
        except NotFound:
            return None

    def _listed_processes(self, handle: Any, gpu: str, mig: MigInstance | None = None) -> tuple[GpuProcess, ...] | None:
        """Return the processes of a GPU, or of the MIG device ``mig``, by PID: all lists merged, without SM %.

        None: there are no lists; of a MIG device, no list of compute processes.
        """
        lists = {
            kind: self._process_list(f"nvmlDeviceGet{name}RunningProcesses", handle, gpu)
            for kind, name in (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute"))
        }
        needed_lists = list(lists.values()) if mig is None else [lists["compute"]]
        if all(processes is None for processes in needed_lists):
            return None
        merged: dict[tuple[int, int | None, int | None], GpuProcess] = {}
        for kind, processes in lists.items():
            for process in processes or ():
                # The lists of a MIG device do not name it.
                place = process if mig is None else mig
                key = process.pid, place.gpu_instance_id, place.compute_instance_id
                earlier = merged.get(key, process)
                used = process.memory_used_bytes if earlier.memory_used_bytes is None else earlier.memory_used_bytes
                flags: dict[str, Any] = {kind: True}
                merged[key] = replace(
                    earlier, gpu_instance_id=key[1], compute_instance_id=key[2], memory_used_bytes=used, **flags
                )
        return tuple(sorted(merged.values(), key=attrgetter("pid")))

    def _process_list(self, name: str, handle: Any, gpu: str) -> Sequence[GpuProcess] | None:
        """Return one list of processes of a GPU; None: there is no such list."""
        processes = self.ask(lambda nvml: read_processes(nvml, f"{name}_v3", handle), gpu)
        if processes is None:
            # Drivers before R510 have only _v2, with the same structure.
            processes = self.ask(lambda nvml: read_processes(nvml, f"{name}_v2", handle), gpu)
        return processes

    def last_work(self, index: int, since: float) -> dict[int, float] | None:
        """Return when processes last worked since a time, in seconds since 1970, by PID; None: unknown."""
        samples = self.work_samples(index, since)
        return None if samples is None else {sample.pid: sample.at for sample in samples if sample.sm_percent > 0}

    def work_samples(self, index: int, since: float) -> list[WorkSample] | None:
        """Return the samples since a time (seconds since 1970), the oldest first; None: unknown (MIG, old GPUs).

        nvmlDeviceGetProcessUtilization, as ``nvidia-smi pmon``. The driver keeps the samples of a while only; 0 asks for all
        of them. A sample covers the time before it; idle processes have none. Under MPS all work counts for the server.

        Raises:
            GpushareError: the GPU does not answer.
        """
        handle = self.handle(index)
        try:
            samples = self.ask(lambda nvml: read_utilization(nvml, handle, max(0, int(since * 1e6))), str(index))
        except GpuLost:
            raise
        except NotFound:
            # No sample since then: all are idle.
            return []
        return None if samples is None else sorted(samples, key=attrgetter("at"))


def nvml_text(value: Any) -> str | None:
    """Return an answer of NVML as text, which some of its bindings give as bytes; None: unknown."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def cores_per_multiprocessor(compute_capability: tuple[int, int]) -> int | None:
    """Return the FP32 cores of one SM (CUDA Programming Guide, arithmetic throughput), or None before Pascal."""
    if compute_capability < (6, 0):
        return None
    return 64 if compute_capability in {(6, 0), (8, 0)} or compute_capability[0] == 7 else 128
