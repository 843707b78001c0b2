"""Copies in the ledger of memory: what they reserve, for what they wait, and what happens above their limit."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.units import GIB
from gpushare.memory.ledger import reservations
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Started, World, Write, alive, until
from tests.cli.run.test_memory import STRAY

JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05")


def on_gpu(world: World, count: int) -> None:
    """Wait until this many jobs hold their memory: from then on they handle signals too."""

    def there() -> bool:
        state = world.file.read()
        return state is not None and sum(process.memory_bytes % GIB == 0 for process in state.processes) == count

    until(there, "they are on the GPU")


def reserved(world: World) -> list[int | None]:
    """Return what the copies and other jobs have reserved; the farm itself waits in line, and has nothing."""
    return [reservation.memory_bytes for reservation in reservations(world.host) or [] if reservation.held]


def holders(world: World) -> set[str]:
    return {reservation.id for reservation in reservations(world.host) or [] if reservation.held}


def test_each_copy_reserves_and_shows_its_limit_while_it_runs(real: Real, cli: Cli, world: World) -> None:
    farm = real("farm", "--copies", "2", "--memory", "50G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    assert reserved(world) == [50 * GIB] * 2
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert gpu["jobs_reserved_bytes"] == 100 * GIB
    cli("run", "--wait", "--timeout", "0.2s", "--memory", "60G", "--", "true").ends(19)
    room = cli("-o", "json", "run", "-n", "--wait", "--memory", "60G", "--", "true").ok().data["room"]
    assert [holder["memory_bytes"] for holder in room["devices"][0]["held_by"]] == [50 * GIB] * 2
    farm.end()
    assert reserved(world) == []
    words = ("--name", "sweep", "--copies", "2", "--memory", "8G", "--over", "warn")
    farm = real("farm", *words, "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    until(lambda: all(reservation.limit_bytes for reservation in reservations(world.host) or []), "all have said it")
    jobs: list[Any] = cli("jobs", output="json").ok().data["jobs"]
    assert {job["memory_limit_bytes"] for job in jobs if job["name"] == "sweep"} == {16 * GIB}
    farm.end()


def test_the_first_copy_is_measured_alone_and_the_next_farm_knows_it(cli: Cli, world: World) -> None:
    command = ("--", *JOB, "--footprint", "2G", "--seconds", "1")
    first = cli("-o", "json", "farm", "--copies", "3", *command).ok()
    assert "the memory of a copy is not known: the first one runs alone until it is measured" in first.err
    assert "note: copy 0 has used 2.0 GiB: each of the others reserves 2.4 GiB, 3 at a time" in first.err
    assert (first.data["memory_source"], first.data["memory_limit_bytes"]) == ("measured", None)
    assert [copy["memory_peak_bytes"] for copy in first.data["copies"]] == [2 * GIB] * 3
    second = cli("-o", "json", "farm", "--copies", "2", *command).ok()
    assert (second.data["memory_source"], second.data["memory_bytes"]) == ("known", 2 * GIB)
    assert "2 copies on GPU 0, 2.0 GiB each, the most that this command has used here" in second.err
    assert reserved(world) == []


def test_a_copy_that_runs_on_is_measured_for_a_while(real: Real, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_ATTACH_DELAY", "0")
    farm = real("farm", "--copies", "2", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 1)
    # All that it might need: half of what is free.
    (size,) = reserved(world)
    assert size is not None
    assert size > 60 * GIB
    farm.signal(signal.SIGINT)
    assert [copy["state"] for copy in rows(farm)] == ["ended", "skipped"]


def rows(farm: Started) -> list[dict[str, str]]:
    """Return the table of a farm that ends, by columns."""
    names, *lines = [
        re.split(r"\s{2,}", line.strip()) for line in farm.result().out.partition("# copies\n")[2].splitlines()
    ]
    return [dict(zip(names, line, strict=True)) for line in lines]


def test_a_copy_that_waits_reserves_nothing_yet(real: Real, world: World, tmp_path: Path) -> None:
    # Two fit; each that ends makes room for one.
    script = f"{' '.join(JOB)} --footprint 1G & while ! [ -e {tmp_path}/{{}} ]; do sleep 0.02; done; kill %1; wait"
    farm = real("farm", "--copies", "3", "--memory", "60G", "--", "bash", "-mc", script)
    on_gpu(world, 2)
    first = holders(world)
    assert len(first) == 2
    (tmp_path / "0").touch()
    until(lambda: len(holders(world) - first) == 1, "the third one runs")
    assert len(reserved(world)) == 2
    for number in (1, 2):
        (tmp_path / str(number)).touch()
    farm.result()
    assert reserved(world) == []


def test_the_copies_of_a_gpushare_that_was_killed_reserve_nothing(real: Real, world: World) -> None:
    farm = real("farm", "--copies", "2", "--memory", "50G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    until(
        lambda: farm.pid not in {reservation.pid for reservation in reservations(world.host) or []},
        "they hold their memory themselves",
    )
    pids = [reservation.pid for reservation in reservations(world.host) or []]
    farm.process.send_signal(signal.SIGKILL)
    until(lambda: world.state.processes == [] and reserved(world) == [], "all are gone")
    assert not any(alive(pid) for pid in pids)


def test_copies_wait_for_memory_that_others_have_reserved(real: Real, world: World) -> None:
    """The other job holds next to nothing: both copies would fit into what is free."""
    other = real("run", "--memory", "60G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 1)
    farm = real("farm", "--copies", "2", "--memory", "50G", "--", *JOB, "--footprint", "2G", "--seconds", "60")
    farm.says("2 copies on GPU 0, 50.0 GiB each; 1 at a time")
    on_gpu(world, 2)
    assert sorted(size or 0 for size in reserved(world)) == [50 * GIB, 60 * GIB]
    other.end()
    until(lambda: reserved(world) == [50 * GIB] * 2, "the second copy has begun")
    farm.end()


def test_a_farm_waits_for_others_and_says_so_once(real: Real, world: World) -> None:
    other = real("run", "--memory", "100G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 1)
    farm = real("farm", "--copies", "2", "--memory", "60G", "--", "true")
    farm.says("waiting for 60.0 GiB: GPU 0 has 39.")
    (waiting,) = [reservation for reservation in reservations(world.host) or [] if reservation.waits]
    assert waiting.memory_bytes == 60 * GIB
    other.end()
    farm.result().ok()
    assert (len([line for line in farm.said if "waiting for" in line]), reservations(world.host)) == (1, [])
    # So it does for programs that are no jobs.
    pid = admin.add_process(world.spec, memory_bytes=100 * GIB)
    farm = real("farm", "--copies", "2", "--memory", "60G", "--", "true")
    farm.says("waiting for 60.0 GiB")
    world.host.processes.send(pid, signal.SIGKILL)
    assert farm.result().code == 0


def test_a_job_that_waits_goes_before_the_next_copy_but_one(real: Real, world: World, tmp_path: Path) -> None:
    """The farm came first for one copy, and goes behind the job for the next one. Two copies fit, or one and the job."""
    hold = f"while ! [ -e {tmp_path}/{{}} ]; do sleep 0.02; done"
    farm = real("farm", "--copies", "4", "--memory", "60G", "--", "sh", "-c", hold)
    until(
        lambda: len(reserved(world)) == 2 and any(reservation.waits for reservation in reservations(world.host) or []),
        "two copies run, and the farm waits for the third",
    )
    job = real("run", "--wait", "--memory", "60G", "--", "sh", "-c", hold.format("job"))
    job.says("waiting for 60.0 GiB, 1 job before it: GPU 0 has")
    (tmp_path / "0").touch()
    (tmp_path / "1").touch()
    until(lambda: job.pid in {each.claim.pid for each in reservations(world.host) or [] if each.held}, "the job runs")
    until(lambda: reserved(world) == [60 * GIB] * 2, "the third copy runs beside it")
    (tmp_path / "job").touch()
    assert job.result().code == 0
    for number in (2, 3):
        (tmp_path / str(number)).touch()
    assert farm.result().code == 0


# What a user may reserve is shared out, or bounds how many run at the same time.
@pytest.mark.parametrize(("given", "running"), [((), 2), (("--memory", "30G"), 1)])
def test_copies_keep_to_a_users_limit(
    real: Real, cli: Cli, world: World, write: Write, given: tuple[str, ...], running: int
) -> None:
    file = write(f"version: 1\nmemory:\n- match: {{user: '{os.geteuid()}'}}\n  limit: 40G\n")
    cli("apply", "-f", file, "-y").ok()
    farm = real("farm", "--copies", "2", *given, "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, running)
    sizes = reserved(world)
    assert len(sizes) == running
    assert sum(size or 0 for size in sizes) <= 40 * GIB
    farm.end()
    assert "you may reserve 40.0 GiB" in cli("farm", "--copies", "2", "--memory", "50G", "--", "true").ends(4).err


def test_without_the_ledger_a_farm_is_refused(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OperationFailed("the ledger is read-only", "see: mount", code="lease_unusable")

    monkeypatch.setattr("gpushare.run.farm.Place", refuse)
    answer = cli("farm", "--copies", "2", "--memory", "10G", "--", "true").ends(1)
    assert (answer.lines("error"), world.state.daemons) == (["error: the ledger is read-only"], [])


def over(number: int) -> tuple[str, ...]:
    """Return a command whose copy of this number takes more than 8 GiB in several processes; the others end by themselves."""
    stray = f'exec {sys.executable} -c "$0"'
    others = f"exec {' '.join(JOB)} --footprint 2G --seconds 1.5"
    return ("sh", "-c", f"if [ {{}} = {number} ]; then {stray}; fi; {others}", STRAY)


def test_a_copy_over_its_limit_is_ended_and_the_others_go_on(cli: Cli, world: World) -> None:
    answer = cli("-o", "json", "farm", "--copies", "3", "--memory", "8G", "--grace", "1s", "--", *over(1)).ends(1)
    copies = answer.json["data"]["copies"]
    ends = [(copy["state"], copy["reason"]) for copy in copies]
    assert ends == [("done", None), ("failed", "memory_limit"), ("done", None)]
    assert answer.json["data"]["job_memory_bytes"] == 8 * GIB
    (error,) = answer.json["errors"]
    assert error["code"] == "memory_limit"
    assert error["message"].startswith("copy 1: the job holds ")
    assert error["hint"].startswith("give it more with --memory")
    assert (world.state.processes, reserved(world)) == ([], [])


def test_copies_over_their_limit_are_told_once_and_started_again(cli: Cli) -> None:
    answer = cli("farm", "--copies", "3", "--memory", "8G", "--grace", "1s", "--", sys.executable, "-c", STRAY).ends(1)
    (error,) = answer.lines("error")
    assert error.startswith("error: copies 0-2: the job holds ")
    assert error.endswith("ended (copy 0; the others likewise)")
    assert len([line for line in answer.lines("note") if "failed" in line]) == 1
    words = ("--copies", "1", "--restart", "1", "--memory", "8G", "--grace", "1s")
    (copy,) = cli("-o", "json", "farm", *words, "--", *over(0)).json["data"]["copies"]
    assert (copy["tries"], copy["reason"]) == (2, "memory_limit")


def test_what_a_warning_and_mps_do_above_the_limit(cli: Cli) -> None:
    words = ("--copies", "1", "--memory", "8G", "--over", "warn")
    answer = cli("farm", *words, "--", *JOB, "--footprint", "9G", "--seconds", "1.5").ok()
    (line,) = [line for line in answer.lines("note") if "over its limit" in line]
    assert line.startswith("note: copy 0: the job holds 9.0 GiB")
    answer = cli("farm", "--copies", "1", "--memory", "8G", "--", *JOB, "--footprint", "9G", "--seconds", "60")
    assert answer.lines("error") == ["error: copy 0: exit code 1: error: CUDA_ERROR_OUT_OF_MEMORY"]


def test_a_copy_that_is_stopped_keeps_its_memory_until_the_end(real: Real, world: World) -> None:
    words = ("--copies", "2", "--memory", "8G", "--over", "pause")
    farm = real("-o", "json", "farm", *words, "--", *JOB, "--footprint", "9G", "--seconds", "60")
    for _ in range(2):
        farm.says("stopped (SIGSTOP): it cannot grow")
    assert [process.memory_bytes for process in world.state.processes] == [9 * GIB] * 2
    answer = farm.end().ends(130)
    assert [copy["state"] for copy in answer.json["data"]["copies"]] == ["ended"] * 2
    assert world.state.processes == []


@pytest.mark.parametrize(("action", "limit"), [("end", 100 * GIB - 512 * 1024**2), ("warn", None)])
def test_each_client_of_mps_gets_the_memory_but_one_context(cli: Cli, action: str, limit: int | None) -> None:
    """What is only to be warned of, MPS may not refuse."""
    words = ("--copies", "2", "--memory", "100G", "--over", action)
    data = cli("-o", "json", "farm", *words, "--", "true").ok().data
    assert (data["memory_limit_bytes"], data["job_memory_bytes"]) == (limit, 100 * GIB)


@pytest.mark.parametrize(
    ("action", "shown"),
    [("end", "end each copy"), ("warn", "warn of each copy"), ("pause", "stop (SIGSTOP) each copy")],
)
def test_a_plan_says_what_copies_reserve_and_their_limit(cli: Cli, world: World, action: str, shown: str) -> None:
    words = ("--copies", "2", "--memory", "8G", "--over", action)
    steps = cli("-o", "json", "farm", "-n", *words, "--", "true").ok().data["steps"]
    texts = [step["what"] for step in steps]
    assert texts[0] == "reserve 8.0 GiB on GPU 0 for each copy while it runs"
    assert texts[-1] == f"{shown} whose processes together hold more than 8.0 GiB (added up five times a second)"
    assert reserved(world) == []


def test_waiting_jobs_and_a_farm_starve_each_other_not_and_never_have_more_than_there_is(
    real: Real, world: World
) -> None:
    total = world.host.nvml.gpu(0).memory_total_bytes or 0
    farm = real("farm", "--copies", "40", "--memory", "20G", "--", "sleep", "0.3")
    until(lambda: len(reserved(world)) > 3, "the farm has filled the GPU")
    jobs = [real("run", "--wait", "--memory", "60G", "--slice", "2ms", "--", "sleep", "0.1") for _ in range(4)]
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, sum(size or 0 for size in reserved(world)))
        return all(job.process.poll() is not None for job in jobs)

    until(done, "the jobs, which came later, have all had their turn", seconds=60.0)
    # They did not have to wait for the end of the farm.
    assert farm.process.poll() is None
    assert ([job.result().code for job in jobs], farm.result().code) == ([0] * 4, 0)
    assert 100 * GIB < most <= total
