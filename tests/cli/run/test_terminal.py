"""``gpushare run`` on a terminal: Ctrl-C is gpushare's, input is the program's, Ctrl-Z stops both."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.drive import H200, World, environment, until


@dataclass
class Screen:
    """A terminal with a program on it, as its session's leader's child would be."""

    pid: int
    descriptor: int
    text: str = ""
    status: int | None = field(default=None)

    def read(self) -> str:
        """Return all that was shown so far."""
        while select.select([self.descriptor], [], [], 0)[0]:
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:
                break
            if not data:
                break
            self.text += data.decode()
        return self.text

    def until(self, text: str) -> None:
        """Wait until a text is shown."""
        deadline = time.monotonic() + 120
        while text not in self.read():
            assert time.monotonic() < deadline, f"never shown: {text!r}; shown: {self.text!r}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type."""
        os.write(self.descriptor, text.encode())

    def wait(self) -> int:
        """Wait for the end and return the exit code."""

        def ended() -> bool:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            return bool(pid)

        until(ended, "the end")
        assert self.status is not None
        return self.status


def on_terminal(*command: str) -> Screen:
    """Start a program as the leader of a session on a new terminal."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environment(TERM="dumb"))  # noqa: S606 - the very point
    return Screen(pid, descriptor)


def gpushare_run(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "gpushare", "--host", H200, "run", *words)


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    """Give a list to put screens into; what is left on them is ended."""
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        if screen.status is None:
            with contextlib.suppress(OSError):
                os.kill(screen.pid, signal.SIGKILL)
                os.waitpid(screen.pid, 0)
        os.close(screen.descriptor)
    with contextlib.suppress(AssertionError):
        until(lambda: not any(process.real for process in World().state.processes), "no program is left")


HANDLES = "import signal, time\nsignal.signal(2, lambda *_: (print('handled', flush=True), exit(5)))\n"
HANDLES += "print('ready', flush=True)\nwhile True: time.sleep(0.05)"


def test_ctrl_c_reaches_gpushare_and_the_program_once(screens: list[Screen], world: World) -> None:
    screens.append(screen := on_terminal(*gpushare_run("--", sys.executable, "-c", HANDLES)))
    screen.until("ready")
    screen.type("\x03")
    assert (screen.wait(), screen.text.count("handled"), world.state.daemons) == (5, 1, [])


def test_ctrl_c_does_not_kill_a_client_with_its_queue(screens: list[Screen], world: World) -> None:
    screens.append(screen := on_terminal(*gpushare_run("--", "sleep", "600")))
    screen.until("is attached")
    screen.type("\x03")
    screen.until("was stopped, its queue drained")
    assert (screen.wait(), world.state.daemons) == (130, [])


def test_the_program_gets_what_is_typed(screens: list[Screen]) -> None:
    screens.append(screen := on_terminal(*gpushare_run("--", "sh", "-c", "echo ask; read x; echo got $x; exit 3")))
    screen.until("ask")
    screen.type("hello\n")
    screen.until("got hello")
    assert screen.wait() == 3
    # Again and again.
    script = "for i in 1 2 3; do read x; echo got $i $x; done"
    screens.append(screen := on_terminal(*gpushare_run("--", "sh", "-c", script)))
    for number, word in enumerate(("a", "b", "c"), 1):
        screen.type(f"{word}\n")
        screen.until(f"got {number} {word}")
    assert screen.wait() == 0


def test_ctrl_c_while_the_program_has_the_terminal_is_its_own(screens: list[Screen]) -> None:
    script = "trap 'echo trapped; exit 6' INT; echo ask; read x"
    screens.append(screen := on_terminal(*gpushare_run("--", "sh", "-c", script)))
    screen.until("ask")
    until(lambda: os.tcgetpgrp(screen.descriptor) != screen.pid, "the program has the terminal")
    screen.type("\x03")
    # A signal just before the shell blocks in read is trapped when read returns.
    screen.type("\n")
    screen.until("trapped")
    assert screen.wait() == 6


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_stops_both_and_fg_lets_both_go_on(screens: list[Screen], world: World) -> None:
    screens.append(screen := on_terminal("bash", "--norc", "--noprofile", "-i"))
    screen.type(shlex.join(gpushare_run("--", "sleep", "600")) + "\n")
    screen.until("is attached")
    (child,) = world.pids()
    screen.type("\x1a")
    screen.until("Stopped")
    until(lambda: state_of(child) == "T", "the program is stopped too")
    screen.type("fg\n")
    until(lambda: state_of(child) == "S", "the program goes on")
    screen.type("\x03")
    screen.until("was stopped, its queue drained")
    screen.type("echo code $?; exit 0\n")
    screen.until("code 130")
    assert (screen.wait(), world.state.daemons) == (0, [])


def test_a_background_job_that_reads_stops_until_it_is_in_front(screens: list[Screen]) -> None:
    screens.append(screen := on_terminal("bash", "--norc", "--noprofile", "-i"))
    command = shlex.join(gpushare_run("--", "sh", "-c", "read x; echo got $x; exit 4"))
    screen.type(f"{command} &\n")
    # The shell says so before its next prompt.
    deadline = time.monotonic() + 120
    while "Stopped" not in screen.read():
        assert time.monotonic() < deadline, screen.text
        screen.type("\n")
        time.sleep(0.2)
    # What is shown from here on: the shell names the command again.
    screen.text = ""
    screen.type("fg\n")
    screen.until("gpushare --host")
    screen.type("hello\n")
    screen.until("got hello")
    screen.type("echo code $?; exit 0\n")
    screen.until("code 4")
    assert screen.wait() == 0
