"""Workloads from a YAML file: one, or several under ``workloads:``. The text is given; errors name the line."""

from __future__ import annotations

from typing import Any, Final

from gpushare.advice.workload import Case, Workload, workload_of, yes_or_no
from gpushare.errors import BadUsage
from gpushare.units import quoted

_HINT: Final = "write for example: workloads: [{processes: 4, memory: 6G, users: same, saturating: no}]"
_TOP: Final = ("workloads", "root")


def read_case(text: str, path: str) -> Case:
    """Return the case of a file: a workload, a list of workloads, or ``workloads:`` with ``root:`` beside it.

    Raises:
        BadUsage: it is no YAML, has an unknown key, or a value that is none; the message names the line.
    """
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" line {mark.line + 1}:"
        raise BadUsage(
            f"{path}:{where} it is no YAML: {getattr(error, 'problem', None) or error}", _HINT, code="bad_file"
        ) from None
    except RecursionError:
        raise BadUsage(f"{path}: it is nested too deep", _HINT, code="bad_file") from None
    if node is None:
        raise BadUsage(f"{path}: it is empty", _HINT, code="bad_file")
    root = None
    if isinstance(node, yaml.MappingNode) and any(_key(key) in _TOP for key, _ in node.value):
        entries = _entries(node, path)
        for name, (key, _) in entries.items():
            if name not in _TOP:
                raise BadUsage(
                    f"{path}: line {key.start_mark.line + 1}: unknown key {quoted(name)}",
                    f"beside workloads stands only: {', '.join(_TOP[1:])}",
                    code="unknown_key",
                )
        if "root" in entries:
            root = _at(entries["root"][1], path, lambda: yes_or_no("root", _plain(entries["root"][1])))
        if "workloads" not in entries:
            raise BadUsage(f"{path}: it has no workloads", _HINT, code="bad_file")
        node = entries["workloads"][1]
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    workloads = tuple(_workload(one, path) for one in nodes)
    if not workloads:
        raise BadUsage(f"{path}: the list of workloads is empty", _HINT, code="bad_file")
    return Case(workloads=workloads, root=root)


def _workload(node: Any, path: str) -> Workload:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise BadUsage(f"{path}: line {node.start_mark.line + 1}: a workload is a mapping", _HINT, code="bad_file")
    words: dict[str, Any] = {}
    for name, (key, value) in _entries(node, path).items():
        # One by one, so that an error knows its line.
        found = _plain(value)
        _at(key, path, lambda name=name, found=found: workload_of({name: found}))
        words[name] = found
    return workload_of(words)


def _entries(node: Any, path: str) -> dict[str, tuple[Any, Any]]:
    entries: dict[str, tuple[Any, Any]] = {}
    for key, value in node.value:
        name = _key(key)
        if name in entries:
            raise BadUsage(
                f"{path}: line {key.start_mark.line + 1}: {quoted(name)} is there twice", "keep one", code="bad_file"
            )
        entries[name] = (key, value)
    return entries


def _key(node: Any) -> str:
    return str(getattr(node, "value", "")) if isinstance(getattr(node, "value", ""), str) else "?"


def _plain(node: Any) -> Any:
    """Return a value as text, a list of texts, or None: what they mean is the workload's matter, as on a command line."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        # No deeper: no property has a list of lists, and an alias may lead back to the list itself.
        return [one.value if isinstance(one, yaml.ScalarNode) else "..." for one in node.value]
    if isinstance(node, yaml.MappingNode):
        return {_key(key): "..." for key, _ in node.value}
    return None if node.tag == "tag:yaml.org,2002:null" else str(node.value)


def _at(node: Any, path: str, act: Any) -> Any:
    try:
        return act()
    except BadUsage as error:
        raise BadUsage(
            f"{path}: line {node.start_mark.line + 1}: {error.message}", error.hint, code=error.code
        ) from None
