"""The signs that a production job works, look by look: a clock, a processor and a GPU that are told what to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.actions import pause
from gpushare.actions.pause import Activity, checkpoint_of
from gpushare.errors import NotSupported
from gpushare.host.checkpoint import Checkpoint
from gpushare.model import GpuProcess

PID, CHILD, OTHER = 100, 101, 200
LOOK = 0.02


class Told:
    """A production job as it is told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 0.0
        self.cpu: float | None = 0.0
        self.family = [PID]
        self.gpu: list[GpuProcess] | Exception | None = []
        self.asked_gpu = self.asked_family = 0
        host: Any = SimpleNamespace(
            processes=SimpleNamespace(descendants=self._descendants), nvml=SimpleNamespace(processes=self._processes)
        )
        device: Any = SimpleNamespace(gpu=SimpleNamespace(index=3))
        monkeypatch.setattr(pause, "cpu_seconds", lambda pids: self.cpu if list(pids) == self.family else None)
        self.activity = Activity(host, device, PID, clock=lambda: self.at)

    def _descendants(self, pid: int) -> list[int]:
        assert pid == PID
        self.asked_family += 1
        return self.family

    def _processes(self, index: int) -> list[GpuProcess] | None:
        assert index == 3
        self.asked_gpu += 1
        if isinstance(self.gpu, Exception):
            raise self.gpu
        return self.gpu

    def look(self, *, cpu: float | None = 0.0, after: float = LOOK) -> bool:
        """Look again after a while, in which so much CPU time was used (None: it cannot be read)."""
        self.at += after
        self.cpu = None if cpu is None else (self.cpu or 0.0) + cpu
        return self.activity.active()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Return a job that does nothing yet."""
    return Told(monkeypatch)


def on_gpu(pid: int, percent: int | None) -> GpuProcess:
    """Return a process that keeps the GPU so busy."""
    return GpuProcess(pid=pid, compute=True, sm_percent=percent)


def test_one_look_tells_nothing_and_two_ticks_in_few_looks_are_work(job: Told) -> None:
    assert not job.look(cpu=5.0)
    assert not job.look(cpu=0.01)
    assert job.look(cpu=0.01)


def test_one_tick_alone_may_be_a_timers(job: Told) -> None:
    job.look()
    assert not job.look(cpu=0.01)
    assert [job.look() for _ in range(5)] == [False] * 5


def test_a_quarter_of_a_processor_is_work_and_less_is_not(job: Told) -> None:
    for share, works in ((0.26, True), (0.24, False)):
        for _ in range(6):
            seen = job.look(cpu=share * 0.1, after=0.1)
        assert seen is works


def test_what_it_did_long_ago_does_not_count(job: Told) -> None:
    job.look()
    assert job.look(cpu=0.02)
    # Three looks back, and no more.
    assert [job.look() for _ in range(4)] == [True, True, False, False]


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
    job.gpu = [on_gpu(CHILD, 1)]
    assert job.look(after=0.5)


def test_the_gpu_tells_of_one_that_waits_without_the_processor(job: Told) -> None:
    job.gpu = [on_gpu(OTHER, 100), on_gpu(PID, 0)]
    assert not job.look(after=1.0)
    job.gpu = [on_gpu(PID, None)]
    assert not job.look(after=1.0)
    job.gpu = [on_gpu(PID, 1)]
    assert job.look(after=1.0)


@pytest.mark.parametrize("said", [None, NotSupported("no", "no")])
def test_a_gpu_that_tells_nothing_is_no_sign(job: Told, said: Any) -> None:
    job.gpu = said
    assert not job.look(after=1.0)
    # Its processor still is.
    assert job.look(cpu=1.0, after=1.0)


def test_a_processor_that_cannot_be_read_leaves_the_gpu_as_a_sign(job: Told) -> None:
    job.gpu = [on_gpu(PID, 40)]
    assert job.look(cpu=None, after=1.0)


def test_the_gpu_is_asked_only_now_and_then(job: Told) -> None:
    for _ in range(20):
        job.look()
    assert job.asked_gpu <= 3
    job.gpu = [on_gpu(PID, 40)]
    assert job.look(after=0.2)
    # In between the last answer holds.
    job.gpu = []
    assert job.look()
    assert not job.look(after=0.2)


def test_right_after_work_on_the_processor_the_gpus_late_samples_are_not_believed(job: Told) -> None:
    job.gpu = [on_gpu(PID, 90)]
    job.look()
    assert job.look(cpu=0.02)
    while job.look():
        pass
    stood_at = job.at
    # The samples still tell of the work that has ended.
    while job.at < stood_at + 1.3:
        assert not job.look(after=0.1)
    # A second and a half later they tell of now.
    assert job.look(after=0.3)


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
