"""``gpushare bench``: what each way of sharing gives, as text, tables and a picture; of several sizes, their times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from gpushare.base.benchmark import (
    BenchAnswer,
    BenchCell,
    BenchSizesAnswer,
    Compared,
    Concurrency,
    LeftOut,
    Pick,
    SizeCell,
)
from gpushare.base.units import format_bytes, format_copies
from gpushare.show.plot import picture
from gpushare.show.result import Column, Result, Table, record_table
from gpushare.show.text import wrapped

# The winner of its number of copies, and each of several ways that are not told apart.
_MARK, _TIED = "*", "~"
_MOST_COMMAND: Final = 60
_TIMES: Final = "{:.2f}".format
# Sentences are wrapped here, at any terminal width, and never cut.
_WIDTH: Final = 80


def bench_result(data: BenchAnswer, notes: Sequence[str] = (), **more: Any) -> Result:
    """Return a benchmark as a result: the best way in words, then the figures of each way, and what was left out."""
    details = _details_table(data)
    tables = [_throughput_table(data), details]
    if data.comparison is not None:
        tables.append(_comparison_table(data.comparison))
    if data.left_out:
        tables.append(_left_out_table(data.left_out))
    return Result(
        data=data,
        text=_head_and_answer(data),
        tables=tuple(tables),
        csv=details,
        notes=tuple(notes),
        **more,
    )


def figure_text(value: float) -> str:
    """Return a figure with three or four digits: ``1214``, ``82.4``, ``0.037``."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _head_and_answer(data: BenchAnswer) -> str:
    """Return what was measured, where and when, and the answer, as lines."""
    program = data.program
    if data.workload is None and len(program) > _MOST_COMMAND:
        program = program[: _MOST_COMMAND - 1] + "…"
    answer = [line for text in _answer_sentences(data) for line in wrapped(text, _WIDTH, rest="  ")]
    return "\n".join([_where_and_when(data), program, "", *answer])


def _where_and_when(data: BenchAnswer | BenchSizesAnswer) -> str:
    """Return the line with the host, the device, the driver and the date of a benchmark."""
    gpu = data.gpu
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.started_at))
    device = f"GPU {gpu.index} {gpu.name or ''}".strip()
    if gpu.mig:
        device += f", MIG {gpu.mig}"
    return f"{data.host}   {device}   driver {data.driver or '-'}   {began}"


def _answer_sentences(data: BenchAnswer) -> list[str]:
    """Return a sentence per number of copies on the best way, and which number has the highest throughput."""
    best = data.best
    if best is None:
        return ["No choice: fewer than two ways were measured with the same number of copies."]
    # One copy shares with nothing; the table shows it under each way.
    lines = [_pick_sentence(pick) for pick in data.picks if pick.copies > 1 or len(data.picks) == 1]
    if len(lines) > 1:
        tied = " (not told apart from another way)" if best.winner is None else ""
        lines.append(f"Highest throughput: {format_copies(best.copies)}, {best.way}{tied}.")
    return lines


def _tied_ways(pick: Pick) -> list[str]:
    """Return the fastest way and those not told apart from it, the way to use first; empty if the fastest one won."""
    ways = dict.fromkeys((pick.way, pick.fastest, *pick.no_difference))
    return list(ways) if len(ways) > 1 else []


def _pick_sentence(pick: Pick) -> str:
    """Return which way is best for a number of copies, and how sure that is."""
    copies = format_copies(pick.copies)
    tied = _tied_ways(pick)
    details = "" if pick.threads_percent is None else f" ({pick.threads_percent:g} % each)"
    # No gain over itself, nor over a way from which it is not told apart.
    if pick.gain is not None and pick.over not in {None, pick.way, *tied}:
        details += f", {pick.gain.value:.2f} x {pick.over}"
    if not pick.certain:
        reason = f"{pick.open_ways} more not measured" if pick.open_ways else "single runs"
        return f"{copies}: {pick.way}{details} (not certain: {reason})."
    if tied:
        reason = "had the highest mean" if pick.way == pick.fastest else "is the simplest"
        names = f"{', '.join(tied[:-1])} and {tied[-1]}"
        return f"{copies}: no winner: {names} are not told apart; {pick.way} {reason}{details}."
    return f"{copies}: {pick.way}{details}."


def _throughput_table(data: BenchAnswer) -> Table:
    """Return the table of ways and numbers of copies, with a mark at the chosen way of each number."""
    cells = {(cell.way, cell.copies): cell for cell in data.cells if cell.is_shown}
    numbers = sorted({copies for _, copies in cells})
    picks = {pick.copies: pick for pick in data.picks}
    rows = [
        {
            "way": way,
            **{f"n{number}": _throughput_text(cells.get((way, number)), picks.get(number)) for number in numbers},
        }
        for way in dict.fromkeys(way for way, _ in cells)
    ]
    legend = []
    if any(pick.winner is not None for pick in data.picks):
        legend.append(f"{_MARK} use this")
    if any(pick.certain and _tied_ways(pick) for pick in data.picks):
        legend.append(f"{_TIED} not told apart")
    title = f"{_unit(data)}, all copies together"
    if legend:
        title += f" ({', '.join(legend)})"
    columns = (
        Column("way", "way"),
        *(
            Column(
                f"n{number}",
                format_copies(number),
                right=True,
                style=lambda value: "bold green" if str(value or "").startswith(_MARK) else None,
            )
            for number in numbers
        ),
    )
    return Table(name="throughput", title=title, columns=columns, rows=tuple(rows), empty="nothing was measured")


def _unit(data: BenchAnswer) -> str:
    """Return what the throughput counts per second, or that it is a printed number."""
    if data.workload is not None:
        return data.workload.unit
    if not data.metric.printed:
        return "runs per second"
    return "printed number" + ("" if data.metric.higher_is_better else ", lower is better")


def _throughput_text(cell: BenchCell | None, pick: Pick | None) -> str | None:
    """Return the throughput of a cell with its spread, and a mark if its way is the one to use or not told apart."""
    if cell is None:
        return None
    if cell.throughput is None:
        return "failed" if cell.failures else None
    rate = cell.throughput
    text = figure_text(rate.mean)
    # No percentage of zero.
    if rate.low is not None and rate.high is not None and rate.mean:
        text += f" ±{100 * (rate.high - rate.low) / 2 / rate.mean:.0f}%"
    if pick is None or not pick.certain:
        return text
    tied = _tied_ways(pick)
    if cell.way in tied:
        return f"{_TIED} {text}"
    return f"{_MARK} {text}" if cell.chosen and not tied else text


def _remark_on(cell: BenchCell) -> str | None:
    """Return what was wrong with the runs of a cell; None: nothing."""
    failed = f"failed {len(cell.failures)}" if cell.failures else ""
    return ", ".join(filter(None, [failed, "others there" if cell.others else ""])) or None


def _details_table(data: BenchAnswer) -> Table:
    """Return the table of what was measured: one copy alone, then each way and number of copies with runs of its own."""
    columns = (
        Column("copies", "copies", right=True),
        Column("way", "way"),
        Column("threads_percent", "cap %", right=True, rank=4, optional=True),
        Column("mean", "rate", right=True, of=lambda cell: getattr(cell.throughput, "mean", None), format=figure_text),
        Column(
            "spread",
            "spread",
            right=True,
            rank=2,
            of=lambda cell: getattr(cell.throughput, "spread", None),
            format=lambda spread: f"{100 * spread:.1f} %",
        ),
        Column("gain", "x alone", right=True, of=lambda cell: getattr(cell.gain, "value", None), format=_TIMES),
        Column("slowdown", "slowdown", right=True, format=_TIMES),
        Column("latency_p50", "p50", right=True, rank=1, optional=True, format=figure_text),
        Column("latency_p99", "p99", right=True, rank=1, optional=True, format=figure_text),
        Column("memory_peak_bytes", "memory", right=True, rank=2, format=format_bytes),
        Column("power_watts", "W", right=True, rank=3, optional=True, format=figure_text),
        Column("joules", "J each", right=True, rank=3, optional=True, format=figure_text),
        Column("runs", "runs", right=True, rank=3),
        Column("remark", "remark", optional=True, rank=1, of=_remark_on),
    )
    # The copy alone, which is the first row, is among the cells too, as one copy in its way.
    cells = [
        cell
        for cell in data.cells
        if cell.is_shown and cell.same_as is None and (cell.way, cell.copies) != (data.alone.way, 1)
    ]
    cells.sort(key=lambda cell: cell.copies)
    if data.alone.is_shown:
        cells.insert(0, replace(data.alone, way="alone"))
    return Table(name="cells", title="each way", columns=columns, rows=tuple(cells), empty="nothing was measured")


def _comparison_table(rows: tuple[Compared, ...]) -> Table:
    """Return the table of this and an earlier benchmark, for what both measured."""
    columns = (
        Column("copies", "copies", right=True),
        Column("way", "way"),
        Column("before", "before", right=True, format=figure_text),
        Column("now", "now", right=True, format=figure_text),
        Column("ratio", "ratio", right=True, format=_TIMES),
        Column("verdict", "verdict", style={"faster": "green", "slower": "red"}.get),
    )
    return Table(
        name="comparison",
        title="compared with the earlier benchmark",
        columns=columns,
        rows=rows,
        empty="nothing in common",
    )


def _left_out_table(rows: tuple[LeftOut, ...]) -> Table:
    """Return the table of the ways that were not measured, and why."""
    columns = (
        Column("way", "way"),
        Column("copies", "copies", right=True, unknown="all"),
        Column("reason", "why", wrap=True),
    )
    return Table(name="left_out", title="left out", columns=columns, rows=rows)


def throughput_picture(data: BenchAnswer, form: str) -> bytes:
    """Return throughput against copies as a picture, ``png`` or ``svg``, with intervals as error bars."""

    def draw(axes: Any) -> None:
        ways = dict.fromkeys(cell.way for cell in data.cells)
        for way, marker in zip(ways, itertools.cycle("osD^vPX*"), strict=False):
            points = [(cell.copies, cell.throughput) for cell in data.cells if cell.way == way and cell.throughput]
            if points:
                copies = [copies for copies, _ in points]
                means = [rate.mean for _, rate in points]
                below = [rate.mean - (rate.low or rate.mean) for _, rate in points]
                axes.errorbar(copies, means, yerr=below, label=way, marker=marker, alpha=0.7, capsize=3)
        numbers = sorted({cell.copies for cell in data.cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("copies")
        axes.set_ylabel(_unit(data).partition(",")[0])

    return picture(form, data.gpu.name, data.driver, draw)


# -- several sizes of the built-in workload -----------------------------------------------------------------------------

_CSV_OF_SIZES: Final = ("size", "way", "copies", "seconds", "low", "high", "alone_seconds", "gain")


def sizes_result(data: BenchSizesAnswer, notes: Sequence[str] = (), **more: Any) -> Result:
    """Return a benchmark of several sizes as a result: where copies take turns, then the times of each size."""
    return Result(
        data=data,
        text="\n".join([_where_and_when(data), data.workload.title, "", *map(_concurrency_sentence, data.concurrency)]),
        tables=(_times_table(data),),
        csv=record_table("cells", _CSV_OF_SIZES, data.cells),
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


def format_time(seconds: float) -> str:
    """Return a time with three digits and its unit: ``64.1 us``, ``1.27 ms``, ``2.5 s``."""
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
