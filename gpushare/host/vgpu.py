"""The sessions of NVIDIA vGPU on a hypervisor, as NVML reports them to its host driver (nvml.h, vGPU APIs)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpushare.base.errors import GpushareError, or_none
from gpushare.base.model import Gpu, VgpuSession

if TYPE_CHECKING:
    from gpushare.host.nvml import NvmlReader


def vgpu_sessions(nvml: NvmlReader, gpus: Sequence[Gpu]) -> tuple[VgpuSession, ...]:
    """Return the vGPUs in use, by GPU; none of a GPU that does not answer."""
    sessions = []
    for gpu in gpus:
        if gpu.error is None:
            sessions += [_session(nvml, gpu.index, instance) for instance in _active(nvml, gpu.index)]
    return tuple(sessions)


def _active(nvml: NvmlReader, index: int) -> Sequence[int]:
    try:
        handle = nvml.handle(index)
        return nvml.ask(lambda api: api.nvmlDeviceGetActiveVgpus(handle), str(index)) or ()
    except GpushareError:
        return ()


def _session(nvml: NvmlReader, index: int, instance: int) -> VgpuSession:
    def told(name: str, argument: int) -> Any:
        # It may have been destroyed since; then its facts are unknown.
        return or_none(lambda: nvml.ask(lambda api: getattr(api, name)(argument), str(index)))

    kind, vm = told("nvmlVgpuInstanceGetType", instance), told("nvmlVgpuInstanceGetVmID", instance)
    used = or_none(lambda: nvml.ask(lambda api: _used(api, instance), str(index)))
    name = None if kind is None else told("nvmlVgpuTypeGetName", kind)
    size = None if kind is None else told("nvmlVgpuTypeGetFramebufferSize", kind)
    return VgpuSession(
        gpu_index=index,
        id=int(instance),
        uuid=_text(told("nvmlVgpuInstanceGetUUID", instance)),
        type=_text(name),
        vm=None if vm is None else _text(vm[0]),
        memory_total_bytes=None if size is None else int(size),
        memory_used_bytes=None if used is None else int(used),
    )


def _used(api: Any, instance: int) -> int:
    """Return the used frame buffer; the bindings have room for 32 bits only, and the driver writes 64."""
    value = ctypes.c_ulonglong(0)
    api._nvmlCheckReturn(api._nvmlGetFunctionPointer("nvmlVgpuInstanceGetFbUsage")(instance, ctypes.byref(value)))
    return value.value


def _text(value: Any) -> str | None:
    if value is None:
        return None
    # The bindings leave the parts of a pair as bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
