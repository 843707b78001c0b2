"""Writes the manual pages, the completions, the schemas, the pictures and the output in the documents.

``python -m tools.generate [--check] [DIRECTORY]``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpushare.hostfile.parse import schema
from tools.completions import bash, fish, zsh
from tools.documents import documents
from tools.manual import manuals
from tools.pictures import pictures
from tools.schemas import schemas
from tools.tree import command_tree

PROJECT = Path(__file__).resolve().parent.parent


def artifacts() -> dict[str, str]:
    """Return the generated files by their path in the project."""
    root = command_tree()
    return {
        **{f"man/{name}": page for name, page in manuals(root).items()},
        "completions/gpushare.bash": bash(root),
        "completions/_gpushare": zsh(root),
        "completions/gpushare.fish": fish(root),
        "gpushare/data/schemas/gpushare.yaml.json": json.dumps(schema(), indent=2) + "\n",
        "gpushare/data/schemas/answers.json": schemas(),
        **pictures(),
        **documents(root),
    }


def stale(directory: Path = PROJECT) -> list[str]:
    """Return the generated files that are missing or differ from what they would be now."""
    texts = artifacts()
    return [name for name, text in texts.items() if not _holds(directory / name, text)]


def write(directory: Path = PROJECT) -> None:
    """Write the generated files."""
    for name, text in artifacts().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main(arguments: list[str]) -> int:
    """Write, or with ``--check`` compare; return the exit code (1: something is stale)."""
    check = "--check" in arguments
    directory = next((Path(word) for word in arguments if not word.startswith("-")), PROJECT)
    if not check:
        write(directory)
        return 0
    old = stale(directory)
    for name in old:
        print(f"{name} is stale; regenerate it: python -m tools.generate", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
