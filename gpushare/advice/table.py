"""The table of mechanisms: what each way of sharing does and does not promise, with sources.

The words are those of NVIDIA's table of 2022 (*published*) and what is true since (*today*, by driver);
the levels are what advice reads. All of it is data: ``gpushare/data/mechanisms.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from gpushare.errors import BadUsage, NotFound, OperationFailed
from gpushare.units import check_depth, quoted

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
    return read_table(path)


SCHEMA: Final = 1
_MOST_CHARACTERS: Final = 1 << 20
_MOST_VALUES: Final = 100_000
_ROW_KEYS: Final = ("key", "title", "published", "question", "levels")
_CELL_NEEDED: Final = ("published", "today", "level", "source")
_CELL_KEYS: Final = (*_CELL_NEEDED, "limit", "options", "contradiction", "note")


class _Object(dict[str, Any]):
    """A mapping of the file, with the line of each key and its own."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}


def read_table(path: Path | None = None) -> Table:
    """Return the table of a file, or the package's (``data/mechanisms.yaml``).

    Raises:
        NotFound: the file is not there.
        OperationFailed: it cannot be read, or is no such table; the message names the line.
    """
    return _Reader(str(path or "mechanisms.yaml")).table(_text(path))


def _text(path: Path | None) -> str:
    if path is None:
        from importlib.resources import files

        return files("gpushare").joinpath("data/mechanisms.yaml").read_text(encoding="utf-8")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {path}", "see the table that comes with gpushare: gpushare compare", code="no_file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OperationFailed(
            f"cannot read {path}: {why}", "see its permissions and its encoding", code="bad_table"
        ) from None
    if len(text) > _MOST_CHARACTERS:
        raise OperationFailed(f"{path} is larger than 1 MiB", "give a table of mechanisms", code="bad_table")
    return text


class _Reader:
    """Reads one file; every complaint names it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values = 0

    def table(self, text: str) -> Table:
        top = self._object(self._parsed(text), "the file", ("schema", "sources", "rows", "mechanisms"))
        if top["schema"] != SCHEMA:
            self._wrong(top.lines["schema"], f"schema {top['schema']!r} is not known, {SCHEMA} is")
        sources = {
            key: self._source(key, raw) for key, raw in self._object(top["sources"], "sources", None, top.line).items()
        }
        rows = tuple(self._row(raw, top.lines["rows"]) for raw in self._list(top["rows"], "rows", top.lines["rows"]))
        self._once((row.key for row in rows), "row", top.lines["rows"])
        mechanisms = self._object(
            top["mechanisms"], "mechanisms", [one.value for one in Mechanism], top.lines["mechanisms"]
        )
        titles: dict[Mechanism, str] = {}
        entries: dict[tuple[Mechanism, str], Entry] = {}
        for mechanism in Mechanism:
            line = mechanisms.lines[mechanism.value]
            column = self._object(mechanisms[mechanism.value], mechanism.value, ("title", "cells"), line)
            titles[mechanism] = self._word(column, "title")
            cells = self._object(
                column["cells"], f"{mechanism.value}.cells", [row.key for row in rows], column.lines["cells"]
            )
            for row in rows:
                where = f"{mechanism.value}.{row.key}"
                entries[mechanism, row.key] = self._entry(cells[row.key], where, row, sources, cells.lines[row.key])
        return Table(rows=rows, titles=titles, sources=sources, entries=entries)

    # -- the parts -------------------------------------------------------------------------------

    def _source(self, key: str, raw: Any) -> Source:
        source = self._object(raw, f"source {key}", ("title", "where", "date"))
        return Source(key=key, **{name: self._word(source, name) for name in ("title", "where", "date")})

    def _row(self, raw: Any, line: int) -> Row:
        row = self._object(raw, "a row", _ROW_KEYS, line)
        levels = self._list(row["levels"], "levels", row.lines["levels"])
        self._once(levels, "level", row.lines["levels"])
        return Row(
            key=self._word(row, "key"),
            title=self._word(row, "title"),
            published_title=self._word(row, "published"),
            question=self._word(row, "question"),
            levels=tuple(str(level) for level in levels),
        )

    def _entry(self, raw: Any, where: str, row: Row, sources: Mapping[str, Source], line: int) -> Entry:
        cell = self._object(raw, where, _CELL_KEYS, line, needed=_CELL_NEEDED)
        level = self._dated(cell, "level", "level", where)
        for one in level:
            self._known(one.value, row.levels, f"level of {where}", cell.lines["level"])
        used = tuple(str(key) for key in self._list(cell["source"], f"the source of {where}", cell.lines["source"]))
        for key in used:
            self._known(key, tuple(sources), f"source of {where}", cell.lines["source"])
        if not used:
            self._wrong(cell.lines["source"], f"{where} has no source")
        limit = self._dated(cell, "limit", "limit", where) if "limit" in cell else ()
        for one in limit:
            if not one.value.isdecimal():
                self._wrong(cell.lines["limit"], f"the limit of {where} is {quoted(one.value)}, not a whole number")
        return Entry(
            published=self._word(cell, "published"),
            today=self._dated(cell, "today", "text", where),
            level=level,
            limit=limit,
            sources=used,
            options=tuple(self._options(cell, where, row)),
            contradiction=self._word(cell, "contradiction") if cell.get("contradiction") is not None else None,
            note=self._word(cell, "note") if cell.get("note") is not None else None,
        )

    def _options(self, cell: _Object, where: str, row: Row) -> Iterable[Option]:
        if cell.get("options") is None:
            return
        options = self._object(cell["options"], f"the options of {where}", None, cell.lines["options"])
        for key, raw in options.items():
            line = options.lines[key]
            one = self._object(
                raw, f"option {key} of {where}", ("since", "level", "text"), line, needed=("level", "text")
            )
            level = self._word(one, "level")
            self._known(level, row.levels, f"level of option {key} of {where}", one.lines["level"])
            yield Option(key=key, level=level, text=self._word(one, "text"), since=self._since(one, where))

    def _dated(self, cell: _Object, key: str, name: str, where: str) -> tuple[Dated, ...]:
        """Return a value that may differ by driver: one, or a list of ``{since, NAME}`` from old to new."""
        line = cell.lines[key]
        if not isinstance(cell[key], list):
            return (Dated(since=None, value=self._word(cell, key)),)
        entries = [self._object(raw, f"{key} of {where}", ("since", name), line, needed=(name,)) for raw in cell[key]]
        found = tuple(Dated(since=self._since(one, where), value=self._word(one, name)) for one in entries)
        order = [one.since or 0 for one in found]
        if not found or found[0].since is not None:
            first = entries[0].line if entries else line
            self._wrong(first, f"{key} of {where} must begin with an entry without since, for older drivers")
        if order != sorted(set(order)):
            self._wrong(line, f"{key} of {where} must go from old to new drivers, each once")
        return found

    def _since(self, one: _Object, where: str) -> int | None:
        if one.get("since") is None:
            return None
        text = str(one["since"])
        if not text.isdecimal():
            self._wrong(one.lines["since"], f"since of {where} is {quoted(text)}, not a driver branch like 590")
        return int(text)

    # -- what a value must be --------------------------------------------------------------------

    def _object(
        self,
        raw: Any,
        what: str,
        keys: Iterable[str] | None,
        line: int | None = None,
        *,
        needed: Iterable[str] | None = None,
    ) -> _Object:
        """Return a mapping with exactly these keys (None: any); of those ``needed`` (default all) must be there."""
        if not isinstance(raw, _Object):
            self._wrong(line, f"{what} must be a mapping")
        if keys is None:
            return raw
        known = tuple(keys)
        for key in raw:
            self._known(key, known, f"key of {what}", raw.lines[key])
        for key in known if needed is None else needed:
            if key not in raw:
                self._wrong(raw.line, f"{what} has no {key}")
        return raw

    def _list(self, raw: Any, what: str, line: int) -> list[Any]:
        if not isinstance(raw, list):
            self._wrong(line, f"{what} must be a list")
        return raw

    def _word(self, one: _Object, key: str) -> str:
        if not isinstance(one[key], str | int) or isinstance(one[key], bool) or str(one[key]).strip() == "":
            self._wrong(one.lines[key], f'{key} must be a text; yes, no and numbers with a point need quotes: "No"')
        return str(one[key]).strip()

    def _known(self, word: str, known: tuple[str, ...], what: str, line: int) -> None:
        if word not in known:
            self._wrong(line, f"{quoted(word)} is no {what}; there are {', '.join(known)}")

    def _once(self, words: Iterable[Any], what: str, line: int) -> None:
        seen: set[str] = set()
        for word in map(str, words):
            if word in seen:
                self._wrong(line, f"the {what} {quoted(word)} appears twice")
            seen.add(word)

    def _wrong(self, line: int | None, why: str) -> NoReturn:
        where = self._name if line is None else f"{self._name}, line {line}"
        raise OperationFailed(
            f"{where}: {why}", "mend that line; the file says at its top what it holds", code="bad_table"
        )

    # -- YAML with lines -------------------------------------------------------------------------

    def _parsed(self, text: str) -> Any:
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            check_depth(text, loader)
            node = yaml.compose(text, Loader=loader)
        except RecursionError:
            self._wrong(None, "it is nested too deep")
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or "it cannot be read"
            self._wrong(None if mark is None else mark.line + 1, f"not valid YAML: {problem}")
        try:
            return None if node is None else self._value(node, yaml.SafeLoader(""))
        except RecursionError:
            # An alias of what it stands in.
            self._wrong(None, "it is nested too deep")

    def _scalar(self, node: Any, loader: Any) -> Any:
        import yaml

        try:
            return loader.construct_object(node)
        except (yaml.YAMLError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            self._wrong(node.start_mark.line + 1, f"this is no {str(node.tag).rpartition(':')[2][:40]}")

    def _value(self, node: Any, loader: Any) -> Any:
        """Return a YAML node as plain values; mappings keep their lines, a key twice is refused."""
        line = node.start_mark.line + 1
        # An alias is counted each time that it is used: a few of them in each other are millions.
        self._values += 1
        if self._values > _MOST_VALUES:
            self._wrong(line, "it has too many values")
        if node.id == "sequence":
            return [self._value(item, loader) for item in node.value]
        if node.id == "scalar":
            return self._scalar(node, loader)
        found = _Object(line)
        for key_node, value_node in node.value:
            key = str(self._scalar(key_node, loader)) if key_node.id == "scalar" else ""
            key_line = key_node.start_mark.line + 1
            if not key or key in found:
                self._wrong(key_line, f"the key {quoted(key)} appears twice" if key else "a key must be a word")
            found[key], found.lines[key] = self._value(value_node, loader), key_line
        return found


K = TypeVar("K")
_MECHANISMS: Final = {
    Mechanism.STREAMS: ("streams", "stream", "cudastreams", "cudastream"),
    Mechanism.MPS: ("mps", "multiprocessservice", "cudamps"),
    Mechanism.TIMESLICE: ("timeslice", "timeslicing", "timeslices", "timesliced", "timesharing", "ts"),
    Mechanism.MIG: ("mig", "multiinstancegpu"),
    Mechanism.VGPU: ("vgpu", "virtualgpu"),
}
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


def mechanism_named(text: str) -> Mechanism:
    """Return the mechanism that a user names: ``MPS``, ``time-slicing``, ``ts``.

    Raises:
        BadUsage: there is none of that name.
    """
    found = _find(text, _MECHANISMS)
    if len(found) == 1:
        return found[0]
    raise BadUsage(
        f"{quoted(text)} is no way of sharing that gpushare compares",
        _meant(text, {one.value: names for one, names in _MECHANISMS.items()})
        + "name streams, mps, time-slicing, mig or vgpu",
        code="no_mechanism",
    )


def row_named(table: Table, text: str) -> Row:
    """Return the row that a user names: its key, its title, or an unmistakable part of it.

    Raises:
        BadUsage: there is none, or several fit.
    """
    names = {row.key: (row.key, row.title, row.published_title, *_ROWS.get(row.key, ())) for row in table.rows}
    found = _find(text, names)
    if len(found) == 1:
        return table.row(found[0])
    if found:
        raise BadUsage(
            f"{quoted(text)} may be {' or '.join(table.row(key).title for key in found)}",
            f"name one: {', '.join(found)}",
            code="no_row",
        )
    raise BadUsage(
        f"{quoted(text)} is no row of the table",
        _meant(text, names) + f"its rows: {', '.join(row.key for row in table.rows)}",
        code="no_row",
    )


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _find(text: str, names: Mapping[K, Iterable[str]]) -> list[K]:
    """Return the keys that have this very name; else those whose names begin so; else those that hold it."""
    asked = _bare(text)
    if not asked:
        return []
    bare = {key: [_bare(name) for name in several] for key, several in names.items()}
    exact = [key for key, several in bare.items() if asked in several]
    # One or two letters are too little to be a part of a name.
    if exact or len(asked) < 3:
        return exact
    begins = [key for key, several in bare.items() if any(name.startswith(asked) for name in several)]
    return begins or [key for key, several in bare.items() if any(asked in name for name in several)]


def _meant(text: str, names: Mapping[str, Iterable[str]]) -> str:
    """Return the question after the key with the closest name, or nothing."""
    import difflib

    by_bare = {_bare(name): key for key, several in names.items() for name in several}
    close = difflib.get_close_matches(_bare(text), by_bare, n=1, cutoff=0.6)
    return f"did you mean {by_bare[close[0]]}? " if close else ""
