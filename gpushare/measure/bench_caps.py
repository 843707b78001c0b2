"""What a benchmark says of thread caps under MPS: the best for each number of copies. Pure, from its document."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpushare.host.benched import BenchedCap


def best_caps(data: Mapping[str, Any]) -> dict[int, BenchedCap]:
    """Return the best cap under MPS for each number of copies that was measured under it without a failure.

    The pick of the benchmark counts where it is under MPS: of ways that do not differ it is the simplest.
    """
    date = time.strftime("%Y-%m-%d", time.localtime(data.get("started_at") or 0))
    picks = {one["copies"]: str(one.get("way")) for one in data.get("picks") or () if one}
    found: dict[int, Mapping[str, Any]] = {}
    for cell in data["cells"]:
        if not str(cell["way"]).startswith("mps") or cell.get("failures") or _mean(cell) <= 0:
            continue
        copies = cell["copies"]
        before = found.get(copies)
        picked = picks.get(copies) == cell["way"]
        if before is None or picked or (_mean(cell) > _mean(before) and picks.get(copies) != before["way"]):
            found[copies] = cell
    return {
        copies: BenchedCap(
            threads_percent=_percent(cell),
            best=picks.get(copies, cell["way"]) == cell["way"],
            date=date,
            driver=data.get("driver"),
        )
        for copies, cell in found.items()
    }


def _mean(cell: Mapping[str, Any]) -> float:
    return float((cell.get("throughput") or {}).get("mean") or 0.0)


def _percent(cell: Mapping[str, Any]) -> float | None:
    value = cell.get("threads_percent")
    return float(value) if isinstance(value, (int, float)) and 0 < value < 100 else None
