"""When an opportunistic job may run beside a production job: first idle detection, then one-sided control. Pure.

A full pause while production works protects it; duty cycles are far worse than a cap for small kernels. So the answer is
`Pacer`, all or nothing; and, only where jobs compete for the memory's bandwidth, which no cap limits, `DutyPacer`, a share
of the time that was measured before. `Share`, the one-sided control of such a share, is the other shape that a controller
could have; its docstring has the figures for which no command uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Below this rise and fall of a tenth per step the share is nothing.
_LEAST: Final = 0.01


@dataclass
class Pacer:
    """All or nothing: stands still from the first sign of work until production has been quiet for a while.

    ``quiet_seconds``: shorter gaps between two requests are not idleness.
    """

    quiet_seconds: float = 0.3
    _last_active: float | None = None

    def may_run(self, at: float, *, active: bool) -> bool:
        """Return whether the opportunistic job may run at a time (seconds of a clock that only rises)."""
        if active:
            self._last_active = at
        return self._last_active is None or at - self._last_active >= self.quiet_seconds


# So short that a window of measuring has some, so long that stops and queues that drain cost little of it.
DUTY_SECONDS: Final = 0.5


@dataclass
class DutyPacer(Pacer):
    """Lets the opportunistic job run for a part of the time while production is active, and always while it is not.

    For jobs that compete for the memory's bandwidth: there a loss of production's rate is in proportion to the time, and
    no cap does better. Of small kernels, and of a tail, it costs far more; see `Share`.
    """

    percent: float = 100.0

    def may_run(self, at: float, *, active: bool) -> bool:
        """Return whether the opportunistic job may run at a time (seconds of a clock that only rises)."""
        return not active or at % DUTY_SECONDS >= (1 - self.percent / 100) * DUTY_SECONDS


@dataclass
class Share:
    """The share of the time that the opportunistic job gets while production works: additive up, multiplicative down.

    TGS's shape, one-sided: production that is faster than expected is no reason to slow down. ``budget`` is the loss of
    its rate that production bears.

    No command controls such a share. On an H200 (driver 580; a training loop of small kernels, or a service with a
    request every 10 ms, beside large matrix multiplications; relative to each alone) every share was worse than what
    is done instead:

    ===============================================  ===============  =============  ==================
    what the opportunistic job gets                  production rate  its p99        opportunistic rate
    ===============================================  ===============  =============  ==================
    outside MPS: runs 20 ms, is locked for 20 ms     .70              5.5x           .45
    outside MPS: runs 20 ms, is locked for 80 ms     .85              5.6x           .20
    under MPS: runs 20 ms, is stopped for 20 ms      .47              8.9x           .68
    outside MPS: full pause (`Pacer`)                .97              1.1x           0 while it works
    under MPS: all of the time, cap 60, low priority 1.03             0.98x          .71
    ===============================================  ===============  =============  ==================

    Where MPS serves, a cap gives more for nothing. Where it does not, a loss of 3 percent buys about .05 of the other
    job's rate, and the whole tail is lost with the first slice. It would also need production's own rate, read from
    what it prints: a reader between a production job and its output, whose death ends it. The control itself is kept
    as it was tested against a simulated pair of jobs: for who measures a GPU of which the figures say otherwise.
    """

    budget: float = 0.03
    least: float = 0.0
    most: float = 1.0
    share: float = 0.0
    slow_start: bool = field(default=True)

    def step(self, loss: float) -> float:
        """Return the share for the next period, after a period with this loss (0 to 1) of production's rate."""
        loss = max(0.0, loss)
        if loss >= 3 * self.budget:
            self.share, self.slow_start = self.share / 10, True
        elif loss > self.budget:
            # The first loss ends the fast growth.
            self.share, self.slow_start = (self.share / 1.5, False) if self.slow_start else (self.share * 0.92, False)
        else:
            self.share = self.share * 1.5 + 0.02 if self.slow_start else self.share + 0.02
        self.share = min(self.most, max(self.least, self.share))
        return self.share if self.share >= _LEAST else self.least
