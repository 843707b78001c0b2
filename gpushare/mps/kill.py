"""`gpushare mps kill`: ending one MPS client, and what became of its neighbours."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from gpushare.errors import BadUsage, GpushareError, NoPermission, NotFound, OperationFailed
from gpushare.host.activity import ActivityMeter
from gpushare.host.process import known, signal_known, wait_gone
from gpushare.mps.daemons import FoundDaemon, find_daemons
from gpushare.plan import Plan, Step

if TYPE_CHECKING:
    from gpushare.host.activity import Activity
    from gpushare.host.host import Host
    from gpushare.model import Gpu, MpsClient, MpsDaemon


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


FAULT_HINT: Final = (
    "its other clients have lost their contexts: end them (gpushare mps kill PID), the server then recovers by itself; "
    "or start afresh: gpushare mps stop -g {gpu} --force, gpushare mps start -g {gpu}"
)


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What `kill` did."""

    pid: int
    server_pid: int | None
    method: str
    drain: Drain
    server_status: str | None


@dataclass(frozen=True)
class Client:
    """An MPS client with its daemon."""

    found: FoundDaemon
    client: MpsClient
    started_at: float | None = None

    @property
    def daemon(self) -> MpsDaemon:
        """Return its daemon."""
        return self.found.daemon


def find_client(host: Host, gpus: Sequence[Gpu], pid: int) -> Client:
    """Return the MPS client with this PID.

    Raises:
        NotFound: no such process (code ``no_process``), or it is no MPS client (``not_a_client``).
    """
    # Daemons of other users are asked only where the process is not a client of ours or of root's, and believed about
    # processes of their own user only.
    for strangers in (False, True):
        for found in find_daemons(host, gpus, strangers=strangers):
            for client in found.daemon.clients:
                info = host.processes.describe(pid) if client.pid == pid else None
                # A daemon of another user is believed about that user's own processes only.
                if info is not None and (found.trusted or info.uid == found.uid):
                    return Client(found, client, info.started_at)
            if pid == found.daemon.pid or pid in [server.pid for server in found.daemon.servers]:
                raise _serves(found.daemon, pid)
    if not host.processes.alive(pid):
        raise NotFound(f"there is no process {pid}", "see the clients: gpushare mps status", code="no_process")
    raise NotFound(
        f"process {pid} is not a client of any MPS daemon that can be seen here",
        f"outside MPS a plain kill hurts no neighbour: kill {pid}; see the clients: gpushare mps status",
        code="not_a_client",
    )


def _serves(daemon: MpsDaemon, pid: int) -> BadUsage:
    what = "control daemon" if pid == daemon.pid else "server"
    which = (
        f"-g {daemon.device_uuid}"
        if daemon.ours
        else f"--pipe-directory {shlex.quote(daemon.pipe_directory or '')} --yes"
    )
    return BadUsage(
        f"process {pid} is the MPS {what}: all of its clients would lose the GPU with it",
        f"stop it the orderly way: gpushare mps stop {which}",
        code="not_a_client",
    )


def plan_kill(client: Client) -> Plan:
    """Return the steps of the safe order, for `--dry-run`."""
    pid = client.client.pid
    steps = (
        Step(
            what=f"stop process {pid}, so that it launches nothing more",
            command=f"kill -STOP {pid}",
            undo=f"kill -CONT {pid}",
            do=_nothing,
        ),
        Step(
            what="wait until the GPU has drained its queue", command="(watch the SM activity of the GPU)", do=_nothing
        ),
        Step(what=f"kill process {pid}", command=f"kill -KILL {pid}", do=_nothing),
        Step(
            what="read the state of the MPS server",
            command=f"echo get_server_status {client.client.server_pid} | "
            f"CUDA_MPS_PIPE_DIRECTORY={shlex.quote(client.daemon.pipe_directory or '')} nvidia-cuda-mps-control",
            do=_nothing,
        ),
    )
    return Plan(title=f"end MPS client {pid}", steps=steps)


def kill(host: Host, client: Client, gpus: Sequence[Gpu], *, bound_seconds: float) -> Killed:
    """End a client by SIGSTOP, drain, SIGKILL, and read its server's state.

    Raises:
        NoPermission: it belongs to another user.
        OperationFailed: the server is in FAULT afterwards (code ``server_fault``).
    """
    pid = client.client.pid
    ended = [pid] if client.started_at is None else {pid: client.started_at}
    drain = end_clients(host, ended, meter_of(host, client, gpus), bound_seconds=bound_seconds)
    status = _status_after(host, client)
    return Killed(
        pid=client.client.pid,
        server_pid=client.client.server_pid,
        method="stop-drain-kill",
        drain=drain,
        server_status=status,
    )


def meter_of(host: Host, client: Client, gpus: Sequence[Gpu]) -> ActivityMeter:
    """Return the meter of the device that a client's daemon serves."""
    daemon = client.daemon
    index = daemon.gpu_index if daemon.gpu_index is not None else (daemon.gpu_indexes or (0,))[0]
    instance = next(
        (mig.gpu_instance_id for gpu in gpus for mig in gpu.mig_instances if mig.uuid == daemon.device_uuid), None
    )
    return ActivityMeter(host.nvml, index, instance)


def _status_after(host: Host, client: Client) -> str | None:
    server = client.client.server_pid
    if server is None:
        return None
    try:
        status = client.found.control(host).server_status(server)
    except GpushareError:
        return None
    if status == "FAULT":
        gpu = client.daemon.device_uuid or client.daemon.gpu_index
        raise OperationFailed(
            f"client {client.client.pid} is gone, and MPS server {server} is in state FAULT",
            FAULT_HINT.format(gpu=gpu),
            gpu=None if client.daemon.gpu_index is None else str(client.daemon.gpu_index),
            code="server_fault",
        )
    return status


def _nothing() -> None:
    """Stand in for a step that `kill` does itself: its steps are one act that cannot be cut."""
