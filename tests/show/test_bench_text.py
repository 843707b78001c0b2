"""What is said of a benchmark and of tune's figures, sentence by sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpushare.cli.bench import _interrupted as interrupted
from gpushare.show.bench import _sentence, _throughput
from gpushare.show.tune import error_of


def pick(way: str, fastest: str, *same: str, **more: Any) -> dict[str, Any]:
    """Return an answer of a benchmark of two ways."""
    known = {"copies": 2, "threads_percent": None, "gain": None, "over": None, "certain": True, "ways": 2}
    return {**known, "way": way, "fastest": fastest, "no_difference": list(same), **more}


def test_the_simplest_way_is_called_so_only_where_it_was_chosen_for_it() -> None:
    assert _sentence(pick("timeslice", "mps", "timeslice")) == (
        "2 copies: no winner: timeslice and mps are not told apart; timeslice is the simplest."
    )
    # By far the most in the mean, but the runs scatter.
    assert _sentence(pick("mps", "mps", "timeslice")) == (
        "2 copies: no winner: mps and timeslice are not told apart; mps had the highest mean."
    )
    assert _sentence(pick("mps", "mps")) == "2 copies: mps."


def test_a_gain_is_told_only_over_a_way_that_is_told_apart() -> None:
    gain = {"gain": {"value": 1.31}, "over": "timeslice", "ways": 3}
    assert _sentence(pick("mps", "streams", "mps", **gain)) == (
        "2 copies: no winner: mps and streams are not told apart; mps is the simplest, 1.31 x timeslice."
    )
    assert "1.31" not in _sentence(pick("mps", "mps", "timeslice", **gain))


def cell(way: str, mean: float, spread: float, *, chosen: bool = False) -> dict[str, Any]:
    """Return a cell of the table of throughputs."""
    figures = {"mean": mean, "low": mean * (1 - spread), "high": mean * (1 + spread)}
    return {"way": way, "copies": 2, "throughput": figures, "failures": [], "chosen": chosen}


def table(answer: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the title of the table of throughputs, and its figures."""
    data = {
        "cells": [cell("mps", 0.946, 0.01, chosen=True), cell("streams", 0.913, 0.16), cell("queue", 0.3, 0.01)],
        "picks": [answer],
        "metric": {"pattern": None},
        "workload": None,
    }
    made = _throughput(data)
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


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.001, "<0.01"), (0.005, "0.01"), (0.034, "0.03")])
def test_a_standard_error_is_never_nothing(value: float | None, text: str) -> None:
    assert error_of(value) == text


def test_an_interrupted_benchmark_says_which_file_has_its_runs() -> None:
    assert interrupted(1, None).message == "interrupted after 1 run; its figures are shown, and no file has them"
    assert "--to FILE" in interrupted(3, None).hint
    assert interrupted(3, Path("b.json")).message == "interrupted after 3 runs; b.json has them"
    assert "--to" not in interrupted(3, Path("b.json")).hint
