"""The small files that gpushare keeps: whose word counts in them, and how they are replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def read_trusted(path: Path) -> Any:
    """Return the JSON of a file that this user or root wrote; None: there is none, or it cannot be understood.

    Others' word is not taken: these files say which process gets a signal, and where a program runs.
    """
    try:
        with open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid not in {os.geteuid(), 0}:
                return None
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file that everybody may read, in one step: a reader sees the old one or the new one.

    ``durable``: it is on the disk when this returns, and outlives a crash of the machine.

    Raises:
        OSError: it cannot be written; the old one stands.
    """
    # Not at the top: whoever only looks does not pay for it.
    import tempfile

    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring a directory's names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
