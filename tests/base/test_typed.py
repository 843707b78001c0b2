"""Values from JSON that others may have written: what is valid comes back as it was, and nothing else is believed."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from gpushare.base.typed import NOT_STORED, Count, Most, Percent, Pid, Shown, Within, is_shown, parse_typed, plain_form
from gpushare.host.store import RecordStore

PACKAGE = Path(__file__).resolve().parents[2] / "gpushare"


def stores() -> list[RecordStore[Any]]:
    """Return all kinds of record."""
    modules = [
        ".".join(("gpushare", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in sorted(PACKAGE.rglob("*.py"))
        if " RecordStore(" in path.read_text()
    ]
    rows = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    return list({id(row): row for row in rows if isinstance(row, RecordStore)}.values())


STORES = stores()
KINDS = pytest.mark.parametrize("kind", [store.kind for store in STORES], ids=[store.directory for store in STORES])


def test_all_kinds_are_there() -> None:
    assert {
        "swap", "pause", "slices", "keep", "lent", "mode", "jobs", "tuned", "tried", "on-demand", "benched",
        "peaks", "names", "made", "mig", "mps/*", "past",
    } == {store.directory for store in STORES}  # fmt: skip


_WORDS = ("train", "GPU-0d54321e-a080-c56a-9a57-14e2f8d3a1d0", "1g.10gb", "3g.71gb", "DEFAULT", "0" * 64)
_NUMBERS = (1, 7, 0.5, 99.0)


def values(hint: Any) -> some.SearchStrategy[Any]:
    """Return values of a type, as `parse_typed` knows types."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(inside[0], inside[1:])
    if origin in {Union, UnionType}:
        return some.one_of(*map(values, inside))
    if origin is Literal:
        return some.sampled_from(inside)
    if origin is tuple:
        if inside[1:] == (...,):
            return _different(values(inside[0]), 4)
        return some.tuples(*map(values, inside))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return some.sampled_from(list(hint))
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = get_type_hints(hint, include_extras=True)
        stored = (
            [field.name for field in fields(hint) if field.metadata != NOT_STORED]
            if is_dataclass(hint)
            else list(hints)
        )
        return some.builds(hint, **{name: values(hints[name]) for name in stored})
    simple: dict[Any, some.SearchStrategy[Any]] = {
        int: some.integers(),
        float: some.floats(allow_nan=False, allow_infinity=False),
        str: some.text(),
        bool: some.booleans(),
        NoneType: some.none(),
    }
    return simple[hint]


def _annotated(base: Any, limits: tuple[Any, ...]) -> some.SearchStrategy[Any]:
    (limit,) = limits
    if isinstance(limit, Within):
        if base is int:
            return some.integers(int(limit.least), int(limit.most))
        return some.floats(limit.least, limit.most)
    if isinstance(limit, Most):
        return _different(values(get_args(base)[0]), min(4, limit.items))
    members = getattr(limit, "__self__", None)
    if isinstance(members, (set, frozenset)):
        return some.sampled_from(sorted(members))
    pool = [one for one in (_WORDS if base is str else _NUMBERS) if limit(one)]
    assert pool, limit
    return some.sampled_from([base(one) for one in pool])


def _different(one: some.SearchStrategy[Any], most: int) -> some.SearchStrategy[Any]:
    lists = some.lists(one, max_size=most, unique_by=lambda value: getattr(value, "pid", id(value)))
    return lists.map(tuple)


@KINDS
@settings(max_examples=25)
@given(some.data())
def test_what_was_written_is_read_as_it_was(kind: Any, data: some.DataObject) -> None:
    value = data.draw(values(kind))
    assert parse_typed(kind, json.loads(json.dumps(plain_form(value)))) == value


_JUNK = (
    some.none()
    | some.booleans()
    | some.integers(-(2**70), 2**70)
    | some.floats()
    | some.text()
    | some.just([])
    | some.just({})
)


@KINDS
@settings(max_examples=25)
@given(some.data())
def test_junk_in_any_place_is_refused_or_valid_and_crashes_nothing(kind: Any, data: some.DataObject) -> None:
    document = json.loads(json.dumps(plain_form(data.draw(values(kind)))))
    at: Any = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = data.draw(some.sampled_from(keys))
        if not isinstance(at[key], (dict, list)) or data.draw(some.booleans()):
            at[key] = data.draw(_JUNK)
            break
        at = at[key]
    try:
        value = parse_typed(kind, document)
    except ValueError:
        return
    assert parse_typed(kind, json.loads(json.dumps(plain_form(value)))) == value


class Size(Enum):
    SMALL = 1


class Part(NamedTuple):
    pid: Pid
    bytes: Count


@plain_dataclass(frozen=True)
class Thing:
    pid: Pid
    parts: Annotated[tuple[Part, ...], Most(2)] = ()
    share: Percent | None = None
    name: Shown | None = None
    size: Size | None = None
    kind: Literal["a", "b"] = "a"
    ok: bool = True


WHOLE = {"pid": 7, "parts": [[8, 9]], "share": 50, "name": "a", "size": "SMALL", "kind": "b", "ok": False}


def test_each_type_is_parsed() -> None:
    assert parse_typed(Thing, WHOLE) == Thing(7, (Part(8, 9),), 50, "a", Size.SMALL, "b", False)
    assert parse_typed(Thing, {"pid": 7}) == Thing(7)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pid": 0}, "0 is not a valid value"),
        ({"pid": 2**31}, "is not a valid value"),
        ({"pid": True}, "True is not a valid value"),
        ({"pid": 7.0}, "7.0 is not a valid value"),
        ({"pid": "7"}, "'7' is not a valid value"),
        ({"parts": [[8, 9], [9, 9], [10, 9]]}, "is not a valid value"),
        ({"parts": [[8, 9], [8, 1]]}, "a process is named twice"),
        ({"parts": [[8]]}, "a list of another length"),
        ({"parts": [[8, -1]]}, "-1 is not a valid value"),
        ({"parts": {"8": 9}}, "is not a valid value"),
        ({"share": math.nan}, "nan is not a valid value"),
        ({"share": math.inf}, "inf is not a valid value"),
        ({"share": 101}, "101 is not a valid value"),
        ({"share": 10**400}, "is not a valid value"),
        ({"share": False}, "False is not a valid value"),
        ({"name": "\x1b[2J"}, "is not a valid value"),
        ({"name": "a" * 65}, "is not a valid value"),
        ({"name": ""}, "'' is not a valid value"),
        ({"size": "LARGE"}, "'LARGE' is not a valid value"),
        ({"size": 1}, "1 is not a valid value"),
        ({"kind": "c"}, "'c' is not a valid value"),
        ({"kind": ["a"]}, "a list of another length"),
        ({"ok": 1}, "1 is not a valid value"),
        ({"other": 1}, "an object with other keys"),
    ],
)
def test_what_is_not_valid_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_typed(Thing, {**WHOLE, **change})
    # Of a union, only that no member of it fits is said.
    assert why in str(refused.value) or "is not a valid value" in str(refused.value)
    assert len(str(refused.value)) < 100


def test_more_keys_are_passed_over_where_they_may_be() -> None:
    assert parse_typed(Thing, {**WHOLE, "other": 1}, more_keys=True) == parse_typed(Thing, WHOLE)
    with pytest.raises(ValueError, match="pid is missing"):
        parse_typed(Thing, {"other": 1}, more_keys=True)


@pytest.mark.parametrize("raw", [None, [], 7, "x", [["pid", 7]]])
def test_an_object_must_be_one(raw: Any) -> None:
    with pytest.raises(ValueError):
        parse_typed(Thing, raw)
    with pytest.raises(ValueError, match="pid is missing"):
        parse_typed(Thing, {})


@pytest.mark.parametrize(
    ("text", "is_valid"), [("a.b-c_1", True), ("", False), ("-a", False), ("a b", False), ("é", False)]
)
def test_what_can_be_shown(text: str, is_valid: bool) -> None:
    check: Callable[[str], bool] = is_shown
    assert check(text) is is_valid
