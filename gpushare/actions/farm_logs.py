"""The logs of a farm: ``copy-N.log``, and ``copy-N.K.log`` of its K-th start again."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Final

_OF_A_RESTART: Final = re.compile(r"copy-(\d+)\.\d+\.log", re.ASCII)


def log_of(directory: Path, number: int, restarts: int) -> Path:
    """Return the log of a copy after so many restarts."""
    return directory / f"copy-{number}{f'.{restarts}' if restarts else ''}.log"


def remove_earlier_logs(directory: int, copies: int) -> None:
    """Remove the logs of restarts that an earlier farm has left of these copies; the first one's is written anew anyway."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            match = _OF_A_RESTART.fullmatch(name)
            if match is not None and int(match[1]) < copies:
                # One that may not be removed hinders nobody, nor does a directory.
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=directory)


def hint_on_space(directory: Path | None) -> str:
    """Return what to do when there was no space left for what a copy prints; None: it was not kept."""
    where = tempfile.gettempdir() if directory is None else directory.absolute()
    return f"free space in {where}, or keep what copies print elsewhere: --logs DIR"
