"""What ``gpushare tune`` found: kept for ``run --opportunistic --for NAME``, and as the command's result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import GpushareError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpushare.host.host import Host
    from gpushare.host.tuned import Tuned
    from gpushare.measure.pair import TuneOptions
    from gpushare.measure.trials import Judged
    from gpushare.measure.tune_report import TrialReport, TuneResult
    from gpushare.selection import Device

# Standard deviation of production's windows alone: from here on a few of them say little.
_MUCH_SPREAD: Final = 0.05


def finished(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str) -> Any:
    """Keep what was found and return it as the command's result; nothing is kept of a search that was ended early."""
    from gpushare.actions.roles import DUTY_COSTS
    from gpushare.cli.measured import others_note
    from gpushare.host.tuned import keep_tuned
    from gpushare.show.tune import tune_result

    tuned = None if result.stopped is not None else _tuned(host, device, options, result, name)
    data = {**_data(options, result, tuned), "gpu_name": device.gpu.name, "driver": host.nvml.driver_version()}
    notes = [*([] if result.warning is None else [result.warning]), *_uncertain(result)]
    if result.others:
        notes.append(others_note(result.others))
    if result.given_up is not None:
        notes.append(f"caps on production were not tried to the end: {result.given_up.message}")
    failed = None
    where = f"-g {device.selector}"
    if tuned is not None:
        try:
            data["file"] = str(keep_tuned(host, tuned))
        except GpushareError as error:
            # What was measured is shown, whatever becomes of the file.
            failed = error
    if tuned is not None and failed is None:
        notes.append(f"apply it: gpushare run --opportunistic --for {name} {where} -- {options.opportunistic[0]} ...")
        if tuned.duty_percent is not None:
            notes.append(f"it is stopped for {100 - tuned.duty_percent:g} % of the time then; {DUTY_COSTS}")
        if tuned.production_threads_percent is not None:
            cap = f"--threads {tuned.production_threads_percent:g}"
            notes.append(f"with production capped: gpushare run --production {name} {cap} {where} -- ...")
    elif result.stopped is not None:
        return tune_result(data, [*notes, "ended before the answer stood: nothing is kept"], _early(result.stopped))
    elif result.outcome.best is None:
        pause = f"gpushare run --opportunistic --pause {where}"
        notes.append(f"nothing is kept; pause the opportunistic job instead: {pause}")
    return tune_result(data, notes, failed)


def _uncertain(result: TuneResult) -> list[str]:
    """Return how far the figures can be trusted, where that is not far."""
    best, spread = result.outcome.best, result.production_spread
    more = f"more windows tell more: --rounds {2 * max(one.rounds for one in result.trials)}"
    notes = []
    if best is not None and not best.safe:
        notes.append(f"the goal is met by less than the figures scatter ({best.kept:.3f} ±{best.error:.3f}); {more}")
    elif best is not None:
        lucky = [one for one in result.outcome.curve if one.meets and not one.safe]
        larger = [one.setting.title for one in lucky if (one.opportunistic or 0.0) > (best.opportunistic or 0.0)]
        if larger:
            notes.append(f"{larger[0]} met the goal too, but by less than its figures scatter; {more}")
    if not notes and spread is not None and spread > _MUCH_SPREAD:
        moved = f"production alone moved by {100 * spread:.0f} % from window to window"
        notes.append(f"{moved}, by its own work or the machine's CPU; {more}")
    return notes


def _early(stopped: KeyboardInterrupt | GpushareError) -> GpushareError:
    from gpushare.cli.common import interrupted

    if isinstance(stopped, GpushareError):
        return stopped
    return interrupted(stopped).restated(
        hint="both jobs were ended, the host is as before; fewer trials: --caps 80,60,40"
    )


def _tuned(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str) -> Tuned | None:
    import shlex
    import time

    from gpushare.host.tuned import Tuned

    best = result.outcome.best
    if best is None:
        return None
    goal = options.search.goal
    return Tuned(
        name=name,
        date=time.strftime("%Y-%m-%d %H:%M"),
        gpu_name=device.gpu.name,
        driver=host.nvml.driver_version(),
        threads_percent=best.setting.threads,
        low_priority=best.setting.low,
        meets=True,
        stable=result.outcome.stable,
        keep=goal.keep,
        p99_factor=goal.p99_factor,
        kept=round(best.kept, 4),
        p99=None if best.p99 is None else round(best.p99, 4),
        opportunistic_share=_share(best, result),
        production_threads_percent=best.setting.production_threads,
        duty_percent=best.setting.duty_percent,
        production_memory_bytes=result.production_memory_bytes,
        production=shlex.join(options.production),
        opportunistic=shlex.join(options.opportunistic),
    )


def _share(one: Judged, result: TuneResult) -> float | None:
    if one.opportunistic is None or not result.opportunistic_alone:
        return None
    return round(one.opportunistic / result.opportunistic_alone, 4)


def _data(options: TuneOptions, result: TuneResult, tuned: Tuned | None) -> dict[str, Any]:
    import time

    found = result.outcome
    rows = [_row(one, result) for one in found.curve]
    return {
        "keep": options.search.goal.keep,
        "p99_factor": options.search.goal.p99_factor,
        "name": None if tuned is None else tuned.name,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "best": None if found.best is None else _row(found.best, result),
        "nearest": None if found.nearest is None else _row(found.nearest, result),
        "stable": found.stable,
        "low_priority_helps": found.low_priority_helps,
        "production_alone": result.production_alone,
        "production_spread": None if result.production_spread is None else round(result.production_spread, 4),
        "production_p99": result.production_p99,
        "opportunistic_alone": result.opportunistic_alone,
        "production_memory_bytes": result.production_memory_bytes,
        "opportunistic_memory_bytes": result.opportunistic_memory_bytes,
        "seconds": round(result.seconds, 1),
        "warning": result.warning,
        "curve": rows,
        "trials": [_trial(report) for report in result.trials],
        "file": None,
    }


def _row(one: Judged, result: TuneResult) -> dict[str, Any]:
    best = result.outcome.best
    return {
        "setting": one.setting.title,
        "threads_percent": one.setting.threads,
        "low_priority": one.setting.low,
        "production_threads_percent": one.setting.production_threads,
        "duty_percent": one.setting.duty_percent,
        "kept": round(one.kept, 4),
        "kept_error": round(one.error, 4),
        "p99": None if one.p99 is None else round(one.p99, 4),
        "opportunistic_rate": one.opportunistic,
        "opportunistic_share": _share(one, result),
        "trials": one.trials,
        "meets": one.meets,
        "safe": one.safe,
        "chosen": best is not None and one.setting == best.setting,
    }


def _trial(report: TrialReport) -> Mapping[str, Any]:
    return {
        "setting": report.trial.setting.title,
        "production_threads_percent": report.trial.setting.production_threads,
        "duty_percent": report.trial.setting.duty_percent,
        "kept": report.kept.value,
        "kept_low": report.kept.low,
        "kept_high": report.kept.high,
        "p99": report.trial.p99,
        "rounds": report.rounds,
        "cap_factor": report.cap_factor,
        "production_alone": report.alone_rate,
        "production_together": report.together_rate,
        "production_p99_alone": report.alone_p99,
        "production_p99_together": report.together_p99,
        "opportunistic_rate": report.trial.opportunistic,
    }
