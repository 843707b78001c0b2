"""A part of the time for settings that cost production too much: which duty cycle to try next. Pure.

Where jobs compete for the memory's bandwidth, what a setting costs is in proportion to the time that it is used: no cap
does that. So the first guess is the straight line from nothing to what all of the time costs; then a power of the time
through that and the nearest that was measured: stops cost something too, and other jobs are harmed by the first slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpushare.measure.trials import Goal, Judged, Setting

# Percent: below it a job is hardly worth the memory that it holds.
LEAST_DUTY: Final = 10.0
# So many duty cycles are tried, of all settings together.
MOST_DUTIES: Final = 4
# Powers outside are noise, more likely than not.
_LEAST_POWER: Final = 0.3
_MOST_POWER: Final = 4.0
_NO_LOSS: Final = 1e-3
# Two that lie nearer to each other tell no power, unless their losses differ by so many errors.
_APART_PERCENT: Final = 80.0
_SURE_ERRORS: Final = 3.0


def next_duty(goal: Goal, judged: Sequence[Judged], beaten: float | None) -> Setting | None:
    """Return the next setting for a part of the time; None: none promises to give the other job more than ``beaten``."""
    tried = [one for one in judged if one.setting.duty_percent is not None]
    found: list[tuple[float, Setting]] = []
    for whole in judged if len(tried) < MOST_DUTIES else ():
        if whole.setting.duty_percent is not None or whole.safe or whole.opportunistic is None:
            continue
        parts = [one for one in tried if replace(one.setting, duty_percent=None) == whole.setting]
        duty = _duty(goal, whole, parts)
        gives = whole.opportunistic * (duty or 0.0) / 100
        if duty is not None and (beaten is None or gives > beaten):
            found.append((gives, replace(whole.setting, duty_percent=duty)))
    return max(found, key=lambda one: one[0])[1] if found else None


def _duty(goal: Goal, whole: Judged, parts: Sequence[Judged]) -> float | None:
    """Return the duty cycle of a setting, in whole percent, that should be safe with room for another error; or None."""
    high = min((_percent(one) for one in parts if not one.safe), default=100.0)
    low = max((_percent(one) for one in parts if one.safe and _percent(one) < high), default=0.0)
    # The mean of all: a single one may be large or small by luck.
    error = math.fsum(one.error for one in (whole, *parts)) / (1 + len(parts))
    room = 1 - goal.keep - error
    if room <= 0:
        return None
    nearest = min([whole, *parts], key=lambda one: abs(_loss(one) - room))
    duty = _percent(nearest) * (room / _loss(nearest)) ** (1 / _power(whole, nearest))
    # A step that changes less than the error of a measurement tells nothing.
    step = max(1.0, 100 * error / _loss(whole))
    duty = math.floor(min(duty, high - step))
    return float(duty) if duty >= low + step and duty >= LEAST_DUTY else None


def _power(whole: Judged, part: Judged) -> float:
    """Return with which power of the time the loss grows, as far as two measurements tell: 1 where they do not."""
    sure = _SURE_ERRORS * math.hypot(whole.error, part.error)
    near = _percent(part) > _APART_PERCENT and abs(_loss(whole) - _loss(part)) <= sure
    if part is whole or near:
        return 1.0
    power = math.log(_loss(whole) / _loss(part)) / math.log(100 / _percent(part))
    return min(max(power, _LEAST_POWER), _MOST_POWER)


def _percent(one: Judged) -> float:
    return 100.0 if one.setting.duty_percent is None else one.setting.duty_percent


def _loss(one: Judged) -> float:
    """Return what a setting surely costs of production's rate, at least a little."""
    return max(1 - one.kept + one.error, _NO_LOSS)
