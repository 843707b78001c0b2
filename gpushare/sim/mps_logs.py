"""control.log and server.log of simulated MPS daemons, with the real lines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

CONTROL = "control.log"
SERVER = "server.log"
DEFAULT_DIRECTORY = "/var/log/nvidia-mps"


@dataclass(frozen=True)
class LogLine:
    """One line to append to a log; ``tag`` is Control, Server or Other."""

    directory: str
    file: str
    tag: str
    pid: int
    text: str


def stamp(at: float) -> str:
    """Return a time as the MPS logs write it: ``2026-11-21 05:58:23.419``, local time."""
    milliseconds = int(at * 1000) % 1000
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{milliseconds:03d}"


def render(line: LogLine, at: float) -> str:
    """Return the line as it stands in the file."""
    return f"[{stamp(at)} {line.tag} {line.pid:5d}] {line.text}\n"


def append(lines: Iterable[LogLine]) -> None:
    """Append the lines to their files; a log directory that is gone or closed loses them, as with the real daemon."""
    at = time.time()
    texts: dict[str, str] = {}
    for line in lines:
        if line.directory == DEFAULT_DIRECTORY:
            # The machine's own daemon writes there.
            continue
        path = os.path.join(line.directory, line.file)
        texts[path] = texts.get(path, "") + render(line, at)
    for path, text in texts.items():
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(text)
