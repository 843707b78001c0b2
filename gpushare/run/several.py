"""Several programs: started, read, paused and ended together, and guarded if gpushare dies.

Their output goes to files, not to pipes: if the reader of a pipe dies, the next line kills the client with its queue in
flight. Nor does a file ever make a program wait for us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import IO, Final, TypeVar

from gpushare.base.errors import NoPermission, OperationFailed
from gpushare.base.model import memory_held
from gpushare.base.selection import Device
from gpushare.base.values import dataclass
from gpushare.host.activity import ActivityMeter
from gpushare.host.guard import Guard
from gpushare.host.host import Host, processes_on
from gpushare.host.identity import start_of
from gpushare.host.process import Child, Streams, signal_all, starts_of
from gpushare.host.program import group_members
from gpushare.host.written_file import open_over, opened_directory
from gpushare.mps.kill import DRAIN_BOUND_SECONDS, Drain, Meter, end_clients, kill_all, wait_for_drain
from gpushare.run.end import GRACE_SECONDS, end_programs, still_there
from gpushare.run.share import Held, dismiss, guard_of
from gpushare.signals import Wakeups

# A temporary file is truncated beyond this; it was read already.
_MOST_OUTPUT_BYTES: Final = 32 * 1024 * 1024
# A line without an end must not fill memory.
_LONGEST_LINE: Final = 64 * 1024


@dataclass
class Program:
    """One of several programs. ``listen`` gets each line that it prints, and when it was seen (monotonic seconds).

    ``redrawn``: each state of a progress bar too, which ends in a carriage return. ``heard`` is when it last printed
    anything.
    """

    title: str
    child: Child
    file: IO[bytes]
    kept: bool
    listen: Callable[[str, float], None]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    status: int | None = None
    last_line: str = ""
    redrawn: bool = False
    heard: float = field(default_factory=time.monotonic)
    _offset: int = 0
    _rest: bytes = b""

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def runs(self) -> bool:
        """Return whether the program was still running when its output was last read."""
        return self.ended is None

    @property
    def failure(self) -> str | None:
        """Return how the program failed, with its last line; None while it runs and after a success."""
        if self.status is None or self.status == 0:
            return None
        return f"{exit_text(self.status)}{f': {self.last_line}' if self.last_line else ''}"

    def read_output(self) -> bool:
        """Read what the program has printed, and return whether it has ended by now."""
        if self.ended is not None:
            return True
        status = self.child.poll()
        at = time.monotonic()
        # After the look at its status, so that all that it printed before its end is read.
        self._read_new_output(at)
        if status is not None:
            self.status = status
            self.ended = at
            if self._rest:
                self._take_line(self._rest, at)
            self._rest = b""
            self.file.close()
        return status is not None

    def _read_new_output(self, at: float) -> None:
        """Hand on the lines that the program has printed since the last time; empty a file that nobody keeps before it is large."""
        while chunk := os.pread(self.file.fileno(), 1 << 16, self._offset):
            self._offset += len(chunk)
            self.heard = at
            if self.redrawn:
                # A carriage return ends a line too; the empty lines that this makes are skipped.
                chunk = chunk.replace(b"\r", b"\n")
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                if line or not self.redrawn:
                    self._take_line(line, at)
            if len(self._rest) > _LONGEST_LINE:
                self._take_line(self._rest, at)
                self._rest = b""
        # Only if all of it was read: what was printed since would be lost.
        if not self.kept and self._offset > _MOST_OUTPUT_BYTES and os.fstat(self.file.fileno()).st_size == self._offset:
            # The program appends, so it continues at the new end.
            os.ftruncate(self.file.fileno(), 0)
            self._offset = 0

    def _take_line(self, line: bytes, at: float) -> None:
        """Hand a line on, and keep it for the message if the program fails."""
        # A progress bar draws over itself: only the text after the last return counts.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if text.strip():
            self.last_line = text.strip()[:200]
        self.listen(text, at)


@dataclass(frozen=True)
class Log:
    """A log to be written: its path, and the open directory that it goes into, even if that was renamed."""

    path: Path
    directory: int


@contextlib.contextmanager
def directory_of_logs(path: Path) -> Iterator[int]:
    """Yield the descriptor of the directory of logs, which is made if there is none."""
    with contextlib.ExitStack() as held:
        try:
            descriptor = held.enter_context(opened_directory(path))
        except OSError as error:
            raise NoPermission(
                f"cannot create {path}: {error.strerror}", "give --logs a directory of your own", code="not_written"
            ) from None
        yield descriptor


def open_output(log: Log | None) -> IO[bytes]:
    """Open the file that a program prints to, and that we read: a new log, or without ``log`` a temporary file."""
    if log is None:
        return tempfile.TemporaryFile(buffering=0)
    try:
        return open(open_over(log.path, directory=log.directory), "w+b", buffering=0)
    except OSError as error:
        raise OperationFailed(
            f"cannot write {log.path}: {error.strerror}", "give --logs a directory of your own", code="not_written"
        ) from None


def exit_text(status: int) -> str:
    """Return in words how a program ended (``exit code 1``, ``killed by SIGKILL``), from its status as subprocess has it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


POLL_SECONDS: Final = 0.01
_REAP_SECONDS: Final = 5.0
G = TypeVar("G", bound="Group")


class Group:
    """Programs that are started, read and ended together in a place on a device.

    Entered, it holds the place and the guard, which ends the programs if gpushare dies. Leaving it ends what still runs,
    safely, and gives the place back. ``clients`` as `end_programs` takes them: how the end of these programs breaks no other.
    """

    def __init__(
        self, host: Host, held: Held, clients: Callable[[], set[int] | None], *, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self.host, self.clients, self.grace_seconds = host, clients, grace_seconds
        self._held = held
        self.guard: Guard | None = None
        self.programs: list[Program] = []

    @property
    def meter(self) -> Meter | None:
        return self._held.meter

    def __enter__(self: G) -> G:  # noqa: PYI019 - Self is in Python 3.11, or in a package that users may not have.
        """Start the guard, before any program."""
        try:
            self.guard = guard_of(self.host, self._held)
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs and give the place back; if that fails, the guard goes on with it."""
        try:
            with Wakeups() as signals:
                running = [program for program in self.programs if program.runs]
                for program in running:
                    # A paused program could not end by itself.
                    self.resume(program)
                self.end(running, hurry=signals.ending_came)
                others_use_it = self._held.close()
        except BaseException:
            self._held.close(program_lives=True)
            if self.guard is not None:
                self.guard.leave()
            raise
        if self.guard is not None:
            dismiss(self.guard, lingers=others_use_it)

    def pause(self, *programs: Program) -> Drain:
        """Stop programs (SIGSTOP) and wait until the GPU has drained their queues, or for `DRAIN_BOUND_SECONDS`."""
        device = self._held.device
        # Not `self.meter`: outside MPS there is none.
        gpu_instance = None if device.mig is None else device.mig.gpu_instance_id
        meter = ActivityMeter(self.host.nvml, device.gpu.index, gpu_instance)
        running_reading = meter.read()
        for program in programs:
            self.stop(program)
        return wait_for_drain(meter, running_reading, DRAIN_BOUND_SECONDS)

    def stop(self, program: Program) -> None:
        """Stop a program (SIGSTOP); the GPU still works on its queue."""
        self._signal_tree(program, signal.SIGSTOP)

    def resume(self, program: Program) -> None:
        """Let a paused program continue (SIGCONT)."""
        self._signal_tree(program, signal.SIGCONT)

    def _signal_tree(self, program: Program, number: int) -> None:
        """Send a signal to a program and to all its descendants."""
        # Once it has ended, its PID may be reused.
        if program.runs:
            family = self.host.processes.descendants(program.pid)
            signal_all(self.host.processes, starts_of(self.host.processes, family), number)

    def launch(
        self,
        title: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        listen: Callable[[str, float], None] = lambda _line, _at: None,
        log: Log | None = None,
        redrawn: bool = False,
    ) -> Program:
        """Start a program. ``log`` keeps what it prints; ``listen`` and ``redrawn`` as `Program`.

        Raises:
            GpushareError: it cannot be started, or its log not be written.
        """
        file = open_output(log)
        try:
            # Opened a second time, to append: after the file was emptied, the program goes on at its new end.
            appending = os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            started = time.monotonic()
            try:
                child = self.host.processes.spawn(
                    argv,
                    # Python buffers what it prints to a file; a line must be seen when it is printed.
                    {**environment, "PYTHONUNBUFFERED": "1"},
                    Streams(nothing, appending, appending),
                    None if self.guard is None else self.guard.announce,
                )
            finally:
                os.close(appending)
                os.close(nothing)
        except BaseException:
            file.close()
            raise
        program = Program(title, child, file, log is not None, listen, started=started, redrawn=redrawn)
        self.programs.append(program)
        self._tell_guard(child.pid)
        return program

    def read_outputs(self) -> None:
        """Read what all have printed, and see which have ended."""
        for program in self.programs:
            if program.runs and program.read_output() and self.guard is not None:
                self.guard.remove_process(program.pid)

    def forget_ended(self) -> None:
        self.programs = [program for program in self.programs if program.runs]

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Read the outputs for some seconds, or until a condition is true; return whether it is."""
        deadline = time.monotonic() + seconds
        while True:
            self.read_outputs()
            if until():
                return True
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return False
            time.sleep(min(POLL_SECONDS, seconds_left))

    def end(
        self, programs: Sequence[Program], *, hurry: Callable[[], bool] = lambda: False, strays: Iterable[int] = ()
    ) -> Drain | None:
        """End programs together: their own signal first and time to end, then (under MPS) stop and drain, kill.

        ``strays`` are processes of theirs that have left their trees.
        """
        pids = [*(pid for program in programs for pid in _members(program)), *strays]
        if not pids:
            return None
        drain = end_programs(self.host, pids, self.clients, self.meter, grace_seconds=self.grace_seconds, hurry=hurry)
        self._wait_until_reaped(programs)
        return drain

    def kill(self, program: Program, *, bound_seconds: float = DRAIN_BOUND_SECONDS) -> None:
        """End a program without asking it: under MPS stop and drain, kill."""
        trees = dict.fromkeys(pid for member in _members(program) for pid in self.host.processes.descendants(member))
        pids = [pid for pid in trees if self.host.processes.alive(pid)]
        if self.meter is None:
            kill_all(self.host, pids)
        elif pids:
            end_clients(self.host, pids, self.meter, bound_seconds=bound_seconds)
        self._wait_until_reaped([program])

    def end_left_behind(self, stays: Mapping[int, Sequence[int]], *, hurry: Callable[[], bool] = lambda: False) -> None:
        """End the processes that `left_behind` has found: by SIGTERM, because a shell's background jobs ignore SIGINT.

        Raises:
            GpushareError: one could not be ended.
        """
        pids = [pid for group in stays.values() for pid in group]
        for pid in pids:
            # If gpushare dies now, the guard ends them.
            self._tell_guard(pid)
        end_programs(
            self.host,
            pids,
            self.clients,
            self.meter,
            number=signal.SIGTERM,
            grace_seconds=self.grace_seconds,
            hurry=hurry,
        )
        for pid in pids:
            if self.guard is not None:
                self.guard.remove_process(pid)

    def left_behind(self, programs: Sequence[Program], elsewhere: Sequence[int] = ()) -> dict[int, tuple[int, ...]]:
        """Return what programs that have just ended left running, by their PID: the rest of their process groups.

        A process in a session of its own cannot be traced back. ``elsewhere`` are such processes, seen on the GPU; they
        count as the first program's.
        """
        groups = {program.pid: set(group_members(program.pid)) for program in programs}
        if programs:
            groups[programs[0].pid] |= set(elsewhere).difference(*groups.values())
        return still_there(self.host, groups)

    def _wait_until_reaped(self, programs: Sequence[Program]) -> None:
        """Wait until programs have ended wholly, at most `_REAP_SECONDS`.

        A process whose first thread has ended looks dead while CUDA's own threads still take its context down (seen on
        an H200). What runs next would be measured next to it.
        """
        deadline = time.monotonic() + _REAP_SECONDS
        while any(program.runs for program in programs) and time.monotonic() < deadline:
            self.read_outputs()
            time.sleep(POLL_SECONDS)

    def _tell_guard(self, pid: int) -> None:
        """Name a process to the guard, with its start, because PIDs are reused."""
        started = start_of(self.host.processes.identity(pid))
        if self.guard is not None and started is not None:
            self.guard.add_process(pid, started)


def _members(program: Program) -> list[int]:
    """Return a program and its process group, orphans too; none once it has ended, as its PID may be reused."""
    return [program.pid, *group_members(program.pid)] if program.runs else []


def memory_now(host: Host, device: Device, program: Program) -> int | None:
    """Return the device memory that a program's processes hold now (NVML's process list); None when it is not known."""
    tree = set(host.processes.descendants(program.pid))
    return memory_held(process for process in processes_on(host, device.gpu.index) or () if process.pid in tree)
