"""The catalogue of GPU models: what each reports, and which MIG profiles it has. Pure.

The catalogue is data (``data/gpu-models.json``); unknown facts are null there and None here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpushare.base.errors import BadUsage
from gpushare.base.units import MIB, plain_name
from gpushare.mig.profile import Engines, Placement, Profile, standard_compute_profiles

_CATALOGUE: Final = Path(__file__).resolve().parent / "data" / "gpu-models.json"

# NVML_GPU_INSTANCE_PROFILE_* of nvml.h: what nvmlDeviceGetGpuInstanceProfileInfo takes, not the profile id.
NVML_PROFILE: Final[Mapping[str, int]] = {
    "1_SLICE": 0,
    "2_SLICE": 1,
    "3_SLICE": 2,
    "4_SLICE": 3,
    "7_SLICE": 4,
    "8_SLICE": 5,
    "6_SLICE": 6,
    "1_SLICE_REV1": 7,
    "2_SLICE_REV1": 8,
    "1_SLICE_REV2": 9,
    "1_SLICE_GFX": 10,
    "2_SLICE_GFX": 11,
    "4_SLICE_GFX": 12,
    "1_SLICE_NO_ME": 13,
    "2_SLICE_NO_ME": 14,
    "1_SLICE_ALL_ME": 15,
    "2_SLICE_ALL_ME": 16,
    "3_SLICE_GFX": 17,
}


class GpuModel(NamedTuple):
    """One GPU model; None is unknown."""

    key: str
    # As nvmlDeviceGetName reports it.
    name: str
    aliases: tuple[str, ...]
    product: str
    arch: str
    compute_capability: str | None
    pci_device_ids: tuple[str, ...]
    # nvmlMemory_v2_t.total and .reserved of an idle GPU.
    memory_mib: int | None
    memory_reserved_bytes: int | None
    multiprocessors: int | None
    power_limit_watts: int | None
    max_sm_clock_mhz: int | None
    # Whether `nvidia-smi compute-policy --set-timeslice` works.
    time_slice: bool | None
    # Whether NVIDIA's vGPU software has types for it (NVIDIA AI Enterprise 8, vGPU Types Reference).
    vgpu: bool | None
    mig: bool
    # MIG: memory slices of the placement axis, and compute slices.
    axis: int | None
    compute_slices: int | None
    reset_for_mode_change: bool | None
    profiles: tuple[Profile, ...]
    # By the name of a profile: how sure its facts are, and whether peer-to-peer transfers work.
    confidence: Mapping[str, str]
    peer_to_peer: Mapping[str, bool]

    @property
    def short(self) -> str:
        """Return the name that users type: ``h200``."""
        return self.aliases[0] if self.aliases else self.key

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_mib is None else self.memory_mib * MIB

    def profile(self, name: str) -> Profile | None:
        """Return the GPU instance profile with this name (``3g.71gb``, ``MIG 3g.71gb``), or None."""
        wanted = name.strip().lower().removeprefix("mig").strip()
        return next((profile for profile in self.profiles if profile.name == wanted), None)

    def profile_by_id(self, profile_id: int) -> Profile | None:
        return next((profile for profile in self.profiles if profile.id == profile_id), None)


def load_models() -> dict[str, GpuModel]:
    return {key: model_of(key) for key in _catalogue()}


@cache
def model_of(key: str) -> GpuModel:
    """Return the model with this key, which is in the catalogue; only the models in use are built."""
    raw = _catalogue()[key]
    return GpuModel(
        **{field: raw[field] for field in _SAME_NAME},
        aliases=tuple(raw["aliases"]),
        pci_device_ids=tuple(raw["pci_device_ids"] or ()),
        multiprocessors=raw["sm"],
        profiles=tuple(map(_build_profile, raw["gi_profiles"])),
        confidence={profile["name"]: profile["confidence"] for profile in raw["gi_profiles"]},
        peer_to_peer={profile["name"]: profile["p2p"] for profile in raw["gi_profiles"]},
    )


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, dict[str, Any]]:
    return {entry["key"]: entry for entry in json.loads(_CATALOGUE.read_text(encoding="utf-8"))["models"]}


def find_model(name: str) -> GpuModel:
    """Return a model by key, alias or product name; case and punctuation do not matter."""
    key = _keys_by_name().get(plain_name(name))
    if key is not None:
        return model_of(key)
    import difflib

    listing = "see them all: gpushare sim list --models"
    shorts = {plain_name(model.short): model.short for model in load_models().values()}
    close = [shorts[match] for match in difflib.get_close_matches(plain_name(name), shorts, n=3, cutoff=0.5)]
    hint = f"did you mean {', '.join(close)}? {listing}" if close else listing
    raise BadUsage(f"there is no GPU model '{name.strip()[:60]}'", hint, code="unknown_model")


def named_model(name: str | None) -> GpuModel | None:
    """Return the model that NVML reports by this name, or None."""
    key = _keys_by_name().get(plain_name(name or ""))
    return None if key is None else model_of(key)


@lru_cache(maxsize=1)
def _keys_by_name() -> dict[str, str]:
    """Return the keys of the models by each of their names, without case and punctuation."""
    names: dict[str, str] = {}
    for key, entry in _catalogue().items():
        full = entry["name"]
        bare = re.sub(r"^(NVIDIA GeForce|NVIDIA|Tesla) ", "", full)
        for name in (key, full, bare, entry["product"], *entry["aliases"]):
            # The first model with an alias gets it; a test keeps aliases unambiguous.
            names.setdefault(plain_name(name), key)
    return names


_SAME_NAME: Final = (
    *("key", "name", "product", "arch", "compute_capability", "memory_mib", "memory_reserved_bytes"),
    *("power_limit_watts", "max_sm_clock_mhz", "time_slice", "vgpu", "mig", "axis", "compute_slices"),
    "reset_for_mode_change",
)


def _build_profile(raw: dict[str, Any]) -> Profile:
    """Return a profile of the catalogue as the driver would list it; unpublished values are None."""
    nvml_profile = None if raw["nvml_enum"] is None else NVML_PROFILE[raw["nvml_enum"]]
    return Profile(
        name=raw["name"],
        id=raw["id"],
        nvml_profile=nvml_profile,
        slices=raw["slices"],
        memory_bytes=None if raw["mem_mib"] is None else raw["mem_mib"] * MIB,
        multiprocessors=raw["sm"],
        engines=Engines(
            copy=raw["ce"],
            decoders=raw["dec"],
            encoders=raw["enc"],
            jpeg=raw["jpeg"],
            optical_flow=raw["ofa"],
        ),
        instances=raw["instances"],
        placements=None if raw["starts"] is None else tuple(Placement(start, raw["size"]) for start in raw["starts"]),
        compute=standard_compute_profiles(raw["slices"], nvml_profile),
    )
