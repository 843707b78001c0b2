"""What advice needs to know of a host, gathered once. A GPU that does not answer stays, with its error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.facts import GpuFacts, HostFacts
from gpushare.errors import GpushareError, NoPermission
from gpushare.mps.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpushare.host.host import Host
    from gpushare.mig.profile import Layout
    from gpushare.model import Gpu, MpsDaemon

# The first "Binary version" that speaks MPS v3 (R615, CUDA 13.4).
_MPS_3: Final = 13040
# NVML_GPU_VIRTUALIZATION_MODE_*: inside a vGPU guest; on a host that makes vGPUs.
_GUEST: Final = frozenset({2})
_VGPU_HOST: Final = frozenset({3, 4})


def gather(host: Host) -> HostFacts:
    """Return the facts of a host: one NVML sweep, one nvidia-smi beside it, the MPS program and its daemons.

    A GPU, or a program, that does not answer costs only what it alone could tell.

    Raises:
        NvmlMissing, DriverNotLoaded, NoPermission: the host as a whole does not answer.
    """
    from gpushare.advice.table import driver_branch
    from gpushare.host.program import MPS_CONTROL

    pending = _or_none(host.policy.start)
    gpus = host.nvml.sweep()
    driver = host.nvml.driver_version()
    daemons = _daemons(host, gpus)
    levels = None if pending is None else _or_none(lambda: _levels(pending.result()))
    installed = host.programs.find(MPS_CONTROL) is not None
    version = _mps_version(host) if installed else None
    blind = host.processes.namespace_is_host() is False
    return HostFacts(
        host=host.spec,
        driver=driver,
        driver_major=driver_branch(driver),
        root=host.uid == 0,
        uid=host.uid,
        gpus=tuple(_gpu(host, gpu, daemons, levels, blind=blind) for gpu in gpus),
        mps_program=installed,
        mps_version=version,
        mps_version_3=None if version is None else version >= _MPS_3,
    )


def _gpu(host: Host, gpu: Gpu, daemons: tuple[MpsDaemon, ...], levels: Any, *, blind: bool) -> GpuFacts:
    facts: dict[str, Any] = {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "mps_daemons": sum(gpu.index in (daemon.gpu_index, *daemon.gpu_indexes) for daemon in daemons),
        "mps": next((Limits.of(daemon) for daemon in daemons if _only_serves(daemon, gpu)), None),
    }
    if gpu.error is not None:
        return GpuFacts(**facts, error=gpu.error)
    # NVML answers a foreign PID namespace with an empty list: that nobody is there is not known.
    seen = gpu.processes if gpu.processes or not blind else None
    return GpuFacts(
        **facts,
        **_static(host, gpu),
        memory_total_bytes=gpu.memory_total_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        mig_capable=gpu.mig_capable,
        mig_enabled=gpu.mig_enabled,
        layout=_layout(host, gpu) if gpu.mig_capable else None,
        compute_mode=gpu.compute_mode,
        processes=None if seen is None else len({process.pid for process in seen}),
        time_slice_settable=None if levels is None else gpu.index in levels,
        time_slice=None if levels is None else levels.get(gpu.index),
    )


def _only_serves(daemon: MpsDaemon, gpu: Gpu) -> bool:
    """Return whether a daemon is ours, answers, and serves this whole GPU and no other."""
    return daemon.ours and daemon.error is None and daemon.device_uuid is not None and daemon.device_uuid == gpu.uuid


def _static(host: Host, gpu: Gpu) -> dict[str, Any]:
    """Return what NVML tells of the chip, as far as it tells (the GPU may be lost since the sweep)."""
    from gpushare.host.nvml import multiprocessors

    capability = _or_none(lambda: host.nvml.compute_capability(gpu.index))
    mode = _or_none(lambda: _virtualization(host, gpu.index))
    return {
        "compute_capability": capability,
        "multiprocessors": _or_none(lambda: multiprocessors(host.nvml, gpu.index, capability)),
        # On bare metal, and passed through to a VM, it depends on a driver that is not here.
        "vgpu_capable": True if mode in _VGPU_HOST else False if mode in _GUEST else None,
    }


def _virtualization(host: Host, index: int) -> int | None:
    """Return NVML_GPU_VIRTUALIZATION_MODE_* (nvmlDeviceGetVirtualizationMode), or None when NVML cannot tell."""
    handle = host.nvml.handle(index)
    mode = host.nvml.ask(lambda nvml: nvml.nvmlDeviceGetVirtualizationMode(handle), str(index))
    return None if mode is None else int(mode)


def _layout(host: Host, gpu: Gpu) -> Layout | None:
    from gpushare.mig.driver import MigReader

    try:
        layout = MigReader(host.nvml).layout(gpu)
    except NoPermission as error:
        # No advice on what cannot be seen: it might be to turn off what others use.
        raise error.restated(hint=error.hint.partition("; or name it")[0]) from error
    except GpushareError:
        return None
    # Before R580 the driver lists profiles only while MIG is on.
    return layout if layout.profiles else None


def _levels(done: Any) -> Any:
    from gpushare.errors import NotSupported
    from gpushare.host.smi import policies_of

    try:
        return policies_of(done)
    except NotSupported:
        return {}


def _daemons(host: Host, gpus: tuple[Gpu, ...]) -> tuple[MpsDaemon, ...]:
    from gpushare.mps.daemons import find_daemons

    found = _or_none(lambda: find_daemons(host, gpus, deep=False))
    if found:
        # What they give their clients is asked of them, one after the other.
        found = _or_none(lambda: find_daemons(host, gpus)) or found
    return tuple(item.daemon for item in found or ())


def _mps_version(host: Host) -> int | None:
    from gpushare.mps.control import probe_version

    version: int | None = _or_none(lambda: probe_version(host.programs))
    return version


def _or_none(read: Callable[[], Any]) -> Any:
    """Return what is read, or None where that one thing does not answer."""
    try:
        return read()
    except GpushareError:
        return None
