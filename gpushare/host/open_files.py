"""Which processes have files open below a path: one pass over ``/proc/PID/fd``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OpenFiles:
    """Open files by PID. ``complete`` is False when there were processes that could not be looked into."""

    by_pid: Mapping[int, tuple[str, ...]]
    complete: bool

    def holders_of(self, path: str) -> tuple[int, ...]:
        """Return the PIDs that have a file open."""
        return tuple(pid for pid, paths in self.by_pid.items() if path in paths)


def open_files(prefix: str, proc: str = "/proc") -> OpenFiles:
    """Return who has files open whose path starts with ``prefix`` (``fuser``, ``lsof``), by PID.

    Only root sees the files of other users' processes. A file that was removed since counts under its old name.
    """
    found: dict[int, tuple[str, ...]] = {}
    complete = True
    try:
        entries = [int(entry) for entry in os.listdir(proc) if entry.isdigit()]
    except OSError:
        return OpenFiles(by_pid={}, complete=False)
    for pid in sorted(entries):
        try:
            paths = sorted({path for path in _files_of(f"{proc}/{pid}/fd") if path.startswith(prefix)})
        except PermissionError:
            complete = False
        except OSError:
            # It ended meanwhile.
            continue
        else:
            if paths:
                found[pid] = tuple(paths)
    return OpenFiles(by_pid=found, complete=complete)


def _files_of(directory: str) -> Iterator[str]:
    for descriptor in os.listdir(directory):
        try:
            yield os.readlink(f"{directory}/{descriptor}").removesuffix(" (deleted)")
        except PermissionError:
            raise
        except OSError:
            # Closed meanwhile.
            continue
