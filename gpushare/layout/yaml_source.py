"""YAML from people: bounded, never more than data, no key twice, and every value with its line and column. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gpushare.errors import BadUsage

# A merge key (<<) may double a mapping at each level; no honest one comes near.
_MAX_KEYS: Final = 4096
_MAX_MERGED: Final = 64
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


class _Refused(Exception):
    """YAML that no file of ours has, and where."""

    def __init__(self, problem: str, node: Any) -> None:
        super().__init__(problem)
        self.problem, self.at = problem, _at(node)


def documents(text: str, shown: str, hint: str) -> list[Any]:
    """Return the YAML documents of a text; an empty one is one document, None. ``shown`` is the file, for errors.

    Raises:
        BadUsage: it is not YAML, or holds what no file of ours does: a key twice, endless values (code ``bad_file``).
    """
    import yaml

    try:
        return list(yaml.load_all(text, _loader())) or [None]
    except _Refused as error:
        raise BadUsage(f"{shown}:{error.at}: {error.problem}", hint, code="bad_file") from None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise BadUsage(f"{shown}{_where(error, text)}: this is not YAML: {problem}", hint, code="bad_file") from None
    except RecursionError:
        raise BadUsage(f"{shown} is nested too deep", hint, code="bad_file") from None
    except ValueError as error:
        raise BadUsage(f"{shown} has a value that YAML cannot have: {error}", hint, code="bad_file") from None


def _where(error: Any, text: str) -> str:
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    if mark is not None:
        return f":{mark.line + 1}:{mark.column + 1}"
    if isinstance(position, int):
        # A character that YAML has not: the reader counts characters.
        before = text[:position]
        return f":{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"
    return ""


def _at(node: Any) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _loader() -> Any:  # noqa: C901 - one class, made where PyYAML is loaded
    """Return PyYAML's safe loader, with places, and without duplicate keys and endless values."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's
            try:
                return super().construct_object(node, deep=deep)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
                # A tag (!!timestamp, !!int) promises what the text is not: PyYAML does not look.
                kind = str(node.tag).rpartition(":")[2]
                raise _Refused(f"this is no {kind[:40]}", node) from None

        def flatten_mapping(self, node: Any) -> None:
            for key, value in node.value:
                # Each alias in such a list may stand for thousands of keys.
                if key.tag == "tag:yaml.org,2002:merge" and len(getattr(value, "value", "")) > _MAX_MERGED:
                    raise _Refused("too many merged mappings", key)
            before = len(node.value)
            super().flatten_mapping(node)
            # All merges of a file count: a chain of them copies its keys again and again.
            self.merged = getattr(self, "merged", 0) + max(0, len(node.value) - before)
            if len(node.value) > _MAX_KEYS or self.merged > 4 * _MAX_KEYS:
                raise _Refused("too many keys", node)

        def mapping(self, node: Any) -> Any:
            found = Located()
            found.mark = _at(node)
            found.line = found.mark.line
            yield found
            written = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in written:
                        raise _Refused(f"the key '{key.value[:40]}' stands twice", key)
                    written.add(key.value)
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
                raise _Refused("the number is too long", node)
            return self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.mapping)
    Loader.add_constructor("tag:yaml.org,2002:seq", Loader.sequence)
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.number)
    return Loader
