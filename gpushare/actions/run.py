"""`gpushare run`: a program inside a share, from the daemon's start to the proof, its end and the clean-up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, cast

from gpushare.actions.attachment import Attachment
from gpushare.actions.mps_device import check_device, own_daemon
from gpushare.actions.mps_limits import MpsLimits, check_memory
from gpushare.actions.mps_start import plan_start
from gpushare.actions.plan import carry_out
from gpushare.actions.run_after import stop_if_last
from gpushare.actions.run_end import GRACE_SECONDS, client_pids, end_program
from gpushare.actions.run_environment import check_command, client_environment
from gpushare.actions.safe_end import DRAIN_BOUND_SECONDS
from gpushare.actions.terminal import Terminal
from gpushare.actions.wakeups import Wakeups
from gpushare.errors import GpushareError, NotFound
from gpushare.host.activity import ActivityMeter
from gpushare.host.mps_home import DaemonHome, Lease, home_of

if TYPE_CHECKING:
    from gpushare.actions.safe_end import Drain
    from gpushare.host.host import Host
    from gpushare.host.process import Spawned
    from gpushare.selection import Device

# Signals that end the program; the others are passed on as they are.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Passed on to a program that handles them; one that does not would die of them.
_DEADLY: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run: limits of this program, and how it is ended (seconds)."""

    limits: MpsLimits = field(default_factory=MpsLimits)
    strict: bool = False
    grace_seconds: float = GRACE_SECONDS
    drain_seconds: float = DRAIN_BOUND_SECONDS


class Reporter:
    """What a run says while it goes on; the command line prints it on stderr."""

    def attached(self, attachment: Attachment, pid: int) -> None:
        """A process of the program is a client of the daemon."""

    def outside(self, pid: int) -> None:
        """A process of the program runs on the GPU outside MPS."""

    def pending(self, pid: int) -> None:
        """The daemon keeps a process waiting, because another user's clients hold the server."""

    def unproved(self) -> None:
        """The program ended and no CUDA context of it was seen."""

    def daemon_gone(self) -> None:
        """The MPS daemon died while the program ran."""

    def ended(self, drain: Drain) -> None:
        """The program was ended the safe way."""


def run(host: Host, device: Device, command: Sequence[str], options: RunOptions, reporter: Reporter) -> int:
    """Run a program inside a share and return its exit code (128 + N when signal N ended it).

    Starts a daemon if the device has none, and stops it with the last program.

    Raises:
        GpushareError: the share could not be set up (nothing was run), or the program could not be ended.
    """
    check_device(host, device)
    check_memory(device, options.limits.memory_limit_bytes)
    check_command(device, command[0], options.limits)
    home, lease = open_share(host, device)
    session = _Session(host, device, home, lease, options, reporter)
    try:
        return session.run(command, client_environment(os.environ, device, home, options.limits))
    finally:
        session.close()


def open_share(host: Host, device: Device) -> tuple[DaemonHome, Lease | None]:
    """Return the home of the device's daemon and a lease on it; starts a daemon when there is none.

    The lease is None on another user's daemon: it is not ours to stop.

    Raises:
        GpushareError: as `plan_start`.
    """
    own_home = home_of(host.run_directory, device.uuid)
    try:
        home, _ = own_daemon(host, device)
        if home.directory != own_home.directory:
            return home, None
    except NotFound:
        pass
    own_home.create()
    with own_home.locked():
        try:
            own_daemon(host, device)
        except NotFound:
            carry_out(plan_start(host, device, MpsLimits(), transient=True))
        return own_home, own_home.take_lease()


class _Session:
    """One program from its start to its end."""

    def __init__(
        self, host: Host, device: Device, home: DaemonHome, lease: Lease | None, options: RunOptions, reporter: Reporter
    ) -> None:
        self._host, self._device, self._home, self._lease = host, device, home, lease
        self._options, self._reporter = options, reporter
        self._told: set[int] = set()
        self._told_gone = False
        self._ended_by: int | None = None

    def close(self) -> bool:
        """Give the lease back, and stop the daemon if this was its last program; return whether others use it.

        With clients left the guard waits for them.
        """
        lease, self._lease = self._lease, None
        if lease is None:
            return False
        lease.release()
        try:
            return stop_if_last(self._host, self._home)
        except GpushareError:
            return True

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        # Signals are caught before the program starts: from then on none may kill gpushare unheard.
        with Wakeups((*_ENDING, *_PASSED_ON, signal.SIGTSTP, signal.SIGCHLD)) as wakeups, self._guarded() as guard:
            child = self._host.processes.spawn(command, environment)
            # At once, and then with what guards against a reused PID: describing it takes a while.
            _tell(guard, f"program {child.pid} -")
            info = self._host.processes.describe(child.pid)
            _tell(guard, f"program {child.pid} {'-' if info is None or info.started_at is None else info.started_at}")
            attachment = Attachment(self._host, self._device, self._home, child.pid, seen={child.pid})
            with Terminal(child.pid) as terminal:
                status = self._follow(child, attachment, wakeups, terminal)
            attachment.settle()
            self._report(attachment)
            if not attachment.attached and not attachment.outside:
                self._say(self._reporter.unproved)
        return self._exit_code(status, attachment)

    def _follow(self, child: Spawned, attachment: Attachment, wakeups: Wakeups, terminal: Terminal) -> int:
        next_look = time.monotonic() + 0.1
        while (status := child.poll()) is None:
            for number in wakeups.wait(next_look - time.monotonic()):
                if number in _ENDING or (number in _DEADLY and self._would_kill_a_client(attachment, number)):
                    self._end(attachment, number, wakeups)
                elif number == signal.SIGTSTP:
                    terminal.suspend()
                elif number in _PASSED_ON:
                    _pass_on(child.pid, number)
            terminal.serve(child)
            # Each look is a conversation, whose own end is a SIGCHLD: only the clock says when to look again.
            if time.monotonic() >= next_look:
                if child.poll() is None and self._ended_by is None:
                    self._look(attachment, wakeups)
                next_look = time.monotonic() + attachment.wait()
        return status

    def _look(self, attachment: Attachment, wakeups: Wakeups) -> None:
        attachment.look()
        self._report(attachment)
        if self._options.strict and attachment.outside:
            self._end(attachment, signal.SIGTERM, wakeups)

    def _would_kill_a_client(self, attachment: Attachment, number: int) -> bool:
        """Return whether a signal that is passed on would end an MPS client with its queue in flight."""
        clients = client_pids(attachment.control, attachment.attached)
        return any(
            (clients is None or member in clients) and self._host.processes.catches(member, number) is False
            for member in self._host.processes.descendants(attachment.program_pid)
        )

    def _say(self, report: Callable[..., None], *facts: object) -> None:
        """Report something; whatever goes wrong in that must not end the program."""
        with contextlib.suppress(Exception):
            report(*facts)

    def _report(self, attachment: Attachment) -> None:
        if attachment.daemon_gone and not self._told_gone:
            self._told_gone = True
            self._say(self._reporter.daemon_gone)
        for pids, report in (
            (attachment.attached, lambda pid: self._reporter.attached(attachment, pid)),
            (attachment.outside, self._reporter.outside),
            (attachment.pending, self._reporter.pending),
        ):
            for pid in sorted(set(pids) - self._told):
                self._say(report, pid)
                if pids is not attachment.pending:
                    self._told.add(pid)
            if pids is attachment.pending:
                self._told |= set(pids) - set(attachment.attached)

    def _end(self, attachment: Attachment, number: int, wakeups: Wakeups) -> None:
        self._ended_by = number
        mig = self._device.mig
        meter = ActivityMeter(self._host.nvml, self._device.gpu.index, None if mig is None else mig.gpu_instance_id)
        drain = end_program(
            self._host,
            attachment.program_pid,
            attachment.control,
            meter,
            number=number,
            grace_seconds=self._options.grace_seconds,
            bound_seconds=self._options.drain_seconds,
            hurry=lambda: any(again in _ENDING for again in wakeups.wait(0.0)),
            known=attachment.attached,
        )
        if drain is not None:
            self._say(self._reporter.ended, drain)

    def _exit_code(self, status: int, attachment: Attachment) -> int:
        if self._options.strict and attachment.outside:
            return 1
        if status >= 0:
            return status
        # Ended by us, perhaps by another signal than we got: the caller sees the one that it sent.
        if -status in {signal.SIGKILL, signal.SIGINT, signal.SIGTERM} and self._ended_by is not None:
            return 128 + self._ended_by
        return 128 - status

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[IO[bytes]]:
        """Yield the input of the guard; it learns of an orderly end by a word, of our death by silence."""
        guard, pipe = start_guard(self._host, self._device, self._lease)
        word = None
        try:
            yield pipe
            # The daemon first, the word after: killed in between, the guard still stops it.
            word = "linger" if self.close() else "done"
        finally:
            # Without a word, because something failed here, the guard ends what is left of the program.
            if word is not None:
                _tell(pipe, word)
            with contextlib.suppress(OSError):
                pipe.close()
            if word == "done":
                guard.wait()


def start_guard(host: Host, device: Device, lease: Lease | None) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start the guard in a session of its own, so that no signal of the terminal reaches it.

    Returns it and its input.
    """
    here = Path(__file__).resolve()
    root, index = str(here.parents[2]), str(device.gpu.index)
    held = ("", "-1") if lease is None else (str(lease.path), str(lease.descriptor))
    guard = subprocess.Popen(
        [sys.executable, str(here.with_name("guard.py")), root, host.spec, device.uuid, index, *held],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if lease is None else (lease.descriptor,),
    )
    return guard, cast("IO[bytes]", guard.stdin)


def _tell(pipe: IO[bytes], word: str) -> None:
    # A guard that somebody killed must not end the program.
    with contextlib.suppress(OSError, ValueError):
        pipe.write(word.encode() + b"\n")
        pipe.flush()


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
