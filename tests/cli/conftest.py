"""Fixtures that drive the command line on simulated hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gpushare.cli import main
from gpushare.measure.observe import Clock
from tests.cli.drive import (
    H200,
    Answer,
    Cli,
    Real,
    Refused,
    Started,
    World,
    Write,
    as_script,
    clear_up,
    same,
    start_real,
)
from tests.measure.windows import wait_for_numbers


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, near_handles: None) -> None:
    """Remove variables that change the output, or that a CUDA program would read."""
    for name in ("COLUMNS", "NO_COLOR", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    # A simulated GPU answers as well after a short window.
    monkeypatch.setattr("gpushare.host.activity._WINDOW_SECONDS", 0.02)


@pytest.fixture
def printed_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend each window until every copy has printed in it, however slow the machine is."""
    wait_for_numbers(monkeypatch)


@pytest.fixture
def even_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only sleeps as time while `gpushare observe` records here: a slow machine misses no sample."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        slept[0] += seconds

    told = Clock(monotonic=lambda: slept[0], sleep=sleep)
    monkeypatch.setattr("gpushare.measure.observe.Clock", lambda: told)


@pytest.fixture
def patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a simulated program that hangs time out at once."""
    waited = [0.0]

    def sleep(_seconds: float) -> None:
        waited[0] += 3600.0

    monkeypatch.setattr("gpushare.sim.programs.clock", lambda: waited[0])
    monkeypatch.setattr("gpushare.sim.programs.time", SimpleNamespace(sleep=sleep))


@pytest.fixture
def world() -> World:
    """Return the simulated host with one H200."""
    return World()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file and returns its path."""

    def to_file(content: str | bytes) -> str:
        path = tmp_path / "gpushare.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return to_file


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command in this process, with ``-y`` where it may ask unless ``asks``."""

    def run(*words: str, host: str | None = H200, output: str | None = None, asks: bool = False) -> Answer:
        capsys.readouterr()
        # A common option counts once: words that name the host are not given another.
        host = None if "--host" in words else host
        words = words if asks else as_script(words)
        # By the variable: with the option, every command that is printed has it too.
        with mock.patch.dict(os.environ, {"GPUSHARE_HOST": host} if host else {}):
            code = main([*words, *(["-o", output] if output else [])])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run


@pytest.fixture
def refused(cli: Cli) -> Refused:
    """Return a check that a command is refused properly.

    One ``error:`` line, one ``hint:`` line, the exit code, the same in the JSON document, no traceback,
    and nothing of the host changed. Returns both lines.
    """

    def check(*words: str, code: str, exit_code: int, host: str = H200, asks: bool = False) -> str:
        before = same(host)
        answer = cli(*words, host=host, asks=asks)
        assert answer.code == exit_code, answer
        assert answer.out == ""
        assert len(answer.lines("error")) == 1, answer
        assert len(answer.lines("hint")) == 1, answer
        assert "Traceback" not in answer.err
        document = cli("-o", "json", *words, host=host, asks=asks)
        assert document.code == exit_code
        assert document.json["status"] == "error"
        # The plan, where only consent is missing.
        assert (document.json["data"] is None) is (code != "needs_consent")
        (error,) = document.json["errors"]
        assert error["code"] == code
        assert list(error) == ["code", "message", "hint", "gpu"]
        # The line that would do it repeats the options.
        same_hint = code == "needs_consent" or error["hint"] in answer.err
        assert (error["message"] in answer.err, same_hint) == (True, True)
        if before[0] is not None:
            assert same(host) == before
        return answer.err

    return check


@pytest.fixture
def real(world: World) -> Iterator[Real]:
    """Return a function that starts gpushare as a process; leftovers are ended after the test."""
    processes: list[Any] = []

    def start(*words: str, **named: Any) -> Started:
        started = start_real(*words, **named)
        processes.append(started.process)
        return started

    yield start
    clear_up(processes, world)
