"""Where MIG instances lie on a simulated GPU: placements, ids, UUIDs and what is still free. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.errors import BadUsage, NotSupported, OperationFailed
from gpushare.base.values import dataclass
from gpushare.gpu_models import GpuModel
from gpushare.mig.profile import ComputeProfile, Profile, usual_compute_starts
from gpushare.mig.wish import parse_wish, resolve
from gpushare.sim.nvml_abi import profile_of
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedMigInstance

_NAMESPACE: Final = uuid.UUID("b1c58b0e-7b1f-5d0e-8f7a-5d4f0e9a2c33")

# The sizes of GPU instances by the memory slices of the GPU, its axis. The driver numbers their places as a buddy tree
# (open-gpu-kernel-modules, SwizzIdToSpan): 0 is the whole axis, 1-2 are its halves, 3-6 its quarters.
_SIZES: Final[dict[int, tuple[int, ...]]] = {8: (8, 4, 2, 1), 12: (12, 6, 3), 4: (4, 2, 1)}


@dataclass(frozen=True)
class Occupied:
    """One GPU instance on the axis: its profile and its first memory slice."""

    profile: Profile
    start: int

    @property
    def span(self) -> range:
        """Return the memory slices that it takes."""
        return range(self.start, self.start + (self.profile.size or 0))


def gpu_instance_id(axis: int, start: int, size: int) -> int:
    """Return the id that the driver gives a GPU instance by its place: the memory slices, of the ``axis`` that the GPU has.

    The places are numbered from the largest size to the smallest. ValueError: no instance can lie there.
    """
    first_of_size = 0
    for node_size in _SIZES[axis]:
        if node_size == size and start % size == 0 and start + size <= axis:
            return first_of_size + start // size
        first_of_size += axis // node_size
    message = f"no GPU instance of size {size} at {start} on an axis of {axis}"
    raise ValueError(message)


def mig_uuid(gpu_uuid: str, gpu_instance: int, compute_instance: int) -> str:
    """Return the UUID of a MIG device: of the same ids always the same, whatever the profile, as the driver's."""
    return f"MIG-{uuid.uuid5(_NAMESPACE, f'{gpu_uuid}/{gpu_instance}/{compute_instance}')}"


def occupied_places(gpu: SimulatedGpu, model: GpuModel) -> list[Occupied]:
    """Return what the GPU instances of a GPU occupy, in the order of their ids."""
    return [Occupied(profile_of(model, instance), instance.start) for instance in gpu_instances(gpu)]


def gpu_instances(gpu: SimulatedGpu) -> list[SimulatedGpuInstance]:
    """Return the GPU instances of a GPU, with and without compute instances, each once, by id."""
    by_id: dict[int, SimulatedGpuInstance] = {instance.gpu_instance_id: instance for instance in (*gpu.mig, *gpu.bare)}
    return [by_id[identity] for identity in sorted(by_id)]


def may_join(profile: Profile, present: Sequence[Occupied]) -> bool:
    """Return whether counts and media engines allow a profile next to those present; its place is another question.

    Only one instance may have ``+me``; next to ``+me.all`` only ``-me`` is allowed (nvml.h).
    """
    others = [instance.profile for instance in present]
    if profile.instances is not None and sum(other.name == profile.name for other in others) >= profile.instances:
        return False
    if profile.media and any(other.media for other in others):
        return False
    if profile.all_media:
        return all(other.no_media for other in others)
    return profile.no_media or not any(other.all_media for other in others)


def free_starts(profile: Profile, present: Sequence[Occupied]) -> list[int]:
    """Return the memory slices at which an instance of a profile fits between those present."""
    taken = {memory_slice for instance in present for memory_slice in instance.span}
    free = [
        place for place in profile.placements or () if taken.isdisjoint(range(place.start, place.start + place.size))
    ]
    return [place.start for place in free]


def place_instances(gpu: SimulatedGpu, model: GpuModel, requests: Sequence[str]) -> SimulatedGpu:
    """Return the GPU with MIG on and exactly these instances, each with one full-size compute instance.

    A request is a wish as `mig.wish` reads it, without compute instances: ``3g.71gb``, ``1g.18gb:4``, ``1g.18gb+me``.

    Raises:
        BadUsage: it is no wish, or the profile cannot start there.
        NotSupported: the model does not have the profile or MIG, or its placements are not published.
        OperationFailed: the instances do not fit together.
    """
    if not model.mig:
        raise NotSupported(f"{model.name} has no MIG", "see: gpushare sim list --models", code="no_mig")
    wishes = [wish for request in requests for wish in parse_wish(request)]
    divided = next((wish for wish in wishes if wish.compute), None)
    if divided is not None:
        hint = "give the GPU instance; divide it by: gpushare mig apply"
        raise BadUsage(f"{divided} has compute instances of its own", hint, code="bad_profile")
    wanted = [(resolve(wish, model.profiles), wish.start) for wish in wishes for _ in range(wish.count)]
    # 3g and 4g fit only from the last memory slice down.
    layout = _lay_out(wanted, min) or _lay_out(wanted, max)
    if len(layout) < len(wanted):
        names = ", ".join(request.strip() for request in requests)
        raise OperationFailed(
            f"{names} do not fit on one {model.name}",
            "ask for fewer or smaller instances, or say where each starts: 3g.71gb:4",
            code="never_fits",
        )
    instances = []
    for placed in layout:
        identity = gpu_instance_id(model.axis or 0, placed.start, len(placed.span))
        instances.append(
            SimulatedMigInstance(placed.profile.name, placed.start, identity, 0, mig_uuid(gpu.uuid, identity, 0))
        )
    instances.sort(key=lambda instance: instance.gpu_instance_id)
    # EXCLUSIVE_PROCESS does not exist with MIG on.
    return replace(gpu, mig_mode=1, mig_pending=1, mig=instances, bare=[], compute_mode=0)


def _lay_out(wanted: Sequence[tuple[Profile, int | None]], choose: Callable[[list[int]], int]) -> list[Occupied]:
    """Place instances, each at its start (memory slice) or (None) the free one that ``choose`` takes; none if one does not fit."""
    placed: list[Occupied] = []
    # Fixed places first, then the largest: they have the fewest choices left.
    for profile, start in sorted(wanted, key=lambda each: (each[1] is None, -(each[0].size or 0), each[0].name)):
        starts = [free for free in free_starts(profile, placed) if start in {None, free}]
        if not starts or not may_join(profile, placed):
            return []
        placed.append(Occupied(profile, choose(starts)))
    return placed


# NVML_COMPUTE_INSTANCE_PROFILE_COUNT.
PROFILE_COUNT: Final = 9


def compute_profiles(profile: Profile) -> dict[int | None, ComputeProfile]:
    """Return the compute instance profiles of a GPU instance by id (NVML_COMPUTE_INSTANCE_PROFILE_*, the ID of -lcip)."""
    return {part.id: part for part in profile.compute}


def compute_profile_id(profile: Profile, instance: SimulatedMigInstance) -> int | None:
    return profile.filling_compute.id if instance.compute_profile is None else instance.compute_profile


def span(profile: Profile, instance: SimulatedMigInstance) -> range:
    """Return the compute slices of the GPU instance that a compute instance takes."""
    size = compute_profiles(profile)[compute_profile_id(profile, instance)].slices
    return range(instance.compute_start, instance.compute_start + size)


def device_name(profile: Profile, instance: SimulatedMigInstance) -> str:
    """Return the MIG device's name, as ``nvidia-smi -L`` prints it: ``3g.71gb``, ``1c.3g.71gb``; never ``+me``."""
    slices = len(span(profile, instance))
    name = re.split(r"[+-]", profile.name, maxsplit=1)[0]
    return name if slices == profile.slices else f"{slices}c.{name}"


def free_compute_starts(profile: Profile, slices: int, present: Sequence[SimulatedMigInstance]) -> list[int]:
    """Return the compute slices at which a compute instance of this size fits between those present."""
    taken = {compute_slice for instance in present for compute_slice in span(profile, instance)}
    return [
        start
        for start in usual_compute_starts(profile.slices, slices)
        if taken.isdisjoint(range(start, start + slices))
    ]
