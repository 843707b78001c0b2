"""`gpushare farm --copies` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.measure.bench_data import KIND
from gpushare.run.results import BenchedCap, keep_benched
from gpushare.selection import select_one
from tests.cli.drive import Answer, World

Cli = Callable[..., Answer]


def test_output_is_prefixed_and_a_failed_copy_is_named(cli: Cli, world: World, tmp_path: Path) -> None:
    answer = cli("farm", "--copies", "3", "--logs", str(tmp_path / "logs"), "--", "sh", "-c", "echo is {}; exit {}")
    assert answer.code == 1
    assert {"[0] is 0", "[1] is 1", "[2] is 2"} <= set(answer.out.splitlines())
    assert list(answer.lines("error")) == [
        "error: copy 1: exit code 1: is 1",
        "error: copy 2: exit code 2: is 2",
    ]
    assert "3 copies on GPU 0, each with cap 66.7 % and memory limit" in answer.err
    assert (tmp_path / "logs" / "copy-2.log").read_text() == "is 2\n"
    assert not world.state.daemons


def test_json_has_every_copy_and_stdout_is_one_document(cli: Cli) -> None:
    answer = cli("-o", "json", "farm", "--copies", "2", "--threads", "30", "--memory", "2G", "--", "echo", "{}")
    data = answer.ok().data
    assert (data["threads_percent"], data["memory_limit_bytes"]) == (30.0, 2 * 1024**3)
    assert [(copy["copy"], copy["state"], copy["exit_code"], copy["tries"]) for copy in data["copies"]] == [
        (0, "done", 0, 1),
        (1, "done", 0, 1),
    ]
    assert "[1] 1" in answer.err


def test_the_cap_that_bench_found_is_taken(cli: Cli, tmp_path: Path) -> None:
    found: dict[str, Any] = {
        "kind": KIND,
        "cells": [cell("timeslice", 4, None, 3.0), cell("mps:100/n", 4, 25.0, 2.0), cell("mps", 4, None, 1.0)],
        "picks": [{"copies": 4, "way": "timeslice", "threads_percent": None}],
    }
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(found))
    answer = cli("farm", "--copies", "4", "--like", str(file), "-n", "--", "true").ok()
    assert answer.out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25.0") == 4
    assert "another way than MPS was faster for 4 copies" in answer.err
    missing = cli("-o", "json", "farm", "--copies", "5", "--like", str(file), "--", "true")
    assert missing.json["errors"][0]["code"] == "not_measured"


def benched(world: World, *command: str, copies: int = 4, driver: str | None = None) -> None:
    device = select_one(None, world.host.nvml.sweep())
    known = driver or world.host.nvml.driver_version()
    cap = BenchedCap(copies=copies, threads_percent=40.0, best=True, date="2026-11-20", driver=known)
    keep_benched(world.host, device, command, [cap])


def test_a_farm_takes_the_cap_that_bench_kept_for_its_command(cli: Cli, world: World) -> None:
    benched(world, "true", "{}")
    answer = cli("farm", "--copies", "4", "-n", "--", "true", "{}").ok()
    assert answer.out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40.0") == 4
    assert "gpushare bench found the cap on 2026-11-20\n" in answer.err


@pytest.mark.parametrize("words", [("3", "true", "{}"), ("4", "true", "other")])
def test_another_number_of_copies_or_another_command_was_not_measured(
    cli: Cli, world: World, words: tuple[str, ...]
) -> None:
    benched(world, "true", "{}")
    copies, *command = words
    answer = cli("farm", "--copies", copies, "-n", "--", *command).ok()
    assert "=40.0" not in answer.out
    assert "bench" not in answer.err


def test_a_cap_that_was_found_under_another_driver_says_so(cli: Cli, world: World) -> None:
    benched(world, "true", driver="535.1")
    answer = cli("farm", "--copies", "4", "-n", "--", "true").ok()
    assert "under driver 535.1; measure again here" in answer.err
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40.0" in answer.out


def cell(way: str, copies: int, threads: float | None, mean: float) -> dict[str, Any]:
    """Return a cell of a benchmark."""
    summary = dict.fromkeys(("median", "least", "most", "low", "high", "spread"), mean)
    throughput = {"count": 3, "mean": mean, **summary}
    return {"way": way, "copies": copies, "threads_percent": threads, "throughput": throughput}


def test_a_plan_shows_every_copy_and_starts_none(cli: Cli, world: World) -> None:
    answer = cli("farm", "--copies", "2", "-n", "--", "true", "{}").ok()
    assert "GPUSHARE_COPY=1 GPUSHARE_COPIES=2 true 1" in answer.out
    assert "nvidia-cuda-mps-control -d" in answer.out
    assert not world.state.daemons


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--copies", "0", "--", "true"), "bad_copies", 2),
        (("--copies", "2", "--restart", "-1", "--", "true"), "bad_restart", 2),
        (("--logs", "x", "--", "true"), "bad_combination", 2),
        (("--copies", "2", "--mig", "1g", "--", "true"), "bad_combination", 2),
        (("--copies", "2", "--production", "web", "--", "true"), "bad_combination", 2),
        (("--copies", "2", "--", "no-such-program"), "command_not_found", 6),
        (("--copies", "200", "--memory", "200G", "--", "true"), "memory_does_not_fit", 19),
        (("--copies", "2", "--like", "no-such.json", "--", "true"), "no_file", 6),
    ],
)
def test_bad_farms_are_refused(refused: Callable[..., str], words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("run", *words, code=code, exit_code=exit_code)


def test_copies_that_fail_alike_are_told_once(cli: Cli) -> None:
    answer = cli("farm", "--copies", "3", "--restart", "1", "--", "sh", "-c", "echo boom >&2; exit 3")
    assert answer.code == 1
    assert answer.lines("error") == ["error: copies 0-2: exit code 3: boom"]
    assert len(answer.lines("hint")) == 1
    assert answer.err.count("exit code 3: boom") == 2
    assert "boom" not in answer.out[answer.out.index("# copies") :]
    document = cli("-o", "json", "farm", "--copies", "2", "--", "sh", "-c", "exit 3").json
    assert [copy["failure"] for copy in document["data"]["copies"]] == ["exit code 3"] * 2
