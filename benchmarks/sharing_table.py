"""The figures of `benchmarks.sharing` as a table, with what they are to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(results: Mapping[str, Any]) -> str:
    """Return all figures as a table with what they are to beat."""
    head = f"{results['gpu']}, driver {results['driver']}, gpushare {results['gpushare']}, {results['date']}"
    lines = [
        head,
        "",
        "| what | setting | production rate (95 %) | p99 | opportunistic | goal | met |",
        "|" + "---|" * 7,
    ]
    for part, which in (("pairs", ""), ("again", ", again"), ("ways", "")):
        for name, one in results.get(part, {}).items():
            tail = "-" if one["p99"] is None else f"{one['p99']:.2f}x"
            goal = one.get("goal")
            words = "" if goal is None else _goal(goal)
            other = _two(one["opportunistic"]) + _between(one.get("opportunistic_interval"))
            lines.append(
                f"| {name}{which} | {one['setting']} | {_kept(one)} | {tail} | {other} | {words} | {_met(one)} |"
            )
    for name, one in results.get("farm", {}).items():
        gain = "-" if one["gain"] is None else f"{one['gain']:.2f}x time-slicing, {one['of_best']:.2f} of the best"
        met = one["gain"] is not None and one["gain"] >= one["goal"] and one["of_best"] >= 0.97
        lines.append(f"| {name} | {one['pick']} | {gain} | - | - | >= {one['goal']}x | {'yes' if met else 'no'} |")
    one = results.get("pause")
    if one:
        lines.append(
            f"| {one['pair']} | pause | {_kept(one)} | - | {_two(one['opportunistic'])} | {_goal(one['goal'])} | {_met(one)} |"
        )
    return "\n".join([*lines, *_jobs(results.get("jobs", {}))]) + "\n"


def _jobs(jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not jobs:
        return []
    lines = [
        "",
        "| job alone | per second (spread) | p50, p99 | SM % | occupancy % | tensor % | DRAM % | W |",
        "|" + "---|" * 8,
    ]
    for name, one in jobs.items():
        spread = "" if one["spread"] is None else f" ({100 * one['spread']:.1f} %)"
        tail = "-" if one["p99"] is None else f"{_two(one['p50'])}, {one['p99']:.2f} ms"
        drawn = [one[key] for key in ("sm_percent", "occupancy_percent", "tensor_percent", "dram_percent", "watts")]
        numbers = " | ".join("-" if value is None else f"{value:.3g}" for value in drawn)
        lines.append(f"| {name} | {one['rate']:.1f}{spread} | {tail} | {numbers} |")
    return lines


def _kept(one: Mapping[str, Any]) -> str:
    return f"{one['kept']:.3f}" + _between(one["kept_interval"])


def _between(interval: Sequence[float | None] | None) -> str:
    low, high = interval or (None, None)
    return "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"


def _goal(goal: Mapping[str, Any]) -> str:
    tail = "" if goal.get("p99") is None else f", p99 <= {goal['p99']:.2f}x"
    return f">= {goal['rate']:g}{tail}, >= {goal['opportunistic']:g}"


def _met(one: Mapping[str, Any]) -> str:
    goal = one.get("goal")
    if goal is None:
        return ""
    met = one["kept"] >= goal["rate"] and (one["opportunistic"] or 0) >= goal["opportunistic"]
    if goal.get("p99") is not None:
        met = met and one.get("p99") is not None and one["p99"] <= goal["p99"]
    return "yes" if met else "no"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
