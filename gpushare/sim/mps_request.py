"""One command to a simulated MPS control daemon, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpushare.sim.mps_limits import leading_integer
from gpushare.sim.mps_logs import CONTROL, LogLine
from gpushare.sim.mps_servers import driver_major
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, SimulatedServer


@dataclass(frozen=True)
class Reply:
    """What a command prints, and whether the daemon ended with it."""

    text: str = ""
    ended: bool = False


@dataclass
class Request:
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
        return self.state.uid in {0, self.daemon.uid}

    def integer(self, index: int) -> int:
        """Return a word as C's atoi reads it: the leading digits, else 0."""
        return leading_integer(self.word(index))[0]

    def word(self, index: int) -> str:
        """Return a word, or an empty text when it is missing."""
        return self.words[index] if index < len(self.words) else ""

    def server(self, index: int) -> SimulatedServer | None:
        """Return the server whose PID a word names."""
        pid = self.integer(index)
        return next((server for server in self.daemon.servers if server.pid == pid), None)

    def log(self, text: str) -> None:
        """Write a line to control.log."""
        self.lines.append(LogLine(self.daemon.log_directory, CONTROL, "Control", self.daemon.pid, text))


def not_found(request: Request, index: int) -> Reply:
    """Return the answer for a server PID that is not there."""
    return Reply(f"Server {request.integer(index)} not found\n")


def invalid_device(request: Request) -> Reply:
    """Return the answer for a device number out of range: nothing, and a line in the log up to 555."""
    if request.major < 580:
        request.log("Invalid device ordinal!")
    return Reply()


def refused(request: Request) -> Reply:
    """Return the answer to a user who may not change the daemon (550 and newer)."""
    return Reply(
        f"Insufficient privileges for UID {request.state.uid}. Control deamon settings can only be modified "
        "by the user started it or by the root user.\n"
    )
