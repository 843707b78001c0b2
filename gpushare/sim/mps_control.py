"""nvidia-cuda-mps-control of a simulated host: what gpushare asks of the programs of drivers 535 to 615.

Texts: an H200 with driver 580.159.04, and NVIDIA's programs of drivers 535, 550 and 580.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpushare.host.program import Completed, timed_out_error
from gpushare.sim import clients, mps_daemon, mps_servers
from gpushare.sim.current import changing, clock, current
from gpushare.sim.devices import daemon_devices
from gpushare.sim.mps_servers import LogLine, binary_version, control_line, leading_integer
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, SimulatedProcess, SimulatedServer, StateFile

_POLL_SECONDS = 0.01
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
            code, printed, started = mps_daemon.start(state, env, multiuser=multiuser)
            lines += started
        return Completed(tuple(argv), code, printed, "")
    # The older programs take any other argument for the UI, and read commands from stdin alone.
    if words and state.branch >= 580:
        if words == ["-v"]:
            return Completed(tuple(argv), 0, mps_daemon.version(state.mps_binary or binary_version(state)), "")
        if any(word.startswith("-") for word in words):
            return Completed(tuple(argv), 0, "Unrecognized option \0\n", "")
        stdin = " ".join(words)
    return _Session(tuple(argv), env, state_file, deadline, timeout).run(stdin)


class Reply(NamedTuple):
    """What a command prints, and whether the daemon ended with it."""

    text: str = ""
    ended: bool = False


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

    def not_found(self) -> Reply:
        """Return the answer for a server PID that is not there."""
        return Reply(f"Server {self.integer(0)} not found\n")

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
            return Completed(self._argv, 1, "", mps_daemon.NO_DAEMON)
        if state.collisions:
            return self._drop_conversation()
        output = ""
        for command in stdin.removesuffix("\n").split("\n") if stdin else ():
            reply = self._answer(command.strip())
            if reply is None:
                return Completed(
                    self._argv, 1, output, mps_daemon.CANNOT_SEND if self._opened else mps_daemon.NO_DAEMON
                )
            output += reply.text
            if reply.ended:
                return Completed(self._argv, 0, output, "")
        with changing(self._state_file) as (state, lines):
            daemon = clients.daemon_of(state, self._env)
            if daemon is not None and self._opened:
                lines.append(control_line(daemon, "UI closed"))
        return Completed(self._argv, 0, output, "")

    def _drop_conversation(self) -> Completed:
        """Return what two conversations at once do to one of them: silence with exit 0, or an error, in turn."""
        with changing(self._state_file) as (state, _):
            state.collisions -= 1
            silent = state.collisions % 2 == 0
        return Completed(self._argv, 0, "", "") if silent else Completed(self._argv, 1, "", mps_daemon.CANNOT_SEND)

    def _answer(self, command: str) -> Reply | None:
        """Return the daemon's reply; None: the daemon is gone. Raises TimedOut.

        The command is executed at each poll until it has a reply: some wait for clients to end.
        """
        asked_at: float | None = None
        while True:
            with changing(self._state_file) as (state, lines):
                daemon = clients.daemon_of(state, self._env)
                if daemon is None:
                    return None
                if daemon.answers:
                    request = MpsRequest(state, daemon, command.split()[1:], clock() - (asked_at or clock()), lines)
                    if not self._opened:
                        request.log("Accepting connection...", "NEW UI")
                        self._opened = True
                    if asked_at is None:
                        request.log(f"Cmd:{command}")
                        asked_at = clock()
                    reply = execute(command, request)
                    if reply is not None:
                        request.log(*reply.text.splitlines())
                        return reply
            if clock() >= self._deadline:
                raise timed_out_error(self._argv, self._timeout)
            time.sleep(_POLL_SECONDS)


def execute(command: str, request: MpsRequest) -> Reply | None:
    """Carry one command out; None when it blocks and must be asked again."""
    name = command.split(maxsplit=1)[0] if command else ""
    since, function = _COMMANDS.get(name, (0, None))
    if function is None or request.major < since:
        return Reply(f'Unknown command "{name}"\n')
    # 535 lets any user change the settings.
    if name.startswith("set_") and not request.owner and request.major >= 550:
        return Reply(
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


def _set_threads(request: MpsRequest, owner: _Owner) -> Reply:
    """Change the share for upcoming servers or clients, and print what is in force: the old value when refused."""
    threads = mps_servers.parse_threads(request.word(0))
    if threads is None:
        request.log("Invalid percentage, expected between (0.0, 100.0]")
    else:
        owner.threads = threads
    return _get_threads(request, owner)


def _get_threads(_request: MpsRequest, owner: _Owner) -> Reply:
    return Reply(f"{owner.threads:.1f}\n")


def _read_device(request: MpsRequest) -> tuple[str | None, str]:
    """Return the device that the words name and the text of the value, as `mps_servers.read_device`."""
    key, text = mps_servers.read_device(request.words, request.major)
    if key is None and request.major < 580:
        request.log("Invalid device ordinal!")
    return key, text


def _set_limit(request: MpsRequest, owner: _Owner) -> Reply:
    """Change the memory limit; prints nothing, whatever it made of the value."""
    key, text = _read_device(request)
    if key is not None:
        # Taken out first: the order of the entries says which was set last.
        owner.memory.pop(key, None)
        value = mps_servers.parse_memory(text)
        uuids = {device.uuid for device in daemon_devices(request.state, request.daemon)}
        if value is not None and (key.isdigit() or key in uuids):
            owner.memory[key] = value
    return Reply()


def _get_memory_limit(request: MpsRequest, owner: _Owner) -> Reply:
    """Print the memory limit of a device: nothing if unset, and from 1024M up whole G, rounded down, as the daemon does."""
    value = owner.memory.get(_read_device(request)[0] or "")
    if value is None:
        return Reply()
    return Reply(f"{value // 1024}G\n" if value >= 1024 else f"{value}M\n")


def _set_priority(request: MpsRequest, owner: _Owner) -> Reply:
    priority = request.integer(0)
    if priority not in {0, 1}:
        return Reply("Invalid priority value - must be 0 or 1!\n")
    owner.priority = priority
    return Reply()


def _get_priority(_request: MpsRequest, owner: _Owner) -> Reply:
    """Print 0 for normal, 1 for below normal."""
    return Reply(f"{owner.priority}\n")


def _server_list(request: MpsRequest, _server: SimulatedServer | None) -> Reply:
    return Reply("".join(f"{server.pid}\n" for server in request.daemon.servers))


def _server_status(request: MpsRequest, server: SimulatedServer | None) -> Reply:
    if not re.match("[+-]?[0-9]", request.word(0)):
        return Reply("A server PID is required\n")
    return Reply(f"{server.status}\n") if server else request.not_found()


def _quit(request: MpsRequest, _server: SimulatedServer | None) -> Reply | None:
    """End the daemon when every client is gone; ``-t SECONDS`` bounds the wait, then forces."""
    if not request.owner:
        return Reply("Not enough privilege to execute quit command\n")
    connected = [
        client for server in request.daemon.servers for client in clients.clients_of(request.state, server.pid)
    ]
    forced = request.word(0) == "-t" and request.elapsed >= max(request.integer(1), 0)
    if connected and not forced:
        return None
    request.log(*(f"Server {server.pid} exited with status 0" for server in request.daemon.servers))
    mps_daemon.remove_ended(request.state, request.daemon, cleanly=True)
    request.log("Exit with status 0" if request.state.driver_loaded else "Exit with status 1")
    return Reply(ended=True)


def _ps(request: MpsRequest, _server: SimulatedServer | None) -> Reply:
    """Print the table of clients."""
    if not request.daemon.servers:
        return Reply("Server not found\n")
    rows: list[tuple[str, ...]] = [("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND", "ATTRIBUTES")]
    for server in request.daemon.servers:
        rows += [_client_row(request, client) for client in clients.clients_of(request.state, server.pid)]
    last = "%-15s%-15s" if request.major >= 595 else "%-15s"
    shown = 7 if request.major >= 595 else 6
    return Reply("".join(("%-10s%-10s%-15s%-26s%-15s" + last + "\n") % row[:shown] for row in rows))


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
_COMMANDS: dict[str, tuple[int, Callable[..., Reply | None]]] = {
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
