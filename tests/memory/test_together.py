"""The lines of docs/memory.md for other tools, as they are there: the tool starts the jobs, and gpushare holds them back."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.export.hosts import gpu, host
from tests.export.test_slurm_jobs import PROGRAMS, Cluster, until

# Waits for a file, so that all jobs that have room run at once.
TRAIN = """import os, pathlib, sys, time
me = " ".join(sys.argv[1:]) or str(os.getpid())
with open("log", "a") as log:
    log.write(f"start {me} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
while not pathlib.Path("go").exists():
    time.sleep(0.05)
with open("log", "a") as log:
    log.write(f"end {me}\\n")
"""


def line_for(tool: str) -> str:
    """Return the line of a tool in the table of the document."""
    document = Path(__file__).parents[2] / "docs" / "memory.md"
    (found,) = re.findall(rf"^\| {tool}[^|]* \| `([^`]+)` \|$", document.read_text(), re.MULTILINE)
    return str(found)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a user's directory with train.py, in whose shells `gpushare` means one H200, and `python` this one."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, words in (("gpushare", "-m gpushare"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").write_text(TRAIN)
    monkeypatch.chdir(home)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUSHARE_HOST", "sim:h200")
    monkeypatch.setenv("GPUSHARE_STATE_DIR", str(tmp_path / "state"))

    def log() -> list[str]:
        path = home / "log"
        return path.read_text().splitlines() if path.exists() else []

    def waiting() -> list[Any]:
        done = subprocess.run(["gpushare", "status", "-o", "json"], capture_output=True, text=True, check=True)
        return list(json.loads(done.stdout)["data"]["waiting_jobs"])

    return SimpleNamespace(
        log=log,
        running=lambda: sum(1 if one.startswith("start") else -1 for one in log()),
        waiting=waiting,
        go=(home / "go").touch,
        home=home,
    )


def most_at_once(log: list[str]) -> int:
    now = most = 0
    for one in log:
        now += 1 if one.startswith("start") else -1
        most = max(most, now)
    return most


def said(paths: list[Path]) -> str:
    return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())


def test_xargs(user: SimpleNamespace) -> None:
    (user.home / "configs.txt").write_text("".join(f"{number}.yaml\n" for number in range(5)))
    line = line_for("xargs").replace("20G", "40G")
    with open("out", "wb") as out, subprocess.Popen(["sh", "-c", line], stdout=out, stderr=out) as started:
        until(lambda: user.running() == 3 and len(user.waiting()) == 2, lambda: said([user.home / "out"]))
        user.go()
        assert started.wait(60) == 0, said([user.home / "out"])
    assert most_at_once(user.log()) == 3
    assert sorted(one.split()[1] for one in user.log() if one.startswith("end")) == [f"{n}.yaml" for n in range(5)]


def test_nohup(user: SimpleNamespace) -> None:
    line = line_for("a shell that may close")
    # The shell ends at once, and the job goes on.
    subprocess.run(["sh", "-c", line], check=True, timeout=60)
    until(lambda: user.running() == 1, lambda: said([user.home / "train.log"]))
    user.go()
    until(lambda: user.running() == 0, lambda: said([user.home / "train.log"]))


@pytest.mark.skipif(shutil.which("tsp") is None, reason="task spooler (tsp) is not installed")
def test_task_spooler(user: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TS_SOCKET", str(user.home / "tsp"))
    monkeypatch.setenv("TMPDIR", str(user.home))
    several, job = line_for("task spooler").replace("20G", "40G").split("; ")
    try:
        subprocess.run(
            ["sh", "-c", "; ".join([several, *[job] * 5])], check=True, timeout=60, stdout=subprocess.DEVNULL
        )
        until(lambda: user.running() == 3 and len(user.waiting()) == 2, lambda: str(user.log()))
        user.go()
        until(lambda: sum(one.startswith("end") for one in user.log()) == 5, lambda: str(user.log()))
        assert most_at_once(user.log()) == 3
    finally:
        user.go()
        subprocess.run(["tsp", "-K"], check=False, timeout=60)


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Cluster]]:
    """Return a function that starts a real slurmctld and slurmd, on a node with so many GPUs of eight shards each."""
    if PROGRAMS is None or not (Path(PROGRAMS) / "srun").exists():
        pytest.skip("GPUSHARE_TEST_SLURM is no directory with slurmctld, slurmd and srun")
    begun: list[Cluster] = []

    def start(gpus: int) -> Cluster:
        one = Cluster(tmp_path_factory.mktemp("slurm"), host(*(gpu(index, replicas=8) for index in range(gpus))))
        begun.append(one)
        one.start()
        return one

    yield start
    for one in begun:
        one.stop()
        shutil.rmtree(one.tmp / "spool", ignore_errors=True)


def submitted(cluster: Cluster, user: SimpleNamespace, line: str, number: int) -> list[subprocess.Popen[bytes]]:
    """Start a line so many times at once."""
    words = shlex.split(line)
    found = []
    for one in range(number):
        with (user.home / f"out-{one}").open("wb") as out:
            argv = [cluster.program(words[0]), *words[1:]]
            found.append(subprocess.Popen(argv, env=cluster.environment, stdout=out, stderr=out))
    return found


@pytest.mark.needs_root
def test_slurm_starts_more_jobs_than_have_room(slurm: Callable[[int], Cluster], user: SimpleNamespace) -> None:
    cluster = slurm(1)
    outs = [user.home / f"out-{one}" for one in range(5)]
    line = line_for("Slurm").replace("20G", "40G")
    jobs = submitted(cluster, user, line, 5)
    until(lambda: user.running() == 3 and len(user.waiting()) == 2, lambda: said(outs) + cluster.logs())
    # For Slurm all of them run.
    assert cluster.ask("scontrol", "show", "job").count("JobState=RUNNING") == 5
    # One that is cancelled leaves the line, and the others start when there is room.
    (first, second) = (str(one["pid"]) for one in user.waiting())
    text = {job: cluster.ask("scontrol", "listpids", job) for job in "12345"}
    cancelled = next(job for job, pids in text.items() if first in pids.split())
    cluster.ask("scancel", cancelled)
    until(lambda: [str(one["pid"]) for one in user.waiting()] == [second], cluster.logs)
    user.go()
    assert sorted(one.wait(60) != 0 for one in jobs) == [False] * 4 + [True], said(outs)
    assert most_at_once(user.log()) == 3
    assert sum(one.startswith("end") for one in user.log()) == 4


@pytest.mark.needs_root
def test_slurm_gives_a_gpu_and_gpushare_takes_it(
    slurm: Callable[[int], Cluster], user: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job has GPU 0 from Slurm and does not use it yet, so GPU 0 would be as good to gpushare."""
    monkeypatch.setenv("GPUSHARE_HOST", "sim:2xh200")
    cluster = slurm(2)
    devices = subprocess.run(["gpushare", "status", "-o", "json"], capture_output=True, text=True, check=True)
    uuids = [one["uuid"] for one in json.loads(devices.stdout)["data"]["gpus"]]
    (other,) = submitted(cluster, user, "srun --gres=gpu:1 sleep 60", 1)
    until(lambda: "JobState=RUNNING" in cluster.ask("scontrol", "show", "job"), cluster.logs)
    jobs = submitted(cluster, user, line_for("Slurm"), 2)
    outs = [user.home / f"out-{one}" for one in range(2)]
    until(lambda: user.running() == 2, lambda: said(outs) + cluster.logs())
    user.go()
    assert [one.wait(60) for one in jobs] == [0, 0], said(outs)
    assert [one.split()[2] for one in user.log() if one.startswith("start")] == [uuids[1]] * 2
    other.terminate()
    other.wait(60)
