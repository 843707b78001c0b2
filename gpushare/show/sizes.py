"""``gpushare bench --size`` with several sizes: times, and where copies begin to take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

from gpushare.base.benchmark import BenchSizesAnswer, Concurrency, SizeCell
from gpushare.base.units import format_copies
from gpushare.show.plot import picture
from gpushare.show.result import Column, Result, Table, record_table

_CSV: Final = ("size", "way", "copies", "seconds", "low", "high", "alone_seconds", "gain")


def sizes_result(data: BenchSizesAnswer, notes: Sequence[str] = (), **more: Any) -> Result:
    """Return a benchmark of several sizes as a result: where copies take turns, then the times of each size."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.started_at))
    first = f"{data.host}   GPU {data.gpu.index} {data.gpu.name}   driver {data.driver}   {began}"
    return Result(
        data=data,
        text="\n".join([first, data.workload.title, "", *map(_concurrency_sentence, data.concurrency)]),
        tables=(_times_table(data),),
        csv=record_table("cells", _CSV, data.cells),
        notes=tuple(notes),
        **more,
    )


def _concurrency_sentence(row: Concurrency) -> str:
    """Return up to which size copies run at the same time in one way, and what it gives."""
    copies = format_copies(row.copies)
    if row.concurrent_until is None:
        return f"{row.way}: {copies} take turns at every size ({row.gain_at_end:.2f} x one copy)."
    together = (
        f"{row.way}: {copies} run at the same time up to {row.concurrent_until} ({row.gain_until:.2f} x one copy)"
    )
    if row.ends_at is None:
        return f"{together}, the largest size that was measured."
    return f"{together}; concurrency ends at {row.ends_at} ({row.gain_at_end:.2f} x)."


def format_time(seconds: float | None) -> str:
    """Return a time with three digits and its unit: ``64.1 us``, ``1.27 ms``, ``2.5 s``."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        # What rounds to 1000 has the next unit.
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _times_table(data: BenchSizesAnswer) -> Table:
    """Return the table of times: a row per size and way, a column per number of copies."""
    numbers = sorted({cell.copies for cell in data.cells})
    by_row: dict[tuple[int, str], dict[int, SizeCell]] = {}
    for cell in data.cells:
        by_row.setdefault((cell.size, cell.way), {})[cell.copies] = cell
    rows = [
        {
            "size": size,
            "way": way,
            "alone": next(cell.alone_seconds for cell in cells.values()),
            **{f"n{number}": _time_text(cells.get(number)) for number in numbers},
        }
        for (size, way), cells in by_row.items()
    ]
    columns = (
        Column("size", "size", right=True, group=True),
        Column("way", "way"),
        Column("alone", "alone", right=True, format=format_time),
        *(
            Column(f"n{number}", format_copies(number), right=True)
            for number in numbers
            if number > 1 or len(numbers) == 1
        ),
    )
    return Table(
        name="times",
        title="time until each copy has multiplied once (x alone)",
        columns=columns,
        rows=tuple(rows),
        empty="nothing was measured",
    )


def _time_text(cell: SizeCell | None) -> str | None:
    """Return the time of a cell, and how many times that of a copy alone it is; None: nothing was measured."""
    if cell is None:
        return None
    if cell.seconds is None:
        return "failed" if cell.failures else None
    text = format_time(cell.seconds)
    return f"{text} ({cell.seconds / cell.alone_seconds:.1f})" if cell.alone_seconds else text


def sizes_picture(data: BenchSizesAnswer, form: str) -> bytes:
    """Return time against size as a picture, a line for each way and number of copies."""

    def draw(axes: Any) -> None:
        lines: dict[tuple[str, int], list[SizeCell]] = {}
        for cell in data.cells:
            if cell.seconds is not None:
                lines.setdefault((cell.way, cell.copies), []).append(cell)
        for ((way, copies), cells), marker in zip(lines.items(), itertools.cycle("osD^vPX*"), strict=False):
            sizes = [cell.size for cell in cells]
            seconds = [cell.seconds for cell in cells]
            axes.plot(sizes, seconds, label=f"{way}, {format_copies(copies)}", marker=marker)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(data.sizes, [str(size) for size in data.sizes])
        axes.set_xlabel("size of the matrices")
        axes.set_ylabel("seconds until each copy has multiplied once")

    return picture(form, data.gpu.name, data.driver, draw)
