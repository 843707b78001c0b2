"""Entry points of the simulated NVML: MIG modes, profiles, GPU instances and compute instances."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from gpushare.gpu_models import GpuModel
from gpushare.mig.profile import Profile
from gpushare.sim import activity, mig
from gpushare.sim import nvml_abi as abi
from gpushare.sim.activity import Resident
from gpushare.sim.devices import forget_gone
from gpushare.sim.library import SimulatedLibrary, first_matching
from gpushare.sim.mig import gpu_instance_id, gpu_instances, mig_uuid, occupied
from gpushare.sim.nvml_abi import Code, Form, Handle, HandleKind, Kinds, On, Refused, Target
from gpushare.sim.processes import holders_of
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedHostState, SimulatedMigInstance

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


def _engines(profile: Profile, *, shared: bool = False) -> dict[str, int]:
    """Return the engine counts of a profile by their NVML names, with ``shared`` those of nvmlDeviceAttributes_t."""
    # NVML has no "unknown" in these structs; what is not published is left out, as 0.
    counts = {name: getattr(profile.engines, attribute) or 0 for name, attribute in _ENGINES.items()}
    return {f"shared{name[0].upper()}{name[1:]}": count for name, count in counts.items()} if shared else counts


def _demand_instance(instance: SimulatedMigInstance | None) -> SimulatedMigInstance:
    """Return the instance that was called on; a whole GPU is refused (H200)."""
    if instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return instance


def _owner(target: Target) -> tuple[SimulatedGpuInstance, Profile]:
    """Return the GPU instance that was called on, or in which the compute instance lies, and its profile."""
    owner = target.gpu_instance
    profile = None if owner is None else target.model.profile(owner.profile)
    if owner is None or profile is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return owner, profile


def _compute_instances_of(target: Target) -> list[SimulatedMigInstance]:
    return [instance for instance in target.gpu.mig if instance.gpu_instance_id == target.handle.gpu_instance]


def _attributes(_library: SimulatedLibrary, target: Target) -> dict[str, int] | None:
    """Return the fields of nvmlDeviceAttributes_t of a MIG device; None for a whole GPU."""
    if target.instance is None:
        return None
    profile = _owner(target)[1]
    return _engines(profile, shared=True) | {
        "multiprocessorCount": activity.device_multiprocessors(target, target.instance),
        "gpuInstanceSliceCount": profile.slices,
        "computeInstanceSliceCount": len(mig.span(profile, target.instance)),
        "memorySizeMB": activity.profile_memory_mib(target, profile.name),
    }


def _profile_info(_library: SimulatedLibrary, target: Target, number: int) -> dict[str, Any] | None:
    """Return the fields of nvmlGpuInstanceProfileInfo_t by the number of the profile; None: the model does not have it."""
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
        "multiprocessorCount": activity.profile_multiprocessors(target, profile.name),
        "memorySizeMB": activity.profile_memory_mib(target, profile.name),
        "name": f"MIG {profile.name}".encode(),
    }


def _compute_profile(_library: SimulatedLibrary, target: Target, number: int, engine: int) -> dict[str, Any] | None:
    """Return the fields of nvmlComputeInstanceProfileInfo_t by the number of the profile; None: not offered here."""
    if not 0 <= number < mig.PROFILE_COUNT or engine != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    profile = _owner(target)[1]
    part = mig.offered(profile).get(number)
    if part is None:
        return None
    return _engines(profile, shared=True) | {
        "id": number,
        "sliceCount": part.slices,
        "instanceCount": part.instances,
        "multiprocessorCount": activity.compute_multiprocessors(target, profile, part.slices),
        "name": f"MIG {'' if part.slices == profile.slices else f'{part.name}.'}{profile.name}".encode(),
    }


def _profile_by_id(target: Target, profile_id: int) -> Profile:
    """Return the profile with an id; NOT_SUPPORTED: the model has none."""
    profile = target.model.profile_by_id(profile_id)
    if profile is None:
        raise Refused(Code.NOT_SUPPORTED)
    return profile


def _most_mig_devices(_library: SimulatedLibrary, target: Target) -> int:
    # 0, not an error, without MIG (H200 with MIG off).
    return (target.model.compute_slices or 0) if target.mig_enabled else 0


_COMPUTE_PROFILE: Final = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
_GETTERS: Final[tuple[tuple[str, Kinds, Form, Callable[..., Any]], ...]] = (
    ("nvmlDeviceGetMaxMigDeviceCount", On.GPU, Form.NUMBER, _most_mig_devices),
    ("nvmlDeviceGetAttributes_v2", On.DEVICE, Form.FIELDS, _attributes),
    ("nvmlDeviceGetGpuInstanceId", On.DEVICE, Form.NUMBER, lambda _, on: _demand_instance(on.instance).gpu_instance_id),
    (
        "nvmlDeviceGetComputeInstanceId",
        On.DEVICE,
        Form.NUMBER,
        lambda _, on: _demand_instance(on.instance).compute_instance_id,
    ),
    ("nvmlDeviceGetGpuInstanceProfileInfo", On.GPU, Form.FIELDS, _profile_info),
    ("nvmlDeviceGetGpuInstanceProfileInfoV", On.GPU, Form.VERSIONED_FIELDS, _profile_info),
    (_COMPUTE_PROFILE, On.GPU_INSTANCE, Form.FIELDS, _compute_profile),
    (f"{_COMPUTE_PROFILE}V", On.GPU_INSTANCE, Form.VERSIONED_FIELDS, _compute_profile),
)
for _getter in _GETTERS:
    abi.register_getter(*_getter)


def _handle(kind: HandleKind, target: Target, instance: SimulatedGpuInstance) -> Handle:
    """Return the handle of an instance of the GPU that was called on."""
    if kind is HandleKind.GPU_INSTANCE or not isinstance(instance, SimulatedMigInstance):
        return Handle(kind, target.handle.index, instance.gpu_instance_id)
    return Handle(kind, target.handle.index, instance.gpu_instance_id, instance.compute_instance_id)


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
    devices = target.gpu.mig if target.mig_enabled else []
    if abi.number(index) >= len(devices):
        raise Refused(Code.NOT_FOUND)
    abi.put_handle(device, _handle(HandleKind.MIG_DEVICE, target, devices[abi.number(index)]))


@abi.entry_point("nvmlDeviceGetGpuInstancePossiblePlacements_v2", on=On.GPU)
def _placements(_library: SimulatedLibrary, target: Target, identity: Any, placements: Any, count: Any) -> None:
    profile = _profile_by_id(target, abi.number(identity))
    starts = profile.starts or ()
    abi.put(count, len(starts))
    # NULL asks for the count; an array has room for all, says nvml.h, so its size is not asked.
    for index, start in enumerate(starts if placements is not None else ()):
        abi.put_fields(abi.target_of(placements)[index], {"start": start, "size": profile.size})


@abi.entry_point("nvmlDeviceGetGpuInstances", on=On.GPU)
def _gpu_instances(_library: SimulatedLibrary, target: Target, identity: Any, instances: Any, count: Any) -> None:
    if not target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    name = _profile_by_id(target, abi.number(identity)).name
    alike = [instance for instance in gpu_instances(target.gpu) if instance.profile == name]
    _put_handles(instances, count, [_handle(HandleKind.GPU_INSTANCE, target, each) for each in alike])


@abi.entry_point("nvmlGpuInstanceGetComputeInstances", on=On.GPU_INSTANCE)
def _compute_instances(_library: SimulatedLibrary, target: Target, identity: Any, instances: Any, count: Any) -> None:
    profile = _owner(target)[1]
    if abi.number(identity) not in mig.offered(profile):
        raise Refused(Code.NOT_SUPPORTED)
    matching = [part for part in _compute_instances_of(target) if mig.number_of(profile, part) == abi.number(identity)]
    _put_handles(instances, count, [_handle(HandleKind.COMPUTE_INSTANCE, target, part) for part in matching])


@abi.entry_point("nvmlDeviceGetGpuInstanceById", on=On.GPU)
@abi.entry_point("nvmlGpuInstanceGetComputeInstanceById", on=On.GPU_INSTANCE)
def _instance_by_id(_library: SimulatedLibrary, target: Target, identity: Any, instance: Any) -> None:
    if not target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    if target.handle.kind is HandleKind.GPU:
        by_id = {
            owner.gpu_instance_id: _handle(HandleKind.GPU_INSTANCE, target, owner)
            for owner in gpu_instances(target.gpu)
        }
    else:
        parts = _compute_instances_of(target)
        by_id = {part.compute_instance_id: _handle(HandleKind.COMPUTE_INSTANCE, target, part) for part in parts}
    if abi.number(identity) not in by_id:
        raise Refused(Code.NOT_FOUND)
    abi.put_handle(instance, by_id[abi.number(identity)])


@abi.entry_point("nvmlGpuInstanceGetInfo", on=On.GPU_INSTANCE)
def _gpu_instance_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    (instance, profile), struct = _owner(target), abi.target_of(info)
    device = Handle(HandleKind.GPU, target.handle.index)
    abi.put_fields(struct, {"device": device, "id": instance.gpu_instance_id, "profileId": profile.id})
    abi.put_fields(struct.placement, {"start": instance.start, "size": profile.size})


@abi.entry_point("nvmlComputeInstanceGetInfo_v2", on=On.COMPUTE_INSTANCE)
def _compute_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    (_, profile), instance, struct = _owner(target), _demand_instance(target.instance), abi.target_of(info)
    values = {
        "device": Handle(HandleKind.GPU, target.handle.index),
        "gpuInstance": _handle(HandleKind.GPU_INSTANCE, target, instance),
        "id": instance.compute_instance_id,
        "profileId": mig.number_of(profile, instance),
    }
    abi.put_fields(struct, values)
    span = mig.span(profile, instance)
    abi.put_fields(struct.placement, {"start": span.start, "size": len(span)})


Placement = tuple[int, int] | None


def set_mode(gpu: SimulatedGpu, model: GpuModel, mode: int, residents: Sequence[Resident]) -> Code:
    """Switch MIG mode and return the activationStatus of nvmlDeviceSetMigMode; not SUCCESS: only pending.

    Nothing ends: existing instances keep MIG on (IN_USE), and where the driver must reset the GPU for it, so
    does any process. Later GPUs switch while jobs run.
    """
    gpu.mig_pending = mode
    if mode == gpu.mig_mode:
        return Code.SUCCESS
    if gpu_instances(gpu) or (model.reset_for_mode_change and residents):
        return Code.IN_USE
    if gpu.reset_required:
        return Code.RESET_REQUIRED
    gpu.mig_mode = mode
    # With MIG on there is only DEFAULT.
    gpu.compute_mode = 0 if mode else gpu.compute_mode
    forget_gone(gpu)
    return Code.SUCCESS


def create_gpu_instance(
    gpu: SimulatedGpu, model: GpuModel, profile_id: int, placement: Placement, residents: Sequence[Resident]
) -> int:
    """Create a GPU instance at ``placement`` (start, size), or where the driver chooses, and return its id.

    Raises:
        Refused: NOT_SUPPORTED, MIG is off, or the places are not published; INVALID_ARGUMENT, no such profile, or it
            cannot lie there; IN_USE, it would be the first and somebody is on the GPU; INSUFFICIENT_RESOURCES, no room.
    """
    if gpu.mig_mode != 1:
        raise Refused(Code.NOT_SUPPORTED)
    profile = model.profile_by_id(profile_id)
    if profile is None:
        raise Refused(Code.INVALID_ARGUMENT)
    if profile.size is None or profile.starts is None or model.axis is None:
        raise Refused(Code.NOT_SUPPORTED)
    if placement is not None and (placement[0] not in profile.starts or placement[1] != profile.size):
        raise Refused(Code.INVALID_ARGUMENT)
    present = occupied(gpu, model)
    if not present and any(resident.memory_bytes or not resident.holder for resident in residents):
        # Hopper and later: MIG was enabled while they ran; the check is made here. An open node without memory does not count.
        raise Refused(Code.IN_USE)
    free = mig.free_starts(profile, present) if mig.may_join(profile, present) else []
    start = _choose_start(free, placement)
    identity = gpu_instance_id(model.axis, start, profile.size)
    gpu.bare.append(SimulatedGpuInstance(profile.name, start, identity))
    gpu.bare.sort(key=lambda each: each.gpu_instance_id)
    return identity


def _choose_start(free: Sequence[int], placement: Placement) -> int:
    """Return where an instance goes. Where the driver chooses, it is the first place here, and was others on real GPUs."""
    if not free or (placement is not None and placement[0] not in free):
        raise Refused(Code.INSUFFICIENT_RESOURCES)
    return min(free) if placement is None else placement[0]


def destroy_gpu_instance(gpu: SimulatedGpu, gpu_instance: int, residents: Sequence[Resident]) -> None:
    """Destroy a GPU instance.

    Raises:
        Refused: IN_USE, it holds a compute instance or somebody is in it; INVALID_ARGUMENT, it is gone.
    """
    if gpu_instance in [
        *(instance.gpu_instance_id for instance in gpu.mig),
        *(resident.gpu_instance_id for resident in residents),
    ]:
        raise Refused(Code.IN_USE)
    gpu.bare.remove(first_matching(gpu.bare, lambda each: each.gpu_instance_id == gpu_instance))
    forget_gone(gpu)


def create_compute_instance(
    gpu: SimulatedGpu, model: GpuModel, gpu_instance: int, number: int, placement: Placement
) -> int:
    """Create a compute instance at ``placement`` (start, size), or where the driver chooses, and return its id.

    Raises:
        Refused: INVALID_ARGUMENT, the GPU instance is gone, no such profile, or it cannot lie there; NOT_SUPPORTED,
            not in this GPU instance; INSUFFICIENT_RESOURCES, no room, or the place is taken.
    """
    owner = first_matching(gpu_instances(gpu), lambda each: each.gpu_instance_id == gpu_instance)
    profile = model.profile(owner.profile)
    if profile is None or not 0 <= number < mig.PROFILE_COUNT:
        raise Refused(Code.INVALID_ARGUMENT)
    if number not in mig.offered(profile):
        raise Refused(Code.NOT_SUPPORTED)
    if placement is not None and (
        placement[0] not in mig.starts(profile, number) or placement[1] != mig.offered(profile)[number].slices
    ):
        raise Refused(Code.INVALID_ARGUMENT)
    present = [instance for instance in gpu.mig if instance.gpu_instance_id == gpu_instance]
    free = mig.free_compute_starts(profile, number, present)
    start = _choose_start(free, placement)
    used_ids = {instance.compute_instance_id for instance in present}
    # Ids start at 0 in every GPU instance, and are reused.
    identity = next(number_free for number_free in range(len(used_ids) + 1) if number_free not in used_ids)
    created = SimulatedMigInstance(
        profile=profile.name,
        start=owner.start,
        gpu_instance_id=gpu_instance,
        compute_instance_id=identity,
        uuid=mig_uuid(gpu.uuid, gpu_instance, identity),
        compute_profile=None if number == profile.whole.id else number,
        compute_start=start,
    )
    gpu.mig = sorted([*gpu.mig, created], key=lambda part: part.place)
    gpu.bare = [instance for instance in gpu.bare if instance.gpu_instance_id != gpu_instance]
    return identity


def destroy_compute_instance(
    gpu: SimulatedGpu, gpu_instance: int, compute_instance: int, residents: Sequence[Resident]
) -> None:
    """Destroy a compute instance; its GPU instance stays.

    Raises:
        Refused: IN_USE, somebody is in it; INVALID_ARGUMENT, it is gone.
    """
    place = (gpu_instance, compute_instance)
    if any(resident.place == place for resident in residents):
        raise Refused(Code.IN_USE)
    destroyed = first_matching(gpu.mig, lambda part: part.place == place)
    gpu.mig.remove(destroyed)
    if all(instance.gpu_instance_id != gpu_instance for instance in gpu.mig):
        gpu.bare.append(SimulatedGpuInstance(destroyed.profile, destroyed.start, gpu_instance))
        gpu.bare.sort(key=lambda each: each.gpu_instance_id)
    forget_gone(gpu)


def residents(state: SimulatedHostState, target: Target) -> list[Resident]:
    """Return the processes that are on a GPU or hold it open."""
    return [*activity.residents(state, target), *holders_of(state, target.handle.index)]


@contextmanager
def _changed_gpu(library: SimulatedLibrary, target: Target) -> Iterator[tuple[SimulatedGpu, list[Resident]]]:
    """Yield the GPU under the lock, and the processes that are on it or hold it open."""
    with library.changed_host() as state:
        gpu = state.gpus[target.handle.index]
        yield gpu, residents(state, Target(target.handle, gpu, target.model))


@abi.entry_point("nvmlDeviceSetMigMode", on=On.GPU)
def _set_mode(library: SimulatedLibrary, target: Target, mode: Any, activation_status: Any) -> None:
    if target.gpu.mig_mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    if abi.number(mode) not in {0, 1} or activation_status is None:
        raise Refused(Code.INVALID_ARGUMENT)
    with _changed_gpu(library, target) as (gpu, residents):
        # Success of the call is not success of the change.
        abi.put(activation_status, set_mode(gpu, target.model, abi.number(mode), residents))


@abi.entry_point("nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement", on=On.GPU)
@abi.entry_point(
    "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceCreateComputeInstanceWithPlacement", on=On.GPU_INSTANCE
)
def _create(library: SimulatedLibrary, target: Target, profile_id: Any, *rest: Any) -> None:
    """Create a GPU instance of a GPU, or a compute instance of a GPU instance."""
    *given, instance = rest
    placement = _placement(given[0]) if given else None
    owner, number = target.handle, abi.number(profile_id)
    with _changed_gpu(library, target) as (gpu, residents):
        if owner.kind is HandleKind.GPU:
            identity = create_gpu_instance(gpu, target.model, number, placement, residents)
            created = Handle(HandleKind.GPU_INSTANCE, owner.index, identity)
        else:
            identity = create_compute_instance(gpu, target.model, owner.gpu_instance, number, placement)
            created = Handle(HandleKind.COMPUTE_INSTANCE, owner.index, owner.gpu_instance, identity)
        abi.put_handle(instance, created)


@abi.entry_point("nvmlGpuInstanceDestroy", on=On.GPU_INSTANCE)
@abi.entry_point("nvmlComputeInstanceDestroy", on=On.COMPUTE_INSTANCE)
def _destroy(library: SimulatedLibrary, target: Target) -> None:
    place = (target.handle.gpu_instance, target.handle.compute_instance)
    with _changed_gpu(library, target) as (gpu, residents):
        if target.handle.kind is HandleKind.GPU_INSTANCE:
            destroy_gpu_instance(gpu, place[0], residents)
        else:
            destroy_compute_instance(gpu, *place, residents)


def _placement(argument: Any) -> tuple[int, int]:
    """Return start and size of a placement argument, which C takes as a pointer: by ``byref``, as gpushare gives it.

    The bindings pass on what they get. The real library takes a structure without ``byref`` for an address, and the
    process crashes; here it is INVALID_ARGUMENT, as NULL is.
    """
    if not hasattr(argument, "_obj"):
        raise Refused(Code.INVALID_ARGUMENT)
    return int(argument._obj.start), int(argument._obj.size)
