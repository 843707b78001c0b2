"""Entry points of the simulated NVML: compute instances in a GPU instance (reading)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpushare.sim import activity
from gpushare.sim.library_mig import engines, handle_of, profile_of, put_handles, require_instance
from gpushare.sim.models import NVML_PROFILE, GiProfile
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
from gpushare.sim.state import SimulatedMigInstance

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

_COMPUTE_PROFILE_COUNT: Final = 9
_REV1_COMPUTE_PROFILE: Final = 7
# Compute instance profiles by slices: their NVML number, which is also their id (-lcip).
_COMPUTE_PROFILES: Final = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, _REV1_COMPUTE_PROFILE: 1}
_OFFERED: Final = {
    1: {0: 1},
    2: {0: 2, 1: 1},
    3: {0: 3, 1: 1, 2: 1},
    4: {0: 4, 1: 2, 3: 1},
    7: {0: 7, 1: 3, 2: 2, 3: 1, 4: 1},
}


@entry_point("nvmlGpuInstanceGetComputeInstanceProfileInfo", on=On.GPU_INSTANCE)
def _compute_profile(_library: SimulatedLibrary, target: Target, profile: Any, engine: Any, info: Any) -> None:
    _put_compute_profile(target, number(profile), number(engine), target_of(info))


@entry_point("nvmlGpuInstanceGetComputeInstanceProfileInfoV", on=On.GPU_INSTANCE)
def _compute_profile_v(_library: SimulatedLibrary, target: Target, profile: Any, engine: Any, info: Any) -> None:
    check_version(target_of(info))
    _put_compute_profile(target, number(profile), number(engine), target_of(info))


def _compute_profiles(profile: GiProfile) -> dict[int, int]:
    """Return how many compute instances of each profile a GPU instance holds, by profile number."""
    # One slice with double memory has a compute instance profile of its own.
    if profile.nvml_profile == NVML_PROFILE["1_SLICE_REV2"]:
        return {_REV1_COMPUTE_PROFILE: 1}
    return _OFFERED.get(profile.slices, {})


def _full_compute_profile(profile: GiProfile) -> int:
    """Return the compute instance profile that takes the whole GPU instance (``*`` in -lcip)."""
    return max(_compute_profiles(profile), key=lambda one: _COMPUTE_PROFILES[one], default=0)


def _put_compute_profile(target: Target, wanted: int, engine: int, info: Any) -> None:
    if not 0 <= wanted < _COMPUTE_PROFILE_COUNT or engine != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    profile = profile_of(target)
    instances = _compute_profiles(profile).get(wanted)
    if instances is None:
        raise Refused(Code.NOT_SUPPORTED)
    slices = _COMPUTE_PROFILES[wanted]
    sms = activity.profile_multiprocessors(target, profile.name)
    whole = slices == profile.slices
    values: dict[str, Any] = {f"shared{name[0].upper()}{name[1:]}": count for name, count in engines(profile).items()}
    values |= {"id": wanted, "sliceCount": slices, "instanceCount": instances}
    # Equal shares: exact on A100; later GPUs give the whole instance a few SMs more.
    values["multiprocessorCount"] = sms if whole else sms // profile.slices * slices
    values["name"] = (f"MIG {profile.name}" if whole else f"MIG {slices}c.{profile.name}").encode()
    put_fields(info, values)


@entry_point("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", on=On.GPU_INSTANCE)
def _compute_capacity(_library: SimulatedLibrary, target: Target, identity: Any, count: Any) -> None:
    if number(identity) not in _compute_profiles(profile_of(target)):
        raise Refused(Code.NOT_SUPPORTED)
    # Every GPU instance of this state holds one compute instance of full size.
    put(count, 0)


@entry_point("nvmlGpuInstanceGetComputeInstances", on=On.GPU_INSTANCE)
def _compute_instances(_library: SimulatedLibrary, target: Target, identity: Any, instances: Any, count: Any) -> None:
    profile = profile_of(target)
    if number(identity) not in _compute_profiles(profile):
        raise Refused(Code.NOT_SUPPORTED)
    mine = _mine(target) if number(identity) == _full_compute_profile(profile) else []
    put_handles(instances, count, [handle_of(Kind.COMPUTE_INSTANCE, target, one) for one in mine])


def _mine(target: Target) -> list[SimulatedMigInstance]:
    return [one for one in target.gpu.mig if one.gpu_instance_id == target.handle.gpu_instance]


@entry_point("nvmlGpuInstanceGetComputeInstanceById", on=On.GPU_INSTANCE)
def _compute_by_id(_library: SimulatedLibrary, target: Target, identity: Any, instance: Any) -> None:
    for one in _mine(target):
        if one.compute_instance_id == number(identity):
            return put_handle(instance, handle_of(Kind.COMPUTE_INSTANCE, target, one))
    raise Refused(Code.NOT_FOUND)


@entry_point("nvmlComputeInstanceGetInfo_v2", "nvmlComputeInstanceGetInfo", on=On.COMPUTE_INSTANCE)
def _compute_info(_library: SimulatedLibrary, target: Target, info: Any) -> None:
    profile, instance = profile_of(target), require_instance(target)
    struct = target_of(info)
    values = {
        "device": Handle(Kind.GPU, target.handle.index),
        "gpuInstance": handle_of(Kind.GPU_INSTANCE, target, instance),
        "id": instance.compute_instance_id,
        "profileId": _full_compute_profile(profile),
    }
    put_fields(struct, values)
    put_fields(struct.placement, {"start": 0, "size": profile.slices})
