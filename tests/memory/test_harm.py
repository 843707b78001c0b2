"""How much a job and those on a GPU slow each other down, by what they use of it."""

from __future__ import annotations

import pytest

from gpushare.memory.room import harm_in_words, harm_percent


@pytest.mark.parametrize(
    ("mine", "others", "percent", "words"),
    [
        (50, 0.0, 0, "it is idle"),
        (50, 20.0, 0, "it uses 50 %, those there 20 %"),
        (50, 51.0, 1, "it uses 50 %, those there 51 %, and 1 % has to wait"),
        (50, 90.0, 40, "it uses 50 %, those there 90 %, and 40 % has to wait"),
        # What waits there already is no harm of this job.
        (50, 130.0, 50, "it uses 50 %, those there 130 %, and 50 % has to wait"),
        (None, 40.0, 40, "it is 40 % busy"),
        # Unknown is never better than any answer could be.
        (50, None, 50, "how busy it is is not known"),
        (None, None, 100, "how busy it is is not known"),
    ],
)
def test_what_is_above_all_of_a_gpu_has_to_wait(
    mine: float | None, others: float | None, percent: float, words: str
) -> None:
    assert harm_percent(mine, others) == percent
    assert harm_in_words(mine, others) == words
