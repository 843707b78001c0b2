"""The watch whose slice follows production, look by look: what is read, wanted, held back and told."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.run import group as module
from gpushare.run.adapt import LEAST_US, MOST_US
from gpushare.run.group import AdaptedSlice
from gpushare.run.jobs import PrintedRate


class Group:
    """The slice of the group, which notes what is wanted, and the watch over the program."""

    program_pid = 7

    def __init__(self) -> None:
        self.wanted: list[int] = []
        self.news: list[str] = []
        self.troubles: list[str] = []
        self.attached: dict[int, int] = {7: 8}
        self.gave_up = False
        described = SimpleNamespace(uid=os.geteuid())
        self.host = SimpleNamespace(processes=SimpleNamespace(describe=lambda _pid: described))

    def set_wanted(self, microseconds: int) -> None:
        self.wanted.append(microseconds)

    def tell(self, _pid: int, _started: int | None) -> None:
        """Tell nobody."""


class Watched:
    """A watch with a clock and a production job that a test sets."""

    def __init__(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.log, self.group, self.paused = 100.0, log, Group(), False
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.at))
        self.alive = True
        self.production: Any = SimpleNamespace(pid=1, title="'web'", lives=lambda: self.alive, rate=lambda: self.rate)
        self.rate: PrintedRate | None = PrintedRate(str(log), "rate=([0-9.]+)")
        pauser: Any = SimpleNamespace(
            pause=lambda: setattr(self, "paused", True), resume=lambda: setattr(self, "paused", False), tell=None
        )
        group: Any = self.group
        self.part = AdaptedSlice(group, self.production, 0.97, pauser)
        self.part.started(group)

    def run(self, seconds: float, rate: float | None) -> None:
        """Let time pass, in which production prints its rate ten times a second, unless it prints nothing."""
        for _ in range(round(seconds * 10)):
            self.at = round(self.at + 0.1, 6)
            if rate is not None:
                with self.log.open("a") as file:
                    file.write(f"rate={rate}\n")
            assert not self.part.poll()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    log = tmp_path / "web.log"
    log.touch()
    return Watched(log, monkeypatch)


def test_it_is_stopped_for_the_baseline_and_then_goes_on(watched: Watched) -> None:
    watched.run(0.2, 50)
    assert watched.paused
    assert watched.group.wanted[-1] == LEAST_US
    watched.run(4, 50)
    assert not watched.paused
    assert watched.group.wanted[-1] > LEAST_US


def test_before_it_is_on_the_gpu_it_is_not_stopped(watched: Watched) -> None:
    watched.group.attached = {}
    watched.run(1, 50)
    assert not watched.paused
    assert set(watched.group.wanted) == {LEAST_US}


def test_a_fall_stops_it_again(watched: Watched) -> None:
    watched.run(8, 50)
    assert not watched.paused
    watched.run(1.2, 30)
    assert watched.paused
    watched.run(4, 30)
    assert not watched.paused


def test_without_production_it_has_the_longest_slice_and_runs(watched: Watched) -> None:
    watched.run(0.5, 50)
    assert watched.paused
    watched.alive = False
    watched.run(1.5, None)
    assert not watched.paused
    assert watched.group.wanted[-1] == MOST_US


def test_production_that_was_started_again_is_read_from_its_new_log(watched: Watched, tmp_path: Path) -> None:
    watched.run(5, 50)
    watched.production.pid = 2
    watched.log = tmp_path / "new.log"
    watched.log.touch()
    watched.rate = PrintedRate(str(watched.log), "rate=([0-9.]+)")
    watched.run(1.2, 70)
    assert watched.paused
    watched.run(4, 70)
    assert not watched.paused
    watched.production.pid, watched.rate = 3, None
    watched.run(3, 70)
    assert watched.group.troubles == ["'web' was started again without --metric: the slice is the least"]
    assert watched.group.wanted[-1] == LEAST_US


@pytest.mark.parametrize(("seconds", "stopped"), [(8, False), (0.2, True)])
def test_production_started_again_without_a_metric_leaves_the_least_and_lets_it_run(
    watched: Watched, seconds: float, *, stopped: bool
) -> None:
    watched.run(seconds, 50)
    assert watched.paused is stopped
    assert (watched.group.wanted[-1] > LEAST_US) is not stopped
    watched.production.pid, watched.rate = 2, None
    watched.run(3, None)
    assert not watched.paused
    assert watched.group.wanted[-1] == LEAST_US


def test_a_log_that_is_gone_is_told_once_and_leaves_the_least(watched: Watched) -> None:
    watched.log.unlink()
    watched.run(40, None)
    (told,) = watched.group.troubles
    assert "does not exist: the time-slice is 20us until it can be read" in told
    assert watched.group.wanted[-1] == LEAST_US
    assert not watched.paused


def test_a_pattern_that_takes_too_long_is_given_up(watched: Watched) -> None:
    watched.rate = PrintedRate(str(watched.log), "((?:a+)+)b")
    watched.run(1.1, None)
    with watched.log.open("a") as file:
        file.write("a" * 60 + "\n")
    watched.run(0.2, None)
    (told,) = watched.group.troubles
    assert "the time-slice stays at 20us" in told
    watched.run(3, None)
    assert watched.group.wanted[-1] == LEAST_US


def test_an_end_lets_it_continue(watched: Watched) -> None:
    watched.run(0.5, 50)
    assert watched.paused
    watched.part.release()
    assert not watched.paused
    watched.run(2, 50)
    assert not watched.paused
    watched.part.settle()


def test_what_production_kept_is_told_at_the_end(watched: Watched) -> None:
    watched.run(20, 50)
    watched.part.settle()
    (told,) = watched.group.news
    assert told == "'web' kept 100 % of its speed in the last minute"


def test_where_the_slice_cannot_be_set_the_pause_does_it(watched: Watched) -> None:
    watched.run(0.5, 50)
    watched.group.gave_up = True
    watched.run(0.3, 50)
    assert not watched.paused
