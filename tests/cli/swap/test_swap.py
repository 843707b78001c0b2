"""``gpushare swap``: a job out of the GPU and back, what is refused, and what a death leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpushare.base.units import GIB
from gpushare.host.checkpoint import CHECKPOINTED, FAILED, LOCKED, RUNNING, Checkpoint
from gpushare.memory.ledger import reservations
from gpushare.memory.swap import repair
from gpushare.memory.swapped import OUT, SWAPS, find_swap, swaps
from gpushare.run.sliced import KeptSlices
from gpushare.sim import admin
from gpushare.sim.current import changing
from tests.cli.drive import Cli, Patch, Refused, Words, World, missing, refusals

SPEC = "sim:h200"


@pytest.fixture
def world() -> World:
    return World.new(SPEC)


def job(size: int = 20 * GIB, **options: object) -> int:
    return admin.add_process(SPEC, memory_bytes=size, name="train", **options)  # type: ignore[arg-type]


@pytest.fixture
def pid(cli: Cli) -> str:
    """A job that is out."""
    pid = str(job())
    cli("swap", "out", pid).ok()
    return pid


def test_a_job_goes_out_and_comes_back(cli: Cli, refused: Refused, world: World) -> None:
    pid = str(job())
    answer = cli("swap", "out", pid, output="json").ok()
    assert (answer.data["job"]["state"], answer.data["job"]["memory_bytes"]) == ("out", 20 * GIB)
    there = world.process(int(pid))
    assert (there.checkpoint, there.memory_bytes, there.image_bytes) == (CHECKPOINTED, 0, 20 * GIB)
    assert world.host.nvml.processes(0) == ()
    (row,) = cli("swap", "list", output="json").ok().data["jobs"]
    assert (row["gpu"], row["pid"], row["state"]) == (0, int(pid), "out")
    refused("swap", "out", pid, code="already_out", exit_code=19)
    error = cli("pause", pid, output="json").error
    assert error["message"] == f"process {pid} is swapped out of the GPU"
    assert error["hint"].endswith(f"gpushare swap in {pid}")
    cli("swap", "in", pid).ok()
    there = world.process(int(pid))
    assert (there.checkpoint, there.memory_bytes) == (RUNNING, 20 * GIB)
    assert (cli("swap", "list", output="json").ok().data["jobs"], reservations(world.host)) == ([], [])


def slice_of(cli: Cli) -> tuple[int, int | None]:
    """Return the slice of the only process, and the one that gpushare has set."""
    (process,) = cli("timeslice", "show", output="json").ok().data["processes"]
    return process["slice_us"], process["set_us"]


def test_what_gpushare_set_as_its_slice_holds_again_or_is_told(cli: Cli, world: World) -> None:
    pid = str(job())
    cli("timeslice", "set", "500us", pid).ok()
    cli("swap", "out", pid).ok()
    assert (cli("swap", "in", pid).ok().err, slice_of(cli)) == ("", (500, 500))
    cli("timeslice", "reset", pid).ok()
    assert slice_of(cli) == (2048, None)
    # What nobody set is what the driver gives.
    cli("swap", "out", pid).ok()
    cli("swap", "in", pid).ok()
    assert slice_of(cli) == (1024, None)
    pid = str(job())
    cli("timeslice", "set", "500us", pid).ok()
    cli("swap", "out", pid).ok()
    world.set(channel_fault="seccomp")
    told = cli("swap", "in", pid).ok().err
    assert f"process {pid} lost its time-slice on the way: " in told
    assert f"set it again: gpushare timeslice set 500us {pid}" in told


def test_run_leaves_a_slice_that_was_set_or_reset_meanwhile_after_a_swap_too(cli: Cli, world: World) -> None:
    pid = job()
    kept = KeptSlices(world.host)

    def swap() -> None:
        cli("swap", "out", str(pid)).ok()
        assert kept.apply([], 500) == []
        cli("swap", "in", str(pid)).ok()

    assert kept.apply([pid], 500) == [pid]
    swap()
    kept.apply([pid], 500)
    assert slice_of(cli) == (500, 500)
    cli("timeslice", "set", "4ms", str(pid)).ok()
    swap()
    assert (kept.apply([pid], 500), slice_of(cli)) == ([], (4000, 4000))
    cli("timeslice", "reset", str(pid)).ok()
    swap()
    assert kept.apply([pid], 500) == kept.apply([pid], 500) == []
    assert slice_of(cli) == (1024, None)
    kept.close()


@pytest.mark.parametrize("words", [("--memory", "100G"), ("--wait",)])
def test_a_job_comes_back_with_all_that_it_had_reserved(cli: Cli, refused: Refused, world: World, words: Words) -> None:
    cli("run", "-d", *words, "--swap", "request", "--name", "train", "--", "sleep", "300").ok()
    (reserved,) = reservations(world.host) or []
    cli("swap", "out", "train").ok()
    other = world.hold(60 * GIB)
    refused("swap", "in", "train", code="no_room", exit_code=19)
    other.leave()
    cli("swap", "in", "train").ok()
    assert [each.memory_bytes for each in reservations(world.host) or ()] == [reserved.memory_bytes]
    cli("stop", "train").ok()


def test_a_dry_run_changes_nothing(cli: Cli, world: World) -> None:
    pid = str(job())
    answer = cli("swap", "out", pid, "-n").ok()
    assert missing(answer.out, "cuda-checkpoint --action lock", f"gpushare swap in {pid}") == []
    assert (world.process(int(pid)).checkpoint, swaps(world.host)) == (RUNNING, [])


@refusals(
    "no_job 6: swap out 999999 | swap out no-such-job",
    "usage 2: swap out -x | swap out",
    "not_out 6: swap in 1",
    "bad_combination 2: swap in 1 --timeout 5s",
)
def test_wrong_usage(refused: Refused, world: World, words: Words, code: str, exit_code: int) -> None:
    refused(*words, code=code, exit_code=exit_code)


def test_jobs_that_cannot_be_swapped_are_refused(refused: Refused, cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    home = next(iter(world.state.daemons)).pipe_directory
    pid = str(job(mps=True, environment={"CUDA_MPS_PIPE_DIRECTORY": home}))
    refused("swap", "out", pid, code="under_mps", exit_code=3)
    two = World.new("sim:2xh200")
    first = admin.add_process(two.spec, "0", memory_bytes=GIB)
    admin.add_process(two.spec, "1", memory_bytes=GIB, parent_pid=first)
    assert "GPUs 0, 1" in refused("swap", "out", str(first), code="several_gpus", exit_code=3, host=two.spec)
    host = World.new("sim:h200")
    pid = host.add(host.mig("1g.18gb:0")[0])
    refused("swap", "out", str(pid), code="mig_enabled", exit_code=3, host=host.spec)
    host = World.new("sim:h200")
    pid = admin.add_process(host.spec, memory_bytes=GIB)
    cli("swap", "out", str(pid)).ok()
    with changing(host.file) as (state, _):
        state.gpus[0].mig_mode = state.gpus[0].mig_pending = 1
    refused("swap", "in", str(pid), code="mig_enabled", exit_code=3)
    assert host.process(pid).checkpoint == CHECKPOINTED


def test_another_users_job_needs_consent(cli: Cli, refused: Refused, world: World) -> None:
    pid = str(job(user="nobody"))
    refused("swap", "out", pid, code="needs_consent", exit_code=19, asks=True)
    cli("swap", "out", pid).ok()
    assert world.process(int(pid)).checkpoint == CHECKPOINTED


def test_a_paused_job_is_resumed_first_by_its_name(refused: Refused, cli: Cli, world: World) -> None:
    world.record("train", job())
    cli("pause", "train").ok()
    for words in (("swap", "out"), ("move",)):
        assert "gpushare resume train" in refused(*words, "train", code="paused", exit_code=19)
    cli("resume", "train").ok()
    cli("swap", "out", "train").ok()


@pytest.mark.parametrize(
    ("name", "value", "code", "exit_code"),
    [("host_memory_bytes", 20 * GIB, "host_memory", 19), ("driver", "550.54.14", "driver_too_old", 3)],
)
def test_what_the_host_lacks(
    refused: Refused, world: World, name: str, value: object, code: str, exit_code: int
) -> None:
    pid = job()
    world.set(**{name: value})
    refused("swap", "out", str(pid), code=code, exit_code=exit_code)
    assert world.process(pid).checkpoint == RUNNING


def test_without_room_it_stays_out(cli: Cli, world: World, pid: str) -> None:
    place = world.hold(130 * GIB)
    cli("swap", "in", pid).ends(19)
    place.leave()
    other = job(130 * GIB)
    cli("swap", "in", pid, output="json").ends(19, "no_room")
    assert world.process(int(pid)).checkpoint == CHECKPOINTED
    cli("swap", "in", pid, "--wait", "--timeout", "0.2s", output="json").ends(19, "no_room")
    admin.end_process(SPEC, other)
    cli("swap", "in", pid, "--wait").ok()
    assert world.process(int(pid)).checkpoint == RUNNING


def test_a_job_that_had_all_of_the_gpu_comes_back_when_nobody_else_is_there(cli: Cli, world: World) -> None:
    """TensorFlow takes all that it finds: with a margin there would never be room."""
    gpu = world.host.nvml.gpu(0)
    all_of_it = (gpu.memory_total_bytes or 0) - (gpu.memory_reserved_bytes or 0)
    pid = str(job(all_of_it))
    cli("swap", "out", pid).ok()
    other = job(4 << 20)
    cli("swap", "in", pid, output="json").ends(19, "no_room")
    admin.end_process(SPEC, other)
    cli("swap", "in", pid).ok()
    assert world.process(int(pid)).memory_bytes == all_of_it


@pytest.mark.parametrize("name", ["lock", "checkpoint"])
def test_a_driver_that_refuses_leaves_the_job_running(cli: Cli, world: World, name: str) -> None:
    pid = str(job())
    world.set(checkpoint_faults={name: 801})
    answer = cli("swap", "out", pid, output="json").ends(3, "not_supported")
    # Of the list of processes it is no client of MPS.
    assert "uses NCCL, CUDA IPC or managed memory" in answer.error["message"]
    there = world.process(int(pid))
    assert (there.checkpoint, there.memory_bytes, swaps(world.host)) == (RUNNING, 20 * GIB, [])


def test_a_lost_job_is_named(cli: Cli, world: World, monkeypatch: Patch, pid: str) -> None:
    """Somebody took the room between the check and the restore: the driver has lost the job."""
    real = Checkpoint.restore

    def restore(self: Checkpoint, pid_asked: int, size: int, pairs: object) -> None:
        job(130 * GIB)
        real(self, pid_asked, size)

    monkeypatch.setattr(Checkpoint, "restore", restore)
    answer = cli("swap", "in", pid, output="json")
    assert (answer.error["code"], answer.error["hint"]) == ("job_lost", f"end it: gpushare stop {pid}")
    assert world.process(int(pid)).checkpoint == FAILED
    (row,) = cli("swap", "list", output="json").ok().data["jobs"]
    assert row["state"] == "lost"
    for verb in ("in", "out"):
        error = cli("swap", verb, pid, output="json").error
        assert (error["code"], error["hint"]) == ("job_lost", f"end it: gpushare stop {pid}")
    cli("stop", pid, "--yes").ok()
    assert not world.host.processes.identity(int(pid))


class Died(Exception):
    """Stands for SIGKILL at one point: nothing after it runs."""


CALLS = ("lock", "checkpoint", "restore", "unlock")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("room", [True, False])
def test_death_anywhere_loses_nothing(
    cli: Cli, world: World, monkeypatch: Patch, at: int, after: bool, room: bool
) -> None:
    """Out and in again with gpushare killed at one of the driver's calls: then repair, and the job runs or is out."""
    pid = job()
    count = [0]

    def dying(name: str) -> Callable[..., object]:
        real = getattr(Checkpoint, name)

        def call(self: Checkpoint, *arguments: object) -> object:
            count[0] += 1
            if count[0] == at + 1 and not after:
                raise Died
            answer = real(self, *arguments)
            if count[0] == at + 1:
                raise Died
            return answer

        return call

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(Checkpoint, name, dying(name))
        # The guard has died too.
        patched.setattr("gpushare.run.swap_job.guarded", lambda *_: __import__("contextlib").nullcontext())
        try:
            cli("swap", "out", str(pid))
            cli("swap", "in", str(pid))
        except Died:
            pass
    if not room:
        job(130 * GIB)
    repair(world.host)
    there = world.process(pid)
    assert there.checkpoint in {RUNNING, CHECKPOINTED}
    assert there.memory_bytes + there.image_bytes == 20 * GIB
    swap = find_swap(world.host, pid)
    if there.checkpoint == CHECKPOINTED:
        assert swap is not None
        assert swap.state == OUT
        if room:
            cli("swap", "in", str(pid)).ok()
    assert world.process(pid).checkpoint != LOCKED


@pytest.mark.parametrize("handles", [True, False])
def test_a_restored_process_is_laid_down_before_it_is_killed(
    cli: Cli, world: World, monkeypatch: Patch, handles: bool
) -> None:
    """A program without a handler is killed by the first SIGTERM."""
    from gpushare.run.end import end_programs

    pid = job()
    world.alter(pid, catches=[signal.SIGTERM] if handles else [])
    cli("swap", "out", str(pid)).ok()
    cli("swap", "in", str(pid)).ok()
    seen: list[tuple[int, int]] = []
    real = type(world.host.processes).send_to

    def send_to(self: object, pid_asked: int, started: float, number: int) -> None:
        seen.append((number, world.process(pid_asked).checkpoint))
        real(self, pid_asked, started, number)  # type: ignore[arg-type]

    monkeypatch.setattr(type(world.host.processes), "send_to", send_to)
    end_programs(world.host, [pid], set, None, number=signal.SIGTERM, grace_seconds=0.5)
    first = next(state for number, state in seen if number == signal.SIGTERM)
    assert first == (RUNNING if handles else CHECKPOINTED)
    assert not [program for program in world.state.processes if program.pid == pid]


def test_a_job_that_went_out_while_it_started_is_found_by_its_name_and_its_processes(cli: Cli, world: World) -> None:
    """Until its program runs, the record of a named job has gpushare's own PID."""
    pid = job()
    cli("swap", "out", str(pid)).ok()
    (swap,) = swaps(world.host)
    swap.path.unlink()
    SWAPS.write(replace(swap, pid=4242, name="train", path=SWAPS.path(world.host, 4242)))
    assert find_swap(world.host, pid) is not None
    assert find_swap(world.host, os.getpid(), "train") is not None
    assert find_swap(world.host, os.getpid(), "other") is None
    cli("swap", "in", str(pid)).ok()
    assert world.process(pid).checkpoint == RUNNING


def test_a_restore_that_the_driver_refuses_loses_nothing(cli: Cli, world: World, pid: str) -> None:
    world.set(checkpoint_faults={"restore": 800})
    cli("swap", "in", pid, output="json").ends(1, "restore_refused")
    assert world.process(int(pid)).checkpoint == CHECKPOINTED
    # It is out, and the guard has nothing left to do.
    assert [swap.state for swap in swaps(world.host)] == [OUT]
    world.set(checkpoint_faults={})
    cli("swap", "in", pid).ok()
    assert world.process(int(pid)).checkpoint == RUNNING
