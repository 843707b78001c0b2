"""How each GPU of a host is shared now, for ``capture``, ``diff`` and ``apply``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare.base.errors import GpushareError, InUse, or_none
from gpushare.base.model import ComputeMode, Gpu, MpsDaemon, TimeSlice
from gpushare.base.units import mps_memory_readback, parse_memory_limit
from gpushare.host.cdi import local_path
from gpushare.hostfile.file import MpsWish
from gpushare.hostfile.live import LiveGpu, LiveMps
from gpushare.mig.daemons import devices_of
from gpushare.mig.grant import reapplied_steps, user_name_or_text
from gpushare.mig.profile import Layout
from gpushare.mps.control import parse_memory
from gpushare.mps.daemons import is_multiuser
from gpushare.mps.home import LIMIT_FILE, UNIT_PIPES, pipe_directory, pipe_users, unit_at
from gpushare.mps.limits import Limits

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.ledger import NamedInstance
    from gpushare.mps.daemons import FoundDaemon
    from gpushare.snapshot import HostState


def with_units(host: Host, daemons: Sequence[FoundDaemon], gpus: Sequence[Gpu]) -> list[FoundDaemon]:
    """Return the daemons, those of systemd units completed with their device and exact memory limit."""
    return [
        item if uuid is None else replace(item, daemon=_with_unit_limit(host, item.daemon, uuid))
        for item in daemons
        for uuid in [unit_device(item, gpus)]
    ]


def unit_device(found: FoundDaemon, gpus: Sequence[Gpu]) -> str | None:
    """Return the UUID of the device that a unit's daemon serves, or None when no unit runs it.

    The pipe directory of a unit is named for its device. Any user can start a program that claims to listen there, so
    only processes of root and of this user count.
    """
    pipe = found.daemon.pipe_directory
    if found.daemon.ours or not found.trusted or pipe is None or not pipe.startswith(f"{UNIT_PIPES}/"):
        return None
    uuids = (device.uuid for gpu in gpus for device in devices_of(gpu))
    return next((uuid for uuid in uuids if uuid and pipe == pipe_directory(uuid)), None)


def _with_unit_limit(host: Host, daemon: MpsDaemon, uuid: str) -> MpsDaemon:
    """Return the daemon of a unit with its device, and with the exact memory limit that the unit has noted.

    The daemon itself prints its limit in whole GiB. A note that does not agree with that is out of date, and not used.
    """
    limit = daemon.memory_limit_bytes
    pipe = local_path(host, daemon.pipe_directory or pipe_directory(uuid))
    try:
        noted = parse_memory_limit(pipe.with_name(LIMIT_FILE).read_text(encoding="utf-8").strip())
        as_printed = parse_memory(mps_memory_readback(noted))
        if limit is not None and limit in {as_printed, noted}:
            limit = noted
    except (OSError, ValueError, GpushareError):
        # An older unit has no such file.
        pass
    return replace(daemon, device_uuid=uuid, memory_limit_bytes=limit)


def daemon_users(host: Host, daemon: MpsDaemon) -> tuple[str, ...]:
    """Return the users that may connect to a daemon; empty: all."""
    if daemon.pipe_directory is None:
        return ()
    path = Path(daemon.pipe_directory) if daemon.ours else local_path(host, daemon.pipe_directory)
    return pipe_users(path) or ()


def refuse_units(live: LiveGpu) -> None:
    """Raise InUse if systemd units run daemons on a GPU that must change: systemd would restart them."""
    units = [daemon.unit for daemon in live.daemons.values() if daemon.unit is not None]
    if units:
        raise InUse(
            f"GPU {live.gpu.index} is served by {', '.join(units)} and differs from the file",
            f"disable the unit first: sudo systemctl disable --now {' '.join(units)}; after apply: sudo gpushare export systemd --to units; sh units/apply.sh",
            gpu=live.gpu.index,
            code="unit_daemon",
        )


def live_gpus(state: HostState, gpus: Sequence[Gpu]) -> list[LiveGpu]:
    """Return how these GPUs are shared: modes, time-slice, daemons with their limits, MIG with names and grants.

    A GPU that does not answer has only its error; without nvidia-smi the time-slice is unknown.
    """
    levels = or_none(lambda: state.levels) or {}
    daemons = with_units(state.host, state.daemons, state.gpus)
    layouts = state.held_layouts([gpu for gpu in gpus if gpu.error is None and gpu.mig_capable])
    return [_live_gpu(state, gpu, levels, daemons, layouts.get(gpu.index)) for gpu in gpus]


def _live_gpu(
    state: HostState,
    gpu: Gpu,
    levels: Mapping[int, TimeSlice | None],
    daemons: Sequence[FoundDaemon],
    layout: Layout | None,
) -> LiveGpu:
    """Return how one GPU is shared now, from the time-slice ``levels`` (by index) and ``daemons`` of all GPUs."""
    host = state.host
    device_uuids = {device.uuid for device in devices_of(gpu)}
    names = [named for named in state.names.values() if named.gpu_uuid == gpu.uuid]
    return LiveGpu(
        gpu=gpu,
        time_slice=levels.get(gpu.index),
        has_time_slice=gpu.index in levels,
        daemons={
            item.daemon.device_uuid or "": _live_daemon(host, gpu, item)
            for item in daemons
            if item.daemon.device_uuid in device_uuids
        },
        foreign=tuple(
            f"an MPS daemon that gpushare did not start (process {item.daemon.pid}, {item.daemon.pipe_directory})"
            for item in daemons
            # `with_units` has given the daemons of units a device.
            if not item.daemon.ours and item.daemon.device_uuid is None and item.serves(host, gpu.index)
        ),
        layout=layout if gpu.error is None else None,
        names=tuple(replace(named, users=tuple(sorted(map(user_name_or_text, named.users)))) for named in names),
        open=frozenset(named.name for named in names if not _grants_in_force(host, named)),
    )


def _live_daemon(host: Host, gpu: Gpu, found: FoundDaemon) -> LiveMps:
    """Return a daemon of gpushare, or of its systemd unit, with the limits in force.

    The limits are unknown if the daemon does not answer, or if its start was interrupted before all of them were set.
    """
    daemon, record = found.daemon, found.record
    unit = unit_at(daemon.pipe_directory) if daemon.pipe_directory and not daemon.ours else None
    transient = daemon.transient or (record is not None and record.transient)
    is_interrupted = daemon.ours and (record is None or record.interrupted)
    if daemon.error is not None or is_interrupted:
        return LiveMps(pid=daemon.pid, wish=None, error=daemon.error or daemon.note, transient=transient, unit=unit)
    # The start of an exclusive daemon notes the mode that its stop restores; a unit notes nothing.
    exclusive = daemon.device_uuid == gpu.uuid and gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    if record is not None:
        exclusive = record.previous_compute_mode is not None
    wish = MpsWish(
        limits=Limits.of(daemon),
        users=daemon_users(host, daemon),
        exclusive=exclusive,
        multiuser=is_multiuser(host, daemon.pid),
    )
    return LiveMps(pid=daemon.pid, wish=wish, transient=transient, unit=unit)


def _grants_in_force(host: Host, named: NamedInstance) -> bool:
    """Return whether a named MIG instance is open to exactly the users whom it is granted to; True without a grant.

    False if the driver cannot tell: then `apply` plans the grants again, and its steps meet the error.
    """
    steps = or_none(lambda: reapplied_steps(host, named))
    # No step: to apply the grants again would change nothing.
    return steps is not None and not steps
