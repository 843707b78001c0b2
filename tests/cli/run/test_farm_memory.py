"""Copies in the ledger of memory: what they reserve, for what they wait, and what happens above their limit."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.errors import OperationFailed
from gpushare.memory.ledger import Place, Request, reservations
from gpushare.sim import admin
from gpushare.units import GIB
from tests.cli.conftest import Cli
from tests.cli.drive import Started, World, alive, until
from tests.cli.run.test_memory import STRAY

JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05")


def on_gpu(world: World, count: int) -> None:
    """Wait until this many jobs hold their memory: from then on they handle signals too."""

    def there() -> bool:
        state = world.file.read()
        return state is not None and sum(one.memory_bytes % GIB == 0 for one in state.processes) == count

    until(there, "they are on the GPU")


def reserved(world: World) -> list[int | None]:
    return [one.memory_bytes for one in reservations(world.host) or []]


def taken(world: World, size: int) -> Place:
    """Return the place of another job."""
    place = Place(world.host, Request(memory_bytes=size, keys=(world.uuid(0),), client=False))
    place.take(world.uuid(0))
    return place


def test_each_copy_reserves_its_limit_while_it_runs(real: Callable[..., Started], cli: Cli, world: World) -> None:
    farm = real("farm", "--copies", "2", "--memory", "50G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    assert reserved(world) == [50 * GIB] * 2
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert gpu["jobs_reserved_bytes"] == 100 * GIB
    answer = cli("run", "--wait", "--timeout", "0.2", "--memory", "60G", "--", "true")
    assert answer.code == 19
    room = cli("-o", "json", "run", "-n", "--wait", "--memory", "60G", "--", "true").ok().data["room"]
    assert [one["memory_bytes"] for one in room["devices"][0]["held_by"]] == [50 * GIB] * 2
    farm.signal(signal.SIGINT)
    farm.result()
    assert reserved(world) == []


def test_what_gpushare_gives_each_copy_is_reserved(real: Callable[..., Started], world: World) -> None:
    farm = real("farm", "--copies", "2", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    sizes = reserved(world)
    assert len(sizes) == 2
    assert all(60 * GIB < (size or 0) < 70 * GIB for size in sizes)
    farm.signal(signal.SIGINT)
    farm.result()


def test_a_copy_that_waits_reserves_nothing_yet(real: Callable[..., Started], world: World, tmp_path: Path) -> None:
    # Two fit; each that ends makes room for one.
    script = f"{' '.join(JOB)} --footprint 1G & while ! [ -e {tmp_path}/{{}} ]; do sleep 0.02; done; kill %1; wait"
    farm = real("farm", "--copies", "3", "--memory", "60G", "--", "bash", "-mc", script)
    on_gpu(world, 2)
    first = {one.id for one in reservations(world.host) or []}
    assert len(first) == 2
    (tmp_path / "0").touch()
    until(lambda: len({one.id for one in reservations(world.host) or []} - first) == 1, "the third one runs")
    assert len(reserved(world)) == 2
    for number in (1, 2):
        (tmp_path / str(number)).touch()
    farm.result()
    assert reserved(world) == []


def test_the_copies_of_a_gpushare_that_was_killed_reserve_nothing(real: Callable[..., Started], world: World) -> None:
    farm = real("farm", "--copies", "2", "--memory", "50G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    until(
        lambda: farm.pid not in {one.pid for one in reservations(world.host) or []}, "they hold their memory themselves"
    )
    pids = [one.pid for one in reservations(world.host) or []]
    farm.process.send_signal(signal.SIGKILL)
    until(lambda: world.state.processes == [] and reserved(world) == [], "all are gone")
    assert not any(alive(pid) for pid in pids)


def test_copies_wait_for_memory_that_others_have_reserved(real: Callable[..., Started], world: World) -> None:
    """The other job holds next to nothing: both copies would fit into what is free."""
    other = real("run", "--memory", "60G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 1)
    farm = real("farm", "--copies", "2", "--memory", "50G", "--", *JOB, "--footprint", "2G", "--seconds", "60")
    farm.says("1 run at the same time")
    on_gpu(world, 2)
    assert sorted(size or 0 for size in reserved(world)) == [50 * GIB, 60 * GIB]
    other.signal(signal.SIGINT)
    other.result()
    until(lambda: reserved(world) == [50 * GIB] * 2, "the second copy has begun")
    farm.signal(signal.SIGINT)
    farm.result()


def test_what_is_reserved_is_not_shared_out(cli: Cli, world: World) -> None:
    place = taken(world, 100 * GIB)
    data = cli("-o", "json", "farm", "--copies", "2", "--", "true").ok().data
    assert 18 * GIB < data["memory_limit_bytes"] < 20 * GIB
    place.leave()


def test_copies_that_do_not_fit_next_to_reservations_are_refused(
    real: Callable[..., Started], refused: Callable[..., str], world: World
) -> None:
    other = real("run", "--memory", "100G", "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 1)
    text = refused("farm", "--copies", "2", "--memory", "60G", "--", "true", code="memory_does_not_fit", exit_code=19)
    assert re.search(
        r"do not fit into the 39\.\d GiB free on GPU 0 \(99\.\d GiB more are reserved by other jobs\)", text
    )
    other.signal(signal.SIGINT)
    other.result()


def test_copies_wait_for_a_job_that_does_not_use_the_gpu_yet(real: Callable[..., Started], world: World) -> None:
    """What it reserves may lapse, if it never does: nobody keeps copies out by a claim alone."""
    other = real("run", "--memory", "100G", "--", "sleep", "60", env={"GPUSHARE_SIM_ATTACH_DELAY": "600000"})
    until(lambda: reserved(world) == [100 * GIB], "it has reserved its memory")
    farm = real("farm", "--copies", "2", "--memory", "60G", "--", "true")
    farm.says("the memory is reserved by jobs that do not use the GPU yet: the copies wait")
    assert farm.process.poll() is None
    other.signal(signal.SIGINT)
    other.result()
    assert farm.result().code == 0


def test_copies_inside_a_job_that_has_reserved_their_memory(real: Callable[..., Started], world: World) -> None:
    """The memory is not reserved twice, nor is it somebody else's."""
    # With coverage and such, the program of gpushare is that of this Python.
    inner = (sys.executable, "-m", "gpushare", "--host", world.spec, "farm", "--copies", "2", "--memory", "50G", "--")
    outer = real(
        "run", "--slice", "2ms", "--memory", "120G", "--", *inner, *JOB, "--footprint", "1G", "--seconds", "60"
    )
    until(lambda: (state := world.file.read()) is not None and len(state.processes) == 3, "they are on the GPU")
    assert reserved(world) == [120 * GIB]
    outer.signal(signal.SIGINT)
    outer.result()


@pytest.mark.parametrize(
    ("limit", "memory", "running"),
    [
        # What a user may reserve is shared out, or bounds how many run at the same time.
        (40, None, 2),
        (40, "30G", 1),
    ],
)
def test_copies_keep_to_the_limit_of_their_user(
    real: Callable[..., Started], cli: Cli, world: World, tmp_path: Path, limit: int, memory: str | None, running: int
) -> None:
    file = tmp_path / "gpushare.yaml"
    file.write_text(f"version: 1\nmemory:\n- match: {{user: '{os.geteuid()}'}}\n  limit: {limit}G\n")
    cli("apply", "-f", str(file), "-y").ok()
    given = () if memory is None else ("--memory", memory)
    farm = real("farm", "--copies", "2", *given, "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, running)
    sizes = reserved(world)
    assert len(sizes) == running
    assert sum(size or 0 for size in sizes) <= limit * GIB
    farm.signal(signal.SIGINT)
    farm.result()
    answer = cli("farm", "--copies", "2", "--memory", "50G", "--", "true")
    assert answer.code == 4
    assert "you may reserve 40.0 GiB" in answer.err


def test_without_the_ledger_mps_holds_the_limit(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OperationFailed("the ledger is read-only", "see: mount", code="lease_unusable")

    monkeypatch.setattr("gpushare.run.farm.Place", refuse)
    assert cli("farm", "--copies", "2", "--memory", "10G", "--", "true").code == 0
    answer = cli("farm", "--copies", "2", "--memory", "10G", "--", "true")
    assert answer.lines("error") == ["error: copies 0-1: the ledger is read-only"]


# -- the limit of a copy -----------------------------------------------------------------------------


def over(number: int, size: str = "9G", seconds: float = 60) -> tuple[str, ...]:
    """Return a command whose copy of this number takes more than the others; these end by themselves."""
    job = " ".join(JOB)
    return (
        "sh",
        "-c",
        f"if [ {{}} = {number} ]; then exec {job} --footprint {size} --seconds {seconds}; fi; exec {job} --footprint 2G --seconds 1.5",
    )


def test_a_copy_over_its_limit_is_ended_and_the_others_go_on(cli: Cli, world: World) -> None:
    answer = cli("-o", "json", "farm", "--copies", "3", "--memory", "8G", "--", *over(1))
    assert answer.code == 1
    copies = answer.json["data"]["copies"]
    assert [(one["state"], one["reason"]) for one in copies] == [
        ("done", None),
        ("failed", "memory_limit"),
        ("done", None),
    ]
    assert answer.json["data"]["job_memory_bytes"] == 8 * GIB
    (error,) = answer.json["errors"]
    assert error["code"] == "memory_limit"
    assert error["message"].startswith("copy 1: the job holds 9.0 GiB, over its limit of 8.0 GiB (process ")
    assert "--memory SIZE" in error["hint"]
    assert world.state.processes == []
    assert reserved(world) == []


def test_the_sum_over_the_processes_of_a_copy_counts(real: Callable[..., Started], world: World) -> None:
    farm = real("farm", "--copies", "2", "--memory", "8G", "--", *JOB, "--footprint", "5G", "--seconds", "3")
    on_gpu(world, 2)
    until(lambda: all(one.memory_bytes == 5 * GIB for one in world.state.processes), "both hold their memory")
    one = min(world.pids())
    admin.add_process(world.spec, memory_bytes=5 * GIB, parent=one)
    answer = farm.result()
    assert answer.code == 1
    (error,) = answer.lines("error")
    assert "the job holds 10.0 GiB, over its limit of 8.0 GiB (2 processes; process" in error


def test_a_process_that_leaves_the_tree_of_a_copy_counts_and_ends_with_it(cli: Cli, world: World) -> None:
    answer = cli("farm", "--copies", "1", "--memory", "8G", "--grace", "1", "--", sys.executable, "-c", STRAY)
    assert answer.code == 1
    assert "over its limit of 8.0 GiB" in answer.err
    assert world.state.processes == []


def test_copies_over_their_limit_are_told_once(cli: Cli) -> None:
    answer = cli("farm", "--copies", "3", "--memory", "8G", "--", *JOB, "--footprint", "9G", "--seconds", "60")
    assert answer.code == 1
    (error,) = answer.lines("error")
    assert error.startswith("error: copies 0-2: the job holds 9.0 GiB")
    assert error.endswith("ended (copy 0; the others likewise)")
    assert len([line for line in answer.lines("note") if "failed" in line]) == 1


def test_a_copy_that_was_ended_for_its_memory_is_started_again_as_often_as_asked(cli: Cli) -> None:
    words = ("--copies", "1", "--restart", "1", "--memory", "8G")
    (copy,) = cli("-o", "json", "run", *words, "--", *over(0)).json["data"]["copies"]
    assert (copy["tries"], copy["reason"]) == (2, "memory_limit")


def test_a_warning_names_the_copy_and_leaves_it_alone(cli: Cli) -> None:
    words = ("--copies", "2", "--memory", "8G", "--over", "warn")
    answer = cli("run", *words, "--", *over(1, seconds=1)).ok()
    (line,) = [line for line in answer.lines("note") if "over its limit" in line]
    assert line.startswith("note: copy 1: the job holds 9.0 GiB")


def test_a_copy_that_is_stopped_keeps_its_memory_until_the_end(real: Callable[..., Started], world: World) -> None:
    words = ("--copies", "2", "--memory", "8G", "--over", "pause")
    farm = real("-o", "json", "run", *words, "--", *JOB, "--footprint", "9G", "--seconds", "60")
    for _ in range(2):
        farm.says("stopped (SIGSTOP): it cannot grow")
    assert [one.memory_bytes for one in world.state.processes] == [9 * GIB] * 2
    farm.signal(signal.SIGINT)
    answer = farm.result()
    assert answer.code == 130, answer
    assert [one["state"] for one in answer.json["data"]["copies"]] == ["ended"] * 2
    assert world.state.processes == []


def test_the_limit_of_each_copy_is_shown(real: Callable[..., Started], cli: Cli, world: World) -> None:
    words = ("--name", "sweep", "--copies", "2", "--memory", "8G", "--over", "warn")
    farm = real("run", *words, "--", *JOB, "--footprint", "1G", "--seconds", "60")
    on_gpu(world, 2)
    until(lambda: all(one.limit_bytes for one in reservations(world.host) or []), "all have said it")
    limited: list[Any] = cli("status", output="json").ok().data["limited_jobs"]
    assert sorted(one["pid"] for one in limited) == sorted(world.pids())
    assert {(one["name"], one["limit_bytes"], one["above"]) for one in limited} == {("sweep", 8 * GIB, "warn")}
    assert "limits of jobs" in cli("status").ok().out
    farm.signal(signal.SIGINT)
    farm.result()


def test_with_a_limit_of_the_copy_mps_gets_none(cli: Cli) -> None:
    """Its share of the memory could be less than what one process of the copy may have."""
    data = cli("-o", "json", "farm", "--copies", "2", "--memory", "100G", "--", "true").ok().data
    assert (data["memory_limit_bytes"], data["job_memory_bytes"]) == (None, 100 * GIB)
    both = cli("-o", "json", "farm", "--copies", "2", "--memory", "8G", "--memory", "4G", "--", "true").ok().data
    assert (both["memory_limit_bytes"], both["job_memory_bytes"]) == (4 * GIB, 8 * GIB)


@pytest.mark.parametrize(
    ("action", "said"), [("end", "end each copy"), ("warn", "warn of each copy"), ("pause", "stop (SIGSTOP) each copy")]
)
def test_a_plan_says_what_copies_reserve_and_how_they_are_limited(
    cli: Cli, world: World, action: str, said: str
) -> None:
    words = ("--copies", "2", "--memory", "8G", "--over", action)
    steps = cli("-o", "json", "run", "-n", *words, "--", "true").ok().data["steps"]
    texts = [one["what"] for one in steps]
    assert texts[0] == "reserve 8.0 GiB on GPU 0 for each copy while it runs"
    assert texts[-1] == f"{said} whose processes together hold more than 8.0 GiB (added up five times a second)"
    assert reserved(world) == []


def test_copies_do_not_wait_and_the_hint_shows_what_does(refused: Callable[..., str]) -> None:
    text = refused("run", "--wait", "--copies", "3", "--", "true", code="bad_combination", exit_code=2)
    assert "hint: for example: seq 0 2 | xargs -P 3 -I{} gpushare run --wait --memory 20G -- CMD {}\n" in text


def test_memory_that_is_taken_by_others_bounds_the_copies(refused: Callable[..., str], world: World) -> None:
    admin.add_process(world.spec, memory_bytes=100 * GIB)
    words = ("--copies", "2", "--memory", "60G", "--", "true")
    text = refused("run", *words, code="memory_does_not_fit", exit_code=19)
    assert "a copy with 60.0 GiB does not fit into the" in text
    assert "a smaller --memory" in text
