"""What CUDA and MPS do with the processes of a simulated host. Pure on the state; log lines are returned.

Facts: NVIDIA's MPS documentation, and measurements on an H200 (driver 580.159.04) for how the end of a
client breaks its neighbours. The simulated break is deterministic where the real one is likely.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Mapping

from gpushare.base.model import ComputeMode
from gpushare.base.units import MIB
from gpushare.sim import mps_servers
from gpushare.sim.devices import Device, daemon_devices, host_devices, open_nodes, split_names, visible_devices
from gpushare.sim.mps_servers import LogLine, control_line, server_lines
from gpushare.sim.state import (
    SimulatedDaemon,
    SimulatedHostState,
    SimulatedProcess,
    SimulatedServer,
    lives,
    now,
    on_gpu,
)

OUTSIDE = "GPUSHARE_SIM_OUTSIDE"
# Below it a queue drains before the context is torn down: 0 of 9 broke (queue of at most 7 ms).
HARMLESS_QUEUE_SECONDS = 0.02
_KILLING = {signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT, signals.SIGABRT}


def daemon_of(state: SimulatedHostState, environment: Mapping[str, str]) -> SimulatedDaemon | None:
    """Return the live daemon whose pipe directory the environment names, perhaps by a symbolic link; None: there is none."""
    pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY") or mps_servers.DEFAULT_PIPE_DIRECTORY
    for daemon in state.daemons:
        if os.path.realpath(daemon.pipe_directory) == os.path.realpath(pipe_directory):
            return daemon
    return None


def clients_of(state: SimulatedHostState, server_pid: int) -> list[SimulatedProcess]:
    """Return the clients of a server, oldest first."""
    return [process for process in state.processes if process.mps_server == server_pid]


def attach(state: SimulatedHostState, process: SimulatedProcess) -> list[LogLine]:
    """Do what libcuda does at the first CUDA context of a process; return the log lines of MPS.

    With a live daemon at CUDA_MPS_PIPE_DIRECTORY the process becomes a client (or waits, or is refused); with
    none it silently runs outside MPS, on the whole GPU, without limits.
    """
    process.attach_at, environment = None, process.environment
    daemon = None if environment.get(OUTSIDE) == "1" else daemon_of(state, environment)
    if daemon is not None:
        return _attach_client(state, process, daemon)
    devices = _usable_devices(process, host_devices(state))
    if devices and _is_shut_out(state, process, devices[0], None):
        _refuse(process, "CUDA_ERROR_DEVICE_UNAVAILABLE")
    elif devices:
        _put_on(process, devices[0])
    return []


def _usable_devices(process: SimulatedProcess, devices: list[Device]) -> list[Device]:
    """Return the devices that a process sees; none, and the process is refused, if it may not use the first of them."""
    shown = visible_devices(devices, split_names(process.environment.get("CUDA_VISIBLE_DEVICES")))
    if shown and open_nodes(shown[0], process.uid):
        return shown
    _refuse(process, "CUDA_ERROR_NO_DEVICE")
    return []


def end(state: SimulatedHostState, process: SimulatedProcess, signal: int | None) -> list[LogLine]:
    """Remove a process that ended, by a signal or (None) by itself, with what that does to other clients of its server."""
    state.processes = [other for other in state.processes if other.pid != process.pid]
    lines: list[LogLine] = []
    for daemon in state.daemons:
        for server in daemon.servers:
            if server.pid == process.mps_server:
                breaks = breaks_neighbours(process, signal, now())
                end_of_client = mps_servers.set_fault if breaks else mps_servers.disconnected_lines
                lines += end_of_client(daemon, server, process, clients_of(state, server.pid))
    return lines + _recover_and_admit(state)


def breaks_neighbours(process: SimulatedProcess, signal: int | None, at: float) -> bool:
    """Return whether the end of an MPS client breaks the contexts of its neighbours: its queued work is still on the GPU.

    Measured: SIGKILL with a deep queue 6 of 9, SIGTERM 1 of 3; SIGSTOP, drained queue, SIGKILL 0 of 11; shallow queue or
    idle 0.
    """
    catches = signal in process.catches and signal != signals.SIGKILL
    if process.broken or catches or signal not in _KILLING:
        return False
    if process.queue_seconds <= HARMLESS_QUEUE_SECONDS:
        return False
    return process.stopped_at is None or at - process.stopped_at < process.queue_seconds


def settle(state: SimulatedHostState) -> list[LogLine]:
    """Bring the state up to date: remove real processes that died, make contexts that are due, let waiting clients in."""
    lines: list[LogLine] = []
    for process in [process for process in state.processes if process.real and not lives(process)]:
        lines += end(state, process, None)
    for process in state.processes:
        if process.attach_at is not None and process.attach_at <= now():
            lines += attach(state, process)
    return lines + _recover_and_admit(state)


def drop_daemon(state: SimulatedHostState, daemon: SimulatedDaemon) -> None:
    """Remove a daemon that ended, with its servers; clients that are left lose their contexts."""
    for process in state.processes:
        if process.mps_daemon == daemon.pid:
            _lose_context(process, process.refused or "CUDA_ERROR_MPS_CONNECTION_FAILED")
    state.daemons = [other for other in state.daemons if other.pid != daemon.pid]


def _lose_context(process: SimulatedProcess, error: str) -> None:
    _refuse(process, error)
    process.broken = True
    process.mps_daemon = process.mps_server = None


def remove_server(state: SimulatedHostState, daemon: SimulatedDaemon, server: SimulatedServer) -> list[LogLine]:
    """Remove a server, whose clients lose their contexts; return the log lines."""
    for process in clients_of(state, server.pid):
        _lose_context(process, "CUDA_ERROR_MPS_RPC_FAILURE")
    daemon.servers = [other for other in daemon.servers if other.pid != server.pid]
    return [control_line(daemon, f"Server {server.pid} exited with status 0")]


def _attach_client(state: SimulatedHostState, process: SimulatedProcess, daemon: SimulatedDaemon) -> list[LogLine]:
    """Let a process connect to a daemon: it gets a server, waits for one, or is refused. Return the log lines."""
    process.mps_daemon, process.mps_server, process.gpu_uuid = daemon.pid, None, ""
    if daemon.stopped:
        return []
    devices = _usable_devices(process, daemon_devices(state, daemon))
    if not devices:
        return []
    accepting = control_line(daemon, "Accepting connection...")
    new = f"NEW CLIENT {process.pid} from user {process.uid}: "
    pending = control_line(daemon, f"{new}Server is not ready, push client to pending list")
    if _must_wait(state, process, daemon):
        return [accepting, pending]
    if _is_shut_out(state, process, devices[0], daemon):
        _refuse(process, "CUDA_ERROR_DEVICE_UNAVAILABLE")
        return [accepting]
    uid = _server_uid(process, daemon)
    server = next((server for server in daemon.servers if server.uid == uid), None)
    if server is not None:
        existing = control_line(daemon, f"{new}Server already exists")
        return [accepting, existing, *_connect(state, process, daemon, server, devices)]
    lines = [accepting, pending]
    # Those of other users, which have no clients: a daemon has one server at a time.
    for other in list(daemon.servers):
        lines += remove_server(state, daemon, other)
    server, started = mps_servers.start_server(state, daemon, uid)
    return [*lines, *started, *_connect(state, process, daemon, server, devices)]


def _connect(
    state: SimulatedHostState,
    process: SimulatedProcess,
    daemon: SimulatedDaemon,
    server: SimulatedServer,
    devices: list[Device],
) -> list[LogLine]:
    """Make a process a client of a server, on the first of these devices, or refuse it. Return the log lines."""
    if server.status == "FAULT":
        _refuse(process, "CUDA_ERROR_MPS_SERVER_NOT_READY")
        text = f"MPS server teardown in progress. Refusing to accept new client {{PID: {process.pid}, Context ID: 0}}"
        return server_lines(daemon, server, text)
    # 60 since CUDA 13.1.
    limit = 60 if mps_servers.binary_version(state) >= 13010 else 48
    if len(clients_of(state, server.pid)) >= limit:
        _refuse(process, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
        return server_lines(daemon, server, f"Number of active client contexts reached limit ({limit})")
    process.mps_server = server.pid
    _put_on(process, devices[0])
    own_threads = mps_servers.parse_threads(process.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))
    process.threads = server.threads if own_threads is None else min(own_threads, server.threads)
    process.sm_percent = round(process.sm_percent * process.threads / 100)
    server_limit = mps_servers.limit_of(server.memory, daemon_devices(state, daemon), devices[0])
    limit_mib = _memory_limit_mib(process, devices, server_limit)
    if limit_mib is not None:
        process.memory_limit_bytes = limit_mib * MIB
        process.memory_bytes = min(process.memory_bytes, process.memory_limit_bytes)
    client = f"{{PID: {process.pid}, Context ID: 1}}"
    return server_lines(daemon, server, f"Received new client request for {client}", f"Client {client} connected")


def _memory_limit_mib(process: SimulatedProcess, devices: list[Device], server_limit: int | None) -> int | None:
    """Return the memory limit of a client on the first of its devices: its own or its server's, whichever is lower."""
    own_limits = mps_servers.parse_memory_limits(process.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"))
    limits = (server_limit, mps_servers.limit_of(own_limits, devices, devices[0]))
    return min((limit for limit in limits if limit is not None), default=None)


def _is_shut_out(
    state: SimulatedHostState, process: SimulatedProcess, device: Device, daemon: SimulatedDaemon | None
) -> bool:
    """Return whether the compute mode keeps a process off a device: as a client of ``daemon``, or (None) outside MPS."""
    # MIG devices have no compute mode.
    if device.mig is not None or device.gpu.compute_mode == ComputeMode.DEFAULT:
        return False
    if device.gpu.compute_mode == ComputeMode.PROHIBITED:
        return True
    # EXCLUSIVE_PROCESS: the GPU takes one process outside MPS, or the server of one daemon.
    if daemon is not None and daemon.servers:
        return False
    used_outside_mps = any(
        other.gpu_uuid == device.gpu.uuid and on_gpu(other) and other.mps_server is None and not other.graphics
        for other in state.processes
        if other.pid != process.pid
    )
    return used_outside_mps or any(
        other.servers and device in daemon_devices(state, other) for other in state.daemons if other is not daemon
    )


def _refuse(process: SimulatedProcess, error: str) -> None:
    process.refused, process.gpu_uuid = error, ""


def _put_on(process: SimulatedProcess, device: Device) -> None:
    """Give a process its context on a device."""
    ids = device.mig.instance_ids if device.mig else (None, None)
    process.gpu_uuid = device.gpu.uuid
    process.gpu_instance_id, process.compute_instance_id = ids


def _recover_and_admit(state: SimulatedHostState) -> list[LogLine]:
    """Recover servers whose affected clients are gone, then let waiting clients in."""
    lines: list[LogLine] = []
    for daemon in state.daemons:
        for server in daemon.servers:
            if server.status == "FAULT" and not any(client.broken for client in clients_of(state, server.pid)):
                server.status = "ACTIVE"
                lines += server_lines(daemon, server, "Creating server context on device 0")
        if daemon.stopped:
            continue
        for process in state.processes:
            waits = process.mps_daemon == daemon.pid and process.mps_server is None and process.refused is None
            # One that must go on waiting does not ask again: its log line would repeat.
            if waits and not _must_wait(state, process, daemon):
                lines += _attach_client(state, process, daemon)
    return lines


def _server_uid(process: SimulatedProcess, daemon: SimulatedDaemon) -> int:
    """Return the user of the server that serves a process: with -M, one server of root serves all users."""
    return 0 if daemon.multiuser else process.uid


def _must_wait(state: SimulatedHostState, process: SimulatedProcess, daemon: SimulatedDaemon) -> bool:
    """Return whether another user's server has clients: then a process waits until they are gone."""
    others = (server for server in daemon.servers if server.uid != _server_uid(process, daemon))
    return any(clients_of(state, server.pid) for server in others)
