"""Take all channels of a job off the GPU, and put them back.

A pause is recorded before the first channel goes off (`record`), and watched by a guard process (`guard`): it ends the
pause in time, and pauses what the job creates meanwhile. Nothing but the record is needed to resume a job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from gpushare.base.errors import GpushareError, InUse, NoPermission, NotFound, NotSupported, error_of, may_be_done
from gpushare.base.units import counted, pid_of, quoted
from gpushare.host.capabilities import user_name
from gpushare.host.channels import ChannelControl, Channels
from gpushare.host.guard import Guard
from gpushare.host.host import Host
from gpushare.host.identity import uptime
from gpushare.host.process import info_of
from gpushare.host.program import MPS_CONTROL
from gpushare.host.slice_lock import probed_channels
from gpushare.host.store import Job, JobProcess
from gpushare.host.users import command_as_user
from gpushare.mps.control import is_server
from gpushare.pause.record import (
    PAUSED,
    PAUSES,
    PAUSING,
    RESUMING,
    PausedJob,
    paused_job,
    paused_jobs,
    processes_paused_by_root,
    write,
)
from gpushare.plan import Loss, Plan, Step
from gpushare.signals import ending_signals_held

# gpushare's word to the guard once all channels are off, and the guard's answer when it is ready.
HELD: Final = "held"
# A job may start another process while its processes are paused one by one.
_ROUNDS: Final = 3


class ChannelsOff:
    """The channels of a job that are off the GPU, or may be: ``off``, by PID; and the control that makes the driver's calls."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # Its process starts with the first call.
        self.control = host.open_channels()
        self.off: dict[int, Channels] = {}
        # Seconds spent in the driver.
        self.seconds = 0.0

    def take_off(self, channels: Channels) -> None:
        """Take the channels of a process off the GPU. Raises NotFound: it has ended, or has other channels now; GpushareError."""
        # Noted first, for the way back: a driver that does not answer may have taken them off.
        off_before = self.off.get(channels.pid)
        self.off[channels.pid] = channels
        try:
            # Ctrl-C waits: an abandoned call could take channels off after the way back.
            with ending_signals_held():
                self.seconds += self.control.disable(channels)
        except GpushareError as error:
            if not may_be_done(error):
                del self.off[channels.pid]
                if off_before is not None:
                    self.off[channels.pid] = off_before
            raise

    def put_back(self, pid: int) -> None:
        """Put the channels of a process back on the GPU. Raises GpushareError: they may still be off."""
        enable(self.control, self.off[pid])
        del self.off[pid]

    def close(self) -> None:
        self.control.close()


class JobPause(ChannelsOff):
    """``gpushare pause``: the plan that pauses one job, and what it did. A context manager.

    ``read_processes`` returns its processes on GPUs as they are now; ``losses`` returns what other users would lose if these
    PIDs were paused. ``seconds`` is the time after which the guard resumes the job; None: it does not.
    """

    def __init__(
        self,
        host: Host,
        job: Job,
        read_processes: Callable[[], Sequence[JobProcess]],
        seconds: float | None,
        losses: Callable[[Iterable[int]], Sequence[Loss]] = lambda _: (),
    ) -> None:
        super().__init__(host)
        self._pid, self._seconds = job.pid, seconds
        self._read_processes, self._losses = read_processes, losses
        self.job = paused_job(host, job, PAUSING, until=None if seconds is None else uptime() + seconds)
        self._guard: Guard | None = None
        # The record of an earlier pause that ours replaces.
        self._earlier: PausedJob | None = None
        self.was_paused = False

    def __enter__(self) -> JobPause:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._guard is not None:
            self._guard.leave()

    def plan(self, *, begin: bool) -> Plan:
        """Return the plan; it has no steps if the job is paused already. ``begin``: the plan will be carried out.

        Raises:
            NotFound: it is not on a GPU, or has ended.
            NotSupported: it is under MPS, or its channels cannot be reached; the code says why.
            NoPermission: it belongs to another user, or root has paused it.
            InUse: a `gpushare run` pauses it.
        """
        in_force = self._pause_in_force()
        self.was_paused = in_force is not None
        if in_force is not None:
            self.job = in_force
            return Plan(title=f"pause {self.job.title}", steps=())
        # The guard and the control of channels are processes. They load while the rest is looked up. If the plan is not
        # carried out after all, the guard ends when this gpushare closes its input.
        if begin and self._guard is None:
            self._guard = self._start_guard()
        self.control.start()
        processes = self._read_processes()
        _refuse_mps(self._host, self.job, processes)
        pids = [process.pid for process in processes]
        self._add_new_processes(pids)
        duration = "" if self._seconds is None else f" for {self._seconds:g} s"
        steps = (
            Step(
                what=f"write the record {self.job.path}, and start the guard of the pause",
                do=self._write_record,
                revert=self._drop_record,
            ),
            *(self._disable_step(process) for process in self.job.channels),
            Step(
                what=f"let the guard keep it paused{duration}",
                undo=f"gpushare resume {self.job.selector}",
                do=self._pause_rest,
            ),
        )
        return Plan(
            title=f"pause {self.job.title}",
            steps=steps,
            undo=f"gpushare resume {self.job.selector}",
            consent=tuple(self._losses(pids)),
        )

    def _pause_in_force(self) -> PausedJob | None:
        """Return the job's record if it is already paused and its guard lives; then there is nothing to do.

        Raises GpushareError: root has paused it, or the `gpushare run` that started it.
        """
        for job in paused_jobs(self._host):
            is_of_another_user = job.keeper_uid not in {None, 0}
            # Only root reads records of other users, and takes such a pause over.
            if self._pid not in job.pids or is_of_another_user:
                continue
            if job.keeper_uid == 0:
                raise paused_by_root_error(job)
            if job.resumed_by_run(self._host):
                raise paused_by_run_error(job)
            # A pause or resume that was killed halfway, or whose guard has ended, is completed.
            return job if job.state == PAUSED and job.has_live_keeper(self._host) else None
        return None

    def _add_new_processes(self, pids: Iterable[int]) -> list[Channels]:
        """Scan those of these processes that the job does not list yet, add them to the job, and return their channels.

        Raises NotFound, NotSupported: none of the job's processes can be paused, or one is under MPS.
        """
        new = []
        refused: GpushareError | None = None
        for pid in sorted(set(pids) - {process.pid for process in self.job.channels}):
            try:
                channels = probed_channels(self._host, self.control, pid)
            except NotFound as error:
                # It ended, or a child inherited the context of another process of the job.
                refused = error
                continue
            if channels.under_mps:
                raise _under_mps_error(self.job, pid)
            new.append(channels)
        if not new and not self.job.channels:
            raise refused or NotFound(
                f"process {self._pid} has ended", "see what is running: gpushare status", code="process_gone"
            )
        self.job = replace(self.job, channels=(*self.job.channels, *new))
        return new

    def _start_guard(self) -> Guard:
        """Start the guard that ends the pause."""
        return Guard(self._host.spec, "ends the pause", "gpushare.pause.keep:keep", str(self.job.path), early=True)

    def _write_record(self) -> None:
        """Write the record of the pause, and wait until its guard is ready."""
        if self._guard is None:
            self._guard = self._start_guard()
        # A gpushare that died in a pause may have left a record, and channels that are off. Our record replaces it, so it
        # names these channels too.
        earlier = PAUSES.read(self.job.path)
        if earlier is not None and earlier.lives(self._host):
            self._earlier = earlier
            scanned_pids = {process.pid for process in self.job.channels}
            still_off = tuple(process for process in earlier.living(self._host) if process.pid not in scanned_pids)
            self.job = replace(self.job, channels=(*self.job.channels, *still_off))
        self.job = replace(self.job, keeper=self._host.processes.identity(self._guard.pid))
        write(self.job)
        self._guard.wait_ready()

    def _drop_record(self) -> None:
        """Undo `_write_record`: put the record of an earlier pause back, or remove ours.

        Our record stays if something could not be put back: a later ``gpushare resume`` reads it. It also names what the
        earlier pause took off.
        """
        if self._guard is not None:
            self._guard.leave()
        if self.off:
            return
        if self._earlier is not None:
            write(self._earlier)
        else:
            PAUSES.forget(self.job.path)

    def _disable_step(self, channels: Channels) -> Step:
        """Return the step that takes the channels of a process off the GPU."""
        count = sum(len(group.channels) for group in channels.groups)
        return Step(
            what=f"take {counted(count, 'channel')} of process {channels.pid} off the GPU "
            f"({counted(len(channels.groups), 'CUDA context')}): FIFO_DISABLE_CHANNELS, a call of NVIDIA's resource manager",
            undo=f"gpushare resume {self.job.selector}",
            do=lambda: self._disable(channels),
            revert=lambda: self._enable(channels),
        )

    def _disable(self, channels: Channels) -> None:
        """Take the channels of a process off the GPU; scan it again if they have changed since the scan."""
        try:
            self.take_off(channels)
        except NotFound as error:
            if error.code == "stale_channels":
                self._disable(self._scan_again(channels))
            # Otherwise the process has ended, and only the others are left to pause.

    def _scan_again(self, channels: Channels) -> Channels:
        """Scan a process whose channels have changed since the scan, write the new ones into the record, and return them."""
        rescanned = probed_channels(self._host, self.control, channels.pid, channels.started)
        others = tuple(process for process in self.job.channels if process.pid != channels.pid)
        self.job = replace(self.job, channels=(*others, rescanned))
        write(self.job)
        return rescanned

    def _enable(self, channels: Channels) -> None:
        """Put the channels of a process back on the GPU. Raises GpushareError: it is still paused."""
        if channels.pid not in self.off:
            return
        try:
            self.put_back(channels.pid)
        except GpushareError as error:
            raise error.restated(
                message=f"process {channels.pid} is still paused: {error.message}",
                hint=f"gpushare resume {self.job.selector}",
                kind=type(error),
            ) from error

    def _pause_rest(self) -> None:
        """Pause what the job has started meanwhile, and hand the pause over to the guard."""
        for _ in range(_ROUNDS):
            new = self._add_new_processes(process.pid for process in self._read_processes())
            if not new:
                break
            write(self.job)
            for channels in new:
                self._disable(channels)
        self.job = replace(self.job, state=PAUSED)
        write(self.job)
        if self._guard is not None:
            self._guard.hand_over(HELD)


def _under_mps_error(job: PausedJob, pid: int) -> NotSupported:
    """Return the error about a client of MPS."""
    return NotSupported(
        f"process {pid} is under MPS: all clients of a server share its channels, so a pause would stop all of them",
        f"stop its CPU side instead: kill -STOP {pid}; or end it: gpushare stop {job.selector}; "
        "outside MPS a job can be paused and swapped: start it with gpushare run --slice 2ms -- CMD, not as a farm",
        code="under_mps",
    )


def paused_by_run_error(job: PausedJob) -> InUse:
    """Return the error for a job that `gpushare run --yield pause` pauses and resumes by itself."""
    run = "" if job.keeper is None else f" (process {job.keeper.pid})"
    return InUse(
        f"{job.title} is paused and resumed by gpushare run{run}, as production works",
        f"end the job, and its run with it: gpushare stop {job.selector}",
        code="paused_by_run",
    )


def _refuse_mps(host: Host, job: PausedJob, processes: Iterable[JobProcess]) -> None:
    """Raise NotSupported if a process of a job is a client of MPS, or belongs to MPS itself."""
    for process in processes:
        if process.under_mps:
            raise _under_mps_error(job, process.pid)
        name = info_of(host.processes, process.pid).name
        if is_server(name) or name == MPS_CONTROL:
            raise NotSupported(
                f"process {process.pid} is an MPS server: a pause would stop all of its clients",
                "see its clients: gpushare mps status",
                code="under_mps",
            )


def enable(control: ChannelControl, channels: Channels) -> None:
    """Put the channels of a process back on the GPU, unless it has ended. Raises GpushareError: they may still be off."""
    with contextlib.suppress(NotFound):
        try:
            control.enable(channels)
        except NotFound as error:
            if error.code == "stale_channels":
                # As after an exec. Without a probe, `find` writes nothing: no slice changes here.
                control.enable(control.find(channels.pid, channels.started, probe=False))


def channel_names(channels: Channels) -> frozenset[tuple[int, int, int]]:
    """Return the channels of a process by client, group and number, to see which of them it has made or closed since."""
    return frozenset((group.client, group.handle, channel) for group in channels.groups for channel in group.channels)


def resume_and_forget(host: Host, control: ChannelControl, job: PausedJob) -> None:
    """Resume a job and remove its record. The caller holds the lock.

    Raises GpushareError: some of it may still be paused; the record stays.
    """
    # If gpushare dies from here on, the guard completes the resume. A full disk must not keep a job paused.
    with contextlib.suppress(GpushareError):
        write(replace(job, state=RESUMING))
    # What root has paused too stays off until root resumes it.
    kept_by_root = processes_paused_by_root(host) if job.ours else set()
    resumable = [process for process in job.living(host) if (process.pid, process.started) not in kept_by_root]
    error = _enable_all(control, resumable)
    if error is not None:
        raise error.restated(hint=f"try again: gpushare resume {job.selector}; see: sudo dmesg | tail")
    PAUSES.forget(job.path)


def resume_step(host: Host, control: ChannelControl, job: PausedJob) -> Step:
    """Return the step that resumes a job, unless that was done meanwhile. The caller holds the lock when it acts."""

    def put_job_back() -> None:
        current = PAUSES.read(job.path)
        # A record that cannot be read exists, too.
        if current is not None or job.path.exists():
            resume_and_forget(host, control, current or job)

    count = sum(len(group.channels) for process in job.channels for group in process.groups)
    return Step(
        what=f"put {counted(count, 'channel')} of {job.title} back on the GPU: FIFO_DISABLE_CHANNELS with bDisable 0",
        undo=f"gpushare pause {job.selector}",
        do=put_job_back,
    )


def _enable_all(control: ChannelControl, channels: Iterable[Channels]) -> GpushareError | None:
    """Enable the channels of several processes, whichever of them fail; return the first error."""
    errors = [error_of(partial(enable, control, process)) for process in channels]
    return next(filter(None, errors), None)


def paused_jobs_among(host: Host, pids: Iterable[int]) -> list[PausedJob]:
    """Return the paused jobs to which any of these processes, or a child of them, belongs."""
    jobs = paused_jobs(host)
    if not jobs:
        return []
    family = {member for pid in pids for member in host.processes.descendants(pid)}
    return [job for job in jobs if family & job.pids]


def resume_before_end(host: Host, pids: Iterable[int]) -> None:
    """Resume the jobs to which these processes belong, because a paused process does not end on a signal that it handles.

    What fails is left: the process is killed in the end.
    """
    jobs = paused_jobs_among(host, pids)
    if not jobs:
        return
    with host.open_channels() as control:
        for job in jobs:
            with contextlib.suppress(GpushareError):
                if job.keeper_uid is None:
                    with PAUSES.locked(host):
                        current = PAUSES.read(job.path)
                        if current is not None:
                            resume_and_forget(host, control, current)
                elif job.keeper_uid == 0:
                    # We may not remove root's record. It no longer counts once the job has ended.
                    _enable_all(control, job.living(host))
                else:
                    # We are root, and do not believe what a user's record says of channels.
                    scanned = [control.find(process.pid, process.started, probe=False) for process in job.living(host)]
                    _enable_all(control, scanned)


def find_paused(host: Host, text: str) -> PausedJob:
    """Return the paused job of this user with this name, or with a process of this PID.

    Raises:
        NotFound: no job of this name or PID is paused (code ``not_paused``).
        NoPermission: root has paused it (``paused_by_root_error``).
        InUse: a `gpushare run` pauses it (``paused_by_run_error``).
    """
    pid = pid_of(text)
    named = [job for job in paused_jobs(host) if (job.name == text if pid is None else pid in job.pids)]
    by_root = next((job for job in named if job.keeper_uid == 0), None)
    if by_root is not None:
        raise paused_by_root_error(by_root)
    own_job = next((job for job in named if job.ours), None)
    if own_job is None and named:
        raise _paused_by_user_error(named[0])
    if own_job is not None and own_job.resumed_by_run(host):
        raise paused_by_run_error(own_job)
    paused = own_job or _job_with_unread_record(host, pid)
    if paused is None:
        title = quoted(text) if pid is None else f"process {text[:20]}"
        raise NotFound(
            f"{title} is not paused by this user",
            "see which jobs are: gpushare pause list; resume all: gpushare resume --all",
            code="not_paused",
        )
    return paused


def _job_with_unread_record(host: Host, pid: int | None) -> PausedJob | None:
    """Return the job whose first process has this PID and whose record of a pause cannot be read; None: there is none.

    Its channels are those that its processes have now, so that a damaged record does not keep it paused.
    """
    process = host.processes.identity(pid) if pid else None
    path = PAUSES.path(host, pid or 0)
    if process is None or all(record.path != path for record in PAUSES.unread(host)):
        return None
    channels = []
    with host.open_channels() as control:
        for member in host.processes.descendants(process.pid):
            with contextlib.suppress(NotFound):
                channels.append(control.find(member, probe=False))
    job = Job(**process._asdict(), uid=info_of(host.processes, process.pid).uid, user=None)
    return paused_job(host, job, PAUSED, channels=channels)


def paused_by_root_error(job: PausedJob) -> NoPermission:
    """Return the error about a job that only root may resume."""
    return NoPermission(f"{job.title} was paused by root", "run as root", code="paused_by_root")


def _paused_by_user_error(job: PausedJob) -> NoPermission:
    """Return the error, for root, about a job that another user has paused, with the command that resumes it as that user.

    Root writes nothing into a user's directory, so the record of the pause would stay there, and the user's guard process
    would go on to pause what the job creates.
    """
    user = user_name(job.keeper_uid or 0)
    run_directory = job.path.parent.parent
    return NoPermission(
        f"{job.title} was paused by {user}, whose gpushare resumes it",
        f"run it as {user}: {command_as_user(user, run_directory, f'resume {job.selector}')}",
        code="paused_by_user",
    )


@contextlib.contextmanager
def pauses_locked(host: Host) -> Iterator[Sequence[str]]:
    """Hold the lock of this user's records, and remove those of ended jobs first.

    Yields no notes; the locks of other changes yield what they have undone before.
    """
    with PAUSES.locked(host):
        PAUSES.sweep(host)
        yield ()
