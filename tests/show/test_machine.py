"""CSV and JSON: no text of a stranger drives the terminal, and none is a formula of a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.show.render import csv_text, json_text
from gpushare.show.result import Column, Result, Table

UNSAFE = re.compile(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def cell(value: object) -> str:
    text = csv_text(Table(name="t", columns=(Column("a", "A"),), rows=({"a": value},)), header=False)
    return next(csv.reader(io.StringIO(text, newline="")), [""])[0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-bash", "'-bash"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\\t=1"),
        ("\r=1", "'\\r=1"),
        ("\uff1d1", "'\uff1d1"),
        ("-5", "-5"),
        ("+2.5", "+2.5"),
        ("-", "-"),
        (-5, "-5"),
        (-0.5, "-0.5"),
        ("a=1", "a=1"),
        ("\x1b[2J\x9b1m", "\\x1b[2J\\x9b1m"),
        ("a\nb\u202ec", "a\\nb\\u202ec"),
        (None, ""),
        (True, "true"),
        (["\x1b", "\x9b"], '["\\u001b", "\\u009b"]'),
    ],
)
def test_a_cell(value: object, shown: str) -> None:
    assert cell(value) == shown


@given(st.text())
def test_no_text_is_a_formula_or_drives_the_terminal(text: str) -> None:
    shown = cell(text)
    assert UNSAFE.search(shown) is None
    assert "\n" not in shown
    assert "\r" not in shown
    assert not shown.startswith(("=", "@"))
    if shown.startswith(("+", "-")):
        assert re.fullmatch(r"[-+]?[\d.]+|-", shown, re.ASCII)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_json_is_the_same_data_and_drives_nothing(text: str) -> None:
    said = json_text(Result(command="status", data={"x": text}))
    assert UNSAFE.search(said) is None
    assert json.loads(said)["data"]["x"] == text
