"""YAML from people: bounded, never more than data, no key twice, and every value with its line and column. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gpushare.errors import BadUsage

# A merge key (<<) may double a mapping at each level; no honest one comes near.
_MAX_KEYS: Final = 4096
_MAX_DIGITS: Final = 40


class Mark(NamedTuple):
    """A place in a file, from 1 on."""

    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


class Located(dict[Any, Any]):
    """A mapping that knows where it begins, and where its keys and their values stand."""

    line: int | None = None
    mark: Mark = Mark()
    keys_at: Mapping[Any, Mark] = {}
    values_at: Mapping[Any, Mark] = {}


class LocatedList(list[Any]):
    """A list that knows where its items stand."""

    items_at: tuple[Mark, ...] = ()


def documents(text: str, shown: str, hint: str) -> list[Any]:
    """Return the YAML documents of a text; an empty one is one document, None. ``shown`` is the file, for errors.

    Raises:
        BadUsage: it is not YAML, or holds what no file of ours does: a key twice, endless values (code ``bad_file``).
    """
    import yaml

    try:
        return list(yaml.load_all(text, _loader())) or [None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise BadUsage(f"{shown} is not YAML{where}: {problem}", hint, code="bad_file") from None
    except RecursionError:
        raise BadUsage(f"{shown} is nested too deep", hint, code="bad_file") from None
    except ValueError as error:
        raise BadUsage(f"{shown} has a value that YAML cannot have: {error}", hint, code="bad_file") from None


def _at(node: Any) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _loader() -> Any:
    """Return PyYAML's safe loader, with places, and without duplicate keys and endless values."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MAX_KEYS:
                raise yaml.constructor.ConstructorError(None, None, "too many keys", node.start_mark)

        def mapping(self, node: Any) -> Any:
            found = Located()
            found.mark = _at(node)
            found.line = found.mark.line
            yield found
            written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            twice = next((key for key, number in Counter(written).items() if number > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{twice[:40]}' stands twice", node.start_mark
                )
            found.update(self.construct_mapping(node))
            # A merge was flattened meanwhile: what it brought in comes first, and its own key is gone.
            pairs = [(self.construct_object(key, deep=True), _at(key), _at(value)) for key, value in node.value]
            found.keys_at = {key: at for key, at, _ in pairs}
            found.values_at = {key: at for key, _, at in pairs}

        def sequence(self, node: Any) -> Any:
            found = LocatedList()
            yield found
            found.extend(self.construct_sequence(node))
            found.items_at = tuple(map(_at, node.value))

        def number(self, node: Any) -> Any:
            if len(node.value) > _MAX_DIGITS:
                raise yaml.constructor.ConstructorError(None, None, "the number is too long", node.start_mark)
            return self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.mapping)
    Loader.add_constructor("tag:yaml.org,2002:seq", Loader.sequence)
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.number)
    return Loader
