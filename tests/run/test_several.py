"""Programs of one share: who is stopped and continued."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.run.plain import PlainShare
from gpushare.run.several import Group, Program
from tests.cli.drive import until


@pytest.fixture
def several(host: Host, device: Device) -> Group:
    return Group(host, PlainShare(host, device), set)


@pytest.fixture
def program() -> Iterator[Any]:
    process = subprocess.Popen(["sleep", "600"])
    yield SimpleNamespace(pid=process.pid, runs=True)
    process.kill()
    process.wait()


def stands(host: Host, pid: int) -> bool:
    info = host.processes.describe(pid)
    return info is not None and info.stopped


def test_a_program_stands_still_and_goes_on(host: Host, several: Group, program: Any) -> None:
    several.stop(program)
    until(lambda: stands(host, program.pid), "it stands still")
    several.resume(program)
    until(lambda: not stands(host, program.pid), "it goes on")


def test_whoever_gets_a_pid_after_the_look_gets_no_signal(
    host: Host, several: Group, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = host.processes.identity

    def before(pid: int) -> Identity | None:
        process = identity(pid)
        return None if process is None else Identity(pid, process.started - 1)

    several.resume(program)
    monkeypatch.setattr(host.processes, "identity", before)
    several.stop(program)
    monkeypatch.undo()
    # The kernel stops a process before kill(2) returns, or at its next step.
    with pytest.raises(AssertionError):
        until(lambda: stands(host, program.pid), "it stands still", seconds=0.5)


def test_a_program_that_has_ended_is_not_looked_for_under_its_pid(host: Host, several: Group, program: Any) -> None:
    program.runs = False
    several.stop(program)
    with pytest.raises(AssertionError):
        until(lambda: stands(host, program.pid), "it stands still", seconds=0.5)


# -- what a program prints ---------------------------------------------------------------------------


class Printing:
    """A program that prints what a test wants, and all that was heard of it."""

    def __init__(self, *, redrawn: bool = False) -> None:
        self.status: int | None = None
        self.heard: list[str] = []
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the program closes it
        child: Any = SimpleNamespace(pid=7, poll=lambda: self.status)
        self.program = Program("job", child, self.file, False, lambda line, _: self.heard.append(line), redrawn=redrawn)

    def prints(self, text: str) -> None:
        self.file.write(text.encode())
        self.program.read_output()

    def ends(self, status: int = 0) -> None:
        self.status = status
        self.program.read_output()


@given(st.lists(st.floats(0.001, 1e6), max_size=8), st.data())
def test_in_which_pieces_it_is_printed_does_not_matter(values: list[float], data: st.DataObject) -> None:
    lines = [f"step {place} räte={value!r}" for place, value in enumerate(values)]
    raw, pieces = "".join(f"{line}\n" for line in lines).encode(), []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        pieces.append(raw[:size])
        raw = raw[size:]
    printing = Printing()
    for piece in pieces:
        printing.file.write(piece)
        printing.program.read_output()
    printing.ends()
    assert printing.heard == lines


def test_a_progress_bar_draws_over_itself() -> None:
    printing = Printing(redrawn=True)
    printing.prints("\r 1% 10.0it/s")
    assert printing.heard == []
    printing.prints("\r 2% 11.0it/s\r 3% 12")
    assert printing.heard == [" 1% 10.0it/s", " 2% 11.0it/s"]
    printing.ends()
    assert printing.heard[2:] == [" 3% 12"]
    assert printing.program.last_line == "3% 12"


def test_ends_of_line_of_windows_are_one_end() -> None:
    printing = Printing(redrawn=True)
    printing.prints("rate=1\r")
    printing.prints("\nrate=2\r\n")
    printing.ends()
    assert printing.heard == ["rate=1", "rate=2"]


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    printing = Printing()
    for _ in range(100):
        printing.prints("x" * 10_000)
    assert len(printing.program._rest) <= 64 * 1024 + 10_000
    assert len(printing.program.last_line) <= 200
    printing.ends()
