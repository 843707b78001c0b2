"""README.md and docs/: each line of their shell blocks is run on a simulated host (docs/tasks/: tests/test_tasks.py)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_tasks import PROJECT, blocks, shell

# The beginnings of lines that are not run, and why.
EXCEPTIONS = {
    "sudo pipx ": "installs from the network",
    "pipx ": "installs from the network",
    "python3 -m venv ": ".ci/run runs it as it stands",
    "gpushare top ": "needs a terminal: tests/top/",
    "gpushare tune ": "measures for minutes: tests/cli/tune/",
    "sudo gpushare timeslice keep ": "runs until a signal: tests/cli/timeslice/test_keep.py",
}
# What is run in the place of a text: shorter times, fewer copies, plans, users and files that exist here.
INSTEAD = (
    ("--for 1h", "--for 2s"),
    ("--copies 100", "--copies 3"),
    ("gpushare bench ", "gpushare bench -n "),
    ("--slice 500us --name train -- python3 train.py", "-d --slice 500us --name train -- sleep 60"),
    ("-d -g 0 --swap request --name train -- python3 train.py", "-d -g 0 --swap request --name train -- sleep 60"),
    ("-- python3 train.py", "-- python3 trial.py"),
    ("gpushare run --production", "gpushare run -d --production"),
    ("vision bob ", "vision nobody "),
    ("examples/", f"{PROJECT}/examples/"),
    ("4711", "$(gpushare jobs -o json | jq '.data.jobs[] | select(.name == \"other\").pid')"),
)
_LONG = "gpushare run -d --swap request --name train -- sleep 60"
_CAPTURE = "gpushare capture >gpushare.yaml"


class Block(NamedTuple):
    """Where a shell block is run, and what is done before its first line."""

    host: str = "sim:h200"
    before: str = ""


# Of the blocks that need something else than one H200, by page and number.
BLOCKS = {
    ("choosing", 2): Block(before="gpushare sim add --name train --memory 4G"),
    ("clusters", 0): Block(before=f"gpushare mps start; {_CAPTURE}"),
    ("clusters", 3): Block(before=_CAPTURE),
    ("farms", 0): Block(before="seq 4 >inputs.txt"),
    ("memory", 2): Block("sim:8xh100"),
    ("mig", 0): Block("sim:h100-80gb"),
    ("mig", 1): Block("sim:h100-80gb", "gpushare mig apply -y 3g.40gb"),
    ("pause", 0): Block(before=f"{_LONG}; {_LONG.replace('train', 'other')}"),
    ("slices", 1): Block(before=f"cp {PROJECT}/examples/slices.yaml gpushare.yaml"),
    ("swap", 0): Block("sim:2xh100"),
    ("swap", 1): Block(before="gpushare run -d --production web -- ./serve"),
    ("swap", 2): Block("sim:4xh100", _LONG.replace("-d", "-d -g 0")),
}
PAGES = [page for page in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))) if page.stem != "json"]


def lines_of(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith(tuple(EXCEPTIONS)):
            for text, instead in INSTEAD:
                line = line.replace(text, instead)
            yield line


@pytest.mark.needs_root
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_every_line_of_a_page_works(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page)):
        lines = list(lines_of(text))
        if not lines or ("jq" in " ".join(lines) and shutil.which("jq") is None):
            continue
        block = BLOCKS.get((page.stem, number), Block())
        directory = tmp_path / str(number)
        directory.mkdir()
        done = shell("\n".join(filter(None, [block.before, *lines])), block.host, directory)
        assert done.returncode == 0, (number, done.stderr[-3000:])


def test_no_exception_is_without_its_line() -> None:
    text = "\n".join(line for page in PAGES for block in blocks(page) for line in block.splitlines())
    assert [start for start in EXCEPTIONS if f"\n{start}" not in f"\n{text}"] == []
    assert [part for part, _ in INSTEAD if part not in text] == []
    assert [key for key in BLOCKS if key[1] >= len(blocks(PROJECT / "docs" / f"{key[0]}.md"))] == []
