"""Ending an MPS client without breaking its neighbours: stop it, let the GPU drain its queue, kill it.

Measured on an H200 (driver 580.159.04): SIGKILL or SIGTERM of a client with a deep queue broke the
neighbour in 7 of 12 tries, NVIDIA's documented terminate_client and then the end of a busy client in 13 of 17,
and this order in 0 of 11.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from gpushare.errors import NoPermission, OperationFailed
from gpushare.host.known_process import known, signal_known
from gpushare.host.process import wait_gone

if TYPE_CHECKING:
    from gpushare.host.activity import Activity
    from gpushare.host.host import Host

DRAIN_BOUND_SECONDS: Final = 5.0
# The shortest wait that was seen to be safe.
_LEAST_SECONDS: Final = 0.25
_IDLE_PERCENT: Final = 1.0
# A fall of the GPU's activity that cannot be its neighbours' own ups and downs.
_FALL_POINTS: Final = 10.0
_FALL_SHARE: Final = 0.2
# Readings of 0.1 s that must agree: one low reading may lie between two kernels.
_AGREEING: Final = 3
# "utilization" averages over up to a second of the past.
_UTILIZATION_LAG_SECONDS: Final = 1.2
_STOP_SECONDS: Final = 1.0
_GONE_SECONDS: Final = 5.0


class Meter(Protocol):
    """Reads how busy the GPU is; takes 0.1 s."""

    def read(self) -> Activity | None:
        """Return the activity, or None where the driver cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """How the queue drained: seconds waited, and whether its end was seen or only the bound reached.

    ``by`` is ``idle`` (nothing runs on the GPU any more), ``fall`` (the activity fell and stayed down)
    or ``bound`` (the neighbours hide it; the whole bound was waited).
    """

    seconds: float
    by: str
    source: str | None
    before_percent: float | None
    after_percent: float | None

    @property
    def measured(self) -> bool:
        """Return whether the end of the queue was seen."""
        return self.by != "bound"


def end_clients(
    host: Host,
    pids: Iterable[int] | Mapping[int, float],
    meter: Meter,
    *,
    bound_seconds: float = DRAIN_BOUND_SECONDS,
) -> Drain:
    """End processes that may have work in flight on the GPU: SIGSTOP all, drain, SIGKILL all.

    An interruption before the kill lets the processes that were running go on. ``pids`` may have their start times;
    otherwise these are noted here: whoever gets one of the PIDs meanwhile gets no signal.

    Raises:
        NoPermission: they belong to another user (nothing was changed).
        OperationFailed: one would not go.
    """
    started = known(host.processes, pids)
    before = meter.read()
    stopped: list[int] = []
    try:
        for pid in started:
            _stop(host, pid, started[pid], stopped)
        drain = wait_for_drain(meter, before, bound_seconds)
    except BaseException:
        for pid in stopped:
            # Another user's was not stopped, and cannot be continued either.
            with contextlib.suppress(NoPermission):
                signal_known(host.processes, pid, started[pid], signal.SIGCONT)
        raise
    kill_all(host, started)
    return drain


def kill_all(host: Host, pids: Iterable[int] | Mapping[int, float]) -> None:
    """Kill processes and see that they are gone; ``pids`` as `end_clients` takes them.

    Raises:
        NoPermission: one belongs to another user.
        OperationFailed: one would not go.
    """
    started = known(host.processes, pids)
    for pid in started:
        signal_known(host.processes, pid, started[pid], signal.SIGKILL)
    left = wait_gone(host.processes, started, _GONE_SECONDS)
    if left:
        raise OperationFailed(
            f"process {', '.join(map(str, left))} was killed and is still there",
            "it may hang in the driver; see: sudo dmesg | tail",
            code="process_stays",
        )


def _stop(host: Host, pid: int, started_at: float, stopped: list[int]) -> None:
    info = host.processes.describe(pid)
    if info is None or info.stopped:
        # A stopped one launches nothing already; to be continued is its owner's wish, not ours.
        return
    # Noted before it is done: Ctrl-C right behind the signal must not leave it stopped for ever.
    stopped.append(pid)
    if not signal_known(host.processes, pid, started_at, signal.SIGSTOP):
        return
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        info = host.processes.describe(pid)
        if info is None or info.stopped or not host.processes.alive(pid, started_at):
            return
        time.sleep(0.005)
    # It is on its way out, or waits in the driver: no stop reaches it there, and it launches nothing.


def wait_for_drain(
    meter: Meter, before: Activity | None, bound_seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> Drain:
    """Wait until the GPU has drained the queue of a stopped client, at most ``bound_seconds``.

    No driver tells how much of a client's queue is left. What can be seen is the activity of the GPU:
    it falls to nothing, or it falls by a lot and stays down. Neighbours that fill the GPU on their own
    hide the fall; then the bound is waited, and the answer says so.
    """
    started = clock()
    readings: list[float] = []
    source = before.source if before is not None else None
    least = _LEAST_SECONDS if source == "gpm" else max(_LEAST_SECONDS, _UTILIZATION_LAG_SECONDS)
    while clock() - started < bound_seconds:
        activity = meter.read()
        waited = clock() - started
        if activity is None:
            time.sleep(min(0.05, max(0.0, bound_seconds - waited)))
            continue
        readings.append(activity.percent)
        by = _end_seen(before, readings)
        if by is not None and waited >= least:
            return Drain(
                seconds=waited,
                by=by,
                source=activity.source,
                before_percent=_percent(before),
                after_percent=activity.percent,
            )
    return Drain(
        seconds=clock() - started,
        by="bound",
        source=source,
        before_percent=_percent(before),
        after_percent=readings[-1] if readings else None,
    )


def _end_seen(before: Activity | None, readings: Sequence[float]) -> str | None:
    last = readings[-_AGREEING:]
    if len(last) >= 2 and max(last[-2:]) <= _IDLE_PERCENT:
        return "idle"
    if before is None or len(last) < _AGREEING:
        return None
    fall = max(_FALL_POINTS, _FALL_SHARE * before.percent)
    return "fall" if max(last) <= before.percent - fall else None


def _percent(activity: Activity | None) -> float | None:
    return None if activity is None else activity.percent
