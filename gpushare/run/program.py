"""Run one program in a share: start, signals, terminal, proof, end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import NoPermission, OperationFailed
from gpushare.base.units import format_duration
from gpushare.base.values import dataclass
from gpushare.host.guard import Guard
from gpushare.host.host import Host, make_private_directory
from gpushare.host.identity import start_of
from gpushare.host.process import Child, Streams, starts_of
from gpushare.host.written_file import open_to_append
from gpushare.mps.limits import Limits
from gpushare.part import Part, Watch
from gpushare.plan import Step
from gpushare.run.end import GRACE_SECONDS, end_programs
from gpushare.run.share import Share, dismiss, guard_of
from gpushare.signals import ENDING, Wakeups, signals_handled

if TYPE_CHECKING:
    from gpushare.run.container import Container
    from gpushare.run.jobs import PrintedRate
    from gpushare.run.swapping import SwapWish
    from gpushare.show.run import RunReport


class Terminal(contextlib.AbstractContextManager["Terminal"]):
    """Lends the terminal to the program when it asks for it, and takes it back."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._descriptor = _controlling_terminal()
        self._lent = False

    def __exit__(self, *_: object) -> None:
        self._take_back()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def serve(self, child: Child) -> None:
        """Lend the terminal to a program that was stopped for want of it; on Ctrl-Z in the program, stop gpushare too."""
        number = child.stopped_by()
        if number in {signal.SIGTTIN, signal.SIGTTOU}:
            self._lend()
            if self._lent or self._descriptor is None or _foreground_group(self._descriptor) is None:
                # If the terminal is gone, the program reads end-of-file.
                self._continue()
            else:
                # We are in the background too: stop like any job that wants the terminal. The SIGCONT
                # of `fg` is passed on, and the program asks again.
                self._stop_self()
        elif number == signal.SIGTSTP and self._lent:
            # Ctrl-Z in the program: the shell must get its terminal back, so we stop with it.
            self._take_back()
            self._stop_self()
            self._lend()
            self._continue()

    def suspend(self) -> None:
        """Stop the program and gpushare, and continue both together: Ctrl-Z was pressed while gpushare had the terminal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGTSTP)
        self._stop_self()
        self._continue()

    def _stop_self(self) -> None:
        """Stop this gpushare, until the shell continues it."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def _continue(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGCONT)

    def _lend(self) -> None:
        """Let the program have the terminal, if gpushare is in the foreground."""
        if self._descriptor is not None and os.getpgrp() == _foreground_group(self._descriptor):
            self._lent = _give_terminal(self._descriptor, self._group)

    def _take_back(self) -> None:
        """Take the terminal back, if the program has it."""
        if self._lent and self._descriptor is not None:
            _give_terminal(self._descriptor, os.getpgrp())
            self._lent = False


def _controlling_terminal() -> int | None:
    """Return the descriptor of the terminal that gpushare was started in; None: there is none."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def _foreground_group(descriptor: int) -> int | None:
    """Return the process group that has the terminal; None: the terminal is gone."""
    try:
        return os.tcgetpgrp(descriptor)
    except OSError:
        return None


def _give_terminal(descriptor: int, group: int) -> bool:
    """Let a process group have the terminal; return whether it has it."""
    # Otherwise the kernel stops us if we are in the background.
    with signals_handled((signal.SIGTTOU,), signal.SIG_IGN):
        try:
            os.tcsetpgrp(descriptor, group)
        except OSError:
            return False
        return True


# A part that has nothing to do waits without end, which no call takes.
_LONGEST_SECONDS: Final = 60.0
# The exit codes of programs that a user ended, as servers and notebooks always do.
ENDED_BY_USER: Final = frozenset(128 + number for number in ENDING)
# Passed on to a program that handles them; others would die of them.
_DEADLY: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run: limits of this program, parts that outlive it, and how it is ended (seconds)."""

    limits: Limits = field(default_factory=Limits)
    parts: tuple[Part, ...] = ()
    # A descriptor that replaces its stderr.
    stderr: int | None = None
    # Where the program prints how fast it is: it appends its output to that file itself.
    rate: PrintedRate | None = None
    strict: bool = False
    grace_seconds: float = GRACE_SECONDS
    name: str | None = None
    # It is started again after its end: it stays a job until then.
    stays: bool = False
    role: str = "plain"
    # The container engine that runs it.
    container: str | None = None
    # For a dry run: what happens before the program starts, and while it runs.
    before: tuple[Step, ...] = ()
    meanwhile: tuple[Step, ...] = ()

    @property
    def log(self) -> Path | None:
        """Return the file that keeps the program's output; None: it is not kept, and goes to our stdout."""
        return None if self.rate is None else Path(self.rate.log)


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """How a job waits for room (at most ``seconds``), and leaves its room to others."""

    wait: bool = False
    seconds: float | None = None
    requeue: bool = False
    # How long the job runs at most: then it is ended, and others may reckon with that.
    run_seconds: float | None = None
    swap: SwapWish | None = None
    # It leaves when any production job needs room.
    for_production: bool = False

    @property
    def takes_place(self) -> bool:
        """Return whether the job needs a place in the ledger of memory, even without a limit of its memory."""
        return self.wait or self.swappable or self.run_seconds is not None

    @property
    def swappable(self) -> bool:
        """Return whether the job may be swapped out: then it runs outside MPS, and has a place in the ledger."""
        return self.swap is not None or self.for_production

    @property
    def turns(self) -> bool:
        """Return whether the job takes turns on the GPU with others (``--swap turns``)."""
        return self.swap is not None and self.swap.turns


class TimeLimit(Part):
    """Ends a job that runs longer than its ``--time``."""

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._over = False

    def started(self, _watch: Watch) -> None:
        """Begin to count the job's time."""
        self.due = time.monotonic() + self._limit

    def poll(self) -> bool:
        """Return whether the job's time is over, so that it has to end."""
        self._over = self._over or self.seconds_to_poll <= 0
        return self._over

    def raise_end(self) -> None:
        """Raise OperationFailed if the job's time was over, which has ended it (code ``time_limit``)."""
        if self._over:
            raise OperationFailed(
                f"the job ran longer than its --time of {format_duration(self._limit)}: ended",
                "give it more time: --time TIME",
                code="time_limit",
            )


def command_line(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """Return a program with its variables as one line for a shell: ``CUDA_VISIBLE_DEVICES=0 python3 train.py``."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def step_of_run(text: str, command: str = "# by gpushare run itself") -> Step:
    """Return a step for a plan to show: what gpushare does before a program starts, or while it runs."""
    return Step(what=text, command=command, do=lambda: None)


# How often a log is copied to our stdout.
_COPY_SECONDS: Final = 0.05
# Python buffers what it prints to a file; a line must be there when it is printed.
_UNBUFFERED: Final = {"PYTHONUNBUFFERED": "1"}


def open_log(path: Path) -> int:
    """Open the file that keeps a program's output, below the state directory, to append to it.

    Raises:
        NoPermission: it cannot be opened, or is a link or another user's (code ``not_written``).
    """
    try:
        make_private_directory(path.parent, 0o700, variable="GPUSHARE_STATE_DIR")
        return open_to_append(path)
    except OSError as error:
        raise NoPermission(
            f"cannot append to {path}: {error.strerror or error}",
            f"see: ls -ld {shlex.quote(str(path.parent))} {shlex.quote(str(path))}",
            code="not_written",
        ) from None


def begin_log(path: Path) -> None:
    """Remove the output of an earlier job of this name, unless our own stdout goes to this file."""
    if not is_our_stdout(path):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class Relay:
    """Copies what is appended to a program's log to our stdout, so that it is seen as well as kept."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy_to_stdout, daemon=True)
        self._thread.start()

    def _copy_to_stdout(self) -> None:
        """Copy what is appended to the log to our stdout until the program has ended, in a thread."""
        # A closed stdout must not end the program.
        with contextlib.suppress(OSError):
            has_ended = False
            while True:
                while text := os.read(self._descriptor, 1 << 16):
                    while text:
                        text = text[os.write(1, text) :]
                # Once more after the end, for the last words.
                if has_ended:
                    return
                has_ended = self._ended.wait(_COPY_SECONDS)

    def close(self) -> None:
        """Copy what the program has printed last; it has ended."""
        self._ended.set()
        # Not without end: nobody may read our stdout.
        self._thread.join(5.0)
        os.close(self._descriptor)


def is_our_stdout(path: Path) -> bool:
    """Return whether a file is what our own stdout goes to, as that of a detached job does."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


@dataclass
class Run:
    """One program in a share, with its parts: the plan, and carrying it out."""

    host: Host
    share: Share
    parts: Sequence[Part]
    command: Sequence[str]
    options: RunOptions
    reporter: RunReport
    # What runs it.
    container: Container | None = None
    # The last try has failed after its MPS server had died.
    mps_fault: bool = False

    def steps(self) -> tuple[Step, ...]:
        """Return the steps on the host as it is now: the start of an MPS daemon where one is needed, then the program."""
        self._check()
        log = self.options.log
        what = self.command[0]
        if self.options.container is not None:
            what = f"a container of {self.options.container}"
        where = self.share.where + "".join(part.where for part in self.parts)
        line = command_line(self.share.environment({} if log is None else _UNBUFFERED), self.command)
        if log is not None:
            line += f" >> {shlex.quote(str(log))} 2>&1"
        program = step_of_run(f"run {what} {where}", line)
        return (*self.options.before, *self.share.steps(), program, *self.options.meanwhile)

    def _check(self) -> None:
        """Raise unless the program can run with its parts in its share."""
        for part in self.parts:
            part.check()
        self.share.check(self.command[0])

    def carry_out(self) -> int:
        """Run the program, and give the share back; return the program's exit code: 128 + N when signal N ended it.

        Raises:
            GpushareError: the share could not be set up (nothing was run), or the program not be started or ended.
        """
        try:
            self._check()
            self.share.open()
            for part in self.parts:
                part.open()
        except BaseException:
            _give_back(self.share, self.parts)
            raise
        session = Session(self)
        try:
            environment = self.share.environment({**os.environ, **({} if self.options.log is None else _UNBUFFERED)})
            for part in self.parts:
                environment |= part.variables
            exit_code = session.run(self.command, environment)
            self.mps_fault = session.mps_fault
        finally:
            session.close()
        for part in self.parts:
            part.raise_end()
        return exit_code


def _give_back(share: Share, parts: Sequence[Part], *, program_lives: bool = False) -> bool:
    """Give back what a job has, the share last; return whether others go on using its MPS daemon."""
    for part in reversed(parts):
        part.close(program_lives=program_lives)
    return share.close(program_lives=program_lives)


class Session:
    """One program and its parts, from its start to its end."""

    def __init__(self, run: Run) -> None:
        self._host, self._share, self._parts = run.host, run.share, run.parts
        self._options, self._reporter, self._container = run.options, run.reporter, run.container
        # Of the parts, those that have begun: none before a container runs.
        self._running: Sequence[Part] = ()
        self._child: Child | None = None
        # The processes that were reported, and whether the end of the daemon was.
        self._told: set[int] = set()
        self._told_gone = False
        self._ended_by: int | None = None
        self._relay: Relay | None = None
        self.mps_fault = False

    def close(self) -> bool:
        """Give back what the job has; return whether others go on using its MPS daemon."""
        lives = self._child is not None and self._child.poll() is None
        return _give_back(self._share, self._parts, program_lives=lives)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the program to its end, and return its exit code, or 128 + N if signal N has ended it."""
        # Catch signals before the program starts: from then on, none may kill gpushare.
        with Wakeups((*ENDING, *_PASSED_ON, signal.SIGTSTP, signal.SIGCHLD)) as wakeups, self._guarded_run() as guard:
            child = self._start(command, environment, guard)
            with Terminal(child.pid) as terminal:
                status = self._run_until_end(child, wakeups, terminal)
            self._settle(status)
        return self._exit_code(status)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], guard: Guard) -> Child:
        """Start the program, or the client of its container engine, and watch it; its parts begin with the program."""

        def announce(pid: int, started: int | None) -> None:
            """Name the new process to the guard and the parts, before it runs the program."""
            guard.announce(pid, started)
            for part in self._parts:
                part.enter(pid)

        with self._opened_streams() as streams:
            child = self._child = self._host.processes.spawn(command, environment, streams, announce=announce)
        # A part also tells the guard of each worker in a session of its own that it stops.
        self._tell = guard.add_process
        self._tell(child.pid, start_of(self._host.processes.identity(child.pid)))
        if self._container is None:
            self._begin(self._share.watch(child.pid))
        else:
            self._watch = self._container.client_watch(child.pid)
        return child

    def _settle(self, status: int) -> None:
        """Finish after the end of the program: copy its last words, settle its parts, and report what was seen of it."""
        if self._relay is not None:
            self._relay.close()
        for part in reversed(self._running):
            part.settle()
        watch = self._watch
        watch.settle()
        self.mps_fault = bool(status) and self._ended_by is None and watch.mps_fault()
        self._report_news()
        if not watch.attached and not watch.outside:
            self._say(self._reporter.share_not_proved)

    def _begin(self, watch: Watch) -> None:
        """Watch the program, which runs now, and hand the watch to the parts."""
        self._watch = watch
        self._running = self._parts
        watch.tell = self._tell
        for part in self._parts:
            part.started(watch)

    def _begin_in_container(self, container: Container, client: int) -> None:
        """Begin once the container runs, else return: the program is its first process, which is not below our child."""
        pid = container.first_process()
        if pid is None:
            return
        self._host.processes.replace_client(client, pid)
        self._tell(pid, start_of(self._host.processes.identity(pid)))
        watch = self._share.watch(pid)
        # Only root may signal the processes of a foreign container; the client passes signals on.
        watch.client_pid = client if container.is_foreign else None
        self._begin(watch)

    @contextlib.contextmanager
    def _opened_streams(self) -> Iterator[Streams | None]:
        """Yield the streams of the program: its log, if it has one, or ours (None)."""
        stderr = self._options.stderr
        log = self._options.log
        if log is None:
            yield None if stderr is None else Streams(0, 1, stderr)
            return
        descriptor = open_log(log)
        relay = None if is_our_stdout(log) else Relay(log)
        try:
            yield Streams(0, descriptor, descriptor if stderr is None else stderr)
            # The program has started: `_settle` closes it.
            self._relay, relay = relay, None
        finally:
            os.close(descriptor)
            if relay is not None:
                relay.close()

    def _run_until_end(self, child: Child, wakeups: Wakeups, terminal: Terminal) -> int:
        """Serve the program until it ends: signals, the terminal, its parts; return its status (negative: a signal)."""
        while (status := child.poll()) is None:
            # A look is due by the clock alone: a SIGCHLD may come from the child by which the last look talked to the daemon.
            seconds = min(
                self._watch.seconds_to_poll, *(part.seconds_to_poll for part in self._running), _LONGEST_SECONDS
            )
            for number in wakeups.wait(max(0.0, seconds)):
                if number in ENDING or (number in _DEADLY and self._would_kill_a_client(number)):
                    self._notify_parts()
                    self._end(number, wakeups)
                elif number == signal.SIGTSTP:
                    terminal.suspend()
                elif number in _PASSED_ON:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, number)
            terminal.serve(child)
            if self._ended_by is None and child.poll() is None:
                self._poll_parts(child, wakeups)
        return status

    def _poll_parts(self, child: Child, wakeups: Wakeups) -> None:
        """Poll the watch and the parts that are due; end the program if one of them wants that."""
        if self._watch.seconds_to_poll <= 0:
            if self._container is not None and not self._running:
                self._begin_in_container(self._container, child.pid)
            self._watch.poll()
        device = self._watch.device
        is_to_end = any(part.poll() for part in self._running if part.seconds_to_poll <= 0)
        if self._watch.device is not device:
            # One of them has moved the program.
            for part in self._running:
                part.moved(self._watch.device)
        self._report_news()
        if is_to_end or (self._options.strict and self._watch.outside):
            self._end(signal.SIGTERM, wakeups)

    def _notify_parts(self) -> None:
        """Tell the parts that the user ends the program: its end is not for want of memory then."""
        for part in self._running:
            part.note_user_ends()

    def _would_kill_a_client(self, number: int) -> bool:
        """Return whether passing a signal on would end an MPS client, which has no handler for it, with its queue in flight."""
        processes = self._host.processes
        clients = self._watch.clients()
        members = processes.descendants(self._watch.signalled_pid)
        # Any of them may be a client if the daemon does not answer (None).
        may_be_clients = members if clients is None else clients.intersection(members)
        return any(processes.catches(pid, number) is False for pid in may_be_clients)

    def _say(self, report: Callable[..., None], *facts: object) -> None:
        """Report something; if that fails, such as on a closed stderr, the program goes on."""
        with contextlib.suppress(Exception):
            report(*facts)

    def _report_news(self) -> None:
        """Report each process once, when it is first attached, outside or pending; and what the parts have to tell."""
        watch = self._watch
        if watch.daemon_gone and not self._told_gone:
            self._told_gone = True
            self._say(self._reporter.daemon_gone)
        for pids, report in (
            (watch.attached, self._reporter.attached),
            (watch.outside, self._reporter.outside),
            (watch.pending, self._reporter.pending),
        ):
            for pid in sorted(set(pids) - self._told):
                self._say(report, pid)
                self._told.add(pid)
        while watch.news:
            self._say(self._reporter.news, watch.news.pop(0))
        while watch.troubles:
            self._say(self._reporter.trouble, watch.troubles.pop(0))

    def _end(self, number: int, wakeups: Wakeups) -> None:
        """End the program the safe way, with the strays of its parts: processes that have left its tree."""
        self._ended_by = number
        programs = starts_of(self._host.processes, [self._watch.signalled_pid])
        for part in self._running:
            programs |= part.release()

        def hurry() -> bool:
            """Return whether to cut the grace short: memory grows, or the user asks again, which the parts are told."""
            asked_again = any(pressed in ENDING for pressed in wakeups.wait(0.0))
            if asked_again:
                self._notify_parts()
            return asked_again or any(part.grows() for part in self._running)

        drain = end_programs(
            self._host,
            programs,
            self._watch.clients,
            self._share.meter,
            number=number,
            grace_seconds=self._options.grace_seconds,
            hurry=hurry,
        )
        if drain is not None:
            self._say(self._reporter.ended, drain)

    def _exit_code(self, status: int) -> int:
        """Return the exit code for a status, as a shell gives it: 128 + N after signal N; 1 if it did not stay in its share."""
        if self._options.strict and self._watch.outside:
            return 1
        if status >= 0:
            return status
        # Ended by us, perhaps by a signal other than the one we got: report the one that the caller sent.
        if -status in {signal.SIGKILL, signal.SIGINT, signal.SIGTERM} and self._ended_by is not None:
            return 128 + self._ended_by
        return 128 - status

    @contextlib.contextmanager
    def _guarded_run(self) -> Iterator[Guard]:
        """Yield the guard, and give the share back; if anything fails meanwhile, the guard ends what is left of the program."""
        guard = guard_of(self._host, self._share)
        try:
            yield guard
            # Before the guard is dismissed: if gpushare is killed in between, the guard still stops the daemon.
            lingers = self.close()
        except BaseException:
            guard.leave()
            raise
        dismiss(guard, lingers=lingers)
