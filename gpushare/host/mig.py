"""MIG as the driver reports it: profiles, placements, instances and who is in them.

Everything is asked of NVML; no table stands in for a driver that is there. Traps of the bindings: list
calls take raw arrays and counts, and the end of the profiles is INVALID_ARGUMENT.
"""

from __future__ import annotations

from ctypes import byref, c_uint
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import NoPermission
from gpushare.host.nvml_errors import NOT_SUPPORTED
from gpushare.mig.profile import (
    ComputeInstance,
    ComputeProfile,
    Engines,
    GpuInstance,
    Layout,
    Placement,
    Profile,
    standard_compute_profiles,
)
from gpushare.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpushare.host.nvml import NvmlReader
    from gpushare.model import Gpu, GpuProcess

# The code of an error for instances that the driver does not tell.
HIDDEN: Final = "instances_hidden"
# nvmlReturn_t.
_INVALID_ARGUMENT: Final = 2
# More than nvml.h has (NVML_GPU_INSTANCE_PROFILE_COUNT, 0x12): a newer driver's are found too.
_PROFILES: Final = 64
_COMPUTE_PROFILES: Final = 16
# The only engine profile (NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED).
_SHARED_ENGINES: Final = 0


class MigReader:
    """Reads the MIG layout of GPUs."""

    def __init__(self, nvml: NvmlReader) -> None:
        self._nvml = nvml

    def layout(self, gpu: Gpu) -> Layout:
        """Return profiles with placements, and what exists; ``gpu`` with its processes and MIG devices.

        Profiles are listed also while MIG is off, from driver 580 on; a GPU without MIG has none.

        Raises:
            NoPermission: the driver does not tell which instances there are (code ``instances_hidden``): that none is
                there is not known.
            GpushareError: NVML does not answer.
        """
        profiles = self.profiles(gpu.index)
        if gpu.mig_enabled and not profiles:
            raise _hidden(gpu, "profiles")
        found = tuple(self._instances(gpu, profiles)) if gpu.mig_enabled else ()
        return Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=profiles, instances=found)

    def profiles(self, index: int) -> tuple[Profile, ...]:
        """Return the GPU instance profiles with their placements (``nvidia-smi mig -lgip``, ``-lgipp``)."""
        handle, gpu = self._nvml.handle(index), str(index)
        infos = self._nvml.ask(
            lambda nvml: list(
                _infos(nvml, lambda number: nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number), _PROFILES)
            ),
            gpu,
        )
        return tuple(self._profile(handle, gpu, number, info) for number, info in infos or ())

    def free(self, index: int, profile: Profile) -> int | None:
        """Return how many more of a profile fit (nvmlDeviceGetGpuInstanceRemainingCapacity; the Free column of -lgip)."""
        handle = self._nvml.handle(index)
        count = self._nvml.ask(
            lambda nvml: nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile.id), str(index)
        )
        return None if count is None else int(getattr(count, "value", count))

    def _profile(self, handle: Any, gpu: str, number: int, info: Any) -> Profile:
        name = str(info.name).removeprefix("MIG ") or f"{info.sliceCount}g.{round(info.memorySizeMB / 1024)}gb"
        placements = self._nvml.ask(lambda nvml: _placements(nvml, handle, info.id), gpu)
        return Profile(
            name=name,
            id=int(info.id),
            nvml_profile=number,
            slices=int(info.sliceCount),
            memory_bytes=int(info.memorySizeMB) * MIB,
            multiprocessors=int(info.multiprocessorCount),
            engines=Engines(
                copy=int(info.copyEngineCount),
                decoders=int(info.decoderCount),
                encoders=int(info.encoderCount),
                jpeg=int(info.jpegCount),
                optical_flow=int(info.ofaCount),
            ),
            instances=int(info.instanceCount),
            placements=placements,
            # The driver lists compute instance profiles only inside an existing GPU instance.
            compute=standard_compute_profiles(int(info.sliceCount), number),
        )

    def _instances(self, gpu: Gpu, profiles: tuple[Profile, ...]) -> Iterator[GpuInstance]:
        handle = self._nvml.handle(gpu.index)
        for profile in profiles:
            room = profile.instances or _PROFILES
            list_them = partial(_gpu_instances, handle=handle, profile_id=profile.id, room=room)
            handles = self._nvml.ask(list_them, str(gpu.index))
            if handles is None:
                raise _hidden(gpu, "GPU instances")
            for instance in handles:
                yield self._instance(gpu, profile, instance)

    def _instance(self, gpu: Gpu, profile: Profile, handle: Any) -> GpuInstance:
        info = self._nvml.demand(lambda nvml: nvml.nvmlGpuInstanceGetInfo(handle), str(gpu.index))
        compute = self._compute_profiles(gpu, profile, handle)
        profile = replace(profile, compute=compute)
        return GpuInstance(
            id=int(info.id),
            profile=profile,
            placement=Placement(int(info.placement.start), int(info.placement.size)),
            compute=tuple(self._compute_instances(gpu, handle, int(info.id), compute)),
            # Who is in the GPU instance but in none of its compute instances that NVML names.
            holders=_in(gpu, int(info.id), None),
        )

    def _compute_profiles(self, gpu: Gpu, profile: Profile, handle: Any) -> tuple[ComputeProfile, ...]:
        infos = self._nvml.ask(lambda nvml: list(_compute_infos(nvml, handle)), str(gpu.index))
        found = tuple(
            ComputeProfile(
                slices=int(info.sliceCount),
                id=int(info.id),
                instances=int(info.instanceCount),
                multiprocessors=int(info.multiprocessorCount),
            )
            for info in infos or ()
        )
        return found or profile.compute

    def _compute_instances(
        self, gpu: Gpu, handle: Any, gpu_instance: int, profiles: tuple[ComputeProfile, ...]
    ) -> Iterator[ComputeInstance]:
        uuids = {(mig.gpu_instance_id, mig.compute_instance_id): mig.uuid for mig in gpu.mig_instances}
        for profile in profiles:
            room = profile.instances or _PROFILES
            list_them = partial(_compute_instances, handle=handle, profile_id=profile.id, room=room)
            handles = self._nvml.ask(list_them, str(gpu.index))
            if handles is None:
                raise _hidden(gpu, f"compute instances in GPU instance {gpu_instance}")
            for one in handles:
                info = self._nvml.demand(partial(_compute_info, handle=one), str(gpu.index))
                yield ComputeInstance(
                    id=int(info.id),
                    profile=profile,
                    placement=Placement(int(info.placement.start), int(info.placement.size)),
                    uuid=uuids.get((gpu_instance, int(info.id))),
                    holders=_in(gpu, gpu_instance, int(info.id)),
                )


def compute_profile_id(nvml: Any, instance: Any, slices: int) -> int | None:
    """Return the id of the compute instance profile with so many slices in an NVML GPU instance; None: not offered."""
    return next((int(info.id) for info in _compute_infos(nvml, instance) if int(info.sliceCount) == slices), None)


def _compute_infos(nvml: Any, instance: Any) -> Iterator[Any]:
    """Yield the compute instance profiles of a GPU instance (``nvidia-smi mig -lcip``)."""

    def ask(number: int) -> Any:
        return nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, _SHARED_ENGINES)

    return (info for _, info in _infos(nvml, ask, _COMPUTE_PROFILES))


def _hidden(gpu: Gpu, what: str) -> NoPermission:
    return NoPermission(
        f"the driver does not list the {what} of GPU {gpu.index} for this user",
        "run as root; or let root open /dev/nvidia-caps/nvidia-cap2 (mig/monitor); or name it by UUID: -g MIG-...",
        gpu=str(gpu.index),
        code=HIDDEN,
    )


def _in(gpu: Gpu, gpu_instance: int, compute_instance: int | None) -> tuple[GpuProcess, ...] | None:
    if gpu.processes is None:
        return None
    return tuple(
        process
        for process in gpu.processes
        if process.gpu_instance_id == gpu_instance and process.compute_instance_id == compute_instance
    )


def _infos(nvml: Any, ask: Any, most: int) -> Iterator[tuple[int, Any]]:
    """Yield the profiles by number: NOT_SUPPORTED is a gap, INVALID_ARGUMENT the end."""
    for number in range(most):
        try:
            yield number, ask(number)
        except nvml.NVMLError as error:
            if error.value == _INVALID_ARGUMENT:
                return
            if error.value != NOT_SUPPORTED:
                raise


def _placements(nvml: Any, handle: Any, profile_id: int) -> tuple[Placement, ...]:
    count = c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, byref(count))
    rows = (nvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, rows, byref(count))
    return tuple(Placement(int(row.start), int(row.size)) for row in rows[: count.value])


def _gpu_instances(nvml: Any, handle: Any, profile_id: int | None, room: int) -> list[Any]:
    count, rows = c_uint(), (nvml.c_nvmlGpuInstance_t * room)()
    nvml.nvmlDeviceGetGpuInstances(handle, profile_id, rows, byref(count))
    return list(rows[: count.value])


def gpu_instance_ids(nvml: Any, handle: Any, profile_id: int) -> list[int]:
    """Return the ids of the GPU instances of a profile."""
    found = _gpu_instances(nvml, handle, profile_id, _PROFILES)
    return [int(nvml.nvmlGpuInstanceGetInfo(one).id) for one in found]


def compute_instance_ids(nvml: Any, handle: Any, gpu_instance: int, slices: int) -> list[int]:
    """Return the ids of the compute instances of so many slices in a GPU instance."""
    instance = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
    profile = compute_profile_id(nvml, instance, slices)
    found = [] if profile is None else _compute_instances(nvml, instance, profile, _PROFILES)
    return [int(nvml.nvmlComputeInstanceGetInfo(one).id) for one in found]


def _compute_info(nvml: Any, handle: Any) -> Any:
    return nvml.nvmlComputeInstanceGetInfo(handle)


def _compute_instances(nvml: Any, handle: Any, profile_id: int | None, room: int) -> list[Any]:
    count, rows = c_uint(), (nvml.c_nvmlComputeInstance_t * room)()
    nvml.nvmlGpuInstanceGetComputeInstances(handle, profile_id, rows, byref(count))
    return list(rows[: count.value])
