"""What `gpushare run` shows: lines about the program on stderr, the output of copies, and the table of a farm."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final

from gpushare.base.errors import GpushareError
from gpushare.base.model import MpsClient
from gpushare.base.selection import Device
from gpushare.base.units import format_bytes, format_duration, format_percent, ranges
from gpushare.base.values import NOT_STORED
from gpushare.host.host import Host
from gpushare.mps.daemons import find_daemons
from gpushare.mps.kill import Drain
from gpushare.mps.limits import Limits
from gpushare.show.result import Column, OutputFormat, Result, Table
from gpushare.show.text import put, visible

_LINE_SECONDS: Final = 0.5


class RunReport:
    """Lines on a stream; with ``quiet`` only what is wrong."""

    def __init__(
        self, host: Host, device: Device, stream: IO[str] | None, *, quiet: bool, limits: Limits | None = None
    ) -> None:
        self._host = host
        self._device = device
        self._stream = stream
        self._quiet = quiet
        # The limits that the user asked for.
        self._limits = limits
        # A job on several devices sets a title that names all of them.
        self.title = device.title

    def attached(self, pid: int) -> None:
        """Say that a process is a client, and under which limits."""
        client = self._client(pid)
        if client is None:
            self.news(f"process {pid} was attached to MPS on {self._device.title}")
            return
        server = f"MPS server {client.server_pid} on {self._device.title}"
        if client.threads_percent is None:
            self.news(f"process {pid} was attached to {server}; its limits could not be read before it ended")
            return
        memory = "none" if client.memory_limit_bytes is None else format_bytes(client.memory_limit_bytes)
        low = "" if client.priority is None or not client.priority else ", low priority"
        threads = format_percent(client.threads_percent)
        self.news(f"process {pid} is attached to {server} (threads {threads}, memory limit {memory}{low})")
        if self._has_lower_limits(client):
            self.news(
                f"the daemon of {self._device.title} has lower limits than requested, and they apply; change them: gpushare mps set"
            )

    def _has_lower_limits(self, client: MpsClient) -> bool:
        """Return whether a client has lower limits than requested, because those of the daemon are lower."""
        requested = self._limits
        if requested is None:
            return False
        pairs = (
            (client.threads_percent, requested.threads_percent),
            (client.memory_limit_bytes, requested.memory_limit_bytes),
        )
        return any(held is not None and wanted is not None and held < wanted for held, wanted in pairs)

    def outside(self, pid: int) -> None:
        """Say that a process has escaped its share, even with --quiet."""
        self._write(
            f"error: process {pid} runs on {self._device.title} outside MPS: it has no limits, and is time-sliced with the MPS clients\n"
            "hint: the program or a wrapper changes CUDA_MPS_PIPE_DIRECTORY or CUDA_VISIBLE_DEVICES; --strict ends such a program\n"
        )

    def pending(self, pid: int) -> None:
        """Say that a process is no client yet: a server has the clients of one user."""
        self.news(
            f"process {pid} waits: another user's clients hold the MPS server of {self._device.title}; "
            "one user at a time (see: gpushare mps status)"
        )

    def share_not_proved(self) -> None:
        """Say that no context of the program was seen, so its limits, or its place, are not proved."""
        self.news(
            f"the program ended and no CUDA context of it was seen, so it is not proved that it ran {self._place}"
        )

    @property
    def _place(self) -> str:
        return "inside its share"

    def daemon_gone(self) -> None:
        self._write(
            f"error: the MPS daemon of {self._device.title} died while the program was running: its CUDA calls will fail\n"
            "hint: end the program and start it again; see: gpushare doctor\n"
        )

    def ended(self, drain: Drain) -> None:
        """Say for how long the GPU worked off what a stopped program had queued, and why that was over."""
        how = {"idle": "the GPU was idle", "fall": "the GPU's activity fell"}.get(drain.by, "after the full time limit")
        self.news(
            f"the program was stopped, its queue drained for {drain.seconds:.2f} s ({how}), and the program was killed"
        )

    def trouble(self, text: str) -> None:
        """Say that something is not as it was asked for, even with --quiet."""
        self._write(f"gpushare: {text}\n")

    def _client(self, pid: int) -> MpsClient | None:
        """Return a process as a client of MPS on this GPU; None: it is not one, or no daemon answers."""
        try:
            daemons = find_daemons(self._host, [self._device.gpu])
        except GpushareError:
            return None
        clients = (client for item in daemons for client in item.daemon.clients)
        return next((client for client in clients if client.pid == pid), None)

    def news(self, text: str) -> None:
        """Write a line, unless --quiet is given."""
        if not self._quiet:
            self._write(f"gpushare: {text}\n")

    def _write(self, text: str) -> None:
        """Write lines, on a terminal wrapped between words; a stream that cannot be written makes this quiet."""
        if self._stream is None:
            return
        try:
            if self._stream.isatty():
                from gpushare.show.render import message_text

                lines = [line.partition(" ") for line in text.splitlines()]
                text = "".join(f"{word} {message_text(word, rest, self._stream)}\n" for word, _, rest in lines)
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The program continues even if nobody reads.
            self._quiet = True


class InstanceReport(RunReport):
    """Lines on a stream about a program outside MPS: in a MIG instance, or on a GPU."""

    def attached(self, pid: int) -> None:
        """Say that NVML lists a process in the instance."""
        mig = self._device.mig
        ids = (
            "" if mig is None else f" (GPU instance {mig.gpu_instance_id}, compute instance {mig.compute_instance_id})"
        )
        self.news(f"process {pid} runs {self._place}{ids}")

    def outside(self, pid: int) -> None:
        """Say that a process runs elsewhere, even with --quiet."""
        self._write(
            f"error: process {pid} runs outside {self.title}, on a GPU that it was not given\n"
            "hint: the program or a wrapper changes CUDA_VISIBLE_DEVICES or CUDA_MPS_PIPE_DIRECTORY\n"
        )

    @property
    def _place(self) -> str:
        """Return where the program runs, for messages: ``on GPU 0``, ``in MIG 1g.10gb of GPU 0``."""
        return f"{'on' if self._device.mig is None else 'in'} {self.title}"


class CopyLines:
    """Prefixed lines of the copies on stdout (on stderr if stdout gets a document), and a progress bar on a terminal."""

    def __init__(self, copies: int, *, output: OutputFormat, quiet: bool, note: Callable[[str], None]) -> None:
        """Begin for the given number of copies, numbered from 0; ``note`` prints what is said of the farm."""
        documents = {OutputFormat.JSON, OutputFormat.YAML, OutputFormat.CSV}
        self._stream = sys.stderr if output in documents else sys.stdout
        self._quiet = quiet
        self._note = note
        self._width = len(str(copies - 1))
        self._drawn = False
        # In seconds of the monotonic clock.
        self._next_draw_at = 0.0
        self._told_failures: set[str] = set()

    def line(self, copy: int, text: str) -> None:
        self.clear()
        put(self._stream, f"[{copy:{self._width}}] {visible(text)}\n")

    def ended(self, copy: Copy, *, again: bool) -> None:
        """Say how a copy failed, once for all that fail alike; the errors at the end name them."""
        cause = copy.reason or copy.failure
        if copy.failure is not None and cause is not None and cause not in self._told_failures:
            self._told_failures.add(cause)
            self.say(f"copy {copy.copy} failed: {copy.failure}{'; restarting it' if again else ''}")

    def left_behind(self, copy: Copy, pids: Sequence[int]) -> None:
        named = ", ".join(map(str, pids))
        self.say(
            f"copy {copy.copy} left process {named} behind, which was ended; the program must stay in the foreground"
        )

    def news(self, copy: Copy, text: str) -> None:
        self.say(f"copy {copy.copy}: {text}")

    def say(self, text: str) -> None:
        self.clear()
        self._note(text)

    def progress(self, copies: Sequence[Copy], seconds: float) -> None:
        """Draw the progress bar again, on a terminal and at most twice a second."""
        if self._quiet or not sys.stderr.isatty() or time.monotonic() < self._next_draw_at:
            return
        self._next_draw_at = time.monotonic() + _LINE_SECONDS
        sys.stderr.write(f"\r\x1b[K{progress_text(copies, seconds)[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
        self._drawn = True

    def clear(self) -> None:
        """Remove the progress bar, so that a line can be written in its place."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


_BAR: Final = 20


def progress_text(copies: Sequence[Copy], seconds: float) -> str:
    """Return how far a farm is after some seconds: a bar, how many run, copies per minute, and the time left."""
    counts = Counter(copy.state for copy in copies)
    # Those that were done earlier say nothing of the rate.
    ended = counts["done"] + counts["failed"]
    total = len(copies) - counts["done earlier"]
    full = _BAR * ended // max(1, total)
    words = [f"{ended}/{total} [{'#' * full}{'-' * (_BAR - full)}] {counts['running']} running"]
    if counts["failed"]:
        words.append(f"{counts['failed']} failed")
    if ended and seconds > 0:
        rate = ended / seconds
        words.append(f"{60 * rate:.0f}/min" if rate > 1 else f"{60 * rate:.2g}/min")
        seconds_left = round(_seconds_left(copies, seconds))
        if seconds_left:
            words.append(f"about {format_duration(seconds_left)} left")
    else:
        words.append(format_duration(round(seconds)))
    return ", ".join(words)


def _seconds_left(copies: Sequence[Copy], seconds: float) -> float:
    """Return how long the rest of a farm takes, if each copy takes the mean of those done; 0: that cannot be said."""
    done = [copy.seconds for copy in copies if copy.state == "done"]
    running = [copy.started_after for copy in copies if copy.state == "running"]
    # One copy, such as the first with its cold caches, is no measure of the others.
    if len(done) < 2 or not running:
        return 0.0
    mean = sum(done) / len(done)
    rests = [max(0.0, mean - (seconds - started)) for started in running]
    waiting = sum(copy.state == "waiting" for copy in copies)
    if not waiting:
        return max(rests)
    # A copy that waits must at least start, when one ends, and end.
    return max((sum(rests) + waiting * mean) / len(running), min(rests) + mean)


@dataclass(kw_only=True)
class Copy:
    """One copy of a farm so far; ``failure``, ``reason`` and ``exit_code`` are of its last try.

    ``state``: waiting, running, done, failed, ended (by the user, or with the farm), skipped (never started), or
    done earlier (by the farm that is resumed).
    """

    copy: int
    line: str | None = None
    state: str = "waiting"
    # 128 + N if signal N ended it.
    exit_code: int | None = None
    seconds: float = 0.0
    # How many times it was started.
    tries: int = 0
    gpu_indexes: tuple[int, ...] = ()
    threads_percent: float | None = None
    # The most device memory that its processes held together; null: unknown.
    memory_peak_bytes: int | None = None
    # Whether it was seen among the clients of MPS; null: never checked.
    attached: bool | None = None
    failure: str | None = None
    # Why gpushare ended it: memory_limit; null: it did not.
    reason: str | None = None
    # Processes left running by any of its tries; they were ended.
    left_behind: tuple[int, ...] = ()
    log: str | None = None
    pid: int | None = field(default=None, metadata=NOT_STORED)
    # When its last try began, in seconds after the start of the farm.
    started_after: float = field(default=0.0, metadata=NOT_STORED)
    # What to do about the failure, where its output does not say.
    hint: str | None = field(default=None, metadata=NOT_STORED)

    def begin_try(self, *, log: str | None, gpu_indexes: tuple[int, ...]) -> None:
        """Note that it is about to be started, perhaps again, and forget how its last try ended."""
        self.tries += 1
        self.log = log
        self.gpu_indexes = gpu_indexes
        self.attached = None
        self.exit_code = None
        self.failure = self.reason = self.hint = None


@dataclass(frozen=True, kw_only=True)
class FarmAnswer:
    """The answer of `farm`. ``memory_source``: given, known (an earlier run) or measured (the first copy)."""

    seconds: float
    # The memory that each copy reserved, at the end of the farm.
    memory_bytes: int | None
    memory_source: str | None
    # The limit of each process, which the driver enforces.
    memory_limit_bytes: int | None
    # The limit of each copy on each of its GPUs.
    job_memory_bytes: int | None
    copies: tuple[Copy, ...]
    # The signal by which the user ended it (None: it did not).
    ended_by: int | None = field(default=None, metadata=NOT_STORED)
    # Why the end of a copy is missing in ``farm.jsonl`` (None: none is).
    unrecorded: GpushareError | None = field(default=None, metadata=NOT_STORED)

    @property
    def failed(self) -> tuple[Copy, ...]:
        return tuple(copy for copy in self.copies if copy.failure is not None)


def farm_result(
    data: FarmAnswer, errors: Sequence[GpushareError] = (), notes: Sequence[str] = (), exit_code: int = 0
) -> Result:
    """Return a farm as a result, with a row per copy; of many copies, those that ended alike share a row."""
    columns = (
        Column("copy", "copy", right=True),
        Column("line", "line", least=10, rank=2, optional=True),
        Column("state", "state"),
        Column("exit_code", "exit", right=True, rank=1),
        Column("seconds", "seconds", right=True, format="{:.1f}".format),
        Column("tries", "starts", right=True, rank=3),
        Column("gpu_indexes", "GPU", right=True, rank=2, format=lambda value: ranges(value) or "-"),
        Column("memory_peak_bytes", "peak memory", right=True, rank=2, optional=True, format=format_bytes),
        Column("failure", "failure", least=10, optional=True),
        Column("log", "log", rank=4, least=10, optional=True),
    )
    table = Table(name="copies", title="copies", columns=columns, rows=data.copies)
    # The errors say how copies failed.
    shown_columns = tuple(column for column in columns if column.key != "failure")
    return Result(
        data=data,
        tables=(replace(table, columns=shown_columns, rows=_rows_for_people(data.copies)),),
        csv=table,
        errors=tuple(errors),
        notes=tuple(notes),
        exit_code=exit_code,
    )


# Of more copies, those that are alike are one row for people.
_MOST_ROWS: Final = 24
_LONGEST_RANGES: Final = 30


def _rows_for_people(copies: Sequence[Copy]) -> tuple[dict[str, Any], ...]:
    """Return rows for people: of many copies, those that ended alike are one, with the mean of their seconds."""
    if len(copies) <= _MOST_ROWS:
        return tuple(map(vars, copies))
    alike: dict[tuple[str, int | None], list[Copy]] = {}
    for copy in copies:
        alike.setdefault((copy.state, copy.exit_code), []).append(copy)
    return tuple(vars(group[0]) if len(group) == 1 else _merged_row(group) for group in alike.values())


def _merged_row(group: Sequence[Copy]) -> dict[str, Any]:
    """Return one row for copies in the same state with the same exit code: mean seconds, all tries, the highest peak."""
    named = ranges(copy.copy for copy in group)
    logs = {copy.log.rpartition("/")[0] for copy in group if copy.log}
    return {
        **vars(group[0]),
        "copy": named if len(named) <= _LONGEST_RANGES else f"{len(group)} copies, from {group[0].copy} on",
        "line": None,
        "gpu_indexes": tuple(sorted({index for copy in group for index in copy.gpu_indexes})),
        "seconds": sum(copy.seconds for copy in group) / len(group),
        "tries": sum(copy.tries for copy in group),
        "memory_peak_bytes": max(copy.memory_peak_bytes or 0 for copy in group) or None,
        "log": f"{logs.pop()}/" if len(logs) == 1 else None,
    }
