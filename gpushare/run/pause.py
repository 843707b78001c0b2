"""Pause a program's processes and let them continue.

Outside MPS the driver locks them (cuCheckpointProcessLock: 1 to 10 ms; new CUDA calls wait, submitted work is drained).
They are stopped (SIGSTOP) where the driver has no lock, or the job has several CUDA processes, which might wait for each
other. Inside MPS they are stopped, because the driver refuses the lock there. Never both: a stopped process hangs the
lock.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import GpushareError, NoPermission, NotSupported, OperationFailed
from gpushare.host.checkpoint import Checkpoint
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.process import known, signal_known
from gpushare.host.records import read_trusted, record_from, replace_file
from gpushare.run.results import DUTY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpushare.host.host import Host
    from gpushare.selection import Device


LOCK_SECONDS: Final = 0.5
# How often a pause checks that all of the program is paused.
_KEEP_SECONDS: Final = 0.5
# Rounds of listing and stopping: a program may start another process between the two.
_STOP_ROUNDS: Final = 3
_CUDA_NODE: Final = "/dev/nvidia-uvm"


class Pauser:
    """Pauses a program's processes and lets them continue, by the driver's lock or by SIGSTOP."""

    def __init__(self, host: Host, device: Device, pid: int, checkpoint: Checkpoint | None) -> None:
        self._host, self._device, self._pid, self._checkpoint = host, device, pid, checkpoint
        self._on_gpu: list[int] = []
        self._locked: list[int] = []
        # With their start times, because PIDs are reused.
        self._stopped: dict[int, float] = {}
        self._due = 0.0
        self._told: set[tuple[int, float | None]] = set()
        # Called with PID and start time of each process before it is paused, once each.
        self.tell: Callable[[int, float | None], None] = lambda _pid, _started: None

    @property
    def paused(self) -> bool:
        """Return whether it is paused."""
        return bool(self._locked or self._stopped)

    @property
    def by(self) -> str:
        """Return how it is paused: ``lock`` or ``stop``."""
        return "stop" if self._checkpoint is None else "lock"

    def look(self) -> None:
        """Find the processes to lock, so that the next pause takes effect at once."""
        if self._checkpoint is not None and not self.paused:
            self._on_gpu = self._cuda_processes()

    def pause(self) -> None:
        """Pause all of it; call again for as long as it is to be paused.

        A queue that does not drain in time is tried again. From time to time, new processes are looked for, and those
        that others have continued (a SIGCONT of the shell, which gpushare passes on).
        """
        known = self._on_gpu
        tried = self._checkpoint is not None and not self.paused and len(known) == 1
        if tried:
            self._lock(known[0])
        elif time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _KEEP_SECONDS
        if self._checkpoint is None:
            self._stop()
            return
        # Production is spared by now; find out whether that was all of the program.
        self._on_gpu = self._cuda_processes()
        # A dead process must not count as paused for those that come after it.
        self._locked = [pid for pid in self._locked if self._host.processes.alive(pid)]
        if self._on_gpu and self._on_gpu != (known if tried else self._locked):
            self.resume()
            if not self._locked:
                self._pause_again()

    def _pause_again(self) -> None:
        if len(self._on_gpu) > 1:
            # Locked one by one, they may wait for each other (NCCL).
            self._checkpoint = None
        else:
            self._lock(self._on_gpu[0])
        if self._checkpoint is None:
            self._stop()

    def resume(self) -> None:
        """Let it continue; what fails is tried again at the next call."""
        self._due = 0.0
        for pid in list(self._locked):
            with contextlib.suppress(GpushareError):
                if self._host.processes.alive(pid):
                    self._unlock(pid)
                self._locked.remove(pid)
        for pid, started in list(self._stopped.items()):
            del self._stopped[pid]
            with contextlib.suppress(NoPermission):
                signal_known(self._host.processes, pid, started, signal.SIGCONT)

    def _unlock(self, pid: int) -> None:
        if self._checkpoint is None:
            return
        try:
            self._checkpoint.unlock(pid)
        except OperationFailed:
            # A process that has lost its context (by exec) is refused for ever, and is not locked.
            if self._checkpoint.is_locked(pid):
                raise

    def _lock(self, pid: int) -> None:
        checkpoint = self._checkpoint
        info = self._host.processes.describe(pid)
        if checkpoint is None or info is None or info.stopped:
            # A stopped process hangs the lock, and is paused already.
            return
        # Noted first: a failure in between must not leave it locked.
        self._tell_once(pid, info.started_at)
        self._locked.append(pid)
        try:
            checkpoint.lock(pid, LOCK_SECONDS)
        except NotSupported:
            self._locked.remove(pid)
            self._checkpoint = None
        except GpushareError:
            # It may have been locked after all; unlocking one that is not does no harm.
            self.resume()

    def _stop(self) -> None:
        seen: set[int] = set()
        for _ in range(_STOP_ROUNDS):
            new = [pid for pid in self._host.processes.descendants(self._pid) if pid not in seen]
            seen.update(new)
            sent = [self._stop_one(pid) for pid in new]
            # If all were stopped already, none can have started another.
            if not any(sent):
                return

    def _stop_one(self, pid: int) -> bool:
        info = self._host.processes.describe(pid)
        if info is None or info.stopped or info.started_at is None:
            return False
        self._tell_once(pid, info.started_at)
        self._stopped[pid] = info.started_at
        with contextlib.suppress(NoPermission):
            signal_known(self._host.processes, pid, info.started_at, signal.SIGSTOP)
        return True

    def _tell_once(self, pid: int, started: float | None) -> None:
        if (pid, started) not in self._told:
            self._told.add((pid, started))
            self.tell(pid, started)

    def _cuda_processes(self) -> list[int]:
        family = set(self._host.processes.descendants(self._pid))
        if self._host.processes.namespace_is_host() is False:
            # NVML's PIDs are of another namespace; every CUDA context has this node open.
            return sorted(family & set(self._host.processes.open_files(_CUDA_NODE).by_pid))
        try:
            found = self._host.nvml.processes(self._device.gpu.index) or ()
        except GpushareError:
            return []
        return sorted({one.pid for one in found if one.pid in family and (one.compute or one.mps)})


def checkpoint_of(host: Host) -> Checkpoint | None:
    """Return the driver's lock; None before driver 570 and on a simulated host."""
    driver = host.nvml.driver_version() or ""
    major = driver.partition(".")[0]
    return Checkpoint() if not host.is_simulated and major.isdecimal() and int(major) >= 570 else None


def resume_all(host: Host, pids: Sequence[int], *, mps: bool, checkpoint: Any = None) -> None:
    """Continue and unlock the programs of a gpushare that died, so that they can end."""
    members = [member for pid in pids for member in host.processes.descendants(pid)]
    # SIGCONT first: a stopped process hangs the driver's calls, and the driver may be gone.
    for member, started in known(host.processes, members).items():
        with contextlib.suppress(NoPermission):
            signal_known(host.processes, member, started, signal.SIGCONT)
    lock = None
    with contextlib.suppress(GpushareError):
        lock = None if mps else checkpoint or checkpoint_of(host)
    if lock is not None:
        for member in members:
            with contextlib.suppress(GpushareError):
                if lock.is_locked(member):
                    lock.unlock(member)


@dataclass
class Pacer:
    """All or nothing: paused from the first sign of work until production has been quiet for a while.

    ``quiet_seconds``: shorter gaps between two requests are not idleness.

    No share of the time controlled by production's loss did as well. On an H200 (driver 580; a training loop of small
    kernels, or a service with a request every 10 ms, next to large matrix multiplications; relative to each alone):

    ===============================================  ===============  =============  ==================
    what the opportunistic job gets                  production rate  its p99        opportunistic rate
    ===============================================  ===============  =============  ==================
    outside MPS: runs 20 ms, is locked for 20 ms     .70              5.5x           .45
    outside MPS: runs 20 ms, is locked for 80 ms     .85              5.6x           .20
    under MPS: runs 20 ms, is stopped for 20 ms      .47              8.9x           .68
    outside MPS: full pause (this class)             .97              1.1x           0 while it works
    under MPS: all of the time, cap 60, low priority 1.03             0.98x          .71
    ===============================================  ===============  =============  ==================
    """

    quiet_seconds: float = 0.3
    _last_active: float | None = None

    def may_run(self, at: float, *, active: bool) -> bool:
        """Return whether the opportunistic job may run at a time (seconds of a clock that only rises)."""
        if active:
            self._last_active = at
        return self._last_active is None or at - self._last_active >= self.quiet_seconds


@dataclass
class DutyPacer(Pacer):
    """Lets the opportunistic job run for a part of the time while production is active, and always while it is not.

    For jobs that compete for memory bandwidth: there production's loss is in proportion to the time, and no cap does
    better. Jobs of small kernels, and tail latencies, suffer far more; see `Pacer`.
    """

    percent: float = 100.0

    def may_run(self, at: float, *, active: bool) -> bool:
        """Return whether the opportunistic job may run at a time (seconds of a clock that only rises)."""
        return not active or at % DUTY_SECONDS >= (1 - self.percent / 100) * DUTY_SECONDS


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """An opportunistic program, how often it was paused since its start, and whether it is now."""

    pid: int
    started_at: float | None
    gpu_uuid: str
    pauses: int = 0
    paused: bool = False


def note_pauses(host: Host, found: Pauses) -> None:
    """Write the state of a program, atomically."""
    path = _directory(host.run_directory) / f"{found.pid}.json"
    with contextlib.suppress(OSError, NoPermission):
        make_private_directory(path.parent)
        replace_file(path, json.dumps(asdict(found)))


def forget_pauses(host: Host, pid: int) -> None:
    """Forget a program that has ended."""
    with contextlib.suppress(OSError):
        (_directory(host.run_directory) / f"{pid}.json").unlink()


def noted_pauses(host: Host) -> tuple[Pauses, ...]:
    """Return the living programs, by PID; those of other users are missing where this one may not look."""
    found = []
    for directory in (host.run_directory, *host.shared_run_directories):
        if not is_trusted_directory(directory, _directory(directory).name):
            continue
        with contextlib.suppress(OSError):
            found += [record_from(Pauses, read_trusted(path)) for path in _directory(directory).glob("*.json")]
    alive = [one for one in found if one is not None and host.processes.alive(one.pid, one.started_at)]
    return tuple(sorted(alive, key=lambda one: one.pid))


def _directory(run_directory: Path) -> Path:
    return run_directory / "opportunistic"
