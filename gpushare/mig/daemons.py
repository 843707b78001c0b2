"""Stop our MPS daemons before a MIG change, and restart them after it.

An MPS daemon holds its instance even without clients (NVML_ERROR_IN_USE). Ours are stopped first, and started again
with their limits if the change is undone. Daemons of others are never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gpushare.base.errors import GpushareError, InUse, NotFound
from gpushare.base.model import Gpu, MigInstance
from gpushare.base.selection import Device
from gpushare.base.units import first_few
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.mps.control import control_command, not_your_daemon_error
from gpushare.mps.daemons import FoundDaemon, find_daemons, foreign_daemon_error, live_pid
from gpushare.mps.home import (
    RUNNING,
    DaemonHome,
    DaemonRecord,
    has_unrecorded_daemon,
    homes_in,
    own_home,
    restart_command,
)
from gpushare.mps.start import plan_start
from gpushare.mps.stop import Stop
from gpushare.plan import Loss, Step, carry_out


@dataclass(frozen=True)
class OwnDaemon:
    """A live daemon of gpushare and its device."""

    found: FoundDaemon
    home: DaemonHome
    record: DaemonRecord
    device: Device


def idle_daemon_pids(host: Host, gpu: Gpu) -> frozenset[int]:
    """Return the PIDs of our unused daemons on a GPU or its MIG devices, and of their servers.

    They hold an instance, but `daemon_steps_before` stops them, so a plan may destroy it.
    """
    pids: set[int] = set()
    for own in own_daemons(host, gpu):
        try:
            overview = own.found.control(host).overview()
        except GpushareError:
            # It does not answer, so it may be in use.
            continue
        # None: unknown.
        if not overview.clients and own.home.live_leases() == [] and _may_stop(host, own):
            pids |= {own.found.daemon.pid or 0, *(server.pid for server in overview.servers)}
    return frozenset(pids)


def own_daemons(host: Host, gpu: Gpu) -> list[OwnDaemon]:
    """Return our live daemons on a GPU and on its MIG devices."""
    devices = {device.uuid: device for device in devices_of(gpu)}
    directories = host.run_directories
    records = (home.read() for home in homes_in(directories))
    recorded = any(record is not None and record.device_uuid in devices for record in records)
    # The process table is long, and this is asked for each GPU: it is read only if there can be a daemon.
    if not recorded and not has_unrecorded_daemon(directories):
        return []
    owned = []
    for item in find_daemons(host, [gpu], deep=False):
        device = devices.get(item.daemon.device_uuid or "")
        # A daemon with an error is dead and holds nothing.
        if device is not None and item.home is not None and item.record is not None and item.daemon.error is None:
            owned.append(OwnDaemon(item, item.home, item.record, device))
    return owned


def stop_daemon_on(host: Host, device: Device) -> None:
    """Stop our daemon on a device, if one runs: the undo of a start."""
    for own in own_daemons(host, device.gpu):
        if own.device.uuid == device.uuid:
            stop_unused(host, own.found, own.device)


def stop_unused(host: Host, found: FoundDaemon, device: Device | None) -> None:
    """Stop a daemon without clients, or clean up after a dead one. Raises as `Stop.run`."""
    Stop(host, found, device, drain_seconds=0.0, force=False).run()


def _may_stop(host: Host, own: OwnDaemon) -> bool:
    """Return whether this user may stop a daemon: its own, or as root any."""
    return host.root or own.record.uid == host.uid


def refuse_used(host: Host, own: OwnDaemon, *, force: bool = False) -> None:
    """Raise unless a daemon of gpushare may be stopped; with ``force`` even if it is in use."""
    pid = own.found.daemon.pid
    title = own.device.title
    gpu = str(own.device.gpu.index)
    ending = f"gpushare mps stop -g {own.device.selector}"
    if not _may_stop(host, own):
        raise not_your_daemon_error(f"the MPS daemon {pid} on {title}", f"user {user_name(own.record.uid)}", gpu)
    if force:
        return
    try:
        clients = [client.pid for client in own.found.control(host).overview().clients]
    except GpushareError as error:
        raise InUse(
            f"the MPS daemon {pid} on {title} does not answer: {error.message}",
            f"stop it first: {ending} --force",
            gpu=gpu,
            code="daemon_silent",
        ) from error
    leases = own.home.live_leases()
    if clients or leases != []:
        users, way = (
            f"has clients: {first_few(clients)}",
            f"wait up to a minute for them, then end them: {ending} --drain 60s",
        )
        if not clients:
            users, way = "may be used by gpushare run: its leases cannot be read", "wait until it ends: gpushare jobs"
            if leases:
                users = f"is used by gpushare run: {first_few(leases)}"
        hint = f"{way}; or {'end them' if clients else 'stop the daemon'} now: {ending} --force"
        raise InUse(f"the MPS daemon {pid} on {title} {users}", hint, gpu=gpu, code="daemon_clients")


def refuse_foreign(host: Host, gpu: Gpu, lost_uuids: Collection[str]) -> None:
    """Raise InUse if a daemon that gpushare did not start may serve one of these devices, of this GPU."""
    for item in find_daemons(host, [gpu], deep=False):
        daemon = item.daemon
        if daemon.ours or daemon.pid is None or not item.serves(host, gpu.index):
            continue
        if gpu.uuid in lost_uuids or _may_see(host, daemon.pid, lost_uuids):
            raise foreign_daemon_error(item, f"GPU {gpu.index}", gpu)


def _may_see(host: Host, pid: int, uuids: Collection[str]) -> bool:
    """Return whether a daemon may serve one of these MIG devices: False if its environment names only other MIG devices."""
    visible = (host.processes.environment(pid) or {}).get("CUDA_VISIBLE_DEVICES", "")
    words = [word.strip().lower() for word in visible.split(",") if word.strip()]
    # CUDA takes the beginning of a UUID for the UUID.
    return not words or any(
        not word.startswith("mig-") or any(uuid.lower().startswith(word) for uuid in uuids) for word in words
    )


def devices_of(gpu: Gpu) -> list[Device]:
    return [Device(gpu=gpu), *(Device(gpu=gpu, mig=mig) for mig in gpu.mig_instances)]


def daemon_steps_before(
    host: Host, gpu: Gpu, lost_uuids: Collection[str], *, evicted: Collection[str] = ()
) -> tuple[Step, ...]:
    """Return the steps that stop our idle MPS daemons on the devices that a MIG change takes away.

    These are, by UUID, the MIG devices that it destroys, and the GPU itself when it switches MIG on. Our daemons on
    ``evicted`` ones are stopped by force: their clients lose their contexts. The daemons stay stopped: a plan never creates
    a device again that it destroys.
    """
    if not lost_uuids:
        return ()
    refuse_foreign(host, gpu, lost_uuids)
    steps = []
    for own in _own_daemons_on(host, gpu, lost_uuids):
        force = own.device.uuid in evicted
        refuse_used(host, own, force=force)
        steps.append(_stop_step(host, own, force=force))
    return tuple(steps)


def _own_daemons_on(host: Host, gpu: Gpu, uuids: Collection[str]) -> list[OwnDaemon]:
    return [own for own in own_daemons(host, gpu) if own.device.uuid in uuids] if uuids else []


def daemons_of_others(host: Host, gpu: Gpu, lost_uuids: Collection[str]) -> tuple[Loss, ...]:
    """Return the losses of other users, who started a daemon of gpushare on a lost device; only root may stop it."""
    return tuple(
        Loss(
            action="stops",
            what=f"the MPS daemon {own.found.daemon.pid} of {own.device.title}",
            why=(f"started by {user_name(own.record.uid)}",),
        )
        for own in _own_daemons_on(host, gpu, lost_uuids)
        if own.record.uid != host.uid
    )


def daemon_steps_after(host: Host, stayed: Collection[Device]) -> tuple[Step, ...]:
    """Return the steps that start our dead daemons again with their limits, on devices that a change leaves alone.

    Called at planning. A daemon that `gpushare run` started for itself is not started again.
    """
    records = [(device, _record_of_dead(host, device.uuid)) for device in stayed]
    return tuple(_start_step(host, record, device) for device, record in records if record is not None)


def stopped_records(host: Host, gpu: Gpu, lost_uuids: Collection[str]) -> tuple[DaemonRecord, ...]:
    """Return the records of this user's permanent daemons that a change stops, for `recover_daemons`."""
    records = []
    for own in _own_daemons_on(host, gpu, lost_uuids):
        if own.record.uid == host.uid and not own.record.transient:
            profile = None if own.device.mig is None else own.device.mig.profile
            # Its clients end with it.
            records.append(replace(own.record, state=RUNNING, attached=(), profile=profile))
    return tuple(records)


def recover_daemons(host: Host, gpu: Gpu, records: Sequence[DaemonRecord]) -> tuple[str, ...]:
    """Start the daemons that an interrupted change had stopped, if their device is back; return what was done, in words.

    A daemon that does not start is reported, not raised: recovery is about the layout.
    """
    done = []
    for record in records:
        device = next((device for device in devices_of(gpu) if device.uuid == record.device_uuid), None)
        if device is None or (device.mig is None and gpu.mig_enabled):
            # With MIG on, no daemon serves the GPU itself.
            continue
        served = device
        if device.mig is not None:
            # Another instance may have its UUID now: `start_again` refuses one of another profile.
            served = replace(device, mig=MigInstance(uuid=device.uuid, profile=record.profile))
        try:
            started = start_again(host, record, served)
        except GpushareError as error:
            done.append(f"the MPS daemon of {device.title} was not started again: {error.message}")
        else:
            if started:
                done.append(f"started the MPS daemon of {device.title} again")
    return tuple(done)


def start_again(host: Host, record: DaemonRecord, device: Device) -> bool:
    """Start a daemon with the limits of a record, unless it is running; return whether it was started.

    Raises:
        NotFound: its device is not there.
        GpushareError: it does not start, see `plan_start`.
    """
    now = _device_now(host, device)
    home = own_home(host, now.uuid)
    running = home.read()
    is_of_device = running is not None and running.device_uuid == now.uuid and not running.interrupted
    if running is not None and is_of_device and live_pid(host, home, running) is not None:
        return False
    # MIG has no exclusive compute mode.
    exclusive = record.previous_compute_mode is not None and now.mig is None
    with home.locked():
        carry_out(plan_start(host, now, record.limits, exclusive=exclusive, users=record.users))
    return True


def _stop_step(host: Host, own: OwnDaemon, *, force: bool) -> Step:
    """Return the step that stops our daemon before a change of MIG; undone, a permanent one runs again."""

    def back() -> None:
        if not own.record.transient:
            start_again(host, own.record, own.device)

    what = f"stop the {'MPS daemon' if force else 'idle MPS daemon'} {own.found.daemon.pid} of {own.device.title}"
    if force:
        what += ", and end its servers"
    if not own.record.transient:
        what += "; it stays stopped"
    return Step(
        what=what,
        command=control_command(own.home.pipe, "quit -t 1" if force else "quit"),
        undo=restart_command(own.record, own.device),
        do=Stop(host, own.found, own.device, drain_seconds=0.0, force=force).run,
        revert=back,
    )


def _record_of_dead(host: Host, uuid: str) -> DaemonRecord | None:
    """Return the record of our permanent daemon on a device, if it has died."""
    home = own_home(host, uuid)
    record = home.read()
    if record is None or record.device_uuid != uuid or record.transient:
        return None
    return record if live_pid(host, home, record) is None else None


def _start_step(host: Host, record: DaemonRecord, device: Device) -> Step:
    """Return the step that starts a daemon again with its limits; undone, it is stopped."""
    return Step(
        what=f"start the MPS daemon of {device.title} again, with its limits",
        command=restart_command(record, device),
        undo=f"gpushare mps stop -g {device.selector}",
        do=lambda: start_again(host, record, device),
        revert=lambda: stop_daemon_on(host, _device_now(host, device)),
    )


def _device_now(host: Host, device: Device) -> Device:
    """Return a device as it is now. Raises NotFound if it is not there.

    Its UUID alone is no proof: an instance of another size at the same place may get it.
    """
    host.nvml.restart()
    before = device.mig
    for gpu in host.nvml.identities():
        if gpu.uuid != device.gpu.uuid:
            continue
        if before is None:
            return Device(gpu=gpu)
        for mig in gpu.mig_instances:
            if mig.uuid == before.uuid and before.profile in {None, mig.profile}:
                return Device(gpu=gpu, mig=mig)
    raise NotFound(
        f"{device.title} ({device.uuid}) is not there, so its MPS daemon is not started again",
        "see the current layout: gpushare mig status",
        gpu=device.gpu.index,
        code="device_gone",
    )
