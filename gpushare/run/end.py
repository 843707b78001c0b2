"""Ending the program of `gpushare run`: its own signal first and time to end, then the safe way."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, NoPermission, NotFound
from gpushare.host.process import known, signal_known, wait_gone
from gpushare.mps.control import MpsControl
from gpushare.mps.kill import DRAIN_BOUND_SECONDS, Drain, Meter, end_clients, kill_all

if TYPE_CHECKING:
    from gpushare.host.host import Host


GRACE_SECONDS: Final = 10.0
# A signal must not wait longer for a daemon that hangs.
CONVERSATION_SECONDS: Final = 1.0


def ask_to_end(host: Host, pids: Mapping[int, float], clients: set[int] | None, number: int) -> dict[int, float]:
    """Send a signal to a program's processes (with their start times) where it does no harm; return those that got one.

    A process with a handler of its own gets the signal, or SIGINT if it handles only that (Python
    does). A process that is no MPS client gets it in any case, or SIGTERM if it ignores it. An MPS client without a handler would
    die of it with its queue in flight, and break its neighbours: it gets nothing here. ``clients`` None
    is unknown: then any of them may be one.
    """
    asked = {}
    for pid, started in pids.items():
        chosen = _harmless(host, pid, number, client=clients is None or pid in clients)
        if chosen is not None:
            with contextlib.suppress(NoPermission):
                if signal_known(host.processes, pid, started, chosen):
                    asked[pid] = started
    return asked


def _harmless(host: Host, pid: int, number: int, *, client: bool) -> int | None:
    for candidate in (number, signal.SIGINT, signal.SIGTERM):
        if host.processes.catches(pid, candidate):
            return candidate
    if client:
        return None
    # What was started with SIGINT ignored, as a script's background job is, ignores it for ever.
    ignored = number != signal.SIGTERM and host.processes.ignores(pid, number)
    return signal.SIGTERM if ignored else number


def end_programs(
    host: Host,
    program_pids: Iterable[int] | Mapping[int, float],
    clients: Callable[[], set[int] | None],
    meter: Meter | None,
    *,
    number: int = signal.SIGINT,
    grace_seconds: float = GRACE_SECONDS,
    bound_seconds: float = DRAIN_BOUND_SECONDS,
    hurry: Callable[[], bool] = lambda: False,
) -> Drain | None:
    """End programs and all their descendants together: one grace, one drain. Return how the GPU drained; None: no wait.

    ``program_pids`` may come with start times. Those of all descendants are noted when they are found: a process that
    gets one of the PIDs while the programs end gets no signal. ``clients`` are the processes whose sudden death would
    break others. ``meter`` measures the drained queue of what must be killed; without one it is killed at once, which
    outside MPS breaks nobody. ``hurry`` is asked during the grace, and cuts it short (a second Ctrl-C).

    Raises:
        GpushareError: a process could not be ended.
    """
    programs = known(host.processes, program_pids)
    pids = _living(host, programs)
    if not pids:
        return None
    ending = ask_to_end(host, pids, clients(), number)
    deadline = time.monotonic() + grace_seconds
    # A process that was asked has its time, whatever becomes of its handlers: Python takes them away
    # while it shuts down, and a stop in the middle of that would be taken by nobody.
    while ending and time.monotonic() < deadline and not hurry():
        left = wait_gone(host.processes, ending, 0.1)
        ending = {pid: ending[pid] for pid in left}
    # With what was started meanwhile.
    pids = _living(host, {**pids, **programs})
    if not pids:
        return None
    if meter is None:
        kill_all(host, pids)
        return None
    return end_clients(host, pids, meter, bound_seconds=bound_seconds)


def _living(host: Host, started: Mapping[int, float]) -> dict[int, float]:
    """Return the processes and all that descend from them, each once, with start times, without those that are gone."""
    there = [pid for pid, began in started.items() if host.processes.alive(pid, began)]
    below = dict.fromkeys(other for pid in there for other in host.processes.descendants(pid))
    found = known(host.processes, [pid for pid in below if pid not in started])
    found |= {pid: began for pid, began in started.items() if pid in below}
    return {pid: found[pid] for pid in below if pid in found and host.processes.alive(pid, found[pid])}


def client_pids(control: MpsControl, known: Collection[int] = ()) -> set[int] | None:
    """Return the PIDs of the daemon's clients, and those known before; None when the daemon cannot be asked.

    A daemon that is gone has no clients any more, and a process without a context breaks nobody.
    """
    try:
        return {client.pid for client in control.clients()} | set(known)
    except NotFound:
        return set(known)
    except GpushareError:
        return None


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
