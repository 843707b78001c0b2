"""Entry points of the simulated NVML: GPU performance monitoring (GPM), Hopper and later."""

from __future__ import annotations

from typing import Any, Final

from gpushare.sim import activity
from gpushare.sim import nvml_abi as abi
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.nvml_abi import Code, Handle, HandleKind, On, Refused, Target

_SUPPORTED_ARCHITECTURES: Final = frozenset({"hopper", "blackwell"})
_METRICS_GET_VERSION: Final = 1
# Metric by id as a share of the utilization, from a large matmul on our H200: SM 96, occupancy 17.
# 1 GRAPHICS_UTIL, 2 SM_UTIL, 3 SM_OCCUPANCY; and 10 DRAM_BW_UTIL.
_METRICS: Final = {1: 1.0, 2: 1.0, 3: 17 / 96}
_BANDWIDTH: Final = 10


@abi.entry_point("nvmlGpmQueryDeviceSupport", on=On.DEVICE)
def _support(_library: SimulatedLibrary, target: Target, support: Any) -> None:
    abi.put_fields(abi.target_of(support), {"isSupportedDevice": int(_supported(target))})


def _supported(target: Target) -> bool:
    return target.model.arch in _SUPPORTED_ARCHITECTURES


@abi.entry_point("nvmlGpmSampleAlloc")
def _alloc(library: SimulatedLibrary, sample: Any) -> None:
    serials = (Handle(HandleKind.GPM_SAMPLE, 0, serial >> 8, serial & 0xFF) for serial in range(1, 0xFFFF))
    handle = next(handle for handle in serials if handle.pack() not in library.samples)
    library.samples[handle.pack()] = None
    abi.put_handle(sample, handle)


@abi.entry_point("nvmlGpmSampleFree")
def _free(library: SimulatedLibrary, sample: Any) -> None:
    if library.samples.pop(abi.pointer_value(sample), False) is False:
        raise Refused(Code.INVALID_ARGUMENT)


@abi.entry_point("nvmlGpmSampleGet", on=On.GPU)
def _sample(library: SimulatedLibrary, target: Target, sample: Any) -> None:
    _take(library, target, sample)


@abi.entry_point("nvmlGpmMigSampleGet", on=On.GPU)
def _mig_sample(library: SimulatedLibrary, target: Target, gpu_instance_id: Any, sample: Any) -> None:
    wanted = abi.number(gpu_instance_id)
    devices = target.gpu.mig if target.mig_enabled else []
    instance = next((device for device in devices if device.gpu_instance_id == wanted), None)
    if instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    handle = Handle(HandleKind.MIG_DEVICE, target.handle.index, wanted, instance.compute_instance_id)
    _take(library, Target(handle, target.gpu, target.model, instance), sample)


def _take(library: SimulatedLibrary, target: Target, sample: Any) -> None:
    if not _supported(target):
        raise Refused(Code.NOT_SUPPORTED)
    pointer = abi.pointer_value(sample)
    if pointer not in library.samples:
        raise Refused(Code.INVALID_ARGUMENT)
    state = library.state
    library.samples[pointer] = (activity.utilization(state, target), activity.bandwidth(state, target))


@abi.entry_point("nvmlGpmMetricsGet")
def _metrics(library: SimulatedLibrary, argument: Any) -> None:
    struct = abi.target_of(argument)
    if struct.version != _METRICS_GET_VERSION:
        raise Refused(Code.ARGUMENT_VERSION_MISMATCH)
    first, second = (library.samples.get(abi.pointer_value(sample)) for sample in (struct.sample1, struct.sample2))
    if first is None or second is None or not 0 <= struct.numMetrics <= len(struct.metrics):
        raise Refused(Code.INVALID_ARGUMENT)
    # GPM integrates over the time between two samples; between these, the load is taken as linear.
    busy, drawn = ((before + other) / 2 for before, other in zip(first, second, strict=True))
    values = {_BANDWIDTH: drawn, **{metric: busy * share for metric, share in _METRICS.items()}}
    for index in range(struct.numMetrics):
        metric = struct.metrics[index]
        metric.nvmlReturn = Code.SUCCESS if metric.metricId in values else Code.NOT_SUPPORTED
        metric.value = values.get(metric.metricId, 0.0)
