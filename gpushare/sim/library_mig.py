"""Entry points of the simulated NVML: MIG profiles, GPU instances and compute instances (reading)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from gpushare.sim import activity, mig_compute, mig_layout
from gpushare.sim.models import GiProfile
from gpushare.sim.nvml_abi import (
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
    target_of,
)
from gpushare.sim.state import SimulatedGpuInstance, SimulatedMigInstance

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

# Driver 580 answers INVALID_ARGUMENT from here on (H200).
_PROFILE_COUNT: Final = 17


@entry_point("nvmlDeviceGetMaxMigDeviceCount", on=On.GPU)
def _max_count(_library: SimulatedLibrary, target: Target, count: Any) -> None:
    # 0, not an error, without MIG (H200 with MIG off).
    put(count, (target.model.compute_slices or 0) if target.mig_enabled else 0)


@entry_point("nvmlDeviceGetMigDeviceHandleByIndex", on=On.GPU)
def _mig_handle(_library: SimulatedLibrary, target: Target, index: Any, device: Any) -> None:
    if target.gpu.mig_mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    devices = target.gpu.mig if target.mig_enabled else []
    if number(index) >= len(devices):
        raise Refused(Code.NOT_FOUND)
    put_handle(device, handle_of(Kind.MIG_DEVICE, target, devices[number(index)]))


def handle_of(kind: Kind, target: Target, instance: SimulatedGpuInstance) -> Handle:
    """Return the handle of an instance of the GPU that was called on."""
    if kind is Kind.GPU_INSTANCE or not isinstance(instance, SimulatedMigInstance):
        return Handle(kind, target.handle.index, instance.gpu_instance_id)
    return Handle(kind, target.handle.index, instance.gpu_instance_id, instance.compute_instance_id)


@entry_point("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", on=On.DEVICE)
def _parent(library: SimulatedLibrary, target: Target, device: Any) -> None:
    if target.instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    put_handle(device, library.gpu(target.handle.index).handle)


@entry_point("nvmlDeviceIsMigDeviceHandle", on=On.DEVICE)
def _is_mig(_library: SimulatedLibrary, target: Target, answer: Any) -> None:
    put(answer, int(target.instance is not None))


@entry_point("nvmlDeviceGetGpuInstanceId", on=On.DEVICE)
def _gpu_instance_id(_library: SimulatedLibrary, target: Target, identity: Any) -> None:
    put(identity, require_instance(target).gpu_instance_id)


@entry_point("nvmlDeviceGetComputeInstanceId", on=On.DEVICE)
def _compute_instance_id(_library: SimulatedLibrary, target: Target, identity: Any) -> None:
    put(identity, require_instance(target).compute_instance_id)


def require_instance(target: Target) -> SimulatedMigInstance:
    """Return the instance that was called on; a whole GPU is refused with INVALID_ARGUMENT."""
    # A whole GPU is an invalid argument here (H200).
    if target.instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return target.instance


def require_gpu_instance(target: Target) -> SimulatedGpuInstance:
    """Return the GPU instance that was called on, or in which the compute instance lies; INVALID_ARGUMENT otherwise."""
    if target.gpu_instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return target.gpu_instance


def profile_of(target: Target) -> GiProfile:
    """Return the profile of the GPU instance that was called on."""
    profile = target.model.profile(require_gpu_instance(target).profile)
    if profile is None:
        raise Refused(Code.UNKNOWN)
    return profile


@entry_point("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes", on=On.DEVICE)
def _attributes(_library: SimulatedLibrary, target: Target, attributes: Any) -> None:
    if target.instance is None:
        raise Refused(Code.NOT_SUPPORTED)
    profile = profile_of(target)
    values = {f"shared{name[0].upper()}{name[1:]}": count for name, count in engines(profile).items()}
    values["multiprocessorCount"] = activity.device_multiprocessors(target, target.instance)
    values["gpuInstanceSliceCount"] = profile.slices
    values["computeInstanceSliceCount"] = len(mig_compute.span(profile, target.instance))
    values["memorySizeMB"] = activity.profile_memory_mib(target, profile.name)
    put_fields(target_of(attributes), values)


def engines(profile: GiProfile) -> dict[str, int]:
    """Return the engine counts of a profile by their NVML field names."""
    # NVML has no "unknown" in these structs; what is not published is left out, as 0.
    return {
        "copyEngineCount": profile.copy_engines or 0,
        "decoderCount": profile.decoders or 0,
        "encoderCount": profile.encoders or 0,
        "jpegCount": profile.jpeg_engines or 0,
        "ofaCount": profile.optical_flow_engines or 0,
    }


@entry_point("nvmlDeviceGetGpuInstanceProfileInfo", on=On.GPU)
def _profile_info(_library: SimulatedLibrary, target: Target, profile: Any, info: Any) -> None:
    _put_profile(target, _profile_by_number(target, number(profile)), target_of(info))


@entry_point("nvmlDeviceGetGpuInstanceProfileInfoV", on=On.GPU)
def _profile_info_v(_library: SimulatedLibrary, target: Target, profile: Any, info: Any) -> None:
    check_version(target_of(info))
    _put_profile(target, _profile_by_number(target, number(profile)), target_of(info))


@entry_point("nvmlDeviceGetGpuInstanceProfileInfoByIdV", on=On.GPU)
def _profile_info_by_id(_library: SimulatedLibrary, target: Target, identity: Any, info: Any) -> None:
    check_version(target_of(info))
    _put_profile(target, _profile_by_id(target, number(identity)), target_of(info))


def _profile_by_number(target: Target, wanted: int) -> GiProfile:
    if not 0 <= wanted < _PROFILE_COUNT:
        raise Refused(Code.INVALID_ARGUMENT)
    for profile in target.model.profiles:
        if profile.nvml_profile == wanted:
            return profile
    raise Refused(Code.NOT_SUPPORTED)


def _profile_by_id(target: Target, wanted: int) -> GiProfile:
    profile = target.model.profile_by_id(wanted)
    if profile is None:
        raise Refused(Code.NOT_SUPPORTED)
    return profile


def _put_profile(target: Target, profile: GiProfile, info: Any) -> None:
    values = {
        "id": profile.id,
        "isP2pSupported": int(profile.peer_to_peer),
        "sliceCount": profile.slices,
        "instanceCount": profile.instances,
        "multiprocessorCount": activity.profile_multiprocessors(target, profile.name),
        "memorySizeMB": activity.profile_memory_mib(target, profile.name),
        "name": f"MIG {profile.name}".encode(),
    }
    put_fields(info, values | engines(profile))


@entry_point("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlDeviceGetGpuInstancePossiblePlacements", on=On.GPU)
def _placements(_library: SimulatedLibrary, target: Target, identity: Any, placements: Any, count: Any) -> None:
    profile = _profile_by_id(target, number(identity))
    put_placements(placements, count, [(start, profile.size or 0) for start in profile.starts or ()])


def put_placements(placements: Any, count: Any, entries: list[tuple[int, int]]) -> None:
    """Write placements (start, size) to a caller's array, and how many there are."""
    put(count, len(entries))
    # NULL asks for the count; an array has room for all, says nvml.h, so its size is not asked.
    if placements is not None and entries:
        array = placements._obj if hasattr(placements, "_obj") else placements
        if hasattr(array, "_length_") and len(array) < len(entries):
            raise Refused(Code.INSUFFICIENT_SIZE)
        for index, (start, size) in enumerate(entries):
            put_fields(array[index], {"start": start, "size": size})


@entry_point("nvmlDeviceGetGpuInstanceRemainingCapacity", on=On.GPU)
def _capacity(_library: SimulatedLibrary, target: Target, identity: Any, count: Any) -> None:
    profile = _profile_by_id(target, number(identity))
    put(count, mig_layout.remaining_capacity(profile, mig_layout.occupied(target.gpu, target.model)))


@entry_point("nvmlDeviceGetGpuInstances", on=On.GPU)
def _gpu_instances(_library: SimulatedLibrary, target: Target, identity: Any, instances: Any, count: Any) -> None:
    if not target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    name = _profile_by_id(target, number(identity)).name
    found = [one for one in mig_layout.gpu_instances(target.gpu) if one.profile == name]
    put_handles(instances, count, [handle_of(Kind.GPU_INSTANCE, target, one) for one in found])


def put_handles(array: Any, count: Any, handles: list[Handle]) -> None:
    """Write opaque pointers to a caller's array, and how many there are."""
    put(count, len(handles))
    pointers = array._obj if hasattr(array, "_obj") else array
    for index, handle in enumerate(handles):
        if hasattr(pointers, "_length_"):
            pointers[index] = ctypes.cast(ctypes.c_void_p(handle.pack()), pointers._type_)
        else:
            put_handle(pointers, handle)


@entry_point("nvmlDeviceGetGpuInstanceById", on=On.GPU)
def _gpu_instance_by_id(_library: SimulatedLibrary, target: Target, identity: Any, instance: Any) -> None:
    if not target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    for one in mig_layout.gpu_instances(target.gpu):
        if one.gpu_instance_id == number(identity):
            return put_handle(instance, handle_of(Kind.GPU_INSTANCE, target, one))
    raise Refused(Code.NOT_FOUND)


@entry_point("nvmlGpuInstanceGetInfo", on=On.GPU_INSTANCE)
def _gpu_instance_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    profile, instance = profile_of(target), require_gpu_instance(target)
    struct = target_of(info)
    device = Handle(Kind.GPU, target.handle.index)
    put_fields(struct, {"device": device, "id": instance.gpu_instance_id, "profileId": profile.id})
    put_fields(struct.placement, {"start": instance.start, "size": profile.size})
