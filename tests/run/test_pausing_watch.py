"""The watch that pauses a program, look by look: when it stands still, when it goes on, what is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.errors import TimedOut
from gpushare.model import GpuProcess
from gpushare.run import pause as pauser_module
from gpushare.run import roles as module
from gpushare.run.pause import Pacer
from gpushare.run.production import ProductionJob
from gpushare.run.roles import TICK_SECONDS, PausingShare, PausingWatch
from tests.run.told_program import CHILD, GRANDCHILD, OTHER, PID, Told


class Inner:
    """The watch below, which notes when it is asked."""

    program_pid, attached, outside, pending, daemon_gone = PID, {PID}, {CHILD}, {GRANDCHILD}, True

    def __init__(self) -> None:
        self.looks: list[str] = []

    def look(self) -> None:
        self.looks.append("look")

    def settle(self) -> None:
        self.looks.append("settle")

    def wait(self) -> float:
        return 1.0

    def clients(self) -> set[int]:
        return {OTHER}


class Watched:
    """A watch with a clock, a production job and a pause that a test sets."""

    def __init__(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.active, self.alive = 100.0, False, True
        self.inner, self.said = Inner(), []
        for one in (module, pauser_module):
            monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: self.at))
        production: Any = SimpleNamespace(active=lambda: self.active, lives=lambda: self.alive)
        inner: Any = self.inner
        self.watch = PausingWatch(inner, told.pauser(), production, Pacer(quiet_seconds=0.3), tell=self.said.append)

    def look(self, *, after: float = 0.0, active: bool = False) -> bool:
        """Look after a while; return whether the program stands still."""
        self.at += after
        self.active = active
        self.watch.look()
        return self.watch.pauser.paused


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
    assert watched.watch.pauses == 2
    # Told only what is new.
    assert watched.said == [(0, False), (1, True), (1, False), (2, True)]


def test_work_that_the_cpu_does_not_show_is_asked_for_with_what_is_known(watched: Watched) -> None:
    asked: list[tuple[float, bool, bool]] = []
    answers = iter([False, True, True, False, False])

    class Unseen:
        def works(self, at: float, *, seen: bool, still: bool) -> bool:
            asked.append((at - 100.0, seen, still))
            return next(answers)

    unseen: Any = Unseen()
    watched.watch.unseen = unseen
    watched.inner.attached = set()
    assert not watched.look()
    watched.inner.attached = {PID}
    assert watched.look(after=1, active=True)
    assert watched.look(after=1)
    assert not watched.look(after=1)
    watched.alive = False
    watched.look(after=0.5)
    # Nobody asks what one does that has ended.
    watched.look(after=2)
    assert asked == [(0, False, True), (1, True, False), (2, False, True), (3, False, True), (3.5, False, False)]


def test_what_could_not_be_paused_is_not_counted_as_a_pause(watched: Watched, told: Told) -> None:
    told.fails = {("lock", PID): TimedOut("long", "wait")}
    assert not watched.look(active=True)
    assert watched.watch.pauses == 0
    told.fails = {}
    assert watched.look(active=True)
    assert watched.watch.pauses == 1


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
    watched.watch.release()
    assert not watched.look(active=True)
    assert told.since() == [("lock", PID), ("unlock", PID)]


@pytest.mark.parametrize("lock", [True, False])
def test_what_an_ended_program_leaves_behind_goes_on(told: Told, monkeypatch: pytest.MonkeyPatch, lock: bool) -> None:
    """A worker in a session of its own outlives the program, and gpushare, which would have let it go on."""
    told.on_gpu = [GpuProcess(pid=CHILD, compute=True)]
    watched = Watched(told, monkeypatch)
    watched.watch.pauser = told.pauser(lock=lock)
    assert watched.look(active=True)
    told.dead = {PID}
    told.since()
    watched.watch.settle()
    assert ("unlock" if lock else "SIGCONT", CHILD) in told.since()
    assert not watched.look(active=True)


def test_one_pause_counts_once_however_long_it_is(watched: Watched, told: Told) -> None:
    for _ in range(5):
        assert watched.look(active=True, after=0.5)
    assert watched.watch.pauses == 1
    assert told.since() == [("lock", PID)]


def test_the_watch_below_looks_in_its_own_time(watched: Watched) -> None:
    watched.watch.pauser.look = lambda: watched.inner.looks.append("who")  # type: ignore[method-assign]
    for _ in range(5):
        watched.look(after=0.2)
    assert watched.inner.looks == ["look", "who"]
    watched.look(after=0.2)
    assert watched.inner.looks == ["look", "who"] * 2
    assert watched.watch.wait() == TICK_SECONDS
    watched.watch.settle()
    assert watched.inner.looks == [*["look", "who"] * 2, "settle"]
    assert watched.said[-1] is None


def test_its_facts_are_those_of_the_watch_below(watched: Watched) -> None:
    watch = watched.watch
    assert (watch.program_pid, watch.attached, watch.outside) == (PID, {PID}, {CHILD})
    assert (watch.pending, watch.daemon_gone, watch.clients()) == ({GRANDCHILD}, True, {OTHER})


def job_of(told: Told) -> ProductionJob:
    """Return a production job of a PID."""
    return ProductionJob(told.host, told.device, OTHER, 7.0)


def test_a_share_hands_on_all_but_the_watch(told: Told) -> None:
    closed: list[bool] = []
    inner: Any = SimpleNamespace(
        device=told.device,
        guarded=("a", "b"),
        meter="meter",
        environment=lambda base: {**base, "X": "1"},
        watch=lambda _pid: Inner(),
        close=lambda *, program_lives=False: closed.append(program_lives) or True,
    )
    share = PausingShare(inner, told.host, job_of(told), None)
    assert (share.device, share.guarded, share.meter) == (told.device, ("a", "b"), "meter")
    assert share.environment({"A": "0"}) == {"A": "0", "X": "1"}
    assert share.close(program_lives=True) is True
    assert share.close() is True
    assert closed == [True, False]
