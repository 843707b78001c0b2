"""The comparison as records: one per row and mechanism, with every view of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.here import availability, cell_here
from gpushare.advice.table import Mechanism, Table, driver_branch

if TYPE_CHECKING:
    from gpushare.advice.facts import GpuFacts, HostFacts
    from gpushare.advice.table import Cell

NOT_HERE: Final = "not here"


def record(
    table: Table, mechanism: Mechanism, row_key: str, driver: str | None, here: HostFacts | None
) -> dict[str, Any]:
    """Return one cell with its views; ``host`` is None without a host, and where the mechanism cannot be had."""
    cell = table.cell(mechanism, row_key, driver)
    return {
        "row": row_key,
        "title": table.row(row_key).title,
        "mechanism": mechanism.value,
        "published": cell.published,
        "today": cell.today,
        "host": None if here is None else text_here(table, mechanism, row_key, here, answering(here)),
        "level": cell.level,
        "limit": cell.limit,
        "since": cell.since,
        "options": cell.options,
        "contradiction": cell.contradiction,
        "note": cell.note,
        "sources": [{"key": one.key, "title": one.title, "where": one.where, "date": one.date} for one in cell.sources],
    }


def answering(host: HostFacts) -> tuple[GpuFacts, ...]:
    """Return the GPUs that answer."""
    return tuple(gpu for gpu in host.gpus if gpu.error is None)


def text_here(
    table: Table, mechanism: Mechanism, row_key: str, host: HostFacts, gpus: Sequence[GpuFacts]
) -> str | None:
    """Return what a cell comes to on these GPUs: once where they agree, else by GPU; None: on none of them."""
    return _joined([(gpu.index, cell_here(table, mechanism, row_key, host, gpu)) for gpu in gpus])


def availability_text(mechanism: Mechanism, host: HostFacts, gpus: Sequence[GpuFacts]) -> str:
    """Return whether a mechanism can be had on these GPUs, and what stands in the way."""
    return _joined([(gpu.index, availability(mechanism, host, gpu).why) for gpu in gpus]) or NOT_HERE


def _joined(texts: Iterable[tuple[int, str | None]]) -> str | None:
    by_text: dict[str | None, list[int]] = {}
    for index, text in texts:
        by_text.setdefault(text, []).append(index)
    if len(by_text) < 2:
        return next(iter(by_text), None)
    return ". ".join(f"GPU {','.join(map(str, indexes))}: {text or NOT_HERE}" for text, indexes in by_text.items())


def today_text(cell: Cell, driver: str | None) -> str:
    """Return today's words; with the driver branch that they need, where no driver is named."""
    return cell.today if cell.since is None or driver is not None else f"{cell.today} [driver {cell.since} on]"


def explanation(
    table: Table,
    mechanism: Mechanism,
    row_key: str,
    driver: str | None,
    host: HostFacts | None,
    why_no_host: str | None,
) -> list[tuple[str, str]]:
    """Return all that is known of a cell, in the order of reading: views, level, options, disagreement, sources."""
    entry, cell, row = table.entries[mechanism, row_key], table.cell(mechanism, row_key, driver), table.row(row_key)
    lines = [("question", row.question), ("published 2022", cell.published)]
    for dated in entry.today:
        lines.append(("today" if dated.since is None else f"driver {dated.since} on", dated.value))
    if len(entry.today) > 1:
        lines[2] = (f"before driver {entry.today[1].since}", lines[2][1])
    lines += _here_lines(table, mechanism, row_key, host, why_no_host)
    lines.append(("level", f"{cell.level} (of {', '.join(row.levels)})"))
    branch = driver_branch(driver)
    for option in entry.options:
        since = "" if option.since is None else f", driver {option.since} on"
        missing = branch is not None and option.since is not None and branch < option.since
        lines.append(
            (
                "option",
                f"{option.key}{since}{' (not this driver)' if missing else ''}: {option.text}; level {option.level}",
            )
        )
    lines += [("sources disagree", cell.contradiction)] if cell.contradiction else []
    lines += [("note", cell.note)] if cell.note else []
    lines += [("source", f"{one.title} ({one.date}), {one.where}") for one in cell.sources]
    return lines


def _here_lines(
    table: Table, mechanism: Mechanism, row_key: str, host: HostFacts | None, why_no_host: str | None
) -> list[tuple[str, str]]:
    if host is None:
        return [("this host", f"not known: {why_no_host}")] if why_no_host else []
    gpus = answering(host)
    text = text_here(table, mechanism, row_key, host, gpus)
    if text is None:
        return [("this host", f"{NOT_HERE}: {availability_text(mechanism, host, gpus).removeprefix('no: ')}")]
    return [("this host", text)]
