"""``gpushare observe``: records to a file, shows what it saw, ends well however it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.units import GIB
from gpushare.measure.recording import read_recording
from gpushare.sim import admin
from tests.cli.drive import Cli, Refused, World, environment, missing, refusals, until

pytestmark = pytest.mark.usefixtures("even_samples")
QUICK = ("observe", "--for", "0.2s", "--interval", "100ms")


def test_a_recording_is_made_and_shown(cli: Cli, world: World, tmp_path: Path) -> None:
    pid = admin.add_process(world.spec, memory_bytes=2 * GIB, sm_percent=20)
    path = tmp_path / "r.jsonl"
    data = cli(*QUICK, "--to", str(path), output="json").ok().data
    assert (data["file"], data["samples"], data["reason"]) == (str(path), 2, "finished")
    assert data["header"]["interval_seconds"] == 0.1
    (gpu,), (process,) = data["gpus"], data["processes"]
    assert (gpu["source"], gpu["activity"]["mean"], gpu["memory_peak_bytes"]) == ("gpm", 20.0, 2 * GIB)
    assert (process["process"]["pid"], process["pattern"], process["memory_peak_bytes"]) == (pid, "steady", 2 * GIB)
    assert [(device["gpu"], device["kind"], device["pids"]) for device in data["underused"]] == [(0, "low", [pid])]
    assert read_recording(path).samples == 2
    # It is shown again.
    assert cli("observe", "--from", str(path), output="json").ok().data == data


def test_the_tables_name_what_is_underused(cli: Cli, world: World, tmp_path: Path) -> None:
    admin.add_process(world.spec, memory_bytes=2 * GIB, sm_percent=0)
    answer = cli(*QUICK, "--to", str(tmp_path / "r.jsonl")).ok()
    assert "memory is held with no work: 1 process, 2.0 GiB" in answer.out
    assert missing(answer.err, "recording for", f"gpushare savings --from {tmp_path / 'r.jsonl'}") == []


def test_a_narrow_terminal_shows_all_findings_and_jobs(
    cli: Cli, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.add_process(world.spec, memory_bytes=2 * GIB, sm_percent=20)
    path = tmp_path / "r.jsonl"
    cli(*QUICK, "--to", str(path)).ok()
    path.write_text(path.read_text().replace('"job":null', '"job":"train"') + "no line\n")
    monkeypatch.setenv("COLUMNS", "80")
    answer = cli("observe", "--from", str(path), output="table").ok()
    assert "…" not in answer.out
    shown = " ".join(answer.out.split())
    assert "SM activity mean 20 %, 95th percentile 20 %; a candidate for sharing" in shown
    assert "PID job name" in shown
    assert " train " in shown
    assert "1 unreadable line skipped" in answer.err
    # Programs read the columns.
    assert "GPU  finding  why" in cli("observe", "--from", str(path)).ok().out


@pytest.mark.parametrize("width", [80, 200])
def test_the_tables_fit(cli: Cli, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    admin.add_process(world.spec)
    assert max(map(len, cli(*QUICK, "--to", "r.jsonl", output="table").ok().out.splitlines())) <= width


def test_the_file_has_a_name_of_its_own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = cli(*QUICK, output="json").ok().data["file"]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert name.startswith("gpushare-20")
    assert name.endswith(".jsonl")


def test_no_command_line_is_kept(cli: Cli, world: World, tmp_path: Path) -> None:
    pid = admin.add_process(world.spec, command_line=["python3", "--token", "hunter2"])
    cli(*QUICK, "--to", str(tmp_path / "r.jsonl")).ok()
    text = (tmp_path / "r.jsonl").read_text()
    assert str(pid) in text
    assert "hunter2" not in text


def test_a_mig_instance_stands_for_its_gpu(cli: Cli, world: World, tmp_path: Path) -> None:
    (uuid,) = world.mig("3g.71gb")
    assert "all of GPU 0 is recorded" in cli(*QUICK, "-g", uuid, "--to", str(tmp_path / "r.jsonl")).ok().err


@refusals(
    "bad_duration 2: --for soon | --for 0 | --for 2s --interval 5s | --interval 10ms | --interval x",
    "unknown_gpu 6: -g 7",
    "bad_gpu 2: -g ,",
    "bad_combination 2: --from x.jsonl --to y.jsonl",
    "no_recording 6: --from x.jsonl",
    "not_written 1: --to none/r.jsonl",
)
def test_what_is_wrong_is_refused(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, exit_code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused("observe", *words, code=code, exit_code=exit_code)
    # The hint fits any command.
    assert code != "bad_duration" or "status" not in said
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("mine")
    assert "already exists" in refused(*QUICK, "--to", str(path), code="file_exists", exit_code=2)
    assert path.read_text() == "mine"
    refused("observe", "--from", str(path), code="not_a_recording", exit_code=1)


@pytest.mark.parametrize(
    ("fault", "code", "exit_code"), [("lost", "no_gpu_answers", 1), ("no-driver", "driver_not_loaded", 9)]
)
def test_an_unusable_host(
    refused: Refused, world: World, tmp_path: Path, fault: str, code: str, exit_code: int
) -> None:
    world.fault(fault)
    refused(*QUICK, "--to", str(tmp_path / "r.jsonl"), code=code, exit_code=exit_code)
    assert list(tmp_path.iterdir()) == []


def samples_in(path: Path) -> int:
    return path.read_text().count('{"t":') if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(
    real: Callable[..., Any], world: World, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "r.jsonl"
    started = real("observe", "--for", "1h", "--interval", "100ms", "--to", str(path), "-o", "json")
    until(lambda: samples_in(path) >= 2, "two samples")
    answer = started.end(number).ok()
    assert answer.data["reason"] == "interrupted"
    assert "samples were kept" in answer.err
    assert read_recording(path).samples == answer.data["samples"]


def test_sigkill_leaves_a_readable_recording(real: Callable[..., Any], world: World, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "r.jsonl"
    started = real("observe", "--for", "1h", "--interval", "100ms", "--to", str(path))
    until(lambda: samples_in(path) >= 2, "two samples")
    started.end(signal.SIGKILL)
    assert "has no end" in cli("observe", "--from", str(path)).ok().err


def test_the_bar_is_on_stderr_and_only_on_a_terminal(tmp_path: Path, world: World) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpushare", "--host", world.spec, *QUICK, "--to", str(tmp_path / "r"), "-o", "json"],
        env=environment(TERM="xterm-256color", COLUMNS="100"),
        stdout=subprocess.PIPE,
        stderr=terminal,
        stdin=subprocess.DEVNULL,
    )
    os.close(terminal)
    out, _ = process.communicate(timeout=120)
    said = b""
    try:
        while chunk := os.read(controller, 65536):
            said += chunk
    except OSError:
        # The other end is closed.
        pass
    finally:
        os.close(controller)
    assert process.returncode == 0
    data = json.loads(out)["data"]
    # A slow machine may miss the first, never the last.
    assert (data["samples"] + data["missed"], data["samples"] >= 1) == (2, True)
    assert b"recording; Ctrl-C" in said
    assert "━".encode() in said


def test_what_dcgm_exporter_measured_is_shown(cli: Cli, refused: Refused, tmp_path: Path) -> None:
    labels = {"instance": "n1:9400", "gpu": "0", "UUID": "GPU-1", "modelName": "NVIDIA H200"}
    values = {"DCGM_FI_PROF_SM_ACTIVE": "0.2", "DCGM_FI_DEV_FB_USED": "8000", "DCGM_FI_DEV_FB_FREE": "132000"}
    result = [
        {"metric": {**labels, "__name__": name}, "values": [[1_795_000_000 + 60 * n, value] for n in range(60)]}
        for name, value in values.items()
    ]
    file = tmp_path / "range.json"
    file.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    done = cli("observe", "--from", str(file), host=None).ok()
    assert missing(done.out, "low: SM activity mean 20 %", "processes were not recorded") == []
    assert "gpushare advise --from" not in done.err
    assert cli("observe", "--from", str(file), host=None, output="json").ok().data["processes_known"] is False
    assert "20" in cli("savings", "--from", str(file), "--price", "4", host=None).ok().out
    refused("advise", "--from", str(file), code="no_processes_recorded", exit_code=3)
