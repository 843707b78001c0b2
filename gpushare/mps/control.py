"""The language of nvidia-cuda-mps-control: commands through stdin, and its replies.

Commands as arguments exist only from driver 580 on, and are ignored with exit code 0 before; hence stdin. The exit code
is 0 for nearly every rejected command; hence each setter reads back. Facts: NVIDIA's MPS guide, the man page, and the
programs of drivers 535, 550 and 580.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import MpsClient, Priority
from gpushare.base.units import GIB, MIB, format_bytes, mps_memory, mps_memory_readback, mps_percentage
from gpushare.base.values import dataclass
from gpushare.mps.limits import VARIABLES, Limits
from gpushare.plan import Step

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.program import Completed, Programs

# Bounded digits: a log line may hold anything, and int() refuses thousands of digits.
_MEMORY: Final = re.compile(r"^(\d{1,12})([MG])$", re.ASCII)
_PID: Final = re.compile(r"^[1-9]\d{0,9}$", re.ASCII)
# The largest pid_t; Linux itself stops at 2^22.
_LAST_PID: Final = 2**31 - 1
# A server takes at most 60 clients, and a host runs a handful of servers.
_MOST_ROWS: Final = 4096
_PERCENTAGE: Final = re.compile(r"^\d{1,12}(\.\d+)?$", re.ASCII)


@dataclass(frozen=True)
class ServerRow:
    """One MPS server: its state, and the limits of its future clients."""

    pid: int
    status: str | None
    limits: Limits


@dataclass(frozen=True)
class Overview:
    """A daemon at one moment: defaults for new servers, servers, clients with what `MpsControl.clients` tells of them."""

    limits: Limits
    servers: tuple[ServerRow, ...]
    clients: tuple[MpsClient, ...]


def parse_ps(text: str) -> list[MpsClient]:
    """Return the clients in the rows of ``ps``, by the words of its header, without their names.

    ``PID ID SERVER DEVICE NAMESPACE COMMAND``; a COMMAND may contain blanks, the cells before it do not. Text without a
    header (``Server not found``) has no rows.
    """
    lines = [line.split() for line in text.splitlines()]
    header = next((i for i, words in enumerate(lines) if words[:1] == ["PID"] and "COMMAND" in words), None)
    if header is None:
        return []
    columns = lines[header][: lines[header].index("COMMAND")]
    rows: list[MpsClient] = []
    for words in lines[header + 1 :]:
        pid = _parse_pid(words[0]) if len(words) >= len(columns) else None
        if pid is None:
            continue
        if len(rows) == _MOST_ROWS:
            raise strange_reply_error(f"more than {_MOST_ROWS} clients")
        cells = dict(zip(columns, words, strict=False))
        rows.append(MpsClient(pid=pid, server_pid=_parse_pid(cells.get("SERVER", ""))))
    return rows


def parse_pids(text: str) -> list[int]:
    """Return the PIDs of ``get_server_list``, one per line; other lines are ignored."""
    pids = [pid for pid in (_parse_pid(line.strip()) for line in text.splitlines()) if pid is not None]
    if len(pids) > _MOST_ROWS:
        raise strange_reply_error(f"{len(pids)} processes")
    return pids


def _parse_pid(text: str) -> int | None:
    """Return a PID that a daemon printed; None: it is none."""
    # kill(2) takes any other number as several processes.
    return int(text) if _PID.match(text) and int(text) <= _LAST_PID else None


def strange_reply_error(what: str) -> OperationFailed:
    return OperationFailed(
        f"implausible reply of the MPS daemon: {what}", "see who owns it: gpushare mps status", code="strange_reply"
    )


def parse_memory(text: str) -> int | None:
    """Return a printed memory limit in bytes (``10G``, ``512M``), or None when none is set."""
    match = _MEMORY.match(text.strip())
    if match is None:
        return None
    unit = GIB if match.group(2) == "G" else MIB
    return int(match.group(1)) * unit


def _is_memory_limit(printed: str | None, size_bytes: int | None) -> bool:
    """Return whether a printed memory limit is this one (None: no limit): exact, or floored to G, as 535 to 580 print it."""
    if size_bytes is None:
        return printed is None or parse_memory(printed) == 0
    return printed in {mps_memory(size_bytes), mps_memory_readback(size_bytes)}


def _memory_in(lines: Iterable[str]) -> int | None:
    """Return the memory limit in a reply, told from PIDs by its form; None: none is printed."""
    return next((limit for limit in map(parse_memory, lines) if limit is not None), None)


def parse_percentage(text: str) -> float | None:
    """Return the last percentage that a reply prints (``25.0``), or None."""
    numbers = [float(line) for line in map(str.strip, text.splitlines()) if _PERCENTAGE.match(line)]
    return numbers[-1] if numbers and numbers[-1] <= 100.0 else None


def _priority_in(text: str) -> Priority | None:
    """Return the client priority that a reply prints, or None."""
    return Priority(int(text)) if text in {"0", "1"} else None


def _status_in(lines: Sequence[str]) -> str | None:
    """Return the status of a server in a reply: a line of capitals."""
    return next((line.strip() for line in lines if re.fullmatch(r"[A-Z_]+", line.strip())), None)


PROGRAM: Final = "nvidia-cuda-mps-control"
SERVER_PROGRAM: Final = "nvidia-cuda-mps-server"
# The kernel truncates process names to this length.
_NAME_LENGTH: Final = 15
# "<dir>/control_privileged" must fit a socket address of 108 bytes.
MAX_PIPE_DIRECTORY_BYTES: Final = 87
# A daemon of gpushare sees one device (CUDA_VISIBLE_DEVICES is one UUID): its device 0.
DEVICE: Final = "0"

_TIMEOUT: Final = 5.0
# What a conversation has at the end of a wait (2 ms is usual on an H200).
_LEAST_SECONDS: Final = 0.05
# A daemon that quits ends its servers first.
_QUIT_SECONDS: Final = 10.0
_FORCED_QUIT_SECONDS: Final = 16.0
# Where no daemon answers.
_NO_DAEMON_DIRECTORY: Final = "/nonexistent/gpushare"
# Every version answers this with one number, in any state.
_SENTINEL: Final = "get_default_active_thread_percentage"
_CANNOT_SEND: Final = "Cannot send command"
# Characters of an error text that are shown: any user may have written it.
_MOST_SHOWN: Final = 500
# Far more than any host has: there is one server per user, or per named server.
_MOST_SERVERS: Final = 64


def control_command(pipe_directory: str | Path, command: str) -> str:
    """Return the shell line that sends a command to the daemon of a pipe directory."""
    return f"echo {command} | CUDA_MPS_PIPE_DIRECTORY={shlex.quote(str(pipe_directory))} {PROGRAM}"


def _setting_command(verb: str, setting: str, server: int | None, *values: str) -> str:
    """Return the command that gets or sets a limit of a server, or the default for new servers (None)."""
    name = f"{verb}_default_{setting}" if server is None else f"{verb}_{setting} {server}"
    return " ".join((name, *values))


def _set_threads_command(percent: float, server: int | None) -> str:
    """Return the command that sets the active thread percentage of a server, or the default."""
    return _setting_command("set", "active_thread_percentage", server, mps_percentage(percent))


def _set_memory_command(size_bytes: int | None, server: int | None) -> str:
    """Return the command that sets the pinned memory limit of a server, or the default; None removes it."""
    size = "0G" if size_bytes is None else mps_memory(size_bytes)
    return _setting_command("set", "device_pinned_mem_limit", server, DEVICE, size)


def _set_priority_command(priority: Priority) -> str:
    return f"set_default_client_priority {int(priority)}"


def is_server(name: str | None) -> bool:
    """Return whether a process name (``/proc/PID/comm``, possibly truncated) is that of an MPS server."""
    return name is not None and name[:_NAME_LENGTH] == SERVER_PROGRAM[:_NAME_LENGTH]


# What the daemon logs of its own accord, also while a conversation is open; all else there is a command or a reply.
_EVENT: Final = r"Accepting connection|NEW (CLIENT|SERVER)|Starting new server|Server \d|User did not send|Removed "


def without_own_questions(lines: Sequence[str]) -> list[str]:
    """Return the lines of a control.log without gpushare's own questions: conversations that only read, and end as ours do.

    The daemon logs each conversation: ``NEW UI``, ``Cmd:...`` with the reply, ``UI closed`` (tests/real_daemon). One that
    sets something stays, and one that is still open, as the daemon may hang on it.
    """
    kept: list[str] = []
    begin: int | None = None
    for line in lines:
        kept.append(line)
        if _log_text(line) == "NEW UI":
            begin = len(kept) - 1
            # The line before tells of the connection that this conversation holds.
            if begin > 0 and _log_text(kept[begin - 1]).startswith("Accepting connection"):
                begin -= 1
        elif _log_text(line) == "UI closed" and begin is not None:
            if _only_asks(kept[begin:]):
                kept[begin:] = [row for row in kept[begin + 1 :] if re.match(_EVENT, _log_text(row))]
            begin = None
    return kept


def _log_text(line: str) -> str:
    """Return a line of a control.log without its time."""
    return line.partition("] ")[2]


def _only_asks(conversation: Sequence[str]) -> bool:
    """Return whether a conversation in a control.log only reads, and ends with gpushare's closing question."""
    texts = map(_log_text, conversation)
    commands = [text.removeprefix("Cmd:") for text in texts if text.startswith("Cmd:")]
    if not commands or commands[-1] != _SENTINEL:
        return False
    return all(command == "ps" or command.startswith("get_") for command in commands)


def without_closing_answer(printed: str, command: str) -> str | None:
    """Return what a daemon printed without its answer to the closing question; None: that answer is missing."""
    lines = printed.splitlines()
    # The answer is a percentage with a point (100.0). Those of the commands before it look the same.
    percentages = ("get_default_active_thread", "get_active_thread")
    least = sum(line.startswith(percentages) for line in command.splitlines())
    if len(lines) <= least or parse_percentage(lines[-1]) is None or "." not in lines[-1]:
        return None
    return "".join(f"{line}\n" for line in lines[:-1])


def _wait_to_retry() -> None:
    # 2 to 20 ms, different each time, so that two conversations do not collide again.
    time.sleep(0.002 + time.monotonic_ns() // 1000 % 18 / 1000)


class NoDaemon(NotFound):
    """There is no MPS daemon where one was expected."""

    code = "no_daemon"


def not_your_daemon_error(
    daemon: str, owner: str, gpu: str | None = None, command: str = "gpushare ..."
) -> NoPermission:
    """Return the error for a daemon that only its owner and root may change."""
    return NoPermission(
        f"{daemon} belongs to {owner}",
        f"ask its owner, or run as root: sudo {command}",
        gpu=gpu,
        code="not_your_daemon",
    )


class MpsControl:
    """Talks to the daemon of one pipe directory."""

    def __init__(
        self, programs: Programs, pipe_directory: str, *, seconds: float = _TIMEOUT, until: float = math.inf
    ) -> None:
        """Wait ``seconds`` for each answer, and until ``until`` (monotonic) for all of them."""
        self._programs, self._seconds, self._until = programs, seconds, until
        self.pipe_directory = pipe_directory

    def ask(self, command: str, *, timeout: float | None = None) -> str:
        """Send commands, one per line, and return what the daemon prints.

        The daemon holds one conversation at a time and drops another that comes meanwhile: silently with exit code 0,
        or with "Cannot send command" (seen on an H200 with driver 580: a third of three at once). So each conversation
        ends with a question that is always answered, and is repeated if the answer is missing.

        Raises:
            NotFound: no daemon answers at this pipe directory (code ``no_daemon``).
            NoPermission: the daemon belongs to another user.
            TimedOut: it does not answer within ``timeout`` seconds (code ``daemon_hangs``).
        """

        def may_be_dropped(done: Completed) -> bool:
            is_answered = without_closing_answer(done.stdout, command) is not None
            return not is_answered and (_CANNOT_SEND in done.stderr or done.exit_code == 0)

        timeout = self._seconds if timeout is None else timeout
        done = self._talk(f"{command}\n{_SENTINEL}\n", timeout, may_be_dropped)
        # First: a refusal, too, has no closing answer.
        self._check_reply(done, command)
        reply = without_closing_answer(done.stdout, command)
        if reply is None:
            raise OperationFailed(
                f"the MPS daemon at {self.pipe_directory} dropped every attempt at '{command.splitlines()[0]}'",
                "other programs keep it busy; see: gpushare mps logs",
                code="mps_control",
            )
        return reply

    def _talk(self, stdin: str, timeout: float, is_dropped: Callable[[Completed], bool]) -> Completed:
        """Hold a conversation with the daemon, again while it is dropped and there is time, and return the last one.

        All attempts together have ``timeout`` seconds, and end when the time for all answers is over. Raises TimedOut:
        the first attempt was not answered.
        """
        deadline = min(time.monotonic() + timeout, self._until)
        environment = {"CUDA_MPS_PIPE_DIRECTORY": self.pipe_directory}
        done: Completed | None = None
        while True:
            seconds_left = max(_LEAST_SECONDS, deadline - time.monotonic())
            try:
                done = self._programs.run([PROGRAM], stdin=stdin, env=environment, timeout=seconds_left)
            except TimedOut:
                if done is not None:
                    # It has answered before in this wait, to drop us: it is busy, and does not hang.
                    return done
                raise TimedOut(
                    f"the MPS daemon at {self.pipe_directory} did not answer '{stdin.splitlines()[0]}' within {timeout:g} s",
                    # By its directory: a daemon that hangs during its start has no record yet.
                    f"if it still runs, end it: gpushare mps stop --pipe-directory {shlex.quote(self.pipe_directory)} --force",
                    code="daemon_hangs",
                ) from None
            if not is_dropped(done) or time.monotonic() > deadline:
                return done
            _wait_to_retry()

    def _check_reply(self, done: Completed, command: str) -> None:
        """Raise the error that the daemon's answer states: no daemon, another user's, or a failure."""
        words = done.text[:_MOST_SHOWN]
        if "Cannot find MPS control daemon" in words:
            raise NoDaemon(f"no MPS daemon answers at {self.pipe_directory}", "start one: gpushare mps start")
        if "Insufficient privileges" in words or "Not enough privilege" in words or "Cannot authenticate" in words:
            raise not_your_daemon_error(
                f"the MPS daemon at {self.pipe_directory} refuses '{command}': it", "another user"
            )
        if done.exit_code != 0:
            raise OperationFailed(
                f"'{command}' failed at the MPS daemon: {words or f'exit code {done.exit_code}'}",
                "see its log: gpushare mps logs",
                code="mps_control",
            )

    def answers(self, timeout: float = _TIMEOUT) -> bool:
        """Return whether a daemon answers. One that hangs raises TimedOut."""
        try:
            self.ask(_SENTINEL, timeout=timeout)
        except NotFound:
            return False
        return True

    # -- limits: of a server, or the defaults of servers that start from now on ------------------------

    def threads(self, server: int | None = None) -> float | None:
        return parse_percentage(self.ask(_setting_command("get", "active_thread_percentage", server)))

    def set_threads(self, percent: float, server: int | None = None) -> None:
        """Set the active thread percentage and read it back.

        A daemon ignores a value out of range and exits 0.
        """
        self.ask(_set_threads_command(percent, server))
        self._check_limit_held("active thread percentage", self.threads(server), round(percent, 1))

    def memory(self, server: int | None = None) -> str | None:
        """Return the pinned memory limit of the daemon's device as printed, or None when unset.

        From 1024M up the daemon prints whole G, rounded down: the exact limit is in the server's log.
        """
        printed = self.ask(_setting_command("get", "device_pinned_mem_limit", server, DEVICE)).strip()
        # For a server without a limit some versions print a sentence.
        is_sentence = server is not None and parse_memory(printed) is None
        return None if is_sentence else printed or None

    def set_memory(self, size_bytes: int | None, server: int | None = None) -> None:
        """Set the pinned memory limit, as whole M, or remove it (None), and read it back."""
        self.ask(_set_memory_command(size_bytes, server))
        held = self.memory(server)
        if not _is_memory_limit(held, size_bytes):
            wanted = None if size_bytes is None else mps_memory(size_bytes)
            self._check_limit_held("pinned memory limit", held, wanted)

    def priority(self) -> Priority | None:
        return _priority_in(self.ask("get_default_client_priority").strip())

    def set_priority(self, priority: Priority) -> None:
        """Set the default client priority and read it back."""
        self.ask(_set_priority_command(priority))
        self._check_limit_held("client priority", self.priority(), priority)

    def holds(self, limits: Limits, servers: Sequence[int]) -> bool:
        """Return whether the defaults, and these servers, have those of the limits that are set (not None).

        A memory limit from 1 GiB up is compared in whole GiB: the daemon prints no more.
        """
        threads, memory = limits.threads_percent, limits.memory_limit_bytes
        sets_memory = memory is not None or limits.no_memory_limit
        if limits.priority is not None and self.priority() is not limits.priority:
            return False
        for server in (None, *servers):
            if threads is not None and self.threads(server) != round(threads, 1):
                return False
            if sets_memory and not _is_memory_limit(self.memory(server), memory):
                return False
        return True

    def limit_steps(self, limits: Limits, server: int | None = None) -> list[Step]:
        """Return the steps that set the defaults, or the limits of one server for its future clients.

        The steps have no undo of their own: undoing a start ends the daemon, and `plan_limits` undoes all of them together.
        """
        clients = "each client process" if server is None else f"each future client of server {server}"
        threads = limits.threads_percent
        memory = limits.memory_limit_bytes
        priority = limits.priority
        changes = []
        if threads is not None:
            title = f"limit {clients} to {threads:g} % of the SM threads"
            changes.append((title, _set_threads_command(threads, server), lambda: self.set_threads(threads, server)))
        if memory is not None or limits.no_memory_limit:
            title = f"remove the pinned memory limit of {clients}"
            if memory is not None:
                title = f"limit {clients} to {format_bytes(memory)} of pinned device memory"
            changes.append((title, _set_memory_command(memory, server), lambda: self.set_memory(memory, server)))
        if priority is not None and server is None:
            title = f"give {clients} {priority.title} priority"
            changes.append((title, _set_priority_command(priority), lambda: self.set_priority(priority)))
        return [
            Step(what=title, command=control_command(self.pipe_directory, command), do=do)
            for title, command, do in changes
        ]

    def _check_limit_held(self, what: str, held: object, wanted: object) -> None:
        """Raise OperationFailed if the daemon reports a value other than the one that was just set."""
        if held != wanted:
            raise OperationFailed(
                f"the MPS daemon did not accept the {what} {wanted}: it holds {'none' if held is None else held}",
                "see its log: gpushare mps logs",
                code="limit_not_held",
            )

    # -- servers and clients ---------------------------------------------------------------------------

    def servers(self) -> list[int]:
        return parse_pids(self.ask("get_server_list"))

    def server_status(self, server_pid: int) -> str | None:
        """Return INITIALIZING, ACTIVE or FAULT, or None when the server is gone or the driver (535) has no such command."""
        return _status_in(self.ask(f"get_server_status {server_pid}").splitlines())

    def overview(self) -> Overview:
        """Return the daemon's state, in few conversations: each one adds lines to a log that is never rotated."""
        reply = self.ask(
            "get_default_active_thread_percentage\nget_default_client_priority\n"
            f"get_default_device_pinned_mem_limit {DEVICE}\nget_server_list"
        )
        # One line each for the first two; then the memory limit, if there is one, and a line for each server.
        threads, priority, *rest = (*reply.splitlines(), "", "")
        pids = parse_pids("\n".join(rest))
        if len(pids) > _MOST_SERVERS:
            raise strange_reply_error(f"{len(pids)} servers")
        return Overview(
            limits=Limits(
                threads_percent=parse_percentage(threads),
                memory_limit_bytes=_memory_in(rest),
                priority=_priority_in(priority.strip()),
            ),
            servers=tuple(row for row in map(self._server_row, pids) if row is not None),
            clients=tuple(self.clients()) if pids else (),
        )

    def _server_row(self, pid: int) -> ServerRow | None:
        """Return the state and limits of a server; None: it has ended since the list was read."""
        lines = self.ask(
            f"get_server_status {pid}\nget_active_thread_percentage {pid}\nget_device_pinned_mem_limit {pid} {DEVICE}"
        ).splitlines()
        if any("not found" in line for line in lines):
            return None
        # Each is told by its form: driver 535 has no get_server_status, and its "Unknown command" is no status.
        limits = Limits(threads_percent=parse_percentage("\n".join(lines)), memory_limit_bytes=_memory_in(lines))
        return ServerRow(pid, _status_in(lines), limits)

    def clients(self) -> list[MpsClient]:
        """Return all clients (``ps``). Raises OperationFailed: a daemon from before driver 470 has none."""
        printed = self.ask("ps")
        if "Unknown command" in printed:
            # No rows would mean that nobody is there.
            raise strange_reply_error("it has no command ps")
        return parse_ps(printed)

    def quit(self, *, force: bool = False) -> None:
        """Tell the daemon to end; with ``force`` it ends its servers after a second. Errors as `ask`.

        The exit code proves nothing: wait until the process is gone.
        """
        command, timeout = ("quit -t 1", _FORCED_QUIT_SECONDS) if force else ("quit", _QUIT_SECONDS)
        # Without a closing question, which nobody would answer; again only if it certainly did not arrive.
        done = self._talk(f"{command}\n", timeout, lambda done: _CANNOT_SEND in done.stderr)
        self._check_reply(done, command)


def probe_version(programs: Programs) -> int | None:
    """Return the "Binary version" (13000 is CUDA 13.0, driver 580), or None for older programs.

    Before 580 ``-v`` is no option, and the program would send its stdin to a daemon. So it gets none, and a pipe
    directory without a daemon.

    Raises:
        TimedOut: the program hangs.
        NoPermission, OperationFailed: it cannot be executed.
    """
    try:
        done = programs.run([PROGRAM, "-v"], env={"CUDA_MPS_PIPE_DIRECTORY": _NO_DAEMON_DIRECTORY}, timeout=_TIMEOUT)
    except NotSupported:
        return None
    match = re.search(r"Binary version:\s*(\d+)", done.stdout)
    return int(match.group(1)) if match else None


def start_argv(*, foreground: bool = False, multiuser: bool = False) -> list[str]:
    """Return the command that starts a daemon; ``multiuser``: one server, of root, for several users at the same time."""
    return [PROGRAM, "-f" if foreground else "-d", *(["-M"] if multiuser else [])]


def start_environment(uuid: str, pipe_directory: str, log_directory: str) -> Mapping[str, str | None]:
    """Return the daemon's environment: one device by UUID, private directories.

    The caller's own MPS variables are removed: the daemon would take them as its defaults. So are those by which GitHub's
    runner and Jenkins find what a job has left, to kill it: the daemon serves the jobs of other pipelines too.
    """
    return {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
        "CUDA_MPS_LOG_DIRECTORY": log_directory,
        **dict.fromkeys((*VARIABLES, "RUNNER_TRACKING_ID", "JENKINS_NODE_COOKIE", "BUILD_ID")),
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": None,
    }
