"""Text on its way out: a command is never broken where it could not be copied, nothing turns the line around."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.show.text import complete_commands, safe_json, set_host, visible, wrapped

WORDS = st.text(st.sampled_from("abcxyz09=/._"), min_size=1, max_size=24)
QUOTED = st.lists(WORDS, min_size=1, max_size=4).map(lambda words: f"'{' '.join(words)}'")
COMMAND = st.lists(st.one_of(WORDS, QUOTED), min_size=1, max_size=14).map(
    lambda words: f"gpushare -n {' '.join(words)}"
)


def copied(text: str) -> str:
    """Return what a shell reads of lines that were copied, with its other blanks as they are."""
    return re.sub(r" \\\n +", " ", text)


@given(COMMAND, st.integers(40, 120), st.booleans())
def test_a_command_that_is_copied_is_the_same(command: str, width: int, whole: bool) -> None:
    text = command if whole else f"it is too small: {command}; or make it larger by hand, which takes a while"
    lines = wrapped(text, width, "    ", "    ", command=whole)
    out = copied("\n".join(lines))
    assert command in out
    assert not whole or shlex.split(out) == shlex.split(command)
    longest = max(map(len, [*command.split(), *re.findall("'[^']*'", command)]))
    assert max(map(len, lines)) <= max(width, longest + 6)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("or: gpushare status -g 0", ["or: gpushare status -g 0"]),
        # On a line of its own, where it fits one.
        ("this takes a while; or: gpushare status -g 0", ["this takes a while; or:", "gpushare status -g 0"]),
        ("gpushare says in which way, and no more than that", ["gpushare says in which way,", "and no more than that"]),
        ("see it (gpushare swap list --all -v) first", ["see it", "(gpushare swap list --all -v)", "first"]),
        ("gpushare run -g 0 --name train -- CMD", ["gpushare run -g 0 --name \\", "train -- CMD"]),
        ("gpushare run 'a b c' --name 'd e f'", ["gpushare run 'a b c' --name \\", "'d e f'"]),
    ],
)
def test_where_lines_are_broken(text: str, lines: list[str]) -> None:
    assert wrapped(text, 30) == lines


@pytest.mark.parametrize("mark", ["\u200e", "\u200f", "\u061c", "\u202e", "\u2066"])
def test_marks_of_direction_are_shown(mark: str) -> None:
    assert visible(f"a{mark}b") == f"a\\u{ord(mark):04x}b"
    assert safe_json(f'"a{mark}b"') == f'"a\\u{ord(mark):04x}b"'


def test_only_commands_get_the_host():
    set_host("sim:a b", ("jobs", "mig"), simulated=True)
    try:
        prose = "gpushare did not start it; gpushare mig-parted, gpushare jobless"
        assert complete_commands(prose) == prose
        assert complete_commands("undo: gpushare mig a && gpushare mig b || gpushare jobs") == (
            "undo: gpushare --host 'sim:a b' mig a && gpushare --host 'sim:a b' mig b || gpushare --host 'sim:a b' jobs"
        )
        assert complete_commands("see: gpushare jobs; or sudo gpushare mig list") == (
            "see: gpushare --host 'sim:a b' jobs; or sudo gpushare --host 'sim:a b' mig list"
        )
    finally:
        set_host(None, (), simulated=False)
