"""Profiles, placements and instances of MIG, and the layout of one GPU. Frozen, pure.

Nothing here depends on a board: profiles and placements always come from the driver (or, for another machine, from the
catalogue).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property, reduce
from operator import or_
from typing import Final, NamedTuple

from gpushare.base.model import GpuProcess, Holder
from gpushare.base.values import dataclass

# The id of an instance that is to be created, or is in a record.
NOT_THERE: Final = -1
_NAME: Final = r"(?a)(\d+)g(?:\.(\d+)gb)?((?:[+-][a-z]+(?:\.[a-z]+)?)*)"
# NVML_GPU_INSTANCE_PROFILE_{1,2,3,4,7,8,6}_SLICE; higher numbers are revisions and extensions of these.
_PLAIN_NVML_PROFILES: Final = range(7)
_REV2: Final = 9
# NVML_COMPUTE_INSTANCE_PROFILE_* by compute slices: the ID column of `nvidia-smi mig -lcip`.
_COMPUTE_IDS: Final = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
_COMPUTE_ID_REV1: Final = 7
# How many compute instances of each size a GPU instance of a size holds (MIG user guide, -lcip).
_COMPUTE_COUNTS: Final = {
    1: {1: 1},
    2: {1: 2, 2: 1},
    3: {1: 3, 2: 1, 3: 1},
    4: {1: 4, 2: 2, 4: 1},
    7: {1: 7, 2: 3, 3: 2, 4: 1, 7: 1},
}


def on_or_off(mode: object) -> str:
    return "on" if mode else "off"


class Placement(NamedTuple):
    """The place of an instance: its first slice, and the number of its slices (``-lgipp``: ``{start}:size``)."""

    start: int
    size: int

    @property
    def mask(self) -> int:
        """Return the slices as bits."""
        return ((1 << self.size) - 1) << self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


def mask_of(placements: Iterable[Placement | None]) -> int:
    """Return the slices of all these as bits; None: unknown, has none."""
    return reduce(or_, (place.mask for place in placements if place is not None), 0)


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines of a GPU instance, shared by its compute instances (the CE ... OFA columns of -lgip)."""

    copy: int | None = None
    decoders: int | None = None
    encoders: int | None = None
    jpeg: int | None = None
    optical_flow: int | None = None


@dataclass(frozen=True, kw_only=True)
class ComputeProfile:
    """One compute instance profile inside a GPU instance profile (``nvidia-smi mig -lcip``)."""

    slices: int
    # The ID column of -lcip.
    id: int | None = None
    # How many of them fit into one GPU instance; None: unknown.
    instances: int | None = None
    multiprocessors: int | None = None

    @property
    def name(self) -> str:
        """Return the size as the driver prints it before the GPU instance's name: ``1c``."""
        return f"{self.slices}c"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One GPU instance profile (``nvidia-smi mig -lgip``, ``-lgipp``; nvmlDeviceGetGpuInstanceProfileInfo)."""

    # Without "MIG ": 1g.18gb+me.
    name: str
    # The ID column of -lgip; None: the profile is from the catalogue (--model).
    id: int | None
    # The NVML_GPU_INSTANCE_PROFILE_* number.
    nvml_profile: int | None = None
    # Compute slices.
    slices: int
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    engines: Engines = Engines()
    # How many of them fit on one GPU; None: unknown.
    instances: int | None = None
    # In memory slices; None: the catalogue (--model) does not know them.
    placements: tuple[Placement, ...] | None
    compute: tuple[ComputeProfile, ...] = ()

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Return the extensions in the name: ``+me``, ``+me.all``, ``-me``, ``+gfx``."""
        match = re.fullmatch(_NAME, self.name)
        return frozenset(re.findall(r"[+-][a-z.]+", match.group(3))) if match else frozenset()

    @property
    def all_media(self) -> bool:
        """Return whether it takes every media engine (``+me.all``): only ``-me`` profiles fit next to it."""
        return "+me.all" in self.attributes

    @property
    def media(self) -> bool:
        """Return whether it has the media extension (``+me``, ``+me.all``): one such instance per GPU."""
        return self.all_media or "+me" in self.attributes

    @property
    def no_media(self) -> bool:
        """Return whether it has no media engines (``-me``)."""
        return "-me" in self.attributes

    @property
    def graphics(self) -> bool:
        return "+gfx" in self.attributes

    @property
    def plain(self) -> bool:
        """Return whether it is the ordinary profile of its size: no extension, no revision with more memory."""
        return not self.attributes and (self.nvml_profile is None or self.nvml_profile in _PLAIN_NVML_PROFILES)

    @property
    def size(self) -> int | None:
        """Return how many memory slices it takes; None: its placements are unknown."""
        return max((placement.size for placement in self.placements), default=None) if self.placements else None

    @property
    def starts(self) -> tuple[int, ...] | None:
        """Return the memory slices at which it may begin; None: unknown."""
        return None if self.placements is None else tuple(placement.start for placement in self.placements)

    @property
    def filling_compute(self) -> ComputeProfile:
        """Return the compute instance profile that fills it, as ``-cgi ... -C`` creates it."""
        return self.compute_of(self.slices) or ComputeProfile(slices=self.slices, instances=1)

    def compute_of(self, slices: int) -> ComputeProfile | None:
        """Return the compute instance profile of a size, or None."""
        return next((profile for profile in self.compute if profile.slices == slices), None)

    def compute_to_create(self, slices: int) -> ComputeProfile | None:
        """Return the compute instance profile of a size, or None; one that fills the GPU instance need not be listed."""
        return self.filling_compute if slices == self.slices else self.compute_of(slices)


def usual_compute_starts(gpu_instance_slices: int, slices: int) -> range:
    """Return where compute instances of a size start, in compute slices of their GPU instance, if the driver does not say.

    At multiples of a power of two, as GPU instances do: then as many fit as -lcip says.
    """
    return range(0, gpu_instance_slices - slices + 1, 1 << (slices - 1).bit_length())


def standard_compute_profiles(slices: int, nvml_profile: int | None = None) -> tuple[ComputeProfile, ...]:
    """Return the compute instance profiles of a GPU instance of a size, as NVIDIA publishes them.

    For planning without a driver, and on a driver that lists them only inside an existing instance.
    """
    # A size that is not in the table has at least the compute instance that fills it.
    counts = _COMPUTE_COUNTS.get(slices, {slices: 1})
    ids = _COMPUTE_IDS
    if nvml_profile == _REV2:
        # In the 1g with double memory, 1c is a revision, too.
        ids = {**ids, 1: _COMPUTE_ID_REV1}
    return tuple(
        ComputeProfile(slices=size, id=ids.get(size), instances=number) for size, number in sorted(counts.items())
    )


@dataclass(frozen=True, kw_only=True)
class ComputeInstance:
    """One compute instance, a MIG device (``nvidia-smi mig -lci``): existing, planned or recorded."""

    id: int = NOT_THERE
    profile: ComputeProfile
    # None: unknown, or (planned) the driver chooses.
    placement: Placement | None = None
    uuid: str | None = None
    # Processes in it. None: unknown, which counts as busy.
    holders: tuple[GpuProcess | Holder, ...] | None = ()

    @property
    def busy(self) -> bool:
        """Return whether a process is, or may be, in it."""
        return self.holders is None or bool(self.holders)


@dataclass(frozen=True, kw_only=True)
class GpuInstance:
    """One GPU instance (``nvidia-smi mig -lgi``): existing, planned or recorded."""

    id: int = NOT_THERE
    profile: Profile
    placement: Placement
    compute: tuple[ComputeInstance, ...] = ()
    # Processes that hold the GPU instance itself (its capability node). None: unknown, which counts as busy.
    holders: tuple[GpuProcess | Holder, ...] | None = ()
    # The name that a user gave to this profile at this place on this GPU. None: none that this user sees.
    name: str | None = None
    # The users that it is granted to; empty: open to all users.
    granted: tuple[str, ...] = ()
    # Whether gpushare created it.
    made: bool = False

    def __str__(self) -> str:
        return f"{self.profile.name}:{self.start}"

    @property
    def start(self) -> int:
        return self.placement.start

    @property
    def place(self) -> tuple[str, int]:
        """Return profile and first memory slice, which identify it on its GPU."""
        return self.profile.name, self.start

    @property
    def held(self) -> bool:
        """Return whether a process holds, or may hold, the GPU instance itself."""
        return self.holders is None or bool(self.holders)

    @property
    def busy(self) -> bool:
        """Return whether a process is, or may be, in it or in one of its compute instances."""
        return self.held or any(part.busy for part in self.compute)

    @property
    def devices(self) -> int:
        """Return the number of its MIG devices; an empty GPU instance counts as one."""
        return max(1, len(self.compute))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One GPU as the planner sees it: the profiles of the driver, and the existing instances."""

    gpu: int
    uuid: str | None = None
    profiles: tuple[Profile, ...]
    instances: tuple[GpuInstance, ...] = ()

    @property
    def memory_slices(self) -> int:
        """Return the number of memory slices: as far as any placement reaches."""
        return max((place.start + place.size for p in self.profiles for place in p.placements or ()), default=0)

    @property
    def places_known(self) -> bool:
        """Return whether the placements of every profile are known; otherwise it is unknown what is free."""
        return bool(self.profiles) and all(profile.placements is not None for profile in self.profiles)

    @property
    def compute_slices(self) -> int:
        """Return the number of compute slices: the most that one profile uses (seven 1g, or one 7g)."""
        return max((profile.slices * (profile.instances or 1) for profile in self.profiles), default=0)
