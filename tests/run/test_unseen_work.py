"""Work under MPS that no CPU shows: a clock, and a GPU that is told what it does while the other stands still."""

from __future__ import annotations

import pytest

from gpushare.run.production import UnseenWork

TICK = 0.01


class Pair:
    """Production and another job beside it, which stands still as long as production is taken to work, and 0.3 s more."""

    def __init__(self) -> None:
        self.at, self.busy, self.seen, self.alone, self.attached = 100.0, 0.0, False, True, True
        # The other's queue goes on for so long after its stop.
        self.queue = 0.0
        self.still, self._last, self._stopped_at = False, -1.0, 0.0
        self._samples: list[float] = []
        self.unseen = UnseenWork(self._activity, lambda: self.alone)

    def _activity(self) -> float | None:
        taken, self._samples = self._samples, []
        return sum(taken) / len(taken) if taken else None

    def run(self, seconds: float) -> float:
        """Let time pass; return for what share of it the other stood still."""
        still = steps = 0
        for _ in range(round(seconds / TICK)):
            self.at += TICK
            own = 90.0 if not self.still or self.at - self._stopped_at < self.queue else 0.0
            self._samples.append(min(100.0, self.busy + (own if self.attached else 0.0)))
            works = self.unseen.works(self.at, seen=self.seen, still=self.still or not self.attached)
            self._last = self.at if works else self._last
            before, self.still = self.still, self.at - self._last < 0.3
            self._stopped_at = self._stopped_at if before or not self.still else self.at
            still, steps = still + self.still, steps + 1
        return still / steps


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_beside_an_idle_production_job_it_is_looked_at_more_and_more_seldom(pair: Pair) -> None:
    # After 2, 4, 8 ... seconds, each for 0.3 s.
    assert pair.run(30) < 0.06
    assert pair.run(300) < 0.01
    assert not pair.unseen.found


def test_work_before_the_other_is_on_the_gpu_is_seen(pair: Pair) -> None:
    pair.attached, pair.busy = False, 40.0
    pair.run(1)
    assert pair.run(5) == 1.0
    assert pair.unseen.found


def test_the_other_stands_still_as_long_as_production_works_and_goes_on_then(pair: Pair) -> None:
    pair.run(3)
    pair.busy = 40.0
    pair.run(70)
    assert pair.run(20) == 1.0
    pair.busy = 0.0
    pair.run(0.5)
    assert pair.run(1.4) == 0.0
    # From now on it is looked at every 1.5 to 6 s.
    assert pair.run(60) < 0.1
    pair.busy = 40.0
    pair.run(6.5)
    assert pair.run(5) == 1.0


def test_a_queue_of_the_other_itself_is_not_productions_work(pair: Pair) -> None:
    pair.queue = 0.25
    assert pair.run(60) < 0.06
    assert not pair.unseen.found


def test_what_the_cpu_shows_is_work_and_no_unseen_work(pair: Pair) -> None:
    pair.run(1)
    pair.seen, pair.busy = True, 80.0
    pair.run(0.1)
    assert pair.run(10) == 1.0
    pair.seen, pair.busy = False, 0.0
    pair.run(0.5)
    assert pair.run(1) == 0.0
    assert not pair.unseen.found


def test_beside_others_the_gpu_tells_nothing_of_production(pair: Pair) -> None:
    pair.alone, pair.busy = False, 80.0
    assert pair.run(30) == 0.0
    pair.seen = True
    pair.run(0.1)
    assert pair.run(1) == 1.0
    pair.seen = False
    pair.run(0.5)
    assert pair.run(10) == 0.0
    # They have gone.
    pair.alone = True
    pair.run(70)
    assert pair.run(5) == 1.0


def test_a_gpu_that_tells_nothing_is_no_work(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.unseen, "_activity", lambda: None)
    pair.busy = 80.0
    assert pair.run(60) < 0.06
