"""The steps of ``gpushare apply`` besides MIG changes: time-slice, names, grants, MPS daemons.

They read the host when they act, not at planning: most of them follow a MIG change.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gpushare.base.errors import GpushareError, InUse, NotFound, NotHeld, TimedOut
from gpushare.base.model import Gpu, MigInstance, TimeSlice
from gpushare.base.selection import Device
from gpushare.base.units import first_few
from gpushare.host.host import Host
from gpushare.host.program import missing_program_error
from gpushare.host.smi import set_argv
from gpushare.hostfile.diff import diff_points
from gpushare.hostfile.file import MEMORY_KEY, Entry, MpsWish
from gpushare.hostfile.live import LiveGpu, PlacedDevice
from gpushare.mig.daemons import OwnDaemon, own_daemons, refuse_used, start_again, stop_daemon_on, stop_unused
from gpushare.mig.grant import access_steps, binding_step, grant_commands, revoke_step
from gpushare.mig.ledger import NamedInstance, names_of
from gpushare.mps import control
from gpushare.mps.daemons import find_daemons, own_daemon
from gpushare.mps.home import (
    DaemonHome,
    DaemonRecord,
    own_home,
    pipe_users,
    restart_command,
    set_pipe_users,
    start_command,
)
from gpushare.mps.limits import Limits, check_memory
from gpushare.mps.set import plan_limits
from gpushare.mps.start import access_command, check_several_users, plan_start
from gpushare.plan import Step, carry_out, deferred_step
from gpushare.timeslice.policy import plan_level


def check_levels_known(host: Host) -> None:
    """Raise if nvidia-smi is missing or hangs: then that, and not the GPU, is why no time-slice is listed.

    Raises:
        NotSupported: it is not installed.
        TimedOut: it does not answer.
    """
    try:
        host.policy.read()
    except GpushareError as error:
        if isinstance(error, TimedOut) or error.code == "program_missing":
            raise


def level_step(host: Host, gpu: Gpu, level: TimeSlice, before: TimeSlice | None) -> Step:
    """Return the step that sets a time-slice level, planned when it acts."""
    device = Device(gpu=gpu)
    return deferred_step(
        f"set the time-slice of GPU {gpu.index} to {level.title}",
        " ".join(set_argv(device.uuid, level)),
        lambda: plan_level(host, [device], level, beside_mps=True).steps,
        undo=None if before is None else " ".join(set_argv(device.uuid, before)),
    )


# -- names and grants ------------------------------------------------------------------------------


def revoke_steps(
    host: Host, live: LiveGpu, names_to_be: Sequence[NamedInstance], staying: set[tuple[str, int]]
) -> list[Step]:
    """Return the steps that revoke the grants of instances that stay and lose their name.

    ``staying`` are the places of instances: profile and first memory slice.
    """
    kept = {named.binding for named in names_to_be}
    losing = [named for named in live.names if named.place in staying and named.binding not in kept]
    return [revoke_step(host, named) for named in losing if named.users]


def naming_steps(
    host: Host, live: LiveGpu, names_to_be: Sequence[NamedInstance], to_come: Sequence[NamedInstance]
) -> list[Step]:
    """Return the step that gives a GPU exactly these names, or none.

    The instances of the names ``to_come`` do not exist yet: a name is bound before, so that a crash does not lose it.
    """
    spots_now = {named.name: named.spot for named in live.names}
    spots_to_be = {named.name: named.spot for named in names_to_be}
    if spots_now == spots_to_be:
        return []
    forgotten = [named for named in live.names if named.name not in spots_to_be]
    # Without users: grants follow when the instances exist.
    new = [replace(named, users=()) for named in names_to_be if spots_now.get(named.name) != named.spot]
    indexes = {live.gpu.uuid or "": live.gpu.index}
    return [binding_step(host, new, forgotten, indexes, to_come=[named.name for named in to_come])]


def grant_steps(
    host: Host, live: LiveGpu, names_to_be: Sequence[NamedInstance], made: set[tuple[str, int]]
) -> list[Step]:
    """Return the steps that grant named instances to exactly their users; ``made`` are the places of new instances."""
    users_now = {named.binding: named.users for named in live.names}
    steps = []
    for named in names_to_be:
        # A new instance is open to all users, and so is one whose grants the driver does not have.
        is_open = named.binding not in users_now or named.place in made or named.name in live.open
        if set(users_now.get(named.binding, ())) == set(named.users) and not (named.users and is_open):
            continue
        users = ", ".join(named.users) or "all users"
        steps.append(
            deferred_step(
                f"open '{named.name}' ({named}) to {users}",
                "\n".join(grant_commands(named.name, named.users)) or f"gpushare mig revoke {named.name}",
                lambda named=named: access_steps(host, names_of(host)[named.name], named.users),  # type: ignore[misc]
            )
        )
    return steps


def check_step(read_live: Callable[[], LiveGpu], entry: Entry, index: int) -> Step:
    """Return the step that checks a GPU at the end; if it is not as in the file, all is undone.

    ``read_live`` reads how the GPU is shared after the steps before; ``index`` is that of the GPU.
    """

    def act() -> None:
        differences = diff_points(read_live(), entry)
        if differences:
            raise NotHeld(
                f"GPU {index}: every step was carried out, but it differs from the file: {'; '.join(map(str, differences))}",
                "see: gpushare diff -f FILE; gpushare doctor",
                gpu=index,
            )

    title = f"check that GPU {index} matches the file"
    return Step(what=title, command="gpushare diff -f FILE", do=act, changes=False)


Find = Callable[[], Device]


def stop_steps(host: Host, live: LiveGpu, unwanted: set[str]) -> list[Step]:
    """Return the steps that stop our daemons on these devices (UUIDs), and clean up after dead ones. Raises as `refuse_used`."""
    running = own_daemons(host, live.gpu)
    steps = []
    for daemon in running:
        if daemon.device.uuid in unwanted:
            refuse_used(host, daemon)
            steps.append(stop_step(host, daemon))
    dead = {uuid for uuid in live.daemons if uuid in unwanted} - {daemon.device.uuid for daemon in running}
    if dead:
        for item in find_daemons(host, [live.gpu], deep=False):
            if item.daemon.device_uuid in dead:
                # On a MIG device there is no compute mode to restore.
                device = Device(gpu=live.gpu) if live.gpu.uuid == item.daemon.device_uuid else None
                steps.append(
                    Step(
                        what=f"clean up after a dead MPS daemon of GPU {live.gpu.index}",
                        command=f"gpushare mps stop -g {item.daemon.device_uuid}",
                        do=partial(stop_unused, host, item, device),
                    )
                )
    return steps


def stop_step(host: Host, daemon: OwnDaemon) -> Step:
    """Return the step that stops an unused daemon and opens its pipe directory to all users; its undo restores both."""
    users = pipe_users(daemon.home.pipe) or ()

    def act() -> None:
        stop_unused(host, daemon.found, daemon.device)
        # The next daemon at this pipe is open to all users, unless the file says otherwise.
        if users:
            set_pipe_users(daemon.home.pipe, ())

    def revert() -> None:
        if users:
            set_pipe_users(daemon.home.pipe, users)
        start_again(host, daemon.record, daemon.device)

    return Step(
        what=f"stop the idle MPS daemon {daemon.found.daemon.pid} of {daemon.device.title}",
        command=f"gpushare mps stop -g {daemon.device.selector}",
        undo=restart_command(daemon.record, daemon.device),
        do=act,
        revert=revert,
    )


def daemon_step(
    host: Host,
    title: str,
    find: Find,
    wish: MpsWish,
    *,
    selector: str,
    uuid: str | None = None,
    runs: tuple[DaemonHome, DaemonRecord] | None = None,
) -> Step:
    """Return the step that starts a daemon with these limits and users on a device, or changes ours that ``runs`` there.

    ``title`` names the device in the text, ``selector`` and ``uuid`` (None: it does not exist yet) in the printed
    commands; ``find`` finds it when the step runs.
    """
    work = _DaemonWork(host, find, wish)
    if runs is not None:
        home, record = runs
        before = MpsWish(limits=record.limits.explicit, users=pipe_users(home.pipe) or ())
        after = replace(wish, limits=wish.limits.explicit)
        return Step(
            what=f"change the MPS daemon of {title}: {', '.join(after.words)}",
            command=_change_commands(selector, home, before, after),
            # It gives the daemon back its own limits and users.
            undo=_change_commands(selector, home, after, before),
            do=work.do,
            revert=work.undo,
        )
    words = wish.words
    commands = [
        start_command(selector, wish.limits, exclusive=wish.exclusive, users=wish.users if wish.multiuser else None)
    ]
    if wish.users and not wish.multiuser and uuid is not None:
        commands.append(access_command(shlex.quote(str(own_home(host, uuid).pipe)), wish.users))
    return Step(
        what=f"serve {title} with an MPS daemon" + (f": {', '.join(words)}" if words else ""),
        command="\n".join(commands),
        undo=f"gpushare mps stop -g {selector}",
        do=work.do,
        revert=work.undo,
    )


def _change_commands(selector: str, home: DaemonHome, before: MpsWish, after: MpsWish) -> str:
    """Return the commands that change the limits and users of a running daemon; without a change the one for its limits."""
    commands = []
    if before.limits != after.limits or before.users == after.users:
        commands.append(shlex.join(["gpushare", "mps", "set", "-g", selector, *after.limits.options()]))
    if before.users != after.users:
        commands.append(access_command(shlex.quote(str(home.pipe)), after.users))
    return "\n".join(commands)


class _DaemonWork:
    """Start or change one daemon as a file says, and undo it."""

    def __init__(self, host: Host, find: Find, wish: MpsWish) -> None:
        self._host, self._find, self._wish = host, find, wish
        self._device: Device | None = None
        # What `do` has done: it started a daemon, or changed one that had these limits, and these users before.
        self._started = False
        self._limits_before: Limits | None = None
        self._users_before: tuple[str, ...] | None = None

    def do(self) -> None:
        """Set the limits and users of the daemon that runs, or start one."""
        device = self._device = self._find()
        try:
            home, record = own_daemon(self._host, device, to_change=True)
        except NotFound:
            self._start(device)
            return
        limits = self._wish.limits.explicit
        with home.locked():
            if record.limits.explicit != limits:
                self._limits_before = record.limits.explicit
            carry_out(plan_limits(self._host, device, limits))
            self._set_users(home)

    def _start(self, device: Device) -> None:
        """Start the daemon; only its users can connect from the first moment."""
        home = own_home(self._host, device.uuid)
        home.create()
        with home.locked():
            # Restricted before a client can connect. A server for several users is told of them, too.
            self._set_users(home)
            wish = self._wish
            users = wish.users if wish.multiuser else None
            carry_out(plan_start(self._host, device, wish.limits, exclusive=wish.exclusive, users=users))
            self._started = True

    def _set_users(self, home: DaemonHome) -> None:
        """Let only the wanted users enter the pipe directory, and note who might before."""
        users_now = pipe_users(home.pipe)
        if users_now is not None and users_now != self._wish.users:
            self._users_before = users_now
            set_pipe_users(home.pipe, self._wish.users)

    def undo(self) -> None:
        """Undo what `do` has done, also where an error has interrupted it."""
        device = self._device
        if device is None:
            return
        home = own_home(self._host, device.uuid)
        if self._started:
            stop_daemon_on(self._host, device)
        elif self._limits_before is not None:
            with home.locked():
                carry_out(plan_limits(self._host, device, self._limits_before))
        if self._users_before is not None:
            set_pipe_users(home.pipe, self._users_before)


def check_daemon(host: Host, device: Device, wish: MpsWish) -> None:
    """Raise before anything is changed if a device can never have such a daemon.

    Raises:
        NotSupported: the program is missing, or the driver has no server for several users.
        BadUsage: the memory limit is above the device's memory, or the path of the daemon is too long.
    """
    if host.programs.find(control.PROGRAM) is None:
        raise missing_program_error(control.PROGRAM)
    check_memory(device, wish.limits.memory_limit_bytes, key=MEMORY_KEY)
    # All UUIDs have one length, also that of an instance that does not exist yet.
    own_home(host, device.gpu.uuid or "").check_path()
    if wish.multiuser:
        check_several_users(host)


def refuse_programs(title: str, gpu: Gpu, programs: Sequence[str], *, allowed: int = 0) -> None:
    """Raise InUse if more than ``allowed`` programs are on a device that is to be shared in another way."""
    if len(programs) > allowed:
        raise InUse(
            f"{title} is in use: {first_few(programs, 4)}",
            f"wait for them: gpushare apply -f FILE --wait 600s; see: gpushare status -g {gpu.index}",
            gpu=gpu.index,
            code="gpu_in_use",
        )


def device_to_be(gpu: Gpu, placed: PlacedDevice, memory: int | None) -> Device:
    """Return a MIG device for checks: as it is, or if it does not exist yet, with the ``memory`` of its profile in bytes."""
    mig = next((mig for mig in gpu.mig_instances if mig.uuid == placed.uuid), None)
    return Device(gpu=gpu, mig=mig or MigInstance(uuid="", profile=str(placed), memory_total_bytes=memory))
