"""Jobs: what JOB means on the command line (a PID, or the name of a job that `gpushare run` started), and their records."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections import Counter
from dataclasses import field, replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from gpushare.base.errors import (
    BadUsage,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    cut,
    no_process_error,
    or_none,
)
from gpushare.base.model import memory_held
from gpushare.base.selection import Device, titles
from gpushare.base.typed import JOB_NAME, Count, JobName, Most, Percent, Pid, Within, job_name
from gpushare.base.units import counted, pid_of, quoted
from gpushare.base.values import dataclass
from gpushare.host.host import processes_on
from gpushare.host.identity import Identity, identity_of, uptime, wall_time
from gpushare.host.process import ProcessInfo, info_of
from gpushare.host.records import try_lock
from gpushare.host.store import Job, JobProcess, Kept, Past, RecordStore, any_lives
from gpushare.memory.ledger import Reservation, reservations
from gpushare.memory.peaks import Profile, keep_profile
from gpushare.part import Part, Watch
from gpushare.plan import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.pause.change import JobPause
    from gpushare.pause.record import PausedJob


J = TypeVar("J")
# The roles of `JobRecord`.
PRODUCTION: Final = "production"
OPPORTUNISTIC: Final = "opportunistic"
PLAIN: Final = "plain"
# Characters of a command that are kept.
MOST_COMMAND: Final = 400


def _is_short(text: str) -> bool:
    """Return whether a command is short enough to be kept."""
    return len(text) <= MOST_COMMAND


def check_job_name(name: str) -> str:
    """Return a name if a job can have it. Raises BadUsage if not (``bad_name``)."""
    if job_name(name):
        return name
    hint = "use a letter, then letters, digits, - _ or ., at most 32 characters: web, llm-1"
    if name == "list":
        hint = "use another word: `gpushare pause list` lists the paused jobs"
    raise BadUsage(f"{quoted(name)} cannot be the name of a job", hint, code="bad_name")


@dataclass(frozen=True)
class PrintedRate:
    """Where a job prints how fast it is: the file that its output goes to, and a pattern for the number.

    ``higher_is_better`` False: the number is a time per unit of work.
    """

    log: str
    metric: str
    higher_is_better: bool = True


# The longest grace time for which `stop` waits.
MOST_GRACE_SECONDS: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class JobRecord(Kept):
    """One named job: its program, its devices (UUIDs), its role, and the most memory that was seen on the first one."""

    name: JobName
    pid: Pid
    started: Count
    devices: Annotated[tuple[str, ...], Most(64)]
    memory_peak_bytes: Count | None = None
    role: Annotated[str, {PRODUCTION, OPPORTUNISTIC, PLAIN}.__contains__] = PRODUCTION
    # The gpushare that runs it and ends it the safe way; None: it has ended, and how is kept.
    supervisor: Identity | None = None
    # Of its program, as typed; cut if it is long.
    command: Annotated[str, _is_short] = ""
    # When the job began to wait or run (seconds since boot).
    since: Past | None = None
    # How it shares its device: as a client of MPS, or outside; with these limits, or this time-slice. The memory is of the job.
    mps: bool = False
    threads_percent: Percent | None = None
    memory_bytes: Count | None = None
    slice_us: Count | None = None
    # It is a farm, which names gpushare itself while its copies run.
    farm: bool = False
    # Its program runs, and waits until the MPS server serves no other user.
    waits: bool = False
    # How long its program may take to end after the signal (seconds).
    grace_seconds: Annotated[float, Within(0, MOST_GRACE_SECONDS)] | None = None
    # Where it prints how fast it is.
    rate: PrintedRate | None = None


def new_record(name: str | None, devices: Sequence[Device], command: Sequence[str]) -> JobRecord:
    """Return a record of the job that this gpushare begins to run; if it has no name, `RecordedJob.open` makes one."""
    return JobRecord(
        name=name or "",
        pid=os.getpid(),
        started=0,
        devices=tuple(device.uuid for device in devices),
        role=PLAIN,
        supervisor=identity_of(os.getpid()),
        command=cut(shlex.join(command), MOST_COMMAND),
        since=uptime(),
    )


def output_path(host: Host, name: str) -> Path:
    """Return the file in the state directory that keeps the output of a job."""
    return host.state_directory / "output" / f"{name}.log"


def earlier_output_path(host: Host, name: str) -> Path:
    """Return where the output of an earlier job of a name is kept until the job that replaces it has begun."""
    return output_path(host, name).with_suffix(".earlier")


# Other users read them too, to spare a production job.
JOBS: Final = RecordStore(JobRecord, "jobs", "the record of a job")


def write_record(host: Host, record: JobRecord) -> None:
    """Write the record of a job, and remove those of jobs that have ended.

    Raises NoPermission, OperationFailed: the directory cannot be made, or the file not be written.
    """
    forget_ended(host)
    JOBS.write(replace(record, path=JOBS.path(host, record.name)))


def forget_ended(host: Host, just_ended: Container[int] = ()) -> None:
    """Remove this user's records of ended jobs, except production jobs, whose peak memory is still used.

    If the gpushare of a job was killed, its end is recorded here: at an unknown time, or now for programs ``just_ended``.
    """

    def is_to_be_removed(record: JobRecord) -> bool:
        """Return whether to remove this record; record the end of its job first, if nobody has."""
        if is_running(host, record):
            return False
        past = _unseen_end(host, record)
        if past is not None:
            ended = time.time() if record.pid in just_ended else None
            _write_past(host, replace(past, ended=ended))
        if record.role == PRODUCTION and record.supervisor is not None:
            # Without a supervisor its end counts as recorded.
            with contextlib.suppress(GpushareError):
                JOBS.write(replace(record, supervisor=None))
        return record.role != PRODUCTION

    JOBS.sweep(host, is_to_be_removed)


def records(host: Host) -> list[JobRecord]:
    """Return the records of all named jobs, running or not: this user's and root's."""
    return JOBS.all(host, users=False)


def living_productions(host: Host, device: Device) -> list[JobRecord]:
    """Return the production jobs that run on a device now."""
    return [
        record
        for record in records(host)
        if record.role == PRODUCTION and device.uuid in record.devices and is_running(host, record)
    ]


def slices_of_group(host: Host, device: Device) -> dict[int, int]:
    """Return by PID this user's opportunistic jobs that share a slice under MPS, each with the slice that it wants (us).

    Their programs run: one whose program has ended must not keep the slice, though its gpushare still lives.
    """
    return {
        record.pid: record.slice_us
        for record in JOBS.all(host, shared=False)
        if record.role == OPPORTUNISTIC and record.mps and record.slice_us is not None
        if device.uuid in record.devices and (record.supervisor is None or record.supervisor.pid != record.pid)
        if host.processes.alive(record.pid, record.started)
    }


def find_record(host: Host, name: str) -> JobRecord | None:
    """Return the record of the job with this name, a running one first; None: there is none."""
    with_name = [record for record in records(host) if record.name == name]
    return max(with_name, key=lambda record: is_running(host, record), default=None)


def is_running(host: Host, record: JobRecord) -> bool:
    """Return whether a job runs now."""
    return any_lives(host, record)


def jobs_of_processes(host: Host, pids: Iterable[int]) -> dict[int, JobRecord]:
    """Return by PID the records of the running jobs whose program, or a descendant of it, these processes are."""
    jobs = {record.pid: record for record in records(host) if is_running(host, record)}
    programs = {
        pid: next((above for above in host.processes.ancestry(pid) if above in jobs), 0) for pid in pids if jobs
    }
    return {pid: jobs[program] for pid, program in programs.items() if program}


def job_names(host: Host, pids: Iterable[int]) -> dict[int, str]:
    """Return the names of the running jobs that processes belong to."""
    return {pid: record.name for pid, record in jobs_of_processes(host, pids).items()}


def make_name(host: Host, program: str) -> str:
    """Return a free name for a job that was given none: its program, and the first number that no other job has."""
    word = re.sub(r"[^a-z0-9_.-]", "", os.path.basename(program).lower(), flags=re.ASCII)[:24]
    stem = word if JOB_NAME.fullmatch(word) else "job"
    used_names = {record.name for record in records(host)} | {past.name for past in PAST.all(host, shared=False)}
    names = (f"{stem}-{number}" for number in count(1))
    # One that runs in the background has no record while it waits.
    return next(name for name in names if name not in used_names and not runs_in_background(host, name))


def runs_in_background(host: Host, name: str) -> bool:
    """Return whether a job of this name starts, waits or runs in the background: such a job holds the lock of its output."""
    try:
        descriptor = os.open(output_path(host, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)


# -- jobs that have ended ----------------------------------------------------------------------------------------------

KEPT_JOBS: Final = 100


@dataclass(frozen=True, kw_only=True)
class PastJob(Kept):
    """A job that has ended. Times are seconds since 1970, to be shown; ``device`` is for people: ``GPU 0``.

    If its gpushare was killed, its end was not observed: exit code and time are unknown.
    """

    name: JobName
    command: Annotated[str, _is_short]
    role: Annotated[str, {PRODUCTION, OPPORTUNISTIC, PLAIN}.__contains__]
    device: Annotated[str, _is_short]
    began: float | None
    ended: float | None
    # As of `gpushare run`.
    exit_code: Annotated[int, Within(0, 255)] | None
    started: bool = True
    memory_peak_bytes: Count | None = None
    # The gpushare that ran it: the name may belong to another job now.
    supervisor: Identity | None = None


# By name the last one that has ended; `set_past_aside` keeps those before it.
PAST: Final = RecordStore(PastJob, "past", "the record of a job that has ended", survives_reboot=True)


def keep_past(host: Host, record: JobRecord, device: str, began: float, exit_code: int | None) -> None:
    """Keep how a job ended just now, and forget all but the newest; a failure does not matter.

    ``exit_code`` None: its program was not started.
    """
    past = _past_of(host, record, device, began)
    code = None if exit_code is None else exit_code & 0xFF
    _write_past(host, replace(past, ended=time.time(), exit_code=code, started=code is not None))


def past_jobs(host: Host) -> list[PastJob]:
    """Return this user's jobs that have ended, the newest first: also those whose gpushare was killed."""
    recorded = PAST.all(host, shared=False)
    unseen = (_unseen_end(host, record) for record in JOBS.all(host, shared=False) if not is_running(host, record))
    return sorted([*recorded, *filter(None, unseen)], key=lambda past: past.ended or past.began or 0.0, reverse=True)


def last_past(host: Host, name: str) -> PastJob | None:
    """Return how this user's last job of a name has ended; None: it runs, or nothing is known of its end."""
    record = JOBS.read(JOBS.path(host, name))
    unseen = None if record is None or is_running(host, record) else _unseen_end(host, record)
    return unseen or PAST.read(PAST.path(host, name))


def _unseen_end(host: Host, record: JobRecord) -> PastJob | None:
    """Return what is known of the end of a job that does not run and whose end nobody recorded; None: it is recorded.

    Its gpushare, which would have recorded it, was killed.
    """
    supervisor = record.supervisor
    if supervisor is None or any(kept.supervisor == supervisor for kept in PAST.all(host, shared=False)):
        return None
    gpus = or_none(host.nvml.identities) or ()
    devices = [Device(gpu=gpu, mig=mig) for gpu in gpus for mig in (None, *gpu.mig_instances)]
    devices_of_record = [device for uuid in record.devices for device in devices if device.uuid == uuid]
    began = None if record.since is None else wall_time(record.since)
    past = _past_of(host, record, titles(devices_of_record) if devices_of_record else "-", began)
    # Until its program runs, the record names gpushare itself.
    return replace(past, started=record.farm or record.pid != supervisor.pid)


def _past_of(host: Host, record: JobRecord, device: str, began: float | None) -> PastJob:
    """Return the record of an ended job, made of that of the running job; its time and exit code are still unknown."""
    return PastJob(
        name=record.name,
        command=record.command,
        role=record.role,
        device=device,
        began=began,
        ended=None,
        exit_code=None,
        memory_peak_bytes=record.memory_peak_bytes,
        supervisor=record.supervisor,
        path=PAST.path(host, record.name),
    )


def _write_past(host: Host, past: PastJob) -> None:
    """Keep a past job, and forget the oldest; a failure does not matter."""
    with contextlib.suppress(GpushareError, OSError):
        recorded = PAST.read(past.path)
        # With the same supervisor it is this job: another command has recorded its end, too. Else an earlier job of the name.
        if recorded is not None and recorded.supervisor != past.supervisor:
            set_past_aside(host, past.name)
        PAST.write(past)
        for oldest in past_jobs(host)[KEPT_JOBS:]:
            PAST.forget(oldest.path)
            # Only the last job of a name has an output: each one overwrites that of the job before.
            if oldest.path == PAST.path(host, oldest.name):
                output_path(host, oldest.name).unlink(missing_ok=True)
                earlier_output_path(host, oldest.name).unlink(missing_ok=True)


def set_past_aside(host: Host, name: str) -> Path | None:
    """Rename the record of the last ended job of this name, because another job takes the name; return its new file.

    None: there is no such record, or it cannot be renamed.
    """
    last = PAST.path(host, name)
    # No name of a job contains an @.
    earlier = last.with_name(f"{name}@{time.time_ns()}.json")
    try:
        os.rename(last, earlier)
    except OSError:
        return None
    return earlier


def check_name_free(host: Host, name: str, *, except_pid: int | None = None) -> None:
    """Raise InUse if a job of this name runs, unless its record names process ``except_pid``."""
    other = find_record(host, name)
    if other is not None and other.pid != except_pid and is_running(host, other):
        option = "--production OTHER" if other.role == PRODUCTION else "--name OTHER"
        see_output = f"see its output: gpushare logs {name}; " if runs_in_background(host, name) else ""
        raise InUse(
            f"a job '{name}' is already running (process {other.pid})",
            f"give it another name: {option}; {see_output}end the other: gpushare stop {name}",
            code="name_in_use",
        )


def check_not_waiting(host: Host, name: str | None) -> None:
    """Raise InUse if another job of this user with this name waits for room: only one of them could start."""
    if name is None:
        return
    for job in reservations(host) or ():
        if job.name == name and job.waits and job.claim.uid == os.geteuid() and job.claim.pid != os.getpid():
            option = "--production OTHER" if job.production else "--name OTHER"
            raise InUse(
                f"a job '{name}' already waits for room (process {job.claim.pid})",
                f"give it another name: {option}; end the other: gpushare stop {name}",
                code="name_in_use",
            )


# A peak is kept after this number of looks that saw memory (most of a minute): a shorter run may not have reached it.
_PEAK_LOOKS: Final = 45


@dataclass
class RecordedJob(Part):
    """The record of a job, written before its program runs. That of a production job stays after its end, for its peak memory.

    ``record`` says what the job is. Its process, its peak memory and, if it was given none, its name are filled in here.
    """

    host: Host
    device: Device
    record: JobRecord
    # What a name is made of.
    program: str
    _written: bool = False
    _ended: bool = False
    _watch: Watch | None = None
    _seen: set[int] = field(default_factory=set)
    # The most memory that its processes held together in this run, and how many looks saw some.
    _peak_bytes: int = 0
    _peak_looks: int = 0
    due: float = 0.0

    def check(self) -> None:
        if self.record.name:
            check_name_free(self.host, self.record.name, except_pid=os.getpid())

    def open(self) -> None:
        """Write the job's record, so that it is known before its program runs.

        A production job without a record would not be spared.
        """
        with JOBS.locked(self.host):
            if not self.record.name:
                self.record = replace(self.record, name=make_name(self.host, self.program))
            # A record of this gpushare is of an earlier try to start the program.
            check_name_free(self.host, self.record.name, except_pid=os.getpid())
            self._write(os.getpid())
        self._written = True

    def _write(self, pid: int) -> None:
        """Write the record, with ``pid`` as the job's process and the peak that an earlier run of a production job had."""
        earlier = find_record(self.host, self.record.name)
        ran_there = earlier is not None and earlier.devices == self.record.devices
        if earlier is not None and ran_there and earlier.role == self.record.role == PRODUCTION:
            # What it needed on this device, it will need again.
            self.record = replace(self.record, memory_peak_bytes=earlier.memory_peak_bytes)
        process = self.host.processes.identity(pid) or Identity(pid, 0)
        self.record = replace(self.record, **process._asdict())
        write_record(self.host, self.record)

    def started(self, watch: Watch) -> None:
        """Name the program's process in the record, in place of gpushare's; others find the job by it."""
        self._watch = watch
        with contextlib.suppress(GpushareError):
            self._write(watch.program_pid)

    def poll(self) -> bool:
        """Note the job's peak memory, its slice, and whether it waits for an MPS server that serves another user.

        Only the peak of a production job is written at once: the jobs that spare it read it.
        """
        watch = self._watch
        if watch is None:
            return False
        self.due = time.monotonic() + min(watch.poll_interval(), 1.0)
        self._seen |= set(self.host.processes.descendants(watch.program_pid))
        # A full disk must not end the job.
        with contextlib.suppress(GpushareError):
            previous = self.record
            listed = processes_on(self.host, self.device.gpu.index) or ()
            held = memory_held(process for process in listed if process.pid in self._seen)
            if held is not None:
                self._peak_bytes = max(held, self._peak_bytes)
                self._peak_looks += 1
                self.record = replace(self.record, memory_peak_bytes=max(held, previous.memory_peak_bytes or 0))
            waits = bool(watch.pending) and not watch.attached
            self.record = replace(self.record, waits=waits, slice_us=watch.slice_us or self.record.slice_us)
            # Of all jobs others read whether they wait, and their slice.
            is_news = (self.record.waits, self.record.slice_us) != (previous.waits, previous.slice_us)
            if is_news or (previous.role == PRODUCTION and self.record != previous):
                write_record(self.host, self.record)
        return False

    def keep_peak(self, command: Sequence[str]) -> None:
        """Keep the peak of a run of this command that was not too short: a later `run --wait` of it reserves that."""
        if self._peak_looks >= _PEAK_LOOKS:
            keep_profile(self.host, self.device, command, Profile(memory_bytes=self._peak_bytes))

    def moved(self, device: Device) -> None:
        """Name the device to which the job was moved in its record; a full disk must not end the job."""
        self.device = device
        self.record = replace(self.record, devices=(device.uuid,))
        with contextlib.suppress(GpushareError):
            write_record(self.host, self.record)

    def close(self, *, program_lives: bool = False) -> None:
        """Note that the program has ended. The job stays listed until `forget`, as its program may be started once more.

        So the record names this gpushare in place of the program; not that of a production job, which is not spared now.
        """
        if self._written and not program_lives:
            self._written = False
            self._ended = True
            if self.record.role != PRODUCTION:
                with contextlib.suppress(GpushareError):
                    self._write(os.getpid())

    def forget(self) -> None:
        """Remove the record of an ended job; production's stays, for its peak. After `keep_past`: so the job is always listed."""
        if self._ended and self.record.role == PRODUCTION:
            with contextlib.suppress(GpushareError):
                write_record(self.host, replace(self.record, supervisor=None))
        elif self._ended:
            JOBS.drop(self.host, self.record.name)


@contextlib.contextmanager
def farm_job(
    host: Host, device: Device, name: str | None, command: Sequence[str], *, mps: bool = True
) -> Iterator[Callable[[int, int | None], None]]:
    """List this gpushare as a job while it runs many copies of a program; without a name one is made.

    ``mps``: whether the copies run under MPS, as all of one GPU do.
    Yields a function that takes the exit code, and the peak memory of a copy (bytes; None: unknown).
    Raises InUse: a job of this name runs or waits (code ``name_in_use``).
    """
    check_not_waiting(host, name)
    record = replace(new_record(name, [device], command), mps=mps, farm=True)
    job = RecordedJob(host, device, record, command[0])
    job.open()
    began = time.time()
    code = None

    def note_end(exit_code: int, peak_bytes: int | None) -> None:
        """Note how the farm has ended, for `gpushare jobs`."""
        nonlocal code
        code = exit_code
        job.record = replace(job.record, memory_peak_bytes=peak_bytes)

    try:
        yield note_end
    finally:
        job.close()
        keep_past(host, job.record, device.title, began, code)
        job.forget()


# -- JOB on the command line -------------------------------------------------------------------------------------------


def running_records(host: Host) -> list[JobRecord]:
    """Return the records of jobs that run: this user's, root's, and for root those of all users.

    Of several records that name one process the first counts: this user's own before those of others.
    """
    by_process: dict[tuple[int, int], JobRecord] = {}
    for record in JOBS.all(host):
        if is_running(host, record):
            by_process.setdefault((record.pid, record.started), record)
    return list(by_process.values())


def running_record(host: Host, text: str) -> JobRecord | None:
    """Return the running job with this name, or with this PID: that of its program or, if it is of none, of its gpushare.

    This user's own goes before root's, and to root that before those of other users.

    Raises BadUsage: it is neither a PID nor a possible name (``bad_name``), or several users have one (``ambiguous_job``).
    """
    pid = pid_of(text)
    if pid is None:
        check_job_name(text)
    process = None if pid is None else host.processes.identity(pid)

    def is_meant(record: JobRecord) -> bool:
        """Return whether a record has this name, or is of a job whose program or gpushare has this PID."""
        if pid is None:
            return record.name == text
        if process is None:
            return record.pid == pid
        # The PID of a record may have been reused, or be forged by its writer: compare the start times.
        return process in {Identity(record.pid, record.started), record.supervisor}

    meant = [record for record in running_records(host) if is_meant(record)]
    of_this_user = [record for record in meant if record.keeper_uid is None]
    of_root = [record for record in meant if record.keeper_uid == 0]
    nearest = of_this_user or of_root or meant
    # The gpushare of a job may itself be the program of another one, whose processes it and its job are.
    programs = [record for record in nearest if record.pid == pid]
    return only_job(text, programs or nearest, [record.pid for record in nearest])


def only_job(text: str, jobs: Sequence[J], pids: Sequence[int]) -> J | None:
    """Return the only one of some jobs; None: there is none. Raises BadUsage, which names ``pids``: several (``ambiguous_job``)."""
    if len(jobs) > 1:
        numbers = ", ".join(map(str, pids[:5]))
        raise BadUsage(f"{len(jobs)} jobs have the name '{text}'", f"give a PID: {numbers}", code="ambiguous_job")
    return jobs[0] if jobs else None


def job_in_line(host: Host, text: str) -> Reservation | None:
    """Return the job in the line with this name or PID; of several, the user's own. Raises BadUsage if there are two."""
    pid = pid_of(text)
    waiting = [job for job in reservations(host) or [] if job.waits]
    matching = [job for job in waiting if (job.name == text if pid is None else job.claim.pid == pid)]
    of_this_user = [job for job in matching if info_of(host.processes, job.claim.pid).uid == host.uid]
    jobs = of_this_user or matching
    return only_job(text, jobs, [job.claim.pid for job in jobs])


def check_not_in_line(host: Host, name: str) -> None:
    """Raise NotFound if the job of this name waits for its first start (code ``waits_in_line``)."""
    if job_in_line(host, name) is not None:
        raise NotFound(
            f"job {quoted(name)} waits in line and has not started yet",
            "see what it waits for: gpushare jobs",
            code="waits_in_line",
        )


def find_job(host: Host, text: str) -> Job:
    """Return the running job with this name or PID.

    Raises:
        BadUsage: as `running_record`.
        NotFound: no such job runs (``no_job``), or it has not started yet (``waits_in_line``).
    """
    record = running_record(host, text)
    pid = pid_of(text) if record is None else record.pid
    if pid is None:
        check_not_in_line(host, text)
    identity = host.processes.identity(pid) if pid else None
    if identity is None or host.processes.describe(identity.pid) is None:
        raise no_job_error(host, text)
    # Asked after the identity was read: so it is of the process that the record names, not of a later one with its PID.
    if record is not None and not is_running(host, record):
        raise no_job_error(host, text)
    return job_of(host, identity, None if record is None else record.name, record)


def job_of(host: Host, process: Identity, name: str | None, record: JobRecord | None = None) -> Job:
    """Return a process and its descendants as a job, with its user and the given name; ``record`` if it has one."""
    info = host.processes.describe(process.pid)
    if info is None and record is not None and record.supervisor is not None:
        # It has just ended, or not begun yet: its user is that of its gpushare.
        info = host.processes.describe(record.supervisor.pid)
    info = info or ProcessInfo(pid=process.pid)
    return Job(**process._asdict(), uid=info.uid, user=info.user, name=name)


def no_job_error(host: Host, text: str, states: str = "is running or waiting") -> NotFound:
    """Return the error about a job that neither runs nor waits. ``states``: those that it has none of, in words."""
    if pid_of(text) is not None:
        return no_process_error(text, "see all: gpushare jobs -a", "no_job")
    names = [record.name for record in records(host) if is_running(host, record)][:5]
    running = f"running jobs: {', '.join(names)}; " if names else ""
    return NotFound(
        f"no job '{text}' {states}",
        f"{running}see all, and those that have ended: gpushare jobs -v",
        code="no_job",
    )


def consent_to(host: Host, job: Job, action: str, pids: Iterable[int] = ()) -> tuple[Loss, ...]:
    """Return what to ask before a job is touched: nothing for the user's own jobs; root is asked for other users' jobs.

    ``action`` is a verb with s: ``pauses``. ``pids`` are the processes that will be touched: the processes of a root
    service may belong to other users, who lose them.
    Raises NoPermission: it, or one of the processes, belongs to another user, and this is not root.
    """
    # Owners, each with what is touched, in words.
    touched = [*_processes_of_others(host, pids, {host.uid, job.uid}).items()]
    if job.uid != host.uid:
        owner = _owner_text(job.uid, job.user)
        if not host.root:
            raise NoPermission(
                f"{job.title} belongs to {owner}", "ask its owner, or run as root: sudo gpushare ...", code="other_user"
            )
        touched.insert(0, (owner, job.title))
    elif touched and not host.root:
        owner, what = touched[0]
        raise NoPermission(
            f"{what} of {job.title} belongs to {owner}", "run as root: sudo gpushare ...", code="other_user"
        )
    return tuple(Loss(action=action, what=what, why=(f"of {owner}",)) for owner, what in touched)


def pause_of(host: Host, text: str, seconds: float | None) -> JobPause:
    """Return the pause of a job, by name or PID, for the caller to carry out. Raises as `find_job` and `consent_to`."""
    from gpushare.pause.change import JobPause

    job = find_job(host, text)
    consent_to(host, job, "pauses")
    return JobPause(
        host, job, lambda: gpu_processes(host, job), seconds, lambda pids: consent_to(host, job, "pauses", pids)
    )


def find_paused_job(host: Host, text: str) -> PausedJob:
    """Return this user's paused job with this name or PID: that of one of its processes, or of its gpushare.

    Raises BadUsage as `running_record`, and as `find_paused`.
    """
    from gpushare.pause.change import find_paused

    # Of several jobs of one name only one may be paused.
    record = None if pid_of(text) is None else running_record(host, text)
    return find_paused(host, text if record is None else str(record.pid))


def _owner_text(uid: int | None, user: str | None) -> str:
    """Return the name of a user for messages: ``alice``, else ``user 1000``, else ``another user``."""
    return user or (f"user {uid}" if uid is not None else "another user")


def _processes_of_others(host: Host, pids: Iterable[int], except_uids: Container[int | None]) -> dict[str, str]:
    """Return in words the processes of each owner, without those of ``except_uids``: ``{"alice": "process 7"}``."""
    pids_of: dict[str, list[int]] = {}
    for pid in sorted(pids):
        info = host.processes.describe(pid)
        if info is not None and (info.uid is None or info.uid not in except_uids):
            pids_of.setdefault(_owner_text(info.uid, info.user), []).append(pid)
    return {
        owner: f"process {owned[0]}" if len(owned) == 1 else f"{counted(len(owned), 'process')} such as {owned[0]}"
        for owner, owned in pids_of.items()
    }


def gpu_processes(host: Host, job: Job) -> tuple[JobProcess, ...]:
    """Return the processes of a job's tree that NVML lists as compute processes, on all GPUs.

    In another PID namespace than the host's NVML lists other PIDs. There it returns those that have the driver loaded, and on
    which GPUs they are is unknown.

    Raises:
        NotFound: none of them is on a GPU (``no_context``), or it has ended meanwhile (``no_job``).
        GpushareError: no GPU answers.
    """
    tree = host.processes.descendants(job.pid)
    if host.processes.identity(job.pid) is None or job.pid not in tree:
        raise no_job_error(host, job.selector)
    if host.processes.namespace_is_host() is False:
        on_gpus: Collection[JobProcess] = [JobProcess(pid, 0) for pid in tree if host.processes.uses_driver(pid)]
    else:
        on_gpus = _processes_on_gpus(host, set(tree))
    living = []
    for process in sorted(on_gpus, key=lambda process: process.pid):
        # Both ways the start is still missing.
        identity = host.processes.identity(process.pid)
        if identity is not None:
            living.append(process._replace(started=identity.started))
    if not living:
        raise _not_on_gpu_error(host, job)
    return tuple(living)


def _not_on_gpu_error(host: Host, job: Job) -> NotFound:
    """Return the error about a job without a process on a GPU: it may be swapped out."""
    from gpushare.memory.swapped import OUT, find_swap

    swap = or_none(lambda: find_swap(host, job.pid, job.name))
    if swap is not None and swap.state == OUT:
        hint = f"bring it back first: gpushare swap in {job.selector}"
        return NotFound(f"{job.title} is swapped out of the GPU", hint, code="no_context")
    return NotFound(f"{job.title} is not on a GPU", "see what is running: gpushare status", code="no_context")


def _processes_on_gpus(host: Host, tree: set[int]) -> Collection[JobProcess]:
    """Return the processes of a tree that are on GPUs, their start still unknown (0). Raises as NVML if no GPU answers."""
    on_gpus: dict[int, JobProcess] = {}
    answered = False
    last_error = None
    for gpu in range(host.nvml.count()):
        try:
            listed = host.nvml.processes(gpu)
        except GpushareError as error:
            last_error = error
            continue
        answered = True
        for entry in listed or ():
            if entry.pid in tree and (entry.compute or entry.mps):
                process = on_gpus.get(entry.pid, JobProcess(entry.pid, 0))
                # Under MIG it has one entry per instance.
                gpus = tuple(dict.fromkeys((*process.gpus, gpu)))
                on_gpus[entry.pid] = process._replace(gpus=gpus, under_mps=process.under_mps or entry.mps)
    if last_error is not None and not answered:
        raise last_error
    return on_gpus.values()


def processes_to_swap(host: Host, job: Job) -> list[JobProcess]:
    """Return the processes of a job on GPUs, with what they hold there. All of them can go out, as `check_out` checks.

    Raises:
        GpushareError: as `gpu_processes` and `check_out`.
        NotSupported: it is unknown what they hold, or what their GPU has and uses: both count for the way back.
    """
    from gpushare.memory.swap import check_out

    on_gpu = gpu_processes(host, job)
    gpu_indexes = {gpu for each in on_gpu for gpu in each.gpus}
    held: Counter[int] = Counter()
    for process in (process for index in gpu_indexes for process in host.nvml.processes(index) or ()):
        if process.memory_used_bytes is not None:
            held[process.pid] += process.memory_used_bytes
    processes = [each._replace(memory_bytes=held[each.pid]) for each in on_gpu]
    check_out(host, job, processes)
    gpus = [host.nvml.gpu(index) for index in gpu_indexes]
    unknown = [
        f"GPU {gpu.index} has and uses" for gpu in gpus if None in {gpu.memory_total_bytes, gpu.memory_used_bytes}
    ]
    unknown += [f"process {each.pid} holds" for each in on_gpu if each.pid not in held]
    if unknown:
        raise NotSupported(
            f"{job.title} cannot be swapped: the driver does not say how much memory {unknown[0]}",
            f"pause it instead: gpushare pause {job.selector}",
            code="memory_unknown",
        )
    return processes
