"""A child process that tells also when it was stopped."""

from __future__ import annotations

import os
import subprocess


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
