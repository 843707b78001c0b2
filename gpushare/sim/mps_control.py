"""nvidia-cuda-mps-control of a simulated host: its argv, stdin, environment, output and exit code."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpushare.host.process import wall_time
from gpushare.host.program import Completed, timed_out
from gpushare.sim import clients, mps_commands, mps_daemon
from gpushare.sim.current import changing, clock, current
from gpushare.sim.mps_commands import MpsRequest, Reply, refused
from gpushare.sim.mps_servers import CONTROL, LogLine, binary_version, driver_major
from gpushare.sim.mps_servers import render as render_line
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, StateFile

_POLL_SECONDS = 0.01
# Of the program's buffers for a command and for a reply to a wrong one.
_BUFFER_BYTES = 4096
# The options of 580 and newer by their letters; S came with 590.
_OPTIONS = {
    "h": "help",
    "v": "version",
    "d": "daemon",
    "f": "foreground",
    "M": "multiuser-server",
    "q": "ready-devices",
    "S": "static-partitioning",
}
_Command = Callable[[MpsRequest], "Reply | None"]

_COMMANDS: dict[str, _Command] = {
    "get_server_list": mps_commands.get_server_list,
    "get_client_list": mps_commands.get_client_list,
    "get_device_client_list": mps_commands.get_device_client_list,
    "get_default_active_thread_percentage": mps_commands.get_default_active_thread_percentage,
    "get_active_thread_percentage": mps_commands.get_active_thread_percentage,
    "get_default_device_pinned_mem_limit": mps_commands.get_default_device_pinned_mem_limit,
    "get_device_pinned_mem_limit": mps_commands.get_device_pinned_mem_limit,
    "get_default_client_priority": mps_commands.get_default_client_priority,
    "ps": mps_commands.ps,
    "set_default_active_thread_percentage": mps_commands.set_default_active_thread_percentage,
    "set_active_thread_percentage": mps_commands.set_active_thread_percentage,
    "set_default_device_pinned_mem_limit": mps_commands.set_default_device_pinned_mem_limit,
    "set_device_pinned_mem_limit": mps_commands.set_device_pinned_mem_limit,
    "set_default_client_priority": mps_commands.set_default_client_priority,
    "start_server": mps_commands.start_server,
    "shutdown_server": mps_commands.shutdown_server,
    "terminate_client": mps_commands.terminate_client,
    "quit": mps_commands.quit_daemon,
}
# The driver branch that brought a command.
_NEWER: dict[str, tuple[int, _Command]] = {
    "get_server_status": (550, mps_commands.get_server_status),
    "device_query": (580, mps_commands.device_query),
    "lspart": (590, mps_commands.lspart),
    "sm_partition": (590, mps_commands.sm_partition),
}


def main(
    argv: Sequence[str], stdin: str, env: Mapping[str, str], state_file: StateFile, timeout: float = 10.0
) -> Completed:
    """Run the program: ``argv`` with its name, ``env`` the whole environment, ``timeout`` in seconds."""
    deadline = clock() + timeout
    words = list(argv[1:])
    state = current(state_file)
    major = driver_major(state.driver)
    letters, commands = _old_arguments(words, major) if major < 580 else _arguments(words, major)
    name = tuple(argv)
    first = letters[:1]
    if first == "h":
        return Completed(name, 0, mps_daemon.usage(major), "")
    if first == "v":
        return Completed(name, 0, mps_daemon.version(state.mps_binary or binary_version(state.driver)), "")
    if first == "?":
        said = f"Unrecognized option {letters[1:]}\n" if major >= 580 else ""
        return Completed(name, 0 if said else 1, said + mps_daemon.usage(major), "")
    if not {"d", "f"} & set(letters):
        if commands:
            stdin = " ".join(commands) + "\n"
        return _Session(name, env, state_file, deadline, timeout).run(stdin)
    if "M" in letters and not state.root and major < 580:
        return Completed(name, 1, mps_daemon.usage(major) + mps_daemon.ONLY_ROOT, "")
    with changing(state_file) as (state, lines):
        daemon, code, said, started = mps_daemon.start(state, env, static="S" in letters)
        lines += started
    if daemon is None or "f" not in letters:
        return Completed(name, code, said, "")
    _foreground(name, daemon.pid, state_file, deadline, timeout)
    return Completed(name, 0, said + "".join(render_line(line, wall_time(daemon.started)) for line in started), "")


def _old_arguments(words: list[str], major: int) -> tuple[str, list[str]]:
    """Return the options of 535 to 570 as letters; "?" is what 555 refuses. No argument is a command."""
    if words in (["-h"], ["--help"]):
        return "h", []
    known = {"-d": "d", "-f": "f"}
    if major >= 555:
        if set(words) - known.keys() - {"-multiuser-server"}:
            return "?", []
        return "".join(known.get(word, "M") for word in words), []
    # Anything but one option silently becomes the UI.
    return known.get(words[0], "") if len(words) == 1 else "", []


def _arguments(words: list[str], major: int) -> tuple[str, list[str]]:
    """Return the options of 580 and newer as letters, and the command's words, as getopt_long_only reads them.

    The first option that ends the program comes first and alone: "h", "v", or "?" and the letter that
    the program names (NUL for an unknown one).
    """
    options = {letter: name for letter, name in _OPTIONS.items() if letter != "S" or major >= 590}
    found, commands = "", []
    for index, word in enumerate(words):
        if word == "--":
            commands += words[index + 1 :]
            break
        if not word.startswith("-") or word == "-":
            commands.append(word)
            continue
        name, equals, _ = word.removeprefix("-").removeprefix("-").partition("=")
        long = next((letter for letter, option in options.items() if name and option.startswith(name)), None)
        if word[1] in options and (len(word) == 2 or (long is None and word[1] != "-")):
            letters = word[1:]
        elif long is not None:
            letters = f"?{long}" if equals else long
        else:
            letters = "?\0"
        for letter in letters:
            if letter in {"h", "v"}:
                return letter, []
            if letter == "?":
                return letters, []
            if letter not in options:
                # 580 has the letter, but not what it does.
                return "?\0" if letter == "S" else f"?{letter}", []
            found += letter
    return found, commands


def _foreground(argv: tuple[str, ...], pid: int, state_file: StateFile, deadline: float, timeout: float) -> None:
    """Block until the daemon is gone; at the time-out it is killed, as the caller kills a program."""
    while any(daemon.pid == pid for daemon in current(state_file).daemons):
        if clock() >= deadline:
            with changing(state_file) as (state, _):
                for daemon in [daemon for daemon in state.daemons if daemon.pid == pid]:
                    mps_daemon.ended(state, daemon, cleanly=False)
            raise timed_out(argv, timeout)
        time.sleep(_POLL_SECONDS)


def _commands(stdin: str) -> Iterator[str]:
    """Yield the commands as C's fgets reads them: a long line comes in pieces, a NUL ends one."""
    for line in re.findall(rb"[^\n]*\n|[^\n]+", stdin.encode(errors="surrogateescape")):
        for start in range(0, len(line), _BUFFER_BYTES - 1):
            piece = line[start : start + _BUFFER_BYTES - 1].partition(b"\0")[0]
            # Bytes: only C's white space counts.
            yield piece.strip().decode(errors="surrogateescape")


class _Session:
    """One run of the UI: commands on stdin, one per line, until its end or until the daemon quits."""

    def __init__(
        self, argv: tuple[str, ...], env: Mapping[str, str], state_file: StateFile, deadline: float, timeout: float
    ) -> None:
        self._argv, self._env, self._state_file = argv, env, state_file
        self._deadline, self._timeout = deadline, timeout
        self._opened = False

    def _dropped(self) -> Completed | None:
        """Return what two conversations at once do to one of them: silence with exit 0, or an error, in turn."""
        if not current(self._state_file).collisions:
            return None
        with changing(self._state_file) as (state, _):
            state.collisions -= 1
            silent = state.collisions % 2 == 0
        return Completed(self._argv, 0, "", "") if silent else Completed(self._argv, 1, "", mps_daemon.CANNOT_SEND)

    def run(self, stdin: str) -> Completed:
        """Return what the program prints for this stdin."""
        output = ""
        if clients.daemon_of(current(self._state_file), self._env) is None:
            return Completed(self._argv, 1, "", mps_daemon.NO_DAEMON)
        if (dropped := self._dropped()) is not None:
            return dropped
        for command in _commands(stdin):
            reply = self._answer(command)
            if reply is None:
                error = "Cannot send command to MPS control daemon process\n" if self._opened else mps_daemon.NO_DAEMON
                return Completed(self._argv, 1, output, error)
            output += reply.text
            if reply.ended:
                return Completed(self._argv, 0, output, "")
        self._close()
        return Completed(self._argv, 0, output, "")

    def _answer(self, command: str) -> Reply | None:
        """Return the reply when it comes; None when the daemon is gone."""
        begun = clock()
        first, hanging = True, None
        while True:
            with changing(self._state_file) as (state, lines):
                daemon = clients.daemon_of(state, self._env)
                if daemon is None:
                    return None
                silent = daemon.hangs or daemon.stopped or (daemon.hangs_on is not None and daemon.hangs_on != hanging)
                if not silent:
                    request = self._request(state, daemon, lines, command)
                    request.elapsed = 0.0 if first else clock() - begun
                    request.hanging = hanging
                    if first:
                        request.log(f"Cmd:{command}")
                    first = False
                    reply = execute(command, request)
                    hanging = request.daemon.hangs_on if reply is None else None
                    if reply is not None:
                        for text in reply.text.splitlines():
                            request.log(text)
                        return reply
            if clock() >= self._deadline:
                raise timed_out(self._argv, self._timeout)
            time.sleep(_POLL_SECONDS)

    def _request(
        self, state: SimulatedHostState, daemon: SimulatedDaemon, lines: list[LogLine], command: str
    ) -> MpsRequest:
        if not self._opened:
            texts = ("Accepting connection...", "NEW UI")
            lines += [LogLine(daemon.log_directory, CONTROL, "Control", daemon.pid, text) for text in texts]
            self._opened = True
        return MpsRequest(state=state, daemon=daemon, words=command_words(command)[1:], lines=lines)

    def _close(self) -> None:
        with changing(self._state_file) as (state, lines):
            daemon = clients.daemon_of(state, self._env)
            if daemon is not None and self._opened:
                lines.append(LogLine(daemon.log_directory, CONTROL, "Control", daemon.pid, "UI closed"))


def command_words(command: str) -> list[str]:
    """Return the words of a command; only C's white space parts them."""
    return [word for word in re.split(r"[ \t\v\f\r]+", command) if word]


def execute(command: str, request: MpsRequest) -> Reply | None:
    """Carry one command out; None when it blocks and must be asked again."""
    name = command_words(command)[0] if command else ""
    since, newer = _NEWER.get(name, (0, None))
    function = _COMMANDS.get(name) or (newer if request.major >= since else None)
    if function is None:
        said = f'Unknown command "{name}"'.encode(errors="surrogateescape")[:_BUFFER_BYTES]
        return Reply(said.decode(errors="surrogateescape") + "\n")
    # 535 lets any user change the settings.
    if name.startswith("set_") and not request.owner and request.major >= 550:
        return refused(request)
    return function(request)
