"""The MPS daemons of systemd units (``gpushare export systemd``): known by where they listen, and in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare.errors import GpushareError, InUse
from gpushare.host.cdi import local_path
from gpushare.host.mps_access import pipe_users
from gpushare.host.mps_text import parse_memory
from gpushare.layout.hostfile import MpsWish
from gpushare.layout.live import LiveMps
from gpushare.layout.systemd import LIMIT_FILE, UNIT_PIPES, old_pipe_directory, pipe_directory, unit_at
from gpushare.model import ComputeMode, Priority
from gpushare.units import mps_memory_readback, parse_memory_limit

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mps import FoundDaemon
    from gpushare.layout.live import LiveGpu
    from gpushare.model import Gpu, MpsDaemon


def is_unit(daemon: MpsDaemon) -> bool:
    """Return whether a daemon that `with_units` looked at is a unit's."""
    return not daemon.ours and daemon.device_uuid is not None


def with_units(host: Host, found: Sequence[FoundDaemon], gpus: Sequence[Gpu]) -> list[FoundDaemon]:
    """Return the daemons; those of units with the device that they serve, and their exact memory limit."""
    devices = [unit_device(host, one, gpus) for one in found]
    return [
        one if uuid is None else replace(one, daemon=_served(host, one.daemon, uuid))
        for one, uuid in zip(found, devices, strict=True)
    ]


def unit_device(host: Host, found: FoundDaemon, gpus: Sequence[Gpu]) -> str | None:
    """Return the UUID of the device that a unit's daemon serves, or None when it is no unit's.

    Any user can start a program that says it listens there: only root's and our own counts.
    """
    where = found.daemon.pipe_directory
    if found.daemon.ours or not found.trusted or where is None or not where.startswith(f"{UNIT_PIPES}/"):
        return None
    uuids = [uuid for gpu in gpus for uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig_instances)) if uuid]
    for uuid in uuids:
        if where == pipe_directory(uuid):
            return uuid
    # Devices can share the directory of an older unit; the daemon names its own.
    visible = (host.processes.environment(found.daemon.pid or 0) or {}).get("CUDA_VISIBLE_DEVICES")
    return next((uuid for uuid in uuids if uuid == visible and where == old_pipe_directory(uuid)), None)


def _served(host: Host, daemon: MpsDaemon, uuid: str) -> MpsDaemon:
    held = daemon.memory_limit_bytes
    try:
        text = (
            local_path(host, daemon.pipe_directory or pipe_directory(uuid))
            .with_name(LIMIT_FILE)
            .read_text(encoding="utf-8")
            .strip()
        )
        noted = parse_memory_limit(text)
        if held is not None and held in {parse_memory(mps_memory_readback(noted)), noted}:
            held = noted
    except (OSError, ValueError, GpushareError):
        # An older unit: as the daemon prints it, whole GiB.
        pass
    return replace(daemon, device_uuid=uuid, memory_limit_bytes=held)


def users_of(host: Host, daemon: MpsDaemon) -> tuple[str, ...]:
    """Return who may be a client of a daemon; nobody named: everybody."""
    if daemon.pipe_directory is None:
        return ()
    path = Path(daemon.pipe_directory) if daemon.ours else local_path(host, daemon.pipe_directory)
    return pipe_users(path) or ()


def live_unit(host: Host, gpu: Gpu, daemon: MpsDaemon) -> LiveMps:
    """Return the daemon of a unit as it is in force."""
    unit = unit_at(daemon.pipe_directory or pipe_directory(daemon.device_uuid or ""))
    if daemon.error is not None:
        return LiveMps(pid=daemon.pid, wish=None, error=daemon.error, unit=unit)
    whole = daemon.device_uuid == gpu.uuid
    wish = MpsWish(
        threads_percent=None if daemon.threads_percent == 100.0 else daemon.threads_percent,
        memory_limit_bytes=daemon.memory_limit_bytes,
        priority=daemon.priority or Priority.NORMAL,
        users=users_of(host, daemon),
        exclusive=whole and gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS,
    )
    return LiveMps(pid=daemon.pid, wish=wish, unit=unit)


def refuse_units(live: LiveGpu) -> None:
    """Raise InUse where units run daemons on a GPU that is to change: systemd would start them again."""
    units = [one.unit for one in live.units if one.unit is not None]
    if units:
        raise InUse(
            f"GPU {live.gpu.index} is served by {', '.join(units)}, and is not as the file has it",
            f"take it off first: sudo systemctl disable --now {' '.join(units)}; after apply: gpushare export systemd",
            gpu=str(live.gpu.index),
            code="unit_daemon",
        )
