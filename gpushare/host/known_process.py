"""Signals to processes that were looked at before, and to nobody who has got their PID since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpushare.errors import NotFound

if TYPE_CHECKING:
    from gpushare.host.process import Processes


def known(processes: Processes, pids: Iterable[int] | Mapping[int, float]) -> dict[int, float]:
    """Return when each process started, by PID, without those that are gone; what is known already stays as it is."""
    if isinstance(pids, Mapping):
        return dict(pids)
    infos = {pid: processes.describe(pid) for pid in pids}
    return {pid: one.started_at for pid, one in infos.items() if one is not None and one.started_at is not None}


def signal_known(processes: Processes, pid: int, started_at: float, number: int) -> bool:
    """Send a signal to the process that started then; return whether it was still there.

    Raises:
        NoPermission: it belongs to another user.
    """
    try:
        processes.send_to(pid, started_at, number)
    except NotFound:
        return False
    return True
