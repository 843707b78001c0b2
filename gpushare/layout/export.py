"""What every export gives: documents, how to apply them, what they need, and what gets lost. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file: its name, its text, and what it is (``yaml``, ``json``, ``conf``, ``sh``, ``unit``, ``flags``)."""

    name: str
    text: str
    kind: str = "yaml"


@dataclass(frozen=True, kw_only=True)
class Export:
    """Documents of one engine.

    ``commands`` apply them, in this order. ``needs`` are versions, feature gates, labels that must be there.
    ``lost`` is what the host has (or leaves open) and the engine cannot say.
    """

    documents: tuple[Document, ...]
    commands: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def yaml_document(name: str, value: Mapping[str, Any]) -> Document:
    """Return a mapping as a YAML file, its keys in their order, text of several lines as a block."""
    return Document(name=name, text=yaml_text(value))


def yaml_text(value: Any) -> str:
    """Return a value as YAML that every YAML 1.1 and 1.2 parser reads alike."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Blocks for text of several lines, and lists indented as people write them."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
            return super().increase_indent(flow, False)

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    def text(dumper: Any, said: str) -> Any:
        style = "|" if "\n" in said else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", said, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=True))


def json_text(value: Any) -> str:
    """Return a value as one line of JSON, for a command line."""
    return json.dumps(value, separators=(", ", ": "))
