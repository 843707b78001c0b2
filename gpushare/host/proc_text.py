"""What a process shows of itself in ``/proc``, read to a bound: any user can let his own show gigabytes there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# The kernel's own files: /proc/PID/stat, status, cgroup, limits.
_MOST_BYTES: Final = 1 << 20
_MOST_OF_COMMAND_LINE: Final = 128 << 10
MOST_OF_ENVIRONMENT: Final = 1 << 20


def read_proc(path: str, most: int = _MOST_BYTES) -> bytes | None:
    """Return what a file of ``/proc`` holds; None: it cannot be read, or is longer than ``most``."""
    try:
        with open(path, "rb") as file:
            text = file.read(most + 1)
    except (OSError, MemoryError):
        return None
    return text if len(text) <= most else None


def command_line_of(pid: int) -> Sequence[str] | None:
    """Return the words of a process's command line; None: they cannot be read, or are longer than 128 KiB."""
    text = read_proc(f"/proc/{pid}/cmdline", _MOST_OF_COMMAND_LINE)
    if not text:
        return None
    words = text.removesuffix(b"\0").decode(errors="surrogateescape")
    # A program that sets its title leaves one word with blanks.
    separator = "\0" if text.endswith(b"\0") and "\0" in words else " " if " " in words else "\0"
    return words.split(separator)


def entries_of(environment: bytes) -> list[tuple[str, str]]:
    """Return the variables of a ``/proc/PID/environ``, as they were when the program started."""
    entries = (entry.partition("=") for entry in environment.decode(errors="replace").split("\0"))
    return [(name, value) for name, equals, value in entries if equals]
