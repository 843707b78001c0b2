"""Opportunistic jobs with slices: all in one MPS daemon, whose server has one time-slice; production runs outside MPS.

Next to a production job with gaps, several other jobs with a slice each starve each other. The clients of one MPS server
share its compute channel group, so that they take one slice of the turn together. On an H100 (driver 580.159.04; a request
of 5.6 ms at half load with a slice of 16 ms, next to two trainings): both in one daemon with 200 us 1.20x p99 with .48 in
sum; each outside with 500 us 1.33x with .35; as it is 3.77x with .64.

Only the server of this user's own daemon is touched, never the slice of a client. A server has no group before its first
client, and a new one after a restart.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from gpushare.base.errors import GpushareError, InUse, NotFound, NotSupported, TimedOut, error_of
from gpushare.base.units import format_percent, format_slice
from gpushare.host.channels import forbidding_yama_scope
from gpushare.host.host import processes_on
from gpushare.host.process import info_of
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import own_home
from gpushare.part import Part, Watch
from gpushare.run import roles
from gpushare.run.adapt import LEAST_US, MOST_US, STEP_SECONDS, Controller
from gpushare.run.jobs import living_productions, slices_of_group
from gpushare.run.numbers import Progress
from gpushare.run.pause import Pauser
from gpushare.run.plain import check_outside_mps
from gpushare.run.roles import PauseForProduction
from gpushare.run.sliced import LOOK_SECONDS, KeptSlices, is_final
from gpushare.timeslice.slices import PASSING, check_settable

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host
    from gpushare.run.production import ProductionJob
    from gpushare.run.share import Attachment


# Next to a request of 5.6 ms, two trainings: 500 us 1.12x p99 and .59 in sum, 200 us 1.09x and .59 (H200); 1.25x and .49, 1.20x and
# .48 (H100).
DEFAULT_US: Final = 200
# Production's: longer than its request, else it is cut up.
PRODUCTION_US: Final = 16_000
_FIRST_SECONDS: Final = 0.1
# Production's log, so that its numbers have a time.
_READ_SECONDS: Final = 0.1
# Of a driver that does not answer, and of one that fails; two members that set two slices at once fail, too.
_MOST_TIMEOUTS: Final = 2
_MOST_TRIES: Final = 10
_RESTORE_TRIES: Final = 3


def why_not_settable(host: Host, device: Device) -> GpushareError | None:
    """Return why the slices of a group cannot be set on this host; None: as far as can be told before, they can."""
    users_home = home = own_home(host, device.uuid)
    # Without a daemon the job will start one of its own.
    try:
        with contextlib.suppress(NotFound):
            home, _ = own_daemon(host, device)
    except GpushareError as error:
        return error
    if home.directory != users_home.directory:
        return NotSupported(
            f"the MPS daemon of {device.title} belongs to another user: only its owner and root may set the time-slice"
            " of its server",
            "run as root",
            code="not_your_daemon",
        )
    scope = None if host.is_simulated else forbidding_yama_scope()
    if scope is not None:
        return NotSupported(
            f"Yama forbids access to the MPS server (kernel.yama.ptrace_scope is {scope})",
            "run as root; with 3 even root may not",
            code="ptrace_scope",
        )
    return error_of(lambda: check_settable(host))


def production_under_mps_error(title: str, name: str | None) -> InUse:
    """Return the error about production that a time-slice of the opportunistic jobs cannot protect."""
    return InUse(
        f"{title} runs under MPS, where all clients share one time-slice",
        f"use caps: --yield caps; or start it outside MPS: gpushare run --production {name or 'NAME'} -- CMD",
        code="production_under_mps",
    )


def check_production_outside(host: Host, device: Device) -> None:
    """Raise InUse while a production job is in the MPS daemon of a device, whose one time-slice it would share."""
    for job in living_productions(host, device):
        if roles.is_under_mps(host, device, job.pid):
            raise production_under_mps_error(f"'{job.name}'", job.name)


def check_slice_free(host: Host, device: Device) -> None:
    """Raise unless the one slice of the opportunistic jobs of a device can be set here, and none of them runs now."""
    check_outside_mps(device)
    refused = why_not_settable(host, device)
    if refused is not None:
        raise refused
    check_production_outside(host, device)
    if slices_of_group(host, device):
        raise InUse(
            f"other opportunistic jobs share the time-slice of the MPS server of {device.title}",
            "wait until they have ended: gpushare status",
            gpu=str(device.gpu.index),
        )


@dataclass
class GroupSlice(Part):
    """The one time-slice of the opportunistic jobs of a device: of the server of their MPS daemon, kept while each runs.

    If it cannot be set, the program is paused while production works: ``instead`` does so.
    """

    host: Host
    device: Device
    slice_us: int = DEFAULT_US
    # The production job, for people.
    title: str = "production"
    # The part of its speed that production keeps, by an `AdaptedSlice`: the slice changes all the time.
    keep: float | None = None
    instead: PauseForProduction | None = None
    _slices: KeptSlices = field(init=False)
    _wanted_us: int = field(init=False)
    _watch: Attachment = field(init=False)
    # The program is paused while production works, or not slowed: the slice cannot be set.
    gave_up: bool = False
    _tries: int = 0
    due: float = 0.0
    _told: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slices = KeptSlices(self.host, fixed=True)

    @property
    def where(self) -> str:
        """Return the slice of the program's server, for a step of a plan."""
        if self.keep is None:
            return f", whose server has a time-slice of {format_slice(self.slice_us)}"
        return f", whose server has a time-slice by which {self.title} keeps {100 * self.keep:g} %"

    def check(self) -> None:
        check_production_outside(self.host, self.device)

    def started(self, watch: Watch) -> None:
        """Become a member of the group: the shortest slice that a member wants is set."""
        # A job with this part is always in a share under MPS.
        self._watch = cast("Attachment", watch)
        self.set_wanted(self.slice_us if self.keep is None else LEAST_US)

    def poll(self) -> bool:
        """Set the slice of the program's server, if the server is new or has another one; return whether the job is to end."""
        watch = self._watch
        if not self.gave_up:
            if self._has_new_process(watch):
                watch.poll()
            self._apply_slice(watch)
        if self.gave_up:
            is_to_end = self.instead is not None and self.instead.poll()
            self.due = math.inf if self.instead is None else self.instead.due
            return is_to_end
        is_unproved = watch.attached and not self._slices.proved
        self.due = time.monotonic() + min(watch.poll_interval(), _FIRST_SECONDS if is_unproved else LOOK_SECONDS)
        return False

    def _has_new_process(self, watch: Attachment) -> bool:
        """Return whether NVML lists a process of the program that no poll of the watch has placed yet: it may be a new client."""
        listed = {process.pid for process in processes_on(self.host, self.device.gpu.index) or ()}
        on_gpu = listed.intersection(self.host.processes.descendants(watch.program_pid))
        return not on_gpu <= {*watch.attached, *watch.outside}

    def set_wanted(self, microseconds: int) -> None:
        """Want this slice for the group from now on; the record of the job tells the other members."""
        self._wanted_us = self._watch.slice_us = microseconds

    def _slices_of_others(self) -> list[int]:
        """Return the slices that the other members want."""
        pid = self._watch.program_pid
        return [slice_us for other, slice_us in slices_of_group(self.host, self.device).items() if other != pid]

    def _apply_slice(self, watch: Attachment) -> None:
        """Set the slice of the program's servers where it is another one: the shortest that a member wants."""
        servers = watch.servers()
        if not servers:
            return
        slice_us = min([self._wanted_us, *self._slices_of_others()])
        try:
            changed = self._slices.apply(servers, slice_us)
        except GpushareError as error:
            self._tries += 1
            most_tries = _MOST_TIMEOUTS if isinstance(error, TimedOut) else _MOST_TRIES
            is_hopeless = is_final(error) or self._tries >= most_tries
            if is_hopeless and error.code not in PASSING:
                self._give_up(watch, error)
            return
        self._tries = 0
        for pid in changed:
            # An adapted slice changes all the time: told once for each server.
            if self.keep is not None and pid in self._told:
                continue
            self._told.add(pid)
            watch.news.append(
                f"the opportunistic jobs of {self.device.title} share a time-slice of {format_slice(slice_us)}"
                f" (MPS server {pid}, read back)"
            )

    def _give_up(self, watch: Attachment, error: GpushareError) -> None:
        """Leave the slice alone from now on, tell the user, and pause the program while production works instead."""
        self.gave_up = True
        consequence = "this job is not slowed"
        if self.instead is not None:
            self.instead.started(watch)
            consequence = "this job is paused while production works"
        watch.troubles.append(f"the time-slice of the MPS server cannot be set: {error.message}; {consequence}")

    def _restore(self, watch: Attachment) -> None:
        """Give a server that goes on without members the slice that it had before; tell the user if that fails."""
        if self._slices_of_others():
            return
        reason = ""
        for tries_left in reversed(range(_RESTORE_TRIES)):
            error = error_of(self._slices.restore)
            # With such a code the server has ended.
            if error is None or error.code in PASSING:
                return
            reason = error.message
            if tries_left:
                time.sleep(_FIRST_SECONDS)
        servers = " ".join(sorted({str(pid) for pid in watch.attached.values() if pid is not None}))
        watch.troubles.append(
            f"the time-slice of the MPS server cannot be restored: {reason}; gpushare timeslice reset {servers}"
        )

    def release(self) -> Mapping[int, int]:
        """Let the program continue if it is paused, so that it can end; it has no strays."""
        if self.gave_up and self.instead is not None:
            self.instead.release()
        return {}

    def settle(self) -> None:
        """Give the server its slice back after the last member."""
        self._restore(self._watch)
        self._slices.close()
        if self.gave_up and self.instead is not None:
            self.instead.settle()


@dataclass
class AdaptedSlice(Part):
    """Lets the slice of an opportunistic job follow production's speed, of which it keeps a part; see `Controller`.

    For a baseline the program is stopped (SIGSTOP), and the group has the least slice.
    """

    group: GroupSlice
    production: ProductionJob
    keep: float
    pauser: Pauser | None = None
    _watch: Watch = field(init=False)
    _progress: Progress | None = None
    _controller: Controller | None = None
    _pid: int | None = None
    _seen: list[tuple[float, float]] = field(default_factory=list)
    due: float = 0.0
    _step_due: float = 0.0
    _held: bool = False
    _released: bool = False
    _told: set[str] = field(default_factory=set)

    def started(self, watch: Watch) -> None:
        """Note the program, and make what stops it for baselines (`Pauser`)."""
        self._watch = watch
        if self.pauser is None:
            self.pauser = Pauser(watch.host, watch.gpus, watch.program_pid)
        self.pauser.tell = watch.tell

    def poll(self) -> bool:
        """Read production's numbers, and once a second adapt the slice; return False, as the program need not end."""
        at = time.monotonic()
        self.due = at + _READ_SECONDS
        if self.group.gave_up:
            self._set_held(held=False)
            self.due = math.inf
            return False
        self._read_progress(at)
        if at >= self._step_due and not self._released:
            self._step_due = at + STEP_SECONDS
            self._adapt(at)
        return False

    def _read_progress(self, at: float) -> None:
        """Read the numbers that production has printed since the last call; if its log cannot be read, say so once."""
        if self._progress is None:
            return
        try:
            self._seen += [(at, speed) for speed in self._progress.read_speeds()]
        except TimedOut as error:
            self._say_once("pattern", f"{error.message}: the time-slice stays at {format_slice(LEAST_US)}")
            self._progress.close()
            self._progress = None
        except GpushareError as error:
            self._say_once("log", f"{error.message}: the time-slice is {format_slice(LEAST_US)} until it can be read")

    def _adapt(self, at: float) -> None:
        """Choose the slice by what production has printed; without a production job the slice is the longest."""
        if not self.production.lives():
            # There is no production to be spared.
            self._forget_progress()
            self._set_held(held=False)
            self.group.set_wanted(MOST_US)
            return
        if self._pid != self.production.pid:
            self._follow_production()
        if self._controller is None:
            return
        setting = self._controller.step(at, self._seen)
        self._seen = []
        # A program that is not on the GPU yet costs production nothing there.
        self._set_held(held=setting.held and bool(self._watch.attached))
        self.group.set_wanted(LEAST_US if setting.held else setting.slice_us)
        if self._controller.out_of_reach:
            self._say_once(
                "reach",
                f"even a time-slice of {format_slice(LEAST_US)} costs {self.production.title} more than {100 * (1 - self.keep):g} %:"
                " this job is held back, and tried again from time to time",
            )

    def _follow_production(self) -> None:
        """Read the log of production as it runs now, with a new controller; without a log the slice is the least."""
        self._forget_progress()
        rate = self.production.rate()
        self._pid = self.production.pid
        if rate is None:
            # No number will come that would let a stopped program continue.
            self._set_held(held=False)
            self.group.set_wanted(LEAST_US)
            self._say_once(
                "source", f"{self.production.title} was started again without --metric: the slice is the least"
            )
            return
        # Whose file its log may be: root's, ours, or its own user's.
        owners = {0, os.geteuid()}
        uid = info_of(self.group.host.processes, self.production.pid).uid
        if uid is not None:
            owners.add(uid)
        self._controller = Controller(self.keep)
        self._progress = Progress(Path(rate.log), rate.metric, owners, rate.higher_is_better)

    def _forget_progress(self) -> None:
        """Close production's log, and forget what was learnt from it."""
        if self._progress is not None:
            self._progress.close()
        self._progress = None
        self._controller = None
        self._pid = None
        self._seen = []

    def _set_held(self, *, held: bool) -> None:
        """Stop the program (SIGSTOP), or let it continue."""
        if self.pauser is not None and held:
            self.pauser.pause()
        elif self.pauser is not None and self._held:
            self.pauser.resume()
        self._held = held

    def _say_once(self, about: str, text: str) -> None:
        """Tell the user of a trouble, once for each kind of it (``about``)."""
        if about not in self._told:
            self._told.add(about)
            self._watch.troubles.append(text)

    def release(self) -> Mapping[int, int]:
        """Let the program continue for good, so that it can end; it has no strays."""
        self._released = True
        if self.pauser is not None:
            self.pauser.resume()
        return {}

    def settle(self) -> None:
        """Let what the program has left behind continue, and say how much of its speed production kept."""
        self.release()
        if self._controller is not None and self._controller.kept is not None:
            percent = min(100.0, round(100 * self._controller.kept, 1))
            self._watch.news.append(
                f"{self.production.title} kept {format_percent(percent)} of its speed in the last minute"
            )
        self._forget_progress()
