"""The life of simulated MPS servers, and the lines they write. Pure on the state."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping

from gpushare.base.units import MIB
from gpushare.base.values import dataclass
from gpushare.sim.devices import Device, daemon_devices
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, SimulatedProcess, SimulatedServer

CONTROL = "control.log"
SERVER = "server.log"
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"
DEFAULT_DIRECTORY = "/var/log/nvidia-mps"
# Those of the daemons that a unit of gpushare runs.
_OF_UNITS = ("/run/gpushare-mps/", "/var/log/gpushare-mps/")


@dataclass(frozen=True)
class LogLine:
    """One line to append to a log; ``tag`` is Control, Server or Other."""

    directory: str
    file: str
    tag: str
    pid: int
    text: str


def render(line: LogLine, at: float) -> str:
    """Return the line as written to the file: ``[2026-11-21 05:58:23.419 Control   628] ...``, local time."""
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"[{seconds}.{int(at * 1000) % 1000:03d} {line.tag} {line.pid:5d}] {line.text}\n"


def is_of_real_mps(directory: str) -> bool:
    """Return whether the machine's own MPS uses a directory (by default, or by a unit): no simulated file goes there.

    A dead socket in /tmp/nvidia-mps would break every real CUDA program on the machine.
    """
    return directory in {DEFAULT_PIPE_DIRECTORY, DEFAULT_DIRECTORY} or directory.startswith(_OF_UNITS)


def append_to_logs(lines: Iterable[LogLine]) -> None:
    """Append the lines to their files; a log directory that is gone or closed loses them, as with the real daemon."""
    at = time.time()
    texts: dict[str, str] = {}
    for line in lines:
        if not is_of_real_mps(line.directory):
            path = os.path.join(line.directory, line.file)
            texts[path] = texts.get(path, "") + render(line, at)
    for path, text in texts.items():
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(text)


# What is not a number is device 0; only a G right after the number counts, anything else is mebibytes: "1.5G" is 1M.
_MEMORY = re.compile(r"([0-9]{1,18})([gG]?)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DEVICE = re.compile(r"\s*([+-]?[0-9]{1,9})")
# Seen on 535: 31 is the last one, 32 and -1 are "Invalid device ordinal!" in the log.
_MAX_DEVICES = 32
# The branch whose daemon knows a GPU by its UUID; the older ones read "GPU-..." as device 0.
_UUIDS_SINCE = 580


def parse_memory(text: str) -> int | None:
    """Return the mebibytes that the daemon makes of a value; None, also of 0: no limit (seen on 535, 550 and 555)."""
    match = _MEMORY.match(text)
    if match is None or int(match[1]) == 0:
        return None
    return int(match[1]) * (1024 if match[2] else 1)


def parse_threads(text: str | None) -> float | None:
    """Return the percentage that a text begins with, as C's strtod reads it; None when it is out of range."""
    match = _NUMBER.match(text or "")
    return float(match[0]) if match and 0.0 < float(match[0]) <= 100.0 else None


def leading_integer(text: str) -> tuple[int, str]:
    """Return the number at the beginning of a text, as C's strtol reads it (0: none), and the rest of the text."""
    match = _DEVICE.match(text)
    return (0, text) if match is None else (int(match[1]), text[match.end() :])


def read_device(words: list[str], branch: int) -> tuple[str | None, str]:
    """Return the device (None: a number out of range) and the text of the value that the words of a command name.

    The value begins where the number ends: ``1x 7G`` is device 1 and the value ``x``, ``abc 7G`` is device 0 and the
    value ``abc``, which clears the limit.
    """
    word, value, *_ = (*words, "", "")
    if word.startswith(("GPU-", "MIG-")) and branch >= _UUIDS_SINCE:
        return word, value
    number, rest = leading_integer(word)
    return (str(number) if 0 <= number < _MAX_DEVICES else None), rest or value


def limit_of(limits: Mapping[str, int], devices: list[Device], device: Device) -> int | None:
    """Return the limit of a device in MiB: by ordinal or UUID, the entry that was set last wins."""
    limit = None
    for key, mebibytes in limits.items():
        if key == device.uuid or (key.isdigit() and int(key) < len(devices) and devices[int(key)] == device):
            limit = mebibytes
    return limit


def parse_memory_limits(text: str | None) -> dict[str, int]:
    """Return the limits in CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in MiB by device: ``0=1G,GPU-...=512M``."""
    entries = (entry.partition("=")[::2] for entry in (text or "").split(","))
    limits = {key.strip(): parse_memory(value.strip()) for key, value in entries}
    return {key: limit for key, limit in limits.items() if limit is not None}


# "Binary version" of the MPS programs by driver branch: the CUDA version times 1000.
_VERSIONS = (
    (615, 13040),
    (610, 13030),
    (595, 13020),
    (590, 13010),
    (580, 13000),
    (570, 12080),
    (550, 12040),
    (0, 12020),
)


def binary_version(state: SimulatedHostState) -> int:
    """Return the "Binary version" of the MPS programs of the host's driver."""
    return next(version for branch, version in _VERSIONS if state.branch >= branch)


def start_server(state: SimulatedHostState, daemon: SimulatedDaemon, uid: int) -> tuple[SimulatedServer, list[LogLine]]:
    """Start a server for a user with the daemon's defaults of this moment; return it with its log lines."""
    memory = parse_memory_limits(daemon.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"))
    for device, limit in daemon.memory.items():
        set_last_limit(memory, device, limit)
    server = SimulatedServer(
        pid=state.new_pid(), uid=uid, threads=daemon.threads, memory=memory, priority=daemon.priority
    )
    daemon.servers.append(server)
    starting = f"Starting new server {server.pid} for user {uid}"
    return server, [
        LogLine(daemon.log_directory, CONTROL, "Control", server.pid, starting),
        LogLine(daemon.log_directory, SERVER, "Other", server.pid, "Startup"),
        *server_lines(daemon, server, *_startup_texts(state, daemon, server)),
        control_line(daemon, f"NEW SERVER {server.pid}: Ready"),
    ]


def _startup_texts(state: SimulatedHostState, daemon: SimulatedDaemon, server: SimulatedServer) -> list[str]:
    """Return what a new server writes to its log."""
    texts = [
        f"CUDA MPS Server for Linux/Unix. Binary version: {binary_version(state)}",
        f"Active Threads Percentage set to {server.threads:.1f}",
    ]
    devices = daemon_devices(state, daemon)
    for index, device in enumerate(devices):
        limit = limit_of(server.memory, devices, device)
        if limit is not None:
            texts.append(f"Device pinned memory limit for device {index} set to {limit * MIB:#x} bytes")
    return [*texts, "Server has started"]


def set_last_limit(limits: dict[str, int], device: str, limit: int | None) -> None:
    """Set or (None) clear the limit of a device, as the last entry: `limit_of` reads the order of the entries."""
    limits.pop(device, None)
    if limit is not None:
        limits[device] = limit


def disconnected_lines(
    daemon: SimulatedDaemon, server: SimulatedServer, process: SimulatedProcess, others: list[SimulatedProcess]
) -> list[LogLine]:
    """Return what the server writes when a client is gone and the others are left."""
    client = f"{{PID: {process.pid}, Context ID: 1}}"
    failed = f"Server failed to recevie command with status 806, assuming client {client} exit"
    return server_lines(
        daemon, server, failed, f"Client {client} exiting. Number of active client contexts is {len(others)}."
    )


def set_fault(
    daemon: SimulatedDaemon, server: SimulatedServer, process: SimulatedProcess, others: list[SimulatedProcess]
) -> list[LogLine]:
    """Put the server into FAULT: its other clients lose their contexts."""
    server.status = "FAULT"
    for other in others:
        other.broken = True
    return server_lines(
        daemon,
        server,
        f"Client {{PID: {process.pid}, Context ID: 1}} encountered a fatal GPU error.",
        "Server has begun teardown sequence to handle a fatal GPU error.",
        "The following clients have a sticky error set:",
        *(str(other.pid) for other in others),
    )


def control_line(daemon: SimulatedDaemon, text: str) -> LogLine:
    return LogLine(daemon.log_directory, CONTROL, "Control", daemon.pid, text)


def server_lines(daemon: SimulatedDaemon, server: SimulatedServer, *texts: str) -> list[LogLine]:
    return [LogLine(daemon.log_directory, SERVER, "Server", server.pid, text) for text in texts]
