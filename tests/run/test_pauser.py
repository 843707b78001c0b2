"""Pausing step by step, without processes: who is locked, who is stopped, in which order, and what is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import GpuProcess
from gpushare.run import pause as pauser_module
from gpushare.run.pause import resume_all
from gpushare.run.roles import TICK_SECONDS
from tests.run.told_program import CHILD, GRANDCHILD, OTHER, PID, Told


def test_all_of_a_program_are_stopped_and_each_goes_on(told: Told) -> None:
    pauser = told.pauser(lock=False)
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]
    pauser.resume()
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]
    pauser.resume()
    assert told.since() == []
    assert not pauser.paused


def test_who_was_stopped_by_others_or_is_gone_is_left_alone(told: Told) -> None:
    told.family[PID] = [PID, CHILD, GRANDCHILD]
    told.stopped, told.dead = {CHILD}, {GRANDCHILD}
    pauser = told.pauser(lock=False)
    pauser.pause()
    pauser.resume()
    assert told.since() == [("SIGSTOP", PID), ("SIGCONT", PID)]


@pytest.mark.parametrize("error", [NotFound("gone", "see"), NoPermission("no", "be root")])
def test_one_that_cannot_be_signalled_does_not_keep_the_others(told: Told, error: GpushareError) -> None:
    told.fails = {("SIGSTOP", PID): error, ("SIGCONT", PID): error}
    pauser = told.pauser(lock=False)
    pauser.pause()
    pauser.resume()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD), ("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_whoever_has_got_a_pid_since_gets_no_signal(told: Told) -> None:
    pauser = told.pauser(lock=False)
    pauser.pause()
    told.since()
    told.starts[CHILD] = 6.0
    pauser.resume()
    assert told.since() == [("SIGCONT", PID)]
    assert not pauser.paused


def test_whoever_gets_a_pid_after_the_look_gets_no_signal(told: Told) -> None:
    def taken(look: Any) -> Any:
        def looked(pid: int) -> Any:
            found = look(pid)
            told.starts[pid] = found.started + 1
            return found

        return looked

    for name in ("describe", "identity"):
        setattr(told.host.processes, name, taken(getattr(told.host.processes, name)))
    told.pauser(lock=False).pause()
    resume_all(told.host, [PID], mps=True)
    assert told.since() == []


def test_only_who_has_a_cuda_context_is_locked(told: Told) -> None:
    told.on_gpu = [
        GpuProcess(pid=OTHER, compute=True),
        GpuProcess(pid=PID, graphics=True),
        GpuProcess(pid=CHILD, mps=True),
    ]
    told.pauser().pause()
    assert told.since() == [("lock", CHILD)]


@pytest.mark.parametrize("said", [None, [], [GpuProcess(pid=OTHER, compute=True)], NotSupported("no", "no")])
def test_where_nobody_of_it_is_on_the_gpu_nothing_is_done(told: Told, said: Any) -> None:
    told.on_gpu = said
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == []
    assert not pauser.paused


def test_several_contexts_are_stopped_from_then_on(told: Told) -> None:
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    pauser = told.pauser()
    assert pauser.by == "lock"
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]
    assert pauser.by == "stop"
    pauser.resume()
    told.on_gpu = [GpuProcess(pid=PID, compute=True)]
    told.since()
    pauser.pause()
    # Not by turns: a process that is stopped would hang the lock.
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]


@pytest.mark.parametrize("error", [TimedOut("long", "wait"), OperationFailed("no", "see")])
def test_a_lock_of_which_nothing_is_known_is_undone(told: Told, error: GpushareError) -> None:
    told.fails = {("lock", PID): error}
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID)]
    assert not pauser.paused
    assert pauser.by == "lock"


def test_an_unlock_that_fails_is_tried_again(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.fails = {("unlock", PID): TimedOut("long", "wait")}
    pauser.resume()
    assert pauser.paused
    told.fails = {}
    pauser.resume()
    assert not pauser.paused
    assert told.since() == [("lock", PID), ("unlock", PID), ("unlock", PID)]


def test_a_program_that_died_while_it_was_locked_is_not_unlocked(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.dead = {PID}
    pauser.resume()
    assert told.since() == [("lock", PID)]
    assert not pauser.paused


def test_one_that_is_gone_before_the_lock_is_not_locked(told: Told) -> None:
    told.dead = {PID}
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == []
    assert not pauser.paused


def test_whom_to_lock_is_known_before_it_counts(told: Told) -> None:
    """Asking NVML takes time in which production waits: the lock comes first, and who else is there after it."""
    pauser = told.pauser()
    pauser.look()
    asked: list[str] = []
    told.host.nvml.processes = lambda _index: asked.append(f"after {[what for what, _ in told.done]}") or told.on_gpu
    pauser.pause()
    assert told.since() == [("lock", PID)]
    assert asked == ["after ['lock']"]


def test_a_context_that_came_since_the_look_is_stopped_with_the_rest(told: Told) -> None:
    pauser = told.pauser()
    pauser.look()
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID), ("SIGSTOP", PID), ("SIGSTOP", CHILD)]
    assert pauser.by == "stop"


def test_a_process_that_took_over_since_the_look_is_locked_instead(told: Told) -> None:
    pauser = told.pauser()
    pauser.look()
    told.on_gpu = [GpuProcess(pid=CHILD, compute=True)]
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID), ("lock", CHILD)]
    assert pauser.paused


def test_one_whose_unlock_fails_is_never_stopped(told: Told) -> None:
    pauser = told.pauser()
    pauser.look()
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    told.fails = {("unlock", PID): TimedOut("long", "wait")}
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID)]
    assert pauser.paused


@pytest.mark.parametrize("known", [True, False])
def test_a_lock_is_tried_once_a_look(told: Told, known: bool) -> None:
    told.fails = {("lock", PID): TimedOut("long", "wait")}
    pauser = told.pauser()
    if known:
        pauser.look()
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID)]


def test_who_is_on_the_gpu_is_not_asked_while_it_stands_still_nor_where_nobody_is_locked(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.host.nvml.processes = None
    pauser.look()
    told.pauser(lock=False).look()


@pytest.mark.parametrize("lock", [True, False])
def test_who_is_held_is_told_before_it_is_and_once(told: Told, lock: bool) -> None:
    pauser = told.pauser(lock=lock)
    pauser.tell = lambda pid, started: told.done.append((f"told {started:g}", pid))
    for _ in range(2):
        pauser.pause()
        pauser.resume()
    done = [what for what, pid in told.since() if pid == PID]
    assert done == ["told 5", *(["lock", "unlock"] if lock else ["SIGSTOP", "SIGCONT"]) * 2]


# -- as long as it is paused -----------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the clock: its one element is the time."""
    at = [100.0]
    monkeypatch.setattr(pauser_module, "time", SimpleNamespace(monotonic=lambda: at[0]))
    return at


def test_who_follows_a_locked_process_that_has_ended_is_locked_too(told: Told, clock: list[float]) -> None:
    """A shell that starts one CUDA program after the other: else the second would run as long as production works."""
    pauser = told.pauser()
    told.on_gpu = [GpuProcess(pid=CHILD, compute=True)]
    pauser.pause()
    told.dead, told.family[PID] = {CHILD}, [PID, GRANDCHILD]
    told.on_gpu = []
    clock[0] += 1
    pauser.pause()
    assert not pauser.paused
    told.on_gpu = [GpuProcess(pid=GRANDCHILD, compute=True)]
    clock[0] += 1
    pauser.pause()
    assert pauser.paused
    assert told.since() == [("lock", CHILD), ("lock", GRANDCHILD)]


def test_who_takes_over_at_once_is_locked_too(told: Told, clock: list[float]) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.dead, told.on_gpu = {PID}, [GpuProcess(pid=CHILD, compute=True)]
    clock[0] += 1
    pauser.pause()
    assert told.since() == [("lock", PID), ("lock", CHILD)]


def test_a_second_context_that_comes_while_the_first_is_locked_is_stopped_with_it(
    told: Told, clock: list[float]
) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    clock[0] += 1
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID), ("SIGSTOP", PID), ("SIGSTOP", CHILD)]


def test_a_gpu_that_does_not_answer_changes_nothing_in_a_pause(told: Told, clock: list[float]) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.on_gpu = OperationFailed("no", "see")
    clock[0] += 1
    pauser.pause()
    assert told.since() == [("lock", PID)]
    assert pauser.paused


def test_who_was_continued_by_others_is_stopped_again(told: Told, clock: list[float]) -> None:
    pauser = told.pauser(lock=False)
    pauser.pause()
    told.stopped = {CHILD}
    told.since()
    clock[0] += 1
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID)]
    pauser.resume()
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_who_was_started_between_the_list_and_the_stop_is_stopped_too(told: Told) -> None:
    lists = iter([[PID], [PID, CHILD], [PID, CHILD]])
    told.host.processes.descendants = lambda _pid: next(lists)
    pauser = told.pauser(lock=False)
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]


def test_a_program_that_cannot_be_stopped_and_starts_ever_more_does_not_hold_gpushare_up(told: Told) -> None:
    family: list[int] = [PID]
    told.host.processes.descendants = lambda _pid: family.append(PID + len(family)) or list(family)  # type: ignore[func-returns-value]
    told.pauser(lock=False).pause()
    assert len(family) < 10


def test_who_is_there_is_not_asked_at_every_look(told: Told, clock: list[float]) -> None:
    """Neither while it stands still, nor while nobody of it is on the GPU yet: gpushare would take production's processor."""
    for on_gpu in ([], [GpuProcess(pid=PID, compute=True)]):
        asked: list[int] = []
        told.host.nvml.processes = lambda index, asked=asked, on_gpu=on_gpu: asked.append(index) or on_gpu
        pauser = told.pauser()
        for _ in range(100):
            clock[0] += TICK_SECONDS
            pauser.pause()
        assert 2 <= len(asked) <= 6


def test_after_a_resume_the_next_pause_does_not_wait(told: Told, clock: list[float]) -> None:
    pauser = told.pauser(lock=False)
    for _ in range(3):
        clock[0] += TICK_SECONDS
        pauser.pause()
        assert pauser.paused
        pauser.resume()
        assert not pauser.paused


def test_one_that_lost_its_context_is_not_held_for_locked_for_ever(told: Told) -> None:
    """A program that has become another (exec) while it was locked: the driver refuses the unlock for ever."""
    pauser = told.pauser()
    pauser.pause()
    told.locked, told.fails = set(), {("unlock", PID): OperationFailed("CUDA error 1", "see")}
    pauser.resume()
    assert not pauser.paused


def test_one_that_is_locked_and_cannot_be_unlocked_is_tried_again(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.fails = {("unlock", PID): OperationFailed("CUDA error 999", "see")}
    pauser.resume()
    assert pauser.paused


# -- what a gpushare that died left ----------------------------------------------------------------


def test_all_that_was_left_goes_on_out_of_the_stop_first(told: Told) -> None:
    told.family = {PID: [PID, CHILD], OTHER: [OTHER]}
    told.locked = {PID, OTHER}
    resume_all(told.host, [PID, OTHER], mps=False, checkpoint=told)
    assert told.since() == [
        ("SIGCONT", PID),
        ("SIGCONT", CHILD),
        ("SIGCONT", OTHER),
        ("unlock", PID),
        # The child was not locked: there is nothing to undo.
        ("unlock", OTHER),
    ]


def test_inside_mps_nothing_was_locked(told: Told) -> None:
    told.locked = {PID}
    resume_all(told.host, [PID], mps=True, checkpoint=told)
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_one_that_cannot_go_on_does_not_keep_the_others(told: Told) -> None:
    told.locked = {PID, CHILD}
    told.fails = {("SIGCONT", PID): NotFound("gone", "see"), ("unlock", PID): OperationFailed("no", "see")}
    resume_all(told.host, [PID], mps=False, checkpoint=told)
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD), ("unlock", PID), ("unlock", CHILD)]


def test_a_driver_that_cannot_be_asked_any_more_keeps_nobody_stopped(told: Told) -> None:
    """NVML of another version than the kernel's part, after an update: no lock then, but what was stopped goes on."""

    def fails() -> str:
        raise OperationFailed("driver/library version mismatch", "restart")

    told.host.nvml.driver_version = fails
    told.host.is_simulated = False
    resume_all(told.host, [PID], mps=False)
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]
