"""``gpushare bench``: what each way of sharing gives, as data and as tables."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpushare.base.units import format_bytes, format_copies
from gpushare.show.plot import picture
from gpushare.show.result import Column, Result, Table

# The winner of its number of copies, and each of several ways that are not told apart.
_MARK, _TIED = "*", "~"
_MOST_COMMAND: Final = 60
# Sentences are wrapped here, at any terminal width, and never cut.
_WIDTH: Final = 80


def bench_result(
    data: Mapping[str, Any],
    notes: Sequence[str] = (),
    *,
    comparison: Sequence[Mapping[str, Any]] | None = None,
    **more: Any,
) -> Result:
    """Return the result of ``gpushare bench`` from its data: keys as the JSON document has them."""
    shown = {**data, "cells": [cell for cell in data["cells"] if is_measured(cell)]}
    tables = [_throughput(shown), _details(shown)]
    if comparison is not None:
        data = {**data, "comparison": [dict(row) for row in comparison]}
        tables.append(_comparison(comparison))
    if data["left_out"]:
        tables.append(_left_out(data["left_out"]))
    return Result(
        command="bench",
        data=data,
        text=_text(data),
        tables=tuple(tables),
        csv=_csv(data),
        notes=tuple(notes),
        **more,
    )


def is_measured(cell: Mapping[str, Any]) -> bool:
    """Return whether a cell was measured, or failed; an interrupted benchmark has others, too."""
    return cell["throughput"] is not None or bool(cell["failures"])


def shown(value: float | None) -> str:
    """Return a figure with three or four digits: ``1214``, ``82.4``, ``0.037``."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(data: Mapping[str, Any]) -> str:
    import shlex

    gpu = data["gpu"]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(data["started_at"]))
    device = f"GPU {gpu['index']} {gpu['name'] or ''}".strip() + (f", MIG {gpu['mig']}" if gpu["mig"] else "")
    command = shlex.join(data["command"])
    if data["workload"] is not None:
        command = str(data["workload"]["title"])
    elif len(command) > _MOST_COMMAND:
        command = command[: _MOST_COMMAND - 1] + "…"
    first = f"{data['host']}   {device}   driver {data['driver'] or '-'}   {began}"
    answer = [line for text in _answer(data) for line in _wrapped(text, _WIDTH)]
    return "\n".join([first, command, "", *answer])


def _answer(data: Mapping[str, Any]) -> list[str]:
    best = data["best"]
    if best is None:
        return ["No choice: fewer than two ways were measured with the same number of copies."]
    # One copy shares with nothing; the table shows it under each way.
    lines = [_sentence(pick) for pick in data["picks"] if pick["copies"] > 1 or len(data["picks"]) == 1]
    if len(lines) > 1:
        tied = "" if _winner(best) else " (not told apart from another way)"
        lines.append(f"Highest throughput: {format_copies(best['copies'])}, {best['way']}{tied}.")
    return lines


def _tied(pick: Mapping[str, Any]) -> list[str]:
    """Return the ways whose intervals overlap with that of the fastest, and the fastest; the one to use comes first."""
    names = dict.fromkeys((pick["way"], pick["fastest"], *pick["no_difference"]))
    return list(names) if len(names) > 1 else []


def _winner(pick: Mapping[str, Any]) -> bool:
    return bool(pick["certain"]) and not _tied(pick)


def _sentence(pick: Mapping[str, Any]) -> str:
    cap, gain = pick["threads_percent"], pick["gain"]
    way = pick["way"] + (f" ({cap:g} % each)" if cap is not None else "")
    tied = _tied(pick)
    if gain is not None and pick["over"] not in {None, *(tied or [pick["way"]])}:
        way += f", {gain['value']:.2f} x {pick['over']}"
    if not pick["certain"]:
        left = pick.get("open_ways")
        way += f" (not certain: {left} more not measured)" if left else " (not certain: single runs)"
    elif tied:
        near = "had the highest mean" if pick["way"] == pick["fastest"] else "is the simplest"
        names = f"{', '.join(tied[:-1])} and {tied[-1]}"
        return f"{format_copies(pick['copies'])}: no winner: {names} are not told apart; {pick['way']} {near}{way[len(pick['way']) :]}."
    return f"{format_copies(pick['copies'])}: {way}."


def _throughput(data: Mapping[str, Any]) -> Table:
    """Return the table of ways and numbers of copies, with a mark at the chosen way of each number."""
    numbers = sorted({cell["copies"] for cell in data["cells"]})
    ways = list(dict.fromkeys(cell["way"] for cell in data["cells"]))
    cells = {(cell["way"], cell["copies"]): cell for cell in data["cells"]}
    picks = {pick["copies"]: pick for pick in data["picks"]}
    rows = [
        {"way": way, **{f"n{number}": _figure(cells.get((way, number)), picks.get(number)) for number in numbers}}
        for way in ways
    ]
    legend = [f"{_MARK} use this"] if any(_winner(pick) for pick in picks.values()) else []
    legend += [f"{_TIED} not told apart"] if any(pick["certain"] and _tied(pick) for pick in picks.values()) else []
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
    return Table(
        name="throughput",
        title=f"{_unit(data)}, all copies together" + (f" ({', '.join(legend)})" if legend else ""),
        columns=columns,
        rows=tuple(rows),
        empty="nothing was measured",
    )


def _unit(data: Mapping[str, Any]) -> str:
    metric, workload = data["metric"], data["workload"]
    if workload is not None:
        return str(workload["unit"])
    if metric["pattern"] is None:
        return "runs per second"
    return "printed number" + ("" if metric["higher_is_better"] else ", lower is better")


def _figure(cell: Mapping[str, Any] | None, pick: Mapping[str, Any] | None) -> str | None:
    if cell is None:
        return None
    if cell["throughput"] is None:
        return "failed" if cell["failures"] else None
    figures = cell["throughput"]
    mean, low, high = figures["mean"], figures["low"], figures["high"]
    # No percentage of zero.
    spread = f" ±{100 * (high - low) / 2 / mean:.0f}%" if low is not None and mean else ""
    mark = ""
    if pick is not None and pick["certain"]:
        tied = _tied(pick)
        mark = f"{_TIED} " if cell["way"] in tied else f"{_MARK} " if cell["chosen"] and not tied else ""
    return f"{mark}{shown(mean)}{spread}"


def _details(data: Mapping[str, Any]) -> Table:
    """Return the table of what was measured: one copy alone, then each way and number of copies with runs of its own."""
    columns = (
        Column("copies", "copies", right=True),
        Column("way", "way"),
        Column("threads_percent", "cap %", right=True, rank=4, optional=True),
        Column("mean", "rate", right=True, format=shown),
        Column("spread", "spread", right=True, rank=2, format=_percent),
        Column("gain", "x alone", right=True, format=_times),
        Column("slowdown", "slowdown", right=True, format=_times),
        Column("slowdown_worst", "worst", right=True, rank=3, format=_times),
        Column("latency_p50", "p50", right=True, rank=1, optional=True, format=shown),
        Column("latency_p99", "p99", right=True, rank=1, optional=True, format=shown),
        Column("memory_peak_bytes", "memory", right=True, rank=2, format=format_bytes),
        Column("power_watts", "W", right=True, rank=3, optional=True, format=shown),
        Column("joules", "J each", right=True, rank=3, optional=True, format=shown),
        Column("runs", "runs", right=True, rank=3),
        Column("remark", "remark", optional=True, rank=1),
    )
    alone = {**data["alone"], "way": "alone"}
    # One copy in the way in which it was measured alone is among the cells, too.
    alone_key = (data["alone"]["way"], 1)
    cells = [cell for cell in data["cells"] if cell["same_as"] is None and (cell["way"], cell["copies"]) != alone_key]
    first = [alone] if is_measured(alone) else []
    rows = [_flat(cell) for cell in (*first, *sorted(cells, key=lambda cell: cell["copies"]))]
    return Table(name="cells", title="each way", columns=columns, rows=tuple(rows), empty="nothing was measured")


def _flat(cell: Mapping[str, Any]) -> dict[str, Any]:
    figures = cell["throughput"] or {}
    remarks = []
    if cell["failures"]:
        remarks.append(f"failed {len(cell['failures'])}")
    if cell["others"]:
        remarks.append("others there")
    return {
        **cell,
        "mean": figures.get("mean"),
        "spread": figures.get("spread"),
        "gain": (cell["gain"] or {}).get("value"),
        "remark": ", ".join(remarks) or None,
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("copies", "copies", right=True),
        Column("way", "way"),
        Column("before", "before", right=True, format=shown),
        Column("now", "now", right=True, format=shown),
        Column("ratio", "ratio", right=True, format=_times),
        Column("verdict", "verdict", style={"faster": "green", "slower": "red"}.get),
    )
    return Table(
        name="comparison",
        title="compared with the earlier benchmark",
        columns=columns,
        rows=tuple(rows),
        empty="nothing in common",
    )


def _left_out(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("way", "way", group=True),
        Column(
            "copies", "copies", right=True, optional=True, format=lambda value: "all" if value is None else str(value)
        ),
        Column("reason", "why", least=20),
    )
    return Table(
        name="left_out", title="left out", columns=columns, rows=tuple(rows), draw=lambda width: _reasons(rows, width)
    )


def _reasons(rows: Sequence[Mapping[str, Any]], width: int) -> list[Any]:
    """Return the reasons as wrapped lines, which are never cut: they end with what to do."""
    from rich.text import Text

    lines = []
    for row in rows:
        name = row["way"] if row["copies"] is None else f"{row['way']}, {format_copies(row['copies'])}"
        lines += _wrapped(f"{name}: {row['reason']}", width)
    return [Text(line) for line in lines]


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _csv(data: Mapping[str, Any]) -> Table:
    """Return one row a cell, with whole numbers and the bounds."""
    keys = (
        "copies", "way", "threads_percent", "mean", "low", "high", "spread", "gain", "slowdown", "slowdown_worst",
        "fairness", "latency_p50", "latency_p99", "memory_peak_bytes", "power_watts", "joules", "runs", "chosen",
    )  # fmt: skip
    rows = tuple(
        {**_flat(cell), "low": (cell["throughput"] or {}).get("low"), "high": (cell["throughput"] or {}).get("high")}
        for cell in data["cells"]
    )
    return Table(name="cells", columns=tuple(Column(key, key) for key in keys), rows=rows)


def drawn(data: Mapping[str, Any], form: str) -> bytes:
    """Return throughput against copies as a picture, ``png`` or ``svg``, with intervals as error bars."""

    def draw(axes: Any) -> None:
        ways = list(dict.fromkeys(cell["way"] for cell in data["cells"]))
        for way, marker in zip(ways, itertools.cycle("osD^vPX*"), strict=False):
            cells = [cell for cell in data["cells"] if cell["way"] == way and cell["throughput"] is not None]
            if cells:
                means = [cell["throughput"]["mean"] for cell in cells]
                below = [mean - (cell["throughput"]["low"] or mean) for cell, mean in zip(cells, means, strict=True)]
                copies = [cell["copies"] for cell in cells]
                axes.errorbar(copies, means, yerr=below, label=way, marker=marker, alpha=0.7, capsize=3)
        numbers = sorted({cell["copies"] for cell in data["cells"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("copies")
        axes.set_ylabel(_unit(data).partition(",")[0])

    return picture(form, data["gpu"]["name"], data["driver"], draw)
