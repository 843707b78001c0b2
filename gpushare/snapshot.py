"""One look at a host: NVML, the time-slice, the processes and the MPS daemons, joined."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import GpushareError
from gpushare.host.host import is_trusted_directory
from gpushare.host.program import MPS_CONTROL
from gpushare.host.smi import policies_of
from gpushare.model import Gpu, GpuProcess, MpsDaemon, Snapshot, TimeSlice

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.host.program import Pending

# How long an answer of nvidia-smi or of an MPS daemon is shown again.
_SLOW_SECONDS = 5.0
BLIND = (
    "the process list is blind here, this PID namespace is not the host's: processes of other containers are missing or wrong here; "
    "look from the host, or start the container with --pid=host"
)


class Observer:
    """Looks at a host again and again; what does not change is asked once."""

    def __init__(self, host: Host, *, strangers: bool = False) -> None:
        """Look at a host; ``strangers``: the MPS daemons of other users are asked, too."""
        self._host, self._strangers = host, strangers
        self._driver: str | None = None
        self._mps_version: int | None = None
        self._mps_probed = False
        self._levels: dict[int, TimeSlice | None] = {}
        self._levels_until = 0.0
        self._daemon_rows: tuple[MpsDaemon, ...] = ()
        self._daemon_rows_until = 0.0
        self._daemon_signs: object = None

    def look(self) -> Snapshot:
        """Return the host as it is now.

        The one child, nvidia-smi, is started before the NVML sweep and joined after it. Looking again
        within 5 seconds asks NVML alone: nvidia-smi costs more than all of it, and the MPS daemon
        writes each conversation into a log that is never rotated. What has visibly changed is asked at once.

        Raises:
            NvmlMissing, DriverNotLoaded, NoPermission: the host as a whole does not answer.
        """
        host, warnings = self._host, []
        known = time.monotonic() < self._levels_until
        pending, why_not = (None, None) if known else self._start_policy()
        gpus = host.nvml.sweep()
        if self._driver is None:
            self._driver = host.nvml.driver_version()
        blind = host.processes.namespace_is_host() is False
        gpus = tuple(replace(gpu, processes=self._named(gpu, blind=blind)) for gpu in gpus)
        daemons = self._daemons_now(gpus)
        levels, failed = (self._levels, None) if known else self._join_policy(pending)
        why_not = why_not or failed
        if not known and why_not is None:
            self._levels, self._levels_until = levels, time.monotonic() + _SLOW_SECONDS
        if why_not:
            warnings.append(f"the time-slice is unknown: {why_not}")
        if blind:
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

    def _named(self, gpu: Gpu, *, blind: bool) -> tuple[GpuProcess, ...] | None:
        # NVML answers a foreign PID namespace with an empty list: that nobody is there is not known.
        if gpu.processes is None or (blind and not gpu.processes):
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

    def _daemons_now(self, gpus: tuple[Gpu, ...]) -> tuple[MpsDaemon, ...]:
        # What tells at no cost that something has changed: processes on the GPUs, records, daemons.
        on_gpus = tuple((gpu.index, process.pid) for gpu in gpus for process in gpu.processes or ())
        signs = (on_gpus, self._records(), tuple(self._host.processes.named(MPS_CONTROL)))
        if time.monotonic() >= self._daemon_rows_until or signs != self._daemon_signs:
            self._daemon_rows = self._daemons(gpus) if any(signs[1:]) else ()
            self._daemon_signs, self._daemon_rows_until = signs, time.monotonic() + _SLOW_SECONDS
        return self._daemon_rows

    def _records(self) -> tuple[tuple[str, int], ...]:
        """Return the records of our daemons, with what changes when one is written."""
        directories = (self._host.run_directory, *self._host.shared_run_directories)
        return tuple(found for directory in directories for found in _records_in(directory / "mps"))

    def _daemons(self, gpus: tuple[Gpu, ...]) -> tuple[MpsDaemon, ...]:
        from gpushare.mps.control import probe_version
        from gpushare.mps.daemons import find_daemons

        found = [item.daemon for item in find_daemons(self._host, gpus, strangers=self._strangers)]
        if found and not self._mps_probed:
            self._mps_probed = True
            # A program that hangs costs the version only; gpushare doctor tells it.
            with contextlib.suppress(GpushareError):
                self._mps_version = probe_version(self._host.programs)
        return tuple(self._with_capacity(daemon, gpus) for daemon in found)

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
        from gpushare.mps.control import max_clients

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


def _records_in(directory: Path) -> list[tuple[str, int]]:
    if not is_trusted_directory(directory.parent, directory.name):
        return []
    try:
        return [(str(path), path.stat().st_mtime_ns) for path in sorted(directory.glob("*/daemon.json"))]
    except OSError:
        return []
