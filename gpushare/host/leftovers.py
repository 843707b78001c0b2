"""Temporary files that a gpushare left which was killed in the middle of writing one: removed by the next change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpushare.host.kept_file import clear_leftovers

if TYPE_CHECKING:
    from gpushare.host.host import Host


def sweep(host: Host) -> None:
    """Remove what is left of MIG changes, of names and of the daemons' records; for each change, also one with nothing to do.

    It needs no lock: what is being written is locked itself.
    """
    clear_leftovers(host.run_directory / "mig")
    # Not all of it: this directory may be one that a user has named, with files of others.
    for stem in ("mig-names", "applied"):
        clear_leftovers(host.state_directory, stem)
    homes = host.run_directory / "mps"
    try:
        names = os.listdir(homes)
    except OSError:
        return
    for name in names:
        clear_leftovers(homes / name)
