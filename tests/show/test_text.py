"""Text on its way out: nothing in it turns the line around."""

from __future__ import annotations

import pytest

from gpushare.show.text import in_json, visible


@pytest.mark.parametrize("mark", ["\u200e", "\u200f", "\u061c", "\u202e", "\u2066"])
def test_marks_of_direction_are_shown(mark: str) -> None:
    assert visible(f"a{mark}b") == f"a\\u{ord(mark):04x}b"
    assert in_json(f'"a{mark}b"') == f'"a\\u{ord(mark):04x}b"'
