"""Production's own progress: the numbers that it prints into its log, which gpushare only reads."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import stat
from collections.abc import Collection
from dataclasses import field
from pathlib import Path
from typing import Final

from gpushare.base.errors import NoPermission, NotFound, OperationFailed
from gpushare.base.values import dataclass
from gpushare.run.numbers import amount, bounded

# A look reads no more than this. What a program prints faster than that is skipped.
_MOST_BYTES: Final = 256 << 10
_LONGEST_LINE: Final = 64 << 10
_MATCH_SECONDS: Final = 0.5
# No link is followed, no FIFO waited for.
_SAFE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass
class Progress:
    """Reads the new numbers of a log, across its rotation and truncation.

    ``owners`` are the users whose file it may be. The numbers are speeds: with ``higher_is_better`` False the program
    prints times per unit of work.
    """

    path: Path
    pattern: str
    owners: Collection[int]
    higher_is_better: bool = True
    _file: int | None = None
    _at: int = 0
    _rest: bytes = field(default=b"", repr=False)
    # What was in it before is not about now.
    _first: bool = True

    def look(self) -> list[float]:
        """Return the speeds printed since the last look.

        Raises:
            NotFound, NoPermission, OperationFailed: it is not there, or cannot be read (code ``log_unreadable``).
            TimedOut: the pattern takes too long.
        """
        speeds: list[float] = []
        if self._file is not None and not self._is_current():
            # It was rotated: first the end of the old one.
            speeds = self._numbers(self._new_lines())
            self.close()
        if self._file is None:
            self._open()
        return speeds + self._numbers(self._new_lines())

    def close(self) -> None:
        """Close the file; the next look opens it again."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._rest = None, b""

    def _open(self) -> None:
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
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in self.owners:
            os.close(file)
            reason = "is not a regular file" if not stat.S_ISREG(status.st_mode) else f"belongs to user {status.st_uid}"
            raise NoPermission(f"production's log {self.path} {reason}", hint, code="log_unreadable")
        self._file, self._at = file, status.st_size if self._first else 0
        self._first = False

    def _is_current(self) -> bool:
        with contextlib.suppress(OSError):
            present, opened = os.lstat(self.path), os.fstat(self._file or 0)
            return (present.st_dev, present.st_ino) == (opened.st_dev, opened.st_ino)
        # Moved away and not created again yet: production still writes to the open file.
        return True

    def _new_lines(self) -> list[bytes]:
        if self._file is None:
            return []
        try:
            size = os.fstat(self._file).st_size
            if size < self._at:
                # Truncated.
                self._at, self._rest = 0, b""
            if size - self._at > _MOST_BYTES:
                self._at, self._rest = size - _MOST_BYTES, b""
            text = os.pread(self._file, _MOST_BYTES, self._at)
        except OSError:
            return []
        self._at += len(text)
        *lines, rest = (self._rest + text).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        return lines

    def _numbers(self, lines: list[bytes]) -> list[float]:
        speeds: list[float] = []
        if not lines:
            return speeds
        with bounded(self.pattern, _MATCH_SECONDS):
            for line in lines:
                for match in re.finditer(self.pattern, line[:_LONGEST_LINE].decode(errors="replace")):
                    value = amount(match.group(1))
                    if value is None:
                        continue
                    speed = value if self.higher_is_better else 1 / value if value > 0 else math.inf
                    if math.isfinite(speed):
                        speeds.append(speed)
        return speeds
