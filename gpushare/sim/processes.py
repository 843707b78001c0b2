"""The process table of a simulated host: simulated processes, and the real ones that run on it."""

from __future__ import annotations

import functools
import os
import signal as signals
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from gpushare.base.errors import no_process_error, signal_refused_error
from gpushare.base.model import MPS_SERVER
from gpushare.base.units import MIB
from gpushare.host.capabilities import user_name
from gpushare.host.identity import Identity, identity_of, identity_of_child
from gpushare.host.process import Announce, Child, Processes, ProcessInfo, ProcessUsage, Streams, start_time
from gpushare.sim.activity import Resident, is_busy
from gpushare.sim.current import changing, current
from gpushare.sim.devices import daemon_devices, node_of, places_of
from gpushare.sim.state import (
    FIRST_SIMULATED_PID,
    MPS_CONTROL,
    SIM_HOST,
    SimulatedDaemon,
    SimulatedHostState,
    SimulatedProcess,
    StateFile,
    now,
    on_gpu,
)

if TYPE_CHECKING:
    from gpushare.host.open_files import OpenFiles
    from gpushare.host.origin import Origin
    from gpushare.sim.mps_servers import LogLine


ATTACH_DELAY = "GPUSHARE_SIM_ATTACH_DELAY"
SM_PERCENT = "GPUSHARE_SIM_SM_PERCENT"
DEFAULT_MEMORY_BYTES = 512 * MIB
DEFAULT_SM_PERCENT = 50
# Linux: a process goes on after these, or is stopped.
_HARMLESS = {0, signals.SIGCHLD, signals.SIGURG, signals.SIGWINCH, signals.SIGSTOP, signals.SIGCONT, signals.SIGTSTP}
_KEPT = ("CUDA_", "GPUSHARE_SIM_", "NVIDIA_")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _or_real(method: _Method) -> _Method:
    """Let a method of `SimulatedProcesses` answer for simulated processes, and `Processes` for the others."""

    @functools.wraps(method)
    def answer(self: SimulatedProcesses, pid: int, *arguments: Any, **named: Any) -> Any:
        function = method if pid >= FIRST_SIMULATED_PID else getattr(Processes, method.__name__)
        return function(self, pid, *arguments, **named)

    return cast("_Method", answer)


class SimulatedProcesses(Processes):
    """Stands in for `Processes`: PIDs from `FIRST_SIMULATED_PID` up are simulated, all others real."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file
        self._local = Processes()

    def describe(self, pid: int) -> ProcessInfo | None:
        """Return a process as `Processes.describe`; real ones belong to the simulated user."""
        state = current(self._state_file)
        if pid < FIRST_SIMULATED_PID:
            return self._describe_real(state, pid)
        process = _find_process(state, pid)
        if process is None:
            return None
        return ProcessInfo(
            pid=pid,
            user=user_name(process.uid),
            uid=process.uid,
            name=process.name,
            command_line=tuple(process.command_line) or None,
            started=process.started,
            container=process.container,
            stopped=process.stopped_at is not None,
        )

    def _describe_real(self, state: SimulatedHostState, pid: int) -> ProcessInfo | None:
        """Return a real process. Those of the user who runs gpushare belong to the user of the simulated host."""
        info = self._local.describe(pid)
        if info is None or info.uid != os.geteuid():
            return info
        started = state.process(pid)
        uid = state.uid if started is None else started.uid
        return info if uid == info.uid else replace(info, uid=uid, user=user_name(uid))

    def identity(self, pid: int) -> Identity | None:
        return identity_in(current(self._state_file), pid)

    @_or_real
    def alive(self, pid: int, started: int | None = None) -> bool:
        info = self.describe(pid)
        return info is not None and started in {None, info.started}

    def environment(self, pid: int) -> Mapping[str, str] | None:
        """Return the variables of a process, a daemon or a server that this user may look at; else None."""
        state = current(self._state_file)
        process = _find_process(state, pid)
        if pid < FIRST_SIMULATED_PID:
            text = self._local.environment(pid)
            # It is on the GPU before its exec, when /proc still has the environment of gpushare.
            return text if text is None or process is None else {**text, **process.environment}
        return None if process is None or not state.may(process.uid) else dict(process.environment)

    def named(self, name: str) -> Sequence[int]:
        """Return the PIDs of the processes with this program, daemons and servers of MPS included."""
        pids = [process.pid for process in _process_table(current(self._state_file)) if process.name == name]
        if name in {MPS_CONTROL, MPS_SERVER} and os.environ.get("GPUSHARE_MPS_CONTROL"):
            pids += self._local.named(name)
        return sorted(pids)

    def started_with(self, name: str, value: str) -> Sequence[int]:
        simulated = (process for process in current(self._state_file).processes if not process.real)
        marked = (process.pid for process in simulated if process.environment.get(name) == value)
        return [*self._local.started_with(name, value), *marked]

    @_or_real
    def descendants(self, pid: int) -> Sequence[int]:
        """Return the PID itself and all that descend from it: of a daemon its servers."""
        table = _process_table(current(self._state_file))
        below = [process.pid for process in table if process.parent_pid == pid]
        family = [pid, *(other for child in below for other in self.descendants(child))]
        return family if any(process.pid == pid for process in table) else []

    def families(self, pids: Iterable[int]) -> Mapping[int, Sequence[int]]:
        """Return each PID with all that descend from it; one without a process is left out."""
        real = self._local.families([pid for pid in pids if pid < FIRST_SIMULATED_PID])
        simulated = {pid: self.descendants(pid) for pid in pids if pid >= FIRST_SIMULATED_PID}
        return {**real, **{pid: family for pid, family in simulated.items() if family}}

    @_or_real
    def usage(self, pid: int) -> ProcessUsage | None:
        """Return its use of the host: of a simulated one a core while it works, and memory for half of what it has on the GPU."""
        process = current(self._state_file).process(pid)
        if process is None:
            return None
        at = now()
        seconds = max(0.0, at - start_time(process.started)) * process.busy_percent / 100
        works = process.sm_percent and is_busy(process, at)
        return ProcessUsage(process.started, seconds if works else 0.0, process.memory_bytes // 2 + (1 << 30))

    @_or_real
    def parent(self, pid: int) -> int | None:
        """Return the PID of its parent: of a server its daemon."""
        process = _find_process(current(self._state_file), pid)
        return None if process is None else process.parent_pid

    @_or_real
    def catches(self, pid: int, signal: int) -> bool | None:
        """Return whether a process has a handler for a signal; None: there is no such process."""
        process = _find_process(current(self._state_file), pid)
        return None if process is None else signal in process.catches

    def send(self, pid: int, signal: int) -> None:
        """Send a signal, with what it does to the neighbours under MPS."""
        self._send(pid, signal, lambda number: self._local.send(pid, number))

    def _send(self, pid: int, signal: int, to_real: Callable[[int], None]) -> None:
        """Send a signal; ``to_real`` sends it if the process is a real one."""
        from gpushare.sim import clients

        # What goes on looks at once whether it runs here too.
        later = signal == signals.SIGCONT and pid < FIRST_SIMULATED_PID
        with changing(self._state_file) as (state, lines):
            if pid >= FIRST_SIMULATED_PID:
                _check_may_signal(state, pid, signal)
            else:
                # First the real one: when it is refused, nothing changed.
                to_real(0 if later else signal)
            process = state.process(pid)
            if process is not None:
                lines += signal_process(state, process, signal)
            for daemon in state.daemons:
                server = next((server for server in daemon.servers if server.pid == pid), None)
                if daemon.pid == pid:
                    lines += _signal_daemon(state, daemon, signal)
                elif server is not None and _kills(signal):
                    lines += clients.drop_server(state, daemon, server)
        if later:
            to_real(signal)

    def send_to(self, pid: int, started: int, signal: int) -> None:
        info = self.describe(pid)
        if info is None or info.started != started:
            raise no_process_error(pid)
        self._send(pid, signal, lambda number: self._local.send_to(pid, started, number))

    def uses_driver(self, pid: int) -> bool | None:  # noqa: ARG002 - as on a machine
        """Return whether the process has the driver's library loaded: here everybody on a GPU has."""
        return True

    def origin(self, pid: int, *, command: bool = True) -> Origin | None:
        """Return where a process comes from; a real one that runs here has the simulated user."""
        from gpushare.host.origin import MOST_OF_COMMAND, Origin, origin_of

        process = current(self._state_file).process(pid)
        if process is None:
            return origin_of(pid, command=command) if pid < FIRST_SIMULATED_PID else None
        return Origin(
            uid=process.uid,
            gids=frozenset(process.gids),
            container=process.container,
            command=" ".join(process.command_line)[:MOST_OF_COMMAND] if command else None,
            cgroup=process.cgroup,
            of_root=process.cgroup_of_root,
            started=process.started,
        )

    def ignores(self, pid: int, signal: int) -> bool | None:
        """Return whether the process ignores a signal; a simulated one ignores none."""
        return self._local.ignores(pid, signal) if pid < FIRST_SIMULATED_PID else False

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: Streams | None = None,
        announce: Announce | None = None,
    ) -> Child:
        """Start the user's real program; it counts as a process on the GPU that CUDA would give it.

        ``GPUSHARE_SIM_ATTACH_DELAY`` (seconds) and ``GPUSHARE_SIM_OUTSIDE=1`` in ``env`` delay its first
        context and make it miss MPS; ``GPUSHARE_SIM_SM_PERCENT`` is its load (50). The program learns its host from ``GPUSHARE_SIM_HOST``.
        """
        from gpushare.sim import clients

        child = self._local.spawn(argv, {**env, SIM_HOST: self._state_file.spec}, streams, announce)
        # A short program may have ended by now; it was on the GPU all the same.
        identity = identity_of_child(child.pid)
        if identity is None:
            return child
        with changing(self._state_file) as (state, lines):
            process = real_process(state, identity, argv, env)
            process.memory_bytes = DEFAULT_MEMORY_BYTES
            process.sm_percent = round(_parse_seconds(env.get(SM_PERCENT) or str(DEFAULT_SM_PERCENT)))
            delay = _parse_seconds(env.get(ATTACH_DELAY))
            if delay > 0:
                process.attach_at = now() + delay
            else:
                lines += clients.attach(state, process)
        return child

    def moved(self, client: int, pid: int) -> None:
        """Let the container's process be the one on the GPU, instead of the engine's client."""
        identity = identity_of(pid)
        if identity is None:
            return
        with changing(self._state_file) as (state, _):
            for process in state.processes:
                if process.pid == client:
                    process.pid, process.started = identity

    def namespace_is_host(self) -> bool | None:
        return current(self._state_file).pid_namespace_is_host

    def open_files(self, prefix: str) -> OpenFiles:
        """Return the processes with open device nodes: to a user its own, to root all."""
        from gpushare.host.open_files import OpenFiles

        state = current(self._state_file)
        by_pid: dict[int, tuple[str, ...]] = {}
        complete = state.pid_namespace_is_host
        for pid, uid, paths in _open_files_of_all(state):
            if not state.may(uid):
                complete = False
                continue
            mine = tuple(sorted(path for path in paths if path.startswith(prefix)))
            # The simulated processes are the host's: another namespace does not have them.
            if mine and state.pid_namespace_is_host:
                by_pid[pid] = mine
        return OpenFiles(by_pid=dict(sorted(by_pid.items())), complete=complete)


def real_process(
    state: SimulatedHostState, identity: Identity, argv: Sequence[str], env: Mapping[str, str]
) -> SimulatedProcess:
    """Add a process of this machine to a simulated host, and return it: without a CUDA context yet."""
    process = SimulatedProcess(
        pid=identity.pid,
        real=True,
        gpu_uuid="",
        name=os.path.basename(argv[0]),
        uid=state.uid,
        started=identity.started,
        command_line=list(argv),
        environment={key: value for key, value in env.items() if key.startswith(_KEPT)},
    )
    state.processes.append(process)
    return process


def signal_process(state: SimulatedHostState, process: SimulatedProcess, signal: int) -> list[LogLine]:
    """Do to the state what a signal does to a process; return log lines.

    A real process that has its own handler is judged when it is gone, see `clients.settle`.
    """
    from gpushare.sim import clients

    if signal == signals.SIGSTOP or (signal == signals.SIGTSTP and not process.real):
        process.stopped_at = process.stopped_at or now()
        return []
    if signal == signals.SIGCONT:
        process.stopped_at = None
        return []
    if signal == signals.SIGKILL:
        return clients.end(state, process, signal)
    # One that is stopped gets it when it continues; the simulated one drops it.
    ignored = process.real or not _kills(signal) or process.stopped_at is not None
    return [] if ignored else clients.end(state, process, signal)


def _signal_daemon(state: SimulatedHostState, daemon: SimulatedDaemon, signal: int) -> list[LogLine]:
    """Do to the state what a signal does to an MPS daemon; return log lines."""
    from gpushare.sim import clients, mps_control

    if signal == signals.SIGSTOP:
        daemon.stopped = True
    elif signal == signals.SIGCONT:
        daemon.stopped = False
        return clients.settle(state)
    elif _kills(signal) and (signal == signals.SIGKILL or not daemon.stopped):
        # Neither SIGTERM nor SIGKILL lets it clean up.
        mps_control.remove_ended(state, daemon, cleanly=False)
    return []


def identity_in(state: SimulatedHostState, pid: int) -> Identity | None:
    """Return the process that has a PID now: a simulated one, or a real one."""
    if pid < FIRST_SIMULATED_PID:
        return identity_of(pid)
    process = _find_process(state, pid)
    return None if process is None else Identity(pid, process.started)


def _process_table(state: SimulatedHostState) -> list[SimulatedProcess]:
    """Return all processes of a host, the daemons and servers of MPS too, without what they have on a GPU."""
    table = list(state.processes)
    for daemon in state.daemons:
        of_mps = partial(
            SimulatedProcess, real=False, gpu_uuid="", started=daemon.started, environment=daemon.environment
        )
        stopped = 0.0 if daemon.stopped else None
        command = [MPS_CONTROL, "-d", *(["-M"] if daemon.multiuser else [])]
        table.append(of_mps(pid=daemon.pid, uid=daemon.uid, name=MPS_CONTROL, command_line=command, stopped_at=stopped))
        for server in daemon.servers:
            command = [MPS_SERVER]
            table.append(
                of_mps(pid=server.pid, uid=server.uid, name=MPS_SERVER, command_line=command, parent_pid=daemon.pid)
            )
    return table


def _find_process(state: SimulatedHostState, pid: int) -> SimulatedProcess | None:
    return next((process for process in _process_table(state) if process.pid == pid), None)


def _check_may_signal(state: SimulatedHostState, pid: int, signal: int) -> None:
    """Raise as kill(2) does: there is no such process, or it is another user's."""
    process = _find_process(state, pid)
    if process is None:
        raise no_process_error(pid)
    if not state.may(process.uid):
        raise signal_refused_error(signals.Signals(signal).name, pid)


def _kills(signal: int) -> bool:
    """Return whether a signal ends a process that does not catch it."""
    return signal not in _HARMLESS | {signals.SIGTTIN, signals.SIGTTOU}


def _parse_seconds(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


_CONTROL: Final = "/dev/nvidiactl"
_UNIFIED_MEMORY: Final = "/dev/nvidia-uvm"


def nvml_client_files(gpu: int, place: tuple[int | None, int | None]) -> list[str]:
    """Return the files that an NVML client without a CUDA context has open for a GPU, or for an instance on it.

    ``place`` has the GPU instance and the compute instance (None: the whole GPU).
    """
    nodes = [] if place[0] is None else [node_of(gpu, (place[0], None))]
    if place[0] is not None and place[1] is not None:
        nodes.append(node_of(gpu, (place[0], place[1])))
    return [_CONTROL, f"/dev/nvidia{gpu}", *nodes]


def holders_of(state: SimulatedHostState, gpu: int) -> list[Resident]:
    """Return the processes that have the node of a GPU, or of an instance of it, open without a context.

    One entry per instance; its ids are None for the GPU's own node.
    """
    entries = []
    for process in state.processes:
        if f"/dev/nvidia{gpu}" in process.open_files:
            entries.append(Resident(process.pid, process.memory_bytes, 0, holder=True))
        for place in places_of(state.gpus[gpu]) if process.open_files else ():
            if node_of(gpu, place) in process.open_files:
                entries.append(Resident(process.pid, process.memory_bytes, 0, False, False, *place, holder=True))
    return entries


def _open_files_of_all(state: SimulatedHostState) -> Iterator[tuple[int, int, set[str]]]:
    """Yield PID, user id and open device files of all processes and MPS servers."""
    indexes = {gpu.uuid: index for index, gpu in enumerate(state.gpus)}
    for process in state.processes:
        paths = set(process.open_files)
        if process.gpu_uuid in indexes and on_gpu(process):
            paths.update(nvml_client_files(indexes[process.gpu_uuid], process.place))
            if not process.graphics:
                paths.add(_UNIFIED_MEMORY)
        yield process.pid, process.uid, paths
    for daemon in state.daemons:
        places = [
            (indexes[device.gpu.uuid], device.mig.place if device.mig else (None, None))
            for device in daemon_devices(state, daemon)
        ]
        paths = {_UNIFIED_MEMORY, *(path for gpu, place in places for path in nvml_client_files(gpu, place))}
        for server in daemon.servers:
            yield server.pid, server.uid, paths if places else set()
