"""The commands of nvidia-cuda-mps-control that change something: set_..., servers, clients, quit."""

from __future__ import annotations

import math
import re

from gpushare.sim import clients, mps_daemon, mps_limits, mps_servers
from gpushare.sim.devices import daemon_devices
from gpushare.sim.mps_request import Reply, Request, invalid_device, not_found, refused
from gpushare.sim.mps_servers import server_line
from gpushare.sim.state import SimulatedProcess, SimulatedServer, now

_HEXADECIMAL = r"(0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?)"
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(rf"\s*([+-]?(?:{_HEXADECIMAL}|{_DECIMAL}))")


def set_default_active_thread_percentage(request: Request) -> Reply:
    """Change the default for upcoming servers, and print what is in force: the old value when refused."""
    value = _percentage(request, 0)
    if value is not None:
        request.daemon.threads = value
    return Reply(f"{request.daemon.threads:.1f}\n")


def set_active_thread_percentage(request: Request) -> Reply:
    """Change a server's value for upcoming clients; running ones keep theirs."""
    server = request.server(0)
    if server is None:
        return not_found(request, 0)
    value = _percentage(request, 1)
    if value is not None:
        server.threads = value
        request.lines.append(server_line(request.daemon, server, f"Active Threads Percentage set to {value:.1f}"))
    return Reply(f"{server.threads:.1f}\n")


def _percentage(request: Request, index: int) -> float | None:
    match = _NUMBER.match(request.word(index))
    # As C's strtod reads it: the longest number at the beginning, hexadecimal too.
    value = _number(match.group(1), hexadecimal=match.group(2) is not None) if match else 0.0
    if 0.0 < value <= 100.0:
        return value
    request.log("Invalid percentage, expected between (0.0, 100.0]")
    return None


def _number(text: str, *, hexadecimal: bool) -> float:
    try:
        return float.fromhex(text) if hexadecimal else float(text)
    except OverflowError:
        return math.inf


def set_default_device_pinned_mem_limit(request: Request) -> Reply:
    """Change the default for upcoming servers; prints nothing, whatever it made of the value."""
    return _set_limit(request, request.daemon.memory, 0)


def set_device_pinned_mem_limit(request: Request) -> Reply:
    """Change a server's limit for upcoming clients."""
    server = request.server(0)
    return _set_limit(request, server.memory, 1) if server else not_found(request, 0)


def _set_limit(request: Request, limits: dict[str, int], index: int) -> Reply:
    key, text = mps_limits.read_device(request.words[index:], request.major)
    if key is None:
        return invalid_device(request)
    known = key.isdigit() or any(key == device.uuid for device in daemon_devices(request.state, request.daemon))
    # Taken out first: the order of the entries says which was set last.
    limits.pop(key, None)
    value = mps_limits.parse_memory(text)
    if value is not None and known:
        limits[key] = value
    return Reply()


def set_default_client_priority(request: Request) -> Reply:
    """0 or 1 for upcoming servers; what is no number is 0."""
    priority = request.integer(0)
    if priority not in {0, 1}:
        return Reply("Invalid priority value - must be 0 or 1!\n")
    request.daemon.priority = priority
    return Reply()


def start_server(request: Request) -> Reply:
    """Start a server for a user; no output on acceptance, even when the server then dies."""
    if request.word(0) != "-uid" or not re.match(r"[+-]?\d", request.word(1)):
        if request.major >= 580:
            return Reply("Invalid start_server cmd. Expected cmd: start_server -uid <user id>\n")
        return Reply("A user id (UID) is required to start a new server\n")
    uid = request.integer(1) % (1 << 32)
    if request.state.uid not in {0, uid}:
        text = f"Insufficient privileges for UID {request.state.uid}"
        return Reply(
            text + (". Only the root user may start server for another user.\n" if request.major >= 550 else "\n")
        )
    if any(server.uid == uid for server in request.daemon.servers):
        return Reply(f"Server with UID {uid} already exists\n" if request.major >= 595 else "")
    if any(clients.clients_of(request.state, server.pid) for server in request.daemon.servers):
        # One user at a time: it waits for the last client of the other one.
        return Reply()
    if not daemon_devices(request.state, request.daemon):
        pid = request.state.new_pid()
        request.log(f"Starting new server {pid} for user {uid}")
        request.log(f"Server {pid} exited with status 1")
        return Reply()
    for server in list(request.daemon.servers):
        request.lines += clients.drop_server(request.state, request.daemon, server)
    request.lines += mps_servers.start(request.state, request.daemon, uid)[1]
    return Reply()


def shutdown_server(request: Request) -> Reply | None:
    """Shut a server down when its clients are gone; ``-f`` at once."""
    server = request.server(0)
    if server is None:
        return not_found(request, 0) if request.elapsed == 0.0 else Reply()
    if not request.owner and request.major >= 550:
        return refused(request)
    if clients.clients_of(request.state, server.pid) and request.word(1) != "-f":
        return None
    request.lines += clients.drop_server(request.state, request.daemon, server)
    return Reply()


def terminate_client(request: Request) -> Reply | None:
    """Terminate a client's work: prints 0. A second time, or on a stopped client, it never answers."""
    if request.hanging is not None:
        return None if request.daemon.hangs_on == request.hanging else Reply("0\n")
    server = request.server(0)
    if server is None:
        pid = request.integer(0)
        return Reply(f"Server {pid} not found\nServer {pid} not found!\n1\n")
    pid = request.integer(1)
    client = next((one for one in clients.clients_of(request.state, server.pid) if one.pid == pid), None)
    if client is None:
        return Reply(f"Invalid process {pid}!\n1\n")
    text = f"MPS server requesting client {{PID: {pid}, Context ID: 1}} to exit"
    request.lines.append(server_line(request.daemon, server, text))
    if client.stopped_at is not None or client.terminated_at is not None:
        request.daemon.hangs_on = pid
        return None
    _terminate(request, server, client)
    return Reply("0\n")


def _terminate(request: Request, server: SimulatedServer, client: SimulatedProcess) -> None:
    client.terminated_at = now()
    request.lines.append(server_line(request.daemon, server, "Client termination succeeded."))


def quit_daemon(request: Request) -> Reply | None:
    """End the daemon when every client is gone; ``-t SECONDS`` bounds the wait, then forces."""
    if not request.owner:
        return Reply("Not enough privilege to execute quit command\n")
    left = [client for server in request.daemon.servers for client in clients.clients_of(request.state, server.pid)]
    forced = request.word(0) == "-t" and request.elapsed >= max(request.integer(1), 0)
    if left and not forced:
        return None
    for server in request.daemon.servers:
        request.log(f"Server {server.pid} exited with status 0")
    mps_daemon.ended(request.state, request.daemon, cleanly=True)
    request.log("Exit with status 0" if request.state.driver_loaded else "Exit with status 1")
    return Reply(ended=True)


def sm_partition(request: Request) -> Reply:
    """Static SM partitions (595 and newer): refused, as on a device that has no room for one."""
    if not request.daemon.static:
        return Reply("Static partitioning mode is not enabled\n")
    if request.word(0) == "add" and len(request.words) == 3:
        return Reply(f"Failed to create the requested SM partition of {request.integer(2)} chunks, error 801\n")
    if request.word(0) == "rm" and len(request.words) >= 2:
        return Reply(f"Partition {'/'.join(request.words[1:])} not found\n")
    return Reply("Usage: sm_partition add <device UUID> <number of chunks>\n")
