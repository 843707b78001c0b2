"""The quick `dataclass` behaves as the one of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gpushare.base import values

MAKERS: list[Callable[..., Any]] = [dataclasses.dataclass, values.dataclass]
both = pytest.mark.parametrize("make", MAKERS, ids=["standard", "quick"])


def point(make: Callable[..., Any], **options: Any) -> Any:
    """Return a class with required, defaulted, made and hidden fields."""

    class Point:
        x: int
        y: int = 2
        tags: list[str] = dataclasses.field(default_factory=list, compare=False)
        mark: str = dataclasses.field(default="m", repr=False, compare=False)

    return make(**options)(Point)


@values.dataclass(frozen=True)
class Kept:
    """At the top of a module, so that it can be pickled."""

    name: str
    size: int = 0


@both
def test_fields_are_given_by_place_by_name_or_by_default(make: Callable[..., Any]) -> None:
    cls = point(make, frozen=True)
    one = cls(1, tags=["a"])
    assert (one.x, one.y, one.tags, one.mark) == (1, 2, ["a"], "m")
    assert list(vars(one)) == ["x", "y", "tags", "mark"]
    assert cls(1).tags is not cls(1).tags
    assert dataclasses.replace(one, y=5).y == 5
    assert dataclasses.asdict(one) == {"x": 1, "y": 2, "tags": ["a"], "mark": "m"}


@both
@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((1, 2, [], "m", 5), {}), ((), {"y": 1, "z": 2})],
)
def test_wrong_arguments_are_refused(make: Callable[..., Any], arguments: Any, named: Any) -> None:
    with pytest.raises(TypeError):
        point(make, frozen=True)(*arguments, **named)


@both
def test_keyword_only_fields_take_no_place(make: Callable[..., Any]) -> None:
    cls = point(make, frozen=True, kw_only=True)
    assert cls(x=1).x == 1
    with pytest.raises(TypeError):
        cls(1)


@both
def test_equality_and_hash_use_the_compared_fields(make: Callable[..., Any]) -> None:
    cls, other = point(make, frozen=True), point(make, frozen=True)
    assert cls(1, mark="a") == cls(1, mark="b")
    assert hash(cls(1, mark="a")) == hash(cls(1, mark="b"))
    assert cls(1) != cls(2)
    assert cls(1) != other(1)
    assert cls(1) != 1
    changing = point(make)
    assert changing(1) == changing(1)
    with pytest.raises(TypeError):
        hash(changing(1))
    plain = point(make, eq=False)
    assert plain(1) != plain(1)


@both
def test_a_frozen_object_cannot_be_changed(make: Callable[..., Any]) -> None:
    one = point(make, frozen=True)(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.x
    changing = point(make)(1)
    changing.x = 3
    assert changing.x == 3


@both
def test_its_text_names_the_shown_fields(make: Callable[..., Any]) -> None:
    assert repr(point(make)(1)).endswith("Point(x=1, y=2, tags=[])")


@both
def test_a_subclass_adds_fields(make: Callable[..., Any]) -> None:
    class Place(point(make, frozen=True, kw_only=True)):  # type: ignore[misc]
        z: int = 3

    one = make(frozen=True, kw_only=True)(Place)(x=1)
    assert list(vars(one)) == ["x", "y", "tags", "mark", "z"]


def test_it_can_be_copied_and_pickled() -> None:
    one = Kept("a", 3)
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301


@values.dataclass(frozen=True)
class _Often:
    first: int
    second: list[int] = dataclasses.field(default_factory=list)
    third: str = dataclasses.field(default="x", kw_only=True)


def test_a_class_of_which_there_are_many_behaves_as_before() -> None:
    early = [_Often(1, third="y") for _ in range(8)]
    late = [_Often(1, third="y") for _ in range(40)]
    assert early[0] == late[-1]
    assert list(vars(early[0])) == list(vars(late[-1])) == ["first", "second", "third"]
    assert late[-1].second is not late[-2].second
    for words, named in (((), {}), ((1, [], "y"), {}), ((1,), {"first": 1}), ((1,), {"fourth": 1})):
        with pytest.raises(TypeError):
            _Often(*words, **named)
