"""``gpushare logs``: the output of a job in the background; kept by `gpushare/run/`."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from gpushare.base.errors import BadCombination, ExitCode
from gpushare.base.values import dataclass
from gpushare.cli.options import Command, argument, flag, option, settings, verb
from gpushare.run.output import Output, find_output, gpushare_of, read_blocks, seek_lines
from gpushare.run.output import follow as followed
from gpushare.show.result import OutputFormat, Result, record_table
from gpushare.signals import Ended

# In a document, which is made in memory.
_LINES_IN_A_DOCUMENT: Final = 10_000
_DOCUMENT_BYTES: Final = 16 << 20


@verb(Command)
def logs(
    job: str = argument("JOB", "A job by name or PID; also one that has ended.", default=...),
    follow: bool = flag("-f --follow", "Go on until the job has ended, or Ctrl-C."),
    lines: int | None = option("--lines", "N", "The last N lines. [default: all]", min=0),
) -> Any:
    """Show the output of a job that was started with `gpushare run -d`, byte for byte.

    gpushare keeps the output until a hundred later jobs have ended. As with `docker logs`, it changes nothing, not even
    terminal escapes.
    """
    document = settings.output in {OutputFormat.JSON, OutputFormat.YAML, OutputFormat.CSV}
    if document and follow:
        raise BadCombination(
            f"--follow cannot be combined with -o {settings.output.value}: a document has an end",
            f"gpushare logs {job} -o {settings.output.value}",
        )
    output = find_output(settings.connect(), job)
    try:
        if document:
            return _document_result(output, lines)
        return _print_raw(output, lines, follow=follow)
    except KeyboardInterrupt as error:
        # The way out of --follow is no error.
        return 128 + error.number if isinstance(error, Ended) else int(ExitCode.INTERRUPTED)
    finally:
        os.close(output.descriptor)


def _print_raw(output: Output, lines: int | None, *, follow: bool) -> int:
    """Print an output as bytes: its last ``lines``, or all; with ``follow`` until the job ends. Returns exit code 0."""
    if lines is not None:
        seek_lines(output.descriptor, lines)
    blocks = followed(settings.connect(), output) if follow else read_blocks(output.descriptor)
    stream = sys.stdout.buffer
    for block in blocks:
        stream.write(block)
        stream.flush()
    return 0


@dataclass(frozen=True, kw_only=True)
class LogsAnswer:
    """The answer of `logs`."""

    job: str
    path: str
    running: bool
    # Whether the lines are the whole output.
    complete: bool
    lines: tuple[str, ...]


def _document_result(output: Output, lines: int | None) -> Any:
    """Return the last ``lines`` of an output as a result; not all of a long one, because the result is made in memory."""
    skipped = seek_lines(output.descriptor, _LINES_IN_A_DOCUMENT if lines is None else lines)
    with open(output.descriptor, "rb", closefd=False) as file:
        text = file.read(_DOCUMENT_BYTES).decode(errors="replace")
        cut = bool(file.read(1))
    printed = text.removesuffix("\n").split("\n") if text else []
    return Result(
        data=LogsAnswer(
            job=output.name,
            path=str(output.path),
            running=gpushare_of(settings.connect(), output.name) is not None,
            complete=not skipped and not cut,
            lines=tuple(printed),
        ),
        csv=record_table("lines", ("line",), ({"line": line} for line in printed)),
    )
