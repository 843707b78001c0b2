"""nvidia-cuda-mps-control of a simulated host: what gpushare asks of the programs of drivers 535 to 615.

Texts: an H200 with driver 580.159.04, and NVIDIA's programs of drivers 535, 550 and 580.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpushare.host.process import ticks_now
from gpushare.host.program import Completed, timed_out_error
from gpushare.sim import clients, mps_servers
from gpushare.sim.current import changing, clock, current
from gpushare.sim.devices import daemon_devices, split_names
from gpushare.sim.mps_servers import (
    CONTROL,
    DEFAULT_DIRECTORY,
    DEFAULT_PIPE_DIRECTORY,
    SERVER,
    LogLine,
    binary_version,
    control_line,
    is_of_real_mps,
    leading_integer,
    parse_threads,
)
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, SimulatedProcess, SimulatedServer, StateFile

_POLL_SECONDS = 0.01
NO_DAEMON = "Cannot find MPS control daemon process\n"
# Of two conversations at once the daemon drops one, with this or in silence (seen on driver 580).
CANNOT_SEND = "Cannot send command to MPS control daemon process\n"
NO_LOGS = "Warning: Failed writing log files to directory [{}]. No logs will be available.\n"
RUNNING = "An instance of this daemon is already running\n"
# What ``-v`` prints (drivers 580 and up).
_VERSION = "CUDA MPS Control for Linux/Unix/QNX. Binary version: {}\nCopyright (C) 2003 - 2025 NVIDIA Corporation.\n\n"
# Inodes of PID namespaces.
_HOST_NAMESPACE, _OTHER_NAMESPACE = 4026531836, 4026532198


def main(
    argv: Sequence[str], stdin: str, env: Mapping[str, str], state_file: StateFile, timeout: float = 10.0
) -> Completed:
    """Run the program: ``argv`` with its name, ``env`` the whole environment, ``timeout`` in seconds."""
    options = list(argv[1:])
    state = current(state_file)
    if options == ["-d"] or (options == ["-d", "-M"] and state.branch >= 580):
        with changing(state_file) as (state, lines):
            exit_code, printed = _start(state, env, lines, multiuser="-M" in options)
        return Completed(tuple(argv), exit_code, printed, "")
    # The older programs take any other argument for the UI, and read commands from stdin alone.
    if options and state.branch >= 580:
        if options == ["-v"]:
            return Completed(tuple(argv), 0, _VERSION.format(state.mps_binary or binary_version(state)), "")
        stdin = " ".join(options)
    return _Session(argv, env, state_file, timeout).run(stdin)


class MpsRequest(NamedTuple):
    """One command to a daemon, which may change the state: it is under the lock."""

    state: SimulatedHostState
    daemon: SimulatedDaemon
    # Those after the command's name.
    words: list[str]
    # Seconds since the daemon read the command.
    elapsed: float
    # The log lines that the command writes.
    lines: list[LogLine]

    @property
    def may_control(self) -> bool:
        """Return whether the user started the daemon, or is root."""
        return self.state.may_touch(self.daemon.uid)

    def word(self, index: int) -> str:
        """Return a word, or an empty text when it is missing."""
        return self.words[index] if index < len(self.words) else ""

    def integer(self, index: int) -> int:
        """Return a word as C's atoi reads it: the leading digits, else 0."""
        return leading_integer(self.word(index))[0]

    def server(self) -> SimulatedServer | None:
        """Return the server whose PID is the first word."""
        return next((server for server in self.daemon.servers if server.pid == self.integer(0)), None)

    def not_found(self) -> str:
        """Return the answer for a server PID that is not there."""
        return f"Server {self.integer(0)} not found\n"

    def log(self, *texts: str) -> None:
        """Write lines to control.log."""
        self.lines.extend(control_line(self.daemon, text) for text in texts)


class _Session:
    """One run of the UI: commands on stdin, one per line, until its end or until the daemon quits."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], state_file: StateFile, timeout: float) -> None:
        self._argv, self._env, self._state_file = tuple(argv), env, state_file
        self._deadline, self._timeout = clock() + timeout, timeout
        # Whether the daemon has accepted the connection.
        self._opened = False

    def run(self, stdin: str) -> Completed:
        """Return what the program prints for this stdin."""
        state = current(self._state_file)
        if clients.daemon_of(state, self._env) is None:
            return Completed(self._argv, 1, "", NO_DAEMON)
        if state.collisions:
            with changing(self._state_file) as (state, _):
                state.collisions -= 1
                silent = state.collisions % 2 == 0
            # The dropped one of two conversations prints nothing, with exit 0, or an error, in turn.
            return Completed(self._argv, int(not silent), "", "" if silent else CANNOT_SEND)
        output = ""
        for command in stdin.removesuffix("\n").split("\n") if stdin else ():
            reply = self._answer(command.strip())
            if reply is None:
                return Completed(self._argv, 1, output, CANNOT_SEND if self._opened else NO_DAEMON)
            output += reply
            if command.split()[:1] == ["quit"] and clients.daemon_of(current(self._state_file), self._env) is None:
                return Completed(self._argv, 0, output, "")
        with changing(self._state_file) as (state, lines):
            daemon = clients.daemon_of(state, self._env)
            if daemon is not None and self._opened:
                lines.append(control_line(daemon, "UI closed"))
        return Completed(self._argv, 0, output, "")

    def _answer(self, command: str) -> str | None:
        """Return the daemon's reply; None: the daemon is gone. Raises TimedOut.

        The command is executed at each poll until it has a reply: some wait for clients to end.
        """
        read_at: float | None = None
        while True:
            with changing(self._state_file) as (state, lines):
                daemon = clients.daemon_of(state, self._env)
                if daemon is None:
                    return None
                if not daemon.stopped:
                    if read_at is None:
                        opening = [] if self._opened else ["Accepting connection...", "NEW UI"]
                        lines += [control_line(daemon, text) for text in (*opening, f"Cmd:{command}")]
                        self._opened, read_at = True, clock()
                    request = MpsRequest(state, daemon, command.split()[1:], clock() - read_at, lines)
                    reply = execute(command, request)
                    if reply is not None:
                        request.log(*reply.splitlines())
                        return reply
            if clock() >= self._deadline:
                raise timed_out_error(self._argv, self._timeout)
            time.sleep(_POLL_SECONDS)


def execute(command: str, request: MpsRequest) -> str | None:
    """Carry one command out and return its reply; None: it waits, and is to be executed again."""
    name = command.split(maxsplit=1)[0] if command else ""
    # Driver 550 brought it.
    is_too_new = name == "get_server_status" and request.state.branch < 550
    if name in _COMMANDS and not is_too_new:
        return _COMMANDS[name](request)
    if name not in _OF_DAEMON | _OF_SERVER:
        return f'Unknown command "{name}"\n'
    # 535 lets any user change the settings.
    if name.startswith("set_") and not request.may_control and request.state.branch >= 550:
        return (
            f"Insufficient privileges for UID {request.state.uid}. Control deamon settings can only be modified "
            "by the user started it or by the root user.\n"
        )
    if name in _OF_DAEMON:
        return _OF_DAEMON[name](request, request.daemon)
    server = request.server()
    if server is None:
        return request.not_found()
    return _OF_SERVER[name](request._replace(words=request.words[1:]), server)


# Whose setting it is: a server's, or the daemon's, which upcoming servers begin with.
_Owner = SimulatedDaemon | SimulatedServer


def _set_threads(request: MpsRequest, owner: _Owner) -> str:
    """Change the thread percentage, and print the one in force: still the old one if the new one is refused."""
    threads = mps_servers.parse_threads(request.word(0))
    if threads is None:
        request.log("Invalid percentage, expected between (0.0, 100.0]")
    else:
        owner.threads = threads
    return _get_threads(request, owner)


def _get_threads(_request: MpsRequest, owner: _Owner) -> str:
    return f"{owner.threads:.1f}\n"


def _read_device(request: MpsRequest) -> tuple[str | None, str]:
    """Return the device and the value in the words; before driver 580 a device out of range is logged."""
    device, value = mps_servers.read_device(request.words, request.state.branch)
    if device is None and request.state.branch < 580:
        request.log("Invalid device ordinal!")
    return device, value


def _set_memory_limit(request: MpsRequest, owner: _Owner) -> str:
    """Set the memory limit of a device, or clear it: by a value that is no size, or for an unknown UUID. Print nothing."""
    device, value = _read_device(request)
    if device is not None:
        uuids = {each.uuid for each in daemon_devices(request.state, request.daemon)}
        is_known = device.isdigit() or device in uuids
        mps_servers.set_last_limit(owner.memory, device, mps_servers.parse_memory(value) if is_known else None)
    return ""


def _get_memory_limit(request: MpsRequest, owner: _Owner) -> str:
    """Print the memory limit of a device: nothing if unset, and from 1024M up whole G, rounded down, as the daemon does."""
    device, _ = _read_device(request)
    if device not in owner.memory:
        return ""
    mebibytes = owner.memory[device]
    return f"{mebibytes // 1024}G\n" if mebibytes >= 1024 else f"{mebibytes}M\n"


def _set_priority(request: MpsRequest, owner: _Owner) -> str:
    priority = request.integer(0)
    if priority not in {0, 1}:
        return "Invalid priority value - must be 0 or 1!\n"
    owner.priority = priority
    return ""


def _server_status(request: MpsRequest) -> str:
    if not re.match("[+-]?[0-9]", request.word(0)):
        return "A server PID is required\n"
    server = request.server()
    return f"{server.status}\n" if server else request.not_found()


def _quit(request: MpsRequest) -> str | None:
    """End the daemon, once every client is gone or the seconds of ``-t SECONDS`` have passed; until then return None."""
    if not request.may_control:
        return "Not enough privilege to execute quit command\n"
    has_clients = any(clients.clients_of(request.state, server.pid) for server in request.daemon.servers)
    is_forced = request.word(0) == "-t" and request.elapsed >= max(request.integer(1), 0)
    if has_clients and not is_forced:
        return None
    request.log(*(f"Server {server.pid} exited with status 0" for server in request.daemon.servers))
    remove_ended(request.state, request.daemon, cleanly=True)
    request.log("Exit with status 0" if request.state.driver_loaded else "Exit with status 1")
    return ""


# Title and width.
_PS_COLUMNS = (
    *(("PID", 10), ("ID", 10), ("SERVER", 15), ("DEVICE", 26), ("NAMESPACE", 15), ("COMMAND", 15)),
    ("ATTRIBUTES", 15),
)


def _ps(request: MpsRequest) -> str:
    """Print the table of clients; the last column came with driver 595."""
    if not request.daemon.servers:
        return "Server not found\n"
    columns = _PS_COLUMNS if request.state.branch >= 595 else _PS_COLUMNS[:-1]
    rows: list[Sequence[str]] = [[title for title, _ in _PS_COLUMNS]]
    for server in request.daemon.servers:
        rows += [_client_cells(request, client) for client in clients.clients_of(request.state, server.pid)]
    lines = ("".join(cell.ljust(width) for cell, (_, width) in zip(row, columns, strict=False)) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _client_cells(request: MpsRequest, client: SimulatedProcess) -> Sequence[str]:
    """Return the cells of a client in the table of ``ps``."""
    ids = (client.gpu_uuid, client.gpu_instance_id)
    devices = daemon_devices(request.state, request.daemon)
    uuids = [each.uuid for each in devices if each.mig and (each.gpu.uuid, each.mig.gpu_instance_id) == ids]
    # The last two groups of the UUID are cut off.
    shown_uuid = (uuids or [client.gpu_uuid])[0].rsplit("-", 2)[0]
    namespace = _HOST_NAMESPACE if request.state.pid_namespace_is_host else _OTHER_NAMESPACE
    command = client.command_line[0] if client.command_line else client.name
    return str(client.pid), "1", str(client.mps_server), shown_uuid, str(namespace), command, ""


# The settings that upcoming servers begin with.
_OF_DAEMON: dict[str, Callable[[MpsRequest, _Owner], str]] = {
    "get_default_active_thread_percentage": _get_threads,
    "set_default_active_thread_percentage": _set_threads,
    "get_default_device_pinned_mem_limit": _get_memory_limit,
    "set_default_device_pinned_mem_limit": _set_memory_limit,
    # 0 is normal, 1 below normal.
    "get_default_client_priority": lambda _, owner: f"{owner.priority}\n",
    "set_default_client_priority": _set_priority,
}
# The settings of the server whose PID is the first word.
_OF_SERVER: dict[str, Callable[[MpsRequest, _Owner], str]] = {
    "get_active_thread_percentage": _get_threads,
    "set_active_thread_percentage": _set_threads,
    "get_device_pinned_mem_limit": _get_memory_limit,
    "set_device_pinned_mem_limit": _set_memory_limit,
}
_COMMANDS: dict[str, Callable[[MpsRequest], str | None]] = {
    "get_server_list": lambda request: "".join(f"{server.pid}\n" for server in request.daemon.servers),
    "get_server_status": _server_status,
    "ps": _ps,
    "quit": _quit,
}


PID_FILE = "nvidia-cuda-mps-control.pid"
# <dir>/control_privileged and its NUL must fit the 108 bytes of sun_path.
MAX_PIPE_DIRECTORY = 87
_CUDA_ERROR_NO_DEVICE = 100
_NO_LIBCUDA = 244


def _start(
    state: SimulatedHostState, env: Mapping[str, str], lines: list[LogLine], *, multiuser: bool
) -> tuple[int, str]:
    """Start a daemon as ``nvidia-cuda-mps-control -d`` does: return its exit code and stdout, and add its log lines."""
    if state.branch >= 580 and not state.nvml_installed:
        return _NO_LIBCUDA, ""
    if state.branch >= 580 and not state.driver_loaded:
        return _CUDA_ERROR_NO_DEVICE, ""
    if multiuser and not state.root:
        return 1, "Only root user may enable -multiuser-server!\n"
    daemon = _new_daemon(state, env, multiuser=multiuser)
    warning = "" if _open_logs(daemon.log_directory) else NO_LOGS.format(daemon.log_directory)
    error = _open_pipe(state, daemon.pipe_directory)
    if error is not None:
        # An error goes to the logs too; missing logs are reported again.
        return 1, warning + error + (warning if error else "")
    if state.branch >= 580 and not daemon_devices(state, daemon):
        return _CUDA_ERROR_NO_DEVICE, ""
    state.daemons.append(daemon)
    if state.branch >= 550 and not is_of_real_mps(daemon.pipe_directory):
        _write_file(os.path.join(daemon.pipe_directory, PID_FILE), str(daemon.pid), 0o666)
    lines += [] if warning else _first_log_lines(state, daemon)
    return 0, warning


def remove_ended(state: SimulatedHostState, daemon: SimulatedDaemon, *, cleanly: bool) -> None:
    """Remove a daemon that has ended from the state of the host.

    If it quit (``cleanly``), its log fifo and PID file go too; a killed one leaves every file.
    """
    clients.drop_daemon(state, daemon)
    # A directory of the machine's own MPS contains no simulated file.
    if not cleanly or is_of_real_mps(daemon.pipe_directory):
        return
    for name in ("log", PID_FILE):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(daemon.pipe_directory, name))


def _new_daemon(state: SimulatedHostState, env: Mapping[str, str], *, multiuser: bool) -> SimulatedDaemon:
    """Return a daemon with the settings that it takes from its environment."""
    daemon = SimulatedDaemon(
        pid=state.new_pid(),
        uid=state.uid,
        pipe_directory=env.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY,
        log_directory=env.get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_DIRECTORY,
        visible=split_names(env.get("CUDA_VISIBLE_DEVICES")),
        started=ticks_now(),
        environment={key: value for key, value in env.items() if key.startswith(("CUDA_", "GPUSHARE_"))},
        multiuser=multiuser,
    )
    # One out of range is accepted: the default stays 100, with a line in control.log only.
    daemon.threads = parse_threads(env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")) or 100.0
    if env.get("CUDA_MPS_CLIENT_PRIORITY") in {"0", "1"}:
        daemon.priority = int(env["CUDA_MPS_CLIENT_PRIORITY"])
    return daemon


def _open_pipe(state: SimulatedHostState, pipe: str) -> str | None:
    """Make the files of a pipe directory; return the daemon's error: empty if the path is too long, None if there is none."""
    if clients.daemon_of(state, {"CUDA_MPS_PIPE_DIRECTORY": pipe}) is not None:
        return RUNNING
    if is_of_real_mps(pipe):
        return None
    is_too_long = len(os.fsencode(pipe)) > MAX_PIPE_DIRECTORY
    try:
        _make_files(pipe, sockets=not is_too_long)
    except OSError:
        return f"Cannot access CUDA_MPS_PIPE_DIRECTORY={pipe}\n"
    return "" if is_too_long else None


def _open_logs(directory: str) -> bool:
    """Make the log files, but none in the directory of the machine's own MPS; return whether they can be written."""
    if is_of_real_mps(directory):
        return True
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        for name in (CONTROL, SERVER):
            with open(os.path.join(directory, name), "a", encoding="utf-8"):
                pass
    except OSError:
        return False
    return True


def _first_log_lines(state: SimulatedHostState, daemon: SimulatedDaemon) -> list[LogLine]:
    """Return what a daemon writes into its log when it starts."""
    pipe = daemon.pipe_directory
    texts = [
        f"Starting control daemon using socket {pipe}/control",
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}",
    ]
    if state.branch >= 580:
        texts.append(f"CUDA MPS Control binary version: {binary_version(state)}")
    given = daemon.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if given and parse_threads(given) is None:
        texts.append("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE should be between (0.0, 100.0]")
    return [control_line(daemon, text) for text in texts]


def _make_files(pipe: str, *, sockets: bool) -> None:
    """Make a pipe directory, but not its parents, with its lock, its fifo and perhaps its sockets."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(pipe)
        # Without a sticky bit, as the daemon does.
        os.chmod(pipe, 0o777)  # noqa: S103
    _write_file(os.path.join(pipe, "control_lock"), "", 0o666)
    files = [("log", os.mkfifo, 0o777), ("control", _bind, 0o666), ("control_privileged", _bind, 0o755)]
    for name, make, mode in files if sockets else files[:1]:
        path = os.path.join(pipe, name)
        # An earlier daemon may have left it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        make(path)
        os.chmod(path, mode)


def _bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


def _write_file(path: str, text: str, mode: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
