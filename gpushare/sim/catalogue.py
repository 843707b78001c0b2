"""The catalogue as the planner takes it: profiles of a GPU that is not there. Never used where a driver is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.mig.profile import Engines, Placement, Profile, standard_compute_profiles
from gpushare.units import MIB

if TYPE_CHECKING:
    from gpushare.sim.models import GiProfile, GpuModel


def profiles_of(model: GpuModel) -> tuple[Profile, ...]:
    """Return the MIG profiles of a model; what is not published is None."""
    return tuple(profile_of(raw) for raw in model.profiles)


def profile_of(raw: GiProfile) -> Profile:
    """Return one profile of the catalogue."""
    placements = None
    if raw.starts is not None and raw.size is not None:
        placements = tuple(Placement(start, raw.size) for start in raw.starts)
    return Profile(
        name=raw.name,
        id=raw.id,
        nvml_profile=raw.nvml_profile,
        slices=raw.slices,
        memory_bytes=None if raw.memory_mib is None else raw.memory_mib * MIB,
        multiprocessors=raw.multiprocessors,
        engines=Engines(
            copy=raw.copy_engines,
            decoders=raw.decoders,
            encoders=raw.encoders,
            jpeg=raw.jpeg_engines,
            optical_flow=raw.optical_flow_engines,
        ),
        instances=raw.instances,
        placements=placements,
        compute=standard_compute_profiles(raw.slices, raw.nvml_profile),
    )
