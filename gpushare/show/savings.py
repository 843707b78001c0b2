"""``gpushare savings``: the options as data, as a table, and in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from gpushare.advice.savings import Option, Price, Savings
from gpushare.base.units import format_bytes
from gpushare.show.result import Column, Result, Table, plain_value

_VERDICTS: Final = {"fits": "fits", "above_target": "above the target", "no_headroom": "no headroom"}


@dataclass(frozen=True, kw_only=True)
class SavingsAnswer(Savings):
    """The answer of `savings`."""

    instance: str | None
    # Of each GPU now.
    loads_percent: tuple[Decimal, ...]
    memory_bytes: tuple[int | None, ...]
    # Of one GPU.
    gpu_memory_bytes: int | None


def savings_result(data: SavingsAnswer, notes: Sequence[str] = ()) -> Result:
    """Return the result of ``gpushare savings``."""
    lines = [_now(data), *(_line(option, data) for option in data.options)]
    lines += _headroom(data)
    lines += [f"warning: {warning}" for warning in data.warnings]
    lines.append(_price(data.price))
    columns = (
        Column(key="gpus", title="GPUs", right=True),
        Column(key="cost", title="cost", right=True, format=money),
        Column(key="saving", title="saving", right=True, format=money),
        Column(key="saving_percent", title="saving %", right=True, rank=1),
        Column(key="max_load_percent", title="fullest %", right=True),
        Column(key="max_p95_percent", title="sum of p95 %", right=True, rank=2, optional=True),
        Column(key="max_memory_bytes", title="memory", right=True, rank=1, optional=True, format=format_bytes),
        Column(key="verdict", title="verdict", format=lambda value: _VERDICTS.get(value, str(value))),
        Column(key="places", title="together", rank=3, least=12, format=_together),
    )
    table = Table(name="options", columns=columns, rows=data.options, empty="no smaller number of GPUs fits")
    return Result(command="savings", data=data, text="\n".join(lines), tables=(table,), notes=tuple(notes))


def money(value: Decimal | None) -> str:
    """Return an amount for people: ``$2,165.76``, or ``-`` if unknown."""
    return "-" if value is None else f"${value:,.2f}"


def _now(data: SavingsAnswer) -> str:
    cost, price, loads = data.cost, data.price, data.loads_percent
    each = f"{plain_value(loads[0])} % load each" if len(set(loads)) == 1 else f"{plain_value(data.total_load_percent)} % load together"
    head = f"now: {data.gpus} x {data.instance or 'GPU'} at {each}"
    if price is None:
        return head
    return f"{head}: {data.gpus} x ${plain_value(price.per_hour)}/h x {plain_value(price.hours)} h = {money(cost)}"


def _line(option: Option, data: SavingsAnswer) -> str:
    if data.cost is None:
        change = f"{data.gpus} to {option.gpus}: {plain_value(option.saving_percent)} % fewer"
    else:
        change = (
            f"{data.gpus} to {option.gpus}: from {money(data.cost)} to {money(option.cost)}, "
            f"saving {money(option.saving)} ({plain_value(option.saving_percent)} %)"
        )
    load = f"fullest {plain_value(option.max_load_percent)} %, {_VERDICTS[option.verdict]}"
    return f"{change}; {load}{'  <- recommended' if option.recommended else ''}"


def _headroom(data: SavingsAnswer) -> list[str]:
    """Return what the recommended option costs more than the one with the fewest GPUs, which has no room for peaks."""
    fewest, chosen = min(data.options, key=lambda option: option.gpus, default=None), data.recommended
    if fewest is None or chosen is None or chosen.gpus == fewest.gpus:
        return []
    more = chosen.gpus - fewest.gpus
    cost = "" if chosen.cost is None or fewest.cost is None else f", {money(chosen.cost - fewest.cost)}"
    loads = f"{plain_value(chosen.max_load_percent)} % full instead of {plain_value(fewest.max_load_percent)} %"
    return [f"headroom costs {more} GPU{'s' * (more > 1)} more{cost}: {loads}"]


def _price(price: Price | None) -> str:
    if price is None:
        return "price: none given, so no amounts; give the price of one GPU per hour: --price 0.752"
    return f"price: ${plain_value(price.per_hour)} per GPU per hour, {plain_value(price.hours)} hours; source: {price.source}"


def _together(places: Any) -> str:
    return "; ".join(" + ".join(place) for place in places if place)
