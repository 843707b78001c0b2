"""The JSON Schemas: each command has one, and they say what the value classes say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

import jsonschema
import pytest

from gpushare.base.errors import NotFound
from gpushare.cli import root
from gpushare.show.result import jsonable
from gpushare.show.schema import commands_with_schema, schema_of
from tools import schemas


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.children().items():
        if hasattr(command, "children"):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name))


# Commands that print no document: they serve, or draw on the screen.
NONE = {"metrics", "top"}


def test_each_command_has_a_schema() -> None:
    assert {*leaves(root()), "pause list"} - NONE == {*commands_with_schema()}
    for command in commands_with_schema():
        jsonschema.Draft202012Validator.check_schema(schema_of(command))


def test_no_schema_of_what_is_no_command() -> None:
    with pytest.raises(NotFound) as caught:
        schema_of("fly")
    assert (caught.value.code, caught.value.hint) == ("no_schema", "see all: gpushare schema")


class Level(IntEnum):
    HIGH = 3

    @property
    def title(self) -> str:
        return "high"


class Color(str, Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: str | None


@dataclass(frozen=True)
class Inner:
    # Where it is.
    at: float

    json_properties: ClassVar = ("twice",)

    @property
    def twice(self) -> float:
        return 2 * self.at


@dataclass(frozen=True)
class Outer(Inner):
    """An answer of all kinds."""

    level: Level
    color: Color | None
    pair: Pair
    many: tuple[Inner, ...]
    two: tuple[int, str]
    named: Mapping[str, int]
    word: Literal["a", "b"]
    anything: Any


OUTER = Outer(1.5, Level.HIGH, Color.RED, Pair(1, None), (Inner(2.0),), (1, "x"), {"k": 1}, "a", object)


@pytest.fixture
def validator(monkeypatch: pytest.MonkeyPatch) -> jsonschema.Draft202012Validator:
    monkeypatch.setattr(schemas, "OURS", "tests")
    definitions: dict[str, Any] = {}
    schema = schemas._schema(Outer, definitions)
    assert definitions["Outer"]["description"] == "An answer of all kinds."
    assert definitions["Outer"]["properties"]["at"]["description"] == "Where it is."
    return jsonschema.Draft202012Validator({**schema, "$defs": definitions})


def test_a_value_is_valid(validator: jsonschema.Draft202012Validator) -> None:
    validator.validate({**jsonable(OUTER), "anything": None})


@pytest.mark.parametrize(
    "change",
    [
        {"at": "1"}, {"level": 3}, {"color": "blue"}, {"pair": [1, None]}, {"many": [{"at": 1}]}, {"two": [1, "x", 2]},
        {"named": {"k": "v"}}, {"word": "c"}, {"more": 1}, {"twice": None},
    ],
)  # fmt: skip
def test_another_value_is_not(validator: jsonschema.Draft202012Validator, change: dict[str, Any]) -> None:
    assert not validator.is_valid({**jsonable(OUTER), "anything": None, **change})
