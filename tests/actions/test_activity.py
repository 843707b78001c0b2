"""The signs that a production job works, look by look: a clock, a processor and a GPU that are told what to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.actions import production_activity as module
from gpushare.actions.pause import checkpoint_of
from gpushare.actions.production_activity import Activity
from gpushare.host.checkpoint import Checkpoint
from gpushare.host.cpu_time import CpuTime

PID, CHILD, OTHER = 100, 101, 200
LOOK = 0.01
# The clock that only rises and the time of day begin at different times.
EPOCH = 1e6


class Told:
    """A production job as it is told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 10.0
        self.cpu: float | None = 0.0
        self.exact = True
        self.family = [PID]
        # Samples of the GPU: when, and of whom.
        self.samples: list[tuple[float, int]] = []
        self.tells = True
        self.asked_gpu = self.asked_family = 0
        host: Any = SimpleNamespace(processes=SimpleNamespace(descendants=self._descendants), nvml="nvml")
        device: Any = SimpleNamespace(gpu=SimpleNamespace(index=3))
        monkeypatch.setattr(module, "cpu_time", self._cpu_time)
        monkeypatch.setattr(module, "busy_since", self._busy_since)
        self.activity = Activity(host, device, PID, clock=lambda: self.at, wall=lambda: EPOCH + self.at)

    def _descendants(self, pid: int) -> list[int]:
        assert pid == PID
        self.asked_family += 1
        return self.family

    def _cpu_time(self, pids: Any) -> CpuTime | None:
        assert list(pids) == self.family
        return None if self.cpu is None else CpuTime(self.cpu, self.exact)

    def _busy_since(self, nvml: Any, index: int, since: float) -> set[int] | None:
        assert (nvml, index) == ("nvml", 3)
        self.asked_gpu += 1
        return {pid for at, pid in self.samples if EPOCH + at >= since} if self.tells else None

    def look(self, *, cpu: float | None = 0.0, after: float = LOOK, gpu: int | None = None) -> bool:
        """Look again after a while, in which so much CPU time was used (None: it cannot be read), and the GPU by whom."""
        self.at += after
        self.cpu = None if cpu is None else (self.cpu or 0.0) + cpu
        self.samples += [] if gpu is None else [(self.at, gpu)]
        return self.activity.active()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Return a job that does nothing yet."""
    return Told(monkeypatch)


def test_one_look_tells_nothing_and_a_few_milliseconds_of_cpu_are_work(job: Told) -> None:
    assert not job.look(cpu=5.0)
    assert not job.look(cpu=0.004)
    assert job.look(cpu=0.004)
    # The last 20 to 30 ms count, and no more.
    assert [job.look() for _ in range(4)][2:] == [False] * 2


def test_work_is_seen_within_two_looks(job: Told) -> None:
    for _ in range(5):
        assert not job.look()
    assert job.look(cpu=LOOK)


def test_in_ticks_one_alone_may_be_a_timers(job: Told) -> None:
    job.exact = False
    job.look()
    assert not job.look(cpu=0.01)
    assert [job.look() for _ in range(10)] == [False] * 10
    assert not job.look(cpu=0.01)
    assert job.look(cpu=0.01)
    # What it did long ago does not count.
    seen = [job.look() for _ in range(10)]
    assert seen == sorted(seen, reverse=True)
    assert 3 <= seen.count(True) <= 6


@pytest.mark.parametrize("exact", [True, False])
def test_a_quarter_of_a_processor_is_work_and_less_is_not(job: Told, exact: bool) -> None:
    job.exact = exact
    for share, works in ((0.26, True), (0.24, False)):
        for _ in range(6):
            seen = job.look(cpu=share * 0.1, after=0.1)
        assert seen is works


def test_a_child_that_ends_takes_its_time_with_it_and_that_is_no_work(job: Told) -> None:
    job.cpu = 9.0
    job.look()
    assert not job.look(cpu=-4.0)


def test_children_are_looked_for_once_a_second(job: Told) -> None:
    job.look(after=1.0)
    for _ in range(10):
        job.look()
    assert job.asked_family == 1
    job.family = [PID, CHILD]
    job.look(after=1.0)
    assert job.asked_family == 2
    assert job.look(after=0.5, gpu=CHILD)


def test_the_gpu_tells_of_one_that_waits_without_the_processor(job: Told) -> None:
    assert not job.look(after=1.0, gpu=OTHER)
    assert job.look(after=1.0, gpu=PID)


def test_a_gpu_that_tells_nothing_is_no_sign(job: Told) -> None:
    job.tells = False
    assert not job.look(after=1.0)
    # Its processor still is.
    assert job.look(cpu=1.0, after=1.0)


def test_a_processor_that_cannot_be_read_leaves_the_gpu_as_a_sign(job: Told) -> None:
    assert job.look(cpu=None, after=1.0, gpu=PID)


def test_the_gpu_is_asked_only_now_and_then(job: Told) -> None:
    for _ in range(40):
        job.look()
    assert job.asked_gpu <= 3
    assert job.look(after=0.2, gpu=PID)
    # In between the last answer holds.
    job.samples = []
    assert job.look()
    assert not job.look(after=0.2)


def test_samples_of_work_that_the_processor_showed_are_not_believed_after_it(job: Told) -> None:
    """Else each piece of work would hold the other job up for another second or two."""
    job.look()
    for _ in range(20):
        assert job.look(cpu=LOOK, gpu=PID)
    job.look()
    # The driver still samples the work that has ended, for up to a second, and keeps its samples for longer.
    assert not any(job.look(after=0.05, gpu=PID) for _ in range(19))
    assert not any(job.look(after=0.05) for _ in range(100))
    # One that was taken later tells of new work.
    assert job.look(after=0.2, gpu=PID)


def test_a_sample_is_believed_for_a_second(job: Told) -> None:
    assert job.look(after=1.0, gpu=PID)
    seen = [job.look(after=0.1) for _ in range(20)]
    assert seen == sorted(seen, reverse=True)
    assert 8 <= seen.count(True) <= 12


@pytest.mark.parametrize(
    ("driver", "simulated", "locks"),
    [
        ("570.86.10", False, True),
        ("580.159.04", False, True),
        ("569.99", False, False),
        ("535.1", False, False),
        ("", False, False),
        (None, False, False),
        ("unknown", False, False),
        ("580.159.04", True, False),
    ],
)
def test_locks_are_of_driver_570_and_later(driver: str | None, simulated: bool, locks: bool) -> None:
    host: Any = SimpleNamespace(nvml=SimpleNamespace(driver_version=lambda: driver), is_simulated=simulated)
    assert isinstance(checkpoint_of(host), Checkpoint) is locks
