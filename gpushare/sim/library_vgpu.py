"""The vGPU entry points of the simulated library: sessions of virtual machines, on a host with NVIDIA's vGPU driver."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

from gpushare.sim import nvml_abi as abi
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.nvml_abi import Code, Form, Kinds, On, Refused, Target
from gpushare.sim.state import SimulatedVgpu

# NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU and NONE.
_HOST_VGPU, _NONE = 3, 0
_GPU_SHIFT: Final = 8


@abi.entry_point("nvmlDeviceGetActiveVgpus", on=On.GPU)
def _active(_library: SimulatedLibrary, target: Target, count: Any, instances: Any) -> None:
    there = target.gpu.vgpus
    room = abi.number(abi.target_of(count)) if instances is not None else 0
    abi.put(count, len(there))
    if room < len(there):
        raise Refused(Code.INSUFFICIENT_SIZE)
    for place in range(len(there)):
        instances[place] = target.handle.index << _GPU_SHIFT | place + 1


def _of(library: SimulatedLibrary, instance: int) -> SimulatedVgpu:
    index, place = instance >> _GPU_SHIFT, (instance & 0xFF) - 1
    gpus = library.state.gpus
    if index >= len(gpus) or not 0 <= place < len(gpus[index].vgpus):
        raise Refused(Code.NOT_FOUND)
    return gpus[index].vgpus[place]


def _type(vgpu: SimulatedVgpu) -> int:
    return zlib.crc32(vgpu.type.encode()) & 0xFFFF


def _of_type(library: SimulatedLibrary, kind: int) -> SimulatedVgpu:
    for gpu in library.state.gpus:
        for vgpu in gpu.vgpus:
            if _type(vgpu) == kind:
                return vgpu
    raise Refused(Code.INVALID_ARGUMENT)


@abi.entry_point("nvmlVgpuInstanceGetVmID")
def _vm(library: SimulatedLibrary, instance: Any, buffer: Any, length: Any, kind: Any) -> None:
    abi.put_text(buffer, length, _of(library, abi.number(instance)).vm)
    # NVML_VGPU_VM_ID_DOMAIN_ID.
    abi.put(kind, 0)


_GETTERS: Final[tuple[tuple[str, Kinds, Form, Callable[..., Any]], ...]] = (
    (
        "nvmlDeviceGetVirtualizationMode",
        On.GPU,
        Form.NUMBER,
        lambda _, target: _HOST_VGPU if target.gpu.vgpus else _NONE,
    ),
    ("nvmlVgpuTypeGetName", On.NOTHING, Form.TEXT, lambda library, kind: _of_type(library, kind).type),
    ("nvmlVgpuInstanceGetUUID", On.NOTHING, Form.TEXT, lambda library, instance: _of(library, instance).uuid),
    ("nvmlVgpuInstanceGetType", On.NOTHING, Form.NUMBER, lambda library, instance: _type(_of(library, instance))),
    ("nvmlVgpuInstanceGetFbUsage", On.NOTHING, Form.NUMBER, lambda library, at: _of(library, at).memory_used_bytes),
    (
        "nvmlVgpuTypeGetFramebufferSize",
        On.NOTHING,
        Form.NUMBER,
        lambda library, kind: _of_type(library, kind).memory_bytes,
    ),
)
for _getter in _GETTERS:
    abi.getter(*_getter)
