"""The last gpushare.yaml that held on this host: ``<state>/applied.yaml``, which is applied again at boot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpushare.errors import NoPermission
from gpushare.host.host import make_private_directory
from gpushare.host.kept_file import replace_file

if TYPE_CHECKING:
    from gpushare.host.host import Host

NAME = "applied.yaml"


def applied_path(host: Host) -> Path:
    """Return where the file is kept."""
    return host.state_directory / NAME


def keep_applied(host: Host, text: str) -> Path:
    """Keep the text of a file that held, atomically and on the disk; return where.

    Raises:
        NoPermission: the directory is not this user's.
    """
    make_private_directory(host.state_directory, variable="GPUSHARE_STATE_DIR")
    path = applied_path(host)
    try:
        replace_file(path, text, durable=True)
    except OSError as error:
        raise NoPermission(
            f"cannot write {path}: {error.strerror}",
            "run as root: sudo gpushare ...; or set GPUSHARE_STATE_DIR",
            code="directory_unwritable",
        ) from None
    return path
