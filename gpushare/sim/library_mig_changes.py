"""Entry points of the simulated NVML that change MIG: mode, GPU instances, compute instances. All need root."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from gpushare.sim import activity, capabilities, mig_changes
from gpushare.sim.activity import Resident
from gpushare.sim.nvml_abi import Code, Handle, Kind, On, Refused, Target, entry_point, number, put, put_handle
from gpushare.sim.open_files import holding
from gpushare.sim.state import SimulatedGpu

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

_MODES: Final = {0, 1}


@entry_point("nvmlDeviceSetMigMode", on=On.GPU)
def _set_mode(library: SimulatedLibrary, target: Target, mode: Any, activation_status: Any) -> None:
    if target.gpu.mig_mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    if number(mode) not in _MODES or activation_status is None:
        raise Refused(Code.INVALID_ARGUMENT)
    with _changed(library, target) as (gpu, residents):
        # Success of the call is not success of the change.
        put(activation_status, mig_changes.set_mode(gpu, target.model, number(mode), residents))


@entry_point("nvmlDeviceCreateGpuInstance", on=On.GPU)
def _create(library: SimulatedLibrary, target: Target, profile_id: Any, instance: Any) -> None:
    _create_gpu_instance(library, target, number(profile_id), None, instance)


@entry_point("nvmlDeviceCreateGpuInstanceWithPlacement", on=On.GPU)
def _create_at(library: SimulatedLibrary, target: Target, profile_id: Any, placement: Any, instance: Any) -> None:
    _create_gpu_instance(library, target, number(profile_id), _placement(placement), instance)


def _create_gpu_instance(
    library: SimulatedLibrary, target: Target, profile_id: int, placement: tuple[int, int] | None, instance: Any
) -> None:
    with _changed(library, target) as (gpu, residents):
        identity = mig_changes.create_gpu_instance(gpu, target.model, profile_id, placement, residents)
        put_handle(instance, Handle(Kind.GPU_INSTANCE, target.handle.index, identity))


@entry_point("nvmlGpuInstanceDestroy", on=On.GPU_INSTANCE)
def _destroy(library: SimulatedLibrary, target: Target) -> None:
    with _changed(library, target) as (gpu, residents):
        mig_changes.destroy_gpu_instance(gpu, target.handle.gpu_instance, residents)


@entry_point("nvmlGpuInstanceCreateComputeInstance", on=On.GPU_INSTANCE)
def _create_compute(library: SimulatedLibrary, target: Target, profile_id: Any, instance: Any) -> None:
    _create_compute_instance(library, target, number(profile_id), None, instance)


@entry_point("nvmlGpuInstanceCreateComputeInstanceWithPlacement", on=On.GPU_INSTANCE)
def _create_compute_at(
    library: SimulatedLibrary, target: Target, profile_id: Any, placement: Any, instance: Any
) -> None:
    _create_compute_instance(library, target, number(profile_id), _placement(placement), instance)


def _create_compute_instance(
    library: SimulatedLibrary, target: Target, profile: int, placement: tuple[int, int] | None, instance: Any
) -> None:
    index, owner = target.handle.index, target.handle.gpu_instance
    with _changed(library, target) as (gpu, _):
        identity = mig_changes.create_compute_instance(gpu, target.model, owner, profile, placement)
        put_handle(instance, Handle(Kind.COMPUTE_INSTANCE, index, owner, identity))


@entry_point("nvmlComputeInstanceDestroy", on=On.COMPUTE_INSTANCE)
def _destroy_compute(library: SimulatedLibrary, target: Target) -> None:
    place = (target.handle.gpu_instance, target.handle.compute_instance)
    with _changed(library, target) as (gpu, residents):
        mig_changes.destroy_compute_instance(gpu, *place, residents)


@contextmanager
def _changed(library: SimulatedLibrary, target: Target) -> Iterator[tuple[SimulatedGpu, list[Resident]]]:
    """Yield the GPU under the lock, and who is on it, or holds it open, at that moment."""
    with library.changed_host() as state:
        gpu = state.gpus[target.handle.index]
        here = activity.residents(state, Target(target.handle, gpu, target.model))
        yield gpu, [*here, *holding(state, target.handle.index)]
        capabilities.forget_gone(gpu)


def _placement(argument: Any) -> tuple[int, int]:
    """Return start and size of a placement argument, which C takes as a pointer.

    The bindings pass on what they get. The real library takes a structure without ``byref`` for an address, and the
    process crashes; here it is INVALID_ARGUMENT, as NULL is.
    """
    if hasattr(argument, "_obj"):
        struct = argument._obj
    elif isinstance(argument, ctypes._Pointer) and bool(argument):
        struct = argument.contents
    elif hasattr(argument, "_length_") and len(argument):
        struct = argument[0]
    else:
        raise Refused(Code.INVALID_ARGUMENT)
    return int(struct.start), int(struct.size)
