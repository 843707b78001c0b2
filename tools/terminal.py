"""Runs gpushare on simulated hosts as a terminal shows it, always with the same text."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from gpushare.sim.state import FIRST_SIMULATED_PID

PROJECT: Path = Path(__file__).resolve().parent.parent
# The clock of the simulated hosts: Monday, 5 January 2026, 12:00 UTC.
NOON = 1_767_614_400.0
# The PID that a real program is shown with.
_SHOWN_PID = 20411
_SHOWN_RUN_DIRECTORY = "/run/gpushare"


def _noon() -> float:
    return NOON


class _Screen(io.StringIO):
    """What stdout and stderr write to: a terminal, as far as gpushare can tell."""

    def isatty(self) -> bool:
        return True


class Terminal:
    """A shell on a simulated host, in this process: no clock, PID, path or user of this machine shows in its output."""

    def __init__(self, directory: Path) -> None:
        """Keep the simulated hosts in ``directory``."""
        self._directory = directory

    def type(self, line: str) -> str:
        """Run one line (``gpushare ...``, ``cat FILE`` or ``export NAME=VALUE``) and return what it prints.

        Raises:
            ValueError: any other command.
        """
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"] and len(words) == 2 and "=" in words[1]:
            name, _, value = words[1].partition("=")
            os.environ[name] = value
            if name == "GPUSHARE_HOST":
                self._begin(value)
            return ""
        if words[:1] == ["cat"] and len(words) == 2:
            return Path(words[1]).read_text(encoding="utf-8")
        if words[:1] != ["gpushare"] or {"|", "&&", ";", ">", "&"} & set(words):
            message = f"the documents run gpushare, cat and export only: {line}"
            raise ValueError(message)
        if "--host" in words:
            self._begin(words[words.index("--host") + 1])
        return self._shown(self._run(words[1:]))

    def _begin(self, spec: str) -> None:
        """Make the host, used by root, unless it is there."""
        from gpushare.connect import connect
        from gpushare.sim import admin

        connect(spec)
        admin.set_fault(spec, "user", None, "0")

    def _run(self, words: list[str]) -> str:
        from gpushare.cli import main

        screen = _Screen()
        with (
            contextlib.redirect_stdout(screen),
            contextlib.redirect_stderr(screen),
            mock.patch("sys.stdin", io.StringIO()),
        ):
            main(words)
        return screen.getvalue()

    def _shown(self, text: str) -> str:
        run_directory = rf"{re.escape(str(self._directory))}/[0-9a-f]+/run"
        text = re.sub(run_directory, _SHOWN_RUN_DIRECTORY, text)
        text = re.sub(r"(?<=process )\d+", _real_pid, text)
        # What is really waited for: how long depends on the machine.
        return re.sub(r"(?<=drained for )\d+\.\d+ s", "0.31 s", text)


def _real_pid(number: re.Match[str]) -> str:
    return number[0] if int(number[0]) >= FIRST_SIMULATED_PID else str(_SHOWN_PID)


@contextlib.contextmanager
def terminal(*, columns: int, colour: bool = False) -> Iterator[Terminal]:
    """Yield a terminal whose simulated hosts are new; its working directory is the project."""
    # Short, and of one length: MPS pipe directories lie in it, and columns are laid out before paths are replaced.
    directory = Path(tempfile.mkdtemp(prefix="gpushare-", dir="/tmp"))
    here = Path.cwd()
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "COLUMNS": str(columns),
        "GPUSHARE_SIM_DIR": str(directory),
        "TERM": "xterm-256color",
        "TZ": "UTC",
        **({} if colour else {"NO_COLOR": "1"}),
    }
    try:
        with mock.patch.dict(os.environ, environment, clear=True), mock.patch("time.time", _noon):
            time.tzset()
            os.chdir(PROJECT)
            yield Terminal(directory)
    finally:
        os.chdir(here)
        time.tzset()
        shutil.rmtree(directory, ignore_errors=True)
