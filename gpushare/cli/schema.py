"""``gpushare schema``: the JSON Schema of an answer, or of gpushare.yaml; done by `gpushare/show/schema.py`."""

from __future__ import annotations

import json
from typing import Any

from gpushare.cli.options import Command, argument, verb
from gpushare.show.result import Result
from gpushare.show.schema import HOST_FILE, commands_with_schema, host_file_schema, schema_of


@verb(Command)
def schema(
    words: list[str] | None = argument("[COMMAND...]", "status, mps start, ..., or gpushare.yaml."),
) -> Any:
    """Print the JSON Schema of what a command answers with -o json, or of the file gpushare.yaml.

    Without a command it lists those that have one. In schema 1, keys are only ever added. Editors complete and check
    gpushare.yaml with its schema.
    """
    command = " ".join(words or ())
    if not command:
        names = (*commands_with_schema(), HOST_FILE)
        return Result(data=names, text="\n".join(names))
    document = host_file_schema() if command == HOST_FILE else schema_of(command)
    return Result(data=document, text=json.dumps(document, indent=2))
