"""Whether a trial of `gpushare tune` has been watched for long enough: more windows would hardly change its verdict. Pure."""

from __future__ import annotations

from typing import Final

from gpushare.measure.trials import Goal
from gpushare.measure.tune_report import TrialReport

# Two p99s of a few hundred requests differ by this much on their own.
_P99_SURE: Final = 0.08
# So small an error needs no more windows; nor one of so large a part of what production may lose.
_PRECISE: Final = 0.005
_PRECISE_SHARE: Final = 1 / 6


def sure(report: TrialReport, goal: Goal) -> bool:
    """Return whether more windows would hardly change the verdict, or tell hardly more than these."""
    if not _rate_is_sure(report, goal):
        return False
    if goal.p99_factor is None or report.trial.p99 is None:
        return True
    if report.p99_interval is not None:
        low, high = report.p99_interval
        return high <= goal.p99_factor or low > goal.p99_factor
    return abs(report.trial.p99 / goal.p99_factor - 1) > _P99_SURE


def _rate_is_sure(report: TrialReport, goal: Goal) -> bool:
    precise = min(_PRECISE, _PRECISE_SHARE * (1 - goal.keep))
    if report.windows_error is not None and report.windows_error <= precise:
        return True
    low, high = report.kept.low, report.kept.high
    return low is not None and high is not None and (low >= goal.keep or high < goal.keep)
