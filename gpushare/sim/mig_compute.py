"""Compute instances inside a simulated GPU instance: profiles, placements, names and what is still free. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpushare.sim.models import NVML_PROFILE, GiProfile
from gpushare.sim.state import SimulatedMigInstance

# NVML_COMPUTE_INSTANCE_PROFILE_COUNT.
PROFILE_COUNT: Final = 9
_REV1: Final = 7
# Compute slices by NVML_COMPUTE_INSTANCE_PROFILE_* number, which is also the id (-lcip).
_SLICES: Final = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, _REV1: 1}
# How many of each a GPU instance of so many slices holds (MIG user guide, -lcip).
_OFFERED: Final = {
    1: {0: 1},
    2: {0: 2, 1: 1},
    3: {0: 3, 1: 1, 2: 1},
    4: {0: 4, 1: 2, 3: 1},
    7: {0: 7, 1: 3, 2: 2, 3: 1, 4: 1},
}


def slices_of(number: int) -> int:
    """Return how many compute slices a compute instance profile takes."""
    return _SLICES[number]


def offered(profile: GiProfile) -> dict[int, int]:
    """Return how many compute instances of each profile a GPU instance holds, by profile number."""
    # One slice with double memory has a compute instance profile of its own.
    if profile.nvml_profile == NVML_PROFILE["1_SLICE_REV2"]:
        return {_REV1: 1}
    return _OFFERED.get(profile.slices, {})


def whole(profile: GiProfile) -> int:
    """Return the compute instance profile that takes the whole GPU instance (``*`` in -lcip)."""
    return max(offered(profile), key=slices_of, default=0)


def number_of(profile: GiProfile, instance: SimulatedMigInstance) -> int:
    """Return the profile of a compute instance."""
    return whole(profile) if instance.compute_profile is None else instance.compute_profile


def span(profile: GiProfile, instance: SimulatedMigInstance) -> range:
    """Return the compute slices of the GPU instance that a compute instance takes."""
    size = profile.slices if instance.compute_profile is None else slices_of(instance.compute_profile)
    return range(instance.compute_start, instance.compute_start + size)


def device_name(profile: GiProfile, instance: SimulatedMigInstance) -> str:
    """Return the MIG device's name, as ``nvidia-smi -L`` prints it: ``3g.71gb``, ``1c.3g.71gb``; never ``+me``."""
    slices = len(span(profile, instance))
    return profile.base_name if slices == profile.slices else f"{slices}c.{profile.base_name}"


def starts(profile: GiProfile, number: int) -> range:
    """Return where a compute instance profile may start (-lcipp), in compute slices of the GPU instance.

    Aligned to a power of two, as GPU instances are; so each fits as often as -lcip says.
    """
    size = slices_of(number)
    return range(0, profile.slices - size + 1, 1 << (size - 1).bit_length())


def free_starts(profile: GiProfile, number: int, present: Sequence[SimulatedMigInstance]) -> list[int]:
    """Return the placements of a compute instance profile that overlap none of those present."""
    taken = {compute_slice for one in present for compute_slice in span(profile, one)}
    size = slices_of(number)
    return [start for start in starts(profile, number) if taken.isdisjoint(range(start, start + size))]


def remaining_capacity(profile: GiProfile, number: int, present: Sequence[SimulatedMigInstance]) -> int:
    """Return how many more compute instances fit (the Free column of ``nvidia-smi mig -lcip``)."""
    # Placements of one profile never overlap each other.
    return len(free_starts(profile, number, present))
