"""What a recording is made of: its header, processes and samples, and each as a line of the file. Pure.

The file is JSON Lines, one object a line, so that what was written before a crash can be read:

- ``{"gpushare_recording": 1, "host", "driver", "started_at", "interval_seconds", "gpus": [...], ...}``: the header.
- ``{"process": {"id", "gpu", "pid", "started_at", "name", ...}}``: a process, when it is seen first.
- ``{"t": seconds, "gpus": [[index, utilization, sm, memory]], "processes": [[id, utilization, sm, memory]]}``: a
  sample, ``t`` after the start. Percent and bytes; null is unknown. A GPU that did not answer is ``[index, "why"]``.
- ``{"end": {"t", "reason", "missed"}}``: the end, if it came in order.

Command lines stay out of it: they may hold secrets, and a recording is passed on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

SCHEMA: Final = 1
MARK: Final = "gpushare_recording"


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one moment. ``sm_percent`` (GPM) is over the time since the sample before."""

    index: int
    utilization_percent: float | None = None
    sm_percent: float | None = None
    memory_used_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """One process on one GPU at one moment; ``id`` is that of its `RecordedProcess`."""

    id: int
    utilization_percent: float | None = None
    sm_percent: float | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look: seconds since the start, GPUs, and who was on them."""

    at: float
    gpus: tuple[GpuSample, ...]
    processes: tuple[ProcessSample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedGpu:
    """One GPU of the header."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    mig_enabled: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedProcess:
    """One process on one GPU. The same PID with another start time is another process."""

    id: int
    gpu: int
    pid: int
    started_at: float | None = None
    name: str | None = None
    user: str | None = None
    container: str | None = None
    mps: bool = False
    graphics: bool = False
    mig: str | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a recording begins with."""

    host: str
    started_at: float
    interval_seconds: float
    gpus: tuple[RecordedGpu, ...]
    driver: str | None = None
    warnings: tuple[str, ...] = ()


def header_line(header: Header) -> str:
    """Return the first line of the file."""
    return _line({MARK: SCHEMA, **asdict(header)})


def process_line(process: RecordedProcess) -> str:
    """Return the line of a process."""
    return _line({"process": asdict(process)})


def sample_line(sample: Sample) -> str:
    """Return the line of a sample."""
    gpus = [
        [gpu.index, gpu.error]
        if gpu.error is not None
        else [gpu.index, gpu.utilization_percent, gpu.sm_percent, gpu.memory_used_bytes]
        for gpu in sample.gpus
    ]
    processes = [[one.id, one.utilization_percent, one.sm_percent, one.memory_used_bytes] for one in sample.processes]
    return _line({"t": sample.at, "gpus": gpus, "processes": processes})


def end_line(at: float, reason: str, missed: int) -> str:
    """Return the last line of the file."""
    return _line({"end": {"t": at, "reason": reason, "missed": missed}})


def _line(value: Mapping[str, Any]) -> str:
    # ASCII: a name may hold half of a character.
    return json.dumps(value, separators=(",", ":")) + "\n"


def header_of(raw: Mapping[str, Any]) -> Header:
    """Return the header of a file's first line; KeyError, TypeError or ValueError where it is none."""
    return Header(
        host=str(raw["host"]),
        driver=None if raw.get("driver") is None else str(raw["driver"]),
        started_at=float(raw["started_at"]),
        interval_seconds=float(raw["interval_seconds"]),
        gpus=tuple(RecordedGpu(**{**_known(RecordedGpu, gpu), "index": int(gpu["index"])}) for gpu in raw["gpus"]),
        warnings=tuple(map(str, raw.get("warnings") or ())),
    )


def process_of(raw: Mapping[str, Any]) -> RecordedProcess:
    """Return the process of a line; KeyError, TypeError or ValueError where it is none."""
    known = _known(RecordedProcess, raw)
    return RecordedProcess(**{**known, **{name: int(raw[name]) for name in ("id", "gpu", "pid")}})


def _known(kind: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    # A later gpushare may say more of the same schema.
    return {name: raw[name] for name in kind.__dataclass_fields__ if name in raw}


def sample_of(raw: Mapping[str, Any]) -> Sample:
    """Return the sample of a line; KeyError, TypeError or ValueError where it is none."""
    return Sample(
        at=float(raw["t"]),
        gpus=tuple(_gpu_sample(*row) for row in raw["gpus"]),
        processes=tuple(ProcessSample(id=int(row[0]), **_values(*row[1:])) for row in raw["processes"]),
    )


def _gpu_sample(index: Any, first: Any, *rest: Any) -> GpuSample:
    if isinstance(first, str):
        return GpuSample(index=int(index), error=first)
    return GpuSample(index=int(index), **_values(first, *rest))


def _values(utilization: Any, sm: Any, memory: Any) -> dict[str, Any]:
    return {
        "utilization_percent": _number(utilization),
        "sm_percent": _number(sm),
        "memory_used_bytes": None if memory is None else int(memory),
    }


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number
