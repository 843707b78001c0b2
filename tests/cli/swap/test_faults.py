"""``gpushare swap`` when something fails on the way: processes that end, start or stop, disks, locks, other namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, InUse, NotSupported, OperationFailed, TimedOut
from gpushare.base.units import GIB
from gpushare.host import guard, store
from gpushare.host.checkpoint import CHECKPOINTED, LOCKED, RUNNING, Checkpoint
from gpushare.host.nvml import NvmlReader
from gpushare.memory import ledger, swapped
from gpushare.memory import swap as module
from gpushare.memory.ledger import reservations
from gpushare.memory.room import room_kept
from gpushare.memory.swap import repair
from gpushare.memory.swapped import BACK, LEAVING, OUT, RETURNING, SWAPS, Image, Swap, find_swap, swaps
from gpushare.sim import admin
from tests.cli.drive import Cli, Patch, Refused, World, sure

SPEC = "sim:h200"


@pytest.fixture
def pid(cli: Cli) -> int:
    """A job that is out."""
    pid = job()
    cli("swap", "out", str(pid)).ok()
    return pid


@pytest.fixture
def world() -> World:
    return World.new(SPEC)


def job(size: int = 20 * GIB, **options: Any) -> int:
    return admin.add_process(SPEC, memory_bytes=size, name="train", **options)


def family(number: int = 3) -> list[int]:
    first = job()
    return [first, *(job(4 * GIB, parent_pid=first) for _ in range(number - 1))]


Before = Callable[[str, Callable[[int], object]], None]


@pytest.fixture
def before(monkeypatch: Patch) -> Before:
    """Return a function that lets something happen right before each call of the driver with this name."""

    def patch(name: str, act: Callable[[int], object]) -> None:
        real = getattr(Checkpoint, name)

        def call(self: Checkpoint, pid: int, *rest: Any) -> Any:
            act(pid)
            return real(self, pid, *rest)

        monkeypatch.setattr(Checkpoint, name, call)

    return patch


def once(act: Callable[[], object]) -> Callable[[int], None]:
    done: list[bool] = []

    def call(_pid: int) -> None:
        if not done:
            done.append(True)
            act()

    return call


def test_a_job_that_ends_while_it_is_out_leaves_nothing(cli: Cli, world: World, pid: int) -> None:
    admin.end_process(SPEC, pid)
    answer = cli("swap", "in", str(pid), output="json").ends(6, "no_job")
    assert answer.error["message"] == f"process {pid} ended while it was swapped out"
    assert cli("swap", "list", output="json").ok().data["jobs"] == []
    assert not SWAPS.path(world.host, pid).exists()


@pytest.mark.parametrize("reader", [("status",), ("swap", "list"), ("swap", "in", "1"), ("doctor",)])
def test_whatever_reads_the_records_removes_those_of_the_dead(
    cli: Cli, world: World, reader: tuple[str, ...], pid: int
) -> None:
    admin.end_process(SPEC, pid)
    answer = cli(*reader)
    assert str(pid) not in answer.out + answer.err
    assert not SWAPS.path(world.host, pid).exists()


def test_a_repair_writes_no_record_of_a_job_that_has_ended(world: World, pid: int) -> None:
    """What ends the job sweeps the records once; a guard that repairs at the same time must not bring one back."""
    (swap,) = swaps(world.host)
    admin.end_process(SPEC, pid)
    for state in (LEAVING, RETURNING):
        module.settle_half_out(world.host, replace(swap, state=state), world.host.open_checkpoint())
        assert not swap.path.exists()


@pytest.mark.parametrize("call", ["checkpoint", "unlock"])
def test_a_job_that_ends_during_a_repair_leaves_no_record(cli: Cli, world: World, before: Before, call: str) -> None:
    first, second = family(2)
    cli("swap", "out", str(first)).ok()
    (swap,) = swaps(world.host)
    world.host.open_checkpoint().restore(second, 4 * GIB)
    SWAPS.write(replace(swap, state=RETURNING))
    before(call, once(lambda: [admin.end_process(SPEC, pid) for pid in (first, second)]))
    checkpoint = world.host.open_checkpoint()
    with contextlib.suppress(GpushareError):
        module.settle_half_out(world.host, replace(swap, state=RETURNING), checkpoint, was_refused=call == "checkpoint")
    repair(world.host)
    assert not swap.path.exists()


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_a_process_that_ends_on_the_way_is_left_out(cli: Cli, world: World, before: Before, call: str) -> None:
    """Between the lock of the first process and the copy of the last one, or on the way back, one of three ends."""
    first, second, third = family()
    before(call, once(lambda: admin.end_process(SPEC, second)))
    cli("swap", "out", str(first), output="json").ok()
    if call in {"lock", "checkpoint"}:
        assert [world.process(pid).checkpoint for pid in (first, third)] == [CHECKPOINTED] * 2
        (row,) = cli("swap", "list", output="json").ok().data["jobs"]
        # What is left of it, which is what coming back needs room for.
        assert (row["state"], row["memory_bytes"]) == ("out", 24 * GIB)
    cli("swap", "in", str(third)).ok()
    assert [world.process(pid).checkpoint for pid in (first, third)] == [RUNNING] * 2


def test_a_job_that_ends_altogether_on_the_way_is_named(cli: Cli, world: World, before: Before) -> None:
    pid = job()
    before("checkpoint", lambda _pid: admin.end_process(SPEC, pid))
    assert "has ended" in cli("swap", "out", str(pid), output="json").ends(6, "no_job").error["message"]
    assert not SWAPS.path(world.host, pid).exists()


def test_the_rest_of_a_job_comes_back_after_its_first_process_has_ended(cli: Cli, world: World) -> None:
    first, second, _ = family()
    cli("swap", "out", str(first)).ok()
    admin.end_process(SPEC, first)
    for text in (str(first), str(second)):
        assert cli("swap", "in", text, "--dry-run").ok()
    cli("swap", "in", str(first)).ok()
    assert world.process(second).checkpoint == RUNNING


def test_a_process_that_starts_on_the_way_goes_out_too(cli: Cli, world: World, before: Before) -> None:
    first = job()
    started: list[int] = []
    before("lock", once(lambda: started.append(job(2 * GIB, parent_pid=first))))
    assert cli("swap", "out", str(first), output="json").ok().data["job"]["processes"] == [first, *started]
    assert world.process(started[0]).checkpoint == CHECKPOINTED
    cli("swap", "in", str(first)).ok()
    assert world.process(started[0]).checkpoint == RUNNING


def test_a_job_that_grows_before_it_is_locked_gets_room_for_all_of_it(cli: Cli, world: World, before: Before) -> None:
    """Another swap may be waited for before this one, and with too little room the driver would lose the job."""
    pid = job()
    before("lock", once(lambda: world.alter(pid, memory_bytes=60 * GIB)))
    assert cli("swap", "out", str(pid), output="json").ok().data["job"]["memory_bytes"] == 60 * GIB
    other = job(100 * GIB)
    assert cli("swap", "in", str(pid)).code == 19
    admin.end_process(SPEC, other)
    cli("swap", "in", str(pid)).ok()
    assert world.process(pid).memory_bytes == 60 * GIB


def test_a_job_that_grows_beyond_host_memory_before_it_is_locked_stays(cli: Cli, world: World, before: Before) -> None:
    pid = job()
    world.set(host_memory_bytes=40 * GIB)
    before("lock", once(lambda: world.alter(pid, memory_bytes=60 * GIB)))
    cli("swap", "out", str(pid), output="json").ends(19, "host_memory")
    assert (world.process(pid).checkpoint, swaps(world.host)) == (RUNNING, [])


def test_a_job_that_never_stops_starting_processes_stays(cli: Cli, world: World, before: Before) -> None:
    first = job()
    before("lock", lambda _pid: job(GIB, parent_pid=first))
    cli("swap", "out", str(first), output="json").ends(1, "job_grows")
    assert ({program.checkpoint for program in world.state.processes}, swaps(world.host)) == ({RUNNING}, [])


def test_a_process_of_somebody_else_in_the_job_is_refused_before(refused: Refused, world: World) -> None:
    """As where the program has run a part of itself with sudo."""
    world.fault("user", "65534")
    first = job()
    job(GIB, parent_pid=first, user="root")
    assert "belongs to root" in refused("swap", "out", str(first), code="other_user", exit_code=4)


def test_a_driver_that_does_not_answer_leaves_the_record(cli: Cli, world: World, monkeypatch: Patch) -> None:
    """As with a process that is stopped after the check: the lock takes effect when it continues."""
    pid = job()
    hangs = [True]

    def lock(self: Checkpoint, pid_asked: int, _seconds: float) -> None:
        raise TimedOut(
            f"the driver does not answer for process {pid_asked}", "see: sudo dmesg | tail", code="driver_hangs"
        )

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "lock", lock)
        patched.setattr(Checkpoint, "hangs", lambda self, pid_asked: hangs[0])
        patched.setattr("gpushare.run.swap_job.guarded", lambda *_: contextlib.nullcontext())
        answer = cli("swap", "out", str(pid), output="json")
        assert answer.error["code"] == "driver_hangs"
        assert f"kill -CONT {pid}" in answer.error["hint"]
        assert [swap.state for swap in swaps(world.host)] == [LEAVING]
        # It continues, and the lock takes effect.
        hangs[0] = False
    Checkpoint.lock(world.host.open_checkpoint(), pid, 1.0)
    assert world.process(pid).checkpoint == LOCKED
    cli("swap", "in", str(pid))
    assert (world.process(pid).checkpoint, swaps(world.host)) == (RUNNING, [])


@pytest.mark.parametrize(
    ("verb", "call"), [("out", "lock"), ("out", "checkpoint"), ("in", "restore"), ("in", "unlock")]
)
def test_ctrl_c_on_the_way_leaves_the_job_running(cli: Cli, world: World, before: Before, verb: str, call: str) -> None:
    """gpushare ends at once, and its guard brings the job back before the command returns."""
    first, second = family(2)
    if verb == "in":
        cli("swap", "out", str(first)).ok()

    def interrupt(pid: int) -> None:
        if pid == second:
            raise KeyboardInterrupt

    before(call, interrupt)
    cli("swap", verb, str(first), output="json").ends(130, "interrupted")
    assert [world.process(pid).checkpoint for pid in (first, second)] == [RUNNING] * 2
    assert not [swap for swap in swaps(world.host) if swap.state != BACK]


def test_a_stopped_job_is_refused_also_while_it_is_out(refused: Refused, cli: Cli, world: World, pid: int) -> None:
    """A restore of it would not return, and take effect when it continues, with room or without."""
    other = job()
    for each in (other, pid):
        world.send(each, signal.SIGSTOP)
    for words in (("out", str(other)), ("in", str(pid)), ("in", str(pid), "--wait")):
        assert f"kill -CONT {words[1]}" in refused("swap", *words, code="stopped", exit_code=19)
    (swap,) = swaps(world.host)
    assert swap.state == OUT
    SWAPS.write(replace(swap, state=RETURNING))
    with pytest.raises(InUse):
        repair(world.host)
    assert [each.state for each in swaps(world.host)] == [RETURNING]
    world.send(pid, signal.SIGCONT)
    cli("swap", "in", str(pid)).ok()
    assert world.process(pid).checkpoint == RUNNING


def test_ctrl_c_waits_for_a_guard_that_takes_long(monkeypatch: Patch, world: World, tmp_path: Path) -> None:
    """A large job takes seconds to come back; Popen would wait for a quarter of a second."""
    slow = tmp_path / "guard.py"
    slow.write_text(
        "import os, sys, time\nos.write(1, b'ready\\n')\nsys.stdin.read()\ntime.sleep(1)\nopen(sys.argv[0] + '.done', 'w')\n"
    )
    monkeypatch.setattr(guard, "__file__", str(slow))
    monkeypatch.setattr(module, "SAY_SECONDS", 0.3)
    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt), module.guarded(world.host, messages.append):
        raise KeyboardInterrupt
    assert (tmp_path / "guard.py.done").exists()
    assert messages == ["waits until the guard has finished the interrupted swap"]


def test_a_second_swap_that_fails_does_not_forget_that_it_was_restored(cli: Cli, world: World, before: Before) -> None:
    pid = job()
    # One that was never restored can be killed as it is.
    module.checkpoint_before_kill(world.host, [pid])
    assert world.process(pid).checkpoint == RUNNING
    cli("swap", "out", str(pid)).ok()
    cli("swap", "in", str(pid)).ok()
    before("checkpoint", once(_refuse))
    assert (cli("swap", "out", str(pid)).code, [swap.state for swap in swaps(world.host)]) == (1, [BACK])
    module.checkpoint_before_kill(world.host, [pid])
    assert world.process(pid).checkpoint == CHECKPOINTED


def _refuse() -> None:
    raise OperationFailed("the driver did not swap out", "see: gpushare status", code="lock_refused")


def test_a_job_on_its_way_back_is_laid_down_too(world: World, pid: int) -> None:
    """gpushare and its guard have died after the restore, and the program is ended."""
    (swap,) = swaps(world.host)
    world.host.open_checkpoint().restore(pid, swap.memory_bytes)
    SWAPS.write(replace(swap, state=RETURNING))
    module.checkpoint_before_kill(world.host, [pid])
    assert (world.process(pid).checkpoint, [each.state for each in swaps(world.host)]) == (CHECKPOINTED, [OUT])


def test_what_is_lost_is_taken_off_the_gpu_as_a_whole(cli: Cli, world: World, before: Before) -> None:
    """The first process is restored, and the second finds no room: both can then be killed safely."""
    first, second, _ = family()
    cli("swap", "out", str(first)).ok()
    before("restore", lambda pid: job(130 * GIB) if pid == second else None)
    assert cli("swap", "in", str(first), output="json").error["code"] == "job_lost"
    assert {world.process(pid).memory_bytes for pid in (first, second)} == {0}


@contextlib.contextmanager
def full_disk(monkeypatch: Patch, after: int = 0) -> Iterator[None]:
    """Let no record be written, but for the first ``after``."""
    real, count = store.replace_file, [0]

    def replace_file(path: Path, text: str, **options: Any) -> None:
        if path.parent.name == "swap":
            count[0] += 1
            if count[0] > after:
                raise OSError(28, "No space left on device")
        real(path, text, **options)

    with monkeypatch.context() as patched:
        patched.setattr(store, "replace_file", replace_file)
        yield


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_loses_nothing_on_the_way_out(cli: Cli, world: World, monkeypatch: Patch, after: int) -> None:
    pid = job()
    with full_disk(monkeypatch, after):
        cli("swap", "out", str(pid), output="json").ends(1, "file_unwritable")
    repair(world.host)
    assert world.process(pid).checkpoint == RUNNING
    assert not [swap for swap in swaps(world.host) if swap.state != BACK]


def test_a_full_disk_keeps_no_job_out(cli: Cli, world: World, monkeypatch: Patch, pid: int) -> None:
    with full_disk(monkeypatch):
        assert "is back on the GPU, but" in cli("swap", "in", str(pid), output="json").error["message"]
    assert world.process(pid).checkpoint == RUNNING
    # It may say that the job is out; the next command corrects that.
    cli("swap", "in", str(pid))
    assert [swap.state for swap in swaps(world.host)] == [BACK]


@pytest.mark.parametrize("size", [20 * GIB, 100 * GIB], ids=["room", "no room"])
def test_a_full_directory_of_claims_keeps_no_job_out(cli: Cli, world: World, monkeypatch: Patch, size: int) -> None:
    """``/run/lock`` is often small, and every user can fill it."""
    pid = job(size)
    cli("swap", "out", str(pid)).ok()
    other = admin.add_process(SPEC, memory_bytes=100 * GIB)

    def full(*_: object) -> None:
        raise OperationFailed(
            "cannot write the claim of a job: No space left on device", "free some", code="lease_unusable"
        )

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "make_claim", full)
        answer = cli("swap", "in", str(pid))
        assert "comes back without a place in the line" in answer.err
        fits = size == 20 * GIB
        assert world.process(pid).checkpoint == (RUNNING if fits else CHECKPOINTED)
        assert answer.code == (0 if fits else 19)
    admin.end_process(SPEC, other)
    cli("swap", "in", str(pid))
    assert world.process(pid).checkpoint == RUNNING


def test_a_lock_that_another_gpushare_has_is_waited_for_and_named(cli: Cli, world: World, monkeypatch: Patch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(swapped, "SAY_SECONDS", 0.0)
    with swapped.locked(world.host):
        with (
            pytest.raises(InUse, match="another gpushare"),
            swapped.locked(world.host, seconds=0.1, say=messages.append),
        ):
            pass
        # Those who only read do not wait.
        cli("swap", "list").ok()
    assert messages == ["waits until another gpushare of this user has swapped its job"]


def record(world: World, pid: int) -> tuple[Path, dict[str, Any]]:
    path = SWAPS.path(world.host, pid)
    return path, json.loads(path.read_text())


def test_a_record_of_another_pid_namespace_is_left_alone(cli: Cli, world: World, pid: int) -> None:
    """As where a container and the host share the directory: its PIDs are those of other processes here."""
    path, document = record(world, pid)
    assert document["space"] == os.stat("/proc/self/ns/pid").st_ino
    path.write_text(json.dumps({**document, "space": 7}))
    assert cli("swap", "list", output="json").ok().data["jobs"] == []
    admin.end_process(SPEC, pid)
    cli("swap", "list").ok()
    repair(world.host)
    assert path.exists()


def test_in_a_container_with_pids_of_its_own_it_is_refused(refused: Refused, world: World) -> None:
    pid = job()
    world.fault("blind")
    refused("swap", "out", str(pid), code="pid_namespace", exit_code=3)
    refused("run", "--swap", "turns", "--", "true", code="pid_namespace", exit_code=3)
    refused("run", "--swap", "request", "--", "true", code="pid_namespace", exit_code=3)


def test_a_job_of_two_records_is_where_the_record_that_is_not_back_says(world: World, pid: int) -> None:
    swap = find_swap(world.host, pid)
    assert isinstance(swap, Swap)
    SWAPS.write(replace(swap, pid=4242, state=BACK, path=SWAPS.path(world.host, 4242)))
    swap = sure(find_swap(world.host, pid))
    assert swap.state == OUT


def test_unknown_sizes_are_refused(refused: Refused, world: World, monkeypatch: Patch) -> None:
    """Without its size no room could be reserved for its way back, and the driver would lose it."""
    pid = job()
    real = NvmlReader.processes

    def processes(self: NvmlReader, index: int) -> Any:
        listed = real(self, index)
        return listed and tuple(replace(process, memory_used_bytes=None) for process in listed)

    with monkeypatch.context() as patched:
        patched.setattr(NvmlReader, "processes", processes)
        text = refused("swap", "out", str(pid), code="memory_unknown", exit_code=3)
    assert f"does not say how much memory process {pid} holds" in text
    world.fault("not-supported", "memory")
    text = refused("swap", "out", str(pid), code="memory_unknown", exit_code=3)
    assert "does not say how much memory GPU 0 has" in text
    assert world.process(pid).checkpoint == RUNNING


def _without_library(monkeypatch: Patch) -> None:
    def missing(_self: Checkpoint, name: str) -> Any:
        raise NotSupported(f"this driver has no {name}", "driver 570 or later is needed", code="driver_too_old")

    monkeypatch.setattr(Checkpoint, "_driver_function", missing)


def test_without_the_drivers_calls_nothing_begins(cli: Cli, refused: Refused, world: World, monkeypatch: Patch) -> None:
    pid, other = job(), job(4 * GIB)
    cli("swap", "out", str(other)).ok()
    with monkeypatch.context() as without:
        _without_library(without)
        for words in (("swap", "out", str(pid)), ("swap", "out", str(pid), "-n"), ("swap", "in", str(other))):
            refused(*words, code="driver_too_old", exit_code=3)
        refused("run", "--swap", "request", "--", "true", code="driver_too_old", exit_code=3)
    assert [(swap.pid, swap.state) for swap in swaps(world.host)] == [(other, OUT)]
    cli("swap", "in", str(other)).ok()


@pytest.mark.parametrize("state", [LEAVING, RETURNING])
def test_a_record_stays_while_the_driver_is_missing(world: World, monkeypatch: Patch, state: str, pid: int) -> None:
    """As between the upgrade of a driver and the reboot: the job is out, and must not be taken for one that is back."""
    (swap,) = swaps(world.host)
    SWAPS.write(replace(swap, state=state))
    with monkeypatch.context() as without:
        _without_library(without)
        with pytest.raises(NotSupported):
            repair(world.host)
    assert [each.state for each in swaps(world.host)] == [state]
    repair(world.host)
    assert world.process(pid).checkpoint == RUNNING


def test_a_driver_that_hides_the_state_leaves_the_record(cli: Cli, world: World, monkeypatch: Patch, pid: int) -> None:
    with monkeypatch.context() as silent:
        silent.setattr(Checkpoint, "state", lambda *_: None)
        # Its guard asks the driver itself, and would complete it.
        silent.setattr("gpushare.run.swap_job.guarded", lambda *_: contextlib.nullcontext())
        answer = cli("swap", "in", str(pid), output="json")
    assert (answer.code, answer.error["code"]) == (1, "state_unknown")
    assert [swap.pid for swap in swaps(world.host)] == [pid]
    # The repair brings it back, and nothing is left to do.
    answer = cli("swap", "in", str(pid), output="json").ok()
    assert (answer.data["job"]["state"], world.process(pid).checkpoint) == ("back", RUNNING)
    assert cli("swap", "list", output="json").ok().data["jobs"] == []


def _others_come(monkeypatch: Patch, size: int) -> list[int]:
    """Let a program that gpushare did not start take memory between the reservation and the restore."""
    came: list[int] = []
    real = Checkpoint.check_available

    def check_available(self: Checkpoint) -> None:
        if not came:
            came.append(job(size))
        real(self)

    monkeypatch.setattr(Checkpoint, "check_available", check_available)
    return came


def test_room_taken_after_the_reservation_loses_nothing(cli: Cli, world: World, monkeypatch: Patch, pid: int) -> None:
    came = _others_come(monkeypatch, 130 * GIB)
    cli("swap", "in", str(pid), output="json").ends(19, "no_room")
    assert (world.process(pid).checkpoint, [swap.state for swap in swaps(world.host)]) == (CHECKPOINTED, [OUT])
    came.clear()
    admin.end_process(SPEC, next(program.pid for program in world.state.processes if program.pid != pid))
    cli("swap", "in", str(pid), "--wait", "--timeout", "1s", output="json").ends(19, "no_room")
    admin.end_process(SPEC, came[0])
    cli("swap", "in", str(pid), "--wait").ok()


def _half_out(cli: Cli, world: World) -> int:
    pid = job()
    cli("swap", "out", str(pid)).ok()
    (swap,) = swaps(world.host)
    SWAPS.write(replace(swap, state=RETURNING))
    return pid


def test_a_repair_takes_no_room_that_others_have_reserved(cli: Cli, world: World) -> None:
    pid, place = _half_out(cli, world), world.hold(130 * GIB)
    repair(world.host)
    assert (world.process(pid).checkpoint, [each.state for each in swaps(world.host)]) == (CHECKPOINTED, [OUT])
    place.leave()
    (swap,) = swaps(world.host)
    SWAPS.write(replace(swap, state=RETURNING))
    repair(world.host)
    assert world.process(pid).checkpoint == RUNNING
    assert not reservations(world.host)


def test_a_repair_uses_the_room_that_the_job_itself_has_reserved(cli: Cli, world: World) -> None:
    _half_out(cli, world)
    place = world.hold(130 * GIB)
    (swap,) = swaps(world.host)
    own = replace(swap, uid=0, images=(Image(os.getpid(), 1, 1),))
    for size, fits in ((20 * GIB, True), (140 * GIB, False)):
        with room_kept(world.host, own, size) as has_room:
            assert has_room is fits
    place.leave()
