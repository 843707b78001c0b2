"""Asking ``gpushare advise``, and running what it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from gpushare.cli import main
from tests.cli.drive import Cli, environment


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FARM = words("--processes 4 --memory 2G --users same --no-saturating")
USERS = words("--processes 3 --memory 2G --users different --pattern steady")
PEOPLE = words("--processes 5 --memory 2G --users different --pattern interactive")
PAIR = words("--production 1 --opportunistic 2 --users same --memory 3G")
GROUPS = words("--processes 6 --memory 700M --groups 3 --isolation fault --no-saturating")
GROUPS_OF_PEOPLE = words("--processes 6 --memory 1G --groups 2 --isolation fault --pattern bursty")


def advised(cli: Cli, host: str, asked: str | Sequence[str] = (), *more: str) -> Any:
    """Return the answer as data."""
    asked = asked.split() if isinstance(asked, str) else asked
    return cli("advise", *asked, *more, host=f"sim:{host.removeprefix('sim:')}", output="json").ok().data


def commands(data: Any, key: str = "commands") -> list[str]:
    return [line["command"] for line in data[key] if line["command"]]


def told(data: Any) -> list[str]:
    """Return what each line is for."""
    return [line["what"] for line in data["commands"]]


def shown(cli: Cli, host: str) -> list[Any]:
    looks = (("mig", "status"), ("mps", "status"), ("timeslice", "show"))
    return [cli(*words, host=host, output="json").json["data"] for words in looks]


def captured(cli: Cli, host: str) -> str:
    return cli("capture", host=host).ok().out


COMMAND = r"(?:sudo )?gpushare ([\w\s.,:/*%=+@\"'$-]+)"
# A command, or one whose output the shell evaluates: export NAME=VALUE.
SIMPLE = re.compile(rf'{COMMAND}|eval "\$\({COMMAND}\)"')


def pasted(lines: list[str], spec: str, *, shell: bool = False) -> None:
    """Run lines as somebody who pastes them, and see that they work."""
    code, err = outcome(lines, spec, shell=shell)
    assert code == 0, (lines, err)


def outcome(lines: list[str], spec: str, *, shell: bool = False) -> tuple[int, str]:
    """Run lines in a shell, or in this process if all are simple; return the exit code and what stands on stderr."""
    if shell or not all(SIMPLE.fullmatch(line) or "gpushare" not in line for line in lines):
        script = ["set -e", f'gpushare() {{ "{sys.executable}" -m gpushare "$@"; }}', 'sudo() { "$@"; }', *lines]
        env = environment(GPUSHARE_HOST=spec)
        done = subprocess.run(["bash", "-c", "\n".join(script)], env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr
    err = io.StringIO()
    with mock.patch.dict(os.environ, GPUSHARE_HOST=spec):
        for line in lines:
            out, found = io.StringIO(), SIMPLE.fullmatch(line)
            if found is None:
                subprocess.run(["bash", "-c", line], check=True)
                continue
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                if code := main(shlex.split(os.path.expandvars(found[1] or found[2]))):
                    return code, err.getvalue()
            if found[2]:
                os.environ.update(re.findall(r"^export (\w+)=(\S+)$", out.getvalue(), re.MULTILINE))
    return 0, err.getvalue()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> tuple[str, str]:
    """Ask on a terminal, type the answers, and return what stands on stdout and on stderr."""
    streams = {name: Terminal(typed if name == "stdin" else "") for name in ("stdin", "stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    code = main(["--host", "sim:t4", "advise", *words])
    assert code == 0, streams["stderr"].getvalue()
    return streams["stdout"].getvalue(), streams["stderr"].getvalue()
