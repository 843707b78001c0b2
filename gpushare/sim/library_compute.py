"""Entry points of the simulated NVML: compute instances in a GPU instance (reading)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpushare.sim import activity, mig_compute
from gpushare.sim.library_mig import (
    engines,
    handle_of,
    profile_of,
    put_handles,
    put_placements,
    require_instance,
)
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
from gpushare.sim.state import SimulatedMigInstance

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary


@entry_point("nvmlGpuInstanceGetComputeInstanceProfileInfo", on=On.GPU_INSTANCE)
def _compute_profile(_library: SimulatedLibrary, target: Target, profile: Any, engine: Any, info: Any) -> None:
    _put_compute_profile(target, number(profile), number(engine), target_of(info))


@entry_point("nvmlGpuInstanceGetComputeInstanceProfileInfoV", on=On.GPU_INSTANCE)
def _compute_profile_v(_library: SimulatedLibrary, target: Target, profile: Any, engine: Any, info: Any) -> None:
    check_version(target_of(info))
    _put_compute_profile(target, number(profile), number(engine), target_of(info))


def _put_compute_profile(target: Target, wanted: int, engine: int, info: Any) -> None:
    if not 0 <= wanted < mig_compute.PROFILE_COUNT or engine != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    profile = profile_of(target)
    instances = mig_compute.offered(profile).get(wanted)
    if instances is None:
        raise Refused(Code.NOT_SUPPORTED)
    slices = mig_compute.slices_of(wanted)
    whole = slices == profile.slices
    values: dict[str, Any] = {f"shared{name[0].upper()}{name[1:]}": count for name, count in engines(profile).items()}
    values |= {"id": wanted, "sliceCount": slices, "instanceCount": instances}
    values["multiprocessorCount"] = activity.compute_multiprocessors(target, profile, slices)
    values["name"] = (f"MIG {profile.name}" if whole else f"MIG {slices}c.{profile.name}").encode()
    put_fields(info, values)


@entry_point("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", on=On.GPU_INSTANCE)
def _compute_capacity(_library: SimulatedLibrary, target: Target, identity: Any, count: Any) -> None:
    profile = _offering(target, number(identity))
    put(count, mig_compute.remaining_capacity(profile, number(identity), _mine(target)))


def _offering(target: Target, wanted: int) -> GiProfile:
    """Return the GPU instance's profile, if it offers a compute instance profile; NOT_SUPPORTED otherwise."""
    profile = profile_of(target)
    if wanted not in mig_compute.offered(profile):
        raise Refused(Code.NOT_SUPPORTED)
    return profile


@entry_point("nvmlGpuInstanceGetComputeInstancePossiblePlacements", on=On.GPU_INSTANCE)
def _compute_placements(_library: SimulatedLibrary, target: Target, identity: Any, placements: Any, count: Any) -> None:
    profile, size = _offering(target, number(identity)), mig_compute.slices_of(number(identity))
    put_placements(placements, count, [(start, size) for start in mig_compute.starts(profile, number(identity))])


@entry_point("nvmlGpuInstanceGetComputeInstances", on=On.GPU_INSTANCE)
def _compute_instances(_library: SimulatedLibrary, target: Target, identity: Any, instances: Any, count: Any) -> None:
    profile = _offering(target, number(identity))
    mine = [one for one in _mine(target) if mig_compute.number_of(profile, one) == number(identity)]
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
        "profileId": mig_compute.number_of(profile, instance),
    }
    put_fields(struct, values)
    span = mig_compute.span(profile, instance)
    put_fields(struct.placement, {"start": span.start, "size": len(span)})
