"""The commands of nvidia-cuda-mps-control that only tell: get_..., ps, lspart, device_query."""

from __future__ import annotations

import re

from gpushare.sim import clients, mps_limits
from gpushare.sim.devices import Device, daemon_devices
from gpushare.sim.models import find_model
from gpushare.sim.mps_request import Reply, Request, invalid_device, not_found
from gpushare.sim.state import SimulatedProcess, SimulatedServer

_HOST_NAMESPACE = 4026531836
_OTHER_NAMESPACE = 4026532198


def get_server_list(request: Request) -> Reply:
    """One PID per line, nothing when there is none."""
    return Reply("".join(f"{server.pid}\n" for server in request.daemon.servers))


def get_server_status(request: Request) -> Reply:
    """ACTIVE or FAULT; unknown to 535."""
    if not re.match(r"[+-]?[0-9]", request.word(0)):
        return Reply("A server PID is required\n")
    server = request.server(0)
    return Reply(f"{server.status}\n") if server else not_found(request, 0)


def get_client_list(request: Request) -> Reply:
    """The PIDs of a server's clients."""
    server = request.server(0)
    if server is None:
        return not_found(request, 0)
    return Reply("".join(f"{client.pid}\n" for client in clients.clients_of(request.state, server.pid)))


def get_device_client_list(request: Request) -> Reply:
    """Each device of the servers with ``PID.CONTEXT`` of its clients; without a PID, or with 0, of all servers."""
    if request.integer(0) and request.server(0) is None:
        return not_found(request, 0)
    text = ""
    for server in request.daemon.servers:
        if request.integer(0) in {0, server.pid}:
            text += _device_clients(request, server)
    return Reply(text)


def _device_clients(request: Request, server: SimulatedServer) -> str:
    text = ""
    for index, device in enumerate(daemon_devices(request.state, request.daemon)):
        domain, bus, _ = device.gpu.pci_bus_id.split(":")
        text += f"[{index}] {int(domain, 16):02d}:{int(bus, 16):02d}.0, {find_model(device.gpu.model).name}\n"
        for client in clients.clients_of(request.state, server.pid):
            if _on(client, device):
                text += f"{client.pid}.1\n"
    return text


def get_default_active_thread_percentage(request: Request) -> Reply:
    """The default for upcoming servers, with one decimal."""
    return Reply(f"{request.daemon.threads:.1f}\n")


def get_active_thread_percentage(request: Request) -> Reply:
    """The value of a server for upcoming clients."""
    server = request.server(0)
    return Reply(f"{server.threads:.1f}\n") if server else not_found(request, 0)


def get_default_device_pinned_mem_limit(request: Request) -> Reply:
    """The default for upcoming servers: nothing when unset, whole G from 1024M up."""
    return _limit(request, request.daemon.memory, 0)


def get_device_pinned_mem_limit(request: Request) -> Reply:
    """The limit of a server for upcoming clients."""
    server = request.server(0)
    return _limit(request, server.memory, 1) if server else not_found(request, 0)


def _limit(request: Request, limits: dict[str, int], index: int) -> Reply:
    key, _ = mps_limits.read_device(request.words[index:], request.major)
    if key is None:
        return invalid_device(request)
    value = limits.get(key)
    if value is None:
        request.log("No default pinned memory limit set for the device!")
        return Reply()
    return Reply(mps_limits.readback(value) + "\n")


def get_default_client_priority(request: Request) -> Reply:
    """0 normal, 1 below normal."""
    return Reply(f"{request.daemon.priority}\n")


def ps(request: Request) -> Reply:
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


def _row(request: Request, client: SimulatedProcess) -> tuple[str, ...]:
    devices = [device for device in daemon_devices(request.state, request.daemon) if _on(client, device)]
    uuid = devices[0].uuid if devices else client.gpu_uuid
    namespace = _HOST_NAMESPACE if request.state.pid_namespace_is_host else _OTHER_NAMESPACE
    command = client.command_line[0] if client.command_line else client.name
    # The last group of the UUID is cut off.
    return str(client.pid), "1", str(client.mps_server), uuid.rsplit("-", 2)[0], str(namespace), command, ""


def lspart(request: Request) -> Reply:
    """The static SM partitions (595 and newer); this host makes none."""
    if not request.daemon.static:
        return Reply("Static partitioning mode is not enabled\n")
    form = "%-20s %-36s %-8s %-8s %-6s %-6s %-6s\n"
    header = form % ("GPU", "Partition", "free", "used", "free", "used", "clients")
    return Reply(header + form % ("", "", "chunk", "chunk", "SM", "SM", ""))


def device_query(request: Request) -> Reply:
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
