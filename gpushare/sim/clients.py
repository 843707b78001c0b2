"""What CUDA and MPS do with the processes of a simulated host. Pure on the state; log lines are returned.

Facts: NVIDIA's MPS documentation, and measurements on an H200 (driver 580.159.04) for how the end of a
client breaks its neighbours. The simulated break is deterministic where the real one is likely.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Mapping

from gpushare.sim import mps_servers
from gpushare.sim.devices import Device, daemon_devices, host_devices, may_open_nodes, split, visible
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

DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"
OUTSIDE = "GPUSHARE_SIM_OUTSIDE"
# Below it a queue drains before the context is torn down: 0 of 9 broke (queue of at most 7 ms).
HARMLESS_QUEUE_SECONDS = 0.02
_KILLING = {signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT, signals.SIGABRT}


def daemon_of(state: SimulatedHostState, environment: Mapping[str, str]) -> SimulatedDaemon | None:
    """Return the live daemon whose pipe directory the environment names, or None."""
    pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY
    for daemon in state.daemons:
        if daemon.pipe_directory == pipe_directory:
            return daemon
    directory = os.path.realpath(pipe_directory) if state.daemons else ""
    return next((daemon for daemon in state.daemons if os.path.realpath(daemon.pipe_directory) == directory), None)


def clients_of(state: SimulatedHostState, server_pid: int) -> list[SimulatedProcess]:
    """Return the clients of a server, oldest first."""
    return [process for process in state.processes if process.mps_server == server_pid]


def attach(state: SimulatedHostState, process: SimulatedProcess) -> list[LogLine]:
    """Do what libcuda does at the first CUDA context of a process of the state.

    With a live daemon at CUDA_MPS_PIPE_DIRECTORY it becomes a client (or waits, or is refused); with
    none it silently runs outside MPS, on the whole GPU, without limits.
    """
    process.attach_at, environment = None, process.environment
    daemon = None if environment.get(OUTSIDE) == "1" else daemon_of(state, environment)
    if daemon is not None:
        return _attach_client(state, process, daemon)
    devices = visible(host_devices(state), split(environment.get("CUDA_VISIBLE_DEVICES")))
    if not devices or not may_open_nodes(devices[0], process.uid):
        _refuse(process, "CUDA_ERROR_NO_DEVICE")
    elif _is_shut_out(state, process, devices[0], daemon):
        _refuse(process, "CUDA_ERROR_DEVICE_UNAVAILABLE")
    else:
        _put_on(process, devices[0])
    return []


def end(state: SimulatedHostState, process: SimulatedProcess, signal: int | None) -> list[LogLine]:
    """Remove a process that died (``signal``: by what; None: it ended by itself) with what that does to others."""
    state.processes = [other for other in state.processes if other.pid != process.pid]
    lines: list[LogLine] = []
    for daemon in state.daemons:
        for server in daemon.servers:
            if server.pid == process.mps_server:
                others = clients_of(state, server.pid)
                broken = breaks_neighbours(process, signal, now())
                end_of_client = mps_servers.set_fault if broken else mps_servers.disconnected_lines
                lines = end_of_client(daemon, server, process, others)
    return lines + _progress(state)


def breaks_neighbours(process: SimulatedProcess, signal: int | None, at: float) -> bool:
    """Return whether this end of an MPS client tears its neighbours' contexts down: work that it launched is on the GPU.

    Measured: SIGKILL with a deep queue 6 of 9, SIGTERM 1 of 3; SIGSTOP, drained queue, SIGKILL 0 of 11; shallow queue or
    idle 0.
    """
    if process.broken or signal not in _KILLING or (signal in process.catches and signal != signals.SIGKILL):
        return False
    if process.queue_seconds <= HARMLESS_QUEUE_SECONDS:
        return False
    return process.stopped_at is None or at - process.stopped_at < process.queue_seconds


def settle(state: SimulatedHostState) -> list[LogLine]:
    """Bring the state up to date: real processes that died, contexts that are due, clients that waited."""
    lines: list[LogLine] = []
    for process in [process for process in state.processes if process.real and not lives(process)]:
        lines += end(state, process, None)
    for process in state.processes:
        if process.attach_at is not None and process.attach_at <= now():
            lines += attach(state, process)
    return lines + _progress(state)


def drop_daemon(state: SimulatedHostState, daemon: SimulatedDaemon) -> None:
    """Remove a daemon that ended, with its servers; clients that are left lose their contexts."""
    for process in state.processes:
        if process.mps_daemon == daemon.pid:
            _lose_context(process, process.refused or "CUDA_ERROR_MPS_CONNECTION_FAILED")
    state.daemons = [other for other in state.daemons if other.pid != daemon.pid]


def drop_server(state: SimulatedHostState, daemon: SimulatedDaemon, server: SimulatedServer) -> list[LogLine]:
    """Remove a server that was shut down; clients that are left lose their contexts, waiting ones come in."""
    return _remove_server(state, daemon, server) + _progress(state)


def _lose_context(process: SimulatedProcess, error: str) -> None:
    _refuse(process, error)
    process.broken = True
    process.mps_daemon = process.mps_server = None


def _remove_server(state: SimulatedHostState, daemon: SimulatedDaemon, server: SimulatedServer) -> list[LogLine]:
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
    devices = visible(daemon_devices(state, daemon), split(process.environment.get("CUDA_VISIBLE_DEVICES")))
    if not devices or not may_open_nodes(devices[0], process.uid):
        _refuse(process, "CUDA_ERROR_NO_DEVICE")
        return []
    log = [control_line(daemon, "Accepting connection...")]
    new = f"NEW CLIENT {process.pid} from user {process.uid}: "
    pending = control_line(daemon, f"{new}Server is not ready, push client to pending list")
    # With -M one server of root serves all users.
    uid = 0 if daemon.multiuser else process.uid
    if any(other.uid != uid and clients_of(state, other.pid) for other in daemon.servers):
        return [*log, pending]
    if _is_shut_out(state, process, devices[0], daemon):
        _refuse(process, "CUDA_ERROR_DEVICE_UNAVAILABLE")
        return log
    server = next((server for server in daemon.servers if server.uid == uid), None)
    if server is not None:
        log.append(control_line(daemon, f"{new}Server already exists"))
        return log + _connect(state, process, daemon, server, devices)
    log.append(pending)
    for other in list(daemon.servers):
        log += _remove_server(state, daemon, other)
    server, lines = mps_servers.start_server(state, daemon, uid)
    return log + lines + _connect(state, process, daemon, server, devices)


def _connect(
    state: SimulatedHostState,
    process: SimulatedProcess,
    daemon: SimulatedDaemon,
    server: SimulatedServer,
    devices: list[Device],
) -> list[LogLine]:
    """Make a process a client of a server, with the limits of both; or refuse it. Return the log lines."""
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
    # Both limits hold, the server's and its own; one for a GPU that it cannot see drops all.
    own_limits = mps_servers.parse_environment(process.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"))
    if not mps_servers.names_invisible(own_limits, devices):
        limits = [
            mps_servers.limit_of(server.memory, daemon_devices(state, daemon), devices[0]),
            mps_servers.limit_of(own_limits, devices, devices[0]),
        ]
        process.memory_limit_bytes = min(
            (limit * mps_servers.MIB for limit in limits if limit is not None), default=None
        )
    if process.memory_limit_bytes is not None:
        process.memory_bytes = min(process.memory_bytes, process.memory_limit_bytes)
    client = f"{{PID: {process.pid}, Context ID: 1}}"
    return server_lines(daemon, server, f"Received new client request for {client}", f"Client {client} connected")


def _is_shut_out(
    state: SimulatedHostState, process: SimulatedProcess, device: Device, daemon: SimulatedDaemon | None
) -> bool:
    """Return whether the compute mode shuts the process out (MIG devices have none)."""
    if device.mig is not None or device.gpu.compute_mode == 0:
        return False
    if device.gpu.compute_mode == 2:
        return True
    plain = any(
        other.gpu_uuid == device.gpu.uuid and on_gpu(other) and other.mps_server is None and not other.graphics
        for other in state.processes
        if other.pid != process.pid
    )
    foreign = any(
        other.servers and device in daemon_devices(state, other)
        for other in state.daemons
        if daemon is None or other.pid != daemon.pid
    )
    served = daemon is not None and bool(daemon.servers)
    return (plain or foreign) and not served


def _refuse(process: SimulatedProcess, error: str) -> None:
    process.refused, process.gpu_uuid = error, ""


def _put_on(process: SimulatedProcess, device: Device) -> None:
    """Let a process have its context on a device."""
    process.gpu_uuid = device.gpu.uuid
    process.gpu_instance_id = device.mig.gpu_instance_id if device.mig else None
    process.compute_instance_id = device.mig.compute_instance_id if device.mig else None


def _progress(state: SimulatedHostState) -> list[LogLine]:
    """Recover servers whose affected clients are gone, then let waiting clients in."""
    lines: list[LogLine] = []
    for daemon in state.daemons:
        for server in daemon.servers:
            if server.status == "FAULT" and not any(client.broken for client in clients_of(state, server.pid)):
                lines += mps_servers.recover(daemon, server)
        if daemon.stopped:
            continue
        for process in state.processes:
            pending = process.mps_daemon == daemon.pid and process.mps_server is None and process.refused is None
            # A waiting client of another user asks again only when it could be let in: else its log line repeats.
            others = (server for server in daemon.servers if server.uid != process.uid)
            if pending and not any(clients_of(state, server.pid) for server in others):
                lines += _attach_client(state, process, daemon)
    return lines
