"""What a gpushare that was killed in the middle of writing a file left beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare.host.kept_file import clear_leftovers

if TYPE_CHECKING:
    from gpushare.host.host import Host


def clear_unfinished(host: Host) -> None:
    """Remove the temporary files of this user that nobody writes any more, wherever gpushare keeps files.

    It needs no lock: who writes one holds it locked. So it is done also where there is nothing else to do.
    """
    run = host.run_directory
    for directory in (host.state_directory, run / "timeslice", run / "mig", *(run / "mps").glob("*")):
        clear_leftovers(directory)
