"""Times over matrix sizes: how long N copies take that each multiply once, and where they begin to take turns. Pure.

It is made of one benchmark of the built-in workload for each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpushare.base.errors import BadUsage
from gpushare.base.units import quoted

KIND: Final = "gpushare bench sizes"
# Copies that together do less than this more than one copy take turns.
_CONCURRENT: Final = 1.1
_MOST_SIZES: Final = 32


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a list, smallest first, each once; whether they can be run is judged elsewhere."""
    found = set()
    for word in (word.strip() for word in text.split(",")):
        if not (word.isascii() and word.isdigit() and len(word) < 7):
            raise BadUsage(
                f"--size {quoted(word)} is not a size", "give --size 1024, or --size 256,1024", code="bad_size"
            )
        found.add(int(word))
    if len(found) > _MOST_SIZES:
        raise BadUsage(f"{len(found)} sizes are too many", f"give at most {_MOST_SIZES}", code="bad_size")
    return tuple(sorted(found))


def sizes_data(benchmarks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the times of all sizes, from the document of each one's benchmark, as JSON types."""
    first, last = benchmarks[0], benchmarks[-1]
    cells = [cell for one in benchmarks for cell in _cells(one)]
    return {
        "kind": KIND,
        **{key: first[key] for key in ("host", "driver", "gpu", "started_at", "window_seconds", "repeat")},
        "workload": {key: value for key, value in first["workload"].items() if key != "size"},
        "seconds": round(sum(one["seconds"] for one in benchmarks), 3),
        "reason": last["reason"],
        "sizes": [one["workload"]["size"] for one in benchmarks],
        "cells": cells,
        "concurrency": _ends(cells),
        "left_out": [dict(one) for one in first["left_out"]],
        "benchmarks": [dict(one) for one in benchmarks],
    }


def _cells(benchmark: Mapping[str, Any]) -> list[dict[str, Any]]:
    size, alone = benchmark["workload"]["size"], benchmark["alone"]["throughput"]
    found = []
    for cell in benchmark["cells"]:
        rate, gain = cell["throughput"], cell["gain"]
        known = rate is not None and rate["mean"]
        copies = cell["copies"]
        found.append(
            {
                "size": size,
                "way": cell["way"],
                "copies": copies,
                # Until each copy has multiplied once; the interval is that of the rate, turned round.
                "seconds": _time(copies, rate["mean"]) if known else None,
                "low": _time(copies, rate["high"]) if known else None,
                "high": _time(copies, rate["low"]) if known else None,
                "alone_seconds": _time(1, alone["mean"]) if alone is not None else None,
                "gain": None if gain is None else gain["value"],
                "failures": list(cell["failures"]),
            }
        )
    return found


def _time(copies: int, rate: float | None) -> float | None:
    return float(f"{copies / rate:.6g}") if rate else None


def _ends(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return up to which size copies run at the same time under each way, by the most copies that were measured."""
    found = []
    for way in dict.fromkeys(cell["way"] for cell in cells):
        mine = [cell for cell in cells if cell["way"] == way and cell["gain"] is not None and cell["copies"] > 1]
        if not mine:
            continue
        copies = max(cell["copies"] for cell in mine)
        gains = {cell["size"]: cell["gain"] for cell in mine if cell["copies"] == copies}
        # A larger matrix fills the GPU more, so that the first size without a gain is the end.
        until = None
        for size in sorted(gains):
            if gains[size] < _CONCURRENT:
                break
            until = size
        ends = next((size for size in sorted(gains) if size > (until or 0)), None)
        found.append(
            {
                "way": way,
                "copies": copies,
                "concurrent_until": until,
                "ends_at": ends,
                "gain_until": None if until is None else gains[until],
                "gain_at_end": None if ends is None else gains[ends],
            }
        )
    return found
