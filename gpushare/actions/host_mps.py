"""The MPS daemons of ``gpushare apply``: stopped when idle, started or changed on a device that is found when acting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.actions.mig_after import start_again, start_command
from gpushare.actions.mig_daemons import OwnDaemon, own_daemons, refuse_used
from gpushare.actions.mps_device import own_daemon
from gpushare.actions.mps_limits import MpsLimits, check_memory, plan_set
from gpushare.actions.mps_start import plan_start
from gpushare.actions.mps_stop import stop
from gpushare.actions.plan import Step, carry_out
from gpushare.errors import InUse, NotFound
from gpushare.host import mps_control
from gpushare.host.mps import FoundDaemon, find_daemons
from gpushare.host.mps_access import let_in, pipe_users
from gpushare.host.mps_home import DaemonHome, DaemonRecord, home_of
from gpushare.host.program import missing_program
from gpushare.layout.hostfile import MpsWish
from gpushare.model import MigInstance, Priority
from gpushare.selection import Device
from gpushare.units import mps_memory

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.layout.live import LiveGpu
    from gpushare.layout.seats import Device as Seated
    from gpushare.model import Gpu

Find = Callable[[], Device]


def stop_steps(host: Host, live: LiveGpu, unwanted: set[str]) -> list[Step]:
    """Return the steps that stop our idle daemons on these devices, and clear away what dead ones left.

    Raises:
        InUse: one has clients, is used by a `gpushare run`, or does not answer.
        NoPermission: one is another user's.
    """
    steps = []
    for own in own_daemons(host, live.gpu):
        if own.device.uuid in unwanted:
            refuse_used(host, own)
            steps.append(_stop_step(host, own))
    running = {own.device.uuid for own in own_daemons(host, live.gpu)}
    dead = [uuid for uuid in live.daemons if uuid in unwanted - running]
    for found in find_daemons(host, [live.gpu], deep=False) if dead else ():
        if found.daemon.device_uuid in dead:
            steps.append(_clear_step(host, found, live.gpu))
    return steps


def _stop_step(host: Host, own: OwnDaemon) -> Step:
    users = pipe_users(own.home.pipe) or ()

    def act() -> None:
        stop(host, own.found, own.device, drain_seconds=0.0, force=False)
        # The next daemon here is everybody's again, unless its file says otherwise.
        if users:
            let_in(own.home.pipe, ())

    def back() -> None:
        if users:
            let_in(own.home.pipe, users)
        start_again(host, own.record, own.device)

    return Step(
        what=f"stop the idle MPS daemon {own.found.daemon.pid} of {own.device.title}",
        command=f"gpushare mps stop -g {own.device.selector}",
        undo=start_command(own.record, own.device),
        do=act,
        revert=back,
    )


def _clear_step(host: Host, found: FoundDaemon, gpu: Gpu) -> Step:
    device = Device(gpu=gpu) if gpu.uuid == found.daemon.device_uuid else None
    return Step(
        what=f"clear away what a dead MPS daemon of GPU {gpu.index} left",
        command=f"gpushare mps stop -g {found.daemon.device_uuid}",
        do=lambda: _clear(host, found, device),
    )


def _clear(host: Host, found: FoundDaemon, device: Device | None) -> None:
    stop(host, found, device, drain_seconds=0.0, force=False)


def daemon_step(host: Host, title: str, find: Find, wish: MpsWish, *, selector: str) -> Step:
    """Return the step that gives a device a daemon with exactly these limits and users; it is left running if it has one."""
    work = _Daemon(host, find, wish)
    words = _words(wish)
    return Step(
        what=f"let an MPS daemon serve {title}" + (f": {', '.join(words)}" if words else ""),
        command=_command(wish, selector),
        undo=f"gpushare mps stop -g {selector}",
        do=work.do,
        revert=work.back,
    )


class _Daemon:
    """One daemon while it is made what a file wants."""

    def __init__(self, host: Host, find: Find, wish: MpsWish) -> None:
        self._host, self._find, self._wish = host, find, wish
        self._device: Device | None = None
        self._started = False
        self._before: DaemonRecord | None = None
        self._users: tuple[str, ...] | None = None

    def do(self) -> None:
        device = self._device = self._find()
        try:
            home, record = own_daemon(self._host, device, to_change=True)
        except NotFound:
            self._start(device)
            return
        with home.locked():
            if _limits_of(record) != _limits(self._wish):
                self._before = record
            carry_out(plan_set(self._host, device, _limits(self._wish)))
            self._let_in(home)

    def _start(self, device: Device) -> None:
        home = home_of(self._host.run_directory, device.uuid)
        home.create()
        with home.locked():
            # Closed before anybody could come.
            self._let_in(home)
            carry_out(plan_start(self._host, device, _start_limits(self._wish), exclusive=self._wish.exclusive))
            self._started = True

    def _let_in(self, home: DaemonHome) -> None:
        now = pipe_users(home.pipe)
        if now is not None and now != self._wish.users:
            self._users = now
            let_in(home.pipe, self._wish.users)

    def back(self) -> None:
        device = self._device
        if device is None:
            return
        home = home_of(self._host.run_directory, device.uuid)
        if self._started:
            found = next((one for one in own_daemons(self._host, device.gpu) if one.device.uuid == device.uuid), None)
            if found is not None:
                stop(self._host, found.found, device, drain_seconds=0.0, force=False)
        elif self._before is not None:
            with home.locked():
                carry_out(plan_set(self._host, device, _limits_of(self._before)))
        if self._users is not None:
            let_in(home.pipe, self._users)


def _limits(wish: MpsWish) -> MpsLimits:
    """Return all limits, those that are none too: what a running daemon holds is to be exactly this."""
    return MpsLimits(
        threads_percent=wish.threads_percent or 100.0,
        memory_limit_bytes=wish.memory_limit_bytes,
        no_memory_limit=wish.memory_limit_bytes is None,
        priority=wish.priority,
    )


def _limits_of(record: DaemonRecord) -> MpsLimits:
    return MpsLimits(
        threads_percent=record.threads_percent or 100.0,
        memory_limit_bytes=record.memory_limit_bytes,
        no_memory_limit=record.memory_limit_bytes is None,
        priority=Priority(record.priority or 0),
    )


def _start_limits(wish: MpsWish) -> MpsLimits:
    limits = replace(_limits(wish), no_memory_limit=False, threads_percent=wish.threads_percent)
    return replace(limits, priority=None) if wish.priority is Priority.NORMAL else limits


def check_daemon(host: Host, device: Device, wish: MpsWish, outside: Sequence[str]) -> None:
    """Raise before anything is changed when a daemon cannot be had on a device.

    Raises:
        NotSupported: the MPS program is missing.
        BadUsage: the memory limit is above the device's memory.
        InUse: programs run there outside MPS, and would stay outside.
    """
    if host.programs.find(mps_control.PROGRAM) is None:
        raise missing_program(mps_control.PROGRAM)
    check_memory(device, wish.memory_limit_bytes)
    refuse_outside(device.title, device.gpu, outside)


def refuse_outside(title: str, gpu: Gpu, outside: Sequence[str], *, may: int = 0) -> None:
    """Raise InUse when more programs than ``may`` are on a device that is to be shared in another way."""
    if len(outside) > may:
        more = f" and {len(outside) - 4} more" if len(outside) > 4 else ""
        raise InUse(
            f"{title} is in use: {', '.join(outside[:4])}{more}",
            f"wait for them: gpushare apply -f FILE --wait 600; see: gpushare status -g {gpu.index}",
            gpu=str(gpu.index),
            code="gpu_in_use",
        )


def future(gpu: Gpu, seated: Seated, memory: int | None) -> Device:
    """Return a MIG device that is, or is to be, on a GPU."""
    mig = next((one for one in gpu.mig_instances if one.uuid == seated.uuid), None)
    return Device(gpu=gpu, mig=mig or MigInstance(uuid="", profile=str(seated), memory_total_bytes=memory))


def _words(wish: MpsWish) -> list[str]:
    words = [] if wish.threads_percent is None else [f"{wish.threads_percent:g} % of the threads"]
    words += [] if wish.memory_limit_bytes is None else [mps_memory(wish.memory_limit_bytes)]
    words += [] if wish.priority is Priority.NORMAL else [f"priority {wish.priority.title}"]
    words += [f"for {', '.join(wish.users)}"] if wish.users else []
    return words + (["nothing beside it"] if wish.exclusive else [])


def _command(wish: MpsWish, selector: str) -> str:
    parts = [f"gpushare mps start -g {selector}"]
    parts += [] if wish.threads_percent is None else [f"--threads {wish.threads_percent:g}"]
    parts += [] if wish.memory_limit_bytes is None else [f"--memory {mps_memory(wish.memory_limit_bytes)}"]
    parts += [] if wish.priority is Priority.NORMAL else [f"--priority {wish.priority.title}"]
    return " ".join(parts + (["--exclusive"] if wish.exclusive else []))
