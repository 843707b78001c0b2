"""What is said of a benchmark and of tune's figures, sentence by sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.benchmark import BenchAnswer, BenchCell, Metric, Pick, Ratio, Summary
from gpushare.cli.bench import _interrupted_error as interrupted
from gpushare.show.bench import _pick_sentence, _throughput_table, bench_result
from gpushare.show.tune import error_text
from tests.measure.test_bench import answer, measured


def pick(way: str, fastest: str, *same: str, **more: Any) -> Pick:
    """Return an answer of a benchmark of two ways."""
    usual = {"copies": 2, "threads_percent": None, "gain": None, "over": None, "certain": True, "ways": 2}
    return Pick(**{**usual, "way": way, "fastest": fastest, "no_difference": same, "open_ways": 0, **more})


def test_the_simplest_way_is_called_so_only_where_it_was_chosen_for_it() -> None:
    assert _pick_sentence(pick("timeslice", "mps", "timeslice")) == (
        "2 copies: no winner: timeslice and mps are not told apart; timeslice is the simplest."
    )
    # By far the most in the mean, but the runs scatter.
    assert _pick_sentence(pick("mps", "mps", "timeslice")) == (
        "2 copies: no winner: mps and timeslice are not told apart; mps had the highest mean."
    )
    assert _pick_sentence(pick("mps", "mps")) == "2 copies: mps."


def test_a_gain_is_told_only_over_a_way_that_is_told_apart() -> None:
    gain = {"gain": Ratio(value=1.31, low=None, high=None), "over": "timeslice", "ways": 3}
    assert _pick_sentence(pick("mps", "streams", "mps", **gain)) == (
        "2 copies: no winner: mps and streams are not told apart; mps is the simplest, 1.31 x timeslice."
    )
    assert "1.31" not in _pick_sentence(pick("mps", "mps", "timeslice", **gain))


def cell(way: str, mean: float, spread: float, *, chosen: bool = False) -> BenchCell:
    """Return a cell of the table of throughputs."""
    low, high = mean * (1 - spread), mean * (1 + spread)
    figures = Summary(mean=mean, low=low, high=high, spread=2 * spread, runs=3)
    return BenchCell(way=way, copies=2, throughput=figures, chosen=chosen)


def benchmark(cells: tuple[BenchCell, ...], *picks: Pick) -> BenchAnswer:
    """Return a benchmark of a command that counts its runs."""
    return replace(answer(measured("mps", (2,), {}, Metric())), cells=cells, picks=picks)


def table(answer: Pick) -> tuple[str, list[str]]:
    """Return the title of the table of throughputs, and its figures."""
    cells = (cell("mps", 0.946, 0.01, chosen=True), cell("streams", 0.913, 0.16), cell("queue", 0.3, 0.01))
    made = _throughput_table(benchmark(cells, answer))
    return made.title or "", [row["n2"] for row in made.rows]


def test_only_a_way_that_is_told_apart_from_all_others_is_marked_as_the_winner() -> None:
    assert table(pick("mps", "mps", ways=3)) == (
        "runs per second, all copies together (* use this)",
        ["* 0.946 ±1%", "0.913 ±16%", "0.3 ±1%"],
    )
    assert table(pick("mps", "mps", "streams", ways=3)) == (
        "runs per second, all copies together (~ not told apart)",
        ["~ 0.946 ±1%", "~ 0.913 ±16%", "0.3 ±1%"],
    )
    assert table(pick("mps", "mps", ways=3, certain=False)) == (
        "runs per second, all copies together",
        ["0.946 ±1%", "0.913 ±16%", "0.3 ±1%"],
    )


@pytest.mark.parametrize(("value", "text"), [(0.001, "<0.01"), (0.005, "0.01"), (0.034, "0.03")])
def test_a_standard_error_is_never_nothing(value: float, text: str) -> None:
    assert error_text(value) == text


def test_an_interrupted_benchmark_says_which_file_has_its_runs() -> None:
    assert interrupted(1, None).message == "interrupted after 1 run; the figures are shown, and no file has them"
    assert interrupted(3, Path("b.json")).message == "interrupted after 3 runs; b.json has them"


def test_what_was_not_measured_before_an_interruption_is_no_row() -> None:
    cells = (cell("mps", 2.0, 0.01), BenchCell(way="timeslice", copies=2), BenchCell(way="mps", copies=4))
    throughput, details = bench_result(benchmark((*cells, BenchCell(way="mig", copies=2, failures=("x",))))).tables
    assert [(row["way"], row["n2"]) for row in throughput.rows] == [("mps", "2 ±1%"), ("mig", "failed")]
    assert [row.way for row in details.rows] == ["mps", "mig"]
