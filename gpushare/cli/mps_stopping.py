"""Which daemons ``gpushare mps stop`` means, and what it says of each."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from gpushare.actions.check import counted
from gpushare.cli.common import gpus_of, note, settings
from gpushare.errors import BadUsage, GpuLost, InUse, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpushare.host.host import Host
    from gpushare.host.mps import FoundDaemon
    from gpushare.model import Gpu
    from gpushare.selection import Device


def stopping(host: Host, gpu: str | None, pipe_directory: str | None) -> list[tuple[FoundDaemon, Device | None]]:
    """Return the daemons that a `stop` means, with their devices.

    Raises:
        NotFound: there is none.
        BadUsage: a daemon of somebody else without --yes, or both ways of naming one.
    """
    from gpushare.host.mps import find_daemons

    if pipe_directory is not None and gpu is not None:
        raise BadUsage("both a GPU and a pipe directory name the daemon", "give one of them", code="two_names")
    gpus = gpus_of(host)
    found = find_daemons(host, gpus, deep=False)
    if pipe_directory is not None:
        chosen = [_by_pipe(host, found, pipe_directory)]
    else:
        chosen = _by_gpu([item for item in found if item.daemon.ours], found, gpu, gpus)
    return [(item, _device_of(item, gpus)) for item in chosen]


def _by_gpu(
    ours: Sequence[FoundDaemon], found: Sequence[FoundDaemon], gpu: str | None, gpus: Sequence[Gpu]
) -> list[FoundDaemon]:
    from gpushare.selection import select_for_change

    if gpu is None and not ours:
        raise _none_there(found, [])
    if gpu is None and len(ours) == 1 and len(gpus) == 1:
        # Also that of a MIG instance: there is nothing else that could be meant.
        return [*ours]
    try:
        devices = select_for_change(gpu, gpus)
    except GpuLost as error:
        raise _lost(error, ours) from error
    chosen = [item for device in devices for item in ours if _serves(item, device, all_of=gpu == "all")]
    if not chosen:
        raise _none_there(found, devices)
    return chosen


def _lost(error: GpuLost, ours: Sequence[FoundDaemon]) -> GpuLost:
    """Return the error with the way that works: a lost GPU tells no UUID, its daemon still has its directory."""
    ways = [
        f"gpushare mps stop --pipe-directory {shlex.quote(item.daemon.pipe_directory)}"
        for item in ours
        if item.daemon.gpu_index is None and item.daemon.pipe_directory is not None
    ]
    hint = f"stop the daemon of a lost GPU by its directory: {'; or '.join(ways)}" if ways else error.hint
    return GpuLost(error.message, hint, gpu=error.gpu, code=error.code)


def _device_of(found: FoundDaemon, gpus: Sequence[Gpu]) -> Device | None:
    """Return the GPU whose compute mode is to be restored."""
    from gpushare.selection import Device

    uuid = found.daemon.device_uuid
    return next((Device(gpu=gpu) for gpu in gpus if gpu.uuid is not None and gpu.uuid == uuid), None)


def _serves(found: FoundDaemon, device: Device, *, all_of: bool) -> bool:
    """A GPU in MIG mode stands for the daemons of its instances when all are meant, or it has one."""
    if found.daemon.device_uuid == device.uuid:
        return True
    return all_of and device.mig is None and found.daemon.gpu_index == device.gpu.index


def _none_there(found: Sequence[FoundDaemon], devices: Sequence[Device]) -> NotFound:
    names = ", ".join(device.title for device in devices) or "this host"
    foreign = next((item.daemon for item in found if not item.daemon.ours), None)
    hint = "see what is there: gpushare mps status"
    indexes = {device.gpu.index for device in devices if device.mig is None}
    instances = [item.daemon.device_uuid for item in found if item.daemon.ours and item.daemon.gpu_index in indexes]
    if instances:
        hint = f"its MIG instances have some: -g all, or -g {instances[0]}"
    elif foreign is not None and foreign.pipe_directory is not None:
        hint = f"the daemon {foreign.pid} is not gpushare's; stop it by: gpushare mps stop --pipe-directory {shlex.quote(foreign.pipe_directory)} --yes"
    return NotFound(f"no MPS daemon of gpushare serves {names}", hint, code="no_daemon")


def _by_pipe(host: Host, found: Sequence[FoundDaemon], pipe_directory: str) -> FoundDaemon:
    import os

    wanted = os.path.abspath(pipe_directory)
    item = _listening(host, [one for one in found if one.daemon.pipe_directory == wanted], wanted)
    if item is None:
        raise NotFound(
            f"no MPS daemon uses the pipe directory {wanted}", "see the daemons: gpushare mps status", code="no_daemon"
        )
    if not item.daemon.ours and not settings.yes and not settings.dry_run:
        raise BadUsage(
            f"the MPS daemon {item.daemon.pid} (user {item.daemon.user or 'unknown'}) was not started by gpushare",
            f"stop it all the same: gpushare mps stop --pipe-directory {shlex.quote(wanted)} --yes",
            code="foreign_daemon",
        )
    return item


def _listening(host: Host, same: Sequence[FoundDaemon], directory: str) -> FoundDaemon | None:
    """Return the daemon of a pipe directory. Anybody can start a process that names it.

    Of several, root's or our own is meant if it is the one that listens; else somebody has to look.
    """
    ours = next((item for item in same if item.daemon.ours), None)
    if ours is not None or len(same) < 2:
        return ours or next(iter(same), None)
    listener = host.programs.listener(directory)
    chosen = next((item for item in same if listener == (item.daemon.pid, item.uid)), None)
    if chosen is None or not chosen.trusted:
        names = ", ".join(f"{item.daemon.pid} (user {item.daemon.user or 'unknown'})" for item in same[:8])
        who = "it is not known who listens" if listener is None else f"process {listener.pid} listens"
        raise InUse(
            f"{len(same)} processes name the pipe directory {directory}: {names}; {who} there",
            f"look at them, and end the one that you mean: ps -fp {','.join(str(item.daemon.pid) for item in same[:8])}",
            code="several_daemons",
        )
    return chosen


def stop_one(host: Host, found: FoundDaemon, device: Device | None, *, seconds: float, force: bool) -> dict[str, Any]:
    """Stop one daemon and return what is said of it; with --dry-run only say it."""
    from gpushare.actions.mps_stop import stop as stop_daemon

    row = {
        "pid": found.daemon.pid,
        "gpu": found.daemon.gpu_index,
        "pipe_directory": found.daemon.pipe_directory,
        "command": None
        if found.daemon.pid is None
        else f"echo quit | CUDA_MPS_PIPE_DIRECTORY={shlex.quote(found.daemon.pipe_directory or '')} nvidia-cuda-mps-control",
        "waited_seconds": None,
        "forced": None,
        "compute_mode": None if found.record is None else found.record.previous_compute_mode,
    }
    if settings.dry_run:
        return row
    told: set[tuple[int, ...]] = set()

    def waiting(left: list[int], more: float) -> None:
        if tuple(left) not in told:
            told.add(tuple(left))
            note(f"waiting up to {more:.0f} s for {counted(len(left), 'client')}: {', '.join(map(str, left[:8]))}")

    done = stop_daemon(host, found, device, drain_seconds=seconds, force=force, on_wait=waiting)
    return {
        **row,
        "waited_seconds": round(done.waited_seconds, 3),
        "forced": done.forced,
        "compute_mode": None if done.compute_mode is None else done.compute_mode.title,
    }


def sentence(row: dict[str, Any]) -> str:
    """Return what became of a daemon, in one line."""
    where = f" of GPU {row['gpu']}" if row["gpu"] is not None else f" at {row['pipe_directory']}"
    if row["forced"] is None and row["pid"] is None:
        return f"would clear away what a dead MPS daemon{where} left"
    if row["forced"] is None:
        return f"would stop the MPS daemon{where} (process {row['pid']}): {row['command']}"
    if row["pid"] is None:
        text = f"cleared away what a dead MPS daemon{where} left"
    else:
        text = f"MPS daemon{where} is gone (process {row['pid']}{', forced' if row['forced'] else ''})"
    return text + (f"; compute mode {row['compute_mode']} restored" if row["compute_mode"] else "")
