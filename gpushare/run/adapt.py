"""How large the time-slice of an opportunistic job may be, so that production keeps a part of its own speed. Pure.

Production's speed is read while the other job runs, and compared with its speed while the other is held back for a moment.
That baseline is measured again when the speed moves (production or the other job has entered another phase), and from time
to time. The slice falls at once and rises in steps, as TGS adapts a rate of launches (NSDI 2023).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import field
from typing import Final, NamedTuple

from gpushare.base.values import dataclass

LEAST_US: Final = 20
MOST_US: Final = 2048
# The first slice after the first baseline.
_FIRST_US: Final = 200
# With a number per second or fewer it takes too long to see what a slice costs: then it starts at the least.
_SELDOM_SECONDS: Final = 0.9

STEP_SECONDS: Final = 1.0
# The window in which production keeps its part, and how long the other is held back for a baseline.
WINDOW_SECONDS: Final = 60.0
_HOLD_SECONDS: Final = 1.0
_LONGEST_HOLD_SECONDS: Final = 30.0
# What was submitted before a change still runs, and a number printed right after it is about the time before.
_SETTLE_SECONDS: Final = 0.3
_REFRESH_SECONDS: Final = 30.0
# With a speed alone below this part of the best one, it is measured again sooner.
_CERTAIN_PART: Final = 0.9
_DOUBT_REFRESH_SECONDS: Final = 15.0
_DOUBT_REFRESH_PART: Final = 0.2
# Holding the other back for baselines may cost this part of its time.
_REFRESH_PART: Final = 0.05
# Without a number for this long, the slice is the least.
SILENT_SECONDS: Final = 10.0
# A silence this long, or of four numbers, may be harm: the other is held back for a moment, to see whether a number comes.
_DOUBT_SECONDS: Final = 2.0
# A speed alone of less than this part of the one before is believed only after the other was held back for longer.
_DOUBTFUL_PART: Final = 0.5
_DOUBTFUL_SECONDS: Final = 3.0
# This part of what production may lose in a window is kept back: what was lost is seen late, and scatters. In a model of
# both, 420 runs with scatter up to 1 % kept the promise in each minute with it; without it 5 of 140 lost up to .008 too much.
_RESERVE: Final = 0.25
# Parts of what production may lose within a window: with more lost than the first the other job is held back, and with less
# than the second it runs. Where even the least slice cost too much, it is tried again with less than the third.
_HOLD_BACK_LOSS: Final = 0.7
_RUN_LOSS: Final = 0.6
_RETRY_LOSS: Final = 0.3
# The target lies between the promise and no loss, nearer to the promise.
_GOAL_PART: Final = 0.4
# A slice that cost too much is not tried again for this long; meanwhile slices up to this part of it are.
_CEILING_SECONDS: Final = 20.0
_CEILING_PART: Final = 0.85
# A slice that would be longer by less than this is not worth another settling time.
_LEAST_RAISE: Final = 1.05
# Where even the least slice costs too much, the other stays held back: first this long, then twice, up to the most.
_FIRST_BACKOFF_SECONDS: Final = 5.0
_MOST_BACKOFF_SECONDS: Final = 60.0
# A move by more than this, and by more than four times the noise, is another phase.
_JUMP: Final = 0.015


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the other job gets: a time-slice in microseconds; ``held``: it is held back entirely for now."""

    slice_us: int
    held: bool


class _Loss(NamedTuple):
    """Which part of its speed production lost in the ``seconds`` up to ``at``; None: the other job was held back."""

    at: float
    seconds: float
    part: float | None


class _Number(NamedTuple):
    """A number that production printed at the time ``at``; it covers the time since ``begin``, when the one before came."""

    begin: float
    at: float
    value: float


@dataclass
class _Printed:
    """The numbers that production has printed. ``last`` is the time of the last one; None: the next one covers unknown time."""

    last: float | None = None
    numbers: list[_Number] = field(default_factory=list)

    def take(self, seen: Sequence[tuple[float, float]]) -> None:
        """Add new numbers, each given by its time and value. One that covers unknown time is left out."""
        begin = self.last
        for at, value in seen:
            # Numbers that were read together have one time, and cover the same.
            if self.last is None or at > self.last:
                begin = self.last
                self.last = at
            if begin is not None:
                self.numbers.append(_Number(begin, at, value))

    def since(self, start: float) -> list[_Number]:
        """Return the numbers that cover only time after ``start``."""
        return [number for number in self.numbers if number.begin >= start]


class Controller:
    """Chooses the slice. ``step`` is called about once a second with the numbers that production has printed since.

    ``keep`` is the part of its speed that production must keep (0.97). Times are monotonic seconds, numbers are speeds.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._goal = keep + _GOAL_PART * (1 - keep)
        self._slice = float(_FIRST_US)
        self._printed = _Printed()
        # When the slice changed. Whether the other job is held back, since when, and until when at least.
        self._changed_at = -math.inf
        self._held = True
        self._held_at: float | None = None
        self._hold_until = -math.inf
        # Production's speed alone, when it was measured, and after how many seconds it is measured again.
        self.baseline: float | None = None
        self._baseline_at = -math.inf
        self._refresh = _REFRESH_SECONDS
        # Relative scatter of a second's mean.
        self._noise = 0.01
        # The kept part in each second since the slice changed, and its mean before that; the ledger is for the window.
        self._kept: list[float] = []
        self._kept_before: float | None = None
        self._raised = False
        self._ledger: deque[_Loss] = deque()
        # The last slice that cost too much, and until when no slice as long is tried again.
        self._ceiling_us, self._ceiling_until = math.inf, -math.inf
        self._backoff = _FIRST_BACKOFF_SECONDS
        # Even the least slice cost too much in this phase of production.
        self._least_costs_too_much = False
        # Whether the baseline is measured again because another phase began, and when that was.
        self._has_new_phase = False
        self._phase_began_at = math.inf
        # It began while the other was held back.
        self._began_while_held = False
        self._last_step: float | None = None
        # When production last printed a number, at the earliest at the first step.
        self._heard_at = -math.inf
        # Seconds between two numbers; when a silence is examined; its start while it is examined.
        self._interval = 0.0
        self._doubt_at: float | None = None
        self._silent_since: float | None = None
        # The last silence was a rest of production: no loss.
        self._rested = False
        # Up to which time the ledger has entries.
        self._noted_at = -math.inf
        # The best speed without the other.
        self.best: float | None = None

    @property
    def out_of_reach(self) -> bool:
        """Return whether even the least slice costs production too much now: the other job waits for its next try (`_lower`)."""
        return self._held and self._hold_until > -math.inf

    @property
    def kept(self) -> float | None:
        """Return which part of its speed production has kept within the last minute (0.98); None: unknown."""
        seconds = math.fsum(loss.seconds for loss in self._ledger)
        return None if seconds <= 0 or self.baseline is None else 1 - self._seconds_lost() / seconds

    def step(self, at: float, seen: Sequence[tuple[float, float]]) -> Setting:
        """Judge production by what it ``seen`` printed since the last step (times, values); return what the other job gets now."""
        self._printed.take(seen)
        if self._last_step is None or seen:
            self._heard_at = at
            self._doubt_at = None
        seconds = 0.0 if self._last_step is None else at - self._last_step
        self._last_step = at
        if self._held:
            if self._held_at is None:
                self._held_at = self._changed_at = at
            self._ledger.append(_Loss(at, seconds, None))
            # While a silence is examined, nothing is measured until it has ended.
            if self._silent_since is None or self._examine_silence(at, self._silent_since, prints=bool(seen)):
                self._measure(at)
        else:
            self._judge_speed(at, seconds)
        while self._ledger and self._ledger[0].at <= at - WINDOW_SECONDS:
            self._ledger.popleft()
        return Setting(slice_us=round(self._slice), held=self._held)

    # -- the baseline ------------------------------------------------------------------------------------------

    def _measure(self, at: float) -> None:
        """Measure production's speed while the other job is held back; once it is certain enough, it is the new baseline."""
        held_at = at if self._held_at is None else self._held_at
        # After the longest hold the numbers so far must suffice: the other job is not held back without end.
        is_longest_hold = at - held_at >= _LONGEST_HOLD_SECONDS
        clean = self._printed.since(held_at + _SETTLE_SECONDS)
        values = [number.value for number in clean]
        mean = math.fsum(values) / len(values) if values else 0.0
        if mean <= 0:
            if is_longest_hold:
                # Production prints nothing, or only zeros: without a baseline, run the least slice.
                self._run_with(at, LEAST_US)
            return

        # Enough numbers: three within a second or more, or of a program that prints seldom two within four.
        moments = len({number.at for number in clean})
        spread = clean[-1].at - held_at - _SETTLE_SECONDS
        is_enough = moments >= 3 and spread >= _HOLD_SECONDS
        is_enough_of_seldom = moments >= 2 and spread >= 4 * _HOLD_SECONDS
        if not (is_enough or is_enough_of_seldom or is_longest_hold):
            return

        is_doubtful = self.baseline is not None and mean < _DOUBTFUL_PART * self.baseline
        if is_doubtful and spread < _DOUBTFUL_SECONDS and not is_longest_hold:
            # What the other had submitted may still be running.
            return

        half = len(values) // 2
        if half >= 2 and not is_longest_hold:
            first_mean = math.fsum(values[:half]) / half
            second_mean = math.fsum(values[half:]) / (len(values) - half)
            if abs(second_mean - first_mean) > max(_JUMP, 4 * self._noise) * mean:
                # Production has just entered another phase: only the second half counts, and what comes.
                self._held_at = clean[half].at - _SETTLE_SECONDS
                self._began_while_held = True
                return
        self._set_baseline(at, mean, values, spread, at - held_at)

    def _set_baseline(self, at: float, mean: float, values: Sequence[float], spread: float, held: float) -> None:
        """Take the speed of production alone as the baseline, and let the other job run again unless too much was lost.

        ``values`` and their ``mean`` are of ``spread`` seconds; the other job was held back for ``held`` seconds.
        """
        previous = self.baseline
        self._interval = spread / max(1, len(values) - 1)
        same_phase = previous is not None and abs(mean / previous - 1) <= max(0.03, 3 * self._noise)
        if previous is None:
            if len(values) >= 3:
                self._noise = _noise_of(values, mean, spread)
            if self._interval > _SELDOM_SECONDS:
                self._slice = LEAST_US
        elif not same_phase:
            if not self._has_new_phase:
                # When the phase began is unknown. If production is faster now, the other job may have hidden that since the
                # previous baseline.
                hidden = mean > previous and not self._began_while_held
                self._phase_began_at = self._baseline_at if hidden else math.inf
            self._rescale(previous / mean)
        if not same_phase:
            # What slices cost in the previous phase says nothing about this one.
            self._ceiling_until = -math.inf
            self._backoff = _FIRST_BACKOFF_SECONDS
            self._least_costs_too_much = False
        self.baseline = mean
        self._baseline_at = at
        self.best = max(mean, self.best or 0.0)
        if mean < _CERTAIN_PART * self.best:
            # Production was faster before: this may be a faster phase that the other job slows down.
            self._refresh = max(_DOUBT_REFRESH_SECONDS, held / _DOUBT_REFRESH_PART)
        else:
            self._refresh = max(_REFRESH_SECONDS, held / _REFRESH_PART)
        self._has_new_phase = False
        if not self._stays_held(at, same_phase=same_phase):
            self._run_with(at, self._slice)

    def _stays_held(self, at: float, *, same_phase: bool) -> bool:
        """Return whether the other job is held back even with a new baseline: too much was lost, or its next try is not due."""
        lost = self._seconds_lost()
        allowed = self._seconds_allowed()
        if self._least_costs_too_much and (at < self._hold_until or lost > _RETRY_LOSS * allowed):
            return True
        return same_phase and lost > _RUN_LOSS * allowed

    def _rescale(self, factor: float) -> None:
        """Correct the losses noted since this phase began, which were computed with the previous baseline.

        ``factor`` is the previous baseline as a part of the new one.
        """
        for index, loss in enumerate(self._ledger):
            if loss.at >= self._phase_began_at and loss.part is not None:
                # The part that was kept is the speed over the baseline.
                kept = (1 - loss.part) * factor
                self._ledger[index] = loss._replace(part=1 - kept)

    # -- the slice ---------------------------------------------------------------------------------------------

    def _judge_speed(self, at: float, seconds: float) -> None:
        """Compare production's speed with the baseline, and change the slice. ``seconds`` have passed since the last step."""
        clean = self._printed.since(self._changed_at + _SETTLE_SECONDS)
        if not clean:
            self._judge_silence(at)
            return
        if self.baseline is None:
            # There is no baseline, but production prints now: measure it.
            self._hold_back(at, LEAST_US)
            return
        self._printed.numbers.clear()
        kept = math.fsum(number.value for number in clean) / len(clean) / self.baseline
        # Time since the change that no number covers counts like the time after it, unless production rested.
        covered = clean[-1].at - clean[0].begin
        counted_seconds = max(seconds, covered) if self._rested else at - self._noted_at
        self._ledger.append(_Loss(at, counted_seconds, 1 - kept))
        self._noted_at = at
        self._rested = False
        mean_kept = self._mean_kept()
        if self._is_other_phase(kept, mean_kept):
            self._has_new_phase = True
            self._phase_began_at = at
            is_slower = kept < (1.0 if mean_kept is None else mean_kept)
            self._hold_back(at, self._slice / 2 if is_slower else self._slice)
            return
        if mean_kept is not None:
            self._noise = _plausible_noise(0.9 * self._noise + 0.1 * abs(kept - mean_kept))
        self._kept.append(kept)
        if self._seconds_lost() > _HOLD_BACK_LOSS * self._seconds_allowed():
            # The slice that would meet the goal if its cost were proportional to it.
            self._hold_back(at, self._slice * min(0.5, (1 - self._goal) / max(1 - kept, 1e-9)))
        elif at - self._baseline_at >= self._refresh:
            self._hold_back(at, self._slice)
        else:
            self._adjust_slice(at, kept)

    def _is_other_phase(self, kept: float, mean_kept: float | None) -> bool:
        """Return whether production or the other job has entered another phase: noise and the slice do not explain ``kept``.

        ``mean_kept`` is what production kept with this slice so far; None: this is the first number with it.
        """
        limit = max(_JUMP, 4 * self._noise)
        if kept > 1 + self._most_gain():
            return True
        if mean_kept is not None:
            return abs(kept - mean_kept) > limit
        if self._kept_before is None:
            return False
        # Production cannot gain by a longer slice, nor lose by a shorter one.
        gain = kept - self._kept_before
        return gain > limit if self._raised else gain < -limit

    def _adjust_slice(self, at: float, kept: float) -> None:
        """Shorten the slice if production keeps less than promised, or nearly; lengthen it if it keeps more than the goal."""
        recent = self._kept[-3:]
        mean = math.fsum(recent) / len(recent)
        tolerance = 0.3 * (1 - self._keep)
        if kept < self._keep - max(0.005, 2 * self._noise):
            # One number below the promise is enough; far below it, only the least slice is safe.
            self._lower(at, LEAST_US if kept < self._keep - 0.1 else self._slice / 2)
        elif len(recent) >= 3 and mean < self._goal - tolerance:
            # Too near to the promise for three numbers.
            self._lower(at, 0.7 * self._slice)
        elif len(recent) >= 2 and mean > self._goal and self._seconds_lost() < _RUN_LOSS * self._seconds_allowed():
            # Better than the goal; where production loses next to nothing, in larger steps.
            self._backoff = _FIRST_BACKOFF_SECONDS
            self._least_costs_too_much = False
            self._raise(at, 2.0 if mean > 1 - tolerance else 1.3)

    def _lower(self, at: float, slice_us: float) -> None:
        """Shorten the slice, which costs too much; if it is the least already, hold the other job back for a while."""
        if self._slice <= LEAST_US:
            # Meanwhile the baseline is measured again: it may no longer be right.
            self._least_costs_too_much = True
            self._hold_back(at, LEAST_US)
            self._hold_until = at + self._backoff
            self._backoff = min(_MOST_BACKOFF_SECONDS, 2 * self._backoff)
            return
        self._ceiling_us, self._ceiling_until = self._slice, at + _CEILING_SECONDS
        self._run_with(at, slice_us)

    def _raise(self, at: float, factor: float) -> None:
        """Lengthen the slice, but not up to one that has just cost too much."""
        slice_us = min(self._slice * factor, MOST_US)
        if at < self._ceiling_until:
            slice_us = min(slice_us, _CEILING_PART * self._ceiling_us)
        if slice_us > self._slice * _LEAST_RAISE:
            self._run_with(at, slice_us)

    def _judge_silence(self, at: float) -> None:
        """Act while production has printed nothing since the slice changed: it may rest, or the other job may harm it.

        After some intervals without a number the other job is held back to see whether one comes, and again each time the
        silence has doubled. After a long silence the slice is the least.
        """
        silent_seconds = at - self._heard_at
        if self._doubt_at is None:
            self._doubt_at = self._heard_at + max(_DOUBT_SECONDS, 4 * self._interval)
        if self.baseline is not None and at >= self._doubt_at:
            # When to examine the silence again, if production turns out to rest.
            self._doubt_at = at + max(silent_seconds, SILENT_SECONDS)
            self._silent_since = max(self._heard_at, self._changed_at)
            self._hold_back(at, self._slice if silent_seconds < SILENT_SECONDS else LEAST_US)
        elif silent_seconds >= SILENT_SECONDS and self._slice > LEAST_US:
            self._run_with(at, LEAST_US)

    def _examine_silence(self, at: float, since: float, *, prints: bool) -> bool:
        """Find out why production was silent, while the other job is held back; return whether that job was the reason.

        It was if production ``prints`` now: all speed since ``since`` was lost. If no number comes for some intervals,
        production rests, and the other job runs again.
        """
        held_at = self._changed_at
        if prints:
            self._silent_since = None
            self._ledger.append(_Loss(at, held_at - since, 1.0))
            return True
        if at - held_at >= _SETTLE_SECONDS + max(_HOLD_SECONDS, 4 * self._interval):
            self._silent_since = None
            # Its next number covers the rest, too, and says nothing about its speed.
            self._printed.last = None
            self._run_with(at, self._slice)
            self._rested = True
        return False

    def _run_with(self, at: float, slice_us: float) -> None:
        """Let the other job run with this slice from now on."""
        self._kept_before = None if self._held else self._mean_kept()
        self._raised = slice_us > self._slice
        self._held_at = None
        self._set(at, slice_us, held=False)

    def _hold_back(self, at: float, next_slice_us: float) -> None:
        """Hold the other job back from now on; later it runs with ``next_slice_us``."""
        self._held_at = at
        self._began_while_held = False
        self._set(at, next_slice_us, held=True)

    def _set(self, at: float, slice_us: float, *, held: bool) -> None:
        """Set what the other job gets from now on; production's numbers from before no longer count."""
        self._slice = min(max(slice_us, LEAST_US), MOST_US)
        self._held = held
        self._hold_until = -math.inf
        self._changed_at = self._noted_at = at
        self._kept = []
        self._printed.numbers.clear()

    def _mean_kept(self) -> float | None:
        """Return which part of its speed production kept with this slice, as the mean of the last 8 steps; None: unknown yet."""
        recent = self._kept[-8:]
        return math.fsum(recent) / len(recent) if recent else None

    # -- what was lost within the window -----------------------------------------------------------------------

    def _seconds_lost(self) -> float:
        """Return how much of the window production has lost, in seconds of its own work.

        A gain, which is a negative loss, counts as far as noise explains it: a larger one is another phase of production.
        """
        least_part = -self._most_gain()
        return math.fsum(loss.seconds * max(loss.part, least_part) for loss in self._ledger if loss.part is not None)

    def _most_gain(self) -> float:
        """Return the largest gain over the baseline, as a part of it, that noise explains."""
        return max(2 * _JUMP, 3 * self._noise)

    def _seconds_allowed(self) -> float:
        """Return how much of the window production may lose, less the reserve, in seconds of its own work."""
        return (1 - _RESERVE) * (1 - self._keep) * WINDOW_SECONDS


def _noise_of(values: Sequence[float], mean: float, seconds: float) -> float:
    """Return how much the means of single seconds scatter (relative), from single values printed in ``seconds``."""
    scatter = math.sqrt(math.fsum((value / mean - 1) ** 2 for value in values) / (len(values) - 1))
    per_second = max(1.0, len(values) / max(seconds, 1.0))
    return _plausible_noise(scatter / math.sqrt(per_second))


def _plausible_noise(noise: float) -> float:
    """Return a scatter that can be believed: some equal numbers do not prove that there is none, nor a jump that all is noise."""
    return min(0.1, max(0.003, noise))
