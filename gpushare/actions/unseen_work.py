"""Work of a production job under MPS that its CPU does not show: told by what the GPU does while the other job stands still.

NVML books the work of all clients on the MPS server, so that nobody can be told apart there; and a job that waits for long
kernels without spinning uses no CPU. But while the opportunistic job stands still, what the SMs do is production's, if
nobody else is on the GPU. So it is looked at in every pause and before the other is on the GPU; and, from time to time,
the other is stopped for it: seldom, unless production has shown once that it works unseen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# GPM averages between two samples: shorter windows are noise. Percent of the SMs that are work (idle GPUs show 0).
_WINDOW_SECONDS: Final = 0.1
_BUSY_PERCENT: Final = 1.0
# A queue of the job that was stopped has drained by then (the deepest one measured took 0.1 s).
_DRAINED_SECONDS: Final = 0.5
# How long the other runs between two looks for which it is stopped (for 0.3 s): twice as long after each that found nothing,
# up to the most; less of a job that works unseen than of one that never has.
_UNSEEN_SECONDS: Final = 1.5
_MOST_UNSEEN_SECONDS: Final = 6.0
_FIRST_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 64.0
_ALONE_SECONDS: Final = 1.0


class UnseenWork:
    """Whether production works, where its CPU says that it does not.

    ``activity`` returns the percent of the SMs that were busy since it was asked last, or None; ``alone`` whether nobody
    but production and the other job is on the GPU.
    """

    def __init__(self, activity: Callable[[], float | None], alone: Callable[[], bool]) -> None:
        self._activity, self._alone = activity, alone
        # It has worked unseen before.
        self.found = False
        self._pause = _FIRST_SECONDS
        self._look_at = math.inf
        self._still_since: float | None = None
        self._window_at = 0.0
        self._working = False
        # Whether the window that goes on can only show work that was not seen.
        self._clean = False
        self._trusted, self._trust_due = True, -math.inf

    def works(self, at: float, *, seen: bool, still: bool) -> bool:
        """Return whether production works at a time (seconds of a clock that only rises).

        ``seen`` is what its CPU says; ``still`` whether the other job stands still, or is not on the GPU yet.
        """
        if at >= self._trust_due:
            self._trusted, self._trust_due = self._alone(), at + _ALONE_SECONDS
        if not self._trusted:
            self._still_since, self._working, self._look_at = None, False, math.inf
            return seen
        return self._standing(at, seen=seen) if still else self._running(at, seen=seen)

    def _standing(self, at: float, *, seen: bool) -> bool:
        if self._still_since is None:
            self._still_since, self._window_at, self._working, self._clean = at, at, False, False
            self._activity()
            return True
        if at - self._window_at >= _WINDOW_SECONDS:
            self._window_at = at
            percent = self._activity()
            # A window may show what the other had in its queue when it was stopped, or work that was seen.
            self._working = self._clean and percent is not None and percent >= _BUSY_PERCENT
            self._clean = not seen
            if self._working and at - self._still_since >= _DRAINED_SECONDS:
                self.found, self._pause = True, _UNSEEN_SECONDS
        self._clean = self._clean and not seen
        return seen or self._working

    def _running(self, at: float, *, seen: bool) -> bool:
        if self._still_since is not None or self._look_at == math.inf:
            # It has just gone on: nothing was found this time.
            self._still_since, self._working = None, False
            self._look_at = at + self._pause
            self._pause = min(_MOST_UNSEEN_SECONDS if self.found else _MOST_SECONDS, 2 * self._pause)
        # Called work, the look stops the other job; what comes of it is told there.
        return seen or at >= self._look_at
