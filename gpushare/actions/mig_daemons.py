"""Our MPS daemons on one GPU and its MIG devices, who uses them, and those of others in the way of a MIG change."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpushare.actions.check import counted
from gpushare.actions.mps_start_checks import is_there, naming
from gpushare.errors import GpushareError, InUse, NoPermission
from gpushare.host.mps import FoundDaemon, find_daemons
from gpushare.host.mps_home import DaemonHome, DaemonRecord, homes_in, unrecorded
from gpushare.selection import Device

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.model import Gpu


@dataclass(frozen=True)
class OwnDaemon:
    """A live daemon of ours, its device, and what is known of its servers."""

    found: FoundDaemon
    home: DaemonHome
    record: DaemonRecord
    device: Device


def idle_daemon_pids(host: Host, gpu: Gpu) -> frozenset[int]:
    """Return the PIDs of our daemons on a GPU or its MIG devices that nobody uses, with their servers' PIDs.

    They hold an instance, but `daemon_steps_before` stops them: a plan need not go round them.
    """
    pids: set[int] = set()
    for own in own_daemons(host, gpu):
        try:
            servers, clients = _servers_and_clients(host, own)
        except GpushareError:
            # It does not answer: nobody knows who uses it.
            continue
        if not clients and not own.home.live_leases() and _is_mine(own):
            pids |= {own.found.daemon.pid or 0, *servers}
    return frozenset(pids)


def own_daemons(host: Host, gpu: Gpu) -> list[OwnDaemon]:
    """Return our live daemons on a GPU and on its MIG devices."""
    devices = {device.uuid: device for device in devices_of(gpu)}
    directories = [host.run_directory, *host.shared_run_directories]
    records = (home.read() for home in homes_in(directories))
    known = any(record is not None and record.device_uuid in devices for record in records)
    if not known and not unrecorded(directories):
        # Whoever plans asks for each GPU, and the process table is long.
        return []
    found = []
    for one in find_daemons(host, [gpu], deep=False):
        device = devices.get(one.daemon.device_uuid or "")
        # One with an error is dead: it holds nothing.
        if device is not None and one.home is not None and one.record is not None and one.daemon.error is None:
            found.append(OwnDaemon(one, one.home, one.record, device))
    return found


def _servers_and_clients(host: Host, own: OwnDaemon) -> tuple[list[int], list[int]]:
    overview = own.found.control(host).overview()
    return [server.pid for server in overview.servers], [client.pid for client in overview.clients]


def _is_mine(own: OwnDaemon) -> bool:
    return os.geteuid() in {0, own.record.uid}


def refuse_used(host: Host, own: OwnDaemon, *, force: bool = False) -> None:
    """Raise unless a daemon of ours may be stopped; with ``force`` its users do not count.

    Raises:
        NoPermission: it is another user's.
        InUse: it has clients, a `gpushare run` uses it, or nobody can tell because it does not answer.
    """
    pid, title, gpu = own.found.daemon.pid, own.device.title, str(own.device.gpu.index)
    ending = f"gpushare mps stop -g {own.device.selector}"
    if not _is_mine(own):
        raise NoPermission(
            f"the MPS daemon {pid} on {title} belongs to user {own.record.uid}",
            "ask its owner, or run as root: sudo gpushare ...",
            gpu=gpu,
            code="not_your_daemon",
        )
    if force:
        return
    try:
        clients = _servers_and_clients(host, own)[1]
    except GpushareError as error:
        raise InUse(
            f"the MPS daemon {pid} on {title} does not answer: {error.message}",
            f"stop it first: {ending} --force",
            gpu=gpu,
            code="daemon_silent",
        ) from error
    if clients:
        names = ", ".join(map(str, clients[:8]))
        raise InUse(
            f"the MPS daemon {pid} on {title} has {counted(len(clients), 'client')}: {names}",
            f"wait for them: {ending} --drain 60; or force it: {ending} --force",
            gpu=gpu,
            code="daemon_clients",
        )
    leases = own.home.live_leases()
    if leases:
        raise InUse(
            f"the MPS daemon {pid} on {title} is used by gpushare run: {', '.join(map(str, leases[:8]))}",
            "wait until it ends; see: gpushare mps status",
            gpu=gpu,
            code="daemon_leased",
        )


def refuse_foreign(host: Host, gpu: Gpu, going: Collection[str]) -> None:
    """Raise InUse when a daemon that gpushare did not start serves one of these devices, or may serve it."""
    for one in find_daemons(host, [gpu], deep=False):
        daemon = one.daemon
        if daemon.ours or gpu.index not in daemon.gpu_indexes or daemon.pid is None:
            continue
        if not is_there(host, one, gpu.index):
            continue
        # Only one that names other MIG devices holds none of these.
        visible = (host.processes.environment(daemon.pid) or {}).get("CUDA_VISIBLE_DEVICES", "")
        words = [word.strip().lower() for word in visible.split(",") if word.strip()]
        elsewhere = words and all(
            word.startswith("mig-") and not any(uuid.lower().startswith(word) for uuid in going) for word in words
        )
        if elsewhere and gpu.uuid not in going:
            continue
        raise InUse(
            f"an MPS daemon that gpushare did not start serves GPU {gpu.index} ({naming(one)})",
            f"stop it: gpushare mps stop --pipe-directory {shlex.quote(daemon.pipe_directory or '')} --yes",
            gpu=str(gpu.index),
            code="foreign_daemon",
        )


def devices_of(gpu: Gpu | None) -> list[Device]:
    """Return a GPU and its MIG devices."""
    return [] if gpu is None else [Device(gpu=gpu), *(Device(gpu=gpu, mig=mig) for mig in gpu.mig_instances)]
