"""README.md and docs/: each command of their ``console`` blocks is run again, and tables come from the command tree."""

from __future__ import annotations

import json
import re
from typing import Any

from gpushare.base.errors import ExitCode
from tools.manual import ENVIRONMENT, EXIT_STATUS, FILES, argument_word
from tools.schemas import schemas
from tools.terminal import PROJECT, Terminal, terminal
from tools.tree import Node

_COLUMNS = 100
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_PROMPT = "$ "
# The last line of an output that a document shortens: as many lines as stand above it are kept.
_CUT = "..."


def documents(root: Node) -> dict[str, str]:
    """Return README.md and the documents of docs/ by their path in the project, as they would be now."""
    tables = _tables(root)
    texts = {}
    for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))):
        text = refreshed(path.read_text(encoding="utf-8"))
        for part, table in tables.items():
            text = _filled(text, part, table)
        texts[str(path.relative_to(PROJECT))] = text
    return texts


def _filled(text: str, part: str, table: str) -> str:
    """Return a text with a table between the two comments that name it, if it has them."""
    begin, end = (f"<!-- python -m tools.generate: {part} {where} -->" for where in ("begin", "end"))
    before, found, rest = text.partition(f"{begin}\n")
    return f"{before}{found}{table}{end}{rest.partition(end)[2]}" if found else text


def _tables(root: Node) -> dict[str, str]:
    commands = [
        (" ".join([f"gpushare {node.title}", *(argument_word(one) for one in node.arguments)]), f"{node.short_help}.")
        for node in root.walk()
        if not node.children
    ]
    return {
        "commands": _table(("command", "what it does"), commands),
        "exit codes": _table(("code", "meaning"), [(str(int(code)), EXIT_STATUS[code]) for code in ExitCode]),
        "environment": _table(("name", "meaning"), [*ENVIRONMENT.items(), *FILES.items()]),
        **_answers(json.loads(schemas())),
    }


def _answers(document: dict[str, Any]) -> dict[str, str]:
    """Return what each command answers, and the fields of each object."""
    rows = "".join(f"| `{name}` | {_kind(answer)} |\n" for name, answer in document["answers"].items())
    objects = []
    for name, definition in document["$defs"].items():
        fields = definition.get("properties", {}).items()
        lines = [f"- `{field}`: {_kind(kind)}{_meaning(kind)}\n" for field, kind in fields]
        objects.append(f"### {name}\n\n{definition.get('description', '')}\n\n{''.join(lines)}")
    return {"answers": f"| command | `data` |\n|---|---|\n{rows}", "fields": "\n".join(objects)}


def _meaning(kind: dict[str, Any]) -> str:
    return f". {kind['description']}" if "description" in kind else ""


def _kind(schema: dict[str, Any]) -> str:
    """Return a JSON Schema in a few words: ``list of [Gpu](#gpu) or null``."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    names = schema.get("type", "anything")
    if names == "array":
        return f"list of {_kind(schema['items'])}" if schema.get("items") else "list"
    return names if isinstance(names, str) else " or ".join(names)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|---|"]
    lines += [f"| `{name.replace('|', chr(92) + '|')}` | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return "".join(f"{line}\n" for line in lines)


def refreshed(text: str) -> str:
    """Return a document with the output of its commands as it is now; its blocks are one session."""
    if _BLOCK.search(text) is None:
        return text
    with terminal(columns=_COLUMNS) as session:
        return _BLOCK.sub(lambda block: f"```console\n{_run(session, block[1])}```", text)


def _run(session: Terminal, block: str) -> str:
    """Return a block with the output of each command as it is now, cut where the document has ``...``."""
    lines = []
    for typed in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
        line, *before = typed.splitlines()
        shown = _ESCAPE.sub("", session.type(line.removeprefix(_PROMPT))).strip("\n")
        found = [one.rstrip() for one in shown.split("\n") if shown]
        if before[-1:] == [_CUT]:
            found = [*found[: len(before) - 1], _CUT]
        lines += [line, *found]
    return "".join(f"{line}\n" for line in lines)
