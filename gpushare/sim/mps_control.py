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
from gpushare.sim.devices import daemon_devices, split
from gpushare.sim.mps_servers import (
    CONTROL,
    DEFAULT_DIRECTORY,
    SERVER,
    LogLine,
    binary_version,
    control_line,
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
_HOST_NAMESPACE, _OTHER_NAMESPACE = 4026531836, 4026532198


def main(
    argv: Sequence[str], stdin: str, env: Mapping[str, str], state_file: StateFile, timeout: float = 10.0
) -> Completed:
    """Run the program: ``argv`` with its name, ``env`` the whole environment, ``timeout`` in seconds."""
    deadline, words = clock() + timeout, list(argv[1:])
    state = current(state_file)
    multiuser = words == ["-d", "-M"] and state.branch >= 580
    if words == ["-d"] or multiuser:
        with changing(state_file) as (state, lines):
            code, printed, started = _start(state, env, multiuser=multiuser)
            lines += started
        return Completed(tuple(argv), code, printed, "")
    # The older programs take any other argument for the UI, and read commands from stdin alone.
    if words and state.branch >= 580:
        if words == ["-v"]:
            return Completed(tuple(argv), 0, _version(state.mps_binary or binary_version(state)), "")
        if any(word.startswith("-") for word in words):
            return Completed(tuple(argv), 0, "Unrecognized option \0\n", "")
        stdin = " ".join(words)
    return _Session(tuple(argv), env, state_file, deadline, timeout).run(stdin)


class MpsRequest(NamedTuple):
    """One command: the settled state under the lock, the daemon, and the words after the command's name.

    ``elapsed`` counts seconds since the command came: one that blocks answers None and is asked again.
    """

    state: SimulatedHostState
    daemon: SimulatedDaemon
    words: list[str]
    elapsed: float
    lines: list[LogLine]

    @property
    def major(self) -> int:
        """Return the driver branch: commands and texts differ by it."""
        return self.state.branch

    @property
    def owner(self) -> bool:
        """Return whether the user started the daemon, or is root."""
        return self.state.may(self.daemon.uid)

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

    def __init__(
        self, argv: tuple[str, ...], env: Mapping[str, str], state_file: StateFile, deadline: float, timeout: float
    ) -> None:
        self._argv, self._env, self._state_file = argv, env, state_file
        self._deadline, self._timeout = deadline, timeout
        self._opened = False

    def run(self, stdin: str) -> Completed:
        """Return what the program prints for this stdin."""
        state = current(self._state_file)
        if clients.daemon_of(state, self._env) is None:
            return Completed(self._argv, 1, "", NO_DAEMON)
        if state.collisions:
            # Of two conversations at once one is dropped: in silence with exit 0, or with an error, in turn.
            with changing(self._state_file) as (state, _):
                state.collisions -= 1
                silent = state.collisions % 2 == 0
            return Completed(self._argv, 0, "", "") if silent else Completed(self._argv, 1, "", CANNOT_SEND)
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
        asked_at: float | None = None
        while True:
            with changing(self._state_file) as (state, lines):
                daemon = clients.daemon_of(state, self._env)
                if daemon is None:
                    return None
                if not daemon.stopped:
                    request = MpsRequest(state, daemon, command.split()[1:], clock() - (asked_at or clock()), lines)
                    if not self._opened:
                        request.log("Accepting connection...", "NEW UI")
                        self._opened = True
                    if asked_at is None:
                        request.log(f"Cmd:{command}")
                        asked_at = clock()
                    reply = execute(command, request)
                    if reply is not None:
                        request.log(*reply.splitlines())
                        return reply
            if clock() >= self._deadline:
                raise timed_out_error(self._argv, self._timeout)
            time.sleep(_POLL_SECONDS)


def execute(command: str, request: MpsRequest) -> str | None:
    """Carry one command out; None when it blocks and must be asked again."""
    name = command.split(maxsplit=1)[0] if command else ""
    since, function = _COMMANDS.get(name, (0, None))
    if function is None or request.major < since:
        return f'Unknown command "{name}"\n'
    # 535 lets any user change the settings.
    if name.startswith("set_") and not request.owner and request.major >= 550:
        return (
            f"Insufficient privileges for UID {request.state.uid}. Control deamon settings can only be modified "
            "by the user started it or by the root user.\n"
        )
    if "default" in name:
        return function(request, request.daemon)
    server = request.server()
    if not name.endswith(("percentage", "limit")):
        return function(request, server)
    if server is None:
        return request.not_found()
    return function(request._replace(words=request.words[1:]), server)


# Whose setting it is: a server's, or the daemon's default for upcoming servers.
_Owner = SimulatedDaemon | SimulatedServer


def _set_threads(request: MpsRequest, owner: _Owner) -> str:
    """Change the share for upcoming servers or clients, and print what is in force: the old value when refused."""
    threads = mps_servers.parse_threads(request.word(0))
    if threads is None:
        request.log("Invalid percentage, expected between (0.0, 100.0]")
    else:
        owner.threads = threads
    return _get_threads(request, owner)


def _get_threads(_request: MpsRequest, owner: _Owner) -> str:
    return f"{owner.threads:.1f}\n"


def _read_device(request: MpsRequest) -> tuple[str | None, str]:
    """Return the device that the words name and the text of the value, as `mps_servers.read_device`."""
    key, text = mps_servers.read_device(request.words, request.major)
    if key is None and request.major < 580:
        request.log("Invalid device ordinal!")
    return key, text


def _set_limit(request: MpsRequest, owner: _Owner) -> str:
    """Change the memory limit; prints nothing, whatever it made of the value."""
    key, text = _read_device(request)
    if key is not None:
        # Taken out first: the order of the entries says which was set last.
        owner.memory.pop(key, None)
        value = mps_servers.parse_memory(text)
        uuids = {device.uuid for device in daemon_devices(request.state, request.daemon)}
        if value is not None and (key.isdigit() or key in uuids):
            owner.memory[key] = value
    return ""


def _get_memory_limit(request: MpsRequest, owner: _Owner) -> str:
    """Print the memory limit of a device: nothing if unset, and from 1024M up whole G, rounded down, as the daemon does."""
    value = owner.memory.get(_read_device(request)[0] or "")
    if value is None:
        return ""
    return f"{value // 1024}G\n" if value >= 1024 else f"{value}M\n"


def _set_priority(request: MpsRequest, owner: _Owner) -> str:
    priority = request.integer(0)
    if priority not in {0, 1}:
        return "Invalid priority value - must be 0 or 1!\n"
    owner.priority = priority
    return ""


def _get_priority(_request: MpsRequest, owner: _Owner) -> str:
    """Print 0 for normal, 1 for below normal."""
    return f"{owner.priority}\n"


def _server_list(request: MpsRequest, _server: SimulatedServer | None) -> str:
    return "".join(f"{server.pid}\n" for server in request.daemon.servers)


def _server_status(request: MpsRequest, server: SimulatedServer | None) -> str:
    if not re.match("[+-]?[0-9]", request.word(0)):
        return "A server PID is required\n"
    return f"{server.status}\n" if server else request.not_found()


def _quit(request: MpsRequest, _server: SimulatedServer | None) -> str | None:
    """End the daemon when every client is gone; ``-t SECONDS`` bounds the wait, then forces."""
    if not request.owner:
        return "Not enough privilege to execute quit command\n"
    connected = [
        client for server in request.daemon.servers for client in clients.clients_of(request.state, server.pid)
    ]
    forced = request.word(0) == "-t" and request.elapsed >= max(request.integer(1), 0)
    if connected and not forced:
        return None
    request.log(*(f"Server {server.pid} exited with status 0" for server in request.daemon.servers))
    remove_ended(request.state, request.daemon, cleanly=True)
    request.log("Exit with status 0" if request.state.driver_loaded else "Exit with status 1")
    return ""


def _ps(request: MpsRequest, _server: SimulatedServer | None) -> str:
    """Print the table of clients."""
    if not request.daemon.servers:
        return "Server not found\n"
    rows: list[tuple[str, ...]] = [("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND", "ATTRIBUTES")]
    for server in request.daemon.servers:
        rows += [_client_row(request, client) for client in clients.clients_of(request.state, server.pid)]
    last = "%-15s%-15s" if request.major >= 595 else "%-15s"
    shown = 7 if request.major >= 595 else 6
    return "".join(("%-10s%-10s%-15s%-26s%-15s" + last + "\n") % row[:shown] for row in rows)


def _client_row(request: MpsRequest, client: SimulatedProcess) -> tuple[str, ...]:
    """Return the cells of a client in the table of ``ps``."""
    place = (client.gpu_uuid, client.gpu_instance_id)
    devices = daemon_devices(request.state, request.daemon)
    here = (device.uuid for device in devices if (device.gpu.uuid, device.mig and device.mig.gpu_instance_id) == place)
    namespace = _HOST_NAMESPACE if request.state.pid_namespace_is_host else _OTHER_NAMESPACE
    command = client.command_line[0] if client.command_line else client.name
    # The last group of the UUID is cut off.
    uuid = next(here, client.gpu_uuid).rsplit("-", 2)[0]
    return str(client.pid), "1", str(client.mps_server), uuid, str(namespace), command, ""


# The driver branch that brought a command, and what it does.
_COMMANDS: dict[str, tuple[int, Callable[..., str | None]]] = {
    "get_server_list": (0, _server_list),
    "get_server_status": (550, _server_status),
    "get_default_active_thread_percentage": (0, _get_threads),
    "set_default_active_thread_percentage": (0, _set_threads),
    "get_active_thread_percentage": (0, _get_threads),
    "set_active_thread_percentage": (0, _set_threads),
    "get_default_device_pinned_mem_limit": (0, _get_memory_limit),
    "set_default_device_pinned_mem_limit": (0, _set_limit),
    "get_device_pinned_mem_limit": (0, _get_memory_limit),
    "set_device_pinned_mem_limit": (0, _set_limit),
    "get_default_client_priority": (0, _get_priority),
    "set_default_client_priority": (0, _set_priority),
    "ps": (0, _ps),
    "quit": (0, _quit),
}


# -- the daemon ----------------------------------------------------------------------------------------------------------


def _version(binary: int) -> str:
    """Return what ``-v`` prints (drivers 580 and up)."""
    return (
        f"CUDA MPS Control for Linux/Unix/QNX. Binary version: {binary}\n"
        "Copyright (C) 2003 - 2025 NVIDIA Corporation.\n\n"
    )


PID_FILE = "nvidia-cuda-mps-control.pid"
# <dir>/control_privileged and its NUL must fit the 108 bytes of sun_path.
MAX_PIPE_DIRECTORY = 87
_CUDA_ERROR_NO_DEVICE = 100
_NO_LIBCUDA = 244


def _start(
    state: SimulatedHostState, env: Mapping[str, str], *, multiuser: bool = False
) -> tuple[int, str, list[LogLine]]:
    """Start a daemon as ``nvidia-cuda-mps-control -d`` does; return the exit code, what goes to stdout, and the log lines."""
    if state.branch >= 580:
        if not state.nvml_installed:
            return _NO_LIBCUDA, "", []
        if not state.driver_loaded:
            return _CUDA_ERROR_NO_DEVICE, "", []
    pipe = env.get("CUDA_MPS_PIPE_DIRECTORY") or clients.DEFAULT_PIPE_DIRECTORY
    if multiuser and not state.root:
        return 1, "Only root user may enable -multiuser-server!\n", []
    daemon = _new_daemon(state, env, pipe)
    daemon.multiuser = multiuser
    warning = "" if _open_logs(daemon.log_directory) else NO_LOGS.format(daemon.log_directory)
    error = _open_pipe(state, pipe)
    if error is not None:
        # An error goes to the logs too; missing logs are reported again.
        return 1, warning + error + (warning if error else ""), []
    if state.branch >= 580 and not daemon_devices(state, daemon):
        return _CUDA_ERROR_NO_DEVICE, "", []
    state.daemons.append(daemon)
    if state.branch >= 550 and not _of_real_mps(pipe):
        _write_file(os.path.join(pipe, PID_FILE), str(daemon.pid), 0o666)
    return 0, warning, [] if warning else _first_log_lines(state, daemon)


def remove_ended(state: SimulatedHostState, daemon: SimulatedDaemon, *, cleanly: bool) -> None:
    """Remove a daemon that has ended from the state of the host.

    If it quit (``cleanly``), its log fifo and PID file go too; a killed one leaves every file.
    """
    clients.drop_daemon(state, daemon)
    # A directory of the machine's own MPS contains no simulated file.
    if not cleanly or _of_real_mps(daemon.pipe_directory):
        return
    for name in ("log", PID_FILE):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(daemon.pipe_directory, name))


def _new_daemon(state: SimulatedHostState, env: Mapping[str, str], pipe: str) -> SimulatedDaemon:
    """Return a daemon with the settings that it takes from its environment."""
    daemon = SimulatedDaemon(
        pid=state.new_pid(),
        uid=state.uid,
        pipe_directory=pipe,
        log_directory=env.get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_DIRECTORY,
        visible=split(env.get("CUDA_VISIBLE_DEVICES")),
        started=ticks_now(),
        environment={key: value for key, value in env.items() if key.startswith(("CUDA_", "GPUSHARE_"))},
    )
    # One out of range is accepted: the default stays 100, with a line in control.log only.
    daemon.threads = parse_threads(env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")) or 100.0
    if env.get("CUDA_MPS_CLIENT_PRIORITY") in {"0", "1"}:
        daemon.priority = int(env["CUDA_MPS_CLIENT_PRIORITY"])
    return daemon


def _open_pipe(state: SimulatedHostState, pipe: str) -> str | None:
    """Make the files of a pipe directory; return what the daemon says when it cannot, or None."""
    if clients.daemon_of(state, {"CUDA_MPS_PIPE_DIRECTORY": pipe}) is not None:
        return RUNNING
    try:
        return None if _of_real_mps(pipe) or _make_files(pipe) else ""
    except OSError:
        return f"Cannot access CUDA_MPS_PIPE_DIRECTORY={pipe}\n"


def _open_logs(directory: str) -> bool:
    """Make the log files; return whether they can be written. In a real daemon's directory nothing is made or written."""
    if _of_real_mps(directory):
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
    if _of_real_mps(daemon.log_directory):
        return []
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


def _of_real_mps(directory: str) -> bool:
    """Return whether the machine's own MPS uses a directory (by default, or by a unit): no simulated file goes there.

    A dead socket in /tmp/nvidia-mps would break every real CUDA program on the machine.
    """
    ours = ("/run/gpushare-mps/", "/var/log/gpushare-mps/")
    return directory in {clients.DEFAULT_PIPE_DIRECTORY, DEFAULT_DIRECTORY} or directory.startswith(ours)


def _make_files(pipe: str) -> bool:
    """Make the directory, not its parents, the lock, the fifo and the sockets; False: the path is too long for these."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(pipe)
        # Without a sticky bit, as the daemon does.
        os.chmod(pipe, 0o777)  # noqa: S103
    _write_file(os.path.join(pipe, "control_lock"), "", 0o666)
    for name in ("log", "control", "control_privileged")[: 3 if len(os.fsencode(pipe)) <= MAX_PIPE_DIRECTORY else 1]:
        path = os.path.join(pipe, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if name == "log":
            os.mkfifo(path)
        else:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
        os.chmod(path, {"log": 0o777, "control": 0o666, "control_privileged": 0o755}[name])
    return len(os.fsencode(pipe)) <= MAX_PIPE_DIRECTORY


def _write_file(path: str, text: str, mode: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
