"""The result of a command: one frozen object, one JSON contract, many renderings.

The envelope's keys are pinned by a test: ``schema, command, status, data, errors``. Numbers are
numbers, units stand in the keys, unknown is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum
from typing import Any, Final

from gpushare.errors import ExitCode, GpushareError
from gpushare.values import dataclass

SCHEMA: Final = 1


class OutputFormat(str, Enum):
    """How a result is written; ``auto`` is table on a terminal and plain off one."""

    AUTO = "auto"
    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def plain_value(value: Any) -> str:
    """Return a value as text: ``-`` for unknown, yes and no for booleans, the title of an enum."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(getattr(value, "title", value.value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: ``key`` of the row, ``title`` for people, and when it goes.

    ``rank`` 0 stays always; on a narrow terminal the column with the highest rank is dropped first.
    ``whole`` marks an id that is never cut. ``style`` gives the Rich style of a value, or None.
    ``least`` lets long text (a command line) be cut to that many characters before any column is
    dropped. ``group`` blanks a value that repeats the row above, ``optional`` leaves the column out
    when no row has a value; both on a terminal only, so that plain output keeps its columns.
    """

    key: str
    title: str
    right: bool = False
    rank: int = 0
    whole: bool = False
    least: int | None = None
    group: bool = False
    optional: bool = False
    format: Callable[[Any], str] = plain_value
    style: Callable[[Any], str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of raw values under columns. ``empty`` is what to say when there are no rows.

    ``lines``, if given, are what a terminal shows in place of the columns: text and Rich style;
    ``draw``, if given, returns them as Rich texts for a width (columns).
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    title: str | None = None
    empty: str | None = None
    lines: tuple[tuple[str, str | None], ...] | None = None
    draw: Callable[[int], list[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command answers with.

    ``data`` is for machines, ``tables`` and ``text`` for people (text before tables), ``csv`` the one
    rectangular table of ``-o csv`` (default: the first of ``tables``), ``notes`` go to stderr as
    ``note:`` lines, ``errors`` to stderr as ``error:`` and ``hint:`` lines.
    """

    command: str
    data: Any = None
    tables: tuple[Table, ...] = ()
    text: str | None = None
    csv: Table | None = None
    notes: tuple[str, ...] = ()
    errors: tuple[GpushareError, ...] = ()
    exit_code: ExitCode | int = ExitCode.OK
    # Nothing of what was asked for succeeded; the data says what was tried.
    all_failed: bool = False

    @property
    def status(self) -> str:
        """Return ``ok``, ``partial`` (some of it failed) or ``error`` (all of it failed)."""
        if not self.errors:
            return "ok"
        return "error" if self.data is None or self.all_failed else "partial"

    def envelope(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "status": self.status,
            "data": jsonable(self.data),
            "errors": [
                {"code": error.code, "message": error.message, "hint": error.hint, "gpu": error.gpu}
                for error in self.errors
            ],
        }


def failure(command: str, error: GpushareError) -> Result:
    """Return the result of a command that ended in an error."""
    return Result(command=command, errors=(error,), exit_code=error.exit_code)


def jsonable(value: Any) -> Any:
    """Return a value as JSON types: dataclasses as objects, enums by their title, tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, IntEnum):
        return getattr(value, "title", int(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return value
