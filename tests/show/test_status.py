"""``status``: every screen as people see it, and what becomes of broken and unknown GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from gpushare.base.errors import ExitCode, GpuLost, OperationFailed
from gpushare.base.model import Gpu, MpsDaemon, Snapshot
from gpushare.show.render import exit_code_of
from gpushare.show.result import OutputFormat, jsonable
from gpushare.show.status import age, container_name, status_result, used_of_total
from tests.show.hosts import GIB, MIB, h100, mixed_host, process, quiet_host, uuid


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_screen(shown, golden, width):
    """What a terminal of this width shows, without its colours."""
    golden(f"status-{width}", "".join(shown(status_result(mixed_host()), OutputFormat.TABLE, width=width)))


def test_a_wide_way_pushes_no_command_out(shown):
    """Who runs what is the question that `status` answers at 80 columns."""
    job = process(4711, "alexandra", 8000, "python train.py --epochs 40", job="llama-finetune-3", role="opportunistic")
    job = replace(job, way="mig+mps", threads_percent=12.5)
    out, _ = shown(
        status_result(Snapshot(host="node", gpus=(h100(0, processes=(job,)),))), OutputFormat.TABLE, width=80
    )
    (line,) = (line for line in out.splitlines() if "4711" in line)
    assert "llama-finetune-3" in line
    assert "MIG" in line
    assert "alexandra" in line
    assert "python" in line
    assert len(line) <= 80


def test_the_user_of_a_process_is_always_shown(shown):
    """Other columns are dropped and commands cut before it, in each table that says who is on the GPU."""
    job = process(
        4194306, "alexandra", 102400, "python train.py --epochs 40", job="llama-finetune-for-all", role="opportunistic"
    )
    job = replace(job, way="mps", slice_us=200, paused_since=1.0, gpu_instance_id=1, container="4f1c0ffee123")
    host = replace(mixed_host(), gpus=(h100(0, processes=(job,)), *mixed_host().gpus[1:]))
    lines = shown(status_result(host), OutputFormat.TABLE, width=80)[0].splitlines()
    titles = [line.split() for line in lines if line.split()[:2] == ["GPU", "pid"]]
    assert len(titles) == 3
    assert all("user" in words for words in titles)
    (line,) = (line for line in lines if "4194306" in line)
    assert "alexandra" in line
    assert max(map(len, lines)) <= 80


def test_what_decides_is_whole_at_80_columns(shown):
    """The time-slice of a client of MPS."""
    job = process(4711, "alexandra", 8000, "python train.py --epochs 40", job="llama-finetune-3", role="opportunistic")
    job = replace(job, way="mps", slice_us=200)
    host = Snapshot(host="node", gpus=(h100(0, processes=(job,)),))
    lines = shown(status_result(host), OutputFormat.TABLE, width=80)[0].splitlines()
    (of_process,) = (line for line in lines if " 4711 " in line)
    assert "  MPS, slice 200us  " in of_process
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("output", ["plain", "csv", "json", "yaml"])
def test_the_document(shown, golden, output):
    result = replace(status_result(mixed_host()), command="status")
    golden(f"status-{output}", shown(result, OutputFormat(output))[0])


def test_the_colours(shown, golden):
    """Escape sequences spelled out: dim for what is secondary, red for what is broken."""
    out, _ = shown(status_result(mixed_host()), OutputFormat.AUTO, terminal=True, width=80)
    golden("status-colours", out.replace("\x1b", "ESC"))


@pytest.mark.parametrize("output", ["table", "plain"])
def test_a_quiet_host(shown, golden, output):
    golden(f"status-quiet-{output}", shown(status_result(quiet_host()), OutputFormat(output), width=80)[0])


def test_a_lost_gpu_is_null_throughout_and_hides_nobody():
    result = status_result(mixed_host())
    lost = jsonable(result.data.gpus[5])
    assert {key for key, value in lost.items() if value is not None} == {"index", "pci_bus_id", "error"}
    assert [(type(error), error.gpu, error.code) for error in result.errors] == [(GpuLost, "5", "gpu_lost")]
    assert len(result.data.gpus) == 8
    assert (result.status, exit_code_of(result)) == ("partial", ExitCode.FAILED)


def test_a_gpu_that_does_not_answer_is_an_error():
    broken = Snapshot(host="x", gpus=(Gpu(index=2, uuid=uuid(2), error="Unknown Error"), h100(3)))
    errors = status_result(broken).errors
    assert [(type(error), error.message) for error in errors] == [
        (OperationFailed, "GPU 2 does not answer: Unknown Error")
    ]


@pytest.mark.parametrize("gpus", [(), (Gpu(index=0, error="GPU is lost"),)])
def test_no_gpu_that_works_is_a_failure_with_a_reason(gpus):
    result = status_result(Snapshot(host="x", gpus=gpus))
    assert exit_code_of(result) == ExitCode.FAILED
    assert len(result.errors) == 1
    assert result.errors[0].hint
    (processes,) = (table for table in result.tables if table.name == "processes")
    assert "unknown" in (processes.empty or "")


def test_unknown_is_a_dash_and_null_and_said_in_a_note(shown):
    snapshot = Snapshot(host="x", gpus=(h100(0, processes=None, time_slice=None, memory_used_bytes=None),))
    result = status_result(snapshot)
    out, err = shown(result, OutputFormat.TABLE, width=100)
    assert "- / 79.6 GiB" in out
    assert "the processes on GPU 0 are unknown" in out
    assert "note: GPU 0: its processes are unknown" in err
    assert result.data.gpus[0].processes is None
    assert result.data.gpus[0].time_slice is None


def test_idle_is_0_and_unknown_is_not(shown):
    processes = (process(1, "a", 10, "idle", sm_percent=0), process(2, "b", None, "unknown", sm_percent=None))
    out, _ = shown(status_result(Snapshot(host="x", gpus=(h100(0, processes=processes),))), OutputFormat.PLAIN)
    idle, unknown = (next(line for line in out.splitlines() if line.endswith(word)) for word in ("idle", "unknown"))
    assert "0 %" in idle
    assert re.search(r"b +- +- ", unknown)


def test_mig_mode_without_instances_is_said_with_the_next_command():
    gpu = h100(1, mig_enabled=True, mig_pending=True)
    (note,) = status_result(Snapshot(host="x", gpus=(gpu,))).notes
    assert "gpushare mig status -g 1" in note


def test_nested_data_carries_types_and_clients(shown):
    data = json.loads(shown(status_result(mixed_host()), OutputFormat.JSON)[0])["data"]
    assert [item["type"] for item in data["gpus"][3]["processes"]] == ["C", "M+C", "M+C"]
    clients = data["mps_daemons"][0]["servers"][0]["clients"]
    assert [client["priority"] for client in clients] == ["normal", "low"]
    assert data["gpus"][2]["sharing"] == "mig"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-3, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (3600, "1h"), (2 * 86400, "2d")],
)
def test_age_is_in_its_largest_unit(seconds, text):
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [
        (None, None, "-"),
        (0, 80 * GIB, "0.0 / 80.0 GiB"),
        (1, 80 * GIB, "<0.1 / 80.0 GiB"),
        (None, 80 * GIB, "- / 80.0 GiB"),
        (3 * GIB, None, "3.0 GiB / -"),
        (5 * MIB, 512 * MIB, "5.0 / 512.0 MiB"),
    ],
)
def test_memory_never_reads_as_nothing_when_it_is_something(used, total, text):
    assert used_of_total((used, total)) == text


def test_a_full_container_id_is_shown_as_docker_does():
    assert container_name("ab" * 32) == "ab" * 6
    assert container_name("a-long-name-of-a-container-that-somebody-chose") == (
        "a-long-name-of-a-container-that-somebody-chose"
    )


def test_a_flood_of_daemons_of_others_is_counted() -> None:
    ours = MpsDaemon(pid=7, ours=True, pipe_directory="/run/gpushare/mps/gpu-0/pipe", threads_percent=100.0)
    root = MpsDaemon(pid=9000, ours=False, pipe_directory="/tmp/nvidia-mps", user="root", threads_percent=100.0)
    claims = [
        MpsDaemon(pid=pid, ours=False, pipe_directory=f"/tmp/{pid}", user="mallory", note="not asked")
        for pid in range(1000, 1300)
    ]
    result = status_result(Snapshot(host="x", gpus=(h100(0),), daemons=(ours, *claims, root)))
    (table,) = [one for one in result.tables if one.name == "mps_daemons"]
    assert [row.pid for row in table.rows][:2] == [7, 9000]
    assert len(table.rows) < 15
    assert len(result.notes) < 15
    assert any("291 more" in note for note in result.notes)
    # Programs get all of them.
    assert len(result.data.mps_daemons) == 302
