"""The cockpit on a real terminal ends soon by a signal, and with its terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cli.drive import H200, World, environment


class Terminal:
    """A cockpit on a terminal that is read until ``drawn`` returns."""

    def __init__(self) -> None:
        World(H200)
        self.ours, theirs = pty.openpty()
        # A session without a controlling terminal: the end of the terminal sends no signal.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpushare", "--host", H200, "top"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment(), "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)

    def drawn(self, word: bytes, seconds: float = 20) -> bytes:
        """Read until a word was drawn, or the terminal is closed; return all that was."""
        text, deadline = b"", time.monotonic() + seconds
        while word not in text and time.monotonic() < deadline:
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    text += os.read(self.ours, 1 << 16)
                except OSError:
                    break
        assert word in text
        return text

    def ends(self, code: int) -> None:
        """Wait two seconds, and what a machine under load takes more, for the end."""
        assert self.process.wait(4) == code


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    cockpit = Terminal()
    yield cockpit
    cockpit.process.kill()
    cockpit.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_in_order(terminal: Terminal, number: signal.Signals) -> None:
    terminal.drawn(b"H200")
    terminal.process.send_signal(number)
    # The screen of before is back.
    terminal.drawn(b"\x1b[?1049l")
    terminal.ends(128 + number)


def test_it_ends_with_its_terminal(terminal: Terminal) -> None:
    terminal.drawn(b"H200")
    os.close(terminal.ours)
    terminal.ends(128 + signal.SIGHUP)


def test_a_signal_ends_it_where_the_terminal_takes_nothing(terminal: Terminal) -> None:
    """Textual waits for the terminal: its queue is full."""
    terminal.drawn(b"H200")
    # Each key draws; nobody reads that.
    for _ in range(400):
        os.write(terminal.ours, b"T")
        time.sleep(0.002)
    terminal.process.send_signal(signal.SIGTERM)
    terminal.ends(128 + signal.SIGTERM)
