"""Two benchmarks side by side: whether they can be compared, what else differs between them, and who is faster. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from gpushare.errors import BadUsage
from gpushare.measure.bench_data import metric_data
from gpushare.measure.metric import Metric


def check_comparable(metric: Metric, before: Mapping[str, Any]) -> None:
    """Raise unless an earlier benchmark counts the same thing: before anything is measured.

    Raises:
        BadUsage: it counts something else.
    """
    if before.get("metric") != metric_data(metric):
        raise BadUsage(
            "the two benchmarks count different things", "measure both with the same --metric", code="other_metric"
        )


def what_else_differs(data: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each thing beside the figures in which the earlier benchmark was another one."""
    pairs = (
        ("on another device", _device(data), _device(before)),
        ("under another driver", data.get("driver"), before.get("driver")),
        ("of another command", _command(data), _command(before)),
        ("for another time", data.get("window_seconds"), before.get("window_seconds")),
    )
    return [f"the earlier one was measured {what}: {then or 'unknown'}" for what, now, then in pairs if now != then]


def _device(data: Mapping[str, Any]) -> str | None:
    gpu = data.get("gpu")
    if not isinstance(gpu, dict):
        return None
    return " ".join(str(gpu[key]) for key in ("name", "mig") if gpu.get(key)) or None


def _command(data: Mapping[str, Any]) -> str | None:
    workload, words = data.get("workload"), data.get("command")
    if isinstance(workload, dict):
        return str(workload.get("title"))
    return shlex.join(map(str, words)) if isinstance(words, list) else None


def compared(data: Mapping[str, Any], before: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every cell of two benchmarks side by side; ``verdict`` is faster, slower, no difference, or unknown."""
    # Each was measured on what may be another GPU, at another time: alone is not compared here.
    was = {(cell["way"], cell["copies"]): cell for cell in before["cells"]}
    rows = []
    for cell in data["cells"]:
        old = was.get((cell["way"], cell["copies"]))
        if old is None or not old.get("throughput") or not cell["throughput"]:
            continue
        now, then = cell["throughput"], old["throughput"]
        change = now["mean"] / then["mean"] if then.get("mean") else None
        rows.append(
            {
                "way": cell["way"],
                "copies": cell["copies"],
                "before": then.get("mean"),
                "now": now["mean"],
                "ratio": None if change is None else round(change, 6),
                "verdict": _change(now, then, higher=data["metric"]["higher_is_better"]),
            }
        )
    return rows


def _change(now: Mapping[str, Any], then: Mapping[str, Any], *, higher: bool) -> str:
    low, high, was_low, was_high = now.get("low"), now.get("high"), then.get("low"), then.get("high")
    if low is None or high is None or was_low is None or was_high is None:
        return "unknown"
    if low > was_high:
        return "faster" if higher else "slower"
    if high < was_low:
        return "slower" if higher else "faster"
    return "no difference"
