"""Temporary files that a gpushare left which was killed in the middle of writing one: removed by the next change."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare.host.records import clear_leftovers

if TYPE_CHECKING:
    from gpushare.host.host import Host


def sweep(host: Host) -> None:
    """Remove what is left of journals, names and records; for each change, also one with nothing to do.

    It needs no lock: what is being written is locked itself. Only in directories that nobody else can plant or redirect.
    """
    # Not all of it: this directory may be one that a user has named, with files of others.
    if _is_private(host.state_directory):
        for stem in ("mig-names", "applied"):
            clear_leftovers(host.state_directory, stem)
    homes = host.run_directory / "mps"
    if not _is_private(host.run_directory):
        return
    rooms = (host.run_directory / name for name in ("mig", "timeslice", "production"))
    for directory in (*rooms, *_below(homes)):
        if _is_private(directory):
            clear_leftovers(directory)


def _below(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir()) if _is_private(directory) else []
    except OSError:
        return []


def _is_private(directory: Path) -> bool:
    """Return whether a directory is one, no link to one, and only this user or root may write there."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in {0, os.geteuid()} and not found.st_mode & 0o022
