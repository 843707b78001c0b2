"""What every export gives: documents, how to apply them, what they need, and what gets lost. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpushare.inputs import yaml_text


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


def json_text(value: Any) -> str:
    """Return a value as one line of JSON, for a command line."""
    return json.dumps(value, separators=(", ", ": "))


# Runs a kernel and ends: what only lists GPUs would prove nothing.
IMAGE: Final = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
