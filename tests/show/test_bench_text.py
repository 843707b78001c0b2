"""What is said of a benchmark and of tune's figures, sentence by sentence."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare.show.bench import _sentence
from gpushare.show.tune import error_of


def pick(way: str, fastest: str, *same: str, **more: Any) -> dict[str, Any]:
    """Return an answer of a benchmark of two ways."""
    known = {"copies": 2, "threads_percent": None, "gain": None, "over": None, "certain": True, "ways": 2}
    return {**known, "way": way, "fastest": fastest, "no_difference": list(same), **more}


def test_the_simplest_way_is_called_so_only_where_it_was_chosen_for_it() -> None:
    assert _sentence(pick("timeslice", "mps", "timeslice")) == (
        "2 copies: no difference between the ways; timeslice is the simplest."
    )
    # By far the most in the mean, but the runs scatter.
    assert _sentence(pick("mps", "mps", "timeslice")) == "2 copies: no difference between the ways; mps had the most."
    assert _sentence(pick("mps", "mps")) == "2 copies: mps."


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.001, "<0.01"), (0.005, "0.01"), (0.034, "0.03")])
def test_a_standard_error_is_never_nothing(value: float | None, text: str) -> None:
    assert error_of(value) == text
