"""An opportunistic job that leaves altogether: it is ended when production works, and started again when it rests.

REEF does the same with kernels (killed, and run again later); here it is the program, which must be able to start again,
for instance from a checkpoint. Unlike a pause, it leaves no memory on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any, Final

from gpushare.base.units import format_duration
from gpushare.base.values import dataclass
from gpushare.part import Part
from gpushare.run.production import ProductionJob
from gpushare.run.program import RunOptions

_TICK_SECONDS: Final = 0.01
_ALIVE_SECONDS: Final = 1.0
# So long production must be quiet; twice as long after each run that was ended early, because a start costs time too.
_FIRST_QUIET_SECONDS: Final = 2.0
_MOST_QUIET_SECONDS: Final = 60.0
_EARLY_SECONDS: Final = 10.0


class YieldToProduction(Part):
    """Ends the program once production works; ``yielded`` from then on."""

    def __init__(self, production: ProductionJob, clock: Callable[[], float] = time.monotonic) -> None:
        self._production, self._clock = production, clock
        self._due = self._alive_due = 0.0
        self._alive = True
        self.yielded = False

    @property
    def seconds(self) -> float:
        """Return how long until the next poll."""
        return self._due - self._clock()

    def works(self) -> bool:
        """Return whether production works now."""
        at = self._clock()
        self._due = at + _TICK_SECONDS
        if at >= self._alive_due:
            # Its PID may have been reused, or the job may have been started again under its name.
            self._alive, self._alive_due = self._production.lives(), at + _ALIVE_SECONDS
        return self._alive and self._production.active()

    def poll(self) -> bool:
        """Return whether the program is to be ended now."""
        self.yielded = self.yielded or self.works()
        return self.yielded


@dataclass
class Yielding:
    """Runs a program whenever production rests, until the program ends by itself.

    ``start`` runs it once with the given options and returns its exit code.
    """

    production: ProductionJob
    title: str
    options: RunOptions
    start: Callable[[RunOptions], Any]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _quiet: float = field(default=_FIRST_QUIET_SECONDS)

    def run(self) -> Any:
        """Run it, and return its exit code."""
        self._wait(first=True)
        while True:
            part, began = YieldToProduction(self.production, self.clock), self.clock()
            code = self.start(replace(self.options, parts=(*self.options.parts, part)))
            if not part.yielded:
                return code
            early = self.clock() - began < _EARLY_SECONDS
            self._quiet = min(2 * self._quiet, _MOST_QUIET_SECONDS) if early else _FIRST_QUIET_SECONDS
            self.say(
                f"ended, because {self.title} works; it starts again when {self.title} has rested for "
                f"{format_duration(self._quiet)}"
            )
            self._wait(first=False)

    def _wait(self, *, first: bool) -> None:
        """Wait until production has been quiet for long enough; at first, only until it is known to rest."""
        part, since = YieldToProduction(self.production, self.clock), self.clock()
        quiet, said = (_FIRST_QUIET_SECONDS if first else self._quiet), not first
        while self.clock() - since < quiet:
            if part.works():
                since = self.clock()
                if not said:
                    said = True
                    self.say(f"waits until {self.title} rests")
            self.sleep(_TICK_SECONDS)
