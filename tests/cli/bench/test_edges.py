"""`gpushare bench`: comparisons that make no sense are refused before anything runs; what was measured is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.errors import OperationFailed
from tests.cli.conftest import Cli

WAYS = ("--copies", "2", "--ways", "timeslice,mps", "--repeat", "2", "--metric", "rate=(.+)")


@pytest.fixture
def earlier(cli: Cli, tmp_path: Path) -> Path:
    file = tmp_path / "earlier.json"
    cli("bench", *WAYS, "--to", str(file), "--", "echo", "rate=2").ok()
    return file


def test_what_counts_something_else_is_refused_before_anything_runs(
    refused: Callable[..., str], earlier: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    words = ("--compare", str(earlier), "--copies", "2", "--ways", "timeslice,mps", "--", "touch", str(ran))
    assert "--metric" in refused("bench", *words, code="other_metric", exit_code=2)
    assert not ran.exists()


def test_another_gpu_and_command_are_told_of(cli: Cli, earlier: Path) -> None:
    same = cli("bench", *WAYS, "--compare", str(earlier), "--", "echo", "rate=2").ok()
    assert "the earlier one" not in same.err
    words = ("bench", *WAYS, "--compare", str(earlier), "--", "echo", "rate=3")
    other = cli(*words, host="sim:a30").ok()
    assert "ran on another device: NVIDIA H200" in other.err
    assert "ran with another command: echo rate=2" in other.err
    assert "faster" in other.out


@pytest.mark.parametrize("change", [{"gpu": None}, {"command": 5}, {"driver": 7}, {"workload": {}}])
def test_a_damaged_header_is_told_of(cli: Cli, earlier: Path, change: dict[str, Any]) -> None:
    earlier.write_text(json.dumps({**json.loads(earlier.read_text()), **change}))
    answer = cli("bench", *WAYS, "--compare", str(earlier), "--", "echo", "rate=2").ok()
    assert "the earlier benchmark ran" in answer.err


def test_a_file_that_cannot_be_written_after_all_costs_no_figures(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OperationFailed("cannot write it: No space left on device", "keep it: -o json > FILE")

    monkeypatch.setattr("gpushare.measure.bench_data.write_bench", full)
    answer = cli("-o", "json", "bench", *WAYS, "--to", str(tmp_path / "x.json"), "--", "echo", "rate=2")
    assert answer.code == 1
    assert answer.json["errors"][0]["message"] == "cannot write it: No space left on device"
    assert {cell["throughput"]["mean"] for cell in answer.json["data"]["cells"]} == {4.0}
