"""What the driver does when MIG changes on a simulated GPU: mode, GPU instances, compute instances. Pure on the GPU.

Each function either does the whole change or raises `Refused` with nothing changed. ``residents`` is always who is on
the GPU now (`activity.residents`), and who only has its device nodes open (`open_files.holding`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from gpushare.sim import mig_compute, mig_layout
from gpushare.sim.activity import Resident
from gpushare.sim.mig_layout import gpu_instance_id, gpu_instances, mig_uuid, occupied
from gpushare.sim.models import GiProfile, GpuModel
from gpushare.sim.nvml_abi import Code, Refused
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedMigInstance

_Instance = TypeVar("_Instance", bound=SimulatedGpuInstance)


def set_mode(gpu: SimulatedGpu, model: GpuModel, mode: int, residents: Sequence[Resident]) -> Code:
    """Switch MIG mode and return the activationStatus of nvmlDeviceSetMigMode; not SUCCESS: only pending.

    Nothing ends: existing instances keep MIG on (IN_USE), and where the driver must reset the GPU for it, so
    does any process. Later GPUs switch beside running jobs.
    """
    gpu.mig_pending = mode
    if mode == gpu.mig_mode:
        return Code.SUCCESS
    if gpu_instances(gpu) or (model.reset_for_mode_change and residents):
        return Code.IN_USE
    if gpu.reset_required:
        return Code.RESET_REQUIRED
    gpu.mig_mode = mode
    # With MIG on there is only DEFAULT.
    gpu.compute_mode = 0 if mode else gpu.compute_mode
    return Code.SUCCESS


def create_gpu_instance(
    gpu: SimulatedGpu,
    model: GpuModel,
    profile_id: int,
    placement: tuple[int, int] | None,
    residents: Sequence[Resident],
) -> int:
    """Create a GPU instance at ``placement`` (start, size), or where the driver likes, and return its id.

    Raises:
        Refused: NOT_SUPPORTED, MIG is off; INVALID_ARGUMENT, no such profile, or it cannot lie there; IN_USE, it
            would be the first and somebody is on the GPU; INSUFFICIENT_RESOURCES, no room, or the place is taken.
    """
    if gpu.mig_mode != 1:
        raise Refused(Code.NOT_SUPPORTED)
    profile = model.profile_by_id(profile_id)
    if profile is None:
        raise Refused(Code.INVALID_ARGUMENT)
    if profile.size is None or profile.starts is None or model.axis is None:
        # Where it lies is not published, so it cannot be simulated.
        raise Refused(Code.NOT_SUPPORTED)
    if placement is not None and (placement[0] not in profile.starts or placement[1] != profile.size):
        raise Refused(Code.INVALID_ARGUMENT)
    present = occupied(gpu, model)
    if not present and any(one.memory_bytes or not one.holder for one in residents):
        # Hopper and later: MIG came on beside them; the check is made here. An open node without memory does not count.
        raise Refused(Code.IN_USE)
    free = mig_layout.free_starts(profile, present) if mig_layout.may_join(profile, present) else []
    if not free or (placement is not None and placement[0] not in free):
        raise Refused(Code.INSUFFICIENT_RESOURCES)
    start = automatic_start(model, profile, gpu) if placement is None else placement[0]
    identity = gpu_instance_id(model.axis, start, profile.size)
    gpu.bare.append(SimulatedGpuInstance(profile.name, start, identity))
    gpu.bare.sort(key=lambda one: one.gpu_instance_id)
    return identity


def automatic_start(model: GpuModel, profile: GiProfile, gpu: SimulatedGpu) -> int:
    """Return where the driver puts a GPU instance by itself; there must be room.

    Not first fit: into the fullest half, then its fullest quarter. That gives every order that was seen: seven 1g of
    an H100 at 6, 4, 5, 0, 1, 2, 3; on an A100 the first 3g at 4, a 2g at 4 and then 1g at 6, 0, 1, 2, 3.
    """
    axis, present = model.axis or 0, occupied(gpu, model)
    # Of eight memory slices the last has no compute slice: for the driver its half is the smaller one.
    last = (model.compute_slices or axis) if axis - (model.compute_slices or axis) == 1 else axis
    free = set(range(last)) - {memory_slice for one in present for memory_slice in one.span}
    return _best_fit(mig_layout.free_starts(profile, present), profile.size or 1, axis, free)


def _best_fit(starts: Sequence[int], size: int, axis: int, free: Collection[int]) -> int:
    levels = []
    while axis % 2 == 0 and axis // 2 >= size:
        axis //= 2
        levels.append(axis)

    def room(start: int) -> tuple[list[int], int]:
        return [sum(one // level == start // level for one in free) for level in levels], start

    return min(starts, key=room)


def destroy_gpu_instance(gpu: SimulatedGpu, gpu_instance: int, residents: Sequence[Resident]) -> None:
    """Destroy a GPU instance.

    Raises:
        Refused: IN_USE, it holds a compute instance or somebody is in it; INVALID_ARGUMENT, it is gone.
    """
    used = any(one.gpu_instance_id == gpu_instance for one in gpu.mig)
    if used or any(one.gpu_instance_id == gpu_instance for one in residents):
        raise Refused(Code.IN_USE)
    gpu.bare.remove(_found(gpu.bare, lambda one: one.gpu_instance_id == gpu_instance))


def create_compute_instance(
    gpu: SimulatedGpu, model: GpuModel, gpu_instance: int, number: int, placement: tuple[int, int] | None
) -> int:
    """Create a compute instance at ``placement`` (start, size), or where the driver likes, and return its id.

    Raises:
        Refused: INVALID_ARGUMENT, the GPU instance is gone, no such profile, or it cannot lie there; NOT_SUPPORTED,
            not in this GPU instance; INSUFFICIENT_RESOURCES, no room, or the place is taken.
    """
    owner = _found(gpu_instances(gpu), lambda one: one.gpu_instance_id == gpu_instance)
    profile = model.profile(owner.profile)
    if profile is None or not 0 <= number < mig_compute.PROFILE_COUNT:
        raise Refused(Code.INVALID_ARGUMENT)
    if number not in mig_compute.offered(profile):
        raise Refused(Code.NOT_SUPPORTED)
    size = mig_compute.slices_of(number)
    if placement is not None and (placement[0] not in mig_compute.starts(profile, number) or placement[1] != size):
        raise Refused(Code.INVALID_ARGUMENT)
    present = [one for one in gpu.mig if one.gpu_instance_id == gpu_instance]
    free = mig_compute.free_starts(profile, number, present)
    if not free or (placement is not None and placement[0] not in free):
        raise Refused(Code.INSUFFICIENT_RESOURCES)
    start = _automatic_compute_start(model, profile, number, present) if placement is None else placement[0]
    taken = {one.compute_instance_id for one in present}
    # Ids start at 0 in every GPU instance, and are reused.
    identity = next(one for one in range(len(taken) + 1) if one not in taken)
    created = SimulatedMigInstance(
        profile=profile.name,
        start=owner.start,
        gpu_instance_id=gpu_instance,
        compute_instance_id=identity,
        uuid=mig_uuid(gpu.uuid, gpu_instance, identity),
        compute_profile=None if number == mig_compute.whole(profile) else number,
        compute_start=start,
    )
    gpu.mig = sorted([*gpu.mig, created], key=lambda one: (one.gpu_instance_id, one.compute_instance_id))
    gpu.bare = [one for one in gpu.bare if one.gpu_instance_id != gpu_instance]
    return identity


def _automatic_compute_start(
    model: GpuModel, profile: GiProfile, number: int, present: Sequence[SimulatedMigInstance]
) -> int:
    starts = mig_compute.free_starts(profile, number, present)
    if model.arch == "ampere":
        # Two 1c of a 3g lay at 0 and 1 (A100 80GB).
        return min(starts)
    # The only 1c of a 3g lay at 2 (H100, driver 580): the smaller half first, as GPU instances do.
    free = set(range(profile.slices)) - {taken for one in present for taken in mig_compute.span(profile, one)}
    return _best_fit(starts, mig_compute.slices_of(number), 1 << (profile.slices - 1).bit_length(), free)


def destroy_compute_instance(
    gpu: SimulatedGpu, gpu_instance: int, compute_instance: int, residents: Sequence[Resident]
) -> None:
    """Destroy a compute instance; its GPU instance stays.

    Raises:
        Refused: IN_USE, somebody is in it; INVALID_ARGUMENT, it is gone.
    """
    place = (gpu_instance, compute_instance)
    if any((one.gpu_instance_id, one.compute_instance_id) == place for one in residents):
        raise Refused(Code.IN_USE)
    gone = _found(gpu.mig, lambda one: (one.gpu_instance_id, one.compute_instance_id) == place)
    gpu.mig.remove(gone)
    if all(one.gpu_instance_id != gpu_instance for one in gpu.mig):
        gpu.bare.append(SimulatedGpuInstance(gone.profile, gone.start, gpu_instance))
        gpu.bare.sort(key=lambda one: one.gpu_instance_id)


def _found(instances: Sequence[_Instance], wanted: Callable[[_Instance], bool]) -> _Instance:
    for one in instances:
        if wanted(one):
            return one
    # Somebody else destroyed it after the handle was resolved.
    raise Refused(Code.INVALID_ARGUMENT)
