"""What can be done in the cockpit: each action is a verb of gpushare, run as a program of its own."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpushare.base.errors import ExitCode
from gpushare.show.text import complete_commands

if TYPE_CHECKING:
    from gpushare.base.model import ListedJob

# As `python -m gpushare`, which would look for gpushare in the working directory first.
_MAIN: Final = "import sys; sys.path.insert(0, {!r}); from gpushare.cli import main; sys.exit(main())"
_MOST_BYTES: Final = 16 << 20
_LONGEST_LINE: Final = 1 << 16
# A document of a verb (`Result.envelope`).
Document = Mapping[str, Any]
Answering = Callable[[Sequence[str]], Awaitable[Document]]


class Action(NamedTuple):
    """One action on a job. ``words`` makes the command line, from the job and what the user typed, if ``asks``.

    ``mps``: only a client of an MPS daemon has it; another job may be on a GPU with a neighbour's daemon.
    """

    key: str
    title: str
    words: Callable[[ListedJob, str], Sequence[str]]
    asks: str | None = None
    example: str = ""
    mps: bool = False

    def fits(self, job: ListedJob) -> bool:
        """Return whether a job can have this done to it."""
        return not self.mps or (job.way is not None and job.way.endswith("mps"))


def _job_word(job: ListedJob) -> str:
    """Return how a command line names a job: by its PID, which is sure, or by its name."""
    return str(job.pid) if job.pid is not None else str(job.name)


def _limit_words(job: ListedJob, text: str) -> Sequence[str]:
    # An instance has a daemon of its own.
    devices = job.device_uuids if job.mig_profile is not None else job.gpu_indexes
    return ["mps", "set", *(["-g", ",".join(map(str, devices))] if devices else []), *text.split()]


ACTIONS: Final = (
    Action("s", "stop it, in the way that is safe for its neighbours", lambda job, _: ["stop", _job_word(job)]),
    Action("p", "pause it: off the GPU at once", lambda job, _: ["pause", _job_word(job)]),
    Action("r", "resume it", lambda job, _: ["resume", _job_word(job)]),
    Action("w", "swap it out to host memory", lambda job, _: ["swap", "out", _job_word(job)]),
    Action("b", "bring it back from host memory", lambda job, _: ["swap", "in", _job_word(job)]),
    Action("n", "set its time-slice or weight", lambda job, text: ["timeslice", *(["set", text] if text else ["reset"]), _job_word(job)], "time-slice, or weight; empty restores it", "500us, or 3x: three times the usual one"),
    Action("m", "limits of its MPS daemon", _limit_words, "options of mps set, for clients that start from now on", "--threads 50 --memory 8G", mps=True),
    Action("v", "move it to another GPU", lambda job, text: ["move", _job_word(job), *(["-g", text] if text else [])], "to which GPU; empty: any of the same model", "1"),
)  # fmt: skip


def command_of(words: Sequence[str]) -> str:
    """Return a command line as it is typed."""
    return shlex.join(["gpushare", *words])


def argv_of(spec: str, words: Sequence[str]) -> list[str]:
    """Return the argv that runs a verb on a host by this gpushare: the one that lies here, whatever PATH has."""
    return [sys.executable, "-c", _MAIN.format(str(Path(__file__).resolve().parents[2])), "--host", spec, *words]


async def run_verb(spec: str, words: Sequence[str]) -> Document:
    """Run a verb and return its document with its exit code; one that writes none gets an error that says so."""
    process = await asyncio.create_subprocess_exec(
        *argv_of(spec, ["-o", "json", *words]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_MOST_BYTES,
    )
    try:
        out, _ = await process.communicate()
    finally:
        # The screen was closed; a verb that changes something ends in order.
        if process.returncode is None:
            process.terminate()
    try:
        document = json.loads(out)
    except ValueError:
        error = {
            "code": "no_answer",
            "message": f"it ended with exit code {process.returncode}",
            "hint": f"try it: {command_of(words)}",
        }
        document = {"status": "error", "data": None, "errors": [error]}
    return {**document, "exit_code": process.returncode}


def plan_lines(document: Document, words: Sequence[str]) -> list[tuple[str, str]]:
    """Return a plan for people, with colours: its steps and commands, what it takes, how it is undone."""
    data = document.get("data") or {}
    lines = [(command_of(words), "dim"), ("", "text")]
    for number, step in enumerate(data.get("steps") or (), 1):
        lines.append((f"{number}. {step['what']}", "text"))
        if step["command"] is not None:
            lines.append((f"   $ {step['command']}", "dim"))
    for loss in data.get("consent") or ():
        reasons = f" ({', '.join(loss['why'])})" if loss["why"] else ""
        lines.append((f"this {loss['action']} {loss['what']}{reasons}", "warn"))
    if data.get("undo"):
        lines.append((complete_commands(f"undo: {data['undo']}"), "dim"))
    return lines


def error_lines(document: Document, words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the errors of a document for people; where root is missing, the command with sudo."""
    lines: list[tuple[str, str]] = []
    for error in document.get("errors") or ():
        lines += [(str(error["message"]), "bad"), (complete_commands(error["hint"] or ""), "text")]
    if document.get("exit_code") == ExitCode.NO_PERMISSION:
        lines.append((complete_commands(f"as root: sudo {command_of(words)}"), "warn"))
    return lines


def needs_consent(document: Document) -> bool:
    return any(error["code"] == "needs_consent" for error in document.get("errors") or ())


def failed(document: Document) -> bool:
    return document.get("status") == "error"


async def follow_output(spec: str, job: str, add: Callable[[Sequence[str]], None]) -> None:
    """Hand on what a job prints, in lines, until it has ended or this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *argv_of(spec, ["logs", "-f", "--lines", "1000", job]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    if process.stdout is None:
        return
    rest = b""
    try:
        while block := await process.stdout.read(1 << 16):
            # A progress bar ends its lines with a carriage return, and what is not text may have no ends at all.
            *lines, rest = re.split(rb"\r?\n|\r", rest + block)
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            add([line.decode(errors="replace") for line in lines])
        if rest:
            add([rest.decode(errors="replace")])
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
