"""``gpushare swap`` and ``pause`` by root next to users: whose records are seen, who may bring a job back."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import InUse
from gpushare.base.units import GIB
from gpushare.host.checkpoint import CHECKPOINTED, RUNNING
from gpushare.host.process import ProcessInfo
from gpushare.memory import swap as module
from gpushare.memory.swapped import LEAVING, RETURNING, SWAPS, Swap, find_swap, swaps
from gpushare.run.jobs import find_job, processes_to_swap
from gpushare.sim import admin
from gpushare.sim.processes import SimulatedProcesses
from gpushare.sim.state import FIRST_SIMULATED_PID
from tests.cli.drive import Cli, Refused, World, sure

SPEC = "sim:h200"
NOBODY = 65534


@pytest.fixture
def world() -> World:
    world = World.new(SPEC)
    for uid in (NOBODY, 1):
        (world.directory / "users" / str(uid)).mkdir(parents=True)
    return world


def become(world: World, uid: int) -> None:
    world.fault("user", uid)


def job(world: World, uid: int = NOBODY, size: int = 20 * GIB, name: str | None = None) -> int:
    """Give a user a job; with a name, as `gpushare run --name` notes it."""
    pid = admin.add_process(SPEC, memory_bytes=size, name="train", user=str(uid))
    if name is not None:
        become(world, uid)
        world.record(name, pid)
    return pid


def listed(cli: Cli) -> list[tuple[int, str, str | None, str | None]]:
    rows = cli("swap", "list", output="json").ok().data["jobs"]
    return [(row["pid"], row["state"], row["user"], row["by"]) for row in rows]


def test_root_sees_what_a_user_has_swapped_out_and_brings_it_back(cli: Cli, refused: Refused, world: World) -> None:
    pid = job(world, name="train")
    cli("swap", "out", "train").ok()
    assert listed(cli) == [(pid, "out", "nobody", None)]
    become(world, 0)
    assert listed(cli) == [(pid, "out", "nobody", "nobody")]
    (shown,) = cli("status", output="json").ok().data["swapped_jobs"]
    assert shown["pid"] == pid
    refused("swap", "in", "train", code="needs_consent", exit_code=19, asks=True)
    before = record(world, NOBODY, pid).read_text()
    cli("swap", "in", "train").ok()
    assert world.process(pid).checkpoint == RUNNING
    # Root has written nothing into the user's directory, and the user sees it all the same.
    assert (record(world, NOBODY, pid).read_text(), listed(cli)) == (before, [])
    become(world, NOBODY)
    assert (listed(cli), cli("swap", "in", str(pid), output="json").error["code"]) == ([], "not_out")
    cli("swap", "out", str(pid)).ok()
    assert listed(cli) == [(pid, "out", "nobody", None)]
    cli("swap", "in", str(pid)).ok()
    assert world.process(pid).checkpoint == RUNNING


def test_root_is_asked_for_the_process_that_the_plan_names(refused: Refused, cli: Cli, world: World) -> None:
    """A job without a name is its first process, which may not be the first that left."""
    pid = job(world)
    child = admin.add_process(SPEC, memory_bytes=GIB, name="worker", user=str(NOBODY), parent_pid=pid)
    become(world, NOBODY)
    cli("swap", "out", str(pid)).ok()
    path = record(world, NOBODY, pid)
    document = json.loads(path.read_text())
    document["images"].sort(key=lambda image: image[0] != child)
    path.write_text(json.dumps(document))
    become(world, 0)
    text = refused("swap", "in", str(pid), code="needs_consent", exit_code=19, asks=True)
    assert f"swaps in process {pid} (of nobody)" in text


def test_what_root_fails_to_bring_back_its_user_can(cli: Cli, world: World) -> None:
    pid = job(world, name="train")
    cli("swap", "out", "train").ok()
    become(world, 0)
    world.set(checkpoint_faults={"restore": 800})
    assert cli("swap", "in", "train", output="json").error["code"] == "restore_refused"
    world.set(checkpoint_faults={})
    become(world, NOBODY)
    assert listed(cli) == [(pid, "out", "nobody", None)]
    cli("swap", "in", "train").ok()
    assert world.process(pid).checkpoint == RUNNING


def test_what_root_has_swapped_out_root_brings_back(cli: Cli, refused: Refused, world: World) -> None:
    pid = job(world, name="train")
    become(world, 0)
    refused("swap", "out", "train", code="needs_consent", exit_code=19, asks=True)
    assert "undo: gpushare swap in train\n" in cli("swap", "out", "train").ok().out
    become(world, NOBODY)
    assert listed(cli) == [(pid, "out", "nobody", "root")]
    assert "sudo gpushare swap in" in refused("swap", "in", "train", code="swapped_by_root", exit_code=4)
    assert cli("swap", "out", "train", output="json").error["code"] == "already_out"
    assert world.process(pid).checkpoint == CHECKPOINTED
    become(world, 0)
    assert "undo: gpushare swap out train" in cli("swap", "in", str(pid), asks=True).ok().out
    assert world.process(pid).checkpoint == RUNNING
    become(world, NOBODY)
    assert listed(cli) == []
    # Its end still needs care.
    module.checkpoint_before_kill(world.host, [pid])
    assert world.process(pid).checkpoint == CHECKPOINTED


def test_root_takes_out_what_is_back_though_no_record_says_so(cli: Cli, world: World) -> None:
    """As when root has brought a job back, and a full disk kept root's record of that away."""
    pid = job(world, name="train")
    cli("swap", "out", "train").ok()
    become(world, 0)
    cli("swap", "in", "train").ok()
    (world.directory / "run" / "swap" / f"{pid}.json").unlink()
    assert [row[:2] for row in listed(cli)] == [(pid, "out")]
    cli("swap", "out", "train").ok()
    assert world.process(pid).checkpoint == CHECKPOINTED
    cli("swap", "in", "train").ok()
    assert world.process(pid).checkpoint == RUNNING


def test_root_takes_out_what_its_user_had_out_before(cli: Cli, world: World) -> None:
    pid = job(world, name="train")
    cli("swap", "out", "train").ok()
    cli("swap", "in", "train").ok()
    become(world, 0)
    cli("swap", "out", "train").ok()
    assert sure(find_swap(world.host, pid)).restored
    become(world, NOBODY)
    assert listed(cli) == [(pid, "out", "nobody", "root")]


def swapped_once(cli: Cli, world: World, keeper: int) -> tuple[int, Swap]:
    """Return a job of nobody's, which is on the GPU, and the record that ``keeper`` has of it."""
    pid = job(world)
    become(world, keeper)
    cli("swap", "out", str(pid)).ok()
    cli("swap", "in", str(pid)).ok()
    (swap,) = swaps(world.host)
    return pid, swap


def test_its_user_steps_back_while_root_swaps_a_job(cli: Cli, world: World) -> None:
    pid, swap = swapped_once(cli, world, 0)
    SWAPS.write(replace(swap, state=LEAVING))
    become(world, NOBODY)
    mine = replace(swap, state=LEAVING, path=SWAPS.path(world.host, pid))
    with pytest.raises(InUse, match="root is swapping"):
        module.go_out(world.host, mine, lambda: ())
    assert world.process(pid).checkpoint == RUNNING
    assert not SWAPS.path(world.host, pid).exists()


@pytest.mark.parametrize("state", [LEAVING, RETURNING])
def test_a_users_record_keeps_root_waiting_for_a_while_only(
    cli: Cli, world: World, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, swap = swapped_once(cli, world, NOBODY)
    SWAPS.write(replace(swap, state=state, images=tuple(image._replace(memory_bytes=0) for image in swap.images)))
    become(world, 0)
    monkeypatch.setattr(module, "_USERS_SECONDS", 0.3)
    monkeypatch.setattr(Swap, "memory_bytes", 0)
    began = time.monotonic()
    cli("swap", "out", str(pid)).ok()
    assert time.monotonic() - began >= 0.3
    assert world.process(pid).checkpoint == CHECKPOINTED
    cli("swap", "in", str(pid)).ok()
    assert world.process(pid).checkpoint == RUNNING


def test_a_name_of_digits_is_no_name(cli: Cli, world: World) -> None:
    mine, others = job(world), job(world, uid=1)
    become(world, NOBODY)
    cli("swap", "out", str(mine)).ok()
    path = record(world, NOBODY, mine)
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": str(others)}))
    become(world, 1)
    cli("swap", "out", str(others)).ok()
    become(world, 0)
    assert [row[0] for row in listed(cli)] == [others]
    cli("swap", "in", str(others)).ok()
    assert world.process(others).checkpoint == RUNNING


def test_doctor_has_root_do_nothing_in_the_name_of_a_users_file(cli: Cli, world: World) -> None:
    victim = job(world, uid=1)
    job(world)
    path = record(world, NOBODY, victim)
    path.parent.mkdir(parents=True)
    path.write_text("x")
    become(world, 0)
    checks = cli("doctor", output="json").data["checks"]
    (unread,) = [check for check in checks if check["id"] == "records.unread"]
    assert unread["remedy"] == "tell nobody, whose it is"


def record(world: World, uid: int, pid: int) -> Path:
    return world.directory / "users" / str(uid) / "gpushare" / "swap" / f"{pid}.json"


def test_a_record_of_a_user_speaks_of_nobody_else(cli: Cli, world: World) -> None:
    """What a user writes into its own directory never makes root touch, or show, what is another's."""
    mine, others = job(world), job(world, uid=1)
    become(world, NOBODY)
    cli("swap", "out", str(mine)).ok()
    path = record(world, NOBODY, mine)
    document = json.loads(path.read_text())
    (other,) = [process for process in world.state.processes if process.pid == others]
    theirs = [others, other.started, GIB]
    become(world, 0)
    for wrong in (
        {"images": [theirs]},
        {"images": [*document["images"], theirs]},
        {"uid": 0},
        {"name": "\x1b[2J"},
        {"space": None},
    ):
        path.write_text(json.dumps({**document, **wrong}))
        assert (listed(cli), cli("swap", "in", str(others), output="json").error["code"]) == ([], "not_out")
    path.write_text(json.dumps(document))
    assert listed(cli) == [(mine, "out", "nobody", "nobody")]
    for uuid in ("all", "0", "GPU"):
        path.write_text(json.dumps({**document, "gpu_uuid": uuid}))
        assert cli("swap", "in", str(mine), output="json").error["code"] == "unknown_gpu"
    path.write_text(json.dumps({**document, "images": [[*document["images"][0][:2], (1 << 63) - 1]]}))
    assert cli("swap", "in", str(mine), output="json").error["code"] in {"no_room", "never_fits"}
    assert "Traceback" not in cli("status").err


def test_a_name_of_two_users_is_refused(cli: Cli, refused: Refused, world: World) -> None:
    pids = [job(world, uid, name="train") for uid in (NOBODY, 1)]
    become(world, 0)
    assert str(pids[0]) in refused("swap", "out", "train", code="ambiguous_job", exit_code=2)
    for uid in (NOBODY, 1):
        become(world, uid)
        cli("swap", "out", "train").ok()
    become(world, 0)
    refused("swap", "in", "train", code="ambiguous_job", exit_code=2)
    cli("swap", "in", str(pids[1])).ok()
    cli("swap", "in", "train").ok()
    assert [world.process(pid).checkpoint for pid in pids] == [RUNNING, RUNNING]


def test_root_gives_way_to_a_root_with_another_run_directory(world: World, tmp_path: Path) -> None:
    pid = job(world, uid=0)
    host = world.host
    found = find_job(host, str(pid))
    processes = processes_to_swap(host, found)
    SWAPS.write(module.leaving_record(host, found, world.uuid(), processes, None))
    shared = (host.run_directory,)
    other = replace(host, run_directory=tmp_path, shared_run_directories=shared, user_directories=lambda: ())
    with pytest.raises(InUse, match="root is swapping"):
        module.go_out(other, module.leaving_record(other, found, world.uuid(), processes, None), lambda: processes)
    assert (world.process(pid).checkpoint, [each.keeper_uid for each in SWAPS.all(other)]) == (RUNNING, [0])


def test_root_sees_users_pauses_and_who_resumes_them(
    cli: Cli, refused: Refused, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = job(world, name="train")
    cli("pause", "train").ok()
    become(world, 0)
    # The guard that the record names is a real process, which follows whoever runs gpushare.
    real = SimulatedProcesses.describe

    def of_the_user(self: SimulatedProcesses, pid: int) -> ProcessInfo | None:
        info = real(self, pid)
        return replace(info, uid=NOBODY) if info is not None and pid < FIRST_SIMULATED_PID else info

    monkeypatch.setattr(SimulatedProcesses, "describe", of_the_user)
    (row,) = cli("pause", "list", output="json").ok().data["jobs"]
    assert (row["pid"], row["by"]) == (pid, "nobody")
    text = refused("resume", "train", code="paused_by_user", exit_code=4)
    directory = world.directory / "users" / str(NOBODY) / "gpushare"
    assert f"sudo -u nobody env GPUSHARE_RUN_DIR={directory} gpushare resume train" in text
    refused("swap", "out", str(pid), code="paused", exit_code=19)
    become(world, NOBODY)
    cli("resume", "train").ok()


def test_root_pauses_a_job_of_a_user_by_name(cli: Cli, refused: Refused, world: World) -> None:
    pid = job(world, name="train")
    become(world, 0)
    cli("pause", "train").ok()
    become(world, NOBODY)
    refused("resume", str(pid), code="paused_by_root", exit_code=4)
    become(world, 0)
    cli("resume", "train").ok()


def test_doctor_tells_root_what_to_type_for_a_user(cli: Cli, world: World) -> None:
    pid = job(world)
    become(world, NOBODY)
    cli("swap", "out", str(pid)).ok()
    path = record(world, NOBODY, pid)
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": LEAVING}))
    os.utime(path, (1e9, 1e9))
    become(world, 0)
    checks = cli("doctor", output="json").data["checks"]
    (interrupted,) = [check for check in checks if check["id"] == "swap.interrupted"]
    assert "sudo -u nobody env GPUSHARE_RUN_DIR=" in interrupted["remedy"]
