"""Whether a trial of `gpushare tune` has been watched for long enough: more windows would hardly change its verdict. Pure."""

from __future__ import annotations

from typing import Final

from gpushare.measure.statistics import widened
from gpushare.measure.trials import Goal
from gpushare.measure.tune_report import TrialReport

# Two p99s of a few hundred requests differ by this much on their own.
_P99_SURE: Final = 0.08
# So small an error needs no more windows; nor one of so large a part of what production may lose.
_PRECISE: Final = 0.005
_PRECISE_SHARE: Final = 1 / 6
_FINEST: Final = 0.001
# An interval that is looked at after every window has to be wider, to hold as often as it says (simulated).
_LOOKED_AT_OFTEN: Final = 1.4


def sure(report: TrialReport, goal: Goal) -> bool:
    """Return whether more windows would hardly change the verdict, or tell hardly more than these.

    One of rate and p99 that surely fails is enough; that the goal is met, both have to say.
    """
    return _fails(report, goal) or (_rate_is_known(report, goal) and _tail_is_known(report, goal))


def _fails(report: TrialReport, goal: Goal) -> bool:
    high = widened(report.kept, _LOOKED_AT_OFTEN).high
    slow = high is not None and high < goal.keep
    late = goal.p99_factor is not None and report.p99_interval is not None and report.p99_interval[0] > goal.p99_factor
    return slow or late


def _rate_is_known(report: TrialReport, goal: Goal) -> bool:
    precise = max(_FINEST, min(_PRECISE, _PRECISE_SHARE * (1 - goal.keep)))
    if report.windows_error is not None and report.windows_error <= precise:
        return True
    low = widened(report.kept, _LOOKED_AT_OFTEN).low
    return low is not None and low >= goal.keep


def _tail_is_known(report: TrialReport, goal: Goal) -> bool:
    if goal.p99_factor is None or report.trial.p99 is None:
        return True
    if report.p99_interval is not None:
        return report.p99_interval[1] <= goal.p99_factor
    return abs(report.trial.p99 / goal.p99_factor - 1) > _P99_SURE
