"""What nvidia-cuda-mps-control prints, parsed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpushare.errors import OperationFailed
from gpushare.model import Priority
from gpushare.units import GIB, MIB

# Bounded: int() refuses numbers of thousands of digits, and a log line may hold anything.
_MEMORY: Final = re.compile(r"^(\d{1,12})([MG])$", re.ASCII)
_PID: Final = re.compile(r"^[1-9]\d{0,9}$", re.ASCII)
# pid_t; Linux itself ends at 2^22.
_LAST_PID: Final = 2**31 - 1
# A server takes 60 clients, a host runs a handful of servers.
_MOST_ROWS: Final = 4096
_PERCENTAGE: Final = re.compile(r"^\d{1,12}(\.\d+)?$", re.ASCII)


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
    595, often blank; COMMAND may hold blanks. Text without a header (``Server not found``) has no rows.
    """
    lines = text.splitlines()
    titles = [line.split() for line in lines]
    start = next((i for i, words in enumerate(titles) if words[:1] == ["PID"] and "COMMAND" in words), None)
    if start is None:
        return []
    columns = {match.group(): match.start() for match in re.finditer(r"\S+", lines[start])}
    names = titles[start][: titles[start].index("COMMAND")]
    rows: list[ClientRow] = []
    for line in lines[start + 1 :]:
        words = line.split(maxsplit=len(names))
        pid = _pid(words[0]) if len(words) >= len(names) else None
        if pid is None:
            continue
        if len(rows) == _MOST_ROWS:
            raise strange_reply(f"more than {_MOST_ROWS} clients")
        cells = dict(zip(names, words, strict=False))
        rows.append(
            ClientRow(
                pid=pid,
                server_pid=_pid(cells.get("SERVER", "")),
                device=cells.get("DEVICE"),
                command=_command(line, columns),
            )
        )
    return rows


def _command(line: str, columns: Mapping[str, int]) -> str | None:
    """Return the COMMAND of a row, with the columns of the header by name.

    One that fills its column touches the next, which then cannot be told from it.
    """
    names = sorted(columns, key=lambda name: columns[name])
    at = names.index("COMMAND")
    last = list(re.finditer(r"\S+", line))[at - 1]
    begin = last.start() + columns["COMMAND"] - columns[names[at - 1]]
    # A cell that is wider than its column pushes the others to the right.
    rest = line[begin:] if not line[last.end() : begin].strip() and begin > last.end() else line[last.end() :].lstrip()
    if at + 1 < len(names):
        width = columns[names[at + 1]] - columns["COMMAND"]
        rest = rest[:width] if rest[width - 1 : width] == " " else rest
    return " ".join(rest[:256].split()) or None


def parse_pids(text: str) -> list[int]:
    """Return the PIDs of ``get_server_list`` or ``get_client_list``, one per line; other lines are no PIDs."""
    pids = [pid for pid in (_pid(line.strip()) for line in text.splitlines()) if pid is not None]
    if len(pids) > _MOST_ROWS:
        raise strange_reply(f"{len(pids)} processes")
    return pids


def _pid(text: str) -> int | None:
    """Return a PID that kill(2) takes as one process, or None."""
    return int(text) if _PID.match(text) and int(text) <= _LAST_PID else None


def strange_reply(what: str) -> OperationFailed:
    """Return the error for a reply that no MPS daemon gives."""
    return OperationFailed(
        f"the MPS daemon reports {what}: it is not believed",
        "see whose it is: gpushare mps status",
        code="strange_reply",
    )


def parse_memory(text: str) -> int | None:
    """Return a printed memory limit in bytes (``10G``, ``512M``), or None when none is set."""
    match = _MEMORY.match(text.strip())
    return int(match.group(1)) * (GIB if match.group(2) == "G" else MIB) if match else None


def parse_percentage(text: str) -> float | None:
    """Return the last percentage that a reply prints (``25.0``), or None."""
    numbers = [float(line) for line in map(str.strip, text.splitlines()) if _PERCENTAGE.match(line)]
    return numbers[-1] if numbers and numbers[-1] <= 100.0 else None
