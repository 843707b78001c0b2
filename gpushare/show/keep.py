"""``gpushare timeslice keep``: what happens to processes, one line or document each time, and what would happen."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from gpushare.base.errors import GpushareError
from gpushare.base.units import counted, format_slice
from gpushare.show.live import document_of_look
from gpushare.show.render import form_of, write_error, write_notes
from gpushare.show.result import Column, OutputFormat, Result, Table, failed_result
from gpushare.show.text import one_line, put
from gpushare.timeslice.keep import Event, Verdict

_COMMAND = "timeslice keep"
_TEXT = frozenset({OutputFormat.TABLE, OutputFormat.PLAIN})


@dataclass(frozen=True, kw_only=True)
class KeepAnswer:
    """What `timeslice keep` did at a time, in seconds since 1970."""

    at: float
    file: str | None
    rules: int
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class KeepPlanAnswer:
    """The answer of `timeslice keep --dry-run`."""

    dry_run: bool
    file: str
    processes: tuple[Verdict, ...]


class KeepReport:
    """Tells what `timeslice keep` does: a line per event, or a document per look in which something happened."""

    def __init__(self, stream: IO[str], output: OutputFormat, *, quiet: bool = False) -> None:
        """Tell on a stream; notes go to stderr, unless ``quiet``."""
        self._stream, self._quiet = stream, quiet
        self._form = form_of(output, terminal=stream.isatty())
        self._header = True
        self._file: str | None = None
        self._rules = 0
        # Whether the next events must first tell that a file is followed.
        self._file_is_new = False

    def follows(self, path: str, rules: int) -> None:
        """Note that a file is followed from now on, to be told with the next events."""
        self._file = path
        self._rules = rules
        self._file_is_new = True

    def events(self, events: Sequence[Event]) -> None:
        """Tell what happened since the last call, and that a new file is followed; nothing if there is neither."""
        file_is_new = self._file_is_new
        self._file_is_new = False
        if self._form in _TEXT:
            if file_is_new and not self._quiet:
                note = f"following {counted(self._rules, 'rule')} of {self._file}; Ctrl-C puts everything back"
                write_notes([note], sys.stderr)
            put(self._stream, "".join(f"{one_line(str(event))}\n" for event in events))
        elif events or file_is_new:
            # A document without events tells of the file.
            answer = KeepAnswer(at=time.time(), file=self._file, rules=self._rules, events=tuple(events))
            table = Table(name="events", columns=_EVENTS, rows=answer.events)
            self._put(Result(command=_COMMAND, data=answer, csv=table))

    def failed(self, error: GpushareError) -> None:
        """Tell that the file was not read again; the earlier rules stay."""
        restated = error.restated(message=f"{error.message}; the earlier rules stay")
        if self._form in {OutputFormat.JSON, OutputFormat.YAML}:
            self._put(failed_result(_COMMAND, restated))
        write_error(restated, sys.stderr)

    def _put(self, result: Result) -> None:
        text = document_of_look(result, self._form, self._stream, header=self._header)
        self._header = False
        put(self._stream, text)


_EVENTS = (
    Column("kind", "event"),
    Column("pid", "PID", right=True),
    Column("user", "user"),
    Column("gpu", "GPU", right=True),
    Column("before_us", "before"),
    Column("slice_us", "slice"),
    Column("rule", "rule"),
    Column("why", "why"),
)


def planned_result(verdicts: Sequence[Verdict], path: str) -> Result:
    """Return which rule is for which process, for ``--dry-run``."""
    answer = KeepPlanAnswer(dry_run=True, file=path, processes=tuple(verdicts))
    columns = (
        Column("pid", "PID", right=True),
        Column("user", "user", rank=1),
        Column("name", "name", rank=3),
        Column("gpu", "GPU", right=True),
        Column("rule", "rule"),
        Column("outcome", "gives", rank=2),
        Column("slice_us", "slice", right=True, format=format_slice),
        Column("why", "why", rank=4, optional=True),
    )
    table = Table(name="processes", columns=columns, rows=answer.processes, empty="no process is on a GPU")
    notes = (
        f"rules are named by line and column in {path}; nothing is changed",
        "the time-slices that the processes have now were not read: the driver's default of 2.048ms is assumed",
    )
    return Result(command=_COMMAND, data=answer, tables=(table,), notes=notes)
