"""MIG through NVML: profiles, placements, instances and their processes, and the calls that change them.

All facts are from NVML, never from a table. Traps of the bindings: list calls take raw arrays and counts, and the end of
the profiles is INVALID_ARGUMENT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_uint
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from gpushare.base.errors import (
    GpushareError,
    NoPermission,
    NotFound,
    NotHeld,
    NotSupported,
    OperationFailed,
)
from gpushare.base.model import Gpu, GpuProcess
from gpushare.base.units import MIB
from gpushare.host.host import Host
from gpushare.host.nvml import FUNCTION_NOT_FOUND, IN_USE, NOT_SUPPORTED, NvmlReader, nvml_error
from gpushare.mig.profile import (
    ComputeInstance,
    ComputeProfile,
    Engines,
    GpuInstance,
    Layout,
    Placement,
    Profile,
    on_or_off,
    standard_compute_profiles,
)

# The code of an error for instances that the driver does not list.
HIDDEN: Final = "instances_hidden"
# nvmlReturn_t.
_INVALID_ARGUMENT: Final = 2
# More than nvml.h has (NVML_GPU_INSTANCE_PROFILE_COUNT, 0x12), for newer drivers.
_MOST_PROFILES: Final = 64
_MOST_COMPUTE_PROFILES: Final = 16
# Room for the instances of a profile where the driver does not tell how many there can be.
_MOST_INSTANCES: Final = 64
# The only engine profile (NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED).
_SHARED_ENGINES: Final = 0
P = TypeVar("P", Profile, ComputeProfile)


class MigReader:
    """Reads the MIG layout of GPUs."""

    def __init__(self, nvml: NvmlReader) -> None:
        self._nvml = nvml

    def layout(self, gpu: Gpu) -> Layout:
        """Return the profiles with placements, and the instances; ``gpu`` has its processes and MIG devices.

        While MIG is off, profiles are listed from driver 580 on; a GPU without MIG has none.

        Raises:
            NoPermission: the driver does not list the instances (code ``instances_hidden``): there may be some.
            GpushareError: NVML does not answer.
        """
        profiles = self.profiles(gpu.index)
        if gpu.mig_enabled and not profiles:
            raise _hidden_error(gpu, "profiles")
        instances = tuple(self._instances(gpu, profiles)) if gpu.mig_enabled else ()
        return Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=profiles, instances=instances)

    def profiles(self, index: int) -> tuple[Profile, ...]:
        """Return the GPU instance profiles with their placements (``nvidia-smi mig -lgip``, ``-lgipp``)."""
        kept: tuple[Profile, ...] | None = self._nvml.mig_profiles.get(index)
        if kept is not None:
            return kept
        handle = self._nvml.handle(index)
        gpu = str(index)

        def read(nvml: Any) -> list[tuple[int, Any]]:
            return list(_profile_infos(nvml, partial(nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle), _MOST_PROFILES))

        infos = self._nvml.ask(read, gpu)
        profiles = tuple(self._read_profile(handle, gpu, number, info) for number, info in infos or ())
        # What the driver does not tell now, it may tell later.
        if profiles and all(profile.placements is not None for profile in profiles):
            self._nvml.mig_profiles[index] = profiles
        return profiles

    def _read_profile(self, handle: Any, gpu: str, number: int, info: Any) -> Profile:
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
        listing = partial(_list_gpu_instances, device=self._nvml.handle(gpu.index))
        for profile, handle in self._handles_by_profile(gpu, "GPU instances", profiles, listing):
            yield self._read_instance(gpu, profile, handle)

    def _handles_by_profile(
        self, gpu: Gpu, what: str, profiles: Sequence[P], listing: Callable[..., list[Any]]
    ) -> Iterator[tuple[P, Any]]:
        """Yield the handle of each instance, with its profile: ``listing`` is the call that lists those of one profile.

        Raises:
            NoPermission: the driver hides them; ``what`` is their plural for the message.
        """
        for profile in profiles:
            of_profile = partial(listing, profile_id=profile.id, room=profile.instances or _MOST_INSTANCES)
            handles = self._nvml.ask(of_profile, str(gpu.index))
            if handles is None:
                raise _hidden_error(gpu, what)
            yield from ((profile, handle) for handle in handles)

    def _read_instance(self, gpu: Gpu, profile: Profile, handle: Any) -> GpuInstance:
        info = self._nvml.demand(lambda nvml: nvml.nvmlGpuInstanceGetInfo(handle), str(gpu.index))
        compute = self._compute_profiles(gpu, profile, handle)
        return GpuInstance(
            id=int(info.id),
            profile=replace(profile, compute=compute),
            placement=Placement(int(info.placement.start), int(info.placement.size)),
            compute=tuple(self._compute_instances(gpu, handle, int(info.id), compute)),
            holders=_processes_in(gpu, int(info.id), None),
        )

    def _compute_profiles(self, gpu: Gpu, profile: Profile, handle: Any) -> tuple[ComputeProfile, ...]:
        """Return the compute instance profiles that an existing GPU instance offers."""
        infos = self._nvml.ask(lambda nvml: list(_compute_infos(nvml, handle)), str(gpu.index))
        profiles_inside = tuple(
            ComputeProfile(
                slices=int(info.sliceCount),
                id=int(info.id),
                instances=int(info.instanceCount),
                multiprocessors=int(info.multiprocessorCount),
            )
            for info in infos or ()
        )
        return profiles_inside or profile.compute

    def _compute_instances(
        self, gpu: Gpu, handle: Any, gpu_instance: int, profiles: tuple[ComputeProfile, ...]
    ) -> Iterator[ComputeInstance]:
        """Yield the compute instances of a GPU instance with their UUIDs and processes."""
        uuids = {(mig.gpu_instance_id, mig.compute_instance_id): mig.uuid for mig in gpu.mig_instances}
        listing = partial(_list_compute_instances, instance=handle)
        for profile, instance in self._handles_by_profile(
            gpu, f"compute instances in GPU instance {gpu_instance}", profiles, listing
        ):
            info = self._nvml.demand(partial(_compute_info, part=instance), str(gpu.index))
            yield ComputeInstance(
                id=int(info.id),
                profile=profile,
                placement=Placement(int(info.placement.start), int(info.placement.size)),
                uuid=uuids.get((gpu_instance, int(info.id))),
                holders=_processes_in(gpu, gpu_instance, int(info.id)),
            )


def _compute_profile_id(nvml: Any, instance: Any, slices: int) -> int | None:
    return next((int(info.id) for info in _compute_infos(nvml, instance) if int(info.sliceCount) == slices), None)


def _compute_infos(nvml: Any, instance: Any) -> Iterator[Any]:
    """Yield the compute instance profiles of a GPU instance (``nvidia-smi mig -lcip``)."""

    def ask(number: int) -> Any:
        return nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, _SHARED_ENGINES)

    return (info for _, info in _profile_infos(nvml, ask, _MOST_COMPUTE_PROFILES))


def _hidden_error(gpu: Gpu, what: str) -> NoPermission:
    """Return the error about profiles or instances that the driver shows only to some users."""
    return NoPermission(
        f"the driver does not list the {what} of GPU {gpu.index} for this user",
        "run as root; or have root open /dev/nvidia-caps/nvidia-cap2 (mig/monitor) to you; or name it by UUID: -g MIG-...",
        gpu=gpu.index,
        code=HIDDEN,
    )


def _processes_in(gpu: Gpu, gpu_instance: int, compute_instance: int | None) -> tuple[GpuProcess, ...] | None:
    """Return the processes that NVML lists in a compute instance; None: unknown, as it does not list those of this GPU.

    ``compute_instance`` None: those in a GPU instance and in none of its compute instances.
    """
    if gpu.processes is None:
        return None
    return tuple(
        process
        for process in gpu.processes
        if process.gpu_instance_id == gpu_instance and process.compute_instance_id == compute_instance
    )


def _profile_infos(nvml: Any, ask: Any, most: int) -> Iterator[tuple[int, Any]]:
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
    """Return where a profile may be placed: a first call tells how many, the second one lists them."""
    count = c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, byref(count))
    rows = (nvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, rows, byref(count))
    return tuple(Placement(int(row.start), int(row.size)) for row in rows[: count.value])


def _compute_info(nvml: Any, part: Any) -> Any:
    return nvml.nvmlComputeInstanceGetInfo(part)


def _list_gpu_instances(nvml: Any, device: Any, profile_id: int | None, room: int = _MOST_INSTANCES) -> list[Any]:
    """Return the handles of the GPU instances of a profile, at most ``room``."""
    count, rows = c_uint(), (nvml.c_nvmlGpuInstance_t * room)()
    nvml.nvmlDeviceGetGpuInstances(device, profile_id, rows, byref(count))
    return list(rows[: count.value])


def _list_compute_instances(nvml: Any, instance: Any, profile_id: int | None, room: int = _MOST_INSTANCES) -> list[Any]:
    """Return the handles of the compute instances of a profile in a GPU instance, at most ``room``."""
    count, rows = c_uint(), (nvml.c_nvmlComputeInstance_t * room)()
    nvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, rows, byref(count))
    return list(rows[: count.value])


# nvmlReturn_t.
_INSUFFICIENT_RESOURCES: Final = 23
_RESETLESS_FIELD: Final = 184
# The code of an error: an instance was created but could not be read back.
NOT_READ_BACK: Final = "not_read_back"


def may_change(host: Host) -> bool:
    """Return whether this user may create and destroy instances: root, or a user with access to mig/config.

    ``/proc/driver/nvidia/capabilities/mig/config`` has its minor number, 1, and so its node (MIG user guide).
    """
    return host.root or (not host.is_simulated and os.access("/dev/nvidia-caps/nvidia-cap1", os.R_OK))


def need_rights(host: Host) -> None:
    """Raise NoPermission unless this user may create and destroy instances."""
    if not may_change(host):
        raise NoPermission(
            "changing MIG needs root, or the driver's capability mig/config",
            "run it as root: sudo gpushare ...; or look first: --dry-run; whoever may read /dev/nvidia-caps/nvidia-cap1 "
            "has the capability, and may destroy every instance",
        )


def _pending_hint(index: int, *, enabled: bool, in_use: bool) -> str:
    """Return how a MIG mode is changed that the driver changes only at a reset or reboot; our own change is taken back.

    Where the driver cannot reset the GPU, as in some virtual machines, a reboot completes a pending change (MIG user
    guide). MIG cannot be switched off while there are instances.
    """
    first = f"end the programs on it: gpushare status -g {index}"
    if not in_use:
        first = f"reset it: sudo nvidia-smi --gpu-reset -i {index}"
    destroy = "" if enabled else f"gpushare mig destroy all -g {index}; "
    last = f"{destroy}sudo nvidia-smi -i {index} -mig {int(enabled)}; sudo reboot"
    return f"{first}; then run this again; if that fails, too: {last}; then run this again"


class MigChanges:
    """The modifying calls; each raises as `nvml_error`. The mode needs root, the others root or mig/config."""

    def __init__(self, nvml: NvmlReader) -> None:
        self._nvml = nvml

    def mode(self, index: int) -> tuple[bool, bool] | None:
        """Return MIG mode, current and pending (nvmlDeviceGetMigMode); None: no MIG."""
        handle = self._nvml.handle(index)
        mode = self._nvml.ask(lambda nvml: nvml.nvmlDeviceGetMigMode(handle), str(index))
        return None if mode is None else (bool(mode[0]), bool(mode[1]))

    def set_mode(self, index: int, *, enabled: bool) -> None:
        """Switch MIG mode (nvmlDeviceSetMigMode; ``nvidia-smi -i N -mig 1``), current and pending."""
        handle = self._nvml.handle(index)
        gpu = str(index)
        status = self._nvml.demand(lambda nvml: nvml.nvmlDeviceSetMigMode(handle, int(enabled)), gpu)
        # "May unbind or reset the device": older handles must not be used.
        self._nvml.restart()
        if status:
            # The activationStatus, an nvmlReturn_t: the call may succeed and the change fail. The library's own text: the
            # bindings call a reset a restart.
            text = self._nvml.demand(lambda nvml: str(nvml.nvmlErrorString(int(status))))
            raise type(nvml_error(int(status), text))(
                f"GPU {index}: MIG {on_or_off(enabled)} is only pending: {text}",
                _pending_hint(index, enabled=enabled, in_use=int(status) == IN_USE),
                gpu=gpu,
                code="mode_pending",
            )
        held = self.mode(index)
        if held != (enabled, enabled):
            now = "unknown" if held is None else f"{on_or_off(held[0])}, pending {on_or_off(held[1])}"
            raise OperationFailed(
                f"GPU {index}: MIG {on_or_off(enabled)} was accepted, but the mode is {now}",
                _pending_hint(index, enabled=enabled, in_use=False),
                gpu=gpu,
                code="mode_pending",
            )

    def create_gpu_instance(self, index: int, profile_id: int, placement: Placement) -> int:
        """Create a GPU instance at an explicit placement and return its id, read back (``-cgi ID:START``)."""
        handle = self._nvml.handle(index)
        gpu = str(index)

        def create(nvml: Any) -> Any:
            place = nvml.c_nvmlGpuInstancePlacement_t(start=placement.start, size=placement.size)
            # The bindings pass the argument on unchanged: without byref the process crashes.
            return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, byref(place))

        info = self._read_back(self._demand_change(create, gpu), "nvmlGpuInstanceGetInfo", index)
        if (int(info.profileId), int(info.placement.start)) != (profile_id, placement.start):
            # The driver put our new instance somewhere else: destroy it, because nothing refers to that place.
            message = (
                f"GPU {index}: profile {profile_id} was requested at {placement} "
                f"and created as {info.profileId} at {info.placement.start}"
            )
            hint = "see: gpushare mig status"
            try:
                self.destroy_gpu_instance(index, int(info.id))
            except GpushareError as error:
                message += f", where it stays: {error.message}"
                hint = f"destroy it: sudo nvidia-smi mig -dgi -i {index} -gi {info.id}"
            raise NotHeld(message, hint, gpu=gpu)
        return int(info.id)

    def create_compute_instance(
        self, index: int, gpu_instance: int, slices: int, placement: Placement | None = None
    ) -> int:
        """Create a compute instance of a size and return its id, read back (``-cci ID[:START] -gi N``).

        A driver without the call for placements of compute instances chooses the place.
        """
        handle = self._nvml.handle(index)
        gpu = str(index)

        def create(nvml: Any) -> Any:
            instance = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
            profile = _compute_profile_id(nvml, instance, slices)
            if profile is None:
                return None
            if placement is not None:
                place = nvml.c_nvmlComputeInstancePlacement_t(start=placement.start, size=placement.size)
                try:
                    return nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile, byref(place))
                except nvml.NVMLError as error:
                    if error.value != FUNCTION_NOT_FOUND:
                        raise
            # The driver chooses the place.
            return nvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)

        made = self._demand_change(create, gpu)
        if made is None:
            raise NotSupported(
                f"GPU {index}: GPU instance {gpu_instance} offers no compute instance of {slices} slices",
                f"see what it offers: nvidia-smi mig -i {index} -gi {gpu_instance} -lcip",
                gpu=gpu,
                code="mig_profile_unknown",
            )
        return int(self._read_back(made, "nvmlComputeInstanceGetInfo", index).id)

    def _read_back(self, made: Any, call: str, index: int) -> Any:
        """Return the info of a new instance. Raises OperationFailed (code `NOT_READ_BACK`) if it cannot be read."""
        try:
            return self._nvml.demand(lambda nvml: getattr(nvml, call)(made), str(index))
        except GpushareError as error:
            raise OperationFailed(
                f"GPU {index}: an instance was created but cannot be read: {error.message}",
                error.hint,
                gpu=index,
                code=NOT_READ_BACK,
            ) from error

    def gpu_instance_ids(self, index: int, profile_id: int) -> tuple[int, ...] | None:
        """Return the ids of the GPU instances of a profile; None: the driver does not list them."""

        def read(nvml: Any, device: Any) -> list[int]:
            return [
                int(nvml.nvmlGpuInstanceGetInfo(instance).id)
                for instance in _list_gpu_instances(nvml, device, profile_id)
            ]

        return self._ids_or_none(index, read)

    def compute_instance_ids(self, index: int, gpu_instance: int, slices: int) -> tuple[int, ...] | None:
        """Return the ids of the compute instances of a size in a GPU instance; None: the driver does not list them."""

        def read(nvml: Any, device: Any) -> list[int]:
            instance = nvml.nvmlDeviceGetGpuInstanceById(device, gpu_instance)
            profile = _compute_profile_id(nvml, instance, slices)
            instances = [] if profile is None else _list_compute_instances(nvml, instance, profile)
            return [int(_compute_info(nvml, part).id) for part in instances]

        return self._ids_or_none(index, read)

    def _ids_or_none(self, index: int, read: Callable[[Any, Any], list[int]]) -> tuple[int, ...] | None:
        """Return the ids that ``read`` finds on a GPU; None: NVML refuses."""
        try:
            handle = self._nvml.handle(index)
            return tuple(self._nvml.demand(lambda nvml: read(nvml, handle), str(index)))
        except GpushareError:
            return None

    def switches_without_reset(self, index: int) -> bool | None:
        """Return whether the mode changes without a reset of the GPU (NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED, 184)."""
        handle = self._nvml.handle(index)

        def ask(nvml: Any) -> bool | None:
            value = nvml.nvmlDeviceGetFieldValues(handle, [_RESETLESS_FIELD])[0]
            return None if value.nvmlReturn else bool(value.value.uiVal)

        return self._nvml.ask(ask, str(index))

    def destroy_compute_instance(self, index: int, gpu_instance: int, compute_instance: int) -> None:
        """Destroy a compute instance and check that it is gone (``-dci``)."""
        handle = self._nvml.handle(index)

        def find(nvml: Any) -> Any:
            instance = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
            return nvml.nvmlGpuInstanceGetComputeInstanceById(instance, compute_instance)

        self._demand_change(lambda nvml: nvml.nvmlComputeInstanceDestroy(find(nvml)), str(index))
        self._check_destroyed(index, f"compute instance {compute_instance} of GPU instance {gpu_instance}", find)

    def destroy_gpu_instance(self, index: int, gpu_instance: int) -> None:
        """Destroy a GPU instance without compute instances and check that it is gone (``-dgi``)."""
        handle = self._nvml.handle(index)

        def find(nvml: Any) -> Any:
            return nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)

        self._demand_change(lambda nvml: nvml.nvmlGpuInstanceDestroy(find(nvml)), str(index))
        self._check_destroyed(index, f"GPU instance {gpu_instance}", find)

    def _check_destroyed(self, index: int, title: str, find: Callable[[Any], Any]) -> None:
        """Raise NotHeld if ``find``, a call of NVML, still finds an instance that was destroyed."""
        try:
            self._nvml.demand(find, str(index))
        except NotFound:
            return
        raise NotHeld(
            f"GPU {index}: the driver reported that {title} was destroyed, and it is still there",
            "see: gpushare mig status",
            gpu=index,
        )

    def _demand_change(self, call: Callable[[Any], Any], gpu: str) -> Any:
        """Return what a changing call of NVML returns. Raises OperationFailed if the driver has no room for an instance."""

        def act(nvml: Any) -> Any:
            try:
                return call(nvml)
            except nvml.NVMLError as error:
                if error.value != _INSUFFICIENT_RESOURCES:
                    raise
                raise OperationFailed(
                    f"GPU {gpu}: the driver refuses the instance: slices of its placement are taken (Insufficient Resources)",
                    "see what is free: gpushare mig status",
                    gpu=gpu,
                    code="insufficient_resources",
                ) from None

        return self._nvml.demand(act, gpu)
