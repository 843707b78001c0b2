"""What a search says in the end: the answer that is printed, and the figures that a later search goes on from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Final, Literal, cast

from gpushare.base.errors import GpushareError
from gpushare.base.model import TunedWay
from gpushare.base.selection import Device
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.store import Kept, RecordStore, digest_of_words
from gpushare.job_command import JobCommand
from gpushare.measure.search import Figures, Goal
from gpushare.measure.tune import TuneOptions, TuneResult
from gpushare.run.results import Tuned
from gpushare.show.tune import Row, TuneAnswer, WayAnswer

# Figures of another month say little about the programs of today.
_MOST_DAYS: Final = 30


def tune_answer(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str | None) -> TuneAnswer:
    """Return the printed answer of a search; ``name`` is that under which it is kept, None if it is not."""
    goal = options.search.goal
    whole = result.outcome
    ended: Literal["answer", "budget", "interrupted"] = "budget" if result.over else "answer"
    if result.stopped is not None:
        ended = "interrupted"

    def row(figures: Figures | None) -> Row | None:
        return None if figures is None else _setting_row(figures, goal, result)

    ways = [
        WayAnswer(
            way=cast("TunedWay", way.way),
            best=None if way.outcome is None else row(way.outcome.best),
            nearest=None if way.outcome is None else row(way.outcome.nearest),
            left_out=way.left_out,
        )
        for way in result.ways
    ]
    return TuneAnswer(
        gpu_name=device.gpu.name,
        driver=host.nvml.driver_version(),
        date=time.strftime("%Y-%m-%d %H:%M"),
        name=name,
        keep=goal.keep,
        p99_factor=goal.p99_factor,
        best=row(whole.best),
        nearest=row(whole.nearest),
        ways=tuple(ways),
        stable=whole.stable,
        ended=ended,
        low_priority_helps=whole.low_priority_helps,
        production_alone=result.production.rate,
        production_spread=_rounded(result.production.spread),
        production_p99=result.production.p99,
        production_busy_percent=result.production.busy,
        production_waits=result.waits,
        production_memory_bytes=result.production.memory,
        opportunistic_alone=result.others.rate,
        opportunistic_spread=_rounded(result.others.spread),
        opportunistic_memory_bytes=result.others.memory,
        copies=options.copies,
        seconds=round(result.seconds, 1),
        measuring_seconds=round(result.measuring_seconds, 1),
        starting_seconds=round(result.starting_seconds, 1),
        warning=result.warning,
        curve=tuple(_setting_row(figures, goal, result) for figures in whole.curve),
    )


def _setting_row(figures: Figures, goal: Goal, result: TuneResult) -> Row:
    best = result.outcome.best
    setting = figures.setting
    return Row(
        setting=setting.title,
        way=cast("TunedWay", setting.way),
        production_slice_us=setting.production_slice_us,
        other_slice_us=setting.other_slice_us,
        threads_percent=setting.threads,
        low_priority=setting.low,
        kept=round(figures.kept, 4),
        kept_error=round(figures.error, 4),
        p99=_rounded(figures.p99),
        p99_low=_rounded(figures.p99_low),
        p99_high=_rounded(figures.p99_high),
        opportunistic_share=_rounded(figures.share),
        opportunistic_share_error=_rounded(figures.share_error),
        windows=figures.windows,
        seconds=round(figures.seconds, 1),
        meets=figures.meets(goal),
        safe=figures.meets_safely(goal),
        frontier=setting in result.outcome.frontier,
        chosen=best is not None and setting == best.setting,
        earlier=figures.earlier,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def tuned_record(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str) -> Tuned | None:
    """Return what `run` reads of the best setting; None: there is none that may be kept.

    Of a search that was interrupted, only a setting that surely meets the goal is.
    """
    best = result.outcome.best
    if best is None or (result.stopped is not None and not best.meets_safely(options.search.goal)):
        return None
    return Tuned(
        name=name,
        gpu_name=device.gpu.name,
        driver=host.nvml.driver_version(),
        threads_percent=best.setting.threads,
        low_priority=best.setting.low,
        way=best.setting.way,
        production_slice_us=best.setting.production_slice_us,
        other_slice_us=best.setting.other_slice_us,
        production_memory_bytes=result.production.memory,
    )


def commands(tuned: Tuned, device: Device, options: TuneOptions) -> list[str]:
    """Return the commands that start all jobs with the tuned setting, which ``gpushare run`` reads from its record.

    In the background, so that they can be typed one after the other.
    """
    production = JobCommand(gpu=device.selector, production=tuned.name, detach=True, program=options.production)
    others = [
        JobCommand(gpu=device.selector, opportunistic=True, target=tuned.name, detach=True, program=command)
        for command in options.opportunistic
        for _ in range(options.copies)
    ]
    return [str(command) for command in (production, *others)]


@dataclass(frozen=True, kw_only=True)
class _Tried(Kept):
    """All that was measured of some jobs on a kind of GPU."""

    driver: str | None
    at: float
    figures: tuple[Figures, ...] = field(default=())


# Command lines may hold a secret: the file is named by their digest.
_TRIED: Final = RecordStore(_Tried, "tried", "the figures of an earlier tune", survives_reboot=True, mode=0o600)


def find_tried(host: Host, device: Device, options: TuneOptions) -> tuple[Figures, ...]:
    """Return the figures of an earlier search of the same jobs, with its date; none of another driver, or too old ones."""
    record = _TRIED.read(_TRIED.path(host, _record_key(device, options)))
    now = time.time()
    if record is None or record.driver != host.nvml.driver_version() or not 0 <= now - record.at < _MOST_DAYS * 86400:
        return ()
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at))
    return tuple(replace(figures, earlier=date) for figures in record.figures)


def keep_tried(host: Host, device: Device, options: TuneOptions, measured: Sequence[Figures]) -> None:
    """Keep what was measured, for a later search; a failure to do so changes nothing."""
    with contextlib.suppress(GpushareError):
        figures = tuple(replace(each, earlier=None) for each in measured)
        path = _TRIED.path(host, _record_key(device, options))
        _TRIED.write(_Tried(driver=host.nvml.driver_version(), at=time.time(), figures=figures, path=path))


def _record_key(device: Device, options: TuneOptions) -> str:
    """Return the name of the record of a search: by GPU model, commands and metrics."""
    metrics = (options.metric.pattern, options.metric.latency, options.opportunistic_metric.pattern)
    parts = (device.gpu.name, options.production, *options.opportunistic, options.copies, *metrics)
    words = [" ".join(map(repr, part)) if isinstance(part, (list, tuple)) else repr(part) for part in parts]
    return digest_of_words(words)
