"""`gpushare bench`: comparisons that make no sense are refused before anything runs; what was measured is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.model import ComputeMode
from gpushare.cli.bench import _with_files, measure_with_progress
from gpushare.connect import connect
from gpushare.show.result import Result
from tests.cli.drive import H200, Cli, Refused

WAYS = ("--copies", "2", "--ways", "timeslice,mps", "--repeat", "2", "--metric", "rate=(.+)")


@pytest.fixture
def earlier(cli: Cli, tmp_path: Path) -> Path:
    file = tmp_path / "earlier.json"
    cli("bench", *WAYS, "--to", str(file), "--", "echo", "rate=2").ok()
    return file


def test_what_cannot_be_compared_is_refused_before_anything_runs(
    refused: Refused, earlier: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    words = ("bench", "--compare", str(earlier), "--copies", "2", "--ways", "timeslice,mps")
    assert "--metric" in refused(*words, "--", "touch", str(ran), code="other_metric", exit_code=2)
    earlier.write_text(json.dumps({**json.loads(earlier.read_text()), "command": 5}))
    refused(*words, "--metric", "rate=(.+)", "--", "touch", str(ran), code="not_a_bench", exit_code=2)
    assert not ran.exists()


def test_another_gpu_and_command_are_told_of(cli: Cli, earlier: Path) -> None:
    same = cli("bench", *WAYS, "--compare", str(earlier), "--", "echo", "rate=2").ok()
    assert "the earlier one" not in same.err
    words = ("bench", *WAYS, "--compare", str(earlier), "--", "echo", "rate=3")
    other = cli(*words, host="sim:a30").ok()
    assert "ran on another device: NVIDIA H200" in other.err
    assert "ran with another command: echo rate=2" in other.err
    assert "faster" in other.out


def test_a_file_that_cannot_be_written_after_all_costs_no_figures(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OperationFailed("cannot write it: No space left on device", "keep it: -o json > FILE")

    monkeypatch.setattr("gpushare.cli.bench.write_bench", full)
    answer = cli("-o", "json", "bench", *WAYS, "--to", str(tmp_path / "x.json"), "--", "echo", "rate=2")
    assert answer.code == 1
    assert answer.json["errors"][0]["message"] == "cannot write it: No space left on device"
    assert {cell["throughput"]["mean"] for cell in answer.json["data"]["cells"]} == {4.0}


def test_a_file_that_cannot_be_written_is_not_named_as_having_the_runs(tmp_path: Path) -> None:
    def end_after_three_runs(kept: Path, picture: Path | None = None) -> list[str]:
        result = _with_files(Result(command="bench", data={}, exit_code=130), 3, kept, picture, lambda *_: b"")
        return [error.message for error in result.errors]

    written, gone = tmp_path / "x.json", tmp_path / "gone" / "x.json"
    assert end_after_three_runs(written) == [f"interrupted after 3 runs; {written} has them"]
    assert end_after_three_runs(gone) == [
        "interrupted after 3 runs; the figures are shown, and no file has them",
        f"cannot write {gone}: No such file or directory",
    ]
    written.unlink()
    # A picture that cannot be written takes nothing from the figures.
    assert end_after_three_runs(written, gone)[0] == f"interrupted after 3 runs; {written} has them"


def test_in_exclusive_process_mode_every_run_is_an_mps_client(cli: Cli, tmp_path: Path) -> None:
    """The MPS server is the one process that the mode admits, so a run outside it would be refused."""
    connect(H200).nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    pipes = tmp_path / "pipes"
    job = f'test -S "$CUDA_MPS_PIPE_DIRECTORY/control" && echo "$CUDA_MPS_PIPE_DIRECTORY" >> {pipes}; echo rate=2'
    words = ("--copies", "2", "--ways", "queue,timeslice,mps", "--repeat", "1", "--metric", "rate=(.+)")
    data = cli("-o", "json", "bench", *words, "--", "sh", "-c", job).ok().json["data"]
    assert [one["way"] for one in data["left_out"]] == ["timeslice"]
    assert {(cell["way"], cell["copies"]) for cell in data["cells"] if cell["throughput"]} >= {("queue", 2), ("mps", 2)}
    runs = sum(len(run["copies_run"]) if "copies_run" in run else run["copies"] for run in data["runs"])
    assert len(pipes.read_text().splitlines()) == runs + 1, "with the warm-up"


def test_threads_of_one_process_take_turns_and_streams_do_not(cli: Cli) -> None:
    words = ("--copies", "4", "--ways", "streams,streams:priority,threads", "--repeat", "1", "--for", "0.3s")
    data = cli("-o", "json", "bench", *words, "--copy", "both").ok().json["data"]
    gain = {cell["way"]: cell["gain"]["value"] for cell in data["cells"]}
    assert gain["threads"] < 1.5
    assert min(gain["streams"], gain["streams:priority"]) > 3
    assert data["workload"]["copy"] == "both"
    assert "with copies to and from the GPU next to each" in data["workload"]["title"]


def test_only_the_built_in_workload_has_threads_and_copies(cli: Cli, refused: Refused) -> None:
    assert "--copy" in cli("bench", "--copy", "to", "--", "true").err
    assert cli("bench", "--copy", "up").lines("hint") == ["hint: give --copy both"]
    data = cli("-o", "json", "bench", *WAYS[:2], "--ways", "timeslice,threads", *WAYS[4:], "--", "echo", "rate=2").ok()
    (left,) = data.json["data"]["left_out"]
    assert left["reason"] == "only the built-in workload runs as threads of one process"


SIZES = ("bench", "--size", "256,4096", "--copies", "1,4", "--repeat", "1", "--for", "0.2s")


def test_several_sizes_give_times_and_where_concurrency_ends(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "sizes.json"
    answer = cli(*SIZES, "--to", str(kept)).ok()
    assert "timeslice: 4 copies take turns at every size" in answer.out
    assert "mps: 4 copies run at the same time up to 256" in answer.out
    data = json.loads(kept.read_text())
    assert (data["kind"], data["sizes"]) == ("gpushare bench sizes", [256, 4096])
    assert {one["way"]: one["ends_at"] for one in data["concurrency"]} == {"timeslice": 256, "mps": 4096}
    assert [one["workload"]["size"] for one in data["benchmarks"]] == [256, 4096]
    rows = cli("-o", "csv", *SIZES).ok().out.splitlines()
    assert rows[0] == "size,way,copies,seconds,low,high,alone_seconds,gain"
    assert len(rows) == 9


def test_a_size_that_fails_costs_no_figures_of_the_sizes_before(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_from_the_second_on(host: Any, device: Any, prepared: Any) -> Any:
        if prepared.settings.workload.size > 256:
            raise OperationFailed("one copy alone failed", "run it by hand")
        return measure_with_progress(host, device, prepared)

    monkeypatch.setattr("gpushare.cli.bench.measure_with_progress", fail_from_the_second_on)
    kept = tmp_path / "sizes.json"
    answer = cli("-o", "json", *SIZES, "--to", str(kept))
    assert answer.code == 1
    assert [error["message"] for error in answer.json["errors"]] == ["one copy alone failed"]
    assert answer.data["sizes"] == json.loads(kept.read_text())["sizes"] == [256]


def test_several_sizes_have_a_plan_and_no_comparison(cli: Cli, refused: Refused, earlier: Path) -> None:
    plan = cli(*SIZES, "--dry-run").ok()
    assert plan.out.count("run 4 copies under mps") == 2
    refused(*SIZES, "--compare", str(earlier), code="bad_combination", exit_code=2)
    refused("bench", "--size", "256,10", code="bad_size", exit_code=2)
    refused("bench", "--size", "big", code="bad_size", exit_code=2)


def test_a_plot_of_several_sizes(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cli(*SIZES, "--plot", str(tmp_path / "sizes.svg")).ok()
    assert "size of the matrices" in (tmp_path / "sizes.svg").read_text()
