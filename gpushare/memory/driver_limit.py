"""The driver's own limit on the memory of a job: the driver refuses what is above it (driver 615, cgroup v2, root).

NVML limits a cgroup on a GPU (nvmlDeviceSetMemoryLimits_v1); an allocation above the limit fails with
CUDA_ERROR_OUT_OF_MEMORY. Numbers are bytes (nvml.h 615; nvidia-smi memory-limits takes MiB). Managed memory is not counted,
and MIG devices have no such limit (NVIDIA's MPS documentation 615, "Memory Partitioning"). No such driver was at hand: all
this has run on simulated hosts only. So it is believed only as far as it can be read back, and `memory.limit` goes on adding
up what NVML lists.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError
from gpushare.base.units import MIB, format_bytes
from gpushare.base.values import dataclass
from gpushare.host.cgroups import JobCgroup, release
from gpushare.host.records import sweep_cgroups

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host

FIRST_DRIVER: Final = 615
# The last process of a program may still be ending.
_EMPTY_SECONDS: Final = 1.0


@dataclass(frozen=True)
class DriverLimit:
    """The limit of one job on one GPU, in force until `release`."""

    host: Host
    index: int
    cgroup: JobCgroup
    limit_bytes: int

    def enter(self, pid: int) -> None:
        """Move a process under the limit, before it runs its program. Whether it is there is seen later (`holds`)."""
        with contextlib.suppress(OSError):
            self.cgroup.enter(pid)

    def holds(self, pid: int) -> bool:
        """Return whether a process is under the limit."""
        return self.cgroup.holds(pid)

    def used_bytes(self) -> int | None:
        """Return what the driver counts for the job."""
        try:
            limits = self.host.nvml.memory_limits(self.index, self.cgroup.path)
        except GpushareError:
            return None
        return None if limits is None else limits.used_bytes

    def release(self) -> None:
        """Take the limit off and remove the cgroup. Where a process of the job is left, both stay until it has ended."""
        deadline = time.monotonic() + _EMPTY_SECONDS
        while self.cgroup.populated() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.cgroup.populated():
            release(self.host.nvml, self.index, self.cgroup)
            self.cgroup.remove()


def why_not(host: Host, device: Device) -> str | None:
    """Return why the driver cannot limit a job on a device, as far as it is known before; None: it may."""
    if not host.root:
        return "only root can set the driver's limit"
    if device.mig is not None or device.gpu.mig_enabled:
        return "the driver has no such limit on MIG"
    version = host.nvml.driver_version() or ""
    branch = version.partition(".")[0]
    if not branch.isdigit() or int(branch) < FIRST_DRIVER:
        return f"driver {version or '-'} cannot limit a job, driver {FIRST_DRIVER} can"
    return host.open_cgroups().why_not()


def take_limit(host: Host, device: Device, limit_bytes: int) -> DriverLimit | None:
    """Make a cgroup and let the driver limit it; None, with nothing changed: it cannot, or what it says is not what was set."""
    if why_not(host, device) is not None:
        return None
    sweep_cgroups(host)
    try:
        cgroup = host.open_cgroups().create()
    except OSError:
        return None
    limit = DriverLimit(host, device.gpu.index, cgroup, limit_bytes)
    try:
        in_force = _set(limit, device)
    except BaseException:
        limit.release()
        raise
    if not in_force:
        limit.release()
        return None
    return limit


def _set(limit: DriverLimit, device: Device) -> bool:
    """Set a limit; return whether the driver, and the kernel where it keeps the limit, say exactly this number."""
    nvml, path = limit.host.nvml, limit.cgroup.path
    try:
        if not nvml.set_memory_limit(limit.index, path, limit.limit_bytes):
            return False
        now = nvml.memory_limits(limit.index, path)
    except GpushareError:
        return False
    if now is None or (now.soft_bytes, now.hard_bytes) != (0, limit.limit_bytes):
        return False
    # A driver that takes other units than it says may give them back in the same units.
    kept = limit.cgroup.hard_limit(device.gpu.pci_bus_id or "")
    return kept in {None, limit.limit_bytes}


def command(device: Device, limit_bytes: int) -> str:
    """Return about what sets the limit, for a dry run."""
    return f"nvidia-smi memory-limits --set -n CGROUP --soft-limit 0 --hard-limit {limit_bytes // MIB} -i {device.gpu.index}"


def words(limit_bytes: int) -> str:
    """Return the step of a dry run."""
    return (
        f"let the driver limit it to {format_bytes(limit_bytes)}, in a cgroup of its own: an allocation above it fails"
    )
