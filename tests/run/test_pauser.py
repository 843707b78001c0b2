"""Pausing step by step, without processes: who is stopped, in which order, and what is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NoPermission, NotFound
from gpushare.run import pause as pauser_module
from gpushare.run.pause import resume_all
from gpushare.run.roles import TICK_SECONDS
from tests.clock import Clock
from tests.run.told_program import CHILD, GRANDCHILD, OTHER, PID, Told


def test_all_of_a_program_are_stopped_and_each_goes_on(told: Told) -> None:
    pauser = told.pauser()
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
    pauser = told.pauser()
    pauser.pause()
    pauser.resume()
    assert told.since() == [("SIGSTOP", PID), ("SIGCONT", PID)]


@pytest.mark.parametrize("error", [NotFound("gone", "see"), NoPermission("no", "be root")])
def test_one_that_cannot_be_signalled_does_not_keep_the_others(told: Told, error: GpushareError) -> None:
    told.fails = {("SIGSTOP", PID): error, ("SIGCONT", PID): error}
    pauser = told.pauser()
    pauser.pause()
    pauser.resume()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD), ("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_whoever_has_got_a_pid_since_gets_no_signal(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.since()
    told.starts[CHILD] = 6.0
    pauser.resume()
    assert told.since() == [("SIGCONT", PID)]
    assert not pauser.paused


def test_whoever_gets_a_pid_after_the_look_gets_no_signal(told: Told) -> None:
    def taken(look: Any) -> Any:
        def looked(pid: int) -> Any:
            channels = look(pid)
            told.starts[pid] = channels.started + 1
            return channels

        return looked

    for name in ("describe", "identity"):
        setattr(told.host.processes, name, taken(getattr(told.host.processes, name)))
    told.pauser().pause()
    resume_all(told.host, [PID])
    assert told.since() == []


def test_who_is_held_is_told_before_it_is_and_once(told: Told) -> None:
    pauser = told.pauser()
    pauser.tell = lambda pid, started: told.done.append((f"told {started:g}", pid))
    for _ in range(2):
        pauser.pause()
        pauser.resume()
    assert [event for event, pid in told.since() if pid == PID] == ["told 5", *["SIGSTOP", "SIGCONT"] * 2]


# -- as long as it is paused -----------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(pauser_module, "time", SimpleNamespace(monotonic=clock))
    return clock


def test_who_was_continued_by_others_is_stopped_again(told: Told, clock: Clock) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.stopped = {CHILD}
    told.since()
    clock.now += 1
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID)]
    pauser.resume()
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_who_was_started_between_the_list_and_the_stop_is_stopped_too(told: Told) -> None:
    lists = iter([[PID], [PID, CHILD], [PID, CHILD]])
    told.host.processes.descendants = lambda _pid: next(lists)
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]


def test_a_program_that_cannot_be_stopped_and_starts_ever_more_does_not_hold_gpushare_up(told: Told) -> None:
    family: list[int] = [PID]
    told.host.processes.descendants = lambda _pid: family.append(PID + len(family)) or list(family)  # type: ignore[func-returns-value]
    told.pauser().pause()
    assert len(family) < 10


def test_after_a_resume_the_next_pause_does_not_wait(told: Told, clock: Clock) -> None:
    pauser = told.pauser()
    for _ in range(3):
        clock.now += TICK_SECONDS
        pauser.pause()
        assert pauser.paused
        pauser.resume()
        assert not pauser.paused


# -- what a gpushare that died left ----------------------------------------------------------------


def test_all_that_was_left_goes_on_and_one_that_cannot_does_not_keep_the_others(told: Told) -> None:
    told.family = {PID: [PID, CHILD], OTHER: [OTHER]}
    told.fails = {("SIGCONT", PID): NotFound("gone", "see")}
    resume_all(told.host, [PID, OTHER])
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD), ("SIGCONT", OTHER)]
