"""What nvidia-cuda-mps-control prints, parsed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gpushare.model import Priority
from gpushare.units import GIB, MIB

_MEMORY: Final = re.compile(r"^(\d+)([MG])$")


@dataclass(frozen=True)
class ClientRow:
    """One row of ``ps``: a client as the daemon knows it, PID in the daemon's PID namespace."""

    pid: int
    server_pid: int | None
    device: str | None
    command: str | None


@dataclass(frozen=True)
class ServerRow:
    """One MPS server: its state, and the limits of the clients that start on it from now on."""

    pid: int
    status: str | None
    threads_percent: float | None
    memory_limit_bytes: int | None


@dataclass(frozen=True)
class Overview:
    """A daemon at one moment: defaults, servers, clients."""

    threads_percent: float | None
    priority: Priority | None
    memory_limit_bytes: int | None
    servers: tuple[ServerRow, ...]
    clients: tuple[ClientRow, ...]


def parse_ps(text: str) -> list[ClientRow]:
    """Return the rows of ``ps``, found by the header's words.

    ``PID ID SERVER DEVICE NAMESPACE COMMAND`` up to driver 580, one more column behind COMMAND from
    595; COMMAND may hold blanks. Text without a header (``Server not found``) has no rows.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.split()[:1] == ["PID"] and "COMMAND" in line), None)
    if start is None:
        return []
    header = lines[start].split()
    command_at = header.index("COMMAND")
    behind = len(header) - command_at - 1
    rows = []
    for line in lines[start + 1 :]:
        words = line.split()
        if len(words) < command_at or not words[0].isdigit():
            continue
        cells = dict(zip(header[:command_at], words, strict=False))
        command = words[command_at : len(words) - behind or None]
        server = cells.get("SERVER", "")
        rows.append(
            ClientRow(
                pid=int(cells["PID"]),
                server_pid=int(server) if server.isdigit() else None,
                device=cells.get("DEVICE"),
                command=" ".join(command) or None,
            )
        )
    return rows


def parse_pids(text: str) -> list[int]:
    """Return the PIDs of ``get_server_list`` or ``get_client_list``, one per line; other lines are no PIDs."""
    return [int(line) for line in map(str.strip, text.splitlines()) if line.isascii() and line.isdigit()]


def parse_memory(text: str) -> int | None:
    """Return a printed memory limit in bytes (``10G``, ``512M``), or None when none is set."""
    match = _MEMORY.match(text.strip())
    return int(match.group(1)) * (GIB if match.group(2) == "G" else MIB) if match else None


def parse_percentage(text: str) -> float | None:
    """Return the last percentage that a reply prints (``25.0``), or None."""
    numbers = [line for line in map(str.strip, text.splitlines()) if re.fullmatch(r"\d+(\.\d+)?", line)]
    return float(numbers[-1]) if numbers else None
