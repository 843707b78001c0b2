"""``gpushare tune``: the curve and the setting that was found, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpushare.base.errors import ExitCode, GpushareError
from gpushare.base.model import TunedWay, Way
from gpushare.base.units import format_slice
from gpushare.show.plot import picture
from gpushare.show.result import Column, Result, Table
from gpushare.show.text import wrapped

# Sentences are wrapped here, at any terminal width, and never cut.
_WIDTH: Final = 80
# The end of the name of a setting that has a column of its own in the table.
_PRODUCTION_SLICE: Final = ", production slice"
# A neighbour on the frontier is worth a line if the opportunistic job does more by this factor.
_MUCH_MORE: Final = 1.03


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting. Shares and factors are relative to the jobs alone; ``kept_error`` is a standard error.

    ``meets``: the setting meets the goal; ``safe``: by more than the standard errors. ``frontier``: no other setting that
    was measured is better for both sides. ``earlier`` is the date of figures of an earlier search.
    """

    setting: str
    way: TunedWay
    production_slice_us: int | None
    other_slice_us: int | None
    threads_percent: float
    low_priority: bool
    kept: float
    kept_error: float
    p99: float | None
    p99_low: float | None
    p99_high: float | None
    opportunistic_share: float | None
    opportunistic_share_error: float | None
    windows: int
    seconds: float
    meets: bool
    safe: bool
    frontier: bool
    chosen: bool
    earlier: str | None


@dataclass(frozen=True, kw_only=True)
class WayAnswer:
    """The best setting of one way, or the nearest; or why the way was not searched."""

    way: TunedWay
    best: Row | None
    nearest: Row | None
    left_out: str | None


@dataclass(frozen=True, kw_only=True)
class TuneAnswer:
    """The answer of ``gpushare tune``. Rates are per second; ``seconds`` count from when all jobs had printed.

    ``production_waits``: production waits for requests, so its rate is the demand and its latency decides.
    ``ended`` says why the search ended: ``answer``, ``budget``, or ``interrupted``. ``commands`` start the jobs as measured.
    """

    gpu_name: str | None
    driver: str | None
    date: str
    name: str | None
    keep: float
    p99_factor: float | None
    best: Row | None
    nearest: Row | None
    ways: tuple[WayAnswer, ...]
    stable: bool
    ended: str
    low_priority_helps: bool | None
    production_alone: float | None
    production_spread: float | None
    production_p99: float | None
    production_busy_percent: float | None
    production_waits: bool
    production_memory_bytes: int | None
    opportunistic_alone: float | None
    opportunistic_spread: float | None
    opportunistic_memory_bytes: int | None
    copies: int
    seconds: float
    measuring_seconds: float
    starting_seconds: float
    warning: str | None
    curve: tuple[Row, ...]
    commands: tuple[str, ...] = ()
    file: str | None = None


def tune_result(data: TuneAnswer, notes: Sequence[str], errors: Sequence[GpushareError]) -> Result:
    """Return the result of ``gpushare tune``; ``errors`` are what ended it early, and what could not be written."""
    return Result(
        data=data,
        text=_answer_text(data),
        tables=(
            Table(
                name="curve",
                title="settings of the opportunistic job",
                columns=COLUMNS,
                rows=tuple({**vars(row), "setting": row.setting.partition(_PRODUCTION_SLICE)[0]} for row in data.curve),
            ),
        ),
        notes=tuple(notes),
        errors=tuple(errors),
        # It ran as asked; the answer is that no setting meets the goal.
        exit_code=ExitCode.NOT_AS_REQUESTED if data.best is None and not errors else None,
    )


# A share of a rate alone, 0.97; and a factor of a latency alone, 1.05x.
share_text: Final = "{:.2f}".format
factor_text: Final = "{:.2f}x".format


def error_text(value: float) -> str:
    """Return a standard error; one that rounds to 0 is shown as small, not as 0."""
    return "<0.01" if value < 0.005 else share_text(value)


COLUMNS = (
    Column("setting", "setting", least=22),
    Column("production_slice_us", "prod. slice", right=True, format=format_slice, optional=True),
    Column("kept", "production", right=True, format=share_text),
    Column("kept_error", "std. error", right=True, rank=4, format=error_text),
    Column("p99", "p99", right=True, format=factor_text, optional=True),
    Column("opportunistic_share", "opportunistic", right=True, format=share_text),
    Column("opportunistic_share_error", "its error", right=True, rank=5, format=error_text),
    Column("seconds", "s", right=True, rank=3),
    Column("meets", "meets", rank=1),
    Column("safe", "safely", rank=2),
    Column("frontier", "frontier", rank=2),
    Column("chosen", "chosen"),
)


_LEGEND: Final = (
    "production, opportunistic: the share of its rate alone that each job has; p99: the latency relative to alone; "
    "std. error: of production's share; s: seconds watched; meets: reaches the goal; safely: by more than the scatter of the "
    "figures; frontier: no other setting is better for both"
)


def _answer_text(data: TuneAnswer) -> str:
    """Return the goal, the setting that was found, and what else was learned, as lines."""
    goal = f"production keeps {100 * data.keep:g} % of its rate alone"
    if data.p99_factor is not None:
        goal += f", p99 within {data.p99_factor:g}x"
    best = data.best
    nearest = data.nearest
    lines = [f"{data.gpu_name or '-'}   driver {data.driver or '-'}   {data.date}", f"goal: {goal}"]
    if best is not None:
        unsure = "" if data.stable else " (not confirmed)"
        lines.append(f"found: {best.setting}{unsure}: {_figures_text(best)}")
    elif nearest is not None:
        unsure = "" if data.stable else " (not all were tried)"
        lines.append(f"no setting meets the goal{unsure}; nearest: {nearest.setting}: {_figures_text(nearest)}")
    lines += [line for way in data.ways if (line := _other_way_line(way, best)) is not None]
    lines += _next_setting_lines(data)
    if data.low_priority_helps is False:
        lines.append("low priority makes no difference")
    elif data.low_priority_helps:
        lines.append("low priority spares production")
    if data.curve:
        lines.append(_LEGEND)
    return "\n".join(part for line in lines for part in wrapped(line, _WIDTH, rest="  "))


def _other_way_line(way: WayAnswer, best: Row | None) -> str | None:
    """Return the line about a way other than that of the best setting; None for that way, and if there is no best one."""
    if way.left_out is not None:
        return f"{way.way.value}: not searched: {way.left_out}"
    if best is None or way.way is best.way:
        return None
    if way.best is None:
        near = way.nearest
        nearest = "" if near is None else f"; nearest: {near.setting}: {_figures_text(near)}"
        return f"{way.way.value}: none meets the goal{nearest}"
    figures = f"{way.way.value}: {way.best.setting}: {_figures_text(way.best)}"
    share, share_of_best = way.best.opportunistic_share, best.opportunistic_share
    if share is None or share_of_best is None:
        return figures
    return f"{figures}; that is {max(0.0, share_of_best - share):.2f} less for the opportunistic job"


def _next_setting_lines(data: TuneAnswer) -> list[str]:
    """Return a line on the next setting of the frontier, where the opportunistic job does more at production's expense."""
    best = data.best
    if best is None or best.opportunistic_share is None:
        return []
    least_share = _MUCH_MORE * best.opportunistic_share
    candidates = [row for row in data.curve if row.frontier and (row.opportunistic_share or 0.0) > least_share]
    if not candidates:
        return []
    next_setting = min(candidates, key=lambda row: row.opportunistic_share or 0.0)
    return [f"for more, {next_setting.setting}: {_figures_text(next_setting)}"]


def _figures_text(row: Row) -> str:
    """Return the figures of a setting in words: production's share, its p99, the share of the others."""
    words = [f"production {share_text(row.kept)} of its rate alone"]
    if row.p99 is not None:
        between = "" if row.p99_low is None or row.p99_high is None else f" ({row.p99_low:.2f} to {row.p99_high:.2f})"
        words.append(f"p99 {factor_text(row.p99)}{between}")
    if row.opportunistic_share is not None:
        error = row.opportunistic_share_error
        scatter = f" ±{error:.2f}" if error is not None and error >= 0.01 else ""
        words.append(f"opportunistic {share_text(row.opportunistic_share)}{scatter} of its rate alone")
    return ", ".join(words)


def frontier_picture(data: TuneAnswer, form: str) -> bytes:
    """Return the settings as a picture, ``png`` or ``svg``: what production keeps against what the others get."""
    by_p99 = data.p99_factor is not None and any(row.p99 is not None for row in data.curve)

    def cost(row: Row) -> float:
        return (row.p99 or 0.0) if by_p99 else row.kept

    def draw(axes: Any) -> None:
        for way, marker in ((Way.SLICES, "o"), (Way.CAPS, "s")):
            rows = [row for row in data.curve if row.way == way and row.opportunistic_share is not None]
            if rows:
                points = [row.opportunistic_share or 0.0 for row in rows], [cost(row) for row in rows]
                axes.scatter(*points, marker=marker, label=way.value)
        line = sorted((row.opportunistic_share or 0.0, cost(row)) for row in data.curve if row.frontier)
        axes.plot([x for x, _ in line], [y for _, y in line], alpha=0.5, label="frontier")
        axes.axhline((data.p99_factor if by_p99 else data.keep) or 0.0, linestyle="--", color="grey", label="goal")
        if data.best is not None and data.best.opportunistic_share is not None:
            axes.annotate(data.best.setting, (data.best.opportunistic_share, cost(data.best)))
        axes.set_xlabel("share of its rate alone that the opportunistic job has")
        axes.set_ylabel(
            "production's p99, relative to alone" if by_p99 else "share of its rate alone that production has"
        )

    return picture(form, data.gpu_name, data.driver, draw)
