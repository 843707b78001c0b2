"""End MPS clients without harm to their neighbours: SIGSTOP, wait until the GPU has drained their queue, SIGKILL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

from gpushare.base.errors import BadUsage, OperationFailed, or_none
from gpushare.base.model import Gpu, MpsClient, MpsDaemon
from gpushare.base.selection import Device
from gpushare.base.values import dataclass
from gpushare.host.activity import Activity, ActivityMeter
from gpushare.host.host import Host
from gpushare.host.process import signal_all, signal_if_same, starts_of, wait_gone
from gpushare.mps.daemons import FoundDaemon, find_daemons
from gpushare.mps.home import DaemonRecord, restart_command
from gpushare.plan import Plan, Step, carry_out

DRAIN_BOUND_SECONDS: Final = 5.0
# The shortest wait that proved safe.
_LEAST_SECONDS: Final = 0.25
_IDLE_PERCENT: Final = 1.0
# A fall of the GPU's activity that is larger than the fluctuation of its neighbours.
_FALL_POINTS: Final = 10.0
_FALL_SHARE: Final = 0.2
# Readings of 0.1 s that must agree: one low reading may fall between two kernels.
_IDLE_READINGS: Final = 2
_FALL_READINGS: Final = 3
# "utilization" is an average of up to the last second.
_UTILIZATION_LAG_SECONDS: Final = 1.2
_STOP_SECONDS: Final = 1.0
_GONE_SECONDS: Final = 5.0


class Meter(Protocol):
    """Reads how busy the GPU is, over 0.1 s."""

    def read(self) -> Activity | None:
        """Return the activity, or None where the driver has no reading."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """How a stopped MPS client finished its GPU work before it was killed.

    ``by`` says how gpushare saw the end: ``idle`` (the GPU was idle), ``fall`` (its activity fell and stayed low) or
    ``bound`` (other clients hid the end, so gpushare waited for the longest time).
    """

    seconds: float
    by: str


class Ending:
    """The steps that end processes with work in flight on the GPU. ``drain`` says how the queue drained, once it has.

    ``pids`` may come with start times, which are looked up otherwise: later processes with the same PIDs get no signal.
    Undone before the kill, processes that were running continue.
    """

    def __init__(
        self, host: Host, pids: Iterable[int] | Mapping[int, float], meter: Meter, bound_seconds: float
    ) -> None:
        self._host, self._meter, self._bound = host, meter, bound_seconds
        self._started = starts_of(host.processes, pids)
        self._stopped: list[int] = []
        self._before: Activity | None = None
        self.drain = Drain(seconds=0.0, by="bound")

    def steps(self) -> tuple[Step, ...]:
        pids = " ".join(map(str, self._started))
        which = f"process{'es' if len(self._started) > 1 else ''} {pids.replace(' ', ', ')}"
        return (
            Step(
                what=f"stop {which}, so that no more work is launched",
                command=f"kill -STOP {pids}",
                undo=f"kill -CONT {pids}",
                do=self._stop,
                revert=lambda: signal_all(
                    self._host.processes, {pid: self._started[pid] for pid in self._stopped}, signal.SIGCONT
                ),
            ),
            Step(
                what="wait until the GPU has drained the queue, as its SM activity tells",
                do=self._wait_for_drain,
            ),
            Step(what=f"kill {which}", command=f"kill -KILL {pids}", do=lambda: kill_all(self._host, self._started)),
        )

    def _stop(self) -> None:
        """Freeze all processes (SIGSTOP), after a reading of how busy the GPU is: the drain is seen as a fall from there."""
        self._before = self._meter.read()
        for pid, started in self._started.items():
            self._stop_process(pid, started)

    def _stop_process(self, pid: int, started: int) -> None:
        """Stop a process, and wait until it is stopped, or for a second: one that hangs in the driver launches no work either."""
        processes = self._host.processes
        info = processes.describe(pid)
        if info is None or info.stopped:
            # Stopped by its owner: it launches nothing, and is not in `_stopped`, as continuing it is not our decision.
            return
        # Before the signal: Ctrl-C right after it must not leave the process stopped forever.
        self._stopped.append(pid)
        if not signal_if_same(processes, pid, started, signal.SIGSTOP):
            return
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:
            info = processes.describe(pid)
            if info is None or info.stopped or not processes.alive(pid, started):
                return
            time.sleep(0.005)
        # It is exiting, or waits in the driver: it cannot be stopped there, and launches nothing.

    def _wait_for_drain(self) -> None:
        self.drain = wait_for_drain(self._meter, self._before, self._bound)


def end_clients(host: Host, pids: Iterable[int] | Mapping[int, float], meter: Meter, *, bound_seconds: float) -> Drain:
    """End clients of MPS without harm to others (see `Ending`); return how their work on the GPU drained.

    Raises:
        NoPermission: they belong to another user (nothing was changed).
        OperationFailed: one does not end.
    """
    ending = Ending(host, pids, meter, bound_seconds)
    carry_out(Plan(title="end MPS clients", steps=ending.steps()))
    return ending.drain


def kill_all(host: Host, pids: Iterable[int] | Mapping[int, float]) -> None:
    """Kill processes and check that they are gone; ``pids`` as for `Ending`.

    Raises:
        NoPermission: one belongs to another user.
        OperationFailed: one does not end.
    """
    started = starts_of(host.processes, pids)
    for pid in started:
        signal_if_same(host.processes, pid, started[pid], signal.SIGKILL)
    alive = wait_gone(host.processes, started, _GONE_SECONDS)
    if alive:
        raise OperationFailed(
            f"process {', '.join(map(str, alive))} was killed and still exists",
            "it may hang in the driver; see: sudo dmesg | tail",
            code="process_stays",
        )


def wait_for_drain(
    meter: Meter, before: Activity | None, bound_seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> Drain:
    """Wait until the GPU has drained the queue of a stopped client, at most ``bound_seconds``.

    No driver reports how much of a client's queue is left. But the GPU's activity can be seen to end, or to fall by a lot
    and stay low. Neighbours that fill the GPU by themselves hide the fall; then the whole bound is waited.
    """
    started = clock()
    readings: list[float] = []
    is_instant = before is not None and before.source == "gpm"
    least_seconds = _LEAST_SECONDS if is_instant else max(_LEAST_SECONDS, _UTILIZATION_LAG_SECONDS)
    while clock() - started < bound_seconds:
        activity = meter.read()
        waited = clock() - started
        if activity is None:
            time.sleep(min(0.05, max(0.0, bound_seconds - waited)))
            continue
        readings.append(activity.percent)
        sign = _sign_of_end(before, readings)
        if sign is not None and waited >= least_seconds:
            return Drain(seconds=waited, by=sign)
    return Drain(seconds=clock() - started, by="bound")


def _sign_of_end(before: Activity | None, readings: Sequence[float]) -> str | None:
    """Return by which sign the last readings show the queue drained, ``idle`` or ``fall``; None: they do not."""
    if len(readings) >= _IDLE_READINGS and max(readings[-_IDLE_READINGS:]) <= _IDLE_PERCENT:
        return "idle"
    if before is None or len(readings) < _FALL_READINGS:
        return None
    least_fall = max(_FALL_POINTS, _FALL_SHARE * before.percent)
    return "fall" if max(readings[-_FALL_READINGS:]) <= before.percent - least_fall else None


def fault_hint(stop_command: str, record: DaemonRecord | None, device: Device | None = None) -> str:
    """Return the ways out of a fault: the server recovers, or its daemon is started again with the limits of its record."""
    recovery = "its clients have lost their contexts: end them (gpushare stop PID), and the server recovers"
    if record is None or record.transient:
        return f"{recovery}; or stop MPS: {stop_command} --force"
    return f"{recovery}; or restart MPS: {stop_command} --force && {restart_command(record, device)}"


@dataclass(frozen=True)
class Client:
    """An MPS client with its daemon."""

    found: FoundDaemon
    client: MpsClient

    @property
    def daemon(self) -> MpsDaemon:
        return self.found.daemon


def find_clients(host: Host, gpus: Sequence[Gpu], pids: Collection[int]) -> list[Client]:
    """Return those of these processes that are clients of an MPS daemon.

    Raises BadUsage: one is an MPS daemon or server, whose clients would all lose the GPU with it (``serves_clients``).
    """
    clients = _clients_among(host, find_daemons(host, gpus), pids)
    if clients:
        return clients
    listed_clients = {process.pid for gpu in gpus for process in gpu.processes or () if process.mps}
    # In another PID namespace NVML's list says nothing.
    if listed_clients.isdisjoint(pids) and host.processes.namespace_is_host() is not False:
        return []
    # Daemons of other users are asked only if none of this user's and root's has one of them as a client.
    return _clients_among(host, find_daemons(host, gpus, strangers=True), pids)


def _clients_among(host: Host, daemons: Sequence[FoundDaemon], pids: Collection[int]) -> list[Client]:
    """Return those of these processes that are clients of these daemons. Raises BadUsage as `find_clients`."""
    clients = []
    for item in daemons:
        if item.daemon.pid is not None and item.daemon.pid in pids:
            raise serves_clients_error(item.daemon.pid, "control daemon", item.stop_hint)
        for server in item.daemon.servers:
            if server.pid in pids:
                raise serves_clients_error(server.pid, "server", item.stop_hint)
        for client in item.daemon.clients:
            info = host.processes.describe(client.pid) if client.pid in pids else None
            # A daemon of another user may name any PID: only that user's processes count.
            if info is not None and (item.trusted or info.uid == item.uid):
                clients.append(Client(item, client))
    return clients


def serves_clients_error(pid: int, what: str, hint: str) -> BadUsage:
    """Return the error about an MPS daemon or server that was to be ended as if it were a client."""
    return BadUsage(
        f"process {pid} is an MPS {what}: without it all of its clients lose the GPU", hint, code="serves_clients"
    )


def server_state_unless_fault(host: Host, client: Client) -> str | None:
    """Return the state of the server of a client that has ended, as it answers; None: it does not.

    Raises OperationFailed: the server is in FAULT (code ``server_fault``).
    """
    server = client.client.server_pid or 0
    status = or_none(lambda: client.found.control(host).server_status(server))
    if status == "FAULT":
        raise OperationFailed(
            f"client {client.client.pid} is gone, and MPS server {server} is in state FAULT",
            fault_hint(client.found.stop_command, client.found.record),
            gpu=client.daemon.gpu_index,
            code="server_fault",
        )
    return status


def meter_of(host: Host, client: Client, gpus: Sequence[Gpu]) -> ActivityMeter:
    """Return the meter of the device that a client's daemon serves."""
    daemon = client.daemon
    # Of a daemon of several GPUs, the first; one whose GPU is unknown most likely has GPU 0.
    index = next(iter(daemon.gpu_indexes), 0)
    gpu_instance = next(
        (mig.gpu_instance_id for gpu in gpus for mig in gpu.mig_instances if mig.uuid == daemon.device_uuid), None
    )
    return ActivityMeter(host.nvml, index, gpu_instance)
