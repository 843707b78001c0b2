"""The result of a command: one frozen object, one JSON contract, many renderings.

A test fixes the keys of the envelope: ``schema, command, status, data, errors``. Numbers are numbers, units are part of
the keys, unknown is null.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, fields, is_dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, Final

from gpushare.base.errors import ExitCode, GpushareError
from gpushare.base.values import NOT_STORED, dataclass
from gpushare.show.text import well_formed

SCHEMA: Final = 1


class OutputFormat(str, Enum):
    """The output format; ``auto`` is table on a terminal, else plain."""

    AUTO = "auto"
    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def plain_value(value: Any) -> str:
    """Return a value as text: ``-`` for unknown, yes and no for booleans, the title of an enum of numbers."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        if isinstance(value, IntEnum):
            return str(getattr(value, "title", value.value))
        # `title` of an enum of texts is the method of `str`.
        return str(value.value)
    if isinstance(value, float | Decimal):
        return f"{float(value):g}"
    return str(value)


def format_date(at: float) -> str:
    """Return a time in seconds since 1970 as ``2026-11-28 08:01:12``, local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


@dataclass(frozen=True)
class Column:
    """One column: its key, the title for people, what it shows of a row (the field ``key``, or ``of``), and how.

    ``format`` returns the text of a value, ``unknown`` is that of None.

    On a narrow terminal the column with the highest ``rank`` is dropped first; 0 is never dropped. ``whole`` marks an id
    that is never cut. ``style`` returns the Rich style of a value, or None. Long text (a command line) may be cut to
    ``least`` characters before a column is dropped. ``wrap`` marks the last column, of sentences: on a terminal it is
    broken between words instead of cut. ``group`` blanks a value that repeats the row above, ``optional`` drops the column
    if no row has a value; both only on a terminal, so that plain output keeps its columns.
    """

    key: str
    title: str
    _: KW_ONLY
    right: bool = False
    rank: int = 0
    whole: bool = False
    least: int | None = None
    wrap: bool = False
    group: bool = False
    optional: bool = False
    of: Callable[[Any], Any] | None = None
    format: Callable[[Any], str] = plain_value
    unknown: str = "-"
    style: Callable[[Any], str | None] | None = None

    def value(self, row: Any) -> Any:
        """Return what the column shows of a row: a value class, or a mapping, where a missing key is unknown."""
        if self.of is not None:
            return self.of(row)
        return row.get(self.key) if isinstance(row, Mapping) else getattr(row, self.key)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows, value classes or mappings, under columns. ``empty`` is the text for no rows.

    ``lines``, if given, are what people read instead of the columns: text and Rich style; ``draw``, if given, returns
    them as Rich texts for a terminal's width in columns. On a screen that is too short for all rows, those that are ``idle`` become
    one line, their ``folded`` text.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Any, ...]
    title: str | None = None
    empty: str | None = None
    lines: tuple[tuple[str, str | None], ...] | None = None
    draw: Callable[[int], list[Any]] | None = None
    idle: Callable[[Any], bool] | None = None
    folded: Callable[[list[Any]], str] | None = None


def record_table(
    name: str,
    keys: Sequence[str],
    rows: Iterable[Any],
    of: Mapping[str, Callable[[Any], Any]] | None = None,
    **more: Any,
) -> Table:
    """Return a table for programs (CSV), a record per row, with its ``keys`` as the titles of the columns.

    ``of`` has, by key, the functions of the columns that are no field of a row.
    """
    columns = tuple(Column(key, key, of=(of or {}).get(key)) for key in keys)
    return Table(name=name, columns=columns, rows=tuple(rows), **more)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a command.

    ``data`` is for machines; ``text`` and ``tables`` are for people, in this order. ``csv`` is the table of ``-o csv``, by
    default the first of ``tables``. ``notes`` go to stderr as ``note:`` lines, ``errors`` as ``error:`` and ``hint:`` lines.
    ``done`` is what a change has put in force, each with the command that undoes it: one line each, none with --quiet.
    """

    # Empty: the command of the command line.
    command: str = ""
    data: Any = None
    tables: tuple[Table, ...] = ()
    text: str | None = None
    done: tuple[tuple[str, str | None], ...] = ()
    csv: Table | None = None
    notes: tuple[str, ...] = ()
    errors: tuple[GpushareError, ...] = ()
    # None: that of the first error, or 0.
    exit_code: ExitCode | int | None = None
    # Nothing succeeded; the data says what was tried.
    all_failed: bool = False

    @property
    def status(self) -> str:
        """Return ``ok``, ``partial`` (some of it failed) or ``error`` (all of it failed)."""
        if not self.errors:
            return "ok"
        return "error" if self.data is None or self.all_failed else "partial"

    def envelope(self) -> dict[str, Any]:
        """Return the JSON document: schema, command, status, data and errors."""
        errors = [{key: getattr(error, key) for key in ("code", "message", "hint", "gpu")} for error in self.errors]
        document: dict[str, Any] = jsonable(
            {"schema": SCHEMA, "command": self.command, "status": self.status, "data": self.data, "errors": errors}
        )
        return document


def failed_result(command: str, error: GpushareError) -> Result:
    return Result(command=command, data=error.data, errors=(error,), all_failed=True)


def json_names(kind: Any) -> list[str]:
    """Return the keys of a value class in JSON: its fields, without `NOT_STORED` ones, and its ``json_properties``."""
    if not is_dataclass(kind):
        return list(kind._fields)
    stored = [field.name for field in fields(kind) if field.metadata != NOT_STORED]
    return [*stored, *getattr(kind, "json_properties", ())]


def jsonable(value: Any) -> Any:
    """Return a value as JSON types: dataclasses as objects, enums by title, tuples as lists.

    What JSON cannot represent is changed: NaN is null, and a lone surrogate becomes U+FFFD.
    """
    if (is_dataclass(value) or hasattr(value, "_fields")) and not isinstance(value, type):
        return {name: jsonable(getattr(value, name)) for name in json_names(type(value))}
    if isinstance(value, IntEnum):
        return getattr(value, "title", int(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {well_formed(str(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        # Else the order of texts would differ from run to run.
        return sorted(map(jsonable, value), key=str)
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value
