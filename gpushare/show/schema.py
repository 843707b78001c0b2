"""The JSON Schemas of the answers and of gpushare.yaml, as `tools.generate` has written them from the value classes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from gpushare.base.errors import NotFound
from gpushare.base.units import quoted
from gpushare.show.result import SCHEMA

_ERROR = {
    "description": "What failed and why, and the next command.",
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "Explained by: gpushare explain CODE"},
        "message": {"type": "string"},
        "hint": {"type": "string"},
        "gpu": {"type": ["string", "null"], "description": "The index or UUID of the GPU concerned."},
    },
    "required": ["code", "message", "hint", "gpu"],
    "additionalProperties": False,
}


HOST_FILE: Final = "gpushare.yaml"


def _read_schemas(name: str = "answers") -> Any:
    """Return the generated file with the schemas of all answers, or that of gpushare.yaml."""
    return json.loads((files("gpushare") / "data" / "schemas" / f"{name}.json").read_text(encoding="utf-8"))


def host_file_schema() -> Any:
    return _read_schemas(HOST_FILE)


def commands_with_schema() -> list[str]:
    return list(_read_schemas()["answers"])


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the document that a command prints with ``-o json``.

    Raises:
        NotFound: no such command (code ``no_schema``).
    """
    generated = _read_schemas()
    if command not in generated["answers"]:
        raise NotFound(f"there is no schema for {quoted(command)}", "see all: gpushare schema", code="no_schema")
    data = generated["answers"][command]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpushare {command} -o json",
        "type": "object",
        "properties": {
            "schema": {"const": SCHEMA},
            "command": {"const": command},
            "status": {"enum": ["ok", "partial", "error"], "description": "partial: some of it failed; see errors."},
            "data": {"anyOf": [data, {"type": "null"}]},
            "errors": {"type": "array", "items": _ERROR},
        },
        "required": ["schema", "command", "status", "data", "errors"],
        "additionalProperties": False,
        "$defs": {name: generated["$defs"][name] for name in sorted(_needed_definitions(data, generated["$defs"]))},
    }


def _needed_definitions(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the definitions that a schema refers to, directly or through others."""
    needed: set[str] = set()
    new = [schema]
    while new:
        names = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(new))) - needed
        needed |= names
        new = [definitions[name] for name in names]
    return needed
