"""``gpushare run`` with swapping: who leaves for production, what is said, and how a job ends while it is out."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.base.selection import select
from gpushare.base.units import GIB, parse_memory_limit
from gpushare.host.checkpoint import CHECKPOINTED, RUNNING
from gpushare.host.identity import Identity, identity_of
from gpushare.memory import ledger
from gpushare.memory.admission import UserLimits
from gpushare.memory.ledger import Place, Request, reservations
from gpushare.memory.limit import JobMemory
from gpushare.memory.swapped import BACK, OUT, Swap, locked, swaps
from gpushare.run.swapping import _GROWTH_SECONDS, ForProduction, Idle, Policy, Swapping
from gpushare.sim import admin
from gpushare.sim.current import changing
from gpushare.sim.processes import DEFAULT_MEMORY_BYTES
from gpushare.sim.state import SimulatedProcess
from tests.cli.drive import Cli, Patch, Real, Started, Words, World, sure, until

A30 = "sim:a30"
JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05", "--seconds", "90")


@pytest.fixture
def world() -> World:
    return World.new(A30)


@pytest.fixture
def start(real: Real, world: World) -> Real:
    """Return what starts a job, and waits until it is on the GPU."""

    def begin(*words: str, size: str = "8G", program: Words | None = None) -> Started:
        before = {process.pid for process in world.state.processes}
        wanted = parse_memory_limit(size) if program is None else DEFAULT_MEMORY_BYTES
        job = real("run", *words, "--", *((*JOB, "--footprint", size) if program is None else program), host=world.spec)
        until(lambda: any(_there(process, before, wanted) for process in world.state.processes), "it runs")
        return job

    return begin


def _there(process: SimulatedProcess, before: set[int], size: int) -> bool:
    return process.pid not in before and process.memory_bytes == size


def opportunistic(size: str) -> Words:
    return ("--opportunistic", "--yield", "swap", "--memory", size)


def finish(*jobs: Started) -> list[str]:
    for job in jobs:
        job.signal(signal.SIGINT)
    return [job.result().err + "".join(job.said) for job in jobs]


def out_of(world: World) -> list[int]:
    return [process.pid for process in world.state.processes if process.checkpoint == CHECKPOINTED]


def test_the_one_that_came_last_leaves_if_that_is_enough(start: Real, world: World) -> None:
    first = start(*opportunistic("8G"))
    second = start(*opportunistic("8G"))
    # Programs that start one after the other look like one that grows.
    time.sleep(_GROWTH_SECONDS + 1)
    web = start("--production", "web", "--wait", "--memory", "12G", size="12G")
    second.says("out of the GPU: 8.0 GiB")
    time.sleep(1.5)
    assert len(out_of(world)) == 1
    output, _, _ = finish(first, second, web)
    assert "out of the GPU" not in output


def test_both_leave_if_one_is_not_enough(start: Real, world: World) -> None:
    jobs = [start(*opportunistic("8G")) for _ in range(2)]
    web = start("--production", "web", "--wait", "--memory", "20G", size="20G")
    for job in jobs:
        job.says("out of the GPU: 8.0 GiB")
    finish(*jobs, web)


def test_production_that_has_room_sends_nobody_away(start: Real, world: World) -> None:
    job = start(*opportunistic("8G"))
    web = start("--production", "web", "--wait", "--memory", "12G", size="12G")
    roles = [each["role"] for each in world.run("jobs").data["jobs"]]
    assert sorted(roles) == ["opportunistic", "production"]
    output, _ = finish(job, web)
    assert "out of the GPU" not in output


def test_production_that_waits_for_a_job_that_stays_sends_nobody_away(start: Real, real: Real, world: World) -> None:
    """It would not come, and the one that left could not return while it waits."""
    stays = admin.add_process(world.spec, memory_bytes=8 * GIB, name="stays")
    job = start(*opportunistic("8G"))
    time.sleep(_GROWTH_SECONDS + 1)
    web = real("run", "--production", "web", "--wait", "--memory", "20G", "--", "true", host=A30)
    web.says("waiting for 20.0 GiB")
    time.sleep(2.0)
    assert out_of(world) == []
    admin.end_process(world.spec, stays)
    job.says("out of the GPU: 8.0 GiB")
    finish(job, web)


def test_without_production_a_full_gpu_is_left_alone(start: Real, world: World) -> None:
    job = start(*opportunistic("23.4G"), size="23.4G")
    time.sleep(1.5)
    assert out_of(world) == []
    # A process that may be production grows until less than 1 GiB is left.
    admin.add_process(A30, memory_bytes=GIB // 100, name="web")
    job.says("out of the GPU")
    finish(job)


def test_who_cannot_leave_says_why_and_production_is_told(start: Real, real: Real, world: World) -> None:
    first, second = start(*opportunistic("8G")), start(*opportunistic("8G"))
    world.set(host_memory_bytes=GIB)
    web = real("run", "--production", "web", "--wait", "--memory", "12G", "--", *JOB, host=A30)
    assert "tried again from time to time" in second.says("host memory")
    # So the other one has to, and cannot either.
    first.says("host memory")
    waiting = real("run", "--production", "w2", "--wait", "--memory", "12G", "--", "true", host=A30)
    assert "was to leave the GPU for it, and cannot" in waiting.says("waiting for")
    finish(waiting, web, first, second)


def test_many_turns_are_not_said_one_by_one(start: Real, world: World) -> None:
    both = [start("--swap", "turns=0.2s", "--memory", "16G"), start("--swap", "turns=0.2s", "--memory", "16G")]
    both[0].says("further ones are not reported")
    time.sleep(3)
    for output in finish(*both):
        # The first time it may have less than its 8 GiB yet.
        assert output.count("out of the GPU: ") == 3


@pytest.mark.parametrize(
    "words", [("--swap", "idle=60s"), ("--swap", "turns=60s"), opportunistic("8G"), ("--swap", "request")]
)
def test_a_job_swapped_by_hand_stays_out_until_brought_in(start: Real, cli: Cli, world: World, words: Words) -> None:
    more = () if "--memory" in words else ("--memory", "8G")
    job = start(*words, *more, "--name", "train")
    cli("swap", "out", "train", host=A30).ok()
    assert "gpushare swap in train" in job.says("swapped out by hand")
    time.sleep(1.2)
    assert len(out_of(world)) == 1
    cli("swap", "in", "train", host=A30).ok()
    job.says("back on the GPU, brought in by hand")
    (held,) = reservations(world.host) or []
    assert held.held
    (output,) = finish(job)
    assert "tried again" not in output
    assert reservations(world.host) == []


def test_a_part_of_a_program_that_is_swapped_by_its_pid_is_noticed(start: Real, cli: Cli, world: World) -> None:
    """`status` shows the PID of the process on the GPU, which a script may have started."""
    script = shlex.join([*JOB, "--footprint", "8G"])
    job = start("--swap", "idle=60s", "--memory", "16G", program=("sh", "-c", f"{script} & wait"))
    (shell,) = world.state.processes
    child = admin.add_process(A30, memory_bytes=8 * GIB)
    with changing(world.file) as (state, _):
        for process in state.processes:
            if process.pid == child:
                (process.pid, process.started), process.real = _child_of(shell.pid), True
    child = _child_of(shell.pid).pid
    cli("swap", "out", str(child), host=A30).ok()
    job.says("swapped out by hand")
    assert not [reservation for reservation in reservations(world.host) or [] if reservation.held]
    cli("swap", "in", str(child), host=A30).ok()
    job.says("back on the GPU, brought in by hand")
    finish(job)


def identified(pid: int) -> Identity:
    return sure(identity_of(pid))


def _child_of(pid: int) -> Identity:
    # A shell is on the GPU of the simulated host before it has started its program.
    children = Path(f"/proc/{pid}/task/{pid}/children")
    (child,) = until(lambda: children.read_text().split(), "a child of the shell")
    return identified(int(child))


def test_a_job_that_root_has_swapped_out_is_left_to_root(start: Real, cli: Cli, world: World) -> None:
    (world.directory / "users" / "65534").mkdir(parents=True)
    world.fault("user", 65534)
    job = start("--swap", "idle=60s", "--name", "train")
    world.fault("user", 0)
    (pid,) = world.pids()
    cli("swap", "out", str(pid), host=A30).ok()
    assert f"sudo gpushare swap in {pid}" in job.says("swapped out by hand")
    assert (job.end().code, swaps(world.host)) == (0, [])


def test_a_job_brought_back_by_hand_from_its_own_swap_holds_its_place_again(
    start: Real, cli: Cli, world: World
) -> None:
    job = start(*opportunistic("16G"), "--name", "batch", size="16G")
    web = start("--production", "web", "--wait", "--memory", "12G", size="12G")
    job.says("out of the GPU")
    finish(web)
    cli("swap", "in", "batch", "--wait", host=A30).ok()
    job.says("back on the GPU")
    until(
        lambda: [reservation for reservation in reservations(world.host) or [] if reservation.held],
        "it holds its place",
    )
    finish(job)


def test_a_process_that_ends_while_it_is_out_is_not_said_to_be_back(start: Real, cli: Cli, world: World) -> None:
    """As a kernel of a notebook that is restarted."""
    job = start("--swap", "idle=60s", "--memory", "8G", "--name", "lab")
    cli("swap", "out", "lab", host=A30).ok()
    job.says("swapped out by hand")
    # A record whose processes have all ended is removed by whoever reads it next.
    next((world.directory / "run" / "swap").glob("*.json")).unlink()
    job.says("what was out has ended")
    finish(job)


def swapping(
    world: World, pid: int, policy: Policy, memory: JobMemory | None = None, place: Place | None = None
) -> tuple[Swapping, list[str], list[float]]:
    """Return what swaps a program on the first GPU by a policy, what it says, and its clock, which a test sets."""
    (device,) = select("0", world.host.nvml.sweep())
    messages: list[str] = []
    at = [0.0]
    watch = Swapping(
        world.host,
        device,
        memory or JobMemory(world.host, device),
        place or Place(world.host, Request(memory_bytes=8 * GIB, keys=(device.uuid,), client=False)),
        policy,
        messages.append,
        limits=UserLimits(),
        movable=False,
        clock=lambda: at[0],
    )
    watch.started(SimpleNamespace(program_pid=pid))  # type: ignore[arg-type]
    return watch, messages, at


def test_a_program_that_has_ended_while_it_was_out_gets_no_word(world: World) -> None:
    (device,) = select("0", world.host.nvml.sweep())
    process = subprocess.Popen(["sleep", "60"])
    watch, messages, _ = swapping(world, process.pid, Idle(1.0))
    watch._swap = Swap(
        pid=process.pid, started=1, name=None, uid=0, gpu_uuid=device.uuid, state=OUT, since=0.0, images=()
    )  # fmt: skip
    process.kill()
    process.wait()
    assert not watch.poll()
    assert messages == []
    assert not watch.out
    watch.leave()


def on_gpu(world: World, pid: int, size: int) -> None:
    """Put a real process on the GPU."""
    with changing(world.file) as (state, _):
        state.processes.append(
            SimulatedProcess(
                pid=pid,
                real=True,
                gpu_uuid=state.gpus[0].uuid,
                name="sleep",
                uid=os.geteuid(),
                started=identified(pid).started,
                memory_bytes=size,
            )
        )


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Return the PID of a program that does nothing."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_program_that_is_not_on_the_gpu_yet_is_asked_again_at_once(world: World, sleeper: int) -> None:
    """It reads its data first: a notebook without a GPU says nothing, and a turn ends once there is something to copy."""
    watch, messages, at = swapping(world, sleeper, Idle(1.0))
    for _ in range(40):
        at[0] += 0.5
        assert not watch.poll()
    assert messages == []
    on_gpu(world, sleeper, 4 * GIB)
    at[0] += 0.5
    watch.poll()
    assert watch.out
    assert messages == ["out of the GPU: 4.0 GiB to host memory in 0.0 s"]
    watch.leave()


def test_a_job_stays_while_its_gpu_does_not_answer(world: World, sleeper: int) -> None:
    on_gpu(world, sleeper, 4 * GIB)
    watch, messages, at = swapping(world, sleeper, Idle(1.0))
    world.fault("lost")
    for _ in range(6):
        at[0] += 0.5
        assert not watch.poll()
    assert (watch.out, messages) == (False, [])
    world.clear()
    for _ in range(4):
        at[0] += 0.5
        watch.poll()
    assert watch.out
    watch.leave()


def test_what_a_job_starts_while_it_is_out_is_held_to_its_limit(world: World) -> None:
    (device,) = select("0", world.host.nvml.sweep())
    memory = JobMemory(world.host, device, limit_bytes=8 * GIB)
    process = subprocess.Popen(["sh", "-c", "sleep 20 & sleep 20 & wait"])
    until(lambda: len(world.host.processes.descendants(process.pid)) == 3, "both have started")
    _, first, second = world.host.processes.descendants(process.pid)
    memory.begin(process.pid)
    watch, _, at = swapping(world, process.pid, Idle(1.0), memory)
    on_gpu(world, first, 4 * GIB)
    for _ in range(6):
        at[0] += 0.5
        assert not watch.poll()
    assert watch.out
    on_gpu(world, second, 10 * GIB)
    time.sleep(0.3)
    assert memory.poll()
    assert memory.over is not None
    # Over its limit, the job was stopped before it is to be ended.
    for pid in (process.pid, first, second):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    watch.leave()


def test_a_job_that_waits_for_another_swap_is_not_said_to_stay(world: World, sleeper: int) -> None:
    """Else production counts on another one, and both leave."""
    (device,) = select("0", world.host.nvml.sweep())
    on_gpu(world, sleeper, 8 * GIB)
    waits = Request(memory_bytes=20 * GIB, keys=(device.uuid,), client=False, production=True)
    production = Place(world.host, waits)
    request = Request(memory_bytes=8 * GIB, keys=(device.uuid,), client=False, opportunistic=True, leaves=True)
    place = Place(world.host, request)
    place.take(device.uuid)
    place.add(sleeper)
    watch, _, at = swapping(world, sleeper, ForProduction(), place=place)

    def looks() -> None:
        for _ in range(4):
            at[0] += 0.5
            watch.poll()

    with locked(world.host):
        looks()
        assert [reservation.stays for reservation in reservations(world.host) or ()] == [False, False]
    # Too little host memory is another thing.
    world.set(host_memory_bytes=GIB)
    looks()
    assert [reservation.stays for reservation in reservations(world.host) or ()] == [False, True]
    world.set(host_memory_bytes=64 * GIB)
    at[0] += 60.0
    looks()
    assert watch.out
    assert not watch._told_stays
    watch.leave()
    production.leave()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("words", [("--swap", "request"), ("--swap", "idle=0.5s")])
def test_a_job_that_is_ended_while_out_comes_back(
    start: Real, cli: Cli, world: World, words: Words, number: int
) -> None:
    job = start(*words, "--name", "train")
    if words == ("--swap", "request"):
        cli("swap", "out", "train", host=A30).ok()
    else:
        with changing(world.file) as (state, _):
            for process in state.processes:
                process.sm_percent = 0
        cli("swap", "out", "train", host=A30)
    job.says("out of the GPU")
    answer = job.end(number)
    assert "back on the GPU: 8.0 GiB" in answer.err
    assert answer.code == 0, answer
    assert (world.state.processes, swaps(world.host), reservations(world.host)) == ([], [], [])


def test_a_job_without_room_ends_out_of_the_gpu(start: Real, cli: Cli, world: World) -> None:
    job = start("--swap", "request", "--name", "train", size="16G")
    cli("swap", "out", "train", host=A30).ok()
    other = admin.add_process(A30, memory_bytes=16 * GIB)
    job.end().ok()
    assert [process.pid for process in world.state.processes] == [other]
    assert not list((world.directory / "run" / "swap").glob("*.json"))


def test_an_idle_job_that_works_again_says_that_it_waits_for_room(start: Real, world: World, tmp_path: Path) -> None:
    wakes = tmp_path / "wakes"
    script = (
        "import os, time\n"
        f"while not os.path.exists({str(wakes)!r}): time.sleep(0.1)\n"
        f"while os.path.exists({str(wakes)!r}): pass\n"
    )
    job = start("--swap", "idle=1s", program=(sys.executable, "-c", script))
    with changing(world.file) as (state, _):
        for process in state.processes:
            process.sm_percent, process.memory_bytes = 0, 8 * GIB
    job.says("out of the GPU")
    other = admin.add_process(A30, memory_bytes=20 * GIB)
    wakes.touch()
    job.says("it works again, and waits for room on the GPU; its next CUDA call waits until it is back")
    assert [swap.state for swap in swaps(world.host)] == [OUT]
    admin.end_process(A30, other)
    job.says("back on the GPU")
    assert {process.checkpoint for process in world.state.processes} == {RUNNING}
    os.unlink(wakes)
    assert job.result().code == 0


def test_a_turn_goes_on_while_nobody_would_gain(start: Real, world: World) -> None:
    """Else it would be out until the job that is in the way of both has ended, and nobody would use its room."""
    other = admin.add_process(world.spec, memory_bytes=9 * GIB, name="stays")
    job = start("--swap", "turns=0.5s", "--memory", "8G", size="7G")
    large = Place(world.host, Request(memory_bytes=20 * GIB, keys=(world.uuid(),), client=False))
    time.sleep(2.0)
    assert swaps(world.host) == []
    admin.end_process(world.spec, other)
    until(lambda: any(swap.state == OUT for swap in swaps(world.host)), "it has left")
    large.leave()
    finish(job)
    # The next one has room without that, and is about to start.
    job = start("--swap", "turns=0.5s", "--memory", "8G", size="7G")
    small = Place(world.host, Request(memory_bytes=8 * GIB, keys=(world.uuid(),), client=False))
    time.sleep(2.0)
    assert swaps(world.host) == []
    small.leave()
    finish(job)


def test_a_job_that_is_stopped_while_it_waits_ends_no_turn(start: Real, world: World) -> None:
    """Ctrl-Z: it takes no place, so the copies would be for nothing, again and again."""
    stopped = subprocess.Popen(["sleep", "600"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        job = start("--swap", "turns=0.5s", "--memory", "8G", size="7G")
        place = Place(world.host, Request(memory_bytes=20 * GIB, keys=(world.uuid(),), client=False))
        path, me = place.claim.path, identity_of(os.getpid())
        other = identity_of(stopped.pid)
        assert me is not None
        assert other is not None
        # As if that process waited.
        path.write_text(path.read_text().replace(f"{me.pid} {me.started}", f"{other.pid} {other.started}"))
        time.sleep(3.0)
        assert swaps(world.host) == []
        stopped.send_signal(signal.SIGCONT)
        until(lambda: any(swap.state == OUT for swap in swaps(world.host)), "it has left")
        place.leave()
        finish(job)
    finally:
        stopped.kill()
        stopped.wait()


def test_a_job_that_never_takes_its_place_ends_one_turn_only(start: Real, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ledger, "PATIENCE_SECONDS", 1.0)
    job = start("--swap", "turns=0.5s", "--memory", "8G", size="7G")
    never = Place(world.host, Request(memory_bytes=20 * GIB, keys=(world.uuid(),), client=False))
    job.says("out of the GPU")
    job.says("back on the GPU")
    time.sleep(3.0)
    assert {swap.state for swap in swaps(world.host)} == {BACK}
    never.leave()
    (output,) = finish(job)
    assert output.count("out of the GPU") == 1


def test_all_that_take_turns_leave_for_one_that_needs_the_room_of_all(start: Real, world: World) -> None:
    jobs = [start("--swap", "turns=0.5s", "--memory", "9G", size=size) for size in ("7G", "8G")]
    large = Place(world.host, Request(memory_bytes=20 * GIB, keys=(world.uuid(),), client=False))
    until(lambda: len([swap for swap in swaps(world.host) if swap.state == OUT]) == 2, "both have left")
    large.leave()
    finish(*jobs)


def test_a_turn_goes_on_while_host_memory_has_room_for_one_copy_only(start: Real, world: World) -> None:
    """The next job could not leave again, and the first would never come back."""
    world.set(host_memory_bytes=18 * GIB)
    job = start("--swap", "turns=0.5s", "--memory", "14G", size="13G")
    other = Place(world.host, Request(memory_bytes=14 * GIB, keys=(world.uuid(),), client=False))
    job.says("do not both fit into host memory (18.0 GiB available), so it stays on the GPU")
    assert swaps(world.host) == []
    other.leave()
    finish(job)
