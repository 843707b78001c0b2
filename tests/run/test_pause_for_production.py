"""The watch that pauses a program, look by look: when it stands still, when it goes on, what is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.run import pause as pauser_module
from gpushare.run import roles as module
from gpushare.run.pause import Pacer
from gpushare.run.roles import TICK_SECONDS, PauseForProduction
from tests.run.told_program import CHILD, PID, Told


class Watched:
    """A watch with a clock, a production job and a pause that a test sets."""

    def __init__(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.active, self.alive = 100.0, False, True
        self.said: list[tuple[int, bool]] = []
        for each in (module, pauser_module):
            monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: self.at))
        production: Any = SimpleNamespace(active=lambda: self.active, lives=lambda: self.alive)
        monkeypatch.setattr(module, "note_pauses", lambda _, state: self.said.append((state.pauses, state.paused)))
        monkeypatch.setattr(module.PROGRAMS, "drop", lambda *_: None)
        self.watched: Any = SimpleNamespace(
            program_pid=PID,
            device=told.device,
            attached={PID},
            poll_interval=lambda: 1.0,
            tell=lambda _pid, _started: None,
        )
        self.part = PauseForProduction(told.host, production, pacer=Pacer(quiet_seconds=0.3), pauser=told.pauser())
        self.part.started(self.watched)

    def look(self, *, after: float = 0.0, active: bool = False) -> bool:
        """Look after a while; return whether the program stands still."""
        self.at += after
        self.active = active
        assert not self.part.poll()
        return self.part.pauser.paused


@pytest.fixture
def watched(told: Told, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return a watch over the program."""
    return Watched(told, monkeypatch)


def test_it_waits_until_production_has_been_quiet_for_a_while(watched: Watched) -> None:
    steps: Sequence[tuple[float, bool, bool]] = (
        (0.0, False, False),
        (0.02, True, True),
        (0.02, False, True),
        (0.2, False, True),
        (0.02, True, True),
        (0.2, False, True),
        (0.2, False, False),
        (0.02, True, True),
    )
    assert [watched.look(after=after, active=active) for after, active, _ in steps] == [still for *_, still in steps]
    assert watched.part.pauses == 2
    # Told only what is new.
    assert watched.said == [(0, False), (1, True), (1, False), (2, True)]


def test_what_could_not_be_paused_is_not_counted_as_a_pause(watched: Watched, told: Told) -> None:
    told.dead = {PID, CHILD}
    assert not watched.look(active=True)
    assert watched.part.pauses == 0


def test_when_production_has_ended_nobody_waits_any_longer(watched: Watched) -> None:
    assert watched.look(active=True)
    watched.alive = False
    # Its samples still tell of it: it may be alive.
    assert watched.look(active=True)
    assert not watched.look()


def test_who_has_got_the_pid_of_production_since_is_not_production(watched: Watched) -> None:
    assert watched.look(active=True)
    watched.alive = False
    assert watched.look(active=True, after=0.9)
    assert not watched.look(active=True, after=1.1)
    assert not watched.look(active=True, after=0.02)


def test_a_production_job_that_is_started_again_is_spared_again(watched: Watched) -> None:
    assert watched.look(active=True)
    watched.alive = False
    assert not watched.look(after=1.1)
    assert not watched.look(after=1.1, active=True)
    watched.alive = True
    assert watched.look(after=1.1, active=True)


def test_a_program_that_is_to_end_is_never_paused_again(watched: Watched, told: Told) -> None:
    assert watched.look(active=True)
    watched.part.release()
    assert not watched.look(active=True)
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD), ("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_what_an_ended_program_leaves_behind_goes_on(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in a session of its own outlives the program, and gpushare, which would have let it go on."""
    watched = Watched(told, monkeypatch)
    assert watched.look(active=True)
    told.dead = {PID}
    told.since()
    watched.part.settle()
    assert ("SIGCONT", CHILD) in told.since()
    assert not watched.look(active=True)


def test_one_pause_counts_once_however_long_it_is(watched: Watched, told: Told) -> None:
    for _ in range(5):
        assert watched.look(active=True, after=0.5)
    assert watched.part.pauses == 1
    assert {signal_name for signal_name, _ in told.since()} == {"SIGSTOP"}


def test_its_processes_are_looked_for_in_the_time_of_the_watch(watched: Watched) -> None:
    looks: list[float] = []
    pauser: Any = watched.part.pauser
    pauser.find_processes = lambda: looks.append(watched.at)
    for _ in range(6):
        watched.look(after=0.2)
    assert looks == pytest.approx([100.2, 101.2])
    assert watched.part.due - watched.at == pytest.approx(TICK_SECONDS)
