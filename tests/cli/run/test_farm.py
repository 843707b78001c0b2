"""`gpushare farm --copies` on the command line."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest

from gpushare.base.selection import select_one
from gpushare.run.results import BenchedCap, keep_benched
from gpushare.show.result import jsonable
from tests.cli.drive import Cli, Patch, Refused, World, missing, refusals
from tests.measure.test_bench_caps import cell, document


def test_output_is_prefixed_and_a_failed_copy_is_named(cli: Cli, world: World, tmp_path: Path) -> None:
    words = ("--copies", "3", "--memory", "4G", "--logs", str(tmp_path / "logs"))
    answer = cli("farm", *words, "--", "sh", "-c", "echo is {}; exit {}").ends(1)
    assert {"[0] is 0", "[1] is 1", "[2] is 2"} <= set(answer.out.splitlines())
    assert answer.lines("error") == ["error: copy 1: exit code 1: is 1", "error: copy 2: exit code 2: is 2"]
    assert "3 copies on GPU 0, 4.0 GiB each\n" in answer.err
    assert (tmp_path / "logs" / "copy-2.log").read_text() == "is 2\n"
    assert not world.state.daemons


def test_failures_and_their_hints(cli: Cli, tmp_path: Path) -> None:
    words = ("farm", "--copies", "2", "--memory", "4G")
    assert cli(*words, "--", "false").lines("hint") == ["hint: keep the output: --logs DIR"]
    (hint,) = cli(*words, "--logs", str(tmp_path), "--", "false").lines("hint")
    assert hint.startswith("hint: see the output: ")
    answer = cli("farm", "--copies", "3", "--restart", "1", "--", "sh", "-c", "echo boom >&2; exit 3").ends(1)
    assert (answer.lines("error"), len(answer.lines("hint"))) == (["error: copies 0-2: exit code 3: boom"], 1)
    assert answer.err.count("exit code 3: boom") == 2
    assert "boom" not in answer.out[answer.out.index("# copies") :]
    document = cli("-o", "json", "farm", "--copies", "2", "--", "sh", "-c", "exit 3").json
    assert [copy["failure"] for copy in document["data"]["copies"]] == ["exit code 3"] * 2


def test_json_has_every_copy_and_each_line(cli: Cli, tmp_path: Path) -> None:
    answer = cli("-o", "json", "farm", "--copies", "2", "--threads", "30", "--memory", "2G", "--", "echo", "{}")
    data = answer.ok().data
    assert (data["memory_bytes"], data["memory_limit_bytes"]) == (2 * 1024**3, 3 * 1024**3 // 2)
    assert [copy["threads_percent"] for copy in data["copies"]] == [30.0, 30.0]
    assert [(copy["copy"], copy["state"], copy["exit_code"], copy["tries"]) for copy in data["copies"]] == [
        (0, "done", 0, 1),
        (1, "done", 0, 1),
    ]
    assert "[1] 1" in answer.err
    file = tmp_path / "lines"
    file.write_text("a b\n\n$HOME\n")
    answer = cli("-o", "json", "farm", "--each", str(file), "--", "printf", "%s:%s\n", "{}", "x{}").ok()
    assert [copy["line"] for copy in answer.data["copies"]] == ["a b", "$HOME"]
    assert missing(answer.err, "[0] a b:xa b\n", "[1] $HOME:x$HOME\n") == []


def test_the_cap_that_bench_found_is_taken(cli: Cli, tmp_path: Path) -> None:
    cells = (cell("timeslice", None, 3.0), cell("mps:100/n", 25.0, 2.0), cell("mps", None, 1.0))
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(jsonable(document(*cells, way="timeslice"))))
    words = ("--memory", "4G", "--like", str(file), "-n", "--", "true")
    answer = cli("farm", "--copies", "4", *words).ok()
    assert answer.out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25.0") == 4
    assert "a way other than MPS was faster for 4 copies" in answer.err
    near = cli("farm", "--copies", "5", *words).ok()
    assert near.out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25.0") == 5
    assert "the cap is that of 4 copies: 5 copies were not measured" in near.err
    file.write_text(json.dumps(jsonable(document(cells[0], way="timeslice"))))
    assert cli("-o", "json", "farm", "--copies", "4", *words).json["errors"][0]["code"] == "not_measured"


@pytest.mark.parametrize("driver", ["580.159.04", "535.1"])
def test_a_farm_takes_the_cap_that_bench_kept_for_its_command(cli: Cli, world: World, driver: str) -> None:
    device = select_one(None, world.host.nvml.sweep())
    cap = BenchedCap(copies=4, threads_percent=40.0, best=True, date="2026-11-20", driver=driver)
    keep_benched(world.host, device, ("true", "{}"), [cap])
    answer = cli("farm", "--copies", "4", "--memory", "4G", "-n", "--", "true", "{}").ok()
    assert answer.out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40.0") == 4
    assert f"gpushare bench found the cap on 2026-11-20 under driver {driver}" in answer.err
    # Another number of copies, or another command, was not measured.
    for copies, *command in (("3", "true", "{}"), ("4", "true", "other")):
        answer = cli("farm", "--copies", copies, "--memory", "4G", "-n", "--", *command).ok()
        assert "=40.0" not in answer.out
        assert "bench" not in answer.err


def test_a_plan_shows_every_copy_and_starts_none(cli: Cli, world: World) -> None:
    answer = cli("farm", "--copies", "2", "-n", "--", "true", "{}").ok()
    assert missing(answer.out, "GPUSHARE_COPY=1 GPUSHARE_COPIES=2 true 1", "nvidia-cuda-mps-control -d") == []
    assert not world.state.daemons


@refusals(
    "usage 2: --copies 0 -- true | --copies 10001 -- true | --copies 2 --parallel 0 -- true",
    "usage 2: --copies 2 --restart -1 -- true | --copies 2 --wait -- true",
    "bad_copies 2: -- true | --copies 2 --each - -- true",
    "bad_combination 2: --copies 2 --over warn -- true | --copies 2 --resume -- true",
    "bad_size 2: --copies 2 --memory 0% -- true",
    "bad_gpu 2: --copies 2 -g 1-0 -- true",
    "command_not_found 127: --copies 2 -- no-such-program",
    "never_fits 2: --copies 200 --memory 200G -- true",
    "no_file 6: --copies 2 --like no-such.json -- true | --each no-such.txt -- true",
    "bad_lines 2: --each /dev/null -- true",
)
def test_bad_farms_are_refused(refused: Refused, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("farm", *words, code=code, exit_code=exit_code)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a\n\xff\n", "line 2 of '"),
        (b"x\n" * (1 << 24), "has more than"),
        (b"x" * (1 << 26), "is longer than"),
    ],
)
def test_bad_lines_are_refused(refused: Refused, tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "lines"
    file.write_bytes(text)
    assert message in refused("farm", "--each", str(file), "--", "true", code="bad_lines", exit_code=2)


def test_several_gpus_are_named(refused: Refused) -> None:
    text = refused("farm", "--copies", "2", "--", "true", host="sim:2xh200", code="gpu_not_named", exit_code=2)
    assert "-g any" in text


def test_copies_share_the_gpus(cli: Cli) -> None:
    words = ("--copies", "7", "--memory", "40G", "--", "sh", "-c", "sleep 0.5")
    for gpus in ("0-1", "0,1", "any"):
        data = cli("-o", "json", "farm", "-g", gpus, *words, host="sim:2xh200").ok().data
        # Three of 40 GiB fit on each.
        assert {tuple(copy["gpu_indexes"]) for copy in data["copies"]} == {(0,), (1,)}
        assert {copy["threads_percent"] for copy in data["copies"]} == {66.7}
    words = ("--copies", "4", "--parallel", "2", "--memory", "4G", "-n", "--", "true")
    plan = cli("farm", "-g", "any", *words, host="sim:2xh200").ok().out
    # One on each: no cap.
    assert "ACTIVE_THREAD_PERCENTAGE" not in plan
    assert plan.count("nvidia-cuda-mps-control -d") == 2
    # A server of CUDA 13 takes 48 clients: 200 copies have the shares of 48.
    planned = cli("farm", "--copies", "200", "--memory", "1G", "-n", "--", "true").ok().out
    fewer = cli("farm", "--copies", "48", "--memory", "1G", "-n", "--", "true").ok().out
    for name in ("ACTIVE_THREAD_PERCENTAGE", "PINNED_DEVICE_MEM_LIMIT"):
        many, few = (set(re.findall(rf"CUDA_MPS_{name}=(\S+)", text)) for text in (planned, fewer))
        assert (many, len(many)) == (few, 1)


def test_fail_fast_ends_the_others_and_skips_the_rest(cli: Cli) -> None:
    words = ("--copies", "4", "--parallel", "2", "--memory", "4G", "--fail-fast", "--grace", "1s")
    answer = cli("-o", "json", "farm", *words, "--", "sh", "-c", "[ {} = 0 ] && exit 3; exec sleep 60").ends(1)
    assert [copy["state"] for copy in answer.json["data"]["copies"]] == ["failed", "ended", "skipped", "skipped"]
    assert "note: not started: copy 2-3" in answer.err


def test_a_refused_farm_is_no_job_and_leaves_the_earlier_one(cli: Cli, refused: Refused, tmp_path: Path) -> None:
    words = ("farm", "--copies", "2", "--logs", str(tmp_path / "logs"), "--memory", "1G", "--name")
    cli(*words, "web", "--", "true").ok()
    before = [(job["name"], job["exit_code"]) for job in cli("jobs", output="json").ok().data["jobs"]]
    assert before == [("web", 0)]
    for more in (("web",), ("web", "--resume"), ("second",), ("second", "--resume"), ("web", "--gpus", "2")):
        refused(*words, *more, "--", "echo", code="logs_used", exit_code=2)
    assert [(job["name"], job["exit_code"]) for job in cli("jobs", output="json").ok().data["jobs"]] == before


BAR = "import sys, time\nfor n in range(30):\n    sys.stdout.write(f'\\r{n}%')\n    sys.stdout.flush()\n    time.sleep(0.01)"


def test_a_copy_whose_log_cannot_be_written_leaves_the_others_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "copy-1.log").mkdir()
    answer = cli("farm", "--copies", "2", "--logs", str(tmp_path), "--", "echo", "{}").ends(1)
    assert "[0] 0" in answer.out
    assert list(answer.lines("error")) == [f"error: copy 1: cannot write {tmp_path}/copy-1.log: Is a directory"]


def test_a_progress_bar_is_no_silence(cli: Cli, monkeypatch: Patch) -> None:
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
    said = refused("farm", "--copies", "2", "--stall", text, "--", "true", code="bad_duration", exit_code=2)
    assert "--stall 60s" in said


def test_lower_is_short_for_lower_is_better(cli: Cli) -> None:
    words = ("--copies", "1,2", "--ways", "timeslice,mps", "--repeat", "1", "--metric", "time=(.+)")
    data = cli("-o", "json", "bench", *words, "--lower", "--", "echo", "time=2").ok().data
    assert data["metric"]["higher_is_better"] is False
    assert {cell["throughput"]["mean"] for cell in data["cells"] if cell["copies"] == 2} == {1.0}


def test_a_farm_goes_on_when_its_results_cannot_be_written(cli: Cli, monkeypatch: Patch, tmp_path: Path) -> None:
    """--resume would run what is done again: the farm says so, and fails."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gpushare.run.farm.line_of_end", full)
    answer = cli("-o", "json", "farm", "--copies", "2", "--logs", str(tmp_path), "--", "true").ends(1)
    assert [copy["state"] for copy in answer.json["data"]["copies"]] == ["done", "done"]
    (error,) = answer.json["errors"]
    assert error["code"] == "not_written"
    assert error["message"].endswith("farm.jsonl: No space left on device")
    # Said at once, for the first one only: the copies may run for days.
    assert answer.err.count("No space left on device; the farm goes on") == 1


def test_a_copy_that_a_signal_ended_has_the_exit_code_of_run(cli: Cli) -> None:
    done = cli("-o", "json", "farm", "--copies", "1", "--", "sh", "-c", "kill -9 $$")
    assert [copy["exit_code"] for copy in done.json["data"]["copies"]] == [137]
