"""A recording of GPU and per-process use: written so that a crash leaves it readable, read, and told as workloads.

`gpushare.measure.samples` says what stands in the file, `gpushare.measure.tally` how it is summed up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpushare.errors import BadUsage, GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.host.mps_control import SERVER_PROGRAM
from gpushare.measure import samples
from gpushare.measure.samples import Header, RecordedProcess, Sample
from gpushare.measure.tally import ProcessUse, Recording, Tally

# Busy in fewer samples than this is interactive; in more than that, and without peaks, steady; else bursty.
INTERACTIVE_BELOW: Final = 0.2
STEADY_FROM: Final = 0.8
CONTENDED_FROM: Final = 0.1
# Enough for thousands of GPUs, and as many processes.
_LONGEST_LINE: Final = 4 * 1024**2
_MAKE_ONE: Final = "make one: gpushare observe --for 10m"


class RecordingFile:
    """A recording as it is written: a line a write, so that it can be read whenever it ends."""

    def __init__(self, path: Path, header: Header) -> None:
        """Create the file.

        Raises:
            BadUsage: it is there already, or is a directory.
            NoPermission, OperationFailed: it cannot be written.
        """
        self.path = path
        try:
            # Unbuffered: a line goes out whole, whatever ends the program after it.
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise BadUsage(
                f"{path} is there already", "give another name with --to, or remove it first", code="file_exists"
            ) from None
        except OSError as error:
            raise _unwritable(path, error) from None
        self._write(samples.header_line(header))

    def __enter__(self) -> RecordingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def process(self, process: RecordedProcess) -> None:
        """Write a process; OperationFailed where it cannot be written."""
        self._write(samples.process_line(process))

    def sample(self, sample: Sample) -> None:
        """Write a sample; OperationFailed where it cannot be written."""
        self._write(samples.sample_line(sample))

    def end(self, at: float, reason: str, missed: int) -> None:
        """Write the end; OperationFailed where it cannot be written."""
        self._write(samples.end_line(at, reason, missed))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def discard(self) -> None:
        """Close and remove the file: there is no sample in it."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _write(self, line: str) -> None:
        data = line.encode("ascii")
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise _unwritable(self.path, error) from None


def _unwritable(path: Path, error: OSError) -> GpushareError:
    message = f"cannot write {path}: {error.strerror or error}"
    hint = "give a file in a directory that you may write: --to /tmp/gpus.jsonl"
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
        hint = f"what is in {path} can be read: gpushare observe --from {shlex.quote(str(path))}"
    if isinstance(error, PermissionError):
        return NoPermission(message, hint, code="not_written")
    return OperationFailed(message, hint, code="not_written")


def read_recording(path: str | Path) -> Recording:
    """Return a recording, summed up from its samples; a file that is cut off is read as far as it goes.

    Raises:
        NotFound: there is no such file.
        NoPermission, OperationFailed: it cannot be read, is no recording, or has no sample.
        NotSupported: a newer gpushare wrote it.
    """
    path = Path(path)
    try:
        # Streamed: days of samples need no memory.
        with path.open(encoding="utf-8", errors="replace") as file:
            return _read(path, file)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", _MAKE_ONE, code="no_recording") from None
    except PermissionError:
        raise NoPermission(
            f"may not read {path}", f"check its mode: ls -l {shlex.quote(str(path))}", code="not_readable"
        ) from None
    except OSError as error:
        raise OperationFailed(
            f"cannot read {path}: {error.strerror or error}", _MAKE_ONE, code="not_readable"
        ) from None


def _read(path: Path, file: Any) -> Recording:
    tally = Tally(_header(path, file.readline(_LONGEST_LINE)))
    damaged, missed, reason = 0, 0, None
    # A file that is none of ours may have no line end at all.
    for line in iter(lambda: file.readline(_LONGEST_LINE), ""):
        try:
            raw = json.loads(line)
            if "t" in raw:
                tally.add(samples.sample_of(raw))
            elif "process" in raw:
                tally.meet(samples.process_of(raw["process"]))
            elif "end" in raw:
                missed, reason = int(raw["end"]["missed"]), str(raw["end"]["reason"])
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError):
            # A crash cuts the last line off, a full disk or a lost block one in the middle.
            damaged += 1
    if not tally.samples:
        raise OperationFailed(f"the recording {path} has no sample", _MAKE_ONE, code="empty_recording")
    return tally.recording(missed=missed, reason=reason, damaged_lines=damaged)


def _header(path: Path, line: str) -> Header:
    if not line:
        raise OperationFailed(f"{path} is empty", _MAKE_ONE, code="empty_recording")
    try:
        raw = json.loads(line)
        schema = raw[samples.MARK]
        if isinstance(schema, int) and schema > samples.SCHEMA:
            raise NotSupported(
                f"{path} is a recording of schema {schema}; this gpushare reads up to {samples.SCHEMA}",
                "read it with the gpushare that wrote it, or a newer one",
                code="newer_recording",
            )
        if schema != samples.SCHEMA:
            raise ValueError(schema)
        return samples.header_of(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise OperationFailed(f"{path} is not a recording of gpushare", _MAKE_ONE, code="not_a_recording") from None


@dataclass(frozen=True, kw_only=True)
class ObservedWorkload:
    """One process as the advisor asks for it: memory, activity and its pattern; unknown is None."""

    name: str | None
    user: str | None
    pid: int
    gpu: int
    memory_peak_bytes: int | None
    activity_mean_percent: float | None
    activity_p95_percent: float | None
    # "gpm" (SM activity), "utilization" (a kernel ran), or None.
    source: str | None
    pattern: str | None
    busy_share: float | None
    samples: int
    mps: bool
    # In how many of its samples another process worked beside it: then its activity is what it got, not what it wants.
    contended_share: float
    # Seconds after the start: workloads that did not meet ran one after another.
    seen_from: float
    seen_to: float


def workloads_of(recording: Recording) -> tuple[ObservedWorkload, ...]:
    """Return the compute processes of a recording as workloads, the MPS servers and desktop programs left out."""
    return tuple(
        ObservedWorkload(
            name=use.process.name,
            user=use.process.user,
            pid=use.process.pid,
            gpu=use.process.gpu,
            memory_peak_bytes=use.memory_peak_bytes,
            activity_mean_percent=use.activity.mean if use.activity else None,
            activity_p95_percent=use.activity.p95 if use.activity else None,
            source=use.source,
            pattern=pattern_of(use),
            busy_share=use.busy_share,
            samples=use.samples,
            mps=use.process.mps,
            contended_share=use.contended_share,
            seen_from=use.seen_from,
            seen_to=use.seen_to,
        )
        for use in recording.processes
        # The driver books the work of MPS clients on the server.
        if use.process.name != SERVER_PROGRAM and not use.process.graphics
    )


def pattern_of(use: ProcessUse) -> str | None:
    """Return when a process works: ``interactive``, ``bursty`` or ``steady``; None when that is unknown.

    Interactive: busy in fewer than 20 % of the samples. Steady: busy in at least 80 % of them, and the 95th
    percentile is at most twice the mean and 5 points more. Bursty: all between. Beside others that work (in more
    than 10 % of the samples) peaks are not looked at: they are the driver's way to book time.
    """
    if use.busy_share is None or use.activity is None:
        return None
    if use.busy_share < INTERACTIVE_BELOW:
        return "interactive"
    even = use.contended_share > CONTENDED_FROM or use.activity.p95 <= 2 * use.activity.mean + 5
    return "steady" if use.busy_share >= STEADY_FROM and even else "bursty"
