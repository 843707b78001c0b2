"""``gpushare savings``: the options as data, as a table, and in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpushare.base.units import format_bytes
from gpushare.show.result import Column, Result, Table

_VERDICTS: Final = {"fits": "fits", "above_target": "above the target", "no_headroom": "no headroom"}


def savings_result(data: Mapping[str, Any], notes: Sequence[str] = ()) -> Result:
    """Return the result of ``gpushare savings`` from the data of its JSON document."""
    lines = [_now(data), *(_line(option, data) for option in data["options"])]
    lines += _headroom(data)
    lines += [f"warning: {warning}" for warning in data["warnings"]]
    lines.append(_price(data["price"]))
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
    table = Table(name="options", columns=columns, rows=tuple(data["options"]), empty="no smaller number of GPUs fits")
    return Result(command="savings", data=data, text="\n".join(lines), tables=(table,), notes=tuple(notes))


def money(value: float | None) -> str:
    """Return an amount for people: ``$2,165.76``, or ``-`` if unknown."""
    return "-" if value is None else f"${value:,.2f}"


def _now(data: Mapping[str, Any]) -> str:
    cost, price, loads = data["cost"], data["price"], data["loads_percent"]
    each = f"{loads[0]:g} % load each" if len(set(loads)) == 1 else f"{data['total_load_percent']:g} % load together"
    head = f"now: {data['gpus']} x {data['instance'] or 'GPU'} at {each}"
    if price is None:
        return head
    return f"{head}: {data['gpus']} x ${price['per_hour']:g}/h x {price['hours']:g} h = {money(cost)}"


def _line(option: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if data["cost"] is None:
        change = f"{data['gpus']} to {option['gpus']}: {option['saving_percent']:g} % fewer"
    else:
        change = (
            f"{data['gpus']} to {option['gpus']}: from {money(data['cost'])} to {money(option['cost'])}, "
            f"saving {money(option['saving'])} ({option['saving_percent']:g} %)"
        )
    load = f"fullest {option['max_load_percent']:g} %, {_VERDICTS[option['verdict']]}"
    return f"{change}; {load}{'  <- recommended' if option['recommended'] else ''}"


def _headroom(data: Mapping[str, Any]) -> list[str]:
    """Return what the recommended option costs more than the one with the fewest GPUs, which has no room for peaks."""
    fewest = min(data["options"], key=lambda option: option["gpus"], default=None)
    chosen = next((option for option in data["options"] if option["recommended"]), None)
    if fewest is None or chosen is None or chosen["gpus"] == fewest["gpus"]:
        return []
    more = chosen["gpus"] - fewest["gpus"]
    cost = "" if chosen["cost"] is None else f", {money(chosen['cost'] - fewest['cost'])}"
    loads = f"{chosen['max_load_percent']:g} % full instead of {fewest['max_load_percent']:g} %"
    return [f"headroom costs {more} GPU{'s' * (more > 1)} more{cost}: {loads}"]


def _price(price: Mapping[str, Any] | None) -> str:
    if price is None:
        return "price: none given, so no amounts; give the price of one GPU per hour: --price 0.752"
    return f"price: ${price['per_hour']:g} per GPU per hour, {price['hours']:g} hours; source: {price['source']}"


def _together(places: Any) -> str:
    return "; ".join(" + ".join(place) for place in places if place)
