"""The last gpushare.yaml that held on this host: ``<state>/applied.yaml``, which is applied again at boot."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.kept_file import read_bounded, replace_file, writing

if TYPE_CHECKING:
    from gpushare.host.host import Host

NAME = "applied.yaml"


def applied_path(host: Host) -> Path:
    """Return where the file is kept."""
    return host.state_directory / NAME


def keep_applied(host: Host, text: str) -> Path:
    """Keep the text of a file that held, atomically and on the disk; return where.

    One that is kept already is not written again: at boot the disk may be full, or not writable.

    Raises:
        NoPermission, OperationFailed: it cannot be written (code ``not_kept``); what was kept before stands.
    """
    path = applied_path(host)
    with contextlib.suppress(OSError, ValueError):
        if is_trusted_directory(host.state_directory) and read_bounded(path) == text.encode():
            return path
    make_private_directory(host.state_directory, variable="GPUSHARE_STATE_DIR")
    with writing(path, "the file for the next boot", code="not_kept"):
        replace_file(path, text, durable=True)
    return path
