"""The counts of a run: as a table, as JSON, and in the document that promises them."""

from __future__ import annotations

import datetime as dt
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.crashes.hits import Counts, Violation
from gpushare import __version__

_MARK: Final = "<!-- python -m benchmarks.crashes --write: {} {} -->"


@dataclass(frozen=True)
class Result:
    """All rows of a run."""

    facts: dict[str, Any]
    counts: tuple[Counts, ...]

    @classmethod
    def of(cls, found: Iterable[Counts], *, real_daemon: bool, part: str) -> Result:
        """Return the counts, the parts of a row as one."""
        merged: dict[str, Counts] = {}
        for one in found:
            into = merged.setdefault(one.row, Counts(row=one.row))
            into.effects = max(into.effects, one.effects)
            into.kills += one.kills
            into.errors += one.errors
            into.violations += one.violations
        facts = {
            "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
            "gpushare": __version__,
            "python": platform.python_version(),
            "linux": platform.release(),
            "daemon": "real" if real_daemon else "simulated",
            "part": part,
        }
        return cls(facts, tuple(merged.values()))

    @property
    def violations(self) -> list[Violation]:
        """Return all violations."""
        return [violation for one in self.counts for violation in one.violations]

    def data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**self.facts, "rows": [one.data() for one in self.counts]}


_Row = tuple[str, int, int, int, int]


def _rows(result: Result, earlier: Sequence[_Row] = ()) -> list[_Row]:
    rows: list[_Row] = [(one.row, one.effects, one.kills, one.errors, len(one.violations)) for one in result.counts]
    rows = [*(row for row in earlier if row[0] not in {one.row for one in result.counts}), *rows]
    effects, kills, errors, bad = (sum(column) for column in zip(*(row[1:] for row in rows), strict=True))
    return [*rows, ("all", effects, kills, errors, bad)]


def heading(result: Result) -> str:
    """Return what the figures belong to."""
    facts = result.facts
    part = f"; {facts['part']}" if facts["part"] else ""
    return (
        f"{facts['date']}, gpushare {facts['gpushare']}, Python {facts['python']}, Linux {facts['linux']}, "
        f"{facts['daemon']} control daemon{part}"
    )


def table(result: Result) -> str:
    """Return the counts as text."""
    lines = [heading(result), "", f"{'command':34}{'effects':>9}{'kills':>8}{'errors':>8}{'violations':>12}"]
    lines += [
        f"{name:34}{effects:>9}{kills:>8}{errors:>8}{bad:>12}" for name, effects, kills, errors, bad in _rows(result)
    ]
    return "\n".join(lines)


def markdown(result: Result, earlier: Sequence[_Row] = ()) -> str:
    """Return the counts for a document; ``earlier`` are those of commands that may not have been tried in this run."""
    rows = _rows(result, earlier)
    kept = len(rows) - 1 - len(result.counts)
    lines = [
        heading(result) + (f"; {kept} of these {len(rows) - 1} commands: counts of earlier runs." if kept else "."),
        "",
        "| command | side effects | kills | errors | violations |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {name} | {effects} | {kills} | {errors} | {bad} |" for name, effects, kills, errors, bad in rows]
    return "\n".join(lines)


def _in_document(text: str) -> list[_Row]:
    """Return the counts of a table that `markdown` wrote, without the last row."""
    found = []
    for line in text.splitlines():
        cells = [one.strip() for one in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and all(one.isdecimal() for one in cells[1:]):
            found.append((cells[0], int(cells[1]), int(cells[2]), int(cells[3]), int(cells[4])))
    return found[:-1]


def write(path: Path, result: Result) -> None:
    """Put the counts between the two marks of a document. Commands that were not tried keep those that they have.

    Raises:
        ValueError: it has no such marks.
    """
    begin, end = (_MARK.format(result.facts["daemon"], word) for word in ("begin", "end"))
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    table_before, closed, after = rest.partition(end)
    if not found or not closed:
        message = f"{path} has no lines '{begin}' and '{end}'"
        raise ValueError(message)
    path.write_text(f"{before}{begin}\n{markdown(result, _in_document(table_before))}\n{end}{after}", encoding="utf-8")
