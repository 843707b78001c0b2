"""Values from JSON that others may have written: of the types of their fields, within their ranges, and nothing else.

The types are those of value classes (`values.dataclass`), named tuples, enums (by name), `Literal`, unions, tuples and plain
values. `Annotated` adds checks: functions that return whether a value is valid.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from gpushare.base.values import NOT_STORED

# Whole, as NVML has it: CUDA also takes a prefix, and MIG-GPU-<uuid>/1/0 of drivers before 470 names a place.
DEVICE_UUID: Final = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)


class Within(NamedTuple):
    """The range of a number."""

    least: float
    most: float

    def __call__(self, value: float) -> bool:
        return self.least <= value <= self.most


class Most(NamedTuple):
    """The largest number of items of a tuple."""

    items: int

    def __call__(self, value: tuple[Any, ...]) -> bool:
        return len(value) <= self.items


def is_shown(text: str) -> bool:
    """Return whether a name or UUID that others may have written can be shown: short and plain."""
    return len(text) <= 64 and re.fullmatch(r"\w[\w.-]*", text, re.ASCII) is not None


Pid = Annotated[int, Within(1, 2**31 - 1)]
# Clock ticks, bytes, ids and handles.
Count = Annotated[int, Within(0, 2**63 - 1)]
Percent = Annotated[float, Within(0, 100)]
Shown = Annotated[str, is_shown]
# A letter comes first: no name is taken for a PID.
JOB_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII | re.IGNORECASE)
JobName = Annotated[str, JOB_NAME.fullmatch]


def job_name(text: str | None) -> str | None:
    """Return the name of a job, or None if it is not a valid one: another user may have written it, and shells complete names."""
    # A job called so could not be paused: `pause list` lists.
    return text if text is not None and text != "list" and JOB_NAME.fullmatch(text) else None


_SCALARS: Final[Mapping[Any, Callable[[Any], bool]]] = {
    # JSON may have a float without a decimal point.
    float: lambda raw: type(raw) in {int, float} and abs(raw) <= sys.float_info.max,
    **{kind: lambda raw, kind=kind: type(raw) is kind for kind in (int, str, bool, NoneType)},  # type: ignore[misc]
}


def parse_typed(kind: Any, raw: Any, *, more_keys: bool = False) -> Any:
    """Return the value of a type that JSON has in plain form; with ``more_keys`` an object may have keys without a field.

    Raises:
        ValueError: it is not of that type; the message says why.
    """
    origin = get_origin(kind)
    parse = functools.partial(parse_typed, more_keys=more_keys)
    if origin is Annotated:
        limits, value = kind.__metadata__, parse(kind.__origin__, raw)
        if all(is_valid(value) for is_valid in limits):
            return value
    elif origin in {Union, UnionType}:
        for each in get_args(kind):
            with contextlib.suppress(ValueError):
                return parse(each, raw)
    elif is_dataclass(kind):
        return _parse_object(kind, raw, parse, more_keys=more_keys)
    elif isinstance(raw, (list, tuple)):
        return _parse_list(kind, raw, parse)
    elif _is_plain(kind, raw):
        return raw
    elif isinstance(raw, str) and isinstance(kind, type) and issubclass(kind, Enum) and raw in kind.__members__:
        return kind[raw]
    raise ValueError(f"{raw!r:.40} is not a valid value")


def _is_plain(kind: Any, raw: Any) -> bool:
    """Return whether JSON has a value of this type as it is: a scalar, or one of a `Literal`."""
    if get_origin(kind) is Literal:
        return type(raw) is str and raw in get_args(kind)
    return kind in _SCALARS and _SCALARS[kind](raw)


def _parse_list(kind: Any, raw: Sequence[Any], parse: Callable[[Any, Any], Any]) -> Any:
    """Return a tuple or named tuple from a list. A tuple of processes may not name a PID twice."""
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
        item = get_args(kind)[0]
        values = tuple(parse(item, each) for each in raw)
        pids = [value.pid for value in values if hasattr(value, "pid")]
        if len(set(pids)) < len(pids):
            raise ValueError("a process is named twice")
        return values
    hints = list(_type_hints(kind).values()) if hasattr(kind, "_fields") else get_args(kind)
    if not hints or len(hints) != len(raw):
        raise ValueError("a list of another length")
    values = tuple(map(parse, hints, raw))
    return kind(*values) if hasattr(kind, "_fields") else values


def _parse_object(kind: Any, raw: Any, parse: Callable[[Any, Any], Any], *, more_keys: bool) -> Any:
    """Return a value class from an object; ``parse`` reads the value of a field."""
    stored = _stored(kind)
    hints = _type_hints(kind)
    if not isinstance(raw, dict) or not (more_keys or raw.keys() <= stored.keys()):
        raise ValueError("an object with other keys")
    missing = [name for name, has_default in stored.items() if not has_default and name not in raw]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return kind(**{name: parse(hints[name], value) for name, value in raw.items() if name in stored})


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@functools.cache
def _stored(kind: Any) -> dict[str, bool]:
    """Return the fields of a value class that JSON has, and whether they have a default."""
    # Of a field without a default, `default` and `default_factory` both are MISSING.
    return {each.name: each.default is not each.default_factory for each in fields(kind) if each.metadata != NOT_STORED}


def plain_form(value: Any) -> Any:
    """Return the plain form of a value, as JSON can carry it: the reverse of `parse_typed`."""
    if is_dataclass(value):
        return {name: plain_form(getattr(value, name)) for name in _stored(type(value))}  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return [plain_form(each) for each in value]
    return value.name if isinstance(value, Enum) else value
