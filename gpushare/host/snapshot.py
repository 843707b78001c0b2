"""One look at a host: NVML, the time-slice, the processes and the MPS daemons, joined."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import GpushareError
from gpushare.host.program import MPS_CONTROL
from gpushare.host.smi import policies_of
from gpushare.model import Gpu, GpuProcess, MpsDaemon, Snapshot, TimeSlice

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.host.program import Pending

BLIND = (
    "this PID namespace is not the host's: processes of other containers are missing or wrong here; "
    "look from the host, or start the container with --pid=host"
)


class Observer:
    """Looks at a host again and again; what does not change is asked once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._driver: str | None = None
        self._mps_version: int | None = None
        self._mps_probed = False
        self._mps_seen = False

    def look(self) -> Snapshot:
        """Return the host as it is now.

        The one child, nvidia-smi, is started before the NVML sweep and joined after it.

        Raises:
            NvmlMissing, DriverNotLoaded, NoPermission: the host as a whole does not answer.
        """
        host, warnings = self._host, []
        pending, why_not = self._start_policy()
        gpus = host.nvml.sweep()
        if self._driver is None:
            self._driver = host.nvml.driver_version()
        gpus = tuple(replace(gpu, processes=self._named(gpu)) for gpu in gpus)
        daemons = self._daemons(gpus)
        levels, failed = self._join_policy(pending)
        why_not = why_not or failed
        if why_not:
            warnings.append(f"the time-slice is unknown: {why_not}")
        if host.processes.namespace_is_host() is False:
            warnings.append(BLIND)
        return Snapshot(
            host=host.spec,
            driver_version=self._driver,
            gpus=tuple(replace(gpu, time_slice=levels.get(gpu.index)) for gpu in gpus),
            daemons=daemons,
            warnings=tuple(warnings),
            taken_at=time.time(),
        )

    def _start_policy(self) -> tuple[Pending | None, str | None]:
        try:
            return self._host.policy.start(), None
        except GpushareError as error:
            return None, error.message

    def _join_policy(self, pending: Pending | None) -> tuple[dict[int, TimeSlice | None], str | None]:
        if pending is None:
            return {}, None
        try:
            return policies_of(pending.result()), None
        except GpushareError as error:
            return {}, error.message

    def _named(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        if gpu.processes is None:
            return None
        return tuple(self._with_owner(process) for process in gpu.processes)

    def _with_owner(self, process: GpuProcess) -> GpuProcess:
        info = self._host.processes.describe(process.pid)
        if info is None:
            return process
        return replace(
            process,
            user=info.user,
            name=info.name,
            command_line=info.command_line,
            started_at=info.started_at,
            container=info.container,
        )

    def _daemons(self, gpus: tuple[Gpu, ...]) -> tuple[MpsDaemon, ...]:
        self._mps_seen = self._mps_seen or self._has_mps()
        if not self._mps_seen:
            return ()
        from gpushare.host.mps import find_daemons
        from gpushare.host.mps_program import probe_version

        found = [item.daemon for item in find_daemons(self._host, gpus)]
        if found and not self._mps_probed:
            self._mps_version, self._mps_probed = probe_version(self._host.programs), True
        return tuple(self._with_capacity(daemon, gpus) for daemon in found)

    def _has_mps(self) -> bool:
        """Return whether there is a record or a daemon; the conversation with MPS is loaded only then."""
        directories = (self._host.run_directory, *self._host.shared_run_directories)
        if any(_holds_records(directory / "mps") for directory in directories):
            return True
        return bool(self._host.processes.named(MPS_CONTROL))

    def _with_capacity(self, daemon: MpsDaemon, gpus: tuple[Gpu, ...]) -> MpsDaemon:
        if daemon.gpu_index is None:
            return daemon
        gpu = next(gpu for gpu in gpus if gpu.index == daemon.gpu_index)
        version = None if self._mps_version is None else str(self._mps_version)
        try:
            room = self._room(daemon, gpu)
        except GpushareError:
            # The GPU was lost since the sweep.
            room = None
        return replace(daemon, version=version, max_clients=room)

    def _room(self, daemon: MpsDaemon, gpu: Gpu) -> int | None:
        """Return how many clients a server of this daemon takes on the GPU, or None when that is unknown."""
        from gpushare.host.mps_program import max_clients

        capability = None if gpu.error else self._host.nvml.compute_capability(gpu.index)
        mig = next((mig for mig in gpu.mig_instances if mig.uuid == daemon.device_uuid), None)
        # NVIDIA's MIG guide: 48 times the instance's share of the compute slices.
        fraction = 1.0 if mig is None else self._share(gpu, mig.profile)
        return None if fraction is None else max_clients(self._mps_version, capability, fraction)

    def _share(self, gpu: Gpu, profile: str | None) -> float | None:
        """Return the share of the compute slices of ``3g.71gb`` (or ``1c.3g.71gb``) on this GPU."""
        slices = re.match(r"(?:(\d)c\.)?(\d)g\.", profile or "")
        total = self._host.nvml.max_mig_devices(gpu.index)
        return int(slices.group(1) or slices.group(2)) / total if slices and total else None


def _holds_records(directory: Path) -> bool:
    try:
        return any(directory.glob("*/daemon.json"))
    except OSError:
        return False
