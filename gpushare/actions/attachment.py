"""The proof that a program really runs inside its share: the daemon knows its PID.

A CUDA program whose MPS variables are wrong runs outside MPS, without limits and without a word. So
the PIDs of the program are looked for among the daemon's clients and among NVML's processes.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpushare.actions.run_end import CONVERSATION_SECONDS, client_pids
from gpushare.errors import GpushareError, NotFound
from gpushare.host.mps_control import MpsControl

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mps_home import DaemonHome
    from gpushare.selection import Device

# The daemon logs every conversation: ask often only while a program usually makes its context.
_SPACING: Final = ((5.0, 0.25), (30.0, 1.0), (float("inf"), 5.0))
_PENDING: Final = re.compile(r"NEW CLIENT (\d+) from user \d+: Server is not ready, push client to pending list")
_ACCEPTED: Final = re.compile(r"NEW CLIENT (\d+) from user \d+: Server (?:already exists|is not ready)")
_PENDING_SECONDS: Final = 3.0
_LOG_TAIL_BYTES: Final = 64 * 1024


def spacing(age: float) -> float:
    """Return how long to wait between two looks at a program of this age (seconds) that has not been seen inside."""
    return next(seconds for until, seconds in _SPACING if age < until)


@dataclass
class Attachment:
    """What is known so far of one program's attachment; `look` brings it up to date."""

    host: Host
    device: Device
    home: DaemonHome
    program_pid: int
    started: float = field(default_factory=time.monotonic)
    seen: set[int] = field(default_factory=set)
    attached: dict[int, int | None] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    daemon_gone: bool = False
    _suspects: set[int] = field(default_factory=set)
    _waiting_since: dict[int, float] = field(default_factory=dict)

    @property
    def control(self) -> MpsControl:
        """Return the conversation with the daemon."""
        return MpsControl(self.host.programs, str(self.home.pipe), seconds=CONVERSATION_SECONDS)

    def clients(self) -> set[int] | None:
        """Return the daemon's clients and those that were; None when it cannot be asked."""
        return client_pids(self.control, self.attached)

    def wait(self) -> float:
        """Return how many seconds may pass until the next look."""
        return 5.0 if self.attached else spacing(time.monotonic() - self.started)

    def look(self) -> None:
        """Look for the program's processes among the daemon's clients and on the GPU."""
        tree = set(self.host.processes.descendants(self.program_pid))
        self.seen |= tree
        try:
            clients = {client.pid: client.server_pid for client in self.control.clients()}
        except NotFound:
            self.daemon_gone = True
            return
        except GpushareError:
            # Nothing can be told from a daemon that does not answer.
            return
        self.attached.update({pid: clients[pid] for pid in tree & clients.keys()})
        self._look_outside(tree - clients.keys())
        if not self.attached:
            self._look_pending(tree)

    def _look_outside(self, tree: set[int]) -> None:
        """A process of ours that computes on the GPU and that the daemon does not know is outside MPS.

        Two looks must agree: a client is on NVML's list a moment before the daemon lists it.
        """
        if self.host.processes.namespace_is_host() is False:
            return
        try:
            running = self.host.nvml.processes(self.device.gpu.index) or ()
        except GpushareError:
            return
        now = {process.pid for process in running if process.compute and not process.mps and process.pid in tree}
        self.outside |= now & self._suspects
        self._suspects = now

    def _look_pending(self, tree: set[int]) -> None:
        """The daemon logs "pending" for everybody while a server starts; behind another user it stays so."""
        waiting = self._logged(_PENDING) & tree
        for pid in waiting:
            self._waiting_since.setdefault(pid, time.monotonic())
        long = {pid for pid in waiting if time.monotonic() - self._waiting_since[pid] > _PENDING_SECONDS}
        if long - self.pending and self._another_user_is_served():
            self.pending |= long

    def _another_user_is_served(self) -> bool:
        try:
            servers = [self.host.processes.describe(pid) for pid in self.control.servers()]
        except GpushareError:
            return False
        return any(info is not None and info.uid not in {None, self.host.uid} for info in servers)

    def settle(self) -> None:
        """Read the daemon's log for a program that ended between two looks."""
        if not self.attached:
            accepted = (self._logged(_ACCEPTED) & self.seen) - self.pending
            self.attached.update(dict.fromkeys(accepted))

    def _logged(self, pattern: re.Pattern[str]) -> set[int]:
        try:
            with open(self.home.log / "control.log", "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return set()
        return {int(match.group(1)) for match in pattern.finditer(text)}
