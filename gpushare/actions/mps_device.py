"""Which devices can have MPS, and which daemon of ours serves one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.errors import InUse, NoPermission, NotFound, NotSupported
from gpushare.host import mps_control
from gpushare.host.mps import adopted_record, live_pid
from gpushare.host.mps_home import RUNNING, DaemonHome, DaemonRecord, home_of
from gpushare.host.program import missing_program
from gpushare.host.smi import compute_mode_command
from gpushare.model import ComputeMode

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


def own_daemon(host: Host, device: Device, *, to_change: bool = False) -> tuple[DaemonHome, DaemonRecord]:
    """Return the running daemon of ours on a device, with its home.

    Raises:
        NotFound: there is none, or it died (code ``no_daemon``, ``dead_daemon``).
        NoPermission: it belongs to another user, and is ``to_change``; anybody may join it.
    """
    dead: NotFound | None = None
    for run_directory in (host.run_directory, *host.shared_run_directories):
        home = home_of(run_directory, device.uuid)
        if not home.is_trusted():
            continue
        record = home.read()
        if record is None or record.device_uuid != device.uuid:
            record = adopted_record(host, home, device.uuid)
        if record is None:
            continue
        if record.interrupted:
            dead = dead or NotFound(
                f"the start of the MPS daemon of {device.title} is under way, or was interrupted",
                f"start it again: gpushare mps start -g {device.selector}; "
                f"or clear it away: gpushare mps stop -g {device.selector}",
                gpu=str(device.gpu.index),
                code="start_interrupted",
            )
            continue
        pid = live_pid(host, home, record)
        if pid is None:
            # Another's may live in a directory that we share.
            dead = dead or NotFound(
                f"the MPS daemon of {device.title} (process {record.pid}) is dead",
                f"clear it away: gpushare mps stop -g {device.selector}; then start it again",
                gpu=str(device.gpu.index),
                code="dead_daemon",
            )
            continue
        if to_change and record.uid not in {os.geteuid(), host.uid} and os.geteuid() != 0:
            raise NoPermission(
                f"the MPS daemon of {device.title} belongs to user {record.uid}",
                "ask its owner, or run as root: sudo gpushare ...",
                gpu=str(device.gpu.index),
                code="not_your_daemon",
            )
        return home, _with_pid(host, record, pid)
    if dead is not None:
        raise dead
    raise NotFound(
        f"no MPS daemon of gpushare serves {device.title}",
        f"start one: gpushare mps start -g {device.selector}; see others: gpushare mps status",
        gpu=str(device.gpu.index),
        code="no_daemon",
    )


def _with_pid(host: Host, record: DaemonRecord, pid: int) -> DaemonRecord:
    """Return a record of a daemon that lives as it is to be written: another start may have been killed before its end."""
    if record.pid == pid and record.state == RUNNING:
        return record
    info = host.processes.describe(pid)
    return replace(record, pid=pid, started_at=None if info is None else info.started_at, state=RUNNING)


def check_device(host: Host, device: Device) -> None:
    """Raise unless the device can have an MPS daemon.

    Raises:
        NotSupported: no program, or a MIG-enabled GPU without a named instance.
        InUse: compute mode PROHIBITED.
    """
    if host.programs.find(mps_control.PROGRAM) is None:
        raise missing_program(mps_control.PROGRAM)
    if not device.uuid:
        raise NotSupported(f"{device.title} tells no UUID", "see: gpushare doctor", gpu=str(device.gpu.index))
    if device.mig is None and device.gpu.mig_enabled:
        first = device.gpu.mig_instances[0].uuid if device.gpu.mig_instances else "MIG-<uuid>"
        raise NotSupported(
            f"{device.title} is in MIG mode: MPS runs inside a MIG instance",
            f"name the instance: -g {first}",
            gpu=str(device.gpu.index),
            code="mig_enabled",
        )
    if device.gpu.compute_mode is ComputeMode.PROHIBITED:
        raise InUse(
            f"{device.title} is in compute mode prohibited: no CUDA program can use it",
            f"allow it: sudo {compute_mode_command(device.gpu.uuid or '', 'DEFAULT')}",
            gpu=str(device.gpu.index),
            code="compute_prohibited",
        )
