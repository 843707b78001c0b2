"""What the cockpit keeps of the past: five minutes of each GPU, and the events between two looks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.base.model import MPS_SERVER, WAITING, GpuSensors, ListedJob
from gpushare.base.units import counted, format_bytes
from gpushare.base.values import dataclass
from gpushare.run.listing import ENDED, PAUSED, RUNNING

if TYPE_CHECKING:
    from gpushare.base.model import Gpu
    from gpushare.top.frame import Frame

SECONDS: Final = 300.0
# The values of a GPU that are kept, with their titles.
SERIES: Final = {"util": "utilization", "memory": "memory", "sm": "SM activity", "power": "power"}
_MOST_POINTS: Final = 1200
_MOST_EVENTS: Final = 500
# The reasons for lowered clocks come and go every second under load.
_QUIET_SECONDS: Final = 60.0


def gpu_values(frame: Frame, gpu: Gpu) -> dict[str, float | None]:
    """Return the present values of a GPU by the keys of `SERIES`, as shares from 0 to 1; None: unknown."""
    sensors = frame.sensors.get(gpu.index)
    return {
        "util": _share(gpu.utilization_percent, 100),
        "memory": _share(gpu.memory_used_bytes, gpu.memory_total_bytes),
        "sm": _share(frame.activity(gpu), 100),
        "power": None if sensors is None else _share(sensors.power_watts, sensors.power_limit_watts),
    }


def _share(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole, at most 1; None: one of them is unknown."""
    return None if part is None or not whole else min(1.0, part / whole)


class History:
    """The values of each GPU over the last five minutes."""

    def __init__(self) -> None:
        # By GPU index: times with the values then, the newest last.
        self._points: dict[int, deque[tuple[float, dict[str, float | None]]]] = {}

    def add(self, frame: Frame) -> None:
        """Keep a frame. Those after its time are forgotten: a replay that went back shows another past."""
        for gpu in frame.snapshot.gpus:
            points = self._points.setdefault(gpu.index, deque(maxlen=_MOST_POINTS))
            while points and points[-1][0] >= frame.at:
                points.pop()
            while points and points[0][0] < frame.at - SECONDS:
                points.popleft()
            points.append((frame.at, gpu_values(frame, gpu)))

    def means(self, index: int, series: str, width: int) -> list[float | None]:
        """Return the means of a series of a GPU in ``width`` equal parts of the five minutes up to now."""
        points = self._points.get(index)
        if not points or width <= 0:
            return [None] * width
        # Parts begin at whole multiples on the clock, so that old ones do not change their height as they move on.
        part_seconds = SECONDS / width
        newest_part = int(points[-1][0] / part_seconds)
        values_of_part: list[list[float]] = [[] for _ in range(width)]
        for at, point in points:
            value = point[series]
            parts_ago = newest_part - int(at / part_seconds)
            if value is not None and parts_ago < width:
                values_of_part[-1 - parts_ago].append(value)
        means: list[float | None] = []
        for values in values_of_part:
            # Where looks are further apart than a part, a part without a value has that of the part before.
            before = means[-1] if means else None
            means.append(sum(values) / len(values) if values else before)
        return means


@dataclass(frozen=True)
class Event:
    """Something that happened; ``colour`` is a name of a theme: ``bad`` and ``warn`` want attention."""

    at: float
    text: str
    colour: str = "text"

    @property
    def clock(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.at))


def job_title(job: ListedJob) -> str:
    """Return a job for people: its name, or its program and PID."""
    return program_of(job) if job.name is not None else f"{program_of(job)} ({job.pid})"


def program_of(job: ListedJob) -> str:
    """Return the name of a job, or of one without a name its program."""
    return job.name or (job.command or "process").split()[0].rpartition("/")[2]


_STATE_TEXTS: Final = {
    PAUSED: "was paused",
    WAITING: "waits",
    "leaving": "is being swapped out",
    "out": "is swapped out",
    "returning": "is being swapped in",
    "lost": "cannot come back: its memory was lost",
}


def _may_be_unseen(job: ListedJob, frame: Frame) -> bool:
    """Return whether a process without a job may be missing in a frame although it runs: its GPU does not answer there."""
    silent_gpus = {gpu.index for gpu in frame.snapshot.gpus if gpu.error is not None}
    return job.name is None and not silent_gpus.isdisjoint(job.gpu_indexes)


# What tells jobs apart: the name, as a requeued job has a new program, or the PID of one without a name; and if it waits.
_JobKey = tuple[str | int | None, bool]


class Events:
    """What happened, newest last."""

    def __init__(self) -> None:
        self.all: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._before: Frame | None = None
        self._slowed_until: dict[tuple[int, str], float] = {}
        # The processes of jobs with a name are no jobs of their own: the end of such a job is told once.
        self._pids_of_named_jobs: set[int | None] = set()

    def add(self, frame: Frame) -> None:
        """Note what has changed since the last frame. The first one, and one without an answer, tell nothing."""
        if frame.error is not None:
            return
        before = self._before
        self._before = frame
        if before is not None and frame.at > before.at:
            self.all.extend(self._job_events(before, frame))
            self.all.extend(self._gpu_events(before, frame))
            self.all.extend(self._daemon_events(before, frame))

    def restart(self, at: float) -> None:
        """Forget what is later than ``at``; the next frame is a first one: a replay has moved its time."""
        while self.all and self.all[-1].at > at:
            self.all.pop()
        self._before = None

    def _job_events(self, before: Frame, frame: Frame) -> Iterator[Event]:
        """Yield what has happened to the jobs between two frames; a job with a name and its processes are one."""
        jobs_of_both = (*before.jobs, *frame.jobs)
        named_jobs = [job for job in jobs_of_both if job.name is not None]
        self._pids_of_named_jobs &= {job.pid for job in jobs_of_both}
        self._pids_of_named_jobs |= {pid for job in named_jobs for pid in (job.pid, *job.processes)}
        earlier = self._jobs_by_key(before.jobs)
        present = self._jobs_by_key(frame.jobs)
        for key, job in present.items():
            # A process on a GPU that answers again has not started.
            if job.line is None and (key in earlier or not _may_be_unseen(job, before)):
                yield from _job_changes(earlier.get(key), job, frame.at)
            elif job.line is not None and key not in earlier:
                yield Event(frame.at, f"{job_title(job)} waits for room, place {job.line.place}", "warn")
        running_names = {job.name for job in present.values()} - {None}
        ended_before = {(job.name, job.ran_seconds) for job in before.jobs if job.state == ENDED}
        new_exit_codes = {
            job.name: job.exit_code
            for job in frame.jobs
            if job.state == ENDED and (job.name, job.ran_seconds) not in ended_before
        }
        for key, job in earlier.items():
            # What has left the line to start tells that itself.
            has_started = job.line is not None and job.name in running_names
            if key in present or has_started or _may_be_unseen(job, frame):
                continue
            if job.name in new_exit_codes:
                yield _end_event(job_title(job), new_exit_codes.pop(job.name), frame.at)
            else:
                yield Event(frame.at, f"{job_title(job)} {'left the line' if job.line is not None else 'ended'}")
        # The other jobs began and ended between the two frames.
        for name, code in new_exit_codes.items():
            yield _end_event(name or "a job", code, frame.at)

    def _jobs_by_key(self, jobs: Sequence[ListedJob]) -> dict[_JobKey, ListedJob]:
        """Return jobs by name (or PID) and whether they wait, without those that have ended and processes of named jobs."""
        listed = [job for job in jobs if job.name is not None or job.pid not in self._pids_of_named_jobs]
        # The end of an MPS server is an event of its daemon.
        return {
            (job.name or job.pid, job.line is not None): job
            for job in listed
            if job.state != ENDED and program_of(job) != MPS_SERVER
        }

    def _gpu_events(self, before: Frame, frame: Frame) -> Iterator[Event]:
        """Yield what has happened to the GPUs: silent, back, throttled (once a minute), Xids."""
        earlier = {gpu.index: gpu for gpu in before.snapshot.gpus}
        for gpu in frame.snapshot.gpus:
            old = earlier.get(gpu.index)
            if gpu.error is not None and (old is None or old.error is None):
                yield Event(
                    frame.at, gpu.error if gpu.error.startswith("GPU") else f"GPU {gpu.index}: {gpu.error}", "bad"
                )
            if gpu.error is None and old is not None and old.error is not None:
                yield Event(frame.at, f"GPU {gpu.index} answers again", "good")
            sensors = frame.sensors.get(gpu.index, GpuSensors())
            for reason in sensors.slowed_by or ():
                if frame.at >= self._slowed_until.get((gpu.index, reason), 0.0):
                    yield Event(frame.at, f"GPU {gpu.index} is throttled: {reason}", "warn")
                self._slowed_until[gpu.index, reason] = frame.at + _QUIET_SECONDS
        # Without the earlier ones it is unknown which of them are new.
        new_xids = () if before.xids is None else (frame.xids or ())[len(before.xids) :]
        for xid in new_xids:
            yield Event(frame.at, f"Xid {xid.number} of the GPU at {xid.pci}", "bad")

    def _daemon_events(self, before: Frame, frame: Frame) -> Iterator[Event]:
        """Yield what has happened to MPS daemons and their servers between two frames."""
        # By GPU, too: a daemon of a recording has no PID.
        present = {(daemon.pid, daemon.gpu_index): daemon for daemon in frame.snapshot.daemons}
        earlier = {(daemon.pid, daemon.gpu_index): daemon for daemon in before.snapshot.daemons}
        for key, old in earlier.items():
            where = f"GPU {old.gpu_index}" if old.gpu_index is not None else f"{old.pipe_directory}"
            daemon = present.get(key)
            if daemon is None:
                # A transient daemon comes and goes with its jobs, which have events of their own.
                if not old.transient:
                    yield Event(frame.at, f"the MPS daemon of {where} ended", "warn")
                continue
            servers = {server.pid: server for server in daemon.servers}
            for server in old.servers:
                server_now = servers.get(server.pid)
                if server_now is None:
                    clients = counted(len(server.clients), "client")
                    yield Event(frame.at, f"the MPS server of {where} died, with {clients}", "bad")
                elif server_now.status != server.status:
                    yield Event(
                        frame.at,
                        f"the MPS server of {where} is {server_now.status}",
                        "bad" if server_now.status == "FAULT" else "text",
                    )


def _job_changes(old: ListedJob | None, job: ListedJob, at: float) -> Iterator[Event]:
    """Yield what is new about a job; ``old`` None: it is new itself."""
    title = job_title(job)
    if old is None:
        yield Event(at, f"{title} started{f' on {job.device}' if job.device else ''}")
    elif old.state != job.state and job.state == RUNNING:
        yield Event(at, f"{title} {'is back on its GPU' if old.state in {'returning', 'out'} else 'goes on'}", "good")
    elif old.state != job.state:
        yield Event(at, f"{title} {_STATE_TEXTS.get(job.state, job.state)}", "bad" if job.state == "lost" else "warn")
    if exceeds_limit(job) and not (old is not None and exceeds_limit(old)):
        held = format_bytes(job.memory_used_bytes)
        limit = format_bytes(job.whole_limit_bytes)
        yield Event(at, f"{title} is over its limit: {held} of {limit}", "bad")


def _end_event(title: str, code: int | None, at: float) -> Event:
    text = "was not started" if code is None else f"ended with exit code {code}"
    return Event(at, f"{title} {text}", "bad" if code else "good")


def exceeds_limit(job: ListedJob) -> bool:
    """Return whether a job holds more memory than its limit allows on all its devices."""
    limit = job.whole_limit_bytes
    return limit is not None and job.memory_used_bytes is not None and job.memory_used_bytes > limit
