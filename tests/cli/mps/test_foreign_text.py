"""Hints and commands to copy that hold what others wrote: one word stays one word in a shell."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import GpushareError, TimedOut
from gpushare.host.process import Processes
from gpushare.mps.control import MpsControl
from tests.cli.drive import Cli, World
from tests.mps.fake_daemon import Daemon

EVIL = [
    "a;touch pwned;",
    "$(touch pwned)",
    "`touch pwned`",
    "a b",
    "a'b",
    'a"b',
    "a\nb",
    "a\\b",
    "-rf",
    "\x1b[2Ja",
    "#x",
]


def texts(value: Any) -> Iterator[str]:
    """Yield every text of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)


def commands(text: str) -> Iterator[str]:
    """Yield the parts of a text that look like commands with the pipe directory."""
    for match in re.finditer(r"(?:gpushare mps stop --pipe-directory|CUDA_MPS_PIPE_DIRECTORY=)", text):
        yield text[match.start() :]


def check(document: Any, pipe: str) -> int:
    """Check that the directory is one word wherever a command names it; return how often one does."""
    found = 0
    for text in texts(document):
        for command in commands(text):
            lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = []
            for word in lexer:
                words.append(word)
                if {pipe, f"CUDA_MPS_PIPE_DIRECTORY={pipe}"} & set(words):
                    break
            else:
                raise AssertionError(f"{pipe!r} is no word of {command!r}: {words}")
            found += 1
    return found


@pytest.mark.parametrize("name", EVIL)
def test_a_pipe_directory_is_one_word_in_every_hint(cli: Cli, world: World, sim_dir: Path, name: str) -> None:
    directory = sim_dir / name
    directory.mkdir()
    world.foreign_daemon(directory)
    pipe = str(directory / "p")
    client = world.client()
    met = 0
    for words in (
        ("mps", "start"),
        ("mps", "stop"),
        ("mps", "stop", "--pipe-directory", pipe),
        ("mps", "stop", "--pipe-directory", pipe, "--dry-run", "--yes"),
        ("stop", str(world.state.daemons[0].pid)),
        ("run", "--", "true"),
        ("doctor",),
        ("stop", str(client), "--dry-run"),
    ):
        answer = cli("-o", "json", *words, asks=True)
        met += check(answer.json, pipe)
        told = cli(*words, asks=True)
        assert "\x1b" not in told.out + told.err, words
    assert met >= 6


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/"), min_size=1, max_size=30))
def test_any_directory_is_one_word(name: str) -> None:
    pipe = f"/run/{name}"
    daemon = Daemon()
    daemon.error = TimedOut("x", "y")
    with pytest.raises(TimedOut) as caught:
        MpsControl(daemon, pipe).answers()
    assert pipe in shlex.split(caught.value.hint)


@pytest.mark.parametrize("name", EVIL)
def test_a_program_is_one_word(name: str, sim_dir: Path) -> None:
    path = str(sim_dir / name)
    with pytest.raises(GpushareError) as caught:
        Processes().spawn([path], {})
    assert shlex.split(caught.value.hint.partition(": ")[2]) == ["ls", "-l", path]
    Path(path).write_text("x")
    with pytest.raises(GpushareError) as caught:
        Processes().spawn([path], {})
    assert shlex.split(caught.value.hint.rpartition(": chmod")[2]) == ["+x", path]


@pytest.mark.parametrize("name", [one for one in EVIL if one.isprintable() and "\\" not in one])
def test_env_is_safe_in_a_shell(cli: Cli, sim_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (sim_dir / name).mkdir()
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(sim_dir / name))
    cli("mps", "start").ok()
    text = cli("mps", "env").ok().out
    done = subprocess.run(
        ["sh", "-c", f'{text}\nprintf %s "$CUDA_MPS_PIPE_DIRECTORY"'], cwd=sim_dir, capture_output=True, check=True
    )
    assert done.stdout.decode().startswith(str(sim_dir / name))
    assert not (sim_dir / "pwned").exists()
