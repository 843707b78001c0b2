"""Read a user's file or stdin: bounded, UTF-8, YAML with line and column."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpushare.base.errors import BadUsage, NoPermission, NotFound

# A hundred times what any of our files needs.
_MAX_BYTES: Final = 256 << 10


def text_of(path: str, kind: str, hint: str) -> str:
    """Return the text of a file; ``-`` is stdin. ``kind`` is the kind of file (``mig-parted``), for errors."""
    shown = shown_path(path)
    give = f"give a {kind} file"
    if not path:
        raise BadUsage("the name of the file is empty", give, code="bad_file")
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {shown}", hint, code="no_file") from None
    except IsADirectoryError:
        raise BadUsage(f"{shown} is a directory", give, code="bad_file") from None
    except PermissionError:
        raise NoPermission(f"{shown} cannot be read", "read it as its owner, or as root", code="bad_file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadUsage(f"{shown} cannot be read: {reason}", give, code="bad_file") from None
    return decode_text(data, shown, kind)


def decode_text(data: bytes, shown: str, kind: str) -> str:
    """Return the text of a file that is not too large and valid UTF-8."""
    give = f"give a {kind} file"
    if len(data) > _MAX_BYTES:
        raise BadUsage(f"{shown} is larger than 256 KiB", give, code="bad_file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadUsage(f"{shown} is not UTF-8 text", give, code="bad_file") from None


def shown_path(path: str) -> str:
    """Return what a file is called in messages."""
    return "stdin" if path == "-" else path


# A merge key (<<) may double a mapping at each level; no legitimate file comes near these.
_MAX_KEYS: Final = 4096
_MAX_MERGED: Final = 64
_MAX_DIGITS: Final = 40
# The time to scan grows with the square of the depth.
_MAX_DEPTH: Final = 64


class Mark(NamedTuple):
    """A place in a file, counted from 1."""

    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


class Located(dict[Any, Any]):
    """A mapping with its place in the file, and those of its keys and values."""

    mark: Mark = Mark()
    keys_at: Mapping[Any, Mark] = {}
    values_at: Mapping[Any, Mark] = {}


class LocatedList(list[Any]):
    """A list with the places of its items."""

    items_at: tuple[Mark, ...] = ()


class _Refused(Exception):
    """YAML that we do not accept, with its place."""

    def __init__(self, problem: str, node: Any) -> None:
        super().__init__(problem)
        self.problem, self.at = problem, _mark(node)


def documents(text: str, shown: str, hint: str, *, texts: bool = False) -> list[Any]:
    """Return the YAML documents of a text; an empty one is one document, None. ``shown`` is the file, for errors.

    With ``texts`` every scalar but null is returned as it is written: ``yes``, ``007``, ``20ms``.
    """
    import yaml

    try:
        return list(yaml.load_all(text, _loader(texts=texts))) or [None]
    except _Refused as error:
        raise BadUsage(f"{shown}:{error.at}: {error.problem}", hint, code="bad_file") from None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise BadUsage(f"{shown}{_place(error, text)}: this is not YAML: {problem}", hint, code="bad_file") from None
    except RecursionError:
        raise BadUsage(f"{shown} is nested too deeply", hint, code="bad_file") from None
    except ValueError as error:
        raise BadUsage(f"{shown} has an invalid value: {error}", hint, code="bad_file") from None


def _place(error: Any, text: str) -> str:
    """Return the place of a YAML error for messages, ``:3:7``; empty where PyYAML does not tell it."""
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)
    if mark is not None:
        return f":{mark.line + 1}:{mark.column + 1}"
    if isinstance(position, int):
        # A character that YAML does not allow: the reader counts characters.
        before = text[:position]
        return f":{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"
    return ""


def _mark(node: Any) -> Mark:
    """Return the place in the file where a node of YAML begins."""
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _loader(*, texts: bool = False) -> Any:  # noqa: C901 - one class, made where PyYAML is loaded
    """Return PyYAML's safe loader, which notes where each key and value is written, and refuses duplicate keys and huge values."""
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Refuse what is nested too deep, before PyYAML's recursion overflows."""
            if self.depth == _MAX_DEPTH:
                raise RecursionError
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's
            if texts and node.id == "scalar" and node.tag != "tag:yaml.org,2002:null":
                return node.value
            try:
                return super().construct_object(node, deep=deep)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
                # The text does not fit its tag (!!timestamp, !!int); PyYAML does not check.
                kind = str(node.tag).rpartition(":")[2]
                raise _Refused(f"this is not a valid {kind[:40]}", node) from None

        def flatten_mapping(self, node: Any) -> None:
            """Refuse merges (``<<``) that would make a small file huge."""
            for key, value in node.value:
                # Each alias in such a list may stand for thousands of keys.
                if key.tag == "tag:yaml.org,2002:merge" and len(getattr(value, "value", "")) > _MAX_MERGED:
                    raise _Refused("too many merged mappings", key)
            before = len(node.value)
            super().flatten_mapping(node)
            # Count all merges of the file: a chain of them copies its keys again and again.
            self.merged = getattr(self, "merged", 0) + max(0, len(node.value) - before)
            if len(node.value) > _MAX_KEYS or self.merged > 4 * _MAX_KEYS:
                raise _Refused("too many keys", node)

        def mapping(self, node: Any) -> Any:
            """Yield a `Located`, then fill it: PyYAML needs the object first, for an alias inside it."""
            located = Located()
            located.mark = _mark(node)
            yield located
            written = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in written:
                        raise _Refused(f"the key '{key.value[:40]}' is given twice", key)
                    written.add(key.value)
            located.update(self.construct_mapping(node))
            # A merge is flattened by now: its pairs come first, and its own key is gone.
            keys = [self.construct_object(key_node, deep=True) for key_node, _ in node.value]
            located.keys_at = {key: _mark(node) for key, (node, _) in zip(keys, node.value, strict=True)}
            located.values_at = {key: _mark(node) for key, (_, node) in zip(keys, node.value, strict=True)}

        def sequence(self, node: Any) -> Any:
            located = LocatedList()
            yield located
            located.extend(self.construct_sequence(node))
            located.items_at = tuple(map(_mark, node.value))

        def number(self, node: Any) -> Any:
            if len(node.value) > _MAX_DIGITS:
                raise _Refused("the number is too long", node)
            return self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.mapping)
    Loader.add_constructor("tag:yaml.org,2002:seq", Loader.sequence)
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.number)
    return Loader


class Flow(dict[Any, Any]):
    """A mapping that `yaml_text` writes on one line: ``{index: 0}``."""


def yaml_text(value: Any) -> str:
    """Return a value as YAML that all YAML 1.1 and 1.2 parsers read alike."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Blocks for multi-line text, and indented lists."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
            return super().increase_indent(flow, False)

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    def represent(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    Dumper.add_representer(
        Flow, lambda dumper, flow: dumper.represent_mapping("tag:yaml.org,2002:map", flow, flow_style=True)
    )
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=True))
