"""Changing MIG through NVML: mode, GPU instances, compute instances. Each call is one change, read back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import GpushareError, InUse, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.host.mig import compute_instance_ids, compute_profile_id, gpu_instance_ids
from gpushare.host.nvml_errors import FUNCTION_NOT_FOUND

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.nvml import NvmlReader
    from gpushare.mig.profile import Placement

# nvmlReturn_t values of activationStatus (nvml.h): success of the call is not success of the change.
_NOT_SUPPORTED: Final = 3
_TIMEOUT: Final = 10
_RESET_REQUIRED: Final = 16
_IN_USE: Final = 19
_INSUFFICIENT_RESOURCES: Final = 23
_RESETLESS_FIELD: Final = 184
# The code of an error of a call that made something, of which then nothing could be read.
NOT_READ_BACK: Final = "not_read_back"


def may_change(host: Host) -> bool:
    """Return whether this user may create and destroy instances: root, or the mig/config capability is open to it.

    ``/proc/driver/nvidia/capabilities/mig/config`` tells its minor, 1, and with it the node (MIG user guide).
    """
    return host.uid == 0 or (not host.is_simulated and os.access("/dev/nvidia-caps/nvidia-cap1", os.R_OK))


class MigChanges:
    """The changing calls; each raises what `nvml_error` says. The mode needs root, the others root or mig/config."""

    def __init__(self, nvml: NvmlReader) -> None:
        self._nvml = nvml

    def mode(self, index: int) -> tuple[bool, bool] | None:
        """Return MIG mode, current and pending (nvmlDeviceGetMigMode); None: no MIG."""
        handle = self._nvml.handle(index)
        mode = self._nvml.ask(lambda nvml: nvml.nvmlDeviceGetMigMode(handle), str(index))
        return None if mode is None else (bool(mode[0]), bool(mode[1]))

    def set_mode(self, index: int, *, enabled: bool) -> None:
        """Switch MIG mode (nvmlDeviceSetMigMode; ``nvidia-smi -i N -mig 1``). Success is both modes as wished.

        Raises:
            InUse: somebody is on the GPU; the mode is only pending.
            OperationFailed: the GPU must be reset, or the host rebooted, first (code ``reset_required``).
            TimedOut, NoPermission, NotSupported: as NVML says.
        """
        handle, gpu = self._nvml.handle(index), str(index)
        status = self._nvml.demand(lambda nvml: nvml.nvmlDeviceSetMigMode(handle, int(enabled)), gpu)
        # "May unbind or reset the device": handles of before are not to be used again.
        self._nvml.restart()
        if status:
            raise _not_activated(int(status), index, enabled=enabled)
        held = self.mode(index)
        if held != (enabled, enabled):
            now = "unknown" if held is None else f"{_word(held[0])}, pending {_word(held[1])}"
            raise OperationFailed(
                f"GPU {index}: MIG {_word(enabled)} was accepted, and the mode is {now}",
                f"with nobody on it, reset the GPU: sudo nvidia-smi --gpu-reset -i {index}; or reboot",
                gpu=gpu,
                code="mode_pending",
            )

    def create_gpu_instance(self, index: int, profile_id: int, placement: Placement) -> int:
        """Create a GPU instance at an explicit placement and return its id, read back (``-cgi ID:START``).

        Raises:
            InUse: it would be the first, and somebody is on the GPU.
            OperationFailed: the place is taken, or another one was given.
        """
        handle, gpu = self._nvml.handle(index), str(index)

        def create(nvml: Any) -> Any:
            place = nvml.c_nvmlGpuInstancePlacement_t(start=placement.start, size=placement.size)
            # The bindings pass it on as it is: without byref the process crashes.
            return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, byref(place))

        info = self._read_back(self._demand(create, gpu), "nvmlGpuInstanceGetInfo", index)
        if (int(info.profileId), int(info.placement.start)) != (profile_id, placement.start):
            # It is known to be ours, and at a place where nobody would look for it.
            with contextlib.suppress(GpushareError):
                self.destroy_gpu_instance(index, int(info.id))
            raise OperationFailed(
                f"GPU {index}: profile {profile_id} was asked for at {placement} "
                f"and came as {info.profileId} at {info.placement.start}",
                "see: gpushare mig status",
                gpu=gpu,
                code="not_held",
            )
        return int(info.id)

    def create_compute_instance(
        self, index: int, gpu_instance: int, slices: int, placement: Placement | None = None
    ) -> int:
        """Create a compute instance of so many slices and return its id, read back (``-cci ID[:START] -gi N``).

        A driver that knows no placement for compute instances chooses itself.

        Raises:
            NotSupported: the GPU instance offers none of this size.
            OperationFailed: there is no room.
        """
        handle, gpu = self._nvml.handle(index), str(index)

        def create(nvml: Any) -> Any:
            instance = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
            profile = compute_profile_id(nvml, instance, slices)
            if profile is None:
                return None
            if placement is not None:
                place = nvml.c_nvmlComputeInstancePlacement_t(start=placement.start, size=placement.size)
                try:
                    return nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile, byref(place))
                except nvml.NVMLError as error:
                    if error.value != FUNCTION_NOT_FOUND:
                        raise
            return nvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)

        made = self._demand(create, gpu)
        if made is None:
            raise NotSupported(
                f"GPU {index}: GPU instance {gpu_instance} offers no compute instance of {slices} slices",
                f"see what it offers: nvidia-smi mig -i {index} -gi {gpu_instance} -lcip",
                gpu=gpu,
                code="mig_profile_unknown",
            )
        return int(self._read_back(made, "nvmlComputeInstanceGetInfo", index).id)

    def _read_back(self, made: Any, call: str, index: int) -> Any:
        try:
            return self._nvml.demand(lambda nvml: getattr(nvml, call)(made), str(index))
        except GpushareError as error:
            raise OperationFailed(
                f"GPU {index}: an instance was made, and cannot be read: {error.message}",
                error.hint,
                gpu=str(index),
                code=NOT_READ_BACK,
            ) from error

    def gpu_instance_ids(self, index: int, profile_id: int) -> tuple[int, ...] | None:
        """Return the ids of the GPU instances of a profile; None: the driver would not tell."""
        return self._ids(index, lambda nvml, handle: gpu_instance_ids(nvml, handle, profile_id))

    def compute_instance_ids(self, index: int, gpu_instance: int, slices: int) -> tuple[int, ...] | None:
        """Return the ids of the compute instances of so many slices in a GPU instance; None: the driver would not tell."""
        return self._ids(index, lambda nvml, handle: compute_instance_ids(nvml, handle, gpu_instance, slices))

    def _ids(self, index: int, read: Callable[[Any, Any], list[int]]) -> tuple[int, ...] | None:
        try:
            handle = self._nvml.handle(index)
            return tuple(self._nvml.demand(lambda nvml: read(nvml, handle), str(index)))
        except GpushareError:
            return None

    def resetless(self, index: int) -> bool | None:
        """Return whether the mode changes without a reset of the GPU (NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED, 184)."""
        handle = self._nvml.handle(index)

        def ask(nvml: Any) -> bool | None:
            value = nvml.nvmlDeviceGetFieldValues(handle, [_RESETLESS_FIELD])[0]
            return None if value.nvmlReturn else bool(value.value.uiVal)

        return self._nvml.ask(ask, str(index))

    def destroy_compute_instance(self, index: int, gpu_instance: int, compute_instance: int) -> None:
        """Destroy a compute instance and see that it is gone (``-dci``).

        Raises:
            InUse: a process or an NVML handle is in it.
        """
        handle = self._nvml.handle(index)

        def find(nvml: Any) -> Any:
            instance = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
            return nvml.nvmlGpuInstanceGetComputeInstanceById(instance, compute_instance)

        self._demand(lambda nvml: nvml.nvmlComputeInstanceDestroy(find(nvml)), str(index))
        self._gone(index, f"compute instance {compute_instance} of GPU instance {gpu_instance}", find)

    def destroy_gpu_instance(self, index: int, gpu_instance: int) -> None:
        """Destroy a GPU instance that has no compute instance and see that it is gone (``-dgi``).

        Raises:
            InUse: a compute instance, a process or an NVML handle is in it.
        """
        handle = self._nvml.handle(index)

        def find(nvml: Any) -> Any:
            return nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)

        self._demand(lambda nvml: nvml.nvmlGpuInstanceDestroy(find(nvml)), str(index))
        self._gone(index, f"GPU instance {gpu_instance}", find)

    def _gone(self, index: int, what: str, find: Any) -> None:
        try:
            self._nvml.demand(partial(find), str(index))
        except NotFound:
            return
        raise OperationFailed(
            f"GPU {index}: the driver said that {what} was destroyed, and it is still there",
            "see: gpushare mig status",
            gpu=str(index),
            code="not_held",
        )

    def _demand(self, call: Any, gpu: str) -> Any:
        def ask(nvml: Any) -> Any:
            try:
                return call(nvml)
            except nvml.NVMLError as error:
                if error.value == _INSUFFICIENT_RESOURCES:
                    return error
                raise

        answer = self._nvml.demand(ask, gpu)
        if isinstance(answer, Exception):
            raise OperationFailed(
                f"GPU {gpu}: the driver has no room for it there (Insufficient Resources)",
                "see what is free: gpushare mig status",
                gpu=gpu,
                code="insufficient_resources",
            )
        return answer


def _word(enabled: object) -> str:
    return "on" if enabled else "off"


def _not_activated(status: int, index: int, *, enabled: bool) -> GpushareError:
    what, gpu = f"GPU {index}: MIG {_word(enabled)}", str(index)
    if status == _IN_USE:
        return InUse(
            f"{what} is only pending, because somebody uses the GPU",
            f"see who: gpushare status -g {index}; sudo fuser -v /dev/nvidia*; end them, then run it again",
            gpu=gpu,
        )
    if status == _NOT_SUPPORTED:
        return NotSupported(
            f"{what} is only pending: the GPU cannot be reset here",
            "in a virtual machine, reboot it; on the host, reboot or unload the driver",
            gpu=gpu,
            code="mode_pending",
        )
    if status == _TIMEOUT:
        return TimedOut(f"{what} timed out", "see why: sudo dmesg | grep -i nvrm", gpu=gpu)
    why = "the GPU must be reset first" if status == _RESET_REQUIRED else f"NVML says {status}"
    return OperationFailed(
        f"{what} is only pending: {why}",
        f"with nobody on it: sudo nvidia-smi --gpu-reset -i {index}; or reboot",
        gpu=gpu,
        code="reset_required" if status == _RESET_REQUIRED else "mode_pending",
    )
