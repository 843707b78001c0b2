"""`gpushare farm --copies`: copies that cannot be started, silent ones, shares of those that run at the same time."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from tests.cli.drive import Cli, Refused

BAR = "import sys, time\nfor n in range(30):\n    sys.stdout.write(f'\\r{n}%')\n    sys.stdout.flush()\n    time.sleep(0.01)"


def test_a_copy_whose_log_cannot_be_written_leaves_the_others_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "copy-1.log").mkdir()
    answer = cli("farm", "--copies", "2", "--logs", str(tmp_path), "--", "echo", "{}")
    assert answer.code == 1
    assert "[0] 0" in answer.out
    assert list(answer.lines("error")) == [f"error: copy 1: cannot write {tmp_path}/copy-1.log: Is a directory"]


def test_a_progress_bar_is_no_silence(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    from gpushare.run.farm import Farm

    stalled = Farm._stalled

    def noted(self: Farm, program: object) -> bool:
        heard.append(program.heard)  # type: ignore[attr-defined]
        return stalled(self, program)  # type: ignore[arg-type]

    monkeypatch.setattr(Farm, "_stalled", noted)
    cli("farm", "--copies", "1", "--stall", "300s", "--", sys.executable, "-c", BAR).ok()
    # Nothing but the bar was printed, and each state of it counted.
    assert len(set(heard)) > 1


@pytest.mark.parametrize("text", ["0", "0s", "0ms"])
def test_a_stall_of_no_time_is_refused(refused: Refused, text: str) -> None:
    assert "--stall 60s" in refused(
        "farm", "--copies", "2", "--stall", text, "--", "true", code="bad_duration", exit_code=2
    )


def test_shares_are_of_those_that_run_at_the_same_time(cli: Cli) -> None:
    """A server of CUDA 13 takes 48 clients: 200 copies have the shares of 48."""
    planned = cli("farm", "--copies", "200", "--memory", "1G", "-n", "--", "true").ok().out
    fewer = cli("farm", "--copies", "48", "--memory", "1G", "-n", "--", "true").ok().out
    for name in ("ACTIVE_THREAD_PERCENTAGE", "PINNED_DEVICE_MEM_LIMIT"):
        many, few = (set(re.findall(rf"CUDA_MPS_{name}=(\S+)", text)) for text in (planned, fewer))
        assert many == few
        assert len(many) == 1


def test_lower_is_short_for_lower_is_better(cli: Cli) -> None:
    words = ("--copies", "1,2", "--ways", "timeslice,mps", "--repeat", "1", "--metric", "time=(.+)")
    data = cli("-o", "json", "bench", *words, "--lower", "--", "echo", "time=2").ok().data
    assert data["metric"]["higher_is_better"] is False
    assert {cell["throughput"]["mean"] for cell in data["cells"] if cell["copies"] == 2} == {1.0}


def test_a_farm_goes_on_when_its_results_cannot_be_written(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--resume would run what is done again: the farm says so, and fails."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gpushare.run.farm.line_of_end", full)
    answer = cli("-o", "json", "farm", "--copies", "2", "--logs", str(tmp_path), "--", "true")
    assert answer.code == 1
    assert [copy["state"] for copy in answer.json["data"]["copies"]] == ["done", "done"]
    (error,) = answer.json["errors"]
    assert error["code"] == "not_written"
    assert error["message"].endswith("farm.jsonl: No space left on device")
    # Said at once, for the first one only: the copies may run for days.
    assert answer.err.count("No space left on device; the farm goes on") == 1
