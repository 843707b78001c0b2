"""Wishes and names of instances as nobody means them: one short error, at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gpushare.base.errors import BadUsage, GpushareError
from gpushare.base.model import Gpu
from gpushare.base.selection import select, select_one
from gpushare.base.units import quoted
from gpushare.mig.target import find_targets
from gpushare.mig.wish import find_profile, parse_wish
from tests.cli.drive import Cli

NINES = "9" * 5000
LONG = "x" * 15_000


def test_quoted() -> None:
    assert (quoted("1g.10gb"), quoted("x" * 60)) == ("'1g.10gb'", f"'{'x' * 60}'")
    assert quoted("a" * 1000 + "z" * 1000) == f"'{'a' * 38}...{'z' * 19}'"


@pytest.mark.parametrize(
    "words", [" ".join(["1c.7g*1024"] * 16), "1g " * 5000, "1g*1000 2g*1000", "1g*1024 1g", "1c.1g*1024 2c.2g*1024"]
)
def test_so_many_instances_are_refused_at_once(words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(BadUsage, match=r"asks for \d+ instances") as caught:
        parse_wish(words)
    assert time.monotonic() - begun < 1.0
    assert caught.value.code == "bad_count"


def test_as_many_as_may_be_are_parsed_at_once() -> None:
    begun = time.monotonic()
    (one,) = parse_wish("1c.7g*1022")
    assert (one.count, len(one.compute)) == (146, 7)
    assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize(
    "text",
    [
        NINES,
        f"{NINES}g",
        f"1g.{NINES}gb",
        f"1g:{NINES}",
        f"1g*{NINES}",
        f"1g x{NINES}",
        f"{NINES}c.1g",
        f"1c.{NINES}",
        f"1c.{LONG}",
        f"1g+{LONG}",
        LONG,
        f"{LONG}*2",
        "*" * 15_000,
        ":" * 15_000,
        "1g:1:" * 3_000,
        "٣" * 5000,
    ],
)
def test_what_is_too_long_is_one_short_error(text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(BadUsage) as caught:
        parse_wish(text)
    assert len(caught.value.message) < 200
    assert len(caught.value.hint) < 300
    assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize("text", [NINES, LONG, f"{NINES}/1", f"0/{NINES}", f"1g:{NINES}", f"MIG-{LONG}", "٣" * 5000])
@pytest.mark.parametrize(
    "parse",
    [
        lambda text: find_targets(text, []),
        lambda text: find_profile(text, []),
        lambda text: select(text, [Gpu(index=0)]),
        lambda text: select(f"{text},", [Gpu(index=0)]),
        lambda text: select_one(text, [Gpu(index=0)]),
    ],
)
def test_so_do_names_of_instances_and_gpus(text: str, parse: Callable[[str], object]) -> None:
    with pytest.raises(GpushareError) as caught:
        parse(text)
    assert len(caught.value.message) < 200
    assert len(caught.value.gpu or "") <= 60


@pytest.mark.parametrize("value", [NINES, LONG])
@pytest.mark.parametrize(
    "words",
    [
        ("mig", "fits", "--sm", "{}"),
        ("mig", "fits", "--memory", "{}G"),
        ("mig", "name", "{}", "1g:0"),
        ("run", "--mig", "{}", "--", "true"),
    ],
)
def test_on_the_command_line(cli: Cli, words: tuple[str, ...], value: str) -> None:
    answer = cli(*(word.format(value) for word in words), host="sim:a100-80gb")
    assert answer.code in {2, 3, 6}, answer
    assert len(answer.lines("error")) == 1
    if "--sm" not in words and "--memory" not in words:
        assert len(answer.err) < 1500
