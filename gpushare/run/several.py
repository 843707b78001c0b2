"""Several programs in one share of a device: started, read, paused and ended together, and guarded if gpushare dies.

What they print goes to files, not to pipes: a client whose reader has died would be killed by its next line, with its
queue in flight. Files also never make a program wait for us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final

from gpushare.errors import GpushareError, NoPermission, OperationFailed
from gpushare.host.activity import ActivityMeter
from gpushare.host.process import Streams, known, signal_known
from gpushare.host.program import group_members
from gpushare.host.written_file import directory_of, open_over
from gpushare.mps.environment import client_environment, without_own_limits
from gpushare.mps.kill import DRAIN_BOUND_SECONDS, end_clients, kill_all, wait_for_drain
from gpushare.run.end import GRACE_SECONDS, end_left_behind, end_programs, still_there
from gpushare.run.program import Wakeups, announcer, start_guard
from gpushare.run.share import MpsShare

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.host.process import Spawned
    from gpushare.mps.kill import Drain
    from gpushare.mps.limits import Limits
    from gpushare.run.share import Share
    from gpushare.selection import Device


def is_full(descriptor: int) -> bool:
    """Return whether the file system of an open file has no block left for this user; False where it does not tell.

    What is kept back for root (ext4) is room for root.
    """
    try:
        found = os.fstatvfs(descriptor)
    except OSError:
        return False
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return found.f_blocks > 0 and free == 0


# A temporary file is read and thrown away: more than this is not kept on the disk.
_MOST_OUTPUT_BYTES: Final = 32 * 1024 * 1024
# A line without an end must not fill the memory.
_LONGEST_LINE: Final = 64 * 1024


@dataclass
class Program:
    """One of several programs. ``listen`` gets each line that it prints, and when it was seen (monotonic seconds).

    ``redrawn``: also each state of a progress bar, that draws over itself (a return, no new line). ``heard`` is when
    it has printed last, whatever it was. ``no_space``: it ended badly, and what it printed to had no room left.
    """

    title: str
    child: Spawned
    file: IO[bytes]
    kept: bool
    listen: Callable[[str, float], None]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    status: int | None = None
    last_line: str = ""
    no_space: bool = False
    redrawn: bool = False
    heard: float = field(default_factory=time.monotonic)
    _offset: int = 0
    _rest: bytes = b""

    @property
    def pid(self) -> int:
        """Return its PID."""
        return self.child.pid

    @property
    def runs(self) -> bool:
        """Return whether it was still running at the last look."""
        return self.ended is None

    @property
    def failure(self) -> str | None:
        """Return how it ended badly, with its last line; None while it runs and after a good end."""
        if self.status is None or self.status == 0:
            return None
        if self.no_space:
            # Its last line is what still fitted, and tells nothing.
            return f"{exit_text(self.status)}, with no space left for what it prints"
        return f"{exit_text(self.status)}{f': {self.last_line}' if self.last_line else ''}"

    def look(self) -> bool:
        """Read what it has printed, and return whether it has ended by now."""
        if self.ended is not None:
            return True
        status = self.child.poll()
        self._read()
        if status is not None:
            self.status, self.ended = status, time.monotonic()
            if self._rest:
                self._tell(self._rest, self.ended)
            self._rest = b""
            # Before the end of a temporary file makes room again.
            self.no_space = status != 0 and is_full(self.file.fileno())
            self.file.close()
        return status is not None

    def _read(self) -> None:
        at = time.monotonic()
        while chunk := os.pread(self.file.fileno(), 1 << 16, self._offset):
            self._offset += len(chunk)
            self.heard = at
            if self.redrawn:
                # A return ends a line as well; so nothing is empty but what says nothing.
                chunk = chunk.replace(b"\r", b"\n")
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                if line or not self.redrawn:
                    self._tell(line, at)
            if len(self._rest) > _LONGEST_LINE:
                self._tell(self._rest, at)
                self._rest = b""
        if not self.kept and self._offset > _MOST_OUTPUT_BYTES:
            # It appends, so it goes on at the new end.
            os.ftruncate(self.file.fileno(), 0)
            self._offset = 0

    def _tell(self, line: bytes, at: float) -> None:
        # A progress bar draws over itself: what counts stands behind the last return.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if text.strip():
            self.last_line = text.strip()[:200]
        self.listen(text, at)


@dataclass(frozen=True)
class Log:
    """A log to be: its path, and the open directory that it goes into, whatever has that name by then."""

    path: Path
    directory: int


@contextlib.contextmanager
def directory_of_logs(path: Path) -> Iterator[int]:
    """Yield the descriptor of the directory of logs, which is made if there is none.

    Raises:
        NoPermission: it cannot be made, or another user may change what is in it.
    """
    with contextlib.ExitStack() as held:
        try:
            descriptor = held.enter_context(directory_of(path))
        except OSError as error:
            raise NoPermission(
                f"cannot create {path}: {error.strerror}", "give --logs a directory of your own", code="not_written"
            ) from None
        yield descriptor


def opened(log: Log | None) -> IO[bytes]:
    """Return the file that a program prints to: a new log, or one without a name.

    Raises:
        OperationFailed: the log cannot be written.
    """
    if log is None:
        return tempfile.TemporaryFile(buffering=0)
    try:
        return open(open_over(log.path, directory=log.directory), "w+b", buffering=0)
    except OSError as error:
        raise OperationFailed(
            f"cannot write {log.path}: {error.strerror}", "give --logs a directory of your own", code="not_written"
        ) from None


def exit_text(status: int) -> str:
    """Return how a program ended, from its status as subprocess has it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


POLL_SECONDS: Final = 0.01
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Several:
    """Programs in one share of a device; entered, it holds the share and the guard.

    Leaving it ends what still runs, safely, and gives the share back.
    """

    def __init__(self, host: Host, share: Share, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._host, self._share, self.grace_seconds = host, share, grace_seconds
        mig = share.device.mig
        # Also where no drain is needed before an end: a pause waits for it.
        self._meter = ActivityMeter(host.nvml, share.device.gpu.index, None if mig is None else mig.gpu_instance_id)
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe: IO[bytes] | None = None
        self.programs: list[Program] = []

    def __enter__(self) -> Several:
        """Start the guard, before any program."""
        try:
            self._guard, self._pipe = start_guard(self._host, self._share)
        except BaseException:
            self._share.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs and give the share back; after a failure in that the guard goes on with it."""
        word: str | None = None
        try:
            word = self._ended()
        finally:
            if word is None:
                self._share.close(program_lives=True)
            else:
                self._tell(word)
            if self._pipe is not None:
                with contextlib.suppress(OSError):
                    self._pipe.close()
            if word == "done" and self._guard is not None:
                self._guard.wait()

    def _ended(self) -> str:
        """End what still runs, give the share back, and return the word that the guard is told."""
        with Wakeups(_ENDING) as wakeups:
            left = [program for program in self.programs if program.runs]
            for program in left:
                # One that is paused could not do what it does at its end.
                self.resume(program)
            self.end(left, hurry=lambda: any(number in _ENDING for number in wakeups.wait(0.0)))
            return "linger" if self._share.close() else "done"

    @property
    def share(self) -> Share:
        """Return the share that all of them are in."""
        return self._share

    def _environment(self, limits: Limits) -> dict[str, str]:
        if isinstance(self._share, MpsShare):
            return client_environment(without_own_limits(os.environ), self._share.device, self._share.home, limits)
        return self._share.environment(os.environ)

    def start(
        self,
        title: str,
        argv: Sequence[str],
        limits: Limits,
        *,
        variables: Mapping[str, str] | None = None,
        listen: Callable[[str, float], None] = lambda _line, _at: None,
        log: Log | None = None,
        redrawn: bool = False,
    ) -> Program:
        """Start a program; under MPS it has these limits. ``log`` keeps what it prints; ``redrawn`` as `Program`.

        Raises:
            GpushareError: it cannot be started, or its log not be written.
        """
        # Python keeps back what it prints to a file; a line must be seen when it is printed.
        environment = {**self._environment(limits), "PYTHONUNBUFFERED": "1", **(variables or {})}
        file = opened(log)
        try:
            appending = os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            try:
                child = self._host.processes.spawn(
                    argv,
                    environment,
                    Streams(nothing, appending, appending),
                    None if self._pipe is None else announcer(self._pipe),
                )
            finally:
                os.close(appending)
                os.close(nothing)
        except BaseException:
            file.close()
            raise
        program = Program(title, child, file, log is not None, listen, redrawn=redrawn)
        self.programs.append(program)
        self._tell_start(child.pid)
        return program

    def look(self) -> None:
        """Read what all have printed, and see who has ended."""
        for program in self.programs:
            if program.runs and program.look():
                self._tell(f"ended {program.pid}")

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Look again and again for so long, or until something is so; return whether it is."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if until():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(POLL_SECONDS, left))

    def attached(self, program: Program) -> bool | None:
        """Return whether a program is a client of the daemon; None outside MPS, and when it cannot be asked."""
        clients = self._clients() if isinstance(self._share, MpsShare) else None
        return None if clients is None else bool(clients & set(self._host.processes.descendants(program.pid)))

    def pause(self, program: Program, *, bound_seconds: float = DRAIN_BOUND_SECONDS) -> Drain:
        """Stop a program (SIGSTOP) and wait until the GPU has drained its queue, at most ``bound_seconds``."""
        before = self._meter.read()
        self.stop(program)
        return wait_for_drain(self._meter, before, bound_seconds)

    def stop(self, program: Program) -> None:
        """Stop a program (SIGSTOP); the GPU goes on with its queue."""
        self._signal(program, signal.SIGSTOP)

    def resume(self, program: Program) -> None:
        """Let a paused program go on (SIGCONT)."""
        self._signal(program, signal.SIGCONT)

    def _signal(self, program: Program, number: int) -> None:
        # Once it has ended, its PID may be another's.
        tree = self._host.processes.descendants(program.pid) if program.runs else ()
        for pid, started in known(self._host.processes, tree).items():
            with contextlib.suppress(NoPermission):
                signal_known(self._host.processes, pid, started, number)

    def end(self, programs: Sequence[Program], *, hurry: Callable[[], bool] = lambda: False) -> Drain | None:
        """End programs together: their own signal first and time to end, then (under MPS) stop and drain, kill.

        Raises:
            GpushareError: one could not be ended.
        """
        pids = [pid for program in programs for pid in _group(program)]
        if not pids:
            return None
        drain = end_programs(
            self._host, pids, self._clients, self._share.meter, grace_seconds=self.grace_seconds, hurry=hurry
        )
        self._reap(programs)
        return drain

    def kill(self, program: Program, *, bound_seconds: float = DRAIN_BOUND_SECONDS) -> Drain | None:
        """End a program without asking it: under MPS stop and drain, kill.

        Raises:
            GpushareError: it could not be ended.
        """
        tree = dict.fromkeys(pid for member in _group(program) for pid in self._host.processes.descendants(member))
        pids = [pid for pid in tree if self._host.processes.alive(pid)]
        drain = None
        if self._share.meter is None:
            kill_all(self._host, pids)
        elif pids:
            drain = end_clients(self._host, pids, self._share.meter, bound_seconds=bound_seconds)
        self._reap([program])
        return drain

    def left_behind(self, programs: Sequence[Program]) -> dict[int, tuple[int, ...]]:
        """Return what programs that have just ended left running, by their PID: who stays in a program's process group.

        Who went to a session of its own cannot be known any more.
        """
        return still_there(self._host, {program.pid: group_members(program.pid) for program in programs})

    def end_left_behind(
        self, left: Mapping[int, Sequence[int]], *, hurry: Callable[[], bool] = lambda: False
    ) -> Drain | None:
        """End what `left_behind` has found.

        Raises:
            GpushareError: one could not be ended.
        """
        pids = [pid for found in left.values() for pid in found]
        for pid in pids:
            # Should gpushare die now, it must not stay stopped for ever.
            self._tell_start(pid)
        drain = end_left_behind(
            self._host, pids, self._clients, self._share.meter, grace_seconds=self.grace_seconds, hurry=hurry
        )
        for pid in pids:
            self._tell(f"ended {pid}")
        return drain

    def _reap(self, programs: Sequence[Program]) -> None:
        deadline = time.monotonic() + 1.0
        while any(program.runs for program in programs) and time.monotonic() < deadline:
            self.look()
            time.sleep(POLL_SECONDS)

    def _clients(self) -> set[int] | None:
        return self._share.watch(os.getpid()).clients()

    def _tell_start(self, pid: int) -> None:
        """Tell the guard of a process with what guards against a reused PID."""
        info = self._host.processes.describe(pid)
        if info is not None and info.started_at is not None:
            self._tell(f"program {pid} {info.started_at}")

    def _tell(self, word: str) -> None:
        # A guard that somebody killed must not end the programs.
        if self._pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                self._pipe.write(word.encode() + b"\n")
                self._pipe.flush()


def _group(program: Program) -> list[int]:
    """Return a program and who is in its process group, orphans too; nobody once it has ended: its PID may be another's."""
    return [program.pid, *group_members(program.pid)] if program.runs else []


def peak_memory(host: Host, device: Device, program: Program) -> int | None:
    """Return the device memory that a program's processes hold now (NVML's process list); None when it is not known."""
    if host.processes.namespace_is_host() is False:
        return None
    try:
        found = host.nvml.processes(device.gpu.index) or ()
    except GpushareError:
        return None
    tree = set(host.processes.descendants(program.pid))
    sizes = [one.memory_used_bytes for one in found if one.pid in tree]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
