"""``gpushare observe``: record how GPUs are used; done by `gpushare/measure/`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gpushare.base.errors import BadUsage
from gpushare.base.model import Gpu
from gpushare.base.selection import select
from gpushare.base.units import counted, format_bytes, format_duration, parse_seconds
from gpushare.cli.options import (
    GPU_OPTION,
    INTERVAL,
    Command,
    Refused,
    note,
    option,
    positive_time,
    refuse,
    settings,
    verb,
)
from gpushare.measure.dcgm import read_measured
from gpushare.measure.observe import header_for
from gpushare.measure.observe import observe as record
from gpushare.measure.recording import Recording, RecordingFile, Underuse, find_underuse
from gpushare.show.result import Column, Result, Table, format_date
from gpushare.show.status import gpu_errors, is_lost
from gpushare.show.waiting import progress_line


@verb(Command)
def observe(
    seconds: str = option("--for", "TIME", "How long to record: 90s, 10m, 8h.", default="10m"),
    interval: str = option("--interval", "TIME", "Time between two samples.", default="1s"),
    gpu: str | None = GPU_OPTION,
    to: str | None = option("--to", "FILE", "A new file. [default: gpushare-DATE-TIME.jsonl in this directory]"),
    read: str | None = option("--from", "FILE", "Show an earlier recording instead, or what dcgm-exporter measured."),
) -> Any:
    """Record the use of GPUs and of the processes on them, and say which GPUs are underused.

    SM activity (GPM, Hopper and later) is the share of the SMs that worked. Utilization is only the time in which some
    kernel ran, and is used where there is no GPM. The SM activity of a process is known while it is alone on its GPU or
    MIG instance; next to others, utilization is the share of the time that it got. Ctrl-C ends the recording early and
    keeps it, with exit code 0. The file is JSON Lines, contains no command lines, and can be read even if it is cut
    off. An existing file is never overwritten. gpushare also keeps what your own processes used while they were alone
    on their GPU, for run --wait.
    """
    refuse((Refused("--from", "--to --gpu", "all of the recording is shown", "--from hour.jsonl"),))
    if read is not None:
        return _recording_result(read_measured(read), Path(read))
    length, step = parse_seconds(seconds), positive_time("--interval", interval, **INTERVAL)
    if length < step:
        raise BadUsage(
            f"--for {seconds} is shorter than one interval ({interval})",
            "record longer, for example: gpushare observe --for 10m --interval 1s",
            code="bad_duration",
        )
    host = settings.connect()
    # None: all GPUs.
    indexes = None
    if gpu is not None:
        devices = select(gpu, host.nvml.identities())
        indexes = [device.gpu.index for device in devices]
        for device in devices:
            if device.mig is not None:
                note(f"all of GPU {device.gpu.index} is recorded, with its other MIG instances")
    header = header_for(host, indexes, step)
    path = Path(to) if to is not None else Path(time.strftime("gpushare-%Y%m%d-%H%M%S.jsonl"))
    with RecordingFile(path, header) as file:
        note(f"recording for {format_duration(length)} to {path}; Ctrl-C ends it and keeps what was recorded")
        try:
            with progress_line(quiet=settings.quiet) as draw:

                def show_progress(seconds_over: float) -> None:
                    """Draw how many seconds of the recording are over."""
                    total = max(1, round(length))
                    draw("recording; Ctrl-C ends and keeps it", int(seconds_over), total, length - seconds_over)

                recording = record(host, header, file, seconds=length, progress=show_progress)
        except KeyboardInterrupt:
            # There is no sample yet.
            file.discard()
            raise
    result = _recording_result(recording, path)
    # A lost GPU stays lost; one that was silent for a while has a note.
    errors = gpu_errors(
        Gpu(index=use.gpu.index, error=use.error) for use in recording.gpus if use.error and is_lost(use.error)
    )
    return replace(result, errors=errors)


def _recording_notes(recording: Recording, path: Path) -> list[str]:
    """Return what the user should know about a recording, and what can be done with it."""
    notes = list(recording.header.warnings)
    if recording.reason == "interrupted":
        notes.append(f"ended early; {recording.samples} samples were kept")
    if recording.reason is None:
        notes.append("the recording has no end: it is still being written, or its program died")
    if recording.damaged_lines:
        notes.append(f"{counted(recording.damaged_lines, 'unreadable line')} skipped")
    if recording.missed:
        notes.append(f"{counted(recording.missed, 'sample')} not taken in time; give a longer --interval")
    if recording.dropped_processes:
        notes.append(f"{counted(recording.dropped_processes, 'short-lived process')} left out")
    notes += [
        # NVML's reasons begin with the GPU already.
        f"GPU {use.gpu.index} did not answer {counted(use.unanswered, 'time')}: "
        + str(use.error).removeprefix(f"GPU {use.gpu.index}: ")
        for use in recording.gpus
        if use.unanswered
    ]
    file = shlex.quote(str(path))
    if recording.processes_known:
        notes.append(f"which way of sharing fits: gpushare advise --from {file}")
    notes.append(f"what it could save: gpushare savings --from {file} --price 2")
    return notes


@dataclass(frozen=True, kw_only=True)
class ObserveAnswer(Recording):
    """The answer of `observe`: a recording, its file, and which GPUs are underused."""

    file: str
    underused: tuple[Underuse, ...]


def _recording_result(recording: Recording, path: Path) -> Result:
    """Return a recording as a result: its GPUs and processes with their use, and the GPUs that are underused."""
    data = ObserveAnswer(**vars(recording), file=str(path), underused=tuple(find_underuse(recording)))
    header = data.header
    seen = f"{counted(data.samples, 'sample')} in {format_duration(data.seconds)}"
    text = f"{header.host}   driver {header.driver or '-'}   {format_date(header.started_at)}   {seen}\n{data.file}"
    no_process = "no process was seen" if data.processes_known else "processes were not recorded"
    tables = (
        ("gpus", "GPUs", _GPU_COLUMNS, data.gpus, None),
        ("processes", "processes", _PROCESS_COLUMNS, data.processes, no_process),
        ("underused", "underused", _UNDERUSED_COLUMNS, data.underused, "no GPU is underused"),
    )
    return Result(
        data=data,
        text=text,
        tables=tuple(
            Table(name=name, title=title, columns=columns, rows=rows, empty=empty)
            for name, title, columns, rows, empty in tables
        ),
        notes=tuple(_recording_notes(recording, path)),
    )


def _percent_column(key: str, title: str, of: Callable[[Any], float | None], rank: int = 0) -> Column:
    return Column(key, title, right=True, rank=rank, of=of, format="{:.1f}".format)


def _activity_columns(rank_of_max: int) -> tuple[Column, ...]:
    """Return the columns with the mean, 95th percentile and maximum of the activity in percent."""
    return (
        _percent_column("activity_mean", "mean %", lambda use: getattr(use.activity, "mean", None)),
        _percent_column("activity_p95", "p95 %", lambda use: getattr(use.activity, "p95", None)),
        _percent_column("activity_max", "max %", lambda use: getattr(use.activity, "max", None), rank_of_max),
    )


_PEAK: Final = Column("memory_peak_bytes", "peak memory", right=True, format=format_bytes)
_GPU_COLUMNS: Final = (
    Column("gpu", "GPU", right=True, of=lambda use: use.gpu.index),
    Column("name", "name", rank=3, of=lambda use: use.gpu.name),
    Column("source", "from", rank=2),
    *_activity_columns(rank_of_max=1),
    _percent_column("utilization_mean", "util mean %", lambda use: getattr(use.utilization, "mean", None), 2),
    _percent_column("busy_percent", "busy %", lambda use: None if use.busy_share is None else 100 * use.busy_share, 2),
    _PEAK,
    Column(
        "memory_total_bytes", "of", right=True, rank=1, of=lambda use: use.gpu.memory_total_bytes, format=format_bytes
    ),
    Column("unanswered", "no answer", right=True, rank=1, optional=True, of=lambda use: use.unanswered or None),
)
_PROCESS_COLUMNS: Final = (
    Column("gpu", "GPU", right=True, of=lambda use: use.process.gpu),
    Column("pid", "PID", right=True, of=lambda use: use.process.pid),
    Column("job", "job", rank=2, least=8, optional=True, of=lambda use: use.process.job),
    Column("name", "name", least=8, of=lambda use: use.process.name),
    Column("user", "user", rank=1, of=lambda use: use.process.user),
    Column("container", "container", rank=4, optional=True, of=lambda use: use.process.container),
    Column("source", "from", rank=3),
    *_activity_columns(rank_of_max=4),
    Column("pattern", "pattern", rank=1),
    _PEAK,
    Column("seen_from_seconds", "from s", right=True, rank=2),
    Column("seen_to_seconds", "to s", right=True, rank=2),
)
_UNDERUSED_COLUMNS: Final = (
    Column("gpu", "GPU", right=True),
    Column("kind", "finding", rank=1),
    Column("why", "why", wrap=True),
)
