"""Entry points of the simulated NVML that few commands call: GPM (Hopper and later), vGPU sessions, and topology.

The GPUs are connected by NVLink as their model says; PCIe and NUMA go by halves of the host.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

from gpushare.sim import activity
from gpushare.sim import nvml_abi as abi
from gpushare.sim.library import SimulatedLibrary, first_matching
from gpushare.sim.nvml_abi import Code, Form, Handle, HandleKind, Kinds, On, Refused, Target
from gpushare.sim.state import SimulatedVgpu

_GPM_ARCHITECTURES: Final = frozenset({"hopper", "blackwell"})
_METRICS_GET_VERSION: Final = 1
# Metric by id as a share of the utilization, from a large matmul on our H200: SM 96, occupancy 17.
# 1 GRAPHICS_UTIL, 2 SM_UTIL, 3 SM_OCCUPANCY; and 10 DRAM_BW_UTIL.
_METRICS: Final = {1: 1.0, 2: 1.0, 3: 17 / 96}
_BANDWIDTH: Final = 10


@abi.entry_point("nvmlGpmSampleAlloc")
def _alloc_sample(library: SimulatedLibrary, sample: Any) -> None:
    # A sample is no instance; the ids of its handle only number it.
    handles = (Handle(HandleKind.GPM_SAMPLE, 0, number >> 8, number & 0xFF) for number in range(1, 0xFFFF))
    handle = next(handle for handle in handles if handle.pack() not in library.samples)
    library.samples[handle.pack()] = None
    abi.put_handle(sample, handle)


@abi.entry_point("nvmlGpmSampleFree")
def _free_sample(library: SimulatedLibrary, sample: Any) -> None:
    del library.samples[_sample_pointer(library, sample)]


def _sample_pointer(library: SimulatedLibrary, sample: Any) -> int:
    """Return the pointer of a sample; Refused: INVALID_ARGUMENT, `_alloc_sample` did not make it."""
    pointer = abi.pointer_value(sample)
    if pointer not in library.samples:
        raise Refused(Code.INVALID_ARGUMENT)
    return pointer


@abi.entry_point("nvmlGpmMigSampleGet", on=On.GPU)
def _mig_sample(library: SimulatedLibrary, target: Target, gpu_instance_id: Any, sample: Any) -> None:
    number = abi.number(gpu_instance_id)
    instance = first_matching(target.gpu.mig, lambda mig: mig.gpu_instance_id == number)
    handle = Handle(HandleKind.MIG_DEVICE, target.handle.index, *instance.instance_ids)
    _gpm_sample(library, Target(handle, target.gpu, target.model, instance, instance), sample)


@abi.entry_point("nvmlGpmSampleGet", on=On.GPU)
def _gpm_sample(library: SimulatedLibrary, target: Target, sample: Any) -> None:
    """Keep the load of a GPU or MIG device in a sample; `_fill_metrics` reads it."""
    if target.model.arch not in _GPM_ARCHITECTURES:
        raise Refused(Code.NOT_SUPPORTED)
    library.samples[_sample_pointer(library, sample)] = activity.gpm_sample(library.state, target)


@abi.entry_point("nvmlGpmMetricsGet")
def _fill_metrics(library: SimulatedLibrary, argument: Any) -> None:
    """Fill in the metrics that an nvmlGpmMetricsGet_t asks for, from the load in its two samples."""
    struct = abi.target_of(argument)
    if struct.version != _METRICS_GET_VERSION:
        raise Refused(Code.ARGUMENT_VERSION_MISMATCH)
    first, second = (library.samples.get(abi.pointer_value(sample)) for sample in (struct.sample1, struct.sample2))
    if first is None or second is None or not 0 <= struct.numMetrics <= len(struct.metrics):
        raise Refused(Code.INVALID_ARGUMENT)
    # GPM integrates over the time between two samples; between these, the load is taken as linear.
    utilization = (first.utilization + second.utilization) / 2
    values = {metric: utilization * share for metric, share in _METRICS.items()}
    values[_BANDWIDTH] = (first.bandwidth + second.bandwidth) / 2
    for index in range(struct.numMetrics):
        metric = struct.metrics[index]
        metric.nvmlReturn = Code.SUCCESS if metric.metricId in values else Code.NOT_SUPPORTED
        metric.value = values.get(metric.metricId, 0.0)


# NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU and NONE.
_HOST_VGPU, _NONE = 3, 0
_GPU_SHIFT: Final = 8


@abi.entry_point("nvmlDeviceGetActiveVgpus", on=On.GPU)
def _active_vgpus(_library: SimulatedLibrary, target: Target, count: Any, instances: Any) -> None:
    abi.put_count(count, instances, len(target.gpu.vgpus))
    for slot in range(len(target.gpu.vgpus)):
        instances[slot] = target.handle.index << _GPU_SHIFT | slot + 1


def _vgpu_of(library: SimulatedLibrary, instance: int) -> SimulatedVgpu:
    """Return the vGPU of an instance number as `_active_vgpus` makes it: the GPU's index, and the vGPU's number on it, from 1."""
    index, slot = instance >> _GPU_SHIFT, (instance & 0xFF) - 1
    gpus = library.state.gpus
    if index >= len(gpus) or not 0 <= slot < len(gpus[index].vgpus):
        raise Refused(Code.NOT_FOUND)
    return gpus[index].vgpus[slot]


@abi.entry_point("nvmlVgpuInstanceGetVmID")
def _vgpu_owner(library: SimulatedLibrary, instance: Any, buffer: Any, length: Any, kind: Any) -> None:
    abi.put_text(buffer, length, _vgpu_of(library, abi.number(instance)).vm)
    # NVML_VGPU_VM_ID_DOMAIN_ID.
    abi.put(kind, 0)


_GETTERS: Final[tuple[tuple[str, Kinds, Form, Callable[..., Any]], ...]] = (
    (
        "nvmlGpmQueryDeviceSupport",
        On.DEVICE,
        Form.FIELDS,
        lambda _, target: {"isSupportedDevice": int(target.model.arch in _GPM_ARCHITECTURES)},
    ),
    (
        "nvmlDeviceGetVirtualizationMode",
        On.GPU,
        Form.NUMBER,
        lambda _, target: _HOST_VGPU if target.gpu.vgpus else _NONE,
    ),
    ("nvmlVgpuTypeGetName", On.NOTHING, Form.TEXT, lambda library, kind: _vgpu_of(library, kind).type),
    ("nvmlVgpuInstanceGetUUID", On.NOTHING, Form.TEXT, lambda library, at: _vgpu_of(library, at).uuid),
    # Each vGPU is of a type of its own, with the number of the vGPU.
    ("nvmlVgpuInstanceGetType", On.NOTHING, Form.NUMBER, lambda _, at: at),
    (
        "nvmlVgpuInstanceGetFbUsage",
        On.NOTHING,
        Form.NUMBER,
        lambda library, at: _vgpu_of(library, at).memory_bytes // 2,
    ),
    (
        "nvmlVgpuTypeGetFramebufferSize",
        On.NOTHING,
        Form.NUMBER,
        lambda library, kind: _vgpu_of(library, kind).memory_bytes,
    ),
)
for _getter in _GETTERS:
    abi.register_getter(*_getter)


# Beginnings of the keys of boards with NVLink to all others of the host (HGX, DGX), and with a bridge between two.
_ALL: Final = ("a100-40gb", "a100-80gb", "h100-sxm", "h20-", "h200-141gb", "b200", "b300", "gb200", "gb300", "v100")
_PAIRS: Final = ("h100-nvl", "h200-nvl")
# NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM, NVML_P2P_CAPS_INDEX_NVLINK.
_NODE, _SYSTEM, _NVLINK = 40, 50, 2
# NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED.
_OK, _NOT_SUPPORTED = 0, 5


def _numa_node(library: SimulatedLibrary, index: int) -> int:
    """Return the NUMA node of a GPU: 0 for the first half of the GPUs, 1 for the others."""
    count = len(library.state.gpus)
    return 1 if count > 1 and index >= count / 2 else 0


def _index_of(argument: Any) -> int:
    """Return the index of the GPU that a handle names."""
    return abi.Handle.unpack(abi.pointer_value(argument)).index


@abi.entry_point("nvmlDeviceGetTopologyCommonAncestor", on=On.GPU)
def _ancestor(library: SimulatedLibrary, target: Target, other: Any, level: Any) -> None:
    same_node = _numa_node(library, target.handle.index) == _numa_node(library, _index_of(other))
    abi.put(level, _NODE if same_node else _SYSTEM)


@abi.entry_point("nvmlDeviceGetP2PStatus", on=On.GPU)
def _p2p(library: SimulatedLibrary, target: Target, other: Any, capability: Any, status: Any) -> None:
    """Write whether NVLink connects two GPUs."""
    if abi.number(capability) != _NVLINK:
        raise Refused(Code.NOT_SUPPORTED)
    gpus = library.state.gpus
    first, second = target.handle.index, _index_of(other)
    models = [gpus[first].model, gpus[second].model]
    linked_to_all = all(model.startswith(_ALL) for model in models)
    linked_as_pair = all(model.startswith(_PAIRS) for model in models) and first // 2 == second // 2
    abi.put(status, _OK if linked_to_all or linked_as_pair else _NOT_SUPPORTED)


@abi.entry_point("nvmlDeviceGetCpuAffinity", on=On.GPU)
def _cpus(library: SimulatedLibrary, target: Target, words: Any, cpus: Any) -> None:
    """Write the CPUs of a GPU's NUMA node as a bit mask of this many words."""
    # The processes of a simulated host run on the CPUs of this machine; each NUMA node has half of them.
    cpus_here = sorted(os.sched_getaffinity(0))
    middle = (len(cpus_here) + 1) // 2
    node = _numa_node(library, target.handle.index)
    cpus_of_node = (cpus_here[middle:] or cpus_here) if node else cpus_here[:middle]
    mask = sum(1 << cpu for cpu in cpus_of_node)
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    array = abi.target_of(cpus)
    for word in range(abi.number(words)):
        array[word] = mask >> word * bits & (1 << bits) - 1
