"""``gpushare status``."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest

from gpushare.base.units import GIB
from gpushare.host.capabilities import user_name
from gpushare.memory import ledger
from gpushare.memory.ledger import Place, Request
from gpushare.run import look
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Refused, Words, World, missing, refusals, sure, until

MIXED = "sim:2xt4,a30"


def test_plain_off_a_terminal_and_table_when_asked(cli: Cli) -> None:
    plain, asked, table = (cli("status", *more).ok().out for more in ((), ("-o", "plain"), ("-o", "table")))
    assert plain.splitlines()[1:] == asked.splitlines()[1:]
    assert "# GPUs" in plain
    assert "# GPUs" not in table
    assert "H200" in table


def test_gpus_are_shown_in_the_order_of_the_option(cli: Cli) -> None:
    rows = csv.DictReader(io.StringIO(cli("status", "-g", "2,0", host=MIXED, output="csv").ok().out))
    assert [int(row["gpu_index"]) for row in rows] == [2, 0]


def test_one_lost_gpu_hides_no_other(cli: Cli, world: World) -> None:
    World(MIXED).fault("lost", gpu="1")
    answer = cli("status", host=MIXED, output="json")
    assert answer.json["status"] == "partial"
    assert [gpu["error"] is None for gpu in answer.data["gpus"]] == [True, False, True]
    assert answer.data["gpus"][1]["memory_used_bytes"] is None
    assert ([error["gpu"] for error in answer.json["errors"]], answer.code) == (["1"], 1)
    # Named alone, the others say nothing of it.
    assert cli("status", "-g", "0,2", host=MIXED, output="json").json["status"] == "ok"
    world.fault("lost")
    answer = cli("status", output="json")
    assert (answer.code, answer.json["errors"][0]["gpu"]) == (1, "0")


@pytest.mark.parametrize(
    ("fault", "code", "exit_code"),
    [("no-driver", "driver_not_loaded", 9), ("no-nvml", "nvml_missing", 12), ("no-permission", "no_permission", 4)],
)
def test_a_host_that_does_not_answer(refused: Refused, world: World, fault: str, code: str, exit_code: int) -> None:
    world.fault(fault)
    for words in (("status",), ("timeslice", "show"), ("timeslice", "set", "short")):
        refused(*words, code=code, exit_code=exit_code)


def test_a_blind_namespace_is_said(cli: Cli, world: World) -> None:
    world.fault("blind")
    assert "PID namespace" in cli("status").ok().lines("note")[0]
    quiet = cli("status", "-q").ok()
    assert quiet.err == ""
    assert "nobody" not in quiet.out
    assert cli("status", output="json").ok().data["gpus"][0]["processes"] is None
    assert "the process list is incomplete" in cli("status").err
    assert "the processes on GPU 0 are unknown" in cli("status", output="table").out


def test_mig(cli: Cli, world: World) -> None:
    uuids = world.mig("3g.71gb", "1g.18gb:4")
    gpu = cli("status", output="json").ok().data["gpus"][0]
    assert [instance["uuid"] for instance in gpu["mig_instances"]] == uuids
    (one,) = cli("status", "-g", uuids[1], output="json").ok().data["gpus"]
    assert [instance["uuid"] for instance in one["mig_instances"]] == [uuids[1]]
    assert uuids[0] in cli("status").ok().out


def test_daemons_and_clients(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "25").ok()
    pid = world.client()
    (daemon,) = cli("status", output="json").ok().data["mps_daemons"]
    assert (daemon["servers"][0]["clients"][0]["pid"], daemon["threads_percent"]) == (pid, 25.0)
    assert cli("status", "-g", "0", output="json").ok().data["mps_daemons"] == [daemon]


@refusals("bad_duration 2: -w 0 | -w 50ms | -w 1x | -w x", "unknown_gpu 6: -w 1s -g 7 | -g 3", "bad_gpu 2: -g ''")
def test_wrong_words(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    refused("status", *words, code=code, exit_code=exit_code)


@pytest.mark.parametrize("words", [("-w",), ("--watch",), ("-qw",), ("-w", "-q"), ("-w", "--host", "sim:h200")])
def test_watch_without_a_time_is_two_seconds(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    seen: list[float] = []
    monkeypatch.setattr("gpushare.cli.status.keep_watching", lambda _look, *, seconds, **_: seen.append(seconds))
    cli("status", *words).ok()
    cli("status", *words[:1], "0.5s", *words[1:]).ok()
    assert seen == [2.0, 0.5]


def test_watch_writes_json_lines_and_ends_clean(real: Real, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w") as file:
        started = real("status", "-w", "0.1s", "-o", "json", stdout=file)
        until(lambda: path.read_text().count("\n") >= 3, "three looks")
        answer = started.end()
    assert (answer.code, answer.err) == (0, "")
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(documents) >= 3
    assert all(document["command"] == "status" for document in documents)
    # It ends when its reader is gone.
    started = real("status", "-w", "0.1s", "-o", "json")
    started.line()
    sure(started.process.stdout).close()
    assert started.process.wait(timeout=120) == 128 + 13


def test_watch_sees_a_fault_come_and_go(real: Real, world: World, tmp_path: Path) -> None:
    path = tmp_path / "out"
    world.fault("busy")

    def last() -> str:
        lines = path.read_text().splitlines()
        return json.loads(lines[-1])["status"] if lines else ""

    with path.open("w") as file:
        started = real("status", "-w", "0.1s", "-o", "json", stdout=file)
        until(lambda: last() == "ok", "a good look")
        world.fault("lost")
        until(lambda: last() == "partial", "the lost GPU")
        admin.clear_faults(world.spec)
        until(lambda: last() == "ok", "the GPU again")
        assert started.end().code == 0


def test_what_jobs_have_reserved_and_who_waits(cli: Cli) -> None:
    world = World("sim:2xt4")
    first, second = world.uuid(0), world.uuid(1)
    world.hold(6 * GIB, name="train")
    places = [
        Place(world.host, Request(memory_bytes=size * GIB, keys=keys, client=False, name=name))
        for size, keys, name in ((12, (first,), None), (14, (second, first), "big"))
    ]
    try:
        answer = cli("status", host="sim:2xt4", output="json").ok()
        assert [gpu["jobs_reserved_bytes"] for gpu in answer.data["gpus"]] == [6 * GIB, 0]
        waiting = answer.data["waiting_jobs"]
        assert [
            (one["name"], one["line"]["place"], one["line"]["memory_bytes"], one["gpu_indexes"]) for one in waiting
        ] == [
            (None, 1, 12 * GIB, [0]),
            ("big", 2, 14 * GIB, [0, 1]),
        ]
        assert waiting[0]["since_seconds"] < 60
        assert missing(cli("status", host="sim:2xt4").ok().out, "reserved", "waiting for room", "6.0 GiB") == []
        # Of one GPU, only its own.
        only = cli("status", "-g", "1", host="sim:2xt4", output="json").ok().data
        assert [job["name"] for job in only["waiting_jobs"]] == ["big"]
    finally:
        for place in places:
            place.leave()
    assert "waiting" not in cli("status", host="sim:2xt4").ok().out
    assert look.LEDGER == ledger.PREFIX


def test_many_waiting_jobs_are_counted(cli: Cli) -> None:
    world = World("sim:t4")
    places = [Place(world.host, Request(memory_bytes=GIB, keys=(world.uuid(0),), client=False)) for _ in range(12)]
    answer = cli("status", host="sim:t4").ok()
    assert "2 more waiting jobs not shown" in answer.err + answer.out
    for place in places:
        place.leave()


def test_a_job_that_is_out_is_shown(cli: Cli) -> None:
    pid = admin.add_process("sim:t4", memory_bytes=4 * GIB, name="train")
    cli("swap", "out", str(pid), host="sim:t4").ok()
    (one,) = cli("status", host="sim:t4", output="json").ok().data["swapped_jobs"]
    assert (one["pid"], one["state"], one["swapped_bytes"], one["gpu_indexes"]) == (pid, "out", 4 * GIB, [0])
    assert one["user"] == user_name(os.geteuid())
    assert "swapped out to host memory" in cli("status", host="sim:t4").ok().out
    cli("swap", "in", str(pid), host="sim:t4").ok()
    assert cli("status", host="sim:t4", output="json").ok().data["swapped_jobs"] == []


def test_vgpu_sessions_of_a_hypervisor(cli: Cli) -> None:
    assert "vGPU" not in cli("status", host="sim:h200").ok().out
    words = ("sim", "vgpu", "NVIDIA H200-35C", "--memory", "35G", "--vm", "win-1")
    uuid = cli(*words, host="sim:h200").ok().out.strip()
    assert missing(cli("status", host="sim:h200").ok().out, "vGPU sessions", "win-1", "17.5 / 35.0 GiB") == []
    (session,) = cli("status", host="sim:h200", output="json").ok().json["data"]["vgpu_sessions"]
    assert (session["uuid"], session["type"], session["vm"]) == (uuid, "NVIDIA H200-35C", "win-1")
