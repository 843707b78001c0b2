"""Entry points of the simulated NVML: MIG modes, profiles, GPU instances and compute instances."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from gpushare.gpu_models import GpuModel
from gpushare.mig.profile import Placement, Profile, usual_compute_starts
from gpushare.sim import activity, mig
from gpushare.sim import nvml_abi as abi
from gpushare.sim.activity import Resident
from gpushare.sim.devices import drop_stale_nodes
from gpushare.sim.library import SimulatedLibrary, first_matching
from gpushare.sim.mig import Occupied, gpu_instance_id, gpu_instances, mig_uuid, occupied_places
from gpushare.sim.nvml_abi import Code, Form, Handle, HandleKind, Kinds, On, Refused, Target, profile_of
from gpushare.sim.processes import holders_of
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedMigInstance

_Instance = TypeVar("_Instance", bound=SimulatedGpuInstance)
# Driver 580 answers INVALID_ARGUMENT from here on (H200).
_PROFILE_COUNT: Final = 17
# Engine counts of a profile by their NVML field names.
_ENGINES: Final = {
    "copyEngineCount": "copy",
    "decoderCount": "decoders",
    "encoderCount": "encoders",
    "jpegCount": "jpeg",
    "ofaCount": "optical_flow",
}


def _engines(profile: Profile) -> dict[str, int]:
    """Return the engine counts of a profile by the field names of all NVML structs; 0, NVML's unknown: not published."""
    counts = {name: getattr(profile.engines, attribute) or 0 for name, attribute in _ENGINES.items()}
    return counts | {f"shared{name[0].upper()}{name[1:]}": count for name, count in counts.items()}


def _need_instance(instance: _Instance | None) -> _Instance:
    """Return the instance that was called on; Refused: INVALID_ARGUMENT, it is a whole GPU (H200)."""
    if instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return instance


def _profile(target: Target) -> Profile:
    """Return the profile of the GPU instance that was called on, or in which the compute instance lies."""
    return profile_of(target.model, target.gpu_instance)


def _compute_instances_in(gpu: SimulatedGpu, gpu_instance: int) -> list[SimulatedMigInstance]:
    return [instance for instance in gpu.mig if instance.gpu_instance_id == gpu_instance]


def _attributes(_library: SimulatedLibrary, target: Target) -> dict[str, int] | None:
    """Return the fields of nvmlDeviceAttributes_t of a MIG device; None for a whole GPU."""
    if target.instance is None:
        return None
    profile = _profile(target)
    return _engines(profile) | {
        "multiprocessorCount": activity.device_sms(target.model, target.instance),
        "gpuInstanceSliceCount": profile.slices,
        "computeInstanceSliceCount": len(mig.span(profile, target.instance)),
        "memorySizeMB": activity.profile_memory_mib(target.model, profile),
    }


def _profile_info(_library: SimulatedLibrary, target: Target, number: int) -> dict[str, Any] | None:
    """Return the fields of nvmlGpuInstanceProfileInfo_t of NVML_GPU_INSTANCE_PROFILE_*; None: the model does not have it."""
    if not 0 <= number < _PROFILE_COUNT:
        raise Refused(Code.INVALID_ARGUMENT)
    profile = next((profile for profile in target.model.profiles if profile.nvml_profile == number), None)
    if profile is None:
        return None
    return _engines(profile) | {
        "id": profile.id,
        "isP2pSupported": int(target.model.peer_to_peer[profile.name]),
        "sliceCount": profile.slices,
        "instanceCount": profile.instances,
        "multiprocessorCount": activity.profile_sms(target.model, profile),
        "memorySizeMB": activity.profile_memory_mib(target.model, profile),
        "name": f"MIG {profile.name}".encode(),
    }


def _compute_profile_info(
    _library: SimulatedLibrary, target: Target, profile_id: int, engine: int
) -> dict[str, Any] | None:
    """Return the fields of nvmlComputeInstanceProfileInfo_t of a profile; None: the GPU instance does not offer it."""
    if not 0 <= profile_id < mig.PROFILE_COUNT or engine != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    profile = _profile(target)
    part = mig.compute_profiles(profile).get(profile_id)
    if part is None:
        return None
    name = profile.name if part.slices == profile.slices else f"{part.name}.{profile.name}"
    return _engines(profile) | {
        "id": profile_id,
        "sliceCount": part.slices,
        "instanceCount": part.instances,
        "multiprocessorCount": activity.compute_sms(target.model, profile, part.slices),
        "name": f"MIG {name}".encode(),
    }


def _profile_by_id(target: Target, profile_id: int) -> Profile:
    """Return the profile with an id; Refused: NOT_SUPPORTED, the model has none."""
    profile = target.model.profile_by_id(profile_id)
    if profile is None:
        raise Refused(Code.NOT_SUPPORTED)
    return profile


def _most_mig_devices(_library: SimulatedLibrary, target: Target) -> int:
    # 0, not an error, without MIG (H200 with MIG off).
    return (target.model.compute_slices or 0) if target.mig_enabled else 0


_GETTERS: Final[tuple[tuple[str, Kinds, Form, Callable[..., Any]], ...]] = (
    ("nvmlDeviceGetMaxMigDeviceCount", On.GPU, Form.NUMBER, _most_mig_devices),
    ("nvmlDeviceGetAttributes_v2", On.DEVICE, Form.FIELDS, _attributes),
    ("nvmlDeviceGetGpuInstanceId", On.DEVICE, Form.NUMBER, lambda _, on: _need_instance(on.instance).gpu_instance_id),
    (
        "nvmlDeviceGetComputeInstanceId",
        On.DEVICE,
        Form.NUMBER,
        lambda _, on: _need_instance(on.instance).compute_instance_id,
    ),
    ("nvmlDeviceGetGpuInstanceProfileInfo", On.GPU, Form.FIELDS, _profile_info),
    ("nvmlDeviceGetGpuInstanceProfileInfoV", On.GPU, Form.VERSIONED_FIELDS, _profile_info),
    ("nvmlGpuInstanceGetComputeInstanceProfileInfo", On.GPU_INSTANCE, Form.FIELDS, _compute_profile_info),
    ("nvmlGpuInstanceGetComputeInstanceProfileInfoV", On.GPU_INSTANCE, Form.VERSIONED_FIELDS, _compute_profile_info),
)
for _getter in _GETTERS:
    abi.register_getter(*_getter)


def _put_handles(array: Any, count: Any, handles: list[Handle]) -> None:
    """Write opaque pointers to a caller's array, and how many there are."""
    abi.put(count, len(handles))
    pointers = abi.target_of(array)
    for index, handle in enumerate(handles):
        pointers[index] = ctypes.cast(ctypes.c_void_p(handle.pack()), pointers._type_)


@abi.entry_point("nvmlDeviceGetMigDeviceHandleByIndex", on=On.GPU)
def _mig_handle(_library: SimulatedLibrary, target: Target, index: Any, device: Any) -> None:
    if target.gpu.mig_mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    if abi.number(index) >= len(target.gpu.mig):
        raise Refused(Code.NOT_FOUND)
    ids = target.gpu.mig[abi.number(index)].instance_ids
    abi.put_handle(device, Handle(HandleKind.MIG_DEVICE, target.handle.index, *ids))


@abi.entry_point("nvmlDeviceGetGpuInstancePossiblePlacements_v2", on=On.GPU)
def _placements(_library: SimulatedLibrary, target: Target, profile_id: Any, placements: Any, count: Any) -> None:
    possible = _profile_by_id(target, abi.number(profile_id)).placements or ()
    abi.put(count, len(possible))
    # NULL asks for the count; an array has room for all, says nvml.h, so its size is not asked.
    for index, placement in enumerate(possible if placements is not None else ()):
        abi.put_fields(abi.target_of(placements)[index], placement._asdict())


@abi.entry_point("nvmlDeviceGetGpuInstances", on=On.GPU)
def _gpu_instances(_library: SimulatedLibrary, target: Target, profile_id: Any, instances: Any, count: Any) -> None:
    if not target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    name = _profile_by_id(target, abi.number(profile_id)).name
    ids = [instance.gpu_instance_id for instance in gpu_instances(target.gpu) if instance.profile == name]
    _put_handles(instances, count, [Handle(HandleKind.GPU_INSTANCE, target.handle.index, each) for each in ids])


@abi.entry_point("nvmlGpuInstanceGetComputeInstances", on=On.GPU_INSTANCE)
def _compute_instances(_library: SimulatedLibrary, target: Target, profile_id: Any, instances: Any, count: Any) -> None:
    profile, wanted = _profile(target), abi.number(profile_id)
    if wanted not in mig.compute_profiles(profile):
        raise Refused(Code.NOT_SUPPORTED)
    present = _compute_instances_in(target.gpu, target.handle.gpu_instance)
    ids = [part.instance_ids for part in present if mig.compute_profile_id(profile, part) == wanted]
    _put_handles(instances, count, [Handle(HandleKind.COMPUTE_INSTANCE, target.handle.index, *each) for each in ids])


@abi.entry_point("nvmlDeviceGetGpuInstanceById", on=On.GPU)
def _gpu_instance_by_id(_library: SimulatedLibrary, target: Target, identity: Any, instance: Any) -> None:
    if not target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    wanted = abi.number(identity)
    if all(present.gpu_instance_id != wanted for present in gpu_instances(target.gpu)):
        raise Refused(Code.NOT_FOUND)
    abi.put_handle(instance, Handle(HandleKind.GPU_INSTANCE, target.handle.index, wanted))


@abi.entry_point("nvmlGpuInstanceGetComputeInstanceById", on=On.GPU_INSTANCE)
def _compute_instance_by_id(_library: SimulatedLibrary, target: Target, identity: Any, instance: Any) -> None:
    wanted = (target.handle.gpu_instance, abi.number(identity))
    if all(present.instance_ids != wanted for present in target.gpu.mig):
        raise Refused(Code.NOT_FOUND)
    abi.put_handle(instance, Handle(HandleKind.COMPUTE_INSTANCE, target.handle.index, *wanted))


@abi.entry_point("nvmlGpuInstanceGetInfo", on=On.GPU_INSTANCE)
def _gpu_instance_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    instance, profile = _need_instance(target.gpu_instance), _profile(target)
    values = {
        "device": Handle(HandleKind.GPU, target.handle.index),
        "id": instance.gpu_instance_id,
        "profileId": profile.id,
    }
    struct = abi.target_of(info)
    abi.put_fields(struct, values)
    abi.put_fields(struct.placement, {"start": instance.start, "size": profile.size})


@abi.entry_point("nvmlComputeInstanceGetInfo_v2", on=On.COMPUTE_INSTANCE)
def _compute_instance_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    instance, profile = _need_instance(target.instance), _profile(target)
    values = {
        "device": Handle(HandleKind.GPU, target.handle.index),
        "gpuInstance": Handle(HandleKind.GPU_INSTANCE, target.handle.index, instance.gpu_instance_id),
        "id": instance.compute_instance_id,
        "profileId": mig.compute_profile_id(profile, instance),
    }
    struct = abi.target_of(info)
    abi.put_fields(struct, values)
    span = mig.span(profile, instance)
    abi.put_fields(struct.placement, {"start": span.start, "size": len(span)})


def set_mode(gpu: SimulatedGpu, model: GpuModel, mode: int, residents: Sequence[Resident]) -> Code:
    """Switch MIG mode and return the activationStatus of nvmlDeviceSetMigMode; not SUCCESS: the mode is only pending.

    IN_USE: instances are present, or processes on a GPU that the driver must reset for the change (before Hopper).
    """
    gpu.mig_pending = mode
    if mode == gpu.mig_mode:
        return Code.SUCCESS
    if gpu_instances(gpu) or (model.reset_for_mode_change and residents):
        return Code.IN_USE
    if gpu.reset_required:
        return Code.RESET_REQUIRED
    gpu.mig_mode = mode
    if mode == 1:
        # With MIG on there is only DEFAULT.
        gpu.compute_mode = 0
    return Code.SUCCESS


def create_gpu_instance(
    gpu: SimulatedGpu, model: GpuModel, profile_id: int, placement: Placement | None, residents: Sequence[Resident]
) -> int:
    """Create a GPU instance at ``placement``, or (None) where the driver chooses, and return its id.

    Raises:
        Refused: NOT_SUPPORTED, MIG is off; INVALID_ARGUMENT, no such profile, or it cannot lie there; IN_USE, it would be
            the first and a process is on the GPU; INSUFFICIENT_RESOURCES, no room.
    """
    if gpu.mig_mode != 1:
        raise Refused(Code.NOT_SUPPORTED)
    profile = model.profile_by_id(profile_id)
    # A profile with an id has published placements.
    if profile is None or profile.placements is None or model.axis is None:
        raise Refused(Code.INVALID_ARGUMENT)
    if placement not in {None, *profile.placements}:
        raise Refused(Code.INVALID_ARGUMENT)
    present = occupied_places(gpu, model)
    # Since Hopper, MIG is enabled while processes run, and the check is made here. A node that is merely open does not count.
    if not present and any(resident.memory_bytes or not resident.holder for resident in residents):
        raise Refused(Code.IN_USE)
    free = mig.free_starts(profile, present) if mig.may_join(profile, present) else []
    created = Occupied(profile, _choose_start(free, placement))
    identity = gpu_instance_id(model.axis, created.start, len(created.span))
    gpu.bare.append(SimulatedGpuInstance(profile.name, created.start, identity))
    return identity


def _choose_start(free: Sequence[int], placement: Placement | None) -> int:
    """Return the start of an instance: where the driver chooses, the first that is free (real GPUs took others too)."""
    starts = [start for start in free if placement is None or start == placement.start]
    if not starts:
        raise Refused(Code.INSUFFICIENT_RESOURCES)
    return min(starts)


def destroy_gpu_instance(gpu: SimulatedGpu, gpu_instance: int, residents: Sequence[Resident]) -> None:
    """Destroy a GPU instance; Refused: IN_USE, a compute instance or a process is in it; INVALID_ARGUMENT, it is gone."""
    in_it = [resident for resident in residents if resident.gpu_instance_id == gpu_instance]
    if in_it or _compute_instances_in(gpu, gpu_instance):
        raise Refused(Code.IN_USE)
    gpu.bare.remove(first_matching(gpu.bare, lambda each: each.gpu_instance_id == gpu_instance))
    drop_stale_nodes(gpu)


def create_compute_instance(
    gpu: SimulatedGpu, model: GpuModel, gpu_instance: int, profile_id: int, placement: Placement | None
) -> int:
    """Create a compute instance at ``placement``, or (None) where the driver chooses, and return its id.

    Raises:
        Refused: INVALID_ARGUMENT, the GPU instance is gone, no such profile, or it cannot lie there; NOT_SUPPORTED,
            not in this GPU instance; INSUFFICIENT_RESOURCES, no room, or the place is taken.
    """
    owner = first_matching(gpu_instances(gpu), lambda each: each.gpu_instance_id == gpu_instance)
    profile = profile_of(model, owner)
    if not 0 <= profile_id < mig.PROFILE_COUNT:
        raise Refused(Code.INVALID_ARGUMENT)
    compute_profile = mig.compute_profiles(profile).get(profile_id)
    if compute_profile is None:
        raise Refused(Code.NOT_SUPPORTED)
    slices = compute_profile.slices
    if placement not in {None, *(Placement(start, slices) for start in usual_compute_starts(profile.slices, slices))}:
        raise Refused(Code.INVALID_ARGUMENT)
    present = _compute_instances_in(gpu, gpu_instance)
    start = _choose_start(mig.free_compute_starts(profile, slices, present), placement)
    used_ids = {instance.compute_instance_id for instance in present}
    # Ids start at 0 in every GPU instance, and are reused.
    identity = next(free_id for free_id in itertools.count() if free_id not in used_ids)
    created = SimulatedMigInstance(
        profile=profile.name,
        start=owner.start,
        gpu_instance_id=gpu_instance,
        compute_instance_id=identity,
        uuid=mig_uuid(gpu.uuid, gpu_instance, identity),
        compute_profile=None if profile_id == profile.filling_compute.id else profile_id,
        compute_start=start,
    )
    gpu.mig = sorted([*gpu.mig, created], key=lambda part: part.instance_ids)
    gpu.bare = [instance for instance in gpu.bare if instance.gpu_instance_id != gpu_instance]
    return identity


def destroy_compute_instance(
    gpu: SimulatedGpu, gpu_instance: int, compute_instance: int, residents: Sequence[Resident]
) -> None:
    """Destroy a compute instance, but not its GPU instance; Refused: IN_USE, a process is in it; INVALID_ARGUMENT, gone."""
    ids = (gpu_instance, compute_instance)
    if any(resident.instance_ids == ids for resident in residents):
        raise Refused(Code.IN_USE)
    destroyed = first_matching(gpu.mig, lambda part: part.instance_ids == ids)
    gpu.mig.remove(destroyed)
    if not _compute_instances_in(gpu, gpu_instance):
        gpu.bare.append(SimulatedGpuInstance(destroyed.profile, destroyed.start, gpu_instance))
    drop_stale_nodes(gpu)


@contextmanager
def _changed_gpu(library: SimulatedLibrary, target: Target) -> Iterator[tuple[SimulatedGpu, list[Resident]]]:
    """Yield the GPU to change, under the lock, and the processes that are on it or hold one of its nodes open."""
    with library.changed_host() as state:
        index = target.handle.index
        whole = Target(Handle(HandleKind.GPU, index), state.gpus[index], target.model)
        yield whole.gpu, [*activity.residents(state, whole), *holders_of(state, index)]


@abi.entry_point("nvmlDeviceSetMigMode", on=On.GPU)
def _set_mode(library: SimulatedLibrary, target: Target, mode: Any, activation_status: Any) -> None:
    if target.gpu.mig_mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    if abi.number(mode) not in {0, 1} or activation_status is None:
        raise Refused(Code.INVALID_ARGUMENT)
    with _changed_gpu(library, target) as (gpu, residents):
        # The call succeeds even if the change does not.
        abi.put(activation_status, set_mode(gpu, target.model, abi.number(mode), residents))


@abi.entry_point("nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement", on=On.GPU)
def _create_gpu_instance(library: SimulatedLibrary, target: Target, profile_id: Any, *arguments: Any) -> None:
    *placements, instance = arguments
    placement = _placement(placements[0]) if placements else None
    with _changed_gpu(library, target) as (gpu, residents):
        identity = create_gpu_instance(gpu, target.model, abi.number(profile_id), placement, residents)
        abi.put_handle(instance, Handle(HandleKind.GPU_INSTANCE, target.handle.index, identity))


@abi.entry_point(
    "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceCreateComputeInstanceWithPlacement", on=On.GPU_INSTANCE
)
def _create_compute_instance(library: SimulatedLibrary, target: Target, profile_id: Any, *arguments: Any) -> None:
    *placements, instance = arguments
    placement = _placement(placements[0]) if placements else None
    owner = target.handle.gpu_instance
    with _changed_gpu(library, target) as (gpu, _):
        identity = create_compute_instance(gpu, target.model, owner, abi.number(profile_id), placement)
        abi.put_handle(instance, Handle(HandleKind.COMPUTE_INSTANCE, target.handle.index, owner, identity))


@abi.entry_point("nvmlGpuInstanceDestroy", on=On.GPU_INSTANCE)
def _destroy_gpu_instance(library: SimulatedLibrary, target: Target) -> None:
    with _changed_gpu(library, target) as (gpu, residents):
        destroy_gpu_instance(gpu, target.handle.gpu_instance, residents)


@abi.entry_point("nvmlComputeInstanceDestroy", on=On.COMPUTE_INSTANCE)
def _destroy_compute_instance(library: SimulatedLibrary, target: Target) -> None:
    with _changed_gpu(library, target) as (gpu, residents):
        destroy_compute_instance(gpu, target.handle.gpu_instance, target.handle.compute_instance, residents)


def _placement(argument: Any) -> Placement:
    """Return a placement argument, which C takes as a pointer: by ``byref``, as gpushare gives it.

    The real library takes a structure without ``byref`` for an address, and the process crashes; here it is
    INVALID_ARGUMENT, as NULL is.
    """
    if not hasattr(argument, "_obj"):
        raise Refused(Code.INVALID_ARGUMENT)
    return Placement(int(argument._obj.start), int(argument._obj.size))
