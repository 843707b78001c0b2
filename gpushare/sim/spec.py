"""The name of a simulated host: ``sim:8xa100-80gb,t4``. Pure, but for the clock of `initial_state`."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpushare.errors import BadUsage
from gpushare.sim.models import GpuModel, find_model
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, now

PREFIX: Final = "sim:"
MAX_GPUS: Final = 64
_PART: Final = re.compile(r"(?:([0-9]{1,9})\s*[x*]\s*)?(\S.*)", re.IGNORECASE | re.DOTALL)
_HINT: Final = "write for example sim:h200, sim:8xa100-80gb or sim:2xt4,a30; models: gpushare sim list --models"
_NAMESPACE: Final = uuid.UUID("6f0e6c5e-2f0b-5b0c-9f5b-3a1d6a4f7c11")


class SimulatedHostSpec(NamedTuple):
    """A simulated host as its name describes it; ``text`` is canonical, equal hosts have equal texts."""

    text: str
    models: tuple[GpuModel, ...]


def parse_spec(text: str) -> SimulatedHostSpec:
    """Return the host that ``sim:[N x]MODEL[,...]`` describes; blanks and case do not matter.

    Raises:
        BadUsage: not such a name, an unknown model, or not 1 to 64 GPUs.
    """
    stripped = text.strip()
    if not stripped.lower().startswith(PREFIX):
        raise BadUsage(f"'{stripped[:60]}' is not a simulated host", _HINT, code="bad_host")
    models: list[GpuModel] = []
    for part in stripped[len(PREFIX) :].split(","):
        count, model = _parse_part(part)
        if not 1 <= count <= MAX_GPUS - len(models):
            raise BadUsage(f"a simulated host has 1 to {MAX_GPUS} GPUs", _HINT, code="bad_host")
        models.extend([model] * count)
    return SimulatedHostSpec(canonical_spec(models), tuple(models))


def canonical_spec(models: Sequence[GpuModel]) -> str:
    """Return the canonical name of a host with these GPUs: ``sim:8xa100-80gb,t4``."""
    parts = []
    for short, group in itertools.groupby(model.short for model in models):
        count = len(list(group))
        parts.append(short if count == 1 else f"{count}x{short}")
    return PREFIX + ",".join(parts)


def initial_state(spec: str) -> SimulatedHostState:
    """Return the state of a simulated host that nobody has used yet.

    UUIDs depend on the host's name and the GPU's index alone: every start finds the same GPUs.

    Raises:
        BadUsage: see `parse_spec`.
    """
    parsed = parse_spec(spec)
    gpus = [_new_gpu(parsed.text, index, model) for index, model in enumerate(parsed.models)]
    return SimulatedHostState(spec=parsed.text, gpus=gpus, created_at=now())


def _parse_part(part: str) -> tuple[int, GpuModel]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        raise BadUsage("a GPU model is missing in the name of the simulated host", _HINT, code="bad_host")
    count, name = match.groups()
    return (1 if count is None else int(count)), find_model(name)


def _new_gpu(spec: str, index: int, model: GpuModel) -> SimulatedGpu:
    mig_mode = 0 if model.mig else None
    return SimulatedGpu(
        model=model.key,
        uuid=f"GPU-{uuid.uuid5(_NAMESPACE, f'{spec}/{index}')}",
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        mig_mode=mig_mode,
        mig_pending=mig_mode,
    )
