"""``dataclass`` for the value classes that a start of a command creates; every one of them uses it (tests/test_imports.py).

`dataclasses.dataclass` compiles up to seven methods for a class: 0.1 to 0.4 ms, forty times on the way to
``gpushare status``, a fifth of its time. Here all classes share one set of methods, which read the fields. Type checkers
see the original; ``fields``, ``replace`` and ``asdict`` work. Not supported: order, slots, ``InitVar``, ``__post_init__``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

T = TypeVar("T")


# A field with this metadata is no part of the JSON.
NOT_STORED: Final = {"stored": False}
# A class of which there are more has an `__init__` of its own compiled, which is five times as fast.
_MANY: Final = 16


class _Layout(NamedTuple):
    """The fields of a value class, as its methods need them."""

    names: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: dict[str, Any]
    factories: tuple[tuple[str, Callable[[], Any]], ...]
    compared: tuple[str, ...]
    shown: tuple[str, ...]
    # Counts the instances.
    numbers: Iterator[int]


def _init(self: Any, /, *arguments: Any, **named: Any) -> None:
    """Set the fields of an instance: the ``__init__`` of all classes, until there are many instances of one."""
    layout: _Layout = self.__layout__
    if next(layout.numbers) == _MANY:
        _compile(next(cls for cls in type(self).__mro__ if "__layout__" in vars(cls)))
    values = {**layout.defaults, **named}
    if arguments:
        given = dict(zip(layout.positional, arguments, strict=False))
        if len(given) < len(arguments) or not named.keys().isdisjoint(given):
            raise TypeError(f"{type(self).__name__}: too many arguments, or one given twice: {arguments!r}")
        values.update(given)
    for name, make in layout.factories:
        if name not in values:
            values[name] = make()
    if len(values) != len(layout.names) or not values.keys() >= set(layout.names):
        wrong = sorted(values.keys() ^ set(layout.names))
        raise TypeError(f"{type(self).__name__}: missing or unknown: {', '.join(wrong)}")
    # In the order of the fields, which is the order of the keys on disk.
    vars(self).update({name: values[name] for name in layout.names})


def _compile(cls: type[Any]) -> None:
    """Give a class the ``__init__`` that `dataclasses` would have compiled at once."""
    copies: list[Any] = []
    for field in dataclasses.fields(cls):
        options = {name: getattr(field, name) for name in ("default", "default_factory", "kw_only")}
        copies.append((field.name, Any, dataclasses.field(**options)))
    compiled: Any = dataclasses.make_dataclass(cls.__name__, copies, repr=False, eq=False, frozen=True)
    cls.__init__ = compiled.__init__


def _eq(self: Any, other: Any) -> bool:
    """Compare two instances by the fields that count."""
    if type(self) is not type(other):
        return NotImplemented  # type: ignore[no-any-return]
    mine = vars(self)
    theirs = vars(other)
    names: tuple[str, ...] = self.__layout__.compared
    return all(mine[name] == theirs[name] for name in names)


def _hash(self: Any) -> int:
    values = vars(self)
    return hash(tuple([values[name] for name in self.__layout__.compared]))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__layout__.shown)
    return f"{type(self).__qualname__}({shown})"


def _refuse_change(self: Any, name: str, *_: Any) -> None:  # noqa: ARG001 - of __setattr__ and __delattr__
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")


def _dataclass(
    cls: type[T] | None = None, /, *, frozen: bool = False, kw_only: bool = False, eq: bool = True
) -> type[T] | Callable[[type[T]], type[T]]:
    """Return the class with its methods, or what makes them for a class: as `dataclasses.dataclass`."""
    methods: dict[str, Any] = {"__init__": _init, "__repr__": _repr}
    if eq:
        methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
    if frozen:
        methods |= {"__setattr__": _refuse_change, "__delattr__": _refuse_change}

    def build(cls: type[T]) -> type[T]:
        """Give a class the shared methods, and the layout of its fields that they read."""
        # Without a docstring, `dataclasses` writes one from the signature, which costs more than all the rest.
        cls.__doc__ = cls.__doc__ or cls.__name__
        for name, method in methods.items():
            if name not in vars(cls):
                setattr(cls, name, method)
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        listed, missing = dataclasses.fields(cls), dataclasses.MISSING  # type: ignore[arg-type]
        cls.__layout__ = _Layout(  # type: ignore[attr-defined]
            names=tuple(field.name for field in listed),
            positional=tuple(field.name for field in listed if not field.kw_only),
            defaults={field.name: field.default for field in listed if field.default is not missing},
            factories=tuple(
                (field.name, field.default_factory) for field in listed if field.default_factory is not missing
            ),
            compared=tuple(field.name for field in listed if field.compare),
            shown=tuple(field.name for field in listed if field.repr),
            numbers=itertools.count(1),
        )
        return cls

    return build if cls is None else build(cls)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - exported
else:
    dataclass = _dataclass
