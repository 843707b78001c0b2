"""The table of ways: what each way of sharing does and does not promise, with sources.

The texts are those of NVIDIA's table of 2022 (*published*) and what is true today, by driver (*today*);
the rules read the levels. All of it is data: ``gpushare/data/ways.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpushare.advice.ways import keys_named
from gpushare.base.errors import BadUsage
from gpushare.base.model import Way
from gpushare.base.package import package_text
from gpushare.base.units import quoted

COLUMNS: Final = (Way.STREAMS, Way.MPS, Way.TIMESLICE, Way.MIG, Way.VGPU)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of a statement: a document, the driver's source code, or a measurement."""

    key: str
    title: str
    where: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: the question that it answers, and its levels from weakest to strongest."""

    key: str
    title: str
    published: str
    question: str
    levels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A special setup of a way, such as static MPS partitions or MIG-backed vGPU.

    ``since`` is the first driver branch that has it; None means all of them.
    """

    key: str
    level: str
    text: str
    since: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell on one driver: the level without options, and the number where the row counts something."""

    way: Way
    row: str
    published: str
    today: str
    level: str
    sources: tuple[Source, ...]
    # The first driver branch for which ``today`` and ``level`` are true; None means all of them.
    since: int | None = None
    limit: int | None = None
    options: tuple[Option, ...] = ()
    contradiction: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """The whole table. ``titles`` are the ways' display names, ``entries`` its cells for all drivers, as in the file."""

    rows: tuple[Row, ...]
    titles: Mapping[Way, str]
    sources: Mapping[str, Source]
    entries: Mapping[tuple[Way, str], Mapping[str, Any]]
    # The rules of one answer look at the same cells some hundred times.
    _cells: dict[tuple[Way, str, str | None], Cell] = field(default_factory=dict, compare=False, repr=False)

    def row(self, key: str) -> Row:
        """Return the row of a key that is in the table; those of users are named by `row_named`."""
        return next(row for row in self.rows if row.key == key)

    def cell(self, way: Way, row_key: str, driver: str | None = None) -> Cell:
        """Return a cell as it is on a driver (``580.159.04``, ``580``); None means the newest in the table."""
        if (way, row_key, driver) in self._cells:
            return self._cells[way, row_key, driver]
        row = self.row(row_key)
        entry = self.entries[way, row_key]
        branch = driver_branch(driver)
        text_since, today = _newest_on(dated_values(entry["today"], "text"), branch)
        level_since, level = _newest_on(dated_values(entry["level"], "level"), branch)
        limit_since, limit = _newest_on(dated_values(entry.get("limit"), "limit"), branch)
        branches = [since for since in (text_since, level_since, limit_since) if since is not None]
        cell = self._cells[way, row_key, driver] = Cell(
            way=way,
            row=row.key,
            published=entry["published"],
            today=entry["published"] if today is None else today,
            level=row.levels[0] if level is None else level,
            sources=tuple(self.sources[key] for key in entry["source"]),
            since=max(branches, default=None),
            limit=limit,
            options=tuple(option for option in options_of(entry) if _is_valid_on(option.since, branch)),
            contradiction=entry.get("contradiction"),
            note=entry.get("note"),
        )
        return cell

    def level(self, way: Way, row_key: str, driver: str | None = None, *, option: str | None = None) -> str:
        """Return the level of a cell, or of its option where the driver has that."""
        cell = self.cell(way, row_key, driver)
        return next((choice.level for choice in cell.options if choice.key == option), cell.level)

    def at_least(self, row_key: str, level: str, wanted: str) -> bool:
        """Return whether a level of a row is at least as strong as the wanted one."""
        levels = self.row(row_key).levels
        return levels.index(level) >= levels.index(wanted)


def driver_branch(driver: str | None) -> int | None:
    """Return the branch of a driver version (580 of ``580.159.04``); None if unknown."""
    match = re.match(r"\d{1,5}(?!\d)", driver or "", re.ASCII)
    return int(match.group()) if match else None


class _DatedValue(NamedTuple):
    """A value of a cell, and the first driver branch for which it is true; None means all of them."""

    since: int | None
    value: Any


def dated_values(value: Any, name: str) -> list[_DatedValue]:
    """Return the values of a cell from old to new; in the file they are none, one, or a list of ``{since, NAME}``."""
    if value is None:
        return []
    several = value if isinstance(value, list) else [{name: value}]
    return [_DatedValue(entry.get("since"), entry[name]) for entry in several]


def _newest_on(dated: Sequence[_DatedValue], branch: int | None) -> _DatedValue:
    """Return the newest value that is true on a driver branch; the value is None if there is none."""
    valid = [dated_value for dated_value in dated if _is_valid_on(dated_value.since, branch)]
    return valid[-1] if valid else _DatedValue(None, None)


def _is_valid_on(since: int | None, branch: int | None) -> bool:
    """Return whether what is true since a driver branch is so on another; an unknown one is taken as the newest."""
    return since is None or branch is None or since <= branch


def options_of(entry: Mapping[str, Any]) -> list[Option]:
    """Return the options of a cell of the file, on any driver."""
    return [Option(key=key, **option) for key, option in (entry.get("options") or {}).items()]


def load_table() -> Table:
    """Return the table of the package. tests/advice/test_table.py checks the file."""
    return parse_table(package_text("ways.yaml"))


def parse_table(text: str) -> Table:
    """Return the table of a YAML text, as ``ways.yaml`` has it."""
    import yaml

    raw = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe one
    sources = {key: Source(key=key, **entry) for key, entry in raw["sources"].items()}
    rows = tuple(Row(**{**entry, "levels": tuple(entry["levels"])}) for entry in raw["rows"])
    columns = {way: raw["ways"][way.value] for way in COLUMNS}
    return Table(
        rows=rows,
        titles={way: column["title"] for way, column in columns.items()},
        sources=sources,
        entries={(way, row.key): column["cells"][row.key] for way, column in columns.items() for row in rows},
    )


# What users call the rows, too.
_ROWS: Final = {
    "partition_type": ("type", "partition"),
    "max_partitions": ("max", "partitions", "clients", "number"),
    "sm_isolation": ("sm", "sms", "compute", "performance"),
    "memory_protection": ("quota",),
    "memory_bandwidth_qos": ("bandwidth", "qos"),
    "error_isolation": ("errors", "fault", "faults", "faultisolation"),
    "interop": ("ipc",),
    "reconfigure": ("change",),
    "telemetry": ("metrics",),
    "target_use": ("use", "usecases", "targetusecases"),
}


def row_named(table: Table, text: str) -> Row:
    """Return the row that a user names: its key, its title, or an unambiguous part of one.

    Raises:
        BadUsage: there is none, or several fit.
    """
    names = {row.key: (row.key, row.title, row.published, *_ROWS.get(row.key, ())) for row in table.rows}
    keys = keys_named(text, names)
    if len(keys) == 1:
        return table.row(keys[0])
    if keys:
        raise BadUsage(
            f"{quoted(text)} may mean {' or '.join(table.row(key).title for key in keys)}",
            f"give one of: {', '.join(keys)}",
            code="no_row",
        )
    raise BadUsage(
        f"{quoted(text)} is not a row of the table",
        f"its rows: {', '.join(row.key for row in table.rows)}",
        code="no_row",
    )
