"""What advice knows of a host. Gathered elsewhere; unknown is None everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare.mig.profile import Layout
    from gpushare.model import ComputeMode, TimeSlice
    from gpushare.mps.limits import Limits


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU. ``error`` says why it does not answer; then the rest is what is still known."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    # Streaming multiprocessors of the whole GPU.
    multiprocessors: int | None = None
    # CUDA compute capability, major and minor.
    compute_capability: tuple[int, int] | None = None
    mig_capable: bool | None = None
    mig_enabled: bool | None = None
    # What the driver offers and what exists; None: no MIG, or the driver does not list it (before R580 with MIG off).
    layout: Layout | None = None
    compute_mode: ComputeMode | None = None
    # MPS control daemons that serve this GPU.
    mps_daemons: int = 0
    # The limits of gpushare's daemon for the whole GPU; None: there is none, or it does not answer.
    mps: Limits | None = None
    # How many processes are on it.
    processes: int | None = None
    # Whether the GPU has time-slice levels (nvidia-smi compute-policy); setting one needs root as well.
    time_slice_settable: bool | None = None
    # The level that is set now; the undo goes back to it.
    time_slice: TimeSlice | None = None
    vgpu_capable: bool | None = None
    error: str | None = None

    @property
    def largest_instance_count(self) -> int | None:
        """Return how many of its smallest GPU instances fit: seven on most, four on an A30; None when unknown."""
        if self.layout is None:
            return None
        return max((one.instances for one in self.layout.profiles if one.instances is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host. ``root`` is whether commands run as root there."""

    host: str
    driver: str | None = None
    # The branch: 580 of 580.159.04.
    driver_major: int | None = None
    root: bool = False
    uid: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    # nvidia-cuda-mps-control is installed.
    mps_program: bool = False
    # Its "Binary version": 13000 is CUDA 13.0; None before R580, and when it does not say.
    mps_version: int | None = None
    # Whether it speaks MPS v3 (named servers, R615 and later).
    mps_version_3: bool | None = None
