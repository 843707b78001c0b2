"""The life of simulated MPS servers, and the lines they write. Pure on the state."""

from __future__ import annotations

from gpushare.sim import mps_limits
from gpushare.sim.devices import daemon_devices
from gpushare.sim.mps_logs import CONTROL, SERVER, LogLine
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, SimulatedProcess, SimulatedServer

# What NVML shows for an idle nvidia-cuda-mps-server on an H200, driver 580.
SERVER_MEMORY_BYTES = 69_206_016


def driver_major(driver: str) -> int:
    """Return the branch of a driver version: 580 of ``580.159.04``."""
    head = driver.split(".", 1)[0]
    return int(head) if head.isdigit() else 0


def binary_version(driver: str) -> int:
    """Return the "Binary version" of the MPS programs of a driver, which is its CUDA version times 1000."""
    major = driver_major(driver)
    for branch, version in (
        (615, 13040),
        (610, 13030),
        (595, 13020),
        (590, 13010),
        (580, 13000),
        (570, 12080),
        (550, 12040),
    ):
        if major >= branch:
            return version
    return 12020


def max_clients(driver: str) -> int:
    """Return how many clients one server takes: 48, and 60 since CUDA 13.1."""
    return 60 if binary_version(driver) >= 13010 else 48


def of_process(
    state: SimulatedHostState, process: SimulatedProcess
) -> tuple[SimulatedDaemon | None, SimulatedServer | None]:
    """Return the daemon and the server of a client, or None and None."""
    for daemon in state.daemons:
        for server in daemon.servers:
            if server.pid == process.mps_server:
                return daemon, server
    return None, None


def start(state: SimulatedHostState, daemon: SimulatedDaemon, uid: int) -> tuple[SimulatedServer, list[LogLine]]:
    """Start a server for a user with the daemon's defaults of this moment; return it with its log lines."""
    inherited = mps_limits.parse_environment(daemon.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"))
    memory = {key: value for key, value in inherited.items() if value is not None}
    for key, value in daemon.memory.items():
        # Taken out first: the order of the entries says which was set last.
        memory.pop(key, None)
        memory[key] = value
    server = SimulatedServer(
        pid=state.new_pid(), uid=uid, threads=daemon.threads, memory=memory, priority=daemon.priority
    )
    daemon.servers.append(server)
    lines = [
        LogLine(
            daemon.log_directory, CONTROL, "Control", server.pid, f"Starting new server {server.pid} for user {uid}"
        )
    ]
    socket = f"{daemon.pipe_directory}/control"
    texts = ("Startup", f"Connecting to control daemon on socket: {socket}", "Initializing server process")
    lines += [LogLine(daemon.log_directory, SERVER, "Other", server.pid, text) for text in texts]
    lines += [server_line(daemon, server, text) for text in _announcements(state, daemon, server)]
    lines.append(LogLine(daemon.log_directory, CONTROL, "Control", daemon.pid, f"NEW SERVER {server.pid}: Ready"))
    return server, lines


def _announcements(state: SimulatedHostState, daemon: SimulatedDaemon, server: SimulatedServer) -> list[str]:
    devices = daemon_devices(state, daemon)
    texts = [
        f"Creating server context on device {index} ({_title(device.gpu.model)})"
        for index, device in enumerate(devices)
    ]
    texts += [
        f"Created anonymous shared memory region mps.shm.{server.uid}.{server.pid}",
        f"CUDA MPS Server for Linux/Unix. Binary version: {binary_version(state.driver)}",
        f"Display Driver version: {driver_major(state.driver)}",
        f"Active Threads Percentage set to {server.threads:.1f}",
    ]
    for index, device in enumerate(devices):
        limit = mps_limits.limit_of(server.memory, devices, device)
        if limit is not None:
            texts.append(f"Device pinned memory limit for device {index} set to {limit * mps_limits.MIB:#x} bytes")
    return [*texts, f"Server Priority set to {server.priority}", "Server has started"]


def connected(daemon: SimulatedDaemon, server: SimulatedServer, process: SimulatedProcess) -> list[LogLine]:
    """Return what the server writes for a new client."""
    who = f"{{PID: {process.pid}, Context ID: 1}}"
    texts = (
        f"Received new client request for {who}",
        f"Client {who} connected",
        f"Creating worker thread for client {who}",
        f"Status of client {who} is ACTIVE",
    )
    return [server_line(daemon, server, text) for text in texts]


def disconnected(
    daemon: SimulatedDaemon, server: SimulatedServer, process: SimulatedProcess, left: int
) -> list[LogLine]:
    """Return what the server writes when a client is gone and ``left`` clients are there."""
    who = f"{{PID: {process.pid}, Context ID: 1}}"
    texts = (
        f"Server failed to recevie command with status 806, assuming client {who} exit",
        f"Client {who} exiting. Number of active client contexts is {left}.",
        f"Client process {process.pid} disconnected",
    )
    return [server_line(daemon, server, text) for text in texts]


def fault(
    daemon: SimulatedDaemon, server: SimulatedServer, process: SimulatedProcess, others: list[SimulatedProcess]
) -> list[LogLine]:
    """Put the server into FAULT: its other clients lose their contexts."""
    server.status = "FAULT"
    for other in others:
        other.broken = True
    texts = [
        f"Client {{PID: {process.pid}, Context ID: 1}} encountered a fatal GPU error.",
        "Server has begun teardown sequence to handle a fatal GPU error.",
        "The following devices will be reset: 0",
        "The following clients have a sticky error set:",
        *(str(other.pid) for other in others),
    ]
    return [server_line(daemon, server, text) for text in texts]


def recovered(daemon: SimulatedDaemon, server: SimulatedServer) -> list[LogLine]:
    """Put a server back to ACTIVE: every client that the fault hit is gone."""
    server.status = "ACTIVE"
    texts = ("Destroy server context on device 0", "Creating server context on device 0")
    return [server_line(daemon, server, text) for text in texts]


def server_line(daemon: SimulatedDaemon, server: SimulatedServer, text: str) -> LogLine:
    """Return one line of a server's log."""
    return LogLine(daemon.log_directory, SERVER, "Server", server.pid, text)


def _title(model: str) -> str:
    from gpushare.sim.models import find_model

    return find_model(model).name
