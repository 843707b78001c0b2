"""The watch that pauses a program, look by look: when it stands still, when it goes on, what is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.run import pause as pauser_module
from gpushare.run import roles as module
from gpushare.run.roles import TICK_SECONDS, PauseForProduction
from tests.run.told_program import CHILD, PID, Told


class Watched:
    """A watch with a clock, a production job and a pause that a test sets."""

    def __init__(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.active = 100.0, False
        for each in (module, pauser_module):
            monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: self.at))
        production: Any = SimpleNamespace(works=lambda: self.active)
        self.watched: Any = SimpleNamespace(
            program_pid=PID,
            device=told.device,
            attached={PID},
            poll_interval=lambda: 1.0,
            tell=lambda _pid, _started: None,
        )
        self.part = PauseForProduction(told.host, production, pauser=told.pauser())
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


def test_its_processes_are_looked_for_in_the_time_of_the_watch(watched: Watched) -> None:
    looks: list[float] = []
    pauser: Any = watched.part.pauser
    pauser.find_processes = lambda: looks.append(watched.at)
    for _ in range(6):
        watched.look(after=0.2)
    assert looks == pytest.approx([100.2, 101.2])
    assert watched.part.due - watched.at == pytest.approx(TICK_SECONDS)
