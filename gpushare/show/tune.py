"""``gpushare tune``: the curve and the setting that was found, for people and for machines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpushare.base.errors import GpushareError
from gpushare.base.units import format_slice
from gpushare.show.result import Column, Result, Table

# Sentences are wrapped here, at any terminal width, and never cut.
_WIDTH: Final = 80
_OWN_COLUMN: Final = re.compile(", (?:production slice)")


def tune_result(data: Mapping[str, Any], notes: Sequence[str] = (), error: GpushareError | None = None) -> Result:
    """Return the result of ``gpushare tune`` from its data: keys as the JSON document has them.

    ``error`` is what ended it early.
    """
    # It ran as asked; the answer is that no setting meets the goal.
    exit_code = 0 if data["best"] is not None else 7
    return Result(
        command="tune",
        data=data,
        text=_text(data),
        tables=(
            Table(name="curve", title="settings of the opportunistic job", columns=COLUMNS, rows=_rows(data["curve"])),
        ),
        notes=tuple(notes),
        errors=() if error is None else (error,),
        exit_code=exit_code if error is None else error.exit_code,
    )


def _rows(curve: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the curve for the table, with a separate column for production's slice."""
    return tuple({**row, "setting": _OWN_COLUMN.split(row["setting"])[0]} for row in curve)


def time_slice(value: Any) -> str:
    """Return a time-slice: ``16ms``."""
    return "-" if value is None else format_slice(value)


def share(value: Any) -> str:
    """Return a share of a rate alone: ``0.97``."""
    return "-" if value is None else f"{value:.2f}"


def error_of(value: Any) -> str:
    """Return a standard error; one that rounds to 0 is shown as small, not as 0."""
    return "<0.01" if value is not None and value < 0.005 else share(value)


def factor(value: Any) -> str:
    """Return a factor of a latency alone: ``1.05x``."""
    return "-" if value is None else f"{value:.2f}x"


def rate(value: Any) -> str:
    """Return a rate to four digits."""
    return "-" if value is None else f"{value:.4g}"


COLUMNS = (
    Column(key="setting", title="setting", least=22),
    Column(key="production_slice_us", title="prod. slice", right=True, format=time_slice, optional=True),
    Column(key="kept", title="production", right=True, format=share),
    Column(key="kept_error", title="std. error", right=True, rank=3, format=error_of),
    Column(key="p99", title="p99", right=True, format=factor, optional=True),
    Column(key="opportunistic_share", title="opportunistic", right=True, format=share),
    Column(key="opportunistic_rate", title="its rate", right=True, rank=2, format=rate),
    Column(key="trials", title="runs", right=True, rank=3),
    Column(key="meets", title="meets", rank=1),
    Column(key="safe", title="safely", rank=2),
    Column(key="chosen", title="chosen"),
)


_LEGEND: Final = (
    (
        "production, opportunistic: the share of its rate alone that each job has; p99: the latency relative to alone; "
        "std. error: of production's share; meets: reaches the goal; safely: by more than the scatter of the figures"
    ),
)


def _text(data: Mapping[str, Any]) -> str:
    goal = f"production keeps {100 * data['keep']:g} % of its rate alone"
    if data["p99_factor"] is not None:
        goal += f", p99 within {data['p99_factor']:g}x"
    best, nearest = data["best"], data["nearest"]
    lines = [f"{data['gpu_name'] or '-'}   driver {data['driver'] or '-'}   {data['date']}", f"goal: {goal}"]
    if best is not None:
        sure = "" if data["stable"] else " (not confirmed)"
        lines.append(f"found: {best['setting']}{sure}: {_numbers(best)}")
    elif nearest is not None:
        tried = "" if data["stable"] else " (not all were tried)"
        lines.append(f"no setting meets the goal{tried}; nearest: {nearest['setting']}: {_numbers(nearest)}")
    lines += [line for one in data["ways"] if (line := _way(one, best)) is not None]
    if data["low_priority_helps"] is not None:
        helps = "low priority spares production"
        if best is not None and best["way"] == "caps" and not best["low_priority"]:
            helps += ", and leaves the other less than a lower cap without it"
        lines.append(helps if data["low_priority_helps"] else "low priority makes no difference")
    lines += _LEGEND if data["curve"] else []
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  "))


def _way(one: Mapping[str, Any], best: Mapping[str, Any] | None) -> str | None:
    """Return what the way that was not chosen gives; None: nothing that was not said yet."""
    way = one["way"]
    if one["left_out"] is not None:
        return f"{way}: not searched: {one['left_out']}"
    if best is None or way == best["way"]:
        return None
    found, near = one["best"], one["nearest"]
    if found is not None:
        apart = [row["opportunistic_share"] for row in (best, found)]
        less = "" if None in apart else f"; the other does {share(max(0.0, apart[0] - apart[1]))} less"
        return f"{way}: {found['setting']}: {_numbers(found)}{less}"
    return f"{way}: none meets the goal" + ("" if near is None else f"; nearest: {near['setting']}: {_numbers(near)}")


def _numbers(one: Mapping[str, Any]) -> str:
    words = [f"production {share(one['kept'])} of alone"]
    words += [] if one["p99"] is None else [f"p99 {factor(one['p99'])}"]
    words += (
        [] if one["opportunistic_share"] is None else [f"opportunistic {share(one['opportunistic_share'])} of alone"]
    )
    return ", ".join(words)
