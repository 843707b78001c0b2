"""One command to a simulated MPS control daemon, and its answer."""

from __future__ import annotations

import math
import re
from dataclasses import field

from gpushare.gpu_models import find_model
from gpushare.sim import clients, mps_daemon, mps_servers
from gpushare.sim.devices import Device, daemon_devices
from gpushare.sim.mps_servers import CONTROL, LogLine, driver_major, leading_integer, server_line
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, SimulatedProcess, SimulatedServer, now
from gpushare.values import dataclass


@dataclass(frozen=True)
class Reply:
    """What a command prints, and whether the daemon ended with it."""

    text: str = ""
    ended: bool = False


@dataclass
class MpsRequest:
    """One command: the settled state under the lock, the daemon, the words after the command's name.

    ``elapsed`` counts seconds since the command came: a command that blocks returns None and is asked again.
    ``hanging`` is the PID of the client that this very command hangs on.
    """

    state: SimulatedHostState
    daemon: SimulatedDaemon
    words: list[str]
    elapsed: float = 0.0
    hanging: int | None = None
    lines: list[LogLine] = field(default_factory=list)

    @property
    def major(self) -> int:
        """Return the driver branch: commands and texts differ by it."""
        return driver_major(self.state.driver)

    @property
    def owner(self) -> bool:
        """Return whether the user started the daemon, or is root."""
        return self.state.may(self.daemon.uid)

    def integer(self, index: int) -> int:
        """Return a word as C's atoi reads it: the leading digits, else 0."""
        return leading_integer(self.word(index))[0]

    def word(self, index: int) -> str:
        """Return a word, or an empty text when it is missing."""
        return self.words[index] if index < len(self.words) else ""

    def server(self, index: int) -> SimulatedServer | None:
        """Return the server with the PID in a word."""
        pid = self.integer(index)
        return next((server for server in self.daemon.servers if server.pid == pid), None)

    def log(self, text: str) -> None:
        """Write a line to control.log."""
        self.lines.append(LogLine(self.daemon.log_directory, CONTROL, "Control", self.daemon.pid, text))


def not_found(request: MpsRequest, index: int) -> Reply:
    """Return the answer for a server PID that is not there."""
    return Reply(f"Server {request.integer(index)} not found\n")


def invalid_device(request: MpsRequest) -> Reply:
    """Return the answer for a device number out of range: nothing, and a line in the log up to 555."""
    if request.major < 580:
        request.log("Invalid device ordinal!")
    return Reply()


def refused(request: MpsRequest) -> Reply:
    """Return the answer to a user without the right to change the daemon (550 and newer)."""
    return Reply(
        f"Insufficient privileges for UID {request.state.uid}. Control deamon settings can only be modified "
        "by the user started it or by the root user.\n"
    )


_HEXADECIMAL = r"(0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?)"
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(rf"\s*([+-]?(?:{_HEXADECIMAL}|{_DECIMAL}))")


def set_default_active_thread_percentage(request: MpsRequest) -> Reply:
    """Change the default for upcoming servers, and print what is in force: the old value when refused."""
    value = _percentage(request, 0)
    if value is not None:
        request.daemon.threads = value
    return Reply(f"{request.daemon.threads:.1f}\n")


def set_active_thread_percentage(request: MpsRequest) -> Reply:
    """Change a server's value for upcoming clients; running ones keep theirs."""
    server = request.server(0)
    if server is None:
        return not_found(request, 0)
    value = _percentage(request, 1)
    if value is not None:
        server.threads = value
        request.lines.append(server_line(request.daemon, server, f"Active Threads Percentage set to {value:.1f}"))
    return Reply(f"{server.threads:.1f}\n")


def _percentage(request: MpsRequest, index: int) -> float | None:
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


def set_default_device_pinned_mem_limit(request: MpsRequest) -> Reply:
    """Change the default for upcoming servers; prints nothing, whatever it made of the value."""
    return _set_limit(request, request.daemon.memory, 0)


def set_device_pinned_mem_limit(request: MpsRequest) -> Reply:
    """Change a server's limit for upcoming clients."""
    server = request.server(0)
    return _set_limit(request, server.memory, 1) if server else not_found(request, 0)


def _set_limit(request: MpsRequest, limits: dict[str, int], index: int) -> Reply:
    key, text = mps_servers.read_device(request.words[index:], request.major)
    if key is None:
        return invalid_device(request)
    known = key.isdigit() or any(key == device.uuid for device in daemon_devices(request.state, request.daemon))
    # Taken out first: the order of the entries says which was set last.
    limits.pop(key, None)
    value = mps_servers.parse_memory(text)
    if value is not None and known:
        limits[key] = value
    return Reply()


def set_default_client_priority(request: MpsRequest) -> Reply:
    """0 or 1 for upcoming servers; what is no number is 0."""
    priority = request.integer(0)
    if priority not in {0, 1}:
        return Reply("Invalid priority value - must be 0 or 1!\n")
    request.daemon.priority = priority
    return Reply()


def start_server(request: MpsRequest) -> Reply:
    """Start a server for a user; no output on acceptance, even when the server then dies."""
    if request.word(0) != "-uid" or not re.match(r"[+-]?\d", request.word(1)):
        if request.major >= 580:
            return Reply("Invalid start_server cmd. Expected cmd: start_server -uid <user id>\n")
        return Reply("A user id (UID) is required to start a new server\n")
    uid = request.integer(1) % (1 << 32)
    if not request.state.may(uid):
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
    request.lines += mps_servers.start_server(request.state, request.daemon, uid)[1]
    return Reply()


def shutdown_server(request: MpsRequest) -> Reply | None:
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


def terminate_client(request: MpsRequest) -> Reply | None:
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


def _terminate(request: MpsRequest, server: SimulatedServer, client: SimulatedProcess) -> None:
    client.terminated_at = now()
    request.lines.append(server_line(request.daemon, server, "Client termination succeeded."))


def quit_daemon(request: MpsRequest) -> Reply | None:
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


def sm_partition(request: MpsRequest) -> Reply:
    """Static SM partitions (595 and newer): refused, as on a device that has no room for one."""
    if not request.daemon.static:
        return Reply("Static partitioning mode is not enabled\n")
    if request.word(0) == "add" and len(request.words) == 3:
        return Reply(f"Failed to create the requested SM partition of {request.integer(2)} chunks, error 801\n")
    if request.word(0) == "rm" and len(request.words) >= 2:
        return Reply(f"Partition {'/'.join(request.words[1:])} not found\n")
    return Reply("Usage: sm_partition add <device UUID> <number of chunks>\n")


_HOST_NAMESPACE = 4026531836
_OTHER_NAMESPACE = 4026532198


def get_server_list(request: MpsRequest) -> Reply:
    """One PID per line, nothing when there is none."""
    return Reply("".join(f"{server.pid}\n" for server in request.daemon.servers))


def get_server_status(request: MpsRequest) -> Reply:
    """ACTIVE or FAULT; unknown to 535."""
    if not re.match(r"[+-]?[0-9]", request.word(0)):
        return Reply("A server PID is required\n")
    server = request.server(0)
    return Reply(f"{server.status}\n") if server else not_found(request, 0)


def get_client_list(request: MpsRequest) -> Reply:
    """The PIDs of a server's clients."""
    server = request.server(0)
    if server is None:
        return not_found(request, 0)
    return Reply("".join(f"{client.pid}\n" for client in clients.clients_of(request.state, server.pid)))


def get_device_client_list(request: MpsRequest) -> Reply:
    """Each device of the servers with ``PID.CONTEXT`` of its clients; without a PID, or with 0, of all servers."""
    if request.integer(0) and request.server(0) is None:
        return not_found(request, 0)
    text = ""
    for server in request.daemon.servers:
        if request.integer(0) in {0, server.pid}:
            text += _device_clients(request, server)
    return Reply(text)


def _device_clients(request: MpsRequest, server: SimulatedServer) -> str:
    text = ""
    for index, device in enumerate(daemon_devices(request.state, request.daemon)):
        domain, bus, _ = device.gpu.pci_bus_id.split(":")
        text += f"[{index}] {int(domain, 16):02d}:{int(bus, 16):02d}.0, {find_model(device.gpu.model).name}\n"
        for client in clients.clients_of(request.state, server.pid):
            if _on(client, device):
                text += f"{client.pid}.1\n"
    return text


def get_default_active_thread_percentage(request: MpsRequest) -> Reply:
    """The default for upcoming servers, with one decimal."""
    return Reply(f"{request.daemon.threads:.1f}\n")


def get_active_thread_percentage(request: MpsRequest) -> Reply:
    """The value of a server for upcoming clients."""
    server = request.server(0)
    return Reply(f"{server.threads:.1f}\n") if server else not_found(request, 0)


def get_default_device_pinned_mem_limit(request: MpsRequest) -> Reply:
    """The default for upcoming servers: nothing when unset, whole G from 1024M up."""
    return _limit(request, request.daemon.memory, 0)


def get_device_pinned_mem_limit(request: MpsRequest) -> Reply:
    """The limit of a server for upcoming clients."""
    server = request.server(0)
    return _limit(request, server.memory, 1) if server else not_found(request, 0)


def _limit(request: MpsRequest, limits: dict[str, int], index: int) -> Reply:
    key, _ = mps_servers.read_device(request.words[index:], request.major)
    if key is None:
        return invalid_device(request)
    value = limits.get(key)
    if value is None:
        request.log("No default pinned memory limit set for the device!")
        return Reply()
    return Reply(mps_servers.readback(value) + "\n")


def get_default_client_priority(request: MpsRequest) -> Reply:
    """0 normal, 1 below normal."""
    return Reply(f"{request.daemon.priority}\n")


def ps(request: MpsRequest) -> Reply:
    """The table of clients; ``-p PID`` for one server."""
    only = request.word(0) == "-p"
    if only and request.server(1) is None:
        line = f"Server {request.integer(1)} not found\n"
        # Twice, and an empty line: the program's own.
        return Reply(line + line + "\n")
    if not request.daemon.servers:
        return Reply("Server not found\n")
    rows: list[tuple[str, ...]] = [("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND", "ATTRIBUTES")]
    for server in request.daemon.servers:
        if not only or request.integer(1) == server.pid:
            rows += [_row(request, client) for client in clients.clients_of(request.state, server.pid)]
    last = "%-15s%-15s" if request.major >= 595 else "%-15s"
    shown = 7 if request.major >= 595 else 6
    return Reply("".join(("%-10s%-10s%-15s%-26s%-15s" + last + "\n") % row[:shown] for row in rows))


def _row(request: MpsRequest, client: SimulatedProcess) -> tuple[str, ...]:
    devices = [device for device in daemon_devices(request.state, request.daemon) if _on(client, device)]
    uuid = devices[0].uuid if devices else client.gpu_uuid
    namespace = _HOST_NAMESPACE if request.state.pid_namespace_is_host else _OTHER_NAMESPACE
    command = client.command_line[0] if client.command_line else client.name
    # The last group of the UUID is cut off.
    return str(client.pid), "1", str(client.mps_server), uuid.rsplit("-", 2)[0], str(namespace), command, ""


def lspart(request: MpsRequest) -> Reply:
    """The static SM partitions (595 and newer); this host makes none."""
    if not request.daemon.static:
        return Reply("Static partitioning mode is not enabled\n")
    form = "%-20s %-36s %-8s %-8s %-6s %-6s %-6s\n"
    header = form % ("GPU", "Partition", "free", "used", "free", "used", "clients")
    return Reply(header + form % ("", "", "chunk", "chunk", "SM", "SM", ""))


def device_query(request: MpsRequest) -> Reply:
    """The devices of the daemon (580 and newer); ``--csv`` in the same order."""
    csv = "--csv" in request.words
    rows = [("Device Ordinal", "PCI IDs", "UUID", "Name", "Attributes")]
    for index, device in enumerate(daemon_devices(request.state, request.daemon)):
        domain, bus, slot = device.gpu.pci_bus_id.split(":")
        pci = f"{domain[-4:]}:{bus}.{slot.replace('.0', '.00')}".lower()
        rows.append((str(index), pci, device.uuid, find_model(device.gpu.model).name, ""))
    if csv:
        return Reply("".join(",".join(row) + "\n" for row in rows))
    return Reply("".join(f"{row[0]:<16}{row[1]:<15}{row[2]:<42}{row[3]:<34}{row[4]}".rstrip() + "\n" for row in rows))


def _on(client: SimulatedProcess, device: Device) -> bool:
    instance = device.mig.gpu_instance_id if device.mig else None
    return client.gpu_uuid == device.gpu.uuid and client.gpu_instance_id == instance
