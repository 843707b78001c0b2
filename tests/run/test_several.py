"""Programs of one share: who is stopped and continued."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.host.host import Host
from gpushare.host.process import ProcessInfo
from gpushare.run.several import Several
from gpushare.run.share import PlainShare
from gpushare.selection import Device
from tests.cli.drive import until


@pytest.fixture
def several(host: Host, device: Device) -> Several:
    return Several(host, PlainShare(host, device))


@pytest.fixture
def program() -> Iterator[Any]:
    process = subprocess.Popen(["sleep", "600"])
    yield SimpleNamespace(pid=process.pid, runs=True)
    process.kill()
    process.wait()


def stands(host: Host, pid: int) -> bool:
    info = host.processes.describe(pid)
    return info is not None and info.stopped


def test_a_program_stands_still_and_goes_on(host: Host, several: Several, program: Any) -> None:
    several.stop(program)
    until(lambda: stands(host, program.pid), "it stands still")
    several.resume(program)
    until(lambda: not stands(host, program.pid), "it goes on")


def test_whoever_gets_a_pid_after_the_look_gets_no_signal(
    host: Host, several: Several, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = host.processes.describe

    def before(pid: int) -> ProcessInfo | None:
        info = describe(pid)
        return None if info is None else dataclasses.replace(info, started_at=(info.started_at or 0.0) - 1.0)

    several.resume(program)
    monkeypatch.setattr(host.processes, "describe", before)
    several.stop(program)
    monkeypatch.undo()
    # The kernel stops a process before kill(2) returns, or at its next step.
    with pytest.raises(AssertionError):
        until(lambda: stands(host, program.pid), "it stands still", seconds=0.5)


def test_a_program_that_has_ended_is_not_looked_for_under_its_pid(host: Host, several: Several, program: Any) -> None:
    program.runs = False
    several.stop(program)
    with pytest.raises(AssertionError):
        until(lambda: stands(host, program.pid), "it stands still", seconds=0.5)
