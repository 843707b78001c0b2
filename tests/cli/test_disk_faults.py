"""The disk refuses at any point: every change ends in one error with a hint, never in "a bug in gpushare"."""

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.crashes.world import copy_tree
from gpushare.host.records import replace_file
from gpushare.run import jobs
from tests.cli.drive import H200, Cli, World, until

ERRORS = [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOTDIR, errno.EROFS]
JOB = ("sleep", "0.02")
# What is run to get there, and the verb whose system calls fail.
VERBS: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "mps start": ((), ("mps", "start", "--exclusive", "--threads", "50")),
    "mps set": ((("mps", "start"),), ("mps", "set", "--threads", "40")),
    "mps stop": ((("mps", "start", "--exclusive"),), ("mps", "stop")),
    "timeslice set": ((), ("timeslice", "set", "long")),
    "mig create": ((("mig", "enable", "-y"),), ("mig", "create", "3g.71gb", "1g.18gb", "-y")),
    "mig destroy": ((("mig", "enable", "-y"), ("mig", "create", "1g.18gb", "-y")), ("mig", "destroy", "all", "-y")),
    "mig enable": ((), ("mig", "enable", "-y")),
    "mig name": ((("mig", "enable", "-y"), ("mig", "create", "1g.18gb", "-y")), ("mig", "name", "a", "1g.18gb:6")),
    "run": ((), ("run", "--", *JOB)),
    "farm --copies": ((), ("farm", "--copies", "2", "--", *JOB)),
    "run --production": ((), ("run", "--production", "web", "--", *JOB)),
    "capture": ((("mps", "start"),), ("capture",)),
    "doctor": ((("mps", "start"),), ("doctor",)),
    "status": ((("mps", "start"),), ("status",)),
}


class Faults:
    """Makes the N-th call below the directories fail that could change or open something there."""

    def __init__(self, *directories: Path) -> None:
        self._below = tuple(f"{directory}/" for directory in directories)
        self.at: int | None = None
        self.error = 0
        self.count = 0

    def _hit(self, path: Any, dir_fd: Any = None) -> None:
        if isinstance(path, int):
            with contextlib.suppress(OSError):
                path = real["readlink"](f"/proc/self/fd/{path}")
        with contextlib.suppress(TypeError):
            path = os.fsdecode(path)
        if not isinstance(path, str) or not f"{path}/".startswith(self._below):
            return
        self.count += 1
        if self.count == self.at:
            raise OSError(self.error, os.strerror(self.error), path)

    def wrapped(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            self._hit(path)
            return real[name](path, *rest, **named)

        return call


NAMES = ("open", "mkdir", "replace", "rename", "unlink", "link", "fsync", "write", "chmod", "fchmod", "readlink")
real: dict[str, Any] = {name: getattr(os, name) for name in NAMES}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, world: World) -> Faults:
    found = Faults(world.directory / "run", world.host.state_directory)
    for name in NAMES:
        if name != "readlink":
            monkeypatch.setattr(os, name, found.wrapped(name))
    opened = io.open

    def open_file(path: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(path, int):
            found._hit(path)
        return opened(path, *rest, **named)

    monkeypatch.setattr(builtins, "open", open_file)
    monkeypatch.setattr(io, "open", open_file)
    return found


# Where a run fails, its guard goes on by itself.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_refuses_is_no_bug(
    verb: str, cli: Cli, world: World, faults: Faults, monkeypatch: pytest.MonkeyPatch, sim_dir: Path, tmp_path: Path
) -> None:
    before, words = VERBS[verb]
    monkeypatch.setattr("gpushare.sim.state.replace_file", _write_quietly)
    cli("sim", "reset", "--yes")
    for command in before:
        cli(*command).ok()
    copy_tree(sim_dir, tmp_path / "before")

    def begin() -> None:
        # A guard of the run before may still be writing.
        until(renewed, "the directory is as it was")

    def renewed() -> bool:
        shutil.rmtree(sim_dir, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            copy_tree(tmp_path / "before", sim_dir)
            return True
        return False

    faults.count = 0
    cli(*words)
    total = faults.count
    assert verb in {"status", "doctor", "capture", "timeslice set"} or total > 0
    # Each error at some of the points, each point with some of the errors.
    for number in range(1, total + 1):
        begin()
        faults.count, faults.error = 0, ERRORS[number % len(ERRORS)]
        faults.at = number
        answer = cli(*words)
        faults.at = None
        shown = (verb, number, errno.errorcode[faults.error], answer)
        assert "unexpected" not in answer.err, shown
        assert "Traceback" not in answer.err, shown
        assert answer.code == 0 or verb == "doctor" or len(answer.lines("error")) >= 1, shown
        assert len(answer.lines("hint")) >= len(answer.lines("error")), shown
    gc.collect()


def _write_quietly(path: Path, text: str) -> None:
    # The host itself, which is a GPU and no file, never fails here.
    temporary = f"{path}.new"
    descriptor = real["open"](temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        real["write"](descriptor, text.encode())
    finally:
        os.close(descriptor)
    real["replace"](temporary, path)


def test_what_a_crash_left_is_removed_by_the_next_of_its_kind(cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    cli("mig", "status").ok()
    run, state = world.directory / "run", world.host.state_directory
    state.mkdir(parents=True, exist_ok=True)
    left = [next((run / "mps").iterdir()) / ".daemon-abcd1234", world.directory / ".state-abcd1234"]
    for path in left:
        path.write_text("half")
    cli("mps", "set", "--threads", "40").ok()
    assert not any(path.exists() for path in left)
    (run / "jobs").mkdir(mode=0o755)
    half = run / "jobs" / ".web-abcd1234"
    half.write_text("half")
    jobs.write_record(world.host, jobs.JobRecord(name="web", pid=1, started=None, devices=("GPU-1",)))
    assert not half.exists()


def test_a_state_that_is_broken_or_no_file_is_one_error(cli: Cli, world: World) -> None:
    cli("status").ok()
    cli("timeslice", "set", "long").ok()
    path = world.directory / "state.json"
    for spoil in (lambda: path.write_text("{"), lambda: path.write_text('{"gpus": 1}'), lambda: os.mkfifo(path)):
        path.unlink(missing_ok=True)
        spoil()
        answer = cli("status", host=H200)
        assert (answer.code, len(answer.lines("error")), len(answer.lines("hint"))) == (1, 1, 1), answer
        assert "unexpected" not in answer.err
    path.unlink()


def test_a_temporary_file_is_removed_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "a.json", "text")
    assert os.listdir(tmp_path) == []
