"""Several programs in one share of a device: started, read, paused and ended together, and guarded if gpushare dies.

What they print goes to files, not to pipes: a client whose reader has died would be killed by its next line, with its
queue in flight. Files also never make a program wait for us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final

from gpushare.actions.left_behind import end_left_behind, still_there
from gpushare.actions.listened import Log, Program, opened
from gpushare.actions.run import announcer, start_guard
from gpushare.actions.run_end import GRACE_SECONDS, end_programs
from gpushare.actions.run_environment import client_environment, without_own_limits
from gpushare.actions.safe_end import DRAIN_BOUND_SECONDS, end_clients, kill_all, wait_for_drain
from gpushare.actions.share import MpsShare
from gpushare.actions.wakeups import Wakeups
from gpushare.errors import GpushareError, NoPermission, NotFound
from gpushare.host.activity import ActivityMeter
from gpushare.host.process import Streams
from gpushare.host.process_group import group_members

if TYPE_CHECKING:
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.actions.safe_end import Drain
    from gpushare.actions.share import Share
    from gpushare.host.host import Host
    from gpushare.selection import Device

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

    def _environment(self, limits: MpsLimits) -> dict[str, str]:
        if isinstance(self._share, MpsShare):
            return client_environment(without_own_limits(os.environ), self._share.device, self._share.home, limits)
        return self._share.environment(os.environ)

    def start(
        self,
        title: str,
        argv: Sequence[str],
        limits: MpsLimits,
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
        for pid in self._host.processes.descendants(program.pid):
            with contextlib.suppress(NotFound, NoPermission):
                self._host.processes.send(pid, number)

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
