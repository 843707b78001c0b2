"""The table of mechanisms: what each way of sharing does and does not promise, with sources.

The words are those of NVIDIA's table of 2022 (*published*) and what is true since (*today*, by driver);
the levels are what advice reads. All of it is data: ``gpushare/data/mechanisms.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from gpushare.errors import BadUsage

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")


class Mechanism(str, Enum):
    """The columns of the table."""

    STREAMS = "streams"
    MPS = "mps"
    TIMESLICE = "timeslice"
    MIG = "mig"
    VGPU = "vgpu"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a statement stands: a document, the driver's source, or a measurement."""

    key: str
    title: str
    where: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: ``question`` is what it answers, ``levels`` its values from weakest to strongest."""

    key: str
    title: str
    published_title: str
    question: str
    levels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a mechanism can do when it is set up in a special way: static MPS partitions, MIG-backed vGPU.

    ``since`` is the first driver branch that has it; None: all of them.
    """

    key: str
    level: str
    text: str
    since: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell on one driver. ``level`` is what the mechanism gives without options; ``limit`` a number, where the row has one."""

    mechanism: Mechanism
    row: str
    published: str
    today: str
    level: str
    sources: tuple[Source, ...]
    # The first driver branch for which ``today`` and ``level`` hold; None: all that gpushare knows.
    since: int | None = None
    limit: int | None = None
    options: tuple[Option, ...] = ()
    contradiction: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Dated:
    """A value that holds from a driver branch on."""

    since: int | None
    value: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell as the file has it: for every driver."""

    published: str
    today: tuple[Dated, ...]
    level: tuple[Dated, ...]
    limit: tuple[Dated, ...]
    sources: tuple[str, ...]
    options: tuple[Option, ...] = ()
    contradiction: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """The whole table. ``titles`` are the mechanisms' names for people."""

    rows: tuple[Row, ...]
    titles: Mapping[Mechanism, str]
    sources: Mapping[str, Source]
    entries: Mapping[tuple[Mechanism, str], Entry]

    def row(self, key: str) -> Row:
        """Return a row by its key.

        Raises:
            BadUsage: there is none.
        """
        for row in self.rows:
            if row.key == key:
                return row
        raise BadUsage(
            f"the table has no row '{key}'", f"its rows: {', '.join(row.key for row in self.rows)}", code="no_row"
        )

    def cell(self, mechanism: Mechanism, row_key: str, driver: str | None = None) -> Cell:
        """Return a cell as it is on a driver (``580.159.04``, ``580``); None is the newest that the table knows.

        Raises:
            BadUsage: there is no such row.
        """
        row, entry = self.row(row_key), self.entries[mechanism, row_key]
        branch = driver_branch(driver)
        today, level, limit = (_at(dated, branch) for dated in (entry.today, entry.level, entry.limit))
        changes = [one.since for one in (today, level, limit) if one is not None and one.since is not None]
        return Cell(
            mechanism=mechanism,
            row=row.key,
            published=entry.published,
            today=entry.published if today is None else today.value,
            level=row.levels[0] if level is None else level.value,
            sources=tuple(self.sources[key] for key in entry.sources),
            since=max(changes, default=None),
            limit=None if limit is None else int(limit.value),
            options=tuple(one for one in entry.options if one.since is None or branch is None or one.since <= branch),
            contradiction=entry.contradiction,
            note=entry.note,
        )

    def level(self, mechanism: Mechanism, row_key: str, driver: str | None = None, *, option: str | None = None) -> str:
        """Return the level of a cell; with an option that the driver has, the option's.

        Raises:
            BadUsage: there is no such row.
        """
        cell = self.cell(mechanism, row_key, driver)
        return next((one.level for one in cell.options if one.key == option), cell.level)

    def at_least(self, row_key: str, level: str, wanted: str) -> bool:
        """Return whether a level of a row is the wanted one or a stronger one.

        Raises:
            BadUsage: the row does not know one of them.
        """
        return self._strength(row_key, level) >= self._strength(row_key, wanted)

    def _strength(self, row_key: str, level: str) -> int:
        levels = self.row(row_key).levels
        if level not in levels:
            raise BadUsage(
                f"'{level}' is not a level of the row {row_key}", f"its levels: {', '.join(levels)}", code="no_level"
            )
        return levels.index(level)


def driver_branch(driver: str | None) -> int | None:
    """Return the branch of a driver version: 580 of ``580.159.04``; None when it is unknown."""
    match = re.match(r"\d{1,5}(?!\d)", driver or "", re.ASCII)
    return int(match.group()) if match else None


def _at(dated: tuple[Dated, ...], branch: int | None) -> Dated | None:
    """Return the newest value that holds on a branch. The file's order is from old to new."""
    holding = [one for one in dated if one.since is None or branch is None or one.since <= branch]
    return holding[-1] if holding else None


def load_table(path: Path | None = None) -> Table:
    """Return the table of a file, or the one of the package.

    Raises:
        NotFound: the file is not there.
        OperationFailed: it cannot be read, or is no such table; the message names the line.
    """
    from gpushare.advice.table_file import read_table

    return read_table(path)
