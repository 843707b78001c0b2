"""Entry points of the simulated NVML: the library itself, GPUs, their memory, modes and sensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpushare.sim import activity
from gpushare.sim.mps_servers import binary_version
from gpushare.sim.nvml_abi import (
    ERROR_TEXTS,
    Code,
    Handle,
    Kind,
    On,
    Refused,
    Target,
    check_version,
    entry_point,
    number,
    put,
    put_fields,
    put_handle,
    put_known,
    put_text,
    target_of,
)
from gpushare.sim.state import SimulatedGpu, now

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

_ARCHITECTURES: Final = {"pascal": 4, "volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
# NVML_BRAND_*; 14 is the plain NVIDIA of data centre GPUs.
_BRANDS: Final = (("Tesla", 2), ("NVIDIA GeForce", 5), ("NVIDIA RTX", 13), ("NVIDIA", 14))
_EXCLUSIVE_THREAD, _COMPUTE_MODES = 1, 4
_RESETLESS_MIG, _MIG_QUERY_WITHOUT_MIG = 184, 199


def error_text(code: Any) -> str:
    """Return the text of a return code (nvmlErrorString)."""
    return ERROR_TEXTS.get(number(code), "Unknown Error")


@entry_point("nvmlErrorString", needs_init=False)
def _error_string(_library: SimulatedLibrary, code: Any) -> None:
    """Keep the name in the table; the library answers it itself, because it returns no code."""
    error_text(code)


@entry_point("nvmlInitWithFlags", "nvmlInit_v2", "nvmlInit", needs_init=False)
def _init(library: SimulatedLibrary, *_flags: Any) -> None:
    library.forget()
    state = library.state
    if not state.nvml_installed:
        raise Refused(Code.LIBRARY_NOT_FOUND)
    if not state.driver_loaded:
        raise Refused(Code.DRIVER_NOT_LOADED)
    if state.library_mismatch:
        raise Refused(Code.LIB_RM_VERSION_MISMATCH)
    # nvml.h documents NO_PERMISSION for nvmlInit: the device nodes may not be opened.
    if state.permission_denied:
        raise Refused(Code.NO_PERMISSION)
    library.references += 1


@entry_point("nvmlShutdown")
def _shutdown(library: SimulatedLibrary) -> None:
    library.references -= 1


@entry_point("nvmlSystemGetDriverVersion")
def _driver_version(library: SimulatedLibrary, buffer: Any, length: Any) -> None:
    put_text(buffer, length, library.state.driver)


@entry_point("nvmlSystemGetNVMLVersion")
def _nvml_version(library: SimulatedLibrary, buffer: Any, length: Any) -> None:
    put_text(buffer, length, f"{_cuda_major(library)}.{library.state.driver}")


@entry_point("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def _cuda_version(library: SimulatedLibrary, version: Any) -> None:
    # The same number as the "Binary version" of its MPS programs: 13020 with 595.
    put(version, binary_version(library.state.driver) if _cuda_major(library) > 11 else 11080)


def _cuda_major(library: SimulatedLibrary) -> int:
    branch = library.state.driver.split(".", 1)[0]
    # R580 brought CUDA 13, R525 CUDA 12.
    return (13 if int(branch) >= 580 else 12 if int(branch) >= 525 else 11) if branch.isdigit() else 13


@entry_point("nvmlSystemGetProcessName")
def _process_name(library: SimulatedLibrary, pid: Any, buffer: Any, length: Any) -> None:
    name = activity.process_names(library.state).get(number(pid))
    if name is None:
        raise Refused(Code.NOT_FOUND)
    # NVML cuts a name that is too long, it does not refuse.
    put_text(buffer, length, name[: max(number(length) - 1, 0)])


@entry_point("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")
def _count(library: SimulatedLibrary, count: Any) -> None:
    put(count, len(library.state.gpus))


@entry_point("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
def _handle_by_index(library: SimulatedLibrary, index: Any, device: Any) -> None:
    # A lost GPU is refused here already: nvidia-smi's "Unable to determine the device handle for
    # GPU ...: GPU is lost" is this call. Handles taken before it was lost answer GPU_IS_LOST too.
    put_handle(device, library.gpu(number(index)).handle)


@entry_point("nvmlDeviceGetHandleByUUID")
def _handle_by_uuid(library: SimulatedLibrary, uuid: Any, device: Any) -> None:
    wanted = bytes(getattr(uuid, "value", uuid) or b"").decode(errors="replace")
    for index, gpu in enumerate(library.state.gpus):
        for instance in gpu.mig if gpu.mig_mode == 1 else []:
            # Before R470 a MIG device was called MIG-GPU-<uuid>/<gi>/<ci>; NVML still takes that.
            old = f"MIG-{gpu.uuid}/{instance.gpu_instance_id}/{instance.compute_instance_id}"
            if wanted in {instance.uuid, old}:
                library.gpu(index)
                place = (instance.gpu_instance_id, instance.compute_instance_id)
                return put_handle(device, Handle(Kind.MIG_DEVICE, index, *place))
        if wanted == gpu.uuid:
            return put_handle(device, library.gpu(index).handle)
    raise Refused(Code.NOT_FOUND)


@entry_point("nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId")
def _handle_by_bus_id(library: SimulatedLibrary, bus_id: Any, device: Any) -> None:
    wanted = bytes(getattr(bus_id, "value", bus_id) or b"").decode(errors="replace").upper()
    for index, gpu in enumerate(library.state.gpus):
        # The domain may have 4 or 8 digits, or be left out.
        if wanted in {gpu.pci_bus_id.upper(), gpu.pci_bus_id[4:].upper(), gpu.pci_bus_id[9:].upper()}:
            return put_handle(device, library.gpu(index).handle)
    raise Refused(Code.NOT_FOUND)


@entry_point("nvmlDeviceGetUUID", on=On.DEVICE)
def _uuid(_library: SimulatedLibrary, target: Target, buffer: Any, length: Any) -> None:
    put_text(buffer, length, target.instance.uuid if target.instance else target.gpu.uuid)


@entry_point("nvmlDeviceGetName", on=On.DEVICE)
def _name(_library: SimulatedLibrary, target: Target, buffer: Any, length: Any) -> None:
    name = target.model.name
    if target.instance is not None:
        name = f"{name} MIG {activity.device_name(target, target.instance)}"
    put_text(buffer, length, name)


@entry_point("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo", on=On.DEVICE)
def _pci_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    domain, bus, rest = target.gpu.pci_bus_id.split(":")
    values = {
        "busIdLegacy": f"{domain[-4:]}:{bus}:{rest}".encode(),
        "busId": target.gpu.pci_bus_id.encode(),
        "domain": int(domain, 16),
        "bus": int(bus, 16),
        "device": int(rest.split(".")[0], 16),
    }
    if target.model.pci_device_ids:
        values["pciDeviceId"] = int(target.model.pci_device_ids[0], 16) << 16 | 0x10DE
    put_fields(target_of(info), values)


@entry_point("nvmlDeviceGetMinorNumber", on=On.GPU)
def _minor_number(_library: SimulatedLibrary, target: Target, minor: Any) -> None:
    put(minor, target.handle.index)


@entry_point("nvmlDeviceGetIndex", on=On.DEVICE)
def _index(_library: SimulatedLibrary, target: Target, index: Any) -> None:
    # Of a MIG device: its index on the GPU, what nvmlDeviceGetMigDeviceHandleByIndex takes.
    put(index, target.gpu.mig.index(target.instance) if target.instance else target.handle.index)


@entry_point("nvmlDeviceGetMemoryInfo", on=On.DEVICE)
def _memory(library: SimulatedLibrary, target: Target, memory: Any) -> None:
    total, reserved, used = activity.memory_of(library.state, target)
    # Version 1 counts reserved memory as used.
    values = {"total": total, "used": used + reserved, "free": total - used - reserved}
    put_fields(target_of(memory), values)


@entry_point("nvmlDeviceGetMemoryInfo_v2", on=On.DEVICE)
def _memory_v2(library: SimulatedLibrary, target: Target, memory: Any) -> None:
    check_version(target_of(memory))
    total, reserved, used = activity.memory_of(library.state, target)
    values = {"total": total, "reserved": reserved, "used": used, "free": total - used - reserved}
    put_fields(target_of(memory), values)


@entry_point("nvmlDeviceGetComputeMode", on=On.DEVICE)
def _compute_mode(_library: SimulatedLibrary, target: Target, mode: Any) -> None:
    put(mode, target.gpu.compute_mode)


@entry_point("nvmlDeviceSetComputeMode", on=On.GPU)
def _set_compute_mode(library: SimulatedLibrary, target: Target, mode: Any) -> None:
    wanted = number(mode)
    if not 0 <= wanted < _COMPUTE_MODES:
        raise Refused(Code.INVALID_ARGUMENT)
    with library.changed_gpu(target) as gpu:
        # EXCLUSIVE_THREAD is gone since CUDA 8; with MIG on there is only DEFAULT.
        if wanted == _EXCLUSIVE_THREAD or target.mig_enabled:
            raise Refused(Code.NOT_SUPPORTED)
        gpu.compute_mode = wanted


@entry_point("nvmlDeviceGetMigMode", on=On.GPU)
def _mig_mode(_library: SimulatedLibrary, target: Target, current: Any, pending: Any) -> None:
    mode, next_mode = target.gpu.mig_mode, target.gpu.mig_pending
    if mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    put(current, mode)
    put(pending, mode if next_mode is None else next_mode)


@entry_point("nvmlDeviceGetPersistenceMode", on=On.DEVICE)
def _persistence(_library: SimulatedLibrary, target: Target, mode: Any) -> None:
    put(mode, int(target.gpu.persistence))


@entry_point("nvmlDeviceSetPersistenceMode", on=On.GPU)
def _set_persistence(library: SimulatedLibrary, target: Target, mode: Any) -> None:
    if number(mode) not in {0, 1}:
        raise Refused(Code.INVALID_ARGUMENT)
    with library.changed_gpu(target) as gpu:
        gpu.persistence = bool(number(mode))


@entry_point("nvmlDeviceGetCudaComputeCapability", on=On.DEVICE)
def _capability(_library: SimulatedLibrary, target: Target, major: Any, minor: Any) -> None:
    capability = target.model.compute_capability
    if capability is None:
        raise Refused(Code.NOT_SUPPORTED)
    for argument, part in zip((major, minor), capability.split("."), strict=True):
        put(argument, int(part))


@entry_point("nvmlDeviceGetArchitecture", on=On.DEVICE)
def _architecture(_library: SimulatedLibrary, target: Target, architecture: Any) -> None:
    put(architecture, _ARCHITECTURES[target.model.arch])


@entry_point("nvmlDeviceGetNumGpuCores", on=On.GPU)
def _cores(_library: SimulatedLibrary, target: Target, cores: Any) -> None:
    # 64 FP32 lanes per SM up to GA100, 128 from GA10x on.
    narrow = target.model.arch in {"pascal", "volta", "turing"} or target.model.compute_capability == "8.0"
    sms = target.model.multiprocessors
    put_known(cores, None if sms is None else sms * (64 if narrow else 128))


@entry_point("nvmlDeviceGetBrand", on=On.DEVICE)
def _brand(_library: SimulatedLibrary, target: Target, brand: Any) -> None:
    put(brand, next(value for prefix, value in _BRANDS if target.model.name.startswith(prefix)))


@entry_point("nvmlDeviceGetSerial", on=On.GPU)
def _serial(_library: SimulatedLibrary, target: Target, buffer: Any, length: Any) -> None:
    if "GeForce" in target.model.name:
        raise Refused(Code.NOT_SUPPORTED)
    put_text(buffer, length, f"{1_650_000_000_000 + int(target.gpu.uuid[-8:], 16):d}")


@entry_point("nvmlDeviceGetFieldValues", on=On.DEVICE)
def _field_values(_library: SimulatedLibrary, target: Target, count: Any, values: Any) -> None:
    array = target_of(values)
    for index in range(number(count)):
        known = _field(target.gpu, array[index].fieldId, needs_reset=target.model.reset_for_mode_change)
        array[index].nvmlReturn = Code.NOT_SUPPORTED if known is None else Code.SUCCESS
        if known is not None:
            array[index].timestamp = int(now() * 1e6)
            # NVML_VALUE_TYPE_UNSIGNED_INT
            array[index].valueType = 1
            array[index].value.uiVal = known


def _field(gpu: SimulatedGpu, field: int, *, needs_reset: bool | None) -> int | None:
    if gpu.mig_mode is None:
        return None
    if field == _RESETLESS_MIG:
        return None if needs_reset is None else int(not needs_reset)
    # R580 lists GPU instance profiles with MIG off.
    return 1 if field == _MIG_QUERY_WITHOUT_MIG else None
