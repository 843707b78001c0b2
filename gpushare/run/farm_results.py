"""DIR/farm.jsonl: one line for each copy of a farm that has ended, from which ``farm --resume`` knows what is done.

The file only grows. A line is one write, so that a kill leaves whole lines; after a crash of the machine the last one may
be torn, and counts for nothing. Of several lines for one copy the last counts. A farm holds a lock on the file, and its
copies have the directory in their environment: a second farm never starts a copy while another one, or what is left of it
after a kill, still runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from gpushare.base.errors import InUse, NoPermission, OperationFailed
from gpushare.base.units import counted
from gpushare.base.values import dataclass
from gpushare.host.written_file import open_to_append

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.run.copies import Copy

NAME: Final = "farm.jsonl"
# In the environment of each copy: the directory of logs.
MARK: Final = "GPUSHARE_FARM"
# A line holds at most one of ``--each`` (4 KiB, escaped six times as long) and a few numbers.
_MOST_LINE_BYTES: Final = 32 << 10
_MOST_BYTES: Final = 256 << 20
# What a killed farm leaves is ended by its guard, after their time to end.
_LEFT_SECONDS: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class CopyEnd:
    """A copy that has ended, as the file has it. ``command`` is a digest: the words may hold a secret."""

    command: str
    copy: int
    line: str | None
    done: bool


def digest_of_command(command: Sequence[str]) -> str:
    """Return the digest of a command as typed, with its ``{}``."""
    return hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()[:24]


def parse_ends(lines: Iterable[bytes]) -> Iterator[CopyEnd]:
    """Yield what the lines of the file say, without those that are torn or not ours."""
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict):
            continue
        command, copy, text = value.get("command"), value.get("copy"), value.get("line")
        if type(command) is not str or type(copy) is not int or not (text is None or type(text) is str):
            continue
        done = value.get("state") == "done" and type(value.get("exit_code")) is int and value["exit_code"] == 0
        yield CopyEnd(command=command, copy=copy, line=text, done=done)


def copies_done(ends: Iterable[CopyEnd], command: str, copies: int, lines: Sequence[str] | None) -> set[int]:
    """Return the numbers of the copies that are done: with exit code 0, for the same command and the same line.

    ``command`` is its digest. A line that was moved within the file of ``--each`` is known again; one that is there twice
    is done twice only if two copies have done it.
    """
    latest = {(end.line, end.copy): end.done for end in ends if end.command == command}
    if lines is None:
        return {number for number in range(copies) if latest.get((None, number), False)}
    left = Counter(line for (line, _), done in latest.items() if done)
    found = {number for number, line in enumerate(lines) if latest.get((line, number), False)}
    left.subtract(lines[number] for number in found)
    for number, line in enumerate(lines):
        if number not in found and left[line] > 0:
            left[line] -= 1
            found.add(number)
    return found


def text_of_end(copy: Copy, command: str, ended_at: float) -> bytes:
    """Return the line for a copy that has ended at a time (seconds since 1970)."""
    value: dict[str, Any] = {
        "command": command,
        "copy": copy.number,
        "line": copy.line,
        "state": copy.state,
        "exit_code": copy.exit_code,
        "seconds": round(copy.seconds, 2),
        "gpu": copy.gpu,
        "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended_at)),
    }
    return json.dumps(value).encode() + b"\n"


class FarmResults:
    """The file of one farm, while it runs. Entered, it is locked."""

    def __init__(self, host: Host, path: Path, directory: int, command: Sequence[str]) -> None:
        """``directory`` is the open directory of ``path``."""
        self._host, self._path, self._directory = host, path, directory
        self._command = digest_of_command(command)
        found = os.fstat(directory)
        self.mark = f"{found.st_dev:x}-{found.st_ino:x}"
        self._file = -1

    def __enter__(self) -> FarmResults:
        """Open and lock it.

        Raises:
            NoPermission: it cannot be written (code ``not_written``).
            InUse: another farm has it (code ``logs_in_use``).
        """
        try:
            self._file = open_to_append(self._path, directory=self._directory)
        except OSError as error:
            raise self._unwritable(error, NoPermission) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise self._unwritable(error, OperationFailed) from None
            raise InUse(
                f"another farm writes to {self._path.parent}",
                "give this one a directory of its own: --logs OTHER",
                code="logs_in_use",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock it."""
        os.close(self._file)

    def _unwritable(self, error: OSError, kind: type[NoPermission | OperationFailed]) -> NoPermission | OperationFailed:
        return kind(
            f"cannot write {self._path}: {error.strerror}", "give --logs a directory of your own", code="not_written"
        )

    def wait_for_left(self, say: Callable[[str], None], asked: Callable[[float], bool]) -> bool:
        """Wait until no copy of a killed farm with these logs runs any more; return False if the user ends this one first.

        Raises:
            InUse: one does not end (code ``logs_in_use``).
        """
        deadline, said = time.monotonic() + _LEFT_SECONDS, False
        while left := self._host.processes.started_with(MARK, self.mark):
            if asked(0.1):
                return False
            if time.monotonic() >= deadline:
                raise InUse(
                    f"process {left[0]} of an earlier farm with these logs still runs",
                    f"end it: gpushare stop {left[0]}; or give this farm a directory of its own: --logs OTHER",
                    code="logs_in_use",
                )
            if not said:
                said = True
                say(f"waiting for {counted(len(left), 'process')} of an earlier farm with these logs, being ended")
        return True

    def done(self, copies: int, lines: Sequence[str] | None) -> set[int]:
        """Return the copies that are done (`copies_done`)."""
        return copies_done(parse_ends(self._lines()), self._command, copies, lines)

    def _lines(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError):
            reading = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
            with open(reading, "rb") as file:
                read = 0
                while read < _MOST_BYTES and (line := file.readline(_MOST_LINE_BYTES)):
                    read += len(line)
                    yield line

    def add(self, copy: Copy) -> None:
        """Append a copy that has ended.

        Raises:
            OperationFailed: it cannot be written (code ``not_written``).
        """
        try:
            line = text_of_end(copy, self._command, time.time())
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                # A torn line is one of its own.
                line = b"\n" + line
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error, OperationFailed) from None
