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
from gpushare.base.units import GIB, MIB
from gpushare.host.capabilities import InstanceIds, user_name
from gpushare.host.identity import Identity, identity_of, identity_of_child
from gpushare.host.process import Announce, Child, Processes, ProcessInfo, ProcessUsage, Streams, start_time
from gpushare.host.program import MPS_CONTROL
from gpushare.sim.activity import Resident, is_busy
from gpushare.sim.current import changing, current
from gpushare.sim.devices import daemon_devices, ids_of_instances, node_of, nodes_of
from gpushare.sim.state import (
    FIRST_SIMULATED_PID,
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
    """Return a method that calls ``method`` for a simulated PID, and the method of `Processes` for a real one."""

    @functools.wraps(method)
    def answer(self: SimulatedProcesses, pid: int, *arguments: Any, **named: Any) -> Any:
        if pid < FIRST_SIMULATED_PID:
            return getattr(super(SimulatedProcesses, self), method.__name__)(pid, *arguments, **named)
        return method(self, pid, *arguments, **named)

    return cast("_Method", answer)


class SimulatedProcesses(Processes):
    """Stands in for `Processes`: PIDs from `FIRST_SIMULATED_PID` up are simulated, all others real."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def describe(self, pid: int) -> ProcessInfo | None:
        """Return a process as `Processes.describe`; real ones belong to the simulated user."""
        state = current(self._state_file)
        process = _find_process(state, pid)
        if pid < FIRST_SIMULATED_PID:
            info = super().describe(pid)
            if info is None or info.uid != os.geteuid():
                return info
            # A process of the user who runs gpushare counts as the simulated user's (fault ``user``).
            uid = state.uid if process is None else process.uid
            return info if uid == info.uid else replace(info, uid=uid, user=user_name(uid))
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

    def identity(self, pid: int) -> Identity | None:
        return identity_in(current(self._state_file), pid)

    @_or_real
    def alive(self, pid: int, started: int | None = None) -> bool:
        identity = self.identity(pid)
        return identity is not None and started in {None, identity.started}

    def environment(self, pid: int) -> Mapping[str, str] | None:
        """Return the variables of a process, a daemon or a server; None: it is gone, or this user may not read them."""
        state = current(self._state_file)
        process = _find_process(state, pid)
        if pid >= FIRST_SIMULATED_PID:
            return dict(process.environment) if process is not None and state.may_touch(process.uid) else None
        variables = super().environment(pid)
        if variables is None or process is None:
            return variables
        # Between fork and exec, /proc still has the environment of gpushare: the job's own variables win.
        return {**variables, **process.environment}

    def pids_of_program(self, name: str) -> Sequence[int]:
        """Return the PIDs of the processes with this program, daemons and servers of MPS included."""
        pids = [process.pid for process in _process_table(current(self._state_file)) if process.name == name]
        if name in {MPS_CONTROL, MPS_SERVER} and os.environ.get("GPUSHARE_MPS_CONTROL"):
            pids += super().pids_of_program(name)
        return sorted(pids)

    def pids_with_env(self, name: str, value: str) -> Sequence[int]:
        """Return the PIDs of the processes that were started with this value of an environment variable."""
        simulated = (process for process in current(self._state_file).processes if not process.real)
        matching = (process.pid for process in simulated if process.environment.get(name) == value)
        return [*super().pids_with_env(name, value), *matching]

    def families(self, pids: Iterable[int]) -> Mapping[int, Sequence[int]]:
        """Return each process with all that descend from it, of a daemon its servers; one that is gone has no entry."""
        table = _process_table(current(self._state_file))
        families = dict(super().families([pid for pid in pids if pid < FIRST_SIMULATED_PID]))
        for pid in {process.pid for process in table if process.pid >= FIRST_SIMULATED_PID} & set(pids):
            family = families[pid] = [pid]
            # The list grows while it is walked: each member adds its children.
            for member in family:
                family += [process.pid for process in table if process.parent_pid == member]
        return families

    @_or_real
    def usage(self, pid: int) -> ProcessUsage | None:
        """Return the CPU time and host memory of a process: a core while it has GPU work; half of its GPU memory and 1 GiB."""
        process = current(self._state_file).process(pid)
        if process is None:
            return None
        at = now()
        seconds = 0.0
        if process.sm_percent and is_busy(process, at):
            seconds = max(0.0, at - start_time(process.started)) * process.busy_percent / 100
        return ProcessUsage(process.started, seconds, process.memory_bytes // 2 + GIB)

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
        self._send(pid, signal, partial(os.kill, pid))

    def _send(self, pid: int, signal: int, to_real: Callable[[int], None]) -> None:
        """Send a signal to a simulated process, daemon or server, or to a real process with ``to_real``."""
        from gpushare.sim import clients

        # A real process that continues reads its state at once: it gets SIGCONT after the state is written.
        continues = signal == signals.SIGCONT and pid < FIRST_SIMULATED_PID
        with changing(self._state_file) as (state, lines):
            if pid >= FIRST_SIMULATED_PID:
                _check_may_signal(state, pid, signal)
            else:
                # Before the state changes, because it may be refused; signal 0 only asks.
                to_real(0 if continues else signal)
            process = state.process(pid)
            if process is not None:
                lines += signal_process(state, process, signal)
            for daemon in state.daemons:
                server = next((server for server in daemon.servers if server.pid == pid), None)
                if daemon.pid == pid:
                    lines += _signal_daemon(state, daemon, signal)
                elif server is not None and _kills(signal):
                    lines += [*clients.remove_server(state, daemon, server), *clients.settle(state)]
        if continues:
            to_real(signal)

    def send_to(self, pid: int, started: int, signal: int) -> None:
        # A real one, perhaps a zombie, is checked where the signal is sent.
        if pid >= FIRST_SIMULATED_PID and not self.alive(pid, started):
            raise no_process_error(pid)
        self._send(pid, signal, partial(super().send_to, pid, started))

    def uses_driver(self, pid: int) -> bool | None:  # noqa: ARG002 - as on a machine
        """Return whether the process has the driver's library loaded: here everybody on a GPU has."""
        return True

    def origin(self, pid: int) -> Origin | None:
        """Return where a process comes from; a real one that runs here has the simulated user."""
        from gpushare.host.origin import MOST_OF_COMMAND, Origin, origin_of

        process = current(self._state_file).process(pid)
        if process is None:
            return origin_of(pid) if pid < FIRST_SIMULATED_PID else None
        return Origin(
            uid=process.uid,
            gids=frozenset(process.gids),
            container=process.container,
            command=" ".join(process.command_line)[:MOST_OF_COMMAND],
            cgroup=process.cgroup,
            of_root=process.cgroup_of_root,
            started=process.started,
        )

    @_or_real
    def ignores(self, pid: int, signal: int) -> bool | None:  # noqa: ARG002 - a simulated process ignores none
        return False

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: Streams | None = None,
        announce: Announce | None = None,
    ) -> Child:
        """Start the user's real program; it counts as a process on the GPU that CUDA would give it.

        Variables in ``env``: ``GPUSHARE_SIM_ATTACH_DELAY``, the seconds until its first CUDA context;
        ``GPUSHARE_SIM_OUTSIDE=1``, it misses MPS; ``GPUSHARE_SIM_SM_PERCENT``, its load (50).
        """
        from gpushare.sim import clients

        child = super().spawn(argv, {**env, SIM_HOST: self._state_file.spec}, streams, announce)
        # Also of a child that has ended and was not waited for: a short program was on the GPU too.
        identity = identity_of_child(child.pid)
        if identity is None:
            return child
        with changing(self._state_file) as (state, lines):
            process = add_real_process(state, identity, argv, env)
            process.memory_bytes = DEFAULT_MEMORY_BYTES
            process.sm_percent = round(_parse_seconds(env.get(SM_PERCENT) or str(DEFAULT_SM_PERCENT)))
            delay = _parse_seconds(env.get(ATTACH_DELAY))
            if delay > 0:
                process.attach_at = now() + delay
            else:
                lines += clients.attach(state, process)
        return child

    def replace_client(self, client: int, pid: int) -> None:
        """Put the program in a container (``pid``) on the GPU in place of ``client``, the docker or podman that started it."""
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
        """Return the open device nodes below ``prefix`` by process: to a user of its own processes, to root of all."""
        from gpushare.host.open_files import OpenFiles

        state = current(self._state_file)
        if not state.pid_namespace_is_host:
            # The simulated processes are the host's: another PID namespace does not show them.
            return OpenFiles(by_pid={}, complete=False)
        by_pid: dict[int, tuple[str, ...]] = {}
        complete = True
        for pid, uid, paths in _open_files_of_all(state):
            matching = tuple(sorted(path for path in paths if path.startswith(prefix)))
            if not state.may_touch(uid):
                complete = False
            elif matching:
                by_pid[pid] = matching
        return OpenFiles(by_pid=dict(sorted(by_pid.items())), complete=complete)


def add_real_process(
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
    """Change the state as a signal to a process changes it; return log lines.

    A real process may catch a signal: its end is noticed when it is gone (`clients.settle`), but for SIGKILL.
    """
    from gpushare.sim import clients

    if signal == signals.SIGSTOP or (signal == signals.SIGTSTP and not process.real):
        process.stopped_at = process.stopped_at or now()
    elif signal == signals.SIGCONT:
        process.stopped_at = None
    elif signal == signals.SIGKILL:
        return clients.end(state, process, signal)
    elif not process.real and process.stopped_at is None and _kills(signal):
        # A stopped process would get the signal when it continues; a simulated one never does.
        return clients.end(state, process, signal)
    return []


def _signal_daemon(state: SimulatedHostState, daemon: SimulatedDaemon, signal: int) -> list[LogLine]:
    """Change the state as a signal to an MPS daemon changes it; return log lines."""
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
    """Return the identity of the process that has a PID now, simulated or real; None: there is none."""
    if pid < FIRST_SIMULATED_PID:
        return identity_of(pid)
    process = _find_process(state, pid)
    return None if process is None else Identity(pid, process.started)


def _process_table(state: SimulatedHostState) -> list[SimulatedProcess]:
    """Return all processes of a host: also the daemons and servers of MPS, as processes that are on no GPU."""
    table = list(state.processes)
    for daemon in state.daemons:
        control = SimulatedProcess(
            pid=daemon.pid,
            real=False,
            gpu_uuid="",
            name=MPS_CONTROL,
            uid=daemon.uid,
            started=daemon.started,
            command_line=[MPS_CONTROL, "-d", *(["-M"] if daemon.multiuser else [])],
            environment=daemon.environment,
            stopped_at=0.0 if daemon.stopped else None,
        )
        of_server = replace(control, name=MPS_SERVER, command_line=[MPS_SERVER], parent_pid=daemon.pid, stopped_at=None)
        table += [control, *(replace(of_server, pid=server.pid, uid=server.uid) for server in daemon.servers)]
    return table


def _find_process(state: SimulatedHostState, pid: int) -> SimulatedProcess | None:
    return next((process for process in _process_table(state) if process.pid == pid), None)


def _check_may_signal(state: SimulatedHostState, pid: int, signal: int) -> None:
    """Raise as kill(2) does: there is no such process, or it is another user's."""
    process = _find_process(state, pid)
    if process is None:
        raise no_process_error(pid)
    if not state.may_touch(process.uid):
        raise signal_refused_error(signals.Signals(signal).name, pid)


def _kills(signal: int) -> bool:
    """Return whether a signal ends a process that does not catch it."""
    return signal not in _HARMLESS | {signals.SIGTTIN, signals.SIGTTOU}


def _parse_seconds(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


_UNIFIED_MEMORY: Final = "/dev/nvidia-uvm"


def nvml_client_files(gpu: int, ids: InstanceIds | None) -> list[str]:
    """Return the files that an NVML client without a CUDA context has open for a GPU, or for an instance on it."""
    return ["/dev/nvidiactl", *nodes_of(gpu, ids)]


def holders_of(state: SimulatedHostState, gpu: int) -> list[Resident]:
    """Return the processes that have the node of a GPU, or of an instance of it, open without a context.

    One entry per instance; its ids are None for the GPU's own node.
    """
    entries = []
    for process in state.processes:
        holder = Resident(pid=process.pid, memory_bytes=process.memory_bytes, sm_percent=0, holder=True)
        if f"/dev/nvidia{gpu}" in process.open_files:
            entries.append(holder)
        for ids in ids_of_instances(state.gpus[gpu]) if process.open_files else ():
            if node_of(gpu, ids) in process.open_files:
                entries.append(holder._replace(instance_ids=ids))
    return entries


def _open_files_of_all(state: SimulatedHostState) -> Iterator[tuple[int, int, set[str]]]:
    """Yield PID, user id and open device nodes of all processes and MPS servers."""
    indexes = {gpu.uuid: index for index, gpu in enumerate(state.gpus)}
    for process in state.processes:
        paths = set(process.open_files)
        if process.gpu_uuid in indexes and on_gpu(process):
            paths.update(nvml_client_files(indexes[process.gpu_uuid], process.instance_ids))
            if not process.graphics:
                paths.add(_UNIFIED_MEMORY)
        yield process.pid, process.uid, paths
    for daemon in state.daemons:
        paths = set()
        for device in daemon_devices(state, daemon):
            ids = device.mig.instance_ids if device.mig else None
            paths.update([_UNIFIED_MEMORY, *nvml_client_files(indexes[device.gpu.uuid], ids)])
        for server in daemon.servers:
            yield server.pid, server.uid, paths
