"""What the advisor knows about a host. Unknown is None; a GPU that does not answer keeps its place, with its error."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.table import driver_branch
from gpushare.base.errors import GpushareError, NoPermission, NotSupported, or_none
from gpushare.base.model import Way
from gpushare.gpu_models import named_model
from gpushare.mps.limits import VOLTA, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpushare.advice.table import Table
    from gpushare.base.model import ComputeMode, Gpu, MigInstance, MpsDaemon, TimeSlice
    from gpushare.gpu_models import GpuModel
    from gpushare.mig.profile import Layout, Profile
    from gpushare.snapshot import HostState

# The first MPS program with 60 clients and static partitions (CUDA 13.1), and the last driver branch before it.
_MPS_60: Final = 13010
_BEFORE_590: Final = 589
_CLIENTS_BEFORE_VOLTA: Final = 16
_AMPERE: Final = (8, 0)
HOPPER: Final = (9, 0)
# NVML_GPU_VIRTUALIZATION_MODE_*: inside a vGPU guest; on a host that makes vGPUs.
_GUEST: Final = 2
_VGPU_HOST: Final = frozenset({3, 4})


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
    # The profiles that NVIDIA documents for this model, if the driver lists none.
    documented: tuple[Profile, ...] = ()
    compute_mode: ComputeMode | None = None
    # MPS control daemons that serve this GPU.
    mps_daemons: int = 0
    # The limits of gpushare's daemon for the whole GPU; None: there is none, or it does not answer.
    mps: Limits | None = None
    # Set if this is one MIG instance: its UUID, and its part of the GPU's SMs. Nothing of the GPU can be changed then.
    instance: str | None = None
    sm_share: float = 1.0
    # The number of processes on it, and how many of them only draw (a desktop).
    processes: int | None = None
    displays: int = 0
    # Asks nvidia-smi for the time-slice levels by GPU index; None: it does not answer.
    ask_levels: Callable[[], Mapping[int, TimeSlice | None] | None] = lambda: None
    vgpu_capable: bool | None = None
    error: str | None = None

    @property
    def selector(self) -> str:
        """Return the ``-g`` value for exactly this device."""
        return self.instance or str(self.index)

    @property
    def title(self) -> str:
        return f"GPU {self.index}" if self.instance is None else f"instance {self.instance} of GPU {self.index}"

    @property
    def time_slice_settable(self) -> bool | None:
        """Return whether the GPU has time-slice levels; setting one needs root as well."""
        levels = self.ask_levels()
        return None if levels is None else self.index in levels

    @property
    def time_slice(self) -> TimeSlice | None:
        """Return the current level, which the undo restores."""
        return (self.ask_levels() or {}).get(self.index)

    @property
    def largest_instance_count(self) -> int | None:
        """Return how many of the smallest GPU instances fit: seven on most GPUs, four on an A30; None if unknown."""
        profiles = self.documented if self.layout is None else self.layout.profiles
        return max((profile.instances for profile in profiles if profile.instances is not None), default=None)


@dataclass(frozen=True)
class RunningJob:
    """A job that runs, and the UUIDs of its devices. ``mps``: it is a client of MPS."""

    name: str
    production: bool
    mps: bool
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host. ``root`` is whether commands run as root there."""

    host: str
    driver: str | None = None
    root: bool = False
    gpus: tuple[GpuFacts, ...] = ()
    # What a process started here can still get: the machine's free memory, and what its cgroup allows.
    host_memory_bytes: int | None = None
    # nvidia-cuda-mps-control is installed.
    mps_program: bool = False
    # Asks it for its "Binary version": 13000 is CUDA 13.0; None before R580, and when it is not printed.
    ask_mps_version: Callable[[], int | None] = lambda: None
    # Looks for the jobs that run, once; by default there are none.
    ask_jobs: Callable[[], tuple[RunningJob, ...]] = tuple

    @property
    def driver_major(self) -> int | None:
        """Return the branch of the driver: 580 of 580.159.04."""
        return driver_branch(self.driver)

    @property
    def jobs(self) -> tuple[RunningJob, ...]:
        return self.ask_jobs()

    @property
    def mps_version(self) -> int | None:
        return self.ask_mps_version()


def mps_clients(table: Table, host: HostFacts, gpu: GpuFacts) -> int | None:
    """Return how many MPS clients one server accepts on the whole GPU; None if the table has no number.

    16 before Volta, else the table's number for the driver; 60 only if the program itself is from CUDA 13.1 or newer
    (NVIDIA MPS guide; the program prints its version with ``-v``).
    """
    if gpu.compute_capability is not None and gpu.compute_capability < VOLTA:
        return _CLIENTS_BEFORE_VOLTA
    # The table has numbers by driver, and the version of the program counts: a container may contain an older one. So
    # the table is asked for a driver of the program's age.
    driver = host.driver or "0"
    version = host.mps_version
    if version is not None and version < _MPS_60:
        driver = str(min(host.driver_major or _BEFORE_590, _BEFORE_590))
    elif version is not None and (host.driver_major or 0) <= _BEFORE_590:
        driver = str(_BEFORE_590 + 1)
    return table.cell(Way.MPS, "max_partitions", driver).limit


def too_old_for_static_partitions(host: HostFacts, gpu: GpuFacts) -> tuple[str, ...]:
    """Return what is too old for static MPS partitions, which need Ampere, driver 590 and MPS from CUDA 13.1."""
    too_old = []
    capability = gpu.compute_capability
    if capability is not None and capability < _AMPERE:
        too_old.append(f"an older GPU ({gpu.name or 'compute capability ' + '.'.join(map(str, capability))})")
    if host.driver_major is not None and host.driver_major <= _BEFORE_590:
        too_old.append(f"driver {host.driver}")
    elif host.mps_version is not None and host.mps_version < _MPS_60:
        # A container may contain an older program than the driver.
        too_old.append(f"MPS {host.mps_version}")
    return tuple(too_old)


def has_static_partitions(host: HostFacts, gpu: GpuFacts) -> bool | None:
    """Return whether MPS can reserve SMs for a client here; None: unknown."""
    if too_old_for_static_partitions(host, gpu):
        return False
    return None if host.driver_major is None or gpu.compute_capability is None else True


def host_facts(state: HostState) -> HostFacts:
    """Return the facts of a host. Where a GPU or a program does not answer, only its own facts are missing.

    nvidia-smi and the MPS program run only when a rule asks for the levels or the version.
    """
    daemons = tuple(row.daemon for row in or_none(lambda: state.daemons) or ())
    return HostFacts(
        host=state.host.spec,
        driver=state.driver_version,
        root=state.host.root,
        gpus=tuple(_gpu_facts(state, gpu, daemons) for gpu in state.gpus),
        host_memory_bytes=or_none(lambda: state.host.machine.free_memory(os.getpid())),
        mps_program=state.mps_installed,
        ask_mps_version=lambda: state.mps_version if state.mps_installed else None,
    )


def _read_levels(state: HostState) -> Mapping[int, TimeSlice | None] | None:
    """Return the time-slice levels by GPU index; empty if the driver has none, None if nvidia-smi does not answer."""
    if not state.start_reading_levels():
        return None
    try:
        return state.levels
    except NotSupported:
        return {}
    except GpushareError:
        return None


def _gpu_facts(state: HostState, gpu: Gpu, daemons: Sequence[MpsDaemon]) -> GpuFacts:
    """Return the facts of one GPU; what NVML does not tell is None."""
    ours = [daemon for daemon in daemons if daemon.ours and daemon.error is None]
    always_known: dict[str, Any] = {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "mps_daemons": sum(gpu.index in (daemon.gpu_index, *daemon.gpu_indexes) for daemon in daemons),
        "mps": next((Limits.of(daemon) for daemon in ours if gpu.uuid and daemon.device_uuid == gpu.uuid), None),
    }
    if gpu.error is not None:
        return GpuFacts(**always_known, error=gpu.error)
    layout = _read_layout(state, gpu) if gpu.mig_capable else None
    # The GPU may have been lost since the sweep.
    nvml = state.host.nvml
    capability = or_none(lambda: nvml.compute_capability(gpu.index))
    model = named_model(gpu.name)
    return GpuFacts(
        **always_known,
        compute_capability=capability,
        multiprocessors=or_none(lambda: nvml.multiprocessors(gpu.index, capability)),
        vgpu_capable=_vgpu_capable(or_none(lambda: nvml.virtualization_mode(gpu.index)), model),
        memory_total_bytes=gpu.memory_total_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        mig_capable=gpu.mig_capable,
        mig_enabled=gpu.mig_enabled,
        layout=layout,
        documented=model.profiles if layout is None and gpu.mig_capable and model is not None else (),
        compute_mode=gpu.compute_mode,
        processes=None if gpu.processes is None else len({process.pid for process in gpu.processes}),
        displays=len({process.pid for process in gpu.processes or () if process.graphics and not process.compute}),
        ask_levels=lambda: _read_levels(state),
    )


def _vgpu_capable(virtualization: int | None, model: GpuModel | None) -> bool | None:
    """Return whether vGPUs can be made of a GPU, from NVML's virtualization mode and the model; None if unknown.

    On bare metal and in a VM with GPU passthrough, this depends on a driver that is not installed here.
    """
    if virtualization in _VGPU_HOST:
        return True
    if virtualization == _GUEST or (model is not None and model.vgpu is False):
        return False
    return None


def instance_facts(state: HostState, gpu: GpuFacts, mig: MigInstance) -> GpuFacts:
    """Return the facts of one MIG instance of a GPU. Its compute mode, levels and layout belong to the whole GPU."""
    daemons = [row.daemon for row in or_none(lambda: state.daemons) or () if row.daemon.device_uuid == mig.uuid]
    whole_sms = gpu.multiprocessors
    own_sms = mig.multiprocessors
    return replace(
        gpu,
        uuid=mig.uuid,
        instance=mig.uuid,
        sm_share=own_sms / whole_sms if whole_sms and own_sms else 1.0,
        name=f"{mig.profile or 'MIG instance'} of {gpu.name or 'a GPU'}",
        memory_total_bytes=mig.memory_total_bytes,
        memory_used_bytes=mig.memory_used_bytes,
        multiprocessors=own_sms,
        mig_capable=False,
        mig_enabled=False,
        layout=None,
        documented=(),
        mps_daemons=len(daemons),
        mps=next((Limits.of(daemon) for daemon in daemons if daemon.ours and daemon.error is None), None),
        processes=None,
        ask_levels=dict,
        vgpu_capable=False,
    )


def _read_layout(state: HostState, gpu: Gpu) -> Layout | None:
    """Return the MIG layout of a GPU, with who has what; None: the driver lists no profiles."""
    try:
        # With names, grants and holders: what somebody has is not to be destroyed.
        layout = state.held_layouts([gpu])[gpu.index] if gpu.mig_enabled else state.layout(gpu)
    except NoPermission as error:
        # No advice on what cannot be seen: it might turn off what others use. The hint also says to name one instance of
        # the GPU, which would not show the others.
        raise error.restated(hint=error.hint.partition("; or name it")[0]) from error
    except GpushareError:
        return None
    # Before R580 the driver lists profiles only while MIG is on.
    return layout if layout.profiles else None
