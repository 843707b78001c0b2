"""The guard: what it makes of the words that it is told, and that it acts when none comes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.host import guard
from gpushare.host.guard import DONE, Guard
from tests.cli.drive import until
from tests.errors import fails

# What a guard of these tests does: it writes down what it was told.
ACT = """
def act(host, processes, word, path):
    with open(path + ".part", "w") as file:
        file.write(f"{host.spec} {processes} {word or '-'}")
    __import__("os").rename(path + ".part", path)
"""


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guard_test_act.py").write_text(ACT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "note"


@pytest.fixture
def started(note: Path) -> Iterator[Guard]:
    process = Guard("sim:h200", "is tested", "guard_test_act:act", str(note))
    yield process
    process.leave(DONE)
    process.wait()


def test_it_acts_when_nothing_was_said(started: Guard, note: Path) -> None:
    started.announce(41, None)
    started.add_process(42, 1500)
    started.add_process(43, 1600)
    started.remove_process(43)
    started.leave()
    assert started.wait(30.0)
    assert note.read_text() == "sim:h200 {41: None, 42: 1500} -"


def test_it_acts_on_another_word_while_gpushare_lives(started: Guard, note: Path) -> None:
    started.wait_ready()
    started.hand_over("held")
    until(note.exists, "it has acted")
    assert note.read_text() == "sim:h200 {} held"


def test_it_finds_its_own_package(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the site packages, where this checkout is known too."""
    python = note.with_name("python")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    process = Guard("sim:h200", "is tested", "guard_test_act:act", str(note))
    process.leave()
    assert process.wait(30.0)
    assert note.read_text() == "sim:h200 {} -"


def test_it_does_nothing_when_all_is_done(started: Guard, note: Path) -> None:
    started.add_process(42, 1500)
    started.leave(DONE)
    assert started.wait(30.0)
    assert not note.exists()


def test_a_guard_that_is_gone_is_said_before_anything_runs(started: Guard) -> None:
    os.kill(started.pid, 9)
    started.wait()
    started.add_process(42, 1500)
    with pytest.raises(BrokenPipeError):
        started.announce(42, 1500)
    with fails(OperationFailed, "guard_failed", match="the guard, which is tested, is gone: Broken pipe") as caught:
        started.hand_over("held")
    assert "what ended it" in caught.value.hint


def test_one_that_ends_at_once_is_not_waited_for(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    broken = Guard("sim:h200", "is tested", "guard_test_act:act", str(note))
    with pytest.raises(OperationFailed, match="does not start: it ended"):
        broken.wait_ready()


@pytest.mark.parametrize("early", [True, False])
def test_one_that_loads_at_once_acts_alike(early: bool, note: Path) -> None:
    process = Guard("sim:h200", "is tested", "guard_test_act:act", str(note), early=early)
    process.wait_ready()
    process.hand_over("held")
    until(note.exists, "it has acted")
    assert note.read_text() == "sim:h200 {} held"
    process.leave()
    assert process.wait(30.0)


def test_nothing_is_handed_over_to_one_that_cannot_load(note: Path) -> None:
    note.with_name("guard_test_slow.py").write_text("import time; time.sleep(0.2); raise ImportError")
    process = Guard("sim:h200", "is tested", "guard_test_slow:act", early=True)
    process.wait_ready()
    with pytest.raises(OperationFailed, match="it ended"):
        process.hand_over("held")


def test_nothing_in_the_folder_of_the_user_is_loaded(
    note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("signal", "gpushare", "importlib"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text("open('/dev/full', 'w').write('loaded')")
    monkeypatch.chdir(tmp_path / "here")
    started = Guard("sim:h200", "is tested", "guard_test_act:act", str(note))
    started.leave()
    assert started.wait(30.0)
    assert note.exists()


def test_it_starts_without_what_it_does_not_need() -> None:
    """Each swap waits for it, and almost none has anything to do."""
    loaded = "import sys; exec(open(sys.argv[1]).read(), dict(__name__='guard')); print(*sys.modules)"
    words = [sys.executable, "-S", "-c", loaded, guard.__file__]
    modules = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert "__future__" in modules
    assert not {"contextlib", "typing", "subprocess", "gpushare"} & set(modules)
