"""docs/tasks/ and the jq lines of docs/json.md: each shell line is run, in order, on the simulated host of its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.drive import World

PROJECT = Path(__file__).resolve().parent.parent
PAGES = sorted((PROJECT / "docs" / "tasks").glob("*.md"))
_LABELS = {"instance": "gpu01:9400", "gpu": "0", "UUID": "GPU-1", "modelName": "NVIDIA H200"}
_VALUES = {"DCGM_FI_PROF_SM_ACTIVE": "0.2", "DCGM_FI_DEV_FB_USED": "8000", "DCGM_FI_DEV_FB_FREE": "132000"}
_SERIES = [
    {"metric": {**_LABELS, "__name__": name}, "values": [[1_795_000_000 + 60 * n, value] for n in range(60)]}
    for name, value in _VALUES.items()
]
DAY = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": _SERIES}})
# What stands for the programs of the pages: a server or training runs on, a trial ends soon.
STUBS = {
    "gpushare": f'exec {sys.executable} -m gpushare "$@"',
    # What the pages change in /etc of a real host is left out.
    "sudo": 'case "$1" in install|rm|systemctl|test) exit 0;; esac; exec "$@"',
    "systemctl": "exit 0",
    "vllm": '[ "$1" = bench ] || exec sleep 60',
    "jupyter-lab": "exec sleep 60",
    "python3": 'case "$1" in train.py) exec sleep 60;; *) sleep 0.2; echo 0.9;; esac',
    "podman": "exit 0",
    "python": "sleep 0.2; echo rate=9",
    "torchrun": "sleep 0.2",
    "jupyter": "sleep 0.2",
    "./serve": "while echo rate=9; do sleep 0.2; done",
    "./infer": "sleep 0.2",
    "./job": "sleep 0.2",
    # What dcgm-exporter measured, as Prometheus answers.
    "curl": f"cat <<'END'\n{DAY}\nEND",
}


def blocks(path: Path, kind: str = "sh") -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shell(script: str, host: str, directory: Path) -> subprocess.CompletedProcess[str]:
    programs = directory / "programs"
    programs.mkdir()
    work = directory / "work"
    work.mkdir()
    for name, body in STUBS.items():
        file = (work if name.startswith("./") else programs) / name
        file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        file.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(PROJECT), "GPUSHARE_HOST": host, "USER": "root"}
    done = subprocess.run(
        ["bash", "-exc", script],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Of a user with a group of their own, as on Ubuntu: root takes no file unasked that a group may write.
        umask=0o002,
    )
    world = World(host)
    jobs = [job["name"] for job in world.run("jobs").data["jobs"] if job["state"] != "ended"]
    if jobs:
        world.run("stop", *jobs)
    return done


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_line_of_a_task_works(page: Path, tmp_path: Path) -> None:
    (host,) = re.findall(
        r"^Try it without a GPU: `export GPUSHARE_HOST=(\S+)`", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    # tune measures for minutes: tests/cli/tune/.
    script = re.sub(r"^gpushare tune .*\n", "", "".join(blocks(page)), flags=re.MULTILINE)
    done = shell(script, host, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("+ gpushare ") >= 3


def test_the_questions_of_the_json_page_have_answers(tmp_path: Path) -> None:
    lines = blocks(PROJECT / "docs" / "json.md")
    assert len(lines) == 10
    text = (PROJECT / "gpushare" / "data" / "schemas" / "answers.json").read_text(encoding="utf-8")
    fields = {name for kind in json.loads(text)["$defs"].values() for name in kind.get("properties", ())} | {"data"}
    for line in lines:
        query = re.sub(r'"[^"]*"|\$\w+', "", line.partition("jq")[2])
        assert set(re.findall(r"\.([a-z_]+)", query)) <= fields, line
    if shutil.which("jq"):
        before = "gpushare mps start --threads 50\ngpushare run --name train -- python3 trial.py\n"
        done = shell("set -o pipefail\n" + before + "".join(lines), "sim:h200", tmp_path)
        assert (done.returncode, "jq: error" in done.stderr) == (0, False), done.stderr[-3000:]
        assert '"exit_code": 0' in done.stdout


def test_tasks_are_short_and_their_python_compiles() -> None:
    assert len(PAGES) == 9
    assert [page.name for page in PAGES if page.read_text(encoding="utf-8").count("\n") > 80] == []
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block, page.name, "exec")
