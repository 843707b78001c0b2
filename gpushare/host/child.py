"""A program of the user as a child process: started in its own process group, announced first, waited for."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpushare.errors import NoPermission, NotFound, OperationFailed
from gpushare.units import quoted

if TYPE_CHECKING:
    from gpushare.host.process import Streams


class Child:
    """Waits for a child with waitpid(2), which unlike subprocess also tells that it was stopped."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self._stopped: int | None = None

    def poll(self) -> int | None:
        """Return the exit status as subprocess does (negative: killed by that signal), or None."""
        while self._process.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                # Somebody else reaped it, and its status with it.
                self._process.returncode = 0
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._stopped = os.WSTOPSIG(status)
                continue
            self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode

    def stopped_by(self) -> int | None:
        """Return the signal that has stopped it since the last call, or None."""
        self.poll()
        stopped, self._stopped = self._stopped, None
        return stopped


def started(
    argv: Sequence[str],
    env: Mapping[str, str],
    streams: Streams | None = None,
    announce: Callable[[int], None] | None = None,
) -> Child:
    """Start a program in its own process group. Signals that gpushare was told to ignore are ignored in it, too.

    ``announce`` is called in the new process with its PID, before the program runs in it; if that fails, it does not.

    Raises:
        NotFound: there is no such program.
        NoPermission: it may not be executed.
        OperationFailed: it cannot be executed, or was not announced.
    """

    def before_it_runs() -> None:
        # process_group= needs Python 3.11.
        os.setpgrp()
        if announce is not None:
            announce(os.getpid())
        # Python ignores these for itself alone. Only now: a pipe that nobody reads raises above, and does not kill.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)

    given = {} if streams is None else streams._asdict()
    try:
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            preexec_fn=before_it_runs,  # noqa: PLW1509
            restore_signals=False,
            **given,
        )
    except subprocess.SubprocessError:
        raise OperationFailed(
            f"{quoted(argv[0], 200)} was not started: the guard that would end it if gpushare died is gone itself",
            "start it again; what ended the guard may be seen in: journalctl -e",
            code="guard_gone",
        ) from None
    except FileNotFoundError:
        raise NotFound(
            f"there is no program {quoted(argv[0], 200)}",
            f"check the spelling: command -v {shlex.quote(argv[0])}",
            code="command_not_found",
        ) from None
    except PermissionError:
        raise NoPermission(
            f"may not execute {quoted(argv[0], 200)}",
            f"check its mode: ls -l {shlex.quote(argv[0])}",
            code="command_not_executable",
        ) from None
    except OSError as error:
        raise OperationFailed(
            f"cannot execute {quoted(argv[0], 200)}: {error.strerror}", "give a program that this machine can run"
        ) from None
    return Child(process)
