"""When an opportunistic job may run beside a production job: first idle detection, then one-sided control. Pure.

A full pause while production works protects it; duty cycles are far worse than a cap (H200: locked 80 ms of 100, the
tail of a 10 ms service was still 5 times as long). So without a measure of production's loss the answer is all or
nothing, and only where its own rate is known is a share of the time given away while it works.
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


@dataclass
class Share:
    """The share of the time that the opportunistic job gets while production works: additive up, multiplicative down.

    TGS's shape, one-sided: production that is faster than expected is no reason to slow down. ``budget`` is the loss of
    its rate that production bears.
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
