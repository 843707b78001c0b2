"""Ending clients: the wait for the drained queue, and what happens to the processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import NoPermission, NotFound, OperationFailed
from gpushare.host.activity import Activity
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.host.process import ProcessInfo
from gpushare.mps import kill
from gpushare.mps.kill import DRAIN_BOUND_SECONDS, end_clients, wait_for_drain
from gpushare.run.end import end_programs
from tests.clock import Clock
from tests.errors import fails

READING = 0.1


@dataclass
class FakeMeter:
    """Gives readings, the last one forever; each takes 0.1 s."""

    clock: Clock
    readings: Sequence[float | None]
    source: str = "gpm"
    asked: int = 0

    def read(self) -> Activity | None:
        self.clock.now += READING
        value = self.readings[min(self.asked, len(self.readings) - 1)]
        self.asked += 1
        return None if value is None else Activity(value, self.source)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(kill.time, "sleep", clock.sleep)
    return clock


@pytest.mark.parametrize(
    ("before", "readings", "source", "by", "seconds"),
    [
        (90.0, (0.0,), "gpm", "idle", 0.3),
        # Two readings have to agree, and three on a fall.
        (90.0, (80.0, 80.0, 0.0, 80.0, 0.0, 0.0), "gpm", "idle", 0.6),
        (95.0, (95.0, 95.0, 40.0, 41.0, 95.0, 40.0, 40.0, 40.0), "gpm", "fall", 0.8),
        # A small fall is the neighbours' own.
        *((before, (after,), "gpm", "bound", 5.0) for before, after in ((100.0, 81.0), (30.0, 21.0), (100.0, 100.0))),
        # A meter that cannot tell waits the bound; utilization lags behind.
        (None, (None,), "gpm", "bound", 5.0),
        (90.0, (0.0,), "utilization", "idle", 1.2),
        (None, (50.0, 0.0, 0.0), "gpm", "idle", 1.2),
        (None, (50.0, 5.0), "gpm", "bound", 5.0),
    ],
)
def test_when_the_queue_is_drained(
    clock: Clock, before: float | None, readings: tuple[float | None, ...], source: str, by: str, seconds: float
) -> None:
    first = None if before is None else Activity(before, source)
    drain = wait_for_drain(FakeMeter(clock, readings, source), first, 5.0, clock=clock)
    assert drain.by == by
    assert seconds - 0.001 <= drain.seconds <= seconds + READING + 0.001


def test_no_bound_at_all(clock: Clock) -> None:
    assert wait_for_drain(FakeMeter(clock, [0.0]), Activity(90.0, "gpm"), 0.0, clock=clock).seconds == 0.0


percents = st.one_of(st.none(), st.floats(0, 100))


@given(
    before=percents,
    readings=st.lists(percents, min_size=1, max_size=80),
    bound=st.floats(0, 8),
    source=st.sampled_from(["gpm", "utilization"]),
)
def test_never_too_early_and_never_too_late(
    before: float | None, readings: list[float | None], bound: float, source: str
) -> None:
    clock = Clock(100.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kill.time, "sleep", clock.sleep)
        meter = FakeMeter(clock, readings, source)
        first = None if before is None else Activity(before, source)
        drain = wait_for_drain(meter, first, bound, clock=clock)
    least = 0.25 if source == "gpm" and before is not None else 1.2
    assert drain.seconds >= min(least, bound) - 1e-9
    assert drain.seconds <= bound + READING + 1e-9
    assert drain.by in {"idle", "fall", "bound"}
    if drain.by == "idle":
        assert readings[min(meter.asked, len(readings)) - 1] <= 1.0


@dataclass
class FakeProcesses:
    """A process table of which each process does as it is told."""

    stopped: dict[int, bool] = field(default_factory=dict)
    log: list[tuple[int, int]] = field(default_factory=list)
    deaf: set[int] = field(default_factory=set)
    immortal: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    # Of those that did not start at 1.
    started: dict[int, int] = field(default_factory=dict)

    def describe(self, pid: int) -> ProcessInfo | None:
        return (
            ProcessInfo(pid=pid, stopped=self.stopped[pid], started=self.started.get(pid, 1))
            if pid in self.stopped
            else None
        )

    def identity(self, pid: int) -> Identity | None:
        return Identity(pid, self.started.get(pid, 1)) if pid in self.stopped else None

    def alive(self, pid: int, started: int | None = None) -> bool:
        return pid in self.stopped and started in {None, self.started.get(pid, 1)}

    def send_to(self, pid: int, started: int, number: int) -> None:
        if pid in self.stopped and started != self.started.get(pid, 1):
            raise NotFound("gone", "look")
        self.send(pid, number)

    def descendants(self, pid: int) -> list[int]:
        return [pid]

    def catches(self, pid: int, number: int) -> bool:
        return False

    def ignores(self, pid: int, number: int) -> bool:
        return False

    def send(self, pid: int, number: int) -> None:
        self.log.append((pid, number))
        if pid not in self.stopped:
            raise NotFound("gone", "look")
        if pid in self.others:
            raise NoPermission("not yours", "ask")
        if number == signal.SIGSTOP and pid not in self.deaf:
            self.stopped[pid] = True
        if number == signal.SIGCONT:
            self.stopped[pid] = False
        if number == signal.SIGKILL and pid not in self.immortal:
            del self.stopped[pid]


def ended(processes: FakeProcesses, pids: list[int], meter: Any, bound: float = DRAIN_BOUND_SECONDS) -> kill.Drain:
    host = cast("Host", type("FakeHost", (), {"processes": processes})())
    return end_clients(host, pids, meter, bound_seconds=bound)


@pytest.fixture
def idle(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> FakeMeter:
    monkeypatch.setattr(kill.time, "monotonic", clock)

    def one_reading(meter: FakeMeter, _before: object, bound: float) -> kill.Drain:
        meter.read()
        return kill.Drain(seconds=bound, by="idle")

    monkeypatch.setattr(kill, "wait_for_drain", one_reading)
    return FakeMeter(clock, [0.0])


def test_all_are_stopped_before_any_is_killed(idle: FakeMeter) -> None:
    processes = FakeProcesses({1: False, 2: False})
    ended(processes, [1, 2], idle, bound=0.5)
    assert processes.log == [(1, signal.SIGSTOP), (2, signal.SIGSTOP), (1, signal.SIGKILL), (2, signal.SIGKILL)]
    assert processes.stopped == {}


def test_one_that_is_stopped_already_is_not_stopped_again(idle: FakeMeter) -> None:
    processes = FakeProcesses({1: True})
    ended(processes, [1], idle, bound=0.5)
    assert processes.log == [(1, signal.SIGKILL)]


@pytest.mark.parametrize(("asked", "deaf"), [([1, 2], set()), ([1], {1})], ids=["gone", "deaf"])
def test_one_that_is_gone_or_that_no_stop_reaches_is_no_error(
    idle: FakeMeter, asked: list[int], deaf: set[int]
) -> None:
    processes = FakeProcesses({1: False}, deaf=deaf)
    ended(processes, asked, idle, bound=0.5)
    assert processes.stopped == {}


def test_who_has_got_the_pid_while_the_queue_drained_is_not_killed(
    idle: FakeMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = FakeProcesses({1: False, 2: False})

    def given_out_again(*_: object) -> kill.Drain:
        processes.stopped[1], processes.started[1] = False, 2.0
        return kill.Drain(seconds=0.1, by="idle")

    monkeypatch.setattr(kill, "wait_for_drain", given_out_again)
    ended(processes, [1, 2], idle)
    assert processes.stopped == {1: False}
    assert (1, signal.SIGKILL) not in processes.log


def test_who_has_got_the_pid_while_a_program_had_its_time_is_not_killed(tmp_path: Path) -> None:
    processes = FakeProcesses({1: False, 2: False}, immortal={2})

    def hurry() -> bool:
        processes.started[1] = 2.0
        processes.immortal.clear()
        return True

    directories = dict.fromkeys(("run_directories", "own_run_directories"), (tmp_path,))
    directories |= {"run_directory": tmp_path, "user_directories": tuple}
    host = cast("Host", type("FakeHost", (), {"processes": processes, **directories})())
    end_programs(host, [1, 2], set, None, number=signal.SIGTERM, hurry=hurry)
    assert processes.log == [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)]
    assert processes.stopped == {1: False}


class Interrupting(FakeMeter):
    """A meter at whose second reading Ctrl-C comes."""

    def read(self) -> Activity | None:
        if self.asked:
            raise KeyboardInterrupt
        return super().read()


def test_an_interruption_lets_those_that_ran_go_on(idle: FakeMeter) -> None:
    processes = FakeProcesses({1: False, 2: True})
    with pytest.raises(KeyboardInterrupt):
        ended(processes, [1, 2], Interrupting(idle.clock, [50.0]))
    # The second was stopped by somebody else: that stays so.
    assert processes.stopped == {1: False, 2: True}


def test_an_interruption_right_behind_the_stop(idle: FakeMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = FakeProcesses({1: False})
    proper = processes.send

    def send(pid: int, number: int) -> None:
        proper(pid, number)
        if number == signal.SIGSTOP:
            raise KeyboardInterrupt

    monkeypatch.setattr(processes, "send", send)
    with pytest.raises(KeyboardInterrupt):
        ended(processes, [1], idle)
    assert processes.stopped == {1: False}


def test_another_users_process_changes_nothing(idle: FakeMeter) -> None:
    processes = FakeProcesses({1: False, 2: False}, others={2})
    with pytest.raises(NoPermission):
        ended(processes, [1, 2], idle)
    assert processes.stopped == {1: False, 2: False}


def test_one_that_will_not_go_is_said(idle: FakeMeter) -> None:
    processes = FakeProcesses({1: False}, immortal={1})
    with fails(OperationFailed, "process_stays", match="process 1 was killed and still exists"):
        ended(processes, [1], idle, bound=0.5)


def test_a_zombie_is_not_waited_for(idle: FakeMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = FakeProcesses({1: False}, deaf={1})
    alive: Callable[..., bool] = lambda *_: False  # noqa: E731
    monkeypatch.setattr(processes, "alive", alive)
    begun = idle.clock.now
    ended(processes, [1], idle, bound=0.3)
    assert idle.clock.now - begun < 0.6
