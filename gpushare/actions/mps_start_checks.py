"""What is asked before an MPS daemon is started, and how a start that failed is told."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage, InUse, OperationFailed
from gpushare.host import mps_control
from gpushare.host.mps import find_daemons
from gpushare.host.mps_control import is_server

# Of processes that look like daemons: any user can start thousands.
_MOST_NAMED: Final = 3

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mps import FoundDaemon
    from gpushare.host.mps_home import DaemonHome
    from gpushare.host.program import Completed
    from gpushare.selection import Device


def check_path(home: DaemonHome) -> None:
    """Raise before anything is made: the daemon itself dies without a word."""
    length = len(os.fsencode(str(home.pipe)))
    if length > mps_control.MAX_PIPE_DIRECTORY_BYTES:
        raise BadUsage(
            f"the MPS pipe directory {home.pipe} has {length} bytes; {mps_control.MAX_PIPE_DIRECTORY_BYTES} is the limit",
            "set GPUSHARE_RUN_DIR to a shorter directory, for example /run/gpushare",
            code="path_too_long",
        )


def start_error(done: Completed, device: Device, home: DaemonHome) -> OperationFailed:
    """Return the error of a daemon that did not start; most of its failures print nothing."""
    known = {
        244: ("it finds no libcuda.so.1", "install the driver's CUDA library (libcuda1); then: gpushare doctor"),
        100: ("CUDA sees no device (error 100)", "see: gpushare doctor"),
    }
    why, hint = known.get(done.exit_code, (done.text, f"see its log: {shlex.quote(f'{home.log}/control.log')}"))
    if "already running" in done.text:
        why, hint = (
            "another daemon holds this pipe directory",
            f"see: gpushare mps status; fuser -v {shlex.quote(f'{home.pipe}/control_lock')}",
        )
    return OperationFailed(
        f"the MPS daemon of {device.title} did not start: {why or f'exit code {done.exit_code}, no text'}",
        hint,
        gpu=str(device.gpu.index),
        code="daemon_not_started",
    )


def exists(device: Device, pid: int | None) -> InUse:
    """Return the error where a daemon of ours serves the device already."""
    return InUse(
        f"an MPS daemon of gpushare serves {device.title} already (process {pid})",
        f"change its limits: gpushare mps set -g {device.selector} ...; or stop it: gpushare mps stop -g {device.selector}",
        gpu=str(device.gpu.index),
        code="daemon_exists",
    )


def refuse_second(host: Host, device: Device) -> None:
    """Raise InUse where a daemon serves the device already."""
    for found in find_daemons(host, [device.gpu], deep=False):
        daemon = found.daemon
        if daemon.ours and daemon.device_uuid == device.uuid:
            if daemon.error is not None or (found.record is not None and found.record.interrupted):
                # A dead daemon, or what an interrupted start left: its record is replaced. Whether another gpushare
                # is starting it at this moment shows under the lock.
                continue
            raise exists(device, daemon.pid)
        if not daemon.ours and device.gpu.index in daemon.gpu_indexes and is_there(host, found, device.gpu.index):
            pipe = shlex.quote(daemon.pipe_directory or "")
            raise InUse(
                f"an MPS daemon that gpushare did not start serves {device.title} ({naming(found)})",
                f"use it: export CUDA_MPS_PIPE_DIRECTORY={pipe}; or stop it: "
                f"gpushare mps stop --pipe-directory {pipe} --yes",
                gpu=str(device.gpu.index),
                code="foreign_daemon",
            )


def naming(found: FoundDaemon) -> str:
    """Return who a daemon is, for a message: it may be anybody's."""
    daemon = found.daemon
    return f"process {daemon.pid} of user {daemon.user or 'unknown'}, {daemon.pipe_directory}"


def is_there(host: Host, found: FoundDaemon, gpu: int) -> bool:
    """Return whether a daemon that names a GPU counts: root's and our own do, another user's where the driver proves it.

    Anybody can start a process of that name. The driver shows its user's MPS clients, or its server, on the GPU.
    """
    if found.trusted:
        return True
    if found.uid is None:
        return False
    for process in host.nvml.processes(gpu) or ():
        info = host.processes.describe(process.pid)
        if info is not None and info.uid == found.uid and (process.mps or is_server(info.name)):
            return True
    return False


def notes_of(host: Host, device: Device) -> list[str]:
    """Return what is worth knowing before a start: who stays outside."""
    notes = [
        f"a process called as an MPS daemon names {device.title} and is not seen on it: {naming(found)}; it does not count"
        for found in find_daemons(host, [device.gpu], deep=False)
        if not found.trusted
        and device.gpu.index in found.daemon.gpu_indexes
        and not is_there(host, found, device.gpu.index)
    ][:_MOST_NAMED]
    outside = [
        process for process in host.nvml.processes(device.gpu.index) or () if process.compute and not process.mps
    ]
    if device.mig is not None:
        outside = [
            process
            for process in outside
            if (process.gpu_instance_id, process.compute_instance_id)
            == (device.mig.gpu_instance_id, device.mig.compute_instance_id)
        ]
    if outside:
        pids = ", ".join(str(process.pid) for process in outside[:5])
        notes.append(
            f"{len(outside)} processes already run on {device.title} outside MPS ({pids}); they stay outside until they start again"
        )
    return notes
