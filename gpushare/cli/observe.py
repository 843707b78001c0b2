"""``gpushare observe``: record how GPUs are used; done by `gpushare/measure/`."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gpushare.base.errors import BadCombination, BadUsage
from gpushare.base.model import Gpu
from gpushare.base.selection import select
from gpushare.base.units import counted, format_duration, parse_seconds
from gpushare.cli.options import PLAIN, Command, GpuOption, note, settings
from gpushare.cli.status import interval as checked_interval
from gpushare.measure.dcgm import read_measured
from gpushare.measure.observe import header_for
from gpushare.measure.observe import observe as record
from gpushare.measure.recording import GpuUse, ProcessUse, Recording, RecordingFile, underused
from gpushare.show.observe import observe_result
from gpushare.show.result import jsonable
from gpushare.show.status import gpu_errors, is_lost

app = typer.Typer(**PLAIN)


@app.command(cls=Command)
def observe(
    seconds: Annotated[str, typer.Option("--for", metavar="TIME", help="How long to record: 90s, 10m, 8h.")] = "10m",
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="Time between two samples.")] = "1s",
    gpu: GpuOption = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FILE", help="A new file. [default: gpushare-DATE-TIME.jsonl in this directory]"),
    ] = None,
    read: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FILE", help="Show an earlier recording instead, or what dcgm-exporter measured."
        ),
    ] = None,
) -> Any:
    """Record the use of GPUs and of the processes on them, and say which GPUs are underused.

    SM activity (GPM, Hopper and later) is the share of the SMs that worked. Utilization is only the time in
    which some kernel ran, and is used where there is no GPM. The SM activity of a process is known while it
    is alone on its GPU or MIG instance; next to others, utilization is the share of the time that it got.
    Ctrl-C ends the recording early and keeps it, with exit code 0. The file is JSON Lines, contains no
    command lines, and can be read even if it is cut off. An existing file is never overwritten. What your own
    processes used while they were alone on their GPU is also kept for run --wait.
    """
    if read is not None:
        return _shown(read, given=(to, gpu))
    length, step = _times(seconds, interval)
    host = settings.connect()
    indexes = None
    if gpu is not None:
        devices = select(gpu, host.nvml.identities())
        indexes = [device.gpu.index for device in devices]
        for device in devices:
            if device.mig is not None:
                note(f"all of GPU {device.gpu.index} is recorded, with its other MIG instances")
    header = header_for(host, indexes, step)
    path = Path(to) if to is not None else _default_name()
    with RecordingFile(path, header) as file:
        try:
            with _progress(length, path) as progress:
                recording = record(host, header, file, seconds=length, progress=progress)
        except KeyboardInterrupt:
            # There is no sample yet.
            file.discard()
            raise
    result = _result(recording, path)
    # A lost GPU stays lost; one that was silent for a while has a note.
    errors = gpu_errors(
        Gpu(index=use.gpu.index, error=use.error) for use in recording.gpus if use.error and is_lost(use.error)
    )
    return replace(result, errors=errors, exit_code=1 if errors else 0)


def _times(seconds: str, interval: str) -> tuple[float, float]:
    length, step = parse_seconds(seconds), checked_interval(interval)
    if length < step:
        raise BadUsage(
            f"--for {seconds} is shorter than one interval ({interval})",
            "record longer, for example: gpushare observe --for 10m --interval 1s",
            code="bad_duration",
        )
    return length, step


def _default_name() -> Path:
    return Path(time.strftime("gpushare-%Y%m%d-%H%M%S.jsonl"))


@contextlib.contextmanager
def _progress(length: float, path: Path) -> Iterator[Callable[[float], None]]:
    """Yield a progress callback: a bar on a terminal, else nothing."""
    if settings.quiet or not sys.stderr.isatty():
        note(f"recording for {format_duration(length)} to {path}; Ctrl-C ends it and keeps what was recorded")
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("recording; Ctrl-C ends and keeps it"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=length)
        yield lambda done: bar.update(task, completed=done)


def _shown(read: str, given: tuple[str | None, ...]) -> Any:
    if any(one is not None for one in given):
        raise BadCombination(
            "--from cannot be combined with --to or -g", f"show all of the recording: gpushare observe --from {read}"
        )
    return _result(read_measured(read), Path(read))


def _result(recording: Recording, path: Path) -> Any:
    header = recording.header
    data = {
        "file": str(path),
        "host": header.host,
        "driver": header.driver,
        "started_at": header.started_at,
        "interval_seconds": header.interval_seconds,
        "seconds": recording.seconds,
        "samples": recording.samples,
        "missed": recording.missed,
        "reason": recording.reason,
        "damaged_lines": recording.damaged_lines,
        "dropped_processes": recording.dropped_processes,
        "processes_known": recording.processes_known,
        "gpus": [_gpu_row(use) for use in recording.gpus],
        "processes": [_process_row(use) for use in recording.processes],
        "underused": [
            {"gpu": one.gpu, "kind": one.kind, "why": one.why, "pids": list(one.pids)} for one in underused(recording)
        ],
    }
    return observe_result(data, _notes(recording, path))


def _use_row(use: GpuUse | ProcessUse) -> dict[str, Any]:
    return {
        "source": use.source,
        "activity": jsonable(use.activity),
        "sm": jsonable(use.sm),
        "utilization": jsonable(use.utilization),
        "busy_share": use.busy_share,
        "memory_peak_bytes": use.memory_peak_bytes,
        "samples": use.samples,
    }


def _gpu_row(use: GpuUse) -> dict[str, Any]:
    return {
        "gpu": use.gpu.index,
        "uuid": use.gpu.uuid,
        "name": use.gpu.name,
        **_use_row(use),
        "memory_mean_bytes": use.memory_mean_bytes,
        "memory_total_bytes": use.gpu.memory_total_bytes,
        "unanswered": use.unanswered,
        "error": use.error,
    }


def _process_row(use: ProcessUse) -> dict[str, Any]:
    process = use.process
    return {
        "gpu": process.gpu,
        "pid": process.pid,
        "name": process.name,
        "user": process.user,
        "container": process.container,
        "mps": process.mps,
        "graphics": process.graphics,
        "mig": process.mig,
        "started": process.started,
        **_use_row(use),
        "contended_share": use.contended_share,
        "pattern": use.pattern,
        "seen_from_seconds": use.seen_from,
        "seen_to_seconds": use.seen_to,
    }


def _reason(use: GpuUse) -> str:
    # NVML's reasons begin with the GPU already.
    return str(use.error).removeprefix(f"GPU {use.gpu.index}: ")


def _notes(recording: Recording, path: Path) -> list[str]:
    notes = list(recording.header.warnings)
    if recording.reason == "interrupted":
        notes.append(f"ended early; {recording.samples} samples were kept")
    if recording.reason is None:
        notes.append("the recording has no end: it is still being written, or its program died")
    if recording.damaged_lines:
        notes.append(f"{recording.damaged_lines} unreadable lines were skipped")
    if recording.missed:
        notes.append(f"{counted(recording.missed, 'sample')} not taken in time; give a longer --interval")
    if recording.dropped_processes:
        notes.append(f"{counted(recording.dropped_processes, 'short-lived process')} left out")
    notes += [
        f"GPU {use.gpu.index} did not answer {counted(use.unanswered, 'time')}: {_reason(use)}"
        for use in recording.gpus
        if use.unanswered
    ]
    if any(use.source == "utilization" for use in recording.gpus):
        notes.append("utilization says only that a kernel ran: a GPU at 100 % may still have room")

    file = shlex.quote(str(path))
    if recording.processes_known:
        notes.append(f"which way of sharing fits: gpushare advise --from {file}")
    notes.append(f"what it could save: gpushare savings --from {file} --price PRICE")
    notes.append(
        "low activity does not mean that sharing is free: a small job can suffer next to a large one; measure it"
    )
    return notes
