"""``gpushare move``: a running job to another GPU, all jobs off a GPU, what is refused, and what a refusal of the driver leaves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.host.capabilities import user_name
from gpushare.host.checkpoint import CHECKPOINTED, RUNNING, Checkpoint
from gpushare.memory import move
from gpushare.memory.ledger import reservations
from gpushare.memory.swap import repair
from gpushare.memory.swapped import BACK, OUT, RETURNING, SWAPS, find_swap, swaps
from gpushare.run.moving import Mover
from gpushare.sim import admin
from gpushare.sim.current import changing
from tests.cli.drive import Cli, Patch, Refused, Words, World, sure, until

SPEC = "sim:3xh200"


@pytest.fixture
def world() -> World:
    return World.new(SPEC)


def job(gpu: int = 0, size: int = 20 * GIB, **options: object) -> int:
    return admin.add_process(SPEC, str(gpu), memory_bytes=size, name="train", **options)  # type: ignore[arg-type]


def gpu_of(world: World, pid: int) -> int:
    return [gpu.uuid for gpu in world.state.gpus].index(world.process(pid).gpu_uuid)


def refuse_pairs(monkeypatch: Patch, *but: int) -> None:
    """Let the driver refuse each restore on another GPU, except of these processes."""
    real = Checkpoint.restore

    def restore(self: Checkpoint, pid: int, size: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        if pairs and pid not in but:
            raise OperationFailed("the driver did not", "try again", code="restore_refused")
        real(self, pid, size, pairs)

    monkeypatch.setattr(Checkpoint, "restore", restore)


def test_a_job_moves_and_its_undo_brings_it_back(cli: Cli, world: World) -> None:
    pid = job()
    answer = cli("move", str(pid), "-g", "1", output="json", host=SPEC).ok()
    of_job = {"pid": pid, "name": None, "user": user_name(os.geteuid()), "memory_bytes": 20 * GIB}
    assert answer.data["jobs"] == [{**of_job, "from_gpu": 0, "to_gpu": 1}]
    assert answer.data["undo"] == f"gpushare move {pid} -g 0"
    there = world.process(pid)
    assert (gpu_of(world, pid), there.checkpoint, there.memory_bytes) == (1, RUNNING, 20 * GIB)
    assert reservations(world.host) == []
    swap = sure(find_swap(world.host, pid))
    assert (swap.state, swap.restored, swap.left_uuid) == (BACK, True, None)
    cli(*answer.data["undo"].split()[1:], host=SPEC).ok()
    assert gpu_of(world, pid) == 0
    # It is there.
    assert cli("move", str(pid), "-g", "0", host=SPEC).ok().out.startswith("nothing to do")


def test_a_job_needs_room_for_all_that_it_has_reserved(cli: Cli, refused: Refused, world: World) -> None:
    words = ("--memory", "80G", "--movable", "--name", "train")
    cli("run", "-d", "-g", "0", *words, "--", "sleep", "300", host=SPEC).ok()
    world.hold(70 * GIB, 1)
    refused("move", "train", "-g", "1", code="no_room", exit_code=19, host=SPEC)
    assert ") with 80.0 GiB" in refused("move", "--off", "0", "-g", "1", code="no_room", exit_code=19, host=SPEC)
    cli("move", "train", "-g", "1,2", host=SPEC).ok()
    assert gpu_of(world, *world.pids()) == 2
    cli("stop", "train", host=SPEC).ok()


@pytest.mark.parametrize("words", [("--slice", "2ms"), ("--swap", "request")])
def test_its_own_place_does_not_keep_a_job_from_moving_back(cli: Cli, world: World, words: Words) -> None:
    cli("run", "-d", "-g", "0", *words, "--memory", "90G", "--name", "train", "--", "sleep", "300", host=SPEC).ok()
    mover = Mover(world.host, 0.0, print, quiet=True)
    (target,) = select("1", world.host.nvml.sweep())
    (source,) = select("0", world.host.nvml.sweep())
    (step,) = mover.plan_all_off(source, [target]).plan.steps
    step.do()
    assert gpu_of(world, *world.pids()) == 1
    assert step.revert is not None
    step.revert()
    assert gpu_of(world, *world.pids()) == 0
    undo = cli("move", "train", "-g", "1", output="json", host=SPEC).ok().data["undo"]
    cli(*undo.split()[1:], host=SPEC).ok()
    assert gpu_of(world, *world.pids()) == 0
    cli("stop", "train", host=SPEC).ok()


def test_its_own_place_is_not_enough_where_others_took_the_rest(cli: Cli, refused: Refused, world: World) -> None:
    words = ("--slice", "2ms", "--memory", "90G", "--name", "train")
    cli("run", "-d", "-g", "0", *words, "--", "sleep", "300", host=SPEC).ok()
    cli("move", "train", "-g", "1", host=SPEC).ok()
    other = world.hold(90 * GIB)
    refused("move", "train", "-g", "0", code="no_room", exit_code=19, host=SPEC)
    other.leave()
    cli("move", "train", "-g", "0", host=SPEC).ok()
    cli("stop", "train", host=SPEC).ok()


def test_a_job_of_several_gpus_stays_even_if_it_uses_only_one(cli: Cli, refused: Refused) -> None:
    words = ("--gpus", "2", "-g", "0,1", "--memory", "5G", "--name", "train")
    cli("run", "-d", *words, "--", "sleep", "300", host=SPEC).ok()
    for verb in (("move", "train", "-g", "2"), ("swap", "out", "train")):
        text = refused(*verb, code="several_gpus", exit_code=3, host=SPEC)
        assert "is on GPUs 0, 1, and only jobs on one GPU" in text
    cli("stop", "train", host=SPEC).ok()


def test_a_job_moves_with_its_slice_and_all_its_processes(cli: Cli, world: World) -> None:
    pid = str(job())
    cli("timeslice", "set", "500us", pid, host=SPEC).ok()
    cli("move", pid, "-g", "1", host=SPEC).ok()
    (process,) = cli("timeslice", "show", output="json", host=SPEC).ok().data["processes"]
    assert (process["gpu"], process["slice_us"]) == (1, 500)
    first = job()
    pids = [first, *(job(0, 4 * GIB, parent_pid=first) for _ in range(2))]
    cli("move", str(first), "-g", "2", host=SPEC).ok()
    assert {gpu_of(world, pid) for pid in pids} == {2}


def test_without_g_it_goes_where_most_is_free_and_is_listed_there(cli: Cli, world: World) -> None:
    pid = job()
    job(1, 100 * GIB)
    plan = cli("move", str(pid), "-n", output="json", host=SPEC).ok().data
    assert (plan["jobs"][0]["to_gpu"], gpu_of(world, pid)) == (2, 0)
    assert plan["steps"] == cli("move", str(pid), output="json", host=SPEC).ok().data["steps"]
    assert gpu_of(world, pid) == 2
    pid = job()
    world.record("train", pid)
    cli("move", "train", "-g", "1", host=SPEC).ok()
    (row,) = cli("jobs", output="json", host=SPEC).ok().data["jobs"]
    assert (row["gpu_indexes"], row["device"], row["device_uuids"]) == ([1], "GPU 1", [world.uuid(1)])


def test_a_job_that_is_out_comes_in_on_another_gpu(cli: Cli, world: World) -> None:
    pid = job()
    cli("swap", "out", str(pid), host=SPEC).ok()
    undo = cli("move", str(pid), "-g", "1", output="json", host=SPEC).ok().data["undo"]
    assert (gpu_of(world, pid), world.process(pid).checkpoint) == (1, RUNNING)
    assert undo == f"gpushare move {pid} -g 0 && gpushare swap out {pid}"
    for command in undo.split(" && "):
        cli(*command.split()[1:], host=SPEC).ok()
    assert cli("swap", "list", output="json", host=SPEC).ok().data["jobs"][0]["gpu"] == 0


def test_a_part_that_is_out_moves_for_its_job_only_if_it_is_all_of_it(refused: Refused, cli: Cli, world: World) -> None:
    """Else the rest stays where it is, and the answer says that the job has moved."""
    first = job()
    child = job(0, 4 * GIB, parent_pid=first)
    cli("swap", "out", str(child), host=SPEC).ok()
    words = refused("move", str(first), "-g", "1", host=SPEC, code="already_out", exit_code=19)
    assert f"process {child}, a part of process {first}, is swapped out" in words
    assert f"gpushare swap in {child}" in words
    assert [gpu_of(world, pid) for pid in (first, child)] == [0, 0]
    # By its own PID it does.
    cli("move", str(child), "-g", "1", host=SPEC).ok()
    assert [gpu_of(world, pid) for pid in (first, child)] == [0, 1]
    first = job(0, 0)
    world.alter(first, gpu_uuid="")
    child = job(0, 4 * GIB, parent_pid=first)
    cli("swap", "out", str(child), host=SPEC).ok()
    cli("move", str(first), "-g", "1", host=SPEC).ok()
    assert gpu_of(world, child) == 1


@pytest.mark.parametrize("uuid", ["nonsense", "GPU-00000000-0000-0000-0000-000000000000"])
def test_a_record_with_a_gpu_of_no_host_changes_nothing(refused: Refused, cli: Cli, world: World, uuid: str) -> None:
    pid = job()
    cli("swap", "out", str(pid), host=SPEC).ok()
    SWAPS.write(replace(sure(find_swap(world.host, pid)), left_uuid=uuid))
    refused("swap", "in", str(pid), code="restore_refused", exit_code=1, host=SPEC)
    assert (sure(find_swap(world.host, pid)).state, world.process(pid).checkpoint) == (OUT, CHECKPOINTED)


@pytest.mark.needs_root
def test_no_job_moves_to_a_gpu_that_another_user_has_reserved(refused: Refused, cli: Cli, world: World) -> None:
    pid = job()
    job(2, 100 * GIB)
    world.lease(1, 1000)
    # Most is free on GPU 1.
    assert cli("move", str(pid), "-n", output="json", host=SPEC).ok().data["jobs"][0]["to_gpu"] == 2
    cli("move", "--off", "0", host=SPEC).ok()
    assert gpu_of(world, pid) == 2
    assert "is reserved by" in refused("move", str(pid), "-g", "1", code="no_room", exit_code=19, host=SPEC)
    job(0, 130 * GIB)
    refused("move", "--off", "2", code="no_room", exit_code=19, host=SPEC)
    assert gpu_of(world, pid) == 2


def test_off_empties_a_gpu_the_largest_job_first(cli: Cli, world: World) -> None:
    small, large = job(0, 30 * GIB), job(0, 80 * GIB)
    job(1, 90 * GIB)
    answer = cli("move", "--off", "0", output="json", host=SPEC).ok()
    assert {row["pid"]: row["to_gpu"] for row in answer.data["jobs"]} == {large: 2, small: 2}
    assert {gpu_of(world, pid) for pid in (small, large)} == {2}
    assert cli("move", "--off", "0", host=SPEC).ok().out.startswith("nothing to do")


def test_off_names_a_whole_gpu_that_a_job_has_reserved(cli: Cli, refused: Refused, world: World) -> None:
    cli("run", "-d", "-g", "0", "--wait", "--movable", "--name", "train", "--", "sleep", "300", host=SPEC).ok()
    until(lambda: world.pids() and world.host.nvml.processes(0), "it is on the GPU")
    job(1)
    text = refused("move", "--off", "0", "-g", "1", code="no_room", exit_code=19, host=SPEC)
    assert "), which has reserved a whole GPU" in text
    cli("stop", "train", host=SPEC).ok()


def test_what_cannot_move_is_refused_and_nothing_changes(refused: Refused, cli: Cli, world: World) -> None:
    pid, ranked = str(job()), str(job(environment={"WORLD_SIZE": "2"}))
    both = job()
    job(1, parent_pid=both)
    job(1, 130 * GIB)
    cli("mps", "start", "-g", "2", host=SPEC).ok()
    home = world.state.daemons[0].pipe_directory
    client = str(job(2, GIB, mps=True, environment={"CUDA_MPS_PIPE_DIRECTORY": home}))
    for words, code, exit_code in (
        ((pid, "-g", "7"), "unknown_gpu", 6),
        ((pid, "-g", "1"), "no_room", 19),
        ((ranked, "-g", "1"), "several_ranks", 3),
        ((str(both), "-g", "2"), "several_gpus", 3),
        ((client, "-g", "1"), "under_mps", 3),
        (("999999", "-g", "1"), "no_job", 6),
        ((), "usage", 2),
        ((pid, "--off", "0"), "bad_combination", 2),
        (("--off", "0", "--wait"), "bad_combination", 2),
        ((pid, "--timeout", "5s"), "bad_combination", 2),
        (("--off", "0"), "several_ranks", 3),
    ):
        text = refused("move", *words, code=code, exit_code=exit_code, host=SPEC)
    # The last is of several jobs.
    assert "; move the others one by one: gpushare move JOB" in text


def test_gpus_of_two_models_in_mig_mode_and_old_drivers_are_refused(refused: Refused) -> None:
    mixed = World.new("sim:h200,h100,h200")
    pid = str(admin.add_process(mixed.spec, "0", memory_bytes=GIB))
    refused("move", pid, "-g", "1", code="other_model", exit_code=3, host=mixed.spec)
    with changing(mixed.file) as (state, _):
        state.gpus[2].mig_mode = state.gpus[2].mig_pending = 1
    refused("move", pid, "-g", "2", code="mig_enabled", exit_code=3, host=mixed.spec)
    refused("move", pid, code="other_model", exit_code=3, host=mixed.spec)
    mixed.set(driver="575.57.08")
    refused("move", pid, "-g", "2", code="driver_too_old", exit_code=3, host=mixed.spec)


def test_a_job_that_the_driver_refuses_is_where_it_was(cli: Cli, world: World, monkeypatch: Patch) -> None:
    first = job()
    second = job(0, 4 * GIB, parent_pid=first)
    # The second process comes in first, and has to go back.
    with monkeypatch.context() as patch:
        refuse_pairs(patch, second)
        error = cli("move", str(first), "-g", "1", output="json", host=SPEC).error
    assert (error["code"], {gpu_of(world, pid) for pid in (first, second)}) == ("move_refused", {0})
    assert {world.process(pid).checkpoint for pid in (first, second)} == {RUNNING}


def test_a_refused_job_without_room_at_home_stays_out_and_can_go_on(cli: Cli, world: World, monkeypatch: Patch) -> None:
    pid = job()
    real = Checkpoint.restore

    def restore(self: Checkpoint, one: int, size: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        if pairs:
            job(0, 130 * GIB)
            raise OperationFailed("the driver did not", "try again", code="restore_refused")
        real(self, one, size, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "restore", restore)
        error = cli("move", str(pid), "-g", "1", output="json", host=SPEC).error
    assert (error["code"], world.process(pid).checkpoint) == ("no_room", CHECKPOINTED)
    (swap,) = [swap for swap in swaps(world.host) if swap.state == OUT]
    assert swap.memory_bytes == 20 * GIB
    # The other GPU has room, and takes it now.
    cli("move", str(pid), "-g", "2", host=SPEC).ok()
    assert gpu_of(world, pid) == 2


def test_what_died_half_way_is_finished_where_it_was_going(cli: Cli, world: World) -> None:
    pid = job()
    cli("swap", "out", str(pid), host=SPEC).ok()
    swap = sure(find_swap(world.host, pid))
    SWAPS.write(replace(move.retargeted(swap, world.state.gpus[1].uuid), state=RETURNING))
    repair(world.host)
    assert (gpu_of(world, pid), world.process(pid).checkpoint) == (1, RUNNING)


def test_spread_places_the_largest_first_and_leaves_out_what_has_no_room() -> None:
    free = {1: 50 * GIB, 2: 100 * GIB}
    assert move.assign_gpus({7: 20 * GIB, 8: 90 * GIB, 9: 60 * GIB}, free) == {8: 2, 7: 1}
    assert move.assign_gpus({7: GIB}, {}) == {}
