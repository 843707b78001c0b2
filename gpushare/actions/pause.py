"""An opportunistic job that stands still while a production job works: where a thread cap cannot serve.

Outside MPS it is locked by the driver (cuCheckpointProcessLock: 1 to 10 ms, new CUDA calls wait, submitted work is
drained), and stopped (SIGSTOP) where the driver knows no locks or the job has several CUDA processes, which might wait
for each other. Inside MPS it is stopped: the driver refuses the lock there. Never both: a stopped process hangs the lock.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from gpushare.actions.pacing import Pacer
from gpushare.actions.production_activity import Activity
from gpushare.errors import GpushareError, NoPermission, NotFound, NotSupported
from gpushare.host.checkpoint import Checkpoint
from gpushare.host.pauses import Pauses, forget_pauses, note_pauses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpushare.actions.share import Share, Watch
    from gpushare.host.activity import ActivityMeter
    from gpushare.host.host import Host
    from gpushare.selection import Device

TICK_SECONDS: Final = 0.01
LOCK_SECONDS: Final = 0.5
_ALIVE_SECONDS: Final = 1.0
_CUDA_NODE: Final = "/dev/nvidia-uvm"


class Pauser:
    """Lets a program's processes stand still and go on, by the driver's lock or by SIGSTOP."""

    def __init__(self, host: Host, device: Device, pid: int, checkpoint: Checkpoint | None) -> None:
        self._host, self._device, self._pid, self._checkpoint = host, device, pid, checkpoint
        self._on_gpu: list[int] = []
        self._locked: list[int] = []
        self._stopped: list[int] = []

    @property
    def paused(self) -> bool:
        """Return whether it stands still."""
        return bool(self._locked or self._stopped)

    @property
    def by(self) -> str:
        """Return how it is paused: ``lock`` or ``stop``."""
        return "stop" if self._checkpoint is None else "lock"

    def look(self) -> None:
        """Find out who would have to be locked; a pause that knows it already takes effect at once."""
        if self._checkpoint is not None and not self.paused:
            self._on_gpu = self._cuda_processes()

    def pause(self) -> None:
        """Let it stand still; a queue that does not drain in time is tried again at the next look."""
        if self.paused:
            return
        known = self._on_gpu
        if len(known) == 1:
            self._lock(known[0])
        if self._checkpoint is None:
            if not self._stopped:
                self._stop()
            return
        # Production is spared by now; whether that was all of the program is found out behind it.
        self._on_gpu = self._cuda_processes()
        if self._on_gpu and (len(known) != 1 or self._on_gpu != known):
            self.resume()
            if not self._locked:
                self._pause_anew()

    def _pause_anew(self) -> None:
        if len(self._on_gpu) > 1:
            # Locked one after the other, they may wait for each other (NCCL).
            self._checkpoint = None
            self._stop()
        else:
            self._lock(self._on_gpu[0])

    def resume(self) -> None:
        """Let it go on; what went wrong in that is tried again at the next call."""
        for pid in list(self._locked):
            with contextlib.suppress(GpushareError):
                if self._checkpoint is not None and self._host.processes.alive(pid):
                    self._checkpoint.unlock(pid)
                self._locked.remove(pid)
        for pid in list(self._stopped):
            self._stopped.remove(pid)
            with contextlib.suppress(NotFound, NoPermission):
                self._host.processes.send(pid, signal.SIGCONT)

    def _lock(self, pid: int) -> None:
        checkpoint = self._checkpoint
        info = self._host.processes.describe(pid)
        if checkpoint is None or info is None or info.stopped:
            # A stopped process hangs the lock; and it stands still already.
            return
        # Noted before it is done: what happens in between must not leave it locked.
        self._locked.append(pid)
        try:
            checkpoint.lock(pid, LOCK_SECONDS)
        except NotSupported:
            self._locked.remove(pid)
            self._checkpoint = None
            self._stop()
        except GpushareError:
            # It may have been locked in the end: unlocking one that is not does no harm.
            self.resume()

    def _stop(self) -> None:
        for pid in self._host.processes.descendants(self._pid):
            info = self._host.processes.describe(pid)
            if info is None or info.stopped:
                continue
            self._stopped.append(pid)
            with contextlib.suppress(NotFound, NoPermission):
                self._host.processes.send(pid, signal.SIGSTOP)

    def _cuda_processes(self) -> list[int]:
        family = set(self._host.processes.descendants(self._pid))
        if self._host.processes.namespace_is_host() is False:
            # NVML's PIDs are not those that we know; every CUDA context has this node open.
            return sorted(family & set(self._host.processes.open_files(_CUDA_NODE).by_pid))
        try:
            found = self._host.nvml.processes(self._device.gpu.index) or ()
        except GpushareError:
            return []
        return sorted({one.pid for one in found if one.pid in family and (one.compute or one.mps)})


@dataclass
class PausingWatch:
    """The watch over an opportunistic program: it also pauses it while production works."""

    inner: Watch
    pauser: Pauser
    activity: Activity
    production_alive: Callable[[], bool]
    pacer: Pacer = field(default_factory=Pacer)
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
        if self._alive and at >= self._alive_due:
            # Its PID may be somebody else's by now, who works.
            self._alive, self._alive_due = self.production_alive(), at + _ALIVE_SECONDS
        active = self._alive and self.activity.active()
        if not active and self.pauser.paused and not self.production_alive():
            self.pauser.resume()
            return
        if self.pacer.may_run(at, active=active):
            self.pauser.resume()
        elif not self.pauser.paused:
            self.pauser.pause()
            self.pauses += self.pauser.paused

    def release(self) -> None:
        """Let the program go on for good: it is to end, and must be able to."""
        self._released = True
        self.pauser.resume()

    def settle(self) -> None:
        """Find out what can still be found out of a program that has ended."""
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
    production_pid: int
    production_started_at: float | None
    checkpoint: Checkpoint | None

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
        started = self.production_started_at
        watch = PausingWatch(
            self.inner.watch(pid),
            Pauser(self.host, self.device, pid, self.checkpoint),
            Activity(self.host, self.device, self.production_pid),
            lambda: self.host.processes.alive(self.production_pid, started),
            tell=self._teller(pid),
        )
        # Its facts are the inner watch's, and only read here.
        return cast("Watch", watch)

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


def checkpoint_of(host: Host) -> Checkpoint | None:
    """Return the driver's lock, or None where there is none: before driver 570, and on a simulated host."""
    driver = host.nvml.driver_version() or ""
    major = driver.partition(".")[0]
    return Checkpoint() if not host.is_simulated and major.isdecimal() and int(major) >= 570 else None


def resume_all(host: Host, pids: Sequence[int], *, mps: bool, checkpoint: Any = None) -> None:
    """Let programs of a gpushare that died go on, so that they can end: unlocked, and no longer stopped."""
    lock = None if mps else checkpoint or checkpoint_of(host)
    for pid in pids:
        for member in host.processes.descendants(pid):
            # First out of the stop: a stopped process hangs the driver's calls.
            with contextlib.suppress(NotFound, NoPermission):
                host.processes.send(member, signal.SIGCONT)
            with contextlib.suppress(GpushareError):
                if lock is not None and lock.is_locked(member):
                    lock.unlock(member)
