"""``gpushare tune``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import Command, gpus_of, settings
from gpushare.errors import BadUsage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpushare.host.host import Host
    from gpushare.host.tuned import Tuned
    from gpushare.measure.controller import Judged, Search
    from gpushare.measure.pair import TuneOptions
    from gpushare.measure.tune import TrialReport, TuneReporter, TuneResult
    from gpushare.selection import Device


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune", cls=Command, short_help="Find the cap of a job beside a production job.")(tune)


def tune(
    production: Annotated[
        str, typer.Option("--production", metavar="CMD", help="The job that must keep its speed; it runs all the time.")
    ],
    opportunistic: Annotated[
        str,
        typer.Option("--opportunistic", metavar="CMD", help="The job that takes what is left; started anew per trial."),
    ],
    keep: Annotated[
        str, typer.Option("--keep", metavar="PCT", help="Share of its rate alone that production keeps.")
    ] = "97%",
    p99: Annotated[
        str | None, typer.Option("--p99", metavar="FACTOR", help="Its p99 latency stays within so much of alone: 1.1x.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="REGEX", help="The rate that both print: 'rate=([0-9.]+)'. [default: lines per second]"
        ),
    ] = None,
    opportunistic_metric: Annotated[
        str | None,
        typer.Option("--opportunistic-metric", metavar="REGEX", help="The opportunistic job's, if it differs."),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option("--latency", metavar="REGEX", help="The latency of a request. [default: latency_ms=NUMBER]"),
    ] = None,
    production_caps: Annotated[
        str | None,
        typer.Option(
            "--production-caps", metavar="LIST", help="Caps on production to try too, each beside the rest: 60,50."
        ),
    ] = None,
    caps: Annotated[
        str | None,
        typer.Option(
            "--caps", metavar="LIST", help="Caps to choose from. [default: 100,90,80,70,60,50,40,30,25,20,10]"
        ),
    ] = None,
    window: Annotated[
        str, typer.Option("--window", metavar="TIME", help="Length of one window of measuring.")
    ] = "1.5s",
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=2, help="Least windows together per trial.")] = 3,
    gpu: Annotated[
        str | None, typer.Option("-g", "--gpu", metavar="GPU", help="One GPU: index, UUID, PCI bus id.")
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Keep the result for run --opportunistic --for NAME.")
    ] = "production",
) -> Any:
    """Find the largest thread cap of an opportunistic job with which a production job keeps its speed.

    Both run under MPS. A trial pauses the opportunistic job again and again, and compares production beside it with
    production alone in one process. The start is cap 60 with low priority. The opportunistic job is started and killed
    many times, the safe way: stop, drain, kill. CMD runs without a shell; for one give: sh -c '...'.
    """
    from gpushare.host.tuned import check_job_name
    from gpushare.measure.metric import parse_metric
    from gpushare.measure.pair import TuneOptions
    from gpushare.selection import select_one

    check_job_name(name)
    options = TuneOptions(
        production=words_of("--production", production),
        opportunistic=words_of("--opportunistic", opportunistic),
        search=_search(keep, p99, caps, production_caps),
        metric=parse_metric(metric, latency=latency),
        opportunistic_metric=parse_metric(opportunistic_metric or metric),
        window_seconds=_window(window),
        rounds=rounds,
        # A percentile needs far more requests than a rate needs windows.
        most_rounds=(2 if p99 is None else 4) * rounds,
    )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    from gpushare.measure.tune import tune as measured

    with _reporter() as reporter:
        result = measured(host, device, options, reporter)
    return finished(host, device, options, result, name)


def _search(keep: str, p99: str | None, caps: str | None, production_caps: str | None) -> Search:
    from gpushare.measure.controller import GRID, Goal, Search, Setting

    grid = _percentages(caps) or GRID
    return Search(
        goal=Goal(keep=_keep(keep), p99_factor=None if p99 is None else _factor(p99)),
        grid=grid,
        start=Setting(threads=min(grid, key=lambda cap: abs(cap - 60.0))),
        production_caps=_percentages(production_caps),
    )


def _percentages(text: str | None) -> tuple[float, ...]:
    from gpushare.units import parse_thread_percentage

    return () if text is None else tuple(parse_thread_percentage(word) for word in text.split(","))


def _window(text: str) -> float:
    from gpushare.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds < 0.1:
        raise BadUsage(f"--window {text} is too short to measure in", "give at least 0.1s", code="bad_duration")
    return seconds


def words_of(option: str, command: str) -> list[str]:
    """Return the words of a command line as a shell splits them.

    Raises:
        BadUsage: there are none, or a quote is open.
    """
    import shlex

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadUsage(
            f"{option} '{command}' is no command line: {error}", "close the quote", code="bad_command"
        ) from None
    if not words:
        raise BadUsage(f"{option} names no program", f"give one: {option} 'python train.py'", code="no_command")
    return words


def _keep(text: str) -> float:
    from gpushare.units import parse_thread_percentage

    try:
        return parse_thread_percentage(text) / 100
    except BadUsage:
        raise BadUsage(
            f"--keep '{text}' is not a percentage above 0 and up to 100", "give one: --keep 97%", code="bad_keep"
        ) from None


def _factor(text: str) -> float:
    try:
        value = float(text.strip().lower().removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= 1000.0:
        raise BadUsage(f"--p99 '{text}' is not a factor from 1 up", "give one: --p99 1.1x", code="bad_factor")
    return value


@contextlib.contextmanager
def _reporter() -> Iterator[TuneReporter]:
    from gpushare.measure.tune import TuneReporter
    from gpushare.show.text import put
    from gpushare.show.tune import factor, share

    class Lines(TuneReporter):
        def doing(self, what: str) -> None:
            if not settings.quiet:
                put(sys.stderr, f"gpushare: {what}\n")

        def measured(self, report: TrialReport) -> None:
            if not settings.quiet:
                tail = "" if report.trial.p99 is None else f", p99 {factor(report.trial.p99)}"
                put(
                    sys.stderr,
                    f"gpushare:   production {share(report.trial.kept)} of alone{tail}, {report.rounds} windows\n",
                )

    yield Lines()


def finished(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str) -> Any:
    """Keep what was found and return it as the command's result."""
    from gpushare.host.tuned import keep_tuned
    from gpushare.show.tune import tune_result

    tuned = _tuned(host, device, options, result, name)
    data = {**_data(options, result, tuned), "gpu_name": device.gpu.name, "driver": host.nvml.driver_version()}
    notes = [] if result.warning is None else [result.warning]
    if tuned is not None:
        data["file"] = str(keep_tuned(host, tuned))
        notes.append(f"apply it: gpushare run --opportunistic --for {name} -- {options.opportunistic[0]} ...")
        if tuned.production_threads_percent is not None:
            notes.append(
                f"with production capped: gpushare run --production {name} --threads {tuned.production_threads_percent:g} -- ..."
            )
    elif result.outcome.best is None:
        notes.append("nothing is kept; pause the opportunistic job instead: gpushare run --opportunistic --pause")
    return tune_result(data, notes)


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
        "kept": round(one.kept, 4),
        "p99": None if one.p99 is None else round(one.p99, 4),
        "opportunistic_rate": one.opportunistic,
        "opportunistic_share": _share(one, result),
        "trials": one.trials,
        "meets": one.meets,
        "chosen": best is not None and one.setting == best.setting,
    }


def _trial(report: TrialReport) -> Mapping[str, Any]:
    return {
        "setting": report.trial.setting.title,
        "kept": report.kept.value,
        "kept_low": report.kept.low,
        "kept_high": report.kept.high,
        "p99": report.trial.p99,
        "rounds": report.rounds,
        "production_alone": report.alone_rate,
        "production_together": report.together_rate,
        "production_p99_alone": report.alone_p99,
        "production_p99_together": report.together_p99,
        "opportunistic_rate": report.trial.opportunistic,
    }
