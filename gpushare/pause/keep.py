"""What the guard of a pause does: it pauses what the job creates meanwhile, and ends the pause in time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpushare.base.errors import GpushareError, NotFound
from gpushare.host.channels import Channels
from gpushare.host.host import Host
from gpushare.host.identity import uptime
from gpushare.host.slice_lock import probed_channels
from gpushare.pause.change import HELD, channel_names, resume_and_forget
from gpushare.pause.record import PAUSES, RESUMING, PausedJob, write

LOOK_SECONDS: Final = 1.0
# A process without a context of its own is scanned again after this time: a scan may take seconds.
_AGAIN_SECONDS: Final = 30.0
# Processes of a job that are looked at.
_MOST_PROCESSES: Final = 1024


def keep(host: Host, _processes: object, word: str, path: str) -> None:
    """Keep a job paused until its time is over, it is resumed, or it ends: the function that the guard process runs.

    ``word`` is what gpushare said last: `HELD` once the job is paused. Without it gpushare died before, so resume the job.
    """
    if not host.is_simulated:
        # The guard lives for long, and a working directory cannot be unmounted.
        os.chdir("/")
    keeper = Keeper(host, Path(path))
    if word == HELD:
        while (seconds := keeper.step()) is not None:
            time.sleep(seconds)
    else:
        while not keeper.try_resume():
            time.sleep(LOOK_SECONDS)


class Keeper:
    """Keeps the job of one record paused, for as long as the record names this process."""

    def __init__(self, host: Host, path: Path) -> None:
        self._host, self._path = host, path
        self._control = host.open_channels()
        self._deadline: float | None = None
        # When to scan a process again in which no channels were seen, by PID (monotonic seconds).
        self._scan_due: dict[int, float] = {}
        # Channels that are recorded and could not be disabled yet, by PID.
        self._not_off_yet: dict[int, Channels] = {}

    def step(self) -> float | None:
        """Look once; return the seconds until the next look, or None at the end of the pause."""
        job = self._own_record()
        if job is None:
            return None
        if self._deadline is None and job.until is not None:
            # From here on by a clock that cannot be set.
            self._deadline = time.monotonic() + max(0.0, job.until - uptime())
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        # RESUMING: a gpushare died while it resumed the job.
        if is_over or job.state == RESUMING or not job.lives(self._host):
            return None if self.try_resume() else LOOK_SECONDS
        # A driver or a disk that fails is tried again.
        with contextlib.suppress(GpushareError):
            self._pause_new(job)
        if self._deadline is None:
            return LOOK_SECONDS
        return max(0.0, min(LOOK_SECONDS, self._deadline - time.monotonic()))

    def _own_record(self) -> PausedJob | None:
        """Return the record of the pause; None: it is gone, or names another guard."""
        job = PAUSES.read(self._path)
        mine = job is not None and job.keeper is not None and job.keeper.pid == os.getpid()
        return job if mine else None

    def try_resume(self) -> bool:
        """Resume the job and remove its record, unless that was done already; return whether it is done."""
        try:
            with PAUSES.locked(self._host):
                # A resume that holds the lock may have removed it.
                job = self._own_record()
                if job is None:
                    return True
                if job.lives(self._host):
                    resume_and_forget(self._host, self._control, job)
                else:
                    PAUSES.forget(job.path)
        except GpushareError:
            return False
        return True

    def _pause_new(self, job: PausedJob) -> None:
        """Pause channels and processes that the job has created since the last look, and those that could not be paused."""
        living = {process.pid: process for process in job.living(self._host)}
        to_pause = {pid: process for pid, process in self._not_off_yet.items() if pid in living}
        for pid, process in living.items():
            with contextlib.suppress(NotFound):
                present = self._control.find_again(process)
                if channel_names(present) - channel_names(process):
                    to_pause[pid] = present
        to_pause |= {process.pid: process for process in self._new_processes(job.pid, living)}
        if to_pause:
            self._record_and_disable(to_pause)

    def _new_processes(self, first_pid: int, recorded: Container[int]) -> Iterator[Channels]:
        """Yield the channels of descendants of the job's first process that have some and are not recorded."""
        now = time.monotonic()
        for pid in list(self._host.processes.descendants(first_pid))[:_MOST_PROCESSES]:
            if pid not in recorded and self._scan_due.get(pid, 0.0) <= now:
                self._scan_due[pid] = now + _AGAIN_SECONDS
                with contextlib.suppress(NotFound):
                    channels = probed_channels(self._host, self._control, pid)
                    # To take the channels of an MPS client off would stop all clients of its server.
                    if not channels.under_mps:
                        yield channels

    def _record_and_disable(self, to_pause: dict[int, Channels]) -> None:
        """Write the channels of these processes, by PID, into the record, and take them off the GPU."""
        with PAUSES.locked(self._host):
            job = self._own_record()
            if job is None or job.state == RESUMING:
                return
            of_others = tuple(process for process in job.channels if process.pid not in to_pause)
            write(replace(job, channels=(*of_others, *to_pause.values())))
            self._not_off_yet = dict(to_pause)
            for pid, process in to_pause.items():
                self._control.disable(process)
                del self._not_off_yet[pid]
