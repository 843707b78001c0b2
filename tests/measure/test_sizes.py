"""Times over matrix sizes: the table of seconds, and where copies begin to take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare.base.benchmark import BenchAnswer, BuiltInWorkload
from gpushare.base.errors import BadUsage
from gpushare.measure.built_in import parse_sizes, sizes_answer
from gpushare.show.bench import format_time, sizes_result
from tests.errors import fails
from tests.measure.test_bench import answer, measured


def benchmark(size: int, alone: float, gains: dict[int, float]) -> BenchAnswer:
    """Return a benchmark in which N copies under MPS reach these multiples of one copy."""
    figures = {("alone", 1): 1.0, **{("mps", copies): gain / copies for copies, gain in gains.items()}}
    rates = {cell: [0.9 * alone * rate, alone * rate, 1.1 * alone * rate] for cell, rate in figures.items()}
    title = f"{size} x {size} matrix multiplications, with a copy from the GPU next to each (torch)"
    workload = BuiltInWorkload(title=title, unit="", size=size, cpu=False, copy="from", footprint=None, backend="torch")
    return replace(answer(measured("mps", tuple(gains), rates)), workload=workload)


def test_the_time_of_copies_that_run_at_once_is_that_of_one() -> None:
    data = sizes_answer([benchmark(256, 100.0, {1: 1.0, 4: 4.0}), benchmark(4096, 10.0, {1: 1.0, 4: 1.0})])
    seconds = {(cell.size, cell.copies): cell.seconds for cell in data.cells}
    assert seconds == {(256, 1): 0.01, (256, 4): 0.01, (4096, 1): 0.1, (4096, 4): 0.4}
    small = next(cell for cell in data.cells if cell.copies == 4)
    assert (small.low or 1) < (small.seconds or 0) < (small.high or 0)
    assert (data.sizes, data.workload.size, data.workload.backend) == ((256, 4096), None, "torch")
    program = "\nmatrix multiplications, with a copy from the GPU next to each (torch)\n"
    assert program in (sizes_result(data).text or "")


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
    data = sizes_answer([benchmark(size, 10.0, {1: 1.0, 8: gain}) for size, gain in gains.items()])
    (row,) = data.concurrency
    assert (row.concurrent_until, row.ends_at, row.copies) == (until, ends, 8)
    assert said in (sizes_result(data).text or "")


def test_what_failed_has_no_time() -> None:
    whole = benchmark(256, 10.0, {1: 1.0, 2: 1.0})
    failed = replace(whole.cells[1], throughput=None, gain=None, failures=("round 1: copy 0: exit code 1",))
    data = sizes_answer([replace(whole, cells=(whole.cells[0], failed))])
    assert data.cells[1].seconds is None
    assert data.concurrency == ()
    (table,) = sizes_result(data).tables
    assert table.rows[0]["n2"] == "failed"


@pytest.mark.parametrize(("text", "sizes"), [("1024", (1024,)), ("4096, 256,256", (256, 4096))])
def test_sizes_of_a_list(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "a", "256,,512", "-1", "1234567", ",".join(str(16 + n) for n in range(33))])
def test_what_is_no_list_of_sizes(text: str) -> None:
    with fails(BadUsage, "bad_size"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(64.123e-6, "64.1 us"), (0.9999e-3, "1 ms"), (0.00127, "1.27 ms"), (2.5, "2.5 s")],
)
def test_times_have_their_unit(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
