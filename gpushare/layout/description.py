"""What an export needs to know of a host: a description, from the live host or from a file. Frozen, pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gpushare.model import ComputeMode, Priority, TimeSlice

_PARTIAL: Final = re.compile(r"(\d+)c\.", re.ASCII)


class Sharing(str, Enum):
    """The way of sharing of a GPU, as gpushare.yaml names it."""

    EXCLUSIVE = "exclusive"
    TIMESLICE = "timeslice"
    MPS = "mps"
    MIG = "mig"


@dataclass(frozen=True, kw_only=True)
class MpsDescription:
    """An MPS daemon: its limits per client process. None is no limit."""

    threads_percent: float | None = None
    memory_limit_bytes: int | None = None
    priority: Priority | None = None
    # Who may be its client; empty: everybody.
    users: tuple[str, ...] = ()
    # None: it has none yet.
    pipe_directory: str | None = None


@dataclass(frozen=True, kw_only=True)
class MigDescription:
    """One MIG device (a compute instance in its GPU instance). ``replicas`` and ``mps`` are sharing inside it."""

    # As the driver names it: 1g.10gb, 1g.10gb+me, 1c.3g.40gb.
    profile: str
    uuid: str
    # NVML's index of the MIG device on its GPU, the 1 of `--gpus device=0:1`; None: unknown.
    index: int | None = None
    start: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_total_bytes: int | None = None
    # Minor numbers of /dev/nvidia-caps/nvidia-capN: of the GPU instance and of the compute instance.
    capabilities: tuple[int, int] | None = None
    name: str | None = None
    replicas: int | None = None
    mps: MpsDescription | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether its compute instance is all of its GPU instance: the driver then prints no ``1c.``."""
        return _PARTIAL.match(self.profile) is None


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """One GPU and how it is shared. ``replicas`` is how many programs shall share it; None: nobody said."""

    index: int
    uuid: str
    sharing: Sharing
    # The product name, as NVML has it: Tesla T4.
    name: str | None = None
    pci_bus_id: str | None = None
    # Device above vendor, 0x1EB810DE.
    pci_device_id: int | None = None
    # The N of /dev/nvidiaN.
    minor: int | None = None
    memory_total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    compute_mode: ComputeMode | None = None
    mig_capable: bool | None = None
    replicas: int | None = None
    time_slice: TimeSlice | None = None
    mps: MpsDescription | None = None
    mig: tuple[MigDescription, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostDescription:
    """One host. ``node`` is its name in a cluster; ``whole`` is False when GPUs were left out by ``-g``."""

    gpus: tuple[GpuDescription, ...]
    driver: str | None = None
    node: str | None = None
    whole: bool = True

    def instances(self) -> Iterator[tuple[GpuDescription, MigDescription]]:
        """Yield every MIG device with its GPU."""
        for gpu in self.gpus:
            for mig in gpu.mig:
                yield gpu, mig


def short_model(name: str | None) -> str | None:
    """Return the model in one word, lower case: ``t4`` of Tesla T4, ``a100`` of NVIDIA A100-SXM4-40GB."""
    words = [word for word in re.split(r"[\s-]+", (name or "").lower()) if word not in {"", "nvidia", "tesla"}]
    return words[0] if words else None


def ranges(numbers: list[int]) -> str:
    """Return numbers as people list them: ``0, 1``."""
    return ", ".join(map(str, numbers))
