"""A program of which every line is read: it prints to a file, so that it neither waits for its reader nor dies with it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Final

from gpushare.errors import NoPermission, OperationFailed
from gpushare.host.file_system import is_full
from gpushare.host.written_file import directory_of, open_over

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.process import Spawned

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
