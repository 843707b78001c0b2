"""An opportunistic job that stands still while a production job works: where a thread cap cannot serve."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, cast

from gpushare.actions.pacing import DutyPacer, Pacer
from gpushare.actions.pauser import Pauser
from gpushare.actions.unseen_work import UnseenWork
from gpushare.errors import GpushareError
from gpushare.host.mps_control import is_server
from gpushare.host.pauses import Pauses, forget_pauses, note_pauses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpushare.actions.production_job import ProductionJob
    from gpushare.actions.share import Share, Watch
    from gpushare.host.activity import ActivityMeter, ActivityRecorder
    from gpushare.host.checkpoint import Checkpoint
    from gpushare.host.host import Host
    from gpushare.selection import Device

TICK_SECONDS: Final = 0.01
_ALIVE_SECONDS: Final = 1.0


@dataclass
class PausingWatch:
    """The watch over an opportunistic program: it also pauses it while production works."""

    inner: Watch
    pauser: Pauser
    production: ProductionJob
    pacer: Pacer = field(default_factory=Pacer)
    unseen: UnseenWork | None = None
    pauses: int = 0
    # Who wants to know how often it was paused and whether it is now, whenever that changes; None: it has ended.
    tell: Callable[[tuple[int, bool] | None], None] | None = None
    _told: tuple[int, bool] | None = None
    _due: float = 0.0
    _released: bool = False
    _alive: bool = True
    _alive_due: float = 0.0

    @property
    def program_pid(self) -> int:
        """Return the program's PID."""
        return self.inner.program_pid

    @property
    def attached(self) -> Collection[int]:
        """Return the processes that were seen inside."""
        return self.inner.attached

    @property
    def outside(self) -> set[int]:
        """Return the processes that were seen outside."""
        return self.inner.outside

    @property
    def pending(self) -> set[int]:
        """Return the processes that wait for another user."""
        return self.inner.pending

    @property
    def daemon_gone(self) -> bool:
        """Return whether the MPS daemon died."""
        return self.inner.daemon_gone

    def wait(self) -> float:
        """Return how many seconds may pass until the next look."""
        return TICK_SECONDS

    def look(self) -> None:
        """Pause or resume the program, and from time to time look for its processes."""
        if not self._released:
            self._pace()
        if time.monotonic() >= self._due:
            self.inner.look()
            self.pauser.look()
            self._due = time.monotonic() + self.inner.wait()

        self._say((self.pauses, self.pauser.paused))

    def _say(self, state: tuple[int, bool] | None) -> None:
        if self.tell is not None and state != self._told:
            self._told = state
            self.tell(state)

    def _pace(self) -> None:
        at = time.monotonic()
        if at >= self._alive_due:
            # Its PID may be somebody else's by now, who works; and it may have been started again.
            self._alive, self._alive_due = self.production.lives(), at + _ALIVE_SECONDS
        active = self._alive and self.production.active()
        if self._alive and self.unseen is not None:
            active = self.unseen.works(at, seen=active, still=self.pauser.paused or not self.inner.attached)
        if not active and self.pauser.paused and not self.production.lives():
            self.pauser.resume()
            return
        if self.pacer.may_run(at, active=active):
            self.pauser.resume()
            return
        before = self.pauser.paused
        self.pauser.pause()
        self.pauses += self.pauser.paused and not before

    def release(self) -> None:
        """Let the program go on for good: it is to end, and must be able to."""
        self._released = True
        self.pauser.resume()

    def settle(self) -> None:
        """Find out what can still be found out of a program that has ended."""
        # What it leaves behind (a worker in a session of its own) must not be held by a gpushare that ends.
        self.release()
        self.inner.settle()
        self._say(None)

    def clients(self) -> set[int] | None:
        """Return the processes whose sudden death breaks others."""
        return self.inner.clients()


@dataclass
class PausingShare:
    """A share whose program is paused while a production job works."""

    inner: Share
    host: Host
    production: ProductionJob
    checkpoint: Checkpoint | None
    # Under MPS, where the driver tells how busy the SMs were between two questions (GPM, Hopper and later).
    recorder: ActivityRecorder | None = None
    # Of the time while production is active; None: none of it.
    duty_percent: float | None = None

    @property
    def device(self) -> Device:
        """Return the GPU."""
        return self.inner.device

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return what the guard is told."""
        return self.inner.guarded

    @property
    def meter(self) -> ActivityMeter | None:
        """Return what measures a drained queue."""
        return self.inner.meter

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the program."""
        return self.inner.environment(base)

    def watch(self, pid: int) -> Watch:
        """Return the watch over the program."""
        watch = PausingWatch(
            self.inner.watch(pid),
            Pauser(self.host, self.device, pid, self.checkpoint),
            self.production,
            Pacer() if self.duty_percent is None else DutyPacer(percent=self.duty_percent),
            unseen=self._unseen(pid),
            tell=self._teller(pid),
        )
        # Its facts are the inner watch's, and only read here.
        return cast("Watch", watch)

    def _unseen(self, pid: int) -> UnseenWork | None:
        """Return what tells of work under MPS that its CPU does not show; None where nothing can."""
        if self.recorder is None:
            return None
        return UnseenWork(self.recorder.since_last, lambda: self._alone(pid))

    def _alone(self, pid: int) -> bool:
        """Return whether nobody is on the device but production, the program with this PID, and MPS servers."""
        processes = self.host.processes
        if processes.namespace_is_host() is False:
            return False
        try:
            found = self.host.nvml.processes(self.device.gpu.index)
        except GpushareError:
            return False
        known = {*processes.descendants(pid), *processes.descendants(self.production.pid)}
        mig = self.device.mig
        instances = {None, None if mig is None else mig.gpu_instance_id}
        others = [
            one.pid for one in found or () if one.pid not in known and (mig is None or one.gpu_instance_id in instances)
        ]
        infos = [processes.describe(other) for other in others]
        return found is not None and all(info is None or is_server(info.name) for info in infos)

    def _teller(self, pid: int) -> Callable[[tuple[int, bool] | None], None]:
        """Return what notes the pauses of a program for the metrics."""
        info = self.host.processes.describe(pid)
        first = Pauses(
            pid=pid, started_at=None if info is None else info.started_at, gpu_uuid=self.device.gpu.uuid or ""
        )

        def tell(state: tuple[int, bool] | None) -> None:
            if state is None:
                forget_pauses(self.host, pid)
            else:
                note_pauses(self.host, replace(first, pauses=state[0], paused=state[1]))

        return tell

    def close(self, *, program_lives: bool = False) -> bool:
        """Give the share back."""
        return self.inner.close(program_lives=program_lives)
