"""``gpushare jobs``: what runs, waits, is paused or out, and has ended."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpushare.base.units import GIB, MIB
from gpushare.host.capabilities import user_name
from gpushare.run.jobs import PAST, JobRecord, find_record, keep_past
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Refused, Started, World, until, until_it_runs

KEYS = (
    "name pid state user role device gpu_indexes device_uuids way mig_profile mig_name threads_percent slice_us"
    " memory_used_bytes memory_limit_bytes swapped_bytes sm_percent since_seconds command container processes line"
    " exit_code started ran_seconds memory_peak_bytes"
)


def listed(cli: Cli, *words: str) -> list[dict[str, Any]]:
    answer = cli("jobs", *words, output="json").ok()
    jobs = answer.data["jobs"]
    assert all(job.keys() == set(KEYS.split()) for job in jobs)
    return list(jobs)


def shown(job: dict[str, Any], *keys: str) -> tuple[Any, ...]:
    return tuple(job[key] for key in keys)


@pytest.mark.parametrize("options", [(), ("--slice", "2ms"), ("--memory", "4G"), ("--swap", "request")])
def test_the_peak_memory_of_a_job_that_has_ended(cli: Cli, options: tuple[str, ...]) -> None:
    cli("run", *options, "--", sys.executable, "-m", "gpushare.sim.job", "--footprint", "3G", "--seconds", "2").ok()
    (job,) = listed(cli)
    assert job["memory_peak_bytes"] >= 3 * GIB
    assert "peak memory" in cli("jobs").ok().out


def runs(real: Real, world: World, *options: str) -> Started:
    started = real("run", *options, "--name", "train", "--", "sleep", "300")
    until_it_runs(world, started, "train")
    return started


@pytest.mark.parametrize(("options", "expected"), [
    (("--threads", "25"), {"way": "mps", "threads_percent": 25.0, "role": "plain", "slice_us": None}),
    (("--slice", "500us"), {"way": "timeslice", "threads_percent": None, "slice_us": 500}),
    (("--memory", "4G"), {"memory_limit_bytes": 4 * GIB, "memory_used_bytes": 512 * MIB}),
    (("--mig", "tiny"), {"way": "mig", "mig_profile": "1g.18gb", "mig_name": "tiny", "gpu_indexes": [0]}),
])  # fmt: skip
def test_a_job_that_runs(
    real: Real, cli: Cli, world: World, options: tuple[str, ...], expected: dict[str, Any]
) -> None:
    if "--mig" in options:
        world.run("mig", "enable", "-g", "0").ok()
        world.run("mig", "create", "1g.18gb", "-g", "0", "--name", "tiny").ok()
    started = runs(real, world, *options)
    # A time-slice is set only once the program is on the GPU.
    until(lambda: listed(cli)[0]["slice_us"] == expected.get("slice_us"), "its time-slice is set")
    (job,) = listed(cli)
    assert {key: job[key] for key in expected} == expected
    # The status says the same of its process.
    rows = {process["pid"]: process for process in cli("status", output="json").ok().data["gpus"][0]["processes"]}
    same = ("role", "way", "threads_percent", "slice_us")
    assert (rows[job["pid"]]["job"], *(rows[job["pid"]][key] for key in same)) == ("train", *(job[key] for key in same))
    told = (job["name"], job["state"], job["command"], job["user"])
    assert told == ("train", "running", "sleep 300", user_name(os.geteuid()))
    assert (job["processes"], 0 <= job["since_seconds"] < 120) == ([job["pid"]], True)
    # Gone from the running ones, it is among those that ended.
    started.end(signal.SIGTERM)
    (job,) = listed(cli)
    assert (job["name"], job["state"], job["exit_code"], job["pid"]) == ("train", "ended", 143, None)


def test_production_outside_mps_beside_a_client_of_mps(real: Real, cli: Cli, world: World) -> None:
    started = real("run", "--production", "web", "--slice", "16ms", "--", "sleep", "300")
    until_it_runs(world, started, "web")
    until(lambda: listed(cli)[0]["slice_us"] == 16_000, "its time-slice is set")
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert gpu["sharing"] == "timeslice"
    cli("mps", "start", "--threads", "30").ok()
    client = world.client()
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert gpu["sharing"] == "mps+timeslice"
    shown = cli("status", output="plain").ok().out
    (row,) = [line for line in shown.splitlines() if " web " in line]
    assert "production  slice 16ms" in row
    # What gpushare did not start has no job, and no way of one.
    assert all(process["way"] is None for process in gpu["processes"] if process["pid"] == client)
    started.end(signal.SIGTERM)
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert gpu["sharing"] == "mps"


def test_jobs_are_listed_by_the_numbers_in_their_names(cli: Cli, world: World) -> None:
    for name in ("s10", "s2", "s1"):
        world.record(name, admin.add_process(world.spec))
    other = admin.add_process(world.spec)
    assert [job["name"] or job["pid"] for job in listed(cli, "-a")] == ["s1", "s2", "s10", other]


def test_what_gpushare_did_not_start(cli: Cli, world: World) -> None:
    assert world.host
    program = {"name": "python3", "command_line": ("python3", "a b.py"), "container": "0123456789ab"}
    pid = admin.add_process(world.spec, memory_bytes=GIB, **program)
    assert listed(cli) == []
    (job,) = listed(cli, "-a")
    told = (None, pid, None, "python3 'a b.py'", "0123456789ab", GIB)
    assert shown(job, "name", "pid", "role", "command", "container", "memory_used_bytes") == told
    # Its PID is the JOB: what gpushare keeps off the GPU is listed all the same.
    cli("pause", str(pid)).ok()
    (job,) = listed(cli)
    assert shown(job, "pid", "state") == (pid, "paused")
    cli("resume", str(pid)).ok()
    cli("swap", "out", str(pid)).ok()
    (job,) = listed(cli)
    assert shown(job, "pid", "state", "swapped_bytes") == (pid, "out", GIB)


def test_a_client_of_mps_that_gpushare_did_not_start(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "40", "--memory", "2G").ok()
    pid = world.client()
    job = next(job for job in listed(cli, "-a") if job["pid"] == pid)
    # Each of its processes may hold 2 GiB.
    assert (job["way"], job["threads_percent"], job["memory_limit_bytes"]) == ("mps", 40.0, None)
    # The driver counts the work of clients for their server.
    assert job["sm_percent"] is None


def test_the_memory_that_production_leaves_is_no_limit_of_the_job(real: Real, cli: Cli, world: World) -> None:
    """The driver limits each process to it: two of one job may hold twice as much."""
    world.record("web", admin.add_process(world.spec), "production", memory_peak_bytes=100 * GIB)
    started = runs(real, world, "--opportunistic", "--for", "web", "--threads", "60")
    job = next(job for job in listed(cli) if job["name"] == "train")
    assert (job["way"], job["threads_percent"], job["memory_limit_bytes"]) == ("mps", 60.0, None)
    daemons = cli("mps", "status", output="json").ok().data["mps_daemons"]
    (client,) = [client for daemon in daemons for server in daemon["servers"] for client in server["clients"]]
    assert client["memory_limit_bytes"] > 30 * GIB
    started.end(signal.SIGTERM)


@pytest.mark.parametrize("name", ["many", None])
def test_copies_of_a_farm_are_one_job(real: Real, cli: Cli, world: World, name: str | None) -> None:
    named = ("--name", name) if name else ()
    started = real("farm", "--copies", "2", "--memory", "1G", *named, "--", "sleep", "300")
    job = until(
        lambda: world.begun and next((job for job in listed(cli) if len(job["processes"]) == 2), None), "both run"
    )
    # One without a name gets one.
    name = name or "sleep-1"
    told = (name, started.pid, "mps", "sleep 300", 1024 * MIB, 2 * GIB)
    assert shown(job, "name", "pid", "way", "command", "memory_used_bytes", "memory_limit_bytes") == told
    assert job["since_seconds"] is not None
    (done,) = cli("stop", name, output="json").ok().data["jobs"]
    assert done["ended_by"] == "gpushare"
    assert started.result().code == 128 + signal.SIGTERM
    assert world.pids() == []
    # The peak is that of a copy.
    (past,) = listed(cli)
    told = (name, "ended", 128 + signal.SIGTERM, 512 * MIB)
    assert shown(past, "name", "state", "exit_code", "memory_peak_bytes") == told


def test_a_waiting_job_is_told_what_other_programs_hold(real: Real, cli: Cli, world: World) -> None:
    admin.add_process(world.spec, memory_bytes=100 * GIB)
    train = real("run", "--memory", "10G", "--slice", "2ms", "--name", "train", "--", "sleep", "300")
    until(lambda: world.begun and any(job["name"] == "train" for job in listed(cli)), "train runs")
    waits = real("run", "--wait", "--memory", "60G", "--name", "next", "--", "sleep", "300")
    row = until(lambda: next((job for job in listed(cli) if job["line"] is not None), None), "next waits")
    assert row["line"]["held_by"] == ["train"]
    assert row["line"]["others_bytes"] == pytest.approx(100 * GIB, abs=GIB)
    assert re.search(r"other programs 10\d\.\d GiB, train", cli("jobs").ok().out)
    for job in (waits, train):
        job.end()


def test_a_job_that_waits_for_production_to_rest_is_one(real: Real, cli: Cli, world: World, tmp_path: Path) -> None:
    busy = f"while not __import__('os').path.exists('{tmp_path}/rest'): pass"
    web = real("run", "--production", "web", "--threads", "100", "--", sys.executable, "-c", busy)
    until(
        lambda: world.begun and any(job["name"] == "web" and job["pid"] != web.pid for job in listed(cli)), "web runs"
    )
    job = real("run", "--opportunistic", "--yield", "requeue", "--name", "train", "--", "sleep", "300")
    row = until(lambda: next((job for job in listed(cli) if job["name"] == "train"), None), "it is listed")
    assert (row["state"], row["pid"], row["role"]) == ("waiting", job.pid, "opportunistic")
    cli("stop", "train").ok()
    job.result()
    assert not any(job["name"] == "train" and job["state"] != "ended" for job in listed(cli))
    (tmp_path / "rest").touch()
    web.result()


@pytest.mark.parametrize("options", [(), ("--production", "train")])
def test_a_job_whose_gpushare_and_guard_were_killed(
    real: Real, cli: Cli, world: World, options: tuple[str, ...]
) -> None:
    words = options or ("--name", "train")
    started = real("run", "--slice", "2ms", *words, "--", "sleep", "300")
    pid = until_it_runs(world, started, "train").pid
    # The guard ends the program if only gpushare is killed.
    for process in psutil.Process(started.pid).children():
        if process.pid != pid:
            process.kill()
    started.signal(signal.SIGKILL)
    started.process.wait()
    assert [(job["pid"], job["state"]) for job in listed(cli)] == [(pid, "running")]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid), "it has ended")
    # At once, and when another job has removed its record; nobody saw when it ended.
    for _ in range(2):
        job = next(job for job in listed(cli) if job["name"] == "train")
        assert (job["state"], job["exit_code"], job["started"], job["pid"]) == ("ended", None, True, None)
        assert (job["since_seconds"], job["ran_seconds"], job["device"]) == (None, None, "GPU 0")
        cli("run", "--", "true").ok()
    record = find_record(world.host, "train")
    assert record is None if not options else record is not None and record.supervisor is None
    # The table says why the exit code is unknown.
    (row,) = [line for line in cli("jobs", output="plain").ok().out.splitlines() if line.startswith("train ")]
    assert row.split()[1:3] == ["gpushare", "killed"]


def test_how_production_ended_is_kept_once(cli: Cli, world: World) -> None:
    cli("run", "--production", "web", "--", "true").ok()
    (job,) = listed(cli)
    assert (job["name"], job["exit_code"], job["started"]) == ("web", 0, True)
    # Its record stays for its peak memory; without what was kept, nothing is told of its end.
    PAST.drop(world.host, "web")
    assert find_record(world.host, "web") is not None
    assert listed(cli) == []


def test_a_job_that_was_not_started(cli: Cli) -> None:
    assert cli("run", "--name", "train", "--", "/nowhere/program").code != 0
    assert listed(cli) == [] or "not started" in cli("jobs").ok().out


def ended(world: World, number: int) -> None:
    for each in range(number):
        record = JobRecord(name=f"job-{each}", pid=1, started=1, devices=(), role="plain", command="true")
        keep_past(world.host, record, "GPU 0", 1e9 + each, each % 2)


def test_the_last_ten_that_ended_and_all_with_v(cli: Cli, world: World) -> None:
    ended(world, 15)
    assert [job["name"] for job in listed(cli)] == [f"job-{each}" for each in range(14, 4, -1)]
    assert (len(listed(cli, "-v")), len(PAST.all(world.host))) == (15, 15)


def test_each_that_ended_is_kept_also_if_the_next_one_has_its_name(cli: Cli, real: Real) -> None:
    for code in (3, 4):
        assert real("run", "--name", "train", "--", "sh", "-c", f"exit {code}").result().code == code
    assert [(job["name"], job["exit_code"]) for job in listed(cli)] == [("train", 4), ("train", 3)]
    cli("run", "-d", "--name", "train", "--", "sleep", "300").ok()
    assert [(job["state"], job["exit_code"]) for job in listed(cli)] == [("running", None), ("ended", 4), ("ended", 3)]
    cli("stop", "train").ok()
    assert [job["exit_code"] for job in listed(cli)] == [143, 4, 3]
    # What is not started adds nothing and takes nothing.
    assert cli("run", "-d", "--opportunistic", "--for", "nosuch", "--name", "train", "--", "true").code == 6
    assert [job["exit_code"] for job in listed(cli)] == [143, 4, 3]


def test_the_oldest_goes_without_the_output_of_a_later_one_of_its_name(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare.run.jobs.KEPT_JOBS", 2)
    assert cli("run", "--name", "train", "--", "false").code == 1
    cli("run", "-d", "--name", "train", "--", "echo", "ready").ok()
    until(lambda: [job["exit_code"] for job in listed(cli)] == [0, 1], "it has ended")
    cli("run", "--name", "other", "--", "true").ok()
    assert [(job["name"], job["exit_code"]) for job in listed(cli)] == [("other", 0), ("train", 0)]
    assert "ready" in cli("logs", "train").ok().out
    cli("run", "--name", "third", "--", "true").ok()
    assert cli("logs", "train").code == 6


def test_the_rectangle(cli: Cli, world: World) -> None:
    ended(world, 1)
    admin.add_process(world.spec)
    rows = list(csv.DictReader(io.StringIO(cli("jobs", "-a", output="csv").ok().out)))
    assert [(row["pid"] != "", row["name"], row["state"]) for row in rows] == [
        (True, "", "running"),
        (False, "job-0", "ended"),
    ]


def test_nothing(cli: Cli) -> None:
    assert "no job is running" in cli("jobs").ok().out
    assert "no process is on the GPUs" in cli("jobs", "-a").ok().out
    assert listed(cli, "-a") == []


def test_watched_in_another_format_each_look_is_a_document(real: Real, world: World) -> None:
    ended(world, 1)
    for words in (("-w", "0.1s"), ("-aw",)):
        started = real("jobs", *words, "-o", "json")
        assert started.process.stdout is not None
        for _ in range(2):
            document = json.loads(started.process.stdout.readline())
            assert (document["command"], document["data"]["jobs"][0]["name"]) == ("jobs", "job-0")
        assert started.end().code == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [(("-w", "0.01s"), "bad_duration"), (("-w", "1x"), "bad_duration"), (("train",), "usage"), (("-g", "0"), "usage")],
)
def test_wrong_words(refused: Refused, words: tuple[str, ...], code: str) -> None:
    refused("jobs", *words, code=code, exit_code=2)


def test_a_lost_gpu_hides_nobody_and_without_a_driver_there_is_an_error(cli: Cli) -> None:
    world = World.new("sim:2xh200")
    admin.add_process(world.spec, "1")
    world.fault("lost", gpu=0)
    answer = cli("jobs", "-a", host=world.spec, output="json")
    assert (answer.code, answer.json["status"], len(answer.json["data"]["jobs"])) == (1, "partial", 1)
    world.fault("no-driver")
    answer = cli("jobs", host=world.spec, output="json")
    assert (answer.code, len(answer.json["errors"])) == (9, 1)
