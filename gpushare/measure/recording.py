"""A recording of GPU and per-process use: written so that a crash leaves it readable, read, summed up and judged."""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import math
import os
import shlex
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from gpushare.base import values
from gpushare.base.errors import BadUsage, GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.model import MPS_SERVER, MigInstance
from gpushare.base.typed import Count, Within, parse_typed
from gpushare.base.units import MIB, counted, format_bytes
from gpushare.host.written_file import open_new
from gpushare.measure.statistics import Distribution, Histogram

SCHEMA: Final = 1
MARK: Final = "gpushare_recording"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Use at one moment. ``sm_percent`` (GPM) is over the time since the sample before."""

    utilization_percent: float | None = None
    sm_percent: float | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PartSample(Figures):
    """One MIG device, or one process on a GPU, at one moment; ``id`` is that of its record."""

    id: int


@dataclass(frozen=True, kw_only=True)
class GpuSample(Figures):
    """One GPU at one moment; ``way`` is how it is shared, as a `Way`."""

    index: int
    power_watts: float | None = None
    temperature_celsius: int | None = None
    sm_clock_mhz: int | None = None
    way: str | None = None
    instances: tuple[PartSample, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All GPUs and the processes on them at one moment, ``at`` seconds after the start."""

    at: float
    gpus: tuple[GpuSample, ...]
    processes: tuple[PartSample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedGpu:
    """One GPU of the header."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: Count | None = None
    mig_enabled: bool | None = None
    power_limit_watts: float | None = None


@values.dataclass(frozen=True, kw_only=True)
class RecordedInstance(MigInstance):
    """One MIG device as it was when it was first seen, and again when it got another name; its use is in the samples."""

    id: int


@dataclass(frozen=True, kw_only=True)
class RecordedProcess:
    """One process on one GPU. The same PID with another start (clock ticks since boot) is another process."""

    id: int
    gpu: int
    pid: int
    started: int | None = None
    name: str | None = None
    user: str | None = None
    container: str | None = None
    mps: bool = False
    graphics: bool = False
    mig: str | None = None
    # Its job; this and the fields below are as they were when the process was first seen.
    job: str | None = None
    role: str | None = None
    threads_percent: float | None = None
    # The limit of the job on each of its devices.
    memory_limit_bytes: int | None = None
    # The memory limit of the process alone, as a client of MPS.
    client_limit_bytes: int | None = None
    slice_us: int | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a recording begins with."""

    host: str
    # Seconds since 1970.
    started_at: Annotated[float, Within(0, 1e11)]
    # `observe` takes at most ten samples a second; a file of DCGM may have others.
    interval_seconds: Annotated[float, Within(1e-6, 1e9)]
    gpus: tuple[RecordedGpu, ...]
    driver: str | None = None
    warnings: tuple[str, ...] = ()


def sample_line(sample: Sample) -> str:
    gpus = [[gpu.index, gpu.error] if gpu.error is not None else _gpu_row(gpu) for gpu in sample.gpus]
    return _json_line({"t": sample.at, "gpus": gpus, "processes": [_row(process) for process in sample.processes]})


def _row(sample: PartSample) -> list[Any]:
    return [sample.id, sample.utilization_percent, sample.sm_percent, sample.memory_used_bytes]


def _gpu_row(gpu: GpuSample) -> list[Any]:
    """Return the values of a GPU as `_gpu_sample` reads them: without names, because there are days of samples."""
    figures = [gpu.index, gpu.utilization_percent, gpu.sm_percent, gpu.memory_used_bytes]
    instances = [_row(instance) for instance in gpu.instances]
    return [*figures, gpu.power_watts, gpu.temperature_celsius, gpu.sm_clock_mhz, gpu.way, instances]


def _json_line(value: Mapping[str, Any]) -> str:
    # ASCII: a name may contain half of a character.
    return json.dumps(value, separators=(",", ":")) + "\n"


def sample_of(raw: Mapping[str, Any]) -> Sample:
    """Parse the sample of a line; KeyError, TypeError or ValueError if it is not one."""
    return Sample(
        at=float(raw["t"]),
        gpus=tuple(_gpu_sample(*row) for row in raw["gpus"]),
        processes=tuple(PartSample(id=int(number), **_figure_fields(*row)) for number, *row in raw["processes"]),
    )


def _gpu_sample(index: Any, first: Any, *rest: Any) -> GpuSample:
    """Return the sample of a GPU from its row, as `_gpu_row` writes it."""
    if isinstance(first, str):
        return GpuSample(index=int(index), error=first)
    sm, memory, power, temperature, clock, way, instances = rest
    return GpuSample(
        index=int(index),
        **_figure_fields(first, sm, memory),
        power_watts=_number(power),
        temperature_celsius=None if temperature is None else int(temperature),
        sm_clock_mhz=None if clock is None else int(clock),
        way=None if way is None else str(way),
        instances=tuple(PartSample(id=int(number), **_figure_fields(*row)) for number, *row in instances),
    )


def _figure_fields(utilization: Any, sm: Any, memory: Any) -> dict[str, Any]:
    """Return the fields of `Figures` from the values of a row."""
    return {
        "utilization_percent": _number(utilization),
        "sm_percent": _number(sm),
        "memory_used_bytes": None if memory is None else int(memory),
    }


def _number(value: Any) -> float | None:
    """Return a number of a row as a float; ValueError: it is infinite or none."""
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


# A sample counts as busy from here on: a kernel ran (utilization is in whole percent; GPM is finer).
BUSY_UTILIZATION_PERCENT: Final = 1.0
BUSY_SM_PERCENT: Final = 0.1
# Next to processes that used this much of a GPU, no visible work of another one does not prove that it had none: the
# driver books each of its periods on one process (H200, driver 580: two busy ones show 0 and 99 in turn).
CROWDED_PERCENT: Final = 80.0
# A working process is seen sooner or later: this many samples without any work mean that it has none.
IDLE_SAMPLES: Final = 30
# In days of recording, at most this many ended processes are kept; those with the fewest samples are dropped.
MOST_PROCESSES: Final = 5000
# Busy in fewer samples than the first is interactive; in more than the second, without peaks, steady; else bursty.
INTERACTIVE_BELOW: Final = 0.2
STEADY_FROM: Final = 0.8
CONTENDED_FROM: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Use:
    """How a GPU, or a process on one, was used. ``busy_share`` is the share of the samples in which a kernel ran.

    Inconclusive samples do not count; None: too few are left.
    """

    samples: int
    # GPU utilization, in percent; None: unknown.
    utilization: Distribution | None
    # SM activity (GPM), in percent; None: unknown.
    sm: Distribution | None
    # The share of the samples in which a kernel ran; None: too few samples.
    busy_share: float | None
    memory_peak_bytes: int | None
    json_properties: ClassVar[tuple[str, ...]] = ("activity", "source")

    @property
    def activity(self) -> Distribution | None:
        """Return SM activity (GPM; of a process, while it was alone on its device), else utilization."""
        return self.sm or self.utilization

    @property
    def source(self) -> str | None:
        """Return where `activity` is from: ``gpm`` or ``utilization``."""
        if self.sm:
            return "gpm"
        return "utilization" if self.utilization else None


@dataclass(frozen=True, kw_only=True)
class GpuUse(Use):
    """How one GPU was used. ``samples`` are those in which it answered, ``unanswered`` the others."""

    gpu: RecordedGpu
    unanswered: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessUse(Use):
    """How one process used one GPU; ``seen_from_seconds`` and ``seen_to_seconds`` are seconds after the start.

    ``contended_share`` is the share of the samples in which another process worked on the same GPU. Utilization is then
    what the process got, and it may want more.
    """

    process: RecordedProcess
    seen_from_seconds: float
    seen_to_seconds: float
    contended_share: float = 0.0
    json_properties: ClassVar = (*Use.json_properties, "pattern")

    @property
    def pattern(self) -> str | None:
        """Return when the process works: ``interactive``, ``bursty`` or ``steady``; None when that is unknown.

        Interactive: busy in fewer than 20 % of the samples. Steady: busy in at least 80 % of them, and the 95th
        percentile is at most twice the mean plus 5 points. Bursty: all between. Next to others that work (in more than
        10 % of the samples) peaks are ignored: they come from how the driver books time.
        """
        if self.busy_share is None or self.activity is None:
            return None
        if self.busy_share < INTERACTIVE_BELOW:
            return "interactive"
        even = self.contended_share > CONTENDED_FROM or self.activity.p95 <= 2 * self.activity.mean + 5
        return "steady" if self.busy_share >= STEADY_FROM and even else "bursty"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The summary of a recording. ``reason`` is finished, interrupted, failed, or None if the file has no end."""

    header: Header
    seconds: float
    samples: int
    gpus: tuple[GpuUse, ...]
    processes: tuple[ProcessUse, ...]
    # Samples that were not taken in time.
    missed: int = 0
    reason: str | None = None
    damaged_lines: int = 0
    dropped_processes: int = 0
    # Whether processes were recorded at all.
    processes_known: bool = True


@dataclass
class _Sums:
    """What the samples of a GPU, or of a process on one, add up to."""

    utilization: Histogram = field(default_factory=Histogram)
    sm: Histogram = field(default_factory=Histogram)
    samples: int = 0
    # Of the samples: a kernel ran; it is known whether one did; that tells something; another process worked.
    busy: int = 0
    known: int = 0
    conclusive: int = 0
    contended: int = 0
    peak: int | None = None
    seen_from_seconds: float = 0.0
    seen_to_seconds: float = 0.0
    unanswered: int = 0
    error: str | None = None

    def add(self, at: float, sample: GpuSample | PartSample, others: float = 0.0) -> None:
        """Add a sample; ``others`` is the utilization in percent of the other processes on the GPU."""
        if not self.samples:
            self.seen_from_seconds = at
        self.samples += 1
        self.seen_to_seconds = at
        utilization = sample.utilization_percent
        sm = sample.sm_percent
        memory = sample.memory_used_bytes
        self.utilization.add(utilization)
        self.sm.add(sm)
        self.contended += others >= BUSY_UTILIZATION_PERCENT
        if utilization is not None or sm is not None:
            busy = (utilization or 0.0) >= BUSY_UTILIZATION_PERCENT or (sm or 0.0) >= BUSY_SM_PERCENT
            self.known += 1
            # Next to others that fill the GPU, work may not be seen.
            self.conclusive += busy or others < CROWDED_PERCENT
            self.busy += busy
        if memory is not None:
            self.peak = max(self.peak or 0, memory)

    def use_fields(self) -> dict[str, Any]:
        """Return the sums as the fields of `Use`."""
        # A process that was never seen to work in many samples has no work, even next to busy ones.
        busy_share = 0.0 if self.known >= IDLE_SAMPLES and not self.busy else None
        # Else too few samples tell whether it worked.
        if self.known and 2 * self.conclusive >= self.known:
            busy_share = round(self.busy / self.conclusive, 4)
        return {
            "samples": self.samples,
            "utilization": self.utilization.distribution(),
            "sm": self.sm.distribution(),
            "busy_share": busy_share,
            "memory_peak_bytes": self.peak,
        }


class Tally:
    """Sums up samples, in memory that does not grow with time."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.samples = 0
        self.seconds = 0.0
        self.dropped = 0
        self._gpus = {gpu.index: _Sums() for gpu in header.gpus}
        self._processes: dict[int, tuple[RecordedProcess, _Sums]] = {}

    def add_process(self, process: RecordedProcess) -> None:
        """Add a process, before its first sample."""
        self._processes.setdefault(process.id, (process, _Sums()))

    def add(self, sample: Sample) -> None:
        """Add one sample; processes that `add_process` does not know are left out."""
        self.samples += 1
        self.seconds = max(self.seconds, sample.at)
        for gpu in sample.gpus:
            use = self._gpus.get(gpu.index)
            if use is None:
                continue
            if gpu.error is not None:
                use.unanswered += 1
                use.error = gpu.error
            else:
                use.add(sample.at, gpu)
        rows = [(seen, *self._processes[seen.id]) for seen in sample.processes if seen.id in self._processes]
        of_all: defaultdict[int, float] = defaultdict(float)
        for seen, process, _ in rows:
            of_all[process.gpu] += seen.utilization_percent or 0.0
        for seen, process, sums in rows:
            sums.add(sample.at, seen, others=of_all[process.gpu] - (seen.utilization_percent or 0.0))
        if len(self._processes) > MOST_PROCESSES + MOST_PROCESSES // 10:
            self._drop_ended({seen.id for seen in sample.processes})

    def _drop_ended(self, present: set[int]) -> None:
        """Forget the ended processes with the fewest samples, so that days of them fit into memory."""
        ended = [(use.samples, key) for key, (_, use) in self._processes.items() if key not in present]
        for _, key in sorted(ended)[: len(self._processes) - MOST_PROCESSES]:
            del self._processes[key]
            self.dropped += 1

    def recording(self, *, missed: int = 0, reason: str | None = None, damaged_lines: int = 0) -> Recording:
        """Return the summary so far."""
        return Recording(
            header=self.header,
            seconds=self.seconds,
            samples=self.samples,
            gpus=tuple(
                GpuUse(gpu=gpu, unanswered=sums.unanswered, error=sums.error, **sums.use_fields())
                for gpu in self.header.gpus
                for sums in [self._gpus[gpu.index]]
            ),
            processes=tuple(
                ProcessUse(
                    process=process,
                    seen_from_seconds=sums.seen_from_seconds,
                    seen_to_seconds=sums.seen_to_seconds,
                    contended_share=round(sums.contended / sums.samples, 4),
                    **sums.use_fields(),
                )
                for process, sums in self._processes.values()
                if sums.samples
            ),
            missed=missed,
            reason=reason,
            damaged_lines=damaged_lines,
            dropped_processes=self.dropped,
        )


# What a line raises that is none of ours, or was cut off.
_DAMAGED: Final = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
# Enough for thousands of GPUs and processes.
_LONGEST_LINE: Final = 4 * 1024**2
_MAKE_ONE: Final = "make one: gpushare observe --for 10m"


class RecordingFile(contextlib.AbstractContextManager["RecordingFile"]):
    """A recording being written: one line per write, so that it can be read whenever it ends."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        try:
            # Unbuffered: a line is written whole, whatever ends the program next.
            self._file = open(open_new(path), "wb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            if error.strerror != os.strerror(errno.EEXIST):
                raise _unwritable_error(path, error) from None
            raise BadUsage(
                f"{path} already exists", "give another name with --to, or remove it first", code="file_exists"
            ) from None
        self._write(_json_line({MARK: SCHEMA, **asdict(header)}))

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_record(self, record: RecordedProcess | RecordedInstance) -> None:
        """Write a process or an instance, before its first sample; OperationFailed where it cannot be written."""
        key = "process" if isinstance(record, RecordedProcess) else "instance"
        self._write(_json_line({key: asdict(record)}))

    def write_sample(self, sample: Sample) -> None:
        """Write a sample; OperationFailed where it cannot be written."""
        self._write(sample_line(sample))

    def write_end(self, at: float, reason: str, missed: int) -> None:
        """Write the end; OperationFailed where it cannot be written."""
        self._write(_json_line({"end": {"t": at, "reason": reason, "missed": missed}}))

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Close and remove the file: there is no sample in it."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _write(self, line: str) -> None:
        data = line.encode("ascii")
        try:
            # Unbuffered: a write may take only a part.
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise _unwritable_error(self.path, error) from None


def _unwritable_error(path: Path, error: OSError) -> GpushareError:
    """Return the error of a recording that cannot be written; where a disk is full, what is there can be read."""
    message = f"cannot write {path}: {error.strerror or error}"
    hint = "give a file in a directory that you may write: --to /tmp/gpus.jsonl"
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
        hint = f"{path} can be read as far as it goes: gpushare observe --from {shlex.quote(str(path))}"
    if isinstance(error, PermissionError):
        return NoPermission(message, hint, code="not_written")
    return OperationFailed(message, hint, code="not_written")


class Samples:
    """The samples of a recording, one at a time: of days of them only the times and their offsets in the file are kept.

    ``processes`` has the processes by their id, ``instances`` the MIG devices. Raises as `read_recording`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.processes: dict[int, RecordedProcess] = {}
        self.instances: dict[int, RecordedInstance] = {}
        self._times = array("d")
        self._offsets = array("Q")
        with _open_recording(self.path) as file:
            self.header = _read_header(self.path, file.readline(_LONGEST_LINE))
            offset = file.tell()
            for line in iter(lambda: file.readline(_LONGEST_LINE), ""):
                self._note_line(line, offset)
                offset = file.tell()
        if not self._times:
            raise OperationFailed(f"the recording {self.path} has no samples", _MAKE_ONE, code="empty_recording")

    def _note_line(self, line: str, offset: int) -> None:
        """Note where a sample lies in the file, or what a line says of a process or MIG device."""
        with contextlib.suppress(*_DAMAGED):
            if line.startswith('{"t":'):
                self._times.append(float(line[5:].partition(",")[0]))
                self._offsets.append(offset)
            elif line.startswith('{"process":'):
                process = parse_typed(RecordedProcess, json.loads(line)["process"], more_keys=True)
                self.processes[process.id] = process
            elif line.startswith('{"instance":'):
                instance = parse_typed(RecordedInstance, json.loads(line)["instance"], more_keys=True)
                self.instances[instance.id] = instance

    def __len__(self) -> int:
        return len(self._times)

    def index_at(self, seconds: float) -> int:
        """Return the last sample at or before a time after the start, or the first one."""
        return max(0, bisect.bisect_right(self._times, seconds) - 1)

    def time(self, index: int) -> float:
        """Return when a sample was taken, in seconds after the start."""
        return self._times[index]

    def read(self, start: int, end: int) -> list[Sample]:
        """Return the samples of a range; one that is damaged is left out."""
        samples = []
        with _open_recording(self.path) as file:
            for offset in self._offsets[start:end]:
                file.seek(offset)
                with contextlib.suppress(*_DAMAGED):
                    samples.append(sample_of(json.loads(file.readline(_LONGEST_LINE))))
        return samples


@contextlib.contextmanager
def _open_recording(path: Path) -> Iterator[Any]:
    """Open a recording to read; what the system refuses becomes an error for users."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            yield file
    except FileNotFoundError:
        raise NotFound(f"file {path} does not exist", _MAKE_ONE, code="no_recording") from None
    except PermissionError:
        raise NoPermission(
            f"may not read {path}", f"check its mode: ls -l {shlex.quote(str(path))}", code="not_readable"
        ) from None
    except OSError as error:
        raise OperationFailed(
            f"cannot read {path}: {error.strerror or error}", _MAKE_ONE, code="not_readable"
        ) from None


def read_recording(path: str | Path) -> Recording:
    """Return the summary of a recording; damaged lines are counted and skipped, so that a file may be cut off."""
    damaged = 0
    missed = 0
    reason = None
    # Streamed, so that days of samples need little memory.
    with _open_recording(Path(path)) as file:
        tally = Tally(_read_header(Path(path), file.readline(_LONGEST_LINE)))
        # A file that is not ours may have no line ends.
        for line in iter(lambda: file.readline(_LONGEST_LINE), ""):
            try:
                raw = json.loads(line)
                if "t" in raw:
                    tally.add(sample_of(raw))
                elif "process" in raw:
                    tally.add_process(parse_typed(RecordedProcess, raw["process"], more_keys=True))
                elif "end" in raw:
                    # Both or none: a damaged line counts for nothing.
                    missed, reason = int(raw["end"]["missed"]), str(raw["end"]["reason"])
            except _DAMAGED:
                # A crash cuts off the last line; a full disk or a lost block damages one in the middle.
                damaged += 1
    if not tally.samples:
        raise OperationFailed(f"the recording {path} has no samples", _MAKE_ONE, code="empty_recording")
    return tally.recording(missed=missed, reason=reason, damaged_lines=damaged)


def _read_header(path: Path, line: str) -> Header:
    """Return the header from the first line; the errors tell an empty, a foreign and a newer file apart."""
    if not line:
        raise OperationFailed(f"{path} is empty", _MAKE_ONE, code="empty_recording")
    try:
        raw = json.loads(line)
        schema = raw[MARK]
        if isinstance(schema, int) and schema > SCHEMA:
            raise NotSupported(
                f"{path} is a recording of schema {schema}; this gpushare reads up to {SCHEMA}",
                "read it with the gpushare that wrote it, or a newer one",
                code="newer_recording",
            )
        if schema != SCHEMA:
            raise ValueError(schema)
        header: Header = parse_typed(Header, raw, more_keys=True)
    except _DAMAGED:
        raise OperationFailed(f"{path} is not a recording of gpushare", _MAKE_ONE, code="not_a_recording") from None
    return header


def workloads_of(recording: Recording) -> tuple[ProcessUse, ...]:
    """Return how the compute processes of a recording used their GPU, without MPS servers and desktop programs."""
    # The driver books the work of MPS clients on the server.
    return tuple(use for use in recording.processes if _is_user_program(use) and not use.process.graphics)


# Work in fewer samples than this does not count: monitoring programs open a context now and then.
NO_WORK_SHARE: Final = 0.01
# A bare CUDA context holds up to about 500 MiB; less than this is no data.
HELD_BYTES: Final = 256 * MIB
# Below this mean a GPU is a candidate for sharing; its 95th percentile, which is shown, tells whether it has peaks.
LOW_MEAN_PERCENT: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Underuse:
    """One finding. ``kind`` is empty, held_idle, low or idle_process; ``why`` is for people."""

    gpu: int
    kind: str
    why: str
    pids: tuple[int, ...] = ()


def find_underuse(recording: Recording) -> tuple[Underuse, ...]:
    """Return what `observe` reports as underused, by GPU.

    empty: no process was on it. held_idle: memory is held, and no kernel ran in 99 % of the samples. low: the mean is
    below 30 %. idle_process: a process that holds memory without work next to others that work.
    """
    underuses: list[Underuse] = []
    for use in recording.gpus:
        index = use.gpu.index
        processes = [each for each in recording.processes if each.process.gpu == index]
        activity = None if use.busy_share is None else use.activity
        if activity is not None and use.busy_share is not None and use.busy_share < NO_WORK_SHARE:
            underuses.append(_idle_gpu(use, processes, processes_known=recording.processes_known))
            continue
        if activity is not None and activity.mean < LOW_MEAN_PERCENT:
            measure = "SM activity" if use.sm else "utilization"
            figures = f"{measure} mean {activity.mean:g} %, 95th percentile {activity.p95:g} %"
            why = f"low: {figures}; a candidate for sharing"
            underuses.append(Underuse(gpu=index, kind="low", why=why, pids=_pids(filter(_is_user_program, processes))))
        underuses += _idle_processes(index, processes)
    return tuple(underuses)


def _idle_gpu(use: GpuUse, processes: list[ProcessUse], *, processes_known: bool) -> Underuse:
    """Return the finding for a GPU without work: held_idle if memory is held on it, else empty."""
    holders = [each for each in processes if _holds_memory(each)]
    gpu_peak = use.memory_peak_bytes or 0
    if holders:
        # They may have held their memory at different times: the GPU's own peak bounds the sum.
        together = sum(holder.memory_peak_bytes or 0 for holder in holders)
        held = f"{counted(len(holders), 'process')}, {format_bytes(min(together, gpu_peak or together))}"
    elif not processes_known and gpu_peak >= HELD_BYTES:
        held = format_bytes(gpu_peak)
    else:
        why = "idle: no process was on it" if processes_known and not processes else "idle: no kernel ran"
        return Underuse(gpu=use.gpu.index, kind="empty", why=why, pids=_pids(processes))
    why = f"memory is held with no work: {held}"
    return Underuse(gpu=use.gpu.index, kind="held_idle", why=why, pids=_pids(holders))


def _idle_processes(gpu: int, processes: list[ProcessUse]) -> list[Underuse]:
    """Return the processes that held memory without work, next to others that worked."""
    return [
        Underuse(
            gpu=gpu,
            kind="idle_process",
            why=f"PID {use.process.pid} ({use.process.name or 'unknown'}) held {format_bytes(use.memory_peak_bytes)} with no work",
            pids=(use.process.pid,),
        )
        for use in processes
        if _holds_memory(use) and use.busy_share is not None and use.busy_share < NO_WORK_SHARE
    ]


def _pids(uses: Iterable[ProcessUse]) -> tuple[int, ...]:
    return tuple(use.process.pid for use in uses)


def _holds_memory(use: ProcessUse) -> bool:
    return (use.memory_peak_bytes or 0) >= HELD_BYTES and _is_user_program(use)


def _is_user_program(use: ProcessUse) -> bool:
    return use.process.name != MPS_SERVER
