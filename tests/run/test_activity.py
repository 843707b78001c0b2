"""The signs that a production job works, look by look: a clock, a processor and a GPU that are told what to say."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.run import production as module
from gpushare.run.production import Activity

PID, CHILD, OTHER = 100, 101, 200
LOOK = 0.01
# The clock that only rises and the time of day begin at different times.
EPOCH = 1e6


class Told:
    """A production job as it is told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 10.0
        self.cpu: float | None = 0.0
        # What others of the family have used.
        self.others: dict[int, float | None] = {}
        self.wall_ahead = 0.0
        self.families: dict[int, list[int]] = {}
        self.family = [PID]
        # Samples of the GPU: when, and of whom.
        self.samples: list[tuple[float, int]] = []
        self.tells = True
        self.asked_gpu = self.asked_family = 0
        host: Any = SimpleNamespace(processes=SimpleNamespace(descendants=self._descendants), nvml="nvml")
        device: Any = SimpleNamespace(gpu=SimpleNamespace(index=3))
        monkeypatch.setattr(module, "cpu_time", self._cpu_time)
        monkeypatch.setattr(module, "samples_since", self._samples_since)
        self.activity = Activity(
            host, device, PID, clock=lambda: self.at, wall=lambda: EPOCH + self.wall_ahead + self.at
        )

    def _descendants(self, pid: int) -> list[int]:
        if pid in self.families:
            return self.families[pid]
        assert pid == PID
        self.asked_family += 1
        return self.family

    def _cpu_time(self, pid: int) -> float | None:
        assert pid in self.family
        return self.cpu if pid == PID else self.others.get(pid)

    def _samples_since(self, nvml: Any, index: int, since: float) -> list[tuple[int, int]] | None:
        assert (nvml, index) == ("nvml", 3)
        self.asked_gpu += 1
        # That of a process which has done nothing is no sign of work.
        samples = [(pid, 1) for at, pid in self.samples if EPOCH + self.wall_ahead + at >= since]
        return [*samples, (PID, 0)] if self.tells else None

    def look(self, *, cpu: float | None = 0.0, after: float = LOOK, gpu: int | None = None) -> bool:
        """Look again after a while, in which so much CPU time was used (None: it cannot be read), and the GPU by whom."""
        self.at += after
        self.cpu = None if cpu is None else (self.cpu or 0.0) + cpu
        self.samples += [] if gpu is None else [(self.at, gpu)]
        return self.activity.works()


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


def test_a_service_with_short_requests_works_too(job: Told) -> None:
    """Requests of 0.4 ms every 10 ms: a burst of work they are not, and under MPS there is no other sign."""
    seen = [job.look(cpu=0.0004) for _ in range(200)]
    assert seen.index(True) <= 52
    assert all(seen[52:])
    # Half a second without any, or a whole one by when it began.
    assert [job.look() for _ in range(110)][-1] is False


def test_an_idle_program_that_wakes_up_is_idle(job: Told) -> None:
    assert not any(job.look(cpu=0.0002) for _ in range(300))


def test_after_a_burst_its_own_time_is_no_light_work(job: Told) -> None:
    for _ in range(30):
        job.look(cpu=LOOK)
    # The last 20 to 30 ms still tell of it.
    assert not any([job.look() for _ in range(200)][3:])


def test_after_nobody_looked_for_a_while_light_work_is_told_anew(job: Told) -> None:
    """gpushare was stopped while production worked for 2 of 10 s: that is over."""
    for used in (2.0, 3.0, 9.0):
        for _ in range(60):
            job.look(cpu=0.0005)
        assert not job.look(cpu=used, after=10.0)
        assert not any(job.look() for _ in range(200))
    # What a slow machine makes of half a second still counts.
    assert [job.look(cpu=0.05, after=0.7) for _ in range(4)][-1] is True


def test_a_quarter_of_a_processor_is_work_and_less_is_not(job: Told) -> None:
    for share, works in ((0.26, True), (0.24, False)):
        for _ in range(6):
            seen = job.look(cpu=share * 0.1, after=0.1)
        assert seen is works


def test_a_child_that_ends_takes_its_time_with_it_and_that_is_no_work(job: Told) -> None:
    job.family, job.others = [PID, CHILD], {CHILD: 4.0}
    job.look()
    job.others = {}
    assert not job.look()
    assert not job.look()


def test_children_that_end_do_not_hide_the_work_of_the_others(job: Told) -> None:
    job.family = [PID, *range(300, 310)]
    job.others = dict.fromkeys(range(300, 310), 4.0)
    job.look(cpu=LOOK)
    job.look(cpu=LOOK)
    for pid in range(300, 310):
        del job.others[pid]
        assert job.look(cpu=LOOK)


def test_what_a_child_has_used_before_it_was_found_is_no_work_now(job: Told) -> None:
    job.look()
    job.family, job.others = [PID, CHILD], {CHILD: 0.5}
    assert not job.look(after=1.1)
    assert not any(job.look() for _ in range(3))
    job.others = {CHILD: 0.51}
    assert job.look()


def test_a_gpushare_that_production_has_started_is_not_production(job: Told) -> None:
    """Else the paused job's own work would pause it."""
    own, program = os.getpid(), 250
    job.family, job.families = [PID, CHILD, own, program], {own: [own, program]}
    job.others = {CHILD: 0.0, own: 0.0, program: 0.0}
    job.look()
    job.others = {CHILD: 0.0, own: 1.0, program: 1.0}
    assert not job.look(gpu=program)
    job.others = {CHILD: 1.0, own: 1.0, program: 1.0}
    assert job.look()


def test_a_clock_that_is_set_back_hides_no_work(job: Told) -> None:
    job.look()
    assert job.look(cpu=LOOK)
    job.wall_ahead = -3600.0
    job.look(after=3.0)
    assert job.look(after=0.2, gpu=PID)


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
