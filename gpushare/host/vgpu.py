"""The sessions of NVIDIA vGPU on a hypervisor, as NVML reports them to its host driver (nvml.h, vGPU APIs)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpushare.base.errors import or_none
from gpushare.base.model import Gpu, VgpuSession
from gpushare.host.nvml import nvml_text

if TYPE_CHECKING:
    from gpushare.host.nvml import NvmlReader


def vgpu_sessions(nvml: NvmlReader, gpus: Sequence[Gpu]) -> tuple[VgpuSession, ...]:
    """Return the vGPUs in use on these GPUs, in their order; a GPU that does not answer has none."""
    sessions = []
    for gpu in gpus:
        if gpu.error is None:
            sessions += [_session(nvml, gpu.index, instance) for instance in _instances(nvml, gpu.index)]
    return tuple(sessions)


def _instances(nvml: NvmlReader, index: int) -> Sequence[int]:
    """Return the ids of the active vGPU instances of a GPU; none if the GPU does not answer."""
    active = or_none(lambda: nvml.ask(lambda api: api.nvmlDeviceGetActiveVgpus(nvml.handle(index)), str(index)))
    return active or ()


def _session(nvml: NvmlReader, index: int, instance: int) -> VgpuSession:
    """Return a vGPU in use; what the driver does not tell is None."""

    def ask(getter: str, argument: int) -> Any:
        # None if the vGPU was destroyed meanwhile.
        return or_none(lambda: nvml.ask(lambda api: getattr(api, getter)(argument), str(index)))

    kind = ask("nvmlVgpuInstanceGetType", instance)
    vm = ask("nvmlVgpuInstanceGetVmID", instance)
    used = or_none(lambda: nvml.ask(lambda api: _used_bytes(api, instance), str(index)))
    name = None if kind is None else ask("nvmlVgpuTypeGetName", kind)
    size = None if kind is None else ask("nvmlVgpuTypeGetFramebufferSize", kind)
    return VgpuSession(
        gpu_index=index,
        id=int(instance),
        uuid=nvml_text(ask("nvmlVgpuInstanceGetUUID", instance)),
        type=nvml_text(name),
        vm=None if vm is None else nvml_text(vm[0]),
        memory_total_bytes=None if size is None else int(size),
        memory_used_bytes=None if used is None else int(used),
    )


def _used_bytes(api: Any, instance: int) -> int:
    """Return the used frame buffer in bytes. The driver writes 64 bits, for which the bindings' own call is too small."""
    value = ctypes.c_ulonglong(0)
    api._nvmlCheckReturn(api._nvmlGetFunctionPointer("nvmlVgpuInstanceGetFbUsage")(instance, ctypes.byref(value)))
    return value.value
