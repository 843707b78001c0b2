"""The names of mechanisms and rows as people type them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

from gpushare.advice.table import Mechanism
from gpushare.errors import BadUsage
from gpushare.units import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpushare.advice.table import Row, Table

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
