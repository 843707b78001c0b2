"""A small part of the crash injector: some points of each changing command. All of it: ``python -m benchmarks.crashes``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.crashes.hits import Counts
from benchmarks.crashes.report import Result, write
from benchmarks.crashes.rows import rows

ROOT = Path(__file__).parents[2]
# Rows by the beginning of their name, and how many points of each.
PARTS = {
    "mps": (["mps*"], 5),
    "pause and resume": (["pause", "pause, its guard too", "resume"], 4),
    "swap": (["swap out", "swap out, its guard too", "swap in", "swap in, by root", "move"], 3),
    "stop": (["stop*"], 4),
    "timeslice, apply and advise": (["timeslice set*", "timeslice reset*", "apply*", "advise*"], 4),
    "mig": (["mig*"], 4),
    # Real programs and guards: a point takes most of a second, and nearly all of that is waiting.
    "run": (["run", "run --mig"], 4),
    "an instance for one job": (["run --mig --create*"], 4),
    "run, its guard too": (["run, its guard too"], 4),
    "waiting for memory": (["run --wait", "run --wait, its guard too"], 2),
    "the ledger of memory": (["run --memory*", "run --swap turns"], 2),
    "programs that are swapped": (
        ["run --swap idle", "run --opportunistic --yield swap", "run --swap turns, its guard too", "run --movable"],
        2,
    ),
    "slices of programs": (["run --production --slice", "run --opportunistic --yield slices"], 2),
    "slices of jobs": (["run --name", "timeslice keep"], 2),
}


def crashes(directory: Path, *words: str, before: Path | None = None) -> tuple[int, str, dict[str, Any]]:
    """Run the tool; return its exit code, what it printed, and its document."""
    path = os.pathsep.join(str(one) for one in (before, ROOT) if one is not None)
    document = directory / "crashes.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.crashes", "--json", str(document), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert document.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr, json.loads(document.read_text())


@pytest.mark.parametrize("part", PARTS)
def test_one_more_command_brings_back_the_old_or_the_new_state(part: str, tmp_path: Path) -> None:
    names, points = PARTS[part]
    words = [word for name in names for word in ("--verb", name)]
    # One at a time: each job would prepare the host of each row for itself.
    code, said, found = crashes(tmp_path, *words, "--sample", str(points), "--brief", "--jobs", "1")
    assert code == 0, said
    assert all(0 < row["kills"] + row["errors"] <= points for row in found["rows"])


def test_the_tool_sees_what_is_lost(tmp_path: Path) -> None:
    """A gpushare whose journal never comes to the disk: the tool says where that is felt, and how to see it again."""
    (tmp_path / "sitecustomize.py").write_text(
        "from gpushare.mig.ledger import MigLedger\n"
        "assert callable(MigLedger._write)\n"
        "MigLedger._write = lambda self, entry: None\n"
    )  # fmt: skip
    # Every 4th point: one lies between the first instance and the last, wherever that is.
    words = ("--verb", "mig create, several", "--fault", "kill", "--every", "4", "--jobs", "1")
    code, said, found = crashes(tmp_path, *words, before=tmp_path)
    assert code == 1, said
    assert "again: python -m benchmarks.crashes --verb 'mig create, several' --at " in said
    assert any("GPU 0 instances is" in one["what"] for one in found["rows"][0]["violations"])


def test_every_changing_verb_has_a_row() -> None:
    """A verb that changes the host and is not hit would be the one that loses something."""
    tried = {tuple(word for word in row.command[:2] if not word.startswith("-")) for row in rows()}
    changing = {
        *(("mig", verb) for verb in ("create", "destroy", "apply", "enable", "disable", "name", "grant", "revoke", "recover")),
        *(("mps", verb) for verb in ("start", "stop", "set")),
        *(("timeslice", verb) for verb in ("set", "reset", "keep")),
        *(("swap", verb) for verb in ("out", "in")),
        ("apply",),
        ("run",),
        ("stop",),
        ("move",),
    }  # fmt: skip
    assert changing <= {
        words if words[:1] not in {("run",), ("apply",), ("stop",), ("move",)} else words[:1] for words in tried
    }


def test_the_counts_of_the_document_are_the_tools(tmp_path: Path) -> None:
    """`--write` changes what stands between its marks, and nothing else."""
    path = tmp_path / "crashes.md"
    text = (ROOT / "benchmarks" / "results" / "crashes.md").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    write(path, Result.of([Counts(row="nothing")], real_daemon=False, part=""))
    begin, end = (f"<!-- python -m benchmarks.crashes --write: simulated {word} -->" for word in ("begin", "end"))
    for piece in (0, 2):
        old, new = (one.replace(end, begin).split(begin) for one in (text, path.read_text(encoding="utf-8")))
        assert old[piece] == new[piece]
    # No violation is written down as if it were nothing.
    table = [line.split("|") for line in text.split(begin)[1].split(end)[0].splitlines() if line.startswith("| ")]
    assert {row[-2].strip() for row in table[1:]} <= {"0"}
