"""What programs leave running when they have ended: told apart from their helpers, and ended so that it breaks nobody."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.actions.run_end import end_programs
from gpushare.host.known_process import known
from gpushare.host.process import wait_gone

if TYPE_CHECKING:
    from gpushare.actions.safe_end import Drain, Meter
    from gpushare.host.host import Host

# Helpers of a program (Python's resource tracker) end a moment after it; what stays longer was left behind.
HELPER_SECONDS: Final = 1.0


def still_there(host: Host, found: Mapping[int, Iterable[int]]) -> dict[int, tuple[int, ...]]:
    """Return who stays of those that were found of each program, by its PID; a program of which nobody stays is not in it."""
    members = {program: tuple(pids) for program, pids in found.items()}
    # Who has got the PID of one meanwhile was not left behind.
    started = known(host.processes, [pid for pids in members.values() for pid in pids])
    left = set(wait_gone(host.processes, started, HELPER_SECONDS))
    kept = {program: tuple(pid for pid in pids if pid in left) for program, pids in members.items()}
    return {program: pids for program, pids in kept.items() if pids}


def end_left_behind(
    host: Host,
    pids: Sequence[int],
    clients: Callable[[], set[int] | None],
    meter: Meter | None,
    *,
    grace_seconds: float,
    hurry: Callable[[], bool],
) -> Drain | None:
    """End it as `end_programs` does, with SIGTERM: a shell lets what it runs in the background ignore SIGINT.

    Raises:
        GpushareError: one could not be ended.
    """
    return end_programs(host, pids, clients, meter, number=signal.SIGTERM, grace_seconds=grace_seconds, hurry=hurry)
