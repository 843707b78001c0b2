"""End programs: first their own signal and a grace period, then stop, drain, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from gpushare.base.errors import GpushareError, NoPermission, NotFound
from gpushare.host.host import Host
from gpushare.host.process import info_of, signal_if_same, starts_of, wait_gone
from gpushare.host.records import has_records
from gpushare.memory.swap import checkpoint_before_kill
from gpushare.mps.control import MpsControl
from gpushare.mps.kill import DRAIN_BOUND_SECONDS, Drain, Meter, end_clients, kill_all

GRACE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1
# bash catches SIGINT also in a script, and goes on if the program for which it waits does not die of it (bash 5.2); `sh`
# may be bash.
_SHELLS: Final = frozenset({"bash", "sh"})
# A hanging daemon must not hold up a signal for longer.
CONVERSATION_SECONDS: Final = 1.0


def ask_to_end(host: Host, pids: Mapping[int, int], clients: set[int] | None, number: int) -> dict[int, int]:
    """Send a signal to processes (PIDs with start times) where it does no harm; return those that got one.

    A process with its own handler gets the signal, or SIGINT if it handles only that (as Python does); a shell never
    gets SIGINT in place of another signal. A process that is not an MPS client always gets it, or SIGTERM if it ignores
    it. An MPS client without a handler would die with its queue in flight and break its neighbours, so it gets nothing
    here. ``clients`` None: any process may be a client.
    """
    asked = {}
    for pid, started in pids.items():
        chosen = _signal_to_send(host, pid, number, client=clients is None or pid in clients)
        if chosen is not None:
            with contextlib.suppress(NoPermission):
                if signal_if_same(host.processes, pid, started, chosen):
                    asked[pid] = started
    return asked


def _signal_to_send(host: Host, pid: int, number: int, *, client: bool) -> int | None:
    """Return the signal with which to ask a process to end, as `ask_to_end` says; None: a client that handles none."""
    command_line = info_of(host.processes, pid).command_line or ()
    # Also of a script: the kernel puts the shell before its name. A login shell has a hyphen before its own.
    is_shell = bool(command_line) and os.path.basename(command_line[0]).removeprefix("-") in _SHELLS
    for candidate in (number, signal.SIGTERM) if is_shell else (number, signal.SIGINT, signal.SIGTERM):
        if host.processes.catches(pid, candidate):
            return candidate
    # A shell has no work on the GPU.
    if client and not is_shell:
        return None
    # A process started with SIGINT ignored, such as a script's background job, ignores it forever.
    is_ignored = number != signal.SIGTERM and host.processes.ignores(pid, number)
    return signal.SIGTERM if is_ignored else number


def end_programs(
    host: Host,
    program_pids: Iterable[int] | Mapping[int, int],
    clients: Callable[[], set[int] | None],
    meter: Meter | None,
    *,
    number: int = signal.SIGINT,
    grace_seconds: float = GRACE_SECONDS,
    hurry: Callable[[], bool] = lambda: False,
) -> Drain | None:
    """End programs and all their descendants together: one grace, one drain. Return how the GPU drained; None: no wait.

    ``program_pids`` may have start times. The start times of all descendants are noted when they are found: a process
    that reuses one of the PIDs while the programs end gets no signal. ``clients`` are the processes whose sudden death
    would break others. ``meter`` measures the drained queue of what must be killed; without one it is killed at once,
    which outside MPS harms no other process. ``hurry`` is polled during the grace and cuts it short (a second Ctrl-C).

    Raises GpushareError: a process could not be ended.
    """
    programs = starts_of(host.processes, program_pids)
    pids = _living(host, programs)
    if not pids:
        return None
    if has_records(host, "pause"):
        from gpushare.pause.change import resume_before_end

        # A handler that waits for the GPU would never end a paused program.
        resume_before_end(host, pids)
    if has_records(host, "swap"):
        # Those that the signal kills at once: they handle neither it nor another one that asks them to end.
        signals = {number, signal.SIGINT, signal.SIGTERM}
        checkpoint_before_kill(
            host, [pid for pid in pids if not any(host.processes.catches(pid, each) for each in signals)]
        )
    asked = ask_to_end(host, pids, clients(), number)
    deadline = time.monotonic() + grace_seconds
    # Each has all of the grace, even if its handlers go: Python removes them while it shuts down, and nothing would handle
    # a stop in the middle of that.
    while asked and time.monotonic() < deadline and not hurry():
        asked = {pid: asked[pid] for pid in wait_gone(host.processes, asked, _POLL_SECONDS)}
    # What is left, with what they have started since, is killed: under MPS after its queue is drained.
    pids = _living(host, {**pids, **programs})
    if not pids:
        return None
    if has_records(host, "swap"):
        checkpoint_before_kill(host, list(pids))
    if meter is None:
        kill_all(host, pids)
        return None
    return end_clients(host, pids, meter, bound_seconds=DRAIN_BOUND_SECONDS)


def _living(host: Host, starts: Mapping[int, int]) -> dict[int, int]:
    """Return the living ones of some processes (PIDs with start times) and of their descendants, with start times."""
    alive = [pid for pid, started in starts.items() if host.processes.alive(pid, started)]
    tree = dict.fromkeys(member for pid in alive for member in host.processes.descendants(pid))
    # Start times that are given are not looked up: other processes may have taken these PIDs meanwhile.
    starts = {**starts_of(host.processes, [pid for pid in tree if pid not in starts]), **starts}
    return {pid: starts[pid] for pid in tree if pid in starts and host.processes.alive(pid, starts[pid])}


def client_pids(control: MpsControl, earlier: Collection[int] = ()) -> set[int] | None:
    """Return the PIDs of the daemon's clients, and of those seen ``earlier``; None: the daemon does not answer.

    If the daemon is gone, only the earlier ones count: the death of a process without a context harms no other.
    """
    try:
        return {client.pid for client in control.clients()} | set(earlier)
    except NotFound:
        return set(earlier)
    except GpushareError:
        return None


# Helpers such as Python's resource tracker end a moment after their program; what stays longer was left behind.
HELPER_SECONDS: Final = 1.0


def still_there(host: Host, groups: Mapping[int, Iterable[int]]) -> dict[int, tuple[int, ...]]:
    """Wait a moment, and return which processes of each program (by its PID) have not ended; programs without any are left out."""
    members = {program: tuple(pids) for program, pids in groups.items()}
    # By start time: a PID may have been reused.
    starts = starts_of(host.processes, [pid for pids in members.values() for pid in pids])
    stays = set(wait_gone(host.processes, starts, HELPER_SECONDS))
    staying = {program: tuple(pid for pid in pids if pid in stays) for program, pids in members.items()}
    return {program: pids for program, pids in staying.items() if pids}
