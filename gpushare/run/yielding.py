"""An opportunistic job that leaves altogether: it is ended when production works, and started again when it rests.

REEF does the same with kernels (killed, and run again later); here it is the program, which must be able to start again,
for instance from a checkpoint. Unlike a pause, it leaves no memory on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from gpushare.units import format_duration
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.run.production import ProductionJob
    from gpushare.run.program import Meter, RunOptions

_TICK_SECONDS: Final = 0.01
_ALIVE_SECONDS: Final = 1.0
# So long production must be quiet; twice as long after each run that was ended early, because a start costs time too.
_FIRST_QUIET_SECONDS: Final = 2.0
_MOST_QUIET_SECONDS: Final = 60.0
_EARLY_SECONDS: Final = 10.0


class YieldMeter:
    """Watches production while the program runs, as `Meter`; ``yielded`` once it works."""

    def __init__(
        self, production: ProductionJob, clock: Callable[[], float] = time.monotonic, inner: Meter | None = None
    ) -> None:
        """``inner`` watches the program too: its memory."""
        self._production, self._clock, self._inner = production, clock, inner
        self._due = self._alive_due = 0.0
        self._alive = True
        self.yielded = False

    @property
    def seconds(self) -> float:
        """Return how long until the next look."""
        own = max(0.0, self._due - self._clock())
        return own if self._inner is None else min(own, self._inner.seconds)

    @property
    def variables(self) -> Mapping[str, str]:
        return {} if self._inner is None else self._inner.variables

    def asked(self) -> None:
        """Tell the inner one."""
        if self._inner is not None:
            self._inner.asked()

    def grows(self) -> bool:
        return self._inner is not None and self._inner.grows()

    def enter(self, pid: int) -> None:
        """Do what the inner one has to do in the new process."""
        if self._inner is not None:
            self._inner.enter(pid)

    def started(self, pid: int) -> None:
        """Begin to watch a program."""
        if self._inner is not None:
            self._inner.started(pid)

    def works(self) -> bool:
        """Return whether production works now."""
        at = self._clock()
        self._due = at + _TICK_SECONDS
        if at >= self._alive_due:
            # Its PID may have been reused, or the job may have been started again under its name.
            self._alive, self._alive_due = self._production.lives(), at + _ALIVE_SECONDS
        return self._alive and self._production.active()

    def look(self) -> bool:
        """Return whether the program is to be ended now."""
        self.yielded = self.yielded or self.works()
        over = self._inner is not None and self._inner.seconds <= 0 and self._inner.look()
        return self.yielded or over

    def release(self) -> Mapping[int, int]:
        """Let the program continue."""
        return {} if self._inner is None else self._inner.release()

    def close(self) -> None:
        """Keep what the inner one holds: the program may start again."""

    def check(self) -> None:
        """Raise if the inner one has ended the program; to be ended for production is no error."""
        if self._inner is not None:
            self._inner.check()


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
        inner = self.options.meter
        try:
            return self._run(inner)
        finally:
            if inner is not None:
                inner.close()

    def _run(self, inner: Meter | None) -> Any:
        self._wait(first=True)
        while True:
            meter, began = YieldMeter(self.production, self.clock, inner), self.clock()
            code = self.start(replace(self.options, meter=meter))
            if not meter.yielded:
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
        meter, since = YieldMeter(self.production, self.clock), self.clock()
        quiet, told = (_FIRST_QUIET_SECONDS if first else self._quiet), not first
        while self.clock() - since < quiet:
            if meter.works():
                since = self.clock()
                if not told:
                    told = True
                    self.say(f"waits until {self.title} rests")
            self.sleep(_TICK_SECONDS)
