"""Which copies may start, how many run together, and what each is given: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from gpushare.base.errors import BadUsage
from gpushare.base.units import GIB, MIB
from gpushare.mps.limits import CONTEXT_BYTES
from gpushare.run.farm import (
    MOST_COPIES,
    MOST_LINE_BYTES,
    copies_at_once,
    next_step,
    parse_lines,
    share_of_threads,
    size_of_others,
)
from tests.errors import fails

counts = some.integers(0, 20)


@given(counts, counts, some.none() | some.integers(1, 20), some.booleans(), some.booleans())
def test_a_farm_starts_only_what_may_start(
    waiting: int, running: int, parallel: int | None, size_known: bool, giving_up: bool
) -> None:
    step = next_step(waiting=waiting, running=running, parallel=parallel, size_known=size_known, giving_up=giving_up)
    if step in {"start", "alone"}:
        assert waiting
        assert not giving_up
        assert parallel is None or running < parallel
    # Of unknown size, one runs alone; it is never started next to another, nor another next to it.
    assert (step == "alone") <= (not running and not size_known)
    assert (step == "start") <= size_known
    # It never waits for nothing, and never ends with work left, unless it gives up.
    assert (step == "wait") <= (running > 0)
    assert (step == "end") <= (giving_up or (not running and not waiting))


def test_every_copy_starts_in_the_end() -> None:
    for parallel in (None, 1, 3):
        waiting, running, measured = 7, 0, False
        for _ in range(100):
            step = next_step(waiting=waiting, running=running, parallel=parallel, size_known=measured, giving_up=False)
            if step == "end":
                break
            if step == "wait":
                running, measured = running - 1, True
            else:
                waiting, running = waiting - 1, running + 1
        assert (waiting, running) == (0, 0)


@given(
    some.integers(0, 200),
    some.none() | some.integers(1, 50),
    some.dictionaries(some.sampled_from("abcd"), some.none() | some.integers(0, 60), min_size=1),
)
def test_copies_are_dealt_out_evenly_and_to_each_what_fits(
    copies: int, parallel: int | None, fitting: dict[str, int | None]
) -> None:
    dealt = copies_at_once(copies, parallel, fitting)
    most = copies if parallel is None else min(copies, parallel)
    assert dealt.keys() == fitting.keys()
    assert all(number == 1 or fitting[key] is None or number <= (fitting[key] or 0) for key, number in dealt.items())
    # At least one each counts, even where all wait.
    assert sum(dealt.values()) <= max(most, 0) + len(dealt)
    for key, number in dealt.items():
        if number < max(dealt.values()) - 1:
            # Fewer than elsewhere only where no more fit.
            assert fitting[key] is not None
            assert number >= (fitting[key] or 0)


def test_the_cap_is_of_those_that_run_together() -> None:
    assert copies_at_once(100, None, {"a": 10, "b": 4}) == {"a": 10, "b": 4}
    assert copies_at_once(100, 8, {"a": None, "b": None}) == {"a": 4, "b": 4}
    assert copies_at_once(3, None, {"a": 0, "b": 9}) == {"a": 1, "b": 3}
    assert [share_of_threads(number) for number in (1, 2, 3, 16, 10_000)] == [None, None, 66.7, 12.5, 0.1]


def test_the_others_reserve_a_fifth_more_than_was_measured() -> None:
    assert size_of_others(10 * GIB) == 12 * GIB
    assert size_of_others(None) == CONTEXT_BYTES
    assert size_of_others(1000 * MIB + 1) % MIB == 0


def test_lines_are_read_without_the_empty_ones() -> None:
    assert parse_lines(b"a b\r\n\n  \n{}\n\xc3\xa4", "x") == ("a b", "{}", "\u00e4")


def test_a_line_and_a_file_of_lines_have_a_bound() -> None:
    longest, most = b"x" * MOST_LINE_BYTES, b"a\n" * MOST_COPIES
    assert parse_lines(longest, "x") == (longest.decode(),)
    assert len(parse_lines(most, "x")) == MOST_COPIES
    wrong = (
        (longest + b"x", "bytes"),
        (most + b"a", "lines"),
        (b"\xff", "not text"),
        (b"a\0b", "not text"),
        (b"\n \n", "no lines"),
    )
    for text, message in wrong:
        with fails(BadUsage, "bad_lines", match=message):
            parse_lines(text, "x")
