"""What every export returns: documents, how to apply them, what they need and what is lost; and writing them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, Final

from gpushare.base.errors import BadUsage, InUse, NoPermission
from gpushare.base.package import package_rows, package_text
from gpushare.base.values import dataclass
from gpushare.host.written_file import create_file, opened_directory
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

    ``commands`` apply them, in this order. ``needs`` are required versions, feature gates and labels. ``lost`` is what
    the host has (or leaves open) and the engine cannot express.
    """

    documents: tuple[Document, ...]
    commands: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class _Packaged(Template):
    """A script or unit, which is full of $: ``@{NAME}`` stands for a value."""

    delimiter = "@"


def render_file(name: str, **values: str | int) -> str:
    """Return the text of a template of ``gpushare/data/export`` with these values in it."""
    return _Packaged(package_text(f"export/{name}")).substitute(values)


def notes(engine: str, kind: str, traits: Collection[str], **values: object) -> tuple[str, ...]:
    """Return the notes on an engine of a kind: ``needs`` (what the export requires) or ``lost`` (what it cannot say).

    A row of ``data/export-notes.yaml`` applies if each word of its ``if`` is a trait; ``!word`` must not be one.
    """

    def applies(condition: str) -> bool:
        return all(word[1:] not in traits if word[0] == "!" else word in traits for word in condition.split())

    rows = package_rows("export-notes.yaml")[engine][kind]
    return tuple(row["text"].format(**values) for row in rows if applies(row.get("if", "")))


def yaml_document(name: str, value: Mapping[str, Any]) -> Document:
    """Return a mapping as a YAML file; keys keep their order, multi-line text becomes a block."""
    return Document(name=name, text=yaml_text(value))


def cluster_object(api: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of Kubernetes: the version of its API, its kind, its name and what it specifies."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}


# Runs a kernel and ends: listing GPUs would prove nothing.
IMAGE: Final = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
# As in `docker pull`: a registry, lower-case names, a tag, a digest (github.com/distribution/reference, regexp.go).
_IMAGE: Final = re.compile(
    r"(?:[a-zA-Z0-9][a-zA-Z0-9.-]{0,254}(?::\d{1,5})?/)?[a-z0-9][a-z0-9._/-]{0,254}(?::\w[\w.-]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,128})?",
    re.ASCII,
)


def image_or_default(image: str | None) -> str:
    """Return an image as it was given, or without one `IMAGE`. Raises BadUsage (``bad_name``)."""
    if image is not None:
        check_word(image, _IMAGE, "the name of an image", "--image nvcr.io/nvidia/pytorch:25.01-py3")
    return image or IMAGE


def check_word(word: str, pattern: str | re.Pattern[str], what: str, example: str, *, code: str = "bad_name") -> None:
    """Raise BadUsage unless a typed word matches a pattern as a whole; the error says ``what`` it should be."""
    if re.fullmatch(pattern, word) is None:
        raise BadUsage(f"'{word[:70]}' is not {what}", f"for example: {example}", code=code)


def joined_text(documents: Sequence[Document]) -> str:
    """Return documents as one text for stdout, with a line for the name of each if there are several."""
    if len(documents) == 1:
        return documents[0].text
    parts = []
    for number, document in enumerate(documents):
        separator = "---\n" if document.kind == "yaml" and number else ""
        parts.append(f"{separator}# file: {document.name}\n{document.text}")
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


_NODE: Final = re.compile(r"\bnode([ /])NODE\b")


def apply_script(engine: str, export: Export) -> Document:
    """Return the script that runs the commands of an export next to its files; it takes the name of an unknown node."""
    lines = ["#!/bin/sh", f"# Written by gpushare export {engine}. It stops at the first command that fails."]
    lines += [f"# Needs: {' '.join(need.split())}" for need in export.needs]
    lines += [f"# Lost: {' '.join(text.split())}" for text in export.lost]
    lines += ["set -eu", 'cd "$(dirname "$0")"']
    commands = [_NODE.sub(r'node\1"$node"', command) for command in export.commands]
    if commands != list(export.commands):
        lines.append("node=${1:?give the name of the node: sh apply.sh NODE}")
    if any("sudo " in command for command in commands):
        # Root of a small host, or in a container, may have none.
        lines.append('command -v sudo >/dev/null || sudo() { "$@"; }')
    lines += ["set -x", *commands]
    return Document(name="apply.sh", text="\n".join(lines) + "\n", kind="sh")


def write_documents(documents: Sequence[Document], directory: Path) -> tuple[str, ...]:
    """Write documents as new files, and return their paths."""
    written: list[str] = []
    try:
        with opened_directory(directory) as descriptor:
            # All or none.
            for document in documents:
                if os.path.lexists(directory / document.name):
                    raise _exists_error(directory / document.name)
            for document in documents:
                mode = 0o755 if document.kind == "sh" else 0o644
                try:
                    create_file(document.name, document.text.encode(), directory=descriptor, mode=mode)
                except FileExistsError:
                    # Another user has created it since.
                    raise _exists_error(directory / document.name) from None
                written.append(str(directory / document.name))
    except OSError as error:
        raise not_written_error(directory, error, "give a directory of your own: --to DIR") from None
    return tuple(written)


def _exists_error(path: Path) -> InUse:
    """Return the error about a file that is there already: exports never replace one."""
    return InUse(f"{path} exists already", "give another directory, or remove it", code="file_exists")


def not_written_error(path: Path, error: OSError, hint: str) -> NoPermission:
    """Return the error for a file that cannot be written where the user wants it."""
    return NoPermission(f"cannot write {path}: {error.strerror or error}", hint, code="not_written")
