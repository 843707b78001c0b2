"""The forms of a YAML file: each reads a value, with line and column in its errors, and has the JSON Schema of what it reads. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gpushare.base.errors import BadUsage
from gpushare.inputs import Located, LocatedList, Mark

T = TypeVar("T")


@dataclass(frozen=True)
class Value:
    """One value, its place in the file, and what messages call it."""

    raw: Any
    mark: Mark
    what: str
    shown: str
    # The hint of errors that have no better one: where all that the file may have is to be seen.
    hint: str

    def error(self, problem: str, hint: str = "", *, at: Mark | None = None) -> BadUsage:
        """Return the error ``FILE:3:7: 'threads' PROBLEM``; ``at`` is a place other than that of the value."""
        return BadUsage(f"{self.shown}:{at or self.mark}: {self.what} {problem}", hint or self.hint, code="bad_file")

    def mismatch_error(self, meaning: str) -> BadUsage:
        """Return the error of a value that is not what it should be: ``a list``, ``a user name``."""
        return self.error(f"is {self.short_text}, not {meaning}")

    @property
    def short_text(self) -> str:
        """Return the value for messages; of a mapping or a list only what it is."""
        if isinstance(self.raw, dict | list):
            return "a mapping" if isinstance(self.raw, dict) else "a list"
        return repr(self.raw)[:60] if self.raw is not None else "empty"

    @property
    def key(self) -> str:
        return self.what.strip("'")

    def fields(self, known: Sequence[str], need: Sequence[str] = ()) -> dict[str, Value]:
        """Return the values of a mapping by key. Raises BadUsage if it has a key that is not ``known``, or lacks one of ``need``."""
        if not isinstance(self.raw, Mapping):
            raise self.error(f"is {self.short_text}, not a mapping (keys: {', '.join(known)})")
        located = self.raw if isinstance(self.raw, Located) else Located()
        for key in self.raw:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
                hint = f"did you mean '{close[0]}'?" if close else f"its keys: {', '.join(known)}"
                raise self.error(f"has an unknown key '{str(key)[:40]}'", hint, at=located.keys_at.get(key))
        for key in need:
            if key not in self.raw:
                raise self.error(f"lacks the key '{key}'", f"its keys: {', '.join(known)}" if self.raw else "")
        return {
            key: Value(value, located.values_at.get(key, self.mark), f"'{key}'", self.shown, self.hint)
            for key, value in self.raw.items()
        }

    def items(self) -> list[Value]:
        """Return the items of a list, each with its place. Raises BadUsage: it is not a list."""
        if not isinstance(self.raw, list):
            raise self.mismatch_error("a list")
        places = self.raw.items_at if isinstance(self.raw, LocatedList) else ()
        return [
            Value(
                item,
                places[number] if number < len(places) else self.mark,
                f"item {number + 1} of {self.what}",
                self.shown,
                self.hint,
            )
            for number, item in enumerate(self.raw)
        ]


def whole_document(raw: Any, title: str, shown: str, hint: str) -> Value:
    """Return a YAML document as the value that a form reads; ``title`` is what messages call it, ``shown`` the file."""
    return Value(raw, getattr(raw, "mark", Mark()), title, shown, hint)


@dataclass(frozen=True)
class Form(Generic[T]):
    """One form: reads a value, or raises BadUsage (code ``bad_file``); ``schema`` accepts what it reads."""

    read: Callable[[Value], T]
    schema: Mapping[str, Any] = field(default_factory=dict)

    def about(self, description: str) -> Form[T]:
        """Return the form with a description that editors show."""
        return Form(self.read, {**self.schema, "description": description})


def text(pattern: str, meaning: str) -> Form[str]:
    """Return the form of a text that matches a pattern; ``meaning`` says in the error what it should be: ``a user name``."""
    return converted(pattern, meaning, str)


def converted(pattern: str, meaning: str, convert: Callable[[str], T]) -> Form[T]:
    """Return the form of a text that matches a pattern and is then converted; ``convert`` may still refuse it by BadUsage."""

    def read(value: Value) -> T:
        if not isinstance(value.raw, str) or re.search(pattern, value.raw) is None:
            raise value.mismatch_error(meaning)
        try:
            return convert(value.raw)
        except BadUsage:
            raise value.mismatch_error(meaning) from None

    return Form(read, {"type": "string", "pattern": pattern})


def choice(known: Mapping[str, T]) -> Form[T]:
    """Return the form of a word that must be a key of ``known``; it is read as the value there."""

    def read(value: Value) -> T:
        if not isinstance(value.raw, str) or value.raw not in known:
            raise value.mismatch_error(f"one of: {', '.join(known)}")
        return known[value.raw]

    return Form(read, {"enum": list(known)})


def number(least: float, most: float, meaning: str, convert: Callable[[float], T]) -> Form[T]:
    """Return the form of a number in a range, which is then converted; ``meaning`` as in `text`."""

    def read(value: Value) -> T:
        good = isinstance(value.raw, int | float) and not isinstance(value.raw, bool)
        if not good or not least <= value.raw <= most:
            raise value.mismatch_error(meaning)
        return convert(value.raw)

    return Form(read, {"type": "number", "minimum": least, "maximum": most})


def whole(least: int, most: int) -> Form[int]:
    meaning = f"a whole number from {least} to {most}"

    def read(value: Value) -> int:
        as_float = number(least, most, meaning, float).read(value)
        if not as_float.is_integer():
            raise value.mismatch_error(meaning)
        return int(as_float)

    return Form(read, {"type": "integer", "minimum": least, "maximum": most})


def constant(wanted: object, problem: str) -> Form[Any]:
    """Return the form of a value that must be ``wanted``; ``problem`` is the error of another value."""
    as_written = str(wanted).lower() if isinstance(wanted, bool) else wanted

    def read(value: Value) -> Any:
        # In Python 1 equals True, in YAML it does not.
        if value.raw != wanted or isinstance(value.raw, bool) is not isinstance(wanted, bool):
            raise value.error(problem, f"write: {value.key}: {as_written}")
        return wanted

    return Form(read, {"const": wanted})


def yes_or_no() -> Form[bool]:
    def read(value: Value) -> bool:
        if not isinstance(value.raw, bool):
            raise value.error("is neither true nor false", "write true or false")
        return value.raw

    return Form(read, {"type": "boolean"})


def several(
    item: Form[T], *, least: int = 0, most: int | None = None, merge: str = "", unique: bool = False
) -> Form[tuple[T, ...]]:
    """Return the form of a list; with ``unique`` its items differ. ``merge`` is the hint where there are more than ``most``."""

    def read(value: Value) -> tuple[T, ...]:
        items = value.items()
        if most is not None and len(items) > most:
            raise value.error(f"has {len(items)} items, more than {most}", merge)
        entries: list[T] = []
        for each in items:
            entry = item.read(each)
            if unique and entry in entries:
                raise each.error(f"is given twice: {each.short_text}", "write it once")
            entries.append(entry)
        if len(entries) < least:
            raise value.error("is empty", "write at least one item, or drop the key")
        return tuple(entries)

    bounds: dict[str, Any] = {"uniqueItems": True} if unique else {}
    bounds |= {"minItems": least} if least else {}
    bounds |= {} if most is None else {"maxItems": most}
    return Form(read, {"type": "array", "items": item.schema, **bounds})


def table(key_of: Callable[[object], str | None], meaning: str, item: Form[T]) -> Form[dict[str, T]]:
    """Return the form of a mapping whose keys the user chooses, with values of the form ``item``.

    ``key_of`` returns a key as text; None: the key is not ``meaning``, which the error says.
    """

    def read(value: Value) -> dict[str, T]:
        if not isinstance(value.raw, dict):
            raise value.mismatch_error("a mapping")
        for key in value.raw:
            if key_of(key) is None:
                shown = repr(key)[:60] if isinstance(key, str | int | float | None) else "a list or mapping"
                raise value.error(
                    f"has the key {shown}, which is not {meaning}", at=getattr(value.raw, "keys_at", {}).get(key)
                )
        fields = value.fields(tuple(value.raw))
        return {str(key_of(key)): item.read(each) for key, each in fields.items()}

    return Form(read, {"type": "object", "additionalProperties": item.schema})


def one_or_several(item: Form[T], *, unique: bool = True) -> Form[tuple[T, ...]]:
    """Return the form of a value, or a list of at least one."""
    many = several(item, least=1, unique=unique)
    return Form(
        lambda value: many.read(value) if isinstance(value.raw, list) else (item.read(value),),
        {"oneOf": [item.schema, many.schema]},
    )


def either(short: Form[Any], long: Form[T], build: Callable[[Any, Value], T]) -> Form[T]:
    """Return the form of a mapping that may also be written as a single value (``short``); ``build`` turns that into a T."""

    def read(value: Value) -> T:
        return long.read(value) if isinstance(value.raw, dict) else build(short.read(value), value)

    return Form(read, {"oneOf": [short.schema, long.schema]})


def all_or(long: Form[T], everything: T) -> Form[T]:
    """Return the form of a mapping, or the word ``all``."""
    word = choice({"all": everything})
    return Form(
        lambda value: word.read(value) if isinstance(value.raw, str) else long.read(value),
        {"oneOf": [{"const": "all"}, long.schema]},
    )


def mapping(
    keys: Mapping[str, Form[Any]],
    build: Callable[[Mapping[str, Any], Value], T],
    *,
    need: Sequence[str] = (),
    one_of: Sequence[str] = (),
    example: str = "",
    check: Callable[[Value, Mapping[str, Value]], None] = lambda *_: None,
    schema: Mapping[str, Any] | None = None,
) -> Form[T]:
    """Return the form of a mapping with these ``keys``; ``build`` gets the values that are there, by key.

    Of the keys ``one_of`` exactly one is there; ``example`` is the hint of that error. ``check`` raises for keys that may
    not stand together, before their values are read; ``schema`` has the same rule for editors.
    """

    def read(value: Value) -> T:
        fields = value.fields(tuple(keys), need)
        ways = [key for key in fields if key in one_of]
        if one_of and len(ways) != 1:
            words = " and ".join(ways) or "none"
            raise value.error(f"has {words}: it needs exactly one of {', '.join(one_of)}", example)
        check(value, fields)
        return build({key: form.read(fields[key]) for key, form in keys.items() if key in fields}, value)

    return Form(
        read,
        {
            "type": "object",
            "additionalProperties": False,
            **({"required": [*need]} if need else {}),
            "properties": {key: form.schema for key, form in keys.items()},
            **({"oneOf": [{"required": [key]} for key in one_of]} if one_of else {}),
            **(schema or {}),
        },
    )
