"""Every line that ``gpushare advise`` prints works at once, in this order, and its undo leaves the host as it was."""

from __future__ import annotations

import itertools
import random
import shlex
from pathlib import Path

import pytest

from tests.cli.advise.asking import advised, commands, outcome, shown
from tests.cli.drive import Cli

HOSTS = ("t4", "a100-80gb", "h200", "a30", "rtx-4090", "p100", "2xa30", "4xl4", "2xt4,a30", "8xh100")
# Each property with its values, and how often it is given.
WORDS: tuple[tuple[float, tuple[tuple[str, ...], ...]], ...] = (
    (0.8, tuple(("--users", users) for users in ("same", "same", "different"))),
    (0.7, (("--saturating",), ("--no-saturating",))),
    (0.7, tuple(("--memory", size) for size in ("500M", "2G", "6G", "9G", "14G"))),
    (0.3, tuple(("--isolation", kind) for kind in ("none", "quota", "fault", "full"))),
    (0.3, tuple(("--pattern", kind) for kind in ("interactive", "bursty", "steady"))),
    (0.2, (("--latency", "20ms"), ("--latency", "none"))),
    (0.1, (("--untrusted",),)),
    (0.1, (("--gpus", "2"), ("-g", "0"))),
    (0.1, (("--io-bound",), ("--bandwidth-bound",), ("--no-code",), ("--consolidate",))),
    (
        0.3,
        tuple(
            ("--needs", need)
            for need in ("nccl", "ipc", "profiler", "cuda-graphs", "weights", "progress", "containment", "server",
                         "kubernetes", "replicas", "bandwidth-qos", "containers", "gaps", "graphics")
        ),
    ),
)  # fmt: skip
COUNTS = (
    *(("--processes", str(number)) for number in (1, 2, 3, 4, 6, 12, 30)),
    ("--processes", "6", "--groups", "2"),
    ("--production", "1", "--opportunistic", "1"),
    ("--production", "1", "--opportunistic", "2"),
)


def question(seed: int) -> tuple[str, list[str]]:
    """Return a host and the words of a random question."""
    chance = random.Random(seed)  # noqa: S311 - it only chooses
    given = [chance.choice(values) for often, values in WORDS if chance.random() < often]
    return f"sim:{chance.choice(HOSTS)}", [*chance.choice(COUNTS), *itertools.chain(*given)]


def check(cli: Cli, seed: int, program: str) -> None:
    """Ask, run what is printed, undo it, and compare the host."""
    spec, words = question(seed)
    before = shown(cli, spec)
    data = advised(cli, spec, ("-y", *words), "--command", program)
    what = f"seed {seed}: {spec} {shlex.join(words)}: {data['winner']}"
    assert (data["winner"] is None) == (not data["commands"]), what
    for line in (*commands(data), *commands(data, "undo")):
        if "gpushare " in line:
            code, err = outcome([line], spec)
            # The jobs may have ended by themselves.
            ended = line.startswith("gpushare stop ") and "is running or waiting" in err
            assert code == 0 or ended, f"{what}: {line}: {err}"
    assert shown(cli, spec) == before, what


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seed", range(100, 106))
def test_printed_lines_work_and_are_undone(cli: Cli, seed: int) -> None:
    check(cli, seed, "sleep 0.05")


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(10))
def test_a_hundred_answers_work_and_are_undone(
    cli: Cli, tens: int, sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        # Hosts of its own: here all jobs are of one process, which lives on, so their names stay in use.
        (sim_dir / str(seed)).mkdir()
        monkeypatch.setenv("GPUSHARE_SIM_DIR", str(sim_dir / str(seed)))
        # And a directory, where an export writes files.
        monkeypatch.chdir(sim_dir / str(seed))
        check(cli, seed, "sleep 1")
