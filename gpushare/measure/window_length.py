"""How long a window of measuring is, and how many there are: as the jobs print. Pure.

What slows a machine's CPU for a second or two falls into windows together or into those alone. Many short ones share it out
evenly; but a window has to hold several numbers, and a job may be silent for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

WINDOW_SECONDS: Final = 1.5
# Of a job that prints at least ten times a second.
SHORTEST_SECONDS: Final = 0.6
LONGEST_SECONDS: Final = 30.0
# A window is so many times as long as the longest time in which nothing was printed.
_GAPS: Final = 6
# It saves its state again and again: a window that is all silence tells little.
_SILENCES: Final = 2
_LONGEST_FOR_SILENCE_SECONDS: Final = 10.0
# So long is production watched together at least, in so many windows; more where that is not enough.
_WATCHED_SECONDS: Final = 4.8
_LEAST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 8
_TIMES: Final = 3
# A percentile needs far more requests than a rate needs windows.
_TIMES_FOR_P99: Final = 4


class WindowLength:
    """The length of a window in seconds: ``given``, or found. Where a p99 is asked for it is not shortened."""

    def __init__(self, given: float | None, *, tails: bool) -> None:
        self.seconds = WINDOW_SECONDS if given is None else given
        self._tails = tails
        self._given = given is not None
        self._open = given is None and not tails
        self._gap = self._silence = 0.0

    def hold(
        self, least: int, moments: Sequence[float], start: float, end: float, longest: float = LONGEST_SECONDS
    ) -> None:
        """Make it so long that it holds the least of moments at which a job prints; ``moments`` are those of a watch."""
        wanted = least * (end - start) / len(moments) if moments else end - start
        self.seconds = max(self.seconds, min(wanted, longest))
        self._gap = max(self._gap, *(after - before for before, after in pairwise([start, *moments, end])))

    def shorten(self) -> None:
        """Make it as short as the jobs allow that were watched until now; once, and never one that is given."""
        if self._open and self.seconds <= WINDOW_SECONDS:
            self.seconds = min(self.seconds, max(SHORTEST_SECONDS, _GAPS * self._gap))
        self._open = False

    def silent(self, seconds: float) -> None:
        """Remember for how long production, alone, printed nothing."""
        self._silence = max(self._silence, seconds)

    def outlast(self) -> None:
        """Make it longer than the silences until now; between trials, so that all windows of one are equal."""
        if not self._given and self._silence > self.seconds:
            self.seconds = max(self.seconds, min(_SILENCES * self._silence, _LONGEST_FOR_SILENCE_SECONDS))

    def rounds(self, given: int | None) -> int:
        """Return how many windows together a trial has at least; fewer where they are long."""
        if given is not None:
            return given
        return min(_MOST_ROUNDS, max(_LEAST_ROUNDS, round(_WATCHED_SECONDS / self.seconds)))

    def most_rounds(self, given: int | None, rounds: int) -> int:
        """Return how many it has at most."""
        return (_TIMES_FOR_P99 if self._tails else _TIMES) * rounds if given is None else given
