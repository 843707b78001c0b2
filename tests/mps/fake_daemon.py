"""An MPS control daemon that says what a test wants it to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpushare.base.errors import GpushareError
from gpushare.host.program import Completed, Listener, Pending
from gpushare.mps.control import MpsControl

CLOSING = "get_default_active_thread_percentage"


class Daemon:
    """A daemon that answers each command as the test says; it keeps what it was asked.

    The closing question of a conversation is always answered, unless it drops the whole conversation.
    """

    def __init__(
        self, replies: Mapping[str, str] | None = None, *, code: int = 0, stderr: str = "", drops: int = 0
    ) -> None:
        self.replies, self.code, self.stderr, self.drops = dict(replies or {}), code, stderr, drops
        self.asked: list[str] = []
        self.env: Mapping[str, str | None] = {}
        self.error: GpushareError | None = None

    def find(self, name: str) -> str | None:
        return f"/usr/bin/{name}"

    def listener(self, pipe_directory: str) -> Listener | None:
        return None

    def start(self, argv: Sequence[str], **_: Any) -> Pending:
        raise NotImplementedError

    def run(
        self, argv: Sequence[str], *, stdin: str = "", env: Mapping[str, str | None] | None = None, **_: Any
    ) -> Completed:
        self.env = env or {}
        if self.error is not None:
            raise self.error
        assert stdin.endswith("\n")
        commands = stdin.splitlines()
        closing = "100.0\n" if len(commands) > 1 and commands[-1] == CLOSING else ""
        commands = commands[:-1] if closing else commands
        if self.drops > 0:
            self.drops -= 1
            return Completed(tuple(argv), self.code, "", self.stderr)
        self.asked += commands
        text = "".join(self.replies.get(command, "") for command in commands)
        stderr = "" if "Cannot send" in self.stderr else self.stderr
        return Completed(tuple(argv), self.code, text + (closing if self.code == 0 else ""), stderr)


def control(daemon: Daemon) -> MpsControl:
    """Return the conversation with it."""
    return MpsControl(daemon, "/run/p")
