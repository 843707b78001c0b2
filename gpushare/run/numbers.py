"""The numbers that a program prints: a pattern finds them, in bounded time; and those that production prints into its log."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import stat
import threading
import warnings
from collections.abc import Collection, Iterator
from dataclasses import field
from pathlib import Path
from typing import Final

from gpushare.base.errors import BadUsage, NoPermission, NotFound, OperationFailed, TimedOut
from gpushare.base.units import quoted
from gpushare.base.values import dataclass

_LONGEST_PATTERN: Final = 1000
# No digit can match in two places: the time for a long row of digits would grow with its square.
_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
# "1,234.5": thousands in groups of three.
_GROUPED: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# Larger numbers are no rate or time. The square of this one can still be summed.
_MOST: Final = 1e100


def check_pattern(option: str, text: str) -> None:
    """Raise BadUsage unless a text, given with this option, is a regular expression with one pair of brackets."""
    reason = None
    if len(text) > _LONGEST_PATTERN:
        reason = f"is longer than {_LONGEST_PATTERN} characters"
    else:
        try:
            with warnings.catch_warnings():
                # A FutureWarning about syntax whose meaning may change.
                warnings.simplefilter("ignore")
                groups = re.compile(text).groups
            if groups != 1:
                reason = f"has {groups} pairs of brackets, not one"
        except (re.error, RecursionError, OverflowError) as error:
            reason = f"is not a regular expression: {error}"
    if reason is not None:
        raise BadUsage(
            f"{option} {quoted(text)} {reason}",
            f"mark the number with one pair of brackets: {option} 'rate=([0-9.]+)'",
            code="bad_metric",
        )


def number(text: str | None) -> float | None:
    """Parse a finite number; None if the text is not one."""
    text = (text or "").strip()
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    match = _NUMBER.fullmatch(text)
    value = float(match.group()) if match else math.nan
    return value if math.isfinite(value) else None


def amount(text: str | None) -> float | None:
    """Parse a rate or time; None if it is not a number, negative, or too large to be summed."""
    value = number(text)
    return None if value is None or not 0 <= value <= _MOST else value


# For all that is matched at once.
SECONDS: Final = 5.0


@contextlib.contextmanager
def bounded(pattern: str | None, seconds: float = SECONDS) -> Iterator[None]:
    """Bound the CPU time of the matching in the block, by a signal: nothing else interrupts Python's `re`.

    ``pattern`` is for the message; None: there are several. Only the main thread gets signals: in another one there is no
    bound.

    Raises:
        TimedOut: the time is up (code ``slow_metric``).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_timed_out(*_: object) -> None:
        what = f": {pattern}" if pattern else ""
        raise TimedOut(
            f"--metric or --latency took longer than {seconds:g} s for what the program prints{what}",
            "give a simpler pattern, without nested repeats: --metric 'rate=([0-9.]+)'",
            code="slow_metric",
        )

    earlier_handler = signal.signal(signal.SIGVTALRM, raise_timed_out)
    # Of the CPU: on a busy host a good pattern takes longer, too.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, earlier_handler)


# A look reads no more than this. What a program prints faster than that is skipped.
_MOST_BYTES: Final = 256 << 10
_LONGEST_LINE: Final = 64 << 10
_MATCH_SECONDS: Final = 0.5
# No link is followed, no FIFO waited for.
_SAFE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass
class Progress:
    """Reads the new numbers of a log from its present end on; a log that was renamed is read on, as production writes on.

    ``owners`` are the users whose file it may be. The numbers are speeds: with ``higher_is_better`` False the program
    prints times per unit of work.
    """

    path: Path
    pattern: str
    owners: Collection[int]
    higher_is_better: bool = True
    _file: int | None = None
    # Where the next look reads on, and the beginning of a line that was not complete.
    _at: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def read_speeds(self) -> list[float]:
        """Return the speeds printed since the last look.

        Raises:
            NotFound, NoPermission, OperationFailed: it is not there, or cannot be read (code ``log_unreadable``).
            TimedOut: the pattern takes too long.
        """
        file = self._opened() if self._file is None else self._file
        speeds: list[float] = []
        lines = self._new_lines(file)
        with bounded(self.pattern, _MATCH_SECONDS) if lines else contextlib.nullcontext():
            for line in lines:
                for match in re.finditer(self.pattern, line[:_LONGEST_LINE].decode(errors="replace")):
                    value = amount(match.group(1))
                    if value is not None and not self.higher_is_better:
                        # A time per unit of work.
                        value = 1 / value if value > 0 and math.isfinite(1 / value) else None
                    if value is not None:
                        speeds.append(value)
        return speeds

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _opened(self) -> int:
        """Open the log at its end, and return its descriptor: what was in it before is not about now."""
        hint = f"see: ls -l {shlex.quote(str(self.path))}; production writes it: gpushare run --production NAME --metric REGEX -- CMD"
        try:
            file = os.open(self.path, _SAFE)
        except FileNotFoundError:
            raise NotFound(f"production's log {self.path} does not exist", hint, code="log_unreadable") from None
        except OSError as error:
            kind = NoPermission if isinstance(error, PermissionError) else OperationFailed
            raise kind(
                f"production's log {self.path} cannot be read: {error.strerror}", hint, code="log_unreadable"
            ) from None
        status = os.fstat(file)
        reason = None
        if not stat.S_ISREG(status.st_mode):
            reason = "is not a regular file"
        elif status.st_uid not in self.owners:
            reason = f"belongs to user {status.st_uid}"
        if reason is not None:
            os.close(file)
            raise NoPermission(f"production's log {self.path} {reason}", hint, code="log_unreadable")
        self._file = file
        self._at = status.st_size
        return file

    def _new_lines(self, file: int) -> list[bytes]:
        """Return the lines appended since the last call, without one that is not complete yet."""
        try:
            size = os.fstat(file).st_size
            if size < self._at:
                # Truncated.
                self._at = 0
                self._rest = b""
            if size - self._at > _MOST_BYTES:
                # More than a look reads: only the newest counts.
                self._at = size - _MOST_BYTES
                self._rest = b""
            text = os.pread(file, _MOST_BYTES, self._at)
        except OSError:
            return []
        self._at += len(text)
        *lines, rest = (self._rest + text).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        return lines
