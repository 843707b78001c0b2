"""Times over matrix sizes: the table of seconds, and where copies begin to take turns."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare.base.errors import BadUsage
from gpushare.measure.built_in import parse_sizes, sizes_data
from gpushare.show.sizes import format_time, sizes_result


def benchmark(size: int, alone: float, gains: dict[int, float], way: str = "mps") -> dict[str, Any]:
    """Return the document of a benchmark in which N copies reach these multiples of one copy."""
    figures = {"mean": alone, "low": 0.9 * alone, "high": 1.1 * alone}
    cells = [
        {
            "way": way,
            "copies": copies,
            "throughput": {key: gain * value for key, value in figures.items()},
            "gain": {"value": gain},
            "failures": [],
        }
        for copies, gain in gains.items()
    ]
    return {
        "host": "sim:h200",
        "driver": "580",
        "gpu": {"index": 0, "name": "NVIDIA H200"},
        "started_at": 0.0,
        "window_seconds": 1.0,
        "repeat": 3,
        "seconds": 1.0,
        "reason": "finished",
        "workload": {"size": size, "backend": "torch", "cpu": False, "copy": True},
        "alone": {"throughput": figures},
        "cells": cells,
        "left_out": [],
    }


def test_the_time_of_copies_that_run_at_once_is_that_of_one() -> None:
    data = sizes_data([benchmark(256, 100.0, {1: 1.0, 4: 4.0}), benchmark(4096, 10.0, {1: 1.0, 4: 1.0})])
    seconds = {(cell["size"], cell["copies"]): cell["seconds"] for cell in data["cells"]}
    assert seconds == {(256, 1): 0.01, (256, 4): 0.01, (4096, 1): 0.1, (4096, 4): 0.4}
    (small, *_), *_ = [[cell for cell in data["cells"] if cell["copies"] == 4]]
    assert small["low"] < small["seconds"] < small["high"]


@pytest.mark.parametrize(
    ("gains", "until", "ends", "said"),
    [
        ({256: 4.0, 1024: 2.0, 4096: 1.0}, 1024, 4096, "concurrency ends at 4096 (1.00 x)"),
        ({256: 4.0, 1024: 2.0}, 1024, None, "up to 1024 (2.00 x one copy), the largest size"),
        ({256: 1.02, 1024: 1.0}, None, 256, "take turns at every size"),
        # A size that gains again after one that did not is not concurrency that went on.
        ({256: 4.0, 1024: 1.0, 4096: 1.3}, 256, 1024, "concurrency ends at 1024"),
    ],
)
def test_where_concurrency_ends(gains: dict[int, float], until: int | None, ends: int | None, said: str) -> None:
    data = sizes_data([benchmark(size, 10.0, {1: 1.0, 8: gain}) for size, gain in gains.items()])
    (found,) = data["concurrency"]
    assert (found["concurrent_until"], found["ends_at"], found["copies"]) == (until, ends, 8)
    assert said in (sizes_result(data).text or "")


def test_what_failed_has_no_time() -> None:
    failed = benchmark(256, 10.0, {1: 1.0, 2: 1.0})
    failed["cells"][1] |= {"throughput": None, "gain": None, "failures": ["round 1: copy 0: exit code 1"]}
    data = sizes_data([failed])
    assert data["cells"][1]["seconds"] is None
    assert data["concurrency"] == []
    (table,) = sizes_result(data).tables
    assert table.rows[0]["n2"] == "failed"


@pytest.mark.parametrize(("text", "sizes"), [("1024", (1024,)), ("4096, 256,256", (256, 4096))])
def test_sizes_of_a_list(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "a", "256,,512", "-1", "1234567", ",".join(str(16 + n) for n in range(33))])
def test_what_is_no_list_of_sizes(text: str) -> None:
    with pytest.raises(BadUsage) as caught:
        parse_sizes(text)
    assert caught.value.code == "bad_size"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (64.123e-6, "64.1 us"), (0.9999e-3, "1 ms"), (0.00127, "1.27 ms"), (2.5, "2.5 s")],
)
def test_times_have_their_unit(seconds: float | None, text: str) -> None:
    assert format_time(seconds) == text
